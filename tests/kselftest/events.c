// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Contexts and QPs that come and go are told to the group of events. */
#include "migr_test.h"

#include <unistd.h>

/* The next event of this process; those of others are none of ours. */
static struct migr_ev next(void)
{
	uint64_t end = now_ms() + 5000;
	struct migr_ev ev;

	while (now_ms() < end)
		if (!events_next(&ev, 1000) && ev.pid == (uint32_t)getpid())
			return ev;
	return (struct migr_ev){ 0 };
}

static void expect(uint32_t event, uint32_t qpn, const char *what)
{
	struct migr_ev ev = next();

	check_eq(ev.event, event, what);
	check(ev.ctx_id && ev.pqpn == qpn && ev.vqpn == qpn, "%s: its context and numbers", what);
}

int main(void)
{
	struct side s;
	uint32_t qpn;
	int fd, ret;

	fd = migr_open();
	ret = events_open();
	need(ret >= 0, "join the group of events (%d)", ret);
	side_open(&s);
	expect(MIGR_EV_CTX_NEW, 0, "a context was made");
	expect(MIGR_EV_QP_NEW, s.qp->qp_num, "a QP was made");
	need(!migr_attach(fd, s.context->cmd_fd, NULL), "attach");
	expect(MIGR_EV_ATTACH, 0, "a process has attached");
	connect_qp(&s, s.qp, &s, s.qp->qp_num);
	expect(MIGR_EV_QP_STATE, s.qp->qp_num, "to INIT");
	expect(MIGR_EV_QP_STATE, s.qp->qp_num, "to RTR");
	expect(MIGR_EV_QP_STATE, s.qp->qp_num, "to RTS");
	qpn = s.qp->qp_num;
	need(!ibv_destroy_qp(s.qp), "destroy_qp");
	s.qp = NULL;
	expect(MIGR_EV_QP_DEL, qpn, "a QP was destroyed");
	side_close(&s);
	expect(MIGR_EV_CTX_DEL, 0, "a context was closed");
	close(fd);
	return finish();
}
