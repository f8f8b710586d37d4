// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* What a device of this host has to give. */
#include <errno.h>
#include <fcntl.h>
#include <netlink/attr.h>
#include <netlink/msg.h>
#include <netlink/netlink.h>
#include <netlink/socket.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_netlink.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "internal.h"

#define ANSWER_LIMIT_S 10

static int query_limits(struct migr_rst_context *c, struct migr_rst_device *d)
{
	struct ib_uverbs_query_device in = { 0 };
	struct ib_uverbs_query_device_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_QUERY_DEVICE, &in, sizeof(in), &out, sizeof(out), NULL };
	int ret = rst_uverbs(c, &cmd);

	if (ret)
		return ret;
	d->max_mr_size = out.max_mr_size;
	d->max_qp = out.max_qp;
	d->max_cq = out.max_cq;
	d->max_mr = out.max_mr;
	d->max_pd = out.max_pd;
	d->max_srq = out.max_srq;
	d->max_mw = out.max_mw;
	d->max_ah = out.max_ah;
	d->max_qp_wr = out.max_qp_wr;
	d->max_sge = out.max_sge;
	d->max_cqe = out.max_cqe;
	d->max_srq_wr = out.max_srq_wr;
	d->max_srq_sge = out.max_srq_sge;
	d->max_qp_rd_atom = out.max_qp_rd_atom;
	d->max_qp_init_rd_atom = out.max_qp_init_rd_atom;
	d->nr_ports = out.phys_port_cnt < MIGR_RST_PORTS ? out.phys_port_cnt : MIGR_RST_PORTS;
	return 0;
}

static int query_port(struct migr_rst_context *c, uint32_t port, struct migr_rst_port *p)
{
	struct ib_uverbs_query_port in = { .port_num = port };
	struct ib_uverbs_query_port_resp out = { 0 };
	struct rst_cmd cmd = { IB_USER_VERBS_CMD_QUERY_PORT, &in, sizeof(in), &out, sizeof(out), NULL };
	int ret = rst_uverbs(c, &cmd);

	p->state = out.state;
	p->active_mtu = out.active_mtu;
	return ret;
}

/* ---- how much of it is taken ----------------------------------------------- */

static void take_entry(struct nlattr *entry, struct migr_rst_device *d)
{
	static const struct {
		const char *name;
		size_t offset;
	} kinds[] = {
		{ "qp", offsetof(struct migr_rst_device, used_qp) }, { "cq", offsetof(struct migr_rst_device, used_cq) },
		{ "mr", offsetof(struct migr_rst_device, used_mr) }, { "pd", offsetof(struct migr_rst_device, used_pd) },
		{ "srq", offsetof(struct migr_rst_device, used_srq) },
	};
	struct nlattr *a[RDMA_NLDEV_ATTR_MAX];

	if (nla_parse_nested(a, RDMA_NLDEV_ATTR_MAX - 1, entry, NULL) || !a[RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME] ||
	    !a[RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR] || nla_len(a[RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR]) < 8)
		return;
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (!nla_strcmp(a[RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME], kinds[i].name))
			*(uint32_t *)((char *)d + kinds[i].offset) = nla_get_u64(a[RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR]);
}

static int on_device(struct nl_msg *msg, void *arg)
{
	struct migr_rst_device *d = arg;
	struct nlattr *a[RDMA_NLDEV_ATTR_MAX], *entry;
	int left;

	if (nlmsg_parse(nlmsg_hdr(msg), 0, a, RDMA_NLDEV_ATTR_MAX - 1, NULL) || !a[RDMA_NLDEV_ATTR_DEV_NAME] ||
	    !a[RDMA_NLDEV_ATTR_RES_SUMMARY] || nla_strcmp(a[RDMA_NLDEV_ATTR_DEV_NAME], d->ibdev))
		return NL_OK;
	nla_for_each_nested(entry, a[RDMA_NLDEV_ATTR_RES_SUMMARY], left)
		take_entry(entry, d);
	return NL_OK;
}

/* The kernel's resource tracking, of all processes and of the kernel itself. A kernel that does not tell: nothing is taken. */
static void count_used(struct migr_rst_device *d)
{
	struct nl_sock *sk = nl_socket_alloc();
	struct timeval limit = { .tv_sec = ANSWER_LIMIT_S };

	if (!sk)
		return;
	if (!nl_connect(sk, NETLINK_RDMA)) {
		setsockopt(nl_socket_get_fd(sk), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
		nl_socket_modify_cb(sk, NL_CB_VALID, NL_CB_CUSTOM, on_device, d);
		if (nl_send_simple(sk, RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_RES_GET), NLM_F_DUMP, NULL, 0) >= 0)
			nl_recvmsgs_default(sk);
	}
	nl_socket_free(sk);
}

/* A context on what migr_rst_device_find() has found; to be released in any case. */
static int open_context(struct migr_rst_context *c, const char *ibdev, const char *path, struct migr_rst_err *err)
{
	strcpy(c->new_ibdev, ibdev);
	c->cmd_fd = open(path, O_RDWR | O_CLOEXEC);
	if (c->cmd_fd < 0)
		return rst_fail(err, errno, "cannot open %s: %s", path, strerror(errno));
	return migr_rst_context_create(c, err);
}

int migr_rst_device_gids(const char *want, struct ib_uverbs_gid_entry *gids, uint32_t max, struct migr_rst_err *err)
{
	struct migr_rst_context c = { .cmd_fd = -1, .async_fd = -1 };
	char ibdev[MIGR_IBDEV_NAME_MAX], path[64];
	int ret = migr_rst_device_find(want, ibdev, path, err);

	if (ret)
		return ret;
	ret = open_context(&c, ibdev, path, err);
	if (!ret) {
		ret = rst_uverbs_gids(&c, gids, max);
		if (ret < 0)
			rst_fail(err, -ret, "cannot read the GIDs of %s: %s", ibdev, strerror(-ret));
	}
	migr_rst_context_release(&c);
	return ret;
}

int migr_rst_device_query(const char *want, struct migr_rst_device *d, struct migr_rst_err *err)
{
	struct migr_rst_context c = { .cmd_fd = -1, .async_fd = -1 };
	char path[64];
	int ret;

	memset(d, 0, sizeof(*d));
	ret = migr_rst_device_find(want, d->ibdev, path, err);
	if (ret)
		return ret;
	count_used(d);	/* before there is a context of our own */
	ret = open_context(&c, d->ibdev, path, err);
	if (!ret) {
		d->driver_id = c.driver_id;
		ret = query_limits(&c, d);
		for (uint32_t i = 0; !ret && i < d->nr_ports; i++)
			ret = query_port(&c, i + 1, &d->ports[i]);
		if (ret)
			rst_fail(err, -ret, "cannot ask %s what it can: %s", d->ibdev, strerror(-ret));
	}
	migr_rst_context_release(&c);
	return ret;
}
