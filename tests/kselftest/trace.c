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

int main(void)
{
	struct migr_ioc_bind_qp bad = { 1, 0 };
	struct migr_ioc_bind_qp name = { 0x123456, 0 };
	struct migr_ioc_bind_mr keys = { 0, 0xabc00, 0xabd00, 0 };
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	uint32_t id, qpn, lkey, rkey;
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
	at = expect(at, "migr_qp_state: ctx=%u vqpn=0x123456 pqpn=%#x state=INIT", id, qpn);
	at = expect(at, "pqpn=%#x state=RTR", qpn);
	at = expect(at, "pqpn=%#x state=RTS", qpn);
	at = expect(at, "pqpn=%#x state=ERR", qpn);
	at = expect(at, "migr_obj_gone: ctx=%u type=QP number=%#x", id, qpn);
	at = expect(at, "migr_obj_gone: ctx=%u type=MR", id);
	expect(at, "migr_ctx_gone: ctx=%u", id);
	check(!strstr(log_of_trace, "vqpn=0x1 "), "nothing of the call that failed");
	return finish();
}
