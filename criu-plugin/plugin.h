/* SPDX-License-Identifier: GPL-2.0 */
/* What the files of the plugin share. */
#ifndef MIGR_CRIU_PLUGIN_H
#define MIGR_CRIU_PLUGIN_H

#include <stdint.h>
#include <sys/stat.h>

#include "migr/restore.h"
#include "migr/restore_control.h"

enum phase {
	PHASE_INERT,		/* not our job: every hook says -ENOTSUP */
	PHASE_DUMP,
	PHASE_PREPARED,		/* restore: objects are built (or failed is set), waiting for GO */
	PHASE_RESTORING,	/* GO was given: CRIU works */
	PHASE_HELD,		/* memory is final, tasks wait for COMMIT */
	PHASE_COMMITTED,
	PHASE_ABORTED,
};

struct job {
	enum phase phase;
	struct migr_rst_image *img;
	struct migr_rst_file *files;	/* which of CRIU's file ids is which fd */
	uint32_t nr_files;
	int device_dumped;		/* a descriptor of a uverbs device is among CRIU's file ids */
	uint32_t built_us;		/* how long building took */
	int failed;			/* building, registering memory, holding tasks: a positive errno, and why */
	struct migr_rst_err why;
	pid_t root;			/* of the restored tasks, once they are held */
};
extern struct job job;

/* To CRIU's log; level 1 error, 2 warning, 3 info. */
void say(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The image directory: an fd that is not to be closed, or -1. */
int image_dir(void);

/* The lowest number that the plugin's own descriptors may have. */
int fd_floor(void);

/* dump.c */
int dump_init(void);
/* @st: of CRIU's own memory. Its type is changed if all mappings of the device may be one file. */
int dump_device_vma(int fd, const struct stat *st);
int dump_ext_file(int fd, int id);
void dump_exit(int ret);

/* restore.c */
int restore_init(void);
int restore_ext_file(int id);
int restore_update_vma(const char *path, uint64_t addr, uint64_t old_pgoff, uint64_t *new_pgoff, int *plugin_fd);
int restore_resume_late(int pid);
void restore_exit(int ret);
/* Called by control.c. 0 or a positive errno, with *err said. */
int restore_connect(const struct migr_rc_connect *c, struct migr_rst_err *err);
int restore_go(struct migr_rst_err *err);
/* All tasks still wait; with @let_go nothing but CRIU's detaching is missing for them to run. Else job.failed is set. */
void restore_still_held(int let_go);

/*
 * ahead.c: has the tasks of the tree under @root, all of them stopped and traced by the caller, register the memory of
 * the processes of @img, whose objects are built. What cannot be done that way is left to the process, and said. 0, or a
 * positive errno with *err said: no memory to be had, or a task is not as it was. Then none may go on.
 */
int ahead_register(const struct migr_rst_image *img, pid_t root, long limit_ms, struct migr_rst_err *err);

/*
 * held.c: has all tasks of the tree under @root, stopped and traced by the caller, end with the caller, or not any more.
 * 0, or a positive errno with *err said: one of them is not stopped, it ends or has ended.
 */
int held_bind(pid_t root, int bound, struct migr_rst_err *err);

/*
 * clean.c: takes the mark "written" from the registered private memory of the processes of @img, all of them stopped and
 * traced by the caller, before the first of several pre-dumps. Of whom that cannot be done, and why, is said. 0, or a positive errno: a
 * process has been left other than it was.
 */
int clean_registered(const struct migr_rst_image *img);

/*
 * ports.c: a file of librdmacm's device that holds the ports of @p until it is closed. -1, which is said: one of them, or the
 * device, is not to be had. In the restored task. ports_look(), before: 0, or a negative errno with *err said if there is no such device.
 */
int ports_look(const struct migr_rst_process *p, struct migr_rst_err *err);
int ports_hold(const struct migr_rst_process *p);

#define MIGR_CPUS_NAME "migr-cpus.img"	/* a line for each thread: number of its process, its own, both in their namespace, processors */

/*
 * cpus.c: on which processors threads may run. cpus_note() notes in folder @dir those of the tree under @root that are kept to
 * some; 0 or a positive errno. cpus_give_back() does so in the restored tree, which stands still; what cannot be done is said.
 */
int cpus_note(pid_t root, int dir);
void cpus_give_back(pid_t root, int dir);

/*
 * wiped.c: which memory is wiped in what a process forks. wiped_note() notes it in folder @dir, of all of the tree under @root, if there is a
 * file MIGR_RST_WIPED_NAME; 0 or a positive errno. wiped_give_back() has the restored tasks, stopped and traced by the caller, ask for it again;
 * what cannot be done is said. 0, or a positive errno with *err said: a task has been left other than it was.
 */
int wiped_note(pid_t root, int dir);
int wiped_give_back(pid_t root, int dir, struct migr_rst_err *err);

/* control.c: the socket */
int control_listen(const char *path);
/*
 * Serves controllers until job.phase leaves @phase or @limit_s seconds have
 * passed; that, and an error, is an abort. With job.failed it ends when a
 * controller was told, and that is one, too.
 */
void control_serve(enum phase phase, long limit_s);
/* Answers what is pending with @why and closes everything. */
void control_close(const char *why);

#endif /* MIGR_CRIU_PLUGIN_H */
