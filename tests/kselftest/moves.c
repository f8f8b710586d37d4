// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Memory that mremap() moves is marked as written (soft-dirty) where it is then, also where the kernel moves whole page
 * tables: who has copied what was there before sees that it is other memory.
 */
#include "migr_test.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096u
#define TABLE (2u << 20)	/* what one page table maps: moved as a whole if both addresses are multiples of it */
#define SOFT_DIRTY (1ull << 55)
#define PRESENT (1ull << 63)

static char *memory;

/* Places that far from each other that no two of them share a page table, nor become one mapping. */
static char *place(unsigned i)
{
	return memory + (size_t)2 * TABLE * i;
}

static void fill(char *at, unsigned bytes, char c)
{
	need(mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at, "mmap");
	need(!madvise(at, bytes, MADV_NOHUGEPAGE), "pages of 4 KiB");	/* huge ones are marked by the kernel */
	memset(at, c, bytes);
}

static void forget_writes(void)
{
	int fd = open("/proc/self/clear_refs", O_WRONLY);

	need(fd >= 0 && write(fd, "4", 1) == 1, "clear_refs");
	close(fd);
}

/* How many of the pages are there and marked. */
static unsigned marked(const char *at, unsigned bytes)
{
	static uint64_t entry[TABLE / PAGE];
	unsigned nr = bytes / PAGE, n = 0;
	int fd = open("/proc/self/pagemap", O_RDONLY);

	need(fd >= 0 && pread(fd, entry, nr * sizeof(*entry), (uintptr_t)at / PAGE * sizeof(*entry)) == (ssize_t)(nr * sizeof(*entry)),
	     "pagemap");
	close(fd);
	for (unsigned i = 0; i < nr; i++)
		n += (entry[i] & (SOFT_DIRTY | PRESENT)) == (SOFT_DIRTY | PRESENT);
	return n;
}

static bool holds(const char *at, unsigned bytes, char c)
{
	for (unsigned i = 0; i < bytes; i++)
		if (at[i] != c)
			return false;
	return true;
}

static void move(char *from, char *to, unsigned bytes)
{
	need(mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to, "mremap");
}

/* As a program does that swaps two areas without copying them. */
static void swap(unsigned bytes, const char *what)
{
	char *a = place(0), *b = place(1), *aside = place(2), *still = place(3);

	fill(a, bytes, 'a');
	fill(b, bytes, 'b');
	fill(still, bytes, 's');
	forget_writes();
	need(!marked(a, bytes) && !marked(b, bytes) && !marked(still, bytes), "nothing is marked");
	move(a, aside, bytes);
	move(b, a, bytes);
	move(aside, b, bytes);
	check(holds(a, bytes, 'b') && holds(b, bytes, 'a'), "%s are swapped", what);
	check_eq(marked(a, bytes), bytes / PAGE, "and all pages of the first are marked");
	check_eq(marked(b, bytes), bytes / PAGE, "as are those of the second");
	check_eq(marked(still, bytes), 0, "and none of what was not moved");
	forget_writes();
	check_eq(marked(a, bytes) + marked(b, bytes), 0, "until the marks are taken away again");
	need(mmap(aside, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == aside, "nobody else's");
}

/* Whether the kernel has a function of this name. */
static bool has(const char *function)
{
	FILE *f = fopen("/proc/kallsyms", "re");
	char line[512], name[256];
	bool found = false;

	while (f && !found && fgets(line, sizeof(line), f))
		found = sscanf(line, "%*s %*s %255s", name) == 1 && !strcmp(name, function);
	if (f)
		fclose(f);
	return found;
}

int main(void)
{
	struct migr_info info;
	char *all;

	if (genl_info(&info))
		skip("no netlink family \"migr\"");
	if (access("/proc/self/clear_refs", W_OK) || !has("register_kprobe"))
		skip("a kernel without kprobes, or without clear_refs");
	all = mmap(NULL, (size_t)TABLE * 9, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	need(all != MAP_FAILED, "room");
	memory = (char *)(((uintptr_t)all + TABLE - 1) / TABLE * TABLE);
	swap(TABLE, "areas of a whole page table");
	swap(TABLE / 2, "areas of half a page table");
	genl_info(&info);
	check_eq(info.moves_marked, 1, "the module says that it marks what is moved, and knew all that moved");
	return finish();
}
