/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * SRQs whose QPs may have backup links (docs/failover.md, "Shared receive queues"). The vQPs of an SRQ change their links each by
 * itself, so its receives may have to be on several links at a time, where an SRQ of ours stands for the application's. From the
 * beginning the device knows each receive by a name of ours: then it is known where each is, whatever a device has done with it.
 *
 * A device gives back no receive of an SRQ. It can be used up: a pair of QPs of ours on that NIC, of which one sends nothing to the
 * other, that receives from the SRQ (a loop).
 */
#ifndef MIGR_LINKS_SHARED_RECEIVES_H
#define MIGR_LINKS_SHARED_RECEIVES_H

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "../shadow.h"
#include "event_bell.h"

namespace migr::links {

struct Link;
struct Twin;

/// Of SrqShadow::lock; pointers to what devices have are written with the Registry's lock, too.
struct SrqLink {
  struct Receive {
    KeptReceive of_app;
    std::uint32_t posted = 0;  ///< how often this slot was: a part of its name
    std::uint64_t order = 0;   ///< in which the application has posted them
    enum : std::uint8_t { kFree,
                          kWaiting,
                          kPosted } state = kFree;
    Side side = kHome;      ///< kPosted: there ...
    std::uint64_t nth = 0;  ///< ... and as which
  };
  /// Uses up receives of an SRQ. Of the failover thread, with the Registry's lock.
  struct Loop {
    ibv_cq* cq = nullptr;
    ibv_qp *source = nullptr, *target = nullptr;
    unsigned out = 0;     ///< sent and not completed
    bool marked = false;  ///< a receive of ours lies behind all that are to go
    std::uint64_t not_before_ns = 0;
  };
  /// The SRQ on one link.
  struct Place {
    ibv_srq* srq = nullptr;  ///< null: it is not there
    unsigned serves = 0;     ///< vQPs whose path receives here
    unsigned posted = 0;
    std::uint64_t count = 0;  ///< that were ever posted here, ...
    std::uint64_t last = 0;   ///< ... and the latest of them that has come out
    unsigned taken = 0;       ///< of `posted`, as of the last look: a later one has come out, so a message has them, or was cut with them
    /// What the next messages can get.
    unsigned left() const { return posted > taken ? posted - taken : 0; }
    std::uint32_t markers = 0;  ///< of ours that were posted here
    bool stale = false;         ///< it has receives that are posted elsewhere by now: nothing may come in here
    Loop loop;
  };
  Twin* twin = nullptr;
  std::uint64_t number = 0;  ///< a part of the names
  std::vector<Receive> all;
  std::vector<std::uint32_t> free;
  std::deque<std::uint32_t> waiting;  ///< on no device, in order
  std::uint64_t posts = 0;
  bool apart = false;  ///< several places serve
  std::uint64_t counted_ns = 0;
  std::vector<Place> at;  ///< by side
  EventBell bell;         ///< see shared_limit.h
};

/* For the rest of the library. The Registry's lock is held, unless said otherwise. */

/// It was just made, of the basic kind.
void made(SrqShadow& s);
/// Before it is destroyed, if none of the application's QPs has it.
void gone(SrqShadow& s);
void resized(SrqShadow& s);
/// A QP with an SRQ was just made.
void attached(QpShadow& q);
/// Whoever posts to it does that under the lock, for good, so that no post is late.
bool shares_receives(const QpShadow& q);
/// The path that it is born on may have an SRQ that is not usable yet. Not under the Registry's lock. @return 0 or ETIMEDOUT
int wait_for_receives(ibv_qp* qp);
/// To one of the links. Caller holds s.lock, and no more. @return 0 or a positive errno
int post(SrqShadow& s, std::uint64_t wr_id, std::span<const ibv_sge> sges);
/// Notes from now on where its receives write to, and where those that were not used do. Caller holds s.lock
void track(SrqShadow& s);
/// How many were posted and not used. Caller holds s.lock
std::size_t not_used(const SrqShadow& s);
/// It was made again, on another host, and holds nothing.
void renewed(SrqShadow& s);
/// All that is on no device, as long as a link is there for it. Caller holds s.lock. @return 0 or a positive errno
int post_waiting(SrqShadow& s);
/// Its path has changed: which vQPs of its SRQ receive where is looked at once more. Nothing without an SRQ.
void receives_may_move(const QpShadow& q);
/// What comes in there goes where it should. True without an SRQ
bool receives_are_clean(const QpShadow& q, Side side);
/// What the application calls a receive that the device calls `wr_id`. Caller holds s.lock
std::uint64_t own_name(const SrqShadow& s, std::uint64_t wr_id);
/// A completion that is the application's: wc.wr_id becomes its own. Needs no lock, and no more than c.lock is held.
/// @return false: it is nobody's, the receive is posted elsewhere by now
bool consumed(CqShadow& c, ibv_wc& wc);
/// A path that was cut has given it back. The same. @return false: it is no receive of an SRQ
bool unused(CqShadow& c, std::uint64_t wr_id);

/* For this folder. The same. */

/// What stands for it there. Null: nothing yet
ibv_srq* srq_on(const QpShadow& q, Side side);
/// Makes one that is missing. @return false: none is, or see `why`
bool make_srq(Twin& t, Side side, std::string& why);
/// "" or why a vQP with this SRQ has no backup.
std::string why_not_shared(const QpShadow& q);
/// "" or what of an SRQ is on other links yet, or on the way from there.
std::string not_at_home();
/// What is due. Thread: failover. @return ms until the next look; 0: none is needed
unsigned look_at_shared_receives();
/// All that is on other links, and loops.
void empty_shared(Twin& t);

}  // namespace migr::links

#endif
