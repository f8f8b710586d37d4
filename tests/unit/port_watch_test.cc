// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The state of RDMA ports: debounced, as ordered, over a restart, and as the kernel tells it.
#include "agent/failover/port_watch.h"

#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <fstream>

#include "link_library.h"

namespace migr::port_watch_test {
namespace {

using namespace std::chrono_literals;
using Clock = Debounce::Clock;
constexpr Debounce::Limits kLimits{50ms, 1000ms, 8000ms, 60000ms};
const Clock::time_point kBegin = Clock::time_point() + std::chrono::hours(1);

TEST(Debounce, WhatStaysDownIsToldAfterTheLimit) {
  Debounce d(kLimits, true);
  EXPECT_FALSE(d.see(false, kBegin));
  EXPECT_EQ(d.due(kBegin), kBegin + 50ms);
  EXPECT_FALSE(d.step(kBegin + 49ms));
  EXPECT_TRUE(d.up());
  EXPECT_TRUE(d.step(kBegin + 50ms));
  EXPECT_FALSE(d.up());
  EXPECT_EQ(d.flaps(), 1u);
  EXPECT_EQ(d.due(kBegin + 50ms), std::nullopt);
  EXPECT_FALSE(d.step(kBegin + 10s)) << "once";
}

TEST(Debounce, AGlitchIsNotTold) {
  Debounce d(kLimits, true);
  d.see(false, kBegin);
  EXPECT_FALSE(d.see(true, kBegin + 49ms));
  EXPECT_EQ(d.due(kBegin + 49ms), std::nullopt);
  EXPECT_FALSE(d.step(kBegin + 10s));
  EXPECT_EQ(d.flaps(), 0u);
}

TEST(Debounce, ALateLookTellsWhatWasDueBefore) {
  Debounce d(kLimits, true);
  d.see(false, kBegin);
  EXPECT_TRUE(d.see(true, kBegin + 80ms)) << "it was down for longer than the limit";
  EXPECT_FALSE(d.up());
  EXPECT_EQ(d.due(kBegin + 80ms), kBegin + 80ms + 1000ms);
}

TEST(Debounce, UpHasToStay) {
  Debounce d(kLimits, false);
  d.see(true, kBegin);
  EXPECT_FALSE(d.step(kBegin + 999ms));
  d.see(false, kBegin + 999ms);
  d.see(true, kBegin + 1000ms);
  EXPECT_FALSE(d.step(kBegin + 1999ms)) << "it begins anew";
  EXPECT_TRUE(d.step(kBegin + 2000ms));
}

TEST(Debounce, WhoFlapsWaitsLonger) {
  Debounce d(kLimits, true);
  auto now = kBegin;
  for (const auto wait : {1000ms, 2000ms, 4000ms, 8000ms, 8000ms}) {
    d.see(false, now);
    ASSERT_TRUE(d.step(now += 50ms));
    d.see(true, now);
    EXPECT_FALSE(d.step(now + wait - 1ms)) << wait.count();
    EXPECT_TRUE(d.step(now += wait)) << wait.count();
  }
  now += 61s;  // quiet for a while
  d.see(false, now);
  ASSERT_TRUE(d.step(now += 50ms));
  d.see(true, now);
  EXPECT_TRUE(d.step(now + 1000ms)) << "it is trusted again";
}

class Watch : public ::testing::Test {
 protected:
  std::unique_ptr<PortWatch> watch() {
    auto w = std::make_unique<PortWatch>(dir_.path + "/links.json", [this] { return found_; }, kLimits);
    w->set_changed([this](std::span<const migr_links_port> ports) { told_.insert(told_.end(), ports.begin(), ports.end()); });
    w->rescan([](const std::string&) { return true; });
    return w;
  }
  static std::uint32_t flags(const PortWatch& w, const std::string& device, std::uint32_t port = 1) {
    for (const auto& p : w.ports())
      if (p.device == device && p.port == port) return p.flags;
    return ~0u;
  }
  TempFolder dir_;
  std::vector<RdmaPort> found_ = {{"rxe0", 1, "eth0"}, {"rxe1", 1, "eth1"}, {"mlx5_0", 1, ""}, {"two", 1, "eth2"}, {"two", 2, "eth3"}};
  std::vector<migr_links_port> told_;
};

TEST_F(Watch, ANetdevThatGoesDownTakesItsPortAlong) {
  auto w = watch();
  EXPECT_EQ(told_.size(), 5u);
  EXPECT_EQ(flags(*w, "rxe0"), 0u);
  EXPECT_EQ(flags(*w, "mlx5_0"), MIGR_LINKS_PORT_NO_NETDEV);
  told_.clear();
  w->see("eth0", false, kBegin);
  EXPECT_TRUE(told_.empty());
  EXPECT_EQ(w->due(kBegin), kBegin + 50ms);
  w->step(kBegin + 50ms);
  ASSERT_EQ(told_.size(), 1u);
  EXPECT_STREQ(told_[0].device, "rxe0");
  EXPECT_STREQ(told_[0].netdev, "eth0");
  EXPECT_EQ(told_[0].flags, MIGR_LINKS_PORT_DOWN_NETLINK);
  EXPECT_EQ(told_[0].flaps, 1u);
  const auto serial = told_[0].serial;
  w->see("eth0", true, kBegin + 60ms);
  w->step(kBegin + 1060ms);
  ASSERT_EQ(told_.size(), 2u);
  EXPECT_EQ(told_[1].flags, 0u);
  EXPECT_GT(told_[1].serial, serial);
}

TEST_F(Watch, OrdersAreToldAndOutliveARestart) {
  std::uint64_t last = 0;
  {
    auto w = watch();
    told_.clear();
    const auto s = w->order(PortWatch::Order::kDown, "two", 0);
    ASSERT_TRUE(s) << s.error().text;
    EXPECT_EQ(told_.size(), 2u) << "both ports";
    EXPECT_EQ(told_[1].serial, *s);
    ASSERT_TRUE(w->order(PortWatch::Order::kPrefer, "rxe1", 0));
    ASSERT_TRUE(w->order(PortWatch::Order::kUp, "two", 2));
    told_.clear();
    const auto again = w->order(PortWatch::Order::kPrefer, "rxe1", 1);
    ASSERT_TRUE(again);
    EXPECT_TRUE(told_.empty()) << "nothing has changed";
    last = *again;
  }
  told_.clear();
  auto w = watch();
  EXPECT_EQ(flags(*w, "two", 1), MIGR_LINKS_PORT_DOWN_OPERATOR);
  EXPECT_EQ(flags(*w, "two", 2), 0u);
  EXPECT_EQ(flags(*w, "rxe1"), MIGR_LINKS_PORT_PREFERRED);
  for (const auto& p : told_) EXPECT_GT(p.serial, last) << "over restarts, too";
  ASSERT_TRUE(w->order(PortWatch::Order::kPrefer, "rxe0", 0));
  EXPECT_EQ(flags(*w, "rxe1"), 0u) << "at most one";
  ASSERT_TRUE(w->order(PortWatch::Order::kPreferNone, "", 0));
  EXPECT_EQ(flags(*w, "rxe0"), 0u);
  ASSERT_TRUE(w->order(PortWatch::Order::kUp, "two", 0));
  EXPECT_EQ(flags(*w, "two", 1), 0u);
}

TEST_F(Watch, OrdersForNoPortAreRefused) {
  auto w = watch();
  auto s = w->order(PortWatch::Order::kDown, "rxe9", 0);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOENT);
  EXPECT_NE(s.error().text.find("rxe1/1"), std::string::npos) << s.error().text;
  s = w->order(PortWatch::Order::kDown, "rxe0", 2);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOENT);
  s = w->order(PortWatch::Order::kPrefer, "two", 0);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EINVAL);
}

TEST_F(Watch, AnOrderThatCannotBeRememberedIsNotCarriedOut) {
  auto w = watch();
  std::filesystem::remove_all(dir_.path);
  told_.clear();
  EXPECT_FALSE(w->order(PortWatch::Order::kDown, "rxe0", 0));
  EXPECT_TRUE(told_.empty());
  EXPECT_EQ(flags(*w, "rxe0"), 0u);
}

TEST_F(Watch, ADeviceThatIsRemovedIsGoneUntilItIsThereAgain) {
  auto w = watch();
  const auto all = found_;
  found_.erase(found_.begin());
  told_.clear();
  w->rescan([](const std::string&) { return true; });
  ASSERT_EQ(told_.size(), 1u);
  EXPECT_EQ(told_[0].flags, MIGR_LINKS_PORT_GONE);
  found_ = all;
  w->rescan([](const std::string&) { return true; });
  EXPECT_EQ(flags(*w, "rxe0"), 0u);
  EXPECT_EQ(told_.size(), 2u);
}

/// Its netdev is removed, or gets another name.
TEST_F(Watch, APortThatSaysNoNetdevForAMomentKeepsItsOwn) {
  auto w = watch();
  w->see("eth0", false, kBegin);
  w->step(kBegin + 50ms);
  ASSERT_EQ(flags(*w, "rxe0"), MIGR_LINKS_PORT_DOWN_NETLINK);
  told_.clear();
  found_[0].netdev = "";
  w->rescan([](const std::string&) { return true; });
  EXPECT_TRUE(told_.empty());
  EXPECT_EQ(flags(*w, "rxe0"), MIGR_LINKS_PORT_DOWN_NETLINK);
  found_[0].netdev = "eth9";
  w->rescan([](const std::string&) { return true; });
  ASSERT_EQ(told_.size(), 1u);
  EXPECT_STREQ(told_[0].netdev, "eth9");
  EXPECT_EQ(told_[0].flags, 0u);
}

TEST_F(Watch, ADeviceThatIsGoneForLongIsForgotten) {
  auto w = watch();
  ASSERT_TRUE(w->order(PortWatch::Order::kDown, "two", 1));
  const auto all = found_;
  std::erase_if(found_, [](const RdmaPort& p) { return p.device == "two" || p.device == "rxe0"; });
  const auto now = Debounce::Clock::now();
  const auto scan = [&](std::chrono::minutes later) { w->rescan([](const std::string&) { return true; }, now + later); };
  for (const auto later : {0min, 59min, 60min}) scan(later);
  EXPECT_EQ(flags(*w, "rxe0"), MIGR_LINKS_PORT_GONE);
  scan(61min);
  EXPECT_EQ(flags(*w, "rxe0"), ~0u);
  EXPECT_EQ(flags(*w, "two", 2), ~0u);
  EXPECT_EQ(flags(*w, "two", 1), MIGR_LINKS_PORT_GONE | MIGR_LINKS_PORT_DOWN_OPERATOR);
  found_ = all;
  scan(62min);
  EXPECT_EQ(flags(*w, "rxe0"), 0u);
}

TEST_F(Watch, AnOrderForADeviceThatIsAwayIsTakenBack) {
  ASSERT_TRUE(watch()->order(PortWatch::Order::kDown, "two", 0));
  const auto all = found_;
  std::erase_if(found_, [](const RdmaPort& p) { return p.device == "two"; });
  auto w = watch();
  EXPECT_TRUE(w->order(PortWatch::Order::kUp, "two", 2));
  const auto s = w->order(PortWatch::Order::kUp, "two", 3);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOENT);
  found_ = all;
  w->rescan([](const std::string&) { return true; });
  EXPECT_EQ(flags(*w, "two", 1), MIGR_LINKS_PORT_DOWN_OPERATOR);
  EXPECT_EQ(flags(*w, "two", 2), 0u);
}

TEST_F(Watch, AFileOfNonsenseIsNoOrder) {
  for (const char* text : {"5", "{\"down\": [5, \"rxe0\", \"/1\", \"rxe0/x\", \"rxe0/99999999999\"], \"prefer\": 7}", "{"}) {
    FILE* f = fopen((dir_.path + "/links.json").c_str(), "w");
    fputs(text, f);
    fclose(f);
    EXPECT_EQ(flags(*watch(), "rxe0"), 0u) << text;
  }
}

TEST_F(Watch, OrdersThatCannotBeReadAreNotWrittenOver) {
  const std::string file = dir_.path + "/links.json", there = dir_.path + "/there";
  ASSERT_TRUE(watch()->order(PortWatch::Order::kDown, "rxe0", 0));
  std::filesystem::rename(file, there);
  std::filesystem::create_symlink(file, file);
  auto w = watch();
  const auto s = w->order(PortWatch::Order::kPrefer, "rxe1", 0);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ELOOP);
  EXPECT_TRUE(std::filesystem::is_symlink(file));
  std::filesystem::rename(there, file);
  EXPECT_TRUE(w->order(PortWatch::Order::kPrefer, "rxe1", 0));
  EXPECT_EQ(flags(*watch(), "rxe0"), MIGR_LINKS_PORT_DOWN_OPERATOR);
  std::ofstream(file) << R"({"down": ["rxe0/1", 5], "prefer": null})";
  EXPECT_EQ(flags(*watch(), "rxe0"), MIGR_LINKS_PORT_DOWN_OPERATOR);
  EXPECT_TRUE(std::filesystem::exists(file + ".bad"));
}

// In a network namespace of its own, of which the loopback goes up and down, and a netdev that is not there yet. Exit
// status: 77 no right to make one, else the number of what failed.
int watch_the_kernel(const std::string& folder) {
  if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET)) return 77;
  auto sh = [](const char* command) { return system(command) == 0; };
  if (!sh("ip link set lo up")) return 77;
  // Between two names, and once it is removed, the port says none.
  auto name = [said_none = false]() mutable -> std::string {
    if (!if_nametoindex("d2")) return said_none ? "" : "d1";
    return std::exchange(said_none, true) ? "d2" : "";
  };
  PortWatch w(folder + "/links.json", [name]() mutable { return std::vector<RdmaPort>{{"rxe0", 1, "lo"}, {"rxe1", 1, name()}}; }, {20ms, 300ms, 300ms, 60000ms});
  std::mutex mutex;
  std::vector<migr_links_port> told;
  w.set_changed([&](std::span<const migr_links_port> ports) {
    std::lock_guard lock(mutex);
    told.insert(told.end(), ports.begin(), ports.end());
  });
  if (!w.start()) return 1;
  auto down = [&w](int port) { return (w.ports()[static_cast<std::size_t>(port)].flags & MIGR_LINKS_PORT_DOWN) != 0; };
  if (down(0)) return 2;
  if (!down(1)) return 3;
  if (!sh("ip link set lo down") || !soon([&] { return down(0); })) return 4;
  const auto up_at = Clock::now();
  if (!sh("ip link set lo up")) return 5;
  if (!soon([&] { return !down(0); })) return 6;
  if (Clock::now() - up_at < 300ms) return 7;  // debounced
  std::size_t expected = 4;
  // Not every kernel has them.
  if (sh("ip link add d1 type dummy 2>/dev/null || ip link add d1 type bridge 2>/dev/null || ip link add d1 type veth 2>/dev/null")) {
    if (!sh("ip link set d1 up")) return 8;
    if (sh("ip -br link show d1 | grep -q LOWER_UP")) {
      if (!soon([&] { return !down(1); })) return 9;
      const bool renamed = sh("ip link set d1 name d2 2>/dev/null");  // older kernels refuse it while it is up
      if (renamed && !soon([&] { return std::string(w.ports()[1].netdev) == "d2"; })) return 12;
      if (!sh(renamed ? "ip link del d2" : "ip link del d1") || !soon([&] { return down(1); })) return 10;
      expected += renamed ? 3 : 2;  // the rename is told, too
    }
  }
  w.stop();
  std::lock_guard lock(mutex);
  return told.size() == expected ? 0 : 11;
}

TEST_F(Watch, WhatTheKernelTellsOfNetdevs) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(watch_the_kernel(dir_.path));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no right to make a network namespace";
  EXPECT_EQ(WEXITSTATUS(status), 0) << "step that failed";
}

}  // namespace
}  // namespace migr::port_watch_test
