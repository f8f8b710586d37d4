/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Shared by the files of the restore library only. */
#ifndef MIGR_RESTORE_INTERNAL_H
#define MIGR_RESTORE_INTERNAL_H

#include "migr/restore.h"

/* Says what failed; returns -@errnum, so that callers can `return rst_fail(...)`. */
int rst_fail(struct migr_rst_err *err, int errnum, const char *fmt, ...)
	__attribute__((format(printf, 3, 4), cold));

struct migr_rst_pd *rst_find_pd(const struct migr_rst_context *c, uint32_t old_handle);
struct migr_rst_srq *rst_find_srq(const struct migr_rst_context *c, uint32_t old_handle);
struct migr_rst_cq *rst_find_cq(const struct migr_rst_context *c, uint32_t old_handle);

/*
 * What a uverbs write() command carries, by the ioctl INVOKE_WRITE: that one does
 * not ask who opened the file. @cmd: IB_USER_VERBS_CMD_*, extended ones with the flag.
 */
struct rst_cmd {
	uint32_t cmd;
	const void *in;
	uint32_t in_len;
	void *out;
	uint32_t out_len;
	struct migr_rst_resp *driver;	/* NULL: none wanted. len is set to what came */
};
int rst_uverbs(const struct migr_rst_context *ctx, struct rst_cmd *cmd);	/* 0 or -errno */

/* The GIDs that are in use, of all ports; how many, or -errno. */
struct ib_uverbs_gid_entry;
int rst_uverbs_gids(const struct migr_rst_context *ctx, struct ib_uverbs_gid_entry *out, uint32_t max);

/* enum ib_qp_state: kernel ABI, but in no uapi header. */
enum { STATE_RESET, STATE_INIT, STATE_RTR, STATE_RTS, STATE_SQD, STATE_SQE, STATE_ERR };

/* INIT -> RTR [-> RTS] of a type that needs no destination. */
int rst_qp_datagram_ready(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err);

int rst_qp_error(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err);

/* Moves an fd to @floor or above, close-on-exec; closes @fd in any case. */
int rst_fd_lift(int fd, int floor);	/* new number or -errno */

#endif /* MIGR_RESTORE_INTERNAL_H */
