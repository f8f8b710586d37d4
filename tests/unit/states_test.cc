// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The table of arcs of a switchover, walked: every phase has a way on and a way back, except where there must be none. And how
// long a step waits.
#include <gtest/gtest.h>
#include <unistd.h>

#include "switchover/parts.h"
#include "switchover/states.h"

namespace {

using namespace migr::switchover;

Phase phase(int i) { return static_cast<Phase>(i); }

/// Phases that can be reached from `from` without passing through `without`.
unsigned reachable(Phase from, Phase without) {
  unsigned seen = bit(from);
  for (int rounds = 0; rounds < kPhases; ++rounds)
    for (int i = 0; i < kPhases; ++i)
      if (seen & bit(phase(i)) && phase(i) != without) seen |= kArcs[i];
  return seen;
}

TEST(States, EveryPhaseLeadsBackToRunning) {
  for (int i = 1; i < kPhases; ++i) EXPECT_TRUE(may_move(phase(i), Phase::kRunning)) << name(phase(i));
}

TEST(States, EveryPhaseIsReachedFromRunning) {
  EXPECT_EQ((1u << kPhases) - 1, reachable(Phase::kRunning, Phase::kRebound) | bit(Phase::kRebound));
}

TEST(States, NoPhaseLeadsToItself) {
  for (int i = 0; i < kPhases; ++i) EXPECT_FALSE(may_move(phase(i), phase(i))) << name(phase(i));
}

TEST(States, PathChangesOnlyAfterDrain) {
  for (int i = 0; i < kPhases; ++i) {
    EXPECT_EQ(phase(i) == Phase::kDrained, may_move(phase(i), Phase::kSwitched)) << name(phase(i));
    EXPECT_EQ(phase(i) == Phase::kDrained, may_move(phase(i), Phase::kFrozen)) << name(phase(i));
  }
}

TEST(States, RestoredSideOnlyGoesOn) { EXPECT_EQ(bit(Phase::kRunning), kArcs[static_cast<int>(Phase::kRebound)]); }

TEST(States, NewPathThatFailsIsLeftAsAnyOther) {
  EXPECT_TRUE(may_move(Phase::kSwitched, Phase::kSuspended));
}

TEST(States, SuspensionIsTheOnlyWayIn) {
  EXPECT_EQ(bit(Phase::kSuspended), kArcs[static_cast<int>(Phase::kRunning)]);
}

TEST(Limits, WhoWasStoppedHimselfWaitsOn) {
  Patience stopped, running;
  constexpr useconds_t kLookUs = 20'000;
  unsigned looks = 0;
  while (looks * kLookUs < 4 * kEventLimitMs * 1000 && !running.over()) usleep(kLookUs), ++looks;
  EXPECT_TRUE(running.over());
  EXPECT_GE(looks, kEventLimitMs / 50) << "no look counts for more than 50 ms";
  EXPECT_FALSE(stopped.over()) << "it has looked once in all that time";
}

}  // namespace
