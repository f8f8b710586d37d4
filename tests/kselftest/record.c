// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* What a process makes is in the record as it was asked for, and is gone when destroyed. */
#include "migr_test.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static struct obj_list objs;
static struct ctx_list ctxs;

/* A search wants QPs, and there may be very many MRs. */
static void of_one_type(void)
{
	static struct obj_list some;
	int type, i, all = 0;

	for (type = MIGR_OBJ_PD; type < __MIGR_OBJ_MAX; type++) {
		need(!genl_objs_of(ctx_of_pid(getpid()), type, &some), "dump of a type");
		for (i = 0; i < some.n; i++)
			check_eq(some.obj[i].type, type, "a dump of one type has no other");
		all += some.n;
	}
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
	check_eq(all, objs.n, "those of all types are all");
}

static void pd_mr_cq(struct side *s)
{
	struct obj *o;

	check(find_obj(&objs, MIGR_OBJ_PD, s->pd->handle), "the PD is recorded");
	o = find_obj(&objs, MIGR_OBJ_MR, s->mr->handle);
	if (check(o, "the MR is recorded")) {
		check_eq(o->rec.mr.start, (uintptr_t)s->buf, "MR: start");
		check_eq(o->rec.mr.length, SIDE_BUF, "MR: length");
		check_eq(o->rec.mr.iova, (uintptr_t)s->buf, "MR: iova");
		check_eq(o->rec.mr.access, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, "MR: access");
		check_eq(o->rec.mr.pd_handle, s->pd->handle, "MR: PD");
		check_eq(o->rec.mr.plkey, s->mr->lkey, "MR: physical lkey");
		check_eq(o->rec.mr.prkey, s->mr->rkey, "MR: physical rkey");
		check_eq(o->rec.mr.vlkey, s->mr->lkey, "MR: virtual lkey equal at birth");
	}
	o = find_obj(&objs, MIGR_OBJ_CQ, s->cq->handle);
	if (check(o, "the CQ is recorded")) {
		check_eq(o->rec.cq.cqe, 64, "CQ: size as asked for");
		check(o->rec.cq.channel != 0, "CQ: has a channel");
		check(o->resp_len > 0, "CQ: the driver's answer is kept");
		check(o->rec.cq.user_handle != 0, "CQ: user_handle");
	}
}

static void queue_pair(struct side *s, struct ibv_qp *qp, struct ibv_qp *peer)
{
	struct obj *o = find_obj(&objs, MIGR_OBJ_QP, qp->handle);
	struct migr_qp_rec *r;

	if (!check(o, "the QP is recorded"))
		return;
	r = &o->rec.qp;
	check_eq(r->pqpn, qp->qp_num, "QP: physical number");
	check_eq(r->vqpn, qp->qp_num, "QP: virtual number equal at birth");
	check_eq(r->pd_handle, s->pd->handle, "QP: PD");
	check_eq(r->send_cq_handle, s->cq->handle, "QP: send CQ");
	check_eq(r->recv_cq_handle, s->cq->handle, "QP: receive CQ");
	check_eq(r->srq_handle, MIGR_NO_HANDLE, "QP: no SRQ");
	check_eq(r->qp_type, IBV_QPT_RC, "QP: type");
	check_eq(r->max_send_wr, 16, "QP: max_send_wr as asked for");
	check_eq(r->max_recv_wr, 8, "QP: max_recv_wr as asked for");
	check_eq(r->max_send_sge, 2, "QP: max_send_sge");
	check_eq(r->max_recv_sge, 1, "QP: max_recv_sge");
	check_eq(r->max_inline_data, 32, "QP: max_inline_data");
	check_eq(r->sq_sig_all, 0, "QP: sq_sig_all");
	check(r->user_handle != 0, "QP: user_handle");
	check(o->resp_len > 0, "QP: the driver's answer is kept");
	check_eq(r->qp_state, IBV_QPS_RTS, "QP: state");
	check_eq(r->dest_qpn, peer->qp_num, "QP: destination");
	check_eq(r->path_mtu, IBV_MTU_1024, "QP: path MTU");
	check_eq(r->rq_psn, 0x111, "QP: rq_psn");
	check_eq(r->sq_psn, 0x111, "QP: sq_psn");
	check_eq(r->timeout, 14, "QP: timeout");
	check_eq(r->retry_cnt, 6, "QP: retry_cnt");
	check_eq(r->rnr_retry, 5, "QP: rnr_retry");
	check_eq(r->min_rnr_timer, 12, "QP: min_rnr_timer");
	check_eq(r->max_rd_atomic, 3, "QP: max_rd_atomic");
	check_eq(r->max_dest_rd_atomic, 4, "QP: max_dest_rd_atomic");
	check_eq(r->access_flags, IBV_ACCESS_REMOTE_WRITE, "QP: access flags");
	check_eq(r->port_num, 1, "QP: port");
	check((r->attr_mask & (IBV_QP_AV | IBV_QP_DEST_QPN | IBV_QP_SQ_PSN)) ==
	      (IBV_QP_AV | IBV_QP_DEST_QPN | IBV_QP_SQ_PSN), "QP: what was given is marked");
	check_eq(r->ah.is_global, 1, "QP: address has a GRH");
	check(!memcmp(r->ah.dgid, s->gid.raw, 16), "QP: dgid");
	check(!memcmp(r->ah.sgid, s->gid.raw, 16), "QP: sgid, by value");
	check_eq(r->ah.gid_type, 2, "QP: GID type RoCEv2");
	check_eq(r->ah.sgid_index, s->gid_index, "QP: sgid_index");
	check(r->ah.hop_limit, "QP: hop limit");
}

static void channels(struct side *s)
{
	struct ibv_cq *same = ibv_create_cq(s->context, 8, NULL, s->channel, 0);
	struct ibv_cq *none = ibv_create_cq(s->context, 8, NULL, NULL, 0);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(s->context);
	struct ibv_cq *other;
	uint32_t n;

	need(same && none && channel, "more CQs");
	other = ibv_create_cq(s->context, 8, NULL, channel, 0);
	need(other && !genl_objs(ctx_of_pid(getpid()), &objs), "more CQs");
	n = find_obj(&objs, MIGR_OBJ_CQ, s->cq->handle)->rec.cq.channel;
	check_eq(find_obj(&objs, MIGR_OBJ_CQ, same->handle)->rec.cq.channel, n, "same channel, same number");
	check_eq(find_obj(&objs, MIGR_OBJ_CQ, none->handle)->rec.cq.channel, 0, "no channel, number 0");
	check(find_obj(&objs, MIGR_OBJ_CQ, other->handle)->rec.cq.channel != n, "other channel, other number");
	ibv_destroy_cq(same);
	ibv_destroy_cq(none);
	ibv_destroy_cq(other);
	ibv_destroy_comp_channel(channel);
}

static void resize(struct side *s)
{
	struct obj *o;

	if (ibv_resize_cq(s->cq, 200)) {
		printf("# resize_cq: not with this driver\n");
		return;
	}
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
	o = find_obj(&objs, MIGR_OBJ_CQ, s->cq->handle);
	check(o && o->rec.cq.cqe == 200, "resize_cq changes the record of the CQ");
}

static void shared_receives(struct side *s)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 9, .max_sge = 2 } };
	struct ibv_srq_attr attr = { .srq_limit = 3 };
	struct ibv_srq *srq = ibv_create_srq(s->pd, &init);
	struct ibv_qp_init_attr qp_init = { .send_cq = s->cq, .recv_cq = s->cq, .srq = srq, .qp_type = IBV_QPT_RC,
					    .cap = { .max_send_wr = 1, .max_send_sge = 1 } };
	struct migr_srq_rec *r;
	struct ibv_qp *qp;
	struct obj *o;

	need(srq, "create SRQ");
	qp = ibv_create_qp(s->pd, &qp_init);
	need(qp && !genl_objs(ctx_of_pid(getpid()), &objs), "QP on the SRQ, and dump");
	o = find_obj(&objs, MIGR_OBJ_QP, qp->handle);
	check(o && o->rec.qp.srq_handle == srq->handle, "QP: its SRQ");
	o = find_obj(&objs, MIGR_OBJ_SRQ, srq->handle);
	if (check(o, "the SRQ is recorded")) {
		r = &o->rec.srq;
		check_eq(r->pd_handle, s->pd->handle, "SRQ: PD");
		check_eq(r->srq_type, IBV_SRQT_BASIC, "SRQ: type");
		check_eq(r->max_wr, 9, "SRQ: max_wr as asked for");
		check_eq(r->max_sge, 2, "SRQ: max_sge as asked for");
		check_eq(r->srq_limit, 0, "SRQ: not armed");
		check_eq(r->cq_handle, MIGR_NO_HANDLE, "SRQ: no CQ");
		check_eq(r->flags, 0, "SRQ: not resized");
		check(r->user_handle != 0, "SRQ: user_handle");
		check(o->resp_len > 0, "SRQ: the driver's answer is kept");
	}
	need(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), "modify_srq: limit");
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
	o = find_obj(&objs, MIGR_OBJ_SRQ, srq->handle);
	check(o && o->rec.srq.srq_limit == 3 && o->rec.srq.max_wr == 9, "modify_srq: the limit is recorded");
	attr.max_wr = 40;
	if (ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR)) {
		printf("# resizing an SRQ: not with this driver\n");
	} else {
		need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
		o = find_obj(&objs, MIGR_OBJ_SRQ, srq->handle);
		check(o && o->rec.srq.max_wr == 40 && o->rec.srq.flags == MIGR_SRQ_RESIZED, "SRQ: resized, and marked so");
	}
	ibv_destroy_qp(qp);
	ibv_destroy_srq(srq);
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
	for (int i = 0; i < objs.n; i++)
		check(objs.obj[i].type != MIGR_OBJ_SRQ, "a destroyed SRQ leaves no record");
}

/* AH and MW are counted and named. */
static void others(struct side *s)
{
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1,
				       .grh = { .dgid = s->gid, .sgid_index = s->gid_index } };
	struct ibv_ah *ah = ibv_create_ah(s->pd, &ah_attr);
	struct ibv_mw *mw = ibv_alloc_mw(s->pd, IBV_MW_TYPE_1);
	struct obj *o;

	need(ah && mw, "create AH, MW");
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
	check(find_obj(&objs, MIGR_OBJ_AH, ah->handle), "the AH is recorded");
	o = find_obj(&objs, MIGR_OBJ_MW, mw->handle);
	check(o && o->rec.other.num == mw->rkey, "the MW is recorded, with its rkey");
	ibv_dealloc_mw(mw);
	ibv_destroy_ah(ah);
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
}

static void rereg(struct side *s)
{
	struct obj *o;
	int ret = ibv_rereg_mr(s->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE);

	if (ret) {
		printf("# rereg_mr: not with this driver\n");
		return;
	}
	need(!genl_objs(ctx_of_pid(getpid()), &objs), "dump");
	o = find_obj(&objs, MIGR_OBJ_MR, s->mr->handle);
	check(o && o->rec.mr.access == IBV_ACCESS_LOCAL_WRITE && o->rec.mr.length == SIDE_BUF,
	      "rereg_mr changes the record of the MR");
}

/* The process that opened it has ended, a child of it keeps it: the number may be another's, and is not told. */
static void inherited(void)
{
	uint64_t end = now_ms() + 5000;
	int told[2], hold[2], i;
	uint32_t id = 0;
	pid_t opener;

	need(!pipe(told) && !pipe(hold), "pipes");
	fflush(stdout);
	opener = fork();
	if (!opener) {
		open_context();
		if (!fork()) {
			close(told[1]);
			close(hold[1]);
			_exit(read(hold[0], &id, sizeof(id)) != 0);	/* until we close our end */
		}
		genl_forget();
		id = ctx_of_pid(getpid());
		_exit(write(told[1], &id, sizeof(id)) != sizeof(id));
	}
	close(told[1]);
	close(hold[0]);
	need(read(told[0], &id, sizeof(id)) == sizeof(id) && id, "a context of another process");
	need(waitpid(opener, NULL, 0) == opener, "wait");
	need(!genl_ctxs(0, &ctxs), "dump");
	for (i = 0; i < ctxs.n && ctxs.rec[i].ctx_id != id; i++)
		;
	if (check(i < ctxs.n, "a context that a child keeps stays in the record"))
		check_eq(ctxs.rec[i].pid, 0, "without the number of the process that ended");
	need(!genl_ctxs(opener, &ctxs), "dump");
	check_eq(ctxs.n, 0, "nor is it found by that");
	close(hold[1]);
	close(told[0]);
	while (genl_objs(id, &objs) != -ENOENT && now_ms() < end)
		usleep(10000);
	check_eq(genl_objs(id, &objs), (uint64_t)-ENOENT, "it goes with the child");
}

int main(void)
{
	struct ibv_qp *qp2;
	struct side s;
	uint32_t id;
	int ret;

	ret = genl_ctxs(0, &ctxs);
	if (ret)
		skip("no netlink family \"migr\" (%d)", ret);
	side_open(&s);
	qp2 = make_qp(&s);
	need(qp2, "second QP");
	connect_qp(&s, s.qp, &s, qp2->qp_num);
	connect_qp(&s, qp2, &s, s.qp->qp_num);

	need(!genl_ctxs(getpid(), &ctxs), "dump of the contexts");
	need(check_eq(ctxs.n, 1, "the process has one context"), "one context");
	id = ctxs.rec[0].ctx_id;
	check_eq(ctxs.rec[0].pid, getpid(), "context: pid");
	check(!strcmp(ctxs.rec[0].ibdev, ibv_get_device_name(s.context->device)), "context: device");
	check(!strcmp(ctxs.rec[0].comm, "record"), "context: comm");
	check_eq(ctxs.rec[0].flags, 0, "context: not attached, not hydrated");
	check_eq(ctxs.rec[0].nr_pd, 1, "context: PDs");
	check_eq(ctxs.rec[0].nr_mr, 1, "context: MRs");
	check_eq(ctxs.rec[0].nr_cq, 1, "context: CQs");
	check_eq(ctxs.rec[0].nr_qp, 2, "context: QPs");
	check_eq(ctxs.rec[0].mr_bytes, SIDE_BUF, "context: registered bytes");
	check_eq(ctxs.rec[0].num_comp_vectors, s.context->num_comp_vectors, "context: vectors");

	need(!genl_objs(id, &objs), "dump of the objects");
	check_eq(objs.n, 5, "five objects");
	check_eq(objs.obj[0].type, MIGR_OBJ_PD, "what others are made from comes first");
	pd_mr_cq(&s);
	queue_pair(&s, s.qp, qp2);
	queue_pair(&s, qp2, s.qp);
	channels(&s);
	shared_receives(&s);
	others(&s);
	of_one_type();
	resize(&s);
	rereg(&s);

	need(!ibv_destroy_qp(qp2), "destroy_qp");
	need(!genl_objs(id, &objs), "dump of the objects");
	check_eq(objs.n, 4, "a destroyed QP leaves no record");
	side_close(&s);
	check_eq(genl_objs(id, &objs), (uint64_t)-2, "a closed context leaves no record");
	inherited();
	return finish();
}
