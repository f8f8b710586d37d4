/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Shadow verbs: what the application has made is made on the backup link (SHIFT §4.2, appendix B). In rounds: what
 * depends on something that the other end has not told yet is left for the next one, so no two processes wait
 * for each other in a circle.
 */
#include <poll.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "../../include/migr/gid.h"
#include "../control.h"
#include "../gids.h"
#include "../high_fd.h"
#include "../kernel_link.h"
#include "../provider/uverbs_write.h"
#include "../real.h"
#include "../switchover/parts.h"
#include "channel.h"
#include "cq_room.h"
#include "directory.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr std::uint64_t kLookUpNs = 100'000'000;  // of a round: channels are to be made, too
constexpr std::uint64_t kRests = 4, kLongestRestNs = 100'000'000;
constexpr int kFirstPauseMs = 10, kLastPauseMs = 1000;
constexpr std::uint64_t kLookAgainNs = 1'000'000'000;  // each look stops every thread for a moment
constexpr std::uint64_t kNotKept = IBV_QP_EX_WITH_TSO;  // what kept.cc cannot keep
constexpr std::uint32_t kNames = kTranslateLocal | kTranslateRemote;  // of a state word: all that it may say at rest
constexpr std::size_t kManyRetired = 64;
constexpr std::uint64_t kTryAgainNs = 3'000'000'000;  // a device that is not there
constexpr int kChannelPauseMs = 100;  // well within the retries of the end that is connected first
constexpr int kLastLinkPauseMs = 5000;  // where all that is missing is a link that one end does not have
constexpr std::uint64_t kAskAgainNs = 1'000'000'000, kSeldomNs = 15'000'000'000;  // which links the other end can go to

std::string errno_text(const std::string& what) { return what + ": " + std::strerror(errno); }

bool non_blocking(int fd) { return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0; }

ibv_comp_channel* make_events(ibv_context* ctx) {
  ibv_comp_channel* const events = real().create_comp_channel(ctx);
  if (!events) return nullptr;
  events->fd = to_high_fd(events->fd);
  non_blocking(events->fd);
  return events;
}

/// All of a device's; only one where it cannot be asked for all.
std::vector<ibv_gid_entry> gid_table(ibv_context* ctx, std::uint32_t port, std::uint32_t index) {
  std::vector<ibv_gid_entry> all;
  if (!gids::read(ctx, all)) return all;
  ibv_gid_entry one{};
  one.port_num = port;
  one.gid_index = index;
  one.gid_type = IBV_GID_TYPE_ROCE_V2;
  if (real().query_gid(ctx, static_cast<std::uint8_t>(port), static_cast<int>(index), &one.gid)) return {};
  return {one};
}

/// The first of RoCE v2 that is an IPv4 address, else the first there is. Null: there is none
const ibv_gid_entry* choose_gid(const std::vector<ibv_gid_entry>& all, std::uint32_t port) {
  const ibv_gid_entry* first = nullptr;
  for (const ibv_gid_entry& e : all) {
    if (e.port_num != port) continue;
    if (e.gid_type == IBV_GID_TYPE_ROCE_V2 && migr_gid_family(e.gid.raw) == 0) return &e;
    if (!first) first = &e;
  }
  return first;
}

/// It may have another one than before, or at another index, since its port was down. @return "" or why it has none
std::string read_gid(Link& link, ibv_context* ctx) {
  const Config::Link& config = link.config;
  const bool named = config.gid_index >= 0, known = link.gid.port_num;
  const std::uint32_t index = named ? static_cast<std::uint32_t>(config.gid_index) : link.gid.gid_index;
  const auto all = gid_table(ctx, config.port, index);
  const ibv_gid_entry* now;
  std::string which;
  if (named) now = gids::find(all, config.port, index), which = " " + std::to_string(index);
  else if (known) now = gids::again(all, link.gid), which = " of the kind that it had";
  else now = choose_gid(all, config.port);
  if (!now) return config.device + " has no GID" + which;
  if (known && (now->gid_index != link.gid.gid_index || std::memcmp(now->gid.raw, link.gid.gid.raw, sizeof now->gid.raw)))
    std::fprintf(stderr, "libmigr: link %u: %s has another GID now, or at another place: number %u\n", link.index, config.device.c_str(), now->gid_index);
  link.gid = *now;
  return "";
}

ibv_context* open_named(const std::string& device) {
  int count = 0;
  ibv_device** const all = real().get_device_list(&count);
  ibv_context* ctx = nullptr;
  errno = ENODEV;
  for (int i = 0; all && i < count; ++i)
    if (device == all[i]->name) ctx = real().open_device(all[i]);
  const int saved = errno;
  if (all) real().free_device_list(all);
  errno = saved;
  return ctx;
}

/// What of it is there.
void close(Link& link, ibv_context* ctx) {
  if (link.cq) real().destroy_cq(std::exchange(link.cq, nullptr));
  for (ibv_comp_channel** e : {&link.events, &link.cq_events})
    if (*e) {
      let_fd_go((*e)->fd);
      real().destroy_comp_channel(std::exchange(*e, nullptr));
    }
  if (link.pd) real().dealloc_pd(std::exchange(link.pd, nullptr));
  link.kernel.reset();
  note_uverbs_fd(ctx->cmd_fd, false);
  for (const int fd : {ctx->cmd_fd, ctx->async_fd}) let_fd_go(fd);
  real().close_device(ctx);
}

/// @return "" or why it cannot be used
std::string open_link(Link& link) {
  ibv_context* const ctx = open_named(link.config.device);
  link.gid = {};
  link.absent = !ctx && errno == ENODEV;
  if (!ctx) return errno_text("cannot open " + link.config.device);
  ctx->cmd_fd = to_high_fd(ctx->cmd_fd);
  note_uverbs_fd(ctx->cmd_fd, true);
  if (ctx->async_fd >= 0) non_blocking(ctx->async_fd = to_high_fd(ctx->async_fd));
  link.ops = ctx->ops;
  std::string why;
  ibv_port_attr port{};
  if (link.foreign = !provider::is_supported(*ctx, link.ops); link.foreign)
    why = link.config.device + " is not soft-RoCE (docs/limits.md)";
  else if (const int err = query_port(ctx, link.config.port, port))
    why = link.config.device + " port " + std::to_string(link.config.port) + ": " + std::strerror(err);
  else
    why = read_gid(link, ctx);
  link.absent = !why.empty() && !link.foreign;
  link.event_down = why.empty() && port.state != IBV_PORT_ACTIVE;
  link.fatal = false;
  link.lid = port.lid;
  link.mtu = port.active_mtu;
  if (why.empty() && !(link.pd = real().alloc_pd(ctx))) why = errno_text("alloc_pd");
  if (why.empty() && (!(link.events = make_events(ctx)) || !(link.cq_events = make_events(ctx)))) why = errno_text("create_comp_channel");
  if (why.empty() && !(link.cq = real().create_cq(ctx, Channel::kFirstCqes, nullptr, link.cq_events, 0))) why = errno_text("create_cq");
  if (why.empty() && link.ops.req_notify_cq(link.cq, 0)) why = errno_text("req_notify_cq");
  if (why.empty()) {
    link.kernel = std::make_unique<KernelLink>(ctx->cmd_fd);
    if (link.kernel->has_tables()) return link.ctx = ctx, "";
    why = "no address space for its tables";
  }
  close(link, ctx);
  return why;
}

Registry& registry() { return Registry::get(); }

bool make_pd(const Twin& t, Backup& b, std::string& why) {
  for (ibv_pd* pd : registry().pds) {
    if (pd->context != t.of->real || b.pds.contains(pd)) continue;
    ibv_pd* const made = real().alloc_pd(b.link->ctx);
    if (!made) return why = errno_text("alloc_pd"), false;
    return b.pds[pd] = made, true;
  }
  return false;
}

bool make_cq(Twin& t, Side side, std::string& why) {
  const Link& link = *t.link(side);
  for (CqShadow* c : registry().cqs) {
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

enum class Made : std::uint8_t { kNothing, kOne, kFailed };

bool is_missing(const Twin& t, Side side, const ibv_pd* of) {
  const auto& missing = t.at(side).missing;
  return std::any_of(missing.begin(), missing.end(), [&](const MrShadow* mr) { return mr->app.pd == of; });
}

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

/// One that fails keeps no other back.
bool make_mr(Twin& t, Side side, std::string& why, std::unique_lock<std::mutex>& guard) {
  for (std::size_t left = t.at(side).missing.size(); left; --left)
    if (const Made made = make_first_mr(t, side, why, guard); made != Made::kFailed) return made == Made::kOne;
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
  if (!q.adrift && q.state.load(std::memory_order_relaxed) & ~(kNames | kKeptSession | (shares_receives(q) ? kTrapped : 0u))) return "is in a switchover";
  if (!(q.birth.mask & IBV_QP_AV) || !q.birth.ah.is_global) return "has no GID";
  if (const std::string why = why_refused(*q.send_cq); !why.empty()) return why;
  return why_refused(*q.recv_cq);
}

bool connected_by_application(const QpShadow& q) {
  const bool rests = q.phase == switchover::Phase::kRunning || switchover::waits_for_links(q);
  return (q.real->state == IBV_QPS_RTS || q.real->state == IBV_QPS_RTR) && rests && !q.spare;
}

bool is_known(const ibv_gid& gid) {
  return std::any_of(std::begin(gid.raw), std::end(gid.raw), [](std::uint8_t b) { return b; });
}

/// Where it is now. @return false: that cannot be told
bool find_home(const QpShadow& q, QpLink& l) {
  if (!is_known(q.birth.gid)) return false;
  ibv_qp_attr attr{};
  if (switchover::ask_device(q, attr, switchover::kConnectionAttrs)) return false;
  const std::uint32_t port = attr.ah_attr.port_num, index = attr.ah_attr.grh.sgid_index;
  const auto all = gid_table(q.context->real, port, index);
  l.home_gid = {};
  l.home_gid.gid = q.birth.gid;  // as long as its port has none
  l.home_gid.gid_index = index;
  l.home_gid.port_num = port;
  l.home_gid.gid_type = IBV_GID_TYPE_ROCE_V2;
  if (const ibv_gid_entry* const now = gids::find(all, port, index)) l.home_gid = *now;
  l.home_bits = q.state.load(std::memory_order_relaxed) & kNames;
  return true;
}

/// The same later.
bool find_home_again(QpLink& l, std::string& why) {
  const auto all = gid_table(l.q->context->real, l.home_gid.port_num, l.home_gid.gid_index);
  const ibv_gid_entry* const now = gids::again(all, l.home_gid);
  if (!now) return why = l.legs[kHome].link->config.device + " has no GID of the kind that it had", false;
  l.home_gid = *now;
  return true;
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

/// The same of one that has got none so far. "": it was not tried yet
std::string why_none(const Twin& t, const QpShadow& q) {
  if (t.home->foreign) return t.home->why;
  if (std::string why = why_not(q); !why.empty()) return why;
  const auto found = state()->refused.find(&q);
  return found == state()->refused.end() ? "" : found->second.why;
}

/// Why first_side() finds none, when all has been made on backup links that can be.
std::string why_no_side(const Twin& t) {
  const Link& link = *t.backups[0].link;
  return link.why.empty() ? "a PD, a CQ or an SRQ is not there on " + link.config.device : link.why;
}

/// A vQP gets its backup: the first path there, if that is made ahead. @return false: of none that was tried
bool make_backup(Twin& t) {
  for (QpShadow* q : registry().qps) {
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
    l->path = {.qp = q->real, .serial = 0, .psn = 0, .peer_psn = 0, .connected = true, .sends = q->send_ring, .receives = q->receive_ring, .birth = true};
    l->executed.link = l->peer_home = t.home->index;
    const bool again = follow_former(*l);
    if (!again) l->id = state()->next_id++;
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

void forget_refusal(const QpShadow& q) {
  if (state()) state()->refused.erase(&q);
}

Pinned pin(Twin& t, Side side, MrShadow& mr, std::unique_lock<std::mutex>& guard) {
  ibv_pd* const pd = t.pd(mr.app.pd, side);
  if (!pd || t.closing) return Pinned::kFailed;
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

int query_port(ibv_context* ctx, unsigned number, ibv_port_attr& port) {
  return real().query_port(ctx, static_cast<std::uint8_t>(number), reinterpret_cast<_compat_ibv_port_attr*>(&port));
}

void close_link(Link& link) {
  link.foreign = false;  // on another host it may be of another family
  if (!link.ctx) return;
  state()->discards.finish();
  close(link, std::exchange(link.ctx, nullptr));
  link.port_down = MIGR_LINKS_CAUSE_NONE;  // migrd tells it again
  link.port_serial = 0;                    // maybe another host's
  link.preferred = false;
  link.why.clear();
  link.tried_ns = 0;
}

ibv_qp* create_on(ibv_pd* pd, ibv_qp_init_attr init, unsigned port, unsigned access, std::string& why) {
  init.qp_type = IBV_QPT_RC;
  return to_init(real().create_qp(pd, &init), port, access, why);
}

ibv_qp* to_init(ibv_qp* qp, unsigned port, unsigned access, std::string& why) {
  if (!qp) return why = errno_text("create_qp"), nullptr;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = static_cast<std::uint8_t>(port);
  attr.qp_access_flags = access;
  const int err = real().modify_qp(qp, &attr, switchover::kInitMask);
  if (!err) return qp;
  real().destroy_qp(qp);
  errno = err;
  return why = errno_text("modify_qp to INIT"), nullptr;
}

bool has_room_for(const Twin& t, Side side, const QpShadow& q) {
  return cq_on(*q.send_cq, side) && cq_on(*q.recv_cq, side) && t.pd(q.init.pd, side) && (!q.init.srq || srq_on(q, side));
}

void destroy_path(QpLink& l, Side side, Path& path) {
  if (!path.qp) return;
  for (CqShadow* c : {l.q->send_cq, l.q->recv_cq}) {
    std::lock_guard guard(c->lock);
    if (c->link) c->link->qps[side].erase(path.qp->qp_num);
  }
  state()->discards.add(path.qp);
  path = {};
}

bool make_half(QpLink& l, Side side, std::uint32_t serial, std::string& why) {
  Path made;
  destroy_path(l, side, l.legs[side].next);
  l.legs[side].asked = 0;
  return create_half(l, side, made, why) && adopt(l, side, made, serial, why);
}

bool create_half(QpLink& l, Side side, Path& out, std::string& why) {
  const QpShadow& q = *l.q;
  const Leg& leg = l.legs[side];
  ibv_qp_init_attr_ex init{};
  init.qp_type = IBV_QPT_RC;
  init.cap = q.cap;
  init.sq_sig_all = q.init.sq_sig_all;
  if (side == kHome && !find_home_again(l, why)) return false;
  if (!has_room_for(*l.twin, side, q)) return why = "a PD, a CQ or an SRQ is not there yet on " + leg.link->config.device, false;
  init.send_cq = cq_on(*q.send_cq, side);
  init.recv_cq = cq_on(*q.recv_cq, side);
  init.pd = l.twin->pd(q.init.pd, side);
  init.srq = srq_on(q, side);
  init.comp_mask = q.init.comp_mask & (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
  init.send_ops_flags = q.init.send_ops_flags;
  const unsigned port = side == kHome ? l.home_gid.port_num : leg.link->config.port;
  KernelLink& kernel = side == kHome ? *q.context->kernel : *leg.link->kernel;
  ibv_context* const ctx = side == kHome ? q.context->real : leg.link->ctx;
  ibv_qp* const made = to_init(switchover::create_like(q, ctx, init), port, q.access_flags >= 0 ? static_cast<unsigned>(q.access_flags) : 0, why);
  if (!made) return false;
  out = {.qp = made, .serial = 0, .psn = switchover::random_psn(), .peer_psn = 0, .connected = false, .sends = {}, .receives = {}, .birth = false};
  const int err = provider::locate_queues(kernel, *made, out.sends, out.receives);
  if (!err) return true;
  why = std::string("cannot find the queues of a QP on ") + leg.link->config.device + ": " + std::strerror(err);
  return real().destroy_qp(made), false;
}

bool adopt(QpLink& l, Side side, Path path, std::uint32_t serial, std::string& why) {
  QpShadow& q = *l.q;
  Leg& leg = l.legs[side];
  destroy_path(l, side, leg.next);
  leg.asked = 0;
  path.qp->qp_context = &q;
  path.serial = leg.newest = serial;
  leg.next = path;
  for (CqShadow* c : {q.send_cq, q.recv_cq}) {
    std::lock_guard guard(c->lock);
    c->link->qps[side][path.qp->qp_num] = &l;
  }
  KernelLink& kernel = side == kHome ? *q.context->kernel : *leg.link->kernel;
  const int err = kernel.bind_qp(q.vqpn(), path.qp->qp_num);
  if (!err) return true;
  why = std::string("cannot name a QP on ") + leg.link->config.device + ": " + std::strerror(err);
  return destroy_path(l, side, leg.next), false;
}

void lead_to(ibv_ah_attr& ah, const Link& link, const std::uint8_t gid[16], std::uint16_t lid) {
  std::memcpy(ah.grh.dgid.raw, gid, sizeof ah.grh.dgid.raw);
  ah.grh.sgid_index = static_cast<std::uint8_t>(link.gid.gid_index);
  if (!ah.grh.hop_limit) ah.grh.hop_limit = 64;
  ah.is_global = 1;
  ah.dlid = lid;
  ah.port_num = static_cast<std::uint8_t>(link.config.port);
}

bool connect_to_own(const Link& link, ibv_qp* qp, const ibv_qp* to, std::uint32_t psn, std::string& why) {
  constexpr std::uint8_t kRnrRetries = 3;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = link.mtu;
  attr.dest_qp_num = to->qp_num;
  attr.rq_psn = attr.sq_psn = psn;
  attr.max_dest_rd_atomic = attr.max_rd_atomic = 1;
  lead_to(attr.ah_attr, link, link.gid.gid.raw, link.lid);
  int err = real().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = kOwnTimeout;
  attr.retry_cnt = kOwnRetries;
  attr.rnr_retry = kRnrRetries;
  if (!err) err = real().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  if (err) why = std::string("modify_qp of a QP of ours to another one: ") + std::strerror(err);
  return !err;
}

migr_links_path address_of(const QpLink& l, Side side, const Path& path) {
  migr_links_path out{};
  const Leg& leg = l.legs[side];
  out.link = leg.link->index;
  out.serial = path.serial;
  std::memcpy(out.gid, side == kHome ? l.home_gid.gid.raw : leg.link->gid.gid.raw, sizeof out.gid);
  out.qpn = path.qp->qp_num;
  out.psn = path.psn;
  out.lid = leg.link->lid;
  out.mtu = static_cast<std::uint8_t>(leg.link->mtu);
  return out;
}

int connect_half(QpLink& l, Side side, Path& path, const migr_links_path& to, std::string& why) {
  QpShadow& q = *l.q;
  const Link& link = *l.legs[side].link;
  ibv_qp_attr attr{};
  const ibv_qp_state state = q.real->state;
  int err = switchover::ask_device(q, attr, switchover::kConnectionAttrs);
  if (err) return why = std::string("query_qp: ") + std::strerror(err), err;
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = std::min({q.birth.path_mtu, link.mtu, static_cast<ibv_mtu>(to.mtu)});  // whatever path each end is on now, the same at both
  attr.dest_qp_num = to.qpn;
  attr.rq_psn = to.psn;
  lead_to(attr.ah_attr, link, to.gid, to.lid);
  if (side == kHome) {
    attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(l.home_gid.gid_index);
    attr.ah_attr.port_num = static_cast<std::uint8_t>(l.home_gid.port_num);
  }
  if (state == IBV_QPS_RTR) {  // it only answers: what it would send with is not set
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
  }
  err = real().modify_qp(path.qp, &attr, switchover::rtr_mask(q));
  if (err) return why = std::string("modify_qp to RTR: ") + std::strerror(err), err;
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = path.psn;
  err = real().modify_qp(path.qp, &attr, switchover::rts_mask(q));
  if (err) return why = std::string("modify_qp to RTS: ") + std::strerror(err), err;
  path.peer_psn = to.psn;
  path.connected = true;
  return 0;
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

/// Memory of any of the application's contexts. Gives the lock away meanwhile. @return false: nothing is missing, or it failed
bool make_next_memory(std::unique_lock<std::mutex>& guard) {
  std::string ignored;
  for (std::size_t i = 0; i < state()->twins.size(); ++i) {  // meanwhile there may be more, or less
    Twin* const t = state()->twins[i];
    for (Side side = 1; side < t->sides(); ++side)
      if (make_mr(*t, side, ignored, guard)) return true;
  }
  return false;
}

}  // namespace

bool links_are_open() {
  for (const Twin* t : state()->twins)
    for (Side side = kHome; side < t->sides() && !t->home->foreign; ++side)
      if (!t->link(side)->ctx && !t->link(side)->foreign) return false;
  return true;
}

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

/* ---- what the others have --------------------------------------------------------- */

Link* link_of(const std::string& device, unsigned port) {
  for (Link& link : state()->links)
    if (link.config.device == device && link.config.port == port) return &link;
  return nullptr;
}

namespace {

void wanted(QpLink& l) {
  std::lock_guard guard(l.lock);
  if (!std::exchange(l.wanted, true)) kick(state()->failover_fd);
}

}  // namespace

void leave_link(Link& link) {
  for (QpLink* l : state()->qps)
    if (l->leg().link == &link) wanted(*l);
  // Nothing that still comes over it is heard: so the other end takes it for down, too.
  for (Channel* c : std::vector(state()->channels))
    if (c->link == &link) channel_broke(*c);
}

namespace {

/// Where it can go, by bit. A device that has failed as a whole is not opened again, but for the application that has it.
std::uint32_t links_of(const QpLink& l) {
  std::uint32_t links = 1u << l.legs[kHome].link->index;
  for (Side side = 1; side < l.sides(); ++side)
    if (has_room_for(*l.twin, side, *l.q) && !l.legs[side].link->fatal) links |= 1u << l.legs[side].link->index;
  return links;
}

migr_links_vqp record_of(const QpLink& l) {
  migr_links_vqp out{};
  out.name = l.name;
  out.policy = static_cast<std::uint32_t>(l.twin->policy);
  out.default_link = l.twin->home->index;
  out.making = static_cast<std::uint16_t>(l.twin->paths);
  out.atomics = static_cast<std::uint16_t>(l.twin->atomics);
  out.links = links_of(l);
  for (const migr_links_path& path : l.first)
    if (path.qpn && out.links >> path.link & 1) out.path[out.paths++] = path;
  return out;
}

migr_links_link_state state_of(const Link& link) {
  bool usable = link.ctx;
  for (const Twin* t : state()->twins) usable = usable || t->home == &link;
  if (link.absent && !usable) return MIGR_LINKS_LINK_ABSENT;
  if (link.down()) return MIGR_LINKS_LINK_DOWN;
  return usable ? MIGR_LINKS_LINK_UP : link.why.empty() ? MIGR_LINKS_LINK_MAKING : MIGR_LINKS_LINK_DOWN;
}

/// @param backups  vQPs that would go there next
migr_links_link record_of(const Link& link, std::uint32_t backups) {
  migr_links_link out{};
  out.backups = backups;
  out.link = link.index;
  out.port = link.config.port;
  std::snprintf(out.device, sizeof out.device, "%s", link.config.device.c_str());
  std::memcpy(out.gid, link.gid.gid.raw, sizeof out.gid);
  out.gid_index = link.gid.gid_index;
  out.state = state_of(link);
  out.cause = link.down_by();
  std::snprintf(out.why, sizeof out.why, "%s", link.why.c_str());
  for (const Channel* c : state()->channels) {
    if (c->link != &link) continue;
    out.channels = static_cast<std::uint16_t>(out.channels + (c->up() && !c->doubt_ns));
    out.spares = static_cast<std::uint16_t>(out.spares + spares_of(*c));
  }
  for (const QpLink* l : state()->qps) {
    out.vqps += l->leg().link == &link;
  }
  return out;
}

/// The one that is made ahead. @param next  next_side()
bool lacks_path(const QpLink& l, Side next) { return l.ahead && !l.legs[next].next.connected; }

/// No channel over another link stands: of the first one's.
const char* why_nowhere(const QpLink& l) {
  const Side side = l.on == kHome ? 1 : kHome;
  const Link& link = *l.legs[side].link;
  if (link.down()) return "its other link is down";
  if (!is_common(l, side)) return "the other end cannot go to its other link";
  if (!receives_are_clean(*l.q, side)) return "waits for receives that are left on its other link";
  const Channel* const channel = find_channel(l.instance, link);
  if (!channel || !channel->up()) return "waits for a channel";
  return channel->ended || channel->parting ? "waits for the end of a migration" : "waits for an answer over its channel";
}

/// It will not change, and carries still: who counts what a link's end would break counts it.
bool carries_without_backup(QpLink& l) {
  std::lock_guard guard(l.lock);
  return l.stage == Stage::kBroken && !l.seen && switchover::connected(*l.q);
}

migr_links_vqp_state state_of(QpLink& l, Side next) {
  migr_links_vqp_state out{};
  out.name = l.name;
  out.epoch = l.epoch;
  out.link = l.leg().link->index;
  constexpr migr_links_vqp_phase kPhase[] = {MIGR_LINKS_VQP_MAKING, MIGR_LINKS_VQP_READY, MIGR_LINKS_VQP_SWITCHING,
                                             MIGR_LINKS_VQP_SWITCHING, MIGR_LINKS_VQP_BROKEN};
  out.phase = carries_without_backup(l) ? MIGR_LINKS_VQP_MAKING : kPhase[static_cast<int>(l.stage)];
  const char* why = l.why.c_str();
  if (l.why.empty() && l.stage == Stage::kMaking)
    why = next == l.on ? why_nowhere(l) : lacks_path(l, next) ? "waits for the other end" : "waits for memory";
  if (!*why && l.stage == Stage::kReady && !memory_is_there(l, next)) why = "waits for memory";  // registered since
  std::string small;
  if (!*why && l.stage == Stage::kReady) {  // its next cut will refuse
    switchover::for_cqs(*l.q, [&](CqShadow& c) { if (small.empty()) small = why_refused(c); });
    why = small.c_str();
  }
  if (!*why && l.stage == Stage::kReady) why = l.drains_ended ? "the way to its other link did not end; it is tried again" : why_direct(l);
  std::snprintf(out.why, sizeof out.why, "%s", why);
  out.atomics = l.relays ? MIGR_LINKS_RELAYED : MIGR_LINKS_DIRECT;
  return out;
}

/// Null: none was published.
const migr_links_path* path_on(const migr_links_vqp& v, std::uint32_t link) {
  const migr_links_path* const end = v.path + std::min<std::uint32_t>(v.paths, MIGR_LINKS_MAX_LINKS);
  const migr_links_path* const found = std::find_if(v.path, end, [&](const migr_links_path& p) { return p.link == link; });
  return found == end ? nullptr : found;
}

migr_links_cause cause_of(std::uint32_t port_flags) {
  if (port_flags & MIGR_LINKS_PORT_DOWN_OPERATOR) return MIGR_LINKS_CAUSE_OPERATOR;
  if (port_flags & MIGR_LINKS_PORT_GONE) return MIGR_LINKS_CAUSE_EVENT;
  return port_flags & MIGR_LINKS_PORT_DOWN_NETLINK ? MIGR_LINKS_CAUSE_NETLINK : MIGR_LINKS_CAUSE_NONE;
}

void note_ports(const std::vector<migr_links_port>& ports) {
  std::lock_guard guard(registry().lock);
  for (const migr_links_port& port : ports)
    if (Link* const link = link_of(port.device, port.port)) {
      if (port.serial < link->port_serial) continue;  // what migrd has read before it pushed the newer one
      link->port_serial = port.serial;
      link->port_down = cause_of(port.flags);
      link->preferred = port.flags & MIGR_LINKS_PORT_PREFERRED;
      if (link->down()) leave_link(*link);
    }
  kick(state()->round_fd);
}

bool wanted_to_park() {
  std::lock_guard guard(registry().lock);
  return parking();
}

/// Whether somebody answers at an address of a link. The kernel asks for one that does not for a second: so one of these in a round,
/// and each the less often the more of them there are.
class Neighbours {
 public:
  void begin_round() {
    answered_.clear();
    std::erase_if(silent_, [now = now_ns()](const auto& known) { return now - known.second > kOldNs; });  // of processes that have gone
    asked_in_vain_ = false;
  }
  /// Not under the Registry's lock. @return false: nobody does, as far as that is known
  bool answer(const Link& link, const std::uint8_t (&gid)[16], std::uint16_t lid) {
    if (!link.pd) return false;
    const std::uint64_t now = now_ns();
    const Address address{link.index, std::to_array(gid)};
    if (const auto known = answered_.find(address); known != answered_.end() && now - known->second < kFreshNs) return true;
    const auto silent = silent_.find(address);
    if (asked_in_vain_ || (silent != silent_.end() && now - silent->second < kAgainNs * silent_.size())) return false;
    ibv_ah_attr to{};
    lead_to(to, link, gid, lid);
    if (!neighbour_answers(link.pd, to)) {
      answered_.erase(address);
      silent_[address] = now_ns();
      asked_in_vain_ = true;
      return false;
    }
    answered_[address] = now;
    std::erase_if(silent_, [&](const auto& s) { return s.first.first == link.index; });  // the link may work again
    return true;
  }

 private:
  using Address = std::pair<std::uint32_t, std::array<std::uint8_t, 16>>;
  static constexpr std::uint64_t kFreshNs = 5'000'000, kAgainNs = 2'000'000'000, kOldNs = 600'000'000'000;
  std::map<Address, std::uint64_t> answered_, silent_;  // when; the former in this round
  bool asked_in_vain_ = false;                          ///< in this round
};

/// All that a round needs of the directory, asked without the lock.
class Round {
 public:
  explicit Round(Directory& directory) : directory_(directory) {}
  bool half_a_channel() const { return half_a_channel_; }
  /// How long the last look at all vQPs has taken; 0: there are few.
  std::uint64_t locked_ns() const { return locked_ns_; }
  /// An end does not have all links that the other one has: it may come to have them, and nobody says so.
  bool lacks_links() const { return lacks_links_; }
  /// @return something is still missing that others may tell
  bool run() {
    lacks_links_ = false;
    if (wanted_to_park()) {
      make_awaited_memory();
      look_for_threads();
      look_at_ways_home();
      if (leave_links(directory_)) return true;
      stay_parked();
      look_again_ns_ = 0;  // the clock may be another host's
    }
    bool again;
    {
      std::unique_lock guard(registry().lock);
      state()->session_open = false;
      make_all(guard);
      again = state()->session_open || !links_are_open();
      std::vector<migr_links_vqp_state> others;
      if (state()->qps.empty() && state()->to_withdraw.empty() && last_states_.empty() && last_others_.empty() && (tell_of_others(others), others.empty())) return again;
    }
    const unsigned life = directory_.life();
    note_answers(life);
    if (!life) return true;
    if (std::exchange(life_, life) != life) forget_told();
    begun_ns_ = now_ns();
    neighbours_.begin_round();
    tell();
    look_up();
    make_channels();
    const bool waiting = finish();
    return look_for_threads() || waiting || again;
  }

 private:
  /// What is missing. The application's own calls and the failover thread want the lock, too.
  static void make_all(std::unique_lock<std::mutex>& guard) {
    constexpr std::uint64_t kTurnNs = 1'000'000;
    constexpr std::chrono::microseconds kOthersTurn{50};
    std::uint64_t since = now_ns();
    while (!parking() && make_next(guard)) {
      if (now_ns() - since < kTurnNs) continue;
      guard.unlock();
      std::this_thread::sleep_for(kOthersTurn);
      guard.lock();
      since = now_ns();
    }
  }

  /// Before a migration: for changes that have begun. Nothing else is made any more.
  static void make_awaited_memory() {
    std::unique_lock guard(registry().lock);
    while (state()->memory_awaited && make_next_memory(guard)) {}
  }

  static void note_answers(bool answers) {
    std::lock_guard guard(registry().lock);
    state()->directory_answers = answers;
  }

  void forget_told() {
    std::lock_guard guard(registry().lock);
    for (QpLink* l : state()->qps) l->told = false;
    for (Link& link : state()->links) link.port_serial = 0;
    last_states_.clear();
    last_others_.clear();
    last_links_.clear();
  }

  /// Of those, some that were tried longest ago: whoever is refused, or unknown, keeps nobody else back. Caller holds the lock.
  template <class One, class Wanted>
  std::vector<One*> next_few(const std::vector<One*>& all, std::uint64_t One::* tried_ns, std::size_t most, Wanted&& wanted) const {
    std::vector<One*> few;
    for (One* one : all)
      if (one->*tried_ns < begun_ns_ && wanted(*one)) few.push_back(one);
    const std::size_t n = std::min(most, few.size());
    std::partial_sort(few.begin(), few.begin() + static_cast<std::ptrdiff_t>(n), few.end(), [&](const One* a, const One* b) { return a->*tried_ns < b->*tried_ns; });
    few.resize(n);
    for (One* one : few) one->*tried_ns = now_ns();
    return few;
  }

  void tell() {
    std::vector<migr_links_name> withdrawn;
    std::vector<migr_links_switch> ended;
    std::uint64_t dropped = 0;
    {
      std::lock_guard guard(registry().lock);
      withdrawn = state()->to_withdraw;
      ended = state()->to_report.take(dropped);
    }
    if (dropped) std::fprintf(stderr, "libmigr: while migrd was away there were more changes of links than are kept: it is not told of the first %llu\n", static_cast<unsigned long long>(dropped));
    if (!withdrawn.empty()) {
      directory_.withdraw(withdrawn);
      std::lock_guard guard(registry().lock);
      auto& left = state()->to_withdraw;
      left.erase(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(withdrawn.size()));
      answer_byes();
    }
    if (!ended.empty()) directory_.switched(ended);
    while (publish_some()) {}
  }

  /// @return there may be more
  bool publish_some() {
    std::vector<migr_links_vqp> records;
    std::vector<std::uint64_t> ids;
    {
      std::lock_guard guard(registry().lock);
      for (const QpLink* l : next_few(state()->qps, &QpLink::published_ns, MIGR_LINKS_MAX_RECORDS / 4, [](const QpLink& l) { return !l.told || l.told_links != links_of(l); })) {
        records.push_back(record_of(*l));
        ids.push_back(l->id);
      }
    }
    if (records.empty()) return false;
    const int err = directory_.publish(records);
    if (err && err != EEXIST && err != ENOSPC && err != EINVAL) return false;
    // One that is refused takes none of the others along.
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const bool told = !err || !directory_.publish({&records[i], 1});
      std::lock_guard guard(registry().lock);
      QpLink* const l = find(ids[i]);
      if (l) l->told = told, l->told_links = records[i].links;
      else if (told) state()->to_withdraw.push_back(records[i].name);  // it has gone meanwhile
      if (l && !told) l->why = "migrd does not take its name";
    }
    return true;
  }

  /// The first path on a backup link has both its halves, or had; or it needs none.
  static bool has_begun(const QpLink& l) {
    if (l.instance == Peer{}) return false;
    return l.epoch || l.begun || std::any_of(l.legs.begin() + 1, l.legs.end(), [](const Leg& leg) { return leg.newest || leg.next.connected; });
  }

  /// The other end was faster, and its word is missing.
  static bool wants_word(const QpLink& l) {
    return !l.found && l.stage != Stage::kBroken && (l.twin->atomics == Atomics::kRelayed || l.twin->paths == Paths::kPool);
  }

  /// Where this end can go and the other one cannot.
  static bool peer_lacks_links(const QpLink& l) {
    for (Side side = 1; side < l.sides(); ++side)
      if (has_room_for(*l.twin, side, *l.q) && !is_common(l, side)) return true;
    return false;
  }
  static bool lacks_links(const QpLink& l) {
    for (Side side = 1; side < l.sides(); ++side)
      if (!has_room_for(*l.twin, side, *l.q)) return true;
    return peer_lacks_links(l);
  }
  /// The other end may not have that link any more.
  static bool lacks_channel(const QpLink& l) {
    for (Side side = kHome; side < l.sides(); ++side)
      if (wants_channel(l, side) && !standing(l, side)) return true;
    return false;
  }

  static bool asks_again(const QpLink& l) {
    if (!l.found || l.stage == Stage::kBroken) return false;
    const std::uint64_t since = now_ns() - l.asked_ns;
    return (since > kSeldomNs && lacks_channel(l)) || (since > std::min(kSeldomNs, kAskAgainNs << std::min(l.asked_again, 6u)) && peer_lacks_links(l));
  }

  void look_up() {
    while (now_ns() - begun_ns_ < kLookUpNs && look_up_some()) {}
  }

  /// @return there may be more
  bool look_up_some() {
    std::vector<migr_links_name> names;
    std::vector<std::uint64_t> ids;
    {
      std::lock_guard guard(registry().lock);
      const auto is_missing = [](const QpLink& l) { return l.told && ((!(has_begun(l) && l.found) && (l.stage == Stage::kMaking || wants_word(l))) || asks_again(l)); };
      for (const QpLink* l : next_few(state()->qps, &QpLink::asked_ns, MIGR_LINKS_MAX_RECORDS / 8, is_missing)) {
        names.push_back(l->peer);
        ids.push_back(l->id);
      }
    }
    std::vector<migr_links_found> found;
    if (names.empty() || directory_.lookup(names, found) || found.size() != names.size()) return false;
    std::vector<std::uint32_t> reached;
    for (const migr_links_found& f : found) reached.push_back(f.status ? 0 : links_reached(f.vqp));
    std::lock_guard guard(registry().lock);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      QpLink* const l = find(ids[i]);
      if (!l) continue;
      if (has_begun(*l) && l->found) {
        take_links(*l, found[i]);
        continue;
      }
      l->why = found[i].status == ENOENT ? "the other end is unknown" : found[i].status == EHOSTUNREACH ? "the directory cannot be reached" : "";
      if (found[i].status) continue;
      take_found(*l, found[i], reached[i]);
    }
    return true;
  }

  /// Of one that was found before. Who does not answer, or has been withdrawn, has said nothing else yet.
  static void take_links(QpLink& l, const migr_links_found& found) {
    const bool same = !found.status && !std::memcmp(l.instance.data(), found.instance, l.instance.size()) && found.vqp.default_link == l.peer_home;
    if (!same || found.vqp.links == l.peer_links) return (void)++l.asked_again;
    l.peer_links = found.vqp.links;
    l.asked_again = 0;
    kick(state()->failover_fd);
  }

  /// Of the paths that it has. @return a bit for each link
  std::uint32_t links_reached(const migr_links_vqp& vqp) {
    std::uint32_t reached = 0;
    for (std::uint32_t i = 0; i < std::min<std::uint32_t>(vqp.paths, MIGR_LINKS_MAX_LINKS); ++i)
      if (const migr_links_path& p = vqp.path[i]; p.link < state()->links.size() && neighbours_.answer(state()->links[p.link], p.gid, p.lid)) reached |= 1u << p.link;
    return reached;
  }

  void take_found(QpLink& l, const migr_links_found& found, std::uint32_t reached) {
    const bool begun = has_begun(l);
    l.why.clear();
    l.peer_home = found.vqp.default_link;
    l.peer_links = found.vqp.links;
    std::memcpy(l.instance.data(), found.instance, l.instance.size());
    if (l.instance == state()->instance) {
      l.why = "is connected to its own process";
      return;
    }
    // Paths are known by their link and number, and that of birth would have two names.
    if (found.vqp.default_link != l.twin->home->index) {
      l.why = "its ends have different default links";
      return;
    }
    if (!agree(l, found.vqp.atomics)) {  // it is asked again
      l.why = "waits for the end of an ibv_wr_* session";
      return;
    }
    l.found = true;
    l.pooled = l.twin->paths == Paths::kPool && found.vqp.making == MIGR_LINKS_POOL;
    if (begun) return;  // the other end was faster, and has asked for a path
    l.ahead = l.ahead && found.vqp.making == MIGR_LINKS_CACHED;
    for (Side side = 1; side < l.sides(); ++side) {
      Path& mine = l.legs[side].next;
      if (!mine.qp) continue;
      const migr_links_path* const theirs = path_on(found.vqp, l.legs[side].link->index);
      if (!l.ahead || !theirs || theirs->serial != mine.serial) {
        destroy_path(l, side, mine);
        continue;
      }
      if (!(reached & 1u << theirs->link)) l.why = "the other end does not answer on its other link";
      else connect_half(l, side, mine, *theirs, l.why);
      return;  // what has failed is tried once more in the next round
    }
    for (Side side = 1; side < l.sides(); ++side) l.begun = l.begun || is_common(l, side);
    if (!l.begun) l.why = "the other end has no such link";
  }

  /// The one on its own link tells whether that works.
  static bool wants_channel(const QpLink& l, Side side) {
    const Link& link = *l.legs[side].link;
    return has_begun(l) && l.stage != Stage::kBroken && link.ctx && !link.down() && is_common(l, side);
  }

  void make_channels() {
    std::vector<migr_links_channel> own;
    std::vector<bool> connected;
    std::map<const Link*, std::string> no_gid;  // why
    half_a_channel_ = false;
    {
      std::lock_guard guard(registry().lock);
      for (QpLink* l : state()->qps) {
        for (Side side = kHome; side < l->sides(); ++side) {
          Link& link = *l->legs[side].link;
          if (!wants_channel(*l, side) || find_channel(l->instance, link)) continue;
          const auto [why, first] = no_gid.try_emplace(&link);
          if (first) why->second = read_gid(link, link.ctx);
          if (!why->second.empty()) l->why = why->second;
          else make_channel(l->instance, link, past_of(l->instance, link).round + 1, l->why);
        }
      }
      for (const Channel* c : next_few(state()->channels, &Channel::asked_ns, MIGR_LINKS_MAX_RECORDS, [](const Channel& c) { return !c.up(); }))
        own.push_back(address_of(*c)), connected.push_back(c->connected);  // the other end may be a round ahead
    }
    std::vector<migr_links_channel> found;
    if (own.empty() || directory_.channel(own, found) || found.size() != own.size()) return;
    std::vector<bool> reached(own.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (connected[i] || found[i].status) continue;
      reached[i] = neighbours_.answer(state()->links[own[i].link], found[i].gid, found[i].lid);
    }
    std::lock_guard guard(registry().lock);
    half_a_channel_ = true;
    for (std::size_t i = 0; i < own.size(); ++i) {
      Channel* channel = nullptr;
      for (Channel* c : state()->channels)
        if (c->qp->qp_num == own[i].qpn && c->link->index == own[i].link && !c->up()) channel = c;
      if (!channel) continue;
      std::string why;
      if (found[i].status == ESTALE && found[i].round > 0) give_up_channel(*channel, found[i].round - 1);
      else if (found[i].status == EINVAL) give_up_channel(*channel, channel->round);  // that round was told before, of another QP: pasts are forgotten
      else if (found[i].status == 0 && !channel->connected && (!reached[i] || connect_channel(*channel, found[i], why))) give_up_channel(*channel, channel->round);
    }
  }

  /// Half channels to processes that nothing is connected to any more: nobody would find them broken. The next connection
  /// may come at once.
  static void end_needless_channels() {
    constexpr std::uint64_t kAgainNs = 1'000'000'000;
    const std::uint64_t now = now_ns();
    const auto needed = [](const Channel* c) {
      for (const QpLink* l : state()->qps)
        for (Side side = kHome; side < l->sides(); ++side)
          if (l->instance == c->peer && l->legs[side].link == c->link && wants_channel(*l, side)) return true;
      return false;
    };
    for (Channel* c : std::vector(state()->channels)) {
      if (c->up() || needed(c) || !c->needed_ns) c->needed_ns = now;
      if (now - c->needed_ns < kAgainNs) continue;
      past_of(c->peer, *c->link).round = c->round;
      destroy_channel(c);
    }
  }

  void give_up_channel(Channel& channel, std::uint32_t last) {
    channel.round = last;  // the next one is one more
    channel_broke(channel);
  }

  /// vQPs of which everything is there are protected from now on. @return one is not, and may become so
  bool finish() {
    bool waiting = false;
    std::vector<migr_links_vqp_state> states, others;
    std::vector<migr_links_link> links;
    std::vector<std::uint32_t> backups(state()->links.size());
    std::vector<migr_links_channel> ended;
    {
      std::lock_guard guard(registry().lock);
      const std::uint64_t begun_ns = now_ns();
      ended = forget_pasts();
      end_needless_channels();
      for (Channel* c : state()->channels) tell_keys(*c);
      for (QpLink* l : state()->qps) {
        if (l->unheard && l->found && answer_unheard(*l)) l->unheard = false;
        look_at_backup(*l);
        const Side next = next_side(*l);
        if (l->stage == Stage::kReady && next != l->on) ++backups[l->legs[next].link->index];
        waiting = waiting || is_incomplete(*l, next) || !l->told || l->told_links != links_of(*l) || wants_word(*l) || (l->unheard && l->stage != Stage::kBroken);
        lacks_links_ = lacks_links_ || lacks_links(*l);
        waiting = waiting || lacks_channel(*l);
        states.push_back(state_of(*l, next));
      }
      tell_of_others(others);
      lacks_links_ = lacks_links_ || !state()->refused.empty();
      waiting = fill_pools() || waiting;
      note_backed_up();
      for (const Link& link : state()->links) links.push_back(record_of(link, backups[link.index]));
      locked_ns_ = state()->qps.size() < kManyVqps ? 0 : now_ns() - begun_ns;
    }
    if (!ended.empty()) (void)directory_.end_channels(ended);  // who is not there forgets them, too
    report(links, states, others);
    return waiting;
  }

  /// Connections that have no backup, and why.
  static void tell_of_others(std::vector<migr_links_vqp_state>& others) {
    for (const QpShadow* q : registry().qps) {
      const Twin* const t = q->context->twin;
      if (q->link || !t || others.size() >= MIGR_LINKS_MAX_RECORDS || !connected_by_application(*q)) continue;
      const ibv_gid& gid = is_known(q->birth.gid) ? q->birth.gid : t->home->gid.gid;
      const std::string why = why_none(*t, *q);
      if (why.empty() || !is_known(gid)) continue;
      migr_links_vqp_state& out = others.emplace_back();
      out = {};
      std::memcpy(out.name.gid, gid.raw, sizeof out.name.gid);
      out.name.vqpn = q->vqpn();
      out.link = t->home->index;
      out.phase = MIGR_LINKS_VQP_NONE;
      std::snprintf(out.why, sizeof out.why, "%s", why.c_str());
    }
  }

  /// Before a migration, of a default link that works again.
  static void look_at_ways_home() {
    std::lock_guard guard(registry().lock);
    for (QpLink* l : state()->qps)
      if (l->on != kHome) look_at_backup(*l);
  }

  /// Of its backup something is missing; where it is protected already, only the path that is made ahead.
  static bool is_incomplete(const QpLink& l, Side next) { return l.stage == Stage::kMaking || (l.stage == Stage::kReady && lacks_path(l, next)); }

  static void look_at_backup(QpLink& l) {
    const Side next = next_side(l);
    if (next == l.on || !is_incomplete(l, next) || !has_begun(l)) return;
    l.why.clear();
    if (lacks_path(l, next)) return ask_for_path(l, next, *standing(l, next));
    if (!memory_is_there(l, next)) return;
    relieve(l);
    if (l.leg().link->down()) wanted(l);
  }

  /// Where threads were let through to an old path they have come back when all were seen outside. @return some were not
  bool look_for_threads() {
    std::vector<std::pair<std::uint64_t, std::size_t>> trapped;
    decltype(State::retired) retired;  // what is retired meanwhile, and may be one of these, is kept anew
    bool many;
    {
      std::lock_guard guard(registry().lock);
      many = state()->retired.size() >= kManyRetired;
      for (const QpLink* l : state()->qps)
        if (!l->traps.empty() && l->stage != Stage::kChanging) trapped.push_back({l->id, l->traps.size()});
    }
    const std::uint64_t now = now_ns();
    if (trapped.empty() && !many) return false;
    if (now < look_again_ns_) return true;
    look_again_ns_ = now + kLookAgainNs;
    {
      std::lock_guard guard(registry().lock);
      retired.swap(state()->retired);
    }
    const int err = directory_.outside(control::text_ranges());
    std::lock_guard guard(registry().lock);
    if (err) return state()->retired.insert(state()->retired.begin(), retired.begin(), retired.end()), true;
    bool left = false;
    for (const auto& [id, count] : trapped)
      if (QpLink* const l = find(id)) {
        release_traps(*l, std::min(count, l->traps.size()));
        left = left || !l->traps.empty();
      }
    return left;
  }

  template <class Record>
  static bool equal(const std::vector<Record>& a, const std::vector<Record>& b) {
    return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(Record)));
  }

  void report(const std::vector<migr_links_link>& links, const std::vector<migr_links_vqp_state>& states, const std::vector<migr_links_vqp_state>& others) {
    if (!equal(links, last_links_) && !directory_.links(links)) last_links_ = links;
    if (equal(states, last_states_) && equal(others, last_others_)) return;
    if (!tell_states(states, others)) return;
    last_states_ = states;
    last_others_ = others;
  }

  /// Those that have changed; and the others last, for each packet replaces those of the one before. @return migrd has all of them
  bool tell_states(const std::vector<migr_links_vqp_state>& states, const std::vector<migr_links_vqp_state>& others) {
    const auto key = [](const migr_links_vqp_state& s) { return std::string_view(reinterpret_cast<const char*>(&s.name), sizeof s.name); };
    std::map<std::string_view, const migr_links_vqp_state*> before;
    for (const auto& s : last_states_) before[key(s)] = &s;
    std::vector<migr_links_vqp_state> changed;
    for (const auto& s : states)
      if (const auto found = before.find(key(s)); found == before.end() || std::memcmp(found->second, &s, sizeof s)) changed.push_back(s);
    if (!changed.empty() && directory_.states(changed)) return false;
    return (others.empty() && !changed.empty()) || !directory_.states(others);
  }

  Directory& directory_;
  unsigned life_ = 0;
  bool half_a_channel_ = false, lacks_links_ = false;
  Neighbours neighbours_;
  std::uint64_t begun_ns_ = 0;  ///< this round
  std::uint64_t locked_ns_ = 0;
  std::uint64_t look_again_ns_ = 0;
  std::vector<migr_links_link> last_links_;
  std::vector<migr_links_vqp_state> last_states_, last_others_;
};

}  // namespace

void run_rounds() {
  std::unique_ptr<Directory> directory;
  {
    std::lock_guard guard(registry().lock);  // start_threads() is called with it
    if (!state()) return;
    directory = make_directory(state()->config, state()->instance);
    state()->directory = directory.get();
  }
  Round round(*directory);
  const int wake = state()->round_fd;
  int pause_ms = kFirstPauseMs;
  for (;;) {
    const bool waiting = round.run();
    // Each vQP that changes its path kicks: with thousands of them the failover thread would wait for this one's looks.
    if (round.locked_ns() && !wanted_to_park())
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(kRests * round.locked_ns(), kLongestRestNs)));
    pollfd fds[] = {{.fd = wake, .events = POLLIN, .revents = 0}, {.fd = directory->fd(), .events = POLLIN, .revents = 0}};
    const int n = poll(fds, directory->fd() < 0 ? 1 : 2, waiting ? pause_ms : round.lacks_links() ? kLastLinkPauseMs : -1);
    std::uint64_t count;
    if (fds[0].revents) (void)!read(wake, &count, sizeof count);
    std::vector<migr_links_port> ports;
    bool knocked = false;
    directory->pushes(ports, knocked);
    if (!ports.empty()) note_ports(ports);
    const bool own = fds[0].revents || !ports.empty() || wanted_to_park();
    if (n > 0 && !own) poll(fds, 1, std::min(pause_ms, kChannelPauseMs));  // others knock as often as they like
    pause_ms = own ? kFirstPauseMs : std::min(2 * pause_ms, round.half_a_channel() ? kChannelPauseMs : kLastPauseMs);
  }
}

}  // namespace migr::links
