// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What processes may say at links.sock, through the socket and its threads: packets as they are, from two processes, with their
// questions answered by a directory that has nobody else.
#include "agent/failover/link_socket.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>

#include "seeds.h"

namespace {

using namespace migr;

constexpr int kLimitS = 8;  // libFuzzer gives up after 10

struct Nobody final : LinkDirectory {
  using LinkDirectory::LinkDirectory;
  std::string name() const override { return "fuzz"; }
  std::string error() const override { return ""; }
  std::vector<Answer> find_elsewhere(std::span<const VqpName> names) override { return std::vector<Answer>(names.size(), {ENOENT, "no host has it", {}}); }
  std::vector<End> meet_elsewhere(std::span<const wire::LinkChannel> ends) override { return std::vector<End>(ends.size(), {EHOSTUNREACH, "nobody answers", {}}); }
};

struct Host {
  Host() {
    spdlog::set_level(spdlog::level::off);
    std::ofstream(folder + "/links.json") << R"({"policy": "exact"})";
    table.set_knock([this](const Instance& to, const migr_links_channel& from) { socket.knock(to, from); });
    always(bool(socket.start(path())), "migrd listens");
  }
  ~Host() {
    socket.stop();
    std::filesystem::remove_all(folder);
  }
  std::string path() const { return folder + "/links.sock"; }
  const std::string folder = own_folder();
  LinkTable table{"here"};
  Nobody directory{table};
  LinkSocket socket{table, directory, [] { return std::vector<migr_links_port>(1); }, folder + "/links.json"};
};

Fd connected(const std::string& path) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  std::strcpy(a.sun_path, path.c_str());
  always(!connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a), "migrd takes a connection");
  const timeval limit{kLimitS, 0};
  setsockopt(fd.n, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return fd;
}
/// Everything that comes until migrd hangs up, as it has to.
void until_end(const Fd& fd) {
  static char answer[MIGR_LINKS_PACKET_BYTES];
  shutdown(fd.n, SHUT_WR);
  ssize_t n = 0;
  while ((n = recv(fd.n, answer, sizeof answer, MSG_TRUNC)) > 0 || (n < 0 && errno == EINTR)) {  // libFuzzer's alarm
    if (n < 0) continue;
    migr_links_msg head{};
    always(static_cast<std::size_t>(n) >= sizeof head && static_cast<std::size_t>(n) <= sizeof answer, "an answer is a packet");
    std::memcpy(&head, answer, sizeof head);
    always(head.version == MIGR_LINKS_VERSION && static_cast<std::size_t>(n) == sizeof head + std::size_t{head.count} * head.record_size, "and says how long it is");
    always(!head.status || head.text[0] || head.count, "a refusal has its reason");
  }
  always(!n || errno == ECONNRESET, "migrd hangs up");
}

/// Of a part: the first byte says which of the two sends the rest.
template <class T>
std::string packet(char who, std::uint16_t type, const std::vector<T>& records, std::uint32_t seq, std::uint64_t arg = 0) {
  migr_links_msg head{};
  head.version = MIGR_LINKS_VERSION;
  head.type = type;
  head.seq = seq;
  head.arg = arg;
  head.instance[0] = static_cast<std::uint8_t>(1 + (who & 1));
  head.count = static_cast<std::uint32_t>(records.size());
  head.record_size = records.empty() ? 0 : sizeof(T);
  std::string out = who + bytes_of(head);
  for (const T& r : records) out += bytes_of(r);
  return part(out);
}

}  // namespace

std::vector<std::string> seeds() {
  migr_links_hello hello{};
  hello.policy = MIGR_LINKS_EXACT;
  migr_links_link link{};
  std::strcpy(link.device, "rxe0");
  link.port = 1;
  link.gid[15] = 1;
  migr_links_vqp vqp{};
  vqp.name.gid[15] = 1;
  vqp.name.vqpn = 17;
  vqp.policy = MIGR_LINKS_EXACT;
  vqp.paths = 1;
  vqp.links = 1;
  vqp.path[0].gid[15] = 1;
  vqp.path[0].qpn = 17;
  vqp.path[0].mtu = 3;
  migr_links_channel end{};
  end.peer[0] = 2;
  end.gid[15] = 1;
  end.qpn = 18;
  end.round = 1;
  end.mtu = 3;
  migr_links_vqp_state state{};
  state.name = vqp.name;
  migr_links_switch change{};
  const std::vector<migr_links_hello> hellos{hello};
  const std::string a = packet<migr_links_hello>('a', MIGR_LINKS_HELLO, hellos, 1), b = packet<migr_links_hello>('b', MIGR_LINKS_HELLO, hellos, 1);
  std::string all = b + a + packet<migr_links_link>('b', MIGR_LINKS_CONFIG, {}, 2) + packet<migr_links_link>('b', MIGR_LINKS_LINKS, {link}, 3) +
                    packet<migr_links_vqp>('b', MIGR_LINKS_PUBLISH, {vqp}, 4) + packet<migr_links_name>('a', MIGR_LINKS_LOOKUP, {vqp.name}, 5) +
                    packet<migr_links_channel>('b', MIGR_LINKS_CHANNEL, {end}, 6) + packet<migr_links_vqp_state>('b', MIGR_LINKS_STATE, {state}, 7, 1) +
                    packet<migr_links_switch>('b', MIGR_LINKS_SWITCHED, {change}, 8) + packet<migr_links_name>('b', MIGR_LINKS_WITHDRAW, {vqp.name}, 9);
  return {all, a, b + packet<migr_links_name>('b', MIGR_LINKS_LOOKUP, std::vector<migr_links_name>(MIGR_LINKS_MAX_RECORDS / 8, vqp.name), 2),
          packet<migr_links_name>('a', MIGR_LINKS_LOOKUP, {vqp.name}, 1)};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Host host;
  {
    const Fd two[] = {connected(host.path()), connected(host.path())};
    for (const std::string_view p : parts(data, size))
      if (!p.empty()) (void)!send(two[p[0] & 1].n, p.data() + 1, p.size() - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    for (const Fd& fd : two) until_end(fd);
  }
  // The connection goes first, then what the table has of it.
  const auto left = [] {
    const auto all = host.table.everything();
    return host.socket.connections() || !all.processes.empty() || !all.vqps.empty() || !all.channels.empty();
  };
  for (int i = 0; left() && i < kLimitS * 1000; i++) usleep(1000);
  always(!left(), "nothing is left of who has gone");
  return 0;
}
