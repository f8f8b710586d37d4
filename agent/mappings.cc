// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "mappings.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace migr {

void each_mapping(pid_t pid, const std::function<bool(const Mapping&)>& done) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  Mapping m{};
  for (std::string line; std::getline(maps, line);) {
    char may[5];
    int path = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx %4s %llx %x:%x %lu %n", &m.start, &m.end, may, &m.offset, &m.major, &m.minor, &m.inode, &path) != 7) continue;
    m.executable = may[2] == 'x';
    m.path.assign(line, static_cast<std::size_t>(path));
    if (done(m)) return;
  }
}

std::vector<Mapping> mappings_of(pid_t pid) {
  std::vector<Mapping> all;
  each_mapping(pid, [&](const Mapping& m) { return all.push_back(m), false; });
  return all;
}

bool has_vm_flag(pid_t pid, const std::string& flag) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/smaps");
  for (std::string line; std::getline(maps, line);)
    if (line.starts_with("VmFlags:") && (line + ' ').find(' ' + flag + ' ') != line.npos) return true;
  return false;
}

bool has_aio(const std::vector<Mapping>& mappings) {
  return std::any_of(mappings.begin(), mappings.end(), [](const Mapping& m) { return m.path.starts_with("/[aio]"); });
}

}  // namespace migr
