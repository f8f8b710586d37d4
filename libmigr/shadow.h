/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Shadow objects: what the application holds instead of the provider's.
 *
 * An application's ibv_qp, ibv_cq or ibv_mr is the first member of a shadow, so
 * a cast leads from one to the other. The provider's object behind it ("real")
 * carries the physical names and may be replaced; the shadow never is. The real
 * object's qp_context / cq_context points back to its shadow.
 *
 * Ownership: a shadow belongs to the application from create to destroy.
 * Registry (below) knows them all; its lock is taken before any shadow's.
 */
#ifndef MIGR_SHADOW_H
#define MIGR_SHADOW_H

#include <infiniband/verbs.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <linux/types.h>
#include "../include/migr/proc_wire.h"
#include "../include/uapi/migr.h"
#include "links/guard.h"
#include "no_cancel.h"
#include "switchover/states.h"
#include "tracking.h"

namespace migr {

class KernelLink;
namespace switchover {
bool destroy_old_paths();
void end_tracking();
}
namespace links {  // links/links.h
struct Twin;
struct CqLink;
struct QpLink;
struct SrqLink;
/// Which of a vQP's links: the default one, that it was born on, or the n-th of its backup links. The n-th link of one end belongs with the
/// n-th of the other, whichever sides these are to them.
using Side = unsigned;
constexpr Side kHome = 0;
void changed();
}
namespace cm {
void let_go();  // cm/cm.h
}

/// Bits of a QP's state word. Zero: the direct path (state word, tail call).
/// Written under QpShadow::lock, by the control thread; read without a lock on the data path.
enum QpStateBits : std::uint32_t {
  kKeepSends = 1u << 0,        ///< suspended: sends are kept
  kKeepReceives = 1u << 1,     ///< frozen: receives are kept too
  kLogReceives = 1u << 2,      ///< switched but not resumed: receives go to the path and are noted for a rollback
  kTranslateLocal = 1u << 3,   ///< own keys have other physical values now
  kTranslateRemote = 1u << 4,  ///< the partner's keys have other physical values now
  kForced = 1u << 5,           ///< MIGR_FORCE_SWITCHED: never zero
  kOpen = 1u << 6,             ///< suspension is raised but threads were not yet seen outside (SUSPEND..DRAIN)
  kWindows = 1u << 9,          ///< its process has memory windows: windows.h. For good
  kDatagrams = 1u << 8,        ///< unconnected, and a peer has moved: datagrams.h. For good
  kTrapped = 1u << 10,         ///< who posts does it under the lock, having looked into old paths that are traps
  kRelays = 1u << 11,          ///< with kTrapped: an atomic, and all behind it, is not posted but waits (links/relay.h)
  kTracked = 1u << 12,         ///< memory is being copied ahead: who posts does it under the lock, and it is noted (tracking.h)
  kKeptSession = 1u << 7,      ///< an ibv_wr_* session is open on the keeper. Set and cleared by its thread
};

/// A session that begins is kept until it completes. kTrapped, kTracked: each post looks into the trap first, or is noted, under the lock.
constexpr std::uint32_t kSessionsKept = kKeepSends | kTrapped | kTracked;

/// Bits of a CQ's state word. Zero: direct. Written under CqShadow::lock.
enum CqStateBits : std::uint32_t {
  kFakeCq = 1u << 0,        ///< completions may wait in the fake CQ, or the control thread polls too: take the lock
  kTranslateQpn = 1u << 1,  ///< a QP on it has a physical number that is not its virtual one
  kCqForced = 1u << 2,
  kFrozenCq = 1u << 3,      ///< FREEZE..REBIND or ROLLBACK: the provider's CQ must not be touched
  kWatchedCq = 1u << 5,     ///< QPs with kDatagrams or kWindows, or receives of a kSharedSrq, complete here: kFakeCq stays. For good
  kSuspendedCq = 1u << 4,   ///< a QP on it is suspended: kFakeCq has to stay
  kRestingCq = 1u << 6,     ///< nothing can complete before a QP on it resumes: who polls leaves the processor to others
  kProtectedCq = 1u << 7,   ///< a QP on it has a backup, or may go back to RTR: who polls is noted, error completions are looked at. Alone: the direct path, and that. For good
  kLinkedCq = 1u << 8,      ///< QPs on it are served by another link: its CQ there is polled, too, and kFakeCq stays. For good
};

/// Bits of an SRQ's state word. Zero: direct. Written under SrqShadow::lock.
enum SrqStateBits : std::uint32_t {
  kSuspendedSrq = 1u << 0,  ///< a QP of the process is suspended: posts take the lock and go to the provider
  kFrozenSrq = 1u << 1,     ///< FREEZE..REBIND or ROLLBACK: receives are kept
  kTranslateSrq = 1u << 2,  ///< own keys have other physical values now
  kSrqForced = 1u << 3,
  kWatchedSrq = 1u << 4,    ///< a UD QP receives here: what is posted is noted, under the lock. For good
  kSharedSrq = 1u << 5,     ///< its QPs may have backup links: what is posted gets a name of ours, under the lock. For good
};

/// A kept send: own copy of the WR, its SGEs and its inline data. Keys are virtual.
struct KeptSend {
  ibv_send_wr wr;
  std::vector<ibv_sge> sges;
  std::vector<std::uint8_t> inline_data;  ///< if IBV_SEND_INLINE, and of an atomic write
};

/// Executed twice it does something else, and its answer tells what was there.
inline bool is_atomic(const ibv_send_wr& wr) { return wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD; }

/// A receive. Keys are virtual.
struct KeptReceive {
  std::uint64_t wr_id;
  std::vector<ibv_sge> sges;
};

/// Receives at the provider whose datagram has not come: where it will begin.
struct AwaitedDatagrams {
  struct Entry {
    std::uint64_t wr_id;
    std::uint64_t address;  ///< 0: no room for a GRH in one piece
  };
  std::mutex lock;  ///< innermost
  std::deque<Entry> entries;
  bool noted = false;  ///< from now on each receive is
};

/// Physical keys of the partner's memory: open addressing, power of two, never full. Immutable once published;
/// replaced while suspended. By index, as the tag is not of the name. A key that is not in it is the same in both worlds, or is
/// yet to be told.
class RemoteKeys {
 public:
  /// @param all on the path nothing has the application's name but what is in it
  explicit RemoteKeys(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& virtual_to_physical, bool all = false);
  /// Whether it is yet to be told what is called `vrkey` here.
  bool lacks(std::uint32_t vrkey) const noexcept { return all_ && !slot_of(vrkey).index; }
  /// The name of a physical key. Takes a while.
  std::uint32_t name_of(std::uint32_t prkey) const noexcept {
    for (const Slot& slot : slots_)
      if (slot.index && (slot.entry ^ prkey) >> 8 == 0) return slot.index << 8 | (slot.entry ^ prkey);
    return prkey;
  }
  std::uint32_t physical(std::uint32_t vrkey) const noexcept {
    const Slot& slot = slot_of(vrkey);
    return slot.index ? slot.entry ^ (vrkey & 0xff) : vrkey;
  }

 private:
  /// As in migr.ko's table: a window's tag changes with each bind, a wrong tag stays wrong.
  struct Slot {
    std::uint32_t index, entry;
  };
  /// Index 0: there is none.
  const Slot& slot_of(std::uint32_t vrkey) const noexcept {
    const std::uint32_t index = vrkey >> 8;
    std::uint32_t i = index & mask_;
    while (slots_[i].index != index && slots_[i].index != 0) i = (i + 1) & mask_;
    return slots_[i];
  }
  bool all_;
  std::uint32_t mask_;
  std::vector<Slot> slots_;
};

/// A completion that the application gets in the place of one of ours.
struct OwedCompletion {
  ibv_wc wc;
  bool signalled;
};

/// What a device ends a work request with that it gives up, the path having failed; those behind it are flushed.
inline bool gives_up(ibv_wc_status status) { return status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_LOC_QP_OP_ERR; }

/// A work request as it lies in a send queue.
struct QueuedSend {
  KeptSend send;
  std::uint64_t bytes = 0;
  std::uint32_t first_psn = 0;  ///< stale if it was never sent
  /// A READ: PSNs that it takes from there on, 0: as its length says. When only some of its answers have come it is sent again from behind those. Stale like `first_psn`
  std::uint32_t read_psns = 0;
  bool begun = false;           ///< it was sent. False also when the device is about to send it again
  bool given_up = false;        ///< by the device: it stands before all that was flushed
  bool ours = false;            ///< a drain marker
  std::optional<OwedCompletion> executed = {};  ///< on a path before: it lies in no queue and is due behind the one before it
  bool again = false;           ///< a CAS that is done once more although it was executed: its swap value is nobody else's
};

struct MrShadow;
struct CqShadow;

/// A connection whose drain did not end in time. It is cut: nothing of the old path is executed any more, on neither end,
/// and what had not been completed is here.
struct Cut {
  ibv_qp_attr attr{};          ///< of the old path, as it was connected
  std::uint32_t psn = 0;       ///< that the old path's responder would have executed next
  std::uint32_t next_psn = 0;  ///< that its requester would have sent next
  std::uint32_t pqpn = 0;
  links::Side side = links::kHome;  ///< that `pqpn` is of
  const CqShadow* send_cq = nullptr;
  bool path_failed = false;  ///< by the path's failure: of a send that was given up the completion is ours, too
  bool resend = false;       ///< WRITEs are done again, unless a message behind them has come
  bool unique_swap = false;  ///< a CAS may be done again
  /// The completions of what was not used, of each CQ under its lock; with one CQ all are in the first.
  std::vector<ibv_wc> taken_sends, taken_receives;
  std::size_t flushed() const { return taken_sends.size() + taken_receives.size(); }
  std::size_t received = 0;                ///< receives that completed while it was cut
  std::vector<std::uint64_t> drain_markers;  ///< that may lie in the send queue
  std::uint64_t send_marker = 0, receive_marker = 0;  ///< path_failed: work requests of ours behind all others; 0: not yet
  bool sends_over = false, receives_over = false;     ///< they were flushed: what comes after them was posted late
  std::size_t taken_before = 0;            ///< with one CQ: of `taken_sends`, when `receive_marker` had been flushed
  bool joined = false;                     ///< `sends` are those of a cut before
  bool told_apart = false;                 ///< path_failed: `sends` and `receives` are what was not used
  std::uint32_t late_send = 0, late_receive = 0;  ///< path_failed: ring indexes; what lies there and behind was posted late
  std::vector<QueuedSend> sends;           ///< until SETTLE: not completed; virtual keys
  std::vector<KeptReceive> receives;       ///< not used; virtual keys
  bool settled = false;                    ///< it is known how far the other end got
  bool joined_again = false;               ///< the path that was cut is connected once more, on the way back
  std::uint32_t peer_psn = 0;
  std::size_t replays = 0;                 ///< at the head of what is kept
  std::vector<OwedCompletion> errors;      ///< for the application, when it may go on
  bool lost = false;                       ///< an atomic was executed whose answer will never come: the connection breaks
};

/// A work request that is posted in the name of others: its own completion, and those of the ones behind it that were
/// executed on the old path already.
struct StandIn {
  std::uint64_t wr_id = 0;  ///< a marker's
  std::vector<OwedCompletion> owed;
  /// Of a CAS that is done again: who finds his own swap value has put it there before, and had found `compare`.
  struct Again {
    std::uint64_t compare, swap;
    std::uint64_t* result = nullptr;
  };
  std::optional<Again> again = {};
};

struct QpShadow;
struct SrqShadow;

/// Where a queue lies; null: not looked up yet. For the provider part.
struct QueueRing {
  const void* queue;
  std::uint64_t bytes;
};

struct DrainMarker {
  const QpShadow* qp;
  bool flushed = false;  ///< it has completed, but may still lie among others in the queue of a path that failed
};

/// Slots of verbs_context that name a shadow or make an object that needs one: the provider's own.
struct Slots {
#define MIGR_SLOTS(X)                                                                                         \
  X(create_qp_ex) X(open_qp) X(create_cq_ex) X(modify_cq) X(create_srq_ex) X(get_srq_num) X(post_srq_ops)     \
  X(alloc_null_mr) X(reg_dm_mr) X(advise_mr) X(modify_qp_rate_limit) X(ibv_create_flow) X(ibv_destroy_flow) \
  X(create_wq) X(destroy_wq) X(alloc_td) X(dealloc_td) X(alloc_parent_domain) X(open_xrcd) X(close_xrcd)
#define MIGR_SLOT(name) decltype(verbs_context::name) name = nullptr;
  MIGR_SLOTS(MIGR_SLOT)
#undef MIGR_SLOT
};

/// Puts the function `name` of ours into the slot of `ctx` (an ibv_context&), if the provider has one there.
#define MIGR_TAKE_SLOT(context, ctx, name)                            \
  if (verbs_context* extended = verbs_get_ctx_op(&(ctx), name)) {     \
    (context).slots.name = extended->name;                            \
    extended->name = name;                                            \
  }

/// A user context: the application holds the provider's ibv_context itself, with our functions in its ops.
struct Context {
  ibv_context* real = nullptr;
  ibv_context_ops ops{};  ///< the provider's own
  Slots slots;
  unsigned windows = 0;  ///< memory windows; under the Registry's lock
  bool had_windows = false;
  unsigned xrcds = 0;     ///< XRC domains that are open; likewise
  bool renamed = false;   ///< an MR is called otherwise than the device calls it: new queues translate from the start
  std::unique_ptr<KernelLink> kernel;  ///< never null; says itself whether migr.ko is there
  links::Twin* twin = nullptr;         ///< the same on its backup links
  std::vector<ibv_gid_entry> gids;     ///< the GIDs that the application knows: of the host where it opened the device
  bool moved = false;                  ///< it is on another one, or was
  std::uint32_t name_in_keys = 0;      ///< REBIND: MIGR_KEY_CONTEXT; 0: it has none
  std::uint32_t ctx_id() const;        ///< migr.ko's id; 0 without migr.ko
};

struct MrShadow {
  ibv_mr app;  ///< lkey, rkey: virtual. First member
  /// What libibverbs has behind each provider's ibv_mr (the kind, access flags): a WR of the direct path that binds a
  /// memory window names the shadow, and providers look there.
  std::uint32_t behind[2];
  ibv_mr* real;
  Context* context;
  int access;  ///< IBV_ACCESS_* as given
  std::uint64_t iova;
  bool movable;  ///< false: registered in a way that cannot be repeated (DM, dmabuf, imported, on demand)
  std::vector<ibv_mr*> twins;  ///< the same memory on backup links: of links::Side n the n-1st, null where it is not there
  bool told_at_home = false;  ///< peers of channels know what its rkey is called on its own link
  ibv_mr* on(links::Side side) const { return side == links::kHome ? real : side <= twins.size() ? twins[side - 1] : nullptr; }
};

struct alignas(64) CqShadow {
  union {
    ibv_cq app;
    ibv_cq_ex app_ex;
  };
  /* data path */
  alignas(64) std::atomic<std::uint32_t> state;
  ibv_cq* real;
  int (*real_poll)(ibv_cq*, int, ibv_wc*);
  const std::uint32_t* qpn_table;  ///< physical -> virtual | MIGR_QPN_VALID
  ibv_cq_ex* target;   ///< what the readers read: real_ex, or &fake_ex.ex in a session on the fake CQ
  ibv_cq_ex* real_ex;  ///< null: not made by create_cq_ex
  std::atomic<bool> ex_session;  ///< between start_poll and end_poll on the provider's CQ
  struct FakeEx {
    ibv_cq_ex ex;  ///< readers of `wc`
    ibv_wc wc;
    CqShadow* owner;
  } fake_ex;
  /* the rest */
  std::mutex lock;
  std::deque<ibv_wc> fake;  ///< fake CQ: completions taken from the provider, already virtual
  std::size_t given_back;   ///< of `fake`, from its head: where the last error lies that was hidden, and is the application's now
  std::mutex ex_lock;  ///< of the session on the fake CQ, which is one thread's at a time, as on the provider's. Before `lock`
  unsigned rests;    ///< polls in a row that found nothing under kRestingCq
  unsigned markers;  ///< drain and event markers whose completion was not seen yet
  std::vector<ibv_wc> seen_markers;  ///< for drain()
  std::unordered_map<std::uint64_t, DrainMarker> drain_markers;  ///< by wr_id, of QPs that send here: every one since the last that was executed
  std::vector<Cut*> cutting;         ///< of QPs on it whose queues are being flushed: not the application's business
  std::vector<StandIn> stand_ins;
  std::uint32_t owed_events;  ///< FREEZE: lay unread in its channel
  std::uint32_t armed;        ///< how often req_notify_cq, since the last event that was read or before
  std::uint32_t armings;      ///< how often since its creation, to see whether there was one
  bool arm_unsure;            ///< two of those may have been for one event
  std::uint32_t events_read;  ///< from the channel, since the real CQ was made
  bool solicited_only;        ///< all of those armings
  bool last_solicited_only;   ///< the last one
  std::uint64_t last_cqe_ns;  ///< CLOCK_MONOTONIC, last data completion that the engine or a locked poll took
  Context* context;
  std::vector<QpShadow*> datagram_qps;  ///< that receive here, and whose receives are noted
  const char* immovable;      ///< null, or the call of a NIC family that made it
  unsigned unacked_events;    ///< asynchronous; under Registry::events_lock
  std::uint32_t acked_before;  ///< FREEZE: of those, to libibverbs, since the real CQ was made
  bool ending;                ///< its destruction has begun: the device may have it no more
  links::CqLink* link;        ///< null: no QP on it has a backup
  std::mutex shared_lock;     ///< taken before an SRQ's. Of `shared`
  std::vector<SrqShadow*> shared;  ///< SRQs with kSharedSrq whose receives complete here; written with the Registry's lock, too
  std::atomic<bool> names_receives;  ///< there is, or was, one
  std::vector<QpShadow*> guarded;  ///< QPs on it that have, or had, a guard
};

struct alignas(64) SrqShadow {
  ibv_srq app;
  /* data path */
  alignas(64) std::atomic<std::uint32_t> state;
  ibv_srq* real;
  int (*real_post)(ibv_srq*, ibv_recv_wr*, ibv_recv_wr**);
  const migr_key_entry* key_table;
  /* the rest */
  std::mutex lock;
  Context* context;
  std::uint32_t max_wr, max_sge;  ///< as the device gave them
  /// Where its ring lies, once the queue was resized: the driver's answer to create does not tell then. 0 bytes: it does.
  std::uint64_t ring_offset, ring_bytes;
  QueueRing ring;  ///< until it is resized or made again; under `lock`
  std::vector<KeptReceive> outstanding;  ///< FREEZE: posted to the provider and not consumed
  bool reading_back;                     ///< FREEZE is at that: `outstanding` is not yet what it will be
  std::deque<KeptReceive> kept;          ///< posted since
  AwaitedDatagrams awaited;
  std::uint32_t armed;                   ///< limit that was set and whose event has not been read; under events_lock
  bool counted_here;                     ///< its receives are not where the device would count them: see links/shared_limit.h; under events_lock and `lock`
  std::uint32_t limit;                   ///< FREEZE: what the new SRQ is to be armed with; 0: not armed
  links::SrqLink* link;                  ///< null: not kSharedSrq
  std::unique_ptr<tracking::Notes> tracked;  ///< null: not tracked; under `lock`
  unsigned unacked_events;               ///< asynchronous; under Registry::events_lock
  std::uint32_t acked_before;            ///< as a CQ's
};

/// The process at the other end of a connection.
using Peer = std::array<std::uint8_t, 16>;

struct alignas(64) QpShadow {
  union {
    ibv_qp app;
    ibv_qp_ex app_ex;
  };
  /* data path */
  alignas(64) std::atomic<std::uint32_t> state;
  /// An ibv_wr_* session is open on the provider's QP, or a thread is inside wr_start. False again before the provider's
  /// wr_complete: from there on the thread counts as inside by where it is.
  std::atomic<bool> path_session;
  ibv_qp* real;
  ibv_qp_ex* target;  ///< where ibv_wr_* calls go: real_ex, or &keeper.ex under kKeptSession
  int (*real_post_send)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);
  int (*real_post_recv)(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**);
  const migr_key_entry* key_table;  ///< virtual key index -> physical
  const RemoteKeys* remote_keys;    ///< null: the partner's keys are as they were. Only by exchange_remote_keys()
  /* the rest */
  std::shared_ptr<const RemoteKeys> held_keys;  ///< `remote_keys`, which vQPs may share
  ibv_qp_ex* real_ex;  ///< null: not asked for, or the provider lacks it
  struct Keeper {
    ibv_qp_ex ex;  ///< builds WRs instead of posting them
    QpShadow* owner;
  } keeper;
  std::mutex lock;
  std::mutex session_lock;  ///< one ibv_wr_* session that is kept; never taken by the control thread
  Context* context;
  CqShadow* send_cq;
  CqShadow* recv_cq;
  ibv_qp_init_attr_ex init;  ///< as asked for; CQs and SRQ are the application's. comp_mask as given
  bool init_is_ex;           ///< made by create_qp_ex
  const char* immovable;     ///< null, or the call of a NIC family that made it
  ibv_qp_cap cap;            ///< as the device gave it
  switchover::Phase phase;
  /// Whom the application has connected to, as it named it: ibv_query_qp keeps answering so after a switchover.
  struct {
    int mask;  ///< of IBV_QP_DEST_QPN, IBV_QP_AV: what of this is known
    std::uint32_t dest_qp_num;
    ibv_ah_attr ah;    ///< with it comes the next
    ibv_mtu path_mtu;  ///< that it has set: a path may have less
    ibv_gid gid;       ///< its own, where links are backed up
  } birth;
  using Ring = QueueRing;
  Ring receive_ring{}, send_ring{};  ///< of `real`
  std::vector<KeptReceive> outstanding;  ///< FREEZE: posted to the provider and not consumed
  std::deque<KeptSend> kept_sends;
  std::deque<KeptReceive> kept_receives;
  std::deque<KeptReceive> logged_receives;  ///< posted to the spare since SWITCH
  KeptSend building;                        ///< the WR an ibv_wr_* session builds while suspended
  bool building_open;                       ///< `building` holds a WR
  std::vector<KeptSend> built;              ///< finished WRs of that session
  int build_error;                          ///< errno that wr_complete will return
  std::vector<std::pair<ibv_gid, std::uint16_t>> groups;  ///< multicast, joined
  AwaitedDatagrams awaited;
  ibv_qp* old_real = nullptr;               ///< after SWITCH: the path before, kept until RESUME
  ibv_qp_attr old_attr{};                   ///< UC, after SWITCH: how that path was connected; it is in ERR since
  bool old_path_closed = false;
  std::unique_ptr<Cut> cut;                 ///< CUT..RESUME or ROLLBACK
  ibv_qp* spare = nullptr;                  ///< after QP_CREATE: the path to come
  std::uint32_t spare_psn = 0;
  /// The path's first PSN as the other end was told it, while the application has the QP in RTR: it brings another one with RTS.
  std::optional<std::uint32_t> told_psn = {}, old_told_psn = {};  ///< the second: of the path before, after SWITCH
  int access_flags = -1;                    ///< as the application has set them last; -1: it has not
  Peer peer{}, spare_peer{};                ///< zero: not known, it never moved
  std::uint32_t peer_context = 0, spare_peer_context = 0;  ///< of that process, as its keys name it; 0: not known
  bool gone = false;                        ///< REBIND: its connection did not survive
  bool write_access_added = false;          ///< IBV_ACCESS_REMOTE_WRITE of its path is ours, and the application does not see it
  bool broken = false;                      ///< found in ERR by DRAIN: its new path goes there, too
  bool responder_only = false;              ///< the application has it in RTR; the path is in RTS for that access
  bool adrift = false;                      ///< without any path: suspended, nothing in flight, its receives in `cut`
  std::uint64_t adrift_ns = 0;              ///< since when nobody but its links can give it one
  unsigned unacked_events = 0;              ///< asynchronous; under Registry::events_lock
  std::uint32_t acked_before = 0;           ///< as a CQ's
  const ibv_qp* quiet = nullptr;            ///< a path that we have closed: its events are no news. Under events_lock
  std::uint64_t suspended_ns = 0, resumed_ns = 0, last_cqe_ns = 0;
  std::uint32_t replayed_sends = 0, replayed_receives = 0;
  links::QpLink* link = nullptr;            ///< its path on the backup link; null: it has none
  links::Guard guard{};                     ///< between two backups
  std::atomic<bool> goes_on = false;        ///< a failure of its path is not the application's business: for events, where no lock may be had
  std::unique_ptr<tracking::Notes> tracked = {};  ///< null: not kTracked

  std::uint32_t vqpn() const { return app.qp_num; }
  std::uint32_t pqpn() const { return real->qp_num; }
  ibv_qp_state app_state() const { return responder_only ? IBV_QPS_RTR : real->state; }
};

/// Caller holds q.lock. @return the ones before: a thread that posts may be looking into them, if q is not suspended
inline std::shared_ptr<const RemoteKeys> exchange_remote_keys(QpShadow& q, std::shared_ptr<const RemoteKeys> keys) {
  __atomic_store_n(&q.remote_keys, keys.get(), __ATOMIC_RELEASE);
  return std::exchange(q.held_keys, std::move(keys));
}

inline QpShadow& shadow_of(ibv_qp* qp) { return *reinterpret_cast<QpShadow*>(qp); }
inline QpShadow& shadow_of(ibv_qp_ex* qp) { return *reinterpret_cast<QpShadow*>(qp); }
inline CqShadow& shadow_of(ibv_cq* cq) { return *reinterpret_cast<CqShadow*>(cq); }
inline CqShadow& shadow_of(ibv_cq_ex* cq) { return *reinterpret_cast<CqShadow*>(cq); }
inline SrqShadow& shadow_of(ibv_srq* srq) { return *reinterpret_cast<SrqShadow*>(srq); }
/// That it receives from; null: it has receives of its own.
inline SrqShadow* srq_of(const QpShadow& q) { return q.app.srq ? &shadow_of(q.app.srq) : nullptr; }
inline MrShadow& shadow_of(ibv_mr* mr) { return *reinterpret_cast<MrShadow*>(mr); }

/// All MRs of the process, in no order. A program may have a hundred thousand, and give them back one by one.
class MrShadows {
 public:
  void add(MrShadow* mr) {
    at_[mr] = all_.size();
    all_.push_back(mr);
  }
  void remove(MrShadow* mr) {
    const auto found = at_.find(mr);
    if (found == at_.end()) return;
    all_[found->second] = all_.back();
    at_[all_.back()] = found->second;
    all_.pop_back();
    at_.erase(mr);
  }
  bool contains(const MrShadow* mr) const { return at_.contains(mr); }
  std::size_t size() const { return all_.size(); }
  MrShadow* operator[](std::size_t i) const { return all_[i]; }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

 private:
  std::vector<MrShadow*> all_;
  std::unordered_map<const MrShadow*, std::size_t> at_;
};

/// The Registry's lock in a thread of the application.
struct Held : NoCancel, std::unique_lock<std::mutex> {
  explicit Held(std::mutex& lock) : std::unique_lock<std::mutex>(lock) {}
};

/// Every shadow of the process, in creation order but for the MRs. The lock is held while an object is created or destroyed and
/// while the control thread handles one message.
struct Registry {
  std::mutex lock;
  std::vector<Context*> contexts;
  std::vector<ibv_pd*> pds;              ///< not shadowed: a PD has no name on the data path
  std::vector<ibv_pd*> parent_domains;
  std::vector<ibv_comp_channel*> channels;
  MrShadows mrs;
  /// Indexes of keys of MRs and memory windows that are gone, for which partners may still know a physical one. KEYS makes them forget.
  std::unordered_set<std::uint32_t> retired_keys;
  bool is_retired(std::uint32_t key) const { return retired_keys.contains(key >> 8); }
  std::vector<CqShadow*> cqs;
  std::vector<QpShadow*> qps;
  std::vector<SrqShadow*> srqs;
  struct Unsupported {
    std::string what;
    int count;
  };
  std::vector<Unsupported> unsupported;  ///< what cannot move and is not in the kernel's record of objects, by name
  void cannot_move(const char* what, int change = 1);  ///< caller holds the lock
  bool frozen = false;  ///< FREEZE..REBIND or ROLLBACK: handles are not valid, control-path calls wait
  bool held = false;    ///< DESCRIBE..RESUME or ROLLBACK: calls that change the record wait, too
  bool copied_ahead = false;  ///< as `moving`: memory may have been copied already
  bool unmarked = false;      ///< as long: memory has changed as no processor changes it, and cannot be marked as written: what was copied of it may be older
  bool tracking_failed = false;  ///< since the last TRACK: a QP or an SRQ that was tracked is gone, with what was noted
  /// As long: what migrd has said. Nothing: of registered memory all may have been written to.
  std::optional<std::vector<migr_memory_part>> written;
  bool moving = false;  ///< as long, and from the first DESCRIBE of a migration: nothing is on backup links
  std::vector<ibv_qp*> old_paths;  ///< since RESUME, of no QP any more, still to be destroyed
  unsigned registering = 0;   ///< calls that are in the driver, without the lock, and bring an MR or an address handle, or take an MR away
  std::uint64_t registrations = 0;  ///< such calls that have begun, and those of ibv_rereg_mr(), in which the kernel may have two MRs for one
  bool closing = false;       ///< FREEZE waits for those: nobody else goes there
  unsigned ending = 0;        ///< CQs whose destruction has begun: nobody can say whether the device has them still. And of Asking
  std::uint64_t changes = 1;  ///< of what a record says. MRs do not count: the process registers them again by itself
  std::condition_variable thawed;
  static Registry& get();
  /// Whoever waits for the lock gets it now. To unlock it is not enough: who locks it again at once is first.
  static void let_others(std::unique_lock<std::mutex>& guard) {
    constexpr timespec kPause{0, 100'000};
    guard.unlock();
    nanosleep(&kPause, nullptr);
    guard.lock();
  }
  /// Control path of the application: the lock, once nothing is frozen.
  Held enter() {
    Held guard(lock);
    thawed.wait(guard, [this] { return !frozen && !closing; });
    return guard;
  }
  /// The same for calls that make, destroy or modify what is in the record.
  Held change() {
    Held guard(lock);
    for (;;) {
      thawed.wait(guard, [this] { return !frozen && !closing && !held; });
      if (old_paths.empty() || !switchover::destroy_old_paths()) break;  // they hold PDs and CQs
      let_others(guard);
    }
    ++changes;
    return guard;
  }
  /// Caller holds the lock.
  void let_changes_go() {
    held = moving = copied_ahead = unmarked = false;
    written.reset();
    switchover::end_tracking();
    cm::let_go();
    thawed.notify_all();
    links::changed();  // of connections that were being moved
  }
  Context* context_of(const ibv_context* real) const;  ///< null: not ours. Caller holds the lock

  /// Innermost lock: asynchronous events, which come and are acknowledged while an object is being destroyed.
  std::mutex events_lock;
  std::condition_variable event_acked;
  std::vector<const ibv_context*> with_events;  ///< the contexts again
  /// The QPs, CQs and SRQs again. Of a maker that we do not stand in front of (a NIC family's own) they are the provider's.
  std::unordered_set<const void*> shadows;
  void note_shadow(const void* app) {
    std::lock_guard guard(events_lock);
    shadows.insert(app);
  }
  bool is_shadow(const void* app) {
    std::lock_guard guard(events_lock);
    return shadows.contains(app);
  }
};

/// A question of a thread of the application, or a device that it opens or closes: a checkpoint waits for its end, and no more begin.
class Asking {
 public:
  Asking() {
    auto guard = Registry::get().change();
    ++Registry::get().ending;
  }
  ~Asking() {
    std::lock_guard guard(Registry::get().lock);
    --Registry::get().ending;
    Registry::get().thawed.notify_all();
  }

 private:
  const NoCancel no_cancel_;
};

}  // namespace migr

#endif
