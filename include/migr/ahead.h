/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Memory that is registered ahead of the commit: what libmigr.so leaves in its
 * memory for the CRIU plugin that restores it.
 *
 * The kernel pins the memory of whoever calls (current->mm), and a restored
 * process does not run before the commit. So at FREEZE the library writes down one
 * command for each of its MRs, struct migr_ahead_mr, and says in struct
 * migr_ahead where they are; both go through the checkpoint. When memory is
 * final and the tasks are stopped (RESUME_DEVICES_LATE) the plugin puts the new
 * PDs into the commands and lets the main thread execute them: it points that
 * thread to MIGR_AHEAD_CODE, which lies in the library's text, waits until it has
 * reached its end, and puts everything back. REBIND adopts what has been
 * registered, and registers the rest.
 *
 * The plugin knows the code, and compares: nothing else ever runs in a task before
 * the commit, and that touches no memory but the commands.
 *
 * Where struct migr_ahead lies DESCRIBE tells (MIGR_FD_AHEAD), before there is
 * anything in it. A plugin that does not know the version, or finds other code,
 * leaves all of it to REBIND; so does one that is older than this.
 */
#ifndef MIGR_AHEAD_H
#define MIGR_AHEAD_H

#include <stdint.h>

#define MIGR_AHEAD_MAGIC	0x64656861u	/* "ahed" */
#define MIGR_AHEAD_VERSION	1u
#define MIGR_AHEAD_MAX		(1u << 20)	/* commands; more are left to REBIND */

struct migr_ahead {
	uint32_t magic;
	uint32_t version;
	uint8_t instance[16];	/* of the process, as in HELLO: a fork's copy is none */
	uint64_t code;		/* address of MIGR_AHEAD_CODE; 0: not for this processor */
	uint64_t mrs;		/* address of the commands */
	uint32_t nr_mrs;	/* 0 but from FREEZE to REBIND or ROLLBACK */
	uint32_t mr_bytes;	/* sizeof(struct migr_ahead_mr) */
};

#define MIGR_AHEAD_OPEN	1	/* status: nobody has tried */

/* uverbs' struct ib_uverbs_reg_mr and its response, without the arrays at their ends that no member may follow. */
struct migr_reg_mr {
	uint64_t response, start, length, hca_va;
	uint32_t pd_handle, access_flags;
};

struct migr_reg_mr_resp {
	uint32_t mr_handle, lkey, rkey;
};

struct migr_ahead_mr {
	int32_t fd;		/* of the context */
	int32_t status;		/* MIGR_AHEAD_OPEN, 0, or -errno */
	uint64_t cmd[9];	/* RDMA_VERBS_IOCTL's argument: struct ib_uverbs_ioctl_hdr and three attributes, which
				 * point to `in` and `out` */
	struct migr_reg_mr in;	/* pd_handle: the old one, until the plugin has put in the new one */
	struct migr_reg_mr_resp out;	/* with status 0 */
	uint32_t vlkey;		/* as the program knows it: for what is said of a failure */
	uint64_t shadow;	/* the library's own */
};

/*
 * Executes commands up to the first that fails. rbx: the first command; r12: how many, not 0; r13: RDMA_VERBS_IOCTL;
 * r14: their size. No stack, no memory but the commands. Ends at int3, with rip behind it.
 */
#define MIGR_AHEAD_CODE			\
	"1:	movl (%rbx), %edi\n"	\
	"	movq %r13, %rsi\n"	\
	"	leaq 8(%rbx), %rdx\n"	\
	"	movl $16, %eax\n" /* ioctl */ \
	"	syscall\n"		\
	"	movl %eax, 4(%rbx)\n"	\
	"	testl %eax, %eax\n"	\
	"	jnz 2f\n"		\
	"	addq %r14, %rbx\n"	\
	"	decq %r12\n"		\
	"	jnz 1b\n"		\
	"2:	int3\n"

#endif /* MIGR_AHEAD_H */
