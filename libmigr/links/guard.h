/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Between two backups: a vQP that has had a backup link has none while it is migrated, or its partner is (park.cc), and until
 * the next one stands. If its path fails then, its errors are kept. The migration takes it for one that cannot be drained (cut
 * at both ends, the rest replayed on the new path), or the next backup for one that has just failed. Nobody comes: the
 * application gets the errors, as without libmigr.
 */
#ifndef MIGR_LINKS_GUARD_H
#define MIGR_LINKS_GUARD_H

#include <infiniband/verbs.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace migr {
struct CqShadow;
struct QpShadow;
}  // namespace migr

namespace migr::links {

struct QpLink;

/// An error completion of a path that has failed.
struct Hidden {
  CqShadow* cq;
  ibv_wc wc;
};

/// A part of each vQP.
struct Guard {
  std::mutex lock;  ///< behind a CQ's, before QpLink::lock. Of what follows
  bool on = false;
  bool failed = false;  ///< its path
  std::vector<Hidden> hidden;
  std::uint64_t since_ns = 0;  ///< that nobody has come: the migration is over, or the path failed after it
};

/* For the engine. The Registry's lock is held. */

bool guarded(QpShadow& q);
/// A path that cannot be drained, and no error that the application knows of.
bool failed_unseen(QpShadow& q);
/// What we have posted ourselves has failed. @return false: it has no guard, so the application will find it failed, too
bool note_failure(QpShadow& q);
/// Its connection ends: the application gets what was kept. Caller holds no CQ's lock.
void unguard(QpShadow& q);

/* For this folder. */

/// From now on. What its link has kept goes along.
void guard(QpLink& l);
/// Its backup stands: it is ready, and what was kept is the link's.
void relieve(QpLink& l);
/// The process is another one, or the vQP is about to be destroyed.
void forget_guard(QpShadow& q);
/// What was kept. Of what fails from now on its link knows, if it has one.
std::vector<Hidden> take_hidden(QpShadow& q);
/// To the application. Caller holds no CQ's lock.
void deliver(QpShadow& q, std::vector<Hidden> all);
/// The same, and who sleeps on a completion channel wakes up.
void give_back(QpShadow& q, std::vector<Hidden> all);
/// At times: whether anybody may still come for it.
void look_at_guard(QpShadow& q);

}  // namespace migr::links

#endif
