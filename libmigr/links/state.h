/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What the files of this folder share. Of the Registry's lock, unless said otherwise. */
#ifndef MIGR_LINKS_STATE_H
#define MIGR_LINKS_STATE_H

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "../switchover/parts.h"
#include "discard.h"
#include "former.h"
#include "key_log.h"
#include "links.h"
#include "reports.h"

namespace migr::links {

constexpr std::uint32_t kNameBits = kTranslateLocal | kTranslateRemote;  ///< of a state word: all that it may say at rest
constexpr std::size_t kManyVqps = 256;  ///< fewer are looked at whenever anything happens

/// The channels of before to a process on a link.
struct Past {
  Peer peer;
  unsigned link;
  std::uint32_t round = 0;    ///< of the last one that was given up
  std::uint64_t lost_ns = 0;  ///< since when none stands, where one has stood; 0: one stands, or none has yet
  migr_links_cause lost_by = MIGR_LINKS_CAUSE_CHANNEL;  ///< how that was seen
  std::uint64_t other_version_ns = 0;  ///< the peer has said something in another version then: a new one would break as soon; 0: it has not
};

struct State {
  Config config;
  Peer instance{};
  std::deque<Link> links;
  std::vector<Twin*> twins;
  std::vector<QpLink*> qps;
  std::unordered_map<std::uint64_t, QpLink*> by_id;  ///< the same
  std::map<std::pair<Peer, std::uint32_t>, QpLink*> by_name;
  std::unordered_map<const QpShadow*, Former> formers;
  struct Refused {
    std::string why;
    std::uint64_t tried_ns;  ///< 0: it has no room on any backup link
  };
  std::unordered_map<const QpShadow*, Refused> refused;  ///< that have no QpLink: what kept it from being made
  std::vector<Channel*> channels;
  std::vector<Past> pasts;
  KeyLog keys;
  std::condition_variable heard;              ///< a peer has answered to keys, or a channel is no more
  std::deque<std::shared_ptr<const RemoteKeys>> retired;  ///< replaced; a thread that posts may be looking into it
  /// What a thread registers just now, without the lock: pinning takes its time.
  struct Pinning {
    const Twin* twin;
    const ibv_pd* pd;    ///< the application's
    const MrShadow* mr;  ///< null: it has gone meanwhile
  };
  std::vector<Pinning*> pinnings;
  std::condition_variable pinned;  ///< one of them has ended
  std::set<std::pair<const MrShadow*, Side>> refused_memory;  ///< there, when that was tried last
  bool memory_awaited = false;     ///< by a change: it goes on when there is news of that
  std::vector<migr_links_name> to_withdraw;
  Reports to_report;
  std::uint64_t next_id = 1;
  std::uint64_t forgotten = 0;  ///< of `qps`, so many have gone
  bool session_open = false;    ///< in this round: of a vQP that is to get a backup, on its ibv_cq_ex or its path
  bool receives_moved = false;  ///< receives_may_move()
  /* before a migration, park.cc */
  enum class Parking : std::uint8_t { kNo, kWanted, kParked } parking = Parking::kNo;
  std::uint64_t parking_ns = 0;        ///< it is wanted since
  std::string parking_why;             ///< it cannot be
  std::condition_variable parked;      ///< one of these three has changed
  std::uint64_t passes = 0;            ///< of the failover thread
  Discards discards;
  int round_fd = -1, failover_fd = -1;        ///< eventfds
  class Directory* directory = nullptr;       ///< of the rounds' thread
  bool directory_answers = false;             ///< when it was asked last, migrd was there
};

/// Null: not configured.
State* state();
/// A migration is about to begin, or has begun. There is a state.
inline bool parking() { return state()->parking != State::Parking::kNo; }
using switchover::now_ns;
void say(const QpShadow& q, const std::string& what);
void say(const QpLink& l, const std::string& what);

/* links.cc */
QpLink* find(const migr_links_name& name);
QpLink* find(std::uint64_t id);
/// One more, with id and name.
void keep(std::unique_ptr<QpLink> l);
bool same(const migr_links_name& a, const migr_links_name& b);
/// As migrd knows it: without a generation.
inline migr_links_name without_generation(migr_links_name name) { return name.reserved = 0, name; }
void set_stage(QpLink& l, Stage stage);
void be_at(QpLink& l, Stage stage);  ///< the same. Caller holds l.lock
/// Which contexts' connections go on without the default link.
void note_backed_up();
/// It has had another path since it was made.
inline bool has_changed(const QpLink& l) { return l.epoch != l.born_in; }
/// Its other end is this process's own, as the directory has said. It never gets a backup.
inline bool is_to_itself(const QpLink& l) { return l.instance == state()->instance; }
/// Its path is the only one that is left.
void forget(QpLink& l);
void forget(CqShadow& c);
/// Nothing of its context's is on the other link any more. Its vQPs are not.
void empty(Twin& t);
/// @param wait  is given the Registry's lock, which it gives away meanwhile; no checkpoint begins
template <class Wait>
void wait_without_lock(Wait&& wait) {
  Registry& registry = Registry::get();
  ++registry.ending;
  std::unique_lock held(registry.lock, std::adopt_lock);
  wait(held);
  held.release();
  --registry.ending;
  registry.thawed.notify_all();
}
/// What was discarded is destroyed, which may take seconds: gives the Registry's lock away meanwhile; no checkpoint begins.
void finish_discards();

/* link.cc */
/// "call: what errno says"
inline std::string errno_text(const std::string& call) { return call + ": " + std::strerror(errno); }
/// All of a device's; only one where it cannot be asked for all.
std::vector<ibv_gid_entry> gid_table(ibv_context* ctx, std::uint32_t port, std::uint32_t index);
/// The one that there was first, where it is now; else `named`, if that corresponds to it; else the one that there was last, or what corresponds to that.
/// @param named  what is at the index that links.json names; null: none. @return null: none
const ibv_gid_entry* gid_again(const std::vector<ibv_gid_entry>& all, const ibv_gid_entry& first, const ibv_gid_entry& last, const ibv_gid_entry* named = nullptr);
/// It may have another one than before, or at another index, since its port was down. @return "" or why it has none
std::string read_gid(Link& link, ibv_context* ctx);
/// That GID, at that index. Also from a thread that polls: no lock is taken. @return false: another one, or none
bool is_there(ibv_context* ctx, const ibv_gid_entry& gid);
/// What was made ahead on `link` with a GID that is not there any more, or is not the link's, is made anew.
void drop_unreachable(const Link& link);
/// @return "" or why it cannot be used
std::string open_link(Link& link);
void close_link(Link& link);
/// All that contexts have theirs on.
bool links_are_open();
Link* link_of(const std::string& device, unsigned port);  ///< null: none is configured
/// @return 0 or a positive errno
int query_port(ibv_context* ctx, unsigned number, ibv_port_attr& port);

/* memory.cc */
/// It is made on all of its context's backup links, by rounds.
void note_missing(Twin& t, MrShadow& mr);
/// Something that is missing on that link; one that fails keeps no other back. Gives the lock away in the driver. @return false: nothing is, or it failed
bool make_mr(Twin& t, Side side, std::string& why, std::unique_lock<std::mutex>& guard);
/// Memory of any of the application's contexts. Gives the lock away meanwhile. @return false: nothing is missing, or it failed
bool make_next_memory(std::unique_lock<std::mutex>& guard);
/// Of the PD of `l`: a path there can serve it.
bool memory_is_there(const QpLink& l, Side side);
/// Some of that is not there, as its device did not take it when it was tried last.
bool memory_is_refused(const QpLink& l, Side side);
/// What is missing of it, if that takes no time, with the lock: the rounds may be waiting for migrd. @return nothing is missing any more
bool make_small_memory(const QpLink& l, Side side);
/// It is tried once more, on all links.
void forget_refused_memory(const QpLink& l);
/// Until none is registered just now, of the application's PD or of all that a context has. Gives the Registry's lock away meanwhile; no checkpoint begins.
void wait_for_pinning(const ibv_pd* pd);
void wait_for_pinning(const Twin& t);

/* shadow_verbs.cc */
/// Makes one thing that is missing, or tries a vQP's backup. The lock is given away while memory is pinned. @return false: nothing is, or it failed
bool make_next(std::unique_lock<std::mutex>& guard);
/// The application has connected it, and nobody else has anything to do with it.
bool connected_by_application(const QpShadow& q);
/// Why a vQP has got no backup so far. "": it was not tried yet
std::string why_none(const Twin& t, const QpShadow& q);
/// It is gone, or about to be connected anew.
void forget_refusal(const QpShadow& q);
/// On that link is all that a path of `q` is made with. Memory may be missing.
bool has_room_for(const Twin& t, Side side, const QpShadow& q);
/// Who posts to `q` does it under its lock from now on. @return false: not now, an ibv_wr_* session is open on its path
bool trap_posts(QpShadow& q);
/// What a completion does not carry that has waited in the fake CQ.
bool reads_more(const CqShadow& c);

/* paths.cc */
bool is_known(const ibv_gid& gid);
/// By which GID it is connected now. @return false: that cannot be told
bool find_home(const QpShadow& q, QpLink& l);
/// This end's half of a path, in INIT, as the leg's next. One that was not used is given up.
bool make_half(QpLink& l, Side side, std::uint32_t serial, std::string& why);
int connect_half(QpLink& l, Side side, Path& path, const migr_links_path& to, std::string& why);
/// As the other end has to know it.
migr_links_path address_of(const QpLink& l, Side side, const Path& path);
/// In INIT, like the QP that the application has made. It is no vQP's yet.
bool create_half(QpLink& l, Side side, Path& out, std::string& why);
/// That is the leg's next from now on. One that was not used is given up; so is this one, if it cannot be.
bool adopt(QpLink& l, Side side, Path path, std::uint32_t serial, std::string& why);
/// From `link` to the other end's address on it.
void lead_to(ibv_ah_attr& ah, const Link& link, const std::uint8_t gid[16], std::uint16_t lid);
/// What was made ahead is no good any more: it gets another number.
void drop_next(QpLink& l, Side side);
/// A path that is nobody's any more.
void destroy_path(QpLink& l, Side side, Path& path);
/// Of QPs of ours: the other end may not be connected yet, or not get a processor.
constexpr std::uint8_t kOwnTimeout = 14;  // 4.096 us << 14 = 67 ms, seven times
constexpr std::uint8_t kOwnRetries = 6;   // 7 is for ever with soft-RoCE
/// In INIT.
ibv_qp* create_on(ibv_pd* pd, ibv_qp_init_attr init, unsigned port, unsigned access, std::string& why);
/// A QP that was just made, or null with errno: then that is said.
ibv_qp* to_init(ibv_qp* qp, unsigned port, unsigned access, std::string& why);
/// A QP of ours in INIT to another one of ours on the same port.
bool connect_to_own(const Link& link, ibv_qp* qp, const ibv_qp* to, std::uint32_t psn, std::string& why);

/* records.cc */
/// Where it can go, by bit. A device that has failed as a whole is not opened again, but for the application that has it.
std::uint32_t links_of(const QpLink& l);
migr_links_vqp record_of(const QpLink& l);
/// @param backups  vQPs that would go there next
migr_links_link record_of(const Link& link, std::uint32_t backups);
/// The one that is made ahead. @param next  next_side()
bool lacks_path(const QpLink& l, Side next);
/// @param next  next_side()
migr_links_vqp_state state_of(QpLink& l, Side next);

/* rounds.cc */
void run_rounds();  ///< the thread

/* change.cc */
/// @param link  an index. @return false: this vQP has no such link
bool side_of(const QpLink& l, std::uint32_t link, Side& side);
void give_up(QpLink& l, const std::string& why);
/// Its work is on that side, or on its way there.
bool needs(const QpLink& l, Side side);
/// That this end has given up, on every channel that stands. @param flags more of StateFlags. @return there is one
bool tell_gone(const QpLink& l, std::uint32_t flags = 0);
/// Also that the application has ended the connection, where librdmacm's own message would not get there. @return it was told
bool tell_parted(const QpLink& l);
/// Whom a message is about. Null: nobody
QpLink* addressee(const Channel& from, const migr_links_name& to, const migr_links_name& sender);
/// The other end has spoken to this one, by its generation: each knows of the other.
inline bool is_heard(const QpLink& l) { return l.peer.reserved; }
/// Before it counts as protected: says that it is there, and asks for the other end's word. Not more often than is of use.
void greet(QpLink& l, Channel& channel);
/// The directory has not said yet who the other end is. Anybody may speak as that one: nothing of it is done before, and the directory is asked at once. Or it
/// has no backup just now, and will have one again.
bool is_premature(const migr_links_name& to, const migr_links_name& sender);
/// The other end is known by now: it hears how it stands here, and says again what this end does not know. @return false: there is no channel yet
bool answer_unheard(const QpLink& l);
/// Asks for the other half of a path on that side, unless there is one that was not used or it has been asked for.
void ask_for_path(QpLink& l, Side side, Channel& channel);
void got_state(Channel& from, const struct StateRecord& record);
void got_path(Channel& from, const struct PathRecord& record);
void got_take(Channel& from, const struct TakeRecord& record);
void got_want(Channel& from, const struct WantRecord& record);
void got_drain(Channel& from, const struct DrainRecord& record);
void got_bye(Channel& from, const struct ByeRecord& record);
void channel_broke(Channel& channel, migr_links_cause by = MIGR_LINKS_CAUSE_CHANNEL);
/// All threads have been seen outside since `l` had so many traps: these are not needed any more.
void release_traps(QpLink& l, std::size_t count);
/// Its path has failed, or its link: it goes to another one.
void want_change(QpLink& l);
void leave_link(Link& link);  ///< it is down: it takes all its vQPs along
/// It has left its default link, or is about to.
inline bool leaves_home(const QpLink& l) { return l.on != kHome || l.stage == Stage::kChanging || l.stage == Stage::kDraining; }
/// It has given up, and a session that was open on its path in a drain still is: what is kept waits for that.
inline bool outlasted(const QpLink& l) { return l.stage == Stage::kBroken && l.over && l.q->phase == switchover::Phase::kSuspended && !l.q->adrift; }
/// The application is about to close it: a change or a drain that is going on ends, but where sends are kept and a session is open
/// on the path, which is waited for. @param forgets  what is kept
void stop_change(QpLink& l, bool forgets);
/// On the path that it was born with, or its like, by the names of that: what a thread posts late can be told apart there. Else all
/// posts take the QP's lock (kTrapped), and none is late.
bool posts_freely(const QpLink& l);
/// A migration is to begin, and the default link does not work: it casts off once the directory does not name it any more, so
/// that the other end does not find, and go to, what is being given back.
bool has_to_cast_off(const QpLink& l);
Past& past_of(const Peer& peer, const Link& link);
/// Those of processes that nothing is connected to any more. @return for Directory::end_channels()
std::vector<migr_links_channel> forget_pasts();
/// Both ends can go there, as far as the other one has said.
bool is_common(const QpLink& l, Side side);
/// What stands for messages about `l` on a side that it can go to; null: nothing.
Channel* standing(const QpLink& l, Side side);
/// Where it would go now: the first in order that is not where it is, and has a channel. None: where it is
Side next_side(const QpLink& l);
void run_failover();  ///< the thread

/* pool.cc */
void got_spare(Channel& from, const struct SpareRecord& record);

/* park.cc */
/// One step of what park() waits for. Thread: that of the rounds. @return false: it is parked
bool leave_links(class Directory& directory);
/// Until changes are let go.
void stay_parked();
/// Keys that a QP's replays and posts are translated by. Caller holds q.lock.
void set_remote_keys(QpLink& l);

}  // namespace migr::links

#endif
