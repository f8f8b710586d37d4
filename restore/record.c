// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* The record of a process, from migr.ko by generic netlink. */
#include <errno.h>
#include <netlink/genl/ctrl.h>
#include <netlink/genl/genl.h>
#include <netlink/netlink.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "internal.h"

#define ANSWER_LIMIT_S 10	/* the kernel answers at once; a hang must not be ours too */
#define DUMP_TRIES 5		/* a dump that was interrupted by a change is made again */

struct migr_rst {
	struct nl_sock *sk;
	int family;
};

/* One exchange: what to do with each message, and how it ended. */
struct exchange {
	int (*got)(struct nlattr **attrs, void *arg);	/* 0 or -errno */
	void *arg;
	int ret;
	int done;
};

static int on_message(struct nl_msg *msg, void *arg)
{
	struct exchange *x = arg;
	struct nlattr *attrs[MIGR_A_MAX + 1];

	if (genlmsg_parse(nlmsg_hdr(msg), 0, attrs, MIGR_A_MAX, NULL))
		x->ret = -EBADMSG;
	else if (x->got && !x->ret)
		x->ret = x->got(attrs, x->arg);
	return NL_OK;
}

static int on_end(struct nl_msg *msg, void *arg)
{
	struct exchange *x = arg;
	struct nlmsghdr *h = nlmsg_hdr(msg);

	/* The end of a dump carries its status. */
	if (h->nlmsg_type == NLMSG_DONE && nlmsg_datalen(h) >= (int)sizeof(int)) {
		int status = *(int *)nlmsg_data(h);

		if (status < 0 && !x->ret)
			x->ret = status;
	}
	x->done = 1;
	return NL_STOP;
}

static int on_error(struct sockaddr_nl *who, struct nlmsgerr *e, void *arg)
{
	struct exchange *x = arg;

	(void)who;
	x->ret = e->error;
	x->done = 1;
	return NL_STOP;
}

/* Sends @msg (and frees it) and hands every answer to @got. */
static int talk(struct migr_rst *s, struct nl_msg *msg, int (*got)(struct nlattr **, void *), void *arg)
{
	struct exchange x = { .got = got, .arg = arg };
	struct nl_cb *cb = nl_cb_alloc(NL_CB_DEFAULT);
	int ret = -ENOMEM;

	if (cb && msg) {
		nl_cb_set(cb, NL_CB_VALID, NL_CB_CUSTOM, on_message, &x);
		nl_cb_set(cb, NL_CB_FINISH, NL_CB_CUSTOM, on_end, &x);
		nl_cb_set(cb, NL_CB_ACK, NL_CB_CUSTOM, on_end, &x);
		nl_cb_err(cb, NL_CB_CUSTOM, on_error, &x);
		ret = nl_send_auto(s->sk, msg) < 0 ? -EIO : 0;
		while (!ret && !x.done) {
			int r = nl_recvmsgs(s->sk, cb);

			if (r == -NLE_DUMP_INTR)
				ret = -EAGAIN;
			else if (r == -NLE_AGAIN)
				ret = -ETIMEDOUT;
			else if (r < 0 && !x.done)
				ret = -EIO;
		}
		if (!ret)
			ret = x.ret;
	}
	if (cb)
		nl_cb_put(cb);
	nlmsg_free(msg);
	return ret;
}

static struct nl_msg *request(struct migr_rst *s, int cmd, int flags)
{
	struct nl_msg *msg = nlmsg_alloc();

	if (msg && !genlmsg_put(msg, NL_AUTO_PORT, NL_AUTO_SEQ, s->family, 0, flags, cmd, MIGR_GENL_VERSION)) {
		nlmsg_free(msg);
		return NULL;
	}
	return msg;
}

static int got_info(struct nlattr **attrs, void *arg)
{
	if (!attrs[MIGR_A_ABI_VERSION] || nla_len(attrs[MIGR_A_ABI_VERSION]) < 4)
		return -EBADMSG;
	*(uint32_t *)arg = nla_get_u32(attrs[MIGR_A_ABI_VERSION]);
	return 0;
}

int migr_rst_open(struct migr_rst **out, struct migr_rst_err *err)
{
	struct migr_rst *s = calloc(1, sizeof(*s));
	struct timeval limit = { .tv_sec = ANSWER_LIMIT_S };
	uint32_t version = 0;
	int ret = -ENOMEM;

	if (s)
		s->sk = nl_socket_alloc();
	if (!s || !s->sk) {
		rst_fail(err, ENOMEM, "no memory for a netlink socket");
		goto out_close;
	}
	ret = genl_connect(s->sk);
	if (ret < 0) {
		ret = rst_fail(err, EIO, "cannot open a generic netlink socket: %s", nl_geterror(ret));
		goto out_close;
	}
	setsockopt(nl_socket_get_fd(s->sk), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	nl_socket_set_msg_buf_size(s->sk, 64 << 10);
	s->family = genl_ctrl_resolve(s->sk, MIGR_GENL_NAME);
	if (s->family < 0) {
		ret = rst_fail(err, ENOENT, "migr.ko is not loaded (no generic netlink family \"%s\"): modprobe migr",
			       MIGR_GENL_NAME);
		goto out_close;
	}
	ret = talk(s, request(s, MIGR_CMD_INFO_GET, NLM_F_ACK), got_info, &version);
	if (ret) {
		rst_fail(err, -ret, "migr.ko does not answer: %s", strerror(-ret));
		goto out_close;
	}
	if (version != MIGR_ABI_VERSION) {
		ret = rst_fail(err, EPROTONOSUPPORT, "migr.ko speaks ABI version %u, this migr %u: install the same migr",
			       version, MIGR_ABI_VERSION);
		goto out_close;
	}
	*out = s;
	return 0;

out_close:
	migr_rst_close(s);
	return ret;
}

void migr_rst_close(struct migr_rst *s)
{
	if (!s)
		return;
	if (s->sk)
		nl_socket_free(s->sk);
	free(s);
}

/* Takes as much of a record as both sides know. */
static void take_rec(void *to, size_t size, const struct nlattr *a)
{
	size_t n = nla_len(a);

	memset(to, 0, size);
	memcpy(to, nla_data(a), n < size ? n : size);
}

static void take_resp(struct migr_rst_resp *to, const struct nlattr *a)
{
	if (!a || nla_len(a) > (int)sizeof(to->data))
		return;
	to->len = nla_len(a);
	memcpy(to->data, nla_data(a), to->len);
}

/* ---- contexts -------------------------------------------------------------- */

struct ctx_list {
	uint32_t pid;
	struct migr_ctx_rec *recs;
	uint32_t nr;
};

static int got_ctx(struct nlattr **attrs, void *arg)
{
	struct ctx_list *l = arg;
	struct migr_ctx_rec rec, *bigger;

	if (!attrs[MIGR_A_CTX_REC])
		return -EBADMSG;
	take_rec(&rec, sizeof(rec), attrs[MIGR_A_CTX_REC]);
	rec.comm[sizeof(rec.comm) - 1] = rec.ibdev[sizeof(rec.ibdev) - 1] = '\0';
	if (l->pid && rec.pid != l->pid)
		return 0;
	bigger = reallocarray(l->recs, l->nr + 1, sizeof(rec));
	if (!bigger)
		return -ENOMEM;
	l->recs = bigger;
	l->recs[l->nr++] = rec;
	return 0;
}

int migr_rst_contexts(struct migr_rst *s, uint32_t pid, struct migr_ctx_rec **out, uint32_t *nr,
		      struct migr_rst_err *err)
{
	struct ctx_list l = { .pid = pid };
	int ret = -EAGAIN;

	for (int i = 0; i < DUMP_TRIES && ret == -EAGAIN; i++) {
		struct nl_msg *msg = request(s, MIGR_CMD_CTX_GET, NLM_F_DUMP);

		l.nr = 0;
		if (msg && pid && nla_put_u32(msg, MIGR_A_PID, pid)) {
			nlmsg_free(msg);
			msg = NULL;
		}
		ret = talk(s, msg, got_ctx, &l);
	}
	if (ret == -ENOENT && pid) {	/* a process without RDMA resources */
		l.nr = 0;
		ret = 0;
	}
	if (ret) {
		free(l.recs);
		return rst_fail(err, -ret, "cannot list the RDMA contexts of pid %u: %s%s", pid, strerror(-ret),
				ret == -EPERM ? " (needs CAP_NET_ADMIN)" : "");
	}
	*out = l.recs;
	*nr = l.nr;
	return 0;
}

/* ---- objects --------------------------------------------------------------- */

static int got_obj(struct nlattr **attrs, void *arg)
{
	struct migr_rst_context *c = arg;
	const struct nlattr *rec = attrs[MIGR_A_OBJ_REC], *resp = attrs[MIGR_A_DRIVER_RESP];

	if (!attrs[MIGR_A_OBJ_TYPE] || !rec)
		return -EBADMSG;
	switch (nla_get_u32(attrs[MIGR_A_OBJ_TYPE])) {
	case MIGR_OBJ_PD: {
		struct migr_rst_pd *pd = migr_rst_add_pd(c);

		if (!pd)
			return -ENOMEM;
		take_rec(&pd->rec, sizeof(pd->rec), rec);
		return 0;
	}
	case MIGR_OBJ_MR: {
		struct migr_rst_mr *mr = migr_rst_add_mr(c);

		if (!mr)
			return -ENOMEM;
		take_rec(&mr->rec, sizeof(mr->rec), rec);
		return 0;
	}
	case MIGR_OBJ_CQ: {
		struct migr_rst_cq *cq = migr_rst_add_cq(c);

		if (!cq)
			return -ENOMEM;
		take_rec(&cq->rec, sizeof(cq->rec), rec);
		take_resp(&cq->resp, resp);
		return 0;
	}
	case MIGR_OBJ_QP: {
		struct migr_rst_qp *qp = migr_rst_add_qp(c);

		if (!qp)
			return -ENOMEM;
		take_rec(&qp->rec, sizeof(qp->rec), rec);
		take_resp(&qp->resp, resp);
		return 0;
	}
	case MIGR_OBJ_SRQ: {
		struct migr_rst_srq *srq = migr_rst_add_srq(c);

		if (!srq)
			return -ENOMEM;
		take_rec(&srq->rec, sizeof(srq->rec), rec);
		take_resp(&srq->resp, resp);
		return 0;
	}
	default: {
		struct migr_rst_other *o = migr_rst_add_other(c);

		if (!o)
			return -ENOMEM;
		o->obj_type = nla_get_u32(attrs[MIGR_A_OBJ_TYPE]);
		take_rec(&o->rec, sizeof(o->rec), rec);
		return 0;
	}
	}
}

static int dump_objects(struct migr_rst *s, struct migr_rst_context *c)
{
	int ret = -EAGAIN;

	for (int i = 0; i < DUMP_TRIES && ret == -EAGAIN; i++) {
		struct nl_msg *msg = request(s, MIGR_CMD_OBJ_GET, NLM_F_DUMP);

		free(c->pds), free(c->mrs), free(c->cqs), free(c->qps), free(c->srqs), free(c->others);
		c->pds = NULL, c->mrs = NULL, c->cqs = NULL, c->qps = NULL, c->srqs = NULL, c->others = NULL;
		c->rec.nr_pd = c->rec.nr_mr = c->rec.nr_cq = c->rec.nr_qp = c->rec.nr_srq = c->nr_others = 0;
		if (msg && nla_put_u32(msg, MIGR_A_CTX_ID, c->rec.ctx_id)) {
			nlmsg_free(msg);
			msg = NULL;
		}
		ret = talk(s, msg, got_obj, c);
	}
	return ret;
}

/* The innermost number in "NSpid:" of /proc/PID/status. */
static uint32_t ns_pid_of(uint32_t pid)
{
	char path[32], line[256];
	uint32_t inner = pid;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%u/status", pid);
	f = fopen(path, "re");
	while (f && fgets(line, sizeof(line), f)) {
		char *last;

		if (strncmp(line, "NSpid:", 6))
			continue;
		last = strrchr(line, '\t');
		if (last)
			inner = strtoul(last, NULL, 10);
		break;
	}
	if (f)
		fclose(f);
	return inner;
}

int migr_rst_dump(struct migr_rst *s, uint32_t pid, struct migr_rst_process **out, struct migr_rst_err *err)
{
	struct migr_rst_process *p = migr_rst_process_new(pid);
	struct migr_ctx_rec *recs = NULL;
	uint32_t nr = 0;
	int ret = p ? migr_rst_contexts(s, pid, &recs, &nr, err) : rst_fail(err, ENOMEM, "no memory");

	for (uint32_t i = 0; !ret && i < nr; i++) {
		struct migr_rst_context *c = migr_rst_add_context(p);

		if (!c) {
			ret = rst_fail(err, ENOMEM, "no memory");
			break;
		}
		c->rec = recs[i];
		ret = dump_objects(s, c);
		if (ret)
			rst_fail(err, -ret, "cannot dump RDMA context %u of pid %u: %s", recs[i].ctx_id, pid,
				 strerror(-ret));
	}
	free(recs);
	if (ret) {
		migr_rst_process_free(p);
		return ret;
	}
	p->ns_pid = ns_pid_of(pid);
	*out = p;
	return 0;
}
