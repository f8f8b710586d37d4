// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "tcp_repair.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>

#include "fd.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

// @param done  true: no more of them
void each_in_repair(pid_t pid, const std::function<bool(int socket)>& done) {
  const Fd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  std::error_code ec;
  for (const auto& fd : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ec)) {
    if (!fs::read_symlink(fd.path(), ec).string().starts_with("socket:")) continue;
    const Fd socket(static_cast<int>(syscall(SYS_pidfd_getfd, process.n, std::atoi(fd.path().filename().c_str()), 0)));
    int on = 0;
    socklen_t size = sizeof on;
    if (!getsockopt(socket.n, IPPROTO_TCP, TCP_REPAIR, &on, &size) && on && done(socket.n)) return;
  }
}

}  // namespace

bool in_repair(pid_t pid) {
  bool found = false;
  each_in_repair(pid, [&](int) { return found = true; });
  return found;
}

void end_repair(pid_t pid) {
  each_in_repair(pid, [](int socket) {
    constexpr int kOff = 0, kReuse = 1;
    (void)setsockopt(socket, IPPROTO_TCP, TCP_REPAIR, &kOff, sizeof kOff);
    // Repair mode has taken it, and its server could not bind its port anew.
    (void)setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &kReuse, sizeof kReuse);
    return false;
  });
}

}  // namespace migr
