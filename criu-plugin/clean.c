// SPDX-License-Identifier: GPL-2.0
/*
 * Before the first pre-dump: registered private memory counts as not written (soft-dirty), so that CRIU finds what is
 * written from then on. By itself it would find all of it: what CRIU writes to clear_refs leaves the mark on pages that are
 * writable and pinned. It has to, on kernels on which a page that is write-protected and pinned is copied by the next
 * write and the device keeps the old one. Since 5.19 (PG_anon_exclusive) it is not. So the task, which stands still as all
 * others do, has that memory not writable for the moment in which the mark is taken away: mprotect(), clear_refs,
 * mprotect(). A first pre-dump takes all pages, whatever their marks; in a later one this would lose some.
 *
 * What a device writes sets no mark, before as after: docs/protocol.md, "Memory that was copied ahead".
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "plugin.h"

#ifdef __x86_64__
#include "task.h"

#define PAGE 4096ull
#define PIECES_MAX 1024u	/* two stops of the task each; the largest ones count */
#define PROTECT_LIMIT_MS 2000	/* for all pieces; those that are left stay as they are */

struct piece {
	uint64_t start, end;	/* addresses in the task */
	int prot;		/* of its mapping */
};

struct pieces {
	struct piece *all;
	uint32_t nr;
};

static int by_start(const void *a, const void *b)
{
	const struct piece *x = a, *y = b;

	return x->start < y->start ? -1 : x->start > y->start;
}

static int by_size(const void *a, const void *b)	/* the largest first */
{
	const struct piece *x = a, *y = b;
	uint64_t n = x->end - x->start, m = y->end - y->start;

	return n > m ? -1 : n < m;
}

static int add(struct pieces *to, uint64_t start, uint64_t end, int prot)
{
	struct piece *bigger;

	if (!(to->nr & (to->nr - 1))) {	/* it doubles */
		bigger = reallocarray(to->all, to->nr ? 2 * (size_t)to->nr : 1, sizeof(*bigger));
		if (!bigger)
			return -1;
		to->all = bigger;
	}
	to->all[to->nr++] = (struct piece){ start, end, prot };
	return 0;
}

/* Of all MRs, whole pages, by their addresses, none twice. */
static int registered(const struct migr_rst_process *p, struct pieces *out)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < p->nr_contexts; i++)
		for (uint32_t k = 0; k < p->contexts[i].rec.nr_mr; k++) {
			const struct migr_mr_rec *mr = &p->contexts[i].mrs[k].rec;

			if (!mr->length || mr->flags & (MIGR_MR_DMABUF | MIGR_MR_DM) || mr->start + mr->length < mr->start)
				continue;
			if (add(out, mr->start & ~(PAGE - 1), (mr->start + mr->length + PAGE - 1) & ~(PAGE - 1), 0))
				return -1;
		}
	qsort(out->all, out->nr, sizeof(*out->all), by_start);
	for (uint32_t i = 0; i < out->nr; i++) {
		if (kept && out->all[i].start <= out->all[kept - 1].end) {
			if (out->all[i].end > out->all[kept - 1].end)
				out->all[kept - 1].end = out->all[i].end;
		} else {
			out->all[kept++] = out->all[i];
		}
	}
	out->nr = kept;
	return 0;
}

/* Those of @of that lie in private memory that may be written to. */
static int in_private_memory(pid_t pid, const struct pieces *of, struct pieces *out)
{
	char path[32], line[4352], perms[5];
	unsigned long long start, end;
	uint32_t i = 0;
	int ret = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	f = fopen(path, "re");
	if (!f)
		return -1;
	while (!ret && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%llx-%llx %4s", &start, &end, perms) != 3)
			continue;
		while (i < of->nr && of->all[i].end <= start)
			i++;
		if (perms[1] != 'w' || perms[3] != 'p')
			continue;
		for (uint32_t k = i; !ret && k < of->nr && of->all[k].start < end; k++)
			ret = add(out, of->all[k].start > start ? of->all[k].start : start,
				  of->all[k].end < end ? of->all[k].end : end,
				  PROT_WRITE | (perms[0] == 'r' ? PROT_READ : 0) | (perms[2] == 'x' ? PROT_EXEC : 0));
	}
	fclose(f);
	return ret;
}

/* As task_syscall() of its mprotect(). */
static int protect(struct task *t, uint64_t insn, const struct piece *p, int prot)
{
	return task_syscall(t, insn, SYS_mprotect, p->start, p->end - p->start, (unsigned)prot);
}

/* Its memory could not be made writable again: it counts as what is. */
static int limits_data(pid_t pid)
{
	struct rlimit data;

	return prlimit(pid, RLIMIT_DATA, NULL, &data) ||
	       (data.rlim_cur != RLIM_INFINITY && data.rlim_cur >> 10 < (rlim_t)task_status(pid, "VmData:", 10));
}

/*
 * @bytes: of which the mark was taken; not of what cannot be protected. 0, or a positive errno: its memory is not writable any more,
 * or its task runs.
 */
static int clean(struct task *t, uint64_t insn, struct pieces *pieces, int clear_refs, uint64_t *bytes)
{
	long until_ms = now_ms() + PROTECT_LIMIT_MS;
	uint32_t nr = 0;
	int broken = 0;

	for (uint32_t i = 0; !broken && i < pieces->nr && now_ms() < until_ms; i++) {
		int err = protect(t, insn, &pieces->all[i], pieces->all[i].prot & ~PROT_WRITE);

		if (!err)
			pieces->all[nr++] = pieces->all[i];
		else if (err < 0)
			broken = -err;
	}
	if (nr && !broken && write(clear_refs, "4", 1) == 1)
		for (uint32_t i = 0; i < nr; i++)
			*bytes += pieces->all[i].end - pieces->all[i].start;
	for (uint32_t i = 0; i < nr; i++) {
		int err = protect(t, insn, &pieces->all[i], pieces->all[i].prot);

		if (err && !broken)
			broken = err < 0 ? -err : err;
	}
	return broken;
}

static int clean_process(const struct migr_rst_process *p)
{
	struct pieces mrs = { 0 }, pieces = { 0 };
	struct task t = { .pid = (pid_t)p->pid };
	uint64_t insn = 0, bytes = 0;
	const char *why = NULL;
	long began = now_ms();
	char path[32];
	int fd = -1, ret = 0;

	snprintf(path, sizeof(path), "/proc/%d/clear_refs", t.pid);
	if (registered(p, &mrs) || in_private_memory(t.pid, &mrs, &pieces))
		why = "its memory is not known";
	else if (pieces.nr && task_status(t.pid, "VmLck:", 10))
		why = "it has locked memory, which is written to when it becomes writable";
	else if (pieces.nr && limits_data(t.pid))
		why = "it has lowered RLIMIT_DATA";
	else if (pieces.nr && (!(insn = task_find_syscall(t.pid)) || (fd = open(path, O_WRONLY | O_CLOEXEC)) < 0))
		why = "it has no vDSO, or no soft-dirty marks";
	else if (pieces.nr)
		why = task_take(&t);
	if (!why && pieces.nr) {
		if (pieces.nr > PIECES_MAX) {
			qsort(pieces.all, pieces.nr, sizeof(*pieces.all), by_size);
			pieces.nr = PIECES_MAX;
		}
		ret = clean(&t, insn, &pieces, fd, &bytes);
		if (ret != ETIMEDOUT && ret != ESRCH && task_give_back(&t) && !ret)
			ret = EIO;
		if (ret)
			say(1, "process %u may have memory that it cannot write to: %s", p->pid, strerror(ret));
		else
			say(3, "%llu KB of registered memory of pid %u are not marked as written, in %ld ms",
			    (unsigned long long)(bytes >> 10), p->pid, now_ms() - began);
	}
	if (why)
		say(2, "registered memory of pid %u is dumped whole: %s", p->pid, why);
	if (fd >= 0)
		close(fd);
	free(mrs.all);
	free(pieces.all);
	return ret;
}

int clean_registered(const struct migr_rst_image *img)
{
	unsigned major = 0;
	struct utsname u;
	sigset_t chld, before;
	int ret = 0;

	if (uname(&u) || sscanf(u.release, "%u", &major) != 1 || major < 6) {
		say(2, "registered memory is dumped whole: not before Linux 6.0 can its pages be marked as not written");
		return 0;
	}
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, &before);
	for (uint32_t i = 0; !ret && i < img->nr_processes; i++)
		ret = clean_process(img->processes[i]);
	sigprocmask(SIG_SETMASK, &before, NULL);
	return ret;
}

#else

int clean_registered(const struct migr_rst_image *img)
{
	(void)img;
	say(2, "registered memory is dumped whole: only on x86-64 can its pages be marked as not written");
	return 0;
}

#endif
