// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Builds all of a context's record in one go, parents first. */
#include <errno.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "internal.h"

static struct migr_rst_channel *channel_by_number(struct migr_rst_context *c, int number)
{
	for (uint32_t i = 0; i < c->nr_channels; i++)
		if (c->channels[i].fd_number == number)
			return &c->channels[i];
	return NULL;
}

/* The described channels of the context, each once. */
static int list_channels(const struct migr_rst_process *p, struct migr_rst_context *c)
{
	free(c->channels);
	c->nr_channels = 0;
	c->channels = calloc(p->nr_fds + 1, sizeof(*c->channels));
	if (!c->channels)
		return -ENOMEM;
	for (uint32_t i = 0; i < p->nr_fds; i++) {
		const struct migr_fd_desc *d = &p->fds[i];

		if (d->kind == MIGR_FD_CHANNEL && d->ctx_id == c->rec.ctx_id && !channel_by_number(c, d->fd))
			c->channels[c->nr_channels++] = (struct migr_rst_channel){ .fd_number = d->fd, .fd = -1 };
	}
	return 0;
}

static int channel_of_cq(const struct migr_rst_process *p, struct migr_rst_context *c, uint32_t cq_handle)
{
	for (uint32_t i = 0; i < p->nr_fds; i++) {
		const struct migr_fd_desc *d = &p->fds[i];

		if (d->kind == MIGR_FD_CHANNEL && d->ctx_id == c->rec.ctx_id && d->cq_handle == cq_handle)
			return channel_by_number(c, d->fd)->fd;
	}
	return -1;
}

static int build_qp(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err)
{
	uint32_t port = qp->rec.port_num ? qp->rec.port_num : 1;
	int ret = migr_rst_qp_create(c, qp, err);

	if (ret)
		return ret;
	if (getrandom(&qp->new_psn, sizeof(qp->new_psn), 0) != sizeof(qp->new_psn))
		return rst_fail(err, EIO, "no random number for the PSN of QP %#x", qp->rec.vqpn);
	if (qp->rec.qp_state == STATE_RTR)
		qp->new_psn = qp->new_pqpn;
	qp->new_psn &= MIGR_QPN_MASK;
	if (qp->rec.flags & MIGR_QP_FORMER)	/* an old path: kept for its rings, never connected */
		return 0;
	ret = migr_rst_gid_find(c, port, &qp->rec.ah, qp->new_sgid, &qp->new_sgid_index, err);
	if (ret)
		return ret;
	if (qp->rec.qp_state == STATE_RESET)
		return 0;
	ret = migr_rst_qp_init(c, qp, err);
	if (!ret && qp->rec.qp_state >= STATE_SQE)	/* it was broken: it stays so */
		return rst_qp_error(c, qp, err);
	if (!ret && qp->rec.qp_type == IB_UVERBS_QPT_UD && qp->rec.qp_state >= STATE_RTR)
		ret = rst_qp_datagram_ready(c, qp, err);
	return ret;
}

static int build(const struct migr_rst_process *p, struct migr_rst_context *c, struct migr_rst_err *err)
{
	int ret = list_channels(p, c);

	if (ret)
		return rst_fail(err, -ret, "no memory");
	ret = migr_rst_context_create(c, err);
	for (uint32_t i = 0; !ret && i < c->nr_channels; i++)
		ret = migr_rst_channel_create(c, &c->channels[i], err);
	for (uint32_t i = 0; !ret && i < c->rec.nr_pd; i++)
		ret = migr_rst_pd_create(c, &c->pds[i], err);
	for (uint32_t i = 0; !ret && i < c->rec.nr_cq; i++)
		ret = migr_rst_cq_create(c, &c->cqs[i], channel_of_cq(p, c, c->cqs[i].rec.handle), err);
	for (uint32_t i = 0; !ret && i < c->rec.nr_srq; i++)
		ret = migr_rst_srq_create(c, &c->srqs[i], err);
	for (uint32_t i = 0; !ret && i < c->rec.nr_qp; i++)
		ret = build_qp(c, &c->qps[i], err);
	return ret;
}

int migr_rst_context_build(const struct migr_rst_process *p, struct migr_rst_context *c, int cmd_fd,
			   struct migr_rst_err *err)
{
	int ret = rst_fd_lift(cmd_fd, c->fd_floor);

	if (ret < 0)
		return rst_fail(err, -ret, "cannot move the uverbs fd to number %d or above: %s", c->fd_floor,
				strerror(-ret));
	c->cmd_fd = ret;
	ret = build(p, c, err);
	if (ret)
		migr_rst_context_release(c);
	return ret;
}

static void drop(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

void migr_rst_context_release(struct migr_rst_context *c)
{
	for (uint32_t i = 0; i < c->nr_channels; i++)
		drop(&c->channels[i].fd);
	drop(&c->async_fd);
	drop(&c->cmd_fd);
}
