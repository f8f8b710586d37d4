// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Binding gives an MR the keys it was born with, in whatever order it is done. */
#include "migr_test.h"

#include <errno.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const struct migr_key_entry *keys;
static int fd;

static int bind_mr(struct ibv_mr *mr, uint32_t vlkey, uint32_t vrkey)
{
	struct migr_ioc_bind_mr arg = { mr->handle, vlkey, vrkey, 0 };

	return ioctl(fd, MIGR_IOC_BIND_MR, &arg);
}

static struct migr_ioc_query_mr query(struct ibv_mr *mr)
{
	struct migr_ioc_query_mr q = { .handle = mr->handle };

	need(!ioctl(fd, MIGR_IOC_QUERY_MR, &q), "QUERY_MR");
	return q;
}

static uint32_t physical_lkey(uint32_t v)
{
	return keys[v >> 8].lkey ^ (v & 0xff);
}

static uint32_t physical_rkey(uint32_t v)
{
	return keys[v >> 8].rkey ^ (v & 0xff);
}

static struct ibv_mr *reg(struct side *s)
{
	struct ibv_mr *mr = ibv_reg_mr(s->pd, s->buf, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);

	need(mr, "reg_mr");
	return mr;
}

/* Whether a memory window is in @mr from now on, so that the driver will not deregister it. */
static bool bind_window(struct side *s, struct ibv_mw *mw, struct ibv_mr *mr)
{
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED,
				    .bind_info = { .mr = mr, .addr = (uintptr_t)mr->addr, .length = 4096,
						   .mw_access_flags = IBV_ACCESS_REMOTE_READ } };
	uint64_t end = now_ms() + 5000;
	struct ibv_wc wc;
	int n;

	if (ibv_bind_mw(s->qp, mw, &bind))
		return false;
	while (!(n = ibv_poll_cq(s->cq, 1, &wc)) && now_ms() < end)
		;
	return n == 1 && wc.status == IBV_WC_SUCCESS;
}

static struct ibv_mr *windowed;
static volatile bool stop;

static void *refused(void *arg)
{
	uintptr_t n = 0;

	(void)arg;
	while (!stop && ibv_dereg_mr(windowed))
		n++;
	return (void *)n;
}

/* @c was born when @free, which it would be called, was taken by @a: who asks for both of its names gets both. */
static void two_names_at_once(struct ibv_mr *a, struct ibv_mr *c, uint32_t free)
{
	uint32_t name = query(c).vlkey;
	struct migr_ioc_query_mr q;

	check(!bind_mr(a, 0x5a5a5a01, 0x5a5a5a01), "the name that it was not given at birth is free");
	check(!bind_mr(a, name, free), "another MR asks for that and for the one that it has");
	q = query(c);
	check(q.vlkey >> 8 != name >> 8 && q.vlkey >> 8 != free >> 8, "it has neither");
	check_eq(physical_lkey(q.vlkey), c->lkey, "but a third one, that translates");
	check_eq(physical_rkey(q.vrkey), c->rkey, "for remote access too");
	check_eq(physical_lkey(name), a->lkey, "those of the other one translate: its lkey");
	check_eq(physical_rkey(free), a->rkey, "its rkey");
	check(!bind_mr(a, free, free), "and it has one again");
}

/* A driver may refuse to destroy: until it has answered, nobody else gets the name. */
static void refused_destroy(struct side *s, struct ibv_mr *other)
{
	struct ibv_mw *mw = ibv_alloc_mw(s->pd, IBV_MW_TYPE_1);
	struct migr_ioc_query_mr q;
	pthread_t thread;
	int i, bad = 0;
	void *n;

	windowed = ibv_reg_mr(s->pd, s->buf, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND);
	if (!mw || !windowed || !bind_window(s, mw, windowed)) {
		printf("# memory windows: not with this driver\n");
		if (windowed)
			ibv_dereg_mr(windowed);
		if (mw)
			ibv_dealloc_mw(mw);
		return;
	}
	need(!bind_mr(windowed, 0x66666601, 0x66666601), "bind");
	need(!pthread_create(&thread, NULL, refused, NULL), "a thread");
	for (i = 0; i < 20000; i++)
		bad += bind_mr(other, 0x66666602, 0x66666602) != -1 || (errno != EEXIST && errno != EBUSY);
	stop = true;
	pthread_join(thread, &n);
	printf("# %lu refused\n", (unsigned long)n);
	check_eq(bad, 0, "EEXIST or EBUSY while the driver refuses to destroy the holder");
	q = query(windowed);
	check(q.vlkey == 0x66666601 && q.vrkey == 0x66666601, "it has its names still");
	check_eq(physical_lkey(0x66666601), windowed->lkey, "and they translate");
	check_eq(physical_rkey(0x66666601), windowed->rkey, "both");
	need(!ibv_dealloc_mw(mw), "dealloc_mw");
	check(!ibv_dereg_mr(windowed), "without its window it goes");
	check(!bind_mr(other, 0x66666602, 0x66666602), "and its name can be given");
}

int main(void)
{
	struct migr_ioc_query_mr q;
	struct migr_ioc_bind_mr bad;
	struct ibv_mr *a, *b, *c, *local;
	struct side s;
	uint32_t free_key;

	fd = migr_open();
	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, NULL), "attach");
	keys = map_key_table(fd);
	a = reg(&s);
	b = reg(&s);

	q = query(a);
	check_eq(q.plkey, a->lkey, "physical lkey");
	check_eq(q.prkey, a->rkey, "physical rkey");
	check_eq(q.vlkey, a->lkey, "virtual lkey equal at birth");
	check_eq(q.vrkey, a->rkey, "virtual rkey equal at birth");

	check(!bind_mr(a, 0xabcdef12, 0xabcdef12), "bind free keys");
	check_eq(physical_lkey(0xabcdef12), a->lkey, "the lkey translates");
	check_eq(physical_rkey(0xabcdef12), a->rkey, "the rkey translates");
	check(physical_rkey(0xabcdef13) != a->rkey, "a wrong tag does not");
	check_eq(keys[a->lkey >> 8].lkey, 0, "the name it was born with is gone");

	/* b has a chosen name; a asks for it; then b for a's old one */
	check(!bind_mr(a, b->lkey, b->rkey), "ask for a name that another has from birth");
	check_eq(physical_lkey(b->lkey), a->lkey, "it is a's now");
	q = query(b);
	check(q.vlkey != b->lkey && q.vlkey >> 8 != 0, "b has another");
	check_eq(physical_lkey(q.vlkey), b->lkey, "that translates");
	check_eq(physical_rkey(q.vrkey), b->rkey, "for remote access too");
	check(!bind_mr(b, a->lkey, a->rkey), "b asks for a's: they have changed names");
	check_eq(physical_lkey(a->lkey), b->lkey, "and translate crosswise");
	check_eq(physical_lkey(b->lkey), a->lkey, "both");
	check_errno(bind_mr(a, a->lkey, a->rkey), EEXIST, "a name that was asked for stays");
	check_eq(physical_lkey(a->lkey), b->lkey, "and nothing has changed");
	check_eq(query(a).vlkey, b->lkey, "for either");

	/* the next physical key is held as a name: another at birth */
	free_key = b->lkey + 0x100;
	check(!bind_mr(a, free_key, free_key), "take the index that comes next");
	c = reg(&s);
	if (c->lkey >> 8 == free_key >> 8)
		check(query(c).vlkey != c->lkey, "a new MR of a held index gets another name");
	else
		printf("# the driver gave 0x%x, not index 0x%x\n", c->lkey, free_key >> 8);
	check_eq(physical_lkey(query(c).vlkey), c->lkey, "it translates");
	check_eq(physical_lkey(free_key), a->lkey, "and the holder's still does");
	if (c->lkey >> 8 == free_key >> 8)
		two_names_at_once(a, c, free_key);

	local = ibv_reg_mr(s.pd, s.buf, 4096, IBV_ACCESS_LOCAL_WRITE);
	need(local, "reg_mr");
	if (!query(local).prkey)
		check_errno(bind_mr(local, 0x777700, 0x777700), EINVAL, "an rkey for an MR without one");
	check(!bind_mr(local, 0x77770001, 0), "an lkey alone");
	check_eq(query(local).vrkey, 0, "no rkey then");

	check_errno(bind_mr(a, 0x12, 0x12), EINVAL, "index 0");
	bad = (struct migr_ioc_bind_mr){ s.qp->handle, 0x500, 0x500, 0 };
	check_errno(ioctl(fd, MIGR_IOC_BIND_MR, &bad), ENOENT, "the handle of a QP");
	bad = (struct migr_ioc_bind_mr){ 123456, 0x500, 0x500, 0 };
	check_errno(ioctl(fd, MIGR_IOC_BIND_MR, &bad), ENOENT, "no such handle");
	bad = (struct migr_ioc_bind_mr){ a->handle, 0x500, 0x500, 1 };
	check_errno(ioctl(fd, MIGR_IOC_BIND_MR, &bad), EINVAL, "a reserved field that is not 0");

	need(!ibv_dereg_mr(a), "dereg_mr");
	check_eq(keys[free_key >> 8].lkey, 0, "deregistered: the name is gone");
	check_eq(keys[free_key >> 8].rkey, 0, "for remote access too");
	check(!bind_mr(c, free_key, free_key), "and can be given again");
	connect_qp(&s, s.qp, &s, s.qp->qp_num);
	refused_destroy(&s, b);
	ibv_dereg_mr(b);
	ibv_dereg_mr(c);
	ibv_dereg_mr(local);
	side_close(&s);
	close(fd);
	return finish();
}
