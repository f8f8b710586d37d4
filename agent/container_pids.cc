// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "runc.h"

namespace migr {
namespace {

// "0::/path" of the unified hierarchy. Empty: it is in none but the root.
std::string own_cgroup(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/cgroup");
  std::string line, group;
  while (std::getline(in, line))
    if (line.starts_with("0::/") && line.size() > 4) group = "/sys/fs/cgroup" + line.substr(3);
  return group;
}

std::vector<pid_t> pids_below(const std::string& group) {
  std::vector<pid_t> pids;
  // Not a recursive iterator: a group that goes meanwhile would be the end of it.
  for (std::vector<std::filesystem::path> groups{group}; !groups.empty();) {
    const auto dir = groups.back();
    groups.pop_back();
    std::ifstream procs(dir / "cgroup.procs");
    for (pid_t p; procs >> p;) pids.push_back(p);
    std::error_code ec;
    for (std::filesystem::directory_iterator d(dir, ec), end; !ec && d != end; d.increment(ec))
      if (std::error_code gone; d->is_directory(gone)) groups.push_back(d->path());
  }
  return pids;
}

}  // namespace

Result<std::vector<pid_t>> Runc::pids(const ContainerState& c) const {
  // The first process may have gone on to a group below the container's, as systemd does: what runc exec starts is not there.
  for (const auto& group : {cgroup_of(c.id), own_cgroup(c.pid)}) {
    if (group.empty()) continue;
    auto pids = pids_below(group);
    if (std::find(pids.begin(), pids.end(), c.pid) != pids.end()) return pids;
  }
  if (own_cgroup(c.pid).empty()) return Error{ENOTSUP, "process " + std::to_string(c.pid) + " is in no cgroup v2 of its own; migr needs the unified hierarchy"};
  return Error{ESRCH, "the container has ended"};
}

}  // namespace migr
