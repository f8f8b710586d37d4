// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What depends on a process's own word may take for ever, or end whoever does it: it is done in a process of its own.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <optional>

#include "pidfd.h"

namespace migr {

/// fork(). The child has no descriptors, leaves no core, and ends with the caller's thread, or by _exit(). Other threads of ours may
/// hold locks for ever there: what takes none is all that it may do.
/// @return 0: in the child; -1: there is none
inline pid_t fork_aside() {
  const pid_t child = fork();
  if (child) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_DUMPABLE, 0);
  for (const int s : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV}) signal(s, SIG_DFL);
  close_range(0, ~0u, 0);  // others' connections
  return 0;
}

/// Waits for its end, which comes after `limit_ms` at the latest.
/// @return what it has said by _exit(); nothing: it was ended
inline std::optional<int> exit_of(pid_t child, int limit_ms) {
  const Pidfd pidfd(child);
  pollfd ends = pidfd.to_poll();
  if (!pidfd || poll(&ends, 1, limit_ms) != 1) kill(child, SIGKILL);
  int status = 0;
  const bool known = waitpid(child, &status, 0) == child && WIFEXITED(status);
  return known ? std::optional(WEXITSTATUS(status)) : std::nullopt;
}

}  // namespace migr
