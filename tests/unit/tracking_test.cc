/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
// Notes of where NICs write to: libmigr/tracking.h. With posts and queues: Tracked.* of tests/failover/events_tracked_test.cc.
#include "../../libmigr/tracking.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

namespace migr::tracking {
namespace {

constexpr std::uint64_t kPage = 4096;

/// First page and pages of each.
std::string text(const Parts& parts) {
  std::string out;
  for (const auto& [start, end] : parts.all()) out += std::to_string(start / kPage) + "+" + std::to_string((end - start) / kPage) + " ";
  return out;
}

TEST(TrackedParts, AreWholePages) {
  Parts p;
  p.add(5 * kPage + 4095, 2);
  EXPECT_EQ(text(p), "5+2 ");
  p.add(9 * kPage, kPage);
  p.add(10 * kPage - 1, 1);
  EXPECT_EQ(text(p), "5+2 9+1 ");
  p.add(12 * kPage, 0);
  EXPECT_EQ(text(p), "5+2 9+1 ") << "nothing is written";
}

TEST(TrackedParts, ThatMeetBecomeOne) {
  Parts p;
  for (const std::uint64_t page : {2, 4, 6, 8}) p.add(page * kPage, kPage);
  EXPECT_EQ(text(p), "2+1 4+1 6+1 8+1 ");
  p.add(3 * kPage, kPage);
  EXPECT_EQ(text(p), "2+3 6+1 8+1 ");
  p.add(kPage, 7 * kPage);
  EXPECT_EQ(text(p), "1+8 ");
  p.add(3 * kPage, kPage);
  EXPECT_EQ(text(p), "1+8 ");
  p.add(0, kPage);
  EXPECT_EQ(text(p), "0+9 ");
}

TEST(TrackedParts, OfAnAddressThatNoDeviceTakesAreNone) {
  Parts p;
  p.add(~std::uint64_t{0} - 10, 100);
  EXPECT_EQ(text(p), "");
}

TEST(TrackedParts, AreAlwaysAtLeastWhatWasAddedAndNeverTooMany) {
  std::mt19937 random(7);
  Parts p;
  std::set<std::uint64_t> added;
  for (int i = 0; i < 40'000; ++i) {
    const std::uint64_t page = random() % 1'000'000;
    added.insert(page);
    p.add(page * kPage + random() % kPage, 1);
    ASSERT_LE(p.all().size(), Parts::kMost);
  }
  std::uint64_t last = 0, pages = 0;
  for (const auto& [start, end] : p.all()) {
    EXPECT_TRUE(start > last || pages == 0);
    EXPECT_GT(end, start);
    last = end;
    pages += (end - start) / kPage;
  }
  for (const std::uint64_t page : added) {
    const auto after = p.all().upper_bound(page * kPage);
    ASSERT_NE(after, p.all().begin()) << page;
    EXPECT_GT(std::prev(after)->second, page * kPage) << page;
  }
  EXPECT_LT(pages, 1'000'000u) << "not simply everything";
}

TEST(TrackedNotes, AreOfWhatIsWrittenAndWhere) {
  ibv_sge sges[] = {{kPage, 10, 1}, {3 * kPage, kPage, 2}};
  const auto notes_of = [&](bool here, ibv_wr_opcode opcode) {
    Notes notes;
    notes.here = here;
    ibv_send_wr wr{};
    wr.opcode = opcode;
    wr.sg_list = sges;
    wr.num_sge = 2;
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      wr.wr.atomic.remote_addr = 9 * kPage + 8;
      wr.wr.atomic.rkey = 7;
    } else {
      wr.wr.rdma.remote_addr = 9 * kPage;
      wr.wr.rdma.rkey = 7;
    }
    note(notes, wr);
    std::string out;
    for (const std::uint32_t key : {1, 2, 7})
      if (const auto found = notes.parts.find(key); found != notes.parts.end()) out += std::to_string(key) + ": " + text(found->second);
    return out;
  };
  for (const auto write : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    EXPECT_EQ(notes_of(false, write), "7: 9+2 ") << "of 4106 bytes";
    EXPECT_EQ(notes_of(true, write), "");
  }
  EXPECT_EQ(notes_of(true, IBV_WR_RDMA_READ), "1: 1+1 2: 3+1 ");
  EXPECT_EQ(notes_of(false, IBV_WR_RDMA_READ), "");
  for (const auto atomic : {IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    EXPECT_EQ(notes_of(true, atomic), "1: 1+1 2: 3+1 ");
    EXPECT_EQ(notes_of(false, atomic), "7: 9+1 ");
  }
  for (const auto other : {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, IBV_WR_LOCAL_INV})
    for (const bool here : {false, true}) EXPECT_EQ(notes_of(here, other), "");
  Notes here, there;
  here.here = true;
  ibv_recv_wr wr{};
  wr.sg_list = sges;
  wr.num_sge = 2;
  note(here, wr);
  note(there, wr);
  EXPECT_EQ(here.parts.size(), 2u);
  EXPECT_EQ(text(here.parts[2]), "3+1 ");
  EXPECT_TRUE(there.parts.empty());
}

// As of a program that registers memory for each transfer.
TEST(TrackedNotes, OfTooManyPlacesAreGivenUp) {
  Notes notes;
  notes.here = true;
  ibv_sge sge{kPage, 8, 0};
  ibv_recv_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  for (std::uint32_t key = 1; key <= kMostParts; ++key)
    for (int times = 0; times < 2; ++times) sge.lkey = key, note(notes, wr);
  EXPECT_TRUE(notes.whole);
  EXPECT_EQ(notes.parts.size(), kMostParts);
  sge.length = 0;
  sge.lkey = 0;
  note(notes, wr);
  EXPECT_TRUE(notes.whole) << "nothing is written";
  sge.length = 8;
  note(notes, wr);
  EXPECT_FALSE(notes.whole);
  EXPECT_TRUE(notes.parts.empty());
  note(notes, wr);
  EXPECT_TRUE(notes.parts.empty()) << "nobody needs more";
}

TEST(TrackedNotes, CountWhatBecomesOneOnce) {
  Notes notes;
  notes.here = true;
  ibv_sge sge{0, 8, 7};
  ibv_recv_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  for (std::uint64_t i = 0; i < 2 * kMostParts; ++i) sge.addr = i % 1000 * 2 * kPage, note(notes, wr);
  EXPECT_TRUE(notes.whole);
  EXPECT_EQ(notes.count, 1000u);
  sge = {0, 2000 * kPage, 7};
  note(notes, wr);
  EXPECT_EQ(notes.count, 1u);
}

}  // namespace
}  // namespace migr::tracking
