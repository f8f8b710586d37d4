// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* At the limit of its cgroup's memory: a page of a table waits for a reclaim outside of the lock, and is there then. */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LIMIT = 32 << 20, BINDS = 1024, PER_PAGE = 4096 / sizeof(struct migr_key_entry) };

static char root[] = "/tmp/migr-limit", group[64];

static bool put(const char *dir, const char *file, const char *format, ...)
{
	char path[128], text[64];
	va_list args;
	bool good;
	int fd;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	snprintf(path, sizeof(path), "%s/%s", dir, file);
	fd = open(path, O_WRONLY);
	good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	if (fd >= 0)
		close(fd);
	return good;
}

/* How often somebody in the group has met the limit. */
static long met(void)
{
	char path[128], line[64];
	long n = -1;
	FILE *f;

	snprintf(path, sizeof(path), "%s/memory.events", group);
	f = fopen(path, "r");
	while (f && fgets(line, sizeof(line), f))
		sscanf(line, "max %ld", &n);
	if (f)
		fclose(f);
	return n;
}

static void into_group(void)
{
	if ((mkdir(root, 0700) && errno != EEXIST) || mount("none", root, "cgroup2", 0, NULL))
		skip("no cgroup2: %s", strerror(errno));
	if (!put(root, "cgroup.subtree_control", "+memory"))
		skip("the memory controller is not to be had: %s", strerror(errno));
	snprintf(group, sizeof(group), "%s/migr-limit", root);
	need(!mkdir(group, 0700) || errno == EEXIST, "a cgroup");
	need(put(group, "memory.max", "%d", LIMIT), "its limit");
	need(put(group, "cgroup.procs", "%d", getpid()), "into it");
}

static void out_of_group(void)
{
	need(put(root, "cgroup.procs", "%d", getpid()), "out of it");
	rmdir(group);
	umount(root);
	rmdir(root);
}

/* What is left is memory that a reclaim takes without asking. */
static void fill(void)
{
	char *p = mmap(NULL, 2 * LIMIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t at, step = 1 << 20;

	need(p != MAP_FAILED, "memory");
	for (at = 0; at < 2 * LIMIT; at += step) {
		memset(p + at, 1, step);
		need(!madvise(p + at, step, MADV_FREE), "MADV_FREE");
	}
}

int main(void)
{
	const struct migr_key_entry *keys;
	int fd, i, wrong = 0, missing = 0, error = 0;
	struct migr_ioc_bind_mr bind = {};
	struct side s, late;
	long before, after;

	fd = migr_open();
	side_open(&s);
	side_open(&late);	/* attached to below */
	need(!migr_attach(fd, s.context->cmd_fd, NULL), "attach");
	keys = map_key_table(fd);
	into_group();
	fill();
	before = met();
	for (i = 1; i <= BINDS; i++) {
		bind.handle = s.mr->handle;
		bind.vlkey = bind.vrkey = (uint32_t)(i * 8 * PER_PAGE + 1) << 8 | 0x17;	/* each in a page of its own */
		if (ioctl(fd, MIGR_IOC_BIND_MR, &bind)) {
			wrong++;
			error = errno;
		}
	}
	after = met();
	for (i = 1; i < BINDS; i++)	/* reading makes no page: those that were there have nothing in them */
		missing += keys[i * 8 * PER_PAGE + 1].lkey != 0;
	check(!wrong, "%d binds that need a page each: %d failed (%s)", BINDS, wrong, wrong ? strerror(error) : "none");
	check(after > before, "the limit was met meanwhile (%ld times)", after - before);
	check(!missing, "names that went are not in the table");
	check(keys[bind.vlkey >> 8].lkey == (s.mr->lkey ^ 0x17), "the last one is");
	fd = migr_open();
	check(!migr_attach(fd, late.context->cmd_fd, NULL), "another context's tables");
	keys = map_key_table(fd);
	check_eq(keys[late.mr->lkey >> 8].lkey ^ (late.mr->lkey & 0xff), late.mr->lkey, "its MR is in");
	out_of_group();
	side_close(&late);
	side_close(&s);
	return finish();
}
