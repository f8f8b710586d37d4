/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "path.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <new>

#include "datagrams.h"
#include "environment.h"
#include "kept.h"
#include "links/links.h"
#include "no_cancel.h"
#include "objects.h"
#include "provider/provider.h"
#include "real.h"
#include "windows.h"

// What a thread may be seen in. Cold functions lie outside: they take the QP's or CQ's lock, which the engine holds
// when it matters.
// A line of the instruction cache for each: what a call costs then does not change with the code around it.
#define MIGR_PATH [[gnu::section("migr_path"), gnu::aligned(64)]]
#define MIGR_COLD [[gnu::cold, gnu::noinline]]
#define MIGR_INLINE [[gnu::always_inline]] inline

namespace migr::path {
namespace {

constexpr int kChunkWrs = 8;
constexpr int kChunkSges = 64;  // at least what any provider allows in one WR
constexpr std::size_t kReplayWrs = 64, kReplaySges = 128;  // for one doorbell, which may be a system call
constexpr std::uint32_t kKeyTag = 0xff;
constexpr long kRestNs = 50'000;  // nothing beside a stop
constexpr long kSessionPollNs = 50'000;
constexpr unsigned kRestsOfALength = 16, kDoublings = 5;  // a rest is at most an eighth of those before, and at most 1.6 ms

MIGR_INLINE std::uint32_t physical_lkey(const QpShadow& q, std::uint32_t key) { return path::physical_lkey(q.key_table, key); }

MIGR_INLINE std::uint32_t physical_rkey(const QpShadow& q, std::uint32_t key) {
  const RemoteKeys* keys = q.remote_keys;
  return keys ? keys->physical(key) : key;
}

MIGR_INLINE std::uint32_t virtual_qpn(const std::uint32_t* table, std::uint32_t pqpn) {
  const std::uint32_t entry = table[pqpn & MIGR_QPN_MASK];
  return entry & MIGR_QPN_VALID ? entry & MIGR_QPN_MASK : pqpn;
}

MIGR_INLINE std::uint32_t virtual_qpn(const CqShadow& c, std::uint32_t pqpn) { return virtual_qpn(c.qpn_table, pqpn); }

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
    case IBV_WR_SEND_WITH_INV:
      wr.invalidate_rkey = physical_rkey(q, wr.invalidate_rkey);
      break;
    default:
      break;
  }
}

/// A key of this side that is to be invalidated: a window's is not in the table and the same in both worlds.
MIGR_INLINE std::uint32_t physical_own_rkey(const QpShadow& q, std::uint32_t key) {
  const std::uint32_t entry = q.key_table[key >> 8].rkey;
  return entry ? entry ^ (key & kKeyTag) : key;
}

/// What a WR names of this side beside its SGEs: the MR that a memory window is bound to, the key that is invalidated.
MIGR_INLINE void translate_own(const QpShadow& q, ibv_send_wr& wr) {
  if (wr.opcode == IBV_WR_BIND_MW) {
    if (wr.bind_mw.bind_info.mr) wr.bind_mw.bind_info.mr = shadow_of(wr.bind_mw.bind_info.mr).real;
  } else if (wr.opcode == IBV_WR_LOCAL_INV) {
    wr.invalidate_rkey = physical_own_rkey(q, wr.invalidate_rkey);
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

/// In the two functions that follow: a template's instances do not get into a section.
MIGR_INLINE int translate_and_post(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad, bool noted) {
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
      translate_own(q, copy);
      if (noted) tracking::note(*q.tracked, copy);
      used += wr->num_sge;
      ++wrs;
    }
    if (!wrs) [[unlikely]] {
      *bad = wr;
      return EINVAL;
    }
    ibv_send_wr* stopped = copies;
    if (const int err = q.real_post_send(q.real, copies, &stopped)) [[unlikely]] {
      *bad = stopped ? nth(first, stopped - copies) : first;
      return err;
    }
  } while (wr);
  return 0;
}

MIGR_PATH [[gnu::noinline]] int post_send_list(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept { return translate_and_post(q, wr, bad, false); }
/// Of a QP with kTracked. Caller holds q.lock.
MIGR_COLD int post_noted_list(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept { return translate_and_post(q, wr, bad, true); }

/// What the seven operations of an RC QP use of a WR, field by field: a wider copy would have to wait for the stores
/// with which the application has just filled it.
MIGR_INLINE void copy_send(const QpShadow& q, ibv_send_wr& to, const ibv_send_wr& from) {
  to.wr_id = from.wr_id;
  to.num_sge = from.num_sge;
  to.opcode = from.opcode;
  to.send_flags = from.send_flags;
  to.imm_data = from.imm_data;
  to.wr.atomic.remote_addr = from.wr.atomic.remote_addr;
  to.wr.atomic.compare_add = from.wr.atomic.compare_add;  // and the rkey of a READ or WRITE
  if (from.opcode > IBV_WR_RDMA_READ) {
    if (from.opcode <= IBV_WR_ATOMIC_FETCH_AND_ADD) {
      to.wr.atomic.swap = from.wr.atomic.swap;
      to.wr.atomic.rkey = from.wr.atomic.rkey;
    } else {
      to = from;  // bind, invalidate, TSO
      translate_own(q, to);
    }
  }
  to.qp_type = from.qp_type;
}

/// One WR with one SGE, as most are.
MIGR_PATH int post_single_send(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  ibv_send_wr copy;
  ibv_sge sge;
  copy_send(q, copy, *wr);
  copy.next = nullptr;
  copy.sg_list = &sge;
  sge.addr = wr->sg_list->addr;
  sge.length = wr->sg_list->length;
  sge.lkey = physical_lkey(q, wr->sg_list->lkey);
  if (q.remote_keys) translate_rkey(q, copy);
  ibv_send_wr* stopped;
  const int err = q.real_post_send(q.real, &copy, &stopped);
  if (err) [[unlikely]]
    *bad = wr;
  return err;
}

/// Of a WR whose like the direct path must not see. `view` stands for a memory window.
/// @return true: it changes one, and windows::settle() has to follow
bool translate_watched(QpShadow& q, ibv_send_wr& wr, ibv_mw& view) noexcept {
  if (windows::translate(q, wr, view)) return true;
  translate_rkey(q, wr);
  translate_own(q, wr);
  if (q.app.qp_type == IBV_QPT_UD) datagrams::translate(wr);
  return false;
}

/// One by one, under the lock: what they name is looked up.
MIGR_COLD int post_watched(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  {
    const NoCancel no_cancel;
    std::lock_guard guard(q.lock);
    if (q.state.load(std::memory_order_relaxed) & kTrapped) links::empty_trap(q);
    while (wr && !(q.state.load(std::memory_order_relaxed) & kKeepSends)) {
      ibv_send_wr copy = *wr;
      ibv_sge sges[kChunkSges];
      ibv_mw view;
      if (links::has_to_wait(q, *wr)) {
        KeptSend send{};
        int err = kept::copy(q, *wr, send);
        if (!err) err = links::post_in_turn(q, std::move(send));
        if (err) return *bad = wr, err;
        wr = wr->next;
        continue;
      }
      if (wr->num_sge > kChunkSges) return *bad = wr, EINVAL;
      copy.next = nullptr;
      copy.sg_list = sges;
      translate_sges(q, sges, wr->sg_list, wr->num_sge);
      const bool of_window = translate_watched(q, copy, view);
      if (q.tracked) tracking::note(*q.tracked, copy);
      ibv_send_wr* stopped;
      const int err = q.real_post_send(q.real, &copy, &stopped);
      if (of_window) windows::settle(q, !err);
      if (err) return *bad = wr, err;
      wr = wr->next;
    }
  }
  return wr ? keep_sends(q, wr, bad) : 0;
}

constexpr std::uint32_t kOneByOne = kDatagrams | kWindows | kTrapped;

MIGR_COLD int post_tracked(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  {
    const NoCancel no_cancel;
    std::lock_guard guard(q.lock);
    if (q.tracked && !(q.state.load(std::memory_order_relaxed) & (kKeepSends | kOneByOne))) return post_noted_list(q, wr, bad);
  }
  return post_send(&q.app, wr, bad);
}

/// Suspended, or one whose WRs are watched.
MIGR_COLD int post_send_unusual(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  const std::uint32_t state = q.state.load(std::memory_order_relaxed);
  if (state & kKeepSends) return keep_sends(q, wr, bad);
  return state & kOneByOne ? post_watched(q, wr, bad) : post_tracked(q, wr, bad);
}

MIGR_PATH [[gnu::noinline]] int post_send_switched(QpShadow& q, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  if (!wr || !bad) [[unlikely]]
    return q.real_post_send(q.real, wr, bad);
  *bad = nullptr;
  const std::uint32_t state = q.state.load(std::memory_order_relaxed);
  if (state & (kKeepSends | kOneByOne | kTracked)) [[unlikely]]
    return post_send_unusual(q, wr, bad);
  if (!state) [[unlikely]]  // direct again: where it goes has to be read before that is seen
    return post_send(&q.app, wr, bad);
  if (!wr->next && wr->num_sge == 1) return post_single_send(q, wr, bad);
  return post_send_list(q, wr, bad);
}

/// Suspended: receives still go to the path until FREEZE, because the partner's drain needs them. Or one that is watched.
MIGR_COLD int post_recv_suspended(QpShadow& q, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  const NoCancel no_cancel;
  std::lock_guard guard(q.lock);
  if ((q.state.load(std::memory_order_relaxed) & kTrapped) && !links::empty_trap(q)) return *bad = wr, ENOMEM;
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

MIGR_PATH [[gnu::noinline]] int post_recv_list(QpShadow& q, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
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

MIGR_PATH [[gnu::noinline]] int post_recv_switched(QpShadow& q, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  if (!wr || !bad) [[unlikely]]
    return q.real_post_recv(q.real, wr, bad);
  *bad = nullptr;
  const std::uint32_t state = q.state.load(std::memory_order_relaxed);
  if (state & (kKeepSends | kKeepReceives | kLogReceives | kDatagrams | kTrapped | kTracked)) [[unlikely]]
    return post_recv_suspended(q, wr, bad);
  if (!state) [[unlikely]]
    return post_recv(&q.app, wr, bad);
  if (wr->next || wr->num_sge != 1) return post_recv_list(q, wr, bad);
  ibv_sge sge{.addr = wr->sg_list->addr, .length = wr->sg_list->length, .lkey = physical_lkey(q, wr->sg_list->lkey)};
  ibv_recv_wr copy{.wr_id = wr->wr_id, .next = nullptr, .sg_list = &sge, .num_sge = 1};
  ibv_recv_wr* stopped;
  const int err = q.real_post_recv(q.real, &copy, &stopped);
  if (err) [[unlikely]]
    *bad = wr;
  return err;
}

/// Caller holds c.lock.
void leave_fake_if_done(CqShadow& c) {
  const std::uint32_t state = c.state.load(std::memory_order_relaxed);
  if (c.fake.empty() && !c.markers && !(state & (kSuspendedCq | kFrozenCq | kWatchedCq | kLinkedCq)))
    c.state.store(state & ~std::uint32_t{kFakeCq}, std::memory_order_release);
}

/// Caller holds c.lock. @return false: there is none
bool pop_fake(CqShadow& c, ibv_wc& wc) {
  if (c.fake.empty()) return false;
  wc = c.fake.front();
  c.fake.pop_front();
  if (c.given_back) --c.given_back;
  return true;
}

/// Nothing was found. Whoever polls without a pause would take the processor from those who work on the switchover.
/// Caller holds c.lock. @return ns to rest without it; 0: not at all
long rest_ns(CqShadow& c) {
  if (!(c.state.load(std::memory_order_relaxed) & (kRestingCq | kFrozenCq))) return c.rests = 0;
  return kRestNs << std::min(c.rests++ / kRestsOfALength, kDoublings);
}

void rest(long ns) {
  if (!ns) return;
  const NoCancel no_cancel;
  const int saved = errno;
  const timespec pause{.tv_sec = 0, .tv_nsec = ns};
  nanosleep(&pause, nullptr);
  errno = saved;
}

MIGR_COLD int poll_fake(CqShadow& c, int entries, ibv_wc* wc) noexcept {
  int n = 0;
  long pause = 0;
  {
    std::lock_guard guard(c.lock);
    poll_to_fake(c);
    while (n < entries && pop_fake(c, wc[n])) ++n;
    leave_fake_if_done(c);
    if (n) c.rests = 0;
    else pause = rest_ns(c);
  }
  rest(pause);
  return n;
}

/// A completion that the provider gave. Caller holds c.lock. @param side of the CQ on that link
/// @return how many it became in the fake CQ; -1: it is the application's, as it is
int take(CqShadow& c, const ibv_wc& wc, links::Side side);

/// There is an error among `n` completions of the direct path: those that are the path's are taken out. What lies behind them comes in their
/// place: who has armed the CQ and finds nothing goes to sleep, and no event tells of what was there before. But errors that were hidden, and
/// have come to the fake CQ since, are older than all of them; what other threads have taken from the device since is newer. @return how many are the application's, whose QP numbers are virtual
MIGR_COLD int take_errors(CqShadow& c, int n, ibv_wc* wc) noexcept {
  std::lock_guard guard(c.lock);
  int left = 0;
  for (int i = 0;;) {
    for (; i < n; ++i) {
      if (wc[i].status != IBV_WC_SUCCESS && take(c, wc[i], false) >= 0) continue;
      wc[left] = wc[i];
      wc[left].qp_num = virtual_qpn(c, wc[i].qp_num);
      ++left;
    }
    if (!c.fake.empty()) break;
    const int more = left < n ? c.real_poll(c.real, n - left, wc + left) : 0;
    if (more <= 0) return left;
    i = left;
    n = left + more;
  }
  c.fake.insert(c.fake.begin() + static_cast<std::ptrdiff_t>(std::min(c.given_back, c.fake.size())), wc, wc + left);
  for (left = 0; left < n && pop_fake(c, wc[left]);) ++left;
  if (!c.fake.empty()) c.state.fetch_or(kFakeCq, std::memory_order_relaxed);
  return left;
}

/// What a thread is in: the protected CQ that it polls, the protected QP of its ibv_wr_* session. Plain stores: whoever has
/// raised a flag makes all threads pass a barrier (membarrier) before it looks, so a thread is either seen here or sees
/// the flag. A thread with several sessions at once has a note for each.
struct Note {
  std::atomic<const CqShadow*> cq{nullptr};
  std::atomic<const QpShadow*> session{nullptr};
  Note* of_this_thread = nullptr;  ///< its others
  std::atomic<bool> alive{true};
  Note* next = nullptr;
};
std::atomic<Note*> notes{nullptr};
[[gnu::tls_model("initial-exec")]] thread_local Note* this_note = nullptr;

void thread_ended(void* first) {
  for (auto* n = static_cast<Note*>(first); n;) {
    Note* const following = n->of_this_thread;
    n->session.store(nullptr);
    n->alive.store(false);
    n = following;
  }
  this_note = nullptr;  // other threads have them from here on; and it may still poll, where others end what is theirs
}

/// One more of this thread's. @return null: no memory
MIGR_COLD Note* new_note() noexcept {
  static pthread_key_t ended;
  static const bool keyed = pthread_key_create(&ended, thread_ended) == 0;
  Note* n = notes.load();
  for (bool dead = false; n && !(dead = false, n->alive.compare_exchange_strong(dead, true)); n = n->next) {}
  if (!n) {
    if (!(n = new (std::nothrow) Note)) return nullptr;
    n->next = notes.load();
    while (!notes.compare_exchange_weak(n->next, n)) {}
  }
  n->of_this_thread = this_note;
  if (keyed) pthread_setspecific(ended, n);
  return this_note = n;
}

MIGR_INLINE bool has_error(int n, const ibv_wc* wc) {
  for (int i = 0; i < n; ++i)
    if (wc[i].status != IBV_WC_SUCCESS) [[unlikely]]
      return true;
  return false;
}

/// What of them an error is goes to where it belongs. @return how many are the application's
MIGR_INLINE int without_errors(CqShadow& c, int n, ibv_wc* wc) {
  if (has_error(n, wc)) [[unlikely]]
    return take_errors(c, n, wc);
  return n;
}

/// A protected CQ that is not on the direct path. QP numbers of the fake CQ are virtual already: which of the two answers is known only here.
MIGR_INLINE int poll_noted(CqShadow& c, int entries, ibv_wc* wc) noexcept {
  Note* const me = this_note ? this_note : new_note();
  if (!me) [[unlikely]]
    return poll_fake(c, entries, wc);
  me->cq.store(&c, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (c.state.load(std::memory_order_relaxed) & kFakeCq) [[unlikely]] {
    me->cq.store(nullptr, std::memory_order_release);
    return poll_fake(c, entries, wc);
  }
  int n = c.real_poll(c.real, entries, wc);
  const bool failed = has_error(n, wc);
  if (failed) [[unlikely]]
    n = take_errors(c, n, wc);
  me->cq.store(nullptr, std::memory_order_release);
  for (int i = 0; i < n && !failed; ++i) wc[i].qp_num = virtual_qpn(c, wc[i].qp_num);
  return n;
}

MIGR_PATH [[gnu::noinline]] int poll_switched(CqShadow& c, int entries, ibv_wc* wc) noexcept {
  const std::uint32_t state = c.state.load(std::memory_order_relaxed);
  if (state & kFakeCq) [[unlikely]]
    return poll_fake(c, entries, wc);
  if (state & kProtectedCq) return poll_noted(c, entries, wc);
  const int n = c.real_poll(c.real, entries, wc);
  for (int i = 0; i < n; ++i) wc[i].qp_num = virtual_qpn(c, wc[i].qp_num);
  return n;
}

}  // namespace

// Where it goes is read before the state: who was let through by an old state then goes to the path of that time, and
// finds a closed one instead of another link's whose keys are not these. Pairs with switch_to_link().
MIGR_PATH int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  QpShadow& q = shadow_of(qp);
  const auto lower = __atomic_load_n(&q.real_post_send, __ATOMIC_ACQUIRE);
  ibv_qp* const real = __atomic_load_n(&q.real, __ATOMIC_ACQUIRE);
  if (q.state.load(std::memory_order_relaxed)) [[unlikely]]
    return post_send_switched(q, wr, bad);
  return lower(real, wr, bad);  // tail call: nothing may follow it
}

MIGR_PATH int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  QpShadow& q = shadow_of(qp);
  const auto lower = __atomic_load_n(&q.real_post_recv, __ATOMIC_ACQUIRE);
  ibv_qp* const real = __atomic_load_n(&q.real, __ATOMIC_ACQUIRE);
  if (q.state.load(std::memory_order_relaxed)) [[unlikely]]
    return post_recv_switched(q, wr, bad);
  return lower(real, wr, bad);
}

MIGR_PATH int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.state.load(std::memory_order_relaxed)) [[unlikely]]
    return poll_switched(c, entries, wc);
  return c.real_poll(c.real, entries, wc);
}

// Instead of poll_cq(), where most CQs are protected: one look at the state word, behind the note.
MIGR_PATH int poll_protected(ibv_cq* cq, int entries, ibv_wc* wc) noexcept {
  CqShadow& c = shadow_of(cq);
  Note* const me = this_note;
  if (!me) [[unlikely]]
    return poll_cq(cq, entries, wc);
  me->cq.store(&c, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (c.state.load(std::memory_order_relaxed) != kProtectedCq) [[unlikely]] {
    me->cq.store(nullptr, std::memory_order_release);
    return poll_cq(cq, entries, wc);
  }
  const int n = without_errors(c, c.real_poll(c.real, entries, wc), wc);
  me->cq.store(nullptr, std::memory_order_release);
  return n;
}

namespace {

/// Translating it changes what is known of a memory window, and that must not run ahead of what was posted; or it takes a session.
bool goes_alone(const KeptSend& send) {
  return send.wr.opcode == IBV_WR_BIND_MW || send.wr.opcode == IBV_WR_LOCAL_INV || send.wr.opcode == IBV_WR_ATOMIC_WRITE;
}

/// ibv_post_send() does not know it. None of the application's sessions is open on the path.
int post_atomic_write(QpShadow& q, const KeptSend& send) noexcept {
  ibv_qp_ex* const ex = q.real_ex;
  if (!ex || !ex->wr_atomic_write || send.inline_data.size() != kAtomicBytes) return EOPNOTSUPP;
  ibv_send_wr wr = send.wr;
  wr.wr.rdma.rkey = physical_rkey(q, wr.wr.rdma.rkey);
  if (q.tracked) tracking::note(*q.tracked, wr);
  ex->wr_start(ex);
  ex->wr_id = wr.wr_id;
  ex->wr_flags = wr.send_flags;
  ex->wr_atomic_write(ex, wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, send.inline_data.data());
  const int err = ex->wr_complete(ex);
  return err == ENOSPC ? ENOMEM : err;  // the former where librxe's sessions find no room, the latter where ibv_post_send() finds none
}

template <std::size_t kWrs, std::size_t kSges>
int post_some(QpShadow& q, std::span<const KeptSend* const> sends, std::size_t& posted) noexcept {
  ibv_send_wr wrs[kWrs];
  ibv_sge sges[kSges];
  ibv_mw view;
  std::size_t n = 0, used = 0;
  bool of_window = false;  // then it is alone
  posted = 0;
  if (!sends.empty() && sends.front()->wr.opcode == IBV_WR_ATOMIC_WRITE) {
    const int err = post_atomic_write(q, *sends.front());
    posted = !err;
    return err;
  }
  for (; n < sends.size() && n < kWrs; ++n) {
    const KeptSend& send = *sends[n];
    if (n && (goes_alone(send) || goes_alone(*sends[n - 1]))) break;
    ibv_send_wr& wr = wrs[n];
    wr = send.wr;
    wr.next = nullptr;
    wr.sg_list = &sges[used];
    if (wr.send_flags & IBV_SEND_INLINE) {
      if (used == kSges) break;
      sges[used] = {.addr = reinterpret_cast<std::uint64_t>(send.inline_data.data()),
                    .length = static_cast<std::uint32_t>(send.inline_data.size()),
                    .lkey = 0};
      wr.num_sge = send.inline_data.empty() ? 0 : 1;
    } else {
      if (send.sges.size() > kSges - used) break;
      translate_sges(q, wr.sg_list, send.sges.data(), static_cast<int>(send.sges.size()));
      wr.num_sge = static_cast<int>(send.sges.size());
    }
    used += static_cast<std::size_t>(wr.num_sge);
    of_window = translate_watched(q, wr, view);
    if (q.tracked) tracking::note(*q.tracked, wr);
    if (n) wrs[n - 1].next = &wr;
  }
  if (!n) return EINVAL;  // more SGEs than any device takes
  ibv_send_wr* bad = wrs;
  const int err = q.real_post_send(q.real, wrs, &bad);
  if (of_window) windows::settle(q, !err);
  posted = !err ? n : bad ? static_cast<std::size_t>(bad - wrs) : 0;  // none is named where the doorbell fails
  return err;
}

}  // namespace

int post_sends(QpShadow& q, std::span<const KeptSend* const> sends, std::size_t& posted) noexcept {
  return post_some<kReplayWrs, kReplaySges>(q, sends, posted);
}

int post_one_send(QpShadow& q, const KeptSend& send) noexcept {
  const KeptSend* const one[] = {&send};
  std::size_t posted;
  return post_some<1, kChunkSges>(q, one, posted);  // in the application's thread, whose stack may be small
}

int post_one_receive(QpShadow& q, ibv_qp* to, const KeptReceive& receive) noexcept {
  ibv_sge sges[kChunkSges];
  if (receive.sges.size() > kChunkSges) return EINVAL;
  translate_sges(q, sges, receive.sges.data(), static_cast<int>(receive.sges.size()));
  ibv_recv_wr wr{.wr_id = receive.wr_id, .next = nullptr, .sg_list = sges, .num_sge = static_cast<int>(receive.sges.size())};
  ibv_recv_wr* bad;
  if (q.tracked) tracking::note(*q.tracked, wr);
  if (q.awaited.noted) datagrams::await(*q.context, q.awaited, receive);  // its completion may be there before the call returns
  const int err = q.real_post_recv(to, &wr, &bad);
  if (err && q.awaited.noted) datagrams::await_not(q.awaited);
  return err;
}

namespace {

/// Of a QP that is being cut: counts what the flushing of its queues tells. @return false: the application's own
bool of_a_cut(CqShadow& c, const ibv_wc& wc, links::Side side) {
  const auto cut = std::find_if(c.cutting.begin(), c.cutting.end(), [&](const Cut* x) { return x->pqpn == wc.qp_num && x->side == side; });
  if (cut == c.cutting.end()) return false;
  if (wc.status == IBV_WC_SUCCESS && (wc.opcode & IBV_WC_RECV)) ++(*cut)->received;
  const bool given_up = gives_up(wc.status) && (*cut)->path_failed;
  if (wc.status != IBV_WC_WR_FLUSH_ERR && !given_up) return false;
  if (links::unused(c, wc.wr_id)) return true;
  if ((*cut)->sends_over && &c == (*cut)->send_cq) return true;  // the trap has it
  if ((*cut)->receives_over && &c != (*cut)->send_cq) return true;
  (&c == (*cut)->send_cq ? (*cut)->taken_sends : (*cut)->taken_receives).push_back(wc);
  return true;
}

}  // namespace

bool watch_pollers() { return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0; }

bool pollers_are_outside(const CqShadow& c) {
  for (const Note* n = notes.load(); n; n = n->next)
    if (n->cq.load(std::memory_order_acquire) == &c) return false;
  return true;
}

bool sessions_are_outside(const QpShadow& q) {
  for (const Note* n = notes.load(); n; n = n->next)
    if (n->session.load(std::memory_order_acquire) == &q) return false;
  return true;
}

void pass_barrier() {
  const int kept = errno;
  const auto passed = [](int command) { return syscall(SYS_membarrier, command, 0, 0) == 0; };
  // A process that was restored has to say again that it will. The last is slow, and needs no such word.
  if (!passed(MEMBARRIER_CMD_PRIVATE_EXPEDITED) && !(watch_pollers() && passed(MEMBARRIER_CMD_PRIVATE_EXPEDITED))) passed(MEMBARRIER_CMD_GLOBAL);
  errno = kept;
}

int complete_stand_in(CqShadow& c, const ibv_wc& wc) {
  const auto found = std::find_if(c.stand_ins.begin(), c.stand_ins.end(), [&](const StandIn& s) { return s.wr_id == wc.wr_id; });
  if (found == c.stand_ins.end()) return -1;
  int pushed = 0;
  ibv_wc_status status = wc.status;
  if (const auto& again = found->again; again && again->result && status == IBV_WC_SUCCESS && *again->result == again->swap)
    *again->result = again->compare;
  for (const OwedCompletion& owed : found->owed) {
    if (status == IBV_WC_SUCCESS && !owed.signalled) continue;
    c.fake.push_back(owed.wc);
    c.fake.back().status = status;
    ++pushed;
    if (status != IBV_WC_SUCCESS) status = IBV_WC_WR_FLUSH_ERR;
  }
  c.stand_ins.erase(found);
  return pushed;
}

namespace {

bool is_stand_in(const CqShadow& c, const ibv_wc& wc) {
  return std::any_of(c.stand_ins.begin(), c.stand_ins.end(), [&](const StandIn& s) { return s.wr_id == wc.wr_id; });
}

int take(CqShadow& c, const ibv_wc& wc, links::Side side) {
  const bool ours = marker::is_marker(wc.wr_id), failed = wc.status != IBV_WC_SUCCESS;
  if (!ours || (failed && is_stand_in(c, wc))) {  // the latter: a path that is cut again
    if (!c.cutting.empty() && of_a_cut(c, wc, side)) return 0;
    if (failed && links::take_error(c, wc, side)) return 0;
    if (!ours) return -1;
  }
  if (c.markers) --c.markers;
  if (const auto drain = c.drain_markers.find(wc.wr_id); drain != c.drain_markers.end()) {
    if (failed) drain->second.flushed = true;
    else c.drain_markers.erase(drain);
  }
  for (Cut* cut : c.cutting) {
    if (cut->send_marker == wc.wr_id) cut->sends_over = true;
    if (cut->receive_marker == wc.wr_id) {
      cut->receives_over = true;
      if (&c == cut->send_cq) cut->taken_before = cut->taken_sends.size();
    }
  }
  const int others = complete_stand_in(c, wc);
  if (others < 0) c.seen_markers.push_back(wc);
  return std::max(others, 0);
}

bool may_change_windows(const ibv_wc& wc) { return wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_BIND_MW || wc.opcode == IBV_WC_LOCAL_INV; }

/// One CQ of the provider's.
int move_to_fake(CqShadow& c, ibv_cq* cq, int (*poll)(ibv_cq*, int, ibv_wc*), const std::uint32_t* qpn_table, links::Side side) {
  constexpr int kBatch = 16;
  ibv_wc batch[kBatch];
  const std::uint32_t state = c.state.load(std::memory_order_relaxed);
  int moved = 0, n;
  while ((n = poll(cq, kBatch, batch)) > 0) {
    for (int i = 0; i < n; ++i) {
      if (const int became = take(c, batch[i], side); became >= 0) {
        moved += became;
        continue;
      }
      if (!links::consumed(c, batch[i])) continue;
      batch[i].qp_num = virtual_qpn(qpn_table, batch[i].qp_num);
      if (state & kWatchedCq && may_change_windows(batch[i])) windows::completed(*c.context, batch[i]);
      if (provider::ends_binding(batch[i])) windows::invalidated(*c.context, batch[i]);
      if (!c.datagram_qps.empty()) datagrams::name_source(c, batch[i]);
      c.fake.push_back(batch[i]);
      ++moved;
    }
    if (n < kBatch) break;
  }
  return moved;
}

}  // namespace

int poll_to_fake(CqShadow& c) noexcept {
  const std::uint32_t state = c.state.load(std::memory_order_relaxed);
  if (state & kFrozenCq) return 0;
  int moved = move_to_fake(c, c.real, c.real_poll, c.qpn_table, links::kHome);
  if (state & kLinkedCq)
    for (const links::CqLink::Cq& cq : c.link->cqs) moved += move_to_fake(c, cq.real, cq.real_poll, cq.qpn_table, cq.side);
  if (moved) {
    c.state.fetch_or(kFakeCq, std::memory_order_relaxed);
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    c.last_cqe_ns = static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
  }
  return moved;
}

/*
 * ---- ibv_wr_*: wr_start looks at the state word and chooses where the session
 * goes; the calls of the session follow q.target without a question. Keys are
 * virtual for the keeper and physical for the provider: calls that name one exist
 * twice, and translate_keys() exchanges them when the QP is switched for the first
 * time.
 */

namespace {

void name_in_session(const QpShadow& q, ibv_send_wr& wr) {
  wr.wr_id = q.app_ex.wr_id;
  wr.send_flags = q.app_ex.wr_flags;
}

/// Of ibv_wr_bind_mw().
MIGR_COLD void translate_bind(QpShadow& q, ibv_send_wr& wr, ibv_mw& view) noexcept {
  name_in_session(q, wr);
  translate_watched(q, wr, view);
}

/// Of ibv_wr_local_inv().
MIGR_COLD std::uint32_t invalidated_rkey(QpShadow& q, std::uint32_t rkey) noexcept {
  ibv_send_wr wr{};
  name_in_session(q, wr);
  wr.opcode = IBV_WR_LOCAL_INV;
  wr.invalidate_rkey = rkey;
  ibv_mw unused;
  translate_watched(q, wr, unused);
  return wr.invalidate_rkey;
}

constexpr std::uint32_t kTranslateAny = kWindows | kTranslateLocal | kTranslateRemote | kForced | kDatagrams;

MIGR_INLINE ibv_qp_ex* target_of(const QpShadow& q) { return q.target; }

/// Where the session goes, with the WR's id and flags as the application has set them in ours.
MIGR_INLINE ibv_qp_ex* lower(QpShadow& q) {
  ibv_qp_ex* const target = q.target;
  const std::uint64_t id = q.app_ex.wr_id;
  const unsigned flags = q.app_ex.wr_flags;
  target->wr_id = id;
  target->wr_flags = flags;
  return target;
}

MIGR_INLINE bool takes_physical(const QpShadow& q, const ibv_qp_ex* target) { return target != &q.keeper.ex; }

/// No session may begin on the path.
constexpr std::uint32_t kNotOnPath = kKeptSession | kSessionsKept;

/// Called by tail call: while it waits, no frame of the path may be on the stack.
MIGR_COLD void wr_start_suspended(ibv_qp_ex* qp) noexcept {
  if (!kept::start(shadow_of(qp))) qp->wr_start(qp);
}

/// The session is noted before the provider takes its lock, because a store between that and the doorbell costs most.
/// The session before, of another thread, may end meanwhile and take the note away: it is looked for under the lock.
MIGR_INLINE void start_on_path(QpShadow& q) {
  q.path_session.store(true, std::memory_order_relaxed);
  q.target->wr_start(q.target);
  if (!q.path_session.load(std::memory_order_relaxed)) [[unlikely]]
    q.path_session.store(true, std::memory_order_relaxed);
}

}  // namespace

MIGR_PATH void wr_start(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  if (q.state.load(std::memory_order_relaxed) & kNotOnPath) [[unlikely]]
    return wr_start_suspended(qp);
  start_on_path(q);
}

namespace {

/// Of this thread; whichever is free.
MIGR_COLD Note* note_for_session() noexcept {
  Note* n = this_note;
  while (n && n->session.load(std::memory_order_relaxed)) n = n->of_this_thread;
  return n ? n : new_note();
}

/// Of a QP that may have a backup link: nobody stops threads before its path is changed, so that a session is open must be
/// seen at any moment, also where several threads post.
MIGR_PATH void wr_start_noted(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  Note* me = this_note;
  if (!me || me->session.load(std::memory_order_relaxed)) [[unlikely]]
    if (!(me = note_for_session())) return wr_start(qp);  // without memory as without a backup
  me->session.store(&q, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (q.state.load(std::memory_order_relaxed) & kNotOnPath) [[unlikely]] {
    me->session.store(nullptr, std::memory_order_release);
    return wr_start_suspended(qp);
  }
  start_on_path(q);
}

/// A kept session has none.
MIGR_INLINE void forget_session(const QpShadow& q) {
  for (Note* n = this_note; n; n = n->of_this_thread)
    if (n->session.load(std::memory_order_relaxed) == &q) return n->session.store(nullptr, std::memory_order_release);
}

MIGR_PATH int wr_complete(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  ibv_qp_ex* const target = q.target;
  q.path_session.store(false, std::memory_order_relaxed);
  return target->wr_complete(target);
}

MIGR_PATH void wr_abort(ibv_qp_ex* qp) noexcept {
  QpShadow& q = shadow_of(qp);
  ibv_qp_ex* const target = q.target;
  q.path_session.store(false, std::memory_order_relaxed);
  target->wr_abort(target);
}

MIGR_PATH int wr_complete_noted(ibv_qp_ex* qp) noexcept {
  const int err = wr_complete(qp);
  forget_session(shadow_of(qp));
  return err;
}

MIGR_PATH void wr_abort_noted(ibv_qp_ex* qp) noexcept {
  wr_abort(qp);
  forget_session(shadow_of(qp));
}

/// Of a QP whose binds are watched, noted or not: which of them was posted is known here.
MIGR_PATH int wr_complete_watched(ibv_qp_ex* qp) noexcept {
  const int err = wr_complete(qp);
  windows::settle(shadow_of(qp), !err);
  forget_session(shadow_of(qp));
  return err;
}

MIGR_PATH void wr_abort_watched(ibv_qp_ex* qp) noexcept {
  wr_abort(qp);
  windows::settle(shadow_of(qp), false);
  forget_session(shadow_of(qp));
}

/// One call of a session: `where` it goes, and what is done to an argument `before`.
#define MIGR_WR_CALL(function, name, params, where, before, ...) \
  MIGR_PATH void function params noexcept {                      \
    QpShadow& q = shadow_of(qp);                                 \
    ibv_qp_ex* const target = where(q);                          \
    before;                                                      \
    target->name(__VA_ARGS__);                                   \
  }
#define MIGR_WR_OPCODE(name, params, ...) MIGR_WR_CALL(name, name, params, lower, (void)0, __VA_ARGS__)
#define MIGR_WR_SETTER(name, params, ...) MIGR_WR_CALL(name, name, params, target_of, (void)0, __VA_ARGS__)
/// With a counterpart that translates its rkey.
#define MIGR_WR_RKEY_OPCODE(name, params, ...)                                                                      \
  MIGR_WR_OPCODE(name, params, __VA_ARGS__)                                                                         \
  MIGR_WR_CALL(name##_translated, name, params, lower, if (takes_physical(q, target)) rkey = physical_rkey(q, rkey), \
               __VA_ARGS__)

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

MIGR_WR_OPCODE(wr_send, (ibv_qp_ex * qp), target)
MIGR_WR_OPCODE(wr_send_imm, (ibv_qp_ex * qp, __be32 imm), target, imm)
MIGR_WR_OPCODE(wr_send_tso, (ibv_qp_ex * qp, void* header, u16 bytes, u16 mss), target, header, bytes, mss)
MIGR_WR_OPCODE(wr_local_inv, (ibv_qp_ex * qp, u32 rkey), target, rkey)
MIGR_WR_CALL(wr_local_inv_translated, wr_local_inv, (ibv_qp_ex * qp, u32 rkey), lower,
             if (takes_physical(q, target)) rkey = invalidated_rkey(q, rkey), target, rkey)
MIGR_WR_RKEY_OPCODE(wr_send_inv, (ibv_qp_ex * qp, u32 rkey), target, rkey)
MIGR_WR_RKEY_OPCODE(wr_rdma_write, (ibv_qp_ex * qp, u32 rkey, u64 addr), target, rkey, addr)
MIGR_WR_RKEY_OPCODE(wr_rdma_write_imm, (ibv_qp_ex * qp, u32 rkey, u64 addr, __be32 imm), target, rkey, addr, imm)
MIGR_WR_RKEY_OPCODE(wr_rdma_read, (ibv_qp_ex * qp, u32 rkey, u64 addr), target, rkey, addr)
MIGR_WR_RKEY_OPCODE(wr_atomic_cmp_swp, (ibv_qp_ex * qp, u32 rkey, u64 addr, u64 compare, u64 swap), target, rkey, addr,
                    compare, swap)
MIGR_WR_RKEY_OPCODE(wr_atomic_fetch_add, (ibv_qp_ex * qp, u32 rkey, u64 addr, u64 add), target, rkey, addr, add)
MIGR_WR_RKEY_OPCODE(wr_atomic_write, (ibv_qp_ex * qp, u32 rkey, u64 addr, const void* data), target, rkey, addr, data)

MIGR_WR_SETTER(wr_set_sge, (ibv_qp_ex * qp, u32 lkey, u64 addr, u32 length), target, lkey, addr, length)
MIGR_WR_CALL(wr_set_sge_translated, wr_set_sge, (ibv_qp_ex * qp, u32 lkey, u64 addr, u32 length), target_of,
             if (takes_physical(q, target)) lkey = physical_lkey(q, lkey), target, lkey, addr, length)
MIGR_WR_SETTER(wr_set_sge_list, (ibv_qp_ex * qp, std::size_t count, const ibv_sge* list), target, count, list)
MIGR_WR_SETTER(wr_set_inline_data, (ibv_qp_ex * qp, void* addr, std::size_t length), target, addr, length)
MIGR_WR_SETTER(wr_set_inline_data_list, (ibv_qp_ex * qp, std::size_t count, const ibv_data_buf* list), target, count,
               list)
MIGR_WR_SETTER(wr_set_ud_addr, (ibv_qp_ex * qp, ibv_ah* ah, u32 qpn, u32 qkey), target, ah, qpn, qkey)
MIGR_WR_SETTER(wr_set_xrc_srqn, (ibv_qp_ex * qp, u32 srqn), target, srqn)
#undef MIGR_WR_RKEY_OPCODE
#undef MIGR_WR_SETTER
#undef MIGR_WR_OPCODE
#undef MIGR_WR_CALL

MIGR_PATH void wr_set_ud_addr_translated(ibv_qp_ex* qp, ibv_ah* ah, std::uint32_t qpn, std::uint32_t qkey) noexcept {
  QpShadow& q = shadow_of(qp);
  ibv_qp_ex* const target = q.target;
  if (takes_physical(q, target)) datagrams::translate(ah, qpn);
  target->wr_set_ud_addr(target, ah, qpn, qkey);
}

/// The application's list stays as it was.
MIGR_PATH void wr_set_sge_list_translated(ibv_qp_ex* qp, std::size_t count, const ibv_sge* list) noexcept {
  QpShadow& q = shadow_of(qp);
  ibv_qp_ex* const target = q.target;
  if (!takes_physical(q, target)) return target->wr_set_sge_list(target, count, list);
  ibv_sge sges[kChunkSges];
  if (count > kChunkSges) count = kChunkSges;  // beyond any device's max_sge: the provider refuses it at wr_complete
  translate_sges(q, sges, list, static_cast<int>(count));
  target->wr_set_sge_list(target, count, sges);
}

/// An MW's MR is a shadow; its key and what it is bound to are ours to know.
MIGR_PATH void wr_bind_mw(ibv_qp_ex* qp, ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info* info) noexcept {
  QpShadow& q = shadow_of(qp);
  ibv_qp_ex* const target = lower(q);
  if (!takes_physical(q, target)) return target->wr_bind_mw(target, mw, rkey, info);
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_BIND_MW;
  wr.bind_mw = {.mw = mw, .rkey = rkey, .bind_info = *info};
  ibv_mw view;
  translate_bind(q, wr, view);
  target->wr_bind_mw(target, wr.bind_mw.mw, wr.bind_mw.rkey, &wr.bind_mw.bind_info);
}

}  // namespace

void install_wr_api(QpShadow& q) {
  q.target = q.real_ex;
  kept::install_keeper(q);
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
  if (q.context->twin || environment::force_protected()) {
    q.app_ex.wr_start = wr_start_noted;
    q.app_ex.wr_complete = wr_complete_noted;
    q.app_ex.wr_abort = wr_abort_noted;
  }
  if (q.state.load(std::memory_order_relaxed) & kTranslateAny) translate_keys(q, 0);
}

void translate_keys(QpShadow& q, std::uint32_t bits) {
  q.state.fetch_or(bits, std::memory_order_relaxed);
#define MIGR_EXCHANGE(name) \
  if (q.app_ex.name) q.app_ex.name = name##_translated
  if (!q.real_ex) return;
  MIGR_EXCHANGE(wr_atomic_cmp_swp);
  MIGR_EXCHANGE(wr_atomic_fetch_add);
  MIGR_EXCHANGE(wr_atomic_write);
  MIGR_EXCHANGE(wr_local_inv);
  MIGR_EXCHANGE(wr_rdma_read);
  MIGR_EXCHANGE(wr_rdma_write);
  MIGR_EXCHANGE(wr_rdma_write_imm);
  MIGR_EXCHANGE(wr_send_inv);
  MIGR_EXCHANGE(wr_set_sge);
  MIGR_EXCHANGE(wr_set_sge_list);
  MIGR_EXCHANGE(wr_set_ud_addr);
#undef MIGR_EXCHANGE
  if (!(q.state.load(std::memory_order_relaxed) & kWindows)) return;
  if (q.app_ex.wr_complete) q.app_ex.wr_complete = wr_complete_watched;
  if (q.app_ex.wr_abort) q.app_ex.wr_abort = wr_abort_watched;
}

/*
 * ---- ibv_cq_ex: start_poll looks at the state word and chooses what the session
 * reads; the readers follow c.target without a question. read_qp_num exists twice,
 * and translate_qpns() exchanges it.
 */

namespace {

MIGR_INLINE void show(CqShadow& c, ibv_wc_status status, std::uint64_t wr_id) {
  c.app_ex.status = status;
  c.app_ex.wr_id = wr_id;
}

/// The next completion of a session on the fake CQ.
MIGR_COLD int next_fake(CqShadow& c) noexcept {
  std::unique_lock guard(c.lock);
  poll_to_fake(c);
  if (!pop_fake(c, c.fake_ex.wc)) {
    const long pause = rest_ns(c);
    guard.unlock();
    rest(pause);
    return ENOENT;
  }
  c.target = &c.fake_ex.ex;
  show(c, c.fake_ex.wc.status, c.fake_ex.wc.wr_id);
  return 0;
}

MIGR_COLD int start_fake(CqShadow& c) noexcept {
  while (c.ex_session.load(std::memory_order_acquire)) rest(kSessionPollNs);  // another thread's, on the provider's CQ
  c.ex_lock.lock();
  const int err = next_fake(c);
  if (err) c.ex_lock.unlock();
  return err;
}

MIGR_PATH int start_poll(ibv_cq_ex* cq, ibv_poll_cq_attr* attr) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.state.load(std::memory_order_relaxed) & kFakeCq) [[unlikely]]
    return start_fake(c);
  const int err = c.real_ex->start_poll(c.real_ex, attr);
  if (err) [[unlikely]]  // an empty CQ is no hurry
    return err;
  const ibv_cq_ex* const real = c.real_ex;  // not kept over the call: a saved register costs more than a load
  c.ex_session.store(true, std::memory_order_relaxed);
  show(c, real->status, real->wr_id);
  return 0;
}

MIGR_PATH int next_poll(ibv_cq_ex* cq) noexcept {
  CqShadow& c = shadow_of(cq);
  if (c.target != c.real_ex) [[unlikely]]
    return next_fake(c);
  const int err = c.real_ex->next_poll(c.real_ex);
  if (err) return err;
  const ibv_cq_ex* const real = c.real_ex;
  show(c, real->status, real->wr_id);
  return 0;
}

void name_receive(CqShadow& c) noexcept {
  if (c.target != c.real_ex) return;  // from the fake CQ: it is named already
  ibv_wc wc{};
  wc.wr_id = c.app_ex.wr_id;
  links::consumed(c, wc);
  c.app_ex.wr_id = wc.wr_id;
}

int start_poll_named(ibv_cq_ex* cq, ibv_poll_cq_attr* attr) noexcept {
  const int err = start_poll(cq, attr);
  if (!err) name_receive(shadow_of(cq));
  return err;
}

int next_poll_named(ibv_cq_ex* cq) noexcept {
  const int err = next_poll(cq);
  if (!err) name_receive(shadow_of(cq));
  return err;
}

MIGR_PATH void end_poll(ibv_cq_ex* cq) noexcept {
  CqShadow& c = shadow_of(cq);
  ibv_cq_ex* const target = c.target;
  c.ex_session.store(false, std::memory_order_relaxed);
  target->end_poll(target);
}

CqShadow::FakeEx& fake_of(ibv_cq_ex* fake) { return *reinterpret_cast<CqShadow::FakeEx*>(fake); }
const ibv_wc& fake_wc(ibv_cq_ex* fake) { return fake_of(fake).wc; }

void fake_end_poll(ibv_cq_ex* fake) noexcept {
  CqShadow& c = *fake_of(fake).owner;
  {
    std::lock_guard guard(c.lock);
    c.target = c.real_ex;  // before who comes next may go to the provider
    leave_fake_if_done(c);
  }
  c.ex_lock.unlock();
}

/// A reader, and its counterpart on a fake completion.
#define MIGR_READER(type, name, of_wc)                                        \
  MIGR_PATH type name(ibv_cq_ex* cq) noexcept {                               \
    ibv_cq_ex* const target = shadow_of(cq).target;                           \
    return target->name(target);                                              \
  }                                                                           \
  type fake_##name([[maybe_unused]] ibv_cq_ex* fake) noexcept { return of_wc; }
MIGR_READER(ibv_wc_opcode, read_opcode, fake_wc(fake).opcode)
MIGR_READER(std::uint32_t, read_vendor_err, fake_wc(fake).vendor_err)
MIGR_READER(std::uint32_t, read_byte_len, fake_wc(fake).byte_len)
MIGR_READER(__be32, read_imm_data, fake_wc(fake).imm_data)
MIGR_READER(std::uint32_t, read_qp_num, fake_wc(fake).qp_num)
MIGR_READER(std::uint32_t, read_src_qp, fake_wc(fake).src_qp)
MIGR_READER(unsigned, read_wc_flags, fake_wc(fake).wc_flags)
MIGR_READER(std::uint32_t, read_slid, fake_wc(fake).slid)
MIGR_READER(std::uint8_t, read_sl, fake_wc(fake).sl)
MIGR_READER(std::uint8_t, read_dlid_path_bits, fake_wc(fake).dlid_path_bits)
// A fake completion carries no time, VLAN or flow tag: what was not taken along reads as zero.
MIGR_READER(std::uint64_t, read_completion_ts, 0)
MIGR_READER(std::uint16_t, read_cvlan, 0)
MIGR_READER(std::uint32_t, read_flow_tag, 0)
MIGR_READER(std::uint64_t, read_completion_wallclock_ns, 0)
#undef MIGR_READER

MIGR_PATH void read_tm_info(ibv_cq_ex* cq, ibv_wc_tm_info* info) noexcept {
  ibv_cq_ex* const target = shadow_of(cq).target;
  target->read_tm_info(target, info);
}
void fake_read_tm_info(ibv_cq_ex*, ibv_wc_tm_info* info) noexcept { *info = {}; }

/// A fake completion has its virtual QPN already.
MIGR_PATH std::uint32_t read_qp_num_translated(ibv_cq_ex* cq) noexcept {
  const CqShadow& c = shadow_of(cq);
  ibv_cq_ex* const target = c.target;
  const std::uint32_t qpn = target->read_qp_num(target);
  return target == c.real_ex ? virtual_qpn(c, qpn) : qpn;
}

}  // namespace

void install_pollers(CqShadow& c) {
  c.target = c.real_ex;
  c.fake_ex.owner = &c;
  c.fake_ex.ex.end_poll = fake_end_poll;
  c.app_ex.comp_mask = c.real_ex->comp_mask;
#define MIGR_INSTALL_CALL(name) c.app_ex.name = c.real_ex->name ? name : nullptr
#define MIGR_INSTALL(name)   \
  MIGR_INSTALL_CALL(name);   \
  c.fake_ex.ex.name = fake_##name
  MIGR_INSTALL_CALL(start_poll);
  MIGR_INSTALL_CALL(next_poll);
  MIGR_INSTALL_CALL(end_poll);
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
#undef MIGR_INSTALL_CALL
  if (c.state.load(std::memory_order_relaxed) & (kTranslateQpn | kCqForced)) translate_qpns(c, 0);
}

void name_receives(CqShadow& c) {
  c.app_ex.start_poll = start_poll_named;
  c.app_ex.next_poll = next_poll_named;
}

void translate_qpns(CqShadow& c, std::uint32_t bits) {
  c.state.fetch_or(bits, std::memory_order_relaxed);
  if (c.real_ex && c.app_ex.read_qp_num) c.app_ex.read_qp_num = read_qp_num_translated;
}

}  // namespace migr::path
