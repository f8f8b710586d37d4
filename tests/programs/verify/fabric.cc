// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "fabric.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace verify {
namespace {

// Generous: a partner that is being moved, or an emulated machine, is silent for seconds.
constexpr std::uint8_t kTimeout = 18;      // 4.096 us * 2^18 = 1.07 s
constexpr std::uint8_t kRnrRetry = 7;      // for ever
constexpr std::uint8_t kMinRnrTimer = 12;  // 0.64 ms
constexpr std::uint32_t kAckRoom = 2;      // WRs of the send queue that are not the stream's
constexpr std::uint32_t kSpareRoom = 6;    // those of --invalidate: two rounds
constexpr std::uint32_t kMaxCqs = 4, kMaxQpsPerCq = 64;  // more would not fit rxe's longest CQ
constexpr std::uint64_t kTargetIova = 0, kReadableIova = 0x7000000000;  // --iova
constexpr std::uint32_t kMaxRdAtomic = 16;
constexpr std::uint8_t kTrafficClass = 0x20;  // --query: something that can get lost
constexpr std::uint32_t kFlowLabel = 0x12345;

[[noreturn]] void fail(const std::string& what) { throw SetupError(what + ": " + std::strerror(errno)); }

struct ListFree {
  void operator()(ibv_device** l) const { ibv_free_device_list(l); }
};

bool usable(ibv_context* c, int port) {
  ibv_port_attr a{};
  return ibv_query_port(c, static_cast<std::uint8_t>(port), &a) == 0 && a.state == IBV_PORT_ACTIVE;
}

Context open_device(const Options& o) {
  int n = 0;
  const std::unique_ptr<ibv_device*, ListFree> list(ibv_get_device_list(&n));
  if (!list || n == 0) throw SetupError("there is no RDMA device on this host (rdma link show)");
  std::string seen;
  for (int i = 0; i < n; ++i) {
    ibv_device* d = list.get()[i];
    seen += std::string(" ") + ibv_get_device_name(d);
    if (!o.dev.empty() && o.dev != ibv_get_device_name(d)) continue;
    Context c(ibv_open_device(d));
    if (!c) fail(std::string("cannot open RDMA device ") + ibv_get_device_name(d));
    if (!usable(c.get(), o.ib_port)) {
      if (o.dev.empty()) continue;
      throw SetupError("port " + std::to_string(o.ib_port) + " of " + o.dev + " is not active (rdma link show)");
    }
    return c;
  }
  throw SetupError((o.dev.empty() ? "no RDMA device has an active port" : "no RDMA device '" + o.dev + "'") +
                   "; there are:" + seen);
}

bool over_ipv4(const ibv_gid_entry& e) {
  static constexpr std::uint8_t kV4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return e.gid_type == IBV_GID_TYPE_ROCE_V2 && std::memcmp(e.gid.raw, kV4, sizeof kV4) == 0;
}

int choose_gid(ibv_context* c, const Options& o) {
  if (o.gid_index >= 0) return o.gid_index;
  ibv_gid_entry table[256];
  const ssize_t n = ibv_query_gid_table(c, table, 256, 0);
  for (ssize_t i = 0; i < n; ++i)
    if (static_cast<int>(table[i].port_num) == o.ib_port && over_ipv4(table[i])) return static_cast<int>(table[i].gid_index);
  return 0;
}

}  // namespace

Context open_device(const std::string& name) {
  int n = 0;
  const std::unique_ptr<ibv_device*, ListFree> list(ibv_get_device_list(&n));
  for (int i = 0; i < n; ++i)
    if (name.empty() || name == ibv_get_device_name(list.get()[i]))
      if (Context c(ibv_open_device(list.get()[i])); c) return c;
  throw SetupError("there is no RDMA device '" + name + "' (rdma link show)");
}

ibv_gid_entry ipv4_gid(ibv_context* context) {
  ibv_gid_entry table[256];
  for (ssize_t i = ibv_query_gid_table(context, table, 256, 0); i-- > 0;)
    if (over_ipv4(table[i])) return table[i];
  throw SetupError("the device has no RoCE v2 GID with an IPv4 address");
}

Memory::Memory(MemoryKind kind, std::size_t bytes) : bytes_(bytes) {
  p_ = nullptr;
  if (!bytes) return;
  constexpr std::size_t kHugePage = 2 << 20;
  const bool huge = kind == MemoryKind::kThp || kind == MemoryKind::kHugetlb;
  if (huge) bytes_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  int flags = kind == MemoryKind::kShared || kind == MemoryKind::kMemfd ? MAP_SHARED : MAP_PRIVATE, fd = -1;
  if (kind == MemoryKind::kMemfd) {
    fd = memfd_create("migr_verify", 0);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes_))) fail("memfd_create");
  } else {
    flags |= MAP_ANONYMOUS;
  }
  if (kind == MemoryKind::kHugetlb) flags |= MAP_HUGETLB;
  // Transparent huge pages lie at their own boundary.
  const std::size_t more = kind == MemoryKind::kThp ? kHugePage : 0;
  void* const p = mmap(nullptr, bytes_ + more, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (p == MAP_FAILED) fail("cannot get " + std::to_string(bytes_) + " bytes of memory");
  if (fd >= 0) close(fd);
  p_ = static_cast<std::uint8_t*>(p);
  if (kind != MemoryKind::kThp) return;
  auto at = reinterpret_cast<std::uintptr_t>(p_);
  const std::uintptr_t start = (at + kHugePage - 1) / kHugePage * kHugePage;
  if (start > at) munmap(p_, start - at);
  if (const std::size_t rest = more - (start - at)) munmap(reinterpret_cast<void*>(start + bytes_), rest);
  p_ = reinterpret_cast<std::uint8_t*>(start);
  if (madvise(p_, bytes_, MADV_HUGEPAGE)) fail("no transparent huge pages");
  std::memset(p_, 0, bytes_);
}
Memory::~Memory() {
  if (p_) munmap(p_, bytes_);
}

namespace {

int to_init(ibv_qp* qp, int port) {
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_INIT;
  to.port_num = static_cast<std::uint8_t>(port);
  return ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int to_error(ibv_qp* qp) {
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  return ibv_modify_qp(qp, &to, IBV_QP_STATE);
}

bool in_state(ibv_qp* qp, ibv_qp_state state) {
  ibv_qp_attr now{};
  ibv_qp_init_attr init{};
  return ibv_query_qp(qp, &now, IBV_QP_STATE, &init) == 0 && now.qp_state == state;
}

}  // namespace

SecondContext::SecondContext(const Options& o) : context(open_device(o)) {
  pd.reset(ibv_alloc_pd(context.get()));
  if (pd) mr.reset(ibv_reg_mr(pd.get(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE));
  cq.reset(ibv_create_cq(context.get(), 8, nullptr, nullptr, 0));
  ibv_qp_init_attr a{};
  a.send_cq = a.recv_cq = cq.get();
  a.cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  a.qp_type = IBV_QPT_RC;
  if (!mr || !cq) fail("the second context");
  for (Qp* one : {&qp, &init, &error}) {
    one->reset(ibv_create_qp(pd.get(), &a));
    if (!*one) fail("a QP of the second context");
  }
  errno = to_init(init.get(), o.ib_port);
  if (!errno) errno = to_init(error.get(), o.ib_port);
  if (!errno) errno = to_error(error.get());
  if (errno) fail("states of QPs of the second context");
  qpn = qp->qp_num;
}

/// A receive is posted and flushed: everything that has a number takes part.
std::string SecondContext::flushed(ibv_qp* of, std::uint64_t wr_id) const {
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data()), 64, mr->lkey};
  ibv_recv_wr wr{.wr_id = wr_id, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad = nullptr;
  if (ibv_post_recv(of, &wr, &bad)) return "post_recv";
  if (to_error(of)) return "modify_qp to ERR";
  ibv_wc wc{};
  for (int ms = 0; ms < 5000; ++ms) {
    if (ibv_poll_cq(cq.get(), 1, &wc) == 1)
      return wc.wr_id == wr_id && wc.qp_num == of->qp_num && wc.status == IBV_WC_WR_FLUSH_ERR ? "" : "the completion of a flushed receive";
    usleep(1000);
  }
  return "no completion of a flushed receive";
}

std::string SecondContext::check(int ib_port) const {
  const auto failed = [](const char* who, const std::string& what) { return std::string("second context, QP in ") + who + ": " + what; };
  if (qp->qp_num != qpn || !in_state(qp.get(), IBV_QPS_RESET)) return failed("RESET", "number or state");
  if (!in_state(init.get(), IBV_QPS_INIT)) return failed("INIT", "state");
  if (!in_state(error.get(), IBV_QPS_ERR)) return failed("ERR", "state");
  if (to_init(qp.get(), ib_port)) return failed("RESET", "modify_qp");
  const struct { const char* state; ibv_qp* qp; } all[] = {{"RESET", qp.get()}, {"INIT", init.get()}};  // rxe looks at no receive posted in ERR
  for (const auto& one : all)
    if (const std::string what = flushed(one.qp, 4711); !what.empty()) return failed(one.state, what);
  return {};
}

namespace {

template <class T>
using Field = std::pair<const char*, bool (*)(const T&, const T&)>;

/// @return the name of the first that differs; empty: none does
template <class T, std::size_t N>
std::string first_of(const Field<T> (&fields)[N], const T& a, const T& b) {
  for (const auto& [name, same] : fields)
    if (!same(a, b)) return name;
  return {};
}
#define VERIFY_FIELD(T, name) {#name, [](const T& a, const T& b) { return std::memcmp(&a.name, &b.name, sizeof a.name) == 0; }}

/// But for what the present host's device may have otherwise (docs/limits.md).
std::string differs(const ibv_device_attr& a, const ibv_device_attr& b) {
#define F(name) VERIFY_FIELD(ibv_device_attr, name)
  static constexpr Field<ibv_device_attr> kFields[] = {F(page_size_cap), F(vendor_id), F(vendor_part_id), F(hw_ver), F(device_cap_flags), F(atomic_cap), F(phys_port_cnt)};
#undef F
  return first_of(kFields, a, b);
}

std::string differs(const ibv_port_attr& a, const ibv_port_attr& b) {
#define F(name) VERIFY_FIELD(ibv_port_attr, name)
  static constexpr Field<ibv_port_attr> kFields[] = {
      F(state), F(max_mtu), F(active_mtu), F(gid_tbl_len), F(port_cap_flags), F(max_msg_sz), F(pkey_tbl_len), F(lid), F(sm_lid), F(lmc), F(max_vl_num), F(sm_sl), F(subnet_timeout),
      F(init_type_reply), F(active_width), F(active_speed), F(phys_state), F(link_layer), F(flags), F(port_cap_flags2)};
#undef F
  return first_of(kFields, a, b);
}

/// But for what traffic changes.
std::string differs(const Answers::OfQp& a, const Answers::OfQp& b) {
#define F(name) VERIFY_FIELD(Answers::OfQp, name)
  static constexpr Field<Answers::OfQp> kFields[] = {
      F(now.qp_state), F(now.cur_qp_state), F(now.path_mtu), F(now.path_mig_state), F(now.qkey), F(now.dest_qp_num), F(now.qp_access_flags), F(now.cap), F(now.ah_attr.grh.dgid),
      F(now.ah_attr.grh.flow_label), F(now.ah_attr.grh.sgid_index), F(now.ah_attr.grh.hop_limit), F(now.ah_attr.grh.traffic_class), F(now.ah_attr.dlid), F(now.ah_attr.sl),
      F(now.ah_attr.src_path_bits), F(now.ah_attr.static_rate), F(now.ah_attr.is_global), F(now.ah_attr.port_num), F(now.pkey_index), F(now.sq_draining), F(now.max_rd_atomic),
      F(now.max_dest_rd_atomic), F(now.min_rnr_timer), F(now.port_num), F(now.timeout), F(now.retry_cnt), F(now.rnr_retry), F(init.qp_context), F(init.send_cq), F(init.recv_cq),
      F(init.srq), F(init.cap), F(init.qp_type), F(init.sq_sig_all)};
#undef F
  return first_of(kFields, a, b);
}
#undef VERIFY_FIELD

}  // namespace

Mr Fabric::reg(const Memory& m, int access, std::optional<std::uint64_t> iova) const {
  if (options.iova) access |= IBV_ACCESS_RELAXED_ORDERING;
  if (iova == kTargetIova) access |= IBV_ACCESS_ZERO_BASED;
  Mr mr(iova ? ibv_reg_mr_iova(pd.get(), m.data(), m.size(), *iova, access) : ibv_reg_mr(pd.get(), m.data(), m.size(), access));
  if (!mr) fail("cannot register " + std::to_string(m.size()) + " bytes (ulimit -l?)");
  return mr;
}

Mr Fabric::reg_at_first(const Memory& m, int access, std::optional<std::uint64_t> iova) {
  if (!options.rereg.any()) return reg(m, access, iova);
  if (options.rereg.access) access &= IBV_ACCESS_LOCAL_WRITE;  // which the driver pins for, once
  if (options.rereg.translation) first_memory_.emplace_back(MemoryKind::kPrivate, m.size());
  if (options.rereg.pd && !first_pd_) first_pd_.reset(ibv_alloc_pd(context.get()));
  if (first_pd_) std::swap(pd, first_pd_);
  Mr mr = reg(options.rereg.translation ? first_memory_.back() : m, access, iova);
  if (first_pd_) std::swap(pd, first_pd_);
  return mr;
}

void Fabric::reregister() {
  const Rereg& r = options.rereg;
  const int flags = (r.access ? IBV_REREG_MR_CHANGE_ACCESS : 0) | (r.pd ? IBV_REREG_MR_CHANGE_PD : 0) | (r.translation ? IBV_REREG_MR_CHANGE_TRANSLATION : 0);
  if (!flags) return;
  errno = 0;
  if (ibv_rereg_mr(target_mr.get(), flags, pd.get(), target.data(), target.size(), target_access_) ||
      ibv_rereg_mr(readable_mr.get(), flags, pd.get(), readable.data(), readable.size(), readable_access_))
    fail("ibv_rereg_mr");
  if (!r.pd) return;
  errno = ibv_dealloc_pd(first_pd_.release());
  if (errno) fail("the PD that nothing is of any more");
}

void Fabric::hold() {
  if (options.hold == "cm" && syscall(SYS_openat, AT_FDCWD, "/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC) < 0) fail("/dev/infiniband/rdma_cm");
  if (options.hold == "readonly") {
    held_mr_ = reg(held_memory_, IBV_ACCESS_LOCAL_WRITE);
    if (mprotect(held_memory_.data(), held_memory_.size(), PROT_READ)) fail("mprotect");
  }
  if (options.hold != "sqd") return;
  ibv_qp_init_attr a{};
  a.send_cq = a.recv_cq = cqs[0].get();
  a.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  a.qp_type = IBV_QPT_RC;
  held_qp_.reset(ibv_create_qp(pd.get(), &a));
  if (!held_qp_) fail("a QP to be in SQD");
  errno = to_init(held_qp_.get(), options.ib_port);
  if (!errno) errno = to_rtr(held_qp_.get(), held_qp_->qp_num, 0, gid_.raw, port_.lid, port_.active_mtu);
  if (!errno) errno = to_rts(held_qp_.get(), 0, 1);
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_SQD;
  if (!errno) errno = ibv_modify_qp(held_qp_.get(), &to, IBV_QP_STATE);
  if (errno) fail("a QP to SQD");
}

Fabric::Fabric(const Options& o, const Shape& s)
    : options(o),
      shape(s),
      context(open_device(o)),
      local(o.memory[0 % o.memory.size()], ring_bytes() * s.qps),
      recv(o.memory[1 % o.memory.size()], ring_bytes() * s.qps),
      target(o.memory[2 % o.memory.size()], ring_bytes() * s.qps),
      readable(o.memory[3 % o.memory.size()], ring_bytes() * s.qps),
      words(o.memory[4 % o.memory.size()], sizeof(Words) * s.qps),
      untouched(o.memory[5 % o.memory.size()], static_cast<std::size_t>(o.mr_mb) << 20) {
  ibv_device_attr dev{};
  if (ibv_query_device(context.get(), &dev)) fail("ibv_query_device");
  if (options.atomic_write) {
    constexpr std::uint64_t kAtomicWrites = 1ull << 40;  // IB_UVERBS_DEVICE_ATOMIC_WRITE
    ibv_device_attr_ex more{};
    if (ibv_query_device_ex(context.get(), nullptr, &more)) fail("ibv_query_device_ex");
    if (!(more.device_cap_flags_ex & kAtomicWrites)) {
      errno = EOPNOTSUPP;
      fail("atomic writes");
    }
  }
  if (ibv_query_port(context.get(), static_cast<std::uint8_t>(o.ib_port), &port_)) fail("ibv_query_port");
  gid_index_ = choose_gid(context.get(), o);
  if (ibv_query_gid(context.get(), static_cast<std::uint8_t>(o.ib_port), gid_index_, &gid_))
    fail("GID " + std::to_string(gid_index_) + " of " + ibv_get_device_name(context->device));
  rd_atomic_ = static_cast<std::uint32_t>(
      std::clamp(std::min(dev.max_qp_rd_atom, dev.max_qp_init_rd_atom), 1, static_cast<int>(kMaxRdAtomic)));
  pd.reset(ibv_alloc_pd(context.get()));
  if (!pd) fail("ibv_alloc_pd");
  for (auto& mr : local_mr) mr = reg(local, IBV_ACCESS_LOCAL_WRITE);
  for (auto& mr : recv_mr) mr = reg(recv, IBV_ACCESS_LOCAL_WRITE);
  target_access_ = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | (o.windows || o.invalidate ? IBV_ACCESS_MW_BIND : 0) | (o.target_atomics ? IBV_ACCESS_REMOTE_ATOMIC : 0);
  readable_access_ = IBV_ACCESS_REMOTE_READ;
  target_mr = reg_at_first(target, target_access_, o.iova ? std::optional(kTargetIova) : std::nullopt);
  readable_mr = reg_at_first(readable, readable_access_, o.iova ? std::optional(kReadableIova) : std::nullopt);
  if (o.second) second_ = std::make_unique<SecondContext>(o);
  words_mr = reg(words, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
  for (std::size_t n = 0; n < filled_pages(); ++n) std::memcpy(untouched.data() + n * kPage, untouched_page(n).data(), kPage);
  if (o.mr_mb) untouched_mr = reg(untouched, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  for (int i = 0; i < o.mr_parts; i++) {
    const std::size_t part = untouched.size() / static_cast<std::size_t>(o.mr_parts);
    parts_mr.emplace_back(ibv_reg_mr(pd.get(), untouched.data() + part * static_cast<std::size_t>(i), part, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    if (!parts_mr.back()) fail("cannot register part " + std::to_string(i) + " of " + std::to_string(part) + " bytes");
  }
  for (const ibv_mr* m : mrs()) keys_.emplace_back(m->lkey, m->rkey);
  if (o.events) {
    channel.reset(ibv_create_comp_channel(context.get()));
    if (!channel) fail("ibv_create_comp_channel");
    if (fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK)) fail("completion channel");
  }
  // As many as the window: the partner never finds no receive. With --rnr it does.
  recv_slots = o.rnr ? std::max(shape.window() / 8, 2u) : shape.window();
  const std::uint32_t n_cqs = std::min(shape.qps, std::max(kMaxCqs, shape.qps / kMaxQpsPerCq));
  const std::uint32_t per_cq = (shape.qps + n_cqs - 1) / n_cqs * 2;
  for (std::uint32_t i = 0; i < n_cqs; ++i) {
    const int cqe = static_cast<int>(per_cq * (shape.depth + kAckRoom + shape.window()));
    cqe_ = std::min(cqe, dev.max_cqe);
    if (o.cq_ex) {
      ibv_cq_init_attr_ex a{};
      a.cqe = static_cast<std::uint32_t>(cqe_);
      a.channel = channel.get();
      a.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM;
      cqs_ex.push_back(ibv_create_cq_ex(context.get(), &a));
      cqs.emplace_back(cqs_ex.back() ? ibv_cq_ex_to_cq(cqs_ex.back()) : nullptr);
    } else {
      cqs.emplace_back(ibv_create_cq(context.get(), cqe_, nullptr, channel.get(), 0));
    }
    if (!cqs.back()) fail("ibv_create_cq of " + std::to_string(cqe) + " entries");
  }
  if (o.srq) {
    ibv_srq_init_attr a{};
    a.attr.max_wr = shared_slots();
    a.attr.max_sge = kMaxSge;
    srq.reset(ibv_create_srq(pd.get(), &a));
    if (!srq) fail("an SRQ of " + std::to_string(shared_slots()) + " receives");
    if (fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK)) fail("async events");
  }
  hold();
  inline_max = UINT32_MAX;
  for (std::uint32_t i = 0; i < shape.qps; ++i) create_qp(i);
}

void Fabric::arm_srq() const {
  if (!options.srq_limit) return;
  ibv_srq_attr a{};
  a.srq_limit = shared_slots();
  errno = ibv_modify_srq(srq.get(), &a, IBV_SRQ_LIMIT);
  if (errno) fail("ibv_modify_srq");
}

void Fabric::resize(std::uint64_t n) {
  const int more = static_cast<int>(n % 3) * 700;
  for (Cq& cq : cqs) {
    errno = ibv_resize_cq(cq.get(), cqe_ + more);
    if (errno) fail("ibv_resize_cq to " + std::to_string(cqe_ + more));
  }
  if (!srq) return;
  ibv_srq_attr a{};
  a.max_wr = shared_slots() + static_cast<std::uint32_t>(more);
  errno = ibv_modify_srq(srq.get(), &a, IBV_SRQ_MAX_WR);
  if (errno) fail("ibv_modify_srq to " + std::to_string(a.max_wr) + " receives");
}

std::vector<const ibv_mr*> Fabric::mrs() const {
  return {local_mr[0].get(), local_mr[1].get(), recv_mr[0].get(),  recv_mr[1].get(),
          target_mr.get(),   readable_mr.get(), words_mr.get()};
}

void Fabric::create_qp(std::uint32_t i) {
  ibv_qp_init_attr_ex a{};
  a.send_cq = send_cq(i);
  a.recv_cq = recv_cq(i);
  a.cap.max_send_wr = shape.depth + kAckRoom + (has_spare(i) ? kSpareRoom : 0);
  a.srq = srq.get();
  a.cap.max_recv_wr = srq ? 0 : recv_slots;
  a.cap.max_send_sge = kMaxSge;
  a.cap.max_recv_sge = srq ? 0 : kMaxSge;
  a.cap.max_inline_data = shape.inline_max;
  a.qp_type = shape.transport == Transport::kUc ? IBV_QPT_UC : IBV_QPT_RC;
  a.pd = pd.get();
  a.comp_mask = IBV_QP_INIT_ATTR_PD;
  if (options.wr_api) {
    a.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    a.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
                       IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    if (shape.transport == Transport::kRc)
      a.send_ops_flags |=
          IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    if (options.atomic_write) a.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_WRITE;
  }
  // Without the extended interface the plain call: it is what most programs use.
  ibv_qp_init_attr plain{};
  plain.send_cq = a.send_cq;
  plain.recv_cq = a.recv_cq;
  plain.srq = a.srq;
  plain.cap = a.cap;
  plain.qp_type = a.qp_type;
  Qp qp(options.wr_api ? ibv_create_qp_ex(context.get(), &a) : ibv_create_qp(pd.get(), &plain));
  if (!qp) fail("QP " + std::to_string(i) + " of " + std::to_string(shape.qps));
  inline_max = std::min(inline_max, options.wr_api ? a.cap.max_inline_data : plain.cap.max_inline_data);
  ibv_qp_attr m{};
  m.qp_state = IBV_QPS_INIT;
  m.port_num = static_cast<std::uint8_t>(options.ib_port);
  m.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (shape.transport == Transport::kRc) m.qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  errno = ibv_modify_qp(qp.get(), &m, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (errno) fail("QP " + std::to_string(i) + " to INIT");
  qpn.push_back(qp->qp_num);
  if (options.windows) make_window(i);
  spares_.emplace_back(has_spare(i) ? ibv_alloc_mw(pd.get(), IBV_MW_TYPE_2) : nullptr);
  if (has_spare(i) && !spares_.back()) fail("ibv_alloc_mw");
  psn_.push_back(static_cast<std::uint32_t>(mix(shape.seed ^ mix(qp->qp_num))) & 0xffffff);
  qps.push_back(std::move(qp));
}

std::string Fabric::address() const {
  EndAddress e{};
  std::memcpy(e.gid, gid_.raw, 16);
  e.target = options.iova ? kTargetIova : reinterpret_cast<std::uintptr_t>(target.data());
  e.readable = options.iova ? kReadableIova : reinterpret_cast<std::uintptr_t>(readable.data());
  e.words = reinterpret_cast<std::uintptr_t>(words.data());
  e.target_rkey = target_mr->rkey;
  e.readable_rkey = readable_mr->rkey;
  e.words_rkey = words_mr->rkey;
  e.mtu = port_.active_mtu;
  e.lid = port_.lid;
  e.rd_atomic = rd_atomic_;
  std::string out(reinterpret_cast<const char*>(&e), sizeof e);
  for (std::uint32_t i = 0; i < shape.qps; ++i) {
    const QpAddress q{qpn[i], psn_[i], options.windows ? window_keys_[i] : target_mr->rkey, spare_rkey(i)};
    out.append(reinterpret_cast<const char*>(&q), sizeof q);
  }
  return out;
}

void Fabric::make_window(std::uint32_t i) {
  const ibv_mw_type type = i & 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2;
  windows_.emplace_back(ibv_alloc_mw(pd.get(), type));
  ibv_mw* const mw = windows_.back().get();
  if (!mw) fail("ibv_alloc_mw");
  // Its key is told to the partner before it is connected; binding takes a QP that is.
  window_keys_.push_back(ibv_inc_rkey(mw->rkey));
}

/// To QP i's part of the target. What a type 2 window is bound to only that QP may use.
void Fabric::bind_windows() {
  for (std::uint32_t i = 0; i < windows_.size(); ++i) {
    ibv_mw* const mw = windows_[i].get();
    const std::uint64_t start = options.iova ? kTargetIova : reinterpret_cast<std::uintptr_t>(target.data());
    const ibv_mw_bind_info info{.mr = target_mr.get(), .addr = start + ring_bytes() * i, .length = ring_bytes(),
                                .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
    if (mw->type == IBV_MW_TYPE_1) {
      ibv_mw_bind bind{.wr_id = 0, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
      errno = ibv_bind_mw(qps[i].get(), mw, &bind);
    } else {
      ibv_send_wr wr{}, *bad = nullptr;
      wr.opcode = IBV_WR_BIND_MW;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.bind_mw = {.mw = mw, .rkey = window_keys_[i], .bind_info = info};
      errno = ibv_post_send(qps[i].get(), &wr, &bad);
      mw->rkey = window_keys_[i];
    }
    if (errno) fail("binding a memory window");
    await_bound(i);
  }
  for (std::uint32_t i = 0; i < shape.qps; ++i) {
    if (!has_spare(i)) continue;
    bind_spare(i, spare_key(spares_[i]->rkey, 0), IBV_SEND_SIGNALED);
    await_bound(i);
  }
}

void Fabric::await_bound(std::uint32_t i) const {
  ibv_wc wc{};
  for (int ms = 0; ibv_poll_cq(send_cq(i), 1, &wc) == 0 && ms < 5000; ++ms) usleep(1000);
  if (wc.opcode != IBV_WC_BIND_MW || wc.status != IBV_WC_SUCCESS) throw SetupError("a memory window was not bound: status " + std::to_string(wc.status));
}

/// A WR that needs no partner.
void Fabric::post_local(std::uint32_t i, ibv_send_wr& wr, unsigned flags) const {
  ibv_send_wr* bad = nullptr;
  wr.send_flags = flags;
  errno = ibv_post_send(qps[i].get(), &wr, &bad);
  if (errno) fail("binding or invalidating a memory window");
}

/// Of type 2 it is the program that notes the key in the window, as ibv_bind_mw() does of type 1: the device takes the next one only from who knows it.
void Fabric::bind_spare(std::uint32_t i, std::uint32_t rkey, unsigned flags) const {
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_BIND_MW;
  wr.bind_mw = {.mw = spares_[i].get(), .rkey = rkey,
                .bind_info = {.mr = target_mr.get(), .addr = options.iova ? kTargetIova : reinterpret_cast<std::uintptr_t>(target.data()),
                              .length = ring_bytes(), .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}};
  post_local(i, wr, flags);
  spares_[i]->rkey = rkey;
}

/// What is said to the partner after it goes behind it on the same QP: then the window is there.
void Fabric::bind_spare_again(std::uint32_t i, std::uint64_t n) const {
  const std::uint32_t next = spare_key(spares_[i]->rkey, n + 1), between = (next & ~0xffu) | ((next - 1) & 0xff);
  bind_spare(i, between, 0);
  ibv_send_wr invalidate{};
  invalidate.opcode = IBV_WR_LOCAL_INV;
  invalidate.invalidate_rkey = between;
  post_local(i, invalidate, 0);
  bind_spare(i, next, 0);
}

void Fabric::connect(const std::string& text) {
  if (text.size() != sizeof partner + sizeof(QpAddress) * shape.qps) throw PeerError("the partner's addresses have a wrong length");
  std::memcpy(&partner, text.data(), sizeof partner);
  partner_qps.resize(shape.qps);
  std::memcpy(partner_qps.data(), text.data() + sizeof partner, sizeof(QpAddress) * shape.qps);
  reregister();
  for (std::uint32_t i = 0; i < shape.qps; ++i) {
    errno = to_rtr(qps[i].get(), partner_qps[i].qpn, partner_qps[i].psn, partner.gid, partner.lid, partner.mtu);
    if (errno) fail("QP " + std::to_string(i) + " to RTR (is the partner's address on the same network?)");
  }
  if (!options.rts_file.empty()) return;
  begin_to_send();
  bind_windows();
}

/// @return an errno
int Fabric::to_rtr(ibv_qp* qp, std::uint32_t dest_qpn, std::uint32_t psn, const std::uint8_t* gid, std::uint32_t lid, std::uint32_t mtu) const {
  ibv_qp_attr m{};
  m.qp_state = IBV_QPS_RTR;
  m.path_mtu = static_cast<ibv_mtu>(std::min<std::uint32_t>(mtu, port_.active_mtu));
  m.dest_qp_num = dest_qpn;
  m.rq_psn = psn;
  m.max_dest_rd_atomic = static_cast<std::uint8_t>(rd_atomic_);
  m.min_rnr_timer = kMinRnrTimer;
  m.ah_attr.dlid = static_cast<std::uint16_t>(lid);
  m.ah_attr.port_num = static_cast<std::uint8_t>(options.ib_port);
  m.ah_attr.is_global = 1;
  std::memcpy(m.ah_attr.grh.dgid.raw, gid, 16);
  m.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index_);
  m.ah_attr.grh.hop_limit = 64;
  if (options.query) m.ah_attr.grh.traffic_class = kTrafficClass, m.ah_attr.grh.flow_label = kFlowLabel;
  return ibv_modify_qp(qp, &m, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   (qp->qp_type == IBV_QPT_RC ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
}

int Fabric::to_rts(ibv_qp* qp, std::uint32_t psn, std::uint32_t rd_atomic) const {
  ibv_qp_attr m{};
  m.qp_state = IBV_QPS_RTS;
  m.timeout = kTimeout;
  m.retry_cnt = static_cast<std::uint8_t>(options.retries);
  m.rnr_retry = kRnrRetry;
  m.sq_psn = psn;
  m.max_rd_atomic = static_cast<std::uint8_t>(rd_atomic);
  return ibv_modify_qp(qp, &m, IBV_QP_STATE | IBV_QP_SQ_PSN |
                                   (qp->qp_type == IBV_QPT_RC ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0));
}

void Fabric::begin_to_send() {
  for (std::uint32_t i = 0; i < shape.qps; ++i) {
    errno = to_rts(qps[i].get(), psn_[i], std::min(partner.rd_atomic, rd_atomic_));
    if (errno) fail("QP " + std::to_string(i) + " to RTS");
  }
  if (options.query) answers_ = ask();
}

Answers Fabric::ask() const {
  Answers a;
  errno = ibv_query_device(context.get(), &a.device);
  if (errno) fail("ibv_query_device");
  errno = ibv_query_port(context.get(), static_cast<std::uint8_t>(options.ib_port), &a.port);
  if (errno) fail("ibv_query_port");
  for (const Qp& qp : qps) {
    Answers::OfQp& q = a.qps.emplace_back();
    errno = ibv_query_qp(qp.get(), &q.now, (IBV_QP_DEST_QPN << 1) - 1, &q.init);
    if (errno) fail("ibv_query_qp");
  }
  return a;
}

void Fabric::close() {
  second_.reset();
  windows_.clear();
  spares_.clear();
  held_qp_.reset();
  held_mr_.reset();
  qps.clear();
  srq.reset();
  cqs.clear();
  channel.reset();
  parts_mr.clear();
  for (Mr* mr : {&local_mr[0], &local_mr[1], &recv_mr[0], &recv_mr[1], &target_mr, &readable_mr, &words_mr, &untouched_mr}) mr->reset();
  pd.reset();
  context.reset();
}

std::size_t Fabric::filled_pages() const { return std::min(static_cast<std::size_t>(options.mr_fill_mb) << 20, untouched.size()) / kPage; }

// No two of those that are filled are the same.
std::array<std::uint64_t, kPage / sizeof(std::uint64_t)> Fabric::untouched_page(std::size_t n) const {
  std::array<std::uint64_t, kPage / sizeof(std::uint64_t)> page;
  page.fill(n < filled_pages() ? n + 1 : 0);
  return page;
}

std::optional<std::size_t> Fabric::changed_untouched() const {
  for (std::size_t n = 0; n < untouched.size() / kPage; ++n)
    if (std::memcmp(untouched.data() + n * kPage, untouched_page(n).data(), kPage) != 0) return n;
  return {};
}

std::string Fabric::changed_names(bool query) const {
  const auto all = mrs();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (all[i]->lkey != keys_[i].first || all[i]->rkey != keys_[i].second) return "keys of memory region " + std::to_string(i);
  if (srq) {
    ibv_srq_attr a{};
    if (ibv_query_srq(srq.get(), &a)) return "ibv_query_srq";
    if (a.max_wr < shared_slots() || a.max_sge < kMaxSge) return "size of the SRQ";
  }
  if (second_)
    if (const std::string what = second_->check(options.ib_port); !what.empty()) return what;
  for (std::uint32_t i = 0; i < shape.qps; ++i) {
    if (qps[i]->srq != srq.get()) return "srq of QP " + std::to_string(i);
    if (qps[i]->qp_num != qpn[i]) return "qp_num of QP " + std::to_string(i);
  }
  if (!query) return {};
  const Answers now = ask();
  std::string changed = differs(answers_.device, now.device);
  if (changed.empty()) changed = differs(answers_.port, now.port);
  for (std::uint32_t i = 0; i < shape.qps && changed.empty(); ++i) {
    changed = differs(answers_.qps[i], now.qps[i]);
    if (now.qps[i].now.dest_qp_num != partner_qps[i].qpn) changed = "dest_qp_num";
    if (!changed.empty()) changed += " of QP " + std::to_string(i);
  }
  return changed;
}

}  // namespace verify
