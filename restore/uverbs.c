// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Raw uverbs commands: create the objects of a record, one by one. */
#include <errno.h>
#include <fcntl.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "internal.h"

#define DRIVER_IDS 64	/* enum rdma_driver_id has about twenty */

/* enum ib_qp_attr_mask: kernel ABI by rdma-core's use, in no uapi header. */
enum {
	QP_STATE = 1 << 0,
	QP_ACCESS_FLAGS = 1 << 3,
	QP_PKEY_INDEX = 1 << 4,
	QP_PORT = 1 << 5,
	QP_QKEY = 1 << 6,
	QP_AV = 1 << 7,
	QP_PATH_MTU = 1 << 8,
	QP_TIMEOUT = 1 << 9,
	QP_RETRY_CNT = 1 << 10,
	QP_RNR_RETRY = 1 << 11,
	QP_RQ_PSN = 1 << 12,
	QP_MAX_QP_RD_ATOMIC = 1 << 13,
	QP_MIN_RNR_TIMER = 1 << 15,
	QP_SQ_PSN = 1 << 16,
	QP_MAX_DEST_RD_ATOMIC = 1 << 17,
	QP_DEST_QPN = 1 << 20,
};

static void attr_in(struct ib_uverbs_attr *a, uint16_t id, const void *data, uint16_t len)
{
	*a = (struct ib_uverbs_attr){ .attr_id = id, .len = len, .flags = UVERBS_ATTR_F_MANDATORY };
	if (len <= sizeof(a->data))
		memcpy(&a->data, data, len);	/* small values travel inline */
	else
		a->data = (uintptr_t)data;
}

static void attr_out(struct ib_uverbs_attr *a, uint16_t id, void *data, uint16_t len, uint16_t flags)
{
	*a = (struct ib_uverbs_attr){ .attr_id = id, .len = len, .flags = flags, .data = (uintptr_t)data };
}

int rst_uverbs(const struct migr_rst_context *ctx, struct rst_cmd *cmd)
{
	struct {
		struct ib_uverbs_ioctl_hdr hdr;
		struct ib_uverbs_attr attrs[4];
	} c;
	uint64_t number = cmd->cmd;
	int n = 0;

	memset(&c, 0, sizeof(c));
	attr_in(&c.attrs[n++], UVERBS_ATTR_CORE_IN, cmd->in, cmd->in_len);
	attr_in(&c.attrs[n++], UVERBS_ATTR_WRITE_CMD, &number, sizeof(number));
	if (cmd->out_len)
		attr_out(&c.attrs[n++], UVERBS_ATTR_CORE_OUT, cmd->out, cmd->out_len, 0);
	if (cmd->driver) {
		/* Drivers fill what fits; zeros beyond it tell nothing was written there. */
		memset(cmd->driver->data, 0, sizeof(cmd->driver->data));
		attr_out(&c.attrs[n++], UVERBS_ATTR_UHW_OUT, cmd->driver->data, cmd->driver->len, 0);
	}
	c.hdr.length = sizeof(c.hdr) + n * sizeof(c.attrs[0]);
	c.hdr.object_id = UVERBS_OBJECT_DEVICE;
	c.hdr.method_id = UVERBS_METHOD_INVOKE_WRITE;
	c.hdr.num_attrs = n;
	c.hdr.driver_id = ctx->driver_id;
	return ioctl(ctx->cmd_fd, RDMA_VERBS_IOCTL, &c) ? -errno : 0;
}

int rst_uverbs_gids(const struct migr_rst_context *ctx, struct ib_uverbs_gid_entry *out, uint32_t max)
{
	struct {
		struct ib_uverbs_ioctl_hdr hdr;
		struct ib_uverbs_attr attrs[4];
	} c;
	uint64_t entry_size = sizeof(*out), n = 0;
	uint32_t flags = 0;

	memset(&c, 0, sizeof(c));
	attr_in(&c.attrs[0], UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, &entry_size, sizeof(entry_size));
	attr_in(&c.attrs[1], UVERBS_ATTR_QUERY_GID_TABLE_FLAGS, &flags, sizeof(flags));
	attr_out(&c.attrs[2], UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, out, max * sizeof(*out),
		 UVERBS_ATTR_F_MANDATORY);
	attr_out(&c.attrs[3], UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &n, sizeof(n), UVERBS_ATTR_F_MANDATORY);
	c.hdr.length = sizeof(c);
	c.hdr.object_id = UVERBS_OBJECT_DEVICE;
	c.hdr.method_id = UVERBS_METHOD_QUERY_GID_TABLE;
	c.hdr.num_attrs = 4;
	c.hdr.driver_id = ctx->driver_id;
	return ioctl(ctx->cmd_fd, RDMA_VERBS_IOCTL, &c) ? -errno : (int)n;
}

/*
 * Which driver this is. The kernel wants to hear it with each command, and answers
 * EINVAL to a wrong one before anything else; an object that no driver has gives
 * EPROTONOSUPPORT to the right one.
 */
static int find_driver(struct migr_rst_context *ctx)
{
	for (uint32_t id = 0; id < DRIVER_IDS; id++) {
		struct ib_uverbs_ioctl_hdr hdr = {
			.length = sizeof(hdr), .object_id = 0xffe, .method_id = 0xffe, .driver_id = id,
		};

		if (ioctl(ctx->cmd_fd, RDMA_VERBS_IOCTL, &hdr) && errno != EINVAL) {
			if (errno != EPROTONOSUPPORT)
				return -errno;
			ctx->driver_id = id;
			return 0;
		}
	}
	return -EOPNOTSUPP;
}

int rst_fd_lift(int fd, int floor)
{
	int up;

	if (fd >= floor) {
		fcntl(fd, F_SETFD, FD_CLOEXEC);
		return fd;
	}
	up = fcntl(fd, F_DUPFD_CLOEXEC, floor);
	if (up < 0)
		up = -errno;
	close(fd);
	return up;
}

const char *migr_rst_hint(int errnum)
{
	return errnum == EAGAIN ? " (does the container's cgroup limit RDMA objects: rdma.max?)" : "";
}

int migr_rst_context_create(struct migr_rst_context *c, struct migr_rst_err *err)
{
	struct ib_uverbs_get_context in = { 0 };
	struct ib_uverbs_get_context_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_GET_CONTEXT, &in, sizeof(in), &out, sizeof(out), NULL };
	int ret = find_driver(c);

	if (!ret)
		ret = rst_uverbs(c, &cmd);
	if (ret)
		return rst_fail(err, -ret, "cannot make an RDMA context on %s: %s%s", c->new_ibdev, strerror(-ret),
				migr_rst_hint(-ret));
	ret = rst_fd_lift(out.async_fd, c->fd_floor);
	if (ret < 0)
		return rst_fail(err, -ret, "cannot move the async fd of %s to number %d or above: %s", c->new_ibdev,
				c->fd_floor, strerror(-ret));
	c->async_fd = ret;
	c->new_comp_vectors = out.num_comp_vectors;
	return 0;
}

int migr_rst_channel_create(struct migr_rst_context *c, struct migr_rst_channel *ch, struct migr_rst_err *err)
{
	struct ib_uverbs_create_comp_channel in = { 0 };
	struct ib_uverbs_create_comp_channel_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, &in, sizeof(in), &out, sizeof(out), NULL };
	int ret = rst_uverbs(c, &cmd);

	if (!ret) {
		ret = rst_fd_lift(out.fd, c->fd_floor);
		if (ret >= 0) {
			ch->fd = ret;
			return 0;
		}
	}
	return rst_fail(err, -ret, "cannot make completion channel %d on %s: %s", ch->fd_number, c->new_ibdev,
			strerror(-ret));
}

int migr_rst_pd_create(struct migr_rst_context *c, struct migr_rst_pd *pd, struct migr_rst_err *err)
{
	struct ib_uverbs_alloc_pd in = { 0 };
	struct ib_uverbs_alloc_pd_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_ALLOC_PD, &in, sizeof(in), &out, sizeof(out), NULL };
	int ret = rst_uverbs(c, &cmd);

	if (ret)
		return rst_fail(err, -ret, "cannot make PD %u on %s: %s%s", pd->rec.handle, c->new_ibdev, strerror(-ret),
				migr_rst_hint(-ret));
	pd->new_handle = out.pd_handle;
	return 0;
}

int migr_rst_cq_create(struct migr_rst_context *c, struct migr_rst_cq *cq, int channel_fd, struct migr_rst_err *err)
{
	struct ib_uverbs_ex_create_cq in = {
		.user_handle = cq->rec.user_handle,
		.cqe = cq->rec.cqe,
		/* This host may have fewer vectors; which one it was is no promise. */
		.comp_vector = c->new_comp_vectors ? cq->rec.comp_vector % c->new_comp_vectors : 0,
		.comp_channel = channel_fd,
		.flags = cq->rec.flags,
	};
	struct ib_uverbs_ex_create_cq_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_CREATE_CQ | IB_USER_VERBS_CMD_FLAG_EXTENDED, &in, sizeof(in), &out,
			       sizeof(out), NULL };
	int ret;

	cq->new_resp.len = cq->resp.len;	/* the same driver answers as many bytes */
	if (cq->resp.len)
		cmd.driver = &cq->new_resp;
	ret = rst_uverbs(c, &cmd);
	if (ret)
		return rst_fail(err, -ret, "cannot make CQ %u (%u entries) on %s: %s%s", cq->rec.handle, cq->rec.cqe,
				c->new_ibdev, strerror(-ret), migr_rst_hint(-ret));
	cq->new_handle = out.base.cq_handle;
	return 0;
}

int migr_rst_srq_create(struct migr_rst_context *c, struct migr_rst_srq *srq, struct migr_rst_err *err)
{
	const struct migr_srq_rec *r = &srq->rec;
	const struct migr_rst_pd *pd = rst_find_pd(c, r->pd_handle);

	if (!pd)
		return rst_fail(err, EBADMSG, "SRQ %u: its PD %u is not on record", r->handle, r->pd_handle);

	struct ib_uverbs_create_srq in = {
		.user_handle = r->user_handle,
		.pd_handle = pd->new_handle,
		.max_wr = r->max_wr,
		.max_sge = r->max_sge,
	};
	struct ib_uverbs_create_srq_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_CREATE_SRQ, &in, sizeof(in), &out, sizeof(out), NULL };
	int ret;

	srq->new_resp.len = srq->resp.len;	/* the same driver answers as many bytes */
	if (srq->resp.len)
		cmd.driver = &srq->new_resp;
	ret = rst_uverbs(c, &cmd);
	if (ret)
		return rst_fail(err, -ret, "cannot make SRQ %u (%u receives) on %s: %s%s", r->handle, r->max_wr,
				c->new_ibdev, strerror(-ret), migr_rst_hint(-ret));
	srq->new_handle = out.srq_handle;
	return 0;
}

int migr_rst_qp_create(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err)
{
	const struct migr_qp_rec *r = &qp->rec;
	const struct migr_rst_pd *pd = rst_find_pd(c, r->pd_handle);
	const struct migr_rst_cq *send_cq = rst_find_cq(c, r->send_cq_handle);
	const struct migr_rst_cq *recv_cq = rst_find_cq(c, r->recv_cq_handle);

	const struct migr_rst_srq *srq = rst_find_srq(c, r->srq_handle);
	int has_srq = r->srq_handle != MIGR_NO_HANDLE;

	if (!pd || !send_cq || !recv_cq || (has_srq && !srq))
		return rst_fail(err, EBADMSG, "QP %#x: its PD, SRQ or a CQ is not on record", r->vqpn);

	struct ib_uverbs_ex_create_qp in = {
		.user_handle = r->user_handle,
		.pd_handle = pd->new_handle,
		.send_cq_handle = send_cq->new_handle,
		.recv_cq_handle = recv_cq->new_handle,
		.srq_handle = has_srq ? srq->new_handle : 0,
		.is_srq = has_srq,
		.max_send_wr = r->max_send_wr,
		.max_recv_wr = r->max_recv_wr,
		.max_send_sge = r->max_send_sge,
		.max_recv_sge = r->max_recv_sge,
		.max_inline_data = r->max_inline_data,
		.sq_sig_all = !!r->sq_sig_all,
		.qp_type = r->qp_type,
		.create_flags = r->create_flags,
	};
	struct ib_uverbs_ex_create_qp_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_CREATE_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED, &in, sizeof(in), &out,
			       sizeof(out), NULL };
	int ret;

	qp->new_resp.len = qp->resp.len;	/* the same driver answers as many bytes */
	if (qp->resp.len)
		cmd.driver = &qp->new_resp;
	ret = rst_uverbs(c, &cmd);

	if (ret)
		return rst_fail(err, -ret, "cannot make QP %#x (%u send, %u receive WRs) on %s: %s%s", r->vqpn,
				r->max_send_wr, r->max_recv_wr, c->new_ibdev, strerror(-ret), migr_rst_hint(-ret));
	qp->new_handle = out.base.qp_handle;
	qp->new_pqpn = out.base.qpn & MIGR_QPN_MASK;
	qp->new_state = STATE_RESET;
	return 0;
}

/* ---- modify ---------------------------------------------------------------- */

static int modify(struct migr_rst_context *c, struct migr_rst_qp *qp, struct ib_uverbs_modify_qp *in,
		  uint32_t state, uint32_t mask, struct migr_rst_err *err)
{
	static const char *const names[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };
	enum { TRIES = 8 };	/* of a second each: the kernel asks for the other end's address once, and that may be lost */
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_MODIFY_QP, in, sizeof(*in), NULL, 0, NULL };
	int ret, i;

	in->qp_handle = qp->new_handle;
	in->qp_state = state;
	in->attr_mask = QP_STATE | mask;
	ret = rst_uverbs(c, &cmd);
	for (i = 1; ret == -ETIMEDOUT && i < TRIES; i++)
		ret = rst_uverbs(c, &cmd);
	if (ret)
		return rst_fail(err, -ret, "QP %#x (here %#x) on %s does not go to %s: %s", qp->rec.vqpn, qp->new_pqpn,
				c->new_ibdev, names[state], strerror(-ret));
	qp->new_state = state;
	return 0;
}

static int is_datagram(const struct migr_rst_qp *qp)
{
	return qp->rec.qp_type == IB_UVERBS_QPT_UD;
}

static int is_reliable(const struct migr_rst_qp *qp)
{
	return qp->rec.qp_type == IB_UVERBS_QPT_RC;
}

int migr_rst_qp_init(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err)
{
	const struct migr_qp_rec *r = &qp->rec;
	struct ib_uverbs_modify_qp in = {
		.pkey_index = r->pkey_index,
		.port_num = r->port_num ? r->port_num : 1,
		.qkey = r->qkey,
		.qp_access_flags = r->access_flags,
	};

	return modify(c, qp, &in, STATE_INIT,
		      QP_PKEY_INDEX | QP_PORT | (is_datagram(qp) ? QP_QKEY : QP_ACCESS_FLAGS), err);
}

static int to_rts(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err)
{
	const struct migr_qp_rec *r = &qp->rec;
	struct ib_uverbs_modify_qp in = {
		.sq_psn = qp->new_psn,
		.timeout = r->timeout,
		.retry_cnt = r->retry_cnt,
		.rnr_retry = r->rnr_retry,
		.max_rd_atomic = r->max_rd_atomic,
	};

	return modify(c, qp, &in, STATE_RTS,
		      QP_SQ_PSN | (is_reliable(qp) ? QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC : 0),
		      err);
}

/* Unconnected types need no destination to be ready. */
int rst_qp_datagram_ready(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err)
{
	struct ib_uverbs_modify_qp in = { 0 };
	int ret = modify(c, qp, &in, STATE_RTR, 0, err);

	return ret || qp->rec.qp_state < STATE_RTS ? ret : to_rts(c, qp, err);
}

int rst_qp_error(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err)
{
	struct ib_uverbs_modify_qp in = { 0 };

	return modify(c, qp, &in, STATE_ERR, 0, err);
}

int migr_rst_qp_connect(struct migr_rst_context *c, struct migr_rst_qp *qp, const struct migr_rst_dest *dest,
			struct migr_rst_err *err)
{
	const struct migr_qp_rec *r = &qp->rec;
	const struct migr_ah_attr *ah = &r->ah;
	struct ib_uverbs_modify_qp in = {
		.dest_qp_num = dest->qpn,
		.rq_psn = dest->psn,
		.path_mtu = r->path_mtu,
		.max_dest_rd_atomic = r->max_dest_rd_atomic,
		.min_rnr_timer = r->min_rnr_timer,
		.dest = {
			.flow_label = ah->flow_label,
			.sgid_index = qp->new_sgid_index,
			/* A record of a path without GRH has no hop limit; here the path is routed. */
			.hop_limit = ah->hop_limit ? ah->hop_limit : 64,
			.traffic_class = ah->traffic_class,
			.sl = ah->sl,
			.src_path_bits = ah->src_path_bits,
			.static_rate = ah->static_rate,
			.is_global = 1,
			.port_num = r->port_num ? r->port_num : 1,
		},
	};
	int ret;

	if (dest->qpn > MIGR_QPN_MASK || dest->psn > MIGR_QPN_MASK)
		return rst_fail(err, ERANGE, "QP %#x: destination %#x or PSN %#x is wider than 24 bits", r->vqpn,
				dest->qpn, dest->psn);
	if (is_datagram(qp))
		return rst_fail(err, EINVAL, "QP %#x is unconnected: it has no destination", r->vqpn);
	if (qp->new_state != STATE_INIT)
		return rst_fail(err, EBUSY, "QP %#x is not in INIT (state %u): it was never connected, or is already",
				r->vqpn, qp->new_state);
	memcpy(in.dest.dgid, dest->dgid, 16);
	ret = modify(c, qp, &in, STATE_RTR,
		     QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN |
			     (is_reliable(qp) ? QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER : 0),
		     err);
	/* One that the application had only brought to RTR goes on from there. */
	return ret || r->qp_state == STATE_RTR ? ret : to_rts(c, qp, err);
}
