// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// This host as a partner: service Partner of wire.proto.
#pragma once

#include <functional>
#include <memory>

#include "claims.h"
#include "config.h"
#include "directory.h"
#include "fault.h"
#include "host_service.h"
#include "journal.h"
#include "lease.h"
#include "peer_link.h"
#include "process_session.h"
#include "whereabouts.h"

namespace migr {

class PartnerHost final : public wire::Partner::Service, public Role {
 public:
  /// Takes up what an earlier migrd has left in the middle.
  PartnerHost(const Config& config, SessionTable& sessions, Peers& peers, Claims& claims, std::shared_ptr<Directory> directory, Whereabouts& whereabouts);

  grpc::Status Find(grpc::ServerContext*, const wire::FindRequest*, wire::FindReply*) override;
  grpc::Status Prepare(grpc::ServerContext*, const wire::PartnerPrepareRequest*, wire::PartnerPrepareReply*) override;
  grpc::Status Create(grpc::ServerContext*, const wire::Migration*, wire::PartnerPrepareReply*) override;
  grpc::Status Connect(grpc::ServerContext*, const wire::ConnectRequest*, wire::Empty*) override;
  grpc::Status Track(grpc::ServerContext*, const wire::Migration*, wire::TrackReply*) override;
  grpc::Status Suspend(grpc::ServerContext*, const wire::LimitedRequest*, wire::Empty*) override;
  grpc::Status Drain(grpc::ServerContext*, const wire::LimitedRequest*, wire::DrainReply*) override;
  grpc::Status Cut(grpc::ServerContext*, const wire::CutRequest*, wire::CutReply*) override;
  grpc::Status Settle(grpc::ServerContext*, const wire::SettleRequest*, wire::SettleReply*) override;
  grpc::Status Switch(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;
  grpc::Status Keys(grpc::ServerContext*, const wire::KeysRequest*, wire::KeysReply*) override;
  grpc::Status Resume(grpc::ServerContext*, const wire::Migration*, wire::ResumeReply*) override;
  grpc::Status OldPath(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;
  grpc::Status Rollback(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;
  grpc::Status Moves(grpc::ServerContext*, const wire::MovesRequest*, wire::Empty*) override;
  grpc::Status Where(grpc::ServerContext*, const wire::WhereRequest*, wire::WhereReply*) override;
  grpc::Status Introduce(grpc::ServerContext*, const wire::IntroduceRequest*, wire::Empty*) override;

  wire::OutcomeReply outcome(std::uint32_t) override { return {}; }  // others are asked
  Status renew(std::uint32_t id, const Caller& who) override;
  void tick() override;
  bool claims(const Instance& i) override { return claims_.holder(i); }
  std::vector<wire::OpenMigration> open_migrations() override;
  Status order(std::uint32_t id, wire::Outcome outcome, bool force) override;
  /// As a destination.
  bool end() { return jobs_.end(); }

 private:
  struct Process;
  struct Job;
  using JobPtr = std::shared_ptr<Job>;
  Result<JobPtr> job_of(const wire::PartnerPrepareRequest& r);
  Result<std::shared_ptr<ProcessSession>> session_of(const Process& p) const;
  Status each(Job& job, const std::function<Status(Process&, ProcessSession&)>& f);
  Status each_left(Job& job, const std::function<Status(Process&, ProcessSession&)>& f);
  Status save(Job& job);
  void end(Job& job, wire::Outcome outcome);
  grpc::Status step(const grpc::ServerContext& ctx, std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work);
  // Nothing of the way there begins any more.
  grpc::Status step_back(const grpc::ServerContext& ctx, std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work);
  Status create(Job& job, wire::PartnerPrepareReply& out);
  Status keys(Job& job, const std::vector<wire::ProcessKeys>& keys);
  Status resume(Job& job, wire::ResumeReply& out);
  Status old_path(Job& job);
  Status rollback(Job& job);
  void left_alone(const JobPtr& job);

  const Config& config_;
  SessionTable& sessions_;
  Peers& peers_;
  Claims& claims_;
  const std::shared_ptr<Directory> directory_;
  Whereabouts& whereabouts_;
  const Journal<journal::Partner> journal_;
  LeasedJobs<Job> jobs_;
};

}  // namespace migr
