/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What bench/datapath tells the stub libibverbs to do. Nothing of it is timed.
 * QPs are named by the number that the stub gave them.
 */
#ifndef MIGR_BENCH_STUB_H
#define MIGR_BENCH_STUB_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes a completion for every posted WR that has none; returns how many, or -1: no such QP. */
int migr_stub_complete_sends(uint32_t qpn);
int migr_stub_complete_receives(uint32_t qpn, uint32_t byte_len);

/* Send work requests that this QP was ever given; those of an open ibv_wr_* session count. 0: no such QP. */
uint32_t migr_stub_posted(uint32_t qpn);

/* The WR structure that the last post_send or post_recv on this QP was given; tells a copy from the original. */
const void *migr_stub_last_wr(uint32_t qpn);

/* The keys in the WQE of the last send (a WR with one SGE; rkey is 0 in a SEND). Returns 0, or -1: no such QP. */
int migr_stub_last_keys(uint32_t qpn, uint32_t *lkey, uint32_t *rkey);

#ifdef __cplusplus
}
#endif

#endif
