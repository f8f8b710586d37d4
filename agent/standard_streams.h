// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Standard streams of a container that are pipes to a program of its host, as those of containerd and podman are.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace migr {

/// The N of each pipe:[N].
/// @param streams  as runc has written them down
std::vector<std::uint32_t> pipes_in(const std::vector<std::string>& streams);

/// In a checkpoint with runc's descriptors.json: who has an end of such a pipe open gets the container's /dev/null. Nobody would be at the
/// other end, and /dev/null moves on with it.
Status pipes_to_null(const std::string& images);

}  // namespace migr
