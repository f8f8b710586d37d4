// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// How a migration ended: what migrctl prints of it, and what history keeps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "json.h"
#include "wire.pb.h"

namespace migr {

Json resources_json(const wire::Resources& r);

/// "SUMMARY OF A MIGRATION" in migrctl(1).
Json summary_json(const wire::Summary& s);
/// Of its error, as errno(3) has it: "EINPROGRESS". null: none
Json error_name(const wire::Summary& s);

/// Which connections a checkpoint or restore has ended, or a migration, as their other ends had died. As text a line each, not more
/// than fit on a screen.
std::string gone_text(const wire::Summary& s);
Json gone_json(const wire::Summary& s);

/// "412 of 2048 MB"
std::string sent_text(std::uint64_t bytes, std::uint64_t of);

/// How far a phase is, in at most 69 columns: "412 of 2048 MB, 95.1 MB/s, 18 s left; stop: about 4 s".
/// @param stop_ms  how long the program is expected to stand still
std::string going_text(const wire::Going& g, std::optional<double> stop_ms);

}  // namespace migr
