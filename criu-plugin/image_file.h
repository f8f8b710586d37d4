/* SPDX-License-Identifier: GPL-2.0 */
/* What the plugin notes as text: a file of its own in the image directory. */
#ifndef MIGR_CRIU_IMAGE_FILE_H
#define MIGR_CRIU_IMAGE_FILE_H

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

/* @dir: the image directory; @flags: of open(2), to read or to write. NULL: errno says why. */
static inline FILE *image_open(int dir, const char *name, int flags)
{
	int fd = openat(dir, name, flags | O_CLOEXEC, 0600), err;
	FILE *f = fd < 0 ? NULL : fdopen(fd, (flags & O_ACCMODE) == O_RDONLY ? "r" : "w");

	if (!f && fd >= 0) {
		err = errno;
		close(fd);
		errno = err;
	}
	return f;
}

/* @return @ret; if that is 0, a positive errno where not all was written. */
static inline int image_close(FILE *f, int ret)
{
	if (ferror(f) && !ret)
		ret = EIO;
	if (fclose(f) && !ret)
		ret = errno;
	return ret;
}

#endif
