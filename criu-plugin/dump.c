// SPDX-License-Identifier: GPL-2.0
/*
 * Dump: keep rings out of the images and say which fd is which. Everything else
 * is in migr.img already; migrd has put it into the image directory.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "plugin.h"
#include "task.h"

/* Exported by the criu binary, in no header of it (3.17 to 4.2). */
extern int add_external(char *key) __attribute__((weak));
extern _Bool external_lookup_id(char *id) __attribute__((weak));

static int own_dir = -1;	/* the image directory, for dump_exit(): open there whatever CRIU has closed */

int dump_init(void)
{
	struct migr_rst_err err = { "" };
	int dir = image_dir();
	int ret = dir < 0 ? -ENOENT : migr_rst_read(dir, &job.img, &err);

	if (ret == -ENOENT)
		return 0;	/* no job of ours */
	if (ret) {
		say(1, "%s", err.text);
		return -1;
	}
	own_dir = fcntl(dir, F_DUPFD_CLOEXEC, fd_floor());
	job.phase = PHASE_DUMP;
	say(3, "dumping %u processes with RDMA on record", job.img->nr_processes);
	return 0;
}

/* Is it a device whose path in sysfs has this in it? Major numbers may be dynamic. */
static int is_device(const struct stat *st, const char *part)
{
	char path[64], target[256];
	ssize_t n;

	if (!S_ISCHR(st->st_mode))
		return 0;
	snprintf(path, sizeof(path), "/sys/dev/char/%u:%u", major(st->st_rdev), minor(st->st_rdev));
	n = readlink(path, target, sizeof(target) - 1);
	if (n < 0)
		return 0;
	target[n] = '\0';
	return strstr(target, part) != NULL;
}

static int is_uverbs(const struct stat *st)
{
	return is_device(st, "/infiniband_verbs/uverbs");
}

static int is_rdma_cm(const struct stat *st)
{
	return is_device(st, "/misc/rdma_cm");
}

/* The mount that an fd was opened through; -1: not told. */
static int mount_of(int fd)
{
	char path[64], line[128];
	int id = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	f = fopen(path, "re");
	while (f && id < 0 && fgets(line, sizeof(line), f))
		sscanf(line, "mnt_id: %d", &id);
	if (f)
		fclose(f);
	return id;
}

/*
 * A restored process has its device through a mount of the host that restored it,
 * which is none of the container's: CRIU would refuse to name the file of its
 * rings. It does not ask for files that are declared external; at the restore we
 * supply them anyhow.
 */
static int declare_external(int fd, const struct stat *st)
{
	char key[64];
	int mount = mount_of(fd);

	if (mount < 0 || !add_external || !external_lookup_id)
		return 0;	/* it may work without, for one that was never restored */
	snprintf(key, sizeof(key), "file[%x:%llx]", mount, (unsigned long long)st->st_ino);
	if (external_lookup_id(key))
		return 0;
	say(3, "rings of %s are external", key);
	return add_external(key) ? -ENOMEM : 0;
}

/* All tasks of the job are stopped when CRIU asks about the first mapping, and no page has been looked at. */
static int before_first_pre_dump(void)
{
	static int done;

	if (done || !getenv("MIGR_FIRST_PRE_DUMP"))
		return 0;
	done = 1;
	return clean_registered(job.img) ? -EIO : 0;
}

static int contexts_share_a_device(void)
{
	for (uint32_t i = 0; i < job.img->nr_processes; i++) {
		const struct migr_rst_process *p = job.img->processes[i];

		for (uint32_t k = 1; k < p->nr_contexts; k++)
			for (uint32_t n = 0; n < k; n++)
				if (!strcmp(p->contexts[n].rec.ibdev, p->contexts[k].rec.ibdev))
					return 1;
	}
	return 0;
}

/*
 * CRIU notes a file for each mapping of a device, which are two for each QP, and one for all mappings of a file of any
 * other kind: fd_id_generate_special(), 3.17 to 4.2. It goes by the type in @st, which is memory of its own, copied
 * into the file's entry afterwards and used for nothing else; that of a FIFO is noted without a size. The restore asks
 * restore_update_vma() about each mapping as before, but takes one descriptor for a run of mappings of the same file:
 * they have to be of the same context. And not once the descriptor of a device is dumped, as with the second process
 * of a tree: CRIU would take the descriptor's entry, which is no file's, for that of the mappings.
 */
static void one_file_for_all(const struct stat *st)
{
	if (!job.device_dumped && !contexts_share_a_device())
		((struct stat *)st)->st_mode = (st->st_mode & ~S_IFMT) | S_IFIFO;
}

int dump_device_vma(int fd, const struct stat *st)
{
	int ret;

	if (job.phase != PHASE_DUMP || !is_uverbs(st))
		return -ENOTSUP;
	ret = before_first_pre_dump();
	if (!ret)
		ret = declare_external(fd, st);
	if (!ret)
		one_file_for_all(st);
	return ret;
}

static int is_event_fd(int fd)
{
	char path[64], target[256];
	ssize_t n;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	n = readlink(path, target, sizeof(target) - 1);
	if (n < 0)
		return 0;
	target[n] = '\0';
	return strstr(target, "[infinibandevent]") != NULL;
}

static int same_file(int fd, uint32_t pid, int their_fd)
{
	return syscall(SYS_kcmp, getpid(), (pid_t)pid, KCMP_FILE, (unsigned long)fd, (unsigned long)their_fd) == 0;
}

static int note(int fd, uint32_t id, const struct migr_rst_process *p, const struct migr_fd_desc *d)
{
	struct migr_rst_file *bigger = reallocarray(job.files, job.nr_files + 1, sizeof(*bigger));
	struct migr_rst_err err = { "" };
	int ret, flags = fcntl(fd, F_GETFL);

	if (!bigger)
		return -ENOMEM;
	job.files = bigger;
	job.files[job.nr_files++] = (struct migr_rst_file){
		.id = id, .pid = p->pid, .ctx_id = d->ctx_id, .kind = d->kind, .fd_number = d->fd,
		.nonblock = flags >= 0 && (flags & O_NONBLOCK),
		.async = flags >= 0 && (flags & O_ASYNC),
	};
	/* Anew each time: CRIU closes its image directory before our exit hook. */
	ret = migr_rst_files_write(job.files, job.nr_files, image_dir(), &err);
	if (ret)
		say(1, "%s", err.text);
	return ret;
}

int dump_ext_file(int fd, int id)
{
	struct stat st;

	if (job.phase != PHASE_DUMP || fstat(fd, &st))
		return -ENOTSUP;
	if (!is_uverbs(&st) && !is_event_fd(fd) && !is_rdma_cm(&st))
		return -ENOTSUP;
	if (is_uverbs(&st))
		job.device_dumped = 1;
	for (uint32_t i = 0; i < job.img->nr_processes; i++) {
		const struct migr_rst_process *p = job.img->processes[i];

		for (uint32_t k = 0; k < p->nr_fds; k++) {
			const struct migr_fd_desc *d = &p->fds[k];

			if (d->kind == MIGR_FD_RING || d->fd < 0 || !same_file(fd, p->pid, d->fd))
				continue;
			say(3, "file %#x is fd %d of pid %u (kind %u, context %u)", (unsigned)id, d->fd, p->pid, d->kind,
			    d->ctx_id);
			return note(fd, id, p, d);
		}
	}
	say(1, "an RDMA file descriptor of the job is not in %s: it was made after the record, or without libmigr",
	    MIGR_RST_IMAGE_NAME);
	return -EINVAL;
}

/* CRIU's of the dump that has stopped @pid, and traces it. */
static int is_ours(pid_t pid)
{
	return task_status(pid, "TracerPid:", 10) == getpid();
}

/* The first of the tree that is dumped, which is known from those in it that have RDMA; 0: none has. */
static pid_t root_of_tree(void)
{
	pid_t root = job.img->nr_processes ? (pid_t)job.img->processes[0]->pid : 0, parent = root;

	for (; parent > 1 && is_ours(parent); parent = (pid_t)task_status(root, "PPid:", 10))
		root = parent;
	return root && is_ours(root) ? root : 0;
}

/* All is dumped, and tasks stand still until this returns. */
void dump_exit(int ret)
{
	pid_t root = job.phase == PHASE_DUMP && !ret && own_dir >= 0 ? root_of_tree() : 0;
	int err = root ? cpus_note(root, own_dir) : 0;

	if (err)
		say(2, "threads may run on all processors when they are restored: cannot write %s: %s", MIGR_CPUS_NAME, strerror(err));
	err = root ? wiped_note(root, own_dir) : 0;
	if (err)
		say(2, "what restored processes fork has all of their memory (MADV_WIPEONFORK): cannot write %s: %s", MIGR_RST_WIPED_NAME, strerror(err));
	if (own_dir >= 0)
		close(own_dir);
	own_dir = -1;
}
