// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Do packets pass between two hosts, before anything depends on it? What a switch or a filter between them does, no host can tell.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "status.h"
#include "wire.pb.h"

namespace migr {

/// The ends of one host, which are gone with it. Thread: one at a time.
class PathTrial {
 public:
  virtual ~PathTrial() = default;
  /// The next of the three steps of wire::TrialStep. An end that cannot take it says so itself.
  virtual Result<wire::TrialStep> step(const wire::TrialStep& request) = 0;
};

struct PathToTry {
  std::string from, to;   // GIDs, 16 bytes each
  std::uint32_t mtu = 0;  // enum ib_mtu; 1..5
};

struct PathTried {
  std::string why_not;  // it was not tried
  std::string error;    // what one end wrote did not arrive at the other
};

/// Tries them all at the same time, in both directions.
/// @param from, to  fresh ones of the two hosts @param id  of a migration that is open at both
/// @return of each path. Errors: those of a step
Result<std::vector<PathTried>> try_paths(PathTrial& from, PathTrial& to, std::uint32_t id, const std::vector<PathToTry>& paths);

/// Ends of this host, over libibverbs.
std::unique_ptr<PathTrial> trial_of_host();

}  // namespace migr
