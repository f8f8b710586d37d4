/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Shared receive queues: control path and data path. */
#include <cerrno>
#include <new>
#include <optional>
#include <utility>

#include "datagrams.h"
#include "environment.h"
#include "events.h"
#include "kept.h"
#include "kernel_link.h"
#include "links/links.h"
#include "links/shared_limit.h"
#include "no_cancel.h"
#include "objects.h"
#include "path.h"
#include "provider/provider.h"
#include "real.h"

#define MIGR_PATH [[gnu::section("migr_path")]]

namespace migr {
namespace {

constexpr int kMaxSges = 64;  // at least what any provider allows in one WR

MIGR_PATH [[gnu::always_inline]] inline int post_to(const path::SrqTarget& to, std::uint64_t wr_id, const ibv_sge* list, int count) noexcept {
  ibv_sge sges[kMaxSges];
  if (count > kMaxSges) return EINVAL;
  for (int i = 0; i < count; ++i) {
    sges[i] = list[i];
    sges[i].lkey = path::physical_lkey(to.keys, sges[i].lkey);
  }
  ibv_recv_wr copy{.wr_id = wr_id, .next = nullptr, .sg_list = sges, .num_sge = count};
  ibv_recv_wr* stopped;
  return to.post(to.srq, &copy, &stopped);
}

MIGR_PATH [[gnu::always_inline]] inline path::SrqTarget own(const SrqShadow& s) { return {s.real, s.real_post, s.key_table}; }

/// Receives still go to the provider until FREEZE, because the partner's drain needs them. Those for datagrams always come this way.
[[gnu::cold, gnu::noinline]] int post_srq_recv_locked(SrqShadow& s, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  const NoCancel no_cancel;
  std::lock_guard guard(s.lock);
  for (; wr; wr = wr->next) {
    const bool frozen = s.state.load(std::memory_order_relaxed) & kFrozenSrq;
    const std::span<const ibv_sge> sges(wr->sg_list, static_cast<std::size_t>(wr->num_sge));
    if (const int err = frozen ? kept::keep(s, kept::copy(*wr)) : path::post_one_receive(s, wr->wr_id, sges)) {
      *bad = wr;
      return err;
    }
  }
  return 0;
}

/// One by one: the list of the application stays as it was.
MIGR_PATH [[gnu::noinline]] int post_srq_recv_switched(SrqShadow& s, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  if (s.state.load(std::memory_order_relaxed) & (kSuspendedSrq | kFrozenSrq | kWatchedSrq | kSharedSrq)) [[unlikely]]
    return post_srq_recv_locked(s, wr, bad);
  for (; wr; wr = wr->next) {
    if (const int err = post_to(own(s), wr->wr_id, wr->sg_list, wr->num_sge)) {
      *bad = wr;
      return err;
    }
  }
  return 0;
}

MIGR_PATH int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  SrqShadow& s = shadow_of(srq);
  if (s.state.load(std::memory_order_relaxed)) [[unlikely]]
    return post_srq_recv_switched(s, wr, bad);
  return s.real_post(s.real, wr, bad);  // tail call: nothing may follow it
}

SrqShadow* new_srq(Context& context) {
  auto* shadow = new (std::nothrow) SrqShadow{};
  if (!shadow) {
    errno = ENOMEM;
    return nullptr;
  }
  shadow->context = &context;
  shadow->key_table = context.kernel->key_table();
  shadow->real_post = context.ops.post_srq_recv;
  if (environment::force_switched()) shadow->state.store(kSrqForced, std::memory_order_relaxed);
  if (context.renamed) shadow->state.fetch_or(kTranslateSrq, std::memory_order_relaxed);
  return shadow;
}

/// @param srq null: creating it failed
/// @param basic no more than a queue of receives
ibv_srq* adopt_srq(Registry& registry, SrqShadow* shadow, ibv_srq* srq, void* srq_context, const ibv_srq_attr& given, bool basic) {
  if (!srq) {
    delete shadow;
    return nullptr;
  }
  shadow->real = srq;
  shadow->max_wr = given.max_wr;
  shadow->max_sge = given.max_sge;
  shadow->app = *srq;
  shadow->app.srq_context = srq_context;
  pthread_mutex_init(&shadow->app.mutex, nullptr);
  pthread_cond_init(&shadow->app.cond, nullptr);
  registry.srqs.push_back(shadow);
  registry.note_shadow(&shadow->app);
  if (basic) links::made(*shadow);
  return &shadow->app;
}

ibv_srq* create_srq_ex(ibv_context* ctx, ibv_srq_init_attr_ex* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(ctx);
  SrqShadow* shadow = new_srq(*context);
  if (!shadow) return nullptr;
  ibv_srq_init_attr_ex mine = *attr;
  mine.srq_context = shadow;
  if (attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ) mine.cq = real_cq(attr->cq);
  ibv_srq* srq = events::with_kernel_fd(*ctx, [&] { return context->slots.create_srq_ex(ctx, &mine); });
  if (srq) attr->attr = mine.attr;
  const bool basic = !(attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) || attr->srq_type == IBV_SRQT_BASIC;
  return adopt_srq(registry, shadow, srq, attr->srq_context, mine.attr, basic);
}

int get_srq_num(ibv_srq* srq, std::uint32_t* number) {
  SrqShadow& shadow = shadow_of(srq);
  return shadow.context->slots.get_srq_num(shadow.real, number);
}

int post_srq_ops(ibv_srq* srq, ibv_ops_wr* op, ibv_ops_wr** bad) {
  SrqShadow& shadow = shadow_of(srq);
  return shadow.context->slots.post_srq_ops(shadow.real, op, bad);
}

}  // namespace

void install_srq(Context& context, ibv_context& ctx) {
  if (ctx.ops.post_srq_recv) ctx.ops.post_srq_recv = post_srq_recv;
  MIGR_TAKE_SLOT(context, ctx, create_srq_ex);
  MIGR_TAKE_SLOT(context, ctx, get_srq_num);
  MIGR_TAKE_SLOT(context, ctx, post_srq_ops);
}

int path::post_one_receive(SrqShadow& s, std::uint64_t wr_id, std::span<const ibv_sge> sges) noexcept {
  return s.link ? links::post(s, wr_id, sges) : post_named(s, wr_id, sges);
}

int path::post_named(SrqShadow& s, std::uint64_t name, std::span<const ibv_sge> sges) noexcept {
  // Its completion may be there before the call returns.
  if (s.awaited.noted) datagrams::await(*s.context, s.awaited, {.wr_id = links::own_name(s, name), .sges = {sges.begin(), sges.end()}});
  const int err = post_translated(own(s), name, sges);
  if (err && s.awaited.noted) datagrams::await_not(s.awaited);
  return err;
}

int path::post_translated(const SrqTarget& to, std::uint64_t name, std::span<const ibv_sge> sges) noexcept {
  return post_to(to, name, sges.data(), static_cast<int>(sges.size()));
}

}  // namespace migr

using namespace migr;

MIGR_EXPORT ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(pd->context);
  if (!context) return real().create_srq(pd, attr);
  SrqShadow* shadow = new_srq(*context);
  if (!shadow) return nullptr;
  ibv_srq_init_attr mine = *attr;
  mine.srq_context = shadow;
  ibv_srq* srq = events::with_kernel_fd(*pd->context, [&] { return real().create_srq(pd, &mine); });
  if (srq) attr->attr = mine.attr;
  return adopt_srq(registry, shadow, srq, attr->srq_context, mine.attr, true);
}

MIGR_EXPORT int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attr, int mask) {
  Registry& registry = Registry::get();
  // A limit is armed all the time, and FREEZE asks for it: it is nothing that the record has to be right about.
  auto guard = mask & IBV_SRQ_MAX_WR ? registry.change() : registry.enter();
  SrqShadow* shadow = known(registry, srq);
  if (!shadow) return real().modify_srq(srq, attr, mask);
  std::unique_lock srq_guard(shadow->lock);
  const bool limit_is_ours = (mask & IBV_SRQ_LIMIT) && shadow->counted_here;
  if (limit_is_ours && attr->srq_limit > shadow->max_wr) return EINVAL;
  // With another size the old ring goes and a new one comes: where, only the provider knows.
  std::optional<provider::RingWatch> watch;
  if (mask & IBV_SRQ_MAX_WR) watch.emplace(*shadow->context);
  std::uint32_t armed = 0;
  if (mask & IBV_SRQ_LIMIT) {  // before the call: its event may be read before the call has returned
    std::lock_guard events_guard(registry.events_lock);
    armed = std::exchange(shadow->armed, attr->srq_limit);
  }
  const int of_device = limit_is_ours ? mask & ~IBV_SRQ_LIMIT : mask;
  const int err = of_device ? real().modify_srq(shadow->real, attr, of_device) : 0;
  if (!err && watch) {
    shadow->max_wr = attr->max_wr;
    watch->moved_to(shadow->ring_offset, shadow->ring_bytes);
    shadow->ring = {};
  }
  if (err && (mask & IBV_SRQ_LIMIT)) {
    std::lock_guard events_guard(registry.events_lock);
    shadow->armed = armed;
  }
  srq_guard.unlock();
  if (limit_is_ours) links::limit_set();
  if (!err && watch) links::resized(*shadow);
  return err;
}

MIGR_EXPORT int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  SrqShadow* shadow = known(registry, srq);
  const int err = real().query_srq(shadow ? shadow->real : srq, attr);
  if (err || !shadow) return err;
  std::lock_guard events_guard(registry.events_lock);
  if (shadow->counted_here) attr->srq_limit = shadow->armed;
  return 0;
}

MIGR_EXPORT int ibv_destroy_srq(ibv_srq* srq) {
  Registry& registry = Registry::get();
  links::wait_for_discards();
  wait_for_handlers(registry, srq);
  SrqShadow* shadow;
  {
    auto guard = registry.change();
    shadow = known(registry, srq);
    if (shadow) links::gone(*shadow);
    const int err = real().destroy_srq(shadow ? shadow->real : srq);
    if (err || !shadow) return err;
    std::erase(registry.srqs, shadow);
    if (shadow->tracked) registry.tracking_failed = true;
  }
  forget_shadow(registry, *shadow);
  delete shadow->link;
  delete shadow;
  return 0;
}
