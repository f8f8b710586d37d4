// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What stands in for soft-RoCE and for migrd in a library that runs over model.cc.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "../../libmigr/links/directory.h"
#include "../../libmigr/links/links.h"
#include "../../libmigr/links/relay.h"
#include "../../libmigr/links/state.h"
#include "../../libmigr/provider/provider.h"
#include "model.h"
#include "store.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace migr::provider {
namespace {

struct Locked {
  Locked() { model_lock(); }
  ~Locked() { model_unlock(); }
};

template <class T>
const model::Ring<T>& ring(const QpShadow::Ring& r) {
  return *static_cast<const model::Ring<T>*>(r.queue);
}

}  // namespace

std::string unsupported_reason(const Context&) { return ""; }
bool is_supported(const ibv_context& c, const ibv_context_ops&) { return !model_is_foreign(&c); }
int locate_queues(std::span<QpShadow* const> qps) {
  for (QpShadow* q : qps) {
    auto& qp = *reinterpret_cast<model::Qp*>(q->real);
    q->send_ring = {&qp.sends, 1};
    q->receive_ring = {&qp.receives, 1};
  }
  return 0;
}
int locate_queues(KernelLink&, const ibv_qp& qp, QpShadow::Ring& sends, QpShadow::Ring& receives) {
  const auto& model = reinterpret_cast<const model::Qp&>(qp);
  sends = {&model.sends, 1};
  receives = {&model.receives, 1};
  return 0;
}
int queue_parts(QpShadow& q, QueuePart& sends, QueuePart& receives) {
  QpShadow* const one[] = {&q};
  locate_queues(one);
  return queue_parts(q.send_ring, q.receive_ring, sends, receives);
}
int queue_parts(const QpShadow::Ring& s, const QpShadow::Ring& r, QueuePart& sends, QueuePart& receives) {
  Locked locked;
  const auto& sq = ring<model::Send>(s);
  const auto& rq = ring<model::Receive>(r);
  sends = {sq.from, sq.to, sq.mask()};
  receives = {rq.from, rq.to, rq.mask()};
  return 0;
}
int sends_in(QpShadow& q, QueuePart part, std::vector<QueuedSend>& out) { return sends_in(q.send_ring, part, out); }
int sends_in(const QpShadow::Ring& r, QueuePart part, std::vector<QueuedSend>& out) {
  Locked locked;
  for (std::uint32_t i = part.from; i != part.to; i = (i + 1) & part.mask) {
    const model::Send& s = ring<model::Send>(r).slots[i];
    QueuedSend& o = out.emplace_back();
    o.send.wr = s.wr;
    o.send.sges = s.sges;
    o.send.inline_data = s.inline_data;
    o.bytes = s.bytes;
    o.first_psn = s.first_psn;
    if (s.wr.opcode == IBV_WR_RDMA_READ) o.read_psns = s.psns;
    o.begun = s.begun;
    o.given_up = s.given_up;
  }
  return 0;
}
int receives_in(QpShadow& q, QueuePart part, std::vector<KeptReceive>& out) { return receives_in(q.receive_ring, part, out); }
int receives_in(const QpShadow::Ring& r, QueuePart part, std::vector<KeptReceive>& out) {
  Locked locked;
  for (std::uint32_t i = part.from; i != part.to; i = (i + 1) & part.mask) {
    const model::Receive& s = ring<model::Receive>(r).slots[i];
    out.push_back({s.wr_id, s.sges});
  }
  return 0;
}
int sends_in_queue(QpShadow& q, unsigned& count) {
  QueuePart s, r;
  queue_parts(q, s, r);
  return count = s.size(), 0;
}
int outstanding_receives(QpShadow& q, std::vector<KeptReceive>& out) {
  QueuePart s, r;
  queue_parts(q, s, r);
  return receives_in(q, r, out);
}
int outstanding_receives(SrqShadow&, std::vector<KeptReceive>&) { return EOPNOTSUPP; }
int locate_queues(std::span<SrqShadow* const>) { return 0; }
/// Not all that the model refuses: it is found when it is posted, then.
int refusal_of(const QpShadow& q, const ibv_send_wr&) { return q.app.state < IBV_QPS_RTS ? EINVAL : 0; }
bool binds_by_work_request(const Context&) { return true; }
bool ends_binding(const ibv_wc& wc) { return wc.wc_flags & IBV_WC_WITH_INV; }
void become(ibv_ah&, ibv_ah*) {}
void lead_unresolved(ibv_ah&, const ibv_ah_attr&, const ibv_gid&) {}
RingWatch::RingWatch(const Context& c) : context_(c) {}
void RingWatch::moved_to(std::uint64_t&, std::uint64_t&) const { (void)context_; }
void keep_from_children(const ibv_context&, const ibv_context_ops&) {}
int rings(Context&, std::vector<migr_fd_desc>&) { return 0; }
std::vector<migr_text_range> text_ranges() { return {}; }
int raw_reg_mr(ibv_context* c, std::uint32_t, const void*, std::uint64_t, std::uint64_t, int, std::uint32_t& handle, std::uint32_t& lkey, std::uint32_t& rkey) {
  return model_register_again(c, &handle, &lkey, &rkey), 0;  // the model's are still there
}
void prepare_reg_mr(const ibv_context*, std::uint32_t, const void*, std::uint64_t, std::uint64_t, int, migr_ahead_mr&) {}

}  // namespace migr::provider

namespace migr::links {

bool forgets_answers() { return std::getenv("FAILOVER_FORGETS"); }
bool nobody_hears() { return std::getenv("FAILOVER_LATE"); }

namespace {

class StoreDirectory : public Directory {
 public:
  explicit StoreDirectory(const Peer& instance) : instance_(instance) {
    store_process({[](char* why, std::size_t n) { std::snprintf(why, n, "%s", park().c_str()); },
                   [] {
                     std::lock_guard guard(Registry::get().lock);
                     Registry::get().let_changes_go();
                   },
                   [] {
                     std::lock_guard guard(Registry::get().lock);
                     unsigned all = 0;
                     for (CqShadow* c : Registry::get().cqs) {
                       std::lock_guard of(c->lock);
                       all += c->markers;
                     }
                     return all;
                   },
                   [] {
                     std::lock_guard guard(Registry::get().lock);
                     return state()->retired.size();
                   }});
  }
  unsigned life() override { return store_answers(instance_.data()); }
  int fd() const override { return -1; }
  void pushes(std::vector<migr_links_port>& ports, bool&) override {
    migr_links_port port{};
    const unsigned before = std::exchange(pushed_, store_pushes(pushed_, &port));
    if (before != pushed_) ports.push_back(port);
  }
  int links(std::span<const migr_links_link> all) override { return store_links(instance_.data(), all.data(), all.size()), 0; }
  int publish(std::span<const migr_links_vqp> some) override { return store_publish(instance_.data(), some.data(), some.size()), 0; }
  int withdraw(std::span<const migr_links_name> some) override { return store_withdraw(some.data(), some.size()), 0; }
  int lookup(std::span<const migr_links_name> names, std::vector<migr_links_found>& out) override {
    for (const auto& name : names) store_lookup(&name, &out.emplace_back());
    return 0;
  }
  int channel(std::span<const migr_links_channel> own, std::vector<migr_links_channel>& out) override {
    for (const auto& c : own) store_channel(instance_.data(), &c, &out.emplace_back());
    return 0;
  }
  int end_channels(std::span<const migr_links_channel> some) override {
    for (const auto& c : some) store_end_channel(instance_.data(), &c);
    return 0;
  }
  int states(std::span<const migr_links_vqp_state> some) override { return store_states(some.data(), some.size()), 0; }
  int switched(std::span<const migr_links_switch> some) override { return store_switched(some.data(), some.size()), 0; }
  int outside(std::span<const migr_text_range>) override { return store_outside(); }

 private:
  const Peer instance_;
  unsigned pushed_ = 0;
};

}  // namespace

std::unique_ptr<Directory> make_directory(const Config&, const Peer& instance) { return std::make_unique<StoreDirectory>(instance); }

}  // namespace migr::links
