/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "parts.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "../events.h"
#include "../links/links.h"
#include "../provider/provider.h"
#include "../real.h"

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

std::uint32_t random_psn() {
  std::uint32_t psn = 0;
  if (getrandom(&psn, sizeof psn, 0) != sizeof psn) psn = static_cast<std::uint32_t>(now_ns());
  return psn & kPsnMask;
}

void pause_briefly() {
  constexpr long kDrainPollNs = 100'000;
  const timespec pause{0, kDrainPollNs};
  nanosleep(&pause, nullptr);
}

int ask_device(const QpShadow& q, ibv_qp_attr& attr, int mask) {
  ibv_qp_init_attr init{};
  const ibv_qp_state state = q.real->state;
  const int err = real().query_qp(q.real, &attr, mask, &init);
  q.real->state = state;
  return err;
}

const char* open_session(const QpShadow& q) {
  if (q.path_session.load(std::memory_order_relaxed)) return " has an open ibv_wr_* session";
  bool polling = false;
  for_cqs(q, [&](const CqShadow& c) { polling = polling || c.ex_session.load(std::memory_order_relaxed); });
  return polling ? "'s completion queue has an open ibv_cq_ex session" : "";
}

bool in_error(const QpShadow& q) {
  ibv_qp_attr now{};
  return !ask_device(q, now, IBV_QP_STATE) && now.qp_state == IBV_QPS_ERR;
}

std::string qp_name(const QpShadow& q) { return "vQPN " + std::to_string(q.vqpn()); }

int fail(std::string& why, int err, const std::string& what) {
  why = what + ": " + std::strerror(err);
  return err;
}

namespace {

int check_arc(const QpShadow& q, Phase to, std::string& why) {
  if (may_move(q.phase, to)) return 0;
  why = qp_name(q) + " is " + name(q.phase) + " and cannot become " + name(to);
  return EBUSY;
}

}  // namespace

int check_arcs(Qps qps, Phase to, std::string& why) {
  for (QpShadow* q : qps)
    if (const int err = check_arc(*q, to, why)) return err;
  return 0;
}

void set_cq_bits(CqShadow& c, std::uint32_t set, std::uint32_t clear) {
  std::lock_guard guard(c.lock);
  c.state.store((c.state.load(std::memory_order_relaxed) | set) & ~clear, std::memory_order_relaxed);
}

void set_srq_bits(SrqShadow& s, std::uint32_t set, std::uint32_t clear) {
  s.state.store((s.state.load(std::memory_order_relaxed) | set) & ~clear, std::memory_order_relaxed);
}

/* ---- attributes of a connection ------------------------------------------------ */

int rtr_mask(const QpShadow& q) {
  return IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
         (reliable(q) ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0);
}

int rts_mask(const QpShadow& q) {
  return IBV_QP_STATE | IBV_QP_SQ_PSN |
         (reliable(q) ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0);
}

int to_rtr(const QpShadow& q, ibv_qp* qp, ibv_qp_attr& attr) {
  constexpr int kTries = 5;
  int err = 0;
  for (int i = 0; i < kTries; ++i)
    if (err = real().modify_qp(qp, &attr, rtr_mask(q)); err != ETIMEDOUT) break;
  return err;
}

namespace {

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

}  // namespace

int add_write_access(QpShadow& q, std::string& why) {
  if (q.app.qp_type != IBV_QPT_RC && q.app.qp_type != IBV_QPT_UC) return 0;
  const bool in_rtr = q.real->state == IBV_QPS_RTR;
  if (q.real->state != IBV_QPS_RTS && !in_rtr) return 0;
  if (q.access_flags >= 0 && (q.access_flags & IBV_ACCESS_REMOTE_WRITE)) return 0;  // no call per QP
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  int err = real().query_qp(q.real, &attr, IBV_QP_ACCESS_FLAGS, &init);
  if (err) return fail(why, err, "query_qp of " + qp_name(q));
  constexpr auto kWrite = static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE);
  if (attr.qp_access_flags & kWrite) return 0;
  if (in_rtr) return allow_write_in_rtr(q, attr.qp_access_flags | kWrite, why);
  ibv_qp_attr change{};
  change.qp_access_flags = attr.qp_access_flags | kWrite;
  err = real().modify_qp(q.real, &change, IBV_QP_ACCESS_FLAGS);
  if (err) return fail(why, err, "modify_qp (access flags) of " + qp_name(q));
  q.write_access_added = true;
  return 0;
}

/* ---- receives ------------------------------------------------------------------ */

int read_back_receives(QpShadow& q, const VirtualLkeys& keys, std::vector<KeptReceive>& out, std::string& why) {
  out.clear();
  if (q.app.srq) return 0;
  if (q.cut) return out = q.cut->receives, 0;  // its queue was emptied, and takes nothing since
  if (const int err = provider::outstanding_receives(q, out))
    return fail(why, err, "cannot read back the receive queue of " + qp_name(q));
  for (KeptReceive& receive : out) keys.translate(*q.context, receive.sges);
  return 0;
}

int read_back_receives(SrqShadow& s, const VirtualLkeys& keys, std::vector<KeptReceive>& out, std::string& why) {
  out.clear();
  if (s.link) return 0;  // where each is it knows itself: links::post_waiting()
  if (const int err = provider::outstanding_receives(s, out))
    return fail(why, err, "cannot read back a shared receive queue");
  for (KeptReceive& receive : out) keys.translate(*s.context, receive.sges);
  return 0;
}

void make_keys_virtual(const Context& context, std::vector<KeptReceive>& receives) {
  const VirtualLkeys keys;
  for (KeptReceive& receive : receives) keys.translate(context, receive.sges);
}

/* ---- paths --------------------------------------------------------------------- */

void destroy_real(ibv_qp*& qp) {
  if (qp) real().destroy_qp(qp);
  qp = nullptr;
}

void become_path(QpShadow& q, ibv_qp* qp) {
  q.real = qp;
  events::hush(q, nullptr);  // whatever the one before says is not about the path
  q.receive_ring = q.send_ring = {};
  lead_sessions(q);
}

void lead_sessions(QpShadow& q) {
  if (!q.real_ex) return;
  q.real_ex = real().qp_to_qp_ex(q.real);
  if (!kept_session(q)) q.target = q.real_ex;
}

ibv_qp* create_like(const QpShadow& like, ibv_context* ctx, ibv_qp_init_attr_ex& init) {
  if (!like.init_is_ex) {
    ibv_qp_init_attr plain;
    std::memcpy(&plain, &init, sizeof plain);  // it begins with the same fields
    return events::with_kernel_fd(*ctx, [&] { return real().create_qp(init.pd, &plain); });
  }
  if (const Context* ours = Registry::get().context_of(ctx)) return events::with_kernel_fd(*ctx, [&] { return ours->slots.create_qp_ex(ctx, &init); });
  verbs_context* const other = verbs_get_ctx_op(ctx, create_qp_ex);
  if (other) return other->create_qp_ex(ctx, &init);
  errno = EOPNOTSUPP;
  return nullptr;
}

int break_connection(QpShadow& q, std::string& why) {
  q.gone = false;
  links::unguard(q);
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  const int err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  return err ? fail(why, err, "modify_qp to ERR of " + qp_name(q)) : 0;
}

int break_if_broken(QpShadow& q, std::string& why) {
  if (!q.broken || in_error(q)) return 0;
  events::hush(q, q.real);  // the application was told when it broke
  return break_connection(q, why);
}

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
  for (Patience patience; !patience.over(); pause_briefly()) {
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

namespace {

QpShadow* any_qp_on(const CqShadow& c) {
  for (QpShadow* q : Registry::get().qps)
    if (q->send_cq == &c || q->recv_cq == &c) return q;
  return nullptr;
}

/// @param to  a port
int complete_marker(CqShadow& c, ibv_pd* pd, ibv_qp_attr& to, std::string& why) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = c.real;
  init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  ibv_qp* helper = events::with_kernel_fd(*c.context->real, [&] { return real().create_qp(pd, &init); });
  if (!helper) return fail(why, errno, "create_qp for a completion event");
  to.qp_state = IBV_QPS_INIT;
  int err = real().modify_qp(helper, &to, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS);
  ibv_recv_wr wr{.wr_id = marker::next(), .next = nullptr, .sg_list = nullptr, .num_sge = 0};
  ibv_recv_wr* bad;
  if (!err) err = c.context->ops.post_recv(helper, &wr, &bad);
  to.qp_state = IBV_QPS_ERR;
  if (!err) {
    {
      std::lock_guard guard(c.lock);
      ++c.markers;
      c.state.fetch_or(kFakeCq, std::memory_order_relaxed);  // nobody else is to see it: a CQ without QPs was not suspended
    }
    err = real().modify_qp(helper, &to, IBV_QP_STATE);
  }
  Patience patience;
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
    if (patience.over()) err = ETIMEDOUT;
    pause_briefly();
  }
  destroy_real(helper);
  return err ? fail(why, err, "cannot make a completion event") : 0;
}

}  // namespace

int inject_event(CqShadow& c, std::string& why) {
  const QpShadow* const q = any_qp_on(c);
  if (c.link && q) return links::ring(c, why);
  ibv_qp_attr to{};
  if (q) {
    ibv_qp_attr attr{};
    ibv_qp_init_attr queried{};
    if (const int err = real().query_qp(q->real, &attr, IBV_QP_PORT | IBV_QP_PKEY_INDEX, &queried)) return fail(why, err, "query_qp of " + qp_name(*q));
    to.port_num = attr.port_num;
    to.pkey_index = attr.pkey_index;
  }
  if (!to.port_num) to.port_num = 1;  // one in RESET has none, and which one does not matter
  if (q) return complete_marker(c, q->real->pd, to, why);
  ibv_pd* const pd = real().alloc_pd(c.context->real);
  if (!pd) return fail(why, errno, "alloc_pd for a completion event");
  const int err = complete_marker(c, pd, to, why);
  real().dealloc_pd(pd);
  return err;
}

/* ---- what the process looks like ------------------------------------------------- */

migr_proc_state process_state() {
  const Registry& registry = Registry::get();
  if (registry.frozen) return MIGR_PROC_FROZEN;
  for (const QpShadow* q : registry.qps)
    if (q->phase != Phase::kRunning && !links::changing(*q) && !waits_for_links(*q)) return MIGR_PROC_SUSPENDED;
  return MIGR_PROC_RUNNING;
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
