// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "devices.h"

#include <rdma/ib_user_ioctl_verbs.h>

#include <algorithm>
#include <filesystem>

namespace migr {

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
