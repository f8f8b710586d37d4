// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// libmigr of this process, as far as a SessionTable sees it.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "agent/fd.h"
#include "agent/instance.h"
#include "migr/proc_wire.h"

namespace migr {

/// Connects and says HELLO. @return n < 0: it could not, as errno says
inline Fd connect_library(const std::string& path, const Instance& i = {}, std::uint32_t state = MIGR_PROC_RUNNING,
                          std::uint16_t version = MIGR_PROC_VERSION, std::span<const migr_text_range> code = {}) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::snprintf(at.sun_path, sizeof at.sun_path, "%s", path.c_str());
  migr_msg hello{};
  hello.version = version;
  hello.type = MIGR_MSG_HELLO;
  hello.state = state;
  if (!code.empty()) {
    hello.count = static_cast<decltype(hello.count)>(code.size());
    hello.record_size = sizeof code[0];
    hello.control_tid = gettid();
  }
  std::copy(i.begin(), i.end(), hello.instance);
  std::vector<std::byte> packet(sizeof hello + code.size_bytes());
  std::memcpy(packet.data(), &hello, sizeof hello);
  if (!code.empty()) std::memcpy(packet.data() + sizeof hello, code.data(), code.size_bytes());
  const auto bytes = static_cast<ssize_t>(packet.size());
  if (connect(fd.n, reinterpret_cast<const sockaddr*>(&at), sizeof at) || send(fd.n, packet.data(), packet.size(), MSG_NOSIGNAL) != bytes) return Fd();
  return fd;
}

/// Answers without records until the connection ends.
/// @param look  at what it is asked, and the records of that; sets status and arg of the answer
template <class Look>
void answer_all(int fd, Look look) {
  std::vector<std::byte> packet(1 << 16);
  for (migr_msg m; recv(fd, packet.data(), packet.size(), 0) >= static_cast<ssize_t>(sizeof m);) {
    std::memcpy(&m, packet.data(), sizeof m);
    look(m, packet.data() + sizeof m);
    m.type |= MIGR_REPLY;
    m.count = m.record_size = 0;
    send(fd, &m, sizeof m, MSG_NOSIGNAL);
  }
}

}  // namespace migr
