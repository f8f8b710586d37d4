// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What links and those at their other ends do or do not say: ports, neighbours that are silent, heartbeats, the directory; vQPs
// without a backup, and devices that come and go. Part of failover_test.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "end.h"
#include "library.h"
#include "model.h"
#include "speaker.h"
#include "store.h"

namespace {

using namespace ends;

/// For ends that say nothing.
constexpr Options kSilent{.seed = 1, .answers_only = false, .separate_cqs = false, .events = false, .both_ways = true, .sessions = false, .extended = false, .swaps = false, .no_route = false, .churns = false, .fresh = false, .relays = false, .cut_after = 0, .cuts = 1, .may_break = true, .outlives = false};

/// The device says it of a port. @return what its application is told of: 0, or the port
int told_of_port(const Library& lib, ibv_event_type type, int port) {
  model_raise(lib.context, type, port);
  int told = 0;
  for (ibv_async_event event; !lib.verb<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(lib.context, &event);) {
    lib.verb<void(ibv_async_event*)>("ibv_ack_async_event")(&event);
    if (event.event_type == type) told = event.element.port_num;
  }
  return told;
}

/// A connection of the process to itself needs no port, and gets no backup. The directory is not asked for it again, either.
void tell_nothing_for_a_loopback(const Library& a) {
  const Speaker one(a), other(a);
  one.connect(other), other.connect(one);
  const auto is_known = [](const Speaker& s) { return std::string(s.state().why).find("its own process") != std::string::npos; };
  ASSERT_TRUE(wait_for([&] { return is_known(one) && is_known(other); })) << one.how();
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 1), 0);
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 0);
  store_hold_lookups(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // once a second was too often
  EXPECT_FALSE(store_lookup_waits());
  store_hold_lookups(false);
  one.destroy(), other.destroy();
}

TEST(Ports, OfConnectionsThatGoOnWithoutThemNobodyIsTold) {
  model_async_events();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 2), 2) << "there are no connections";
  auto x = std::make_unique<End>(a, kSilent, 0, kSecond, true);
  End y(b, kSilent, kSecond, 0, true);
  x->connect(y);
  y.connect(*x);
  ASSERT_TRUE(wait_for([&] { return x->protected_now() && y.protected_now(); })) << x->how();
  ASSERT_TRUE(wait_for([&] { return !told_of_port(a, IBV_EVENT_PORT_ERR, 1); }));
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 0);
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 0) << "soft-RoCE may say it twice";
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 2), 2) << "of its failure they were told";
  tell_nothing_for_a_loopback(a);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] {
    EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 1), 0) << x->how();
    return testing::Test::HasFailure() || x->left(0);
  })) << x->how();
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 1), 0);
  x.reset();
  ASSERT_TRUE(wait_for([&] { return told_of_port(a, IBV_EVENT_PORT_ERR, 1) == 1; }));
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 1);
}

/// A host whose processors are busy: its port is not down yet when its sends find no way any more.
TEST(Ports, ThatSayLateThatTheyAreDownAreWaitedFor) {
  constexpr unsigned kLateMs = 150;
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  ASSERT_EQ(meet(x, y), "");
  model_take_route(0, kLateMs);
  model_cut_now(0);
  Writing writing(x);
  EXPECT_TRUE(writing.post());
  EXPECT_TRUE(wait_for([&] { return writing.completed(); })) << x.how();
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1; })) << "what is known of it is told a moment later";
  model_mend(0);
}

/// A backup link is dead from the beginning, and its addresses do not answer: nobody waits for that with the lock.
TEST(Neighbours, ThatAreSilentKeepNobodyBack) {
  model_let_packets_linger(true);
  model_cut_now(1);
  const Library a('a', "resend", "cached", 0, 3000), b('b', "resend", "cached", 0, 3000);
  End x(a, kSilent, 0, kSecond, true), y(b, kSilent, kSecond, 0, true);
  x.connect(y);
  y.connect(x);
  EXPECT_LT(longest_question(x, y, std::chrono::seconds(3)), std::chrono::milliseconds(500));
  EXPECT_NE(x.how().find("the other end does not answer on its other link"), std::string::npos) << x.how();
  model_mend(1);
  EXPECT_TRUE(wait_for([&] { return x.protected_now() && y.protected_now(); })) << x.how() << "; " << y.how();
  model_let_packets_linger(false);
}

/// The kernel asks for a second who has the address of a host that is gone. A change of a path does not wait for that.
TEST(Neighbours, ThatAreAskedForAHandleKeepNobodyBack) {
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  ASSERT_EQ(meet(x, y), "");
  model_hold_registrations(0, true);
  auto made = std::async(std::launch::async, [&] {
    ibv_ah_attr to{};
    to.is_global = to.port_num = 1;
    return a.verb<ibv_ah*(ibv_pd*, ibv_ah_attr*)>("ibv_create_ah")(x.pd, &to);
  });
  EXPECT_TRUE(wait_for([] { return model_registrations_waiting() == 1; }));
  auto left = std::async(std::launch::async, [&] { return a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1); });
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  EXPECT_EQ(made.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(left.get(), 0);
  ibv_ah* const ah = made.get();
  ASSERT_NE(ah, nullptr);
  EXPECT_EQ(a.verb<int(ibv_ah*)>("ibv_destroy_ah")(ah), 0);
  EXPECT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // its channels are waited for by the next
}

/// The kernel asks for a second before it connects a QP to a host that is down.
TEST(Neighbours, ThatAreAskedBeforeAQpConnectsKeepNobodyBack) {
  mend_all();
  const Library a('a', "off", "cached", 0, 3000), b('b', "off", "cached", 0, 3000);
  const Speaker x(a), y(b);
  model_hold_registrations(0, true);
  auto connected = std::async(std::launch::async, [&] { x.connect(y); });
  EXPECT_TRUE(wait_for([] { return model_registrations_waiting() == 1; }));
  auto other = std::async(std::launch::async, [&] { return a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context); });
  EXPECT_EQ(other.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  model_hold_registrations(0, false);
  connected.get();
  EXPECT_NE(other.get(), nullptr);
}

/// A link is left whose NIC holds a packet back, so that what is used up there is not destroyed for long, in the moment in which the application has found
/// that there is nothing of that kind and is about to destroy a CQ, a PD, an SRQ or a context. It waits, and no change of a path does.
TEST(Neighbours, ThatWhatIsDestroyedWaitsForKeepNobodyBack) {
  enum { kCq,
         kPd,
         kSrq,
         kContext,
         kKinds };
  for (int kind = kCq; kind < kKinds && !HasFailure(); ++kind) {
    mend_all();
    const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
    Library of = a;
    if (kind == kContext) of.context = a.verb<ibv_context*(ibv_device*)>("ibv_open_device")(a.context->device);
    ibv_pd* const pd = of.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(of.context);
    ibv_srq_init_attr of_srq{};
    of_srq.attr.max_wr = of_srq.attr.max_sge = 1;
    ibv_srq* const srq = kind == kSrq ? a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq) : nullptr;
    const Speaker x(a), y(b), other(of, pd, nullptr, srq), z(b);
    x.connect(y), y.connect(x), other.connect(z), z.connect(other);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && other.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
    if (kind != kContext) other.destroy();
    model_let_packets_linger(true);
    model_hold_resets(true);
    auto left = std::async(std::launch::async, [&] { return a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1); });
    ASSERT_TRUE(wait_for([] { return model_resets_waiting() == 1; }));
    auto destroyed = std::async(std::launch::async, [&] {
      if (kind == kCq) return a.verb<int(ibv_cq*)>("ibv_destroy_cq")(other.cq);
      if (kind == kPd) return a.verb<int(ibv_pd*)>("ibv_dealloc_pd")(pd);
      if (kind == kSrq) return a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq);
      return a.verb<int(ibv_context*)>("ibv_close_device")(of.context);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it waits for the library's lock
    model_cut_now(0);
    model_hold_resets(false);
    auto changed = std::async(std::launch::async, [&] { return wait_for([&] { return x.state().link == 1 && y.state().link == 1; }); });
    EXPECT_EQ(changed.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "case " << kind;
    EXPECT_EQ(destroyed.wait_for(std::chrono::seconds(0)), std::future_status::timeout) << "case " << kind;
    model_mend(0);
    model_let_packets_linger(false);
    EXPECT_TRUE(changed.get() && !left.get());
    EXPECT_EQ(destroyed.get(), 0) << "case " << kind;
    EXPECT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // its channels are waited for by the next
  }
}

/// Nothing is posted, so no completion tells that the link is silent. What no heartbeat goes over stays there.
TEST(Heartbeat, FindsALinkThatIsSilentUnderWhoPostsNothing) {
  constexpr unsigned kNone = 0;
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Library c('a', "exact", "cached", 0, 3000, kSwitchMs, false, false, kNone), d('b', "exact", "cached", 0, 3000, kSwitchMs, false, false, kNone);
  const Pairs found(a, b, 1), not_found(c, d, 1);
  ASSERT_TRUE(wait_for([&] { return found.ready_on(0) == 1 && not_found.ready_on(0) == 1 && store_all_stand(0) && store_all_stand(1); })) << found.xs[0]->how();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // what they had to say to each other has come
  store_causes();
  const auto cut = Clock::now();
  model_cut_now(0);
  ASSERT_TRUE(wait_for([&] { return found.all_on(1); })) << found.xs[0]->how();
  const auto took = Clock::now() - cut;
  unsigned causes = 0;
  EXPECT_TRUE(wait_for([&] { return (causes |= store_causes()) & 1u << MIGR_LINKS_CAUSE_HEARTBEAT; }));
  EXPECT_EQ(causes & ~(1u << MIGR_LINKS_CAUSE_HEARTBEAT | 1u << MIGR_LINKS_CAUSE_PEER), 0u);
  std::this_thread::sleep_for(2 * took);
  EXPECT_EQ(not_found.ready_on(0), 1u);
  model_mend(0);
}

/// Whichever end begins it.
TEST(Heartbeat, WhoseLinkIsBackLeadsToNoFailureAtEitherEnd) {
  constexpr unsigned kReturnMs = 20;
  mend_all();
  const Library a('a', "exact", "cached", kReturnMs, 3000), b('b', "exact", "cached", kReturnMs, 3000);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1 && store_all_stand(0) && store_all_stand(1); })) << pairs.xs[0]->how();
  unsigned told = 0;
  const auto both_told = [&told] {
    migr_links_switch more;
    store_totals(&more);
    return (told += more.vqps) == 2;
  };
  both_told();
  told = 0;
  model_cut_now(0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1) && both_told(); })) << told;
  store_causes();
  told = 0;
  model_mend(0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(0) && both_told(); })) << told;
  EXPECT_EQ(store_causes(), 1u << MIGR_LINKS_CAUSE_RETURN);
}

/// The other end's library stands still, and what there is to say to it is more than its channel has receives for: its NIC answers none of what is behind
/// that, heartbeats least of all. Nothing has failed. A link that fails then is left as ever.
TEST(Heartbeat, IsNotMissedBehindWhatALibraryThatStandsStillHasNotTaken) {
  constexpr unsigned kMs = 200, kMisses = 3;
  mend_all();
  setenv("FAILOVER_LATE", "1", 1);  // who registers does not wait for it
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, false, false, kMs, kMisses), b('b', "exact", "cached", 0, 30'000, kSwitchMs, false, false, kMs, kMisses);
  const Pairs pairs(a, b, 1);
  const Speaker& x = *pairs.xs[0];
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1 && store_all_stand(1); })) << x.how();
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); })) << x.how();
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(1) == 1 && store_all_stand(0); })) << x.how();
  std::uint64_t word = 0;
  {
    constexpr unsigned kEnough = 100;  // that are told; a channel has 32 receives
    const StandsStill still(b);
    for (unsigned i = 0; i < kEnough; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(2))) EXPECT_NE(register_words(x, &word, sizeof word), nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * kMs * kMisses));
    EXPECT_TRUE(x.ready_on(1)) << x.how();
    model_cut_now(1);
    EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_SWITCHING; })) << x.how();
  }
  EXPECT_TRUE(wait_for([&] { return pairs.all_on(0); })) << x.how();
  unsetenv("FAILOVER_LATE");
  model_mend(1);
}

/// On the only link that is left an MTU on the way is too small for what is sent. Heartbeats and all that the library says are small and get through: the
/// application is told of its error all the same.
TEST(Heartbeat, ThatGetsThroughWhereNothingLargeDoesKeepsNoErrorBack) {
  constexpr std::uint32_t kBytes = 512;  // a packet of link 1
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  std::vector<std::uint8_t> from(kBytes), to(kBytes);
  const auto registered = [](const Speaker& of, std::vector<std::uint8_t>& memory) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  };
  const ibv_mr *const here = registered(x, from), *const there = registered(y, to);
  ASSERT_TRUE(here && there);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  model_largest_packet(1, kBytes / 2);
  model_cut_now(0);
  ibv_sge sge{reinterpret_cast<std::uint64_t>(from.data()), kBytes, here->lkey};
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(to.data()), .rkey = there->rkey};
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(x.query().qp_state, IBV_QPS_ERR);
  for (const int link : {0, 1}) model_mend(link);
}

/// As migrd is told of the backup link of end a.
std::uint32_t gid_index_of(const char* device) {
  migr_links_link link{};
  return store_link(device, &link) ? link.gid_index : ~0u;
}

/// An address of a backup link goes and comes back, and the kernel gives it another place, as the old one is in use still. What was made ahead with the old one
/// is not gone to.
TEST(Gids, ThatComeBackAtAnotherPlaceServeWhatIsMadeAhead) {
  constexpr std::uint8_t kName = 2;  // of a1
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  model_set_gid(1, 0, 0, 0);
  model_set_gid(1, 0, 3, kName);
  ASSERT_TRUE(wait_for([] { return gid_index_of("a1") == 3 && store_all_stand(1); })) << "the link does not come back: number " << gid_index_of("a1");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how();
  model_cut_now(0);
  Writing writing(x);
  EXPECT_TRUE(writing.post());
  EXPECT_TRUE(wait_for([&] { return writing.completed(); })) << x.how();
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1; })) << x.how();
  model_mend(0);
  model_set_gid(1, 0, 3, 0);
  model_set_gid(1, 0, 0, kName);
}

/// The path that a vQP is on has lost its address: that is not the application's doing.
TEST(Gids, OfAPathThatAreGoneLeadToAnotherOne) {
  constexpr std::uint8_t kName = 1;  // of a0
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.how();
  model_set_gid(0, 0, 0, 0);
  Writing writing(x);
  EXPECT_TRUE(writing.post());
  EXPECT_TRUE(wait_for([&] { return writing.completed(); })) << x.how();
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.how();
  model_set_gid(0, 0, 0, kName);
}

/// As long as its address is away a link goes by another one of that kind, and no longer.
TEST(Gids, ThatStandInGoWhenTheFirstOneIsBack) {
  constexpr std::uint8_t kName = 2, kOther = 100;
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1 && store_all_stand(0) && store_all_stand(1); })) << pairs.xs[0]->how();
  model_set_gid(1, 0, 5, kOther);
  model_set_gid(1, 0, 0, 0);
  ASSERT_TRUE(wait_for([] { return gid_index_of("a1") == 5 && store_all_stand(1); })) << gid_index_of("a1");
  model_set_gid(1, 0, 2, kName);
  model_set_gid(1, 0, 0, kOther);  // its place is taken
  model_cut_now(1);
  ASSERT_TRUE(wait_for([] { return !store_all_stand(1); }));
  model_mend(1);
  EXPECT_TRUE(wait_for([] { return gid_index_of("a1") == 2 && store_all_stand(1); })) << gid_index_of("a1");
  model_set_gid(1, 0, 5, 0);
  model_set_gid(1, 0, 2, 0);
  model_set_gid(1, 0, 0, kName);
}

/// Nobody says where the other end is: there is no backup, it is said why, and the application gets the path's error. Once it is said there is one.
TEST(Directory, ThatCannotBeReachedIsSaidAndLeavesTheErrorToTheApplication) {
  mend_all();
  store_hide(true);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs early(a, b, 1);
  const Speaker &x = *early.xs[0], &y = *early.ys[0];
  const std::string why = "the directory cannot be reached";
  ASSERT_TRUE(wait_for([&] { return x.state().why == why && y.state().why == why; })) << x.how();
  EXPECT_EQ(early.ready_on(0), 0u);
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  model_cut_now(0);
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.how();
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(x.query().qp_state, IBV_QPS_ERR);
  EXPECT_EQ(x.state().link, 0u);
  EXPECT_EQ(x.state().why, why);
  model_mend(0);
  store_hide(false);
  const Pairs late(a, b, 1);
  EXPECT_TRUE(wait_for([&] { return late.ready_on(0) == 1; })) << late.xs[0]->how();
}

/// Its only backup link is one of a device that is not there: it is told as a vQP without a backup, and has one when that comes.
TEST(Unbacked, AsItsLinkIsNotThereIsSaid) {
  mend_all();
  model_unplug(1, 0, true);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  const Speaker& x = *pairs.xs[0];
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "cannot open a1: No such device"; })) << x.how();
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  EXPECT_EQ(x.state().link, 0u);
  const auto link_is = [](std::uint32_t state) {
    migr_links_link link{};
    return wait_for([&] { return store_link("a1", &link) && link.state == state; }) && std::string(link.why) == (state == MIGR_LINKS_LINK_UP ? "" : "cannot open a1: No such device");
  };
  EXPECT_TRUE(link_is(MIGR_LINKS_LINK_ABSENT));
  model_unplug(1, 0, false);
  EXPECT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << x.how();
  EXPECT_TRUE(link_is(MIGR_LINKS_LINK_UP));
}

/// The backup device refuses to make the first one's QP: that is told, those behind it have theirs, and it is tried again.
TEST(Unbacked, AsTheDeviceRefusesItKeepsNoOtherBack) {
  constexpr unsigned kMost = 1u << 11;
  mend_all();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  model_most_wrs(1, 0, kMost);
  ibv_qp_cap deep = Speaker::kCap;
  deep.max_send_wr = 2 * kMost;
  const Speaker x(a, nullptr, nullptr, nullptr, false, deep), y(b);
  x.connect(y), y.connect(x);
  const Pairs pairs(a, b, 2);
  EXPECT_TRUE(wait_for([&] { return pairs.ready_on(0) == 2; })) << pairs.xs[0]->how();
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  EXPECT_STREQ(x.state().why, "create_qp: Invalid argument");
  model_most_wrs(1, 0, ~0u);
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.how() << "; " << y.how();
}

/// @return on so many devices is memory that is registered beside `x`, once it is on `due`
unsigned devices_with_memory(const Speaker& x, std::vector<std::uint8_t>& memory, unsigned due) {
  if (!x.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(x.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE)) return 0;
  wait_for([&] { return model_most_registered(memory.data()) >= due; });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return model_most_registered(memory.data());
}

/// Of which no vQP can have a path: nothing is made there, nor is memory registered. The first backup link is one, with and without another
/// behind it, and then the default link.
TEST(Unbacked, ByAnotherFamilyOfDevices) {
  mend_all();
  std::vector<std::uint8_t> memory(4096), second(4096), third(4096);
  {
    model_make_foreign(1, 0, true);
    const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
    const Pairs pairs(a, b, 1);
    const Speaker& x = *pairs.xs[0];
    EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "a1 is not soft-RoCE (man 7 migr-limits)"; })) << x.how();
    EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
    EXPECT_EQ(devices_with_memory(x, memory, 1), 1u);
    migr_links_link link{};
    EXPECT_TRUE(store_link("a1", &link) && link.state == MIGR_LINKS_LINK_DOWN);
  }
  {
    const Library a('a', "exact", "cached", 0, 3000, kSwitchMs, false, true), b('b', "exact", "cached", 0, 3000, kSwitchMs, false, true);
    const Pairs pairs(a, b, 1);
    EXPECT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << pairs.xs[0]->how();
    EXPECT_EQ(devices_with_memory(*pairs.xs[0], second, 2), 2u);
  }
  model_make_foreign(1, 0, false);
  model_make_foreign(0, 0, true);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  const Speaker& x = *pairs.xs[0];
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "a0 is not soft-RoCE (man 7 migr-limits)"; })) << x.how();
  EXPECT_EQ(devices_with_memory(x, third, 1), 1u);
  model_make_foreign(0, 0, false);
}

/// One end has the device of the second backup link from the beginning, the other one gets it when it has told long ago where it can go.
TEST(Later, ADeviceComesAndBothEndsUseIt) {
  mend_all();
  model_unplug(2, 1, true);
  const Library a('a', "exact", "cached", 0, 3000, kSwitchMs, false, true), b('b', "exact", "cached", 0, 3000, kSwitchMs, false, true);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << pairs.xs[0]->how();
  ASSERT_FALSE(store_all_stand(2));
  model_unplug(2, 1, false);
  ASSERT_TRUE(wait_for([] { return all_stand(0); })) << "no channel over it";
  for (const int link : {0, 1}) model_cut_now(link);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  EXPECT_TRUE(wait_for([&] { return pairs.all_on(2); })) << pairs.xs[0]->how();
  mend_all();
}

/// Of two ends one loses the device of the backup link for good: the other one does not wait for a channel over it.
TEST(Later, ADeviceGoesAndTheOtherEndHearsOfIt) {
  mend_all();
  model_async_events();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << pairs.xs[0]->how();
  model_raise_fatal(1, 1);
  EXPECT_TRUE(wait_for([&] { return std::string(pairs.xs[0]->state().why) == "the other end cannot go to its other link"; })) << pairs.xs[0]->how();
}

}  // namespace
