/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Frames between `testbed exec`, the bed's supervisor (scripts/testbed.d/wire.py
 * has the same numbers) and the agent in a guest. Little endian, as every
 * machine that this testbed runs on.
 *
 * A channel is one command. Both directions have credit: a side sends at most
 * FRAME_CREDIT bytes that the other has not yet granted again by CREDIT, so
 * that a command nobody reads from cannot stop the others on the same port.
 */
#ifndef MIGR_TESTBED_FRAME_H
#define MIGR_TESTBED_FRAME_H

#include <stdint.h>

struct frame_header {
	uint32_t channel;
	uint32_t type;		/* enum frame_type */
	uint32_t length;	/* bytes that follow, 0..FRAME_PAYLOAD_MAX */
};

#define FRAME_PAYLOAD_MAX	65536u
#define FRAME_CREDIT		262144u

enum frame_type {
	/* towards the guest */
	FRAME_OPEN = 1,		/* cwd, "K=V"..., "", argv...: each closed by NUL */
	FRAME_STDIN = 2,	/* length 0: end of file */
	FRAME_KILL = 3,		/* u32 signal, to the command's process group */
	FRAME_CLOSE = 4,	/* the client is gone: TERM, then KILL; no EXIT is sent */

	/* from the guest */
	FRAME_STDOUT = 16,
	FRAME_STDERR = 17,
	FRAME_EXIT = 18,	/* u32 exit status, 128+N for signal N; text if it could not start */
	FRAME_READY = 19,	/* channel 0. u32 status of the guest's set-up */

	/* both */
	FRAME_CREDIT_MORE = 32,	/* u32 bytes: of stdin from the guest, of stdout+stderr from the client */
};

#endif
