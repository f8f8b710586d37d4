// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is posted while a path is left: in sessions of ibv_wr_*, by a thread that is late, in a drain; what lies behind errors, and
// atomics that are relayed. Part of failover_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "library.h"
#include "model.h"
#include "speaker.h"
#include "store.h"

namespace {

using namespace ends;

/// A session that began while posts are noted is kept. Its links are left and come back before it ends: they are there all the same.
TEST(Session, ThatIsOpenKeepsNoBackupAway) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b, nullptr, nullptr, nullptr, true);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  ibv_qp_ex* const sessions[] = {a.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(x.qp), b.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(y.qp)};
  for (ibv_qp_ex* session : sessions) ibv_wr_start(session);
  const StoreProcess process = store_process_of(0);
  char why[200] = "";
  process.park(why, sizeof why);
  EXPECT_STREQ(why, "");
  EXPECT_FALSE(x.ready_on(0) && y.ready_on(0));
  process.let_go();
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
  for (ibv_qp_ex* session : sessions) {
    session->wr_id = 7;
    session->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(session, 0, 0);
    EXPECT_EQ(ibv_wr_complete(session), 0);
  }
  ibv_wc wc{};
  for (const Speaker* s : {&x, &y}) {
    EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(s->cq, 1, &wc) == 1; }));
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, 7u);
  }
}

/// Posts a WRITE of no bytes.
struct Session {
  explicit Session(const Speaker& s) : of(s), ex(s.lib.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(s.qp)) { ibv_wr_start(ex); }
  int end(std::uint64_t wr_id) const {
    ex->wr_id = wr_id;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, 0, 0);
    return ibv_wr_complete(ex);
  }
  bool completes(std::uint64_t wr_id) const {
    ibv_wc wc{};
    return wait_for([&] { return ibv_poll_cq(of.cq, 1, &wc) == 1; }) && wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id;
  }
  const Speaker& of;
  ibv_qp_ex* const ex;
};

/// The ends agree to relay atomics, from when on sessions are kept, while one is open on the path: that of another thread waits for it.
TEST(Session, OnThePathIsNotMixedWithAKeptOne) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b, nullptr, nullptr, nullptr, true);
  x.connect(y), y.connect(x);
  const Session one(x);
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "waits for the end of an ibv_wr_* session" || x.ready_on(0); }));
  ASSERT_FALSE(x.ready_on(0)) << "sessions that begin now are kept, beside the one on the path";
  std::atomic<bool> begins = false;
  auto other = std::async(std::launch::async, [&] {
    begins = true;
    const Session kept(x);
    return kept.end(8);
  });
  ASSERT_TRUE(wait_for([&] { return begins.load(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(one.end(7), 0);
  EXPECT_EQ(other.get(), 0);
  EXPECT_TRUE(one.completes(7));
  EXPECT_TRUE(one.completes(8));
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
  EXPECT_EQ(x.state().atomics, unsigned{MIGR_LINKS_RELAYED});
}

/// It is open when the link fails, and its thread asks the library for something before it ends it.
TEST(Session, WhoseThreadNeedsTheLibraryEndsNoConnection) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  std::atomic<bool> ends = false;
  std::atomic<unsigned> posted = 0;
  std::thread poster([&] {
    while (!ends) {
      const Session session(x);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(x.query().qp_state, IBV_QPS_RTS);
      EXPECT_EQ(session.end(posted), 0);
      ++posted;
    }
  });
  unsigned completed = 0;
  const auto poll = [&] {
    for (ibv_wc wc; ibv_poll_cq(x.cq, 1, &wc) == 1; ++completed) EXPECT_TRUE(wc.status == IBV_WC_SUCCESS && wc.wr_id == completed) << wc.status << " at " << completed;
    return testing::Test::HasFailure();
  };
  EXPECT_TRUE(wait_for([&] { return poll() || completed > 1; }));
  model_cut_now(0);
  EXPECT_TRUE(wait_for([&] { return poll() || (x.state().link == 1 && y.state().link == 1); })) << x.how();
  const unsigned before = posted;
  EXPECT_TRUE(wait_for([&] { return poll() || completed > before; }));
  ends = true;
  poster.join();
  EXPECT_TRUE(wait_for([&] { return poll() || completed == posted; })) << completed << " of " << posted;
}

/// It is to be on link 1 from now on, and looks at that at once.
void prefer_other(const Library& a) {
  store_prefer("a1");
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
}

/// The longest of the calls that a thread makes for so long which need the library's lock.
Clock::duration longest_query(const Speaker& x, std::chrono::milliseconds time) {
  Clock::duration longest{};
  for (const auto until = Clock::now() + time; Clock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    const auto begun = Clock::now();
    EXPECT_EQ(x.query().qp_state, IBV_QPS_RTS);
    longest = std::max(longest, Clock::now() - begun);
  }
  return longest;
}

/// The same, and the link is to be left without a failure: who waits for the session's end does not hold the library's lock.
TEST(Session, WhoseThreadNeedsTheLibraryIsNotHeldUpByADrain) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  const Session session(x);
  ASSERT_NO_FATAL_FAILURE(prefer_other(a));
  EXPECT_LT(longest_query(x, std::chrono::milliseconds(1500)), std::chrono::seconds(1));
  EXPECT_EQ(session.end(7), 0);
  EXPECT_TRUE(session.completes(7));
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  store_prefer(nullptr);
}

/// It has begun by then: else who posts waits for the session of another thread.
void post_in_a_drain(Writing& other) {
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  auto posted = std::async(std::launch::async, [&] { return other.post(); });
  ASSERT_EQ(posted.wait_for(std::chrono::seconds(1)), std::future_status::ready) << "the drain has not begun";
}

/// A drain that such a session outlasts is over without it. What another thread has posted meanwhile is not posted before its end, for which the device
/// has the queue locked: who did so with the library's lock would wait for a thread that waits for him.
TEST(Session, ThatOutlastsADrainIsWaitedForByWhatOthersPost) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  const Session session(x);
  ASSERT_NO_FATAL_FAILURE(prefer_other(a));
  Writing other(x);
  ASSERT_NO_FATAL_FAILURE(post_in_a_drain(other));
  EXPECT_LT(longest_query(x, std::chrono::milliseconds(2500)), std::chrono::seconds(1));
  store_prefer(nullptr);
  EXPECT_EQ(session.end(7), 0);
  EXPECT_TRUE(session.completes(7));
  EXPECT_TRUE(wait_for([&] { return other.completed(); }));
}

/// The other end has given up meanwhile, and it is the session's own thread that closes the QP. What was kept is flushed behind the session.
TEST(Session, ThatOutlastsItsConnectionHoldsNobodyUpWhoClosesTheQp) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b), other_x(a), other_y(b);
  x.connect(y), y.connect(x);
  other_x.connect(other_y), other_y.connect(other_x);  // whose channels carry the word
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && other_x.ready_on(0) && other_y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  const Session session(x);
  ASSERT_NO_FATAL_FAILURE(prefer_other(a));
  Writing other(x);
  ASSERT_NO_FATAL_FAILURE(post_in_a_drain(other));
  y.destroy();
  ASSERT_TRUE(wait_for([&] { return std::string(x.state().why) == "the other end has given up"; })) << x.how();
  const auto begun = Clock::now();
  ibv_qp_attr error{};
  error.qp_state = IBV_QPS_ERR;
  EXPECT_EQ(x.modify(error, IBV_QP_STATE), 0);
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  store_prefer(nullptr);
  EXPECT_EQ(session.end(7), 0);
  for (const std::uint64_t wr_id : {7, 0}) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; }));
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_NE(wc.status, IBV_WC_SUCCESS);
  }
}

/// A thread that has passed the check of a post loses its processor, and posts when the path is being left, or was.
class LatePost : public testing::Test {
 public:
  explicit LatePost(const char* paths = "cached", unsigned return_ms = 0) : a_('a', "exact", paths, return_ms, 30'000), b_('b', "exact", paths, return_ms, 30'000) {}
  /// At y.
  int receive(std::uint64_t wr_id = kReceive) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(in_.data()), kBytes, to_->lkey};
    ibv_recv_wr wr{.wr_id = wr_id, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(y_.qp, &wr, &bad);
  }

 protected:
  static constexpr std::uint32_t kBytes = 2100, kSlots = 80, kReceive = 500;  // more than two packets; WRITEs of a test; a wr_id

  void SetUp() override {
    mend_all();
    model_forget_writes();
    x_.connect(y_), y_.connect(x_);
    ASSERT_TRUE(wait_for([&] { return x_.ready_on(0) && y_.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x_.how();
  }
  void TearDown() override { a_.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1); }  // its channels are waited for by the next
  ibv_mr* reg(const Speaker& of, std::vector<std::uint8_t>& memory) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  /// From x to y. A SEND waits for a receive, and a WRITE goes to the slot of its number.
  int post(std::uint32_t i, ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE, std::uint32_t bytes = kBytes) const {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(out_.data()), bytes, from_->lkey};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = i;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (opcode == IBV_WR_RDMA_WRITE) wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(slot(i)), .rkey = to_->rkey};
    return ibv_post_send(x_.qp, &wr, &bad);
  }
  const std::uint8_t* slot(std::uint32_t i) const { return &in_[i * std::size_t{kBytes}]; }
  template <class Post>
  std::future<int> post_late(Post&& post, bool until_err, void (*before)(void*) = nullptr) {
    auto late = std::async(std::launch::async, [=, this] {
      model_hold_post(until_err, before, this);
      return post();
    });
    EXPECT_TRUE(wait_for(model_holds_post));
    return late;
  }
  std::future<int> post_late(std::uint32_t i, bool until_err, void (*before)(void*) = nullptr) {
    return post_late([=, this] { return post(i); }, until_err, before);
  }
  void let_go(std::future<int>& late) const {
    model_let_post_go();
    EXPECT_EQ(late.get(), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it is found where it was posted to
  }
  /// Of y, which gets a SEND.
  void receives(std::uint64_t wr_id) const {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(y_.cq, 1, &wc) == 1; })) << wr_id;
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(wc.wr_id, wr_id);
  }
  /// From `first` on, a SEND that finds no receive before all others. @return the end
  std::uint32_t fill_queue(std::uint32_t first) const {
    EXPECT_EQ(post(first, IBV_WR_SEND), 0);
    std::uint32_t i = first + 1;
    while (i < first + kSlots && !post(i)) ++i;
    EXPECT_EQ(i, first + kRing);
    return i;
  }
  /// They do next, in order.
  void complete(std::uint32_t first, std::uint32_t end) {
    for (std::uint32_t i = first; i < end; ++i) {
      ibv_wc wc{};
      ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x_.cq, 1, &wc) == 1; })) << i << " does not complete: " << x_.how();
      ASSERT_EQ(wc.wr_id, i);
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << i;
    }
  }
  /// All slots of the queue have been used, by WRITEs of one packet. @return how many
  std::uint32_t use_queue() {
    for (std::uint32_t i = 0; i <= kRing; ++i) {
      EXPECT_EQ(post(i, IBV_WR_RDMA_WRITE, 1), 0);
      complete(i, i + 1);
    }
    return kRing + 1;
  }
  void leave() {
    ASSERT_EQ(a_.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  }

  const Library a_, b_;
  const Speaker x_{a_}, y_{b_};
  std::vector<std::uint8_t> out_ = std::vector<std::uint8_t>(kBytes, 7), in_ = std::vector<std::uint8_t>(kSlots * kBytes);
  const ibv_mr *const from_ = reg(x_, out_), *const to_ = reg(y_, in_);
};

TEST_F(LatePost, ToAnIdleQueueIsNotTakenForExecuted) {
  const std::uint32_t late = use_queue();
  auto posted = post_late(late, true);
  leave();
  EXPECT_EQ(posted.get(), 0);
  complete(late, late + 1);
  EXPECT_EQ(model_writes_at(slot(late)), 1u);
}

TEST_F(LatePost, BehindWhatCompletesMeanwhileIsNotTakenForExecuted) {
  const std::uint32_t send = use_queue(), late = send + 1;
  ASSERT_EQ(post(send, IBV_WR_SEND), 0);  // finds a receive when the path is about to be cut
  auto posted = post_late(late, true, [](void* test) { EXPECT_EQ(static_cast<LatePost*>(test)->receive(), 0); });
  leave();
  EXPECT_EQ(posted.get(), 0);
  complete(send, late + 1);
  EXPECT_EQ(model_writes_at(slot(late)), 1u);
  receives(kReceive);
}

/// All threads are seen outside, but that one.
struct OneIsInside {
  OneIsInside() { store_sleep(1, false); }
  ~OneIsInside() { store_sleep(1, true); }
};

TEST_F(LatePost, ThatFindsNoRoomOnTheNewPathWaits) {
  constexpr std::uint32_t kLate = kSlots - 1;
  const OneIsInside inside;
  auto posted = post_late(kLate, false);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err));
  EXPECT_EQ(post(0), 0);
  complete(0, 1);  // on the new path
  const std::uint32_t end = fill_queue(1);
  let_go(posted);
  EXPECT_EQ(receive(), 0);
  complete(1, end);
  complete(kLate, kLate + 1);
  EXPECT_EQ(model_writes_at(slot(kLate)), 1u);
  EXPECT_EQ(post(end), 0);
  complete(end, end + 1);
}

/// y has room for one receive.
TEST_F(LatePost, OfAReceiveThatFindsNoRoomOnTheNewPathWaits) {
  const OneIsInside inside;
  auto posted = post_late([this] { return receive(kReceive + 1); }, false);
  EXPECT_EQ(receive(), 0);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err));
  EXPECT_EQ(post(0), 0);
  complete(0, 1);
  let_go(posted);
  EXPECT_EQ(receive(kReceive + 2), ENOMEM);
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(post(1 + i, IBV_WR_SEND), 0);
    complete(1 + i, 2 + i);
    receives(kReceive + i);
  }
  EXPECT_EQ(receive(kReceive + 2), 0);
  EXPECT_EQ(post(3, IBV_WR_SEND), 0);
  receives(kReceive + 2);
}

/// Their paths are made when they are needed.
class LatePostToNoPath : public LatePost {
 protected:
  LatePostToNoPath() : LatePost("rebuild") {}
};

TEST_F(LatePostToNoPath, BehindAsMuchAsTheNextOneHasRoomForWaits) {
  constexpr std::uint32_t kLate = kSlots - 1;
  model_refuse_qps(1, 1, 1'000'000);
  const std::uint32_t end = fill_queue(0);
  auto posted = post_late(kLate, false);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it has been cut
  let_go(posted);
  model_refuse_qps(1, 1, 0);
  EXPECT_TRUE(wait_for([this] { return x_.state().link == 1; })) << x_.how();
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // nobody waits for room that long
  EXPECT_EQ(receive(), 0);
  complete(0, end);
  complete(kLate, kLate + 1);
  EXPECT_EQ(model_writes_at(slot(kLate)), 1u);
}

/// They are on a path that is not the first one on their default link, and posts go there freely.
class LatePostAfterReturn : public LatePost {
 protected:
  LatePostAfterReturn() : LatePost("cached", 20) {}
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(LatePost::SetUp());
    leave();
    ASSERT_TRUE(wait_for([this] { return x_.state().link == 1 && y_.state().link == 1; })) << x_.how();
    TearDown();
    ASSERT_TRUE(wait_for([this] { return x_.ready_on(0) && y_.ready_on(0); })) << x_.how();
    std::this_thread::sleep_for(kSeenOutside);
  }
  static constexpr std::chrono::milliseconds kSeenOutside{2500};  // threads are looked for each second
};

TEST_F(LatePostAfterReturn, ThatIsFlushedWhenAllWereSeenOutsideIsHidden) {
  constexpr std::uint32_t kLate = kSlots - 1;
  std::optional<OneIsInside> inside(std::in_place);
  auto posted = post_late(kLate, false);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err)) << "it does not go there freely";
  EXPECT_EQ(post(0), 0);
  complete(0, 1);  // on the new path
  model_hold_flushes(true);
  let_go(posted);
  complete(kLate, kLate + 1);
  EXPECT_EQ(model_writes_at(slot(kLate)), 1u);
  inside.reset();
  std::this_thread::sleep_for(kSeenOutside);
  const unsigned qps = model_qps();
  model_hold_flushes(false);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ibv_wc wc{};
  ASSERT_EQ(ibv_poll_cq(x_.cq, 1, &wc), 0) << "status " << wc.status << " of " << wc.wr_id;
  EXPECT_TRUE(wait_for([&] { return model_qps() < qps; })) << "its old path is kept";
}

/// The errors of a path are hidden, and whoever asks for as many completions as there are of those gets the others that lie behind them.
TEST(Errors, OfAPathAreNotAllThatIsFound) {
  constexpr unsigned kErrors = 3;
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ibv_qp_cap other = Speaker::kCap;
  other.max_recv_wr = 5;
  const Speaker failing(a), well(a, failing.pd, failing.cq, nullptr, false, other), y(b), z(b);
  failing.connect(y), y.connect(failing);
  well.connect(z), z.connect(well);
  for (const Speaker* s : {&failing, &well, &y, &z}) ASSERT_TRUE(wait_for([&] { return s->ready_on(0); })) << s->how();
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;
  for (unsigned i = 0; i < kErrors; ++i) ASSERT_EQ(ibv_post_send(failing.qp, &wr, &bad), 0);  // the other end has no receive
  ASSERT_EQ(model_break_paths(0, 0, Speaker::kCap.max_recv_wr), 1u);
  ibv_recv_wr receive{.wr_id = 77, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(well.qp, &receive, &bad_receive), 0);
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(z.qp, &wr, &bad), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(z.cq, 1, &wc) == 1; }));
  ASSERT_EQ(ibv_poll_cq(well.cq, 1, &wc), 1) << "a thread that has armed it would sleep";
  EXPECT_EQ(wc.wr_id, 77u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

/// FETCH_AND_ADD of 1 to the other end's `sum`. @return of ibv_post_send
int post_add(const Speaker& x, std::uint64_t& found, const ibv_mr& here, const std::uint64_t& sum, const ibv_mr& there, std::uint64_t wr_id = 0) {
  ibv_sge sge{reinterpret_cast<std::uint64_t>(&found), sizeof found, here.lkey};
  ibv_send_wr wr{}, *bad;
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(&sum), .compare_add = 1, .swap = 0, .rkey = there.rkey};
  return ibv_post_send(x.qp, &wr, &bad);
}

/// A thread is on its way to the default link when its end is drained, and what it posts does not get to the other end any more. Nothing had failed, so with
/// `resend`, too, it is known that it was not executed.
TEST(Drain, DoesNotLoseWhatIsPostedLate) {
  mend_all();
  const Library a('a', "resend", "cached", 0, 30'000), b('b', "resend", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  ibv_qp_attr patient{};  // its path does not fail meanwhile
  patient.timeout = 20;
  patient.retry_cnt = 7;
  x.answer(y), y.connect(x);
  ASSERT_EQ(x.send_too(patient), 0);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  ASSERT_TRUE(there && here);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  auto late = std::async(std::launch::async, [&] {
    model_hold_post(false, nullptr, nullptr);
    return post_add(x, found, *here, sum, *there, 7);
  });
  ASSERT_TRUE(wait_for(model_holds_post));
  {
    const StandsStill still(b);  // it does not answer yet
    ASSERT_NO_FATAL_FAILURE(prefer_other(a));
    EXPECT_TRUE(wait_for([&] {
      a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1);  // so that it tells
      return x.state().phase == MIGR_LINKS_VQP_SWITCHING;
    })) << x.how();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // and is drained
    model_cut_now(0);
    model_let_post_go();
    EXPECT_EQ(late.get(), 0);
  }
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << x.how();
  EXPECT_EQ(wc.wr_id, 7u);
  EXPECT_EQ(found, 0u);
  EXPECT_EQ(sum, 1u);
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  store_prefer(nullptr);
  model_mend(0);
}

/// On the way back one end is soon drained, and the other one hears of it late, and has something in flight for longer than the first one waits. What the
/// first one sends when it has gone on is not cut off, since nothing has failed: each FETCH_AND_ADD completes, and none had to be settled.
TEST(Drain, ThatRunsOutAtOneEndIsNotTakenForDoneAtTheOther) {
  mend_all();
  constexpr unsigned kReturnMs = 2500;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  std::uint64_t sum = 0, found[kDepth]{};
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, found, sizeof found);
  ASSERT_TRUE(there && here);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.how();
  model_cut_now(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; }));
  ibv_send_wr send{}, *bad;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(y.qp, &send, &bad), 0);  // finds no receive
  model_mend(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1) && store_all_stand(0); })) << x.how();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  migr_links_switch totals;
  store_totals(&totals);  // the one before
  std::optional<StandsStill> still(std::in_place, b);
  unsigned posted = 0, done = 0;
  bool is_last = false;
  auto progress = Clock::now();
  const auto go_on = [&] {
    for (; !is_last && posted - done < kDepth; ++posted) {
      EXPECT_EQ(post_add(x, found[posted % kDepth], *here, sum, *there), 0);
    }
    for (ibv_wc wc; ibv_poll_cq(x.cq, 1, &wc) == 1;) {
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << "at " << done << ": " << x.how();
      if (wc.opcode & IBV_WC_RECV) continue;
      EXPECT_EQ(found[done % kDepth], done);
      progress = Clock::now();
      ++done;
    }
    return testing::Test::HasFailure();
  };
  const auto stands_still = [&](unsigned ms) { return Clock::now() - progress > std::chrono::milliseconds(ms); };
  // 50 ms between when the first end goes on and when the other one, which begins to drain now, says so again; before that it has to be drained.
  EXPECT_TRUE(wait_for([&] { return go_on() || stands_still(1550); })) << "it does not go back";
  still.reset();
  const unsigned before = done;
  EXPECT_TRUE(wait_for([&] { return go_on() || done != before; })) << "the drain has no end";
  ibv_recv_wr receive{}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(x.qp, &receive, &bad_receive), 0);  // now it is drained
  bool received = false;
  const auto back = [&] {
    for (ibv_wc wc; ibv_poll_cq(y.cq, 1, &wc) == 1;) received = received || wc.status == IBV_WC_SUCCESS;
    return received && x.ready_on(0) && y.ready_on(0);
  };
  EXPECT_TRUE(wait_for([&] { return go_on() || back(); })) << "the next one has no end: " << x.how();
  store_totals(&totals);
  EXPECT_EQ(totals.replayed + totals.executed + totals.lost + totals.broken, 0u) << "cut with " << totals.replayed + totals.executed + totals.lost << " in flight";
  is_last = true;  // what is in flight is written to memory of ours
  EXPECT_TRUE(wait_for([&] { return go_on() || done == posted; }));
}

/// The NIC that has given up is not the one that executes it then.
TEST(Relayed, WhatIsStillOnItsWayWhenItIsGivenUpIsExecutedOnce) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
  model_delay_atomic();
  ASSERT_EQ(post_add(x, found, *here, sum, *there, 7), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.wr_id, 7u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(found, 0u);
  EXPECT_EQ(sum, 1u) << "how often it was executed";
}

/// The host that executes it has no processor for what its NICs send to themselves.
TEST(Relayed, WhatAStarvedHostExecutesLateIsWaitedFor) {
  constexpr unsigned kNever = 1000, kLate = 5;
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
  const auto completes = [&](std::uint64_t before) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << before;
    EXPECT_EQ(found, before);
    EXPECT_EQ(sum, before + 1) << "how often it was executed";
  };
  model_starve_own(kLate, true);
  ASSERT_EQ(post_add(x, found, *here, sum, *there), 0);
  completes(0);
  // The last NIC has given up, too, and it was not executed.
  model_starve_own(kNever, false);
  ASSERT_EQ(post_add(x, found, *here, sum, *there), 0);
  EXPECT_TRUE(wait_for([] { return model_own_given_up() >= 3; })) << model_own_given_up();
  model_starve_own(0, false);
  completes(1);
}

/// Of none of the devices there is a QP to be had for a while. Those behind it wait in their order.
TEST(Relayed, WhatNoDeviceCanExecuteForAMomentIsTriedAgain) {
  constexpr unsigned kTimes = 4, kAdds = 3;
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found[kAdds] = {7, 7, 7};
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
  for (const int link : {0, 1}) model_refuse_qps(link, 1, kTimes);
  for (unsigned i = 0; i < kAdds; ++i) ASSERT_EQ(post_add(x, found[i], *here, sum, *there, i), 0);
  for (unsigned i = 0; i < kAdds; ++i) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(found[i], i);
  }
  EXPECT_EQ(sum, kAdds) << "how often they were executed";
}

TEST(Relayed, WhatNoDeviceCanExecuteEndsAfterItsLimitAndIsNotExecutedLater) {
  constexpr unsigned kLimitMs = 500;
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kLimitMs, true), b('b', "exact", "cached", 0, 30'000, kLimitMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  for (const int link : {0, 1}) model_refuse_qps(link, 1, 1u << 20);
  const auto begun = Clock::now();
  ASSERT_EQ(post_add(x, found, *here, sum, *there), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_GE(Clock::now() - begun, std::chrono::milliseconds(kLimitMs));
  EXPECT_TRUE(wait_for([&] { return !y.ready_on(0); })) << "it has not heard of it";
  for (const int link : {0, 1}) model_refuse_qps(link, 1, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * kLimitMs));
  EXPECT_EQ(sum, 0u);
}

/// The first of two that the other end does not take ends the connection, and the second one is in no queue of a device that could flush it.
/// Nothing else completes, while a thread polls all the time.
TEST(Relayed, WhatTheDeviceDoesNotFlushIsFoundByWhoPolls) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  for (unsigned i = 0; i < 5; ++i) {
    const Speaker x(a), y(b);
    std::uint64_t words[2] = {}, found = 7;
    const ibv_mr *const there = register_words(y, words, sizeof words), *const here = register_words(x, &found, sizeof found);
    x.connect(y), y.connect(x);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how();
    ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&found), sizeof found, here->lkey};
    ibv_send_wr wrs[2]{}, *bad;
    for (ibv_send_wr& wr : wrs) {
      wr.wr_id = static_cast<std::uint64_t>(&wr - wrs) + 1;
      wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(words) + sizeof words[0] / 2, .compare_add = 1, .swap = 0, .rkey = there->rkey};
    }
    wrs[0].next = &wrs[1];
    ASSERT_EQ(ibv_post_send(x.qp, wrs, &bad), 0);
    std::vector<ibv_wc> got;
    ibv_wc wc{};
    for (const auto until = Clock::now() + std::chrono::seconds(20); got.size() < 2 && Clock::now() < until;)
      if (ibv_poll_cq(x.cq, 1, &wc) == 1) got.push_back(wc);
    ASSERT_EQ(got.size(), 2u) << x.how();
    EXPECT_TRUE(got[0].wr_id == 1 && got[0].status == IBV_WC_REM_INV_REQ_ERR) << got[0].status;
    EXPECT_TRUE(got[1].wr_id == 2 && got[1].status == IBV_WC_WR_FLUSH_ERR) << got[1].status;
  }
}

/// It was asked for before its vQP went on its way to the other link, where the other end is held up.
TEST(Relayed, WhatIsAnsweredInADrainIsWaitedForNoLonger) {
  mend_all();
  const std::size_t before = store_processes();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true);
  ASSERT_TRUE(wait_for([&] { return store_processes() == before + 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const auto link = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.how();
  link("migr_link_down");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  link("migr_link_up");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1) && store_all_stand(0); })) << x.how();
  ibv_send_wr send{}, *bad;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(y.qp, &send, &bad), 0);  // finds no receive, and so is not drained before
  std::optional<StandsStill> still(std::in_place, b);
  ASSERT_EQ(post_add(x, found, *here, sum, *there, 7), 0);
  store_prefer("a0");
  ASSERT_TRUE(wait_for([&] {
    link("migr_link_up");  // so that it looks, and tells
    return x.state().phase == MIGR_LINKS_VQP_SWITCHING;
  })) << x.how();
  still.reset();
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.wr_id, 7u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(found, 0u);
  ibv_recv_wr receive{}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(x.qp, &receive, &bad_receive), 0);
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how();
  EXPECT_TRUE(wait_for([&] {
    ibv_poll_cq(x.cq, 1, &wc);
    return process.markers() == 0;
  })) << process.markers();
  store_prefer(nullptr);
}

/// The other end does not answer, and the first one is on its way to another link.
TEST(Relayed, WhatWaitsTakesRoomOfWhatIsKept) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::vector<std::uint64_t> words(2);
  const auto reg = [&](const Speaker& of, std::size_t i) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, &words[i], sizeof words[i], IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  };
  const ibv_mr *const there = reg(y, 0), *const here = reg(x, 1);
  x.connect(y), y.connect(x);
  const auto link = [&](const char* what, const char* device) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)(device, 1), 0); };
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.how();
  link("migr_link_down", "a0");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  link("migr_link_up", "a0");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1) && store_all_stand(0); })) << x.how();
  unsigned posted = 0;
  const auto post = [&] {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&words[1]), sizeof words[1], here->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = posted ? IBV_WR_RDMA_WRITE : IBV_WR_ATOMIC_FETCH_AND_ADD;
    wr.wr_id = posted;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (posted) wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(&words[0]), .rkey = there->rkey};
    else wr.wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(&words[0]), .compare_add = 1, .swap = 0, .rkey = there->rkey};
    const int err = ibv_post_send(x.qp, &wr, &bad);
    posted += !err;
    return err;
  };
  std::optional<StandsStill> still(std::in_place, b);
  for (unsigned i = 0; i < kDepth / 2; ++i) EXPECT_EQ(post(), 0);
  link("migr_link_down", "a1");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has left it, and says so to nobody now
  while (posted < 4 * kDepth && !post()) {}
  EXPECT_EQ(posted, kDepth) << "more than the QP was asked for";
  still.reset();
  for (unsigned i = 0; i < posted; ++i) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << i << " does not complete: " << x.how();
    ASSERT_EQ(wc.wr_id, i);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << i;
  }
  link("migr_link_up", "a1");
}

}  // namespace
