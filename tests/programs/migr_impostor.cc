// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Tells migrd that the QPs of a device, whoever has them, are its own: each number FROM..TO at each GID of the device and each that is
// named (include/migr/links_wire.h). It makes no QP itself. Prints "TAKEN of ASKED"; fails if it cannot ask, or if migrd cannot tell.
//
//   migr_impostor DEVICE FROM TO [GID..]
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "migr/links_wire.h"

namespace {

using Gid = std::array<std::uint8_t, 16>;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "migr_impostor: %s\n", what.c_str());
  std::exit(3);
}

Gid gid_of(const std::string& text) {
  Gid gid{};
  if (inet_pton(AF_INET6, text.c_str(), gid.data()) != 1) fail("no GID: " + text);
  return gid;
}

std::vector<Gid> gids_of(const std::string& device) {
  std::vector<Gid> all;
  for (int i = 0;; i++) {
    std::ifstream file("/sys/class/infiniband/" + device + "/ports/1/gids/" + std::to_string(i));
    std::string text;
    if (!(file >> text)) return all;
    if (const Gid gid = gid_of(text); gid != Gid{}) all.push_back(gid);
  }
}

class Migrd {
 public:
  Migrd() {
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, MIGR_LINKS_SOCKET);
    const timeval limit{10, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&a), sizeof a)) fail(std::string(MIGR_LINKS_SOCKET) + ": " + std::strerror(errno));
  }
  ~Migrd() { close(fd_); }

  /// @return of the reply
  template <class Record>
  migr_links_msg ask(std::uint16_t type, const Record& record) {
    migr_links_msg head{};
    head.version = MIGR_LINKS_VERSION;
    head.type = type;
    head.seq = ++seq_;
    head.instance[0] = 0xee;
    head.count = 1;
    head.record_size = sizeof record;
    std::array<char, sizeof head + sizeof record> packet{};
    std::memcpy(packet.data(), &head, sizeof head);
    std::memcpy(packet.data() + sizeof head, &record, sizeof record);
    if (send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) < 0) fail(std::string("send: ") + std::strerror(errno));
    std::vector<char> answer(MIGR_LINKS_PACKET_BYTES);
    do {
      if (recv(fd_, answer.data(), answer.size(), 0) < static_cast<ssize_t>(sizeof head)) fail("migrd does not answer");
      std::memcpy(&head, answer.data(), sizeof head);
    } while (head.seq != seq_);
    head.text[sizeof head.text - 1] = 0;
    return head;
  }

 private:
  const int fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  std::uint32_t seq_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) fail("usage: migr_impostor DEVICE FROM TO [GID..]");
  auto gids = gids_of(argv[1]);
  for (int i = 4; i < argc; i++) gids.push_back(gid_of(argv[i]));
  if (gids.empty()) fail("no GID of " + std::string(argv[1]));
  Migrd migrd;
  migr_links_hello hello{};
  hello.pid = getpid();
  hello.policy = MIGR_LINKS_EXACT;
  if (const auto r = migrd.ask(MIGR_LINKS_HELLO, hello); r.status) fail(std::string("HELLO: ") + r.text);
  int taken = 0, asked = 0;
  for (const Gid& gid : gids)
    for (unsigned n = static_cast<unsigned>(std::atoi(argv[2])); n <= static_cast<unsigned>(std::atoi(argv[3])); n++) {
      migr_links_vqp vqp{};
      std::memcpy(vqp.name.gid, gid.data(), gid.size());
      vqp.name.vqpn = n;
      vqp.policy = MIGR_LINKS_EXACT;
      vqp.links = 1;
      vqp.paths = 1;
      std::memcpy(vqp.path[0].gid, gid.data(), gid.size());
      vqp.path[0].qpn = n;
      vqp.path[0].mtu = 3;
      const auto r = migrd.ask(MIGR_LINKS_PUBLISH, vqp);
      asked++;
      taken += !r.status;
      // Refused as it is another's, and not as it does not fit.
      if (r.status && !std::strstr(r.text, " process ")) fail("PUBLISH of " + std::to_string(n) + ": " + r.text);
    }
  std::printf("%d of %d\n", taken, asked);
  return 0;
}
