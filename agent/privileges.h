// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include "status.h"

namespace migr {

/// Gives up the capabilities that migrd itself does not need (docs/threat-model.md has who needs which for what). What it
/// starts as root, runc and CRIU, has all again that the bounding set leaves: it has to give restored programs theirs.
/// Thread: before there is a second one.
Status drop_capabilities();

}  // namespace migr
