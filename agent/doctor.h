// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// `migrctl doctor`: what the facts of hosts (facts.h) mean, and what to do. Asks nobody.
#pragma once

#include <string>
#include <vector>

#include "facts.h"
#include "json.h"

namespace migr {

enum class Health { kOk, kWarning, kFailed };

struct Finding {
  std::string host;
  std::string check;
  Health health = Health::kOk;
  std::string found;
  std::string advice;  // what to do; empty: nothing
};

/// Of one host by itself. `now_s`: since 1970, by the clock of who judges.
std::vector<Finding> judge_host(const wire::HostFacts& f, std::int64_t now_s);

/// The daemon of this host. @param answer  what it says, or why it does not
Finding judge_daemon(const wire::VersionReply& own, const Result<wire::VersionReply>& answer, const std::string& config);

/// What PeerAnswer::tried is to be of: one path for each port here that is active, to the port that corresponds to it there.
std::vector<NamedPath> paths_between(const wire::HostFacts& here, const wire::HostFacts& there);

/// A peer by itself, and what is different from `here`.
std::vector<Finding> judge_peer(const wire::HostFacts& here, const PeerAnswer& peer, std::int64_t now_s);

/// The worst.
Health health_of(const std::vector<Finding>& all);

/// No line is longer than 80 columns. @param colour  escape sequences for a terminal
std::string doctor_text(const std::vector<Finding>& all, bool colour);
/// An array of {check, status, found, advice}; a check is "HOST: WHAT".
Json doctor_json(const std::vector<Finding>& all);

}  // namespace migr
