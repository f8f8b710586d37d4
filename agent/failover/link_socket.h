// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// links.sock: include/migr/links_wire.h, migrd's side of it. One thread reads and does what takes no time; a few others
// ask the directory, and the kernel whose names are published, one question of each process at a time; and a few look at the
// threads of those that ask for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <stop_token>
#include <thread>
#include <vector>

#include "link_directory.h"

namespace migr {

class LinkSocket {
 public:
  /// All ports of the host, for who has just come.
  using Ports = std::function<std::vector<migr_links_port>()>;

  /// @param file  the host's configuration of links, as processes get it
  LinkSocket(LinkTable& table, LinkDirectory& directory, Ports ports, std::string file)
      : table_(table), directory_(directory), ports_(std::move(ports)), file_(std::move(file)) {}
  ~LinkSocket();
  /// Whether an instance is that of a process, as far as proc.sock knows. Not set: whoever comes first has it. Before start()
  using MayHave = std::function<Status(const Instance&, pid_t)>;
  void set_may_have(MayHave m) { may_have_ = std::move(m); }
  Status start(const std::string& path);
  void stop();

  /// Pushes; never wait, and a process that does not read may miss them. Thread: any.
  void tell_ports(std::span<const migr_links_port> ports);
  void knock(const Instance& to, const migr_links_channel& from);

  std::size_t connections() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Packet {
    migr_links_msg head{};
    std::vector<std::byte> records;
    template <class T>
    std::vector<T> as() const {
      std::vector<T> out(head.count);
      if (!out.empty()) std::memcpy(out.data(), records.data(), out.size() * sizeof(T));
      return out;
    }
  };
  struct Session {
    Fd fd;
    Speaker speaker;
    pid_t pid = 0;  // the speaker's
    std::string comm;
    std::stop_source ended;
    Clock::time_point since;
    Instance instance{};  // does not change once it has greeted
    std::atomic<bool> greeted = false;
    double tokens = 0;  // packets that may be read now
    Clock::time_point refilled;
    // Under LinkSocket::mutex_:
    std::atomic<bool> closed = false;        // also read without
    std::deque<std::vector<std::byte>> out;  // not more is read while it is full
    std::deque<Packet> questions;
    unsigned pending = 0;       // of questions and looks, not answered
    bool asking = false;        // a worker has one of them, or will
    bool missed_ports = false;  // a PORTS had no room: all are told once there is
  };
  using SessionRef = std::shared_ptr<Session>;
  /// OUTSIDE
  struct Look {
    SessionRef s;
    Packet p;
    Clock::time_point deadline;
  };

  void run();
  void work();
  void look();
  /// @return false: the connection ends
  bool read_one(const SessionRef& s);
  bool handle(const SessionRef& s, Packet& p);
  /// For another thread to answer. EBUSY: too many are.
  Status queue(const SessionRef& s, Packet& p);
  bool greet(const SessionRef& s, const Packet& p);
  void answer_question(const SessionRef& s, const Packet& p);
  static Status see_outside(const Look& l);
  std::deque<Look>::iterator next_look_locked();
  void reply(const SessionRef& s, const migr_links_msg& to, const Status& status, std::uint64_t arg = 0, const void* records = nullptr,
             std::size_t count = 0, std::size_t record_size = 0, const std::string& text = {});
  void push(const SessionRef& s, std::uint16_t type, const void* records, std::size_t count, std::size_t record_size);
  void push_ports(const SessionRef& s);
  void send_locked(Session& s, std::vector<std::byte> packet);
  void flush_locked(Session& s);
  void end(const SessionRef& s, const char* why);
  std::vector<SessionRef> all() const;

  LinkTable& table_;
  LinkDirectory& directory_;
  const Ports ports_;
  MayHave may_have_;
  const std::string file_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(MIGR_LINKS_PACKET_BYTES + 1);  // of run(), to see what is too long
  Listener listener_;
  Fd wake_;
  std::size_t most_ = 0;  // connections
  std::thread thread_;
  std::vector<std::thread> workers_;
  mutable std::mutex mutex_;
  std::condition_variable ready_changed_, looks_changed_;
  bool stop_ = false;
  SaidRarely rarely_;
  std::vector<SessionRef> sessions_;
  std::deque<SessionRef> ready_;  // with questions, for a worker
  std::deque<Look> looks_;        // that nobody has begun
  std::vector<SessionRef> looked_at_;
};

}  // namespace migr
