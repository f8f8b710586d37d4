// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "control_service.h"

#include <grpcpp/server_posix.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <future>
#include <nlohmann/json.hpp>

#include "log.h"
#include "parallel.h"
#include "summary.h"

namespace migr {

grpc::Status ControlService::Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) {
  *out = version_of(peers_.config(), sessions_.all().size(), certificates_);
  return grpc::Status::OK;
}

grpc::Status ControlService::Peers(grpc::ServerContext*, const wire::Empty*, wire::PeersReply* out) {
  std::vector<std::future<wire::PeersReply::Peer>> asked;
  for (const Peer& p : peers_.config().peers())
    asked.push_back(in_own_thread([&, p] {
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

grpc::Status ControlService::Recover(grpc::ServerContext*, const wire::RecoverRequest* r, wire::RecoverReply* out) {
  const Error none{ENOENT, "no open migration of that number on this host; see: migrctl recover"};
  if (r->order() != wire::UNKNOWN) {
    Status s = none;
    // One host may have two roles in it: the source's word comes first.
    for (auto role = roles_.rbegin(); role != roles_.rend(); ++role)
      if (s = (*role)->order(r->id(), r->order(), r->force()); s || s.error().code != ENOENT) break;
    if (!s) return to_grpc(s);
  }
  for (Role* role : roles_)
    for (const auto& o : role->open_migrations())
      if (!r->id() || o.id() == r->id()) *out->add_open() = o;
  // What was ordered may be done by now.
  return r->id() && r->order() == wire::UNKNOWN && !out->open_size() ? to_grpc(none) : grpc::Status::OK;
}

grpc::Status ControlService::Cancel(grpc::ServerContext* ctx, const wire::CancelRequest* r, wire::CancelReply* out) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::min<std::uint32_t>(r->wait_ms(), kCancelMs));
  constexpr useconds_t kLookUs = 50'000;
  Result<wire::OpenMigration> told = Error{ENOENT, ""};
  for (std::size_t i = 0; i < roles_.size() && !told && told.error().code == ENOENT; i++) told = roles_[i]->cancel(r->id(), r->container());
  if (!told && told.error().code == ENOENT)
    return to_grpc(Error{ENOENT, "nothing of that name or number is under way from this host; see: migrctl recover. What another host has begun is cancelled there"});
  if (!told) return to_grpc(told);
  auto& its = *out->mutable_migration() = *told;
  for (;; usleep(kLookUs)) {
    bool open = false;
    for (Role* role : roles_)
      for (auto& o : role->open_migrations())
        if (o.id() == told->id() && o.role() == told->role()) its = std::move(o), open = true;
    out->set_ended(!open);
    if (!open || std::chrono::steady_clock::now() >= until || ctx->IsCancelled()) return grpc::Status::OK;
  }
}

grpc::Status ControlService::Reload(grpc::ServerContext*, const wire::Empty*, wire::ReloadReply* out) {
  auto done = work_.reload();
  if (!done) return to_grpc(done.error());
  *out = std::move(*done);
  return grpc::Status::OK;
}

namespace {

template <class Request>
grpc::Status run(const ControlService::Do<Request>& work, const Request& request, History& history, grpc::ServerWriter<wire::Progress>* writer) {
  // A migrctl that goes away does not stop a migration: writes just fail then.
  wire::Progress last;
  *last.mutable_summary() = work(request, [&](const wire::Progress& p) { writer->Write(p); });
  const LogScope log(last.summary().id());
  if (last.summary().touched())
    if (auto s = history.add(summary_json(last.summary())); !s) spdlog::error("history: {}", s.error().text);
  writer->Write(last);
  return grpc::Status::OK;
}

}  // namespace

grpc::Status ControlService::Plan(grpc::ServerContext*, const wire::MigrateRequest* r, wire::PlanReply* out) {
  *out = work_.plan(*r);
  return grpc::Status::OK;
}
grpc::Status ControlService::Migrate(grpc::ServerContext*, const wire::MigrateRequest* r, grpc::ServerWriter<wire::Progress>* writer) {
  return run(work_.migrate, *r, history_, writer);
}
grpc::Status ControlService::Checkpoint(grpc::ServerContext*, const wire::CheckpointRequest* r, grpc::ServerWriter<wire::Progress>* writer) {
  return run(work_.checkpoint, *r, history_, writer);
}
grpc::Status ControlService::Restore(grpc::ServerContext*, const wire::RestoreRequest* r, grpc::ServerWriter<wire::Progress>* writer) {
  return run(work_.restore, *r, history_, writer);
}

grpc::Status ControlService::Links(grpc::ServerContext*, const wire::LinksRequest* r, wire::LinksReply* out) {
  out->set_directory(links_.directory.name());
  out->set_directory_error(links_.directory.error());
  for (const auto& p : links_.ports.ports()) {
    auto* w = out->add_ports();
    w->set_device(p.device);
    w->set_port(p.port);
    w->set_netdev(p.netdev);
    w->set_flags(p.flags);
    w->set_flaps(p.flaps);
  }
  for (auto& p : links_.table.reports(r->vqps())) *out->add_processes() = std::move(p);
  return grpc::Status::OK;
}

grpc::Status ControlService::SetLink(grpc::ServerContext* ctx, const wire::LinkOrder* r, wire::LinkOrderReply* out) {
  using Order = PortWatch::Order;
  Order what = Order::kDown;
  switch (r->what()) {
    case wire::LinkOrder::DOWN: break;
    case wire::LinkOrder::UP: what = Order::kUp; break;
    case wire::LinkOrder::PREFER: what = Order::kPrefer; break;
    case wire::LinkOrder::PREFER_NONE: what = Order::kPreferNone; break;
    default: return to_grpc(Error{EINVAL, "an order that this migrd does not know"});
  }
  const bool down = what == Order::kDown, moves = down || what == Order::kPrefer;
  if (down && !r->force()) {
    std::string stuck;
    for (const auto& line : links_.table.stuck_on(r->device(), r->port())) stuck += (stuck.empty() ? "" : "; ") + line;
    if (!stuck.empty()) return to_grpc(Error{EBUSY, "they would break: " + stuck + "; --force takes the link down all the same"});
  }
  const auto serial = links_.ports.order(what, r->device(), r->port());
  if (!serial) return to_grpc(serial);
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::min<std::uint32_t>(r->wait_ms(), kLinkOrderMaxMs));
  constexpr useconds_t kLookUs = 20'000;
  for (;;) {
    unsigned processes = 0;
    const auto left = what == Order::kPrefer ? links_.table.away_from(r->device(), r->port(), *serial, processes)
                                             : links_.table.left_on(r->device(), r->port(), processes);
    if (moves && !left.empty() && std::chrono::steady_clock::now() < until && !ctx->IsCancelled()) {
      usleep(kLookUs);
      continue;
    }
    out->set_processes(processes);
    if (moves)
      for (const auto& line : left) out->add_left(line);
    return grpc::Status::OK;
  }
}

RootServer::RootServer(Fd listener, std::string path, std::unique_ptr<grpc::Server> server)
    : listener_(std::move(listener)), path_(std::move(path)), server_(std::move(server)), thread_([this] { let_in(); }) {}

RootServer::~RootServer() {
  shutdown(std::chrono::system_clock::now());
  ::shutdown(listener_.n, SHUT_RDWR);
  thread_.join();
  unlink(path_.c_str());
}

// gRPC does not tell a service who has connected to such a socket: so it gets only connections that may be.
void RootServer::let_in() {
  for (;;) {
    Fd one(accept4(listener_.n, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (one.n < 0 && errno == EINVAL) return;  // it was shut down
    if (one.n < 0) {
      constexpr useconds_t kPauseUs = 100'000;  // as long as there are no descriptors, for one
      usleep(kPauseUs);
      continue;
    }
    ucred who{};
    socklen_t size = sizeof who;
    if (getsockopt(one.n, SOL_SOCKET, SO_PEERCRED, &who, &size) || (who.uid && who.uid != geteuid())) {
      spdlog::warn("refused: process {} of user {} at {}, which is root's", who.pid, who.uid, path_);
      continue;
    }
    grpc::AddInsecureChannelFromFd(server_.get(), std::exchange(one.n, -1));
  }
}

Result<std::unique_ptr<RootServer>> serve_root(const std::string& path, grpc::Service& service) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  if (path.size() >= sizeof at.sun_path) return Error{ENAMETOOLONG, path + " is too long for a socket"};
  path.copy(at.sun_path, path.size());
  unlink(path.c_str());
  Fd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const mode_t old = umask(0177);  // not even for a moment
  const bool bound = listener.n >= 0 && bind(listener.n, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0;
  const int err = errno;
  umask(old);
  if (!bound) return sys_error("cannot listen on " + path, err);
  struct stat st {};
  if (stat(path.c_str(), &st) || st.st_uid != geteuid() || (st.st_mode & 0777) != 0600) return Error{EPERM, path + " is not for root alone"};
  grpc::ServerBuilder b;
  b.RegisterService(&service);
  auto server = b.BuildAndStart();
  if (!server) return Error{EIO, "gRPC does not start a server for " + path};
  // From here on migrctl can connect, and is answered.
  if (listen(listener.n, SOMAXCONN)) return sys_error("cannot listen on " + path);
  return std::make_unique<RootServer>(std::move(listener), path, std::move(server));
}

}  // namespace migr
