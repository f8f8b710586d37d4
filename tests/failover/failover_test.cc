// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A link is cut after any packet, or only what comes back over it: every work request completes once, in order, with its
// bytes; WRITEs are executed once under `exact`. Rounds: FAILOVER_ROUNDS, FAILOVER_SEED.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "model.h"
#include "store.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWrs = 80;
constexpr std::uint32_t kSlot = 5120;  // bytes of a work request at most
constexpr std::uint32_t kDepth = 16;
constexpr auto kLimit = std::chrono::seconds(20);

/// libmigr.so of one "process": a copy of the file, so that it has data of its own.
class Library {
 public:
  Library(char host, const std::string& policy) : host_(host) {
    const auto folder = std::filesystem::temp_directory_path() / ("failover." + std::to_string(getpid()));
    std::filesystem::create_directories(folder);
    const auto copy = folder / (std::string("libmigr-") + host + "-" + policy + ".so"), links = folder / (std::string("links-") + host + ".json");
    std::filesystem::copy_file(MIGR_LIBRARY, copy, std::filesystem::copy_options::overwrite_existing);
    std::ofstream(links) << R"({"links": [{"device": ")" << host << R"(0", "gid_index": 0}, {"device": ")" << host
                         << R"(1", "gid_index": 0}], "policy": ")" << policy << R"(", "switch_limit_ms": 3000, "heartbeat_ms": 200, "heartbeat_misses": 100})";
    setenv("MIGR_LINKS", links.c_str(), 1);
    setenv("MIGR_TABLES", "private", 1);
    setenv("MIGR_PROC_SOCKET", (folder / "none").c_str(), 1);
    so_ = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!so_) throw std::runtime_error(dlerror());
    int n;
    ibv_device** list = ibv_get_device_list(&n);
    for (int i = 0; i < n; ++i)
      if (list[i]->name == std::string(1, host) + "0") context = verb<ibv_context*(ibv_device*)>("ibv_open_device")(list[i]);
    std::filesystem::remove(copy);
  }
  template <class F>
  F* verb(const char* name) const {
    void* f = dlsym(so_, name);
    if (!f) throw std::runtime_error(dlerror());
    return reinterpret_cast<F*>(f);
  }
  ibv_context* context = nullptr;

 private:
  char host_;
  void* so_;
};

struct Options {
  std::uint32_t seed;
  bool answers_only, separate_cqs, events, both_ways;
  unsigned cut_after;
};

std::uint8_t byte_of(std::uint32_t stream, int wr, std::uint32_t at) { return static_cast<std::uint8_t>(stream * 31 + static_cast<std::uint32_t>(wr) * 7 + at * 13 + (at >> 8)); }

struct Request {
  ibv_wr_opcode opcode;
  std::uint32_t bytes;
  bool signalled;
};

std::vector<Request> stream(std::uint32_t seed) {
  std::mt19937 random(seed);
  constexpr ibv_wr_opcode kKinds[] = {IBV_WR_SEND, IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM};
  std::vector<Request> out;
  for (int i = 0; i < kWrs; ++i) out.push_back({kKinds[random() % 7], 1 + static_cast<std::uint32_t>(random() % (kSlot - 1)), random() % 2 == 0});
  out.back() = {IBV_WR_SEND, 100, true};
  return out;
}

bool takes_receive(const Request& r) { return r.opcode != IBV_WR_RDMA_WRITE && r.opcode != IBV_WR_RDMA_READ; }

/// One end of a connection, with its application.
class End {
 public:
  End(const Library& library, const Options& options, std::uint32_t out_stream, std::uint32_t in_stream, bool sends)
      : lib_(library), options_(options), out_id_(out_stream), in_id_(in_stream), sends_(sends), out_(stream(out_stream)), in_(stream(in_stream)),
        memory_(4u * kWrs * kSlot) {
    pd_ = lib_.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(lib_.context);
    if (options.events) channel_ = lib_.verb<ibv_comp_channel*(ibv_context*)>("ibv_create_comp_channel")(lib_.context);
    const auto make_cq = lib_.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq");
    cqs_[0] = make_cq(lib_.context, 256, nullptr, channel_, 0);
    cqs_[1] = options.separate_cqs ? make_cq(lib_.context, 256, nullptr, channel_, 0) : cqs_[0];
    mr_ = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    ibv_qp_init_attr init{};
    init.send_cq = cqs_[0];
    init.recv_cq = cqs_[1];
    init.cap = {.max_send_wr = kDepth, .max_recv_wr = kDepth, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    qp_ = lib_.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd_, &init);
    ibv_query_gid(lib_.context, 1, 0, &gid_);
    for (int i = 0; i < kWrs; ++i)
      for (std::uint32_t b = 0; b < kSlot; ++b) area(kOut, i)[b] = byte_of(out_id_, i, b), area(kReadable, i)[b] = byte_of(in_id_ + 1000, i, b);
  }
  ~End() {
    lib_.verb<int(ibv_qp*)>("ibv_destroy_qp")(qp_);
    lib_.verb<int(ibv_cq*)>("ibv_destroy_cq")(cqs_[0]);
    if (cqs_[1] != cqs_[0]) lib_.verb<int(ibv_cq*)>("ibv_destroy_cq")(cqs_[1]);
    if (channel_) lib_.verb<int(ibv_comp_channel*)>("ibv_destroy_comp_channel")(channel_);
    lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(mr_);
    if (receive_mr_) lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(receive_mr_);
    lib_.verb<int(ibv_pd*)>("ibv_dealloc_pd")(pd_);
  }

  void connect(const End& to) {
    peer_ = &to;
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    for (std::uint32_t i = 0; i < kDepth; ++i) post_receive();
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to.qp_->qp_num;
    a.rq_psn = 100 + to.out_id_;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = to.gid_;
    modify(a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = 100 + out_id_;
    modify(a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    birth_ = a;
  }

  bool protected_now() const {
    migr_links_name name{};
    std::memcpy(name.gid, gid_.raw, 16);
    name.vqpn = qp_->qp_num;
    return store_phase(&name) == MIGR_LINKS_VQP_READY;
  }

  void run() {
    const auto deadline = Clock::now() + kLimit;
    while (!done() && error_.empty()) {
      if (!peer_->error_.empty()) return;
      if (Clock::now() > deadline) error_ = "stuck: " + where();
      if (sends_)
        while (posted_ < kWrs && posted_ - completed_ < static_cast<int>(kDepth) && error_.empty()) post_send();
      if (!poll_all()) rest();
    }
  }

  std::string check() const {
    if (!error_.empty()) return error_.text;
    ibv_qp_attr a{};
    ibv_qp_init_attr init{};
    lib_.verb<int(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp")(qp_, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN, &init);
    if (a.qp_state != IBV_QPS_RTS || a.dest_qp_num != birth_.dest_qp_num || std::memcmp(&a.ah_attr.grh.dgid, &birth_.ah_attr.grh.dgid, 16) || init.send_cq != cqs_[0])
      return "ibv_query_qp answers with other names";
    if (sends_)
      for (int i = 0; i < kWrs; ++i)
        if (out_[i].opcode == IBV_WR_RDMA_READ && !equal(area(kRead, i), peer_->area(kReadable, i), out_[i].bytes)) return "READ " + std::to_string(i) + " has other bytes";
    return "";
  }

  /// Of the peer's WRITEs to us.
  unsigned most_executions() const {
    unsigned most = 0;
    for (int i = 0; i < kWrs; ++i)
      if (in_[i].opcode == IBV_WR_RDMA_WRITE || in_[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM) most = std::max(most, model_writes_at(area(kIn, i)));
    return most;
  }

 private:
  enum Area { kOut, kIn, kRead, kReadable };
  std::uint8_t* area(Area a, int i) const { return const_cast<std::uint8_t*>(&memory_[(static_cast<std::size_t>(a) * kWrs + static_cast<std::size_t>(i)) * kSlot]); }
  static bool equal(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t n) { return std::memcmp(a, b, n) == 0; }
  std::string where() const {
    return "posted " + std::to_string(posted_) + ", completed " + std::to_string(completed_) + ", received " + std::to_string(received_) + " of stream " + std::to_string(in_id_);
  }
  void modify(ibv_qp_attr& a, int mask) {
    if (lib_.verb<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp")(qp_, &a, mask)) error_ = "modify_qp";
  }
  bool done() const { return (!sends_ || completed_ == kWrs) && (!peer_->sends_ || received_ == kWrs); }

  void post_receive() {
    // Receives go into the area by their number; which work request comes is checked then.
    const int slot = static_cast<int>(receives_ % kDepth);
    if (receive_memory_.empty()) {
      receive_memory_.resize(kDepth * kSlot);
      receive_mr_ = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, receive_memory_.data(), receive_memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    }
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&receive_memory_[static_cast<std::size_t>(slot) * kSlot]), kSlot, receive_mr_->lkey};
    ibv_recv_wr wr{.wr_id = receives_, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    if (ibv_post_recv(qp_, &wr, &bad)) error_ = "post_recv";
    ++receives_;
  }

  void post_send() {
    const int i = posted_;
    const Request& r = out_[i];
    std::uint8_t* const local = r.opcode == IBV_WR_RDMA_READ ? area(kRead, i) : area(kOut, i);
    ibv_sge sges[2] = {{reinterpret_cast<std::uint64_t>(local), r.bytes / 2, mr_->lkey}, {reinterpret_cast<std::uint64_t>(local) + r.bytes / 2, r.bytes - r.bytes / 2, mr_->lkey}};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = static_cast<std::uint64_t>(i) | 0x5000;
    wr.opcode = r.opcode;
    // Each fourth at least, so that the queue does not fill with what nobody hears of.
    wr.send_flags = r.signalled || i % 4 == 3 ? IBV_SEND_SIGNALED : 0;
    wr.sg_list = sges;
    wr.num_sge = 2;
    wr.imm_data = static_cast<std::uint32_t>(i);
    wr.wr.rdma.rkey = peer_->mr_->rkey;
    wr.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(peer_->area(r.opcode == IBV_WR_RDMA_READ ? kReadable : kIn, i));
    if (const int err = ibv_post_send(qp_, &wr, &bad)) error_ = "post_send " + std::to_string(i) + ": " + std::strerror(err);
    ++posted_;
  }

  void sent(const ibv_wc& wc) {
    int next = completed_;
    while (next < posted_ && !(out_[next].signalled || next % 4 == 3)) ++next;
    if (next >= posted_ || wc.wr_id != (static_cast<std::uint64_t>(next) | 0x5000)) {
      error_ = "send completion " + std::to_string(wc.wr_id & 0xfff) + " where " + std::to_string(next) + " was due";
      return;
    }
    const ibv_wr_opcode o = out_[next].opcode;
    const ibv_wc_opcode due = o == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : takes_receive(out_[next]) && o != IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_SEND : IBV_WC_RDMA_WRITE;
    if (wc.opcode != due) error_ = "send completion " + std::to_string(next) + " of opcode " + std::to_string(wc.opcode);
    completed_ = next + 1;
  }

  void received(const ibv_wc& wc) {
    int next = received_;
    while (next < kWrs && !takes_receive(in_[next])) ++next;
    const Request& r = in_[next];
    const std::string what = "message " + std::to_string(next);
    if (wc.wr_id != received_wrs_) error_ = what + " came into receive " + std::to_string(wc.wr_id) + " where " + std::to_string(received_wrs_) + " was due";
    if (wc.byte_len != r.bytes) error_ = what + " has " + std::to_string(wc.byte_len) + " bytes, not " + std::to_string(r.bytes) + "; opcode " + std::to_string(wc.opcode) + ", not of " + std::to_string(r.opcode) + ", immediate " + std::to_string(wc.imm_data) + ", source " + std::to_string(wc.src_qp) + "; " + where();
    const bool imm = r.opcode != IBV_WR_SEND;
    if (imm && wc.imm_data != static_cast<std::uint32_t>(next)) error_ = what + ": immediate " + std::to_string(wc.imm_data);
    if (r.opcode != IBV_WR_RDMA_WRITE_WITH_IMM &&
        !equal(&receive_memory_[received_wrs_ % kDepth * kSlot], peer_->area(kOut, next), r.bytes))
      error_ = what + " has other bytes";
    // What was posted before it is there.
    for (int i = received_; i <= next; ++i)
      if ((in_[i].opcode == IBV_WR_RDMA_WRITE || in_[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM) && !equal(area(kIn, i), peer_->area(kOut, i), in_[i].bytes))
        error_ = "WRITE " + std::to_string(i) + " is not there when " + what + " is";
    received_ = next + 1;
    ++received_wrs_;
    post_receive();
  }

  int poll_all() {
    int got = 0;
    for (ibv_cq* cq : {cqs_[0], cqs_[1]}) {
      ibv_wc wc[5];
      const int n = ibv_poll_cq(cq, 5, wc);
      for (int i = 0; i < n && error_.empty(); ++i) {
        if (wc[i].status != IBV_WC_SUCCESS) error_ = "completion of status " + std::to_string(wc[i].status) + ", wr_id " + std::to_string(wc[i].wr_id) + "; " + where();
        else if (wc[i].qp_num != qp_->qp_num) error_ = "completion of QP " + std::to_string(wc[i].qp_num) + ", not " + std::to_string(qp_->qp_num);
        else if (wc[i].opcode & IBV_WC_RECV) received(wc[i]);
        else sent(wc[i]);
      }
      got += n;
    }
    return got;
  }

  void rest() {
    if (!channel_) return std::this_thread::sleep_for(std::chrono::microseconds(20));
    for (ibv_cq* cq : {cqs_[0], cqs_[1]}) ibv_req_notify_cq(cq, 0);
    if (poll_all()) return;
    pollfd p{.fd = channel_->fd, .events = POLLIN, .revents = 0};
    if (poll(&p, 1, 4000) == 0) {
      const int before = completed_ + received_;
      poll_all();
      if (completed_ + received_ != before) error_ = "nobody woke a thread for a completion";
      return;
    }
    ibv_cq* cq;
    void* context;
    if (lib_.verb<int(ibv_comp_channel*, ibv_cq**, void**)>("ibv_get_cq_event")(channel_, &cq, &context)) return;
    if (cq != cqs_[0] && cq != cqs_[1]) error_ = "an event of another CQ";
    lib_.verb<void(ibv_cq*, unsigned)>("ibv_ack_cq_events")(cq, 1);
  }

  const Library& lib_;
  const Options options_;
  const std::uint32_t out_id_, in_id_;
  const bool sends_;
  const std::vector<Request> out_, in_;
  const End* peer_ = nullptr;
  std::vector<std::uint8_t> memory_, receive_memory_;
  ibv_pd* pd_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cqs_[2];
  ibv_mr *mr_, *receive_mr_ = nullptr;
  ibv_qp* qp_;
  ibv_gid gid_{};
  ibv_qp_attr birth_{};
  std::uint64_t receives_ = 0, received_wrs_ = 0;
  int posted_ = 0, completed_ = 0, received_ = 0;

 public:
  /// The first one counts.
  struct Error {
    std::string text;
    void operator=(const std::string& s) { if (text.empty()) text = s; }
    bool empty() const { return text.empty(); }
  } error_;
};

struct Outcome {
  std::string error;
  bool broke = false;  ///< the cut came while there was traffic
  unsigned most_executions = 0;
};

Outcome round_of(const Library& a, const Library& b, const Options& o) {
  model_mend(0);
  model_forget_writes();
  Outcome out;
  End x(a, o, o.seed % 1000, o.seed % 1000 + 5000, true), y(b, o, o.seed % 1000 + 5000, o.seed % 1000, o.both_ways);
  x.connect(y);
  y.connect(x);
  for (const auto deadline = Clock::now() + kLimit; !x.protected_now() || !y.protected_now(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (Clock::now() > deadline) return out.error = "never protected", out;
  model_cut(0, o.cut_after, o.answers_only);
  std::thread other([&] { y.run(); });
  x.run();
  other.join();
  out.error = x.check();
  if (out.error.empty() || !y.error_.empty()) out.error += (out.error.empty() ? "" : "; other end: ") + y.check();
  out.most_executions = std::max(x.most_executions(), y.most_executions());
  return out;
}

class Failover : public testing::TestWithParam<std::string> {};

TEST_P(Failover, EachOnceInOrderWhereverTheLinkIsCut) {
  const bool exact = GetParam() == "exact";
  const Library a('a', GetParam()), b('b', GetParam());
  const int rounds = std::getenv("FAILOVER_ROUNDS") ? std::atoi(std::getenv("FAILOVER_ROUNDS")) : 120;
  const std::uint32_t first = std::getenv("FAILOVER_SEED") ? static_cast<std::uint32_t>(std::atoi(std::getenv("FAILOVER_SEED"))) : std::random_device()() % 1000000;
  printf("seeds from %u\n", first);
  unsigned twice = 0;
  for (int i = 0; i < rounds; ++i) {
    std::mt19937 random(first + static_cast<std::uint32_t>(i));
    const Options o{.seed = first + static_cast<std::uint32_t>(i), .answers_only = random() % 2 == 0, .separate_cqs = random() % 2 == 0, .events = random() % 3 == 0,
                    .both_ways = random() % 2 == 0, .cut_after = static_cast<unsigned>(random() % 400)};
    const Outcome out = round_of(a, b, o);
    twice += out.most_executions > 1;
    ASSERT_EQ(out.error, "") << "FAILOVER_SEED=" << o.seed << (o.answers_only ? " answers only" : "") << (o.separate_cqs ? " two CQs" : "") << (o.events ? " events" : "")
                             << (o.both_ways ? " both ways" : "") << " cut after " << o.cut_after;
    if (exact) {
      ASSERT_LE(out.most_executions, 1u) << "a WRITE was executed twice; FAILOVER_SEED=" << o.seed;
    }
  }
  migr_links_switch totals;
  store_totals(&totals);
  printf("%u changes, %u broken, %u replayed, %u executed already; %u of %d rounds executed a WRITE twice; %.1f ms a change\n", totals.vqps, totals.broken, totals.replayed,
         totals.executed, twice, rounds, totals.vqps ? static_cast<double>(totals.resume_ns) / totals.vqps / 1e6 : 0);
  EXPECT_GT(totals.replayed, 0u);
  EXPECT_GT(totals.executed, 0u);
  if (!exact && rounds >= 50) {
    EXPECT_GT(twice, 0u) << "this test would not see it";
  }
}

INSTANTIATE_TEST_SUITE_P(, Failover, testing::Values("exact", "resend"), [](const auto& info) { return info.param; });

}  // namespace
