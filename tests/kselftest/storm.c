// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * The module comes and goes under processes that make and destroy everything,
 * others that dump, and others that attach and bind. None of them sees an error
 * of RDMA; at the end the record is empty.
 */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAKERS = 3, ROUNDS = 12 };

static volatile int *stop;

/* Children must not print: what goes wrong is their exit status. */
#define MUST(x) do { if (!(x)) _exit(__LINE__ % 200 + 10); } while (0)

static void maker(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	char *buf = aligned_alloc(4096, 8192);

	while (!*stop) {
		struct side s = { .context = ibv_open_device(list[0]) };
		struct ibv_qp *qps[3];
		struct ibv_mr *mr;
		int i;

		MUST(s.context);
		s.pd = ibv_alloc_pd(s.context);
		MUST(s.pd);
		s.cq = ibv_create_cq(s.context, 16, NULL, NULL, 0);
		MUST(s.cq);
		for (i = 0; i < 3; i++)
			MUST((qps[i] = make_qp(&s)));
		mr = ibv_reg_mr(s.pd, buf, 8192, IBV_ACCESS_LOCAL_WRITE);
		MUST(mr);
		MUST(!ibv_dereg_mr(mr));
		for (i = 0; i < 3; i++)
			MUST(!ibv_destroy_qp(qps[i]));
		MUST(!ibv_destroy_cq(s.cq));
		MUST(!ibv_dealloc_pd(s.pd));
		MUST(!ibv_close_device(s.context));
	}
	_exit(0);
}

static void dumper(void)
{
	static struct ctx_list ctxs;
	static struct obj_list objs;
	int i;

	while (!*stop) {
		if (!genl_ctxs(0, &ctxs))
			for (i = 0; i < ctxs.n; i++)
				genl_objs(ctxs.rec[i].ctx_id, &objs);
		genl_forget();
		usleep(1000);
	}
	_exit(0);
}

/* Attaches, binds, and holds the module for moments. */
static void binder(void)
{
	struct side s;
	uint32_t id;
	int fd;

	s.context = open_context();
	s.pd = ibv_alloc_pd(s.context);
	s.cq = ibv_create_cq(s.context, 16, NULL, NULL, 0);
	MUST(s.pd && s.cq);
	while (!*stop) {
		struct migr_ioc_bind_qp bind;

		s.qp = make_qp(&s);
		MUST(s.qp);
		fd = open("/dev/migr", O_RDWR);
		if (fd >= 0) {
			if (!migr_attach(fd, s.context->cmd_fd, &id)) {
				const uint32_t *qpns = map_qpn_table(fd);

				bind = (struct migr_ioc_bind_qp){ 0x654321, s.qp->qp_num };
				if (!ioctl(fd, MIGR_IOC_BIND_QP, &bind))
					MUST(qpns[s.qp->qp_num] == (0x654321 | MIGR_QPN_VALID));
				else
					MUST(errno == ENOENT);	/* made while the module was away */
				munmap((void *)qpns, MIGR_QPN_TABLE_BYTES);
			} else {
				MUST(errno == ENOENT);	/* so was the context */
			}
			close(fd);
		}
		MUST(!ibv_destroy_qp(s.qp));
		usleep(5000);
	}
	_exit(0);
}

int main(void)
{
	void (*kinds[])(void) = { maker, maker, maker, dumper, binder };
	int nr = sizeof(kinds) / sizeof(kinds[0]), i, status, reloads = 0;
	const char *limit = getenv("TEST_LIMIT_S");
	struct migr_info info;
	uint64_t end;
	pid_t pids[8];

	close(migr_open());
	genl_info(&info);
	stop = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (i = 0; i < nr; i++) {
		pids[i] = fork();
		if (!pids[i])
			kinds[i]();
	}
	end = now_ms() + 750 * (limit ? atoi(limit) : 120);
	while (reloads < ROUNDS && now_ms() < end) {
		if (module_remove()) {
			need(errno == EWOULDBLOCK, "rmmod");
			usleep(1000);
			continue;
		}
		usleep(20000);
		need(!module_load(), "insmod");
		reloads++;
		usleep(50000);
	}
	check_eq(reloads, ROUNDS, "the module went and came");
	*stop = 1;
	for (i = 0; i < nr; i++) {
		need(waitpid(pids[i], &status, 0) == pids[i], "wait");
		check(WIFEXITED(status) && !WEXITSTATUS(status), "process %d saw no error (status 0x%x)", i, status);
	}
	genl_forget();
	need(!genl_info(&info), "info");
	check_eq(info.nr_ctx, 0, "no context is left in the record");
	check_eq(info.nr_obj, 0, "and no object");
	return finish();
}
