// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A modelled host: a folder. In place of the kernel's record each modelled process keeps a file KERNEL/PID with what the
// kernel would say of it. See README.md.
#pragma once

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace model {

/// One process with one QP.
struct State {
  int pid = 0;
  std::string instance;                                // 32 hex digits
  std::uint32_t ctx = 0, vqpn = 0, pqpn = 0, gid = 0;  // gid: number of the host
  std::uint32_t dest_pqpn = 0, dest_gid = 0;
  std::uint32_t phase = 0;  // enum migr_proc_state
  std::uint32_t generation = 0;
  std::uint32_t spare = 0;              // pqpn of the spare; 0: none
  std::uint32_t key = 0, dest_key = 0;  // prkey of its memory; that of the other end's, as it knows it

  bool read(const std::string& path) {
    std::ifstream in(path);
    return bool(in >> pid >> instance >> ctx >> vqpn >> pqpn >> gid >> dest_pqpn >> dest_gid >> phase >> generation >> spare >> key >> dest_key);
  }
  void write(const std::string& path) const {
    const std::string tmp = path + ".new";
    {
      std::ofstream out(tmp);
      out << pid << ' ' << instance << ' ' << ctx << ' ' << vqpn << ' ' << pqpn << ' ' << gid << ' ' << dest_pqpn << ' ' << dest_gid << ' '
          << phase << ' ' << generation << ' ' << spare << ' ' << key << ' ' << dest_key << '\n';
    }
    std::rename(tmp.c_str(), path.c_str());
  }
};

inline bool alive(int pid) {
  if (pid <= 0 || kill(pid, 0)) return false;
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(in, line);
  const auto at = line.rfind(')');
  return at != std::string::npos && at + 2 < line.size() && line[at + 2] != 'Z' && line[at + 2] != 'X';
}

/// What the kernel of the host would list.
inline std::vector<State> processes(const std::string& host) {
  std::vector<State> all;
  const std::string dir = host + "/kernel";
  DIR* d = opendir(dir.c_str());
  while (dirent* e = d ? readdir(d) : nullptr) {
    State s;
    const std::string name = e->d_name;
    if (name.find_first_not_of("0123456789") == std::string::npos && s.read(dir + "/" + name) && alive(s.pid)) all.push_back(s);
  }
  if (d) closedir(d);
  return all;
}

inline constexpr char kDevice[] = "model0";  // each host has one, with one port and one GID

inline std::uint32_t number_of(const std::string& host) {
  std::uint32_t n = 0;
  std::ifstream(host + "/number") >> n;
  return n;
}

/// 16 bytes, of the IPv4 family.
inline std::string gid_of(std::uint32_t host_number) {
  std::string gid(16, '\0');
  gid[10] = gid[11] = '\xff';
  gid[12] = 10;
  gid[15] = static_cast<char>(host_number);
  return gid;
}

}  // namespace model
