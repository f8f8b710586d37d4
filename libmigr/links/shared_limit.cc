/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "shared_limit.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "../events.h"
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

/// @return false: see `why`
bool make_bell(SrqShadow& s, std::string& why) {
  ibv_context* const ctx = s.context->real;
  auto& bell = s.link->bell;
  bell.cq = events::with_kernel_fd(*ctx, [&] { return real().create_cq(ctx, 1, nullptr, nullptr, 0); });
  if (!bell.cq) return why = std::string("create_cq: ") + std::strerror(errno), false;
  const auto receives = static_cast<std::uint32_t>(bell.cq->cqe) + 1;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = bell.cq;
  init.cap = {.max_send_wr = 1, .max_recv_wr = receives, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  bell.qp = events::with_kernel_fd(*ctx, [&] { return create_on(s.app.pd, init, s.link->twin->home->config.port, 0, why); });
  if (!bell.qp) return false;
  ibv_recv_wr wr{}, *bad;
  int err = 0;
  for (std::uint32_t i = 0; i < receives && !err; ++i) err = s.context->ops.post_recv(bell.qp, &wr, &bad);
  if (err) why = std::string("post_recv: ") + std::strerror(err);
  return !err;
}

void destroy_bell(SrqShadow& s) {
  auto& bell = s.link->bell;
  switchover::destroy_real(bell.qp);
  if (bell.cq) real().destroy_cq(std::exchange(bell.cq, nullptr));
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
  auto& bell = s.link->bell;
  if (not_used(s) >= armed(s) || (bell.cq && events::rings(bell.cq))) return kLookMs;
  destroy_bell(s);
  std::string why;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  if (make_bell(s, why)) {
    events::reach_limit(s, bell.cq);
    if (const int err = real().modify_qp(bell.qp, &to, IBV_QP_STATE)) why = std::string("modify_qp: ") + std::strerror(err);
  }
  if (!why.empty()) std::fprintf(stderr, "libmigr: nobody can be told that the limit of an SRQ is reached: %s\n", why.c_str());
  return 0;
}

void remove_bell(SrqShadow& s) {
  if (!s.link->bell.cq) return;
  events::still(s.link->bell.cq, *s.context->real);
  destroy_bell(s);
}

}  // namespace migr::links
