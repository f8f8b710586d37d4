// SPDX-License-Identifier: GPL-2.0
/* Queue pairs. */
#include <rdma/ib_cache.h>

#include "migr_trace.h"

static void record_create(struct migr_qp_rec *rec, const struct ib_qp *qp,
			  const struct ib_qp_init_attr *attr)
{
	const struct ib_uobject *uobject = (const struct ib_uobject *)qp->uobject;

	rec->pqpn = qp->qp_num & MIGR_QPN_MASK;
	rec->pd_handle = qp->pd ? migr_handle(qp->pd->uobject) : MIGR_NO_HANDLE;
	rec->send_cq_handle = attr->send_cq ? migr_handle(attr->send_cq->uobject) : MIGR_NO_HANDLE;
	rec->recv_cq_handle = attr->recv_cq ? migr_handle(attr->recv_cq->uobject) : MIGR_NO_HANDLE;
	rec->srq_handle = attr->srq ? migr_handle(attr->srq->uobject) : MIGR_NO_HANDLE;
	rec->qp_type = attr->qp_type;
	rec->user_handle = uobject ? uobject->user_handle : 0;
	rec->sq_sig_all = attr->sq_sig_type == IB_SIGNAL_ALL_WR;
	rec->create_flags = attr->create_flags;
	rec->qp_state = IB_QPS_RESET;
}

/* The driver may write what it gives into what was asked for. */
static void record_cap(struct migr_qp_rec *rec, const struct ib_qp_cap *cap)
{
	rec->max_send_wr = cap->max_send_wr;
	rec->max_recv_wr = cap->max_recv_wr;
	rec->max_send_sge = cap->max_send_sge;
	rec->max_recv_sge = cap->max_recv_sge;
	rec->max_inline_data = cap->max_inline_data;
}

static int create_qp(struct ib_qp *qp, struct ib_qp_init_attr *attr, struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(qp->device, &idx);
	if (udata) {
		obj = migr_obj_alloc(MIGR_OBJ_QP);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
		record_cap(&obj->rec.qp, &attr->cap);
	}
	err = md->orig.create_qp(qp, attr, udata);
	if (!obj)
		goto out_leave;
	if (!err) {
		record_create(&obj->rec.qp, qp, attr);
		migr_obj_take_resp(obj, udata);
		err = migr_obj_add(obj, qp, migr_uctx_of(udata));
		if (err)
			md->orig.destroy_qp(qp, udata);
	}
	if (err)
		migr_obj_free(obj);
	else
		migr_event(MIGR_EV_QP_NEW, obj->ctx, obj->rec.qp.vqpn, obj->rec.qp.pqpn);
out_leave:
	migr_leave(md, idx);
	return err;
}

static void record_ah(struct migr_ah_attr *rec, const struct rdma_ah_attr *ah)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(ah);

	memset(rec, 0, sizeof(*rec));
	rec->sl = rdma_ah_get_sl(ah);
	rec->static_rate = rdma_ah_get_static_rate(ah);
	rec->port_num = rdma_ah_get_port_num(ah);
	rec->src_path_bits = rdma_ah_get_path_bits(ah);
	rec->dlid = rdma_ah_get_dlid(ah);
	if (ah->type == RDMA_AH_ATTR_TYPE_ROCE)
		memcpy(rec->dmac, ah->roce.dmac, sizeof(rec->dmac));
	if (!(rdma_ah_get_ah_flags(ah) & IB_AH_GRH))
		return;
	rec->is_global = 1;
	memcpy(rec->dgid, grh->dgid.raw, sizeof(rec->dgid));
	rec->flow_label = grh->flow_label;
	rec->sgid_index = grh->sgid_index;
	rec->hop_limit = grh->hop_limit;
	rec->traffic_class = grh->traffic_class;
	if (grh->sgid_attr) {
		memcpy(rec->sgid, grh->sgid_attr->gid.raw, sizeof(rec->sgid));
		rec->gid_type = grh->sgid_attr->gid_type;
	}
}

static void record_modify(struct migr_obj *obj, const struct ib_qp_attr *attr, int mask)
{
	struct migr_qp_rec *rec = &obj->rec.qp;

	if (mask & IB_QP_STATE) {
		rec->qp_state = attr->qp_state;
		if (attr->qp_state == IB_QPS_RESET)
			rec->attr_mask = 0;
	}
	rec->attr_mask |= mask;
	obj->ever_given |= mask;
#define NOTE(bit, field, value)						\
	if (mask & (bit))						\
		rec->field = attr->value
	NOTE(IB_QP_PATH_MTU, path_mtu, path_mtu);
	NOTE(IB_QP_QKEY, qkey, qkey);
	NOTE(IB_QP_RQ_PSN, rq_psn, rq_psn);
	NOTE(IB_QP_SQ_PSN, sq_psn, sq_psn);
	NOTE(IB_QP_DEST_QPN, dest_qpn, dest_qp_num);
	NOTE(IB_QP_ACCESS_FLAGS, access_flags, qp_access_flags);
	NOTE(IB_QP_PKEY_INDEX, pkey_index, pkey_index);
	NOTE(IB_QP_PORT, port_num, port_num);
	NOTE(IB_QP_TIMEOUT, timeout, timeout);
	NOTE(IB_QP_RETRY_CNT, retry_cnt, retry_cnt);
	NOTE(IB_QP_RNR_RETRY, rnr_retry, rnr_retry);
	NOTE(IB_QP_MIN_RNR_TIMER, min_rnr_timer, min_rnr_timer);
	NOTE(IB_QP_MAX_QP_RD_ATOMIC, max_rd_atomic, max_rd_atomic);
	NOTE(IB_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic, max_dest_rd_atomic);
#undef NOTE
	if (mask & IB_QP_AV)
		record_ah(&rec->ah, &attr->ah_attr);
}

static int modify_qp(struct ib_qp *qp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata)
{
	struct migr_ctx *ctx = NULL;
	struct migr_dev *md;
	struct migr_obj *obj;
	u32 vqpn = 0, pqpn = 0;
	int idx, err;

	md = migr_enter(qp->device, &idx);
	err = md->orig.modify_qp(qp, attr, mask, udata);
	if (err || !migr_obj_is_ours(qp, MIGR_OBJ_QP))
		goto out_leave;
	mutex_lock(&migr_lock);
	obj = migr_obj_find_locked(qp, MIGR_OBJ_QP);
	if (obj) {
		record_modify(obj, attr, mask);
		obj->ctx->gen++;
		if (mask & IB_QP_STATE) {
			trace_migr_qp_state(obj);
			ctx = obj->ctx;
			kref_get(&ctx->ref);
			vqpn = obj->rec.qp.vqpn;
			pqpn = obj->rec.qp.pqpn;
		}
	}
	mutex_unlock(&migr_lock);
	if (ctx) {
		migr_event(MIGR_EV_QP_STATE, ctx, vqpn, pqpn);
		migr_ctx_put(ctx);
	}
out_leave:
	migr_leave(md, idx);
	return err;
}

static int destroy_qp(struct ib_qp *qp, struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(qp->device, &idx);
	obj = migr_obj_begin_destroy(qp, MIGR_OBJ_QP);
	err = md->orig.destroy_qp(qp, udata);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

const struct ib_device_ops migr_qp_ops = {
	.create_qp = create_qp,
	.modify_qp = modify_qp,
	.destroy_qp = destroy_qp,
};
