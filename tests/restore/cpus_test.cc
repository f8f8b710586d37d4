// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// On which processors threads may run, noted of real tasks and given back to them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "said.h"

namespace {

/// What the test and its task share: the task's second thread.
struct Shared {
  std::atomic<int> thread;
};

class Cpus : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/cpus_test.XXXXXX";
    path_ = mkdtemp(name);
    ASSERT_GE(dir_ = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), 0);
    ASSERT_EQ(sched_getaffinity(0, sizeof all_, &all_), 0);
    shared_ = new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
    said.clear();
    root_ = fork();
    if (!root_) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::thread([this] {
        shared_->thread = gettid();
        for (;;) pause();
      }).detach();
      for (;;) pause();
    }
    for (int i = 0; i < 2000 && !shared_->thread; i++) usleep(5'000);
    ASSERT_TRUE(shared_->thread);
  }
  void TearDown() override {
    if (root_ > 0) kill(root_, SIGKILL);
    waitpid(root_, nullptr, 0);
    munmap(shared_, 4096);
    close(dir_);
    unlink(file().c_str());
    rmdir(path_.c_str());
  }

  std::string file() const { return path_ + "/" MIGR_CPUS_NAME; }
  std::string noted() const {
    std::ifstream in(file());
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& lines) const { std::ofstream(file()) << lines; }
  std::string names(pid_t tid) const { return std::to_string(root_) + " " + std::to_string(tid) + " "; }
  /// The last processor that the test may use; also alone in a set.
  int last() const {
    int cpu = CPU_SETSIZE - 1;
    while (!CPU_ISSET(cpu, &all_)) cpu--;
    return cpu;
  }
  static cpu_set_t only(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return set;
  }
  static cpu_set_t of(pid_t tid) {
    cpu_set_t set;
    EXPECT_EQ(sched_getaffinity(tid, sizeof set, &set), 0);
    return set;
  }

  Shared* shared_;
  pid_t root_ = 0;
  int dir_ = -1;
  std::string path_;
  cpu_set_t all_;
};

TEST_F(Cpus, AThreadThatIsKeptToOneIsKeptToItAgainAndNoOther) {
  if (CPU_COUNT(&all_) < 2) GTEST_SKIP() << "one processor";
  const cpu_set_t one = only(last());
  ASSERT_EQ(sched_setaffinity(shared_->thread, sizeof one, &one), 0);
  ASSERT_EQ(cpus_note(root_, dir_), 0);
  EXPECT_NE(noted().find(names(shared_->thread) + std::to_string(last()) + "\n"), std::string::npos) << noted();
  ASSERT_EQ(sched_setaffinity(shared_->thread, sizeof all_, &all_), 0);
  cpus_give_back(root_, dir_);
  const cpu_set_t now = of(shared_->thread), first = of(root_);
  EXPECT_TRUE(CPU_EQUAL(&now, &one)) << said;
  EXPECT_TRUE(CPU_EQUAL(&first, &all_)) << said;
}

TEST_F(Cpus, OfAThreadThatIsKeptToNoneNothingIsNoted) {
  cpu_set_t host;
  CPU_ZERO(&host);
  for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN); i++) CPU_SET(static_cast<std::size_t>(i), &host);
  if (!CPU_EQUAL(&all_, &host)) GTEST_SKIP() << "the test itself is kept to some";
  ASSERT_EQ(cpus_note(root_, dir_), 0);
  EXPECT_EQ(noted(), "");
}

TEST_F(Cpus, OfSeveralItGetsThoseThatAreHere) {
  write(names(shared_->thread) + std::to_string(last()) + ",1000-1023\n");
  cpus_give_back(root_, dir_);
  const cpu_set_t now = of(shared_->thread), one = only(last());
  EXPECT_TRUE(CPU_EQUAL(&now, &one)) << said;
}

TEST_F(Cpus, WhatIsNotHereIsSaidAndLeavesAll) {
  write(names(shared_->thread) + "1023\n");
  cpus_give_back(root_, dir_);
  const cpu_set_t now = of(shared_->thread);
  EXPECT_TRUE(CPU_EQUAL(&now, &all_));
  EXPECT_NE(said.find("thread " + std::to_string(shared_->thread) + " of process " + std::to_string(root_) + " was kept to processors 1023, and may run on all: this host"),
            said.npos)
      << said;
}

TEST_F(Cpus, WhatCannotBeReadOrIsNobodysIsLeftOut) {
  const std::string mine = names(shared_->thread);
  for (const std::string& line : {mine, mine + "x", mine + "1-", mine + "1x", mine + "3-2", mine + "1024", mine + "-1", mine + "99999999999999999999", std::string("1"), std::string()}) {
    said.clear();
    write(line + "\n");
    cpus_give_back(root_, dir_);
    EXPECT_NE(said.find("cannot be read"), said.npos) << line;
  }
  write(std::to_string(root_) + " 999999999 0\n");
  cpus_give_back(root_, dir_);
  EXPECT_NE(said.find("thread 999999999"), said.npos) << said;
  unlink(file().c_str());
  said.clear();
  cpus_give_back(root_, dir_);
  EXPECT_EQ(said, "");
}

}  // namespace
