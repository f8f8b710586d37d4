// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The hosts of the configuration, taken anew while migrd runs: a host is added or leaves without a restart of the others.
#pragma once

#include <string>
#include <vector>

#include "config.h"
#include "host_service.h"
#include "status.h"

namespace migr {

/// Takes "peers" and "allow" from the file; what else has changed in it is only named in the reply. An error has changed nothing.
/// EBUSY: the file takes a peer away, or changes what peers may, and a migration with another host is not finished here: its calls would be refused in
/// the middle of it.
/// @param config  what migrd runs with
Result<wire::ReloadReply> reload(Config& config, const std::string& path, const std::vector<Role*>& roles);

}  // namespace migr
