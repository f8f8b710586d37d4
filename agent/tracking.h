// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Where NICs write to while memory is copied ahead, as libraries note it: TRACK in include/migr/proc_wire.h. For one process; the same
// at both ends of a connection. docs/protocol.md, "Memory that was copied ahead".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "process_session.h"
#include "replay.h"
#include "wire.pb.h"

namespace migr {

/// From now on, of all that is posted or was before. @param partner_of  these QPs are a partner's; none: the process is moved
/// @return why it cannot be. Then the process notes nothing
Status track(ProcessSession& s, std::uint32_t migration, std::span<const migr_qp_ref> partner_of);
/// Drained: what was noted, and the end of it.
Result<std::vector<migr_nic_write>> notes_of(ProcessSession& s, std::uint32_t migration);
/// A partner's. Where that is not all, `out` is not `tracked` any more.
void add_writes(ProcessSession& s, std::uint32_t migration, const CountedQps& counted, Shared<wire::DrainReply>& out);

}  // namespace migr
