// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "fault.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

#include "limits.h"

namespace migr {
namespace {

struct Item {
  std::string point, action;
};

std::vector<Item> items_of(const std::string& spec) {
  std::vector<Item> items;
  std::istringstream list(spec);
  for (std::string text; std::getline(list, text, ',');) {
    const auto colon = std::min(text.find(':'), text.size());
    items.push_back({text.substr(0, colon), colon < text.size() ? text.substr(colon + 1) : ""});
  }
  return items;
}

bool is_point(const std::string& p) {
  return std::any_of(std::begin(kFaultSteps), std::end(kFaultSteps),
                     [&](std::string_view s) { return p == std::string(s) + ".begin" || p == std::string(s) + ".end"; });
}

bool is_action(const std::string& a) {
  if (a == "fail" || a == "fail-once" || a == "exit" || a == "hang") return true;
  if (a.starts_with("while=/")) return true;
  if (!a.starts_with("sleep=")) return false;
  char* end = nullptr;
  return std::strtod(a.c_str() + 6, &end) > 0 && end && !*end;
}

void sleep_for_ms(double ms) { usleep(static_cast<useconds_t>(ms * 1000)); }

void wait_at(const char* file) {
  constexpr int kLookMs = 20;
  close(open(file, O_CREAT | O_CLOEXEC | O_WRONLY, 0600));
  for (int ms = 0; !access(file, F_OK) && ms < kFaultHangMs; ms += kLookMs) sleep_for_ms(kLookMs);
}

}  // namespace

Status check_faults(const std::string& spec) {
  for (const auto& i : items_of(spec)) {
    if (!is_point(i.point)) return Error{EINVAL, "MIGR_FAULT: no fault point '" + i.point + "'; see: migrd --list-faults"};
    if (!is_action(i.action)) return Error{EINVAL, "MIGR_FAULT: '" + i.action + "' is none of fail, fail-once, exit, hang, sleep=SECONDS, while=/FILE"};
  }
  return {};
}

Status fault(const std::string& spec, FaultStep step, FaultAt at) {
  if (spec.empty()) return {};
  const std::string point = std::string(kFaultSteps[static_cast<std::size_t>(step)]) + (at == FaultAt::kBegin ? ".begin" : ".end");
  static std::mutex mutex;
  static std::set<std::string> done;
  for (const auto& i : items_of(spec)) {
    if (i.point != point) continue;
    if ((i.action == "fail-once" || i.action == "hang") && !(std::lock_guard(mutex), done.insert(point).second)) continue;
    spdlog::warn("fault point {}: {}", point, i.action);
    if (i.action.starts_with("fail")) return Error{ECANCELED, "fault point '" + point + "'"};
    if (i.action == "exit") _exit(70);
    if (i.action.starts_with("while=")) wait_at(i.action.c_str() + 6);
    else sleep_for_ms(i.action == "hang" ? kFaultHangMs : std::atof(i.action.c_str() + 6) * 1000);
  }
  return {};
}

}  // namespace migr
