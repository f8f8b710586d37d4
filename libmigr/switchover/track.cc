/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../links/shared_receives.h"
#include "../provider/provider.h"
#include "parts.h"

namespace migr::switchover {
namespace {

using tracking::kMostParts;

/// "" or what the process has that nobody can follow.
const char* untracked(const QpShadow& q, bool here) {
  if (!reliable(q)) return "is no reliable connection";
  // A receive that a device has taken from an SRQ for a message that comes in part is in no queue any more.
  if (here && q.app.srq && !links::shares_receives(q)) return "has a shared receive queue, and no policy is configured for its process";
  if (here && q.state.load(std::memory_order_relaxed) & kWindows) return "is of a process with memory windows";
  return "";
}

/// Caller holds q.lock.
void end(QpShadow& q) {
  if (!q.tracked) return;
  clear_bits(q, kTracked | (q.tracked->opening && q.phase == Phase::kRunning ? kOpen : 0u));
  q.tracked.reset();
}

/// The last session has no note any more a moment before what it has built is in the queue: until then it has the provider's lock.
void wait_for_the_last(const QpShadow& q) {
  if (!q.real_ex) return;
  q.real_ex->wr_start(q.real_ex);
  q.real_ex->wr_abort(q.real_ex);
}

/// Nobody posts but under the lock.
int note_queue(QpShadow& q, std::string& why) {
  wait_for_the_last(q);
  std::lock_guard guard(q.lock);
  tracking::Notes& notes = *q.tracked;
  notes.opening = false;
  if (q.phase == Phase::kRunning) clear_bits(q, kOpen);
  provider::QueuePart posted_sends, posted_receives;
  std::vector<QueuedSend> sends;
  std::vector<KeptReceive> receives;
  int err = provider::queue_parts(q, posted_sends, posted_receives);
  if (!err) err = provider::sends_in(q, posted_sends, sends);
  if (!err && notes.here) err = provider::receives_in(q, posted_receives, receives);
  if (err) return fail(why, err, "cannot look at the queues of " + qp_name(q));
  for (QueuedSend& queued : sends) {
    ibv_send_wr wr = queued.send.wr;
    ibv_sge all{.addr = 0, .length = static_cast<std::uint32_t>(queued.bytes), .lkey = 0};
    const bool leaves = !notes.here;  // then it matters how much it is, which may be inline
    wr.sg_list = leaves ? &all : queued.send.sges.data();
    wr.num_sge = leaves ? 1 : static_cast<int>(queued.send.sges.size());
    tracking::note(notes, wr);
  }
  for (KeptReceive& receive : receives) {
    ibv_recv_wr wr{};
    wr.sg_list = receive.sges.data();
    wr.num_sge = static_cast<int>(receive.sges.size());
    tracking::note(notes, wr);
  }
  return 0;
}

void add(const tracking::KeyedParts& from, tracking::KeyedParts& to) {
  for (const auto& [key, parts] : from)
    for (const auto& [start, end] : parts.all()) to[key].add(start, end - start);
}

void put(const tracking::KeyedParts& keyed, std::uint32_t ctx_id, std::uint32_t vqpn, std::vector<migr_nic_write>& out) {
  for (const auto& [key, parts] : keyed)
    for (const auto& [start, end] : parts.all()) out.push_back({.ctx_id = ctx_id, .vqpn = vqpn, .key = key, .reserved = 0, .start = start, .bytes = end - start});
}

}  // namespace

int track(Qps qps, bool here, std::string& why) {
  for (const QpShadow* q : qps) {
    if (const char* const what = untracked(*q, here); *what) return fail(why, EOPNOTSUPP, qp_name(*q) + " " + what);
    if (q->phase != Phase::kRunning && !q->adrift) return fail(why, EBUSY, qp_name(*q) + " is in a switchover");
  }
  end_tracking();
  for (QpShadow* q : qps) {
    if (q->adrift) continue;  // nothing of it is on any device
    std::lock_guard guard(q->lock);
    q->tracked = std::make_unique<tracking::Notes>();
    q->tracked->here = here;
    set_bits(*q, kTracked | kOpen);
  }
  if (here)
    for (SrqShadow* s : Registry::get().srqs) {
      std::lock_guard guard(s->lock);
      if (s->link) links::track(*s);
    }
  return 0;
}

int note_queues(unsigned limit_ms, std::string& why) {
  Registry& registry = Registry::get();
  const std::uint64_t deadline = now_ns() + limit_ms * 1'000'000ull;
  for (bool first = true;; first = false, pause_briefly()) {
    std::lock_guard guard(registry.lock);
    std::vector<QpShadow*> left;
    for (QpShadow* q : registry.qps)
      if (q->tracked && q->tracked->opening) left.push_back(q);
    if (first)
      if (const int err = provider::locate_queues(left)) return end_tracking(), fail(why, err, "cannot find the queues");
    const char* open = "";
    for (QpShadow* q : left) {
      if (q->path_session.load(std::memory_order_relaxed)) open = "an ibv_wr_* session does not end";
      else if (const int err = note_queue(*q, why)) return end_tracking(), err;
    }
    if (!*open) return 0;
    if (now_ns() > deadline) return end_tracking(), fail(why, ETIMEDOUT, open);
  }
}

int take_notes(std::vector<migr_nic_write>& out, std::string& why) {
  static const bool left_out = getenv("MIGR_TEST_NO_TRACKING") != nullptr;
  Registry& registry = Registry::get();
  std::unordered_map<const Context*, tracking::KeyedParts> here;
  bool any = false, whole = !registry.tracking_failed, few = true;
  for (QpShadow* q : registry.qps) {
    std::lock_guard guard(q->lock);
    if (!q->tracked) continue;
    any = true;
    few = few && q->tracked->whole;
    whole = whole && !q->tracked->opening && !*untracked(*q, q->tracked->here);  // windows may have been made since
    if (q->tracked->here) add(q->tracked->parts, here[q->context]);
    else put(q->tracked->parts, q->context->ctx_id(), q->vqpn(), out);
  }
  for (SrqShadow* s : registry.srqs) {
    std::lock_guard guard(s->lock);
    if (!s->tracked) continue;
    few = few && s->tracked->whole;
    add(s->tracked->parts, here[s->context]);
  }
  end_tracking();
  for (const auto& [context, parts] : here) put(parts, context->ctx_id(), 0, out);
  if (left_out) out.clear();
  if (any && whole && few && out.size() <= kMostParts) return 0;
  out.clear();
  return fail(why, ESTALE, !any ? "nothing is tracked" : !whole ? "a QP is gone, or was not looked at, or has got memory windows"
                                                                : "NICs write to too many places");
}

void end_tracking() {
  for (QpShadow* q : Registry::get().qps) {
    std::lock_guard guard(q->lock);
    end(*q);
  }
  for (SrqShadow* s : Registry::get().srqs) {
    std::lock_guard guard(s->lock);
    s->tracked.reset();
  }
  Registry::get().tracking_failed = false;
}

}  // namespace migr::switchover
