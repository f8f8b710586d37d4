// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Many objects: a dump in many parts is whole and in order; names can all be exchanged; who attaches late finds all of them in the
 * tables; and whoever chooses names by what the module makes of them keeps nobody waiting.
 */
#include "migr_test.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { NR_MR = 1000, NR_QP = 200, NR_CHAIN = 2000, NR_TIMED = 64, NR_ROUNDS = 7 };

static struct ibv_mr *mr[NR_MR];
static struct ibv_qp *qp[NR_QP];
static struct obj_list objs;

static struct ibv_mr *chain[NR_CHAIN + 1];

static struct ibv_mr *make_mr(struct side *s)
{
	struct ibv_mr *made = ibv_reg_mr(s->pd, s->buf, 4096, IBV_ACCESS_LOCAL_WRITE);

	need(made, "an MR");
	return made;
}

/* As the kernel's hash_long() of context and index, in tables of 4096 chains. */
static uint32_t chain_of(uint32_t ctx, uint32_t index)
{
	return (((uint64_t)ctx << 24 ^ index) * 0x61C8864680B583EBull) >> 52;
}

static uint32_t next_in_chain(uint32_t ctx, uint32_t index)
{
	do
		index++;
	while (chain_of(ctx, index) != chain_of(ctx, 1));
	need(index < MIGR_NR_INDEX, "an index of that chain");
	return index;
}

static bool bind_to(int fd, const struct ibv_mr *to, uint32_t index)
{
	struct migr_ioc_bind_mr arg = { to->handle, index << 8 | 1, 0, 0 };

	return !ioctl(fd, MIGR_IOC_BIND_MR, &arg);
}

/* ns that bindings take, at the best of times */
static uint64_t bindings_take(int fd, const struct ibv_mr *to, uint32_t one, uint32_t other)
{
	uint64_t best = UINT64_MAX;
	struct timespec a, b;
	int round, i;

	for (round = 0; round < NR_ROUNDS; round++) {
		clock_gettime(CLOCK_MONOTONIC, &a);
		for (i = 0; i < NR_TIMED; i++)
			need(bind_to(fd, to, i % 2 ? one : other), "a binding");
		clock_gettime(CLOCK_MONOTONIC, &b);
		uint64_t ns = (b.tv_sec - a.tv_sec) * 1000000000ull + b.tv_nsec - a.tv_nsec;

		if (ns < best)
			best = ns;
	}
	return best;
}

static void late_and_in_one_chain(void)
{
	const struct migr_key_entry *keys;
	uint32_t id, index = 1, one, other;
	uint64_t before, after;
	int fd, i, bad;
	struct side s;

	fd = migr_open();
	side_open(&s);
	for (i = 0; i <= NR_CHAIN; i++)
		chain[i] = make_mr(&s);
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	keys = map_key_table(fd);
	for (i = bad = 0; i <= NR_CHAIN; i++)
		bad += (keys[chain[i]->lkey >> 8].lkey ^ (chain[i]->lkey & 0xff)) != chain[i]->lkey;
	check_eq(bad, 0, "who attaches late finds every key");

	/* The first ones may be in use at birth. */
	for (i = 0; i < 64; i++)
		index = next_in_chain(id, index);
	one = index;
	other = index = next_in_chain(id, index);
	before = bindings_take(fd, chain[NR_CHAIN], one, other);
	for (i = bad = 0; i < NR_CHAIN; i++)
		bad += !bind_to(fd, chain[i], index = next_in_chain(id, index));
	check_eq(bad, 0, "names that would stand in one chain");
	after = bindings_take(fd, chain[NR_CHAIN], one, other);
	printf("# a binding takes %llu ns, with %d of those %llu ns\n", (unsigned long long)before / NR_TIMED, NR_CHAIN,
	       (unsigned long long)after / NR_TIMED);
	check(after < 4 * before, "and a binding takes no longer with them");
}

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

	late_and_in_one_chain();

	/* The process ends with all of it: the next test finds nothing left. */
	fflush(stdout);
	return finish();
}
