/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Memory that the CRIU plugin has registered for us before the commit: include/migr/ahead.h says how.
 * Thread: the control thread, with the Registry's lock held.
 */
#ifndef MIGR_AHEAD_SWITCHOVER_H
#define MIGR_AHEAD_SWITCHOVER_H

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>
#include "../shadow.h"
#include "../../include/migr/ahead.h"
#include "../../include/migr/proc_wire.h"

namespace migr::switchover::ahead {

/// DESCRIBE: where to look. @param instance of this process
void describe(std::span<const std::uint8_t, 16> instance, std::vector<migr_fd_desc>& out);

/// FREEZE: leaves the commands that register every MR.
void leave();

/// REBIND. @param index of `mr` in the Registry: MRs are those of FREEZE, what changes them waits
/// @return what the plugin has registered in its place; null: nothing
const migr_ahead_mr* done(std::size_t index, const MrShadow& mr);

/// Nothing is left: after REBIND or ROLLBACK, and in a child that was forked.
void forget();

}  // namespace migr::switchover::ahead

#endif
