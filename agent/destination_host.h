// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// This host as the destination: service Destination of wire.proto.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>

#include "claims.h"
#include "config.h"
#include "fault.h"
#include "host_service.h"
#include "journal.h"
#include "lease.h"
#include "numbers.h"
#include "peer_link.h"
#include "process_session.h"
#include "runtime.h"

namespace migr {

class DestinationHost final : public wire::Destination::Service, public Role {
 public:
  /// Takes up what an earlier migrd has left in the middle: undoes what cannot have been committed, finishes the rest.
  DestinationHost(const Config& config, SessionTable& sessions, Peers& peers, Claims& claims, Numbers& numbers);
  ~DestinationHost() override;

  grpc::Status Check(grpc::ServerContext*, const wire::CheckRequest*, wire::CheckReply*) override;
  grpc::Status Prepare(grpc::ServerContext*, grpc::ServerReader<wire::PrepareChunk>*, wire::PrepareReply*) override;
  grpc::Status Create(grpc::ServerContext*, const wire::Migration*, wire::PrepareReply*) override;
  grpc::Status Connect(grpc::ServerContext*, const wire::ConnectRequest*, wire::Empty*) override;
  grpc::Status Upload(grpc::ServerContext*, grpc::ServerReader<wire::UploadChunk>*, wire::UploadReply*) override;
  grpc::Status UploadChanges(grpc::ServerContext*, grpc::ServerReader<wire::ChangesChunk>*, wire::UploadReply*) override;
  grpc::Status AttachNetwork(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;
  grpc::Status FullRestore(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;
  grpc::Status Ready(grpc::ServerContext*, const wire::Migration*, wire::ReadyReply*) override;
  grpc::Status Commit(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;
  grpc::Status Rebind(grpc::ServerContext*, const wire::Migration*, wire::CommitReply*) override;
  grpc::Status Resume(grpc::ServerContext*, const wire::Migration*, wire::ResumeReply*) override;
  grpc::Status Abort(grpc::ServerContext*, const wire::Migration*, wire::Empty*) override;

  wire::OutcomeReply outcome(std::uint32_t id) override;
  Status readable(std::uint32_t id) override;
  bool has_part(std::uint32_t id, const Caller& who) override;
  Status renew(std::uint32_t id, const Caller& who) override;
  void tick() override;
  bool claims(const Instance& i) override;
  /// It has come here, and its network is still being opened.
  bool opens_network(const std::string& container) const;
  /// A process that has come here, and connects when the others go on already. True once: who asks has to take_in() it
  bool comes_late(const ProcessSession& s);
  /// Whether a process is of the container that has come here with this instance, or comes, as long as it waits for it. nullopt: nobody
  /// waits, or it cannot be told yet
  std::optional<bool> brings(const Instance& i, pid_t pid) const;
  std::vector<wire::OpenMigration> open_migrations() override;
  Status order(std::uint32_t id, wire::Outcome outcome, bool force) override;

  /// Undoes what is open; committed containers go on.
  void shutdown();
  /// Asks nobody any more. When nobody calls, and before what it calls goes. @return false: it goes on, in a call that takes longer
  bool end();

 private:
  struct Job;
  using JobPtr = std::shared_ptr<Job>;
  static Result<JobPtr> job_of(const wire::PrepareHeader& h, const std::string& state_dir);
  void take_up(const JobPtr& job);
  std::vector<pid_t> end_restore(Job& job);
  Status save(Job& job);
  bool is_here(const Job& job) const;
  bool is_anothers(Job& job) const;
  Status start_restore(Job& job);
  Status create(Job& job, wire::PrepareReply& out);
  Status attach_network(Job& job);
  void open_network(Job& job, const std::string& verb);
  Status commit(Job& job);
  void go_on(Job& job);
  static std::vector<migr_handle_map> handles_of(const Job& job, std::size_t i);
  Status rebind(Job& job);
  Result<SessionTable::Fits> of_container(const Job& job);
  Result<std::shared_ptr<ProcessSession>> session_of(const Job& job, std::size_t i, const SessionTable::Fits& fits);
  static std::set<std::uint32_t> contexts_of(const Job& job, std::size_t i);
  bool has_ended(const Job& job, std::size_t i) const;
  bool ran_after_all(Job& job) const;
  void hold(const Job& job);
  void tell_moves(const Job& job, bool datagrams);
  Status resume(Job& job);
  void settle(Job& job);
  Status abort(Job& job, const std::string& why);
  Status tidy_up(Job& job);
  Status nothing_comes(const std::string& container, const Job* but) const;
  Status bundle_is_free(const std::string& bundle, const Job* but, bool asking = false) const;
  void left_alone(const JobPtr& job);
  grpc::Status step(const grpc::ServerContext& ctx, std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work);
  Status with_log(Job& job, const Status& s);
  void keep_logs(const Job& job) const;

  const Config& config_;
  SessionTable& sessions_;
  Peers& peers_;
  Claims& claims_;
  Numbers& numbers_;
  const Runtime runc_;
  const Journal<journal::Destination> journal_;
  std::atomic<bool> ends_ = false;  // no retries any more
  LeasedJobs<Job> jobs_;
};

}  // namespace migr
