// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// checkpoint.json: what the coordinator has to know of a checkpoint on disk (stored.h), which release stored it, and the
// checksum of each file of images/ and below bundle/, and of itself.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>

#include "coordinator.h"

namespace migr {

inline constexpr char kManifest[] = "checkpoint.json";
inline constexpr mode_t kFileMode = 0600;

/// Writes `dir`/checkpoint.json (0600) over the files that `dir`/images and `dir`/bundle have now. Not synced. Any thread, one per `dir`.
Status write_manifest(const std::string& dir, const ContainerInfo& info);

/// What the container's root filesystem had when it stood still: a file of `dir`/images (0600), before write_manifest(). Names relative to it.
Status write_root_names(const std::string& dir, const std::map<std::string, wire::TreeName>& names);
/// ENOENT: the root was not stored, for it cannot be written to or lies elsewhere, or by an older release.
Result<std::map<std::string, wire::TreeName>> read_root_names(const std::string& dir);

/// What was stored, if each file is there as it was stored, and no other. EINVAL: it is not, or is of another release.
Result<ContainerInfo> read_manifest(const std::string& dir);

}  // namespace migr
