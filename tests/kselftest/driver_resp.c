// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* The driver's answer: the same by ioctl and by netlink, and what the driver said. */
#include "migr_test.h"

#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static struct obj_list objs;

int main(void)
{
	struct migr_ioc_driver_resp arg;
	uint8_t resp[MIGR_DRIVER_RESP_MAX + 8];
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq;
	struct side s;
	struct obj *o;
	uint32_t id;
	int fd;

	fd = migr_open();
	side_open(&s);
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	need(!genl_objs(id, &objs), "dump");
	o = find_obj(&objs, MIGR_OBJ_QP, s.qp->handle);
	need(o && o->resp_len, "the QP has an answer");

	memset(resp, 0xee, sizeof(resp));
	arg = (struct migr_ioc_driver_resp){ MIGR_OBJ_QP, s.qp->handle, (uintptr_t)resp, sizeof(resp), 0 };
	check(!ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg), "ask for the QP's");
	check_eq(arg.len, o->resp_len, "its length");
	check(!memcmp(resp, o->resp, arg.len), "its content, as in the dump");
	check_eq(resp[arg.len], 0xee, "nothing behind it is written");
	/* rxe: two struct mminfo, { u64 offset; u32 size; u32 pad } */
	if (!strncmp(ibv_get_device_name(s.context->device), "rxe", 3)) {
		uint64_t rq, sq;
		uint32_t size;

		memcpy(&rq, resp, 8);
		memcpy(&size, resp + 8, 4);
		memcpy(&sq, resp + 16, 8);
		check(rq && sq && rq != sq && !(rq & 4095) && size, "rxe: two rings with offsets to map");
	}

	memset(resp, 0xee, sizeof(resp));
	arg.len = 4;
	check(!ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg), "with too little room");
	check_eq(arg.len, o->resp_len, "it tells the whole length");
	check(resp[4] == 0xee && !memcmp(resp, o->resp, 4), "and fills the room");

	arg = (struct migr_ioc_driver_resp){ MIGR_OBJ_CQ, s.cq->handle, (uintptr_t)resp, sizeof(resp), 0 };
	check(!ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg) && arg.len, "the CQ's");
	srq = ibv_create_srq(s.pd, &init);
	if (srq) {
		arg = (struct migr_ioc_driver_resp){ MIGR_OBJ_SRQ, srq->handle, (uintptr_t)resp, sizeof(resp), 0 };
		check(!ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg) && arg.len, "the SRQ's");
		ibv_destroy_srq(srq);
	}

	arg = (struct migr_ioc_driver_resp){ MIGR_OBJ_QP, s.cq->handle, (uintptr_t)resp, sizeof(resp), 0 };
	check_errno(ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg), ENOENT, "a handle of another type");
	arg.obj_type = MIGR_OBJ_PD;
	check_errno(ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg), EOPNOTSUPP, "a type that has none");
	arg = (struct migr_ioc_driver_resp){ MIGR_OBJ_QP, s.qp->handle, 8, sizeof(resp), 0 };
	check_errno(ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg), EFAULT, "a bad buffer");
	arg = (struct migr_ioc_driver_resp){ MIGR_OBJ_QP, s.qp->handle, (uintptr_t)resp, sizeof(resp), 1 };
	check_errno(ioctl(fd, MIGR_IOC_DRIVER_RESP, &arg), EINVAL, "a reserved field that is not 0");
	side_close(&s);
	close(fd);
	return finish();
}
