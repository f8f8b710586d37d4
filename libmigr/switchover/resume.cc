/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <algorithm>
#include <cerrno>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "../events.h"
#include "../kernel_link.h"
#include "../links/links.h"
#include "../provider/provider.h"
#include "../real.h"
#include "ahead.h"
#include "parts.h"

namespace migr::switchover {
namespace {

constexpr unsigned kSessionLimitMs = 1000;   // resume() waits so long for an open kept session

/// q.lock with no kept ibv_wr_* session open (or after the limit: then it completes on the path).
std::unique_lock<std::mutex> lock_between_sessions(QpShadow& q) {
  const std::uint64_t deadline = now_ns() + kSessionLimitMs * 1'000'000ull;
  std::unique_lock guard(q.lock);
  while (kept_session(q) && now_ns() < deadline) {
    guard.unlock();
    pause_briefly();
    guard.lock();
  }
  return guard;
}

/// In order. The path may have no room: of one that was cut as much is replayed as was in flight, and an application that posts until
/// there is no room has done so once more. What is posted makes room as it completes: what is left waits with the QP's links, if it has any,
/// else here. Nothing behind what cannot be posted is executed: the connection ends with it. What the device will not even flush then completes behind
/// what it does.
/// @param in_err  it has ended already
int post_kept(QpShadow& q, bool in_err, std::string& why) {
  std::vector<const KeptSend*> sends;
  for (const KeptSend& send : q.kept_sends) sends.push_back(&send);
  const bool waits_with_links = q.link && !in_err && (q.state.load(std::memory_order_relaxed) & kTrapped);  // else posts would overtake it
  int result = 0;
  bool flushed = false;
  Patience patience;
  for (std::span<const KeptSend* const> left(sends); !left.empty();) {
    std::size_t posted = 0;
    const int err = path::post_sends(q, left, posted);
    q.replayed_sends += static_cast<std::uint32_t>(posted);
    left = left.subspan(posted);
    if (!err) continue;
    if (waits_with_links) return links::hold_left(q, sends.size() - left.size()), 0;
    if (posted) patience = {};
    unsigned before = 0;
    const bool waits = err == ENOMEM || (in_err && !provider::sends_in_queue(q, before) && before);
    if (waits && !patience.over()) {
      pause_briefly();
      std::lock_guard guard(q.send_cq->lock);
      path::poll_to_fake(*q.send_cq);
    } else if (!std::exchange(in_err, true)) {
      result = break_connection(q, why);
      patience = {};
    } else {
      flush_to_fake(q, *left.front());
      flushed = true;
      left = left.subspan(1);
    }
  }
  if (flushed && q.send_cq->armed && q.send_cq->app.channel)
    if (const int silent = inject_event(*q.send_cq, why); silent && !result) result = silent;
  return result;
}

/// Kept receives go to the path, and so do those that the application posts from now on.
int let_receive(QpShadow& q, std::string& why) {
  std::lock_guard guard(q.lock);
  const int err = post_receives(q, q.real, q.kept_receives, why);
  q.replayed_receives = static_cast<std::uint32_t>(q.kept_receives.size());
  q.kept_receives.clear();
  clear_bits(q, kKeepReceives);
  return err;
}

/// Behind let_receive(): kept sends go to the path, in order; then the application may post again.
int let_go(QpShadow& q, std::string& why) {
  auto guard = lock_between_sessions(q);
  q.replayed_sends = 0;
  int err = 0;
  if (q.cut && !q.cut->errors.empty()) {
    {
      std::lock_guard cq_guard(q.send_cq->lock);
      for (const OwedCompletion& owed : q.cut->errors) q.send_cq->fake.push_back(owed.wc);
    }
    if (q.send_cq->armed && q.send_cq->app.channel)
      if (const int silent = inject_event(*q.send_cq, why); silent && !err) err = silent;
  }
  const bool closes = q.gone;
  if (q.gone) {
    if (q.broken) events::hush(q, q.real);  // the application was told of the path before
    if (const int broken = break_connection(q, why); broken && !err) err = broken;
  }
  if (q.state.load(std::memory_order_relaxed) & kTrapped) {
    std::vector<KeptSend> late;
    links::late_sends(q, late);
    const auto behind = q.kept_sends.begin() + static_cast<std::ptrdiff_t>(q.cut ? q.cut->replays : 0);
    if (!late.empty())  // an empty range would move what is behind onto itself
      q.kept_sends.insert(behind, std::make_move_iterator(late.begin()), std::make_move_iterator(late.end()));
  }
  const std::size_t replays = q.cut ? q.cut->replays : 0;
  if (closes) links::give_back_waiting(q, replays);
  else links::hold_rest(q, replays);
  if (const int broken = post_kept(q, closes, why); broken && !err) err = broken;
  q.kept_sends.clear();
  q.logged_receives.clear();
  q.outstanding.clear();
  q.old_path_closed = q.broken = q.adrift = false;
  q.cut.reset();
  q.phase = Phase::kRunning;
  clear_bits(q, kKeepSends | kLogReceives | kOpen);
  q.resumed_ns = now_ns();
  return err;
}

/// Its links are asked for a path from now on.
void drift_on(QpShadow& q) {
  std::lock_guard guard(q.lock);
  q.outstanding.clear();
  set_bits(q, kKeepReceives);
  clear_bits(q, kLogReceives);
  q.phase = Phase::kSuspended;
  q.adrift_ns = now_ns();
}

/// SRQs go without their lock again when no QP of the process is suspended any more.
void release_srqs() {
  Registry& registry = Registry::get();
  for (const QpShadow* q : registry.qps)
    if (q->phase != Phase::kRunning) return;
  for (SrqShadow* s : registry.srqs) {
    std::lock_guard guard(s->lock);
    set_srq_bits(*s, 0, kSuspendedSrq);
  }
}

/// CQs of which no QP is suspended any more leave the fake CQ as soon as it is empty.
void release_cqs() {
  Registry& registry = Registry::get();
  std::unordered_set<const CqShadow*> held;
  for (const QpShadow* q : registry.qps)
    if (q->phase != Phase::kRunning) held.insert({q->send_cq, q->recv_cq});
  for (CqShadow* c : registry.cqs)
    if (c->state.load(std::memory_order_relaxed) & (kSuspendedCq | kRestingCq) && !held.contains(c)) set_cq_bits(*c, 0, kSuspendedCq | kRestingCq);
}

}  // namespace

void flush_to_fake(QpShadow& q, const KeptSend& send) {
  if (!q.send_cq) return;
  ibv_wc wc{};
  wc.wr_id = send.wr.wr_id;
  wc.status = IBV_WC_WR_FLUSH_ERR;
  wc.qp_num = q.vqpn();
  std::lock_guard guard(q.send_cq->lock);
  if (!q.send_cq->ex_session.load(std::memory_order_relaxed)) path::poll_to_fake(*q.send_cq);  // else the provider may have it locked
  q.send_cq->state.fetch_or(kFakeCq, std::memory_order_relaxed);  // who polls may have found nothing there, and no marker, a moment ago
  if (marker::is_marker(wc.wr_id)) {
    if (q.send_cq->markers) --q.send_cq->markers;
    path::complete_stand_in(*q.send_cq, wc);
    return;
  }
  q.send_cq->fake.push_back(wc);
}

int resume(Qps named, std::vector<migr_resume_stat>& out, std::string& why) {
  std::vector<QpShadow*> qps(named.begin(), named.end());
  std::erase_if(qps, [](const QpShadow* q) { return q->phase == Phase::kRunning; });  // made since, or resumed already
  if (const int err = check_arcs(qps, Phase::kRunning, why)) return err;
  for (const QpShadow* q : qps)
    if (q->phase == Phase::kFrozen) {
      why = qp_name(*q) + " is frozen: rebind or roll back first";
      return EBUSY;
    }
  int result = 0;
  const auto drifts = [](const QpShadow& q) { return q.adrift && q.phase != Phase::kSwitched && q.phase != Phase::kRebound; };
  // Of all before anybody sends: some may be connected to each other.
  for (QpShadow* q : qps)
    if (!drifts(*q))
      if (const int err = let_receive(*q, why); err && !result) result = err;
  for (QpShadow* q : qps) {
    if (drifts(*q)) {
      drift_on(*q);
      continue;
    }
    // The new path has the application's own access flags already.
    if (q->old_real) {
      q->write_access_added = q->responder_only = false;
      for_cqs(*q, [](CqShadow& c) {  // of the old path, while its number still has a name
        std::lock_guard guard(c.lock);
        path::poll_to_fake(c);
      });
    }
    if (const int err = let_go(*q, why); err && !result) result = err;
    for (ibv_qp** old : {&q->old_real, &q->spare})
      if (*old) Registry::get().old_paths.push_back(std::exchange(*old, nullptr));
    out.push_back({.ctx_id = q->context->ctx_id(), .vqpn = q->vqpn(), .replayed_sends = q->replayed_sends,
                   .replayed_recvs = q->replayed_receives, .suspended_ns = q->suspended_ns,
                   .last_cqe_ns = q->last_cqe_ns, .resumed_ns = q->resumed_ns});
  }
  // Not before: all who poll would take the processor from those who are still to be let go. Also where others on the CQ do not run yet.
  for (QpShadow* q : qps) for_cqs(*q, [](CqShadow& c) { set_cq_bits(c, 0, kRestingCq); });
  release_cqs();
  release_srqs();
  Registry::get().thawed.notify_all();  // who wants to end a connection
  return result;
}

void name_completions(const QpShadow& q) {
  for_cqs(q, [](CqShadow& c) {
    const auto is = [&](std::uint32_t bits) { return c.state.load(std::memory_order_relaxed) & bits; };
    std::unique_lock guard(c.lock);
    if (!is(kTranslateQpn | kWatchedCq)) return;
    if (!is(kFakeCq)) {  // who polls past it comes back first
      c.state.fetch_or(kFakeCq, std::memory_order_relaxed);
      guard.unlock();
      pause_briefly();
      guard.lock();
    }
    if (!c.ex_session.load(std::memory_order_relaxed)) path::poll_to_fake(c);  // else the provider may have it locked
  });
}

namespace {

/// Caller holds c.lock.
void forget_drain_markers(CqShadow& c, const QpShadow& q) {
  std::erase_if(c.drain_markers, [&](const auto& of_wr_id) {
    const DrainMarker& m = of_wr_id.second;
    if (m.qp == &q && !m.flushed && c.markers) --c.markers;
    return m.qp == &q;
  });
}

}  // namespace

void forget_drain_markers(const QpShadow& q) {
  if (!q.send_cq) return;
  std::lock_guard guard(q.send_cq->lock);
  forget_drain_markers(*q.send_cq, q);
}

void forget_posted(const QpShadow& q) {
  if (!q.send_cq) return;
  CqShadow& c = *q.send_cq;
  std::lock_guard guard(c.lock);
  const auto of_it = [&](const StandIn& s) { return s.owed.front().wc.qp_num == q.vqpn(); };
  const auto stand_ins = static_cast<unsigned>(std::count_if(c.stand_ins.begin(), c.stand_ins.end(), of_it));
  const bool marked = std::any_of(c.drain_markers.begin(), c.drain_markers.end(), [&](const auto& of_wr_id) { return of_wr_id.second.qp == &q; });
  if (!stand_ins && !marked) return;
  if (!c.ex_session.load(std::memory_order_relaxed)) path::poll_to_fake(c);
  forget_drain_markers(c, q);
  c.markers -= std::min(c.markers, static_cast<unsigned>(std::erase_if(c.stand_ins, of_it)));
}

bool destroy_old_paths() {
  constexpr int kAtOnce = 16;
  auto& all = Registry::get().old_paths;
  for (int i = 0; i < kAtOnce && !all.empty(); ++i) {
    real().destroy_qp(all.back());
    all.pop_back();
  }
  return !all.empty();
}

namespace {

/// Caller holds q.lock.
int take_old_path(QpShadow& q, std::string& why) {
  if (q.phase == Phase::kSwitched) {
    const int err = switch_back(q, why);
    q.phase = Phase::kDrained;
    q.logged_receives.clear();  // are on it
    clear_bits(q, kLogReceives);
    return err;
  }
  if (std::exchange(q.old_path_closed, false)) return open_old_path(q, why);
  return q.cut && !q.adrift && !q.cut->joined_again ? join_again(q, why) : 0;
}

}  // namespace

int take_old_paths(std::string& why) {
  int result = 0;
  for (QpShadow* q : Registry::get().qps) {
    if (links::changing(*q)) continue;  // another switchover's
    std::lock_guard guard(q->lock);
    if (const int err = take_old_path(*q, why); err && !result) result = err;
  }
  return result;
}

int rollback(std::string& why) {
  Registry& registry = Registry::get();
  int result = 0;
  const auto note = [&](int err) {
    if (err && !result) result = err;
  };
  // Before anything else: without its tables nothing could be posted. Who has no room for them stays as it is, and is asked once more.
  for (Context* context : registry.contexts)
    if (context->kernel && context->kernel->why_private().empty())
      if (const int err = context->kernel->reattach(context->real->cmd_fd)) return fail(why, err, "cannot attach to migr.ko again");
  for (CqShadow* c : registry.cqs) {
    set_cq_bits(*c, 0, kFrozenCq);
    if (registry.frozen || c->owed_events) note(return_cq_events(*c, why));
  }
  for (SrqShadow* s : registry.srqs) note(unfreeze_srq(*s, why));
  std::vector<QpShadow*> suspended;
  for (QpShadow* q : registry.qps) {
    if (links::changing(*q)) continue;  // another switchover's
    if (q->phase == Phase::kRebound) {
      why = qp_name(*q) + " was restored here and cannot go back";
      return EBUSY;
    }
    {
      std::lock_guard guard(q->lock);
      note(take_old_path(*q, why));
    }
    destroy_real(q->spare);
    if (q->responder_only && path::watch_pollers())  // back_to_rtr() has to know who polls
      for_cqs(*q, [](CqShadow& c) { set_cq_bits(c, kProtectedCq); });
    if (q->phase == Phase::kRunning) continue;
    if (q->phase == Phase::kFrozen) q->phase = Phase::kDrained;
    suspended.push_back(q);
  }
  events::thawed(false);
  for (Context* context : registry.contexts) events::offer(*context->real);
  registry.frozen = false;
  ahead::forget();
  registry.thawed.notify_all();
  std::vector<migr_resume_stat> ignored;
  note(resume(suspended, ignored, why));
  return result;
}

}  // namespace migr::switchover
