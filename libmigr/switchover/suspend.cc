/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <algorithm>
#include <cerrno>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "../provider/provider.h"
#include "parts.h"

namespace migr::switchover {

void raise_flags(QpShadow& q, std::uint32_t bits) {
  for_cqs(q, [](CqShadow& c) { set_cq_bits(c, kFakeCq | kSuspendedCq); });
  std::lock_guard guard(q.lock);
  q.phase = Phase::kSuspended;
  q.suspended_ns = now_ns();
  set_bits(q, bits);
}

int suspend(Qps named, std::string& why) {
  std::vector<QpShadow*> qps(named.begin(), named.end());
  std::erase_if(qps, [](const QpShadow* q) { return q->adrift; });
  if (const int err = check_arcs(qps, Phase::kSuspended, why)) return err;
  for (QpShadow* q : qps) {
    const int err = links::failed_unseen(*q) ? 0 : add_write_access(*q, why);
    if (err && !(err == EINVAL && (links::note_failure(*q) || in_error(*q)))) return err;  // and nobody has polled what tells of it
  }
  for (QpShadow* q : qps) raise_flags(*q, kKeepSends | kOpen);
  if (named.size() == Registry::get().qps.size())  // as before a FREEZE: nobody is to be inside of a poll then
    for (CqShadow* c : Registry::get().cqs) set_cq_bits(*c, kFakeCq | kSuspendedCq);
  for (SrqShadow* s : Registry::get().srqs) {
    std::lock_guard guard(s->lock);
    set_srq_bits(*s, kSuspendedSrq);
  }
  return 0;
}

int give_up(Qps qps, std::string& why) {
  for (QpShadow* q : qps) {
    if (q->phase != Phase::kSuspended) {
      why = qp_name(*q) + " is not suspended";
      return EBUSY;
    }
    if (!connected(*q) || q->adrift || q->real->state == IBV_QPS_ERR) continue;
    if (const int err = break_connection(*q, why)) return err;
  }
  return 0;
}

namespace {

constexpr unsigned kFlushLimitMs = 1000;  // a queue in ERR that the device does not flush in that time it never does

/// For queues that are empty but for a completion that may be under way: the binding of a window to nothing, which completes behind
/// whatever was posted before it, as a marker does, and sends nothing.
class Nothing {
 public:
  /// Makes a work request of it. @return false: the device cannot
  bool become(const QpShadow& q, ibv_send_wr& wr) {
    if (q.real->context != q.context->real || !provider::binds_by_work_request(*q.context)) return false;
    auto [at, first] = windows_.try_emplace(q.context, nullptr);
    if (first) at->second = q.context->ops.alloc_mw(q.real->pd, IBV_MW_TYPE_1);
    if (!at->second) return false;
    wr.opcode = IBV_WR_BIND_MW;
    wr.bind_mw = {.mw = at->second, .rkey = at->second->rkey, .bind_info = {.mr = &none_, .addr = 0, .length = 0, .mw_access_flags = 0}};
    return true;
  }
  /// @param bound all that was made of it has completed; else the windows stay
  void end(bool bound) {
    for (const auto& [context, mw] : windows_)
      if (mw && bound) context->ops.dealloc_mw(mw);
    windows_.clear();
  }

 private:
  ibv_mr none_{};  // providers look for its lkey (rdma-core 44)
  std::unordered_map<Context*, ibv_mw*> windows_;
};

/// One QP's way through drain().
struct Draining {
  QpShadow* qp;
  std::uint32_t vqpn;  ///< another one may be made where it was
  bool session_over = false;
  bool polled = false;  ///< its CQs are, since
  bool posted = false;
  bool sends = true;  ///< its marker
  bool done = false;
  bool failed = false;  ///< and the application does not know: it is to be cut
  std::uint64_t wr_id = 0;
  std::uint64_t empty_since = 0;   ///< UD, and in ERR
  std::uint64_t broken_since = 0;  ///< it was seen in ERR
};

/// What may complete on CQs, which the application has made for its own work requests and not for one of ours for each QP.
class Room {
 public:
  /// What has completed since counts no more. Which QPs are on a CQ stands until one is made or destroyed, or an SRQ resized.
  void look_again() {
    const Registry& registry = Registry::get();
    const auto now = std::pair(registry.changes, registry.qps.size());  // the latter: one whose destruction has failed is back
    if (std::exchange(sorted_at_, now) != now) cqs_.clear();
    for (auto& [c, on] : cqs_) {
      on.sends = on.stays = 0;
      on.counted = false;
    }
  }
  /// Caller holds c.lock, and has polled it.
  bool has(const CqShadow& c) {
    if (cqs_.empty()) sort();
    OnCq& on = cqs_[&c];
    const std::size_t most = static_cast<std::size_t>(std::max(c.real->cqe, 1));
    if (c.markers + 1 + on.may_be <= most) return true;
    if (!std::exchange(on.counted, true)) count(c, on);
    if (on.stays >= most && !c.markers) return true;  // not all of that completes at once, says its maker
    return std::max<std::size_t>(on.sends, c.markers) + on.stays + 1 <= most;
  }
  void posted(const CqShadow& c) { ++cqs_[&c].sends; }

 private:
  struct OnCq {
    std::vector<const QpShadow*> qps;
    std::unordered_set<const SrqShadow*> srqs;
    std::size_t may_be = 0;  ///< as the QPs were made
    std::size_t sends = 0;   ///< that are being drained
    std::size_t stays = 0;   ///< receives, and sends of QPs that go on
    bool counted = false;
  };
  void sort() {
    for (const QpShadow* q : Registry::get().qps) {
      if (q->send_cq) cqs_[q->send_cq].may_be += q->cap.max_send_wr;
      if (q->recv_cq) {
        OnCq& on = cqs_[q->recv_cq];
        const SrqShadow* const srq = srq_of(*q);
        if (!srq) on.may_be += q->cap.max_recv_wr;
        else if (on.srqs.insert(srq).second) on.may_be += srq->max_wr;
      }
      for_cqs(*q, [&](const CqShadow& c) { cqs_[&c].qps.push_back(q); });
    }
  }
  void count(const CqShadow& c, OnCq& on) {
    if (!std::exchange(located_, true)) (void)provider::locate_queues(Registry::get().qps);  // FREEZE and CUT say what fails
    for (const SrqShadow* srq : on.srqs) on.stays += srq->max_wr;
    for (const QpShadow* q : on.qps) {
      provider::QueuePart sends, receives;
      if (!q->send_ring.queue || provider::queue_parts(q->send_ring, q->receive_ring, sends, receives)) continue;
      if (q->send_cq == &c) (q->phase == Phase::kRunning ? on.stays : on.sends) += sends.size();
      if (q->recv_cq == &c) on.stays += receives.size();
    }
  }
  std::unordered_map<const CqShadow*, OnCq> cqs_;
  std::pair<std::uint64_t, std::size_t> sorted_at_;
  bool located_ = false;
};

/// @return 0 posted; ENOMEM a queue is full for the moment; else it cannot be
int post_marker(Draining& d, Nothing& nothing, Room& room) {
  QpShadow& q = *d.qp;
  std::lock_guard guard(q.lock);
  ibv_send_wr wr{};
  wr.wr_id = marker::next();
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad;
  std::lock_guard cq_guard(q.send_cq->lock);
  path::poll_to_fake(*q.send_cq);
  if (!room.has(*q.send_cq)) return ENOMEM;
  unsigned before = 1;  // to find the queue takes longer than the packets, in a migration that has made nothing ahead of the stop
  d.sends = !q.send_ring.queue || provider::sends_in_queue(q, before) || before || !nothing.become(q, wr);
  if (const int err = q.real_post_send(q.real, &wr, &bad)) return err;
  ++q.send_cq->markers;
  room.posted(*q.send_cq);
  q.send_cq->drain_markers.emplace(wr.wr_id, DrainMarker{.qp = &q});
  d.wr_id = wr.wr_id;
  d.posted = true;
  return 0;
}

/// What the CQs have told.
struct Seen {
  std::unordered_map<std::uint64_t, ibv_wc_status> markers;  ///< of every round, by wr_id
  std::unordered_set<std::uint32_t> senders;                 ///< vQPNs whose sends completed in the last round
  std::unordered_set<CqShadow*> cqs;                         ///< that are polled, of QPs that are there
};

/// Completions go to the fake CQs, but those of markers to `out`. A CQ is polled once however many QPs are on it.
void poll_cqs(std::vector<Draining>& all, Seen& out) {
  out.senders.clear();
  for (Draining& d : all)
    if (d.session_over && !std::exchange(d.polled, true)) for_cqs(*d.qp, [&](CqShadow& c) { out.cqs.insert(&c); });
  for (CqShadow* c : out.cqs) {
    std::lock_guard guard(c->lock);
    const int moved = path::poll_to_fake(*c);
    for (auto wc = c->fake.end() - moved; wc != c->fake.end(); ++wc)
      if (wc->status != IBV_WC_SUCCESS || !(wc->opcode & IBV_WC_RECV)) out.senders.insert(wc->qp_num);
    for (const ibv_wc& wc : c->seen_markers) out.markers[wc.wr_id] = wc.status;
    c->seen_markers.clear();
  }
}

void look_for_marker(Draining& d, const Seen& seen) {
  const auto found = seen.markers.find(d.wr_id);
  if (found == seen.markers.end()) return;
  if (found->second != IBV_WC_SUCCESS && links::note_failure(*d.qp)) {
    d.failed = true;
    return;
  }
  d.qp->broken = d.qp->broken || found->second != IBV_WC_SUCCESS;  // so is the one that takes its place
  d.done = true;
}

/// A datagram is done when it has left; in ERR, what was flushed. Its completion comes a moment after the queue is empty.
int look_at_queue(Draining& d, const Seen& seen, std::string& why) {
  unsigned left = 0;
  if (const int err = provider::sends_in_queue(*d.qp, left))
    return fail(why, err, "cannot look at the send queue of " + qp_name(*d.qp));
  if (left || seen.senders.contains(d.qp->vqpn()) || !d.empty_since) d.empty_since = left ? 0 : now_ns();
  d.done = d.empty_since && now_ns() - d.empty_since > kFlushQuietMs * 1'000'000ull;
  return 0;
}

int advance(Draining& d, const Seen& seen, Nothing& nothing, Room& room, std::string& why) {
  QpShadow& q = *d.qp;
  if (!d.session_over) {
    // The thread that polls may begin a session on the keeper before it ends its own.
    if (!q.path_session.load(std::memory_order_relaxed)) clear_bits(q, kOpen);
    if (*open_session(q)) return 0;
    d.session_over = true;
  }
  if (q.app.qp_type == IBV_QPT_UD && connected(q)) {
    const int err = look_at_queue(d, seen, why);
    q.broken = d.done && in_error(q);  // no marker tells
    return err;
  }
  if (q.real->state == IBV_QPS_ERR && !q.cut) {  // everything is being flushed
    q.broken = true;                             // so is the one that takes its place
    std::string ignored;
    if (!d.broken_since) d.broken_since = now_ns();
    d.done = look_at_queue(d, seen, ignored) || d.done || now_ns() - d.broken_since > kFlushLimitMs * 1'000'000ull;
    return 0;
  }
  if (!connected(q) || q.responder_only || !q.cap.max_send_wr) {  // nothing was ever sent
    d.done = true;
    return 0;
  }
  if (!d.posted && links::failed_unseen(q)) {
    d.failed = true;
    return 0;
  }
  if (!d.posted) {
    const int err = post_marker(d, nothing, room);
    if (err && err != ENOMEM) return fail(why, err, "cannot post the drain marker of " + qp_name(q));
    return 0;
  }
  look_for_marker(d, seen);
  return 0;
}

/// Nothing comes any more on CQs of which every QP has been drained. Where some go on, as at a partner, who polls may poll for those, too.
void rest_cqs() {
  Registry& registry = Registry::get();
  std::unordered_set<const CqShadow*> at_work;
  for (const QpShadow* q : registry.qps) {
    if (q->phase == Phase::kRunning) return;
    if (q->phase == Phase::kSuspended) at_work.insert({q->send_cq, q->recv_cq});
  }
  for (CqShadow* c : registry.cqs)
    if (c->state.load(std::memory_order_relaxed) & kSuspendedCq && !at_work.contains(c)) set_cq_bits(*c, kRestingCq);
}

}  // namespace

int drain(std::unique_lock<std::mutex> held, Qps qps, unsigned limit_ms, std::vector<migr_drain_stat>& stats, std::string& why) {
  Registry& registry = Registry::get();
  std::vector<Draining> all;
  if (const int err = check_arcs(qps, Phase::kDrained, why)) return err;
  for (QpShadow* q : qps) all.push_back({.qp = q, .vqpn = q->vqpn(), .done = q->adrift});
  held.unlock();
  const std::uint64_t deadline = now_ns() + limit_ms * 1'000'000ull;
  std::uint64_t changes = 0;
  Seen seen;
  Nothing nothing;
  Room room;
  int result = 0;
  const auto drop_destroyed = [&] {  // by the application, while nobody held the lock
    if (changes == registry.changes) return;
    const std::unordered_set<const QpShadow*> live(registry.qps.begin(), registry.qps.end());
    std::erase_if(all, [&](const Draining& d) { return !live.contains(d.qp) || d.qp->vqpn() != d.vqpn; });
    seen.cqs.clear();
    for (Draining& d : all) d.polled = false;
    changes = registry.changes;
  };
  for (;;) {
    bool all_done = true, any_failed = false;
    {
      std::lock_guard guard(registry.lock);
      drop_destroyed();
      poll_cqs(all, seen);
      room.look_again();
      for (Draining& d : all) {
        if (!d.done && !d.failed && !result) result = advance(d, seen, nothing, room, why);
        all_done = all_done && (d.done || d.failed);
        any_failed = any_failed || d.failed;
      }
    }
    if (all_done && any_failed && !result) result = ETIMEDOUT;  // it will not get any better
    if (all_done || result) break;
    if (now_ns() > deadline) {
      result = ETIMEDOUT;
      break;
    }
    pause_briefly();
  }
  std::lock_guard guard(registry.lock);
  drop_destroyed();
  poll_cqs(all, seen);  // what came with the last marker
  nothing.end(std::none_of(all.begin(), all.end(), [](const Draining& d) { return d.posted && !d.sends && !d.done; }));
  unsigned left = 0;
  for (const Draining& d : all) {
    QpShadow& q = *d.qp;
    if (!result || (result == ETIMEDOUT && d.done)) {
      q.phase = Phase::kDrained;
      q.last_cqe_ns = 0;
      for_cqs(q, [&](const CqShadow& c) { q.last_cqe_ns = std::max(q.last_cqe_ns, c.last_cqe_ns); });
    }
    if (result && !d.done) {
      const char* const open = d.session_over ? "" : open_session(q);
      if (!left++ && why.empty()) why = qp_name(q) + (d.failed ? "'s path has failed" : *open ? open
                                                                                              : " still has work requests in flight");
      stats.push_back({.ctx_id = q.context->ctx_id(), .vqpn = q.vqpn(), .sq_in_flight = 1, .rq_outstanding = 0, .kept = static_cast<std::uint32_t>(q.kept_sends.size()), .fake_cqes = 0});
    }
  }
  if (!result) rest_cqs();
  if (result == ETIMEDOUT)
    why += "; " + std::to_string(left) + " of " + std::to_string(all.size()) + " QPs left after " +
           std::to_string(limit_ms) + " ms";
  return result;
}

}  // namespace migr::switchover
