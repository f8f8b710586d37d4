/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What a program can tell libmigr when it runs with it. It is not linked with it: both functions are null without it, and the flag is harmless.
 * Any thread may call them; they wait for nothing but other control-path calls of verbs.
 */
#ifndef MIGR_MIGR_H
#define MIGR_MIGR_H

#include <stdint.h>

/*
 * In ibv_send_wr::send_flags and ibv_qp_ex::wr_flags: this work request is not to be sent twice (SHIFT §3.1 calls it ineligible
 * for retransmission). Under `resend`, which may do WRITEs and READs again that were executed, a connection that has one
 * outstanding when its link fails ends with the original error. `exact` does nothing again that was executed, but READs, and does not
 * look at it; nor does anything without libmigr. Only where the device keeps it in its queue, as soft-RoCE does.
 */
#define MIGR_SEND_ONCE (1u << 31)

#ifdef __cplusplus
extern "C" {
#endif

/*
 * For detectors of a program's own: `port` (1..) of the RDMA device `device` ("mlx5_0") does not carry. Connections of this
 * process that are on that link go to their other link, as if the device had said so (docs/failover.md), and do not come
 * back before migr_link_up(). Of other processes: migrctl link down.
 * @return 0; ENOENT: no policy of links.json holds for this process, or the port is not among its links
 */
int migr_link_down(const char *device, uint32_t port) __attribute__((weak));

/* It carries again, as far as the program can tell: it is used when migrd and the other end say so, too. */
int migr_link_up(const char *device, uint32_t port) __attribute__((weak));

#ifdef __cplusplus
}
#endif

#endif
