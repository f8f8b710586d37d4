// SPDX-License-Identifier: GPL-2.0
// migr-restorectl: drives the plugin of a waiting restore by hand.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "migr/restore_control.h"

namespace {

using Json = nlohmann::json;

class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string gid_text(const std::uint8_t gid[16]) {
  char text[INET6_ADDRSTRLEN];
  return inet_ntop(AF_INET6, gid, text, sizeof text);
}

class Socket {
 public:
  Socket(const std::string& path, int limit_s) : fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un sa{};
    sa.sun_family = AF_UNIX;
    if (path.size() >= sizeof sa.sun_path) throw Failure("the socket's path is longer than 107 bytes: " + path);
    path.copy(sa.sun_path, path.size());
    const timeval limit{limit_s, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (fd_ < 0 || connect(fd_, reinterpret_cast<sockaddr*>(&sa), sizeof sa))
      throw Failure("cannot connect to " + path + ": " + std::strerror(errno) +
                    " (is a restore waiting with MIGR_RESTORE_SOCKET set to it?)");
  }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  template <class Record>
  void send(migr_rc_op op, const std::vector<Record>& records) {
    std::size_t at = 0;
    do {
      const std::size_t n = std::min<std::size_t>(records.size() - at, 1024);
      migr_rc_msg m{};
      m.version = MIGR_RC_VERSION;
      m.op = op;
      m.count = static_cast<std::uint32_t>(n);
      m.record_size = n ? sizeof(Record) : 0;
      m.flags = at + n < records.size() ? MIGR_RC_MORE : 0;
      std::string packet(reinterpret_cast<const char*>(&m), sizeof m);
      packet.append(reinterpret_cast<const char*>(records.data() + at), n * sizeof(Record));
      if (::send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) < 0)
        throw Failure(std::string("cannot send: ") + std::strerror(errno));
      at += n;
    } while (at < records.size());
  }

  template <class Record>
  std::vector<Record> receive(migr_rc_op op) {
    std::vector<Record> out;
    std::vector<char> packet(sizeof(migr_rc_msg) + MIGR_RC_MAX_RECORDS * sizeof(Record));
    for (;;) {
      const ssize_t n = recv(fd_, packet.data(), packet.size(), 0);
      if (n == 0) throw Failure("the restore has ended without an answer: see CRIU's log");
      if (n < 0)
        throw Failure(errno == EAGAIN ? "no answer within the limit" : std::string("recv: ") + std::strerror(errno));
      migr_rc_msg m{};
      if (static_cast<std::size_t>(n) < sizeof m) throw Failure("malformed answer");
      std::memcpy(&m, packet.data(), sizeof m);
      m.text[MIGR_RC_TEXT_MAX - 1] = '\0';
      if (m.version != MIGR_RC_VERSION || m.op != (op | MIGR_RC_REPLY)) throw Failure("answer to something else");
      if (m.status) throw Failure(std::string(m.text) + " (" + std::strerror(m.status) + ")");
      if (m.count) {
        if (m.record_size != sizeof(Record) || static_cast<std::size_t>(n) != sizeof m + m.count * sizeof(Record))
          throw Failure("malformed answer");
        const auto was = out.size();
        out.resize(was + m.count);
        std::memcpy(&out[was], packet.data() + sizeof m, m.count * sizeof(Record));
      }
      if (!(m.flags & MIGR_RC_MORE)) return out;
    }
  }

 private:
  int fd_;
};

struct None {
  char unused;
};

void simple(Socket& s, migr_rc_op op) {
  s.send(op, std::vector<None>{});
  s.receive<None>(op);
}

// Lines "CTX VQPN DEST_QPN DEST_PSN DGID"; numbers as in C, DGID as an IPv6 address; # begins a comment.
std::vector<migr_rc_connect> read_connections(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw Failure("cannot read " + file);
  std::vector<migr_rc_connect> out;
  std::string line;
  for (int number = 1; std::getline(in, line); number++) {
    line = line.substr(0, line.find('#'));
    std::istringstream words(line);
    std::string ctx, vqpn, qpn, psn, gid, rest;
    if (!(words >> ctx)) continue;
    migr_rc_connect c{};
    try {
      if (!(words >> vqpn >> qpn >> psn >> gid) || words >> rest) throw std::invalid_argument("");
      c.src_ctx_id = static_cast<std::uint32_t>(std::stoul(ctx, nullptr, 0));
      c.vqpn = static_cast<std::uint32_t>(std::stoul(vqpn, nullptr, 0));
      c.dest_qpn = static_cast<std::uint32_t>(std::stoul(qpn, nullptr, 0));
      c.dest_psn = static_cast<std::uint32_t>(std::stoul(psn, nullptr, 0));
      if (inet_pton(AF_INET6, gid.c_str(), c.dgid) != 1) throw std::invalid_argument("");
    } catch (const std::logic_error&) {
      throw Failure(file + ":" + std::to_string(number) + ": want CTX VQPN DEST_QPN DEST_PSN DGID");
    }
    out.push_back(c);
  }
  return out;
}

const char* kind_name(std::uint32_t type) {
  static const char* const names[] = {"context", "pd", "mr", "cq", "qp"};
  return type < 5 ? names[type] : "other";
}

void print_qps(const std::vector<migr_rc_qp>& qps, bool json) {
  Json list = Json::array();
  for (const auto& q : qps) {
    if (!json) {
      std::printf("context %u vQPN %#x: was %#x, is %#x, PSN %#x, GID %s\n", q.src_ctx_id, q.vqpn, q.src_pqpn, q.pqpn,
                  q.psn, gid_text(q.sgid).c_str());
      continue;
    }
    list.push_back({{"src_ctx_id", q.src_ctx_id}, {"vqpn", q.vqpn}, {"src_pqpn", q.src_pqpn}, {"pqpn", q.pqpn},
                    {"psn", q.psn}, {"new_handle", q.new_handle}, {"sgid", gid_text(q.sgid)}});
  }
  if (json) std::cout << list.dump(2) << '\n';
}

void print_objects(const std::vector<migr_rc_object>& objects, bool json) {
  Json list = Json::array();
  for (const auto& o : objects) {
    if (!json) {
      std::printf("context %u (here %u, fd %d) %s: handle %u -> %u", o.src_ctx_id, o.ctx_id, o.context_fd,
                  kind_name(o.obj_type), o.old_handle, o.new_handle);
      if (o.pqpn) std::printf(", vQPN %#x is %#x", o.vqpn, o.pqpn);
      std::printf("\n");
      continue;
    }
    list.push_back({{"src_ctx_id", o.src_ctx_id}, {"ctx_id", o.ctx_id}, {"context_fd", o.context_fd},
                    {"kind", kind_name(o.obj_type)}, {"old_handle", o.old_handle}, {"new_handle", o.new_handle},
                    {"vqpn", o.vqpn}, {"pqpn", o.pqpn}});
  }
  if (json) std::cout << list.dump(2) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Drives the CRIU plugin of a restore that waits (MIGR_RESTORE_SOCKET)."};
  std::string socket_path, file;
  bool json = false;
  int limit_s = 60;
  app.add_option("SOCKET", socket_path, "the restore's control socket")->required();
  app.add_flag("--json", json, "print JSON");
  app.add_option("--limit", limit_s, "seconds to wait for an answer")->check(CLI::Range(1, 86400));
  app.fallthrough();
  app.require_subcommand(1);
  auto* prepare = app.add_subcommand("prepare", "list the queue pairs that were built");
  auto* connect = app.add_subcommand("connect", "connect queue pairs; FILE: lines CTX VQPN DEST_QPN DEST_PSN DGID");
  connect->add_option("FILE", file)->required();
  auto* go = app.add_subcommand("go", "the images are complete: let CRIU restore");
  auto* ready = app.add_subcommand("ready", "wait until the tasks are restored; list old and new handles");
  auto* commit = app.add_subcommand("commit", "let the tasks run");
  auto* abort = app.add_subcommand("abort", "give up: nothing is left behind");
  CLI11_PARSE(app, argc, argv);
  try {
    const auto connections = *connect ? read_connections(file) : std::vector<migr_rc_connect>{};
    Socket s(socket_path, limit_s);
    if (*prepare) {
      s.send(MIGR_RC_PREPARE, std::vector<None>{});
      print_qps(s.receive<migr_rc_qp>(MIGR_RC_PREPARE), json);
    } else if (*connect) {
      s.send(MIGR_RC_CONNECT, connections);
      s.receive<None>(MIGR_RC_CONNECT);
    } else if (*ready) {
      s.send(MIGR_RC_READY, std::vector<None>{});
      print_objects(s.receive<migr_rc_object>(MIGR_RC_READY), json);
    } else if (*go) {
      simple(s, MIGR_RC_GO);
    } else if (*commit) {
      simple(s, MIGR_RC_COMMIT);
    } else if (*abort) {
      simple(s, MIGR_RC_ABORT);
    }
    if (json && !*prepare && !*ready) std::cout << "{\"ok\": true}\n";
    return 0;
  } catch (const Failure& e) {
    if (json) std::cout << Json{{"ok", false}, {"error", e.what()}}.dump() << '\n';
    std::cerr << "migr-restorectl: " << e.what() << '\n';
    return 1;
  }
}
