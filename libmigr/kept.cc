/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "kept.h"

#include <cerrno>
#include <ctime>

#include "links/links.h"
#include "no_cancel.h"
#include "path.h"
#include "provider/provider.h"

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
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_LOCAL_INV:
    case IBV_WR_BIND_MW:
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

/// Caller holds q.lock and gives up q.session_lock.
void close(QpShadow& q) {
  q.built.clear();
  q.building_open = false;
  q.target = q.real_ex;
  q.state.fetch_and(~std::uint32_t{kKeptSession}, std::memory_order_relaxed);
}

/// With what the path that was cut had not completed, or the present one has not, and what waits: the next one has no more room. Without a backup
/// only who is being migrated is suspended, and what is in flight completes before; post_kept() waits where it does not.
bool full(QpShadow& q, std::size_t more) {
  unsigned before = 0;
  if (q.link && q.cut && !q.cut->settled) before = static_cast<unsigned>(q.cut->sends.size());
  else if (q.link && provider::sends_in_queue(q, before)) before = 0;
  if (q.link) before += static_cast<unsigned>(q.link->relay.sends.size());
  return before + q.kept_sends.size() + more > q.cap.max_send_wr;
}

}  // namespace

int copy(const QpShadow& q, const ibv_send_wr& wr, KeptSend& send) {
  if (!keepable(wr)) return EOPNOTSUPP;
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > q.cap.max_send_sge) return EINVAL;
  if (const int err = provider::refusal_of(q, wr)) return err;  // else the connection would end with it when it is posted
  send.wr = wr;
  if (wr.send_flags & IBV_SEND_INLINE) {
    for (int i = 0; i < wr.num_sge; ++i) {
      const auto* from = reinterpret_cast<const std::uint8_t*>(wr.sg_list[i].addr);
      send.inline_data.insert(send.inline_data.end(), from, from + wr.sg_list[i].length);
    }
    if (send.inline_data.size() > q.cap.max_inline_data) return EINVAL;
  } else {
    send.sges.assign(wr.sg_list, wr.sg_list + wr.num_sge);
  }
  return 0;
}

int keep(QpShadow& q, const ibv_send_wr& wr) {
  KeptSend send{};
  if (const int err = copy(q, wr, send)) return err;
  if (full(q, 1)) return ENOMEM;
  q.kept_sends.push_back(std::move(send));
  return 0;
}

int keep(QpShadow& q, KeptReceive receive) {
  if (receive.sges.size() > q.cap.max_recv_sge) return EINVAL;
  // Those of the path that was cut are on the next one once there is one, and are used there. Those of one that is frozen, or was
  // when FREEZE failed, are still on it.
  const bool waits = q.cut && !q.cut->joined_again && q.phase != switchover::Phase::kSwitched && q.phase != switchover::Phase::kRebound;
  const bool there = q.phase == switchover::Phase::kFrozen || q.phase == switchover::Phase::kDrained;
  const std::size_t before = waits ? q.cut->receives.size() : there ? q.outstanding.size()
                                                                    : 0;
  if (q.kept_receives.size() + before >= q.cap.max_recv_wr) return ENOMEM;
  q.kept_receives.push_back(std::move(receive));
  return 0;
}

int keep(SrqShadow& s, KeptReceive receive) {
  if (receive.sges.size() > s.max_sge) return EINVAL;
  std::size_t before = s.outstanding.size();
  std::vector<KeptReceive> now;
  if (s.link) before = links::not_used(s);
  else if (s.reading_back && !provider::outstanding_receives(s, now)) before = now.size();
  if (before + s.kept.size() >= s.max_wr) return ENOMEM;
  s.kept.push_back(std::move(receive));
  return 0;
}

KeptReceive copy(const ibv_recv_wr& wr) {
  return {.wr_id = wr.wr_id, .sges = std::vector<ibv_sge>(wr.sg_list, wr.sg_list + wr.num_sge)};
}

bool start(QpShadow& q) {
  const NoCancel no_cancel;
  for (;;) {
    // Until every thread was seen outside, a session on the path may still be open: the two must not mix.
    while (q.state.load(std::memory_order_relaxed) & kOpen) {
      const timespec pause{0, kOpenPollNs};
      nanosleep(&pause, nullptr);
    }
    q.session_lock.lock();
    std::lock_guard guard(q.lock);
    const std::uint32_t state = q.state.load(std::memory_order_relaxed);
    if ((state & kSessionsKept) && !(state & kOpen)) {
      q.build_error = 0;
      q.target = &q.keeper.ex;
      q.state.fetch_or(kKeptSession, std::memory_order_relaxed);
      return true;
    }
    q.session_lock.unlock();
    if (!(state & kSessionsKept)) return false;
  }
}

namespace {

QpShadow& owner(ibv_qp_ex* keeper) { return *reinterpret_cast<QpShadow::Keeper*>(keeper)->owner; }

/// Begins the next WR of the session. @return it
ibv_send_wr& open(ibv_qp_ex* keeper, ibv_wr_opcode opcode) {
  QpShadow& q = owner(keeper);
  push_building(q);
  q.building_open = true;
  q.building.wr = {};
  q.building.wr.wr_id = keeper->wr_id;
  q.building.wr.send_flags = keeper->wr_flags & ~static_cast<unsigned>(IBV_SEND_INLINE);
  q.building.wr.opcode = opcode;
  return q.building.wr;
}

void open_rdma(ibv_qp_ex* keeper, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr) {
  ibv_send_wr& wr = open(keeper, opcode);
  wr.wr.rdma.rkey = rkey;
  wr.wr.rdma.remote_addr = addr;
}

void wr_send(ibv_qp_ex* keeper) { open(keeper, IBV_WR_SEND); }
void wr_send_imm(ibv_qp_ex* keeper, __be32 imm) { open(keeper, IBV_WR_SEND_WITH_IMM).imm_data = imm; }
void wr_send_inv(ibv_qp_ex* keeper, std::uint32_t rkey) { open(keeper, IBV_WR_SEND_WITH_INV).invalidate_rkey = rkey; }
void wr_local_inv(ibv_qp_ex* keeper, std::uint32_t rkey) { open(keeper, IBV_WR_LOCAL_INV).invalidate_rkey = rkey; }
void wr_rdma_write(ibv_qp_ex* keeper, std::uint32_t rkey, std::uint64_t addr) {
  open_rdma(keeper, IBV_WR_RDMA_WRITE, rkey, addr);
}
void wr_rdma_write_imm(ibv_qp_ex* keeper, std::uint32_t rkey, std::uint64_t addr, __be32 imm) {
  open_rdma(keeper, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr);
  owner(keeper).building.wr.imm_data = imm;
}
void wr_rdma_read(ibv_qp_ex* keeper, std::uint32_t rkey, std::uint64_t addr) {
  open_rdma(keeper, IBV_WR_RDMA_READ, rkey, addr);
}
void wr_atomic_cmp_swp(ibv_qp_ex* keeper, std::uint32_t rkey, std::uint64_t addr, std::uint64_t compare,
                       std::uint64_t swap) {
  open(keeper, IBV_WR_ATOMIC_CMP_AND_SWP).wr.atomic = {
      .remote_addr = addr, .compare_add = compare, .swap = swap, .rkey = rkey};
}
void wr_atomic_fetch_add(ibv_qp_ex* keeper, std::uint32_t rkey, std::uint64_t addr, std::uint64_t add) {
  open(keeper, IBV_WR_ATOMIC_FETCH_AND_ADD).wr.atomic = {
      .remote_addr = addr, .compare_add = add, .swap = 0, .rkey = rkey};
}

void wr_atomic_write(ibv_qp_ex* keeper, std::uint32_t rkey, std::uint64_t addr, const void* data) {
  open_rdma(keeper, IBV_WR_ATOMIC_WRITE, rkey, addr);
  const auto* from = static_cast<const std::uint8_t*>(data);
  owner(keeper).building.inline_data.assign(from, from + kAtomicBytes);
}

void wr_set_sge_list(ibv_qp_ex* keeper, std::size_t count, const ibv_sge* list) {
  QpShadow& q = owner(keeper);
  if (count > q.cap.max_send_sge) q.build_error = ENOSPC;
  q.building.sges.assign(list, list + count);
}
void wr_set_sge(ibv_qp_ex* keeper, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) {
  const ibv_sge sge{.addr = addr, .length = length, .lkey = lkey};
  wr_set_sge_list(keeper, 1, &sge);
}
void wr_set_inline_data_list(ibv_qp_ex* keeper, std::size_t count, const ibv_data_buf* list) {
  QpShadow& q = owner(keeper);
  q.building.inline_data.clear();
  for (std::size_t i = 0; i < count; ++i) {
    const auto* from = static_cast<const std::uint8_t*>(list[i].addr);
    q.building.inline_data.insert(q.building.inline_data.end(), from, from + list[i].length);
  }
  if (q.building.inline_data.size() > q.cap.max_inline_data) q.build_error = ENOSPC;
  q.building.wr.send_flags |= IBV_SEND_INLINE;
}
void wr_set_inline_data(ibv_qp_ex* keeper, void* addr, std::size_t length) {
  const ibv_data_buf buffer{.addr = addr, .length = length};
  wr_set_inline_data_list(keeper, 1, &buffer);
}
void wr_set_ud_addr(ibv_qp_ex* keeper, ibv_ah* ah, std::uint32_t remote_qpn, std::uint32_t qkey) {
  owner(keeper).building.wr.wr.ud = {.ah = ah, .remote_qpn = remote_qpn, .remote_qkey = qkey};
}

void wr_bind_mw(ibv_qp_ex* keeper, ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info* info) {
  open(keeper, IBV_WR_BIND_MW).bind_mw = {.mw = mw, .rkey = rkey, .bind_info = *info};
}

/* Kinds that cannot be kept: wr_complete will return EOPNOTSUPP and nothing of the session is posted. */

void wr_send_tso(ibv_qp_ex* keeper, void*, std::uint16_t, std::uint16_t) { owner(keeper).build_error = EOPNOTSUPP; }
void wr_set_xrc_srqn(ibv_qp_ex* keeper, std::uint32_t) { owner(keeper).build_error = EOPNOTSUPP; }

/// Another thread's session: after the one that is open.
void wr_start(ibv_qp_ex* keeper) {
  QpShadow& q = owner(keeper);
  q.session_lock.lock();
  q.session_lock.unlock();
  q.app_ex.wr_start(&q.app_ex);
}

/// As librxe: what there is no room for is ENOSPC, and no work request is looked at more closely. One that cannot be posted ends the connection.
int wr_complete(ibv_qp_ex* keeper) {
  const NoCancel no_cancel;
  QpShadow& q = owner(keeper);
  push_building(q);
  int err = q.build_error;
  {
    std::lock_guard guard(q.lock);
    const bool suspended = q.state.load(std::memory_order_relaxed) & kKeepSends;
    if (!err && suspended && q.app.state < IBV_QPS_RTS) err = EINVAL;
    if (!err && suspended && full(q, q.built.size())) err = ENOSPC;
    if (!suspended && (q.state.load(std::memory_order_relaxed) & kTrapped)) links::empty_trap(q);
    if (!err && !suspended && !links::has_room(q, q.built.size())) err = ENOSPC;  // all of a session, or nothing
    if (!err)
      for (KeptSend& send : q.built) {
        if (suspended)
          q.kept_sends.push_back(std::move(send));
        else if ((err = links::post_in_turn(q, std::move(send))))
          break;
      }
    close(q);
  }
  q.session_lock.unlock();
  return err;
}

void wr_abort(ibv_qp_ex* keeper) {
  QpShadow& q = owner(keeper);
  {
    std::lock_guard guard(q.lock);
    close(q);
  }
  q.session_lock.unlock();
}

}  // namespace

void install_keeper(QpShadow& q) {
  q.keeper.owner = &q;
  ibv_qp_ex& ex = q.keeper.ex;
  ex.wr_atomic_cmp_swp = wr_atomic_cmp_swp;
  ex.wr_atomic_fetch_add = wr_atomic_fetch_add;
  ex.wr_bind_mw = wr_bind_mw;
  ex.wr_local_inv = wr_local_inv;
  ex.wr_rdma_read = wr_rdma_read;
  ex.wr_rdma_write = wr_rdma_write;
  ex.wr_rdma_write_imm = wr_rdma_write_imm;
  ex.wr_send = wr_send;
  ex.wr_send_imm = wr_send_imm;
  ex.wr_send_inv = wr_send_inv;
  ex.wr_send_tso = wr_send_tso;
  ex.wr_set_ud_addr = wr_set_ud_addr;
  ex.wr_set_xrc_srqn = wr_set_xrc_srqn;
  ex.wr_set_inline_data = wr_set_inline_data;
  ex.wr_set_inline_data_list = wr_set_inline_data_list;
  ex.wr_set_sge = wr_set_sge;
  ex.wr_set_sge_list = wr_set_sge_list;
  ex.wr_start = wr_start;
  ex.wr_complete = wr_complete;
  ex.wr_abort = wr_abort;
  ex.wr_atomic_write = wr_atomic_write;
}

}  // namespace migr::kept
