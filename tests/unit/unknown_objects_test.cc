// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migr.ko has on record and the process's libmigr has not counted.
#include "agent/unknown_objects.h"

#include <gtest/gtest.h>

#include <deque>

namespace migr::unknown_objects_test {
namespace {

constexpr std::uint32_t kCtx = 7;

migr_fd_desc counted(std::uint32_t type, std::uint64_t count, std::uint64_t calls = 1, std::uint64_t under_way = 0, std::uint32_t ctx = kCtx) {
  migr_fd_desc d{};
  d.kind = MIGR_FD_COUNT;
  d.ctx_id = ctx;
  d.obj_type = type;
  d.addr = count;
  d.bytes = calls;
  d.pgoff = under_way;
  return d;
}

ContextRecord context(std::uint32_t mrs, std::uint32_t id = kCtx) {
  ContextRecord c;
  c.rec.ctx_id = id;
  c.rec.nr_pd = 1;
  c.rec.nr_mr = mrs;
  c.rec.nr_cq = 2;
  c.rec.nr_srq = 1;
  return c;
}

using Counts = std::vector<migr_fd_desc>;

TEST(UnknownObjects, AreThoseThatOnlyTheRecordHas) {
  ContextRecord c = context(3);
  migr_qp_rec q{};
  c.qps.push_back(q);
  q.flags = MIGR_QP_FORMER;
  c.qps.push_back(q);
  const std::vector<ContextRecord> record{c, context(100, kCtx + 1)};
  const Counts all{counted(MIGR_OBJ_MR, 3), counted(MIGR_OBJ_PD, 1), counted(MIGR_OBJ_CQ, 2), counted(MIGR_OBJ_QP, 1), counted(MIGR_OBJ_SRQ, 1)};
  EXPECT_EQ(unknown_objects(record, all), "") << "what was not counted, and old paths, are not compared";
  for (std::size_t i = 0; i < all.size(); i++) {
    Counts less = all;
    less[i].addr--;
    EXPECT_EQ(unknown_objects(record, less), std::string("1 x ") + object_name(less[i].obj_type));
    less[i].addr += 2;
    EXPECT_EQ(unknown_objects(record, less), "") << "one of them was ended since";
  }
  EXPECT_EQ(unknown_objects(record, Counts{counted(MIGR_OBJ_MR, 1), counted(MIGR_OBJ_CQ, 1), counted(MIGR_OBJ_MR, 99, 1, 0, kCtx + 1)}), "3 x MR, 1 x CQ") << "of all contexts together";
  EXPECT_EQ(unknown_objects(record, {}), "") << "an older libmigr counts nothing";
}

struct Process {
  std::deque<Counts> counts;
  std::deque<std::uint32_t> mrs;
  Status ask(Counts first, std::uint32_t on_record) {
    const auto count = [this]() -> Result<Counts> {
      auto next = counts.front();
      if (counts.size() > 1) counts.pop_front();
      return next;
    };
    const auto look = [this]() -> Result<std::vector<ContextRecord>> {
      const auto next = mrs.front();
      if (mrs.size() > 1) mrs.pop_front();
      return std::vector{context(next)};
    };
    return knows_its_objects("process 1 (prog)", {context(on_record)}, std::move(first), count, look);
  }
};

TEST(UnknownObjects, AreRefusedOnceNothingHappensInBetween) {
  Process p{.counts = {{counted(MIGR_OBJ_MR, 2)}}, .mrs = {}};
  const Status s = p.ask({counted(MIGR_OBJ_MR, 2)}, 3);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EOPNOTSUPP);
  EXPECT_NE(s.error().text.find("process 1 (prog) has RDMA resources that its libmigr does not know and cannot make again: 1 x MR"), std::string::npos) << s.error().text;
}

TEST(UnknownObjects, WhoKnowsAllIsNotAskedAgain) {
  Process p;  // it would have no answer
  EXPECT_TRUE(p.ask({counted(MIGR_OBJ_MR, 3)}, 3));
}

// Registered between the count and the look, and while the driver had not come back.
TEST(UnknownObjects, MemoryThatIsBeingRegisteredIsKnownWhenThatIsOver) {
  Process p{.counts = {{counted(MIGR_OBJ_MR, 3, 2)}}, .mrs = {3}};
  EXPECT_TRUE(p.ask({counted(MIGR_OBJ_MR, 2, 1)}, 3));
  p = {.counts = {{counted(MIGR_OBJ_MR, 2, 1, 1)}, {counted(MIGR_OBJ_MR, 3, 1)}}, .mrs = {3}};
  EXPECT_TRUE(p.ask({counted(MIGR_OBJ_MR, 2, 1, 1)}, 3)) << "it was under way all the time";
  p = {.counts = {{counted(MIGR_OBJ_MR, 2, 2)}}, .mrs = {2}};
  EXPECT_TRUE(p.ask({counted(MIGR_OBJ_MR, 2, 1)}, 3)) << "and was given back again";
}

TEST(UnknownObjects, AreFoundBetweenCallsOfAProgramThatGoesOn) {
  Process p{.counts = {{counted(MIGR_OBJ_MR, 2, 2)}, {counted(MIGR_OBJ_MR, 2, 3, 1)}, {counted(MIGR_OBJ_MR, 3, 3)}, {counted(MIGR_OBJ_MR, 3, 3)}}, .mrs = {3, 4}};
  const Status s = p.ask({counted(MIGR_OBJ_MR, 2, 1)}, 3);
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find(": 1 x MR."), std::string::npos) << s.error().text;
}

TEST(UnknownObjects, OfAProgramThatRegistersAllTheTimeFreezeDecides) {
  Process p{.counts = {}, .mrs = {3}};
  for (unsigned i = 0; i < 100; i++) p.counts.push_back({counted(MIGR_OBJ_MR, 2, 2 + i)});
  EXPECT_TRUE(p.ask({counted(MIGR_OBJ_MR, 2, 1)}, 3));
  EXPECT_GT(p.counts.size(), 90u) << "it is not asked for ever";
}

TEST(UnknownObjects, WhatCannotBeAskedIsAnError) {
  const auto gone = [] { return Result<Counts>(Error{ECONNRESET, "gone"}); };
  const auto look = [] { return Result<std::vector<ContextRecord>>(Error{EIO, "no"}); };
  EXPECT_EQ(knows_its_objects("p", {context(3)}, {counted(MIGR_OBJ_MR, 2)}, gone, look).error().code, ECONNRESET);
  const auto other = [] { return Result<Counts>(Counts{counted(MIGR_OBJ_MR, 2, 2)}); };
  EXPECT_EQ(knows_its_objects("p", {context(3)}, {counted(MIGR_OBJ_MR, 2)}, other, look).error().code, EIO);
}

}  // namespace
}  // namespace migr::unknown_objects_test
