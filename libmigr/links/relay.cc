/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "relay.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>

#include "../events.h"
#include "../path.h"
#include "../real.h"
#include "channel.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr std::size_t kBatch = 8, kMostAnswers = 64;
constexpr std::uint64_t kAskAgainNs = 100'000'000, kSoonNs = 1'000'000, kRestNs = 1'000'000'000;
constexpr unsigned kLookMs = 1, kAnswerMs = 20;
constexpr std::uint64_t kRestBetweenNs = 20'000'000;  // between two times that all devices are tried

bool relays(const QpShadow& q) { return q.link && (q.state.load(std::memory_order_relaxed) & kRelays); }

/// An atomic that does not go to the path.
bool is_relayed(const QpShadow& q, const ibv_send_wr& wr) { return relays(q) && is_atomic(wr) && !q.link->relay.rests; }

bool moves_bytes(const ibv_send_wr& wr) {
  return std::any_of(wr.sg_list, wr.sg_list + wr.num_sge, [](const ibv_sge& sge) { return sge.length != 0; });
}
bool moves_bytes(const KeptSend& send) {
  return !send.inline_data.empty() || std::any_of(send.sges.begin(), send.sges.end(), [](const ibv_sge& sge) { return sge.length != 0; });
}

/// What it names at the other end is not known by the name that it has on this link.
bool names_unknown(const QpShadow& q, const ibv_send_wr& wr) {
  const RemoteKeys* const keys = q.remote_keys;
  if (!keys || is_relayed(q, wr)) return false;
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_ATOMIC_WRITE:
    case IBV_WR_RDMA_READ: return keys->lacks(wr.wr.rdma.rkey);
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD: return keys->lacks(wr.wr.atomic.rkey);
    default: return false;
  }
}

/// If it moves nothing no device looks at its key.
bool lacks_key(const QpShadow& q, const KeptSend& send) { return names_unknown(q, send.wr) && moves_bytes(send); }
bool lacks_key(const QpShadow& q, const ibv_send_wr& wr) { return names_unknown(q, wr) && moves_bytes(wr); }

bool some_wait(const QpShadow& q) { return q.link && !q.link->relay.sends.empty(); }

/// From where on completions are in the fake CQ until nothing waits any more.
void begin_hold(QpShadow& q) {
  std::lock_guard guard(q.send_cq->lock);
  q.send_cq->state.fetch_or(kFakeCq, std::memory_order_relaxed);
  ++q.send_cq->markers;
  kick(state()->failover_fd);
}

void end_hold(QpShadow& q, Relay& r) {
  r.watched = false;
  r.since_ns = 0;
  std::lock_guard guard(q.send_cq->lock);
  if (q.send_cq->markers) --q.send_cq->markers;
}

void hold(QpShadow& q, KeptSend send) {
  Relay& r = q.link->relay;
  if (r.sends.empty()) begin_hold(q);
  r.sends.push_back(std::move(send));
}

/// Takes all that waits.
std::deque<KeptSend> take_all(QpShadow& q, Relay& r) {
  auto all = std::exchange(r.sends, {});
  r.asked.clear();
  if (!all.empty()) end_hold(q, r);
  return all;
}

}  // namespace

[[gnu::weak]] bool forgets_answers() { return false; }

bool has_to_wait(const QpShadow& q, const ibv_send_wr& wr) {
  return some_wait(q) || is_relayed(q, wr) || (q.link && lacks_key(q, wr));
}

bool has_to_wait(const QpShadow& q, const KeptSend& send) {
  return some_wait(q) || is_relayed(q, send.wr) || (q.link && lacks_key(q, send));
}

bool has_room(QpShadow& q, std::size_t more) {
  if (some_wait(q)) return q.link->relay.sends.size() + more <= q.cap.max_send_wr;
  provider::QueuePart sends, receives;
  return provider::queue_parts(q, sends, receives) || sends.size() + more <= sends.mask;
}

int post_in_turn(QpShadow& q, KeptSend send) {
  if (!has_to_wait(q, send)) return path::post_one_send(q, send);
  if (q.link->relay.sends.size() >= q.cap.max_send_wr) return ENOMEM;
  return hold(q, std::move(send)), 0;
}

void post_late(QpShadow& q, KeptSend send) {
  if (!has_to_wait(q, send) && !path::post_one_send(q, send)) return;
  hold(q, std::move(send));  // if there is another reason than room it ends the connection: post_waiting()
}

void hold_left(QpShadow& q, std::size_t posted) {
  std::deque<KeptSend> newer;
  if (some_wait(q)) newer = take_all(q, q.link->relay);
  for (std::size_t i = posted; i < q.kept_sends.size(); ++i) hold(q, std::move(q.kept_sends[i]));
  for (KeptSend& send : newer) hold(q, std::move(send));
}

void hold_rest(QpShadow& q, std::size_t replays) {
  if (!q.link) return;
  auto& kept = q.kept_sends;
  const bool behind_others = some_wait(q);
  const auto newer = kept.begin() + static_cast<std::ptrdiff_t>(std::min(replays, kept.size()));
  const auto first = std::find_if(kept.begin(), behind_others ? newer : kept.end(), [&](const KeptSend& s) { return behind_others ? lacks_key(q, s) : has_to_wait(q, s); });
  const auto behind = std::max(first, newer);
  std::deque<KeptSend> between;
  if (behind_others && first < newer) between = take_all(q, q.link->relay);
  const auto hold_all = [&](auto from, auto to) {
    for (; from != to; ++from) hold(q, std::move(*from));
  };
  hold_all(first, behind);
  hold_all(between.begin(), between.end());
  hold_all(behind, kept.end());
  kept.erase(first, kept.end());
}

void give_back_waiting(QpShadow& q, std::size_t replays) {
  if (!some_wait(q)) return;
  auto all = take_all(q, q.link->relay);
  const auto at = q.kept_sends.begin() + static_cast<std::ptrdiff_t>(std::min(replays, q.kept_sends.size()));
  q.kept_sends.insert(at, std::make_move_iterator(all.begin()), std::make_move_iterator(all.end()));
}

/* ---- who asks --------------------------------------------------------------------- */

namespace {

/// The memory that the SGEs of an atomic name: one word. Null where the device has to say what is wrong.
bool word_of(const QpShadow& q, const KeptSend& send, std::vector<std::pair<std::uint8_t*, std::uint32_t>>& out) {
  std::uint32_t bytes = 0;
  if (send.wr.send_flags & IBV_SEND_INLINE) return false;
  for (const ibv_sge& sge : send.sges) {
    const auto& all = Registry::get().mrs;
    const auto mr = std::find_if(all.begin(), all.end(), [&](const MrShadow* m) { return m->context == q.context && m->app.lkey == sge.lkey; });
    if (mr == all.end() || (*mr)->app.pd != q.init.pd || !((*mr)->access & IBV_ACCESS_LOCAL_WRITE)) return false;
    const std::uint64_t offset = sge.addr - (*mr)->iova;
    if (sge.addr < (*mr)->iova || offset > (*mr)->app.length || sge.length > (*mr)->app.length - offset) return false;
    out.push_back({static_cast<std::uint8_t*>((*mr)->app.addr) + offset, sge.length});
    bytes += sge.length;
  }
  return bytes == kAtomicBytes;
}

bool can_relay(const QpShadow& q, const KeptSend& send) {
  std::vector<std::pair<std::uint8_t*, std::uint32_t>> ignored;
  return is_relayed(q, send.wr) && word_of(q, send, ignored);
}

/// Nothing that was posted before is in flight, and all of it has completed, as far as this end knows. That the other end has
/// executed it, it compares by its PSN. Caller holds q.lock.
bool calm(QpLink& l) {
  QpShadow& q = *l.q;
  const bool drains = l.stage == Stage::kDraining;
  if (!drains && l.stage != Stage::kReady && l.stage != Stage::kMaking) return false;
  if (q.adrift || q.phase != (drains ? switchover::Phase::kSuspended : switchover::Phase::kRunning)) return false;
  unsigned in_flight = 0;
  if (provider::sends_in_queue(q, in_flight) || in_flight) return false;
  {
    std::lock_guard guard(q.send_cq->lock);
    path::poll_to_fake(*q.send_cq);
  }
  if (failed_unseen(q)) return false;
  std::lock_guard guard(l.lock);
  return !l.wanted && !l.seen && l.hidden.empty() && (l.stage == Stage::kReady || l.stage == Stage::kMaking || drains);
}

/// Of the first that waits.
void complete(QpShadow& q, Relay& r, ibv_wc_status status) {
  const ibv_send_wr& wr = r.sends.front().wr;
  const bool signalled = q.init.sq_sig_all || (wr.send_flags & IBV_SEND_SIGNALED);
  ibv_wc wc{};  // where it has not succeeded the opcode counts for nothing
  wc.wr_id = wr.wr_id;
  wc.status = status;
  wc.opcode = wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? IBV_WC_COMP_SWAP : IBV_WC_FETCH_ADD;
  wc.byte_len = kAtomicBytes;
  wc.qp_num = q.vqpn();
  r.sends.pop_front();
  ++r.number;
  if (!r.asked.empty()) r.asked.pop_front();
  std::lock_guard guard(q.send_cq->lock);
  if (marker::is_marker(wc.wr_id)) {  // it stands in for itself and others, on a path after one that was cut
    if (q.send_cq->markers) --q.send_cq->markers;
    path::complete_stand_in(*q.send_cq, wc);
  } else if (signalled || status != IBV_WC_SUCCESS) {
    q.send_cq->fake.push_back(wc);
  }
}

void wake_for(QpShadow& q) {
  std::string why;
  if (q.send_cq->armed && q.send_cq->app.channel && ring(*q.send_cq, why)) say(q, why);
}

/// Its path is in ERR, or about to be: the device flushes what waits. Caller holds q.lock.
void flush(QpLink& l) {
  QpShadow& q = *l.q;
  switchover::clear_bits(q, kRelays);
  l.relays = false;
  for (const KeptSend& send : take_all(q, l.relay))
    if (path::post_one_send(q, send)) switchover::flush_to_fake(q, send);
  wake_for(q);
}

/// The first that waits ends with an error, and the connection with it, as by a NIC. Caller holds q.lock.
void fail(QpLink& l, ibv_wc_status status, const std::string& what) {
  QpShadow& q = *l.q;
  say(l, what);
  l.why = "gave up";
  set_stage(l, Stage::kBroken);
  complete(q, l.relay, status);
  if (l.relay.sends.empty()) end_hold(q, l.relay);
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  if (const int err = real().modify_qp(q.real, &to, IBV_QP_STATE)) say(l, std::string("modify_qp to ERR: ") + std::strerror(err));
  flush(l);
  tell_gone(l);
}

bool path_is_in_err(QpShadow& q) {
  ibv_qp_attr now{};
  return switchover::ask_device(q, now, IBV_QP_STATE) || now.qp_state == IBV_QPS_ERR;
}

/// Puts down what has been answered, in order. @return false: it has failed
bool deliver(QpLink& l) {
  QpShadow& q = *l.q;
  Relay& r = l.relay;
  bool any = false;
  while (!r.asked.empty() && r.asked.front().status != kNotYet) {
    const auto [status, value] = r.asked.front();
    std::vector<std::pair<std::uint8_t*, std::uint32_t>> parts;
    if (status == kBadAccess) return fail(l, IBV_WC_REM_ACCESS_ERR, "the other end does not allow an atomic there"), false;
    if (status == kBadRequest) return fail(l, IBV_WC_REM_INV_REQ_ERR, "the other end does not take an atomic like that"), false;
    if (status != kExecuted) return fail(l, IBV_WC_RETRY_EXC_ERR, "the other end's devices could not execute an atomic: the application gets the error"), false;
    if (!word_of(q, r.sends.front(), parts)) return fail(l, IBV_WC_LOC_PROT_ERR, "memory was given back to which an atomic was to bring its answer"), false;
    std::uint8_t bytes[kAtomicBytes];
    std::memcpy(bytes, &value, sizeof bytes);
    const std::uint8_t* from = bytes;
    for (const auto& [at, length] : parts) std::memcpy(at, from, length), from += length;
    complete(q, r, IBV_WC_SUCCESS);
    r.since_ns = 0;
    any = true;
  }
  if (any) wake_for(q);
  return true;
}

/// Up to the next atomic, or what lacks a key. @param late the first has waited for its key as long as it may: the device has to say that
/// there is none. What cannot be posted ends the connection. @return how many
std::size_t post_waiting(QpLink& l, bool late) {
  QpShadow& q = *l.q;
  Relay& r = l.relay;
  std::size_t posted = 0;
  while (!r.sends.empty() && r.asked.empty() && !can_relay(q, r.sends.front()) && (!lacks_key(q, r.sends.front()) || std::exchange(late, false))) {
    const int err = path::post_one_send(q, r.sends.front());
    if (err == ENOMEM) return posted + 1;  // until one has completed
    if (err) return fail(l, IBV_WC_WR_FLUSH_ERR, std::string("what had to wait cannot be posted: ") + std::strerror(err)), posted;
    r.sends.pop_front();
    ++posted;
  }
  return posted;
}

Channel* way_to(const QpLink& l) {
  Channel* const here = standing(l, l.on);
  return here ? here : standing(l, next_side(l));
}

void ask(QpLink& l, Channel& c) {
  QpShadow& q = *l.q;
  Relay& r = l.relay;
  ibv_qp_attr at{};
  if (switchover::ask_device(q, at, switchover::kPsns)) return;
  std::vector<AtomicRecord> records;
  if (r.asked.empty())
    for (const KeptSend& s : r.sends) {
      if (r.asked.size() == kBatch || !can_relay(q, s)) break;
      r.asked.push_back({kNotYet, 0});
    }
  for (std::size_t i = 0; i < r.asked.size(); ++i) {
    const auto& wr = r.sends[i].wr;
    if (r.asked[i].status != kNotYet) continue;
    records.push_back({.to = l.peer, .from = l.name, .number = r.number + i, .known = r.number, .addr = wr.wr.atomic.remote_addr, .compare_add = wr.wr.atomic.compare_add, .swap = wr.wr.atomic.swap, .rkey = wr.wr.atomic.rkey, .adds = wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD, .behind = {.link = l.leg().link->index, .serial = l.path.serial, .psn = at.sq_psn & switchover::kPsnMask}, .reserved = 0});
  }
  r.over = &c;
  r.round = c.round;
  r.ask_ns = now_ns() + kAskAgainNs;
  send_atomics(c, records);
}

bool stands_still(const Relay& r, const Channel* c) { return c == r.over && c->round == r.round; }

}  // namespace

unsigned look_at_relay(QpLink& l) {
  QpShadow& q = *l.q;
  Relay& r = l.relay;
  const std::uint64_t now = now_ns();
  std::lock_guard guard(q.lock);
  r.rests = parking() || now < r.rest_until_ns;
  if (r.sends.empty()) return l.relays && r.rests ? kAnswerMs : 0;
  if (l.stage == Stage::kBroken || l.seen) {
    if (q.phase != switchover::Phase::kRunning) return kLookMs;
    if (l.seen || path_is_in_err(q)) return flush(l), 0;
    if (!deliver(l)) return 0;  // what was answered before that counts
    if (r.sends.empty()) end_hold(q, r);
    else fail(l, IBV_WC_RETRY_EXC_ERR, "the other end has given up, and so what waits for it");
    return 0;
  }
  if (!r.watched) {
    std::string why;
    if (switchover::wait_for_pollers(q, why)) return say(l, why), kLookMs;
    r.watched = true;
  }
  if (!calm(l)) return r.since_ns = 0, kLookMs;
  if (!deliver(l)) return 0;
  if (l.stage == Stage::kDraining) {
    if (r.sends.empty()) end_hold(q, r);  // what is posted from now on is kept by the drain
    return kLookMs;
  }
  const bool late = r.since_ns && now - r.since_ns > state()->config.switch_limit_ms * 1'000'000ull;
  const bool posted = post_waiting(l, late) != 0;
  if (l.stage == Stage::kBroken) return 0;
  if (r.sends.empty()) return end_hold(q, r), 0;
  if (posted) return r.since_ns = 0, kLookMs;
  if (!r.since_ns) r.since_ns = now;
  if (lacks_key(q, r.sends.front())) return kAnswerMs;  // whoever tells it wakes this thread
  if (late) {
    fail(l, IBV_WC_RETRY_EXC_ERR, "the other end has not executed an atomic for " + std::to_string(state()->config.switch_limit_ms) + " ms: the application gets the error");
    return 0;
  }
  Channel* const c = way_to(l);
  if (c && (r.asked.empty() || !stands_still(r, c) || (now > r.ask_ns && c->has_room()))) ask(l, *c);
  return r.ask_ns > now + 2 * kSoonNs ? kAnswerMs : kLookMs;
}

bool agree(QpLink& l, std::uint32_t atomics_there) {
  QpShadow& q = *l.q;
  if (l.relays || atomics_there != MIGR_LINKS_RELAYED || l.twin->atomics != Atomics::kRelayed || l.stage == Stage::kBroken) return true;
  if (!trap_posts(q)) return false;
  std::lock_guard guard(q.lock);
  l.relays = true;
  switchover::set_bits(q, kRelays);
  return true;
}

const char* why_direct(const QpLink& l) {
  if (l.relays || !l.twin->wants_relayed) return "";
  return l.twin->policy != Policy::kExact ? "atomics go direct: the policy is not exact" : l.agreed ? "atomics go direct: the other end says so"
                                                                                                    : "";
}

bool rest_relay(QpLink& l) {
  l.relay.rest_until_ns = now_ns() + kRestNs;
  std::lock_guard guard(l.q->lock);
  l.relay.rests = true;
  return l.relay.asked.empty() && (l.relay.sends.empty() || l.q->phase != switchover::Phase::kRunning);
}

void flush_relay(QpLink& l) {
  QpShadow& q = *l.q;
  std::lock_guard guard(q.lock);
  if (l.relay.sends.empty() || q.phase != switchover::Phase::kRunning) return;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  const ibv_qp_state state = q.real->state;
  if (!real().modify_qp(q.real, &to, IBV_QP_STATE)) flush(l);
  q.real->state = state;  // the application is about to
}

void end_relay(QpLink& l) {
  QpShadow& q = *l.q;
  if (l.relay.sends.empty()) return;
  if (q.phase != switchover::Phase::kRunning) give_back_waiting(q, q.cut ? q.cut->replays : 0);
  else take_all(q, l.relay);
}

void got_answer(Channel& from, const AnswerRecord& record) {
  QpLink* const l = addressee(from, record.to, record.from);
  if (!l || !l->relays) return;
  std::lock_guard guard(l->q->lock);
  Relay& r = l->relay;
  if (record.number < r.number || record.number - r.number >= r.asked.size()) return;  // once more
  Relay::Asked& asked = r.asked[record.number - r.number];
  if (asked.status != kNotYet) return;
  asked = {record.status, record.value};
  if (record.status == kNotYet) r.ask_ns = std::min(r.ask_ns, now_ns() + kSoonNs);
}

/* ---- who answers -------------------------------------------------------------------- */

/// Executes atomics in the memory of one PD by one NIC, which so has them in one order with all others: a QP that is connected to
/// another one of ours. One at a time.
struct Executor {
  Executor(Twin& t, const ibv_pd* app, Side s) : twin(&t), of(app), side(s), link(t.link(s)) {}
  Twin* const twin;
  const ibv_pd* const of;  ///< the application's
  const Side side;
  Link* const link;
  ibv_cq* cq = nullptr;  ///< of `target`, where nothing ever completes; null: not needed
  ibv_qp *source = nullptr, *target = nullptr;
  std::uint64_t word = 0;
  ibv_mr* mr = nullptr;
  std::uint32_t psn = 0;  ///< of the next
  struct Job {
    std::uint64_t id, number;  ///< of QpLink
    AtomicRecord what;
    std::uint64_t until_ns;  ///< no device is tried after that, unless it is asked for again
    bool rested = false;     ///< and why was said
  };
  std::deque<Job> jobs;             ///< the first is posted, or rests
  std::string why;                  ///< the first could not be posted: said once
  std::uint64_t rest_until_ns = 0;  ///< no device could execute one, and none has: all are tried again then. 0: the first is posted
};

namespace {

void answer(const QpLink& l, const Answers::One& one) {
  if (Channel* c = way_to(l)) send_answer(*c, {.to = l.peer, .from = l.name, .number = one.number, .value = one.value, .status = one.status, .reserved = 0});
}

MrShadow* memory_of(const QpShadow& q, std::uint32_t rkey) {
  for (MrShadow* mr : Registry::get().mrs)
    if (mr->context == q.context && mr->app.rkey == rkey && mr->app.pd == q.init.pd) return mr;
  return nullptr;
}

/// As a NIC would look at it.
AtomicStatus check(const QpShadow& q, const AtomicRecord& r) {
  if (r.adds > 1 || r.addr % kAtomicBytes || q.access_flags < 0 || !(q.access_flags & IBV_ACCESS_REMOTE_ATOMIC)) return kBadRequest;
  const MrShadow* const mr = memory_of(q, r.rkey);
  if (!mr || !(mr->access & IBV_ACCESS_REMOTE_ATOMIC) || r.addr < mr->iova) return kBadAccess;
  const std::uint64_t offset = r.addr - mr->iova;
  return mr->app.length < kAtomicBytes || offset > mr->app.length - kAtomicBytes ? kBadAccess : kExecuted;
}

/// All that its sender has posted before was executed here.
bool has_executed(const QpLink& l, const Progress& before) {
  QpShadow& q = *l.q;
  if (l.stage == Stage::kBroken || l.stage == Stage::kChanging || q.adrift || l.leg().link->index != before.link || l.path.serial != before.serial) return false;
  ibv_qp_attr at{};
  return !switchover::ask_device(q, at, switchover::kPsns) && (at.rq_psn & switchover::kPsnMask) == before.psn;
}

void close(Executor& e) {
  for (ibv_qp** qp : {&e.source, &e.target}) switchover::destroy_real(*qp);
  if (e.mr) real().dereg_mr(std::exchange(e.mr, nullptr));
  if (e.cq) real().destroy_cq(std::exchange(e.cq, nullptr));
}

bool open(Executor& e, std::string& why) {
  if (e.source) return true;
  Link& link = *e.link;
  const bool home = e.side == kHome;
  if (!link.ctx) return why = link.config.device + " is not open", false;
  ibv_pd* const pd = e.twin->pd(const_cast<ibv_pd*>(e.of), e.side);
  if (!pd) return why = "a PD is not there yet on " + link.config.device, false;
  ibv_context* const ctx = home ? e.twin->of->real : link.ctx;
  e.mr = real().reg_mr_iova2(link.pd, &e.word, sizeof e.word, reinterpret_cast<std::uintptr_t>(&e.word), IBV_ACCESS_LOCAL_WRITE);
  e.cq = events::with_kernel_fd(*ctx, [&] { return real().create_cq(ctx, 1, nullptr, nullptr, 0); });
  ibv_qp_init_attr init{};
  init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.send_cq = init.recv_cq = link.cq;
  if (e.mr && e.cq) e.source = create_on(link.pd, init, link.config.port, 0, why);
  else why = std::string("memory or a CQ for atomics: ") + std::strerror(errno);
  init.send_cq = init.recv_cq = e.cq;
  if (e.source) e.target = events::with_kernel_fd(*ctx, [&] { return create_on(pd, init, link.config.port, IBV_ACCESS_REMOTE_ATOMIC, why); });
  e.psn = switchover::random_psn();
  if (e.target && connect_to_own(link, e.target, e.source, e.psn, why) && connect_to_own(link, e.source, e.target, e.psn, why)) return true;
  close(e);
  return false;
}

/// The first job. @return false: it cannot be, and was not executed
bool post(Executor& e, const QpShadow& q, std::string& why) {
  const AtomicRecord& what = e.jobs.front().what;
  const MrShadow* const memory = memory_of(q, what.rkey);
  const ibv_mr* const there = memory ? memory->on(e.side) : nullptr;
  if (!there) return why = "its memory is not there", false;
  if (!open(e, why)) return false;
  ibv_sge sge{reinterpret_cast<std::uint64_t>(&e.word), kAtomicBytes, e.mr->lkey};
  ibv_send_wr wr{}, *bad;
  wr.opcode = what.adds ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.wr.atomic = {.remote_addr = what.addr, .compare_add = what.compare_add, .swap = what.swap, .rkey = there->rkey};
  const int err = e.link->ops.post_send(e.source, &wr, &bad);
  if (err) why = std::string("post_send of an atomic: ") + std::strerror(err);
  return !err;
}

Executor& executor_of(Twin& t, const ibv_pd* pd, Side side) {
  for (Executor* e : t.executors)
    if (e->of == pd && e->side == side) return *e;
  return *t.executors.emplace_back(new Executor(t, pd, side));
}

/// Of the first link that works.
Executor& first_executor(const QpLink& l) {
  Side side = kHome;
  while (side + 1 < l.sides() && l.legs[side].link->down()) ++side;
  return executor_of(*l.twin, l.q->init.pd, side);
}

/// That is at work; else of the first link that works.
Executor& next_executor(const QpLink& l) {
  const ibv_pd* const pd = l.q->init.pd;
  for (Executor* e : l.twin->executors)
    if (e->of == pd && !e->jobs.empty()) return *e;
  return first_executor(l);
}

void end_job(Executor& e, AtomicStatus status);

void begin_job(Executor& e) {
  while (!e.jobs.empty()) {
    std::string why;
    const QpLink* const l = find(e.jobs.front().id);
    if (l && post(e, *l->q, why)) return e.why.clear();
    if (!l) {
      e.jobs.pop_front();
      continue;
    }
    if (e.why != why && !e.jobs.front().rested) say(*l, e.link->config.device + " cannot execute an atomic: " + why);
    e.why = why;
    return end_job(e, kNotYet);
  }
}

void add_job(Executor& e, const Executor::Job& job) {
  e.jobs.push_back(job);
  if (e.jobs.size() == 1) begin_job(e);
}

/// All, in their order. None of that PD is at work but `from`, where the first one has ended.
void move_jobs(Executor& from, Executor& to) {
  to.jobs = std::exchange(from.jobs, {});
  begin_job(to);
}

/// A link may be away for a moment. Whoever wants the atomic may have waited as long as it does; and memory that is gone does not come back.
bool may_be_executed_later(const QpLink& l, const Executor::Job& job) {
  return l.stage != Stage::kBroken && now_ns() < job.until_ns && memory_of(*l.q, job.what.rkey);
}

/// @param status  kNotYet: it was not executed. Then the next link's device may; after the last one all of them, once more
void end_job(Executor& e, AtomicStatus status) {
  const Executor::Job job = e.jobs.front();
  QpLink* const l = find(job.id);
  if (l && status == kNotYet && e.side + 1 < l->sides()) return move_jobs(e, executor_of(*l->twin, e.of, e.side + 1));
  if (l && status == kNotYet && may_be_executed_later(*l, job)) {
    e.jobs.front().rested = true;
    std::stable_partition(e.jobs.begin(), e.jobs.end(), [&](const Executor::Job& j) { return j.id != job.id; });  // it keeps none of another vQP's back
    e.rest_until_ns = now_ns() + kRestBetweenNs;
    return;
  }
  e.jobs.pop_front();
  if (l) {
    for (Answers::One& one : l->answers.all)
      if (one.number == job.number && one.status == kNotYet) {
        one.status = status == kNotYet ? kLost : status;
        one.value = e.word;
        answer(*l, one);
      }
  }
  begin_job(e);
}

std::uint64_t wanted_until() { return now_ns() + state()->config.switch_limit_ms * 1'000'000ull; }

/// Its sender has asked once more, so it waits still.
void note_wanted(const QpLink& l, std::uint64_t number) {
  for (Executor* e : l.twin->executors)
    for (Executor::Job& job : e->jobs)
      if (job.id == l.id && job.number == number) job.until_ns = wanted_until();
}

/// What a NIC does with a request that it does not take.
void refuse_atomic(QpLink& l, const Answers::One& one) {
  l.answers.closed = true;
  answer(l, one);
  say(l, "the other end wanted an atomic where none is allowed: the connection ends");
  set_stage(l, Stage::kBroken);
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  real().modify_qp(l.q->real, &to, IBV_QP_STATE);
}

}  // namespace

void got_atomic(Channel& from, const AtomicRecord& record) {
  QpLink* const l = addressee(from, record.to, record.from);
  const auto not_yet = [&] { send_answer(from, {.to = record.from, .from = record.to, .number = record.number, .value = 0, .status = kNotYet, .reserved = 0}); };
  if (is_premature(record.to, record.from) || !l) return not_yet();
  Answers& a = l->answers;
  std::erase_if(a.all, [&](const Answers::One& one) { return one.number < record.known && one.status != kNotYet; });
  const auto known = std::find_if(a.all.begin(), a.all.end(), [&](const Answers::One& one) { return one.number == record.number; });
  if (known != a.all.end() && !(forgets_answers() && known->status == kExecuted)) {
    return known->status == kNotYet ? note_wanted(*l, record.number) : answer(*l, *known);
  }
  const bool again = known != a.all.end();  // a test's
  if (again) a.all.erase(known);
  else if (record.number < a.next || a.closed) return;  // of long ago; or its sender will hear why
  if ((!again && record.number != a.next) || a.all.size() >= kMostAnswers || l->twin->atomics != Atomics::kRelayed || !has_executed(*l, record.behind)) return not_yet();
  if (!again) ++a.next;
  const AtomicStatus status = check(*l->q, record);
  a.all.push_back({record.number, status == kExecuted ? kNotYet : status, 0});
  if (status != kExecuted) return refuse_atomic(*l, a.all.back());
  add_job(next_executor(*l), {.id = l->id, .number = record.number, .what = record, .until_ns = wanted_until()});
}

void executed(Link& link, const ibv_wc& wc) {
  for (Twin* t : state()->twins)
    for (Executor* e : t->executors) {
      if (e->link != &link || !e->source || e->source->qp_num != wc.qp_num || e->jobs.empty()) continue;
      const std::uint32_t psn = e->psn;
      e->psn = (psn + 1) & switchover::kPsnMask;
      if (wc.status == IBV_WC_SUCCESS) return end_job(*e, kExecuted);
      ibv_qp_attr at{};
      ibv_qp_init_attr init{};
      at.qp_state = IBV_QPS_RESET;  // else it might execute what is still on its way when it has been asked
      const bool known = !real().modify_qp(e->target, &at, IBV_QP_STATE) && !real().query_qp(e->target, &at, switchover::kPsns, &init);
      close(*e);
      if (wc.status == IBV_WC_REM_ACCESS_ERR) return end_job(*e, kBadAccess);
      if (wc.status == IBV_WC_REM_INV_REQ_ERR) return end_job(*e, kBadRequest);
      const bool not_executed = known && (at.rq_psn & switchover::kPsnMask) == psn;
      return end_job(*e, not_executed ? kNotYet : kLost);
    }
}

unsigned look_at_executors() {
  unsigned soon = 0;
  for (Twin* t : state()->twins)
    for (std::size_t i = 0; i < t->executors.size(); ++i) {  // there may be more of them meanwhile
      Executor& e = *t->executors[i];
      if (!e.rest_until_ns) continue;
      soon = kAnswerMs;
      if (now_ns() < e.rest_until_ns) continue;
      e.rest_until_ns = 0;
      const QpLink* const l = find(e.jobs.front().id);
      if (!l || !may_be_executed_later(*l, e.jobs.front())) end_job(e, kNotYet);
      else move_jobs(e, first_executor(*l));
    }
  return soon;
}

void lose_answers(QpLink& l) {
  const auto executing = [&](std::uint64_t number) {
    return std::any_of(l.twin->executors.begin(), l.twin->executors.end(), [&](const Executor* e) {
      return std::any_of(e->jobs.begin(), e->jobs.end(), [&](const Executor::Job& job) { return job.id == l.id && job.number == number; });
    });
  };
  for (Answers::One& one : l.answers.all)
    if (one.status == kNotYet && !executing(one.number)) one.status = kLost;
}

void drop_executors(Twin& t, const ibv_pd* pd) {
  std::erase_if(t.executors, [&](Executor* e) {
    if (pd && e->of != pd) return false;
    close(*e);
    delete e;
    return true;
  });
}

}  // namespace migr::links
