/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "windows.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "links/links.h"
#include "path.h"
#include "provider/provider.h"

namespace migr::windows {
namespace {

constexpr std::uint32_t kKeyTag = 0xff;
constexpr int kMaxCollisions = 64;

struct Window {
  Context* context;
  std::uint32_t pkey;  ///< the provider's rkey of the moment
  bool bound = false;
  ibv_mw_bind_info info{};  ///< with the application's MR
  std::uint32_t vkey = 0;   ///< that it was bound with
  QpShadow* qp = nullptr;   ///< through which; null: it is gone
};

/// What a window was before a WR that is not posted yet: a provider that has no room, or a session that is aborted, leaves it so.
struct Change {
  const QpShadow* q;
  pthread_t by;
  ibv_mw* mw;
  Window was;
};

struct State {
  std::mutex lock;                ///< innermost
  std::vector<Change> unsettled;  ///< in order
  std::unordered_map<ibv_mw*, Window> all;
  std::unordered_map<std::uint32_t, ibv_mw*> by_virtual, by_physical;  ///< index of the key
};

State& state() {
  static State* const s = new State;  // never destroyed: threads may outlive main()
  return *s;
}

/// How many of those are this thread's, or more: a session without any takes no lock.
[[gnu::tls_model("initial-exec")]] thread_local std::size_t unsettled_here = 0;

void note(State& s, const QpShadow& q, ibv_mw* mw, const Window& was) {
  s.unsettled.push_back({.q = &q, .by = pthread_self(), .mw = mw, .was = was});
  ++unsettled_here;
}

std::uint32_t physical_of(const Window& w, std::uint32_t vkey) { return (w.pkey & ~kKeyTag) | (vkey & kKeyTag); }

void watch(QpShadow& q) {
  std::lock_guard guard(q.lock);
  path::translate_keys(q, kWindows);
}

void watch(CqShadow& c) {
  std::lock_guard guard(c.lock);
  c.state.fetch_or(kFakeCq | kWatchedCq, std::memory_order_relaxed);
}

Window* find(ibv_mw* mw) {
  const auto found = state().all.find(mw);
  return found == state().all.end() ? nullptr : &found->second;
}

}  // namespace

ibv_mw* allocate(Context& context, ibv_pd* pd, ibv_mw_type type) {
  // A key of another window's name would be taken for it, by us or by partners.
  State& s = state();
  if (!context.had_windows && !links::may_give_up_backups(context)) return errno = EBUSY, nullptr;
  ibv_mw* colliding[kMaxCollisions];
  int collisions = 0;
  ibv_mw* mw;
  const auto taken = [&](std::uint32_t rkey) { return s.by_virtual.contains(rkey >> 8) || Registry::get().is_retired(rkey); };
  while ((mw = context.ops.alloc_mw(pd, type)) && taken(mw->rkey) && collisions < kMaxCollisions)
    colliding[collisions++] = mw;
  const int saved = errno;
  while (collisions) context.ops.dealloc_mw(colliding[--collisions]);
  errno = saved;
  if (!mw) return nullptr;
  {
    std::lock_guard guard(s.lock);
    s.all[mw] = {.context = &context, .pkey = mw->rkey};
    s.by_virtual[mw->rkey >> 8] = s.by_physical[mw->rkey >> 8] = mw;
  }
  if (context.windows++ == 0) {
    for (QpShadow* q : Registry::get().qps)
      if (q->context == &context) watch(*q);
    for (CqShadow* c : Registry::get().cqs)
      if (c->context == &context) watch(*c);
  }
  if (!std::exchange(context.had_windows, true)) links::give_up_backups(context);
  return mw;
}

int deallocate(Context& context, ibv_mw* mw) {
  State& s = state();
  const std::uint32_t index = mw->rkey >> 8;
  if (const int err = context.ops.dealloc_mw(mw)) return err;
  std::lock_guard guard(s.lock);
  if (const Window* w = find(mw)) {
    if (index != w->pkey >> 8) Registry::get().retired_keys.push_back(index);
    std::erase_if(s.unsettled, [&](const Change& c) { return c.mw == mw; });
    s.by_physical.erase(w->pkey >> 8);
    s.by_virtual.erase(index);
    s.all.erase(mw);
    --context.windows;
  }
  return 0;
}

void made(QpShadow& q) {
  if (q.context->had_windows) watch(q);
}
void made(CqShadow& c) {
  if (c.context->had_windows) watch(c);
}

void gone(const QpShadow& q) {
  State& s = state();
  std::lock_guard guard(s.lock);
  std::erase_if(s.unsettled, [&](const Change& c) { return c.q == &q; });
  const auto without_it = [&](const ibv_mw* mw, Window& w) {
    if (w.qp != &q) return;
    w.qp = nullptr;
    if (mw->type == IBV_MW_TYPE_2) w.bound = false;
  };
  for (auto& [mw, w] : s.all) without_it(mw, w);
  for (Change& c : s.unsettled) without_it(c.mw, c.was);
}

void dropped(const Context& context) {
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto of_it = [&](const auto& named) { return named.second->context == context.real; };
  std::erase_if(s.by_virtual, of_it);
  std::erase_if(s.by_physical, of_it);
  std::erase_if(s.unsettled, [&](const Change& c) { return c.was.context == &context; });
  std::erase_if(s.all, [&](const auto& w) { return w.second.context == &context; });
}

std::vector<ibv_mw*> belonging_to(const QpShadow& q) {
  std::vector<ibv_mw*> out;
  std::lock_guard guard(state().lock);
  for (const auto& [mw, w] : state().all)
    if (mw->type == IBV_MW_TYPE_2 && w.bound && w.qp == &q) out.push_back(mw);
  return out;
}

bool bind_again(ibv_mw* mw, Operation& op) {
  std::lock_guard guard(state().lock);
  Window* w = find(mw);
  if (!w || !w->bound) return false;
  op.provider = *mw;
  op.provider.rkey = w->pkey;
  op.wr = {};
  op.wr.opcode = IBV_WR_BIND_MW;
  op.wr.bind_mw.mw = &op.provider;
  op.wr.bind_mw.rkey = w->pkey = physical_of(*w, w->vkey);
  op.wr.bind_mw.bind_info = w->info;
  if (w->info.mr) op.wr.bind_mw.bind_info.mr = shadow_of(w->info.mr).real;
  return true;
}

void end_binding(ibv_mw* mw, Operation& op) {
  std::lock_guard guard(state().lock);
  op.wr = {};
  op.wr.opcode = IBV_WR_LOCAL_INV;
  if (const Window* w = find(mw)) op.wr.invalidate_rkey = w->pkey;
}

int make_again(std::string& why) {
  State& s = state();
  std::lock_guard guard(s.lock);
  s.by_physical.clear();
  for (auto& [mw, w] : s.all) {
    ibv_mw* fresh = w.context->ops.alloc_mw(mw->pd, mw->type);
    if (!fresh) {
      const int err = errno;
      why = std::string("alloc_mw: ") + std::strerror(err);
      return err;
    }
    mw->handle = fresh->handle;
    w.pkey = fresh->rkey;
    free(fresh);  // it came from calloc()
    s.by_physical[w.pkey >> 8] = mw;
  }
  return 0;
}

void keys(std::vector<migr_key_map>& out) {
  std::lock_guard guard(state().lock);
  for (const auto& [mw, w] : state().all) {
    const std::uint32_t vkey = w.bound ? w.vkey : mw->rkey;
    out.push_back({.vrkey = vkey, .prkey = physical_of(w, vkey), .owner = {}});
  }
}

std::vector<std::pair<ibv_mw*, QpShadow*>> bound() {
  std::vector<std::pair<ibv_mw*, QpShadow*>> out;
  std::lock_guard guard(state().lock);
  for (const auto& [mw, w] : state().all)
    if (w.bound) out.emplace_back(mw, w.qp);
  return out;
}

/* ---- data path --------------------------------------------------------------------- */

bool translate(QpShadow& q, ibv_send_wr& wr, ibv_mw& view) noexcept {
  if (wr.opcode != IBV_WR_LOCAL_INV && wr.opcode != IBV_WR_BIND_MW) return false;
  State& s = state();
  std::lock_guard guard(s.lock);
  if (wr.opcode == IBV_WR_LOCAL_INV) {
    const auto found = s.by_virtual.find(wr.invalidate_rkey >> 8);
    if (found == s.by_virtual.end()) return false;
    Window& w = s.all.at(found->second);
    note(s, q, found->second, w);
    w.bound = false;
    wr.invalidate_rkey = physical_of(w, wr.invalidate_rkey);
    return true;
  }
  Window* w = find(wr.bind_mw.mw);
  if (!w) return false;
  note(s, q, wr.bind_mw.mw, *w);
  w->info = wr.bind_mw.bind_info;
  w->bound = w->info.length != 0;
  w->vkey = wr.bind_mw.rkey;
  w->qp = &q;
  view = *wr.bind_mw.mw;
  view.rkey = w->pkey;
  wr.bind_mw.mw = &view;
  wr.bind_mw.rkey = w->pkey = physical_of(*w, wr.bind_mw.rkey);
  if (w->info.mr) wr.bind_mw.bind_info.mr = shadow_of(w->info.mr).real;
  return true;
}

void settle(const QpShadow& q, bool posted) noexcept {
  if (!unsettled_here) return;
  State& s = state();
  const pthread_t me = pthread_self();
  const auto here = [&](const Change& c) { return pthread_equal(c.by, me) != 0; };
  const auto mine = [&](const Change& c) { return c.q == &q && here(c); };
  std::lock_guard guard(s.lock);
  if (!posted)
    for (auto c = s.unsettled.rbegin(); c != s.unsettled.rend(); ++c)
      if (mine(*c)) *find(c->mw) = c->was;
  std::erase_if(s.unsettled, mine);
  unsettled_here = static_cast<std::size_t>(std::count_if(s.unsettled.begin(), s.unsettled.end(), here));
}

void invalidated(ibv_wc& wc) noexcept {
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto found = s.by_physical.find(wc.invalidated_rkey >> 8);
  if (found == s.by_physical.end()) return;
  Window& w = s.all.at(found->second);
  w.bound = false;
  for (Change& c : s.unsettled)
    if (c.mw == found->second) c.was.bound = false;
  wc.invalidated_rkey = (found->second->rkey & ~kKeyTag) | (wc.invalidated_rkey & kKeyTag);
}

}  // namespace migr::windows
