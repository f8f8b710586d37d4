/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A connection of the library's own to one process at the other end, over one link. Under the Registry's lock. */
#ifndef MIGR_LINKS_CHANNEL_H
#define MIGR_LINKS_CHANNEL_H

#include <deque>
#include <map>
#include <memory>
#include <span>

#include "pool.h"
#include "state.h"

namespace migr::links {

enum MessageType : std::uint16_t { kKeysMessage = 1, kStateMessage, kPathMessage, kDrainMessage, kByeMessage, kHeardMessage, kAtomicMessage, kAnswerMessage, kSpareMessage, kTakeMessage, kWantMessage };

constexpr std::uint16_t kMessageVersion = 3;
constexpr std::size_t kMostKeys = 1u << 20;  ///< of a peer's memory on a link: as many as a process answers migrd with (control.cc)

struct MessageHead {
  std::uint16_t version, type;
  std::uint32_t count;
};

struct KeyRecord {
  std::uint32_t home, vrkey, prkey;
};

enum StateFlags : std::uint32_t {
  kGone = 1u << 0,   ///< the sender's end has given up: the application gets its errors
  kFinal = 1u << 1,  ///< with kGone: it executes nothing more, so `executed` stays as it is. Else how far it got is not known
  kParted = 1u << 2, ///< with kGone: the application has ended the connection that librdmacm has made
  kAsks = 1u << 3,   ///< no change: the sender has not heard of this vQP yet, and wants its STATE
};

/// In all of these `to` is the vQP at the receiver's end, `from` the sender's. `reserved` of both is the generation: a vQP that is connected
/// anew, after a reset, has the same name and a higher one. Of `to` it is as the sender has heard it, 0: not yet.
struct StateRecord {
  migr_links_name to, from;
  std::uint32_t epoch;   ///< of the change that has begun
  std::uint32_t serial;  ///< of the path that the sender has gone to, on the epoch's link
  Progress executed;
  std::uint32_t flags;
};

/// The sender's half of a path on the channel's link.
struct PathRecord {
  migr_links_name to, from;
  migr_links_path path;  ///< QPN 0: it cannot be made now
};

/// A path for the pool, like those of these two vQPs. The next three only where both ends have a pool (MIGR_LINKS_POOL).
struct SpareRecord {
  migr_links_name to, from;
  std::uint64_t id;
  migr_links_path path;  ///< the sender's half; QPN 0 in an answer: there is none
  std::uint32_t answer;
  std::uint32_t reserved;
};

/// The next path of these two is one of the pool.
struct TakeRecord {
  migr_links_name to, from;
  std::uint64_t id;
  std::uint32_t serial;
  std::uint32_t reserved;
};

/// The sender, who does not lead, needs a path on the channel's link.
struct WantRecord {
  migr_links_name to, from;
  std::uint32_t newest;  ///< serial that it knows
  std::uint32_t no_spare;  ///< it need not be one of the pool, or cannot
};

enum DrainFlags : std::uint32_t {
  kCastOff = 1u << 0,  ///< before a migration, to a link that does not work: without a path until then. Said over the one that is left
  kOff = 1u << 1,      ///< this drain is off, and all up to it. With `drained` it is not yet: the sender has said so before, and keeps its posts until it is answered
};

/// The sender keeps what is posted, to change its path without a failure.
struct DrainRecord {
  migr_links_name to, from;
  std::uint32_t left, epoch;  ///< that it is in, that it goes to
  std::uint32_t drained;      ///< nothing of its own is in flight any more
  std::uint32_t flags;
};

/// The answer to KEYS: they are known now.
struct HeardRecord {
  std::uint64_t messages;  ///< of keys, over this channel
};

/// The sender's process is about to be migrated: no vQP between the two is backed up any more.
struct ByeRecord {
  std::uint32_t answer;  ///< that this is so here, too
};

/// Only to who has published that it relays (MIGR_LINKS_RELAYED).
struct AtomicRecord {
  migr_links_name to, from;
  std::uint64_t number;  ///< of the sender's vQP, from 1 without gaps
  std::uint64_t known;   ///< the answers to all before this are
  std::uint64_t addr, compare_add, swap;
  std::uint32_t rkey;    ///< as the application calls it
  std::uint32_t adds;    ///< 1: FETCH_AND_ADD; 0: CMP_AND_SWP
  Progress behind;       ///< it stands behind everything before this PSN of the sender's path; nothing of that is in flight
  std::uint32_t reserved;
};

enum AtomicStatus : std::uint32_t {
  kNotYet,      ///< something before it was not executed yet: once more
  kExecuted,
  kBadAccess,   ///< as IBV_WC_REM_ACCESS_ERR
  kBadRequest,  ///< as IBV_WC_REM_INV_REQ_ERR
  kLost,        ///< no device can execute it, or none can tell whether it has
};

struct AnswerRecord {
  migr_links_name to, from;
  std::uint64_t number;
  std::uint64_t value;  ///< that was found
  std::uint32_t status;
  std::uint32_t reserved;
};

struct Channel {
  static constexpr unsigned kMessageBytes = 2048, kReceives = 32, kSends = 16;
  static constexpr int kCqes = kReceives + kSends + 16;  ///< that its link's CQ has for it
  static constexpr int kSpareCqes = 512, kFirstCqes = 1024;  ///< for what executes atomics there, and channels that have just ended; at first
  Peer peer{};
  Link* link = nullptr;
  std::uint32_t round = 1;
  ibv_qp* qp = nullptr;
  std::uint32_t psn = 0;
  std::uint64_t asked_ns = 0;  ///< when the directory was asked for the other end
  bool connected = false;  ///< in RTS: the other end's address is known
  bool heard = false;      ///< its first message has come
  bool acknowledged = false;  ///< ours has arrived
  std::uint64_t told = 0;  ///< of State::keys
  bool greeted = false;
  std::uint64_t keys_sent = 0, keys_heard = 0, keys_got = 0;  ///< messages: ours, of them those that are known there, the peer's
  std::map<std::uint32_t, std::map<std::uint32_t, std::uint32_t>> keys;  ///< of the peer's memory: by home link, vrkey -> prkey
  /// By home link and `all`: those of them that vQPs translate by. None after `keys` has changed.
  std::map<std::pair<std::uint32_t, bool>, std::shared_ptr<const RemoteKeys>> tables;
  bool keys_news = false;     ///< vQPs do not translate by all of `keys` yet, and the peer waits for HEARD
  std::vector<std::uint8_t> buffers;
  ibv_mr* mr = nullptr;
  std::uint32_t busy = 0;  ///< slots for sends, by bit
  std::deque<std::vector<std::uint8_t>> waiting;
  std::uint64_t beat_ns = 0;  ///< when the heartbeat that is out was posted; 0: none is
  std::uint64_t waits_ns = 0; ///< its answer is waited for since then
  std::uint64_t last_ns = 0;  ///< something was acknowledged
  std::uint64_t up_ns = 0;    ///< it stands since
  bool beat_now = false;      ///< whether the other end lives has to be known
  std::uint64_t doubt_ns = 0; ///< a path on its link failed then, and no heartbeat of after that was answered; 0: none did

  std::vector<Spare> spares;
  std::uint64_t spares_made = 0;
  bool led = false;           ///< the other end fills the pool: it numbers paths and says who takes which
  std::uint64_t refused_ns = 0;  ///< one of them could not make one then

  std::uint64_t needed_ns = 0;  ///< it stood, or something wanted it, then
  std::uint64_t bye_ns = 0;   ///< BYE was sent, or answered
  bool parting = false;       ///< the peer has said BYE, and what was backed up between the two is forgotten: nothing else is heard any more
  bool ended = false;         ///< and that is all that comes: it is destroyed when it has arrived

  bool up() const { return connected && heard && acknowledged; }
  /// What may be said later, or was said before, is not said now: a channel loses nothing, and behind what waits it comes late.
  bool has_room() const { return waiting.empty(); }
};

/// With the QP in INIT and its receives posted. @return null: see `why`
Channel* make_channel(const Peer& peer, Link& link, std::uint32_t round, std::string& why);
void destroy_channel(Channel* channel);
Channel* find_channel(const Peer& peer, const Link& link);
migr_links_channel address_of(const Channel& channel);
/// Whether packets find their way there. The kernel asks the neighbour, for a second where none answers, and so does whoever connects a
/// QP: with the Registry's lock, but after this the kernel knows. Not under that lock.
bool neighbour_answers(ibv_pd* pd, ibv_ah_attr to);
int connect_channel(Channel& channel, const migr_links_channel& to, std::string& why);
/// What the peer's memory of `home` is called on the channel's link. @param all see RemoteKeys
std::shared_ptr<const RemoteKeys> remote_keys(Channel& channel, std::uint32_t home, bool all);
/// What was registered since: when there is room, and before whatever is said next.
void tell_keys(Channel& channel);
void send_state(Channel& channel, const StateRecord& record);
void send_path(Channel& channel, const PathRecord& record);
void send_drain(Channel& channel, const DrainRecord& record);
void send_bye(Channel& channel, const ByeRecord& record);
void send_atomics(Channel& channel, std::span<const AtomicRecord> records);
void send_answer(Channel& channel, const AnswerRecord& record);
void send_spare(Channel& channel, const SpareRecord& record);
void send_take(Channel& channel, const TakeRecord& record);
void send_want(Channel& channel, const WantRecord& record);
/// To those whose vQPs are forgotten here, once the directory does not name these any more.
void answer_byes();
/// Without a fault.
void end_channel(Channel& channel);
/// Completions of all channels of a link. Broken ones are given to channel_broke().
void poll_channels(Link& link);
/// Posts what is due, and finds who is silent.
void heartbeats(Link& link);

}  // namespace migr::links

#endif
