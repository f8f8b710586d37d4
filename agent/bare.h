// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Processes without a container: a process and what descends from it, dumped and restored by CRIU alone, with its pids.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "runc.h"

namespace migr {

/// Where a container would have its name: "pid:712".
std::string bare_name(pid_t pid);
/// Nothing: the name of a container.
std::optional<pid_t> bare_pid(const std::string& id);

/// As Runc, of which it has every call that makes sense. Thread: any.
class Bare {
 public:
  explicit Bare(const Config& c) : config_(c) {}
  /// ENOENT: no such process; EOPNOTSUPP: it is in a container, or has mounts of its own.
  Result<ContainerState> state(pid_t pid) const;
  Result<std::vector<pid_t>> pids(pid_t pid) const;
  /// CRIU's, which is installed; "3.17.1".
  Result<std::string> version() const;
  /// nft's, which their TCP connections depend on.
  Result<std::string> nft_version() const;
  /// EOPNOTSUPP: one of them has a TCP connection that another host could not have, as the other end is there or stays here, or one over a
  /// UNIX socket (not of datagrams) to a process beside them.
  Status connections_stay(pid_t pid) const;
  /// EOPNOTSUPP: one of them has a pipe to a process beside them, and not as a standard stream.
  Status pipes_stay(pid_t pid) const;
  Status pre_dump(pid_t pid, const std::string& images, const std::string& to, const std::string& parent, const std::string& work) const;
  Result<Child> checkpoint_ahead(pid_t pid, const std::string& images, const std::string& parent, const std::string& work,
                                 const std::string& log) const;
  /// Which of them stand still by a signal.
  std::vector<pid_t> standing(pid_t pid) const;
  /// After a dump; without one, or where that has let them go on itself, nobody is told anything.
  /// @param stood  before it, and stay so
  Status resume(pid_t pid, const std::vector<pid_t>& stood = {}) const;
  /// Ends all of them, and sees that they have ended.
  Status remove(pid_t pid) const;
  Result<Child> partial_restore(const std::string& images, const std::string& work, const std::string& log) const;

 private:
  Argv criu(const std::string& what, const std::string& images, const std::string& work, const std::string& log) const;
  Status unix_connections_stay(const std::map<std::string, std::pair<pid_t, int>>& ours) const;
  Status unlock_connections(pid_t root, const std::vector<pid_t>& all) const;
  const Config& config_;
  mutable std::mutex mutex_;
  mutable std::set<pid_t> locked_;  // their connections, until they are unlocked; guarded by mutex_
};

}  // namespace migr
