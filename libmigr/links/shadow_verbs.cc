/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Shadow verbs: what the application has made is made on the backup link (SHIFT §4.2, appendix B), one thing after the other,
 * in rounds (rounds.cc). Memory: memory.cc, paths: paths.cc.
 */
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "../kernel_link.h"
#include "../real.h"
#include "channel.h"
#include "cq_room.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr std::uint64_t kNotKept = IBV_QP_EX_WITH_TSO;  // what kept.cc cannot keep
constexpr std::uint64_t kTryAgainNs = 3'000'000'000;    // a device that is not there

bool make_pd(const Twin& t, Backup& b, std::string& why) {
  for (ibv_pd* pd : Registry::get().pds) {
    if (pd->context != t.of->real || b.pds.contains(pd)) continue;
    ibv_pd* const made = real().alloc_pd(b.link->ctx);
    if (!made) return why = errno_text("alloc_pd"), false;
    return b.pds[pd] = made, true;
  }
  return false;
}

bool make_cq(Twin& t, Side side, std::string& why) {
  const Link& link = *t.link(side);
  for (CqShadow* c : Registry::get().cqs) {
    if (c->context != t.of || cq_on(*c, side) || c->immovable || c->ending) continue;
    ibv_cq* const made = real().create_cq(link.ctx, c->real->cqe, c, link.events, 0);
    if (!made) return why = errno_text("create_cq"), false;
    std::lock_guard guard(c->lock);
    if (!c->link) c->link = new CqLink{.twin = &t, .cqs = {}, .qps = {}, .bell = nullptr, .rings = {}};
    c->link->cqs.push_back({.side = side, .real = made, .real_poll = link.ops.poll_cq, .qpn_table = link.kernel->qpn_table()});
    return true;
  }
  return false;
}

/// The completions of an ibv_cq_ex come by way of the fake CQ, where errors are looked at, for good.
/// @return false: not yet, a session on the provider's CQ is open
bool watch(CqShadow& c) {
  if (!c.real_ex) return true;
  if (!(c.state.load(std::memory_order_relaxed) & kWatchedCq)) {
    switchover::set_cq_bits(c, kFakeCq | kWatchedCq);
    path::pass_barrier();
  }
  if (!c.ex_session.load(std::memory_order_relaxed)) return true;
  state()->session_open = true;
  return false;
}

/// "" or why this vQP has no backup.
std::string why_not(const QpShadow& q) {
  if (q.app.qp_type != IBV_QPT_RC) return "is no RC QP";
  if (const std::string why = why_not_shared(q); !why.empty()) return why;
  if (q.immovable) return std::string("was made by ") + q.immovable + "()";
  if (q.real_ex && (q.init.send_ops_flags & kNotKept)) return "may be posted to by ibv_wr_send_tso()";
  if (!q.send_cq || !q.recv_cq) return "has no CQ";
  if (reads_more(*q.send_cq) || reads_more(*q.recv_cq)) return "completes on an ibv_cq_ex with time stamps, VLANs, flow tags or tag matching";
  if (q.context->windows || q.context->had_windows) return "its process has memory windows";
  // A kept session may be open: nobody would look again when it ends.
  if (!q.adrift && q.state.load(std::memory_order_relaxed) & ~(kNameBits | kKeptSession | (shares_receives(q) ? kTrapped : 0u))) return "is in a switchover";
  if (!(q.birth.mask & IBV_QP_AV) || !q.birth.ah.is_global) return "has no GID";
  if (const std::string why = why_refused(*q.send_cq); !why.empty()) return why;
  return why_refused(*q.recv_cq);
}

/// The first backup link on which all is there that a path of `q` needs. @return kHome: none
Side first_side(const Twin& t, const QpShadow& q) {
  for (Side side = 1; side < t.sides(); ++side)
    if (has_room_for(t, side, q)) return side;
  return kHome;
}

/// It keeps no other one back, and is tried again later: what was in the way may have gone.
void note_refused(const QpShadow& q, std::string why) { state()->refused[&q] = {.why = std::move(why), .tried_ns = now_ns()}; }

bool refused_lately(const QpShadow& q) {
  const auto found = state()->refused.find(&q);
  return found != state()->refused.end() && now_ns() - found->second.tried_ns < kTryAgainNs;
}

/// Why first_side() finds none, when all has been made on backup links that can be.
std::string why_no_side(const Twin& t) {
  const Link& link = *t.backups[0].link;
  return link.why.empty() ? "a PD, a CQ or an SRQ is not there on " + link.config.device : link.why;
}

/// A vQP gets its backup: the first path there, if that is made ahead. @return false: of none that was tried
bool make_backup(Twin& t) {
  for (QpShadow* q : Registry::get().qps) {
    if (q->context != t.of || q->link || !connected_by_application(*q)) continue;
    if (refused_lately(*q) || !why_not(*q).empty()) continue;
    const Side first = first_side(t, *q);
    if (first == kHome) {
      state()->refused[q] = {.why = why_no_side(t), .tried_ns = 0};
      continue;
    }
    const bool sends = watch(*q->send_cq), receives = watch(*q->recv_cq);  // both from now on
    if (!sends || !receives) continue;
    if (!make_room(*q->send_cq) || !make_room(*q->recv_cq)) continue;
    auto l = std::make_unique<QpLink>();
    if (!find_home(*q, *l)) return note_refused(*q, "its device does not say by which GID it is connected"), true;
    QpShadow* const one[] = {q};
    if (const int err = provider::locate_queues(one)) return note_refused(*q, std::string("cannot find the queues of a QP: ") + std::strerror(err)), true;
    l->q = q;
    l->twin = &t;
    std::memcpy(l->name.gid, q->birth.gid.raw, sizeof l->name.gid);
    l->name.vqpn = q->vqpn();
    std::memcpy(l->peer.gid, q->birth.ah.grh.dgid.raw, sizeof l->peer.gid);
    l->peer.vqpn = q->birth.dest_qp_num;
    for (Side side = kHome; side < t.sides(); ++side) l->legs.push_back({.link = t.link(side), .next = {}, .newest = 0, .asked = 0});
    const bool free_before = !(q->state.load(std::memory_order_relaxed) & kTrapped);
    if (!posts_freely(*l) && !trap_posts(*q)) continue;
    l->path = {.qp = q->real, .serial = 0, .psn = 0, .peer_psn = 0, .connected = true, .sends = q->send_ring, .receives = q->receive_ring, .birth = true, .gid = l->home_gid};
    l->executed.link = l->peer_home = t.home->index;
    const bool again = follow_former(*l);
    if (!again) l->id = state()->next_id++;
    l->name.reserved = static_cast<std::uint32_t>(l->id);
    l->ahead = t.paths == Paths::kCached;
    std::string why;
    if (l->ahead && !make_half(*l, first, again ? l->legs[first].newest + 1 : 0, why)) {
      std::lock_guard guard(q->lock);
      if (free_before) switchover::clear_bits(*q, kTrapped);
      return note_refused(*q, why), true;
    }
    migr_links_path& home = l->first[0];
    home.link = t.home->index;
    home.serial = l->path.serial;
    std::memcpy(home.gid, l->home_gid.gid.raw, sizeof home.gid);
    home.qpn = q->pqpn();
    home.mtu = static_cast<std::uint8_t>(IBV_MTU_4096);
    if (l->ahead) l->first[1] = address_of(*l, first, l->legs[first].next);
    for (CqShadow* c : {q->send_cq, q->recv_cq}) {
      std::lock_guard guard(c->lock);
      c->link->qps[kHome][q->pqpn()] = l.get();
    }
    {
      std::lock_guard guard(q->lock);
      q->link = l.get();
    }
    // Well before it counts: threads that poll have to be known by then.
    switchover::for_cqs(*q, [](CqShadow& c) { switchover::set_cq_bits(c, kProtectedCq); });
    drop_former(*q);
    forget_refusal(*q);
    keep(std::move(l));
    return true;
  }
  return false;
}

}  // namespace

bool connected_by_application(const QpShadow& q) {
  const bool rests = q.phase == switchover::Phase::kRunning || switchover::waits_for_links(q);
  return (q.real->state == IBV_QPS_RTS || q.real->state == IBV_QPS_RTR) && rests && !q.spare;
}

std::string why_none(const Twin& t, const QpShadow& q) {
  if (t.home->foreign) return t.home->why;
  if (std::string why = why_not(q); !why.empty()) return why;
  const auto found = state()->refused.find(&q);
  return found == state()->refused.end() ? "" : found->second.why;
}

void forget_refusal(const QpShadow& q) {
  if (state()) state()->refused.erase(&q);
}

bool trap_posts(QpShadow& q) {
  constexpr unsigned kSessionMs = 10;  // with the Registry's lock: once in a round
  if (switchover::trap_posts(q, state()->session_open ? 0 : kSessionMs)) return true;
  state()->session_open = true;
  return false;
}

bool reads_more(const CqShadow& c) {
  const ibv_cq_ex& ex = c.app_ex;
  return c.real_ex && (ex.read_completion_ts || ex.read_completion_wallclock_ns || ex.read_cvlan || ex.read_flow_tag || ex.read_tm_info);
}

bool has_room_for(const Twin& t, Side side, const QpShadow& q) {
  return cq_on(*q.send_cq, side) && cq_on(*q.recv_cq, side) && t.pd(q.init.pd, side) && (!q.init.srq || srq_on(q, side));
}

namespace {

/// What `t` needs on one of its backup links. @return something was made
bool make_next_on(Twin& t, Side side, std::unique_lock<std::mutex>& guard) {
  Backup& b = t.at(side);
  std::string why;
  if (!b.link->ctx) return false;
  if (make_pd(t, b, why) || make_cq(t, side, why) || make_srq(t, side, why) || make_mr(t, side, why, guard)) return true;
  if (!why.empty()) b.link->why = why;
  return false;
}

}  // namespace

bool make_next(std::unique_lock<std::mutex>& guard) {
  for (std::size_t i = 0; i < state()->twins.size(); ++i) {  // while the lock is given away there may be more, or less
    Twin* const t = state()->twins[i];
    if (t->home->foreign || t->closing) continue;
    for (Side side = kHome; side < t->sides(); ++side) {  // channels are on all of them
      Link* const link = t->link(side);
      if (link->ctx || link->foreign || (link->tried_ns && now_ns() - link->tried_ns < kTryAgainNs)) continue;
      const std::string before = std::exchange(link->why, open_link(*link));
      link->tried_ns = now_ns();
      if (!link->why.empty() && link->why != before) std::fprintf(stderr, "libmigr: link %u: %s\n", link->index, link->why.c_str());
      return true;
    }
    for (Side side = 1; side < t->sides(); ++side)
      if (make_next_on(*t, side, guard)) return true;
    if (make_backup(*t)) return true;
  }
  return false;
}

}  // namespace migr::links
