/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <unordered_map>

#include "../datagrams.h"
#include "../events.h"
#include "../gids.h"
#include "../kernel_link.h"
#include "../links/links.h"
#include "../links/shared_limit.h"
#include "../provider/provider.h"
#include "../real.h"
#include "../whereabouts.h"
#include "../windows.h"
#include "ahead.h"
#include "parts.h"

namespace migr::switchover {
namespace {

template <class T, class Match>
T* find(const std::vector<T*>& all, Match&& match) {
  const auto it = std::find_if(all.begin(), all.end(), match);
  return it == all.end() ? nullptr : *it;
}

/// QPs of a context by virtual number.
using QpsByName = std::unordered_map<const Context*, std::unordered_map<std::uint32_t, QpShadow*>>;

int adopt_handle(Context& context, const migr_handle_map& map, const QpsByName& qps, std::string& why) {
  Registry& registry = Registry::get();
  const auto missing = [&](const char* kind) {
    why = std::string("no ") + kind + " with handle " + std::to_string(map.old_handle);
    return ENOENT;
  };
  switch (map.obj_type) {
    case MIGR_OBJ_PD: {
      ibv_pd* pd = find(registry.pds, [&](const ibv_pd* p) {
        return p->context == context.real && p->handle == map.old_handle;
      });
      if (!pd) return missing("PD");
      pd->handle = map.new_handle;
      return 0;
    }
    case MIGR_OBJ_CQ: {
      CqShadow* c = find(registry.cqs, [&](const CqShadow* q) {
        return q->context == &context && q->real->handle == map.old_handle;
      });
      if (!c) return missing("CQ");
      c->real->handle = map.new_handle;
      return 0;
    }
    case MIGR_OBJ_SRQ: {
      SrqShadow* s = find(registry.srqs, [&](const SrqShadow* q) {
        return q->context == &context && q->real->handle == map.old_handle;
      });
      if (!s) return missing("SRQ");
      s->real->handle = map.new_handle;
      s->ring_bytes = 0;  // the new one was made in its size
      s->ring = {};
      links::renewed(*s);
      return 0;
    }
    case MIGR_OBJ_QP: {
      const auto of = qps.find(&context);
      if (of == qps.end() || !of->second.contains(map.vqpn)) return missing("QP");
      QpShadow* q = of->second.at(map.vqpn);
      q->real->handle = map.new_handle;
      q->real->qp_num = map.pqpn;
      if (const Peer peer = std::to_array(map.peer); peer != Peer{}) {
        q->peer = peer;
        q->peer_context = 0;
      }
      q->gone = q->gone || (map.flags & MIGR_HANDLE_GONE);
      return 0;
    }
    default:
      return 0;  // no object
  }
}

/// New handles can equal old ones of other objects: every object is found by its old handle before any is changed,
/// by going through the maps in an order in which no new handle is met again.
int adopt_handles(std::span<const migr_handle_map> maps, std::string& why) {
  constexpr std::uint32_t kParked = 0x80000000u;  // uverbs handles are small positive numbers
  Registry& registry = Registry::get();
  QpsByName by_name;
  for (QpShadow* q : registry.qps) by_name[q->context][q->vqpn()] = q;
  const auto context_of = [&](const migr_handle_map& map) {
    return find(registry.contexts, [&](const Context* c) { return c->real->cmd_fd == map.context_fd; });
  };
  for (int pass = 0; pass < 2; ++pass) {
    for (const migr_handle_map& map : maps) {
      Context* context = context_of(map);
      if (!context) {
        why = "no context with descriptor " + std::to_string(map.context_fd);
        return ENOENT;
      }
      migr_handle_map step = map;
      (pass == 0 ? step.new_handle : step.old_handle) = kParked | map.new_handle;
      if (const int err = adopt_handle(*context, step, by_name, why)) return err;
    }
  }
  for (const migr_handle_map& map : maps) {
    Context* context = context_of(map);
    if (!map.obj_type) context->name_in_keys = map.old_handle;
    if (map.obj_type != MIGR_HANDLE_PEER) continue;
    const auto& qps = by_name[context];
    if (const auto q = qps.find(map.vqpn); q != qps.end()) q->second->peer_context = map.old_handle;
  }
  for (ibv_pd* pd : registry.pds) pd->handle &= ~kParked;
  for (CqShadow* c : registry.cqs) c->real->handle &= ~kParked;
  for (SrqShadow* s : registry.srqs) s->real->handle &= ~kParked;
  for (QpShadow* q : registry.qps) q->real->handle &= ~kParked;
  return 0;
}

/// The new one has its names.
int name_again(MrShadow& mr, std::string& why) {
  const ibv_mr& now = *mr.real;
  mr.context->renamed |= now.lkey != mr.app.lkey || now.rkey != mr.app.rkey;
  const int bound = mr.context->kernel->bind_mr(now.handle, mr.app.lkey, mr.app.rkey, now.lkey, now.rkey);
  return bound ? fail(why, bound, "cannot bind virtual lkey " + std::to_string(mr.app.lkey)) : 0;
}

void adopt_mr(MrShadow& mr, const migr_reg_mr_resp& made) {
  mr.real->handle = made.mr_handle;
  mr.real->lkey = made.lkey;
  mr.real->rkey = made.rkey;
}

int register_again(MrShadow& mr, std::string& why) {
  ibv_mr& now = *mr.real;
  const auto reg = [&](int access) {
    return provider::raw_reg_mr(mr.context->real, now.pd->handle, mr.app.addr, mr.app.length, mr.iova, access, now.handle, now.lkey, now.rkey);
  };
  int err = reg(mr.access);
  // Flags like relaxed ordering are wishes: libibverbs leaves out what a device does not know.
  if (err && (mr.access & IBV_ACCESS_OPTIONAL_RANGE)) err = reg(mr.access & ~IBV_ACCESS_OPTIONAL_RANGE);
  return err ? fail(why, err, "reg_mr of " + std::to_string(mr.app.length) + " bytes") : 0;
}

/// What a REBIND that has failed has done already: migrd says it again.
struct Done {
  bool handles = false, windows = false, datagrams = false;
  std::size_t mrs = 0;
};
constinit Done done;

/// All that CRIU's plugin has not registered before the commit.
int register_memory(std::string& why) {
  const auto& mrs = Registry::get().mrs;
  for (std::size_t& i = done.mrs; i < mrs.size(); ++i) {
    MrShadow& mr = *mrs[i];
    if (const migr_ahead_mr* made = ahead::done(i, mr)) adopt_mr(mr, made->out);
    else if (const int err = register_again(mr, why)) return err;
    if (const int err = name_again(mr, why)) return err;
  }
  ahead::forget();
  return 0;
}

/// ibv_destroy_cq() waits until as many events were acknowledged as the kernel's CQ has reported, and this one begins at
/// zero. What was read and not yet acknowledged stays owed.
void restart_event_count(CqShadow& c) {
  pthread_mutex_lock(&c.real->mutex);
  c.real->comp_events_completed -= c.events_read;
  c.real->async_events_completed -= std::exchange(c.acked_before, 0);
  pthread_mutex_unlock(&c.real->mutex);
  c.events_read = 0;
}

/// The same of a new QP's or SRQ's asynchronous events. It may have said something already: that it is put into ERR.
template <class Shadow>
void restart_event_count(Shadow& shadow) {
  pthread_mutex_lock(&shadow.real->mutex);
  shadow.real->events_completed -= std::exchange(shadow.acked_before, 0);
  pthread_mutex_unlock(&shadow.real->mutex);
}

/// Caller holds s.lock.
int post_again(SrqShadow& s, std::string& why) {
  if (!s.link) return post_out(s, s.outstanding, path::post_named, why);
  const int err = links::post_waiting(s);
  return err ? fail(why, err, "post_srq_recv") : 0;
}

void forget_awaited() {
  for (SrqShadow* s : Registry::get().srqs)
    if (s->state.load(std::memory_order_relaxed) & kFrozenSrq) datagrams::emptied(s->awaited);
  for (QpShadow* q : Registry::get().qps) datagrams::emptied(q->awaited);
}

/// Keys have their new values.
int thaw_srq(SrqShadow& s, std::string& why) {
  std::lock_guard guard(s.lock);
  set_srq_bits(s, kTranslateSrq);
  if (const int err = post_again(s, why)) return err;
  s.outstanding.clear();
  if (const int err = post_out(s, s.kept, path::post_one_receive, why)) return err;
  links::count_at_device(s);
  if (s.limit) {
    ibv_srq_attr attr{};
    attr.srq_limit = s.limit;
    if (const int err = real().modify_srq(s.real, &attr, IBV_SRQ_LIMIT)) return fail(why, err, "modify_srq");
  }
  set_srq_bits(s, 0, kFrozenSrq);
  return 0;
}

int thaw_cq(CqShadow& c, std::string& why) {
  {
    std::lock_guard guard(c.lock);
    path::translate_qpns(c, kTranslateQpn);
    if (c.state.fetch_and(~std::uint32_t{kFrozenCq}, std::memory_order_relaxed) & kFrozenCq) restart_event_count(c);  // once
  }
  return return_cq_events(c, why);
}

/// A signal of O_ASYNC may name the number at which that was set: here one that CRIU had for a moment.
void signal_as_own(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || !(flags & O_ASYNC)) return;
  fcntl(fd, F_SETFL, flags & ~O_ASYNC);
  fcntl(fd, F_SETFL, flags);
}

/// Not one that goes to ERR, or whose new path is in INIT because its connection did not survive.
bool takes_work(const QpShadow& q) { return connected(q) && !q.broken && !q.gone; }

/// Of one that the application has in RTR: with which PSN it has to begin (proc_wire.h). One that was in RTS for the partner's marker
/// when the migration began is so here, too.
int find_told_psn(QpShadow& q, std::string& why) {
  q.responder_only = false;
  q.told_psn.reset();
  if (q.app.qp_type == IBV_QPT_UD || q.real->state != IBV_QPS_RTR || q.gone || q.broken) return 0;
  ibv_qp_attr now{};
  if (const int err = ask_device(q, now, IBV_QP_STATE | IBV_QP_SQ_PSN)) return fail(why, err, "query_qp of " + qp_name(q));
  q.responder_only = now.qp_state == IBV_QPS_RTS;
  if (q.responder_only) q.real->state = IBV_QPS_RTS;
  q.told_psn = (q.responder_only ? now.sq_psn : q.pqpn()) & kPsnMask;
  return 0;
}

/// On the new QPs, before anybody can use one. This host is where the process is: what cannot be bound is not.
void bind_windows() {
  for (const auto& [mw, through] : windows::bound()) {
    const bool usable = through && takes_work(*through);
    if (mw->type == IBV_MW_TYPE_2 && !usable) continue;  // nor is it
    QpShadow* const q = usable ? through : find(Registry::get().qps, [&](const QpShadow* p) {
      return p->init.pd == mw->pd && (p->app.qp_type == IBV_QPT_RC || p->app.qp_type == IBV_QPT_UC) && takes_work(*p);
    });
    windows::Operation op;
    std::string why = "no queue pair of its protection domain is connected";
    if (q && !windows::bind_again(mw, op)) continue;
    if (!q || run_local(*q, q->real, op.wr, why)) std::fprintf(stderr, "libmigr: %s: the window %#x is not bound any more\n", why.c_str(), mw->rkey);
  }
}

}  // namespace

void keys_of(const Context& context, std::vector<migr_key_map>& out) {
  constexpr int kRemote = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  for (const MrShadow* mr : Registry::get().mrs)
    if (mr->context == &context && (mr->access & kRemote)) out.push_back({.vrkey = mr->app.rkey, .prkey = mr->real->rkey, .owner = {}});
  windows::keys(context, out);
}

int rebound_keys(std::vector<migr_key_map>& out) {
  for (const Context* context : Registry::get().contexts) {
    if (context->name_in_keys) out.push_back({.vrkey = MIGR_KEY_CONTEXT, .prkey = context->name_in_keys, .owner = {}});
    keys_of(*context, out);
  }
  return 0;
}

int rebind(std::span<const migr_handle_map> maps, std::vector<migr_key_map>& out, std::string& why) {
  Registry& registry = Registry::get();
  if (!registry.frozen) {
    why = "this process was not frozen";
    return EBUSY;
  }
  if (!done.handles)
    if (const int err = adopt_handles(maps, why)) return err;
  done.handles = true;
  events::thawed(true);
  registry.retired_keys.clear();  // KEYS is all that partners know from now on
  for (Context* context : registry.contexts)
    if (const int err = context->kernel->reattach(context->real->cmd_fd))
      return fail(why, err, "cannot attach to migr.ko on this host");
  for (const Context* context : registry.contexts) signal_as_own(context->real->async_fd);
  for (const ibv_comp_channel* channel : registry.channels) signal_as_own(channel->fd);
  if (const int err = register_memory(why)) return err;
  if (!done.windows)
    if (const int err = windows::make_again(why)) return err;
  done.windows = true;
  rebound_keys(out);
  for (Context* context : registry.contexts) gids::moved(*context);
  whereabouts::moved();
  datagrams::make_again();
  if (!done.datagrams) forget_awaited();  // their receives are posted once more
  done.datagrams = true;
  for (SrqShadow* s : registry.srqs) {
    if (!(s->state.load(std::memory_order_relaxed) & kFrozenSrq)) continue;
    restart_event_count(*s);
    if (const int err = thaw_srq(*s, why)) return err;
  }
  for (QpShadow* q : registry.qps) {
    if (q->phase == Phase::kRebound) continue;
    restart_event_count(*q);
    events::hush(*q, nullptr);
    if (const int err = q->context->kernel->bind_qp(q->vqpn(), q->pqpn()))
      return fail(why, err, "cannot bind " + qp_name(*q));
    std::lock_guard guard(q->lock);
    // The new object was made from the record of before the suspension.
    q->real->state = q->app_state();
    q->write_access_added = false;
    if (const int err = find_told_psn(*q, why)) return err;
    path::translate_keys(*q, kTranslateLocal);
    if (const int err = post_out(*q, q->outstanding, why)) return err;
    if (const int err = post_out(*q, q->kept_receives, why)) return err;
    if (const int err = q->gone ? 0 : break_if_broken(*q, why)) return err;  // what is gone ends when it runs
    clear_bits(*q, kKeepReceives);
    q->phase = Phase::kRebound;
  }
  for (CqShadow* c : registry.cqs)
    if (const int err = thaw_cq(*c, why)) return err;
  bind_windows();
  for (Context* context : registry.contexts) events::offer(*context->real);
  done = {};
  registry.frozen = false;
  registry.thawed.notify_all();
  return 0;
}

}  // namespace migr::switchover
