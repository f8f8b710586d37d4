// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a process has mapped, as /proc/PID/maps and smaps say. Thread: any.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace migr {

struct Mapping {
  unsigned long long start, end, offset;
  bool executable;
  unsigned major, minor;
  unsigned long inode;  // 0: of no file
  std::string path;     // as the kernel names it: "[stack]", "/lib/libc.so.6 (deleted)", or nothing
};

/// In the order of their addresses; none: the process has ended, or may not be looked at. @param done  true: no more of them
void each_mapping(pid_t pid, const std::function<bool(const Mapping&)>& done);
/// All of them, for more than one question.
std::vector<Mapping> mappings_of(pid_t pid);

/// One of its mappings has a flag, as VmFlags in /proc/PID/smaps has it: "wf". The kernel looks at all of its pages for that.
bool has_vm_flag(pid_t pid, const std::string& flag);

/// Whose mappings these are has contexts of io_setup(2).
bool has_aio(const std::vector<Mapping>& mappings);

}  // namespace migr
