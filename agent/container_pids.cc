// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "runc.h"

namespace migr {

Result<std::vector<pid_t>> Runc::pids(const ContainerState& c) const {
  // "0::/path" of the unified hierarchy; runc ps reads the same, but starts a program for it.
  std::ifstream in("/proc/" + std::to_string(c.pid) + "/cgroup");
  std::string line, group;
  while (std::getline(in, line))
    if (line.starts_with("0::/") && line.size() > 4) group = "/sys/fs/cgroup" + line.substr(3);
  std::vector<pid_t> pids;
  auto add = [&](const std::filesystem::path& dir) {
    std::ifstream procs(dir / "cgroup.procs");
    for (pid_t p; procs >> p;) pids.push_back(p);
  };
  if (group.empty()) return Error{ENOTSUP, "process " + std::to_string(c.pid) + " is in no cgroup v2 of its own; migr needs the unified hierarchy"};
  // Not a recursive iterator: a group that goes meanwhile would be the end of it.
  for (std::vector<std::filesystem::path> groups{group}; !groups.empty();) {
    const auto dir = groups.back();
    groups.pop_back();
    add(dir);
    std::error_code ec;
    for (std::filesystem::directory_iterator d(dir, ec), end; !ec && d != end; d.increment(ec))
      if (std::error_code gone; d->is_directory(gone)) groups.push_back(d->path());
  }
  if (std::find(pids.begin(), pids.end(), c.pid) == pids.end()) return Error{ESRCH, "the container has ended"};
  return pids;
}

}  // namespace migr
