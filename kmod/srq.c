// SPDX-License-Identifier: GPL-2.0
/* Shared receive queues. */
#include "migr_trace.h"

static void record_create(struct migr_srq_rec *rec, const struct ib_srq *srq,
			  const struct ib_srq_init_attr *attr)
{
	const struct ib_uobject *uobject = (const struct ib_uobject *)srq->uobject;

	rec->handle = MIGR_NO_HANDLE;
	rec->pd_handle = srq->pd ? migr_handle(srq->pd->uobject) : MIGR_NO_HANDLE;
	rec->srq_type = attr->srq_type;
	rec->user_handle = uobject ? uobject->user_handle : 0;
	rec->max_wr = attr->attr.max_wr;
	rec->max_sge = attr->attr.max_sge;
	rec->srq_limit = attr->attr.srq_limit;
	rec->cq_handle = ib_srq_has_cq(attr->srq_type) && attr->ext.cq ?
				 migr_handle(attr->ext.cq->uobject) : MIGR_NO_HANDLE;
}

static int create_srq(struct ib_srq *srq, struct ib_srq_init_attr *attr, struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(srq->device, &idx);
	if (udata) {
		obj = migr_obj_alloc(MIGR_OBJ_SRQ);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
		record_create(&obj->rec.srq, srq, attr);	/* before the driver rounds up */
	}
	err = md->orig.create_srq(srq, attr, udata);
	if (!obj)
		goto out_leave;
	if (!err) {
		if (attr->srq_type == IB_SRQT_XRC)
			obj->rec.srq.num = srq->ext.xrc.srq_num;
		migr_obj_take_resp(obj, udata);
		err = migr_obj_add(obj, srq, migr_uctx_of(udata));
		if (err)
			md->orig.destroy_srq(srq, udata);
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return err;
}

/*
 * Where the ring of a resized queue lies is told to user space in the driver's
 * own way; what was answered to create is not true any more.
 */
static int modify_srq(struct ib_srq *srq, struct ib_srq_attr *attr, enum ib_srq_attr_mask mask,
		      struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	u32 max_wr = attr->max_wr, limit = attr->srq_limit;
	int idx, err;

	md = migr_enter(srq->device, &idx);
	err = md->orig.modify_srq(srq, attr, mask, udata);
	if (err || !udata || !migr_obj_is_ours(srq, MIGR_OBJ_SRQ))
		goto out_leave;
	mutex_lock(&migr_lock);
	obj = migr_obj_find_locked(srq, MIGR_OBJ_SRQ);
	if (obj) {
		if (mask & IB_SRQ_MAX_WR) {
			obj->rec.srq.max_wr = max_wr;
			obj->rec.srq.flags |= MIGR_SRQ_RESIZED;
		}
		if (mask & IB_SRQ_LIMIT)
			obj->rec.srq.srq_limit = limit;
		obj->ctx->gen++;
		trace_migr_srq_modify(obj, migr_handle(srq->uobject));
	}
	mutex_unlock(&migr_lock);
out_leave:
	migr_leave(md, idx);
	return err;
}

static int destroy_srq(struct ib_srq *srq, struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(srq->device, &idx);
	obj = migr_obj_begin_destroy(srq, MIGR_OBJ_SRQ);
	err = md->orig.destroy_srq(srq, udata);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

const struct ib_device_ops migr_srq_ops = {
	.create_srq = create_srq,
	.modify_srq = modify_srq,
	.destroy_srq = destroy_srq,
};
