// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <netlink/genl/ctrl.h>
#include <netlink/genl/genl.h>
#include <netlink/netlink.h>

static int nr_checks, nr_failed;

static void tap(bool good, const char *what, va_list ap)
{
	printf("%sok %d ", good ? "" : "not ", ++nr_checks);
	vprintf(what, ap);
	printf("\n");
	fflush(stdout);
	nr_failed += !good;
}

bool check(bool good, const char *what, ...)
{
	va_list ap;

	va_start(ap, what);
	tap(good, what, ap);
	va_end(ap);
	return good;
}

bool check_eq(uint64_t got, uint64_t want, const char *what)
{
	if (check(got == want, "%s", what))
		return true;
	printf("# got 0x%llx, want 0x%llx\n", (unsigned long long)got, (unsigned long long)want);
	return false;
}

bool check_errno(int ret, int want, const char *what)
{
	int got = errno;

	if (check(ret < 0 && got == want, "%s: %s", what, strerrorname_np(want)))
		return true;
	printf("# it %s: %s\n", ret < 0 ? "failed otherwise" : "succeeded", strerror(got));
	return false;
}

void need(bool good, const char *what, ...)
{
	va_list ap;

	if (good)
		return;
	printf("# errno: %s\n", strerror(errno));
	va_start(ap, what);
	tap(false, what, ap);
	va_end(ap);
	exit(finish());
}

void skip(const char *why, ...)
{
	va_list ap;

	printf("1..0 # SKIP ");
	va_start(ap, why);
	vprintf(why, ap);
	va_end(ap);
	printf("\n");
	exit(TEST_SKIP);
}

int finish(void)
{
	printf("1..%d\n", nr_checks);
	fflush(stdout);
	return nr_failed || !nr_checks ? TEST_FAIL : TEST_PASS;
}

uint64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

/* ---- RDMA ---------------------------------------------------------------- */

struct ibv_context *open_context(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	if (!list || !list[0])
		skip("no RDMA device");
	context = ibv_open_device(list[0]);
	need(context, "open %s", ibv_get_device_name(list[0]));
	ibv_free_device_list(list);
	return context;
}

/* The IPv4-mapped RoCEv2 GID of port 1. */
static void find_gid(struct side *s)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	struct ibv_gid_entry entry;
	int i;

	for (i = 0; i < 32; i++) {
		if (ibv_query_gid_ex(s->context, 1, i, &entry, 0))
			continue;
		if (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && !memcmp(entry.gid.raw, mapped, 12)) {
			s->gid = entry.gid;
			s->gid_index = i;
			return;
		}
	}
	skip("port 1 has no IPv4 RoCEv2 GID");
}

struct ibv_qp *make_qp(struct side *s)
{
	struct ibv_qp_init_attr init = {
		.send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 1,
			 .max_inline_data = 32 },
	};

	return ibv_create_qp(s->pd, &init);
}

void side_open(struct side *s)
{
	memset(s, 0, sizeof(*s));
	s->context = open_context();
	find_gid(s);
	s->pd = ibv_alloc_pd(s->context);
	need(s->pd, "alloc_pd");
	s->channel = ibv_create_comp_channel(s->context);
	need(s->channel, "create_comp_channel");
	s->cq = ibv_create_cq(s->context, 64, s, s->channel, 0);
	need(s->cq, "create_cq");
	s->buf = aligned_alloc(4096, SIDE_BUF);
	s->mr = ibv_reg_mr(s->pd, s->buf, SIDE_BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	need(s->mr, "reg_mr");
	s->qp = make_qp(s);
	need(s->qp, "create_qp");
}

void connect_qp(struct side *s, struct ibv_qp *qp, struct side *peer, uint32_t peer_qpn)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	need(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    IBV_QP_ACCESS_FLAGS), "modify_qp to INIT");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer_qpn,
		.rq_psn = 0x111, .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = peer->gid, .sgid_index = s->gid_index, .hop_limit = 7 } },
	};
	need(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
	     "modify_qp to RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6,
				     .rnr_retry = 5, .sq_psn = 0x111, .max_rd_atomic = 3 };
	need(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
	     "modify_qp to RTS");
}

void side_close(struct side *s)
{
	if (s->qp)
		need(!ibv_destroy_qp(s->qp), "destroy_qp");
	if (s->mr)
		need(!ibv_dereg_mr(s->mr), "dereg_mr");
	if (s->cq)
		need(!ibv_destroy_cq(s->cq), "destroy_cq");
	if (s->channel)
		need(!ibv_destroy_comp_channel(s->channel), "destroy_comp_channel");
	if (s->pd)
		need(!ibv_dealloc_pd(s->pd), "dealloc_pd");
	need(!ibv_close_device(s->context), "close_device");
	free(s->buf);
	memset(s, 0, sizeof(*s));
}

/* ---- /dev/migr ------------------------------------------------------------ */

int migr_open(void)
{
	int fd = open("/dev/" MIGR_DEV_NAME, O_RDWR | O_CLOEXEC);

	if (fd < 0 && errno == ENOENT)
		skip("no /dev/" MIGR_DEV_NAME ": migr.ko is not loaded");
	need(fd >= 0, "open /dev/" MIGR_DEV_NAME);
	return fd;
}

int migr_attach(int fd, int uverbs_fd, uint32_t *ctx_id)
{
	struct migr_ioc_attach arg = { .abi_version = MIGR_ABI_VERSION, .uverbs_fd = uverbs_fd };
	int ret = ioctl(fd, MIGR_IOC_ATTACH, &arg);

	if (ctx_id)
		*ctx_id = arg.ctx_id;
	return ret;
}

const uint32_t *map_qpn_table(int fd)
{
	void *p = mmap(NULL, MIGR_QPN_TABLE_BYTES, PROT_READ, MAP_SHARED, fd, MIGR_QPN_TABLE_OFFSET);

	need(p != MAP_FAILED, "mmap of the QPN table");
	return p;
}

const struct migr_key_entry *map_key_table(int fd)
{
	void *p = mmap(NULL, MIGR_KEY_TABLE_BYTES, PROT_READ, MAP_SHARED, fd, MIGR_KEY_TABLE_OFFSET);

	need(p != MAP_FAILED, "mmap of the key table");
	return p;
}

int module_load(void)
{
	const char *path = getenv("MIGR_KO");
	int fd, ret, err;

	if (!path)
		skip("MIGR_KO does not say where migr.ko is");
	fd = open(path, O_RDONLY | O_CLOEXEC);
	need(fd >= 0, "open %s", path);
	ret = syscall(SYS_finit_module, fd, "", 0);
	err = errno;
	close(fd);
	errno = err;
	return ret;
}

int module_remove(void)
{
	return syscall(SYS_delete_module, MIGR_GENL_NAME, O_NONBLOCK);
}

/* ---- netlink --------------------------------------------------------------- */

static struct nl_sock *sock, *event_sock;
static int family;

void genl_forget(void)
{
	nl_socket_free(sock);
	nl_socket_free(event_sock);
	sock = event_sock = NULL;
}

struct reply {
	int (*take)(struct nlattr **attrs, void *arg);
	void *arg;
	int err;
	bool done;
};

static int on_valid(struct nl_msg *msg, void *arg)
{
	struct nlattr *attrs[MIGR_A_MAX + 1];
	struct reply *r = arg;

	if (genlmsg_parse(nlmsg_hdr(msg), 0, attrs, MIGR_A_MAX, NULL))
		return NL_SKIP;
	if (r->take && r->take(attrs, r->arg))
		return NL_STOP;
	return NL_OK;
}

static int on_error(struct sockaddr_nl *nla, struct nlmsgerr *e, void *arg)
{
	struct reply *r = arg;

	(void)nla;
	r->err = e->error;
	r->done = true;
	return NL_STOP;
}

static int on_done(struct nl_msg *msg, void *arg)
{
	struct reply *r = arg;
	struct nlmsghdr *hdr = nlmsg_hdr(msg);

	if (hdr->nlmsg_type == NLMSG_DONE && hdr->nlmsg_len >= NLMSG_HDRLEN + sizeof(int))
		r->err = *(int *)NLMSG_DATA(hdr);
	r->done = true;
	return NL_STOP;
}

static int genl_open(void)
{
	if (sock)
		return 0;
	sock = nl_socket_alloc();
	if (!sock || genl_connect(sock))
		return -ECONNREFUSED;
	nl_socket_set_buffer_size(sock, 1 << 20, 0);
	family = genl_ctrl_resolve(sock, MIGR_GENL_NAME);
	if (family >= 0)
		return 0;
	genl_forget();
	return -ENOENT;
}

int genl_family(void)
{
	int err = genl_open();

	return err ? err : family;
}

/* Sends @msg (and frees it), takes what comes until the end of the answer. */
static int genl_talk(struct nl_msg *msg, int (*take)(struct nlattr **, void *), void *arg)
{
	struct reply r = { .take = take, .arg = arg };
	struct nl_cb *cb = nl_cb_alloc(NL_CB_CUSTOM);
	int err;

	nl_cb_set(cb, NL_CB_VALID, NL_CB_CUSTOM, on_valid, &r);
	nl_cb_set(cb, NL_CB_FINISH, NL_CB_CUSTOM, on_done, &r);
	nl_cb_set(cb, NL_CB_ACK, NL_CB_CUSTOM, on_done, &r);
	nl_cb_err(cb, NL_CB_CUSTOM, on_error, &r);
	err = nl_send_auto(sock, msg);
	nlmsg_free(msg);
	while (err >= 0 && !r.done)
		err = nl_recvmsgs(sock, cb);
	nl_cb_put(cb);
	return r.err ? r.err : err < 0 && !r.done ? -EIO : 0;
}

static struct nl_msg *genl_msg(int cmd, int flags)
{
	struct nl_msg *msg = nlmsg_alloc();

	genlmsg_put(msg, NL_AUTO_PORT, NL_AUTO_SEQ, family, 0, flags, cmd, MIGR_GENL_VERSION);
	return msg;
}

int genl_raw(int cmd, int flags, int attr, uint32_t value)
{
	struct nl_msg *msg;
	int err = genl_open();

	if (err)
		return err;
	msg = genl_msg(cmd, flags | NLM_F_ACK);
	if (attr)
		nla_put_u32(msg, attr, value);
	return genl_talk(msg, NULL, NULL);
}

static uint32_t attr_u32(struct nlattr **attrs, int type)
{
	return attrs[type] ? nla_get_u32(attrs[type]) : 0;
}

static int take_info(struct nlattr **attrs, void *arg)
{
	*(struct migr_info *)arg = (struct migr_info){
		attr_u32(attrs, MIGR_A_ABI_VERSION), attr_u32(attrs, MIGR_A_NR_CTX),
		attr_u32(attrs, MIGR_A_NR_OBJ), attr_u32(attrs, MIGR_A_NR_RESERVED),
		attr_u32(attrs, MIGR_A_NR_DEV), attr_u32(attrs, MIGR_A_MOVES_MARKED),
	};
	return 0;
}

int genl_info(struct migr_info *info)
{
	int err = genl_open();

	memset(info, 0, sizeof(*info));
	return err ? err : genl_talk(genl_msg(MIGR_CMD_INFO_GET, NLM_F_ACK), take_info, info);
}

static int take_ctx(struct nlattr **attrs, void *arg)
{
	struct ctx_list *list = arg;

	if (attrs[MIGR_A_CTX_REC] && list->n < 256)
		nla_memcpy(&list->rec[list->n++], attrs[MIGR_A_CTX_REC], sizeof(list->rec[0]));
	return 0;
}

int genl_ctxs(uint32_t pid, struct ctx_list *list)
{
	struct nl_msg *msg;
	int err = genl_open();

	memset(list, 0, sizeof(*list));
	if (err)
		return err;
	msg = genl_msg(MIGR_CMD_CTX_GET, NLM_F_DUMP);
	if (pid)
		nla_put_u32(msg, MIGR_A_PID, pid);
	return genl_talk(msg, take_ctx, list);
}

static int take_obj(struct nlattr **attrs, void *arg)
{
	struct obj_list *list = arg;
	struct obj *o;

	if (!attrs[MIGR_A_OBJ_REC] || list->n >= 8192)
		return 0;
	o = &list->obj[list->n++];
	o->type = attr_u32(attrs, MIGR_A_OBJ_TYPE);
	nla_memcpy(&o->rec, attrs[MIGR_A_OBJ_REC], sizeof(o->rec));
	if (attrs[MIGR_A_DRIVER_RESP])
		o->resp_len = nla_memcpy(o->resp, attrs[MIGR_A_DRIVER_RESP], sizeof(o->resp));
	return 0;
}

int genl_objs_of(uint32_t ctx_id, uint32_t type, struct obj_list *list)
{
	struct nl_msg *msg;
	int err = genl_open();

	memset(list, 0, sizeof(*list));
	if (err)
		return err;
	msg = genl_msg(MIGR_CMD_OBJ_GET, NLM_F_DUMP);
	nla_put_u32(msg, MIGR_A_CTX_ID, ctx_id);
	if (type)
		nla_put_u32(msg, MIGR_A_OBJ_TYPE, type);
	return genl_talk(msg, take_obj, list);
}

int genl_objs(uint32_t ctx_id, struct obj_list *list)
{
	return genl_objs_of(ctx_id, 0, list);
}

int genl_bind_qp(uint32_t ctx_id, uint32_t vqpn, uint32_t pqpn)
{
	struct nl_msg *msg;
	int err = genl_open();

	if (err)
		return err;
	msg = genl_msg(MIGR_CMD_QP_BIND, NLM_F_ACK);
	nla_put_u32(msg, MIGR_A_CTX_ID, ctx_id);
	nla_put_u32(msg, MIGR_A_VQPN, vqpn);
	nla_put_u32(msg, MIGR_A_PQPN, pqpn);
	return genl_talk(msg, NULL, NULL);
}

int genl_reserve(uint32_t vqpn)
{
	return genl_raw(MIGR_CMD_QPN_RESERVE, 0, MIGR_A_VQPN, vqpn);
}

int genl_release(uint32_t vqpn)
{
	return genl_raw(MIGR_CMD_QPN_RELEASE, 0, MIGR_A_VQPN, vqpn);
}

int events_open(void)
{
	int group, err = genl_open();

	if (err)
		return err;
	group = genl_ctrl_resolve_grp(sock, MIGR_GENL_NAME, MIGR_GENL_MCGRP_EVENTS);
	event_sock = nl_socket_alloc();
	if (group < 0 || !event_sock || genl_connect(event_sock))
		return -ENOENT;
	return nl_socket_add_membership(event_sock, group) ? -EPERM : nl_socket_get_fd(event_sock);
}

static int on_event(struct nl_msg *msg, void *arg)
{
	struct nlattr *attrs[MIGR_A_MAX + 1];
	struct migr_ev *ev = arg;

	if (genlmsg_parse(nlmsg_hdr(msg), 0, attrs, MIGR_A_MAX, NULL))
		return NL_SKIP;
	*ev = (struct migr_ev){ attr_u32(attrs, MIGR_A_EVENT), attr_u32(attrs, MIGR_A_CTX_ID),
				attr_u32(attrs, MIGR_A_PID), attr_u32(attrs, MIGR_A_VQPN),
				attr_u32(attrs, MIGR_A_PQPN) };
	return NL_STOP;
}

static int any_seq(struct nl_msg *msg, void *arg)
{
	(void)msg;
	(void)arg;
	return NL_OK;
}

int events_next(struct migr_ev *ev, int timeout_ms)
{
	struct pollfd p = { .fd = nl_socket_get_fd(event_sock), .events = POLLIN };
	struct nl_cb *cb;

	if (poll(&p, 1, timeout_ms) <= 0)
		return -ETIMEDOUT;
	cb = nl_cb_alloc(NL_CB_CUSTOM);
	nl_cb_set(cb, NL_CB_VALID, NL_CB_CUSTOM, on_event, ev);
	nl_cb_set(cb, NL_CB_SEQ_CHECK, NL_CB_CUSTOM, any_seq, NULL);
	memset(ev, 0, sizeof(*ev));
	nl_recvmsgs(event_sock, cb);
	nl_cb_put(cb);
	return ev->event ? 0 : -EIO;
}

uint32_t ctx_of_pid(uint32_t pid)
{
	static struct ctx_list list;

	return !genl_ctxs(pid, &list) && list.n == 1 ? list.rec[0].ctx_id : 0;
}

struct obj *find_obj(struct obj_list *list, uint32_t type, uint32_t handle)
{
	int i;

	for (i = 0; i < list->n; i++)
		if (list->obj[i].type == type && list->obj[i].rec.pd.handle == handle)
			return &list->obj[i];
	return NULL;
}
