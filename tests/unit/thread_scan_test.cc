// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "agent/thread_scan.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <array>
#include <cstring>
#include <future>

#include "marked.h"

namespace {
bool no_more_processes = false;
}  // namespace

extern "C" pid_t fork() noexcept {
  static const auto next = reinterpret_cast<pid_t (*)()>(dlsym(RTLD_NEXT, "fork"));
  if (no_more_processes) return errno = EAGAIN, -1;
  return next();
}

namespace migr::thread_scan_test {
namespace {

using Clock = std::chrono::steady_clock;

MARKED void spin_inside(Shared* s) {
  s->ready++;
  while (!s->leave) asm volatile("pause");
}

// A value on the stack that looks like a return address, in a frame that is live.
[[gnu::noinline]] void outside_with_stale_word(Shared* s) {
  volatile std::uint64_t junk[4];
  junk[1] = reinterpret_cast<std::uint64_t>(__start_marked_text) + 9;
  park(s);
  asm volatile("" : : "r"(junk) : "memory");
}

Result<ScanStats> scan(pid_t pid, int limit_ms) {
  const TextRange r[] = {marked()};
  return wait_until_outside(pid, r, 0, Clock::now() + std::chrono::milliseconds(limit_ms));
}

TEST(ThreadScan, ThreadsOutsideAreSeenAtOnce) {
  Forked f(8, [](int, Shared* s) { park(s); });
  auto r = scan(f.pid, 2000);
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->threads, 9u);
  EXPECT_EQ(r->stops, 9u);
  EXPECT_EQ(f.end(), 0);
}

TEST(ThreadScan, InstructionPointerInsideIsNotOutside) {
  Forked f(2, [](int i, Shared* s) { i ? spin_inside(s) : park(s); });
  auto r = scan(f.pid, 100);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT);
  EXPECT_EQ(f.end(), 0);
}

TEST(ThreadScan, ReturnAddressInsideIsNotOutside) {
  Forked f(2, [](int i, Shared* s) { i ? inside_and_below(s) : park(s); });
  auto r = scan(f.pid, 100);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT);
  EXPECT_EQ(f.end(), 0);
}

// Its stack is not one that a thread library has made.
TEST(ThreadScan, ReturnAddressOfTheFirstThreadInsideIsNotOutside) {
  Shared* const s = share();
  const pid_t pid = fork();
  if (!pid) alarm(60), inside_and_below(s), _exit(0);
  for (int i = 0; i < 5000 && !s->ready; i++) usleep(1000);
  auto r = scan(pid, 100);
  EXPECT_EQ(r ? 0 : r.error().code, ETIMEDOUT);
  s->leave = true;
  int st = -1;
  waitpid(pid, &st, 0);
  EXPECT_EQ(st, 0);
  munmap(s, sizeof *s);
}

Shared* of_coroutine;
void inside_on_coroutine() { inside_and_below(of_coroutine); }
void outside_on_coroutine() { park(of_coroutine); }

// A thread's coroutine has a stack below the thread's own, and there is a hole between them.
void scan_coroutine(void (*body)(), int expected) {
  Forked f(1, [body](int, Shared* s) {
    constexpr std::size_t kPage = 4096, kStack = 16 * kPage;
    auto* const at = static_cast<char*>(mmap(nullptr, kStack + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mprotect(at + kPage, kStack, PROT_READ | PROT_WRITE)) _exit(1);
    of_coroutine = s;
    ucontext_t there{}, back{};
    getcontext(&there);
    there.uc_stack.ss_sp = at + kPage;
    there.uc_stack.ss_size = kStack;
    there.uc_link = &back;
    makecontext(&there, body, 0);
    swapcontext(&back, &there);
  });
  const auto r = scan(f.pid, 100);
  EXPECT_EQ(r ? 0 : r.error().code, expected);
  EXPECT_EQ(r ? r->unwound : 0, 0u) << "its words could not be read";
  EXPECT_EQ(f.end(), 0);
}
TEST(ThreadScan, ReturnAddressOfACoroutineInsideIsNotOutside) { scan_coroutine(inside_on_coroutine, ETIMEDOUT); }
TEST(ThreadScan, ACoroutineOutsideIsSeenAtOnce) { scan_coroutine(outside_on_coroutine, 0); }

TEST(ThreadScan, AStopEndsIt) {
  Forked f(1, [](int, Shared* s) { inside_and_below(s); });
  const TextRange r[] = {marked()};
  std::stop_source stop;
  std::thread later([&] { usleep(50'000), stop.request_stop(); });
  const auto seen = wait_until_outside(f.pid, r, 0, Clock::now() + std::chrono::minutes(1), stop.get_token());
  later.join();
  ASSERT_FALSE(seen);
  EXPECT_EQ(seen.error().code, ECANCELED);
  EXPECT_EQ(f.end(), 0);
}

// It is not the application that keeps anybody waiting then.
TEST(ThreadScan, WithoutAProcessOfItsOwnItSaysSoAtOnce) {
  Forked f(1, [](int, Shared* s) { park(s); });
  const auto before = Clock::now();
  no_more_processes = true;
  const auto r = scan(f.pid, 20'000);
  no_more_processes = false;
  EXPECT_LT(Clock::now() - before, std::chrono::seconds(10));
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ENOMEM);
  EXPECT_NE(r.error().text.find("starting a process of our own"), std::string::npos) << r.error().text;
  EXPECT_EQ(f.end(), 0);
}

TEST(ThreadScan, StaleWordOnTheStackIsUnwound) {
  Forked f(1, [](int, Shared* s) { outside_with_stale_word(s); });
  auto r = scan(f.pid, 5000);
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_GE(r->unwound, 1u);
  EXPECT_EQ(f.end(), 0);
}

// A page of it is to be brought by who never does: migrd does not wait for that, and what nobody has read may have a call on it.
TEST(ThreadScan, WhoseStackSomebodyElseBringsIsNotWaitedFor) {
  constexpr std::size_t kPage = 4096;
  auto* const stack = static_cast<char*>(mmap(nullptr, 32 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(stack), MAP_FAILED);
  static Shared* shared;
  Forked f(2, [stack](int i, Shared* s) {
    if (!i) return park(s);
    // Its stack is the lower half; of the upper one nothing is there, and nobody brings it.
    std::memset(stack, 0, 16 * kPage);
    ucontext_t there{}, back{};
    getcontext(&there);
    there.uc_stack.ss_sp = stack;
    there.uc_stack.ss_size = 16 * kPage;
    there.uc_link = &back;
    shared = s;
    const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
    uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
    uffdio_register area{.range = {.start = reinterpret_cast<std::uintptr_t>(stack), .len = 32 * kPage}, .mode = UFFDIO_REGISTER_MODE_MISSING, .ioctls = 0};
    s->progress = fd >= 0 && !ioctl(fd, UFFDIO_API, &api) && !ioctl(fd, UFFDIO_REGISTER, &area);
    makecontext(&there, [] { park(shared); }, 0);
    swapcontext(&back, &there);
  });
  munmap(stack, 32 * kPage);
  if (!f.shared->progress) {
    f.end();
    GTEST_SKIP() << "no userfaultfd here";
  }
  const auto begun = Clock::now();
  auto seen = std::async(std::launch::async, [&] { return scan(f.pid, 100); });
  const bool over = seen.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  EXPECT_TRUE(over);
  if (!over) kill(f.pid, SIGKILL);  // which ends what is awaited
  const auto r = seen.get();
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT) << r.error().text;
  EXPECT_EQ(f.end(), 0);
}

// Frames of code in a file of the process's own naming, which is a FIFO now: nobody may wait for its writer.
TEST(ThreadScan, WhatAFileOfItsCodeIsCalledDoesNotMatter) {
  constexpr char kFile[] = "code", kNow[] = "code (deleted)";  // as maps has it
  char dir[] = "/tmp/thread_scan_test.XXXXXX";
  ASSERT_TRUE(mkdtemp(dir));
  const std::string file = std::string(dir) + "/" + kFile, fifo = std::string(dir) + "/" + kNow;
  const std::array<std::uint8_t, 4096> code = {0x55, 0x48, 0x89, 0xe5, 0xff, 0xd6, 0x5d, 0xc3};  // push rbp; mov rsp, rbp; call *rsi; pop rbp; ret
  const int fd = open(file.c_str(), O_RDWR | O_CREAT, 0700);
  ASSERT_EQ(write(fd, code.data(), code.size()), static_cast<ssize_t>(code.size()));
  void* at = mmap(nullptr, code.size(), PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
  ASSERT_NE(at, MAP_FAILED);
  close(fd), unlink(file.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  Forked f(1, [at](int, Shared* s) { reinterpret_cast<void (*)(Shared*, void (*)(Shared*))>(at)(s, outside_with_stale_word); });
  std::atomic<bool> seen = false;
  bool held = false;
  std::thread watch([&] {
    for (int i = 0; i < 5000 && !seen; i++) usleep(1000);
    if ((held = !seen)) close(open(fifo.c_str(), O_RDWR | O_NONBLOCK));
  });
  (void)scan(f.pid, 100);
  seen = true;
  watch.join();
  EXPECT_FALSE(held);
  EXPECT_EQ(f.end(), 0);
  munmap(at, code.size());
  unlink(fifo.c_str()), rmdir(dir);
}

// How its caller's frame is found: by an expression of one jump, to itself.
extern "C" void calls_for_ever(Shared*, void (*)(Shared*));
asm(R"(.pushsection .text
calls_for_ever: .cfi_startproc
  sub $8, %rsp
  .cfi_escape 0x0f, 3, 0x2f, 0xfd, 0xff  # DW_CFA_def_cfa_expression: DW_OP_skip -3
  call *%rsi
  add $8, %rsp
  ret
.cfi_endproc
.popsection)");
// .. or by what is no number: the smallest one divided by -1.
extern "C" void calls_with_a_quotient(Shared*, void (*)(Shared*));
asm(R"(.pushsection .text
calls_with_a_quotient: .cfi_startproc
  sub $8, %rsp
  .cfi_escape 0x0f, 7, 0x31, 0x08, 63, 0x24, 0x09, 0xff, 0x1b  # lit1, const1u 63, shl, const1s -1, div
  call *%rsi
  add $8, %rsp
  ret
.cfi_endproc
.popsection)");

void scan_one_that(void (*calls)(Shared*, void (*)(Shared*))) {
  Forked f(1, [calls](int, Shared* s) { calls(s, outside_with_stale_word); });
  const auto begun = Clock::now();
  const auto r = scan(f.pid, 100);
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT) << r.error().text;
  EXPECT_EQ(f.end(), 0);
}
TEST(ThreadScan, FramesWithoutAnEndAreGivenUp) { scan_one_that(calls_for_ever); }
TEST(ThreadScan, FramesThatEndTheirReaderEndNothingElse) { scan_one_that(calls_with_a_quotient); }

TEST(ThreadScan, WaitsForTheOneThatLeaves) {
  Forked f(3, [](int i, Shared* s) { i == 1 ? inside_and_below(s) : park(s); });
  std::thread later([&] { usleep(150'000); f.shared->leave = true; });
  const auto start = Clock::now();
  auto r = scan(f.pid, 5000);
  later.join();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(100));
  EXPECT_EQ(f.end(), 0);
}

TEST(ThreadScan, ProcessGoesOnAfterwards) {
  Forked f(1, [](int, Shared* s) {
    s->ready++;
    while (!s->leave) s->progress++;
  });
  ASSERT_TRUE(scan(f.pid, 2000));
  const auto before = f.shared->progress.load();
  usleep(50'000);
  EXPECT_GT(f.shared->progress.load(), before);
  EXPECT_EQ(f.end(), 0);
}

TEST(ThreadScan, BlockedReadIsRestarted) {
  int p[2];
  ASSERT_EQ(pipe(p), 0);
  Forked f(1, [=](int, Shared* s) {
    char c;
    s->ready++;
    s->progress = static_cast<std::uint64_t>(read(p[0], &c, 1));
    while (!s->leave) usleep(1000);
  });
  usleep(20'000);
  for (int i = 0; i < 5; i++) ASSERT_TRUE(scan(f.pid, 2000));
  ASSERT_EQ(write(p[1], "x", 1), 1);
  for (int i = 0; i < 2000 && !f.shared->progress; i++) usleep(1000);
  EXPECT_EQ(f.shared->progress, 1u);
  EXPECT_EQ(f.end(), 0);
  close(p[0]), close(p[1]);
}

TEST(ThreadScan, NoSuchProcessIsESRCH) {
  const pid_t p = fork();
  if (!p) _exit(0);
  waitpid(p, nullptr, 0);
  auto r = scan(p, 100);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ESRCH);
}

TEST(ThreadScan, TracedBySomebodyElseIsEPERM) {
  Forked f(1, [](int, Shared* s) { park(s); });
  // The tracer has to be another process than we.
  int up[2], down[2];
  ASSERT_EQ(pipe(up), 0);
  ASSERT_EQ(pipe(down), 0);
  const pid_t tracer = fork();
  if (!tracer) {
    char c = 'n';
    // Its main thread is enough.
    if (syscall(101 /* ptrace */, 0x4206 /* SEIZE */, f.pid, 0, 0) == 0) c = 'y';
    if (write(up[1], &c, 1) != 1) _exit(1);
    close(down[1]);
    _exit(read(down[0], &c, 1) == 0 ? 0 : 1);  // when the test has ended
  }
  char c = 0;
  ASSERT_EQ(read(up[0], &c, 1), 1);
  EXPECT_EQ(c, 'y');
  auto r = scan(f.pid, 500);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, EPERM);
  for (int fd : {up[0], up[1], down[0], down[1]}) close(fd);
  waitpid(tracer, nullptr, 0);
  EXPECT_EQ(f.end(), 0);
}

}  // namespace
}  // namespace migr::thread_scan_test
