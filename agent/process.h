// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What /proc says about a process. Thread: any.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace migr {

/// Differs for every process that ever has this number: the boot, and when in it that one began. Empty: nobody has it.
std::string life_of(pid_t pid);
/// The process and its descendants, the process first. Empty: it has ended.
std::vector<pid_t> tree_of(pid_t pid);
/// One that has ended descends from all.
bool descends(pid_t pid, pid_t ancestor);
/// Neither gone nor a zombie.
bool process_lives(pid_t pid);
/// By a signal.
bool process_stopped(pid_t pid);
/// Its command; empty: it has ended.
std::string name_of(pid_t pid);

}  // namespace migr
