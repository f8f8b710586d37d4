/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * THE engine: suspend, settle what is in flight, change the path, replay, resume.
 * Live migration (source and restored side), its partner, and later failover and
 * fail-back are callers of the same steps. states.h has the table of arcs.
 *
 * Thread: the control thread only, with the Registry's lock held, except drain(),
 * which gives it away and takes it itself while it looks. All return 0 or a positive errno and
 * leave a sentence in `why`.
 */
#ifndef MIGR_SWITCHOVER_H
#define MIGR_SWITCHOVER_H

#include <optional>
#include <span>
#include <string>
#include <vector>
#include "../shadow.h"
#include "../../include/migr/proc_wire.h"
#include "states.h"

namespace migr::switchover {

using Qps = std::span<QpShadow* const>;

/// The state of the process as a whole, for HELLO.
migr_proc_state process_state();

/// Raises the flags. Sends are kept from here on, but threads that passed the check may still be on their way.
/// Adds IBV_ACCESS_REMOTE_WRITE where the partner's drain marker needs it, for good.
int suspend(Qps qps, std::string& why);

/// The other ends of these connections are gone: suspended, and to ERR, so that drain() does not wait for their retries.
int give_up(Qps qps, std::string& why);

/// Waits until nothing is in flight on the send queues; completions go to the fake CQs. To be called only after every
/// thread was seen outside. On ETIMEDOUT everything stays suspended and `stats` says what is missing.
/// Source: MigrRDMA §3.4 (wait-before-stop); differs: one marker per QP instead of counters, which goes to the other end only if
/// something is in flight.
/// @param held  the Registry's lock, under which `qps` were found: the application may destroy some as soon as it is given away
int drain(std::unique_lock<std::mutex> held, Qps qps, unsigned limit_ms, std::vector<migr_drain_stat>& stats, std::string& why);

/// A drain has not ended in time: can these connections be cut, so that what is left is replayed on the new path?
/// @return 0, or why not. Nothing is changed.
int check_cut(Qps qps, std::string& why);
/// Cuts them: the path executes nothing any more, neither its own work requests nor the other end's. What had not been
/// completed is kept. RC only. @param out the next PSN that the path would have executed
int cut(Qps qps, std::vector<migr_qp_psn>& out, std::string& why);
/// Both ends were cut. @param psns what cut() has said at the other end: what was executed there completes, the rest is
/// kept before what was posted since the suspension. Nothing is executed twice; see docs/protocol.md.
int settle(Qps qps, std::span<const migr_qp_psn> psns, std::vector<migr_replay_stat>& out, std::string& why);

/* Memory is copied ahead while NICs go on writing to it: what follows says where they may have. See tracking.h. */

/// Work requests of these QPs are noted from now on; threads may still be inside a call that passed the check before.
/// @param here  where they write to memory of this process, and those of all its QPs are named; else to the other ends'
/// @return EOPNOTSUPP: with what the process has that is not possible
int track(Qps qps, bool here, std::string& why);
/// Every thread was seen outside: notes what lies in their queues, too. Takes the Registry's lock itself.
int note_queues(unsigned limit_ms, std::string& why);
/// They are drained: what was noted, and no more is. @return ESTALE: it is not all
int take_notes(std::vector<migr_nic_write>& out, std::string& why);
/// Wherever it stands.
void end_tracking();

/// Source: nothing changes any more. Last poll, outstanding receives read back, pages of registered memory touched (a
/// NIC's write does not set soft-dirty), tables and /dev/migr let go. Every QP must be drained.
/// After an error they are drained again, and send after ROLLBACK; a process without QPs runs.
int freeze(std::string& why);
/// A NIC's write does not set soft-dirty: a fault as of a write does, and changes nothing. For what is registered at FREEZE, and what
/// was when memory was copied ahead. A test leaves it out (MIGR_TEST_NO_TOUCH). @return 0, or an errno: not mapped or not writable
int touch_pages(const void* address, std::size_t length, int access);
/// The same, of memory of which parts may be gone or not writable: each page that is there and not marked as written.
/// @param own  only those that are the process's own: none of a file, and no shared one
/// @return false: one of them cannot be
bool touch_unmarked(const void* address, std::size_t length, bool own = false);
/// What a NIC may write to.
constexpr int kWritable = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
/// Before anything is stopped: memory that is registered and that FREEZE, or the destination, would not find any more. Empty: there is
/// none. Caller holds the Registry's lock.
std::string lost_memory();

/// Partner: a spare real QP per vQP, same PD, CQs and SRQ, in INIT.
int create_spares(Qps qps, std::vector<migr_qp_spare>& out, std::string& why);
/// Partner: to RTS towards the restored side.
int connect_spare(QpShadow& qp, const migr_qp_connect& to, std::string& why);
/// Partner: outstanding receives go to the spare, which becomes the path. Sends stay kept. Can be undone.
int switch_to_spare(Qps qps, std::string& why);
/// What the application has changed of the new path since, without another state, the old one has if rollback() takes it up again.
void change_old_path(QpShadow& q, ibv_qp_attr& attr, int mask);

/// Restored side: adopts the new objects, attaches to migr.ko, registers memory, posts the receives.
/// @param out every MR with remote access: virtual and new physical rkey, by context (MIGR_KEY_CONTEXT)
int rebind(std::span<const migr_handle_map> maps, std::vector<migr_key_map>& out, std::string& why);
/// What rebind() has answered, again.
int rebound_keys(std::vector<migr_key_map>& out);
/// Of one context: memory of another device has names of its own.
void keys_of(const Context& context, std::vector<migr_key_map>& out);

/// Partner: the restored side's memory has these keys now.
int set_remote_keys(Qps qps, std::span<const migr_key_map> keys, std::string& why);

/// Replays kept sends in order, lets the application on. The old paths are left to destroy_old_paths().
int resume(Qps qps, std::vector<migr_resume_stat>& out, std::string& why);

/// The real QPs that resume() has put aside, some at a time: destroying thousands takes a while, so migrd is answered before, and others get the lock in between.
/// @return there are more
bool destroy_old_paths();

/// A QP that is to be destroyed: what it has completed goes to the fake CQs, as long as its number has a name and its windows are known.
void name_completions(const QpShadow& q);

/// Its queues are no more, or empty: what was posted there in the name of the engine does not complete any more.
void forget_posted(const QpShadow& q);

/// Partner: the path before SWITCH and CUT stands again, with its receives and windows; still suspended. rollback() does this, too:
/// by itself it lets both ends have it before either sends.
int take_old_paths(std::string& why);

/// From any state back to the path before: spares destroyed, receives moved back, kept sends replayed there.
/// Frozen, and still so after an error: there was no room to attach to migr.ko again, and nothing else has been done; to be called once more.
int rollback(std::string& why);

/* ---- to another link of this host: no migrd and no look at threads. docs/failover.md */

/// A path on another link, ready to send.
struct LinkPath {
  ibv_qp* qp;
  const ibv_context_ops* ops;
  const migr_key_entry* keys;
  QpShadow::Ring sends, receives;
};

/// Sends are kept, all else goes on: the first half of leave_path(), for who wants to wait until nothing is in flight.
/// Undone by resume().
int withhold(QpShadow& q, std::string& why);
/// The same, and no long wait for ibv_wr_* sessions: the thread of one may be waiting for the Registry's lock. @return false: one is open on
/// the path, and none begins there any more. To be asked again, or undone
bool begin_to_withhold(QpShadow& q);
/// Who posts does it under the lock from now on (kTrapped), and sessions that begin are kept. One that is open on the path follows q.target,
/// too, so none may be. @return false: one does not end within `limit_ms`, and all is as it was
bool trap_posts(QpShadow& q, unsigned limit_ms);
/// Suspends q and cuts it. The old path stays in ERR. Also from switch_to_link(), when the new path fails before anything
/// was settled: then that of the path before is still to be.
struct Leaving {
  links::Side side;  ///< that the path is on
  bool resend;       ///< WRITEs may be done again; READs always may
  bool unique_swap;  ///< so may CAS
};
int leave_path(QpShadow& q, const Leaving& how, std::string& why);
/// Receives that were not used go to the path on the other link, which becomes q's: receives from now on, sends
/// when it is resumed. The old one is the caller's.
int switch_to_link(QpShadow& q, const LinkPath& to, std::string& why);
/// After leave_path(), done or failed: there is no other path. The application gets the errors, and q goes on in ERR.
/// If leave_path() failed completions that were taken out are the caller's to give back before.
/// @param peer_psn  what the other end would have executed next, if it executes nothing more: that much completes before the errors
int give_up_path(QpShadow& q, std::string& why, std::optional<std::uint32_t> peer_psn = {});
/// Outside of a switchover: q is served by `path`, a QP of its own link, with its own names again.
void take_back_path(QpShadow& q, ibv_qp* path);
/// Outside of a switchover, in a thread of the application: a path that is in RTS for the partner's drain marker (responder_only) goes to
/// RTR once more, from where the application can bring it to RTS with what it wants. The other end notices nothing, unless a message
/// begins to come just then that is longer than a packet. EBUSY: messages come all the time
int back_to_rtr(QpShadow& q, std::string& why);
/// After leave_path() with nothing in flight: q has no path (QpShadow::adrift), as if it were drained. A migration, from
/// either end, gives it its next one, or switch_to_link() does; else give_up_path(). rollback() leaves it as it is.
/// @param home  the QP of its own link that it was born with, in ERR; @param bits  of its state word on that
int cast_off(QpShadow& q, ibv_qp* home, std::uint32_t bits, std::string& why);

/// The keys of receives that were read back, as the application knows them. Caller holds the Registry's lock.
void make_keys_virtual(const Context& context, std::vector<KeptReceive>& receives);

void stats(std::vector<migr_drain_stat>& out);

}  // namespace migr::switchover

#endif
