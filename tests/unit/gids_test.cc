/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
// GID tables of two hosts in another order: an index goes on meaning what it meant.
#include "../../libmigr/gids.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "../../include/migr/gid.h"
#include "../../libmigr/kernel_link.h"
#include "../../libmigr/real.h"

extern "C" int ibv_query_gid(ibv_context*, uint8_t, int, ibv_gid*);

namespace migr {
namespace {

ibv_context the_context;
Context ours;
std::vector<ibv_gid_entry> kernel;  // of the host that we are on
bool broken = false;

ibv_gid v4(std::uint8_t last) { return {.raw = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 10, last}}; }
ibv_gid local(std::uint8_t last) { return {.raw = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last}}; }
ibv_gid global(std::uint8_t last) { return {.raw = {0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last}}; }
ibv_gid_entry entry(const ibv_gid& gid, std::uint32_t index, std::uint32_t port = 1) { return {gid, index, port, IBV_GID_TYPE_ROCE_V2, 0}; }

ssize_t table(ibv_context*, ibv_gid_entry* out, std::size_t, std::uint32_t, std::size_t) {
  if (broken) return -EIO;
  std::copy(kernel.begin(), kernel.end(), out);
  return static_cast<ssize_t>(kernel.size());
}
constexpr std::uint32_t kPorts = 2, kTable = 8;
int query_ex(ibv_context*, std::uint32_t port, std::uint32_t index, ibv_gid_entry* out, std::uint32_t, std::size_t) {
  if (port > kPorts || index >= kTable) return EINVAL;
  for (const auto& e : kernel)
    if (e.port_num == port && e.gid_index == index) return *out = e, 0;
  return ENODATA;
}
int query(ibv_context* c, std::uint8_t port, int index, ibv_gid* gid) {
  ibv_gid_entry e{};
  const int err = query_ex(c, port, static_cast<std::uint32_t>(index), &e, 0, sizeof e);
  if (err && err != ENODATA) return -1;
  *gid = e.gid;
  return 0;
}

}  // namespace

KernelLink::~KernelLink() = default;
Registry& Registry::get() {
  static Registry* registry = new Registry;
  return *registry;
}
Context* Registry::context_of(const ibv_context* real) const { return real == &the_context ? &ours : nullptr; }
bool switchover::destroy_old_paths() { return false; }
decltype(&::_ibv_query_gid_table) real_query_gid_table() { return table; }
decltype(&::_ibv_query_gid_ex) real_query_gid_ex() { return query_ex; }
const Real& real() {
  static const Real fake = [] {
    Real r{};
    r.query_gid = query;
    return r;
  }();
  return fake;
}

namespace {

struct Gids : ::testing::Test {
  Gids() {
    ours.real = &the_context;
    ours.gids.clear();
    ours.moved = broken = false;
    kernel = {entry(local(1), 0), entry(v4(1), 1), entry(v4(1), 3, 2)};
    gids::note(ours);
  }
  static void move() {
    kernel = {entry(local(2), 0), entry(global(2), 1), entry(v4(2), 2), entry(v4(2), 3, 2), entry(global(3), 7)};
    gids::moved(ours);
  }
  static ibv_gid asked(int index, std::uint8_t port = 1) {
    ibv_gid gid;
    EXPECT_EQ(0, ibv_query_gid(&the_context, port, index, &gid));
    return gid;
  }
  static bool same(const ibv_gid& a, const ibv_gid& b) { return !std::memcmp(&a, &b, sizeof a); }
};

TEST_F(Gids, WithoutAMoveTheKernelsIndexesAreRight) {
  std::swap(kernel[0].gid_index, kernel[1].gid_index);
  EXPECT_EQ(1, gids::here(ours, 1, 1));
  EXPECT_EQ(1, gids::named(ours, 1, 1));
  EXPECT_TRUE(same(v4(1), asked(0)));
}

TEST_F(Gids, AnIndexMeansTheKindThatStoodThere) {
  move();
  EXPECT_EQ(0, gids::here(ours, 1, 0));
  EXPECT_EQ(2, gids::here(ours, 1, 1)) << "RoCE v2, IPv4";
  EXPECT_EQ(3, gids::here(ours, 2, 3));
  EXPECT_EQ(1, gids::named(ours, 1, 2));
  EXPECT_EQ(0, gids::named(ours, 1, 0));
}

TEST(Nearness, OfAFamilyTheNetworkCounts) {
  const auto near = [](const ibv_gid& was, const ibv_gid& here) { return migr_gid_nearness(was.raw, here.raw); };
  EXPECT_EQ(near(v4(1), global(1)), 0);
  EXPECT_EQ(near(local(1), global(1)), 0);
  EXPECT_GT(near(v4(1), v4(3)), near(v4(1), v4(4)));
  EXPECT_EQ(near(global(1), global(3)), near(global(1), global(4))) << "of one network: what each host chose";
  EXPECT_GT(near(global(1), global(1)), near(global(1), global(3))) << "itself";
  ibv_gid elsewhere = global(1);
  elsewhere.raw[7] = 1;
  EXPECT_GT(near(global(1), global(3)), near(global(1), elsewhere));
}

// Two networks at one port, in another order here: what is not on the one is not reached from it.
TEST_F(Gids, OfSeveralOfAKindTheNearestIsMeant) {
  const auto on = [](std::uint8_t net, std::uint8_t last) {
    ibv_gid g = v4(last);
    g.raw[14] = net;
    return g;
  };
  kernel = {entry(on(1, 1), 0), entry(on(2, 1), 1), entry(global(1), 2), entry(global(2), 3)};
  gids::note(ours);
  kernel = {entry(on(2, 9), 0), entry(on(1, 9), 1), entry(global(5), 2), entry(global(4), 3)};
  gids::moved(ours);
  EXPECT_EQ(1, gids::here(ours, 1, 0));
  EXPECT_EQ(0, gids::here(ours, 1, 1));
  EXPECT_EQ(0, gids::named(ours, 1, 1));
  EXPECT_TRUE(same(on(2, 9), asked(1)));
  EXPECT_EQ(2, gids::here(ours, 1, 3)) << "of equally near ones the first, as migrd, which knows no index, has it";
  kernel = {entry(on(2, 1), 0), entry(on(1, 1), 1), entry(global(2), 2), entry(global(1), 3)};
  EXPECT_EQ(3, gids::here(ours, 1, 2)) << "home again, in another order";
}

TEST_F(Gids, QueriesAnswerWithThePresentGidOfThatKind) {
  move();
  EXPECT_TRUE(same(local(2), asked(0)));
  EXPECT_TRUE(same(v4(2), asked(1)));
  EXPECT_TRUE(same(v4(2), asked(3, 2)));
  EXPECT_TRUE(same(ibv_gid{}, asked(2))) << "it is called 1";
  EXPECT_TRUE(same(global(3), asked(7))) << "of a kind that the first host did not have";
}

TEST_F(Gids, TheTableAndOneEntryAgree) {
  move();
  ibv_gid_entry all[8];
  const ssize_t n = ibv_query_gid_table(&the_context, all, 8, 0);
  ASSERT_EQ(4, n);
  for (ssize_t i = 0; i < n; ++i) {
    ibv_gid_entry one;
    ASSERT_EQ(0, ibv_query_gid_ex(&the_context, all[i].port_num, all[i].gid_index, &one, 0));
    EXPECT_TRUE(same(all[i].gid, one.gid));
  }
  ibv_gid_entry one;
  EXPECT_EQ(ENODATA, ibv_query_gid_ex(&the_context, 1, 2, &one, 0));
  EXPECT_EQ(-EINVAL, ibv_query_gid_table(&the_context, all, 3, 0));
}

TEST_F(Gids, WhatThereIsNotIsAnErrorAsEver) {
  for (const bool moved : {false, true}) {
    if (moved) move();
    ibv_gid gid;
    ibv_gid_entry e;
    EXPECT_EQ(-1, ibv_query_gid(&the_context, 1, kTable, &gid)) << moved;
    EXPECT_EQ(-1, ibv_query_gid(&the_context, kPorts + 1, 0, &gid)) << moved;
    EXPECT_EQ(EINVAL, ibv_query_gid_ex(&the_context, 1, kTable, &e, 0)) << moved;
    EXPECT_EQ(EINVAL, ibv_query_gid_ex(&the_context, kPorts + 1, 0, &e, 0)) << moved;
    EXPECT_EQ(ENODATA, ibv_query_gid_ex(&the_context, 1, 5, &e, 0)) << moved;
    EXPECT_TRUE(same(ibv_gid{}, asked(5))) << moved;
  }
}

TEST_F(Gids, InsideOfACallOfOursTheKernelAnswers) {
  move();
  const gids::Inside inside;
  EXPECT_TRUE(same(v4(2), asked(2)));
}

TEST_F(Gids, AKindThatIsNotHereKeepsItsIndex) {
  move();
  std::erase_if(kernel, [](const auto& e) { return e.gid_index == 2; });
  EXPECT_EQ(1, gids::here(ours, 1, 1));
}

TEST_F(Gids, ATableThatCannotBeReadChangesNothing) {
  move();
  broken = true;
  EXPECT_EQ(1, gids::here(ours, 1, 1));
  EXPECT_EQ(2, gids::named(ours, 1, 2));
}

TEST_F(Gids, HomeAgainAndOverTwoMovesTheFirstHostCounts) {
  move();
  gids::note(ours);  // the second migration's DESCRIBE
  kernel = {entry(v4(3), 0), entry(local(3), 1)};
  EXPECT_EQ(0, gids::here(ours, 1, 1));
  EXPECT_EQ(1, gids::here(ours, 1, 0));
  kernel = {entry(local(1), 0), entry(v4(1), 1), entry(v4(1), 3, 2)};
  EXPECT_EQ(1, gids::here(ours, 1, 1));
}

TEST_F(Gids, TheSameOneIsFoundWhereverItIs) {
  const ibv_gid_entry was = entry(v4(3), 1);
  const auto index = [&](const std::vector<ibv_gid_entry>& table) {
    const ibv_gid_entry* const now = gids::again(table, was);
    return now ? static_cast<int>(now->gid_index) : -1;
  };
  EXPECT_EQ(index({entry(local(3), 0), entry(v4(200), 1), entry(v4(3), 2)}), 2) << "at another place";
  EXPECT_EQ(index({entry(local(3), 0), entry(v4(201), 1), entry(v4(202), 2)}), 1) << "another one";
  EXPECT_EQ(index({entry(local(3), 0), entry(local(4), 1), entry(v4(201), 3)}), 3) << "another one, elsewhere";
  EXPECT_EQ(index({entry(local(3), 1)}), -1) << "none of its kind";
  EXPECT_EQ(index({entry(v4(3), 1, 2)}), -1) << "another port's";
}

}  // namespace
}  // namespace migr
