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

/* What a mapping is counted in. */
static uint64_t pages(uint64_t bytes)
{
	return (bytes + 4095) / 4096;
}

/* By what the process itself said (@n rings @to are of the new object); it also knows of rings that were resized. */
static int match_described(const struct migr_fd_desc *d, const struct migr_rst_ring to[2], int n, uint64_t *new_pgoff)
{
	if (n < 0 || d->ring >= (uint32_t)n)
		return -ENOENT;
	if (pages(to[d->ring].bytes) != pages(d->bytes))
		return -EMSGSIZE;
	*new_pgoff = to[d->ring].pgoff;
	return 0;
}

struct ring_ref {
	uint64_t old_pgoff, new_pgoff;
	uint32_t context;	/* index in the process */
	int ret;		/* 0 or -EMSGSIZE */
};

struct object_ref {
	uint32_t ctx_id, type, handle;
	const struct migr_rst_resp *resp;
};

struct migr_rst_ring_index {
	uint32_t nr_refs, nr_descs, nr_objects;
	const struct migr_fd_desc **descs;	/* RING, by address */
	struct object_ref *objects;		/* by context, type and handle */
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

static int by_object(const void *a, const void *b)
{
	const struct object_ref *x = a, *y = b;

	if (x->ctx_id != y->ctx_id)
		return x->ctx_id < y->ctx_id ? -1 : 1;
	if (x->type != y->type)
		return x->type < y->type ? -1 : 1;
	return x->handle < y->handle ? -1 : x->handle > y->handle;
}

/* An object, and its rings from the @first. */
static void add_object(struct migr_rst_ring_index *index, const struct migr_rst_process *p, uint32_t context, uint32_t type,
		       uint32_t handle, int first, const struct migr_rst_resp *was, const struct migr_rst_resp *is)
{
	struct migr_rst_ring from[2], to[2];
	int n = migr_rst_rings(type, was, from);

	index->objects[index->nr_objects++] = (struct object_ref){ p->contexts[context].rec.ctx_id, type, handle, is };
	if (n < 0 || migr_rst_rings(type, is, to) != n)
		return;
	for (int i = first; i < n; i++)
		if (from[i].bytes)
			index->refs[index->nr_refs++] = (struct ring_ref){
				from[i].pgoff, to[i].pgoff, context, pages(to[i].bytes) == pages(from[i].bytes) ? 0 : -EMSGSIZE,
			};
}

int migr_rst_rings_index(struct migr_rst_process *p)
{
	struct migr_rst_ring_index *index;
	size_t objects = 0, rings, descs;

	for (uint32_t i = 0; i < p->nr_contexts; i++)
		objects += p->contexts[i].rec.nr_cq + p->contexts[i].rec.nr_srq + p->contexts[i].rec.nr_qp;
	rings = sizeof(*index) + 2 * objects * sizeof(index->refs[0]);
	descs = rings + objects * sizeof(index->objects[0]);
	index = calloc(1, descs + p->nr_fds * sizeof(index->descs[0]));
	if (!index)
		return -ENOMEM;
	index->objects = (struct object_ref *)((char *)index + rings);
	index->descs = (const struct migr_fd_desc **)((char *)index + descs);
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		const struct migr_rst_context *c = &p->contexts[i];

		for (uint32_t k = 0; k < c->rec.nr_cq; k++)
			add_object(index, p, i, MIGR_OBJ_CQ, c->cqs[k].rec.handle, 0, &c->cqs[k].resp, &c->cqs[k].new_resp);
		for (uint32_t k = 0; k < c->rec.nr_srq; k++)
			add_object(index, p, i, MIGR_OBJ_SRQ, c->srqs[k].rec.handle, 0, &c->srqs[k].resp, &c->srqs[k].new_resp);
		/* One that receives from an SRQ has no RQ: nothing was written there. */
		for (uint32_t k = 0; k < c->rec.nr_qp; k++)
			add_object(index, p, i, MIGR_OBJ_QP, c->qps[k].rec.handle, c->qps[k].rec.srq_handle != MIGR_NO_HANDLE,
				   &c->qps[k].resp, &c->qps[k].new_resp);
	}
	for (uint32_t i = 0; i < p->nr_fds; i++)
		if (p->fds[i].kind == MIGR_FD_RING)
			index->descs[index->nr_descs++] = &p->fds[i];
	qsort(index->refs, index->nr_refs, sizeof(index->refs[0]), by_offset);
	qsort(index->objects, index->nr_objects, sizeof(index->objects[0]), by_object);
	qsort(index->descs, index->nr_descs, sizeof(index->descs[0]), by_address);
	free(p->rings);
	p->rings = index;
	return 0;
}

/* The rings of the new object that @d is of; how many, or a negative errno. */
static int new_rings(const struct migr_rst_ring_index *index, const struct migr_fd_desc *d, struct migr_rst_ring out[2])
{
	const struct object_ref key = { d->ctx_id, d->obj_type, d->obj_handle, NULL };
	const struct object_ref *o = bsearch(&key, index->objects, index->nr_objects, sizeof(key), by_object);

	return o ? migr_rst_rings(d->obj_type, o->resp, out) : -ENOENT;
}

/* By the offset in the driver's answer to create; of the context @only or (NULL) any. */
static int match_offset(const struct migr_rst_process *p, const struct migr_rst_context *only, uint64_t old_pgoff,
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

/* The described ring at @addr, or NULL. */
static const struct migr_fd_desc *described(const struct migr_rst_ring_index *index, uint64_t addr)
{
	const struct migr_fd_desc want = { .addr = addr }, *key = &want;
	const struct migr_fd_desc **d = bsearch(&key, index->descs, index->nr_descs, sizeof(*d), by_address);

	return d ? *d : NULL;
}

static struct migr_rst_context *context_of(const struct migr_rst_process *p, uint32_t ctx_id)
{
	for (uint32_t i = 0; i < p->nr_contexts; i++)
		if (p->contexts[i].rec.ctx_id == ctx_id)
			return &p->contexts[i];
	return NULL;
}

int migr_rst_ring_find(struct migr_rst_process *p, uint64_t addr, uint64_t old_pgoff,
		       struct migr_rst_context **c, uint64_t *new_pgoff, struct migr_rst_err *err)
{
	const struct migr_fd_desc *d;
	struct migr_rst_ring to[2];
	int ret;

	if (!p->rings && migr_rst_rings_index(p))
		return rst_fail(err, ENOMEM, "no memory");
	/* Offsets are unique on a device only: two devices may have used the same. */
	d = described(p->rings, addr);
	if (d && d->pgoff == old_pgoff) {
		*c = context_of(p, d->ctx_id);
		ret = *c ? match_described(d, to, new_rings(p->rings, d, to), new_pgoff) : -ENOENT;
	} else {
		ret = match_offset(p, d ? context_of(p, d->ctx_id) : NULL, old_pgoff, c, new_pgoff);
	}
	if (ret == -EMSGSIZE)
		return rst_fail(err, EMSGSIZE, "the ring at %#llx of pid %u has another size here: another driver version?",
				(unsigned long long)addr, p->pid);
	if (ret)
		return rst_fail(err, ENOENT, "the mapping at %#llx (offset %#llx) is no ring of pid %u's record",
				(unsigned long long)addr, (unsigned long long)old_pgoff, p->pid);
	return 0;
}
