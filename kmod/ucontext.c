// SPDX-License-Identifier: GPL-2.0
/* User contexts and protection domains. */
#include <linux/sched.h>

#include "migr.h"

static int alloc_ucontext(struct ib_ucontext *uctx, struct ib_udata *udata)
{
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(uctx->device, &idx);
	err = md->orig.alloc_ucontext(uctx, udata);
	if (!err) {
		err = migr_ctx_new(uctx, task_tgid(current), current->group_leader->comm,
				   current_user_ns(), migr_current_netns(), 0);
		if (err)
			md->orig.dealloc_ucontext(uctx);
	}
	migr_leave(md, idx);
	return err;
}

static void dealloc_ucontext(struct ib_ucontext *uctx)
{
	struct migr_dev *md;
	int idx;

	md = migr_enter(uctx->device, &idx);
	migr_ctx_gone(uctx);
	md->orig.dealloc_ucontext(uctx);
	migr_leave(md, idx);
}

static int alloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(pd->device, &idx);
	if (udata) {
		obj = migr_obj_alloc(MIGR_OBJ_PD);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
	}
	err = md->orig.alloc_pd(pd, udata);
	if (!obj)
		goto out_leave;
	if (!err) {
		err = migr_obj_add(obj, pd, migr_uctx_of(udata));
		if (err)
			md->orig.dealloc_pd(pd, udata);
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return err;
}

static int dealloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(pd->device, &idx);
	obj = migr_obj_begin_destroy(pd, MIGR_OBJ_PD);
	err = md->orig.dealloc_pd(pd, udata);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

const struct ib_device_ops migr_ucontext_ops = {
	.alloc_ucontext = alloc_ucontext,
	.dealloc_ucontext = dealloc_ucontext,
	.alloc_pd = alloc_pd,
	.dealloc_pd = dealloc_pd,
};
