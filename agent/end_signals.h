// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What ends a daemon, and what does not.
#pragma once

#include <signal.h>

#include <functional>

namespace migr {

inline sigset_t end_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int sig : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, sig);
  return set;
}

/// Of every thread that begins later: only wait_for_end() sees them.
inline void hold_end_signals() {
  const sigset_t set = end_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

/// @param hangup  called at SIGHUP. Who sends it wants a configuration to be read again, or has closed a terminal: that is no end, for
///                processes that wait for us would find nobody
/// @return SIGTERM or SIGINT
inline int wait_for_end(const std::function<void()>& hangup) {
  const sigset_t set = end_signals();
  for (int sig = 0;;) {
    sigwait(&set, &sig);
    if (sig != SIGHUP) return sig;
    hangup();
  }
}

}  // namespace migr
