/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Rounds: what is missing of backups is made (shadow_verbs.cc), and what others have of it is asked of the directory. What depends on
 * something that the other end has not told yet is left for the next one, so no two processes wait for each other in a circle (SHIFT, appendix B).
 */
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "../control.h"
#include "../real.h"
#include "channel.h"
#include "directory.h"
#include "pool.h"
#include "relay.h"
#include "state.h"

namespace migr::links {

namespace {

constexpr std::uint64_t kLookUpNs = 100'000'000;  // of a round: channels are to be made, too
constexpr std::uint64_t kRests = 4, kLongestRestNs = 100'000'000;
constexpr int kFirstPauseMs = 10, kLastPauseMs = 1000;
constexpr std::uint64_t kLookAgainNs = 1'000'000'000;  // each look stops every thread for a moment
constexpr std::size_t kManyRetired = 64;
constexpr int kChannelPauseMs = 100;                                              // well within the retries of the end that is connected first
constexpr int kLastLinkPauseMs = 5000;                                            // where all that is missing is a link that one end does not have
constexpr std::uint64_t kAskAgainNs = 1'000'000'000, kSeldomNs = 15'000'000'000;  // which links the other end can go to

/// Null: none was published.
const migr_links_path* path_on(const migr_links_vqp& v, std::uint32_t link) {
  const migr_links_path* const end = v.path + std::min<std::uint32_t>(v.paths, MIGR_LINKS_MAX_LINKS);
  const migr_links_path* const found = std::find_if(v.path, end, [&](const migr_links_path& p) { return p.link == link; });
  return found == end ? nullptr : found;
}

migr_links_cause cause_of(std::uint32_t port_flags) {
  if (port_flags & MIGR_LINKS_PORT_DOWN_OPERATOR) return MIGR_LINKS_CAUSE_OPERATOR;
  if (port_flags & MIGR_LINKS_PORT_GONE) return MIGR_LINKS_CAUSE_EVENT;
  return port_flags & MIGR_LINKS_PORT_DOWN_NETLINK ? MIGR_LINKS_CAUSE_NETLINK : MIGR_LINKS_CAUSE_NONE;
}

void note_ports(const std::vector<migr_links_port>& ports) {
  std::lock_guard guard(Registry::get().lock);
  for (const migr_links_port& port : ports)
    if (Link* const link = link_of(port.device, port.port)) {
      if (port.serial < link->port_serial) continue;  // what migrd has read before it pushed the newer one
      link->port_serial = port.serial;
      link->port_down = cause_of(port.flags);
      link->preferred = port.flags & MIGR_LINKS_PORT_PREFERRED;
      if (link->down()) leave_link(*link);
    }
  kick(state()->round_fd);
}

bool wanted_to_park() {
  std::lock_guard guard(Registry::get().lock);
  return parking();
}

/// Whether somebody answers at an address of a link. The kernel asks for one that does not for a second: so one of these in a round,
/// and each the less often the more of them there are.
class Neighbours {
 public:
  void begin_round() {
    answered_.clear();
    std::erase_if(silent_, [now = now_ns()](const auto& known) { return now - known.second > kOldNs; });  // of processes that have gone
    asked_in_vain_ = false;
  }
  /// Not under the Registry's lock. @return false: nobody does, as far as that is known
  bool answer(const Link& link, const std::uint8_t (&gid)[16], std::uint16_t lid) {
    if (!link.pd) return false;
    const std::uint64_t now = now_ns();
    const Address address{link.index, std::to_array(gid)};
    if (const auto known = answered_.find(address); known != answered_.end() && now - known->second < kFreshNs) return true;
    const auto silent = silent_.find(address);
    if (asked_in_vain_ || (silent != silent_.end() && now - silent->second < kAgainNs * silent_.size())) return false;
    ibv_ah_attr to{};
    lead_to(to, link, gid, lid);
    if (!neighbour_answers(link.pd, to)) {
      answered_.erase(address);
      silent_[address] = now_ns();
      asked_in_vain_ = true;
      return false;
    }
    answered_[address] = now;
    std::erase_if(silent_, [&](const auto& s) { return s.first.first == link.index; });  // the link may work again
    return true;
  }

 private:
  using Address = std::pair<std::uint32_t, std::array<std::uint8_t, 16>>;
  static constexpr std::uint64_t kFreshNs = 5'000'000, kAgainNs = 2'000'000'000, kOldNs = 600'000'000'000;
  std::map<Address, std::uint64_t> answered_, silent_;  // when; the former in this round
  bool asked_in_vain_ = false;                          ///< in this round
};

/// All that a round needs of the directory, asked without the lock.
class Round {
 public:
  explicit Round(Directory& directory) : directory_(directory) {}
  bool half_a_channel() const { return half_a_channel_; }
  /// How long the last look at all vQPs has taken; 0: there are few.
  std::uint64_t locked_ns() const { return locked_ns_; }
  /// An end does not have all links that the other one has: it may come to have them, and nobody says so.
  bool lacks_links() const { return lacks_links_; }
  /// @return something is still missing that others may tell
  bool run() {
    lacks_links_ = false;
    if (wanted_to_park()) {
      make_awaited_memory();
      look_for_threads();
      look_at_ways_home();
      if (leave_links(directory_)) return true;
      stay_parked();
      look_again_ns_ = 0;  // the clock may be another host's
    }
    bool again;
    {
      std::unique_lock guard(Registry::get().lock);
      state()->session_open = false;
      make_all(guard);
      again = state()->session_open || !links_are_open();
      std::vector<migr_links_vqp_state> others;
      if (state()->qps.empty() && state()->to_withdraw.empty() && last_states_.empty() && last_others_.empty() && (tell_of_others(others), others.empty())) return again;
    }
    const unsigned life = directory_.life();
    note_answers(life);
    if (!life) return true;
    if (std::exchange(life_, life) != life) forget_told();
    begun_ns_ = now_ns();
    neighbours_.begin_round();
    tell();
    look_up();
    make_channels();
    const bool waiting = finish();
    return look_for_threads() || waiting || again;
  }

 private:
  /// What is missing. The application's own calls and the failover thread want the lock, too.
  static void make_all(std::unique_lock<std::mutex>& guard) {
    constexpr std::uint64_t kTurnNs = 1'000'000;
    constexpr std::chrono::microseconds kOthersTurn{50};
    std::uint64_t since = now_ns();
    while (!parking() && make_next(guard)) {
      if (now_ns() - since < kTurnNs) continue;
      guard.unlock();
      std::this_thread::sleep_for(kOthersTurn);
      guard.lock();
      since = now_ns();
    }
  }

  /// Before a migration: for changes that have begun. Nothing else is made any more.
  static void make_awaited_memory() {
    std::unique_lock guard(Registry::get().lock);
    while (state()->memory_awaited && make_next_memory(guard)) {}
  }

  static void note_answers(bool answers) {
    std::lock_guard guard(Registry::get().lock);
    state()->directory_answers = answers;
  }

  void forget_told() {
    std::lock_guard guard(Registry::get().lock);
    for (QpLink* l : state()->qps) l->told = false;
    for (Link& link : state()->links) link.port_serial = 0;
    last_states_.clear();
    last_others_.clear();
    last_links_.clear();
  }

  /// Of those, some that were tried longest ago: whoever is refused, or unknown, keeps nobody else back. Caller holds the lock.
  template <class One, class Wanted>
  std::vector<One*> next_few(const std::vector<One*>& all, std::uint64_t One::*tried_ns, std::size_t most, Wanted&& wanted) const {
    std::vector<One*> few;
    for (One* one : all)
      if (one->*tried_ns < begun_ns_ && wanted(*one)) few.push_back(one);
    const std::size_t n = std::min(most, few.size());
    std::partial_sort(few.begin(), few.begin() + static_cast<std::ptrdiff_t>(n), few.end(), [&](const One* a, const One* b) { return a->*tried_ns < b->*tried_ns; });
    few.resize(n);
    for (One* one : few) one->*tried_ns = now_ns();
    return few;
  }

  void tell() {
    std::vector<migr_links_name> withdrawn;
    std::vector<migr_links_switch> ended;
    std::uint64_t dropped = 0;
    {
      std::lock_guard guard(Registry::get().lock);
      withdrawn = state()->to_withdraw;
      ended = state()->to_report.take(dropped);
    }
    if (dropped) std::fprintf(stderr, "libmigr: while migrd was away there were more changes of links than are kept: it is not told of the first %llu\n", static_cast<unsigned long long>(dropped));
    if (!withdrawn.empty()) {
      directory_.withdraw(withdrawn);
      std::lock_guard guard(Registry::get().lock);
      auto& left = state()->to_withdraw;
      left.erase(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(withdrawn.size()));
      answer_byes();
    }
    if (!ended.empty()) directory_.switched(ended);
    while (publish_some()) {}
  }

  /// @return there may be more
  bool publish_some() {
    std::vector<migr_links_vqp> records;
    std::vector<std::uint64_t> ids;
    {
      std::lock_guard guard(Registry::get().lock);
      for (const QpLink* l : next_few(state()->qps, &QpLink::published_ns, MIGR_LINKS_MAX_RECORDS / 4, [](const QpLink& l) { return !l.told || l.told_links != links_of(l); })) {
        records.push_back(record_of(*l));
        ids.push_back(l->id);
      }
    }
    if (records.empty()) return false;
    const int err = directory_.publish(records);
    if (err && err != EEXIST && err != ENOSPC && err != EINVAL) return false;
    // One that is refused takes none of the others along.
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const bool told = !err || !directory_.publish({&records[i], 1});
      std::lock_guard guard(Registry::get().lock);
      QpLink* const l = find(ids[i]);
      if (l) l->told = told, l->told_links = records[i].links;
      else if (told) state()->to_withdraw.push_back(records[i].name);  // it has gone meanwhile
      if (l && !told) l->why = "migrd does not take its name";
    }
    return true;
  }

  /// The first path on a backup link has both its halves, or had; or it needs none.
  static bool has_begun(const QpLink& l) {
    if (l.instance == Peer{} || is_to_itself(l)) return false;
    return l.epoch || l.begun || std::any_of(l.legs.begin() + 1, l.legs.end(), [](const Leg& leg) { return leg.newest || leg.next.connected; });
  }

  /// The other end was faster, and its word is missing.
  static bool wants_word(const QpLink& l) {
    return !l.found && !is_to_itself(l) && l.stage != Stage::kBroken && (l.twin->atomics == Atomics::kRelayed || l.twin->paths == Paths::kPool);
  }

  /// Where this end can go and the other one cannot.
  static bool peer_lacks_links(const QpLink& l) {
    for (Side side = 1; side < l.sides(); ++side)
      if (has_room_for(*l.twin, side, *l.q) && !is_common(l, side)) return true;
    return false;
  }
  static bool lacks_links(const QpLink& l) {
    for (Side side = 1; side < l.sides(); ++side)
      if (!has_room_for(*l.twin, side, *l.q)) return true;
    return peer_lacks_links(l);
  }
  /// The other end may not have that link any more.
  static bool lacks_channel(const QpLink& l) {
    for (Side side = kHome; side < l.sides(); ++side)
      if (wants_channel(l, side) && !standing(l, side)) return true;
    return false;
  }

  static bool asks_again(const QpLink& l) {
    if (!l.found || l.stage == Stage::kBroken) return false;
    const std::uint64_t since = now_ns() - l.asked_ns;
    return (since > kSeldomNs && lacks_channel(l)) || (since > std::min(kSeldomNs, kAskAgainNs << std::min(l.asked_again, 6u)) && peer_lacks_links(l));
  }

  void look_up() {
    while (now_ns() - begun_ns_ < kLookUpNs && look_up_some()) {}
  }

  /// @return there may be more
  bool look_up_some() {
    std::vector<migr_links_name> names;
    std::vector<std::uint64_t> ids;
    {
      std::lock_guard guard(Registry::get().lock);
      const auto is_missing = [](const QpLink& l) { return l.told && ((!(has_begun(l) && l.found) && ((l.stage == Stage::kMaking && !is_to_itself(l)) || wants_word(l))) || asks_again(l)); };
      for (const QpLink* l : next_few(state()->qps, &QpLink::asked_ns, MIGR_LINKS_MAX_RECORDS / 8, is_missing)) {
        names.push_back(without_generation(l->peer));
        ids.push_back(l->id);
      }
    }
    std::vector<migr_links_found> found;
    if (names.empty() || directory_.lookup(names, found) || found.size() != names.size()) return false;
    std::vector<std::uint32_t> reached;
    for (const migr_links_found& f : found) reached.push_back(f.status ? 0 : links_reached(f.vqp));
    std::lock_guard guard(Registry::get().lock);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      QpLink* const l = find(ids[i]);
      if (!l) continue;
      if (has_begun(*l) && l->found) {
        take_links(*l, found[i]);
        continue;
      }
      l->why = found[i].status == ENOENT ? "the other end is unknown" : found[i].status == EHOSTUNREACH ? "the directory cannot be reached"
                                                                                                        : "";
      if (found[i].status) continue;
      take_found(*l, found[i], reached[i]);
    }
    return true;
  }

  /// Of one that was found before. Who does not answer, or has been withdrawn, has said nothing else yet.
  static void take_links(QpLink& l, const migr_links_found& found) {
    const bool same = !found.status && !std::memcmp(l.instance.data(), found.instance, l.instance.size()) && found.vqp.default_link == l.peer_home;
    if (!same || found.vqp.links == l.peer_links) return (void)++l.asked_again;
    l.peer_links = found.vqp.links;
    l.asked_again = 0;
    kick(state()->failover_fd);
  }

  /// Of the paths that it has. @return a bit for each link
  std::uint32_t links_reached(const migr_links_vqp& vqp) {
    std::uint32_t reached = 0;
    for (std::uint32_t i = 0; i < std::min<std::uint32_t>(vqp.paths, MIGR_LINKS_MAX_LINKS); ++i)
      if (const migr_links_path& p = vqp.path[i]; p.link < state()->links.size() && neighbours_.answer(state()->links[p.link], p.gid, p.lid)) reached |= 1u << p.link;
    return reached;
  }

  void take_found(QpLink& l, const migr_links_found& found, std::uint32_t reached) {
    const bool begun = has_begun(l);
    l.why.clear();
    l.peer_home = found.vqp.default_link;
    l.peer_links = found.vqp.links;
    std::memcpy(l.instance.data(), found.instance, l.instance.size());
    if (is_to_itself(l)) {
      l.why = "is connected to its own process";
      return;
    }
    // Paths are known by their link and number, and that of birth would have two names.
    if (found.vqp.default_link != l.twin->home->index) {
      l.why = "its ends have different default links";
      return;
    }
    l.atomics_there = found.vqp.atomics;
    l.agreed = l.relays || l.atomics_there != MIGR_LINKS_RELAYED;
    l.found = true;
    l.pooled = l.twin->paths == Paths::kPool && found.vqp.making == MIGR_LINKS_POOL;
    if (begun) return;  // the other end was faster, and has asked for a path
    l.ahead = l.ahead && found.vqp.making == MIGR_LINKS_CACHED;
    for (Side side = 1; side < l.sides(); ++side) {
      Path& mine = l.legs[side].next;
      if (!mine.qp) continue;
      const migr_links_path* const theirs = path_on(found.vqp, l.legs[side].link->index);
      if (!l.ahead || !theirs || theirs->serial != mine.serial) {
        destroy_path(l, side, mine);
        continue;
      }
      if (!(reached & 1u << theirs->link)) l.why = "the other end does not answer on its other link";
      else connect_half(l, side, mine, *theirs, l.why);
      return;  // what has failed is tried once more in the next round
    }
    for (Side side = 1; side < l.sides(); ++side) l.begun = l.begun || is_common(l, side);
    if (!l.begun) l.why = "the other end has no such link";
  }

  /// The one on its own link tells whether that works.
  static bool wants_channel(const QpLink& l, Side side) {
    const Link& link = *l.legs[side].link;
    return has_begun(l) && l.stage != Stage::kBroken && link.ctx && !link.down() && is_common(l, side);
  }

  void make_channels() {
    std::vector<migr_links_channel> own;
    std::vector<bool> connected;
    std::map<const Link*, std::string> no_gid;  // why
    half_a_channel_ = false;
    {
      std::lock_guard guard(Registry::get().lock);
      for (QpLink* l : state()->qps) {
        for (Side side = kHome; side < l->sides(); ++side) {
          Link& link = *l->legs[side].link;
          if (!wants_channel(*l, side) || find_channel(l->instance, link)) continue;
          const Past& past = past_of(l->instance, link);
          if (past.other_version_ns && now_ns() - past.other_version_ns < kSeldomNs) {
            l->why = "the other end speaks another version";
            continue;
          }
          const auto [why, first] = no_gid.try_emplace(&link);
          if (first && (why->second = read_gid(link, link.ctx)).empty()) drop_unreachable(link);
          if (!why->second.empty()) l->why = why->second;
          else make_channel(l->instance, link, past.round + 1, l->why);
        }
      }
      for (const Channel* c : next_few(state()->channels, &Channel::asked_ns, MIGR_LINKS_MAX_RECORDS, [](const Channel& c) { return !c.up(); }))
        own.push_back(address_of(*c)), connected.push_back(c->connected);  // the other end may be a round ahead
    }
    std::vector<migr_links_channel> found;
    if (own.empty() || directory_.channel(own, found) || found.size() != own.size()) return;
    std::vector<bool> reached(own.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (connected[i] || found[i].status) continue;
      reached[i] = neighbours_.answer(state()->links[own[i].link], found[i].gid, found[i].lid);
    }
    std::lock_guard guard(Registry::get().lock);
    half_a_channel_ = true;
    for (std::size_t i = 0; i < own.size(); ++i) {
      Channel* channel = nullptr;
      for (Channel* c : state()->channels)
        if (c->qp->qp_num == own[i].qpn && c->link->index == own[i].link && !c->up()) channel = c;
      if (!channel) continue;
      std::string why;
      if (found[i].status == ESTALE && found[i].round > 0) give_up_channel(*channel, found[i].round - 1);
      else if (found[i].status == EINVAL) give_up_channel(*channel, channel->round);  // that round was told before, of another QP: pasts are forgotten
      else if (found[i].status == 0 && !channel->connected && (!reached[i] || connect_channel(*channel, found[i], why))) give_up_channel(*channel, channel->round);
    }
  }

  /// Half channels to processes that nothing is connected to any more: nobody would find them broken. The next connection
  /// may come at once.
  static void end_needless_channels() {
    constexpr std::uint64_t kAgainNs = 1'000'000'000;
    const std::uint64_t now = now_ns();
    const auto needed = [](const Channel* c) {
      for (const QpLink* l : state()->qps)
        for (Side side = kHome; side < l->sides(); ++side)
          if (l->instance == c->peer && l->legs[side].link == c->link && wants_channel(*l, side)) return true;
      return false;
    };
    for (Channel* c : std::vector(state()->channels)) {
      if (c->up() || needed(c) || !c->needed_ns) c->needed_ns = now;
      if (now - c->needed_ns < kAgainNs) continue;
      past_of(c->peer, *c->link).round = c->round;
      destroy_channel(c);
    }
  }

  void give_up_channel(Channel& channel, std::uint32_t last) {
    channel.round = last;  // the next one is one more
    channel_broke(channel);
  }

  /// vQPs of which everything is there are protected from now on. @return one is not, and may become so
  bool finish() {
    bool waiting = false;
    std::vector<migr_links_vqp_state> states, others;
    std::vector<migr_links_link> links;
    std::vector<std::uint32_t> backups(state()->links.size());
    std::vector<migr_links_channel> ended;
    {
      std::lock_guard guard(Registry::get().lock);
      const std::uint64_t begun_ns = now_ns();
      ended = forget_pasts();
      end_needless_channels();
      for (Channel* c : state()->channels) tell_keys(*c);
      for (QpLink* l : state()->qps) {
        if (l->unheard && l->found && answer_unheard(*l)) l->unheard = false;
        look_at_backup(*l);
        if (l->stage == Stage::kReady) (void)agrees(*l);  // in a change it came to that without us
        if (!trap_late(*l)) waiting = true;
        const Side next = next_side(*l);
        if (l->stage == Stage::kReady && next != l->on) {
          ++backups[l->legs[next].link->index];
          if (!is_heard(*l)) greet(*l, *standing(*l, next)), waiting = true;
        }
        waiting = waiting || is_incomplete(*l, next) || !l->told || l->told_links != links_of(*l) || wants_word(*l) || (l->found && !l->agreed && l->stage == Stage::kReady) || (l->unheard && l->stage != Stage::kBroken);
        lacks_links_ = lacks_links_ || lacks_links(*l);
        waiting = waiting || lacks_channel(*l);
        states.push_back(state_of(*l, next));
      }
      tell_of_others(others);
      lacks_links_ = lacks_links_ || !state()->refused.empty();
      waiting = fill_pools() || waiting;
      note_backed_up();
      for (const Link& link : state()->links) links.push_back(record_of(link, backups[link.index]));
      locked_ns_ = state()->qps.size() < kManyVqps ? 0 : now_ns() - begun_ns;
    }
    if (!ended.empty()) (void)directory_.end_channels(ended);  // who is not there forgets them, too
    report(links, states, others);
    return waiting;
  }

  /// Connections that have no backup, and why.
  static void tell_of_others(std::vector<migr_links_vqp_state>& others) {
    for (const QpShadow* q : Registry::get().qps) {
      const Twin* const t = q->context->twin;
      if (q->link || !t || others.size() >= MIGR_LINKS_MAX_RECORDS || !connected_by_application(*q)) continue;
      const ibv_gid& gid = is_known(q->birth.gid) ? q->birth.gid : t->home->gid.gid;
      const std::string why = why_none(*t, *q);
      if (why.empty() || !is_known(gid)) continue;
      migr_links_vqp_state& out = others.emplace_back();
      out = {};
      std::memcpy(out.name.gid, gid.raw, sizeof out.name.gid);
      out.name.vqpn = q->vqpn();
      out.link = t->home->index;
      out.phase = MIGR_LINKS_VQP_NONE;
      std::snprintf(out.why, sizeof out.why, "%s", why.c_str());
    }
  }

  /// Before a migration, of a default link that works again.
  static void look_at_ways_home() {
    std::lock_guard guard(Registry::get().lock);
    for (QpLink* l : state()->qps)
      if (l->on != kHome) look_at_backup(*l);
  }

  /// Of its backup something is missing; where it is protected already, only the path that is made ahead.
  static bool is_incomplete(const QpLink& l, Side next) {
    return (l.stage == Stage::kMaking && !is_to_itself(l)) || (l.stage == Stage::kReady && lacks_path(l, next));
  }

  /// Atomics are not relayed to whom knows nothing of this vQP: they would wait until it does. @return false: not yet
  static bool agrees(QpLink& l) {
    if (!l.agreed && l.found && is_heard(l)) l.agreed = agree(l, l.atomics_there);
    return l.agreed;
  }

  /// A session was open on its path when the other end was met, in met(). @return false: one is still
  static bool trap_late(QpLink& l) {
    const bool free = !(l.q->state.load(std::memory_order_relaxed) & kTrapped);
    return l.stage != Stage::kReady || l.on != kHome || posts_freely(l) || !free || trap_posts(*l.q);
  }

  static void look_at_backup(QpLink& l) {
    const Side next = next_side(l);
    if (next == l.on || !is_incomplete(l, next) || !has_begun(l)) return;
    l.why.clear();
    if (!is_heard(l)) return greet(l, *standing(l, next));
    if (!agrees(l)) {
      l.why = "waits for the end of an ibv_wr_* session";
      return;
    }
    if (lacks_path(l, next)) return ask_for_path(l, next, *standing(l, next));
    if (!memory_is_there(l, next)) return;
    relieve(l);
    if (l.leg().link->down()) want_change(l);
  }

  /// Where threads were let through to an old path they have come back when all were seen outside. @return some were not
  bool look_for_threads() {
    std::vector<std::pair<std::uint64_t, std::size_t>> trapped;
    decltype(State::retired) retired;  // what is retired meanwhile, and may be one of these, is kept anew
    bool many;
    {
      std::lock_guard guard(Registry::get().lock);
      many = state()->retired.size() >= kManyRetired;
      for (const QpLink* l : state()->qps)
        if (!l->traps.empty() && l->stage != Stage::kChanging) trapped.push_back({l->id, l->traps.size()});
    }
    const std::uint64_t now = now_ns();
    if (trapped.empty() && !many) return false;
    if (now < look_again_ns_) return true;
    look_again_ns_ = now + kLookAgainNs;
    {
      std::lock_guard guard(Registry::get().lock);
      retired.swap(state()->retired);
    }
    const int err = directory_.outside(control::text_ranges());
    std::lock_guard guard(Registry::get().lock);
    if (err) return state()->retired.insert(state()->retired.begin(), retired.begin(), retired.end()), true;
    bool left = false;
    for (const auto& [id, count] : trapped)
      if (QpLink* const l = find(id)) {
        release_traps(*l, std::min(count, l->traps.size()));
        left = left || !l->traps.empty();
      }
    return left;
  }

  template <class Record>
  static bool equal(const std::vector<Record>& a, const std::vector<Record>& b) {
    return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(Record)));
  }

  void report(const std::vector<migr_links_link>& links, const std::vector<migr_links_vqp_state>& states, const std::vector<migr_links_vqp_state>& others) {
    if (!equal(links, last_links_) && !directory_.links(links)) last_links_ = links;
    if (equal(states, last_states_) && equal(others, last_others_)) return;
    if (!tell_states(states, others)) return;
    last_states_ = states;
    last_others_ = others;
  }

  /// Those that have changed; and the others last, for each packet replaces those of the one before. @return migrd has all of them
  bool tell_states(const std::vector<migr_links_vqp_state>& states, const std::vector<migr_links_vqp_state>& others) {
    const auto key = [](const migr_links_vqp_state& s) { return std::string_view(reinterpret_cast<const char*>(&s.name), sizeof s.name); };
    std::map<std::string_view, const migr_links_vqp_state*> before;
    for (const auto& s : last_states_) before[key(s)] = &s;
    std::vector<migr_links_vqp_state> changed;
    for (const auto& s : states)
      if (const auto found = before.find(key(s)); found == before.end() || std::memcmp(found->second, &s, sizeof s)) changed.push_back(s);
    if (!changed.empty() && directory_.states(changed)) return false;
    return (others.empty() && !changed.empty()) || !directory_.states(others);
  }

  Directory& directory_;
  unsigned life_ = 0;
  bool half_a_channel_ = false, lacks_links_ = false;
  Neighbours neighbours_;
  std::uint64_t begun_ns_ = 0;  ///< this round
  std::uint64_t locked_ns_ = 0;
  std::uint64_t look_again_ns_ = 0;
  std::vector<migr_links_link> last_links_;
  std::vector<migr_links_vqp_state> last_states_, last_others_;
};

}  // namespace

void run_rounds() {
  std::unique_ptr<Directory> directory;
  {
    std::lock_guard guard(Registry::get().lock);  // configured() starts this thread with it
    if (!state()) return;
    directory = make_directory(state()->config, state()->instance);
    state()->directory = directory.get();
  }
  Round round(*directory);
  const int wake = state()->round_fd;
  int pause_ms = kFirstPauseMs;
  for (;;) {
    const bool waiting = round.run();
    // Each vQP that changes its path kicks: with thousands of them the failover thread would wait for this one's looks.
    if (round.locked_ns() && !wanted_to_park())
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(kRests * round.locked_ns(), kLongestRestNs)));
    pollfd fds[] = {{.fd = wake, .events = POLLIN, .revents = 0}, {.fd = directory->fd(), .events = POLLIN, .revents = 0}};
    const int n = poll(fds, directory->fd() < 0 ? 1 : 2, waiting ? pause_ms : round.lacks_links() ? kLastLinkPauseMs
                                                                                                  : -1);
    std::uint64_t count;
    if (fds[0].revents) (void)!read(wake, &count, sizeof count);
    std::vector<migr_links_port> ports;
    bool knocked = false;
    directory->pushes(ports, knocked);
    if (!ports.empty()) note_ports(ports);
    const bool own = fds[0].revents || !ports.empty() || wanted_to_park();
    if (n > 0 && !own) poll(fds, 1, std::min(pause_ms, kChannelPauseMs));  // others knock as often as they like
    pause_ms = own ? kFirstPauseMs : std::min(2 * pause_ms, round.half_a_channel() ? kChannelPauseMs : kLastPauseMs);
  }
}

}  // namespace migr::links
