// SPDX-License-Identifier: GPL-2.0
/* MW, AH, XRCD, DM: counted and named, not rebuilt from the record. */
#include "migr.h"

static struct migr_obj *other_alloc(u32 type, const struct ib_pd *pd)
{
	struct migr_obj *obj = migr_obj_alloc(type);

	if (obj) {
		obj->rec.other.handle = MIGR_NO_HANDLE;
		obj->rec.other.pd_handle = pd ? migr_handle(pd->uobject) : MIGR_NO_HANDLE;
	}
	return obj;
}

/* ---- memory windows ------------------------------------------------------- */

static int alloc_mw(struct ib_mw *mw, struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(mw->device, &idx);
	if (udata) {
		obj = other_alloc(MIGR_OBJ_MW, mw->pd);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
	}
	err = md->orig.alloc_mw(mw, udata);
	if (!obj)
		goto out_leave;
	if (!err) {
		obj->rec.other.num = mw->rkey;
		err = migr_obj_add(obj, mw, migr_uctx_of(udata));
		if (err)
			md->orig.dealloc_mw(mw);
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return err;
}

static int dealloc_mw(struct ib_mw *mw)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(mw->device, &idx);
	obj = migr_obj_begin_destroy(mw, MIGR_OBJ_MW);
	err = md->orig.dealloc_mw(mw);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

/* ---- address handles: the kernel's own are destroyed in atomic context too -- */

static int create_user_ah(struct ib_ah *ah, struct rdma_ah_init_attr *attr, struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(ah->device, &idx);
	if (udata) {
		obj = other_alloc(MIGR_OBJ_AH, ah->pd);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
	}
	err = md->orig.create_user_ah(ah, attr, udata);
	if (!obj)
		goto out_leave;
	if (!err) {
		err = migr_obj_add(obj, ah, migr_uctx_of(udata));
		if (err)
			md->orig.destroy_ah(ah, RDMA_DESTROY_AH_SLEEPABLE);
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return err;
}

static int destroy_ah(struct ib_ah *ah, u32 flags)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(ah->device, &idx);
	if (flags & RDMA_DESTROY_AH_SLEEPABLE)	/* so are all of user space */
		obj = migr_obj_begin_destroy(ah, MIGR_OBJ_AH);
	err = md->orig.destroy_ah(ah, flags);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

/* ---- XRC domains ----------------------------------------------------------- */

static int alloc_xrcd(struct ib_xrcd *xrcd, struct ib_udata *udata)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	int idx, err;

	md = migr_enter(xrcd->device, &idx);
	if (udata) {
		obj = other_alloc(MIGR_OBJ_XRCD, NULL);
		err = -ENOMEM;
		if (!obj)
			goto out_leave;
	}
	err = md->orig.alloc_xrcd(xrcd, udata);
	if (!obj)
		goto out_leave;
	if (!err) {
		err = migr_obj_add(obj, xrcd, migr_uctx_of(udata));
		if (err)
			md->orig.dealloc_xrcd(xrcd, udata);
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return err;
}

static int dealloc_xrcd(struct ib_xrcd *xrcd, struct ib_udata *udata)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(xrcd->device, &idx);
	obj = migr_obj_begin_destroy(xrcd, MIGR_OBJ_XRCD);
	err = md->orig.dealloc_xrcd(xrcd, udata);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

/* ---- device memory ----------------------------------------------------------- */

static struct ib_dm *alloc_dm(struct ib_device *ibdev, struct ib_ucontext *uctx,
			      struct ib_dm_alloc_attr *attr, struct uverbs_attr_bundle *attrs)
{
	struct migr_obj *obj = NULL;
	struct migr_dev *md;
	struct ib_dm *dm;
	int idx, err;

	md = migr_enter(ibdev, &idx);
	if (uctx) {
		obj = other_alloc(MIGR_OBJ_DM, NULL);
		dm = ERR_PTR(-ENOMEM);
		if (!obj)
			goto out_leave;
	}
	dm = md->orig.alloc_dm(ibdev, uctx, attr, attrs);
	if (!obj)
		goto out_leave;
	err = PTR_ERR_OR_ZERO(dm);
	if (!err) {
		dm->uobject = NULL;	/* as with an MR */
		err = migr_obj_add(obj, dm, uctx);
		if (err) {
			dm->device = ibdev;	/* what uverbs sets after the call */
			md->orig.dealloc_dm(dm, attrs);
			dm = ERR_PTR(err);
		}
	}
	if (err)
		migr_obj_free(obj);
out_leave:
	migr_leave(md, idx);
	return dm;
}

static int dealloc_dm(struct ib_dm *dm, struct uverbs_attr_bundle *attrs)
{
	struct migr_dev *md;
	struct migr_obj *obj;
	int idx, err;

	md = migr_enter(dm->device, &idx);
	obj = migr_obj_begin_destroy(dm, MIGR_OBJ_DM);
	err = md->orig.dealloc_dm(dm, attrs);
	if (obj)
		migr_obj_end_destroy(obj, err);
	migr_leave(md, idx);
	return err;
}

const struct ib_device_ops migr_other_ops = {
	.alloc_mw = alloc_mw,
	.dealloc_mw = dealloc_mw,
	.create_user_ah = create_user_ah,
	.destroy_ah = destroy_ah,
	.alloc_xrcd = alloc_xrcd,
	.dealloc_xrcd = dealloc_xrcd,
	.alloc_dm = alloc_dm,
	.dealloc_dm = dealloc_dm,
};
