// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What an application has on the path that it is on and on the next one alike, or is refused: attributes of its QPs, memory windows,
// queues of no depth, events, an SRQ; and a child after fork(). Part of failover_test.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "library.h"
#include "model.h"
#include "speaker.h"
#include "store.h"

namespace {

using namespace ends;

/// A word that one end READs from the other.
struct Reading {
  Reading(const Speaker& by, const Speaker& of) : from(by), to(of), here(reg(by, got)), there(reg(of, word)) {}
  static ibv_mr* reg(const Speaker& of, std::uint64_t& at) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, &at, sizeof at, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  }
  ibv_wc_status read() {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&got), sizeof got, here->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_READ;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(&word), .rkey = there->rkey};
    got = 0;
    EXPECT_EQ(ibv_post_send(from.qp, &wr, &bad), 0);
    ibv_wc wc{};
    EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(from.cq, 1, &wc) == 1; }));
    return wc.status;
  }
  const Speaker &from, &to;
  std::uint64_t word = 0x1234567890, got = 0;
  ibv_mr *here, *there;
};

class Attributes : public testing::Test {
 protected:
  void SetUp() override {
    mend_all();
  }
  static void link_down(const Library& of, const char* device) { ASSERT_EQ(of.verb<int(const char*, std::uint32_t)>("migr_link_down")(device, 1), 0); }
  static void link_up(const Library& of, const char* device) { ASSERT_EQ(of.verb<int(const char*, std::uint32_t)>("migr_link_up")(device, 1), 0); }
  static bool protected_on(unsigned link, const Speaker& x, const Speaker& y) {
    return wait_for([&] { return x.ready_on(link) && y.ready_on(link); });
  }
  static bool both_on(unsigned link, const Speaker& x, const Speaker& y) {
    return wait_for([&] { return x.state().link == link && y.state().link == link; });
  }
};

/// The next path was made before its application let others read.
TEST_F(Attributes, OfThePathMadeAheadAreTheLastOnes) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x, IBV_ACCESS_REMOTE_WRITE);
  Reading reading(x, y);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  ASSERT_EQ(y.grant(Speaker::kAll), 0);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.how();
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
  EXPECT_EQ(reading.got, reading.word);
}

/// And before it had said what it would send with.
TEST_F(Attributes, OfThePathMadeAheadInRtrAreThoseOfRts) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.answer(x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  ibv_qp_attr sends{};
  sends.timeout = 16;
  sends.retry_cnt = 5;
  sends.rnr_retry = 4;
  sends.max_rd_atomic = 3;
  ASSERT_EQ(y.send_too(sends), 0);
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.how();
  const ibv_qp_attr now = y.query();
  EXPECT_EQ(now.timeout, 16);
  EXPECT_EQ(now.retry_cnt, 5);
  EXPECT_EQ(now.rnr_retry, 4);
  EXPECT_EQ(now.max_rd_atomic, 3);
  Writing one(x), other(y);
  EXPECT_TRUE(one.post() && other.post());
  EXPECT_TRUE(wait_for([&] { return one.completed() && other.completed(); }));
}

/// A path is cut, and there is no next one yet: what is changed meanwhile holds for that.
TEST_F(Attributes, ThatChangeWhileThePathIsCutAreThoseOfTheNext) {
  const Library a('a', "exact", "rebuild", 0, 30'000), b('b', "exact", "rebuild", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y, IBV_ACCESS_REMOTE_WRITE), y.connect(x);
  Reading reading(y, x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  model_refuse_qps(1, 1, 1u << 20);
  link_down(a, "a0");
  ASSERT_TRUE(wait_for([&] {
    a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a1", 1);  // so that it is told
    return x.state().phase == MIGR_LINKS_VQP_SWITCHING;
  })) << x.how();
  auto granted = std::async(std::launch::async, [&] { return x.grant(Speaker::kAll); });
  EXPECT_EQ(granted.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  model_refuse_qps(1, 1, 0);
  EXPECT_EQ(granted.get(), 0);
  ASSERT_TRUE(both_on(1, x, y)) << x.how();
  EXPECT_EQ(x.query().qp_access_flags, Speaker::kAll);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
}

/// Its path has left RTR before its application does, and with rights that it has not given.
TEST_F(Attributes, ThatComeWithRtsAfterAChangeAreThoseOfItsPath) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.answer(x, IBV_ACCESS_REMOTE_WRITE);
  Reading reading(x, y);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.how();
  ibv_qp_attr to{};
  to.qp_access_flags = Speaker::kAll;
  ASSERT_EQ(y.send_too(to, IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
}

/// The device has given a path up, and nobody has polled what tells of it.
TEST_F(Attributes, ThatChangeWhenThePathHasFailedUnseenAreThoseOfTheNext) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y, IBV_ACCESS_REMOTE_WRITE), y.connect(x);
  Reading reading(y, x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  ibv_send_wr send{}, *bad;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(x.qp, &send, &bad), 0);  // finds no receive
  ASSERT_TRUE(wait_for([] { return model_break_paths(0, 0, 1) == 1; }));
  EXPECT_EQ(x.grant(Speaker::kAll), 0);
  EXPECT_EQ(x.query().qp_access_flags, Speaker::kAll);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
  ibv_recv_wr receive{}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(y.qp, &receive, &bad_receive), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

/// The backup link has a smaller MTU than the default one, to which they go back.
TEST_F(Attributes, OfEachPathIsTheMtuThatTheApplicationHasSetAsFarAsItsLinkHasIt) {
  constexpr unsigned kReturnMs = 5;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", kReturnMs, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.how();
  EXPECT_EQ(x.query().path_mtu, IBV_MTU_512);
  EXPECT_EQ(y.query().path_mtu, IBV_MTU_512);
  link_up(a, "a0");
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  EXPECT_EQ(x.query().path_mtu, IBV_MTU_1024);
  EXPECT_EQ(y.query().path_mtu, IBV_MTU_1024);
}

/// It would be in RTS there.
TEST_F(Attributes, OfAQpInSqdKeepItWhereItIs) {
  constexpr unsigned kReturnMs = 20;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", kReturnMs, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  const auto to = [&x](ibv_qp_state state) {
    ibv_qp_attr attr{};
    attr.qp_state = state;
    return x.modify(attr, IBV_QP_STATE);
  };
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.how();
  ASSERT_EQ(to(IBV_QPS_SQD), 0);
  link_up(a, "a0");
  ASSERT_TRUE(protected_on(1, x, y)) << x.how();
  std::this_thread::sleep_for(std::chrono::milliseconds(10 * kReturnMs));
  EXPECT_EQ(x.state().link, 1u);
  EXPECT_EQ(x.query().qp_state, IBV_QPS_SQD);
  ASSERT_EQ(to(IBV_QPS_RTS), 0);
  ASSERT_TRUE(protected_on(0, x, y)) << x.how();
  ASSERT_EQ(to(IBV_QPS_SQD), 0);
  model_cut_now(0);
  link_down(a, "a0");
  ASSERT_TRUE(wait_for([&] { return std::string(x.state().why) == "gave up"; })) << x.how();
  EXPECT_EQ(x.query().qp_state, IBV_QPS_SQD);
  Writing writing(x);
  ASSERT_TRUE(writing.post());
  ASSERT_EQ(to(IBV_QPS_RTS), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
}

/// What is bound on one device is not on another: from the first window on nobody leaves the default link, not even one that is healthy. Off that
/// there are none.
TEST(Windows, EndTheBackupAndAreRefusedOffTheDefaultLink) {
  mend_all();
  const Library a('a', "exact", "cached", 5, 30'000), b('b', "exact", "cached", 5, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  const auto tell = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  Writing one(x), other(y);
  const auto all_completed = [&] { return wait_for([&] { return one.completed() && other.completed(); }); };
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  tell("migr_link_down");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  errno = 0;
  ASSERT_EQ(ibv_alloc_mw(x.pd, IBV_MW_TYPE_1), nullptr);
  EXPECT_EQ(errno, EBUSY);
  tell("migr_link_up");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how();

  ibv_mw* window = nullptr;
  ASSERT_TRUE(wait_for([&] { return store_pass(0), store_pass(1), (window = ibv_alloc_mw(x.pd, IBV_MW_TYPE_1)) != nullptr; })) << std::strerror(errno);
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "its process has memory windows"; })) << x.how();
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  EXPECT_TRUE(wait_for([&] { return std::string(y.state().why) == "the other end has given up"; })) << y.how();
  EXPECT_EQ(y.state().phase, MIGR_LINKS_VQP_MAKING) << "it carries, and has no backup";
  tell("migr_link_down");
  EXPECT_TRUE(one.post() && other.post());
  EXPECT_TRUE(all_completed());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(x.state().link, 0u);
  EXPECT_EQ(y.state().link, 0u);
  EXPECT_TRUE(one.post() && other.post());
  EXPECT_TRUE(all_completed());
  ibv_mw* const second = ibv_alloc_mw(x.pd, IBV_MW_TYPE_1);
  EXPECT_NE(second, nullptr);
  for (ibv_mw* mw : {window, second}) EXPECT_EQ(ibv_dealloc_mw(mw), 0);

  model_cut_now(0);
  ibv_wc wc{};
  EXPECT_TRUE(one.post());
  EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << "nobody is told of a link that fails";
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
}

/// A QP that only receives or only sends, or neither: soft-RoCE has no room in a queue of no depth for what a cut posts behind all others.
TEST(Depthless, QueuesChangeTheirPath) {
  for (const bool sessions : {false, true}) {
    mend_all();
    const Library a('a', "exact", "cached", 5, 3000), b('b', "exact", "cached", 5, 3000);
    ibv_qp_cap sends = Speaker::kCap, neither = sends;
    sends.max_recv_wr = neither.max_recv_wr = neither.max_send_wr = 0;
    const Speaker x(a, nullptr, nullptr, nullptr, sessions, sends), y(b, nullptr, nullptr, nullptr, sessions, neither);
    x.connect(y), y.connect(x);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
    Writing writing(x);
    const auto say = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
    say("migr_link_down");
    ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how() << "; " << y.how();
    ASSERT_TRUE(writing.post());
    ASSERT_TRUE(wait_for([&] { return writing.completed(); }));
    say("migr_link_up");
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
    ASSERT_TRUE(writing.post());
    ASSERT_TRUE(wait_for([&] { return writing.completed(); }));
  }
}

/// Two connected ends; who has `x` waits at the channel of its CQ.
class Waiting : public testing::Test {
 protected:
  void SetUp() override {
    mend_all();
    ASSERT_EQ(meet(x_, y_), "");
  }
  void lose_the_link() {
    ASSERT_EQ(a_.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
    const auto is_there = [](const Speaker& s) { return s.state().link == 1 && s.state().phase == MIGR_LINKS_VQP_MAKING; };
    ASSERT_TRUE(wait_for([&] { return is_there(x_) && is_there(y_); })) << x_.how() << "; " << y_.how();
  }
  void receive() const {
    ibv_recv_wr wr{}, *bad;
    ASSERT_EQ(ibv_post_recv(x_.qp, &wr, &bad), 0);
  }
  void send(bool solicited) const {
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = solicited ? IBV_SEND_SOLICITED : 0;
    ASSERT_EQ(ibv_post_send(y_.qp, &wr, &bad), 0);
  }
  bool comes() const {
    ibv_wc wc{};
    return wait_for([&] { return ibv_poll_cq(x_.cq, 1, &wc) == 1; }) && wc.status == IBV_WC_SUCCESS;
  }
  bool woken(int ms) const {
    pollfd p{.fd = channel_->fd, .events = POLLIN, .revents = 0};
    return poll(&p, 1, ms) == 1;
  }
  void take_event() const {
    ibv_cq* cq;
    void* context;
    ASSERT_EQ(a_.verb<int(ibv_comp_channel*, ibv_cq**, void**)>("ibv_get_cq_event")(channel_, &cq, &context), 0);
    EXPECT_EQ(cq, x_.cq);
    a_.verb<void(ibv_cq*, unsigned)>("ibv_ack_cq_events")(cq, 1);
  }

  const Library a_{'a', "exact", "cached", 0, 3000}, b_{'b', "exact", "cached", 0, 3000};
  ibv_comp_channel* const channel_ = a_.verb<ibv_comp_channel*(ibv_context*)>("ibv_create_comp_channel")(a_.context);
  const Speaker x_{a_, nullptr, a_.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(a_.context, 256, nullptr, channel_, 0)}, y_{b_};
};

/// Of a CQ that is armed for those only.
class Solicited : public Waiting {};

TEST_F(Solicited, CompletionsOnABackupLinkWakeWhoWaitsForThem) {
  ASSERT_NO_FATAL_FAILURE(lose_the_link());
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(ibv_req_notify_cq(x_.cq, 1), 0);
    ASSERT_NO_FATAL_FAILURE(receive());
    ASSERT_NO_FATAL_FAILURE(send(false));
    ASSERT_TRUE(comes());
    ASSERT_FALSE(woken(20));
    ASSERT_NO_FATAL_FAILURE(receive());
    ASSERT_NO_FATAL_FAILURE(send(true));
    ASSERT_TRUE(woken(5000)) << "message " << i;
    ASSERT_TRUE(comes());
    ASSERT_NO_FATAL_FAILURE(take_event());
  }
}

/// One arming brings one event, also where what the change flushes completes in the same CQ.
class Events : public Waiting {};

TEST_F(Events, ThatLieUnreadWhenTheLinkFailsAreAllThereIs) {
  ASSERT_NO_FATAL_FAILURE(receive());
  ASSERT_EQ(ibv_req_notify_cq(x_.cq, 0), 0);
  ASSERT_NO_FATAL_FAILURE(send(false));
  ASSERT_TRUE(woken(5000));
  ASSERT_NO_FATAL_FAILURE(receive());  // which the change flushes
  ASSERT_NO_FATAL_FAILURE(lose_the_link());
  ASSERT_NO_FATAL_FAILURE(take_event());
  EXPECT_FALSE(woken(200)) << "and it was armed once";
  EXPECT_TRUE(comes());
}

/// Who has an SRQ waits for this event before the QP is destroyed. What is said of paths that were cut is not it.
TEST(LastWqe, IsToldOfAQpOnABackupLink) {
  mend_all();
  model_async_events();
  const Library a('a', "exact", "cached", 5, 3000), b('b', "exact", "cached", 5, 3000);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  ibv_srq_init_attr of_srq{};
  of_srq.attr.max_wr = of_srq.attr.max_sge = 1;
  ibv_srq* const srq = a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq);
  const Speaker x(a, pd, nullptr, srq), y(b);
  ASSERT_EQ(meet(x, y), "");
  const auto say = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  for (int i = 0; i < 2; ++i) {
    if (i) say("migr_link_up");
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
    say("migr_link_down");
    ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how() << "; " << y.how();
  }
  auto heard = std::async(std::launch::async, [&] {
    ibv_async_event event{};
    EXPECT_EQ(a.verb<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(a.context, &event), 0);
    return event;
  });
  EXPECT_EQ(heard.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout) << "of a path that was cut";
  ASSERT_TRUE(wait_for([] { return store_all_stand(1); }));
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;  // for which there is no receive
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  constexpr unsigned kNone = 1;  // receives of its own
  EXPECT_TRUE(wait_for([] { return model_break_paths(1, 0, kNone) != 0; }));
  EXPECT_EQ(heard.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout) << "of a path that has failed on the last link, and is made anew";
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(x.modify(to, IBV_QP_STATE), 0);
  if (heard.wait_for(std::chrono::seconds(10)) != std::future_status::ready) {
    fprintf(stderr, "nobody is told of the last receive\n");
    abort();  // the thread would wait for ever
  }
  ibv_async_event event = heard.get();
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event.element.qp, x.qp);
  auto destroyed = std::async(std::launch::async, [&] { return a.verb<int(ibv_qp*)>("ibv_destroy_qp")(x.qp); });
  EXPECT_EQ(destroyed.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << "the event is not acknowledged";
  a.verb<void(ibv_async_event*)>("ibv_ack_async_event")(&event);
  EXPECT_EQ(destroyed.get(), 0);
  EXPECT_EQ(a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq), 0);
  EXPECT_EQ(model_unbalanced(), 0u);
}

/// Who polls a CQ that it cannot use finds nothing.
TEST(Forked, ChildMayPollWhatWasOnABackupLink) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  ASSERT_EQ(meet(x, y), "");
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how() << "; " << y.how();
  const pid_t child = fork();
  if (!child) {
    alarm(20);
    ibv_wc wc{};
    _exit(ibv_poll_cq(x.cq, 1, &wc));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

/// The QPs of an SRQ have partners of which one leaves the link, and comes back. Both say as much as they like meanwhile.
TEST(Shared, AnSrqServesTwoLinksAtATime) {
  mend_all();
  model_async_events();  // of a QP with an SRQ that is in ERR
  const Library a('a', "exact", "cached", 5, 3000), b('b', "exact", "cached", 5, 3000), c('b', "exact", "cached", 5, 3000);
  constexpr std::uint32_t kReceives = 6, kMessages = 300, kBytes = 2100;
  ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  ibv_srq_init_attr of_srq{};
  of_srq.attr.max_wr = kReceives;
  of_srq.attr.max_sge = 1;
  ibv_srq* const srq = a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq);
  const Speaker one(a, pd, nullptr, srq), two(a, pd, one.cq, srq), y(b), z(c);
  std::vector<std::uint8_t> in(kReceives * kBytes), out(kBytes);
  const auto reg = [&](const Library& lib, ibv_pd* of, std::vector<std::uint8_t>& v) { return lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of, v.data(), v.size(), IBV_ACCESS_LOCAL_WRITE); };
  ibv_mr* const to = reg(a, pd, in);
  ibv_mr* const from[] = {reg(b, y.pd, out), reg(c, z.pd, out)};
  const auto post = [&](std::uint64_t id) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&in[id * kBytes]), kBytes, to->lkey};
    ibv_recv_wr wr{.wr_id = id, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    ASSERT_EQ(ibv_post_srq_recv(srq, &wr, &bad), 0);
  };
  for (std::uint64_t id = 0; id < kReceives; ++id) post(id);
  one.connect(y), y.connect(one);
  two.connect(z), z.connect(two);
  const Speaker* const speakers[] = {&y, &z};
  std::uint32_t posted[2]{}, sent[2]{}, got[2]{};
  std::set<std::uint64_t> at_device;
  for (std::uint64_t id = 0; id < kReceives; ++id) at_device.insert(id);
  const auto say = [&](int who, std::uint32_t until) {
    for (; posted[who] < until && posted[who] - sent[who] < kDepth; ++posted[who]) {
      ibv_sge sge{reinterpret_cast<std::uint64_t>(out.data()), kBytes, from[who]->lkey};
      ibv_send_wr wr{}, *bad;
      wr.opcode = IBV_WR_SEND_WITH_IMM;
      wr.imm_data = posted[who];
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.sg_list = &sge;
      wr.num_sge = posted[who] % 3 ? 1 : 0;
      ASSERT_EQ(ibv_post_send(speakers[who]->qp, &wr, &bad), 0);
    }
    ibv_wc wc;
    while (ibv_poll_cq(speakers[who]->cq, 1, &wc) == 1) {
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      ++sent[who];
    }
  };
  bool posts_again = true, waits = false;
  std::vector<std::uint64_t> held;
  std::atomic<unsigned> reached{0};
  const auto get_event = [&] {
    ibv_async_event event;
    if (a.verb<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(a.context, &event)) return false;
    EXPECT_EQ(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
    EXPECT_EQ(event.element.srq, srq);
    a.verb<void(ibv_async_event*)>("ibv_ack_async_event")(&event);
    ++reached;
    return true;
  };
  const auto hear = [&] {
    while (!waits && get_event()) {}
    ibv_wc wc;
    while (ibv_poll_cq(one.cq, 1, &wc) == 1) {
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << "receive " << wc.wr_id;
      const int who = wc.qp_num == one.qp->qp_num ? 0 : 1;
      ASSERT_EQ(wc.imm_data, got[who]++) << "partner " << who;
      ASSERT_EQ(at_device.erase(wc.wr_id), 1u) << "receive " << wc.wr_id << " was not posted";
      if (posts_again) post(wc.wr_id), at_device.insert(wc.wr_id);
      else held.push_back(wc.wr_id);
    }
  };
  std::uint32_t due[2]{};
  const auto talk = [&](std::uint32_t first, std::uint32_t second) {
    due[0] += first, due[1] += second;
    return wait_for([&] {
      say(0, due[0]), say(1, due[1]), hear();
      return testing::Test::HasFailure() || (got[0] == due[0] && got[1] == due[1] && sent[0] == due[0] && sent[1] == due[1]);
    });
  };
  constexpr std::uint32_t kLimit = 3;
  const auto arm = [&] {
    ibv_srq_attr attr{};
    attr.srq_limit = kLimit;
    ASSERT_EQ(a.verb<int(ibv_srq*, ibv_srq_attr*, int)>("ibv_modify_srq")(srq, &attr, IBV_SRQ_LIMIT), 0);
  };
  const auto quiet = [&](unsigned events) {
    for (int i = 0; i < 15; ++i) hear(), std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return reached == events;
  };
  /// Of the armed SRQ's receives two are used, and two more.
  const auto reach_limit = [&](const char* where, bool waiting) {
    ASSERT_TRUE(quiet(0)) << where << ": an event with all receives posted";
    ibv_srq_attr attr{};
    ASSERT_EQ(a.verb<int(ibv_srq*, ibv_srq_attr*)>("ibv_query_srq")(srq, &attr), 0);
    ASSERT_EQ(attr.srq_limit, kLimit) << where;
    std::thread reader;
    if (waiting) {
      ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, 0), 0);
      waits = true;
      reader = std::thread([&] { EXPECT_TRUE(get_event()); });
    }
    posts_again = false;
    EXPECT_TRUE(talk(1, 1));
    EXPECT_TRUE(quiet(0)) << where << ": an event with more receives than the limit";
    EXPECT_TRUE(talk(1, 1));
    EXPECT_TRUE(wait_for([&] { return hear(), reached > 0; })) << where << ": no event";
    if (reached == 0) abort();  // the thread would wait for ever
    if (waiting) reader.join();
    waits = false;
    ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
    posts_again = true;
    for (const std::uint64_t id : held) post(id), at_device.insert(id);
    held.clear();
    ASSERT_TRUE(quiet(1)) << where << ": it is armed no more";
    ASSERT_EQ(a.verb<int(ibv_srq*, ibv_srq_attr*)>("ibv_query_srq")(srq, &attr), 0);
    ASSERT_EQ(attr.srq_limit, 0u) << where;
    reached = 0;
  };
  ASSERT_TRUE(wait_for([&] { return one.ready_on(0) && two.ready_on(0) && y.ready_on(0) && z.ready_on(0); })) << two.how();
  for (int round = 0; round < 4; ++round) {
    ASSERT_TRUE(talk(1, 1));
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_down")("b0", 1), 0);
    if (round == 1) {             // once: a message that is cut in the middle keeps its receive from all others
      ASSERT_TRUE(talk(20, 20));  // else all receives are on the link that is not left when nobody posts any more
    }
    ASSERT_TRUE(wait_for([&] { return two.state().link == 1 && z.state().link == 1; })) << two.how();
    ASSERT_TRUE(talk(0, 1)) << "no receive has come to the other link";
    ASSERT_TRUE(talk(kMessages, kMessages)) << got[0] << " and " << got[1] << " have come";
    ASSERT_TRUE(talk(kMessages, 0) && talk(0, kMessages)) << got[0] << " and " << got[1] << " have come, one after the other";
    ASSERT_TRUE(one.ready_on(0)) << "the other one: phase " << one.state().phase << " on link " << one.state().link << ", " << one.how();
    arm();
    reach_limit("on two links", round % 2);
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_up")("b0", 1), 0);
    ASSERT_TRUE(talk(kMessages, kMessages));
    ASSERT_TRUE(wait_for([&] { return two.ready_on(0) && z.ready_on(0); })) << two.how();
    arm();
    reach_limit("back on one", round % 2);
    arm();
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_down")("b0", 1), 0);
    ASSERT_TRUE(wait_for([&] { return two.state().link == 1 && z.state().link == 1; })) << two.how();
    reach_limit("armed before one left", round % 2);
    arm();
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_up")("b0", 1), 0);
    ASSERT_TRUE(wait_for([&] { return two.ready_on(0) && z.ready_on(0); })) << two.how();
    reach_limit("armed before it came back", round % 2);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
  for (const Speaker* s : {&one, &two, &y, &z}) s->destroy();
  EXPECT_EQ(a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq), 0);
}

/// While ibv_destroy_cq() is in the driver the SRQ that it had receives of is looked after, for another CQ.
TEST(Shared, ReceivesAreNotLookedForInACqThatIsBeingDestroyed) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  ibv_srq_init_attr of_srq{};
  of_srq.attr.max_wr = of_srq.attr.max_sge = 1;
  ibv_srq* const srq = a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq);
  const auto destroy_cq = a.verb<int(ibv_cq*)>("ibv_destroy_cq");
  const Speaker one(a, pd, nullptr, srq), y(b), z(b);
  one.connect(y), y.connect(one);
  ASSERT_TRUE(wait_for([&] { return one.ready_on(0) && y.ready_on(0); })) << one.how();
  one.destroy();
  model_hold_destroyed_cqs(true);
  auto destroyed = std::async(std::launch::async, [&] { return destroy_cq(one.cq); });
  ASSERT_TRUE(wait_for([] { return model_destroyed_cqs_waiting() == 1; }));
  const Speaker two(a, pd, nullptr, srq);
  two.connect(z), z.connect(two);
  EXPECT_TRUE(wait_for([&] { return two.ready_on(0) && z.ready_on(0); })) << two.how();
  model_hold_destroyed_cqs(false);
  EXPECT_EQ(destroyed.get(), 0);
  for (const Speaker* s : {&two, &y, &z}) s->destroy();
  EXPECT_EQ(a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq), 0);
}

}  // namespace
