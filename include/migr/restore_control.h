/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What a controller (migrd, runc full-restore, migr-restorectl) and the CRIU
 * plugin of a restore say to each other: one SOCK_SEQPACKET UNIX socket,
 * MIGR_RESTORE_SOCKET, on which the *plugin listens* from its init until CRIU
 * ends. Any number of controllers one after another; every request gets exactly
 * one reply with the same op | MIGR_RC_REPLY. The plugin accepts only peers with
 * its own effective uid or 0.
 *
 * The plugin is inert unless MIGR_RESTORE_SOCKET is set and the image directory
 * holds migr.img. Order: PREPARE, CONNECT, GO, (CRIU restores), READY, COMMIT.
 * Memory is registered ahead of the answer to READY (migr/ahead.h): an error
 * there may say that this has failed, and is an ABORT.
 * ABORT is possible at any time before COMMIT: CRIU fails, the tasks die,
 * everything that was created is destroyed. Waiting is limited by
 * MIGR_RESTORE_GO_LIMIT, MIGR_RESTORE_REGISTER_LIMIT (of memory, before the
 * answer to READY) and MIGR_RESTORE_COMMIT_LIMIT (seconds, default 120, 100 and
 * 30); a limit that runs out is an ABORT.
 */
#ifndef MIGR_RESTORE_CONTROL_H
#define MIGR_RESTORE_CONTROL_H

#include <stdint.h>

#define MIGR_RC_VERSION		1
#define MIGR_RC_MAX_RECORDS	4096	/* QPs of one job; larger jobs: MIGR_RC_MORE */
#define MIGR_RC_TEXT_MAX	200

#define MIGR_RC_REPLY		0x8000u
#define MIGR_RC_MORE		0x1u	/* flags: further packets of this message follow */

enum migr_rc_op {
	MIGR_RC_PREPARE = 1,	/* reply when everything is created: records migr_rc_qp */
	MIGR_RC_CONNECT,	/* records migr_rc_connect: to RTR and RTS */
	MIGR_RC_GO,		/* images are complete: let CRIU restore */
	MIGR_RC_READY,		/* reply when memory is final and registered and tasks wait
				 * (RESUME_DEVICES_LATE); records migr_rc_object of every object */
	MIGR_RC_COMMIT,		/* tasks run after the reply */
	MIGR_RC_ABORT,
};

struct migr_rc_msg {
	uint16_t version;	/* MIGR_RC_VERSION */
	uint16_t op;		/* enum migr_rc_op, | MIGR_RC_REPLY */
	uint32_t flags;		/* MIGR_RC_MORE */
	int32_t status;		/* replies: 0 or a positive errno */
	uint32_t count;		/* records that follow */
	uint32_t record_size;	/* bytes of one record */
	uint32_t took_us;	/* replies to PREPARE: making the objects, microseconds; else 0 */
	char text[MIGR_RC_TEXT_MAX];	/* replies with status: what failed, of what */
};

/* `src_ctx_id` is migr.ko's context id on the source, as in migr.img. */
struct migr_rc_qp {
	uint32_t src_ctx_id;
	uint32_t vqpn;
	uint32_t src_pqpn;	/* number on the source */
	uint32_t pqpn;		/* number here */
	uint32_t psn;		/* 24 bits: first PSN it will send */
	uint32_t new_handle;
	uint8_t sgid[16];	/* the GID it will send from */
};

struct migr_rc_connect {
	uint32_t src_ctx_id;
	uint32_t vqpn;
	uint32_t dest_qpn;	/* physical, of the partner's spare */
	uint32_t dest_psn;
	uint8_t dgid[16];
};

struct migr_rc_object {
	uint32_t src_ctx_id;
	uint32_t ctx_id;	/* here */
	int32_t context_fd;	/* number in the restored process */
	uint32_t obj_type;	/* enum migr_obj_type; 0: the context itself */
	uint32_t old_handle;
	uint32_t new_handle;
	uint32_t vqpn;		/* QP only */
	uint32_t pqpn;		/* QP only */
};

#endif /* MIGR_RESTORE_CONTROL_H */
