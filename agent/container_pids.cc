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
  std::error_code ec;
  auto add = [&](const std::filesystem::path& dir) {
    std::ifstream procs(dir / "cgroup.procs");
    for (pid_t p; procs >> p;) pids.push_back(p);
  };
  if (group.empty()) return Error{ENOTSUP, "process " + std::to_string(c.pid) + " is in no cgroup v2 of its own; migr needs the unified hierarchy"};
  add(group);
  for (const auto& d : std::filesystem::recursive_directory_iterator(group, ec))
    if (d.is_directory(ec)) add(d.path());
  if (std::find(pids.begin(), pids.end(), c.pid) == pids.end()) return Error{ESRCH, "the container has ended"};
  return pids;
}

}  // namespace migr
