/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * GIDs after a migration. An application looks a GID up once and keeps its index: the
 * indexes go on meaning what they meant on the host where it opened the device. What
 * stands there is the present host's GID of that kind (port, RoCE version, address
 * family) that is nearest to it, as only that can be reached.
 */
#ifndef MIGR_GIDS_H
#define MIGR_GIDS_H

#include <vector>

#include "shadow.h"

namespace migr::gids {

/* Callers of all of these hold the Registry's lock. */

/// While it lives, this thread's queries are answered with the kernel's indexes: libibverbs calls the exported ones.
struct Inside {
  Inside();
  ~Inside();
};

/// The GIDs of a device, by their indexes in the kernel. @return 0 or a positive errno
int read(ibv_context* real, std::vector<ibv_gid_entry>& out);

/// What here stands for another host's GID: the nearest of its port and RoCE version (migr_gid_nearness()). Null: none is of its kind
const ibv_gid_entry* like(const std::vector<ibv_gid_entry>& table, const ibv_gid_entry& was);

/// The same GID, where it is now; else what here stands for it. Null: nothing of its kind
const ibv_gid_entry* again(const std::vector<ibv_gid_entry>& table, const ibv_gid_entry& was);
/// At that index. Null: none is
const ibv_gid_entry* find(const std::vector<ibv_gid_entry>& table, std::uint32_t port, std::uint32_t index);

/// DESCRIBE: notes what the application knows, unless it has moved: it goes on knowing what it did.
void note(Context& context);
/// REBIND.
void moved(Context& context);

/// The index in the kernel of the one that the application means. As it is: nothing of its kind is here.
std::uint8_t here(const Context& context, std::uint8_t port, std::uint8_t index);
/// The reverse.
std::uint8_t named(const Context& context, std::uint8_t port, std::uint8_t index);

}  // namespace migr::gids

#endif
