// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which memory a forked process finds empty, noted of a real task and given back to it. It is a child of the test that is traced as CRIU
// does it: it stands at the end of a system call. What it forks then says itself what it finds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "said.h"

namespace {

constexpr std::size_t kPage = 4096, kPages = 5;
constexpr int kFirst = 1, kOther = 3;  // of the pages, those that are to be wiped

/// What the test and its task share.
struct Shared {
  std::atomic<int> ready, go, found, other;  // found: a bit for each page that a forked process finds as it was
};

class Wiped : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/wiped_test.XXXXXX";
    path_ = mkdtemp(name);
    ASSERT_GE(dir_ = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), 0);
    shared_ = new (mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
    memory_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(memory_, MAP_FAILED);
    said.clear();
  }
  void TearDown() override {
    if (root_ > 0) kill(root_, SIGKILL);
    if (shared_->other) kill(shared_->other, SIGKILL);
    while (waitpid(-1, nullptr, __WALL) > 0) {}
    munmap(memory_, kPages * kPage);
    munmap(shared_, kPage);
    close(dir_);
    unlink(file().c_str());
    rmdir(path_.c_str());
  }

  static void await(const std::function<bool()>& done) {
    for (int i = 0; i < 4000 && !done(); i++) usleep(5'000);
    ASSERT_TRUE(done());
  }
  /// @param advised  its pages are to be wiped. @param first  what else it does at its beginning
  void start(
      bool advised, const std::function<void()>& first = [] {}) {
    root_ = fork();
    if (!root_) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::memset(memory_, 'x', kPages * kPage);
      for (const int i : {kFirst, kOther})
        if (advised && madvise(page(i), kPage, MADV_WIPEONFORK)) _exit(1);
      first();
      shared_->ready = 1;
      while (!shared_->go) usleep(1'000);
      if (const pid_t forked = fork()) {
        waitpid(forked, nullptr, 0);
        shared_->ready = 2;
        for (;;) pause();
      }
      int found = 0;
      for (int i = 0; i < static_cast<int>(kPages); i++) found |= *page(i) ? 1 << i : 0;
      shared_->found = found;
      _exit(0);
    }
    await([&] { return shared_->ready == 1; });
  }
  /// At the end of a system call.
  void stop() {
    ASSERT_EQ(ptrace(PTRACE_SEIZE, root_, 0, PTRACE_O_TRACESYSGOOD), 0) << strerror(errno);
    ASSERT_EQ(ptrace(PTRACE_INTERRUPT, root_, 0, 0), 0);
    ASSERT_EQ(waitpid(root_, nullptr, __WALL), root_);
    for (int at = 0; at < 2;) {  // its beginning, its end
      ASSERT_EQ(ptrace(PTRACE_SYSCALL, root_, 0, 0), 0);
      int status = 0;
      ASSERT_EQ(waitpid(root_, &status, __WALL), root_);
      ASSERT_TRUE(WIFSTOPPED(status));
      at += WSTOPSIG(status) == (SIGTRAP | 0x80);
    }
  }
  user_regs_struct regs() const {
    user_regs_struct r{};
    iovec v{&r, sizeof r};
    EXPECT_EQ(ptrace(static_cast<__ptrace_request>(PTRACE_GETREGSET), root_, 1, &v), 0);
    return r;
  }
  /// The task has what it had.
  void give_back() {
    migr_rst_err err{};
    const auto had = regs();
    EXPECT_EQ(wiped_give_back(root_, dir_, &err), 0) << err.text;
    const auto has = regs();
    EXPECT_EQ(std::memcmp(&had, &has, sizeof has), 0);
  }
  /// Which pages a process that it forks finds as they were.
  int forked() {
    EXPECT_EQ(ptrace(PTRACE_DETACH, root_, 0, 0), 0) << strerror(errno);
    shared_->go = 1;
    await([&] { return shared_->ready == 2; });
    return shared_->found;
  }

  char* page(int i) const { return memory_ + static_cast<std::size_t>(i) * kPage; }
  std::string file() const { return path_ + "/" MIGR_RST_WIPED_NAME; }
  std::string noted() const {
    std::ifstream in(file());
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& lines) const { std::ofstream(file()) << lines; }
  std::string line(pid_t pid, int i) const {
    char text[64];
    const auto at = reinterpret_cast<std::uintptr_t>(page(i));
    std::snprintf(text, sizeof text, "%d %zx %zx\n", pid, static_cast<std::size_t>(at), static_cast<std::size_t>(at) + kPage);
    return text;
  }

  static constexpr int kAll = (1 << kPages) - 1, kRest = kAll & ~(1 << kFirst | 1 << kOther);
  Shared* shared_;
  char* memory_;
  pid_t root_ = 0;
  int dir_ = -1;
  std::string path_;
};

TEST_F(Wiped, WhatIsNotedOfOneIsWipedInWhatAnotherForks) {
  write("");
  start(true);
  ASSERT_EQ(wiped_note(root_, dir_), 0);
  for (const int i : {kFirst, kOther}) EXPECT_NE(noted().find(line(root_, i)), std::string::npos) << noted();
  EXPECT_EQ(noted().find(line(root_, 2)), std::string::npos) << noted();
  kill(root_, SIGKILL);
  ASSERT_EQ(waitpid(root_, nullptr, 0), root_);
  shared_->ready = 0;
  start(false);
  write(line(root_, kFirst) + line(root_, kOther));
  stop();
  give_back();
  EXPECT_NE(said.find("2 mappings of process " + std::to_string(root_) + " are wiped in what it forks, 0 are not"), said.npos) << said;
  EXPECT_EQ(forked(), kRest) << said;
}

TEST_F(Wiped, WithoutItEachForkedProcessHasAll) {
  start(false);
  stop();
  give_back();
  EXPECT_EQ(said, "");
  EXPECT_EQ(forked(), kAll);
}

TEST_F(Wiped, NothingIsNotedWhereNobodyHasAskedForIt) {
  start(true);
  ASSERT_EQ(wiped_note(root_, dir_), 0);
  EXPECT_NE(access(file().c_str(), F_OK), 0);
}

TEST_F(Wiped, OfAllOfTheTreeItIsNotedAndAgain) {
  write("of another dump, which has failed, and longer than what is to come is, if there is not much else in it than those four lines\n");
  start(true, [this] {
    const pid_t other = fork();
    if (!other) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
    shared_->other = other;
    if (!fork()) _exit(0);  // stays, as a zombie, that has no memory
    usleep(20'000);
  });
  ASSERT_EQ(wiped_note(root_, dir_), 0);
  for (const pid_t pid : {root_, shared_->other.load()})
    for (const int i : {kFirst, kOther}) EXPECT_NE(noted().find(line(pid, i)), std::string::npos) << noted();
  EXPECT_EQ(noted().find("of another"), std::string::npos);
}

TEST_F(Wiped, WhatCannotBeIsSaidAndTheRestIsGiven) {
  start(false);
  stop();
  const auto shared = reinterpret_cast<std::uintptr_t>(shared_);
  char refused[64];
  std::snprintf(refused, sizeof refused, "%d %zx %zx\n", root_, static_cast<std::size_t>(shared), static_cast<std::size_t>(shared) + kPage);
  write("nonsense\n1\n-1 1000 2000\n" + line(root_, kFirst).replace(0, 0, "x") + std::to_string(root_) + " 2000 1000\n" + refused + line(root_, kFirst) + line(999999999, 0) + line(root_, kOther));
  give_back();
  EXPECT_NE(said.find("cannot be read"), said.npos) << said;
  EXPECT_NE(said.find("1 mappings of process " + std::to_string(root_) + " are wiped in what it forks, 1 are not"), said.npos) << said;
  EXPECT_NE(said.find("what process 999999999 forks has all of its memory"), said.npos) << said;
  EXPECT_EQ(forked(), kRest) << said;
}

TEST_F(Wiped, OneThatIgnoresSigtrapIsLeftAsItIs) {
  start(false, [] { signal(SIGTRAP, SIG_IGN); });
  stop();
  write(line(root_, kFirst));
  give_back();
  EXPECT_NE(said.find("it ignores SIGTRAP"), said.npos) << said;
  EXPECT_EQ(forked(), kAll);
}

}  // namespace
