// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Who a process is for its partners, wherever it runs: a number of its library's own.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>

#include "hex.h"
#include "status.h"

namespace migr {

using Instance = std::array<std::uint8_t, 16>;
inline std::string bytes_of(const Instance& i) { return {reinterpret_cast<const char*>(i.data()), i.size()}; }
inline std::string hex(const Instance& i) { return to_hex(bytes_of(i)); }
/// EINVAL: of another length.
inline Result<Instance> instance_of(std::string_view bytes) {
  Instance i{};
  if (bytes.size() != i.size()) return Error{EINVAL, "an instance has 16 bytes"};
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(i.data()));
  return i;
}

}  // namespace migr
