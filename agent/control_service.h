// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrctl asks of its own migrd.
#pragma once

#include <functional>

#include "host_service.h"

namespace migr {

class ControlService final : public wire::Control::Service {
 public:
  using Say = std::function<void(const wire::Progress&)>;
  using DoMigrate = std::function<wire::Summary(const wire::MigrateRequest&, const Say&)>;

  ControlService(migr::Peers& peers, SessionTable& sessions, DoMigrate migrate)
      : peers_(peers), sessions_(sessions), migrate_(std::move(migrate)) {}
  grpc::Status Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) override;
  grpc::Status Peers(grpc::ServerContext*, const wire::Empty*, wire::PeersReply* out) override;
  grpc::Status Sessions(grpc::ServerContext*, const wire::Empty*, wire::SessionsReply* out) override;
  grpc::Status Migrate(grpc::ServerContext*, const wire::MigrateRequest*, grpc::ServerWriter<wire::Progress>*) override;

 private:
  migr::Peers& peers_;
  SessionTable& sessions_;
  const DoMigrate migrate_;
};

}  // namespace migr
