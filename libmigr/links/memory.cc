/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The application's memory on backup links, and what others know of it. */
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>

#include "../real.h"
#include "channel.h"
#include "state.h"

namespace migr::links {
namespace {

/// What the application's keys are called there, for our own posts and for others.
void adopt_twin(Twin& t, Side side, MrShadow& mr, ibv_mr* made) {
  constexpr int kRemote = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  Backup& b = t.at(side);
  if (const auto found = std::find(b.missing.begin(), b.missing.end(), &mr); found != b.missing.end()) b.missing.erase(found);  // one of the first
  state()->refused_memory.erase({&mr, side});
  mr.twins.resize(t.backups.size());
  mr.twins[side - 1] = made;
  b.key_table[mr.app.lkey >> 8].lkey = made->lkey ^ (mr.app.lkey & 0xff);
  b.key_table[mr.app.rkey >> 8].rkey = made->rkey ^ (mr.app.rkey & 0xff);
  if (!(mr.access & kRemote)) return;
  state()->keys.add({b.link->index, t.home->index, mr.app.rkey}, made->rkey);
  const bool told = std::exchange(mr.told_at_home, mr.real->rkey != mr.app.rkey);
  if (mr.told_at_home && !told) state()->keys.add({t.home->index, t.home->index, mr.app.rkey}, mr.real->rkey);
}

bool is_missing(const Twin& t, Side side, const ibv_pd* of) {
  const auto& missing = t.at(side).missing;
  return std::any_of(missing.begin(), missing.end(), [&](const MrShadow* mr) { return mr->app.pd == of; });
}

enum class Pinned : std::uint8_t {
  kThere,
  kGone,
  kFailed,
};

/// Gives the lock away in the driver. @return kGone: it has been given back meanwhile. kFailed: with errno
Pinned pin(Twin& t, Side side, MrShadow& mr, std::unique_lock<std::mutex>& guard) {
  ibv_pd* const pd = t.pd(mr.app.pd, side);
  if (!pd || t.closing) return errno = ENOMEM, Pinned::kFailed;
  const ibv_mr app = mr.app;
  const std::uint64_t iova = mr.iova;
  const auto access = static_cast<unsigned>(mr.access);
  State::Pinning pinning{.twin = &t, .pd = app.pd, .mr = &mr};
  state()->pinnings.push_back(&pinning);
  guard.unlock();
  ibv_mr* const made = real().reg_mr_iova2(pd, app.addr, app.length, iova, access);
  const int saved = errno;
  guard.lock();
  std::erase(state()->pinnings, &pinning);
  state()->pinned.notify_all();
  if (!pinning.mr) {
    if (made) real().dereg_mr(made);
    return Pinned::kGone;
  }
  errno = saved;
  if (!made) return Pinned::kFailed;
  adopt_twin(t, side, mr, made);
  return Pinned::kThere;
}

enum class Made : std::uint8_t {
  kNothing,
  kOne,
  kFailed,
};

/// Gives the lock away meanwhile.
Made make_first_mr(Twin& t, Side side, std::string& why, std::unique_lock<std::mutex>& guard) {
  auto& missing = t.at(side).missing;
  const auto next = std::find_if(missing.begin(), missing.end(), [&](const MrShadow* mr) { return t.pd(mr->app.pd, side); });
  if (next == missing.end() || t.closing) return Made::kNothing;
  MrShadow* const mr = *next;
  const ibv_pd* const of = mr->app.pd;
  const std::size_t length = mr->app.length;
  const Pinned pinned = pin(t, side, *mr, guard);
  if (pinned == Pinned::kGone) return Made::kOne;
  const bool failed = pinned == Pinned::kFailed;
  if (failed) {
    why = errno_text("reg_mr of " + std::to_string(length) + " bytes");
    state()->refused_memory.insert({mr, side});
    missing.erase(std::find(missing.begin(), missing.end(), mr));
    missing.push_back(mr);
  }
  if (state()->memory_awaited && (failed || !is_missing(t, side, of))) {
    state()->memory_awaited = false;
    kick(state()->failover_fd);
  }
  return failed ? Made::kFailed : Made::kOne;
}

}  // namespace

bool make_mr(Twin& t, Side side, std::string& why, std::unique_lock<std::mutex>& guard) {
  for (std::size_t left = t.at(side).missing.size(); left; --left)
    if (const Made made = make_first_mr(t, side, why, guard); made != Made::kFailed) return made == Made::kOne;
  return false;
}

bool make_next_memory(std::unique_lock<std::mutex>& guard) {
  std::string ignored;
  for (std::size_t i = 0; i < state()->twins.size(); ++i) {  // meanwhile there may be more, or less
    Twin* const t = state()->twins[i];
    for (Side side = 1; side < t->sides(); ++side)
      if (make_mr(*t, side, ignored, guard)) return true;
  }
  return false;
}

bool memory_is_there(const QpLink& l, Side side) { return side == kHome || !is_missing(*l.twin, side, l.q->init.pd); }

bool memory_is_refused(const QpLink& l, Side side) {
  const auto& refused = state()->refused_memory;
  return std::any_of(refused.begin(), refused.end(), [&](const auto& r) { return r.first->app.pd == l.q->init.pd && r.second == side; });
}

bool make_small_memory(const QpLink& l, Side side) {
  constexpr std::size_t kMostBytes = 16u << 20;
  Twin& t = *l.twin;
  ibv_pd* const pd = t.pd(l.q->init.pd, side);
  std::vector<MrShadow*> missing;
  std::size_t bytes = 0;
  for (MrShadow* mr : t.at(side).missing) {
    if (mr->app.pd != l.q->init.pd) continue;
    const bool is_pinned_now = std::any_of(state()->pinnings.begin(), state()->pinnings.end(), [&](const State::Pinning* p) { return p->mr == mr; });
    bytes += mr->app.length;
    if (is_pinned_now || bytes > kMostBytes || state()->refused_memory.contains({mr, side})) return false;
    missing.push_back(mr);
  }
  if (!pd || t.closing) return false;
  for (MrShadow* mr : missing) {
    ibv_mr* const made = real().reg_mr_iova2(pd, mr->app.addr, mr->app.length, mr->iova, static_cast<unsigned>(mr->access));
    if (!made) return false;
    adopt_twin(t, side, *mr, made);
  }
  return true;
}

void forget_refused_memory(const QpLink& l) {
  std::erase_if(state()->refused_memory, [&](const auto& r) { return r.first->app.pd == l.q->init.pd; });
}

void note_missing(Twin& t, MrShadow& mr) {
  for (Side side = 1; side < t.sides(); ++side)
    if (mr.movable && !mr.on(side)) t.at(side).missing.push_back(&mr);
}

namespace {

/// A QP that is there cannot use it.
bool is_missed(const MrShadow& mr, Side side) {
  return mr.movable && !mr.on(side) && std::any_of(state()->qps.begin(), state()->qps.end(), [&](const QpLink* l) {
           return l->twin == mr.context->twin && l->q->init.pd == mr.app.pd && leaves_home(*l) && needs(*l, side);
         });
}

/// The application will tell others of the key that it has just got, by ways of its own. Best before that they know what it is called
/// on the link that their vQPs are on, or go to: else who posts for it waits (relay.h). And who registers all the time must not be
/// faster than the channel, on which STATE waits behind the keys. Gives the Registry's lock away meanwhile.
void wait_until_heard(const Twin& twin) {
  constexpr std::chrono::milliseconds kLimit{200};
  if (nobody_hears()) return;
  std::map<const Channel*, std::uint64_t> until;  // messages; 0: it was not told yet
  for (const QpLink* l : state()->qps)
    for (Side side = 1; l->twin == &twin && leaves_home(*l) && side < l->sides(); ++side)
      if (const Channel* c = standing(*l, side)) until[c] = 0;
  const auto has_not = [&, all = state()->keys.next()](const Channel* c) {
    const auto mine = until.find(c);
    if (mine == until.end() || !c->up()) return false;
    if (!mine->second && c->told >= all) mine->second = c->keys_sent;
    return !mine->second || c->keys_heard < mine->second;
  };
  const auto all_have = [&] {
    bool all = true;
    for (const Channel* c : state()->channels) all = !has_not(c) && all;
    return all;
  };
  std::unique_lock held(Registry::get().lock, std::adopt_lock);
  state()->heard.wait_for(held, kLimit, all_have);
  held.release();
}

}  // namespace

int made(MrShadow& mr) {
  if (!mr.context->twin) return 0;
  Twin& t = *mr.context->twin;
  // Once a QP is on the backup link, or goes there, memory has to be there before the application can use it.
  bool now = false;
  for (const QpLink* l : state()->qps)
    now = now || (l->twin == &t && leaves_home(*l));
  if (!now || !mr.movable) return note_missing(t, mr), changed(), 0;
  int errs[kMaxLinks]{};
  std::unique_lock held(Registry::get().lock, std::adopt_lock);
  for (Side side = 1; side < t.sides(); ++side) {
    if (pin(t, side, mr, held) != Pinned::kThere) errs[side] = errno;
  }
  held.release();
  note_missing(t, mr);  // not before: nobody can use it yet, so no change waits for it
  for (Side side = 1; side < t.sides(); ++side)
    if (is_missed(mr, side)) return errs[side];
  for (Channel* c : state()->channels) tell_keys(*c);
  wait_until_heard(t);
  return 0;
}

std::vector<ibv_mr*> take_twins(MrShadow& mr) {
  Twin* const t = mr.context->twin;
  if (!t) return {};
  for (Backup& b : t->backups)
    if (const auto found = std::find(b.missing.begin(), b.missing.end(), &mr); found != b.missing.end()) b.missing.erase(found);
  for (State::Pinning* p : state()->pinnings)
    if (p->mr == &mr) p->mr = nullptr;
  std::vector<ibv_mr*> taken;
  std::uint64_t told = 0;
  for (const Channel* c : state()->channels) told = std::max(told, c->told);
  for (Side side = 1; side < t->sides(); ++side) {
    ibv_mr* const twin = mr.on(side);
    if (!twin) continue;
    Backup& b = t->at(side);
    b.key_table[mr.app.lkey >> 8].lkey = 0;
    b.key_table[mr.app.rkey >> 8].rkey = 0;
    if (twin->rkey) state()->keys.remove({b.link->index, t->home->index, mr.app.rkey}, told);
    taken.push_back(twin);
  }
  mr.twins.clear();
  std::erase_if(state()->refused_memory, [&](const auto& refused) { return refused.first == &mr; });
  if (std::exchange(mr.told_at_home, false)) state()->keys.remove({t->home->index, t->home->index, mr.app.rkey}, told);
  return taken;
}

void gone(MrShadow& mr) {
  for (ibv_mr* twin : take_twins(mr)) real().dereg_mr(twin);
}

namespace {

template <class Same>
void wait_for(Same&& same) {
  const auto none = [&] { return std::none_of(state()->pinnings.begin(), state()->pinnings.end(), [&](const State::Pinning* p) { return same(*p); }); };
  if (!none()) wait_without_lock([&](std::unique_lock<std::mutex>& held) { state()->pinned.wait(held, none); });
}

}  // namespace

void wait_for_pinning(const ibv_pd* pd) {
  wait_for([&](const State::Pinning& p) { return p.pd == pd; });
}

void wait_for_pinning(const Twin& t) {
  wait_for([&](const State::Pinning& p) { return p.twin == &t; });
}

}  // namespace migr::links
