/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A path that fails completes all that is in flight, what is not signalled too. A CQ that overruns then loses completions without a
 * word, and which work requests were not executed cannot be told any more. */
#ifndef MIGR_LINKS_CQ_ROOM_H
#define MIGR_LINKS_CQ_ROOM_H

#include <cstdint>
#include <string>

#include "../shadow.h"

namespace migr::links {

constexpr int kOurEntries = 8;  ///< of what a cut posts behind all others, and of a bell

/* Of the Registry's lock. */

/// That may come into `c` at once, of all QPs on it: as many as their queues were said to hold.
std::uint64_t may_be_flushed(const CqShadow& c);
/// The same, or 0: no vQP on it has a backup.
std::uint64_t room_of_protected(const CqShadow& c);
/// The CQ that stands for `c` on that side, which has one, has room for it. @return "" or what of it is too small
std::string why_no_room(const CqShadow& c, Side side);
/// Enlarges it, on all sides; the application is not told. No session is open on the provider's CQ. @return false: why_refused()
bool make_room(CqShadow& c);
/// "" or what make_room() could not do, as long as that is so.
std::string why_refused(CqShadow& c);
/// A QP was made: it shares a CQ with others that have a backup, perhaps.
void share_room(const QpShadow& q);

}  // namespace migr::links

#endif
