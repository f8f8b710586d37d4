/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "guard.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "../path.h"
#include "state.h"

namespace migr::links {

bool guarded(QpShadow& q) {
  std::lock_guard guard(q.guard.lock);
  return q.guard.on;
}

bool failed_unseen(QpShadow& q) {
  std::lock_guard guard(q.guard.lock);
  return q.guard.failed;
}

bool note_failure(QpShadow& q) {
  std::lock_guard guard(q.guard.lock);
  q.guard.failed = q.guard.failed || q.guard.on;
  return q.guard.on;
}

void guard(QpLink& l) {
  QpShadow& q = *l.q;
  Guard& g = q.guard;
  {
    std::lock_guard outer(g.lock);
    std::lock_guard inner(l.lock);
    // Its next backup may not stand yet: it has just come back, or its partner has parted first.
    const bool between = l.stage == Stage::kMaking && l.had_backup && !l.seen;
    g.on = g.on || between || l.stage == Stage::kReady || l.stage == Stage::kDraining || !l.hidden.empty();
    if (!g.on) return;
    be_at(l, Stage::kMaking);
    std::move(l.hidden.begin(), l.hidden.end(), std::back_inserter(g.hidden));
    l.hidden.clear();
    g.failed = !g.hidden.empty();
    g.since_ns = now_ns();
  }
  switchover::for_cqs(q, [&](CqShadow& c) {
    std::lock_guard held(c.lock);
    if (std::find(c.guarded.begin(), c.guarded.end(), &q) == c.guarded.end()) c.guarded.push_back(&q);
  });
}

void relieve(QpLink& l) {
  Guard& g = l.q->guard;
  std::lock_guard outer(g.lock);
  std::lock_guard inner(l.lock);
  be_at(l, Stage::kReady);
  l.wanted = g.failed || !l.hidden.empty();  // what was wanted before could not be
  l.hidden.insert(l.hidden.begin(), g.hidden.begin(), g.hidden.end());
  g.hidden.clear();
  g.on = g.failed = false;
}

void forget_guard(QpShadow& q) {
  switchover::for_cqs(q, [&](CqShadow& c) {
    std::lock_guard held(c.lock);
    std::erase(c.guarded, &q);
  });
  std::lock_guard held(q.guard.lock);
  q.guard.on = q.guard.failed = q.goes_on = false;
  q.guard.hidden.clear();
}

std::vector<Hidden> take_hidden(QpShadow& q) {
  std::lock_guard outer(q.guard.lock);
  auto all = std::exchange(q.guard.hidden, {});
  q.guard.failed = false;
  if (!q.link) return all;  // of the path that comes now nobody knows but the guard
  q.guard.on = false;
  std::lock_guard inner(q.link->lock);
  std::move(q.link->hidden.begin(), q.link->hidden.end(), std::back_inserter(all));
  q.link->hidden.clear();
  return all;
}

void deliver(QpShadow& q, std::vector<Hidden> all) {
  for (Hidden& h : all) {
    std::lock_guard guard(h.cq->lock);
    if (!consumed(*h.cq, h.wc)) continue;
    h.wc.qp_num = q.vqpn();
    h.cq->state.fetch_or(kFakeCq, std::memory_order_relaxed);
    if (path::complete_stand_in(*h.cq, h.wc) < 0) h.cq->fake.push_back(h.wc);
    else if (h.cq->markers) --h.cq->markers;
    h.cq->given_back = h.cq->fake.size();
  }
}

void give_back(QpShadow& q, std::vector<Hidden> all) {
  if (all.empty()) return;
  deliver(q, std::move(all));
  switchover::for_cqs(q, [&](CqShadow& c) {
    std::string why;
    if (c.armed && c.app.channel && switchover::inject_event(c, why)) say(q, why);
  });
}

namespace {

/// Nothing is hidden, and what threads that poll find from now on is the application's at once. @return false: `out`
bool hides_no_more(QpShadow& q, std::vector<Hidden>& out) {
  std::lock_guard guard(q.guard.lock);
  out = std::exchange(q.guard.hidden, {});
  if (out.empty()) q.guard.on = q.guard.failed = q.goes_on = false;
  return out.empty();
}

}  // namespace

void unguard(QpShadow& q) {
  for (std::vector<Hidden> all; !hides_no_more(q, all);) give_back(q, std::move(all));
}

void look_at_guard(QpShadow& q) {
  const unsigned limit_ms = state()->config.adrift_limit_ms;
  const bool moving = Registry::get().moving || q.spare || q.phase != switchover::Phase::kRunning;
  const bool broken = q.link && q.link->stage == Stage::kBroken;
  {
    std::lock_guard guard(q.guard.lock);
    const bool on = q.guard.on;
    if (!on && q.guard.hidden.empty()) return;  // the latter: flushed by the application's own error, and seen before it
    if (moving) q.guard.since_ns = now_ns();
    if (on && !broken && now_ns() - q.guard.since_ns < limit_ms * 1'000'000ull) return;
    if (on && q.guard.failed) say(q, "its path has failed after a migration, or in one, and no other link has come for it; the application gets the errors");
  }
  unguard(q);
}

}  // namespace migr::links
