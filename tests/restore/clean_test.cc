// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The plugin takes the mark "written" from memory that a stopped task has registered. The task is real, a child of the test that is
// traced as CRIU does it, and notices nothing. That the marks go, and of pinned memory, is seen in a VM: tests/e2e/memory_test.sh.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "said.h"

namespace {

constexpr std::size_t kPage = 4096, kBytes = 64 * kPage;

struct Shared {
  std::atomic<std::uint64_t> turns;
  std::atomic<int> signals, got;
};

/// fork() gives the task the same addresses.
class Clean : public testing::Test {
 protected:
  Clean() {
    shared_ = new (map(MAP_SHARED, PROT_READ | PROT_WRITE, kPage)) Shared{};
    private_ = map(MAP_PRIVATE, PROT_READ | PROT_WRITE, kBytes);
    ours_ = map(MAP_SHARED, PROT_READ | PROT_WRITE, kBytes);
    said.clear();
    EXPECT_EQ(pipe(pipe_), 0);
  }
  ~Clean() override {
    if (task_ > 0) kill(task_, SIGKILL);
    while (waitpid(-1, nullptr, __WALL) > 0) {}
    for (const int fd : pipe_) close(fd);
    munmap(shared_, kPage);
    munmap(private_, kBytes);
    munmap(ours_, kBytes);
  }
  static char* map(int kind, int prot, std::size_t bytes) {
    void* p = mmap(nullptr, bytes, prot, kind | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(p, MAP_FAILED);
    return static_cast<char*>(p);
  }

  /// @param life  for ever; writes to memory
  void start(const std::function<void()>& life) {
    task_ = fork();
    if (!task_) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      static Shared* s;
      s = shared_;
      signal(SIGUSR1, [](int) { s->signals++; });
      life();
      _exit(1);
    }
    await([&] { return shared_->turns > 0; });
    ASSERT_EQ(ptrace(PTRACE_SEIZE, task_, 0, 0), 0) << strerror(errno);
    ASSERT_EQ(ptrace(PTRACE_INTERRUPT, task_, 0, 0), 0);
    ASSERT_EQ(waitpid(task_, nullptr, __WALL), task_);
    image_.reset(migr_rst_image_new());
    process_ = migr_rst_process_new(static_cast<std::uint32_t>(task_));
    ASSERT_EQ(migr_rst_image_add(image_.get(), process_), 0);
    ASSERT_NE(migr_rst_add_context(process_), nullptr);
  }
  void start() {
    start([this] {
      for (;; ++shared_->turns)
        for (std::size_t at = 0; at < kBytes; at += kPage) ++private_[at];
    });
  }
  void registers(const void* at, std::size_t bytes, std::uint32_t flags = 0) {
    migr_rst_mr* const mr = migr_rst_add_mr(&process_->contexts[0]);
    mr->rec.start = reinterpret_cast<std::uintptr_t>(at);
    mr->rec.length = bytes;
    mr->rec.flags = flags;
  }
  std::string maps() const {
    std::ostringstream out;
    out << std::ifstream("/proc/" + std::to_string(task_) + "/maps").rdbuf();
    return out.str();
  }
  user_regs_struct regs() const {
    user_regs_struct r{};
    iovec v{&r, sizeof r};
    EXPECT_EQ(ptrace(static_cast<__ptrace_request>(PTRACE_GETREGSET), task_, 1, &v), 0);
    return r;
  }
  /// It has what it had, and nobody has run it but the plugin.
  void clean(const std::string& tells) {
    kill(task_, SIGUSR1);
    const std::string before = maps();
    const auto had = regs();
    EXPECT_EQ(clean_registered(image_.get()), 0) << said;
    EXPECT_NE(said.find(tells), std::string::npos) << said;
    EXPECT_EQ(maps(), before);
    const auto has = regs();
    EXPECT_EQ(std::memcmp(&had, &has, sizeof has), 0);
    EXPECT_EQ(shared_->signals, 0);
  }
  void expect_goes_on() {
    const std::uint64_t before = shared_->turns;
    ASSERT_EQ(ptrace(PTRACE_DETACH, task_, 0, 0), 0);
    await([&] { return shared_->turns > before + 10 && shared_->signals == 1; });
  }
  static void await(const std::function<bool()>& done) {
    for (int ms = 0; !done() && ms < 60'000; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(done());
  }
  static std::string kb(std::size_t bytes) { return std::to_string(bytes >> 10) + " KB of registered memory of pid "; }

  Shared* shared_;
  char *private_, *ours_;
  int pipe_[2];
  pid_t task_ = -1;
  std::unique_ptr<migr_rst_image, void (*)(migr_rst_image*)> image_{nullptr, migr_rst_image_free};
  migr_rst_process* process_ = nullptr;
};

TEST_F(Clean, TheTaskGoesOnWritingToIt) {
  start();
  registers(private_, kBytes);
  clean(kb(kBytes));
  expect_goes_on();
}

TEST_F(Clean, WholePagesOfAllMrsAreMeantOnce) {
  start();
  registers(private_ + kPage + 1, 1);
  registers(private_ + 3 * kPage - 1, 2);      // two pages
  registers(private_ + 3 * kPage, kPage + 1);  // one of those, and another
  registers(private_ + 8 * kPage, 0);
  registers(nullptr, kPage, MIGR_MR_DM);
  clean(kb(4 * kPage));
  expect_goes_on();
}

TEST_F(Clean, MemoryOfOtherKindsStaysAsItIs) {
  mprotect(private_ + 8 * kPage, 8 * kPage, PROT_READ);
  munmap(private_ + 32 * kPage, 8 * kPage);
  start([this] {
    for (;; ++shared_->turns)
      for (std::size_t at = 0; at < 8 * kPage; at += kPage) ++private_[at], ++ours_[at], ++private_[at + 40 * kPage];
  });
  registers(private_, kBytes);
  registers(ours_, kBytes);
  clean(kb(kBytes - 16 * kPage));
  expect_goes_on();
}

TEST_F(Clean, ACallThatItWasInGoesOn) {
  start([this] {
    ++shared_->turns;
    for (char c; read(pipe_[0], &c, 1) == 1; ++shared_->turns) shared_->got = c, ++private_[0];
    shared_->got = -1;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  registers(private_, kBytes);
  clean(kb(kBytes));
  ASSERT_EQ(ptrace(PTRACE_DETACH, task_, 0, 0), 0);
  await([&] { return shared_->signals == 1; });
  ASSERT_EQ(write(pipe_[1], "x", 1), 1);
  await([&] { return shared_->got != 0; });
  EXPECT_EQ(shared_->got, 'x') << "the call did not go on";
}

TEST_F(Clean, OfManyTheLargest) {
  constexpr unsigned kMany = 1500;
  char* const many = map(MAP_PRIVATE, PROT_READ | PROT_WRITE, 4 * kMany * kPage);
  start();
  for (unsigned i = 0; i < kMany; ++i) registers(many + 4 * i * kPage, i % 3 ? kPage : 2 * kPage);
  clean(kb((1024 + kMany / 3) * kPage));
  expect_goes_on();
  munmap(many, 4 * kMany * kPage);
}

TEST_F(Clean, WhatCannotBeProtectedStaysAsItIs) {
  start([this] {
    const auto last = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(private_ + 32 * kPage));
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, last, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof filter / sizeof *filter, filter};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return;
    for (;; ++shared_->turns)
      for (std::size_t at = 0; at < kBytes; at += kPage) ++private_[at];
  });
  registers(private_, kPage);
  registers(private_ + 32 * kPage, kPage);
  clean(kb(kPage));
  expect_goes_on();
}

TEST_F(Clean, WhoCannotBeAskedIsLeftAlone) {
  start([this] {
    signal(SIGTRAP, SIG_IGN);
    for (;; ++shared_->turns) ++private_[0];
  });
  registers(private_, kBytes);
  clean("is dumped whole: it ignores SIGTRAP");
  expect_goes_on();
}

TEST_F(Clean, LockedMemoryWouldBeWrittenTo) {
  start([this] {
    mlock(ours_, kPage);
    for (;; ++shared_->turns) ++private_[0];
  });
  registers(private_, kBytes);
  clean("is dumped whole: it has locked memory");
  expect_goes_on();
}

TEST_F(Clean, WhatIsMoreThanTheLimitCouldNotBeMadeWritableAgain) {
  start([this] {
    const rlimit none{kPage, kPage};
    setrlimit(RLIMIT_DATA, &none);
    for (;; ++shared_->turns) ++private_[0];
  });
  registers(private_, kBytes);
  clean("is dumped whole: it has lowered RLIMIT_DATA");
  expect_goes_on();
}

TEST_F(Clean, ATaskThatHasDiedIsNoHarm) {
  start();
  registers(private_, kBytes);
  kill(task_, SIGKILL);
  waitpid(task_, nullptr, __WALL);
  EXPECT_EQ(clean_registered(image_.get()), 0) << said;
  EXPECT_NE(said.find("is dumped whole"), std::string::npos) << said;
}

}  // namespace
