/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A drain that does not end: what is under way is cut off at both ends, told apart, and the rest replayed. */
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>

#include "../events.h"
#include "../kernel_link.h"
#include "../links/cq_room.h"
#include "../links/links.h"
#include "../provider/provider.h"
#include "../real.h"
#include "../windows.h"
#include "parts.h"
#include "replay.h"

namespace migr::switchover {
namespace {

std::uint32_t bytes_of(ibv_mtu mtu) { return 128u << mtu; }

bool ours(const QueuedSend& s) { return s.ours; }

int read_sends(QpShadow& q, const provider::QueuePart& part, std::vector<QueuedSend>& out) {
  const int err = provider::sends_in(q, part, out);
  const auto& markers = q.cut->drain_markers;
  for (QueuedSend& s : out) s.ours = std::find(markers.begin(), markers.end(), s.send.wr.wr_id) != markers.end();
  return err;
}

bool replayable(ibv_wr_opcode opcode) {
  return opcode <= IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_SEND_WITH_INV || opcode == IBV_WR_ATOMIC_WRITE;
}

/// @return "" or what stands against it
std::string why_no_cut(QpShadow& q) {
  if (q.state.load(std::memory_order_relaxed) & kOpen) return " has an open ibv_wr_* session";
  if (const char* const open = open_session(q); *open) return open;
  if (q.app.qp_type != IBV_QPT_RC || (!connected(q) && q.real->state != IBV_QPS_RTR)) return " is not a connected RC QP";
  if (q.app.srq && !links::shares_receives(q)) return " uses an SRQ, and no policy is configured for its process: which receive a message came into in part could not be told";
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
      for (const auto& [wr_id, m] : c.drain_markers)
        if (m.qp == &q_) q_.cut->drain_markers.push_back(wr_id);
      c.cutting.push_back(q_.cut.get());
      path::poll_to_fake(c);
    });
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
  /// Where the queues are. Only receives that have been completed behind that are counted.
  int look_at_queues(provider::QueuePart& sends, provider::QueuePart& receives) {
    constexpr unsigned kMostLooks = 100;  // a message may come at any time
    int err = 0;
    for (unsigned looks = 0; looks < kMostLooks && !err; ++looks) {
      poll_receives(true);
      err = provider::queue_parts(q_, sends, receives);
      if (!poll_receives(false)) break;
    }
    return err;
  }

 private:
  /// @return how many have been counted
  std::size_t poll_receives(bool anew) {
    if (!q_.recv_cq) return 0;
    std::lock_guard guard(q_.recv_cq->lock);
    path::poll_to_fake(*q_.recv_cq);
    if (anew) q_.cut->received = 0;
    return q_.cut->received;
  }
  QpShadow& q_;
};

int wait_until_empty(QpShadow& q, Flushing& flushing, std::string& why) {
  Patience patience;
  for (;;) {
    flushing.poll();
    provider::QueuePart sends, receives;
    if (const int err = provider::queue_parts(q, sends, receives)) return fail(why, err, "cannot look at the queues of " + qp_name(q));
    if (!sends.size() && !receives.size()) return 0;
    if (patience.over()) return fail(why, ETIMEDOUT, "the queues of " + qp_name(q) + " were not flushed");
    pause_briefly();
  }
}

/// They do not change any more.
int ask_for_psns(QpShadow& q, std::string& why) {
  ibv_qp_attr now{};
  if (const int err = ask_device(q, now, kPsns)) return fail(why, err, "query_qp of " + qp_name(q));
  q.cut->psn = now.rq_psn & kPsnMask;
  q.cut->next_psn = now.sq_psn & kPsnMask;
  return 0;
}

/// ERR flushes both queues: how many come back tells what was not used. RESET waits for the end of whatever the device
/// does for the QP; then no PSN changes any more. Caller holds q.lock.
int stop_path(QpShadow& q, provider::QueuePart& sends, provider::QueuePart& receives, std::string& why) {
  Cut& cut = *q.cut;
  Flushing flushing(q);
  if (const int err = flushing.look_at_queues(sends, receives)) return fail(why, err, "cannot look at the queues of " + qp_name(q));
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  events::hush(q, q.real);  // it may say that it uses no receive of its SRQ any more
  if (const int err = real().modify_qp(q.real, &to, IBV_QP_STATE)) return fail(why, err, "modify_qp to ERR of " + qp_name(q));
  if (const int err = wait_until_empty(q, flushing, why)) return err;
  int err = read_sends(q, sends, cut.sends);
  if (!err) err = provider::receives_in(q, receives, cut.receives);
  if (err) return fail(why, err, "cannot read the queues of " + qp_name(q));
  to.qp_state = IBV_QPS_RESET;
  err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  q.real->state = cut.attr.qp_state;  // what it is for everybody else
  if (err) return fail(why, err, "modify_qp to RESET of " + qp_name(q));
  flushing.poll();
  return ask_for_psns(q, why);
}

void name_keys(QpShadow& q, const VirtualLkeys& keys, ibv_send_wr& wr, std::vector<ibv_sge>& sges) {
  keys.translate(*q.context, sges);
  if (!q.remote_keys) return;
  if (wr.opcode == IBV_WR_SEND_WITH_INV) wr.invalidate_rkey = q.remote_keys->name_of(wr.invalidate_rkey);
  else if (is_atomic(wr)) wr.wr.atomic.rkey = q.remote_keys->name_of(wr.wr.atomic.rkey);
  else wr.wr.rdma.rkey = q.remote_keys->name_of(wr.wr.rdma.rkey);
}

/// Of one CQ, whose flushed completions do not say of which queue they are.
replay::Unused tell_apart(const Cut& cut, replay::Unused guess, std::span<const QueuedSend> sends, std::span<const KeptReceive> receives) {
  std::vector<std::uint64_t> flushed, sent, received;
  for (const ibv_wc& wc : cut.taken_sends) flushed.push_back(wc.wr_id);
  for (const QueuedSend& s : sends)
    if (!ours(s)) sent.push_back(s.send.wr.wr_id);
  for (const KeptReceive& r : receives) received.push_back(r.wr_id);
  return replay::told_by_names(guess, flushed, sent, received);
}

/// Those of `sends` that stand in for others are these again.
void unfold(QpShadow& q, std::vector<QueuedSend>& sends) {
  std::lock_guard guard(q.send_cq->lock);
  auto& stand_ins = q.send_cq->stand_ins;
  const std::size_t all = stand_ins.size();
  replay::unfold(sends, stand_ins);
  q.send_cq->markers -= static_cast<unsigned>(all - stand_ins.size());
}

/* ---- a path that failed: it stays in ERR ------------------------------------------ */

/// Tries until the queue has room: what is in it is being flushed.
template <class Post>
int post_behind(Post&& post, Patience& patience) {
  int err;
  while ((err = post()) == ENOMEM && !patience.over()) pause_briefly();
  return err;
}

int wait_for_marker(CqShadow& c, std::uint64_t wr_id, Patience& patience) {
  for (;; pause_briefly()) {
    std::lock_guard guard(c.lock);
    path::poll_to_fake(c);
    const auto seen = std::find_if(c.seen_markers.begin(), c.seen_markers.end(), [&](const ibv_wc& wc) { return wc.wr_id == wr_id; });
    if (seen != c.seen_markers.end()) return c.seen_markers.erase(seen), 0;
    if (patience.over()) return ETIMEDOUT;
  }
}

void count_marker(CqShadow& c, int change) {
  std::lock_guard guard(c.lock);
  c.markers += static_cast<unsigned>(change);
}

int set_state(QpShadow& q, ibv_qp_attr& to, ibv_qp_state state, int mask = IBV_QP_STATE) {
  to.qp_state = state;
  return real().modify_qp(q.real, &to, mask);
}

int flush_receives_behind(QpShadow& q, Patience& patience, std::string& why) {
  Cut& cut = *q.cut;
  ibv_qp_attr to{};
  cut.receive_marker = marker::next();
  ibv_recv_wr receive{.wr_id = cut.receive_marker, .next = nullptr, .sg_list = nullptr, .num_sge = 0};
  ibv_recv_wr* bad_receive;
  count_marker(*q.recv_cq, 1);
  int err = post_behind([&] { return q.real_post_recv(q.real, &receive, &bad_receive); }, patience);
  if (!err) err = set_state(q, to, IBV_QPS_ERR);
  if (err) return count_marker(*q.recv_cq, -1), fail(why, err, "cannot flush the receives of " + qp_name(q));
  if ((err = wait_for_marker(*q.recv_cq, cut.receive_marker, patience))) return fail(why, err, "the receives of " + qp_name(q) + " were not flushed");
  return 0;
}

/// A receive and a send of ours behind all others. When both have been flushed the device executes nothing of this QP any
/// more, at either queue. The receives come first, and nothing makes the device look at them again after that: so what
/// is flushed between the two are sends, and those receives that threads post late stay for the trap.
/// With an SRQ it has no receives: end_responder() ends what it receives.
int flush_behind(QpShadow& q, std::string& why) {
  Cut& cut = *q.cut;
  Patience patience;
  if (const int err = q.app.srq ? 0 : flush_receives_behind(q, patience, why)) return err;
  ibv_send_wr send{};
  send.wr_id = cut.send_marker = marker::next();
  send.opcode = IBV_WR_RDMA_WRITE;
  send.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad_send;
  count_marker(*q.send_cq, 1);
  int err = post_behind([&] { return q.real_post_send(q.real, &send, &bad_send); }, patience);
  if (err) return count_marker(*q.send_cq, -1), fail(why, err, "cannot flush the sends of " + qp_name(q));
  if ((err = wait_for_marker(*q.send_cq, cut.send_marker, patience))) return fail(why, err, "the sends of " + qp_name(q) + " were not flushed");
  return 0;
}

/// Those who have not seen the flags come back. No lock of theirs is held here.
template <class Outside>
int wait_for_threads(Outside&& outside, const std::string& what, std::string& why) {
  path::pass_barrier();
  for (Patience patience; !outside(); pause_briefly())
    if (patience.over()) return fail(why, ETIMEDOUT, "a thread does not come back from " + what);
  return 0;
}

/// Where the last work request of ours lies. @param read one slot
template <class Read>
int find_marker(provider::QueuePart part, std::uint64_t wr_id, Read&& read, std::uint32_t& at) {
  for (std::uint32_t i = part.to, steps = 0; steps++ < part.mask;) {
    i = (i - 1) & part.mask;
    std::uint64_t found = 0;
    if (const int err = read(provider::QueuePart{i, (i + 1) & part.mask, part.mask}, found)) return err;
    if (found == wr_id) return at = i, 0;
  }
  return ENOENT;
}

struct Position {
  provider::QueuePart sends, receives;
  std::uint32_t next_psn = 0;  ///< that the requester sends next, if there are no sends
  bool in_err = false;         ///< what was flushed until now is in no queue
};

/// Of a path that may carry still, and threads may post to.
int look_at_path(QpShadow& q, Flushing& flushing, Position& out, std::vector<QueuedSend>& sends) {
  for (;;) {
    Position after;
    ibv_qp_attr device{};
    int err = flushing.look_at_queues(out.sends, out.receives);
    if (!err) err = ask_device(q, device, IBV_QP_STATE | kPsns);
    if (!err) err = provider::queue_parts(q, after.sends, after.receives);
    if (err) return err;
    out.next_psn = device.sq_psn & kPsnMask;
    out.in_err = device.qp_state == IBV_QPS_ERR;
    // Else a thread that the flag has not stopped has posted before the device was asked, or after: there are few of those.
    if (out.sends.size() || after.sends.to == out.sends.to) return provider::sends_in(q, out.sends, sends);
  }
}

/// The first PSN of the work request at `at`, which was posted after the look at the queue: whether or not it was sent, it is the one behind
/// those of its predecessor, which has completed.
/// @param place  of it, counted from before.sends.from
/// @param reused the part of the queue that was posted to since
int psn_of_late(QpShadow& q, const Position& before, const std::vector<QueuedSend>& sends_before, std::uint32_t place, std::uint32_t at, provider::QueuePart reused, std::uint32_t& psn) {
  if (!place) return psn = before.next_psn, 0;
  const std::uint32_t previous = (at - 1) & reused.mask, mtu = bytes_of(q.cut->attr.path_mtu);
  if (place - 1 < sends_before.size() && sends_before[place - 1].begun) return psn = replay::end_psn(sends_before[place - 1], mtu), 0;
  if (((previous - reused.from) & reused.mask) < reused.size()) return EOVERFLOW;
  std::vector<QueuedSend> one;
  const int err = provider::sends_in(q, {previous, at, reused.mask}, one);
  return err ? err : (psn = replay::end_psn(one.at(0), mtu), 0);
}

/// Receives that threads have posted behind ours while it was being flushed, and that were flushed along: they are the trap's.
/// @param along from behind ours to where the device is
int leave_out_late(QpShadow& q, provider::QueuePart along, std::uint32_t end) {
  if (along.size() > ((end - along.from) & along.mask)) return 0;  // the device is not beyond ours
  std::vector<KeptReceive> late;
  if (const int err = provider::receives_in(q, along, late)) return err;
  auto& taken = q.cut->taken_sends;  // of the one CQ
  for (const KeptReceive& r : late) {
    const auto at = std::find_if(taken.begin() + static_cast<std::ptrdiff_t>(q.cut->taken_before), taken.end(), [&](const ibv_wc& wc) { return wc.wr_id == r.wr_id; });
    if (at != taken.end()) taken.erase(at);
  }
  return 0;
}

/// That must have been flushed at least, of each queue. Fewer completions: the CQ has overrun.
struct Least {
  std::size_t sends = 0, receives = 0;
  bool met_by(const Cut& cut, bool separate) const {
    return separate ? cut.taken_sends.size() >= sends && cut.taken_receives.size() >= receives : cut.flushed() >= sends + receives;
  }
};

/// What lies in the queues before the markers and was not used.
int read_unused(QpShadow& q, const Position& before, const std::vector<QueuedSend>& sends_before, std::string& why) {
  Cut& cut = *q.cut;
  Position now;
  std::uint32_t send_end = 0, receive_end = 0;
  int err = provider::queue_parts(q, now.sends, now.receives);
  if (!err)
    err = find_marker(now.sends, cut.send_marker, [&](provider::QueuePart slot, std::uint64_t& wr_id) {
      std::vector<QueuedSend> one;
      const int e = provider::sends_in(q, slot, one);
      return e ? e : (wr_id = one.at(0).send.wr.wr_id, 0);
    }, send_end);
  if (!err && !q.app.srq)
    err = find_marker(now.receives, cut.receive_marker, [&](provider::QueuePart slot, std::uint64_t& wr_id) {
      std::vector<KeptReceive> one;
      const int e = provider::receives_in(q, slot, one);
      return e ? e : (wr_id = one.at(0).wr_id, 0);
    }, receive_end);
  if (err) return fail(why, err, "cannot read the queues of " + qp_name(q));
  const bool separate = q.send_cq != q.recv_cq || q.app.srq;  // what is flushed on the one CQ is of one queue
  if (!separate && (err = leave_out_late(q, {(receive_end + 1) & now.receives.mask, now.receives.from, now.receives.mask}, now.receives.to))) return fail(why, err, "cannot read the receive queue of " + qp_name(q));
  const std::uint32_t window = static_cast<std::uint32_t>(std::min<std::size_t>(cut.flushed() + cut.drain_markers.size(), now.sends.mask));
  std::uint32_t front = (send_end - window) & now.sends.mask;
  std::vector<QueuedSend> sends;
  if ((err = read_sends(q, {front, send_end, now.sends.mask}, sends))) return fail(why, err, "cannot read the send queue of " + qp_name(q));
  const auto given_up = std::find_if(sends.begin(), sends.end(), [](const QueuedSend& s) { return s.given_up; });
  const std::size_t behind = static_cast<std::size_t>(sends.end() - given_up - std::count_if(given_up, sends.end(), ours));
  const std::uint32_t queued = (send_end - before.sends.from) & now.sends.mask;
  const auto posted = sends.end() - static_cast<std::ptrdiff_t>(std::min<std::size_t>(queued, sends.size()));
  const std::uint32_t posted_sends = queued - static_cast<std::uint32_t>(std::count_if(posted, sends.end(), ours));
  const std::uint32_t posted_receives = (receive_end - before.receives.from) & now.receives.mask;
  // All from the one that was given up on were flushed. Markers do not count: not all are taken.
  const auto is_ours = [](const QueuedSend& s) { return marker::is_marker(s.send.wr.wr_id); };
  Least least{.sends = static_cast<std::size_t>(std::count_if(given_up, sends.end(), std::not_fn(is_ours)))};
  if (!q.app.srq) least.receives = posted_receives - std::min<std::size_t>(posted_receives, cut.received);
  const bool gave_up = std::any_of(cut.taken_sends.begin(), cut.taken_sends.end(), [](const ibv_wc& wc) { return gives_up(wc.status); });
  if (!least.met_by(cut, separate) || (gave_up && given_up == sends.end())) {
    why = qp_name(q) + ": " + std::to_string(cut.flushed()) + " completions do not account for what was in its queues: a completion queue has overrun";
    return EOVERFLOW;
  }
  replay::Unused left = replay::unused(cut, posted_sends, posted_receives, separate);
  if (given_up != sends.end() && !separate && behind <= cut.flushed()) {
    left.sends = behind;
    left.receives = cut.flushed() - left.sends;
  } else if (separate) {
    left = {cut.taken_sends.size(), cut.taken_receives.size()};
  } else {
    const auto most = static_cast<std::uint32_t>(std::min<std::size_t>(cut.flushed(), now.receives.mask));
    std::vector<KeptReceive> receives;
    if ((err = provider::receives_in(q, {(receive_end - most) & now.receives.mask, receive_end, now.receives.mask}, receives))) return fail(why, err, "cannot read the receive queue of " + qp_name(q));
    left = tell_apart(cut, left, sends, receives);
  }
  if (left.sends > window || left.receives > now.receives.mask || left.sends + left.receives != cut.flushed()) {
    why = qp_name(q) + ": " + std::to_string(cut.flushed()) + " work requests were flushed, more than its queues tell of";
    return EOVERFLOW;
  }
  auto oldest = sends.end();
  for (std::size_t n = left.sends; n && oldest != sends.begin();) n -= !ours(*--oldest);
  while (oldest != sends.begin() && oldest != sends.end() && ours(*std::prev(oldest))) --oldest;  // it has a PSN, too
  front += static_cast<std::uint32_t>(oldest - sends.begin());
  sends.erase(sends.begin(), oldest);
  if (!sends.empty() && !sends.front().given_up) {
    // The device may note down for a flushed work request that it has begun it. Whether it had is told by its PSN.
    QueuedSend& first = sends.front();
    const std::uint32_t place = (front - before.sends.from) & now.sends.mask;
    if (place < sends_before.size()) {
      first.begun = sends_before[place].begun || sends_before[place].first_psn != first.first_psn;
    } else if (before.in_err && place < queued) {  // posted to a path in ERR
      first.begun = false;
      first.first_psn = before.next_psn;
      first.read_psns = 0;
    } else if (!before.in_err && !first.ours) {
      err = psn_of_late(q, before, sends_before, place, front & now.sends.mask, {send_end, now.sends.to, now.sends.mask}, first.first_psn);
      if (err) return fail(why, err, "cannot tell what was sent of " + qp_name(q));
      first.read_psns = 0;
    }
  }
  cut.sends = std::move(sends);
  const auto unused_receives = static_cast<std::uint32_t>(left.receives);
  err = provider::receives_in(q, {(receive_end - unused_receives) & now.receives.mask, receive_end, now.receives.mask}, cut.receives);
  if (err) return fail(why, err, "cannot read the receive queue of " + qp_name(q));
  cut.late_send = (send_end + 1) & now.sends.mask;
  cut.late_receive = (receive_end + 1) & now.receives.mask;
  return 0;
}

/// No receive of ours can tell when the device has executed the last of a QP with an SRQ. RESET waits for that, and nobody posts to it
/// late (links::shares_receives). It stays in INIT, where it executes nothing either.
int end_responder(QpShadow& q, Flushing& flushing, std::string& why) {
  ibv_qp_attr to = q.cut->attr;
  if (const int err = set_state(q, to, IBV_QPS_RESET)) return fail(why, err, "modify_qp to RESET of " + qp_name(q));
  flushing.poll();
  if (const int err = ask_for_psns(q, why)) return err;
  const int err = set_state(q, to, IBV_QPS_INIT, kInitMask);
  return err ? fail(why, err, "modify_qp to INIT of " + qp_name(q)) : 0;
}

/// Caller holds q.lock.
int cut_into_err(QpShadow& q, const VirtualLkeys& keys, std::string& why) {
  Cut& cut = *q.cut;
  const ibv_qp_state state = cut.attr.qp_state;
  Position before;
  std::vector<QueuedSend> sends_before;
  int err;
  {
    Flushing flushing(q);
    links::hand_over(q);
    // Behind that: of a path that carries still, what has come until now is the application's, and is not counted.
    err = look_at_path(q, flushing, before, sends_before);
    if (err) return fail(why, err, "cannot look at the queues of " + qp_name(q));
    std::string small;  // by QPs that came later
    for_cqs(q, [&](const CqShadow& c) { if (small.empty()) small = links::why_no_room(c, cut.side); });
    if (!small.empty()) return why = qp_name(q) + ": " + small, EOVERFLOW;
    ibv_qp_attr to{};
    to.qp_state = IBV_QPS_ERR;
    if ((err = real().modify_qp(q.real, &to, IBV_QP_STATE))) return fail(why, err, "modify_qp to ERR of " + qp_name(q));
    err = flush_behind(q, why);
    q.real->state = state;
    if (!err && q.app.srq) {
      err = read_unused(q, before, sends_before, why);
      if (!err) err = end_responder(q, flushing, why);
      q.real->state = state;
    }
    if (err) return err;
  }
  if (!q.app.srq) {
    err = ask_for_psns(q, why);
    if (!err) err = read_unused(q, before, sends_before, why);
    if (err) return err;
  }
  forget_drain_markers(q);
  unfold(q, cut.sends);
  for (QueuedSend& x : cut.sends) {
    if (x.executed) continue;
    if (!replayable(x.send.wr.opcode)) {
      why = qp_name(q) + " has a work request in flight that cannot be replayed, of opcode " + std::to_string(x.send.wr.opcode);
      return EOPNOTSUPP;
    }
    name_keys(q, keys, x.send.wr, x.send.sges);
  }
  for (KeptReceive& x : cut.receives) keys.translate(*q.context, x.sges);
  cut.told_apart = true;
  return 0;
}

/// Of two cuts in a row: nothing was sent on the second path, so what is to be settled is that of the first. All receives
/// had gone to the second.
void join(Cut& second, Cut& first) {
  second.joined = true;
  second.attr = first.attr;
  second.next_psn = first.next_psn;
  second.sends = std::move(first.sends);
  second.errors = std::move(first.errors);  // of a first one that was settled, and lost
}

/// As stop_path(), of a vQP with a guard: its path stays in ERR, and if the migration is undone its links give it another one.
int stop_guarded_path(QpShadow& q, const VirtualLkeys& keys, std::string& why) {
  q.cut->path_failed = true;
  int err = wait_for_pollers(q, why);
  if (!err) err = cut_into_err(q, keys, why);
  if (err) return err;
  err = q.context->kernel->stands(q.pqpn(), q.app_state());
  return err ? fail(why, err, "cannot keep the state of " + qp_name(q) + " in the record") : 0;
}

/// The QP's part of cut().
int cut_one(QpShadow& q, const VirtualLkeys& keys, std::string& why) {
  std::lock_guard guard(q.lock);
  auto cut = std::make_unique<Cut>();
  ibv_qp_init_attr init{};
  constexpr int kMask = kConnectionAttrs | IBV_QP_DEST_QPN | kPsns;
  // libibverbs notes the state that it is told of; but that a guarded path has failed is nobody's business.
  if (const int err = links::guarded(q) ? ask_device(q, cut->attr, kMask) : real().query_qp(q.real, &cut->attr, kMask, &init))
    return fail(why, err, "query_qp of " + qp_name(q));
  cut->attr.qp_state = q.real->state;
  cut->pqpn = q.pqpn();
  cut->psn = cut->attr.rq_psn & kPsnMask;
  cut->send_cq = q.send_cq;
  q.cut = std::move(cut);
  if (q.broken) return 0;  // everything has completed
  set_bits(q, kKeepReceives);
  if (links::guarded(q)) return stop_guarded_path(q, keys, why);
  provider::QueuePart sends, receives;
  if (const int err = stop_path(q, sends, receives, why)) return err;
  const auto markers = static_cast<std::size_t>(std::count_if(q.cut->sends.begin(), q.cut->sends.end(), ours));
  auto& s = q.cut->sends;
  auto& r = q.cut->receives;
  replay::Unused left = replay::unused(*q.cut, s.size() - markers, r.size(), q.send_cq != q.recv_cq);
  if (q.send_cq == q.recv_cq) left = tell_apart(*q.cut, left, std::span(s).first(s.size() - markers), r);
  s.erase(s.begin(), s.end() - static_cast<std::ptrdiff_t>(left.sends + markers));
  r.erase(r.begin(), r.end() - static_cast<std::ptrdiff_t>(left.receives));
  forget_drain_markers(q);
  unfold(q, s);
  for (QueuedSend& x : s)
    if (!x.executed) name_keys(q, keys, x.send.wr, x.send.sges);
  for (KeptReceive& x : r) keys.translate(*q.context, x.sges);
  return 0;
}

}  // namespace

int wait_for_pollers(QpShadow& q, std::string& why) {
  const auto outside = [&q] {
    bool all = true;
    for_cqs(q, [&](const CqShadow& c) { all = all && path::pollers_are_outside(c); });
    return all;
  };
  return wait_for_threads(outside, "polling the completion queue of " + qp_name(q), why);
}

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

int withhold(QpShadow& q, std::string& why) {
  QpShadow* const one[] = {&q};
  if (const int err = check_arcs(one, Phase::kSuspended, why)) return err;
  for (Patience patience; !begin_to_withhold(q); pause_briefly()) {
    if (!patience.over()) continue;
    std::vector<migr_resume_stat> ignored;
    std::string more;
    resume(one, ignored, more);
    return fail(why, ETIMEDOUT, "a thread does not come back from an ibv_wr_* session of " + qp_name(q));
  }
  return 0;
}

bool begin_to_withhold(QpShadow& q) {
  constexpr std::uint64_t kMostNs = 5'000'000;  // nearly all end by then
  std::uint64_t until = 0;
  if (q.phase == Phase::kRunning) {
    // What a classic post does late the cut tells apart. A session follows q.target, which is about to change.
    raise_flags(q, q.real_ex ? kKeepSends | kOpen : kKeepSends);
    if (q.real_ex) path::pass_barrier();
    until = now_ns() + kMostNs;
  }
  if (!(q.state.load(std::memory_order_relaxed) & kOpen)) return true;
  for (; !path::sessions_are_outside(q); pause_briefly())
    if (now_ns() > until) return false;
  std::lock_guard guard(q.lock);
  clear_bits(q, kOpen);
  return true;
}

bool trap_posts(QpShadow& q, unsigned limit_ms) {
  {
    std::lock_guard guard(q.lock);
    const std::uint32_t state = q.state.load(std::memory_order_relaxed);
    if (state & kOpen) return false;  // who has raised it waits for the same sessions
    const bool none = !q.real_ex || (state & kSessionsKept);
    set_bits(q, none ? kTrapped : kTrapped | kOpen);
    if (none) return true;
  }
  path::pass_barrier();
  const std::uint64_t until = now_ns() + limit_ms * 1'000'000ull;
  bool outside = path::sessions_are_outside(q);
  for (; !outside && now_ns() < until; outside = path::sessions_are_outside(q)) pause_briefly();
  std::lock_guard guard(q.lock);
  clear_bits(q, outside ? kOpen : kOpen | kTrapped);
  return outside;
}

int leave_path(QpShadow& q, const Leaving& how, std::string& why) {
  if (q.phase == Phase::kRunning)
    if (const int err = withhold(q, why)) return err;
  const VirtualLkeys keys(how.side);
  std::lock_guard guard(q.lock);
  if (const int err = wait_for_pollers(q, why)) return err;
  auto before = std::move(q.cut);
  q.cut = std::make_unique<Cut>();
  q.phase = Phase::kSuspended;
  Cut& cut = *q.cut;
  cut.path_failed = true;
  cut.resend = how.resend;
  cut.unique_swap = how.unique_swap;
  cut.send_cq = q.send_cq;
  cut.pqpn = q.pqpn();
  cut.side = how.side;
  clear_bits(q, kLogReceives);
  set_bits(q, kKeepSends | kKeepReceives);
  q.logged_receives.clear();  // they are in the queue
  int err = ask_device(q, cut.attr, kConnectionAttrs | IBV_QP_DEST_QPN | kPsns);
  cut.attr.qp_state = q.real->state;
  if (err) fail(why, err, "query_qp of " + qp_name(q));
  else err = cut_into_err(q, keys, why);
  if (before) join(cut, *before);
  return err;
}

namespace {

/// Where the answer goes to. An SGE names memory as its MR does, which may be otherwise than the process does.
std::uint64_t* answer_of_atomic(const QpShadow& q, const KeptSend& send) {
  if (send.sges.empty()) return nullptr;
  std::uint64_t at = send.sges.front().addr;
  for (const MrShadow* mr : Registry::get().mrs)
    if (mr->context == q.context && mr->app.lkey == send.sges.front().lkey) at += reinterpret_cast<std::uint64_t>(mr->app.addr) - mr->iova;
  return reinterpret_cast<std::uint64_t*>(at);
}

/// @param peer_psn none: it will never be known. Then whatever was on its way may have been executed or not.
/// @param closes there is no path to go on
/// Caller holds q.lock.
void settle_one(QpShadow& q, std::optional<std::uint32_t> peer_psn, std::vector<migr_replay_stat>& out, bool closes = false) {
  Cut& cut = *q.cut;
  std::vector<QueuedSend> sends = std::move(cut.sends);
  std::vector<replay::Fate> fates(sends.size(), replay::Fate::kLost);
  if (peer_psn) fates = replay::fates(sends, bytes_of(cut.attr.path_mtu), cut.next_psn, *peer_psn);
  if (closes) replay::close(fates);
  else if (cut.resend) replay::resend(sends, fates);
  else if (cut.unique_swap) replay::swap_again(sends, fates);
  for (std::size_t i = sends.size(); i-- > 0;)
    if (ours(sends[i])) {
      sends.erase(sends.begin() + static_cast<std::ptrdiff_t>(i));
      fates.erase(fates.begin() + static_cast<std::ptrdiff_t>(i));
    }
  replay::Plan plan = replay::plan(std::move(sends), fates, q.vqpn(), q.init.sq_sig_all);
  cut.settled = true;
  cut.peer_psn = peer_psn.value_or(0);
  cut.lost = plan.lost || !peer_psn || closes;
  q.gone = q.gone || (cut.lost && !q.broken);
  CqShadow& c = *q.send_cq;
  std::lock_guard cq_guard(c.lock);
  for (const OwedCompletion& owed : plan.completions) {
    if (owed.wc.status != IBV_WC_SUCCESS) cut.errors.push_back(owed);  // who sees one may end, in the middle of the move
    else if (owed.signalled) c.fake.push_back(owed.wc);
  }
  for (std::size_t i = 0; i < plan.stand_ins.size(); ++i) {
    KeptSend& replay = plan.replays[plan.at[i]];
    plan.stand_ins[i].wr_id = replay.wr.wr_id = marker::next();
    if (plan.stand_ins[i].again) plan.stand_ins[i].again->result = answer_of_atomic(q, replay);
    c.stand_ins.push_back(std::move(plan.stand_ins[i]));
    ++c.markers;
  }
  out.push_back({.ctx_id = q.context->ctx_id(), .vqpn = q.vqpn(),
                 .replayed = static_cast<std::uint32_t>(plan.replays.size()), .executed = static_cast<std::uint32_t>(plan.done),
                 .lost = static_cast<std::uint32_t>(plan.lost), .reserved = 0});
  cut.replays = plan.replays.size();
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
      if (q.phase == Phase::kSuspended) {  // else it has its new path already
        q.phase = Phase::kDrained;
        q.adrift = links::guarded(q) && !q.cut->lost;
        q.cut->settled = !q.adrift;  // its links would settle it, with nothing in flight
      }
    }
    // Completions that no device has told of.
    const bool wake = q.send_cq->armed && q.send_cq->app.channel && out.back().executed;
    if (wake)
      if (const int err = inject_event(*q.send_cq, why)) return err;
  }
  return 0;
}

int give_up_path(QpShadow& q, std::string& why, std::optional<std::uint32_t> peer_psn) {
  {
    std::lock_guard guard(q.lock);
    q.gone = true;
    q.adrift = false;
    if (q.cut && (q.cut->told_apart || q.cut->joined)) {
      std::vector<migr_replay_stat> ignored;
      settle_one(q, peer_psn, ignored, true);
      if (q.cut->told_apart) q.kept_receives.insert(q.kept_receives.begin(), q.cut->receives.begin(), q.cut->receives.end());
      q.cut->receives.clear();  // else they would be counted twice until they are posted
    } else {
      q.cut.reset();
    }
  }
  QpShadow* const one[] = {&q};
  std::vector<migr_resume_stat> ignored;
  return resume(one, ignored, why);
}

int join_again(QpShadow& q, std::string& why) {
  constexpr std::uint32_t kFarAhead = 1u << 22;  // more than can be on the wire, less than half of all
  Cut& cut = *q.cut;
  cut.joined_again = true;
  events::hush(q, nullptr);
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
  if (q.app_state() == IBV_QPS_RTR) q.told_psn = to.sq_psn;
  if (!err && cut.attr.qp_state != IBV_QPS_RTR) err = real().modify_qp(q.real, &to, rts_mask(q));
  return err ? fail(why, err, "cannot connect the old path of " + qp_name(q) + " again") : 0;
}

}  // namespace migr::switchover
