// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* The tables: read-only, exact, lazy, right for what lives and zero for the rest. */
#include "migr_test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

int main(void)
{
	const struct migr_key_entry *keys;
	const uint32_t *qpns;
	uint32_t qpn, lkey, old_lkey, n, used;
	struct ibv_mr *mr;
	struct side s;
	int fd, status;

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
