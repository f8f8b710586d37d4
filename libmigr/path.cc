/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "path.h"

#include <cerrno>
#include <ctime>

#include "kept.h"
#include "real.h"

// What a thread may be seen in. Cold functions lie outside: they take the QP's or CQ's lock, which the engine holds
// when it matters.
#define MIGR_PATH [[gnu::section("migr_path")]]
#define MIGR_COLD [[gnu::cold, gnu::noinline]]
#define MIGR_INLINE [[gnu::always_inline]] inline

namespace migr::path {
namespace {

constexpr int kChunkWrs = 8;
constexpr int kChunkSges = 64;  // at least what any provider allows in one WR
constexpr std::uint32_t kKeyTag = 0xff;

/// The physical key; a key that does not exist becomes one that no device has given (index 0).
MIGR_INLINE std::uint32_t physical_lkey(const QpShadow& q, std::uint32_t key) {
  return q.key_table[key >> 8].lkey ^ (key & kKeyTag);
}

MIGR_INLINE std::uint32_t physical_rkey(const QpShadow& q, std::uint32_t key) {
  const RemoteKeys* keys = q.remote_keys;
  return keys ? keys->physical(key) : key;
}

MIGR_INLINE std::uint32_t virtual_qpn(const CqShadow& c, std::uint32_t pqpn) {
  const std::uint32_t entry = c.qpn_table[pqpn & MIGR_QPN_MASK];
  return entry & MIGR_QPN_VALID ? entry & MIGR_QPN_MASK : pqpn;
}

MIGR_INLINE void translate_sges(const QpShadow& q, ibv_sge* to, const ibv_sge* from, int count) {
  for (int i = 0; i < count; ++i) {
    to[i] = from[i];
    to[i].lkey = physical_lkey(q, from[i].lkey);
  }
}

MIGR_INLINE void translate_rkey(const QpShadow& q, ibv_send_wr& wr) {
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_RDMA_READ:
      wr.wr.rdma.rkey = physical_rkey(q, wr.wr.rdma.rkey);
      break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      wr.wr.atomic.rkey = physical_rkey(q, wr.wr.atomic.rkey);
      break;
    default:
      break;
  }
}

/// The WR `steps` after `wr`.
template <class Wr>
MIGR_INLINE Wr* nth(Wr* wr, long steps) {
  while (steps-- > 0) wr = wr->next;
  return wr;
}

MIGR_COLD int keep_sends(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  {
    std::lock_guard guard(q.lock);
    if (q.state.load(std::memory_order_relaxed) & kKeepSends) {
      for (; wr; wr = wr->next)
        if (const int err = kept::keep(q, *wr)) {
          *bad = wr;
          return err;
        }
      return 0;
    }
  }
  return post_send(&q.app, wr, bad);
}

MIGR_PATH [[gnu::noinline]] int post_sends_translated(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  ibv_send_wr copies[kChunkWrs];
  ibv_sge sges[kChunkSges];
  do {
    ibv_send_wr* const first = wr;
    int wrs = 0, used = 0;
    for (; wr && wrs < kChunkWrs && used + wr->num_sge <= kChunkSges; wr = wr->next) {
      ibv_send_wr& copy = copies[wrs];
      copy = *wr;
      if (wrs) copies[wrs - 1].next = &copy;
      copy.next = nullptr;
      copy.sg_list = &sges[used];
      translate_sges(q, copy.sg_list, wr->sg_list, wr->num_sge);
      translate_rkey(q, copy);
      used += wr->num_sge;
      ++wrs;
    }
    if (!wrs) [[unlikely]] {
      *bad = wr;
      return EINVAL;
    }
    ibv_send_wr* stopped = copies;
    if (const int err = q.real_post_send(q.real, copies, &stopped)) [[unlikely]] {
      *bad = nth(first, stopped - copies);
      return err;
    }
  } while (wr);
  return 0;
}

/// Suspended: receives still go to the path until FREEZE, because the partner's drain needs them.
MIGR_COLD int post_recv_suspended(QpShadow& q, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  std::lock_guard guard(q.lock);
  for (; wr; wr = wr->next) {
    const std::uint32_t state = q.state.load(std::memory_order_relaxed);
    KeptReceive receive = kept::copy(*wr);
    int err = 0;
    if (state & kKeepReceives) {
      err = kept::keep(q, std::move(receive));
    } else {
      err = post_one_receive(q, q.real, receive);
      if (!err && (state & kLogReceives)) q.logged_receives.push_back(std::move(receive));
    }
    if (err) {
      *bad = wr;
      return err;
    }
  }
  return 0;
}

MIGR_PATH [[gnu::noinline]] int post_recvs_translated(QpShadow& q, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  ibv_recv_wr copies[kChunkWrs];
  ibv_sge sges[kChunkSges];
  do {
    ibv_recv_wr* const first = wr;
    int wrs = 0, used = 0;
    for (; wr && wrs < kChunkWrs && used + wr->num_sge <= kChunkSges; wr = wr->next) {
      ibv_recv_wr& copy = copies[wrs];
      copy = *wr;
      if (wrs) copies[wrs - 1].next = &copy;
      copy.next = nullptr;
      copy.sg_list = &sges[used];
      translate_sges(q, copy.sg_list, wr->sg_list, wr->num_sge);
      used += wr->num_sge;
      ++wrs;
    }
    if (!wrs) [[unlikely]] {
      *bad = wr;
      return EINVAL;
    }
    ibv_recv_wr* stopped = copies;
    if (const int err = q.real_post_recv(q.real, copies, &stopped)) [[unlikely]] {
      *bad = nth(first, stopped - copies);
      return err;
    }
  } while (wr);
  return 0;
}

MIGR_PATH [[gnu::noinline]] int post_send_switched(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  if (q.state.load(std::memory_order_relaxed) & kKeepSends) [[unlikely]]
    return keep_sends(q, wr, bad);
  // The usual WR field by field: no array, no store that a later load would have to wait for.
  if (wr->next || wr->num_sge != 1 || wr->opcode > IBV_WR_ATOMIC_FETCH_AND_ADD) [[unlikely]]
    return post_sends_translated(q, wr, bad);
  const ibv_sge& from = *wr->sg_list;
  ibv_sge sge;
  sge.lkey = physical_lkey(q, from.lkey);
  sge.addr = from.addr;
  sge.length = from.length;
  ibv_send_wr copy;
  copy.wr_id = wr->wr_id;
  copy.next = nullptr;
  copy.sg_list = &sge;
  copy.num_sge = 1;
  copy.opcode = wr->opcode;
  copy.send_flags = wr->send_flags;
  copy.imm_data = wr->imm_data;
  copy.wr = wr->wr;
  copy.qp_type = wr->qp_type;
  translate_rkey(q, copy);
  ibv_send_wr* stopped;
  const int err = q.real_post_send(q.real, &copy, &stopped);
  if (err) [[unlikely]] *bad = wr;
  return err;
}

MIGR_PATH [[gnu::noinline]] int post_recv_switched(QpShadow& q, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  if (q.state.load(std::memory_order_relaxed) & (kKeepSends | kKeepReceives | kLogReceives)) [[unlikely]]
    return post_recv_suspended(q, wr, bad);
  if (wr->next || wr->num_sge != 1) [[unlikely]]
    return post_recvs_translated(q, wr, bad);
  const ibv_sge& from = *wr->sg_list;
  ibv_sge sge;
  sge.lkey = physical_lkey(q, from.lkey);
  sge.addr = from.addr;
  sge.length = from.length;
  ibv_recv_wr copy;
  copy.wr_id = wr->wr_id;
  copy.next = nullptr;
  copy.sg_list = &sge;
  copy.num_sge = 1;
  ibv_recv_wr* stopped;
  const int err = q.real_post_recv(q.real, &copy, &stopped);
  if (err) [[unlikely]] *bad = wr;
  return err;
}

/// Caller holds c.lock.
void leave_fake_if_done(CqShadow& c) {
  const std::uint32_t state = c.state.load(std::memory_order_relaxed);
  if (c.fake.empty() && !c.markers && !(state & (kSuspendedCq | kFrozenCq)))
    c.state.store(state & ~std::uint32_t{kFakeCq}, std::memory_order_relaxed);
}

/// Caller holds c.lock. @return false: there is none
bool pop_fake(CqShadow& c, ibv_wc& wc) {
  if (c.fake.empty()) return false;
  wc = c.fake.front();
  c.fake.pop_front();
  return true;
}

MIGR_COLD int poll_fake(CqShadow& c, int entries, ibv_wc* wc) noexcept {
  std::lock_guard guard(c.lock);
  poll_to_fake(c);
  int n = 0;
  while (n < entries && pop_fake(c, wc[n])) ++n;
  leave_fake_if_done(c);
  return n;
}

MIGR_PATH [[gnu::noinline]] int poll_switched(CqShadow& c, int entries, ibv_wc* wc) noexcept {
  if (c.state.load(std::memory_order_relaxed) & kFakeCq) [[unlikely]]
    return poll_fake(c, entries, wc);
  const int n = c.real_poll(c.real, entries, wc);
  for (int i = 0; i < n; ++i) wc[i].qp_num = virtual_qpn(c, wc[i].qp_num);
  return n;
}

}  // namespace

MIGR_PATH int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  QpShadow& q = shadow_of(qp);
  if (q.state.load(std::memory_order_relaxed)) [[unlikely]]
    return post_send_switched(q, wr, bad);
  return q.real_post_send(q.real, wr, bad);  // tail call: nothing may follow it
}

MIGR_PATH int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  QpShadow& q = shadow_of(qp);
  if (q.state.load(std::memory_order_relaxed)) [[unlikely]]
    return post_recv_switched(q, wr, bad);
  return q.real_post_recv(q.real, wr, bad);
}

MIGR_PATH int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.state.load(std::memory_order_relaxed)) [[unlikely]]
    return poll_switched(c, entries, wc);
  return c.real_poll(c.real, entries, wc);
}

int post_one_send(QpShadow& q, const KeptSend& send) noexcept {
  ibv_send_wr wr = send.wr;
  ibv_sge sges[kChunkSges];
  if (send.sges.size() > kChunkSges) return EINVAL;
  wr.next = nullptr;
  wr.sg_list = sges;
  if (wr.send_flags & IBV_SEND_INLINE) {
    sges[0] = {.addr = reinterpret_cast<std::uint64_t>(send.inline_data.data()),
               .length = static_cast<std::uint32_t>(send.inline_data.size()),
               .lkey = 0};
    wr.num_sge = send.inline_data.empty() ? 0 : 1;
  } else {
    translate_sges(q, sges, send.sges.data(), static_cast<int>(send.sges.size()));
    wr.num_sge = static_cast<int>(send.sges.size());
  }
  translate_rkey(q, wr);
  ibv_send_wr* bad;
  return q.real_post_send(q.real, &wr, &bad);
}

int post_one_receive(QpShadow& q, ibv_qp* to, const KeptReceive& receive) noexcept {
  ibv_sge sges[kChunkSges];
  if (receive.sges.size() > kChunkSges) return EINVAL;
  translate_sges(q, sges, receive.sges.data(), static_cast<int>(receive.sges.size()));
  ibv_recv_wr wr{.wr_id = receive.wr_id, .next = nullptr, .sg_list = sges, .num_sge = static_cast<int>(receive.sges.size())};
  ibv_recv_wr* bad;
  return q.real_post_recv(to, &wr, &bad);
}

int poll_to_fake(CqShadow& c) noexcept {
  if (c.state.load(std::memory_order_relaxed) & kFrozenCq) return 0;
  constexpr int kBatch = 16;
  ibv_wc batch[kBatch];
  int moved = 0, n;
  while ((n = c.real_poll(c.real, kBatch, batch)) > 0) {
    for (int i = 0; i < n; ++i) {
      if (marker::is_marker(batch[i].wr_id)) {
        if (c.markers) --c.markers;
        c.seen_markers.push_back(batch[i]);
        continue;
      }
      batch[i].qp_num = virtual_qpn(c, batch[i].qp_num);
      c.fake.push_back(batch[i]);
      ++moved;
    }
    if (n < kBatch) break;
  }
  if (moved) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    c.last_cqe_ns = static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
  }
  return moved;
}

/* ---- ibv_wr_*: the session decides; wr_start looks at the state word -------- */

namespace {

constexpr std::uint32_t kTranslateAny = kTranslateLocal | kTranslateRemote | kForced;

MIGR_INLINE bool on_path(const QpShadow& q) { return q.session.load(std::memory_order_relaxed) == Session::kPath; }

MIGR_INLINE bool translates(const QpShadow& q) {
  return (q.state.load(std::memory_order_relaxed) & kTranslateAny) != 0;
}

/// The provider's qp_ex with the WR's id and flags, as the application has set them in ours.
MIGR_INLINE ibv_qp_ex* lower(QpShadow& q) {
  ibv_qp_ex* real = q.real_ex;
  real->wr_id = q.app_ex.wr_id;
  real->wr_flags = q.app_ex.wr_flags;
  return real;
}

MIGR_PATH void wr_start(ibv_qp_ex* qp) noexcept;

/// Called by tail call: while it waits, no frame of the path may be on the stack.
MIGR_COLD void wr_start_suspended(ibv_qp_ex* qp) noexcept {
  if (!kept::start(shadow_of(qp))) wr_start(qp);
}

MIGR_PATH void wr_start(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  if (q.state.load(std::memory_order_relaxed) & kKeepSends) [[unlikely]]
    return wr_start_suspended(qp);
  q.real_ex->wr_start(q.real_ex);
  q.session.store(Session::kPath, std::memory_order_relaxed);
}

MIGR_PATH int wr_complete(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::complete(q);
  q.session.store(Session::kNone, std::memory_order_relaxed);
  return q.real_ex->wr_complete(q.real_ex);
}

MIGR_PATH void wr_abort(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::abort(q);
  q.session.store(Session::kNone, std::memory_order_relaxed);
  q.real_ex->wr_abort(q.real_ex);
}

MIGR_PATH void wr_send(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::open(q, IBV_WR_SEND);
  ibv_qp_ex* real = lower(q);
  real->wr_send(real);
}

MIGR_PATH void wr_send_imm(ibv_qp_ex* qp, __be32 imm) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]] {
    kept::open(q, IBV_WR_SEND_WITH_IMM);
    q.building.wr.imm_data = imm;
    return;
  }
  ibv_qp_ex* real = lower(q);
  real->wr_send_imm(real, imm);
}

MIGR_COLD void open_rdma(QpShadow& q, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr, __be32 imm) {
  kept::open(q, opcode);
  q.building.wr.wr.rdma.rkey = rkey;
  q.building.wr.wr.rdma.remote_addr = addr;
  q.building.wr.imm_data = imm;
}

MIGR_COLD void open_atomic(QpShadow& q, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr, std::uint64_t a,
                           std::uint64_t b) {
  kept::open(q, opcode);
  auto& atomic = q.building.wr.wr.atomic;
  atomic.rkey = rkey;
  atomic.remote_addr = addr;
  atomic.compare_add = a;
  atomic.swap = b;
}

MIGR_PATH void wr_rdma_write(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t addr) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return open_rdma(q, IBV_WR_RDMA_WRITE, rkey, addr, 0);
  if (translates(q)) [[unlikely]]
    rkey = physical_rkey(q, rkey);
  ibv_qp_ex* real = lower(q);
  real->wr_rdma_write(real, rkey, addr);
}

MIGR_PATH void wr_rdma_write_imm(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t addr, __be32 imm) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return open_rdma(q, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr, imm);
  if (translates(q)) [[unlikely]]
    rkey = physical_rkey(q, rkey);
  ibv_qp_ex* real = lower(q);
  real->wr_rdma_write_imm(real, rkey, addr, imm);
}

MIGR_PATH void wr_rdma_read(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t addr) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return open_rdma(q, IBV_WR_RDMA_READ, rkey, addr, 0);
  if (translates(q)) [[unlikely]]
    rkey = physical_rkey(q, rkey);
  ibv_qp_ex* real = lower(q);
  real->wr_rdma_read(real, rkey, addr);
}

MIGR_PATH void wr_atomic_cmp_swp(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t compare,
                                 std::uint64_t swap) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return open_atomic(q, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr, compare, swap);
  if (translates(q)) [[unlikely]]
    rkey = physical_rkey(q, rkey);
  ibv_qp_ex* real = lower(q);
  real->wr_atomic_cmp_swp(real, rkey, addr, compare, swap);
}

MIGR_PATH void wr_atomic_fetch_add(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t add) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return open_atomic(q, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr, add, 0);
  if (translates(q)) [[unlikely]]
    rkey = physical_rkey(q, rkey);
  ibv_qp_ex* real = lower(q);
  real->wr_atomic_fetch_add(real, rkey, addr, add);
}

MIGR_PATH void wr_set_sge(ibv_qp_ex* qp, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]] {
    const ibv_sge sge{.addr = addr, .length = length, .lkey = lkey};
    return kept::set_sges(q, &sge, 1);
  }
  if (translates(q)) [[unlikely]]
    lkey = physical_lkey(q, lkey);
  q.real_ex->wr_set_sge(q.real_ex, lkey, addr, length);
}

/// Provider and application use the same array type, but ours is a copy.
MIGR_PATH [[gnu::noinline]] void set_sge_list_translated(QpShadow& q, std::size_t count, const ibv_sge* list) noexcept {
  ibv_sge sges[kChunkSges];
  if (count > kChunkSges) count = kChunkSges;  // beyond any device's max_sge: the provider refuses it at wr_complete
  translate_sges(q, sges, list, static_cast<int>(count));
  q.real_ex->wr_set_sge_list(q.real_ex, count, sges);
}

MIGR_PATH void wr_set_sge_list(ibv_qp_ex* qp, std::size_t count, const ibv_sge* list) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::set_sges(q, list, count);
  if (translates(q)) [[unlikely]]
    return set_sge_list_translated(q, count, list);
  q.real_ex->wr_set_sge_list(q.real_ex, count, list);
}

MIGR_PATH void wr_set_inline_data(ibv_qp_ex* qp, void* addr, std::size_t length) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]] {
    const ibv_data_buf buffer{.addr = addr, .length = length};
    return kept::set_inline(q, &buffer, 1);
  }
  q.real_ex->wr_set_inline_data(q.real_ex, addr, length);
}

MIGR_PATH void wr_set_inline_data_list(ibv_qp_ex* qp, std::size_t count, const ibv_data_buf* list) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::set_inline(q, list, count);
  q.real_ex->wr_set_inline_data_list(q.real_ex, count, list);
}

MIGR_PATH void wr_set_ud_addr(ibv_qp_ex* qp, ibv_ah* ah, std::uint32_t remote_qpn, std::uint32_t qkey) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]] {
    q.building.wr.wr.ud = {.ah = ah, .remote_qpn = remote_qpn, .remote_qkey = qkey};
    return;
  }
  q.real_ex->wr_set_ud_addr(q.real_ex, ah, remote_qpn, qkey);
}

/* What cannot be kept is refused by wr_complete. On the path it passes, except that an MW's MR is a shadow. */

MIGR_PATH void wr_bind_mw(ibv_qp_ex* qp, ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info* info) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::refuse(q);
  ibv_mw_bind_info real_info = *info;
  if (info->mr) real_info.mr = shadow_of(info->mr).real;
  ibv_qp_ex* real = lower(q);
  real->wr_bind_mw(real, mw, rkey, &real_info);
}

MIGR_PATH void wr_local_inv(ibv_qp_ex* qp, std::uint32_t rkey) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::refuse(q);
  ibv_qp_ex* real = lower(q);
  real->wr_local_inv(real, rkey);
}

MIGR_PATH void wr_send_inv(ibv_qp_ex* qp, std::uint32_t rkey) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::refuse(q);
  ibv_qp_ex* real = lower(q);
  real->wr_send_inv(real, physical_rkey(q, rkey));
}

MIGR_PATH void wr_send_tso(ibv_qp_ex* qp, void* header, std::uint16_t header_bytes, std::uint16_t mss) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::refuse(q);
  ibv_qp_ex* real = lower(q);
  real->wr_send_tso(real, header, header_bytes, mss);
}

MIGR_PATH void wr_set_xrc_srqn(ibv_qp_ex* qp, std::uint32_t srqn) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::refuse(q);
  q.real_ex->wr_set_xrc_srqn(q.real_ex, srqn);
}

MIGR_PATH void wr_atomic_write(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t addr, const void* data) noexcept {
  QpShadow& q = shadow_of(qp);
  if (!on_path(q)) [[unlikely]]
    return kept::refuse(q);
  if (translates(q)) [[unlikely]]
    rkey = physical_rkey(q, rkey);
  ibv_qp_ex* real = lower(q);
  real->wr_atomic_write(real, rkey, addr, data);
}

}  // namespace

void install_wr_api(QpShadow& q) {
  q.app_ex.comp_mask = q.real_ex->comp_mask;
#define MIGR_INSTALL(name) q.app_ex.name = q.real_ex->name ? name : nullptr
  MIGR_INSTALL(wr_atomic_cmp_swp);
  MIGR_INSTALL(wr_atomic_fetch_add);
  MIGR_INSTALL(wr_bind_mw);
  MIGR_INSTALL(wr_local_inv);
  MIGR_INSTALL(wr_rdma_read);
  MIGR_INSTALL(wr_rdma_write);
  MIGR_INSTALL(wr_rdma_write_imm);
  MIGR_INSTALL(wr_send);
  MIGR_INSTALL(wr_send_imm);
  MIGR_INSTALL(wr_send_inv);
  MIGR_INSTALL(wr_send_tso);
  MIGR_INSTALL(wr_set_ud_addr);
  MIGR_INSTALL(wr_set_xrc_srqn);
  MIGR_INSTALL(wr_set_inline_data);
  MIGR_INSTALL(wr_set_inline_data_list);
  MIGR_INSTALL(wr_set_sge);
  MIGR_INSTALL(wr_set_sge_list);
  MIGR_INSTALL(wr_start);
  MIGR_INSTALL(wr_complete);
  MIGR_INSTALL(wr_abort);
  MIGR_INSTALL(wr_atomic_write);
#undef MIGR_INSTALL
}

/* ---- ibv_cq_ex ------------------------------------------------------------ */

namespace {

MIGR_INLINE void show(CqShadow& c, ibv_wc_status status, std::uint64_t wr_id) {
  c.app_ex.status = status;
  c.app_ex.wr_id = wr_id;
}

/// The next completion of a session on the fake CQ.
MIGR_COLD int next_fake(CqShadow& c) noexcept {
  std::lock_guard guard(c.lock);
  poll_to_fake(c);
  if (!pop_fake(c, c.ex_wc)) return ENOENT;
  leave_fake_if_done(c);
  c.ex_now = &c.ex_wc;
  show(c, c.ex_wc.status, c.ex_wc.wr_id);
  return 0;
}

MIGR_PATH int start_poll(ibv_cq_ex* cq, ibv_poll_cq_attr* attr) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.state.load(std::memory_order_relaxed) & kFakeCq) [[unlikely]]
    return next_fake(c);
  ibv_cq_ex* const real = c.real_ex;
  const int err = real->start_poll(real, attr);
  if (err) return err;
  c.ex_session.store(true, std::memory_order_relaxed);
  show(c, real->status, real->wr_id);
  return 0;
}

MIGR_PATH int next_poll(ibv_cq_ex* cq) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.ex_now) [[unlikely]]
    return next_fake(c);
  ibv_cq_ex* const real = c.real_ex;
  const int err = real->next_poll(real);
  if (err) return err;
  show(c, real->status, real->wr_id);
  return 0;
}

MIGR_PATH void end_poll(ibv_cq_ex* cq) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.ex_now) [[unlikely]] {
    c.ex_now = nullptr;
    return;
  }
  c.ex_session.store(false, std::memory_order_relaxed);
  c.real_ex->end_poll(c.real_ex);
}

MIGR_PATH std::uint32_t read_qp_num(ibv_cq_ex* cq) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.ex_now) [[unlikely]]
    return c.ex_now->qp_num;
  const std::uint32_t pqpn = c.real_ex->read_qp_num(c.real_ex);
  return c.state.load(std::memory_order_relaxed) ? virtual_qpn(c, pqpn) : pqpn;
}

#define MIGR_READER(type, name, from_wc)                   \
  MIGR_PATH type name(ibv_cq_ex* cq) noexcept {            \
    CqShadow& c = shadow_of(cq);                           \
    if (const ibv_wc* wc = c.ex_now) [[unlikely]] {        \
      (void)wc;                                            \
      return from_wc;                                      \
    }                                                      \
    return c.real_ex->name(c.real_ex);                     \
  }
MIGR_READER(ibv_wc_opcode, read_opcode, wc->opcode)
MIGR_READER(std::uint32_t, read_vendor_err, wc->vendor_err)
MIGR_READER(std::uint32_t, read_byte_len, wc->byte_len)
MIGR_READER(__be32, read_imm_data, wc->imm_data)
MIGR_READER(std::uint32_t, read_src_qp, wc->src_qp)
MIGR_READER(unsigned, read_wc_flags, wc->wc_flags)
MIGR_READER(std::uint32_t, read_slid, wc->slid)
MIGR_READER(std::uint8_t, read_sl, wc->sl)
MIGR_READER(std::uint8_t, read_dlid_path_bits, wc->dlid_path_bits)
// A fake completion carries no time, VLAN or flow tag: what was not taken along reads as zero.
MIGR_READER(std::uint64_t, read_completion_ts, 0)
MIGR_READER(std::uint16_t, read_cvlan, 0)
MIGR_READER(std::uint32_t, read_flow_tag, 0)
MIGR_READER(std::uint64_t, read_completion_wallclock_ns, 0)
#undef MIGR_READER

MIGR_PATH void read_tm_info(ibv_cq_ex* cq, ibv_wc_tm_info* info) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.ex_now) [[unlikely]] {
    *info = {};
    return;
  }
  c.real_ex->read_tm_info(c.real_ex, info);
}

}  // namespace

void install_pollers(CqShadow& c) {
  c.app_ex.comp_mask = c.real_ex->comp_mask;
#define MIGR_INSTALL(name) c.app_ex.name = c.real_ex->name ? name : nullptr
  MIGR_INSTALL(start_poll);
  MIGR_INSTALL(next_poll);
  MIGR_INSTALL(end_poll);
  MIGR_INSTALL(read_opcode);
  MIGR_INSTALL(read_vendor_err);
  MIGR_INSTALL(read_byte_len);
  MIGR_INSTALL(read_imm_data);
  MIGR_INSTALL(read_qp_num);
  MIGR_INSTALL(read_src_qp);
  MIGR_INSTALL(read_wc_flags);
  MIGR_INSTALL(read_slid);
  MIGR_INSTALL(read_sl);
  MIGR_INSTALL(read_dlid_path_bits);
  MIGR_INSTALL(read_completion_ts);
  MIGR_INSTALL(read_cvlan);
  MIGR_INSTALL(read_flow_tag);
  MIGR_INSTALL(read_tm_info);
  MIGR_INSTALL(read_completion_wallclock_ns);
#undef MIGR_INSTALL
}

}  // namespace migr::path
