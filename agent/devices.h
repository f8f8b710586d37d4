// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The RDMA devices of this host.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "migr/restore.h"
#include "status.h"
#include "wire.pb.h"

namespace migr {

std::vector<std::string> device_names();

/// The GIDs of an RDMA device of this host, with a context of its own, for a moment.
Result<std::vector<wire::PortGid>> gids_of(const std::string& device);

/// Of every RDMA device of this host. Errors: the first device that cannot be read, once all others were visited.
Status each_gid(const std::function<void(wire::PortGid&)>& visit);

/// Numbers of all QPs of a device, whoever has made them: with or without libmigr, before migr.ko was loaded or after.
/// EPERM: in a pid namespace of its own one does not see all of them.
Result<std::set<std::uint32_t>> qp_numbers(const std::string& device);

/// Of all devices, those that this process has made, and those of which the kernel does not say whose they are, as the thread that
/// opened the device has ended. What another kernel thread or process has made is not among them.
Result<std::set<std::uint32_t>> qp_numbers_of(pid_t pid);

/// A device of this host that a container's could be restored onto.
struct Room {
  migr_rst_device device{};
  std::vector<wire::PortGid> gids;
};
/// Of the device of that name, else of the only one. ENODEV: there is none.
Result<Room> room_of(const std::string& device);

}  // namespace migr
