// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Binding gives a QP the number it had before; the name moves. */
#include "migr_test.h"

#include <errno.h>
#include <sys/ioctl.h>
#include <unistd.h>

static struct obj_list objs;

static int bind_own(int fd, uint32_t vqpn, uint32_t pqpn)
{
	struct migr_ioc_bind_qp arg = { vqpn, pqpn };

	return ioctl(fd, MIGR_IOC_BIND_QP, &arg);
}

static struct migr_qp_rec *rec_of(uint32_t id, struct ibv_qp *qp)
{
	struct obj *o;

	need(!genl_objs(id, &objs), "dump");
	o = find_obj(&objs, MIGR_OBJ_QP, qp->handle);
	need(o, "the QP is in the record");
	return &o->rec.qp;
}

static int stands(int fd, uint32_t pqpn, uint32_t state)
{
	struct migr_ioc_qp_stands arg = { pqpn, state };

	return ioctl(fd, MIGR_IOC_QP_STANDS, &arg);
}

/* A QP that was moved to ERR by others than the application stands in the record as before. */
static void check_stands(struct side *s, int fd, uint32_t id)
{
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR }, reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *qp = make_qp(s);
	uint32_t given;

	need(qp, "create_qp");
	check_errno(stands(fd, qp->qp_num, IBV_QPS_RTS), EINVAL, "one that was just made");
	need(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "modify_qp to INIT");
	need(!ibv_modify_qp(qp, &err, IBV_QP_STATE), "modify_qp to ERR");
	check_errno(stands(fd, qp->qp_num, IBV_QPS_RTS), EINVAL, "one that has never been in RTS");
	need(!ibv_modify_qp(qp, &reset, IBV_QP_STATE), "modify_qp to RESET");
	connect_qp(s, qp, s, qp->qp_num);
	given = rec_of(id, qp)->attr_mask;
	check_errno(stands(fd, qp->qp_num, IBV_QPS_RTR), EBUSY, "one that is in RTS");
	need(!ibv_modify_qp(qp, &err, IBV_QP_STATE), "modify_qp to ERR");
	check_eq(rec_of(id, qp)->qp_state, IBV_QPS_ERR, "the record says ERR");
	check_errno(stands(fd, qp->qp_num, IBV_QPS_INIT), EINVAL, "INIT is no state to stand in");
	check_errno(stands(fd, 0xfffffe, IBV_QPS_RTS), ENOENT, "no such QP");
	check(!stands(fd, qp->qp_num, IBV_QPS_RTS), "it stands in RTS");
	check_eq(rec_of(id, qp)->qp_state, IBV_QPS_RTS, "the record says so");
	check(!stands(fd, qp->qp_num, IBV_QPS_RTS), "and again");
	need(!ibv_modify_qp(qp, &reset, IBV_QP_STATE), "modify_qp to RESET");
	check_eq(rec_of(id, qp)->attr_mask, IBV_QP_STATE, "RESET takes its attributes away");
	need(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "modify_qp to INIT");
	check_eq(rec_of(id, qp)->qp_state, IBV_QPS_INIT, "the record says INIT");
	check(!stands(fd, qp->qp_num, IBV_QPS_RTS), "it stands in RTS after RESET");
	check_eq(rec_of(id, qp)->qp_state, IBV_QPS_RTS, "the record says so");
	check_eq(rec_of(id, qp)->attr_mask, given, "and has all that it had been given");
	check_eq(rec_of(id, qp)->dest_qpn, qp->qp_num, "whom it was connected to");
	need(!ibv_modify_qp(qp, &err, IBV_QP_STATE), "modify_qp to ERR");
	check_eq(rec_of(id, qp)->qp_state, IBV_QPS_ERR, "what comes later counts");
	ibv_destroy_qp(qp);
}

/* Names are of the process: one of its contexts does not give at birth what a QP of another one has. */
static void check_second_context(int fd, struct ibv_qp *holder)
{
	struct ibv_qp *last, *next;
	struct side t;
	uint32_t id;
	int fd2;

	fd2 = migr_open();
	side_open(&t);
	need(!migr_attach(fd2, t.context->cmd_fd, &id), "attach another context");
	last = make_qp(&t);
	need(last, "create_qp");
	check(!bind_own(fd, last->qp_num + 1, holder->qp_num), "take the number that comes next, in the first context");
	next = make_qp(&t);
	need(next, "create_qp");
	if (next->qp_num == last->qp_num + 1)
		check(rec_of(id, next)->vqpn != next->qp_num, "a new QP of the other context gets another name");
	else
		printf("# the driver gave 0x%x, not 0x%x\n", next->qp_num, last->qp_num + 1);
	ibv_destroy_qp(next);
	ibv_destroy_qp(last);
	side_close(&t);
	close(fd2);
}

int main(void)
{
	struct ibv_qp *a, *b, *c;
	const uint32_t *qpns;
	struct side s;
	uint32_t id;
	int fd;

	fd = migr_open();
	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	qpns = map_qpn_table(fd);
	a = s.qp;
	b = make_qp(&s);
	need(b, "create_qp");

	check(!bind_own(fd, 0x123456, a->qp_num), "bind a free number");
	check_eq(qpns[a->qp_num], 0x123456 | MIGR_QPN_VALID, "the table shows it");
	check_eq(rec_of(id, a)->vqpn, 0x123456, "so does the record");
	check_eq(rec_of(id, a)->pqpn, a->qp_num, "the physical number stays");

	check(!genl_bind_qp(id, 0x123456, b->qp_num), "the name moves to another QP, by netlink");
	check_eq(qpns[b->qp_num], 0x123456 | MIGR_QPN_VALID, "the new holder is translated");
	check_eq(qpns[a->qp_num], 0x123456 | MIGR_QPN_VALID, "the former one still is");
	check_eq(rec_of(id, a)->flags, MIGR_QP_FORMER, "and is marked as former");
	check_eq(rec_of(id, b)->flags, 0, "the new holder is not");
	check(!bind_own(fd, 0x123456, a->qp_num), "it moves back");
	check_eq(rec_of(id, b)->flags, MIGR_QP_FORMER, "and the other is former");
	need(!ibv_destroy_qp(b), "destroy_qp");
	b = make_qp(&s);
	check(!bind_own(fd, a->qp_num, b->qp_num), "a's physical number as b's name");
	check_eq(qpns[b->qp_num], a->qp_num | MIGR_QPN_VALID, "the table shows it");

	/* a number that is taken as a name is not given at birth */
	check(!bind_own(fd, b->qp_num + 1, b->qp_num), "take the number that comes next");
	c = make_qp(&s);
	need(c, "create_qp");
	if (c->qp_num == b->qp_num + 1)
		check(rec_of(id, c)->vqpn != c->qp_num, "a new QP of a taken number gets another name");
	else
		printf("# the driver gave 0x%x, not 0x%x\n", c->qp_num, b->qp_num + 1);
	check_eq(qpns[c->qp_num], rec_of(id, c)->vqpn | MIGR_QPN_VALID, "the table agrees with the record");
	check_second_context(fd, b);

	check_errno(bind_own(fd, 0x1000000, a->qp_num), ERANGE, "a number wider than 24 bits");
	check_errno(bind_own(fd, 5, 0x1000000), ERANGE, "a physical number wider than 24 bits");
	check_errno(bind_own(fd, 1, a->qp_num), EINVAL, "QP 1");
	check_errno(bind_own(fd, 5, 0xfffffe), ENOENT, "no such QP");
	check_eq(genl_bind_qp(id, 0x1000000, a->qp_num), (uint64_t)-ERANGE, "netlink: wider than 24 bits");
	check_eq(genl_bind_qp(id, 5, 0xfffffe), (uint64_t)-ENOENT, "netlink: no such QP");
	check_eq(genl_bind_qp(id + 1000, 5, a->qp_num), (uint64_t)-ENOENT, "netlink: no such context");
	check_eq(genl_bind_qp(id, 0x77, a->qp_num), 0, "netlink: bind");
	check_eq(rec_of(id, a)->vqpn, 0x77, "the record shows it");

	check_stands(&s, fd, id);
	ibv_destroy_qp(b);
	ibv_destroy_qp(c);
	side_close(&s);
	close(fd);
	return finish();
}
