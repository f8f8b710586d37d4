// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Where the rings of queues are, in what drivers answer to their creation. A
 * driver is told by the length of its answers; the record and the new objects are
 * of the same driver, or their lengths would differ.
 */
#include <errno.h>
#include <rdma/rdma_user_rxe.h>
#include <stdlib.h>
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

/* ---- index ---------------------------------------------------------------------- */

struct ring_ref {
	uint64_t old_pgoff, new_pgoff;
	uint32_t context;	/* index in the process */
	int ret;		/* 0 or -EMSGSIZE */
};

struct migr_rst_ring_index {
	uint32_t nr_refs, nr_descs;
	const struct migr_fd_desc **descs;	/* RING, by address */
	struct ring_ref refs[];			/* by old offset */
};

static int by_offset(const void *a, const void *b)
{
	const struct ring_ref *x = a, *y = b;

	return x->old_pgoff < y->old_pgoff ? -1 : x->old_pgoff > y->old_pgoff;
}

static int by_address(const void *a, const void *b)
{
	const struct migr_fd_desc *const *x = a, *const *y = b;

	return (*x)->addr < (*y)->addr ? -1 : (*x)->addr > (*y)->addr;
}

static void add_refs(struct migr_rst_ring_index *index, uint32_t context, uint32_t type, const struct migr_rst_resp *was,
		     const struct migr_rst_resp *is)
{
	struct migr_rst_ring from[2], to[2];
	int n = migr_rst_rings(type, was, from);

	if (n < 0 || migr_rst_rings(type, is, to) != n)
		return;
	for (int i = 0; i < n; i++)
		if (from[i].bytes)
			index->refs[index->nr_refs++] = (struct ring_ref){
				from[i].pgoff, to[i].pgoff, context, pages(to[i].bytes) == pages(from[i].bytes) ? 0 : -EMSGSIZE,
			};
}

int migr_rst_rings_index(struct migr_rst_process *p)
{
	struct migr_rst_ring_index *index;
	uint32_t most = 0;
	size_t head;

	for (uint32_t i = 0; i < p->nr_contexts; i++)
		most += p->contexts[i].rec.nr_cq + 2 * p->contexts[i].rec.nr_qp;
	head = sizeof(*index) + most * sizeof(index->refs[0]);
	index = calloc(1, head + p->nr_fds * sizeof(index->descs[0]));
	if (!index)
		return -ENOMEM;
	index->descs = (const struct migr_fd_desc **)((char *)index + head);
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		const struct migr_rst_context *c = &p->contexts[i];

		for (uint32_t k = 0; k < c->rec.nr_cq; k++)
			add_refs(index, i, MIGR_OBJ_CQ, &c->cqs[k].resp, &c->cqs[k].new_resp);
		for (uint32_t k = 0; k < c->rec.nr_qp; k++)
			add_refs(index, i, MIGR_OBJ_QP, &c->qps[k].resp, &c->qps[k].new_resp);
	}
	for (uint32_t i = 0; i < p->nr_fds; i++)
		if (p->fds[i].kind == MIGR_FD_RING)
			index->descs[index->nr_descs++] = &p->fds[i];
	qsort(index->refs, index->nr_refs, sizeof(index->refs[0]), by_offset);
	qsort(index->descs, index->nr_descs, sizeof(index->descs[0]), by_address);
	free(p->rings);
	p->rings = index;
	return 0;
}

/* As match_context(), of the context @only or (NULL) any. */
static int match_index(const struct migr_rst_process *p, const struct migr_rst_context *only, uint64_t old_pgoff,
		       struct migr_rst_context **c, uint64_t *new_pgoff)
{
	const struct migr_rst_ring_index *index = p->rings;
	const struct ring_ref key = { .old_pgoff = old_pgoff };
	const struct ring_ref *r = bsearch(&key, index->refs, index->nr_refs, sizeof(key), by_offset);

	while (r && r > index->refs && r[-1].old_pgoff == old_pgoff)
		r--;
	for (; r && r < index->refs + index->nr_refs && r->old_pgoff == old_pgoff; r++) {
		if (only && only != &p->contexts[r->context])
			continue;
		*c = &p->contexts[r->context];
		*new_pgoff = r->new_pgoff;
		return r->ret;
	}
	return -ENOENT;
}

static const struct migr_fd_desc *described_in_index(const struct migr_rst_ring_index *index, uint64_t addr)
{
	const struct migr_fd_desc want = { .addr = addr }, *key = &want;
	const struct migr_fd_desc **d = bsearch(&key, index->descs, index->nr_descs, sizeof(*d), by_address);

	return d ? *d : NULL;
}

static const struct migr_rst_context *context_of(const struct migr_rst_process *p, uint32_t ctx_id)
{
	for (uint32_t i = 0; i < p->nr_contexts; i++)
		if (p->contexts[i].rec.ctx_id == ctx_id)
			return &p->contexts[i];
	return NULL;
}

static int other_size(const struct migr_rst_process *p, uint64_t addr, struct migr_rst_err *err)
{
	return rst_fail(err, EMSGSIZE, "the ring at %#llx of pid %u has another size here: another driver version?",
			(unsigned long long)addr, p->pid);
}

static int no_ring(const struct migr_rst_process *p, uint64_t addr, uint64_t old_pgoff, struct migr_rst_err *err)
{
	return rst_fail(err, ENOENT, "the mapping at %#llx (offset %#llx) is no ring of pid %u's record",
			(unsigned long long)addr, (unsigned long long)old_pgoff, p->pid);
}

int migr_rst_ring_find(const struct migr_rst_process *p, uint64_t addr, uint64_t old_pgoff,
		       struct migr_rst_context **c, uint64_t *new_pgoff, struct migr_rst_err *err)
{
	/* Offsets are unique on a device only: two devices may have used the same. */
	const struct migr_fd_desc *d = p->rings ? described_in_index(p->rings, addr) : described(p, addr);

	if (p->rings) {
		int ret = match_index(p, d ? context_of(p, d->ctx_id) : NULL, old_pgoff, c, new_pgoff);

		if (!ret)
			return 0;
		if (ret == -EMSGSIZE)
			return other_size(p, addr, err);
		return no_ring(p, addr, old_pgoff, err);
	}
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		struct migr_rst_context *ctx = &p->contexts[i];
		int ret;

		if (d && d->ctx_id != ctx->rec.ctx_id)
			continue;
		ret = d && d->pgoff == old_pgoff ? match_described(ctx, d, new_pgoff) :
						   match_context(ctx, old_pgoff, new_pgoff);
		if (ret == -EMSGSIZE)
			return other_size(p, addr, err);
		if (ret)
			continue;
		*c = ctx;
		return 0;
	}
	return no_ring(p, addr, old_pgoff, err);
}
