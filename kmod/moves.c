// SPDX-License-Identifier: GPL-2.0
/*
 * What mremap() moves counts as written (soft-dirty) at its new address.
 *
 * The kernel marks each page whose entry it moves, but where it moves whole page
 * tables, 2 MB and more, it marks nothing, nor the new mapping. Who copies a
 * program while it runs, and asks at the end what was written since, would take
 * what it has copied of that address. So the mapping gets the mark, as each new
 * one of mmap() does: all of its pages count. By a kprobe: exec() comes there,
 * too, with its stack.
 *
 * Where that cannot be done migrd is told (MIGR_A_MOVES_MARKED), and copies
 * nothing ahead.
 */
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/ptrace.h>
#include <linux/sched.h>

#include "compat.h"
#include "migr.h"

#if defined(CONFIG_KPROBES) && defined(CONFIG_HAVE_FUNCTION_ARG_ACCESS_API) && defined(CONFIG_MEM_SOFT_DIRTY)

static bool probed;
static bool seen;	/* a move: a probe that is registered while kprobes are turned off sees none */
static bool strange;	/* its arguments are not those that we know */

/*
 * Of move_page_tables(vma, old_addr, new_vma, new_addr, ..). The mm is current's, and its mmap_lock held for writing,
 * so the mapping stays, and its flags are ours; it is new, or was extended, and faults that need no mmap_lock keep off it.
 * In atomic context: @new_vma is not looked into before the tree has it.
 */
static int on_move(struct kprobe *p, struct pt_regs *regs)
{
	struct vm_area_struct *new_vma = (void *)regs_get_kernel_argument(regs, 2);
	unsigned long new_addr = regs_get_kernel_argument(regs, 3);

	if (current->mm && new_vma && find_vma(current->mm, new_addr) == new_vma)
		__vm_flags_mod(new_vma, VM_SOFTDIRTY, 0);
	else
		WRITE_ONCE(strange, true);
	if (!READ_ONCE(seen))
		WRITE_ONCE(seen, true);
	return 0;
}

static struct kprobe move = {
	.symbol_name = "move_page_tables",
	.pre_handler = on_move,
};

/* Without it the module is as good as with it, but for migrations that copy memory ahead. */
void migr_moves_init(void)
{
	int err = register_kprobe(&move);

	probed = !err;
	if (err)
		pr_warn("what mremap() moves is not marked as written, so no memory is copied ahead: no probe in %s (%d)\n",
			move.symbol_name, err);
}

/* None is in on_move() any more when this returns. */
void migr_moves_exit(void)
{
	if (probed)
		unregister_kprobe(&move);
}

bool migr_moves_marked(void)
{
	if (READ_ONCE(strange))
		pr_warn_once("what mremap() moves is not marked as written, so no memory is copied ahead: the arguments of %s are not known\n",
			     move.symbol_name);
	return READ_ONCE(seen) && !READ_ONCE(strange);
}

#else

void migr_moves_init(void)
{
	pr_warn("what mremap() moves is not marked as written, so no memory is copied ahead: this kernel has no kprobes, or no such marks\n");
}

void migr_moves_exit(void)
{
}

bool migr_moves_marked(void)
{
	return false;
}

#endif
