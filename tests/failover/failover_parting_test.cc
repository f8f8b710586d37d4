// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// An end leaves its links, as before a migration, or goes for good, and what the other one does then; and which link they go back
// to. Part of failover_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "library.h"
#include "model.h"
#include "speaker.h"
#include "store.h"

namespace {

using namespace ends;

/// A process leaves its links. Its partner has forgotten its backup, and cannot say so nor make another one, as it waits for the directory, when the
/// default link fails, or all do.
class Parting : public testing::TestWithParam<bool> {};

TEST_P(Parting, OutlivesALinkThatFailsBeforeTheAnswerToBye) {
  const bool all = GetParam();
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  Writing one(x), other(y);
  const Library without('a', "off", "cached", 0, 3000);
  const Speaker unknown(without), asks(b);
  unknown.connect(asks), asks.connect(unknown);
  store_hold_lookups(true);
  ASSERT_TRUE(wait_for([] { return store_lookup_waits(); }));
  const unsigned before = model_qps();
  auto parked = std::async(std::launch::async, [&] {
    char why[200];
    return process.park(why, sizeof why), std::string(why);
  });
  ASSERT_TRUE(wait_for([&] { return model_qps() < before; })) << "the partner has not heard BYE";
  for (const int link : {0, 1})
    if (link == 0 || all) model_cut_now(link);
  EXPECT_TRUE(one.post() && other.post());
  for (const auto until = Clock::now() + std::chrono::milliseconds(300); Clock::now() < until;) one.completed(), other.completed();
  store_hold_lookups(false);
  EXPECT_EQ(parked.get(), "") << "guarded it is moved";
  process.let_go();
  if (all) model_mend(1);
  EXPECT_TRUE(wait_for([&] { return one.completed() && other.completed(); })) << one.done << " and " << other.done << "; " << x.how();
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; }));
}

INSTANTIATE_TEST_SUITE_P(, Parting, testing::Bool(), [](const auto& info) { return info.param ? "all_links" : "default_link"; });

/// Neither end has a path: one, since its process leaves its links, and so the other. Then they have channels again, and lack memory, when the other
/// one has waited for long enough.
TEST(Adrift, EndsWithTheOtherEnd) {
  constexpr unsigned kLongMs = 4 * kSwitchMs, kSoonMs = 4000;
  mend_all();
  const Library a('a', "exact", "cached", 0, kLongMs);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, kSoonMs);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.how();
  model_cut_now(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  char why[200];
  process.park(why, sizeof why);
  ASSERT_STREQ(why, "");
  std::vector<std::uint8_t> memory(4096);
  model_refuse_registrations(memory.data());
  for (const Speaker* s : {&x, &y})
    ASSERT_NE(s->lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(s->pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  ibv_send_wr wr{}, *bad;
  wr.wr_id = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  process.let_go();
  ASSERT_TRUE(wait_for([&] { return std::string(x.state().why) == "waits for memory"; })) << x.how();
  ASSERT_NE(y.state().phase, MIGR_LINKS_VQP_BROKEN) << "too early: " << y.how();
  ibv_wc wc{};
  EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.wr_id, 1u);
  EXPECT_NE(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_BROKEN && y.state().phase == MIGR_LINKS_VQP_BROKEN; })) << x.how() << "; " << y.how();
  model_refuse_registrations(nullptr);
}

/// Of two connections of the same processes one has broken off its default link at one end, and is gone at the other, which is to be migrated.
TEST(Bye, IsAnsweredByWhoHasLostAnotherConnection) {
  mend_all();
  const Library a('a', "exact", "cached", 5, 30'000);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 5, 30'000);
  const Pairs pairs(a, b, 2);
  const Speaker &x = *pairs.xs[0], &y = *pairs.ys[0], &lost = *pairs.ys[1];
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 2 && store_all_stand(0) && store_all_stand(1); })) << x.how();
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); }));
  pairs.xs[1]->destroy();
  ASSERT_TRUE(Writing(lost).post());
  ASSERT_TRUE(wait_for([&] {
    for (ibv_wc wc; ibv_poll_cq(lost.cq, 1, &wc) == 1;) EXPECT_NE(wc.status, IBV_WC_SUCCESS);
    return lost.state().phase == MIGR_LINKS_VQP_BROKEN;
  })) << lost.how();
  EXPECT_EQ(lost.state().link, 1u);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how();
  char why[200];
  process.park(why, sizeof why);
  EXPECT_STREQ(why, "");
  process.let_go();
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how();
}

/// What a partner has published cannot be withdrawn without migrd, so it would not answer, and would hear nothing any more.
TEST(Bye, IsNotHeardWhileMigrdIsAway) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  store_go_away(true);
  ASSERT_TRUE(wait_for([&] {
    for (const Library* of : {&a, &b}) of->verb<int(const char*, std::uint32_t)>("migr_link_up")(of == &a ? "a0" : "b0", 1);  // each looks again
    return store_asked_in_vain() == 2;
  }));
  auto parked = std::async(std::launch::async, [&] {
    char why[200];
    process.park(why, sizeof why);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  model_cut_now(0);
  Writing writing(y);
  EXPECT_TRUE(writing.post());
  EXPECT_TRUE(wait_for([&] { return writing.completed(); })) << "the partner has parted, and cannot say so";
  model_mend(0);
  store_go_away(false);
  parked.get();
  process.let_go();
  EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_READY && y.state().phase == MIGR_LINKS_VQP_READY; })) << x.how();
}

/// One end is about to go back when the other one is not there any more, or has broken, of which it has said nothing.
class Back : public testing::TestWithParam<bool> {};

TEST_P(Back, ToAnEndThatIsGoneEndsItAtOnce) {
  mend_all();
  constexpr unsigned kReturnMs = 2500;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", kReturnMs, 30'000);
  const Pairs pairs(a, b, 2);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 2 && store_all_stand(0) && store_all_stand(1); })) << pairs.xs[0]->how();
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); }));
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(1) == 2; })) << "no path ahead, or they are back already: " << pairs.xs[0]->how();
  if (GetParam()) {
    ibv_qp_attr error{};
    error.qp_state = IBV_QPS_ERR;
    ASSERT_EQ(pairs.ys[1]->modify(error, IBV_QP_STATE), 0);
  } else {
    pairs.ys[1]->destroy();
  }
  EXPECT_TRUE(wait_for([&] { return std::string(pairs.xs[1]->state().why) == "the other end has given up"; })) << pairs.xs[1]->how();
  EXPECT_TRUE(wait_for([&] { return pairs.xs[0]->ready_on(0) && pairs.ys[0]->ready_on(0); })) << pairs.xs[0]->how();
}

INSTANTIATE_TEST_SUITE_P(, Back, testing::Bool(), [](const auto& info) { return info.param ? "broken" : "destroyed"; });

/// The other end has not got all memory there, and so no backup of its own.
TEST(Preferred, LinkThatTheOtherEndCannotTakeWithholdsNothing) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  std::vector<std::uint8_t> memory(4096);
  model_refuse_registrations(memory.data());
  ASSERT_NE(b.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(y.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && std::string(y.state().why) == "waits for memory"; })) << y.how();
  store_prefer("a1");
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // it looks again
  Writing writing(x);
  Clock::duration longest{};
  EXPECT_TRUE(wait_for([&] {
    const auto begun = Clock::now();
    const bool done = writing.post() && wait_for([&] { return writing.completed(); });
    longest = std::max(longest, Clock::now() - begun);
    return !done || std::string(x.state().why).starts_with("the way to its other link did not end");
  })) << x.how();
  EXPECT_LT(longest, std::chrono::seconds(1));
  store_prefer(nullptr);
  model_refuse_registrations(nullptr);
}

/// Its device there, or the other end's, does not take what was registered when both stood ready.
TEST(Preferred, LinkThatRefusesLaterMemoryIsNotGoneTo) {
  for (const bool here : {true, false}) {
    mend_all();
    const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
    const Speaker x(a), y(b);
    const Speaker& end = here ? x : y;
    x.connect(y), y.connect(x);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.how();
    std::vector<std::uint8_t> memory(4096);
    model_refuse_registrations(memory.data());
    ASSERT_NE(end.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(end.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
    EXPECT_TRUE(wait_for([&] { return end.ready_on(0) && std::string(end.state().why) == "waits for memory"; })) << end.how();
    store_prefer("a1");
    ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // it looks again
    Writing writing(x);
    for (const auto until = Clock::now() + std::chrono::milliseconds(1500); Clock::now() < until && !HasFailure();)
      EXPECT_TRUE(writing.post() && wait_for([&] { return writing.completed(); })) << x.how();
    EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
    store_prefer(nullptr);
    model_refuse_registrations(nullptr);
  }
}

}  // namespace
