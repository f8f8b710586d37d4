/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A drain that does not end: what is under way is cut off at both ends, told apart, and the rest replayed. */
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>

#include "../provider/provider.h"
#include "../real.h"
#include "../windows.h"
#include "parts.h"
#include "replay.h"

namespace migr::switchover {
namespace {

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

}  // namespace migr::switchover
