// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The directory that needs nothing but migrds: each knows its own processes, and asks the others. Which host has a GID,
// and which a process, is learnt from their answers.
#pragma once

#include <chrono>

#include "../peer_link.h"
#include "link_directory.h"

namespace migr {

class PeerDirectory final : public LinkDirectory {
 public:
  PeerDirectory(Peers& peers, LinkTable& table) : LinkDirectory(table), peers_(peers) {}
  std::string name() const override { return "peers"; }
  std::string error() const override;

 private:
  using Clock = std::chrono::steady_clock;
  std::vector<Answer> find_elsewhere(std::span<const VqpName> names) override;
  std::vector<End> meet_elsewhere(std::span<const wire::LinkChannel> ends) override;
  /// All at the same time, each with the limit; a host that was silent just now is not waited for.
  template <class Request, class Reply, class Start>
  std::map<std::string, Result<Reply>> ask(const std::map<std::string, Request>& requests, Start start);
  std::vector<std::string> others() const;
  std::string silence_text(const std::string& host, const grpc::Status& s) const;

  Peers& peers_;
  mutable std::mutex mutex_;
  std::map<Gid, std::string> homes_;
  std::map<Gid, Clock::time_point> all_asked_;
  std::map<Instance, std::string> where_;
  struct Silence {
    Clock::time_point until;
    Error error;
  };
  std::map<std::string, Silence> silent_;  // whose last call failed
};

/// What peers ask of this host.
class LinksService final : public wire::Links::Service {
 public:
  explicit LinksService(LinkTable& table) : table_(table) {}
  grpc::Status Lookup(grpc::ServerContext*, const wire::LinkLookupRequest* r, wire::LinkLookupReply* out) override;
  grpc::Status Channel(grpc::ServerContext*, const wire::LinkChannelRequest* r, wire::LinkChannelReply* out) override;

 private:
  LinkTable& table_;
};

}  // namespace migr
