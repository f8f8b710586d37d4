// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which peer may do what here. TLS says who a peer is, "allow" in migrd.json what it may (config.h); each call of a peer is
// looked at before its service sees it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/auth_metadata_processor.h>

#include <set>
#include <span>
#include <string>
#include <vector>

#include "config.h"
#include "log.h"
#include "status.h"

namespace migr {

/// What a call needs; a call that has no entry is none of ours.
struct GuardedCall {
  const char* method;  // as gRPC names it: "/migr.wire.Host/Version"
  Right right;
};
std::span<const GuardedCall> guarded_calls();

/// Who calls: this host itself, over a channel within the process, or a peer by the names in its certificate.
class Caller {
 public:
  /// @param context  of a connection; one that is not authenticated is our own: no other can be made without a certificate
  Caller(const grpc::AuthContext& context, const Config& config);
  Caller(const grpc::ServerContext& context, const Config& config) : Caller(*context.auth_context(), config) {}
  bool is(const std::string& host) const { return names_.contains(host); }
  /// As the configuration has it, else the first in the certificate.
  const std::string& name() const { return name_; }
  /// Whether it is this host, or among its peers.
  bool known() const { return known_; }

 private:
  std::set<std::string> names_;
  std::string name_;
  bool known_ = false;
};

/// For what is logged about a call: who calls, and for which migration.
/// @param migration  0: that is not in the message, but the caller may have named it (name_migration() in peer_link.h)
LogFields log_fields_of(const grpc::ServerContext& ctx, const Config& config, std::uint32_t migration = 0);

/// EPERM, with the key of migrd.json that says so. This host itself may all.
/// @param container  empty: any
Status may(const Config& config, const Caller& who, Right right, const std::string& container = {});
/// The same for a host that does not call, but something is to go there.
Status may_take(const Config& config, const std::string& to, const std::string& container);
/// EPERM: a migration is carried on by the host that has begun it.
Status coordinates(const Caller& who, std::uint32_t migration, const std::string& source);

/// In front of all services for peers. What is refused is logged, the same not more often than once a minute.
class Guard final : public grpc::AuthMetadataProcessor {
 public:
  explicit Guard(const Config& config) : config_(config) {}
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  const Config& config_;
  SaidRarely said_;
};

}  // namespace migr
