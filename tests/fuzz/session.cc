// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a process may say to migrd at proc.sock: HELLO, then answers to what it is asked.
#include <sys/socket.h>
#include <unistd.h>

#include "agent/process_session.h"
#include "seeds.h"

namespace {

using namespace migr;

std::string packet(std::uint16_t type, std::uint32_t seq, const std::string& records = "", std::uint32_t record_size = 0) {
  migr_msg head{};
  head.version = MIGR_PROC_VERSION;
  head.type = type;
  head.seq = seq;
  head.record_size = record_size;
  head.count = record_size ? static_cast<std::uint32_t>(records.size() / record_size) : 0;
  return part(bytes_of(head) + records);
}
std::string hello() {
  migr_text_range r{};
  r.start = 0x1000;
  r.bytes = 0x1000;
  return packet(MIGR_MSG_HELLO, 0, bytes_of(r), sizeof r);
}
constexpr std::uint16_t kAsked[] = {MIGR_MSG_DESCRIBE, MIGR_MSG_QP_CREATE, MIGR_MSG_SUSPEND, MIGR_MSG_FREEZE, MIGR_MSG_RESUME};

}  // namespace

std::vector<std::string> seeds() {
  std::string all = hello();
  std::uint32_t seq = 0;
  for (const auto type : kAsked) {
    const std::string records = type == MIGR_MSG_DESCRIBE ? bytes_of(migr_fd_desc{}) : type == MIGR_MSG_QP_CREATE ? bytes_of(migr_qp_spare{})
                                                                                                                  : "";
    all += packet(type | MIGR_REPLY, ++seq, records, static_cast<std::uint32_t>(records.size()));
  }
  return {all, hello(), packet(MIGR_MSG_DESCRIBE | MIGR_REPLY, 1)};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  int ends[2];
  always(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), "there are sockets");
  Fd migrd(ends[0]), library(ends[1]);
  for (const std::string_view p : parts(data, size))
    if (send(library.n, p.data(), p.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
  shutdown(library.n, SHUT_WR);  // so nothing is waited for
  auto s = ProcessSession::greet(std::move(migrd), 100);
  if (!s) {
    always(!s.error().text.empty(), "a refusal has its reason");
    return 0;
  }
  for (const auto type : kAsked) {
    const migr_qp_ref ref{};
    const std::span<const migr_qp_ref> one(&ref, 1);
    if (type == MIGR_MSG_DESCRIBE) (void)(*s)->ask<migr_fd_desc>(type, 1, one, 100);
    else if (type == MIGR_MSG_QP_CREATE) (void)(*s)->ask<migr_qp_spare>(type, 1, one, 100);
    else (void)(*s)->tell(type, 1, 100);
  }
  return 0;
}
