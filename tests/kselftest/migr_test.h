/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What the kernel tests share: TAP, an RDMA fixture over the first device that
 * has an active port, and the two doors of migr.ko.
 *
 * One program per behaviour; exit status 0 passed, 1 failed, 4 skipped.
 */
#ifndef MIGR_TEST_H
#define MIGR_TEST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <infiniband/verbs.h>
#include <uapi/migr.h>

enum { TEST_PASS = 0, TEST_FAIL = 1, TEST_SKIP = 4 };

/* One TAP line; @what in the words of a specification. Returns @good. */
bool check(bool good, const char *what, ...) __attribute__((format(printf, 2, 3)));
/* As check(got == want), and says both when they differ. */
bool check_eq(uint64_t got, uint64_t want, const char *what);
/* The call (which returned @ret and left errno) failed with @want. */
bool check_errno(int ret, int want, const char *what);
/* What a test cannot go on without. */
void need(bool good, const char *what, ...) __attribute__((format(printf, 2, 3)));
void skip(const char *why, ...) __attribute__((format(printf, 1, 2), noreturn));
int finish(void);

/* ---- RDMA ---- */

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *buf;
	union ibv_gid gid;
	int gid_index;
};

#define SIDE_BUF 65536

struct ibv_context *open_context(void);
struct ibv_qp *make_qp(struct side *s);
void side_open(struct side *s);
/* Connects two QPs of the same port; asserts success. */
void connect_qp(struct side *s, struct ibv_qp *qp, struct side *peer, uint32_t peer_qpn);
void side_close(struct side *s);
uint64_t now_ms(void);

/* ---- /dev/migr ---- */

int migr_open(void);			/* or skips */
int migr_attach(int fd, int uverbs_fd, uint32_t *ctx_id);	/* 0 or -1 */
const uint32_t *map_qpn_table(int fd);
const struct migr_key_entry *map_key_table(int fd);

/* Loads and removes the module; 0 or -1 with errno. Others may not use it meanwhile. */
int module_load(void);			/* file: environment MIGR_KO */
int module_remove(void);		/* EWOULDBLOCK: it is held */

/* ---- netlink ---- */

struct ctx_list {
	int n;
	struct migr_ctx_rec rec[256];
};

struct obj {
	uint32_t type;
	union {
		struct migr_pd_rec pd;
		struct migr_mr_rec mr;
		struct migr_cq_rec cq;
		struct migr_qp_rec qp;
		struct migr_srq_rec srq;
		struct migr_other_rec other;
	} rec;
	uint32_t resp_len;
	uint8_t resp[MIGR_DRIVER_RESP_MAX];
};

struct obj_list {
	int n;
	struct obj obj[8192];
};

struct migr_info {
	uint32_t abi_version, nr_ctx, nr_obj, nr_reserved, nr_dev, moves_marked;
};

struct migr_ev {
	uint32_t event, ctx_id, pid, vqpn, pqpn;
};

/* All return 0 or a negative errno of the kernel's. */
int genl_info(struct migr_info *info);
int genl_ctxs(uint32_t pid, struct ctx_list *list);	/* pid 0: all */
int genl_objs(uint32_t ctx_id, struct obj_list *list);
int genl_objs_of(uint32_t ctx_id, uint32_t type, struct obj_list *list);	/* type 0: all */
int genl_bind_qp(uint32_t ctx_id, uint32_t vqpn, uint32_t pqpn);
int genl_reserve(uint32_t vqpn);
int genl_release(uint32_t vqpn);
/* A command with one u32 attribute or none (attr 0). */
int genl_raw(int cmd, int flags, int attr, uint32_t value);
int genl_family(void);			/* its number */
void genl_forget(void);			/* after a reload of the module */
int events_open(void);				/* a socket, or a negative errno */
int events_next(struct migr_ev *ev, int timeout_ms);	/* 0, or -ETIMEDOUT */

uint32_t ctx_of_pid(uint32_t pid);		/* the only one, or 0 */
struct obj *find_obj(struct obj_list *list, uint32_t type, uint32_t handle);

#endif
