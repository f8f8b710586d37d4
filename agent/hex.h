// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Bytes as the files of STATE_DIR have them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace migr {

/// Two digits of each byte, in small letters.
inline std::string to_hex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const unsigned char c : bytes) {
    out += kDigits[c >> 4];
    out += kDigits[c & 15];
  }
  return out;
}

/// nullopt: not what to_hex() writes.
inline std::optional<std::string> from_hex(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  if (text.size() % 2) return std::nullopt;
  std::string out;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    const auto high = kDigits.find(text[i]), low = kDigits.find(text[i + 1]);
    if (high == kDigits.npos || low == kDigits.npos) return std::nullopt;
    out += static_cast<char>(high << 4 | low);
  }
  return out;
}

}  // namespace migr
