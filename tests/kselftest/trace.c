// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* The tracepoints tell what is recorded, in its order, and say nothing of a call that failed. */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <rdma/ib_user_verbs.h>

#define TRACING "/sys/kernel/tracing/"

static char log_of_trace[1 << 20];

static bool put(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY | O_TRUNC | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

	if (fd >= 0)
		close(fd);
	return done;
}

static void read_trace(void)
{
	int fd = open(TRACING "trace", O_RDONLY | O_CLOEXEC);
	size_t have = 0;
	ssize_t n = 0;

	need(fd >= 0, "open " TRACING "trace");
	while (have + 1 < sizeof(log_of_trace) &&
	       (n = read(fd, log_of_trace + have, sizeof(log_of_trace) - 1 - have)) > 0)
		have += n;
	log_of_trace[have] = 0;
	close(fd);
}

/* From @after on. Where the next one may begin; NULL, and a failure: there is none */
static const char *expect(const char *after, const char *format, ...) __attribute__((format(printf, 2, 3)));
static const char *expect(const char *after, const char *format, ...)
{
	char line[256];
	const char *found;
	va_list ap;

	va_start(ap, format);
	vsnprintf(line, sizeof(line), format, ap);
	va_end(ap);
	found = strstr(after, line);
	check(found, "%s", line);
	return found ? found : after;
}

static unsigned int times(const char *event)
{
	unsigned int n = 0;
	const char *p;

	for (p = log_of_trace; (p = strstr(p, event)); p++)
		n++;
	return n;
}

/* Providers of user space may know less than the kernel's driver: asked without them. */
static bool register_again(struct ibv_mr *mr, int access)
{
	struct ib_uverbs_rereg_mr_resp resp;
	struct {
		struct ib_uverbs_cmd_hdr hdr;
		struct ib_uverbs_rereg_mr cmd;
	} c = {
		.hdr = { IB_USER_VERBS_CMD_REREG_MR, sizeof(c) / 4, sizeof(resp) / 4 },
		.cmd = { .response = (uintptr_t)&resp, .mr_handle = mr->handle, .flags = IBV_REREG_MR_CHANGE_ACCESS, .access_flags = access },
	};

	return write(mr->context->cmd_fd, &c, sizeof(c)) == sizeof(c);
}

/* What changes objects that stay. Not every driver can do all of it: of what it has refused nothing may be told. */
static struct changes {
	bool cq, srq_size, mr;
	uint32_t srq;	/* its handle */
} change_all(struct side *s)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 9, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .srq_limit = 3, .max_wr = 40 };
	struct ibv_srq *srq = ibv_create_srq(s->pd, &init);
	struct changes c = {};

	need(srq, "create an SRQ");
	c.srq = srq->handle;
	c.cq = !ibv_resize_cq(s->cq, 200);
	need(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), "modify_srq: limit");
	c.srq_size = !ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR);
	c.mr = register_again(s->mr, IBV_ACCESS_LOCAL_WRITE);
	printf("# the driver can resize CQs: %d, SRQs: %d, register again: %d\n", c.cq, c.srq_size, c.mr);
	need(!ibv_destroy_srq(srq), "destroy the SRQ");
	return c;
}

int main(void)
{
	enum { NUMBER = 0x654321, OTHER = 0x654322 };
	struct migr_ioc_bind_qp bad = { 1, 0 };
	struct migr_ioc_bind_qp name = { 0x123456, 0 };
	struct migr_ioc_bind_mr keys = { 0, 0xabc00, 0xabd00, 0 };
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	uint32_t id, qpn, lkey, rkey, cq;
	struct changes did;
	const char *buf;
	const char *at;
	struct side s;
	int fd;

	fd = migr_open();
	if (access(TRACING "events", F_OK))
		mount("tracefs", TRACING, "tracefs", 0, NULL);
	if (access(TRACING "events", F_OK))
		skip("no tracefs");
	need(put(TRACING "trace", ""), "clear the trace");
	need(put(TRACING "events/migr/enable", "1"), "enable the events of migr");

	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	qpn = s.qp->qp_num;
	lkey = s.mr->lkey;
	rkey = s.mr->rkey;
	name.pqpn = bad.pqpn = qpn;
	keys.handle = s.mr->handle;
	need(!ioctl(fd, MIGR_IOC_BIND_QP, &name), "bind the QP");
	check_errno(ioctl(fd, MIGR_IOC_BIND_QP, &bad), EINVAL, "QP 1");
	need(!ioctl(fd, MIGR_IOC_BIND_MR, &keys), "bind the MR");
	cq = s.cq->handle;
	buf = s.buf;
	did = change_all(&s);
	need(!genl_reserve(NUMBER), "reserve a number");
	check_eq(-genl_reserve(NUMBER), EEXIST, "the same number again");
	check_eq(-genl_release(OTHER), ENOENT, "release of another");
	need(!genl_release(NUMBER), "release it");
	connect_qp(&s, s.qp, &s, qpn);
	need(!ibv_modify_qp(s.qp, &err, IBV_QP_STATE), "modify_qp to ERR");
	side_close(&s);
	close(fd);
	need(put(TRACING "events/migr/enable", "0"), "disable them");

	read_trace();
	at = expect(log_of_trace, "migr_ctx_new: ctx=%u owner=%d comm=trace device=rxe", id, getpid());
	at = expect(at, "migr_obj_new: ctx=%u type=PD", id);
	at = expect(at, "migr_obj_new: ctx=%u type=CQ", id);
	at = expect(at, "migr_obj_new: ctx=%u type=MR number=%#x", id, lkey);
	at = expect(at, "migr_obj_new: ctx=%u type=QP number=%#x", id, qpn);
	at = expect(at, "migr_ctx_attach: ctx=%u owner=%d", id, getpid());
	at = expect(at, "migr_qp_bind: ctx=%u vqpn=0x123456 pqpn=%#x", id, qpn);
	at = expect(at, "migr_mr_bind: ctx=%u vlkey=0xabc00 vrkey=0xabd00 plkey=%#x prkey=%#x", id, lkey, rkey);
	if (did.cq)
		at = expect(at, "migr_cq_resize: ctx=%u handle=%u cqe=200\n", id, cq);
	at = expect(at, "migr_srq_modify: ctx=%u handle=%u max_wr=9 limit=3\n", id, did.srq);
	if (did.srq_size)
		at = expect(at, "migr_srq_modify: ctx=%u handle=%u max_wr=40 limit=3\n", id, did.srq);
	if (did.mr)
		at = expect(at, "migr_mr_rereg: ctx=%u plkey=%#x prkey=%#x start=%#lx length=%d access=%#x\n", id, lkey, rkey,
			    (unsigned long)buf, SIDE_BUF, IBV_ACCESS_LOCAL_WRITE);
	at = expect(at, "migr_qpn_reserve: vqpn=%#x\n", NUMBER);
	at = expect(at, "migr_qpn_release: vqpn=%#x\n", NUMBER);
	at = expect(at, "migr_qp_state: ctx=%u vqpn=0x123456 pqpn=%#x state=INIT", id, qpn);
	at = expect(at, "pqpn=%#x state=RTR", qpn);
	at = expect(at, "pqpn=%#x state=RTS", qpn);
	at = expect(at, "pqpn=%#x state=ERR", qpn);
	at = expect(at, "migr_obj_gone: ctx=%u type=QP number=%#x", id, qpn);
	at = expect(at, "migr_obj_gone: ctx=%u type=MR", id);
	expect(at, "migr_ctx_gone: ctx=%u", id);
	check(!strstr(log_of_trace, "vqpn=0x1 "), "nothing of the call that failed");
	check_eq(times("migr_qpn_reserve:"), 1, "one number was reserved");
	check_eq(times("migr_qpn_release:"), 1, "and released");
	check_eq(times("migr_cq_resize:"), did.cq, "CQs resized, no more than were");
	check_eq(times("migr_srq_modify:"), 1 + did.srq_size, "SRQs modified");
	check_eq(times("migr_mr_rereg:"), did.mr, "MRs registered again");
	return finish();
}
