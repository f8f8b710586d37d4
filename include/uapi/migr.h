/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR Linux-OpenIB */
/*
 * migr: the kernel/user ABI, whole. Shared by migr.ko, libmigr.so, the restore
 * library, migrd and migrctl.
 *
 * Two doors:
 *
 *  /dev/migr (misc device, mode 0666): what a process may ask about its *own*
 *  RDMA user contexts. Possession of the uverbs file descriptor is the proof.
 *  open(), MIGR_IOC_ATTACH with that descriptor, then mmap() of the two
 *  translation tables, and MIGR_IOC_BIND_* to give an own object the virtual
 *  name it had before a switchover. One open file serves one user context.
 *  The mappings outlive close() and rmmod.
 *
 *  Generic netlink family "migr": the host's record. Dumping needs
 *  CAP_NET_ADMIN, and so does changing anything of another process (in the
 *  user namespace that owns the network namespace of the socket, and in that
 *  of the process). From a network namespace that is not the host's, only
 *  contexts of processes in it are seen, and one that was there before the
 *  module only once its process has attached. The group MIGR_GENL_MCGRP_EVENTS
 *  tells the host's namespace of contexts and QPs that come and go.
 *
 * Names: "physical" numbers are what the NIC of the moment gave; "virtual"
 * ones are what the application holds. They are equal at birth unless the
 * number is already held (see the design). All QPNs are 24 bits wide. A key
 * is a 24-bit index and an 8-bit tag: index = key >> 8.
 *
 * Errors, for the whole ABI: EPROTONOSUPPORT other ABI version; EOPNOTSUPP
 * known field with a value that is not supported; ENOENT no such context,
 * object or number; EEXIST the virtual name is already taken; EBUSY not allowed
 * now; EPERM not allowed for this caller; EINVAL malformed; ERANGE wider than
 * 24 bits.
 *
 * The ABI grows by adding: new attributes, commands, and fields at the end of
 * a record struct (readers take min(length, sizeof)).
 */
#ifndef _UAPI_MIGR_H
#define _UAPI_MIGR_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define MIGR_ABI_VERSION	1

#define MIGR_QPN_MASK		0xffffffu
#define MIGR_NR_INDEX		(1u << 24)	/* entries of either table */

/* ---- /dev/migr ---------------------------------------------------------- */

#define MIGR_DEV_NAME		"migr"

struct migr_ioc_attach {
	__u32 abi_version;	/* in: MIGR_ABI_VERSION; out: the module's */
	__s32 uverbs_fd;	/* in: open /dev/infiniband/uverbsN with a context */
	__u32 flags;		/* in: must be 0 */
	__u32 ctx_id;		/* out: id of the context in the record */
};

/*
 * Gives the own QP with number @pqpn the virtual number @vqpn. A name moves: if
 * another QP of the same context has it (the old path of a partner), that one
 * becomes its former holder (MIGR_QP_FORMER); its entry of the QPN table stays
 * until it is destroyed, so that late completions carry the right name. Names
 * are unique within a context: others may hold the same number, and one that is
 * reserved can be bound, by what comes home.
 */
struct migr_ioc_bind_qp {
	__u32 vqpn;		/* 24 bits */
	__u32 pqpn;		/* 24 bits */
};

/*
 * Gives the own MR @handle the virtual keys it was born with. An MR whose keys
 * were only chosen at its creation gives way and gets others; EEXIST if their
 * index has been bound to another MR, EBUSY while that one is being destroyed.
 */
struct migr_ioc_bind_mr {
	__u32 handle;		/* uverbs handle of the MR */
	__u32 vlkey;
	__u32 vrkey;		/* 0: no remote access */
	__u32 reserved;		/* must be 0 */
};

/* What an own MR is called, in both worlds. */
struct migr_ioc_query_mr {
	__u32 handle;		/* in */
	__u32 vlkey;		/* out, and so are the rest */
	__u32 vrkey;
	__u32 plkey;
	__u32 prkey;
	__u32 reserved;		/* in: must be 0 */
};

/*
 * The driver's part of the answer to create_cq/create_qp/create_srq of an own
 * object, as the module saw it (rxe: struct rxe_create_qp_resp with the mmap
 * offsets of the rings). @len in: room at @buf; out: bytes there are.
 */
struct migr_ioc_driver_resp {
	__u32 obj_type;		/* enum migr_obj_type */
	__u32 handle;
	__aligned_u64 buf;
	__u32 len;		/* bytes, 0..MIGR_DRIVER_RESP_MAX */
	__u32 reserved;		/* must be 0 */
};

/*
 * The own QP with number @pqpn, which is in ERR, RESET or INIT, is in @qp_state for everybody who reads the record, with the
 * attributes that it had there: what moved it away was not the application, and who makes its like elsewhere connects that.
 * EBUSY: it is in another state; EINVAL: it has never been in that one.
 */
struct migr_ioc_qp_stands {
	__u32 pqpn;		/* 24 bits */
	__u32 qp_state;		/* IB_QPS_RTR or IB_QPS_RTS */
};

#define MIGR_IOC_MAGIC		0xB7
#define MIGR_IOC_ATTACH		_IOWR(MIGR_IOC_MAGIC, 1, struct migr_ioc_attach)
#define MIGR_IOC_BIND_QP	_IOW(MIGR_IOC_MAGIC, 2, struct migr_ioc_bind_qp)
#define MIGR_IOC_BIND_MR	_IOW(MIGR_IOC_MAGIC, 3, struct migr_ioc_bind_mr)
#define MIGR_IOC_QUERY_MR	_IOWR(MIGR_IOC_MAGIC, 4, struct migr_ioc_query_mr)
#define MIGR_IOC_DRIVER_RESP	_IOWR(MIGR_IOC_MAGIC, 5, struct migr_ioc_driver_resp)
#define MIGR_IOC_QP_STANDS	_IOW(MIGR_IOC_MAGIC, 6, struct migr_ioc_qp_stands)

/*
 * mmap(): PROT_READ, MAP_SHARED, exact size, offset chooses the table.
 * Writable mappings are EPERM, another size is EINVAL, an unattached file is
 * ENOENT. Unused entries are 0. A page costs memory once an entry of it is used
 * or read, and then until the context and its mappings are gone.
 */
#define MIGR_QPN_TABLE_OFFSET	0ull
#define MIGR_QPN_TABLE_BYTES	((__u64)MIGR_NR_INDEX * 4)
#define MIGR_KEY_TABLE_OFFSET	(1ull << 32)
#define MIGR_KEY_TABLE_BYTES	((__u64)MIGR_NR_INDEX * 8)

/* QPN table: index physical QPN; value virtual QPN | MIGR_QPN_VALID, or 0. */
#define MIGR_QPN_VALID		0x80000000u

/*
 * Key table: index virtual key >> 8. The value is the physical key XOR the tag
 * (low 8 bits) of the virtual one, so that
 *	physical = entry ^ (key & 0xff)
 * keeps a wrong tag wrong. 0: no such key (index 0 is never given to anyone).
 */
struct migr_key_entry {
	__u32 lkey;
	__u32 rkey;
};

/* ---- generic netlink ----------------------------------------------------- */

#define MIGR_GENL_NAME		"migr"
#define MIGR_GENL_VERSION	1
#define MIGR_GENL_MCGRP_EVENTS	"events"

enum migr_genl_cmd {
	MIGR_CMD_UNSPEC,
	MIGR_CMD_INFO_GET,	/* -> ABI_VERSION, NR_CTX, NR_OBJ, NR_RESERVED, NR_DEV, MOVES_MARKED */
	MIGR_CMD_CTX_GET,	/* dump [PID] -> CTX_ID, CTX_REC */
	MIGR_CMD_OBJ_GET,	/* dump CTX_ID, [OBJ_TYPE] -> OBJ_TYPE, OBJ_REC, [DRIVER_RESP]; of that type only: an older module says EINVAL */
	MIGR_CMD_QP_BIND,	/* CTX_ID, VQPN, PQPN */
	MIGR_CMD_QPN_RESERVE,	/* VQPN: not given to another QP of this host */
	MIGR_CMD_QPN_RELEASE,	/* VQPN */
	MIGR_CMD_EVENT,		/* multicast only: EVENT, CTX_ID, PID, [VQPN, PQPN] */
	__MIGR_CMD_MAX,
};
#define MIGR_CMD_MAX		(__MIGR_CMD_MAX - 1)

enum migr_genl_attr {
	MIGR_A_UNSPEC,
	MIGR_A_PAD,
	MIGR_A_ABI_VERSION,	/* u32 */
	MIGR_A_PID,		/* u32, in the reader's pid namespace; of an event, in the host's: 0: it has ended */
	MIGR_A_CTX_ID,		/* u32, not another's before 2^32 have been made */
	MIGR_A_CTX_REC,		/* struct migr_ctx_rec */
	MIGR_A_OBJ_TYPE,	/* u32, enum migr_obj_type */
	MIGR_A_OBJ_REC,		/* struct migr_{pd,mr,cq,qp,srq,other}_rec by type */
	MIGR_A_DRIVER_RESP,	/* binary, at most MIGR_DRIVER_RESP_MAX */
	MIGR_A_VQPN,		/* u32, 24 bits */
	MIGR_A_PQPN,		/* u32, 24 bits */
	MIGR_A_EVENT,		/* u32, enum migr_event */
	MIGR_A_NR_CTX,		/* u32: contexts in the record */
	MIGR_A_NR_OBJ,		/* u32: objects in the record */
	MIGR_A_NR_RESERVED,	/* u32: reserved virtual QPNs */
	MIGR_A_NR_DEV,		/* u32: ib_devices whose ops are ours */
	MIGR_A_MOVES_MARKED,	/* u32: 1: what mremap() moves is marked as written (soft-dirty); 0, or without: not all of it. 0 until something has moved */
	__MIGR_A_MAX,
};
#define MIGR_A_MAX		(__MIGR_A_MAX - 1)

enum migr_event {
	MIGR_EV_CTX_NEW = 1,
	MIGR_EV_CTX_DEL,
	MIGR_EV_QP_NEW,
	MIGR_EV_QP_DEL,
	MIGR_EV_QP_STATE,
	MIGR_EV_ATTACH,		/* a process has attached libmigr to the context */
};

enum migr_obj_type {
	MIGR_OBJ_PD = 1,
	MIGR_OBJ_MR,
	MIGR_OBJ_CQ,
	MIGR_OBJ_QP,
	MIGR_OBJ_SRQ,
	MIGR_OBJ_MW,
	MIGR_OBJ_AH,
	MIGR_OBJ_XRCD,
	MIGR_OBJ_DM,
	__MIGR_OBJ_MAX,
};

#define MIGR_DRIVER_RESP_MAX	256	/* bytes kept of a driver's answer */
#define MIGR_IBDEV_NAME_MAX	64	/* as IB_DEVICE_NAME_MAX */
#define MIGR_NO_HANDLE		0xffffffffu

/* Handles are uverbs handles (uobject ids) in the context's own numbering. */

#define MIGR_CTX_ATTACHED	1u	/* libmigr has the context */
#define MIGR_CTX_HYDRATED	2u	/* existed before the module: record incomplete */

struct migr_ctx_rec {
	__u32 ctx_id;
	__u32 flags;		/* MIGR_CTX_* */
	__u32 pid;		/* thread group, in the reader's pid namespace; 0: not visible, or it has ended */
	__u32 nr_pd, nr_mr, nr_cq, nr_qp, nr_srq, nr_other;
	__u32 num_comp_vectors;
	__aligned_u64 mr_bytes;	/* registered memory, bytes */
	char comm[16];
	char ibdev[MIGR_IBDEV_NAME_MAX];
};

struct migr_pd_rec {
	__u32 handle;
	__u32 reserved;
};

struct migr_mr_rec {
	__u32 handle;
	__u32 pd_handle;
	__aligned_u64 start;	/* user address */
	__aligned_u64 length;	/* bytes */
	__aligned_u64 iova;
	__u32 access;		/* IB_ACCESS_* as given */
	__u32 vlkey, vrkey;	/* 0: none */
	__u32 plkey, prkey;
	__u32 flags;		/* MIGR_MR_* */
};

/* Memory that is not the process's own address space: cannot be made again from the record. */
#define MIGR_MR_DMABUF		1u
#define MIGR_MR_DM		2u

struct migr_cq_rec {
	__u32 handle;
	__u32 cqe;		/* as asked for last; the driver may have given more */
	__u32 comp_vector;
	__u32 flags;		/* create flags */
	__u32 channel;		/* equal numbers: same completion channel; 0: none */
	__u32 reserved;
	__aligned_u64 user_handle;
};

struct migr_ah_attr {
	__u8 dgid[16];
	__u8 sgid[16];		/* what sgid_index meant when it was used */
	__u8 dmac[6];
	__u8 is_global;		/* 0 or 1: GRH fields below are valid */
	__u8 gid_type;		/* 0 IB/RoCEv1, 1 RoCEv1, 2 RoCEv2 (enum ib_gid_type + 0) */
	__u32 flow_label;	/* 20 bits */
	__u8 sgid_index;
	__u8 hop_limit;
	__u8 traffic_class;
	__u8 sl;
	__u8 src_path_bits;
	__u8 static_rate;
	__u8 port_num;
	__u8 reserved;
	__u32 dlid;
};

struct migr_qp_rec {
	__u32 handle;
	__u32 vqpn;
	__u32 pqpn;
	__u32 pd_handle;
	__u32 send_cq_handle;
	__u32 recv_cq_handle;
	__u32 srq_handle;	/* MIGR_NO_HANDLE: none */
	__u32 qp_type;		/* enum ib_qp_type */
	__aligned_u64 user_handle;
	__u32 max_send_wr, max_recv_wr;		/* as asked for */
	__u32 max_send_sge, max_recv_sge;
	__u32 max_inline_data;			/* bytes */
	__u32 sq_sig_all;	/* 0 or 1 */
	__u32 create_flags;
	/* from modify_qp, the last value of each; physical numbers */
	__u32 attr_mask;	/* IB_QP_* bits given since the last RESET; see MIGR_IOC_QP_STANDS */
	__u32 qp_state;		/* enum ib_qp_state */
	__u32 path_mtu;		/* enum ib_mtu */
	__u32 qkey;
	__u32 rq_psn, sq_psn;	/* as given to modify_qp, not of the moment */
	__u32 dest_qpn;
	__u32 access_flags;
	__u32 pkey_index;
	__u32 port_num;
	__u32 timeout, retry_cnt, rnr_retry, min_rnr_timer;
	__u32 max_rd_atomic, max_dest_rd_atomic;
	struct migr_ah_attr ah;
	__u32 flags;		/* MIGR_QP_* */
};

/* Another QP of the context has been bound to this one's vQPN since. */
#define MIGR_QP_FORMER		1u

/* Opens as migr_other_rec, which it once was. */
struct migr_srq_rec {
	__u32 handle;
	__u32 pd_handle;
	__u32 num;		/* SRQN of an XRC one; else 0 */
	__u32 srq_type;		/* enum ib_srq_type */
	__aligned_u64 user_handle;
	__u32 max_wr;		/* as asked for last */
	__u32 max_sge;		/* as asked for */
	__u32 srq_limit;	/* as armed last; it may have fired since */
	__u32 cq_handle;	/* XRC, tag matching; MIGR_NO_HANDLE: none */
	__u32 flags;		/* MIGR_SRQ_* */
	__u32 reserved;
};

/* Resized since: its ring is not where the driver's answer to create has it. */
#define MIGR_SRQ_RESIZED	1u

/* MW, AH, XRCD, DM: counted and named; not rebuilt from the record. */
struct migr_other_rec {
	__u32 handle;
	__u32 pd_handle;	/* MIGR_NO_HANDLE: none */
	__u32 num;		/* MW: rkey; else 0 */
	__u32 reserved;
};

#endif /* _UAPI_MIGR_H */
