// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A child process with libmigr, as far as a SessionTable sees it: it does all that it is told, and one of its threads is inside the code
// that it names until it may leave.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "agent/process_session.h"
#include "played_library.h"

namespace migr {

extern "C" char __executable_start[], etext[];

class Inside {
 public:
  Inside(const std::string& socket_path, const Instance& i) : pid_(fork()) {
    if (!pid_) play(socket_path, i);
  }
  ~Inside() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    munmap(may_leave_, sizeof *may_leave_);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  pid_t pid() const { return pid_; }
  void leave() { *may_leave_ = true; }

 private:
  [[noreturn]] void play(const std::string& path, const Instance& i) const {
    alarm(60);
    std::atomic<bool> inside = false;
    std::thread([&] {
      inside = true;
      while (!*may_leave_) usleep(1'000);
    }).detach();
    while (!inside) usleep(1'000);
    const migr_text_range code{reinterpret_cast<std::uint64_t>(__executable_start), static_cast<std::uint64_t>(etext - __executable_start), 0, 0};
    const Fd fd = connect_library(path, i, MIGR_PROC_RUNNING, MIGR_PROC_VERSION, {&code, 1});  // this thread is to be left out, not the other
    if (fd.n < 0) _exit(1);
    answer_all(fd.n, [](migr_msg& m, const std::byte*) { m.arg = 1; });  // MOVES_PREPARE: it has an unconnected QP
    _exit(0);
  }
  std::atomic<bool>* const may_leave_ = new (mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<bool>(false);
  const pid_t pid_;
};

}  // namespace migr
