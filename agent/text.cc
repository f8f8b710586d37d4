// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "text.h"

#include <time.h>

namespace migr {

std::string wrapped(std::string text, std::size_t indent) {
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

std::string cut(const std::string& text, std::size_t most) { return text.size() <= most ? text : text.substr(0, most - 2) + ".."; }

std::string local_time(std::int64_t s) {
  const time_t when = s;
  tm t{};
  char text[32] = "?";
  if (localtime_r(&when, &t)) strftime(text, sizeof text, "%F %T", &t);
  return text;
}

}  // namespace migr
