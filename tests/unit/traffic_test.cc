// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is kept of the traffic of a host's ports.
#include "agent/traffic.h"

#include <gtest/gtest.h>

#include <atomic>

#include "agent/limits.h"

namespace migr::traffic_test {
namespace {

using namespace std::chrono_literals;
using Clock = TrafficMeter::Clock;

struct Ports : ::testing::Test {
  TrafficMeter::Counts counts;
  TrafficMeter meter{[this] { return counts; }};
  const Clock::time_point zero = Clock::now();
  void at(std::chrono::milliseconds when, std::uint64_t rx, std::uint64_t tx) {
    counts["rxe0/1"] = {rx, tx};
    meter.sample(zero + when);
  }
};

TEST_F(Ports, SamplesAreWhatWasCarriedSinceTheOneBefore) {
  at(0ms, 1000, 50);
  at(100ms, 1500, 50);
  at(300ms, 1500, 70);
  const auto r = meter.since(250, zero + 300ms);  // from 50 ms on
  ASSERT_EQ(r.samples_size(), 2);
  EXPECT_EQ(r.samples(0).at_ms(), 50u);
  EXPECT_EQ(r.samples(0).length_us(), 100'000u);
  EXPECT_EQ(r.samples(0).rx_bytes(), 500u);
  EXPECT_EQ(r.samples(0).tx_bytes(), 0u);
  EXPECT_EQ(r.samples(1).at_ms(), 250u);
  EXPECT_EQ(r.samples(1).length_us(), 200'000u);
  EXPECT_EQ(r.samples(1).tx_bytes(), 20u);
  EXPECT_EQ(meter.since(100, zero + 300ms).samples_size(), 1);
}

TEST_F(Ports, NoneIsThereBeforeTheSecondLook) {
  EXPECT_EQ(meter.since(1000).samples_size(), 0);
  at(0ms, 1000, 1000);
  EXPECT_EQ(meter.since(1000, zero + 1ms).samples_size(), 0);
}

TEST_F(Ports, APortThatComesOrBeginsAnewBringsNothingThatItDidNotCarry) {
  at(0ms, 1000, 1000);
  counts["rxe1/1"] = {1'000'000, 1'000'000};
  at(100ms, 1100, 1100);
  at(200ms, 10, 1200);  // made anew
  counts.erase("rxe1/1");
  at(300ms, 20, 1300);
  const auto r = meter.since(300, zero + 300ms);
  ASSERT_EQ(r.samples_size(), 3);
  EXPECT_EQ(r.samples(0).rx_bytes(), 100u);
  EXPECT_EQ(r.samples(1).rx_bytes(), 0u);
  EXPECT_EQ(r.samples(1).tx_bytes(), 100u);
  EXPECT_EQ(r.samples(2).rx_bytes(), 10u);
}

TEST_F(Ports, ManySamplesAreTakenTogetherAndNothingIsLost) {
  constexpr int kN = static_cast<int>(kTrafficSamples) * 3 - 1;
  for (int i = 0; i <= kN; i++) at(i * 10ms, static_cast<std::uint64_t>(i) * 7, 0);
  const auto r = meter.since(kN * 10, zero + kN * 10ms);
  EXPECT_LE(r.samples_size(), static_cast<int>(kTrafficSamples));
  EXPECT_GT(r.samples_size(), static_cast<int>(kTrafficSamples) / 2);
  std::uint64_t bytes = 0, us = 0;
  for (const auto& s : r.samples()) bytes += s.rx_bytes(), us += s.length_us();
  EXPECT_EQ(bytes, 7u * kN);
  EXPECT_EQ(us, 10'000u * kN);
  EXPECT_EQ(r.samples(r.samples_size() - 1).at_ms(), 10u * kN);
}

TEST_F(Ports, OldOnesGo) {
  at(0ms, 0, 0);
  at(100ms, 1, 0);
  const auto later = std::chrono::milliseconds(kTrafficKeepMs) + 200ms;
  at(later, 2, 0);
  EXPECT_EQ(meter.since(0xffffffff, zero + later).samples_size(), 1);
}

TEST(TrafficThread, LooksMoreOftenWhenItIsTold) {
  std::atomic<std::uint64_t> looks = 0;
  TrafficMeter meter([&] { return TrafficMeter::Counts{{"rxe0/1", {++looks, 0}}}; });
  meter.start();
  const auto close = [&] {
    int n = 0;
    const auto r = meter.since(60'000);
    for (const auto& s : r.samples()) n += s.length_us() < kTrafficIdlePeriodMs * 800u;
    return n;
  };
  const auto until = Clock::now() + 30s;
  while (looks < 3 && Clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(close(), 0);
  while (close() < 5 && Clock::now() < until) {
    meter.look_closely();
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_GE(close(), 5);
  meter.stop();
  meter.stop();
}

}  // namespace
}  // namespace migr::traffic_test
