// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The verbs objects of one end, and the memory that they work on.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control.h"
#include "options.h"

namespace verify {

template <class T, int (*Destroy)(T*)>
struct VerbsDelete {
  void operator()(T* p) const { Destroy(p); }
};
using Context = std::unique_ptr<ibv_context, VerbsDelete<ibv_context, ibv_close_device>>;
using Pd = std::unique_ptr<ibv_pd, VerbsDelete<ibv_pd, ibv_dealloc_pd>>;
using Mr = std::unique_ptr<ibv_mr, VerbsDelete<ibv_mr, ibv_dereg_mr>>;
using Channel = std::unique_ptr<ibv_comp_channel, VerbsDelete<ibv_comp_channel, ibv_destroy_comp_channel>>;
using Cq = std::unique_ptr<ibv_cq, VerbsDelete<ibv_cq, ibv_destroy_cq>>;
struct MwDelete {  // ibv_dealloc_mw is an inline function of the header
  void operator()(ibv_mw* mw) const { ibv_dealloc_mw(mw); }
};
using Mw = std::unique_ptr<ibv_mw, MwDelete>;
using Srq = std::unique_ptr<ibv_srq, VerbsDelete<ibv_srq, ibv_destroy_srq>>;
using Qp = std::unique_ptr<ibv_qp, VerbsDelete<ibv_qp, ibv_destroy_qp>>;

/// The device of that name, or the first one. SetupError: there is none.
Context open_device(const std::string& name);
/// Its RoCE v2 GID with an IPv4 address; of several the last. SetupError: it has none.
ibv_gid_entry ipv4_gid(ibv_context* context);

/// Page-aligned memory, zeroed; of the huge kinds, whole huge pages.
class Memory {
 public:
  Memory(MemoryKind kind, std::size_t bytes);
  ~Memory();
  Memory(Memory&& o) noexcept : p_(o.p_), bytes_(o.bytes_) { o.p_ = nullptr; }
  Memory& operator=(Memory&&) = delete;
  std::uint8_t* data() const { return p_; }
  std::size_t size() const { return bytes_; }

 private:
  std::uint8_t* p_;
  std::size_t bytes_;
};

/// The words of one QP that the partner's atomics and acks work on. Atomics of all QPs share words[0] of QP 0.
struct Words {
  std::uint64_t shared, sum, swap;
  std::uint64_t ack;      // how far the partner has checked our stream; it writes this
  std::uint64_t ack_out;  // what we write to the partner's
  std::uint64_t unused[3];
};

inline constexpr std::size_t kPage = 4096;

/// What the partner has to know, as sent in Msg::kConnect, before one QpAddress per QP.
struct EndAddress {
  std::uint8_t gid[16];
  std::uint64_t target, readable, words;
  std::uint32_t target_rkey, readable_rkey, words_rkey;
  std::uint32_t mtu;  // enum ibv_mtu
  std::uint32_t lid;
  std::uint32_t rd_atomic;
};
struct QpAddress {
  std::uint32_t qpn, psn, target_rkey;
  std::uint32_t spare_rkey;  // --invalidate: of the window that comes and goes; 0: this QP has none
};

/// What the key of that window is in its n-th life. In between it has had one more, by itself.
inline std::uint32_t spare_key(std::uint32_t rkey, std::uint64_t n) { return (rkey & ~0xffu) | ((2 * n + 1) & 0xff); }

/// --query: what the device says of itself, its port, and each QP.
struct Answers {
  struct OfQp {
    ibv_qp_attr now{};
    ibv_qp_init_attr init{};
  };
  ibv_device_attr device{};
  ibv_port_attr port{};
  std::vector<OfQp> qps;
};

/// --second: a context with one of each, and QPs in every state that needs no partner.
struct SecondContext {
  explicit SecondContext(const Options& o);
  /// @return what does not work, one line; empty: all does
  std::string check(int ib_port) const;
  Context context;
  Pd pd;
  Memory memory{MemoryKind::kPrivate, 4096};
  Mr mr;
  Cq cq;
  Qp qp;           // in RESET
  Qp init, error;  // in these states
  std::uint32_t qpn = 0;

 private:
  std::string flushed(ibv_qp* qp, std::uint64_t wr_id) const;
};

class Fabric {
 public:
  explicit Fabric(const Options& o, const Shape& shape);

  std::string address() const;  // EndAddress and QpAddresses
  void connect(const std::string& partner);
  /// All QPs go from RTR to RTS.
  void begin_to_send();
  /// Destroys every verbs object; the memory stays.
  void close();

  /// @return the first page of the memory of --mr that is not what it was at the start; none: all is
  std::optional<std::size_t> changed_untouched() const;
  /// @return what the names given at creation are no longer, one line; empty: all as it was
  std::string changed_names(bool query) const;

  const Options options;
  const Shape shape;
  Context context;
  Pd pd;
  Channel channel;  // with --events
  // Two registrations of what work requests gather from and scatter to, so that their lists carry different keys.
  Memory local, recv, target, readable, words, untouched;
  Mr local_mr[2], recv_mr[2], target_mr, readable_mr, words_mr, untouched_mr;
  std::vector<Mr> parts_mr;
  std::vector<Cq> cqs;
  std::vector<ibv_cq_ex*> cqs_ex;  // the same, with --cq-ex
  Srq srq;                         // with --srq
  std::vector<Qp> qps;
  std::vector<std::uint32_t> qpn;  // as they were at creation
  std::uint32_t inline_max = 0;    // bytes, of every QP
  std::uint32_t recv_slots = 0;    // receives that a QP keeps posted
  EndAddress partner{};
  std::vector<QpAddress> partner_qps;

  std::uint32_t shared_slots() const { return recv_slots * shape.qps; }  // of the SRQ
  /// --resize: the n-th time.
  void resize(std::uint64_t n);
  /// --invalidate: the partner has ended the n-th life of QP i's window.
  void bind_spare_again(std::uint32_t i, std::uint64_t n) const;
  bool has_spare(std::uint32_t i) const { return options.invalidate && i % 2 == 0; }
  std::uint32_t spare_rkey(std::uint32_t i) const { return has_spare(i) ? spares_[i]->rkey : 0; }
  /// The SRQ's event comes with the next receive that is used.
  void arm_srq() const;
  std::size_t ring_bytes() const { return static_cast<std::size_t>(shape.window()) * shape.size; }
  Words* words_of(std::uint32_t qp) const { return reinterpret_cast<Words*>(words.data()) + qp; }
  ibv_cq* send_cq(std::uint32_t qp) const { return cqs[qp % cqs.size()].get(); }
  ibv_cq* recv_cq(std::uint32_t qp) const { return cqs[(qp + (qp & 1 ? 0 : 1)) % cqs.size()].get(); }

 private:
  Mr reg(const Memory& m, int access, std::optional<std::uint64_t> iova = {}) const;
  /// Of the partner's: with --rereg not as it is to be.
  Mr reg_at_first(const Memory& m, int access, std::optional<std::uint64_t> iova);
  void reregister();
  void hold();
  void create_qp(std::uint32_t i);
  int to_rtr(ibv_qp* qp, std::uint32_t dest_qpn, std::uint32_t psn, const std::uint8_t* gid, std::uint32_t lid, std::uint32_t mtu) const;
  int to_rts(ibv_qp* qp, std::uint32_t psn, std::uint32_t rd_atomic) const;

  ibv_port_attr port_{};
  ibv_gid gid_{};
  int gid_index_ = 0;
  int cqe_ = 0;  // of each CQ, as asked for
  // --rereg: of what these were registered at first, and with what rights they are to be.
  Pd first_pd_;
  std::vector<Memory> first_memory_;
  int target_access_ = 0, readable_access_ = 0;
  // --hold
  Qp held_qp_;
  Memory held_memory_{MemoryKind::kPrivate, kPage};
  Mr held_mr_;
  Answers answers_;  // as they were when the QPs had come to RTS
  Answers ask() const;
  std::unique_ptr<SecondContext> second_;
  std::vector<Mw> windows_;  // --windows: of QP i
  std::vector<std::uint32_t> window_keys_;
  std::vector<Mw> spares_;  // --invalidate: of QP i; null: it has none
  void post_local(std::uint32_t i, ibv_send_wr& wr, unsigned flags) const;
  void await_bound(std::uint32_t i) const;
  void bind_spare(std::uint32_t i, std::uint32_t rkey, unsigned flags) const;
  void make_window(std::uint32_t i);
  void bind_windows();
  std::uint32_t rd_atomic_ = 1;
  std::vector<std::uint32_t> psn_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> keys_;  // lkey, rkey of each MR at creation
  std::vector<const ibv_mr*> mrs() const;
  std::size_t filled_pages() const;
  std::array<std::uint64_t, kPage / sizeof(std::uint64_t)> untouched_page(std::size_t n) const;
};

}  // namespace verify
