// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "peer_link.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include "authorization.h"
#include "log.h"

namespace migr {
namespace {

constexpr char kMigrationKey[] = "migr-migration";  // of a call's metadata
constexpr int kKeepaliveMs = 4'000, kKeepaliveTimeoutMs = 12'000;

struct Pair {
  grpc::StatusCode code;
  int err;
};
constexpr Pair kCodes[] = {
    {grpc::StatusCode::FAILED_PRECONDITION, EBUSY}, {grpc::StatusCode::NOT_FOUND, ENOENT},
    {grpc::StatusCode::ALREADY_EXISTS, EEXIST},     {grpc::StatusCode::INVALID_ARGUMENT, EINVAL},
    {grpc::StatusCode::ABORTED, ECANCELED},         {grpc::StatusCode::DEADLINE_EXCEEDED, ETIMEDOUT},
    {grpc::StatusCode::UNAVAILABLE, EHOSTUNREACH},  {grpc::StatusCode::PERMISSION_DENIED, EPERM},
    {grpc::StatusCode::UNIMPLEMENTED, EPROTONOSUPPORT},
    {grpc::StatusCode::RESOURCE_EXHAUSTED, ENOSPC}, {grpc::StatusCode::OUT_OF_RANGE, EAGAIN}};

}  // namespace

Status from_grpc(const grpc::Status& s, const std::string& host, const std::string& advice) {
  if (s.ok()) return {};
  int err = EIO;
  for (const auto& p : kCodes)
    if (p.code == s.error_code()) err = p.err;
  // gRPC's own words for it say nothing.
  const std::string late = "no answer within the limit for it" + (advice.empty() ? "; if it only needs longer: \"limits\" in migrd.json (migrd(8))" : advice);
  std::string text = err == ETIMEDOUT ? late : s.error_message();
  for (char& c : text)
    if (c == '\n') c = ' ';
  return Error{err, host + ": " + text};
}

grpc::Status to_grpc(const Status& s) {
  if (s) return grpc::Status::OK;
  // A limit that ran out *here* is an answer; it must not look like silence.
  if (s.error().code == ETIMEDOUT || s.error().code == EHOSTUNREACH) return {grpc::StatusCode::FAILED_PRECONDITION, s.error().text};
  for (const auto& p : kCodes)
    if (p.err == s.error().code) return {p.code, s.error().text};
  return {grpc::StatusCode::INTERNAL, s.error().text};
}

void set_deadline(grpc::ClientContext& ctx, int ms) {
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(ms));
}

void name_migration(grpc::ClientContext& ctx) {
  if (const auto id = log_fields().migration) ctx.AddMetadata(kMigrationKey, migration_text(id));
}

std::uint32_t named_migration(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  const auto m = metadata.find(kMigrationKey);
  if (m == metadata.end()) return 0;
  const std::string text(m->second.data(), m->second.size());
  const auto id = static_cast<std::uint32_t>(std::strtoul(text.c_str(), nullptr, 16));
  return migration_text(id) == text ? id : 0;
}

Result<std::shared_ptr<grpc::Channel>> Peers::channel(const std::string& name) {
  const auto p = config_.peer(name);
  if (!p) {
    std::lock_guard lock(mutex_);
    channels_.erase(name);
    if (self_ && name == config_.name) return self_;
    std::string known;
    for (const auto& k : config_.peers()) known += (known.empty() ? "" : ", ") + k.name;
    return Error{ENOENT, "no host '" + name + "' among the peers in the configuration (" + known + ")"};
  }
  // Not gRPC's own watching of files, as the server does: with it, now and then, a connection found no certificate.
  const auto in_use = certificates_ ? certificates_->in_use() : fixed_;
  std::lock_guard lock(mutex_);
  auto& [c, number, address] = channels_[name];
  if (!c || number != in_use.number || address != p->address) {
    grpc::ChannelArguments a;
    a.SetSslTargetNameOverride(name);  // the certificate names the host, whatever its address
    a.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
    a.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
    a.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    a.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    a.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
    a.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    set_bulk(a);
    number = in_use.number;
    address = p->address;
    c = grpc::CreateCustomChannel(p->address, grpc::SslCredentials({in_use.files.ca, in_use.files.key, in_use.files.cert}), a);
  }
  return c;
}

void Peers::set_self(std::shared_ptr<grpc::Channel> channel) {
  std::lock_guard lock(mutex_);
  self_ = std::move(channel);
}

std::shared_ptr<grpc::ServerCredentials> Peers::server_credentials() const {
  const auto certificate = certificates_ ? certificates_->provider() : fixed_certificate(fixed_.files);
  grpc::experimental::TlsServerCredentialsOptions o(certificate);
  o.set_certificate_provider(certificate);
  o.watch_root_certs();
  o.watch_identity_key_cert_pairs();
  o.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  auto credentials = grpc::experimental::TlsServerCredentials(o);
  credentials->SetAuthMetadataProcessor(std::make_shared<Guard>(config_));
  return credentials;
}

void set_keepalive(grpc::ServerBuilder& b) {
  b.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  b.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  b.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kKeepaliveMs / 2);
  b.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  b.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

// Keys of a million of regions, after the commit: as much as a process may answer. Only those who are allowed to call get so far.
void set_bulk(grpc::ChannelArguments& a) { a.SetMaxReceiveMessageSize(static_cast<int>(kAnswerBytes)); }

void set_bulk(grpc::ServerBuilder& b) {
  b.SetMaxReceiveMessageSize(static_cast<int>(kAnswerBytes));
  b.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 8 * static_cast<int>(kChunkBytes));
  b.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, static_cast<int>(kChunkBytes));
}

}  // namespace migr
