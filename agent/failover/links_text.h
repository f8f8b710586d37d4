// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// `migrctl links`, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "wire.pb.h"

namespace migr {

/// No line is longer than 80 columns.
std::string links_text(const wire::LinksReply& r);
nlohmann::ordered_json links_json(const wire::LinksReply& r);

}  // namespace migr
