// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <string>

#include "json.h"

namespace migr {

/// One migration as a page of its own: no script, nothing that is loaded from elsewhere. @param s  as History gives it
std::string report_html(const Json& s);

}  // namespace migr
