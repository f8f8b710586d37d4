// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The parts of migrd that touch the machine, over the modelled host of $MODEL_HOST: the kernel's record, its RDMA device,
// migr.img, the processes of a container, the switch of huge pages of zeros.
#include <rdma/ib_user_ioctl_verbs.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "agent/devices.h"
#include "agent/huge_zero_page.h"
#include "agent/kernel_record.h"
#include "agent/path_trial.h"
#include "agent/record_image.h"
#include "agent/runc.h"
#include "model.h"

namespace migr {
namespace {

std::string host() { return std::getenv("MODEL_HOST"); }

// Every path passes.
struct ModelTrial final : PathTrial {
  wire::TrialStep ends;
  Result<wire::TrialStep> step(const wire::TrialStep& request) override {
    if (!ends.ends_size()) ends = request;
    return ends;
  }
};

}  // namespace

std::unique_ptr<PathTrial> trial_of_host() { return std::make_unique<ModelTrial>(); }

Result<KernelRecord> KernelRecord::open() { return KernelRecord(); }
Result<KernelInfo> KernelRecord::info() {
  const auto reserved = std::distance(std::filesystem::directory_iterator(host() + "/reserved"), {});
  return KernelInfo{MIGR_ABI_VERSION, 1, 1, static_cast<std::uint32_t>(reserved), 1, true};
}

Result<std::vector<ContextRecord>> KernelRecord::contexts(pid_t pid) {
  std::vector<ContextRecord> all;
  for (const auto& p : model::processes(host())) {
    if (pid && p.pid != pid) continue;
    ContextRecord c;
    c.rec.ctx_id = p.ctx;
    c.rec.flags = MIGR_CTX_ATTACHED;
    c.rec.pid = static_cast<__u32>(p.pid);
    std::strcpy(c.rec.comm, "model");
    std::strcpy(c.rec.ibdev, model::kDevice);
    all.push_back(c);
  }
  return all;
}

Status KernelRecord::objects(ContextRecord& c, std::uint32_t) {
  for (const auto& p : model::processes(host())) {
    if (p.pid != static_cast<int>(c.rec.pid)) continue;
    migr_qp_rec q{};
    q.vqpn = p.vqpn;
    q.pqpn = p.pqpn;
    q.qp_type = 2;   // RC
    q.qp_state = 3;  // RTS
    q.path_mtu = 3;
    q.dest_qpn = p.dest_pqpn;
    std::memcpy(q.ah.sgid, model::gid_of(p.gid).data(), sizeof q.ah.sgid);
    std::memcpy(q.ah.dgid, model::gid_of(p.dest_gid).data(), sizeof q.ah.dgid);
    q.ah.gid_type = IB_UVERBS_GID_TYPE_ROCE_V2;
    c.qps.push_back(q);
    return {};
  }
  return Error{ENOENT, "it has ended"};
}
Status KernelRecord::search(ContextRecord& c) { return objects(c, 0); }

Status KernelRecord::reserve_qpn(std::uint32_t v) {
  std::ofstream(host() + "/reserved/" + std::to_string(v)) << "\n";
  return {};
}
Status KernelRecord::release_qpn(std::uint32_t v) {
  unlink((host() + "/reserved/" + std::to_string(v)).c_str());
  return {};
}

std::vector<std::string> device_names() { return {model::kDevice}; }

Result<std::vector<wire::PortGid>> gids_of(const std::string& device) {
  wire::PortGid g;
  g.set_device(device);
  g.set_port(1);
  g.set_roce_v2(true);
  g.set_gid(model::gid_of(model::number_of(host())));
  return std::vector{g};
}
Status each_gid(const std::function<void(wire::PortGid&)>& visit) {
  auto gids = gids_of(model::kDevice);
  for (auto& g : *gids) visit(g);
  return {};
}

Result<std::set<std::uint32_t>> qp_numbers(const std::string&) {
  std::set<std::uint32_t> all;
  for (const auto& p : model::processes(host())) all.insert(p.pqpn);
  return all;
}

Result<std::set<std::uint32_t>> qp_numbers_of(pid_t pid) {
  std::set<std::uint32_t> own;
  for (const auto& p : model::processes(host()))
    if (p.pid == pid) own.insert(p.pqpn);
  return own;
}

Result<Room> room_of(const std::string& device) {
  constexpr std::uint32_t kMany = 1000, kActive = 4, kMtu1024 = 3;
  Room r;
  migr_rst_device& d = r.device;
  std::strcpy(d.ibdev, model::kDevice);
  d.max_mr_size = UINT64_MAX;
  for (auto* most : {&d.max_qp, &d.max_cq, &d.max_mr, &d.max_pd, &d.max_srq, &d.max_mw, &d.max_ah, &d.max_qp_wr, &d.max_sge, &d.max_cqe, &d.max_srq_wr,
                     &d.max_srq_sge, &d.max_qp_rd_atom, &d.max_qp_init_rd_atom})
    *most = kMany;
  d.nr_ports = 1;
  d.ports[0].state = kActive;
  d.ports[0].active_mtu = kMtu1024;
  r.gids = *gids_of(device);
  return r;
}

const char* object_name(std::uint32_t) { return "object"; }
const char* qp_type_name(std::uint32_t) { return "type"; }
const char* qp_state_name(std::uint32_t) { return "state"; }

Status write_record_image(const std::vector<DescribedProcess>& processes, const std::string& dir) {
  if (std::filesystem::exists(host() + "/changes")) return Error{ENOENT, "model: a context is closed meanwhile"};
  for (const auto& p : processes) std::filesystem::copy_file(host() + "/kernel/" + std::to_string(p.pid), dir + "/migr.img");
  return {};
}

std::string thp_folder() { return host() + "/thp"; }

Result<std::vector<pid_t>> Runc::pids(const ContainerState& c) const { return std::vector<pid_t>{c.pid}; }

}  // namespace migr
