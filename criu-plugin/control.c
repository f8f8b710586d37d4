// SPDX-License-Identifier: GPL-2.0
/* The control socket: include/migr/restore_control.h, the listening side. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"

#define MAX_CONTROLLERS 16
#define RECORDS_PER_PACKET 1024	/* 40 KB: fits every socket buffer */
#define SEND_LIMIT_S 5
#define PACKET_MAX (sizeof(struct migr_rc_msg) + MIGR_RC_MAX_RECORDS * sizeof(struct migr_rc_connect))

struct controller {
	int fd;
	int status;			/* of the request so far: a message may be many packets */
	struct migr_rst_err err;
};

static int listen_fd = -1;
static char listen_path[sizeof(((struct sockaddr_un *)0)->sun_path)];
static struct controller controllers[MAX_CONTROLLERS];
static int nr_controllers;
static int told;			/* someone has been told of job.failed */

static int lift(int fd)
{
	int up = fcntl(fd, F_DUPFD_CLOEXEC, fd_floor());
	int e = errno;

	close(fd);
	return up < 0 ? -e : up;
}

int control_listen(const char *path)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	struct stat st;
	mode_t mask;
	int fd, ret;

	if (strlen(path) >= sizeof(sa.sun_path))
		return -ENAMETOOLONG;
	strcpy(sa.sun_path, path);
	if (!lstat(path, &st)) {
		if (!S_ISSOCK(st.st_mode))
			return -EEXIST;
		unlink(path);	/* of a restore that was killed */
	}
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	fd = lift(fd);
	if (fd < 0)
		return fd;
	mask = umask(0177);
	ret = bind(fd, (struct sockaddr *)&sa, sizeof(sa)) || listen(fd, MAX_CONTROLLERS) ? -errno : 0;
	umask(mask);
	if (ret) {
		close(fd);
		return ret;
	}
	listen_fd = fd;
	strcpy(listen_path, path);
	return 0;
}

static void drop(int i)
{
	close(controllers[i].fd);
	controllers[i] = controllers[--nr_controllers];
}

static void accept_one(void)
{
	struct timeval limit = { .tv_sec = SEND_LIMIT_S };
	struct ucred who;
	socklen_t len = sizeof(who);
	int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0)
		return;
	fd = lift(fd);
	if (fd < 0)
		return;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) || (who.uid != 0 && who.uid != geteuid()) ||
	    nr_controllers == MAX_CONTROLLERS) {
		say(2, "refused a controller");
		close(fd);
		return;
	}
	fcntl(fd, F_SETFL, 0);
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	controllers[nr_controllers++] = (struct controller){ .fd = fd };
}

/* ---- replies ------------------------------------------------------------------ */

static int send_packet(int fd, struct migr_rc_msg *m, const void *records)
{
	struct iovec iov[2] = {
		{ m, sizeof(*m) },
		{ (void *)records, (size_t)m->count * m->record_size },
	};
	struct msghdr h = { .msg_iov = iov, .msg_iovlen = 2 };

	return sendmsg(fd, &h, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int reply(int fd, uint16_t op, int status, const char *text, const void *records, uint32_t count,
		 uint32_t record_size)
{
	int ret;

	do {
		struct migr_rc_msg m = {
			.version = MIGR_RC_VERSION,
			.op = op | MIGR_RC_REPLY,
			.flags = count > RECORDS_PER_PACKET ? MIGR_RC_MORE : 0,
			.status = status,
			.count = count > RECORDS_PER_PACKET ? RECORDS_PER_PACKET : count,
			.record_size = record_size,
			.took_us = op == MIGR_RC_PREPARE ? job.built_us : 0,
		};

		snprintf(m.text, sizeof(m.text), "%s", status ? text : "");
		ret = send_packet(fd, &m, records);
		records = (const char *)records + (size_t)m.count * record_size;
		count -= m.count;
	} while (!ret && count);
	return ret;
}

/* Calls @f for each context of the job. */
#define for_each_context(p, c)                                                                   \
	for (uint32_t i_ = 0; i_ < job.img->nr_processes; i_++)                                  \
		for (struct migr_rst_process *p = job.img->processes[i_]; p; p = NULL)           \
			for (struct migr_rst_context *c = p->contexts; c < p->contexts + p->nr_contexts; c++)

/* Whoever asks how it stands. It is over then. */
static int reply_failed(int fd, uint16_t op)
{
	told = 1;
	return reply(fd, op, job.failed, job.why.text, NULL, 0, 0);
}

static int reply_prepare(int fd)
{
	struct migr_rc_qp *recs;
	uint32_t n = 0;
	int ret;

	if (job.failed)
		return reply_failed(fd, MIGR_RC_PREPARE);
	for_each_context(p, c)
		n += c->rec.nr_qp;
	recs = calloc(n + 1, sizeof(*recs));
	if (!recs)
		return reply(fd, MIGR_RC_PREPARE, ENOMEM, "no memory", NULL, 0, sizeof(*recs));
	n = 0;
	for_each_context(p, c)
		for (uint32_t k = 0; k < c->rec.nr_qp; k++) {
			const struct migr_rst_qp *qp = &c->qps[k];
			struct migr_rc_qp *r = &recs[n];

			if (qp->rec.flags & MIGR_QP_FORMER)
				continue;
			n++;
			r->src_ctx_id = c->rec.ctx_id;
			r->vqpn = qp->rec.vqpn;
			r->src_pqpn = qp->rec.pqpn;
			r->pqpn = qp->new_pqpn;
			r->psn = qp->new_psn;
			r->new_handle = qp->new_handle;
			memcpy(r->sgid, qp->new_sgid, sizeof(r->sgid));
		}
	ret = reply(fd, MIGR_RC_PREPARE, 0, NULL, recs, n, sizeof(*recs));
	free(recs);
	return ret;
}

static void add_object(struct migr_rc_object *r, const struct migr_rst_process *p, const struct migr_rst_context *c,
		       uint32_t type, uint32_t old_handle, uint32_t new_handle)
{
	r->src_ctx_id = c->rec.ctx_id;
	r->ctx_id = c->new_ctx_id;
	r->context_fd = migr_rst_fd_number(p, c->rec.ctx_id, MIGR_FD_CONTEXT);
	r->obj_type = type;
	r->old_handle = old_handle;
	r->new_handle = new_handle;
}

static int reply_ready(int fd)
{
	struct migr_rc_object *recs;
	uint32_t n = 0;
	int ret;

	for_each_context(p, c)
		n += 1 + c->rec.nr_pd + c->rec.nr_cq + c->rec.nr_srq + c->rec.nr_qp;
	recs = calloc(n + 1, sizeof(*recs));
	if (!recs)
		return reply(fd, MIGR_RC_READY, ENOMEM, "no memory", NULL, 0, sizeof(*recs));
	n = 0;
	for_each_context(p, c) {
		add_object(&recs[n++], p, c, 0, 0, 0);
		for (uint32_t k = 0; k < c->rec.nr_pd; k++)
			add_object(&recs[n++], p, c, MIGR_OBJ_PD, c->pds[k].rec.handle, c->pds[k].new_handle);
		for (uint32_t k = 0; k < c->rec.nr_cq; k++)
			add_object(&recs[n++], p, c, MIGR_OBJ_CQ, c->cqs[k].rec.handle, c->cqs[k].new_handle);
		for (uint32_t k = 0; k < c->rec.nr_srq; k++)
			add_object(&recs[n++], p, c, MIGR_OBJ_SRQ, c->srqs[k].rec.handle, c->srqs[k].new_handle);
		for (uint32_t k = 0; k < c->rec.nr_qp; k++) {
			recs[n].vqpn = c->qps[k].rec.vqpn;
			recs[n].pqpn = c->qps[k].new_pqpn;
			add_object(&recs[n++], p, c, MIGR_OBJ_QP, c->qps[k].rec.handle, c->qps[k].new_handle);
		}
	}
	ret = reply(fd, MIGR_RC_READY, 0, NULL, recs, n, sizeof(*recs));
	free(recs);
	return ret;
}

/* ---- requests ------------------------------------------------------------------ */

static int connect_qps(struct controller *ct, const struct migr_rc_msg *m, const struct migr_rc_connect *r)
{
	for (uint32_t i = 0; i < m->count && !ct->status; i++)
		ct->status = restore_connect(&r[i], &ct->err);
	if (m->flags & MIGR_RC_MORE)
		return 0;
	int ret = reply(ct->fd, m->op, ct->status, ct->err.text, NULL, 0, 0);
	ct->status = 0;
	return ret;
}

static int not_now(struct controller *ct, const struct migr_rc_msg *m)
{
	static const char *const where[] = {
		[PHASE_PREPARED] = "the restore has not begun: GO first",
		[PHASE_HELD] = "the tasks are restored: COMMIT or ABORT",
	};

	return reply(ct->fd, m->op, EBUSY, where[job.phase] ? where[job.phase] : "not now", NULL, 0, 0);
}

static int abort_job(struct controller *ct, const struct migr_rc_msg *m)
{
	job.phase = PHASE_ABORTED;
	say(2, "a controller asked to abort");
	return reply(ct->fd, m->op, 0, NULL, NULL, 0, 0);
}

static int while_prepared(struct controller *ct, const struct migr_rc_msg *m)
{
	int ret;

	switch (m->op) {
	case MIGR_RC_PREPARE:
		return reply_prepare(ct->fd);
	case MIGR_RC_CONNECT:
		if (job.failed)
			return reply(ct->fd, m->op, job.failed, job.why.text, NULL, 0, 0);
		return connect_qps(ct, m, (const struct migr_rc_connect *)(m + 1));
	case MIGR_RC_GO:
		if (job.failed)
			return reply(ct->fd, m->op, job.failed, job.why.text, NULL, 0, 0);
		ret = restore_go(&ct->err);
		if (ret)
			return reply(ct->fd, m->op, ret, ct->err.text, NULL, 0, 0);
		job.phase = PHASE_RESTORING;
		return reply(ct->fd, m->op, 0, NULL, NULL, 0, 0);
	case MIGR_RC_ABORT:
		return abort_job(ct, m);
	default:
		return not_now(ct, m);
	}
}

static int while_held(struct controller *ct, const struct migr_rc_msg *m)
{
	int ret;

	switch (m->op) {
	case MIGR_RC_READY:
		restore_still_held(0);
		return job.failed ? reply_failed(ct->fd, m->op) : reply_ready(ct->fd);
	case MIGR_RC_COMMIT:
		restore_still_held(1);
		if (job.failed)
			return reply_failed(ct->fd, m->op);
		/* A controller that cannot hear the answer has to ask what became of it; it is told. */
		ret = reply(ct->fd, m->op, 0, NULL, NULL, 0, 0);
		job.phase = PHASE_COMMITTED;
		return ret;
	case MIGR_RC_ABORT:
		return abort_job(ct, m);
	default:
		return not_now(ct, m);
	}
}

/* 0, or an error after which the controller is dropped. */
static int handle_packet(struct controller *ct, const struct migr_rc_msg *m, size_t len)
{
	uint32_t want = m->op == MIGR_RC_CONNECT ? sizeof(struct migr_rc_connect) : 0;

	if (len < sizeof(*m) || m->version != MIGR_RC_VERSION) {
		struct migr_rc_msg head = { .op = len >= 4 ? m->op : 0 };

		reply(ct->fd, head.op, EPROTONOSUPPORT, "this plugin speaks version 1 of the restore control", NULL, 0,
		      0);
		return -EPROTO;
	}
	if (m->count > MIGR_RC_MAX_RECORDS || (m->count && m->record_size != want) ||
	    len != sizeof(*m) + (size_t)m->count * m->record_size) {
		reply(ct->fd, m->op, EINVAL, "malformed packet: count or record size do not fit", NULL, 0, 0);
		return -EPROTO;
	}
	return job.phase == PHASE_HELD ? while_held(ct, m) : while_prepared(ct, m);
}

static void handle(int i)
{
	static _Alignas(8) char packet[PACKET_MAX];
	ssize_t n = recv(controllers[i].fd, packet, sizeof(packet), MSG_DONTWAIT);

	if (n < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (n <= 0 || handle_packet(&controllers[i], (struct migr_rc_msg *)packet, n))
		drop(i);
}

/* ---- loop ---------------------------------------------------------------------- */

static long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void control_serve(enum phase phase, long limit_s)
{
	long end = now_ms() + limit_s * 1000;

	while (job.phase == phase && !told) {
		struct pollfd fds[MAX_CONTROLLERS + 1];
		int n = nr_controllers;
		long left = end - now_ms();

		if (left <= 0) {
			say(1, "nobody asked for the next step within %ld s: aborting", limit_s);
			break;
		}
		for (int i = 0; i < n; i++)
			fds[i] = (struct pollfd){ controllers[i].fd, POLLIN, 0 };
		fds[n] = (struct pollfd){ listen_fd, POLLIN, 0 };
		if (poll(fds, n + 1, left) < 0 && errno != EINTR) {
			say(1, "poll: %s", strerror(errno));
			break;
		}
		/* Backwards: a controller that is dropped is replaced by the last one. */
		for (int i = n - 1; i >= 0 && job.phase == phase; i--)
			if (fds[i].revents)
				handle(i);
		if (job.phase == phase && fds[n].revents)
			accept_one();
	}
	if (job.phase == phase)
		job.phase = PHASE_ABORTED;
}

void control_close(const char *why)
{
	struct migr_rc_msg m;

	while (listen_fd >= 0 && nr_controllers < MAX_CONTROLLERS) {
		struct pollfd p = { listen_fd, POLLIN, 0 };

		if (poll(&p, 1, 0) <= 0)
			break;
		accept_one();
	}
	while (nr_controllers) {
		struct controller *ct = &controllers[nr_controllers - 1];

		while (why && recv(ct->fd, &m, sizeof(m), MSG_DONTWAIT | MSG_TRUNC) >= (ssize_t)sizeof(m))
			reply(ct->fd, m.op, m.op == MIGR_RC_ABORT ? 0 : ECANCELED, why, NULL, 0, 0);
		drop(nr_controllers - 1);
	}
	if (listen_fd >= 0) {
		unlink(listen_path);
		close(listen_fd);
		listen_fd = -1;
	}
}
