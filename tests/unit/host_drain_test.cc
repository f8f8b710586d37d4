// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What `migrctl drain` makes of what is on a host and of what migrd answers.
#include "agent/host_drain.h"

#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

using namespace migr;

namespace {

ContextRecord context(pid_t pid, const char* comm) {
  ContextRecord c;
  c.rec.pid = static_cast<__u32>(pid);
  std::strncpy(c.rec.comm, comm, sizeof c.rec.comm - 1);
  return c;
}

std::string container_of(pid_t pid) { return pid < 10 ? "web" : pid < 20 ? "db"
                                                                         : ""; }

/// What was asked, in order; `takes`: "db b"
struct Asked {
  std::vector<std::string> log, takes;
  Result<wire::PlanReply> operator()(const std::string& name, const std::string& to) {
    log.push_back(name + " " + to);
    if (to == "silent") return Error{EHOSTUNREACH, "does not answer"};
    wire::PlanReply p;
    p.mutable_summary()->set_container(name);
    p.mutable_summary()->set_to(to);
    if (std::find(takes.begin(), takes.end(), log.back()) == takes.end()) p.mutable_summary()->set_error("no room");
    return p;
  }
};

wire::Summary moved(const char* name, const char* to, const char* error = "") {
  wire::Summary s;
  s.set_container(name);
  s.set_to(to);
  s.set_migrated(true);
  s.set_error(error);
  s.set_service_blackout_ms(12.5);
  return s;
}

}  // namespace

TEST(HostDrain, ProcessesAreCountedOnceAndByTheirContainer) {
  const auto all = occupants({context(5, "server"), context(5, "server"), context(6, "server"), context(11, "pg"), context(30, "ib_write_bw"), context(31, "migrd")}, container_of);
  EXPECT_EQ(all.containers, (std::vector<std::string>{"db", "web"}));
  ASSERT_EQ(all.processes.size(), 1u);
  EXPECT_EQ(all.processes[0].pid, 30);
  EXPECT_EQ(all.processes[0].comm, "ib_write_bw");
}

// Nobody's number is 0: nothing of it is to be typed, and each is one of its own.
TEST(HostDrain, WhatTheChildOfAnEndedProcessKeepsStays) {
  auto one = context(0, "server"), other = context(0, "server");
  one.rec.ctx_id = 7, other.rec.ctx_id = 8;
  std::strcpy(one.rec.ibdev, "rxe0");
  std::strcpy(other.rec.ibdev, "rxe0");
  const auto all = occupants({one, other}, container_of);
  EXPECT_TRUE(all.containers.empty());
  Asked asked;
  auto d = plan_drain(all, {"a"}, std::ref(asked));
  ASSERT_EQ(d.stays.size(), 2u);
  EXPECT_EQ(d.stays[0].who, "context 7 on rxe0 (server)");
  EXPECT_EQ(d.stays[1].who, "context 8 on rxe0 (server)");
  EXPECT_NE(d.stays[0].why.find("its process has ended"), std::string::npos) << d.stays[0].why;
  EXPECT_EQ(what_is_wrong(d).find("--pid"), std::string::npos) << what_is_wrong(d);
  note_left(d, occupants({other}, container_of));
  ASSERT_EQ(d.stays.size(), 1u);
  EXPECT_EQ(d.stays[0].who, "context 8 on rxe0 (server)");
}

TEST(HostDrain, GoesToTheFirstHostThatTakesIt) {
  Asked asked{{}, {"db b", "db c", "web a"}};
  const auto d = plan_drain({{"db", "web"}, {}}, {"a", "b", "c"}, std::ref(asked));
  EXPECT_EQ(asked.log, (std::vector<std::string>{"db a", "db b", "web a"}));
  ASSERT_EQ(d.would_move.size(), 2u);
  EXPECT_EQ(d.would_move[0].summary().to(), "b");
  EXPECT_EQ(d.would_move[1].summary().to(), "a");
  EXPECT_TRUE(d.stays.empty());
  EXPECT_TRUE(all_well(d));
}

TEST(HostDrain, WhatNobodyTakesStaysWithEachReason) {
  Asked asked;
  const auto d = plan_drain({{"db"}, {{30, "ib_write_bw"}}}, {"a", "silent"}, std::ref(asked));
  ASSERT_EQ(d.stays.size(), 2u);
  EXPECT_EQ(d.stays[0].who, "db");
  EXPECT_EQ(d.stays[0].why, "a: no room; silent: does not answer");
  EXPECT_EQ(d.stays[1].who, "process 30 (ib_write_bw)");
  EXPECT_NE(d.stays[1].why.find("migrctl migrate --pid 30 --to a"), std::string::npos) << d.stays[1].why;
  EXPECT_FALSE(all_well(d));
  EXPECT_NE(drain_plan_text(d).find("0 containers would leave, 2 would stay\n"), std::string::npos);
  EXPECT_EQ(plan_drain({{"db"}, {}}, {"a"}, std::ref(asked)).stays[0].why, "no room") << "of one host nobody asks which";
}

TEST(HostDrain, EachWasAskedAboutByItself) {
  Asked asked{{}, {"db a", "web a"}};
  EXPECT_NE(drain_plan_text(plan_drain({{"db", "web"}, {}}, {"a"}, std::ref(asked))).find("each was asked about by itself"), std::string::npos);
  EXPECT_EQ(drain_plan_text(plan_drain({{"db"}, {}}, {"a"}, std::ref(asked))).find("by itself"), std::string::npos);
}

TEST(HostDrain, WhoEndsItHearsWhatIsNotBegun) {
  const std::string both = "the drain ends here: migrd finishes what it has begun of web (how it stands: migrctl recover; to take it back: migrctl cancel web)";
  EXPECT_EQ(drain_ends_text("web", 0), both);
  EXPECT_EQ(drain_ends_text("web", 1), both + "; 1 container was not begun: when that is finished, run the same command again");
  EXPECT_NE(drain_ends_text("web", 7).find("7 containers were not begun"), std::string::npos);
}

TEST(HostDrain, WhatIsLeftAfterwardsStays) {
  HostDrain d;
  d.moved = {moved("web", "a"), moved("old", "a")};
  d.stays = {{"db", "no room"}, {"has ended", "no room"}, {"process 30 (ib_write_bw)", "it is in none"}};
  note_left(d, {{"db", "new", "old"}, {{40, "rping"}}});
  ASSERT_EQ(d.stays.size(), 4u);
  EXPECT_EQ(d.stays[0].why, "no room") << "its own reason";
  EXPECT_EQ(d.stays[1].who, "new");
  EXPECT_NE(d.stays[1].why.find("has come meanwhile"), std::string::npos);
  EXPECT_NE(d.stays[2].why.find("it has moved"), std::string::npos);
  EXPECT_EQ(d.stays[3].who, "process 40 (rping)");
}

TEST(HostDrain, SaysHowItEnded) {
  HostDrain d;
  EXPECT_EQ(drain_text(d), "nothing has RDMA resources here\n");
  EXPECT_EQ(drain_plan_text(d), "nothing has RDMA resources here\n");
  d.moved = {moved("web", "a")};
  EXPECT_EQ(drain_text(d), "web runs on a, having stood still for 12.5 ms\nnothing has RDMA resources here any more\n");
  EXPECT_TRUE(all_well(d));
  d.moved.push_back(moved("db", "a", "the container moved, but: no"));
  EXPECT_FALSE(all_well(d)) << "it is not where nobody has to look";
  EXPECT_EQ(what_is_wrong(d), "db: the container moved, but: no");
  d.stays = {{"old", "no room"}};
  const auto text = drain_text(d);
  EXPECT_NE(text.find("old stays: no room\n"), std::string::npos);
  EXPECT_EQ(text.find("any more"), std::string::npos);
  const auto j = drain_json(d);
  EXPECT_EQ(j["moved"].size(), 2u);
  EXPECT_EQ(j["stays"][0]["who"], "old");
}
