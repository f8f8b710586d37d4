// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What test programs need to play migrd: processes that have connected, in include/migr/proc_wire.h's words.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../agent/thread_scan.h"
#include "migr/proc_wire.h"

namespace proc_side {

using Clock = std::chrono::steady_clock;

constexpr int kAnswerLimitMs = 20'000;
constexpr unsigned kDrainLimitMs = 10'000;
constexpr auto kScanLimit = std::chrono::seconds(10);

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Qp {
  std::uint32_t ctx_id, vqpn, pqpn;
  std::uint32_t peer_vqpn = 0;  // 0: not connected to the other process
  migr_qp_spare spare{};
  std::uint32_t psn = 0;  // of CUT
};

struct Reply {
  migr_msg head{};
  std::vector<char> records;
  template <class T>
  std::vector<T> as() const {
    if (head.count && head.record_size != sizeof(T)) throw Failed("a reply has records of an unexpected size");
    std::vector<T> all;
    for (std::size_t at = 0; at + sizeof(T) <= records.size(); at += sizeof(T)) {
      T one;
      std::memcpy(&one, records.data() + at, sizeof one);
      all.push_back(one);
    }
    return all;
  }
};

class Process {
 public:
  Process(int fd, pid_t pid) : fd_(fd), pid_(pid) {
    const Reply hello = receive();
    if (hello.head.version != MIGR_PROC_VERSION || hello.head.type != MIGR_MSG_HELLO) throw Failed("no HELLO");
    hello_ = hello.head;
    for (const migr_text_range& r : hello.as<migr_text_range>()) ranges_.push_back({r.start, r.bytes});
    ask<migr_move>(MIGR_MSG_MOVES);  // nobody has moved: it need not ask when it connects a QP
  }
  ~Process() { close(fd_); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  const migr_msg& hello() const { return hello_; }
  const std::vector<migr::TextRange>& ranges() const { return ranges_; }
  int fd() const { return fd_; }
  /// The same process has connected again.
  void take_over(Process& again) {
    std::swap(fd_, again.fd_);
    hello_ = again.hello_;
  }
  std::vector<Qp> qps;

  template <class T = migr_qp_ref>
  void send(std::uint16_t type, const std::vector<T>& records = {}, std::uint64_t arg = 0) {
    migr_msg head{};
    head.version = MIGR_PROC_VERSION;
    head.type = type;
    head.seq = ++seq_;
    head.migration = 1;
    head.arg = arg;
    head.record_size = sizeof(T);
    std::size_t done = 0;
    do {
      const std::size_t n = std::min<std::size_t>(1024, records.size() - done);
      head.count = static_cast<std::uint32_t>(n);
      head.flags = done + n < records.size() ? MIGR_MORE : 0;
      std::vector<char> packet(sizeof head + n * sizeof(T));
      std::memcpy(packet.data(), &head, sizeof head);
      if (n) std::memcpy(packet.data() + sizeof head, records.data() + done, n * sizeof(T));
      if (::send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(packet.size()))
        throw Failed(name() + " is gone: " + std::strerror(errno));
      done += n;
    } while (done < records.size());
    asked_ = type;
  }

  /// The reply to the last send(). Throws if it is an error.
  Reply answer() {
    Reply whole = receive();
    while (whole.head.flags & MIGR_MORE) {
      const Reply more = receive();
      whole.head = more.head;
      whole.records.insert(whole.records.end(), more.records.begin(), more.records.end());
    }
    if (whole.head.type != (asked_ | MIGR_REPLY) || whole.head.seq != seq_)
      throw Failed(name() + ": reply to another request");
    if (whole.head.status)
      throw Failed(name() + ", message type " + std::to_string(asked_) + ": " + whole.head.text + " (" +
                   std::strerror(whole.head.status) + ")");
    return whole;
  }
  /// What the reply to the last send() says, error or not.
  int status() {
    Reply part = receive();
    while (part.head.flags & MIGR_MORE) part = receive();
    return part.head.status;
  }
  template <class T = migr_qp_ref>
  Reply ask(std::uint16_t type, const std::vector<T>& records = {}, std::uint64_t arg = 0) {
    send(type, records, arg);
    return answer();
  }

  std::string name() const { return "process " + std::to_string(pid_); }
  std::vector<migr_qp_ref> refs() const {
    std::vector<migr_qp_ref> all;
    for (const Qp& q : qps)
      if (q.peer_vqpn) all.push_back({q.ctx_id, q.vqpn, q.pqpn, 0});
    return all;
  }

 private:
  Reply receive() {
    pollfd p{fd_, POLLIN, 0};
    if (poll(&p, 1, kAnswerLimitMs) != 1) throw Failed(name() + " does not answer");
    std::vector<char> packet(1 << 19);
    const ssize_t n = recv(fd_, packet.data(), packet.size(), 0);
    Reply reply;
    if (n < static_cast<ssize_t>(sizeof reply.head)) throw Failed(name() + " hung up");
    std::memcpy(&reply.head, packet.data(), sizeof reply.head);
    reply.records.assign(packet.begin() + sizeof reply.head, packet.begin() + n);
    return reply;
  }

  int fd_;
  pid_t pid_;
  migr_msg hello_{};
  std::vector<migr::TextRange> ranges_;
  std::uint32_t seq_ = 0;
  std::uint16_t asked_ = 0;
};

inline void nap_ms(unsigned ms) {
  const timespec t{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
  nanosleep(&t, nullptr);
}

struct Listener {
  explicit Listener(const std::string& path) : path_(path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) throw Failed(path + ": too long for a socket");
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    unlink(path.c_str());
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) || listen(fd, 16))
      throw Failed(path + ": " + std::strerror(errno));
  }
  ~Listener() {
    close(fd);
    unlink(path_.c_str());
  }
  /// Null: no process has come. What one asks meanwhile is answered.
  std::unique_ptr<Process> accept_one(int limit_ms) const {
    pollfd p{fd, POLLIN, 0};
    if (poll(&p, 1, limit_ms) != 1) return nullptr;
    const int connection = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC);
    ucred who{};
    socklen_t len = sizeof who;
    if (connection < 0 || getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &len)) return nullptr;
    migr_msg first{};
    pollfd said{connection, POLLIN, 0};
    if (poll(&said, 1, kAnswerLimitMs) != 1 || recv(connection, &first, sizeof first, MSG_PEEK) < 0 || first.type < MIGR_MSG_WHERE)
      return std::make_unique<Process>(connection, who.pid);
    first.type |= MIGR_REPLY;
    first.status = ENOENT;  // a peer is where the program says
    first.count = 0;
    (void)send(connection, &first, sizeof first, MSG_NOSIGNAL);
    close(connection);
    return nullptr;
  }
  /// Of the socket, with a slash at its end.
  std::string folder() const { return path_.substr(0, path_.rfind('/') + 1); }
  int fd;

 private:
  std::string path_;
};

/// The file that lets a frozen process connect.
inline std::string gate_of(const Listener& listener, const Process& p) {
  std::string gate = listener.folder() + MIGR_PROC_GATE_PREFIX;
  for (const std::uint8_t b : p.hello().instance) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", b);
    gate += hex;
  }
  return gate;
}

inline std::string first_line(const std::string& path) {
  std::ifstream f(path);
  std::string line;
  std::getline(f, line);
  return line;
}

/// Of the device's first port. @param index -1: the first RoCE v2 one with an IPv4 address
inline std::array<std::uint8_t, 16> gid_of(const std::string& device, int index) {
  const std::string port = "/sys/class/infiniband/" + device + "/ports/1/";
  for (int i = index < 0 ? 0 : index; i < (index < 0 ? 64 : index + 1); ++i) {
    const std::string text = first_line(port + "gids/" + std::to_string(i));
    if (text.empty()) continue;
    if (index < 0 && (text.compare(20, 9, "0000:ffff") && text.compare(20, 5, "ffff:"))) continue;
    if (index < 0 && first_line(port + "gid_attrs/types/" + std::to_string(i)) != "RoCE v2") continue;
    std::array<std::uint8_t, 16> gid{};
    std::size_t n = 0;
    for (std::size_t at = 0; at + 4 <= text.size() && n < gid.size(); at += 5, n += 2) {
      const auto word = std::stoul(text.substr(at, 4), nullptr, 16);
      gid[n] = static_cast<std::uint8_t>(word >> 8);
      gid[n + 1] = static_cast<std::uint8_t>(word);
    }
    return gid;
  }
  throw Failed("no usable GID on " + device);
}

/// Physical QPN -> the QPN it is connected to, of RC QPs that are connected on `device`.
inline std::map<std::uint32_t, std::uint32_t> connections(const std::string& device) {
  std::unique_ptr<FILE, int (*)(FILE*)> rdma(popen("rdma -j res show qp", "r"), pclose);
  if (!rdma) throw Failed("cannot run the rdma tool");
  std::string text;
  char part[4096];
  while (std::size_t n = std::fread(part, 1, sizeof part, rdma.get())) text.append(part, n);
  std::map<std::uint32_t, std::uint32_t> out;
  const auto all = nlohmann::json::parse(text, nullptr, false);
  if (!all.is_array()) return out;
  for (const auto& qp : all)
    if (qp.value("ifname", "") == device && (qp.value("state", "") == "RTS" || qp.value("state", "") == "RTR") && qp.contains("rqpn"))
      out[qp["lqpn"].get<std::uint32_t>()] = qp["rqpn"].get<std::uint32_t>();
  return out;
}

}  // namespace proc_side
