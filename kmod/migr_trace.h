/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tracepoints (system "migr"): what is recorded, and who has which name. Each
 * is told once it is so; a call that failed is in none of them.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM migr

#if !defined(MIGR_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define MIGR_TRACE_H

#include <linux/tracepoint.h>

#include "migr.h"

#define MIGR_TRACE_TYPES(X)						\
	X(MIGR_OBJ_PD, "PD") X(MIGR_OBJ_MR, "MR") X(MIGR_OBJ_CQ, "CQ")	\
	X(MIGR_OBJ_QP, "QP") X(MIGR_OBJ_SRQ, "SRQ") X(MIGR_OBJ_MW, "MW")	\
	X(MIGR_OBJ_AH, "AH") X(MIGR_OBJ_XRCD, "XRCD") X(MIGR_OBJ_DM, "DM")
#define MIGR_TRACE_STATES(X)						\
	X(IB_QPS_RESET, "RESET") X(IB_QPS_INIT, "INIT") X(IB_QPS_RTR, "RTR")	\
	X(IB_QPS_RTS, "RTS") X(IB_QPS_SQD, "SQD") X(IB_QPS_SQE, "SQE")	\
	X(IB_QPS_ERR, "ERR")
#define MIGR_TRACE_DEFINE(value, name) TRACE_DEFINE_ENUM(value);
#define MIGR_TRACE_NAME(value, name) { value, name },

MIGR_TRACE_TYPES(MIGR_TRACE_DEFINE)
MIGR_TRACE_STATES(MIGR_TRACE_DEFINE)

DECLARE_EVENT_CLASS(migr_ctx,
	TP_PROTO(const struct migr_ctx *ctx),
	TP_ARGS(ctx),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(pid_t, owner)
		__array(char, device, MIGR_IBDEV_NAME_MAX)
		__array(char, comm, TASK_COMM_LEN)
	),
	TP_fast_assign(
		__entry->ctx = ctx->id;
		__entry->owner = migr_owner_locked(ctx, &init_pid_ns);
		memcpy(__entry->device, ctx->ibdev_name, MIGR_IBDEV_NAME_MAX);
		memcpy(__entry->comm, ctx->comm, TASK_COMM_LEN);
	),
	TP_printk("ctx=%u owner=%d comm=%s device=%s", __entry->ctx, __entry->owner,
		  __entry->comm, __entry->device)
);

DEFINE_EVENT(migr_ctx, migr_ctx_new, TP_PROTO(const struct migr_ctx *ctx), TP_ARGS(ctx));
DEFINE_EVENT(migr_ctx, migr_ctx_attach, TP_PROTO(const struct migr_ctx *ctx), TP_ARGS(ctx));
DEFINE_EVENT(migr_ctx, migr_ctx_gone, TP_PROTO(const struct migr_ctx *ctx), TP_ARGS(ctx));

/* number: the QPN of a QP, the lkey of an MR; else 0 */
DECLARE_EVENT_CLASS(migr_obj,
	TP_PROTO(const struct migr_obj *obj),
	TP_ARGS(obj),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, type)
		__field(u32, number)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->type = obj->type;
		__entry->number = obj->type == MIGR_OBJ_QP ? obj->rec.qp.pqpn :
				  obj->type == MIGR_OBJ_MR ? obj->rec.mr.plkey : 0;
	),
	TP_printk("ctx=%u type=%s number=%#x", __entry->ctx,
		  __print_symbolic(__entry->type, MIGR_TRACE_TYPES(MIGR_TRACE_NAME) { 0, "?" }),
		  __entry->number)
);

DEFINE_EVENT(migr_obj, migr_obj_new, TP_PROTO(const struct migr_obj *obj), TP_ARGS(obj));
DEFINE_EVENT(migr_obj, migr_obj_gone, TP_PROTO(const struct migr_obj *obj), TP_ARGS(obj));

TRACE_EVENT(migr_qp_state,
	TP_PROTO(const struct migr_obj *obj),
	TP_ARGS(obj),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, vqpn)
		__field(u32, pqpn)
		__field(u32, state)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->vqpn = obj->rec.qp.vqpn;
		__entry->pqpn = obj->rec.qp.pqpn;
		__entry->state = obj->rec.qp.qp_state;
	),
	TP_printk("ctx=%u vqpn=%#x pqpn=%#x state=%s", __entry->ctx, __entry->vqpn, __entry->pqpn,
		  __print_symbolic(__entry->state, MIGR_TRACE_STATES(MIGR_TRACE_NAME) { ~0u, "?" }))
);

TRACE_EVENT(migr_qp_bind,
	TP_PROTO(const struct migr_obj *obj),
	TP_ARGS(obj),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, vqpn)
		__field(u32, pqpn)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->vqpn = obj->rec.qp.vqpn;
		__entry->pqpn = obj->rec.qp.pqpn;
	),
	TP_printk("ctx=%u vqpn=%#x pqpn=%#x", __entry->ctx, __entry->vqpn, __entry->pqpn)
);

TRACE_EVENT(migr_mr_bind,
	TP_PROTO(const struct migr_obj *obj),
	TP_ARGS(obj),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, vlkey)
		__field(u32, vrkey)
		__field(u32, plkey)
		__field(u32, prkey)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->vlkey = obj->rec.mr.vlkey;
		__entry->vrkey = obj->rec.mr.vrkey;
		__entry->plkey = obj->rec.mr.plkey;
		__entry->prkey = obj->rec.mr.prkey;
	),
	TP_printk("ctx=%u vlkey=%#x vrkey=%#x plkey=%#x prkey=%#x", __entry->ctx, __entry->vlkey,
		  __entry->vrkey, __entry->plkey, __entry->prkey)
);

/* Changed in place; one that the driver has replaced is told as a new one, and the old one as gone. */
TRACE_EVENT(migr_mr_rereg,
	TP_PROTO(const struct migr_obj *obj),
	TP_ARGS(obj),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, plkey)
		__field(u32, prkey)
		__field(u32, access)
		__field(u64, start)
		__field(u64, length)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->plkey = obj->rec.mr.plkey;
		__entry->prkey = obj->rec.mr.prkey;
		__entry->access = obj->rec.mr.access;
		__entry->start = obj->rec.mr.start;
		__entry->length = obj->rec.mr.length;
	),
	TP_printk("ctx=%u plkey=%#x prkey=%#x start=%#llx length=%llu access=%#x", __entry->ctx,
		  __entry->plkey, __entry->prkey, __entry->start, __entry->length, __entry->access)
);

TRACE_EVENT(migr_cq_resize,
	TP_PROTO(const struct migr_obj *obj, u32 handle),
	TP_ARGS(obj, handle),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, handle)
		__field(u32, cqe)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->handle = handle;
		__entry->cqe = obj->rec.cq.cqe;
	),
	TP_printk("ctx=%u handle=%u cqe=%u", __entry->ctx, __entry->handle, __entry->cqe)
);

TRACE_EVENT(migr_srq_modify,
	TP_PROTO(const struct migr_obj *obj, u32 handle),
	TP_ARGS(obj, handle),
	TP_STRUCT__entry(
		__field(u32, ctx)
		__field(u32, handle)
		__field(u32, max_wr)
		__field(u32, limit)
	),
	TP_fast_assign(
		__entry->ctx = obj->ctx->id;
		__entry->handle = handle;
		__entry->max_wr = obj->rec.srq.max_wr;
		__entry->limit = obj->rec.srq.srq_limit;
	),
	TP_printk("ctx=%u handle=%u max_wr=%u limit=%u", __entry->ctx, __entry->handle,
		  __entry->max_wr, __entry->limit)
);

/* A number that was born here and lives elsewhere is kept free, and given back. */
DECLARE_EVENT_CLASS(migr_qpn,
	TP_PROTO(u32 vqpn),
	TP_ARGS(vqpn),
	TP_STRUCT__entry(
		__field(u32, vqpn)
	),
	TP_fast_assign(
		__entry->vqpn = vqpn;
	),
	TP_printk("vqpn=%#x", __entry->vqpn)
);

DEFINE_EVENT(migr_qpn, migr_qpn_reserve, TP_PROTO(u32 vqpn), TP_ARGS(vqpn));
DEFINE_EVENT(migr_qpn, migr_qpn_release, TP_PROTO(u32 vqpn), TP_ARGS(vqpn));

#endif

#undef TRACE_INCLUDE_PATH
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_PATH .
#define TRACE_INCLUDE_FILE migr_trace
#include <trace/define_trace.h>
