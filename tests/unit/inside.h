// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A child process with libmigr, as far as a SessionTable sees it: it does all that it is told, and one of its threads is inside the code
// that it names until it may leave.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "agent/process_session.h"

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
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::strcpy(at.sun_path, path.c_str());
    if (connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at)) _exit(1);
    struct {
      migr_msg head{};
      migr_text_range code{};
    } hello;
    hello.head.version = MIGR_PROC_VERSION;
    hello.head.type = MIGR_MSG_HELLO;
    hello.head.count = 1;
    hello.head.record_size = sizeof hello.code;
    hello.head.control_tid = gettid();  // all but the other thread
    std::copy(i.begin(), i.end(), hello.head.instance);
    hello.code.start = reinterpret_cast<std::uint64_t>(__executable_start);
    hello.code.bytes = static_cast<std::uint64_t>(etext - __executable_start);
    if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello)) _exit(1);
    static std::byte packet[1 << 12];
    for (migr_msg m; recv(fd, packet, sizeof packet, 0) >= static_cast<ssize_t>(sizeof m);) {
      std::memcpy(&m, packet, sizeof m);
      m.type |= MIGR_REPLY;
      m.count = m.record_size = 0;
      m.arg = 1;  // MOVES_PREPARE: it has an unconnected QP
      send(fd, &m, sizeof m, MSG_NOSIGNAL);
    }
    _exit(0);
  }
  std::atomic<bool>* const may_leave_ = new (mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<bool>(false);
  const pid_t pid_;
};

}  // namespace migr
