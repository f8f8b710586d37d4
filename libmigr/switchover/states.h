/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The phases of a vQP in a switchover, and the arcs between them. Tests walk this table. */
#ifndef MIGR_SWITCHOVER_STATES_H
#define MIGR_SWITCHOVER_STATES_H

#include <cstdint>

namespace migr::switchover {

enum class Phase : std::uint8_t {
  kRunning,
  kSuspended,  ///< flags are up, threads may still be inside
  kDrained,    ///< nothing is in flight
  kFrozen,     ///< source: nothing changes; what was posted is in memory
  kRebound,    ///< restored side: new objects adopted, receives posted
  kSwitched,   ///< partner: the spare is the path, receives posted; the old path still stands. Or one on another link,
               ///< which may fail in turn
};
constexpr int kPhases = 6;

constexpr unsigned bit(Phase p) { return 1u << static_cast<unsigned>(p); }

/// Where each phase may lead. kRunning is reached by resume or, from every phase but kRebound, by rollback: the
/// restored side never goes back.
constexpr unsigned kArcs[kPhases] = {
    /* kRunning   */ bit(Phase::kSuspended),
    /* kSuspended */ bit(Phase::kDrained) | bit(Phase::kRunning),
    /* kDrained   */ bit(Phase::kFrozen) | bit(Phase::kSwitched) | bit(Phase::kRunning),
    /* kFrozen    */ bit(Phase::kRebound) | bit(Phase::kRunning),
    /* kRebound   */ bit(Phase::kRunning),
    /* kSwitched  */ bit(Phase::kRunning) | bit(Phase::kSuspended),
};

constexpr bool may_move(Phase from, Phase to) { return (kArcs[static_cast<unsigned>(from)] & bit(to)) != 0; }

constexpr const char* name(Phase p) {
  constexpr const char* kNames[kPhases] = {"running", "suspended", "drained", "frozen", "rebound", "switched"};
  return kNames[static_cast<unsigned>(p)];
}

}  // namespace migr::switchover

#endif
