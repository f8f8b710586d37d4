/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "discard.h"

#include <utility>

#include "../real.h"
#include "../shadow.h"

namespace migr::links {

void Discards::add(ibv_qp* qp, ibv_mr* mr, std::vector<std::uint8_t> buffers) {
  {
    std::lock_guard guard(Registry::get().events_lock);
    qp->qp_context = nullptr;  // its vQP may be gone before it
  }
  if (qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS) {  // it answers nobody any more; in ERR it would flush its queues
    ibv_qp_attr to{};
    to.qp_state = IBV_QPS_RESET;
    (void)real().modify_qp(qp, &to, IBV_QP_STATE);
  }
  std::lock_guard guard(lock_);
  all_.push_back({qp, mr, std::move(buffers)});
  changed_.notify_all();
}

void Discards::destroy_all(std::unique_lock<std::mutex>& held) {
  const std::vector<Discarded> mine = std::exchange(all_, {});
  ++under_way_;
  held.unlock();
  for (const Discarded& d : mine) {
    real().destroy_qp(d.qp);
    if (d.mr) real().dereg_mr(d.mr);
  }
  held.lock();
  --under_way_;
  changed_.notify_all();
}

bool Discards::none() {
  std::lock_guard guard(lock_);
  return all_.empty() && !under_way_;
}

void Discards::finish() {
  std::unique_lock held(lock_);
  if (!all_.empty()) destroy_all(held);
  changed_.wait(held, [this] { return all_.empty() && !under_way_; });
}

void Discards::run() {
  std::unique_lock held(lock_);
  for (;;) {
    changed_.wait(held, [this] { return !all_.empty(); });
    destroy_all(held);
  }
}

}  // namespace migr::links
