// SPDX-License-Identifier: GPL-2.0
/*
 * tar, as CRIU calls it for each tmpfs of a container, during the stop: GNU tar starts a shell and that a gzip, and
 * three such mounts cost nine programs at either end. What they mostly hold, a few directories, links, device nodes
 * and small files, one program can do.
 *
 *   tar --create --gzip ... --directory DIR .     archive to stdout
 *   tar --extract --gzip ... --directory DIR      archive from stdin
 *
 * An archive of ours is a ustar in gzip's format, uncompressed: any tar extracts it, also on a host that lacks this
 * program. Whatever is not as simple as that, and every archive that is not ours, is left to the next tar in PATH,
 * before anything was written.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define BLOCK 512
#define MAX_BYTES (4 << 20)		/* of an archive: more is worth a compression */
#define MAX_DEPTH 16
#define MAX_ID 07777777			/* what a ustar's fields hold */
#define MAX_TIME 077777777777LL
#define STORED_MAX 0xffffu		/* bytes of one block of deflate that is not compressed */

struct ustar {
	char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, linkname[100];
	char magic[6], version[2], uname[32], gname[32], major[8], minor[8], prefix[155], rest[12];
};
_Static_assert(sizeof(struct ustar) == BLOCK, "a header is one block");

/* gzip's header. The time tells whose it is. */
static const uint8_t head[10] = { 0x1f, 0x8b, 8, 0, 'm', 'i', 'g', 'r', 0, 255 };

static char *const *arguments;

static int failed(const char *what, const char *name)
{
	fprintf(stderr, "migr's tar: %s %s: %s\n", what, name, strerror(errno));
	return 2;
}

/* The next one in PATH that is not this. */
static int by_the_other(void)
{
	const char *path = getenv("PATH"), *end;
	char file[PATH_MAX];
	struct stat self, other;

	if (stat("/proc/self/exe", &self))
		return failed("stat", "/proc/self/exe");
	for (path = path ? path : "/usr/bin:/bin"; *path; path = *end ? end + 1 : end) {
		end = strchrnul(path, ':');
		if (snprintf(file, sizeof(file), "%.*s/tar", (int)(end - path), path) >= (int)sizeof(file) || stat(file, &other))
			continue;
		if (other.st_dev != self.st_dev || other.st_ino != self.st_ino)
			execv(file, arguments);
	}
	errno = ENOENT;
	return failed("no other tar in PATH:", getenv("PATH") ? getenv("PATH") : "(none)");
}

static uint32_t crc_of(const uint8_t *p, size_t n)
{
	uint32_t table[256], crc = ~0u, i, k;

	for (i = 0; i < 256; i++) {
		table[i] = i;
		for (k = 0; k < 8; k++)
			table[i] = table[i] & 1 ? table[i] >> 1 ^ 0xedb88320 : table[i] >> 1;
	}
	while (n--)
		crc = table[(crc ^ *p++) & 0xff] ^ crc >> 8;
	return ~crc;
}

static void put32(uint8_t *p, uint32_t v)
{
	p[0] = v, p[1] = v >> 8, p[2] = v >> 16, p[3] = v >> 24;
}

static uint32_t get32(const uint8_t *p)
{
	return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24;
}

/* ---- create ---------------------------------------------------------------- */

static uint8_t *archive;		/* MAX_BYTES */
static size_t used;

static void *room(size_t n)
{
	if (n > MAX_BYTES - 2 * BLOCK - used)
		return NULL;
	used += n;
	return archive + used - n;
}

/* @n - 1 digits, and an end. False: it has more. */
static bool octal(char *field, size_t n, unsigned long long v)
{
	for (field[--n] = 0; n; v >>= 3)
		field[--n] = '0' + (v & 7);
	return !v;
}

static unsigned checksum_of(const struct ustar *h)
{
	const uint8_t *p = (const uint8_t *)h;
	unsigned sum = 0;
	size_t i;

	for (i = 0; i < BLOCK; i++)
		sum += i >= offsetof(struct ustar, checksum) && i < offsetof(struct ustar, checksum) + 8 ? ' ' : p[i];
	return sum;
}

/* False: it cannot be put into a header. */
static bool add_header(const char *name, const struct stat *st, char type, uint64_t bytes, const char *link)
{
	struct ustar *h = room(BLOCK);

	if (!h || strlen(name) >= sizeof(h->name) || strlen(link) >= sizeof(h->linkname) || st->st_uid > MAX_ID ||
	    st->st_gid > MAX_ID || st->st_mtime < 0 || st->st_mtime > MAX_TIME)
		return false;
	memset(h, 0, BLOCK);
	memcpy(h->name, name, strlen(name));
	memcpy(h->linkname, link, strlen(link));
	h->type = type;
	memcpy(h->magic, "ustar", 6);
	memcpy(h->version, "00", 2);
	if (!octal(h->mode, 8, st->st_mode & 07777) || !octal(h->uid, 8, st->st_uid) || !octal(h->gid, 8, st->st_gid) ||
	    !octal(h->size, 12, bytes) || !octal(h->mtime, 12, st->st_mtime))
		return false;
	if ((type == '3' || type == '4') && (!octal(h->major, 8, major(st->st_rdev)) || !octal(h->minor, 8, minor(st->st_rdev))))
		return false;
	octal(h->checksum, 7, checksum_of(h));
	h->checksum[7] = ' ';
	return true;
}

static bool add_content(int dir, const char *entry, uint64_t bytes)
{
	size_t padded = (bytes + BLOCK - 1) / BLOCK * BLOCK, at = 0;
	uint8_t *to = room(padded);
	ssize_t n = 1;
	int fd;

	if (!to)
		return false;
	memset(to + bytes, 0, padded - bytes);
	fd = openat(dir, entry, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	while (fd >= 0 && at < bytes && n > 0) {
		n = read(fd, to + at, bytes - at);
		at += n > 0 ? n : 0;
	}
	if (fd >= 0)
		close(fd);
	return fd >= 0 && at == bytes;
}

static bool add_directory(int dir, const char *name, dev_t dev, int depth);

static bool add_entry(int dir, const char *entry, const char *name, dev_t dev, int depth)
{
	char link[100] = "", inside[sizeof(((struct ustar *)0)->name)];
	struct stat st;
	ssize_t n;
	int fd;

	if (fstatat(dir, entry, &st, AT_SYMLINK_NOFOLLOW) || st.st_dev != dev)
		return false;
	if (S_ISDIR(st.st_mode)) {
		if (snprintf(inside, sizeof(inside), "%s/", name) >= (int)sizeof(inside) || !add_header(inside, &st, '5', 0, ""))
			return false;
		fd = openat(dir, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		return fd >= 0 && add_directory(fd, inside, dev, depth + 1);
	}
	if (st.st_nlink != 1)
		return false;
	switch (st.st_mode & S_IFMT) {
	case S_IFREG:	/* with holes it is to stay one with holes */
		return (uint64_t)st.st_blocks * 512 >= (uint64_t)st.st_size && add_header(name, &st, '0', st.st_size, "") &&
		       add_content(dir, entry, st.st_size);
	case S_IFLNK:
		n = readlinkat(dir, entry, link, sizeof(link));
		return n > 0 && n < (ssize_t)sizeof(link) && add_header(name, &st, '2', 0, link);
	case S_IFCHR:
		return add_header(name, &st, '3', 0, "");
	case S_IFBLK:
		return add_header(name, &st, '4', 0, "");
	case S_IFIFO:
		return add_header(name, &st, '6', 0, "");
	default:
		return false;
	}
}

/* Closes @dir. @name ends with a slash. */
static bool add_directory(int dir, const char *name, dev_t dev, int depth)
{
	char inside[sizeof(((struct ustar *)0)->name)];
	struct dirent *e;
	bool good = depth < MAX_DEPTH;
	DIR *d = fdopendir(dir);

	if (!d) {
		close(dir);
		return false;
	}
	for (errno = 0; good && (e = readdir(d)); errno = 0) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		good = snprintf(inside, sizeof(inside), "%s%s", name, e->d_name) < (int)sizeof(inside) &&
		       add_entry(dirfd(d), e->d_name, inside, dev, depth);
	}
	good = good && !errno;
	closedir(d);
	return good;
}

static int write_all(const void *p, size_t n)
{
	ssize_t done;

	for (; n; n -= done, p = (const char *)p + done) {
		done = write(STDOUT_FILENO, p, n);
		if (done < 0)
			return failed("write", "the archive");
	}
	return 0;
}

static int write_archive(void)
{
	uint8_t block[5], tail[8];
	size_t at, n;
	int err = write_all(head, sizeof(head));

	memset(archive + used, 0, 2 * BLOCK);
	used += 2 * BLOCK;
	for (at = 0; !err && at < used; at += n) {
		n = used - at < STORED_MAX ? used - at : STORED_MAX;
		block[0] = at + n == used;	/* the last one */
		block[1] = n, block[2] = n >> 8, block[3] = ~n, block[4] = ~n >> 8;
		err = write_all(block, sizeof(block));
		if (!err)
			err = write_all(archive + at, n);
	}
	put32(tail, crc_of(archive, used));
	put32(tail + 4, used);
	return err ? err : write_all(tail, sizeof(tail));
}

static int create(const char *directory)
{
	int dir = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct stat st;

	archive = malloc(MAX_BYTES);
	if (dir < 0 || !archive || fstat(dir, &st) || !add_header("./", &st, '5', 0, "") || !add_directory(dir, "./", st.st_dev, 0))
		return by_the_other();
	return write_archive();
}

/* ---- extract --------------------------------------------------------------- */

/* What is in the blocks of @p; its length, or -1: not as we write them. Into the same place. */
static ssize_t unpacked(uint8_t *p, size_t bytes)
{
	uint8_t *from = p + sizeof(head), *const end = p + bytes, *to = p;
	bool last = false;
	size_t n;

	while (!last) {
		if (end - from < 5)
			return -1;
		last = from[0] == 1;
		n = from[1] | from[2] << 8;
		if (from[0] > 1 || (from[3] | from[4] << 8) != (int)(~n & 0xffff) || (size_t)(end - from) < 5 + n)
			return -1;
		memmove(to, from + 5, n);
		to += n;
		from += 5 + n;
	}
	if (end - from != 8 || get32(from + 4) != (uint32_t)(to - p) || get32(from) != crc_of(p, to - p))
		return -1;
	return to - p;
}

static unsigned long long number(const char *field, size_t n)
{
	char text[16] = "";

	memcpy(text, field, n);
	return strtoull(text, NULL, 8);
}

/* The directory that @name is in, below @root; *@entry is the rest. Not through links. -1 */
static int parent_of(int root, char *name, char **entry)
{
	int dir = dup(root), next;
	char *slash = NULL;

	if (strncmp(name, "./", 2))
		goto odd;
	for (name += 2; dir >= 0 && (slash = strchr(name, '/')) && slash[1]; name = slash + 1) {
		*slash = 0;
		if (!*name || !strcmp(name, ".."))
			goto odd;
		next = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		*slash = '/';
		close(dir);
		dir = next;
	}
	if (slash)
		*slash = 0;
	if (!strcmp(name, ".."))
		goto odd;
	*entry = name;
	return dir;
odd:
	close(dir);
	errno = EINVAL;
	return -1;
}

static int make_file(int dir, const char *entry, const uint8_t *content, size_t bytes)
{
	int fd = openat(dir, entry, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	ssize_t n = 0;
	size_t at;

	for (at = 0; fd >= 0 && at < bytes && n >= 0; at += n > 0 ? n : 0)
		n = write(fd, content + at, bytes - at);
	if (fd >= 0)
		close(fd);
	return fd < 0 || n < 0;
}

/* Makes it; a directory may be there. */
static int make(const struct ustar *h, int dir, const char *entry, const uint8_t *content, size_t bytes)
{
	dev_t dev = makedev(number(h->major, 8), number(h->minor, 8));

	switch (h->type) {
	case '5':
		return *entry && mkdirat(dir, entry, 0700) && errno != EEXIST;
	case '0':
		return make_file(dir, entry, content, bytes);
	case '2':
		return symlinkat(h->linkname, dir, entry);
	case '3':
		return mknodat(dir, entry, S_IFCHR | 0600, dev);
	case '4':
		return mknodat(dir, entry, S_IFBLK | 0600, dev);
	case '6':
		return mknodat(dir, entry, S_IFIFO | 0600, 0);
	default:
		errno = EINVAL;
		return -1;
	}
}

static int set_time(const struct ustar *h, int dir, const char *entry)
{
	const struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_sec = number(h->mtime, 12) } };

	return utimensat(dir, *entry ? entry : ".", times, AT_SYMLINK_NOFOLLOW);
}

/* Whose it is, and what may be done with it; the owner first, or setuid bits go. */
static int set_rights(const struct ustar *h, int dir, const char *entry)
{
	entry = *entry ? entry : ".";
	if (fchownat(dir, entry, number(h->uid, 8), number(h->gid, 8), AT_SYMLINK_NOFOLLOW))
		return -1;
	return h->type == '2' ? 0 : fchmodat(dir, entry, number(h->mode, 8), 0);
}

/* Everything, then the times of directories: what is made in one changes its. */
static int unpack(const uint8_t *p, size_t bytes, int root)
{
	const struct ustar *h;
	char name[101], *entry;
	int pass, dir, bad;
	size_t at, size;

	for (pass = 0; pass < 2; pass++)
		for (at = 0; at + BLOCK <= bytes && p[at]; at += BLOCK + (size + BLOCK - 1) / BLOCK * BLOCK) {
			h = (const struct ustar *)(p + at);
			size = number(h->size, 12);
			memcpy(name, h->name, sizeof(h->name));
			name[100] = 0;
			errno = EINVAL;
			if (memcmp(h->magic, "ustar", 6) || number(h->checksum, 8) != checksum_of(h) || size > bytes - at - BLOCK)
				return failed("header", name);
			if (pass && h->type != '5')
				continue;
			dir = parent_of(root, name, &entry);
			bad = dir < 0;
			if (!bad && !pass)
				bad = make(h, dir, entry, p + at + BLOCK, size) || set_rights(h, dir, entry);
			if (!bad && (pass || h->type != '5'))
				bad = set_time(h, dir, entry);
			if (bad)
				return failed("extract", h->name);
			close(dir);
		}
	return 0;
}

static int extract(const char *directory)
{
	off_t at = lseek(STDIN_FILENO, 0, SEEK_CUR);
	struct stat st;
	uint8_t *p;
	ssize_t n;
	int root;

	if (at < 0 || fstat(STDIN_FILENO, &st) || !S_ISREG(st.st_mode) || st.st_size - at < (off_t)sizeof(head) || st.st_size - at > 2 * MAX_BYTES)
		return by_the_other();
	n = st.st_size - at;
	p = malloc(n);
	if (!p || pread(STDIN_FILENO, p, n, at) != n || memcmp(p, head, sizeof(head)))
		return by_the_other();
	n = unpacked(p, n);
	errno = EBADMSG;
	if (n < 0)
		return failed("read", "the archive");
	umask(0);
	root = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return root < 0 ? failed("open", directory) : unpack(p, n, root);
}

/* A CRIU that says more means more. */
static bool begins(char **argv, const char *const *expected, int n)
{
	int i = 0;

	while (i < n && !strcmp(argv[i], expected[i]))
		i++;
	return i == n;
}

int main(int argc, char **argv)
{
	static const char *const creates[] = { "--create", "--gzip", "--no-unquote", "--no-wildcards", "--one-file-system", "--check-links",
					       "--preserve-permissions", "--sparse", "--numeric-owner", "--directory" };
	static const char *const extracts[] = { "--extract", "--gzip", "--no-unquote", "--no-wildcards", "--directory" };
	enum { CREATES = sizeof(creates) / sizeof(*creates), EXTRACTS = sizeof(extracts) / sizeof(*extracts) };

	arguments = argv;
	if (argc == 1 + CREATES + 2 && begins(argv + 1, creates, CREATES) && !strcmp(argv[argc - 1], "."))
		return create(argv[argc - 2]);
	if (argc == 1 + EXTRACTS + 1 && begins(argv + 1, extracts, EXTRACTS))
		return extract(argv[argc - 1]);
	return by_the_other();
}
