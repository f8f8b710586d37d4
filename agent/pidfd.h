// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

namespace migr {

/// Becomes readable when a child of ours ends.
class Pidfd {
 public:
  /// @param child  0: none
  explicit Pidfd(pid_t child) : fd_(child ? static_cast<int>(syscall(SYS_pidfd_open, child, 0)) : -1) {}
  Pidfd(const Pidfd&) = delete;
  ~Pidfd() {
    if (fd_ >= 0) close(fd_);
  }
  /// Else the kernel had none left, and who waits has to look.
  explicit operator bool() const { return fd_ >= 0; }
  pollfd to_poll() const { return {fd_, POLLIN, 0}; }

 private:
  const int fd_;
};

}  // namespace migr
