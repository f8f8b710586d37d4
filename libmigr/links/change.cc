/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The change of a vQP's path: docs/failover.md, "The change of the path" and "Going back". Under the Registry's lock. */
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>

#include "../cm/cm.h"
#include "../events.h"
#include "../path.h"
#include "../real.h"
#include "channel.h"
#include "cq_room.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr unsigned kIdleMs = 1000, kTrapMs = 20, kDrainMs = 1, kSessionMs = 1, kAskAgainMs = 50;
constexpr std::uint64_t kAskPortNs = 1'000'000'000, kGreetAgainNs = 500'000'000;
constexpr std::uint64_t kLongNs = 1'000'000'000;  // no step of a change takes that long; what holds it up is worth a line
constexpr std::uint64_t kSessionLimitNs = 2'000'000'000;
constexpr std::uint64_t kDrainLimitNs = 2'000'000'000, kTellAgainNs = 100'000'000;
constexpr std::uint64_t kFirstStayNs = 2'000'000'000, kStayNs = 30'000'000'000;  // a drain costs the work up to kDrainLimitNs
constexpr unsigned kMostInVain = 8;
constexpr std::uint64_t kInVainNs = 60'000'000'000;  // what has lasted longer has not failed in a row
constexpr std::uint32_t kLinkBits = 3, kLinkMask = (1u << kLinkBits) - 1, kLastEpoch = ~0u - kLinkMask;
static_assert(kMaxLinks == 1u << kLinkBits);

std::uint32_t epoch_behind(std::uint32_t epoch, const QpLink& l, Side side) {
  return ((epoch >> kLinkBits) + 1) << kLinkBits | l.legs[side].link->index;
}

std::uint32_t next_epoch(const QpLink& l, Side side) { return epoch_behind(l.epoch, l, side); }

/// Of a change without a failure: what the other end has said of an attempt that has ended is not taken for this one.
std::uint32_t next_drain(const QpLink& l, Side side) { return epoch_behind(std::max(l.epoch, l.drain_epoch), l, side); }

/// Where it might go once there is a channel.
Side some_other(const QpLink& l) {
  const Side next = next_side(l);
  return next != l.on ? next : l.on == kHome ? 1 : kHome;
}

Side target(const QpLink& l) {
  Side side = kHome;
  return side_of(l, l.epoch & kLinkMask, side) ? side : some_other(l);
}

bool switched(const QpLink& l) { return l.q->phase == switchover::Phase::kSwitched; }

void tell(const QpLink& l, Channel& channel, std::uint32_t flags = 0) {
  send_state(channel, {.to = l.peer, .from = l.name, .epoch = l.epoch, .serial = l.path.serial, .executed = l.executed, .flags = flags});
}

std::uint32_t gone_flags(const QpLink& l) { return l.ended ? kGone | kFinal : kGone; }

/// @param peer,own  of what is refused: it is said of these generations
/// @param l  null: there is no such vQP
void refuse(Channel& to, const migr_links_name& peer, const migr_links_name& own, const QpLink* l, std::uint32_t epoch) {
  StateRecord word{.to = peer, .from = own, .epoch = epoch, .serial = 0, .executed = {}, .flags = kGone};
  if (l && l->stage == Stage::kBroken) word = {.to = peer, .from = l->name, .epoch = l->epoch, .serial = l->path.serial, .executed = l->executed, .flags = gone_flags(*l)};
  send_state(to, word);
}

void wake(QpShadow& q) {
  switchover::for_cqs(q, [](CqShadow& c) {
    std::string ignored;
    if (c.armed && c.app.channel) ring(c, ignored);
  });
}

void report(const QpLink& l, migr_links_outcome outcome, const migr_replay_stat* replayed) {
  migr_links_switch out{};
  std::memcpy(out.peer, l.instance.data(), sizeof out.peer);
  out.from = l.from;
  out.to = l.epoch & kLinkMask;
  out.outcome = outcome;
  out.vqps = outcome == MIGR_LINKS_SWITCH_DONE;
  out.broken = outcome != MIGR_LINKS_SWITCH_DONE;
  if (replayed) out.replayed = replayed->replayed, out.executed = replayed->executed, out.lost = replayed->lost;
  out.cause = l.cause;
  out.tries = l.tries;
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  out.resume_ns = now_ns() - l.noticed_ns;
  out.when_ns = static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec) - out.resume_ns;
  out.cut_ns = l.cut_ns > l.noticed_ns ? l.cut_ns - l.noticed_ns : 0;
  out.told_ns = l.told_ns > l.noticed_ns ? l.told_ns - l.noticed_ns : 0;
  state()->to_report.add(out);
  kick(state()->round_fd);
}

/// How far the other end got with what the cut holds. @param executed  there, last: if that was on a path before, then nothing of it
std::uint32_t settled_psn(const QpLink& l, const Progress& executed) {
  const bool there = executed.link == l.unsettled.link && executed.serial == l.unsettled.serial;
  return there ? executed.psn : l.unsettled.psn;
}

void end_it(QpLink& l, const std::string& sentence, std::optional<std::uint32_t> peer_psn, const migr_replay_stat* replayed);

void note_own_channel(QpLink& l);

/// Cut here and told there.
void finish(QpLink& l) {
  QpShadow& q = *l.q;
  QpShadow* const one[] = {&q};
  const migr_qp_psn psn[] = {{.ctx_id = 0, .vqpn = q.vqpn(), .psn = settled_psn(l, l.heard.executed), .reserved = 0}};
  std::vector<migr_replay_stat> replayed;
  std::vector<migr_resume_stat> resumed;
  std::string why;
  l.told_ns = now_ns();
  int err = switchover::settle(one, psn, replayed, why);
  const migr_replay_stat* const stat = replayed.empty() ? nullptr : &replayed[0];
  if (q.cut && q.cut->lost)
    return end_it(l, "an atomic, or what is not to be sent twice, was in flight when its link failed, and whether it was executed cannot be told: the application gets the error", {}, stat);
  l.drains_ended = 0;
  if (!l.stood_still || l.from != l.leg().link->index || (stat && stat->executed)) l.in_vain = 0;
  else if (l.cause != MIGR_LINKS_CAUSE_PEER) ++l.in_vain;  // what the other end has left tells nothing of this one's sends
  note_own_channel(l);  // what fails next may do so before the next look
  // What it has left still works if it has not failed: no moment without a backup, whose path is made when it is needed.
  set_stage(l, next_side(l) != l.on ? Stage::kReady : Stage::kMaking);
  if (const int e = switchover::resume(one, resumed, why); e && !err) err = e;
  wake(q);
  if (err) say(l, "after the change to link " + std::to_string(l.leg().link->index) + ": " + why);
  report(l, MIGR_LINKS_SWITCH_DONE, stat);
}

/// Where both ends were drained nothing has failed, and only what a thread has posted late is in flight: of that nothing is done twice.
switchover::Leaving leaving(const QpLink& l) {
  const bool drained = l.cause == MIGR_LINKS_CAUSE_RETURN || l.cause == MIGR_LINKS_CAUSE_PREFER;
  return {.side = l.on, .resend = l.twin->policy == Policy::kResend && !drained, .unique_swap = state()->config.unique_swap};
}

/// It was adrift: its last path was cut then, with nothing in flight.
void take_up(QpLink& l) {
  l.q->adrift = false;
  l.birth = l.q->real;
  l.cut_ns = now_ns();
  l.unsettled = {.link = l.legs[kHome].link->index, .serial = 0, .psn = 0};
}

/// @return where its path, which was just cut, has ended
Progress note_executed(QpLink& l) {
  const Progress here{.link = l.leg().link->index, .serial = l.path.serial, .psn = l.q->cut->psn};
  const bool connected_by_application = l.on == kHome && !l.path.serial;  // of what the other end has sent first there nothing is known
  if (connected_by_application || here.psn != l.path.peer_psn) l.executed = here;
  return here;
}

/// @param here  where it has ended
bool stood_still(const QpLink& l, const Progress& here) {
  const std::vector<QueuedSend>& sends = l.q->cut->sends;
  return here.psn == l.path.peer_psn && !sends.empty() && sends.front().begun && sends.front().first_psn == l.path.psn;
}

/// The path goes to ERR. What it has executed is final, and what it has not is in the vQP's cut.
bool cut(QpLink& l, std::string& why) {
  QpShadow& q = *l.q;
  if (q.adrift) {
    take_up(l);
    return true;
  }
  const bool again = switched(l);
  if (switchover::leave_path(q, leaving(l), why)) return false;
  const std::uint64_t before_ns = std::exchange(l.cut_ns, now_ns());
  const Progress here = note_executed(l);
  if (!again && l.cut_ns - before_ns > kInVainNs) l.in_vain = 0;
  if (!again) l.stood_still = stood_still(l, here);
  if (!again) l.unsettled = {.link = here.link, .serial = here.serial, .psn = l.path.psn};
  l.traps.push_back({.path = l.path, .side = l.on, .next_send = q.cut->late_send, .next_receive = q.cut->late_receive, .closed = shares_receives(q)});
  const std::lock_guard guard(l.lock);
  if (l.seen) return why = "the application has seen an error of its path", false;  // nothing may succeed behind that
  return true;
}

/// To the leg's unused path, which has both its halves.
bool take_next(QpLink& l, Side side, std::string& why) {
  Leg& leg = l.legs[side];
  const Path next = std::exchange(leg.next, {});
  {
    std::lock_guard guard(l.lock);
    l.path = next;
    l.on = side;
    l.wanted = l.seen = l.own_channel = false;
    l.hidden.clear();  // of the path before: the cut has them, or the trap
  }
  {
    std::lock_guard guard(l.q->lock);
    set_remote_keys(l);
  }
  const bool home = side == kHome;
  ++l.tries;
  receives_may_move(*l.q);
  return !switchover::switch_to_link(*l.q, {.qp = next.qp, .ops = home ? &l.q->context->ops : &leg.link->ops,
                                            .keys = home ? l.q->context->kernel->key_table() : l.twin->at(side).key_table,
                                            .sends = next.sends, .receives = next.receives}, why);
}

void go_on(QpLink& l);

/// In order. @return `but`: no other one has a channel
Side first_standing(const QpLink& l, Side but) {
  for (Side side = kHome; side < l.sides(); ++side)
    if (side != but && standing(l, side)) return side;
  return but;
}

/// The present link comes last. Without any that stands it is waited for one.
void choose(QpLink& l) {
  const Side now = target(l);
  const Side to = first_standing(l, now);
  if (!standing(l, to)) return;
  if (l.epoch >= kLastEpoch) return give_up(l, "it has changed its link too often");
  l.epoch = next_epoch(l, to);
  go_on(l);
}

/// Its application has put it into SQD: a new path would send what that holds back.
bool holds_sends(const QpLink& l) { return l.q->real->state == IBV_QPS_SQD; }

/// Much that was registered a moment ago, or what was refused before: the rounds see to it, as pinning takes its time and is not done with the lock.
void await_memory(QpLink& l, Side side) {
  if (memory_is_refused(l, side)) return give_up(l, "memory of its PD cannot be registered on " + l.legs[side].link->config.device);
  state()->memory_awaited = true;
  kick(state()->round_fd);
}

/// Its path, which was just cut, has failed as those before it on the same link, and it could only go there once more.
bool is_in_vain(const QpLink& l) {
  return l.in_vain >= kMostInVain && l.stood_still && l.cause != MIGR_LINKS_CAUSE_PEER && next_side(l) == l.on;
}

/// What there is to be done of a change.
void go_on(QpLink& l) {
  std::string why;
  if (l.sessions_until_ns) {
    const bool open = !l.q->adrift && !switchover::begin_to_withhold(*l.q);
    if (open && now_ns() < l.sessions_until_ns) return;  // until the next look, and the Registry's lock is free meanwhile
    if (open) return give_up(l, "a thread does not come back from an ibv_wr_* session");
    l.sessions_until_ns = 0;
    if (!cut(l, why)) return give_up(l, why);
    if (is_in_vain(l))
      return end_it(l, "nothing gets through on " + l.leg().link->config.device + " but small messages, " + std::to_string(l.in_vain + 1) + " paths in a row: the application gets the errors", {}, nullptr);
  }
  for (;;) {
    const Side side = target(l);
    Channel* const channel = standing(l, side);
    const bool here = switched(l) && l.on == side;
    const bool used_up = here && l.heard.epoch == l.epoch && l.heard.serial > l.path.serial;
    if (channel && here && !used_up) return;  // told, and not heard yet
    if (switched(l) && holds_sends(l)) return give_up(l, "it is in SQD");
    if (switched(l) && !cut(l, why)) return give_up(l, why);
    if (!channel) return choose(l);
    ask_for_path(l, side, *channel);
    if (!l.legs[side].next.connected) return;
    if (!memory_is_there(l, side) && !make_small_memory(l, side)) return await_memory(l, side);
    if (!take_next(l, side, why)) return give_up(l, why);
    tell(l, *channel);
    if (l.heard.epoch == l.epoch && l.heard.serial == l.path.serial) return finish(l);
  }
}

void begin(QpLink& l, migr_links_cause cause, std::uint32_t epoch) {
  set_stage(l, Stage::kChanging);
  l.from = l.leg().link->index;
  l.tries = 0;
  l.epoch = epoch;
  l.cause = cause;
  l.noticed_ns = now_ns();
  forget_refused_memory(l);
  l.deadline_ns = l.noticed_ns + state()->config.switch_limit_ms * 1'000'000ull;
  if (holds_sends(l)) return give_up(l, "it is in SQD");
  l.sessions_until_ns = l.noticed_ns + kSessionLimitNs;
  l.over = false;
  go_on(l);
}

/// Its path has failed. Whether its link has must be known before anything goes there again.
void doubt(const QpLink& l) {
  if (Channel* c = find_channel(l.instance, *l.leg().link)) c->doubt_ns = now_ns(), c->beat_now = true;
}

/// Because its path or its link has failed.
void fail_over(QpLink& l, migr_links_cause cause) {
  if (l.epoch >= kLastEpoch) return stop_change(l, false), give_up(l, "it has changed its link too often");  // its errors wait
  l.led = false;
  doubt(l);
  begin(l, cause, next_epoch(l, some_other(l)));
}

/* ---- without a failure -------------------------------------------------------------- */

std::uint32_t drain_flags(const QpLink& l) { return (l.casting_off ? kCastOff : 0u) | (l.off_ns ? kOff : 0u); }

Channel* drains_over(const QpLink& l) {
  Side side = kHome;
  return side_of(l, l.drain_epoch & kLinkMask, side) ? standing(l, l.casting_off ? l.on : side) : nullptr;
}

void tell_drain(QpLink& l, bool drained, bool again = false) {
  l.told_ns = now_ns();
  Channel* const c = drains_over(l);
  if (c && (!again || c->has_room()))
    send_drain(*c, {.to = l.peer, .from = l.name, .left = l.epoch, .epoch = l.drain_epoch, .drained = drained, .flags = drain_flags(l)});
}

/// All drains up to `epoch` are.
void tell_off(const QpLink& l, Channel& to, std::uint32_t epoch, bool cast_off) {
  send_drain(to, {.to = l.peer, .from = l.name, .left = l.epoch, .epoch = epoch, .drained = false, .flags = cast_off ? kOff | kCastOff : kOff});
}

void begin_drain(QpLink& l, migr_links_cause cause, std::uint32_t epoch, bool cast_off = false) {
  QpShadow* const one[] = {l.q};
  std::string why;
  if (switchover::check_arcs(one, switchover::Phase::kSuspended, why)) return say(l, why);
  (void)switchover::begin_to_withhold(*l.q);  // look_at_drain() asks again, and the Registry's lock is free meanwhile
  set_stage(l, Stage::kDraining);
  l.casting_off = cast_off;
  l.cause = cause;
  l.led = false;
  l.drain_epoch = epoch;
  l.drained_here = l.drained_there = false;
  l.off_ns = 0;
  l.over = false;
  l.deadline_ns = now_ns() + kDrainLimitNs;
  tell_drain(l, false);
}

void end_drain_now(QpLink& l, Stage then) {
  QpShadow* const one[] = {l.q};
  std::vector<migr_resume_stat> ignored;
  std::string why;
  l.over = false;
  if (std::exchange(l.casting_off, false) && then == Stage::kReady) then = Stage::kMaking;
  l.off_ns = 0;
  set_stage(l, then);
  l.stay_until_ns = now_ns() + std::min(kStayNs, kFirstStayNs << std::min(l.drains_ended++, 4u));
  kick(state()->round_fd);
  if (switchover::resume(one, ignored, why)) say(l, why);
}

/// It stays where it is. But what other threads have posted meanwhile waits for the end of a session that is open on its path: the provider has the
/// queue locked until then, and the session's thread may be waiting for the Registry's lock.
void end_drain(QpLink& l, Stage then) {
  l.over = !switchover::begin_to_withhold(*l.q);
  if (!l.over) end_drain_now(l, then);
}

/// A drain, or what is left of one at the end of its vQP.
bool withholds(const QpLink& l) {
  return (l.stage == Stage::kDraining && l.q->phase == switchover::Phase::kSuspended && !l.q->adrift) || outlasted(l);
}

/// A QP that came later may have left its CQs too small for what a cut flushes: that is no reason to end what carries still.
bool has_cq_room(const QpLink& l) {
  bool all = true;
  switchover::for_cqs(*l.q, [&](const CqShadow& c) { all = all && why_no_room(c, l.on).empty(); });
  return all;
}

/* ---- before a migration, while the default link does not work --------------------------- */

/// Whether a migration can begin with no path but the one that it was born with, which executes nothing. What the other end's keys are called
/// on a link that does not work is not known once they are not what the application calls them.
bool may_cast_off(const QpLink& l) {
  return l.on != kHome && l.traps.empty() && l.birth && !(l.home_bits & kTranslateRemote) && l.q->app_state() == IBV_QPS_RTS;
}

void leave_linked_cq(CqShadow& c);

/// Both ends have nothing in flight: until a migration or another link gives it a path it has none.
void cast_off(QpLink& l) {
  QpShadow& q = *l.q;
  std::string why;
  if (switchover::leave_path(q, leaving(l), why)) return give_up(l, why);
  note_executed(l);
  if (switchover::cast_off(q, l.birth, l.home_bits, why)) return give_up(l, why);
  forget(l);
  switchover::for_cqs(q, leave_linked_cq);
}

void cast_off_if_parking(QpLink& l) {
  if (!l.told && has_to_cast_off(l) && has_cq_room(l)) begin_drain(l, MIGR_LINKS_CAUSE_NONE, next_drain(l, kHome), true);
}

/// Both ends have nothing in flight, and say so.
void leave_drained(QpLink& l) { l.casting_off ? cast_off(l) : begin(l, l.cause, l.drain_epoch); }

/// The other end may hold this one for drained already, and cut: then nothing may be in flight here.
void drain_ran_out(QpLink& l) {
  if (!l.drained_here) {
    if (Channel* const c = drains_over(l)) tell_off(l, *c, l.drain_epoch, l.casting_off);
    return end_drain(l, Stage::kReady);
  }
  // It has not answered. If it was drained, and did not take that back, it has cut.
  if (l.off_ns) return l.drained_there ? leave_drained(l) : end_drain(l, Stage::kReady);
  l.off_ns = now_ns();
  l.deadline_ns = l.off_ns + kDrainLimitNs;
  tell_drain(l, true);
}

void look_at_drain(QpLink& l) {
  if (l.over) return end_drain(l, next_side(l) != l.on ? Stage::kReady : Stage::kMaking);
  if (holds_sends(l) && !l.off_ns) return drain_ran_out(l);
  if (!l.drained_here && switchover::begin_to_withhold(*l.q)) {
    unsigned in_flight = 0;
    std::lock_guard guard(l.q->lock);
    l.drained_here = !provider::sends_in_queue(*l.q, in_flight) && !in_flight && (!l.casting_off || l.relay.asked.empty());
    if (l.drained_here) tell_drain(l, true);
  }
  if (l.drained_here && l.drained_there && !l.off_ns) return leave_drained(l);
  const std::uint64_t now = now_ns();
  if (now > l.deadline_ns) return drain_ran_out(l);
  if (now - l.told_ns > kTellAgainNs) tell_drain(l, l.drained_here, true);  // the other end may not have been ready for it
}

/// Where a vQP is to be as long as nothing is broken.
Side wanted_side(const QpLink& l) {
  if (parking()) return kHome;
  for (Side side = kHome; side < l.sides(); ++side)
    if (l.legs[side].link->preferred) return side;
  return state()->config.return_ms ? kHome : l.on;
}

void look_at_place(QpLink& l) {
  const Side side = wanted_side(l);
  if (side == l.on || l.epoch >= kLastEpoch) return;
  Channel* const channel = standing(l, side);
  if (!channel) return cast_off_if_parking(l);
  const std::uint64_t now = now_ns();
  const bool preferred = l.legs[side].link->preferred;
  const bool too_early = now - channel->up_ns < state()->config.return_ms * 1'000'000ull;
  if (!parking() && (now < l.stay_until_ns || (!preferred && (l.led || too_early)))) return;
  if (!l.legs[side].next.connected) return ask_for_path(l, side, *channel);  // before the work stands still
  if (!memory_is_there(l, side) || !has_cq_room(l) || holds_sends(l)) return;
  begin_drain(l, preferred ? MIGR_LINKS_CAUSE_PREFER : MIGR_LINKS_CAUSE_RETURN, next_drain(l, side));
}

/* ---- what the thread looks at --------------------------------------------------------- */

/// It would have to go there first, perhaps from there: once it is cut its receives may go elsewhere.
bool is_elsewhere(const QpLink& l, Side side) { return side != l.on || (l.stage == Stage::kChanging && !switched(l)); }

/// What stands, or may: its link is in doubt.
Channel* channel_to(const QpLink& l, Side side) {
  const Link& link = *l.legs[side].link;
  if (link.down() || !is_common(l, side) || !has_room_for(*l.twin, side, *l.q) || (is_elsewhere(l, side) && !receives_are_clean(*l.q, side))) return nullptr;
  Channel* const channel = find_channel(l.instance, link);
  return channel && channel->up() && !channel->ended && !channel->parting ? channel : nullptr;
}

/// Where there is no other link its path may have failed because the other end has left it, and cannot say so over the link that it
/// goes to, as that has failed meanwhile. One that knows nothing of this one yet has not.
void note_own_channel(QpLink& l) {
  const bool there = is_heard(l) && channel_to(l, l.on);
  std::lock_guard guard(l.lock);
  if (l.own_channel == there) return;
  l.own_channel = there;
  be_at(l, l.stage);
}

/// The channel over its link broke. If the other end lives, as another channel tells, the link has failed; else the process
/// there has ended, and that is the application's business. @return false: nothing is wrong
bool look_at_channel(QpLink& l) {
  const Past& past = past_of(l.instance, *l.leg().link);
  if (!past.lost_ns) return false;
  for (Side side = kHome; side < l.sides(); ++side) {
    Channel* const channel = side == l.on ? nullptr : standing(l, side);
    if (channel && channel->last_ns > past.lost_ns) return fail_over(l, past.lost_by), true;
    if (channel) channel->beat_now = true;
  }
  return true;
}

/// Of its path, in the moment before there was no other one any more, or while its own channel stands.
bool has_hidden(QpLink& l) {
  std::lock_guard guard(l.lock);
  return !l.hidden.empty();
}

bool take_wanted(QpLink& l) {
  std::lock_guard guard(l.lock);
  return std::exchange(l.wanted, false);
}

void look_at(QpLink& l) {
  std::string why;
  note_own_channel(l);
  switch (l.stage) {
    case Stage::kReady:
      if (l.q->adrift) return fail_over(l, MIGR_LINKS_CAUSE_RETURN);
      if (take_wanted(l)) return fail_over(l, l.leg().link->down() ? l.leg().link->down_by() : MIGR_LINKS_CAUSE_COMPLETION);
      if (!look_at_channel(l)) look_at_place(l);
      return;
    case Stage::kDraining:
      if (take_wanted(l)) return fail_over(l, MIGR_LINKS_CAUSE_COMPLETION);
      return look_at_drain(l);
    case Stage::kChanging:
      if (take_wanted(l) && switched(l)) {
        doubt(l);
        if (holds_sends(l)) return give_up(l, "it is in SQD");
        if (!cut(l, why)) return give_up(l, why);
        choose(l);
      } else {
        go_on(l);  // its channel may stand by now, or not any more
      }
      if (l.stage == Stage::kChanging && now_ns() > l.deadline_ns)
        give_up(l, (memory_is_there(l, target(l)) ? "the other end has not answered for " : "its memory has not been registered there for ") + std::to_string(state()->config.switch_limit_ms) + " ms");
      return;
    case Stage::kBroken:
      if (l.q->phase == switchover::Phase::kSuspended && !l.q->adrift) end_drain(l, Stage::kBroken);  // the application's own error came meanwhile
      if (has_hidden(l)) give_back(*l.q, take_hidden(*l.q));  // flushed by it, and seen before it
      return;
    case Stage::kMaking:
      if (!has_hidden(l)) return cast_off_if_parking(l);
      take_wanted(l);  // else the path that is made now would be taken for the one that has failed
      return fail_over(l, MIGR_LINKS_CAUSE_COMPLETION);
  }
}

/// Nobody has come for it, neither a migration nor its links.
void look_at_drifting(QpShadow& q) {
  const bool made = q.link && q.link->stage != Stage::kMaking && q.link->stage != Stage::kBroken;
  if (!switchover::waits_for_links(q) || q.spare || made || Registry::get().moving) return;
  const unsigned limit_ms = state()->config.adrift_limit_ms;
  if (now_ns() - q.adrift_ns < limit_ms * 1'000'000ull) return;
  std::string why = "no migration and no link has given it a path for " + std::to_string(limit_ms) + " ms";
  if (q.link) return q.link->noticed_ns = q.adrift_ns, give_up(*q.link, why);
  say(q, why + "; the application gets the errors");
  if (switchover::give_up_path(q, why)) say(q, why);
}

void look_into_traps(QpLink& l) {
  {
    std::lock_guard guard(l.lock);
    l.late = false;
  }
  std::lock_guard guard(l.q->lock);
  empty_trap(*l.q);
}

/// Completions on the backup link: whoever waits for one waits on the application's channel.
void pass_events_on(Link& link) {
  if (!link.events) return;
  ibv_cq* cq;
  void* context;
  while (real().get_cq_event(link.events, &cq, &context) == 0) {
    real().ack_cq_events(cq, 1);
    auto* const c = static_cast<CqShadow*>(context);
    std::string ignored;
    if (c->armed) ring(*c, ignored);
  }
}

/// What its device says of a path is the application's, as on the default link.
void pass_on(const ibv_async_event& event) {
  const auto& all = state()->qps;
  const auto of = std::find_if(all.begin(), all.end(), [&](const QpLink* l) { return events::is_told(*l->q, event); });
  if (of == all.end()) return;
  QpLink& l = **of;
  ibv_async_event told = event;
  told.element.qp = &l.q->app;
  const std::string why = ring(l.bell, *l.q->context, l.q->init.pd, l.twin->home->config.port, told);
  if (!why.empty()) say(l, "nobody can be told of an asynchronous event: " + why);
}

/// Of its port. That one which was down when it was opened is up again is not said by all devices: it is asked.
void look_at_events(Link& link) {
  if (!link.ctx) return;
  const bool before = link.event_down;
  ibv_async_event event;
  while (link.ctx->async_fd >= 0 && real().get_async_event(link.ctx, &event) == 0) {
    const bool port = static_cast<unsigned>(event.element.port_num) == link.config.port;
    if (event.event_type == IBV_EVENT_DEVICE_FATAL) link.fatal = true;
    if (link.fatal || (event.event_type == IBV_EVENT_PORT_ERR && port)) link.event_down = true;
    else if (event.event_type == IBV_EVENT_PORT_ACTIVE && port) link.event_down = false;
    pass_on(event);
    real().ack_async_event(&event);
  }
  const std::uint64_t now = now_ns();
  if (!link.event_down || !before) link.asked_port_ns = now;
  if (link.event_down && !link.fatal && now - link.asked_port_ns > kAskPortNs) {
    ibv_port_attr port{};
    link.asked_port_ns = now;
    link.event_down = query_port(link.ctx, link.config.port, port) != 0 || port.state != IBV_PORT_ACTIVE;
  }
  if (link.event_down == before) return;
  if (link.event_down) leave_link(link);
  kick(state()->round_fd);
}

void look_at_channels(Link& link) {
  if (!link.cq) return;
  ibv_cq* cq;
  void* context;
  while (real().get_cq_event(link.cq_events, &cq, &context) == 0) real().ack_cq_events(cq, 1);
  link.ops.req_notify_cq(link.cq, 0);
  poll_channels(link);
}

}  // namespace

bool side_of(const QpLink& l, std::uint32_t link, Side& side) {
  for (Side s = kHome; s < l.sides(); ++s)
    if (l.legs[s].link->index == link) return side = s, true;
  return false;
}

bool needs(const QpLink& l, Side side) {
  Side to = l.on;
  if (l.stage == Stage::kBroken) return false;
  if (l.stage == Stage::kChanging) to = target(l);
  if (l.stage == Stage::kDraining) side_of(l, l.drain_epoch & kLinkMask, to);
  return side == l.on || side == to;
}

bool tell_gone(const QpLink& l, std::uint32_t flags) {
  bool told = false;
  for (Side side = kHome; side < l.sides(); ++side)
    if (Channel* c = standing(l, side)) tell(l, *c, gone_flags(l) | flags), told = true;
  return told;
}

bool tell_parted(const QpLink& l) { return !standing(l, kHome) && tell_gone(l, kParted); }

bool tell_parted(cm::QpName qp) {
  std::lock_guard guard(Registry::get().lock);
  if (!state()) return false;
  for (const QpLink* l : state()->qps)
    if (cm::name_of(*l->q) == qp) return tell_parted(*l);
  return false;
}

void want_change(QpLink& l) {
  std::lock_guard guard(l.lock);
  if (!std::exchange(l.wanted, true)) kick(state()->failover_fd);
}

void leave_link(Link& link) {
  for (QpLink* l : state()->qps)
    if (l->leg().link == &link) want_change(*l);
  // Nothing that still comes over it is heard: so the other end takes it for down, too.
  for (Channel* c : std::vector(state()->channels))
    if (c->link == &link) channel_broke(*c);
}

Past& past_of(const Peer& peer, const Link& link) {
  for (Past& p : state()->pasts)
    if (p.peer == peer && p.link == link.index) return p;
  return state()->pasts.emplace_back(Past{.peer = peer, .link = link.index});
}

std::vector<migr_links_channel> forget_pasts() {
  constexpr std::size_t kFew = 32;
  std::vector<Past>& pasts = state()->pasts;
  if (pasts.size() <= kFew) return {};
  std::set<Peer> known;
  for (const QpLink* l : state()->qps) known.insert(l->instance);
  for (const Channel* c : state()->channels) known.insert(c->peer);
  const auto first = std::partition(pasts.begin(), pasts.end(), [&](const Past& p) { return known.contains(p.peer); });
  std::vector<migr_links_channel> ended;
  for (auto p = first; p != pasts.end(); ++p) {
    std::memcpy(ended.emplace_back().peer, p->peer.data(), p->peer.size());
    ended.back().link = p->link;
  }
  pasts.erase(first, pasts.end());
  return ended;
}

bool is_common(const QpLink& l, Side side) { return !l.peer_links || (l.peer_links >> l.legs[side].link->index & 1); }

Channel* standing(const QpLink& l, Side side) {
  Channel* const channel = channel_to(l, side);
  return channel && !channel->doubt_ns ? channel : nullptr;
}

Side next_side(const QpLink& l) { return first_standing(l, l.on); }

bool has_to_cast_off(const QpLink& l) {
  constexpr std::uint64_t kHomeLimitNs = 2'000'000'000;  // its chance to go home
  if (!parking() || !may_cast_off(l) || standing(l, kHome) || !standing(l, l.on) || l.epoch >= kLastEpoch) return false;
  return l.legs[kHome].link->down() || now_ns() - state()->parking_ns > kHomeLimitNs;
}

void set_remote_keys(QpLink& l) {
  const bool all = l.on != kHome;
  Channel* const channel = find_channel(l.instance, *l.leg().link);
  retire(exchange_remote_keys(*l.q, channel ? remote_keys(*channel, l.peer_home, all) : std::make_shared<const RemoteKeys>(RemoteKeys({}, all))));
}

void retire(std::shared_ptr<const RemoteKeys> keys) {
  auto& all = state()->retired;
  if (keys && (all.empty() || all.back() != keys)) all.push_back(std::move(keys));  // all vQPs between two processes have the same ones
}

// Keys need no translation: threads of the direct path post to the path that they were born with, whose keys are the
// application's.

void late_sends(QpShadow& q, std::vector<KeptSend>& out) {
  if (!q.link) return;
  for (Trap& trap : q.link->traps) {
    provider::QueuePart sends, receives;
    if (trap.closed) continue;
    std::vector<QueuedSend> late;
    int err = provider::queue_parts(trap.path.sends, trap.path.receives, sends, receives);
    sends.from = trap.next_send;
    if (!err && sends.size()) err = provider::sends_in(trap.path.sends, sends, late);
    if (err) return say(*q.link, std::string("an old path cannot be read: ") + std::strerror(err));
    trap.next_send = sends.to;
    for (QueuedSend& s : late) out.push_back(std::move(s.send));
  }
}

namespace {

/// Of one trap. @param part  where they lie in its queue. @return 0 or a positive errno, which was said
int late_receives_in(const QpLink& l, const Trap& trap, provider::QueuePart& part, std::vector<KeptReceive>& out) {
  provider::QueuePart sends;
  int err = provider::queue_parts(trap.path.sends, trap.path.receives, sends, part);
  part.from = trap.next_receive;
  if (!err && part.size()) err = provider::receives_in(trap.path.receives, part, out);
  if (err) say(l, std::string("an old path cannot be read: ") + std::strerror(err));
  return err;
}

}  // namespace

void late_receives(QpShadow& q, std::vector<KeptReceive>& out) {
  if (!q.link) return;
  for (Trap& trap : q.link->traps) {
    provider::QueuePart part;
    if (trap.closed) continue;
    if (late_receives_in(*q.link, trap, part, out)) return;
    trap.next_receive = part.to;
  }
}

namespace {

/// In order. @return false: there is no room for all, and the others stay in their trap
bool post_late_receives(QpShadow& q) {
  for (Trap& trap : q.link->traps) {
    provider::QueuePart part;
    std::vector<KeptReceive> late;
    if (trap.closed) continue;
    if (late_receives_in(*q.link, trap, part, late)) return true;
    for (const KeptReceive& r : late) {
      const int err = path::post_one_receive(q, q.real, r);
      if (err == ENOMEM) return false;
      if (err) say(*q.link, std::string("a receive that a thread posted to an old path late cannot be posted to the new one: ") + std::strerror(err));
      trap.next_receive = (trap.next_receive + 1) & part.mask;
    }
  }
  return true;
}

}  // namespace

bool empty_trap(QpShadow& q) {
  if (!q.link) return true;
  std::vector<KeptSend> sends;
  // Cut, and on no new path yet: the present one is a trap itself. switch_to_link() comes for them.
  const bool all = (q.state.load(std::memory_order_relaxed) & kKeepReceives) || post_late_receives(q);
  if (!(q.state.load(std::memory_order_relaxed) & kKeepSends)) late_sends(q, sends);
  for (KeptSend& s : sends) post_late(q, std::move(s));
  return all;
}

namespace {

bool on_backup_in_any_way(const QpLink& l) {
  return l.on != kHome || l.stage == Stage::kDraining || l.stage == Stage::kChanging ||
         std::any_of(l.traps.begin(), l.traps.end(), [](const Trap& t) { return t.side != kHome; });
}

/// Its CQ on the backup link need not be polled as long as nobody is there.
void leave_linked_cq(CqShadow& c) {
  for (const QpLink* l : state()->qps)
    if ((l->q->send_cq == &c || l->q->recv_cq == &c) && on_backup_in_any_way(*l)) return;
  std::lock_guard guard(c.lock);
  path::poll_to_fake(c);
  c.state.fetch_and(~std::uint32_t{kLinkedCq}, std::memory_order_relaxed);
}

/// On its path everything is called as the application calls it.
bool has_own_names(const QpLink& l) { return l.on == kHome && !l.home_bits && !l.q->context->renamed; }

}  // namespace

bool posts_freely(const QpLink& l) { return !l.relays && !shares_receives(*l.q) && has_own_names(l); }

namespace {

/// Its device has not flushed yet what was posted late, and has been read back from there: when it does that is still ours to hide. A device that does
/// not come to it is not waited for. Receives are flushed when it is told to do so once more, so never.
bool is_flushing(Trap& trap) {
  constexpr unsigned kMostLooks = 5;
  provider::QueuePart sends, receives;
  if (trap.closed || provider::queue_parts(trap.path.sends, trap.path.receives, sends, receives)) return false;
  if (sends.size()) return trap.looks++ < kMostLooks;
  return trap.looks && !std::exchange(trap.flushed, true);  // what it says of the last may be a moment behind
}

}  // namespace

void release_traps(QpLink& l, std::size_t count) {
  QpShadow& q = *l.q;
  if (q.phase != switchover::Phase::kRunning) return;
  {
    std::lock_guard guard(q.lock);
    if (!empty_trap(q)) return;  // what was posted until then, and what was flushed of it
    if (!l.relays && !l.relay.sends.empty()) return;  // what is posted freely would overtake it
    std::size_t flushed = 0;  // before CQs are polled: then all that is said of it is found
    while (flushed < count && !is_flushing(l.traps[flushed])) ++flushed;
    switchover::for_cqs(q, [](CqShadow& c) {
      std::lock_guard cq_guard(c.lock);
      path::poll_to_fake(c);
    });
    for (; flushed; --flushed) {
      Trap& trap = l.traps.front();
      if (trap.path.birth) l.birth = trap.path.qp;
      else destroy_path(l, trap.side, trap.path);
      l.traps.pop_front();
    }
    if (!l.traps.empty()) return;
    if (has_own_names(l)) switchover::clear_bits(q, kTranslateLocal | kTranslateRemote);
    if (posts_freely(l)) switchover::clear_bits(q, kTrapped);
  }
  if (l.on == kHome) switchover::for_cqs(q, leave_linked_cq);
}

namespace {

/// It has no path any more, and this end says so. @param peer_psn  how far the other end got, if it has ended, too: that
/// much completes before the errors
void end_it(QpLink& l, const std::string& sentence, std::optional<std::uint32_t> peer_psn, const migr_replay_stat* replayed) {
  QpShadow& q = *l.q;
  std::string more;
  say(l, sentence);
  if (switched(l) && !cut(l, more)) say(l, more);
  l.sessions_until_ns = 0;
  l.over = false;
  l.ended = q.cut && q.cut->told_apart && !q.adrift;  // a path that a migration has cut did not count here
  set_stage(l, Stage::kBroken);
  l.why = "gave up";
  tell_gone(l);
  std::vector<Hidden> all = take_hidden(q), late;
  if (q.cut && q.cut->told_apart) {
    late.swap(all);  // posted since the cut, which has what came before
  } else if (q.cut) {
    for (const ibv_wc& wc : q.cut->taken_sends) all.push_back({q.send_cq, wc});
    for (const ibv_wc& wc : q.cut->taken_receives) all.push_back({q.recv_cq, wc});
  }
  deliver(q, std::move(all));
  // It stays on the path that it is on: what is posted there from now on is not late.
  std::erase_if(l.traps, [&](const Trap& trap) { return trap.path.qp == l.path.qp; });
  if (q.phase != switchover::Phase::kRunning && switchover::give_up_path(q, more, peer_psn)) say(l, more);
  deliver(q, std::move(late));
  wake(q);
  receives_may_move(q);
  report(l, MIGR_LINKS_SWITCH_BROKEN, replayed);
}

}  // namespace

void give_up(QpLink& l, const std::string& why) {
  end_it(l, "its link failed, and there is no other: " + why + "; the application gets the errors", {}, nullptr);
}

void stop_change(QpLink& l, bool forgets) {
  if (withholds(l)) {
    const Stage then = l.stage == Stage::kBroken ? Stage::kBroken : Stage::kReady;
    if (forgets) {
      std::lock_guard guard(l.q->lock);
      l.q->kept_sends.clear();
    }
    forgets ? end_drain_now(l, then) : end_drain(l, then);
  }
  if (l.stage == Stage::kChanging) give_up(l, "the application has closed it");
}

namespace {

/// @param hurry  the work stands still for it: of the pool, if there is one
/// @return false: it cannot be made
bool offer_path(QpLink& l, Side side, Channel& channel, bool hurry) {
  Leg& leg = l.legs[side];
  const std::uint32_t serial = leg.newest + 1;
  const std::uint64_t spare = hurry ? take_spare(l, side, channel, serial) : 0;
  if (!spare && !make_half(l, side, serial, l.why)) return false;
  leg.asked = channel.round;
  if (spare) send_take(channel, {.to = l.peer, .from = l.name, .id = spare, .serial = serial, .reserved = 0});
  else send_path(channel, {.to = l.peer, .from = l.name, .path = address_of(l, side, leg.next)});
  return true;
}

void want_path(QpLink& l, Side side, Channel& channel, bool no_spare) {
  l.legs[side].asked = channel.round;
  send_want(channel, {.to = l.peer, .from = l.name, .newest = l.legs[side].newest, .no_spare = no_spare});
}

}  // namespace

void ask_for_path(QpLink& l, Side side, Channel& channel) {
  const Leg& leg = l.legs[side];
  const bool hurry = l.stage == Stage::kChanging;
  if (leg.next.connected || (leg.asked == channel.round && (leg.next.qp || channel.led)) || now_ns() < leg.not_before_ns) return;
  if (channel.led) return want_path(l, side, channel, !hurry);
  offer_path(l, side, channel, hurry);
}

namespace {

/// By its name. It may be of another connection, before or since.
QpLink* namesake(const Channel& from, const migr_links_name& to, const migr_links_name& sender) {
  QpLink* const l = find(to);
  return l && same(l->peer, sender) && l->instance == from.peer ? l : nullptr;
}

/// What waits in a channel may be heard when both ends have been reset, and connected again. Who names this generation has heard of it, and is
/// the one at the other end from then on.
bool is_of_this_connection(QpLink& l, const migr_links_name& to, const migr_links_name& sender) {
  if (to.reserved && to.reserved != l.name.reserved) return false;
  if (is_heard(l)) return sender.reserved == l.peer.reserved || (to.reserved && !sender.reserved);  // the latter: refused, and asked before it was heard
  if (!to.reserved || !sender.reserved) return true;
  l.peer.reserved = sender.reserved;
  kick(state()->round_fd);
  return true;
}

}  // namespace

QpLink* addressee(const Channel& from, const migr_links_name& to, const migr_links_name& sender) {
  QpLink* const l = namesake(from, to, sender);
  return l && is_of_this_connection(*l, to, sender) ? l : nullptr;
}

void greet(QpLink& l, Channel& channel) {
  const std::uint64_t now = now_ns();
  if (l.greeted_ns && (now - l.greeted_ns < kGreetAgainNs || !channel.has_room())) return;
  l.greeted_ns = now;
  tell(l, channel, kAsks);
}

namespace {

/// A backup that it had was forgotten, and is about to be made again (former.h): its connection is not gone. The next one hears that it was spoken to.
bool comes_again(const migr_links_name& name, const migr_links_name& peer) {
  auto& all = state()->formers;
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& f) {
    const QpShadow& q = *f.first;
    const bool connected = !q.gone && !state()->refused.contains(&q) && (q.app_state() == IBV_QPS_RTR || q.app_state() == IBV_QPS_RTS);
    return connected && q.vqpn() == name.vqpn && !std::memcmp(q.birth.gid.raw, name.gid, sizeof name.gid) &&
           q.birth.dest_qp_num == peer.vqpn && !std::memcmp(q.birth.ah.grh.dgid.raw, peer.gid, sizeof peer.gid);
  });
  if (found != all.end()) found->second.unheard = true;
  return found != all.end();
}

}  // namespace

bool is_premature(const migr_links_name& to, const migr_links_name& sender) {
  QpLink* const l = find(to);
  if (!l) return comes_again(to, sender);
  if (!same(l->peer, sender) || l->instance != Peer{} || l->stage == Stage::kBroken) return false;
  if (!std::exchange(l->unheard, true)) kick(state()->round_fd);
  return true;
}

bool answer_unheard(const QpLink& l) {
  if (l.stage == Stage::kChanging && !switched(l)) return false;  // when it has gone to its path: it has none to tell of
  bool told = false;
  for (Side side = kHome; side < l.sides(); ++side)
    if (Channel* c = standing(l, side)) tell(l, *c, is_heard(l) ? 0u : kAsks), told = true;
  return told;
}

namespace {

/// Whom a message about paths of the channel's link reaches, and its side of that link. Null: its sender has been told that there is none
template <class Record>
QpLink* reached(Channel& from, const Record& record, Side& side) {
  QpLink* const l = addressee(from, record.to, record.from);
  if (l && l->stage != Stage::kBroken && side_of(*l, from.link->index, side)) return l;
  refuse(from, record.from, record.to, l, l ? l->epoch : 0);
  return nullptr;
}

/// It is asked again, by another number.
void refuse_path(Channel& from, const migr_links_name& peer, const migr_links_name& own, std::uint32_t serial) {
  PathRecord no{.to = peer, .from = own, .path = {}};
  no.path.link = from.link->index;
  no.path.serial = serial;
  send_path(from, no);
}

/// Its device has no room, or its address is not there again yet: that may be otherwise soon.
void cannot_now(QpLink& l, Channel& from, std::uint32_t serial) {
  say(l, l.why);
  refuse_path(from, l.peer, l.name, serial);
}

}  // namespace

void got_path(Channel& from, const PathRecord& record) {
  Side side = kHome;
  if (is_premature(record.to, record.from)) {
    if (record.path.qpn) refuse_path(from, record.from, record.to, record.path.serial);
    return;
  }
  QpLink* const l = reached(from, record, side);
  if (!l) return;
  Leg& leg = l->legs[side];
  if (!record.path.qpn) {
    if (leg.next.connected || leg.asked != from.round || (leg.next.qp && leg.next.serial != record.path.serial)) return;  // of an earlier question
    destroy_path(*l, side, leg.next);
    leg.asked = 0;
    leg.not_before_ns = now_ns() + kAskAgainMs * 1'000'000ull;
    l->why = "the other end cannot make a path now";
    return;
  }
  const bool answer = leg.next.qp && !leg.next.connected && leg.asked == from.round && leg.next.serial == record.path.serial;
  if (!answer && record.path.serial < leg.newest) return refuse_path(from, l->peer, l->name, record.path.serial);
  if (!answer && !make_half(*l, side, record.path.serial, l->why)) return cannot_now(*l, from, record.path.serial);
  leg.asked = 0;
  if (!answer) send_path(from, {.to = l->peer, .from = l->name, .path = address_of(*l, side, leg.next)});
  if (connect_half(*l, side, leg.next, record.path, l->why)) return say(*l, l->why);
  if (l->stage == Stage::kChanging) go_on(*l);
  kick(state()->round_fd);
}

void got_take(Channel& from, const TakeRecord& record) {
  Side side = kHome;
  if (is_premature(record.to, record.from)) {
    drop_spare(from, record.id);
    return send_want(from, {.to = record.from, .from = record.to, .newest = record.serial, .no_spare = true});
  }
  QpLink* const l = reached(from, record, side);
  if (!l) return;
  Leg& leg = l->legs[side];
  if (record.serial < leg.newest) return;
  if (!take_spare(*l, side, from, record.serial, record.id)) {
    destroy_path(*l, side, leg.next);
    leg.newest = record.serial;
    return want_path(*l, side, from, true);
  }
  if (l->stage == Stage::kChanging) go_on(*l);
}

void got_want(Channel& from, const WantRecord& record) {
  Side side = kHome;
  if (is_premature(record.to, record.from)) return refuse_path(from, record.from, record.to, record.newest);
  QpLink* const l = reached(from, record, side);
  if (!l) return;
  Leg& leg = l->legs[side];
  if (leg.newest > record.newest && leg.asked == from.round) return;  // it is on its way there
  leg.newest = std::max(leg.newest, record.newest);
  if (!offer_path(*l, side, from, !record.no_spare)) return cannot_now(*l, from, leg.newest + 1);
  if (l->stage == Stage::kChanging) go_on(*l);
}

namespace {

/// Before it is cut without a failure of its own. @return false: errors of its path have reached the application, a session is open on it, or it has none
bool may_be_cut(QpLink& l) {
  QpShadow& q = *l.q;
  if (q.adrift || guarded(q) || (q.phase != switchover::Phase::kRunning && (l.stage != Stage::kDraining || !switchover::begin_to_withhold(q)))) return false;
  std::lock_guard guard(l.lock);
  if (l.seen || l.stage == Stage::kBroken) return false;
  be_at(l, Stage::kChanging);
  return true;
}

/// What it has executed completes, and the rest fails.
void other_gave_up(QpLink& l, const StateRecord& record) {
  const std::string why = "the other end has given up";
  const bool was_changing = l.stage == Stage::kChanging, final = record.flags & kFinal;
  if (!was_changing && !l.q->adrift && !(final && may_be_cut(l))) {
    if (l.stage == Stage::kDraining) end_drain(l, Stage::kBroken);
    l.why = why;
    kick(state()->round_fd);  // which tells it
    return set_stage(l, Stage::kBroken);
  }
  std::string more;
  if (!was_changing) {
    l.from = l.leg().link->index;
    l.tries = 0;
    l.cause = MIGR_LINKS_CAUSE_PEER;
    l.noticed_ns = now_ns();
    if (!l.q->adrift && !cut(l, more)) return give_up(l, more);
  }
  std::optional<std::uint32_t> psn;
  if (final && !l.q->adrift) psn = settled_psn(l, record.executed);
  end_it(l, why + "; so does this one, and the application gets the errors", psn, nullptr);
}

/// Of the generation that this end has heard; or of who has heard this one, in answer to what a change has said, or before this end has heard
/// anybody: else it is of a connection before, or its sender is.
void got_gone(Channel& from, const StateRecord& record) {
  QpLink* const l = namesake(from, record.to, record.from);
  if (!l) return;
  const bool of_the_other_end = is_heard(*l) && record.from.reserved == l->peer.reserved;
  const bool to_this_one = record.to.reserved == l->name.reserved && (l->stage == Stage::kChanging || !is_heard(*l));
  if (!of_the_other_end && !to_this_one) return;
  cm::Engine* const engine = record.flags & kParted ? cm::engine() : nullptr;
  if (engine) engine->ended(cm::name_of(*l->q));
  if (l->stage != Stage::kBroken) other_gave_up(*l, record);
}

/// Within a process generations grow: what this end had heard is no more, and who asks is at the other end from now on, where both count from the
/// same place. @return null: it is not so, or not yet, as the fate of atomics is open
QpLink* follow_newer(const Channel& from, const StateRecord& record) {
  QpLink* const l = namesake(from, record.to, record.from);
  if (!l || !is_heard(*l) || record.to.reserved || record.from.reserved <= l->peer.reserved) return nullptr;
  if ((l->stage != Stage::kMaking && l->stage != Stage::kReady) || record.epoch != l->epoch || record.serial != l->path.serial) return nullptr;
  if (std::any_of(l->answers.all.begin(), l->answers.all.end(), [](const Answers::One& one) { return one.status == kNotYet; })) return nullptr;
  {
    std::lock_guard guard(l->q->lock);
    if (!l->relay.asked.empty()) return nullptr;
    l->relay.number = 1;
  }
  l->answers = {};
  l->peer.reserved = record.from.reserved;
  for (Side side = kHome; side < l->sides(); ++side) {
    destroy_path(*l, side, l->legs[side].next);
    l->legs[side].asked = 0;
  }
  set_stage(*l, Stage::kMaking);
  kick(state()->round_fd);
  return l;
}

/// The answer names the generation that has asked. No answer: this one is about to be connected again, or says STATE itself.
void got_question(Channel& from, const StateRecord& record) {
  QpLink* l = addressee(from, record.to, record.from);
  if (!l) l = follow_newer(from, record);
  if (!l) return;
  if (l->stage == Stage::kBroken) return refuse(from, record.from, record.to, l, l->epoch);
  if (l->stage == Stage::kChanging && !switched(*l)) return;
  send_state(from, {.to = record.from, .from = l->name, .epoch = l->epoch, .serial = l->path.serial, .executed = l->executed, .flags = is_heard(*l) ? 0u : kAsks});
}

}  // namespace

void got_state(Channel& from, const StateRecord& record) {
  if (is_premature(record.to, record.from)) return;
  if (record.flags & kGone) return got_gone(from, record);
  if (record.flags & kAsks) return got_question(from, record);
  QpLink* const l = addressee(from, record.to, record.from);
  Side side = kHome;
  if (!l || l->stage == Stage::kBroken || !side_of(*l, record.epoch & kLinkMask, side))
    return refuse(from, record.from, record.to, l, record.epoch);
  if (record.epoch < l->epoch) {
    if (l->stage != Stage::kChanging || switched(*l)) tell(*l, from);  // else when it has gone to its path: it has none to tell of
    return;
  }
  const bool next = record.epoch > l->epoch;
  l->heard = {.epoch = record.epoch, .serial = record.serial, .executed = record.executed};
  if (l->stage != Stage::kChanging) {
    if (!next && record.serial < l->path.serial) return tell(*l, from);
    if (!next && record.serial == l->path.serial) return;  // once more
    const bool drained = l->stage == Stage::kDraining && record.epoch == l->drain_epoch;
    if (l->stage != Stage::kDraining) doubt(*l);
    return begin(*l, drained ? l->cause : MIGR_LINKS_CAUSE_PEER, record.epoch);
  }
  if (next) {
    std::string why;
    if (switched(*l) && !cut(*l, why)) return give_up(*l, why);
    l->epoch = record.epoch;
  } else if (switched(*l) && record.serial == l->path.serial) {
    return finish(*l);
  }
  go_on(*l);
}

namespace {

/// Of what it needs there: it will not be in a moment.
bool lacks_something(const QpLink& l, Side side) {
  return !is_common(l, side) || !has_room_for(*l.twin, side, *l.q) || !memory_is_there(l, side);
}

/// The other end stays, or will when it hears that this one does. One that has cut says STATE instead.
void got_off(QpLink& l, Channel& from, const DrainRecord& record) {
  const bool cast_off = record.flags & kCastOff;
  if (cast_off && l.q->adrift) return;  // this end has gone
  const bool in_another = l.stage == Stage::kDraining && (record.epoch < l.drain_epoch || l.casting_off != cast_off);
  if (!in_another) {
    l.drain_epoch = std::max(l.drain_epoch, record.epoch);
    if (l.stage == Stage::kDraining) end_drain(l, Stage::kReady);
  }
  if (record.drained) tell_off(l, from, in_another ? record.epoch : l.drain_epoch, cast_off);
}

/// Its backup is not there any more, or not yet again, and it is not gone.
bool has_cast_off(const migr_links_name& name) {
  const auto& qps = Registry::get().qps;
  return std::any_of(qps.begin(), qps.end(), [&](const QpShadow* q) { return q->adrift && q->vqpn() == name.vqpn && !std::memcmp(q->birth.gid.raw, name.gid, sizeof name.gid); });
}

}  // namespace

void got_drain(Channel& from, const DrainRecord& record) {
  if (is_premature(record.to, record.from)) return;  // it is said again
  QpLink* const l = addressee(from, record.to, record.from);
  Side side = kHome;
  const bool cast_off = record.flags & kCastOff;
  if (!l && cast_off && has_cast_off(record.to)) return;  // the other end was told that this one is drained, and has not heard it yet
  if (!l || l->stage == Stage::kBroken) return refuse(from, record.from, record.to, l, l ? l->epoch : 0);
  if (record.left != l->epoch || record.epoch <= l->epoch) return;
  if (record.flags & kOff) return got_off(*l, from, record);
  if (!side_of(*l, record.epoch & kLinkMask, side) || l->legs[cast_off ? l->on : side].link != from.link) return;
  const bool rests = l->stage == Stage::kMaking || l->stage == Stage::kReady;
  const bool over = l->stage == Stage::kDraining && l->over;
  if (over || (rests && ((!cast_off && lacks_something(*l, side)) || !has_cq_room(*l) || holds_sends(*l)))) {
    l->drain_epoch = std::max(l->drain_epoch, record.epoch);  // it is off for good, though all may be there when it is said again
    return tell_off(*l, from, l->drain_epoch, cast_off);
  }
  if (l->stage == Stage::kDraining && l->casting_off != cast_off) return;  // one of the two times out
  if (cast_off ? (l->stage == Stage::kReady || l->stage == Stage::kMaking) && may_cast_off(*l) : l->stage == Stage::kReady) {
    if (record.epoch <= l->drain_epoch) return tell_off(*l, from, l->drain_epoch, cast_off);  // it is off, and what was said in it does not count
    begin_drain(*l, side == kHome ? MIGR_LINKS_CAUSE_RETURN : MIGR_LINKS_CAUSE_PREFER, record.epoch, cast_off);
    l->led = side != kHome;
    if (side != wanted_side(*l)) l->stay_until_ns = now_ns() + kStayNs;  // two ends that prefer different links
  }
  if (l->stage != Stage::kDraining || record.epoch < l->drain_epoch) return;
  if (record.epoch > l->drain_epoch) {
    l->drain_epoch = record.epoch;
    l->drained_here = l->drained_there = false;  // it is told again, of this one
    l->off_ns = 0;
    l->deadline_ns = now_ns() + kDrainLimitNs;
  }
  if (record.drained) l->drained_there = true;
}

void channel_broke(Channel& channel, migr_links_cause by) {
  if (channel.ended) return end_channel(channel);
  Past& past = past_of(channel.peer, *channel.link);
  past.round = channel.round;
  if (channel.up()) past.lost_ns = now_ns(), past.lost_by = by;
  const Link* const link = channel.link;
  const Peer peer = channel.peer;
  destroy_channel(&channel);
  for (QpLink* l : std::vector(state()->qps)) {
    if (l->instance != peer) continue;
    for (Leg& leg : l->legs)
      if (leg.link == link) leg.asked = 0;
    if (l->stage == Stage::kChanging && l->leg().link == link) {  // what was told over it may be lost, and a new one may stand before look_at() comes
      std::lock_guard guard(l->lock);
      l->wanted = true;
    }
    Side drained_to = l->on;
    const bool cut_there = l->stage == Stage::kDraining && l->drained_here;  // perhaps: what comes of that is no error
    if (l->stage == Stage::kDraining && side_of(*l, l->drain_epoch & kLinkMask, drained_to) && l->legs[l->casting_off ? l->on : drained_to].link == link)
      end_drain(*l, Stage::kReady);
    if (l->leg().link != link && next_side(*l) == l->on && !cut_there) {
      std::lock_guard guard(l->lock);
      if (l->stage == Stage::kReady) be_at(*l, Stage::kMaking);
    }
  }
  kick(state()->round_fd);
  kick(state()->failover_fd);
}

namespace {

/// At all vQPs. Each message would cost one: where there are many, looks get half of the thread's time, and messages the other.
struct Look {
  std::uint64_t ended_ns = 0, took_ns = 0;  ///< the last one
  /// @return until the next one; 0: now
  unsigned wait_ms() const {
    const std::uint64_t since = now_ns() - ended_ns;
    return state()->qps.size() < kManyVqps || since >= took_ns ? 0 : static_cast<unsigned>((took_ns - since) / 1'000'000) + 1;
  }
};

/// @return ms until the next look at the latest
unsigned look_at_all() {
  unsigned timeout = kIdleMs;
  const std::uint64_t forgotten = state()->forgotten;
  const auto gone = [&](const QpLink* l) {  // one that was cast off is forgotten
    const auto& qps = state()->qps;
    return state()->forgotten != forgotten && std::find(qps.begin(), qps.end(), l) == qps.end();
  };
  std::vector all(state()->qps);
  busy_first(all);
  for (QpLink* l : all) {
    if (gone(l)) continue;
    look_at(*l);
    if (gone(l)) continue;
    if (const unsigned soon = look_at_relay(*l)) timeout = std::min(timeout, soon);
    if (!l->traps.empty()) look_into_traps(*l), timeout = std::min(timeout, kTrapMs);
    if (l->stage == Stage::kDraining || withholds(*l)) timeout = kDrainMs;
    else if (l->stage == Stage::kChanging) timeout = std::min(timeout, l->sessions_until_ns ? kSessionMs : kAskAgainMs);
    else if (state()->parking == State::Parking::kWanted) timeout = std::min(timeout, kTrapMs);
  }
  for (QpShadow* q : Registry::get().qps) look_at_drifting(*q), look_at_guard(*q);
  if (const unsigned soon = look_at_shared_receives()) timeout = std::min(timeout, soon);
  if (const unsigned soon = look_at_executors()) timeout = std::min(timeout, soon);
  note_backed_up();
  return timeout;
}

}  // namespace

void run_failover() {
  Registry& registry = Registry::get();
  int wake_fd;
  {
    std::lock_guard guard(registry.lock);
    if (!state()) return;
    wake_fd = state()->failover_fd;
  }
  Look all_looked_at;
  for (std::uint64_t looked_ns = now_ns();;) {
    std::vector<pollfd> fds{{.fd = wake_fd, .events = POLLIN, .revents = 0}};
    unsigned timeout;
    const std::uint64_t woken_ns = now_ns();
    std::uint64_t locked_ns, done_ns;
    {
      std::lock_guard guard(registry.lock);
      // Whose own thread did not run cannot tell who was silent.
      const std::uint64_t now = locked_ns = now_ns(), gone_ns = now - std::exchange(looked_ns, now);
      if (gone_ns > 2 * kIdleMs * 1'000'000ull)
        for (QpLink* l : state()->qps) l->deadline_ns += gone_ns, l->sessions_until_ns += l->sessions_until_ns ? gone_ns : 0;
      ++state()->passes;
      state()->parked.notify_all();
      for (Link& link : state()->links) {
        look_at_events(link);
        look_at_channels(link);
        pass_events_on(link);
        if (!link.ctx) continue;
        if (link.ctx->async_fd >= 0) fds.push_back({.fd = link.ctx->async_fd, .events = POLLIN, .revents = 0});
        fds.push_back({.fd = link.cq_events->fd, .events = POLLIN, .revents = 0});
        fds.push_back({.fd = link.events->fd, .events = POLLIN, .revents = 0});
      }
      timeout = all_looked_at.wait_ms();
      if (!timeout) {
        const std::uint64_t begun_ns = now_ns();
        timeout = look_at_all();
        all_looked_at = {.ended_ns = now_ns(), .took_ns = now_ns() - begun_ns};
      }
      for (Link& link : state()->links) heartbeats(link);
      if (state()->config.heartbeat_ms && !state()->channels.empty()) timeout = std::min(timeout, state()->config.heartbeat_ms);
      done_ns = now_ns();
    }
    if (done_ns - woken_ns > kLongNs)
      std::fprintf(stderr, "libmigr: a look at the links took long: %llu ms until the library's lock was free, %llu ms with it\n",
                   static_cast<unsigned long long>((locked_ns - woken_ns) / 1'000'000), static_cast<unsigned long long>((done_ns - locked_ns) / 1'000'000));
    poll(fds.data(), fds.size(), static_cast<int>(timeout));
    std::uint64_t count;
    if (fds[0].revents) (void)!read(wake_fd, &count, sizeof count);
  }
}

}  // namespace migr::links
