// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "devices.h"

#include <netlink/attr.h>
#include <netlink/msg.h>
#include <netlink/netlink.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_netlink.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <optional>

#include "netlink_exchange.h"

namespace migr {
namespace {

using RdmaAttrs = std::array<nlattr*, RDMA_NLDEV_ATTR_MAX>;

// A dump of the kernel's RDMA resources. @param index  of the device; none: devices
Status rdma_dump(nl_sock* sock, unsigned command, std::optional<std::uint32_t> index, const std::function<void(const RdmaAttrs&)>& visit, const std::string& what) {
  return until_settled([&]() -> Status {
    const NlMsg msg(nlmsg_alloc_simple(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, command), NLM_F_DUMP));
    if (!msg || (index && nla_put_u32(msg.get(), RDMA_NLDEV_ATTR_DEV_INDEX, *index))) return Error{ENOMEM, what + ": out of memory"};
    const auto take = [&](nlmsghdr* h) {
      RdmaAttrs a{};
      if (nlmsg_parse(h, 0, a.data(), static_cast<int>(a.size()) - 1, nullptr)) return false;
      visit(a);
      return true;
    };
    return netlink_exchange(sock, msg.get(), take, what);
  });
}

// Those in one message of the dump, which may have none.
void each_entry(const nlattr* table, const std::function<void(const nlattr* entry)>& visit) {
  int left = table ? nla_len(table) : 0;
  for (auto* entry = table ? static_cast<nlattr*>(nla_data(table)) : nullptr; nla_ok(entry, left); entry = nla_next(entry, &left)) visit(entry);
}

const nlattr* part_of(const nlattr* entry, int type) { return nla_find(static_cast<nlattr*>(nla_data(entry)), nla_len(entry), type); }

// @param wanted  a device; none: of all
Status each_qp(const std::optional<std::string>& wanted, const std::function<void(const nlattr* entry)>& visit) {
  const NlSocket sock(nl_socket_alloc());
  if (!sock) return Error{ENOMEM, "netlink: out of memory"};
  if (const int e = nl_connect(sock.get(), NETLINK_RDMA); e < 0) return Error{EIO, std::string("netlink: ") + nl_geterror(e)};
  std::map<std::string, std::uint32_t> devices;
  auto s = rdma_dump(
      sock.get(), RDMA_NLDEV_CMD_GET, {}, [&](const RdmaAttrs& a) {
        if (const auto* name = a[RDMA_NLDEV_ATTR_DEV_NAME], *at = a[RDMA_NLDEV_ATTR_DEV_INDEX]; name && at && (!wanted || *wanted == nla_get_string(name))) devices[nla_get_string(name)] = nla_get_u32(at);
      },
      "reading the RDMA devices");
  if (s && wanted && devices.empty()) return Error{ENODEV, "no RDMA device " + *wanted};
  for (const auto& [device, index] : devices)
    if (s) s = rdma_dump(
               sock.get(), RDMA_NLDEV_CMD_RES_QP_GET, index, [&](const RdmaAttrs& a) { each_entry(a[RDMA_NLDEV_ATTR_RES_QP], visit); }, "reading the QPs of " + device);
  return s;
}

// By which the kernel tells a pid namespace that all processes are in.
bool sees_all_processes() {
  std::error_code ec;
  return std::filesystem::read_symlink("/proc/self/ns/pid", ec) == "pid:[4026531836]" && !ec;
}

bool is_thread_of(std::uint32_t thread, pid_t pid) {
  std::error_code ec;
  return std::filesystem::exists("/proc/" + std::to_string(pid) + "/task/" + std::to_string(thread), ec) && !ec;
}

}  // namespace

std::vector<std::string> device_names() {
  std::vector<std::string> out;
  std::error_code ec;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", ec)) out.push_back(device.path().filename());
  return out;
}

Result<std::vector<wire::PortGid>> gids_of(const std::string& device) {
  std::vector<ib_uverbs_gid_entry> all(MIGR_RST_GIDS);
  migr_rst_err err{};
  const int n = migr_rst_device_gids(device.c_str(), all.data(), MIGR_RST_GIDS, &err);
  if (n < 0) return Error{-n, err.text};
  all.resize(static_cast<std::size_t>(n));
  std::vector<wire::PortGid> out;
  for (const auto& entry : all) {
    auto& g = out.emplace_back();
    g.set_device(device);
    g.set_port(entry.port_num);
    g.set_roce_v2(entry.gid_type == IB_UVERBS_GID_TYPE_ROCE_V2);
    g.set_gid(entry.gid, sizeof entry.gid);
    g.set_index(entry.gid_index);
  }
  return out;
}

Status each_gid(const std::function<void(wire::PortGid&)>& visit) {
  Status first;
  for (const auto& device : device_names()) {
    auto gids = gids_of(device);
    if (!gids && first) first = gids.error();
    if (gids) std::for_each(gids->begin(), gids->end(), visit);
  }
  return first;
}

Result<std::set<std::uint32_t>> qp_numbers(const std::string& device) {
  if (!sees_all_processes()) return Error{EPERM, "migrd is in a pid namespace of its own, and sees the QPs of its processes only"};
  std::set<std::uint32_t> out;
  auto s = each_qp(device, [&](const nlattr* entry) {
    if (const nlattr* qpn = part_of(entry, RDMA_NLDEV_ATTR_RES_LQPN)) out.insert(nla_get_u32(qpn));
  });
  if (!s) return s.error();
  return out;
}

Result<std::set<std::uint32_t>> qp_numbers_of(pid_t pid) {
  std::set<std::uint32_t> out;
  auto s = each_qp({}, [&](const nlattr* entry) {
    const nlattr *qpn = part_of(entry, RDMA_NLDEV_ATTR_RES_LQPN), *thread = part_of(entry, RDMA_NLDEV_ATTR_RES_PID);
    if (!qpn || part_of(entry, RDMA_NLDEV_ATTR_RES_KERN_NAME)) return;
    if (!thread || is_thread_of(nla_get_u32(thread), pid)) out.insert(nla_get_u32(qpn));
  });
  if (!s) return s.error();
  return out;
}

Result<Room> room_of(const std::string& device) {
  Room r;
  migr_rst_err err{};
  if (const int e = migr_rst_device_query(device.c_str(), &r.device, &err)) return Error{-e, err.text};
  auto gids = gids_of(r.device.ibdev);
  if (!gids) return gids.error();
  r.gids = std::move(*gids);
  return r;
}

}  // namespace migr
