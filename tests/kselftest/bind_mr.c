// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Binding gives an MR the keys it was born with, in whatever order it is done. */
#include "migr_test.h"

#include <errno.h>
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
	ibv_dereg_mr(b);
	ibv_dereg_mr(c);
	ibv_dereg_mr(local);
	side_close(&s);
	close(fd);
	return finish();
}
