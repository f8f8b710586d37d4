// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * The module waits for who is in one of its functions, also where that one is about to enter the section that tells of it, or has
 * left it. Nobody is there for longer than some instructions, so a build of the module (MIGR_TEST_LINGER) makes a process slow there:
 *   before_ms busy, the section, after_ms asleep in it, after_ms busy
 * Asleep, it is none that synchronize_rcu_tasks() waits for. The kernel itself, when it frees a module, waits for who is busy in it unless that
 * one can be preempted: so it has to be, where the kernel can be told to (CONFIG_PREEMPT_DYNAMIC).
 */
#include "migr_test.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS 2000

static FILE *parameter(const char *name, const char *how)
{
	char path[64];
	FILE *f;

	snprintf(path, sizeof(path), "/sys/module/migr/parameters/%s", name);
	f = fopen(path, how);
	need(f, "%s: is it a build with MIGR_TEST_LINGER?", path);
	return f;
}

static void set(const char *name, unsigned int value)
{
	FILE *f = parameter(name, "w");

	fprintf(f, "%u", value);
	need(!fclose(f), "%s", name);
}

static unsigned int get(const char *name)
{
	FILE *f = parameter(name, "r");
	unsigned int value = 0;

	need(fscanf(f, "%u", &value) == 1, "%s", name);
	fclose(f);
	return value;
}

/* Is there a kernel that does so? */
static int preempts(const char *how)
{
	FILE *f;

	(void)mount("debugfs", "/sys/kernel/debug", "debugfs", 0, NULL);	/* it may be there */
	f = fopen("/sys/kernel/debug/sched/preempt", "w");
	return f && (fputs(how, f), !fclose(f));
}

/* Tells when its call has come back, in now_ms(). */
static void caller(int from, int to)
{
	struct ibv_context *context = open_context();
	uint64_t back;
	char c;

	if (write(to, "x", 1) != 1 || read(from, &c, 1) != 1 || !ibv_alloc_pd(context))
		_exit(1);
	back = now_ms();
	_exit(write(to, &back, sizeof(back)) != sizeof(back));
}

static void waits_for(unsigned int before_ms, unsigned int after_ms, const char *what)
{
	int up[2], down[2], i;
	uint64_t end, back;
	pid_t child;
	char c;

	need(!module_load(), "insmod");
	need(!pipe(up) && !pipe(down), "pipe");
	fflush(stdout);
	child = fork();
	if (!child)
		caller(down[0], up[1]);
	close(up[1]);
	close(down[0]);
	need(read(up[0], &c, 1) == 1, "a process with a context");
	set("before_ms", before_ms);
	set("after_ms", after_ms);
	set("tgid", child);
	need(write(down[1], "x", 1) == 1, "it calls");
	for (i = 0; i < 1000 && !get("came"); i++)
		usleep(10000);
	need(i < 1000, "it is in the module");
	need(!module_remove(), "rmmod");
	end = now_ms();
	need(read(up[0], &back, sizeof(back)) == sizeof(back), "it is back");
	if (!check(end >= back, "%s", what))
		printf("# the module was gone %llu ms before\n", (unsigned long long)(back - end));
	waitpid(child, NULL, 0);
	close(up[0]);
	close(down[1]);
}

int main(void)
{
	const char *usual = getenv("MIGR_KO"), *lingers = getenv("MIGR_LINGER_KO");
	cpu_set_t all;

	if (!usual || !lingers)
		skip("MIGR_LINGER_KO does not say where a migr.ko is that lingers");
	memset(&all, 0xff, sizeof(all));
	need(!sched_setaffinity(0, sizeof(all), &all), "all processors");
	if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
		skip("who is busy in the kernel has the only processor");
	genl_forget();
	need(!module_remove(), "rmmod");
	setenv("MIGR_KO", lingers, 1);
	if (!preempts("full"))
		printf("# this kernel is not told to preempt: of a call that has left its section the kernel takes care by itself\n");
	waits_for(0, MS, "the module goes once a call that has left its section is back");
	waits_for(MS, MS, "the module goes once a call that has not entered it yet is back");
	preempts("voluntary");
	setenv("MIGR_KO", usual, 1);
	need(!module_load(), "insmod");
	return finish();
}
