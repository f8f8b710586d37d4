// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The parts of migrd that touch the machine, over the modelled host of $MODEL_HOST: the kernel's record, migr.img, the
// processes of a container.
#include <algorithm>
#include <cstring>
#include <filesystem>

#include "agent/kernel_record.h"
#include "agent/record_image.h"
#include "agent/runc.h"
#include "model.h"

namespace migr {
namespace {

std::string host() { return std::getenv("MODEL_HOST"); }

}  // namespace

void KernelRecord::Close::operator()(nl_sock*) const {}
Result<KernelRecord> KernelRecord::open() { return KernelRecord(); }
Result<KernelInfo> KernelRecord::info() { return KernelInfo{MIGR_ABI_VERSION, 1, 1, 0, 1}; }

Result<std::vector<ContextRecord>> KernelRecord::contexts(pid_t pid) {
  std::vector<ContextRecord> all;
  for (const auto& p : model::processes(host())) {
    if (pid && p.pid != pid) continue;
    ContextRecord c;
    c.rec.ctx_id = p.ctx;
    c.rec.flags = MIGR_CTX_ATTACHED;
    c.rec.pid = static_cast<__u32>(p.pid);
    std::strcpy(c.rec.comm, "model");
    all.push_back(c);
  }
  return all;
}

Status KernelRecord::objects(ContextRecord& c) {
  for (const auto& p : model::processes(host())) {
    if (p.pid != static_cast<int>(c.rec.pid)) continue;
    migr_qp_rec q{};
    q.vqpn = p.vqpn;
    q.pqpn = p.pqpn;
    q.qp_type = 2;   // RC
    q.qp_state = 3;  // RTS
    q.dest_qpn = p.dest_pqpn;
    q.ah.sgid[15] = static_cast<__u8>(p.gid);
    q.ah.dgid[15] = static_cast<__u8>(p.dest_gid);
    c.qps.push_back(q);
    return {};
  }
  return Error{ENOENT, "it has ended"};
}

Status KernelRecord::reserve_qpn(std::uint32_t v) {
  std::ofstream(host() + "/reserved/" + std::to_string(v)) << "\n";
  return {};
}
Status KernelRecord::release_qpn(std::uint32_t v) {
  unlink((host() + "/reserved/" + std::to_string(v)).c_str());
  return {};
}

const char* object_name(std::uint32_t) { return "object"; }
const char* qp_type_name(std::uint32_t) { return "type"; }
const char* qp_state_name(std::uint32_t) { return "state"; }

Status write_record_image(const std::vector<DescribedProcess>& processes, const std::string& dir) {
  for (const auto& p : processes) std::filesystem::copy_file(host() + "/kernel/" + std::to_string(p.pid), dir + "/migr.img");
  return {};
}

Result<std::vector<pid_t>> Runc::pids(const ContainerState& c) const { return std::vector<pid_t>{c.pid}; }

}  // namespace migr
