// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// `migrctl links`, for people and for programs.
#pragma once

#include <string>

#include "../json.h"
#include "wire.pb.h"

namespace migr {

/// No line is longer than 80 columns.
std::string links_text(const wire::LinksReply& r);
Json links_json(const wire::LinksReply& r);

}  // namespace migr
