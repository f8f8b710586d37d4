// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "control_service.h"

#include <future>

namespace migr {

grpc::Status ControlService::Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) {
  *out = version_of(peers_.config(), sessions_);
  return grpc::Status::OK;
}

grpc::Status ControlService::Peers(grpc::ServerContext*, const wire::Empty*, wire::PeersReply* out) {
  std::vector<std::future<wire::PeersReply::Peer>> asked;
  for (const Peer& p : peers_.config().peers)
    asked.push_back(std::async(std::launch::async, [&, p] {
      wire::PeersReply::Peer r;
      r.set_name(p.name);
      r.set_address(p.address);
      auto c = peers_.channel(p.name);
      if (!c) return r;
      wire::Host::Stub stub(*c);
      auto v = call(stub, &wire::Host::Stub::Version, wire::Empty(), kCheckMs, p.name);
      r.set_answers(bool(v));
      if (v)
        *r.mutable_version() = *v;
      else
        r.set_error(v.error().text);
      return r;
    }));
  for (auto& a : asked) *out->add_peers() = a.get();
  return grpc::Status::OK;
}

grpc::Status ControlService::Sessions(grpc::ServerContext*, const wire::Empty*, wire::SessionsReply* out) {
  for (const auto& s : sessions_.all()) {
    auto* r = out->add_sessions();
    r->set_pid(s->pid());
    r->set_instance(s->instance().data(), s->instance().size());
    r->set_state(s->state());
    r->set_generation(s->generation());
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::Recover(grpc::ServerContext*, const wire::RecoverRequest* r, wire::RecoverReply* out) {
  if (r->order() != wire::UNKNOWN) {
    Status s = Error{ENOENT, "no open migration of that number on this host; see: migrctl recover"};
    // One host may have two roles in it: the source's word comes first.
    for (auto role = roles_.rbegin(); role != roles_.rend(); ++role)
      if (s = (*role)->order(r->id(), r->order(), r->force()); s || s.error().code != ENOENT) break;
    if (!s) return to_grpc(s);
  }
  for (Role* role : roles_)
    for (const auto& o : role->open_migrations())
      if (!r->id() || o.id() == r->id()) *out->add_open() = o;
  return grpc::Status::OK;
}

namespace {

template <class Request>
grpc::Status run(const ControlService::Do<Request>& work, const Request& request, grpc::ServerWriter<wire::Progress>* writer) {
  // A migrctl that goes away does not stop a migration: writes just fail then.
  wire::Progress last;
  *last.mutable_summary() = work(request, [&](const wire::Progress& p) { writer->Write(p); });
  writer->Write(last);
  return grpc::Status::OK;
}

}  // namespace

grpc::Status ControlService::Migrate(grpc::ServerContext*, const wire::MigrateRequest* r, grpc::ServerWriter<wire::Progress>* writer) {
  return run(work_.migrate, *r, writer);
}
grpc::Status ControlService::Checkpoint(grpc::ServerContext*, const wire::CheckpointRequest* r, grpc::ServerWriter<wire::Progress>* writer) {
  return run(work_.checkpoint, *r, writer);
}
grpc::Status ControlService::Restore(grpc::ServerContext*, const wire::RestoreRequest* r, grpc::ServerWriter<wire::Progress>* writer) {
  return run(work_.restore, *r, writer);
}

}  // namespace migr
