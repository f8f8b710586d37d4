// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "model.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_query_port

#define MODEL extern "C" [[gnu::visibility("default")]]
#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace {

constexpr std::uint32_t kPsnMask = 0xffffff;
constexpr unsigned kWindowPackets = 12;   // sent and not acknowledged
constexpr auto kRetryAfter = std::chrono::milliseconds(2);  // where nothing was said of it
constexpr unsigned kRetries = 3;
constexpr int kFaster = 3;  // than what a QP was told

using Clock = std::chrono::steady_clock;

std::int32_t difference(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>((a - b) << 8) >> 8; }

struct Mr {
  ibv_mr mr;
  std::uint32_t behind[2];
  unsigned access;
};

struct Cq {
  union {
    ibv_cq_ex ex{};
    ibv_cq cq;
  };
  ibv_wc now{};  // what the readers read
  std::deque<ibv_wc> done;
  enum { kNot, kForSolicited, kForAll } armed = kNot;
  std::uint32_t reported = 0, acknowledged = 0;
  std::atomic<bool> session = false;  // of ibv_start_poll()
};

struct Nic;

struct ModelQp;

/// What ibv_wr_start() has begun; the lock is held until it completes, as soft-RoCE does, and by ibv_post_send().
struct Session {
  ibv_qp_ex ex{};
  ModelQp* of = nullptr;
  std::mutex lock;
  bool open = false;
  std::deque<ibv_send_wr> wrs;
  std::deque<std::vector<ibv_sge>> sges;
  std::deque<std::uint64_t> words;  // of atomic writes
};

struct ModelQp : model::Qp {
  Nic* nic = nullptr;
  Session* session = nullptr;  // made by ibv_create_qp_ex()
  ibv_qp_attr attr{};
  ibv_gid source{};  // that it was connected by
  bool signal_all = false, limited = false;  // the latter: it has been told what others may do
  /* requester */
  std::uint32_t next = 0;         // ring index of the WQE being sent
  std::uint32_t next_packet = 0;  // of it
  std::uint32_t psn = 0;          // of the next packet
  unsigned in_flight = 0, retries = 0;
  Clock::time_point progress{};
  ibv_qp_state told = IBV_QPS_RESET;  // last, by ibv_modify_qp: what a record of it says
  bool idle = true, has_sent = false;
  /* responder */
  std::uint32_t expected = 0;
  bool receive_open = false;      // a message is coming into `receive`
  model::Receive receive;         // taken from the queue when its message begins, from an SRQ; else it stays there until it is used
  std::uint32_t received = 0;     // bytes of it
};

struct Nic {
  std::string name;
  int link;
  ibv_device device{};
  std::map<std::uint32_t, ibv_gid> gids;  // by index
  std::uint32_t next_qpn, next_key;
  unsigned refused_qps = 0;  // that are asked for next
  unsigned most_wrs = UINT_MAX;
  std::atomic<bool> unplugged = false, foreign = false;
  std::map<std::uint32_t, ModelQp*> qps, busy;  // those with sends, and some that had
  std::map<std::uint32_t, Mr*> keys;
};

/// An asynchronous event, as it lies in the pipe that stands for the kernel's file.
struct Raised {
  ibv_event_type type;
  void* element;
};

struct Wire {
  bool cut = false, answers_only = false, no_route = false;
  std::uint32_t largest = ~0u;  // bytes of a packet that gets through
  long packets_left = -1;  // -1: no cut is due
  std::chrono::milliseconds port_late{};
  Clock::time_point failed{};  // a send had no route
};

std::mutex lock;
std::condition_variable work;
constexpr int kRails = 3;
constexpr ibv_mtu kActiveMtu[kRails] = {IBV_MTU_1024, IBV_MTU_512, IBV_MTU_2048};
std::unique_ptr<Nic> nics[2 * kRails];
Wire wires[kRails];
std::map<const void*, unsigned> writes;
struct Window {
  bool bound;
  std::uint32_t rkey;
};
std::map<std::uint32_t, Window> windows;  // by the index of their key
unsigned long packets, unready_sends;
int most_cqes = INT_MAX;
bool gids_change = false;
std::set<Cq*> cqs;
std::atomic<unsigned> receives_flushed = 0;
struct Arrival {
  std::uint32_t qpn = 0;
  bool solicited = false;
} at_flush;
std::atomic<bool> packets_linger{false}, number_anew{false};
struct Registered {
  unsigned now = 0, most = 0;
};
std::map<const void*, Registered> registered;  // by address
std::atomic<unsigned> registrations_held{0}, registrations_waiting{0}, registrations_kept{0};  ///< the first by link
std::atomic<const void*> registrations_refused{nullptr};
std::atomic<bool> reregistrations_refused{false};
std::atomic<bool> pds_held{false}, resets_held{false}, poll_held{false};
std::atomic<unsigned> pds_waiting{0}, resets_waiting{0}, polls_waiting{0};
std::atomic<bool> destroyed_cqs_held{false};
std::atomic<unsigned> destroyed_cqs_waiting{0};
std::atomic<bool> sessions_held{false}, flushes_held{false};
bool with_async_events = false;
struct Ends {
  int read, write;
};
std::map<const ibv_context*, Ends> async_ends;  // the device's, whatever stands at the context's number
std::map<const void*, int> owed_acks;          // events that were read, by QP, CQ and SRQ
unsigned unbalanced = 0;

/// Between two QPs of one NIC, and on its way longer than its requester waits.
struct Delayed {
  bool next = false;
  std::uint32_t psn = 0;
  ModelQp *from = nullptr, *to = nullptr;
  model::Send what;
} delayed;

/// Of what stays on one NIC.
struct Starved {
  unsigned retries = 0, given_up = 0;
  bool answers_only = false;
} starved;

/// A thread in ibv_post_send() or ibv_post_recv() that has lost its processor there.
thread_local bool loses_processor = false, loses_it_in_poll = false;
struct Held {
  const ModelQp* at = nullptr;
  bool until_err = false, let_go = false;
  void (*before)(void*) = nullptr;
  void* with = nullptr;
} held;
std::condition_variable held_changes;

std::uint32_t mtu_of(const ModelQp& q) { return 128u << q.attr.path_mtu; }

/// By `q`.
std::uint32_t packets_of(const ModelQp& q, const model::Send& s) {
  if (!s.bytes || s.wr.opcode > IBV_WR_RDMA_READ) return 1;
  return (s.bytes + mtu_of(q) - 1) / mtu_of(q);
}

bool passes(int link, bool answer) {
  Wire& w = wires[link];
  ++packets;
  if (!w.cut && w.packets_left >= 0 && w.packets_left-- == 0) w.cut = true;
  return !w.cut || (w.answers_only && !answer);
}

/// What stays on one NIC goes over no wire.
bool passes(const ModelQp& from, const ModelQp* to, bool answer) {
  if (!to || to->nic != from.nic) return passes(from.nic->link, answer);
  return from.retries >= starved.retries || (starved.answers_only && !answer);
}

constexpr auto kNeighbourLimit = std::chrono::milliseconds(1000);

/// As the kernel asks for the address of the other end's NIC, which is forgotten when a link is cut.
bool neighbour_answers(const Nic* nic) {
  for (const auto until = Clock::now() + kNeighbourLimit; Clock::now() < until; usleep(1000)) {
    std::lock_guard guard(lock);
    if (!packets_linger || !wires[nic->link].cut) return true;
  }
  return false;
}

bool unreachable(int link) { return wires[link].cut && wires[link].no_route; }
bool port_is_down(int link) {
  const Wire& w = wires[link];
  if (!unreachable(link)) return false;
  return !w.port_late.count() || (w.failed != Clock::time_point{} && Clock::now() > w.failed + w.port_late);
}

void raise(const ibv_context* c, ibv_event_type type, void* element);

/// One of a single entry that nobody is to be told of is there to overrun.
void complete(ibv_cq* cq, const ibv_wc& wc, bool solicited = false) {
  Cq& c = *reinterpret_cast<Cq*>(cq);
  if (c.done.size() >= static_cast<std::size_t>(cq->cqe) && cq->cqe == 1 && !cq->cq_context) return raise(cq->context, IBV_EVENT_CQ_ERR, cq);
  if (c.done.size() >= static_cast<std::size_t>(cq->cqe)) {
    fprintf(stderr, "a CQ of %d entries overruns\n", cq->cqe);
    abort();
  }
  c.done.push_back(wc);
  if (c.armed == Cq::kNot || (c.armed == Cq::kForSolicited && !solicited) || !c.cq.channel) return;
  c.armed = Cq::kNot;
  ibv_cq* const p = &c.cq;
  if (write(c.cq.channel->refcnt, &p, sizeof p) == sizeof p) ++c.reported;
}

ibv_wc_opcode opcode_of(ibv_wr_opcode o) {
  return o == IBV_WR_ATOMIC_WRITE ? IBV_WC_ATOMIC_WRITE : o == IBV_WR_ATOMIC_CMP_AND_SWP ? IBV_WC_COMP_SWAP : o == IBV_WR_ATOMIC_FETCH_AND_ADD ? IBV_WC_FETCH_ADD : o == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : o == IBV_WR_RDMA_WRITE || o == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RDMA_WRITE : IBV_WC_SEND;
}

void complete_send(ModelQp& q, ibv_wc_status status) {
  model::Send& s = q.sends.slots[q.sends.from];
  ibv_wc wc{};
  wc.wr_id = s.wr.wr_id;
  wc.status = status;
  wc.qp_num = q.qp.qp_num;
  if (status == IBV_WC_SUCCESS) wc.opcode = opcode_of(s.wr.opcode), wc.byte_len = s.bytes;
  q.sends.from = (q.sends.from + 1) & q.sends.mask();
  if (status != IBV_WC_SUCCESS || q.signal_all || (s.wr.send_flags & IBV_SEND_SIGNALED)) complete(q.qp.send_cq, wc);
}

void flush_sends(ModelQp& q) {
  while (q.sends.size()) complete_send(q, IBV_WC_WR_FLUSH_ERR);
}

model::Ring<model::Receive>& receives_of(ModelQp& q) { return q.qp.srq ? reinterpret_cast<model::Srq*>(q.qp.srq)->receives : q.receives; }

/// Of a0.
void arrives(const Arrival& a) {
  ModelQp& q = *nics[0]->qps.at(a.qpn);
  ibv_wc wc{};
  wc.wr_id = q.receives.slots[q.receives.from].wr_id;
  wc.opcode = IBV_WC_RECV;
  wc.qp_num = a.qpn;
  q.receives.from = (q.receives.from + 1) & q.receives.mask();
  complete(q.qp.recv_cq, wc, a.solicited);
}

/// As soft-RoCE: receives that are posted later wait until the QP is moved to ERR once more. Of an SRQ only the one is flushed that a
/// message has come into in part, by some kernels.
void flush_receives(ModelQp& q) {
  const bool any = q.receives.size();
  if (q.qp.srq && q.receive_open && q.qp.qp_num % 2) {
    ibv_wc wc{};
    wc.wr_id = q.receive.wr_id;
    wc.status = IBV_WC_WR_FLUSH_ERR;
    wc.qp_num = q.qp.qp_num;
    complete(q.qp.recv_cq, wc);
  }
  while (q.receives.size()) {
    ibv_wc wc{};
    wc.wr_id = q.receives.slots[q.receives.from].wr_id;
    wc.status = IBV_WC_WR_FLUSH_ERR;
    wc.qp_num = q.qp.qp_num;
    q.receives.from = (q.receives.from + 1) & q.receives.mask();
    complete(q.qp.recv_cq, wc);
    ++receives_flushed;
  }
  q.receive_open = false;
  if (any && at_flush.qpn) arrives(std::exchange(at_flush, {}));
}

bool is_of_port(ibv_event_type type) { return type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_PORT_ACTIVE; }

void raise(const ibv_context* c, ibv_event_type type, void* element) {
  const auto end = async_ends.find(c);
  const Raised r{type, element};
  if (end != async_ends.end()) (void)!write(end->second.write, &r, sizeof r);
}

/// What is created is told its context's descriptor of events, and the kernel takes none but its own.
bool takes_events_at(const ibv_context* c) {
  const auto end = async_ends.find(c);
  struct stat told{}, own{};
  if (end == async_ends.end() || (!fstat(c->async_fd, &told) && !fstat(end->second.read, &own) && told.st_ino == own.st_ino)) return true;
  errno = EBADF;
  return false;
}

/// As libibverbs has it: what the kernel's object has reported, and what was acknowledged.
void forget_owed(const void* object, std::uint32_t completed) {
  if (owed_acks[object] != static_cast<int>(completed)) ++unbalanced;
  owed_acks.erase(object);
}

void to_err(ModelQp& q) {
  q.attr.qp_state = IBV_QPS_ERR;
  raise(q.qp.context, IBV_EVENT_QP_LAST_WQE_REACHED, &q.qp);  // as if it had an SRQ
  flush_sends(q);
  flush_receives(q);
}

void fail_send(ModelQp& q, ibv_wc_status status) {
  model::Send& s = q.sends.slots[q.sends.from];
  s.given_up = status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_LOC_QP_OP_ERR;
  if (status == IBV_WC_LOC_QP_OP_ERR) s.begun = false;  // the device does not say
  complete_send(q, status);
  to_err(q);
}

bool may(const Nic& nic, std::uint32_t key, std::uint64_t addr, std::uint32_t bytes) {
  const auto found = nic.keys.find(key);
  if (found == nic.keys.end()) return bytes == 0;
  const auto start = reinterpret_cast<std::uint64_t>(found->second->mr.addr);
  return addr >= start && addr + bytes <= start + found->second->mr.length;
}

/// `bytes` at `offset` of what the SGEs name, to or from `other`.
template <class Copy>
bool through(const Nic& nic, const std::vector<ibv_sge>& sges, std::uint32_t offset, std::uint32_t bytes, Copy&& copy) {
  std::uint32_t done = 0;
  for (const ibv_sge& sge : sges) {
    if (!may(nic, sge.lkey, sge.addr, sge.length)) return false;
    if (offset >= sge.length) {
      offset -= sge.length;
      continue;
    }
    const std::uint32_t part = std::min(bytes - done, sge.length - offset);
    copy(reinterpret_cast<std::uint8_t*>(sge.addr + offset), done, part);
    done += part;
    offset = 0;
    if (done == bytes) return true;
  }
  return done == bytes;
}

ModelQp* peer_of(const ModelQp& q) {
  for (const auto& nic : nics)
    if (std::any_of(nic->gids.begin(), nic->gids.end(), [&](const auto& g) { return !std::memcmp(g.second.raw, q.attr.ah_attr.grh.dgid.raw, 16); })) {
      const auto found = nic->qps.find(q.attr.dest_qp_num);
      return found == nic->qps.end() ? nullptr : found->second;
    }
  return nullptr;
}

bool has_source(const ModelQp& q) {
  if (q.qp.qp_type != IBV_QPT_RC) return true;  // a datagram's is its address handle's
  const auto found = q.nic->gids.find(q.attr.ah_attr.grh.sgid_index);
  return found != q.nic->gids.end() && !std::memcmp(found->second.raw, q.source.raw, sizeof q.source.raw);
}

bool is_atomic(ibv_wr_opcode o) { return o == IBV_WR_ATOMIC_CMP_AND_SWP || o == IBV_WR_ATOMIC_FETCH_AND_ADD; }

int needs(ibv_wr_opcode o) {
  if (o == IBV_WR_RDMA_READ) return IBV_ACCESS_REMOTE_READ;
  if (is_atomic(o)) return IBV_ACCESS_REMOTE_ATOMIC;
  return o == IBV_WR_RDMA_WRITE || o == IBV_WR_RDMA_WRITE_WITH_IMM || o == IBV_WR_ATOMIC_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0;
}

bool grants(const ModelQp& r, const model::Send& s) {
  return !r.limited || !(static_cast<unsigned>(needs(s.wr.opcode)) & ~r.attr.qp_access_flags);
}

enum class Answer { kAck, kNone, kNotReady, kBadAccess };

/// Its WQE does.
bool holds_data(const ibv_send_wr& wr) { return wr.send_flags & IBV_SEND_INLINE || wr.opcode == IBV_WR_ATOMIC_WRITE; }

bool takes_receive(ibv_wr_opcode o) { return o == IBV_WR_SEND || o == IBV_WR_SEND_WITH_IMM || o == IBV_WR_SEND_WITH_INV || o == IBV_WR_RDMA_WRITE_WITH_IMM; }

/// The responder gets packet `n` of a message.
Answer execute(ModelQp& r, const ModelQp& q, model::Send& s, std::uint32_t n, std::uint32_t psn) {
  if (r.attr.qp_state != IBV_QPS_RTR && r.attr.qp_state != IBV_QPS_RTS && r.attr.qp_state != IBV_QPS_SQD) return Answer::kNone;
  if (mtu_of(r) != mtu_of(q)) {
    fprintf(stderr, "the ends of a path on link %d have MTUs of %u and %u\n", q.nic->link, mtu_of(q), mtu_of(r));
    abort();
  }
  const std::int32_t d = difference(psn, r.expected);
  if (d > 0) return Answer::kNone;
  if (d < 0) return Answer::kAck;  // once more
  const bool last = n + 1 == packets_of(q, s);
  const std::uint32_t offset = n * mtu_of(q), bytes = std::min(mtu_of(q), s.bytes - offset);
  if (!grants(r, s)) return Answer::kBadAccess;
  if (s.wr.opcode == IBV_WR_RDMA_READ) {
    if (!may(*r.nic, s.wr.wr.rdma.rkey, s.wr.wr.rdma.remote_addr, s.bytes)) return Answer::kBadAccess;
    r.expected = (psn + s.psns) & kPsnMask;
    return Answer::kAck;
  }
  if (is_atomic(s.wr.opcode)) {
    if (!may(*r.nic, s.wr.wr.atomic.rkey, s.wr.wr.atomic.remote_addr, s.bytes)) return Answer::kBadAccess;
    auto* const word = reinterpret_cast<std::uint64_t*>(s.wr.wr.atomic.remote_addr);
    s.answer = *word;
    if (s.wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) *word += s.wr.wr.atomic.compare_add;
    else if (*word == s.wr.wr.atomic.compare_add) *word = s.wr.wr.atomic.swap;
    r.expected = (psn + 1) & kPsnMask;
    return Answer::kAck;
  }
  if (takes_receive(s.wr.opcode) && (s.wr.opcode != IBV_WR_RDMA_WRITE_WITH_IMM || last) && !r.receive_open) {
    auto& receives = receives_of(r);
    if (!receives.size()) return Answer::kNotReady;
    r.receive = receives.slots[receives.from];
    if (r.qp.srq) {
      receives.from = (receives.from + 1) & receives.mask();
      model::Srq& srq = *reinterpret_cast<model::Srq*>(r.qp.srq);
      if (receives.size() < srq.limit) srq.limit = 0, raise(r.qp.context, IBV_EVENT_SRQ_LIMIT_REACHED, &srq);
    }
    r.receive_open = true;
    r.received = 0;
  }
  const bool write_to = s.wr.opcode == IBV_WR_RDMA_WRITE || s.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || s.wr.opcode == IBV_WR_ATOMIC_WRITE;
  if (write_to && bytes && !may(*r.nic, s.wr.wr.rdma.rkey, s.wr.wr.rdma.remote_addr, s.bytes)) return Answer::kBadAccess;
  std::vector<std::uint8_t> data(bytes);
  if (holds_data(s.wr)) std::copy_n(s.inline_data.begin() + offset, bytes, data.begin());
  else if (bytes) through(*q.nic, s.sges, offset, bytes, [&](const std::uint8_t* at, std::uint32_t to, std::uint32_t part) { std::memcpy(&data[to], at, part); });
  if (write_to) {
    std::memcpy(reinterpret_cast<void*>(s.wr.wr.rdma.remote_addr + offset), data.data(), bytes);
    if (last && s.bytes) ++writes[reinterpret_cast<void*>(s.wr.wr.rdma.remote_addr)];
  } else if (bytes && !through(*r.nic, r.receive.sges, offset, bytes, [&](std::uint8_t* at, std::uint32_t from, std::uint32_t part) { std::memcpy(at, &data[from], part); })) {
    return Answer::kBadAccess;
  }
  r.expected = (psn + 1) & kPsnMask;
  if (last && takes_receive(s.wr.opcode)) {
    ibv_wc wc{};
    wc.wr_id = r.receive.wr_id;
    wc.opcode = write_to ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    wc.byte_len = s.bytes;
    wc.qp_num = r.qp.qp_num;
    wc.src_qp = q.qp.qp_num;
    if (s.wr.opcode == IBV_WR_SEND_WITH_INV) {
      wc.wc_flags = IBV_WC_WITH_INV;
      windows.at((wc.invalidated_rkey = s.wr.invalidate_rkey) >> 8).bound = false;
    } else if (s.wr.opcode != IBV_WR_SEND) {
      wc.wc_flags = IBV_WC_WITH_IMM;
      wc.imm_data = s.wr.imm_data;
    }
    if (!r.qp.srq) r.receives.from = (r.receives.from + 1) & r.receives.mask();
    r.receive_open = false;
    complete(r.qp.recv_cq, wc, s.wr.send_flags & IBV_SEND_SOLICITED);
  }
  return Answer::kAck;
}

/// All that was executed completes.
void acknowledged(ModelQp& q, ModelQp& r) {
  while (q.sends.size()) {
    model::Send& s = q.sends.slots[q.sends.from];
    if (!s.begun) return;
    const std::uint32_t end = (s.first_psn + s.psns) & kPsnMask;
    if (difference(r.expected, end) < 0) return;
    if (s.wr.opcode == IBV_WR_RDMA_READ) {
      for (; s.answered < packets_of(q, s); ++s.answered) {
        if (!passes(q, &r, true)) return;
        const std::uint32_t offset = s.answered * mtu_of(q);
        through(*q.nic, s.sges, offset, std::min(mtu_of(q), s.bytes - offset), [&](std::uint8_t* at, std::uint32_t from, std::uint32_t part) {
          std::memcpy(at, reinterpret_cast<const void*>(s.wr.wr.rdma.remote_addr + offset + from), part);
        });
      }
    }
    if (is_atomic(s.wr.opcode))
      through(*q.nic, s.sges, 0, s.bytes, [&](std::uint8_t* at, std::uint32_t from, std::uint32_t part) {
        std::memcpy(at, reinterpret_cast<const std::uint8_t*>(&s.answer) + from, part);
      });
    if (q.sends.from == q.next) {  // it was being sent once more
      q.next = (q.next + 1) & q.sends.mask();
      q.next_packet = 0;
      q.psn = end;
    }
    complete_send(q, IBV_WC_SUCCESS);
    q.in_flight -= std::min(q.in_flight, packets_of(q, s));
    q.retries = 0;
    q.progress = Clock::now();
  }
}

/// The next packet of `s`.
bool fits(const ModelQp& q, const model::Send& s) {
  const std::uint32_t left = s.bytes - std::min(s.bytes, q.next_packet * mtu_of(q));
  return s.wr.opcode == IBV_WR_RDMA_READ || std::min(left, mtu_of(q)) <= wires[q.nic->link].largest;
}

/// One packet. @return nothing was to be done
bool step(ModelQp& q) {
  if (q.attr.qp_state == IBV_QPS_ERR) {
    if (!q.sends.size() || flushes_held) return true;
    flush_sends(q);
    return false;
  }
  if (q.attr.qp_state != IBV_QPS_RTS || !q.sends.size()) {
    q.idle = true;
    return true;
  }
  if (q.idle) q.idle = false, q.progress = Clock::now();
  ModelQp* const r = peer_of(q);
  const bool no_way = !has_source(q) || (unreachable(q.nic->link) && !(r && r->nic == q.nic));
  if (no_way && q.next == q.sends.from) {
    if (Wire& w = wires[q.nic->link]; w.failed == Clock::time_point{}) w.failed = Clock::now();
    fail_send(q, IBV_WC_LOC_QP_OP_ERR);
    return false;
  }
  if (q.next != q.sends.to && q.in_flight < kWindowPackets && !no_way) {
    model::Send& s = q.sends.slots[q.next];
    if (!q.next_packet) s.first_psn = q.psn, s.psns = packets_of(q, s) - s.answered, s.begun = q.has_sent = true;
    if (!holds_data(s.wr) && s.bytes &&
        !through(*q.nic, s.sges, 0, s.bytes, [](std::uint8_t*, std::uint32_t, std::uint32_t) {})) {
      if (q.next != q.sends.from) return true;
      fail_send(q, IBV_WC_LOC_PROT_ERR);
      return false;
    }
    Answer answer = Answer::kNone;
    if (delayed.next && is_atomic(s.wr.opcode) && r && r->nic == q.nic) delayed = {.psn = q.psn, .from = &q, .to = r, .what = s};
    if (delayed.from != &q && passes(q, r, false) && fits(q, s) && r && difference(q.psn, r->expected) <= 0) answer = execute(*r, q, s, q.next_packet, q.psn);
    if (answer == Answer::kNotReady) {
      q.progress = Clock::now();
      return true;
    }
    if (answer == Answer::kBadAccess) {
      while (q.sends.from != q.next) complete_send(q, IBV_WC_SUCCESS);
      fail_send(q, IBV_WC_REM_ACCESS_ERR);
      to_err(*r);
      return false;
    }
    const bool read = s.wr.opcode == IBV_WR_RDMA_READ;
    const std::uint32_t took = read ? s.psns : 1;
    q.psn = (q.psn + took) & kPsnMask;
    q.in_flight += took;
    if (read || ++q.next_packet == packets_of(q, s)) {
      q.next = (q.next + 1) & q.sends.mask();
      q.next_packet = 0;
    }
    if (answer == Answer::kAck && rand() % 3 == 0 && passes(q, r, true)) acknowledged(q, *r);
    return false;
  }
  if (r && r->attr.qp_state >= IBV_QPS_RTR && r->attr.qp_state != IBV_QPS_ERR && passes(q, r, true)) acknowledged(q, *r);
  if (!q.sends.size()) return false;
  const auto told = std::chrono::nanoseconds(4096ull << q.attr.timeout) / kFaster;
  if (Clock::now() - q.progress < (q.attr.timeout ? told : kRetryAfter)) return true;
  q.progress = Clock::now();
  if (q.retries++ == (q.attr.timeout ? q.attr.retry_cnt : kRetries)) {
    starved.given_up += r && r->nic == q.nic;
    fail_send(q, IBV_WC_RETRY_EXC_ERR);
    return false;
  }
  q.next = q.sends.from;  // from the oldest that was not acknowledged
  q.next_packet = 0;
  q.in_flight = 0;
  if (const model::Send& s = q.sends.slots[q.next]; s.begun) q.psn = (s.first_psn + s.psns - (packets_of(q, s) - s.answered)) & kPsnMask;
  return false;
}

void run_devices() {
  std::unique_lock guard(lock);
  for (;;) {
    bool idle = true;
    for (const auto& nic : nics)
      for (auto i = nic->busy.begin(); i != nic->busy.end();) {
        idle = step(*i->second) && idle;
        i = i->second->sends.size() ? std::next(i) : nic->busy.erase(i);
      }
    if (idle) work.wait_for(guard, std::chrono::microseconds(300));
    else guard.unlock(), std::this_thread::yield(), guard.lock();
  }
}

ibv_gid gid_named(std::uint8_t name) {
  ibv_gid gid{};
  gid.raw[0] = 0xfe;
  gid.raw[15] = name;
  return gid;
}

void start() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (int i = 0; i < 2 * kRails; ++i) {
      auto nic = std::make_unique<Nic>();
      nic->name = std::string(1, "ab"[i / kRails]) + "012"[i % kRails];
      nic->link = i % kRails;
      std::strcpy(nic->device.name, nic->name.c_str());
      nic->gids[0] = gid_named(static_cast<std::uint8_t>(i + 1));
      nic->next_qpn = 17;  // the same on every NIC, as with soft-RoCE
      nic->next_key = static_cast<std::uint32_t>(0x1000 * (i + 1));
      nics[i] = std::move(nic);
    }
    std::thread(run_devices).detach();
  });
}

/// Before the libraries watch forks: so it comes behind them.
[[gnu::constructor]] void watch_forks() {
  const auto unlock = [] { lock.unlock(); };
  pthread_atfork([] { lock.lock(); }, unlock, unlock);
}

Nic* nic_of(const ibv_context* c) {
  for (const auto& nic : nics)
    if (c->device == &nic->device) return nic.get();
  return nullptr;
}

/// At once: nothing else is in the queue of who does that.
int bind_window(ModelQp& q, const ibv_send_wr& wr) {
  const ibv_mw_bind_info& info = wr.bind_mw.bind_info;
  if (!info.mr) return EFAULT;  // as a provider that looks into it
  const auto window = windows.find(wr.bind_mw.mw->rkey >> 8);
  const bool is_right = window != windows.end() && window->second.rkey == wr.bind_mw.mw->rkey &&
                        (!info.length || may(*q.nic, info.mr->lkey, info.addr, static_cast<std::uint32_t>(info.length)));
  ibv_wc wc{};
  wc.wr_id = wr.wr_id;
  wc.opcode = IBV_WC_BIND_MW;
  wc.qp_num = q.qp.qp_num;
  if (q.attr.qp_state == IBV_QPS_ERR) wc.status = IBV_WC_WR_FLUSH_ERR;
  else if (!is_right) wc.status = IBV_WC_MW_BIND_ERR;
  else window->second = {info.length != 0, wr.bind_mw.rkey};
  complete(q.qp.send_cq, wc);
  if (wc.status == IBV_WC_MW_BIND_ERR) to_err(q);
  return 0;
}

/// Likewise. What is not bound cannot be.
int end_binding(ModelQp& q, const ibv_send_wr& wr) {
  ibv_wc wc{};
  wc.wr_id = wr.wr_id;
  wc.opcode = IBV_WC_LOCAL_INV;
  wc.qp_num = q.qp.qp_num;
  if (!std::exchange(windows.at(wr.invalidate_rkey >> 8).bound, false)) wc.status = IBV_WC_LOC_QP_OP_ERR;
  complete(q.qp.send_cq, wc);
  return 0;
}

int put_into_queue(ModelQp& q, ibv_send_wr* wr, ibv_send_wr** bad) {
  std::unique_lock guard(lock);
  for (; wr; wr = wr->next) {
    *bad = wr;
    if (q.attr.qp_state < IBV_QPS_RTS && q.attr.qp_state != IBV_QPS_ERR) return EINVAL;
    if (wr->opcode == IBV_WR_BIND_MW) {
      if (const int err = bind_window(q, *wr)) return err;
      continue;
    }
    if (wr->opcode == IBV_WR_LOCAL_INV) {
      if (const int err = end_binding(q, *wr)) return err;
      continue;
    }
    if (is_atomic(wr->opcode) && wr->wr.atomic.remote_addr % sizeof(std::uint64_t)) {  // as soft-RoCE
      guard.unlock();
      usleep(2000);  // others come to the CQ before the caller knows
      return EINVAL;
    }
    if (q.sends.full()) return ENOMEM;
    model::Send& s = q.sends.slots[q.sends.to];
    const bool begun = s.begun;  // stale, as is what else the device notes there
    const std::uint32_t psn = s.first_psn, psns = s.psns;
    s = {};
    s.first_psn = psn;
    s.psns = psns;
    s.begun = begun && q.attr.qp_state == IBV_QPS_ERR;
    s.wr = *wr;
    s.sges.assign(wr->sg_list, wr->sg_list + wr->num_sge);
    for (const ibv_sge& sge : s.sges) s.bytes += sge.length;
    if (holds_data(*wr))
      for (const ibv_sge& sge : s.sges) s.inline_data.insert(s.inline_data.end(), reinterpret_cast<std::uint8_t*>(sge.addr), reinterpret_cast<std::uint8_t*>(sge.addr) + sge.length);
    if (ModelQp* const r = takes_receive(wr->opcode) ? peer_of(q) : nullptr; r && !receives_of(*r).size()) ++unready_sends;
    q.sends.to = (q.sends.to + 1) & q.sends.mask();
    q.nic->busy[q.qp.qp_num] = &q;
  }
  work.notify_one();
  return 0;
}

/// Of this thread.
template <class Put>
int put_late(const ModelQp& q, Put&& put) {
  {
    std::unique_lock guard(lock);
    held.at = &q;
    held_changes.wait(guard, [] { return held.let_go; });
  }
  const int err = put();
  std::lock_guard guard(lock);
  held = {};
  held_changes.notify_all();
  return err;
}

/// Who puts `q` into ERR while a thread is held that is to post right after that.
template <class ToErr>
void beside_held(std::unique_lock<std::mutex>& guard, ModelQp& q, ToErr&& to_err) {
  if (held.before) {
    guard.unlock();
    held.before(held.with);
    guard.lock();
  }
  while (q.sends.size()) {  // the path carries still
    guard.unlock();
    usleep(100);
    guard.lock();
  }
  to_err();
  held.let_go = true;
  held_changes.notify_all();
  held_changes.wait(guard, [] { return !held.at; });
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
  auto& q = *reinterpret_cast<ModelQp*>(qp);
  if (std::exchange(loses_processor, false)) return put_late(q, [&] { return put_into_queue(q, wr, bad); });
  if (!q.session) return put_into_queue(q, wr, bad);
  std::lock_guard guard(q.session->lock);
  return put_into_queue(q, wr, bad);
}

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  std::lock_guard guard(lock);
  auto* mw = static_cast<ibv_mw*>(calloc(1, sizeof(ibv_mw)));
  mw->context = pd->context;
  mw->pd = pd;
  mw->type = type;
  mw->handle = nic_of(pd->context)->next_key++;
  mw->rkey = mw->handle << 8;
  windows[mw->handle] = {false, mw->rkey};
  return mw;
}

int dealloc_mw(ibv_mw* mw) {
  std::lock_guard guard(lock);
  windows.erase(mw->handle);
  free(mw);
  return 0;
}

int bind_mw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind) {
  ibv_send_wr wr{}, *bad;
  wr.wr_id = bind->wr_id;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = bind->send_flags;
  wr.bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = bind->bind_info};
  const int err = post_send(qp, &wr, &bad);
  if (!err) mw->rkey = wr.bind_mw.rkey;
  return err;
}

/* ---- ibv_wr_* ------------------------------------------------------------------- */

Session& session_of(ibv_qp_ex* ex) { return *reinterpret_cast<Session*>(ex); }

ibv_send_wr& begin_wr(ibv_qp_ex* ex, ibv_wr_opcode opcode) {
  Session& s = session_of(ex);
  ibv_send_wr& wr = s.wrs.emplace_back();
  s.sges.emplace_back();
  wr = {};
  wr.wr_id = ex->wr_id;
  wr.send_flags = ex->wr_flags;
  wr.opcode = opcode;
  return wr;
}

ibv_send_wr& begin_rdma(ibv_qp_ex* ex, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr) {
  ibv_send_wr& wr = begin_wr(ex, opcode);
  wr.wr.rdma = {.remote_addr = addr, .rkey = rkey};
  return wr;
}

void end_session(Session& s) {
  s.wrs.clear();
  s.sges.clear();
  s.words.clear();
  if (std::exchange(s.open, false)) s.lock.unlock();
}

/// librxe posts all of a session, or nothing.
bool has_room(const ModelQp& q, std::size_t wrs) {
  std::lock_guard guard(lock);
  return q.sends.size() + wrs <= q.sends.mask();
}

Session* new_session(ModelQp& q) {
  auto* s = new Session;
  s->of = &q;
  ibv_qp_ex& ex = s->ex;
  ex.wr_start = [](ibv_qp_ex* x) {
    if (rand() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the thread has lost its processor
    session_of(x).lock.lock();
    session_of(x).open = true;
  };
  ex.wr_abort = [](ibv_qp_ex* x) { end_session(session_of(x)); };
  ex.wr_complete = [](ibv_qp_ex* x) {
    Session& of = session_of(x);
    for (std::size_t i = 0; i < of.wrs.size(); ++i) {
      of.wrs[i].sg_list = of.sges[i].data();
      of.wrs[i].num_sge = static_cast<int>(of.sges[i].size());
      of.wrs[i].next = i + 1 < of.wrs.size() ? &of.wrs[i + 1] : nullptr;
    }
    while (sessions_held) usleep(1000);
    ibv_send_wr* bad;
    const int err = !of.open ? EPROTO : of.wrs.empty() ? 0 : !has_room(*of.of, of.wrs.size()) ? ENOSPC : put_into_queue(*of.of, &of.wrs[0], &bad);
    end_session(of);
    return err;
  };
  ex.wr_send = [](ibv_qp_ex* x) { begin_wr(x, IBV_WR_SEND); };
  ex.wr_send_imm = [](ibv_qp_ex* x, __be32 imm) { begin_wr(x, IBV_WR_SEND_WITH_IMM).imm_data = imm; };
  ex.wr_rdma_write = [](ibv_qp_ex* x, std::uint32_t rkey, std::uint64_t addr) { begin_rdma(x, IBV_WR_RDMA_WRITE, rkey, addr); };
  ex.wr_rdma_write_imm = [](ibv_qp_ex* x, std::uint32_t rkey, std::uint64_t addr, __be32 imm) { begin_rdma(x, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr).imm_data = imm; };
  ex.wr_rdma_read = [](ibv_qp_ex* x, std::uint32_t rkey, std::uint64_t addr) { begin_rdma(x, IBV_WR_RDMA_READ, rkey, addr); };
  ex.wr_atomic_cmp_swp = [](ibv_qp_ex* x, std::uint32_t rkey, std::uint64_t addr, std::uint64_t compare, std::uint64_t swap) {
    begin_wr(x, IBV_WR_ATOMIC_CMP_AND_SWP).wr.atomic = {.remote_addr = addr, .compare_add = compare, .swap = swap, .rkey = rkey};
  };
  ex.wr_atomic_fetch_add = [](ibv_qp_ex* x, std::uint32_t rkey, std::uint64_t addr, std::uint64_t add) {
    begin_wr(x, IBV_WR_ATOMIC_FETCH_AND_ADD).wr.atomic = {.remote_addr = addr, .compare_add = add, .swap = 0, .rkey = rkey};
  };
  ex.wr_atomic_write = [](ibv_qp_ex* x, std::uint32_t rkey, std::uint64_t addr, const void* data) {
    begin_rdma(x, IBV_WR_ATOMIC_WRITE, rkey, addr);
    Session& of = session_of(x);
    std::memcpy(&of.words.emplace_back(), data, sizeof of.words[0]);
    of.sges.back().push_back({reinterpret_cast<std::uintptr_t>(&of.words.back()), sizeof of.words[0], 0});
  };
  ex.wr_set_sge_list = [](ibv_qp_ex* x, std::size_t n, const ibv_sge* list) { session_of(x).sges.back().assign(list, list + n); };
  return s;
}

int put_into_receives(model::Ring<model::Receive>& ring, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  std::lock_guard guard(lock);
  for (; wr; wr = wr->next) {
    *bad = wr;
    if (ring.full()) return ENOMEM;
    ring.slots[ring.to] = {wr->wr_id, {wr->sg_list, wr->sg_list + wr->num_sge}};
    ring.to = (ring.to + 1) & ring.mask();
  }
  return 0;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  if (qp->srq) return EINVAL;
  auto& q = *reinterpret_cast<ModelQp*>(qp);
  if (std::exchange(loses_processor, false)) return put_late(q, [&] { return put_into_receives(q.receives, wr, bad); });
  return put_into_receives(q.receives, wr, bad);
}

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad) { return put_into_receives(reinterpret_cast<model::Srq*>(srq)->receives, wr, bad); }

void wait_while(const std::atomic<bool>& held, std::atomic<unsigned>& waiting) {
  ++waiting;
  while (held) usleep(1000);
  --waiting;
}

int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) {
  if (std::exchange(loses_it_in_poll, false)) wait_while(poll_held, polls_waiting);
  std::lock_guard guard(lock);
  if (!cqs.contains(reinterpret_cast<Cq*>(cq))) fprintf(stderr, "a CQ is polled that was destroyed\n"), abort();
  auto& done = reinterpret_cast<Cq*>(cq)->done;
  int n = 0;
  while (n < entries && !done.empty()) wc[n++] = done.front(), done.pop_front();
  return n;
}

int req_notify_cq(ibv_cq* cq, int solicited_only) {
  std::lock_guard guard(lock);
  auto& armed = reinterpret_cast<Cq*>(cq)->armed;
  if (armed != Cq::kForAll) armed = solicited_only ? Cq::kForSolicited : Cq::kForAll;
  return 0;
}

/* ---- ibv_cq_ex ------------------------------------------------------------------ */

const ibv_wc& now_of(ibv_cq_ex* cq) { return reinterpret_cast<Cq*>(cq)->now; }

int next_poll(ibv_cq_ex* ex) {
  std::lock_guard guard(lock);
  Cq& c = *reinterpret_cast<Cq*>(ex);
  if (c.done.empty()) return ENOENT;
  c.now = c.done.front();
  c.done.pop_front();
  ex->status = c.now.status;
  ex->wr_id = c.now.wr_id;
  return 0;
}

Cq* new_cq(ibv_context* c, int cqe, void* cq_context, ibv_comp_channel* channel) {
  auto* q = new Cq;
  q->cq.context = c;
  q->cq.channel = channel;
  q->cq.cq_context = cq_context;
  q->cq.cqe = cqe;
  pthread_mutex_init(&q->cq.mutex, nullptr);
  pthread_cond_init(&q->cq.cond, nullptr);
  std::lock_guard guard(lock);
  cqs.insert(q);
  return q;
}

std::atomic<unsigned> cq_flags{0};

ibv_cq_ex* create_cq_ex(ibv_context* c, ibv_cq_init_attr_ex* a) {
  if (!takes_events_at(c)) return nullptr;
  ibv_cq_ex& ex = new_cq(c, static_cast<int>(a->cqe), a->cq_context, a->channel)->ex;
  cq_flags = a->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? a->flags : 0;
  ex.start_poll = [](ibv_cq_ex* x, ibv_poll_cq_attr*) {
    const int err = next_poll(x);
    if (!err) reinterpret_cast<Cq*>(x)->session = true;
    return err;
  };
  ex.next_poll = next_poll;
  ex.end_poll = [](ibv_cq_ex* x) { reinterpret_cast<Cq*>(x)->session = false; };
  ex.read_opcode = [](ibv_cq_ex* x) { return now_of(x).opcode; };
  ex.read_vendor_err = [](ibv_cq_ex* x) { return now_of(x).vendor_err; };
  ex.read_byte_len = [](ibv_cq_ex* x) { return now_of(x).byte_len; };
  ex.read_imm_data = [](ibv_cq_ex* x) { return now_of(x).imm_data; };
  ex.read_qp_num = [](ibv_cq_ex* x) { return now_of(x).qp_num; };
  ex.read_src_qp = [](ibv_cq_ex* x) { return now_of(x).src_qp; };
  ex.read_wc_flags = [](ibv_cq_ex* x) { return now_of(x).wc_flags; };
  return &ex;
}

/// Those that nobody has read of a CQ that is destroyed.
void drop_events(ibv_comp_channel& channel, const ibv_cq* of) {
  std::vector<ibv_cq*> others;
  const int flags = fcntl(channel.fd, F_GETFL);
  fcntl(channel.fd, F_SETFL, flags | O_NONBLOCK);
  for (ibv_cq* cq; read(channel.fd, &cq, sizeof cq) == sizeof cq;)
    if (cq != of) others.push_back(cq);
  fcntl(channel.fd, F_SETFL, flags);
  for (ibv_cq* cq : others) (void)!write(channel.refcnt, &cq, sizeof cq);
}

template <class T>
void size_ring(model::Ring<T>& ring, std::uint32_t want) {
  std::size_t n = 1;  // of no depth it is full, as soft-RoCE's
  while (n < want + 1) n *= 2;
  ring.slots.resize(n);
}

}  // namespace

static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* a);  // not ibv_create_qp(): that may be libmigr's

static ibv_qp* create_qp_ex(ibv_context*, ibv_qp_init_attr_ex* init) {
  ibv_qp_init_attr plain;
  std::memcpy(&plain, init, sizeof plain);  // it begins with the same fields
  ibv_qp* const qp = create_qp(init->pd, &plain);
  if (!qp) return nullptr;
  auto* q = reinterpret_cast<ModelQp*>(qp);
  if (init->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) q->session = new_session(*q);
  return qp;
}

MODEL void model_cut(int link, unsigned after_packets, bool answers_only) {
  std::lock_guard guard(lock);
  wires[link] = {.cut = false, .answers_only = answers_only, .no_route = false, .packets_left = static_cast<long>(after_packets)};
}
MODEL void model_cut_now(int link) {
  std::lock_guard guard(lock);
  wires[link].cut = true;
  wires[link].answers_only = false;
}
MODEL unsigned model_break_paths(int link, int end, unsigned receives) {
  std::lock_guard guard(lock);
  unsigned broken = 0;
  for (const auto& [ignored, q] : nics[static_cast<std::size_t>(end * kRails + link)]->qps) {
    if (q->attr.qp_state != IBV_QPS_RTS || q->receives.mask() != receives || !q->sends.size()) continue;
    fail_send(*q, IBV_WC_RETRY_EXC_ERR);
    ++broken;
  }
  return broken;
}
MODEL void model_refuse_qps(int link, int end, unsigned times) {
  std::lock_guard guard(lock);
  nics[static_cast<std::size_t>(end * kRails + link)]->refused_qps = times;
}
MODEL void model_most_wrs(int link, int end, unsigned most) {
  std::lock_guard guard(lock);
  nics[static_cast<std::size_t>(end * kRails + link)]->most_wrs = most;
}
MODEL std::uint32_t model_next_qpn(int link, int end, std::uint32_t next) {
  std::lock_guard guard(lock);
  return std::exchange(nics[static_cast<std::size_t>(end * kRails + link)]->next_qpn, next);
}
MODEL void model_unplug(int link, int end, bool out) {
  start();
  nics[static_cast<std::size_t>(end * kRails + link)]->unplugged = out;
}
MODEL void model_make_foreign(int link, int end, bool foreign) {
  start();
  nics[static_cast<std::size_t>(end * kRails + link)]->foreign = foreign;
}
MODEL unsigned model_cq_flags() { return cq_flags; }
MODEL bool model_is_foreign(const ibv_context* c) { return nic_of(c)->foreign; }
MODEL void model_raise_fatal(int link, int end) {
  std::lock_guard guard(lock);
  for (const auto& [context, ignored] : async_ends)
    if (nic_of(context) == nics[static_cast<std::size_t>(end * kRails + link)].get()) raise(context, IBV_EVENT_DEVICE_FATAL, nullptr);
}
MODEL void model_hold_post(bool until_err, void (*before)(void*), void* with) {
  std::lock_guard guard(lock);
  loses_processor = true;
  held = {.until_err = until_err, .before = before, .with = with};
}
MODEL void model_delay_atomic() {
  std::lock_guard guard(lock);
  delayed.next = true;
}
MODEL void model_starve_own(unsigned retries, bool answers_only) {
  std::lock_guard guard(lock);
  starved = {.retries = retries, .given_up = 0, .answers_only = answers_only};
}
MODEL unsigned model_own_given_up() {
  std::lock_guard guard(lock);
  return starved.given_up;
}
MODEL bool model_holds_post() {
  std::lock_guard guard(lock);
  return held.at;
}
MODEL bool model_holds_post_to_err() {
  std::lock_guard guard(lock);
  return held.at && held.at->attr.qp_state == IBV_QPS_ERR;
}
MODEL void model_let_post_go() {
  std::unique_lock guard(lock);
  held.let_go = true;
  held_changes.notify_all();
  held_changes.wait(guard, [] { return !held.at; });
}
MODEL void model_take_route(int link, unsigned port_late_ms) {
  std::lock_guard guard(lock);
  wires[link].no_route = true;
  wires[link].port_late = std::chrono::milliseconds(port_late_ms);
}
MODEL void model_set_gid(int link, int end, std::uint32_t index, std::uint8_t name) {
  std::lock_guard guard(lock);
  auto& gids = nics[static_cast<std::size_t>(end * kRails + link)]->gids;
  gids_change = true;
  if (name) gids[index] = gid_named(name);
  else gids.erase(index);
}
MODEL void model_largest_packet(int link, std::uint32_t bytes) {
  std::lock_guard guard(lock);
  wires[link].largest = bytes;
}
MODEL void model_mend(int link) {
  std::lock_guard guard(lock);
  wires[link] = {};
}
MODEL unsigned model_writes_at(const void* address) {
  std::lock_guard guard(lock);
  const auto found = writes.find(address);
  return found == writes.end() ? 0 : found->second;
}
MODEL unsigned model_qps() {
  std::lock_guard guard(lock);
  unsigned n = 0;
  for (const auto& nic : nics) n += static_cast<unsigned>(nic->qps.size());
  return n;
}
MODEL void model_forget_writes() {
  std::lock_guard guard(lock);
  writes.clear();
}
MODEL unsigned long model_unready_sends() {
  std::lock_guard guard(lock);
  return unready_sends;
}
MODEL unsigned long model_packets() {
  std::lock_guard guard(lock);
  return packets;
}
MODEL void model_hold_registrations(int link, bool hold) { hold ? registrations_held |= 1u << link : registrations_held &= ~(1u << link); }
MODEL void model_hold_flushes(bool hold) { flushes_held = hold; }
MODEL void model_hold_sessions(bool hold) { sessions_held = hold; }
MODEL void model_keep_registrations(unsigned times) { registrations_kept = times; }
MODEL void model_refuse_registrations(const void* address) { registrations_refused = address; }
MODEL void model_refuse_reregistrations(bool refuse) { reregistrations_refused = refuse; }
MODEL unsigned model_registrations_waiting() { return registrations_waiting; }
MODEL void model_hold_pds(bool hold) { pds_held = hold; }
MODEL unsigned model_pds_waiting() { return pds_waiting; }
MODEL void model_hold_poll() { poll_held = loses_it_in_poll = true; }
MODEL bool model_holds_poll() { return polls_waiting; }
MODEL void model_let_poll_go() { poll_held = false; }
MODEL void model_hold_resets(bool hold) { resets_held = hold; }
MODEL unsigned model_resets_waiting() { return resets_waiting; }
MODEL void model_hold_destroyed_cqs(bool hold) { destroyed_cqs_held = hold; }
MODEL unsigned model_destroyed_cqs_waiting() { return destroyed_cqs_waiting; }
MODEL unsigned model_mrs(int link, int end) {
  std::lock_guard guard(lock);
  return static_cast<unsigned>(nics[static_cast<std::size_t>(end * kRails + link)]->keys.size());
}
MODEL void model_next_key(int link, int end, std::uint32_t index) {
  std::lock_guard guard(lock);
  nics[static_cast<std::size_t>(end * kRails + link)]->next_key = index;
}
MODEL void model_number_anew(bool anew) { number_anew = anew; }
MODEL void model_register_again(const ibv_context* c, std::uint32_t* handle, std::uint32_t* lkey, std::uint32_t* rkey) {
  std::lock_guard guard(lock);
  if (!number_anew) return;
  Nic& nic = *nic_of(c);
  auto node = nic.keys.extract(*lkey);
  *handle = *lkey = *rkey = node.key() = nic.next_key++ << 8 | 0x11;
  nic.keys.insert(std::move(node));
}
MODEL unsigned model_most_registered(const void* address) {
  std::lock_guard guard(lock);
  return registered[address].most;
}
MODEL void model_let_packets_linger(bool let) { packets_linger = let; }
MODEL void model_async_events() {
  std::lock_guard guard(lock);
  with_async_events = true;
}
MODEL void model_raise(ibv_context* c, ibv_event_type type, int port) {
  std::lock_guard guard(lock);
  raise(c, type, reinterpret_cast<void*>(static_cast<std::intptr_t>(port)));
}
MODEL unsigned model_unbalanced() {
  std::lock_guard guard(lock);
  return unbalanced;
}
MODEL void model_restored() {
  std::lock_guard guard(lock);
  owed_acks.clear();
  windows.clear();
  for (Cq* cq : cqs) {
    cq->armed = Cq::kNot;
    if (cq->cq.channel) drop_events(*cq->cq.channel, &cq->cq);
  }
  for (const auto& nic : nics)
    for (const auto& [ignored, q] : nic->qps) {
      if (q->told != IBV_QPS_ERR && q->attr.qp_state == IBV_QPS_ERR) q->attr.qp_state = q->told;
      if (q->attr.qp_state == IBV_QPS_ERR) raise(q->qp.context, IBV_EVENT_QP_LAST_WQE_REACHED, &q->qp);
    }
}
MODEL void model_arrives(const ibv_qp* qp, bool solicited) {
  std::lock_guard guard(lock);
  arrives({qp->qp_num, solicited});
}
MODEL void model_arrives_at_flush(const ibv_qp* qp, bool solicited) {
  std::lock_guard guard(lock);
  at_flush = {qp->qp_num, solicited};
}
MODEL unsigned model_receives_flushed() { return receives_flushed; }
MODEL unsigned model_windows() {
  std::lock_guard guard(lock);
  return static_cast<unsigned>(windows.size());
}
MODEL unsigned model_windows_bound() {
  std::lock_guard guard(lock);
  return static_cast<unsigned>(std::count_if(windows.begin(), windows.end(), [](const auto& w) { return w.second.bound; }));
}
MODEL void model_lock() { lock.lock(); }
MODEL void model_unlock() { lock.unlock(); }

MODEL ibv_device** ibv_get_device_list(int* count) {
  start();
  auto** list = static_cast<ibv_device**>(calloc(std::size(nics) + 1, sizeof(ibv_device*)));
  int n = 0;
  for (const auto& nic : nics)
    if (!nic->unplugged) list[n++] = &nic->device;
  if (count) *count = n;
  return list;
}
MODEL void ibv_free_device_list(ibv_device** list) { free(list); }
MODEL ibv_context* ibv_open_device(ibv_device* device) {
  auto* extended = new verbs_context{};
  extended->sz = sizeof *extended;
  extended->create_qp_ex = create_qp_ex;
  extended->create_cq_ex = create_cq_ex;
  ibv_context* const c = &extended->context;
  c->abi_compat = __VERBS_ABI_IS_EXTENDED;
  c->device = device;
  c->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  c->async_fd = -1;
  if (int ends[2]; with_async_events && !pipe2(ends, O_CLOEXEC)) {
    c->async_fd = ends[0];
    std::lock_guard guard(lock);
    async_ends[c] = {fcntl(ends[0], F_DUPFD_CLOEXEC, 0), ends[1]};
  }
  c->num_comp_vectors = 1;
  c->ops.poll_cq = poll_cq;
  c->ops.req_notify_cq = req_notify_cq;
  c->ops.post_send = post_send;
  c->ops.post_recv = post_recv;
  c->ops.post_srq_recv = post_srq_recv;
  c->ops.alloc_mw = alloc_mw;
  c->ops.dealloc_mw = dealloc_mw;
  c->ops.bind_mw = bind_mw;
  return c;
}
MODEL int ibv_close_device(ibv_context* c) {
  if (c->async_fd >= 0) {
    std::lock_guard guard(lock);
    close(c->async_fd);
    close(async_ends[c].read);
    close(async_ends[c].write);
    async_ends.erase(c);
  }
  close(c->cmd_fd);
  delete verbs_get_ctx(c);
  return 0;
}
static void wait_while_held(const Nic& nic) {
  ++registrations_waiting;
  while (registrations_held >> nic.link & 1) usleep(1000);
  --registrations_waiting;
}
MODEL ibv_pd* ibv_alloc_pd(ibv_context* c) {
  if (!nic_of(c)->link) wait_while(pds_held, pds_waiting);
  auto* pd = new ibv_pd{};
  pd->context = c;
  return pd;
}
MODEL int ibv_dealloc_pd(ibv_pd* pd) { return delete pd, 0; }
MODEL ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, std::size_t length, uint64_t, unsigned access) {
  Nic& nic = *nic_of(pd->context);
  wait_while_held(nic);
  if (addr && nic.link && addr == registrations_refused) return errno = ENOMEM, nullptr;
  std::lock_guard guard(lock);
  auto* m = new Mr{};
  m->mr.context = pd->context;
  m->mr.pd = pd;
  m->mr.addr = addr;
  m->mr.length = length;
  m->mr.lkey = m->mr.rkey = nic.next_key++ << 8 | 0x11;
  m->mr.handle = m->mr.lkey;
  m->access = access;
  nic.keys[m->mr.lkey] = m;
  Registered& r = registered[addr];
  r.most = std::max(r.most, ++r.now);
  return &m->mr;
}
MODEL ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, std::size_t length, int access) {
  return ibv_reg_mr_iova2(pd, addr, length, reinterpret_cast<uint64_t>(addr), static_cast<unsigned>(access));
}
MODEL int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* addr, std::size_t length, int access) {
  if (reregistrations_refused) return errno = EOPNOTSUPP, IBV_REREG_MR_ERR_CMD;
  std::lock_guard guard(lock);
  if (flags & IBV_REREG_MR_CHANGE_PD) mr->pd = pd;
  if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
    --registered[mr->addr].now;
    mr->addr = addr;
    mr->length = length;
    ++registered[addr].now;
  }
  if (flags & IBV_REREG_MR_CHANGE_ACCESS) reinterpret_cast<Mr*>(mr)->access = static_cast<unsigned>(access);
  return 0;
}
MODEL int ibv_dereg_mr(ibv_mr* mr) {
  wait_while_held(*nic_of(mr->context));
  std::lock_guard guard(lock);
  if (nic_of(mr->context)->link == 0 && registrations_kept && registrations_kept--) return EBUSY;
  nic_of(mr->context)->keys.erase(mr->lkey);
  --registered[mr->addr].now;
  delete reinterpret_cast<Mr*>(mr);
  return 0;
}
MODEL ibv_comp_channel* ibv_create_comp_channel(ibv_context* c) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) return nullptr;
  auto* channel = new ibv_comp_channel{};
  channel->context = c;
  channel->fd = ends[0];
  channel->refcnt = ends[1];  // the device's end
  return channel;
}
MODEL int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  close(channel->refcnt);
  delete channel;
  return 0;
}
MODEL void model_most_cqes(int most) {
  std::lock_guard guard(lock);
  most_cqes = most;
}
MODEL int ibv_resize_cq(ibv_cq* cq, int cqe) {
  while (reinterpret_cast<Cq*>(cq)->session) usleep(1000);  // that has locked it
  std::lock_guard guard(lock);
  if (cqe > most_cqes) return EINVAL;
  cq->cqe = cqe;
  return 0;
}
MODEL ibv_cq* ibv_create_cq(ibv_context* c, int cqe, void* cq_context, ibv_comp_channel* channel, int) {
  return takes_events_at(c) ? &new_cq(c, cqe, cq_context, channel)->cq : nullptr;
}
MODEL int ibv_destroy_cq(ibv_cq* cq) {
  {
    std::lock_guard guard(lock);
    forget_owed(cq, cq->comp_events_completed + cq->async_events_completed);
    cqs.erase(reinterpret_cast<Cq*>(cq));
    if (cq->channel) drop_events(*cq->channel, cq);
  }
  if (cq->cq_context && !nic_of(cq->context)->link) wait_while(destroyed_cqs_held, destroyed_cqs_waiting);  // nobody else's takes its place meanwhile
  return delete reinterpret_cast<Cq*>(cq), 0;
}
MODEL int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  if (read(channel->fd, cq, sizeof *cq) != sizeof *cq) return -1;
  *cq_context = (*cq)->cq_context;
  std::lock_guard guard(lock);
  ++owed_acks[*cq];
  return 0;
}
MODEL void ibv_ack_cq_events(ibv_cq* cq, unsigned n) {
  reinterpret_cast<Cq*>(cq)->acknowledged += n;
  pthread_mutex_lock(&cq->mutex);
  cq->comp_events_completed += n;
  pthread_mutex_unlock(&cq->mutex);
}
MODEL int ibv_get_async_event(ibv_context* c, ibv_async_event* event) {
  Raised r;
  if (read(c->async_fd, &r, sizeof r) != sizeof r) return -1;
  event->event_type = r.type;
  event->element.qp = static_cast<ibv_qp*>(r.element);
  std::lock_guard guard(lock);
  if (is_of_port(r.type)) event->element.port_num = static_cast<int>(reinterpret_cast<std::intptr_t>(r.element));
  else ++owed_acks[r.element];
  return 0;
}
MODEL void ibv_ack_async_event(ibv_async_event* event) {
  std::lock_guard guard(lock);
  if (event->event_type == IBV_EVENT_QP_LAST_WQE_REACHED) ++event->element.qp->events_completed;
  else if (event->event_type == IBV_EVENT_SRQ_LIMIT_REACHED) ++event->element.srq->events_completed;
  else if (event->event_type == IBV_EVENT_CQ_ERR) ++event->element.cq->async_events_completed;
}
MODEL ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* a) {
  if (!takes_events_at(pd->context)) return nullptr;
  auto* s = new model::Srq;
  s->srq.context = pd->context;
  s->srq.pd = pd;
  s->srq.srq_context = a->srq_context;
  size_ring(s->receives, a->attr.max_wr);
  pthread_mutex_init(&s->srq.mutex, nullptr);
  pthread_cond_init(&s->srq.cond, nullptr);
  return &s->srq;
}
MODEL int ibv_destroy_srq(ibv_srq* srq) {
  std::lock_guard guard(lock);
  if (reinterpret_cast<model::Srq*>(srq)->qps) return EBUSY;
  forget_owed(srq, srq->events_completed);
  return delete reinterpret_cast<model::Srq*>(srq), 0;
}
MODEL int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* a, int mask) {
  std::lock_guard guard(lock);
  if (mask & IBV_SRQ_LIMIT) reinterpret_cast<model::Srq*>(srq)->limit = a->srq_limit;
  return 0;
}
MODEL int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* a) {
  *a = {};
  a->max_wr = reinterpret_cast<model::Srq*>(srq)->receives.mask();
  a->srq_limit = reinterpret_cast<model::Srq*>(srq)->limit;
  return 0;
}
MODEL ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* a) { return create_qp(pd, a); }
static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* a) {
  if (!takes_events_at(pd->context)) return nullptr;
  std::lock_guard guard(lock);
  Nic& nic = *nic_of(pd->context);
  if (nic.refused_qps) return --nic.refused_qps, errno = ENOMEM, nullptr;
  if (std::max(a->cap.max_send_wr, a->cap.max_recv_wr) > nic.most_wrs) return errno = EINVAL, nullptr;
  auto* q = new ModelQp;
  q->nic = &nic;
  q->qp.context = pd->context;
  q->qp.pd = pd;
  q->qp.qp_context = a->qp_context;
  q->qp.send_cq = a->send_cq;
  q->qp.recv_cq = a->recv_cq;
  q->qp.srq = a->srq;
  if (a->srq) ++reinterpret_cast<model::Srq*>(a->srq)->qps;
  while (nic.qps.contains(nic.next_qpn)) ++nic.next_qpn;
  q->qp.qp_num = nic.next_qpn++;
  q->qp.handle = q->qp.qp_num;
  q->qp.qp_type = a->qp_type;
  q->signal_all = a->sq_sig_all;
  size_ring(q->sends, a->cap.max_send_wr);
  size_ring(q->receives, a->cap.max_recv_wr);
  pthread_mutex_init(&q->qp.mutex, nullptr);
  pthread_cond_init(&q->qp.cond, nullptr);
  nic.qps[q->qp.qp_num] = q;
  return &q->qp;
}
MODEL int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  if ((mask & IBV_QP_AV) && !neighbour_answers(nic_of(qp->context))) return ETIMEDOUT;
  if ((mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RESET && !nic_of(qp->context)->link) wait_while(resets_held, resets_waiting);
  std::unique_lock guard(lock);
  auto& q = *reinterpret_cast<ModelQp*>(qp);
  if (!(mask & IBV_QP_STATE) && q.attr.qp_state == IBV_QPS_ERR) return EINVAL;
  if ((mask & IBV_QP_PORT) && attr->port_num != 1) return EINVAL;
  if (mask & IBV_QP_STATE) {
    if (attr->qp_state == IBV_QPS_RTR && q.attr.qp_state != IBV_QPS_INIT) return EINVAL;
    if (attr->qp_state == IBV_QPS_RTS && q.attr.qp_state != IBV_QPS_RTR && q.attr.qp_state != IBV_QPS_SQD) return EINVAL;
    if (attr->qp_state == IBV_QPS_SQD && (q.attr.qp_state != IBV_QPS_RTS || q.sends.size())) return EINVAL;  // of ours: nothing is to be finished
    if (attr->qp_state == IBV_QPS_ERR && q.attr.qp_state == IBV_QPS_RESET) return EINVAL;
    if (attr->qp_state == IBV_QPS_RESET) {
      if (flushes_held && q.attr.qp_state == IBV_QPS_ERR) flush_sends(q);
      for (model::Send& s : q.sends.slots) s = {};
      q.sends.from = q.next = q.sends.to;
      q.next_packet = q.in_flight = q.retries = 0;
      q.receives.from = q.receives.to;
      q.receive_open = false;
    }
  }
  if (mask & IBV_QP_AV) {
    q.attr.ah_attr = attr->ah_attr;
    const auto source = q.nic->gids.find(attr->ah_attr.grh.sgid_index);
    q.source = source == q.nic->gids.end() ? ibv_gid{} : source->second;
  }
  if (mask & IBV_QP_DEST_QPN) q.attr.dest_qp_num = attr->dest_qp_num;
  if (mask & IBV_QP_RQ_PSN) q.expected = attr->rq_psn;
  if (mask & IBV_QP_SQ_PSN) q.psn = attr->sq_psn;
  if (mask & IBV_QP_PATH_MTU) q.attr.path_mtu = attr->path_mtu;
  if (mask & IBV_QP_TIMEOUT) q.attr.timeout = attr->timeout;
  if (mask & IBV_QP_MIN_RNR_TIMER) q.attr.min_rnr_timer = attr->min_rnr_timer;
  if (mask & IBV_QP_RETRY_CNT) q.attr.retry_cnt = attr->retry_cnt;
  if (mask & IBV_QP_PORT) q.attr.port_num = attr->port_num;
  if (mask & IBV_QP_RNR_RETRY) q.attr.rnr_retry = attr->rnr_retry;
  if (mask & IBV_QP_MIN_RNR_TIMER) q.attr.min_rnr_timer = attr->min_rnr_timer;
  if (mask & IBV_QP_MAX_QP_RD_ATOMIC) q.attr.max_rd_atomic = attr->max_rd_atomic;
  if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) q.attr.max_dest_rd_atomic = attr->max_dest_rd_atomic;
  if (mask & IBV_QP_ACCESS_FLAGS) q.attr.qp_access_flags = attr->qp_access_flags, q.limited = true;
  if (!(mask & IBV_QP_STATE)) return 0;
  const auto become = [&] {
    q.attr.qp_state = q.told = attr->qp_state;
    qp->state = attr->qp_state;
    if (attr->qp_state == IBV_QPS_ERR) to_err(q);
  };
  if (attr->qp_state == IBV_QPS_ERR && held.at == &q && held.until_err) beside_held(guard, q, become);
  else become();
  return 0;
}
MODEL ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr*) {
  wait_while_held(*nic_of(pd->context));
  if (neighbour_answers(nic_of(pd->context))) return new ibv_ah{.context = pd->context, .pd = pd, .handle = 0};
  errno = ETIMEDOUT;
  return nullptr;
}
MODEL int ibv_destroy_ah(ibv_ah* ah) { return delete ah, 0; }
MODEL int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
  std::lock_guard guard(lock);
  auto& q = *reinterpret_cast<ModelQp*>(qp);
  *attr = q.attr;
  attr->cur_qp_state = q.attr.qp_state;
  attr->sq_psn = q.psn;
  attr->rq_psn = q.expected;
  qp->state = q.attr.qp_state;
  *init = {};
  if (delayed.to == &q) execute(q, *delayed.from, delayed.what, 0, delayed.psn), delayed = {};  // it comes right then
  return 0;
}
MODEL int ibv_destroy_qp(ibv_qp* qp) {
  std::unique_lock guard(lock);
  auto* q = reinterpret_cast<ModelQp*>(qp);
  while (packets_linger && q->has_sent && wires[q->nic->link].cut) {
    guard.unlock();
    usleep(1000);
    guard.lock();
  }
  forget_owed(qp, qp->events_completed);
  if (const auto end = async_ends.find(qp->context); end != async_ends.end()) {  // what nobody has read goes with it
    std::vector<Raised> others;
    const int flags = fcntl(end->second.read, F_GETFL);
    fcntl(end->second.read, F_SETFL, flags | O_NONBLOCK);
    for (Raised r; read(end->second.read, &r, sizeof r) == sizeof r;)
      if (r.element != qp) others.push_back(r);
    fcntl(end->second.read, F_SETFL, flags);
    for (const Raised& r : others) (void)!write(end->second.write, &r, sizeof r);
  }
  if (delayed.to == q || delayed.from == q) delayed = {};
  q->nic->qps.erase(qp->qp_num);
  q->nic->busy.erase(qp->qp_num);
  if (qp->srq) --reinterpret_cast<model::Srq*>(qp->srq)->qps;
  delete q->session;
  delete q;
  return 0;
}
MODEL int ibv_query_port(ibv_context* c, uint8_t, _compat_ibv_port_attr* attr) {
  auto* a = reinterpret_cast<ibv_port_attr*>(attr);
  std::lock_guard guard(lock);
  a->state = port_is_down(nic_of(c)->link) ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  a->active_mtu = a->max_mtu = kActiveMtu[nic_of(c)->link];
  a->lid = 0;
  return 0;
}
MODEL int ibv_query_gid(ibv_context* c, uint8_t, int index, ibv_gid* gid) {
  std::lock_guard guard(lock);
  const auto& gids = nic_of(c)->gids;
  const auto found = gids.find(static_cast<std::uint32_t>(index));
  *gid = found == gids.end() ? ibv_gid{} : found->second;  // as libibverbs has it where there is none
  return 0;
}
MODEL ssize_t _ibv_query_gid_table(ibv_context* c, ibv_gid_entry* entries, size_t max, uint32_t, size_t) {
  std::lock_guard guard(lock);
  if (!gids_change) return -EOPNOTSUPP;  // as an older libibverbs
  ssize_t n = 0;
  for (const auto& [index, gid] : nic_of(c)->gids) {
    if (static_cast<std::size_t>(n) == max) return -EINVAL;
    entries[n] = {};
    entries[n].gid = gid;
    entries[n].gid_index = index;
    entries[n].port_num = 1;
    entries[n++].gid_type = IBV_GID_TYPE_ROCE_V2;
  }
  return n;
}
MODEL ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) {
  Session* const s = reinterpret_cast<ModelQp*>(qp)->session;
  return s ? &s->ex : nullptr;
}
