/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Reads what the application has not read from a descriptor of its own, without waiting for more. */
#ifndef MIGR_UNREAD_H
#define MIGR_UNREAD_H

#include <fcntl.h>

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
    if (flags_ >= 0) fcntl(fd_, F_SETFL, flags_);
    ++counted;
  }
  static std::uint64_t turns() { return counted.load(); }
  WithoutWaiting(const WithoutWaiting&) = delete;
  WithoutWaiting& operator=(const WithoutWaiting&) = delete;

 private:
  static inline std::atomic<std::uint64_t> counted{0};
  const int fd_, flags_;
};

inline bool is_to_wait(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && !(flags & O_NONBLOCK);
}

}  // namespace migr

#endif
