// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Many objects: a dump in many parts is whole and in order; names can all be exchanged. */
#include "migr_test.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { NR_MR = 1000, NR_QP = 200 };

static struct ibv_mr *mr[NR_MR];
static struct ibv_qp *qp[NR_QP];
static struct obj_list objs;

int main(void)
{
	const struct migr_key_entry *keys;
	int fd, i, bad, seen;
	const uint32_t *qpns;
	uint64_t start;
	struct side s;
	uint32_t id;

	fd = migr_open();
	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	qpns = map_qpn_table(fd);
	keys = map_key_table(fd);
	for (i = 0; i < NR_MR; i++)
		need((mr[i] = ibv_reg_mr(s.pd, s.buf, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)),
		     "MR %d", i);
	for (i = 0; i < NR_QP; i++)
		need((qp[i] = make_qp(&s)), "QP %d", i);

	start = now_ms();
	need(!genl_objs(id, &objs), "dump");
	printf("# a dump of %d objects took %llu ms\n", objs.n, (unsigned long long)(now_ms() - start));
	check_eq(objs.n, NR_MR + NR_QP + 4, "every object is in the dump");
	for (i = seen = bad = 0; i < objs.n; i++) {
		if (objs.obj[i].type != MIGR_OBJ_QP || objs.obj[i].rec.qp.handle == s.qp->handle)
			continue;
		bad += seen >= NR_QP || objs.obj[i].rec.qp.handle != qp[seen]->handle;
		seen++;
	}
	check(seen == NR_QP && !bad, "QPs come in the order of their creation");

	/* Each MR gets the keys of the one before it, each QP the number of the one after. */
	start = now_ms();
	for (i = bad = 0; i < NR_MR; i++) {
		struct ibv_mr *from = mr[(i + NR_MR - 1) % NR_MR];
		struct migr_ioc_bind_mr arg = { mr[i]->handle, from->lkey, from->rkey, 0 };

		bad += ioctl(fd, MIGR_IOC_BIND_MR, &arg) != 0;
	}
	check_eq(bad, 0, "all keys are exchanged in a ring");
	for (i = 0; i < NR_QP; i++) {
		struct migr_ioc_bind_qp arg = { qp[(i + 1) % NR_QP]->qp_num, qp[i]->qp_num };

		bad += ioctl(fd, MIGR_IOC_BIND_QP, &arg) != 0;
	}
	check_eq(bad, 0, "all numbers are exchanged in a ring");
	printf("# %d bindings took %llu ms\n", NR_MR + NR_QP, (unsigned long long)(now_ms() - start));
	for (i = bad = 0; i < NR_MR; i++) {
		struct ibv_mr *from = mr[(i + NR_MR - 1) % NR_MR];

		bad += (keys[from->lkey >> 8].lkey ^ (from->lkey & 0xff)) != mr[i]->lkey;
		bad += (keys[from->rkey >> 8].rkey ^ (from->rkey & 0xff)) != mr[i]->rkey;
	}
	check_eq(bad, 0, "every key translates to its MR");
	for (i = bad = 0; i < NR_QP; i++)
		bad += qpns[qp[i]->qp_num] != (qp[(i + 1) % NR_QP]->qp_num | MIGR_QPN_VALID);
	check_eq(bad, 0, "every number translates to its name");
	need(!genl_objs(id, &objs), "dump");
	for (i = bad = 0; i < objs.n; i++)
		bad += objs.obj[i].type == MIGR_OBJ_QP && objs.obj[i].rec.qp.flags;
	check_eq(bad, 0, "and nobody is a former holder");

	/* The process ends with all of it: the next test finds nothing left. */
	fflush(stdout);
	return finish();
}
