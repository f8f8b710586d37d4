/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * A QpLink is forgotten before a migration and made anew after it. The other end may have kept its own meanwhile, in the midst of
 * a change, where no channel stood for BYE. So as long as the path is the same the next one counts on where the one before has
 * stopped: epochs, the numbers of paths and of atomics, and how far this end has got mean the same at both ends.
 */
#ifndef MIGR_LINKS_FORMER_H
#define MIGR_LINKS_FORMER_H

#include "links.h"

namespace migr::links {

/// What is left of a QpLink.
struct Former {
  std::uint32_t qpn = 0, peer_qpn = 0;  ///< physical, of its path on the default link
  Path path;                            ///< of that the numbers
  std::uint32_t epoch = 0, drain_epoch = 0;
  Progress executed;
  std::vector<std::uint32_t> newest;  ///< by side
  std::uint64_t id = 0;               ///< what executes atomics for it knows it by that
  std::uint64_t next_atomic = 1;
  Answers answers;
  bool unheard = false;  ///< meanwhile: as in QpLink
};

/* The Registry's lock is held. */

/// `l`, which is on its default link, or cast off, is about to be forgotten.
void leave_former(const QpLink& l);
/// `l` was just made, on the path of its QP: it counts on. @return false: this path has had none before
bool follow_former(QpLink& l);
/// Another one has taken over, or the connection is over.
void drop_former(const QpShadow& q);

}  // namespace migr::links

#endif
