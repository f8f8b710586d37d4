// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The directory in a Redis server, for clusters that have one: migrds need not know each other then.
//
// Keys, each with the configured prefix; INSTANCE and GID in hex:
//   p:INSTANCE        hash of a process: h its host, l its links (LinkProcess), vGID:VQPN its vQPs (LinkVqp),
//                     cINSTANCE:LINK its ends of channels (LinkChannel). Expires in 30 s unless its migrd refreshes it
//   n:GID:VQPN        the instance that has the name; in an hour
//   g:GID             the host that has the GID; in 30 s
//   k:HOST            list of ends that a process there has to be told of (KNOCK); in 30 s
// What processes tell is written behind their backs, by one thread; a server that comes back is told everything again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <set>
#include <thread>
#include <tuple>

#include "../config.h"
#include "link_directory.h"

struct redisContext;

namespace migr {

/// One connection; made when it is needed. Thread: one at a time.
class RedisConnection {
 public:
  explicit RedisConnection(const RedisConfig& config) : config_(config) {}
  struct Value {
    enum Kind { kNone, kText, kNumber, kList } kind = kNone;
    std::string text;
    long long number = 0;
    std::vector<Value> list;
  };
  using Command = std::vector<std::string>;
  /// All in one go. EHOSTUNREACH: any of them failed; what was done is not known then.
  Result<std::vector<Value>> run(const std::vector<Command>& commands);

 private:
  struct Free {
    void operator()(redisContext* c) const;
  };
  Status connect();
  Error fail(const std::string& what);

  const RedisConfig& config_;
  std::unique_ptr<redisContext, Free> context_;
};

class RedisDirectory final : public LinkDirectory, public LinkWatcher {
 public:
  struct Times {
    std::chrono::milliseconds expiry{30'000}, refresh{10'000}, names{3'600'000}, again{1'000};
  };
  /// @param gids  of this host's devices
  /// @param knock  as LinkTable's, for processes here
  RedisDirectory(const RedisConfig& config, std::string host, LinkTable& table, LinkTable::Gids gids, LinkTable::Knock knock);
  RedisDirectory(const RedisConfig& config, std::string host, LinkTable& table, LinkTable::Gids gids, LinkTable::Knock knock, Times times);
  ~RedisDirectory() override;
  void start();
  /// What this host's processes have told is taken out, if the server answers.
  void stop();

  std::string name() const override { return "redis at " + config_.address; }
  std::string error() const override;

  void process_changed(const Instance& who) override;
  void vqp_changed(const Instance& who, const VqpName& name) override;
  void channel_changed(const Instance& who, const Instance& peer, std::uint32_t link) override;

 private:
  using Clock = std::chrono::steady_clock;
  using Command = RedisConnection::Command;
  using Value = RedisConnection::Value;
  struct Dirty {
    std::set<Instance> left;  // what is there of them is of a former connection
    std::set<Instance> processes;
    std::set<std::pair<Instance, VqpName>> vqps;
    std::set<std::tuple<Instance, Instance, std::uint32_t>> channels;
    bool empty() const { return left.empty() && processes.empty() && vqps.empty() && channels.empty(); }
  };
  std::vector<Answer> find_elsewhere(std::span<const VqpName> names) override;
  std::vector<End> meet_elsewhere(std::span<const wire::LinkChannel> ends) override;
  Result<std::vector<Value>> ask(const std::vector<Command>& commands);
  void write();
  void listen();
  Status write_some(Dirty& dirty);
  Status refresh();
  void dirty_all();
  void note(const Status& s);
  std::string key(const char* kind, const std::string& what) const { return config_.prefix + kind + what; }
  std::string seconds(std::chrono::milliseconds ms) const { return std::to_string(std::max<long long>(ms.count() / 1000, 1)); }

  const RedisConfig config_;
  const std::string host_;
  const LinkTable::Gids gids_;
  const LinkTable::Knock knock_;
  const Times times_;

  std::mutex asking_;
  RedisConnection asker_;
  Clock::time_point silent_until_{};
  Error silence_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false, too_many_ = false;
  Dirty dirty_;
  std::string error_;
  RedisConnection writer_, listener_;
  std::thread write_thread_, listen_thread_;
};

}  // namespace migr
