// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* The graph in memory: make, find, check. */
#include <errno.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

int rst_fail(struct migr_rst_err *err, int errnum, const char *fmt, ...)
{
	va_list ap;

	if (err) {
		va_start(ap, fmt);
		vsnprintf(err->text, sizeof(err->text), fmt, ap);
		va_end(ap);
	}
	return -errnum;
}

/* Appends a zeroed element to *arr; grows by doubling at powers of two. */
static void *append(void **arr, uint32_t *nr, size_t size)
{
	if ((*nr & (*nr - 1)) == 0) {
		void *bigger = reallocarray(*arr, *nr ? (size_t)*nr * 2 : 1, size);

		if (!bigger)
			return NULL;
		*arr = bigger;
	}
	void *e = (char *)*arr + (*nr)++ * size;

	memset(e, 0, size);
	return e;
}

#define APPEND(arr, nr) append((void **)&(arr), &(nr), sizeof(*(arr)))

struct migr_rst_process *migr_rst_process_new(uint32_t pid)
{
	struct migr_rst_process *p = calloc(1, sizeof(*p));

	if (p)
		p->pid = p->ns_pid = pid;
	return p;
}

void migr_rst_process_free(struct migr_rst_process *p)
{
	if (!p)
		return;
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		struct migr_rst_context *c = &p->contexts[i];

		free(c->pds);
		free(c->mrs);
		free(c->cqs);
		free(c->qps);
		free(c->srqs);
		free(c->others);
		free(c->channels);
	}
	free(p->contexts);
	free(p->fds);
	free(p->rings);
	free(p);
}

struct migr_rst_context *migr_rst_add_context(struct migr_rst_process *p)
{
	struct migr_rst_context *c = APPEND(p->contexts, p->nr_contexts);

	if (c)
		c->cmd_fd = c->async_fd = -1;
	return c;
}

struct migr_rst_pd *migr_rst_add_pd(struct migr_rst_context *c)
{
	return APPEND(c->pds, c->rec.nr_pd);
}

struct migr_rst_mr *migr_rst_add_mr(struct migr_rst_context *c)
{
	return APPEND(c->mrs, c->rec.nr_mr);
}

struct migr_rst_cq *migr_rst_add_cq(struct migr_rst_context *c)
{
	return APPEND(c->cqs, c->rec.nr_cq);
}

struct migr_rst_qp *migr_rst_add_qp(struct migr_rst_context *c)
{
	return APPEND(c->qps, c->rec.nr_qp);
}

struct migr_rst_srq *migr_rst_add_srq(struct migr_rst_context *c)
{
	return APPEND(c->srqs, c->rec.nr_srq);
}

struct migr_rst_other *migr_rst_add_other(struct migr_rst_context *c)
{
	return APPEND(c->others, c->nr_others);
}

int migr_rst_process_describe(struct migr_rst_process *p, const struct migr_fd_desc *fds, uint32_t nr,
			      const uint8_t instance[16])
{
	struct migr_fd_desc *copy = NULL;

	if (nr) {
		copy = calloc(nr, sizeof(*copy));
		if (!copy)
			return -ENOMEM;
		memcpy(copy, fds, nr * sizeof(*copy));
	}
	free(p->fds);
	p->fds = copy;
	p->nr_fds = nr;
	if (instance)
		memcpy(p->instance, instance, sizeof(p->instance));
	return 0;
}

struct migr_rst_image *migr_rst_image_new(void)
{
	return calloc(1, sizeof(struct migr_rst_image));
}

void migr_rst_image_free(struct migr_rst_image *img)
{
	if (!img)
		return;
	for (uint32_t i = 0; i < img->nr_processes; i++)
		migr_rst_process_free(img->processes[i]);
	free(img->processes);
	free(img);
}

int migr_rst_image_add(struct migr_rst_image *img, struct migr_rst_process *p)
{
	struct migr_rst_process **slot = APPEND(img->processes, img->nr_processes);

	if (!slot)
		return -ENOMEM;
	*slot = p;
	return 0;
}

struct migr_rst_pd *rst_find_pd(const struct migr_rst_context *c, uint32_t old_handle)
{
	for (uint32_t i = 0; i < c->rec.nr_pd; i++)
		if (c->pds[i].rec.handle == old_handle)
			return &c->pds[i];
	return NULL;
}

struct migr_rst_cq *rst_find_cq(const struct migr_rst_context *c, uint32_t old_handle)
{
	for (uint32_t i = 0; i < c->rec.nr_cq; i++)
		if (c->cqs[i].rec.handle == old_handle)
			return &c->cqs[i];
	return NULL;
}

struct migr_rst_srq *rst_find_srq(const struct migr_rst_context *c, uint32_t old_handle)
{
	for (uint32_t i = 0; i < c->rec.nr_srq; i++)
		if (c->srqs[i].rec.handle == old_handle)
			return &c->srqs[i];
	return NULL;
}

struct migr_rst_qp *migr_rst_find_qp(const struct migr_rst_context *c, uint32_t vqpn)
{
	for (uint32_t i = 0; i < c->rec.nr_qp; i++)
		if (c->qps[i].rec.vqpn == vqpn && !(c->qps[i].rec.flags & MIGR_QP_FORMER))
			return &c->qps[i];
	return NULL;
}

struct migr_rst_context *migr_rst_find_context(const struct migr_rst_image *img, uint32_t src_ctx_id)
{
	for (uint32_t i = 0; i < img->nr_processes; i++)
		for (uint32_t j = 0; j < img->processes[i]->nr_contexts; j++)
			if (img->processes[i]->contexts[j].rec.ctx_id == src_ctx_id)
				return &img->processes[i]->contexts[j];
	return NULL;
}

int migr_rst_fd_number(const struct migr_rst_process *p, uint32_t src_ctx_id, uint32_t kind)
{
	for (uint32_t i = 0; i < p->nr_fds; i++)
		if (p->fds[i].kind == kind && p->fds[i].ctx_id == src_ctx_id)
			return p->fds[i].fd;
	return -1;
}

/* ---- check ---------------------------------------------------------------- */

static const char *const obj_names[__MIGR_OBJ_MAX] = {
	[MIGR_OBJ_PD] = "protection domain", [MIGR_OBJ_MR] = "memory region",
	[MIGR_OBJ_CQ] = "completion queue",  [MIGR_OBJ_QP] = "queue pair",
	[MIGR_OBJ_SRQ] = "shared receive queue", [MIGR_OBJ_MW] = "memory window",
	[MIGR_OBJ_AH] = "address handle",    [MIGR_OBJ_XRCD] = "XRC domain",
	[MIGR_OBJ_DM] = "device memory",
};

static int check_qp(const struct migr_rst_context *c, const struct migr_qp_rec *q, uint32_t pid,
		    struct migr_rst_err *err)
{
	if (!rst_find_pd(c, q->pd_handle))
		return rst_fail(err, EBADMSG, "QP %#x of pid %u: its PD %u is not on record", q->vqpn, pid,
				q->pd_handle);
	if (!rst_find_cq(c, q->send_cq_handle) || !rst_find_cq(c, q->recv_cq_handle))
		return rst_fail(err, EBADMSG, "QP %#x of pid %u: its CQ %u or %u is not on record", q->vqpn, pid,
				q->send_cq_handle, q->recv_cq_handle);
	if (q->srq_handle != MIGR_NO_HANDLE && !rst_find_srq(c, q->srq_handle))
		return rst_fail(err, EBADMSG, "QP %#x of pid %u: its SRQ %u is not on record", q->vqpn, pid,
				q->srq_handle);
	if (q->qp_type != IB_UVERBS_QPT_RC && q->qp_type != IB_UVERBS_QPT_UC && q->qp_type != IB_UVERBS_QPT_UD)
		return rst_fail(err, EOPNOTSUPP, "QP %#x of pid %u has type %u: only RC, UC and UD are restorable",
				q->vqpn, pid, q->qp_type);
	if (q->vqpn > MIGR_QPN_MASK || q->pqpn > MIGR_QPN_MASK || q->dest_qpn > MIGR_QPN_MASK)
		return rst_fail(err, ERANGE, "QP %#x of pid %u: a QP number is wider than 24 bits", q->vqpn, pid);
	return 0;
}

static int check_srq(const struct migr_rst_context *c, const struct migr_srq_rec *s, uint32_t pid,
		     struct migr_rst_err *err)
{
	if (!rst_find_pd(c, s->pd_handle))
		return rst_fail(err, EBADMSG, "SRQ %u of pid %u: its PD %u is not on record", s->handle, pid,
				s->pd_handle);
	if (s->srq_type != IB_UVERBS_SRQT_BASIC)
		return rst_fail(err, EOPNOTSUPP, "SRQ %u of pid %u is one for %s: only basic ones are restorable",
				s->handle, pid, s->srq_type == IB_UVERBS_SRQT_XRC ? "XRC" : "tag matching");
	return 0;
}

static int check_context(const struct migr_rst_process *p, const struct migr_rst_context *c,
			 struct migr_rst_err *err)
{
	if (c->rec.flags & MIGR_CTX_HYDRATED)
		return rst_fail(err, EOPNOTSUPP,
				"context %u of pid %u existed before migr.ko was loaded: its record is incomplete; restart the process",
				c->rec.ctx_id, p->pid);
	if (migr_rst_fd_number(p, c->rec.ctx_id, MIGR_FD_CONTEXT) < 0)
		return rst_fail(err, ENOENT,
				"context %u of pid %u (%s): no file descriptor described; does the process run with libmigr?",
				c->rec.ctx_id, p->pid, c->rec.ibdev);
	for (uint32_t i = 0; i < c->nr_others; i++) {
		uint32_t type = c->others[i].obj_type;

		if (type == MIGR_OBJ_AH || type == MIGR_OBJ_MW)	/* the process makes it again, as it does its MRs */
			continue;
		return rst_fail(err, EOPNOTSUPP, "pid %u holds a %s (handle %u): not restorable yet", p->pid,
				type < __MIGR_OBJ_MAX && obj_names[type] ? obj_names[type] : "object of unknown kind",
				c->others[i].rec.handle);
	}
	for (uint32_t i = 0; i < c->rec.nr_mr; i++) {
		const struct migr_mr_rec *mr = &c->mrs[i].rec;

		if (!rst_find_pd(c, mr->pd_handle))
			return rst_fail(err, EBADMSG, "MR %u of pid %u: its PD %u is not on record", mr->handle, p->pid,
					mr->pd_handle);
		if (mr->flags & (MIGR_MR_DMABUF | MIGR_MR_DM))
			return rst_fail(err, EOPNOTSUPP,
					"MR %u of pid %u is memory of a device: only the process's own can be restored",
					mr->handle, p->pid);
	}
	for (uint32_t i = 0; i < c->rec.nr_cq; i++) {
		const struct migr_cq_rec *cq = &c->cqs[i].rec;
		int has_fd = 0;

		for (uint32_t f = 0; f < p->nr_fds; f++)
			has_fd |= p->fds[f].kind == MIGR_FD_CHANNEL && p->fds[f].ctx_id == c->rec.ctx_id &&
				  p->fds[f].cq_handle == cq->handle;
		if (cq->channel && !has_fd)
			return rst_fail(err, ENOENT, "CQ %u of pid %u: its completion channel has no described fd",
					cq->handle, p->pid);
	}
	for (uint32_t i = 0; i < c->rec.nr_srq; i++) {
		int ret = check_srq(c, &c->srqs[i].rec, p->pid, err);

		if (ret)
			return ret;
	}
	for (uint32_t i = 0; i < c->rec.nr_qp; i++) {
		int ret = check_qp(c, &c->qps[i].rec, p->pid, err);

		if (ret)
			return ret;
	}
	return 0;
}

int migr_rst_process_check(const struct migr_rst_process *p, struct migr_rst_err *err)
{
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		int ret = check_context(p, &p->contexts[i], err);

		if (ret)
			return ret;
	}
	return 0;
}
