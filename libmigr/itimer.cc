/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "itimer.h"

#include <sys/time.h>

namespace migr::itimer {
namespace {

constexpr __itimer_which kKinds[] = {ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF};
constexpr timeval kNever{.tv_sec = 0x10000000, .tv_usec = 314159};  // eight years, and a mark that it is ours

bool armed(const timeval& t) { return t.tv_sec || t.tv_usec; }
bool is_never(const timeval& t) { return t.tv_sec == kNever.tv_sec && t.tv_usec == kNever.tv_usec; }

}  // namespace

void hold() {
  for (const auto kind : kKinds) {
    itimerval t{};
    if (getitimer(kind, &t) != 0 || !armed(t.it_value) || armed(t.it_interval)) continue;
    t.it_interval = kNever;
    setitimer(kind, &t, nullptr);
  }
}

void release() {
  for (const auto kind : kKinds) {
    itimerval t{};
    if (getitimer(kind, &t) != 0 || !is_never(t.it_interval)) continue;
    t.it_interval = {};
    if (t.it_value.tv_sec > kNever.tv_sec / 2) t.it_value = {};  // it has fired and begun its interval
    setitimer(kind, &t, nullptr);
  }
}

}  // namespace migr::itimer
