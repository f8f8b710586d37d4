/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * A process that is to be migrated has nothing on other links meanwhile: what the application has made is served by a path on
 * its default link, or by none while that does not work (adrift), and the rest of it (devices, memory, channels, the
 * directory's socket) is given back. The partners do the same for their ends (BYE). After the migration, or when it is
 * undone, the rounds make it all anew.
 */
#include <algorithm>
#include <chrono>
#include <cstring>

#include "../path.h"
#include "channel.h"
#include "directory.h"
#include "state.h"

namespace migr::links {
namespace {

using Parking = State::Parking;
constexpr std::chrono::seconds kParkLimit{15};
constexpr std::uint64_t kByeAgainNs = 50'000'000;

Registry& registry() { return Registry::get(); }

/// On its default link, and no thread can be inside of an old path.
bool settled(QpLink& l) {
  const bool rests = rest_relay(l);
  return l.on == kHome && l.traps.empty() && l.stage != Stage::kChanging && l.stage != Stage::kDraining && !outlasted(l) && rests;
}
bool settled(const std::vector<QpLink*>& all) {
  return std::count_if(all.begin(), all.end(), [](QpLink* l) { return settled(*l); }) == static_cast<std::ptrdiff_t>(all.size());
}

std::string name(const QpLink& l) { return "vQPN " + std::to_string(l.name.vqpn); }

/// Broken, and not on its default link: it stays there until the application destroys or resets it.
bool is_lost(const QpLink& l) { return l.on != kHome && l.stage == Stage::kBroken; }

/// It is being changed, and the other end cannot say a word: no channel is made before a migration.
bool cut_off(const QpLink& l) {
  constexpr std::uint64_t kSoonNs = 1'000'000'000;
  if (l.stage != Stage::kChanging || now_ns() - l.noticed_ns < kSoonNs) return false;
  for (Side side = kHome; side < l.sides(); ++side)
    if (standing(l, side)) return false;
  return true;
}

/// What waiting does not change.
std::string obstacle() {
  for (const QpLink* l : state()->qps) {
    if (cut_off(*l)) return name(*l) + " is changing its link, and no channel to the other end stands: try again later";
    if (is_lost(*l)) return name(*l) + " has lost its connection, on " + l->leg().link->config.device + ": destroy or reset it";
  }
  return "";
}

std::string what_is_missing() {
  for (QpLink* l : state()->qps)
    if (!settled(*l))
      return name(*l) + (l->on != kHome ? " is on " + l->leg().link->config.device + " and could not go back to " + l->legs[kHome].link->config.device
                                        : " is changing its link, or a thread has not come back from it");
  if (std::string why = not_at_home(); !why.empty()) return why;
  return "a partner has not answered on a backup link, or migrd not on the links' socket";
}

/// From BYE on a path that fails leads to no change: the other end may have forgotten its backup, and its answer is still to come.
void guard_those_with(const Peer& peer) {
  for (QpLink* l : state()->qps)
    if (l->instance == peer && !guarded(*l->q)) guard(*l);
}

/// All is settled. @return every process at the other end of a channel has nothing more to say to us
bool said_bye() {
  bool all = true;
  for (Channel* c : state()->channels) {
    if (!c->up() || c->ended) continue;
    all = false;
    if (now_ns() - c->bye_ns < kByeAgainNs || !c->has_room()) continue;
    guard_those_with(c->peer);
    send_bye(*c, {.answer = 0});
  }
  return all;
}

void give_back() {
  State& s = *state();
  for (QpLink* l : std::vector(s.qps)) forget(*l);
  for (Channel* c : std::vector(s.channels)) end_channel(*c);
  for (Twin* t : s.twins) empty(*t);
  for (Link& link : s.links) close_link(link);
  s.keys = {};
  s.to_withdraw.clear();
}

}  // namespace

std::string refusal() { return state() ? obstacle() : ""; }

std::string park() {
  std::unique_lock guard(registry().lock);
  State* const s = state();
  if (!s) return "";
  registry().moving = true;
  if (s->parking == Parking::kParked) return "";
  s->parking = Parking::kWanted;
  s->parking_ns = now_ns();
  s->parking_why.clear();
  kick(s->round_fd);
  kick(s->failover_fd);
  s->parked.wait_for(guard, kParkLimit, [&] { return s->parking == Parking::kParked || !s->parking_why.empty(); });
  if (s->parking == Parking::kParked) return "";
  s->parking = Parking::kNo;
  registry().moving = false;
  kick(s->round_fd);
  if (!s->parking_why.empty()) return s->parking_why;
  return what_is_missing() + "; waited " + std::to_string(kParkLimit.count()) + " s";
}

namespace {

void withdraw_before_casting_off(Directory& directory) {
  std::vector<migr_links_name> names;
  const auto each = [&](auto&& f) {
    std::lock_guard guard(registry().lock);
    for (QpLink* l : state()->qps)
      if (l->told && has_to_cast_off(*l)) f(*l);
  };
  each([&](const QpLink& l) { names.push_back(without_generation(l.name)); });
  if (names.empty() || directory.withdraw(names)) return;
  each([&](QpLink& l) { l.told = std::none_of(names.begin(), names.end(), [&](const migr_links_name& n) { return same(n, l.name); }); });
}

}  // namespace

bool leave_links(Directory& directory) {
  State& s = *state();
  std::vector<migr_links_name> withdrawn;
  withdraw_before_casting_off(directory);
  {
    std::lock_guard guard(registry().lock);
    if (s.parking != Parking::kWanted) return true;
    s.parking_why = obstacle();
    if (!s.parking_why.empty()) s.parked.notify_all();
    if (!s.parking_why.empty() || !settled(s.qps) || !not_at_home().empty()) return true;
    withdrawn.swap(s.to_withdraw);
    for (QpLink* l : s.qps)
      if (std::exchange(l->told, false)) withdrawn.push_back(without_generation(l->name));
  }
  // Before BYE: the partners make their ends anew, and are not to find what is being given back.
  if (!withdrawn.empty()) directory.withdraw(withdrawn);
  std::unique_lock guard(registry().lock);
  answer_byes();  // of partners that are migrated, too
  if (s.parking != Parking::kWanted || !settled(s.qps) || !said_bye()) return true;
  if (registry().ending || !s.pinnings.empty()) return true;  // a QP may be on what is to be given back, and memory be about to come there
  give_back();
  directory.hang_up();
  // The other thread may be waiting for what was just closed.
  const std::uint64_t passes = s.passes;
  kick(s.failover_fd);
  s.parked.wait(guard, [&] { return s.passes != passes; });
  if (s.parking == Parking::kWanted) s.parking = Parking::kParked;
  s.parked.notify_all();
  return false;
}

void stay_parked() {
  std::unique_lock guard(registry().lock);
  registry().thawed.wait(guard, [] { return !registry().moving; });
  for (Past& p : state()->pasts) p.lost_ns = p.other_version_ns = 0;  // the other host has a clock of its own
  state()->parking = Parking::kNo;
}

std::string set_aside(QpShadow& q) {
  QpLink* const l = q.link;
  if (!l) return "";
  if (!settled(*l)) return "is on another link (man 7 migr-failover), or about to change it: try again later";
  forget(*l);
  return "";
}

namespace {

/// All that came over them was said of what is forgotten.
void part(const Peer& peer, const Channel& heard_over) {
  for (Channel* c : std::vector(state()->channels)) {
    if (c->peer != peer) continue;
    if (c->up() || c == &heard_over) c->parting = true;
    else end_channel(*c);
  }
}

/// The other end has forgotten its backups, and this one cannot: it is not settled any more. So it goes on over new channels.
void part_unsettled(Channel& from, const std::vector<QpLink*>& ours) {
  from.ended = true;
  from.bye_ns = now_ns();
  for (QpLink* l : ours) {
    std::lock_guard guard(l->lock);
    if (l->stage == Stage::kChanging && l->leg().link == from.link) l->wanted = true;  // what was told over it was not heard
  }
  kick(state()->round_fd);
}

}  // namespace

void answer_byes() {
  // Who says BYE will look for us again. It must not find what was just given back.
  if (!state()->to_withdraw.empty()) return;
  for (Channel* c : state()->channels) {
    if (!c->parting || c->ended) continue;
    c->ended = true;
    send_bye(*c, {.answer = 1});
  }
}

void got_bye(Channel& from, const ByeRecord& record) {
  std::vector<QpLink*> ours;
  for (QpLink* l : state()->qps)
    if (l->instance == from.peer && !is_lost(*l)) ours.push_back(l);
  // Without migrd nothing can be withdrawn, so BYE would not be answered; and who has parted hears nothing any more.
  const bool can_part = record.answer || state()->directory_answers;
  if (!can_part || !settled(ours)) {
    if (record.answer) part_unsettled(from, ours);
    return;  // else it is said again
  }
  for (QpLink* l : ours) forget(*l);
  if (record.answer) {
    from.ended = true;
    from.bye_ns = now_ns();
  } else {
    part(from.peer, from);
    answer_byes();
  }
  kick(state()->round_fd);
}

}  // namespace migr::links
