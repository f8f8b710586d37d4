// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Both doors are shaken, by root and by nobody: processes that own contexts give
 * the ioctls, mmap() and netlink of the module nonsense that is nearly sense,
 * while what it is about comes and goes. Every answer is one that the ABI knows,
 * the record is as before, and the module does its work afterwards. Whether the
 * kernel was hurt says its console.
 *
 * Where the kernel tells which code it runs (KCOV), inputs that reach code of the
 * module that none before has reached are kept, and half of all are made of those.
 *
 *   MIGR_FUZZ_S=SECONDS (5) MIGR_FUZZ_SEED=N
 */
#include "migr_test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/genetlink.h>
#include <linux/kcov.h>
#include <linux/netlink.h>

#define MUST(x) do { if (!(x)) _exit(__LINE__ % 200 + 10); } while (0)
#define RESULT(call) do { long ret_ = (call); result(ret_, errno, __LINE__); } while (0)
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

enum { FDS = 4, QPS = 3, HANDLES = 12, NOBODY = 65534, FIRST_NUMBER = 0x700000 };
enum { CODE_MAX = 1 << 20, COVER_MAX = 1 << 16, KEPT_MAX = 1024 };

/* For one of the doors. */
struct input {
	unsigned long cmd;		/* of an ioctl */
	uint32_t size;			/* bytes of data */
	uint8_t data[512];
};

struct corpus {
	unsigned int n;			/* kept so far; the last KEPT_MAX are there */
	struct input in[KEPT_MAX];
};

/* What the processes have in common. */
static struct shared {
	volatile int stop;
	unsigned long calls, taken;		/* all, and those that were not refused */
	int bad_errno, bad_where;		/* an answer that the ABI does not know, */
	unsigned long bad_cmd;			/* to this ioctl (0: it was none) */
	uint32_t qpns[64], ctxs[16];		/* that live, or did */
	uint8_t sent[MIGR_NR_INDEX / 8];	/* numbers that may be reserved now */
	struct corpus ioctls, messages;
	uint8_t reached[CODE_MAX];		/* by address within the module */
	unsigned int nr_reached;
} *shared;

static uint64_t state;

static uint32_t rnd(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state >> 16;
}

static bool one_in(uint32_t n) { return rnd() % n == 0; }

/* A number that may mean something. */
static uint32_t value(void)
{
	static const uint32_t edges[] = { 0, 1, MIGR_QPN_MASK, MIGR_QPN_MASK + 1, 0x7fffffff, 0x80000000, MIGR_NO_HANDLE };

	switch (rnd() % 8) {
	case 0: return edges[rnd() % COUNT(edges)];
	case 1: return rnd();
	case 2: return FIRST_NUMBER + rnd() % 8;
	case 3: return rnd() % 64;
	case 4: return rnd() % HANDLES << 8 | rnd() % 4;	/* a key */
	case 5: return one_in(2) ? shared->qpns[rnd() % COUNT(shared->qpns)] : shared->ctxs[rnd() % COUNT(shared->ctxs)];
	default: return rnd() % HANDLES;
	}
}

static void result(long ret, int err, int where)
{
	static const int known[] = { EPROTONOSUPPORT, EOPNOTSUPP, ENOENT, EEXIST, EBUSY, EPERM, EINVAL, ERANGE,
				     /* of the kernel itself */ EBADF, EFAULT, ENOTTY, ENOMEM, EACCES, ENODEV, ESPIPE, EAGAIN, EOVERFLOW, ENODATA };
	unsigned int i;

	__atomic_add_fetch(&shared->calls, 1, __ATOMIC_RELAXED);
	if (ret >= 0) {
		__atomic_add_fetch(&shared->taken, 1, __ATOMIC_RELAXED);
		return;
	}
	for (i = 0; i < COUNT(known); i++)
		if (err == known[i])
			return;
	shared->bad_errno = err;
	shared->bad_where = where;
}

/* ---- what the kernel has run */

static uint64_t *cover;			/* NULL: it does not say */
static uint64_t code, code_size;	/* where the module is */

/* Of this process, and it has to be root still. */
static void cover_open(void)
{
	char line[256];
	FILE *modules;
	int fd = open("/sys/kernel/debug/kcov", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return;
	modules = fopen("/proc/modules", "r");
	MUST(modules);
	while (!code && fgets(line, sizeof(line), modules))
		if (sscanf(line, "migr %lu %*d %*s %*s %lx", &code_size, &code) != 2)
			code = 0;
	fclose(modules);
	MUST(code && code_size <= CODE_MAX);
	MUST(!ioctl(fd, KCOV_INIT_TRACE, COVER_MAX));
	cover = mmap(NULL, COVER_MAX * sizeof(*cover), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(cover != MAP_FAILED && !ioctl(fd, KCOV_ENABLE, KCOV_TRACE_PC));
}

static void cover_begin(void)
{
	if (cover)
		__atomic_store_n(&cover[0], 0, __ATOMIC_RELAXED);
}

/* Whether something was reached since cover_begin() that nobody has reached before. */
static bool cover_grew(void)
{
	uint64_t n = cover ? __atomic_load_n(&cover[0], __ATOMIC_RELAXED) : 0, i;
	bool grew = false;

	for (i = 1; i <= n; i++) {
		uint64_t at = cover[i] - code;

		if (at < code_size && !__atomic_exchange_n(&shared->reached[at], 1, __ATOMIC_RELAXED)) {
			__atomic_add_fetch(&shared->nr_reached, 1, __ATOMIC_RELAXED);
			grew = true;
		}
	}
	return grew;
}

static void keep(struct corpus *c, unsigned long cmd, const void *data, size_t size)
{
	struct input *in = &c->in[__atomic_fetch_add(&c->n, 1, __ATOMIC_RELAXED) % KEPT_MAX];

	in->cmd = cmd;
	in->size = size < sizeof(in->data) ? size : sizeof(in->data);
	memcpy(in->data, data, in->size);
}

/* One that was kept, changed a little; false: it is time for a new one. Another process may be writing it: then it is nonsense. */
static bool recall(const struct corpus *c, struct input *in)
{
	unsigned int n = __atomic_load_n(&c->n, __ATOMIC_RELAXED), changes = 1 + rnd() % 3;

	if (!n || one_in(2))
		return false;
	*in = c->in[rnd() % (n < KEPT_MAX ? n : KEPT_MAX)];
	if (in->size < sizeof(uint32_t) || in->size > sizeof(in->data))
		return false;
	while (changes--) {
		uint32_t at = rnd() % in->size, v = value();

		switch (rnd() % 4) {
		case 0: in->data[at] ^= 1 << rnd() % 8; break;
		case 1: in->data[at] = v; break;
		default: memcpy(in->data + at % (in->size / sizeof(v)) * sizeof(v), &v, sizeof(v));
		}
	}
	return true;
}

/* ---- /dev/migr */

struct victim {
	struct side s;
	struct ibv_qp *qp[QPS];
	struct ibv_mr *mr;
	int fd[FDS];
};

static void churn(struct victim *v)
{
	int i = rnd() % QPS;

	if (one_in(3)) {
		if (v->mr)
			MUST(!ibv_dereg_mr(v->mr));
		v->mr = ibv_reg_mr(v->s.pd, v->s.buf, SIDE_BUF, one_in(2) ? IBV_ACCESS_LOCAL_WRITE : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
		MUST(v->mr);
		return;
	}
	if (v->qp[i])
		MUST(!ibv_destroy_qp(v->qp[i]));
	v->qp[i] = make_qp(&v->s);
	MUST(v->qp[i]);
	shared->qpns[rnd() % COUNT(shared->qpns)] = v->qp[i]->qp_num;
}

/* @size bytes of request where the kernel finds them, or does not. */
static void *place(void *request, size_t size)
{
	static char *edge;

	if (!edge) {
		edge = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		MUST(edge != MAP_FAILED && !mprotect(edge + 4096, 4096, PROT_NONE));
	}
	if (!one_in(16))
		return request;
	switch (rnd() % 4) {
	case 0: return NULL;
	case 1: return (void *)0xffff888000001000ul;
	case 2: return edge + 4096 - size / 2;	/* half of it */
	default: return memcpy(edge + 4096 - size, request, size);
	}
}

static void shake_ioctl(struct victim *v, int fd)
{
	char room[MIGR_DRIVER_RESP_MAX];
	union {
		struct migr_ioc_attach attach;
		struct migr_ioc_bind_qp bind_qp;
		struct migr_ioc_bind_mr bind_mr;
		struct migr_ioc_query_mr query_mr;
		struct migr_ioc_driver_resp driver_resp;
		struct migr_ioc_qp_stands stands;
		uint32_t words[64];
	} u;
	struct input in;
	static const unsigned long commands[] = { MIGR_IOC_ATTACH, MIGR_IOC_BIND_QP, MIGR_IOC_BIND_MR, MIGR_IOC_QUERY_MR,
						  MIGR_IOC_DRIVER_RESP, MIGR_IOC_QP_STANDS };
	unsigned long cmd = commands[rnd() % COUNT(commands)];
	bool again = recall(&shared->ioctls, &in);
	unsigned int i;
	int bad;

	for (i = 0; i < COUNT(u.words); i++)
		u.words[i] = value();
	if (again) {
		cmd = in.cmd;
		memcpy(&u, in.data, in.size < sizeof(u) ? in.size : sizeof(u));
	}
	/* What was kept was right in all but what is a process's own. */
	switch (again && cmd != MIGR_IOC_ATTACH && cmd != MIGR_IOC_DRIVER_RESP && one_in(2) ? 0 : cmd) {
	case MIGR_IOC_ATTACH:
		if (!one_in(8))
			u.attach.abi_version = MIGR_ABI_VERSION;
		if (!one_in(8))
			u.attach.flags = 0;
		if (!one_in(4))
			u.attach.uverbs_fd = v->s.context->cmd_fd;
		else if (one_in(2))
			u.attach.uverbs_fd = v->fd[rnd() % FDS];
		break;
	case MIGR_IOC_BIND_QP:
	case MIGR_IOC_QP_STANDS:	/* the number of the QP lies at another place */
		if (!one_in(4))
			u.words[cmd == MIGR_IOC_BIND_QP] = v->qp[rnd() % QPS]->qp_num;
		break;
	case MIGR_IOC_BIND_MR:
	case MIGR_IOC_QUERY_MR:
		if (!one_in(4))
			u.bind_mr.handle = v->mr->handle;
		if (!one_in(8))
			u.bind_mr.reserved = 0, u.query_mr.reserved = 0;
		break;
	case MIGR_IOC_DRIVER_RESP:
		u.driver_resp.obj_type = rnd() % (__MIGR_OBJ_MAX + 2);
		u.driver_resp.buf = one_in(8) ? value() : (uintptr_t)room;
		u.driver_resp.len = one_in(8) ? value() : rnd() % (sizeof(room) + 1);
		if (!one_in(8))
			u.driver_resp.reserved = 0;
		break;
	}
	if (one_in(16))	/* another size, another direction, or anything */
		cmd = one_in(2) ? cmd ^ 1ul << (16 + rnd() % 16) : rnd();
	bad = shared->bad_errno;
	memcpy(in.data, &u, sizeof(u));	/* answers are written over it */
	cover_begin();
	RESULT(ioctl(fd, cmd, place(&u, _IOC_SIZE(cmd) <= sizeof(u) ? _IOC_SIZE(cmd) : sizeof(u))));
	if (cover_grew())
		keep(&shared->ioctls, cmd, in.data, sizeof(u));
	if (shared->bad_errno != bad)
		shared->bad_cmd = cmd;
	if (cmd == MIGR_IOC_ATTACH)
		shared->ctxs[rnd() % COUNT(shared->ctxs)] = u.attach.ctx_id;
}

static void shake_mmap(int fd)
{
	static const uint64_t sizes[] = { MIGR_QPN_TABLE_BYTES, MIGR_KEY_TABLE_BYTES, 4096, 0, MIGR_KEY_TABLE_BYTES + 4096 };
	static const uint64_t offsets[] = { MIGR_QPN_TABLE_OFFSET, MIGR_KEY_TABLE_OFFSET, 4096, MIGR_KEY_TABLE_OFFSET + 4096, 1ull << 40 };
	uint64_t size = sizes[one_in(2) ? rnd() % 2 : rnd() % COUNT(sizes)], at;
	int prot = one_in(4) ? rnd() % 8 : PROT_READ, kind = one_in(8) ? MAP_PRIVATE : MAP_SHARED;
	volatile const uint32_t *p = mmap(NULL, size, prot, kind, fd, offsets[rnd() % COUNT(offsets)]);
	uint32_t sum = 0;

	result(p == MAP_FAILED ? -1 : 0, errno, __LINE__);
	if (p == MAP_FAILED)
		return;
	MUST(!(prot & PROT_WRITE) || kind == MAP_PRIVATE);
	MUST(kind == MAP_PRIVATE || mprotect((void *)p, 4096, PROT_READ | PROT_WRITE));	/* stays read-only */
	if (prot & PROT_READ)
		for (at = 0; at < 16; at++)
			sum += p[rnd() % (size / 4)];
	(void)sum;
	if (one_in(4)) {
		pid_t child = fork();

		if (!child) {
			if (prot & PROT_READ)
				sum += p[rnd() % (size / 4)];
			_exit(0);
		}
		MUST(child > 0 && waitpid(child, NULL, 0) == child);
	}
	if (one_in(4))
		munmap((void *)p, 4096);
	if (one_in(8))
		madvise((void *)p, size, MADV_DONTNEED);
	munmap((void *)p, size);
}

static void shake_device(bool as_nobody)
{
	struct victim v = { .fd = { -1, -1, -1, -1 } };
	char byte[16];
	int i;

	side_open(&v.s);
	v.mr = ibv_reg_mr(v.s.pd, v.s.buf, SIDE_BUF, IBV_ACCESS_LOCAL_WRITE);
	for (i = 0; i < QPS; i++)
		v.qp[i] = make_qp(&v.s);
	MUST(v.mr && v.qp[QPS - 1]);
	cover_open();
	if (as_nobody)
		MUST(!setgid(NOBODY) && !setuid(NOBODY));
	while (!shared->stop) {
		int *fd = &v.fd[rnd() % FDS];

		if (*fd < 0) {
			*fd = open("/dev/migr", one_in(4) ? O_RDONLY : O_RDWR);
			MUST(*fd >= 0);
		}
		switch (rnd() % 32) {
		case 0:
			close(*fd);
			*fd = -1;
			break;
		case 1:
			churn(&v);
			break;
		case 2:
			RESULT(one_in(2) ? read(*fd, byte, sizeof(byte)) : write(*fd, byte, sizeof(byte)));
			RESULT(lseek(*fd, rnd(), SEEK_SET));
			poll(&(struct pollfd){ .fd = *fd, .events = POLLIN }, 1, 0);
			break;
		case 3 ... 6:
			cover_begin();
			shake_mmap(*fd);
			cover_grew();
			break;
		default:
			shake_ioctl(&v, *fd);
		}
	}
	_exit(0);
}

/* ---- netlink */

/* Attributes as they should be, with values that may be anything; some lie about their length, or end early. */
static size_t message(char *buf, size_t room, int id)
{
	struct nlmsghdr *n = (struct nlmsghdr *)buf;
	struct genlmsghdr *g = NLMSG_DATA(n);
	size_t len = NLMSG_HDRLEN + GENL_HDRLEN;
	int attrs = rnd() % 5, i;

	memset(buf, 0, room);
	n->nlmsg_type = one_in(64) ? rnd() : (uint32_t)id;
	n->nlmsg_flags = NLM_F_REQUEST | (one_in(4) ? rnd() : one_in(2) ? NLM_F_ACK : NLM_F_DUMP);
	n->nlmsg_seq = rnd();
	g->cmd = rnd() % (__MIGR_CMD_MAX + 2);
	g->version = one_in(8) ? rnd() : MIGR_GENL_VERSION;
	for (i = 0; i < attrs; i++) {
		static const uint32_t likely[] = { MIGR_A_PID, MIGR_A_CTX_ID, MIGR_A_VQPN, MIGR_A_PQPN };
		struct nlattr *a = (struct nlattr *)(buf + len);
		uint32_t v = value(), size = one_in(8) ? rnd() % 64 : 4;

		if (v <= MIGR_QPN_MASK && v >= 4096)
			v = FIRST_NUMBER + v % 64;
		a->nla_type = one_in(4) ? rnd() % (MIGR_A_MAX + 4) | (one_in(4) ? 0x8000 : 0) : likely[rnd() % COUNT(likely)];
		a->nla_len = one_in(32) ? rnd() : NLA_HDRLEN + size;
		memcpy(a + 1, &v, size < 4 ? size : 4);
		len += NLA_ALIGN(NLA_HDRLEN + size);
	}
	n->nlmsg_len = one_in(32) ? rnd() % (len + 8) : len;
	if (one_in(16))
		len = rnd() % len;
	return len;
}

static void note_numbers(const char *buf, size_t len)
{
	size_t at;

	/* Whatever could be read as one. */
	for (at = 0; at + 4 <= len; at += 2) {
		uint32_t v;

		memcpy(&v, buf + at, 4);
		if (v <= MIGR_QPN_MASK)
			__atomic_or_fetch(&shared->sent[v / 8], 1 << v % 8, __ATOMIC_RELAXED);
	}
}

static void shake_netlink(bool as_nobody)
{
	struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };
	int id = genl_family(), sk = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_GENERIC);
	static char buf[512], answer[32768];

	MUST(id > 0 && sk >= 0);
	cover_open();
	if (as_nobody)
		MUST(!setgid(NOBODY) && !setuid(NOBODY));
	while (!shared->stop) {
		struct input in;
		bool again = recall(&shared->messages, &in);
		size_t len = again ? in.size : message(buf, sizeof(buf), id);
		ssize_t got;

		if (again)
			memcpy(buf, in.data, len);

		if (one_in(256)) {	/* in the middle of a dump */
			close(sk);
			sk = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_GENERIC);
			MUST(sk >= 0);
		}
		note_numbers(buf, len);
		cover_begin();
		if (sendto(sk, buf, len, MSG_DONTWAIT, (struct sockaddr *)&kernel, sizeof(kernel)) < 0)
			result(-1, errno, __LINE__);
		while (!one_in(8) && (got = recv(sk, answer, sizeof(answer), MSG_DONTWAIT)) > 0) {
			const struct nlmsghdr *n = (const struct nlmsghdr *)answer;

			for (; NLMSG_OK(n, got); n = NLMSG_NEXT(n, got)) {
				const struct nlmsgerr *e = NLMSG_DATA(n);

				if (n->nlmsg_type == NLMSG_ERROR && e->msg.nlmsg_type == id)	/* not another family's */
					result(e->error ? -1 : 0, -e->error, __LINE__);
			}
		}
		if (cover_grew())
			keep(&shared->messages, 0, buf, len);
	}
	_exit(0);
}

static void device_as_root(void) { shake_device(false); }
static void device_as_nobody(void) { shake_device(true); }
static void netlink_as_root(void) { shake_netlink(false); }
static void netlink_as_nobody(void) { shake_netlink(true); }

int main(void)
{
	void (*kinds[])(void) = { device_as_root, device_as_nobody, device_as_root, netlink_as_root, netlink_as_nobody };
	const char *seconds = getenv("MIGR_FUZZ_S"), *seed = getenv("MIGR_FUZZ_SEED");
	uint64_t first = seed ? strtoull(seed, NULL, 0) : now_ms();
	struct migr_ioc_bind_qp bind = { .vqpn = 0x765432 };
	struct migr_info before, after;
	struct utsname kernel;
	struct side s;
	uint32_t v, id;
	unsigned int i;
	pid_t pids[COUNT(kinds)];
	int status, fd;

	close(migr_open());
	need(!genl_info(&before), "info");
	need(before.nr_reserved == 0, "no number is reserved");
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	need(shared != MAP_FAILED, "mmap");
	printf("# seed %llu\n", (unsigned long long)first);
	fflush(stdout);
	for (i = 0; i < COUNT(kinds); i++) {
		pids[i] = fork();
		if (!pids[i]) {
			state = (first + 1) * (i + 1) * 0x9e3779b97f4a7c15ull | 1;
			kinds[i]();
		}
	}
	sleep(seconds ? atoi(seconds) : 5);
	shared->stop = 1;
	for (i = 0; i < COUNT(kinds); i++) {
		need(waitpid(pids[i], &status, 0) == pids[i], "wait");
		check(WIFEXITED(status) && !WEXITSTATUS(status), "process %u saw nothing that cannot be (status 0x%x)", i, status);
	}
	printf("# %lu calls, %lu taken\n", shared->calls, shared->taken);
	uname(&kernel);
	if (!access("/sys/kernel/debug/kcov", F_OK) || strstr(kernel.release, "-debug")) {
		printf("# %u places of the module's code were reached; %u ioctls and %u messages did that first, and were kept\n", shared->nr_reached,
		       shared->ioctls.n, shared->messages.n);
		check(shared->nr_reached > 0 && shared->ioctls.n && shared->messages.n, "KCOV tells what was reached by either door");
	}
	check(shared->taken > 20 && shared->calls > 200, "there was something to refuse, and something to take");
	check(!shared->bad_errno, "every refusal is one of the ABI's (%s at line %d, ioctl %#lx)", strerror(shared->bad_errno), shared->bad_where,
	      shared->bad_cmd);

	for (v = 0; v <= MIGR_QPN_MASK; v++)
		if (shared->sent[v / 8] & 1 << v % 8)
			genl_release(v);
	need(!genl_info(&after), "info");
	check_eq(after.nr_ctx, before.nr_ctx, "no context is left in the record");
	check_eq(after.nr_obj, before.nr_obj, "and no object");
	check_eq(after.nr_reserved, 0, "every reserved number could be released");

	side_open(&s);
	fd = migr_open();
	need(!migr_attach(fd, s.context->cmd_fd, &id), "attach");
	bind.pqpn = s.qp->qp_num;
	check(!ioctl(fd, MIGR_IOC_BIND_QP, &bind) && map_qpn_table(fd)[s.qp->qp_num] == (0x765432 | MIGR_QPN_VALID), "the module does its work");
	close(fd);
	side_close(&s);
	return finish();
}
