// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which names a process may publish over links.sock: those of QPs that are its own. Whoever is found by a name is connected to.
#pragma once

#include <sys/types.h>

#include <functional>
#include <set>
#include <span>
#include <vector>

#include "../status.h"
#include "link_records.h"

namespace migr {

/// What tells whose a QP is.
struct NameSources {
  struct Recorded {
    std::uint32_t vqpn, pqpn;
  };
  std::function<Result<std::vector<Recorded>>(pid_t)> recorded;  ///< by migr.ko; ENOENT: it is not loaded
  std::function<Result<std::set<std::uint32_t>>(pid_t)> made;    ///< as the kernel has them: of before migr.ko was loaded, too
  std::function<bool(const Gid&)> home;                          ///< of a device of this host
  std::function<bool(pid_t, const Gid&)> was_at;                 ///< the process has come from there, or from one that it had there
};

/// EINVAL: one is no name of a QP of this process. Else why it cannot be told. Thread: any.
/// @param[out] offending  which one
Status own_names(pid_t pid, std::span<const VqpName> names, const NameSources& from, std::size_t& offending);

/// What migr.ko has recorded of a process here.
Result<std::vector<NameSources::Recorded>> recorded_qps(pid_t pid);

}  // namespace migr
