// SPDX-License-Identifier: GPL-2.0
/* migr.ko: the names that RDMA applications hold, and the numbers of the NIC. */
#include <linux/module.h>

#define CREATE_TRACE_POINTS
#include "migr_trace.h"

static int __init migr_init(void)
{
	int err;

	migr_names_init();
	migr_moves_init();
	err = migr_netlink_init();
	if (err)
		goto err_moves;
	err = migr_device_init();
	if (err)
		goto err_netlink;
	err = migr_chardev_init();	/* last: it shows what is recorded */
	if (err)
		goto err_device;
	return 0;

err_device:
	migr_device_exit();
err_netlink:
	migr_netlink_exit();
err_moves:
	migr_moves_exit();
	migr_names_exit();
	migr_record_exit();
	return err;
}

/* Nobody is left with virtual names here: each of them holds the module. */
static void __exit migr_exit(void)
{
	migr_chardev_exit();
	migr_device_exit();
	migr_netlink_exit();
	migr_moves_exit();
	WARN_ON(migr_nr_reserved());
	migr_names_exit();
	migr_record_exit();
}

module_init(migr_init);
module_exit(migr_exit);
MODULE_DESCRIPTION("Virtual names for RDMA resources, for live migration and failover");
MODULE_LICENSE("GPL");
MODULE_SOFTDEP("post: ib_uverbs");
