// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Whose a name is that a process publishes. migr.ko, the kernel and the moves are tables of this test.
#include "agent/failover/name_check.h"

#include <map>

#include "link_library.h"

namespace migr::name_check_test {
namespace {

constexpr pid_t kOwn = 7, kOther = 8;

struct Names : public ::testing::Test {
  VqpName name(std::uint8_t host, std::uint32_t vqpn) { return name_of(link_name(host, vqpn)); }
  Status publish(std::vector<VqpName> names) { return own_names(kOwn, names, sources, offending, bound); }

  bool loaded = true;
  std::map<pid_t, std::vector<NameSources::Recorded>> recorded{{kOwn, {{20, 20}, {21, 33}}}, {kOther, {{30, 30}, {33, 40}}}};
  std::map<pid_t, std::set<std::uint32_t>> made{{kOwn, {20, 33}}, {kOther, {30, 40}}};
  int reads = 0;
  NameSources sources{
      [this](pid_t pid) -> Result<std::vector<NameSources::Recorded>> {
        if (!loaded) return Error{ENOENT, "migr.ko is not loaded"};
        return recorded[pid];
      },
      [this](pid_t pid) -> Result<std::set<std::uint32_t>> { return ++reads, made[pid]; },
      [this](const Gid& gid) { return gid == name(1, 1).gid; },
      [this](pid_t pid, const Gid& gid) { return pid == kOwn && gid == name(2, 1).gid; },
      [this](pid_t, const Gid&) -> Result<std::set<std::uint32_t>> { return own; },
      [this](pid_t pid, const Gid& gid) -> Result<std::set<std::uint32_t>> { return pid == kOwn && gid == name(1, 1).gid ? kept : std::set<std::uint32_t>(); },
      [this](pid_t pid, const Gid& gid) -> Result<std::set<std::uint32_t>> { return pid == kOwn && gid == name(1, 1).gid ? given : std::set<std::uint32_t>(); },
      [this](pid_t) -> Result<bool> { return guest; },
  };
  std::set<std::uint32_t> own, kept, given;
  bool guest = false;
  std::size_t offending = 0;
  std::set<VqpName> bound;
};

TEST_F(Names, ItsOwnAreTaken) {
  const auto s = publish({name(1, 20), name(1, 21)});
  EXPECT_TRUE(s) << s.error().text;
  EXPECT_EQ(reads, 0) << "what migr.ko knows is not looked for";
}

TEST_F(Names, AnothersNumberIsRefused) {
  const auto s = publish({name(1, 20), name(1, 30)});
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EINVAL);
  EXPECT_EQ(offending, 1u);
  EXPECT_NE(s.error().text.find("no QP of process 7"), std::string::npos) << s.error().text;
}

TEST_F(Names, AnothersGidIsRefused) {
  const auto s = publish({name(3, 20)});
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EINVAL);
  EXPECT_NE(s.error().text.find("GID"), std::string::npos) << s.error().text;
}

TEST_F(Names, WhereItHasBeenItKeepsItsNames) { EXPECT_TRUE(publish({name(2, 20), name(2, 21), name(1, 20)})); }

TEST_F(Names, TheKernelsNumberOfAQpThatHasAnotherNameIsNoName) {
  EXPECT_FALSE(publish({name(1, 33)})) << "it is what the other process calls its own";
  EXPECT_EQ(reads, 1);
}

TEST_F(Names, ANumberThatAnotherWasGivenIsRefused) {
  given = {21, 30};
  const auto s = publish({name(1, 20), name(1, 21)});
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EINVAL);
  EXPECT_EQ(offending, 1u);
  EXPECT_NE(s.error().text.find("is another's, whatever process 7 calls its QP"), std::string::npos) << s.error().text;
  given = {20};
  EXPECT_TRUE(publish({name(1, 20)})) << "it has it itself";
}

TEST_F(Names, WhatIsKeptForAnotherIsRefused) {
  kept = {20, 21};
  EXPECT_EQ(publish({name(1, 21)}).error().code, EINVAL);
  EXPECT_TRUE(publish({name(1, 20)})) << "it was born with that, on another device than who has left";
}

TEST_F(Names, WhoHasComeHasWhatItIsKnownBy) {
  given = {21};
  EXPECT_TRUE(publish({name(2, 21)})) << "of another host";
  own = {21};
  EXPECT_TRUE(publish({name(1, 21)})) << "and come home";
  EXPECT_TRUE(bound.empty());
  own.clear();
  guest = true;
  EXPECT_TRUE(publish({name(1, 21)})) << "its address has come with it";
}

TEST_F(Names, WhatIsOnlyBoundGivesWay) {
  EXPECT_TRUE(publish({name(1, 20), name(1, 21)}));
  EXPECT_EQ(bound, std::set<VqpName>{name(1, 21)});
}

TEST_F(Names, WithoutTheModuleTheKernelIsAsked) {
  loaded = false;
  EXPECT_TRUE(publish({name(1, 20), name(1, 33)}));
  EXPECT_FALSE(publish({name(1, 30)}));
}

TEST_F(Names, WhatWasMadeBeforeTheModuleWasLoadedIsTaken) {
  recorded[kOwn].clear();
  EXPECT_TRUE(publish({name(1, 20)}));
}

TEST_F(Names, WhoCannotTellSaysWhy) {
  sources.recorded = [](pid_t) -> Result<std::vector<NameSources::Recorded>> { return Error{EAGAIN, "it changes all the time"}; };
  EXPECT_EQ(publish({name(1, 20)}).error().code, EAGAIN);
  sources.recorded = [](pid_t) -> Result<std::vector<NameSources::Recorded>> { return Error{ENOENT, "migr.ko is not loaded"}; };
  sources.made = [](pid_t) -> Result<std::set<std::uint32_t>> { return Error{EIO, "netlink"}; };
  EXPECT_EQ(publish({name(1, 20)}).error().code, EIO);
}

}  // namespace
}  // namespace migr::name_check_test
