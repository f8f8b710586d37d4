/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "kept.h"

#include <cerrno>
#include <ctime>

#include "path.h"

namespace migr::kept {
namespace {

constexpr long kOpenPollNs = 200'000;

bool keepable(const ibv_send_wr& wr) {
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      return true;
    default:
      return false;
  }
}

void push_building(QpShadow& q) {
  if (q.building_open) q.built.push_back(std::move(q.building));
  q.building = {};
  q.building_open = false;
}

void close(QpShadow& q) {
  q.built.clear();
  q.building_open = false;
  q.session.store(Session::kNone, std::memory_order_relaxed);
  q.session_lock.unlock();
}

bool full(const QpShadow& q, std::size_t more) { return q.kept_sends.size() + more > q.cap.max_send_wr; }

}  // namespace

int keep(QpShadow& q, const ibv_send_wr& wr) {
  if (!keepable(wr)) return EOPNOTSUPP;
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > q.cap.max_send_sge) return EINVAL;
  if (full(q, 1)) return ENOMEM;
  KeptSend send{.wr = wr, .sges = {}, .inline_data = {}};
  if (wr.send_flags & IBV_SEND_INLINE) {
    for (int i = 0; i < wr.num_sge; ++i) {
      const auto* from = reinterpret_cast<const std::uint8_t*>(wr.sg_list[i].addr);
      send.inline_data.insert(send.inline_data.end(), from, from + wr.sg_list[i].length);
    }
    if (send.inline_data.size() > q.cap.max_inline_data) return EINVAL;
  } else {
    send.sges.assign(wr.sg_list, wr.sg_list + wr.num_sge);
  }
  q.kept_sends.push_back(std::move(send));
  return 0;
}

int keep(QpShadow& q, KeptReceive receive) {
  if (receive.sges.size() > q.cap.max_recv_sge) return EINVAL;
  if (q.kept_receives.size() >= q.cap.max_recv_wr) return ENOMEM;
  q.kept_receives.push_back(std::move(receive));
  return 0;
}

KeptReceive copy(const ibv_recv_wr& wr) {
  return {.wr_id = wr.wr_id, .sges = std::vector<ibv_sge>(wr.sg_list, wr.sg_list + wr.num_sge)};
}

bool start(QpShadow& q) {
  // Until every thread was seen outside, a session on the path may still be open: the two must not mix.
  while (q.state.load(std::memory_order_relaxed) & kOpen) {
    const timespec pause{0, kOpenPollNs};
    nanosleep(&pause, nullptr);
  }
  q.session_lock.lock();
  std::lock_guard guard(q.lock);
  if (!(q.state.load(std::memory_order_relaxed) & kKeepSends)) {
    q.session_lock.unlock();
    return false;
  }
  q.build_error = 0;
  q.session.store(Session::kKept, std::memory_order_relaxed);
  return true;
}

void open(QpShadow& q, ibv_wr_opcode opcode) {
  push_building(q);
  q.building_open = true;
  q.building.wr = {};
  q.building.wr.wr_id = q.app_ex.wr_id;
  q.building.wr.send_flags = q.app_ex.wr_flags & ~static_cast<unsigned>(IBV_SEND_INLINE);
  q.building.wr.opcode = opcode;
}

void set_sges(QpShadow& q, const ibv_sge* list, std::size_t count) {
  if (count > q.cap.max_send_sge) q.build_error = EINVAL;
  q.building.sges.assign(list, list + count);
}

void set_inline(QpShadow& q, const ibv_data_buf* list, std::size_t count) {
  q.building.inline_data.clear();
  for (std::size_t i = 0; i < count; ++i) {
    const auto* from = static_cast<const std::uint8_t*>(list[i].addr);
    q.building.inline_data.insert(q.building.inline_data.end(), from, from + list[i].length);
  }
  if (q.building.inline_data.size() > q.cap.max_inline_data) q.build_error = EINVAL;
  q.building.wr.send_flags |= IBV_SEND_INLINE;
}

void refuse(QpShadow& q) { q.build_error = EOPNOTSUPP; }

int complete(QpShadow& q) {
  push_building(q);
  int err = q.build_error;
  {
    std::lock_guard guard(q.lock);
    const bool suspended = q.state.load(std::memory_order_relaxed) & kKeepSends;
    if (!err && suspended && full(q, q.built.size())) err = ENOMEM;
    if (!err)
      for (KeptSend& send : q.built) {
        if (suspended)
          q.kept_sends.push_back(std::move(send));
        else if ((err = path::post_one_send(q, send)))
          break;
      }
  }
  close(q);
  return err;
}

void abort(QpShadow& q) { close(q); }

}  // namespace migr::kept
