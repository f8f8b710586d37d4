// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The frames of a thread that stands still. All that is known of them is the process's own: its memory says where its code
// describes how it is unwound, and what. No file is opened, whose name would be the process's to choose.
#pragma once

#include <sys/types.h>
#include <sys/user.h>

#include <cstdint>
#include <functional>

namespace migr {

/// Is any frame where `inside` says? One that cannot be walked to its end, in kScanWalkMs, counts as inside.
/// @param regs    of the thread, which does not run meanwhile
/// @param inside  of an instruction pointer; true: of a return address. Called in a process of its own: libunwind evaluates
///                what the process says without bounds, and what it reads may be on a file system that never answers
/// Thread: any; blocks.
bool frames_inside(pid_t pid, const user_regs_struct& regs, const std::function<bool(std::uint64_t ip, bool return_address)>& inside);

}  // namespace migr
