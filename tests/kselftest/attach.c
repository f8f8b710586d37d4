// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* ATTACH takes the owner of a uverbs file and nobody else, and says why not. */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static struct ctx_list ctxs;

static int attach(int fd, uint32_t version, int uverbs_fd, uint32_t flags, struct migr_ioc_attach *out)
{
	*out = (struct migr_ioc_attach){ version, uverbs_fd, flags, 0 };
	return ioctl(fd, MIGR_IOC_ATTACH, out);
}

static void unattached(int fd)
{
	struct migr_ioc_bind_qp qp = { 5, 6 };
	struct migr_ioc_qp_stands stands = { 6, IBV_QPS_RTS };
	struct migr_ioc_query_mr mr = { 0 };
	void *p = mmap(NULL, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, fd, 0);

	check_errno(p == MAP_FAILED ? -1 : 0, ENOENT, "mmap of an unattached file");
	check_errno(ioctl(fd, MIGR_IOC_BIND_QP, &qp), ENOENT, "BIND_QP on an unattached file");
	check_errno(ioctl(fd, MIGR_IOC_QP_STANDS, &stands), ENOENT, "QP_STANDS on an unattached file");
	check_errno(ioctl(fd, MIGR_IOC_QUERY_MR, &mr), ENOENT, "QUERY_MR on an unattached file");
	check_errno(ioctl(fd, _IO(MIGR_IOC_MAGIC, 99), 0), ENOTTY, "an unknown command");
}

static void refused(int fd, struct side *s)
{
	struct migr_ioc_attach a;
	int null = open("/dev/null", O_RDWR), pipes[2];

	need(!pipe(pipes), "pipe");
	check_errno(attach(fd, MIGR_ABI_VERSION + 1, s->context->cmd_fd, 0, &a), EPROTONOSUPPORT,
		    "another ABI version");
	check_eq(a.abi_version, MIGR_ABI_VERSION, "the module tells its version");
	check_errno(attach(fd, MIGR_ABI_VERSION, s->context->cmd_fd, 1, &a), EOPNOTSUPP, "unknown flags");
	check_errno(attach(fd, MIGR_ABI_VERSION, -1, 0, &a), EBADF, "no such descriptor");
	check_errno(attach(fd, MIGR_ABI_VERSION, null, 0, &a), ENOENT, "a file that is not uverbs'");
	check_errno(attach(fd, MIGR_ABI_VERSION, pipes[0], 0, &a), ENOENT, "a pipe");
	check_errno(attach(fd, MIGR_ABI_VERSION, s->context->async_fd, 0, &a), ENOENT, "the async event file");
	check_errno(attach(fd, MIGR_ABI_VERSION, s->channel->fd, 0, &a), ENOENT, "a completion channel");
	check_errno(attach(fd, MIGR_ABI_VERSION, fd, 0, &a), ENOENT, "/dev/migr itself");
	close(null);
	close(pipes[0]);
	close(pipes[1]);
}

/* A child that got the descriptor attaches: it is the context's process now. */
static void handed_over(struct side *s)
{
	int go[2], status;
	pid_t child;
	char c;

	need(!pipe(go), "pipe");
	child = fork();
	if (!child) {
		int fd = open("/dev/migr", O_RDWR);

		if (migr_attach(fd, s->context->cmd_fd, NULL))
			_exit(1);
		if (write(go[1], "x", 1) != 1)
			_exit(1);
		pause();
	}
	need(read(go[0], &c, 1) == 1, "the child attaches");
	need(!genl_ctxs(child, &ctxs), "dump");
	check_eq(ctxs.n, 1, "the process that attached last is the context's process");
	kill(child, 9);
	waitpid(child, &status, 0);
}

static pthread_barrier_t ready;

static void *attach_now(void *arg)
{
	const int *fds = arg;	/* /dev/migr, uverbs */

	pthread_barrier_wait(&ready);
	return (void *)(intptr_t)migr_attach(fds[0], fds[1], NULL);
}

/* Two are the first: each brings tables along, and both get the same ones. */
static void at_once(void)
{
	enum { ROUNDS = 50 };
	int i, k, same = 0;

	pthread_barrier_init(&ready, NULL, 2);
	for (i = 0; i < ROUNDS; i++) {
		const uint32_t *table[2];
		pthread_t thread[2];
		void *failed[2];
		int fds[2][2];
		struct side s;

		side_open(&s);
		for (k = 0; k < 2; k++) {
			fds[k][0] = migr_open();
			fds[k][1] = s.context->cmd_fd;
			need(!pthread_create(&thread[k], NULL, attach_now, fds[k]), "a thread");
		}
		for (k = 0; k < 2; k++)
			pthread_join(thread[k], &failed[k]);
		need(!failed[0] && !failed[1], "two attach at once");
		for (k = 0; k < 2; k++)
			table[k] = map_qpn_table(fds[k][0]);
		same += table[0][s.qp->qp_num] & MIGR_QPN_VALID && table[1][s.qp->qp_num] == table[0][s.qp->qp_num];
		for (k = 0; k < 2; k++) {
			munmap((void *)table[k], MIGR_QPN_TABLE_BYTES);
			close(fds[k][0]);
		}
		side_close(&s);
	}
	check_eq(same, ROUNDS, "two that attach at once see the same tables");
	pthread_barrier_destroy(&ready);
}

int main(void)
{
	struct migr_ioc_bind_qp bind;
	struct migr_ioc_attach a;
	struct side s;
	int fd, fd2;

	fd = migr_open();
	side_open(&s);
	unattached(fd);
	refused(fd, &s);
	check(!attach(fd, MIGR_ABI_VERSION, s.context->cmd_fd, 0, &a), "attach to an own context");
	need(!genl_ctxs(getpid(), &ctxs) && ctxs.n == 1, "dump");
	check_eq(a.ctx_id, ctxs.rec[0].ctx_id, "the id is that of the record");
	check_eq(ctxs.rec[0].flags, MIGR_CTX_ATTACHED, "the record says that it is attached");
	check_errno(attach(fd, MIGR_ABI_VERSION, s.context->cmd_fd, 0, &a), EBUSY, "attach a second time");
	fd2 = migr_open();
	check(!attach(fd2, MIGR_ABI_VERSION, s.context->cmd_fd, 0, &a), "another file may attach too");
	close(fd2);
	need(!genl_ctxs(getpid(), &ctxs) && ctxs.n == 1, "dump");
	check_eq(ctxs.rec[0].flags, MIGR_CTX_ATTACHED, "attached as long as one file is open");
	handed_over(&s);
	bind = (struct migr_ioc_bind_qp){ s.qp->qp_num, s.qp->qp_num };
	side_close(&s);
	check_errno(ioctl(fd, MIGR_IOC_BIND_QP, &bind), ENOENT, "the context is closed: its file serves nothing");
	close(fd);
	at_once();
	return finish();
}
