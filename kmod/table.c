// SPDX-License-Identifier: GPL-2.0
/*
 * The translation tables of a context: two sparse shmem files, mapped read-only
 * by who has attached. A mapping holds the file and not the module.
 */
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>

#include "compat.h"
#include "migr.h"

static const struct {
	const char *name;
	u64 offset, bytes;
} tables[MIGR_NR_TABLES] = {
	[MIGR_TABLE_QPN] = { "migr-qpn", MIGR_QPN_TABLE_OFFSET, MIGR_QPN_TABLE_BYTES },
	[MIGR_TABLE_KEY] = { "migr-key", MIGR_KEY_TABLE_OFFSET, MIGR_KEY_TABLE_BYTES },
};

static_assert(sizeof(struct migr_key_entry) == 8);

/*
 * The files of a context, for @made, all NULL before. They are charged to the
 * process, which may have to wait for a reclaim: not under migr_lock.
 */
int migr_table_make(struct file **made)
{
	struct file *file;
	int i;

	for (i = 0; i < MIGR_NR_TABLES; i++) {
		file = shmem_file_setup(tables[i].name, tables[i].bytes, VM_NORESERVE);
		if (IS_ERR(file)) {
			migr_table_put(made);
			return PTR_ERR(file);
		}
		/* Written to under migr_lock: nobody may have to wait for one process's swap. */
		mapping_set_unevictable(file->f_mapping);
		/* Nor may remap_file_pages(), which maps the file anew without asking us, make a mapping that can be written to. */
		SHMEM_I(file_inode(file))->seals |= F_SEAL_FUTURE_WRITE;
		made[i] = file;
	}
	return 0;
}

void migr_table_put(struct file **files)
{
	int i;

	for (i = 0; i < MIGR_NR_TABLES; i++) {
		if (files[i])
			fput(files[i]);
		files[i] = NULL;
	}
}

/* Those that the context has stay; what is left in @made is the caller's. */
void migr_table_install_locked(struct migr_ctx *ctx, struct file **made)
{
	int i;

	lockdep_assert_held(&migr_lock);
	if (ctx->table[0])
		return;
	for (i = 0; i < MIGR_NR_TABLES; i++) {
		WRITE_ONCE(ctx->table[i], made[i]);
		made[i] = NULL;
	}
}

/*
 * One word, whole: libmigr reads it while we write. Pairs with the acquire load
 * of the tables' reader there. Nobody to read it: nothing to write.
 *
 * A page that is not there yet is charged to the process. Where that takes a
 * reclaim, the process is to wait for it and not everybody who wants migr_lock:
 * ENOMEM, and migr_table_fill() makes the page.
 */
static int store(struct migr_ctx *ctx, enum migr_table table, u64 offset, u32 value)
{
	struct file *file = ctx->table[table];
	pgoff_t index = offset >> PAGE_SHIFT;
	struct page *page;
	void *p;

	if (!file)
		return 0;
	page = shmem_read_mapping_page_gfp(file->f_mapping, index,
					   (mapping_gfp_mask(file->f_mapping) & ~__GFP_DIRECT_RECLAIM) | __GFP_NOWARN);
	if (IS_ERR(page)) {
		ctx->missing.file = file;
		ctx->missing.index = index;
		return PTR_ERR(page);
	}
	p = kmap_local_page(page);
	/* pairs as said above */
	smp_store_release((u32 *)(p + offset_in_page(offset)), value);
	kunmap_local(p);
	set_page_dirty(page);
	put_page(page);
	return 0;
}

/* What a call that ended with @err lacked, for migr_table_fill(). */
struct migr_missing migr_table_missing_locked(struct migr_ctx *ctx, int err)
{
	struct migr_missing missing = ctx->missing;

	lockdep_assert_held(&migr_lock);
	ctx->missing.file = NULL;
	if (err != -ENOMEM || !missing.file)
		return (struct migr_missing){};
	get_file(missing.file);
	return missing;
}

/* Makes the page, which then stays. True: the call is to be made again. May wait. */
bool migr_table_fill(const struct migr_missing *missing)
{
	struct page *page;

	if (!missing->file)
		return false;
	page = shmem_read_mapping_page(missing->file->f_mapping, missing->index);
	if (!IS_ERR(page))
		put_page(page);
	fput(missing->file);
	return !IS_ERR(page);
}

int migr_table_set_qpn(struct migr_ctx *ctx, u32 pqpn, u32 entry)
{
	return store(ctx, MIGR_TABLE_QPN, (u64)(pqpn & MIGR_QPN_MASK) * sizeof(u32), entry);
}

static int set_key(struct migr_ctx *ctx, u32 index, u32 entry, size_t member)
{
	return store(ctx, MIGR_TABLE_KEY, (u64)(index % MIGR_NR_INDEX) * sizeof(struct migr_key_entry) + member, entry);
}

int migr_table_set_lkey(struct migr_ctx *ctx, u32 index, u32 entry)
{
	return set_key(ctx, index, entry, offsetof(struct migr_key_entry, lkey));
}

int migr_table_set_rkey(struct migr_ctx *ctx, u32 index, u32 entry)
{
	return set_key(ctx, index, entry, offsetof(struct migr_key_entry, rkey));
}

/* Children inherit the mapping: they may go on using what they inherit. */
int migr_table_mmap(struct migr_ctx *ctx, struct vm_area_struct *vma)
{
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	int i;

	for (i = 0; i < MIGR_NR_TABLES; i++)
		if (offset == tables[i].offset)
			break;
	if (i == MIGR_NR_TABLES || vma->vm_end - vma->vm_start != tables[i].bytes ||
	    !(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_flags & VM_WRITE)
		return -EPERM;
	vm_flags_mod(vma, VM_DONTEXPAND | VM_DONTDUMP, VM_MAYWRITE);
	vma->vm_pgoff = 0;
	vma_set_file(vma, ctx->table[i]);
	return call_mmap(vma->vm_file, vma);
}
