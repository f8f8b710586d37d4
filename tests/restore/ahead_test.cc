// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The plugin has a stopped task register its memory. The task is real, a child of the test that is traced as CRIU does it;
// uverbs is a double: the task's ioctls come to the test (seccomp's user notification), which answers as the kernel would.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "migr/ahead.h"
#include "said.h"

asm(".pushsection .text\n"
    "ahead_test_code:\n" MIGR_AHEAD_CODE
    ".popsection\n");
extern "C" unsigned char ahead_test_code[];

namespace {

constexpr int kFirstFd = 700, kSecondFd = 701;
constexpr std::uint32_t kOldPd = 3, kNewPd = 30;  // of the first context; the second's are one more
constexpr int kWishes = IB_UVERBS_ACCESS_RELAXED_ORDERING;

/// What test and task share, and the task's copy of what libmigr has: fork() gives the same addresses.
struct Shared {
  std::atomic<int> listener;
  std::atomic<std::uint64_t> turns;
  std::atomic<int> signals, broken, below;
};
Shared* shared;
migr_ahead header;
migr_ahead_mr commands[4];

struct [[gnu::aligned(32)]] Section {  // struct rseq_cs
  std::uint32_t version, flags;
  std::uint64_t start_ip, bytes, abort_ip;
};
Section section;
std::uint32_t abort_code[2] = {RSEQ_SIG, 0};  // the signature stands before where a section is aborted to

std::uint64_t rseq_cs_at() { return reinterpret_cast<std::uintptr_t>(__builtin_thread_pointer()) + __rseq_offset + 8; }

/// Holds values in registers for ever and counts; says when one is another.
[[noreturn]] void turn() {
  for (;;) {
    std::uint64_t wrong = 0;
    asm volatile(
        "mov $0x1111, %%rbx\n mov $0x2222, %%r12\n mov $0x3333, %%r13\n mov $0x4444, %%r14\n mov $0x5555, %%rsi\n"
        "movq %%r14, %%xmm7\n"
        "mov $100000, %%ecx\n"
        "1: lock incq (%1)\n pause\n dec %%ecx\n jnz 1b\n"
        "cmp $0x1111, %%rbx\n jne 2f\n cmp $0x2222, %%r12\n jne 2f\n cmp $0x3333, %%r13\n jne 2f\n"
        "cmp $0x4444, %%r14\n jne 2f\n cmp $0x5555, %%rsi\n jne 2f\n movq %%xmm7, %%r13\n cmp $0x4444, %%r13\n je 3f\n"
        "2: mov $1, %0\n3:\n"
        : "+r"(wrong)
        : "r"(&shared->turns)
        : "rbx", "rcx", "rsi", "r12", "r13", "r14", "xmm7", "memory", "cc");
    if (wrong) shared->broken = 1;
  }
}

void listen() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RDMA_VERBS_IOCTL, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof filter / sizeof *filter, filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  shared->listener = static_cast<int>(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program));
}

class Ahead : public testing::Test {
 protected:
  Ahead() {
    shared = new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
    shared->listener = -1;
    said.clear();
    header = {MIGR_AHEAD_MAGIC, MIGR_AHEAD_VERSION, {7, 7, 7}, reinterpret_cast<std::uintptr_t>(ahead_test_code), reinterpret_cast<std::uintptr_t>(commands), 3, sizeof *commands};
    for (int i = 0; i < 3; i++) {
      commands[i] = {};
      commands[i].fd = i == 2 ? kSecondFd : kFirstFd;
      commands[i].status = MIGR_AHEAD_OPEN;
      commands[i].in.length = 4096u * static_cast<unsigned>(i + 1);
      commands[i].in.pd_handle = i == 2 ? kOldPd + 1 : kOldPd;
      commands[i].in.access_flags = 1;
      commands[i].vlkey = 0x500u + static_cast<unsigned>(i);
    }
  }
  ~Ahead() override {
    over_ = true;
    if (task_ > 0) kill(task_, SIGKILL);
    if (root_ != task_) kill(root_, SIGKILL);
    while (waitpid(-1, nullptr, __WALL) > 0) {}
    if (kernel_.joinable()) kernel_.join();
    munmap(shared, 4096);
  }

  /// The task, stopped. @param below it is a child of the tree's root, which has the same memory
  void start(bool below = false) {
    root_ = fork();
    if (!root_) {
      if (!below) run_task();
      const pid_t child = fork();
      if (!child) run_task();
      shared->below = child;
      for (;;) pause();
    }
    await([&] { return shared->turns > 0 && shared->listener >= 0 && (!below || shared->below); });
    task_ = below ? shared->below.load() : root_;
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, task_, 0));
    listener_ = static_cast<int>(syscall(SYS_pidfd_getfd, pidfd, shared->listener.load(), 0));
    close(pidfd);
    ASSERT_GE(listener_, 0) << strerror(errno);
    kernel_ = std::thread([this] { be_the_kernel(); });
    ASSERT_EQ(ptrace(PTRACE_SEIZE, task_, 0, 0), 0) << strerror(errno);
    stop();
    build_image();
  }
  static void run_task() {
    // Asked of the test, which is no parent of it: it must not outlive it.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGUSR1, [](int) { shared->signals++; });
    if (before_) before_();
    listen();
    turn();
  }
  void stop() {
    ASSERT_EQ(ptrace(PTRACE_INTERRUPT, task_, 0, 0), 0);
    ASSERT_EQ(waitpid(task_, nullptr, __WALL), task_);
  }
  void build_image() {
    image_.reset(migr_rst_image_new());
    migr_rst_process* p = migr_rst_process_new(static_cast<std::uint32_t>(task_));
    process_ = p;
    migr_fd_desc fds[3] = {};
    for (unsigned i = 0; i < 2; i++) {
      migr_rst_context* c = migr_rst_add_context(p);
      c->rec.ctx_id = 10 + i;
      for (unsigned k = 0; k < 2; k++) {
        migr_rst_pd* pd = migr_rst_add_pd(c);
        pd->rec.handle = k ? kOldPd + i : 99;
        pd->new_handle = k ? kNewPd + i : 98;
      }
      fds[i].kind = MIGR_FD_CONTEXT;
      fds[i].fd = fds[i].context_fd = i ? kSecondFd : kFirstFd;
      fds[i].ctx_id = 10 + i;
    }
    fds[2].kind = MIGR_FD_AHEAD;
    fds[2].fd = -1;
    fds[2].addr = reinterpret_cast<std::uintptr_t>(&header);
    fds[2].bytes = sizeof header;
    ASSERT_EQ(migr_rst_process_describe(p, fds, 3, header.instance), 0);
    ASSERT_EQ(migr_rst_image_add(image_.get(), p), 0);
  }

  int go(long limit_ms = 20'000) { return ahead_register(image_.get(), root_, limit_ms, &why_); }

  /// What the task's memory says now.
  std::vector<migr_ahead_mr> theirs() {
    std::vector<migr_ahead_mr> out(3);
    peek(reinterpret_cast<std::uintptr_t>(commands), out.data(), sizeof(migr_ahead_mr) * 3);
    return out;
  }
  void peek(std::uint64_t at, void* to, std::size_t n) {
    iovec here{to, n}, there{reinterpret_cast<void*>(at), n};
    EXPECT_EQ(process_vm_readv(task_, &here, 1, &there, 1, 0), static_cast<ssize_t>(n));
  }
  void poke(std::uint64_t at, const void* from, std::size_t n) {
    iovec here{const_cast<void*>(from), n}, there{reinterpret_cast<void*>(at), n};
    EXPECT_EQ(process_vm_writev(task_, &here, 1, &there, 1, 0), static_cast<ssize_t>(n));
  }
  /// It goes on, and is as it was.
  void expect_goes_on() {
    const std::uint64_t before = shared->turns;
    ASSERT_EQ(ptrace(PTRACE_DETACH, task_, 0, 0), 0);
    await([&] { return shared->turns > before + 400'000; });
    EXPECT_FALSE(shared->broken) << "a register is another";
  }
  static void await(const std::function<bool()>& done) {
    for (int ms = 0; !done() && ms < 60'000; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(done());
  }

  /// Answers to REG_MR by length. @return errno
  std::function<int(const migr_ahead_mr&)> answer_ = [](const migr_ahead_mr&) { return 0; };
  std::atomic<int> asked_{0};
  std::atomic<bool> silent_{false};
  pid_t root_ = -1, task_ = -1;
  std::unique_ptr<migr_rst_image, void (*)(migr_rst_image*)> image_{nullptr, migr_rst_image_free};
  migr_rst_process* process_ = nullptr;
  migr_rst_err why_{};
  static inline void (*before_)() = nullptr;

 private:
  void be_the_kernel() {
    while (!over_) {
      pollfd p{listener_, POLLIN, 0};
      if (poll(&p, 1, 50) <= 0) continue;
      if (p.revents & POLLHUP) break;
      seccomp_notif ask{};
      if (ioctl(listener_, SECCOMP_IOCTL_NOTIF_RECV, &ask)) continue;
      asked_++;
      while (silent_ && !over_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::uint64_t at = ask.data.args[2] - offsetof(migr_ahead_mr, cmd);
      migr_ahead_mr mr{};
      iovec here{&mr, sizeof mr}, there{reinterpret_cast<void*>(at), sizeof mr};
      int error = process_vm_readv(static_cast<pid_t>(ask.pid), &here, 1, &there, 1, 0) == sizeof mr ? answer_(mr) : EFAULT;
      if (static_cast<int>(ask.data.args[0]) != mr.fd) error = EBADF;
      mr.out = {static_cast<std::uint32_t>(mr.in.length), mr.in.pd_handle, mr.in.access_flags};
      if (!error && process_vm_writev(static_cast<pid_t>(ask.pid), &here, 1, &there, 1, 0) != sizeof mr) error = EFAULT;
      seccomp_notif_resp answer{};
      answer.id = ask.id;
      answer.error = -error;
      ioctl(listener_, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
    close(listener_);
  }

  int listener_ = -1;
  std::atomic<bool> over_{false};
  std::thread kernel_;
};

user_regs_struct regs_of(pid_t pid) {
  user_regs_struct r{};
  iovec v{&r, sizeof r};
  EXPECT_EQ(ptrace(static_cast<__ptrace_request>(PTRACE_GETREGSET), pid, 1, &v), 0);
  return r;
}
std::uint64_t mask_of(pid_t pid) {
  std::uint64_t m = 0;
  EXPECT_EQ(ptrace(static_cast<__ptrace_request>(PTRACE_GETSIGMASK), pid, 8, &m), 0);
  return m;
}

TEST_F(Ahead, AllMrsOfAllContextsGetTheNewPds) {
  start();
  ASSERT_EQ(go(), 0) << why_.text << said;
  const auto mrs = theirs();
  for (int i = 0; i < 3; i++) {
    EXPECT_EQ(mrs[i].status, 0) << i;
    EXPECT_EQ(mrs[i].out.mr_handle, 4096u * (i + 1)) << i;
    EXPECT_EQ(mrs[i].out.lkey, i == 2 ? kNewPd + 1 : kNewPd) << i;
  }
  EXPECT_EQ(asked_, 3);
  EXPECT_NE(said.find("registered 3 MRs"), std::string::npos) << said;
  expect_goes_on();
}

TEST_F(Ahead, TheTaskNoticesNothing) {
  before_ = [] {
    sigset_t some;
    sigemptyset(&some);
    sigaddset(&some, SIGTRAP);
    sigaddset(&some, SIGHUP);
    sigprocmask(SIG_SETMASK, &some, nullptr);
  };
  start();
  before_ = nullptr;
  if (__rseq_size) {  // as if it stood in a section that names no code of ours
    section.start_ip = 0x1000;
    section.bytes = 16;
    section.abort_ip = reinterpret_cast<std::uintptr_t>(&abort_code[1]);
    const std::uint64_t at = reinterpret_cast<std::uintptr_t>(&section);
    poke(at, &section, sizeof section);
    poke(reinterpret_cast<std::uintptr_t>(abort_code), abort_code, sizeof abort_code);
    poke(rseq_cs_at(), &at, sizeof at);
  }
  kill(task_, SIGUSR1);
  const auto regs = regs_of(task_);
  const auto mask = mask_of(task_);
  ASSERT_EQ(go(), 0) << why_.text << said;
  const auto after = regs_of(task_);
  EXPECT_EQ(std::memcmp(&regs, &after, sizeof regs), 0);
  EXPECT_EQ(mask_of(task_), mask);
  EXPECT_EQ(mask, 1u << (SIGTRAP - 1) | 1u << (SIGHUP - 1));
  if (__rseq_size) {
    std::uint64_t at = 0;
    peek(rseq_cs_at(), &at, sizeof at);
    EXPECT_EQ(at, reinterpret_cast<std::uintptr_t>(&section)) << "the section it was in is forgotten";
  }
  EXPECT_EQ(shared->signals, 0) << "a signal was delivered before the commit";
  expect_goes_on();
  await([] { return shared->signals == 1; });
}

TEST_F(Ahead, FromTheEndOfRtSigreturnWhereCriuHasIt) {
  start();
  kill(task_, SIGUSR1);
  bool entered = false, left = false;
  for (int i = 0, deliver = 0; i < 20 && !left; i++) {
    int status = 0;
    ASSERT_EQ(ptrace(PTRACE_SYSCALL, task_, 0, deliver), 0);
    ASSERT_EQ(waitpid(task_, &status, __WALL), task_);
    deliver = WSTOPSIG(status) == SIGUSR1 ? SIGUSR1 : 0;
    left = entered;
    entered = !deliver && regs_of(task_).orig_rax == SYS_rt_sigreturn;
  }
  ASSERT_TRUE(left);
  const auto regs = regs_of(task_);
  ASSERT_EQ(go(), 0) << why_.text << said;
  EXPECT_EQ(theirs()[2].status, 0);
  const auto after = regs_of(task_);
  EXPECT_EQ(std::memcmp(&regs, &after, sizeof regs), 0);
  expect_goes_on();
  EXPECT_EQ(shared->signals, 1);
}

TEST_F(Ahead, WishesAreLeftOutWhereTheDeviceDoesNotKnowThem) {
  commands[0].in.access_flags = commands[1].in.access_flags = 1 | kWishes;
  answer_ = [](const migr_ahead_mr& mr) { return mr.in.length == 8192 && (mr.in.access_flags & kWishes) ? EINVAL : 0; };
  start();
  ASSERT_EQ(go(), 0) << why_.text;
  const auto mrs = theirs();
  EXPECT_EQ(mrs[0].out.rkey, 1u | kWishes);
  EXPECT_EQ(mrs[1].out.rkey, 1u);
  EXPECT_EQ(mrs[2].status, 0);
  EXPECT_EQ(asked_, 4);
  expect_goes_on();
}

TEST_F(Ahead, WhatFailsIsNamedAndIsTheEndOfIt) {
  answer_ = [](const migr_ahead_mr& mr) { return mr.in.length == 8192 ? ENOMEM : 0; };
  start();
  EXPECT_EQ(go(), ENOMEM);
  EXPECT_EQ(why_.text, "cannot register MR 0x501 (8192 bytes) of process " + std::to_string(task_) +
                           " here: Cannot allocate memory (memory, or what the process may lock: RLIMIT_MEMLOCK, CAP_IPC_LOCK)");
  const auto mrs = theirs();
  EXPECT_EQ(mrs[0].status, 0);
  EXPECT_EQ(mrs[1].status, -ENOMEM);
  EXPECT_EQ(mrs[2].status, MIGR_AHEAD_OPEN);
  EXPECT_EQ(asked_, 2);
}

TEST_F(Ahead, ATaskThatWasStoppedIsStoppedAgain) {
  start();
  kill(task_, SIGSTOP);  // as CRIU does before this hook
  ASSERT_EQ(go(), 0) << why_.text;
  EXPECT_EQ(theirs()[2].status, 0);
  ASSERT_EQ(ptrace(PTRACE_DETACH, task_, 0, 0), 0);
  int status = 0;
  ASSERT_EQ(waitpid(task_, &status, WUNTRACED), task_);
  EXPECT_TRUE(WIFSTOPPED(status));
}

TEST_F(Ahead, TheProcessIsFoundInTheTreeAndNotItsParentWithTheSameMemory) {
  start(true);
  ASSERT_NE(task_, root_);
  ASSERT_EQ(go(), 0) << why_.text;
  EXPECT_EQ(theirs()[2].status, 0) << said;
  expect_goes_on();
}

TEST_F(Ahead, ItDoesNotWaitForEver) {
  silent_ = true;
  start();
  EXPECT_EQ(go(300), ETIMEDOUT);
  EXPECT_NE(std::string(why_.text).find("it takes too long"), std::string::npos) << why_.text;
}

TEST_F(Ahead, ATaskThatDiesIsAnError) {
  answer_ = [this](const migr_ahead_mr&) { return kill(task_, SIGKILL), 0; };
  start();
  EXPECT_EQ(go(), ESRCH);
  EXPECT_NE(std::string(why_.text).find("has ended"), std::string::npos) << why_.text;
}

class LeftToTheProcess : public Ahead {
 protected:
  void expect_left(const char* reason) {
    ASSERT_EQ(go(), 0) << why_.text;
    EXPECT_NE(said.find(reason), std::string::npos) << said;
    EXPECT_EQ(asked_, 0);
    peek(reinterpret_cast<std::uintptr_t>(&header), &header, sizeof header);
    expect_goes_on();
  }
};

TEST_F(LeftToTheProcess, OfAnotherVersion) {
  header.version++;
  start();
  expect_left("another version");
}
TEST_F(LeftToTheProcess, WithCodeThatIsNotOurs) {
  header.code += 3;
  start();
  expect_left("other code");
}
TEST_F(LeftToTheProcess, WithAPdThatIsNotOnRecord) {
  commands[1].in.pd_handle = 77;
  start();
  expect_left("not on record");
}
TEST_F(LeftToTheProcess, OfAContextThatIsNotOnRecord) {
  commands[2].fd = 5;
  start();
  expect_left("not on record");
}
TEST_F(LeftToTheProcess, OfAnotherInstance) {
  start();
  process_->instance[0]++;
  expect_left("not found");
}
TEST_F(LeftToTheProcess, OfAnotherNumber) {
  start();
  process_->ns_pid++;
  expect_left("not found");
}
TEST_F(LeftToTheProcess, ThatIgnoresSigtrap) {
  before_ = [] { signal(SIGTRAP, SIG_IGN); };
  start();
  before_ = nullptr;
  expect_left("SIGTRAP");
}
TEST_F(LeftToTheProcess, WithCommandsThatAreNotThere) {
  header.mrs = 4096;
  start();
  expect_left("cannot be read");
}
TEST_F(LeftToTheProcess, WithMoreThanCanBe) {
  header.nr_mrs = ~0u;
  start();
  expect_left("another version");
}
TEST_F(LeftToTheProcess, ThatDescribedNothing) {
  start();
  process_->fds[2].kind = MIGR_FD_RING;
  expect_left("");
}
TEST_F(LeftToTheProcess, ThatHasNothingToRegister) {
  header.nr_mrs = 0;
  start();
  expect_left("");
  EXPECT_EQ(said, "");
}

}  // namespace
