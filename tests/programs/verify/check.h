// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migr_verify knows without any hardware: which work requests a stream consists of, which bytes they carry, and
// whether a sequence of completions is the one that must come. No verbs are called here, so the unit tests can hand in
// completions that were lost, doubled, reordered or damaged.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace verify {

// --- what went wrong

enum class Fault : unsigned { kLost, kDuplicated, kReordered, kCorrupted, kOther, kCount };

inline const char* name(Fault f) {
  constexpr const char* kNames[] = {"lost", "duplicated", "reordered", "corrupted", "other"};
  return kNames[static_cast<unsigned>(f)];
}

/// Counts faults by kind and keeps the text of the first one.
class Faults {
 public:
  void add(Fault f, std::string text) {
    ++by_kind_[static_cast<unsigned>(f)];
    if (first_.empty()) first_ = std::string(name(f)) + ": " + std::move(text);
  }
  std::uint64_t of(Fault f) const { return by_kind_[static_cast<unsigned>(f)]; }
  std::uint64_t total() const {
    std::uint64_t n = 0;
    for (auto c : by_kind_) n += c;
    return n;
  }
  const std::string& first() const { return first_; }

 private:
  std::uint64_t by_kind_[static_cast<unsigned>(Fault::kCount)] = {};
  std::string first_;
};

// --- bytes

constexpr std::uint64_t mix(std::uint64_t x) {  // the finalizer of splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The key of one direction of one QP. @param from_client: direction
constexpr std::uint64_t stream_key(std::uint64_t seed, std::uint32_t qp, bool from_client) {
  return mix(mix(seed) ^ (static_cast<std::uint64_t>(qp) << 1 | (from_client ? 1u : 0u)));
}

constexpr std::size_t kHeaderBytes = 16;  // sequence number and its check word: every payload begins so

constexpr std::uint64_t pattern_word(std::uint64_t base, std::size_t i) {
  std::uint64_t x = base + (i + 1) * 0xd6e8feb86659fd93u;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

inline void pattern_fill(std::uint8_t* p, std::size_t len, std::uint64_t key, std::uint64_t seq) {
  const std::uint64_t base = mix(key ^ mix(seq));
  for (std::size_t i = 0, off = 0; off < len; ++i, off += 8) {
    const std::uint64_t w = i == 0 ? seq : pattern_word(base, i);
    std::memcpy(p + off, &w, len - off < 8 ? len - off : 8);
  }
}

/// @return offset of the first byte (of len) that is not what pattern_fill() would write
inline std::optional<std::size_t> pattern_mismatch(const std::uint8_t* p, std::size_t len, std::uint64_t key,
                                                   std::uint64_t seq) {
  const std::uint64_t base = mix(key ^ mix(seq));
  for (std::size_t i = 0, off = 0; off < len; ++i, off += 8) {
    const std::uint64_t w = i == 0 ? seq : pattern_word(base, i);
    const std::size_t n = len - off < 8 ? len - off : 8;
    if (std::memcmp(p + off, &w, n) == 0) continue;
    std::uint8_t want[8];
    std::memcpy(want, &w, 8);
    for (std::size_t b = 0; b < n; ++b)
      if (p[off + b] != want[b]) return off + b;
  }
  return std::nullopt;
}

/// @return the sequence number that a payload claims, if its check word confirms it
inline std::optional<std::uint64_t> pattern_identify(const std::uint8_t* p, std::size_t len, std::uint64_t key) {
  if (len < kHeaderBytes) return std::nullopt;
  std::uint64_t seq, check;
  std::memcpy(&seq, p, 8);
  std::memcpy(&check, p + 8, 8);
  if (check != pattern_word(mix(key ^ mix(seq)), 1)) return std::nullopt;
  return seq;
}

inline std::uint64_t digest(const std::uint8_t* p, std::size_t len, std::uint64_t h = 0xcbf29ce484222325u) {
  for (std::size_t off = 0; off < len; off += 8) {
    std::uint64_t w = 0;
    std::memcpy(&w, p + off, len - off < 8 ? len - off : 8);
    h = (h ^ w) * 0x100000001b3u;
    h ^= h >> 29;
  }
  return h;
}

// --- the stream of work requests

enum class Kind : std::uint8_t { kSend, kSendImm, kWrite, kWriteImm, kRead, kFetchAdd, kCmpSwap, kAck };

/// Takes a receive from the other side, and so tells it how far the stream has come.
constexpr bool consumes(Kind k) { return k == Kind::kSend || k == Kind::kSendImm || k == Kind::kWriteImm; }
constexpr bool writes(Kind k) { return k == Kind::kWrite || k == Kind::kWriteImm; }
constexpr bool has_imm(Kind k) { return k == Kind::kSendImm || k == Kind::kWriteImm; }
constexpr bool is_atomic(Kind k) { return k == Kind::kFetchAdd || k == Kind::kCmpSwap; }

inline const char* name(Kind k) {
  constexpr const char* kNames[] = {"SEND", "SEND_IMM", "WRITE", "WRITE_IMM", "READ", "FETCH_ADD", "CMP_SWAP", "ack WRITE"};
  return kNames[static_cast<unsigned>(k)];
}

enum class Mode : std::uint32_t {
  kSend, kSendImm, kWrite, kWriteImm, kRead, kAtomic, kInline, kUnsignalled, kSg, kMixed, kCount
};
constexpr std::string_view kModeNames[] = {"send",   "send_imm", "write",       "write_imm", "read",
                                           "atomic", "inline",   "unsignalled", "sg",        "mixed"};

inline std::optional<Mode> mode_of(std::string_view text) {
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(Mode::kCount); ++i)
    if (kModeNames[i] == text) return static_cast<Mode>(i);
  return std::nullopt;
}

enum class Transport : std::uint32_t { kRc, kUc, kCount };
constexpr std::string_view kTransportNames[] = {"rc", "uc"};

inline std::optional<Transport> transport_of(std::string_view text) {
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(Transport::kCount); ++i)
    if (kTransportNames[i] == text) return static_cast<Transport>(i);
  return std::nullopt;
}

/// What both ends must agree about; the client tells the server.
struct Shape {
  std::uint64_t seed = 1;
  Mode mode = Mode::kMixed;
  std::uint32_t qps = 1;
  std::uint32_t size = 4096;    // bytes, kHeaderBytes..; the largest message
  std::uint32_t depth = 16;     // WRs that one QP has in flight, at most
  std::uint32_t inline_max = 128;  // bytes
  std::uint64_t iterations = 0;    // WRs of each stream; 0: no limit
  std::uint32_t rate = 0;          // WRs per second of one end; 0: as many as can be
  Transport transport = Transport::kRc;
  std::uint32_t lossless = 0;  // and yet nothing gets lost on the way
  /// A message may be lost without a fault; twice or out of order it may not come.
  bool lossy() const { return transport != Transport::kRc; }
  /// WRITEs that nothing tells of have come, too. @param passed_over messages that have not
  bool compares(std::uint64_t passed_over) const { return !lossy() || (lossless && !passed_over); }
  /// Slots of each ring, and how far a stream may be ahead of what the other end has checked.
  std::uint32_t window() const { return (depth * 2 + 31) / 32 * 32; }
};

constexpr std::uint32_t kMarkEvery = 16;  // at least each 16th WR of a stream that writes takes a receive
constexpr std::uint32_t kMaxSge = 4;
constexpr std::uint32_t kMaxQps = 4096;

struct Op {
  std::uint64_t seq;
  Kind kind;
  std::uint32_t len;    // bytes, of the message
  std::uint32_t slot;   // where a WRITE goes to, a READ comes from
  std::uint32_t imm;    // host order
  bool use_inline;
  bool signalled;
  bool shared;          // FETCH_ADD on the word that all QPs add to
  bool match;           // CMP_SWAP that is to succeed
  std::uint32_t sges;   // 1..kMaxSge
  std::uint64_t arg;    // FETCH_ADD: addend; CMP_SWAP: new value
};

/// The n-th WR of a stream is a function of (shape, key, n): both ends know it without telling each other.
class Stream {
 public:
  Stream(const Shape& shape, std::uint64_t key) : shape_(shape), key_(key) {}

  std::uint64_t key() const { return key_; }
  const Shape& shape() const { return shape_; }

  /// The other end learns of progress only from what takes a receive; a stream without that needs no window.
  bool windowed() const { return shape_.mode != Mode::kRead && shape_.mode != Mode::kAtomic; }

  Op at(std::uint64_t n) const {
    const std::uint64_t h = mix(key_ + n * 0x2545f4914f6cdd1du);
    Op op{};
    op.seq = n;
    op.kind = kind_of(n, h);
    op.slot = static_cast<std::uint32_t>(n % shape_.window());
    op.imm = static_cast<std::uint32_t>(n) ^ static_cast<std::uint32_t>(key_);
    const bool vary = shape_.mode == Mode::kMixed ? (h >> 8 & 1) : (h >> 8 & 3) == 0;
    op.len = vary ? kHeaderBytes + static_cast<std::uint32_t>((h >> 16 & 0xffffff) % (shape_.size - kHeaderBytes + 1))
                  : shape_.size;
    op.signalled = true;
    op.sges = 1;
    const bool may_inline = (consumes(op.kind) || writes(op.kind)) && shape_.inline_max >= kHeaderBytes;
    if (may_inline && (shape_.mode == Mode::kInline || (shape_.mode == Mode::kMixed && (h >> 40 & 3) == 0))) {
      op.use_inline = true;
      if (op.len > shape_.inline_max) op.len = shape_.inline_max;
    }
    if (shape_.mode == Mode::kUnsignalled) op.signalled = false;
    if (shape_.mode == Mode::kMixed) op.signalled = (h >> 42 & 1) != 0;
    const std::uint32_t stride = shape_.depth / 4 ? shape_.depth / 4 : 1;
    if (shape_.lossy()) op.signalled = true;  // there is no answer that could tell of more than one
    if (n % stride == stride - 1) op.signalled = true;  // or the send queue would never be emptied
    if (shape_.mode == Mode::kSg) op.sges = 2 + static_cast<std::uint32_t>((h >> 44 & 0xff) % (kMaxSge - 1));
    if (shape_.mode == Mode::kMixed) op.sges = 1 + static_cast<std::uint32_t>((h >> 44 & 0xff) % kMaxSge);
    if (is_atomic(op.kind)) {
      op.len = 8;
      op.sges = 1;
      op.arg = mix(h);
      op.shared = op.kind == Kind::kFetchAdd && (h >> 52 & 1);
      if (op.shared) op.arg = 1;
      op.match = (h >> 53 & 3) != 0;
    }
    return op;
  }

 private:
  /// UC neither reads nor has atomics.
  Kind kind_of(std::uint64_t n, std::uint64_t h) const {
    const Kind k = reliable_kind_of(n, h);
    if (!shape_.lossy()) return k;
    return k == Kind::kRead ? Kind::kSend : is_atomic(k) ? Kind::kSendImm : k;
  }

  Kind reliable_kind_of(std::uint64_t n, std::uint64_t h) const {
    const bool mark = n % kMarkEvery == kMarkEvery - 1;
    const unsigned r = static_cast<unsigned>(h & 0xff);
    switch (shape_.mode) {
      case Mode::kSend: return Kind::kSend;
      case Mode::kSendImm: return Kind::kSendImm;
      case Mode::kWrite: return mark ? Kind::kWriteImm : Kind::kWrite;
      case Mode::kWriteImm: return Kind::kWriteImm;
      case Mode::kRead: return Kind::kRead;
      case Mode::kAtomic: return r & 1 ? Kind::kFetchAdd : Kind::kCmpSwap;
      case Mode::kInline:
      case Mode::kUnsignalled:
      case Mode::kSg: {
        if (mark) return Kind::kWriteImm;
        if (r % 4 == 3 && shape_.mode != Mode::kInline) return Kind::kRead;
        return r % 3 == 0 ? Kind::kSend : r % 3 == 1 ? Kind::kSendImm : Kind::kWrite;
      }
      default: return mark ? (r & 1 ? Kind::kSend : Kind::kWriteImm) : static_cast<Kind>(r % 7);
    }
  }

  Shape shape_;
  std::uint64_t key_;
};

/// The words at the responder that one stream's atomics work on, as they are after the WRs posted so far.
struct AtomicModel {
  std::uint64_t sum = 0;
  std::uint64_t swap = 0;
  std::uint64_t shared = 0;  // this stream's part

  struct Step {
    std::uint64_t compare;   // CMP_SWAP: what to compare with
    std::uint64_t returned;  // what the WR must bring back; FETCH_ADD on the shared word: the least it may bring
  };
  Step apply(const Op& op) {
    if (op.kind == Kind::kCmpSwap) {
      const Step s{op.match ? swap : ~swap, swap};
      if (op.match) swap = op.arg;
      return s;
    }
    std::uint64_t& word = op.shared ? shared : sum;
    const Step s{0, word};
    word += op.arg;
    return s;
  }
};

/// How much of a stream was executed, as far as the words tell that its atomics work on: what leaves them as they were is not seen.
struct Executed {
  std::uint64_t least, most;                // WRs
  std::uint64_t shared_least, shared_most;  // what they have added to the word of all QPs
};
/// @param completed WRs, with success: so many were executed at least; @param posted at most so many; none: only the least is told
/// @return none: no number of them, each executed once, leaves the words so
inline std::optional<Executed> executed_of(const Stream& s, std::uint64_t sum, std::uint64_t swap, std::uint64_t completed, std::optional<std::uint64_t> posted) {
  constexpr std::uint64_t kMost = 4'000'000;
  AtomicModel m;
  std::optional<Executed> found;
  for (std::uint64_t n = 0;; ++n) {
    const bool fits = m.sum == sum && m.swap == swap;
    if (found && !fits) break;
    if (fits && n >= completed) {
      if (!found) found = Executed{n, n, m.shared, m.shared};
      found->most = n;
      found->shared_most = m.shared;
    }
    if (posted ? n == *posted : found || n == kMost) break;
    if (const Op op = s.at(n); is_atomic(op.kind)) m.apply(op);
  }
  return found;
}

/// What the target ring of a stream holds after its first `total` WRs, nothing else having touched it.
inline std::vector<std::uint8_t> expected_target(const Stream& s, std::uint64_t total) {
  const Shape& shape = s.shape();
  const std::uint32_t window = shape.window();
  std::vector<std::uint8_t> memory(static_cast<std::size_t>(window) * shape.size, 0);
  std::vector<std::uint8_t> payload(shape.size);
  for (std::uint32_t slot = 0; slot < window && slot < total; ++slot) {
    std::uint8_t* at = memory.data() + static_cast<std::size_t>(slot) * shape.size;
    std::size_t covered = 0;  // from the newest write to the oldest; each adds what later ones left of it
    for (std::uint64_t n = (total - 1 - slot) / window * window + slot;; n -= window) {
      const Op op = s.at(n);
      if (writes(op.kind) && op.len > covered) {
        pattern_fill(payload.data(), op.len, s.key(), n);
        std::memcpy(at + covered, payload.data() + covered, op.len - covered);
        covered = op.len;
      }
      if (covered == shape.size || n < window) break;
    }
  }
  return memory;
}

// --- order

/// Judges a sequence of numbers that must be 0, 1, 2, ... (or a known subset of them, in order).
class Order {
 public:
  enum class Verdict { kExpected, kGap, kDuplicate, kLate, kUnknown };

  /// @param n        the number that came
  /// @param expected the one that must come next
  /// @param issued   numbers at or above this were never given out
  Verdict judge(std::uint64_t n, std::uint64_t expected, std::uint64_t issued) const {
    if (n >= issued) return Verdict::kUnknown;
    if (n == expected) return Verdict::kExpected;
    if (n > expected) return Verdict::kGap;
    return missing_.count(n) ? Verdict::kLate : Verdict::kDuplicate;
  }
  void skip(std::uint64_t n) { missing_.insert(n); }
  void came_late(std::uint64_t n) { missing_.erase(n); }
  std::uint64_t missing() const { return missing_.size(); }
  std::uint64_t first_missing() const { return missing_.empty() ? 0 : *missing_.begin(); }

 private:
  std::set<std::uint64_t> missing_;
};

// --- completions of what we post

enum class WcOp : std::uint8_t { kSend, kWrite, kRead, kFetchAdd, kCmpSwap, kRecv, kRecvImm, kOther };

constexpr WcOp wc_op(Kind k) {
  switch (k) {
    case Kind::kSend:
    case Kind::kSendImm: return WcOp::kSend;
    case Kind::kRead: return WcOp::kRead;
    case Kind::kFetchAdd: return WcOp::kFetchAdd;
    case Kind::kCmpSwap: return WcOp::kCmpSwap;
    default: return WcOp::kWrite;
  }
}
inline const char* name(WcOp o) {
  constexpr const char* kNames[] = {"SEND", "RDMA_WRITE", "RDMA_READ", "FETCH_ADD", "COMP_SWAP", "RECV", "RECV_RDMA_WITH_IMM",
                                    "unknown"};
  return kNames[static_cast<unsigned>(o)];
}

/// A completion, as far as it is judged.
struct Done {
  std::uint64_t wr_id;
  WcOp op;
  std::uint32_t byte_len;
  std::uint32_t qp_num;
  bool has_imm = false;
  std::uint32_t imm = 0;  // host order
};

constexpr std::uint64_t kWrIdRecv = 1ull << 47;
/// Each WR of a QP has its own number; the id also tells QP and queue.
constexpr std::uint64_t wr_id(std::uint32_t qp, bool recv, std::uint64_t n) {
  return static_cast<std::uint64_t>(qp + 1) << 48 | (recv ? kWrIdRecv : 0) | n;
}
constexpr std::uint32_t wr_id_qp(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 48) - 1; }
constexpr bool wr_id_recv(std::uint64_t id) { return (id & kWrIdRecv) != 0; }
constexpr std::uint64_t wr_id_number(std::uint64_t id) { return id & (kWrIdRecv - 1); }

/// One send queue: what was posted, and whether the completions are the ones that must come, once each and in order.
class SendChecker {
 public:
  struct Posted {
    std::uint64_t number;   // of the WR on this queue
    Op op;
    std::uint64_t returned; // atomics: see AtomicModel::Step
  };

  SendChecker(std::uint32_t qp, std::uint32_t qp_num) : qp_(qp), qp_num_(qp_num) {}

  /// @return the wr_id to post with
  std::uint64_t post(const Op& op, std::uint64_t returned = 0) {
    queue_.push_back({posted_, op, returned});
    return wr_id(qp_, false, posted_++);
  }

  /// @param retire called with each Posted that is now known to be done, in posting order
  template <class Retire>
  void complete(const Done& d, Faults& faults, Retire&& retire) {
    const std::string who = "QP " + std::to_string(qp_) + " send completion " + std::to_string(wr_id_number(d.wr_id));
    if (d.qp_num != qp_num_)
      faults.add(Fault::kCorrupted, who + ": qp_num " + std::to_string(d.qp_num) + ", want " + std::to_string(qp_num_));
    std::size_t next = 0;
    while (next < queue_.size() && !queue_[next].op.signalled) ++next;
    const std::uint64_t n = wr_id_number(d.wr_id);
    const std::uint64_t expected = next < queue_.size() ? queue_[next].number : posted_;
    if (wr_id_recv(d.wr_id) || wr_id_qp(d.wr_id) != qp_) {
      faults.add(Fault::kCorrupted, who + ": wr_id of another queue");
      return;
    }
    switch (order_.judge(n, expected, posted_)) {
      case Order::Verdict::kUnknown: faults.add(Fault::kCorrupted, who + ": nothing was posted with this wr_id"); return;
      case Order::Verdict::kDuplicate: faults.add(Fault::kDuplicated, who + ": completed before"); return;
      case Order::Verdict::kLate:
        order_.came_late(n);
        faults.add(Fault::kReordered, who + ": after completions of WRs posted later");
        return;
      case Order::Verdict::kGap:
        for (const Posted& p : queue_)
          if (p.number < n && p.op.signalled) order_.skip(p.number);
        break;
      case Order::Verdict::kExpected: break;
    }
    while (!queue_.empty() && queue_.front().number <= n) {
      const Posted p = queue_.front();
      queue_.pop_front();
      ++retired_;
      if (p.number == n) {
        if (!p.op.signalled) faults.add(Fault::kDuplicated, who + ": of an unsignalled WR");
        if (d.op != wc_op(p.op.kind))
          faults.add(Fault::kCorrupted, who + ": opcode " + name(d.op) + " of a " + name(p.op.kind));
        if ((p.op.kind == Kind::kRead || is_atomic(p.op.kind)) && d.byte_len != p.op.len)
          faults.add(Fault::kCorrupted, who + ": byte_len " + std::to_string(d.byte_len) + ", want " + std::to_string(p.op.len));
      }
      retire(p);
    }
  }

  /// To be called when nothing more will come.
  void finish(Faults& faults) const {
    if (order_.missing())
      faults.add(Fault::kLost, "QP " + std::to_string(qp_) + ": " + std::to_string(order_.missing()) +
                                   " send completions, first that of WR " + std::to_string(order_.first_missing()));
    if (!queue_.empty())
      faults.add(Fault::kLost, "QP " + std::to_string(qp_) + ": " + std::to_string(queue_.size()) +
                                   " send WRs never completed, first " + std::to_string(queue_.front().number) + " (" +
                                   name(queue_.front().op.kind) + ")");
  }

  std::size_t in_flight() const { return queue_.size(); }
  std::uint64_t bytes_in_flight() const {
    std::uint64_t n = 0;
    for (const Posted& p : queue_) n += p.op.len;
    return n;
  }
  std::uint64_t posted() const { return posted_; }
  std::uint64_t retired() const { return retired_; }
  bool tail_signalled() const { return queue_.empty() || queue_.back().op.signalled; }

 private:
  std::uint32_t qp_, qp_num_;
  std::uint64_t posted_ = 0, retired_ = 0;
  std::deque<Posted> queue_;
  Order order_;
};

/// The events of one CQ: each arming brings one at most, and what comes to a CQ that was empty after the arming has to bring it.
class EventChecker {
 public:
  bool armed() const { return at_ != At::kNotArmed; }
  void arm() { at_ = At::kArmed; }
  /// @param found completions; none: it is empty
  void polled(int found) {
    if (at_ == At::kArmed && !found) at_ = At::kEmpty;
    else if (at_ == At::kEmpty && found) at_ = At::kOwes;
  }
  /// Something has come, and no event yet.
  bool owes() const { return at_ == At::kOwes; }
  void event(std::size_t cq, Faults& faults) {
    if (!armed()) faults.add(Fault::kOther, "an event of CQ " + std::to_string(cq) + ", which is not armed");
    at_ = At::kNotArmed;
  }
  /// To be called when it has been waited for.
  void finish(std::size_t cq, Faults& faults) {
    if (!owes()) return;
    faults.add(Fault::kLost, "a completion came to CQ " + std::to_string(cq) + ", which was armed, but no event");
    at_ = At::kNotArmed;
  }

 private:
  enum class At : std::uint8_t { kNotArmed, kArmed, kEmpty, kOwes };
  At at_ = At::kNotArmed;
};

/// The receives of an SRQ: each is used once, by whichever QP; their slots are given back by use.
class SharedReceives {
 public:
  static constexpr std::uint32_t kQp = 0xfff0;  ///< stands for a QP in wr_ids

  /// @return the wr_id to post with
  std::uint64_t post(std::uint32_t slot) {
    slot_of_[posted_] = slot;
    return wr_id(kQp, true, posted_++);
  }
  std::optional<std::uint32_t> slot(std::uint64_t n) const {
    const auto at = slot_of_.find(n);
    return at == slot_of_.end() ? std::nullopt : std::optional(at->second);
  }
  /// @return the slot of receive n, free again; none if it is not there to be used
  std::optional<std::uint32_t> take(std::uint64_t n, Faults& faults) {
    const auto found = slot(n);
    if (!found)
      faults.add(n < posted_ ? Fault::kDuplicated : Fault::kCorrupted,
                 "shared receive " + std::to_string(n) + (n < posted_ ? ": completed before" : ": was never posted"));
    slot_of_.erase(n);
    return found;
  }
  std::size_t outstanding() const { return slot_of_.size(); }

 private:
  std::uint64_t posted_ = 0;
  std::map<std::uint64_t, std::uint32_t> slot_of_;
};

/// One receive queue: receives are used in the order of posting, and carry the partner's stream.
class RecvChecker {
 public:
  RecvChecker(std::uint32_t qp, std::uint32_t qp_num, Stream incoming)
      : qp_(qp), qp_num_(qp_num), stream_(std::move(incoming)) {}

  std::uint64_t post() { return wr_id(qp_, true, posted_++); }

  /// @param payload  gives the received bytes: payload(recv number) for SENDs
  /// @param target   the ring that the partner writes to
  /// @return the receive's number, if it is one of ours and was not used before
  template <class Payload>
  std::optional<std::uint64_t> complete(const Done& d, const Payload& payload, const std::uint8_t* target, Faults& faults) {
    const std::uint64_t n = wr_id_number(d.wr_id);
    const std::string who = "QP " + std::to_string(qp_) + " receive " + std::to_string(n);
    if (d.qp_num != qp_num_)
      faults.add(Fault::kCorrupted, who + ": qp_num " + std::to_string(d.qp_num) + ", want " + std::to_string(qp_num_));
    if (!wr_id_recv(d.wr_id) || wr_id_qp(d.wr_id) != qp_) {
      faults.add(Fault::kCorrupted, who + ": wr_id of another queue");
      return std::nullopt;
    }
    switch (wr_order_.judge(n, used_, posted_)) {
      case Order::Verdict::kUnknown: faults.add(Fault::kCorrupted, who + ": no receive was posted with this wr_id"); return {};
      case Order::Verdict::kDuplicate: faults.add(Fault::kDuplicated, who + ": completed before"); return {};
      case Order::Verdict::kLate:
        wr_order_.came_late(n);
        faults.add(Fault::kReordered, who + ": after receives posted later");
        break;
      case Order::Verdict::kGap:
        for (; used_ < n; ++used_) wr_order_.skip(used_);
        used_ = n + 1;
        break;
      case Order::Verdict::kExpected: ++used_; break;
    }
    ++completed_;
    judge_message(d, who, payload(n), target, faults);
    return n;
  }

  /// The same with a receive of an SRQ, which must have been taken from it: those that one QP uses go up.
  /// @param any_order or they need not
  void complete_shared(const Done& d, const std::uint8_t* payload, const std::uint8_t* target, Faults& faults, bool any_order = false) {
    const std::uint64_t n = wr_id_number(d.wr_id);
    const std::string who = "QP " + std::to_string(qp_) + " shared receive " + std::to_string(n);
    if (d.qp_num != qp_num_)
      faults.add(Fault::kCorrupted, who + ": qp_num " + std::to_string(d.qp_num) + ", want " + std::to_string(qp_num_));
    if (n < used_ && !any_order) faults.add(Fault::kReordered, who + ": after receives posted later");
    used_ = n + 1;
    ++completed_;
    judge_message(d, who, payload, target, faults);
  }

  /// @param total WRs that the partner has posted on this stream
  bool complete_up_to(std::uint64_t total) {
    if (!stream_.windowed()) return true;
    next_consuming();
    return expected_ >= total;
  }

  void finish(std::uint64_t total, Faults& faults) {
    if (stream_.windowed())
      for (next_consuming(); expected_ < total; ++expected_, next_consuming()) messages_.skip(expected_);
    if (messages_.missing() && !stream_.shape().lossy())
      faults.add(Fault::kLost, "QP " + std::to_string(qp_) + ": " + std::to_string(messages_.missing()) +
                                   " messages never came, first number " + std::to_string(messages_.first_missing()));
    if (wr_order_.missing())
      faults.add(Fault::kLost, "QP " + std::to_string(qp_) + ": " + std::to_string(wr_order_.missing()) +
                                   " receives were passed over, first " + std::to_string(wr_order_.first_missing()));
  }

  /// All WRs of the partner below this number have been seen and checked.
  std::uint64_t checked() const { return checked_; }
  std::uint64_t completed() const { return completed_; }
  std::uint64_t posted() const { return posted_; }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t outstanding() const { return posted_ - completed_; }
  /// Messages that a lossy transport did not bring.
  std::uint64_t passed_over() const { return messages_.missing(); }

 private:
  void next_consuming() {
    while (!consumes(stream_.at(expected_).kind)) ++expected_;
  }

  void judge_message(const Done& d, const std::string& who, const std::uint8_t* data, const std::uint8_t* target,
                     Faults& faults) {
    if (!stream_.windowed()) {
      faults.add(Fault::kCorrupted, who + ": this stream sends nothing that takes a receive");
      return;
    }
    next_consuming();
    // Which message is it? The immediate tells, else the payload.
    std::optional<std::uint64_t> seq;
    if (d.has_imm) {
      const std::uint32_t low = d.imm ^ static_cast<std::uint32_t>(stream_.key());
      const auto ahead = static_cast<std::int32_t>(low - static_cast<std::uint32_t>(expected_));
      seq = expected_ + static_cast<std::int64_t>(ahead);
      if (ahead < 0 && expected_ < static_cast<std::uint64_t>(-static_cast<std::int64_t>(ahead))) seq.reset();
      if (seq && (static_cast<std::uint64_t>(ahead < 0 ? -static_cast<std::int64_t>(ahead) : ahead) > kPlausible)) seq.reset();
    } else {
      seq = pattern_identify(data, d.byte_len, stream_.key());
      if (seq && *seq > expected_ + kPlausible) seq.reset();
    }
    if (!seq || !consumes(stream_.at(*seq).kind)) {
      faults.add(Fault::kCorrupted, who + ": " + (d.has_imm ? "immediate " + std::to_string(d.imm) : "payload") +
                                        " is of no message of this stream; expected number " + std::to_string(expected_));
      // It stands for the expected one: damage is not loss as well.
      advance(expected_);
      return;
    }
    switch (messages_.judge(*seq, expected_, UINT64_MAX)) {
      case Order::Verdict::kDuplicate: faults.add(Fault::kDuplicated, who + ": message " + std::to_string(*seq)); return;
      case Order::Verdict::kLate:
        messages_.came_late(*seq);
        faults.add(Fault::kReordered, who + ": message " + std::to_string(*seq) + " after number " + std::to_string(expected_ - 1));
        return;
      case Order::Verdict::kGap:
        for (; expected_ < *seq; ++expected_, next_consuming()) messages_.skip(expected_);
        break;
      default: break;
    }
    const Op op = stream_.at(*seq);
    bytes_ += op.len;
    const std::string what = who + ": message " + std::to_string(*seq) + " (" + name(op.kind) + ")";
    const WcOp want = op.kind == Kind::kWriteImm ? WcOp::kRecvImm : WcOp::kRecv;
    if (d.op != want) faults.add(Fault::kCorrupted, what + ": opcode " + name(d.op));
    if (d.has_imm != has_imm(op.kind)) faults.add(Fault::kCorrupted, what + ": immediate flag");
    if (d.has_imm && has_imm(op.kind) && d.imm != op.imm) faults.add(Fault::kCorrupted, what + ": immediate");
    if (d.byte_len != op.len)
      faults.add(Fault::kCorrupted, what + ": byte_len " + std::to_string(d.byte_len) + ", want " + std::to_string(op.len));
    const std::uint8_t* bytes = op.kind == Kind::kWriteImm ? target + slot_offset(op) : data;
    if (auto at = pattern_mismatch(bytes, op.len, stream_.key(), op.seq); at && !overtaken(op, bytes))
      faults.add(Fault::kCorrupted, what + ": byte " + std::to_string(*at) + " of " + std::to_string(op.len) + " differs");
    // WRITEs posted before it have landed before it.
    for (std::uint64_t n = checked_; n < *seq; ++n) {
      const Op w = stream_.at(n);
      if (w.kind != Kind::kWrite) continue;
      bytes_ += w.len;
      if (!stream_.shape().compares(passed_over())) continue;  // it may not have come, and a later one may have
      if (auto at = pattern_mismatch(target + slot_offset(w), w.len, stream_.key(), n); at && !overtaken(w, target + slot_offset(w)))
        faults.add(Fault::kCorrupted, "QP " + std::to_string(qp_) + ": WRITE " + std::to_string(n) + " slot " +
                                          std::to_string(w.slot) + ": byte " + std::to_string(*at) + " of " +
                                          std::to_string(w.len) + " differs when message " + std::to_string(*seq) + " came");
    }
    advance(*seq);
  }

  /// On a lossy transport the sender goes on when nothing comes for long. Then a slot may hold a later message already.
  bool overtaken(const Op& op, const std::uint8_t* bytes) const {
    if (!stream_.shape().lossy() || !writes(op.kind)) return false;
    const auto holds = pattern_identify(bytes, kHeaderBytes, stream_.key());
    return holds && *holds > op.seq && (*holds - op.seq) % stream_.shape().window() == 0 && writes(stream_.at(*holds).kind);
  }

  void advance(std::uint64_t seq) {
    expected_ = checked_ = seq + 1;
    next_consuming();
  }
  std::size_t slot_offset(const Op& op) const { return static_cast<std::size_t>(op.slot) * stream_.shape().size; }

  static constexpr std::uint64_t kPlausible = 1u << 20;  // a number further away is damage, not a gap

  std::uint32_t qp_, qp_num_;
  Stream stream_;
  std::uint64_t posted_ = 0, used_ = 0, completed_ = 0;
  std::uint64_t expected_ = 0;  // the next message, once next_consuming() ran
  std::uint64_t checked_ = 0;
  std::uint64_t bytes_ = 0;
  Order wr_order_, messages_;
};

}  // namespace verify
