// SPDX-License-Identifier: GPL-2.0
/*
 * Restore. In init, in the CRIU process, long before there is an image:
 * everything on record is built and controllers connect it, until GO. In the
 * restored tasks: fds and rings get to where they were. In the CRIU process
 * again, with memory final and the tasks stopped: register it, wait for COMMIT.
 */
#include <errno.h>
#include <fcntl.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"

#define GO_LIMIT_S 120
#define COMMIT_LIMIT_S 30
#define FAILED_LIMIT_S 20	/* how long a failure waits for someone to tell */
#define REGISTER_LIMIT_S 100	/* for all memory of the job; within what migrd waits for READY */
#define QPS_RTS 3		/* enum ib_qp_state */
#define QPS_SQD 4

/* Exported by the criu binary, in no header of it (3.17 to 4.2). */
extern int inherit_fd_add(int fd, char *key) __attribute__((weak));
extern int inherit_fd_lookup_id(char *id) __attribute__((weak));

static long limit_from(const char *name, long otherwise)
{
	const char *text = getenv(name);
	char *end;
	long v;

	if (!text)
		return otherwise;
	v = strtol(text, &end, 10);
	if (*end || end == text || v < 1 || v > 86400) {
		say(2, "%s=%s is not a number of seconds from 1 to 86400: using %ld", name, text, otherwise);
		return otherwise;
	}
	return v;
}

/* ---- build ----------------------------------------------------------------- */

static int ctx_id_taken(uint32_t ctx_id)
{
	for (uint32_t i = 0; i < job.img->nr_processes; i++)
		for (uint32_t k = 0; k < job.img->processes[i]->nr_contexts; k++)
			if (job.img->processes[i]->contexts[k].new_ctx_id == ctx_id)
				return 1;
	return 0;
}

/*
 * Which number migr.ko gave to the context just made: the one not seen before. Without it migrd would take a process that
 * lives for one that has ended.
 */
static int learn_ctx_id(struct migr_rst_context *c)
{
	struct migr_rst *s;
	struct migr_ctx_rec *recs = NULL;
	uint32_t nr = 0;
	int ret = migr_rst_open(&s, &job.why);

	if (ret == -ENOENT)
		return 0;	/* no module: works, for programs that need no virtual names */
	if (ret)
		return ret;
	ret = migr_rst_contexts(s, getpid(), &recs, &nr, &job.why);
	for (uint32_t i = 0; !ret && i < nr; i++)
		if (!ctx_id_taken(recs[i].ctx_id))
			c->new_ctx_id = recs[i].ctx_id;
	if (!ret && !c->new_ctx_id) {
		snprintf(job.why.text, sizeof(job.why.text), "migr.ko has not recorded the context that was made on %s", c->new_ibdev);
		ret = -ENODATA;
	}
	free(recs);
	migr_rst_close(s);
	return ret;
}

static int build_context(const struct migr_rst_process *p, struct migr_rst_context *c)
{
	char path[64];
	int fd, ret = migr_rst_device_find(c->rec.ibdev, c->new_ibdev, path, &job.why);

	if (ret)
		return ret;
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0) {
		ret = -errno;
		snprintf(job.why.text, sizeof(job.why.text), "cannot open %s: %s%s", path, strerror(-ret),
			 ret == -EPERM ? " (is char device major 231 allowed in the container's cgroup?)" : "");
		return ret;
	}
	c->fd_floor = fd_floor();
	ret = migr_rst_context_build(p, c, fd, &job.why);
	return ret ? ret : learn_ctx_id(c);
}

static int build_all(void)
{
	for (uint32_t i = 0; i < job.img->nr_processes; i++) {
		struct migr_rst_process *p = job.img->processes[i];
		int ret = migr_rst_process_check(p, &job.why);

		if (!ret)
			ret = ports_look(p, &job.why);
		for (uint32_t k = 0; !ret && k < p->nr_contexts; k++)
			ret = build_context(p, &p->contexts[k]);
		if (ret)
			return ret;
	}
	return 0;
}

static void release_all(void)
{
	for (uint32_t i = 0; job.img && i < job.img->nr_processes; i++)
		for (uint32_t k = 0; k < job.img->processes[i]->nr_contexts; k++)
			migr_rst_context_release(&job.img->processes[i]->contexts[k]);
}

/* ---- hand over to CRIU ------------------------------------------------------ */

/* The name under which CRIU carries an fd over into the task. */
static void key_of(char key[48], uint32_t ctx_id, uint32_t kind, int number)
{
	snprintf(key, 48, "migr-%u-%u-%d", ctx_id, kind, kind == MIGR_FD_CHANNEL ? number : 0);
}

static int inherit(int fd, uint32_t ctx_id, uint32_t kind, int number)
{
	char key[48];

	key_of(key, ctx_id, kind, number);
	return inherit_fd_add(fd, key) ? -EIO : 0;
}

/* CRIU moves them into its fd store and closes them here. */
static int inherit_all(void)
{
	for (uint32_t i = 0; i < job.img->nr_processes; i++)
		for (uint32_t k = 0; k < job.img->processes[i]->nr_contexts; k++) {
			struct migr_rst_context *c = &job.img->processes[i]->contexts[k];
			int ret = inherit(c->cmd_fd, c->rec.ctx_id, MIGR_FD_CONTEXT, 0);

			if (!ret)
				ret = inherit(c->async_fd, c->rec.ctx_id, MIGR_FD_ASYNC, 0);
			for (uint32_t n = 0; !ret && n < c->nr_channels; n++)
				ret = inherit(c->channels[n].fd, c->rec.ctx_id, MIGR_FD_CHANNEL,
					      c->channels[n].fd_number);
			if (ret)
				return ret;
			c->cmd_fd = c->async_fd = -1;
			for (uint32_t n = 0; n < c->nr_channels; n++)
				c->channels[n].fd = -1;
		}
	return 0;
}

/* ---- what controllers ask ---------------------------------------------------- */

int restore_connect(const struct migr_rc_connect *r, struct migr_rst_err *err)
{
	struct migr_rst_context *c = migr_rst_find_context(job.img, r->src_ctx_id);
	struct migr_rst_qp *qp = c ? migr_rst_find_qp(c, r->vqpn) : NULL;
	struct migr_rst_dest dest = { .qpn = r->dest_qpn, .psn = r->dest_psn };

	if (!qp) {
		snprintf(err->text, sizeof(err->text), "no QP %#x in context %u of this job", r->vqpn, r->src_ctx_id);
		return ENOENT;
	}
	if (!r->dest_qpn) {
		qp->gone = 1;
		return 0;
	}
	memcpy(dest.dgid, r->dgid, sizeof(dest.dgid));
	return -migr_rst_qp_connect(c, qp, &dest, err);
}

static int was_connected(const struct migr_rst_qp *qp)
{
	return qp->rec.qp_type != IB_UVERBS_QPT_UD && !(qp->rec.flags & MIGR_QP_FORMER) &&
	       (qp->rec.qp_state == QPS_RTS || qp->rec.qp_state == QPS_SQD);
}

int restore_go(struct migr_rst_err *err)
{
	uint32_t contexts = 0, cm = 0;

	for (uint32_t i = 0; i < job.img->nr_processes; i++)
		for (uint32_t k = 0; k < job.img->processes[i]->nr_contexts; k++) {
			const struct migr_rst_context *c = &job.img->processes[i]->contexts[k];

			contexts++;
			for (uint32_t n = 0; n < c->rec.nr_qp; n++)
				if (was_connected(&c->qps[n]) && !c->qps[n].gone && c->qps[n].new_state != QPS_RTS) {
					snprintf(err->text, sizeof(err->text),
						 "QP %#x of context %u is not connected yet: CONNECT it first",
						 c->qps[n].rec.vqpn, c->rec.ctx_id);
					return ENOTCONN;
				}
		}
	for (uint32_t i = 0; i < job.img->nr_processes; i++)
		for (uint32_t k = 0; k < job.img->processes[i]->nr_fds; k++)
			cm += job.img->processes[i]->fds[k].kind == MIGR_FD_CM;
	for (uint32_t i = 0; i < job.img->nr_processes; i++)
		if (migr_rst_rings_index(job.img->processes[i])) {
			snprintf(err->text, sizeof(err->text), "no memory");
			return ENOMEM;
		}
	free(job.files);
	job.files = NULL;
	job.nr_files = 0;
	if (!contexts && !cm)
		return 0;	/* the dump met no descriptor of ours */
	return -migr_rst_files_read(image_dir(), &job.files, &job.nr_files, err);
}

/* ---- hooks -------------------------------------------------------------------- */

int restore_init(void)
{
	const char *path = getenv("MIGR_RESTORE_SOCKET");
	struct migr_rst_err err = { "" };
	struct timespec t0, t1;
	int ret, dir;

	if (!path || !*path)
		return 0;
	dir = image_dir();
	ret = dir < 0 ? -ENOENT : migr_rst_read(dir, &job.img, &err);
	if (ret == -ENOENT)
		return 0;
	if (!ret && (!inherit_fd_add || !inherit_fd_lookup_id)) {
		snprintf(err.text, sizeof(err.text), "this criu does not export inherit_fd_add: use 3.17 to 4.1");
		ret = -EOPNOTSUPP;
	}
	if (!ret) {
		ret = control_listen(path);
		snprintf(err.text, sizeof(err.text), "cannot listen on %s: %s", path, strerror(-ret));
	}
	if (ret) {
		say(1, "%s", err.text);
		migr_rst_image_free(job.img);
		job.img = NULL;
		return -1;
	}
	clock_gettime(CLOCK_MONOTONIC, &t0);
	job.failed = -build_all();
	clock_gettime(CLOCK_MONOTONIC, &t1);
	job.built_us = (t1.tv_sec - t0.tv_sec) * 1000000 + (t1.tv_nsec - t0.tv_nsec) / 1000;
	job.phase = PHASE_PREPARED;
	if (job.failed)
		say(1, "%s", job.why.text);
	else
		say(3, "built the RDMA objects of %u processes in %.3f ms", job.img->nr_processes, job.built_us / 1e3);
	control_serve(PHASE_PREPARED, job.failed ? FAILED_LIMIT_S : limit_from("MIGR_RESTORE_GO_LIMIT", GO_LIMIT_S));
	if (job.phase == PHASE_RESTORING && !inherit_all())
		return 0;
	say(1, "restore aborted before CRIU began");
	control_close("the restore was aborted");
	release_all();
	job.phase = PHASE_INERT;
	return -1;
}

static int hold_ports_of(uint32_t pid)
{
	for (uint32_t i = 0; i < job.img->nr_processes; i++)
		if (job.img->processes[i]->pid == pid)
			return ports_hold(job.img->processes[i]);
	say(1, "pid %u uses librdmacm and is not on record", pid);
	return -ENOENT;
}

int restore_ext_file(int id)
{
	char key[48];

	if (job.phase != PHASE_RESTORING)
		return -ENOTSUP;
	for (uint32_t i = 0; i < job.nr_files; i++) {
		const struct migr_rst_file *f = &job.files[i];
		int fd;

		if (f->id != (uint32_t)id)
			continue;
		/* The library closes it and opens the device itself, for the kernel heeds only who has opened it. */
		if (f->kind == MIGR_FD_CM)
			return hold_ports_of(f->pid);
		key_of(key, f->ctx_id, f->kind, f->fd_number);
		fd = inherit_fd_lookup_id(key);
		if (fd < 0)
			say(1, "fd %d of pid %u (%s) was not built", f->fd_number, f->pid, key);
		/*
		 * A new file blocks: its reader would not wake up before the next event, or never. Whom O_ASYNC
		 * signals, and how, CRIU says next, as it does for all files.
		 */
		if (fd >= 0)
			fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | (f->nonblock ? O_NONBLOCK : 0) | (f->async ? O_ASYNC : 0));
		return fd < 0 ? -ENOENT : fd;
	}
	return -ENOTSUP;
}

int restore_update_vma(const char *path, uint64_t addr, uint64_t old_pgoff, uint64_t *new_pgoff, int *plugin_fd)
{
	struct migr_rst_err err = { "" };
	struct migr_rst_context *c;
	uint32_t self = getpid();

	if (job.phase != PHASE_RESTORING)
		return -ENOTSUP;
	/* First the process that we are, then any: old records may not know the inner pid. */
	for (int pass = 0; pass < 2; pass++)
		for (uint32_t i = 0; i < job.img->nr_processes; i++) {
			struct migr_rst_process *p = job.img->processes[i];

			if ((p->ns_pid == self) != (pass == 0))
				continue;
			if (migr_rst_ring_find(p, addr, old_pgoff, &c, new_pgoff, &err))
				continue;
			*plugin_fd = migr_rst_fd_number(p, c->rec.ctx_id, MIGR_FD_CONTEXT);
			return 1;
		}
	/* "file[...]": what dump_device_vma declared. Else it may be another plugin's device. */
	if (!strstr(path, "infiniband/uverbs") && strncmp(path, "file[", 5))
		return -ENOTSUP;
	say(1, "%s", err.text);
	return -ENOENT;
}

void restore_still_held(int let_go)
{
	if (job.failed)
		return;
	job.failed = held_bind(job.root, !let_go, &job.why);
	if (job.failed)
		say(1, "%s", job.why.text);
}

int restore_resume_late(int pid)
{
	if (job.phase == PHASE_INERT)
		return -ENOTSUP;
	if (job.phase == PHASE_RESTORING) {
		/* CRIU has closed what it carried over; the tasks hold it. The first that it names is the root of its tree. */
		job.root = pid;
		restore_still_held(0);
		if (!job.failed) {
			job.failed = ahead_register(job.img, pid, limit_from("MIGR_RESTORE_REGISTER_LIMIT", REGISTER_LIMIT_S) * 1000, &job.why);
			if (job.failed)
				say(1, "%s", job.why.text);
		}
		if (!job.failed) {
			job.failed = wiped_give_back(pid, image_dir(), &job.why);
			if (job.failed)
				say(1, "%s", job.why.text);
		}
		if (!job.failed)
			cpus_give_back(pid, image_dir());
		job.phase = PHASE_HELD;
		if (!job.failed)
			say(3, "memory is final, tasks wait for COMMIT");
		control_serve(PHASE_HELD, job.failed ? FAILED_LIMIT_S :
						       limit_from("MIGR_RESTORE_COMMIT_LIMIT", COMMIT_LIMIT_S));
	}
	if (job.phase == PHASE_COMMITTED)
		return 0;
	/*
	 * CRIU does not heed the status of this hook. It does fail when it cannot
	 * let go of a task: a dead one. This hook is called for each.
	 */
	say(1, "restore aborted: killing task %d", pid);
	kill(pid, SIGKILL);
	return -1;
}

void restore_exit(int ret)
{
	if (job.phase == PHASE_INERT)
		return;
	if (job.phase != PHASE_COMMITTED || ret)
		control_close(job.phase == PHASE_COMMITTED ? "CRIU failed after the commit: see its log" :
							     "CRIU could not restore: see its log");
	else
		control_close(NULL);
	release_all();
	/* Tasks were killed, yet CRIU means that all is well: nobody else may. */
	if (job.phase == PHASE_ABORTED && !ret)
		_exit(1);
	migr_rst_image_free(job.img);
	free(job.files);
	memset(&job, 0, sizeof(job));
}
