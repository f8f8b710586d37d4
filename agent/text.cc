// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "text.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace migr {

std::string printable(std::string text) {
  unsigned char before = 0;
  int left = 0;  // bytes of a character of UTF-8
  for (char& c : text) {
    const auto b = static_cast<unsigned char>(c);
    const bool high = b >= 0x80 && b < 0xa0;  // a control character by itself, and after 0xc2 the same in UTF-8
    if (b < ' ' || b == 0x7f || (high && (!left || before == 0xc2))) c = '?';
    if (b >= 0xc0) left = b >= 0xf0 ? 3 : b >= 0xe0 ? 2
                                                    : 1;
    else left = b >= 0x80 && left ? left - 1 : 0;
    before = b;
  }
  return text;
}

std::string wrapped(std::string text, std::size_t indent) {
  text = printable(std::move(text));
  std::string out;
  while (text.size() > kColumns) {
    auto at = text.rfind(' ', kColumns);
    if (at == text.npos || at <= text.find_first_not_of(' ')) at = kColumns;
    out += text.substr(0, at) + "\n";
    const auto next = text.find_first_not_of(' ', at);
    if (next == text.npos) return out;
    text = std::string(indent, ' ') + text.substr(next);
  }
  return out + text + "\n";
}

std::string cut(const std::string& text, std::size_t most) { return printable(text.size() <= most ? text : text.substr(0, most - 2) + ".."); }

std::string short_count(std::uint64_t n) {
  if (n < 100'000) return std::to_string(n);
  return n < 10'000'000 ? std::to_string(n / 1000) + "k" : std::to_string(n / 1'000'000) + "M";
}

std::string short_bytes(std::uint64_t n) {
  constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (n < 1000) return std::to_string(n) + " B";
  auto value = static_cast<double>(n) / 1000;
  std::size_t unit = 0;
  for (; value >= 999.5; unit++) value /= 1000;
  return fmt::format("{:.{}f} {}", value, value < 9.95 ? 1 : 0, kUnits[unit]);
}

bool may_colour(int fd) {
  const char* no_color = std::getenv("NO_COLOR");
  return isatty(fd) && !(no_color && *no_color);
}

bool may_rewrite(int fd) {
  const char* term = std::getenv("TERM");
  return isatty(fd) && !(term && !std::strcmp(term, "dumb"));
}

std::size_t columns_of(int fd) {
  winsize w{};
  return !ioctl(fd, TIOCGWINSZ, &w) && w.ws_col ? w.ws_col : kColumns;
}

std::string local_time(std::int64_t s) {
  const time_t when = s;
  tm t{};
  char text[32] = "?";
  if (localtime_r(&when, &t)) strftime(text, sizeof text, "%F %T", &t);
  return text;
}

}  // namespace migr
