// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace migr {

/// One migration as a page of its own: no script, nothing that is loaded from elsewhere. @param s  as History gives it
std::string report_html(const nlohmann::ordered_json& s);

}  // namespace migr
