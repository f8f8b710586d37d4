// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* A reserved number is nobody's at birth, and holds the module. */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/netlink.h>

static struct obj_list objs;

int main(void)
{
	struct migr_info before, info;
	struct ibv_qp *qp;
	struct side s;
	uint32_t next, i;
	struct obj *o;

	if (genl_info(&before))
		skip("no netlink family \"migr\"");
	check_eq(before.abi_version, MIGR_ABI_VERSION, "the ABI's version");
	check(before.nr_dev > 0, "a device has our ops");
	side_open(&s);
	next = s.qp->qp_num + 1;
	for (i = 0; i < 16; i++)
		need(!genl_reserve(next + i), "reserve");
	genl_info(&info);
	check_eq(info.nr_reserved, before.nr_reserved + 16, "they are counted");
	check_eq(info.nr_ctx, before.nr_ctx + 1, "so are contexts");
	check_eq(info.nr_obj, before.nr_obj + 4, "and objects");
	check_eq(genl_reserve(next), (uint64_t)-EEXIST, "reserved already");
	check_errno(syscall(SYS_delete_module, "migr", O_NONBLOCK), EWOULDBLOCK, "a reservation holds the module");

	qp = make_qp(&s);
	need(qp && !genl_objs(ctx_of_pid(getpid()), &objs), "create_qp");
	o = find_obj(&objs, MIGR_OBJ_QP, qp->handle);
	if (qp->qp_num >= next && qp->qp_num < next + 16)
		check(o->rec.qp.vqpn < next || o->rec.qp.vqpn >= next + 16, "a QP of a reserved number gets another name");
	else
		printf("# the driver gave 0x%x, none of the reserved\n", qp->qp_num);
	ibv_destroy_qp(qp);

	for (i = 0; i < 16; i++)
		need(!genl_release(next + i), "release");
	check_eq(genl_release(next), (uint64_t)-ENOENT, "released already");
	genl_info(&info);
	check_eq(info.nr_reserved, before.nr_reserved, "none is left");
	check_eq(genl_reserve(0x1000000), (uint64_t)-ERANGE, "wider than 24 bits");
	check_eq(genl_raw(MIGR_CMD_QPN_RESERVE, 0, 0, 0), (uint64_t)-EINVAL, "without a number");
	check_eq(genl_raw(MIGR_CMD_QPN_RESERVE, 0, MIGR_A_CTX_ID, 5), (uint64_t)-EINVAL, "an attribute it does not take");
	check_eq(genl_raw(MIGR_CMD_OBJ_GET, NLM_F_DUMP, 0, 0), (uint64_t)-EINVAL, "a dump of no context");
	check_eq(genl_objs_of(ctx_of_pid(getpid()), __MIGR_OBJ_MAX, &objs), (uint64_t)-ERANGE, "a dump of no type");
	check_eq(genl_raw(MIGR_CMD_EVENT, 0, 0, 0), (uint64_t)-EOPNOTSUPP, "what only the kernel says");
	side_close(&s);
	return finish();
}
