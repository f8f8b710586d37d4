// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A child process with threads parked inside and outside of a marked function.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "agent/thread_scan.h"

namespace migr {

/// Of parent and child.
struct Shared {
  std::atomic<int> ready;
  std::atomic<bool> leave;
  std::atomic<std::uint64_t> progress;
  std::atomic<pid_t> inside;  // thread that is
  std::atomic<int> result = -1;
};

// The marked code: its own section, so that its range is known.
extern "C" char __start_marked_text[], __stop_marked_text[];
#define MARKED [[gnu::noinline, gnu::section("marked_text")]]

[[gnu::noinline]] inline void park(Shared* s) {
  s->ready++;
  while (!s->leave) {
    pollfd none{-1, 0, 0};
    poll(&none, 1, 5);
  }
  asm volatile("");  // no tail call: a return address has to lie in the caller
}

[[maybe_unused]] MARKED static void inside_and_below(Shared* s) {
  s->inside = gettid();
  park(s);
  asm volatile("");
}

inline Shared* share() {
  return new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
}

struct Forked {
  pid_t pid;
  Shared* const shared = share();

  template <class F>
  explicit Forked(int threads, F body) {
    pid = fork();
    if (pid == 0) {
      alarm(60);
      std::vector<std::thread> t;
      for (int i = 0; i < threads; i++) t.emplace_back([=, this] { body(i, shared); });
      for (auto& x : t) x.join();
      _exit(0);
    }
    for (int i = 0; i < 5000 && shared->ready < threads; i++) usleep(1000);
    EXPECT_EQ(shared->ready, threads);
  }
  // Ended by itself and not by a signal of ours.
  int end() {
    shared->leave = true;
    int st = -1;
    waitpid(pid, &st, 0);
    pid = 0;
    return st;
  }
  ~Forked() {
    if (pid) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
    munmap(shared, sizeof(Shared));
  }
};

inline TextRange marked() {
  return {reinterpret_cast<std::uint64_t>(__start_marked_text),
          static_cast<std::uint64_t>(__stop_marked_text - __start_marked_text)};
}

}  // namespace migr
