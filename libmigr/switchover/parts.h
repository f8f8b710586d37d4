/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What the steps of the engine have in common; links/ has some of it, too. Thread: as switchover.h says. */
#ifndef MIGR_SWITCHOVER_PARTS_H
#define MIGR_SWITCHOVER_PARTS_H

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../path.h"
#include "switchover.h"

namespace migr::switchover {

constexpr unsigned kEventLimitMs = 2000;     // a flushed receive of our own
constexpr unsigned kFlushQuietMs = 20;       // no completion for so long after a flushed queue is empty: the last has come
constexpr std::uint32_t kPsnMask = 0xffffff;

inline std::uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}
/// How long we look for what the device owes us: kEventLimitMs of our own time. Who was stopped himself, as in a virtual machine
/// that was paused, cannot tell whether it has come late.
class Patience {
 public:
  bool over() {
    constexpr std::uint64_t kLookNs = 50'000'000, kLimitNs = kEventLimitMs * 1'000'000ull;
    const std::uint64_t now = now_ns();
    waited_ns_ += std::min(now - std::exchange(looked_ns_, now), kLookNs);
    return waited_ns_ > kLimitNs;
  }

 private:
  std::uint64_t looked_ns_ = now_ns(), waited_ns_ = 0;
};
/// For a path's first packet.
std::uint32_t random_psn();
/// Between two looks at a queue.
void pause_briefly();
std::string qp_name(const QpShadow& q);
/// What the device says of the present path. libibverbs notes the state that it hears in `real`; to everybody else the QP stays in
/// the one that it is in. @return 0 or a positive errno
int ask_device(const QpShadow& q, ibv_qp_attr& attr, int mask);
/// "" or which session of the application is open, to be put behind the QP's name.
const char* open_session(const QpShadow& q);
/// What the device says, whether or not the application has been told.
bool in_error(const QpShadow& q);
/// @return err, with a sentence in `why`
int fail(std::string& why, int err, const std::string& what);
int check_arcs(Qps qps, Phase to, std::string& why);

inline void set_bits(QpShadow& q, std::uint32_t bits) { q.state.fetch_or(bits, std::memory_order_relaxed); }
inline void clear_bits(QpShadow& q, std::uint32_t bits) { q.state.fetch_and(~bits, std::memory_order_relaxed); }

inline bool kept_session(const QpShadow& q) { return q.state.load(std::memory_order_relaxed) & kKeptSession; }
inline bool connected(const QpShadow& q) { return q.real->state == IBV_QPS_RTS || q.real->state == IBV_QPS_SQD; }
inline bool reliable(const QpShadow& q) { return q.app.qp_type == IBV_QPT_RC; }

template <class Function>
void for_cqs(const QpShadow& q, Function&& function) {
  if (q.send_cq) function(*q.send_cq);
  if (q.recv_cq && q.recv_cq != q.send_cq) function(*q.recv_cq);
}

/// What a migration has not touched yet, or no more.
inline bool waits_for_links(const QpShadow& q) { return q.adrift && q.phase == Phase::kSuspended; }

/// The beginning of every suspension. @param bits of its state word
void raise_flags(QpShadow& q, std::uint32_t bits);
void set_cq_bits(CqShadow& c, std::uint32_t set, std::uint32_t clear = 0);
/// Caller holds s.lock.
void set_srq_bits(SrqShadow& s, std::uint32_t set, std::uint32_t clear = 0);

/* ---- attributes of a connection ------------------------------------------------ */

constexpr int kInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kConnectionAttrs = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_AV |
                                 IBV_QP_PATH_MTU | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kPsns = IBV_QP_RQ_PSN | IBV_QP_SQ_PSN;

/// What modify_qp wants to hear on the way to RTR and to RTS.
int rtr_mask(const QpShadow& q);
int rts_mask(const QpShadow& q);
/// On a bad network the kernel's question for the other end's address may be lost; it asks once in a second.
int to_rtr(const QpShadow& q, ibv_qp* qp, ibv_qp_attr& attr);
/// The drain marker needs a responder that allows RDMA writes. This path goes on to: a marker of a drain that did not end may come long after
/// the migration was taken back.
int add_write_access(QpShadow& q, std::string& why);

/// Nothing of it lies in its send queue any more. Caller holds no CQ's lock.
void forget_drain_markers(const QpShadow& q);

/* ---- receives ------------------------------------------------------------------ */

/// Physical -> virtual lkey, of every MR there is.
class VirtualLkeys {
 public:
  /// @param side  physical there
  explicit VirtualLkeys(links::Side side = links::kHome) {
    for (const MrShadow* mr : Registry::get().mrs)
      if (const ibv_mr* physical = mr->on(side)) keys_[mr->context][physical->lkey] = mr->app.lkey;
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

int read_back_receives(QpShadow& q, const VirtualLkeys& keys, std::vector<KeptReceive>& out, std::string& why);
/// Caller holds s.lock.
int read_back_receives(SrqShadow& s, const VirtualLkeys& keys, std::vector<KeptReceive>& out, std::string& why);

/// In order. What is posted is not in `receives` any more: who is told to do it again posts nothing twice.
template <class Receives, class Post>
int post_out(Receives& receives, Post&& post) {
  int err = 0;
  auto next = receives.begin();
  while (next != receives.end() && !(err = post(*next))) ++next;
  receives.erase(receives.begin(), next);
  return err;
}

/// @param post path::post_named() of what a device has had, path::post_one_receive() of what was posted since
template <class Receives>
int post_out(SrqShadow& s, Receives& receives, int (*post)(SrqShadow&, std::uint64_t, std::span<const ibv_sge>) noexcept, std::string& why) {
  const int err = post_out(receives, [&](const KeptReceive& r) { return post(s, r.wr_id, r.sges); });
  return err ? fail(why, err, "post_srq_recv") : 0;
}

template <class Receives>
int post_out(QpShadow& q, Receives& receives, std::string& why) {
  const int err = post_out(receives, [&](const KeptReceive& r) { return path::post_one_receive(q, q.real, r); });
  return err ? fail(why, err, "post_recv to " + qp_name(q) + "'s new path") : 0;
}

/// They stay in `receives`: a way back posts them once more.
template <class Receives>
int post_receives(QpShadow& q, ibv_qp* to, const Receives& receives, std::string& why) {
  for (const KeptReceive& receive : receives)
    if (const int err = path::post_one_receive(q, to, receive))
      return fail(why, err, "post_recv to " + qp_name(q) + "'s new path");
  return 0;
}

/* ---- paths --------------------------------------------------------------------- */

void destroy_real(ibv_qp*& qp);
void become_path(QpShadow& q, ibv_qp* qp);
/// ibv_wr_* sessions that begin from now on go to q.real.
void lead_sessions(QpShadow& q);
/// By the call by which the application has made `like`. @param init of provider objects, with a PD of `ctx`
ibv_qp* create_like(const QpShadow& like, ibv_context* ctx, ibv_qp_init_attr_ex& init);
/// What was posted is flushed, and so is what was kept: as when the partner has died.
int break_connection(QpShadow& q, std::string& why);
/// The completion that a send gets that cannot be posted any more, behind those that the device has given.
void flush_to_fake(QpShadow& q, const KeptSend& send);
/// Those who poll q's CQs and have not seen that completions are in the fake ones come back. Caller holds no CQ's lock.
int wait_for_pollers(QpShadow& q, std::string& why);
/// Caller holds q.lock.
int break_if_broken(QpShadow& q, std::string& why);
/// A work request of ours that needs no partner, on one of q's paths. Returns when it is done.
int run_local(QpShadow& q, ibv_qp* on, ibv_send_wr& wr, std::string& why);
/// Makes the device add a completion of ours to `c`, so that its armed channel becomes readable: a receive on a QP of
/// our own is flushed. The completion is filtered like a drain marker.
int inject_event(CqShadow& c, std::string& why);

/* ---- events of completion channels ----------------------------------------------- */

/// FREEZE: counts those that nobody has read, and finds out which CQs are armed.
int collect_cq_events(std::string& why);
/// When nothing completes any more: those of what has come since. @param last_cqes of each CQ, before collect_cq_events()
void collect_late_cq_events(std::span<const std::uint64_t> last_cqes);
/// Its channel has as many again, and it is armed if it was. Caller holds no lock of a CQ.
int return_cq_events(CqShadow& c, std::string& why);

/* ---- the ways back, for rollback() ---------------------------------------------- */

/// From cut(), on the same QP. Both ends go on with PSNs that nothing old can have, and know them without asking each
/// other. Caller holds q.lock
int join_again(QpShadow& q, std::string& why);
/// From freeze().
int unfreeze_srq(SrqShadow& s, std::string& why);
/// From the closing of a UC path. Its PSNs go on: a UC responder begins with any message. Caller holds q.lock.
int open_old_path(QpShadow& q, std::string& why);
/// From switch_to_spare(): the old path again; what was posted to the spare since goes there. The spare stands until
/// rollback(). Caller holds q.lock.
int switch_back(QpShadow& q, std::string& why);

}  // namespace migr::switchover

#endif
