// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The instructions that programs may have found when they were started, and go on to use wherever they are restored.
#pragma once

#include <google/protobuf/repeated_ptr_field.h>

#include <string>
#include <vector>

#include "status.h"

namespace migr {

/// Of this host, by their names in /proc/cpuinfo, in order: what a program can use, not what tells of the kernel's own.
std::vector<std::string> instructions_here(const std::string& cpuinfo = "/proc/cpuinfo");
/// EBUSY: some are not here. @param needed  none: not known
Status instructions_fit(const google::protobuf::RepeatedPtrField<std::string>& needed, const std::string& cpuinfo = "/proc/cpuinfo");

}  // namespace migr
