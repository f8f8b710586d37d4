/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "shared_limit.h"

#include <cstdio>
#include <cstring>

#include "../path.h"
#include "../real.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr unsigned kLookMs = 5;

void set_counted_here(SrqShadow& s, bool is) {
  std::lock_guard guard(Registry::get().events_lock);
  s.counted_here = is;
}

std::uint32_t armed(const SrqShadow& s) {
  std::lock_guard guard(Registry::get().events_lock);
  return s.armed;
}

void arm_device(SrqShadow& s, std::uint32_t limit) {
  ibv_srq_attr attr{};
  attr.srq_limit = limit;
  if (const int err = real().modify_srq(s.real, &attr, IBV_SRQ_LIMIT)) std::fprintf(stderr, "libmigr: the limit of an SRQ cannot be set to %u: %s\n", limit, std::strerror(err));
}

}  // namespace

void limit_set() {
  if (state()) kick(state()->failover_fd);
}

void count_here(SrqShadow& s) {
  if (s.counted_here) return;
  set_counted_here(s, true);
  if (armed(s)) arm_device(s, 0);
}

void let_device_count(SrqShadow& s) {
  set_counted_here(s, false);  // what it says from now on is so
  if (const std::uint32_t limit = armed(s)) arm_device(s, limit);
}

void count_at_device(SrqShadow& s) { set_counted_here(s, false); }

bool watches_limit(const SrqShadow& s) { return s.counted_here && armed(s); }

unsigned look_at_limit(SrqShadow& s) {
  if (!watches_limit(s)) return 0;
  EventBell& bell = s.link->bell;
  if (not_used(s) >= armed(s) || rings(bell)) return kLookMs;
  ibv_async_event reached{};
  reached.event_type = IBV_EVENT_SRQ_LIMIT_REACHED;
  reached.element.srq = &s.app;
  const std::string why = ring(bell, *s.context, s.app.pd, s.link->twin->home->config.port, reached);
  if (!why.empty()) std::fprintf(stderr, "libmigr: nobody can be told that the limit of an SRQ is reached: %s\n", why.c_str());
  return 0;
}

}  // namespace migr::links
