// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/* Devices and GIDs of this host, from sysfs. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define SYSFS_IB "/sys/class/infiniband"
#define SYSFS_UVERBS "/sys/class/infiniband_verbs"
#define MAX_GIDS 1024

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

/* "fe80:0000:...:0001" -> 16 bytes. */
static int parse_gid(const char *text, uint8_t gid[16])
{
	for (int i = 0; i < 8; i++) {
		char *end;
		unsigned long v = strtoul(text, &end, 16);

		if (end == text || v > 0xffff || (i < 7 && *end != ':'))
			return -EINVAL;
		gid[2 * i] = v >> 8;
		gid[2 * i + 1] = v & 0xff;
		text = end + 1;
	}
	return 0;
}

static int is_mapped_v4(const uint8_t gid[16])
{
	static const uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };

	return !memcmp(gid, prefix, sizeof(prefix));
}

static int is_link_local(const uint8_t gid[16])
{
	return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

static int gid_class(const uint8_t gid[16])
{
	return is_mapped_v4(gid) ? 0 : is_link_local(gid) ? 1 : 2;
}

int migr_rst_gid_find(const char *ibdev, uint32_t port, const struct migr_ah_attr *like, uint8_t gid[16],
		      uint8_t *index, struct migr_rst_err *err)
{
	static const uint8_t zero[16];
	/* A QP that was never connected names no GID: the usual kind is RoCE v2 over IPv4. */
	int known = memcmp(like->sgid, zero, 16) != 0;
	int want_v2 = !known || like->gid_type == 2;
	int want_class = known ? gid_class(like->sgid) : 0;
	int best = -1;

	for (int i = 0; i < MAX_GIDS; i++) {
		char file[256], text[64];
		uint8_t g[16];
		int score;

		snprintf(file, sizeof(file), SYSFS_IB "/%s/ports/%u/gids/%d", ibdev, port, i);
		if (read_line(file, text, sizeof(text)))
			break;
		if (parse_gid(text, g) || !memcmp(g, zero, 16))
			continue;
		snprintf(file, sizeof(file), SYSFS_IB "/%s/ports/%u/gid_attrs/types/%d", ibdev, port, i);
		if (read_line(file, text, sizeof(text)))
			continue;
		if (!!strstr(text, "v2") != want_v2)
			continue;
		score = known && !memcmp(g, like->sgid, 16) ? 3 : gid_class(g) == want_class ? 2 : 1;
		if (score > best) {
			best = score;
			*index = i;
			memcpy(gid, g, 16);
		}
	}
	/* A path over IPv4 does not exist from an IPv6 address, nor the other way round. */
	if (best < 2)
		return rst_fail(err, EADDRNOTAVAIL, "%s port %u has no %s GID of the family %s: give its interface an address",
				ibdev, port, want_v2 ? "RoCE v2" : "IB/RoCE v1",
				want_class == 0 ? "IPv4" : want_class == 1 ? "IPv6 link-local" : "IPv6");
	return 0;
}
