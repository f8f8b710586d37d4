// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// How a migration ended: what migrctl prints of it, and what history keeps.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "wire.pb.h"

namespace migr {

nlohmann::ordered_json resources_json(const wire::Resources& r);

/// "SUMMARY OF A MIGRATION" in migrctl(1).
nlohmann::ordered_json summary_json(const wire::Summary& s);

}  // namespace migr
