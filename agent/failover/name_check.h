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
  using AtGid = std::function<Result<std::set<std::uint32_t>>(pid_t, const Gid&)>;
  AtGid own;                                 ///< numbers that this host keeps for the process, which has left with them and come back
  AtGid kept;                                ///< those that it keeps for others, which have left from there
  AtGid given;                               ///< those that QPs of others there were born with, and have
  std::function<Result<bool>(pid_t)> guest;  ///< the process has come here, and a GID may have with it
};

/// EINVAL: one is no name of a QP of this process. Else why it cannot be told. Thread: any.
/// @param[out] offending  which one
/// @param[out] bound      those that only the process itself has made names of its QPs: whoever is born with one has it
Status own_names(pid_t pid, std::span<const VqpName> names, const NameSources& from, std::size_t& offending, std::set<VqpName>& bound);

/// What migr.ko has recorded of a process here.
Result<std::vector<NameSources::Recorded>> recorded_qps(pid_t pid);
/// The same of all others, at a GID: numbers of the device that are names, too.
Result<std::set<std::uint32_t>> given_to_others(pid_t pid, const Gid& gid);

}  // namespace migr
