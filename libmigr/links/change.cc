/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The change of a vQP's path to its backup link: docs/failover.md, steps 1 to 6. Under the Registry's lock. */
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../path.h"
#include "../real.h"
#include "../switchover/parts.h"
#include "channel.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr unsigned kIdleMs = 1000, kTrapMs = 20;

std::uint32_t next_epoch(const QpLink& l);

StateRecord state_record(const QpLink& l, std::uint32_t flags) {
  return {.to = l.peer, .from = l.name, .epoch = l.epoch, .psn = l.q->cut ? l.q->cut->psn : 0, .flags = flags, .reserved = 0};
}

void tell(QpLink& l, std::uint32_t flags = 0) {
  const StateRecord one[] = {state_record(l, flags)};
  if (l.channel) send_states(*l.channel, one);
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
  out.from = l.twin->home->index;
  out.to = l.twin->link->index;
  out.outcome = outcome;
  out.vqps = outcome == MIGR_LINKS_SWITCH_DONE;
  out.broken = outcome != MIGR_LINKS_SWITCH_DONE;
  if (replayed) out.replayed = replayed->replayed, out.executed = replayed->executed, out.lost = replayed->lost;
  out.cause = l.cause;
  out.tries = 1;
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  out.resume_ns = now_ns() - l.noticed_ns;
  out.when_ns = static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec) - out.resume_ns;
  out.cut_ns = l.cut_ns > l.noticed_ns ? l.cut_ns - l.noticed_ns : 0;
  out.told_ns = out.resume_ns;
  state()->to_report.push_back(out);
  kick(state()->round_fd);
}

/// Cut here and told there.
void finish(QpLink& l) {
  QpShadow& q = *l.q;
  QpShadow* const one[] = {&q};
  const migr_qp_psn psn[] = {{.ctx_id = 0, .vqpn = q.vqpn(), .psn = l.peer_psn, .reserved = 0}};
  std::vector<migr_replay_stat> replayed;
  std::vector<migr_resume_stat> resumed;
  std::string why;
  {
    std::lock_guard guard(q.lock);
    set_remote_keys(l);
  }
  int err = switchover::settle(one, psn, replayed, why);
  l.trap = std::exchange(q.old_real, nullptr);
  set_stage(l, Stage::kSwitched);
  const bool lost = q.cut && q.cut->lost;
  if (const int e = switchover::resume(one, resumed, why); e && !err) err = e;
  wake(q);
  if (lost) {
    say(l, "an atomic was in flight when its link failed, and whether it was executed cannot be told: the application gets the error");
    set_stage(l, Stage::kBroken);
  } else if (err) {
    say(l, "after the change to link " + std::to_string(l.twin->link->index) + ": " + why);
  }
  report(l, lost ? MIGR_LINKS_SWITCH_BROKEN : MIGR_LINKS_SWITCH_DONE, replayed.empty() ? nullptr : &replayed[0]);
}

void look_at_wanted() {
  for (QpLink* l : std::vector(state()->qps)) {
    bool wanted;
    {
      std::lock_guard guard(l->lock);
      wanted = l->wanted && l->stage == Stage::kReady;
    }
    if (wanted) begin(*l, l->twin->home->down ? MIGR_LINKS_CAUSE_NETLINK : MIGR_LINKS_CAUSE_COMPLETION, next_epoch(*l));
  }
}

void look_at_deadlines() {
  const std::uint64_t now = now_ns();
  for (QpLink* l : std::vector(state()->qps)) {
    if (l->stage != Stage::kChanging || now < l->deadline_ns) continue;
    tell(*l, kCannot);
    give_back(*l, "the other end has not answered for " + std::to_string(state()->config.switch_limit_ms) + " ms");
  }
}

void look_into_trap(QpLink& l) {
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

void look_at_channels(Link& link) {
  if (!link.cq) return;
  ibv_cq* cq;
  void* context;
  while (real().get_cq_event(link.cq_events, &cq, &context) == 0) real().ack_cq_events(cq, 1);
  link.ops.req_notify_cq(link.cq, 0);
  poll_channels(link);
}

}  // namespace

void set_remote_keys(QpLink& l) {
  QpShadow& q = *l.q;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
  if (l.channel)
    if (const auto of_home = l.channel->keys.find(l.peer_home); of_home != l.channel->keys.end())
      pairs.assign(of_home->second.begin(), of_home->second.end());
  // Not given back: a thread that posts may be looking into it.
  __atomic_store_n(&q.remote_keys, new RemoteKeys(pairs), __ATOMIC_RELEASE);
}

// Keys need no translation: a path with other keys than the application's is not protected.

void late_sends(QpShadow& q, std::vector<KeptSend>& out) {
  QpLink& l = *q.link;
  provider::QueuePart sends, receives;
  std::vector<QueuedSend> late;
  int err = provider::queue_parts(l.trap_sends, l.trap_receives, sends, receives);
  sends.from = l.trap_next_send;
  if (!err && sends.size()) err = provider::sends_in(l.trap_sends, sends, late);
  if (err) return say(l, std::string("the old path cannot be read: ") + std::strerror(err));
  l.trap_next_send = sends.to;
  for (QueuedSend& s : late) out.push_back(std::move(s.send));
}

void late_receives(QpShadow& q, std::vector<KeptReceive>& out) {
  QpLink& l = *q.link;
  provider::QueuePart sends, receives;
  int err = provider::queue_parts(l.trap_sends, l.trap_receives, sends, receives);
  receives.from = l.trap_next_receive;
  if (!err && receives.size()) err = provider::receives_in(l.trap_receives, receives, out);
  if (err) return say(l, std::string("the old path cannot be read: ") + std::strerror(err));
  l.trap_next_receive = receives.to;
}

void empty_trap(QpShadow& q) {
  std::vector<KeptReceive> receives;
  std::vector<KeptSend> sends;
  int err = 0;
  late_receives(q, receives);
  for (const KeptReceive& r : receives)
    if (!err) err = path::post_one_receive(q, q.real, r);
  if (!(q.state.load(std::memory_order_relaxed) & kKeepSends)) late_sends(q, sends);
  for (const KeptSend& s : sends)
    if (!err) err = path::post_one_send(q, s);
  if (err) say(*q.link, std::string("what a thread posted to the old path late cannot be posted to the new one: ") + std::strerror(err));
}

namespace {
std::uint32_t next_epoch(const QpLink& l) { return ((l.epoch >> 3) + 1) << 3 | l.twin->link->index; }
}  // namespace

void begin(QpLink& l, migr_links_cause cause, std::uint32_t epoch) {
  QpShadow& q = *l.q;
  set_stage(l, Stage::kChanging);
  l.epoch = epoch;
  l.cause = cause;
  l.noticed_ns = now_ns();
  l.deadline_ns = l.noticed_ns + state()->config.switch_limit_ms * 1'000'000ull;
  std::string why = make_memory(*l.twin);
  QpShadow* const one[] = {&q};
  int err = why.empty() ? provider::locate_queues(one) : EIO;
  if (err && why.empty()) why = std::string("cannot find its queues: ") + std::strerror(err);
  l.trap_sends = q.send_ring;
  l.trap_receives = q.receive_ring;
  if (!err) err = switchover::leave_path(q, l.twin->policy == Policy::kResend, why);
  if (!err) {
    l.cut_ns = now_ns();
    const Link& link = *l.twin->link;
    err = switchover::switch_to_link(q, {.qp = l.path, .ops = &link.ops, .keys = l.twin->key_table, .qpn_table = link.qpn_table}, why);
  }
  if (err) {
    tell(l, kCannot);
    return give_back(l, why);
  }
  tell(l);
  if (l.peer_told) finish(l);
}

void give_back(QpLink& l, const std::string& why) {
  QpShadow& q = *l.q;
  set_stage(l, Stage::kBroken);
  l.why = "gave up";
  say(l, "its link failed, and it stays there: " + why + "; the application gets the errors");
  std::vector<QpLink::Hidden> all;
  {
    std::lock_guard guard(l.lock);
    all.swap(l.hidden);
  }
  if (q.cut) {
    for (const ibv_wc& wc : q.cut->taken_sends) all.push_back({q.send_cq, wc});
    for (const ibv_wc& wc : q.cut->taken_receives) all.push_back({q.recv_cq, wc});
  }
  for (QpLink::Hidden& h : all) {
    std::lock_guard guard(h.cq->lock);
    h.wc.qp_num = q.vqpn();
    h.cq->state.fetch_or(kFakeCq, std::memory_order_relaxed);
    h.cq->fake.push_back(h.wc);
  }
  std::string more;
  if (q.phase != switchover::Phase::kRunning && switchover::back_to_broken(q, more)) say(l, more);
  wake(q);
  report(l, MIGR_LINKS_SWITCH_BROKEN, nullptr);
}

void got_state(Channel& from, const StateRecord& record) {
  QpLink* const l = find(record.to);
  if (!l || !same(l->peer, record.from)) {
    if (record.flags & kCannot) return;
    const StateRecord no[] = {{.to = record.from, .from = record.to, .epoch = record.epoch, .psn = 0, .flags = kCannot, .reserved = 0}};
    return send_states(from, no);
  }
  if (record.flags & kCannot) {
    if (l->stage == Stage::kChanging && record.epoch == l->epoch) give_back(*l, "the other end cannot change its path");
    return;
  }
  l->channel = &from;
  const bool next = record.epoch > l->epoch && (record.epoch & 7) == l->twin->link->index;
  if (l->stage == Stage::kReady || (l->stage == Stage::kMaking && l->connected)) {
    if (!next) return tell(*l, kCannot);
    l->peer_told = true;
    l->peer_psn = record.psn;
    return begin(*l, MIGR_LINKS_CAUSE_PEER, record.epoch);
  }
  if (l->stage == Stage::kChanging && record.epoch == l->epoch && !l->peer_told) {
    l->peer_told = true;
    l->peer_psn = record.psn;
    return finish(*l);
  }
  if (l->stage == Stage::kSwitched && record.epoch == l->epoch) return;  // once more
  const StateRecord no[] = {{.to = record.from, .from = record.to, .epoch = record.epoch, .psn = 0, .flags = kCannot, .reserved = 0}};
  send_states(from, no);
}

void channel_broke(Channel& channel) {
  auto& rounds = state()->rounds;
  const std::pair<Peer, unsigned> key{channel.peer, channel.link->index};
  std::erase_if(rounds, [&](const auto& r) { return r.first == key; });
  rounds.push_back({key, channel.round});
  for (QpLink* l : std::vector(state()->qps)) {
    if (l->channel != &channel) continue;
    l->channel = nullptr;
    if (l->stage == Stage::kChanging) give_back(*l, "the channel over link " + std::to_string(channel.link->index) + " broke, too");
    std::lock_guard guard(l->lock);
    if (l->stage == Stage::kReady) l->stage = Stage::kMaking;
  }
  destroy_channel(&channel);
  kick(state()->round_fd);
}

void run_failover() {
  Registry& registry = Registry::get();
  int wake_fd;
  {
    std::lock_guard guard(registry.lock);
    if (!state()) return;
    wake_fd = state()->failover_fd;
  }
  for (;;) {
    std::vector<pollfd> fds{{.fd = wake_fd, .events = POLLIN, .revents = 0}};
    unsigned timeout = kIdleMs;
    {
      std::lock_guard guard(registry.lock);
      for (Link& link : state()->links) {
        look_at_channels(link);
        pass_events_on(link);
        if (!link.ctx) continue;
        fds.push_back({.fd = link.cq_events->fd, .events = POLLIN, .revents = 0});
        fds.push_back({.fd = link.events->fd, .events = POLLIN, .revents = 0});
      }
      look_at_wanted();
      look_at_deadlines();
      for (QpLink* l : state()->qps)
        if (l->stage == Stage::kSwitched) {
          look_into_trap(*l);
          timeout = std::min(timeout, kTrapMs);
        }
      for (Link& link : state()->links) heartbeats(link);
      if (state()->config.heartbeat_ms && !state()->channels.empty()) timeout = std::min(timeout, state()->config.heartbeat_ms);
    }
    poll(fds.data(), fds.size(), static_cast<int>(timeout));
    std::uint64_t count;
    if (fds[0].revents) (void)!read(wake_fd, &count, sizeof count);
  }
}

}  // namespace migr::links
