// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "room.h"

#include <fmt/format.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>

#include "directory.h"
#include "file_tree.h"
#include "kernel_record.h"
#include "migr/gid.h"

namespace migr {
namespace {

constexpr std::uint32_t kActive = 4;  // enum ib_port_state

/// Of a QP that names none: any will do.
const std::string kNoGid = std::string(10, '\0') + "\xff\xff" + std::string(4, '\0');

/// Those that need the same are one.
void add_port(wire::Needs& n, const wire::NeededPort& p) {
  const auto same = std::find_if(n.ports().begin(), n.ports().end(), [&](const auto& o) {
    return o.port() == p.port() && o.connected() == p.connected() && o.roce_v2() == p.roce_v2() && o.gid() == p.gid() && o.mtu() == p.mtu();
  });
  if (same == n.ports().end()) *n.add_ports() = p;
}

std::string mb(std::uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MB"; }

}  // namespace

std::string driver_name(std::uint32_t id) {
  switch (id) {
    case RDMA_DRIVER_MLX5: return "mlx5";
    case RDMA_DRIVER_MLX4: return "mlx4";
    case RDMA_DRIVER_BNXT_RE: return "bnxt_re";
    case RDMA_DRIVER_IRDMA: return "irdma";
    case RDMA_DRIVER_RXE: return "rxe";
    case RDMA_DRIVER_SIW: return "siw";
    default: return "number " + std::to_string(id);
  }
}

bool family_supported(std::uint32_t driver_id) { return driver_id == RDMA_DRIVER_RXE || driver_id == RDMA_DRIVER_UNKNOWN; }

std::uint32_t mtu_bytes(std::uint32_t ib_mtu) { return ib_mtu >= 1 && ib_mtu <= 5 ? 128u << ib_mtu : 0; }

bool port_active(std::uint32_t state) { return state == kActive; }

int gid_family(const std::string& gid) {
  return gid.size() == sizeof(migr_ah_attr::sgid) ? migr_gid_family(reinterpret_cast<const std::uint8_t*>(gid.data())) : -1;
}

int gid_common_bits(const std::string& a, const std::string& b) {
  if (a.size() != sizeof(migr_ah_attr::sgid) || b.size() != a.size()) return -1;
  return migr_gid_common_bits(reinterpret_cast<const std::uint8_t*>(a.data()), reinterpret_cast<const std::uint8_t*>(b.data()));
}

int gid_nearness(const std::string& was, const std::string& here) {
  if (was.size() != sizeof(migr_ah_attr::sgid) || here.size() != was.size()) return 0;
  return migr_gid_nearness(reinterpret_cast<const std::uint8_t*>(was.data()), reinterpret_cast<const std::uint8_t*>(here.data()));
}

void add_needs(std::vector<wire::Needs>& needs, const ContextRecord& c, std::span<const migr_fd_desc> described) {
  const std::string device = device_of(c.rec);
  auto found = std::find_if(needs.begin(), needs.end(), [&](const auto& n) { return n.device() == device; });
  if (found == needs.end()) {
    found = needs.emplace(needs.end());
    found->set_device(device);
  }
  wire::Needs& n = *found;
  const auto more = [](std::uint32_t have, std::size_t by) { return have + static_cast<std::uint32_t>(by); };
  n.set_pd(more(n.pd(), c.pds.size()));
  n.set_mr(more(n.mr(), c.mrs.size()));
  n.set_cq(more(n.cq(), c.cqs.size()));
  n.set_qp(more(n.qp(), c.qps.size()));
  n.set_srq(more(n.srq(), c.srqs.size()));
  for (const auto& o : c.others) {
    if (o.type == MIGR_OBJ_MW) n.set_mw(n.mw() + 1);
    if (o.type == MIGR_OBJ_AH) n.set_ah(n.ah() + 1);
  }
  for (const auto& m : c.mrs) n.set_mr_size(std::max<std::uint64_t>(n.mr_size(), m.length));
  for (const auto& q : c.cqs) n.set_cqe(std::max(n.cqe(), q.cqe));
  for (const auto& s : c.srqs) {
    n.set_srq_wr(std::max(n.srq_wr(), s.max_wr));
    n.set_srq_sge(std::max(n.srq_sge(), s.max_sge));
  }
  for (const auto& q : c.qps) {
    n.set_qp_wr(std::max({n.qp_wr(), q.max_send_wr, q.max_recv_wr}));
    n.set_sge(std::max({n.sge(), q.max_send_sge, q.max_recv_sge}));
    n.set_rd_atomic(std::max(n.rd_atomic(), q.max_rd_atomic));
    n.set_dest_rd_atomic(std::max(n.dest_rd_atomic(), q.max_dest_rd_atomic));
    if (q.flags & MIGR_QP_FORMER) continue;
    wire::NeededPort p;
    const std::string gid = bytes_of(q.ah.sgid);
    const bool known = gid.find_first_not_of('\0') != std::string::npos;  // else RoCE v2 of any family, as migr_rst_gid_find() has it
    p.set_port(q.port_num ? q.port_num : 1);
    p.set_connected(connected(q));
    p.set_roce_v2(!known || q.ah.gid_type == IB_UVERBS_GID_TYPE_ROCE_V2);
    p.set_gid(known ? gid : kNoGid);
    if (p.connected() && q.qp_type != kUd) p.set_mtu(q.path_mtu);
    p.set_vqpn(q.vqpn);
    add_port(n, p);
  }
  for (const auto& d : described) {
    if (d.kind != MIGR_FD_SOURCE || d.ctx_id != c.rec.ctx_id) continue;
    wire::NeededPort p;
    p.set_port(d.obj_handle);
    p.set_roce_v2(d.obj_type == IB_UVERBS_GID_TYPE_ROCE_V2);
    p.set_gid(std::string(reinterpret_cast<const char*>(&d.addr), sizeof d.addr) + std::string(reinterpret_cast<const char*>(&d.bytes), sizeof d.bytes));
    add_port(n, p);
  }
}

void has_now(wire::Needs& needs, const Room& room) {
  needs.set_driver(room.device.driver_id);
  for (auto& p : *needs.mutable_ports())
    if (p.connected() && !p.mtu() && p.port() - 1 < room.device.nr_ports) p.set_mtu(room.device.ports[p.port() - 1].active_mtu);
}

Status fits(const wire::Needs& n, const Room& room) {
  const migr_rst_device& d = room.device;
  std::string missing;
  const auto lacks = [&](const std::string& what) { missing += (missing.empty() ? "" : "; ") + what; };
  if (n.driver() && n.driver() != d.driver_id)
    return Error{EBUSY, fmt::format("{} here is driven by {}, {} there by {}: a process cannot go from one driver to another", d.ibdev, driver_name(d.driver_id),
                                    n.device(), driver_name(n.driver()))};
  const auto count = [&](std::uint32_t needed, std::uint32_t most, std::uint32_t used, const char* what) {
    if (const std::uint32_t free = most > used ? most - used : 0; needed > free)
      lacks(fmt::format("{} {}, of {} free ({} of {} in use)", needed, what, free, used, most));
  };
  count(n.qp(), d.max_qp, d.used_qp, "QPs");
  count(n.cq(), d.max_cq, d.used_cq, "CQs");
  count(n.mr(), d.max_mr, d.used_mr, "MRs");
  count(n.pd(), d.max_pd, d.used_pd, "PDs");
  count(n.srq(), d.max_srq, d.used_srq, "SRQs");
  count(n.mw(), d.max_mw, 0, "memory windows");
  count(n.ah(), d.max_ah, 0, "address handles");
  const auto size = [&](std::uint64_t needed, std::uint64_t most, const char* what) {
    if (needed > most) lacks(fmt::format("{} {}, of at most {}", what, needed, most));
  };
  size(n.mr_size(), d.max_mr_size, "an MR of bytes");
  size(n.qp_wr(), d.max_qp_wr, "a queue of work requests");
  size(n.sge(), d.max_sge, "work requests with SGEs");
  size(n.cqe(), d.max_cqe, "a CQ of entries");
  size(n.srq_wr(), d.max_srq_wr, "an SRQ of work requests");
  size(n.srq_sge(), d.max_srq_sge, "an SRQ with SGEs");
  size(n.rd_atomic(), d.max_qp_init_rd_atom, "READs and atomics under way");
  size(n.dest_rd_atomic(), d.max_qp_rd_atom, "READs and atomics to be answered");
  for (const auto& p : n.ports()) {
    const std::string qp = p.vqpn() ? fmt::format("QP {}", p.vqpn()) : "address handles";
    if (p.port() < 1 || p.port() > d.nr_ports) {
      lacks(fmt::format("port {} ({}), it has {}", p.port(), qp, d.nr_ports));
      continue;
    }
    const migr_rst_port& port = d.ports[p.port() - 1];
    if (p.connected() && !port_active(port.state)) lacks(fmt::format("an active port {} ({}): it is down, bring its link up", p.port(), qp));
    if (p.mtu() > port.active_mtu)
      lacks(fmt::format("an MTU of {} on port {} ({}), which has {}: raise the MTU of its interface", mtu_bytes(p.mtu()), p.port(), qp, mtu_bytes(port.active_mtu)));
    const bool has_gid = std::any_of(room.gids.begin(), room.gids.end(), [&](const auto& g) {
      return g.port() == p.port() && g.roce_v2() == p.roce_v2() && (p.gid() == kNoGid || g.gid() == p.gid() || gid_family(g.gid()) == gid_family(p.gid()));
    });
    if (!has_gid)
      lacks(fmt::format("a {} GID of the family {} on port {} ({}): give its interface an address", p.roce_v2() ? "RoCE v2" : "IB/RoCE v1",
                        migr_gid_family_name(gid_family(p.gid())), p.port(), qp));
  }
  if (missing.empty()) return {};
  return Error{EBUSY, fmt::format("{} cannot take what the container has on {}. It needs {}", d.ibdev, n.device(), missing)};
}

std::uint64_t filled_bytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/smaps_rollup");
  std::uint64_t kb = 0;
  for (std::string line; std::getline(in, line);)
    for (const char* key : {"Pss_Anon:", "Pss_Shmem:", "SwapPss:"})
      if (line.starts_with(key)) kb += std::strtoull(line.c_str() + std::strlen(key), nullptr, 10);
  return kb << 10;
}

void add_huge_memory(HugeMemory& to, std::istream& smaps) {
  std::uint64_t bytes = 0, page = 0, own = 0, common = 0;  // of one mapping
  std::string key;
  bool shared = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long start = 0, end = 0;
    int at = 0;
    char perms[5];
    if (std::sscanf(line.c_str(), "%lx-%lx %4s %n", &start, &end, perms, &at) == 3 && at) {
      key = line.substr(static_cast<std::size_t>(at));  // offset, device, inode: a forked process has the same
      bytes = end - start;
      shared = perms[3] == 's';
      continue;
    }
    for (auto [name, to_set] : {std::pair{"KernelPageSize:", &page}, {"Private_Hugetlb:", &own}, {"Shared_Hugetlb:", &common}})
      if (line.starts_with(name)) *to_set = std::strtoull(line.c_str() + std::strlen(name), nullptr, 10) << 10;
    if (!line.starts_with("VmFlags:") || line.find(" ht") == line.npos) continue;
    const bool first = to.mappings.insert(key).second, reserved = line.find(" nr") == line.npos;
    const std::uint64_t filled = first ? own + common : shared ? 0
                                                               : own;
    to.filled += filled;
    to.needed[page] += first && reserved ? bytes : filled;
  }
}

Status huge_memory_fits(const google::protobuf::RepeatedPtrField<wire::HugePages>& needed, const std::string& folder) {
  for (const auto& n : needed) {
    if (!n.page_bytes() || !n.bytes()) continue;
    const std::string kb = std::to_string(n.page_bytes() >> 10);
    const auto count = [&](const char* what) { return std::strtoull(first_line_of(folder + "/hugepages-" + kb + "kB/" + what).c_str(), nullptr, 10); };
    const auto less = [](std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; };
    const std::uint64_t pages = (n.bytes() + n.page_bytes() - 1) / n.page_bytes();
    const std::uint64_t free = less(count("free_hugepages"), count("resv_hugepages")) + less(count("nr_overcommit_hugepages"), count("surplus_hugepages"));
    if (pages > free)
      return Error{ENOMEM, fmt::format("the container has {} huge pages of {} kB, and {} are free here; raise nr_hugepages in {}/hugepages-{}kB", pages, kb, free, folder, kb)};
  }
  return {};
}

namespace {

/// Swap included. nullopt: not known.
std::optional<std::uint64_t> free_memory(const std::string& meminfo) {
  std::ifstream in(meminfo);
  std::optional<std::uint64_t> kb;
  for (std::string line; std::getline(in, line);)
    for (const char* key : {"MemAvailable:", "SwapFree:"})
      if (line.starts_with(key)) kb = kb.value_or(0) + std::strtoull(line.c_str() + std::strlen(key), nullptr, 10);
  return kb ? std::optional(*kb << 10) : kb;
}

}  // namespace

Status memory_fits(std::uint64_t bytes, const std::string& meminfo) {
  const auto free = free_memory(meminfo);
  if (!free || bytes <= *free) return {};
  return Error{ENOMEM, "the container has filled " + mb(bytes) + " of memory, and " + mb(*free) + " are free here, swap included; free some"};
}

Result<Disk> disk_of(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ec;
  fs::path at = path;
  while (!fs::exists(at, ec) && at.has_relative_path()) at = at.parent_path();
  struct statfs st;
  struct stat of;
  if (statfs(at.c_str(), &st) || stat(at.c_str(), &of)) return sys_error("asking how much is free in " + at.string());
  return Disk{at, of.st_dev, static_cast<std::uint64_t>(st.f_bavail) * static_cast<std::uint64_t>(st.f_bsize), st.f_type == TMPFS_MAGIC || st.f_type == RAMFS_MAGIC};
}

bool same_disk(const std::string& a, const std::string& b) {
  const auto x = disk_of(a), y = disk_of(b);
  return x && y && x->device == y->device;
}

Status disk_fits(std::uint64_t bytes, const std::string& path, std::uint64_t memory, const std::string& meminfo) {
  const auto disk = disk_of(path);
  if (!disk) return disk.error();
  const std::string what = "the checkpoint will have about " + mb(bytes) + ", and ";
  if (bytes > disk->free) return Error{ENOSPC, what + mb(disk->free) + " are free in " + disk->at + "; free some"};
  if (!disk->in_memory) return {};
  const auto left = free_memory(meminfo);
  if (!left || bytes + memory <= *left) return {};
  return Error{ENOSPC, what + disk->at + " is in memory, of which " + mb(*left) + " are free" +
                           (memory ? " and " + mb(memory) + " are needed for the processes" : "") + "; free some, or put the folder on a disk"};
}

}  // namespace migr
