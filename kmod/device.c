// SPDX-License-Identifier: GPL-2.0
/*
 * The ib_client that puts our functions in front of a device's ops.
 *
 * Taking them away: a function pointer is put back only if it is still ours.
 * Then a task may be (a) about to enter a wrapper, having loaded the pointer,
 * (b) inside, asleep in the driver, (c) about to return. synchronize_rcu_tasks()
 * waits for (a), synchronize_srcu() for (b), synchronize_rcu_tasks() for (c).
 * tests/kselftest/linger.c has somebody in each of them.
 */
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <rdma/restrack.h>

#include "compat.h"
#include "migr.h"

atomic_t migr_nr_dev = ATOMIC_INIT(0);

#ifdef MIGR_TEST_LINGER
struct migr_linger migr_linger;
module_param_named(tgid, migr_linger.tgid, uint, 0600);
module_param_named(before_ms, migr_linger.before_ms, uint, 0600);
module_param_named(after_ms, migr_linger.after_ms, uint, 0600);
module_param_named(came, migr_linger.came, uint, 0400);
#endif

static struct ib_client migr_client;

struct migr_dev *migr_dev_of(struct ib_device *ibdev)
{
	smp_rmb();	/* who was called as a wrapper finds it: pairs with the smp_wmb() in migr_add() */
	return ib_get_client_data(ibdev, &migr_client);
}

/*
 * Every op that one of our files has, with the file's table it stands in: those
 * that make a record, and those that change or end one, which let through what
 * is not recorded.
 */
#define MIGR_FOR_EACH_CREATOR(X)					\
	X(migr_ucontext_ops, alloc_pd)					\
	X(migr_mr_ops, reg_user_mr)					\
	X(migr_mr_ops, reg_user_mr_dmabuf)				\
	X(migr_mr_ops, reg_dm_mr)					\
	X(migr_mr_ops, rereg_user_mr)					\
	X(migr_cq_ops, create_cq)					\
	X(migr_qp_ops, create_qp)					\
	X(migr_srq_ops, create_srq)					\
	X(migr_other_ops, alloc_mw)					\
	X(migr_other_ops, create_user_ah)				\
	X(migr_other_ops, alloc_xrcd)					\
	X(migr_other_ops, alloc_dm)

#define MIGR_FOR_EACH_OTHER(X)						\
	X(migr_ucontext_ops, dealloc_ucontext)				\
	X(migr_ucontext_ops, dealloc_pd)				\
	X(migr_mr_ops, dereg_mr)					\
	X(migr_cq_ops, resize_cq)					\
	X(migr_cq_ops, destroy_cq)					\
	X(migr_qp_ops, modify_qp)					\
	X(migr_qp_ops, destroy_qp)					\
	X(migr_srq_ops, modify_srq)					\
	X(migr_srq_ops, destroy_srq)					\
	X(migr_other_ops, dealloc_mw)					\
	X(migr_other_ops, destroy_ah)					\
	X(migr_other_ops, dealloc_xrcd)					\
	X(migr_other_ops, dealloc_dm)

/*
 * uverbs has looked at which ops are NULL: those stay NULL. Creators come last:
 * whatever is recorded, we see the end of it. That goes for contexts, too: any
 * creator records one that is older than the module. Contexts last of all: of one
 * that is not marked as older, everything that is made is recorded.
 */
static void ops_install(struct migr_dev *md)
{
	struct ib_device_ops *ops = &md->ibdev->ops;

#define INSTALL(table, op)						\
	if (ops->op)							\
		WRITE_ONCE(ops->op, table.op);
	MIGR_FOR_EACH_OTHER(INSTALL)
	smp_wmb();	/* pairs with uverbs's locks between making an object and ending it */
	MIGR_FOR_EACH_CREATOR(INSTALL)
	smp_wmb();	/* pairs with those between making a context and an object in it */
	INSTALL(migr_ucontext_ops, alloc_ucontext)
#undef INSTALL
}

static void ops_restore(struct migr_dev *md)
{
	struct ib_device_ops *ops = &md->ibdev->ops;

#define RESTORE(table, op)						\
	if (ops->op == table.op)					\
		WRITE_ONCE(ops->op, md->orig.op);			\
	else if (ops->op != md->orig.op)				\
		pr_err("%s: somebody else has replaced " #op "; it is left alone\n", \
		       md->ibdev->name);	/* dev_name() is freed by a rename */
	RESTORE(migr_ucontext_ops, alloc_ucontext)
	MIGR_FOR_EACH_CREATOR(RESTORE)
	MIGR_FOR_EACH_OTHER(RESTORE)
#undef RESTORE
}

/*
 * Contexts that are older than the module get a record, marked as incomplete:
 * what was made in them before is not known. restrack has them by number; it
 * counts up from 0 and wraps, so the highest number is not known either, but
 * how many there are is.
 *
 * We run as who loads the module or makes the device, whose namespaces are not
 * theirs: until its process attaches, such a context is for the host alone to see.
 */
#define MIGR_HYDRATE_IDS (1u << 20)

static void hydrate(struct ib_device *ibdev)
{
	int left = rdma_restrack_count(ibdev, RDMA_RESTRACK_CTX, true);
	struct rdma_restrack_entry *res;
	struct ib_ucontext *uctx;
	struct pid *tgid;
	u32 id;

	for (id = 0; left > 0 && id < MIGR_HYDRATE_IDS; id++) {
		cond_resched();
		res = rdma_restrack_get_byid(ibdev, RDMA_RESTRACK_CTX, id);
		if (IS_ERR_OR_NULL(res))
			continue;
		left--;
		/* It cannot be deallocated as long as we hold the entry. */
		uctx = container_of(res, struct ib_ucontext, res);
		tgid = res->task ? get_task_pid(res->task, PIDTYPE_TGID) : NULL;
		if (migr_ctx_new(uctx, tgid, res->task ? res->task->comm : "", &init_user_ns, 0,
				 MIGR_CTX_HYDRATED))
			pr_warn("%s: no memory to record a context that exists\n",
				ibdev->name);
		put_pid(tgid);
		rdma_restrack_put(res);
	}
	if (left > 0)
		pr_warn("%s: %d contexts that exist were not found; they are recorded when used\n",
			ibdev->name, left);
}

static int migr_add(struct ib_device *ibdev)
{
	struct migr_dev *md = kzalloc(sizeof(*md), GFP_KERNEL);

	if (!md)
		return -ENOMEM;
	if (init_srcu_struct(&md->inside)) {
		kfree(md);
		return -ENOMEM;
	}
	md->ibdev = ibdev;
	md->orig = ibdev->ops;
	ib_set_client_data(ibdev, &migr_client, md);
	smp_wmb();	/* a wrapper finds its md: pairs with migr_dev_of() */
	ops_install(md);
	atomic_inc(&migr_nr_dev);
	hydrate(ibdev);
	return 0;
}

static void migr_remove(struct ib_device *ibdev, void *client_data)
{
	struct migr_dev *md = client_data;

	migr_ctx_leave_device(md);
	ops_restore(md);
	synchronize_rcu_tasks();
	synchronize_srcu(&md->inside);
	synchronize_rcu_tasks();
	atomic_dec(&migr_nr_dev);
	migr_ctx_gone_device(ibdev);
	cleanup_srcu_struct(&md->inside);
	kfree(md);
}

static void migr_rename(struct ib_device *ibdev, void *client_data)
{
	migr_ctx_rename_device(ibdev);
}

static struct ib_client migr_client = {
	.name = "migr",
	.add = migr_add,
	.remove = migr_remove,
	.rename = migr_rename,
	.no_kverbs_req = 1,
};

int migr_device_init(void)
{
	return ib_register_client(&migr_client);
}

void migr_device_exit(void)
{
	ib_unregister_client(&migr_client);
}
