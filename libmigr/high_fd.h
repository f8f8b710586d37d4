/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Our own descriptors live at high numbers: an application may count on getting low ones, and CRIU on "fd N" being free. One that
 * closes all that it does not know leaves them open.
 */
#ifndef MIGR_HIGH_FD_H
#define MIGR_HIGH_FD_H

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "fd_bits.h"

namespace migr {

/// Those that are open, and the process that has opened them: a child of vfork() shares our memory, and closes its own copies.
inline constinit FdBits own_fds;
inline std::atomic<pid_t> own_fds_of;

inline bool has_own_fds() { return getpid() == own_fds_of.load(std::memory_order_relaxed); }
inline bool is_own_fd(int fd) { return own_fds.has(fd) && has_own_fds(); }

/// From now on it is closed by others, as libibverbs does with a context's.
inline void let_fd_go(int fd) { own_fds.set(fd, false); }
/// As ours are closed. None: nothing.
inline void close_own(int fd) {
  if (fd < 0) return;
  syscall(SYS_close, fd);  // close() is ours, too, and no place to be cancelled at
  let_fd_go(fd);           // not before: somebody else may close all numbers just now
}

/// Moves `fd` to a high number, close-on-exec. @return the new number, or `fd` itself if there is no room up there: it is ours until close_own()
inline int to_high_fd(int fd) {
  constexpr rlim_t kCeiling = 4096;  // the kernel's table grows with the highest number in use
  constexpr rlim_t kRoom = 128;
  if (fd < 0) return fd;
  rlimit limit{};
  const rlim_t top = getrlimit(RLIMIT_NOFILE, &limit) ? 0 : std::min(limit.rlim_cur, kCeiling);
  const int high = top <= 2 * kRoom ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, static_cast<int>(top - kRoom));
  if (high >= 0) syscall(SYS_close, fd);
  own_fds_of.store(getpid(), std::memory_order_relaxed);
  own_fds.set(high < 0 ? fd : high, true);
  return high < 0 ? fd : high;
}

}  // namespace migr

#endif
