// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * The module goes when nobody depends on a virtual name, and not before; what it
 * leaves behind works on; what it finds when it comes back it says it knows in part.
 */
#include "migr_test.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

static struct ctx_list ctxs;
static struct obj_list objs;

static void held(struct side *s, uint32_t id)
{
	struct migr_ioc_bind_mr bind = { s->mr->handle, 0x55555500, 0x55555500, 0 };
	uint32_t qpn = s->qp->qp_num, id2;
	int fd;

	check_eq(genl_bind_qp(id, 0x123456, qpn), 0, "bind a QP");
	check_errno(module_remove(), EWOULDBLOCK, "a bound QP holds the module");
	check_eq(genl_bind_qp(id, qpn, qpn), 0, "bind it to its own number");

	fd = migr_open();
	need(!migr_attach(fd, s->context->cmd_fd, &id2), "attach");
	check_errno(module_remove(), EWOULDBLOCK, "an open /dev/migr holds the module");
	need(!ioctl(fd, MIGR_IOC_BIND_MR, &bind), "bind an MR");
	close(fd);
	check_errno(module_remove(), EWOULDBLOCK, "a bound MR holds the module");
	need(!ibv_dereg_mr(s->mr), "dereg_mr");
	s->mr = ibv_reg_mr(s->pd, s->buf, SIDE_BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	need(s->mr, "reg_mr");
}

/* Who loads it in a network namespace of its own is not shown there what the host has. 0, or a bit set of what went wrong. */
static int load_elsewhere(void)
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();
	if (!child) {
		if (unshare(CLONE_NEWNET) || module_load())
			_exit(128);
		_exit((genl_ctxs(0, &ctxs) != 0) | (ctxs.n != 0) << 1 | (genl_objs(1, &objs) != -EPERM) << 2);	/* the first has number 1 */
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

static void came_back(struct side *s)
{
	uint32_t id = 0;
	struct ibv_qp *qp;
	int fd;

	need(!genl_ctxs(getpid(), &ctxs), "dump");
	need(check_eq(ctxs.n, 1, "a context that existed is in the record"), "hydrated");
	check_eq(ctxs.rec[0].flags, MIGR_CTX_HYDRATED, "it says that the record is incomplete");
	check(!strcmp(ctxs.rec[0].ibdev, ibv_get_device_name(s->context->device)), "its device");
	qp = make_qp(s);
	need(qp, "create_qp");
	need(!genl_objs(ctxs.rec[0].ctx_id, &objs), "dump");
	check_eq(objs.n, 1, "what is made from now on is recorded");
	check(find_obj(&objs, MIGR_OBJ_QP, qp->handle), "the new QP");
	check_eq(objs.obj[0].rec.qp.pd_handle, s->pd->handle, "with the handle of its old PD");
	fd = migr_open();
	check(!migr_attach(fd, s->context->cmd_fd, &id) && id == ctxs.rec[0].ctx_id, "it can be attached");
	close(fd);
	need(!ibv_destroy_qp(qp), "destroy_qp");
}

int main(void)
{
	const uint32_t *qpns;
	struct side s;
	uint32_t id, qpn;
	int fd, i;

	fd = migr_open();
	side_open(&s);
	qpn = s.qp->qp_num;
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	qpns = map_qpn_table(fd);
	close(fd);
	held(&s, id);

	genl_forget();
	need(check(!module_remove(), "without virtual names the module goes"), "rmmod");
	check_eq(qpns[qpn], 0, "the table it leaves names nobody, and can be read");
	need(!ibv_destroy_qp(s.qp), "what was recorded can be destroyed");
	s.qp = make_qp(&s);
	need(s.qp, "create_qp without the module");
	connect_qp(&s, s.qp, &s, s.qp->qp_num);
	check(access("/dev/migr", F_OK), "/dev/migr is gone");
	check_eq(genl_ctxs(0, &ctxs), (uint64_t)-ENOENT, "so is the family");
	need(check_eq(load_elsewhere(), 0, "the module comes back, from a namespace that sees no context of the host"), "insmod");
	for (i = 0; i < 20 && access("/dev/migr", R_OK | W_OK); i++)
		usleep(100000);
	came_back(&s);
	side_close(&s);
	need(!genl_ctxs(getpid(), &ctxs), "dump");
	check_eq(ctxs.n, 0, "a hydrated context leaves no record when it is closed");
	return finish();
}
