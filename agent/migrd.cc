// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migrd: one per host. Runs in the foreground; SIGTERM and SIGINT end it.
#include <fcntl.h>
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <mutex>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "authorization.h"
#include "certificates.h"
#include "claims.h"
#include "config.h"
#include "control_service.h"
#include "coordinator.h"
#include "ctl_text.h"
#include "destination_host.h"
#include "directory.h"
#include "end_signals.h"
#include "devices.h"
#include "failover/link_socket.h"
#include "failover/name_check.h"
#include "failover/peer_directory.h"
#include "failover/port_watch.h"
#include "failover/redis_directory.h"
#include "fault.h"
#include "history.h"
#include "host_service.h"
#include "kernel_record.h"
#include "links.h"
#include "log.h"
#include "metrics.h"
#include "numbers.h"
#include "partner_host.h"
#include "peer_link.h"
#include "privileges.h"
#include "process.h"
#include "process_session.h"
#include "reload.h"
#include "runtime.h"
#include "source_host.h"
#include "stored.h"
#include "summary.h"

namespace {

using namespace migr;

int fail(const std::string& text) {
  spdlog::critical("{}", text);
  return 1;
}

std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

/// A number that is not 0. EIO: the kernel has none.
Result<std::uint32_t> random_number() {
  for (std::uint32_t n = 0;;) {
    if (getrandom(&n, sizeof n, 0) != sizeof n) return Error{EIO, "no random numbers"};
    if (n) return n;
  }
}

/// What it starts has its own limits: runc sets those of containers, CRIU gives back those that programs had.
void have_all_files() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) || files.rlim_cur >= files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &files)) spdlog::warn("setrlimit: {}", std::strerror(errno));
}

wire::Summary refused(std::uint32_t id, const std::string& what, const std::string& from, const std::string& to, const Error& why) {
  wire::Summary s;
  s.set_id(id);
  s.set_container(what);
  s.set_from(from);
  s.set_to(to);
  s.set_error(why.text);
  s.set_error_code(static_cast<std::uint32_t>(why.code));
  return s;
}

// What a migration from here needs of others.
struct Move {
  Coordinator::Settings settings;
  std::unique_ptr<RpcDestination> destination;
  std::vector<std::unique_ptr<RpcPartner>> partners;
  std::vector<PartnerLink*> links;  // the same
};

/// @param self  to our own services
Result<Move> move_for(Peers& peers, std::shared_ptr<grpc::Channel> self, const wire::MigrateRequest& r) {
  const Config& config = peers.config();
  if (r.to() == config.name) return Error{EINVAL, "'" + r.to() + "' is this host"};
  auto channel = peers.channel(r.to());
  if (!channel) return channel.error();
  if (auto s = may_take(config, r.to(), r.container()); !s) return s.error();
  if (r.drain_limit_ms() >= static_cast<std::uint32_t>(kPhaseMs))
    return Error{EINVAL, "a drain may not take as long as phase_ms in \"limits\" of migrd.json, which is " + std::to_string(kPhaseMs)};
  std::uint32_t abi = 0;
  if (auto k = KernelRecord::open(); !k) return k.error();
  else if (auto i = k->info()) abi = i->abi;
  Move m{{config.name, config.fault, abi, kUndecidedMs, kResolveStepMs, r.stop_and_copy() ? UINT64_MAX : r.pre_copy() ? 0 : kPreCopyFromBytes, !r.no_pre_setup()},
         std::make_unique<RpcDestination>(*channel, r.to()), {}, {}};
  m.settings.pre_copy_rounds = std::min(r.pre_copy_rounds(), kPreCopyRoundsMax);
  m.settings.max_stop_ms = static_cast<int>(std::min(r.max_stop_ms(), kStopMaxMs));
  if (r.drain_limit_ms()) m.settings.drain_ms = static_cast<int>(std::min(r.drain_limit_ms(), kDrainMaxMs));
  // Partners may be anywhere, also on the destination and on this host.
  for (const Peer& p : config.peers())
    if (auto c = peers.channel(p.name)) m.partners.push_back(std::make_unique<RpcPartner>(*c, p.name));
  if (!config.peer(config.name)) m.partners.push_back(std::make_unique<RpcPartner>(self, config.name));
  for (const auto& p : m.partners) m.links.push_back(p.get());
  return m;
}

wire::Summary refused(const Config& config, std::uint32_t id, const wire::MigrateRequest& r, const Error& why) {
  spdlog::log(why.code == EPERM ? spdlog::level::warn : spdlog::level::info, "refused: {}", why.text);
  return refused(id, r.container(), config.name, r.to(), why);
}

wire::PlanReply plan(Peers& peers, SourceHost& host, std::shared_ptr<grpc::Channel> self, const wire::MigrateRequest& r) {
  const auto id = random_number();
  LogScope log(id ? *id : 0);
  auto move = move_for(peers, std::move(self), r);
  if (!move || !id) {
    wire::PlanReply out;
    *out.mutable_summary() = refused(peers.config(), log->migration, r, move ? id.error() : move.error());
    return out;
  }
  move->settings.busy_wait_ms = 0;
  SourceRun source(host, *id, SourceRun::Describe::kLook);
  return Coordinator(move->settings, source, *move->destination, move->links, [](const wire::Progress&) {}).plan(r.container(), r.to(), *id);
}

wire::Summary migrate(Peers& peers, SourceHost& host, std::shared_ptr<grpc::Channel> self, const wire::MigrateRequest& r, const Coordinator::Say& say) {
  auto id = random_number();
  if (!id) return refused(peers.config(), 0, r, id.error());
  LogScope log(*id);
  auto refuse = [&](const Error& why) { return refused(peers.config(), log->migration, r, why); };
  auto move = move_for(peers, std::move(self), r);
  if (!move) return refuse(move.error());
  auto course = host.begin(r.container(), r.to(), *id);
  if (!course) return refuse(course.error());
  move->settings.course = *course;
  auto note = [&](const std::string& text) {
    wire::Progress p;
    p.set_note(text);
    say(p);
  };
  const auto busy_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kBusyWaitMs);
  bool touched = false;  // by any of them
  for (int tries = 1;;) {
    const auto pause = random_number();
    if (!id || !pause) return refuse(id ? pause.error() : id.error());
    log->migration = *id;
    wire::Summary summary;
    bool changed = false, in_vain = false, busy = false;
    {
      // An application that changes its resources all the time has to wait with that in the end.
      SourceRun source(host, *id, tries == kMigrateTries ? SourceRun::Describe::kHold : SourceRun::Describe::kMove);
      Coordinator coordinator(move->settings, source, *move->destination, move->links, say);
      summary = coordinator.migrate(r.container(), r.to(), *id);
      host.settle_later(*id, !summary.undecided());
      // What is not all back yet is no container that could be moved.
      changed = coordinator.try_again() && !summary.going_back() && tries < kMigrateTries;
      in_vain = coordinator.copied_in_vain() && !summary.going_back() && summary.pre_copy_rounds();
      busy = coordinator.busy() && !summary.going_back() && std::chrono::steady_clock::now() < busy_until;
    }
    summary.set_touched(touched = touched || summary.touched());
    summary.set_tries(static_cast<std::uint32_t>(tries));
    if (changed)
      note(fmt::format("trying again ({} of {}): {}", ++tries, kMigrateTries, summary.error()));
    else if (in_vain)
      note("trying again, and copying memory during the stop only: " + summary.error()), move->settings.pre_copy_from = UINT64_MAX;
    else if (busy)
      note("trying again: " + summary.error()), usleep(*pause % (kBusyPauseMs * 1000u));  // for two that met not to meet again
    else
      return summary;
    id = random_number();
  }
}

// CONTAINER|PID: a number is that of a process, but a container may have one for a name.
std::string what_is_meant(const Config& config, const std::string& name) {
  const bool number = !name.empty() && name.find_first_not_of("0123456789") == std::string::npos;
  return number && !Runtime(config).exists(name) ? "pid:" + name : name;
}

// Both are migrations of which one side is a folder. What was connected to others is not any more.
wire::Summary checkpoint(SourceHost& host, const Config& config, const wire::CheckpointRequest& r, const Coordinator::Say& say) {
  const std::string container = what_is_meant(config, r.container());
  const auto id = random_number();
  if (!id) return refused(0, container, config.name, r.dir(), id.error());
  auto course = host.begin(container, r.dir(), *id);
  if (!course) return refused(*id, container, config.name, r.dir(), course.error());
  SourceRun source(host, *id, SourceRun::Describe::kHold);
  KeepingDestination destination(r.dir(), source.info(), config.state_dir);
  Coordinator::Settings settings{config.name, config.fault, MIGR_ABI_VERSION, kUndecidedMs, kResolveStepMs, UINT64_MAX};
  settings.what = Coordinator::Settings::kKeep;
  settings.course = *course;
  auto summary = Coordinator(settings, source, destination, {}, say).migrate(container, r.dir(), *id);
  host.settle_later(*id, !summary.undecided());
  return summary;
}

wire::Summary restore(SourceHost& host, std::shared_ptr<grpc::Channel> self, const Config& config, const wire::RestoreRequest& r,
                      const Coordinator::Say& say) {
  const auto id = random_number();
  if (!id) return refused(0, r.dir(), config.name, config.name, id.error());
  auto course = host.begin(r.dir(), config.name, *id);
  if (!course) return refused(*id, r.dir(), config.name, config.name, course.error());
  StoredSource source(host, *id);
  RpcDestination destination(std::move(self), config.name, r.dir() + "/bundle");
  Coordinator::Settings settings{config.name, config.fault, MIGR_ABI_VERSION, kUndecidedMs, kResolveStepMs, UINT64_MAX};
  settings.what = Coordinator::Settings::kGiveBack;
  settings.course = *course;
  return Coordinator(settings, source, destination, {}, say).migrate(r.dir(), config.name, *id);
}

/// To what was refused and is not here: where it went from here, if it did.
wire::Summary with_trace(wire::Summary s, const Config& config, const History& history) {
  if (s.touched() || s.error().empty() || Runtime(config).exists(s.container())) return s;
  const auto past = history.read();
  if (const auto move = past ? last_move(past->entries, s.container()) : std::nullopt)
    s.set_error(s.error() + "; migration " + migration_name(*move) + " took it from here to " + (*move)["to"].get<std::string>());
  return s;
}

// A process that is suspended and that no migration holds: its migrd died meanwhile.
void let_go_if_lost(const std::vector<Role*>& roles, DestinationHost& destination, const Config& config, Turns& turns, const std::shared_ptr<ProcessSession>& s) {
  if (s->state() == MIGR_PROC_RUNNING) return;
  for (Role* r : roles)
    if (r->claims(s->instance())) return;
  spdlog::warn("{} is suspended and no migration holds it: it goes on", s->label());
  turns.run(s, [s, go_on = destination.comes_late(*s) ? take_in : let_go, run_dir = config.run_dir] { go_on(*s, run_dir); });
}

std::set<Gid> gids_of_this_host() {
  std::set<Gid> out;
  const auto s = each_gid([&](const wire::PortGid& g) {
    if (const auto gid = gid_of(g.gid())) out.insert(*gid);
  });
  if (!s) spdlog::warn("{}", s.error().text);
  return out;
}

/// Of this daemon. Thread: any.
class End {
 public:
  void come() {
    std::lock_guard lock(mutex_);
    has_come_ = true;
    changed_.notify_all();
  }
  bool has_come() { return comes_within(0); }
  bool comes_within(int ms) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return has_come_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_come_ = false;
};

/// Links of processes: docs/failover.md. What one part tells another is set here, once.
struct Links {
  Links(Peers& peers, const SessionTable& sessions, Directory& moves, const Numbers& numbers)
      : config(peers.config()), table(config.name),
        ports(config.state_dir + "/links.json", rdma_ports, {ms(kLinkDownMs), ms(kLinkUpMs), ms(kLinkUpMaxMs), ms(kLinkFlapMs)}) {
    const auto knock = [this](const Instance& to, const migr_links_channel& from) { socket->knock(to, from); };
    if (config.redis.address.empty()) {
      directory = std::make_unique<PeerDirectory>(peers, table);
    } else {
      auto r = std::make_unique<RedisDirectory>(config.redis, config.name, table, gids_of_this_host, knock);
      redis = r.get();
      table.set_watcher(redis);
      directory = std::move(r);
    }
    socket = std::make_unique<LinkSocket>(table, *directory, [this] { return ports.ports(); }, config.links_file);
    socket->set_may_have([&](const Instance& i, pid_t pid) { return sessions.may_have(i, pid); });
    table.set_gids(gids_of_this_host);
    const auto was_at = [&](const Instance& i, const Gid& gid) { return moves.was_at(i, {reinterpret_cast<const char*>(gid.data()), gid.size()}); };
    const auto came = [&, was_at](pid_t pid, const Gid& gid) {
      const auto session = sessions.by_pid(pid);
      return session && was_at(session->instance(), gid);
    };
    // Those that this host keeps for somebody of whom `fits` is true. @param its  the process is one of them
    const auto kept = [&](pid_t pid, bool its, const std::function<bool(const Instance&)>& fits) -> Result<std::set<std::uint32_t>> {
      const auto owners = numbers.owners();
      if (!owners) return owners.error();
      const auto session = sessions.by_pid(pid);
      std::set<std::uint32_t> out;
      for (const auto& [vqpn, all] : *owners)
        if ((session && std::find(all.begin(), all.end(), session->instance()) != all.end()) == its && std::any_of(all.begin(), all.end(), fits)) out.insert(vqpn);
      return out;
    };
    const auto own = [kept](pid_t pid, const Gid&) { return kept(pid, true, [](const Instance&) { return true; }); };
    const auto of_others = [kept, was_at](pid_t pid, const Gid& gid) { return kept(pid, false, [&](const Instance& i) { return was_at(i, gid); }); };
    const NameSources sources{recorded_qps, qp_numbers_of, [this](const Gid& gid) { return table.home(gid); }, came, own, of_others, given_to_others,
                              [&](pid_t pid) { return numbers.is_guest(pid); }};
    table.set_owns([sources](pid_t pid, std::span<const VqpName> names, std::size_t& offending, std::set<VqpName>& bound) { return own_names(pid, names, sources, offending, bound); });
    table.set_knock(knock);
    ports.set_changed([this](std::span<const migr_links_port> changed) { socket->tell_ports(changed); });
  }
  ~Links() { stop(); }
  Status start() {
    if (auto s = ports.start(); !s) spdlog::warn("{}: the state of netdevs is not watched", s.error().text);
    if (redis) redis->start();
    return socket->start(config.run_dir + "/links.sock");
  }
  void stop() {
    ports.stop();
    if (redis) redis->stop();
    socket->stop();
  }

  static std::chrono::milliseconds ms(int n) { return std::chrono::milliseconds(n); }
  const Config& config;
  LinkTable table;
  PortWatch ports;
  std::unique_ptr<LinkDirectory> directory;
  RedisDirectory* redis = nullptr;  // the same, if it is that
  std::unique_ptr<LinkSocket> socket;
};

/// @param folder  whose lock this file is
Result<Fd> sole_lock(const std::string& file, const std::string& folder) {
  Fd fd(open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (fd.n < 0) return sys_error("opening " + file);
  if (!flock(fd.n, LOCK_EX | LOCK_NB)) return fd;
  return errno == EWOULDBLOCK ? Error{EWOULDBLOCK, "another migrd runs with " + folder} : sys_error("locking " + file);
}

/// Of a folder with what would be taken from another migrd that has it, too. The lock lies beside it: containers see run_dir.
Result<Fd> sole_use(const std::string& folder) {
  std::error_code ec;
  const std::string file = std::filesystem::weakly_canonical(folder, ec).string() + ".lock";
  if (ec) return Error{ec.value(), folder + ": " + ec.message()};
  return sole_lock(file, folder);
}

// One at a time: it looks at what was, and puts something in its place.
Result<wire::ReloadReply> reload_once(Config& config, const std::string& path, const std::vector<Role*>& roles) {
  static std::mutex turn;
  std::lock_guard lock(turn);
  auto done = reload(config, path, roles);
  if (done) spdlog::info("configuration read again: {}", reload_text(*done));
  else spdlog::error("the configuration was not taken: {}", done.error().text);
  return done;
}

int run(Config& config, const std::string& path) {
  for (auto [dir, mode] : {std::pair{config.run_dir, 0755}, {parent_of(config.control_socket), 0700}, {config.state_dir, 0700}})
    if (auto s = make_own_folder(dir, static_cast<mode_t>(mode)); !s) return fail(s.error().text);
  const std::string tls = parent_of(config.control_socket) + "/tls";
  const auto state_lock = sole_lock(config.state_dir + "/lock", config.state_dir), sockets_lock = sole_use(config.run_dir), control_lock = sole_use(tls);
  for (const auto* l : {&state_lock, &sockets_lock, &control_lock})
    if (!*l) return fail(l->error().text);
  if (auto k = KernelRecord::open(); !k) spdlog::warn("{}; this host cannot take part in migrations until then", k.error().text);

  Certificates certificates(config, tls);
  if (auto s = certificates.start(); !s) return fail(s.error().text);
  Peers peers(config, certificates);
  SessionTable sessions;
  // Links to the hosts that take part; a checkpoint's destination is a folder of this one.
  auto to_destination = [&peers](const std::string& name) -> Result<std::unique_ptr<DestinationLink>> {
    if (name.starts_with('/')) return std::unique_ptr<DestinationLink>(new KeepingDestination(name));
    auto c = peers.channel(name);
    if (!c) return c.error();
    return std::unique_ptr<DestinationLink>(new RpcDestination(*c, name));
  };
  auto to_partner = [&peers](const std::string& name) -> Result<std::unique_ptr<PartnerLink>> {
    auto c = peers.channel(name);
    if (!c) return c.error();
    return std::unique_ptr<PartnerLink>(new RpcPartner(*c, name));
  };
  Claims claims;
  Numbers numbers(config);
  numbers.reserve_again();
  const auto directory_kept = std::make_shared<Directory>(config);  // threads that tell processes may outlive this
  Directory& directory = *directory_kept;
  History history(config.state_dir);
  SourceHost source(config, sessions, claims, numbers, directory, to_destination, to_partner);
  DestinationHost destination(config, sessions, peers, claims, numbers);
  Whereabouts whereabouts(config, sessions, peers, directory, numbers);
  PartnerHost partner(config, sessions, peers, claims, directory_kept, whereabouts);
  const std::vector<Role*> roles = {&destination, &partner, &source};
  PortCounters counters;
  TrafficMeter traffic([&counters] { return counters.read(); });
  HostService host(config, sessions, numbers, roles, &certificates, &traffic);
  Links links(peers, sessions, directory, numbers);
  LinksService links_service(links.table);
  const auto metrics = std::make_shared<Metrics>(Metrics::Parts{config, sessions, links.table, *links.directory, links.ports, certificates, roles});
  source.set_opens([&](const std::string& container) { return destination.opens_network(container); });
  source.set_settled([&](const wire::Summary& s, bool ended) {
    if (!ended) metrics->settled(s);
    if (auto h = history.settle(summary_json(s)); !h) spdlog::error("history: {}", h.error().text);
  });
  destination.set_decided([&](wire::Outcome o) { metrics->decided("destination", o); });
  partner.set_decided([&](wire::Outcome o) { metrics->decided("partner", o); });
  const auto counted = [&](Metrics::What what, const wire::Summary& s) { return metrics->ended(what, s), with_trace(s, config, history); };
  std::shared_ptr<grpc::Channel> self;  // to our own services
  using Say = ControlService::Say;
  ControlService control(peers, sessions,
                         {[&](const wire::MigrateRequest& r) {
                            auto p = plan(peers, source, self, r);
                            *p.mutable_summary() = with_trace(p.summary(), config, history);
                            return p;
                          },
                          [&](const wire::MigrateRequest& r, const Say& say) { return counted(Metrics::What::kMigrate, migrate(peers, source, self, r, say)); },
                          [&](const wire::CheckpointRequest& r, const Say& say) { return counted(Metrics::What::kCheckpoint, checkpoint(source, config, r, say)); },
                          [&](const wire::RestoreRequest& r, const Say& say) { return counted(Metrics::What::kRestore, restore(source, self, config, r, say)); },
                          [&] { return reload_once(config, path, roles); }},
                         roles, {links.table, *links.directory, links.ports}, history, &certificates);

  Turns turns;
  auto on_hello = [&](const std::shared_ptr<ProcessSession>& s) {
    let_go_if_lost(roles, destination, config, turns, s);
    if (s->state() != MIGR_PROC_RUNNING) return;
    // Also that nothing has moved: until then it asks about each partner.
    turns.run(s, [s, directory_kept] {
      if (auto told = tell_moves(*s, 0, *directory_kept); !told) spdlog::error("{}", told.error().text);
    });
  };
  sessions.set_known([&](const Instance& i, pid_t pid) {
    if (const auto its = destination.brings(i, pid)) return its;
    const pid_t held = claims.pid_of(i);
    return held && process_lives(held) ? std::optional(held == pid) : std::nullopt;
  });
  source.recover();
  if (auto s = sessions.start(config.run_dir + "/proc.sock", on_hello, [&](const Question& q) { return whereabouts.answer(q); }); !s) return fail(s.error().text);

  if (auto s = links.start(); !s) return fail(s.error().text);

  grpc::ServerBuilder outer;
  set_keepalive(outer);
  outer.AddListeningPort(config.listen, peers.server_credentials());
  outer.RegisterService(&host);
  outer.RegisterService(&destination);
  outer.RegisterService(&partner);
  outer.RegisterService(&links_service);
  set_bulk(outer);
  const auto outer_server = outer.BuildAndStart();
  if (!outer_server) return fail("cannot listen on " + config.listen + " (is it in use?)");
  grpc::ChannelArguments bulk;
  set_bulk(bulk);
  self = outer_server->InProcessChannel(bulk);
  peers.set_self(self);

  const auto inner_server = serve_root(config.control_socket, control);
  if (!inner_server) return fail(inner_server.error().text);
  source.settle_recovered();

  // Who wants to know how it goes is no reason not to run.
  const auto exposer = expose(config, metrics);
  if (!exposer) spdlog::error("{}", exposer.error().text);

  spdlog::info("migrd {} on {}: peers at {}, processes at {}/proc.sock", kRelease, config.name, config.listen, config.run_dir);
  sd_notify(1, "READY=1");  // and nothing that it starts inherits whom it told
  traffic.start();
  End end, ticks_end;
  std::thread ticker([&] {
    constexpr int kTickMs = 250;
    constexpr unsigned kTicksPerLook = 8;
    unsigned n = 0;
    do {
      for (Role* r : roles) r->tick();
      if (n++ % kTicksPerLook) continue;
      certificates.look();
      (void)directory.save_again();  // put() has said why not
    } while (!ticks_end.comes_within(kTickMs));
  });
  // Beside the other, for it waits for hosts that may be silent.
  std::thread guests([&] {
    auto tell = [&peers, &end](const std::string& host, const std::vector<Instance>& instances) -> Status {
      if (end.has_come()) return Error{ECANCELED, "migrd ends"};
      auto channel = peers.channel(host);
      if (!channel) return channel.error();
      wire::ReleaseRequest r;
      for (const auto& i : instances) r.add_instances(i.data(), i.size());
      wire::Host::Stub stub(*channel);
      return call(stub, &wire::Host::Stub::Release, r, kCallMs, host);
    };
    const auto held = [&roles](const Instance& i) { return std::any_of(roles.begin(), roles.end(), [&](Role* r) { return r->claims(i); }); };
    do {
      if (const auto ended = directory.end_of(numbers.tick(tell, held)); ended.moves_size()) tell_hosts(peers, ended, 2 * kWhereMs);
    } while (!end.comes_within(kGuestsMs));
  });
  // Beside the others for the same reason.
  std::thread heartbeat([&] {
    if (config.metrics.empty()) return;
    do metrics->ask_peers(peers);
    while (!end.comes_within(kPeersMs));
  });
  spdlog::info("ends by signal {}", wait_for_end([&] { (void)reload_once(config, path, roles); }));
  end.come();
  // What goes back needs all of this host meanwhile.
  constexpr int kCoursesMs = 120'000, kCoursesStepMs = 50;  // below TimeoutStopSec= of migrd.service, with what comes after
  source.give_up();
  for (int ms = 0; ms < kCoursesMs && !source.is_idle(); ms += kCoursesStepMs) usleep(kCoursesStepMs * 1000);
  const bool idle = source.is_idle();
  if (!idle) spdlog::error("what has begun here does not end; the next migrd takes it up");
  ticks_end.come();
  ticker.join();
  guests.join();
  heartbeat.join();
  destination.shutdown();
  if (!idle) _exit(0);
  const auto soon = std::chrono::system_clock::now() + std::chrono::seconds(1);
  (*inner_server)->shutdown(soon);
  outer_server->Shutdown(soon);
  // What does not end in time ends with all of migrd: the next one takes it up.
  if (!source.end() || !destination.end() || !partner.end()) _exit(0);
  traffic.stop();
  links.stop();
  sessions.stop();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string path = kConfigPath;
  bool verbose = false, list_faults = false;
  CLI::App app{"The migr daemon: one per host. migrd(8) says more.", "migrd"};
  app.set_version_flag("--version", kRelease);
  app.add_option("--config", path, "configuration")->capture_default_str();
  app.add_flag("-v,--verbose", verbose, "say more");
  app.add_flag("--list-faults", list_faults, "print the fault points that MIGR_FAULT may name");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) ? 2 : 0;
  }
  if (list_faults) {
    for (const auto step : kFaultSteps)
      for (const char* at : {"begin", "end"}) fmt::print("{}.{}\n", step, at);
    return 0;
  }
  // stdout is nobody's data here, but a log belongs to stderr.
  setenv("GRPC_VERBOSITY", "NONE", 0);  // what matters comes back as a status
  log_to_stderr("migrd", verbose);
  if (geteuid() != 0) return fail("has to run as root: it stops processes, reads the kernel's record and runs containers");
  hold_end_signals();
  signal(SIGPIPE, SIG_IGN);
  have_all_files();
  // Also for what it starts: runc and CRIU. Restored tasks get the priority that they had.
  if (setpriority(PRIO_PROCESS, 0, kNice)) spdlog::warn("setpriority: {}", std::strerror(errno));
  umask(0077);
  if (auto s = drop_capabilities(); !s) return fail(s.error().text);
  auto config = load_config(path);
  if (!config) return fail(config.error().text);
  set_log_host(config->name);
  take_limits(*config);
  return run(*config, path);
}
