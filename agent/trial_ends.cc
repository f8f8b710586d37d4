// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// PathTrial over libibverbs.
#include <infiniband/verbs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <random>

#include "limits.h"
#include "path_trial.h"
#include "room.h"

namespace migr {
namespace {

constexpr std::uint32_t kPageBytes = 4096;  // the largest MTU
constexpr int kEndsMax = 256, kLookUs = 1'000;
// 8 times 268 ms, on some devices four times as long.
constexpr std::uint8_t kAckTimeout = 16, kRetries = 7, kRnrTimer = 12, kHops = 64;

template <class T, int (*Destroy)(T*)>
struct Destroyed {
  void operator()(T* object) const { (void)Destroy(object); }
};
template <class T, int (*Destroy)(T*)>
using Owned = std::unique_ptr<T, Destroyed<T, Destroy>>;

struct OpenedDevice {
  Owned<ibv_context, ibv_close_device> context;
  Owned<ibv_pd, ibv_dealloc_pd> pd;
  std::map<std::uint32_t, ibv_port_attr> ports;
  std::vector<ibv_gid_entry> gids;
};

// What cannot be opened has no GID.
std::vector<OpenedDevice> open_devices() {
  std::vector<OpenedDevice> out;
  int n = 0;
  ibv_device** list = ibv_get_device_list(&n);
  for (int i = 0; i < n; i++) {
    OpenedDevice d{};
    d.context.reset(ibv_open_device(list[i]));
    if (!d.context) continue;
    ibv_device_attr attr{};
    if (ibv_query_device(d.context.get(), &attr)) continue;
    std::size_t length = 0;
    for (std::uint8_t port = 1; port && port <= attr.phys_port_cnt; port++)
      if (!ibv_query_port(d.context.get(), port, &d.ports[port])) length += static_cast<std::size_t>(std::max(0, d.ports[port].gid_tbl_len));
    d.gids.resize(length);
    const auto found = ibv_query_gid_table(d.context.get(), d.gids.data(), length, 0);
    d.gids.resize(found < 0 ? 0 : static_cast<std::size_t>(found));
    d.pd.reset(ibv_alloc_pd(d.context.get()));
    if (d.pd) out.push_back(std::move(d));
  }
  if (list) ibv_free_device_list(list);
  return out;
}

struct LocalEnd {
  struct {
    alignas(kPageBytes) std::array<std::uint8_t, kPageBytes> arrives, sent;
  } memory{};
  Owned<ibv_mr, ibv_dereg_mr> mr;
  Owned<ibv_cq, ibv_destroy_cq> cq;
  Owned<ibv_qp, ibv_destroy_qp> qp;  // first to go
  std::uint8_t port = 0, gid_index = 0;
  bool over_ethernet = false, writes = false;
  wire::TrialEnd said;

  Status make(const std::vector<OpenedDevice>& devices);
  Status connect(const wire::TrialEnd& to);
  Status write(const wire::TrialEnd& to);
  bool look();
};

Status LocalEnd::make(const std::vector<OpenedDevice>& devices) {
  const OpenedDevice* at = nullptr;
  const ibv_gid_entry* entry = nullptr;
  for (const auto& d : devices)
    for (const auto& g : d.gids)
      if (g.gid_type != IBV_GID_TYPE_ROCE_V1 && !entry && said.gid().size() == sizeof g.gid && !std::memcmp(g.gid.raw, said.gid().data(), sizeof g.gid)) at = &d, entry = &g;
  if (!entry) return Error{ENODEV, "no device that migrd sees has that GID"};
  const auto p = at->ports.find(entry->port_num);
  if (p == at->ports.end() || p->second.state != IBV_PORT_ACTIVE) return Error{ENETDOWN, "its port is not active"};
  port = static_cast<std::uint8_t>(entry->port_num);
  gid_index = static_cast<std::uint8_t>(entry->gid_index);
  over_ethernet = p->second.link_layer == IBV_LINK_LAYER_ETHERNET;
  cq.reset(ibv_create_cq(at->context.get(), 1, nullptr, nullptr, 0));
  mr.reset(ibv_reg_mr(at->pd.get(), &memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  if (!cq || !mr) return sys_error("making a CQ and an MR");
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq.get();
  init.cap.max_send_wr = init.cap.max_send_sge = init.cap.max_recv_wr = init.cap.max_recv_sge = 1;
  init.qp_type = IBV_QPT_RC;
  qp.reset(ibv_create_qp(at->pd.get(), &init));
  if (!qp) return sys_error("making a QP");
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port;
  attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  if (const int e = ibv_modify_qp(qp.get(), &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) return sys_error("its QP to INIT", e);
  said.set_qpn(qp->qp_num);
  said.set_psn(std::random_device()() & 0xffffff);
  said.set_lid(p->second.lid);
  said.set_address(reinterpret_cast<std::uintptr_t>(memory.arrives.data()));
  said.set_rkey(mr->rkey);
  return {};
}

Status LocalEnd::connect(const wire::TrialEnd& to) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = static_cast<ibv_mtu>(said.mtu());
  attr.dest_qp_num = to.qpn();
  attr.rq_psn = to.psn();
  attr.min_rnr_timer = kRnrTimer;
  attr.ah_attr.port_num = port;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.dlid = over_ethernet ? std::uint16_t{0} : static_cast<std::uint16_t>(to.lid());
  attr.ah_attr.grh.sgid_index = gid_index;
  attr.ah_attr.grh.hop_limit = kHops;
  if (to.gid().size() != sizeof attr.ah_attr.grh.dgid) return Error{EINVAL, "a GID has 16 bytes"};
  std::memcpy(attr.ah_attr.grh.dgid.raw, to.gid().data(), sizeof attr.ah_attr.grh.dgid);
  int e = ibv_modify_qp(qp.get(), &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (e) return sys_error("its QP to RTR", e);
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = kAckTimeout;
  attr.retry_cnt = attr.rnr_retry = kRetries;
  attr.sq_psn = said.psn();
  e = ibv_modify_qp(qp.get(), &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  return e ? Status(sys_error("its QP to RTS", e)) : Status();
}

Status LocalEnd::write(const wire::TrialEnd& to) {
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.sent.data()), mtu_bytes(said.mtu()), mr->lkey};
  ibv_send_wr wr{}, *bad = nullptr;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma.remote_addr = to.address();
  wr.wr.rdma.rkey = to.rkey();
  if (const int e = ibv_post_send(qp.get(), &wr, &bad)) return sys_error("posting a WRITE", e);
  writes = true;
  return {};
}

// @return it is known what became of what it has written
bool LocalEnd::look() {
  ibv_wc wc{};
  const int n = writes ? ibv_poll_cq(cq.get(), 1, &wc) : 0;
  if (n < 0) said.set_why_not("its CQ cannot be polled");
  if (n > 0 && wc.status != IBV_WC_SUCCESS) said.set_error(ibv_wc_status_str(wc.status));
  writes = writes && n == 0;
  return !writes;
}

class HostTrial final : public PathTrial {
 public:
  Result<wire::TrialStep> step(const wire::TrialStep& request) override {
    switch (step_++) {
      case 0: return make(request);
      case 1: return connect(request);
      case 2: return write();
      default: return Error{EINVAL, "TryPaths has three steps"};
    }
  }

 private:
  Result<wire::TrialStep> make(const wire::TrialStep& request);
  Result<wire::TrialStep> connect(const wire::TrialStep& request);
  wire::TrialStep write();
  wire::TrialStep answer() const {
    wire::TrialStep out;
    for (const auto& e : ends_) *out.add_ends() = e->said;
    return out;
  }
  // What is wrong with one says nothing of the others.
  static void take(LocalEnd& e, const Status& s) {
    if (!s) e.said.set_why_not(s.error().text);
  }

  int step_ = 0;
  std::vector<OpenedDevice> devices_;
  std::vector<std::unique_ptr<LocalEnd>> ends_;
  wire::TrialStep others_;
};

Result<wire::TrialStep> HostTrial::make(const wire::TrialStep& request) {
  if (request.ends_size() > kEndsMax) return Error{EINVAL, "TryPaths of " + std::to_string(request.ends_size()) + " paths at once"};
  devices_ = open_devices();
  for (const auto& wanted : request.ends()) {
    auto& e = *ends_.emplace_back(std::make_unique<LocalEnd>());
    e.said.set_gid(wanted.gid());
    e.said.set_mtu(wanted.mtu());
    take(e, mtu_bytes(wanted.mtu()) ? e.make(devices_) : Error{EINVAL, "an MTU that does not exist"});
  }
  return answer();
}

Result<wire::TrialStep> HostTrial::connect(const wire::TrialStep& request) {
  if (static_cast<std::size_t>(request.ends_size()) != ends_.size()) return Error{EINVAL, "TryPaths leaves out an end"};
  others_ = request;
  for (std::size_t i = 0; i < ends_.size(); i++)
    if (const auto& to = others_.ends(static_cast<int>(i)); ends_[i]->said.why_not().empty())
      take(*ends_[i], to.why_not().empty() ? ends_[i]->connect(to) : Error{ENOTCONN, "the other end could not be made"});
  return answer();
}

wire::TrialStep HostTrial::write() {
  using Clock = std::chrono::steady_clock;
  for (std::size_t i = 0; i < ends_.size(); i++)
    if (ends_[i]->said.why_not().empty()) take(*ends_[i], ends_[i]->write(others_.ends(static_cast<int>(i))));
  const auto look = [&] {
    bool all = true;
    for (auto& e : ends_) all = e->look() && all;
    return all;
  };
  for (const auto until = Clock::now() + std::chrono::milliseconds(kTrialMs); !look() && Clock::now() < until;) usleep(kLookUs);
  for (auto& e : ends_)
    if (e->writes) e->said.set_error("no answer within " + std::to_string(kTrialMs) + " ms");
  return answer();
}

}  // namespace

std::unique_ptr<PathTrial> trial_of_host() { return std::make_unique<HostTrial>(); }

}  // namespace migr
