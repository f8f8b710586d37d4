// SPDX-License-Identifier: GPL-2.0
/*
 * Ports of librdmacm. The library takes them once the process runs here, which is too late to find that another has them: until
 * then a file of ours holds them, in the restored task, and in its network namespace.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <rdma/rdma_user_cm.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "plugin.h"

#define DEVICE "/dev/infiniband/rdma_cm"
#define RELIABLE 2	/* enum ib_qp_type: RC, which is not asked for */

/* @return 0 or a positive errno */
static int command(int fd, uint32_t cmd, const void *in, uint16_t bytes, uint16_t out)
{
	struct {
		struct rdma_ucm_cmd_hdr head;
		char body[sizeof(struct rdma_ucm_bind)];
	} packet = { .head = { .cmd = cmd, .in = bytes, .out = out } };

	memcpy(packet.body, in, bytes);
	return write(fd, &packet, sizeof(packet.head) + bytes) < 0 ? errno : 0;
}

static void set_options(int fd, uint32_t id, uint64_t options)
{
	int on = 1;

	for (uint32_t n = 0; n < 64; n++) {
		struct rdma_ucm_set_option set = { .optval = (uintptr_t)&on, .id = id, .level = RDMA_OPTION_ID, .optname = n,
						   .optlen = sizeof(on) };

		if (options & 1ull << n)
			(void)command(fd, RDMA_USER_CM_CMD_SET_OPTION, &set, sizeof(set), 0);
	}
}

static int hold(int fd, const struct migr_fd_desc *d)
{
	struct rdma_ucm_create_id_resp made = { 0 };
	struct rdma_ucm_create_id create = { .response = (uintptr_t)&made, .ps = (uint16_t)d->obj_type, .qp_type = RELIABLE };
	struct rdma_ucm_bind bind = { 0 };
	int ret = command(fd, RDMA_USER_CM_CMD_CREATE_ID, &create, sizeof(create), sizeof(made));

	if (ret)
		return ret;
	set_options(fd, made.id, d->pgoff);
	bind.id = made.id;
	bind.addr.ss_family = (unsigned short)d->ring;
	if (d->ring == AF_INET6) {
		struct sockaddr_in6 *in = (struct sockaddr_in6 *)&bind.addr;

		in->sin6_port = htons((uint16_t)d->obj_handle);
		memcpy(in->sin6_addr.s6_addr, &d->addr, 8);
		memcpy(in->sin6_addr.s6_addr + 8, &d->bytes, 8);
		bind.addr_size = sizeof(*in);
	} else {
		struct sockaddr_in *in = (struct sockaddr_in *)&bind.addr;

		in->sin_port = htons((uint16_t)d->obj_handle);
		memcpy(&in->sin_addr, &d->addr, 4);
		bind.addr_size = sizeof(*in);
	}
	ret = command(fd, RDMA_USER_CM_CMD_BIND, &bind, sizeof(bind), 0);
	return ret == EADDRNOTAVAIL ? EADDRINUSE : ret;	/* what the kernel says where one of the two has any address */
}

/* @return a file, or a negative errno with *err said */
static int open_device(const struct migr_rst_process *p, struct migr_rst_err *err)
{
	int fd = open(DEVICE, O_RDWR | O_NONBLOCK | O_CLOEXEC), e = errno;

	if (fd >= 0)
		return fd;
	snprintf(err->text, sizeof(err->text), "pid %u uses librdmacm, and " DEVICE " cannot be opened here: %s%s", p->pid, strerror(e),
		 e == ENOENT ? "; load rdma_ucm" : "");
	return -e;
}

int ports_look(const struct migr_rst_process *p, struct migr_rst_err *err)
{
	for (uint32_t i = 0; i < p->nr_fds; i++) {
		int fd;

		if (p->fds[i].kind != MIGR_FD_CM)
			continue;
		fd = open_device(p, err);
		return fd < 0 ? fd : close(fd);
	}
	return 0;
}

int ports_hold(const struct migr_rst_process *p)
{
	struct migr_rst_err err;
	int fd = open_device(p, &err);

	if (fd < 0) {
		say(1, "%s", err.text);
		return -1;
	}
	for (uint32_t i = 0; i < p->nr_fds; i++) {
		const struct migr_fd_desc *d = &p->fds[i];
		int ret = d->kind == MIGR_FD_CM_PORT ? hold(fd, d) : 0;

		if (!ret)
			continue;
		say(1, "pid %u has port %u of librdmacm (port space %#x), which it cannot have here: %s", p->pid, d->obj_handle, d->obj_type,
		    strerror(ret));
		close(fd);
		return -1;
	}
	return fd;
}
