/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "event_bell.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "../events.h"
#include "../real.h"
#include "state.h"

namespace migr::links {
namespace {

/// @return false: see `why`
bool make(EventBell& bell, Context& context, ibv_pd* pd, unsigned port, std::string& why) {
  ibv_context* const ctx = context.real;
  bell.cq = events::with_kernel_fd(*ctx, [&] { return real().create_cq(ctx, 1, nullptr, nullptr, 0); });
  if (!bell.cq) return why = std::string("create_cq: ") + std::strerror(errno), false;
  const auto receives = static_cast<std::uint32_t>(bell.cq->cqe) + 1;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = bell.cq;
  init.cap = {.max_send_wr = 1, .max_recv_wr = receives, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  bell.qp = events::with_kernel_fd(*ctx, [&] { return create_on(pd, init, port, 0, why); });
  if (!bell.qp) return false;
  ibv_recv_wr wr{}, *bad;
  int err = 0;
  for (std::uint32_t i = 0; i < receives && !err; ++i) err = context.ops.post_recv(bell.qp, &wr, &bad);
  if (err) why = std::string("post_recv: ") + std::strerror(err);
  return !err;
}

}  // namespace

std::string ring(EventBell& bell, Context& context, ibv_pd* pd, unsigned port, const ibv_async_event& event) {
  std::string why;
  remove(bell, context);
  if (!make(bell, context, pd, port, why)) return why;
  events::will_tell(bell.cq, event);
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  const int err = real().modify_qp(bell.qp, &to, IBV_QP_STATE);
  return err ? std::string("modify_qp: ") + std::strerror(err) : "";
}

bool rings(const EventBell& bell) { return bell.cq && events::rings(bell.cq); }

void remove(EventBell& bell, Context& context) {
  if (!bell.cq) return;
  events::still(bell.cq, *context.real);
  switchover::destroy_real(bell.qp);
  real().destroy_cq(std::exchange(bell.cq, nullptr));
}

}  // namespace migr::links
