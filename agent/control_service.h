// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrctl asks of its own migrd.
#pragma once

#include <functional>

#include "host_service.h"

namespace migr {

class ControlService final : public wire::Control::Service {
 public:
  using Say = std::function<void(const wire::Progress&)>;
  template <class Request>
  using Do = std::function<wire::Summary(const Request&, const Say&)>;
  struct Work {
    Do<wire::MigrateRequest> migrate;
    Do<wire::CheckpointRequest> checkpoint;
    Do<wire::RestoreRequest> restore;
  };

  ControlService(migr::Peers& peers, SessionTable& sessions, Work work, std::vector<Role*> roles)
      : peers_(peers), sessions_(sessions), work_(std::move(work)), roles_(std::move(roles)) {}
  grpc::Status Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) override;
  grpc::Status Peers(grpc::ServerContext*, const wire::Empty*, wire::PeersReply* out) override;
  grpc::Status Sessions(grpc::ServerContext*, const wire::Empty*, wire::SessionsReply* out) override;
  grpc::Status Recover(grpc::ServerContext*, const wire::RecoverRequest*, wire::RecoverReply*) override;
  grpc::Status Migrate(grpc::ServerContext*, const wire::MigrateRequest*, grpc::ServerWriter<wire::Progress>*) override;
  grpc::Status Checkpoint(grpc::ServerContext*, const wire::CheckpointRequest*, grpc::ServerWriter<wire::Progress>*) override;
  grpc::Status Restore(grpc::ServerContext*, const wire::RestoreRequest*, grpc::ServerWriter<wire::Progress>*) override;

 private:
  migr::Peers& peers_;
  SessionTable& sessions_;
  const Work work_;
  const std::vector<Role*> roles_;
};

}  // namespace migr
