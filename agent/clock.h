// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What people and other hosts are told of as a time.
#pragma once

#include <chrono>
#include <cstdint>

namespace migr {

/// Since 1970.
inline std::int64_t unix_now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}
inline std::int64_t unix_now() { return unix_now_ms() / 1000; }

}  // namespace migr
