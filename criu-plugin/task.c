// SPDX-License-Identifier: GPL-2.0
#include "task.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#define NR_PIDS_MAX 65536u
#define LOOK_AGAIN_MS 100	/* should a SIGCHLD get lost */
#define USER_CS_64 0x33
#define RSEQ_CS_OFFSET 8	/* struct rseq: two words, then rseq_cs */
#define SIGSET_BYTES 8		/* the kernel's */
#define SYSCALL_LIMIT_MS 10000	/* for one */
#define VDSO_BYTES_MAX (64u << 10)

int task_get(pid_t pid, uint64_t addr, void *to, size_t n)
{
	struct iovec here = { to, n }, there = { (void *)(uintptr_t)addr, n };

	return process_vm_readv(pid, &here, 1, &there, 1, 0) == (ssize_t)n ? 0 : -1;
}

int task_put(pid_t pid, uint64_t addr, const void *from, size_t n)
{
	struct iovec here = { (void *)from, n }, there = { (void *)(uintptr_t)addr, n };

	return process_vm_writev(pid, &here, 1, &there, 1, 0) == (ssize_t)n ? 0 : -1;
}

long long task_status(pid_t pid, const char *name, int base)
{
	char path[32], line[512];
	long long v = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/status", pid);
	f = fopen(path, "re");
	while (f && v < 0 && fgets(line, sizeof(line), f))
		if (!strncmp(line, name, strlen(name))) {
			const char *last = strrchr(line, '\t');

			v = last ? (long long)strtoull(last, NULL, base) : -1;
		}
	if (f)
		fclose(f);
	return v;
}

static int add_pid(struct pids *p, pid_t pid)
{
	pid_t *bigger = p->nr == NR_PIDS_MAX ? NULL : reallocarray(p->all, p->nr + 1, sizeof(*bigger));

	if (!bigger)
		return ENOMEM;
	p->all = bigger;
	p->all[p->nr++] = pid;
	return 0;
}

int each_thread(pid_t pid, int (*f)(pid_t tid, void *arg), void *arg)
{
	char path[64];
	struct dirent *e;
	DIR *threads;
	int ret = 0;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	threads = opendir(path);
	if (!threads)
		return -errno;
	while (!ret && (e = readdir(threads)))
		if (e->d_name[0] != '.')
			ret = f(atoi(e->d_name), arg);
	closedir(threads);
	return ret;
}

static int add_children(pid_t tid, void *to)
{
	char path[64];
	int ret = 0, child;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", tid, tid);
	f = fopen(path, "re");
	while (f && !ret && fscanf(f, "%d", &child) == 1)
		ret = add_pid(to, child);
	if (f)
		fclose(f);
	return ret;
}

int pids_of_tree(pid_t root, struct pids *p)
{
	int ret;

	*p = (struct pids){ 0 };
	ret = add_pid(p, root);
	for (uint32_t i = 0; !ret && i < p->nr; i++) {
		ret = each_thread(p->all[i], add_children, p);
		if (ret < 0)
			ret = 0;	/* it has ended */
	}
	return ret;
}

static int move_regs(int request, pid_t pid, struct user_regs_struct *regs)
{
	struct iovec v = { regs, sizeof(*regs) };

	if (ptrace(request, pid, 1 /* NT_PRSTATUS */, &v))
		return -1;
	return v.iov_len == sizeof(*regs) ? 0 : -1;	/* a 32-bit task's are fewer */
}

const char *task_take(struct task *t)
{
	struct __ptrace_rseq_configuration rseq = { 0 };
	long long ignored = task_status(t->pid, "SigIgn:", 16), pending = task_status(t->pid, "SigPnd:", 16),
		  shared = task_status(t->pid, "ShdPnd:", 16);

	/* int3 would set SIGTRAP's action to the default, if it is ignored. */
	if (ignored < 0 || ((ignored | pending | shared) & 1 << (SIGTRAP - 1)))
		return "it ignores SIGTRAP, or has one to come";
	if (move_regs(PTRACE_GETREGSET, t->pid, &t->regs) || t->regs.cs != USER_CS_64)
		return "it is not stopped, or not in 64-bit mode";
	if (ptrace(PTRACE_GETSIGMASK, t->pid, (void *)SIGSET_BYTES, &t->sigmask))
		return "its signal mask cannot be read";
	if (ptrace(PTRACE_GET_RSEQ_CONFIGURATION, t->pid, (void *)sizeof(rseq), &rseq) > 0 && rseq.rseq_abi_pointer) {
		t->rseq_cs_at = rseq.rseq_abi_pointer + RSEQ_CS_OFFSET;
		if (task_get(t->pid, t->rseq_cs_at, &t->rseq_cs, sizeof(t->rseq_cs)))
			return "its rseq area cannot be read";
	}
	return NULL;
}

int task_give_back(const struct task *t)
{
	struct user_regs_struct regs = t->regs;

	if (move_regs(PTRACE_SETREGSET, t->pid, &regs) ||
	    ptrace(PTRACE_SETSIGMASK, t->pid, (void *)SIGSET_BYTES, &t->sigmask))
		return errno;
	/* The kernel has cleared it: the thread was seen outside of the critical section that it names. */
	if (t->rseq_cs_at && t->rseq_cs && task_put(t->pid, t->rseq_cs_at, &t->rseq_cs, sizeof(t->rseq_cs)))
		return errno;
	if (t->stop_again)
		kill(t->pid, SIGSTOP);	/* as CRIU does with one that was stopped */
	return 0;
}

long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Waits for a stop of @pid. SIGCHLD is blocked. 0 or a positive errno. */
static int wait_stop(pid_t pid, long until_ms, int *status)
{
	sigset_t chld;

	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	for (;;) {
		pid_t got = waitpid(pid, status, __WALL | WNOHANG);
		long left = until_ms - now_ms();

		if (got < 0)
			return errno;
		if (got == pid)
			return WIFSTOPPED(*status) ? 0 : ESRCH;
		if (left <= 0)
			return ETIMEDOUT;
		if (left > LOOK_AGAIN_MS)
			left = LOOK_AGAIN_MS;
		sigtimedwait(&chld, NULL, &(struct timespec){ .tv_nsec = left * 1000000 });
	}
}

int task_run(struct task *t, struct user_regs_struct *regs, enum task_pace pace, uint64_t end, long until_ms)
{
	uint64_t block = ~(1ull << (SIGTRAP - 1));
	int status, ret;

	regs->orig_rax = -1;	/* no system call that could be restarted */
	if (ptrace(PTRACE_SETSIGMASK, t->pid, (void *)SIGSET_BYTES, &block) || move_regs(PTRACE_SETREGSET, t->pid, regs))
		return errno;
	for (;;) {
		if (ptrace(pace == TASK_ONE_INSTRUCTION ? PTRACE_SINGLESTEP : PTRACE_CONT, t->pid, NULL, NULL))
			return errno;
		ret = wait_stop(t->pid, until_ms, &status);
		if (ret)
			return ret;
		if (status >> 16 == PTRACE_EVENT_STOP)
			continue;
		if (WSTOPSIG(status) == SIGSTOP) {
			t->stop_again = 1;
			continue;
		}
		if (WSTOPSIG(status) != SIGTRAP || move_regs(PTRACE_GETREGSET, t->pid, regs) || regs->rip != end)
			return EFAULT;
		return 0;
	}
}

uint64_t task_find_syscall(pid_t pid)
{
	static unsigned char text[VDSO_BYTES_MAX];
	char path[32], line[4352], name[16];
	unsigned long long start, end;
	const unsigned char *at = NULL;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	f = fopen(path, "re");
	while (f && !at && fgets(line, sizeof(line), f))
		if (sscanf(line, "%llx-%llx %*s %*s %*s %*s %15s", &start, &end, name) == 3 && !strcmp(name, "[vdso]") &&
		    end - start <= sizeof(text) && !task_get(pid, start, text, end - start))
			at = memmem(text, end - start, "\x0f\x05", 2);
	if (f)
		fclose(f);
	return at ? start + (uint64_t)(at - text) : 0;
}

int task_syscall(struct task *t, uint64_t insn, long nr, uint64_t a, uint64_t b, uint64_t c)
{
	struct user_regs_struct regs = t->regs;
	int ret;

	regs.rip = insn;
	regs.rax = nr;
	regs.rdi = a;
	regs.rsi = b;
	regs.rdx = c;
	ret = task_run(t, &regs, TASK_ONE_INSTRUCTION, insn + 2, now_ms() + SYSCALL_LIMIT_MS);
	return ret ? -ret : -(int)regs.rax;
}
