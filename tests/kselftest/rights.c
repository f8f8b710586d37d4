// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Who may ask what: the record is for administrators, a container's root sees its own. */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/netlink.h>

static struct ctx_list ctxs;
static struct obj_list objs;
static struct side s;
static uint32_t id;

static int exit_status(pid_t child)
{
	int status;

	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

/* Runs @f as another kind of user; its result is a bit set of what went wrong. */
static int as(int (*become)(void), int (*f)(void))
{
	pid_t child;

	fflush(stdout);
	child = fork();
	if (!child)
		_exit(become() ? 128 : f());
	return exit_status(child);
}

static int nobody(void)
{
	return setgid(65534) || setuid(65534);
}

/* root of a user and network namespace of its own */
static int container(void)
{
	return unshare(CLONE_NEWUSER | CLONE_NEWNET);
}

/* root of the host, in a network namespace of its own */
static int pod(void)
{
	return unshare(CLONE_NEWNET);
}

static int asks_for_all(void)
{
	struct migr_info info;
	struct migr_ioc_attach a = { MIGR_ABI_VERSION, s.context->cmd_fd, 0, 0 };
	int fd = open("/dev/migr", O_RDWR), wrong = 0;

	wrong |= genl_info(&info) != 0;
	wrong |= (genl_ctxs(0, &ctxs) != -EPERM) << 1;
	wrong |= (genl_objs(id, &objs) != -EPERM) << 2;
	wrong |= (genl_bind_qp(id, 5, s.qp->qp_num) != -EPERM) << 3;
	wrong |= (genl_reserve(0x222222) != -EPERM) << 4;
	wrong |= (events_open() != -EPERM) << 5;
	wrong |= (fd < 0 || ioctl(fd, MIGR_IOC_ATTACH, &a)) << 6;	/* the fd is proof enough */
	return wrong;
}

static int in_container(void)
{
	int err = genl_ctxs(0, &ctxs), wrong = 0;

	wrong |= err != 0 || ctxs.n != 0;
	wrong |= (genl_objs(id, &objs) != -EPERM) << 1;
	wrong |= (genl_bind_qp(id, 5, s.qp->qp_num) != -EPERM) << 2;
	wrong |= (genl_reserve(0x222222) != -EPERM) << 3;
	wrong |= (genl_release(0x222223) != -EPERM) << 4;
	return wrong;
}

/* A process of the host's root in the network namespace of a container is none of the container. */
static int visited(void)
{
	int own = open("/proc/self/ns/net", O_RDONLY), there, up[2], down[2], fd, status;
	char path[64], c;
	pid_t child;

	need(!pipe(up) && !pipe(down), "pipe");
	fflush(stdout);
	child = fork();
	if (!child) {
		int wrong;

		if (container() || write(up[1], "x", 1) != 1 || read(down[0], &c, 1) != 1)
			_exit(128);
		wrong = in_container();
		fd = open("/dev/migr", O_RDWR);
		wrong |= (migr_attach(fd, s.context->cmd_fd, NULL) || genl_objs(id, &objs)) << 5;	/* now it is its own */
		_exit(wrong);
	}
	close(up[1]);
	need(read(up[0], &c, 1) == 1, "a container");
	snprintf(path, sizeof(path), "/proc/%d/ns/net", child);
	there = open(path, O_RDONLY);
	need(own >= 0 && there >= 0 && !setns(there, CLONE_NEWNET), "its network namespace");
	fd = migr_open();
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	need(!setns(own, CLONE_NEWNET), "back");
	need(write(down[1], "x", 1) == 1, "it may ask");
	status = exit_status(child);
	close(fd);
	close(there);
	close(own);
	return status;
}

int main(void)
{
	int fd = migr_open();

	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	check_eq(as(nobody, asks_for_all), 0, "an ordinary user: info and its own descriptors, nothing else");
	need(!migr_attach(migr_open(), s.context->cmd_fd, &id), "attach");
	check_eq(as(container, in_container), 0, "root of a container sees nothing of the host");
	check_eq(as(pod, in_container), 0, "nor does CAP_NET_ADMIN in a container's network namespace");
	check_eq(visited(), 0, "nor root of a container what the host's root has in its network namespace");
	side_close(&s);
	close(fd);
	return finish();
}
