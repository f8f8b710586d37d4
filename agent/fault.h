// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Fault points, for tests only: environment MIGR_FAULT=STEP:ACTION[,STEP:ACTION..] of
// migrd. ACTION: fail, sleep=SECONDS, exit. The steps are named in migrd(8).
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string>

#include "status.h"

namespace migr {

inline Status fault(const std::string& spec, const std::string& step) {
  std::istringstream list(spec);
  for (std::string item; std::getline(list, item, ',');) {
    const auto colon = item.find(':');
    if (colon == std::string::npos || item.substr(0, colon) != step) continue;
    const std::string action = item.substr(colon + 1);
    if (action == "fail") return Error{ECANCELED, "fault point '" + step + "'"};
    if (action == "exit") _exit(70);
    if (action.starts_with("sleep=")) usleep(static_cast<useconds_t>(std::atof(action.c_str() + 6) * 1e6));
  }
  return {};
}

}  // namespace migr
