// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What the plugin makes sure of while tasks wait for COMMIT, with real tasks that are traced as CRIU does it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "said.h"

namespace {

/// What the test and its tasks share.
struct Shared {
  std::atomic<int> child, thread, zombie, grandchild, bound;
  std::atomic<std::uint64_t> turns, before;
};

class Held : public testing::Test {
 protected:
  Held() { shared_ = new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{}; }
  ~Held() override {
    for (const pid_t p : {shared_->grandchild.load(), shared_->child.load(), root_})
      if (p > 0) kill(p, SIGKILL);
    while (waitpid(-1, nullptr, __WALL) > 0) {}
    munmap(shared_, 4096);
  }

  /// A process with a second thread and a zombie; its child; the child's child.
  void start() {
    root_ = task([this] {
      shared_->zombie = task([] { _exit(0); });
      shared_->child = task([this] {
        shared_->grandchild = task([this] { turn(); });
        turn();
      });
      std::thread([this] { shared_->thread = static_cast<int>(gettid()), turn(); }).detach();
      turn();
    });
    await([this] { return shared_->zombie && shared_->child && shared_->grandchild && shared_->thread && shared_->turns > 100 && ended(shared_->zombie); });
  }
  /// It does not outlive who has made it.
  static pid_t task(const std::function<void()>& does) {
    const pid_t pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    does();
    _exit(1);
  }
  [[noreturn]] void turn() {
    for (;;) shared_->turns++, usleep(1000);
  }
  void hold() {
    for (const pid_t p : {root_, shared_->thread.load(), shared_->child.load(), shared_->grandchild.load()}) {
      if (ptrace(PTRACE_SEIZE, p, 0, 0) || ptrace(PTRACE_INTERRUPT, p, 0, 0) || waitpid(p, nullptr, __WALL) != p) _exit(1);
    }
  }
  void lose_tracer(bool while_bound) {
    start();
    const pid_t tracer = task([this, while_bound] {
      hold();
      shared_->before = shared_->turns.load();
      if (held_bind(root_, 1, &why_) || (!while_bound && held_bind(root_, 0, &why_))) return;
      shared_->bound = 1;
      for (;;) pause();
    });
    await([this] { return shared_->bound == 1; });
    kill(tracer, SIGKILL);
    ASSERT_EQ(waitpid(tracer, nullptr, 0), tracer);
  }
  static bool ended(pid_t pid) {
    char state[256] = "";
    FILE* f = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
    if (!f) return true;
    const std::size_t n = std::fread(state, 1, sizeof state - 1, f);
    std::fclose(f);
    const char* const at = n ? std::strrchr(state, ')') : nullptr;
    return !at || at[2] == 'Z' || at[2] == 'X';
  }
  static void await(const std::function<bool()>& what) {
    for (int i = 0; i < 2000 && !what(); i++) usleep(5'000);
    ASSERT_TRUE(what());
  }

  Shared* shared_;
  pid_t root_ = 0;
  migr_rst_err why_{};
};

TEST_F(Held, AllOfThemAreThere) {
  start();
  hold();
  EXPECT_EQ(held_bind(root_, 1, &why_), 0) << why_.text;
  EXPECT_EQ(held_bind(root_, 0, &why_), 0) << why_.text;
}

// CRIU would only notice when it lets go of them, and end all.
TEST_F(Held, OneThatHasEndedIsMissed) {
  start();
  hold();
  const pid_t gone = shared_->grandchild;
  kill(gone, SIGKILL);
  await([&] { return ended(gone); });
  for (const int bound : {1, 0}) {
    EXPECT_EQ(held_bind(root_, bound, &why_), ESRCH);
    EXPECT_EQ(std::string(why_.text), "restored process " + std::to_string(gone) + " waits no more: it has ended");
  }
}

// The tracer is a process of its own, which is killed.
TEST_F(Held, TheyEndWithTheirTracer) {
  lose_tracer(true);
  await([this] { return ended(root_) && ended(shared_->child) && ended(shared_->grandchild); });
  EXPECT_EQ(shared_->turns, shared_->before) << "one has run";
}

TEST_F(Held, OnceLetGoTheyRunOnWithoutIt) {
  lose_tracer(false);
  await([this] { return shared_->turns > shared_->before + 100; });
}

}  // namespace
