/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What becomes of the work requests of a connection that was cut. Nothing here knows a device. */
#ifndef MIGR_REPLAY_H
#define MIGR_REPLAY_H

#include <cstdint>
#include <span>
#include <vector>

#include "../shadow.h"

namespace migr::replay {

enum class Fate : std::uint8_t {
  kDone,    ///< the other end has executed it; only the acknowledgement is missing
  kReplay,  ///< not executed, in part, or a READ, whose data is missing
  kLost,    ///< an atomic that was executed, whose answer will never come; or what may have been executed and is not to be done again
};

/// @param sends      not completed, oldest first, without gaps
/// @param mtu        of the path, bytes
/// @param next_psn   what the requester would have sent next
/// @param peer_psn   what the responder would have executed next
std::vector<Fate> fates(std::span<const QueuedSend> sends, std::uint32_t mtu, std::uint32_t next_psn, std::uint32_t peer_psn);

/// Behind the PSNs that it takes, if it was sent: of the one that is sent next.
std::uint32_t end_psn(const QueuedSend& send, std::uint32_t mtu);

/// Those that were replayed for others and did not complete, on a path that is cut again: the application's own, each with
/// the ones behind it that it was to complete for. They are taken out of `stand_ins`.
void unfold(std::vector<QueuedSend>& sends, std::vector<StandIn>& stand_ins);

/// Where it is not wanted to go by every PSN: a WRITE is done again, unless a message behind it has been received. What is not to be
/// sent twice (MIGR_SEND_ONCE) is lost.
void resend(std::span<const QueuedSend> sends, std::vector<Fate>& fates);

/// Where no two CAS have the same swap value, and only who has put it there takes it away (Varuna §3.3, unique swap values):
/// one that was executed is done again, unless something behind it has reached the word since.
void swap_again(std::span<QueuedSend> sends, std::vector<Fate>& fates);

/// Where there is no other path: in the order of the queue nothing completes any more from the first on that is not done.
void close(std::vector<Fate>& fates);

/// How many of the flushed completions belong to the send queue, and how many to the receive queue.
struct Unused {
  std::size_t sends, receives;
};
/// @param sends, receives  that had not completed when the flushing began
/// @param separate         the queues have completion queues of their own
Unused unused(const Cut& cut, std::size_t sends, std::size_t receives, bool separate);

/// `guess`, unless the wr_ids of what was flushed say otherwise: what the device did between our looks at its queues and at its
/// completions may have been counted on the wrong side.
/// @param flushed    wr_ids of the completions
/// @param sends, receives  wr_ids of the last ones in the queues, oldest first; at least flushed.size() of each, or all
Unused told_by_names(Unused guess, std::span<const std::uint64_t> flushed, std::span<const std::uint64_t> sends, std::span<const std::uint64_t> receives);

/// What is to be done, in order: completions first.
struct Plan {
  std::vector<OwedCompletion> completions;  ///< at once
  std::vector<KeptSend> replays;            ///< on the new path; one in the name of others has no wr_id yet
  std::vector<StandIn> stand_ins;           ///< for replays[at[i]]
  std::vector<std::size_t> at;
  std::size_t done = 0, lost = 0;
};
/// @param signal_all  every work request of the QP is signalled
Plan plan(std::vector<QueuedSend> sends, std::span<const Fate> fates, std::uint32_t vqpn, bool signal_all);

}  // namespace migr::replay

#endif
