// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A library as links.sock sees it: for tests of migrd's side of links_wire.h.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "agent/process_session.h"
#include "migr/links_wire.h"
#include "temp_folder.h"

namespace migr {

struct LinkPacket {
  migr_links_msg head{};
  std::vector<char> records;
  template <class T>
  std::vector<T> as() const {
    EXPECT_EQ(head.record_size, sizeof(T));
    std::vector<T> out(head.count);
    if (out.size() * sizeof(T) == records.size() && !out.empty()) std::memcpy(out.data(), records.data(), records.size());
    return out;
  }
};

class LinkLibrary {
 public:
  static constexpr int kLimitMs = 20'000;

  LinkLibrary(const std::string& path, std::uint8_t who) : LinkLibrary(connected(path), who) {}
  LinkLibrary(Fd fd, std::uint8_t who) : fd_(std::move(fd)) { instance_[0] = who; }

  static Fd connected(const std::string& path) {
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, path.c_str());
    EXPECT_EQ(connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a), 0) << path << ": " << std::strerror(errno);
    return fd;
  }

  const Instance& instance() const { return instance_; }
  migr_links_msg head(std::uint16_t type) {
    migr_links_msg h{};
    h.version = MIGR_LINKS_VERSION;
    h.type = type;
    h.seq = ++seq_;
    std::copy(instance_.begin(), instance_.end(), h.instance);
    return h;
  }
  void send_raw(const migr_links_msg& h, const void* records, std::size_t bytes) {
    std::vector<char> buf(sizeof h + bytes);
    std::memcpy(buf.data(), &h, sizeof h);
    if (bytes) std::memcpy(buf.data() + sizeof h, records, bytes);
    (void)!::send(fd_.n, buf.data(), buf.size(), MSG_NOSIGNAL);
  }
  /// false: migrd does not read.
  bool send_now(const migr_links_msg& h) { return ::send(fd_.n, &h, sizeof h, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof h); }
  template <class T>
  std::uint32_t send(std::uint16_t type, const std::vector<T>& records, std::uint64_t arg = 0, const char* text = "") {
    auto h = head(type);
    h.count = static_cast<std::uint32_t>(records.size());
    h.record_size = sizeof(T);
    h.arg = arg;
    std::strncpy(h.text, text, sizeof h.text - 1);
    send_raw(h, records.data(), records.size() * sizeof(T));
    return h.seq;
  }
  /// false: closed by migrd, or nothing within the limit.
  bool receive(LinkPacket& p, int limit_ms = kLimitMs) {
    pollfd f{fd_.n, POLLIN, 0};
    if (poll(&f, 1, limit_ms) <= 0) return false;
    std::vector<char> buf(MIGR_LINKS_PACKET_BYTES);
    const ssize_t n = recv(fd_.n, buf.data(), buf.size(), 0);
    if (n < static_cast<ssize_t>(sizeof p.head)) return false;
    std::memcpy(&p.head, buf.data(), sizeof p.head);
    p.records.assign(buf.begin() + sizeof p.head, buf.begin() + n);
    EXPECT_EQ(p.head.version, MIGR_LINKS_VERSION);
    EXPECT_EQ(std::size_t{p.head.count} * p.head.record_size, p.records.size());
    return true;
  }
  /// The reply to `seq`; pushes that come before it are kept.
  LinkPacket reply(std::uint32_t seq) {
    LinkPacket p;
    while (receive(p)) {
      if (p.head.seq == seq && p.head.type & MIGR_LINKS_REPLY) return p;
      EXPECT_EQ(p.head.seq, 0u) << "an answer to something else";
      pushes.push_back(p);
    }
    ADD_FAILURE() << "no reply to " << seq;
    p.head.status = -1;
    return p;
  }
  template <class T>
  LinkPacket ask(std::uint16_t type, const std::vector<T>& records, std::uint64_t arg = 0, const char* text = "") {
    return reply(send(type, records, arg, text));
  }
  /// The next push of this type, those of others are dropped.
  LinkPacket push(std::uint16_t type, int limit_ms = kLimitMs) {
    for (;;) {
      if (pushes.empty()) {
        LinkPacket p;
        if (!receive(p, limit_ms)) break;
        pushes.push_back(p);
      }
      const LinkPacket p = pushes.front();
      pushes.pop_front();
      if (p.head.type == type) return p;
    }
    ADD_FAILURE() << "no push of type " << type;
    return {};
  }
  LinkPacket hello(std::uint32_t policy = MIGR_LINKS_EXACT) {
    migr_links_hello h{};
    h.pid = getpid();
    h.policy = policy;
    return ask<migr_links_hello>(MIGR_LINKS_HELLO, {h}, 0, "test");
  }
  bool closed(int limit_ms = kLimitMs) {
    LinkPacket p;
    pollfd f{fd_.n, POLLIN, 0};
    while (poll(&f, 1, limit_ms) > 0) {
      char c;
      const ssize_t n = recv(fd_.n, &c, 1, MSG_PEEK);
      if (n == 0 || (n < 0 && errno == ECONNRESET)) return true;
      if (!receive(p, limit_ms)) return true;
    }
    return false;
  }
  void close() { fd_ = Fd(); }
  /// Whoever else has the connection.
  void hang_up() { shutdown(fd_.n, SHUT_RDWR); }

  std::deque<LinkPacket> pushes;

 private:
  Fd fd_;
  Instance instance_{};
  std::uint32_t seq_ = 0;
};

/// A connection that another process has made, which lives as long as this. That process has all connections that were open
/// here when it was made: those stay open while it lives.
class OtherProcess {
 public:
  /// @param also  what it does besides
  explicit OtherProcess(const std::string& path, const std::function<void()>& also = {}) {
    int sv[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv)) return;
    child_ = fork();
    if (child_ == 0) {
      const Fd fd = LinkLibrary::connected(path);
      char byte = 0, room[CMSG_SPACE(sizeof(int))] = {};
      iovec iov{&byte, 1};
      msghdr m{};
      m.msg_iov = &iov, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
      cmsghdr* c = CMSG_FIRSTHDR(&m);
      c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &fd.n, sizeof(int));
      if (also) also();
      if (sendmsg(sv[1], &m, 0) != 1) _exit(1);
      for (;;) pause();
    }
    char byte, room[CMSG_SPACE(sizeof(int))] = {};
    iovec iov{&byte, 1};
    msghdr m{};
    m.msg_iov = &iov, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
    int fd = -1;
    if (recvmsg(sv[0], &m, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&m)) std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    EXPECT_GE(fd, 0);
    fd_ = Fd(fd);
    ::close(sv[0]);
    ::close(sv[1]);
  }
  ~OtherProcess() { end(); }
  void end() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(std::exchange(child_, -1), nullptr, 0);
  }
  Fd take() { return std::move(fd_); }
  pid_t pid() const { return child_; }

 private:
  pid_t child_ = -1;
  Fd fd_;
};

inline void put_gid(std::uint8_t (&gid)[16], std::uint8_t a, std::uint8_t b) {
  std::memset(gid, 0, sizeof gid);
  gid[10] = gid[11] = 0xff;
  gid[12] = 10, gid[13] = a, gid[15] = b;
}

/// GIDs here are ::ffff:10.HOST.0.LINK.
inline migr_links_name link_name(std::uint8_t host, std::uint32_t vqpn) {
  migr_links_name n{};
  put_gid(n.gid, host, 1);
  n.vqpn = vqpn;
  return n;
}

inline migr_links_link link_of(std::uint8_t host, std::uint32_t link) {
  migr_links_link l{};
  l.link = link;
  l.port = 1;
  std::snprintf(l.device, sizeof l.device, "rxe%u", link);
  put_gid(l.gid, host, static_cast<std::uint8_t>(link + 1));
  l.state = MIGR_LINKS_LINK_UP;
  return l;
}

/// With a path on each of two links.
inline migr_links_vqp link_vqp(std::uint8_t host, std::uint32_t vqpn) {
  migr_links_vqp v{};
  v.name = link_name(host, vqpn);
  v.policy = MIGR_LINKS_EXACT;
  v.paths = 2;
  v.links = 3;
  for (std::uint32_t i = 0; i < 2; i++) {
    v.path[i].link = i;
    put_gid(v.path[i].gid, host, static_cast<std::uint8_t>(i + 1));
    v.path[i].qpn = vqpn + 1000 * i;
    v.path[i].psn = vqpn + 1;
    v.path[i].mtu = 3;
  }
  return v;
}

inline migr_links_channel link_channel(const Instance& peer, std::uint8_t host, std::uint32_t round, std::uint32_t qpn) {
  migr_links_channel c{};
  std::copy(peer.begin(), peer.end(), c.peer);
  c.link = 1;
  c.round = round;
  put_gid(c.gid, host, 2);
  c.qpn = qpn;
  c.psn = qpn + 7;
  c.mtu = 3;
  return c;
}

/// Until it is so, or the limit has run out. @return whether it is
inline bool soon(const std::function<bool()>& what, int limit_ms = 10'000) { return within(limit_ms, what); }

}  // namespace migr
