// SPDX-License-Identifier: GPL-2.0
/*
 * Memory is registered before the commit, by the task that has it, while CRIU
 * holds it: include/migr/ahead.h. CRIU is the tracer of all tasks that it restores,
 * and the plugin runs in CRIU. In RESUME_DEVICES_LATE (3.17.1 to 4.2) every thread
 * stands in a ptrace-stop at the end of rt_sigreturn, the first of each task at that
 * of the munmap that CRIU has had it do after that; limits, credentials and seccomp
 * are the program's (the latter suspended), and what follows is only to let go.
 */
#include <errno.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "migr/ahead.h"
#include "plugin.h"

#ifdef __x86_64__
#include "task.h"

asm(".pushsection .rodata\n"
    "migr_ahead_code:\n" MIGR_AHEAD_CODE
    "migr_ahead_code_end:\n"
    ".popsection\n");
extern const unsigned char migr_ahead_code[], migr_ahead_code_end[];

static size_t code_bytes(void)
{
	return migr_ahead_code_end - migr_ahead_code;
}

/* ---- which task ------------------------------------------------------------------ */

/* The task of the tree that is @p, and its struct migr_ahead; 0: there is none. */
static pid_t find_task(const struct pids *tree, const struct migr_rst_process *p, uint64_t addr, struct migr_ahead *a)
{
	for (uint32_t i = 0; i < tree->nr; i++)
		if (task_status(tree->all[i], "NSpid:", 10) == p->ns_pid && !task_get(tree->all[i], addr, a, sizeof(*a)) &&
		    a->magic == MIGR_AHEAD_MAGIC && !memcmp(a->instance, p->instance, sizeof(a->instance)))
			return tree->all[i];
	return 0;
}

/* ---- run ------------------------------------------------------------------------ */

/* Executes @nr commands from @at on. 0: the task stands at the end of the code. */
static int run(struct task *t, const struct migr_ahead *a, uint64_t at, uint32_t nr, long until_ms)
{
	struct user_regs_struct regs = t->regs;

	regs.rip = a->code;
	regs.rbx = at;
	regs.r12 = nr;
	regs.r13 = RDMA_VERBS_IOCTL;
	regs.r14 = sizeof(struct migr_ahead_mr);
	return task_run(t, &regs, TASK_TO_TRAP, a->code + code_bytes(), until_ms);
}

/* ---- one process ------------------------------------------------------------------ */

static const struct migr_rst_pd *find_pd(const struct migr_rst_process *p, const struct migr_ahead_mr *mr)
{
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		const struct migr_rst_context *c = &p->contexts[i];

		if (migr_rst_fd_number(p, c->rec.ctx_id, MIGR_FD_CONTEXT) != mr->fd)
			continue;
		for (uint32_t k = 0; k < c->rec.nr_pd; k++)
			if (c->pds[k].rec.handle == mr->in.pd_handle)
				return &c->pds[k];
	}
	return NULL;
}

static int refuse(struct migr_rst_err *err, int errnum, pid_t pid, const struct migr_ahead_mr *mr)
{
	snprintf(err->text, sizeof(err->text), "cannot register MR %#x (%llu bytes) of process %d here: %s%s", mr->vlkey,
		 (unsigned long long)mr->in.length, pid, strerror(errnum),
		 errnum == ENOMEM ? " (memory, or what the process may lock: RLIMIT_MEMLOCK, CAP_IPC_LOCK)" :
		 migr_rst_hint(errnum));
	return errnum;
}

/*
 * Executes all of @mrs, which are at @a->mrs in the task. What fails with flags that are wishes only is done again
 * without, as libibverbs does.
 */
static int execute(struct task *t, const struct migr_ahead *a, struct migr_ahead_mr *mrs, long until_ms,
		   struct migr_rst_err *err)
{
	for (uint32_t i = 0; i < a->nr_mrs;) {
		uint64_t at = a->mrs + (uint64_t)i * sizeof(*mrs);
		size_t rest = (size_t)(a->nr_mrs - i) * sizeof(*mrs);
		int ret = task_put(t->pid, at, &mrs[i], rest) ? EFAULT : run(t, a, at, a->nr_mrs - i, until_ms);

		if (!ret && task_get(t->pid, at, &mrs[i], rest))
			ret = EFAULT;
		if (ret) {
			snprintf(err->text, sizeof(err->text), "the memory of process %d was not registered: %s", t->pid,
				 ret == ETIMEDOUT ? "it takes too long" :
				 ret == ESRCH	  ? "the process has ended" :
						    strerror(ret));
			return ret;
		}
		while (i < a->nr_mrs && !mrs[i].status)
			i++;
		if (i == a->nr_mrs)
			return 0;
		if (!(mrs[i].in.access_flags & IB_UVERBS_ACCESS_OPTIONAL_RANGE))
			return refuse(err, -mrs[i].status, t->pid, &mrs[i]);
		mrs[i].in.access_flags &= ~IB_UVERBS_ACCESS_OPTIONAL_RANGE;
		mrs[i].status = MIGR_AHEAD_OPEN;
	}
	return 0;
}

/* NULL, or why it is left to the process itself. */
static const char *prepare(const struct migr_rst_process *p, struct task *t, const struct migr_ahead *a,
			   struct migr_ahead_mr *mrs)
{
	unsigned char code[128];

	if (!mrs || task_get(t->pid, a->mrs, mrs, (size_t)a->nr_mrs * sizeof(*mrs)))
		return "its commands cannot be read";
	if (code_bytes() > sizeof(code) || task_get(t->pid, a->code, code, code_bytes()) ||
	    memcmp(code, migr_ahead_code, code_bytes()))
		return "its library has other code";
	for (uint32_t i = 0; i < a->nr_mrs; i++) {
		const struct migr_rst_pd *pd = find_pd(p, &mrs[i]);

		if (!pd || mrs[i].status != MIGR_AHEAD_OPEN)
			return "a command is for a PD that is not on record";
		mrs[i].in.pd_handle = pd->new_handle;
	}
	return task_take(t);
}

static int register_process(const struct migr_rst_process *p, const struct pids *tree, uint64_t addr, long until_ms,
			    struct migr_rst_err *err)
{
	struct migr_ahead a = { 0 };
	struct task t = { .pid = find_task(tree, p, addr, &a) };
	struct migr_ahead_mr *mrs;
	const char *why = NULL;
	int ret = 0;

	if (!t.pid)
		why = "its task was not found";
	else if (a.version != MIGR_AHEAD_VERSION || a.mr_bytes != sizeof(*mrs) || !a.code || a.nr_mrs > MIGR_AHEAD_MAX)
		why = "its library speaks another version";
	if (why || !a.nr_mrs) {
		if (why)
			say(2, "memory of pid %u is registered after the commit: %s", p->pid, why);
		return 0;
	}
	mrs = calloc(a.nr_mrs, sizeof(*mrs));
	why = prepare(p, &t, &a, mrs);
	if (why) {
		say(2, "memory of pid %u is registered after the commit: %s", p->pid, why);
	} else {
		long began = now_ms();

		ret = execute(&t, &a, mrs, until_ms, err);
		if (ret != ETIMEDOUT && ret != ESRCH && task_give_back(&t) && !ret) {
			ret = EIO;
			snprintf(err->text, sizeof(err->text), "the registers of process %d cannot be put back", t.pid);
		}
		if (!ret)
			say(3, "registered %u MRs of pid %u in %ld ms", a.nr_mrs, p->pid, now_ms() - began);
	}
	free(mrs);
	return ret;
}

static uint64_t ahead_of(const struct migr_rst_process *p)
{
	for (uint32_t i = 0; i < p->nr_fds; i++)
		if (p->fds[i].kind == MIGR_FD_AHEAD && p->fds[i].bytes >= sizeof(struct migr_ahead))
			return p->fds[i].addr;
	return 0;
}

int ahead_register(const struct migr_rst_image *img, pid_t root, long limit_ms, struct migr_rst_err *err)
{
	long until_ms = now_ms() + limit_ms;
	struct pids tree;
	sigset_t chld, before;
	int ret = 0;

	pids_of_tree(root, &tree);	/* who is not found registers its memory itself */
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, &before);
	for (uint32_t i = 0; !ret && i < img->nr_processes; i++) {
		const struct migr_rst_process *p = img->processes[i];

		if (ahead_of(p))
			ret = register_process(p, &tree, ahead_of(p), until_ms, err);
	}
	sigprocmask(SIG_SETMASK, &before, NULL);
	free(tree.all);
	return ret;
}

#else

int ahead_register(const struct migr_rst_image *img, pid_t root, long limit_ms, struct migr_rst_err *err)
{
	(void)img, (void)root, (void)limit_ms, (void)err;
	say(2, "memory is registered after the commit: only on x86-64 it is done before");
	return 0;
}

#endif
