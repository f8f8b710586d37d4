/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * A libibverbs.so.1 with one device in it whose data path does in memory what a
 * provider for real hardware does: takes the queue's lock, checks for room and
 * limits, writes big-endian WQE segments into a ring, remembers the wr_id, and
 * rings a doorbell (doorbell record, store barrier, 64-byte write-combining copy,
 * which is ordinary memory here). Polling checks the owner bit, finds the QP by
 * its number, decodes, and returns the consumer index. The WQE layout is its own.
 * Everything lies in the nearest cache, as it does not with hardware: a call is
 * cheaper than a real one and hides less of what is put in front of it.
 *
 * Nothing completes by itself: see stub.h. Control calls do the least that lets
 * a program, and libmigr in front of it, make objects. One device, one process,
 * at most STUB_QPS queue pairs at a time.
 */
#include "stub.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

enum {
	STUB_QPS = 256,
	STUB_FIRST_QPN = 0x100,
	STUB_FIRST_KEY = 0x1000,	/* of 24 bits; the low 8 of a key are a tag */
	WQE_BYTES = 64,
	SEGMENTS = 4,			/* of 16 bytes in a WQE: control, remote or data, data.. */
	OP_SEND = 0x0a, OP_SEND_IMM = 0x0b, OP_WRITE = 0x08, OP_WRITE_IMM = 0x09, OP_READ = 0x10,
	CQE_REQ = 0x0, CQE_RESP_SEND = 0x2, CQE_INVALID = 0xf,
	SIGNAL = 8, SOLICIT = 2, FENCE = 0x80,
};

#define likely(x)	__builtin_expect(!!(x), 1)
#define unlikely(x)	__builtin_expect(!!(x), 0)

struct segment {
	union {
		struct { __be32 op_index, qpn_size; uint8_t signature, rsvd[2], flags; __be32 imm; } control;
		struct { __be64 addr; __be32 rkey, rsvd; } remote;
		struct { __be32 length, lkey; __be64 addr; } data;
	};
};

struct cqe {
	uint8_t rsvd[32];
	__be32 imm, qpn, byte_len;
	__be32 send_op;
	uint8_t rsvd2[8];
	__be16 index;
	uint8_t syndrome, op_owner;	/* opcode << 4 | owner */
	uint8_t rsvd3[4];
};

_Static_assert(sizeof(struct segment) == 16 && sizeof(struct cqe) == 64, "hardware-like sizes");

struct ring {
	pthread_spinlock_t lock;
	uint8_t *wqes;
	uint64_t *wrids;
	uint32_t *heads;
	uint32_t count;			/* power of two */
	uint32_t head, tail;		/* in WRs */
	uint32_t max_sge;
	uint32_t completed;		/* stub.h only: WRs that have a CQE */
	__be32 *doorbell;
	const void *last_wr;
};

struct stub_qp {
	union { struct ibv_qp qp; struct ibv_qp_ex ex; };
	uint64_t comp_mask;
	struct ring sq, rq;
	pthread_spinlock_t blue_flame_lock;	/* QPs share doorbell pages */
	uint8_t *blue_flame;		/* two halves of 64 bytes in turn */
	unsigned int blue_flame_offset;
	uint8_t signal_all;
	/* an open ibv_wr_* session */
	uint32_t session_start;
	int session_error;
	struct segment *now;
	unsigned int now_size, now_index;
};

struct stub_cq {
	union { struct ibv_cq cq; struct ibv_cq_ex ex; };
	pthread_spinlock_t lock;
	struct cqe *cqes;
	uint32_t mask, consumer, producer;
	__be32 *doorbell;
	struct stub_qp *last_qp;
	struct cqe *now;		/* of an ibv_cq_ex session */
};

struct stub_context {
	struct stub_qp **qps[16];	/* by QPN: directory of tables, as providers have it */
	struct verbs_context verbs;
};

static struct ibv_device the_device = {
	.node_type = IBV_NODE_CA,
	.transport_type = IBV_TRANSPORT_IB,
	.name = "stub0",
	.dev_name = "uverbs0",
};

static struct stub_context *the_context;
static uint32_t next_key = STUB_FIRST_KEY;
static uint32_t next_handle = 1;

static inline struct stub_context *context_of(struct ibv_context *c)
{
	return (struct stub_context *)((char *)c - offsetof(struct stub_context, verbs.context));
}

static inline struct stub_qp *find_qp(struct stub_context *c, uint32_t qpn)
{
	struct stub_qp **table = c->qps[(qpn >> 8) & 15];

	return likely(table) ? table[qpn & 255] : NULL;
}

/* --- posting */

static inline struct segment *wqe_at(struct ring *r, uint32_t index)
{
	return (struct segment *)(r->wqes + (size_t)(index & (r->count - 1)) * WQE_BYTES);
}

static inline void set_data(struct segment *s, uint32_t lkey, uint64_t addr, uint32_t length)
{
	s->data.length = htobe32(length);
	s->data.lkey = htobe32(lkey);
	s->data.addr = htobe64(addr);
}

static inline void set_remote(struct segment *s, uint32_t rkey, uint64_t addr)
{
	s->remote.addr = htobe64(addr);
	s->remote.rkey = htobe32(rkey);
	s->remote.rsvd = 0;
}

static inline void set_control(struct stub_qp *q, struct segment *s, uint32_t index, uint32_t op, unsigned int size,
			       unsigned int flags, __be32 imm)
{
	s->control.op_index = htobe32((index & 0xffff) << 8 | op);
	s->control.qpn_size = htobe32(q->qp.qp_num << 8 | size);
	s->control.signature = 0;
	s->control.flags = (flags & IBV_SEND_SIGNALED || q->signal_all ? SIGNAL : 0) |
			   (flags & IBV_SEND_SOLICITED ? SOLICIT : 0) | (flags & IBV_SEND_FENCE ? FENCE : 0);
	s->control.imm = imm;
}

static inline void ring_doorbell(struct stub_qp *q, const struct segment *wqe)
{
	uint64_t *to = (uint64_t *)(q->blue_flame + q->blue_flame_offset);
	const uint64_t *from = (const uint64_t *)wqe;

	__asm__ volatile("" ::: "memory");		/* WQE before the record */
	*(volatile __be32 *)q->sq.doorbell = htobe32(q->sq.head & 0xffff);
	pthread_spin_lock(&q->blue_flame_lock);
	__asm__ volatile("sfence" ::: "memory");	/* record before the doorbell */
	for (int i = 0; i < 8; i++)
		((volatile uint64_t *)to)[i] = from[i];
	__asm__ volatile("sfence" ::: "memory");
	q->blue_flame_offset ^= 64;
	pthread_spin_unlock(&q->blue_flame_lock);
}

static inline int wq_full(struct ring *r, unsigned int nreq)
{
	return unlikely(r->head - r->tail + nreq >= r->count);
}

static int stub_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct stub_qp *q = (struct stub_qp *)qp;
	struct segment *first = NULL;
	unsigned int nreq;
	int err = 0;

	pthread_spin_lock(&q->sq.lock);
	for (nreq = 0; wr; nreq++, wr = wr->next) {
		uint32_t index = q->sq.head + nreq, slot = index & (q->sq.count - 1), op;
		struct segment *s;
		__be32 imm = 0;

		q->sq.last_wr = wr;
		if (unlikely(wr->opcode > IBV_WR_RDMA_READ)) {
			err = EINVAL;
			goto out;
		}
		if (wq_full(&q->sq, nreq)) {
			err = ENOMEM;
			goto out;
		}
		if (unlikely(wr->num_sge < 0 || (uint32_t)wr->num_sge > q->sq.max_sge)) {
			err = EINVAL;
			goto out;
		}
		first = wqe_at(&q->sq, index);
		s = first + 1;
		switch (wr->opcode) {
		case IBV_WR_RDMA_READ:
			set_remote(s++, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			op = OP_READ;
			break;
		case IBV_WR_RDMA_WRITE_WITH_IMM:
			imm = wr->imm_data;
			set_remote(s++, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			op = OP_WRITE_IMM;
			break;
		case IBV_WR_RDMA_WRITE:
			set_remote(s++, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			op = OP_WRITE;
			break;
		case IBV_WR_SEND_WITH_IMM:
			imm = wr->imm_data;
			op = OP_SEND_IMM;
			break;
		case IBV_WR_SEND:
			op = OP_SEND;
			break;
		default:
			err = EOPNOTSUPP;
			goto out;
		}
		for (int i = 0; i < wr->num_sge; i++)
			if (likely(wr->sg_list[i].length))
				set_data(s++, wr->sg_list[i].lkey, wr->sg_list[i].addr, wr->sg_list[i].length);
		set_control(q, first, index, op, (unsigned int)(s - first), wr->send_flags, imm);
		q->sq.wrids[slot] = wr->wr_id;
		q->sq.heads[slot] = index;
	}
out:
	if (unlikely(err))
		*bad = wr;
	if (likely(nreq)) {
		q->sq.head += nreq;
		ring_doorbell(q, wqe_at(&q->sq, q->sq.head - 1));
	}
	pthread_spin_unlock(&q->sq.lock);
	return err;
}

static int stub_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct stub_qp *q = (struct stub_qp *)qp;
	unsigned int nreq;
	int err = 0;

	pthread_spin_lock(&q->rq.lock);
	for (nreq = 0; wr; nreq++, wr = wr->next) {
		uint32_t index = q->rq.head + nreq, used = 0;
		struct segment *s = wqe_at(&q->rq, index);

		q->rq.last_wr = wr;
		if (wq_full(&q->rq, nreq)) {
			err = ENOMEM;
			goto out;
		}
		if (unlikely(wr->num_sge < 0 || (uint32_t)wr->num_sge > q->rq.max_sge)) {
			err = EINVAL;
			goto out;
		}
		for (int i = 0; i < wr->num_sge; i++)
			if (likely(wr->sg_list[i].length))
				set_data(s + used++, wr->sg_list[i].lkey, wr->sg_list[i].addr, wr->sg_list[i].length);
		if (used < q->rq.max_sge) {	/* ends the list */
			s[used].data.length = 0;
			s[used].data.lkey = htobe32(0x100);
			s[used].data.addr = 0;
		}
		q->rq.wrids[index & (q->rq.count - 1)] = wr->wr_id;
	}
out:
	if (unlikely(err))
		*bad = wr;
	if (likely(nreq)) {
		q->rq.head += nreq;
		__asm__ volatile("" ::: "memory");
		*(volatile __be32 *)q->rq.doorbell = htobe32(q->rq.head & 0xffff);
	}
	pthread_spin_unlock(&q->rq.lock);
	return err;
}

/* --- ibv_wr_* */

static void wr_start(struct ibv_qp_ex *ex)
{
	struct stub_qp *q = (struct stub_qp *)ex;

	pthread_spin_lock(&q->sq.lock);
	q->session_start = q->sq.head;
	q->session_error = 0;
}

static inline void open_wr(struct stub_qp *q, uint32_t op, int remote, uint32_t rkey, uint64_t addr, __be32 imm)
{
	uint32_t index = q->sq.head, slot = index & (q->sq.count - 1);

	if (unlikely(q->session_error))
		return;
	if (wq_full(&q->sq, 0)) {
		q->session_error = ENOMEM;
		return;
	}
	q->now = wqe_at(&q->sq, index);
	q->now_index = index;
	q->now_size = 1;
	if (remote)
		set_remote(q->now + q->now_size++, rkey, addr);
	set_control(q, q->now, index, op, q->now_size, q->ex.wr_flags, imm);
	q->sq.wrids[slot] = q->ex.wr_id;
	q->sq.heads[slot] = index;
	q->sq.head++;
}

static void wr_send(struct ibv_qp_ex *ex)
{
	open_wr((struct stub_qp *)ex, OP_SEND, 0, 0, 0, 0);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
	open_wr((struct stub_qp *)ex, OP_SEND_IMM, 0, 0, 0, imm);
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	open_wr((struct stub_qp *)ex, OP_WRITE, 1, rkey, addr, 0);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	open_wr((struct stub_qp *)ex, OP_WRITE_IMM, 1, rkey, addr, imm);
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	open_wr((struct stub_qp *)ex, OP_READ, 1, rkey, addr, 0);
}

static inline void close_wr(struct stub_qp *q)
{
	q->now->control.qpn_size = htobe32(q->qp.qp_num << 8 | q->now_size);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct stub_qp *q = (struct stub_qp *)ex;

	if (unlikely(q->session_error))
		return;
	if (likely(length))
		set_data(q->now + q->now_size++, lkey, addr, length);
	close_wr(q);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	struct stub_qp *q = (struct stub_qp *)ex;

	if (unlikely(q->session_error))
		return;
	if (unlikely(count > q->sq.max_sge)) {
		q->session_error = ENOMEM;
		return;
	}
	for (size_t i = 0; i < count; i++)
		if (likely(list[i].length))
			set_data(q->now + q->now_size++, list[i].lkey, list[i].addr, list[i].length);
	close_wr(q);
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct stub_qp *q = (struct stub_qp *)ex;
	int err = q->session_error;

	if (unlikely(err))
		q->sq.head = q->session_start;
	else if (likely(q->sq.head != q->session_start))
		ring_doorbell(q, q->now);
	pthread_spin_unlock(&q->sq.lock);
	return err;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	struct stub_qp *q = (struct stub_qp *)ex;

	q->sq.head = q->session_start;
	pthread_spin_unlock(&q->sq.lock);
}

/* --- polling */

static inline struct cqe *next_cqe(struct stub_cq *c)
{
	struct cqe *e = &c->cqes[c->consumer & c->mask];
	uint8_t owner = ((volatile struct cqe *)e)->op_owner;

	if (unlikely(owner >> 4 == CQE_INVALID || (owner & 1) != !!(c->consumer & (c->mask + 1))))
		return NULL;
	c->consumer++;
	__asm__ volatile("" ::: "memory");
	return e;
}

/* Finds whose CQE it is and takes its WR off the ring. @return 0, or -1: an unknown QP */
static inline int take(struct stub_cq *c, struct cqe *e, uint64_t *wr_id)
{
	uint32_t qpn = be32toh(e->qpn) & 0xffffff, slot;
	struct stub_qp *q = c->last_qp;

	if (unlikely(!q || q->qp.qp_num != qpn)) {
		q = find_qp(context_of(c->cq.context), qpn);
		if (unlikely(!q))
			return -1;
		c->last_qp = q;
	}
	if (e->op_owner >> 4 == CQE_REQ) {
		slot = be16toh(e->index) & (q->sq.count - 1);
		*wr_id = q->sq.wrids[slot];
		q->sq.tail = q->sq.heads[slot] + 1;
	} else {
		slot = q->rq.tail & (q->rq.count - 1);
		*wr_id = q->rq.wrids[slot];
		q->rq.tail++;
	}
	return 0;
}

static inline enum ibv_wc_opcode wc_opcode(const struct cqe *e)
{
	if (e->op_owner >> 4 == CQE_RESP_SEND)
		return IBV_WC_RECV;
	switch (be32toh(e->send_op) >> 24) {
	case OP_READ:
		return IBV_WC_RDMA_READ;
	case OP_WRITE:
	case OP_WRITE_IMM:
		return IBV_WC_RDMA_WRITE;
	default:
		return IBV_WC_SEND;
	}
}

static inline int poll_one(struct stub_cq *c, struct ibv_wc *wc)
{
	struct cqe *e = next_cqe(c);

	if (!e)
		return 0;
	if (unlikely(take(c, e, &wc->wr_id)))
		return -1;
	wc->status = e->syndrome ? IBV_WC_GENERAL_ERR : IBV_WC_SUCCESS;
	wc->opcode = wc_opcode(e);
	wc->vendor_err = 0;
	wc->byte_len = be32toh(e->byte_len);
	wc->qp_num = be32toh(e->qpn) & 0xffffff;
	wc->wc_flags = 0;
	return 1;
}

static int stub_poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc)
{
	struct stub_cq *c = (struct stub_cq *)cq;
	int n, got = 1;

	pthread_spin_lock(&c->lock);
	for (n = 0; n < entries; n++) {
		got = poll_one(c, wc + n);
		if (got != 1)
			break;
	}
	*(volatile __be32 *)c->doorbell = htobe32(c->consumer & 0xffffff);
	pthread_spin_unlock(&c->lock);
	return got < 0 ? got : n;
}

static inline int parse_lazily(struct stub_cq *c)
{
	c->now = next_cqe(c);
	if (!c->now)
		return ENOENT;
	if (unlikely(take(c, c->now, &c->ex.wr_id)))
		return EINVAL;
	c->ex.status = c->now->syndrome ? IBV_WC_GENERAL_ERR : IBV_WC_SUCCESS;
	return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	struct stub_cq *c = (struct stub_cq *)ex;
	int err;

	if (unlikely(attr->comp_mask))
		return EINVAL;
	pthread_spin_lock(&c->lock);
	err = parse_lazily(c);
	if (unlikely(err))
		pthread_spin_unlock(&c->lock);
	return err;
}

static int next_poll(struct ibv_cq_ex *ex)
{
	return parse_lazily((struct stub_cq *)ex);
}

static void end_poll(struct ibv_cq_ex *ex)
{
	struct stub_cq *c = (struct stub_cq *)ex;

	*(volatile __be32 *)c->doorbell = htobe32(c->consumer & 0xffffff);
	pthread_spin_unlock(&c->lock);
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex)
{
	return wc_opcode(((struct stub_cq *)ex)->now);
}

static uint32_t read_byte_len(struct ibv_cq_ex *ex)
{
	return be32toh(((struct stub_cq *)ex)->now->byte_len);
}

static uint32_t read_qp_num(struct ibv_cq_ex *ex)
{
	return be32toh(((struct stub_cq *)ex)->now->qpn) & 0xffffff;
}

static uint32_t read_vendor_err(struct ibv_cq_ex *ex)
{
	(void)ex;
	return 0;
}

static __be32 read_imm_data(struct ibv_cq_ex *ex)
{
	return ((struct stub_cq *)ex)->now->imm;
}

static unsigned int read_wc_flags(struct ibv_cq_ex *ex)
{
	(void)ex;
	return 0;
}

static uint32_t read_src_qp(struct ibv_cq_ex *ex)
{
	(void)ex;
	return 0;
}

static int stub_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	(void)cq;
	(void)solicited_only;
	return 0;
}

/* --- stub.h */

static struct stub_qp *qp_named(uint32_t qpn)
{
	return the_context ? find_qp(the_context, qpn) : NULL;
}

static void add_cqe(struct ibv_cq *cq, struct stub_qp *q, uint8_t op, uint32_t send_op, uint32_t index, uint32_t length)
{
	struct stub_cq *c = (struct stub_cq *)cq;
	struct cqe *e = &c->cqes[c->producer & c->mask];
	uint8_t owner = !!(c->producer & (c->mask + 1));

	e->imm = 0;
	e->qpn = htobe32(q->qp.qp_num);
	e->byte_len = htobe32(length);
	e->send_op = htobe32(send_op << 24);
	e->index = htobe16((uint16_t)index);
	e->syndrome = 0;
	e->op_owner = (uint8_t)(op << 4 | owner);
	c->producer++;
}

int migr_stub_complete_sends(uint32_t qpn)
{
	struct stub_qp *q = qp_named(qpn);
	int n = 0;

	if (!q)
		return -1;
	for (; q->sq.completed != q->sq.head; q->sq.completed++) {
		const struct segment *wqe = wqe_at(&q->sq, q->sq.completed);

		if (!(wqe->control.flags & SIGNAL))
			continue;
		add_cqe(q->qp.send_cq, q, CQE_REQ, be32toh(wqe->control.op_index) & 0xff, q->sq.completed, 0);
		n++;
	}
	return n;
}

int migr_stub_complete_receives(uint32_t qpn, uint32_t byte_len)
{
	struct stub_qp *q = qp_named(qpn);
	int n = 0;

	if (!q)
		return -1;
	for (; q->rq.completed != q->rq.head; q->rq.completed++, n++)
		add_cqe(q->qp.recv_cq, q, CQE_RESP_SEND, 0, q->rq.completed, byte_len);
	return n;
}

uint32_t migr_stub_posted(uint32_t qpn)
{
	struct stub_qp *q = qp_named(qpn);

	return q ? __atomic_load_n(&q->sq.head, __ATOMIC_RELAXED) : 0;
}

const void *migr_stub_last_wr(uint32_t qpn)
{
	struct stub_qp *q = qp_named(qpn);

	return q ? q->sq.last_wr : NULL;
}

int migr_stub_last_keys(uint32_t qpn, uint32_t *lkey, uint32_t *rkey)
{
	struct stub_qp *q = qp_named(qpn);
	const struct segment *wqe;
	uint32_t op;

	if (!q)
		return -1;
	wqe = wqe_at(&q->sq, q->sq.head - 1);
	op = be32toh(wqe->control.op_index) & 0xff;
	*rkey = 0;
	if (op != OP_SEND && op != OP_SEND_IMM)
		*rkey = be32toh((++wqe)->remote.rkey);
	*lkey = be32toh(wqe[1].data.lkey);
	return 0;
}

/* --- control path */

static void *zeroed(size_t size)
{
	size = (size + 4095) & ~(size_t)4095;

	void *p = aligned_alloc(4096, size);

	if (p)
		memset(p, 0, size);
	return p;
}

static uint32_t power_of_two(uint32_t n)
{
	uint32_t p = 1;

	while (p < n)
		p <<= 1;
	return p;
}

static int ring_init(struct ring *r, uint32_t wrs, uint32_t max_sge)
{
	r->count = power_of_two(wrs + 1);
	r->max_sge = max_sge;
	r->wqes = zeroed((size_t)r->count * WQE_BYTES);
	r->wrids = zeroed(r->count * sizeof(*r->wrids));
	r->heads = zeroed(r->count * sizeof(*r->heads));
	r->doorbell = zeroed(64);
	pthread_spin_init(&r->lock, PTHREAD_PROCESS_PRIVATE);
	return r->wqes && r->wrids && r->heads && r->doorbell ? 0 : ENOMEM;
}

static void ring_free(struct ring *r)
{
	free(r->wqes);
	free(r->wrids);
	free(r->heads);
	free(r->doorbell);
}

static struct ibv_qp *stub_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *a)
{
	struct stub_context *c = context_of(context);
	const uint64_t can = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
			     IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
	uint64_t wanted = a->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS ? a->send_ops_flags : 0;
	uint32_t qpn = STUB_FIRST_QPN;
	struct stub_qp *q;

	if (wanted & ~can || a->srq || a->cap.max_send_sge > SEGMENTS - 2 || a->cap.max_recv_sge > SEGMENTS) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	while (qpn < STUB_FIRST_QPN + STUB_QPS && find_qp(c, qpn))
		qpn++;
	q = zeroed(sizeof(*q));
	if (!q || qpn == STUB_FIRST_QPN + STUB_QPS || !(q->blue_flame = zeroed(128)) ||
	    ring_init(&q->sq, a->cap.max_send_wr, a->cap.max_send_sge) ||
	    ring_init(&q->rq, a->cap.max_recv_wr, a->cap.max_recv_sge)) {
		errno = ENOMEM;
		return NULL;	/* a benchmark that is out of memory ends */
	}
	q->qp.context = context;
	q->qp.qp_context = a->qp_context;
	q->qp.pd = a->pd;
	q->qp.send_cq = a->send_cq;
	q->qp.recv_cq = a->recv_cq;
	q->qp.handle = next_handle++;
	q->qp.qp_num = qpn;
	q->qp.state = IBV_QPS_RESET;
	q->qp.qp_type = a->qp_type;
	q->signal_all = !!a->sq_sig_all;
	pthread_spin_init(&q->blue_flame_lock, PTHREAD_PROCESS_PRIVATE);
	pthread_mutex_init(&q->qp.mutex, NULL);
	pthread_cond_init(&q->qp.cond, NULL);
	if (wanted) {
		q->comp_mask = wanted;
		q->ex.wr_send = wr_send;
		q->ex.wr_send_imm = wr_send_imm;
		q->ex.wr_rdma_write = wr_rdma_write;
		q->ex.wr_rdma_write_imm = wr_rdma_write_imm;
		q->ex.wr_rdma_read = wr_rdma_read;
		q->ex.wr_set_sge = wr_set_sge;
		q->ex.wr_set_sge_list = wr_set_sge_list;
		q->ex.wr_start = wr_start;
		q->ex.wr_complete = wr_complete;
		q->ex.wr_abort = wr_abort;
	}
	if (!c->qps[(qpn >> 8) & 15])
		c->qps[(qpn >> 8) & 15] = zeroed(256 * sizeof(struct stub_qp *));
	c->qps[(qpn >> 8) & 15][qpn & 255] = q;
	return &q->qp;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	struct ibv_qp_init_attr_ex ex = {.pd = pd, .comp_mask = IBV_QP_INIT_ATTR_PD};

	memcpy(&ex, a, sizeof(*a));
	return stub_create_qp_ex(pd->context, &ex);
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	struct stub_qp *q = (struct stub_qp *)qp;

	return q->comp_mask ? &q->ex : NULL;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE)
		qp->state = attr->qp_state;
	return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct stub_qp *q = (struct stub_qp *)qp;

	(void)mask;
	memset(attr, 0, sizeof(*attr));
	memset(init, 0, sizeof(*init));
	attr->qp_state = attr->cur_qp_state = qp->state;
	attr->cap.max_send_wr = q->sq.count - 1;
	attr->cap.max_recv_wr = q->rq.count - 1;
	attr->cap.max_send_sge = q->sq.max_sge;
	attr->cap.max_recv_sge = q->rq.max_sge;
	init->qp_context = qp->qp_context;
	init->send_cq = qp->send_cq;
	init->recv_cq = qp->recv_cq;
	init->qp_type = qp->qp_type;
	init->cap = attr->cap;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct stub_qp *q = (struct stub_qp *)qp;

	context_of(qp->context)->qps[(qp->qp_num >> 8) & 15][qp->qp_num & 255] = NULL;
	((struct stub_cq *)qp->send_cq)->last_qp = NULL;
	((struct stub_cq *)qp->recv_cq)->last_qp = NULL;
	ring_free(&q->sq);
	ring_free(&q->rq);
	free(q->blue_flame);
	free(q);
	return 0;
}

static struct stub_cq *make_cq(struct ibv_context *context, uint32_t cqe, void *cq_context, struct ibv_comp_channel *channel)
{
	struct stub_cq *c = zeroed(sizeof(*c));
	uint32_t count = power_of_two(cqe + 1);

	if (!c || !(c->cqes = zeroed(count * sizeof(*c->cqes))) || !(c->doorbell = zeroed(64))) {
		errno = ENOMEM;
		return NULL;
	}
	c->mask = count - 1;
	for (uint32_t i = 0; i < count; i++)
		c->cqes[i].op_owner = CQE_INVALID << 4 | 1;
	pthread_spin_init(&c->lock, PTHREAD_PROCESS_PRIVATE);
	c->cq.context = context;
	c->cq.channel = channel;
	c->cq.cq_context = cq_context;
	c->cq.handle = next_handle++;
	c->cq.cqe = (int)count - 1;
	pthread_mutex_init(&c->cq.mutex, NULL);
	pthread_cond_init(&c->cq.cond, NULL);
	return c;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
			     int vector)
{
	struct stub_cq *c;

	(void)vector;
	c = make_cq(context, (uint32_t)cqe, cq_context, channel);
	return c ? &c->cq : NULL;
}

static struct ibv_cq_ex *stub_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *a)
{
	const uint64_t can = IBV_WC_STANDARD_FLAGS;
	struct stub_cq *c;

	if (a->wc_flags & ~can) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	c = make_cq(context, a->cqe, a->cq_context, a->channel);
	if (!c)
		return NULL;
	c->ex.start_poll = start_poll;
	c->ex.next_poll = next_poll;
	c->ex.end_poll = end_poll;
	c->ex.read_opcode = read_opcode;
	c->ex.read_vendor_err = read_vendor_err;
	c->ex.read_byte_len = read_byte_len;
	c->ex.read_imm_data = read_imm_data;
	c->ex.read_qp_num = read_qp_num;
	c->ex.read_src_qp = read_src_qp;
	c->ex.read_wc_flags = read_wc_flags;
	return &c->ex;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	struct stub_cq *c = (struct stub_cq *)cq;

	free(c->cqes);
	free(c->doorbell);
	free(c);
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = zeroed(sizeof(*pd));

	if (pd) {
		pd->context = context;
		pd->handle = next_handle++;
	}
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	/* libibverbs' own have two more words behind, the kind and the access flags. */
	struct ibv_mr *mr = zeroed(sizeof(*mr) + 2 * sizeof(uint32_t));

	(void)iova;
	(void)access;
	if (!mr)
		return NULL;
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	mr->handle = next_handle++;
	mr->lkey = mr->rkey = next_key++ << 8 | 0x5a;
	return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}

static int stub_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t length)
{
	(void)context;
	if (port != 1)
		return EINVAL;
	memset(attr, 0, length);
	attr->state = IBV_PORT_ACTIVE;
	attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = 1;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return stub_query_port(context, port, (struct ibv_port_attr *)attr,
			       offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	(void)context;
	memset(attr, 0, sizeof(*attr));
	attr->max_qp = STUB_QPS;
	attr->max_qp_wr = attr->max_cqe = 32768;
	attr->max_sge = SEGMENTS - 2;
	attr->phys_port_cnt = 1;
	return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	(void)context;
	memset(gid, 0, sizeof(*gid));
	return port == 1 && index == 0 ? 0 : -1;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	*pkey = htobe16(0xffff);
	return port == 1 && index == 0 ? 0 : -1;
}

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

	if (!list)
		return NULL;
	list[0] = &the_device;
	if (count)
		*count = 1;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct stub_context *c = zeroed(sizeof(*c));

	if (!c)
		return NULL;
	c->verbs.sz = sizeof(c->verbs);
	c->verbs.query_port = stub_query_port;
	c->verbs.create_qp_ex = stub_create_qp_ex;
	c->verbs.create_cq_ex = stub_create_cq_ex;
	c->verbs.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	c->verbs.context.device = device;
	c->verbs.context.cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	c->verbs.context.async_fd = -1;
	c->verbs.context.num_comp_vectors = 1;
	c->verbs.context.ops.poll_cq = stub_poll_cq;
	c->verbs.context.ops.req_notify_cq = stub_req_notify_cq;
	c->verbs.context.ops.post_send = stub_post_send;
	c->verbs.context.ops.post_recv = stub_post_recv;
	pthread_mutex_init(&c->verbs.context.mutex, NULL);
	the_context = c;
	return &c->verbs.context;
}

int ibv_close_device(struct ibv_context *context)
{
	struct stub_context *c = context_of(context);

	close(context->cmd_fd);
	for (int i = 0; i < 16; i++)
		free(c->qps[i]);
	the_context = NULL;
	free(c);
	return 0;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
	return status == IBV_WC_SUCCESS ? "success" : "error";
}

/* What a benchmark of the data path never needs, but may be looked up. */
#define UNSUPPORTED_INT(name, ...) int name(__VA_ARGS__) { return EOPNOTSUPP; }
#define UNSUPPORTED_PTR(type, name, ...) type *name(__VA_ARGS__) { errno = EOPNOTSUPP; return NULL; }

#pragma GCC diagnostic ignored "-Wunused-parameter"
UNSUPPORTED_INT(ibv_rereg_mr, struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
UNSUPPORTED_INT(ibv_resize_cq, struct ibv_cq *cq, int cqe)
UNSUPPORTED_INT(ibv_destroy_srq, struct ibv_srq *srq)
UNSUPPORTED_INT(ibv_attach_mcast, struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
UNSUPPORTED_INT(ibv_detach_mcast, struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
UNSUPPORTED_INT(ibv_destroy_comp_channel, struct ibv_comp_channel *channel)
UNSUPPORTED_INT(ibv_query_ece, struct ibv_qp *qp, struct ibv_ece *ece)
UNSUPPORTED_INT(ibv_set_ece, struct ibv_qp *qp, struct ibv_ece *ece)
UNSUPPORTED_INT(ibv_query_qp_data_in_order, struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
UNSUPPORTED_INT(ibv_get_async_event, struct ibv_context *context, struct ibv_async_event *event)
UNSUPPORTED_INT(ibv_get_cq_event, struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
UNSUPPORTED_PTR(struct ibv_srq, ibv_create_srq, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
UNSUPPORTED_PTR(struct ibv_comp_channel, ibv_create_comp_channel, struct ibv_context *context)
UNSUPPORTED_PTR(struct ibv_mr, ibv_import_mr, struct ibv_pd *pd, uint32_t handle)
UNSUPPORTED_PTR(struct ibv_mr, ibv_reg_dmabuf_mr, struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
		int fd, int access)

void ibv_unimport_mr(struct ibv_mr *mr)
{
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
}
