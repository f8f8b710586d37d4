// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Channels to the peers: mutual TLS, keepalive so that a dead host is noticed in
// seconds, a deadline on every call.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <mutex>

#include "certificates.h"
#include "config.h"
#include "limits.h"
#include "status.h"
#include "wire.grpc.pb.h"

namespace migr {

/// Thread: any.
class Peers {
 public:
  Peers(const Config& config, const pki::Files& files) : config_(config), fixed_{files} {}
  /// @param certificates  new channels are made with what is in use then; those that somebody holds go on. Lives longer
  Peers(const Config& config, const Certificates& certificates) : config_(config), certificates_(&certificates) {}
  /// ENOENT: no peer of that name in the configuration.
  Result<std::shared_ptr<grpc::Channel>> channel(const std::string& name);
  /// To our own services, once they are there: this host may be a partner, too.
  void set_self(std::shared_ptr<grpc::Channel> channel);
  const Config& config() const { return config_; }
  /// With a Guard (authorization.h) in front of whatever is served.
  std::shared_ptr<grpc::ServerCredentials> server_credentials() const;

 private:
  const Config& config_;
  const Certificates::InUse fixed_;
  const Certificates* const certificates_ = nullptr;
  std::mutex mutex_;
  struct Made {
    std::shared_ptr<grpc::Channel> channel;
    unsigned number;  // of the certificate
    std::string address;
  };
  std::map<std::string, Made> channels_;
  std::shared_ptr<grpc::Channel> self_;
};

/// Both directions between errno and gRPC codes; `host` goes before the text.
/// @param advice  on the limit of the call (limits.h); empty: which it was is not known
Status from_grpc(const grpc::Status& s, const std::string& host, const std::string& advice = {});
grpc::Status to_grpc(const Status& s);

void set_deadline(grpc::ClientContext& ctx, int ms);
/// Says for which migration a call is, if the caller's lines in the log belong to one (log.h): those of the other host, also of a
/// message that has no such field, and what is refused before it is read, then have the same number.
void name_migration(grpc::ClientContext& ctx);
/// What name_migration() has said. 0: nothing, or nothing that it says
std::uint32_t named_migration(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);
void set_keepalive(grpc::ServerBuilder& b);

/// Images come in large messages, and the sender shall not wait for room after each: gRPC begins with 64 KiB. Of answers it
/// takes 4 MiB.
void set_bulk(grpc::ServerBuilder& b);
void set_bulk(grpc::ChannelArguments& a);

/// One unary call: call(stub, &Stub::Method, request, limit).
template <class Stub, class Req, class Rep>
Result<Rep> call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Req&, Rep*), const Req& request,
                 const int& limit_ms, const std::string& host) {
  grpc::ClientContext ctx;
  set_deadline(ctx, limit_ms);
  name_migration(ctx);
  Rep reply;
  if (auto s = from_grpc((stub.*method)(&ctx, request, &reply), host, advice_on(limit_ms)); !s) return s.error();
  return reply;
}

}  // namespace migr
