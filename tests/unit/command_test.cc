// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "agent/command.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <utility>

#include "agent/limits.h"

namespace migr::command_test {
namespace {

constexpr int kPatienceMs = 5000;

struct Command : ::testing::Test {
  Command() {
    char name[] = "/tmp/command_test.XXXXXX";
    folder = mkdtemp(name);
    log = folder + "/log";
  }
  ~Command() override { (void)run_command({"rm", "-r", folder}, {}, kPatienceMs); }
  std::string folder, log;
};

TEST_F(Command, OutputStatusAndEnvironmentComeBack) {
  auto r = run_command({"sh", "-c", "echo out; echo \"err $WHO\" >&2; exit 3"}, {"WHO=me"}, kPatienceMs);
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 3);
  EXPECT_EQ(r->out, "out\n");
  EXPECT_EQ(r->last_line(), "err me");
}

TEST_F(Command, AnswerIsKeptWhole) {
  auto r = run_command({"sh", "-c", "echo begin; head -c 200000 /dev/zero | tr '\\0' x; echo end; echo end >&2"}, {}, kPatienceMs);
  ASSERT_TRUE(r);
  EXPECT_FALSE(r->cut);
  EXPECT_EQ(r->out, "begin\n" + std::string(200'000, 'x') + "end\n");
}

TEST_F(Command, OfTooLongAnAnswerTheEndIsKept) {
  auto r = run_command({"sh", "-c", "head -c $1 /dev/zero | tr '\\0' x; echo end", "sh", std::to_string(kCommandAnswerBytes)}, {}, 6 * kPatienceMs);
  ASSERT_TRUE(r);
  EXPECT_TRUE(r->cut);
  EXPECT_LE(r->out.size(), kCommandAnswerBytes);
  EXPECT_EQ(r->last_line().substr(r->last_line().size() - 3), "end");
  r = run_command({"sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x >&2; echo end >&2"}, {}, kPatienceMs);
  ASSERT_TRUE(r);
  EXPECT_FALSE(r->cut);
  EXPECT_EQ(r->err.size(), kCommandOutputBytes);
}

TEST_F(Command, ThatTakesTooLongIsKilledWithWhatItStarted) {
  auto r = run_command({"sh", "-c", "(sleep 2; touch \"$1\") & sleep 30", "sh", log}, {}, 300);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT);
  sleep(3);
  EXPECT_NE(access(log.c_str(), F_OK), 0) << "its child went on";
}

TEST_F(Command, ThatTakesTooLongIsNamedWithItsLimit) {
  const int before = std::exchange(kHookMs, 300);
  const auto r = run_command(first_to_go({"sleep", "30"}), {}, kHookMs), other = run_command({"sleep", "30"}, {}, 200);
  kHookMs = before;
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().text, "sleep did not end within 300 ms; if it only needs longer, raise \"hook_ms\" in \"limits\" of migrd.json");
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().text, "sleep did not end within 200 ms") << "nobody can raise that";
}

TEST_F(Command, ThatIsNotThereIsNamed) {
  auto r = run_command({"/nowhere/program"}, {}, kPatienceMs);
  ASSERT_FALSE(r);
  EXPECT_NE(r.error().text.find("/nowhere/program"), std::string::npos) << r.error().text;
}

TEST_F(Command, ChildReadsWhatItIsTold) {
  auto c = Child::start({"sh", "-c", "read x; echo \"got $x\"; exit 4"}, {}, log, true);
  ASSERT_TRUE(c);
  EXPECT_FALSE(c->wait(300)) << "it did not wait";
  ASSERT_TRUE(c->say("begin"));
  ASSERT_TRUE(c->wait(kPatienceMs));
  EXPECT_EQ(c->status(), 4);
  EXPECT_EQ(tail_of(log, 100), "got begin\n");
}

TEST_F(Command, ChildSaysThatItIsReady) {
  std::ofstream(log) << "ready\n";  // of one before
  auto c = Child::start({"sh", "-c", "printf rea; sleep 0.1; echo dy; read x; echo late"}, {}, log, true);
  ASSERT_TRUE(c) << c.error().text;
  EXPECT_FALSE(c->wait_for("ready", 20)) << "what it has not said";
  EXPECT_TRUE(c->wait_for("ready", 5000));
  EXPECT_FALSE(c->wait_for("late", 20));
  ASSERT_TRUE(c->say("go on"));
  EXPECT_TRUE(c->wait_for("late", 5000)) << "its last word";
  EXPECT_FALSE(c->wait_for("never", 5000)) << "it has ended";
  EXPECT_EQ(c->status(), 0);
}

TEST_F(Command, ChildThatHasEndedHoldsNoDescriptor) {
  const auto open_here = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto before = open_here();
  auto c = Child::start({"true"}, {}, log, true);
  ASSERT_TRUE(c && c->wait(kPatienceMs));
  EXPECT_EQ(open_here(), before);
  EXPECT_FALSE(c->say("x"));
}

TEST_F(Command, ChildThatIsLetGoReadsItsEnd) {
  {
    auto c = Child::start({"sh", "-c", "trap '' TERM; read x || touch \"$1\"; sleep 30", "sh", log + ".end"}, {}, log, true);
    ASSERT_TRUE(c);
    usleep(200'000);
  }
  // Killed at once, too: whether it came to see the end does not matter, that it is gone does.
  auto left = run_command({"pgrep", "-f", log + ".end"}, {}, kPatienceMs);
  ASSERT_TRUE(left);
  EXPECT_NE(left->status, 0) << left->out;
}

TEST_F(Command, ChildWithoutInputReadsItsEndAtOnce) {
  auto c = Child::start({"sh", "-c", "read x; exit $?"}, {}, log);
  ASSERT_TRUE(c);
  ASSERT_TRUE(c->wait(kPatienceMs));
  EXPECT_EQ(c->status(), 1);
}

TEST_F(Command, FirstErrorOfCriuThatIsOne) {
  const std::string tun = "(00.630189) Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory\n";
  const std::string disk = "(00.640000) Error (criu/image.c:475): Unable to open fs-6.img: No space left on device";
  std::ofstream(log) << "(00.1) Running\n"
                     << tun << "(00.2) Warn  (criu/x.c:1)\n";
  EXPECT_EQ(criu_error(log), "");
  std::ofstream(log, std::ios::app) << disk << "\n(00.65) Error (criu/cr-dump.c:2053): Dumping FAILED.\n";
  EXPECT_EQ(criu_error(log), disk);
  const std::string plugin = "(00.361262) Error (migr): cannot create migr-files.img: No space left on device";
  std::ofstream(log) << tun << plugin << "\n(00.361413) Error (criu/cr-dump.c:1635): Dump files (pid: 288) failed with -1\n";
  EXPECT_EQ(criu_error(log), plugin);
}

TEST_F(Command, TheNewestFailuresAreKept) {
  const auto fail = [&](std::size_t i) {
    const std::string name = std::to_string(i) + "-dump.log";
    make_room_for_failure(folder, name);
    std::ofstream(failure_kept_in(folder, name)) << i;
    std::filesystem::last_write_time(failure_kept_in(folder, name), std::filesystem::file_time_type(std::chrono::seconds(i)));
  };
  for (std::size_t i = 1; i <= kFailuresKept + 2; i++) fail(i);
  fail(kFailuresKept + 2);  // once more
  const std::filesystem::directory_iterator all(folder + "/failed");
  EXPECT_EQ(static_cast<std::size_t>(std::distance(begin(all), end(all))), kFailuresKept);
  EXPECT_EQ(access(failure_kept_in(folder, "2-dump.log").c_str(), F_OK), -1);
  EXPECT_EQ(access(failure_kept_in(folder, "3-dump.log").c_str(), F_OK), 0);
}

}  // namespace
}  // namespace migr::command_test
