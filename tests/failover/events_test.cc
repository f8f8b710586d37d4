// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Events of completion channels and asynchronous ones over a freeze: none is lost, none is invented, whether the process
// goes back or is restored. libmigr as a whole over model.cc, told what to do by a migrd that is this test.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <future>
#include <string>
#include <vector>

#include "migr/proc_wire.h"
#include "model.h"

namespace {

constexpr int kPatienceMs = 20'000, kSoonMs = 50;

bool readable(int fd, int ms) {
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&p, 1, ms) == 1 && (p.revents & POLLIN);
}

/// The other end of the library's connection.
class Migrd {
 public:
  static Migrd& get() {
    static Migrd one;
    return one;
  }
  migr_msg ask(std::uint16_t type, std::uint64_t arg = 0) {
    if (fd_ < 0) meet();
    migr_msg m{};
    m.version = MIGR_PROC_VERSION;
    m.type = type;
    m.seq = ++seq_;
    m.migration = 7;
    m.arg = arg;
    EXPECT_EQ(send(fd_, &m, sizeof m, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof m));
    const migr_msg reply = receive();
    EXPECT_EQ(reply.type, type | MIGR_REPLY);
    EXPECT_EQ(reply.status, 0) << reply.text;
    return reply;
  }
  void freeze() {
    ask(MIGR_MSG_SUSPEND);
    ask(MIGR_MSG_DRAIN, 1000);
    ask(MIGR_MSG_FREEZE);
    close(fd_);
    fd_ = -1;
  }
  void back() {
    open_gate();
    ask(MIGR_MSG_ROLLBACK);
  }
  void restored() {
    model_restored();
    open_gate();
    ask(MIGR_MSG_REBIND);
    ask(MIGR_MSG_RESUME);
  }

 private:
  Migrd() : listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    char name[] = "/tmp/events_test.XXXXXX";
    folder_ = mkdtemp(name);
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::snprintf(at.sun_path, sizeof at.sun_path, "%s/proc.sock", folder_.c_str());
    if (bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at) || listen(listener_, 1)) std::abort();
    setenv("MIGR_PROC_SOCKET", at.sun_path, 1);
  }
  ~Migrd() {
    unlink((folder_ + "/proc.sock").c_str());
    rmdir(folder_.c_str());
  }
  void meet() {
    ASSERT_TRUE(readable(listener_, kPatienceMs)) << "the library does not connect";
    fd_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    hello_ = receive();
    ASSERT_EQ(hello_.type, MIGR_MSG_HELLO);
  }
  void open_gate() {
    std::string gate = folder_ + "/" MIGR_PROC_GATE_PREFIX;
    for (const unsigned b : hello_.instance) {
      char hex[3];
      std::snprintf(hex, sizeof hex, "%02x", b);
      gate += hex;
    }
    close(open(gate.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    meet();
    unlink(gate.c_str());
  }
  migr_msg receive() {
    std::vector<char> packet(1 << 20);
    migr_msg m{};
    if (readable(fd_, kPatienceMs) && recv(fd_, packet.data(), packet.size(), 0) >= static_cast<ssize_t>(sizeof m)) std::memcpy(&m, packet.data(), sizeof m);
    return m;
  }
  const int listener_;
  int fd_ = -1;
  std::uint32_t seq_ = 0;
  std::string folder_;
  migr_msg hello_{};
};
Migrd& migrd = Migrd::get();  // before the first device is opened

enum class How { kBack, kRestored };

class Events : public ::testing::TestWithParam<How> {
 protected:
  void SetUp() override {
    model_async_events();
    ibv_device** list = ibv_get_device_list(nullptr);
    context_ = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    pd_ = ibv_alloc_pd(context_);
    channel_ = ibv_create_comp_channel(context_);
    for (int i = 0; i < 2; ++i) {
      cq_[i] = ibv_create_cq(context_, 64, &cq_[i], channel_, 0);
      qp_[i] = make_qp(cq_[i]);
    }
  }
  void TearDown() override {
    for (ibv_qp* qp : qp_) EXPECT_EQ(qp ? ibv_destroy_qp(qp) : 0, 0);
    for (ibv_cq* cq : cq_) EXPECT_EQ(ibv_destroy_cq(cq), 0);
    ibv_destroy_comp_channel(channel_);
    ibv_dealloc_pd(pd_);
    ibv_close_device(context_);
    EXPECT_EQ(model_unbalanced(), 0u) << "libibverbs would wait for acknowledgements for ever";
  }

  ibv_qp* make_qp(ibv_cq* cq) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    return ibv_create_qp(pd_, &init);
  }
  static void to(ibv_qp* qp, ibv_qp_state state) {
    ibv_qp_attr attr{};
    attr.qp_state = state;
    attr.port_num = 1;
    EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT), 0);
  }
  /// Something completes on `cq`.
  void complete(ibv_cq* cq) {
    ibv_qp* qp = make_qp(cq);
    to(qp, IBV_QPS_INIT);
    ibv_recv_wr wr{}, *bad;
    EXPECT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
    to(qp, IBV_QPS_ERR);
    EXPECT_EQ(ibv_destroy_qp(qp), 0);
  }
  void move() {
    migrd.freeze();
    GetParam() == How::kBack ? migrd.back() : migrd.restored();
  }
  /// The next event of the channel, acknowledged. null: there is none
  ibv_cq* next() {
    if (!readable(channel_->fd, kSoonMs)) return nullptr;
    ibv_cq* cq;
    void* context;
    EXPECT_EQ(ibv_get_cq_event(channel_, &cq, &context), 0);
    EXPECT_EQ(context, cq == cq_[0] ? &cq_[0] : &cq_[1]);
    ibv_ack_cq_events(cq, 1);
    return cq;
  }

  ibv_context* context_;
  ibv_pd* pd_;
  ibv_comp_channel* channel_;
  ibv_cq* cq_[2];
  ibv_qp* qp_[2];
};

TEST_P(Events, OfTwoArmedCqsOnlyTheOneThatHadAnEventHasIt) {
  for (ibv_cq* cq : cq_) ibv_req_notify_cq(cq, 0);
  complete(cq_[0]);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr) << "an event that never was";
  complete(cq_[0]);  // its event was the last that it owed
  EXPECT_EQ(next(), nullptr) << "it was not armed";
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]) << "it is armed as it was";
}

TEST_P(Events, TwoUnreadOnesOfOneCqStayTwo) {
  for (int i = 0; i < 2; ++i) {
    ibv_req_notify_cq(cq_[0], 0);
    complete(cq_[0]);
  }
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
}

TEST_P(Events, ArmedAgainBehindAnUnreadOneItIsArmedStill) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  ibv_req_notify_cq(cq_[0], 0);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

// The second arming was for nothing, or the event was of the first and the second still holds: only the device knows.
TEST_P(Events, ArmedTwiceForOneEventItIsNotArmed) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  move();
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
}

TEST_P(Events, TheyOutliveTwoMoves) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  ibv_req_notify_cq(cq_[1], 0);
  move();
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]);
}

TEST_P(Events, WhoWaitsForOneGetsTheNext) {
  auto waits = std::async(std::launch::async, [this] {
    ibv_cq* cq;
    void* context;
    EXPECT_EQ(ibv_get_cq_event(channel_, &cq, &context), 0) << std::strerror(errno);
    ibv_ack_cq_events(cq, 1);
    return cq;
  });
  ibv_req_notify_cq(cq_[1], 0);
  move();
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  complete(cq_[1]);
  EXPECT_EQ(waits.get(), cq_[1]);
}

/* ---- asynchronous ------------------------------------------------------------- */

TEST_P(Events, UnreadAsynchronousOnesAreThereInOrder) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);  // LAST_WQE_REACHED
  model_raise(context_, IBV_EVENT_PORT_ERR, 3);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  epoll_event watched{};
  watched.events = EPOLLIN;
  watched.data.u64 = 0x1234567890;
  ASSERT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, context_->async_fd, &watched), 0);
  const int fd = context_->async_fd;
  move();
  EXPECT_EQ(context_->async_fd, fd);
  ASSERT_TRUE(readable(fd, 0));
  epoll_event seen{};
  ASSERT_EQ(epoll_wait(epoll, &seen, 1, 0), 1);
  EXPECT_EQ(seen.data.u64, 0x1234567890u);
  ibv_async_event event{};
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event.element.qp, qp_[0]);
  ASSERT_TRUE(readable(fd, 0));
  ibv_async_event second{};
  ASSERT_EQ(ibv_get_async_event(context_, &second), 0);
  EXPECT_EQ(second.event_type, IBV_EVENT_PORT_ERR);
  EXPECT_EQ(second.element.port_num, 3);
  ibv_ack_async_event(&second);
  EXPECT_FALSE(readable(fd, kSoonMs));
  EXPECT_EQ(epoll_wait(epoll, &seen, 1, 0), 0);
  // Destroying waits for the application, as ever.
  auto destroyed = std::async(std::launch::async, [this] { return ibv_destroy_qp(qp_[0]); });
  EXPECT_EQ(destroyed.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  ibv_ack_async_event(&event);
  EXPECT_EQ(destroyed.get(), 0);
  qp_[0] = nullptr;
  // And what comes later comes as ever.
  model_raise(context_, IBV_EVENT_PORT_ERR, 4);
  ASSERT_TRUE(readable(fd, kSoonMs));
  ASSERT_EQ(epoll_wait(epoll, &seen, 1, 0), 1);
  ASSERT_EQ(ibv_get_async_event(context_, &second), 0);
  EXPECT_EQ(second.element.port_num, 4);
  close(epoll);
}

TEST_P(Events, UnreadAsynchronousOnesGoWithTheirObject) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);
  move();
  ASSERT_TRUE(readable(context_->async_fd, 0));
  EXPECT_EQ(ibv_destroy_qp(qp_[0]), 0);
  qp_[0] = nullptr;
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs));
}

TEST_P(Events, WhoWaitsForAnAsynchronousOneGetsTheNext) {
  auto waits = std::async(std::launch::async, [this] {
    ibv_async_event event{};
    EXPECT_EQ(ibv_get_async_event(context_, &event), 0) << std::strerror(errno);
    return event.element.port_num;
  });
  move();
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_raise(context_, IBV_EVENT_PORT_ERR, 5);
  EXPECT_EQ(waits.get(), 5);
}

// A QP in ERR was told of; that a new one is put there, too, is no news. Nor is what QPs of libmigr's own say.
TEST_P(Events, OfClosedPathsNobodyHears) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);
  ibv_async_event event{};
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  ibv_ack_async_event(&event);
  ibv_req_notify_cq(cq_[1], 0);
  complete(cq_[1]);  // makes one of libmigr's own
  move();
  EXPECT_EQ(next(), cq_[1]);
  model_raise(context_, IBV_EVENT_PORT_ERR, 6);  // behind whatever they have said
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs));
}

INSTANTIATE_TEST_SUITE_P(, Events, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });

}  // namespace
