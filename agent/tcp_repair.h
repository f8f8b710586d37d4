// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// TCP sockets in repair mode, in which they send nothing and fail: as CRIU leaves those of what it has dumped and let stand, or when
// it is killed. The process may be stopped or frozen. Thread: any.
#pragma once

#include <sys/types.h>

namespace migr {

/// It has one.
bool in_repair(pid_t pid);
/// It has none any more.
void end_repair(pid_t pid);

}  // namespace migr
