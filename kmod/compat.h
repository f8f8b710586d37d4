/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The one file that knows of differences between kernels. Stable kernels take
 * back changes of newer ones, so nothing here asks for a version number: types
 * are compared, and Kbuild looks into headers.
 */
#ifndef MIGR_COMPAT_H
#define MIGR_COMPAT_H

#include <linux/build_bug.h>
#include <linux/mm.h>
#include <rdma/ib_verbs.h>
#include <rdma/uverbs_ioctl.h>

/* create_cq and reg_user_mr_dmabuf: the last argument was udata, then a bundle. */
#define MIGR_SAME_OP(op, type)						\
	__builtin_types_compatible_p(					\
		typeof(((struct ib_device_ops *)NULL)->op), type)

#define MIGR_CREATE_CQ_HAS_BUNDLE					\
	MIGR_SAME_OP(create_cq, int (*)(struct ib_cq *,			\
					const struct ib_cq_init_attr *,	\
					struct uverbs_attr_bundle *))

#define MIGR_DMABUF_HAS_BUNDLE						\
	MIGR_SAME_OP(reg_user_mr_dmabuf,				\
		     struct ib_mr *(*)(struct ib_pd *, u64, u64, u64, int, int, \
				       struct uverbs_attr_bundle *))

typedef typeof(__builtin_choose_expr(MIGR_CREATE_CQ_HAS_BUNDLE,
				     (struct uverbs_attr_bundle *)NULL,
				     (struct ib_udata *)NULL)) migr_cq_arg_t;
typedef typeof(__builtin_choose_expr(MIGR_DMABUF_HAS_BUNDLE,
				     (struct uverbs_attr_bundle *)NULL,
				     (struct ib_udata *)NULL)) migr_dmabuf_arg_t;

/* The udata of a call is the head of its bundle, whichever is given to the op. */
static_assert(offsetof(struct uverbs_attr_bundle, driver_udata) == 0);

static inline struct ib_udata *migr_arg_udata(void *udata_or_bundle)
{
	return udata_or_bundle;
}

#ifndef MIGR_HAVE_VM_FLAGS_MOD
static inline void vm_flags_mod(struct vm_area_struct *vma, vm_flags_t set,
				vm_flags_t clear)
{
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
}

#define __vm_flags_mod vm_flags_mod	/* there: without taking the lock of the mapping */
#endif

#endif
