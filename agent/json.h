// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace migr {

/// Members stay in the order in which they were said.
using Json = nlohmann::ordered_json;

}  // namespace migr
