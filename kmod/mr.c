// SPDX-License-Identifier: GPL-2.0
/* Memory regions of user space. */
#include "compat.h"
#include "migr_trace.h"

/* Remembers @mr, which the driver has just made, or undoes it. */
static struct ib_mr *remember(struct migr_dev *md, struct ib_pd *pd, struct ib_mr *mr,
			      struct migr_obj *obj, struct ib_udata *udata)
{
	struct migr_mr_rec *rec = &obj->rec.mr;
	int err;

	if (IS_ERR(mr)) {
		migr_obj_free(obj);
		return mr;
	}
	mr->uobject = NULL;	/* uverbs sets it after the call, and a driver need not: mthca does not */
	rec->pd_handle = migr_handle(pd->uobject);
	rec->plkey = mr->lkey;
	rec->prkey = mr->rkey;
	err = migr_obj_add(obj, mr, migr_uctx_of(udata));
	if (!err)
		return mr;
	migr_obj_free(obj);
	/* What uverbs sets after the call, and destroying relies on. */
	mr->device = pd->device;
	mr->pd = pd;
	md->orig.dereg_mr(mr, udata);
	return ERR_PTR(err);
}

static struct migr_obj *mr_obj_alloc(u64 start, u64 length, u64 iova, int access, u32 flags)
{
	struct migr_obj *obj = migr_obj_alloc(MIGR_OBJ_MR);

	if (obj) {
		obj->rec.mr.handle = MIGR_NO_HANDLE;
		obj->rec.mr.start = start;
		obj->rec.mr.length = length;
		obj->rec.mr.iova = iova;
		obj->rec.mr.access = access;
		obj->rec.mr.flags = flags;
	}
	return obj;
}

static struct ib_mr *reg_user_mr(struct ib_pd *pd, u64 start, u64 length, u64 iova, int access,
				 struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	struct ib_mr *mr;
	int idx;

	md = migr_enter(pd->device, &idx);
	if (udata)
		obj = mr_obj_alloc(start, length, iova, access, 0);
	if (udata && !obj) {
		mr = ERR_PTR(-ENOMEM);
	} else {
		mr = md->orig.reg_user_mr(pd, start, length, iova, access, udata);
		if (obj)
			mr = remember(md, pd, mr, obj, udata);
	}
	migr_leave(md, idx);
	return mr;
}

static struct ib_mr *reg_user_mr_dmabuf(struct ib_pd *pd, u64 offset, u64 length, u64 iova,
					int fd, int access, migr_dmabuf_arg_t arg)
{
	struct ib_udata *udata = migr_arg_udata(arg);
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	struct ib_mr *mr;
	int idx;

	md = migr_enter(pd->device, &idx);
	if (udata)
		obj = mr_obj_alloc(offset, length, iova, access, MIGR_MR_DMABUF);
	if (udata && !obj) {
		mr = ERR_PTR(-ENOMEM);
	} else {
		mr = md->orig.reg_user_mr_dmabuf(pd, offset, length, iova, fd, access, arg);
		if (obj)
			mr = remember(md, pd, mr, obj, udata);
	}
	migr_leave(md, idx);
	return mr;
}

static struct ib_mr *reg_dm_mr(struct ib_pd *pd, struct ib_dm *dm, struct ib_dm_mr_attr *attr,
			       struct uverbs_attr_bundle *attrs)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	struct ib_mr *mr;
	int idx;

	md = migr_enter(pd->device, &idx);
	if (attrs)
		obj = mr_obj_alloc(attr->offset, attr->length, 0, attr->access_flags, MIGR_MR_DM);
	if (attrs && !obj) {
		mr = ERR_PTR(-ENOMEM);
	} else {
		mr = md->orig.reg_dm_mr(pd, dm, attr, attrs);
		if (obj)
			mr = remember(md, pd, mr, obj, &attrs->driver_udata);
	}
	migr_leave(md, idx);
	return mr;
}

/* The same MR, changed. */
static int note_rereg(struct ib_mr *mr, int flags, u64 start, u64 length, u64 iova, int access,
		      struct ib_pd *pd)
{
	struct migr_missing missing = {};
	struct migr_mr_rec *rec;
	struct migr_obj *obj;
	int err = 0;

	mutex_lock(&migr_lock);
	obj = migr_obj_find_locked(mr, MIGR_OBJ_MR);
	if (obj) {
		rec = &obj->rec.mr;
		if (flags & IB_MR_REREG_TRANS) {
			obj->ctx->mr_bytes += length - rec->length;
			rec->start = start;
			rec->length = length;
			rec->iova = iova;
		}
		if (flags & IB_MR_REREG_ACCESS)
			rec->access = access;
		if (flags & IB_MR_REREG_PD)
			rec->pd_handle = migr_handle(pd->uobject);
		err = migr_mr_rename_locked(obj, mr->lkey, mr->rkey);
		obj->ctx->gen++;
		missing = migr_table_missing_locked(obj->ctx, err);
		if (!err)
			trace_migr_mr_rereg(obj);
	}
	mutex_unlock(&migr_lock);
	while (migr_table_fill(&missing)) {
		missing.file = NULL;
		mutex_lock(&migr_lock);
		obj = migr_obj_find_locked(mr, MIGR_OBJ_MR);
		err = obj ? migr_names_publish_locked(obj) : 0;
		if (obj)
			missing = migr_table_missing_locked(obj->ctx, err);
		mutex_unlock(&migr_lock);
	}
	return err;
}

static struct ib_mr *rereg_user_mr(struct ib_mr *mr, int flags, u64 start, u64 length, u64 iova,
				   int access, struct ib_pd *pd, struct ib_udata *udata)
{
	struct migr_mr_rec rec = {};
	struct migr_obj *obj = NULL, *old;
	struct ib_pd *new_pd;
	struct ib_mr *new;
	struct migr_dev *md;
	int idx, err;

	/* As it stands before: @mr must not be looked at when another replaces it. */
	new_pd = flags & IB_MR_REREG_PD ? pd : mr->pd;
	md = migr_enter(mr->device, &idx);
	mutex_lock(&migr_lock);
	old = migr_obj_find_locked(mr, MIGR_OBJ_MR);
	if (old) {
		rec = old->rec.mr;
		rec.handle = migr_obj_resolve_locked(old) ? old->rec.mr.handle : MIGR_NO_HANDLE;
	}
	mutex_unlock(&migr_lock);
	if (old) {
		if (flags & IB_MR_REREG_TRANS) {
			rec.start = start;
			rec.length = length;
			rec.iova = iova;
		}
		obj = mr_obj_alloc(rec.start, rec.length, rec.iova,
				   flags & IB_MR_REREG_ACCESS ? access : rec.access, rec.flags);
		new = ERR_PTR(-ENOMEM);
		if (!obj)
			goto out_leave;
		obj->rec.mr.handle = rec.handle;
		obj->replaces = true;
	}
	new = md->orig.rereg_user_mr(mr, flags, start, length, iova, access, pd, udata);
	if (!obj)
		goto out_leave;
	if (new) {	/* replaced, or refused; uverbs deregisters the old one */
		new = remember(md, new_pd, new, obj, udata);
	} else {
		migr_obj_free(obj);
		err = note_rereg(mr, flags, start, length, iova, access, new_pd);
		if (err)
			new = ERR_PTR(err);
	}
out_leave:
	migr_leave(md, idx);
	return new;
}

static int dereg_mr(struct ib_mr *mr, struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(mr->device, &idx);
	obj = migr_obj_begin_destroy(mr, MIGR_OBJ_MR);
	err = md->orig.dereg_mr(mr, udata);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

const struct ib_device_ops migr_mr_ops = {
	.reg_user_mr = reg_user_mr,
	.reg_user_mr_dmabuf = reg_user_mr_dmabuf,
	.reg_dm_mr = reg_dm_mr,
	.rereg_user_mr = rereg_user_mr,
	.dereg_mr = dereg_mr,
};
