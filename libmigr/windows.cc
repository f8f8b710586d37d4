/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "windows.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "links/links.h"
#include "objects.h"
#include "path.h"
#include "provider/provider.h"

namespace migr::windows {
namespace {

constexpr std::uint32_t kKeyTag = 0xff;

struct Window {
  Context* context;
  std::uint32_t pkey;  ///< the provider's rkey of the moment
  bool bound = false;
  ibv_mw_bind_info info{};  ///< with the application's MR
  std::uint32_t vkey = 0;   ///< that it was bound with
  QpShadow* qp = nullptr;   ///< through which; null: it is gone
};

/// What a window was before a WR: a provider that has no room, a session that is aborted, or a device that does not execute it leaves it
/// so.
struct Change {
  pthread_t by;
  std::uint64_t wr_id;
  bool signalled;
  ibv_mw* mw;
  Window was;
  bool posted = false;
};
using Changes = std::deque<Change>;                       // of one QP, in order
using Number = std::pair<const Context*, std::uint32_t>;  // a QP's, or a key's index: devices count each by itself

struct State {
  std::mutex lock;                    ///< innermost
  std::map<Number, Changes> changes;  ///< that are not known to be executed
  std::unordered_map<ibv_mw*, Window> all;
  std::map<Number, ibv_mw*> by_virtual, by_physical;
};

State& state() {
  static State* const s = new State;  // never destroyed: threads may outlive main()
  return *s;
}

/// How many of those this thread has not posted yet, or more: a session without any takes no lock.
[[gnu::tls_model("initial-exec")]] thread_local std::size_t unsettled_here = 0;

Number name_of(const QpShadow& q) { return {q.context, q.vqpn()}; }

void note(State& s, const QpShadow& q, const ibv_send_wr& wr, ibv_mw* mw, const Window& was) {
  Changes& changes = s.changes[name_of(q)];
  const bool signalled = q.init.sq_sig_all || (wr.send_flags & IBV_SEND_SIGNALED);
  changes.push_back({.by = pthread_self(), .wr_id = wr.wr_id, .signalled = signalled, .mw = mw, .was = was});
  if (changes.size() > q.cap.max_send_wr && changes.front().posted) changes.pop_front();  // it has left the queue
  ++unsettled_here;
}

template <class Match>
void forget_changes(State& s, Match&& match) {
  for (auto& [ignored, changes] : s.changes) std::erase_if(changes, match);
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
  std::vector<ibv_mw*> colliding;
  const std::size_t names = s.by_virtual.size() + Registry::get().retired_keys.size() + Registry::get().mrs.size();
  ibv_mw* mw;
  const auto taken = [&](std::uint32_t rkey) { return migr::is_name(Registry::get(), context, rkey); };
  while ((mw = context.ops.alloc_mw(pd, type)) && taken(mw->rkey)) {
    colliding.push_back(mw);
    if (colliding.size() <= names) continue;
    errno = ENOMEM;
    mw = nullptr;
    break;
  }
  const int saved = errno;
  for (ibv_mw* one : colliding) context.ops.dealloc_mw(one);
  errno = saved;
  if (!mw) return nullptr;
  {
    std::lock_guard guard(s.lock);
    s.all[mw] = {.context = &context, .pkey = mw->rkey};
    s.by_virtual[{&context, mw->rkey >> 8}] = s.by_physical[{&context, mw->rkey >> 8}] = mw;
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

bool is_name(const Context& context, std::uint32_t key) {
  State& s = state();
  std::lock_guard guard(s.lock);
  return s.by_virtual.contains({&context, key >> 8});
}

int deallocate(Context& context, ibv_mw* mw) {
  State& s = state();
  const std::uint32_t index = mw->rkey >> 8;
  if (const int err = context.ops.dealloc_mw(mw)) return err;
  std::lock_guard guard(s.lock);
  if (const Window* w = find(mw)) {
    if (index != w->pkey >> 8) Registry::get().retired_keys.insert(index);
    forget_changes(s, [&](const Change& c) { return c.mw == mw; });
    s.by_physical.erase({&context, w->pkey >> 8});
    s.by_virtual.erase({&context, index});
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
  s.changes.erase(name_of(q));
  const auto without_it = [&](const ibv_mw* mw, Window& w) {
    if (w.qp != &q) return;
    w.qp = nullptr;
    if (mw->type == IBV_MW_TYPE_2) w.bound = false;
  };
  for (auto& [mw, w] : s.all) without_it(mw, w);
  for (auto& [ignored, changes] : s.changes)
    for (Change& c : changes) without_it(c.mw, c.was);
}

void dropped(const Context& context) {
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto of_it = [&](const auto& named) { return named.second->context == context.real; };
  std::erase_if(s.by_virtual, of_it);
  std::erase_if(s.by_physical, of_it);
  std::erase_if(s.changes, [&](const auto& of) { return of.first.first == &context; });
  std::erase_if(s.all, [&](const auto& w) { return w.second.context == &context; });
}

void lock_for_fork() { state().lock.lock(); }
void unlock_after_fork() { state().lock.unlock(); }

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
  if (!w || !w->bound || !w->info.mr || !Registry::get().mrs.contains(&shadow_of(w->info.mr))) return false;
  forget_changes(state(), [&](const Change& c) { return c.mw == mw; });  // all were executed
  op.provider = *mw;
  op.provider.rkey = w->pkey;
  op.wr = {};
  op.wr.opcode = IBV_WR_BIND_MW;
  op.wr.bind_mw.mw = &op.provider;
  op.wr.bind_mw.rkey = w->pkey = physical_of(*w, w->vkey);
  op.wr.bind_mw.bind_info = w->info;
  op.wr.bind_mw.bind_info.mr = shadow_of(w->info.mr).real;
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
  s.changes.clear();
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
    s.by_physical[{w.context, w.pkey >> 8}] = mw;
  }
  return 0;
}

void keys(const Context& context, std::vector<migr_key_map>& out) {
  std::lock_guard guard(state().lock);
  for (const auto& [mw, w] : state().all) {
    if (w.context != &context) continue;
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
    const auto found = s.by_virtual.find({q.context, wr.invalidate_rkey >> 8});
    if (found == s.by_virtual.end()) return false;
    Window& w = s.all.at(found->second);
    note(s, q, wr, found->second, w);
    w.bound = false;
    wr.invalidate_rkey = physical_of(w, wr.invalidate_rkey);
    return true;
  }
  Window* w = find(wr.bind_mw.mw);
  if (!w) return false;
  note(s, q, wr, wr.bind_mw.mw, *w);
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

namespace {

/// What `c` was to change is as it was.
void undo(const Change& c) {
  if (Window* const w = find(c.mw)) *w = c.was;
}

}  // namespace

void settle(const QpShadow& q, bool posted) noexcept {
  if (!unsettled_here) return;
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto of_it = s.changes.find(name_of(q));
  if (of_it == s.changes.end()) return;
  const pthread_t me = pthread_self();
  for (auto c = of_it->second.rbegin(); c != of_it->second.rend() && unsettled_here; ++c) {
    if (c->posted || !pthread_equal(c->by, me)) continue;
    --unsettled_here;
    c->posted = true;
    if (!posted) undo(*c), c->mw = nullptr;
  }
  if (!posted) std::erase_if(of_it->second, [](const Change& c) { return !c.mw; });
}

void completed(const Context& context, const ibv_wc& wc) noexcept {
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto of_it = s.changes.find({&context, wc.qp_num});
  if (of_it == s.changes.end()) return;
  Changes& changes = of_it->second;
  // Of one that is not signalled only its own error tells: others may have its wr_id.
  const bool tells = wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_MW_BIND_ERR;
  const auto first = std::find_if(changes.begin(), changes.end(), [&](const Change& c) { return c.wr_id == wc.wr_id && (tells || c.signalled); });
  if (first == changes.end()) return;
  if (wc.status == IBV_WC_SUCCESS) {
    changes.erase(changes.begin(), first + 1);
    return;
  }
  for (auto c = changes.end(); c != first;) undo(*--c);  // what is behind it is flushed
  changes.erase(first, changes.end());
}

void invalidated(const Context& context, ibv_wc& wc) noexcept {
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto found = s.by_physical.find({&context, wc.invalidated_rkey >> 8});
  if (found == s.by_physical.end()) return;
  Window& w = s.all.at(found->second);
  w.bound = false;
  if (const auto of_it = w.qp ? s.changes.find(name_of(*w.qp)) : s.changes.end(); of_it != s.changes.end()) {
    Changes& changes = of_it->second;
    const auto bind = std::find_if(changes.begin(), changes.end(), [&](const Change& c) { return c.mw == found->second && c.posted; });
    if (bind != changes.end()) changes.erase(changes.begin(), bind + 1);  // it was executed
    for (Change& c : changes)
      if (c.mw == found->second) c.was.bound = false;
  }
  wc.invalidated_rkey = (found->second->rkey & ~kKeyTag) | (wc.invalidated_rkey & kKeyTag);
}

}  // namespace migr::windows
