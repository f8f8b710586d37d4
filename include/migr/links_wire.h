/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What libmigr.so and migrd say to each other about links (docs/failover.md),
 * over a UNIX SOCK_SEQPACKET socket of its own (MIGR_LINKS_SOCKET). One packet
 * is one message: struct migr_links_msg, then `count` records of the type named
 * beside the message. There are no messages of several packets.
 *
 * A socket of its own, because here the library asks and migrd answers, which
 * at proc.sock is the other way round: neither end has to take apart what is
 * an answer to it and what is a question. It needs no migr.ko, no container
 * and no rights; MIGR_LINKS_SOCKET in the environment names another path. A
 * library without a policy does not open it, but to ask for the configuration.
 *
 * Library to migrd: a request of type T is answered by exactly one reply of type
 * T | MIGR_LINKS_REPLY, `seq` echoed. Several may be on their way at once (at
 * most MIGR_LINKS_MAX_PENDING), and replies come in any order. migrd to
 * library: pushes, T without MIGR_LINKS_REPLY and seq 0, at any time after the
 * reply to HELLO; they are not answered. A push may come between a request and
 * its reply. Pushes are hints that may be lost when the process does not
 * read: what matters is in the snapshot after HELLO, and in what is asked again.
 *
 * A packet whose version, length, record size or type does not fit: migrd closes
 * after an answer EPROTO with text, if there was a header; the library
 * closes, reports, and connects again later. What fits and cannot be done is a
 * status, and the connection stays.
 *
 * status of replies (0 or a positive errno; `text` says what, and what to do):
 *   EPROTO        does not fit; migrd closes. Text names the versions if it is those
 *   EINVAL        a field is out of its range; nothing was done. PUBLISH: or a name
 *                 is not that of a QP of this process, as far as is known yet: its
 *                 GID may be new. May be asked again
 *   EEXIST        HELLO: another living process on this host has this instance.
 *                 PUBLISH: another living process has published this name here
 *   E2BIG, ENOSPC a limit below; nothing was done
 *   EBUSY         more than MIGR_LINKS_MAX_PENDING unanswered; that one was not done
 *   EACCES        the first message has to be HELLO, or CONFIG
 * and of what is asked of the directory (LOOKUP and CHANNEL: of each record):
 *   EAGAIN        not known *yet*, ask again, with pauses (10 ms, doubled, at most 1 s)
 *   ENOENT        LOOKUP: every host has answered and none has this GID: the
 *                 destination is outside of the peers in migrd's configuration.
 *                 Ask again rarely (10 s). CHANNEL: nobody has that instance
 *   EHOSTUNREACH  the directory cannot be reached: a peer's migrd or Redis does
 *                 not answer, text names it. Fail closed: no backup until it
 *                 is known; ask again as with EAGAIN
 *   ESTALE        CHANNEL: the peer is at a higher round, see there
 * EHOSTUNREACH in `status` of the reply as a whole is the same for all its records.
 *
 * What a process has told vanishes when its connection ends. So a library
 * that connects (again) says HELLO, LINKS, PUBLISH of everything, STATE of everything.
 * Paths and channels that stand do not need migrd: its end takes nothing from them.
 * A checkpoint can contain no connection: the library closes this one, too,
 * before it answers FREEZE (proc_wire.h), and opens it again after RESUME or ROLLBACK.
 * After a fork() the child closes the inherited one at once, and has an instance of its own.
 */
#ifndef MIGR_LINKS_WIRE_H
#define MIGR_LINKS_WIRE_H

#include <stdint.h>

#include "proc_wire.h"	/* struct migr_text_range */

#define MIGR_LINKS_VERSION	1
#define MIGR_LINKS_SOCKET	"/run/migr/links.sock"	/* environment MIGR_LINKS_SOCKET overrides */

/* Limits; all but the first two are of one process. */
#define MIGR_LINKS_MAX_RECORDS	256		/* per packet */
#define MIGR_LINKS_PACKET_BYTES	(144u << 10)	/* per packet, with its header; fits the default SO_SNDBUF */
#define MIGR_LINKS_MAX_LINKS	8		/* E2BIG */
#define MIGR_LINKS_MAX_VQPS	65536		/* published; ENOSPC */
#define MIGR_LINKS_MAX_CHANNELS	4096		/* (peer, link) pairs told; ENOSPC */
#define MIGR_LINKS_MAX_PENDING	16		/* unanswered requests; EBUSY */
#define MIGR_LINKS_TEXT_MAX	120
#define MIGR_LINKS_WHY_MAX	56

#define MIGR_LINKS_REPLY	0x8000u

enum migr_links_type {
	/* ---- library -> migrd; each is answered ---- */

	/* first packet; instance in the header. One record: migr_links_hello. text: where the
	 * process has its configuration from ("/etc/migr/links.json", "MIGR_LINKS"), for
	 * `migrctl links`. EEXIST: see above. When the same process connects again, its
	 * old connection ends. After the reply: one or more PORTS pushes, of all ports. */
	MIGR_LINKS_HELLO = 1,

	/* no records. reply records: bytes (record_size 1) of the host's configuration of links,
	 * as it is in migrd's file (/etc/migr/links.json unless configured): for
	 * processes that cannot read it, as those of ordinary users and in a container. Also
	 * before HELLO. count 0: there is none. */
	MIGR_LINKS_CONFIG,

	/* records: migr_links_link, all links of this process, in their order; replaces what
	 * was told before. Again whenever one changes. E2BIG: more than MIGR_LINKS_MAX_LINKS. */
	MIGR_LINKS_LINKS,

	/* records: migr_links_vqp. Adds them, or replaces what was told of the same name.
	 * EEXIST, ENOSPC, EINVAL: none of them was taken; reply arg: index of the offending record. */
	MIGR_LINKS_PUBLISH,

	/* records: migr_links_name. These vQPs are destroyed; none: all that were published.
	 * A name that was not published is no error. */
	MIGR_LINKS_WITHDRAW,

	/* records: migr_links_name of destinations. reply records: migr_links_found, as many and in the
	 * same order. status of the reply 0, also if records have one of their own. Takes up to 5 s
	 * when hosts are silent. */
	MIGR_LINKS_LOOKUP,

	/* records: migr_links_channel: this end of the channel to `peer` on `link`. reply records:
	 * migr_links_channel, as many, same order: the other end, if its status is 0. See the struct. */
	MIGR_LINKS_CHANNEL,

	/* records: migr_links_channel, of which peer and link count: this process has no channel there
	 * any more and wants none. What is not known is no error. To make another one
	 * say CHANNEL with the next round; this is not needed then. */
	MIGR_LINKS_CHANNEL_END,

	/* records: migr_links_vqp_state. How published vQPs are; of what has changed, not more often
	 * than every 100 ms, never on the way of a switchover. arg: highest `serial` of a PORTS
	 * record that is settled as far as it can be: everything has moved off a port that went
	 * down, or says in `why` why it has not. Names that are not published are left out, no error. */
	MIGR_LINKS_STATE,

	/* records: migr_links_switch. Switchovers that have ended, one record for each pair of links
	 * and process at the other end. migrd keeps the last 16. */
	MIGR_LINKS_SWITCHED,

	/* records: migr_text_range, at most MIGR_PROC_MAX_TEXT_RANGES (E2BIG), as in HELLO of proc_wire.h.
	 * status 0: since this message came each thread of the process has been seen outside of
	 * them once, or was born, or has ended. So who was inside before has left. A thread
	 * stops for a moment when it is looked at, also the one that waits for the answer.
	 * arg: limit in ms (0: one look at each); migrd's own, if that is less. One of a process at
	 * a time; all else is answered meanwhile. It is given up when the connection ends.
	 * ETIMEDOUT: a thread stayed inside, text has its number in migrd's pid namespace.
	 * EPERM: cannot be traced, as when a debugger or a checkpoint does. ESRCH: the process that
	 * has connected is no more. After either ask again, rarely (1 s). */
	MIGR_LINKS_OUTSIDE,

	/* ---- migrd -> library; pushed ---- */

	/* records: migr_links_port. After HELLO all RDMA ports of the host; then each that changes. Of two
	 * records of one port the one with the higher serial is right. */
	MIGR_LINKS_PORTS = 64,

	/* records: migr_links_channel: `peer` has told its end on `link` with `round`, and this process has
	 * none of that round. Ignore it if no vQP is connected to that instance (yet: it
	 * comes out at the next CHANNEL); else make an end of that round and say CHANNEL. */
	MIGR_LINKS_KNOCK,
};

struct migr_links_msg {
	uint16_t version;	/* MIGR_LINKS_VERSION */
	uint16_t type;		/* enum migr_links_type, | MIGR_LINKS_REPLY */
	uint32_t flags;		/* 0 */
	uint32_t seq;		/* chosen by the library, not 0, echoed; 0 in pushes */
	int32_t status;		/* replies: 0 or a positive errno; else 0 */
	uint32_t count;		/* records that follow, 0..MIGR_LINKS_MAX_RECORDS (CONFIG: bytes, up to what
				 * fits a packet) */
	uint32_t record_size;	/* bytes of one record, also with count 0 if the sender likes */
	uint64_t arg;		/* as said beside the message; else 0 */
	uint8_t instance[16];	/* of the process that sends or gets it; the one in HELLO of proc_wire.h,
				 * the same after a migration. Not all zero */
	char text[MIGR_LINKS_TEXT_MAX];	/* NUL-terminated */
};

/* In a record all reserved fields are 0; migrd refuses others with EINVAL. Numbers are host byte order. */

enum migr_links_policy {
	MIGR_LINKS_OFF,		/* errors reach the application */
	MIGR_LINKS_RESEND,
	MIGR_LINKS_EXACT,
};

enum migr_links_making {
	MIGR_LINKS_CACHED,	/* a path on the backup link is made ahead */
	MIGR_LINKS_REBUILD,	/* none is: it is made when the vQP goes there */
	MIGR_LINKS_POOL,	/* some are for all vQPs of a kind between two processes; if either end does not say POOL,
				 * as with REBUILD */
};

/* An end that does not say RELAYED, as one of before there was this, has 0 here. */
enum migr_links_atomics {
	MIGR_LINKS_DIRECT,	/* posted to the path */
	MIGR_LINKS_RELAYED,	/* executed by the other end's library, if either end says so */
};

struct migr_links_hello {
	int32_t pid;		/* own number in its own pid namespace: for people. migrd goes by SO_PEERCRED */
	uint32_t policy;	/* enum migr_links_policy: what vQPs get that nothing else is said of */
	uint32_t generation;	/* how often this process was restored */
	uint32_t heartbeat_ms;	/* 0: none */
	uint32_t heartbeat_misses;	/* after so many a link counts as silent */
	uint16_t making;	/* enum migr_links_making: of what vQPs get that nothing else is said of */
	uint16_t atomics;	/* enum migr_links_atomics: the same */
};

enum migr_links_link_state {
	MIGR_LINKS_LINK_MAKING,	/* device opened, objects are being made */
	MIGR_LINKS_LINK_UP,	/* usable */
	MIGR_LINKS_LINK_DOWN,	/* not used: see why */
	MIGR_LINKS_LINK_ABSENT = 4,	/* configured, but there is no such device, port or GID; 3 is not used */
};

/* What a failure or a change of link was noticed by. */
enum migr_links_cause {
	MIGR_LINKS_CAUSE_NONE,
	MIGR_LINKS_CAUSE_COMPLETION,	/* an error completion */
	MIGR_LINKS_CAUSE_EVENT,		/* a port or device event */
	MIGR_LINKS_CAUSE_NETLINK,	/* PORTS: the netdev has no carrier or is not up */
	MIGR_LINKS_CAUSE_HEARTBEAT,
	MIGR_LINKS_CAUSE_CHANNEL,	/* a channel broke */
	MIGR_LINKS_CAUSE_PEER,		/* the other end said so: STATE */
	MIGR_LINKS_CAUSE_OPERATOR,	/* PORTS: migrctl link down */
	MIGR_LINKS_CAUSE_APPLICATION,	/* migr_link_down() */
	MIGR_LINKS_CAUSE_RETURN,	/* back to the default link, which works again */
	MIGR_LINKS_CAUSE_PREFER,	/* PORTS: migrctl links prefer */
};

struct migr_links_link {
	uint32_t link;		/* index, 0..MIGR_LINKS_MAX_LINKS-1: the configured order. The n-th of one
				 * end belongs with the n-th of the other */
	uint32_t port;		/* 1.. */
	char device[64];	/* ibdev name, NUL-terminated: "rxe0" */
	uint8_t gid[16];	/* zero while ABSENT or not known */
	uint32_t gid_index;
	uint32_t state;		/* enum migr_links_link_state */
	uint32_t cause;		/* enum migr_links_cause, of its last going down; NONE: never was */
	uint16_t channels;	/* that stand, and are not in doubt after a failure */
	uint16_t spares;	/* paths in pools that are ready */
	uint32_t vqps;		/* that have their path here now */
	uint32_t backups;	/* vQPs that would go here next */
	char why[MIGR_LINKS_WHY_MAX];	/* NUL-terminated; empty: nothing to say */
};

/* The name of a vQP for everybody: its address at birth, as its peers' applications hold it. */
struct migr_links_name {
	uint8_t gid[16];	/* not zero */
	uint32_t vqpn;		/* 24 bits, not 0 */
	uint32_t reserved;
};

/* One path of a vQP: a QP that waits for the QP of the same link and serial at the other end. */
struct migr_links_path {
	uint32_t link;		/* of the process that has it; below MIGR_LINKS_MAX_LINKS */
	uint32_t serial;	/* how often the path on this link was made anew, from 0. Two paths
				 * belong together if it is equal at both ends */
	uint8_t gid[16];	/* that it sends from; not zero */
	uint32_t qpn;		/* physical, 24 bits, not 0 */
	uint32_t psn;		/* 24 bits: first PSN that it will send */
	uint16_t lid;		/* InfiniBand; 0: RoCE */
	uint8_t mtu;		/* enum ibv_mtu, the most that the port can do, 1..5; the smaller of both is used */
	uint8_t reserved[5];
};

/* PUBLISH: what a vQP has. STATE of it comes after the reply. */
struct migr_links_vqp {
	struct migr_links_name name;
	uint32_t policy;	/* enum migr_links_policy; OFF: need not be published */
	uint32_t default_link;	/* that it was born on */
	uint32_t paths;		/* valid ones in path[], 0..MIGR_LINKS_MAX_LINKS, no link twice. The default
				 * link's is among them. A path that is not made yet is left out and
				 * told later by another PUBLISH */
	uint16_t making;	/* enum migr_links_making; if either end does not say CACHED none is made ahead */
	uint16_t atomics;	/* enum migr_links_atomics; unless both ends say RELAYED they go direct. It says, too, that this
				 * library answers ATOMIC (libmigr/links/channel.h) */
	uint32_t links;		/* that it can go to, by bit: its default link, those of its paths, and what else is there */
	uint32_t reserved;
	struct migr_links_path path[MIGR_LINKS_MAX_LINKS];	/* the others: zero */
};

/* LOOKUP: the answer for one name. */
struct migr_links_found {
	struct migr_links_vqp vqp;	/* as published by its owner; only the name if status is not 0 */
	uint8_t instance[16];	/* the process that has it; zero if status is not 0. May be the asker */
	int32_t status;		/* 0, EAGAIN, ENOENT, EHOSTUNREACH; text of the reply is about the first
				 * record that is neither 0 nor EAGAIN */
	uint32_t links;		/* number of valid entries in gid[] */
	uint8_t gid[MIGR_LINKS_MAX_LINKS][16];	/* the links of that process by index; zero: not
				 * usable (absent). For the channel to it */
	char host[32];		/* name of the host it is on; NUL-terminated, cut if longer */
};

/*
 * CHANNEL: one end of the channel between two processes on one link. Both tell their
 * own and get the other's, in any order; who comes first gets EAGAIN and
 * asks again with the same record (or when there is a KNOCK).
 *
 * `round` tells the channels of one pair and link apart: 1 for the first, one more whenever
 * either end gives it up and makes another QP. An answer comes only from an end
 * of the same round. Who is behind gets ESTALE, with the round of the other end in
 * the record (or KNOCK with it): it gives up its QP, makes one, and tells it with that
 * round. Rounds only grow; a smaller one than the last told is EINVAL. Telling the same
 * round with another qpn is EINVAL, too: one more, please. After its restore a process goes on counting.
 *
 * There is no channel of a process to itself (EINVAL), and none between links of different index.
 */
struct migr_links_channel {
	uint8_t peer[16];	/* instance of the process at the other end, from LOOKUP */
	uint32_t link;
	uint32_t round;		/* 1.. */
	uint8_t gid[16];	/* of the end told: the teller's; in answers the peer's */
	uint32_t qpn;		/* 24 bits, not 0 */
	uint32_t psn;		/* 24 bits: first PSN that this end will send */
	uint16_t lid;
	uint8_t mtu;		/* as in migr_links_path */
	uint8_t reserved[5];
	int32_t status;		/* answers: 0, EAGAIN, ENOENT, EHOSTUNREACH, ESTALE, EINVAL, ENOSPC. Else 0.
				 * gid, qpn, psn, lid, mtu are of the peer if 0, else zero */
	uint32_t reserved2;
};

enum migr_links_vqp_phase {
	MIGR_LINKS_VQP_MAKING,	/* no backup yet; why says what it waits for */
	MIGR_LINKS_VQP_READY,	/* there is a link to go to */
	MIGR_LINKS_VQP_NONE,	/* there is no backup, nor anything of one; why says why. What a device has refused is tried again */
	MIGR_LINKS_VQP_SWITCHING,
	MIGR_LINKS_VQP_BROKEN,	/* its errors have reached the application */
};

/* STATE: how the published vQPs are that have changed, and those that are not published (MIGR_LINKS_VQP_NONE), of which each packet
 * replaces what the one before has told: all that there are, or the first 256. One that is published later is none of these any more. */
struct migr_links_vqp_state {
	struct migr_links_name name;
	uint32_t link;		/* that carries it now */
	uint32_t epoch;		/* of its last change of path: docs/failover.md */
	uint32_t phase;		/* enum migr_links_vqp_phase */
	uint32_t atomics;	/* enum migr_links_atomics: how they go now */
	char why[MIGR_LINKS_WHY_MAX];	/* NUL-terminated; one line, no number of this vQP in it, so that
				 * equal ones can be counted: "has an SRQ", "peer has no libmigr" */
};

enum migr_links_outcome {
	MIGR_LINKS_SWITCH_DONE,
	MIGR_LINKS_SWITCH_BROKEN,	/* some or all vQPs: the error went to the application */
};

/* SWITCHED: one change of link that has ended, of all vQPs that went together. */
struct migr_links_switch {
	uint8_t peer[16];	/* instance at the other end; zero: several */
	uint32_t from;		/* link index */
	uint32_t to;		/* link index; of several tries the last */
	uint32_t cause;		/* enum migr_links_cause */
	uint32_t outcome;	/* enum migr_links_outcome */
	uint32_t vqps;		/* that changed */
	uint32_t broken;	/* that did not, of those that had to */
	uint32_t replayed;	/* work requests posted again */
	uint32_t executed;	/* had been, at the other end, and completed without */
	uint32_t lost;		/* atomics that were executed and whose answer is lost */
	uint32_t tries;		/* 1: the first backup link took it */
	uint64_t when_ns;	/* CLOCK_REALTIME: noticed */
	uint64_t detect_ns;	/* last good completion to noticed; 0: not known */
	uint64_t cut_ns;	/* noticed to cut here: everything flushed */
	uint64_t told_ns;	/* noticed to the other end's STATE here */
	uint64_t resume_ns;	/* noticed to all resumed */
	uint64_t bytes;		/* of what was replayed */
};

/* Of a port; link down means any of the DOWN bits. */
#define MIGR_LINKS_PORT_DOWN_OPERATOR	0x1u	/* migrctl link down */
#define MIGR_LINKS_PORT_DOWN_NETLINK	0x2u	/* its netdev is not up and running; debounced */
#define MIGR_LINKS_PORT_GONE		0x4u	/* the device was removed */
#define MIGR_LINKS_PORT_DOWN		(MIGR_LINKS_PORT_DOWN_OPERATOR | MIGR_LINKS_PORT_DOWN_NETLINK | MIGR_LINKS_PORT_GONE)
#define MIGR_LINKS_PORT_PREFERRED	0x8u	/* migrctl links prefer: vQPs that have a path there go there and stay,
						 * their default link or not; at most one port of a host has it */
#define MIGR_LINKS_PORT_NO_NETDEV	0x10u	/* its state is not watched: InfiniBand, or not found */

/* PORTS: a port of an RDMA device of this host. */
struct migr_links_port {
	char device[64];	/* ibdev name, NUL-terminated */
	uint32_t port;		/* 1.. */
	uint32_t flags;		/* MIGR_LINKS_PORT_* */
	uint64_t serial;	/* of this change; grows over all ports, and over restarts of migrd. See STATE */
	char netdev[16];	/* behind it; empty: none known */
	uint32_t flaps;		/* how often it went down since migrd looks */
	uint32_t reserved;
};

#endif /* MIGR_LINKS_WIRE_H */
