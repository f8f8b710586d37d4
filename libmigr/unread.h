/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Reads what the application has not read from a descriptor of its own, without waiting for more. */
#ifndef MIGR_UNREAD_H
#define MIGR_UNREAD_H

#include <fcntl.h>
#include <poll.h>

#include <atomic>
#include <cstdint>

namespace migr {

/// A thread of the application that reads at that moment may find that there is nothing, where it wants to wait: if turns() is
/// odd, or not what it was before, it looks again, with is_to_wait(), once the lock that is held around this is free.
/// Of one thread at a time.
class WithoutWaiting {
 public:
  explicit WithoutWaiting(int fd) : fd_(fd), flags_(fcntl(fd, F_GETFL)) {
    ++counted;
    if (flags_ >= 0) fcntl(fd_, F_SETFL, flags_ | O_NONBLOCK);
  }
  ~WithoutWaiting() {
    // The application may have changed others meanwhile.
    const int now = flags_ < 0 || (flags_ & O_NONBLOCK) ? -1 : fcntl(fd_, F_GETFL);
    if (now >= 0) fcntl(fd_, F_SETFL, now & ~O_NONBLOCK);
    ++counted;
  }
  static std::uint64_t turns() { return counted.load(); }
  WithoutWaiting(const WithoutWaiting&) = delete;
  WithoutWaiting& operator=(const WithoutWaiting&) = delete;

 private:
  static inline std::atomic<std::uint64_t> counted{0};
  const int fd_, flags_;
};

/// If not, there is nothing to read, and the flags can stay as they are.
inline bool is_readable(int fd) {
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&p, 1, 0) != 0;
}

inline bool is_to_wait(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && !(flags & O_NONBLOCK);
}

}  // namespace migr

#endif
