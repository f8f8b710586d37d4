/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The NIC families' own calls (mlx5dv, mlx4dv, efadv, manadv, hnsdv) that take objects of verbs: given the provider's, they work as
 * they do without libmigr. A program that drives queues itself cannot be migrated; DESCRIBE says so by name.
 * Their libraries need not be there: nothing here is called then.
 */
#include <dlfcn.h>
#include <infiniband/efadv.h>
#include <infiniband/manadv.h>
#include <infiniband/mlx4dv.h>
#include <infiniband/mlx5dv.h>

#include <cerrno>
#include <cstring>
#include <type_traits>
#include <vector>

#include "objects.h"

// Of a newer rdma-core.
struct hnsdv_qp_init_attr;
struct efadv_wq_attr;
struct efadv_cq_attr;
extern "C" {
ibv_qp* hnsdv_create_qp(ibv_context*, ibv_qp_init_attr_ex*, hnsdv_qp_init_attr*);
int efadv_query_qp_wqs(ibv_qp*, efadv_wq_attr*, efadv_wq_attr*, uint32_t);
int efadv_query_cq(ibv_cq*, efadv_cq_attr*, uint32_t);
}

namespace migr {
namespace {

/// The library's own function. Null: there is none.
template <class Function>
Function* next(Function*, const char* name, const char* library) {
  void* symbol = dlsym(RTLD_NEXT, name);
  if (!symbol)  // came by dlopen(RTLD_LOCAL)
    if (void* handle = dlopen(library, RTLD_NOLOAD | RTLD_NOW)) symbol = dlsym(handle, name);
  return reinterpret_cast<Function*>(symbol);
}

/// Caller holds the Registry's lock. Null: not one of ours.
template <class Shadow>
Shadow* find(const std::vector<Shadow*>& all, const void* object) {
  for (Shadow* shadow : all)
    if (shadow == object) return shadow;
  return nullptr;
}

/// The provider's object behind one of ours; any other as it is.
template <class Object, class Shadow>
Object* behind(Object* object, std::vector<Shadow*> Registry::*all, Object* Shadow::*real) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Shadow* shadow = find(registry.*all, object);
  return shadow ? shadow->*real : object;
}
ibv_qp* behind(ibv_qp* qp) { return behind(qp, &Registry::qps, &QpShadow::real); }
ibv_cq* behind(ibv_cq* cq) { return behind(cq, &Registry::cqs, &CqShadow::real); }
ibv_srq* behind(ibv_srq* srq) { return behind(srq, &Registry::srqs, &SrqShadow::real); }
ibv_qp_ex* behind(ibv_qp_ex* qp) { return behind(qp, &Registry::qps, &QpShadow::real_ex); }
ibv_cq_ex* behind(ibv_cq_ex* cq) { return behind(cq, &Registry::cqs, &CqShadow::real_ex); }

template <class Object, class Shadow>
Object* of_family(Object* object, std::vector<Shadow*> Registry::*all, const char* made_by) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  if (Shadow* shadow = find(registry.*all, object)) shadow->immovable = made_by;
  return object;
}
/// A new object of this family's own kind. The family's wr_* calls (mlx5dv_wr_memcpy..) read wr_id and wr_flags from the
/// provider's ibv_qp_ex: ibv_qp_to_qp_ex() gives that of such a QP.
ibv_qp* of_family(ibv_qp* qp, const char* made_by) { return of_family(qp, &Registry::qps, made_by); }
ibv_cq_ex* of_family(ibv_cq_ex* cq, const char* made_by) { return of_family(cq, &Registry::cqs, made_by); }

void cannot_move(const char* what) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  registry.cannot_move(what);
}

/// Without the library: what the function says if it cannot.
template <class Result>
Result not_there() {
  errno = EOPNOTSUPP;
  if constexpr (std::is_pointer_v<Result>)
    return nullptr;
  else
    return EOPNOTSUPP;
}

constexpr char kOwnQueue[] = "queue that the program drives itself (mlx5dv_init_obj or the like)";
constexpr char kMlx5[] = "libmlx5.so.1";
constexpr char kMlx4[] = "libmlx4.so.1";
constexpr char kEfa[] = "libefa.so.1";
constexpr char kMana[] = "libmana.so.1";
constexpr char kHns[] = "libhns.so.1";

}  // namespace
}  // namespace migr

using namespace migr;

/// `real`: the function `name` of `library`. Ends the caller if there is none.
#define MIGR_NEXT(result, name, library)                          \
  static auto* const real_##name = next(&::name, #name, library); \
  if (!real_##name) return not_there<result>()

// Calls that only name objects: the first argument, or none of those after it, needs to be looked behind.
#define MIGR_BEHIND(result, name, library, params, ...) \
  MIGR_EXPORT result name params {                      \
    MIGR_NEXT(result, name, library);                   \
    return real_##name(__VA_ARGS__);                    \
  }

MIGR_BEHIND(int, mlx5dv_query_qp_lag_port, kMlx5, (ibv_qp * qp, uint8_t* port, uint8_t* active), behind(qp), port, active)
MIGR_BEHIND(int, mlx5dv_modify_qp_lag_port, kMlx5, (ibv_qp * qp, uint8_t port), behind(qp), port)
MIGR_BEHIND(int, mlx5dv_modify_qp_udp_sport, kMlx5, (ibv_qp * qp, uint16_t sport), behind(qp), sport)
MIGR_BEHIND(int, mlx5dv_dci_stream_id_reset, kMlx5, (ibv_qp * qp, uint16_t id), behind(qp), id)
MIGR_BEHIND(int, mlx5dv_modify_qp_sched_elem, kMlx5,
            (ibv_qp * qp, const mlx5dv_sched_leaf* requestor, const mlx5dv_sched_leaf* responder), behind(qp), requestor,
            responder)
MIGR_BEHIND(mlx5dv_qp_ex*, mlx5dv_qp_ex_from_ibv_qp_ex, kMlx5, (ibv_qp_ex * qp), behind(qp))
MIGR_BEHIND(mlx5dv_dr_action*, mlx5dv_dr_action_create_dest_ibv_qp, kMlx5, (ibv_qp * qp), behind(qp))
#define MIGR_DEVX(kind)                                                                                                 \
  MIGR_BEHIND(int, mlx5dv_devx_##kind##_query, kMlx5,                                                                   \
              (ibv_##kind * object, const void* in, size_t inlen, void* out, size_t outlen), behind(object), in, inlen, \
              out, outlen)                                                                                              \
  MIGR_BEHIND(int, mlx5dv_devx_##kind##_modify, kMlx5,                                                                  \
              (ibv_##kind * object, const void* in, size_t inlen, void* out, size_t outlen), behind(object), in, inlen, \
              out, outlen)
MIGR_DEVX(qp)
MIGR_DEVX(cq)
MIGR_DEVX(srq)
MIGR_BEHIND(efadv_cq*, efadv_cq_from_ibv_cq_ex, kEfa, (ibv_cq_ex * cq), behind(cq))

// Raw queues: what is asked for is described with the provider's objects, whose addresses the answer does not hold.
template <class Obj, class Real>
static int init_obj(Real* real, Obj* obj, uint64_t kinds, bool has_srq) {
  Obj mine = *obj;
  if (kinds & MLX5DV_OBJ_QP) mine.qp.in = behind(obj->qp.in);  // the bits are the same in all families
  if (kinds & MLX5DV_OBJ_CQ) mine.cq.in = behind(obj->cq.in);
  if constexpr (requires { mine.srq; })
    if (has_srq && (kinds & MLX5DV_OBJ_SRQ)) mine.srq.in = behind(obj->srq.in);
  const int err = real(&mine, kinds);
  if (!err) cannot_move(kOwnQueue);
  return err;
}
static_assert(int{MLX4DV_OBJ_QP} == int{MLX5DV_OBJ_QP} && int{MLX4DV_OBJ_CQ} == int{MLX5DV_OBJ_CQ} &&
              int{MLX4DV_OBJ_SRQ} == int{MLX5DV_OBJ_SRQ} && int{MANADV_OBJ_QP} == int{MLX5DV_OBJ_QP} &&
              int{MANADV_OBJ_CQ} == int{MLX5DV_OBJ_CQ});

MIGR_EXPORT int mlx5dv_init_obj(mlx5dv_obj* obj, uint64_t kinds) {
  MIGR_NEXT(int, mlx5dv_init_obj, kMlx5);
  return init_obj(real_mlx5dv_init_obj, obj, kinds, true);
}
MIGR_EXPORT int mlx4dv_init_obj(mlx4dv_obj* obj, uint64_t kinds) {
  MIGR_NEXT(int, mlx4dv_init_obj, kMlx4);
  return init_obj(real_mlx4dv_init_obj, obj, kinds, true);
}
MIGR_EXPORT int manadv_init_obj(manadv_obj* obj, uint64_t kinds) {
  MIGR_NEXT(int, manadv_init_obj, kMana);
  return init_obj(real_manadv_init_obj, obj, kinds, false);
}

MIGR_EXPORT int efadv_query_qp_wqs(ibv_qp* qp, efadv_wq_attr* sends, efadv_wq_attr* receives, uint32_t length) {
  MIGR_NEXT(int, efadv_query_qp_wqs, kEfa);
  const int err = real_efadv_query_qp_wqs(behind(qp), sends, receives, length);
  if (!err) cannot_move(kOwnQueue);
  return err;
}
MIGR_EXPORT int efadv_query_cq(ibv_cq* cq, efadv_cq_attr* attr, uint32_t length) {
  MIGR_NEXT(int, efadv_query_cq, kEfa);
  const int err = real_efadv_query_cq(behind(cq), attr, length);
  if (!err) cannot_move(kOwnQueue);
  return err;
}

// Objects made with attributes of the family: they have shadows, and cannot be made again.
MIGR_EXPORT ibv_qp* mlx5dv_create_qp(ibv_context* ctx, ibv_qp_init_attr_ex* attr, mlx5dv_qp_init_attr* own) {
  MIGR_NEXT(ibv_qp*, mlx5dv_create_qp, kMlx5);
  return of_family(create_qp_with(ctx, *attr, [&](auto* mine) { return real_mlx5dv_create_qp(ctx, mine, own); }),
                   "mlx5dv_create_qp");
}
MIGR_EXPORT ibv_qp* mlx4dv_create_qp(ibv_context* ctx, ibv_qp_init_attr_ex* attr, mlx4dv_qp_init_attr* own) {
  MIGR_NEXT(ibv_qp*, mlx4dv_create_qp, kMlx4);
  return of_family(create_qp_with(ctx, *attr, [&](auto* mine) { return real_mlx4dv_create_qp(ctx, mine, own); }),
                   "mlx4dv_create_qp");
}
MIGR_EXPORT ibv_qp* hnsdv_create_qp(ibv_context* ctx, ibv_qp_init_attr_ex* attr, hnsdv_qp_init_attr* own) {
  MIGR_NEXT(ibv_qp*, hnsdv_create_qp, kHns);
  return of_family(create_qp_with(ctx, *attr, [&](auto* mine) { return real_hnsdv_create_qp(ctx, mine, own); }),
                   "hnsdv_create_qp");
}
MIGR_EXPORT ibv_qp* efadv_create_qp_ex(ibv_context* ctx, ibv_qp_init_attr_ex* attr, efadv_qp_init_attr* own,
                                       uint32_t length) {
  MIGR_NEXT(ibv_qp*, efadv_create_qp_ex, kEfa);
  return of_family(create_qp_with(ctx, *attr, [&](auto* mine) { return real_efadv_create_qp_ex(ctx, mine, own, length); }),
                   "efadv_create_qp_ex");
}
MIGR_EXPORT ibv_qp* efadv_create_driver_qp(ibv_pd* pd, ibv_qp_init_attr* attr, uint32_t type) {
  MIGR_NEXT(ibv_qp*, efadv_create_driver_qp, kEfa);
  ibv_qp_init_attr_ex ex{};
  std::memcpy(&ex, attr, sizeof *attr);  // the common first members, as verbs.h promises
  ibv_qp* qp = create_qp_with(pd->context, ex, [&](ibv_qp_init_attr_ex* mine) {
    ibv_qp_init_attr plain;
    std::memcpy(&plain, mine, sizeof plain);
    ibv_qp* made = real_efadv_create_driver_qp(pd, &plain, type);
    mine->cap = plain.cap;
    return made;
  });
  attr->cap = ex.cap;
  return of_family(qp, "efadv_create_driver_qp");
}
MIGR_EXPORT ibv_cq_ex* mlx5dv_create_cq(ibv_context* ctx, ibv_cq_init_attr_ex* attr, mlx5dv_cq_init_attr* own) {
  MIGR_NEXT(ibv_cq_ex*, mlx5dv_create_cq, kMlx5);
  return of_family(create_cq_with(ctx, *attr, [&](auto* mine) { return real_mlx5dv_create_cq(ctx, mine, own); }),
                   "mlx5dv_create_cq");
}
MIGR_EXPORT ibv_cq_ex* efadv_create_cq(ibv_context* ctx, ibv_cq_init_attr_ex* attr, efadv_cq_init_attr* own,
                                       uint32_t length) {
  MIGR_NEXT(ibv_cq_ex*, efadv_create_cq, kEfa);
  return of_family(create_cq_with(ctx, *attr, [&](auto* mine) { return real_efadv_create_cq(ctx, mine, own, length); }),
                   "efadv_create_cq");
}
MIGR_EXPORT ibv_wq* mlx5dv_create_wq(ibv_context* ctx, ibv_wq_init_attr* attr, mlx5dv_wq_init_attr* own) {
  MIGR_NEXT(ibv_wq*, mlx5dv_create_wq, kMlx5);
  ibv_wq_init_attr mine = *attr;
  mine.cq = behind(attr->cq);
  ibv_wq* wq = real_mlx5dv_create_wq(ctx, &mine, own);
  attr->max_wr = mine.max_wr;
  attr->max_sge = mine.max_sge;
  if (wq) cannot_move("WQ");  // as in slots.cc, which counts down
  return wq;
}
MIGR_EXPORT ibv_flow* mlx5dv_create_flow(mlx5dv_flow_matcher* matcher, mlx5dv_flow_match_parameters* value,
                                         size_t count, mlx5dv_flow_action_attr actions[]) {
  MIGR_NEXT(ibv_flow*, mlx5dv_create_flow, kMlx5);
  std::vector<mlx5dv_flow_action_attr> mine(actions, actions + count);
  for (mlx5dv_flow_action_attr& action : mine)
    if (action.type == MLX5DV_FLOW_ACTION_DEST_IBV_QP) action.qp = behind(action.qp);
  ibv_flow* flow = real_mlx5dv_create_flow(matcher, value, count, mine.data());
  if (flow) cannot_move("flow");
  return flow;
}
