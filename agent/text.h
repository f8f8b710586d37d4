// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Lines for a terminal.
#pragma once

#include <cstdint>
#include <string>

namespace migr {

inline constexpr std::size_t kColumns = 80;

/// What others have named must not steer a terminal, nor begin a line of its own: a control character becomes a question mark.
std::string printable(std::string text);
/// Printable. At spaces; what is longer than a line without one is broken. Lines after the first are indented.
std::string wrapped(std::string text, std::size_t indent);
/// Printable.
std::string cut(const std::string& text, std::size_t most);
/// In at most five columns: "10000", "100k", "4M".
std::string short_count(std::uint64_t n);
/// "17 B", "4.2 MB"
std::string short_bytes(std::uint64_t n);
/// It is a terminal, and nobody has set NO_COLOR (no-color.org).
bool may_colour(int fd);
/// It is a terminal on which a line can be written anew.
bool may_rewrite(int fd);
/// Of the terminal. kColumns: it is none, or does not say.
std::size_t columns_of(int fd);
/// Date and time here. @param s  since 1970
std::string local_time(std::int64_t s);

}  // namespace migr
