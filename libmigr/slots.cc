/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Slots of verbs_context that take a shadow, or make an object that needs one. Each does what the provider does. */
#include <cerrno>
#include <cstdint>
#include <new>
#include <vector>

#include "events.h"
#include "kernel_link.h"
#include "objects.h"
#include "path.h"
#include "real.h"
#include "windows.h"

namespace migr {
namespace {

constexpr char kFlow[] = "flow";
constexpr char kWq[] = "WQ";
constexpr char kTd[] = "thread domain";
constexpr char kParentDomain[] = "parent domain";
constexpr char kXrcd[] = "XRC domain";

void count_unsupported(const char* what, int change) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  registry.cannot_move(what, change);
}

Slots& slots_of(const ibv_context* ctx) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  return registry.context_of(ctx)->slots;
}

/// The XRC target QP that another process, or this one, has made: a QP of its own for this process.
ibv_qp* open_qp(ibv_context* ctx, ibv_qp_open_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(ctx);
  auto* shadow = new (std::nothrow) QpShadow{};
  if (!shadow) {
    errno = ENOMEM;
    return nullptr;
  }
  shadow->init.qp_type = attr->qp_type;
  shadow->init.qp_context = attr->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT ? attr->qp_context : nullptr;
  ibv_qp_open_attr mine = *attr;
  mine.qp_context = shadow;
  mine.comp_mask |= IBV_QP_OPEN_ATTR_CONTEXT;
  ibv_qp* qp = context->slots.open_qp(ctx, &mine);
  if (!qp) {
    delete shadow;
    return nullptr;
  }
  shadow->immovable = "ibv_open_qp";  // of another process
  return adopt_qp(registry, *context, *shadow, qp);
}

ibv_mr* alloc_null_mr(ibv_pd* pd) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Context* context = registry.context_of(pd->context);
  ibv_mr* mr = context->slots.alloc_null_mr(pd);
  return mr ? adopt_mr(registry, *context, mr, 0, 0, false) : nullptr;
}

ibv_mr* reg_dm_mr(ibv_pd* pd, ibv_dm* dm, std::uint64_t offset, std::size_t length, unsigned access) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Context* context = registry.context_of(pd->context);
  ibv_mr* mr = context->slots.reg_dm_mr(pd, dm, offset, length, access);
  return mr ? adopt_mr(registry, *context, mr, static_cast<int>(access), 0, false) : nullptr;
}

int advise_mr(ibv_pd* pd, ibv_advise_mr_advice advice, std::uint32_t flags, ibv_sge* list, std::uint32_t count) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Context* context = registry.context_of(pd->context);
  std::vector<ibv_sge> mine(list, list + count);
  const migr_key_entry* keys = context->kernel->key_table();
  for (ibv_sge& sge : mine) sge.lkey = path::physical_lkey(keys, sge.lkey);
  return context->slots.advise_mr(pd, advice, flags, mine.data(), count);
}

int modify_cq(ibv_cq* cq, ibv_modify_cq_attr* attr) {
  CqShadow& shadow = shadow_of(cq);
  return shadow.context->slots.modify_cq(shadow.real, attr);
}

int modify_qp_rate_limit(ibv_qp* qp, ibv_qp_rate_limit_attr* attr) {
  QpShadow& shadow = shadow_of(qp);
  return shadow.context->slots.modify_qp_rate_limit(shadow.real, attr);
}

ibv_flow* create_flow(ibv_qp* qp, ibv_flow_attr* attr) {
  QpShadow& shadow = shadow_of(qp);
  ibv_flow* flow = shadow.context->slots.ibv_create_flow(shadow.real, attr);
  if (flow) count_unsupported(kFlow, 1);
  return flow;
}

int destroy_flow(ibv_flow* flow) {
  const int err = slots_of(flow->context).ibv_destroy_flow(flow);
  if (!err) count_unsupported(kFlow, -1);
  return err;
}

/// WQs are not shadowed: their completions carry the number of the QP that was made of them.
ibv_wq* create_wq(ibv_context* ctx, ibv_wq_init_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(ctx);
  ibv_wq_init_attr mine = *attr;
  mine.cq = real_cq(attr->cq);
  ibv_wq* wq = events::with_kernel_fd(*ctx, [&] { return context->slots.create_wq(ctx, &mine); });
  attr->max_wr = mine.max_wr;
  attr->max_sge = mine.max_sge;
  if (wq) registry.cannot_move(kWq);
  return wq;
}

int destroy_wq(ibv_wq* wq) {
  const int err = slots_of(wq->context).destroy_wq(wq);
  if (!err) count_unsupported(kWq, -1);
  return err;
}

/// What a provider keeps in them, a doorbell page or the program's own allocator, is in no record.
ibv_td* alloc_td(ibv_context* ctx, ibv_td_init_attr* attr) {
  ibv_td* td = slots_of(ctx).alloc_td(ctx, attr);
  if (td) count_unsupported(kTd, 1);
  return td;
}

int dealloc_td(ibv_td* td) {
  const int err = slots_of(td->context).dealloc_td(td);
  if (!err) count_unsupported(kTd, -1);
  return err;
}

/// The kernel's record has it only where it was made, and not where it is opened again (one of a file that another process has
/// opened). Nor does it have the target QPs that are made in it; each of them holds it, so it cannot be closed before them.
ibv_xrcd* open_xrcd(ibv_context* ctx, ibv_xrcd_init_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context& context = *registry.context_of(ctx);
  ibv_xrcd* xrcd = context.slots.open_xrcd(ctx, attr);
  if (xrcd) registry.cannot_move(kXrcd), ++context.xrcds;
  return xrcd;
}

int close_xrcd(ibv_xrcd* xrcd) {
  const ibv_context* const ctx = xrcd->context;
  const int err = slots_of(ctx).close_xrcd(xrcd);
  if (err) return err;
  Registry& registry = Registry::get();
  auto guard = registry.change();
  registry.cannot_move(kXrcd, -1);
  --registry.context_of(ctx)->xrcds;
  return 0;
}

/// Ends with ibv_dealloc_pd(), as every PD.
ibv_pd* alloc_parent_domain(ibv_context* ctx, ibv_parent_domain_init_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  ibv_pd* pd = registry.context_of(ctx)->slots.alloc_parent_domain(ctx, attr);
  if (!pd) return nullptr;
  registry.parent_domains.push_back(pd);
  registry.cannot_move(kParentDomain);
  return pd;
}

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  return windows::allocate(*registry.context_of(pd->context), pd, type);
}

int dealloc_mw(ibv_mw* mw) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  return windows::deallocate(*registry.context_of(mw->context), mw);
}

}  // namespace

void xrc_domains_gone(Registry& registry, const Context& context) {
  if (context.xrcds) registry.cannot_move(kXrcd, -static_cast<int>(context.xrcds));
}

void parent_domain_gone(Registry& registry, const ibv_pd* pd) {
  if (std::erase(registry.parent_domains, pd)) registry.cannot_move(kParentDomain, -1);
}

void install_slots(Context& context, ibv_context& ctx) {
  if (ctx.ops.alloc_mw) ctx.ops.alloc_mw = alloc_mw;
  if (ctx.ops.dealloc_mw) ctx.ops.dealloc_mw = dealloc_mw;
  MIGR_TAKE_SLOT(context, ctx, open_qp);
  MIGR_TAKE_SLOT(context, ctx, alloc_null_mr);
  MIGR_TAKE_SLOT(context, ctx, reg_dm_mr);
  MIGR_TAKE_SLOT(context, ctx, advise_mr);
  MIGR_TAKE_SLOT(context, ctx, modify_cq);
  MIGR_TAKE_SLOT(context, ctx, modify_qp_rate_limit);
  MIGR_TAKE_SLOT(context, ctx, create_wq);
  MIGR_TAKE_SLOT(context, ctx, destroy_wq);
  MIGR_TAKE_SLOT(context, ctx, alloc_td);
  MIGR_TAKE_SLOT(context, ctx, dealloc_td);
  MIGR_TAKE_SLOT(context, ctx, alloc_parent_domain);
  MIGR_TAKE_SLOT(context, ctx, open_xrcd);
  MIGR_TAKE_SLOT(context, ctx, close_xrcd);
  if (verbs_context* extended = verbs_get_ctx_op(&ctx, ibv_create_flow)) {
    context.slots.ibv_create_flow = extended->ibv_create_flow;
    extended->ibv_create_flow = create_flow;
  }
  if (verbs_context* extended = verbs_get_ctx_op(&ctx, ibv_destroy_flow)) {
    context.slots.ibv_destroy_flow = extended->ibv_destroy_flow;
    extended->ibv_destroy_flow = destroy_flow;
  }
}

}  // namespace migr
