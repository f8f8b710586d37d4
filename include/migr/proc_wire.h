/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What libmigr.so and migrd say to each other, over a UNIX SOCK_SEQPACKET
 * socket (MIGR_PROC_SOCKET). One packet is one message: struct migr_msg, then
 * `count` records of the type named beside each message. The library connects;
 * migrd knows the process by SO_PEERCRED. docs/protocol.md tells the order.
 *
 * Both sides refuse a packet whose version, type or length does not fit
 * (migrd closes, the library reports and goes on without migrd). Every request
 * of migrd is answered by exactly one reply with the same type | MIGR_REPLY,
 * `seq` echoed, `status` 0 or an errno, and on error `text` saying what failed.
 */
#ifndef MIGR_PROC_WIRE_H
#define MIGR_PROC_WIRE_H

#include <stdint.h>

#define MIGR_PROC_VERSION	3
#define MIGR_PROC_SOCKET	"/run/migr/proc.sock"	/* environment MIGR_PROC_SOCKET overrides */
/*
 * What the library asks (WHERE, INTRODUCE) comes on a connection of its own, as its first and only packets; migrd answers
 * and closes; without an answer it had no time, and the library asks again. So it needs no order with what migrd asks. A
 * checkpoint can contain none of these: DESCRIBE waits for them.
 *
 * After its answer to FREEZE the library closes the socket and must hold no
 * connection until it is known where it will live: a checkpoint cannot contain
 * one. It looks (access(2), no fd) every few ms for a gate: a file beside the
 * socket named "gate-" + 32 hex digits of its instance. migrd creates it when
 * the process may connect again: the source's on rollback (after the thaw),
 * the destination's before the commit. Whoever made it removes it.
 */
#define MIGR_PROC_GATE_PREFIX	"gate-"
#define MIGR_PROC_MAX_RECORDS	4096			/* per packet; more come in further packets */
#define MIGR_PROC_MAX_TEXT_RANGES 64			/* HELLO */
#define MIGR_PROC_TEXT_MAX	120

#define MIGR_REPLY		0x8000u
#define MIGR_MORE		0x1u	/* flags: further packets of this message follow */

enum migr_msg_type {
	/* library -> migrd, first packet; records: migr_text_range */
	MIGR_MSG_HELLO = 1,

	/* migrd -> library */
	MIGR_MSG_DESCRIBE,	/* arg: MIGR_DESCRIBE_*, or 0. reply records: migr_fd_desc;
				 * reply arg: the state of the record, never 0 */
	MIGR_MSG_QP_CREATE,	/* partner: spare QPs. records: migr_qp_ref; reply: migr_qp_spare */
	MIGR_MSG_QP_CONNECT,	/* partner: connect spares to RTS. records: migr_qp_connect; arg: the context of all these
				 * other ends, as KEYS will call it (MIGR_KEY_CONTEXT); 0: not known. An older library
				 * does not look */
	MIGR_MSG_SUSPEND,	/* records: migr_qp_ref, none = every QP. Reply when flags are up.
				 * arg: what DESCRIBE answered; EAGAIN if the record has changed
				 * since; 0: never mind */
	MIGR_MSG_DRAIN,		/* only after the threads were seen outside. arg: limit in ms.
				 * Reply when nothing is in flight (status 0) or ETIMEDOUT,
				 * records: migr_drain_stat */
	MIGR_MSG_FREEZE,	/* source: last poll, read back receives, touch pages, unmap
				 * tables, reply, close the socket, wait for the gate. arg: as SUSPEND.
				 * reply records: migr_fd_desc, MIGR_FD_COUNT of MRs only; none from an older library.
				 * ESTALE after WRITTEN: what was copied ahead may be older, and cannot be touched any more */
	MIGR_MSG_SWITCH,	/* partner: records: migr_qp_ref. Post outstanding receives on the
				 * spares, make them the path; still suspended */
	MIGR_MSG_REBIND,	/* restored: records: migr_handle_map. Adopt the new objects, attach
				 * to migr.ko, register memory that was not registered ahead
				 * (migr/ahead.h), post receives; still suspended.
				 * reply records: migr_key_map */
	MIGR_MSG_KEYS,		/* switched or restored: records: migr_key_map, for the QPs whose peer
				 * (QP_CONNECT, REBIND) is the owner; each owner's keys at once */
	MIGR_MSG_RESUME,	/* records: migr_qp_ref, none = all; what is gone, or runs, is passed over. Replay kept posts, go on.
				 * reply records: migr_resume_stat */
	MIGR_MSG_ROLLBACK,	/* discard spares, go back to the old path, resume there */
	MIGR_MSG_STATS,		/* reply records: migr_drain_stat of every QP. sq_in_flight: 0 unless
				 * it is suspended and not drained */
	MIGR_MSG_MOVES,		/* where unconnected QPs are that were born elsewhere. records:
				 * migr_move, all there are. arg: MIGR_MOVES_PREPARE or 0. reply
				 * arg: unconnected QPs of the process that no thread may be inside
				 * of when the moves come */
	MIGR_MSG_CUT,		/* a drain did not end in time. records: migr_qp_ref of connections
				 * that were not drained, at both ends. arg: MIGR_CUT_CHECK or 0.
				 * reply records: migr_qp_psn */
	MIGR_MSG_SETTLE,	/* both ends were cut. records: migr_qp_psn, what the other end has
				 * answered. reply records: migr_replay_stat */
	MIGR_MSG_MET,		/* the process at the other end of one connection has moved before that was made, and says
				 * what its memory is called now. records: migr_key_map of one owner; arg:
				 * MIGR_QP_NAME() of this end. ENOENT: no such QP */
	MIGR_MSG_GONE,		/* suspended, and the threads were seen outside: the other ends of these connections are
				 * gone. records: migr_qp_ref. What is in flight is flushed, and is not waited for */
	MIGR_MSG_OLD_PATH,	/* partner: the first half of ROLLBACK, which is still to come: the path before SWITCH and
				 * CUT stands again, with its receives and windows; still suspended. EOPNOTSUPP from an
				 * older library, whose ROLLBACK does both */

	MIGR_MSG_WRITTEN,	/* source: the process is drained. Of its registered memory these parts may differ from what was
				 * copied ahead and are not marked as written: the FREEZE that comes next touches
				 * them, and not all. records: migr_memory_part. EOPNOTSUPP from an older library */
	MIGR_MSG_TRACK,		/* memory of the source is to be copied ahead: where NICs write to it from now on. arg: enum
				 * migr_track, one after the other. EOPNOTSUPP from an older library, or with what the
				 * process has that is not possible: then all of the memory may have been written to */

	/* library -> migrd */
	MIGR_MSG_WHERE = 64,	/* before a QP is connected to one that may have moved. records: one migr_qp_address,
				 * as the application has it; arg: physical QPN of this end. reply records: one
				 * migr_qp_address, physical. ENOENT: as it is, for all that is known */
	MIGR_MSG_INTRODUCE,	/* a process that has moved has connected a QP: its partner is to learn its keys
				 * (MET). records: migr_key_map; arg: MIGR_QP_NAME() of this end. Answered when the
				 * partner knows. ENOENT: no process with libmigr has that QP */
};

/* A QP of a process in one number. */
#define MIGR_QP_NAME(ctx_id, vqpn)	((uint64_t)(ctx_id) << 32 | (vqpn))

/* Where a QP is, or is said to be. */
struct migr_qp_address {
	uint8_t gid[16];
	uint32_t qpn;		/* 24 bits */
};

/* CUT: only says whether it can be done; nothing is changed. */
#define MIGR_CUT_CHECK	0x1u

enum migr_track {
	MIGR_TRACK_HERE = 1,	/* source: of all QPs, what their receives, READs and atomics write to */
	MIGR_TRACK_THERE,	/* partner: what WRITEs and atomics of these QPs write to at their other ends. records: migr_qp_ref */
	MIGR_TRACK_QUEUES,	/* after the threads were seen outside: also what was posted before */
	MIGR_TRACK_TAKE,	/* drained: what has been noted, which is the end of it. reply records: migr_nic_write. ESTALE: it is not all */
};

/*
 * DESCRIBE: calls of the application that make, destroy or modify anything but
 * MRs wait from now on, until RESUME or ROLLBACK, or until migrd hangs up. So
 * do those of librdmacm that begin or end a connection, and requests for one.
 */
#define MIGR_DESCRIBE_HOLD	0x1u
/*
 * DESCRIBE: a migration begins. Backup links (docs/failover.md) are left before the answer, for at most 15 s, and
 * made again after RESUME or ROLLBACK, or when migrd hangs up. EBUSY: they could not be left.
 */
#define MIGR_DESCRIBE_MOVE	0x2u

struct migr_msg {
	uint16_t version;	/* MIGR_PROC_VERSION */
	uint16_t type;		/* enum migr_msg_type, | MIGR_REPLY */
	uint32_t flags;		/* MIGR_MORE */
	uint32_t seq;		/* chosen by migrd, echoed */
	int32_t status;		/* replies: 0 or a positive errno */
	uint32_t count;		/* records that follow, 0..MIGR_PROC_MAX_RECORDS */
	uint32_t record_size;	/* bytes of one record */
	uint64_t arg;
	uint8_t instance[16];	/* HELLO: random id of the process, the same after a migration */
	uint32_t migration;	/* the switchover this belongs to; 0: none */
	int32_t control_tid;	/* HELLO: kernel tid of the control thread, in its own pid namespace */
	uint32_t state;		/* HELLO: enum migr_proc_state */
	uint32_t generation;	/* HELLO: how often this process was restored */
	char text[MIGR_PROC_TEXT_MAX];	/* NUL-terminated */
};

enum migr_proc_state {
	MIGR_PROC_RUNNING,	/* nothing is suspended */
	MIGR_PROC_SUSPENDED,
	MIGR_PROC_FROZEN,	/* answered FREEZE; was frozen or restored since */
};

/* Code in which a thread counts as inside a data-path call (HELLO). */
struct migr_text_range {
	uint64_t start;		/* address in the process */
	uint64_t bytes;
	uint32_t kind;		/* 0: libmigr's direct path, 1: the provider */
	uint32_t reserved;
};

enum migr_fd_kind {
	MIGR_FD_CONTEXT = 1,	/* uverbs command fd */
	MIGR_FD_ASYNC,		/* async event fd of a context */
	MIGR_FD_CHANNEL,	/* completion channel */
	MIGR_FD_RING,		/* not an fd: which ring lies where (see fields) */
	MIGR_FD_CM,		/* librdmacm's device, of no context. What a restore puts there holds the ports (CM_PORT)
				 * until the library opens the device anew */
	MIGR_FD_AHEAD,		/* not an fd, of no context: where the process's struct migr_ahead lies (migr/ahead.h). addr,
				 * bytes */
	MIGR_FD_CM_PORT,	/* not an fd, of no context: a port that an id of librdmacm is bound to. obj_type: enum
				 * rdma_ucm_port_space; obj_handle: the port; ring: AF_INET or AF_INET6; addr, bytes:
				 * the address; pgoff: bit n for each RDMA_OPTION_ID_n that is on */
	MIGR_FD_SOURCE,		/* not an fd: a GID that address handles of the context send from, one of each port, type and
				 * family. obj_handle: the port; obj_type: enum ib_uverbs_gid_type; addr, bytes: the GID. An
				 * older migrd passes it over */
	MIGR_FD_COUNT,		/* not an fd: objects of one kind that the library knows in the context: of MRs always, of PDs, CQs,
				 * QPs and SRQs while none of its own are there. obj_type: the kind; addr: how many; bytes: grows with
				 * each call that makes or ends one; pgoff: such calls that are under way and may have been counted or
				 * not. An older migrd passes it over */
};

struct migr_fd_desc {
	uint32_t kind;		/* enum migr_fd_kind */
	int32_t fd;		/* number in the process; -1 for RING */
	int32_t context_fd;	/* the context it belongs to */
	uint32_t ctx_id;	/* migr.ko's id of the context */
	uint32_t cq_handle;	/* CHANNEL: one record per CQ on the channel, or MIGR_NO_HANDLE */
	uint32_t obj_type;	/* RING: enum migr_obj_type */
	uint32_t obj_handle;	/* RING */
	uint32_t ring;		/* RING: 0 CQ or RQ, 1 SQ */
	uint64_t addr;		/* RING: where it is mapped */
	uint64_t bytes;		/* RING */
	uint64_t pgoff;		/* RING: mmap offset, bytes */
};

/* A vQP of the process that gets the message. */
struct migr_qp_ref {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t pqpn;		/* present physical number (lets migrd name QPs by it) */
	uint32_t reserved;
};

struct migr_qp_spare {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t pqpn;		/* of the spare QP */
	uint32_t psn;		/* 24 bits: first PSN it will send */
};

struct migr_qp_connect {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t dest_qpn;	/* physical */
	uint32_t dest_psn;	/* the other side's first PSN */
	uint8_t dgid[16];
	uint8_t peer[16];	/* instance of the process at the other end */
};

struct migr_qp_psn {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t psn;		/* 24 bits: what the cut path's responder would have executed next */
	uint32_t reserved;
};

struct migr_memory_part {
	uint64_t start;		/* address in the process, whole pages */
	uint64_t bytes;
};

/* A NIC may have written to it. */
struct migr_nic_write {
	uint32_t ctx_id;
	uint32_t vqpn;		/* of the QP whose other end's memory it is; 0: this process's */
	uint32_t key;		/* physical: rkey there, lkey here */
	uint32_t reserved;
	uint64_t start;		/* as a work request names it, by the MR's iova; whole pages */
	uint64_t bytes;
};

/* What became of the work requests of a QP that had not completed when it was cut. */
struct migr_replay_stat {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t replayed;	/* are posted on the new path */
	uint32_t executed;	/* were, at the other end, and complete without */
	uint32_t lost;		/* atomics that were executed and whose answer is lost: the
				 * connection breaks */
	uint32_t reserved;
};

struct migr_drain_stat {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t sq_in_flight;	/* WRs not completed when the reply was made */
	uint32_t rq_outstanding;/* receives posted and not consumed */
	uint32_t kept;		/* WRs kept since suspension */
	uint32_t fake_cqes;	/* completions waiting in the fake CQs of this QP */
};

/* Old object -> new object, of one context. */
struct migr_handle_map {
	uint32_t ctx_id;	/* new context's id in migr.ko */
	int32_t context_fd;	/* number in the process: tells the context */
	uint32_t obj_type;	/* enum migr_obj_type; 0: the context itself; MIGR_HANDLE_PEER */
	uint32_t old_handle;	/* of the context itself: what KEYS call it (MIGR_KEY_CONTEXT); 0: nothing */
	uint32_t new_handle;
	uint32_t vqpn;		/* QP only */
	uint32_t pqpn;		/* QP only: new physical number. Of one in RTR also the first PSN that its
				 * peer was told (migr_rst_qp.new_psn) */
	uint32_t flags;		/* MIGR_HANDLE_* */
	uint8_t peer[16];	/* QP only: instance of the process at the other end; zero: not known */
};

/*
 * Not an object: `old_handle` is the context at the other end of the QP `vqpn`, as KEYS will call it. An older library passes
 * it over.
 */
#define MIGR_HANDLE_PEER	0x100u

/* The QP's connection did not survive: on RESUME it goes to ERR, as if its partner had died. */
#define MIGR_HANDLE_GONE	0x1u

struct migr_key_map {
	uint32_t vrkey;		/* as the owner's peers hold it */
	uint32_t prkey;
	uint8_t owner[16];	/* instance of the process that owns the memory */
};

/*
 * Not a key (their index is never 0): `prkey` is the port at which `owner` takes
 * librdmacm's connections up again. REBIND answers with it, KEYS passes it on.
 */
#define MIGR_KEY_CM_PORT	0x1u
/*
 * Not a key: those of `owner` that follow are of its context `prkey`, whose device numbers keys by itself. Each context of a
 * process that has moved is named, also if it has none. Before the first: of any, as an older library knows no contexts.
 */
#define MIGR_KEY_CONTEXT	0x2u

/* MOVES: no records; posts of unconnected QPs take the long way from now on. */
#define MIGR_MOVES_PREPARE	0x1u

/*
 * An unconnected QP, by the address that its peers hold (its birth's) and by its present one. vqpn and pqpn 0: processes
 * have moved from the one GID to the other, so who is to be connected to one of them may be elsewhere, or have other keys:
 * ask (WHERE).
 */
struct migr_move {
	uint8_t birth_gid[16];
	uint8_t gid[16];
	uint32_t vqpn;
	uint32_t pqpn;
};

struct migr_resume_stat {
	uint32_t ctx_id;
	uint32_t vqpn;
	uint32_t replayed_sends;
	uint32_t replayed_recvs;
	uint64_t suspended_ns;	/* CLOCK_MONOTONIC: flag up */
	uint64_t last_cqe_ns;	/* last completion of a data WR before the stop */
	uint64_t resumed_ns;
};

#endif /* MIGR_PROC_WIRE_H */
