// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What becomes of work requests whose completion never came: executed, replayed, or lost; each completes once, in order.
#include "../../include/migr/migr.h"
#include "../../libmigr/switchover/replay.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace {

using namespace migr;
using replay::Fate;

constexpr std::uint32_t kMtu = 1024;
constexpr std::uint32_t kVqpn = 0x77;

QueuedSend send(ibv_wr_opcode opcode, std::uint64_t bytes, std::uint64_t wr_id = 0, bool signalled = true) {
  QueuedSend s;
  s.send.wr.wr_id = wr_id;
  s.send.wr.opcode = opcode;
  s.send.wr.send_flags = signalled ? IBV_SEND_SIGNALED : 0;
  s.bytes = bytes;
  s.begun = true;
  return s;
}

std::vector<QueuedSend> from_psn(std::uint32_t psn, std::vector<QueuedSend> sends) {
  sends.front().first_psn = psn;
  return sends;
}

TEST(Fates, WhatTheOtherEndHasExecutedIsDone) {
  const auto sends = from_psn(10, {send(IBV_WR_SEND, 100), send(IBV_WR_RDMA_WRITE, 3000), send(IBV_WR_SEND, 0)});
  EXPECT_EQ(replay::fates(sends, kMtu, 15, 10), (std::vector{Fate::kReplay, Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 15, 11), (std::vector{Fate::kDone, Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 15, 13), (std::vector{Fate::kDone, Fate::kReplay, Fate::kReplay})) << "in part";
  EXPECT_EQ(replay::fates(sends, kMtu, 15, 14), (std::vector{Fate::kDone, Fate::kDone, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 15, 15), (std::vector{Fate::kDone, Fate::kDone, Fate::kDone}));
}

// Answered up to PSN 110 and sent again from there: its length tells of answers that are not asked for any more.
TEST(Fates, AReadThatIsSentAgainInPartEndsWhereItDid) {
  auto sends = from_psn(110, {send(IBV_WR_RDMA_READ, 16 * kMtu), send(IBV_WR_SEND, 1), send(IBV_WR_RDMA_READ, 2 * kMtu), send(IBV_WR_SEND, 1)});
  sends[0].read_psns = 6;
  sends[2].read_psns = 1;  // of the work request that its slot had before: it is not the oldest
  EXPECT_EQ(replay::fates(sends, kMtu, 120, 115), (std::vector{Fate::kReplay, Fate::kReplay, Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 120, 117), (std::vector{Fate::kReplay, Fate::kDone, Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 120, 119), (std::vector{Fate::kReplay, Fate::kDone, Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 120, 120), (std::vector{Fate::kReplay, Fate::kDone, Fate::kReplay, Fate::kDone}));
  EXPECT_EQ(replay::end_psn(sends[0], kMtu), 116u);
}

TEST(Fates, AnAtomicWriteIsDoneOrReplayedLikeAnyWrite) {
  const auto sends = from_psn(10, {send(IBV_WR_ATOMIC_WRITE, 8, 1), send(IBV_WR_ATOMIC_WRITE, 8, 2)});
  auto fates = replay::fates(sends, kMtu, 12, 11);
  EXPECT_EQ(fates, (std::vector{Fate::kDone, Fate::kReplay}));
  const replay::Plan p = replay::plan(sends, fates, kVqpn, false);
  ASSERT_EQ(p.completions.size(), 1u);
  EXPECT_EQ(p.completions[0].wc.opcode, IBV_WC_ATOMIC_WRITE);
  EXPECT_EQ(p.completions[0].wc.status, IBV_WC_SUCCESS);
  ASSERT_EQ(p.replays.size(), 1u);
  EXPECT_EQ(p.replays[0].wr.wr_id, 2u);
  replay::resend(sends, fates);
  EXPECT_EQ(fates, (std::vector{Fate::kReplay, Fate::kReplay})) << "nothing tells that the other end has it";
}

// A path that is cut while it replays for others: what was executed on the path before is not asked for again.
TEST(Fates, WhatAPathBeforeHasExecutedStaysDone) {
  std::vector<QueuedSend> sends = from_psn(10, {send(IBV_WR_SEND, 1, 1), send(IBV_WR_RDMA_READ, 1, 900), send(IBV_WR_SEND, 1, 5)});
  const auto owed = [](std::uint64_t wr_id, bool signalled) {
    OwedCompletion o{.wc = {}, .signalled = signalled};
    o.wc.wr_id = wr_id;
    return o;
  };
  std::vector<StandIn> stand_ins = {{.wr_id = 900, .owed = {owed(2, false), owed(3, true), owed(4, false)}}};
  replay::unfold(sends, stand_ins);
  EXPECT_TRUE(stand_ins.empty());
  ASSERT_EQ(sends.size(), 5u);
  EXPECT_EQ(sends[1].send.wr.wr_id, 2u);
  EXPECT_FALSE(sends[1].send.wr.send_flags & IBV_SEND_SIGNALED);
  auto fates = replay::fates(sends, kMtu, 13, 11);
  EXPECT_EQ(fates, (std::vector{Fate::kDone, Fate::kReplay, Fate::kDone, Fate::kDone, Fate::kReplay}));
  const replay::Plan again = replay::plan(sends, fates, kVqpn, false);
  ASSERT_EQ(again.replays.size(), 2u);
  ASSERT_EQ(again.stand_ins.size(), 1u);
  EXPECT_EQ(again.stand_ins[0].owed.size(), 3u);
  EXPECT_EQ(again.stand_ins[0].owed[1].wc.wr_id, 3u);
  EXPECT_TRUE(again.stand_ins[0].owed[1].signalled);
  replay::resend(sends, fates);
  EXPECT_EQ(fates[2], Fate::kDone);
}

TEST(Fates, WhatIsNotToBeSentTwiceIsNot) {
  std::vector<QueuedSend> sends = from_psn(10, {send(IBV_WR_RDMA_WRITE, 1, 1), send(IBV_WR_SEND, 1, 2), send(IBV_WR_RDMA_WRITE, 1, 3), send(IBV_WR_RDMA_WRITE, 1, 4)});
  sends[0].send.wr.send_flags |= MIGR_SEND_ONCE;
  auto fates = replay::fates(sends, kMtu, 14, 13);
  replay::resend(sends, fates);
  EXPECT_EQ(fates, (std::vector{Fate::kDone, Fate::kDone, Fate::kReplay, Fate::kReplay})) << "a message behind it was received";
  sends[2].send.wr.send_flags |= MIGR_SEND_ONCE;
  fates = replay::fates(sends, kMtu, 14, 13);
  EXPECT_EQ(fates, (std::vector{Fate::kDone, Fate::kDone, Fate::kDone, Fate::kReplay})) << "exact";
  replay::resend(sends, fates);
  EXPECT_EQ(fates, (std::vector{Fate::kDone, Fate::kDone, Fate::kLost, Fate::kReplay}));
  EXPECT_EQ(replay::plan(sends, fates, kVqpn, false).lost, 1u);
}

QueuedSend swap(std::uint64_t address, std::uint64_t wr_id) {
  QueuedSend s = send(IBV_WR_ATOMIC_CMP_AND_SWP, 8, wr_id, false);
  s.send.wr.wr.atomic = {.remote_addr = address, .compare_add = 1, .swap = 1000 + wr_id, .rkey = 0};
  return s;
}

TEST(Fates, WhoseSwapValuesAreUniqueSwapsAgain) {
  std::vector<QueuedSend> sends = from_psn(10, {swap(0x100, 1), send(IBV_WR_SEND, 1, 2), swap(0x200, 3)});
  auto fates = replay::fates(sends, kMtu, 13, 12);
  EXPECT_EQ(fates, (std::vector{Fate::kLost, Fate::kDone, Fate::kReplay}));
  replay::swap_again(sends, fates);
  EXPECT_EQ(fates, (std::vector{Fate::kReplay, Fate::kDone, Fate::kReplay}));
  replay::Plan p = replay::plan(sends, fates, kVqpn, false);
  ASSERT_EQ(p.stand_ins.size(), 1u) << "what was not executed needs none";
  ASSERT_TRUE(p.stand_ins[0].again);
  EXPECT_EQ(p.stand_ins[0].again->compare, 1u);
  EXPECT_EQ(p.stand_ins[0].again->swap, 1001u);
  // Cut again before it was executed there: it is still one that may have been.
  std::vector<QueuedSend> second = from_psn(50, {swap(0x100, 900)});
  p.stand_ins[0].wr_id = 900;
  replay::unfold(second, p.stand_ins);
  fates = replay::fates(second, kMtu, 51, 50);
  replay::swap_again(second, fates);
  p = replay::plan(second, fates, kVqpn, false);
  ASSERT_EQ(p.stand_ins.size(), 1u);
  EXPECT_TRUE(p.stand_ins[0].again);
}

TEST(Fates, SwapThatWasOverwrittenSinceStaysLost) {
  const auto fate = [](std::uint64_t address, std::uint64_t bytes, ibv_wr_opcode opcode, std::uint32_t executed) {
    QueuedSend other = send(opcode, bytes);
    other.send.wr.wr.rdma.remote_addr = address;
    std::vector<QueuedSend> sends = from_psn(10, {swap(0x100, 1), other});
    auto fates = replay::fates(sends, kMtu, 12, executed);
    replay::swap_again(sends, fates);
    return fates[0];
  };
  EXPECT_EQ(fate(0xf8, 9, IBV_WR_RDMA_WRITE, 12), Fate::kLost);
  EXPECT_EQ(fate(0x107, 1, IBV_WR_RDMA_WRITE_WITH_IMM, 12), Fate::kLost);
  EXPECT_EQ(fate(0xf8, 8, IBV_WR_RDMA_WRITE, 12), Fate::kReplay) << "beside it";
  EXPECT_EQ(fate(0x108, 8, IBV_WR_RDMA_WRITE, 12), Fate::kReplay) << "beside it";
  EXPECT_EQ(fate(0x100, 8, IBV_WR_RDMA_WRITE, 11), Fate::kReplay) << "not executed";
  EXPECT_EQ(fate(0x100, 8, IBV_WR_RDMA_READ, 12), Fate::kReplay);
  std::vector<QueuedSend> two = from_psn(10, {swap(0x100, 1), swap(0x100, 2)});
  auto fates = replay::fates(two, kMtu, 12, 12);
  replay::swap_again(two, fates);
  EXPECT_EQ(fates, (std::vector{Fate::kLost, Fate::kReplay}));
}

TEST(Fates, PsnsWrap) {
  const auto sends = from_psn(0xfffffe, {send(IBV_WR_RDMA_WRITE, 4096), send(IBV_WR_RDMA_WRITE, 4096)});
  EXPECT_EQ(replay::fates(sends, kMtu, 6, 1), (std::vector{Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 6, 2), (std::vector{Fate::kDone, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 6, 6), (std::vector{Fate::kDone, Fate::kDone}));
}

TEST(Fates, ReadIsReplayedAndAtomicIsLostWhenExecuted) {
  const auto sends = from_psn(1, {send(IBV_WR_RDMA_READ, 5000), send(IBV_WR_ATOMIC_FETCH_AND_ADD, 8), send(IBV_WR_ATOMIC_CMP_AND_SWP, 8)});
  EXPECT_EQ(replay::fates(sends, kMtu, 8, 6), (std::vector{Fate::kReplay, Fate::kReplay, Fate::kReplay}));
  EXPECT_EQ(replay::fates(sends, kMtu, 8, 7), (std::vector{Fate::kReplay, Fate::kLost, Fate::kReplay}));
}

// A slot of the queue that was used before has the PSN of then.
TEST(Fates, StalePsnOfWhatWasNeverSentIsNotLookedAt) {
  auto sends = from_psn(3, {send(IBV_WR_SEND, 1), send(IBV_WR_SEND, 1)});
  sends[0].begun = sends[1].begun = false;
  EXPECT_EQ(replay::fates(sends, kMtu, 500, 500), (std::vector{Fate::kReplay, Fate::kReplay}));
  sends[0].first_psn = 499;  // was sent, and is about to be sent again
  EXPECT_EQ(replay::fates(sends, kMtu, 499, 500), (std::vector{Fate::kDone, Fate::kReplay}));
}

TEST(Unused, TellsTheQueuesApart) {
  Cut cut;
  cut.taken_sends.resize(7);
  EXPECT_EQ(replay::unused(cut, 3, 4, false).sends, 3u);
  cut.received = 2;  // two receives, and a send, completed at the last moment
  cut.taken_sends.resize(4);
  EXPECT_EQ(replay::unused(cut, 3, 4, false).sends, 2u);
  EXPECT_EQ(replay::unused(cut, 3, 4, false).receives, 2u);
  cut.taken_sends.resize(1);
  cut.taken_receives.resize(3);
  EXPECT_EQ(replay::unused(cut, 3, 4, true).sends, 1u);
  EXPECT_EQ(replay::unused(cut, 3, 4, true).receives, 3u);
}

TEST(Fates, WithoutAnotherPathNothingIsDoneBehindTheFirstThatIsNot) {
  std::vector<Fate> fates = {Fate::kDone, Fate::kDone, Fate::kReplay, Fate::kDone, Fate::kLost};
  replay::close(fates);
  EXPECT_EQ(fates, (std::vector{Fate::kDone, Fate::kDone, Fate::kLost, Fate::kLost, Fate::kLost}));
  std::vector<Fate> all = {Fate::kDone, Fate::kDone};
  replay::close(all);
  EXPECT_EQ(all, (std::vector{Fate::kDone, Fate::kDone}));
}

TEST(Plan, CompletesWhatIsDoneAndReplaysTheRest) {
  const std::vector<Fate> fates{Fate::kDone, Fate::kDone, Fate::kReplay, Fate::kReplay};
  const auto p = replay::plan({send(IBV_WR_SEND, 10, 1), send(IBV_WR_SEND, 10, 2, false), send(IBV_WR_SEND_WITH_IMM, 10, 3), send(IBV_WR_SEND, 10, 4)}, fates, kVqpn, false);
  ASSERT_EQ(p.completions.size(), 2u);
  EXPECT_EQ(p.completions[0].wc.wr_id, 1u);
  EXPECT_EQ(p.completions[0].wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(p.completions[0].wc.opcode, IBV_WC_SEND);
  EXPECT_EQ(p.completions[0].wc.byte_len, 10u);
  EXPECT_EQ(p.completions[0].wc.qp_num, kVqpn);
  EXPECT_FALSE(p.completions[1].signalled);
  ASSERT_EQ(p.replays.size(), 2u);
  EXPECT_EQ(p.replays[0].wr.wr_id, 3u);
  EXPECT_EQ(p.replays[1].wr.wr_id, 4u);
  EXPECT_TRUE(p.stand_ins.empty());
  EXPECT_EQ(p.done, 2u);
}

// A WRITE behind a READ was executed; it must neither be executed again nor complete before the READ.
TEST(Plan, ExecutedBehindAReadCompletesWithIt) {
  const std::vector<Fate> fates{Fate::kReplay, Fate::kDone, Fate::kReplay, Fate::kDone, Fate::kReplay};
  const auto p = replay::plan({send(IBV_WR_RDMA_READ, 1, 1, false), send(IBV_WR_RDMA_WRITE, 1, 2), send(IBV_WR_RDMA_READ, 1, 3), send(IBV_WR_SEND, 1, 4), send(IBV_WR_SEND, 1, 5)}, fates, kVqpn, false);
  EXPECT_TRUE(p.completions.empty());
  ASSERT_EQ(p.replays.size(), 3u);
  EXPECT_TRUE(p.replays[0].wr.send_flags & IBV_SEND_SIGNALED);
  EXPECT_EQ(p.replays[2].wr.wr_id, 5u);
  ASSERT_EQ(p.stand_ins.size(), 2u);
  EXPECT_EQ(p.at, (std::vector<std::size_t>{0, 1}));
  ASSERT_EQ(p.stand_ins[0].owed.size(), 2u);
  EXPECT_FALSE(p.stand_ins[0].owed[0].signalled) << "the READ itself, for the application";
  EXPECT_EQ(p.stand_ins[0].owed[1].wc.wr_id, 2u);
  EXPECT_EQ(p.stand_ins[1].owed[1].wc.wr_id, 4u);
}

TEST(Plan, LostAtomicBreaksTheConnection) {
  const std::vector<Fate> fates{Fate::kDone, Fate::kReplay, Fate::kLost, Fate::kReplay};
  const auto p = replay::plan({send(IBV_WR_SEND, 1, 1), send(IBV_WR_RDMA_READ, 1, 2, false), send(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 3), send(IBV_WR_SEND, 1, 4, false)}, fates, kVqpn, false);
  EXPECT_TRUE(p.replays.empty());
  EXPECT_EQ(p.lost, 1u);
  ASSERT_EQ(p.completions.size(), 4u);
  EXPECT_EQ(p.completions[0].wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(p.completions[1].wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(p.completions[2].wc.status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(p.completions[1].signalled && p.completions[3].signalled);
}

// Any queue, cut anywhere: executed at most once where that matters, completed once, in order.
TEST(Plan, EachOnceAndInOrderWhereverTheCutFalls) {
  std::mt19937 random(4711);
  for (int round = 0; round < 2000; ++round) {
    constexpr ibv_wr_opcode kOpcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD};
    std::vector<QueuedSend> sends;
    std::vector<std::uint32_t> end;  // the PSN behind each
    std::uint32_t psn = static_cast<std::uint32_t>(random() & 0xffffff);
    const std::uint32_t first = psn;
    for (std::uint64_t id = 0; id < 1 + random() % 12; ++id) {
      const auto opcode = kOpcodes[random() % 5];
      const std::uint64_t bytes = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : random() % 5000;
      sends.push_back(send(opcode, bytes, id, random() % 2));
      psn += opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || !bytes ? 1 : static_cast<std::uint32_t>((bytes + kMtu - 1) / kMtu);
      end.push_back(psn);
    }
    sends.front().first_psn = first;
    const std::uint32_t peer = (first + static_cast<std::uint32_t>(random() % (psn - first + 1)));
    const auto fates = replay::fates(sends, kMtu, psn & 0xffffff, peer & 0xffffff);
    const auto p = replay::plan(sends, fates, kVqpn, true);
    std::vector<std::uint64_t> completed;
    for (const auto& c : p.completions) completed.push_back(c.wc.wr_id);
    std::map<std::uint64_t, int> executed;
    for (std::size_t i = 0; i < sends.size(); ++i) executed[i] = end[i] <= peer;
    for (std::size_t r = 0, s = 0; r < p.replays.size(); ++r) {
      const bool for_others = s < p.at.size() && p.at[s] == r;
      ++executed[p.replays[r].wr.wr_id];
      if (!for_others) completed.push_back(p.replays[r].wr.wr_id);
      else
        for (const auto& owed : p.stand_ins[s].owed) completed.push_back(owed.wc.wr_id);
      s += for_others;
    }
    ASSERT_EQ(completed.size(), sends.size());
    for (std::size_t i = 0; i < sends.size(); ++i) {
      ASSERT_EQ(completed[i], i);
      if (sends[i].send.wr.opcode != IBV_WR_RDMA_READ) {
        ASSERT_LE(executed[i], 1) << "round " << round;
      }
      if (!p.lost) {
        ASSERT_GE(executed[i], 1) << "round " << round;
      }
    }
  }
}

TEST(Unused, NamesTellWhatWasCountedOnTheWrongSide) {
  using Names = std::vector<std::uint64_t>;
  const auto told = [](replay::Unused guess, const Names& flushed, const Names& sends, const Names& receives) {
    const replay::Unused u = replay::told_by_names(guess, flushed, sends, receives);
    return std::pair(u.sends, u.receives);
  };
  EXPECT_EQ(told({1, 3}, {20, 21, 7, 8}, {5, 6, 7, 8}, {18, 19, 20, 21}), std::pair(2ul, 2ul));
  EXPECT_EQ(told({2, 2}, {20, 7, 21, 8}, {7, 8}, {20, 21}), std::pair(2ul, 2ul));
  EXPECT_EQ(told({3, 0}, {19, 20, 21}, {6, 7, 8}, {19, 20, 21}), std::pair(0ul, 3ul));
  EXPECT_EQ(told({1, 2}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}), std::pair(1ul, 2ul)) << "all are called alike";
  EXPECT_EQ(told({1, 1}, {99, 98}, {1, 2}, {3, 4}), std::pair(1ul, 1ul)) << "what cannot be stays the guess";
  EXPECT_EQ(told({0, 0}, {}, {1, 2}, {3, 4}), std::pair(0ul, 0ul));
  EXPECT_EQ(told({0, 2}, {8, 21}, {8}, {21}), std::pair(1ul, 1ul)) << "fewer in the queues than were flushed";
}

}  // namespace
