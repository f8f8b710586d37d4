// SPDX-License-Identifier: GPL-2.0
/*
 * Virtual names: which QP has which vQPN, which MR has which keys.
 *
 * A name is unique within its context, and equal to the physical number unless
 * that is held. When one is chosen at birth, the numbers that QPs of the same
 * process hold on the same device, and those reserved on this host, count as
 * held too.
 *
 * An object whose virtual name differs from its physical one holds the module:
 * without it, a process would be left with names that nobody can explain.
 */
#include <linux/module.h>
#include <linux/random.h>
#include <linux/siphash.h>

#include "migr_trace.h"

#define MIGR_NAME_BITS 12

/* All under migr_lock; by migr_name_hash() of context and number. */
static DEFINE_HASHTABLE(by_vqpn, MIGR_NAME_BITS);	/* those who own the number; of any context */
static DEFINE_HASHTABLE(by_pqpn, MIGR_NAME_BITS);
static DEFINE_HASHTABLE(by_lkey, MIGR_NAME_BITS);	/* by index */
static DEFINE_HASHTABLE(by_rkey, MIGR_NAME_BITS);
static DEFINE_XARRAY(reserved);
static u32 nr_reserved;

/*
 * How many numbers are tried for a free one: a process must not be able to keep
 * everybody else waiting for migr_lock. They lie apart, so that only one who has
 * taken all of them on purpose finds none (and then has no more names himself).
 */
#define MIGR_PICK_TRIES 4096

/*
 * A process chooses its names: it must not know which of them stand in one chain,
 * at the end of which everybody else would wait for migr_lock.
 */
static siphash_key_t secret;

void migr_names_init(void)
{
	get_random_bytes(&secret, sizeof(secret));
}

u64 migr_name_hash(u32 ctx_id, u32 number)
{
	return siphash_2u32(ctx_id, number, &secret);
}

#define ANY_CTX 0	/* no context has it */

static u32 next_try(u32 natural, u32 n, u32 number)
{
	return (n ? number * 1664525 + 1013904223 : natural ^ 0x800000) & MIGR_QPN_MASK;
}
static_assert(MIGR_NR_INDEX - MIGR_QPN_MASK == 1);

static void unhash(struct hlist_node *node)
{
	if (!hlist_unhashed(node))
		hash_del(node);
}

/* The module is held as long as the names of @obj differ. */
static int pin_locked(struct migr_obj *obj, bool differ)
{
	if (differ == obj->pinned)
		return 0;
	if (!differ)
		module_put(THIS_MODULE);
	else if (!try_module_get(THIS_MODULE))
		return -EBUSY;	/* being removed */
	obj->pinned = differ;
	return 0;
}

/*
 * A name that is the physical number is free as soon as its object is being
 * destroyed: the driver may give that number again before it returns. Any other
 * one is needed again if the driver refuses.
 */
static bool name_goes(const struct migr_obj *obj)
{
	return (obj->dying || obj->ctx->leaving) && !obj->pinned;
}

/* ---- queue pairs --------------------------------------------------------- */

static int qp_publish_locked(struct migr_obj *obj)
{
	return migr_table_set_qpn(obj->ctx, obj->rec.qp.pqpn, obj->rec.qp.vqpn | MIGR_QPN_VALID);
}

static bool vqpn_held_locked(const struct migr_ctx *ctx, u32 vqpn)
{
	struct migr_obj *obj;

	if (xa_load(&reserved, vqpn))
		return true;
	hash_for_each_possible(by_vqpn, obj, by_vqpn, migr_name_hash(ANY_CTX, vqpn))
		if (obj->rec.qp.vqpn == vqpn && !name_goes(obj) &&
		    (obj->ctx == ctx ||
		     (obj->ctx->tgid == ctx->tgid && obj->ctx->ibdev == ctx->ibdev)))
			return true;
	return false;
}

/* QPNs 0 and 1 have a meaning of their own. */
static int pick_vqpn_locked(const struct migr_ctx *ctx, u32 pqpn, u32 *vqpn)
{
	u32 n, v = pqpn;

	for (n = 0; n < MIGR_PICK_TRIES; n++) {
		if (v > 1 && !vqpn_held_locked(ctx, v)) {
			*vqpn = v;
			return 0;
		}
		v = next_try(pqpn, n, v);
	}
	return -ENOSPC;
}

static int qp_add_locked(struct migr_obj *obj)
{
	struct migr_qp_rec *qp = &obj->rec.qp;
	int err = 0;

	if (qp->pqpn <= 1)
		qp->vqpn = qp->pqpn;	/* a GSI or SMI QP of user space */
	else
		err = pick_vqpn_locked(obj->ctx, qp->pqpn, &qp->vqpn);
	if (err)
		return err;
	err = pin_locked(obj, qp->vqpn != qp->pqpn);
	if (err)
		return err;
	err = qp_publish_locked(obj);
	if (err) {
		pin_locked(obj, false);
		return err;
	}
	hash_add(by_vqpn, &obj->by_vqpn, migr_name_hash(ANY_CTX, qp->vqpn));
	hash_add(by_pqpn, &obj->by_pqpn, migr_name_hash(obj->ctx->id, qp->pqpn));
	return 0;
}

static struct migr_obj *qp_by_pqpn_locked(const struct migr_ctx *ctx, u32 pqpn)
{
	struct migr_obj *obj;

	hash_for_each_possible(by_pqpn, obj, by_pqpn, migr_name_hash(ctx->id, pqpn))
		if (obj->rec.qp.pqpn == pqpn && obj->ctx == ctx && !obj->dying)
			return obj;
	return NULL;
}

/* Whoever has @vqpn in @ctx has it no more; so has one whose end the driver may yet refuse. */
static void take_vqpn_locked(const struct migr_ctx *ctx, u32 vqpn)
{
	struct hlist_node *next;
	struct migr_obj *obj;

	hash_for_each_possible_safe(by_vqpn, obj, next, by_vqpn, migr_name_hash(ANY_CTX, vqpn)) {
		if (obj->rec.qp.vqpn != vqpn || obj->ctx != ctx)
			continue;
		hash_del(&obj->by_vqpn);
		obj->rec.qp.flags |= MIGR_QP_FORMER;
	}
}

/*
 * The name moves: a QP that had it goes on being translated to it, for what it
 * has still to complete, and is marked as its former holder.
 */
static int bind_qp_locked(struct migr_ctx *ctx, u32 vqpn, u32 pqpn)
{
	struct migr_obj *obj;
	u32 old;
	int err;

	obj = ctx->uctx ? qp_by_pqpn_locked(ctx, pqpn) : NULL;
	if (!obj)
		return -ENOENT;
	old = obj->rec.qp.vqpn;
	obj->rec.qp.vqpn = vqpn;
	err = qp_publish_locked(obj);
	if (!err)
		err = pin_locked(obj, vqpn != pqpn);
	if (err) {
		obj->rec.qp.vqpn = old;
		qp_publish_locked(obj);
		return err;
	}
	unhash(&obj->by_vqpn);
	take_vqpn_locked(ctx, vqpn);
	hash_add(by_vqpn, &obj->by_vqpn, migr_name_hash(ANY_CTX, vqpn));
	obj->rec.qp.flags &= ~MIGR_QP_FORMER;
	obj->bound = true;
	ctx->gen++;
	trace_migr_qp_bind(obj);
	return 0;
}

int migr_bind_qp(struct migr_ctx *ctx, u32 vqpn, u32 pqpn)
{
	struct migr_missing missing;
	int err;

	if ((vqpn | pqpn) & ~MIGR_QPN_MASK)
		return -ERANGE;
	if (vqpn <= 1)
		return -EINVAL;
	do {
		mutex_lock(&migr_lock);
		err = bind_qp_locked(ctx, vqpn, pqpn);
		missing = migr_table_missing_locked(ctx, err);
		mutex_unlock(&migr_lock);
	} while (migr_table_fill(&missing));
	return err;
}

static bool executes_nothing(u32 state)
{
	return state == IB_QPS_ERR || state == IB_QPS_RESET || state == IB_QPS_INIT;
}

int migr_qp_stands(struct migr_ctx *ctx, u32 pqpn, u32 state)
{
	struct migr_obj *obj;
	u32 since;	/* given last on the way to that state */
	int err;

	if (state != IB_QPS_RTR && state != IB_QPS_RTS)
		return -EINVAL;
	since = state == IB_QPS_RTS ? IB_QP_SQ_PSN : IB_QP_RQ_PSN;
	mutex_lock(&migr_lock);
	obj = ctx->uctx ? qp_by_pqpn_locked(ctx, pqpn) : NULL;
	if (!obj)
		err = -ENOENT;
	else if (!executes_nothing(obj->rec.qp.qp_state))
		err = obj->rec.qp.qp_state == state ? 0 : -EBUSY;
	else if (!(obj->ever_given & since))
		err = -EINVAL;
	else
		err = 0;
	if (!err) {
		obj->rec.qp.qp_state = state;
		obj->rec.qp.attr_mask = obj->ever_given;
		ctx->gen++;
		trace_migr_qp_state(obj);
	}
	mutex_unlock(&migr_lock);
	return err;
}

int migr_qpn_reserve(u32 vqpn)
{
	int err = xa_reserve(&reserved, vqpn, GFP_KERNEL);

	if (err)
		return err;
	mutex_lock(&migr_lock);
	if (xa_load(&reserved, vqpn))
		err = -EEXIST;
	else if (!try_module_get(THIS_MODULE))
		err = -EBUSY;
	if (!err) {
		err = xa_err(xa_store(&reserved, vqpn, xa_mk_value(1), MIGR_GFP_LOCKED));
		if (err)
			module_put(THIS_MODULE);	/* released meanwhile, by another */
	}
	if (err) {
		xa_release(&reserved, vqpn);
	} else {
		nr_reserved++;
		trace_migr_qpn_reserve(vqpn);
	}
	mutex_unlock(&migr_lock);
	return err;
}

int migr_qpn_release(u32 vqpn)
{
	int err = -ENOENT;

	mutex_lock(&migr_lock);
	if (xa_erase(&reserved, vqpn)) {
		nr_reserved--;
		trace_migr_qpn_release(vqpn);
		module_put(THIS_MODULE);
		err = 0;
	}
	mutex_unlock(&migr_lock);
	return err;
}

u32 migr_nr_reserved(void)
{
	return READ_ONCE(nr_reserved);
}

/* ---- memory keys --------------------------------------------------------- */

/* The MR that has @index of @ctx, as that of its lkey or of its rkey; it may be dying. */
static struct migr_obj *mr_by_index_locked(const struct migr_ctx *ctx, u32 index)
{
	struct migr_obj *obj;

	hash_for_each_possible(by_lkey, obj, by_lkey, migr_name_hash(ctx->id, index))
		if (obj->ctx == ctx && obj->rec.mr.vlkey >> 8 == index && !name_goes(obj))
			return obj;
	hash_for_each_possible(by_rkey, obj, by_rkey, migr_name_hash(ctx->id, index))
		if (obj->ctx == ctx && obj->rec.mr.vrkey >> 8 == index && !name_goes(obj))
			return obj;
	return NULL;
}

/* What @names, if any, will have is not free either. */
static bool index_is_free_locked(const struct migr_ctx *ctx, u32 index, const struct migr_mr_rec *names)
{
	if (names && (names->vlkey >> 8 == index || names->vrkey >> 8 == index))
		return false;
	return !mr_by_index_locked(ctx, index);
}

/* A virtual key for @pkey at a free index. Index 0 is never given. */
static int pick_key_locked(const struct migr_ctx *ctx, u32 pkey, u32 *vkey, const struct migr_mr_rec *but)
{
	u32 n, index = pkey >> 8;

	for (n = 0; n < MIGR_PICK_TRIES; n++) {
		if (index && index_is_free_locked(ctx, index, but)) {
			/* an entry of 0 means none: a tag that keeps it from being 0 */
			*vkey = index << 8 | ((pkey & 0xff) ^ (pkey < 0x100));
			return 0;
		}
		index = next_try(pkey >> 8, n, index);
	}
	return -ENOSPC;
}

static int pick_keys_locked(const struct migr_ctx *ctx, struct migr_mr_rec *mr, const struct migr_mr_rec *but)
{
	int err = pick_key_locked(ctx, mr->plkey, &mr->vlkey, but);

	mr->vrkey = 0;
	if (err || !mr->prkey)
		return err;
	if (mr->prkey >> 8 == mr->plkey >> 8)	/* one index for both, as the driver has it */
		mr->vrkey = (mr->vlkey & ~0xffu) | ((mr->prkey & 0xff) ^ (mr->prkey < 0x100));
	else
		err = pick_key_locked(ctx, mr->prkey, &mr->vrkey, but);
	return err;
}

static int mr_publish_locked(struct migr_obj *obj)
{
	const struct migr_mr_rec *mr = &obj->rec.mr;
	int err;

	err = migr_table_set_lkey(obj->ctx, mr->vlkey >> 8, mr->plkey ^ (mr->vlkey & 0xff));
	if (!err && mr->vrkey)
		err = migr_table_set_rkey(obj->ctx, mr->vrkey >> 8, mr->prkey ^ (mr->vrkey & 0xff));
	return err;
}

static void mr_unpublish_locked(struct migr_obj *obj)
{
	const struct migr_mr_rec *mr = &obj->rec.mr;

	migr_table_set_lkey(obj->ctx, mr->vlkey >> 8, 0);
	if (mr->vrkey)
		migr_table_set_rkey(obj->ctx, mr->vrkey >> 8, 0);
}

static bool mr_names_differ(const struct migr_mr_rec *mr)
{
	return mr->vlkey != mr->plkey || mr->vrkey != mr->prkey;
}

static void mr_hash_locked(struct migr_obj *obj)
{
	const struct migr_mr_rec *mr = &obj->rec.mr;

	hash_add(by_lkey, &obj->by_lkey, migr_name_hash(obj->ctx->id, mr->vlkey >> 8));
	if (mr->vrkey)
		hash_add(by_rkey, &obj->by_rkey, migr_name_hash(obj->ctx->id, mr->vrkey >> 8));
}

static void mr_unhash_locked(struct migr_obj *obj)
{
	unhash(&obj->by_lkey);
	unhash(&obj->by_rkey);
}

static int mr_add_locked(struct migr_obj *obj)
{
	int err = pick_keys_locked(obj->ctx, &obj->rec.mr, NULL);

	if (err)
		return err;
	err = pin_locked(obj, mr_names_differ(&obj->rec.mr));
	if (err)
		return err;
	err = mr_publish_locked(obj);
	if (err) {
		mr_unpublish_locked(obj);
		pin_locked(obj, false);
		return err;
	}
	mr_hash_locked(obj);
	return 0;
}

/* Gives @obj names; on failure it has those it had. */
static int mr_set_names_locked(struct migr_obj *obj, u32 vlkey, u32 vrkey)
{
	struct migr_mr_rec *mr = &obj->rec.mr;
	u32 old_vlkey = mr->vlkey, old_vrkey = mr->vrkey;
	int err;

	mr_unhash_locked(obj);
	mr_unpublish_locked(obj);
	mr->vlkey = vlkey;
	mr->vrkey = vrkey;
	err = mr_publish_locked(obj);
	if (!err)
		err = pin_locked(obj, mr_names_differ(mr));
	if (err) {
		mr_unpublish_locked(obj);
		mr->vlkey = old_vlkey;
		mr->vrkey = old_vrkey;
		mr_publish_locked(obj);
	}
	mr_hash_locked(obj);
	return err;
}

/* rereg_mr gave the MR other keys: new numbers, so new names, as at birth. */
int migr_mr_rename_locked(struct migr_obj *obj, u32 plkey, u32 prkey)
{
	struct migr_mr_rec *mr = &obj->rec.mr;
	int err;

	if (mr->plkey == plkey && mr->prkey == prkey)
		return 0;
	mr_unhash_locked(obj);
	mr_unpublish_locked(obj);
	mr->plkey = plkey;
	mr->prkey = prkey;
	obj->bound = false;
	err = pick_keys_locked(obj->ctx, mr, NULL);
	if (!err)
		err = pin_locked(obj, mr_names_differ(mr));
	if (!err)
		err = mr_publish_locked(obj);	/* ENOMEM: can be done again by itself */
	mr_hash_locked(obj);
	return err;
}

/*
 * A name that was asked for stays with who asked (EEXIST); one that was only
 * chosen at birth gives way, and its MR gets another. So the order in which a
 * restored process binds its MRs does not matter.
 */
static int make_way_locked(struct migr_obj *obj, u32 index)
{
	struct migr_obj *holder = mr_by_index_locked(obj->ctx, index);

	if (!holder || holder == obj)
		return 0;
	if (holder->dying)
		return -EBUSY;	/* it may stay */
	return holder->bound ? -EEXIST : 0;
}

/* Makes @index free for @obj, which will have both indices of @wanted. */
static int move_away_locked(struct migr_obj *obj, u32 index, const struct migr_mr_rec *wanted)
{
	struct migr_obj *holder = mr_by_index_locked(obj->ctx, index);
	struct migr_mr_rec names;
	int err;

	if (!holder || holder == obj)
		return 0;
	names = holder->rec.mr;
	err = pick_keys_locked(obj->ctx, &names, wanted);
	return err ?: mr_set_names_locked(holder, names.vlkey, names.vrkey);
}

static int bind_mr_locked(struct migr_ctx *ctx, u32 handle, u32 vlkey, u32 vrkey)
{
	const struct migr_mr_rec wanted = { .vlkey = vlkey, .vrkey = vrkey };
	struct migr_obj *obj;
	int err;

	obj = migr_obj_by_handle_locked(ctx, MIGR_OBJ_MR, handle);
	if (!obj)
		return -ENOENT;
	if (!obj->rec.mr.prkey && vrkey)
		return -EINVAL;	/* no remote access to name */
	err = make_way_locked(obj, vlkey >> 8);
	if (!err && vrkey)
		err = make_way_locked(obj, vrkey >> 8);
	if (!err)
		err = move_away_locked(obj, vlkey >> 8, &wanted);
	if (!err && vrkey)
		err = move_away_locked(obj, vrkey >> 8, &wanted);
	if (!err)
		err = mr_set_names_locked(obj, vlkey, vrkey);
	if (!err) {
		obj->bound = true;
		trace_migr_mr_bind(obj);
	}
	ctx->gen++;
	return err;
}

int migr_bind_mr(struct migr_ctx *ctx, u32 handle, u32 vlkey, u32 vrkey)
{
	struct migr_missing missing;
	int err;

	if (!(vlkey >> 8) || (vrkey && !(vrkey >> 8)))
		return -EINVAL;
	migr_ctx_resolve(ctx);
	do {
		mutex_lock(&migr_lock);
		err = bind_mr_locked(ctx, handle, vlkey, vrkey);
		missing = migr_table_missing_locked(ctx, err);
		mutex_unlock(&migr_lock);
	} while (migr_table_fill(&missing));
	return err;
}

/* ---- for the record ------------------------------------------------------ */

int migr_names_add_locked(struct migr_obj *obj)
{
	switch (obj->type) {
	case MIGR_OBJ_QP:
		return qp_add_locked(obj);
	case MIGR_OBJ_MR:
		return mr_add_locked(obj);
	default:
		return 0;
	}
}

int migr_names_publish_locked(struct migr_obj *obj)
{
	switch (obj->type) {
	case MIGR_OBJ_QP:
		return qp_publish_locked(obj);
	case MIGR_OBJ_MR:
		return mr_publish_locked(obj);
	default:
		return 0;
	}
}

/* The number may be somebody else's as soon as the driver is called. */
void migr_names_hide_locked(struct migr_obj *obj)
{
	if (obj->type == MIGR_OBJ_QP)
		migr_table_set_qpn(obj->ctx, obj->rec.qp.pqpn, 0);
	else if (obj->type == MIGR_OBJ_MR)
		mr_unpublish_locked(obj);
}

void migr_names_show_locked(struct migr_obj *obj)
{
	if (migr_names_publish_locked(obj))
		pr_warn_ratelimited("context %u: no memory to publish a name again\n", obj->ctx->id);
}

void migr_names_del_locked(struct migr_obj *obj)
{
	unhash(&obj->by_vqpn);
	unhash(&obj->by_pqpn);
	mr_unhash_locked(obj);
	pin_locked(obj, false);
}

void migr_names_exit(void)
{
	xa_destroy(&reserved);
}
