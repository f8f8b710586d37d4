// SPDX-License-Identifier: GPL-2.0
/*
 * On which processors threads may run (sched_setaffinity), which CRIU does not take along. Noted at the dump of each thread
 * that is kept to some of those that its cgroup has, and set again from outside while the restored tasks wait for COMMIT.
 * The kernel leaves out what its cgroup, or the host, does not have here.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image_file.h"
#include "plugin.h"
#include "task.h"

#define LIST_MAX 1024	/* bytes, as "0-3,8"; with its end */

/* As the kernel writes processors. 0; -1: it is none, or has numbers that a cpu_set_t does not have. */
static int parse(const char *list, cpu_set_t *set)
{
	CPU_ZERO(set);
	while (*list && *list != '\n') {
		char *end;
		unsigned long first = strtoul(list, &end, 10), last = first;

		if (end == list)
			return -1;
		if (*end == '-') {
			list = end + 1;
			last = strtoul(list, &end, 10);
			if (end == list)
				return -1;
		}
		if (last >= CPU_SETSIZE || first > last)
			return -1;
		for (; first <= last; first++)
			CPU_SET(first, set);
		if (*end && *end != ',' && *end != '\n')
			return -1;
		list = *end == ',' ? end + 1 : end;
	}
	return CPU_COUNT(set) ? 0 : -1;
}

/* The first line of @path that begins with @name, without that. 0 or -1. */
static int read_line(const char *path, const char *name, char *to, size_t n)
{
	FILE *f = fopen(path, "re");
	char line[LIST_MAX];
	int ret = -1;

	while (f && ret && fgets(line, sizeof(line), f))
		if (!strncmp(line, name, strlen(name)) && strchr(line, '\n')) {
			const char *at = line + strlen(name);

			at += strspn(at, " \t");
			snprintf(to, n, "%.*s", (int)strcspn(at, "\n"), at);
			ret = 0;
		}
	if (f)
		fclose(f);
	return ret;
}

/* What a thread of @pid has that nobody has kept to some: its cgroup's, or the nearest's above it that has any, or the host's. */
static int usual(pid_t pid, cpu_set_t *set)
{
	char path[4096 + 64], group[LIST_MAX], list[LIST_MAX];

	snprintf(path, sizeof(path), "/proc/%d/cgroup", pid);
	if (!read_line(path, "0::", group, sizeof(group)))
		for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
			*end = '\0';
			snprintf(path, sizeof(path), "/sys/fs/cgroup%s/cpuset.cpus.effective", group);
			if (!read_line(path, "", list, sizeof(list)) && !parse(list, set))
				return 0;
		}
	return read_line("/sys/devices/system/cpu/online", "", list, sizeof(list)) ? -1 : parse(list, set);
}

struct noting {
	pid_t pid;
	cpu_set_t usual;
	FILE *to;
};

static int note_thread(pid_t tid, void *arg)
{
	struct noting *n = arg;
	char path[64], list[LIST_MAX];
	cpu_set_t set, both;

	snprintf(path, sizeof(path), "/proc/%d/status", tid);
	if (read_line(path, "Cpus_allowed_list:", list, sizeof(list)) || parse(list, &set)) {
		say(2, "thread %d: not known on which processors it may run", tid);
		return 0;
	}
	CPU_AND(&both, &set, &n->usual);
	if (!CPU_EQUAL(&both, &n->usual))
		fprintf(n->to, "%lld %lld %s\n", task_status(n->pid, "NSpid:", 10), task_status(tid, "NSpid:", 10), list);
	return 0;
}

int cpus_note(pid_t root, int dir)
{
	struct noting n = { .to = image_open(dir, MIGR_CPUS_NAME, O_WRONLY | O_CREAT | O_TRUNC) };
	struct pids tree;
	int ret;

	if (!n.to)
		return errno;
	ret = pids_of_tree(root, &tree);
	for (uint32_t i = 0; !ret && i < tree.nr; i++) {
		n.pid = tree.all[i];
		if (!usual(n.pid, &n.usual))
			each_thread(n.pid, note_thread, &n);
	}
	free(tree.all);
	return image_close(n.to, ret);
}

/* A thread of the restored tree, and what its process and it are called there. */
struct thread {
	long long ns_pid, ns_tid;
	pid_t tid;
};

struct threads {
	struct thread *all;
	uint32_t nr;
	long long ns_pid;	/* of those that are added */
};

static int add_thread(pid_t tid, void *arg)
{
	struct threads *t = arg;
	struct thread *bigger = t->all;

	if (!(t->nr & (t->nr - 1)))	/* it doubles */
		bigger = reallocarray(t->all, t->nr ? 2 * (size_t)t->nr : 1, sizeof(*bigger));
	if (!bigger)
		return ENOMEM;
	t->all = bigger;
	t->all[t->nr++] = (struct thread){ t->ns_pid, task_status(tid, "NSpid:", 10), tid };
	return 0;
}

static struct threads threads_of_tree(pid_t root)
{
	struct threads t = { 0 };
	struct pids tree;

	pids_of_tree(root, &tree);	/* who is not found is missed */
	for (uint32_t i = 0; i < tree.nr; i++) {
		t.ns_pid = task_status(tree.all[i], "NSpid:", 10);
		each_thread(tree.all[i], add_thread, &t);
	}
	free(tree.all);
	return t;
}

/* 0 or a positive errno: ESRCH, it is not there. */
static int keep_to(const struct threads *t, long long ns_pid, long long ns_tid, const cpu_set_t *set)
{
	for (uint32_t i = 0; i < t->nr; i++)
		if (t->all[i].ns_pid == ns_pid && t->all[i].ns_tid == ns_tid)
			return sched_setaffinity(t->all[i].tid, sizeof(*set), set) ? errno : 0;
	return ESRCH;
}

void cpus_give_back(pid_t root, int dir)
{
	FILE *from = image_open(dir, MIGR_CPUS_NAME, O_RDONLY);
	char line[LIST_MAX + 64], list[LIST_MAX];
	struct threads threads = { 0 };
	unsigned nr = 0, lost = 0;

	while (from && fgets(line, sizeof(line), from)) {
		long long ns_pid, ns_tid;
		cpu_set_t set;
		int ret;

		if (sscanf(line, "%lld %lld %1023s", &ns_pid, &ns_tid, list) != 3 || parse(list, &set)) {
			say(2, "%s has a line that cannot be read", MIGR_CPUS_NAME);
			continue;
		}
		if (!threads.nr)
			threads = threads_of_tree(root);
		ret = keep_to(&threads, ns_pid, ns_tid, &set);
		if (!ret)
			nr++;
		else if (!lost++)
			say(2, "thread %lld of process %lld was kept to processors %s, and may run on all: %s", ns_tid, ns_pid, list,
			    ret == EINVAL ? "this host, or its cgroup here, has none of them" : strerror(ret));
	}
	if (nr || lost)
		say(3, "%u threads are kept to processors as they were, %u are not", nr, lost);
	free(threads.all);
	if (from)
		fclose(from);
}
