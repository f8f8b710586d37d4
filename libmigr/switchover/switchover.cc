/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "switchover.h"

#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <iterator>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "../datagrams.h"
#include "../kernel_link.h"
#include "../path.h"
#include "../provider/provider.h"
#include "../real.h"
#include "../windows.h"
#include "replay.h"

namespace migr::marker {
namespace {

constexpr std::uint64_t kSpan = 1u << 30;

std::uint64_t base() {
  static const std::uint64_t value = [] {
    std::uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = 0x6d6967726d61726b;
    return random & ~(kSpan - 1);
  }();
  return value;
}

}  // namespace

std::uint64_t next() {
  static std::uint64_t count = 0;  // Registry's lock
  return base() + (count++ & (kSpan - 1));
}

bool is_marker(std::uint64_t wr_id) { return wr_id - base() < kSpan; }

}  // namespace migr::marker

namespace migr::switchover {
namespace {

constexpr long kDrainPollNs = 100'000;
constexpr unsigned kSessionLimitMs = 1000;   // resume() waits so long for an open kept session
constexpr unsigned kEventLimitMs = 2000;     // a flushed receive of our own
constexpr unsigned kFlushQuietMs = 20;       // no completion for so long after a flushed queue is empty: the last has come
constexpr std::uint32_t kPsnMask = 0xffffff;

std::uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}

void pause_briefly() {
  const timespec pause{0, kDrainPollNs};
  nanosleep(&pause, nullptr);
}

std::string qp_name(const QpShadow& q) { return "vQPN " + std::to_string(q.vqpn()); }

int fail(std::string& why, int err, const std::string& what) {
  why = what + ": " + std::strerror(err);
  return err;
}

int check_arc(const QpShadow& q, Phase to, std::string& why) {
  if (may_move(q.phase, to)) return 0;
  why = qp_name(q) + " is " + name(q.phase) + " and cannot become " + name(to);
  return EBUSY;
}

int check_arcs(Qps qps, Phase to, std::string& why) {
  for (QpShadow* q : qps)
    if (const int err = check_arc(*q, to, why)) return err;
  return 0;
}

void set_bits(QpShadow& q, std::uint32_t bits) { q.state.fetch_or(bits, std::memory_order_relaxed); }
void clear_bits(QpShadow& q, std::uint32_t bits) { q.state.fetch_and(~bits, std::memory_order_relaxed); }

template <class Function>
void for_cqs(const QpShadow& q, Function&& function) {
  if (q.send_cq) function(*q.send_cq);
  if (q.recv_cq && q.recv_cq != q.send_cq) function(*q.recv_cq);
}

void set_cq_bits(CqShadow& c, std::uint32_t set, std::uint32_t clear = 0) {
  std::lock_guard guard(c.lock);
  c.state.store((c.state.load(std::memory_order_relaxed) | set) & ~clear, std::memory_order_relaxed);
}

bool kept_session(const QpShadow& q) { return q.state.load(std::memory_order_relaxed) & kKeptSession; }

void set_srq_bits(SrqShadow& s, std::uint32_t set, std::uint32_t clear = 0) {
  s.state.store((s.state.load(std::memory_order_relaxed) | set) & ~clear, std::memory_order_relaxed);
}

bool connected(const QpShadow& q) { return q.real->state == IBV_QPS_RTS || q.real->state == IBV_QPS_SQD; }

/* ---- the drain marker needs a responder that allows RDMA writes -------------- */

bool reliable(const QpShadow& q) { return q.app.qp_type == IBV_QPT_RC; }

/// What modify_qp wants to hear on the way to RTR and to RTS.
int rtr_mask(const QpShadow& q) {
  return IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
         (reliable(q) ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0);
}
int rts_mask(const QpShadow& q) {
  return IBV_QP_STATE | IBV_QP_SQ_PSN |
         (reliable(q) ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0);
}
/// On a bad network the kernel's question for the other end's address may be lost; it asks once in a second.
int to_rtr(const QpShadow& q, ibv_qp* qp, ibv_qp_attr& attr) {
  constexpr int kTries = 5;
  int err = 0;
  for (int i = 0; i < kTries; ++i)
    if (err = real().modify_qp(qp, &attr, rtr_mask(q)); err != ETIMEDOUT) break;
  return err;
}

constexpr int kInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

/// A responder that never sends may stay in RTR, where access flags cannot be changed: it goes to RTS for the rest of
/// this path's life, and the application keeps seeing RTR. Nothing is ever sent on it, so its first PSN does not matter.
int allow_write_in_rtr(QpShadow& q, unsigned access_flags, std::string& why) {
  constexpr std::uint8_t kTimeout = 14, kRetries = 7;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_RTS;
  to.timeout = kTimeout;
  to.retry_cnt = to.rnr_retry = kRetries;
  to.qp_access_flags = access_flags;
  const int err = real().modify_qp(q.real, &to, rts_mask(q) | IBV_QP_ACCESS_FLAGS);
  if (err) return fail(why, err, "modify_qp (RTR to RTS with access flags) of " + qp_name(q));
  q.responder_only = true;
  q.write_access_added = true;
  return 0;
}

int set_write_access(QpShadow& q, bool allow, std::string& why) {
  if (q.app.qp_type != IBV_QPT_RC && q.app.qp_type != IBV_QPT_UC) return 0;
  const bool in_rtr = q.real->state == IBV_QPS_RTR && allow;
  if ((q.real->state != IBV_QPS_RTS && !in_rtr) || allow == q.write_access_added) return 0;
  if (allow && q.access_flags >= 0 && (q.access_flags & IBV_ACCESS_REMOTE_WRITE)) return 0;  // no call per QP
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  int err = real().query_qp(q.real, &attr, IBV_QP_ACCESS_FLAGS, &init);
  if (err) return fail(why, err, "query_qp of " + qp_name(q));
  constexpr auto kWrite = static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE);
  if (allow && (attr.qp_access_flags & kWrite)) return 0;
  if (in_rtr) return allow_write_in_rtr(q, attr.qp_access_flags | kWrite, why);
  ibv_qp_attr change{};
  change.qp_access_flags = allow ? attr.qp_access_flags | kWrite : attr.qp_access_flags & ~kWrite;
  err = real().modify_qp(q.real, &change, IBV_QP_ACCESS_FLAGS);
  if (err) return fail(why, err, "modify_qp (access flags) of " + qp_name(q));
  q.write_access_added = allow;
  return 0;
}

/* ---- receives ---------------------------------------------------------------- */

/// Physical -> virtual lkey, of every MR there is.
class VirtualLkeys {
 public:
  VirtualLkeys() {
    for (const MrShadow* mr : Registry::get().mrs) keys_[mr->context][mr->real->lkey] = mr->app.lkey;
  }
  void translate(const Context& context, std::vector<ibv_sge>& sges) const {
    const auto keys = keys_.find(&context);
    if (keys == keys_.end()) return;
    for (ibv_sge& sge : sges)
      if (const auto found = keys->second.find(sge.lkey); found != keys->second.end()) sge.lkey = found->second;
  }

 private:
  std::unordered_map<const Context*, std::unordered_map<std::uint32_t, std::uint32_t>> keys_;
};

int read_back_receives(QpShadow& q, const VirtualLkeys& keys, std::vector<KeptReceive>& out, std::string& why) {
  out.clear();
  if (q.app.srq) return 0;
  if (q.cut) return out = q.cut->receives, 0;  // its queue was emptied, and takes nothing since
  if (const int err = provider::outstanding_receives(q, out))
    return fail(why, err, "cannot read back the receive queue of " + qp_name(q));
  for (KeptReceive& receive : out) keys.translate(*q.context, receive.sges);
  return 0;
}

/// Caller holds s.lock.
int read_back_receives(SrqShadow& s, const VirtualLkeys& keys, std::string& why) {
  s.outstanding.clear();
  if (const int err = provider::outstanding_receives(s, s.outstanding))
    return fail(why, err, "cannot read back a shared receive queue");
  for (KeptReceive& receive : s.outstanding) keys.translate(*s.context, receive.sges);
  return 0;
}

template <class Receives>
int post_receives(SrqShadow& s, const Receives& receives, std::string& why) {
  for (const KeptReceive& receive : receives)
    if (const int err = path::post_one_receive(s, receive)) return fail(why, err, "post_srq_recv");
  return 0;
}

template <class Receives>
int post_receives(QpShadow& q, ibv_qp* to, const Receives& receives, std::string& why) {
  for (const KeptReceive& receive : receives)
    if (const int err = path::post_one_receive(q, to, receive))
      return fail(why, err, "post_recv to " + qp_name(q) + "'s new path");
  return 0;
}

/* ---- leaving suspension ------------------------------------------------------- */

/// The completion that a send gets that cannot be posted any more.
void flush_to_fake(QpShadow& q, const KeptSend& send) {
  if (!q.send_cq) return;
  ibv_wc wc{};
  wc.wr_id = send.wr.wr_id;
  wc.status = IBV_WC_WR_FLUSH_ERR;
  wc.qp_num = q.vqpn();
  std::lock_guard guard(q.send_cq->lock);
  if (marker::is_marker(wc.wr_id)) {
    if (q.send_cq->markers) --q.send_cq->markers;
    path::complete_stand_in(*q.send_cq, wc);
    return;
  }
  q.send_cq->fake.push_back(wc);
}

/// q.lock with no kept ibv_wr_* session open (or after the limit: then it completes on the path).
std::unique_lock<std::mutex> lock_between_sessions(QpShadow& q) {
  const std::uint64_t deadline = now_ns() + kSessionLimitMs * 1'000'000ull;
  std::unique_lock guard(q.lock);
  while (kept_session(q) && now_ns() < deadline) {
    guard.unlock();
    pause_briefly();
    guard.lock();
  }
  return guard;
}

/// What was posted is flushed, and so is what was kept: as when the partner has died.
int break_connection(QpShadow& q, std::string& why) {
  q.gone = false;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  const int err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  return err ? fail(why, err, "modify_qp to ERR of " + qp_name(q)) : 0;
}

int inject_event(CqShadow& c, std::string& why);

/// Kept posts go to the path, in order; then the application may post again.
int let_go(QpShadow& q, std::string& why) {
  auto guard = lock_between_sessions(q);
  q.replayed_sends = q.replayed_receives = 0;
  int err = post_receives(q, q.real, q.kept_receives, why);
  if (q.cut && !q.cut->errors.empty()) {
    {
      std::lock_guard cq_guard(q.send_cq->lock);
      for (const OwedCompletion& owed : q.cut->errors) q.send_cq->fake.push_back(owed.wc);
    }
    if (q.send_cq->armed && q.send_cq->app.channel)
      if (const int silent = inject_event(*q.send_cq, why); silent && !err) err = silent;
  }
  if (q.gone)
    if (const int broken = break_connection(q, why); broken && !err) err = broken;
  q.replayed_receives = static_cast<std::uint32_t>(q.kept_receives.size());
  q.kept_receives.clear();
  std::vector<const KeptSend*> sends;
  for (const KeptSend& send : q.kept_sends) sends.push_back(&send);
  for (std::span<const KeptSend* const> left(sends); !left.empty();) {
    std::size_t posted = 0;
    const bool failed = path::post_sends(q, left, posted) != 0;
    q.replayed_sends += static_cast<std::uint32_t>(posted);
    if (failed) flush_to_fake(q, *left[posted++]);
    left = left.subspan(posted);
  }
  q.kept_sends.clear();
  q.logged_receives.clear();
  q.outstanding.clear();
  q.old_path_closed = q.broken = false;
  q.cut.reset();
  q.phase = Phase::kRunning;
  clear_bits(q, kKeepSends | kKeepReceives | kLogReceives | kOpen);
  q.resumed_ns = now_ns();
  return err;
}

/// SRQs go without their lock again when no QP of the process is suspended any more.
void release_srqs() {
  Registry& registry = Registry::get();
  for (const QpShadow* q : registry.qps)
    if (q->phase != Phase::kRunning) return;
  for (SrqShadow* s : registry.srqs) {
    std::lock_guard guard(s->lock);
    set_srq_bits(*s, 0, kSuspendedSrq);
  }
}

/// CQs of which no QP is suspended any more leave the fake CQ as soon as it is empty.
void release_cqs() {
  Registry& registry = Registry::get();
  for (CqShadow* c : registry.cqs) {
    const bool held = std::any_of(registry.qps.begin(), registry.qps.end(), [&](const QpShadow* q) {
      return q->phase != Phase::kRunning && (q->send_cq == c || q->recv_cq == c);
    });
    if (!held) set_cq_bits(*c, 0, kSuspendedCq);
  }
}

/// Nothing comes any more on CQs of which every QP has been drained.
void rest_cqs() {
  Registry& registry = Registry::get();
  std::unordered_set<const CqShadow*> at_work;
  for (const QpShadow* q : registry.qps)
    if (q->phase == Phase::kRunning || q->phase == Phase::kSuspended) at_work.insert({q->send_cq, q->recv_cq});
  for (CqShadow* c : registry.cqs)
    if (c->state.load(std::memory_order_relaxed) & kSuspendedCq && !at_work.contains(c)) set_cq_bits(*c, kRestingCq);
}

void destroy_real(ibv_qp*& qp) {
  if (qp) real().destroy_qp(qp);
  qp = nullptr;
}

void become_path(QpShadow& q, ibv_qp* qp) {
  q.real = qp;
  q.receive_ring = q.send_ring = {};
  if (!q.real_ex) return;
  q.real_ex = real().qp_to_qp_ex(qp);
  if (!kept_session(q)) q.target = q.real_ex;
}

/* ---- completion events --------------------------------------------------------- */

bool readable(int fd) {
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
}

QpShadow* any_qp_on(const CqShadow& c) {
  for (QpShadow* q : Registry::get().qps)
    if (q->send_cq == &c || q->recv_cq == &c) return q;
  return nullptr;
}

/// Makes the device add a completion of ours to `c`, so that its armed channel becomes readable: a receive on a QP of
/// our own is flushed. The completion is filtered like a drain marker.
int inject_event(CqShadow& c, std::string& why) {
  QpShadow* q = any_qp_on(c);
  if (!q) return 0;  // nobody can complete anything on it either
  ibv_qp_attr attr{};
  ibv_qp_init_attr queried{};
  int err = real().query_qp(q->real, &attr, IBV_QP_PORT | IBV_QP_PKEY_INDEX, &queried);
  if (err) return fail(why, err, "query_qp of " + qp_name(*q));
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = c.real;
  init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  ibv_qp* helper = real().create_qp(q->real->pd, &init);
  if (!helper) return fail(why, errno, "create_qp for a completion event");
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_INIT;
  to.port_num = attr.port_num;
  to.pkey_index = attr.pkey_index;
  err = real().modify_qp(helper, &to, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS);
  ibv_recv_wr wr{.wr_id = marker::next(), .next = nullptr, .sg_list = nullptr, .num_sge = 0};
  ibv_recv_wr* bad;
  if (!err) err = q->real_post_recv(helper, &wr, &bad);
  to.qp_state = IBV_QPS_ERR;
  if (!err) {
    {
      std::lock_guard guard(c.lock);
      ++c.markers;
    }
    err = real().modify_qp(helper, &to, IBV_QP_STATE);
  }
  const std::uint64_t deadline = now_ns() + kEventLimitMs * 1'000'000ull;
  while (!err) {
    {
      std::lock_guard guard(c.lock);
      path::poll_to_fake(c);
      const auto seen = std::find_if(c.seen_markers.begin(), c.seen_markers.end(),
                                     [&](const ibv_wc& wc) { return wc.wr_id == wr.wr_id; });
      if (seen != c.seen_markers.end()) {
        c.seen_markers.erase(seen);
        break;
      }
    }
    if (now_ns() > deadline) err = ETIMEDOUT;
    pause_briefly();
  }
  destroy_real(helper);
  return err ? fail(why, err, "cannot make a completion event") : 0;
}

/* ---- memory --------------------------------------------------------------------- */

/// A NIC's write does not set soft-dirty: an atomic OR with zero does, and changes nothing. A test leaves it out.
void touch_pages(const MrShadow& mr) {
  static const bool left_out = getenv("MIGR_TEST_NO_TOUCH") != nullptr;
  if (left_out) return;
  constexpr int kWritable = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if (!(mr.access & kWritable)) return;
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(mr.app.addr);
  for (std::uintptr_t a = start; a < start + mr.app.length; a = (a / page + 1) * page)
    __atomic_fetch_or(reinterpret_cast<std::uint8_t*>(a), 0, __ATOMIC_RELAXED);
}

int register_again(MrShadow& mr, std::string& why) {
  ibv_mr& now = *mr.real;
  const auto reg = [&](int access) {
    return provider::raw_reg_mr(mr.context->real, now.pd->handle, mr.app.addr, mr.app.length, mr.iova, access, now.handle, now.lkey, now.rkey);
  };
  int err = reg(mr.access);
  // Flags like relaxed ordering are wishes: libibverbs leaves out what a device does not know.
  if (err && (mr.access & IBV_ACCESS_OPTIONAL_RANGE)) err = reg(mr.access & ~IBV_ACCESS_OPTIONAL_RANGE);
  if (err) return fail(why, err, "reg_mr of " + std::to_string(mr.app.length) + " bytes");
  mr.context->renamed |= now.lkey != mr.app.lkey || now.rkey != mr.app.rkey;
  const int bound = mr.context->kernel->bind_mr(now.handle, mr.app.lkey, mr.app.rkey, now.lkey, now.rkey);
  return bound ? fail(why, bound, "cannot bind virtual lkey " + std::to_string(mr.app.lkey)) : 0;
}

}  // namespace

migr_proc_state process_state() {
  const Registry& registry = Registry::get();
  if (registry.frozen) return MIGR_PROC_FROZEN;
  for (const QpShadow* q : registry.qps)
    if (q->phase != Phase::kRunning) return MIGR_PROC_SUSPENDED;
  return MIGR_PROC_RUNNING;
}

void make_keys_virtual(const Context& context, std::vector<KeptReceive>& receives) {
  const VirtualLkeys keys;
  for (KeptReceive& receive : receives) keys.translate(context, receive.sges);
}

int suspend(Qps qps, std::string& why) {
  if (const int err = check_arcs(qps, Phase::kSuspended, why)) return err;
  for (QpShadow* q : qps) {
    if (const int err = set_write_access(*q, true, why)) {
      std::string ignored;
      for (QpShadow* undo : qps) set_write_access(*undo, false, ignored);
      return err;
    }
  }
  for (QpShadow* q : qps) {
    for_cqs(*q, [](CqShadow& c) { set_cq_bits(c, kFakeCq | kSuspendedCq); });
    std::lock_guard guard(q->lock);
    q->phase = Phase::kSuspended;
    q->suspended_ns = now_ns();
    set_bits(*q, kKeepSends | kOpen);
  }
  for (SrqShadow* s : Registry::get().srqs) {
    std::lock_guard guard(s->lock);
    set_srq_bits(*s, kSuspendedSrq);
  }
  return 0;
}

namespace {

/// One QP's way through drain().
struct Draining {
  QpShadow* qp;
  bool session_over = false;
  bool posted = false;
  bool done = false;
  std::uint64_t wr_id = 0;
  std::uint64_t empty_since = 0;  ///< UD
};

bool sessions_over(const QpShadow& q) {
  bool over = !q.path_session.load(std::memory_order_relaxed);
  for_cqs(q, [&](const CqShadow& c) { over = over && !c.ex_session.load(std::memory_order_relaxed); });
  return over;
}

/// @return 0 posted; ENOMEM the queue is full for the moment; else it cannot be
int post_marker(Draining& d) {
  QpShadow& q = *d.qp;
  std::lock_guard guard(q.lock);
  ibv_send_wr wr{};
  wr.wr_id = marker::next();
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad;
  std::lock_guard cq_guard(q.send_cq->lock);
  if (const int err = q.real_post_send(q.real, &wr, &bad)) return err;
  ++q.send_cq->markers;
  d.wr_id = wr.wr_id;
  d.posted = true;
  return 0;
}

/// What the CQs have told.
struct Seen {
  std::unordered_map<std::uint64_t, ibv_wc_status> markers;  ///< of every round, by wr_id
  std::unordered_set<std::uint32_t> senders;                 ///< vQPNs whose sends completed in the last round
};

/// Completions go to the fake CQs, but those of markers to `out`. A CQ is polled once however many QPs are on it.
void poll_cqs(const std::vector<Draining>& all, Seen& out) {
  out.senders.clear();
  std::unordered_set<CqShadow*> cqs;
  for (const Draining& d : all)
    if (d.session_over) for_cqs(*d.qp, [&](CqShadow& c) { cqs.insert(&c); });
  for (CqShadow* c : cqs) {
    std::lock_guard guard(c->lock);
    const int moved = path::poll_to_fake(*c);
    for (auto wc = c->fake.end() - moved; wc != c->fake.end(); ++wc)
      if (wc->status != IBV_WC_SUCCESS || !(wc->opcode & IBV_WC_RECV)) out.senders.insert(wc->qp_num);
    for (const ibv_wc& wc : c->seen_markers) out.markers[wc.wr_id] = wc.status;
    c->seen_markers.clear();
  }
}

/// @return 0, or EIO when the marker completed with an error
int look_for_marker(Draining& d, const Seen& seen, std::string& why) {
  const auto found = seen.markers.find(d.wr_id);
  if (found == seen.markers.end()) return 0;
  if (found->second == IBV_WC_WR_FLUSH_ERR) {  // it broke before us: so it is to be found on the other host
    d.qp->broken = d.done = true;
    return 0;
  }
  if (found->second != IBV_WC_SUCCESS) {
    why = qp_name(*d.qp) + " cannot be drained: its connection is broken (completion status " +
          std::to_string(found->second) + ")";
    return EIO;
  }
  d.done = true;
  return 0;
}

/// A datagram is done when it has left. Its completion comes a moment after the queue is empty.
int look_at_queue(Draining& d, const Seen& seen, std::string& why) {
  unsigned left = 0;
  if (const int err = provider::sends_in_queue(*d.qp, left))
    return fail(why, err, "cannot look at the send queue of " + qp_name(*d.qp));
  if (left || seen.senders.contains(d.qp->vqpn()) || !d.empty_since) d.empty_since = left ? 0 : now_ns();
  d.done = d.empty_since && now_ns() - d.empty_since > kFlushQuietMs * 1'000'000ull;
  return 0;
}

int advance(Draining& d, const Seen& seen, std::string& why) {
  QpShadow& q = *d.qp;
  if (!d.session_over) {
    if (!sessions_over(q)) return 0;
    d.session_over = true;
    clear_bits(q, kOpen);
  }
  if (q.app.qp_type == IBV_QPT_UD && connected(q)) return look_at_queue(d, seen, why);
  if (!connected(q) || q.responder_only) {
    d.done = true;  // nothing was ever sent, or everything is being flushed
    return 0;
  }
  if (!d.posted) {
    const int err = post_marker(d);
    if (err && err != ENOMEM) return fail(why, err, "cannot post the drain marker of " + qp_name(q));
    return 0;
  }
  return look_for_marker(d, seen, why);
}

}  // namespace

int drain(Qps qps, unsigned limit_ms, std::vector<migr_drain_stat>& stats, std::string& why) {
  Registry& registry = Registry::get();
  std::vector<Draining> all;
  {
    std::lock_guard guard(registry.lock);
    if (const int err = check_arcs(qps, Phase::kDrained, why)) return err;
    for (QpShadow* q : qps) all.push_back({.qp = q});
  }
  const std::uint64_t deadline = now_ns() + limit_ms * 1'000'000ull;
  std::uint64_t changes = 0;
  Seen seen;
  int result = 0;
  for (;;) {
    bool all_done = true;
    {
      std::lock_guard guard(registry.lock);
      if (changes != registry.changes) {  // destroyed by the application meanwhile
        const std::unordered_set<const QpShadow*> live(registry.qps.begin(), registry.qps.end());
        std::erase_if(all, [&](const Draining& d) { return !live.contains(d.qp); });
        changes = registry.changes;
      }
      poll_cqs(all, seen);
      for (Draining& d : all) {
        if (!d.done && !result) result = advance(d, seen, why);
        all_done = all_done && d.done;
      }
    }
    if (all_done || result) break;
    if (now_ns() > deadline) {
      result = ETIMEDOUT;
      break;
    }
    pause_briefly();
  }
  std::lock_guard guard(registry.lock);
  poll_cqs(all, seen);  // what came with the last marker
  unsigned left = 0;
  for (const Draining& d : all) {
    QpShadow& q = *d.qp;
    if (!result || (result == ETIMEDOUT && d.done)) {
      q.phase = Phase::kDrained;
      q.last_cqe_ns = 0;
      for_cqs(q, [&](const CqShadow& c) { q.last_cqe_ns = std::max(q.last_cqe_ns, c.last_cqe_ns); });
    }
    if (result && !d.done) {
      if (!left++ && why.empty())
        why = qp_name(q) + (d.session_over ? " still has work requests in flight" : " has an open ibv_wr_* session");
      stats.push_back({.ctx_id = q.context->ctx_id(), .vqpn = q.vqpn(), .sq_in_flight = 1, .rq_outstanding = 0,
                       .kept = static_cast<std::uint32_t>(q.kept_sends.size()), .fake_cqes = 0});
    }
  }
  if (!result) rest_cqs();
  if (result == ETIMEDOUT)
    why += "; " + std::to_string(left) + " of " + std::to_string(all.size()) + " QPs left after " +
           std::to_string(limit_ms) + " ms";
  return result;
}

/* ---- a drain that does not end ----------------------------------------------------- */

namespace {

constexpr int kConnectionAttrs = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_AV |
                                 IBV_QP_PATH_MTU | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kPsns = IBV_QP_RQ_PSN | IBV_QP_SQ_PSN;

std::uint32_t bytes_of(ibv_mtu mtu) { return 128u << mtu; }

bool ours(const QueuedSend& s) { return marker::is_marker(s.send.wr.wr_id); }

bool replayable(ibv_wr_opcode opcode) { return opcode <= IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_SEND_WITH_INV; }

/// @return "" or what stands against it
std::string why_no_cut(QpShadow& q) {
  if (q.state.load(std::memory_order_relaxed) & kOpen) return " has an open ibv_wr_* session";
  if (q.app.qp_type != IBV_QPT_RC || (!connected(q) && q.real->state != IBV_QPS_RTR)) return " is not a connected RC QP";
  if (q.app.srq) return " uses an SRQ: which receive a message came into in part could not be told";
  if (!windows::belonging_to(q).empty()) return " has memory windows of type 2";
  provider::QueuePart sends, receives;
  std::vector<QueuedSend> queued;
  int err = provider::queue_parts(q, sends, receives);
  if (!err) err = provider::sends_in(q, sends, queued);
  if (err) return std::string("'s send queue cannot be read: ") + std::strerror(err);
  for (const QueuedSend& s : queued)
    if (!replayable(s.send.wr.opcode)) return " has a work request in flight that cannot be replayed, of opcode " + std::to_string(s.send.wr.opcode);
  std::string small;
  for_cqs(q, [&](const CqShadow& c) {
    const std::uint32_t need = (q.send_cq == &c ? sends.size() : 0) + (q.recv_cq == &c ? receives.size() : 0);
    if (static_cast<int>(need) > c.real->cqe)
      small = "'s completion queue is too small to tell what was not used (" + std::to_string(c.real->cqe) + " of " + std::to_string(need) + ")";
  });
  return small;
}

/// What is flushed from q meanwhile is counted and not the application's business.
class Flushing {
 public:
  explicit Flushing(QpShadow& q) : q_(q) {
    for_cqs(q_, [&](CqShadow& c) {
      std::lock_guard guard(c.lock);
      c.cutting.push_back(q_.cut.get());
      path::poll_to_fake(c);
    });
    q_.cut->received = 0;
  }
  ~Flushing() {
    for_cqs(q_, [&](CqShadow& c) {
      std::lock_guard guard(c.lock);
      std::erase(c.cutting, q_.cut.get());
    });
  }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;
  void poll() {
    for_cqs(q_, [](CqShadow& c) {
      std::lock_guard guard(c.lock);
      path::poll_to_fake(c);
    });
  }

 private:
  QpShadow& q_;
};

int wait_until_empty(QpShadow& q, Flushing& flushing, std::string& why) {
  const std::uint64_t deadline = now_ns() + kEventLimitMs * 1'000'000ull;
  for (;;) {
    flushing.poll();
    provider::QueuePart sends, receives;
    if (const int err = provider::queue_parts(q, sends, receives)) return fail(why, err, "cannot look at the queues of " + qp_name(q));
    if (!sends.size() && !receives.size()) return 0;
    if (now_ns() > deadline) return fail(why, ETIMEDOUT, "the queues of " + qp_name(q) + " were not flushed");
    pause_briefly();
  }
}

/// ERR flushes both queues: how many come back tells what was not used. RESET waits for the end of whatever the device
/// does for the QP; then no PSN changes any more. Caller holds q.lock.
int stop_path(QpShadow& q, provider::QueuePart& sends, provider::QueuePart& receives, std::string& why) {
  Cut& cut = *q.cut;
  Flushing flushing(q);
  if (const int err = provider::queue_parts(q, sends, receives)) return fail(why, err, "cannot look at the queues of " + qp_name(q));
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  if (const int err = real().modify_qp(q.real, &to, IBV_QP_STATE)) return fail(why, err, "modify_qp to ERR of " + qp_name(q));
  if (const int err = wait_until_empty(q, flushing, why)) return err;
  int err = provider::sends_in(q, sends, cut.sends);
  if (!err) err = provider::receives_in(q, receives, cut.receives);
  if (err) return fail(why, err, "cannot read the queues of " + qp_name(q));
  to.qp_state = IBV_QPS_RESET;
  err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  q.real->state = cut.attr.qp_state;  // what it is for everybody else
  if (err) return fail(why, err, "modify_qp to RESET of " + qp_name(q));
  flushing.poll();
  ibv_qp_attr now{};
  ibv_qp_init_attr init{};
  err = real().query_qp(q.real, &now, kPsns, &init);
  q.real->state = cut.attr.qp_state;
  if (err) return fail(why, err, "query_qp of " + qp_name(q));
  cut.psn = now.rq_psn & kPsnMask;
  cut.next_psn = now.sq_psn & kPsnMask;
  return 0;
}

void name_keys(QpShadow& q, const VirtualLkeys& keys, ibv_send_wr& wr, std::vector<ibv_sge>& sges) {
  keys.translate(*q.context, sges);
  if (!q.remote_keys) return;
  if (wr.opcode == IBV_WR_SEND_WITH_INV) wr.invalidate_rkey = q.remote_keys->name_of(wr.invalidate_rkey);
  else if (wr.opcode >= IBV_WR_ATOMIC_CMP_AND_SWP) wr.wr.atomic.rkey = q.remote_keys->name_of(wr.wr.atomic.rkey);
  else wr.wr.rdma.rkey = q.remote_keys->name_of(wr.wr.rdma.rkey);
}

/// The QP's part of cut().
int cut_one(QpShadow& q, const VirtualLkeys& keys, std::string& why) {
  std::lock_guard guard(q.lock);
  auto cut = std::make_unique<Cut>();
  ibv_qp_init_attr init{};
  if (const int err = real().query_qp(q.real, &cut->attr, kConnectionAttrs | IBV_QP_DEST_QPN | kPsns, &init))
    return fail(why, err, "query_qp of " + qp_name(q));
  cut->attr.qp_state = q.real->state;
  cut->pqpn = q.pqpn();
  cut->psn = cut->attr.rq_psn & kPsnMask;
  cut->send_cq = q.send_cq;
  q.cut = std::move(cut);
  if (q.broken) return 0;  // everything has completed
  set_bits(q, kKeepReceives);
  provider::QueuePart sends, receives;
  if (const int err = stop_path(q, sends, receives, why)) return err;
  const auto markers = static_cast<std::size_t>(std::count_if(q.cut->sends.begin(), q.cut->sends.end(), ours));
  const replay::Unused left = replay::unused(*q.cut, q.cut->sends.size() - markers, q.cut->receives.size(), q.send_cq != q.recv_cq);
  auto& s = q.cut->sends;
  auto& r = q.cut->receives;
  s.erase(s.begin(), s.end() - static_cast<std::ptrdiff_t>(left.sends + markers));
  r.erase(r.begin(), r.end() - static_cast<std::ptrdiff_t>(left.receives));
  for (QueuedSend& x : s) name_keys(q, keys, x.send.wr, x.send.sges);
  for (KeptReceive& x : r) keys.translate(*q.context, x.sges);
  return 0;
}

}  // namespace

int check_cut(Qps qps, std::string& why) {
  for (QpShadow* q : qps) {
    if (q->phase != Phase::kSuspended && q->phase != Phase::kDrained) {
      why = qp_name(*q) + " is " + name(q->phase) + " and cannot be cut";
      return EBUSY;
    }
    if (q->broken) continue;
    if (const std::string no = why_no_cut(*q); !no.empty()) {
      why = qp_name(*q) + no;
      return EOPNOTSUPP;
    }
  }
  return 0;
}

int cut(Qps qps, std::vector<migr_qp_psn>& out, std::string& why) {
  if (const int err = check_cut(qps, why)) return err;
  const VirtualLkeys keys;
  for (QpShadow* q : qps) {
    if (const int err = cut_one(*q, keys, why)) return err;  // rollback() goes back from where it is
    out.push_back({.ctx_id = q->context->ctx_id(), .vqpn = q->vqpn(), .psn = q->cut->psn, .reserved = 0});
  }
  return 0;
}

namespace {

/// @param peer_psn none: it will never be known. Then whatever was on its way may have been executed or not.
/// Caller holds q.lock.
void settle_one(QpShadow& q, std::optional<std::uint32_t> peer_psn, std::vector<migr_replay_stat>& out) {
  Cut& cut = *q.cut;
  std::vector<QueuedSend> sends = std::move(cut.sends);
  std::vector<replay::Fate> fates(sends.size(), replay::Fate::kLost);
  if (peer_psn) fates = replay::fates(sends, bytes_of(cut.attr.path_mtu), cut.next_psn, *peer_psn);
  while (!sends.empty() && ours(sends.back())) {  // they are at the end
    sends.pop_back();
    fates.pop_back();
  }
  replay::Plan plan = replay::plan(std::move(sends), fates, q.vqpn(), q.init.sq_sig_all);
  cut.settled = true;
  cut.peer_psn = peer_psn.value_or(0);
  cut.lost = plan.lost || !peer_psn;
  q.gone = q.gone || (cut.lost && !q.broken);
  CqShadow& c = *q.send_cq;
  std::lock_guard cq_guard(c.lock);
  for (const OwedCompletion& owed : plan.completions) {
    if (owed.wc.status != IBV_WC_SUCCESS) cut.errors.push_back(owed);  // who sees one may end, in the middle of the move
    else if (owed.signalled) c.fake.push_back(owed.wc);
  }
  for (std::size_t i = 0; i < plan.stand_ins.size(); ++i) {
    plan.stand_ins[i].wr_id = plan.replays[plan.at[i]].wr.wr_id = marker::next();
    c.stand_ins.push_back(std::move(plan.stand_ins[i]));
    ++c.markers;
  }
  out.push_back({.ctx_id = q.context->ctx_id(), .vqpn = q.vqpn(),
                 .replayed = static_cast<std::uint32_t>(plan.replays.size()), .executed = static_cast<std::uint32_t>(plan.done),
                 .lost = static_cast<std::uint32_t>(plan.lost), .reserved = 0});
  q.kept_sends.insert(q.kept_sends.begin(), std::make_move_iterator(plan.replays.begin()), std::make_move_iterator(plan.replays.end()));
}

}  // namespace

int settle(Qps qps, std::span<const migr_qp_psn> psns, std::vector<migr_replay_stat>& out, std::string& why) {
  for (QpShadow* q : qps)
    if (!q->cut || q->cut->settled) {
      why = qp_name(*q) + (q->cut ? " is settled already" : " was not cut");
      return EBUSY;
    }
  for (std::size_t i = 0; i < qps.size(); ++i) {
    QpShadow& q = *qps[i];
    {
      std::lock_guard guard(q.lock);
      settle_one(q, psns[i].psn & kPsnMask, out);
      q.phase = Phase::kDrained;
    }
    // Completions that no device has told of.
    const bool wake = q.send_cq->armed && q.send_cq->app.channel && out.back().executed;
    if (wake)
      if (const int err = inject_event(*q.send_cq, why)) return err;
  }
  return 0;
}

namespace {

int freeze_srq(SrqShadow& s, const VirtualLkeys& keys, std::string& why) {
  std::lock_guard guard(s.lock);
  if (!(s.state.load(std::memory_order_relaxed) & kSuspendedSrq)) {
    why = "a shared receive queue was made after the suspension";  // nobody has looked whether a thread posts to it
    return EBUSY;
  }
  set_srq_bits(s, kFrozenSrq);
  ibv_srq_attr attr{};
  if (const int err = real().query_srq(s.real, &attr)) return fail(why, err, "query_srq");
  // A limit that was reached and whose event nobody has read: the next receive that is used shall tell again.
  s.limit = attr.srq_limit ? attr.srq_limit : s.armed ? s.max_wr : 0;
  return read_back_receives(s, keys, why);
}

/// Keys have their new values.
int thaw_srq(SrqShadow& s, std::string& why) {
  std::lock_guard guard(s.lock);
  set_srq_bits(s, kTranslateSrq);
  if (const int err = post_receives(s, s.outstanding, why)) return err;
  if (const int err = post_receives(s, s.kept, why)) return err;
  s.outstanding.clear();
  s.kept.clear();
  if (s.limit) {
    ibv_srq_attr attr{};
    attr.srq_limit = s.limit;
    if (const int err = real().modify_srq(s.real, &attr, IBV_SRQ_LIMIT)) return fail(why, err, "modify_srq");
  }
  set_srq_bits(s, 0, kFrozenSrq);
  return 0;
}

int unfreeze_srq(SrqShadow& s, std::string& why) {
  std::lock_guard guard(s.lock);
  const int err = post_receives(s, s.kept, why);
  s.outstanding.clear();
  s.kept.clear();
  set_srq_bits(s, 0, kFrozenSrq);
  return err;
}

}  // namespace

int freeze(std::string& why) {
  Registry& registry = Registry::get();
  for (const MrShadow* mr : registry.mrs)
    if (!mr->movable) {
      why = "an MR of " + std::to_string(mr->app.length) + " bytes cannot be registered again elsewhere";
      return EOPNOTSUPP;
    }
  if (const int err = check_arcs(registry.qps, Phase::kFrozen, why)) return err;
  for (CqShadow* c : registry.cqs) {
    std::lock_guard guard(c->lock);
    path::poll_to_fake(*c);
    c->event_pending = c->armed && c->app.channel && readable(c->app.channel->fd);
    c->state.fetch_or(kFakeCq | kFrozenCq, std::memory_order_relaxed);
  }
  int err = 0;
  (void)provider::locate_queues(registry.qps);
  const VirtualLkeys keys;
  for (SrqShadow* s : registry.srqs)
    if (!err) err = freeze_srq(*s, keys, why);
  for (QpShadow* q : registry.qps) {
    std::lock_guard guard(q->lock);
    set_bits(*q, kKeepReceives);
    q->phase = Phase::kFrozen;
    if (!err) err = read_back_receives(*q, keys, q->outstanding, why);
  }
  if (err) {
    std::string ignored;
    rollback(ignored);
    return err;
  }
  for (const MrShadow* mr : registry.mrs) touch_pages(*mr);
  datagrams::note_sources();
  for (Context* context : registry.contexts) context->kernel->detach();
  registry.frozen = true;
  return 0;
}

/* ---- partner ----------------------------------------------------------------------- */

namespace {

/// The path's attributes with the access flags that the application gave.
int query_path(QpShadow& q, ibv_qp_attr& attr, std::string& why) {
  ibv_qp_init_attr init{};
  if (q.cut) attr = q.cut->attr;
  else if (const int err = real().query_qp(q.real, &attr, kConnectionAttrs, &init))
    return fail(why, err, "query_qp of " + qp_name(q));
  if (q.write_access_added) attr.qp_access_flags &= ~static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE);
  return 0;
}

int create_spare(QpShadow& q, std::string& why) {
  ibv_qp_init_attr_ex init = q.init;
  init.qp_context = &q;
  init.send_cq = q.send_cq ? q.send_cq->real : nullptr;
  init.recv_cq = q.recv_cq ? q.recv_cq->real : nullptr;
  init.srq = init.srq ? shadow_of(init.srq).real : nullptr;
  if (q.init_is_ex) {
    q.spare = q.context->slots.create_qp_ex(q.context->real, &init);
  } else {
    ibv_qp_init_attr plain;
    std::memcpy(&plain, &init, sizeof plain);
    q.spare = real().create_qp(q.init.pd, &plain);
  }
  if (!q.spare) return fail(why, errno, "create_qp for " + qp_name(q));
  ibv_qp_attr attr{};
  if (const int err = query_path(q, attr, why)) return err;
  attr.qp_state = IBV_QPS_INIT;
  if (const int err = real().modify_qp(q.spare, &attr, kInitMask))
    return fail(why, err, "modify_qp to INIT for " + qp_name(q));
  std::uint32_t psn = 0;
  if (getrandom(&psn, sizeof psn, 0) != sizeof psn) psn = static_cast<std::uint32_t>(now_ns());
  q.spare_psn = psn & kPsnMask;
  return 0;
}

}  // namespace

int create_spares(Qps qps, std::vector<migr_qp_spare>& out, std::string& why) {
  for (QpShadow* q : qps) {
    if (q->app.qp_type != IBV_QPT_RC && q->app.qp_type != IBV_QPT_UC) {
      why = qp_name(*q) + " is not connected: neither RC nor UC";
      return EOPNOTSUPP;
    }
    // Suspended or drained already: a migration that makes nothing ahead of the stop.
    if (q->phase == Phase::kFrozen || q->phase == Phase::kSwitched || q->phase == Phase::kRebound || q->spare) {
      why = qp_name(*q) + " is in another switchover";
      return EBUSY;
    }
  }
  (void)provider::locate_queues(qps);  // for SWITCH, which says what fails
  for (QpShadow* q : qps) {
    if (const int err = create_spare(*q, why)) {
      for (QpShadow* undo : qps) destroy_real(undo->spare);
      out.clear();
      return err;
    }
    out.push_back({.ctx_id = q->context->ctx_id(), .vqpn = q->vqpn(), .pqpn = q->spare->qp_num, .psn = q->spare_psn});
  }
  return 0;
}

int connect_spare(QpShadow& q, const migr_qp_connect& to, std::string& why) {
  if (!q.spare) {
    why = qp_name(q) + " has no spare";
    return ENOENT;
  }
  ibv_qp_attr attr{};
  if (const int err = query_path(q, attr, why)) return err;
  attr.qp_state = IBV_QPS_RTR;
  attr.dest_qp_num = to.dest_qpn;
  attr.rq_psn = to.dest_psn & kPsnMask;
  std::memcpy(attr.ah_attr.grh.dgid.raw, to.dgid, sizeof to.dgid);
  std::memcpy(q.spare_peer.data(), to.peer, sizeof to.peer);
  int err = to_rtr(q, q.spare, attr);
  if (err) return fail(why, err, "modify_qp to RTR for " + qp_name(q));
  if (q.app_state() == IBV_QPS_RTR) return 0;
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = q.spare_psn;
  err = real().modify_qp(q.spare, &attr, rts_mask(q));
  return err ? fail(why, err, "modify_qp to RTS for " + qp_name(q)) : 0;
}

namespace {

/// Waits until every receive of `q`, which is in ERR, has completed. Caller holds c.lock. @param last the wr_id of a
/// receive of ours behind all others, or 0: it had no room
int wait_until_flushed(QpShadow& q, CqShadow& c, std::uint64_t last, std::string& why) {
  const std::uint64_t deadline = now_ns() + kEventLimitMs * 1'000'000ull;
  std::uint64_t quiet_since = 0;
  for (;;) {
    const bool moved = path::poll_to_fake(c) > 0;
    const auto seen = std::find_if(c.seen_markers.begin(), c.seen_markers.end(),
                                   [&](const ibv_wc& wc) { return wc.wr_id == last; });
    if (last && seen != c.seen_markers.end()) {
      c.seen_markers.erase(seen);
      return 0;
    }
    if (!last) {  // the queue empties a moment before the last completion comes
      std::vector<KeptReceive> left;
      if (const int err = provider::outstanding_receives(q, left))
        return fail(why, err, "cannot look at the receive queue of " + qp_name(q));
      if (moved || !left.empty()) quiet_since = 0;
      else if (!quiet_since) quiet_since = now_ns();
      else if (now_ns() - quiet_since > kFlushQuietMs * 1'000'000ull) return 0;
    }
    if (now_ns() > deadline) return fail(why, ETIMEDOUT, "the receives of " + qp_name(q) + " were not flushed");
    pause_briefly();
  }
}

/// UC: nobody waits for an answer, so a message may be under way still. The old path is closed (ERR), and which
/// receives were not used is told by their flushing, exactly: none is used twice, nothing old comes after something new.
/// @param receives those that are left. Caller holds q.lock
int close_old_path(QpShadow& q, std::vector<KeptReceive>& receives, std::string& why) {
  ibv_qp_init_attr init{};
  if (const int err = real().query_qp(q.real, &q.old_attr, kConnectionAttrs | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_SQ_PSN, &init))
    return fail(why, err, "query_qp of " + qp_name(q));
  CqShadow& c = *q.recv_cq;
  std::lock_guard cq_guard(c.lock);  // until what is flushed is out of the application's way
  ibv_recv_wr wr{.wr_id = marker::next(), .next = nullptr, .sg_list = nullptr, .num_sge = 0};
  ibv_recv_wr* bad;
  const bool marked = !q.app.srq && q.real_post_recv(q.real, &wr, &bad) == 0;
  if (marked) ++c.markers;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  if (const int err = real().modify_qp(q.real, &to, IBV_QP_STATE))
    return fail(why, err, "modify_qp to ERR of " + qp_name(q));
  q.old_path_closed = true;
  q.outstanding = receives;
  if (const int err = wait_until_flushed(q, c, marked ? wr.wr_id : 0, why)) return err;
  if (q.app.srq) {
    // What it has not used is the SRQ's, but for the receive of a message that came in part. It completes as it would
    // have done with the next message.
    for (ibv_wc& wc : c.fake)
      if (wc.qp_num == q.vqpn() && wc.status == IBV_WC_WR_FLUSH_ERR) wc.status = IBV_WC_REM_INV_REQ_ERR;
    return 0;
  }
  const std::size_t flushed = std::erase_if(c.fake, [&](const ibv_wc& wc) {
    return wc.qp_num == q.vqpn() && wc.status == IBV_WC_WR_FLUSH_ERR;
  });
  if (flushed < receives.size()) receives.erase(receives.begin(), receives.end() - static_cast<std::ptrdiff_t>(flushed));
  q.outstanding = receives;
  return 0;
}

/// The way back from close_old_path(). Its PSNs go on: a UC responder begins with any message.
int open_old_path(QpShadow& q, std::string& why) {
  ibv_qp_attr to = q.old_attr;
  to.qp_state = IBV_QPS_RESET;
  int err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  to.qp_state = IBV_QPS_INIT;
  if (!err) err = real().modify_qp(q.real, &to, kInitMask);
  to.qp_state = IBV_QPS_RTR;
  if (!err) err = real().modify_qp(q.real, &to, rtr_mask(q));
  to.qp_state = IBV_QPS_RTS;
  if (!err) err = real().modify_qp(q.real, &to, rts_mask(q));
  if (err) return fail(why, err, "cannot connect the old path of " + qp_name(q) + " again");
  return post_receives(q, q.real, q.outstanding, why);
}

/// The way back from cut(), on the same QP. Both ends go on with PSNs that nothing old can have, and know them without
/// asking each other. Caller holds q.lock
int join_again(QpShadow& q, std::string& why) {
  constexpr std::uint32_t kFarAhead = 1u << 22;  // more than can be on the wire, less than half of all
  Cut& cut = *q.cut;
  if (!cut.settled) {  // how far the other end got is not known, and will not be: as when the cable stays broken
    std::vector<migr_replay_stat> ignored;
    settle_one(q, {}, ignored);
  }
  ibv_qp_attr to = cut.attr;
  to.qp_state = IBV_QPS_RESET;
  int err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  to.qp_state = IBV_QPS_INIT;
  if (!err) err = real().modify_qp(q.real, &to, kInitMask);
  if (!err) err = post_receives(q, q.real, cut.receives, why);
  if (cut.lost) {
    to.qp_state = IBV_QPS_ERR;
    if (!err) err = real().modify_qp(q.real, &to, IBV_QP_STATE);
    return err ? fail(why, err, "cannot close " + qp_name(q)) : 0;
  }
  to.qp_state = IBV_QPS_RTR;
  to.rq_psn = (cut.psn + kFarAhead) & kPsnMask;
  if (!err) err = to_rtr(q, q.real, to);
  to.qp_state = IBV_QPS_RTS;
  to.sq_psn = (cut.peer_psn + kFarAhead) & kPsnMask;
  if (!err && cut.attr.qp_state != IBV_QPS_RTR) err = real().modify_qp(q.real, &to, rts_mask(q));
  return err ? fail(why, err, "cannot connect the old path of " + qp_name(q) + " again") : 0;
}

/// A work request of ours that needs no partner, on one of q's paths. Returns when it is done.
int run_local(QpShadow& q, ibv_qp* on, ibv_send_wr& wr, std::string& why) {
  CqShadow& c = *q.send_cq;
  wr.wr_id = marker::next();
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.next = nullptr;
  {
    std::lock_guard guard(c.lock);
    ibv_send_wr* bad;
    if (const int err = q.real_post_send(on, &wr, &bad)) return fail(why, err, "post_send (memory window) on " + qp_name(q));
    ++c.markers;
  }
  for (const std::uint64_t deadline = now_ns() + kEventLimitMs * 1'000'000ull; now_ns() < deadline; pause_briefly()) {
    std::lock_guard guard(c.lock);
    path::poll_to_fake(c);
    const auto seen = std::find_if(c.seen_markers.begin(), c.seen_markers.end(),
                                   [&](const ibv_wc& wc) { return wc.wr_id == wr.wr_id; });
    if (seen == c.seen_markers.end()) continue;
    const ibv_wc_status status = seen->status;
    c.seen_markers.erase(seen);
    if (status == IBV_WC_SUCCESS) return 0;
    return fail(why, EIO, "a memory window of " + qp_name(q) + " (completion status " + std::to_string(status) + ")");
  }
  return fail(why, ETIMEDOUT, "a memory window of " + qp_name(q));
}

/// Windows of type 2 belong to one QP.
int move_windows(QpShadow& q, ibv_qp* from, ibv_qp* to, std::string& why) {
  if (q.broken) return 0;
  for (ibv_mw* mw : windows::belonging_to(q)) {
    windows::Operation op;
    windows::end_binding(mw, op);
    if (const int err = run_local(q, from, op.wr, why)) return err;
    if (!windows::bind_again(mw, op)) continue;
    if (const int err = run_local(q, to, op.wr, why)) return err;
  }
  return 0;
}

/// Caller holds q.lock.
int break_if_broken(QpShadow& q, std::string& why) {
  return q.broken ? break_connection(q, why) : 0;
}

/// Caller holds q.lock.
int switch_one(QpShadow& q, const VirtualLkeys& keys, std::string& why) {
  std::vector<KeptReceive> receives;
  if (const int err = read_back_receives(q, keys, receives, why)) return err;
  if (!reliable(q))
    if (const int err = close_old_path(q, receives, why)) return err;
  if (const int err = post_receives(q, q.spare, receives, why)) return err;
  if (const int err = q.context->kernel->bind_qp(q.vqpn(), q.spare->qp_num))
    return fail(why, err, "cannot bind " + qp_name(q));
  q.old_real = q.real;
  become_path(q, q.spare);
  q.spare = nullptr;
  q.peer = q.spare_peer;
  if (const int err = break_if_broken(q, why)) return err;
  set_bits(q, kLogReceives);
  q.phase = Phase::kSwitched;  // from here on rollback() knows the way back
  if (q.cut) return 0;  // it has none of type 2
  return move_windows(q, q.old_real, q.real, why);
}

/// The old path again; what was posted to the spare since goes there. Caller holds q.lock.
int switch_back(QpShadow& q, std::string& why) {
  q.spare = q.real;
  become_path(q, q.old_real);
  q.old_real = nullptr;
  const int bound = q.context->kernel->bind_qp(q.vqpn(), q.real->qp_num);
  int err = q.old_path_closed ? open_old_path(q, why) : 0;
  q.old_path_closed = false;
  q.outstanding.clear();
  if (!err) err = post_receives(q, q.real, q.logged_receives, why);
  if (!err && q.cut) err = join_again(q, why);
  else if (!err) err = move_windows(q, q.spare, q.real, why);
  return bound ? fail(why, bound, "cannot bind " + qp_name(q)) : err;
}

}  // namespace

int switch_to_spare(Qps qps, std::string& why) {
  if (const int err = check_arcs(qps, Phase::kSwitched, why)) return err;
  for (QpShadow* q : qps)
    if (!q->spare) {
      why = qp_name(*q) + " has no spare";
      return ENOENT;
    }
  const VirtualLkeys keys;
  for (QpShadow* q : qps) {
    for_cqs(*q, [](CqShadow& c) {
      std::lock_guard guard(c.lock);
      path::translate_qpns(c, kTranslateQpn);
    });
    std::lock_guard guard(q->lock);
    if (const int err = switch_one(*q, keys, why)) return err;  // rollback() undoes those that were switched
  }
  return 0;
}

int set_remote_keys(Qps qps, std::span<const migr_key_map> keys, std::string& why) {
  std::map<Peer, std::vector<std::pair<std::uint32_t, std::uint32_t>>> of_owner;
  for (const migr_key_map& key : keys) of_owner[std::to_array(key.owner)].emplace_back(key.vrkey, key.prkey);
  for (QpShadow* q : qps) {
    if (q->phase == Phase::kRunning) {
      why = qp_name(*q) + " is not suspended";
      return EBUSY;
    }
    const auto pairs = of_owner.find(q->peer);
    if (pairs == of_owner.end()) continue;  // its peer did not move, or has no key
    std::lock_guard guard(q->lock);
    const RemoteKeys* before = q->remote_keys;
    q->remote_keys = new RemoteKeys(pairs->second);
    delete before;
    path::translate_keys(*q, kTranslateRemote);
  }
  return 0;
}

/* ---- restored side ------------------------------------------------------------------- */

namespace {

template <class T, class Match>
T* find(const std::vector<T*>& all, Match&& match) {
  const auto it = std::find_if(all.begin(), all.end(), match);
  return it == all.end() ? nullptr : *it;
}

/// QPs of a context by virtual number.
using QpsByName = std::unordered_map<const Context*, std::unordered_map<std::uint32_t, QpShadow*>>;

int adopt_handle(Context& context, const migr_handle_map& map, const QpsByName& qps, std::string& why) {
  Registry& registry = Registry::get();
  const auto missing = [&](const char* kind) {
    why = std::string("no ") + kind + " with handle " + std::to_string(map.old_handle);
    return ENOENT;
  };
  switch (map.obj_type) {
    case MIGR_OBJ_PD: {
      ibv_pd* pd = find(registry.pds, [&](const ibv_pd* p) {
        return p->context == context.real && p->handle == map.old_handle;
      });
      if (!pd) return missing("PD");
      pd->handle = map.new_handle;
      return 0;
    }
    case MIGR_OBJ_CQ: {
      CqShadow* c = find(registry.cqs, [&](const CqShadow* q) {
        return q->context == &context && q->real->handle == map.old_handle;
      });
      if (!c) return missing("CQ");
      c->real->handle = map.new_handle;
      return 0;
    }
    case MIGR_OBJ_SRQ: {
      SrqShadow* s = find(registry.srqs, [&](const SrqShadow* q) {
        return q->context == &context && q->real->handle == map.old_handle;
      });
      if (!s) return missing("SRQ");
      s->real->handle = map.new_handle;
      s->ring_bytes = 0;  // the new one was made in its size
      return 0;
    }
    case MIGR_OBJ_QP: {
      const auto of = qps.find(&context);
      if (of == qps.end() || !of->second.contains(map.vqpn)) return missing("QP");
      QpShadow* q = of->second.at(map.vqpn);
      q->real->handle = map.new_handle;
      q->real->qp_num = map.pqpn;
      if (const Peer peer = std::to_array(map.peer); peer != Peer{}) q->peer = peer;
      q->gone = q->gone || (map.flags & MIGR_HANDLE_GONE);
      return 0;
    }
    default:
      return 0;  // the context itself: matched by the caller
  }
}

/// New handles can equal old ones of other objects: every object is found by its old handle before any is changed,
/// by going through the maps in an order in which no new handle is met again.
int adopt_handles(std::span<const migr_handle_map> maps, std::string& why) {
  constexpr std::uint32_t kParked = 0x80000000u;  // uverbs handles are small positive numbers
  Registry& registry = Registry::get();
  QpsByName by_name;
  for (QpShadow* q : registry.qps) by_name[q->context][q->vqpn()] = q;
  for (int pass = 0; pass < 2; ++pass) {
    for (const migr_handle_map& map : maps) {
      Context* context = find(registry.contexts, [&](const Context* c) { return c->real->cmd_fd == map.context_fd; });
      if (!context) {
        why = "no context with descriptor " + std::to_string(map.context_fd);
        return ENOENT;
      }
      migr_handle_map step = map;
      (pass == 0 ? step.new_handle : step.old_handle) = kParked | map.new_handle;
      if (const int err = adopt_handle(*context, step, by_name, why)) return err;
    }
  }
  for (ibv_pd* pd : registry.pds) pd->handle &= ~kParked;
  for (CqShadow* c : registry.cqs) c->real->handle &= ~kParked;
  for (SrqShadow* s : registry.srqs) s->real->handle &= ~kParked;
  for (QpShadow* q : registry.qps) q->real->handle &= ~kParked;
  return 0;
}

/// The same of a new QP's or SRQ's asynchronous events. Those that were read have been acknowledged to libibverbs.
template <class Queue>
void restart_async_count(Queue& queue) {
  pthread_mutex_lock(&queue.mutex);
  queue.events_completed = 0;
  pthread_mutex_unlock(&queue.mutex);
}

/// ibv_destroy_cq() waits until as many events were acknowledged as the kernel's CQ has reported, and this one begins at
/// zero. What was read and not yet acknowledged stays owed.
void restart_event_count(CqShadow& c) {
  pthread_mutex_lock(&c.real->mutex);
  c.real->comp_events_completed -= c.events_read;
  c.real->async_events_completed = 0;  // those are acknowledged when they are read
  pthread_mutex_unlock(&c.real->mutex);
  c.events_read = 0;
}

int thaw_cq(CqShadow& c, std::string& why) {
  bool arm, inject;
  {
    std::lock_guard guard(c.lock);
    path::translate_qpns(c, kTranslateQpn);
    c.state.fetch_and(~std::uint32_t{kFrozenCq}, std::memory_order_relaxed);
    restart_event_count(c);
    arm = c.armed;
    inject = c.event_pending;
    c.event_pending = false;
  }
  if (!arm) return 0;
  if (const int err = c.context->ops.req_notify_cq(c.real, c.solicited_only))
    return fail(why, err, "req_notify_cq");
  return inject ? inject_event(c, why) : 0;
}

/// Not one that goes to ERR, or whose new path is in INIT because its connection did not survive.
bool takes_work(const QpShadow& q) { return connected(q) && !q.broken && !q.gone; }

/// On the new QPs, before anybody can use one.
int bind_windows(std::string& why) {
  for (const auto& [mw, through] : windows::bound()) {
    QpShadow* q = through ? through : find(Registry::get().qps, [&](const QpShadow* p) {
      return p->init.pd == mw->pd && takes_work(*p);
    });
    windows::Operation op;
    if (!q || !takes_work(*q) || !windows::bind_again(mw, op)) continue;
    if (const int err = run_local(*q, q->real, op.wr, why)) return err;
  }
  return 0;
}

}  // namespace

int rebound_keys(std::vector<migr_key_map>& out) {
  constexpr int kRemote = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  for (const MrShadow* mr : Registry::get().mrs)
    if (mr->access & kRemote) out.push_back({.vrkey = mr->app.rkey, .prkey = mr->real->rkey, .owner = {}});
  windows::keys(out);
  return 0;
}

int rebind(std::span<const migr_handle_map> maps, std::vector<migr_key_map>& out, std::string& why) {
  Registry& registry = Registry::get();
  if (!registry.frozen) {
    why = "this process was not frozen";
    return EBUSY;
  }
  if (const int err = adopt_handles(maps, why)) return err;
  registry.retired_keys.clear();  // KEYS is all that partners know from now on
  for (Context* context : registry.contexts)
    if (const int err = context->kernel->reattach(context->real->cmd_fd))
      return fail(why, err, "cannot attach to migr.ko on this host");
  for (MrShadow* mr : registry.mrs)
    if (const int err = register_again(*mr, why)) return err;
  if (const int err = windows::make_again(why)) return err;
  rebound_keys(out);
  if (const int err = datagrams::make_again(why)) return err;
  for (SrqShadow* s : registry.srqs) {
    restart_async_count(*s->real);
    if (const int err = thaw_srq(*s, why)) return err;
  }
  for (QpShadow* q : registry.qps) {
    restart_async_count(*q->real);
    if (const int err = q->context->kernel->bind_qp(q->vqpn(), q->pqpn()))
      return fail(why, err, "cannot bind " + qp_name(*q));
    std::lock_guard guard(q->lock);
    // The new object was made from the record of before the suspension.
    q->real->state = q->app_state();
    q->write_access_added = q->responder_only = false;
    path::translate_keys(*q, kTranslateLocal);
    datagrams::emptied(*q);  // its receives are posted again
    if (int err = post_receives(*q, q->real, q->outstanding, why)) return err;
    if (int err = post_receives(*q, q->real, q->kept_receives, why)) return err;
    q->outstanding.clear();
    q->kept_receives.clear();
    if (const int err = break_if_broken(*q, why)) return err;
    clear_bits(*q, kKeepReceives);
    q->phase = Phase::kRebound;
  }
  for (CqShadow* c : registry.cqs)
    if (const int err = thaw_cq(*c, why)) return err;
  if (const int err = bind_windows(why)) return err;
  registry.frozen = false;
  registry.thawed.notify_all();
  return 0;
}

/* ---- the end -------------------------------------------------------------------------- */

int resume(Qps qps, std::vector<migr_resume_stat>& out, std::string& why) {
  if (const int err = check_arcs(qps, Phase::kRunning, why)) return err;
  for (const QpShadow* q : qps)
    if (q->phase == Phase::kFrozen) {
      why = qp_name(*q) + " is frozen: rebind or roll back first";
      return EBUSY;
    }
  int result = 0;
  for (QpShadow* q : qps) for_cqs(*q, [](CqShadow& c) { set_cq_bits(c, 0, kRestingCq); });
  for (QpShadow* q : qps) {
    // The new path has the application's own access flags already.
    if (q->old_real) q->write_access_added = q->responder_only = false;
    std::string ignored;
    set_write_access(*q, false, ignored);
    if (const int err = let_go(*q, why); err && !result) result = err;
    for (ibv_qp** old : {&q->old_real, &q->spare})
      if (*old) Registry::get().old_paths.push_back(std::exchange(*old, nullptr));
    out.push_back({.ctx_id = q->context->ctx_id(), .vqpn = q->vqpn(), .replayed_sends = q->replayed_sends,
                   .replayed_recvs = q->replayed_receives, .suspended_ns = q->suspended_ns,
                   .last_cqe_ns = q->last_cqe_ns, .resumed_ns = q->resumed_ns});
  }
  release_cqs();
  release_srqs();
  return result;
}

void destroy_old_paths() {
  for (ibv_qp* qp : std::exchange(Registry::get().old_paths, {})) real().destroy_qp(qp);
}

int rollback(std::string& why) {
  Registry& registry = Registry::get();
  int result = 0;
  const auto note = [&](int err) {
    if (err && !result) result = err;
  };
  if (registry.frozen)
    for (Context* context : registry.contexts) note(context->kernel->reattach(context->real->cmd_fd));
  for (CqShadow* c : registry.cqs) {
    set_cq_bits(*c, 0, kFrozenCq);
    bool arm;
    {
      std::lock_guard guard(c->lock);
      arm = registry.frozen && c->armed;
      c->event_pending = false;
    }
    if (arm) note(c->context->ops.req_notify_cq(c->real, c->solicited_only));
  }
  for (SrqShadow* s : registry.srqs) note(unfreeze_srq(*s, why));
  std::vector<QpShadow*> suspended;
  for (QpShadow* q : registry.qps) {
    if (q->phase == Phase::kRebound) {
      why = qp_name(*q) + " was restored here and cannot go back";
      return EBUSY;
    }
    {
      std::lock_guard guard(q->lock);
      if (q->phase == Phase::kSwitched) {
        note(switch_back(*q, why));
      } else if (q->old_path_closed) {
        note(open_old_path(*q, why));
        q->old_path_closed = false;
      } else if (q->cut) {
        note(join_again(*q, why));
      }
    }
    destroy_real(q->spare);
    if (q->phase == Phase::kRunning) continue;
    if (q->phase == Phase::kFrozen || q->phase == Phase::kSwitched) q->phase = Phase::kDrained;
    suspended.push_back(q);
  }
  registry.frozen = false;
  registry.thawed.notify_all();
  std::vector<migr_resume_stat> ignored;
  note(resume(suspended, ignored, why));
  return result;
}

void stats(std::vector<migr_drain_stat>& out) {
  for (QpShadow* q : Registry::get().qps) {
    std::lock_guard guard(q->lock);
    // DRAIN has found it so; a moment later it may be different.
    unsigned in_flight = 0;
    if (q->phase == Phase::kSuspended && !provider::sends_in_queue(*q, in_flight)) in_flight = std::max(in_flight, 1u);
    migr_drain_stat stat{.ctx_id = q->context->ctx_id(), .vqpn = q->vqpn(), .sq_in_flight = in_flight, .rq_outstanding = 0,
                         .kept = static_cast<std::uint32_t>(q->kept_sends.size() + q->kept_receives.size()),
                         .fake_cqes = 0};
    for_cqs(*q, [&](CqShadow& c) {
      std::lock_guard cq_guard(c.lock);
      stat.fake_cqes += static_cast<std::uint32_t>(c.fake.size());
    });
    out.push_back(stat);
  }
}

}  // namespace migr::switchover
