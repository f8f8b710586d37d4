// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Where the rings of queues are, in what drivers answer to their creation. A
 * driver is told by the length of its answers; the record and the new objects are
 * of the same driver, or their lengths would differ.
 */
#include <errno.h>
#include <rdma/rdma_user_rxe.h>
#include <string.h>

#include "internal.h"

static struct migr_rst_ring ring_of(const struct mminfo *mi)
{
	return (struct migr_rst_ring){ .pgoff = mi->offset, .bytes = mi->size };
}

int migr_rst_rings(uint32_t obj_type, const struct migr_rst_resp *resp, struct migr_rst_ring out[2])
{
	memset(out, 0, 2 * sizeof(*out));
	if (obj_type == MIGR_OBJ_CQ && resp->len == sizeof(struct rxe_create_cq_resp)) {
		struct rxe_create_cq_resp r;

		memcpy(&r, resp->data, sizeof(r));
		out[0] = ring_of(&r.mi);
		return 1;
	}
	if (obj_type == MIGR_OBJ_SRQ && resp->len == sizeof(struct rxe_create_srq_resp)) {
		struct rxe_create_srq_resp r;

		memcpy(&r, resp->data, sizeof(r));
		out[0] = ring_of(&r.mi);
		return 1;
	}
	if (obj_type == MIGR_OBJ_QP && resp->len == sizeof(struct rxe_create_qp_resp)) {
		struct rxe_create_qp_resp r;

		memcpy(&r, resp->data, sizeof(r));
		out[0] = ring_of(&r.rq_mi);
		out[1] = ring_of(&r.sq_mi);
		return 2;
	}
	return -EOPNOTSUPP;
}

/* The described ring at @addr, or NULL. */
static const struct migr_fd_desc *described(const struct migr_rst_process *p, uint64_t addr)
{
	for (uint32_t i = 0; i < p->nr_fds; i++)
		if (p->fds[i].kind == MIGR_FD_RING && p->fds[i].addr == addr)
			return &p->fds[i];
	return NULL;
}

/* What a mapping is counted in. */
static uint64_t pages(uint64_t bytes)
{
	return (bytes + 4095) / 4096;
}

/* The rings of the new object @handle was; how many, or a negative errno. */
static int new_rings(const struct migr_rst_context *c, uint32_t type, uint32_t handle, struct migr_rst_ring out[2])
{
	const struct migr_rst_resp *resp = NULL;

	for (uint32_t i = 0; type == MIGR_OBJ_CQ && i < c->rec.nr_cq; i++)
		if (c->cqs[i].rec.handle == handle)
			resp = &c->cqs[i].new_resp;
	for (uint32_t i = 0; type == MIGR_OBJ_SRQ && i < c->rec.nr_srq; i++)
		if (c->srqs[i].rec.handle == handle)
			resp = &c->srqs[i].new_resp;
	for (uint32_t i = 0; type == MIGR_OBJ_QP && i < c->rec.nr_qp; i++)
		if (c->qps[i].rec.handle == handle)
			resp = &c->qps[i].new_resp;
	return resp ? migr_rst_rings(type, resp, out) : -ENOENT;
}

/* By what the process itself said; it also knows of rings that were resized. */
static int match_described(const struct migr_rst_context *c, const struct migr_fd_desc *d, uint64_t *new_pgoff)
{
	struct migr_rst_ring to[2];
	int n = new_rings(c, d->obj_type, d->obj_handle, to);

	if (n < 0 || d->ring >= (uint32_t)n)
		return -ENOENT;
	if (pages(to[d->ring].bytes) != pages(d->bytes))
		return -EMSGSIZE;
	*new_pgoff = to[d->ring].pgoff;
	return 0;
}

/* Matches one object's rings from the @first; 0 when @old_pgoff is one of them. */
static int match(uint32_t type, int first, const struct migr_rst_resp *was, const struct migr_rst_resp *is,
		 uint64_t old_pgoff, uint64_t *new_pgoff)
{
	struct migr_rst_ring from[2], to[2];
	int n = migr_rst_rings(type, was, from);

	if (n < 0 || migr_rst_rings(type, is, to) != n)
		return -ENOENT;
	for (int i = first; i < n; i++) {
		if (!from[i].bytes || from[i].pgoff != old_pgoff)
			continue;
		if (pages(to[i].bytes) != pages(from[i].bytes))
			return -EMSGSIZE;
		*new_pgoff = to[i].pgoff;
		return 0;
	}
	return -ENOENT;
}

static int match_context(const struct migr_rst_context *c, uint64_t old_pgoff, uint64_t *new_pgoff)
{
	int ret = -ENOENT;

	for (uint32_t i = 0; ret == -ENOENT && i < c->rec.nr_cq; i++)
		ret = match(MIGR_OBJ_CQ, 0, &c->cqs[i].resp, &c->cqs[i].new_resp, old_pgoff, new_pgoff);
	for (uint32_t i = 0; ret == -ENOENT && i < c->rec.nr_srq; i++)
		ret = match(MIGR_OBJ_SRQ, 0, &c->srqs[i].resp, &c->srqs[i].new_resp, old_pgoff, new_pgoff);
	/* One that receives from an SRQ has no RQ: nothing was written there. */
	for (uint32_t i = 0; ret == -ENOENT && i < c->rec.nr_qp; i++)
		ret = match(MIGR_OBJ_QP, c->qps[i].rec.srq_handle != MIGR_NO_HANDLE, &c->qps[i].resp,
			    &c->qps[i].new_resp, old_pgoff, new_pgoff);
	return ret;
}

int migr_rst_ring_find(const struct migr_rst_process *p, uint64_t addr, uint64_t old_pgoff,
		       struct migr_rst_context **c, uint64_t *new_pgoff, struct migr_rst_err *err)
{
	/* Offsets are unique on a device only: two devices may have used the same. */
	const struct migr_fd_desc *d = described(p, addr);

	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		struct migr_rst_context *ctx = &p->contexts[i];
		int ret;

		if (d && d->ctx_id != ctx->rec.ctx_id)
			continue;
		ret = d && d->pgoff == old_pgoff ? match_described(ctx, d, new_pgoff) :
						   match_context(ctx, old_pgoff, new_pgoff);
		if (ret == -EMSGSIZE)
			return rst_fail(err, EMSGSIZE,
					"the ring at %#llx of pid %u has another size here: another driver version?",
					(unsigned long long)addr, p->pid);
		if (ret)
			continue;
		*c = ctx;
		return 0;
	}
	return rst_fail(err, ENOENT, "the mapping at %#llx (offset %#llx) is no ring of pid %u's record",
			(unsigned long long)addr, (unsigned long long)old_pgoff, p->pid);
}
