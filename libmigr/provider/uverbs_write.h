/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * uverbs takes write() commands only from the very credentials that opened the
 * device (by pointer); a restored process has new ones and would get EACCES.
 * The ioctl INVOKE_WRITE carries the same commands without that check. rxe
 * rings its doorbell by write(), so the library stands in front of write().
 */
#ifndef MIGR_UVERBS_WRITE_H
#define MIGR_UVERBS_WRITE_H

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace migr {

/// Tells that `fd` is (or is no longer) the command fd of a context of ours. Lock-free; fds from 65536 on are not kept.
void note_uverbs_fd(int fd, bool ours);

}  // namespace migr

namespace migr::provider {

/// From here on, commands written to our uverbs fds go by ioctl. Thread: control thread, data path suspended.
void set_restored();

/// After fork(), in the child: contexts are its parent's, and their numbers may become those of other files.
void forget_uverbs_fds();

/// Another kind of file whose writes are ours. @return false: `fd` is none
using WriteHook = bool (*)(int fd, const void* buf, std::size_t count, ssize_t* result);
void watch_writes(WriteHook hook);

constexpr std::size_t kWriteWords = 9;  ///< of 8 bytes: the ioctl's header and three attributes

/// Lays out the argument of the ioctl for a uverbs write command, `in` and `out` of at most 64 KiB.
void lay_out_write(std::uint64_t (&room)[kWriteWords], std::uint32_t command, const void* in, std::size_t in_bytes, void* out,
                   std::size_t out_bytes);

/// One uverbs write command by ioctl. @param in the command without its header
/// @return 0 or a positive errno
int invoke_write(int fd, std::uint32_t command, const void* in, std::size_t in_bytes, void* out, std::size_t out_bytes);

}  // namespace migr::provider

#endif
