/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The host-side restore API (MigrRDMA, SIGCOMM '25, Table 3): how a checkpoint
 * tool takes the RDMA resources of a process into an image and builds an equal
 * set in a fresh uverbs file descriptor, on another host, before the process
 * exists there. The CRIU plugin is its first user.
 *
 *	source						destination
 *	migr_rst_open()					migr_rst_read()
 *	migr_rst_dump(pid)				migr_rst_device_find(), open()
 *	migr_rst_process_describe(fds)			migr_rst_context_build()
 *	migr_rst_image_add()				migr_rst_qp_connect()
 *	migr_rst_write()				migr_rst_ring_find() per mapping
 *
 * The record of a process is a graph: contexts, and in each of them objects
 * that name what they were made from by their handles on the source ("old
 * handles"; uverbs handles are per context). Everything that a restore learns is
 * written beside the record into the same structs (members new_*), so after the
 * build the graph is the map from old to new.
 *
 * Memory regions are in the record but are not built here: memory is registered
 * by the process itself, when it has its memory back (migr/ahead.h).
 *
 * Functions return 0 or a negative errno, and then say in @err (may be NULL)
 * what failed, of what, and what to do. Nothing here is thread-safe on one
 * object; different objects are independent. No function keeps a pointer to its
 * arguments unless it says that it takes ownership.
 *
 * errnos beyond those of uapi/migr.h: EBADMSG an image that is damaged;
 * EPROTONOSUPPORT an image or module of another version; EOPNOTSUPP a kind of
 * object or device that cannot be restored; ENODEV no such RDMA device;
 * EADDRNOTAVAIL no GID that fits.
 */
#ifndef MIGR_RESTORE_H
#define MIGR_RESTORE_H

#include <stddef.h>
#include <stdint.h>

#include "migr/proc_wire.h"
#include "uapi/migr.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MIGR_RST_IMAGE_NAME	"migr.img"		/* in the image directory */
#define MIGR_RST_FILES_NAME	"migr-files.img"	/* written by the plugin at dump */
#define MIGR_RST_WIPED_NAME	"migr-wiped.img"	/* migrd makes it, empty, if the dump is to fill it: criu-plugin/wiped.c */
#define MIGR_RST_IMAGE_VERSION	1u
#define MIGR_RST_IMAGE_MAX	(256u << 20)		/* bytes; larger files are refused */

struct migr_rst_err {
	char text[256];		/* one line, NUL-terminated, no newline */
};

/* What else @errnum may mean when an object could not be made: " (..)", or "". */
const char *migr_rst_hint(int errnum);

/* ---- the graph ----------------------------------------------------------- */

/* What the driver answered to the creation of an object, as it is. */
struct migr_rst_resp {
	uint32_t len;		/* bytes in data */
	uint8_t data[MIGR_DRIVER_RESP_MAX];
};

struct migr_rst_pd {
	struct migr_pd_rec rec;
	uint32_t new_handle;
};

struct migr_rst_mr {
	struct migr_mr_rec rec;
};

struct migr_rst_cq {
	struct migr_cq_rec rec;
	struct migr_rst_resp resp;
	uint32_t new_handle;
	struct migr_rst_resp new_resp;
};

struct migr_rst_qp {
	struct migr_qp_rec rec;
	struct migr_rst_resp resp;
	uint32_t new_handle;
	uint32_t new_pqpn;	/* 24 bits; 0: not created yet */
	uint32_t new_psn;	/* 24 bits: the first it will send. Random; in RTR new_pqpn, for it is libmigr
				 * that has to know it when the application goes on to RTS */
	uint32_t new_state;	/* enum ib_qp_state of the new QP */
	int gone;		/* its connection is: it stays in INIT */
	struct migr_rst_resp new_resp;
	uint8_t new_sgid[16];	/* the GID it will send from */
	uint8_t new_sgid_index;
};

struct migr_rst_srq {
	struct migr_srq_rec rec;
	struct migr_rst_resp resp;
	uint32_t new_handle;
	struct migr_rst_resp new_resp;
};

/*
 * MW, AH, XRCD, DM: known, not built. Address handles are made again by the
 * process itself; a build refuses the rest.
 */
struct migr_rst_other {
	uint32_t obj_type;	/* enum migr_obj_type */
	struct migr_other_rec rec;
};

/* A completion channel. The kernel does not number them; their fds do. */
struct migr_rst_channel {
	int32_t fd_number;	/* in the process */
	int fd;			/* here; -1: not created */
};

struct migr_rst_context {
	struct migr_ctx_rec rec;	/* nr_* are the lengths of the arrays below */
	struct migr_rst_pd *pds;
	struct migr_rst_mr *mrs;
	struct migr_rst_cq *cqs;
	struct migr_rst_qp *qps;
	struct migr_rst_srq *srqs;
	struct migr_rst_other *others;
	uint32_t nr_others;		/* MWs and the rest */

	/* filled by a build */
	int fd_floor;			/* set before: fds are moved to this number or above */
	int cmd_fd, async_fd;		/* here; -1: none. Owned by the context once built */
	struct migr_rst_channel *channels;
	uint32_t nr_channels;
	uint32_t driver_id;		/* enum rdma_driver_id, found out */
	uint32_t new_comp_vectors;	/* completion vectors of the device here */
	uint32_t new_ctx_id;		/* of migr.ko here; 0: not known */
	char new_ibdev[MIGR_IBDEV_NAME_MAX];
};

struct migr_rst_process {
	uint32_t pid;			/* on the source, as its migrd saw it */
	uint32_t ns_pid;		/* in its own pid namespace */
	uint8_t instance[16];		/* of libmigr, as in HELLO */
	struct migr_rst_context *contexts;
	uint32_t nr_contexts;
	struct migr_fd_desc *fds;	/* which fd is which, where the rings lie */
	uint32_t nr_fds;
	struct migr_rst_ring_index *rings;	/* NULL: not prepared yet */
};

struct migr_rst_image {
	struct migr_rst_process **processes;
	uint32_t nr_processes;
};

/* ---- record: talk to migr.ko ---------------------------------------------- */

struct migr_rst;		/* a generic netlink session; CAP_NET_ADMIN to dump */

/*
 * Opens a session. -ENOENT: migr.ko is not loaded; -EPROTONOSUPPORT: it speaks
 * another ABI version.
 */
int migr_rst_open(struct migr_rst **out, struct migr_rst_err *err);
void migr_rst_close(struct migr_rst *s);

/*
 * Contexts on record, of @pid (0: of every process). *out is an array for
 * free(); NULL when there are none.
 */
int migr_rst_contexts(struct migr_rst *s, uint32_t pid, struct migr_ctx_rec **out, uint32_t *nr,
		      struct migr_rst_err *err);

/*
 * Dumps the record of process @pid. A process without RDMA resources gives a
 * process without contexts. The result is the caller's, for
 * migr_rst_process_free() or migr_rst_image_add().
 */
int migr_rst_dump(struct migr_rst *s, uint32_t pid, struct migr_rst_process **out,
		  struct migr_rst_err *err);

/* ---- build the graph by hand ---------------------------------------------- */

struct migr_rst_process *migr_rst_process_new(uint32_t pid);	/* NULL: no memory */
void migr_rst_process_free(struct migr_rst_process *p);		/* closes nothing */

/* Each appends a zeroed element and returns it until the next append; NULL: no memory. */
struct migr_rst_context *migr_rst_add_context(struct migr_rst_process *p);
struct migr_rst_pd *migr_rst_add_pd(struct migr_rst_context *c);
struct migr_rst_mr *migr_rst_add_mr(struct migr_rst_context *c);
struct migr_rst_cq *migr_rst_add_cq(struct migr_rst_context *c);
struct migr_rst_qp *migr_rst_add_qp(struct migr_rst_context *c);
struct migr_rst_srq *migr_rst_add_srq(struct migr_rst_context *c);
struct migr_rst_other *migr_rst_add_other(struct migr_rst_context *c);

/* What the process's libmigr answered to DESCRIBE, copied; replaces what was there. */
int migr_rst_process_describe(struct migr_rst_process *p, const struct migr_fd_desc *fds, uint32_t nr,
			      const uint8_t instance[16]);

/*
 * Says whether the record can be restored: it is complete, every object's
 * parents are in it, every context has its fd described, no kind of object that
 * cannot be restored. Call it before anything is stopped.
 */
int migr_rst_process_check(const struct migr_rst_process *p, struct migr_rst_err *err);

/* ---- image ---------------------------------------------------------------- */

struct migr_rst_image *migr_rst_image_new(void);
void migr_rst_image_free(struct migr_rst_image *img);	/* and its processes */
/* Takes ownership of @p, on success only. */
int migr_rst_image_add(struct migr_rst_image *img, struct migr_rst_process *p);

/* Record and fds to bytes (restore/migr.proto in an envelope with length and CRC) and back. */
int migr_rst_pack(const struct migr_rst_image *img, void **buf, size_t *len, struct migr_rst_err *err);
int migr_rst_unpack(const void *buf, size_t len, struct migr_rst_image **out, struct migr_rst_err *err);

/*
 * The same as a file MIGR_RST_IMAGE_NAME in the directory @dirfd: mode 0600,
 * written beside it, fsync'ed and renamed, so that it is whole or not there.
 * read: -ENOENT when there is none.
 */
int migr_rst_write(const struct migr_rst_image *img, int dirfd, struct migr_rst_err *err);
int migr_rst_read(int dirfd, struct migr_rst_image **out, struct migr_rst_err *err);

/* Which file of the checkpoint tool's images is which fd of ours. */
struct migr_rst_file {
	uint32_t id;		/* the checkpoint tool's */
	uint32_t pid;		/* migr_rst_process.pid */
	uint32_t ctx_id;	/* migr_ctx_rec.ctx_id on the source */
	uint32_t kind;		/* enum migr_fd_kind */
	int32_t fd_number;	/* in the process */
	uint32_t nonblock;	/* it was O_NONBLOCK: 0 or 1 */
	uint32_t async;		/* it was O_ASYNC: 0 or 1; not known in older images */
};
int migr_rst_files_write(const struct migr_rst_file *files, uint32_t nr, int dirfd,
			 struct migr_rst_err *err);
/* *out is for free(). -ENOENT: there is no such file. */
int migr_rst_files_read(int dirfd, struct migr_rst_file **out, uint32_t *nr, struct migr_rst_err *err);

/* ---- restore -------------------------------------------------------------- */

/*
 * Finds the RDMA device to restore onto: the one named @want if this host has
 * it, else the only one there is. Writes its name and the path of its uverbs
 * device.
 */
int migr_rst_device_find(const char *want, char ibdev[MIGR_IBDEV_NAME_MAX], char path[64],
			 struct migr_rst_err *err);

#define MIGR_RST_PORTS 8

struct migr_rst_port {
	uint32_t state;		/* enum ib_port_state; 4: active */
	uint32_t active_mtu;	/* enum ib_mtu */
};

/* What a device has to give, and how much of it is taken. */
struct migr_rst_device {
	char ibdev[MIGR_IBDEV_NAME_MAX];
	uint32_t driver_id;	/* enum rdma_driver_id */
	uint64_t max_mr_size;	/* bytes */
	uint32_t max_qp, max_cq, max_mr, max_pd, max_srq, max_mw, max_ah;
	uint32_t used_qp, used_cq, used_mr, used_pd, used_srq;
	uint32_t max_qp_wr, max_sge, max_cqe, max_srq_wr, max_srq_sge;
	uint32_t max_qp_rd_atom, max_qp_init_rd_atom;
	uint32_t nr_ports;
	struct migr_rst_port ports[MIGR_RST_PORTS];	/* port 1 first */
};

/* Of the device that migr_rst_device_find() finds; with a context of its own, for a moment. */
int migr_rst_device_query(const char *want, struct migr_rst_device *d, struct migr_rst_err *err);

/*
 * The GIDs in use, of all ports of the device that migr_rst_device_find() finds: how many, or a negative errno. One command,
 * where sysfs has a file for each of a thousand places of the table. EINVAL: more than @max.
 */
#define MIGR_RST_GIDS 256	/* the index has 8 bits in the commands that take it */
struct ib_uverbs_gid_entry;
int migr_rst_device_gids(const char *want, struct ib_uverbs_gid_entry *gids, uint32_t max, struct migr_rst_err *err);

/*
 * One by one, all with raw uverbs commands, so that a queue ring that may be
 * mapped only once is left to the restored process. @c->cmd_fd has to be an
 * open uverbs device; its opener may have been another process.
 *
 * context: GET_CONTEXT; gives @c->async_fd.
 * channel: completion channel, an fd.
 * pd, cq, srq, qp: parents must have been built. A QP stays in RESET; an SRQ is
 * not armed: whoever posts its receives again does that.
 */
int migr_rst_context_create(struct migr_rst_context *c, struct migr_rst_err *err);
int migr_rst_channel_create(struct migr_rst_context *c, struct migr_rst_channel *ch,
			    struct migr_rst_err *err);
int migr_rst_pd_create(struct migr_rst_context *c, struct migr_rst_pd *pd, struct migr_rst_err *err);
/* @channel_fd: -1 for none. */
int migr_rst_cq_create(struct migr_rst_context *c, struct migr_rst_cq *cq, int channel_fd,
		       struct migr_rst_err *err);
int migr_rst_srq_create(struct migr_rst_context *c, struct migr_rst_srq *srq, struct migr_rst_err *err);
int migr_rst_qp_create(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err);

/* RESET -> INIT, with port, pkey index and access flags (or qkey) of the record. */
int migr_rst_qp_init(struct migr_rst_context *c, struct migr_rst_qp *qp, struct migr_rst_err *err);

struct migr_rst_dest {
	uint32_t qpn;		/* physical, 24 bits */
	uint32_t psn;		/* 24 bits: the other side's first PSN */
	uint8_t dgid[16];
};
/*
 * INIT -> RTR -> RTS (as far as the QP on record had come) towards @dest; everything else (path MTU, timers, retries,
 * depth of reads, traffic class, ...) is the record's. Sends from
 * @qp->new_sgid, starting with @qp->new_psn.
 */
int migr_rst_qp_connect(struct migr_rst_context *c, struct migr_rst_qp *qp,
			const struct migr_rst_dest *dest, struct migr_rst_err *err);

/*
 * All of it for one context: takes @cmd_fd (moves and closes it, also on
 * failure), creates context, channels, PDs, CQs, SRQs, QPs, finds the GIDs and PSNs
 * and moves the QPs to INIT (those that were in RESET stay there; unconnected
 * types that were in RTS go to RTS; broken ones to ERR). On failure everything
 * is released.
 */
int migr_rst_context_build(const struct migr_rst_process *p, struct migr_rst_context *c, int cmd_fd,
			   struct migr_rst_err *err);
/* Closes the fds of a built context; the kernel destroys the objects with the last reference. */
void migr_rst_context_release(struct migr_rst_context *c);

/*
 * Finds the GID of this host to send from, on @port of the device of @c (a
 * created context): of the type of the one in @like, and the nearest to it
 * (migr_gid_nearness()).
 */
int migr_rst_gid_find(const struct migr_rst_context *c, uint32_t port, const struct migr_ah_attr *like,
		      uint8_t gid[16], uint8_t *index, struct migr_rst_err *err);

/* A queue's ring in a driver's answer. */
struct migr_rst_ring {
	uint64_t pgoff;		/* mmap offset, bytes */
	uint64_t bytes;
};
/*
 * Rings of an object by the driver's answer: out[0] CQ, SRQ or RQ, out[1] SQ (numbered
 * as migr_fd_desc.ring). A ring that the object has not is 0 bytes. Returns how
 * many entries of out are valid, or -EOPNOTSUPP for an answer of no known driver.
 */
int migr_rst_rings(uint32_t obj_type, const struct migr_rst_resp *resp, struct migr_rst_ring out[2]);

/*
 * The process had a ring mapped at @addr from offset @old_pgoff: finds which
 * context it belongs to and its offset now. -ENOENT: it is no ring of @p;
 * -EMSGSIZE: its size is another here.
 */
int migr_rst_ring_find(struct migr_rst_process *p, uint64_t addr, uint64_t old_pgoff,
		       struct migr_rst_context **c, uint64_t *new_pgoff, struct migr_rst_err *err);

/*
 * Prepares migr_rst_ring_find(), which else does so at its first call; to be called when
 * the objects of @p are built and its fds are described, and nothing of it changes any
 * more (or again when something has). -ENOMEM.
 */
int migr_rst_rings_index(struct migr_rst_process *p);

/* ---- find in the graph; NULL or -1: not there ------------------------------ */

struct migr_rst_context *migr_rst_find_context(const struct migr_rst_image *img, uint32_t src_ctx_id);
struct migr_rst_qp *migr_rst_find_qp(const struct migr_rst_context *c, uint32_t vqpn);
/* The number of the fd of @kind of a context in the process (CONTEXT or ASYNC). */
int migr_rst_fd_number(const struct migr_rst_process *p, uint32_t src_ctx_id, uint32_t kind);

#ifdef __cplusplus
}
#endif

#endif /* MIGR_RESTORE_H */
