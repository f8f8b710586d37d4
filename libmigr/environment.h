/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Variables of the environment that more than one file reads. Thread: any. */
#ifndef MIGR_ENVIRONMENT_H
#define MIGR_ENVIRONMENT_H

#include <cstdlib>
#include <cstring>

#include "../include/migr/links_wire.h"

namespace migr::environment {

/// MIGR_DISABLE, whatever it is: libmigr stays out of the way. Not set: it does not. Read once.
inline bool disabled() {
  static const bool value = std::getenv("MIGR_DISABLE") != nullptr;
  return value;
}

/// MIGR_FORCE_SWITCHED, or null: for tests and benchmarks. Not set: objects are born on the direct path, with the device's names. Read once.
inline const char* forced() {
  static const char* const value = std::getenv("MIGR_FORCE_SWITCHED");
  return value;
}

/// MIGR_FORCE_SWITCHED=names: objects have another name than the device's, so that one that nobody translates is seen. They are born on the switched path, too.
inline bool force_names() { return forced() && !std::strcmp(forced(), "names"); }

/// MIGR_FORCE_SWITCHED=protected: every CQ is polled, and every QP posted to, as one with a backup link.
inline bool force_protected() { return forced() && !std::strcmp(forced(), "protected"); }

/// MIGR_FORCE_SWITCHED, whatever else it is: every object is born on the switched path.
inline bool force_switched() {
  static const bool value = forced() && !force_protected();
  return value;
}

/// MIGR_LINKS_SOCKET: where migrd is asked about links. Not set, or empty: at MIGR_LINKS_SOCKET of links_wire.h. Read at each call.
inline const char* links_socket() {
  const char* const named = std::getenv("MIGR_LINKS_SOCKET");
  return named && *named ? named : MIGR_LINKS_SOCKET;
}

/// MIGR_LINKS: the file with what is configured about links. Not set, or empty: null, for links::kDefaultFile. Read at each call.
inline const char* links_file() {
  const char* const named = std::getenv("MIGR_LINKS");
  return named && *named ? named : nullptr;
}

}  // namespace migr::environment

#endif
