// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Devices and GIDs of this host. */
#include <dirent.h>
#include <errno.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <stdio.h>
#include <string.h>

#include "../include/migr/gid.h"
#include "internal.h"

#define SYSFS_UVERBS "/sys/class/infiniband_verbs"

/* First line of a sysfs file without its newline; 0 or -errno. */
static int read_line(const char *path, char *buf, size_t size)
{
	FILE *f = fopen(path, "re");
	int ret = 0;

	if (!f)
		return -errno;
	if (!fgets(buf, size, f))
		ret = -EIO;	/* reading an empty GID slot's type fails with EINVAL */
	fclose(f);
	if (!ret)
		buf[strcspn(buf, "\n")] = '\0';
	return ret;
}

int migr_rst_device_find(const char *want, char ibdev[MIGR_IBDEV_NAME_MAX], char path[64], struct migr_rst_err *err)
{
	DIR *dir = opendir(SYSFS_UVERBS);
	struct dirent *de;
	char only[MIGR_IBDEV_NAME_MAX] = "", only_node[32] = "";
	int seen = 0, found = 0;

	while (dir && !found && (de = readdir(dir))) {
		char file[320], name[MIGR_IBDEV_NAME_MAX];

		if (strncmp(de->d_name, "uverbs", 6) || strlen(de->d_name) >= sizeof(only_node))
			continue;
		snprintf(file, sizeof(file), SYSFS_UVERBS "/%s/ibdev", de->d_name);
		if (read_line(file, name, sizeof(name)))
			continue;
		seen++;
		found = !strcmp(name, want);
		strcpy(only, name);
		strcpy(only_node, de->d_name);
	}
	if (dir)
		closedir(dir);
	if (!seen)
		return rst_fail(err, ENODEV, "this host has no RDMA device: create one (rdma link add) or load its driver");
	if (!found && seen > 1)
		return rst_fail(err, ENODEV, "this host has no RDMA device %s, and several others to choose from", want);
	strcpy(ibdev, only);
	snprintf(path, 64, "/dev/infiniband/%s", only_node);
	return 0;
}

int migr_rst_gid_find(const struct migr_rst_context *c, uint32_t port, const struct migr_ah_attr *like,
		      uint8_t gid[16], uint8_t *index, struct migr_rst_err *err)
{
	static const uint8_t zero[16];
	struct ib_uverbs_gid_entry table[MIGR_RST_GIDS];
	/* A QP that was never connected names no GID: RoCE v2, over IPv4 if there is one. */
	int known = memcmp(like->sgid, zero, 16) != 0;
	int want_v2 = !known || like->gid_type == IB_UVERBS_GID_TYPE_ROCE_V2;
	int want_family = known ? migr_gid_family(like->sgid) : 0;
	int best = 0, n = rst_uverbs_gids(c, table, MIGR_RST_GIDS);

	if (n < 0)
		return rst_fail(err, -n, "cannot read the GIDs of %s: %s", c->new_ibdev, strerror(-n));
	for (int i = 0; i < n; i++) {
		const uint8_t *g = (const uint8_t *)table[i].gid;
		int score;

		if (table[i].port_num != port || table[i].gid_index > UINT8_MAX ||
		    (table[i].gid_type == IB_UVERBS_GID_TYPE_ROCE_V2) != want_v2)
			continue;
		score = known ? migr_gid_nearness(like->sgid, g) : migr_gid_family(g) == want_family ? 2 : 1;
		if (score > best) {
			best = score;
			*index = table[i].gid_index;
			memcpy(gid, g, 16);
		}
	}
	if (!best)
		return rst_fail(err, EADDRNOTAVAIL, "%s port %u has no %s GID of the family %s: give its interface an address",
				c->new_ibdev, port, want_v2 ? "RoCE v2" : "IB/RoCE v1",
				migr_gid_family_name(want_family));
	return 0;
}
