/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * open(), write(), fstat() and close() of /dev/infiniband/rdma_cm. librdmacm calls them for every one of its functions. All
 * other files cost a comparison at open() and a look at one word, or bit, in the others. Programs that close all that they do
 * not know call close_range() or closefrom(), or close() in a loop: the library's own descriptors stay open.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "../control.h"
#include "../environment.h"
#include "../fd_bits.h"
#include "../high_fd.h"
#include "../objects.h"
#include "../provider/uverbs_write.h"
#include "cm.h"

namespace migr::cm {
namespace {

constexpr char kDevice[] = "/dev/infiniband/rdma_cm";
std::atomic<bool> in_use;
std::atomic<pid_t> owner;  ///< a child of vfork() shares our memory, and closes what is its own copy; one of fork() does not
constinit FdBits channels;

bool is_channel(int fd) { return in_use.load(std::memory_order_relaxed) && channels.has(fd); }

/// As libmigr's write() wants it. @return false: not ours
bool write_channel(int fd, const void* buf, std::size_t count, ssize_t* result) {
  if (!is_channel(fd)) return false;
  if (Engine* e = engine()) {
    *result = e->command(fd, buf, count);
  } else {
    errno = EACCES;  // a fork's child: nor would the kernel have it
    *result = -1;
  }
  return true;
}

int open_channel(int flags) {
  control::begin();
  const int fd = engine(true)->open_channel(flags);
  if (fd < 0) return fd;
  if (!FdBits::fits(fd)) {
    engine()->close_channel(fd);
    syscall(SYS_close, fd);
    errno = EMFILE;
    return -1;
  }
  channels.set(fd, true);
  owner.store(getpid(), std::memory_order_relaxed);
  if (!in_use.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { owner.store(getpid(), std::memory_order_relaxed); });
    provider::watch_writes(write_channel);
  }
  control::start();  // it can be migrated also while it has no context yet
  return fd;
}

template <class Fn>
Fn next(std::atomic<Fn>& kept, const char* name) {
  Fn fn = kept.load(std::memory_order_relaxed);
  if (!fn) {
    fn = reinterpret_cast<Fn>(dlsym(RTLD_NEXT, name));
    kept.store(fn, std::memory_order_relaxed);
  }
  return fn;
}

/// Before `fd` is closed.
void leave(int fd) {
  if (Engine* e = engine()) e->close_channel(fd);
  channels.set(fd, false);
}

bool may_close() { return in_use.load(std::memory_order_relaxed) && getpid() == owner.load(std::memory_order_relaxed); }

void leave_range(unsigned first, unsigned last) {
  if (!may_close()) return;
  last = std::min(last, FdBits::kMax - 1);
  for (unsigned fd = first; fd <= last; fd++)
    if (channels.has(static_cast<int>(fd))) leave(static_cast<int>(fd));
}

/// The kernel's, but for what is ours.
template <class Close>
int close_others(unsigned first, unsigned last, Close close) {
  if (has_own_fds())
    for (unsigned own = first; own <= std::min(last, FdBits::kMax - 1); own++) {
      if (!own_fds.has(static_cast<int>(own))) continue;
      if (own > first)
        if (const int err = close(first, own - 1)) return err;
      if (own == last) return 0;
      first = own + 1;
    }
  return close(first, last);
}

using OpenFn = int (*)(const char*, int, ...);
using CloseFn = int (*)(int);
using CloseRangeFn = int (*)(unsigned, unsigned, int);
using ClosefromFn = void (*)(int);
using FstatFn = int (*)(int, struct stat*);
std::atomic<OpenFn> real_open;
std::atomic<CloseFn> real_close;
std::atomic<CloseRangeFn> real_close_range;
std::atomic<ClosefromFn> real_closefrom;
std::atomic<FstatFn> real_fstat;

int open_any(const char* path, int flags, mode_t mode) {
  if (path && path[0] == '/' && path[1] == 'd' && !strcmp(path, kDevice) && !environment::disabled()) return open_channel(flags);
  if (const OpenFn fn = next(real_open, "open")) return fn(path, flags, mode);
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

int stat_any(int fd, struct stat* out) {
  const FstatFn fn = next(real_fstat, "fstat");
  if (is_channel(fd)) [[unlikely]]
    if (Engine* e = engine(); e && e->real_fd() >= 0) return stat(kDevice, out);
  if (fn) return fn(fd, out);
  return static_cast<int>(syscall(SYS_newfstatat, fd, "", out, AT_EMPTY_PATH));
}

/// What was built against a glibc before 2.33 calls it so, as conda's librdmacm does.
int stat_old(int version, int fd, struct stat* out) {
  constexpr int kNewest = 1;  // of the layouts; where there are several all are this one
  if (version >= 0 && version <= kNewest) return stat_any(fd, out);
  errno = EINVAL;
  return -1;
}

static_assert(sizeof(struct stat) == sizeof(struct stat64) && offsetof(struct stat, st_ctim) == offsetof(struct stat64, st_ctim), "one is the other");

}  // namespace
}  // namespace migr::cm

MIGR_EXPORT int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if (flags & (O_CREAT | __O_TMPFILE)) {
    va_list rest;
    va_start(rest, flags);
    mode = va_arg(rest, mode_t);
    va_end(rest);
  }
  return migr::cm::open_any(path, flags, mode);
}

MIGR_EXPORT int open64(const char* path, int flags, ...) __attribute__((alias("open")));

MIGR_EXPORT int close(int fd) {
  using namespace migr::cm;
  if (migr::is_own_fd(fd)) [[unlikely]] {  // as for one that is not open: who closes them all knows none of ours
    errno = EBADF;
    return -1;
  }
  if (is_channel(fd) && may_close()) [[unlikely]]
    leave(fd);
  if (const CloseFn fn = next(real_close, "close")) return fn(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}

MIGR_EXPORT int close_range(unsigned first, unsigned last, int flags) noexcept {
  using namespace migr::cm;
  const bool of_others = (flags & CLOSE_RANGE_UNSHARE) && engine();  // as many threads as there are go on with theirs
  const auto close = [flags](unsigned from, unsigned to) {
    if (const CloseRangeFn fn = next(real_close_range, "close_range")) return fn(from, to, flags);
    return static_cast<int>(syscall(SYS_close_range, from, to, flags));
  };
  if (flags & ~static_cast<int>(CLOSE_RANGE_UNSHARE) || first > last) return close(first, last);  // closes nothing
  if (!of_others) leave_range(first, last);
  return close_others(first, last, close);
}

MIGR_EXPORT void closefrom(int first) noexcept {
  using namespace migr::cm;
  const auto from = static_cast<unsigned>(std::max(first, 0));
  leave_range(from, ~0u);
  if (!close_others(from, ~0u, [](unsigned a, unsigned b) { return static_cast<int>(syscall(SYS_close_range, a, b, 0)); })) return;
  if (const ClosefromFn fn = next(real_closefrom, "closefrom")) fn(first);  // where the kernel has no such call
}

MIGR_EXPORT int fstat(int fd, struct stat* out) { return migr::cm::stat_any(fd, out); }
MIGR_EXPORT int fstat64(int fd, struct stat64* out) { return migr::cm::stat_any(fd, reinterpret_cast<struct stat*>(out)); }
MIGR_EXPORT int __fxstat(int version, int fd, struct stat* out) { return migr::cm::stat_old(version, fd, out); }
MIGR_EXPORT int __fxstat64(int version, int fd, struct stat64* out) { return migr::cm::stat_old(version, fd, reinterpret_cast<struct stat*>(out)); }
