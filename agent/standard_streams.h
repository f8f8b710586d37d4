// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Standard streams that are pipes to a program of the host, as those of containerd and podman are, or of a shell's pipeline; and
// terminals.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "status.h"

namespace migr {

/// The N of each pipe:[N].
/// @param streams  as in descriptors.json
std::vector<std::uint32_t> pipes_in(const std::vector<std::string>& streams);

/// Of some processes, a pipe whose other end is another's.
struct PipeElsewhere {
  std::string name;  // pipe:[N]
  pid_t pid = 0;     // which of them has it open as `fd`, the lowest descriptor of it
  int fd = 0;
  pid_t other = 0;
  bool standard() const;
};
/// Not what nobody else has open: its other end is gone, and that is so elsewhere, too.
std::vector<PipeElsewhere> pipes_elsewhere(const std::vector<pid_t>& pids);

/// Of some processes, a terminal that CRIU would not restore with them.
struct TerminalElsewhere {
  std::string name;  // /dev/pts/N
  pid_t pid = 0;     // which of them has it open as `fd`
  int fd = 0;
};
/// Not one whose other end they have, or nobody any more; nor one that only controls them and that they do not have open: they go on without.
std::optional<TerminalElsewhere> terminal_elsewhere(const std::vector<pid_t>& pids);

/// Of processes without a container: what runc would write down.
Status write_streams(const std::vector<pid_t>& pids, const std::string& images);

/// In a checkpoint with descriptors.json: who has an end of such a pipe open gets /dev/null. Nobody would be at the
/// other end, and /dev/null moves on with it.
Status pipes_to_null(const std::string& images);

}  // namespace migr
