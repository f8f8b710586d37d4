/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Address families of GIDs, and which GID of a host stands for one of another host. */
#ifndef MIGR_GID_H
#define MIGR_GID_H

#include <stdint.h>
#include <string.h>

/* 0 IPv4, 1 IPv6 link-local, 2 IPv6: a path over one does not exist from an address of another. */
static inline int migr_gid_family(const uint8_t gid[16])
{
	static const uint8_t mapped[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };

	if (!memcmp(gid, mapped, sizeof(mapped)))
		return 0;
	return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80 ? 1 : 2;
}

/* Of the beginning: what is on one network has more of them in common than what is not. */
static inline int migr_gid_common_bits(const uint8_t a[16], const uint8_t b[16])
{
	int n = 0;

	while (n < 128 && !((a[n / 8] ^ b[n / 8]) & (0x80 >> n % 8)))
		n++;
	return n;
}

/*
 * How near @here is to @was, a GID of another host. Of a port's GIDs of one RoCE version the nearest stands for it, of several
 * that are the one with the lowest index: the same one for whoever asks, the plugin, migrd or the library. By nothing but the
 * GID: not all of them know what index it had. Of IPv6 only the network counts, as the rest is chosen by each host; the very
 * same GID is nearer than any other. @return 0: of another family, and stands for it in no case
 */
static inline int migr_gid_nearness(const uint8_t was[16], const uint8_t here[16])
{
	enum { NETWORK_BITS = 64 };
	int bits = migr_gid_common_bits(was, here);

	if (migr_gid_family(was) != migr_gid_family(here))
		return 0;
	if (migr_gid_family(was) != 0 && bits > NETWORK_BITS && bits < 128)
		bits = NETWORK_BITS;
	return 1 + bits;
}

static inline const char *migr_gid_family_name(int family)
{
	return family == 0 ? "IPv4" : family == 1 ? "IPv6 link-local" : "IPv6";
}

#endif
