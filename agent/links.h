// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The coordinator's links to the other roles, over gRPC.
#pragma once

#include "coordinator.h"
#include "peer_link.h"

namespace migr {

/// Ends of the host that `host` leads to, which has to live longer.
std::unique_ptr<PathTrial> trial_of_peer(wire::Host::Stub& host, const std::string& name);

class RpcDestination final : public DestinationLink {
 public:
  /// @param bundle  where the bundle is taken from; empty: where it will be
  RpcDestination(std::shared_ptr<grpc::Channel> c, std::string name, std::string bundle = {})
      : stub_(c), host_(c), name_(std::move(name)), bundle_(std::move(bundle)) {}
  Status check(const wire::CheckRequest& r) override;
  Result<wire::PrepareReply> prepare(const wire::PrepareHeader& h, const std::string& folder, Sent& total) override;
  Result<wire::PrepareReply> create(std::uint32_t id) override;
  Status connect(const wire::ConnectRequest& r) override;
  std::unique_ptr<PathTrial> path_trial() override;
  Status upload(std::uint32_t id, const std::string& folder, unsigned pre_copy_round, const Written& written, Sent& total) override;
  bool bundle_changes() const override { return !root_.empty(); }
  Status upload_changes(std::uint32_t id, Sent& total) override;
  Status attach_network(std::uint32_t id) override;
  Status full_restore(std::uint32_t id) override;
  Status ready(std::uint32_t id) override;
  Status commit(std::uint32_t id) override;
  Result<wire::CommitReply> rebind(std::uint32_t id) override;
  Result<wire::ResumeReply> resume(std::uint32_t id) override;
  Status abort(std::uint32_t id) override;
  Result<wire::Outcome> outcome(std::uint32_t id) override;
  Status renew(std::uint32_t id) override;

 private:
  wire::Destination::Stub stub_;
  wire::Host::Stub host_;
  const std::string name_, bundle_;
  std::size_t qps_ = 0;                          // of what goes there
  std::string at_, root_;                        // the bundle that a container runs in, or will, and of it what that may write to
  bool shared_ = false;                          // it is there already, for it is the same one
  SentFiles sent_;                               // of the bundle
  std::map<std::string, wire::TreeName> names_;  // of what is stored, in that root when it stood still
};

class RpcPartner final : public PartnerLink {
 public:
  RpcPartner(std::shared_ptr<grpc::Channel> c, std::string name) : stub_(c), host_(c), name_(std::move(name)) {}
  const std::string& name() const override { return name_; }
  Result<wire::FindReply> find(const wire::FindRequest& r) override;
  Result<wire::PartnerPrepareReply> prepare(const wire::PartnerPrepareRequest& r) override;
  Result<wire::PartnerPrepareReply> create(std::uint32_t id) override;
  Status connect(const wire::ConnectRequest& r) override;
  std::unique_ptr<PathTrial> path_trial() override;
  Status suspend(std::uint32_t id) override;
  Result<wire::TrackReply> track(std::uint32_t id) override;
  Result<wire::DrainReply> drain(std::uint32_t id, int limit_ms) override;
  Result<wire::CutReply> cut(const wire::CutRequest& r) override;
  Result<wire::SettleReply> settle(const wire::SettleRequest& r) override;
  Status switch_path(std::uint32_t id) override;
  Result<wire::KeysReply> keys(const wire::KeysRequest& r) override;
  Result<wire::ResumeReply> resume(std::uint32_t id) override;
  Status old_path(std::uint32_t id) override;
  Status rollback(std::uint32_t id) override;
  Status renew(std::uint32_t id) override;
  Result<wire::TrafficReply> traffic(std::uint32_t back_ms) override;

 private:
  wire::Partner::Stub stub_;
  wire::Host::Stub host_;
  const std::string name_;
  std::size_t qps_ = 0;  // that it was asked for
};

}  // namespace migr
