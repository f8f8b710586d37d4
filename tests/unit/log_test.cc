// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "agent/log.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <regex>
#include <string>
#include <thread>

#include "agent/detached_threads.h"
#include "agent/lease.h"
#include "agent/parallel.h"

namespace {
std::atomic<bool> no_more_threads = false;
}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attr, void* (*start)(void*), void* arg) noexcept {
  static const auto next = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return no_more_threads ? EAGAIN : next(thread, attr, start, arg);
}

namespace migr::log_test {
namespace {

void each_level() {
  spdlog::debug("what {}", 1);
  spdlog::info("what {}", 2);
  spdlog::warn("what {}", 3);
  spdlog::error("what {}", 4);
  spdlog::critical("what {}", 5);
}

/// What a process logs to standard error, which is a pipe; `journal`: JOURNAL_STREAM says that this is the journal.
std::string logged(bool journal, bool verbose, const std::function<void()>& say = each_level) {
  int p[2];
  EXPECT_EQ(pipe(p), 0);
  const pid_t child = fork();
  if (child == 0) {
    struct stat st;
    if (fstat(p[1], &st) || dup2(p[1], STDERR_FILENO) < 0) _exit(1);
    setenv("JOURNAL_STREAM", (std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino + (journal ? 0 : 1))).c_str(), 1);
    log_to_stderr("name", verbose);
    say();
    _exit(0);
  }
  close(p[1]);
  std::string said;
  char buf[256];
  for (ssize_t n; (n = read(p[0], buf, sizeof buf)) > 0;) said.append(buf, static_cast<std::size_t>(n));
  close(p[0]);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return said;
}

TEST(Log, GivesTheJournalItsLevelsAndNoTime) {
  const std::string said = "<6>level=info msg=\"what 2\"\n<4>level=warning msg=\"what 3\"\n<3>level=error msg=\"what 4\"\n<2>level=critical msg=\"what 5\"\n";
  EXPECT_EQ(logged(true, false), said);
  EXPECT_EQ(logged(true, true), "<7>level=debug msg=\"what 1\"\n" + said);
}

TEST(Log, HasATimeElsewhere) {
  const std::string said = logged(false, false);
  const std::regex line("time=20\\d\\d-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d\\d\\dZ level=warning msg=\"what 3\"");
  EXPECT_TRUE(std::regex_search(said, line)) << said;
  EXPECT_TRUE(said.starts_with("time=20")) << said;
}

TEST(Log, ALineSaysWhatItBelongsTo) {
  EXPECT_EQ(logged(true, false,
                   [] {
                     set_log_host("src");
                     spdlog::info("before");
                     {
                       LogScope log(0xa1b2c3d);
                       spdlog::info("begins");
                       {
                         LogScope phase;
                         phase->peer = "dst", phase->phase = "source.drain", phase->ms = 12.34;
                         spdlog::info("done");
                       }
                       spdlog::info("ends");
                     }
                     spdlog::info("after");
                   }),
            "<6>level=info host=src msg=\"before\"\n"
            "<6>level=info host=src migration=0a1b2c3d msg=\"begins\"\n"
            "<6>level=info host=src migration=0a1b2c3d peer=dst phase=source.drain ms=12.3 msg=\"done\"\n"
            "<6>level=info host=src migration=0a1b2c3d msg=\"ends\"\n"
            "<6>level=info host=src msg=\"after\"\n");
}

TEST(Log, WhatOthersHaveNamedBeginsNoLineAndNoField) {
  EXPECT_EQ(logged(true, false,
                   [] {
                     LogScope log;
                     log->peer = "a b=\"c\"";
                     spdlog::info("{}", "one\n<0>two\t\x1b[1m \\ \"quoted\" \xc3\xa9");
                   }),
            "<6>level=info peer=\"a b=\\\"c\\\"\" msg=\"one\\n<0>two\\t\\u001b[1m \\\\ \\\"quoted\\\" \xc3\xa9\"\n");
}

TEST(Log, ThreadsThatWorkForAMigrationHaveItsNumber) {
  const auto said = logged(true, false, [] {
    const LogScope log(7);
    (void)parallel({[] { return spdlog::info("one"), Status(); }, [] { return spdlog::info("two"), Status(); }, [] { return spdlog::info("three"), Status(); }});
    std::thread(with_log_fields([] { spdlog::info("four"); })).join();
    std::thread([] { spdlog::info("of none"); }).join();
  });
  for (const char* word : {"one", "two", "three", "four"}) EXPECT_NE(said.find("migration=00000007 msg=\"" + std::string(word)), std::string::npos) << said;
  EXPECT_NE(said.find("level=info msg=\"of none"), std::string::npos) << said;
}

TEST(Threads, WhatGetsNoneIsDoneByWhoWaitsForIt) {
  std::vector<std::thread::id> by(3);
  std::vector<std::function<Status()>> todo;
  for (auto& one : by) todo.push_back([&one] { return one = std::this_thread::get_id(), Status(Error{EIO, "of all"}); });
  no_more_threads = true;
  const Status s = parallel(todo);
  no_more_threads = false;
  EXPECT_FALSE(s);
  EXPECT_EQ(by, std::vector(3, std::this_thread::get_id()));
}

TEST(Threads, NobodyWaitsForOneThatDidNotStart) {
  DetachedThreads threads;
  std::atomic<int> done = 0;
  no_more_threads = true;
  EXPECT_FALSE(threads.start([&] { done++; }));
  no_more_threads = false;
  EXPECT_TRUE(threads.start([&] { done++; }));
  EXPECT_TRUE(threads.end());
  EXPECT_EQ(done, 1);
  EXPECT_FALSE(threads.start([&] { done++; })) << "they are to end";
}

// Whoever asks for it holds what it would wait for.
TEST(Threads, WhatIsLeftToDoIsDoneWhenThereIsOne) {
  std::mutex work;
  std::atomic<int> done = 0;
  Afterwards afterwards;
  const auto run = [&] {
    std::lock_guard lock(work);
    afterwards.run([&] {
      std::lock_guard its(work);
      done++;
    });
  };
  no_more_threads = true;
  run();
  afterwards.again();
  no_more_threads = false;
  EXPECT_TRUE(afterwards.waits());
  EXPECT_EQ(done, 0);
  run();
  EXPECT_TRUE(afterwards.waits()) << "once";
  afterwards.again();
  EXPECT_FALSE(afterwards.waits());
  afterwards.end();
  EXPECT_EQ(done, 1);
}

}  // namespace
}  // namespace migr::log_test
