// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrctl asks of its own migrd.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "failover/link_directory.h"
#include "failover/port_watch.h"
#include "history.h"
#include "host_service.h"

namespace migr {

class ControlService final : public wire::Control::Service {
 public:
  using Say = std::function<void(const wire::Progress&)>;
  template <class Request>
  using Do = std::function<wire::Summary(const Request&, const Say&)>;
  struct Work {
    std::function<wire::PlanReply(const wire::MigrateRequest&)> plan;
    Do<wire::MigrateRequest> migrate;
    Do<wire::CheckpointRequest> checkpoint;
    Do<wire::RestoreRequest> restore;
    std::function<Result<wire::ReloadReply>()> reload;
  };

  /// What migrctl links shows and orders.
  struct LinkParts {
    LinkTable& table;
    const LinkDirectory& directory;
    PortWatch& ports;
  };

  ControlService(migr::Peers& peers, SessionTable& sessions, Work work, std::vector<Role*> roles, LinkParts links, History& history,
                 const Certificates* certificates = nullptr)
      : peers_(peers), sessions_(sessions), work_(std::move(work)), roles_(std::move(roles)), links_(links), history_(history), certificates_(certificates) {}
  grpc::Status Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) override;
  grpc::Status Peers(grpc::ServerContext*, const wire::Empty*, wire::PeersReply* out) override;
  grpc::Status Recover(grpc::ServerContext*, const wire::RecoverRequest*, wire::RecoverReply*) override;
  grpc::Status Plan(grpc::ServerContext*, const wire::MigrateRequest*, wire::PlanReply*) override;
  grpc::Status Migrate(grpc::ServerContext*, const wire::MigrateRequest*, grpc::ServerWriter<wire::Progress>*) override;
  grpc::Status Checkpoint(grpc::ServerContext*, const wire::CheckpointRequest*, grpc::ServerWriter<wire::Progress>*) override;
  grpc::Status Restore(grpc::ServerContext*, const wire::RestoreRequest*, grpc::ServerWriter<wire::Progress>*) override;
  grpc::Status Links(grpc::ServerContext*, const wire::LinksRequest*, wire::LinksReply*) override;
  grpc::Status Cancel(grpc::ServerContext*, const wire::CancelRequest*, wire::CancelReply*) override;
  grpc::Status Reload(grpc::ServerContext*, const wire::Empty*, wire::ReloadReply*) override;
  grpc::Status SetLink(grpc::ServerContext*, const wire::LinkOrder*, wire::LinkOrderReply*) override;

 private:
  migr::Peers& peers_;
  SessionTable& sessions_;
  const Work work_;
  const std::vector<Role*> roles_;
  const LinkParts links_;
  History& history_;
  const Certificates* const certificates_;
};

/// A service on a socket that root alone can open, by its mode; whatever becomes of that, the kernel says who has connected, and
/// another user's connection is closed before a byte of it is read.
class RootServer {
 public:
  /// @param listener  is its own from now on, as is the file at `path`, which goes with it
  RootServer(Fd listener, std::string path, std::unique_ptr<grpc::Server> server);
  ~RootServer();
  /// Waits until then for calls that are under way.
  void shutdown(std::chrono::system_clock::time_point until) { server_->Shutdown(until); }

 private:
  void let_in();
  const Fd listener_;
  const std::string path_;
  const std::unique_ptr<grpc::Server> server_;
  std::thread thread_;
};

/// What was there goes.
Result<std::unique_ptr<RootServer>> serve_root(const std::string& path, grpc::Service& service);

}  // namespace migr
