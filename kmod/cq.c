// SPDX-License-Identifier: GPL-2.0
/* Completion queues. */
#include "compat.h"
#include "migr_trace.h"

static int create_cq(struct ib_cq *cq, const struct ib_cq_init_attr *attr, migr_cq_arg_t arg)
{
	struct ib_udata *udata = migr_arg_udata(arg);
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(cq->device, &idx);
	if (udata) {
		obj = migr_obj_alloc(MIGR_OBJ_CQ);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
	}
	err = md->orig.create_cq(cq, attr, arg);
	if (!obj)
		goto out_leave;
	if (!err) {
		obj->rec.cq.cqe = attr->cqe;
		obj->rec.cq.comp_vector = attr->comp_vector;
		obj->rec.cq.flags = attr->flags;
		obj->channel_key = cq->cq_context;
		migr_obj_take_resp(obj, udata);
		err = migr_obj_add(obj, cq, migr_uctx_of(udata));
		if (err)
			md->orig.destroy_cq(cq, udata);
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return err;
}

/* The driver answers with a new ring to map. */
static int resize_cq(struct ib_cq *cq, int cqe, struct ib_udata *udata)
{
	struct migr_obj *answer = NULL, *obj;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(cq->device, &idx);
	err = md->orig.resize_cq(cq, cqe, udata);
	if (err || !udata || !migr_obj_is_ours(cq, MIGR_OBJ_CQ))
		goto out_leave;
	answer = migr_obj_alloc(MIGR_OBJ_CQ);	/* only to carry it; without, the old one stays */
	if (answer)
		migr_obj_take_resp(answer, udata);
	mutex_lock(&migr_lock);
	obj = migr_obj_find_locked(cq, MIGR_OBJ_CQ);
	if (obj) {
		obj->rec.cq.cqe = cqe;
		obj->ctx->gen++;
		if (answer && answer->resp_len) {
			swap(obj->resp, answer->resp);
			swap(obj->resp_len, answer->resp_len);
		}
		trace_migr_cq_resize(obj, migr_handle(cq->uobject));
	}
	mutex_unlock(&migr_lock);
	if (answer)
		migr_obj_free(answer);
out_leave:
	migr_leave(md, idx);
	return err;
}

static int destroy_cq(struct ib_cq *cq, struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(cq->device, &idx);
	obj = migr_obj_begin_destroy(cq, MIGR_OBJ_CQ);
	err = md->orig.destroy_cq(cq, udata);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

const struct ib_device_ops migr_cq_ops = {
	.create_cq = create_cq,
	.resize_cq = resize_cq,
	.destroy_cq = destroy_cq,
};
