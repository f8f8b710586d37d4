// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * ring_app DIR [PAIRS [CONTEXTS [MRS]]]: an RDMA program for checkpoints, without libmigr.
 *
 * In each context two QPs per pair are connected to each other on this host; in
 * rounds, one of them sends a message that the other checks, in both directions.
 * Completions come through a channel. Between rounds nothing is posted or
 * outstanding, so that it can be dumped when it says PAUSED.
 *
 * DIR/state	written by us: RUNNING n, PAUSED n, DONE n or FAILED why
 * DIR/pause	exists: stop between rounds
 * DIR/rebind	written by the test: lines "FD KIND OLD NEW QPN", what migr-restorectl
 *		ready prints. We do what libmigr does: take the new handles, register
 *		the memory that the plugin has not registered ahead. Then it is removed and rounds go on.
 * DIR/ahead	written by us: how many of our MRs the plugin has registered at the last restore
 * DIR/fds	written by us: what libmigr would answer to DESCRIBE, in text
 * DIR/image/	with --record: migr.img, of what we know ourselves, for hosts without migr.ko
 *
 * The rxe provider rings its doorbell by write(), which uverbs refuses in a
 * restored process (other credentials than the opener's): as libmigr does, we send
 * the same command by ioctl.
 */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <rdma/rdma_user_rxe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "migr/ahead.h"
#include "migr/restore.h"

#define MESSAGE 4096
#define DEPTH 4			/* messages of one round and direction */
#define ROUND_LIMIT_MS 20000
#define MAX_RINGS 256
#define MAX_CONTEXTS 4
#define MAX_MRS 4096		/* of all contexts */

struct ring {
	uint64_t addr, bytes, pgoff;
	uint32_t type, handle, which;
};

struct side {
	struct ibv_qp *qp;
	struct ibv_qp_init_attr init;
	uint32_t dest_qpn;
};

struct rdma {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_mr **more;		/* nr_more others, of the same memory */
	struct side *sides;		/* 2 * pairs */
	char *buf;			/* one send and one receive area per side */
	union ibv_gid gid;
	int gid_index;
	uint32_t asked_cqe;
	struct ring rings[MAX_RINGS];
	int nr_rings;
};

static const char *dir;
static int pairs = 1, nr_contexts = 1, nr_more;
static struct rdma all[MAX_CONTEXTS];
static unsigned long rounds;

static void state(const char *what, const char *why)
{
	char path[256], tmp[260];
	FILE *f;

	snprintf(path, sizeof(path), "%s/state", dir);
	snprintf(tmp, sizeof(tmp), "%s.new", path);
	f = fopen(tmp, "w");
	if (!f)
		exit(3);
	fprintf(f, "%s %lu%s%s\n", what, rounds, why ? " " : "", why ? why : "");
	fclose(f);
	rename(tmp, path);
}

static void fail(const char *what)
{
	char why[200];

	snprintf(why, sizeof(why), "%s: %s", what, strerror(errno));
	state("FAILED", why);
	exit(2);
}

static int exists(const char *name)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return access(path, F_OK) == 0;
}

/* Takes the place of libc's, for the provider too (-rdynamic). */
ssize_t write(int fd, const void *buf, size_t n)
{
	for (int i = 0; i < nr_contexts; i++) {
		const struct ib_uverbs_cmd_hdr *hdr = buf;

		if (!all[i].ctx || fd != all[i].ctx->cmd_fd || n < sizeof(*hdr))
			continue;

		struct {
			struct ib_uverbs_ioctl_hdr hdr;
			struct ib_uverbs_attr attrs[3];
		} c = { .hdr = { .length = sizeof(c), .object_id = UVERBS_OBJECT_DEVICE,
				 .method_id = UVERBS_METHOD_INVOKE_WRITE, .num_attrs = 3,
				 .driver_id = RDMA_DRIVER_RXE } };
		const uint64_t *response = (const uint64_t *)(hdr + 1);

		c.attrs[0] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_CORE_IN, .len = n - sizeof(*hdr),
						      .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)(hdr + 1) };
		c.attrs[1] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_WRITE_CMD, .len = 8,
						      .flags = UVERBS_ATTR_F_MANDATORY, .data = hdr->command };
		c.attrs[2] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_CORE_OUT, .len = hdr->out_words * 4,
						      .data = *response };
		return ioctl(fd, RDMA_VERBS_IOCTL, &c) ? -1 : (ssize_t)n;
	}
	return syscall(SYS_write, fd, buf, n);
}

/* ---- what libmigr would know: rings -------------------------------------------- */

/* Mappings of uverbs devices that are not noted yet, by rising offset. */
static int new_mappings(struct rdma *r, struct ring *out, int max)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];
	int n = 0;

	while (f && n < max && fgets(line, sizeof(line), f)) {
		unsigned long from, to;
		uint64_t off;
		int known = 0;

		if (!strstr(line, "/infiniband/uverbs") ||
		    sscanf(line, "%lx-%lx %*s %" SCNx64, &from, &to, &off) != 3)
			continue;
		for (int k = 0; k < nr_contexts; k++)
			for (int i = 0; i < all[k].nr_rings; i++)
				known |= all[k].rings[i].addr == from;
		if (known)
			continue;
		int at = n++;

		while (at && out[at - 1].pgoff > off) {
			out[at] = out[at - 1];
			at--;
		}
		out[at] = (struct ring){ .addr = from, .bytes = to - from, .pgoff = off };
	}
	if (f)
		fclose(f);
	(void)r;
	return n;
}

static void note_ring(struct rdma *r, struct ring *m, uint32_t type, uint32_t handle, uint32_t which)
{
	m->type = type, m->handle = handle, m->which = which;
	r->rings[r->nr_rings++] = *m;
}

static void note_rings(struct rdma *r, uint32_t type, uint32_t handle)
{
	struct ring m[2];
	int n = new_mappings(r, m, 2);

	errno = EPROTO;
	if (n != (type == MIGR_OBJ_CQ ? 1 : 2))
		fail("expected one ring per CQ, two per QP");
	if (type == MIGR_OBJ_CQ)
		return note_ring(r, &m[0], type, handle, 0);
	/* rxe makes the send queue first, so its offset is the lower one. */
	note_ring(r, &m[0], type, handle, 1);
	note_ring(r, &m[1], type, handle, 0);
}

/* ---- set up ---------------------------------------------------------------------- */

static void find_gid(struct rdma *r)
{
	struct ibv_gid_entry e;

	for (r->gid_index = 0; r->gid_index < 16; r->gid_index++)
		if (!ibv_query_gid_ex(r->ctx, 1, r->gid_index, &e, 0) && e.gid_type == IBV_GID_TYPE_ROCE_V2 &&
		    e.gid.raw[10] == 0xff && e.gid.raw[11] == 0xff) {
			r->gid = e.gid;
			return;
		}
	errno = EADDRNOTAVAIL;
	fail("no RoCE v2 GID over IPv4");
}

static void make_qp(struct rdma *r, struct side *s)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

	s->init = (struct ibv_qp_init_attr){
		.send_cq = r->cq, .recv_cq = r->cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 3 * DEPTH, .max_recv_wr = 5 * DEPTH, .max_send_sge = 2, .max_recv_sge = 1 },
	};
	struct ibv_qp_init_attr init = s->init;

	s->qp = ibv_create_qp(r->pd, &init);
	if (!s->qp)
		fail("ibv_create_qp");
	note_rings(r, MIGR_OBJ_QP, s->qp->handle);
	if (ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		fail("QP to INIT");
}

static void connect_qp(struct rdma *r, struct side *s, uint32_t to)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = to, .rq_psn = to & 0xffff,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = r->gid, .sgid_index = r->gid_index, .hop_limit = 64 } },
	};

	s->dest_qpn = to;
	if (ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		fail("QP to RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .sq_psn = s->qp->qp_num & 0xffff, .max_rd_atomic = 1 };
	if (ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		fail("QP to RTS");
}

static size_t buf_bytes(void)
{
	return (size_t)2 * pairs * 2 * MESSAGE * DEPTH;
}

static void set_up(struct rdma *r)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);

	if (!list || !n)
		fail("no RDMA device");
	r->ctx = ibv_open_device(list[0]);
	r->pd = r->ctx ? ibv_alloc_pd(r->ctx) : NULL;
	r->channel = r->pd ? ibv_create_comp_channel(r->ctx) : NULL;
	r->asked_cqe = 4 * DEPTH * pairs + 3;
	r->cq = r->channel ? ibv_create_cq(r->ctx, r->asked_cqe, r, r->channel, 0) : NULL;
	if (!r->cq)
		fail("context, PD, channel or CQ");
	ibv_free_device_list(list);
	note_rings(r, MIGR_OBJ_CQ, r->cq->handle);
	r->buf = aligned_alloc(4096, buf_bytes());
	r->mr = r->buf ? ibv_reg_mr(r->pd, r->buf, buf_bytes(), IBV_ACCESS_LOCAL_WRITE) : NULL;
	if (!r->mr)
		fail("ibv_reg_mr");
	r->more = calloc(nr_more + 1, sizeof(*r->more));
	for (int i = 0; i < nr_more; i++)
		if (!(r->more[i] = ibv_reg_mr(r->pd, r->buf, MESSAGE, IBV_ACCESS_LOCAL_WRITE)))
			fail("ibv_reg_mr");
	find_gid(r);
	r->sides = calloc(2 * pairs, sizeof(*r->sides));
	for (int i = 0; i < 2 * pairs; i++)
		make_qp(r, &r->sides[i]);
	for (int i = 0; i < 2 * pairs; i++)
		connect_qp(r, &r->sides[i], r->sides[i ^ 1].qp->qp_num);
}

/* ---- rounds ----------------------------------------------------------------------- */

static char *area(struct rdma *r, int side, int receive, int k)
{
	return r->buf + ((size_t)(side * 2 + receive) * DEPTH + k) * MESSAGE;
}

static unsigned char pattern(int side, int k, size_t at)
{
	return rounds * 31 + side * 7 + k * 3 + at * 13;
}

static void post(struct rdma *r, int side, int k, int receive)
{
	struct ibv_sge sge = { (uintptr_t)area(r, side, receive, k), MESSAGE, r->mr->lkey };
	uint64_t id = (uint64_t)side << 32 | k << 1 | receive;

	if (receive) {
		struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

		if ((errno = ibv_post_recv(r->sides[side].qp, &wr, &bad)))
			fail("ibv_post_recv");
		return;
	}
	for (size_t i = 0; i < MESSAGE; i++)
		area(r, side, 0, k)[i] = pattern(side, k, i);
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	if ((errno = ibv_post_send(r->sides[side].qp, &wr, &bad)))
		fail("ibv_post_send");
}

static void check_wc(struct rdma *r, const struct ibv_wc *wc)
{
	int side = wc->wr_id >> 32, receive = wc->wr_id & 1, k = (wc->wr_id & 0xffffffff) >> 1;

	errno = EBADMSG;
	if (wc->status != IBV_WC_SUCCESS || side >= 2 * pairs || k >= DEPTH)
		fail(ibv_wc_status_str(wc->status));
	if (wc->qp_num != r->sides[side].qp->qp_num)
		fail("completion of another QP");
	if (!receive)
		return;
	for (size_t i = 0; i < MESSAGE; i++)
		if ((unsigned char)area(r, side, 1, k)[i] != pattern(side ^ 1, k, i))
			fail("wrong byte received");
}

static void one_round(struct rdma *r)
{
	int want = 2 * pairs * DEPTH * 2, got = 0;

	rounds++;
	memset(r->buf, 0xee, buf_bytes());
	if ((errno = ibv_req_notify_cq(r->cq, 0)))
		fail("ibv_req_notify_cq");
	for (int s = 0; s < 2 * pairs; s++)
		for (int k = 0; k < DEPTH; k++)
			post(r, s, k, 1);
	for (int s = 0; s < 2 * pairs; s++)
		for (int k = 0; k < DEPTH; k++)
			post(r, s, k, 0);

	struct ibv_cq *cq;
	void *cq_ctx;
	if (ibv_get_cq_event(r->channel, &cq, &cq_ctx) || cq != r->cq || cq_ctx != r)
		fail("ibv_get_cq_event");
	ibv_ack_cq_events(cq, 1);
	for (int ms = 0; got < want; ) {
		struct ibv_wc wc[16];
		int n = ibv_poll_cq(r->cq, 16, wc);

		if (n < 0)
			fail("ibv_poll_cq");
		for (int i = 0; i < n; i++)
			check_wc(r, &wc[i]);
		got += n;
		if (!n) {
			usleep(1000);
			errno = ETIMEDOUT;
			if (++ms > ROUND_LIMIT_MS)
				fail("completions are missing");
		}
	}
}

/* ---- memory that is registered ahead -------------------------------------------------- */

asm(".pushsection .text\nring_app_code:\n" MIGR_AHEAD_CODE ".popsection\n");
extern const unsigned char ring_app_code[];

static struct migr_ahead ahead = { .magic = MIGR_AHEAD_MAGIC, .version = MIGR_AHEAD_VERSION,
				   .mr_bytes = sizeof(struct migr_ahead_mr) };
static struct migr_ahead_mr commands[MAX_MRS];

static struct ibv_mr **mr_at(struct rdma *r, int i)
{
	return i ? &r->more[i - 1] : &r->mr;
}

static void leave_command(struct migr_ahead_mr *c, struct rdma *r, struct ibv_mr *mr)
{
	struct {
		struct ib_uverbs_ioctl_hdr hdr;
		struct ib_uverbs_attr attrs[3];
	} *cmd = (void *)c->cmd;

	*c = (struct migr_ahead_mr){
		.fd = r->ctx->cmd_fd, .status = MIGR_AHEAD_OPEN, .vlkey = mr->lkey,
		.in = { (uintptr_t)&c->out, (uintptr_t)mr->addr, mr->length, (uintptr_t)mr->addr, r->pd->handle,
			IBV_ACCESS_LOCAL_WRITE },
	};
	cmd->hdr = (struct ib_uverbs_ioctl_hdr){ .length = sizeof(*cmd), .object_id = UVERBS_OBJECT_DEVICE,
						 .method_id = UVERBS_METHOD_INVOKE_WRITE, .num_attrs = 3,
						 .driver_id = RDMA_DRIVER_RXE };
	cmd->attrs[0] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_CORE_IN, .len = sizeof(c->in),
						 .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)&c->in };
	cmd->attrs[1] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_WRITE_CMD, .len = 8,
						 .flags = UVERBS_ATTR_F_MANDATORY, .data = IB_USER_VERBS_CMD_REG_MR };
	cmd->attrs[2] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_CORE_OUT, .len = sizeof(c->out),
						 .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)&c->out };
}

static void leave_commands(void)
{
	ahead.code = (uintptr_t)ring_app_code;
	ahead.mrs = (uintptr_t)commands;
	ahead.nr_mrs = 0;
	for (int i = 0; i < nr_contexts; i++)
		for (int k = 0; k <= nr_more; k++)
			leave_command(&commands[ahead.nr_mrs++], &all[i], *mr_at(&all[i], k));
}

static void register_again(void)
{
	const struct migr_ahead_mr *c = commands;
	char path[256];
	int n = 0;
	FILE *f;

	for (int i = 0; i < nr_contexts; i++)
		for (int k = 0; k <= nr_more; k++, c++) {
			struct ibv_mr **mr = mr_at(&all[i], k);

			if (!c->status) {
				(*mr)->handle = c->out.mr_handle;
				(*mr)->lkey = c->out.lkey;
				(*mr)->rkey = c->out.rkey;
				n++;
			} else if (!(*mr = ibv_reg_mr(all[i].pd, (*mr)->addr, (*mr)->length, IBV_ACCESS_LOCAL_WRITE))) {
				fail("ibv_reg_mr after the restore");
			}
		}
	snprintf(path, sizeof(path), "%s/ahead", dir);
	f = fopen(path, "w");
	if (!f)
		fail(path);
	fprintf(f, "%d\n", n);
	fclose(f);
}

/* ---- description and record --------------------------------------------------------- */

static int describe(struct migr_fd_desc *out)
{
	int n = 0;

	for (int i = 0; i < nr_contexts; i++) {
		struct rdma *r = &all[i];
		struct migr_fd_desc base = { .fd = -1, .context_fd = r->ctx->cmd_fd, .ctx_id = i + 1,
					     .cq_handle = MIGR_NO_HANDLE };

		out[n] = base, out[n].kind = MIGR_FD_CONTEXT, out[n++].fd = r->ctx->cmd_fd;
		out[n] = base, out[n].kind = MIGR_FD_ASYNC, out[n++].fd = r->ctx->async_fd;
		out[n] = base, out[n].kind = MIGR_FD_CHANNEL, out[n].fd = r->channel->fd;
		out[n++].cq_handle = r->cq->handle;
		for (int k = 0; k < r->nr_rings; k++) {
			const struct ring *g = &r->rings[k];

			out[n] = base, out[n].kind = MIGR_FD_RING;
			out[n].obj_type = g->type, out[n].obj_handle = g->handle, out[n].ring = g->which;
			out[n].addr = g->addr, out[n].bytes = g->bytes, out[n].pgoff = g->pgoff;
			n++;
		}
	}
	out[n++] = (struct migr_fd_desc){ .kind = MIGR_FD_AHEAD, .fd = -1, .context_fd = -1, .cq_handle = MIGR_NO_HANDLE,
					  .obj_handle = MIGR_NO_HANDLE, .addr = (uintptr_t)&ahead, .bytes = sizeof(ahead) };
	return n;
}

static void write_fds(void)
{
	static struct migr_fd_desc d[MAX_CONTEXTS * (MAX_RINGS + 3) + 1];
	char path[256];
	int n = describe(d);
	FILE *f;

	snprintf(path, sizeof(path), "%s/fds", dir);
	f = fopen(path, "w");
	if (!f)
		fail(path);
	for (int i = 0; i < n; i++)
		fprintf(f, "%u %d %d %u %u %u %u %u %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", d[i].kind, d[i].fd,
			d[i].context_fd, d[i].ctx_id, d[i].cq_handle, d[i].obj_type, d[i].obj_handle, d[i].ring,
			d[i].addr, d[i].bytes, d[i].pgoff);
	fclose(f);
}

static struct mminfo info_of(const struct rdma *r, uint32_t type, uint32_t handle, uint32_t which)
{
	for (int i = 0; i < r->nr_rings; i++)
		if (r->rings[i].type == type && r->rings[i].handle == handle && r->rings[i].which == which)
			return (struct mminfo){ .offset = r->rings[i].pgoff, .size = r->rings[i].bytes };
	return (struct mminfo){ 0 };
}

static void record_context(const struct rdma *r, struct migr_rst_context *c, uint32_t id)
{
	struct migr_rst_pd *pd = migr_rst_add_pd(c);
	struct migr_rst_mr *mr = migr_rst_add_mr(c);
	struct migr_rst_cq *cq = migr_rst_add_cq(c);
	struct rxe_create_cq_resp cq_resp = { info_of(r, MIGR_OBJ_CQ, r->cq->handle, 0) };

	c->rec.ctx_id = id;
	c->rec.pid = getpid();
	strcpy(c->rec.comm, "ring_app");
	strcpy(c->rec.ibdev, r->ctx->device->name);
	c->rec.num_comp_vectors = r->ctx->num_comp_vectors;
	pd->rec.handle = r->pd->handle;
	mr->rec = (struct migr_mr_rec){ .handle = r->mr->handle, .pd_handle = r->pd->handle,
					.start = (uintptr_t)r->buf, .length = buf_bytes(), .iova = (uintptr_t)r->buf,
					.access = IBV_ACCESS_LOCAL_WRITE, .vlkey = r->mr->lkey,
					.plkey = r->mr->lkey };
	cq->rec = (struct migr_cq_rec){ .handle = r->cq->handle, .cqe = r->asked_cqe, .channel = 1,
					.user_handle = (uintptr_t)r->cq };
	memcpy(cq->resp.data, &cq_resp, cq->resp.len = sizeof(cq_resp));
	for (int i = 0; i < 2 * pairs; i++) {
		const struct side *s = &r->sides[i];
		struct migr_rst_qp *q = migr_rst_add_qp(c);
		struct rxe_create_qp_resp resp = { info_of(r, MIGR_OBJ_QP, s->qp->handle, 0),
						   info_of(r, MIGR_OBJ_QP, s->qp->handle, 1) };

		q->rec = (struct migr_qp_rec){
			.handle = s->qp->handle, .vqpn = s->qp->qp_num, .pqpn = s->qp->qp_num,
			.pd_handle = r->pd->handle, .send_cq_handle = r->cq->handle, .recv_cq_handle = r->cq->handle,
			.srq_handle = MIGR_NO_HANDLE, .qp_type = IBV_QPT_RC, .user_handle = (uintptr_t)s->qp,
			.max_send_wr = s->init.cap.max_send_wr, .max_recv_wr = s->init.cap.max_recv_wr,
			.max_send_sge = s->init.cap.max_send_sge, .max_recv_sge = s->init.cap.max_recv_sge,
			.qp_state = IBV_QPS_RTS, .path_mtu = IBV_MTU_1024, .dest_qpn = s->dest_qpn,
			.access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, .port_num = 1,
			.rq_psn = s->dest_qpn & 0xffff, .sq_psn = s->qp->qp_num & 0xffff,
			.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 12,
			.max_rd_atomic = 1, .max_dest_rd_atomic = 1,
			.ah = { .is_global = 1, .gid_type = 2, .sgid_index = r->gid_index, .hop_limit = 64,
				.port_num = 1 },
		};
		memcpy(q->rec.ah.sgid, r->gid.raw, 16);
		memcpy(q->rec.ah.dgid, r->gid.raw, 16);
		memcpy(q->resp.data, &resp, q->resp.len = sizeof(resp));
	}
}

static void write_record(void)
{
	static struct migr_fd_desc d[MAX_CONTEXTS * (MAX_RINGS + 3) + 1];
	struct migr_rst_image *img = migr_rst_image_new();
	struct migr_rst_process *p = migr_rst_process_new(getpid());
	struct migr_rst_err err;
	char path[256];
	int fd;

	for (int i = 0; i < nr_contexts; i++)
		record_context(&all[i], migr_rst_add_context(p), i + 1);
	migr_rst_process_describe(p, d, describe(d), ahead.instance);
	migr_rst_image_add(img, p);
	snprintf(path, sizeof(path), "%s/image", dir);
	fd = open(path, O_RDONLY | O_DIRECTORY);
	if (fd < 0)
		fail(path);
	if (migr_rst_process_check(p, &err) || migr_rst_write(img, fd, &err)) {
		state("FAILED", err.text);
		exit(2);
	}
	close(fd);
	migr_rst_image_free(img);
}

/* ---- after a restore ----------------------------------------------------------------- */

static void adopt(struct rdma *r, const char *kind, uint32_t was, uint32_t is, uint32_t qpn)
{
	if (!strcmp(kind, "pd") && r->pd->handle == was)
		r->pd->handle = is;
	else if (!strcmp(kind, "cq") && r->cq->handle == was)
		r->cq->handle = is;
	else if (!strcmp(kind, "qp"))
		for (int i = 0; i < 2 * pairs; i++)
			if (r->sides[i].qp->handle == was && r->sides[i].init.qp_type) {
				r->sides[i].qp->handle = is;
				r->sides[i].qp->qp_num = qpn;
				r->sides[i].init.qp_type = 0;	/* adopted: new handles may equal old ones */
				return;
			}
}

/* The module learns whose the context is now; without one nobody asks. */
static void attach(int cmd_fd)
{
	struct migr_ioc_attach a = { .abi_version = MIGR_ABI_VERSION, .uverbs_fd = cmd_fd };
	int fd = open("/dev/" MIGR_DEV_NAME, O_RDWR | O_CLOEXEC);

	if (fd < 0 && errno == ENOENT)
		return;
	if (fd < 0 || ioctl(fd, MIGR_IOC_ATTACH, &a))
		fail("MIGR_IOC_ATTACH");
	close(fd);
}

static void rebind(void)
{
	char path[256], kind[16];
	uint32_t was, is, qpn;
	int fd, n = 0;
	FILE *f;

	snprintf(path, sizeof(path), "%s/rebind", dir);
	f = fopen(path, "r");
	if (!f)
		fail(path);
	while (fscanf(f, "%d %15s %u %u %u", &fd, kind, &was, &is, &qpn) == 5)
		for (int i = 0; i < nr_contexts; i++)
			if (all[i].ctx->cmd_fd == fd) {
				adopt(&all[i], kind, was, is, qpn);
				n++;
			}
	fclose(f);
	errno = EPROTO;
	if (n != nr_contexts * (3 + 2 * pairs))
		fail("rebind does not name every object");
	for (int i = 0; i < nr_contexts; i++) {
		for (int k = 0; k < 2 * pairs; k++)
			all[i].sides[k].init.qp_type = IBV_QPT_RC;
		attach(all[i].ctx->cmd_fd);
	}
	register_again();
	write_fds();	/* handles are others now */
	unlink(path);
}

int main(int argc, char **argv)
{
	int record = argc > 1 && !strcmp(argv[1], "--record");

	argc -= record, argv += record;
	if (argc < 2 || argc > 5) {
		fprintf(stderr, "usage: ring_app [--record] DIR [PAIRS [CONTEXTS [MRS]]]\n");
		return 1;
	}
	dir = argv[1];
	pairs = argc > 2 ? atoi(argv[2]) : 1;
	nr_contexts = argc > 3 ? atoi(argv[3]) : 1;
	nr_more = argc > 4 ? atoi(argv[4]) - 1 : 0;
	if (pairs < 1 || pairs > 64 || nr_contexts < 1 || nr_contexts > MAX_CONTEXTS || nr_more < 0 ||
	    (nr_more + 1) * nr_contexts > MAX_MRS)
		return 1;
	for (int i = 0; i < nr_contexts; i++)
		set_up(&all[i]);
	write_fds();
	if (record)
		write_record();
	while (!exists("stop")) {
		if (exists("pause") && !exists("rebind")) {
			leave_commands();
			state("PAUSED", NULL);
			while (exists("pause") && !exists("rebind") && !exists("stop"))
				usleep(20000);
			continue;
		}
		if (exists("rebind"))
			rebind();
		for (int i = 0; i < nr_contexts; i++)
			one_round(&all[i]);
		state("RUNNING", NULL);
		usleep(10000);
	}
	state("DONE", NULL);
	return 0;
}
