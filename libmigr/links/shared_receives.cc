/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "shared_receives.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../events.h"
#include "../path.h"
#include "../real.h"
#include "pool.h"
#include "shared_limit.h"
#include "state.h"

namespace migr::links {
namespace {

using Receive = SrqLink::Receive;
using Place = SrqLink::Place;
using Loop = SrqLink::Loop;

constexpr unsigned kBatch = 16;  // receives that a loop uses up at a time
constexpr unsigned kLoopMs = 1, kStaleMs = 20;
constexpr std::uint64_t kAgainNs = 200'000'000;  // after a loop that did not carry
constexpr std::uint64_t kAliveNs = 100'000'000;  // devices are asked for the state of QPs without a backup

/* A name: a random base of this process | number of the SRQ | times that the slot was posted | slot. */
constexpr unsigned kSlotBits = 20, kTimesBits = 12, kNumberBits = 16;
constexpr std::uint64_t kSpan = 1ull << (kSlotBits + kTimesBits + kNumberBits);
constexpr std::uint32_t kTimesMask = (1u << kTimesBits) - 1, kSlotMask = (1u << kSlotBits) - 1;
constexpr std::uint32_t kMarker = kSlotMask;  ///< a slot that there is not

std::uint64_t base() {
  static const std::uint64_t value = [] {
    std::uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = 0x6d69677273727121;
    random = (random & ~(kSpan - 1)) | kSpan;  // no pointer has such high bits
    return marker::is_marker(random) ? random ^ kSpan << 1 : random;
  }();
  return value;
}

std::uint64_t name_of(const SrqLink& l, std::uint32_t slot, std::uint32_t times) {
  return base() | l.number << (kSlotBits + kTimesBits) | static_cast<std::uint64_t>(times & kTimesMask) << kSlotBits | slot;
}
bool is_name(const SrqLink& l, std::uint64_t wr_id) { return (wr_id ^ name_of(l, 0, 0)) < 1ull << (kSlotBits + kTimesBits); }

/// Null: it is no name, or of a posting that does not count any more.
Receive* find(SrqLink& l, std::uint64_t wr_id) {
  const std::uint32_t slot = wr_id & kSlotMask;
  if (!is_name(l, wr_id) || slot >= l.all.size()) return nullptr;
  Receive& r = l.all[slot];
  return r.state == Receive::kPosted && ((wr_id >> kSlotBits) & kTimesMask) == (r.posted & kTimesMask) ? &r : nullptr;
}

std::uint32_t slot_of(const SrqLink& l, const Receive& r) { return static_cast<std::uint32_t>(&r - l.all.data()); }

const ibv_context_ops& ops_on(const Twin& t, Side side) { return side == kHome ? t.of->ops : t.at(side).link->ops; }

/// Where the next one goes: of the places that serve somebody the one with the fewest. Null: nowhere now
Place* next_place(SrqLink& l) {
  Place* best = nullptr;
  for (Place& p : l.at)
    if (p.serves && !p.stale && p.srq && (!best || p.left() < best->left())) best = &p;
  if (best) return best;
  return l.at[kHome].stale ? nullptr : &l.at[kHome];  // memory is there; on a link where nobody is it may not be
}

/// Caller holds s.lock.
int put(SrqShadow& s, Place& p, Receive& r) {
  SrqLink& l = *s.link;
  const Side side = static_cast<Side>(&p - l.at.data());
  const std::uint64_t name = name_of(l, slot_of(l, r), r.posted + 1);
  r.state = Receive::kPosted;  // its completion may be there before the call returns
  r.side = side;
  r.nth = ++p.count;
  ++r.posted;
  ++p.posted;
  const int err = side == kHome ? path::post_named(s, name, r.of_app.sges)
                                : path::post_translated({p.srq, ops_on(*l.twin, side).post_srq_recv, l.twin->at(side).key_table}, name, r.of_app.sges);
  if (!err) return 0;
  r.state = Receive::kWaiting;
  --p.posted;
  return err;
}

/// By the keys of its default link: only what is there moves. Caller holds s.lock.
void note(SrqShadow& s, const Receive& r) {
  for (ibv_sge sge : r.of_app.sges) {
    sge.lkey = path::physical_lkey(s.key_table, sge.lkey);
    tracking::note(*s.tracked, ibv_recv_wr{.wr_id = r.of_app.wr_id, .next = nullptr, .sg_list = &sge, .num_sge = 1});
  }
}

/// The device has given it to somebody.
void came_out(SrqLink& l, const Receive& r) {
  Place& p = l.at[r.side];
  if (r.nth < p.last && p.taken) --p.taken;
  p.last = std::max(p.last, r.nth);
  --p.posted;
}

/// Into the queue of those that have no place; what counts it where it was has been told.
void wait_again(SrqLink& l, Receive& r) {
  r.state = Receive::kWaiting;
  const auto older = [&](std::uint32_t slot, std::uint64_t order) { return l.all[slot].order < order; };
  l.waiting.insert(std::lower_bound(l.waiting.begin(), l.waiting.end(), r.order, older), slot_of(l, r));
}

}  // namespace

void made(SrqShadow& s) {
  static std::uint64_t count = 0;
  Twin* const t = s.context->twin;
  if (!t || s.max_wr >= kSlotMask) return;
  s.link = new SrqLink;
  s.link->twin = t;
  s.link->number = count++ & ((1u << kNumberBits) - 1);
  s.link->at.resize(t->sides());
  s.link->at[kHome].srq = s.real;
  s.state.fetch_or(kSharedSrq, std::memory_order_relaxed);
  changed();
}

bool shares_receives(const QpShadow& q) { return srq_of(q) && srq_of(q)->link; }

void attached(QpShadow& q) {
  SrqShadow* const s = srq_of(q);
  if (!s || !s->link) return;
  if (q.recv_cq) {
    // Names of ours come here from now on: by way of the fake CQ, and whoever does not know it yet is out before the first.
    {
      std::lock_guard guard(q.recv_cq->shared_lock);
      auto& shared = q.recv_cq->shared;
      if (std::find(shared.begin(), shared.end(), s) == shared.end()) shared.push_back(s);
      q.recv_cq->names_receives.store(true, std::memory_order_release);
    }
    std::string why;
    if (q.recv_cq->real_ex) path::name_receives(*q.recv_cq);  // also for a session that is open on the device's, and goes on
    if (!reads_more(*q.recv_cq) && !(q.recv_cq->state.load(std::memory_order_relaxed) & kWatchedCq)) {
      switchover::set_cq_bits(*q.recv_cq, kFakeCq | kWatchedCq);
      if (switchover::wait_for_pollers(q, why)) say(q, why);
    }
  }
  switchover::set_bits(q, kTrapped);
  receives_may_move(q);
}

int post(SrqShadow& s, std::uint64_t wr_id, std::span<const ibv_sge> sges) {
  SrqLink& l = *s.link;
  if (sges.size() > s.max_sge) return EINVAL;
  if (l.free.empty()) {
    if (l.all.size() >= s.max_wr) return ENOMEM;
    l.free.push_back(static_cast<std::uint32_t>(l.all.size()));
    l.all.emplace_back();
  }
  const std::uint32_t slot = l.free.back();
  Receive& r = l.all[slot];
  r.of_app.wr_id = wr_id;
  r.of_app.sges.assign(sges.begin(), sges.end());
  r.order = l.posts++;
  r.state = Receive::kWaiting;
  if (s.tracked) note(s, r);
  Place* const p = l.waiting.empty() ? next_place(l) : nullptr;
  if (const int err = p ? put(s, *p, r) : 0) {
    r.state = Receive::kFree;
    return err;
  }
  if (!p) l.waiting.push_back(slot);
  l.free.pop_back();
  return 0;
}

int post_waiting(SrqShadow& s) {
  SrqLink& l = *s.link;
  while (!l.waiting.empty()) {
    Place* const p = next_place(l);
    if (!p) return 0;
    if (const int err = put(s, *p, l.all[l.waiting.front()])) return err;
    l.waiting.pop_front();
  }
  return 0;
}

void track(SrqShadow& s) {
  s.tracked = std::make_unique<tracking::Notes>(tracking::Notes{.here = true, .opening = false, .parts = {}});
  for (const Receive& r : s.link->all)
    if (r.state != Receive::kFree) note(s, r);
}

std::size_t not_used(const SrqShadow& s) { return s.link->all.size() - s.link->free.size(); }

void renewed(SrqShadow& s) {
  if (!s.link) return;
  std::lock_guard guard(s.lock);
  for (Receive& r : s.link->all)
    if (r.state == Receive::kPosted) --s.link->at[r.side].posted, wait_again(*s.link, r);
  s.link->at[kHome].stale = false;
}

std::uint64_t own_name(const SrqShadow& s, std::uint64_t wr_id) {
  const Receive* const r = s.link ? find(*s.link, wr_id) : nullptr;
  return r ? r->of_app.wr_id : wr_id;
}

namespace {

enum class Named { kNot,
                   kStale,
                   kDone };

template <class Then>
Named with_receive(CqShadow& c, std::uint64_t wr_id, Then&& then) {
  if (!c.names_receives.load(std::memory_order_acquire)) return Named::kNot;
  std::lock_guard held(c.shared_lock);
  for (SrqShadow* s : c.shared) {
    if (!s->link || !is_name(*s->link, wr_id)) continue;
    std::lock_guard guard(s->lock);
    Receive* const r = find(*s->link, wr_id);
    if (!r) return Named::kStale;
    then(*s, *r);
    return Named::kDone;
  }
  return Named::kNot;
}

}  // namespace

bool consumed(CqShadow& c, ibv_wc& wc) {
  return with_receive(c, wc.wr_id, [&](SrqShadow& s, Receive& r) {
           SrqLink& l = *s.link;
           wc.wr_id = r.of_app.wr_id;
           came_out(l, r);
           if (const Place& p = l.at[r.side]; !p.left() && p.serves && l.apart) kick(state()->failover_fd);  // others may have more than they need
           r.state = Receive::kFree;
           l.free.push_back(slot_of(l, r));
         }) != Named::kStale;
}

bool unused(CqShadow& c, std::uint64_t wr_id) {
  return with_receive(c, wr_id, [](SrqShadow& s, Receive& r) { came_out(*s.link, r), wait_again(*s.link, r); }) != Named::kNot;
}

ibv_srq* srq_on(const QpShadow& q, Side side) {
  const SrqShadow* const s = srq_of(q);
  return s && s->link && side < s->link->at.size() ? s->link->at[side].srq : nullptr;
}

bool make_srq(Twin& t, Side side, std::string& why) {
  for (SrqShadow* s : Registry::get().srqs) {
    if (!s->link || s->link->twin != &t || s->link->at[side].srq) continue;
    ibv_pd* const pd = t.pd(s->app.pd, side);
    if (!pd) continue;
    ibv_srq_init_attr init{};
    init.attr.max_wr = s->max_wr + 1;  // and one of ours
    init.attr.max_sge = s->max_sge;
    ibv_srq* const made = real().create_srq(pd, &init);
    if (!made) return why = std::string("create_srq: ") + std::strerror(errno), false;
    std::lock_guard guard(s->lock);
    s->link->at[side] = {.srq = made, .serves = 0, .posted = 0, .markers = 0, .stale = false, .loop = {}};
    return true;
  }
  return false;
}

bool receives_are_clean(const QpShadow& q, Side side) {
  SrqShadow* const s = srq_of(q);
  if (!s || !s->link) return true;
  std::lock_guard guard(s->lock);
  return !s->link->at[side].stale;
}

std::string why_not_shared(const QpShadow& q) {
  const SrqShadow* const s = srq_of(q);
  if (!s) return "";
  if (!s->link) return "has an SRQ of another kind, or of over " + std::to_string(kSlotMask) + " receives";
  for (const QpShadow* other : Registry::get().qps)
    if (srq_of(*other) == s && other->app.qp_type != IBV_QPT_RC) return "shares its SRQ with a QP that is no RC QP";
  return "";
}

void resized(SrqShadow& s) {
  if (!s.link) return;
  for (Side side = 1; side < s.link->at.size(); ++side) {
    ibv_srq_attr attr{};
    attr.max_wr = s.max_wr + 1;
    if (ibv_srq* const there = s.link->at[side].srq)
      if (const int err = real().modify_srq(there, &attr, IBV_SRQ_MAX_WR)) std::fprintf(stderr, "libmigr: the backup of an SRQ that has %u entries now keeps its size: %s\n", s.max_wr, std::strerror(err));
  }
}

void receives_may_move(const QpShadow& q) {
  if (!state() || !shares_receives(q)) return;
  state()->receives_moved = true;
  kick(state()->failover_fd);
}

/* ---- loops ------------------------------------------------------------------------- */

namespace {

void close(Loop& loop) {
  for (ibv_qp** qp : {&loop.source, &loop.target}) switchover::destroy_real(*qp);
  if (loop.cq) real().destroy_cq(std::exchange(loop.cq, nullptr));
  loop.out = 0;
  loop.marked = false;
}

bool open(SrqShadow& s, Side side, std::string& why) {
  Twin& t = *s.link->twin;
  Loop& loop = s.link->at[side].loop;
  Link& link = *t.link(side);
  ibv_pd* const pd = t.pd(s.app.pd, side);
  if (!pd || !link.ctx) return why = link.config.device + " is not open", false;
  ibv_context* const ctx = side == kHome ? t.of->real : link.ctx;
  loop.cq = events::with_kernel_fd(*ctx, [&] { return real().create_cq(ctx, 2 * kBatch + 1, nullptr, nullptr, 0); });
  if (!loop.cq) return why = std::string("create_cq: ") + std::strerror(errno), false;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = loop.cq;
  init.cap = {.max_send_wr = kBatch, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  const auto make = [&] { return events::with_kernel_fd(*ctx, [&] { return create_on(pd, init, link.config.port, 0, why); }); };
  loop.source = make();
  init.srq = s.link->at[side].srq;
  if (loop.source) loop.target = make();
  const std::uint32_t psn = switchover::random_psn();
  if (loop.target && connect_to_own(link, loop.target, loop.source, psn, why) && connect_to_own(link, loop.source, loop.target, psn, why)) return true;
  close(loop);
  return false;
}

struct Polled {
  bool failed = false, marker = false;
};

/// What a loop has used up waits for a place. Caller holds s.lock.
void poll_loop(SrqShadow& s, Side side, Polled& out) {
  SrqLink& l = *s.link;
  Loop& loop = l.at[side].loop;
  ibv_wc wc[kBatch];
  int n;
  while ((n = ops_on(*l.twin, side).poll_cq(loop.cq, kBatch, wc)) > 0)
    for (int i = 0; i < n; ++i) {
      if (loop.source && wc[i].qp_num == loop.source->qp_num) {
        out.failed = out.failed || wc[i].status != IBV_WC_SUCCESS;
        if (loop.out) --loop.out;
        continue;
      }
      out.marker = out.marker || wc[i].wr_id == name_of(l, kMarker, l.at[side].markers);
      // What was left behind on a link that failed may have the name of one that was posted much later, elsewhere.
      if (Receive* const r = find(l, wc[i].wr_id); r && r->side == side) came_out(l, *r), wait_again(l, *r);
    }
}

/// It uses up nothing more. Caller holds s.lock.
void end_loop(SrqShadow& s, Side side, Polled& out) {
  Loop& loop = s.link->at[side].loop;
  if (!loop.cq) return;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_RESET;  // not ERR: nobody is to be told
  for (ibv_qp* qp : {loop.target, loop.source})
    if (qp) (void)real().modify_qp(qp, &to, IBV_QP_STATE);
  poll_loop(s, side, out);
  close(loop);
}

/// Of several the last one counts: one of a loop that has failed may still lie there.
int put_marker(SrqShadow& s, Side side) {
  SrqLink& l = *s.link;
  ibv_recv_wr wr{.wr_id = name_of(l, kMarker, ++l.at[side].markers), .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad;
  return ops_on(*l.twin, side).post_srq_recv(l.at[side].srq, &wr, &bad);
}

/// @param most receives that are to be used up. Caller holds s.lock. @return it is at work
bool run_loop(SrqShadow& s, Side side, unsigned most) {
  SrqLink& l = *s.link;
  Place& p = l.at[side];
  Loop& loop = p.loop;
  Polled polled;
  if (loop.cq) poll_loop(s, side, polled);
  if (polled.failed) {
    end_loop(s, side, polled);
    loop.not_before_ns = now_ns() + kAgainNs;
  } else if (polled.marker) {
    end_loop(s, side, polled);  // before anything comes in there: what it has sent too much must not use that up
  }
  if (polled.marker) return p.stale = false;
  if (loop.out) return true;
  std::string why;
  if (!most || now_ns() < loop.not_before_ns) return false;
  if (!loop.cq && !open(s, side, why)) {
    loop.not_before_ns = now_ns() + kAgainNs;
    return false;
  }
  if (p.stale && !loop.marked) loop.marked = put_marker(s, side) == 0;  // else it is full: one is used up first
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  for (unsigned n = p.stale && !loop.marked ? 1 : most; n; --n, ++loop.out)
    if (ops_on(*l.twin, side).post_send(loop.source, &wr, &bad)) break;
  return loop.out;
}

bool can_receive(ibv_qp_state state) { return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_SQE; }

/// Where messages come in for it. @return false: nowhere
bool receives_on(const QpShadow& q, Side& side) {
  const QpLink* const l = q.link;
  side = l ? l->on : kHome;
  if (l && l->stage == Stage::kChanging) return q.phase == switchover::Phase::kSwitched;
  if (l && l->stage != Stage::kBroken) return true;
  ibv_qp_attr now{};
  return can_receive(q.real->state) && !switchover::ask_device(q, now, IBV_QP_STATE) && can_receive(now.qp_state);
}

/// Caller holds s.lock.
void count_again(SrqShadow& s) {
  SrqLink& l = *s.link;
  for (Place& p : l.at) p.serves = 0;
  for (const QpShadow* q : Registry::get().qps)
    if (Side side; srq_of(*q) == &s && receives_on(*q, side)) ++l.at[side].serves;
  l.apart = std::count_if(l.at.begin(), l.at.end(), [](const Place& p) { return p.serves; }) > 1;
}

/// A device gives out the receives of an SRQ in their order: what lies before one that has come out was taken, by a message that is under
/// way, or whose path was cut in the middle of it, which nobody tells. Caller holds s.lock.
void count_taken(SrqLink& l) {
  for (Place& p : l.at) p.taken = 0;
  for (const Receive& r : l.all)
    if (r.state == Receive::kPosted && r.nth < l.at[r.side].last) ++l.at[r.side].taken;
}

bool serves_anybody(const SrqLink& l) {
  return std::any_of(l.at.begin(), l.at.end(), [](const Place& p) { return p.serves; });
}

/// Nobody takes receives there, and others could; or the link is to be given back.
bool is_left(const SrqLink& l, const Place& p) { return !p.serves && (serves_anybody(l) || (parking() && &p != &l.at[kHome])); }

bool misplaced(const SrqLink& l) {
  return std::any_of(l.at.begin(), l.at.end(), [&](const Place& p) { return p.posted && is_left(l, p); });
}

/// All of an SRQ is where all of its vQPs are.
bool rests(const SrqLink& l) {
  return !l.apart && l.waiting.empty() && !misplaced(l) && std::none_of(l.at.begin(), l.at.end(), [](const Place& p) { return p.stale || p.loop.cq; });
}

/// All of an SRQ is where the application's device counts it.
bool is_home(const SrqLink& l) {
  const auto empty = [](const Place& p) { return !p.serves && !p.posted && !p.loop.cq; };
  return l.waiting.empty() && !l.at[kHome].stale && !l.at[kHome].loop.cq && std::all_of(l.at.begin() + 1, l.at.end(), empty);
}

/// What the device there has of them it keeps. Caller holds s.lock.
void take_back(SrqShadow& s) {
  SrqLink& l = *s.link;
  if (!misplaced(l)) return;
  for (Receive& r : l.all) {
    if (r.state != Receive::kPosted || !is_left(l, l.at[r.side])) continue;
    l.at[r.side].stale = true;
    --l.at[r.side].posted;
    wait_again(l, r);
  }
}

/// Whoever serves has as many as others, about. @return a loop is at work
bool even_out(SrqShadow& s) {
  SrqLink& l = *s.link;
  Place *poor = nullptr, *rich = nullptr;
  bool at_work = false;
  for (Place& p : l.at) {
    if (!p.serves || p.stale) continue;
    if (!poor || p.left() < poor->left()) poor = &p;
    if (!rich || p.left() > rich->left()) rich = &p;
  }
  for (Place& p : l.at) {
    if (p.stale) continue;
    const Side side = static_cast<Side>(&p - l.at.data());
    const bool gives = &p == rich && !l.twin->link(side)->down() && rich->left() > 1 && 4 * poor->left() < rich->left();
    if (!gives && !p.loop.cq) continue;
    const unsigned most = gives ? std::min(kBatch, (rich->left() - poor->left()) / 2) : 0;
    if (run_loop(s, side, most)) {
      at_work = true;
    } else if (Polled ignored; !gives) {
      end_loop(s, side, ignored);
    }
  }
  return at_work;
}

/// What its vQPs have got until now is the application's, whatever becomes of them. @return false: not of all CQs, a session is open on the provider's
bool poll_all(SrqShadow& s) {
  bool all = true;
  for (CqShadow* c : Registry::get().cqs) {
    if (c->ending || !c->names_receives.load(std::memory_order_relaxed) || std::find(c->shared.begin(), c->shared.end(), &s) == c->shared.end()) continue;
    std::lock_guard guard(c->lock);
    if (c->ex_session.load(std::memory_order_relaxed)) all = false;  // the provider may have it locked, and its thread may wait for the Registry's lock
    else path::poll_to_fake(*c);
  }
  return all;
}

/// @return ms until the next look; 0: none is needed
unsigned look_at(SrqShadow& s) {
  SrqLink& l = *s.link;
  const Twin& t = *l.twin;
  const std::uint64_t now = now_ns();
  unsigned next = 0;
  const bool counts = state()->receives_moved || now - l.counted_ns > kAliveNs;
  bool watched;
  {
    std::lock_guard guard(s.lock);
    if (s.state.load(std::memory_order_relaxed) & kFrozenSrq || (!state()->receives_moved && rests(l) && !watches_limit(s))) return 0;
    if (counts) count_again(s), l.counted_ns = now;
    if (!is_home(l)) count_here(s);  // before the device there uses up receives that nobody has got
    watched = watches_limit(s);
  }
  const bool polled = !(counts || watched) || poll_all(s);
  std::lock_guard guard(s.lock);
  if (counts && polled) take_back(s);  // else at a later look: what is taken back, and had come in, would be lost
  if (l.apart) count_taken(l);
  if (even_out(s)) next = kLoopMs;
  for (Side side = kHome; side < l.at.size(); ++side) {
    if (!l.at[side].stale || l.at[side].serves || !t.link(side)->ctx || t.link(side)->down()) continue;
    next = run_loop(s, side, kBatch) ? kLoopMs : l.at[side].stale ? std::max(next, kStaleMs)
                                                                  : next;
    if (!l.at[side].stale) kick(state()->round_fd);  // who waits for it may go on
  }
  (void)post_waiting(s);
  if (s.counted_here && is_home(l)) let_device_count(s);
  else if (const unsigned soon = look_at_limit(s)) next = next ? std::min(next, soon) : soon;
  return next ? next : rests(l) ? 0
                                : kStaleMs;
}

}  // namespace

unsigned look_at_shared_receives() {
  unsigned soon = 0;
  for (SrqShadow* s : Registry::get().srqs)
    if (const unsigned next = s->link ? look_at(*s) : 0) soon = soon ? std::min(soon, next) : next;
  state()->receives_moved = false;
  return soon;
}

std::string not_at_home() {
  for (SrqShadow* s : Registry::get().srqs) {
    if (!s->link) continue;
    std::lock_guard guard(s->lock);
    const auto& at = s->link->at;
    // Where nobody receives they need not be on the device: they are posted where the SRQ is made again.
    const bool rests = !at[kHome].serves || (!at[kHome].stale && s->link->waiting.empty());
    const bool home = rests && !at[kHome].loop.cq && std::all_of(at.begin() + 1, at.end(), [](const Place& p) { return !p.posted && !p.serves; });
    if (!home) return "receives of an SRQ are not back on its default link";
  }
  return "";
}

namespace {

/// Caller holds s.lock.
void leave_place(SrqShadow& s, Side side) {
  Place& p = s.link->at[side];
  if (side == kHome) remove(s.link->bell, *s.context);
  if (Polled ignored; p.loop.cq) end_loop(s, side, ignored);
  if (side == kHome || !p.srq) return;
  for (Receive& r : s.link->all)
    if (r.state == Receive::kPosted && r.side == side) wait_again(*s.link, r);  // the place goes
  real().destroy_srq(p.srq);
  p = {};
}

}  // namespace

void empty_shared(Twin& t) {
  for (SrqShadow* s : Registry::get().srqs) {
    if (!s->link || s->link->twin != &t) continue;
    std::lock_guard guard(s->lock);
    for (Side side = kHome; side < s->link->at.size(); ++side) leave_place(*s, side);
    (void)post_waiting(*s);
  }
}

void gone(SrqShadow& s) {
  if (!s.link) return;
  for (const QpShadow* q : Registry::get().qps)
    if (srq_of(*q) == &s) return;  // the device will refuse it
  finish_discards();
  for (CqShadow* c : Registry::get().cqs) {
    std::lock_guard guard(c->shared_lock);
    std::erase(c->shared, &s);
  }
  drop_spares(s);
  state()->discards.finish();
  std::lock_guard guard(s.lock);
  for (Side side = kHome; side < s.link->at.size(); ++side) leave_place(s, side);
}

int wait_for_receives(ibv_qp* qp) {
  constexpr std::uint64_t kLimitNs = 1'000'000'000;
  if (!state() || !qp->srq) return 0;
  const std::uint64_t begun = now_ns();
  const Asking asking;
  for (;; switchover::pause_briefly()) {
    {
      std::lock_guard guard(Registry::get().lock);
      const auto& all = Registry::get().qps;
      const auto q = std::find_if(all.begin(), all.end(), [&](const QpShadow* x) { return &x->app == qp; });
      if (q == all.end() || receives_are_clean(**q, kHome)) return 0;
      receives_may_move(**q);
    }
    if (now_ns() - begun > kLimitNs) return ETIMEDOUT;
  }
}

}  // namespace migr::links
