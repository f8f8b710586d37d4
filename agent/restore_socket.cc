// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "restore_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>

#include "limits.h"

namespace migr {
namespace {

using Clock = std::chrono::steady_clock;

const char* op_name(migr_rc_op op) {
  static const char* const names[] = {"?", "PREPARE", "CONNECT", "GO", "READY", "COMMIT", "ABORT"};
  return names[op];
}

constexpr std::size_t kMessageBytes = sizeof(migr_rc_msg) + MIGR_RC_MAX_RECORDS * sizeof(migr_rc_qp);

}  // namespace

Result<Fd> RestoreSocket::connect() const {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  if (path_.size() >= sizeof a.sun_path) return Error{ENAMETOOLONG, path_ + ": too long for a socket"};
  std::strcpy(a.sun_path, path_.c_str());
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.n < 0 || ::connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a))
    return sys_error("the CRIU plugin does not listen on " + path_);
  return fd;
}

bool RestoreSocket::listening() const { return bool(connect()); }

void RestoreSocket::interrupt() {
  std::lock_guard lock(mutex_);
  if (busy_fd_ >= 0) shutdown(busy_fd_, SHUT_RDWR);
}

Status RestoreSocket::request(migr_rc_op op, const void* in, std::size_t count, std::size_t in_size,
                              std::vector<std::byte>& out, std::size_t out_size, const int& limit_ms, std::uint32_t* took_us) {
  const std::string what = std::string("CRIU plugin, ") + op_name(op);
  auto fd = connect();
  if (!fd) return Error{fd.error().code, what + ": " + fd.error().text};
  struct Busy {
    RestoreSocket& s;
    Busy(RestoreSocket& owner, int fd) : s(owner) { set(fd); }
    ~Busy() { set(-1); }
    void set(int fd) {
      std::lock_guard lock(s.mutex_);
      s.busy_fd_ = fd;
    }
  } busy(*this, fd->n);

  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  auto left = [&] {
    return static_cast<int>(std::max<long long>(0, std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count()));
  };
  migr_rc_msg head{};
  head.version = MIGR_RC_VERSION;
  head.op = static_cast<std::uint16_t>(op);
  const auto* at = static_cast<const std::byte*>(in);
  do {
    const std::size_t part = std::min<std::size_t>(count, MIGR_RC_MAX_RECORDS);
    head.count = static_cast<std::uint32_t>(part);
    head.record_size = part ? static_cast<std::uint32_t>(in_size) : 0;
    head.flags = part < count ? MIGR_RC_MORE : 0;
    iovec iov[2] = {{&head, sizeof head}, {const_cast<std::byte*>(at), part * in_size}};
    msghdr m{};
    m.msg_iov = iov;
    m.msg_iovlen = part ? 2 : 1;
    pollfd p{fd->n, POLLOUT, 0};
    if (poll(&p, 1, left()) <= 0) return Error{ETIMEDOUT, what + ": it does not read its socket"};
    if (sendmsg(fd->n, &m, MSG_NOSIGNAL) < 0) return sys_error(what);
    at += part * in_size;
    count -= part;
  } while (count);

  out.clear();
  std::vector<std::byte> buf(kMessageBytes + 1);
  for (;;) {
    pollfd p{fd->n, POLLIN, 0};
    const int n = poll(&p, 1, left());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Error{ETIMEDOUT, what + ": no answer within " + std::to_string(limit_ms) + " ms" + advice_on(limit_ms)};
    const ssize_t got = recv(fd->n, buf.data(), buf.size(), MSG_DONTWAIT);
    if (got < 0) return sys_error(what);
    if (got == 0) return Error{ECONNRESET, what + ": the restore has ended"};
    migr_rc_msg h;
    if (static_cast<std::size_t>(got) < sizeof h) return Error{EPROTO, what + ": short answer"};
    std::memcpy(&h, buf.data(), sizeof h);
    if (h.version != MIGR_RC_VERSION || h.op != (op | MIGR_RC_REPLY) || h.count > MIGR_RC_MAX_RECORDS ||
        static_cast<std::size_t>(got) != sizeof h + std::size_t{h.count} * h.record_size || !std::memchr(h.text, 0, sizeof h.text))
      return Error{EPROTO, what + ": malformed answer"};
    if (h.status) return Error{h.status, what + ": " + (h.text[0] ? h.text : std::strerror(h.status))};
    if (h.count && h.record_size != out_size) return Error{EPROTO, what + ": records of another size"};
    if (took_us) *took_us = h.took_us;
    out.insert(out.end(), buf.begin() + sizeof h, buf.begin() + got);
    if (!(h.flags & MIGR_RC_MORE)) return {};
  }
}

}  // namespace migr
