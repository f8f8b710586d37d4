// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "host_service.h"

#include <algorithm>

#include "facts.h"
#include "kernel_record.h"

namespace migr {

wire::VersionReply version_of(const Config& config, std::size_t sessions) {
  wire::VersionReply v;
  v.set_wire(kWireVersion);
  v.set_proc(MIGR_PROC_VERSION);
  v.set_release(kRelease);
  v.set_name(config.name);
  v.set_sessions(static_cast<std::uint32_t>(sessions));
  if (auto k = KernelRecord::open())
    if (auto i = k->info()) v.set_abi(i->abi);
  return v;
}

Status same_version(const char* what, std::uint32_t theirs, std::uint32_t ours) {
  if (theirs == ours) return {};
  return Error{EBUSY, std::string(what) + " version " + std::to_string(ours) + " here, " + std::to_string(theirs) + " there; install the same release on both hosts"};
}

grpc::Status HostService::Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) {
  *out = version_of(config_, sessions_.all().size());
  return grpc::Status::OK;
}

grpc::Status HostService::Facts(grpc::ServerContext*, const wire::FactsRequest* r, wire::HostFacts* out) {
  *out = facts_of(config_, version_of(config_, sessions_.all().size()), r->image_bytes());
  return grpc::Status::OK;
}

grpc::Status HostService::GetOutcome(grpc::ServerContext*, const wire::Migration* m, wire::OutcomeReply* out) {
  for (Role* r : roles_)
    if (*out = r->outcome(m->id()); out->outcome() != wire::UNKNOWN) break;
  return grpc::Status::OK;
}

grpc::Status HostService::Renew(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  bool known = false;
  for (Role* r : roles_) known |= bool(r->renew(m->id()));
  return known ? grpc::Status::OK : grpc::Status(grpc::StatusCode::NOT_FOUND, "no open migration of that number here");
}

grpc::Status HostService::Release(grpc::ServerContext*, const wire::ReleaseRequest* r, wire::Empty*) {
  std::vector<Instance> instances;
  for (const auto& bytes : r->instances()) {
    const auto i = instance_of(bytes);
    if (!i) return to_grpc(i);
    instances.push_back(*i);
  }
  return to_grpc(numbers_.release(instances));
}

}  // namespace migr
