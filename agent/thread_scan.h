// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Has every thread of a process been seen outside of given code? The closing of
// a suspension: docs/protocol.md, "Suspension is closed without a cost on the
// data path".
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <stop_token>

#include "status.h"

namespace migr {

struct TextRange {
  std::uint64_t start;
  std::uint64_t bytes;
};

struct ScanStats {
  unsigned threads = 0;  // seen outside
  unsigned stops = 0;    // ptrace stops made
  unsigned unwound = 0;  // stacks on which the word scan had found something
};

/// Stops each thread of `pid` for a moment (PTRACE_INTERRUPT: no signal, and
/// restartable calls restart; epoll_wait and a few others may see EINTR, as
/// signal(7) says of stops) and looks whether its instruction pointer or a
/// return address lies in `ranges`; looks again at those that were inside,
/// until every thread has been seen outside once. Threads born meanwhile are
/// looked at too; a thread that ends counts as outside.
/// @param skip_tid  0, or a thread that never counts (libmigr's control thread), in our pid namespace
/// @param deadline  monotonic; ETIMEDOUT names the thread that stayed inside
/// @param stop      ECANCELED soon after it is asked for
/// Errors: ESRCH no such process, EPERM may not trace (or somebody else does).
/// Thread: any; blocks. All stops are made by a thread of their own, and end with it.
Result<ScanStats> wait_until_outside(pid_t pid, std::span<const TextRange> ranges, pid_t skip_tid,
                                     std::chrono::steady_clock::time_point deadline, std::stop_token stop = {});

}  // namespace migr
