// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Devices come and go: those that come are recorded, those that go leave nothing. */
#include "migr_test.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NETDEV "migrtest0"
#define IBDEV "migrtest"
#define RENAMED "migrtest2"
#define MEMORY 4096
#define NR_PD 200	/* more than the module takes away at once */

static struct ctx_list ctxs;
static struct obj_list objs;

/* The device of that name, or (@named is false) another one. */
static struct ibv_context *open_by_name(const char *name, bool named)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;
	int i;

	for (i = 0; list[i] && !context; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name) == named)
			context = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	return context;
}

static void *register_memory(void *buf)
{
	struct ibv_context *context = open_by_name(IBDEV, false);

	need(context, "another device");
	ibv_reg_mr(ibv_alloc_pd(context), buf, MEMORY, IBV_ACCESS_LOCAL_WRITE);
	return NULL;
}

/* A call into one device's driver that waits for memory, as of a file server that does not answer, keeps no other device. */
static void goes_though_another_hangs(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register watch = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_zeropage give;
	struct pollfd faults = { .events = POLLIN };
	struct uffd_msg msg;
	pthread_t thread;
	void *buf;
	int fd;

	fd = syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api)) {
		printf("# no userfaultfd\n");
		return;
	}
	faults.fd = fd;
	buf = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	watch.range.start = give.range.start = (uintptr_t)buf;
	watch.range.len = give.range.len = MEMORY;
	need(buf != MAP_FAILED && !ioctl(fd, UFFDIO_REGISTER, &watch), "memory that is not there");
	need(!system("rdma link add " IBDEV " type rxe netdev " NETDEV), "add a device");
	need(!pthread_create(&thread, NULL, register_memory, buf), "thread");
	if (poll(&faults, 1, 10000) == 1 && read(fd, &msg, sizeof(msg)) == sizeof(msg)) {
		check(!system("timeout 30 rdma link del " IBDEV), "another device goes meanwhile");
		give.mode = 0;
		need(!ioctl(fd, UFFDIO_ZEROPAGE, &give), "memory");
	} else {
		printf("# pinning does not wait for userfaultfd (6.1)\n");
		need(!system("rdma link del " IBDEV), "remove a device");
	}
	pthread_join(thread, NULL);
	close(fd);
}

/* Half a second of dumps. A context on its way out is none that is there, and so no error to who reads all of them. */
static void dump_meanwhile(uint32_t id)
{
	int err = 0, i, going = 0;

	for (i = 0; i < 500 && (!err || err == -ENOENT); i++) {
		err = genl_objs(id, &objs);
		if (err == -ENOENT && !genl_ctxs(getpid(), &ctxs))
			going += ctxs.n;
		usleep(1000);
	}
	check(!err || err == -ENOENT, "a dump meanwhile is whole, or of no such context");
	printf("# %d dumps, %d of them while the context was on its way out\n", i, going);
}

int main(void)
{
	struct migr_info before, info;
	struct ibv_context *context = NULL;
	uint32_t id;
	int status, i;
	pid_t child;

	close(migr_open());
	if (system("ip link add " NETDEV " type dummy && ip link set " NETDEV " up"))
		skip("no dummy network devices");
	need(!genl_info(&before), "info");
	need(!system("rdma link add " IBDEV " type rxe netdev " NETDEV), "add a device");
	genl_info(&info);
	check_eq(info.nr_dev, before.nr_dev + 1, "a device that comes is ours");
	for (i = 0; i < 50 && !context; i++) {	/* udev makes the node */
		context = open_by_name(IBDEV, true);
		usleep(100000);
	}
	need(context, "open the device");
	for (i = 0; i < NR_PD; i++)
		need(ibv_alloc_pd(context), "alloc_pd");
	need(!genl_ctxs(getpid(), &ctxs), "dump");
	check(ctxs.n == 1 && !strcmp(ctxs.rec[0].ibdev, IBDEV) && ctxs.rec[0].nr_pd == NR_PD && !ctxs.rec[0].flags,
	      "what is made on it is recorded");
	id = ctxs.rec[0].ctx_id;
	need(!system("rdma dev set " IBDEV " name " RENAMED), "another name");
	need(!genl_ctxs(getpid(), &ctxs), "dump");
	check(ctxs.n == 1 && !strcmp(ctxs.rec[0].ibdev, RENAMED), "by its new name, once it has one");

	fflush(stdout);
	child = fork();
	if (!child) {
		/* inherits the files: closes them, so that the parent's close counts */
		close(context->cmd_fd);
		close(context->async_fd);
		_exit(system("timeout 60 rdma link del " RENAMED) ? 1 : 0);
	}
	dump_meanwhile(id);	/* until it waits for us, or has taken the device from us */
	ibv_close_device(context);
	need(waitpid(child, &status, 0) == child, "wait");
	check(WIFEXITED(status) && !WEXITSTATUS(status), "the device goes");
	need(!genl_info(&info), "info");
	check_eq(info.nr_dev, before.nr_dev, "and is ours no more");
	check_eq(info.nr_obj, before.nr_obj, "nor are its objects");
	need(!genl_ctxs(getpid(), &ctxs), "dump");
	check_eq(ctxs.n, 0, "nor is its context");
	goes_though_another_hangs();
	if (system("ip link del " NETDEV))
		printf("# cannot remove " NETDEV "\n");
	return finish();
}
