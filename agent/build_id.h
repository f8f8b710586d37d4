// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which build of libmigr programs have: CRIU takes no other one for it where it restores them.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "mappings.h"
#include "status.h"

namespace migr {

/// Of an ELF file of this machine: what the linker has noted. Empty: it has none, or is none
std::string build_id_of(const std::string& file);

/// Whether a process, which has these mappings, runs what is in `file` now, wherever that is mounted for it. EOPNOTSUPP: it runs one of that name
/// that has been removed or replaced since, and is too large for CRIU to dump it with the process
Result<bool> maps_library(pid_t pid, const std::vector<Mapping>& mappings, const std::string& file);

/// EBUSY: `file` here is of another build than what runs `there`. What has no build ID is not compared
Status same_build(const std::string& theirs, const std::string& there, const std::string& file, const std::string& here);

}  // namespace migr
