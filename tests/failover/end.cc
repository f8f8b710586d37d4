// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "end.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

#include "migr/migr.h"
#include "model.h"
#include "store.h"

namespace ends {

namespace {

constexpr std::uint32_t kSlot = 5120;  // bytes of a work request at most

std::uint8_t byte_of(std::uint32_t stream, int wr, std::uint32_t at) { return static_cast<std::uint8_t>(stream * 31 + static_cast<std::uint32_t>(wr) * 7 + at * 13 + (at >> 8)); }

constexpr std::uint32_t kWord = 8;
std::uint64_t word_of(int wr) { return 0x100000u + static_cast<std::uint64_t>(wr); }
/// Each third finds another value than it wants.
std::uint64_t compare_of(int wr) { return word_of(wr) + (wr % 3 == 0); }
std::uint64_t swap_of(std::uint32_t stream, int wr) { return static_cast<std::uint64_t>(stream) << 32 | static_cast<std::uint64_t>(wr) | 1u << 31; }

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

}  // namespace

End::End(const Library& library, const Options& options, std::uint32_t out_stream, std::uint32_t in_stream, bool sends)
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

End::~End() {
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

void End::connect(End& to) {
  peer_ = &to;
  if (company_) connect(company_, to, to.company_);
  birth_ = connect(qp_, to, to.qp_);
}

ibv_qp_attr End::connect(ibv_qp* qp, const End& to, const ibv_qp* there) {
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

int End::try_to_connect(const End& to) {
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

void End::make_doomed() {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = lib_.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(lib_.context, 4, nullptr, nullptr, 0);
  init.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  doomed_ = lib_.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd_, &init);
}

void End::connect_doomed(const End& to) {
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

void End::send_by_doomed() {
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_RDMA_WRITE;
  if (ibv_post_send(doomed_, &wr, &bad)) error_ = "post_send";
}

void End::destroy_doomed() {
  ibv_cq* const cq = doomed_->send_cq;
  lib_.verb<int(ibv_qp*)>("ibv_destroy_qp")(doomed_);
  lib_.verb<int(ibv_cq*)>("ibv_destroy_cq")(cq);
}

bool End::protected_now(int link) const {
  migr_links_vqp_state state{};
  if (company_ && (!state_of(state, company_) || state.phase != MIGR_LINKS_VQP_READY)) return false;  // wherever: what carries nothing need not notice
  return state_of(state) && state.phase == MIGR_LINKS_VQP_READY && (link < 0 || state.link == static_cast<unsigned>(link));
}

int End::link() const {
  migr_links_vqp_state state{};
  return state_of(state) ? static_cast<int>(state.link) : -1;
}

bool End::left(unsigned link) const {
  migr_links_vqp_state state{};
  return state_of(state) && state.link != link;
}

bool End::relays_now() const {
  migr_links_vqp_state state{};
  return state_of(state) && state.atomics == MIGR_LINKS_RELAYED;
}

bool End::changed() const {
  migr_links_vqp_state state{};
  return state_of(state) && state.epoch;
}

ibv_qp_state End::state() const {
  ibv_qp_attr a{};
  ibv_qp_init_attr init{};
  lib_.verb<int(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp")(qp_, &a, IBV_QP_STATE, &init);
  return a.qp_state;
}

bool End::gave_up() const {
  migr_links_vqp_state state{};
  return state_of(state) && state.phase == MIGR_LINKS_VQP_BROKEN;
}

std::string End::how() const {
  std::string out = where();
  for (const ibv_qp* qp : {qp_, company_}) {
    migr_links_vqp_state s{};
    if (!qp) continue;
    if (!state_of(s, qp)) return out + ", not known";
    out += (qp == qp_ ? ", phase " : "; its company phase ") + std::to_string(s.phase) + " on link " + std::to_string(s.link) + ", epoch " + std::to_string(s.epoch) + ", " + s.why;
  }
  return out;
}

std::uint32_t End::fresh_key(int i) {
  ibv_mr* const mr = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, area(kIn, i), kSlot, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  fresh_.push_back(mr);
  return mr->rkey;
}

std::string End::try_atomic(std::uint64_t to, std::uint32_t rkey, ibv_wc_status due) {
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

std::string End::try_refused(bool aligned) {
  if (aligned) return try_atomic(reinterpret_cast<std::uint64_t>(peer_->area(kIn, 8)), peer_->fresh_key(8), IBV_WC_REM_ACCESS_ERR);
  return try_atomic(reinterpret_cast<std::uint64_t>(peer_->area(kIn, 8)) + 4, peer_->mr_->rkey, IBV_WC_REM_INV_REQ_ERR);
}

void End::run() {
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

std::string End::check_end() const {
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

std::string End::check() const {
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

unsigned End::most_executions() const {
  unsigned most = 0;
  for (int i = 0; i < kWrs; ++i)
    if (only_writes(in_[i]) || in_[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM) most = std::max(most, model_writes_at(area(kIn, i)));
  return most;
}

bool End::state_of(migr_links_vqp_state& out, const ibv_qp* qp) const {
  migr_links_name name{};
  std::memcpy(name.gid, gid_.raw, 16);
  name.vqpn = qp->qp_num;
  return store_state(&name, &out);
}

std::uint8_t* End::area(Area a, int i) const { return const_cast<std::uint8_t*>(&memory_[(static_cast<std::size_t>(a) * kWrs + static_cast<std::size_t>(i)) * kSlot]); }

std::uint8_t* End::shared(bool adding) const { return const_cast<std::uint8_t*>(&memory_[4u * kWrs * kSlot + (adding ? kWord : 0)]); }

std::uint64_t End::reaches(const Request& r, int i) const { return reinterpret_cast<std::uint64_t>(adds(r) || r.chained ? peer_->shared(adds(r)) : peer_->area(kIn, i)); }

std::uint64_t End::compares(const Request& r, int i) const { return adds(r) ? static_cast<std::uint64_t>(i) + 1 : r.chained ? in_turn_[static_cast<std::size_t>(i)]
                                                                                                                            : compare_of(i); }

std::uint64_t End::swaps_in(const Request& r, int i) const { return r.chained ? in_turn_[static_cast<std::size_t>(i)] + 1 : swap_of(out_id_, i); }

bool End::brings_back(const Request& r) { return r.opcode == IBV_WR_RDMA_READ || is_atomic(r); }

std::string End::where() const {
  return "posted " + std::to_string(posted_) + ", completed " + std::to_string(completed_) + ", received " + std::to_string(received_) + " of stream " + std::to_string(in_id_);
}

ibv_cq* End::make_cq() {
  const int cqes = options_.company ? 256 : (options_.greedy ? kRing : kDepth) + kDepth;  // what it may have posted at a time, and no more
  if (!options_.extended) return lib_.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(lib_.context, cqes, nullptr, channel_, 0);
  ibv_cq_init_attr_ex init{};
  init.cqe = static_cast<std::uint32_t>(cqes);
  init.channel = channel_;
  init.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP;
  return ibv_cq_ex_to_cq(ibv_create_cq_ex(lib_.context, &init));
}

int End::poll(ibv_cq* cq, int entries, ibv_wc* wc) const {
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

void End::post_receive() {
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

void End::dawdle() {
  const int done = completed_;
  if (done != std::exchange(seen_, done)) progress_ = Clock::now();
  if (posted_ == done || Clock::now() - progress_ < std::chrono::milliseconds(4)) return;
  ibv_wr_start(ex_);
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  ibv_wr_abort(ex_);
}

void End::churn() {
  static constexpr std::uint32_t kEvery = 4;
  if (++turns_ % kEvery) return;
  ibv_mr* const mr = lib_.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(pd_, memory_.data(), kSlot, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  if (!mr || lib_.verb<int(ibv_mr*)>("ibv_dereg_mr")(mr)) error_ = "memory that comes and goes";
}

unsigned End::flags_of(const Request& r, int i) const {
  const bool once = options_.marks && (only_writes(r) || r.opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
  const unsigned signalled = r.signalled || i % 4 == 3 ? IBV_SEND_SIGNALED : 0;
  return signalled | (once ? MIGR_SEND_ONCE : 0);
}

void End::post_session() {
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

bool End::post_send() {
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

void End::sent(const ibv_wc& wc) {
  int next = completed_;
  while (next < posted_ && !(out_[next].signalled || next % 4 == 3)) ++next;
  if (next >= posted_ || wc.wr_id != (static_cast<std::uint64_t>(next) | 0x5000)) {
    error_ = "send completion " + std::to_string(wc.wr_id & 0xfff) + " where " + std::to_string(next) + " was due";
    return;
  }
  const ibv_wr_opcode o = out_[next].opcode;
  const ibv_wc_opcode due = adds(out_[next]) ? IBV_WC_FETCH_ADD : swaps(out_[next])                                          ? IBV_WC_COMP_SWAP
                                                              : o == IBV_WR_ATOMIC_WRITE                                     ? IBV_WC_ATOMIC_WRITE
                                                              : o == IBV_WR_RDMA_READ                                        ? IBV_WC_RDMA_READ
                                                              : takes_receive(out_[next]) && o != IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_SEND
                                                                                                                             : IBV_WC_RDMA_WRITE;
  if (wc.opcode != due) error_ = "send completion " + std::to_string(next) + " of opcode " + std::to_string(wc.opcode);
  completed_ = next + 1;
}

void End::received(const ibv_wc& wc) {
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

int End::poll_all() {
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

void End::rest() {
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

}  // namespace ends
