// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A link is cut after any packet, or only what comes back over it, and then the one that took its place, and so on: every
// work request completes once, in order, with its bytes; WRITEs are executed once under `exact`, and a CAS has the answer
// that it would have had. Rounds: FAILOVER_ROUNDS, FAILOVER_SEED. Many.*: FAILOVER_MANY vQPs. What else may happen: kKinds.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "migr/migr.h"
#include "leave.h"
#include "model.h"
#include "store.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWrs = 80;
constexpr std::uint32_t kSlot = 5120;  // bytes of a work request at most
constexpr std::uint32_t kDepth = 16, kRing = 31;  // that are asked for; that the device gives for it
constexpr auto kLimit = std::chrono::seconds(60);  // who shares a processor with many others waits for it at each step
constexpr unsigned kSwitchMs = 20'000;

std::filesystem::path folder() { return std::filesystem::temp_directory_path() / ("failover." + std::to_string(getpid())); }

/// libmigr.so of one "process": a copy of the file, so that it has data of its own.
class Library {
 public:
  Library(char host, const std::string& policy, const std::string& paths, unsigned return_ms, unsigned adrift_ms, unsigned switch_ms = kSwitchMs, bool relays = false, bool third = false, unsigned heartbeat_ms = 20, unsigned heartbeat_misses = 100) {
    static int count = 0;  // a name that was loaded before would be the same library
    std::filesystem::create_directories(folder());
    const auto copy = folder() / (std::string("libmigr-") + host + "-" + std::to_string(count++) + ".so"), links = folder() / (std::string("links-") + host + ".json");
    std::filesystem::copy_file(MIGR_LIBRARY, copy, std::filesystem::copy_options::overwrite_existing);
    std::ofstream(links) << R"({"links": [{"device": ")" << host << R"(0", "gid_index": 0}, {"device": ")" << host
                         << R"(1", "gid_index": 0})" << (third ? std::string(R"(, {"device": ")") + host + R"(2", "gid_index": 0}], "backups": 2)" : "]") << R"(, "policy": ")" << policy << R"(", "paths": ")" << paths << R"(", "unique_swap": )" << (relays ? "false" : "true") << R"(, "atomics": ")" << (relays ? "relayed" : "direct") << R"(", "switch_limit_ms": )" << switch_ms << R"(, "heartbeat_ms": )" << heartbeat_ms << R"(, "heartbeat_misses": )" << heartbeat_misses << R"(, "adrift_limit_ms": )" << adrift_ms << R"(, "return_ms": )" << return_ms << "}";
    setenv("MIGR_LINKS", links.c_str(), 1);
    setenv("MIGR_TABLES", "private", 1);
    setenv("MIGR_PROC_SOCKET", (folder() / "none").c_str(), 1);
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
  void* so_;
};

struct Options {
  std::uint32_t seed;
  bool answers_only, separate_cqs, events, both_ways;
  bool sessions;  ///< posted by ibv_wr_*
  bool extended;  ///< polled by ibv_start_poll, .., as an ibv_cq_ex
  bool swaps;     ///< CAS among the others
  bool no_route;  ///< a link that is cut has none
  bool churns;    ///< memory is registered and given back all the time
  bool fresh;     ///< WRITEs into memory that was registered just before
  bool relays;    ///< FETCH_AND_ADD and CAS on words that others of the stream have changed before
  unsigned cut_after, cuts;
  bool may_break;  ///< an end may give up, and does nothing wrong
  bool outlives;   ///< and the second one works off what it has then; it posts nothing that brings something back
  bool pool = false;
  bool company = false;  ///< each end has another QP, which carries nothing, and leaves with its link
  bool odd = false;      ///< which at the second end is not of the kind of the first QP
  bool scarce = false;
  bool lingers = false; ///< see model_let_packets_linger()
  bool marks = false;   ///< no WRITE is to be sent twice
  bool third = false;   ///< there are two backup links
  bool shared = false;  ///< receives come from an SRQ, of both QPs
  bool greedy = false;  ///< has as much in flight as the device takes, or until it is told that there is no room
};

std::uint8_t byte_of(std::uint32_t stream, int wr, std::uint32_t at) { return static_cast<std::uint8_t>(stream * 31 + static_cast<std::uint32_t>(wr) * 7 + at * 13 + (at >> 8)); }

struct Request {
  ibv_wr_opcode opcode;
  std::uint32_t bytes;
  bool signalled;
  bool chained = false;  ///< a CAS that finds what the one before it has left
};

constexpr std::uint32_t kWord = 8;
std::uint64_t word_of(int wr) { return 0x100000u + static_cast<std::uint64_t>(wr); }
/// Each third finds another value than it wants.
std::uint64_t compare_of(int wr) { return word_of(wr) + (wr % 3 == 0); }
std::uint64_t swap_of(std::uint32_t stream, int wr) { return static_cast<std::uint64_t>(stream) << 32 | static_cast<std::uint64_t>(wr) | 1u << 31; }

constexpr std::uint32_t kSecond = 5000;  // streams from here on are of the second end

std::vector<Request> stream(std::uint32_t seed, const Options& options) {
  std::mt19937 random(seed);
  constexpr ibv_wr_opcode kKinds[] = {IBV_WR_SEND, IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM};
  std::vector<Request> out;
  if (options.outlives && seed >= kSecond) {
    for (int i = 0; i < kWrs; ++i) out.push_back({random() % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM, 1 + static_cast<std::uint32_t>(random() % (kSlot - 1)), random() % 2 == 0});
    out.back() = {IBV_WR_RDMA_WRITE_WITH_IMM, 100, true};
    return out;
  }
  for (int i = 0; i < kWrs; ++i) out.push_back({kKinds[random() % 7], 1 + static_cast<std::uint32_t>(random() % (kSlot - 1)), random() % 2 == 0});
  if (options.sessions)
    for (Request& r : out)
      if (r.opcode == IBV_WR_RDMA_WRITE && r.bytes % 2) r.opcode = IBV_WR_ATOMIC_WRITE, r.bytes = kWord;
  if (options.swaps)
    for (Request& r : out)
      if (random() % 3 == 0) r.opcode = IBV_WR_ATOMIC_CMP_AND_SWP, r.bytes = kWord;
  if (options.relays)
    for (Request& r : out)
      if (const unsigned kind = static_cast<unsigned>(random() % 8); kind < 4) {
        r.opcode = kind < 2 ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
        r.bytes = kWord;
        r.chained = kind == 2;
      }
  out.back() = {IBV_WR_SEND, 100, true};
  return out;
}

bool swaps(const Request& r) { return r.opcode == IBV_WR_ATOMIC_CMP_AND_SWP; }
bool adds(const Request& r) { return r.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD; }
bool is_atomic(const Request& r) { return swaps(r) || adds(r); }
bool only_writes(const Request& r) { return r.opcode == IBV_WR_RDMA_WRITE || r.opcode == IBV_WR_ATOMIC_WRITE; }
bool takes_receive(const Request& r) { return !only_writes(r) && r.opcode != IBV_WR_RDMA_READ && !is_atomic(r); }
/// Of the words that several atomics of a stream change: what each finds there.
std::vector<std::uint64_t> found_in_turn(const std::vector<Request>& stream) {
  std::vector<std::uint64_t> out;
  std::uint64_t sum = 0, chain = 0;
  for (std::size_t i = 0; i < stream.size(); ++i) {
    out.push_back(adds(stream[i]) ? sum : chain);
    if (adds(stream[i])) sum += i + 1;
    else chain += stream[i].chained;
  }
  out.push_back(sum);
  return out;
}

/// One end of a connection, with its application.
class End {
 public:
  End(const Library& library, const Options& options, std::uint32_t out_stream, std::uint32_t in_stream, bool sends)
      : lib_(library), options_(options), out_id_(out_stream), in_id_(in_stream), sends_(sends), out_(stream(out_stream, options)), in_(stream(in_stream, options)),
        memory_(4u * kWrs * kSlot + 2 * kWord), in_turn_(found_in_turn(out_)) {
    pd_ = lib_.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(lib_.context);
    if (options.events) channel_ = lib_.verb<ibv_comp_channel*(ibv_context*)>("ibv_create_comp_channel")(lib_.context);
    cqs_[0] = make_cq();
    cqs_[1] = options.separate_cqs ? make_cq() : cqs_[0];
    mr_ = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    ibv_qp_init_attr init{};
    init.send_cq = cqs_[0];
    init.recv_cq = cqs_[1];
    init.cap = {.max_send_wr = kDepth, .max_recv_wr = kDepth, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    if (options.shared) {
      ibv_srq_init_attr of_srq{};
      of_srq.attr.max_wr = kDepth;
      of_srq.attr.max_sge = 2;
      init.srq = srq_ = lib_.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd_, &of_srq);
    }
    if (options.company) {
      ibv_qp_init_attr other = init;
      if (options.odd && out_stream >= kSecond) other.cap.max_recv_wr *= 4;
      company_ = lib_.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd_, &other);
    }
    if (options.sessions) {
      ibv_qp_init_attr_ex wide{};
      std::memcpy(&wide, &init, sizeof init);
      wide.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
      wide.pd = pd_;
      wide.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_ATOMIC_WRITE;
      qp_ = ibv_create_qp_ex(lib_.context, &wide);
      ex_ = lib_.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(qp_);
    } else {
      qp_ = lib_.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd_, &init);
    }
    ibv_query_gid(lib_.context, 1, 0, &gid_);
    for (int i = 0; i < kWrs; ++i)
      for (std::uint32_t b = 0; b < kSlot; ++b) area(kOut, i)[b] = byte_of(out_id_, i, b), area(kReadable, i)[b] = byte_of(in_id_ + 1000, i, b);
    for (int i = 0; i < kWrs; ++i)
      if (swaps(in_[i])) set_word(area(kIn, i), word_of(i));
    for (const bool adding : {false, true}) set_word(shared(adding), 0);
  }
  ~End() {
    for (ibv_qp* qp : {qp_, company_})
      if (qp) lib_.verb<int(ibv_qp*)>("ibv_destroy_qp")(qp);
    if (srq_ && lib_.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq_)) fprintf(stderr, "an SRQ cannot be destroyed\n"), abort();
    lib_.verb<int(ibv_cq*)>("ibv_destroy_cq")(cqs_[0]);
    if (cqs_[1] != cqs_[0]) lib_.verb<int(ibv_cq*)>("ibv_destroy_cq")(cqs_[1]);
    if (channel_) lib_.verb<int(ibv_comp_channel*)>("ibv_destroy_comp_channel")(channel_);
    lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(mr_);
    for (ibv_mr* mr : fresh_) lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(mr);
    if (receive_mr_) lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(receive_mr_);
    lib_.verb<int(ibv_pd*)>("ibv_dealloc_pd")(pd_);
  }

  void connect(End& to) {
    peer_ = &to;
    if (company_) connect(company_, to, to.company_);
    birth_ = connect(qp_, to, to.qp_);
  }

  ibv_qp_attr connect(ibv_qp* qp, const End& to, const ibv_qp* there) {
    ibv_qp_attr a{};
    const auto modify = [&](int mask) {
      if (lib_.verb<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp")(qp, &a, mask)) error_ = "modify_qp";
    };
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    modify(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    for (std::uint32_t i = 0; qp == qp_ && i < kDepth; ++i) post_receive();
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = there->qp_num;
    a.rq_psn = 100 + to.out_id_;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = to.gid_;
    modify(IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = 100 + out_id_;
    modify(IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    return a;
  }

  /// Another QP. @return what ibv_modify_qp to RTR does
  int try_to_connect(const End& to) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cqs_[0];
    init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    ibv_qp* const qp = lib_.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd_, &init);
    const auto modify = lib_.verb<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    int err = modify(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to.qp_->qp_num;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = to.gid_;
    if (!err) err = modify(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    lib_.verb<int(ibv_qp*)>("ibv_destroy_qp")(qp);
    return err;
  }

  /// One that has no backup, since its connection has no GID.
  void make_doomed() {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = lib_.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(lib_.context, 4, nullptr, nullptr, 0);
    init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    doomed_ = lib_.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd_, &init);
  }
  void connect_doomed(const End& to) {
    ibv_qp_attr a{};
    const auto modify = [&](int mask) {
      if (lib_.verb<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp")(doomed_, &a, mask)) error_ = "modify_qp";
    };
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    modify(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to.doomed_->qp_num;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = to.gid_;  // for the model
    modify(IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a.qp_state = IBV_QPS_RTS;
    modify(IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  void send_by_doomed() {
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_WRITE;
    if (ibv_post_send(doomed_, &wr, &bad)) error_ = "post_send";
  }
  void destroy_doomed() {
    ibv_cq* const cq = doomed_->send_cq;
    lib_.verb<int(ibv_qp*)>("ibv_destroy_qp")(doomed_);
    lib_.verb<int(ibv_cq*)>("ibv_destroy_cq")(cq);
  }

  /// @param link that it has to be on; -1: any
  bool protected_now(int link = -1) const {
    migr_links_vqp_state state{};
    if (company_ && (!state_of(state, company_) || state.phase != MIGR_LINKS_VQP_READY)) return false;  // wherever: what carries nothing need not notice
    return state_of(state) && state.phase == MIGR_LINKS_VQP_READY && (link < 0 || state.link == static_cast<unsigned>(link));
  }

  /// That it is on.
  int link() const {
    migr_links_vqp_state state{};
    return state_of(state) ? static_cast<int>(state.link) : -1;
  }

  /// It is on the other one.
  bool left(unsigned link) const {
    migr_links_vqp_state state{};
    return state_of(state) && state.link != link;
  }

  bool relays_now() const {
    migr_links_vqp_state state{};
    return state_of(state) && state.atomics == MIGR_LINKS_RELAYED;
  }

  bool changed() const {
    migr_links_vqp_state state{};
    return state_of(state) && state.epoch;
  }

  ibv_qp_state state() const {
    ibv_qp_attr a{};
    ibv_qp_init_attr init{};
    lib_.verb<int(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp")(qp_, &a, IBV_QP_STATE, &init);
    return a.qp_state;
  }

  /// The application's thread may have ended before: with the other end's.
  bool gave_up() const {
    migr_links_vqp_state state{};
    return state_of(state) && state.phase == MIGR_LINKS_VQP_BROKEN;
  }

  std::string how() const {
    std::string out = where();
    for (const ibv_qp* qp : {qp_, company_}) {
      migr_links_vqp_state s{};
      if (!qp) continue;
      if (!state_of(s, qp)) return out + ", not known";
      out += (qp == qp_ ? ", phase " : "; its company phase ") + std::to_string(s.phase) + " on link " + std::to_string(s.link) + ", epoch " + std::to_string(s.epoch) + ", " + s.why;
    }
    return out;
  }

  /// As if told by other means, at once, of memory just registered. Called by the other end's thread.
  std::uint32_t fresh_key(int i) {
    ibv_mr* const mr = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, area(kIn, i), kSlot, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    fresh_.push_back(mr);
    return mr->rkey;
  }

  /// A WRITE, an atomic that the other end does not take, and one that would be. @return "" or what is not as with a NIC
  std::string try_atomic(std::uint64_t to, std::uint32_t rkey, ibv_wc_status due) {
    ibv_sge sges[2] = {{reinterpret_cast<std::uint64_t>(area(kRead, 0)), kWord, mr_->lkey}, {reinterpret_cast<std::uint64_t>(area(kOut, 0)), kSlot, mr_->lkey}};
    ibv_send_wr wrs[3]{}, *bad;
    for (int i = 0; i < 3; ++i) wrs[i].wr_id = static_cast<std::uint64_t>(i) | 0x5000, wrs[i].sg_list = &sges[i ? 0 : 1], wrs[i].num_sge = 1, wrs[i].next = i < 2 ? &wrs[i + 1] : nullptr;
    wrs[0].opcode = IBV_WR_RDMA_WRITE;
    wrs[0].send_flags = IBV_SEND_SIGNALED;
    wrs[0].wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(peer_->area(kIn, 0)), .rkey = peer_->mr_->rkey};
    wrs[1].opcode = wrs[2].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    wrs[1].wr.atomic = {.remote_addr = to, .compare_add = 1, .swap = 0, .rkey = rkey};
    wrs[2].wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(peer_->shared(true)), .compare_add = 1, .swap = 0, .rkey = peer_->mr_->rkey};
    if (const int err = ibv_post_send(qp_, wrs, &bad)) return std::string("post_send: ") + std::strerror(err);
    std::vector<ibv_wc> got;
    for (const auto deadline = Clock::now() + kLimit; got.size() < 3 && Clock::now() < deadline;) {
      ibv_wc wc;
      if (poll(cqs_[0], 1, &wc) == 1 && (wc.wr_id & 0x5000)) got.push_back(wc);  // receives are flushed, too
    }
    const ibv_wc_status all[] = {IBV_WC_SUCCESS, due, IBV_WC_WR_FLUSH_ERR};
    for (std::size_t i = 0; i < 3; ++i)
      if (got.size() <= i || got[i].wr_id != (i | 0x5000) || got[i].status != all[i]) return "completion " + std::to_string(i) + " of " + std::to_string(got.size()) + (i < got.size() ? " has status " + std::to_string(got[i].status) : "");
    if (word_at(peer_->shared(true))) return "what stands behind it was executed";
    return state() == IBV_QPS_ERR && peer_->state() == IBV_QPS_ERR ? "" : "a QP is not in ERR";
  }
  std::string try_refused(bool aligned) {
    if (aligned) return try_atomic(reinterpret_cast<std::uint64_t>(peer_->area(kIn, 8)), peer_->fresh_key(8), IBV_WC_REM_ACCESS_ERR);
    return try_atomic(reinterpret_cast<std::uint64_t>(peer_->area(kIn, 8)) + 4, peer_->mr_->rkey, IBV_WC_REM_INV_REQ_ERR);
  }

  /// It may post so many, from the first on; a multiple of 4, whose last one is signalled.
  void allow(int wrs) { allowed_ = wrs; }
  bool idle() const { return !sends_ || completed_ >= allowed_; }
  bool broken() const { return broken_; }

  void run() {
    const auto deadline = Clock::now() + 3 * kLimit;
    const struct Awake {
      explicit Awake(int thread) : thread(thread) { store_sleep(thread, false); }
      ~Awake() { store_sleep(thread, true); }
      const int thread;
    } awake(thread());
    while (!done() && error_.empty()) {
      store_pass(thread());
      if (!peer_->error_.empty() || broken_ || (peer_->broken_ && !outlives())) return;
      if (Clock::now() > deadline) error_ = "stuck: " + where();
      bool room = sends_;
      while (room && may_post() && error_.empty()) room = ex_ ? post_session(), true : post_send();
      if (options_.churns) churn();
      if (!poll_all()) rest();
      if (outlives()) dawdle();
    }
  }

  /// Of an end whose path has ended. @return "" or what was executed and has not completed, or the other way round
  std::string check_end() const {
    if (!error_.empty()) return error_.text;
    const auto executed = [&](int i) { return model_writes_at(peer_->area(kIn, i)) == 1; };
    int last = kWrs - 1;
    while (last >= 0 && !executed(last)) --last;
    while (last >= 0 && !(out_[last].signalled || last % 4 == 3)) --last;
    if (completed_ <= last) return "WRITE " + std::to_string(last) + " was executed, and no more than " + std::to_string(completed_) + " have completed";
    for (int i = 0; i < completed_; ++i)
      if (!executed(i)) return "WRITE " + std::to_string(i) + " has completed, and was not executed once";
    return "";
  }

  std::string check() const {
    if (!error_.empty() || broken_ || peer_->broken_) return error_.text;
    ibv_qp_attr a{};
    ibv_qp_init_attr init{};
    lib_.verb<int(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp")(qp_, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN, &init);
    if (a.qp_state != IBV_QPS_RTS || a.dest_qp_num != birth_.dest_qp_num || std::memcmp(&a.ah_attr.grh.dgid, &birth_.ah_attr.grh.dgid, 16) || init.send_cq != cqs_[0])
      return "ibv_query_qp answers with state " + std::to_string(a.qp_state) + ", QPN " + std::to_string(a.dest_qp_num) + ", or other names; " + how();
    if (sends_)
      for (int i = 0; i < kWrs; ++i) {
        if (adds(out_[i]) || out_[i].chained) {
          if (word_at(area(kRead, i)) != in_turn_[static_cast<std::size_t>(i)])
            return "atomic " + std::to_string(i) + " has found " + std::to_string(word_at(area(kRead, i))) + " where " + std::to_string(in_turn_[static_cast<std::size_t>(i)]) + " was due";
          continue;
        }
        if (!swaps(out_[i])) continue;
        const std::uint64_t due = compare_of(i) == word_of(i) ? swap_of(out_id_, i) : word_of(i);
        if (word_at(area(kRead, i)) != word_of(i)) return "CAS " + std::to_string(i) + " has found " + std::to_string(word_at(area(kRead, i)));
        if (word_at(peer_->area(kIn, i)) != due) return "CAS " + std::to_string(i) + " has left " + std::to_string(word_at(peer_->area(kIn, i)));
      }
    if (sends_ && word_at(peer_->shared(true)) != in_turn_.back()) return "the sum is " + std::to_string(word_at(peer_->shared(true)));
    if (sends_)
      for (int i = 0; i < kWrs; ++i)
        if (out_[i].opcode == IBV_WR_RDMA_READ && !equal(area(kRead, i), peer_->area(kReadable, i), out_[i].bytes)) return "READ " + std::to_string(i) + " has other bytes";
    return "";
  }

  /// Of the peer's WRITEs to us.
  unsigned most_executions() const {
    unsigned most = 0;
    for (int i = 0; i < kWrs; ++i)
      if (only_writes(in_[i]) || in_[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM) most = std::max(most, model_writes_at(area(kIn, i)));
    return most;
  }

 private:
  bool state_of(migr_links_vqp_state& out) const { return state_of(out, qp_); }
  bool state_of(migr_links_vqp_state& out, const ibv_qp* qp) const {
    migr_links_name name{};
    std::memcpy(name.gid, gid_.raw, 16);
    name.vqpn = qp->qp_num;
    return store_state(&name, &out);
  }

  enum Area { kOut, kIn, kRead, kReadable };
  std::uint8_t* area(Area a, int i) const { return const_cast<std::uint8_t*>(&memory_[(static_cast<std::size_t>(a) * kWrs + static_cast<std::size_t>(i)) * kSlot]); }
  /// That several of the peer's atomics change.
  std::uint8_t* shared(bool adding) const { return const_cast<std::uint8_t*>(&memory_[4u * kWrs * kSlot + (adding ? kWord : 0)]); }
  /// Where an atomic reaches to there, and what with.
  std::uint64_t reaches(const Request& r, int i) const { return reinterpret_cast<std::uint64_t>(adds(r) || r.chained ? peer_->shared(adds(r)) : peer_->area(kIn, i)); }
  std::uint64_t compares(const Request& r, int i) const { return adds(r) ? static_cast<std::uint64_t>(i) + 1 : r.chained ? in_turn_[static_cast<std::size_t>(i)] : compare_of(i); }
  std::uint64_t swaps_in(const Request& r, int i) const { return r.chained ? in_turn_[static_cast<std::size_t>(i)] + 1 : swap_of(out_id_, i); }
  static std::uint64_t word_at(const std::uint8_t* at) { return *reinterpret_cast<const std::uint64_t*>(at); }
  static void set_word(std::uint8_t* at, std::uint64_t word) { *reinterpret_cast<std::uint64_t*>(at) = word; }
  /// Where it puts what comes back, and where it reaches to there.
  static bool brings_back(const Request& r) { return r.opcode == IBV_WR_RDMA_READ || is_atomic(r); }
  static bool equal(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t n) { return std::memcmp(a, b, n) == 0; }
  std::string where() const {
    return "posted " + std::to_string(posted_) + ", completed " + std::to_string(completed_) + ", received " + std::to_string(received_) + " of stream " + std::to_string(in_id_);
  }
  ibv_cq* make_cq() {
    const int cqes = options_.company ? 256 : (options_.greedy ? kRing : kDepth) + kDepth;  // what it may have posted at a time, and no more
    if (!options_.extended) return lib_.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(lib_.context, cqes, nullptr, channel_, 0);
    ibv_cq_init_attr_ex init{};
    init.cqe = static_cast<std::uint32_t>(cqes);
    init.channel = channel_;
    init.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP;
    return ibv_cq_ex_to_cq(ibv_create_cq_ex(lib_.context, &init));
  }
  int poll(ibv_cq* cq, int entries, ibv_wc* wc) const {
    if (!options_.extended) return ibv_poll_cq(cq, entries, wc);
    auto* const ex = reinterpret_cast<ibv_cq_ex*>(cq);
    ibv_poll_cq_attr none{};
    int n = 0;
    if (ibv_start_poll(ex, &none)) return 0;
    do {
      ibv_wc& w = wc[n++];
      w = {};
      w.wr_id = ex->wr_id;
      w.status = ex->status;
      w.qp_num = ibv_wc_read_qp_num(ex);
      w.opcode = ibv_wc_read_opcode(ex);
      w.byte_len = ibv_wc_read_byte_len(ex);
      w.imm_data = ibv_wc_read_imm_data(ex);
      w.src_qp = ibv_wc_read_src_qp(ex);
      w.wc_flags = ibv_wc_read_wc_flags(ex);
    } while (n < entries && !ibv_next_poll(ex));
    ibv_end_poll(ex);
    return n;
  }
  bool done() const { return (!sends_ || completed_ == kWrs) && (outlives() ? peer_->broken() || peer_->idle() : !peer_->sends_ || received_ == kWrs); }
  bool outlives() const { return options_.outlives && out_id_ >= kSecond; }

  void post_receive() {
    // Receives go into the area by their number; which work request comes is checked then.
    const int slot = srq_ && receives_ >= kDepth ? free_slot_ : static_cast<int>(receives_ % kDepth);
    if (srq_) slots_[receives_] = slot;
    if (receive_memory_.empty()) {
      receive_memory_.resize(kDepth * kSlot);
      receive_mr_ = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, receive_memory_.data(), receive_memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    }
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&receive_memory_[static_cast<std::size_t>(slot) * kSlot]), kSlot, receive_mr_->lkey};
    ibv_recv_wr wr{.wr_id = receives_, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    if (srq_ ? ibv_post_srq_recv(srq_, &wr, &bad) : ibv_post_recv(qp_, &wr, &bad)) error_ = "post_recv";
    ++receives_;
  }

  /// Its path has failed, and it is in a session when that is noticed: for longer than the other end waits.
  void dawdle() {
    const int done = completed_;
    if (done != std::exchange(seen_, done)) progress_ = Clock::now();
    if (posted_ == done || Clock::now() - progress_ < std::chrono::milliseconds(4)) return;
    ibv_wr_start(ex_);
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    ibv_wr_abort(ex_);
  }

  void churn() {
    static constexpr std::uint32_t kEvery = 4;
    if (++turns_ % kEvery) return;
    ibv_mr* const mr = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, memory_.data(), kSlot, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!mr || lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(mr)) error_ = "memory that comes and goes";
  }

  bool may_post() const { return posted_ < allowed_ && posted_ - completed_ < static_cast<int>(options_.greedy ? kRing : kDepth); }

  /// Each fourth at least is signalled, so that the queue does not fill with what nobody hears of.
  unsigned flags_of(const Request& r, int i) const {
    const bool once = options_.marks && (only_writes(r) || r.opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
    const unsigned signalled = r.signalled || i % 4 == 3 ? IBV_SEND_SIGNALED : 0;
    return signalled | (once ? MIGR_SEND_ONCE : 0);
  }
  /// One to four in a session; one that is given up in between posts nothing. Now and then it takes long.
  void post_session() {
    const int first = posted_;
    ibv_wr_start(ex_);
    for (int n = 1 + first % 4; n && may_post(); --n) {
      const int i = posted_++;
      const Request& r = out_[i];
      const std::uint32_t rkey = peer_->mr_->rkey, imm = static_cast<std::uint32_t>(i);
      const auto to = reinterpret_cast<std::uint64_t>(peer_->area(r.opcode == IBV_WR_RDMA_READ ? kReadable : kIn, i));
      ex_->wr_id = static_cast<std::uint64_t>(i) | 0x5000;
      ex_->wr_flags = flags_of(r, i);
      if (r.opcode == IBV_WR_SEND) ibv_wr_send(ex_);
      else if (r.opcode == IBV_WR_SEND_WITH_IMM) ibv_wr_send_imm(ex_, imm);
      else if (r.opcode == IBV_WR_RDMA_WRITE) ibv_wr_rdma_write(ex_, rkey, to);
      else if (r.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) ibv_wr_rdma_write_imm(ex_, rkey, to, imm);
      else if (swaps(r)) ibv_wr_atomic_cmp_swp(ex_, rkey, reaches(r, i), compares(r, i), swaps_in(r, i));
      else if (adds(r)) ibv_wr_atomic_fetch_add(ex_, rkey, reaches(r, i), compares(r, i));
      else if (r.opcode == IBV_WR_RDMA_READ) ibv_wr_rdma_read(ex_, rkey, to);
      if (r.opcode == IBV_WR_ATOMIC_WRITE) {
        ibv_wr_atomic_write(ex_, rkey, to, area(kOut, i));
        continue;
      }
      if (i % 9 == 5) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto local = reinterpret_cast<std::uint64_t>(brings_back(r) ? area(kRead, i) : area(kOut, i));
      const ibv_sge sges[2] = {{local, r.bytes / 2, mr_->lkey}, {local + r.bytes / 2, r.bytes - r.bytes / 2, mr_->lkey}};
      ibv_wr_set_sge_list(ex_, 2, sges);
    }
    if (first % 13 == 7 && !std::exchange(given_up_, true)) {
      ibv_wr_abort(ex_);
      posted_ = first;
      return;
    }
    given_up_ = false;
    if (const int err = ibv_wr_complete(ex_)) error_ = "wr_complete at " + std::to_string(first) + ": " + std::strerror(err);
  }

  /// @return false: there is no room
  bool post_send() {
    const int i = posted_;
    const Request& r = out_[i];
    std::uint8_t* const local = brings_back(r) ? area(kRead, i) : area(kOut, i);
    ibv_sge sges[2] = {{reinterpret_cast<std::uint64_t>(local), r.bytes / 2, mr_->lkey}, {reinterpret_cast<std::uint64_t>(local) + r.bytes / 2, r.bytes - r.bytes / 2, mr_->lkey}};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = static_cast<std::uint64_t>(i) | 0x5000;
    wr.opcode = r.opcode;
    wr.send_flags = flags_of(r, i);
    wr.sg_list = sges;
    wr.num_sge = 2;
    wr.imm_data = static_cast<std::uint32_t>(i);
    const auto to = reinterpret_cast<std::uint64_t>(peer_->area(r.opcode == IBV_WR_RDMA_READ ? kReadable : kIn, i));
    const bool fresh = options_.fresh && r.opcode == IBV_WR_RDMA_WRITE && i % 4 == 0;
    if (is_atomic(r)) wr.wr.atomic = {.remote_addr = reaches(r, i), .compare_add = compares(r, i), .swap = swaps_in(r, i), .rkey = peer_->mr_->rkey};
    else wr.wr.rdma = {.remote_addr = to, .rkey = fresh ? peer_->fresh_key(i) : peer_->mr_->rkey};
    const int err = ibv_post_send(qp_, &wr, &bad);
    if (options_.greedy && err == ENOMEM) return false;
    if (err) error_ = "post_send " + std::to_string(i) + ": " + std::strerror(err);
    ++posted_;
    return true;
  }

  void sent(const ibv_wc& wc) {
    int next = completed_;
    while (next < posted_ && !(out_[next].signalled || next % 4 == 3)) ++next;
    if (next >= posted_ || wc.wr_id != (static_cast<std::uint64_t>(next) | 0x5000)) {
      error_ = "send completion " + std::to_string(wc.wr_id & 0xfff) + " where " + std::to_string(next) + " was due";
      return;
    }
    const ibv_wr_opcode o = out_[next].opcode;
    const ibv_wc_opcode due = adds(out_[next]) ? IBV_WC_FETCH_ADD : swaps(out_[next]) ? IBV_WC_COMP_SWAP : o == IBV_WR_ATOMIC_WRITE ? IBV_WC_ATOMIC_WRITE : o == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : takes_receive(out_[next]) && o != IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_SEND : IBV_WC_RDMA_WRITE;
    if (wc.opcode != due) error_ = "send completion " + std::to_string(next) + " of opcode " + std::to_string(wc.opcode);
    completed_ = next + 1;
  }

  void received(const ibv_wc& wc) {
    int next = received_;
    while (next < kWrs && !takes_receive(in_[next])) ++next;
    const Request& r = in_[next];
    const std::string what = "message " + std::to_string(next);
    int slot = static_cast<int>(received_wrs_ % kDepth);
    if (srq_) {  // whichever: but one that was posted, and once
      const auto posted = slots_.find(wc.wr_id);
      if (posted == slots_.end()) return (void)(error_ = what + " came into receive " + std::to_string(wc.wr_id) + ", which is not posted");
      slot = free_slot_ = posted->second;
      slots_.erase(posted);
    } else if (wc.wr_id != received_wrs_) error_ = what + " came into receive " + std::to_string(wc.wr_id) + " where " + std::to_string(received_wrs_) + " was due";
    if (wc.byte_len != r.bytes) error_ = what + " has " + std::to_string(wc.byte_len) + " bytes, not " + std::to_string(r.bytes) + "; opcode " + std::to_string(wc.opcode) + ", not of " + std::to_string(r.opcode) + ", immediate " + std::to_string(wc.imm_data) + ", source " + std::to_string(wc.src_qp) + "; " + where();
    const bool imm = r.opcode != IBV_WR_SEND;
    if (imm && wc.imm_data != static_cast<std::uint32_t>(next)) error_ = what + ": immediate " + std::to_string(wc.imm_data);
    if (r.opcode != IBV_WR_RDMA_WRITE_WITH_IMM &&
        !equal(&receive_memory_[static_cast<std::size_t>(slot) * kSlot], peer_->area(kOut, next), r.bytes))
      error_ = what + " has other bytes";
    // What was posted before it is there.
    for (int i = received_; i <= next; ++i)
      if ((only_writes(in_[i]) || in_[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM) && !equal(area(kIn, i), peer_->area(kOut, i), in_[i].bytes))
        error_ = "WRITE " + std::to_string(i) + " is not there when " + what + " is";
    received_ = next + 1;
    ++received_wrs_;
    post_receive();
  }

  int poll_all() {
    int got = 0;
    for (ibv_cq* cq : {cqs_[0], cqs_[1]}) {
      ibv_wc wc[5];
      const int n = poll(cq, 5, wc);
      for (int i = 0; i < n && error_.empty(); ++i) {
        if (outlives() && wc[i].status != IBV_WC_SUCCESS && !(wc[i].wr_id & 0x5000)) continue;  // a receive: its sends have ends of their own
        if (options_.may_break && (wc[i].status == IBV_WC_RETRY_EXC_ERR || wc[i].status == IBV_WC_WR_FLUSH_ERR)) return broken_ = true, 1;
        if (wc[i].status != IBV_WC_SUCCESS) error_ = "completion of status " + std::to_string(wc[i].status) + ", wr_id " + std::to_string(wc[i].wr_id) + "; " + how() + "; the other end " + peer_->how();
        else if (wc[i].qp_num != qp_->qp_num) error_ = "completion of QP " + std::to_string(wc[i].qp_num) + ", not " + std::to_string(qp_->qp_num);
        else if (wc[i].opcode & IBV_WC_RECV) received(wc[i]);
        else sent(wc[i]);
      }
      got += n;
    }
    return got;
  }

  int thread() const { return out_id_ > in_id_; }

  void rest() {
    if (!channel_) return std::this_thread::sleep_for(std::chrono::microseconds(20));
    for (ibv_cq* cq : {cqs_[0], cqs_[1]}) ibv_req_notify_cq(cq, 0);
    if (poll_all()) return;
    pollfd p{.fd = channel_->fd, .events = POLLIN, .revents = 0};
    store_sleep(thread(), true);
    const int readable = ::poll(&p, 1, 4000);
    store_sleep(thread(), false);
    if (readable == 0) {
      const int before = completed_ + received_;
      poll_all();
      // What has come in this very moment has its event in the next.
      if (completed_ + received_ != before && ::poll(&p, 1, 1000) == 0) error_ = "nobody woke a thread for a completion";
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
  End* peer_ = nullptr;
  std::vector<ibv_mr*> fresh_;
  std::vector<std::uint8_t> memory_, receive_memory_;
  const std::vector<std::uint64_t> in_turn_;
  ibv_pd* pd_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cqs_[2];
  ibv_mr *mr_, *receive_mr_ = nullptr;
  ibv_srq* srq_ = nullptr;
  std::map<std::uint64_t, int> slots_;  ///< of receives of the SRQ, by wr_id
  int free_slot_ = 0;
  ibv_qp *qp_, *company_ = nullptr, *doomed_ = nullptr;
  ibv_qp_ex* ex_ = nullptr;
  bool given_up_ = false;
  std::uint32_t turns_ = 0;
  ibv_gid gid_{};
  ibv_qp_attr birth_{};
  std::uint64_t receives_ = 0, received_wrs_ = 0;
  int posted_ = 0, received_ = 0;
  std::atomic<int> completed_ = 0, allowed_ = 0;
  int seen_ = 0;
  Clock::time_point progress_{};
  std::atomic<bool> broken_ = false;

 public:
  /// The first one counts.
  struct Error {
    std::string text;
    void operator=(const std::string& s) { if (text.empty()) text = s; }
    bool empty() const { return text.empty(); }
  } error_;
};

constexpr unsigned kExecutors = 12;  // QPs: two on each NIC
constexpr unsigned kLoops = 8;       // the same of an SRQ's, on two

struct Outcome {
  std::string error;
  bool broke = false;  ///< an end gave up
  unsigned most_executions = 0;
};

template <class Condition>
bool wait_for(Condition&& condition) {
  for (const auto deadline = Clock::now() + kLimit; !condition(); std::this_thread::sleep_for(std::chrono::microseconds(200)))
    if (Clock::now() > deadline) return false;
  return true;
}

/// @return the longest that it takes to ask for a QP's state, of all the times in which that is done
Clock::duration longest_question(const End& x, const End& y, std::chrono::milliseconds times) {
  Clock::duration longest{};
  for (const auto until = Clock::now() + times; Clock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    for (const End* e : {&x, &y}) {
      const auto begun = Clock::now();
      e->state();
      longest = std::max(longest, Clock::now() - begun);
    }
  }
  return longest;
}

/// The same in a second and a half, while another thread connects one.
Clock::duration longest_question_beside(End& x, End& y) {
  std::thread connecting([&] {
    if (const int err = x.try_to_connect(y); err != ETIMEDOUT) x.error_ = std::string("a QP can be connected over a link that is cut: ") + std::strerror(err);
  });
  const auto longest = longest_question(x, y, std::chrono::milliseconds(1500));
  connecting.join();
  return longest;
}

/// Of a link that nobody has they all do. Who is idle hears of a cut by its channel over the link, if there was one.
bool all_stand(std::uint32_t from) { return (from > 0 || store_all_stand(0)) && store_all_stand(1) && store_all_stand(2); }

/// For ends that say nothing.
constexpr Options kSilent{.seed = 1, .answers_only = false, .separate_cqs = false, .events = false, .both_ways = true, .sessions = false, .extended = false, .swaps = false, .no_route = false, .churns = false, .fresh = false, .relays = false, .cut_after = 0, .cuts = 1, .may_break = true, .outlives = false};

unsigned failures = 0;  ///< that made a pair leave its link, in cut_again_and_again(); each is a change at either end

/// Cut after cut. Each begins with traffic on the link that is cut, and ends with the vQPs on the other one and ready for the
/// next, or back on their own. @param flaps  a link that works again fails and works again, while they go back to it
std::string cut_again_and_again(End& x, End& y, const Options& o, bool returns, bool flaps) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  struct AtTheEnd {
    ~AtTheEnd() { model_let_packets_linger(false); }
  };
  std::vector<std::jthread> destroying;
  const AtTheEnd first_of_all;
  int on = 0;  // with a third link: off 0 that is still cut, if the others work
  if (o.lingers) {
    for (End* e : {&x, &y}) e->make_doomed();
    x.connect_doomed(y);
    y.connect_doomed(x);
  }
  for (unsigned cut = 0; cut < o.cuts; ++cut) {
    if (o.scarce) model_refuse_qps(1 - on, static_cast<int>(random() % 2), 1 + static_cast<unsigned>(random() % 3));
    model_cut(on, cut ? static_cast<unsigned>(random() % 100) : o.cut_after, o.answers_only);
    if (o.no_route) model_take_route(on);
    const bool both = o.third && on == 0 && random() % 3 == 0;  // the next one, too, soon
    if (both) model_cut(1, static_cast<unsigned>(random() % 60), o.answers_only);
    const int allowed = kWrs * static_cast<int>(cut + 1) / static_cast<int>(o.cuts) / 4 * 4;
    for (End* e : {&x, &y}) e->allow(cut + 1 == o.cuts ? kWrs : allowed);
    if (!wait_for([&] { return broken() || (x.idle() && y.idle()); })) return "no end of cut " + std::to_string(cut) + ": " + x.how() + "; " + y.how();
    if (o.lingers) model_cut_now(on);
    if (o.lingers && !cut) {
      for (End* e : {&x, &y}) e->send_by_doomed();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (End* e : {&x, &y}) destroying.emplace_back([e] { e->destroy_doomed(); });
    }
    if (o.lingers && !cut && longest_question_beside(x, y) > std::chrono::milliseconds(500)) return "a verb of the application's waits for the link that was cut";
    if (broken() || cut + 1 == o.cuts) {
      model_let_packets_linger(false);
      failures += x.left(static_cast<unsigned>(on)) || y.left(static_cast<unsigned>(on));
      // Of each end: the path, the one to come, the one that it was born with, two channels, a bell on each CQ; and what executes atomics.
      // And of each its company's like the first three, and one of a pool on either link; a channel and two paths to come where there is a third link.
      const bool few = broken() || wait_for([&] { return model_qps() <= 14u + (o.relays ? kExecutors : 0) + (o.company ? 6 : 0) + (o.pool ? 4 : 0) + (o.third ? 6 : 0) + (o.shared ? kLoops : 0); });
      return few ? "" : "old paths are left: " + std::to_string(model_qps()) + " QPs";
    }
    for (const int link : {on, on + both}) model_cut_now(link);  // at the latest
    const auto left = [&](int link) { return !x.protected_now(link) && !y.protected_now(link); };
    if (!wait_for([&] { return broken() || (left(on) && left(on + both)); })) return "cut " + std::to_string(cut) + " was not noticed: " + x.how() + "; " + y.how();
    ++failures;
    if (!o.third || returns) model_mend(on);
    if (both && returns) model_mend(1);
    for (unsigned times = flaps ? 1 + static_cast<unsigned>(random() % 3) : 0; times; --times) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
      model_cut(on, static_cast<unsigned>(random() % 8), false);
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
      model_mend(on);
    }
    if (!returns && o.third) {  // which of the two is not told
      if (!wait_for([&] { return broken() || (x.link() == y.link() && x.link() > (both ? 1 : on == 0 ? 0 : -1) && x.link() != on); })) return "no common link after cut " + std::to_string(cut) + ": " + x.how() + "; " + y.how();
      const int before = std::exchange(on, x.link());
      for (int link = 0; link < 3; ++link)
        if (both || before != 0) model_mend(link);
      if (!wait_for([&] { return broken() || all_stand(both || before != 0 ? 0 : 1); })) return "no channels after cut " + std::to_string(cut);
    } else if (!returns) {
      on = 1 - on;
    }
    if (!wait_for([&] { return broken() || (x.protected_now(on) && y.protected_now(on)); })) return "not protected again after cut " + std::to_string(cut) + ": " + x.how() + "; " + y.how();
    if (broken()) return "";
  }
  return "";
}

/// An end leaves its links as before a migration, again and again, until that is over. It may be refused.
void park_at_random(std::uint32_t seed, const std::atomic<bool>& over) {
  std::mt19937 random(seed);
  while (!over) {
    const StoreProcess process = store_process_of(random() % 2);
    char why[200];
    process.park(why, sizeof why);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 80));
    process.let_go();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
  }
}

/// Links are cut and mended whatever is going on.
std::string storm(End& x, End& y, const Options& o, bool parks) {
  std::mt19937 random(o.seed);
  const auto over = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  std::atomic<bool> calm = false;
  std::thread parking;
  if (parks) parking = std::thread(park_at_random, o.seed, std::cref(calm));
  for (int allowed = 4; allowed <= kWrs && !over(); allowed += 4) {
    for (End* e : {&x, &y}) e->allow(allowed);
    const int link = static_cast<int>(random() % (o.third ? 3 : 2));
    if (random() % 3) model_mend(link);
    else model_cut(link, static_cast<unsigned>(random() % 40), random() % 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
  }
  calm = true;
  for (const int link : {0, 1, 2}) model_mend(link);
  if (parks) parking.join();
  return wait_for([&] { return over() || (x.idle() && y.idle()); }) ? "" : "no end: " + x.how() + "; " + y.how();
}

/// One end, or the one and then the other, has nothing on another link for a while, and the work goes on. It may have been
/// on the other link before.
std::string parked(End& x, End& y, const Options& o) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty(); };
  const auto go_on = [&](int allowed) {
    for (End* e : {&x, &y}) e->allow(allowed);
    return wait_for([&] { return broken() || (x.idle() && y.idle()); });
  };
  std::size_t who = random() % 2;
  int allowed = 0;
  for (unsigned times = 1 + static_cast<unsigned>(random() % 2); times; --times, who = 1 - who) {
    if (random() % 2) {
      if (!wait_for([&] { return broken() || all_stand(0); })) return "not all channels stand before a cut";
      model_cut(0, static_cast<unsigned>(random() % 100), o.answers_only);
      if (!go_on(allowed += kWrs / 10)) return "no end of a cut before: " + x.how() + "; " + y.how();
      model_cut_now(0);  // at the latest
      if (!wait_for([&] { return broken() || (!x.protected_now(0) && !y.protected_now(0)); })) return "a cut before was not noticed: " + x.how() + "; " + y.how();
      model_mend(0);
      if (!wait_for([&] { return broken() || (x.protected_now(1) && y.protected_now(1) && (!o.third || all_stand(0))); })) return "not protected on the other link: " + x.how() + "; " + y.how();
    }
    const struct Parked : StoreProcess {
      ~Parked() { let_go(); }
    } process{store_process_of(who)};
    for (End* e : {&x, &y}) e->allow(allowed += kWrs / 10);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    char why[200];
    process.park(why, sizeof why);
    if (*why) return why;
    // Of both ends: the path, and its company's. Of the other one: a path to come, its company's, and a bell on each CQ.
    if (!wait_for([&] { return model_qps() <= 5u + o.third + (o.company ? 3 : 0) + (o.relays ? kExecutors : 0); })) return "something is left on other links: " + std::to_string(model_qps()) + " QPs";
    if (!go_on(allowed += kWrs / 10) || broken()) return "no end while parked: " + x.how() + "; " + y.how();
    process.let_go();
    if (!wait_for([&] { return broken() || (x.protected_now(0) && y.protected_now(0)); })) return "not protected again: " + x.how() + "; " + y.how();
  }
  model_cut(0, o.cut_after, o.answers_only);
  if (!go_on(kWrs)) return "no end after the last cut";
  model_mend(0);  // and its channel is there when the next connection is made
  return wait_for([&] { return broken() || (x.protected_now() && y.protected_now()); }) ? "" : "not protected after the last cut: " + x.how() + "; " + y.how();
}

/// An end leaves its links as before a migration while its default link is broken: nothing is lost, and the work goes on when the
/// migration is given up. @param marooned  but then there is no other link either: both applications get errors
std::string adrift(End& x, End& y, const Options& o, bool marooned) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  const auto go_on = [&](int allowed) {
    for (End* e : {&x, &y}) e->allow(allowed);
    return wait_for([&] { return broken() || (x.idle() && y.idle()); });
  };
  if (!wait_for([&] { return broken() || all_stand(0); })) return "not all channels stand before the cut";
  model_cut(0, static_cast<unsigned>(random() % 100), o.answers_only);
  if (!go_on(kWrs / 4)) return "no end of the cut before";
  model_cut_now(0);  // at the latest
  if (!wait_for([&] { return broken() || (x.left(0) && y.left(0)); })) return "the cut was not noticed: " + x.how() + "; " + y.how();
  const StoreProcess process = store_process_of(random() % 2);
  for (int times = 1; times <= 2; ++times) {
    for (End* e : {&x, &y}) e->allow(kWrs * (1 + times) / 4);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    char why[200];
    process.park(why, sizeof why);
    if (*why) return process.let_go(), why;
    // Of both ends: the path that it was born with. Of the other one: the half of a path to come, and a bell on each CQ.
    // Of its company's, too, but for the bells; and where the other one's receives were.
    if (!wait_for([&] { return model_qps() <= 5u + (o.company ? 3 : 0) + (o.shared ? kLoops / 2 : 0); })) return "something is left on other links: " + std::to_string(model_qps()) + " QPs";
    const bool over = x.idle() && y.idle();
    for (End* e : {&x, &y}) e->allow(kWrs * (1 + times) / 4 + 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (over && x.idle() && y.idle() && o.both_ways) return "it has a path while it is adrift";
    if (broken()) return "";
    if (marooned) model_cut(1, 0, false);
    process.let_go();
    if (marooned) return wait_for([&] { return broken() && x.gave_up() && y.gave_up(); }) ? "" : "no errors: " + x.how() + "; " + y.how();
    if (!wait_for([&] { return broken() || (x.idle() && y.idle() && x.left(0) && y.left(0)); })) return "not on the other link again: " + x.how() + "; " + y.how();
  }
  if (!go_on(kWrs)) return "no end after it";
  model_mend(0);
  return wait_for([&] { return broken() || (x.protected_now() && y.protected_now()); }) ? "" : "not protected in the end: " + x.how() + "; " + y.how();
}

/// The link fails while an end has left the other one, as in a migration: no application hears of it, and the work goes on when that
/// is over, over the other link.
std::string guarded(End& x, End& y, const Options& o) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  const auto allow = [&](int wrs) {
    for (End* e : {&x, &y}) e->allow(wrs);
  };
  const StoreProcess process = store_process_of(random() % 2);
  for (int times = 1; times <= 2; ++times) {
    char why[200];
    process.park(why, sizeof why);
    if (*why) return process.let_go(), why;
    model_cut(0, static_cast<unsigned>(random() % 60), o.answers_only);
    if (o.no_route) model_take_route(0);
    allow(kWrs * times / 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    model_cut_now(0);  // at the latest
    allow(kWrs * times / 4 + 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (x.idle() && y.idle()) return "it did not notice: there is a path";
    if (broken()) return "an application has heard of it";
    process.let_go();
    if (!wait_for([&] { return broken() || (x.idle() && y.idle() && x.left(0) && y.left(0)); })) return "not on the other link: " + x.how() + "; " + y.how();
    if (broken()) return "";
    model_mend(0);
    if (!wait_for([&] { return broken() || (x.protected_now(1) && y.protected_now(1)) || random() % 64 == 0; })) return "not protected on the other link: " + x.how() + "; " + y.how();
    const bool early = !x.protected_now(1) || !y.protected_now(1);
    process.park(why, sizeof why);  // which leads it home; or casts it off, where it came too early for that, or refuses: keys may have other names there
    process.let_go();
    if (*why && !early) return why + ("; " + x.how() + "; " + y.how());
    if (!wait_for([&] { return broken() || (x.protected_now() && y.protected_now()); })) return "not protected again: " + x.how() + "; " + y.how();
    if (x.protected_now(1)) break;  // cast off: the link that it was on takes it up again
  }
  allow(kWrs);
  return wait_for([&] { return broken() || (x.idle() && y.idle()); }) ? "" : "no end: " + x.how() + "; " + y.how();
}

/// On the only link that is left a path fails, again and again, and its link does not.
std::string alone(End& x, End& y, const Options& o) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  const auto go_on = [&](int allowed) {
    for (End* e : {&x, &y}) e->allow(allowed);
    return wait_for([&] { return broken() || (x.idle() && y.idle()); });
  };
  model_cut(0, o.cut_after % 100, o.answers_only);
  if (!go_on(kWrs / 4)) return "no end of the cut: " + x.how() + "; " + y.how();
  model_cut_now(0);
  const auto on_the_last = [&] { return x.link() == 1 && y.link() == 1 && !x.protected_now() && !y.protected_now() && store_all_stand(1); };
  for (int allowed = kWrs / 4; allowed < kWrs; allowed += kWrs / 4) {
    if (!wait_for([&] { return broken() || on_the_last(); })) return "not on the last link: " + x.how() + "; " + y.how();
    for (End* e : {&x, &y}) e->allow(allowed + kWrs / 4);
    const int end = o.both_ways ? static_cast<int>(random() % 2) : 0;
    if (!wait_for([&] { return broken() || model_break_paths(1, end, kRing) || (x.idle() && y.idle()); })) return "nothing was in flight: " + x.how() + "; " + y.how();
    if (!wait_for([&] { return broken() || (x.idle() && y.idle()); })) return "no end: " + x.how() + "; " + y.how();
    if (broken()) return "an application has heard of it: " + x.how() + "; " + y.how();
  }
  return "";
}

/// The first end loses the answer of an atomic, and gives up.
std::string gone(End& x, End& y, const Options& o) {
  model_cut(0, o.cut_after, o.answers_only);
  for (End* e : {&x, &y}) e->allow(kWrs);
  const auto over = [](const End& e) { return e.broken() || e.idle(); };
  return wait_for([&] { return !x.error_.empty() || !y.error_.empty() || (over(y) && (over(x) || y.broken())); }) ? "" : "no end: " + x.how() + "; " + y.how();
}

/// The program itself says that a link does not carry, at one end, again and again; and that it does.
std::string told(End& x, End& y, const Library& of_x) {
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty(); };
  const auto say = [&](const char* what) { return of_x.verb<int(const char*, std::uint32_t)>(what)("a0", 1); };
  if (of_x.verb<int(const char*, std::uint32_t)>("migr_link_down")("a7", 1) != ENOENT) return "it knows a link that is not there";
  for (int allowed = kWrs / 4; allowed <= kWrs; allowed += kWrs / 4) {
    for (End* e : {&x, &y}) e->allow(allowed);
    if (say("migr_link_down")) return "migr_link_down";
    if (!wait_for([&] { return broken() || (x.left(0) && y.left(0)); })) return "they have not left it: " + x.how() + "; " + y.how();
    if (say("migr_link_up")) return "migr_link_up";
    if (!wait_for([&] { return broken() || (x.idle() && y.idle() && x.protected_now(0) && y.protected_now(0)); })) return "they have not come back: " + x.how() + "; " + y.how();
  }
  return "";
}

/// What is done to the links.
enum class Story { kCut, kStorm, kParked, kTold, kGone, kAlone, kGuarded, kAdrift, kMarooned, kRefused };

struct Kind {
  const char* name;
  int rounds;
  Story story = Story::kCut;
  const char* paths = "cached";
  bool exact = true;
  bool returns = false;   ///< to the default link
  bool flaps = false;     ///< which works again, fails and works again meanwhile
  bool parks = false;     ///< ends leave their links in a storm
  bool relays = false;    ///< atomics
  bool halfway = false;   ///< only one end would
  bool forgets = false;   ///< what was executed is executed again, and this test sees it
  bool marks = false;     ///< no WRITE is to be sent twice
  bool third = false;     ///< there is a second backup link
  bool shared = false;    ///< receives come from an SRQ, which two QPs have, of which one carries nothing and may stay on a link longer
  bool lingers = false;   ///< what has sent over a link that is cut cannot be destroyed before that is mended, and nobody answers there
  bool late = false;      ///< a key is used before it was told what it is called on the backup link
  bool scarce = false;    ///< a NIC has no QP for a path at first, when one is needed
  bool mixed = false;     ///< one end makes no path ahead
  unsigned qps = 0;       ///< that there are before anything is cut; 0: it does not matter
  bool pools() const { return std::string(name).starts_with("pool"); }
  bool storms() const { return story == Story::kStorm; }
};

// Of each end: the path and two channels. One of the pool is one more.
constexpr unsigned kNoneAhead = 6, kOneInPool = 8;

constexpr Kind kKinds[] = {
    {.name = "exact", .rounds = 80},
    {.name = "resend", .rounds = 80, .exact = false},
    {.name = "returns", .rounds = 20, .returns = true},
    {.name = "flaps", .rounds = 8, .returns = true, .flaps = true},
    // Links are cut and mended at any time.
    {.name = "storm", .rounds = 12, .story = Story::kStorm},
    // An end leaves its links as before a migration, and has them again after it.
    {.name = "parked", .rounds = 8, .story = Story::kParked},
    // The program says that a link is down which works.
    {.name = "told", .rounds = 8, .story = Story::kTold, .returns = true},
    // As parked, while the default link is broken.
    {.name = "adrift", .rounds = 6, .story = Story::kAdrift},
    // And the other one breaks then.
    {.name = "marooned", .rounds = 3, .story = Story::kMarooned},
    // It breaks while the links were left.
    {.name = "guarded", .rounds = 6, .story = Story::kGuarded},
    // An end that has lost the answer of an atomic, or hears nothing from the other one for kSoonMs, ends; so does the other one, which
    // before its errors has what was executed.
    {.name = "gone", .rounds = 8, .story = Story::kGone, .paths = "rebuild"},
    {.name = "marked", .rounds = 8, .story = Story::kGone, .paths = "rebuild", .marks = true},
    {.name = "lingers", .rounds = 8, .lingers = true},
    {.name = "late", .rounds = 20, .late = true},
    // A path is given up by its device where there is no other link, and the link carries: it is made anew.
    {.name = "alone", .rounds = 6, .story = Story::kAlone},
    {.name = "rebuild", .rounds = 8, .paths = "rebuild", .qps = kNoneAhead},
    {.name = "scarce", .rounds = 8, .paths = "rebuild", .scarce = true},
    {.name = "mixed", .rounds = 8, .returns = true, .mixed = true, .qps = kNoneAhead},
    // There is one for whoever needs it first.
    {.name = "pool", .rounds = 20, .paths = "pool", .qps = kOneInPool},
    {.name = "pool_returns", .rounds = 20, .paths = "pool", .returns = true},
    {.name = "pool_parking_storm", .rounds = 12, .story = Story::kStorm, .paths = "pool", .parks = true},
    // Each atomic finds what it would have found.
    {.name = "relayed", .rounds = 40, .relays = true},
    {.name = "relayed_returns", .rounds = 20, .returns = true, .relays = true},
    {.name = "relayed_parked", .rounds = 8, .story = Story::kParked, .relays = true},
    {.name = "relayed_storm", .rounds = 12, .story = Story::kStorm, .relays = true},
    {.name = "relayed_parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true, .relays = true},
    {.name = "relayed_forgets", .rounds = 60, .relays = true, .forgets = true},
    // One is not allowed.
    {.name = "relayed_refused", .rounds = 2, .story = Story::kRefused, .relays = true},
    // The other end does not relay, so neither does.
    {.name = "relayed_halfway", .rounds = 8, .relays = true, .halfway = true},
    {.name = "relayed_third", .rounds = 40, .relays = true, .third = true},
    // And ends leave them as before a migration, often unheard by the other one.
    {.name = "parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true},
    // Where vQPs go when the first one fails, too, one after the other or both at once.
    {.name = "third", .rounds = 40, .third = true},
    {.name = "third_returns", .rounds = 20, .returns = true, .third = true},
    {.name = "third_storm", .rounds = 12, .story = Story::kStorm, .third = true},
    {.name = "third_parked", .rounds = 4, .story = Story::kParked, .third = true},
    {.name = "third_parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true, .third = true},
    {.name = "shared", .rounds = 20, .shared = true},
    {.name = "shared_returns", .rounds = 20, .paths = "rebuild", .returns = true, .shared = true},
    {.name = "shared_storm", .rounds = 12, .story = Story::kStorm, .paths = "pool", .shared = true},
    {.name = "shared_parked", .rounds = 4, .story = Story::kParked, .shared = true},
    {.name = "shared_parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true, .shared = true},
    {.name = "shared_adrift", .rounds = 2, .story = Story::kAdrift, .shared = true},
    {.name = "shared_guarded", .rounds = 2, .story = Story::kGuarded, .shared = true},
};

/// The links' part of a round, while both ends are at work. @return what did not happen, or nothing
std::string happens(const Kind& kind, End& x, End& y, const Options& o, const Library& a) {
  switch (kind.story) {
    case Story::kStorm: return storm(x, y, o, kind.parks);
    case Story::kParked: return parked(x, y, o);
    case Story::kTold: return told(x, y, a);
    case Story::kGone: return gone(x, y, o);
    case Story::kAlone: return alone(x, y, o);
    case Story::kGuarded: return guarded(x, y, o);
    case Story::kAdrift: return adrift(x, y, o, false);
    case Story::kMarooned: return adrift(x, y, o, true);
    case Story::kRefused:
    case Story::kCut: break;
  }
  return cut_again_and_again(x, y, o, kind.returns, kind.flaps);
}

Outcome round_of(const Library& a, const Library& b, const Options& o, const Kind& kind) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_forget_writes();
  for (const int link : {0, 1, 2})
    for (const int end : {0, 1}) model_refuse_qps(link, end, 0);  // which a round has not met
  model_let_packets_linger(o.lingers);
  Outcome out;
  End x(a, o, o.seed % 1000, o.seed % 1000 + kSecond, true), y(b, o, o.seed % 1000 + kSecond, o.seed % 1000, o.both_ways);
  x.connect(y);
  y.connect(x);
  if (!wait_for([&] { return x.protected_now() && y.protected_now(); })) return out.error = "never protected: " + x.how() + "; " + y.how(), out;
  if (x.relays_now() != o.relays || y.relays_now() != o.relays) return out.error = "atomics are relayed, or are not", out;
  if (!wait_for([] { return all_stand(0); })) return out.error = "not all channels stand: " + x.how() + "; " + y.how(), out;
  if (kind.story == Story::kRefused) return out.error = x.try_refused(o.seed % 2), out;
  // They leave a link at once that is not known to work again after the round before.
  if (kind.halfway && !wait_for([&] { return x.how().find("atomics go direct: the other end says so") != std::string::npos; }))
    return out.error = "it is not said why: " + x.how(), out;
  if (kind.qps && !o.company && !wait_for([&] { return model_qps() == kind.qps || x.changed(); }))
    return out.error = std::to_string(model_qps()) + " QPs, and not " + std::to_string(kind.qps), out;
  std::thread one([&] { x.run(); }), other([&] { y.run(); });
  const std::string stuck = happens(kind, x, y, o, a);
  model_let_packets_linger(false);
  if (!stuck.empty() && x.error_.empty()) x.error_ = stuck;
  one.join();
  other.join();
  out.error = x.check();
  if (kind.story == Story::kGone && out.error.empty()) out.error = y.check_end();
  if (out.error.empty() || !y.error_.empty()) out.error += (out.error.empty() ? "" : "; other end: ") + y.check();
  out.broke = x.broken() || y.broken();
  out.most_executions = kind.story == Story::kGone && !o.marks ? x.most_executions() : std::max(x.most_executions(), y.most_executions());
  return out;
}

/// The device says it of a port. @return what its application is told of: 0, or the port
int told_of_port(const Library& lib, ibv_event_type type, int port) {
  model_raise(lib.context, type, port);
  int told = 0;
  for (ibv_async_event event; !lib.verb<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(lib.context, &event);) {
    lib.verb<void(ibv_async_event*)>("ibv_ack_async_event")(&event);
    if (event.event_type == type) told = event.element.port_num;
  }
  return told;
}

void tell_nothing_for_a_loopback(const Library& a);

TEST(Ports, OfConnectionsThatGoOnWithoutThemNobodyIsTold) {
  model_async_events();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 2), 2) << "there are no connections";
  auto x = std::make_unique<End>(a, kSilent, 0, kSecond, true);
  End y(b, kSilent, kSecond, 0, true);
  x->connect(y);
  y.connect(*x);
  ASSERT_TRUE(wait_for([&] { return x->protected_now() && y.protected_now(); })) << x->how();
  ASSERT_TRUE(wait_for([&] { return !told_of_port(a, IBV_EVENT_PORT_ERR, 1); }));
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 0);
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 0) << "soft-RoCE may say it twice";
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 2), 2) << "of its failure they were told";
  tell_nothing_for_a_loopback(a);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] {
    EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 1), 0) << x->how();
    return testing::Test::HasFailure() || x->left(0);
  })) << x->how();
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 1), 0);
  x.reset();
  ASSERT_TRUE(wait_for([&] { return told_of_port(a, IBV_EVENT_PORT_ERR, 1) == 1; }));
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 1);
}

/// A backup link is dead from the beginning, and its addresses do not answer: nobody waits for that with the lock.
TEST(Neighbours, ThatAreSilentKeepNobodyBack) {
  model_let_packets_linger(true);
  model_cut_now(1);
  const Library a('a', "resend", "cached", 0, 3000), b('b', "resend", "cached", 0, 3000);
  End x(a, kSilent, 0, kSecond, true), y(b, kSilent, kSecond, 0, true);
  x.connect(y);
  y.connect(x);
  EXPECT_LT(longest_question(x, y, std::chrono::seconds(3)), std::chrono::milliseconds(500));
  EXPECT_NE(x.how().find("the other end does not answer on its other link"), std::string::npos) << x.how();
  model_mend(1);
  EXPECT_TRUE(wait_for([&] { return x.protected_now() && y.protected_now(); })) << x.how() << "; " << y.how();
  model_let_packets_linger(false);
}

/// A QP of one of several processes that send to each other's.
struct Speaker {
  static constexpr ibv_qp_cap kCap{.max_send_wr = kDepth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  explicit Speaker(const Library& library, ibv_pd* of = nullptr, ibv_cq* completes = nullptr, ibv_srq* srq = nullptr, bool sessions = false, const ibv_qp_cap& cap = kCap)
      : lib(library), pd(of ? of : lib.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(lib.context)),
        cq(completes ? completes : lib.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(lib.context, 256, nullptr, nullptr, 0)) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.srq = srq;
    init.cap = cap;
    init.qp_type = IBV_QPT_RC;
    ibv_qp_init_attr_ex wide{};
    std::memcpy(&wide, &init, sizeof init);
    wide.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    wide.pd = pd;
    wide.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
    qp = sessions ? ibv_create_qp_ex(lib.context, &wide) : lib.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd, &init);
    ibv_query_gid(lib.context, 1, 0, &gid);
  }
  static constexpr unsigned kAll = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  int modify(const ibv_qp_attr& attr, int mask) const {
    ibv_qp_attr a = attr;
    return lib.verb<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp")(qp, &a, mask);
  }
  int grant(unsigned access) const {
    ibv_qp_attr a{};
    a.qp_access_flags = access;
    return modify(a, IBV_QP_ACCESS_FLAGS);
  }
  /// To RTR.
  void answer(const Speaker& to, unsigned access = kAll) const {
    ibv_qp_attr a{};
    a.port_num = 1;
    a.qp_access_flags = access;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to.qp->qp_num;
    a.ah_attr.is_global = a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = to.gid;
    a.qp_state = IBV_QPS_INIT;
    ASSERT_EQ(modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    a.qp_state = IBV_QPS_RTR;
    ASSERT_EQ(modify(a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
  }
  int send_too(ibv_qp_attr a = {}, int more = 0) const {
    a.qp_state = IBV_QPS_RTS;
    return modify(a, more | IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  void connect(const Speaker& to, unsigned access = kAll) const {
    answer(to, access);
    ASSERT_EQ(send_too(), 0);
  }
  ibv_qp_attr query() const {
    ibv_qp_attr a{};
    ibv_qp_init_attr init;
    EXPECT_EQ(lib.verb<int(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp")(qp, &a, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_TIMEOUT | IBV_QP_PATH_MTU, &init), 0);
    return a;
  }
  migr_links_vqp_state state() const {
    migr_links_name name{};
    std::memcpy(name.gid, gid.raw, sizeof name.gid);
    name.vqpn = qp->qp_num;
    migr_links_vqp_state s{};
    return store_state(&name, &s) ? s : migr_links_vqp_state{};
  }
  bool ready_on(unsigned link) const { return state().phase == MIGR_LINKS_VQP_READY && state().link == link; }
  void destroy() const { lib.verb<int(ibv_qp*)>("ibv_destroy_qp")(qp); }

  const Library& lib;
  ibv_pd* pd;
  ibv_cq* cq;
  ibv_qp* qp;
  ibv_gid gid{};
};

/// A connection of the process to itself needs no port, and gets no backup. The directory is not asked for it again, either.
void tell_nothing_for_a_loopback(const Library& a) {
  const Speaker one(a), other(a);
  one.connect(other), other.connect(one);
  const auto is_known = [](const Speaker& s) { return std::string(s.state().why).find("its own process") != std::string::npos; };
  ASSERT_TRUE(wait_for([&] { return is_known(one) && is_known(other); })) << one.state().why;
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ERR, 1), 0);
  EXPECT_EQ(told_of_port(a, IBV_EVENT_PORT_ACTIVE, 1), 0);
  store_hold_lookups(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // once a second was too often
  EXPECT_FALSE(store_lookup_waits());
  store_hold_lookups(false);
  one.destroy(), other.destroy();
}

/// The kernel asks for a second who has the address of a host that is gone. A change of a path does not wait for that.
TEST(Neighbours, ThatAreAskedForAHandleKeepNobodyBack) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  model_hold_registrations(0, true);
  auto made = std::async(std::launch::async, [&] {
    ibv_ah_attr to{};
    to.is_global = to.port_num = 1;
    return a.verb<ibv_ah*(ibv_pd*, ibv_ah_attr*)>("ibv_create_ah")(x.pd, &to);
  });
  EXPECT_TRUE(wait_for([] { return model_registrations_waiting() == 1; }));
  auto left = std::async(std::launch::async, [&] { return a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1); });
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  EXPECT_EQ(made.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(left.get(), 0);
  ibv_ah* const ah = made.get();
  ASSERT_NE(ah, nullptr);
  EXPECT_EQ(a.verb<int(ibv_ah*)>("ibv_destroy_ah")(ah), 0);
  EXPECT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // its channels are waited for by the next
}

/// The kernel asks for a second before it connects a QP to a host that is down.
TEST(Neighbours, ThatAreAskedBeforeAQpConnectsKeepNobodyBack) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "off", "cached", 0, 3000), b('b', "off", "cached", 0, 3000);
  const Speaker x(a), y(b);
  model_hold_registrations(0, true);
  auto connected = std::async(std::launch::async, [&] { x.connect(y); });
  EXPECT_TRUE(wait_for([] { return model_registrations_waiting() == 1; }));
  auto other = std::async(std::launch::async, [&] { return a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context); });
  EXPECT_EQ(other.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  model_hold_registrations(0, false);
  connected.get();
  EXPECT_NE(other.get(), nullptr);
}

/// A link is left whose NIC holds a packet back, so that what is used up there is not destroyed for long, in the moment in which the application has found
/// that there is nothing of that kind and is about to destroy a CQ, a PD, an SRQ or a context. It waits, and no change of a path does.
TEST(Neighbours, ThatWhatIsDestroyedWaitsForKeepNobodyBack) {
  enum { kCq, kPd, kSrq, kContext, kKinds };
  for (int kind = kCq; kind < kKinds && !HasFailure(); ++kind) {
    for (const int link : {0, 1, 2}) model_mend(link);
    const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
    Library of = a;
    if (kind == kContext) of.context = a.verb<ibv_context*(ibv_device*)>("ibv_open_device")(a.context->device);
    ibv_pd* const pd = of.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(of.context);
    ibv_srq_init_attr of_srq{};
    of_srq.attr.max_wr = of_srq.attr.max_sge = 1;
    ibv_srq* const srq = kind == kSrq ? a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq) : nullptr;
    const Speaker x(a), y(b), other(of, pd, nullptr, srq), z(b);
    x.connect(y), y.connect(x), other.connect(z), z.connect(other);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && other.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
    if (kind != kContext) other.destroy();
    model_let_packets_linger(true);
    model_hold_resets(true);
    auto left = std::async(std::launch::async, [&] { return a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1); });
    ASSERT_TRUE(wait_for([] { return model_resets_waiting() == 1; }));
    auto destroyed = std::async(std::launch::async, [&] {
      if (kind == kCq) return a.verb<int(ibv_cq*)>("ibv_destroy_cq")(other.cq);
      if (kind == kPd) return a.verb<int(ibv_pd*)>("ibv_dealloc_pd")(pd);
      if (kind == kSrq) return a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq);
      return a.verb<int(ibv_context*)>("ibv_close_device")(of.context);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it waits for the library's lock
    model_cut_now(0);
    model_hold_resets(false);
    auto changed = std::async(std::launch::async, [&] { return wait_for([&] { return x.state().link == 1 && y.state().link == 1; }); });
    EXPECT_EQ(changed.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "case " << kind;
    EXPECT_EQ(destroyed.wait_for(std::chrono::seconds(0)), std::future_status::timeout) << "case " << kind;
    model_mend(0);
    model_let_packets_linger(false);
    EXPECT_TRUE(changed.get() && !left.get());
    EXPECT_EQ(destroyed.get(), 0) << "case " << kind;
    EXPECT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // its channels are waited for by the next
  }
}

/// Words on which the other end's atomics may work.
ibv_mr* register_words(const Speaker& of, void* at, std::size_t bytes) {
  return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, at, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
}

/// FETCH_AND_ADD of 1 to the other end's `sum`. @return of ibv_post_send
int post_add(const Speaker& x, std::uint64_t& found, const ibv_mr& here, const std::uint64_t& sum, const ibv_mr& there, std::uint64_t wr_id = 0) {
  ibv_sge sge{reinterpret_cast<std::uint64_t>(&found), sizeof found, here.lkey};
  ibv_send_wr wr{}, *bad;
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(&sum), .compare_add = 1, .swap = 0, .rkey = there.rkey};
  return ibv_post_send(x.qp, &wr, &bad);
}

struct Pairs {
  Pairs(const Library& a, const Library& b, unsigned n) {
    for (unsigned i = 0; i < n; ++i) {
      const bool shares = i % 64 != 0;
      xs.push_back(std::make_unique<Speaker>(a, i ? xs[0]->pd : nullptr, shares ? xs.back()->cq : nullptr));
      ys.push_back(std::make_unique<Speaker>(b, i ? ys[0]->pd : nullptr, shares ? ys.back()->cq : nullptr));
      xs[i]->connect(*ys[i]), ys[i]->connect(*xs[i]);
    }
  }
  /// At both ends; so migrd would say.
  unsigned ready_on(unsigned link) const {
    unsigned n = 0;
    for (std::size_t i = 0; i < xs.size(); ++i) n += xs[i]->ready_on(link) && ys[i]->ready_on(link);
    return n;
  }
  bool all_on(unsigned link) const {
    return std::all_of(xs.begin(), xs.end(), [link](const auto& x) { return x->state().link == link; }) && std::all_of(ys.begin(), ys.end(), [link](const auto& y) { return y->state().link == link; });
  }
  std::vector<std::unique_ptr<Speaker>> xs, ys;
};

/// A library whose lock a call of the application's holds, and whose threads stand still.
class StandsStill {
 public:
  explicit StandsStill(const Library& library) {
    model_hold_pds(true);
    call_ = std::async(std::launch::async, [&] { return library.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(library.context) != nullptr; });
    EXPECT_TRUE(wait_for([] { return model_pds_waiting() == 1; }));
  }
  ~StandsStill() {
    model_hold_pds(false);
    EXPECT_TRUE(call_.get());
  }

 private:
  std::future<bool> call_;
};

/// Nothing is posted, so no completion tells that the link is silent. What no heartbeat goes over stays there.
TEST(Heartbeat, FindsALinkThatIsSilentUnderWhoPostsNothing) {
  constexpr unsigned kNone = 0;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Library c('a', "exact", "cached", 0, 3000, kSwitchMs, false, false, kNone), d('b', "exact", "cached", 0, 3000, kSwitchMs, false, false, kNone);
  const Pairs found(a, b, 1), not_found(c, d, 1);
  ASSERT_TRUE(wait_for([&] { return found.ready_on(0) == 1 && not_found.ready_on(0) == 1 && store_all_stand(0) && store_all_stand(1); })) << found.xs[0]->state().why;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // what they had to say to each other has come
  store_causes();
  const auto cut = Clock::now();
  model_cut_now(0);
  ASSERT_TRUE(wait_for([&] { return found.all_on(1); })) << found.xs[0]->state().why;
  const auto took = Clock::now() - cut;
  unsigned causes = 0;
  EXPECT_TRUE(wait_for([&] { return (causes |= store_causes()) & 1u << MIGR_LINKS_CAUSE_HEARTBEAT; }));
  EXPECT_EQ(causes & ~(1u << MIGR_LINKS_CAUSE_HEARTBEAT | 1u << MIGR_LINKS_CAUSE_PEER), 0u);
  std::this_thread::sleep_for(2 * took);
  EXPECT_EQ(not_found.ready_on(0), 1u);
  model_mend(0);
}

/// Whichever end begins it.
TEST(Heartbeat, WhoseLinkIsBackLeadsToNoFailureAtEitherEnd) {
  constexpr unsigned kReturnMs = 20;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", kReturnMs, 3000), b('b', "exact", "cached", kReturnMs, 3000);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1 && store_all_stand(0) && store_all_stand(1); })) << pairs.xs[0]->state().why;
  unsigned told = 0;
  const auto both_told = [&told] {
    migr_links_switch more;
    store_totals(&more);
    return (told += more.vqps) == 2;
  };
  both_told();
  told = 0;
  model_cut_now(0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1) && both_told(); })) << told;
  store_causes();
  told = 0;
  model_mend(0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(0) && both_told(); })) << told;
  EXPECT_EQ(store_causes(), 1u << MIGR_LINKS_CAUSE_RETURN);
}

/// The other end's library stands still, and what there is to say to it is more than its channel has receives for: its NIC answers none of what is behind
/// that, heartbeats least of all. Nothing has failed. A link that fails then is left as ever.
TEST(Heartbeat, IsNotMissedBehindWhatALibraryThatStandsStillHasNotTaken) {
  constexpr unsigned kMs = 200, kMisses = 3;
  for (const int link : {0, 1, 2}) model_mend(link);
  setenv("FAILOVER_LATE", "1", 1);  // who registers does not wait for it
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, false, false, kMs, kMisses), b('b', "exact", "cached", 0, 30'000, kSwitchMs, false, false, kMs, kMisses);
  const Pairs pairs(a, b, 1);
  const Speaker& x = *pairs.xs[0];
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1 && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); })) << x.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(1) == 1 && store_all_stand(0); })) << x.state().why;
  std::uint64_t word = 0;
  {
    constexpr unsigned kEnough = 100;  // that are told; a channel has 32 receives
    const StandsStill still(b);
    for (unsigned i = 0; i < kEnough; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(2))) EXPECT_NE(register_words(x, &word, sizeof word), nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * kMs * kMisses));
    EXPECT_TRUE(x.ready_on(1)) << "on link " << x.state().link << ", " << x.state().why;
    model_cut_now(1);
    EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_SWITCHING; })) << x.state().why;
  }
  EXPECT_TRUE(wait_for([&] { return pairs.all_on(0); })) << x.state().why;
  unsetenv("FAILOVER_LATE");
  model_mend(1);
}

/// Nobody says where the other end is: there is no backup, it is said why, and the application gets the path's error. Once it is said there is one.
TEST(Directory, ThatCannotBeReachedIsSaidAndLeavesTheErrorToTheApplication) {
  for (const int link : {0, 1, 2}) model_mend(link);
  store_hide(true);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs early(a, b, 1);
  const Speaker &x = *early.xs[0], &y = *early.ys[0];
  const std::string why = "the directory cannot be reached";
  ASSERT_TRUE(wait_for([&] { return x.state().why == why && y.state().why == why; })) << x.state().why;
  EXPECT_EQ(early.ready_on(0), 0u);
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  model_cut_now(0);
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(x.query().qp_state, IBV_QPS_ERR);
  EXPECT_EQ(x.state().link, 0u);
  EXPECT_EQ(x.state().why, why);
  model_mend(0);
  store_hide(false);
  const Pairs late(a, b, 1);
  EXPECT_TRUE(wait_for([&] { return late.ready_on(0) == 1; })) << late.xs[0]->state().why;
}

/// Its only backup link is one of a device that is not there: it is told as a vQP without a backup, and has one when that comes.
TEST(Unbacked, AsItsLinkIsNotThereIsSaid) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_unplug(1, 0, true);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  const Speaker& x = *pairs.xs[0];
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "cannot open a1: No such device"; })) << x.state().why;
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  EXPECT_EQ(x.state().link, 0u);
  const auto link_is = [](std::uint32_t state) {
    migr_links_link link{};
    return wait_for([&] { return store_link("a1", &link) && link.state == state; }) && std::string(link.why) == (state == MIGR_LINKS_LINK_UP ? "" : "cannot open a1: No such device");
  };
  EXPECT_TRUE(link_is(MIGR_LINKS_LINK_ABSENT));
  model_unplug(1, 0, false);
  EXPECT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << x.state().why;
  EXPECT_TRUE(link_is(MIGR_LINKS_LINK_UP));
}

/// The backup device refuses to make the first one's QP: that is told, those behind it have theirs, and it is tried again.
TEST(Unbacked, AsTheDeviceRefusesItKeepsNoOtherBack) {
  constexpr unsigned kMost = 1u << 11;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  model_most_wrs(1, 0, kMost);
  ibv_qp_cap deep = Speaker::kCap;
  deep.max_send_wr = 2 * kMost;
  const Speaker x(a, nullptr, nullptr, nullptr, false, deep), y(b);
  x.connect(y), y.connect(x);
  const Pairs pairs(a, b, 2);
  EXPECT_TRUE(wait_for([&] { return pairs.ready_on(0) == 2; })) << pairs.xs[0]->state().why;
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  EXPECT_STREQ(x.state().why, "create_qp: Invalid argument");
  model_most_wrs(1, 0, ~0u);
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
}

/// @return on so many devices is memory that is registered beside `x`, once it is on `due`
unsigned devices_with_memory(const Speaker& x, std::vector<std::uint8_t>& memory, unsigned due) {
  if (!x.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(x.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE)) return 0;
  wait_for([&] { return model_most_registered(memory.data()) >= due; });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return model_most_registered(memory.data());
}

/// Of which no vQP can have a path: nothing is made there, nor is memory registered. The first backup link is one, with and without another
/// behind it, and then the default link.
TEST(Unbacked, ByAnotherFamilyOfDevices) {
  for (const int link : {0, 1, 2}) model_mend(link);
  std::vector<std::uint8_t> memory(4096), second(4096), third(4096);
  {
    model_make_foreign(1, 0, true);
    const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
    const Pairs pairs(a, b, 1);
    const Speaker& x = *pairs.xs[0];
    EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "a1 is not soft-RoCE (man 7 migr-limits)"; })) << x.state().why;
    EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
    EXPECT_EQ(devices_with_memory(x, memory, 1), 1u);
    migr_links_link link{};
    EXPECT_TRUE(store_link("a1", &link) && link.state == MIGR_LINKS_LINK_DOWN);
  }
  {
    const Library a('a', "exact", "cached", 0, 3000, kSwitchMs, false, true), b('b', "exact", "cached", 0, 3000, kSwitchMs, false, true);
    const Pairs pairs(a, b, 1);
    EXPECT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << pairs.xs[0]->state().why;
    EXPECT_EQ(devices_with_memory(*pairs.xs[0], second, 2), 2u);
  }
  model_make_foreign(1, 0, false);
  model_make_foreign(0, 0, true);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  const Speaker& x = *pairs.xs[0];
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "a0 is not soft-RoCE (man 7 migr-limits)"; })) << x.state().why;
  EXPECT_EQ(devices_with_memory(x, third, 1), 1u);
  model_make_foreign(0, 0, false);
}

/// One end has the device of the second backup link from the beginning, the other one gets it when it has told long ago where it can go.
TEST(Later, ADeviceComesAndBothEndsUseIt) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_unplug(2, 1, true);
  const Library a('a', "exact", "cached", 0, 3000, kSwitchMs, false, true), b('b', "exact", "cached", 0, 3000, kSwitchMs, false, true);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << pairs.xs[0]->state().why;
  ASSERT_FALSE(store_all_stand(2));
  model_unplug(2, 1, false);
  ASSERT_TRUE(wait_for([] { return all_stand(0); })) << "no channel over it";
  for (const int link : {0, 1}) model_cut_now(link);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  EXPECT_TRUE(wait_for([&] { return pairs.all_on(2); })) << pairs.xs[0]->state().why;
  for (const int link : {0, 1, 2}) model_mend(link);
}

/// Of two ends one loses the device of the backup link for good: the other one does not wait for a channel over it.
TEST(Later, ADeviceGoesAndTheOtherEndHearsOfIt) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_async_events();
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 1; })) << pairs.xs[0]->state().why;
  model_raise_fatal(1, 1);
  EXPECT_TRUE(wait_for([&] { return std::string(pairs.xs[0]->state().why) == "the other end cannot go to its other link"; })) << pairs.xs[0]->state().why;
}

/// A session that began while posts are noted is kept. Its links are left and come back before it ends: they are there all the same.
TEST(Session, ThatIsOpenKeepsNoBackupAway) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b, nullptr, nullptr, nullptr, true);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  ibv_qp_ex* const sessions[] = {a.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(x.qp), b.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(y.qp)};
  for (ibv_qp_ex* session : sessions) ibv_wr_start(session);
  const StoreProcess process = store_process_of(0);
  char why[200] = "";
  process.park(why, sizeof why);
  EXPECT_STREQ(why, "");
  EXPECT_FALSE(x.ready_on(0) && y.ready_on(0));
  process.let_go();
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
  for (ibv_qp_ex* session : sessions) {
    session->wr_id = 7;
    session->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(session, 0, 0);
    EXPECT_EQ(ibv_wr_complete(session), 0);
  }
  ibv_wc wc{};
  for (const Speaker* s : {&x, &y}) {
    EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(s->cq, 1, &wc) == 1; }));
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, 7u);
  }
}

/// Posts a WRITE of no bytes.
struct Session {
  explicit Session(const Speaker& s) : of(s), ex(s.lib.verb<ibv_qp_ex*(ibv_qp*)>("ibv_qp_to_qp_ex")(s.qp)) { ibv_wr_start(ex); }
  int end(std::uint64_t wr_id) const {
    ex->wr_id = wr_id;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, 0, 0);
    return ibv_wr_complete(ex);
  }
  bool completes(std::uint64_t wr_id) const {
    ibv_wc wc{};
    return wait_for([&] { return ibv_poll_cq(of.cq, 1, &wc) == 1; }) && wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id;
  }
  const Speaker& of;
  ibv_qp_ex* const ex;
};

/// The ends agree to relay atomics, from when on sessions are kept, while one is open on the path: that of another thread waits for it.
TEST(Session, OnThePathIsNotMixedWithAKeptOne) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b, nullptr, nullptr, nullptr, true);
  x.connect(y), y.connect(x);
  const Session one(x);
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "waits for the end of an ibv_wr_* session" || x.ready_on(0); }));
  ASSERT_FALSE(x.ready_on(0)) << "sessions that begin now are kept, beside the one on the path";
  std::atomic<bool> begins = false;
  auto other = std::async(std::launch::async, [&] {
    begins = true;
    const Session kept(x);
    return kept.end(8);
  });
  ASSERT_TRUE(wait_for([&] { return begins.load(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(one.end(7), 0);
  EXPECT_EQ(other.get(), 0);
  EXPECT_TRUE(one.completes(7));
  EXPECT_TRUE(one.completes(8));
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
  EXPECT_EQ(x.state().atomics, unsigned{MIGR_LINKS_RELAYED});
}

/// It is open when the link fails, and its thread asks the library for something before it ends it.
TEST(Session, WhoseThreadNeedsTheLibraryEndsNoConnection) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  std::atomic<bool> ends = false;
  std::atomic<unsigned> posted = 0;
  std::thread poster([&] {
    while (!ends) {
      const Session session(x);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(x.query().qp_state, IBV_QPS_RTS);
      EXPECT_EQ(session.end(posted), 0);
      ++posted;
    }
  });
  unsigned completed = 0;
  const auto poll = [&] {
    for (ibv_wc wc; ibv_poll_cq(x.cq, 1, &wc) == 1; ++completed) EXPECT_TRUE(wc.status == IBV_WC_SUCCESS && wc.wr_id == completed) << wc.status << " at " << completed;
    return testing::Test::HasFailure();
  };
  EXPECT_TRUE(wait_for([&] { return poll() || completed > 1; }));
  model_cut_now(0);
  EXPECT_TRUE(wait_for([&] { return poll() || (x.state().link == 1 && y.state().link == 1); })) << x.state().why;
  const unsigned before = posted;
  EXPECT_TRUE(wait_for([&] { return poll() || completed > before; }));
  ends = true;
  poster.join();
  EXPECT_TRUE(wait_for([&] { return poll() || completed == posted; })) << completed << " of " << posted;
}

/// It is to be on link 1 from now on, and looks at that at once.
void prefer_other(const Library& a) {
  store_prefer("a1");
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
}

/// The longest of the calls that a thread makes for so long which need the library's lock.
Clock::duration longest_query(const Speaker& x, std::chrono::milliseconds time) {
  Clock::duration longest{};
  for (const auto until = Clock::now() + time; Clock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    const auto begun = Clock::now();
    EXPECT_EQ(x.query().qp_state, IBV_QPS_RTS);
    longest = std::max(longest, Clock::now() - begun);
  }
  return longest;
}

/// The same, and the link is to be left without a failure: who waits for the session's end does not hold the library's lock.
TEST(Session, WhoseThreadNeedsTheLibraryIsNotHeldUpByADrain) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  const Session session(x);
  ASSERT_NO_FATAL_FAILURE(prefer_other(a));
  EXPECT_LT(longest_query(x, std::chrono::milliseconds(1500)), std::chrono::seconds(1));
  EXPECT_EQ(session.end(7), 0);
  EXPECT_TRUE(session.completes(7));
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  store_prefer(nullptr);
}

/// Sends WRITEs of no bytes, each of which completes.
struct Writing {
  explicit Writing(const Speaker& by) : from(by) {}
  bool post() {
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    ++posted;
    return !ibv_post_send(from.qp, &wr, &bad);
  }
  /// @return all have
  bool completed() {
    for (ibv_wc wc; ibv_poll_cq(from.cq, 1, &wc) == 1; ++done) EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << "at " << done;
    return done == posted;
  }
  const Speaker& from;
  unsigned posted = 0, done = 0;
};

/// It has begun by then: else who posts waits for the session of another thread.
void post_in_a_drain(Writing& other) {
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  auto posted = std::async(std::launch::async, [&] { return other.post(); });
  ASSERT_EQ(posted.wait_for(std::chrono::seconds(1)), std::future_status::ready) << "the drain has not begun";
}

/// A drain that such a session outlasts is over without it. What another thread has posted meanwhile is not posted before its end, for which the device
/// has the queue locked: who did so with the library's lock would wait for a thread that waits for him.
TEST(Session, ThatOutlastsADrainIsWaitedForByWhatOthersPost) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  const Session session(x);
  ASSERT_NO_FATAL_FAILURE(prefer_other(a));
  Writing other(x);
  ASSERT_NO_FATAL_FAILURE(post_in_a_drain(other));
  EXPECT_LT(longest_query(x, std::chrono::milliseconds(2500)), std::chrono::seconds(1));
  store_prefer(nullptr);
  EXPECT_EQ(session.end(7), 0);
  EXPECT_TRUE(session.completes(7));
  EXPECT_TRUE(wait_for([&] { return other.completed(); }));
}

/// The other end has given up meanwhile, and it is the session's own thread that closes the QP. What was kept is flushed behind the session.
TEST(Session, ThatOutlastsItsConnectionHoldsNobodyUpWhoClosesTheQp) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a, nullptr, nullptr, nullptr, true), y(b), other_x(a), other_y(b);
  x.connect(y), y.connect(x);
  other_x.connect(other_y), other_y.connect(other_x);  // whose channels carry the word
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && other_x.ready_on(0) && other_y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  const Session session(x);
  ASSERT_NO_FATAL_FAILURE(prefer_other(a));
  Writing other(x);
  ASSERT_NO_FATAL_FAILURE(post_in_a_drain(other));
  y.destroy();
  ASSERT_TRUE(wait_for([&] { return std::string(x.state().why) == "the other end has given up"; })) << x.state().why;
  const auto begun = Clock::now();
  ibv_qp_attr error{};
  error.qp_state = IBV_QPS_ERR;
  EXPECT_EQ(x.modify(error, IBV_QP_STATE), 0);
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  store_prefer(nullptr);
  EXPECT_EQ(session.end(7), 0);
  for (const std::uint64_t wr_id : {7, 0}) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; }));
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_NE(wc.status, IBV_WC_SUCCESS);
  }
}

/// The errors of a path are hidden, and whoever asks for as many completions as there are of those gets the others that lie behind them.
TEST(Errors, OfAPathAreNotAllThatIsFound) {
  constexpr unsigned kErrors = 3;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ibv_qp_cap other = Speaker::kCap;
  other.max_recv_wr = 5;
  const Speaker failing(a), well(a, failing.pd, failing.cq, nullptr, false, other), y(b), z(b);
  failing.connect(y), y.connect(failing);
  well.connect(z), z.connect(well);
  for (const Speaker* s : {&failing, &well, &y, &z}) ASSERT_TRUE(wait_for([&] { return s->ready_on(0); })) << s->state().why;
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;
  for (unsigned i = 0; i < kErrors; ++i) ASSERT_EQ(ibv_post_send(failing.qp, &wr, &bad), 0);  // the other end has no receive
  ASSERT_EQ(model_break_paths(0, 0, Speaker::kCap.max_recv_wr), 1u);
  ibv_recv_wr receive{.wr_id = 77, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(well.qp, &receive, &bad_receive), 0);
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(z.qp, &wr, &bad), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(z.cq, 1, &wc) == 1; }));
  ASSERT_EQ(ibv_poll_cq(well.cq, 1, &wc), 1) << "a thread that has armed it would sleep";
  EXPECT_EQ(wc.wr_id, 77u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

/// A host whose processors are busy: its port is not down yet when its sends find no way any more.
TEST(Ports, ThatSayLateThatTheyAreDownAreWaitedFor) {
  constexpr unsigned kLateMs = 150;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  model_take_route(0, kLateMs);
  model_cut_now(0);
  Writing writing(x);
  EXPECT_TRUE(writing.post());
  EXPECT_TRUE(wait_for([&] { return writing.completed(); })) << x.state().why;
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1; })) << "what is known of it is told a moment later";
  model_mend(0);
}

/// What is bound on one device is not on another: from the first window on nobody leaves the default link, not even one that is healthy. Off that
/// there are none.
TEST(Windows, EndTheBackupAndAreRefusedOffTheDefaultLink) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 5, 30'000), b('b', "exact", "cached", 5, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  const auto tell = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  Writing one(x), other(y);
  const auto all_completed = [&] { return wait_for([&] { return one.completed() && other.completed(); }); };
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  tell("migr_link_down");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  errno = 0;
  ASSERT_EQ(ibv_alloc_mw(x.pd, IBV_MW_TYPE_1), nullptr);
  EXPECT_EQ(errno, EBUSY);
  tell("migr_link_up");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;

  ibv_mw* window = nullptr;
  ASSERT_TRUE(wait_for([&] { return store_pass(0), store_pass(1), (window = ibv_alloc_mw(x.pd, IBV_MW_TYPE_1)) != nullptr; })) << std::strerror(errno);
  EXPECT_TRUE(wait_for([&] { return std::string(x.state().why) == "its process has memory windows"; })) << x.state().why;
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  EXPECT_TRUE(wait_for([&] { return std::string(y.state().why) == "the other end has given up"; })) << y.state().why;
  EXPECT_EQ(y.state().phase, MIGR_LINKS_VQP_MAKING) << "it carries, and has no backup";
  tell("migr_link_down");
  EXPECT_TRUE(one.post() && other.post());
  EXPECT_TRUE(all_completed());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(x.state().link, 0u);
  EXPECT_EQ(y.state().link, 0u);
  EXPECT_TRUE(one.post() && other.post());
  EXPECT_TRUE(all_completed());
  ibv_mw* const second = ibv_alloc_mw(x.pd, IBV_MW_TYPE_1);
  EXPECT_NE(second, nullptr);
  for (ibv_mw* mw : {window, second}) EXPECT_EQ(ibv_dealloc_mw(mw), 0);

  model_cut_now(0);
  ibv_wc wc{};
  EXPECT_TRUE(one.post());
  EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << "nobody is told of a link that fails";
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
}

/// A word that one end READs from the other.
struct Reading {
  Reading(const Speaker& by, const Speaker& of) : from(by), to(of), here(reg(by, got)), there(reg(of, word)) {}
  static ibv_mr* reg(const Speaker& of, std::uint64_t& at) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, &at, sizeof at, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  }
  ibv_wc_status read() {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&got), sizeof got, here->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_READ;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(&word), .rkey = there->rkey};
    got = 0;
    EXPECT_EQ(ibv_post_send(from.qp, &wr, &bad), 0);
    ibv_wc wc{};
    EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(from.cq, 1, &wc) == 1; }));
    return wc.status;
  }
  const Speaker &from, &to;
  std::uint64_t word = 0x1234567890, got = 0;
  ibv_mr *here, *there;
};

class Attributes : public testing::Test {
 protected:
  void SetUp() override {
    for (const int link : {0, 1, 2}) model_mend(link);
  }
  static void link_down(const Library& of, const char* device) { ASSERT_EQ(of.verb<int(const char*, std::uint32_t)>("migr_link_down")(device, 1), 0); }
  static void link_up(const Library& of, const char* device) { ASSERT_EQ(of.verb<int(const char*, std::uint32_t)>("migr_link_up")(device, 1), 0); }
  static bool protected_on(unsigned link, const Speaker& x, const Speaker& y) {
    return wait_for([&] { return x.ready_on(link) && y.ready_on(link); });
  }
  static bool both_on(unsigned link, const Speaker& x, const Speaker& y) {
    return wait_for([&] { return x.state().link == link && y.state().link == link; });
  }
};

/// The next path was made before its application let others read.
TEST_F(Attributes, OfThePathMadeAheadAreTheLastOnes) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x, IBV_ACCESS_REMOTE_WRITE);
  Reading reading(x, y);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  ASSERT_EQ(y.grant(Speaker::kAll), 0);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.state().why;
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
  EXPECT_EQ(reading.got, reading.word);
}

/// And before it had said what it would send with.
TEST_F(Attributes, OfThePathMadeAheadInRtrAreThoseOfRts) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.answer(x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  ibv_qp_attr sends{};
  sends.timeout = 16;
  sends.retry_cnt = 5;
  sends.rnr_retry = 4;
  sends.max_rd_atomic = 3;
  ASSERT_EQ(y.send_too(sends), 0);
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.state().why;
  const ibv_qp_attr now = y.query();
  EXPECT_EQ(now.timeout, 16);
  EXPECT_EQ(now.retry_cnt, 5);
  EXPECT_EQ(now.rnr_retry, 4);
  EXPECT_EQ(now.max_rd_atomic, 3);
  Writing one(x), other(y);
  EXPECT_TRUE(one.post() && other.post());
  EXPECT_TRUE(wait_for([&] { return one.completed() && other.completed(); }));
}

/// A path is cut, and there is no next one yet: what is changed meanwhile holds for that.
TEST_F(Attributes, ThatChangeWhileThePathIsCutAreThoseOfTheNext) {
  const Library a('a', "exact", "rebuild", 0, 30'000), b('b', "exact", "rebuild", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y, IBV_ACCESS_REMOTE_WRITE), y.connect(x);
  Reading reading(y, x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  model_refuse_qps(1, 1, 1u << 20);
  link_down(a, "a0");
  ASSERT_TRUE(wait_for([&] {
    a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a1", 1);  // so that it is told
    return x.state().phase == MIGR_LINKS_VQP_SWITCHING;
  })) << x.state().why;
  auto granted = std::async(std::launch::async, [&] { return x.grant(Speaker::kAll); });
  EXPECT_EQ(granted.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  model_refuse_qps(1, 1, 0);
  EXPECT_EQ(granted.get(), 0);
  ASSERT_TRUE(both_on(1, x, y)) << x.state().why;
  EXPECT_EQ(x.query().qp_access_flags, Speaker::kAll);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
}

/// Its path has left RTR before its application does, and with rights that it has not given.
TEST_F(Attributes, ThatComeWithRtsAfterAChangeAreThoseOfItsPath) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.answer(x, IBV_ACCESS_REMOTE_WRITE);
  Reading reading(x, y);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.state().why;
  ibv_qp_attr to{};
  to.qp_access_flags = Speaker::kAll;
  ASSERT_EQ(y.send_too(to, IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
}

/// The device has given a path up, and nobody has polled what tells of it.
TEST_F(Attributes, ThatChangeWhenThePathHasFailedUnseenAreThoseOfTheNext) {
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y, IBV_ACCESS_REMOTE_WRITE), y.connect(x);
  Reading reading(y, x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  ibv_send_wr send{}, *bad;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(x.qp, &send, &bad), 0);  // finds no receive
  ASSERT_TRUE(wait_for([] { return model_break_paths(0, 0, 1) == 1; }));
  EXPECT_EQ(x.grant(Speaker::kAll), 0);
  EXPECT_EQ(x.query().qp_access_flags, Speaker::kAll);
  EXPECT_EQ(reading.read(), IBV_WC_SUCCESS);
  ibv_recv_wr receive{}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(y.qp, &receive, &bad_receive), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

/// The backup link has a smaller MTU than the default one, to which they go back.
TEST_F(Attributes, OfEachPathIsTheMtuThatTheApplicationHasSetAsFarAsItsLinkHasIt) {
  constexpr unsigned kReturnMs = 5;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", kReturnMs, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.state().why;
  EXPECT_EQ(x.query().path_mtu, IBV_MTU_512);
  EXPECT_EQ(y.query().path_mtu, IBV_MTU_512);
  link_up(a, "a0");
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  EXPECT_EQ(x.query().path_mtu, IBV_MTU_1024);
  EXPECT_EQ(y.query().path_mtu, IBV_MTU_1024);
}

/// It would be in RTS there.
TEST_F(Attributes, OfAQpInSqdKeepItWhereItIs) {
  constexpr unsigned kReturnMs = 20;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", kReturnMs, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  const auto to = [&x](ibv_qp_state state) {
    ibv_qp_attr attr{};
    attr.qp_state = state;
    return x.modify(attr, IBV_QP_STATE);
  };
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  link_down(a, "a0");
  ASSERT_TRUE(both_on(1, x, y)) << x.state().why;
  ASSERT_EQ(to(IBV_QPS_SQD), 0);
  link_up(a, "a0");
  ASSERT_TRUE(protected_on(1, x, y)) << x.state().why;
  std::this_thread::sleep_for(std::chrono::milliseconds(10 * kReturnMs));
  EXPECT_EQ(x.state().link, 1u);
  EXPECT_EQ(x.query().qp_state, IBV_QPS_SQD);
  ASSERT_EQ(to(IBV_QPS_RTS), 0);
  ASSERT_TRUE(protected_on(0, x, y)) << x.state().why;
  ASSERT_EQ(to(IBV_QPS_SQD), 0);
  model_cut_now(0);
  link_down(a, "a0");
  ASSERT_TRUE(wait_for([&] { return std::string(x.state().why) == "gave up"; })) << x.state().why << ", link " << x.state().link;
  EXPECT_EQ(x.query().qp_state, IBV_QPS_SQD);
  Writing writing(x);
  ASSERT_TRUE(writing.post());
  ASSERT_EQ(to(IBV_QPS_RTS), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
}

/// A process leaves its links. Its partner has forgotten its backup, and cannot say so nor make another one, as it waits for the directory, when the
/// default link fails, or all do.
class Parting : public testing::TestWithParam<bool> {};

TEST_P(Parting, OutlivesALinkThatFailsBeforeTheAnswerToBye) {
  const bool all = GetParam();
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  Writing one(x), other(y);
  const Library without('a', "off", "cached", 0, 3000);
  const Speaker unknown(without), asks(b);
  unknown.connect(asks), asks.connect(unknown);
  store_hold_lookups(true);
  ASSERT_TRUE(wait_for([] { return store_lookup_waits(); }));
  const unsigned before = model_qps();
  auto parked = std::async(std::launch::async, [&] {
    char why[200];
    return process.park(why, sizeof why), std::string(why);
  });
  ASSERT_TRUE(wait_for([&] { return model_qps() < before; })) << "the partner has not heard BYE";
  for (const int link : {0, 1})
    if (link == 0 || all) model_cut_now(link);
  EXPECT_TRUE(one.post() && other.post());
  for (const auto until = Clock::now() + std::chrono::milliseconds(300); Clock::now() < until;) one.completed(), other.completed();
  store_hold_lookups(false);
  EXPECT_EQ(parked.get(), "") << "guarded it is moved";
  process.let_go();
  if (all) model_mend(1);
  EXPECT_TRUE(wait_for([&] { return one.completed() && other.completed(); })) << one.done << " and " << other.done << "; " << x.state().why;
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; }));
}

INSTANTIATE_TEST_SUITE_P(, Parting, testing::Bool(), [](const auto& info) { return info.param ? "all_links" : "default_link"; });

/// Neither end has a path: one, since its process leaves its links, and so the other. Then they have channels again, and lack memory, when the other
/// one has waited for long enough.
TEST(Adrift, EndsWithTheOtherEnd) {
  constexpr unsigned kLongMs = 4 * kSwitchMs, kSoonMs = 4000;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, kLongMs);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, kSoonMs);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  model_cut_now(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  char why[200];
  process.park(why, sizeof why);
  ASSERT_STREQ(why, "");
  std::vector<std::uint8_t> memory(4096);
  model_refuse_registrations(memory.data());
  for (const Speaker* s : {&x, &y})
    ASSERT_NE(s->lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(s->pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  ibv_send_wr wr{}, *bad;
  wr.wr_id = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  process.let_go();
  ASSERT_TRUE(wait_for([&] { return std::string(x.state().why) == "waits for memory"; })) << x.state().why;
  ASSERT_NE(y.state().phase, MIGR_LINKS_VQP_BROKEN) << "too early: " << y.state().why;
  ibv_wc wc{};
  EXPECT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.wr_id, 1u);
  EXPECT_NE(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_BROKEN && y.state().phase == MIGR_LINKS_VQP_BROKEN; })) << x.state().why << "; " << y.state().why;
  model_refuse_registrations(nullptr);
}

/// Of two connections of the same processes one has broken off its default link at one end, and is gone at the other, which is to be migrated.
TEST(Bye, IsAnsweredByWhoHasLostAnotherConnection) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 5, 30'000);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 5, 30'000);
  const Pairs pairs(a, b, 2);
  const Speaker &x = *pairs.xs[0], &y = *pairs.ys[0], &lost = *pairs.ys[1];
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 2 && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); }));
  pairs.xs[1]->destroy();
  ASSERT_TRUE(Writing(lost).post());
  ASSERT_TRUE(wait_for([&] {
    for (ibv_wc wc; ibv_poll_cq(lost.cq, 1, &wc) == 1;) EXPECT_NE(wc.status, IBV_WC_SUCCESS);
    return lost.state().phase == MIGR_LINKS_VQP_BROKEN;
  })) << lost.state().why;
  EXPECT_EQ(lost.state().link, 1u);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  char why[200];
  process.park(why, sizeof why);
  EXPECT_STREQ(why, "");
  process.let_go();
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
}

/// What a partner has published cannot be withdrawn without migrd, so it would not answer, and would hear nothing any more.
TEST(Bye, IsNotHeardWhileMigrdIsAway) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000);
  ASSERT_TRUE(wait_for([] { return store_processes() == 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  store_go_away(true);
  ASSERT_TRUE(wait_for([&] {
    for (const Library* of : {&a, &b}) of->verb<int(const char*, std::uint32_t)>("migr_link_up")(of == &a ? "a0" : "b0", 1);  // each looks again
    return store_asked_in_vain() == 2;
  }));
  auto parked = std::async(std::launch::async, [&] {
    char why[200];
    process.park(why, sizeof why);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  model_cut_now(0);
  Writing writing(y);
  EXPECT_TRUE(writing.post());
  EXPECT_TRUE(wait_for([&] { return writing.completed(); })) << "the partner has parted, and cannot say so";
  model_mend(0);
  store_go_away(false);
  parked.get();
  process.let_go();
  EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_READY && y.state().phase == MIGR_LINKS_VQP_READY; })) << x.state().why;
}

/// One end is about to go back when the other one is not there any more, or has broken, of which it has said nothing.
class Back : public testing::TestWithParam<bool> {};

TEST_P(Back, ToAnEndThatIsGoneEndsItAtOnce) {
  for (const int link : {0, 1, 2}) model_mend(link);
  constexpr unsigned kReturnMs = 2500;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", kReturnMs, 30'000);
  const Pairs pairs(a, b, 2);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == 2 && store_all_stand(0) && store_all_stand(1); })) << pairs.xs[0]->state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); }));
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(1) == 2; })) << "no path ahead, or they are back already: " << pairs.xs[0]->state().why;
  if (GetParam()) {
    ibv_qp_attr error{};
    error.qp_state = IBV_QPS_ERR;
    ASSERT_EQ(pairs.ys[1]->modify(error, IBV_QP_STATE), 0);
  } else {
    pairs.ys[1]->destroy();
  }
  EXPECT_TRUE(wait_for([&] { return std::string(pairs.xs[1]->state().why) == "the other end has given up"; })) << pairs.xs[1]->state().why;
  EXPECT_TRUE(wait_for([&] { return pairs.xs[0]->ready_on(0) && pairs.ys[0]->ready_on(0); })) << pairs.xs[0]->state().why;
}

INSTANTIATE_TEST_SUITE_P(, Back, testing::Bool(), [](const auto& info) { return info.param ? "broken" : "destroyed"; });

/// The other end has not got all memory there, and so no backup of its own.
TEST(Preferred, LinkThatTheOtherEndCannotTakeWithholdsNothing) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  std::vector<std::uint8_t> memory(4096);
  model_refuse_registrations(memory.data());
  ASSERT_NE(b.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(y.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && std::string(y.state().why) == "waits for memory"; })) << y.state().why;
  store_prefer("a1");
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // it looks again
  Writing writing(x);
  Clock::duration longest{};
  EXPECT_TRUE(wait_for([&] {
    const auto begun = Clock::now();
    const bool done = writing.post() && wait_for([&] { return writing.completed(); });
    longest = std::max(longest, Clock::now() - begun);
    return !done || std::string(x.state().why).starts_with("the way to its other link did not end");
  })) << x.state().why;
  EXPECT_LT(longest, std::chrono::seconds(1));
  store_prefer(nullptr);
  model_refuse_registrations(nullptr);
}

/// Its device there, or the other end's, does not take what was registered when both stood ready.
TEST(Preferred, LinkThatRefusesLaterMemoryIsNotGoneTo) {
  for (const bool here : {true, false}) {
    for (const int link : {0, 1, 2}) model_mend(link);
    const Library a('a', "exact", "cached", 0, 30'000), b('b', "exact", "cached", 0, 30'000);
    const Speaker x(a), y(b);
    const Speaker& end = here ? x : y;
    x.connect(y), y.connect(x);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
    std::vector<std::uint8_t> memory(4096);
    model_refuse_registrations(memory.data());
    ASSERT_NE(end.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(end.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
    EXPECT_TRUE(wait_for([&] { return end.ready_on(0) && std::string(end.state().why) == "waits for memory"; })) << end.state().why;
    store_prefer("a1");
    ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);  // it looks again
    Writing writing(x);
    for (const auto until = Clock::now() + std::chrono::milliseconds(1500); Clock::now() < until && !HasFailure();)
      EXPECT_TRUE(writing.post() && wait_for([&] { return writing.completed(); })) << x.state().why;
    EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
    store_prefer(nullptr);
    model_refuse_registrations(nullptr);
  }
}

/// On the way back one end is soon drained, and the other one hears of it late, and has something in flight for longer than the first one waits. What the
/// first one sends when it has gone on is not cut off, since nothing has failed: each FETCH_AND_ADD completes, and none had to be settled.
TEST(Drain, ThatRunsOutAtOneEndIsNotTakenForDoneAtTheOther) {
  for (const int link : {0, 1, 2}) model_mend(link);
  constexpr unsigned kReturnMs = 2500;
  const Library a('a', "exact", "cached", kReturnMs, 30'000), b('b', "exact", "cached", 0, 30'000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  std::uint64_t sum = 0, found[kDepth]{};
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, found, sizeof found);
  ASSERT_TRUE(there && here);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  model_cut_now(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; }));
  ibv_send_wr send{}, *bad;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(y.qp, &send, &bad), 0);  // finds no receive
  model_mend(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1) && store_all_stand(0); })) << x.state().why;
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  migr_links_switch totals;
  store_totals(&totals);  // the one before
  std::optional<StandsStill> still(std::in_place, b);
  unsigned posted = 0, done = 0;
  bool is_last = false;
  auto progress = Clock::now();
  const auto go_on = [&] {
    for (; !is_last && posted - done < kDepth; ++posted) {
      EXPECT_EQ(post_add(x, found[posted % kDepth], *here, sum, *there), 0);
    }
    for (ibv_wc wc; ibv_poll_cq(x.cq, 1, &wc) == 1;) {
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << "at " << done << ": " << x.state().why;
      if (wc.opcode & IBV_WC_RECV) continue;
      EXPECT_EQ(found[done % kDepth], done);
      progress = Clock::now();
      ++done;
    }
    return testing::Test::HasFailure();
  };
  const auto stands_still = [&](unsigned ms) { return Clock::now() - progress > std::chrono::milliseconds(ms); };
  // 50 ms between when the first end goes on and when the other one, which begins to drain now, says so again; before that it has to be drained.
  EXPECT_TRUE(wait_for([&] { return go_on() || stands_still(1550); })) << "it does not go back";
  still.reset();
  const unsigned before = done;
  EXPECT_TRUE(wait_for([&] { return go_on() || done != before; })) << "the drain has no end";
  ibv_recv_wr receive{}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(x.qp, &receive, &bad_receive), 0);  // now it is drained
  bool received = false;
  const auto back = [&] {
    for (ibv_wc wc; ibv_poll_cq(y.cq, 1, &wc) == 1;) received = received || wc.status == IBV_WC_SUCCESS;
    return received && x.ready_on(0) && y.ready_on(0);
  };
  EXPECT_TRUE(wait_for([&] { return go_on() || back(); })) << "the next one has no end: " << x.state().why;
  store_totals(&totals);
  EXPECT_EQ(totals.replayed + totals.executed + totals.lost + totals.broken, 0u) << "cut with " << totals.replayed + totals.executed + totals.lost << " in flight";
  is_last = true;  // what is in flight is written to memory of ours
  EXPECT_TRUE(wait_for([&] { return go_on() || done == posted; }));
}

/// More than a packet to migrd has room for.
TEST(Many, ChangeAtOnceAndThatIsSaidOfEach) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const unsigned n = std::getenv("FAILOVER_MANY") ? static_cast<unsigned>(std::atoi(std::getenv("FAILOVER_MANY"))) : 300;
  const Library a('a', "exact", "cached", 5, 3000, 60'000), b('b', "exact", "cached", 5, 3000, 60'000);
  const Pairs pairs(a, b, n);
  const auto all_on = [&](unsigned link) {
    const auto begun = std::chrono::steady_clock::now();
    const bool all = wait_for([&] { return pairs.ready_on(link) == n; });
    std::cout << n << " on link " << link << " after " << std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun).count() << " ms\n";
    return all;
  };
  ASSERT_TRUE(all_on(0)) << pairs.ready_on(0);
  model_cut_now(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); }));
  model_mend(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  ASSERT_TRUE(all_on(0)) << pairs.ready_on(0);
}

/// @return ms for registering memory at one end of `n` connections that are on a backup link, or nothing if they do not get there
std::optional<double> registering(unsigned n) {
  for (const int link : {0, 1, 2}) model_mend(link);
  constexpr unsigned kMrs = 1000;
  const Library a('a', "exact", "cached", 5, 3000, 60'000), b('b', "exact", "cached", 5, 3000, 60'000);
  const Pairs pairs(a, b, n);
  if (!wait_for([&] { return pairs.ready_on(0) == n; })) return {};
  model_cut_now(0);
  if (a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1)) return {};
  if (!wait_for([&] { return pairs.all_on(1); })) return {};
  std::vector<std::uint8_t> memory(4096);
  const auto reg = a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr");
  const auto begun = Clock::now();
  for (unsigned i = 0; i < kMrs; ++i)
    if (!reg(pairs.xs[0]->pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) return {};
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

/// Who registers waits until the other end translates by what it was told: by one table for all connections, not by one for each.
TEST(Many, DoNotMakeRegisteringMemorySlow) {
  const unsigned n = std::getenv("FAILOVER_MANY") ? static_cast<unsigned>(std::atoi(std::getenv("FAILOVER_MANY"))) : 200;
  const auto one = registering(1), many = registering(n);
  ASSERT_TRUE(one && many) << one.has_value() << many.has_value();
  std::cout << *one << " ms with one, " << *many << " ms with " << n << "\n";
  EXPECT_LT(*many, 8 * *one);
}

/// Whoever is told of a key replaces the table, and nobody says that all threads are outside.
TEST(Many, KeepOneTableOfKeysThatWasReplacedWhileMigrdIsAway) {
  constexpr unsigned kPairs = 20, kMrs = 10;
  for (const int link : {0, 1, 2}) model_mend(link);
  const std::size_t processes = store_processes();
  const Library a('a', "exact", "cached", 0, 3000);
  ASSERT_TRUE(wait_for([&] { return store_processes() == processes + 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 3000);
  const Pairs pairs(a, b, kPairs);
  ASSERT_TRUE(wait_for([&] { return pairs.ready_on(0) == kPairs; })) << pairs.ready_on(0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return pairs.all_on(1); }));
  store_go_away(true);
  std::vector<std::uint8_t> memory(4096);
  for (unsigned i = 0; i < kMrs; ++i)
    ASSERT_NE(b.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pairs.ys[0]->pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_TRUE(wait_for([&] { return process.retired() >= kMrs / 2; })) << "nobody was told";
  EXPECT_LT(process.retired(), kPairs * kMrs / 2);
  store_go_away(false);
}

TEST(Many, PartnersThatNobodyKnowsKeepNoOtherBack) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000), without('b', "off", "cached", 0, 3000);
  constexpr unsigned kUnknown = 100;
  const Pairs unknown(a, without, kUnknown), known(a, b, 1);
  ASSERT_TRUE(wait_for([&] { return known.ready_on(0) == 1; })) << known.xs[0]->state().why;
  EXPECT_EQ(unknown.ready_on(0), 0u);
}

/// Their names are there still, and nobody is behind them: more than one question to migrd has room for.
TEST(Many, PartnersThatAreGoneKeepNoOtherBack) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "rebuild", 0, 3000), b('b', "exact", "rebuild", 0, 3000), without('b', "off", "rebuild", 0, 3000);
  constexpr unsigned kGone = MIGR_LINKS_MAX_RECORDS / 2 + 10;  // each with a channel on two links
  const unsigned before = model_mrs(1, 0);
  const Pairs gone(a, without, kGone);
  for (unsigned i = 0; i < kGone; ++i) {
    const Speaker& y = *gone.ys[i];
    migr_links_vqp record{};
    std::memcpy(record.name.gid, y.gid.raw, sizeof record.name.gid);
    record.name.vqpn = y.qp->qp_num;
    record.making = MIGR_LINKS_REBUILD;
    record.links = 3;
    const std::uint8_t instance[16] = {1, static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i >> 8)};
    store_publish(instance, &record, 1);
  }
  ASSERT_TRUE(wait_for([&] { return model_mrs(1, 0) >= before + kGone; })) << model_mrs(1, 0) - before << " channels";
  const Pairs known(a, b, 1);
  EXPECT_TRUE(wait_for([&] { return known.ready_on(0) == 1; })) << known.xs[0]->state().why;
}

/// Pinning a terabyte takes minutes. Other calls of the application, and a change of a path, do not wait for that.
TEST(Memory, IsPinnedOnABackupLinkWithoutTheLock) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  std::vector<std::uint8_t> memory(4096);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  const auto reg = [&](ibv_pd* of) { return a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE); };
  const auto dereg = a.verb<int(ibv_mr*)>("ibv_dereg_mr");
  const auto is_being_pinned = [] { return wait_for([] { return model_registrations_waiting() == 1; }); };
  const auto ends = [](const std::future<int>& f, int ms) { return f.wait_for(std::chrono::milliseconds(ms)) == std::future_status::ready; };
  constexpr int kSoonMs = 50, kPatienceMs = 10'000;

  model_hold_registrations(1, true);
  ibv_mr* mr = reg(pd);
  ASSERT_NE(mr, nullptr);
  ASSERT_TRUE(is_being_pinned());
  auto made = std::async(std::launch::async, [&] { return a.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(a.context, 1, nullptr, nullptr, 0) ? 0 : errno; });
  EXPECT_TRUE(ends(made, kPatienceMs)) << "a call waits for another NIC's memory";
  EXPECT_EQ(dereg(mr), 0);
  auto given_back = std::async(std::launch::async, [&] { return a.verb<int(ibv_pd*)>("ibv_dealloc_pd")(pd); });
  EXPECT_FALSE(ends(given_back, kSoonMs)) << "its like on the other link is in use";
  model_hold_registrations(1, false);
  EXPECT_EQ(given_back.get(), 0);
  EXPECT_TRUE(wait_for([&] { return model_mrs(1, 0) == model_mrs(0, 0); })) << model_mrs(1, 0) << " there, " << model_mrs(0, 0) << " here";

  // Registered once more while it is pinned: the last one counts.
  model_hold_registrations(1, true);
  mr = reg(x.pd);
  ASSERT_TRUE(is_being_pinned());
  EXPECT_EQ(dereg(mr), 0);
  mr = reg(x.pd);
  model_hold_registrations(1, false);
  EXPECT_TRUE(wait_for([&] { return model_mrs(1, 0) == model_mrs(0, 0); })) << model_mrs(1, 0) << " there, " << model_mrs(0, 0) << " here";
  model_keep_registrations(1);
  EXPECT_EQ(dereg(mr), EBUSY);
  EXPECT_TRUE(wait_for([&] { return model_mrs(1, 0) == model_mrs(0, 0); })) << "it is in use, and not there any more";
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  EXPECT_EQ(dereg(mr), 0);

  model_hold_registrations(1, true);
  auto late = std::async(std::launch::async, [&] { return reg(x.pd) ? 0 : errno; });
  EXPECT_FALSE(ends(late, kSoonMs)) << "off its default link it has to be there first";
  auto made_too = std::async(std::launch::async, [&] { return a.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(a.context, 1, nullptr, nullptr, 0) ? 0 : errno; });
  EXPECT_TRUE(ends(made_too, kPatienceMs)) << "a call waits for another thread's memory";
  model_hold_registrations(1, false);
  EXPECT_EQ(late.get(), 0);
}

/// A link fails when some of it has just been registered, and is still being pinned on the other link: only what needs it waits.
TEST(Memory, ThatIsBeingPinnedKeepsNoOtherPdsConnectionBack) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b), other_x(a), other_y(b);
  x.connect(y), y.connect(x), other_x.connect(other_y), other_y.connect(other_x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && other_x.ready_on(0) && other_y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  std::vector<std::uint8_t> memory(4096);
  model_hold_registrations(1, true);
  ASSERT_NE(a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(x.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  ASSERT_TRUE(wait_for([] { return model_registrations_waiting() == 1; }));
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  auto changed = std::async(std::launch::async, [&] {
    Writing writing(other_x);
    return wait_for([&] { return other_y.state().link == 1; }) && writing.post() && wait_for([&] { return writing.completed(); });
  });
  EXPECT_EQ(changed.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "it waits for another one's memory";
  auto asked = std::async(std::launch::async, [&] { return x.query().qp_state; });
  EXPECT_EQ(asked.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "so does a call";
  EXPECT_EQ(model_registrations_waiting(), 1u);
  Writing late(x);
  EXPECT_TRUE(late.post());
  EXPECT_FALSE(late.completed());
  model_hold_registrations(1, false);
  EXPECT_TRUE(changed.get());
  EXPECT_EQ(asked.get(), IBV_QPS_RTS);
  EXPECT_TRUE(wait_for([&] { return late.completed() && x.state().link == 1 && y.state().link == 1; })) << x.state().why;
}

TEST(RefusedMemory, KeepsNoOtherAwayFromABackupLink) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && model_mrs(1, 0) == model_mrs(0, 0); })) << x.state().why;
  std::vector<std::uint8_t> memory(4096), refused(4096);
  const auto reg = [&](ibv_pd* of, std::vector<std::uint8_t>& m) { return a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of, m.data(), m.size(), IBV_ACCESS_LOCAL_WRITE); };
  const auto dereg = a.verb<int(ibv_mr*)>("ibv_dereg_mr");
  model_refuse_registrations(refused.data());
  ibv_mr* const not_there = reg(x.pd, refused);
  ASSERT_TRUE(not_there && reg(x.pd, memory)) << "nothing is on the backup link yet";
  EXPECT_TRUE(wait_for([&] { return model_mrs(1, 0) + 1 == model_mrs(0, 0); })) << model_mrs(1, 0) << " there, " << model_mrs(0, 0) << " here";
  ASSERT_EQ(dereg(not_there), 0);
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;

  const unsigned before = model_mrs(0, 0);
  EXPECT_EQ(reg(x.pd, refused), nullptr) << "its QP could not use it";
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(model_mrs(0, 0), before);
  EXPECT_NE(reg(x.pd, memory), nullptr);
  ibv_pd* const of_no_qp = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  EXPECT_NE(reg(of_no_qp, refused), nullptr);
  model_refuse_registrations(nullptr);
  EXPECT_NE(reg(x.pd, refused), nullptr);
}

TEST(RefusedMemory, OfAPdThatNoQpHasEndsNoConnection) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  std::vector<std::uint8_t> memory(4096), refused(4096);
  ibv_pd* const of_no_qp = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  model_refuse_registrations(refused.data());
  for (std::vector<std::uint8_t>* m : {&refused, &memory})
    ASSERT_NE(a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of_no_qp, m->data(), m->size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  ASSERT_TRUE(wait_for([&] { return model_most_registered(memory.data()) == 2; })) << "one keeps the other back";
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  Writing writing(x);
  EXPECT_TRUE(writing.post() && wait_for([&] { return writing.completed(); })) << x.state().why;
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1), 0);
  EXPECT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1); })) << x.state().why;
  model_refuse_registrations(nullptr);
}

TEST(RefusedMemory, IsSaidToWhoRegistersItAnew) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  std::vector<std::uint8_t> memory(4096), other(4096), refused(4096);
  const auto reg = [&](ibv_pd* of) { return a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE); };
  const auto rereg = [&](ibv_mr* mr, std::vector<std::uint8_t>& m) { return a.verb<int(ibv_mr*, int, ibv_pd*, void*, std::size_t, int)>("ibv_rereg_mr")(mr, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, m.data(), m.size(), 0); };
  ibv_mr *const mr = reg(x.pd), *const of_no_qp = reg(a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context));
  ASSERT_TRUE(mr && of_no_qp);
  model_refuse_registrations(refused.data());
  EXPECT_EQ(rereg(mr, other), 0);
  errno = 0;
  EXPECT_EQ(rereg(mr, refused), IBV_REREG_MR_ERR_CMD) << "its QP could not use it";
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(rereg(of_no_qp, refused), 0);
  model_refuse_registrations(nullptr);
  EXPECT_EQ(a.verb<int(ibv_mr*)>("ibv_dereg_mr")(mr), 0);
}

/// On the backup link work requests are in flight that name it, at both ends.
TEST(RefusedMemory, ThatIsNotRegisteredAnewIsCalledThereAsBefore) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  std::vector<std::uint8_t> out(2100, 7), in(2100), got(2100);
  const auto reg = [](const Speaker& of, std::vector<std::uint8_t>& m) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, m.data(), m.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  };
  const auto is_refused = [](const Speaker& of, ibv_mr* mr) {
    errno = 0;
    const int err = of.lib.verb<int(ibv_mr*, int, ibv_pd*, void*, std::size_t, int)>("ibv_rereg_mr")(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_LOCAL_WRITE);
    return err == IBV_REREG_MR_ERR_CMD && errno == EOPNOTSUPP;
  };
  ibv_mr *const from = reg(x, out), *const to = reg(y, in), *const into = reg(y, got);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  const auto post = [&](ibv_wr_opcode opcode) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(out.data()), static_cast<std::uint32_t>(out.size()), from->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(in.data()), .rkey = to->rkey};
    return ibv_post_send(x.qp, &wr, &bad);
  };
  model_refuse_reregistrations(true);
  for (int i = 0; i < 5; ++i) {
    for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE}) ASSERT_EQ(post(opcode), 0);  // the first one finds no receive
    EXPECT_TRUE(is_refused(x, from) && is_refused(y, to));
    ibv_sge sge{reinterpret_cast<std::uint64_t>(got.data()), static_cast<std::uint32_t>(got.size()), into->lkey};
    ibv_recv_wr receive{.wr_id = 0, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    ASSERT_EQ(ibv_post_recv(y.qp, &receive, &bad), 0);
    for (const Speaker* s : {&x, &x, &y}) {
      ibv_wc wc{};
      ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(s->cq, 1, &wc) == 1; })) << i << ": " << x.state().why;
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << i;
    }
  }
  model_refuse_reregistrations(false);
  EXPECT_TRUE(in == out && got == out);
}

TEST(Memory, ThatIsBeingPinnedOnABackupLinkIsWaitedForWhenItsContextIsClosed) {
  const Library a('a', "exact", "cached", 0, 3000);
  std::vector<std::uint8_t> memory(4096);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  const unsigned before = model_mrs(1, 0);
  model_hold_registrations(1, true);
  for (int i = 0; i < 3; ++i) ASSERT_NE(a.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE), nullptr);
  ASSERT_TRUE(wait_for([] { return model_registrations_waiting() == 1; }));
  auto closed = std::async(std::launch::async, [&] { return a.verb<int(ibv_context*)>("ibv_close_device")(a.context); });
  EXPECT_EQ(closed.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  model_hold_registrations(1, false);
  EXPECT_EQ(closed.get(), 0);
  EXPECT_EQ(model_mrs(1, 0), before);
}

constexpr int kFewCqes = 4, kNeeded = kDepth + 1 + 8;  // of a Speaker's CQ; with what a path that fails completes, and 8 of libmigr's own

ibv_cq* small_cq(const Library& of) { return of.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(of.context, kFewCqes, nullptr, nullptr, 0); }

/// The model ends the program when a CQ overruns.
TEST(Room, IsMadeInACqForWhatIsNotSignalled) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "resend", "cached", 0, 3000), b('b', "resend", "cached", 0, 3000);
  ibv_cq* const cq = small_cq(a);
  const int told = cq->cqe;
  const Speaker x(a, nullptr, cq), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  EXPECT_EQ(cq->cqe, told);
  ASSERT_EQ(a.verb<int(ibv_cq*, int)>("ibv_resize_cq")(cq, kFewCqes + 1), 0);
  model_cut_now(0);
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_RDMA_WRITE;
  for (wr.wr_id = 1; wr.wr_id <= kDepth; ++wr.wr_id) {
    wr.send_flags = wr.wr_id == kDepth ? IBV_SEND_SIGNALED : 0;
    ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  }
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.wr_id, kDepth);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE(wait_for([&] { return x.state().link == 1; })) << x.state().why;  // which is told in the next round
}

TEST(Room, ThatACqCannotHaveIsSaidAndNotProtected) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_most_cqes(kNeeded - 1);
  const Library a('a', "resend", "cached", 0, 3000), b('b', "resend", "cached", 0, 3000);
  const Speaker x(a, nullptr, small_cq(a)), y(b);
  x.connect(y), y.connect(x);
  const std::string why = "its CQ has " + std::to_string(kFewCqes + 8) + " entries, " + std::to_string(kNeeded) + " may be flushed into it";
  EXPECT_TRUE(wait_for([&] { return x.state().why == why; })) << x.state().why;
  EXPECT_EQ(x.state().phase, MIGR_LINKS_VQP_NONE);
  model_most_cqes(kNeeded);
  ASSERT_EQ(a.verb<int(ibv_cq*, int)>("ibv_resize_cq")(x.cq, kFewCqes + 1), 0);
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0); })) << x.state().why;
  model_most_cqes(1 << 20);
}

/// What its cut would tell is not known any more: errors, and no success that is none.
TEST(Room, ThatALaterQpTakesIsSaidOfTheOneBeforeAndEndsItWithItsLink) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_most_cqes(kNeeded);
  const Library a('a', "resend", "cached", 0, 3000), b('b', "resend", "cached", 0, 3000);
  const Speaker x(a, nullptr, small_cq(a)), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  const Speaker other(a, x.pd, x.cq);
  ASSERT_TRUE(wait_for([&] {
    a.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1);  // so that it is looked at
    return std::string(x.state().why) == "its CQ has " + std::to_string(kNeeded) + " entries, " + std::to_string(kNeeded + kDepth + 1) + " may be flushed into it";
  })) << x.state().why;
  ibv_send_wr wr{}, *bad;
  wr.wr_id = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  model_cut_now(0);
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.wr_id, 1u);
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(wait_for([&] { return x.state().phase == MIGR_LINKS_VQP_BROKEN; }));
  model_most_cqes(1 << 20);
}

/// Off its default link, which works again: it carries where it is, and goes back when there is room.
TEST(Room, ThatALaterQpTakesKeepsTheOneBeforeWhereItIs) {
  constexpr unsigned kReturnMs = 5;
  for (const int link : {0, 1, 2}) model_mend(link);
  model_most_cqes(kNeeded);
  const Library a('a', "resend", "cached", kReturnMs, 3000), b('b', "resend", "cached", kReturnMs, 3000);
  const auto link_is = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  const Speaker x(a, nullptr, small_cq(a)), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  link_is("migr_link_down");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  const Speaker other(a, x.pd, x.cq);
  link_is("migr_link_up");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && std::string(x.state().why).starts_with("its CQ has "); })) << x.state().why;
  Writing writing(x);
  for (const auto until = Clock::now() + std::chrono::milliseconds(500); Clock::now() < until && !HasFailure();)
    EXPECT_TRUE(writing.post() && wait_for([&] { return writing.completed(); })) << x.state().why;
  EXPECT_TRUE(x.ready_on(1)) << x.state().why;
  other.destroy();
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  model_most_cqes(1 << 20);
}

/// A QP that only receives or only sends, or neither: soft-RoCE has no room in a queue of no depth for what a cut posts behind all others.
TEST(Depthless, QueuesChangeTheirPath) {
  for (const bool sessions : {false, true}) {
    for (const int link : {0, 1, 2}) model_mend(link);
    const Library a('a', "exact", "cached", 5, 3000), b('b', "exact", "cached", 5, 3000);
    ibv_qp_cap sends = Speaker::kCap, neither = sends;
    sends.max_recv_wr = neither.max_recv_wr = neither.max_send_wr = 0;
    const Speaker x(a, nullptr, nullptr, nullptr, sessions, sends), y(b, nullptr, nullptr, nullptr, sessions, neither);
    x.connect(y), y.connect(x);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
    Writing writing(x);
    const auto say = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
    say("migr_link_down");
    ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why << "; " << y.state().why;
    ASSERT_TRUE(writing.post());
    ASSERT_TRUE(wait_for([&] { return writing.completed(); }));
    say("migr_link_up");
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
    ASSERT_TRUE(writing.post());
    ASSERT_TRUE(wait_for([&] { return writing.completed(); }));
  }
}

/// Of a CQ that is armed for those only.
TEST(Solicited, CompletionsOnABackupLinkWakeWhoWaitsForThem) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ibv_comp_channel* const channel = a.verb<ibv_comp_channel*(ibv_context*)>("ibv_create_comp_channel")(a.context);
  const Speaker x(a, nullptr, a.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(a.context, 256, nullptr, channel, 0)), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  const auto is_there = [](const Speaker& s) { return s.state().link == 1 && s.state().phase == MIGR_LINKS_VQP_MAKING; };
  ASSERT_TRUE(wait_for([&] { return is_there(x) && is_there(y); })) << x.state().why << "; " << y.state().why;
  const auto message = [&](bool solicited) {
    ibv_recv_wr receive{}, *bad_receive;
    ASSERT_EQ(ibv_post_recv(x.qp, &receive, &bad_receive), 0);
    ibv_send_wr send{}, *bad;
    send.opcode = IBV_WR_SEND;
    send.send_flags = solicited ? IBV_SEND_SOLICITED : 0;
    ASSERT_EQ(ibv_post_send(y.qp, &send, &bad), 0);
  };
  const auto comes = [&] {
    ibv_wc wc{};
    return wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; }) && wc.status == IBV_WC_SUCCESS;
  };
  const auto woken = [&](int ms) {
    pollfd p{.fd = channel->fd, .events = POLLIN, .revents = 0};
    return poll(&p, 1, ms) == 1;
  };
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(ibv_req_notify_cq(x.cq, 1), 0);
    message(false);
    ASSERT_TRUE(comes());
    ASSERT_FALSE(woken(20));
    message(true);
    ASSERT_TRUE(woken(5000)) << "message " << i;
    ASSERT_TRUE(comes());
    ibv_cq* cq;
    void* context;
    ASSERT_EQ(a.verb<int(ibv_comp_channel*, ibv_cq**, void**)>("ibv_get_cq_event")(channel, &cq, &context), 0);
    EXPECT_EQ(cq, x.cq);
    a.verb<void(ibv_cq*, unsigned)>("ibv_ack_cq_events")(cq, 1);
  }
}

/// Who has an SRQ waits for this event before the QP is destroyed. What is said of paths that were cut is not it.
TEST(LastWqe, IsToldOfAQpOnABackupLink) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_async_events();
  const Library a('a', "exact", "cached", 5, 3000), b('b', "exact", "cached", 5, 3000);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  ibv_srq_init_attr of_srq{};
  of_srq.attr.max_wr = of_srq.attr.max_sge = 1;
  ibv_srq* const srq = a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq);
  const Speaker x(a, pd, nullptr, srq), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
  const auto say = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  for (int i = 0; i < 2; ++i) {
    if (i) say("migr_link_up");
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
    say("migr_link_down");
    ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why << "; " << y.state().why;
  }
  auto heard = std::async(std::launch::async, [&] {
    ibv_async_event event{};
    EXPECT_EQ(a.verb<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(a.context, &event), 0);
    return event;
  });
  EXPECT_EQ(heard.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout) << "of a path that was cut";
  ASSERT_TRUE(wait_for([] { return store_all_stand(1); }));
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;  // for which there is no receive
  ASSERT_EQ(ibv_post_send(x.qp, &wr, &bad), 0);
  constexpr unsigned kNone = 1;  // receives of its own
  EXPECT_TRUE(wait_for([] { return model_break_paths(1, 0, kNone) != 0; }));
  EXPECT_EQ(heard.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout) << "of a path that has failed on the last link, and is made anew";
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(x.modify(to, IBV_QP_STATE), 0);
  if (heard.wait_for(std::chrono::seconds(10)) != std::future_status::ready) {
    fprintf(stderr, "nobody is told of the last receive\n");
    abort();  // the thread would wait for ever
  }
  ibv_async_event event = heard.get();
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event.element.qp, x.qp);
  auto destroyed = std::async(std::launch::async, [&] { return a.verb<int(ibv_qp*)>("ibv_destroy_qp")(x.qp); });
  EXPECT_EQ(destroyed.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << "the event is not acknowledged";
  a.verb<void(ibv_async_event*)>("ibv_ack_async_event")(&event);
  EXPECT_EQ(destroyed.get(), 0);
  EXPECT_EQ(a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq), 0);
  EXPECT_EQ(model_unbalanced(), 0u);
}

/// Who polls a CQ that it cannot use finds nothing.
TEST(Forked, ChildMayPollWhatWasOnABackupLink) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  const Speaker x(a), y(b);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why << "; " << y.state().why;
  ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why << "; " << y.state().why;
  const pid_t child = fork();
  if (!child) {
    alarm(20);
    ibv_wc wc{};
    _exit(ibv_poll_cq(x.cq, 1, &wc));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

/// The QPs of an SRQ have partners of which one leaves the link, and comes back. Both say as much as they like meanwhile.
TEST(Shared, AnSrqServesTwoLinksAtATime) {
  for (const int link : {0, 1, 2}) model_mend(link);
  model_async_events();  // of a QP with an SRQ that is in ERR
  const Library a('a', "exact", "cached", 5, 3000), b('b', "exact", "cached", 5, 3000), c('b', "exact", "cached", 5, 3000);
  constexpr std::uint32_t kReceives = 6, kMessages = 300, kBytes = 2100;
  ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  ibv_srq_init_attr of_srq{};
  of_srq.attr.max_wr = kReceives;
  of_srq.attr.max_sge = 1;
  ibv_srq* const srq = a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq);
  const Speaker one(a, pd, nullptr, srq), two(a, pd, one.cq, srq), y(b), z(c);
  std::vector<std::uint8_t> in(kReceives * kBytes), out(kBytes);
  const auto reg = [&](const Library& lib, ibv_pd* of, std::vector<std::uint8_t>& v) { return lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of, v.data(), v.size(), IBV_ACCESS_LOCAL_WRITE); };
  ibv_mr* const to = reg(a, pd, in);
  ibv_mr* const from[] = {reg(b, y.pd, out), reg(c, z.pd, out)};
  const auto post = [&](std::uint64_t id) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&in[id * kBytes]), kBytes, to->lkey};
    ibv_recv_wr wr{.wr_id = id, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    ASSERT_EQ(ibv_post_srq_recv(srq, &wr, &bad), 0);
  };
  for (std::uint64_t id = 0; id < kReceives; ++id) post(id);
  one.connect(y), y.connect(one);
  two.connect(z), z.connect(two);
  const Speaker* const speakers[] = {&y, &z};
  std::uint32_t posted[2]{}, sent[2]{}, got[2]{};
  std::set<std::uint64_t> at_device;
  for (std::uint64_t id = 0; id < kReceives; ++id) at_device.insert(id);
  const auto say = [&](int who, std::uint32_t until) {
    for (; posted[who] < until && posted[who] - sent[who] < kDepth; ++posted[who]) {
      ibv_sge sge{reinterpret_cast<std::uint64_t>(out.data()), kBytes, from[who]->lkey};
      ibv_send_wr wr{}, *bad;
      wr.opcode = IBV_WR_SEND_WITH_IMM;
      wr.imm_data = posted[who];
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.sg_list = &sge;
      wr.num_sge = posted[who] % 3 ? 1 : 0;
      ASSERT_EQ(ibv_post_send(speakers[who]->qp, &wr, &bad), 0);
    }
    ibv_wc wc;
    while (ibv_poll_cq(speakers[who]->cq, 1, &wc) == 1) {
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      ++sent[who];
    }
  };
  bool posts_again = true, waits = false;
  std::vector<std::uint64_t> held;
  std::atomic<unsigned> reached{0};
  const auto get_event = [&] {
    ibv_async_event event;
    if (a.verb<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(a.context, &event)) return false;
    EXPECT_EQ(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
    EXPECT_EQ(event.element.srq, srq);
    a.verb<void(ibv_async_event*)>("ibv_ack_async_event")(&event);
    ++reached;
    return true;
  };
  const auto hear = [&] {
    while (!waits && get_event()) {}
    ibv_wc wc;
    while (ibv_poll_cq(one.cq, 1, &wc) == 1) {
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << "receive " << wc.wr_id;
      const int who = wc.qp_num == one.qp->qp_num ? 0 : 1;
      ASSERT_EQ(wc.imm_data, got[who]++) << "partner " << who;
      ASSERT_EQ(at_device.erase(wc.wr_id), 1u) << "receive " << wc.wr_id << " was not posted";
      if (posts_again) post(wc.wr_id), at_device.insert(wc.wr_id);
      else held.push_back(wc.wr_id);
    }
  };
  std::uint32_t due[2]{};
  const auto talk = [&](std::uint32_t first, std::uint32_t second) {
    due[0] += first, due[1] += second;
    return wait_for([&] {
      say(0, due[0]), say(1, due[1]), hear();
      return testing::Test::HasFailure() || (got[0] == due[0] && got[1] == due[1] && sent[0] == due[0] && sent[1] == due[1]);
    });
  };
  constexpr std::uint32_t kLimit = 3;
  const auto arm = [&] {
    ibv_srq_attr attr{};
    attr.srq_limit = kLimit;
    ASSERT_EQ(a.verb<int(ibv_srq*, ibv_srq_attr*, int)>("ibv_modify_srq")(srq, &attr, IBV_SRQ_LIMIT), 0);
  };
  const auto quiet = [&](unsigned events) {
    for (int i = 0; i < 15; ++i) hear(), std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return reached == events;
  };
  /// Of the armed SRQ's receives two are used, and two more.
  const auto reach_limit = [&](const char* where, bool waiting) {
    ASSERT_TRUE(quiet(0)) << where << ": an event with all receives posted";
    ibv_srq_attr attr{};
    ASSERT_EQ(a.verb<int(ibv_srq*, ibv_srq_attr*)>("ibv_query_srq")(srq, &attr), 0);
    ASSERT_EQ(attr.srq_limit, kLimit) << where;
    std::thread reader;
    if (waiting) {
      ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, 0), 0);
      waits = true;
      reader = std::thread([&] { EXPECT_TRUE(get_event()); });
    }
    posts_again = false;
    EXPECT_TRUE(talk(1, 1));
    EXPECT_TRUE(quiet(0)) << where << ": an event with more receives than the limit";
    EXPECT_TRUE(talk(1, 1));
    EXPECT_TRUE(wait_for([&] { return hear(), reached > 0; })) << where << ": no event";
    if (reached == 0) abort();  // the thread would wait for ever
    if (waiting) reader.join();
    waits = false;
    ASSERT_EQ(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
    posts_again = true;
    for (const std::uint64_t id : held) post(id), at_device.insert(id);
    held.clear();
    ASSERT_TRUE(quiet(1)) << where << ": it is armed no more";
    ASSERT_EQ(a.verb<int(ibv_srq*, ibv_srq_attr*)>("ibv_query_srq")(srq, &attr), 0);
    ASSERT_EQ(attr.srq_limit, 0u) << where;
    reached = 0;
  };
  ASSERT_TRUE(wait_for([&] { return one.ready_on(0) && two.ready_on(0) && y.ready_on(0) && z.ready_on(0); })) << two.state().why;
  for (int round = 0; round < 4; ++round) {
    ASSERT_TRUE(talk(1, 1));
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_down")("b0", 1), 0);
    if (round == 1) {             // once: a message that is cut in the middle keeps its receive from all others
      ASSERT_TRUE(talk(20, 20));  // else all receives are on the link that is not left when nobody posts any more
    }
    ASSERT_TRUE(wait_for([&] { return two.state().link == 1 && z.state().link == 1; })) << two.state().why;
    ASSERT_TRUE(talk(0, 1)) << "no receive has come to the other link";
    ASSERT_TRUE(talk(kMessages, kMessages)) << got[0] << " and " << got[1] << " have come";
    ASSERT_TRUE(talk(kMessages, 0) && talk(0, kMessages)) << got[0] << " and " << got[1] << " have come, one after the other";
    ASSERT_TRUE(one.ready_on(0)) << "the other one: phase " << one.state().phase << " on link " << one.state().link << ", " << one.state().why;
    arm();
    reach_limit("on two links", round % 2);
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_up")("b0", 1), 0);
    ASSERT_TRUE(talk(kMessages, kMessages));
    ASSERT_TRUE(wait_for([&] { return two.ready_on(0) && z.ready_on(0); })) << two.state().why;
    arm();
    reach_limit("back on one", round % 2);
    arm();
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_down")("b0", 1), 0);
    ASSERT_TRUE(wait_for([&] { return two.state().link == 1 && z.state().link == 1; })) << two.state().why;
    reach_limit("armed before one left", round % 2);
    arm();
    ASSERT_EQ(c.verb<int(const char*, std::uint32_t)>("migr_link_up")("b0", 1), 0);
    ASSERT_TRUE(wait_for([&] { return two.ready_on(0) && z.ready_on(0); })) << two.state().why;
    reach_limit("armed before it came back", round % 2);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
  for (const Speaker* s : {&one, &two, &y, &z}) s->destroy();
  EXPECT_EQ(a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq), 0);
}

/// While ibv_destroy_cq() is in the driver the SRQ that it had receives of is looked after, for another CQ.
TEST(Shared, ReceivesAreNotLookedForInACqThatIsBeingDestroyed) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 3000), b('b', "exact", "cached", 0, 3000);
  ibv_pd* const pd = a.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(a.context);
  ibv_srq_init_attr of_srq{};
  of_srq.attr.max_wr = of_srq.attr.max_sge = 1;
  ibv_srq* const srq = a.verb<ibv_srq*(ibv_pd*, ibv_srq_init_attr*)>("ibv_create_srq")(pd, &of_srq);
  const auto destroy_cq = a.verb<int(ibv_cq*)>("ibv_destroy_cq");
  const Speaker one(a, pd, nullptr, srq), y(b), z(b);
  one.connect(y), y.connect(one);
  ASSERT_TRUE(wait_for([&] { return one.ready_on(0) && y.ready_on(0); })) << one.state().why;
  one.destroy();
  model_hold_destroyed_cqs(true);
  auto destroyed = std::async(std::launch::async, [&] { return destroy_cq(one.cq); });
  ASSERT_TRUE(wait_for([] { return model_destroyed_cqs_waiting() == 1; }));
  const Speaker two(a, pd, nullptr, srq);
  two.connect(z), z.connect(two);
  EXPECT_TRUE(wait_for([&] { return two.ready_on(0) && z.ready_on(0); })) << two.state().why;
  model_hold_destroyed_cqs(false);
  EXPECT_EQ(destroyed.get(), 0);
  for (const Speaker* s : {&two, &y, &z}) s->destroy();
  EXPECT_EQ(a.verb<int(ibv_srq*)>("ibv_destroy_srq")(srq), 0);
}

/// The NIC that has given up is not the one that executes it then.
TEST(Relayed, WhatIsStillOnItsWayWhenItIsGivenUpIsExecutedOnce) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
  model_delay_atomic();
  ASSERT_EQ(post_add(x, found, *here, sum, *there, 7), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.wr_id, 7u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(found, 0u);
  EXPECT_EQ(sum, 1u) << "how often it was executed";
}

/// The host that executes it has no processor for what its NICs send to themselves.
TEST(Relayed, WhatAStarvedHostExecutesLateIsWaitedFor) {
  constexpr unsigned kNever = 1000, kLate = 5;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
  const auto completes = [&](std::uint64_t before) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << before;
    EXPECT_EQ(found, before);
    EXPECT_EQ(sum, before + 1) << "how often it was executed";
  };
  model_starve_own(kLate, true);
  ASSERT_EQ(post_add(x, found, *here, sum, *there), 0);
  completes(0);
  // The last NIC has given up, too, and it was not executed.
  model_starve_own(kNever, false);
  ASSERT_EQ(post_add(x, found, *here, sum, *there), 0);
  EXPECT_TRUE(wait_for([] { return model_own_given_up() >= 3; })) << model_own_given_up();
  model_starve_own(0, false);
  completes(1);
}

/// Of none of the devices there is a QP to be had for a while. Those behind it wait in their order.
TEST(Relayed, WhatNoDeviceCanExecuteForAMomentIsTriedAgain) {
  constexpr unsigned kTimes = 4, kAdds = 3;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found[kAdds] = {7, 7, 7};
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
  for (const int link : {0, 1}) model_refuse_qps(link, 1, kTimes);
  for (unsigned i = 0; i < kAdds; ++i) ASSERT_EQ(post_add(x, found[i], *here, sum, *there, i), 0);
  for (unsigned i = 0; i < kAdds; ++i) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(found[i], i);
  }
  EXPECT_EQ(sum, kAdds) << "how often they were executed";
}

TEST(Relayed, WhatNoDeviceCanExecuteEndsAfterItsLimitAndIsNotExecutedLater) {
  constexpr unsigned kLimitMs = 500;
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kLimitMs, true), b('b', "exact", "cached", 0, 30'000, kLimitMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x.state().why;
  for (const int link : {0, 1}) model_refuse_qps(link, 1, 1u << 20);
  const auto begun = Clock::now();
  ASSERT_EQ(post_add(x, found, *here, sum, *there), 0);
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_GE(Clock::now() - begun, std::chrono::milliseconds(kLimitMs));
  EXPECT_TRUE(wait_for([&] { return !y.ready_on(0); })) << "it has not heard of it";
  for (const int link : {0, 1}) model_refuse_qps(link, 1, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * kLimitMs));
  EXPECT_EQ(sum, 0u);
}

/// The first of two that the other end does not take ends the connection, and the second one is in no queue of a device that could flush it.
/// Nothing else completes, while a thread polls all the time.
TEST(Relayed, WhatTheDeviceDoesNotFlushIsFoundByWhoPolls) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  for (unsigned i = 0; i < 5; ++i) {
    const Speaker x(a), y(b);
    std::uint64_t words[2] = {}, found = 7;
    const ibv_mr *const there = register_words(y, words, sizeof words), *const here = register_words(x, &found, sizeof found);
    x.connect(y), y.connect(x);
    ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
    ASSERT_EQ(x.state().atomics, MIGR_LINKS_RELAYED);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&found), sizeof found, here->lkey};
    ibv_send_wr wrs[2]{}, *bad;
    for (ibv_send_wr& wr : wrs) {
      wr.wr_id = static_cast<std::uint64_t>(&wr - wrs) + 1;
      wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(words) + sizeof words[0] / 2, .compare_add = 1, .swap = 0, .rkey = there->rkey};
    }
    wrs[0].next = &wrs[1];
    ASSERT_EQ(ibv_post_send(x.qp, wrs, &bad), 0);
    std::vector<ibv_wc> got;
    ibv_wc wc{};
    for (const auto until = Clock::now() + std::chrono::seconds(20); got.size() < 2 && Clock::now() < until;)
      if (ibv_poll_cq(x.cq, 1, &wc) == 1) got.push_back(wc);
    ASSERT_EQ(got.size(), 2u) << x.state().why;
    EXPECT_TRUE(got[0].wr_id == 1 && got[0].status == IBV_WC_REM_INV_REQ_ERR) << got[0].status;
    EXPECT_TRUE(got[1].wr_id == 2 && got[1].status == IBV_WC_WR_FLUSH_ERR) << got[1].status;
  }
}

/// It was asked for before its vQP went on its way to the other link, where the other end is held up.
TEST(Relayed, WhatIsAnsweredInADrainIsWaitedForNoLonger) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const std::size_t before = store_processes();
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true);
  ASSERT_TRUE(wait_for([&] { return store_processes() == before + 1; }));
  const StoreProcess process = store_process_of(0);
  const Library b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::uint64_t sum = 0, found = 7;
  const auto link = [&](const char* what) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)("a0", 1), 0); };
  const ibv_mr *const there = register_words(y, &sum, sizeof sum), *const here = register_words(x, &found, sizeof found);
  x.connect(y), y.connect(x);
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  link("migr_link_down");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  link("migr_link_up");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1) && store_all_stand(0); })) << x.state().why;
  ibv_send_wr send{}, *bad;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(y.qp, &send, &bad), 0);  // finds no receive, and so is not drained before
  std::optional<StandsStill> still(std::in_place, b);
  ASSERT_EQ(post_add(x, found, *here, sum, *there, 7), 0);
  store_prefer("a0");
  ASSERT_TRUE(wait_for([&] {
    link("migr_link_up");  // so that it looks, and tells
    return x.state().phase == MIGR_LINKS_VQP_SWITCHING;
  })) << x.state().why;
  still.reset();
  ibv_wc wc{};
  ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << x.state().why;
  EXPECT_EQ(wc.wr_id, 7u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(found, 0u);
  ibv_recv_wr receive{}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(x.qp, &receive, &bad_receive), 0);
  EXPECT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0); })) << x.state().why;
  EXPECT_TRUE(wait_for([&] {
    ibv_poll_cq(x.cq, 1, &wc);
    return process.markers() == 0;
  })) << process.markers();
  store_prefer(nullptr);
}

/// The other end does not answer, and the first one is on its way to another link.
TEST(Relayed, WhatWaitsTakesRoomOfWhatIsKept) {
  for (const int link : {0, 1, 2}) model_mend(link);
  const Library a('a', "exact", "cached", 0, 30'000, kSwitchMs, true), b('b', "exact", "cached", 0, 30'000, kSwitchMs, true);
  const Speaker x(a), y(b);
  std::vector<std::uint64_t> words(2);
  const auto reg = [&](const Speaker& of, std::size_t i) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, &words[i], sizeof words[i], IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  };
  const ibv_mr *const there = reg(y, 0), *const here = reg(x, 1);
  x.connect(y), y.connect(x);
  const auto link = [&](const char* what, const char* device) { ASSERT_EQ(a.verb<int(const char*, std::uint32_t)>(what)(device, 1), 0); };
  ASSERT_TRUE(wait_for([&] { return x.ready_on(0) && y.ready_on(0) && store_all_stand(1); })) << x.state().why;
  link("migr_link_down", "a0");
  ASSERT_TRUE(wait_for([&] { return x.state().link == 1 && y.state().link == 1; })) << x.state().why;
  link("migr_link_up", "a0");
  ASSERT_TRUE(wait_for([&] { return x.ready_on(1) && y.ready_on(1) && store_all_stand(0); })) << x.state().why;
  unsigned posted = 0;
  const auto post = [&] {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(&words[1]), sizeof words[1], here->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = posted ? IBV_WR_RDMA_WRITE : IBV_WR_ATOMIC_FETCH_AND_ADD;
    wr.wr_id = posted;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (posted) wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(&words[0]), .rkey = there->rkey};
    else wr.wr.atomic = {.remote_addr = reinterpret_cast<std::uint64_t>(&words[0]), .compare_add = 1, .swap = 0, .rkey = there->rkey};
    const int err = ibv_post_send(x.qp, &wr, &bad);
    posted += !err;
    return err;
  };
  std::optional<StandsStill> still(std::in_place, b);
  for (unsigned i = 0; i < kDepth / 2; ++i) EXPECT_EQ(post(), 0);
  link("migr_link_down", "a1");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has left it, and says so to nobody now
  while (posted < 4 * kDepth && !post()) {}
  EXPECT_EQ(posted, kDepth) << "more than the QP was asked for";
  still.reset();
  for (unsigned i = 0; i < posted; ++i) {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x.cq, 1, &wc) == 1; })) << i << " does not complete: " << x.state().why;
    ASSERT_EQ(wc.wr_id, i);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << i;
  }
  link("migr_link_up", "a1");
}

/// A thread that has passed the check of a post loses its processor, and posts when the path is being left, or was.
class LatePost : public testing::Test {
 public:
  explicit LatePost(const char* paths = "cached", unsigned return_ms = 0) : a_('a', "exact", paths, return_ms, 30'000), b_('b', "exact", paths, return_ms, 30'000) {}
  /// At y.
  int receive(std::uint64_t wr_id = kReceive) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(in_.data()), kBytes, to_->lkey};
    ibv_recv_wr wr{.wr_id = wr_id, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(y_.qp, &wr, &bad);
  }

 protected:
  static constexpr std::uint32_t kBytes = 2100, kSlots = 80, kReceive = 500;  // more than two packets; WRITEs of a test; a wr_id

  void SetUp() override {
    for (const int link : {0, 1, 2}) model_mend(link);
    model_forget_writes();
    x_.connect(y_), y_.connect(x_);
    ASSERT_TRUE(wait_for([&] { return x_.ready_on(0) && y_.ready_on(0) && store_all_stand(0) && store_all_stand(1); })) << x_.state().why;
  }
  void TearDown() override { a_.verb<int(const char*, std::uint32_t)>("migr_link_up")("a0", 1); }  // its channels are waited for by the next
  ibv_mr* reg(const Speaker& of, std::vector<std::uint8_t>& memory) {
    return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  /// From x to y. A SEND waits for a receive, and a WRITE goes to the slot of its number.
  int post(std::uint32_t i, ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE, std::uint32_t bytes = kBytes) const {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(out_.data()), bytes, from_->lkey};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = i;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (opcode == IBV_WR_RDMA_WRITE) wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uint64_t>(slot(i)), .rkey = to_->rkey};
    return ibv_post_send(x_.qp, &wr, &bad);
  }
  const std::uint8_t* slot(std::uint32_t i) const { return &in_[i * std::size_t{kBytes}]; }
  template <class Post>
  std::future<int> post_late(Post&& post, bool until_err, void (*before)(void*) = nullptr) {
    auto late = std::async(std::launch::async, [=, this] {
      model_hold_post(until_err, before, this);
      return post();
    });
    EXPECT_TRUE(wait_for(model_holds_post));
    return late;
  }
  std::future<int> post_late(std::uint32_t i, bool until_err, void (*before)(void*) = nullptr) {
    return post_late([=, this] { return post(i); }, until_err, before);
  }
  void let_go(std::future<int>& late) const {
    model_let_post_go();
    EXPECT_EQ(late.get(), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it is found where it was posted to
  }
  /// Of y, which gets a SEND.
  void receives(std::uint64_t wr_id) const {
    ibv_wc wc{};
    ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(y_.cq, 1, &wc) == 1; })) << wr_id;
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(wc.wr_id, wr_id);
  }
  /// From `first` on, a SEND that finds no receive before all others. @return the end
  std::uint32_t fill_queue(std::uint32_t first) const {
    EXPECT_EQ(post(first, IBV_WR_SEND), 0);
    std::uint32_t i = first + 1;
    while (i < first + kSlots && !post(i)) ++i;
    EXPECT_EQ(i, first + kRing);
    return i;
  }
  /// They do next, in order.
  void complete(std::uint32_t first, std::uint32_t end) {
    for (std::uint32_t i = first; i < end; ++i) {
      ibv_wc wc{};
      ASSERT_TRUE(wait_for([&] { return ibv_poll_cq(x_.cq, 1, &wc) == 1; })) << i << " does not complete: " << x_.state().why;
      ASSERT_EQ(wc.wr_id, i);
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << i;
    }
  }
  /// All slots of the queue have been used, by WRITEs of one packet. @return how many
  std::uint32_t use_queue() {
    for (std::uint32_t i = 0; i <= kRing; ++i) {
      EXPECT_EQ(post(i, IBV_WR_RDMA_WRITE, 1), 0);
      complete(i, i + 1);
    }
    return kRing + 1;
  }
  void leave() {
    ASSERT_EQ(a_.verb<int(const char*, std::uint32_t)>("migr_link_down")("a0", 1), 0);
  }

  const Library a_, b_;
  const Speaker x_{a_}, y_{b_};
  std::vector<std::uint8_t> out_ = std::vector<std::uint8_t>(kBytes, 7), in_ = std::vector<std::uint8_t>(kSlots * kBytes);
  const ibv_mr *const from_ = reg(x_, out_), *const to_ = reg(y_, in_);
};

TEST_F(LatePost, ToAnIdleQueueIsNotTakenForExecuted) {
  const std::uint32_t late = use_queue();
  auto posted = post_late(late, true);
  leave();
  EXPECT_EQ(posted.get(), 0);
  complete(late, late + 1);
  EXPECT_EQ(model_writes_at(slot(late)), 1u);
}

TEST_F(LatePost, BehindWhatCompletesMeanwhileIsNotTakenForExecuted) {
  const std::uint32_t send = use_queue(), late = send + 1;
  ASSERT_EQ(post(send, IBV_WR_SEND), 0);  // finds a receive when the path is about to be cut
  auto posted = post_late(late, true, [](void* test) { EXPECT_EQ(static_cast<LatePost*>(test)->receive(), 0); });
  leave();
  EXPECT_EQ(posted.get(), 0);
  complete(send, late + 1);
  EXPECT_EQ(model_writes_at(slot(late)), 1u);
  receives(kReceive);
}

/// All threads are seen outside, but that one.
struct OneIsInside {
  OneIsInside() { store_sleep(1, false); }
  ~OneIsInside() { store_sleep(1, true); }
};

TEST_F(LatePost, ThatFindsNoRoomOnTheNewPathWaits) {
  constexpr std::uint32_t kLate = kSlots - 1;
  const OneIsInside inside;
  auto posted = post_late(kLate, false);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err));
  EXPECT_EQ(post(0), 0);
  complete(0, 1);  // on the new path
  const std::uint32_t end = fill_queue(1);
  let_go(posted);
  EXPECT_EQ(receive(), 0);
  complete(1, end);
  complete(kLate, kLate + 1);
  EXPECT_EQ(model_writes_at(slot(kLate)), 1u);
  EXPECT_EQ(post(end), 0);
  complete(end, end + 1);
}

/// y has room for one receive.
TEST_F(LatePost, OfAReceiveThatFindsNoRoomOnTheNewPathWaits) {
  const OneIsInside inside;
  auto posted = post_late([this] { return receive(kReceive + 1); }, false);
  EXPECT_EQ(receive(), 0);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err));
  EXPECT_EQ(post(0), 0);
  complete(0, 1);
  let_go(posted);
  EXPECT_EQ(receive(kReceive + 2), ENOMEM);
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(post(1 + i, IBV_WR_SEND), 0);
    complete(1 + i, 2 + i);
    receives(kReceive + i);
  }
  EXPECT_EQ(receive(kReceive + 2), 0);
  EXPECT_EQ(post(3, IBV_WR_SEND), 0);
  receives(kReceive + 2);
}

/// Their paths are made when they are needed.
class LatePostToNoPath : public LatePost {
 protected:
  LatePostToNoPath() : LatePost("rebuild") {}
};

TEST_F(LatePostToNoPath, BehindAsMuchAsTheNextOneHasRoomForWaits) {
  constexpr std::uint32_t kLate = kSlots - 1;
  model_refuse_qps(1, 1, 1'000'000);
  const std::uint32_t end = fill_queue(0);
  auto posted = post_late(kLate, false);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it has been cut
  let_go(posted);
  model_refuse_qps(1, 1, 0);
  EXPECT_TRUE(wait_for([this] { return x_.state().link == 1; })) << x_.state().why;
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // nobody waits for room that long
  EXPECT_EQ(receive(), 0);
  complete(0, end);
  complete(kLate, kLate + 1);
  EXPECT_EQ(model_writes_at(slot(kLate)), 1u);
}

/// They are on a path that is not the first one on their default link, and posts go there freely.
class LatePostAfterReturn : public LatePost {
 protected:
  LatePostAfterReturn() : LatePost("cached", 20) {}
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(LatePost::SetUp());
    leave();
    ASSERT_TRUE(wait_for([this] { return x_.state().link == 1 && y_.state().link == 1; })) << x_.state().why;
    TearDown();
    ASSERT_TRUE(wait_for([this] { return x_.ready_on(0) && y_.ready_on(0); })) << x_.state().why;
    std::this_thread::sleep_for(kSeenOutside);
  }
  static constexpr std::chrono::milliseconds kSeenOutside{2500};  // threads are looked for each second
};

TEST_F(LatePostAfterReturn, ThatIsFlushedWhenAllWereSeenOutsideIsHidden) {
  constexpr std::uint32_t kLate = kSlots - 1;
  std::optional<OneIsInside> inside(std::in_place);
  auto posted = post_late(kLate, false);
  leave();
  ASSERT_TRUE(wait_for(model_holds_post_to_err)) << "it does not go there freely";
  EXPECT_EQ(post(0), 0);
  complete(0, 1);  // on the new path
  model_hold_flushes(true);
  let_go(posted);
  complete(kLate, kLate + 1);
  EXPECT_EQ(model_writes_at(slot(kLate)), 1u);
  inside.reset();
  std::this_thread::sleep_for(kSeenOutside);
  const unsigned qps = model_qps();
  model_hold_flushes(false);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ibv_wc wc{};
  ASSERT_EQ(ibv_poll_cq(x_.cq, 1, &wc), 0) << "status " << wc.status << " of " << wc.wr_id;
  EXPECT_TRUE(wait_for([&] { return model_qps() < qps; })) << "its old path is kept";
}

class Failover : public testing::TestWithParam<Kind> {};

/// Of fewer rounds of some kinds none may end as it should for the test to say anything.
int rounds_of(const Kind& kind) {
  const char* const asked = std::getenv("FAILOVER_ROUNDS");
  if (!asked || kind.forgets) return kind.rounds;
  const bool needs_all = kind.storms() || kind.story == Story::kGone;
  return needs_all ? std::max(std::atoi(asked), kind.rounds) : std::atoi(asked);
}

/// What a library is told by its environment as long as a test runs.
void environment(const char* name, bool there) { there ? setenv(name, "1", 1) : unsetenv(name); }

TEST_P(Failover, EachOnceInOrderWhereverTheLinkIsCut) {
  const Kind kind = GetParam();
  const bool gone = kind.story == Story::kGone, relays = kind.relays && !kind.halfway;
  environment("FAILOVER_FORGETS", kind.forgets);
  environment("FAILOVER_LATE", kind.late);
  constexpr unsigned kSoonMs = 400;  // longer than a busy processor keeps a thread waiting
  const unsigned return_ms = kind.returns ? 5 : kind.storms() ? 50 : 0, adrift_ms = kind.story == Story::kMarooned ? 3000 : 30'000;
  const std::string policy = kind.exact ? "exact" : "resend";
  const Library a('a', gone ? "resend" : policy, kind.mixed ? "rebuild" : kind.paths, return_ms, adrift_ms, gone ? kSoonMs : kSwitchMs, kind.relays, kind.third);
  const Library b('b', policy, kind.paths, return_ms, adrift_ms, kSwitchMs, relays, kind.third);
  const int rounds = rounds_of(kind);
  const std::uint32_t first = std::getenv("FAILOVER_SEED") ? static_cast<std::uint32_t>(std::atoi(std::getenv("FAILOVER_SEED"))) : std::random_device()() % 1000000;
  printf("seeds from %u\n", first);
  unsigned twice = 0, whole = 0;
  for (int i = 0; i < rounds; ++i) {
    std::mt19937 random(first + static_cast<std::uint32_t>(i));
    Options o{.seed = first + static_cast<std::uint32_t>(i), .answers_only = random() % 2 == 0, .separate_cqs = random() % 2 == 0, .events = random() % 3 == 0,
                    .both_ways = random() % 2 == 0 || gone, .sessions = random() % 3 == 0 || gone, .extended = false, .swaps = kind.exact && !kind.relays && (random() % 2 == 0 || gone) && !kind.marks, .no_route = random() % 4 == 0, .churns = random() % 4 == 0, .fresh = random() % 3 == 0, .relays = relays, .cut_after = static_cast<unsigned>(random() % 400),
                    .cuts = random() % 2 ? 1 : 2 + static_cast<unsigned>(random() % 4), .may_break = kind.storms() || gone || kind.forgets || kind.story == Story::kMarooned, .outlives = gone};
    if (kind.late) o.fresh = true, o.sessions = false;
    o.greedy = !o.sessions && random() % 3 == 0;
    o.extended = random() % 3 == 0;
    o.pool = kind.pools();
    o.third = kind.third;
    o.shared = kind.shared;
    o.marks = kind.marks;
    o.lingers = kind.lingers;
    o.scarce = kind.scarce;
    o.company = (kind.shared && random() % 4 != 0) || (kind.pools() && !o.sessions && random() % 2 == 0);
    o.odd = o.company && !kind.shared && random() % 2 == 0;
    const Outcome out = round_of(a, b, o, kind);
    if (kind.forgets && (out.error.starts_with("atomic ") || out.error.starts_with("CAS "))) return;  // it is seen
    if (kind.forgets && out.broke) continue;  // who has forgotten an answer may never give it
    if (kind.story == Story::kRefused) {
      ASSERT_EQ(out.error, "") << o.seed;
      continue;
    }
    twice += out.most_executions > 1;
    whole += !out.broke;
    ASSERT_EQ(out.error, "") << "FAILOVER_SEED=" << o.seed << (o.answers_only ? " answers only" : "") << (o.separate_cqs ? " two CQs" : "") << (o.events ? " events" : "")
                             << (o.both_ways ? " both ways" : "") << (o.sessions ? " ibv_wr_*" : "") << (o.extended ? " ibv_cq_ex" : "") << (o.swaps ? " CAS" : "") << (o.no_route ? " no route" : "") << (o.churns ? " churn" : "") << (o.fresh ? " fresh" : "") << (o.greedy ? " greedy" : "") << (o.odd ? " odd company" : o.company ? " company" : "") << " cut after " << o.cut_after << ", " << o.cuts << " cuts";
    if (kind.exact) {
      ASSERT_LE(out.most_executions, 1u) << "a WRITE was executed twice; FAILOVER_SEED=" << o.seed;
    }
  }
  ASSERT_FALSE(kind.forgets) << "this test would not see that an atomic was executed twice";
  if (kind.story == Story::kRefused) return;
  migr_links_switch totals;
  store_totals(&totals);
  printf("%u failures of a link, %u changes of a path at both ends, %u broken, %u replayed, %u executed already; %u of %d rounds executed a WRITE twice; %.1f ms a change\n", failures, totals.vqps, totals.broken, totals.replayed,
         totals.executed, twice, rounds, totals.vqps ? static_cast<double>(totals.resume_ns) / totals.vqps / 1e6 : 0);
  printf("%u of %d connections outlived it\n", whole, rounds);
  if (kind.story == Story::kMarooned) {
    EXPECT_EQ(whole, 0u);
  } else if (gone) {
    EXPECT_LT(whole, static_cast<unsigned>(rounds));
  } else if (kind.storms()) {
    EXPECT_GT(whole, 0u);  // with no link left for long an end gives up
  } else {
    EXPECT_EQ(whole, static_cast<unsigned>(rounds));
  }
  if (kind.story == Story::kCut && rounds >= 6) {
    EXPECT_GT(failures, 0u);
  }
  if (!kind.storms() && rounds >= 6) {
    EXPECT_GT(totals.vqps + totals.broken, 0u);
  }
  const bool many = !(kind.storms() || kind.story == Story::kParked) || totals.vqps >= 48;  // fewer may be cut while nothing is under way
  if (rounds >= 6 && !gone && !kind.halfway && many) {
    EXPECT_GT(totals.replayed, 0u);
  }
  if (kind.story != Story::kTold && !gone && rounds >= 12 && many) {  // a link that works acknowledges nearly all that was executed; few rounds may have none
    EXPECT_GT(totals.executed, 0u);
  }
  if (!kind.exact && rounds >= 50) {
    EXPECT_GT(twice, 0u) << "this test would not see it";
  }
}

INSTANTIATE_TEST_SUITE_P(, Failover, testing::ValuesIn(kKinds), [](const auto& info) { return std::string(info.param.name); });

}  // namespace

int main(int argc, char** argv) { run_and_leave(argc, argv, folder()); }
