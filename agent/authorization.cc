// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "authorization.h"

#include <fnmatch.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "peer_link.h"

namespace migr {
namespace {

constexpr GuardedCall kCalls[] = {
    {"/migr.wire.Host/Version", Right::kPeer},
    {"/migr.wire.Host/Facts", Right::kRead},
    // Hosts find out by these how a migration ended, also one that they were allowed before the configuration was changed.
    {"/migr.wire.Host/GetOutcome", Right::kPeer},
    {"/migr.wire.Host/Renew", Right::kPeer},
    {"/migr.wire.Host/Release", Right::kPeer},
    {"/migr.wire.Host/TryPaths", Right::kPeer},
    {"/migr.wire.Host/Traffic", Right::kPartner},
    {"/migr.wire.Partner/Find", Right::kPartner},
    {"/migr.wire.Partner/Prepare", Right::kPartner},
    {"/migr.wire.Partner/Create", Right::kPartner},
    {"/migr.wire.Partner/Connect", Right::kPartner},
    {"/migr.wire.Partner/Suspend", Right::kPartner},
    {"/migr.wire.Partner/Drain", Right::kPartner},
    {"/migr.wire.Partner/Track", Right::kPartner},
    {"/migr.wire.Partner/Cut", Right::kPartner},
    {"/migr.wire.Partner/Settle", Right::kPartner},
    {"/migr.wire.Partner/Switch", Right::kPartner},
    {"/migr.wire.Partner/Keys", Right::kPartner},
    {"/migr.wire.Partner/Resume", Right::kPartner},
    {"/migr.wire.Partner/OldPath", Right::kPartner},
    {"/migr.wire.Partner/Rollback", Right::kPartner},
    {"/migr.wire.Partner/Moves", Right::kPartner},
    {"/migr.wire.Partner/Where", Right::kPartner},
    {"/migr.wire.Partner/Introduce", Right::kPartner},
    {"/migr.wire.Destination/Check", Right::kToHere},
    {"/migr.wire.Destination/Prepare", Right::kToHere},
    {"/migr.wire.Destination/Create", Right::kToHere},
    {"/migr.wire.Destination/Connect", Right::kToHere},
    {"/migr.wire.Destination/Upload", Right::kToHere},
    {"/migr.wire.Destination/UploadChanges", Right::kToHere},
    {"/migr.wire.Destination/AttachNetwork", Right::kToHere},
    {"/migr.wire.Destination/FullRestore", Right::kToHere},
    {"/migr.wire.Destination/Ready", Right::kToHere},
    {"/migr.wire.Destination/Commit", Right::kToHere},
    {"/migr.wire.Destination/Rebind", Right::kToHere},
    {"/migr.wire.Destination/Resume", Right::kToHere},
    {"/migr.wire.Destination/Abort", Right::kToHere},
    {"/migr.wire.Links/Lookup", Right::kPartner},
    {"/migr.wire.Links/Channel", Right::kPartner},
};

bool fits(const std::string& pattern, const std::string& name) { return fnmatch(pattern.c_str(), name.c_str(), 0) == 0; }

bool allows(const AllowRule& rule, const std::string& peer, const std::string& container) {
  if (!fits(rule.peer, peer)) return false;
  return container.empty() || rule.containers.empty() ||
         std::any_of(rule.containers.begin(), rule.containers.end(), [&](const std::string& c) { return fits(c, container); });
}

bool allowed(const Config& config, Right right, const std::string& peer, const std::string& container) {
  const auto hosts = config.hosts.now();
  const auto rules = hosts->allow.find(right);
  return rules == hosts->allow.end() ||
         std::any_of(rules->second.begin(), rules->second.end(), [&](const AllowRule& r) { return allows(r, peer, container); });
}

const char* what_is(Right right) {
  switch (right) {
    case Right::kToHere: return "move anything to here";
    case Right::kFromHere: return "take anything from here";
    case Right::kPartner: return "switch connections of processes here";
    default: return "ask for facts of this host";
  }
}

Error refusal(const Config& config, Right right, const std::string& peer, const std::string& container) {
  std::string what = what_is(right);
  if (!container.empty()) what.replace(what.find("anything"), 8, "'" + container + "'");
  return Error{EPERM, peer + " may not " + what + ": see \"allow\": {\"" + key_of(right) + "\": ..} in migrd.json of " + config.name};
}

}  // namespace

std::span<const GuardedCall> guarded_calls() { return kCalls; }

Caller::Caller(const grpc::AuthContext& context, const Config& config) {
  if (!context.IsPeerAuthenticated()) {
    names_ = {config.name};
  } else {
    for (const auto& n : context.GetPeerIdentity()) names_.emplace(n.data(), n.size());
  }
  const auto named = [&](const std::string& n) {
    if (known_ || !is(n)) return;
    known_ = true;
    name_ = n;
  };
  named(config.name);
  for (const auto& p : config.peers()) named(p.name);
  if (!known_) name_ = names_.empty() ? "a host without a name" : *names_.begin();
}

LogFields log_fields_of(const grpc::ServerContext& ctx, const Config& config, std::uint32_t migration) {
  return {migration ? migration : named_migration(ctx.client_metadata()), Caller(ctx, config).name(), {}, {}};
}

Status may(const Config& config, const Caller& who, Right right, const std::string& container) {
  if (who.is(config.name)) return {};
  if (!who.known()) return Error{EPERM, who.name() + " is none of the \"peers\" in migrd.json of " + config.name};
  if (right == Right::kPeer || allowed(config, right, who.name(), container)) return {};
  return refusal(config, right, who.name(), container);
}

Status may_take(const Config& config, const std::string& to, const std::string& container) {
  if (to == config.name || allowed(config, Right::kFromHere, to, container)) return {};
  return refusal(config, Right::kFromHere, to, container);
}

Status coordinates(const Caller& who, std::uint32_t migration, const std::string& source) {
  if (who.is(source)) return {};
  const Error e{EPERM, "migration " + migration_text(migration) + " is of " + source + ", and not of " + who.name()};
  spdlog::warn("refused: {}", e.text);
  return e;
}

grpc::Status Guard::Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*, OutputMetadata*) {
  const auto path = metadata.find(":path");
  const std::string method = path == metadata.end() ? "" : std::string(path->second.data(), path->second.size());
  const auto call = std::find_if(std::begin(kCalls), std::end(kCalls), [&](const GuardedCall& c) { return method == c.method; });
  // As gRPC says it: a peer of another release understands that.
  if (call == std::end(kCalls)) return {grpc::StatusCode::UNIMPLEMENTED, "this migrd does not know " + method};
  const Caller who(*context, config_);
  const Status s = may(config_, who, call->right);
  if (s) return grpc::Status::OK;
  LogScope log(named_migration(metadata));
  log->peer = who.name();
  // Of each migration once; but a stranger does not fill the log with numbers that it makes up.
  if (said_.due(who.name() + method + (who.known() ? migration_text(log->migration) : ""))) spdlog::warn("refused {}: {}", method, s.error().text);
  return to_grpc(s);
}

}  // namespace migr
