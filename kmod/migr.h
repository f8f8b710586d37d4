/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Inside migr.ko.
 *
 *   device.c    puts our functions in front of an ib_device's ops, and takes
 *               them away again
 *   ucontext.c mr.c cq.c qp.c srq.c other.c
 *               those functions, a file per kind of object: call the driver,
 *               then remember
 *   record.c    what is remembered: contexts and their objects
 *   names.c     virtual numbers: who has which
 *   table.c     the two arrays user space reads
 *   chardev.c   /dev/migr       netlink.c   family "migr"
 *   moves.c     what mremap() moves counts as written
 *
 * One mutex, migr_lock, covers the record, the names and writing the tables. It
 * is never held over a call into a driver, nor while user memory is touched.
 * What a wrapper needs to know without it, whether an object is ours at all, is
 * answered under RCU: kernel users destroy address handles in atomic context.
 */
#ifndef MIGR_H
#define MIGR_H

#include <linux/delay.h>
#include <linux/hashtable.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/nsproxy.h>
#include <linux/pid.h>
#include <linux/pid_namespace.h>
#include <linux/srcu.h>
#include <linux/user_namespace.h>
#include <linux/xarray.h>
#include <net/net_namespace.h>
#include <rdma/ib_verbs.h>
#include <rdma/uverbs_ioctl.h>

#include <migr.h>

#undef pr_fmt
#define pr_fmt(fmt) "migr: " fmt

struct file;
struct vm_area_struct;

enum migr_table { MIGR_TABLE_QPN, MIGR_TABLE_KEY, MIGR_NR_TABLES };

/* Nobody waits under migr_lock for memory: what is not there at once is made without it, and the call made again. */
#define MIGR_GFP_LOCKED ((GFP_KERNEL & ~__GFP_DIRECT_RECLAIM) | __GFP_NOWARN)

/* A page of a table that could not be had under migr_lock. */
struct migr_missing {
	struct file *file;	/* NULL: none */
	pgoff_t index;
};

/* A user context (an open uverbs file with a context) and what was made in it. */
struct migr_ctx {
	struct kref ref;
	struct hlist_node by_uctx;
	u32 id;
	struct ib_ucontext *uctx;	/* NULL: it is gone */
	void *ufile;			/* what its files have as private_data */
	struct ib_device *ibdev;	/* valid while uctx is */
	struct pid *tgid;
	struct user_namespace *user_ns;
	u64 netns;			/* cookie of its network namespace, which no other ever gets; 0: none, so the host's only */
	char comm[TASK_COMM_LEN];
	char ibdev_name[MIGR_IBDEV_NAME_MAX];
	u32 num_comp_vectors;
	bool leaving;			/* its device's ops are not ours any more: nobody tells us what is destroyed */
	u32 flags;			/* MIGR_CTX_* */
	u32 nr_files;			/* attached /dev/migr files */
	struct xarray objs;		/* by order of creation */
	unsigned long next_seq;
	u32 next_channel;
	u32 gen;			/* counts changes, for dumps */
	u32 nr[__MIGR_OBJ_MAX];
	u64 mr_bytes;
	struct file *table[MIGR_NR_TABLES];	/* NULL until attached; then for good */
	bool published;			/* all objects are in them */
	unsigned long publish_next;	/* until then: those before are */
	struct migr_missing missing;	/* migr_lock; what the last store() lacked */
};

struct migr_obj {
	struct hlist_node by_ptr;	/* RCU */
	struct hlist_node by_handle;
	struct hlist_node by_vqpn, by_pqpn;	/* QP */
	struct hlist_node by_lkey, by_rkey;	/* MR; by virtual index */
	struct hlist_node by_channel;	/* CQ */
	struct rcu_head rcu;
	struct migr_ctx *ctx;
	void *ptr;			/* the ib_* object */
	u32 type;			/* enum migr_obj_type */
	bool dying;			/* the driver is destroying it */
	bool bound;			/* has a name that was asked for */
	bool pinned;			/* holds the module: virtual != physical */
	bool replaces;			/* MR: has the handle of the one that rereg_mr replaced by it */
	u32 ever_given;			/* QP: as its attr_mask, and before the last RESET */
	unsigned long seq;
	void *channel_key;		/* CQ: identity of its completion channel */
	union {
		struct migr_pd_rec pd;
		struct migr_mr_rec mr;
		struct migr_cq_rec cq;
		struct migr_qp_rec qp;
		struct migr_srq_rec srq;
		struct migr_other_rec other;
	} rec;
	u32 resp_len;
	void *resp;			/* the driver's answer to create */
};

/* An ib_device whose ops are ours. */
struct migr_dev {
	struct ib_device *ibdev;
	bool leaving;			/* migr_lock; as in its contexts */
	struct srcu_struct inside;	/* wrappers; a call that hangs in one driver must not keep another's device */
	struct ib_device_ops orig;
};

extern struct mutex migr_lock;

/* device.c */
extern atomic_t migr_nr_dev;
int migr_device_init(void);
void migr_device_exit(void);
struct migr_dev *migr_dev_of(struct ib_device *ibdev);

/* A build for tests/kselftest/linger.c: one process is slow where a wrapper is not in its section, and then in it. */
#ifdef MIGR_TEST_LINGER
struct migr_linger {
	unsigned int tgid, before_ms, after_ms, came;
};

extern struct migr_linger migr_linger;

static inline unsigned int migr_linger_ms(const unsigned int *ms)
{
	if (task_tgid_nr(current) != READ_ONCE(migr_linger.tgid))
		return 0;
	WRITE_ONCE(migr_linger.came, 1);
	return READ_ONCE(*ms);
}

#define MIGR_LINGER_MS(which) migr_linger_ms(&migr_linger.which)
#else
#define MIGR_LINGER_MS(which) 0u
#endif

/* Every wrapper is one such section, and uses its device's struct only within. Nothing may sleep before it. */
static inline struct migr_dev *migr_enter(struct ib_device *ibdev, int *idx)
{
	struct migr_dev *md = migr_dev_of(ibdev);
	unsigned int ms = MIGR_LINGER_MS(before_ms);

	if (ms)
		mdelay(ms);
	*idx = srcu_read_lock(&md->inside);
	return md;
}

static inline void migr_leave(struct migr_dev *md, int idx)
{
	unsigned int ms = MIGR_LINGER_MS(after_ms);

	if (ms)
		msleep(ms);
	srcu_read_unlock(&md->inside, idx);
	if (ms)
		mdelay(ms);
}

/* ucontext.c, mr.c, cq.c, qp.c, srq.c, other.c: what they put in place; the rest is NULL. */
extern const struct ib_device_ops migr_ucontext_ops, migr_mr_ops, migr_cq_ops, migr_qp_ops,
	migr_srq_ops, migr_other_ops;

/* record.c */
void migr_record_exit(void);
int migr_ctx_new(struct ib_ucontext *uctx, struct pid *tgid, const char *comm,
		 struct user_namespace *user_ns, u64 netns, u32 flags);
void migr_ctx_gone(struct ib_ucontext *uctx);
void migr_ctx_leave_device(struct migr_dev *md);
void migr_ctx_gone_device(struct ib_device *ibdev);
void migr_ctx_rename_device(struct ib_device *ibdev);
struct migr_ctx *migr_ctx_get(u32 id);
struct migr_ctx *migr_ctx_get_next(u32 *id);
struct migr_ctx *migr_ctx_get_by_ufile(const void *private_data);
void migr_ctx_put(struct migr_ctx *ctx);
bool migr_ctx_is_there_locked(const struct migr_ctx *ctx);
int migr_ctx_attach(struct migr_ctx *ctx);
void migr_ctx_detach(struct migr_ctx *ctx);
void migr_ctx_resolve(struct migr_ctx *ctx);
void migr_record_count(u32 *nr_ctx, u32 *nr_obj);

struct migr_obj *migr_obj_alloc(u32 type);
void migr_obj_free(struct migr_obj *obj);
void migr_obj_take_resp(struct migr_obj *obj, const struct ib_udata *udata);
int migr_obj_add(struct migr_obj *obj, void *ptr, struct ib_ucontext *uctx);
struct migr_obj *migr_obj_begin_destroy(const void *ptr, u32 type);
void migr_obj_end_destroy(struct migr_obj *obj, int err);
struct migr_obj *migr_obj_find_locked(const void *ptr, u32 type);
struct migr_obj *migr_obj_by_handle_locked(struct migr_ctx *ctx, u32 type, u32 handle);
bool migr_obj_is_ours(const void *ptr, u32 type);
bool migr_obj_resolve_locked(struct migr_obj *obj);
bool migr_obj_refresh_locked(struct migr_obj *obj);
u32 migr_handle(const void *uobject);

/* names.c */
void migr_names_init(void);
u64 migr_name_hash(u32 ctx_id, u32 number);
int migr_names_add_locked(struct migr_obj *obj);
void migr_names_hide_locked(struct migr_obj *obj);
void migr_names_show_locked(struct migr_obj *obj);
void migr_names_del_locked(struct migr_obj *obj);
int migr_names_publish_locked(struct migr_obj *obj);
int migr_mr_rename_locked(struct migr_obj *obj, u32 plkey, u32 prkey);
int migr_bind_qp(struct migr_ctx *ctx, u32 vqpn, u32 pqpn);
int migr_qp_stands(struct migr_ctx *ctx, u32 pqpn, u32 state);
int migr_bind_mr(struct migr_ctx *ctx, u32 handle, u32 vlkey, u32 vrkey);
int migr_qpn_reserve(u32 vqpn);
int migr_qpn_release(u32 vqpn);
u32 migr_nr_reserved(void);
void migr_names_exit(void);

/* table.c */
int migr_table_make(struct file **made);
void migr_table_put(struct file **files);
void migr_table_install_locked(struct migr_ctx *ctx, struct file **made);
int migr_table_set_qpn(struct migr_ctx *ctx, u32 pqpn, u32 entry);
int migr_table_set_lkey(struct migr_ctx *ctx, u32 index, u32 entry);
int migr_table_set_rkey(struct migr_ctx *ctx, u32 index, u32 entry);
struct migr_missing migr_table_missing_locked(struct migr_ctx *ctx, int err);
bool migr_table_fill(const struct migr_missing *missing);
int migr_table_mmap(struct migr_ctx *ctx, struct vm_area_struct *vma);

/* moves.c */
void migr_moves_init(void);
void migr_moves_exit(void);
bool migr_moves_marked(void);

/* chardev.c, netlink.c */
int migr_chardev_init(void);
void migr_chardev_exit(void);
int migr_netlink_init(void);
void migr_netlink_exit(void);
#define MIGR_NO_QPN U32_MAX	/* the event is not one of a QP */
void migr_event(enum migr_event event, struct migr_ctx *ctx, u32 vqpn, u32 pqpn);

/* The number of its process in @ns; 0: not seen there, or it has ended, and the number may be another's by now. */
static inline u32 migr_owner_locked(const struct migr_ctx *ctx, struct pid_namespace *ns)
{
	u32 nr;

	lockdep_assert_held(&migr_lock);	/* the owner changes with ATTACH */
	rcu_read_lock();
	nr = ctx->tgid && pid_has_task(ctx->tgid, PIDTYPE_TGID) ? pid_nr_ns(ctx->tgid, ns) : 0;
	rcu_read_unlock();
	return nr;
}

static inline u64 migr_current_netns(void)
{
	return current->nsproxy ? current->nsproxy->net_ns->net_cookie : 0;
}

static inline struct ib_ucontext *migr_uctx_of(struct ib_udata *udata)
{
	return container_of(udata, struct uverbs_attr_bundle, driver_udata)->context;
}

#endif
