/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Our own descriptors live at high numbers: an application may count on getting low ones, and CRIU on "fd N" being free. */
#ifndef MIGR_HIGH_FD_H
#define MIGR_HIGH_FD_H

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace migr {

/// Moves `fd` to a high number, close-on-exec. @return the new number, or `fd` itself if there is no room up there.
inline int to_high_fd(int fd) {
  constexpr rlim_t kCeiling = 4096;  // the kernel's table grows with the highest number in use
  constexpr rlim_t kRoom = 128;
  if (fd < 0) return fd;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return fd;
  const rlim_t top = std::min(limit.rlim_cur, kCeiling);
  if (top <= 2 * kRoom) return fd;
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, static_cast<int>(top - kRoom));
  if (high < 0) return fd;
  close(fd);
  return high;
}

}  // namespace migr

#endif
