/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What is posted and waits, with everything behind it.
 *
 * Relayed atomics (docs/failover.md): an atomic is not posted to the path, where its answer can be lost with the link. It waits
 * until nothing is in flight; then it is told over a channel, by a number, and the other end's library has its own NIC execute it,
 * once. What it has found is remembered there until a higher number is told.
 *
 * What names memory of which it was not told yet how it is called on the backup link that it is on: the application has learnt of
 * it by ways of its own, and those are faster than a thread that does not get a processor.
 */
#ifndef MIGR_LINKS_RELAY_H
#define MIGR_LINKS_RELAY_H

#include <cstdint>
#include <deque>

#include "../shadow.h"

namespace migr::links {

struct Channel;
struct Link;
struct QpLink;
struct Twin;

/// The requester's part of a vQP. Of the QP's lock, unless said otherwise.
struct Relay {
  std::deque<KeptSend> sends;  ///< an atomic, or what lacks a key, and what was posted behind it
  struct Asked {
    std::uint32_t status;  ///< AtomicStatus; kNotYet: no answer
    std::uint64_t value;
  };
  std::deque<Asked> asked;     ///< of the first of `sends`
  std::uint64_t number = 1;    ///< of the first of `sends`
  std::uint64_t ask_ns = 0;    ///< not again before
  std::uint64_t since_ns = 0;  ///< that nothing but the answer, or a key, is missing; 0: something is
  const Channel* over = nullptr;  ///< that it was told over, if that stands still: compared, and no more
  std::uint32_t round = 0;        ///< of that channel
  bool watched = false;  ///< all threads that poll have seen that completions are to be looked for in the fake CQ
  bool rests = false;    ///< a migration is to begin: atomics are posted to the path
  std::uint64_t rest_until_ns = 0;  ///< of the Registry's lock
};

/// The responder's part. Of the Registry's lock.
struct Answers {
  std::uint64_t next = 1;  ///< number that was not executed yet
  struct One {
    std::uint64_t number;
    std::uint32_t status;  ///< kNotYet: it is being executed
    std::uint64_t value;
  };
  std::deque<One> all;  ///< those that may be asked for again
  bool closed = false;  ///< one was refused: nothing behind it is executed
};

/* On the way of a post. Caller holds q.lock. */

/// To the path, or behind what waits. @return 0 or a positive errno
int post_in_turn(QpShadow& q, KeptSend send);
/// The same of what its poster was told is posted: where the path has no room it waits.
void post_late(QpShadow& q, KeptSend send);
/// So many can be posted in turn. What of them would be kept is taken to go to the path.
bool has_room(QpShadow& q, std::size_t more);
/// Whether post_in_turn() would keep it.
bool has_to_wait(const QpShadow& q, const ibv_send_wr& wr);
bool has_to_wait(const QpShadow& q, const KeptSend& send);
/// Before what was kept is posted. What has to wait from there on is taken away from the end of q.kept_sends.
/// @param replays at their head, that are older than what waits
void hold_rest(QpShadow& q, std::size_t replays);
/// The path has no room but for so many of q.kept_sends: the others wait, before what waits already.
void hold_left(QpShadow& q, std::size_t posted);
/// The connection is over: what waits goes to q.kept_sends, behind `replays`.
void give_back_waiting(QpShadow& q, std::size_t replays);

/* The Registry's lock is held. */

/// Both ends' directories are known: whether it relays. @return false: not yet, an ibv_wr_* session is open on its path
bool agree(QpLink& l, std::uint32_t atomics_there);
/// "" or why its atomics are direct although the configuration says otherwise.
const char* why_direct(const QpLink& l);
/// What is due. Thread: failover. @return ms until the next look; 0: none is needed
unsigned look_at_relay(QpLink& l);
/// Atomics are posted to the path from now on, for a moment: a migration is to begin. @return nothing waits; or it is in a suspension,
/// which takes it along. So it stays until l is forgotten, whatever is posted meanwhile, if that is before the Registry's lock is given away
bool rest_relay(QpLink& l);
/// What waits will be flushed: the application is about to move its QP to ERR.
void flush_relay(QpLink& l);
/// It is no link's any more. Caller holds q.lock.
void end_relay(QpLink& l);
/// Of those that nothing executes any more nobody will learn what they have found.
void lose_answers(QpLink& l);

void got_atomic(Channel& from, const struct AtomicRecord& record);
void got_answer(Channel& from, const struct AnswerRecord& record);
/// A completion on the link's CQ that is no channel's.
void executed(Link& link, const ibv_wc& wc);
/// Those that no device could execute are tried again, as long as they are asked for. Thread: failover. @return ms until the next look; 0: none is needed
unsigned look_at_executors();
/// QPs that execute atomics. @param pd null: all
void drop_executors(Twin& t, const ibv_pd* pd);

/// A test's: what was executed is not remembered.
bool forgets_answers();

}  // namespace migr::links

#endif
