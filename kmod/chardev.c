// SPDX-License-Identifier: GPL-2.0
/* /dev/migr: a process and its own contexts. */
#include <linux/compat.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "migr.h"

/* An open file. Its context is set once, by ATTACH. */
struct migr_file {
	struct mutex attach_lock;
	struct migr_ctx *ctx;
};

static struct migr_ctx *file_ctx(const struct file *file)
{
	const struct migr_file *f = file->private_data;

	return smp_load_acquire(&f->ctx);	/* pairs with ioc_attach() */
}

static int migr_open(struct inode *inode, struct file *file)
{
	struct migr_file *f = kzalloc(sizeof(*f), GFP_KERNEL_ACCOUNT);

	if (!f)
		return -ENOMEM;
	mutex_init(&f->attach_lock);
	file->private_data = f;
	return nonseekable_open(inode, file);
}

static int migr_release(struct inode *inode, struct file *file)
{
	struct migr_file *f = file->private_data;

	if (f->ctx)
		migr_ctx_detach(f->ctx);
	mutex_destroy(&f->attach_lock);
	kfree(f);
	return 0;
}

static int migr_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct migr_ctx *ctx = file_ctx(file);

	return ctx ? migr_table_mmap(ctx, vma) : -ENOENT;
}

static int attach(struct migr_file *f, struct migr_ioc_attach *arg)
{
	struct migr_ctx *ctx;
	struct file *uverbs;
	int err = 0;

	uverbs = fget(arg->uverbs_fd);
	if (!uverbs)
		return -EBADF;
	ctx = migr_ctx_get_by_ufile(uverbs->private_data);
	if (!ctx) {
		err = -ENOENT;
		goto out_fput;
	}
	mutex_lock(&f->attach_lock);
	if (f->ctx)
		err = -EBUSY;
	if (!err)
		err = migr_ctx_attach(ctx);
	if (!err)
		smp_store_release(&f->ctx, ctx);	/* pairs with file_ctx() */
	mutex_unlock(&f->attach_lock);
	if (err) {
		migr_ctx_put(ctx);
	} else {
		arg->ctx_id = ctx->id;
		migr_event(MIGR_EV_ATTACH, ctx, MIGR_NO_QPN, MIGR_NO_QPN);
	}
out_fput:
	fput(uverbs);
	return err;
}

static int ioc_attach(struct migr_file *f, struct migr_ioc_attach __user *uarg)
{
	struct migr_ioc_attach arg;
	int err;

	if (copy_from_user(&arg, uarg, sizeof(arg)))
		return -EFAULT;
	if (arg.abi_version != MIGR_ABI_VERSION)
		err = -EPROTONOSUPPORT;
	else if (arg.flags)
		err = -EOPNOTSUPP;
	else
		err = attach(f, &arg);
	arg.abi_version = MIGR_ABI_VERSION;
	if (copy_to_user(uarg, &arg, sizeof(arg)))
		return -EFAULT;
	return err;
}

static int ioc_bind_qp(struct migr_ctx *ctx, const void __user *uarg)
{
	struct migr_ioc_bind_qp arg;

	if (copy_from_user(&arg, uarg, sizeof(arg)))
		return -EFAULT;
	return migr_bind_qp(ctx, arg.vqpn, arg.pqpn);
}

static int ioc_qp_stands(struct migr_ctx *ctx, const void __user *uarg)
{
	struct migr_ioc_qp_stands arg;

	if (copy_from_user(&arg, uarg, sizeof(arg)))
		return -EFAULT;
	return migr_qp_stands(ctx, arg.pqpn, arg.qp_state);
}

static int ioc_bind_mr(struct migr_ctx *ctx, const void __user *uarg)
{
	struct migr_ioc_bind_mr arg;

	if (copy_from_user(&arg, uarg, sizeof(arg)))
		return -EFAULT;
	if (arg.reserved)
		return -EINVAL;
	return migr_bind_mr(ctx, arg.handle, arg.vlkey, arg.vrkey);
}

static int ioc_query_mr(struct migr_ctx *ctx, struct migr_ioc_query_mr __user *uarg)
{
	struct migr_ioc_query_mr arg;
	struct migr_obj *obj;

	if (copy_from_user(&arg, uarg, sizeof(arg)))
		return -EFAULT;
	if (arg.reserved)
		return -EINVAL;
	migr_ctx_resolve(ctx);
	mutex_lock(&migr_lock);
	obj = migr_obj_by_handle_locked(ctx, MIGR_OBJ_MR, arg.handle);
	if (obj) {
		arg.vlkey = obj->rec.mr.vlkey;
		arg.vrkey = obj->rec.mr.vrkey;
		arg.plkey = obj->rec.mr.plkey;
		arg.prkey = obj->rec.mr.prkey;
	}
	mutex_unlock(&migr_lock);
	if (!obj)
		return -ENOENT;
	return copy_to_user(uarg, &arg, sizeof(arg)) ? -EFAULT : 0;
}

static int ioc_driver_resp(struct migr_ctx *ctx, struct migr_ioc_driver_resp __user *uarg)
{
	struct migr_ioc_driver_resp arg;
	u8 resp[MIGR_DRIVER_RESP_MAX];
	struct migr_obj *obj;
	u32 room;

	if (copy_from_user(&arg, uarg, sizeof(arg)))
		return -EFAULT;
	if (arg.reserved)
		return -EINVAL;
	if (arg.obj_type != MIGR_OBJ_CQ && arg.obj_type != MIGR_OBJ_QP && arg.obj_type != MIGR_OBJ_SRQ)
		return -EOPNOTSUPP;
	room = arg.len;
	migr_ctx_resolve(ctx);
	mutex_lock(&migr_lock);
	obj = migr_obj_by_handle_locked(ctx, arg.obj_type, arg.handle);
	if (obj) {
		arg.len = obj->resp_len;
		if (obj->resp_len)
			memcpy(resp, obj->resp, obj->resp_len);
	}
	mutex_unlock(&migr_lock);
	if (!obj)
		return -ENOENT;
	if (copy_to_user(u64_to_user_ptr(arg.buf), resp, min(room, arg.len)))
		return -EFAULT;
	return copy_to_user(uarg, &arg, sizeof(arg)) ? -EFAULT : 0;
}

static long migr_ioctl(struct file *file, unsigned int cmd, unsigned long uarg)
{
	void __user *p = (void __user *)uarg;
	struct migr_ctx *ctx;

	if (cmd == MIGR_IOC_ATTACH)
		return ioc_attach(file->private_data, p);
	ctx = file_ctx(file);
	switch (cmd) {
	case MIGR_IOC_BIND_QP:
		return ctx ? ioc_bind_qp(ctx, p) : -ENOENT;
	case MIGR_IOC_BIND_MR:
		return ctx ? ioc_bind_mr(ctx, p) : -ENOENT;
	case MIGR_IOC_QUERY_MR:
		return ctx ? ioc_query_mr(ctx, p) : -ENOENT;
	case MIGR_IOC_DRIVER_RESP:
		return ctx ? ioc_driver_resp(ctx, p) : -ENOENT;
	case MIGR_IOC_QP_STANDS:
		return ctx ? ioc_qp_stands(ctx, p) : -ENOENT;
	default:
		return -ENOTTY;
	}
}

static const struct file_operations migr_fops = {
	.owner = THIS_MODULE,
	.open = migr_open,
	.release = migr_release,
	.mmap = migr_mmap,
	.unlocked_ioctl = migr_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice migr_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = MIGR_DEV_NAME,
	.mode = 0666,
	.fops = &migr_fops,
};

int migr_chardev_init(void)
{
	return misc_register(&migr_misc);
}

void migr_chardev_exit(void)
{
	misc_deregister(&migr_misc);
}
