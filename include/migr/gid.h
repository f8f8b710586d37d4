/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Address families of GIDs: a path over one does not exist from an address of another. */
#ifndef MIGR_GID_H
#define MIGR_GID_H

#include <stdint.h>
#include <string.h>

/* 0 IPv4, 1 IPv6 link-local, 2 IPv6 */
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

static inline const char *migr_gid_family_name(int family)
{
	return family == 0 ? "IPv4" : family == 1 ? "IPv6 link-local" : "IPv6";
}

#endif
