/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The directory that migrd keeps: include/migr/links_wire.h. One question at a time. */
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../environment.h"
#include "../high_fd.h"
#include "directory.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr int kAnswerMs = 8000;             // LOOKUP may take 5 s
constexpr std::uint64_t kOutsideMs = 2000;  // nothing else is done here meanwhile
constexpr std::uint64_t kRetryNs = 500'000'000;
/// A migrd of another version will not be another soon.
constexpr std::uint64_t kOtherVersionNs = 30'000'000'000;

class MigrdDirectory final : public Directory {
 public:
  MigrdDirectory(const Config& config, const Peer& instance) : config_(config), instance_(instance), buffer_(MIGR_LINKS_PACKET_BYTES) {
    path_ = environment::links_socket();
    if (path_.size() >= sizeof(sockaddr_un::sun_path)) {
      std::fprintf(stderr, "libmigr: MIGR_LINKS_SOCKET is longer than %zu bytes; no link is backed up\n", sizeof(sockaddr_un::sun_path) - 1);
      path_.clear();
    }
  }
  ~MigrdDirectory() override { hang_up(); }

  unsigned life() override {
    if (fd_ >= 0) return life_;
    const std::uint64_t now = now_ns();
    if (path_.empty() || (tried_ns_ && now - tried_ns_ < retry_ns_)) return 0;
    tried_ns_ = now;
    if (access(path_.c_str(), F_OK) != 0 || !connect_and_greet()) return 0;
    return ++life_;
  }

  int fd() const override { return fd_; }

  void hang_up() override {
    close_own(std::exchange(fd_, -1));
  }

  void pushes(std::vector<migr_links_port>& ports, bool& knocked) override {
    while (fd_ >= 0 && receive(0)) {}
    ports.swap(ports_);
    ports_.clear();
    knocked = std::exchange(knocked_, false);
  }

  int links(std::span<const migr_links_link> all) override { return ask<migr_links_link>(MIGR_LINKS_LINKS, all); }
  int publish(std::span<const migr_links_vqp> some) override { return ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, some); }
  int withdraw(std::span<const migr_links_name> some) override { return in_parts(MIGR_LINKS_WITHDRAW, some); }
  int end_channels(std::span<const migr_links_channel> some) override { return in_parts(MIGR_LINKS_CHANNEL_END, some); }
  int states(std::span<const migr_links_vqp_state> some) override { return in_parts(MIGR_LINKS_STATE, some); }
  int switched(std::span<const migr_links_switch> some) override { return in_parts(MIGR_LINKS_SWITCHED, some); }
  int outside(std::span<const migr_text_range> ranges) override { return ask<migr_text_range, char>(MIGR_LINKS_OUTSIDE, ranges, nullptr, "", kOutsideMs); }
  int lookup(std::span<const migr_links_name> names, std::vector<migr_links_found>& out) override {
    return ask<migr_links_name, migr_links_found>(MIGR_LINKS_LOOKUP, names, &out);
  }
  int channel(std::span<const migr_links_channel> own, std::vector<migr_links_channel>& out) override {
    return ask<migr_links_channel, migr_links_channel>(MIGR_LINKS_CHANNEL, own, &out);
  }

 private:
  bool connect_and_greet() {
    retry_ns_ = kRetryNs;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
    fd_ = to_high_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd_ < 0) return false;
    const timeval limit{kAnswerMs / 1000, 0};
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return hang_up(), false;
    migr_links_hello hello{};
    hello.pid = getpid();
    hello.policy = static_cast<std::uint32_t>(config_.policy);
    hello.making = static_cast<std::uint16_t>(config_.paths);
    hello.atomics = static_cast<std::uint16_t>(config_.atomics);
    hello.heartbeat_ms = config_.heartbeat_ms;
    hello.heartbeat_misses = config_.heartbeat_misses;
    const int err = ask<migr_links_hello, char>(MIGR_LINKS_HELLO, std::span<const migr_links_hello>(&hello, 1), nullptr, environment::links_file() ? "MIGR_LINKS" : kDefaultFile);
    if (err && !said_) {
      said_ = true;
      std::fprintf(stderr, "libmigr: migrd takes no links of this process: %s: %s\n", std::strerror(err), text_.c_str());
    }
    if (err == EPROTO) retry_ns_ = kOtherVersionNs;
    if (err) hang_up();
    return !err;
  }

  /// One packet. @return false: none came in time, or the connection is gone
  bool receive(int limit_ms) {
    pollfd p{.fd = fd_, .events = POLLIN, .revents = 0};
    if (poll(&p, 1, limit_ms) <= 0) return false;
    const ssize_t n = recv(fd_, buffer_.data(), buffer_.size(), MSG_TRUNC);
    migr_links_msg head;
    // The version stands first in every version of the header.
    if (n < static_cast<ssize_t>(sizeof head.version) || static_cast<std::size_t>(n) > buffer_.size()) return hang_up(), false;
    std::memcpy(&head, buffer_.data(), std::min(sizeof head, static_cast<std::size_t>(n)));
    if (head.version != MIGR_LINKS_VERSION) {
      lost_by_ = EPROTO;
      text_ = "migrd speaks version " + std::to_string(head.version) + ", not " + std::to_string(MIGR_LINKS_VERSION) + "; install both from the same release";
      return hang_up(), false;
    }
    const std::size_t body = static_cast<std::size_t>(n) - sizeof head;
    if (n < static_cast<ssize_t>(sizeof head) || body != std::size_t{head.count} * head.record_size) return hang_up(), false;
    if (head.type == MIGR_LINKS_PORTS && head.record_size == sizeof(migr_links_port)) {
      const std::size_t before = ports_.size();
      ports_.resize(before + head.count);
      std::memcpy(ports_.data() + before, buffer_.data() + sizeof head, body);
    } else if (head.type == MIGR_LINKS_KNOCK) {
      knocked_ = true;
    }
    last_ = head;
    return true;
  }

  /// As many as a packet may have at a time.
  template <class Record>
  int in_parts(std::uint16_t type, std::span<const Record> all) {
    do {
      const auto part = all.first(std::min<std::size_t>(all.size(), MIGR_LINKS_MAX_RECORDS));
      if (const int err = ask<Record>(type, part)) return err;
      all = all.subspan(part.size());
    } while (!all.empty());
    return 0;
  }

  template <class Record, class Answer = char>
  int ask(std::uint16_t type, std::span<const Record> records, std::vector<Answer>* out = nullptr, const char* text = "", std::uint64_t arg = 0) {
    if (fd_ < 0) return ENOTCONN;
    lost_by_ = ENOTCONN;
    migr_links_msg head{};
    head.version = MIGR_LINKS_VERSION;
    head.type = type;
    head.seq = ++seq_ ? seq_ : ++seq_;
    head.count = static_cast<std::uint32_t>(records.size());
    head.record_size = sizeof(Record);
    head.arg = arg;
    std::memcpy(head.instance, instance_.data(), sizeof head.instance);
    std::snprintf(head.text, sizeof head.text, "%s", text);
    iovec parts[2] = {{&head, sizeof head}, {const_cast<Record*>(records.data()), records.size_bytes()}};
    msghdr packet{};
    packet.msg_iov = parts;
    packet.msg_iovlen = records.empty() ? 1 : 2;
    if (sendmsg(fd_, &packet, MSG_NOSIGNAL) < 0) return hang_up(), ENOTCONN;
    const std::uint64_t deadline = now_ns() + kAnswerMs * 1'000'000ull;
    while (now_ns() < deadline) {
      if (!receive(kAnswerMs)) break;
      if (last_.type != (type | MIGR_LINKS_REPLY) || last_.seq != head.seq) continue;
      last_.text[sizeof last_.text - 1] = 0;
      text_ = last_.text;
      if (last_.status) return last_.status;
      if (!out) return 0;
      if (last_.count && last_.record_size != sizeof(Answer)) break;
      out->resize(last_.count);
      if (last_.count) std::memcpy(out->data(), buffer_.data() + sizeof head, last_.count * sizeof(Answer));
      return 0;
    }
    hang_up();
    return lost_by_;
  }

  const Config config_;
  const Peer instance_;
  std::string path_, text_;
  std::vector<std::uint8_t> buffer_;
  migr_links_msg last_{};
  int fd_ = -1;
  std::uint32_t seq_ = 0;
  unsigned life_ = 0;
  std::uint64_t tried_ns_ = 0, retry_ns_ = kRetryNs;
  int lost_by_ = ENOTCONN;  ///< an errno: why what was asked last has no answer
  bool said_ = false, knocked_ = false;
  std::vector<migr_links_port> ports_;
};

}  // namespace

std::unique_ptr<Directory> make_directory(const Config& config, const Peer& instance) {
  return std::make_unique<MigrdDirectory>(config, instance);
}

}  // namespace migr::links
