// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "control.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

namespace verify {
namespace {

constexpr std::uint32_t kMagic = 0x4d565231;  // "MVR1"
constexpr std::uint32_t kMaxBody = 1u << 20;
constexpr int kRetryMs = 100;
constexpr double kSendLimit = 300;  // seconds; a partner that is being moved may be silent for long

struct Header {
  std::uint32_t magic, type, len;
};

using Clock = std::chrono::steady_clock;
double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct AddrFree {
  void operator()(addrinfo* a) const { freeaddrinfo(a); }
};
using Addr = std::unique_ptr<addrinfo, AddrFree>;

Addr resolve(const std::string& host, int port, bool passive) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  const int e = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (e) throw SetupError("address '" + host + "': " + gai_strerror(e));
  return Addr(found);
}

std::string errno_text() { return std::strerror(errno); }

/// Waits; a wait that a signal or a restore has interrupted goes on. @return false: time is over
bool wait_for(int fd, short what, double limit_s) {
  // Not by the clock: it may jump when the process is moved. Each round counts as what it was asked to wait.
  for (double left = limit_s; left > 0; left -= 0.1) {
    pollfd p{fd, what, 0};
    const int r = ::poll(&p, 1, 100);
    if (r > 0) return true;
    if (r < 0 && errno != EINTR) throw PeerError("poll: " + errno_text());
  }
  return false;
}

}  // namespace

Control::Control(int fd) : fd_(fd) {
  const int one = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK);
}

Control::~Control() {
  if (fd_ >= 0) ::close(fd_);
}

Control Control::serve(const std::string& bind, int port, double limit_s) {
  const Addr a = resolve(bind.empty() ? "0.0.0.0" : bind, port, true);
  const int l = ::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (l < 0) throw SetupError("socket: " + errno_text());
  const int one = 1;
  setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  const std::string where = (bind.empty() ? "any address" : bind) + " port " + std::to_string(port);
  if (::bind(l, a->ai_addr, a->ai_addrlen) || ::listen(l, 1)) {
    const std::string why = errno_text();
    ::close(l);
    throw SetupError("cannot listen on " + where + ": " + why);
  }
  int fd = -1;
  if (wait_for(l, POLLIN, limit_s)) fd = ::accept4(l, nullptr, nullptr, SOCK_CLOEXEC);
  ::close(l);  // one client; and nothing that listens has to be moved
  if (fd < 0) throw SetupError("no client came to " + where + " within " + std::to_string(static_cast<int>(limit_s)) + " s");
  return Control(fd);
}

Control Control::connect(const std::string& server, const std::string& bind, int port, double limit_s) {
  const Addr to = resolve(server, port, false);
  const auto start = Clock::now();
  for (;;) {
    const int fd = ::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) throw SetupError("socket: " + errno_text());
    if (!bind.empty()) {
      const Addr from = resolve(bind, 0, true);
      if (::bind(fd, from->ai_addr, from->ai_addrlen)) {
        const std::string why = errno_text();
        ::close(fd);
        throw SetupError("cannot use address " + bind + ": " + why);
      }
    }
    if (::connect(fd, to->ai_addr, to->ai_addrlen) == 0) return Control(fd);
    const std::string why = errno_text();
    ::close(fd);
    if (since(start) > limit_s)
      throw SetupError("cannot reach the server " + server + " port " + std::to_string(port) + ": " + why +
                       "; is migr_verify running there?");
    ::poll(nullptr, 0, kRetryMs);
  }
}

void Control::send(Msg type, const std::string& body) {
  const Header h{kMagic, static_cast<std::uint32_t>(type), static_cast<std::uint32_t>(body.size())};
  std::string out(reinterpret_cast<const char*>(&h), sizeof h);
  out += body;
  for (std::size_t at = 0; at < out.size();) {
    const ssize_t n = ::send(fd_, out.data() + at, out.size() - at, MSG_NOSIGNAL);
    if (n >= 0) at += static_cast<std::size_t>(n);
    else if (errno == EAGAIN) {
      if (!wait_for(fd_, POLLOUT, kSendLimit)) throw PeerError("the partner does not read its TCP connection");
    } else if (errno != EINTR) throw PeerError("TCP connection to the partner: " + errno_text());
  }
}

std::optional<Message> Control::poll() {
  char buffer[16384];
  const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
  if (n > 0) in_.append(buffer, static_cast<std::size_t>(n));
  Header h;
  if (in_.size() >= sizeof h) {
    std::memcpy(&h, in_.data(), sizeof h);
    if (h.magic != kMagic || h.len > kMaxBody) throw PeerError("the other end is no migr_verify of this version");
    if (in_.size() >= sizeof h + h.len) {
      Message m{static_cast<Msg>(h.type), in_.substr(sizeof h, h.len)};
      in_.erase(0, sizeof h + h.len);
      return m;
    }
  }
  if (n == 0) throw PeerError("the partner closed its TCP connection before the end");
  if (n < 0 && errno != EAGAIN && errno != EINTR) throw PeerError("TCP connection to the partner: " + errno_text());
  return std::nullopt;
}

std::string Control::expect(Msg type, double limit_s) {
  for (double left = limit_s; left > 0; left -= 0.1) {
    while (auto m = poll()) {
      if (m->type == Msg::kAbort) throw PeerError("the partner gave up: " + m->body);
      if (m->type == type) return m->body;
      throw PeerError("the partner sent message " + std::to_string(static_cast<int>(m->type)) + " when " +
                      std::to_string(static_cast<int>(type)) + " was due");
    }
    wait_for(fd_, POLLIN, 0.1);
  }
  throw PeerError("the partner did not answer within " + std::to_string(static_cast<int>(limit_s)) + " s");
}

}  // namespace verify
