// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// How long a program will stand still, where nothing like it was moved from here yet by which one could tell.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "history.h"

namespace migr {

/// What a stop is made of, as far as it is known before.
struct StopParts {
  std::uint64_t memory_bytes = 0;  // filled
  bool pre_copy = false;           // it is copied ahead of the stop
  std::uint32_t qps = 0;
  double link_bytes_per_s = 0;  // to the destination; 0: not known
};

/// Of a host that changes nothing after a copy ahead. With bounds: the least is a fast one, the most an emulated one that changes everything.
ExpectedStop estimated_stop(const StopParts& parts);

/// Of what was not moved from here yet. What others took tells of it, unless it is so much more that they do not.
/// @param past  of others
ExpectedStop likely_stop(const std::optional<ExpectedStop>& past, const ExpectedStop& estimate);

/// What the netdev says that leads there, bytes per second. 0: it does not say. @param address  "host:port"
double link_rate(const std::string& address);

}  // namespace migr
