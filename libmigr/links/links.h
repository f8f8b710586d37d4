/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Backup links (docs/failover.md): what the rest of the library calls. Off unless configured; then two threads: one
 * makes on the backup link what the application has made on its own ("migr-links"; it may wait for migrd and for
 * memory to be pinned), one sees to failures ("migr-failover"; it waits for nothing but the other end's word).
 *
 * Everything here belongs to the Registry's lock, except where another one is named.
 */
#ifndef MIGR_LINKS_H
#define MIGR_LINKS_H

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../include/migr/links_wire.h"
#include "../kernel_link.h"
#include "../provider/provider.h"
#include "../shadow.h"
#include "config.h"
#include "event_bell.h"
#include "relay.h"
#include "shared_receives.h"

namespace migr::cm {
struct QpName;
}

namespace migr::links {

struct Channel;

/// A port of a device with one of its GIDs, and what we have of our own there.
struct Link {
  unsigned index = 0;
  Config::Link config;
  std::string why;  ///< not usable: why
  bool absent = false;  ///< as it was tried last there was no such device, port or GID
  bool foreign = false;  ///< of a family on which vQPs can have no paths; it is not tried again
  std::uint64_t tried_ns = 0;  ///< to open it; 0: not yet
  migr_links_cause port_down = MIGR_LINKS_CAUSE_NONE;  ///< as migrd says of its port. NONE: it is up
  std::uint64_t port_serial = 0;  ///< of what migrd has said last
  bool event_down = false;  ///< as the device says
  bool fatal = false;       ///< it has said so of itself
  std::uint64_t asked_port_ns = 0;  ///< while `event_down`
  bool said_down = false;   ///< as the application says
  bool preferred = false;  ///< as migrd says of its port
  ibv_context* ctx = nullptr;  ///< null: not open
  ibv_context_ops ops{};
  ibv_gid_entry gid{};  ///< as it was when a channel was made last
  ibv_gid_entry first_gid{};  ///< when it was opened: as soon as that is there again it is the one
  std::uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_1024;
  std::unique_ptr<KernelLink> kernel;
  ibv_comp_channel* events = nullptr;  ///< of the CQs that stand in for the application's
  ibv_pd* pd = nullptr;                ///< of the channels, as the two below
  ibv_cq* cq = nullptr;
  ibv_comp_channel* cq_events = nullptr;
  std::uint64_t looked_ns = 0;  ///< at its heartbeats

  bool down() const { return down_by() != MIGR_LINKS_CAUSE_NONE; }
  migr_links_cause down_by() const {
    return said_down ? MIGR_LINKS_CAUSE_APPLICATION : port_down != MIGR_LINKS_CAUSE_NONE ? port_down : event_down ? MIGR_LINKS_CAUSE_EVENT : MIGR_LINKS_CAUSE_NONE;
  }
};

/// What there is of a context's on one of its backup links.
struct Backup {
  Link* link = nullptr;
  migr_key_entry* key_table = nullptr;  ///< virtual key index -> physical there
  std::unordered_map<const ibv_pd*, ibv_pd*> pds;
  std::deque<MrShadow*> missing;  ///< memory of the context that is not there yet, and can be
};

/// The backups of one of the application's contexts.
struct Twin {
  Context* of = nullptr;
  Link* home = nullptr;  ///< where `of` is
  std::vector<Backup> backups;  ///< in their order: of Side n the n-1st. As many as there were at first
  Policy policy = Policy::kOff;
  Paths paths = Paths::kCached;
  Atomics atomics = Atomics::kDirect;  ///< relayed with `exact` only
  bool wants_relayed = false;          ///< as configured
  std::vector<struct Executor*> executors;
  bool backed_up = false;              ///< all connections of `of`
  bool closing = false;                ///< nothing is made any more

  Side sides() const { return static_cast<Side>(backups.size()) + 1; }
  Backup& at(Side side) { return backups[side - 1]; }  ///< not kHome
  const Backup& at(Side side) const { return backups[side - 1]; }
  Link* link(Side side) const { return side == kHome ? home : at(side).link; }
  /// What stands for the application's PD there. Null: nothing yet
  ibv_pd* pd(ibv_pd* of, Side side) const {
    if (side == kHome) return of;
    const auto found = at(side).pds.find(of);
    return found == at(side).pds.end() ? nullptr : found->second;
  }
};

/// The backups of a CQ. Of CqShadow::lock.
struct CqLink {
  struct Cq {
    Side side;
    ibv_cq* real;
    int (*real_poll)(ibv_cq*, int, ibv_wc*);
    const std::uint32_t* qpn_table;
  };
  Twin* twin = nullptr;
  std::vector<Cq> cqs;  ///< grows only; written with the Registry's lock, too
  std::unordered_map<std::uint32_t, QpLink*> qps[kMaxLinks];  ///< on it, by side and the physical numbers of all their paths
  ibv_qp* bell = nullptr;             ///< a QP in ERR on the application's CQ: what it flushes wakes whoever sleeps there
  std::vector<std::uint64_t> rings;   ///< markers of it
  std::uint64_t refused = 0;          ///< entries that make_room() could not get; of the Registry's lock

  ibv_cq* at(Side side) const {  ///< not kHome. Null: it is not there
    for (const Cq& cq : cqs)
      if (cq.side == side) return cq.real;
    return nullptr;
  }
};

/// What stands for the application's CQ there. Null: nothing yet. Of the Registry's lock
inline ibv_cq* cq_on(const CqShadow& c, Side side) { return side == kHome ? c.real : c.link ? c.link->at(side) : nullptr; }

enum class Stage : std::uint8_t {
  kMaking,    ///< there is no other path (yet): errors are the application's
  kReady,
  kDraining,  ///< ready, and on its way to the other link without a failure: sends are kept until nothing is in flight
  kChanging,  ///< cut here, or about to be; the other end's word is missing
  kBroken,    ///< the application gets its errors
};

/// One physical QP of a vQP. It is used once: what was cut is never used again.
struct Path {
  ibv_qp* qp = nullptr;
  std::uint32_t serial = 0;             ///< both ends number the paths of a link alike
  std::uint32_t psn = 0, peer_psn = 0;  ///< first that each end sends
  bool connected = false;               ///< in RTS
  QpShadow::Ring sends{}, receives{};
  bool birth = false;                   ///< that its QpLink began with
  ibv_gid_entry gid{};                  ///< of this end
};

/// A path that was cut, kept in ERR for threads that were let through before.
struct Trap {
  Path path;
  Side side;
  std::uint32_t next_send, next_receive;  ///< ring indexes: what lies there and behind was not seen yet
  bool closed = false;                    ///< it is in INIT: nothing is posted to it late
  unsigned looks = 0;                     ///< that have found it flushing
  bool flushed = false;                   ///< a look after these has not
};

/// A vQP's place on one of its links.
struct Leg {
  Link* link = nullptr;
  Path next;                 ///< not used yet
  std::uint32_t newest = 0;  ///< serial
  std::uint32_t asked = 0;   ///< round of the channel over which the other half of `next` was asked for, or told, or a path wanted; 0: of none
  std::uint64_t not_before_ns = 0;  ///< the other end could not make its half
};

/// How far an end has got: the path on which it has executed something last, and the PSN that it would have executed next.
struct Progress {
  std::uint32_t link = 0, serial = 0, psn = 0;
};

/// The backup of a vQP.
struct QpLink {
  std::uint64_t id = 0;  ///< of its process
  QpShadow* q = nullptr;
  Twin* twin = nullptr;
  migr_links_name name{}, peer{};  ///< with generations: channel.h
  migr_links_path first[2]{};  ///< paths that it began with, as others are told of them: at home; ahead, if it is
  bool told = false;           ///< published
  std::uint32_t told_links = 0;  ///< of that, where it can go, by bit
  std::uint64_t published_ns = 0, asked_ns = 0;  ///< when that was tried last; when the directory was asked for the other end
  bool ahead = false;          ///< its next path is made ahead: both ends want that
  bool pooled = false;         ///< it may be one of a pool: both ends have one
  bool begun = false;          ///< nothing has to come by the directory any more: the rest is told over channels
  bool found = false;          ///< by the directory: of the next three the other end's are known
  std::uint32_t atomics_there = 0;  ///< how the other end wants its atomics
  bool agreed = false;         ///< so whether this one relays is settled
  unsigned peer_home = 0;      ///< link that the other end was born on
  std::uint32_t peer_links = 0;  ///< where it can go, by bit; 0: it has not said so
  unsigned asked_again = 0;      ///< so often for that, since it was told something else
  ibv_gid_entry home_gid{};    ///< its address on its default link, as it was when a path was made there last
  ibv_gid_entry first_home_gid{};  ///< by which it was connected: as soon as that is there again it is the one
  std::uint32_t home_bits = 0; ///< of its state word, on the path that it began with
  Peer instance{};             ///< the process at the other end, as the directory says; zero: not known yet
  std::uint64_t greeted_ns = 0;  ///< when it was told last that this one is there
  bool unheard = false;        ///< somebody has spoken as that one, who is to say it again: told how it stands here once it is known
  std::vector<Leg> legs;       ///< by side
  std::deque<Trap> traps;
  ibv_qp* birth = nullptr;  ///< the path that it was born with, once it is no trap any more: nobody else gets its number
  std::string why;
  /* a change, docs/failover.md */
  std::uint32_t epoch = 0;  ///< the low 3 bits are the link that it led to
  std::uint32_t born_in = 0;  ///< epoch that it began in: former.h
  migr_links_cause cause = MIGR_LINKS_CAUSE_NONE;
  unsigned from = 0, tries = 0;  ///< the link that it began on; how many it went to
  Progress executed;             ///< of this end
  bool ended = false;            ///< it has given up, and executes nothing more
  bool stood_still = false;      ///< the path that was cut: nothing had come over it, and nothing of what was sent was acknowledged
  unsigned in_vain = 0;          ///< changes in a row to another path on the same link for such a one
  Progress unsettled;            ///< the path of the sends that the cut holds; psn: the first that was sent there
  struct Heard {
    std::uint32_t epoch = 0, serial = 0;  ///< epoch 0: nothing
    Progress executed;
  } heard;  ///< the last STATE
  std::uint64_t noticed_ns = 0, cut_ns = 0, told_ns = 0, deadline_ns = 0;
  std::uint64_t sessions_until_ns = 0;  ///< it is to be cut, and so long ibv_wr_* sessions on its path are waited for; 0: it is
  bool relays = false;        ///< its atomics are relayed: both ends have said so, and it is not broken
  Relay relay;
  Answers answers;
  EventBell bell;             ///< for what the device says of its path on a backup link
  /* kDraining */
  std::uint32_t drain_epoch = 0;
  bool drained_here = false, drained_there = false;
  std::uint64_t off_ns = 0;         ///< since then it takes back that it is drained, and waits for the other end's word; 0: it does not
  bool over = false;                ///< it stays where it is as soon as no session is open on its path
  bool casting_off = false;         ///< to no path at all
  std::uint64_t stay_until_ns = 0;  ///< a drain did not end, or the other end wants it here: not again before
  unsigned drains_ended = 0;        ///< without a change, since the last one
  bool led = false;                 ///< it is off its default link because the other end prefers that

  /// Innermost. Of what follows; `path` and `on` are written with the Registry's lock, too.
  std::mutex lock;
  Stage stage = Stage::kMaking;
  bool had_backup = false;
  Path path;  ///< that serves it
  Side on = kHome;
  bool wanted = false;  ///< an error has been seen
  bool late = false;    ///< something was flushed from a trap
  bool seen = false;    ///< an error of the path has reached the application
  bool own_channel = false;  ///< there is one on its link, over which a path that fails can be made anew
  std::vector<Hidden> hidden;  ///< until the cut

  Leg& leg() { return legs[on]; }
  const Leg& leg() const { return legs[on]; }
  Side sides() const { return static_cast<Side>(legs.size()); }
};

/* What the application does; the Registry's lock is held. */
void opened(Context& context);
void dropped(Context& context);  ///< before its objects are forgotten
/// @return 0, or why it is not there for a QP that is on a backup link, or goes there: a positive errno
int made(MrShadow& mr);
/// Whoever waits for that eventfd wakes. No place to be cancelled at; errno stays.
void kick(int eventfd);
void changed();                  ///< PDs, CQs, QPs: the next round looks
void modified(QpShadow& q, const ibv_qp_attr& attr, int mask);
/// The other end's memory is called otherwise on the default link than the application calls it: so it will be when `q` comes back there, too.
/// Not under q.lock. @return false: it is on another link, whose names are those of its channels
bool met(QpShadow& q);
/// Its path has failed, or is cut, and takes no attributes; the next one will. Where nobody has noticed that yet it is changed now.
bool between_paths(QpShadow& q);
/// How long a change may take.
unsigned change_limit_ms();
/// Before it is connected. ibv_modify_qp asks, too, for a second where nobody answers, and no other control call, fork or message of migrd
/// could go on meanwhile. Not under the Registry's lock. @return ETIMEDOUT, or 0: it answers, or its provider
/// asks by itself
int ask_neighbour(ibv_qp* qp, ibv_ah_attr to);
void gone(MrShadow& mr);
/// The same, but that the caller deregisters what it had on backup links.
std::vector<ibv_mr*> take_twins(MrShadow& mr);
void gone(CqShadow& cq);
void resized(CqShadow& cq);
void gone(QpShadow& q);
void gone(ibv_pd* pd);
/// Before a PD, a CQ or a device is destroyed that they may be using. Not under the Registry's lock: it may take seconds
/// (discard.h).
void wait_for_discards();
/// Before its first memory window: what is bound on its device is not on that of another link. @return false: a vQP of it is off its default
/// link, or about to leave it, or relays atomics, or is between two backups, or being migrated
bool may_give_up_backups(const Context& context);
/// After it, under the same lock.
void give_up_backups(const Context& context);
/// Before a modification that takes the QP out of its connection: it is the application's own path again.
void leave(QpShadow& q, ibv_qp_state to);
/// Before its path, which has not changed, is connected anew by ourselves: it stays in its connection, and its next backup counts on.
void step_out(QpShadow& q);
/// "" or why this process cannot be migrated, of what is known now.
std::string refusal();
/// Before a migration: nothing of the application's is on another link any more, and nothing of ours, until the Registry lets
/// changes go. Threads, directory and partners see to it; this waits for them, at most 15 s.
/// Thread: the control thread, without the Registry's lock. @return "" or why not: it goes on as before
std::string park();
/// Before its path is replaced by a migration of its partner: it has no backup until it runs again. @return "" or why not
std::string set_aside(QpShadow& q);
/// The application has ended the connection of this QP by librdmacm: its other end is told, where the default link does not work. Not
/// under the Registry's lock. @return it was told
bool tell_parted(cm::QpName qp);
/// Caller holds the Registry's lock.
void before_fork();
/// @param inherits it has contexts of its parent
void after_fork_in_child(bool inherits);

/* On the way of a completion. */

/// Caller holds c.lock. @param side it came from the CQ there. @return false: the application's own
bool take_error(CqShadow& c, const ibv_wc& wc, Side side);
/// The application has armed `c`. Caller holds c.lock. @return 0 or a positive errno
int arm(CqShadow& c, int solicited_only);
/// Wakes whoever sleeps on the channel of `c`.
int ring(CqShadow& c, std::string& why);
bool changing(const QpShadow& q);
/// That its path is in ERR is not the application's business (yet).
bool hides_errors(QpShadow& q);
bool on_backup(const QpShadow& q);
/// It has left the path that it was born with, or is about to.
bool has_changed(const QpShadow& q);
/// What threads have posted to an old path late, that is, having passed the check before the suspension. Whatever the same
/// thread has posted since is behind it, so it is asked for before that goes anywhere. Caller holds q.lock.
void late_receives(QpShadow& q, std::vector<KeptReceive>& out);
void late_sends(QpShadow& q, std::vector<KeptSend>& out);
/// They go to the new path; sends not while they are kept. @return false: it has no room for all receives
bool empty_trap(QpShadow& q);
/// What a QP translated keys by until now. It goes when no thread can be looking into it any more. Null: nothing.
void retire(std::shared_ptr<const RemoteKeys> keys);
/// A test's: memory is told of, and nobody waits until that was heard.
bool nobody_hears();
/// To the cut of `q`, which counts from now on: what was taken out before.
void hand_over(QpShadow& q);

}  // namespace migr::links

#endif
