// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// RDMA traffic in both directions of which every completion and every byte is checked, at both ends. Each end posts a
// stream of WRs per QP that is a function of seed, QP and direction (verify/check.h), so the other end knows what must
// come. It writes back, by RDMA, how far it has checked; nobody runs further ahead than the rings hold.
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

#include "verify/churn.h"
#include "verify/fabric.h"
#include "verify/report.h"

namespace verify {
namespace {

volatile std::sig_atomic_t g_stop = 0;

constexpr int kPollBatch = 16;
constexpr int kSpins = 200;                    // empty rounds before the processor is given away for a moment
constexpr int kNapUs = 100, kRatedNapUs = 4000;
constexpr double kRateBurstS = 0.05;           // --rate: what may be posted at once after a pause
constexpr int kEventWaitMs = 20, kWindowWaitMs = 2;
constexpr int kEventGraceMs = 10000;           // a completion without its event for so long: the event is lost
constexpr std::int64_t kHousekeepingUs = 5000, kStatusUs = 500000, kFilesUs = 50000;
constexpr std::uint64_t kResizes = 3;
constexpr std::int64_t kResizeUs = 200000;
constexpr std::int64_t kMaxStepUs = 1000000;   // a longer step of the clock is a time in which we did not run
constexpr std::int64_t kLossyWaitUs = 1000000; // blocked for so long: what the window waits for was lost
constexpr std::uint64_t kLossyGrant = 4;
constexpr std::int64_t kLossyTailUs = 4000000; // nothing has come for so long: nothing will
constexpr double kSetupLimit = 60, kSetupLimitPerQp = 0.05, kVerifyLimit = 180, kWithoutRdmaLimit = 3600;

// Soft-RoCE leaves the kernel's flag in completions, whose number is another one's in user space.
constexpr unsigned kWithInv = IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK;

WcOp wc_op_of(ibv_wc_opcode o) {
  switch (o) {
    case IBV_WC_SEND: return WcOp::kSend;
    case IBV_WC_RDMA_WRITE:
    case IBV_WC_ATOMIC_WRITE: return WcOp::kWrite;
    case IBV_WC_RDMA_READ: return WcOp::kRead;
    case IBV_WC_COMP_SWAP: return WcOp::kCmpSwap;
    case IBV_WC_FETCH_ADD: return WcOp::kFetchAdd;
    case IBV_WC_RECV: return WcOp::kRecv;
    case IBV_WC_RECV_RDMA_WITH_IMM: return WcOp::kRecvImm;
    default: return WcOp::kOther;
  }
}

/// A file that an option may name; none is not.
bool is_there(const std::string& file) { return !file.empty() && access(file.c_str(), F_OK) == 0; }

/// The connection broke or a verb failed: the run ends here. Its text becomes a fault.
struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One QP and what is known about its two streams.
struct Lane {
  Lane(std::uint32_t i, std::uint32_t qpn, Stream out, Stream in)
      : stream(std::move(out)), send(i, qpn), recv(i, qpn, std::move(in)) {}
  Stream stream;              // what we post
  SendChecker send;
  RecvChecker recv;
  AtomicModel atomics;
  std::uint64_t next = 0;     // WR of the stream to post next
  std::uint64_t completed = 0;  // of the stream's WRs, with success
  bool broken = false;        // one has ended with an error
  std::uint64_t acked = 0;    // written to the partner, and known to be there or in flight
  bool ack_in_flight = false;
  bool blocked = false;       // by the window
  std::uint64_t granted = 0;  // lossy: beyond the window, since nothing has come for long
  std::int64_t blocked_since = 0;
  // --invalidate: lives of the partner's window that we have ended, the last one by this WR of the stream; of ours.
  std::uint64_t ended = 0, ended_by = 0, lost = 0;
};

class Run {
 public:
  Run(const Options& o, Control& control, bool client);
  void traffic();
  void verify();
  std::uint64_t exchange_results();
  /// Without RDMA, until the stop.
  void without_rdma();
  bool closes() const { return closing_; }
  Json summary() const;
  void abort_partner(const std::string& why);
  /// Where the connection broke nobody knows how many of the partner's atomics came; but those that did came once.
  void check_atomics_of_broken();
  ibv_context* context() { return f_.context.get(); }
  Faults& faults() { return faults_; }
  const Samples& samples() const { return samples_; }

 private:
  enum class Phase { kRunning, kDraining, kDone };
  struct Progress {
    std::uint64_t completed, posted;  // WRs of a stream
  };

  std::vector<Progress> exchange_progress();

  void post_receive(std::uint32_t i);
  void post_shared(std::uint32_t slot);
  std::uint32_t scatter(std::uint8_t* at, std::uint64_t n, std::uint64_t key, ibv_sge* sge) const;
  void on_shared_receive(const ibv_wc& wc, Done d);
  void watch_srq();
  bool post_stream(std::uint32_t i);
  void post_ack(std::uint32_t i);
  void tell_checked();
  std::uint64_t window_of(Lane& l, std::uint64_t checked);
  void post_list(std::uint32_t i, const Op* ops, std::uint32_t n);
  void post_by_wr_api(ibv_qp* qp, const ibv_send_wr* wr);
  void fill_wr(std::uint32_t i, const Op& op, ibv_send_wr& wr, ibv_sge* sge);
  int poll_cqs();
  int poll_ex(ibv_cq_ex* cq, ibv_wc* wc) const;
  void on_invalidated(std::uint32_t i, std::uint32_t rkey);
  void on_error(const ibv_wc& wc);
  void on_completion(const ibv_wc& wc);
  void on_retired(std::uint32_t i, const SendChecker::Posted& p);
  void on_messages();
  void housekeeping();
  void look_for_files();
  void tick();
  void idle(bool nothing);
  void sleep_on_channel();
  bool take_events(int wait_ms, bool or_message);
  void request_stop(bool close_only);
  bool told_to_stop();
  void advance_phase();
  bool may_finish() const;
  std::string where() const;
  std::uint8_t* local_slot(std::uint32_t i, std::uint64_t n) const {
    return f_.local.data() + f_.ring_bytes() * i + n % f_.shape.window() * f_.shape.size;
  }
  std::uint8_t* recv_slot(std::uint32_t i, std::uint64_t n) const {
    return f_.recv.data() + f_.ring_bytes() * i + n % f_.recv_slots * f_.shape.size;
  }

  static Shape agree(const Options& o, Control& c, bool client);

  const Options& options_;
  Control& control_;
  const bool client_;
  Fabric f_;
  Faults faults_;
  Samples samples_;
  std::vector<Lane> lanes_;
  SharedReceives shared_;
  std::uint64_t srq_used_ = 0, srq_events_ = 0, srq_used_at_arming_ = 0;
  std::uint64_t resizes_ = 0;
  std::int64_t next_resize_ = 0;
  std::int64_t srq_due_ = 0;  // since when its event is overdue; 0: it is not
  std::vector<EventChecker> cq_events_;
  std::vector<std::uint64_t> partner_totals_;
  Phase phase_ = Phase::kRunning;
  bool only_answers_ = !options_.rts_file.empty();  // --rts-file: its QPs are in RTR
  bool resting_ = false;  // --rest-file
  bool stopping_ = false, closing_ = false, closed_ = false, fin_sent_ = false, done_sent_ = false, partner_done_ = false;
  int idle_rounds_ = 0;
  std::int64_t now_ = 0, last_now_ = 0, elapsed_us_ = 0, idle_us_ = 0;
  std::int64_t next_house_ = 0, next_status_ = 0, next_files_ = 0;
  std::int64_t last_receive_us_ = 0;
  std::uint64_t bytes_ = 0, events_ = 0;
  std::string broken_;  // what the first completion with an error says
  bool counting_ = false;  // such completions do not end the run: it has ended
  std::uint64_t failed_ = 0, retry_exceeded_ = 0;  // of them, but for those that were flushed
  std::uint64_t unanswered_least_ = 0, unanswered_most_ = 0;  // of the partner's atomics, which were executed
  double budget_ = 0;  // --rate: WRs that may be posted now
};

/// Both ends say what they can; the client's shape counts, cut down to what both can do.
Shape Run::agree(const Options& o, Control& c, bool client) {
  struct Hello {
    std::uint32_t version, bytes;
    Shape shape;
  } h{1, sizeof(Hello), o.shape};
  const auto take = [](const std::string& body) {
    Hello x;
    if (body.size() != sizeof x) throw PeerError("the other end is a migr_verify of another version");
    std::memcpy(&x, body.data(), sizeof x);
    const Shape& s = x.shape;
    if (x.version != 1 || s.qps < 1 || s.qps > kMaxQps || s.size < kHeaderBytes || s.size > 1u << 20 || s.depth < 4 ||
        s.depth > 512 || s.inline_max > 128 || s.mode >= Mode::kCount || s.transport >= Transport::kCount)
      throw PeerError("the other end asks for a run that this version cannot do");
    return x;
  };
  if (client) {
    c.send(Msg::kHello, std::string(reinterpret_cast<const char*>(&h), sizeof h));
    return take(c.expect(Msg::kAccept, kSetupLimit)).shape;
  }
  Hello x = take(c.expect(Msg::kHello, kSetupLimit));
  c.send(Msg::kAccept, std::string(reinterpret_cast<const char*>(&x), sizeof x));
  return x.shape;
}

Run::Run(const Options& o, Control& control, bool client)
    : options_(o), control_(control), client_(client), f_(o, agree(o, control, client)) {
  const Shape& s = f_.shape;
  if (s.mode == Mode::kInline && f_.inline_max < s.inline_max)
    throw SetupError("this device takes " + std::to_string(f_.inline_max) + " bytes inline, mode inline needs " +
                     std::to_string(s.inline_max));
  if (f_.inline_max < s.inline_max) throw SetupError("this device takes less than 128 bytes inline");
  cq_events_.resize(f_.cqs.size());
  for (std::uint32_t i = 0; i < s.qps; ++i) {
    lanes_.emplace_back(i, f_.qpn[i], Stream(s, stream_key(s.seed, i, client)), Stream(s, stream_key(s.seed, i, !client)));
    // What the partner may read: one pattern per slot, never changed.
    for (std::uint32_t slot = 0; slot < s.window(); ++slot)
      pattern_fill(f_.readable.data() + f_.ring_bytes() * i + static_cast<std::size_t>(slot) * s.size, s.size,
                   ~stream_key(s.seed, i, client), slot);
  }
  control_.send(Msg::kConnect, f_.address());
  const double limit = kSetupLimit + kSetupLimitPerQp * s.qps;
  f_.connect(control_.expect(Msg::kConnect, limit));
  for (std::uint32_t i = 0; !f_.srq && i < s.qps; ++i)
    for (std::uint32_t n = 0; n < f_.recv_slots; ++n) post_receive(i);
  for (std::uint32_t slot = 0; f_.srq && slot < f_.shared_slots(); ++slot) post_shared(slot);
  if (f_.srq) f_.arm_srq();
  control_.send(Msg::kReady);
  control_.expect(Msg::kReady, limit);
}

// --- posting

void Run::post_receive(std::uint32_t i) {
  Lane& l = lanes_[i];
  const std::uint64_t n = l.recv.posted();
  ibv_sge sge[kMaxSge];
  ibv_recv_wr wr{}, *bad = nullptr;
  wr.num_sge = static_cast<int>(scatter(recv_slot(i, n), n, l.stream.key(), sge));
  wr.wr_id = l.recv.post();
  wr.sg_list = sge;
  if (const int e = ibv_post_recv(f_.qps[i].get(), &wr, &bad))
    throw RunError("ibv_post_recv on QP " + std::to_string(i) + ": " + std::strerror(e));
}

void Run::post_shared(std::uint32_t slot) {
  ibv_sge sge[kMaxSge];
  ibv_recv_wr wr{}, *bad = nullptr;
  wr.num_sge = static_cast<int>(scatter(f_.recv.data() + static_cast<std::size_t>(slot) * f_.shape.size, srq_used_, slot, sge));
  wr.wr_id = shared_.post(slot);
  wr.sg_list = sge;
  if (const int e = ibv_post_srq_recv(f_.srq.get(), &wr, &bad)) throw RunError(std::string("ibv_post_srq_recv: ") + std::strerror(e));
}

/// The pieces of one receive. @return how many
std::uint32_t Run::scatter(std::uint8_t* at, std::uint64_t n, std::uint64_t key, ibv_sge* sge) const {
  const Shape& s = f_.shape;
  std::uint32_t pieces = 1;
  if (s.mode == Mode::kSg || s.mode == Mode::kMixed) pieces = 1 + static_cast<std::uint32_t>(mix(n ^ key) % kMaxSge);
  const std::uint32_t step = s.size / pieces;
  for (std::uint32_t k = 0; k < pieces; ++k) {
    sge[k].addr = reinterpret_cast<std::uintptr_t>(at + static_cast<std::size_t>(k) * step);
    sge[k].length = k + 1 == pieces ? s.size - k * step : step;
    sge[k].lkey = f_.recv_mr[k & 1]->lkey;
  }
  return pieces;
}

void Run::fill_wr(std::uint32_t i, const Op& op, ibv_send_wr& wr, ibv_sge* sge) {
  Lane& l = lanes_[i];
  wr = {};
  if (op.signalled) wr.send_flags |= IBV_SEND_SIGNALED;
  if (op.use_inline) wr.send_flags |= IBV_SEND_INLINE;
  wr.sg_list = sge;
  const std::uint64_t words = f_.partner.words + i * sizeof(Words);
  if (op.kind == Kind::kAck) {
    Words* const w = f_.words_of(i);
    w->ack_out = op.seq;
    sge[0] = {reinterpret_cast<std::uintptr_t>(&w->ack_out), 8, f_.words_mr->lkey};
    wr.num_sge = 1;
    wr.opcode = options_.atomic_write ? IBV_WR_ATOMIC_WRITE : IBV_WR_RDMA_WRITE;
    wr.wr.rdma.remote_addr = words + offsetof(Words, ack);
    wr.wr.rdma.rkey = f_.partner.words_rkey;
    wr.wr_id = l.send.post(op);
    return;
  }
  std::uint8_t* const at = local_slot(i, op.seq);
  std::uint64_t returned = 0;
  if (consumes(op.kind) || writes(op.kind)) pattern_fill(at, op.len, l.stream.key(), op.seq);
  else std::memset(at, 0xa5, op.len);
  std::uint32_t pieces = std::min(op.sges, op.len / 4);
  // rxe of rdma-core 44 takes the first length of an ibv_wr_set_sge_list() for that of all, and sends nothing of an
  // ibv_wr_set_inline_data_list().
  if (options_.wr_api && op.use_inline) pieces = 1;
  if (options_.wr_api)
    while (op.len % pieces) --pieces;
  const std::uint32_t step = op.len / pieces;
  for (std::uint32_t k = 0; k < pieces; ++k) {
    sge[k].addr = reinterpret_cast<std::uintptr_t>(at + static_cast<std::size_t>(k) * step);
    sge[k].length = k + 1 == pieces ? op.len - k * step : step;
    sge[k].lkey = f_.local_mr[(op.seq + k) & 1]->lkey;
  }
  wr.num_sge = static_cast<int>(pieces);
  const std::uint64_t ring = f_.ring_bytes() * i + static_cast<std::uint64_t>(op.slot) * f_.shape.size;
  switch (op.kind) {
    case Kind::kSend:
      wr.opcode = IBV_WR_SEND;
      // It is bound anew once the partner has seen what ended it.
      if (f_.partner_qps[i].spare_rkey && (!l.ended || __atomic_load_n(&f_.words_of(i)->ack, __ATOMIC_ACQUIRE) > l.ended_by)) {
        wr.opcode = IBV_WR_SEND_WITH_INV;
        wr.invalidate_rkey = spare_key(f_.partner_qps[i].spare_rkey, l.ended++);
        l.ended_by = op.seq;
      }
      break;
    case Kind::kSendImm: wr.opcode = IBV_WR_SEND_WITH_IMM; break;
    case Kind::kWrite: wr.opcode = IBV_WR_RDMA_WRITE; break;
    case Kind::kWriteImm: wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM; break;
    case Kind::kRead: wr.opcode = IBV_WR_RDMA_READ; break;
    default: {
      const AtomicModel::Step step_of = l.atomics.apply(op);
      returned = step_of.returned;
      wr.opcode = op.kind == Kind::kCmpSwap ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD;
      wr.wr.atomic.compare_add = op.kind == Kind::kCmpSwap ? step_of.compare : op.arg;
      wr.wr.atomic.swap = op.kind == Kind::kCmpSwap ? op.arg : 0;
      wr.wr.atomic.rkey = f_.partner.words_rkey;
      wr.wr.atomic.remote_addr = op.kind == Kind::kCmpSwap ? words + offsetof(Words, swap)
                                 : op.shared               ? f_.partner.words + offsetof(Words, shared)
                                                           : words + offsetof(Words, sum);
    }
  }
  if (writes(op.kind)) {
    wr.wr.rdma.remote_addr = f_.partner.target + ring;
    wr.wr.rdma.rkey = f_.partner_qps[i].target_rkey;
  } else if (op.kind == Kind::kRead) {
    wr.wr.rdma.remote_addr = f_.partner.readable + ring;
    wr.wr.rdma.rkey = f_.partner.readable_rkey;
  }
  if (has_imm(op.kind)) wr.imm_data = htobe32(op.imm);
  wr.wr_id = l.send.post(op, returned);
}

void Run::post_by_wr_api(ibv_qp* qp, const ibv_send_wr* first) {
  ibv_qp_ex* const x = ibv_qp_to_qp_ex(qp);
  ibv_wr_start(x);
  for (const ibv_send_wr* wr = first; wr; wr = wr->next) {
    x->wr_id = wr->wr_id;
    x->wr_flags = wr->send_flags;  // with IBV_SEND_INLINE: rxe of rdma-core 44 wants it here
    const auto& rdma = wr->wr.rdma;
    const auto& atomic = wr->wr.atomic;
    switch (wr->opcode) {
      case IBV_WR_SEND: ibv_wr_send(x); break;
      case IBV_WR_SEND_WITH_IMM: ibv_wr_send_imm(x, wr->imm_data); break;
      case IBV_WR_RDMA_WRITE: ibv_wr_rdma_write(x, rdma.rkey, rdma.remote_addr); break;
      case IBV_WR_RDMA_WRITE_WITH_IMM: ibv_wr_rdma_write_imm(x, rdma.rkey, rdma.remote_addr, wr->imm_data); break;
      case IBV_WR_RDMA_READ: ibv_wr_rdma_read(x, rdma.rkey, rdma.remote_addr); break;
      case IBV_WR_ATOMIC_WRITE: ibv_wr_atomic_write(x, rdma.rkey, rdma.remote_addr, reinterpret_cast<const void*>(wr->sg_list[0].addr)); continue;
      case IBV_WR_ATOMIC_FETCH_AND_ADD: ibv_wr_atomic_fetch_add(x, atomic.rkey, atomic.remote_addr, atomic.compare_add); break;
      default: ibv_wr_atomic_cmp_swp(x, atomic.rkey, atomic.remote_addr, atomic.compare_add, atomic.swap); break;
    }
    if (wr->send_flags & IBV_SEND_INLINE) {
      ibv_wr_set_inline_data(x, reinterpret_cast<void*>(wr->sg_list[0].addr), wr->sg_list[0].length);
    } else if (wr->num_sge == 1) {
      ibv_wr_set_sge(x, wr->sg_list[0].lkey, wr->sg_list[0].addr, wr->sg_list[0].length);
    } else {
      ibv_wr_set_sge_list(x, static_cast<std::size_t>(wr->num_sge), wr->sg_list);
    }
  }
  if (const int e = ibv_wr_complete(x)) throw RunError(std::string("ibv_wr_complete: ") + std::strerror(e));
}

constexpr std::uint32_t kMaxList = 4;

void Run::post_list(std::uint32_t i, const Op* ops, std::uint32_t n) {
  ibv_send_wr wr[kMaxList];
  ibv_sge sge[kMaxList][kMaxSge];
  for (std::uint32_t k = 0; k < n; ++k) {
    fill_wr(i, ops[k], wr[k], sge[k]);
    wr[k].next = nullptr;
    if (k) wr[k - 1].next = &wr[k];
  }
  if (options_.wr_api) {
    post_by_wr_api(f_.qps[i].get(), wr);
  } else {
    ibv_send_wr* bad = nullptr;
    if (const int e = ibv_post_send(f_.qps[i].get(), wr, &bad))
      throw RunError("ibv_post_send on QP " + std::to_string(i) + ": " + std::strerror(e));
  }
  // Inline data was taken by the call: the buffer is ours again at once.
  for (std::uint32_t k = 0; k < n; ++k)
    if (ops[k].use_inline && ops[k].kind != Kind::kAck) std::memset(local_slot(i, ops[k].seq), 0xee, ops[k].len);
}

bool Run::post_stream(std::uint32_t i) {
  Lane& l = lanes_[i];
  l.blocked = false;
  if (only_answers_ || resting_ || stopping_ || (f_.shape.iterations && l.next >= f_.shape.iterations)) return false;
  if (f_.shape.rate && budget_ < 1) {
    l.blocked = true;
    return false;
  }
  const std::uint64_t checked = __atomic_load_n(&f_.words_of(i)->ack, __ATOMIC_ACQUIRE);
  if (checked > l.next) throw RunError("QP " + std::to_string(i) + ": the partner acknowledges WR " + std::to_string(checked) +
                                       ", but only " + std::to_string(l.next) + " were posted");
  // One or several in a list, depending on how the stream stands.
  const std::uint32_t want = 1 + static_cast<std::uint32_t>(mix(l.next ^ ~l.stream.key()) % kMaxList);
  Op ops[kMaxList];
  std::uint32_t n = 0;
  while (n < want && l.send.in_flight() + n < f_.shape.depth) {
    if (f_.shape.iterations && l.next >= f_.shape.iterations) break;
    if (l.stream.windowed() && l.next >= checked + window_of(l, checked)) {
      l.blocked = true;
      break;
    }
    ops[n++] = l.stream.at(l.next++);
  }
  budget_ -= n;
  if (n) post_list(i, ops, n);
  return n != 0;
}

/// How far the stream may be ahead. Of a transport that loses, what would move the window may have been lost.
std::uint64_t Run::window_of(Lane& l, std::uint64_t checked) {
  const std::uint64_t window = f_.shape.window();
  if (!f_.shape.lossy()) return window;
  if (l.next < checked + window + l.granted) {
    l.blocked_since = 0;
    if (l.next < checked + window) l.granted = 0;
  } else if (!l.blocked_since) {
    l.blocked_since = elapsed_us_;
  } else if (elapsed_us_ - l.blocked_since > kLossyWaitUs) {
    l.granted += kLossyGrant;
    l.blocked_since = 0;
  }
  return window + l.granted;
}

void Run::tell_checked() {
  std::string body;
  for (Lane& l : lanes_) {
    l.acked = l.recv.checked();
    body.append(reinterpret_cast<const char*>(&l.acked), 8);
  }
  control_.send(Msg::kChecked, body);
}

/// Tells the partner how far its stream has been checked; with nothing to tell it is the signalled end of our stream.
void Run::post_ack(std::uint32_t i) {
  Lane& l = lanes_[i];
  Op op{};
  op.kind = Kind::kAck;
  op.seq = l.recv.checked();
  op.len = 8;
  op.signalled = op.use_inline = true;
  l.acked = op.seq;
  l.ack_in_flight = true;
  post_list(i, &op, 1);
}

// --- completions

int Run::poll_cqs() {
  int found = 0;
  ibv_wc wc[kPollBatch];
  for (std::size_t q = 0; q < f_.cqs.size(); ++q) {
    const int n = f_.cqs_ex.empty() ? ibv_poll_cq(f_.cqs[q].get(), kPollBatch, wc) : poll_ex(f_.cqs_ex[q], wc);
    if (n < 0) throw RunError("ibv_poll_cq failed: " + std::to_string(n));
    cq_events_[q].polled(n);
    for (int k = 0; k < n; ++k) on_completion(wc[k]);
    found += n;
  }
  if (!broken_.empty() && !counting_) throw RunError(broken_);
  return found;
}

/// A session for each completion: rxe of rdma-core 44 goes one too far in ibv_end_poll() after an ibv_next_poll() that found none.
/// @return how many, or a negative errno
int Run::poll_ex(ibv_cq_ex* cq, ibv_wc* wc) const {
  for (int n = 0; n < kPollBatch; ++n) {
    ibv_poll_cq_attr attr{};
    if (const int err = ibv_start_poll(cq, &attr)) return err == ENOENT ? n : -err;
    ibv_wc& one = wc[n] = {};
    one.wr_id = cq->wr_id;
    one.status = cq->status;
    one.qp_num = ibv_wc_read_qp_num(cq);
    if (one.status != IBV_WC_SUCCESS) {
      one.vendor_err = ibv_wc_read_vendor_err(cq);
    } else {
      one.opcode = ibv_wc_read_opcode(cq);
      one.byte_len = ibv_wc_read_byte_len(cq);
      one.wc_flags = ibv_wc_read_wc_flags(cq);
      if (one.wc_flags & IBV_WC_WITH_IMM) one.imm_data = ibv_wc_read_imm_data(cq);
      if (one.wc_flags & kWithInv) one.invalidated_rkey = ibv_wc_read_invalidated_rkey(cq);
    }
    ibv_end_poll(cq);
  }
  return kPollBatch;
}

/// The partner has ended the life of our window that it is in.
void Run::on_invalidated(std::uint32_t i, std::uint32_t rkey) {
  Lane& l = lanes_[i];
  const std::uint32_t want = f_.has_spare(i) ? spare_key(f_.spare_rkey(i), l.lost) : 0;
  if (rkey != want) {
    faults_.add(Fault::kCorrupted, "QP " + std::to_string(i) + ": key " + std::to_string(rkey) + " was invalidated, want " + std::to_string(want));
    return;
  }
  f_.bind_spare_again(i, l.lost++);
}

void Run::on_error(const ibv_wc& wc) {
  const std::uint32_t i = wr_id_qp(wc.wr_id);
  const bool recv = wr_id_recv(wc.wr_id);
  if (wc.status != IBV_WC_WR_FLUSH_ERR) ++failed_;
  if (wc.status == IBV_WC_RETRY_EXC_ERR) ++retry_exceeded_;
  if (!recv && i < lanes_.size()) lanes_[i].broken = true;
  if (!broken_.empty()) return;
  broken_ = "QP " + std::to_string(i) + (recv ? " receive " : " send ") + std::to_string(wr_id_number(wc.wr_id)) + " completed with '" +
            ibv_wc_status_str(wc.status) + "' (status " + std::to_string(wc.status) + ", vendor error " + std::to_string(wc.vendor_err) +
            ", qp_num " + std::to_string(wc.qp_num) + ")";
}

void Run::on_completion(const ibv_wc& wc) {
  const std::uint32_t i = wr_id_qp(wc.wr_id);
  const bool recv = wr_id_recv(wc.wr_id);
  if (recv) last_receive_us_ = elapsed_us_;
  if (wc.status != IBV_WC_SUCCESS) return on_error(wc);
  if (f_.srq && recv && i == SharedReceives::kQp) {
    Done shared{wc.wr_id, wc_op_of(wc.opcode), wc.byte_len, wc.qp_num};
    shared.has_imm = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
    shared.imm = shared.has_imm ? be32toh(wc.imm_data) : 0;
    on_shared_receive(wc, shared);
    for (std::uint32_t q = 0; (wc.wc_flags & kWithInv) && q < lanes_.size(); ++q)
      if (f_.qpn[q] == wc.qp_num) on_invalidated(q, wc.invalidated_rkey);
    return;
  }
  if (i >= lanes_.size()) {
    faults_.add(Fault::kCorrupted, "a completion has wr_id " + std::to_string(wc.wr_id) + ", which was never given out");
    return;
  }
  Lane& l = lanes_[i];
  Done d{wc.wr_id, wc_op_of(wc.opcode), wc.byte_len, wc.qp_num};
  if (!recv) {
    l.send.complete(d, faults_, [&](const SendChecker::Posted& p) { on_retired(i, p); });
    return;
  }
  d.has_imm = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
  d.imm = d.has_imm ? be32toh(wc.imm_data) : 0;
  if (wc.wc_flags & kWithInv) on_invalidated(i, wc.invalidated_rkey);
  const std::uint64_t before = l.recv.bytes();
  const auto used = l.recv.complete(
      d, [&](std::uint64_t n) { return recv_slot(i, n); }, f_.target.data() + f_.ring_bytes() * i, faults_);
  const std::uint64_t bytes = l.recv.bytes() - before;
  bytes_ += bytes;
  samples_.add(now_, bytes);
  if (used) {
    std::memset(recv_slot(i, *used), 0x5a, f_.shape.size < 64 ? f_.shape.size : 64);
    post_receive(i);
  }
}

void Run::on_shared_receive(const ibv_wc& wc, Done d) {
  std::uint32_t i = 0;
  while (i < lanes_.size() && f_.qpn[i] != wc.qp_num) ++i;
  if (i == lanes_.size()) {
    faults_.add(Fault::kCorrupted, "a receive completed with qp_num " + std::to_string(wc.qp_num) + ", which no QP has");
    return;
  }
  Lane& l = lanes_[i];
  const auto slot = shared_.take(wr_id_number(wc.wr_id), faults_);
  if (!slot) return;
  ++srq_used_;
  const std::uint64_t before = l.recv.bytes();
  std::uint8_t* const at = f_.recv.data() + static_cast<std::size_t>(*slot) * f_.shape.size;
  l.recv.complete_shared(d, at, f_.target.data() + f_.ring_bytes() * i, faults_, options_.any_order);
  bytes_ += l.recv.bytes() - before;
  samples_.add(now_, l.recv.bytes() - before);
  std::memset(at, 0x5a, f_.shape.size < 64 ? f_.shape.size : 64);
  post_shared(*slot);
}

/// The limit is above what the SRQ can hold: each receive that is used after the arming has to tell, once.
void Run::watch_srq() {
  ibv_async_event event{};
  while (ibv_get_async_event(f_.context.get(), &event) == 0) {
    const bool ours = event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == f_.srq.get();
    if (!ours) faults_.add(Fault::kOther, std::string("async event '") + ibv_event_type_str(event.event_type) + "' of who knows what");
    ibv_ack_async_event(&event);
    if (!ours) continue;
    ++srq_events_;
    srq_due_ = 0;
    srq_used_at_arming_ = srq_used_;
    f_.arm_srq();
  }
  // Those that were on their way when it was armed do not count.
  if (!options_.srq_limit || srq_used_ - srq_used_at_arming_ <= 2 * f_.shared_slots()) return;
  if (!srq_due_) srq_due_ = now_;
  if (now_ - srq_due_ > kEventGraceMs * 1000) {
    faults_.add(Fault::kLost, "the SRQ's limit was reached, but no event came within " + std::to_string(kEventGraceMs) + " ms");
    srq_due_ = now_;
  }
}

void Run::on_retired(std::uint32_t i, const SendChecker::Posted& p) {
  Lane& l = lanes_[i];
  const Op& op = p.op;
  if (op.kind == Kind::kAck) {
    l.ack_in_flight = false;
    return;
  }
  l.completed = op.seq + 1;
  bytes_ += op.len;
  samples_.add(now_, op.len);
  const std::uint8_t* const at = local_slot(i, op.seq);
  const std::string what = "QP " + std::to_string(i) + " " + name(op.kind) + " " + std::to_string(op.seq);
  if (op.kind == Kind::kRead) {
    const std::uint64_t key = ~stream_key(f_.shape.seed, i, !client_);
    if (auto bad = pattern_mismatch(at, op.len, key, op.slot))
      faults_.add(Fault::kCorrupted, what + ": byte " + std::to_string(*bad) + " of " + std::to_string(op.len) + " differs");
  } else if (is_atomic(op.kind)) {
    std::uint64_t got;
    std::memcpy(&got, at, 8);
    if (op.shared ? got < p.returned : got != p.returned)
      faults_.add(Fault::kCorrupted, what + ": returned " + std::to_string(got) + ", want " +
                                         (op.shared ? "at least " : "") + std::to_string(p.returned));
  }
}

// --- the loop

void Run::tick() {
  now_ = now_us();
  const std::int64_t step = last_now_ ? now_ - last_now_ : 0;
  last_now_ = now_;
  if (step <= 0) return;  // a clock that was set back, or another host's
  elapsed_us_ += std::min<std::int64_t>(step, 60 * kMaxStepUs);
  idle_us_ += std::min(step, kMaxStepUs);
  const double rate = f_.shape.rate;
  budget_ = std::min(budget_ + rate * static_cast<double>(step) / 1e6, std::max(rate * kRateBurstS, 1.0));
}

/// @param close_only: afterwards only RDMA comes to its end
void Run::request_stop(bool close_only) {
  if (stopping_) return;
  stopping_ = true;
  closing_ = close_only;
  control_.send(Msg::kStop, close_only ? "close" : "");
}

bool Run::told_to_stop() { return g_stop || is_there(options_.stop_file); }

void Run::on_messages() {
  while (auto m = control_.poll()) {
    idle_us_ = 0;
    switch (m->type) {
      case Msg::kStop:
        stopping_ = true;
        closing_ = m->body == "close";
        break;
      case Msg::kFin:
        if (m->body.size() != 8 * lanes_.size() || !partner_totals_.empty()) throw PeerError("the partner's closing totals make no sense");
        partner_totals_.resize(lanes_.size());
        std::memcpy(partner_totals_.data(), m->body.data(), m->body.size());
        break;
      case Msg::kChecked:
        if (m->body.size() != 8 * lanes_.size()) throw PeerError("the partner acknowledges a wrong number of streams");
        for (std::uint32_t i = 0; i < lanes_.size(); ++i) std::memcpy(&f_.words_of(i)->ack, m->body.data() + 8 * i, 8);
        break;
      case Msg::kDone: partner_done_ = true; return;  // what follows belongs to the next phase
      case Msg::kAbort: throw PeerError("the partner gave up: " + m->body);
      default: throw PeerError("the partner sent message " + std::to_string(static_cast<int>(m->type)) + " too early");
    }
  }
}

void Run::housekeeping() {
  next_house_ = now_ + kHousekeepingUs;
  if (!partner_done_) on_messages();
  if (f_.srq) watch_srq();
  if (options_.resize && resizes_ < kResizes && now_ >= next_resize_) {
    next_resize_ = now_ + kResizeUs;
    f_.resize(++resizes_);
  }
  if (g_stop) request_stop(false);
  if (options_.seconds > 0 && elapsed_us_ > options_.seconds * 1e6) request_stop(false);
  if (now_ >= next_files_) {
    next_files_ = now_ + kFilesUs;
    look_for_files();
  }
  if (!options_.status.empty() && now_ >= next_status_) {
    next_status_ = now_ + kStatusUs;
    write_file(options_.status, summary().text() + "\n");
  }
  if (idle_us_ > options_.stall * 1e6)
    throw RunError("nothing has happened for " + std::to_string(static_cast<int>(options_.stall)) + " s: " + where());
}

void Run::look_for_files() {
  if (told_to_stop()) request_stop(false);
  resting_ = is_there(options_.rest_file);
  if (only_answers_ && is_there(options_.rts_file)) {
    f_.begin_to_send();
    only_answers_ = false;
  }
  if (is_there(options_.close_file)) request_stop(true);
}

std::string Run::where() const {
  std::string s;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    const Lane& l = lanes_[i];
    if (s.size() > 300) return s + "; ...";
    s += (i ? "; QP " : "QP ") + std::to_string(i) + ": posted " + std::to_string(l.next) + ", in flight " +
         std::to_string(l.send.in_flight()) + ", partner has checked " + std::to_string(f_.words_of(i)->ack) +
         ", partner's stream checked to " + std::to_string(l.recv.checked()) +
         (partner_totals_.empty() ? "" : " of " + std::to_string(partner_totals_[i]));
  }
  return s;
}

bool Run::may_finish() const {
  if (partner_totals_.empty()) return false;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i)
    if (lanes_[i].send.in_flight()) return false;
  if (f_.shape.lossy() && elapsed_us_ - last_receive_us_ > kLossyTailUs) return true;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i)
    if (!const_cast<Lane&>(lanes_[i]).recv.complete_up_to(partner_totals_[i])) return false;
  return true;
}

void Run::advance_phase() {
  if (phase_ == Phase::kRunning) {
    bool end = true;
    for (const Lane& l : lanes_) end = end && (stopping_ || (f_.shape.iterations && l.next >= f_.shape.iterations));
    if (end) phase_ = Phase::kDraining;
  }
  if (phase_ == Phase::kRunning) return;
  if (!fin_sent_) {
    std::string totals;
    for (const Lane& l : lanes_) totals.append(reinterpret_cast<const char*>(&l.next), 8);
    control_.send(Msg::kFin, totals);
    fin_sent_ = true;
  }
  if (!done_sent_ && may_finish()) {
    control_.send(Msg::kDone);
    done_sent_ = true;
  }
  if (done_sent_ && partner_done_) phase_ = Phase::kDone;
}

/// @param or_message: what the partner says ends the wait too
bool Run::take_events(int wait_ms, bool or_message) {
  pollfd p[2] = {{f_.channel->fd, POLLIN, 0}, {control_.fd(), POLLIN, 0}};
  if (::poll(p, or_message && !partner_done_ ? 2 : 1, wait_ms) < 0 && errno != EINTR) throw RunError(std::string("poll: ") + std::strerror(errno));
  bool any = false;
  for (;;) {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(f_.channel.get(), &cq, &context)) {
      if (errno == EAGAIN || errno == EINTR) break;
      throw RunError(std::string("ibv_get_cq_event: ") + std::strerror(errno));
    }
    std::size_t k = 0;
    while (k < f_.cqs.size() && f_.cqs[k].get() != cq) ++k;
    if (k == f_.cqs.size()) throw RunError("ibv_get_cq_event names a CQ that is not ours");
    ibv_ack_cq_events(cq, 1);
    cq_events_[k].event(k, faults_);
    ++events_;
    any = true;
  }
  return any;
}

/// Arms, looks once more, sleeps; and checks that no completion comes without its event.
void Run::sleep_on_channel() {
  for (std::size_t k = 0; k < f_.cqs.size(); ++k) {
    if (cq_events_[k].armed()) continue;
    if (ibv_req_notify_cq(f_.cqs[k].get(), 0)) throw RunError("ibv_req_notify_cq failed");
    cq_events_[k].arm();
  }
  if (poll_cqs()) {
    idle_us_ = 0;
    return;  // may have come before the arming: then without an event
  }
  bool blocked = false;
  for (const Lane& l : lanes_) blocked = blocked || l.blocked;
  const auto owed = [&] { return std::any_of(cq_events_.begin(), cq_events_.end(), [](const EventChecker& e) { return e.owes(); }); };
  if (take_events(blocked ? kWindowWaitMs : kEventWaitMs, true) && !owed()) return;
  // What is there now came after the arming, so its event is under way.
  now_ = now_us();
  if (poll_cqs()) idle_us_ = 0;
  for (int waited = 0; owed() && waited < kEventGraceMs; waited += kEventWaitMs) take_events(kEventWaitMs, false);
  for (std::size_t k = 0; k < cq_events_.size(); ++k) cq_events_[k].finish(k, faults_);
}

void Run::idle(bool nothing) {
  if (!nothing) {
    idle_rounds_ = 0;
    idle_us_ = 0;
    return;
  }
  if (options_.events) {
    sleep_on_channel();
  } else if (f_.shape.rate) {
    ::usleep(kRatedNapUs);
  } else if (++idle_rounds_ > kSpins) {
    sched_yield();
    ::usleep(kNapUs);
  }
}

void Run::traffic() {
  const std::uint64_t ack_step = f_.shape.window() / 4;
  while (phase_ != Phase::kDone) {
    tick();
    int moved = poll_cqs();
    bool tell = false;
    // Nothing came and nothing may go: with thousands of QPs a look at each takes its time.
    const bool quiet = !moved && f_.shape.rate && budget_ < 1 && phase_ == Phase::kRunning;
    for (std::uint32_t i = 0; !quiet && i < lanes_.size(); ++i) {
      Lane& l = lanes_[i];
      moved += post_stream(i);
      if (l.ack_in_flight) continue;
      const bool behind = l.recv.checked() - l.acked >= ack_step && partner_totals_.empty();
      const bool tail = phase_ == Phase::kDraining && !l.send.tail_signalled();
      if (f_.shape.lossy() || only_answers_) {
        tell = tell || behind;
      } else if (behind || tail) {
        post_ack(i);
        ++moved;
      }
    }
    if (tell) tell_checked();
    if (now_ >= next_house_ || now_ < next_house_ - 10 * kHousekeepingUs) housekeeping();
    advance_phase();
    idle(moved == 0);
  }
}

// --- the end

void Run::verify() {
  const Shape& s = f_.shape;
  std::uint64_t here = 0, there = 0;  // digests: of our memory as it is, of the partner's as it must be
  AtomicModel all_in, all_out;
  bool all_came = true;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    Lane& l = lanes_[i];
    const std::string who = "QP " + std::to_string(i);
    l.send.finish(faults_);
    l.recv.finish(partner_totals_[i], faults_);
    if (!f_.srq && l.recv.outstanding() != f_.recv_slots && faults_.total() == 0)
      faults_.add(Fault::kOther, who + ": " + std::to_string(l.recv.outstanding()) + " receives left, want " +
                                     std::to_string(f_.recv_slots));
    const Stream in(s, stream_key(s.seed, i, !client_));
    const std::vector<std::uint8_t> want = expected_target(in, partner_totals_[i]);
    const std::uint8_t* const have = f_.target.data() + f_.ring_bytes() * i;
    if (s.compares(l.recv.passed_over())) {
      const auto wrong = [&] { return static_cast<std::size_t>(std::mismatch(want.begin(), want.end(), have).first - want.begin()); };
      // UC completes a WRITE that was sent, wherever it is by now.
      for (std::int64_t waited = 0; s.lossy() && wrong() < want.size() && waited < kLossyTailUs; waited += kRatedNapUs) ::usleep(kRatedNapUs);
      if (const std::size_t at = wrong(); at < want.size())
        faults_.add(Fault::kCorrupted, who + ": memory at the end: slot " + std::to_string(at / s.size) + " byte " +
                                           std::to_string(at % s.size) + " is not what the partner's WRITEs leave");
    } else {
      all_came = false;
    }
    AtomicModel m;
    for (std::uint64_t n = 0; n < partner_totals_[i]; ++n)
      if (const Op op = in.at(n); is_atomic(op.kind)) m.apply(op);
    const Words* const w = f_.words_of(i);
    if (w->sum != m.sum) faults_.add(Fault::kCorrupted, who + ": sum of FETCH_ADDs is " + std::to_string(w->sum) + ", want " + std::to_string(m.sum));
    if (w->swap != m.swap) faults_.add(Fault::kCorrupted, who + ": last CMP_SWAP left " + std::to_string(w->swap) + ", want " + std::to_string(m.swap));
    all_in.shared += m.shared;
    all_out.shared += l.atomics.shared;
    for (std::uint32_t slot = 0; slot < s.window(); ++slot)
      if (pattern_mismatch(f_.readable.data() + f_.ring_bytes() * i + static_cast<std::size_t>(slot) * s.size, s.size,
                           ~stream_key(s.seed, i, client_), slot)) {
        faults_.add(Fault::kCorrupted, who + ": memory that the partner may only read has changed");
        break;
      }
    here = digest(have, f_.ring_bytes(), here);
    here = mix(here ^ mix(w->sum ^ mix(w->swap)));
    const std::vector<std::uint8_t> theirs = expected_target(l.stream, l.next);
    there = digest(theirs.data(), theirs.size(), there);
    there = mix(there ^ mix(l.atomics.sum ^ mix(l.atomics.swap)));
  }
  if (f_.srq && shared_.outstanding() != f_.shared_slots() && faults_.total() == 0)
    faults_.add(Fault::kOther, std::to_string(shared_.outstanding()) + " receives left in the SRQ, want " + std::to_string(f_.shared_slots()));
  const std::uint64_t shared = f_.words_of(0)->shared;
  if (shared != all_in.shared)
    faults_.add(Fault::kCorrupted, "the word that all QPs add to is " + std::to_string(shared) + ", want " + std::to_string(all_in.shared));
  here = mix(here ^ shared);
  there = mix(there ^ all_out.shared);
  if (const std::string changed = f_.changed_names(options_.query); !changed.empty())
    faults_.add(Fault::kCorrupted, changed + " changed under the application");
  if (const auto page = f_.changed_untouched())
    faults_.add(Fault::kCorrupted, "page " + std::to_string(*page) + " of memory that nobody writes to has changed");
  control_.send(Msg::kMemory, all_came ? std::string(reinterpret_cast<const char*>(&here), 8) : std::string());
  const std::string body = control_.expect(Msg::kMemory, kVerifyLimit);
  std::uint64_t got = 0;
  if (body.size() == 8) std::memcpy(&got, body.data(), 8);
  if (got != there && !(s.lossy() && body.empty())) faults_.add(Fault::kCorrupted, "the partner's memory at the end is not what our stream leaves there");
}

void Run::without_rdma() {
  f_.close();
  closed_ = true;
  if (!options_.status.empty()) write_file(options_.status, summary().text() + "\n");
  if (!client_) return;  // the client's result tells that it is over
  const std::string ready = options_.close_file + ".done";
  if (!write_file(ready, "\n")) faults_.add(Fault::kOther, "cannot write " + ready + ": " + std::strerror(errno));
  while (!told_to_stop()) ::usleep(static_cast<useconds_t>(kFilesUs));
}

/// @return the partner's number of faults
std::uint64_t Run::exchange_results() {
  const std::uint64_t mine = faults_.total();
  control_.send(Msg::kResult, std::string(reinterpret_cast<const char*>(&mine), 8) + faults_.first());
  const std::string body = control_.expect(Msg::kResult, closing_ ? kWithoutRdmaLimit : kVerifyLimit);
  std::uint64_t theirs = 0;
  if (body.size() < 8) throw PeerError("the partner's result is too short");
  std::memcpy(&theirs, body.data(), 8);
  if (theirs) std::fprintf(stderr, "migr_verify: the partner found %llu faults, first: %s\n",
                           static_cast<unsigned long long>(theirs), body.c_str() + 8);
  return theirs;
}

void Run::abort_partner(const std::string& why) {
  try {
    control_.send(Msg::kAbort, why);
  } catch (const PeerError&) {
  }
}

/// Waits until nothing of ours is on its way. What goes to a QP that broke at the partner's end may be tried again for ever.
/// @return how far the partner's streams are; none: it does not say
std::vector<Run::Progress> Run::exchange_progress() {
  constexpr std::int64_t kQuietUs = 5'000'000, kTheirLimitUs = 60'000'000;
  const auto under_way = [&] { return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return !l.broken && l.send.in_flight(); }); };
  counting_ = true;
  try {
    for (std::int64_t quiet = 0; under_way() && quiet < kQuietUs; quiet += kRatedNapUs) {
      if (poll_cqs()) quiet = 0;
      ::usleep(kRatedNapUs);
    }
    std::string body;
    for (const Lane& l : lanes_)
      for (const std::uint64_t v : {l.completed, l.next}) body.append(reinterpret_cast<const char*>(&v), 8);
    control_.send(Msg::kBroken, body);
    for (std::int64_t t = 0; t < kTheirLimitUs; t += kRatedNapUs) {
      const auto m = control_.poll();
      if (m && m->type == Msg::kBroken && m->body.size() == sizeof(Progress) * lanes_.size()) {
        std::vector<Progress> theirs(lanes_.size());
        std::memcpy(theirs.data(), m->body.data(), m->body.size());
        return theirs;
      }
      if (!m) ::usleep(kRatedNapUs);
    }
  } catch (const RunError&) {
  } catch (const PeerError&) {
  }
  return {};
}

void Run::check_atomics_of_broken() {
  constexpr useconds_t kStillComing = 300'000;    // of the other QPs
  if (f_.shape.lossy() || closed_) return;
  std::vector<Progress> theirs;
  if (f_.shape.mode == Mode::kAtomic) theirs = exchange_progress();
  const bool known = !theirs.empty();
  if (!known) ::usleep(kStillComing);
  std::uint64_t least = 0, most = 0;
  bool all = known;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    const Stream in(f_.shape, stream_key(f_.shape.seed, i, !client_));
    const Words* const w = f_.words_of(i);
    const auto executed = known ? executed_of(in, w->sum, w->swap, theirs[i].completed, theirs[i].posted) : executed_of(in, w->sum, w->swap, 0, {});
    if (!executed) {
      all = false;
      faults_.add(Fault::kCorrupted, "QP " + std::to_string(i) + ": what the partner's atomics have left is not what any number of them leaves, each executed once");
      continue;
    }
    if (!known) continue;
    least += executed->shared_least;
    most += executed->shared_most;
    unanswered_least_ += executed->least - theirs[i].completed;
    unanswered_most_ += executed->most - theirs[i].completed;
  }
  if (const std::uint64_t shared = f_.words_of(0)->shared; all && (shared < least || shared > most))
    faults_.add(Fault::kCorrupted, "the word that all QPs add to is " + std::to_string(shared) + ", want " + std::to_string(least) + " to " + std::to_string(most));
}

Json Run::summary() const {
  std::uint64_t posted = 0, completed = 0, received = 0, in_flight = 0, passed_over = 0, invalidated = 0;
  for (const Lane& l : lanes_) {
    posted += l.send.posted();
    completed += l.send.retired();
    received += l.recv.completed();
    in_flight += l.send.bytes_in_flight();
    passed_over += l.recv.passed_over();
    invalidated += l.lost;
  }
  Json j;
  j.field("errors", faults_.total())
      .field("wr_posted", posted)
      .field("wr_completed", completed)
      .field("recv_completed", received)
      .field("bytes", bytes_)
      .field("bytes_in_flight", in_flight)
      .field("closed", std::uint64_t{closed_})
      .field("mode", std::string(kModeNames[static_cast<unsigned>(f_.shape.mode)]))
      .field("qps", static_cast<std::uint64_t>(f_.shape.qps))
      .field("size", static_cast<std::uint64_t>(f_.shape.size))
      .field("seed", f_.shape.seed)
      .field("seconds", static_cast<double>(elapsed_us_) / 1e6)
      .field("role", std::string(client_ ? "client" : "server"))
      .field("events", events_)
      .field("srq_events", srq_events_)
      .field("invalidated", invalidated)
      .field("transport", std::string(kTransportNames[static_cast<unsigned>(f_.shape.transport)]))
      .field("passed_over", passed_over)
      .field("failed", failed_)
      .field("retry_exceeded", retry_exceeded_)
      .field("unanswered_least", unanswered_least_)
      .field("unanswered_most", unanswered_most_)
      .field("lost", faults_.of(Fault::kLost))
      .field("duplicated", faults_.of(Fault::kDuplicated))
      .field("reordered", faults_.of(Fault::kReordered))
      .field("corrupted", faults_.of(Fault::kCorrupted))
      .field("longest_gap_ms", static_cast<double>(samples_.longest_gap_us()) / 1000)
      .field("gap_start_ms", static_cast<double>(samples_.gap_start_us()) / 1000)
      .field("epoch_ms", static_cast<double>(now_) / 1000)
      .field("first_error", faults_.first());
  return j;
}

/// --fork
class IdleChild {
 public:
  explicit IdleChild(bool wanted) : pid_(wanted ? fork() : -1) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // also when the thread that has forked it ends
    for (;;) pause();
  }
  ~IdleChild() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  const pid_t pid_;
};

sigset_t usr1() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  return set;
}

/// --fork-later
class LateChild {
 public:
  explicit LateChild(bool wanted) {
    if (!wanted) return;
    thread_ = std::jthread([](const std::stop_token& stop) {
      const sigset_t wanted = usr1();
      const timespec look{0, 200'000'000};
      std::optional<IdleChild> child;
      while (!stop.stop_requested())
        if (sigtimedwait(&wanted, nullptr, &look) == SIGUSR1 && !child) child.emplace(true);
    });
  }

 private:
  std::jthread thread_;
};

void on_signal(int) { g_stop = 1; }

int run(const Options& o) {
  const bool client = !o.server.empty();
  Control control = client ? Control::connect(o.server, o.bind, o.port, o.connect) : Control::serve(o.bind, o.port, o.connect);
  std::unique_ptr<Run> r;
  try {
    r = std::make_unique<Run>(o, control, client);
  } catch (const SetupError& e) {
    try {
      control.send(Msg::kAbort, e.what());
    } catch (const PeerError&) {
    }
    throw;
  }
  std::uint64_t theirs = 0;
  const IdleChild child(o.forks);
  const LateChild late_child(o.forks_later);
  Churn churn(r->context(), o.churn_ms);
  try {
    r->traffic();
    if (const std::string failed = churn.stop(); !failed.empty()) r->faults().add(Fault::kOther, failed);
    r->verify();
    if (r->closes()) r->without_rdma();
    theirs = r->exchange_results();
  } catch (const RunError& e) {
    r->faults().add(Fault::kOther, e.what());
    r->abort_partner(e.what());
    r->check_atomics_of_broken();
  } catch (const PeerError& e) {
    r->faults().add(Fault::kOther, e.what());
    r->check_atomics_of_broken();
  }
  const std::string line = r->summary().field("partner_errors", theirs).field("churn_rounds", churn.rounds()).text() + "\n";
  std::fputs(line.c_str(), stdout);
  std::fflush(stdout);
  bool written = true;
  for (const auto& [file, write] : {std::pair(o.samples, true), std::pair(o.json, false), std::pair(o.status, false)}) {
    if (file.empty()) continue;
    if (!(write ? r->samples().write(file) : write_file(file, line))) {
      std::fprintf(stderr, "migr_verify: cannot write %s: %s\n", file.c_str(), std::strerror(errno));
      written = false;
    }
  }
  if (r->faults().total()) std::fprintf(stderr, "migr_verify: %s\n", r->faults().first().c_str());
  if (r->faults().total() || theirs) return kExitFaults;
  return written ? kExitOk : kExitSetup;
}

}  // namespace
}  // namespace verify

int main(int argc, char** argv) {
  const verify::Options o = verify::parse_options(argc, argv);
  struct sigaction s{};
  s.sa_handler = verify::on_signal;
  sigaction(SIGTERM, &s, nullptr);
  sigaction(SIGINT, &s, nullptr);
  const sigset_t waited_for = verify::usr1();
  if (o.forks_later) sigprocmask(SIG_BLOCK, &waited_for, nullptr);  // in every thread
  try {
    return verify::run(o);
  } catch (const verify::SetupError& e) {
    std::fprintf(stderr, "migr_verify: %s\n", e.what());
    const bool unsupported = o.wr_api && errno == EOPNOTSUPP;
    if (unsupported) std::fprintf(stderr, "migr_verify: this device has no ibv_wr_* interface, or not all of it; leave out --wr-api, or --atomic-write\n");
    return unsupported ? verify::kExitSkip : verify::kExitSetup;
  } catch (const verify::PeerError& e) {
    std::fprintf(stderr, "migr_verify: %s\n", e.what());
    return verify::kExitSetup;
  }
}
