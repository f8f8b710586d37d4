/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "uverbs_write.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>

#include "../fd_bits.h"

namespace migr::provider {
namespace {

std::atomic<bool> watched;  ///< either of the two
std::atomic<bool> restored;
std::atomic<WriteHook> write_hook;
constinit FdBits ours;

using WriteFn = ssize_t (*)(int, const void*, size_t);
std::atomic<WriteFn> real_write;

ssize_t write_by_syscall(int fd, const void* buf, size_t count) { return syscall(SYS_write, fd, buf, count); }

[[gnu::cold, gnu::noinline]] WriteFn find_real_write() {
  auto fn = reinterpret_cast<WriteFn>(dlsym(RTLD_NEXT, "write"));
  if (!fn) fn = write_by_syscall;
  real_write.store(fn, std::memory_order_relaxed);
  return fn;
}

inline WriteFn next_write() {
  const WriteFn fn = real_write.load(std::memory_order_relaxed);
  return fn ? fn : find_real_write();
}

void put_in(ib_uverbs_attr& attr, std::uint16_t id, const void* data, std::size_t bytes) {
  attr.attr_id = id;
  attr.len = static_cast<std::uint16_t>(bytes);
  attr.flags = UVERBS_ATTR_F_MANDATORY;
  attr.data = 0;
  if (bytes <= sizeof(attr.data))  // the kernel takes what fits from the attribute itself
    memcpy(&attr.data, data, bytes);
  else
    attr.data = reinterpret_cast<std::uintptr_t>(data);
}

/// A uverbs command as it was written. @return as write(2)
[[gnu::cold, gnu::noinline]] ssize_t write_uverbs(int fd, const void* buf, size_t count) {
  ib_uverbs_cmd_hdr header;
  if (count < sizeof(header)) return next_write()(fd, buf, count);
  memcpy(&header, buf, sizeof(header));
  const auto* body = static_cast<const char*>(buf) + sizeof(header);
  const std::size_t body_bytes = count - sizeof(header);
  // Extended commands have a second header and are never written by what we support.
  if ((header.command & IB_USER_VERBS_CMD_FLAG_EXTENDED) || body_bytes > UINT16_MAX)
    return next_write()(fd, buf, count);
  void* out = nullptr;
  const std::size_t out_bytes = header.out_words * 4u;
  if (out_bytes) {
    std::uint64_t response = 0;  // each command with an answer starts with its address
    if (body_bytes < sizeof(response)) {
      errno = EINVAL;
      return -1;
    }
    memcpy(&response, body, sizeof(response));
    out = reinterpret_cast<void*>(static_cast<std::uintptr_t>(response));
  }
  const int error = invoke_write(fd, header.command, body, body_bytes, out, out_bytes);
  if (error) {
    errno = error;
    return -1;
  }
  return static_cast<ssize_t>(count);
}

}  // namespace

void set_restored() {
  restored.store(true, std::memory_order_release);
  watched.store(true, std::memory_order_release);
}

void watch_writes(WriteHook hook) {
  write_hook.store(hook, std::memory_order_release);
  watched.store(true, std::memory_order_release);
}

static_assert(kWriteWords * sizeof(std::uint64_t) == sizeof(ib_uverbs_ioctl_hdr) + 3 * sizeof(ib_uverbs_attr));

void lay_out_write(std::uint64_t (&room)[kWriteWords], std::uint32_t command, const void* in, std::size_t in_bytes, void* out,
                   std::size_t out_bytes) {
  memset(room, 0, sizeof(room));
  auto* header = reinterpret_cast<ib_uverbs_ioctl_hdr*>(room);
  header->object_id = UVERBS_OBJECT_DEVICE;
  header->method_id = UVERBS_METHOD_INVOKE_WRITE;
  header->driver_id = RDMA_DRIVER_RXE;  // the kernel compares; other families are refused before (unsupported_reason)
  unsigned n = 0;
  const std::uint64_t command64 = command;
  put_in(header->attrs[n++], UVERBS_ATTR_WRITE_CMD, &command64, sizeof(command64));
  if (in_bytes) put_in(header->attrs[n++], UVERBS_ATTR_CORE_IN, in, in_bytes);
  if (out_bytes) {
    ib_uverbs_attr& attr = header->attrs[n++];
    attr.attr_id = UVERBS_ATTR_CORE_OUT;
    attr.len = static_cast<std::uint16_t>(out_bytes);
    attr.flags = UVERBS_ATTR_F_MANDATORY;
    attr.data = reinterpret_cast<std::uintptr_t>(out);
  }
  header->num_attrs = static_cast<std::uint16_t>(n);
  header->length = static_cast<std::uint16_t>(sizeof(*header) + n * sizeof(ib_uverbs_attr));
}

int invoke_write(int fd, std::uint32_t command, const void* in, std::size_t in_bytes, void* out,
                 std::size_t out_bytes) {
  std::uint64_t room[kWriteWords];
  if (in_bytes > UINT16_MAX || out_bytes > UINT16_MAX) return EINVAL;
  lay_out_write(room, command, in, in_bytes, out, out_bytes);
  return ioctl(fd, RDMA_VERBS_IOCTL, room) == 0 ? 0 : errno;
}

}  // namespace migr::provider

void migr::note_uverbs_fd(int fd, bool is) { provider::ours.set(fd, is); }

namespace migr::provider {

void forget_uverbs_fds() { ours.clear(); }

namespace {

[[gnu::cold, gnu::noinline]] ssize_t write_watched(int fd, const void* buf, size_t count) {
  if (restored.load(std::memory_order_relaxed) && ours.has(fd)) return write_uverbs(fd, buf, count);
  ssize_t result;
  const WriteHook hook = write_hook.load(std::memory_order_relaxed);
  return hook && hook(fd, buf, count, &result) ? result : next_write()(fd, buf, count);
}

}  // namespace
}  // namespace migr::provider

extern "C" [[gnu::visibility("default")]] ssize_t write(int fd, const void* buf, size_t count) {
  using namespace migr::provider;
  if (watched.load(std::memory_order_relaxed)) [[unlikely]]
    return write_watched(fd, buf, count);
  return next_write()(fd, buf, count);
}
