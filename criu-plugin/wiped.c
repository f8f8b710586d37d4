// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that a forked process finds empty (MADV_WIPEONFORK): random generators know by it that they are another's copy.
 * CRIU does not take that along (3.17.1 to 4.1). Noted at the dump, from smaps, for which the kernel looks at all pages of a process:
 * only where migrd says that there is such memory, by an empty file of the name. A line for each mapping: its process, as it is called
 * in its namespace, start and end. The restored tasks ask for it again while they wait for COMMIT: they are made to, as in clean.c.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "image_file.h"
#include "plugin.h"
#include "task.h"

/* 0 or a positive errno. */
static int note_process(pid_t pid, FILE *to)
{
	unsigned long long start = 0, end = 0, from, until;
	long long ns_pid = task_status(pid, "NSpid:", 10);
	char path[32], line[4352];
	FILE *f;
	int ret;

	snprintf(path, sizeof(path), "/proc/%d/smaps", pid);
	f = fopen(path, "re");
	if (!f)
		return errno == ESRCH ? 0 : errno;	/* a zombie */
	while (fgets(line, sizeof(line), f))
		if (sscanf(line, "%llx-%llx", &from, &until) == 2)
			start = from, end = until;
		else if (!strncmp(line, "VmFlags:", 8) && strstr(line, " wf"))
			fprintf(to, "%lld %llx %llx\n", ns_pid, start, end);
	ret = ferror(f) ? EIO : 0;
	fclose(f);
	return ret;
}

int wiped_note(pid_t root, int dir)
{
	FILE *to = image_open(dir, MIGR_RST_WIPED_NAME, O_WRONLY | O_TRUNC);
	struct pids tree;
	int ret;

	if (!to)
		return errno == ENOENT ? 0 : errno;
	ret = pids_of_tree(root, &tree);
	for (uint32_t i = 0; !ret && i < tree.nr; i++)
		ret = note_process(tree.all[i], to);
	free(tree.all);
	return image_close(to, ret);
}

/* The process whose lines are read. */
struct taker {
	long long ns_pid;
	struct task task;
	uint64_t insn;	/* 0: it is left as it is */
	unsigned nr, lost;
};

/* Why it is left as it is is said. */
static void begin(struct taker *p, long long ns_pid, const struct pids *tree)
{
	const char *why = NULL;

	*p = (struct taker){ .ns_pid = ns_pid };
	for (uint32_t i = 0; i < tree->nr && !p->task.pid; i++)
		if (task_status(tree->all[i], "NSpid:", 10) == ns_pid)
			p->task.pid = tree->all[i];
	if (!p->task.pid)
		why = "it is not there";
	else if (!(p->insn = task_find_syscall(p->task.pid)))
		why = "it has no vDSO";
	else
		why = task_take(&p->task);
	if (why) {
		say(2, "what process %lld forks has all of its memory, also what was to be wiped (MADV_WIPEONFORK): %s", ns_pid, why);
		p->insn = 0;
	}
}

/* 0 or a positive errno: its task is not as it was. */
static int give(struct taker *p, uint64_t start, uint64_t end)
{
	int err = task_syscall(&p->task, p->insn, SYS_madvise, start, end - start, MADV_WIPEONFORK);

	if (err < 0)
		return -err;
	if (!err)
		p->nr++;
	else if (!p->lost++)
		say(2, "what process %lld forks has its memory at %#llx, which was to be wiped (MADV_WIPEONFORK): %s", p->ns_pid,
		    (unsigned long long)start, strerror(err));
	return 0;
}

static int finish(const struct taker *p)
{
	if (!p->insn)
		return 0;
	say(3, "%u mappings of process %lld are wiped in what it forks, %u are not", p->nr, p->ns_pid, p->lost);
	return task_give_back(&p->task);
}

/* 0 or a positive errno: the task of @p is not as it was. */
static int give_all(FILE *from, pid_t root, struct taker *p)
{
	struct pids tree = { 0 };
	char line[128];
	int ret = 0;

	while (!ret && fgets(line, sizeof(line), from)) {
		unsigned long long start, end;
		long long ns_pid;

		if (sscanf(line, "%lld %llx %llx", &ns_pid, &start, &end) != 3 || ns_pid <= 0 || start >= end) {
			say(2, "%s has a line that cannot be read", MIGR_RST_WIPED_NAME);
			continue;
		}
		if (!tree.nr)
			pids_of_tree(root, &tree);	/* who is not found is said */
		if (ns_pid != p->ns_pid) {
			ret = finish(p);
			if (!ret)
				begin(p, ns_pid, &tree);
		}
		if (!ret && p->insn)
			ret = give(p, start, end);
	}
	if (!ret)
		ret = finish(p);
	free(tree.all);
	return ret;
}

int wiped_give_back(pid_t root, int dir, struct migr_rst_err *err)
{
	FILE *from = image_open(dir, MIGR_RST_WIPED_NAME, O_RDONLY);
	struct taker p = { 0 };
	sigset_t chld, before;
	int ret;

	if (!from)
		return 0;
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, &before);
	ret = give_all(from, root, &p);
	sigprocmask(SIG_SETMASK, &before, NULL);
	fclose(from);
	if (ret)
		snprintf(err->text, sizeof(err->text), "process %d is not as it was, after madvise() in its name: %s", p.task.pid, strerror(ret));
	return ret;
}
