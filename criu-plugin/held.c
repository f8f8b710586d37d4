// SPDX-License-Identifier: GPL-2.0
/*
 * The tasks while they wait for COMMIT, each thread of them in a ptrace-stop of CRIU's. One that has ended meanwhile is
 * what CRIU would fail at only after the commit, and end all others for. And a tracer that dies lets its tracees run.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>

#include "plugin.h"
#include "task.h"

/* A zombie of the image: CRIU traces none. One that has ended since is traced until CRIU waits for it. */
static int was_restored_dead(pid_t tid)
{
	return !task_status(tid, "TracerPid:", 10);
}

/* With the one option that CRIU may have set: all are set at once. It fails on what is not in a stop. */
static int bind_thread(pid_t tid, void *bound)
{
	unsigned long options = *(int *)bound ? PTRACE_O_EXITKILL : 0;
	int e;

	if (task_status(tid, "Seccomp:", 10) > 0)
		options |= PTRACE_O_SUSPEND_SECCOMP;
	if (!ptrace(PTRACE_SETOPTIONS, tid, NULL, options))
		return 0;
	e = errno;
	return was_restored_dead(tid) ? 0 : e;
}

int held_bind(pid_t root, int bound, struct migr_rst_err *err)
{
	struct pids tree;
	int ret = pids_of_tree(root, &tree);

	if (ret)
		snprintf(err->text, sizeof(err->text), "no memory");
	for (uint32_t i = 0; !ret && i < tree.nr; i++) {
		ret = abs(each_thread(tree.all[i], bind_thread, &bound));
		if (ret)
			snprintf(err->text, sizeof(err->text), "restored process %d waits no more: %s", tree.all[i],
				 ret == ESRCH || ret == ENOENT ? "it has ended" : strerror(ret));
	}
	free(tree.all);
	return ret;
}
