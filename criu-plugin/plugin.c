// SPDX-License-Identifier: GPL-2.0
/* Registration with CRIU, and what both directions need. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#pragma GCC visibility push(default)	/* CR_PLUGIN_DESC is all that is exported */
#include <criu-plugin.h>
#pragma GCC visibility pop

#include "plugin.h"

struct job job;

/* CRIU's own logger; not in the plugin header, so it may be missing. */
extern void print_on_level(unsigned int level, const char *fmt, ...) __attribute__((weak));

void say(int level, const char *fmt, ...)
{
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (print_on_level)
		/* As CRIU marks its own: who looks for the first error in its log finds ours, too. */
		print_on_level(level, "%s: %s\n", level == 1 ? "Error (migr)" : "migr", text);
	else
		fprintf(stderr, "migr: %s\n", text);
}

int image_dir(void)
{
	static int own = -1;
	const char *path = getenv("MIGR_IMAGE_DIR");

	if (!path)
		return criu_get_image_dir();
	if (own < 0) {
		int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

		if (fd < 0) {
			say(1, "cannot open MIGR_IMAGE_DIR %s: %s", path, strerror(errno));
			return -1;
		}
		own = fcntl(fd, F_DUPFD_CLOEXEC, fd_floor());
		close(fd);
	}
	return own;
}

int fd_floor(void)
{
	struct rlimit lim;

	/* CRIU has raised the limit by now, and keeps its own at the very top. */
	if (getrlimit(RLIMIT_NOFILE, &lim) || lim.rlim_cur < 1024)
		return 512;
	return lim.rlim_cur >= 65536 ? 32768 : lim.rlim_cur / 2;
}

static int plugin_init(int stage)
{
	return stage == CR_PLUGIN_STAGE__RESTORE ? restore_init() : dump_init();
}

static void plugin_exit(int stage, int ret)
{
	if (stage == CR_PLUGIN_STAGE__RESTORE)
		restore_exit(ret);
	else if (stage == CR_PLUGIN_STAGE__DUMP)
		dump_exit(ret);
}

CR_PLUGIN_REGISTER("migr_plugin", plugin_init, plugin_exit)
CR_PLUGIN_REGISTER_HOOK(CR_PLUGIN_HOOK__HANDLE_DEVICE_VMA, dump_device_vma)
CR_PLUGIN_REGISTER_HOOK(CR_PLUGIN_HOOK__DUMP_EXT_FILE, dump_ext_file)
/* After 4.2 this hook gets one argument more, which is of no use here. */
CR_PLUGIN_REGISTER_HOOK(CR_PLUGIN_HOOK__RESTORE_EXT_FILE, restore_ext_file)
CR_PLUGIN_REGISTER_HOOK(CR_PLUGIN_HOOK__UPDATE_VMA_MAP, restore_update_vma)
CR_PLUGIN_REGISTER_HOOK(CR_PLUGIN_HOOK__RESUME_DEVICES_LATE, restore_resume_late)
