// SPDX-License-Identifier: GPL-2.0
/*
 * A CRIU plugin that only waits: for GO on MIGR_RESTORE_SOCKET, as the real one
 * does after it has created RDMA resources. Lets the early restore be tested
 * without RDMA. ABORT, and a minute without a word, fail the restore. With a
 * file "hold" in the working directory it waits with the tasks restored, too,
 * as long as that is there; "held" says that it does.
 */
#include <criu/criu-plugin.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <migr/restore_control.h>

#define WAIT_LIMIT_MS	60000
#define HOLD_LOOK_MS	50

static int serve_one(int listener)
{
	struct migr_rc_msg m;
	struct pollfd p = { .fd = listener, .events = POLLIN };
	int fd, op;

	if (poll(&p, 1, WAIT_LIMIT_MS) != 1)
		return -ETIMEDOUT;
	fd = accept(listener, NULL, NULL);
	if (fd < 0)
		return -errno;
	if (recv(fd, &m, sizeof(m), 0) != sizeof(m) || m.version != MIGR_RC_VERSION) {
		close(fd);
		return 0;
	}
	op = m.op;
	m.op |= MIGR_RC_REPLY;
	m.status = op == MIGR_RC_GO || op == MIGR_RC_ABORT ? 0 : EOPNOTSUPP;
	snprintf(m.text, sizeof(m.text), "%s", m.status ? "this plugin only waits" : "");
	send(fd, &m, sizeof(m), MSG_NOSIGNAL);
	close(fd);
	return m.status ? 0 : op;
}

static int wait_init(int stage)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *path = getenv("MIGR_RESTORE_SOCKET");
	int fd, op = 0;

	if (stage != CR_PLUGIN_STAGE__RESTORE || !path || strlen(path) >= sizeof(a.sun_path))
		return 0;
	strcpy(a.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	unlink(path);
	if (!bind(fd, (struct sockaddr *)&a, sizeof(a)) && !listen(fd, 4))
		while (!op)
			op = serve_one(fd);
	close(fd);
	return op == MIGR_RC_GO ? 0 : -1;
}

static int wait_held(int pid)
{
	(void)pid;
	for (int ms = 0; ms < WAIT_LIMIT_MS && !access("hold", F_OK); ms += HOLD_LOOK_MS) {
		close(open("held", O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
		usleep(HOLD_LOOK_MS * 1000);
	}
	return 0;
}

static void wait_exit(int stage, int ret)
{
	(void)stage;
	(void)ret;
}

CR_PLUGIN_REGISTER("migr_wait", wait_init, wait_exit)
CR_PLUGIN_REGISTER_HOOK(CR_PLUGIN_HOOK__RESUME_DEVICES_LATE, wait_held)
