// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* The tables: read-only, exact, lazy, right for what lives and zero for the rest; and nobody else's. */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int try_map(int fd, size_t len, int prot, int flags, off_t offset)
{
	void *p = mmap(NULL, len, prot, flags, fd, offset);

	if (p == MAP_FAILED)
		return -1;
	munmap(p, len);
	return 0;
}

static long rss_kb(void)
{
	char line[256];
	long kb = -1;
	FILE *f = fopen("/proc/self/status", "r");

	while (f && fgets(line, sizeof(line), f))
		sscanf(line, "RssShmem: %ld", &kb);
	if (f)
		fclose(f);
	return kb;
}

/* ---- another process, with a context of its own, that knows everything about this one */

enum { NOBODY = 65534, MRS = 8 };

struct target {
	pid_t pid;
	int fd, uverbs;			/* its descriptors, by their numbers */
	uint32_t qpn, mr, lkey;		/* mr: a handle that the stranger has none of */
	const uint32_t *qpns;		/* where it has its table */
};

struct stranger {
	pid_t pid;
	int go;				/* what it is told of its target goes here */
	char *wrong;			/* the first thing that should not be; "": none */
};

/* The call fails, with @err; if it does not the process ends, saying @what. */
static void refused(struct stranger *me, long ret, int err, const char *what)
{
	if (ret < 0 && errno == err)
		return;
	snprintf(me->wrong, 4096, "%s: %s", what, ret < 0 ? strerror(errno) : "it succeeded");
	_exit(0);
}

static void so(struct stranger *me, bool good, const char *what)
{
	if (good)
		return;
	snprintf(me->wrong, 4096, "not so: %s (errno: %s)", what, strerror(errno));
	_exit(0);
}

static int root_of_container(void)
{
	return unshare(CLONE_NEWUSER | CLONE_NEWNET);
}

static int nobody(void)
{
	return setgid(NOBODY) || setuid(NOBODY);
}

static int stays_root(void)
{
	return 0;
}

/* The descriptor and the memory of the other one. */
static void from_outside(struct stranger *me, const struct target *t, bool may)
{
	int pidfd = syscall(SYS_pidfd_open, t->pid, 0), got;
	const uint32_t *qpns;
	char path[64], byte;
	uint32_t entry = 0;
	struct iovec here = { &entry, sizeof(entry) }, there = { (void *)&t->qpns[t->qpn], sizeof(entry) };

	so(me, pidfd >= 0, "pidfd_open");
	got = syscall(SYS_pidfd_getfd, pidfd, t->fd, 0);
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", t->pid, t->fd);
	if (!may) {
		refused(me, got, EPERM, "pidfd_getfd of its /dev/migr");
		refused(me, syscall(SYS_pidfd_getfd, pidfd, t->uverbs, 0), EPERM, "pidfd_getfd of its uverbs");
		refused(me, open(path, O_RDWR), EACCES, path);
		refused(me, readlink(path, &byte, 1), EACCES, "readlink of its /dev/migr");
		refused(me, process_vm_readv(t->pid, &here, 1, &there, 1, 0), EPERM, "process_vm_readv of its table");
		snprintf(path, sizeof(path), "/proc/%d/mem", t->pid);
		refused(me, open(path, O_RDONLY), EACCES, path);
		return;
	}
	/* Who may, as root of the host, sees that this is how it would be done. */
	so(me, got >= 0, "pidfd_getfd by root");
	so(me, process_vm_readv(t->pid, &here, 1, &there, 1, 0) == sizeof(entry), "process_vm_readv by root");
	qpns = mmap(NULL, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, got, MIGR_QPN_TABLE_OFFSET);
	so(me, qpns != MAP_FAILED && qpns[t->qpn] == (t->qpn | MIGR_QPN_VALID) && entry == qpns[t->qpn], "the table by its descriptor");
	got = open(path, O_RDWR);
	so(me, got >= 0, "opening its /dev/migr by its name");
	refused(me, try_map(got, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, 0), ENOENT, "tables of what was only opened again");
}

/* Numbers of the other one at descriptors of the own. */
static void by_number(struct stranger *me, const struct target *t, int fd, struct side *s)
{
	struct migr_ioc_attach attach = { MIGR_ABI_VERSION, t->uverbs, 0, 0 };
	struct migr_ioc_bind_qp bind_qp = { t->qpn, t->qpn };
	struct migr_ioc_bind_mr bind_mr = { t->mr, t->lkey, 0, 0 };
	struct migr_ioc_query_mr query = { .handle = t->mr };
	struct migr_ioc_driver_resp resp = { .obj_type = MIGR_OBJ_QP, .handle = t->mr };
	struct migr_ioc_qp_stands stands = { t->qpn, IBV_QPS_RTS };
	const struct migr_key_entry *keys = map_key_table(fd);
	const uint32_t *qpns = map_qpn_table(fd);
	int second = open("/dev/migr", O_RDWR), i;

	refused(me, try_map(second, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, 0), ENOENT, "tables without a context");
	refused(me, ioctl(second, MIGR_IOC_ATTACH, &attach), EBADF, "attach by the number of its descriptor");
	for (i = 1; i < 64; i++)
		refused(me, try_map(fd, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, (off_t)i << 33), EINVAL, "another offset");
	so(me, qpns[t->qpn] == 0 && qpns[s->qp->qp_num] == (s->qp->qp_num | MIGR_QPN_VALID), "the QPN table is its own only");
	so(me, keys[t->lkey >> 8].lkey == 0 && keys[s->mr->lkey >> 8].lkey, "and so is that of keys");
	refused(me, ioctl(fd, MIGR_IOC_BIND_QP, &bind_qp), ENOENT, "a name for the other's QP");
	refused(me, ioctl(fd, MIGR_IOC_QP_STANDS, &stands), ENOENT, "a state for the other's QP");
	refused(me, ioctl(fd, MIGR_IOC_BIND_MR, &bind_mr), ENOENT, "keys for the other's MR");
	refused(me, ioctl(fd, MIGR_IOC_QUERY_MR, &query), ENOENT, "keys of the other's MR");
	refused(me, ioctl(fd, MIGR_IOC_DRIVER_RESP, &resp), ENOENT, "the driver's answer for the other");
	query.handle = s->mr->handle;
	so(me, !ioctl(fd, MIGR_IOC_QUERY_MR, &query) && query.plkey == s->mr->lkey, "the same call of an own one");
}

/* Before there is anything that it could inherit. */
static struct stranger stranger(int (*become)(void), bool may)
{
	struct stranger me = { .wrong = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) };
	struct target t;
	struct side s;
	int ends[2], fd;

	need(me.wrong != MAP_FAILED && !pipe(ends), "shared memory and a pipe");
	strcpy(me.wrong, "it did not get to its end");
	fflush(stdout);
	me.pid = fork();
	need(me.pid >= 0, "fork");
	me.go = ends[1];
	if (me.pid) {
		close(ends[0]);
		return me;
	}
	close(ends[1]);
	side_open(&s);
	fd = migr_open();
	so(&me, !become(), "to become another user");
	so(&me, !migr_attach(fd, s.context->cmd_fd, NULL), "attach");
	if (read(ends[0], &t, sizeof(t)) != sizeof(t))
		_exit(0);
	from_outside(&me, &t, may);
	by_number(&me, &t, fd, &s);
	me.wrong[0] = 0;
	_exit(0);
}

static void meets(struct stranger *it, const struct target *t, const char *who)
{
	need(write(it->go, t, sizeof(*t)) == sizeof(*t) && waitpid(it->pid, NULL, 0) == it->pid, "tell it");
	check(!it->wrong[0], "%s with a context of its own gets nothing of another's%s%s", who, it->wrong[0] ? ": " : "", it->wrong);
	close(it->go);
}

int main(void)
{
	struct stranger others[] = { stranger(nobody, false), stranger(root_of_container, false), stranger(stays_root, true) };
	struct ibv_mr *mrs[MRS];
	struct target t;
	const struct migr_key_entry *keys;
	const uint32_t *qpns;
	uint32_t qpn, lkey, old_lkey, n, used;
	struct ibv_mr *mr;
	struct side s;
	void *again;
	int fd, uverbs, status, i;

	fd = migr_open();
	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, NULL), "attach");

	check_errno(try_map(fd, MIGR_QPN_TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, 0), EPERM,
		    "a writable mapping");
	check_errno(try_map(fd, 4096, PROT_READ, MAP_SHARED, 0), EINVAL, "a part of a table");
	check_errno(try_map(fd, MIGR_QPN_TABLE_BYTES * 2, PROT_READ, MAP_SHARED, 0), EINVAL, "more than a table");
	check_errno(try_map(fd, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, 4096), EINVAL, "no such offset");
	check_errno(try_map(fd, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_PRIVATE, 0), EINVAL, "a private mapping");

	qpns = map_qpn_table(fd);
	keys = map_key_table(fd);
	check_errno(mprotect((void *)qpns, MIGR_QPN_TABLE_BYTES, PROT_READ | PROT_WRITE), EACCES,
		    "mprotect to writable");
	again = mmap(NULL, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
	need(again != MAP_FAILED, "a second mapping");
	check(!syscall(SYS_remap_file_pages, again, MIGR_QPN_TABLE_BYTES, 0, 0, 0), "remap_file_pages");
	check_errno(mprotect(again, MIGR_QPN_TABLE_BYTES, PROT_READ | PROT_WRITE), EACCES,
		    "mprotect to writable of what is mapped anew");
	check_eq(((const uint32_t *)again)[s.qp->qp_num], s.qp->qp_num | MIGR_QPN_VALID, "it is the same table");
	munmap(again, MIGR_QPN_TABLE_BYTES);
	check_eq(qpns[s.qp->qp_num], s.qp->qp_num | MIGR_QPN_VALID, "what was made before attaching is in");
	check_eq(keys[s.mr->lkey >> 8].lkey, s.mr->lkey ^ (s.mr->lkey & 0xff), "lkey entry");
	check_eq(keys[s.mr->rkey >> 8].rkey, s.mr->rkey ^ (s.mr->rkey & 0xff), "rkey entry");
	check_eq(keys[s.mr->lkey >> 8].lkey ^ (s.mr->lkey & 0xff), s.mr->lkey, "lkey translates to itself");
	check((keys[s.mr->lkey >> 8].lkey ^ ((s.mr->lkey + 1) & 0xff)) != s.mr->lkey, "a wrong tag stays wrong");
	check_eq(qpns[s.qp->qp_num + 100], 0, "no such QP: 0");

	qpn = s.qp->qp_num;
	need(!ibv_destroy_qp(s.qp), "destroy_qp");
	check_eq(qpns[qpn], 0, "a destroyed QP: 0");
	s.qp = make_qp(&s);
	check_eq(qpns[s.qp->qp_num], s.qp->qp_num | MIGR_QPN_VALID, "a new QP is in before create returns");
	lkey = s.mr->lkey;
	mr = ibv_reg_mr(s.pd, s.buf, 4096, IBV_ACCESS_LOCAL_WRITE);
	need(mr, "second MR");
	old_lkey = mr->lkey;
	check_eq(keys[old_lkey >> 8].lkey ^ (old_lkey & 0xff), mr->lkey, "a new MR is in");
	need(!ibv_dereg_mr(mr), "dereg_mr");
	check_eq(keys[old_lkey >> 8].lkey, 0, "a deregistered MR: lkey 0");
	check_eq(keys[old_lkey >> 8].rkey, 0, "a deregistered MR: rkey 0");

	for (i = 0; i < MRS; i++) {
		mrs[i] = ibv_reg_mr(s.pd, s.buf, 4096, IBV_ACCESS_LOCAL_WRITE);
		need(mrs[i], "an MR");
	}
	/* A number that nobody else has a descriptor of. */
	uverbs = fcntl(s.context->cmd_fd, F_DUPFD_CLOEXEC, 100);
	need(uverbs >= 0, "dup");
	t = (struct target){ getpid(), fd, uverbs, s.qp->qp_num, mrs[MRS - 1]->handle, mrs[MRS - 1]->lkey, qpns };
	meets(&others[0], &t, "another user");
	meets(&others[1], &t, "root of a container");
	meets(&others[2], &t, "root of the host, unless it takes the descriptor,");
	check_eq(qpns[s.qp->qp_num], s.qp->qp_num | MIGR_QPN_VALID, "the QP is what it was");
	check_eq(keys[mrs[MRS - 1]->lkey >> 8].lkey ^ (mrs[MRS - 1]->lkey & 0xff), mrs[MRS - 1]->lkey, "and so is the MR");
	close(uverbs);
	for (i = 0; i < MRS; i++)
		need(!ibv_dereg_mr(mrs[i]), "dereg_mr");

	for (n = used = 0; n < MIGR_NR_INDEX; n += 1024 / 4 * 4)
		used += qpns[n] != 0;
	check(rss_kb() >= 0, "the tables can be read from end to end (%ld kB were touched)", rss_kb());

	fflush(stdout);
	if (!fork())
		_exit(qpns[s.qp->qp_num] == (s.qp->qp_num | MIGR_QPN_VALID) ? 0 : 1);
	wait(&status);
	check(WIFEXITED(status) && !WEXITSTATUS(status), "a child reads the table it inherits");

	close(fd);
	qpn = s.qp->qp_num;
	check_eq(qpns[qpn], qpn | MIGR_QPN_VALID, "the mapping outlives close()");
	need(!ibv_destroy_qp(s.qp), "destroy_qp");
	check_eq(qpns[qpn], 0, "and is kept up to date");
	s.qp = NULL;
	side_close(&s);
	check_eq(keys[lkey >> 8].lkey, 0, "a closed context leaves empty tables");
	return finish();
}
