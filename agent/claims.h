// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which migration holds which process of this host, whatever the role: a process
// takes part in one at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "process_session.h"

namespace migr {

/// Thread: any.
class Claims {
 public:
  struct Process {
    Instance instance{};
    pid_t pid = 0;
  };
  /// All of them or none. @return 0, or the migration that holds one of them
  std::uint32_t take(const std::vector<Process>& all, std::uint32_t migration) {
    std::lock_guard lock(mutex_);
    for (const auto& p : all)
      if (const auto h = held_.find(p.instance); h != held_.end() && h->second.migration != migration) return h->second.migration;
    for (const auto& p : all) held_[p.instance] = {migration, p.pid};
    return 0;
  }
  /// Those of them that it holds: a host can be source and partner in one migration, and one role may end before the other.
  void release(const std::vector<Instance>& these, std::uint32_t migration) {
    std::lock_guard lock(mutex_);
    for (const auto& i : these)
      if (const auto h = held_.find(i); h != held_.end() && h->second.migration == migration) held_.erase(h);
  }
  /// @return 0: nobody
  std::uint32_t holder(const Instance& i) const {
    std::lock_guard lock(mutex_);
    const auto h = held_.find(i);
    return h == held_.end() ? 0 : h->second.migration;
  }
  /// The process that is held by that name. @return 0: nobody knows
  pid_t pid_of(const Instance& i) const {
    std::lock_guard lock(mutex_);
    const auto h = held_.find(i);
    return h == held_.end() ? 0 : h->second.pid;
  }
  /// The same for a process that is frozen: it has no session then. @return 0: nobody
  std::uint32_t holder(pid_t pid) const {
    std::lock_guard lock(mutex_);
    for (const auto& [i, h] : held_)
      if (h.pid == pid) return h.migration;
    return 0;
  }

 private:
  struct Held {
    std::uint32_t migration;
    pid_t pid;
  };
  mutable std::mutex mutex_;
  std::map<Instance, Held> held_;
};

}  // namespace migr
