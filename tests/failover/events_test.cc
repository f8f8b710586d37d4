// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Events of completion channels and asynchronous ones over a freeze: none is lost, none is invented, whether the process
// goes back or is restored. libmigr as a whole over model.cc, told what to do by a migrd that is this test.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <ucontext.h>
#include <unistd.h>

#include <endian.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "migr/proc_wire.h"
#include "model.h"
#include "uapi/migr.h"

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
    const migr_msg reply = try_to(type, arg);
    EXPECT_EQ(reply.status, 0) << reply.text;
    return reply;
  }
  migr_msg try_to(std::uint16_t type, std::uint64_t arg = 0) { return about(nullptr, type, arg); }
  /// @param qp  null: no records
  migr_msg about(const ibv_qp* qp, std::uint16_t type, std::uint64_t arg = 0) {
    migr_qp_ref ref{};
    if (!qp) return say(type, arg, nullptr, 0);
    ref.vqpn = qp->qp_num;
    return say(type, arg, &ref, sizeof ref);
  }
  /// @param bytes  of its one record; 0: none
  migr_msg say(std::uint16_t type, std::uint64_t arg, const void* record, std::size_t bytes) { return say_all(type, arg, record, bytes, bytes ? 1 : 0); }
  template <class T>
  migr_msg say_all(std::uint16_t type, std::uint64_t arg, const std::vector<T>& records) {
    return say_all(type, arg, records.data(), sizeof(T), static_cast<std::uint32_t>(records.size()));
  }
  migr_msg say_all(std::uint16_t type, std::uint64_t arg, const void* records, std::size_t each, std::uint32_t count) {
    const std::size_t bytes = each * count;
    if (fd_ < 0) meet();
    migr_msg m{};
    m.count = count;
    m.record_size = static_cast<std::uint32_t>(each);
    m.version = MIGR_PROC_VERSION;
    m.type = type;
    m.seq = ++seq_;
    m.migration = 7;
    m.arg = arg;
    std::vector<char> packet(sizeof m + bytes);
    std::memcpy(packet.data(), &m, sizeof m);
    if (bytes) std::memcpy(packet.data() + sizeof m, records, bytes);
    EXPECT_EQ(send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
    const migr_msg reply = receive(fd_, &records_);
    EXPECT_EQ(reply.type, type | MIGR_REPLY);
    return reply;
  }
  /// Of the last reply.
  template <class T>
  std::vector<T> records() const {
    std::vector<T> out(records_.size() / sizeof(T));
    std::memcpy(out.data(), records_.data(), out.size() * sizeof(T));
    return out;
  }
  /// The first one of them.
  template <class T>
  T record() const {
    const auto all = records<T>();
    EXPECT_FALSE(all.empty());
    return all.empty() ? T{} : all[0];
  }
  void freeze() {
    ask(MIGR_MSG_SUSPEND);
    drained();
  }
  void drained() {
    ask(MIGR_MSG_DRAIN, 1000);
    ask(MIGR_MSG_FREEZE);
    hung_up();
  }
  /// The library does, when it has answered FREEZE.
  void hung_up() {
    close(fd_);
    fd_ = -1;
  }
  /// It is restored, and connects.
  void appears() {
    model_restored();
    open_gate();
  }
  void back() {
    open_gate();
    ask(MIGR_MSG_ROLLBACK);
  }
  void restored() {
    appears();
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
    std::thread([this] { answer(); }).detach();
  }
  ~Migrd() {
    unlink((folder_ + "/proc.sock").c_str());
    rmdir(folder_.c_str());
  }
  /// Takes connections: one that begins with HELLO is for meet(), one with a question is told that all is as it was.
  void answer() {
    for (;;) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      migr_msg m = receive(fd);
      if (m.type == MIGR_MSG_HELLO) {
        std::lock_guard guard(lock_);
        hellos_.emplace_back(fd, m);
        met_.notify_all();
        continue;
      }
      m.type |= MIGR_REPLY;
      m.status = ENOENT;
      m.count = m.record_size = 0;
      (void)!::send(fd, &m, sizeof m, MSG_NOSIGNAL);
      close(fd);
    }
  }
  void meet() {
    std::unique_lock guard(lock_);
    ASSERT_TRUE(met_.wait_for(guard, std::chrono::milliseconds(kPatienceMs), [this] { return !hellos_.empty(); })) << "the library does not connect";
    std::tie(fd_, hello_) = hellos_.front();
    hellos_.pop_front();
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
  static migr_msg receive(int fd, std::vector<char>* records = nullptr) {
    std::vector<char> packet(1 << 20);
    migr_msg m{};
    const ssize_t n = readable(fd, kPatienceMs) ? recv(fd, packet.data(), packet.size(), 0) : -1;
    if (n < static_cast<ssize_t>(sizeof m)) return m;
    std::memcpy(&m, packet.data(), sizeof m);
    if (records) records->assign(packet.begin() + sizeof m, packet.begin() + n);
    return m;
  }
  const int listener_;
  int fd_ = -1;
  std::uint32_t seq_ = 0;
  std::vector<char> records_;
  std::string folder_;
  migr_msg hello_{};
  std::mutex lock_;
  std::condition_variable met_;
  std::deque<std::pair<int, migr_msg>> hellos_;
};
Migrd& migrd = Migrd::get();  // before the first device is opened

enum class How { kBack,
                 kRestored };

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

  ibv_qp* make_qp(ibv_cq* cq, std::uint32_t sends = 4) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {.max_send_wr = sends, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
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
  void post_receive(int i) const {
    ibv_recv_wr wr{}, *bad;
    EXPECT_EQ(ibv_post_recv(qp_[i], &wr, &bad), 0);
  }
  void arrives(int i, bool solicited) const {
    post_receive(i);
    model_arrives(qp_[i], solicited);
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

// While the device is asked threads go on.
TEST_P(Events, ArmedWhileItIsBeingFrozenItIsArmed) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  auto armed = std::async(std::launch::async, [this, before = model_receives_flushed()] {
    for (int ms = 0; model_receives_flushed() == before && ms < kPatienceMs; ++ms) usleep(1000);
    return ibv_req_notify_cq(cq_[0], 0);
  });
  move();
  EXPECT_EQ(armed.get(), 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Events, OfTwoThatNobodyIsSureOfOnlyTheArmedOneIsArmed) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  ibv_req_notify_cq(cq_[1], 0);
  complete(cq_[1]);
  ibv_req_notify_cq(cq_[1], 0);
  move();
  EXPECT_EQ(next(), cq_[1]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]);
}

// A QP that was destroyed leaves them behind.
TEST_P(Events, OfACqOnWhichThereIsNoQpTheyAreThere) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  for (ibv_qp*& qp : qp_) EXPECT_EQ(ibv_destroy_qp(std::exchange(qp, nullptr)), 0);
  EXPECT_EQ(ibv_dealloc_pd(pd_), 0);
  move();
  pd_ = ibv_alloc_pd(context_);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
}

TEST_P(Events, ACqOnWhichThereIsNoQpStaysArmedBehindAnUnreadOne) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  ibv_req_notify_cq(cq_[0], 0);
  EXPECT_EQ(ibv_destroy_qp(std::exchange(qp_[0], nullptr)), 0);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  ibv_wc wc[3];
  EXPECT_EQ(ibv_poll_cq(cq_[0], 3, wc), 2) << "what is libmigr's own nobody sees";
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

TEST_P(Events, ArmedForAllAndThenForSolicitedOnesItIsArmedForAll) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  arrives(0, false);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Events, ArmedForSolicitedOnesItIsForThoseOnly) {
  ibv_req_notify_cq(cq_[0], 0);
  arrives(0, false);
  EXPECT_EQ(next(), cq_[0]);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  arrives(0, false);
  EXPECT_EQ(next(), nullptr);
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]);
}

// Whether it is the device does not tell: what libmigr lets complete is not solicited.
TEST_P(Events, ArmedForSolicitedOnesBehindAnUnreadOneItIsArmedStill) {
  ibv_req_notify_cq(cq_[0], 1);
  arrives(0, true);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  EXPECT_EQ(next(), cq_[0]);
  arrives(0, false);
  EXPECT_EQ(next(), nullptr);
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]);
}

TEST_P(Events, ArmedForSolicitedOnesBehindAnUnreadOneOfAllItIsArmedStill) {
  ibv_req_notify_cq(cq_[0], 0);
  arrives(0, false);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]);
}

// Whoever finds nothing, arms it and goes to sleep while it is frozen; the device is told of that later.
TEST_P(Events, ArmedWhileItIsFrozenItHasTheEventOfWhatComesThen) {
  post_receive(0);
  migrd.freeze();
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq_[0], 1, &wc), 0);
  EXPECT_EQ(ibv_req_notify_cq(cq_[0], 0), 0);
  model_arrives(qp_[0], false);
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  EXPECT_EQ(ibv_poll_cq(cq_[0], 1, &wc), 1);
  EXPECT_EQ(wc.opcode, IBV_WC_RECV);
}

/// A message comes while the device is asked whether a CQ is armed: when the channel of cq_[0] has been read.
class Late : public Events {
 protected:
  void SetUp() override {
    Events::SetUp();
    asked_channel_ = ibv_create_comp_channel(context_);
    asked_ = ibv_create_cq(context_, 64, nullptr, asked_channel_, 0);
    for (int i = 0; i < 2; ++i) ibv_req_notify_cq(asked_, 0);
    complete(asked_);
    ibv_cq* cq;
    void* context;
    ASSERT_EQ(ibv_get_cq_event(asked_channel_, &cq, &context), 0);
    ibv_ack_cq_events(cq, 1);
  }
  void TearDown() override {
    EXPECT_FALSE(readable(asked_channel_->fd, 0));
    EXPECT_EQ(ibv_destroy_cq(asked_), 0);
    ibv_destroy_comp_channel(asked_channel_);
    Events::TearDown();
  }
  void move_while_one_arrives(bool solicited) {
    post_receive(0);
    model_arrives_at_flush(qp_[0], solicited);
    move();
  }
  ibv_comp_channel* asked_channel_;
  ibv_cq* asked_;
};

TEST_P(Late, OneHasItsEvent) {
  ibv_req_notify_cq(cq_[0], 0);
  move_while_one_arrives(false);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Late, OneThatIsSolicitedHasItsEvent) {
  ibv_req_notify_cq(cq_[0], 1);
  move_while_one_arrives(true);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Late, OneThatIsNotSolicitedHasNone) {
  ibv_req_notify_cq(cq_[0], 1);
  move_while_one_arrives(false);
  EXPECT_EQ(next(), nullptr) << "an event that never was";
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]) << "it is armed as it was";
}

/* ---- asynchronous ------------------------------------------------------------- */

class Signals : public Events {};

TEST_F(Signals, OfARestoredProcessNameTheDescriptor) {
  const int signal = SIGRTMIN;
  sigset_t those;
  sigemptyset(&those);
  sigaddset(&those, signal);
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, &those, nullptr), 0);
  const f_owner_ex owner{F_OWNER_TID, gettid()};
  const int elsewhere = dup(channel_->fd);  // as CRIU
  ASSERT_EQ(fcntl(elsewhere, F_SETSIG, signal), 0);
  ASSERT_EQ(fcntl(elsewhere, F_SETOWN_EX, &owner), 0);
  ASSERT_EQ(fcntl(elsewhere, F_SETFL, fcntl(elsewhere, F_GETFL) | O_ASYNC), 0);
  migrd.freeze();
  migrd.restored();
  EXPECT_EQ(ibv_req_notify_cq(cq_[0], 0), 0);
  complete(cq_[0]);
  siginfo_t info{};
  const timespec patience{kPatienceMs / 1000, 0};
  EXPECT_EQ(sigtimedwait(&those, &info, &patience), signal);
  EXPECT_EQ(info.si_fd, channel_->fd);
  EXPECT_EQ(next(), cq_[0]);
  fcntl(elsewhere, F_SETFL, fcntl(elsewhere, F_GETFL) & ~O_ASYNC);
  close(elsewhere);
  ibv_wc wc{};
  while (ibv_poll_cq(cq_[0], 1, &wc) == 1) continue;
}

TEST_P(Events, UnreadAsynchronousOnesAreThereInOrder) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);  // LAST_WQE_REACHED
  model_raise(context_, IBV_EVENT_PORT_ACTIVE, 3);
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
  EXPECT_EQ(second.event_type, IBV_EVENT_PORT_ACTIVE);
  EXPECT_EQ(second.element.port_num, 3);
  ibv_ack_async_event(&second);
  EXPECT_FALSE(readable(fd, kSoonMs));
  EXPECT_EQ(epoll_wait(epoll, &seen, 1, 0), 0);
  // Destroying waits for the application, as ever.
  auto destroyed = std::async(std::launch::async, [this] { return ibv_destroy_qp(qp_[0]); });
  EXPECT_EQ(destroyed.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(ibv_query_qp(qp_[0], &attr, IBV_QP_STATE, &init), 0) << "its handler may ask for it";
  EXPECT_EQ(attr.qp_state, IBV_QPS_ERR);
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

TEST_P(Events, WhileSomeAreUnreadObjectsCanBeMade) {
  model_raise(context_, IBV_EVENT_PORT_ACTIVE, 1);
  move();
  const int fd = context_->async_fd;
  ibv_cq* const cq = ibv_create_cq(context_, 1, nullptr, nullptr, 0);
  ASSERT_NE(cq, nullptr) << std::strerror(errno);
  ibv_qp* const qp = make_qp(cq);
  ASSERT_NE(qp, nullptr) << std::strerror(errno);
  EXPECT_EQ(context_->async_fd, fd);
  EXPECT_TRUE(readable(fd, 0));
  EXPECT_EQ(ibv_destroy_qp(qp), 0);
  EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

// The other host's is up.
TEST_P(Events, ThatAPortIsDownIsSaidOnItsHostOnly) {
  model_raise(context_, IBV_EVENT_PORT_ERR, 3);
  model_raise(context_, IBV_EVENT_PORT_ACTIVE, 4);
  move();
  ibv_async_event event{};
  if (GetParam() == How::kBack) {
    ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
    EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
    EXPECT_EQ(event.element.port_num, 3);
  }
  ASSERT_TRUE(readable(context_->async_fd, 0));
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ACTIVE);
  EXPECT_EQ(event.element.port_num, 4);
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs));
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

TEST_P(Events, RegisteredMemoryThatIsMappedNoMoreIsRefusedAndTheEventsAreThere) {
  const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ibv_mr* const mr = ibv_reg_mr(pd_, memory, bytes, IBV_ACCESS_LOCAL_WRITE);
  munmap(memory, bytes);
  const migr_msg said = migrd.try_to(MIGR_MSG_DESCRIBE);
  EXPECT_EQ(said.status, ENOMEM) << "before anything is stopped: " << said.text;
  for (ibv_cq* cq : cq_) ibv_req_notify_cq(cq, 0);
  complete(cq_[0]);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  const migr_msg reply = migrd.try_to(MIGR_MSG_FREEZE);
  EXPECT_EQ(reply.status, ENOMEM) << reply.text;
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]) << "it was armed";
  ibv_dereg_mr(mr);
  move();
}

TEST_P(Events, MemoryThatIsBeingGivenBackIsWaitedFor) {
  char memory[64];
  ibv_mr* const mr = ibv_reg_mr(pd_, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(mr, nullptr);
  model_hold_registrations(0, true);
  auto given_back = std::async(std::launch::async, [&] { return ibv_dereg_mr(mr); });
  EXPECT_EQ(given_back.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  auto made = std::async(std::launch::async, [&] { return ibv_create_cq(context_, 1, nullptr, nullptr, 0); });
  EXPECT_EQ(made.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  auto frozen = std::async(std::launch::async, [&] { return migrd.try_to(MIGR_MSG_FREEZE).status; });
  EXPECT_EQ(frozen.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(frozen.get(), 0);
  EXPECT_EQ(given_back.get(), 0);
  migrd.hung_up();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(ibv_destroy_cq(made.get()), 0);
}

// Other calls of the application need not wait for it; FREEZE has to.
TEST_P(Events, MemoryThatIsBeingRegisteredIsWaitedFor) {
  model_hold_registrations(0, true);
  char memory[64];
  auto registered = std::async(std::launch::async, [&] { return ibv_reg_mr(pd_, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE); });
  EXPECT_EQ(registered.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  auto made = std::async(std::launch::async, [&] { return ibv_create_cq(context_, 1, nullptr, nullptr, 0); });
  EXPECT_EQ(made.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_FREEZE).status, EAGAIN) << "it does not come back";
  auto frozen = std::async(std::launch::async, [&] { return migrd.try_to(MIGR_MSG_FREEZE).status; });
  EXPECT_EQ(frozen.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(frozen.get(), 0);
  ibv_mr* const mr = registered.get();
  ASSERT_NE(mr, nullptr);
  migrd.hung_up();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_EQ(ibv_destroy_cq(made.get()), 0);
}

class Handles : public Events {};

// It would be missing on the other host.
TEST_F(Handles, ThatAreBeingMadeAreWaitedFor) {
  model_hold_registrations(0, true);
  auto made = std::async(std::launch::async, [&] {
    ibv_ah_attr to{};
    to.port_num = 1;
    return ibv_create_ah(pd_, &to);
  });
  EXPECT_EQ(made.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  auto frozen = std::async(std::launch::async, [&] { return migrd.try_to(MIGR_MSG_FREEZE).status; });
  EXPECT_EQ(frozen.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(frozen.get(), 0);
  ibv_ah* const ah = made.get();
  ASSERT_NE(ah, nullptr);
  migrd.hung_up();
  migrd.back();
  EXPECT_EQ(ibv_destroy_ah(ah), 0);
}

/* ---- completions of an ibv_cq_ex ------------------------------------------------- */

/// A QP that receives on one, and one of another NIC that sends to it.
class Pollers : public Events {
 protected:
  static constexpr std::uint32_t kBytes = 24;

  void SetUp() override {
    Events::SetUp();
    ibv_device** list = ibv_get_device_list(nullptr);
    other_ = ibv_open_device(list[3]);  // b0
    ibv_free_device_list(list);
    other_pd_ = ibv_alloc_pd(other_);
    other_cq_ = ibv_create_cq(other_, 64, nullptr, nullptr, 0);
    ibv_cq_init_attr_ex attr{};
    attr.cqe = 64;
    attr.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP;
    ex_ = ibv_create_cq_ex(context_, &attr);
    mr_ = ibv_reg_mr(pd_, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE);
    to_ = make_qp(ibv_cq_ex_to_cq(ex_));
    std::swap(pd_, other_pd_);
    from_ = make_qp(other_cq_);
    std::swap(pd_, other_pd_);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
  }
  void TearDown() override {
    for (ibv_qp* qp : {to_, from_}) EXPECT_EQ(ibv_destroy_qp(qp), 0);
    EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(ex_)), 0);
    EXPECT_EQ(ibv_destroy_cq(other_cq_), 0);
    ibv_dereg_mr(mr_);
    ibv_dealloc_pd(other_pd_);
    ibv_close_device(other_);
    Events::TearDown();
  }
  static void connect(ibv_qp* qp, const ibv_qp* peer, ibv_context* its) {
    answer(qp, peer, its);
    EXPECT_EQ(go_to_rts(qp, 0), 0);
  }
  /// From now on it does, in RTR.
  static void answer(ibv_qp* qp, const ibv_qp* peer, ibv_context* its, std::uint32_t rq_psn = 0) {
    to(qp, IBV_QPS_INIT);
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = peer->qp_num;
    a.rq_psn = rq_psn;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    EXPECT_EQ(ibv_query_gid(its, 1, 0, &a.ah_attr.grh.dgid), 0);
    EXPECT_EQ(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
  }
  static int go_to_rts(ibv_qp* qp, std::uint32_t sq_psn, std::uint8_t timeout = 0) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = sq_psn;
    a.timeout = timeout;
    return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  void send(std::uint32_t n) {
    ibv_sge into{reinterpret_cast<std::uintptr_t>(memory_), sizeof memory_, mr_->lkey};
    ibv_recv_wr receive{.wr_id = 100 + n, .next = nullptr, .sg_list = &into, .num_sge = 1}, *bad_receive;
    ASSERT_EQ(ibv_post_recv(to_, &receive, &bad_receive), 0);
    std::uint8_t data[2 * kBytes] = {};
    ibv_sge of{reinterpret_cast<std::uintptr_t>(data), kBytes + n, 0};
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    wr.imm_data = htobe32(7000 + n);
    wr.sg_list = &of;
    wr.num_sge = 1;
    ASSERT_EQ(ibv_post_send(from_, &wr, &bad), 0);
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  void expect(std::uint32_t n) {
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    EXPECT_EQ(ex_->wr_id, 100u + n);
    EXPECT_EQ(ibv_wc_read_opcode(ex_), IBV_WC_RECV);
    EXPECT_EQ(ibv_wc_read_byte_len(ex_), kBytes + n);
    EXPECT_EQ(be32toh(ibv_wc_read_imm_data(ex_)), 7000u + n);
    EXPECT_EQ(ibv_wc_read_qp_num(ex_), to_->qp_num);
    EXPECT_EQ(ibv_wc_read_src_qp(ex_), from_->qp_num);
    EXPECT_EQ(ibv_wc_read_wc_flags(ex_), unsigned{IBV_WC_WITH_IMM});
  }
  /// Two in one session, from `n` on; then it is empty.
  void expect_two(std::uint32_t n) {
    ibv_poll_cq_attr attr{};
    ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
    expect(n);
    ASSERT_EQ(ibv_next_poll(ex_), 0);
    expect(n + 1);
    EXPECT_EQ(ibv_next_poll(ex_), ENOENT);
    ibv_end_poll(ex_);
    EXPECT_EQ(ibv_start_poll(ex_, &attr), ENOENT);
  }
  void two(std::uint32_t n) {
    send(n);
    send(n + 1);
  }

  ibv_context* other_;
  ibv_pd* other_pd_;
  ibv_cq* other_cq_;
  ibv_cq_ex* ex_;
  ibv_mr* mr_;
  ibv_qp *to_, *from_;
  std::uint8_t memory_[4096];
};

TEST_P(Pollers, ReadAllFieldsWhileSuspendedAndAfter) {
  two(0);
  expect_two(0);
  two(2);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  expect_two(2);
  migrd.ask(MIGR_MSG_ROLLBACK);
  two(4);
  move();
  expect_two(4);
  two(6);
  expect_two(6);
}

// Of a family that can be migrated the library polls, too, as long as a QP on it is suspended.
TEST_P(Pollers, OfOneThreadAreWhatTheDeviceIsToldOnlyWhereNothingIsMigrated) {
  ibv_cq_init_attr_ex attr{};
  attr.cqe = 1;
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
  for (const bool foreign : {false, true}) {
    model_make_foreign(0, 0, foreign);
    ibv_cq_ex* const cq = ibv_create_cq_ex(context_, &attr);
    EXPECT_EQ(model_cq_flags(), foreign ? unsigned{IBV_CREATE_CQ_ATTR_SINGLE_THREADED} : 0u);
    EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
  }
  model_make_foreign(0, 0, false);
}

TEST_P(Pollers, WhoCanSendNothingHasNothingToDrain) {
  ASSERT_EQ(ibv_destroy_qp(to_), 0);
  to_ = make_qp(ibv_cq_ex_to_cq(ex_), 0);
  to(from_, IBV_QPS_RESET);
  connect(to_, from_, other_);
  connect(from_, to_, context_);
  move();
  two(0);
  expect_two(0);
}

// As librxe locks its CQ for as long: what its thread asks libmigr for meanwhile does not wait for who waits for its end.
TEST_P(Pollers, ASessionThatResizingWaitsForMayCallTheLibrary) {
  two(0);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  expect(0);
  auto resized = std::async(std::launch::async, [this] { return ibv_resize_cq(ibv_cq_ex_to_cq(ex_), 128); });
  usleep(kSoonMs * 1000);
  auto asked = std::async(std::launch::async, [this] { return ibv_dereg_mr(ibv_reg_mr(pd_, memory_, sizeof memory_, 0)); });
  EXPECT_EQ(asked.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
  ASSERT_EQ(ibv_next_poll(ex_), 0);
  expect(1);
  ibv_end_poll(ex_);
  EXPECT_EQ(resized.get(), 0);
  EXPECT_EQ(asked.get(), 0);
}

TEST_P(Pollers, ASessionIsOneThreadsAlsoWhileSuspended) {
  two(0);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  auto other = std::async(std::launch::async, [this, attr]() mutable {
    if (ibv_start_poll(ex_, &attr)) return std::uint64_t{0};
    const std::uint64_t wr_id = ex_->wr_id;
    ibv_end_poll(ex_);
    return wr_id;
  });
  EXPECT_EQ(other.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  expect(0);
  ibv_end_poll(ex_);
  EXPECT_EQ(other.get(), 101u);
  migrd.ask(MIGR_MSG_ROLLBACK);
  two(2);
  move();
  expect_two(2);
}

/* ---- memory windows that are unbound ----------------------------------------------------- */

class Windows : public Pollers {
 protected:
  void SetUp() override {
    Pollers::SetUp();
    mw_ = ibv_alloc_mw(other_pd_, IBV_MW_TYPE_1);
    ASSERT_NE(mw_, nullptr);
    window_mr_ = ibv_reg_mr(other_pd_, window_memory_, sizeof window_memory_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND);
    bind(window_mr_, 1);
    completes(1);
    EXPECT_EQ(model_windows_bound(), 1u);
  }
  void TearDown() override {
    EXPECT_EQ(ibv_dealloc_mw(mw_), 0);
    ibv_dereg_mr(window_mr_);
    Pollers::TearDown();
  }
  /// @param mr  null: to nothing
  void bind(ibv_mr* mr, std::uint64_t wr_id) const { bind(from_, mr, wr_id, sizeof window_memory_); }
  void bind(ibv_qp* by, ibv_mr* mr, std::uint64_t wr_id, std::size_t bytes) const {
    ibv_mw_bind b{};
    b.wr_id = wr_id;
    b.send_flags = IBV_SEND_SIGNALED;
    if (mr) b.bind_info = {.mr = mr, .addr = reinterpret_cast<std::uintptr_t>(window_memory_), .length = bytes, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
    const std::uint32_t before = mw_->rkey;
    EXPECT_EQ(ibv_bind_mw(by, mw_, &b), 0);
    EXPECT_EQ(mw_->rkey, ibv_inc_rkey(before));
    EXPECT_EQ(b.bind_info.mr, mr);
  }
  /// To more than is registered: the device refuses, and the application knows the key of before.
  void bind_too_much(ibv_qp* by, std::uint64_t wr_id) const {
    const std::uint32_t before = mw_->rkey;
    bind(by, window_mr_, wr_id, sizeof window_memory_ + 1);
    mw_->rkey = before;
  }
  void completes(std::uint64_t wr_id, ibv_wc_status status = IBV_WC_SUCCESS) const {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_EQ(wc.status, status);
  }
  /// Another one of the windows' PD.
  ibv_qp* make_second() {
    std::swap(pd_, other_pd_);
    ibv_qp* const qp = make_qp(other_cq_);
    std::swap(pd_, other_pd_);
    connect(qp, to_, context_);
    return qp;
  }

  ibv_mw* mw_;
  ibv_mr* window_mr_;
  std::uint8_t window_memory_[64];
};

TEST_P(Windows, OneThatIsBoundIsSoAfterTheMove) {
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
}

TEST_P(Windows, OneThatIsBoundToNothingStaysUnbound) {
  bind(nullptr, 2);
  completes(2);
  EXPECT_EQ(model_windows_bound(), 0u);
  move();
  EXPECT_EQ(model_windows_bound(), 0u);
  bind(window_mr_, 3);
  completes(3);
  EXPECT_EQ(model_windows_bound(), 1u);
}

/// Of type 2, which a message of the partner's ends.
struct Ended {
  Ended(ibv_qp* of, ibv_pd* pd, void* memory, std::size_t bytes)
      : qp(of), mr(ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND)), mw(ibv_alloc_mw(pd, IBV_MW_TYPE_2)) {
    bind();
  }
  ~Ended() {
    ibv_dealloc_mw(mw);
    ibv_dereg_mr(mr);
  }
  void bind() const {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = kBound;
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = {.mr = mr, .addr = reinterpret_cast<std::uintptr_t>(mr->addr), .length = mr->length, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}};
    EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
    mw->rkey = wr.bind_mw.rkey;
  }
  /// @param key  as `from` may call it
  void end(ibv_qp* from, std::uint32_t key) const {
    ibv_recv_wr receive{.wr_id = kEnded, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad_receive;
    EXPECT_EQ(ibv_post_recv(qp, &receive, &bad_receive), 0);
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_SEND_WITH_INV;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.invalidate_rkey = key;
    EXPECT_EQ(ibv_post_send(from, &wr, &bad), 0);
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(from->send_cq, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  /// @param told  as the receive is to say it was called
  void expect_told(ibv_cq* cq, std::uint32_t told) const {
    ibv_wc wc{};
    EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
    EXPECT_EQ(wc.wr_id, kEnded);
    EXPECT_EQ(wc.invalidated_rkey, told);
    EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 0);
  }
  static constexpr std::uint64_t kBound = 900, kEnded = 901;
  ibv_qp* const qp;
  ibv_mr* const mr;
  ibv_mw* const mw;
};

// Nobody has polled for it when the move begins.
TEST_P(Windows, OneThatThePartnerHasEndedStaysUnbound) {
  ibv_cq* const cq = ibv_cq_ex_to_cq(ex_);
  const Ended window(to_, pd_, memory_, sizeof memory_);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  EXPECT_EQ(model_windows_bound(), 2u);
  window.end(from_, window.mw->rkey);
  EXPECT_EQ(model_windows_bound(), 1u);
  const std::uint32_t ended = window.mw->rkey;
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
  window.expect_told(cq, ended);
  window.bind();
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  EXPECT_EQ(wc.wr_id, Ended::kBound);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(model_windows_bound(), 2u);
}

TEST_P(Windows, WhileItIsSuspendedOneStaysBound) {
  migrd.ask(MIGR_MSG_SUSPEND);
  bind(nullptr, 2);
  migrd.drained();
  EXPECT_EQ(model_windows_bound(), 1u) << "what is suspended posts nothing";
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  completes(2);
  EXPECT_EQ(model_windows_bound(), 0u);
}

TEST_P(Windows, OneThatCouldNotBeBoundIsAsItWas) {
  ibv_qp* const second = make_second();
  bind_too_much(second, 2);
  completes(2, IBV_WC_MW_BIND_ERR);
  bind(window_mr_, 3);
  completes(3);
  bind_too_much(second, 4);
  completes(4, IBV_WC_WR_FLUSH_ERR);
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
  bind(window_mr_, 5);
  completes(5);
  EXPECT_EQ(ibv_destroy_qp(second), 0);
}

// The device would refuse it to any other one, too, and break that.
TEST_P(Windows, OneThatAQpCouldNotBindAndIsGoneIsAsItWas) {
  ibv_qp* const second = make_second();
  bind_too_much(second, 2);
  EXPECT_EQ(ibv_destroy_qp(second), 0);
  move();
  completes(2, IBV_WC_MW_BIND_ERR);
  EXPECT_EQ(model_windows_bound(), 1u);
  bind(window_mr_, 3);
  completes(3);
}

TEST_P(Windows, OneWhoseQpIsConnectedNoMoreStaysBound) {
  ibv_qp* const second = make_second();
  to(from_, IBV_QPS_RESET);
  to(to_, IBV_QPS_RESET);
  connect(to_, second, other_);
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
  EXPECT_EQ(ibv_destroy_qp(second), 0);
}

/* ---- a partner that goes back in two halves ---------------------------------------------- */

class Partner : public Pollers {
 protected:
  static void done(const migr_msg& reply) { EXPECT_EQ(reply.status, 0) << reply.text; }
  /// @param cut  as if the drain did not end
  /// @param before  SWITCH
  void switch_path(
      bool cut = false, const std::function<void()>& before = [] {}) {
    done(migrd.about(to_, MIGR_MSG_QP_CREATE));
    spare_ = migrd.record<migr_qp_spare>();
    migr_qp_connect there{};
    there.vqpn = to_->qp_num;
    there.dest_qpn = 0x123456;
    ibv_gid gid{};
    ASSERT_EQ(ibv_query_gid(other_, 1, 0, &gid), 0);
    std::memcpy(there.dgid, &gid, sizeof there.dgid);
    done(migrd.say(MIGR_MSG_QP_CONNECT, 0, &there, sizeof there));
    done(migrd.about(to_, MIGR_MSG_SUSPEND));
    done(migrd.about(to_, MIGR_MSG_DRAIN, 5000));
    if (cut) {
      done(migrd.about(to_, MIGR_MSG_CUT));
      migr_qp_psn peer{};
      peer.vqpn = to_->qp_num;
      done(migrd.say(MIGR_MSG_SETTLE, 0, &peer, sizeof peer));
    }
    before();
    done(migrd.about(to_, MIGR_MSG_SWITCH));
  }
  migr_qp_spare spare_{};
};

// The other end, which has gone back, sends: what was posted before SWITCH and since is there for it. This end does not send yet.
TEST_F(Partner, ReceivesOnTheOldPathBeforeItSends) {
  two(0);
  expect_two(0);
  switch_path();
  ibv_send_wr wr{}, *bad;
  wr.wr_id = 55;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(to_, &wr, &bad), 0);
  const migr_msg reply = migrd.ask(MIGR_MSG_OLD_PATH);
  EXPECT_EQ(reply.state, std::uint32_t{MIGR_PROC_SUSPENDED});
  two(2);
  expect_two(2);
  done(migrd.try_to(MIGR_MSG_OLD_PATH));  // asked once more
  two(4);
  expect_two(4);
  migrd.ask(MIGR_MSG_ROLLBACK);
  ibv_poll_cq_attr attr{};
  for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    usleep(1000);
  }
  EXPECT_EQ(ex_->wr_id, 55u);
  EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
  ibv_end_poll(ex_);
  two(6);
  expect_two(6);
}

// Its thread may poll for others as well, who go on.
TEST_F(Partner, RestsInAPollOnlyWhereNoneGoesOn) {
  constexpr long kPolls = 100;
  const auto rests = [this] {
    rusage before{}, after{};
    getrusage(RUSAGE_THREAD, &before);
    ibv_poll_cq_attr attr{};
    for (long i = 0; i < kPolls; ++i) EXPECT_EQ(ibv_start_poll(ex_, &attr), ENOENT);
    getrusage(RUSAGE_THREAD, &after);
    return after.ru_nvcsw - before.ru_nvcsw;
  };
  done(migrd.about(to_, MIGR_MSG_SUSPEND));
  done(migrd.about(to_, MIGR_MSG_DRAIN, 5000));
  EXPECT_LT(rests(), kPolls / 2);
  migrd.ask(MIGR_MSG_ROLLBACK);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  EXPECT_GE(rests(), kPolls);
  migrd.ask(MIGR_MSG_ROLLBACK);
}

// The number that the device had for it is another one's by then.
TEST_F(Partner, WhatItHasCompletedBearsItsNameWhenItIsGone) {
  switch_path();
  done(migrd.ask(MIGR_MSG_RESUME));
  const std::uint32_t name = to_->qp_num;
  ASSERT_NE(spare_.pqpn, name);
  ibv_recv_wr wr{.wr_id = 77, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad;
  ASSERT_EQ(ibv_post_recv(to_, &wr, &bad), 0);
  to(to_, IBV_QPS_ERR);
  ASSERT_EQ(ibv_destroy_qp(to_), 0);
  const std::uint32_t next_qpn = model_next_qpn(0, 0, spare_.pqpn);
  to_ = make_qp(ibv_cq_ex_to_cq(ex_));
  model_next_qpn(0, 0, next_qpn);
  ASSERT_EQ(to_->qp_num, spare_.pqpn);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  EXPECT_EQ(ex_->wr_id, 77u);
  EXPECT_EQ(ibv_wc_read_qp_num(ex_), name);
  EXPECT_EQ(ibv_next_poll(ex_), ENOENT);
  ibv_end_poll(ex_);
}

/* ---- what memory of a process that has moved is called ----------------------------------- */

class Keys : public Partner {
 protected:
  static constexpr std::uint32_t kName = 0x77700, kOtherName = 0x77800, kWrong = 0x55500;
  static constexpr std::uint32_t kContext = 3, kOtherContext = 0x80000001;
  const std::vector<std::uint8_t> theirs_ = std::vector<std::uint8_t>(16, 0x1d);

  void SetUp() override {
    Partner::SetUp();
    target_ = ibv_reg_mr(other_pd_, target_memory_, sizeof target_memory_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  void TearDown() override {
    ibv_dereg_mr(target_);
    for (ibv_qp* qp : there_) EXPECT_EQ(ibv_destroy_qp(qp), 0);
    Partner::TearDown();
  }
  migr_key_map key(std::uint32_t name, std::uint32_t physical) const {
    migr_key_map k{.vrkey = name, .prkey = physical, .owner = {}};
    std::memcpy(k.owner, theirs_.data(), sizeof k.owner);
    return k;
  }
  migr_key_map context(std::uint32_t name) const { return key(MIGR_KEY_CONTEXT, name); }
  /// The process at the other end moves, and its keys are these.
  void they_move(std::uint32_t their_context, const std::vector<migr_key_map>& keys) {
    done(migrd.about(to_, MIGR_MSG_QP_CREATE));
    const auto spare = migrd.record<migr_qp_spare>();
    std::swap(pd_, other_pd_);
    ibv_qp* there = make_qp(other_cq_);
    if (there->qp_num == to_->qp_num) ibv_destroy_qp(std::exchange(there, make_qp(other_cq_)));  // without migr.ko nothing else tells which is meant
    there_.push_back(there);
    std::swap(pd_, other_pd_);
    ibv_qp end{};
    end.qp_num = spare.pqpn;
    answer(there, &end, context_, spare.psn);
    EXPECT_EQ(go_to_rts(there, 0), 0);
    migr_qp_connect c{};
    c.vqpn = to_->qp_num;
    c.dest_qpn = there->qp_num;
    ibv_gid gid{};
    EXPECT_EQ(ibv_query_gid(other_, 1, 0, &gid), 0);
    std::memcpy(c.dgid, &gid, sizeof c.dgid);
    std::memcpy(c.peer, theirs_.data(), sizeof c.peer);
    done(migrd.say(MIGR_MSG_QP_CONNECT, their_context, &c, sizeof c));
    done(migrd.about(to_, MIGR_MSG_SUSPEND));
    done(migrd.about(to_, MIGR_MSG_DRAIN, 5000));
    done(migrd.about(to_, MIGR_MSG_SWITCH));
    done(migrd.say_all(MIGR_MSG_KEYS, 0, keys));
    done(migrd.about(to_, MIGR_MSG_RESUME));
  }
  /// A WRITE of one byte to memory of that name.
  ibv_wc_status write(std::uint32_t rkey) const {
    const std::uint8_t byte = ++target_memory_[1];
    ibv_sge of{reinterpret_cast<std::uintptr_t>(&byte), 1, 0};
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    wr.sg_list = &of;
    wr.num_sge = 1;
    wr.wr.rdma.rkey = rkey;
    wr.wr.rdma.remote_addr = reinterpret_cast<std::uintptr_t>(target_memory_);
    EXPECT_EQ(ibv_post_send(to_, &wr, &bad), 0);
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      if (ms == kPatienceMs) return IBV_WC_GENERAL_ERR;
      usleep(1000);
    }
    const ibv_wc_status status = ex_->status;
    ibv_end_poll(ex_);
    EXPECT_TRUE(status != IBV_WC_SUCCESS || target_memory_[0] == byte);
    return status;
  }

  ibv_mr* target_;
  std::vector<ibv_qp*> there_;
  mutable std::uint8_t target_memory_[64] = {};
};

// Two devices have each called memory so.
TEST_F(Keys, AreOfTheContextAtTheOtherEnd) {
  they_move(kContext, {context(kContext), key(kName, target_->rkey), context(kOtherContext), key(kName, kWrong)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS);
  they_move(kOtherContext, {context(kContext), key(kName, kWrong), context(kOtherContext), key(kName, target_->rkey)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS);
}

TEST_F(Keys, OfNoKnownContextAreAnyones) {
  they_move(kContext, {key(kName, target_->rkey)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS) << "they do not say";
  they_move(0, {context(kContext), key(kOtherName, kWrong), context(kOtherContext), key(kName, target_->rkey)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS) << "nobody has said which";
}

// That of before is gone, and new memory is called by the device's own key.
TEST_F(Keys, OfAMoveBeforeAreForgotten) {
  they_move(kContext, {context(kContext), key(target_->rkey, kWrong)});
  they_move(kContext, {context(kContext)});
  EXPECT_EQ(write(target_->rkey), IBV_WC_SUCCESS);
  they_move(kContext, {key(target_->rkey, kWrong)});
  they_move(kContext, {});
  EXPECT_EQ(write(target_->rkey), IBV_WC_SUCCESS) << "of an older library, which says nothing of who has none";
}

// Who sends datagrams to a QP that is made since, and who has no libmigr, know its number only.
TEST_F(Keys, AreNotTheOnlyNamesThatNewOnesPassBy) {
  const unsigned before = model_qps();
  they_move(0, {});
  ibv_destroy_qp(make_qp(cq_[0]));  // and the old path with it
  model_next_qpn(0, 0, to_->qp_num);
  ibv_qp* const plain = make_qp(cq_[0]);
  model_next_qpn(0, 0, to_->qp_num);
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = cq_[0];
  init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  init.comp_mask = IBV_QP_INIT_ATTR_PD;
  init.pd = pd_;
  ibv_qp* const extended = ibv_create_qp_ex(context_, &init);
  for (ibv_qp* qp : {plain, extended}) {
    EXPECT_NE(qp->qp_num, to_->qp_num);
    EXPECT_EQ(ibv_destroy_qp(qp), 0);
  }
  EXPECT_EQ(model_qps(), before + there_.size()) << "what was passed is given back";
  ibv_qp* const as_before = make_qp(cq_[0]);
  EXPECT_EQ(ibv_destroy_qp(as_before), 0);
}

// Whether or not another QP is ever made.
TEST_F(Keys, LeaveNoOldPathBehind) {
  const unsigned before = model_qps();
  they_move(0, {});
  for (int ms = 0; ms < kPatienceMs && model_qps() != before + there_.size(); ++ms) usleep(1000);
  EXPECT_EQ(model_qps(), before + there_.size());
}

/// Memory of two devices that number keys alike.
class TwoDevices : public Keys {
 protected:
  void SetUp() override {
    Keys::SetUp();
    ibv_device** list = ibv_get_device_list(nullptr);
    second_ = ibv_open_device(list[1]);  // a1
    ibv_free_device_list(list);
    second_pd_ = ibv_alloc_pd(second_);
    for (const int link : {0, 1}) model_next_key(link, 0, kFirst);
    first_mr_ = reg(pd_);
    second_mr_ = reg(second_pd_);
    EXPECT_EQ(first_mr_->rkey, second_mr_->rkey);
  }
  void TearDown() override {
    ibv_dereg_mr(first_mr_);
    ibv_dereg_mr(second_mr_);
    ibv_dealloc_pd(second_pd_);
    ibv_close_device(second_);
    Keys::TearDown();
  }
  ibv_mr* reg(ibv_pd* pd) { return ibv_reg_mr(pd, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE); }
  static migr_handle_map called(const ibv_context* c, std::uint32_t name) {
    migr_handle_map m{};
    m.context_fd = c->cmd_fd;
    m.old_handle = name;
    return m;
  }

  static constexpr std::uint32_t kFirst = 0x9100;
  ibv_context* second_;
  ibv_pd* second_pd_;
  ibv_mr *first_mr_, *second_mr_;
};

TEST_F(TwoDevices, AreToldApart) {
  migrd.freeze();
  migrd.appears();
  const std::vector<migr_handle_map> maps{called(context_, kContext), called(second_, kOtherContext), called(other_, 9)};
  for (int times = 0; times < 2; ++times) {  // it is asked again
    done(migrd.say_all(MIGR_MSG_REBIND, 0, maps));
    std::uint32_t in = 0;
    std::multiset<std::pair<std::uint32_t, std::uint32_t>> keys;
    std::set<std::uint32_t> contexts;
    for (const migr_key_map& k : migrd.records<migr_key_map>()) {
      if (k.vrkey == MIGR_KEY_CONTEXT) contexts.insert(in = k.prkey);
      else keys.insert({in, k.vrkey});
    }
    EXPECT_EQ(contexts, (std::set<std::uint32_t>{kContext, kOtherContext, 9}));
    EXPECT_EQ(keys.count({kContext, first_mr_->rkey}), 1u);
    EXPECT_EQ(keys.count({kOtherContext, second_mr_->rkey}), 1u);
    EXPECT_EQ(keys.count({9, target_->rkey}), 1u);
  }
  migrd.ask(MIGR_MSG_RESUME);
}

// The process at its other end has moved with it.
TEST_F(TwoDevices, OfATwinAreToldApart) {
  migr_handle_map qp = called(context_, 0), end = called(context_, kContext);
  qp.obj_type = MIGR_OBJ_QP;
  qp.vqpn = qp.pqpn = end.vqpn = to_->qp_num;
  qp.old_handle = qp.new_handle = to_->handle;
  std::memcpy(qp.peer, theirs_.data(), sizeof qp.peer);
  end.obj_type = MIGR_HANDLE_PEER;
  migrd.freeze();
  migrd.appears();
  done(migrd.say_all(MIGR_MSG_REBIND, 0, std::vector{qp, end}));
  done(migrd.say_all(MIGR_MSG_KEYS, 0, std::vector{context(kContext), key(kName, target_->rkey), context(kOtherContext), key(kName, kWrong)}));
  migrd.ask(MIGR_MSG_RESUME);
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS);
}

TEST_F(TwoDevices, MayHaveWindowsOfOneName) {
  for (const int link : {0, 1}) model_next_key(link, 0, 0x9200);
  ibv_mw* const windows[] = {ibv_alloc_mw(pd_, IBV_MW_TYPE_1), ibv_alloc_mw(second_pd_, IBV_MW_TYPE_1)};
  EXPECT_EQ(windows[0]->rkey, windows[1]->rkey);
  for (ibv_mw* mw : windows) EXPECT_EQ(ibv_dealloc_mw(mw), 0);
}

/* ---- new keys that are names of before ----------------------------------------------------- */

/// More than anybody would try one by one.
class Names : public Events {
 protected:
  static constexpr unsigned kMany = 100;
  static constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND;

  void SetUp() override {
    static std::uint32_t next = 0x30000;  // names of a test before are not given either
    Events::SetUp();
    model_next_key(0, 0, first_ = next += 0x1000);
  }
  void TearDown() override {
    for (ibv_mr* mr : mrs_) EXPECT_EQ(ibv_dereg_mr(mr), 0);
    for (ibv_mw* mw : windows_) EXPECT_EQ(ibv_dealloc_mw(mw), 0);
    Events::TearDown();
  }
  ibv_mr* reg(ibv_pd* pd, void* at) { return mrs_.emplace_back(ibv_reg_mr(pd, at, 64, kAccess)); }
  /// To a device that gives those names to others.
  void move() const {
    model_number_anew(true);
    migrd.freeze();
    model_next_key(0, 0, first_ + 0x800);
    migrd.restored();
    model_number_anew(false);
    model_next_key(0, 0, first_);
  }
  void many_mrs() {
    for (unsigned i = 0; i < kMany; ++i) EXPECT_EQ(reg(pd_, memory_)->lkey >> 8, first_ + i);
  }
  bool is_name(std::uint32_t key) const { return key >> 8 >= first_ && key >> 8 < first_ + kMany; }

  std::uint32_t first_;
  std::vector<ibv_mr*> mrs_;
  std::vector<ibv_mw*> windows_;
  std::uint8_t memory_[64], big_[64];
};

TEST_F(Names, OfMemoryAreNotGivenToOther) {
  many_mrs();
  move();
  EXPECT_EQ(mrs_[3]->lkey >> 8, first_ + 3);
  const ibv_mr* mr = reg(pd_, big_);
  EXPECT_FALSE(is_name(mr->rkey)) << std::hex << mr->rkey;
  EXPECT_EQ(mr->lkey, mr->rkey);
  EXPECT_EQ(model_most_registered(big_), 1u);
  EXPECT_EQ(model_mrs(0, 0), kMany + 1) << "what was passed is given back";
}

TEST_F(Names, OfMemoryOfAnotherContextAreNotGivenEither) {
  many_mrs();
  ibv_context* const again = ibv_open_device(context_->device);
  ibv_pd* const pd = ibv_alloc_pd(again);
  move();
  const ibv_mr* mr = reg(pd, big_);
  EXPECT_FALSE(is_name(mr->rkey)) << std::hex << mr->rkey;
  EXPECT_EQ(ibv_dereg_mr(mrs_.back()), 0);
  mrs_.pop_back();
  ibv_dealloc_pd(pd);
  ibv_close_device(again);
}

TEST_F(Names, OfMemoryAreNotGivenToWindows) {
  many_mrs();
  move();
  const ibv_mw* mw = windows_.emplace_back(ibv_alloc_mw(pd_, IBV_MW_TYPE_1));
  EXPECT_FALSE(is_name(mw->rkey)) << std::hex << mw->rkey;
}

TEST_F(Names, OfWindowsAreNotGivenToOthersOrToMemory) {
  for (unsigned i = 0; i < kMany; ++i) EXPECT_EQ(windows_.emplace_back(ibv_alloc_mw(pd_, IBV_MW_TYPE_1))->rkey >> 8, first_ + i);
  move();
  const ibv_mw* mw = windows_.emplace_back(ibv_alloc_mw(pd_, IBV_MW_TYPE_1));
  EXPECT_FALSE(is_name(mw->rkey)) << std::hex << mw->rkey;
  model_next_key(0, 0, first_);
  const ibv_mr* mr = reg(pd_, big_);
  EXPECT_FALSE(is_name(mr->rkey)) << std::hex << mr->rkey;
}

// The other end was not done when this one was drained. Its message has ended the binding, which so cannot be ended for the new path.
TEST_F(Partner, WindowThatIsEndedLastIsNotBoundAgain) {
  ibv_cq* const cq = ibv_cq_ex_to_cq(ex_);
  const Ended window(to_, pd_, memory_, sizeof memory_);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  switch_path(false, [&] { window.end(from_, window.mw->rkey); });
  EXPECT_EQ(model_windows_bound(), 0u);
  window.expect_told(cq, window.mw->rkey);
  migrd.ask(MIGR_MSG_OLD_PATH);
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(model_windows_bound(), 0u);
  window.bind();
  EXPECT_EQ(model_windows_bound(), 1u);
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
}

/// What its application changes between SWITCH and the way back.
class Changed : public Partner {
 protected:
  static constexpr std::uint8_t kTimer = 9;

  void change(unsigned access) const {
    ibv_qp_attr to{};
    to.qp_access_flags = access;
    to.min_rnr_timer = kTimer;
    ASSERT_EQ(ibv_modify_qp(to_, &to, mask_), 0);
  }
  void goes_back_with(unsigned access) const {
    migrd.ask(MIGR_MSG_OLD_PATH);
    migrd.ask(MIGR_MSG_ROLLBACK);
    ibv_qp_attr now{};
    ibv_qp_init_attr init{};
    ASSERT_EQ(ibv_query_qp(to_, &now, IBV_QP_STATE | mask_, &init), 0);
    EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
    EXPECT_EQ(now.qp_access_flags, access);
    EXPECT_EQ(now.min_rnr_timer, mask_ & IBV_QP_MIN_RNR_TIMER ? kTimer : 0);
  }
  int mask_ = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER;
};

TEST_F(Changed, IsSoOnTheOldPath) {
  switch_path();
  change(IBV_ACCESS_REMOTE_READ);
  goes_back_with(IBV_ACCESS_REMOTE_READ);
  two(0);
  expect_two(0);
}

// What the drain marker needed, the application wants now.
TEST_F(Changed, RightToWriteIsNotTakenAway) {
  switch_path();
  change(IBV_ACCESS_REMOTE_WRITE);
  goes_back_with(IBV_ACCESS_REMOTE_WRITE);
}

TEST_F(Changed, IsSoOnAnOldPathThatWasCut) {
  switch_path(true);
  change(IBV_ACCESS_REMOTE_READ);
  goes_back_with(IBV_ACCESS_REMOTE_READ);
}

// Its old path is closed meanwhile.
TEST_F(Changed, IsSoOnAnUnreliableOldPath) {
  for (auto [qp, cq, pd] : {std::tuple(&to_, ibv_cq_ex_to_cq(ex_), pd_), std::tuple(&from_, other_cq_, other_pd_)}) {
    ASSERT_EQ(ibv_destroy_qp(*qp), 0);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64};
    init.qp_type = IBV_QPT_UC;
    ASSERT_NE(*qp = ibv_create_qp(pd, &init), nullptr);
  }
  connect(to_, from_, other_);
  connect(from_, to_, context_);
  mask_ = IBV_QP_ACCESS_FLAGS;  // the other is none of its attributes
  change(IBV_ACCESS_REMOTE_WRITE);
  switch_path();
  change(0);
  goes_back_with(0);
  two(0);
  expect_two(0);
}

/* ---- QPs of one process that are connected to each other ----------------------------------- */

// What is posted after FREEZE, a receive and then a send to it, goes out in that order, whichever QP is older.
TEST_P(Pollers, ReceivesOfAllAreThereBeforeAnyoneSends) {
  ibv_mr* const mr = ibv_reg_mr(other_pd_, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE);
  const auto post = [&](ibv_qp* by, ibv_qp* at, std::uint32_t lkey, std::uint64_t wr_id) {
    ibv_sge into{reinterpret_cast<std::uintptr_t>(memory_), sizeof memory_, lkey};
    ibv_recv_wr receive{.wr_id = wr_id, .next = nullptr, .sg_list = &into, .num_sge = 1}, *bad_receive;
    EXPECT_EQ(ibv_post_recv(at, &receive, &bad_receive), 0);
    ibv_send_wr wr{}, *bad;
    wr.wr_id = wr_id + 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    EXPECT_EQ(ibv_post_send(by, &wr, &bad), 0);
  };
  migrd.freeze();
  const auto before = model_unready_sends();
  post(to_, from_, mr->lkey, 10);
  post(from_, to_, mr_->lkey, 20);
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(model_unready_sends(), before);
  std::set<std::uint64_t> came;
  ibv_wc wc{};
  ibv_poll_cq_attr attr{};
  for (int ms = 0; came.size() < 4; ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    for (; ibv_poll_cq(other_cq_, 1, &wc) == 1; came.insert(wc.wr_id)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    for (; ibv_start_poll(ex_, &attr) == 0; ibv_end_poll(ex_)) {
      EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
      came.insert(ex_->wr_id);
    }
    usleep(1000);
  }
  EXPECT_EQ(came, (std::set<std::uint64_t>{10, 11, 20, 21}));
  ibv_dereg_mr(mr);
}

/* ---- what NICs write to while memory is copied ahead -------------------------------------- */

/// `from_` writes to memory of `to_`'s end.
class Tracked : public Pollers {
 protected:
  static constexpr std::size_t kPage = 4096, kPages = 16;

  void SetUp() override {
    Pollers::SetUp();
    constexpr int kAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    for (auto* m : {&there_, &here_}) {
      m->bytes = static_cast<std::uint8_t*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      ASSERT_NE(m->bytes, MAP_FAILED);
      m->mr = ibv_reg_mr(m == &there_ ? pd_ : other_pd_, m->bytes, kPages * kPage, kAll);
    }
    ibv_destroy_qp(from_);
    ibv_qp_init_attr_ex init{};
    init.send_cq = init.recv_cq = other_cq_;
    init.cap = {.max_send_wr = 16, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64};
    init.qp_type = IBV_QPT_RC;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = other_pd_;
    init.send_ops_flags = send_ops();
    ASSERT_NE(from_ = ibv_create_qp_ex(other_, &init), nullptr);
    to(to_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
    try_for(14);  // 67 ms
    ibv_qp_attr open{};
    open.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    ASSERT_EQ(ibv_modify_qp(to_, &open, IBV_QP_ACCESS_FLAGS), 0);
  }
  void try_for(std::uint8_t timeout) const {
    ibv_qp_attr patient{};
    patient.timeout = timeout;
    patient.retry_cnt = 7;
    ASSERT_EQ(ibv_modify_qp(from_, &patient, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT), 0);
  }
  void TearDown() override {
    model_mend(0);
    for (auto* m : {&there_, &here_}) {
      ibv_dereg_mr(m->mr);
      munmap(m->bytes, kPages * kPage);
    }
    Pollers::TearDown();
  }
  virtual std::uint64_t send_ops() const { return IBV_QP_EX_WITH_RDMA_WRITE; }
  struct Memory {
    std::uint8_t* bytes;
    ibv_mr* mr;
    std::uint64_t at(std::size_t page) const { return reinterpret_cast<std::uintptr_t>(bytes) + page * kPage; }
    ibv_sge sge(std::size_t page, std::uint32_t length) const { return {at(page), length, mr->lkey}; }
  };

  int post(ibv_wr_opcode opcode, std::size_t page, std::uint32_t bytes = 8) {
    ibv_sge sge = here_.sge(page, bytes);
    ibv_send_wr wr{}, *bad;
    wr.wr_id = page;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) wr.wr.atomic = {.remote_addr = there_.at(page), .compare_add = 1, .swap = 0, .rkey = there_.mr->rkey};
    else wr.wr.rdma = {.remote_addr = there_.at(page), .rkey = there_.mr->rkey};
    return ibv_post_send(from_, &wr, &bad);
  }
  void write_in_session(std::size_t page) {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    end_session(ex, page);
  }
  void begin_write(ibv_qp_ex* ex, std::size_t page) {
    ex->wr_id = page;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, there_.mr->rkey, there_.at(page));
    const ibv_sge sge = here_.sge(page, 8);
    ibv_wr_set_sge_list(ex, 1, &sge);
  }
  void end_session(ibv_qp_ex* ex, std::size_t page) {
    begin_write(ex, page);
    EXPECT_EQ(ibv_wr_complete(ex), 0);
  }
  int receive(std::size_t page) {
    ibv_sge sge = there_.sge(page, 64);
    ibv_recv_wr wr{.wr_id = page, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(to_, &wr, &bad);
  }
  ibv_wc completes(std::uint64_t wr_id) const {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, wr_id);
    return wc;
  }
  void completes(std::initializer_list<std::uint64_t> wr_ids) const {
    for (const auto id : wr_ids) completes(id);
  }
  static migr_msg begin(const ibv_qp* qp) {
    const migr_msg reply = migrd.about(qp, MIGR_MSG_TRACK, qp ? MIGR_TRACK_THERE : MIGR_TRACK_HERE);
    if (reply.status) return reply;
    return migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_QUEUES);
  }
  /// Pages of `m` that were noted under a key.
  std::string taken(std::uint32_t key, const Memory& m) {
    EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, 0);
    return noted(key, m);
  }
  static std::string noted(std::uint32_t key, const Memory& m) {
    std::string out;
    for (const migr_nic_write& w : migrd.records<migr_nic_write>())
      if (w.key == key) out += std::to_string((w.start - m.at(0)) / kPage) + "+" + std::to_string(w.bytes / kPage) + " ";
    return out;
  }

  Memory there_{}, here_{};
};

TEST_F(Tracked, ByAPartnerAreItsWritesAndAtomics) {
  model_cut(0, 0, false);  // what is posted stays in the queue
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1), 0);
  ASSERT_EQ(post(IBV_WR_SEND, 0), 0);
  ASSERT_EQ(begin(from_).status, 0);
  ASSERT_EQ(receive(0), 0);
  model_mend(0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 3, 2 * kPage), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_READ, 6), 0);
  ASSERT_EQ(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8), 0);
  write_in_session(10);
  ibv_sge sges[] = {here_.sge(12, 8), here_.sge(14, 8)};
  ibv_send_wr list[2] = {}, *bad;
  for (std::size_t i = 0; i < 2; ++i) {
    list[i].wr_id = 12 + 2 * i;
    list[i].opcode = IBV_WR_RDMA_WRITE;
    list[i].send_flags = IBV_SEND_SIGNALED;
    list[i].sg_list = &sges[i];
    list[i].num_sge = 1;
    list[i].wr.rdma = {.remote_addr = there_.at(12 + 2 * i), .rkey = there_.mr->rkey};
  }
  list[0].next = &list[1];
  ASSERT_EQ(ibv_post_send(from_, list, &bad), 0);
  completes({1, 0, 3, 6, 8, 10, 12, 14});
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 15), 0) << "is kept, and goes elsewhere";
  EXPECT_EQ(taken(there_.mr->rkey, there_), "1+1 3+2 8+1 10+1 12+1 14+1 ");
  EXPECT_EQ(noted(here_.mr->lkey, here_), "") << "it is not this process that moves";
  for (const migr_nic_write& w : migrd.records<migr_nic_write>()) EXPECT_EQ(w.vqpn, from_->qp_num);
  migrd.ask(MIGR_MSG_ROLLBACK);
  completes({15});
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE) << "it has ended";
}

TEST_F(Tracked, OfWhoIsMovedAreItsReceivesAndReads) {
  ASSERT_EQ(receive(1), 0);
  ASSERT_EQ(begin(nullptr).status, 0);
  ASSERT_EQ(receive(3), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_READ, 6, kPage + 1), 0);
  ASSERT_EQ(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 9), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 11), 0);
  ASSERT_EQ(post(IBV_WR_SEND, 13), 0);
  completes({6, 9, 11, 13});
  EXPECT_EQ(taken(there_.mr->lkey, there_), "1+1 3+1 ");
  EXPECT_EQ(noted(here_.mr->lkey, here_), "6+2 9+1 ");
  migrd.ask(MIGR_MSG_ROLLBACK);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 2), 0);
  completes({2});
}

TEST_F(Tracked, ASessionThatWasOpenIsWaitedForAndNoted) {
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
  ibv_wr_start(ex);
  ASSERT_EQ(migrd.about(from_, MIGR_MSG_TRACK, MIGR_TRACK_THERE).status, 0);
  model_cut(0, 0, false);
  auto queues = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_QUEUES).status; });
  EXPECT_EQ(queues.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  end_session(ex, 5);
  EXPECT_EQ(queues.get(), 0);
  model_mend(0);
  write_in_session(7);
  completes({5, 7});
  EXPECT_EQ(taken(there_.mr->rkey, there_), "5+1 7+1 ");
}

TEST_F(Tracked, ASessionThatIsJustCompletingIsWaitedFor) {
  std::promise<void> begun, tracked;
  auto completing = std::async(std::launch::async, [&] {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begun.set_value();
    tracked.get_future().wait();
    end_session(ex, 5);
  });
  begun.get_future().wait();
  ASSERT_EQ(migrd.about(from_, MIGR_MSG_TRACK, MIGR_TRACK_THERE).status, 0);
  model_cut(0, 0, false);
  model_hold_sessions(true);
  tracked.set_value();
  EXPECT_EQ(completing.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  auto queues = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_QUEUES).status; });
  EXPECT_EQ(queues.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_sessions(false);
  completing.get();
  EXPECT_EQ(queues.get(), 0);
  model_mend(0);
  completes({5});
  EXPECT_EQ(taken(there_.mr->rkey, there_), "5+1 ");
}

TEST_F(Tracked, ASessionThatDoesNotEndEndsIt) {
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
  ibv_wr_start(ex);
  EXPECT_EQ(begin(from_).status, ETIMEDOUT);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
  end_session(ex, 5);
  write_in_session(6);  // nobody waits
  completes({5, 6});
}

TEST_F(Tracked, WithAQpThatIsGoneItIsNotAll) {
  ASSERT_EQ(begin(from_).status, 0);
  ASSERT_EQ(ibv_destroy_qp(from_), 0);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
  std::swap(pd_, other_pd_);
  from_ = make_qp(other_cq_);
  std::swap(pd_, other_pd_);
}

// Nor what is not reliable in another way.
TEST_F(Tracked, DatagramsAreNot) {
  for (const ibv_qp_type type : {IBV_QPT_UD, IBV_QPT_UC}) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_[0];
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = type;
    ibv_qp* unreliable = ibv_create_qp(pd_, &init);
    ASSERT_NE(unreliable, nullptr);
    EXPECT_EQ(begin(nullptr).status, EOPNOTSUPP) << type;
    EXPECT_EQ(begin(from_).status, 0) << "it is not that QP which writes to others' memory";
    EXPECT_EQ(ibv_destroy_qp(unreliable), 0);
  }
}

/// What partners write to through them bears keys that no MR has.
TEST_F(Tracked, MemoryWindowsAreNot) {
  ASSERT_EQ(begin(nullptr).status, 0);
  ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  ASSERT_NE(mw, nullptr);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
  EXPECT_EQ(begin(nullptr).status, EOPNOTSUPP);
  EXPECT_EQ(begin(from_).status, 0) << "those of a partner are his own";
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, 0);
  EXPECT_EQ(ibv_dealloc_mw(mw), 0);
}

/* ---- memory that is registered, or given back, while memory is copied ahead ------------------- */

class CopiedAhead : public Pollers {
 protected:
  static constexpr std::size_t kPage = 4096, kPages = 6;

  void SetUp() override {
    Pollers::SetUp();
    pages_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(pages_, MAP_FAILED);
    clear();
    *page(0) = 1;
    marks_ = entry(0) & kMarked;
    copied_ahead();
  }
  void TearDown() override {
    migrd.ask(MIGR_MSG_ROLLBACK);
    munmap(pages_, kPages * kPage);
    Pollers::TearDown();
  }
  /// All of it was, and whatever was written before is not marked any more: each page is there, and holds what it held.
  void copied_ahead() {
    for (std::size_t i = 0; i < kPages; ++i) (void)*page(i);
    clear();
    EXPECT_EQ(migrd.try_to(MIGR_MSG_DESCRIBE, MIGR_DESCRIBE_MOVE).status, ENODEV) << "migr.ko is not there";
  }
  ibv_mr* reg(int access) { return ibv_reg_mr(pd_, pages_, kPages * kPage, access); }
  /// As a write does it, which changes nothing.
  bool is_touched(std::size_t i) const { return entry(i) & (marks_ ? kMarked : kOwn); }
  int freeze() {
    migrd.ask(MIGR_MSG_SUSPEND);
    migrd.ask(MIGR_MSG_DRAIN, 1000);
    const int status = migrd.try_to(MIGR_MSG_FREEZE).status;
    if (status) return migrd.ask(MIGR_MSG_ROLLBACK), status;
    migrd.hung_up();
    return migrd.back(), 0;
  }
  volatile char* page(std::size_t i) const { return pages_ + i * kPage; }

 private:
  static constexpr std::uint64_t kMarked = 1ull << 55, kOwn = 1ull << 56;  // the second: not the page of zeros, which is everybody's
  static void clear() {
    const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    EXPECT_EQ(write(fd, "4", 1), 1);
    close(fd);
  }
  std::uint64_t entry(std::size_t i) const {
    std::uint64_t out = 0;
    const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(pread(fd, &out, sizeof out, static_cast<off_t>(reinterpret_cast<std::uintptr_t>(page(i)) / kPage * sizeof out)), static_cast<ssize_t>(sizeof out));
    close(fd);
    return out;
  }
  char* pages_ = nullptr;
  bool marks_ = false;  // the kernel does
};

TEST_F(CopiedAhead, MemoryIsTouchedAsItIsGivenBackAlsoBehindAHole) {
  ibv_mr* const mr = reg(IBV_ACCESS_LOCAL_WRITE);
  munmap(const_cast<char*>(page(2)), kPage);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  for (const std::size_t i : {1, 3, 5}) EXPECT_TRUE(is_touched(i)) << i;
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0);
}

// As of a program that keeps addresses for itself.
TEST_F(CopiedAhead, WhatHoldsNothingNeedsNoTouch) {
  ibv_mr* const mr = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_EQ(mmap(const_cast<char*>(page(2)), kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), page(2));
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  for (const std::size_t i : {1, 3, 5}) EXPECT_TRUE(is_touched(i)) << i;
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0);
}

TEST_F(CopiedAhead, WhatCannotBeTouchedAnyMoreIsCopiedInTheStop) {
  ibv_mr* mr = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_READ), 0);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_EQ(freeze(), 0) << "nothing was copied ahead";
  copied_ahead();
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_READ | PROT_WRITE), 0);
  mr = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_NONE), 0);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), ESTALE);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0) << "that was another migration";
}

// The kernel gives it pages of its own then, which it does not mark.
TEST_F(CopiedAhead, MemoryThatIsRegisteredToBeReadOnlyIsTouched) {
  ibv_mr* const written = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_FALSE(is_touched(1)) << "the kernel has marked it, and the model is none";
  ibv_mr* const read = reg(IBV_ACCESS_REMOTE_READ);
  for (std::size_t i = 0; i < kPages; ++i) EXPECT_TRUE(is_touched(i)) << i;
  EXPECT_EQ(ibv_dereg_mr(written), 0);
  EXPECT_EQ(ibv_dereg_mr(read), 0);
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_READ), 0);
  copied_ahead();
  EXPECT_EQ(ibv_dereg_mr(reg(IBV_ACCESS_REMOTE_READ)), 0);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), ESTALE);
}

// Nobody has to have it dumped, or its file written, for that.
TEST_F(CopiedAhead, SharedMemoryThatIsOnlyReadIsLeftAlone) {
  ASSERT_EQ(mmap(const_cast<char*>(page(0)), kPages * kPage, PROT_READ, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0), page(0));
  copied_ahead();
  EXPECT_EQ(ibv_dereg_mr(reg(IBV_ACCESS_REMOTE_READ)), 0);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0);
}

/// `to_` receives from an SRQ.
class TrackedSrq : public Tracked {
 protected:
  void SetUp() override {
    Tracked::SetUp();
    ibv_srq_init_attr init{};
    init.attr.max_wr = 8;
    init.attr.max_sge = 1;
    ASSERT_NE(srq_ = ibv_create_srq(pd_, &init), nullptr);
    ASSERT_EQ(ibv_destroy_qp(to_), 0);
    ibv_qp_init_attr of_qp{};
    of_qp.send_cq = of_qp.recv_cq = cq_[0];
    of_qp.srq = srq_;
    of_qp.cap = {.max_send_wr = 4, .max_recv_wr = 0, .max_send_sge = 1, .max_recv_sge = 0, .max_inline_data = 0};
    of_qp.qp_type = IBV_QPT_RC;
    ASSERT_NE(to_ = ibv_create_qp(pd_, &of_qp), nullptr);
    to(from_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
  }
  void TearDown() override {
    EXPECT_EQ(ibv_destroy_qp(to_), 0);
    EXPECT_EQ(ibv_destroy_srq(srq_), 0);
    to_ = make_qp(cq_[0]);
    Tracked::TearDown();
  }
  int receive(std::size_t page) {
    ibv_sge sge = there_.sge(page, 64);
    ibv_recv_wr wr{.wr_id = page, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_srq_recv(srq_, &wr, &bad);
  }
  void comes_into(std::size_t page) {
    ASSERT_EQ(post(IBV_WR_SEND, page), 0);
    completes({page});
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(cq_[0], 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, page);
  }
  ibv_srq* srq_ = nullptr;
};

TEST_F(TrackedSrq, IsNotWithoutAPolicy) { EXPECT_EQ(begin(nullptr).status, EOPNOTSUPP); }

/// Run with MIGR_LINKS.
class TrackedSrqOfAPolicy : public TrackedSrq {
 protected:
  void SetUp() override {
    if (!std::getenv("MIGR_LINKS")) GTEST_SKIP() << "a process of its own runs these";
    TrackedSrq::SetUp();
  }
  void TearDown() override {
    if (srq_) TrackedSrq::TearDown();
  }
};

TEST_F(TrackedSrqOfAPolicy, AreTheReceivesThatWereNotUsedAndThoseThatComeLater) {
  for (const std::size_t page : {1, 3, 5}) ASSERT_EQ(receive(page), 0);
  comes_into(1);
  ASSERT_EQ(begin(nullptr).status, 0);
  ASSERT_EQ(receive(8), 0);
  comes_into(3);
  EXPECT_EQ(taken(there_.mr->lkey, there_), "3+1 5+1 8+1 ");
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE) << "it has ended";
  ASSERT_EQ(receive(10), 0);
  comes_into(5);
}

TEST_F(TrackedSrqOfAPolicy, ThatIsGoneItIsNotAll) {
  ibv_srq_init_attr init{};
  init.attr.max_wr = 1;
  init.attr.max_sge = 1;
  ibv_srq* const another = ibv_create_srq(pd_, &init);
  ASSERT_NE(another, nullptr);
  ASSERT_EQ(begin(nullptr).status, 0);
  EXPECT_EQ(ibv_destroy_srq(another), 0);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
}

/* ---- sessions of a process that was migrated and gets its backup links again --------------- */

class SessionOfAPolicy : public Pollers {
 protected:
  void SetUp() override {
    if (!std::getenv("MIGR_LINKS")) GTEST_SKIP() << "a process of its own runs these";
    Pollers::SetUp();
    made_ = true;
    ASSERT_EQ(ibv_destroy_qp(to_), 0);
    ibv_qp_init_attr_ex init{};
    init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(ex_);
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = pd_;
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
    ASSERT_NE(to_ = ibv_create_qp_ex(context_, &init), nullptr);
    to(from_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
  }
  void TearDown() override {
    if (made_) Pollers::TearDown();
  }
  static int end(ibv_qp_ex* session, std::uint64_t wr_id) {
    session->wr_id = wr_id;
    session->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(session, 0, 0);
    return ibv_wr_complete(session);
  }
  void completes(std::uint64_t wr_id) {
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      ASSERT_LT(ms, kPatienceMs);
      usleep(1000);
    }
    EXPECT_EQ(ex_->wr_id, wr_id);
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    ibv_end_poll(ex_);
  }
  template <class Condition>
  static void wait_for(Condition&& condition) {
    for (int ms = 0; !condition(); ++ms) {
      ASSERT_LT(ms, kPatienceMs);
      usleep(1000);
    }
  }
  bool made_ = false;
};

// Whatever its family: the thread of the links may poll it.
TEST_F(SessionOfAPolicy, IsNotOfOneThread) {
  ibv_cq_init_attr_ex attr{};
  attr.cqe = 1;
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
  model_make_foreign(0, 0, true);
  ibv_cq_ex* const cq = ibv_create_cq_ex(context_, &attr);
  EXPECT_EQ(model_cq_flags(), 0u);
  EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
  model_make_foreign(0, 0, false);
}

// Where its names are not the device's each post takes the lock from then on, and sessions are kept.
TEST_F(SessionOfAPolicy, OnThePathIsNotMixedWithAKeptOne) {
  ASSERT_EQ(migrd.try_to(MIGR_MSG_DESCRIBE, MIGR_DESCRIBE_MOVE).status, ENODEV) << "it leaves its links; migr.ko is not there";
  migrd.freeze();
  model_hold_registrations(1, true);
  migrd.restored();
  wait_for([] { return model_registrations_waiting() == 1; });
  ibv_qp_ex* const session = ibv_qp_to_qp_ex(to_);
  ibv_wr_start(session);
  model_hold_registrations(1, false);
  wait_for([] { return model_mrs(1, 0) == model_mrs(0, 0); });
  usleep(2 * kSoonMs * 1000);  // its backup is next
  static std::atomic<bool> begun = false, first_over = false;
  std::thread other([session] {
    ibv_wr_start(session);
    begun = true;
    while (!first_over) usleep(1000);
    EXPECT_EQ(end(session, 8), 0);
  });
  usleep(kSoonMs * 1000);
  if (begun) {
    other.detach();  // neither can end
    FAIL() << "two sessions are open at a time";
  }
  EXPECT_EQ(end(session, 7), 0);
  first_over = true;
  other.join();
  completes(7);
  completes(8);
}

/// Nothing of it can be executed for longer than anybody waits.
TEST_F(Tracked, ThatIsKeptAndFindsNoRoomEndsWithTheConnection) {
  constexpr std::size_t kCap = 16, kRing = 31;
  model_forget_writes();
  try_for(22);  // 17 s
  model_cut(0, 0, false);
  for (std::size_t i = 0; i < kRing; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1), ENOMEM);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_SUSPEND).status, 0);
  for (std::size_t i = 0; i < kCap; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 2), 0);
  migrd.ask(MIGR_MSG_ROLLBACK);
  model_mend(0);
  for (std::size_t i = 0; i < kRing + kCap; ++i) {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    ASSERT_EQ(wc.wr_id, i < kRing ? 1u : 2u) << i;
    ASSERT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR) << i;
  }
  EXPECT_EQ(model_writes_at(there_.bytes + 2 * kPage), 0u);
}

TEST_F(Tracked, ThatOnlyAnswersRefusesToSendWhileItIsSuspendedToo) {
  to(from_, IBV_QPS_RESET);
  answer(from_, to_, context_);
  const auto session = [this] {
    ibv_qp_ex* const ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begin_write(ex, 1);
    return ibv_wr_complete(ex);
  };
  for (const bool suspended : {false, true}) {
    if (suspended) migrd.ask(MIGR_MSG_SUSPEND), migrd.ask(MIGR_MSG_DRAIN, 1000);
    EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 1), EINVAL) << suspended;
    EXPECT_EQ(session(), EINVAL) << suspended;
  }
  migrd.ask(MIGR_MSG_ROLLBACK);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(ibv_query_qp(from_, &attr, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTR);
}

/* ---- a QP that the application has in RTR, and brings to RTS after the migration ---------- */

/// `to_` answers, with and without the right that a drain marker needs.
class Responder : public Partner {
 protected:
  static constexpr std::uint32_t kPsn = 0x123;  // on that the two have agreed
  static constexpr std::uint8_t kTimeout = 9;

  void SetUp() override {
    Pollers::SetUp();
    to(from_, IBV_QPS_RESET);
    to(to_, IBV_QPS_RESET);
    answer(from_, to_, context_, kPsn);
    ASSERT_EQ(go_to_rts(from_, 0), 0);
    answer(to_, from_, other_);
  }
  static ibv_qp_attr asked(ibv_qp* qp) {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT, &init), 0);
    return attr;
  }
  void goes_to_rts_with(std::uint32_t psn) const {
    EXPECT_EQ(asked(to_).qp_state, IBV_QPS_RTR);
    EXPECT_EQ(to_->state, IBV_QPS_RTR);
    ASSERT_EQ(go_to_rts(to_, kPsn, kTimeout), 0);
    const ibv_qp_attr now = asked(to_);
    EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
    EXPECT_EQ(to_->state, IBV_QPS_RTS);
    EXPECT_EQ(now.sq_psn, psn);
    EXPECT_EQ(now.timeout, kTimeout) << "not what the application has said";
  }
  /// From to_ to from_, which knows of no migration.
  void write_back() {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = 66;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    ASSERT_EQ(ibv_post_send(to_, &wr, &bad), 0);
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      ASSERT_LT(ms, kPatienceMs);
      usleep(1000);
    }
    EXPECT_EQ(ex_->wr_id, 66u);
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    ibv_end_poll(ex_);
  }
  void allow_writes() const {
    ibv_qp_attr attr{};
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    ASSERT_EQ(ibv_modify_qp(to_, &attr, IBV_QP_ACCESS_FLAGS), 0);
  }
};

TEST_F(Responder, OfAPartnerBeginsWithThePsnThatTheOtherEndWasTold) {
  switch_path();
  done(migrd.ask(MIGR_MSG_RESUME));
  goes_to_rts_with(spare_.psn);
}

TEST_F(Responder, WhoseMigrationIsUndoneAfterSwitchBeginsAsAgreed) {
  switch_path();
  migrd.ask(MIGR_MSG_OLD_PATH);
  migrd.ask(MIGR_MSG_ROLLBACK);
  goes_to_rts_with(kPsn);
  write_back();
}

TEST_F(Responder, ThatIsRestoredBeginsWithThePsnThatTheOtherEndWasTold) {
  allow_writes();
  migrd.freeze();
  migrd.restored();
  goes_to_rts_with(to_->qp_num & 0xffffff);
}

TEST_F(Responder, GoesToRtsAfterARollbackWithAllThatTheApplicationSays) {
  two(0);
  migrd.freeze();
  migrd.back();
  expect_two(0);
  ibv_sge into{reinterpret_cast<std::uintptr_t>(memory_), sizeof memory_, mr_->lkey};
  ibv_recv_wr receive{.wr_id = 100, .next = nullptr, .sg_list = &into, .num_sge = 1}, *bad;
  ASSERT_EQ(ibv_post_recv(to_, &receive, &bad), 0);  // is used by the next
  goes_to_rts_with(kPsn);
  send(1);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  EXPECT_EQ(ex_->wr_id, 100u);
  EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
  ibv_end_poll(ex_);
  send(2);
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  EXPECT_EQ(ex_->wr_id, 101u);
  ibv_end_poll(ex_);
  write_back();
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs)) << "of an ERR that was ours";
  migrd.freeze();
  migrd.restored();
  write_back();
}

// The record says RTS then.
TEST_F(Responder, ThatIsRestoredAfterARollbackGoesToRts) {
  migrd.freeze();
  migrd.back();
  migrd.freeze();
  migrd.restored();
  goes_to_rts_with(0);  // as the model's path was
}

TEST_F(Responder, WaitsForTheEndOfTheMigration) {
  migrd.ask(MIGR_MSG_SUSPEND);
  auto goes = std::async(std::launch::async, [this] { return go_to_rts(to_, kPsn); });
  EXPECT_EQ(goes.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(goes.get(), 0);
  write_back();
}

TEST_F(Responder, ThatWasCutBeginsWhereTheOtherEndAwaitsIt) {
  constexpr std::uint32_t kFarAhead = 1u << 22;
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  done(migrd.about(to_, MIGR_MSG_CUT));
  migr_qp_psn there{};
  there.vqpn = to_->qp_num;
  there.psn = kPsn;
  done(migrd.say(MIGR_MSG_SETTLE, 0, &there, sizeof there));
  migrd.ask(MIGR_MSG_ROLLBACK);
  goes_to_rts_with(kPsn + kFarAhead);
}

/* ---- a drain that does not end, and what it leaves ------------------------------------------ */

void drains_in_vain(const ibv_qp* qp = nullptr) {
  ASSERT_EQ(migrd.about(qp, MIGR_MSG_SUSPEND).status, 0);
  ASSERT_EQ(migrd.about(qp, MIGR_MSG_DRAIN, 1).status, ETIMEDOUT);
}

void cut_and_settle(const ibv_qp* one, const ibv_qp* other) {
  std::uint32_t psns[2];
  for (int i = 0; i < 2; ++i) {
    const migr_msg cut = migrd.about(i ? other : one, MIGR_MSG_CUT);
    ASSERT_EQ(cut.status, 0) << cut.text;
    psns[i] = migrd.record<migr_qp_psn>().psn;
  }
  for (int i = 0; i < 2; ++i) {
    const migr_qp_psn there{.ctx_id = 0, .vqpn = (i ? other : one)->qp_num, .psn = psns[!i], .reserved = 0};
    const migr_msg settled = migrd.say(MIGR_MSG_SETTLE, 0, &there, sizeof there);
    ASSERT_EQ(settled.status, 0) << settled.text;
  }
}

void post_message(ibv_qp* qp, std::uint64_t wr_id) {
  ibv_send_wr wr{}, *bad;
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(qp, &wr, &bad), 0);
}

/// `from_` sends, and `to_` has no receive for it until it is awaited.
class Unready : public Pollers {
 protected:
  void await(std::uint64_t wr_id) {
    ibv_recv_wr wr{.wr_id = 100 + wr_id, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad;
    ASSERT_EQ(ibv_post_recv(to_, &wr, &bad), 0);
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, wr_id);
    ibv_poll_cq_attr attr{};
    ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    EXPECT_EQ(ex_->wr_id, 100 + wr_id);
    EXPECT_EQ(ibv_next_poll(ex_), ENOENT);
    ibv_end_poll(ex_);
  }
};

// `to_` allows no writes, and its end has gone back as well.
TEST_F(Unready, ItsMarkerComesWhenAllHasGoneBack) {
  post_message(from_, 1);
  drains_in_vain();
  migrd.ask(MIGR_MSG_ROLLBACK);
  ibv_qp_attr none{};
  ASSERT_EQ(ibv_modify_qp(to_, &none, IBV_QP_ACCESS_FLAGS), 0);
  await(1);
  post_message(from_, 2);  // behind it
  await(2);
}

// In the queue lie two markers then.
TEST_F(Unready, TheSecondTimeItIsCutAndNothingIsLost) {
  post_message(from_, 1);
  drains_in_vain();
  migrd.ask(MIGR_MSG_ROLLBACK);
  drains_in_vain();
  cut_and_settle(from_, to_);
  migrd.ask(MIGR_MSG_ROLLBACK);
  await(1);
  post_message(from_, 2);
  await(2);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(other_cq_, 1, &wc), 0) << wc.wr_id << " completes, which is nobody's";
}

/// The CQ of `from_` holds as much as its application may have in flight, or less.
class Tight : public Tracked {
 protected:
  static constexpr int kEntries = 4;
  static constexpr std::uint32_t kNumber = 0x1000;  // of none at the other end

  void SetUp() override {
    Tracked::SetUp();
    ASSERT_EQ(ibv_destroy_qp(from_), 0);
    model_next_qpn(0, 1, kNumber);
    ASSERT_EQ(ibv_destroy_cq(other_cq_), 0);
    ASSERT_NE(other_cq_ = ibv_create_cq(other_, kEntries, nullptr, nullptr, 0), nullptr);
    from_ = make_there();
    to(to_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
    try_for(17);  // 0.5 s
  }
  ibv_qp* make_there() {
    std::swap(pd_, other_pd_);
    ibv_qp* const qp = make_qp(other_cq_);
    std::swap(pd_, other_pd_);
    return qp;
  }
  /// By receives alone.
  static void fill(ibv_qp* qp) {
    ibv_recv_wr wr{}, *bad;
    for (int i = 0; i < kEntries; ++i) ASSERT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
  }
  static void drains(const ibv_qp* qp) {
    constexpr unsigned kLimitMs = 500;
    ASSERT_EQ(migrd.about(qp, MIGR_MSG_SUSPEND).status, 0);
    const migr_msg drained = migrd.about(qp, MIGR_MSG_DRAIN, kLimitMs);
    EXPECT_EQ(drained.status, 0) << drained.text;
    migrd.ask(MIGR_MSG_ROLLBACK);
  }
};

TEST_F(Tight, MarkersDoNotOverrunWhatIsFull) {
  ibv_qp* const idle = make_there();
  connect(idle, to_, context_);
  model_cut(0, 0, true);
  for (std::size_t page = 1; page <= kEntries; ++page) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, page), 0);
  for (int ms = 0; !model_writes_at(there_.bytes + kEntries * kPage); ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    usleep(1000);
  }
  drains_in_vain();
  migrd.ask(MIGR_MSG_ROLLBACK);
  model_mend(0);
  usleep(kSoonMs * 1000);  // all may complete that can: more, and the device aborts
  completes({1, 2, 3, 4});
  model_forget_writes();
  ASSERT_EQ(ibv_destroy_qp(idle), 0);
  drains(from_);
}

TEST_F(Tight, MarkersOfQpsThatAreGoneAreNotAwaited) {
  fill(from_);
  for (int i = 0; i < 2; ++i) {
    ibv_qp* const stuck = make_there();
    connect(stuck, to_, context_);
    post_message(stuck, 1);
    drains_in_vain(stuck);
    migrd.ask(MIGR_MSG_ROLLBACK);
    ASSERT_EQ(ibv_destroy_qp(stuck), 0);
  }
  drains(from_);
}

TEST_F(Tight, MarkersOfAQpThatWasResetAreNotAwaited) {
  fill(from_);
  ibv_qp* const stuck = make_there();
  for (int i = 0; i < 2; ++i) {
    connect(stuck, to_, context_);
    post_message(stuck, 1);
    drains_in_vain(stuck);
    migrd.ask(MIGR_MSG_ROLLBACK);
    to(stuck, IBV_QPS_RESET);
  }
  drains(from_);
  ASSERT_EQ(ibv_destroy_qp(stuck), 0);
}

// A READ that is posted once more in the name of itself and of what is behind it.
TEST_F(Tight, WhatIsReplayedByAQpThatIsGoneIsNotAwaited) {
  model_cut(0, 0, true);
  ASSERT_EQ(post(IBV_WR_RDMA_READ, 1), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 2), 0);
  for (int ms = 0; !model_writes_at(there_.bytes + 2 * kPage); ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    usleep(1000);
  }
  drains_in_vain();
  cut_and_settle(from_, to_);
  migrd.ask(MIGR_MSG_ROLLBACK);
  ASSERT_EQ(ibv_destroy_qp(from_), 0);
  model_mend(0);
  model_forget_writes();
  from_ = make_there();
  connect(from_, to_, context_);
  fill(from_);
  drains(from_);
}

/* ---- atomic writes, which only sessions post ----------------------------------------------- */

class AtomicWrites : public Tracked {
 protected:
  std::uint64_t send_ops() const override { return Tracked::send_ops() | IBV_QP_EX_WITH_ATOMIC_WRITE; }
  /// Between two writes. What is behind `data` is copied at once.
  void write_word(std::uint64_t word) {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begin_write(ex, 1);
    begin_word(ex, word);
    word = 0;
    end_session(ex, 3);
  }
  void write_word_only(std::uint64_t word) {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begin_word(ex, word);
    EXPECT_EQ(ibv_wr_complete(ex), 0);
  }
  void begin_word(ibv_qp_ex* ex, const std::uint64_t& word) {
    ex->wr_id = 2;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_atomic_write(ex, there_.mr->rkey, there_.at(2), &word);
  }
  void has_written(std::uint64_t word) {
    EXPECT_EQ(completes(1).opcode, IBV_WC_RDMA_WRITE);
    EXPECT_EQ(completes(2).opcode, IBV_WC_ATOMIC_WRITE);
    EXPECT_EQ(completes(3).opcode, IBV_WC_RDMA_WRITE);
    EXPECT_EQ(std::memcmp(there_.bytes + 2 * kPage, &word, sizeof word), 0);
  }
};

TEST_F(AtomicWrites, AreNotedWhileMemoryIsCopiedAhead) {
  ASSERT_EQ(begin(from_).status, 0);
  write_word(1);
  has_written(1);
  EXPECT_EQ(taken(there_.mr->rkey, there_), "1+3 ");
}

TEST_F(AtomicWrites, ThatAreInTheQueueAreNotedWhenThatBegins) {
  model_cut(0, 0, false);
  write_word(2);
  ASSERT_EQ(begin(from_).status, 0);
  model_mend(0);
  has_written(2);
  EXPECT_EQ(taken(there_.mr->rkey, there_), "1+3 ");
}

TEST_F(AtomicWrites, ThatAreKeptGoOnInOrder) {
  constexpr std::uint64_t kWord = 0x0123456789abcdef;
  write_word(kWord);
  has_written(kWord);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  write_word(~kWord);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(other_cq_, 1, &wc), 0);
  migrd.ask(MIGR_MSG_ROLLBACK);
  has_written(~kWord);
}

// More is kept than the path has room for: what is posted makes room as it completes.
TEST_F(AtomicWrites, ThatAreKeptWaitForRoom) {
  constexpr std::uint64_t kWord = 0x0123456789abcdef;
  constexpr int kCap = 16, kRing = 31;  // that are asked for; that the device gives for it, of which a drain marker takes one
  try_for(17);                          // 0.5 s
  model_cut(0, 0, false);
  for (int i = 0; i < kCap; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 4), 0);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_SUSPEND).status, 0);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_DRAIN, 1).status, ETIMEDOUT);
  for (int i = kCap + 1; i < kRing; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 4), 0);
  write_word_only(kWord);
  auto back = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_ROLLBACK).status; });
  EXPECT_EQ(back.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout) << "it was not full";
  model_mend(0);
  EXPECT_EQ(back.get(), 0);
  for (int i = 1; i < kRing; ++i) ASSERT_EQ(completes(4).wr_id, 4u);
  EXPECT_EQ(completes(2).opcode, IBV_WC_ATOMIC_WRITE);
  EXPECT_EQ(std::memcmp(there_.bytes + 2 * kPage, &kWord, sizeof kWord), 0);
}

/* ---- what is kept and cannot be posted again ------------------------------------------------ */

/// By a QP whose CQ has a channel.
class Refused : public Pollers {
 protected:
  void SetUp() override {
    Pollers::SetUp();
    to(from_, IBV_QPS_RESET);
    connect(qp_[0], from_, other_);
    connect(from_, qp_[0], context_);
    migrd.ask(MIGR_MSG_SUSPEND);
  }
  void post(std::uint64_t wr_id, bool refused) const {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = wr_id;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = refused ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_RDMA_WRITE;
    if (refused) wr.wr.atomic.remote_addr = 4;
    ASSERT_EQ(ibv_post_send(qp_[0], &wr, &bad), 0);
  }
};

// The second ends the connection.
TEST_F(Refused, CompletesInItsTurn) {
  for (const std::uint64_t wr_id : {1, 2, 3, 4}) post(wr_id, wr_id % 2 == 0);
  migrd.ask(MIGR_MSG_ROLLBACK);
  for (const std::uint64_t wr_id : {1, 2, 3, 4}) {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(cq_[0], 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_TRUE(wc.status == IBV_WC_WR_FLUSH_ERR || (wr_id == 1 && wc.status == IBV_WC_SUCCESS)) << wr_id;
  }
}

TEST_F(Refused, WakesWhoWaitsForIt) {
  ibv_req_notify_cq(cq_[0], 0);
  post(1, true);
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(next(), cq_[0]);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq_[0], 1, &wc), 1);
  EXPECT_EQ(wc.wr_id, 1u);
  EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
}

/* ---- a QP that the device has put into ERR before it is suspended ------------------------ */

class DeadPeer : public Pollers {
 protected:
  void send_into_the_void() const {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = 55;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    ASSERT_EQ(ibv_post_send(from_, &wr, &bad), 0);
  }
  ibv_wc_status status(std::uint64_t wr_id) const {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0; ++ms) {
      if (ms == kPatienceMs) return IBV_WC_GENERAL_ERR;
      usleep(1000);
    }
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_EQ(wc.qp_num, from_->qp_num);
    return wc.status;
  }
  ibv_qp_state state() const {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(ibv_query_qp(from_, &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
  }
};

class Broken : public DeadPeer {
 protected:
  void SetUp() override {
    Pollers::SetUp();
    model_cut(0, 0, false);
    send_into_the_void();
    for (int ms = 0; ms < kPatienceMs && !failed(); ++ms) usleep(1000);
    ASSERT_TRUE(failed());
    model_mend(0);
  }
  /// The device says so, and nobody has told the library.
  bool failed() const { return readable(other_->async_fd, 0); }
};

// It would try again for an hour.
TEST_P(DeadPeer, IsNotWaitedFor) {
  ibv_qp_attr patient{};
  patient.timeout = 30;
  patient.retry_cnt = 7;
  ASSERT_EQ(ibv_modify_qp(from_, &patient, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT), 0);
  model_cut(0, 0, false);
  send_into_the_void();
  const migr_msg early = migrd.about(from_, MIGR_MSG_GONE);
  EXPECT_EQ(early.status, EBUSY) << "nobody has looked whether a thread posts";
  migrd.ask(MIGR_MSG_SUSPEND);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_GONE).status, 0);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_GONE).status, 0) << "once more";
  model_mend(0);
  migrd.drained();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(state(), IBV_QPS_ERR);
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
  send_into_the_void();
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
}

TEST_P(DeadPeer, IsNotAskedWhereNothingIsInFlight) {
  model_cut(0, 0, false);
  ASSERT_EQ(migrd.about(from_, MIGR_MSG_QP_CREATE).status, 0);  // which finds where the queues lie
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.drained();
  model_mend(0);
  EXPECT_EQ(model_windows(), 0u) << "what took the place of a marker is left";
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(state(), IBV_QPS_RTS);
}

TEST_P(Broken, IsBrokenAfterItWithItsErrorInPlace) {
  move();
  EXPECT_EQ(state(), IBV_QPS_ERR);
  EXPECT_EQ(status(55), IBV_WC_RETRY_EXC_ERR);
  send_into_the_void();
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
}

TEST_P(Broken, AsTheApplicationKnows) {
  EXPECT_EQ(state(), IBV_QPS_ERR);
  EXPECT_EQ(status(55), IBV_WC_RETRY_EXC_ERR);
  move();
  EXPECT_EQ(state(), IBV_QPS_ERR);
  send_into_the_void();
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
}

// Nothing that is drained tells of it.
TEST_P(Broken, OfDatagramsItIsSo) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_[0];
  init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_UD;
  ibv_qp* const datagrams = ibv_create_qp(pd_, &init);
  ASSERT_NE(datagrams, nullptr);
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) to(datagrams, state);
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(datagrams, &wr, &bad), 0);  // to nobody
  ibv_wc wc{};
  for (int ms = 0; ibv_poll_cq(cq_[0], 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
  ASSERT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  move();
  ibv_qp_attr attr{};
  ASSERT_EQ(ibv_query_qp(datagrams, &attr, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_ERR);
  EXPECT_EQ(ibv_destroy_qp(datagrams), 0);
}

INSTANTIATE_TEST_SUITE_P(, DeadPeer, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Broken, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Windows, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Pollers, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Late, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Events, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });

/* ---- programs that close all that they do not know ------------------------------------------ */

/// Far below what the library moves its own up to, and above all that this program has.
constexpr int kUnknown = 512;
void close_all_that_is_unknown() {
  closefrom(kUnknown);
  for (int fd = kUnknown; fd < 8192; ++fd) close(fd);
}

TEST_F(Partner, IsReachedThoughItClosesAllThatItDoesNotKnow) {
  close_all_that_is_unknown();
  migrd.freeze();
  migrd.back();
  two(0);
  expect_two(0);
}

TEST_F(SessionOfAPolicy, GoesOnThoughAllThatIsUnknownIsClosed) {
  close_all_that_is_unknown();
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  usleep(400'000);
  getrusage(RUSAGE_SELF, &after);
  const auto ms = [](const timeval& t) { return t.tv_sec * 1000 + t.tv_usec / 1000; };
  EXPECT_LT(ms(after.ru_utime) + ms(after.ru_stime) - ms(before.ru_utime) - ms(before.ru_stime), 200) << "a thread of the library's spins";
}

/* ---- a path that goes to RTR once more ------------------------------------------------------- */

// What is flushed then is nobody's to see who polls just now.
TEST_F(Responder, WaitsForWhoPollsBeforeItGoesToRts) {
  migrd.freeze();
  migrd.back();
  auto polls = std::async(std::launch::async, [this] {
    ibv_wc wc;
    EXPECT_EQ(ibv_poll_cq(ibv_cq_ex_to_cq(ex_), 1, &wc), 0);  // the last one under the lock
    model_hold_poll();
    return ibv_poll_cq(ibv_cq_ex_to_cq(ex_), 1, &wc);
  });
  while (!model_holds_poll()) usleep(1000);
  auto goes = std::async(std::launch::async, [this] { return go_to_rts(to_, kPsn); });
  EXPECT_EQ(goes.wait_for(std::chrono::milliseconds(2 * kSoonMs)), std::future_status::timeout);
  model_let_poll_go();
  EXPECT_EQ(polls.get(), 0);
  EXPECT_EQ(goes.get(), 0);
  write_back();
}

#ifdef __x86_64__

/* ---- a post beside the way back from SWITCH -------------------------------------------------- */

/// A post of one thread, one instruction at a time, that stands still before the one that was chosen.
struct Stepped {
  std::atomic<bool> on = false, stands = false, goes_on = false;
  int stop_at = 0, step = 0;
  void begin(int at) {
    stands = goes_on = false;
    stop_at = at;
    step = 0;
  }
};
Stepped stepped;
constexpr greg_t kTrap = 1 << 8;  // in the flags: another signal after the next instruction

void on_step(int, siginfo_t*, void* at) {
  auto& flags = static_cast<ucontext_t*>(at)->uc_mcontext.gregs[REG_EFL];
  if (stepped.on && stepped.step++ != stepped.stop_at) return;
  flags &= ~kTrap;
  if (!stepped.on) return;
  stepped.stands = true;
  while (!stepped.goes_on) usleep(100);
}

// It has read where the new path is, which is no more by then.
TEST_F(Partner, WhoPostsAsItGoesBackPostsToTheOldPath) {
  constexpr int kDecided = 25;  // instructions, at least
  struct sigaction action {};
  action.sa_sigaction = on_step;
  action.sa_flags = SA_SIGINFO;
  ASSERT_EQ(sigaction(SIGTRAP, &action, nullptr), 0);
  int at = 0;
  for (bool stood = true; stood && at < 3 * kDecided; ++at) {
    switch_path();
    stepped.begin(at);
    auto posted = std::async(std::launch::async, [this, at] {
      ibv_send_wr wr{}, *bad;
      wr.wr_id = static_cast<std::uint64_t>(at);
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.send_flags = IBV_SEND_SIGNALED;
      stepped.on = true;
      asm volatile("pushfq; orq %0, (%%rsp); popfq" ::"i"(kTrap)
                   : "memory", "cc");
      const int err = ibv_post_send(to_, &wr, &bad);
      stepped.on = false;
      return err;
    });
    while (!stepped.stands && posted.wait_for(std::chrono::seconds(0)) != std::future_status::ready) usleep(100);
    stood = stepped.stands;
    auto back = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_ROLLBACK).status; });
    (void)back.wait_for(std::chrono::milliseconds(2 * kSoonMs));  // it may wait for a lock of who posts
    stepped.goes_on = true;
    ASSERT_EQ(back.get(), 0);
    ASSERT_EQ(posted.get(), 0) << "before instruction " << at;
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      ASSERT_LT(ms, 2000) << "before instruction " << at;
      usleep(1000);
    }
    EXPECT_EQ(ex_->wr_id, static_cast<std::uint64_t>(at));
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    ibv_end_poll(ex_);
  }
  EXPECT_GT(at, kDecided);
}

#endif

}  // namespace
