// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <string>

#include "process_session.h"

namespace migr {

/// For SaidRarely, of what a process may do all the time: each is heard of, but of one user's not more than a few at a time.
inline std::string as_one_of_many(const User& user, pid_t pid, const std::string& what) {
  constexpr pid_t kOfUser = 64;
  return what + ", " + user.text() + ", " + std::to_string(pid % kOfUser);
}

inline std::string as_one_of_many(const Speaker& who, const std::string& what) { return as_one_of_many(who.user, who.pid, what); }

}  // namespace migr
