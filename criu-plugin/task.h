/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A task that CRIU has stopped, and traces, runs for a moment: a few instructions
 * that are in its memory already. What it notices of it: nothing. Registers, signal
 * mask and rseq are put back, no text is changed, no stack used. x86-64.
 *
 * By CRIU's thread, which is the tracer, with SIGCHLD blocked.
 */
#ifndef MIGR_CRIU_TASK_H
#define MIGR_CRIU_TASK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/user.h>

struct task {
	pid_t pid;
	struct user_regs_struct regs;
	uint64_t sigmask;
	uint64_t rseq_cs_at, rseq_cs;	/* at 0: it has none */
	int stop_again;			/* somebody has sent it SIGSTOP */
};

/* Its memory: 0 or -1. */
int task_get(pid_t pid, uint64_t addr, void *to, size_t n);
int task_put(pid_t pid, uint64_t addr, const void *from, size_t n);

/* The last number in line @name of /proc/PID/status, to base @base; -1: there is none. */
long long task_status(pid_t pid, const char *name, int base);

/*
 * Calls @f for each thread of a process until it returns other than 0. 0, what that returned, or a negative errno: there
 * is no such process.
 */
int each_thread(pid_t pid, int (*f)(pid_t tid, void *arg), void *arg);

struct pids {
	pid_t *all;	/* to be freed */
	uint32_t nr;
};

/* The process and what descends from it. 0, or ENOMEM: not all of them. */
int pids_of_tree(pid_t root, struct pids *p);

/* CLOCK_MONOTONIC */
long now_ms(void);

/* Notes everything of t->pid that running changes. NULL, or why this task cannot. */
const char *task_take(struct task *t);

enum task_pace {
	TASK_TO_TRAP,		/* to an int3 */
	TASK_ONE_INSTRUCTION,
};

/*
 * Runs it from @regs->rip on, with these registers, until it stands at @end; then @regs are what it has. 0 or a positive
 * errno: ETIMEDOUT, and it still runs; ESRCH: it has ended; EFAULT: it stands elsewhere.
 */
int task_run(struct task *t, struct user_regs_struct *regs, enum task_pace pace, uint64_t end, long until_ms);

/* The address of an instruction "syscall" in its vDSO; 0: none was found. */
uint64_t task_find_syscall(pid_t pid);

/*
 * Has it execute system call @nr at @insn, of task_find_syscall(). 0, or an errno: a positive one of the call, a negative one
 * of task_run(): it was not, or may not have been, executed.
 */
int task_syscall(struct task *t, uint64_t insn, long nr, uint64_t a, uint64_t b, uint64_t c);

/* As it was taken. 0 or a positive errno. */
int task_give_back(const struct task *t);

#endif /* MIGR_CRIU_TASK_H */
