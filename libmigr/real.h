/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The functions that we stand in front of, found once: real().create_qp is
 * libibverbs' ibv_create_qp. Everything inside the library calls these, never
 * the exported names.
 */
#ifndef MIGR_REAL_H
#define MIGR_REAL_H

#include <infiniband/verbs.h>
#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_query_port

// clang-format off
#define MIGR_REAL_VERBS(X)                                              \
  X(get_device_list, "IBVERBS_1.1") X(free_device_list, "IBVERBS_1.1")  \
  X(query_port, "IBVERBS_1.1")     X(query_gid, "IBVERBS_1.1")          \
  X(open_device, "IBVERBS_1.1")    X(close_device, "IBVERBS_1.1")       \
  X(alloc_pd, "IBVERBS_1.1")       X(dealloc_pd, "IBVERBS_1.1")         \
  X(reg_mr, "IBVERBS_1.1")         X(reg_mr_iova, "IBVERBS_1.7")        \
  X(reg_mr_iova2, "IBVERBS_1.8")   X(reg_dmabuf_mr, "IBVERBS_1.12")     \
  X(rereg_mr, "IBVERBS_1.1")       X(dereg_mr, "IBVERBS_1.1")           \
  X(import_mr, "IBVERBS_1.10")     X(unimport_mr, "IBVERBS_1.10")       \
  X(create_comp_channel, "IBVERBS_1.0") X(destroy_comp_channel, "IBVERBS_1.0") \
  X(create_cq, "IBVERBS_1.1")      X(resize_cq, "IBVERBS_1.1")          \
  X(destroy_cq, "IBVERBS_1.1")     X(get_cq_event, "IBVERBS_1.1")       \
  X(ack_cq_events, "IBVERBS_1.1")                                       \
  X(create_qp, "IBVERBS_1.1")      X(modify_qp, "IBVERBS_1.1")          \
  X(query_qp, "IBVERBS_1.1")       X(destroy_qp, "IBVERBS_1.1")         \
  X(qp_to_qp_ex, "IBVERBS_1.6")    X(query_qp_data_in_order, "IBVERBS_1.14") \
  X(query_ece, "IBVERBS_1.10")     X(set_ece, "IBVERBS_1.10")           \
  X(create_srq, "IBVERBS_1.1")     X(destroy_srq, "IBVERBS_1.1")        \
  X(modify_srq, "IBVERBS_1.1")     X(query_srq, "IBVERBS_1.1")          \
  X(create_ah, "IBVERBS_1.1")      X(destroy_ah, "IBVERBS_1.1")         \
  X(init_ah_from_wc, "IBVERBS_1.1")                                     \
  X(attach_mcast, "IBVERBS_1.1")   X(detach_mcast, "IBVERBS_1.1")       \
  X(get_async_event, "IBVERBS_1.1") X(ack_async_event, "IBVERBS_1.1")
// clang-format on

namespace migr {

struct Real {
#define MIGR_REAL_MEMBER(name, version) decltype(&::ibv_##name) name;
  MIGR_REAL_VERBS(MIGR_REAL_MEMBER)
#undef MIGR_REAL_MEMBER
};

/// Their names begin with an underscore. Null: libibverbs lacks it.
decltype(&::_ibv_query_gid_table) real_query_gid_table();
decltype(&::_ibv_query_gid_ex) real_query_gid_ex();

/// What real() leads to for open_device, if it was asked before; null: it was not, and which libibverbs it will be is open.
decltype(Real::open_device) open_device_if_found();

/// Thread-safe; ends the process with a message if libibverbs is not there at all (we are only called through it).
const Real& real();

}  // namespace migr

#endif
