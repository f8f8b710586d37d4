// SPDX-License-Identifier: GPL-2.0
/*
 * The record: user contexts and the objects made in them.
 *
 * A destroyed object leaves no record. Its driver may free it, and hand out its
 * address and its number again, before destroy returns, so a record is hidden
 * before the driver is called (begin_destroy) and then either removed or, when
 * the driver refused, shown again (end_destroy).
 */
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "migr_trace.h"

#define MIGR_HASH_BITS 12

DEFINE_MUTEX(migr_lock);

static DEFINE_XARRAY_ALLOC1(ctx_by_id);		/* what is to be seen there: migr_lock for writing */
static u32 ctx_next_id;
static DEFINE_HASHTABLE(ctx_by_uctx, 8);	/* migr_lock */
static DEFINE_HASHTABLE(obj_by_ptr, MIGR_HASH_BITS);	/* migr_lock; readers: RCU */
static DEFINE_HASHTABLE(obj_by_handle, MIGR_HASH_BITS);	/* migr_lock */
static DEFINE_HASHTABLE(cq_by_channel, MIGR_HASH_BITS);	/* migr_lock */

#define MIGR_UNRESOLVED XA_MARK_0	/* handle not known yet */

/* A process may have any number of objects: how many are gone through before others have migr_lock, too. */
#define MIGR_BATCH 64

/* ---- contexts ------------------------------------------------------------ */

static void ctx_release(struct kref *ref)
{
	struct migr_ctx *ctx = container_of(ref, struct migr_ctx, ref);

	migr_table_put(ctx->table);
	xa_destroy(&ctx->objs);
	put_user_ns(ctx->user_ns);
	put_pid(ctx->tgid);
	kfree(ctx);
}

void migr_ctx_put(struct migr_ctx *ctx)
{
	kref_put(&ctx->ref, ctx_release);
}

static struct migr_ctx *ctx_find_locked(const struct ib_ucontext *uctx)
{
	struct migr_ctx *ctx;

	/* One that has gone with its device unseen may have left its address to one of another. */
	hash_for_each_possible(ctx_by_uctx, ctx, by_uctx, (unsigned long)uctx)
		if (ctx->uctx == uctx && ctx->ibdev == uctx->device)
			return ctx;
	return NULL;
}

/* What its objects point to can be looked at. */
bool migr_ctx_is_there_locked(const struct migr_ctx *ctx)
{
	lockdep_assert_held(&migr_lock);
	return ctx->uctx && !ctx->leaving;
}

/*
 * A number for a context, which nobody sees there yet. One that was given comes
 * again after all others. A dump goes on at the last one plus 1.
 */
static int ctx_take_id(u32 *id, gfp_t gfp)
{
	int err = xa_alloc_cyclic(&ctx_by_id, id, NULL, XA_LIMIT(1, U32_MAX - 1), &ctx_next_id, gfp);

	return err < 0 ? err : 0;
}

/* @ctx, which has its number and is else all zeros, is the record's. */
static void ctx_new_locked(struct migr_ctx *ctx, struct ib_ucontext *uctx, struct pid *tgid,
			   const char *comm, struct user_namespace *user_ns, u64 netns, u32 flags)
{
	lockdep_assert_held(&migr_lock);
	kref_init(&ctx->ref);
	xa_init(&ctx->objs);
	ctx->uctx = uctx;
	ctx->ufile = uctx->ufile;
	ctx->ibdev = uctx->device;
	ctx->leaving = migr_dev_of(uctx->device)->leaving;
	ctx->flags = flags;
	ctx->num_comp_vectors = uctx->device->num_comp_vectors;
	/* dev_name() is freed by a rename. */
	strscpy(ctx->ibdev_name, uctx->device->name, sizeof(ctx->ibdev_name));
	strscpy(ctx->comm, comm, sizeof(ctx->comm));
	ctx->tgid = get_pid(tgid);
	ctx->user_ns = get_user_ns(user_ns);
	ctx->netns = netns;
	hash_add(ctx_by_uctx, &ctx->by_uctx, (unsigned long)uctx);
	xa_store(&ctx_by_id, ctx->id, ctx, 0);	/* its place is there */
	trace_migr_ctx_new(ctx);
}

int migr_ctx_new(struct ib_ucontext *uctx, struct pid *tgid, const char *comm,
		 struct user_namespace *user_ns, u64 netns, u32 flags)
{
	struct migr_ctx *ctx = kzalloc(sizeof(*ctx), GFP_KERNEL_ACCOUNT);
	bool known;
	int err;

	if (!ctx)
		return -ENOMEM;
	err = ctx_take_id(&ctx->id, GFP_KERNEL);
	if (err) {
		kfree(ctx);
		return err;
	}
	mutex_lock(&migr_lock);
	known = ctx_find_locked(uctx);
	if (known)
		xa_erase(&ctx_by_id, ctx->id);
	else
		ctx_new_locked(ctx, uctx, tgid, comm, user_ns, netns, flags);
	mutex_unlock(&migr_lock);
	if (known) {
		kfree(ctx);
		return 0;
	}
	/* the caller's ucontext keeps it */
	migr_event(MIGR_EV_CTX_NEW, ctx, MIGR_NO_QPN, MIGR_NO_QPN);
	return 0;
}

static void obj_unlink_locked(struct migr_obj *obj);

/*
 * The context, of which the number and the owner are told after the lock is gone.
 * False: only some of its objects, and there are more.
 */
static bool ctx_gone_locked(struct migr_ctx *ctx)
{
	struct migr_obj *obj;
	unsigned long seq;
	int n = 0;

	lockdep_assert_held(&migr_lock);
	xa_for_each(&ctx->objs, seq, obj) {
		if (obj->dying)
			continue;	/* its destroyer holds it and unlinks it */
		if (n++ == MIGR_BATCH)
			return false;
		obj_unlink_locked(obj);
		migr_obj_free(obj);
		kref_put(&ctx->ref, ctx_release);	/* never the last */
	}
	trace_migr_ctx_gone(ctx);
	hash_del(&ctx->by_uctx);
	xa_erase(&ctx_by_id, ctx->id);
	ctx->uctx = NULL;
	ctx->ibdev = NULL;
	ctx->ufile = NULL;
	return true;
}

void migr_ctx_gone(struct ib_ucontext *uctx)
{
	struct migr_ctx *ctx;
	bool gone;

	do {
		mutex_lock(&migr_lock);
		ctx = ctx_find_locked(uctx);
		gone = !ctx || ctx_gone_locked(ctx);
		mutex_unlock(&migr_lock);
	} while (!gone);
	if (!ctx)
		return;
	migr_event(MIGR_EV_CTX_DEL, ctx, MIGR_NO_QPN, MIGR_NO_QPN);
	migr_ctx_put(ctx);
}

/*
 * The device goes, or the module does. From here on objects and contexts of it are
 * destroyed without our hearing of it: what the record points to may be freed.
 */
void migr_ctx_leave_device(struct migr_dev *md)
{
	struct migr_ctx *ctx;
	unsigned long id;

	mutex_lock(&migr_lock);
	md->leaving = true;
	xa_for_each(&ctx_by_id, id, ctx)
		if (ctx->ibdev == md->ibdev)
			ctx->leaving = true;
	mutex_unlock(&migr_lock);
}

/* No wrapper of the device runs any more. */
void migr_ctx_gone_device(struct ib_device *ibdev)
{
	struct migr_ctx *ctx, *found;
	unsigned long id;
	bool gone = false;

	do {
		found = NULL;
		mutex_lock(&migr_lock);
		xa_for_each(&ctx_by_id, id, ctx) {
			if (ctx->ibdev != ibdev)
				continue;
			found = ctx;
			gone = ctx_gone_locked(ctx);
			break;
		}
		mutex_unlock(&migr_lock);
		if (found && gone) {
			migr_event(MIGR_EV_CTX_DEL, found, MIGR_NO_QPN, MIGR_NO_QPN);
			migr_ctx_put(found);
		}
	} while (found);
}

void migr_ctx_rename_device(struct ib_device *ibdev)
{
	struct migr_ctx *ctx;
	unsigned long id;

	mutex_lock(&migr_lock);
	xa_for_each(&ctx_by_id, id, ctx)
		if (ctx->ibdev == ibdev)
			strscpy(ctx->ibdev_name, ibdev->name, sizeof(ctx->ibdev_name));
	mutex_unlock(&migr_lock);
}

struct migr_ctx *migr_ctx_get(u32 id)
{
	struct migr_ctx *ctx;

	mutex_lock(&migr_lock);
	ctx = xa_load(&ctx_by_id, id);
	if (ctx)
		kref_get(&ctx->ref);
	mutex_unlock(&migr_lock);
	return ctx;
}

/* The first context whose id is at least *@id; *@id becomes its id. */
struct migr_ctx *migr_ctx_get_next(u32 *id)
{
	unsigned long index = *id;
	struct migr_ctx *ctx;

	mutex_lock(&migr_lock);
	ctx = xa_find(&ctx_by_id, &index, U32_MAX, XA_PRESENT);
	if (ctx) {
		kref_get(&ctx->ref);
		*id = index;
	}
	mutex_unlock(&migr_lock);
	return ctx;
}

/* A file whose private_data is the ib_uverbs_file of a live context is its file. */
struct migr_ctx *migr_ctx_get_by_ufile(const void *private_data)
{
	struct migr_ctx *ctx, *found = NULL;
	unsigned long id;

	if (!private_data)
		return NULL;
	mutex_lock(&migr_lock);
	xa_for_each(&ctx_by_id, id, ctx) {
		if (ctx->ufile == private_data && !ctx->leaving) {
			kref_get(&ctx->ref);
			found = ctx;
			break;
		}
	}
	mutex_unlock(&migr_lock);
	return found;
}

/* Objects that are made meanwhile publish themselves. EAGAIN: there are more. */
static int publish_locked(struct migr_ctx *ctx)
{
	struct migr_obj *obj;
	unsigned long seq;
	int err, n = 0;

	if (ctx->published)
		return 0;
	xa_for_each_start(&ctx->objs, seq, obj, ctx->publish_next) {
		if (n++ == MIGR_BATCH)
			return -EAGAIN;
		err = obj->dying ? 0 : migr_names_publish_locked(obj);
		if (err)
			return err;	/* what is there already stays */
		ctx->publish_next = seq + 1;
	}
	ctx->published = true;
	return 0;
}

/*
 * The process that attaches last is the context's process: one that was made
 * ahead for a process being restored is its own from here on.
 */
static int attach_locked(struct migr_ctx *ctx, struct file **made)
{
	struct user_namespace *old_ns;
	struct pid *old_tgid;
	int err;

	if (!ctx->uctx)
		return -ENOENT;
	migr_table_install_locked(ctx, made);
	err = publish_locked(ctx);
	if (err)
		return err;
	ctx->nr_files++;
	ctx->flags |= MIGR_CTX_ATTACHED;
	ctx->gen++;
	old_tgid = ctx->tgid;
	old_ns = ctx->user_ns;
	ctx->tgid = get_pid(task_tgid(current));
	ctx->user_ns = get_user_ns(current_user_ns());
	ctx->netns = migr_current_netns();
	get_task_comm(ctx->comm, current->group_leader);
	put_pid(old_tgid);
	put_user_ns(old_ns);
	trace_migr_ctx_attach(ctx);
	return 0;
}

int migr_ctx_attach(struct migr_ctx *ctx)
{
	struct file *made[MIGR_NR_TABLES] = {};
	struct migr_missing missing;
	int err;

	if (!READ_ONCE(ctx->table[0])) {	/* once there, they stay */
		err = migr_table_make(made);
		if (err)
			return err;
	}
	do {
		mutex_lock(&migr_lock);
		err = attach_locked(ctx, made);
		missing = migr_table_missing_locked(ctx, err);
		mutex_unlock(&migr_lock);
	} while (err == -EAGAIN || migr_table_fill(&missing));
	migr_table_put(made);	/* another thread was faster */
	return err;
}

void migr_ctx_detach(struct migr_ctx *ctx)
{
	mutex_lock(&migr_lock);
	if (!--ctx->nr_files) {
		ctx->flags &= ~MIGR_CTX_ATTACHED;
		ctx->gen++;
	}
	mutex_unlock(&migr_lock);
	migr_ctx_put(ctx);
}

void migr_record_count(u32 *nr_ctx, u32 *nr_obj)
{
	struct migr_ctx *ctx;
	unsigned long id;
	int type;

	*nr_ctx = 0;
	*nr_obj = 0;
	mutex_lock(&migr_lock);
	xa_for_each(&ctx_by_id, id, ctx) {
		++*nr_ctx;
		for (type = 0; type < __MIGR_OBJ_MAX; type++)
			*nr_obj += ctx->nr[type];
	}
	mutex_unlock(&migr_lock);
}

/* ---- objects ------------------------------------------------------------- */

/* Of any ib_u*_object: each of them begins with its ib_uobject. */
u32 migr_handle(const void *uobject)
{
	return uobject ? ((const struct ib_uobject *)uobject)->id : MIGR_NO_HANDLE;
}

struct migr_obj *migr_obj_alloc(u32 type)
{
	struct migr_obj *obj = kzalloc(sizeof(*obj), GFP_KERNEL_ACCOUNT);

	if (obj)
		obj->type = type;
	return obj;
}

static void obj_free_rcu(struct rcu_head *rcu)
{
	struct migr_obj *obj = container_of(rcu, struct migr_obj, rcu);

	kfree(obj->resp);
	kfree(obj);
}

void migr_obj_free(struct migr_obj *obj)
{
	call_rcu(&obj->rcu, obj_free_rcu);
}

/*
 * Keeps what the driver answered to user space. It is read back from the
 * caller's buffer, so it is worth what the caller left there: the caller can
 * only deceive himself. A failure is not one of the call.
 */
void migr_obj_take_resp(struct migr_obj *obj, const struct ib_udata *udata)
{
	size_t len = min_t(size_t, udata->outlen, MIGR_DRIVER_RESP_MAX);

	if (!len || !udata->outbuf)
		return;
	obj->resp = memdup_user(udata->outbuf, len);
	if (IS_ERR(obj->resp))
		obj->resp = NULL;
	else
		obj->resp_len = len;
}

/* Which of the record's structs tells the handle; uverbs may set it after create. */
static u32 obj_uobject_handle(const struct migr_obj *obj)
{
	switch (obj->type) {
	case MIGR_OBJ_PD:
		return migr_handle(READ_ONCE(((struct ib_pd *)obj->ptr)->uobject));
	case MIGR_OBJ_MR:
		if (obj->replaces)	/* uverbs lets it point to its predecessor's uobject, which goes */
			return obj->rec.mr.handle;
		return migr_handle(READ_ONCE(((struct ib_mr *)obj->ptr)->uobject));
	case MIGR_OBJ_CQ:
		return migr_handle(READ_ONCE(((struct ib_cq *)obj->ptr)->uobject));
	case MIGR_OBJ_QP:
		return migr_handle(READ_ONCE(((struct ib_qp *)obj->ptr)->uobject));
	case MIGR_OBJ_SRQ:
		return migr_handle(READ_ONCE(((struct ib_srq *)obj->ptr)->uobject));
	case MIGR_OBJ_MW:
		return migr_handle(READ_ONCE(((struct ib_mw *)obj->ptr)->uobject));
	case MIGR_OBJ_AH:
		return migr_handle(READ_ONCE(((struct ib_ah *)obj->ptr)->uobject));
	case MIGR_OBJ_DM:
		return migr_handle(READ_ONCE(((struct ib_dm *)obj->ptr)->uobject));
	default:
		return MIGR_NO_HANDLE;	/* XRCD: does not know its uobject */
	}
}

/* Every record struct opens with its handle. */
static_assert(offsetof(struct migr_pd_rec, handle) == 0);
static_assert(offsetof(struct migr_mr_rec, handle) == 0);
static_assert(offsetof(struct migr_cq_rec, handle) == 0);
static_assert(offsetof(struct migr_qp_rec, handle) == 0);
static_assert(offsetof(struct migr_srq_rec, handle) == 0);
static_assert(offsetof(struct migr_other_rec, handle) == 0);

/* uverbs sets it after create_cq, in one of its two ways to make a CQ. */
static void user_handle_locked(struct migr_obj *obj)
{
	const struct ib_uobject *uobject;

	if (obj->type == MIGR_OBJ_CQ) {
		uobject = (const struct ib_uobject *)((struct ib_cq *)obj->ptr)->uobject;
		obj->rec.cq.user_handle = uobject->user_handle;
	}
}

/*
 * Brings up to date what uverbs keeps. False: the object is not yet user space's.
 * Its context has to be there.
 */
bool migr_obj_refresh_locked(struct migr_obj *obj)
{
	if (obj->dying || !migr_obj_resolve_locked(obj))
		return false;
	user_handle_locked(obj);
	return true;
}

/* Returns whether the handle is known; an XRCD is done without one. */
bool migr_obj_resolve_locked(struct migr_obj *obj)
{
	struct migr_ctx *ctx = obj->ctx;
	u32 handle;

	lockdep_assert_held(&migr_lock);
	if (!xa_get_mark(&ctx->objs, obj->seq, MIGR_UNRESOLVED))
		return true;
	if (ctx->leaving)
		return false;
	handle = obj_uobject_handle(obj);
	if (handle == MIGR_NO_HANDLE && obj->type != MIGR_OBJ_XRCD)
		return false;
	obj->rec.pd.handle = handle;
	if (handle != MIGR_NO_HANDLE)
		hash_add(obj_by_handle, &obj->by_handle, migr_name_hash(ctx->id, handle));
	xa_clear_mark(&ctx->objs, obj->seq, MIGR_UNRESOLVED);
	return true;
}

static void obj_account_locked(struct migr_obj *obj, int sign)
{
	struct migr_ctx *ctx = obj->ctx;

	ctx->nr[obj->type] += sign;
	if (obj->type == MIGR_OBJ_MR)
		ctx->mr_bytes += sign * (s64)obj->rec.mr.length;
	/* Each of these is whole by itself, and programs make them all the time: no reason to read the record again. */
	if (obj->type != MIGR_OBJ_MR && obj->type != MIGR_OBJ_MW && obj->type != MIGR_OBJ_AH)
		ctx->gen++;
}

static void obj_unlink_locked(struct migr_obj *obj)
{
	struct migr_ctx *ctx = obj->ctx;

	lockdep_assert_held(&migr_lock);
	if (!obj->dying) {
		migr_names_hide_locked(obj);
		obj_account_locked(obj, -1);
	}
	trace_migr_obj_gone(obj);
	migr_names_del_locked(obj);
	hash_del_rcu(&obj->by_ptr);
	if (!hlist_unhashed(&obj->by_handle))
		hash_del(&obj->by_handle);
	if (!hlist_unhashed(&obj->by_channel))
		hash_del(&obj->by_channel);
	xa_erase(&ctx->objs, obj->seq);
}

/*
 * A number for the completion channel of a CQ. Its key is the address of the
 * channel's queue; a CQ holds its channel, so as long as one lives, nobody else
 * has that address.
 */
static u32 cq_channel_locked(const struct migr_obj *cq)
{
	struct migr_ctx *ctx = cq->ctx;
	struct migr_obj *obj;

	if (!cq->channel_key)
		return 0;
	hash_for_each_possible(cq_by_channel, obj, by_channel, (unsigned long)cq->channel_key)
		if (obj->channel_key == cq->channel_key && obj->ctx == ctx)
			return obj->rec.cq.channel;
	return ++ctx->next_channel;
}

/* @place: there was none for it in its context, and that is all that it lacks. */
static int obj_add_locked(struct migr_obj *obj, struct ib_ucontext *uctx, bool *place)
{
	struct migr_ctx *ctx = ctx_find_locked(uctx);
	int err;

	if (!ctx) {	/* older than the module, and not found when it came: rare */
		ctx = kzalloc(sizeof(*ctx), MIGR_GFP_LOCKED | __GFP_ACCOUNT);
		if (!ctx)
			return -ENOMEM;
		err = ctx_take_id(&ctx->id, MIGR_GFP_LOCKED);
		if (err) {
			kfree(ctx);
			return err;
		}
		ctx_new_locked(ctx, uctx, task_tgid(current), current->group_leader->comm,
			       current_user_ns(), migr_current_netns(), MIGR_CTX_HYDRATED);
	}
	obj->ctx = ctx;
	obj->seq = ctx->next_seq;
	err = xa_err(xa_store(&ctx->objs, obj->seq, obj, MIGR_GFP_LOCKED));
	*place = err == -ENOMEM;
	if (err)
		return err;
	err = migr_names_add_locked(obj);
	if (err) {
		xa_erase(&ctx->objs, obj->seq);
		return err;
	}
	ctx->next_seq++;
	if (obj->type == MIGR_OBJ_CQ) {
		obj->rec.cq.channel = cq_channel_locked(obj);
		if (obj->channel_key)
			hash_add(cq_by_channel, &obj->by_channel, (unsigned long)obj->channel_key);
	}
	kref_get(&ctx->ref);	/* an object being destroyed may outlive it */
	hash_add_rcu(obj_by_ptr, &obj->by_ptr, (unsigned long)obj->ptr);
	xa_set_mark(&ctx->objs, obj->seq, MIGR_UNRESOLVED);
	migr_obj_resolve_locked(obj);
	obj_account_locked(obj, 1);
	trace_migr_obj_new(obj);
	return 0;
}

/* On success @obj is the record's; on failure still the caller's, to be freed. */
int migr_obj_add(struct migr_obj *obj, void *ptr, struct ib_ucontext *uctx)
{
	struct migr_missing missing = {};
	bool place = false;
	int err;

	obj->ptr = ptr;
	do {
		mutex_lock(&migr_lock);
		err = obj_add_locked(obj, uctx, &place);
		if (obj->ctx && !place)
			missing = migr_table_missing_locked(obj->ctx, err);
		mutex_unlock(&migr_lock);
		/* Or the next one after it, if another thread has taken it. */
	} while (place ? !xa_reserve(&obj->ctx->objs, obj->seq, GFP_KERNEL) : migr_table_fill(&missing));
	return err;
}

/*
 * Of a context that is leaving nobody tells us what is freed, whose address another
 * device's object may have by now: none of it is found.
 */
struct migr_obj *migr_obj_find_locked(const void *ptr, u32 type)
{
	struct migr_obj *obj;

	lockdep_assert_held(&migr_lock);
	hash_for_each_possible(obj_by_ptr, obj, by_ptr, (unsigned long)ptr)
		if (obj->ptr == ptr && obj->type == type && !obj->dying && !obj->ctx->leaving)
			return obj;
	return NULL;
}

/* False for what is not. True may turn out wrong under migr_lock. */
bool migr_obj_is_ours(const void *ptr, u32 type)
{
	struct migr_obj *obj;
	bool ours = false;

	rcu_read_lock();
	hash_for_each_possible_rcu(obj_by_ptr, obj, by_ptr, (unsigned long)ptr)
		ours |= obj->ptr == ptr && obj->type == type;
	rcu_read_unlock();
	return ours;
}

/*
 * Those of @ctx that have got a handle meanwhile. To be called before a search by
 * handle, which goes through all that have none without letting others have the lock.
 */
void migr_ctx_resolve(struct migr_ctx *ctx)
{
	unsigned long seq = 0;
	struct migr_obj *obj;
	int n;

	do {
		mutex_lock(&migr_lock);
		for (n = 0; n < MIGR_BATCH && migr_ctx_is_there_locked(ctx); n++, seq++) {
			obj = xa_find(&ctx->objs, &seq, ULONG_MAX, MIGR_UNRESOLVED);
			if (!obj)
				break;
			if (!obj->dying)
				migr_obj_resolve_locked(obj);
		}
		mutex_unlock(&migr_lock);
	} while (n == MIGR_BATCH);
}

struct migr_obj *migr_obj_by_handle_locked(struct migr_ctx *ctx, u32 type, u32 handle)
{
	struct migr_obj *obj;
	unsigned long seq;

	lockdep_assert_held(&migr_lock);
	if (!migr_ctx_is_there_locked(ctx))
		return NULL;
	xa_for_each_marked(&ctx->objs, seq, obj, MIGR_UNRESOLVED)
		if (!obj->dying)
			migr_obj_resolve_locked(obj);
	hash_for_each_possible(obj_by_handle, obj, by_handle, migr_name_hash(ctx->id, handle))
		if (obj->ctx == ctx && obj->type == type && obj->rec.pd.handle == handle && !obj->dying)
			return obj;
	return NULL;
}

/* Returns NULL for what is not ours. Does not sleep then: kernel users may be atomic. */
struct migr_obj *migr_obj_begin_destroy(const void *ptr, u32 type)
{
	struct migr_obj *obj;

	if (!migr_obj_is_ours(ptr, type))
		return NULL;
	mutex_lock(&migr_lock);
	obj = migr_obj_find_locked(ptr, type);
	if (obj) {
		migr_names_hide_locked(obj);
		obj_account_locked(obj, -1);
		obj->dying = true;
	}
	mutex_unlock(&migr_lock);
	return obj;
}

void migr_obj_end_destroy(struct migr_obj *obj, int err)
{
	struct migr_ctx *ctx = obj->ctx;
	bool gone;

	mutex_lock(&migr_lock);
	gone = !err || !ctx->uctx;
	if (gone) {
		obj_unlink_locked(obj);
	} else {
		obj->dying = false;
		obj_account_locked(obj, 1);
		migr_names_show_locked(obj);
	}
	mutex_unlock(&migr_lock);
	if (!gone)
		return;
	if (obj->type == MIGR_OBJ_QP)
		migr_event(MIGR_EV_QP_DEL, ctx, obj->rec.qp.vqpn, obj->rec.qp.pqpn);
	migr_obj_free(obj);
	migr_ctx_put(ctx);
}

void migr_record_exit(void)
{
	rcu_barrier();
	xa_destroy(&ctx_by_id);
}
