// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migrctl: what people and scripts use. Exit status: 0 done, 1 failed and rolled
// back, or nobody knows, 2 usage, 3 refused before anything was touched, 128 + N:
// a signal ended the display of what migrd goes on with.
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <forward_list>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bare.h"
#include "clock.h"
#include "ctl_text.h"
#include "doctor.h"
#include "estimate.h"
#include "facts.h"
#include "failover/links_text.h"
#include "history.h"
#include "host_drain.h"
#include "host_service.h"
#include "kernel_record.h"
#include "limits.h"
#include "links.h"
#include "parallel.h"
#include "phase_lines.h"
#include "pki.h"
#include "record_text.h"
#include "report.h"
#include "runtime.h"
#include "status.h"
#include "summary.h"
#include "text.h"
#include "wire.grpc.pb.h"

namespace {

using namespace migr;

constexpr int kDone = 0, kFailed = 1, kUsage = 2, kRefused = 3;

bool is_root() { return geteuid() == 0; }

int print(const Json& j) {
  // Names and words of others may be no UTF-8.
  std::printf("%s\n", j.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
  return kDone;
}

struct Options {
  bool config_named = false;  // what is wrong with the configuration has been said
  bool socket_named = false;
  bool json = false, stop_and_copy = false, pre_copy = false, no_pre_setup = false;
  unsigned pre_copy_rounds = 0;
  bool commit = false, rollback = false, force = false, vqps = false, none = false, dry_run = false, keep_going = false;
  std::string socket = kControlSocket, config = kConfigPath;
  std::string container, to, dir, name, migration, output;
  std::vector<std::string> ips, peers, hosts;
  long days = pki::kHostDays;
  int pid = 0;
  std::uint32_t drain_limit_ms = 0, max_stop_ms = 0, wait_ms = kLinkOrderMs;
};

void say(const std::string& text) { std::fprintf(stderr, "migrctl: %s\n", printable(text).c_str()); }

// A sentence for people; with --json the same for programs, where they look for what a command says. @return the status
int failed(const Options& o, int status, const std::string& text) {
  if (o.json) print(error_json(text, status));
  say(text);
  return status;
}
int refuse(const Options& o, const std::string& text) { return failed(o, kRefused, text); }

// ---- through migrd

std::unique_ptr<wire::Control::Stub> control(const Options& o) {
  grpc::ChannelArguments a;
  a.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  set_bulk(a);
  return wire::Control::NewStub(grpc::CreateCustomChannel("unix:" + o.socket, grpc::InsecureChannelCredentials(), a));
}

std::string grpc_text(const Options& o, const grpc::Status& s) {
  if (s.error_code() == grpc::StatusCode::UNAVAILABLE) {
    const std::string silent = "migrd does not answer on " + o.socket;
    // With such a file it does not start, or ends at once, and systemctl says nothing of that. Of another socket's it is not known which file it has.
    if (const auto config = load_config(o.config); !config && !o.socket_named)
      return silent + ", and does not start" + (o.config_named ? " with that file" : ": " + config.error().text) + "; migrctl doctor says what to do";
    return silent + "; start it with: systemctl start migrd (without systemd: migrd --config " + o.config + "); if it does not stay up: journalctl -u migrd -n 20; migrctl doctor";
  }
  if (s.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return "migrd has not answered in time; journalctl -u migrd says what it waits for";
  if (s.error_code() == grpc::StatusCode::UNIMPLEMENTED) return "the migrd that runs is of another release and does not know this; start it again: systemctl restart migrd";
  return s.error_message();
}
int refuse_grpc(const Options& o, const grpc::Status& s) { return refuse(o, grpc_text(o, s)); }

// Of a call that changes something: once it has been sent, an answer that does not come says nothing of what was done. @param see  the command that shows it
int refuse_order(const Options& o, const grpc::Status& s, const std::string& see) {
  const bool late = s.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  const bool lost = s.error_code() == grpc::StatusCode::UNAVAILABLE && s.error_message().find("failed to connect") == std::string::npos;
  if (!late && !lost) return refuse_grpc(o, s);
  return failed(o, kFailed, (late ? grpc_text(o, s) : "migrd has ended before it answered") + "; it is not known whether migrd has taken the order; see: " + see);
}

std::string need_root(const char* what) {
  return std::string(what) + " needs root: run it with sudo";
}

int cmd_peers(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl peers"));
  grpc::ClientContext ctx;
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(2 * kCheckMs));
  wire::PeersReply r;
  if (auto s = control(o)->Peers(&ctx, {}, &r); !s.ok()) return refuse_grpc(o, s);
  if (o.json) return print(peers_json(r));
  std::fputs(peers_text(r).c_str(), stdout);
  return kDone;
}

int cmd_version(const Options& o) {
  Json j = {{"migrctl", {{"release", kRelease}, {"wire", kWireVersion}, {"abi", MIGR_ABI_VERSION}}}};
  std::string module = "not loaded";
  if (auto k = KernelRecord::open()) {
    if (auto i = k->info()) j["module"] = {{"abi", i->abi}, {"devices", i->devices}, {"contexts", i->contexts}, {"objects", i->objects}, {"reserved_qpns", i->reserved}};
  } else {
    j["module"] = nullptr;
    module = k.error().text;
    if (constexpr std::string_view kOfIt = "migr.ko "; module.starts_with(kOfIt)) module.erase(0, kOfIt.size());
  }
  j["migrd"] = nullptr;
  if (is_root()) {
    grpc::ClientContext ctx;
    ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kCheckMs));
    wire::VersionReply v;
    if (control(o)->Version(&ctx, {}, &v).ok()) j["migrd"] = version_json(v);
  }
  if (o.json) return print(j);
  std::printf("migrctl %s (wire %u, ABI %u)\n", kRelease, kWireVersion, MIGR_ABI_VERSION);
  std::printf("migr.ko %s\n", j["module"].is_null() ? printable(module).c_str() : ("ABI " + j["module"]["abi"].dump() + ", " + j["module"]["devices"].dump() + " devices").c_str());
  std::printf("migrd   %s\n", !is_root() ? "unknown (needs root)" : j["migrd"].is_null() ? "does not answer" : j["migrd"]["release"].get<std::string>().c_str());
  return kDone;
}

struct Words {
  const char* done;       // "NAME runs on HOST"
  const char* undone;     // what is when it failed: "NAME goes on running on HOST"; null: nothing to say
  const char* gone;       // "N connections to others are gone"
  bool last = true;       // with it the command ends: what a signal means is said here
};

/// As long as there is one, a signal that ends migrctl says what goes on without it. One that is ignored stays so.
class AtTheEnd {
 public:
  /// @param text  of a line, without the name of migrctl
  explicit AtTheEnd(const std::string& text) {
    says(text);
    struct sigaction say{};
    say.sa_handler = [](int sig) {  // what may be called here is little
      const std::string& text = *said_.load();
      (void)!write(STDERR_FILENO, text.data(), text.size());
      _exit(128 + sig);
    };
    for (std::size_t i = 0; i < std::size(kSignals); i++)
      if (!sigaction(kSignals[i], nullptr, &before_[i]) && before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &say, nullptr);
  }
  AtTheEnd(const AtTheEnd&) = delete;
  AtTheEnd& operator=(const AtTheEnd&) = delete;
  ~AtTheEnd() {
    for (std::size_t i = 0; i < std::size(kSignals); i++) sigaction(kSignals[i], &before_[i], nullptr);
  }

  /// From now on this. On a terminal something may stand in the line that the cursor is in.
  void says(const std::string& text) { said_ = &texts_.emplace_front((isatty(STDERR_FILENO) ? "\nmigrctl: " : "migrctl: ") + printable(text) + "\n"); }

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
  static inline std::forward_list<std::string> texts_;  // none is freed: gRPC's threads may take the signal, too
  static inline std::atomic<const std::string*> said_;
  struct sigaction before_[std::size(kSignals)] {};
};

constexpr char kOnlyTheDisplay[] = "only this display ends, migrd goes on with it. How it stands: migrctl recover; to take it back: migrctl cancel; how it ended: migrctl history";

struct Ended {
  int status;             // exit status
  std::string error{};    // what was said of it
  std::optional<wire::Summary> summary{};  // none: migrd has not told
};

// Shows the progress of what migrd does, and how it ends; with --json on standard error. @param stop_ms  what is expected
Ended watch(const Options& o, std::unique_ptr<grpc::ClientReader<wire::Progress>> reader, const Words& words, std::optional<double> stop_ms = {}) {
  FILE* out = o.json ? stderr : stdout;  // progress is not data
  std::optional<PhaseLines> lines;
  lines.emplace(out, may_rewrite(fileno(out)));
  std::optional<AtTheEnd> goes_on;
  wire::Progress p;
  wire::Summary summary;
  bool told = false, began = false;
  while (reader->Read(&p)) {
    if (!began && words.last) goes_on.emplace(kOnlyTheDisplay);
    began = true;
    lines->show(p, stop_ms);
    if (p.has_summary()) summary = p.summary(), told = true, goes_on.reset();
  }
  goes_on.reset();
  const auto s = reader->Finish();
  lines.reset();
  if (!told) {
    const Ended none = began  ? Ended{kFailed, "migrd ended in the middle of it. When it is started again it finishes or goes back by itself; then: migrctl recover"}
                       : s.ok() ? Ended{kRefused, "migrd ended the stream without a summary; see its log"}
                                : Ended{kRefused, grpc_text(o, s)};
    say(none.error);
    return none;
  }
  const int status = !summary.migrated() && !summary.touched() ? kRefused : summary.migrated() && summary.error().empty() ? kDone : kFailed;
  if (!summary.error().empty()) say(summary.error() + named_migration(summary));
  if (const auto back = rolled_back_text(summary); !back.empty()) say(back);
  if (summary.migrated()) {
    if (!o.json) std::fputs(summary_text(summary, words.done, words.gone).c_str(), stdout);
  } else if (summary.touched() && !summary.undecided() && words.undone) {
    if (summary.going_back())
      say(summary.container() + " is not all back yet: migrd goes on with that; see: migrctl recover");
    else
      say(summary.container() + " " + words.undone + " " + summary.from());
  }
  if (const std::string more = more_text(summary); status == kFailed && !more.empty()) say(more);
  return {status, summary.error(), summary};
}

// ... and to the end of a command.
int follow(const Options& o, std::unique_ptr<grpc::ClientReader<wire::Progress>> reader, const Words& words, std::optional<double> stop_ms = {}) {
  const Ended e = watch(o, std::move(reader), words, stop_ms);
  if (!o.json) return e.status;
  const Json its = e.summary ? summary_json(*e.summary) : Json::object();
  print(e.status == kDone ? its : with_error(its, e.error, e.status));
  return e.status;
}

std::string absolute_dir(const Options& o) {
  std::string dir = std::filesystem::absolute(o.dir).lexically_normal();
  while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
  return dir;
}

// The numbers that logs and migrctl print.
Result<std::uint32_t> migration_of(const std::string& text) {
  std::size_t used = 0;
  unsigned long id = 0;
  try {
    id = std::stoul(text, &used, 16);
  } catch (const std::exception&) {
  }
  if (used != text.size() || !id || id > UINT32_MAX) return Error{EINVAL, "'" + text + "' is no number of a migration: eight hex digits"};
  return static_cast<std::uint32_t>(id);
}

// ---- what was migrated before

Result<std::vector<Json>> past_migrations(const Options& o) {
  const auto config = load_config(o.config);
  if (!config) return config.error();
  auto past = History(config->state_dir).read();
  if (!past) return past.error();
  for (const auto& w : past->warnings) say(w);
  return std::move(past->entries);
}

int cmd_history(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl history"));
  const auto entries = past_migrations(o);
  if (!entries) return refuse(o, entries.error().text);
  if (o.json) return print(*entries);
  std::fputs(history_text(*entries).c_str(), stdout);
  return kDone;
}

int cmd_report(const Options& o) {
  const auto id = migration_of(o.migration);
  if (!id) return failed(o, kUsage, id.error().text);
  if (!is_root()) return refuse(o, need_root("migrctl report"));
  const auto entries = past_migrations(o);
  if (!entries) return refuse(o, entries.error().text);
  const auto summary = find_migration(*entries, *id);
  if (!summary) return refuse(o, "no migration '" + o.migration + "' was begun on this host, or it is long ago; see: migrctl history");
  if (o.json) return print(*summary);
  const std::string html = report_html(*summary);
  if (o.output == "-") return std::fputs(html.c_str(), stdout) < 0 ? kFailed : kDone;
  const std::string file = o.output.empty() ? "migration-" + migration_name(*summary) + ".html" : o.output;
  std::ofstream out(file);
  if (!(out << html << std::flush)) return failed(o, kFailed, sys_error("cannot write " + file).text);
  std::printf("%s\n", file.c_str());
  return kDone;
}

// Nothing: nobody can tell.
std::optional<ExpectedStop> stop_of(const Options& o, const wire::PlanReply& plan) {
  const auto& s = plan.summary();
  const auto entries = past_migrations(o);
  if (!entries) say("no history: " + entries.error().text);
  const auto past = entries ? expected_stop(*entries, s.container()) : std::nullopt;
  if (past && past->same) return past;
  if (!s.error().empty()) return {};  // what it has is not known
  const auto config = load_config(o.config);
  const auto to = config ? config->peer(s.to()) : std::nullopt;
  return likely_stop(past, estimated_stop({plan.memory_bytes(), plan.pre_copy(), s.resources().qp(), to ? link_rate(to->address) : 0}));
}

// Exit status 0: it would move.
int show_plan(const Options& o, const wire::PlanReply& plan) {
  const auto& s = plan.summary();
  const bool moves = s.error().empty();
  if (o.json) {
    const Json j = plan_json(plan, stop_of(o, plan));
    print(moves ? j : with_error(j, s.error(), kRefused));
    if (!moves) say(s.error());
    return moves ? kDone : kRefused;
  }
  if (!moves) return refuse(o, s.container() + " would not move: " + s.error() + named_migration(s));
  std::fputs(plan_text(plan, stop_of(o, plan)).c_str(), stdout);
  return kDone;
}

constexpr Words kMigration = {"runs on", "goes on running on", "are over, their other ends having died"};

wire::MigrateRequest migration(const Options& o, const std::string& container, const std::string& to) {
  wire::MigrateRequest request;
  request.set_container(container);
  request.set_to(to);
  request.set_stop_and_copy(o.stop_and_copy);
  request.set_pre_copy(o.pre_copy || o.pre_copy_rounds);
  request.set_pre_copy_rounds(o.pre_copy_rounds);
  request.set_no_pre_setup(o.no_pre_setup);
  request.set_drain_limit_ms(o.drain_limit_ms);
  request.set_max_stop_ms(o.max_stop_ms);
  return request;
}

Result<wire::PlanReply> plan_of(const Options& o, const wire::MigrateRequest& request) {
  grpc::ClientContext ctx;
  set_deadline(ctx, 2 * kCheckMs + kProcessMs);
  wire::PlanReply plan;
  if (auto s = control(o)->Plan(&ctx, request, &plan); !s.ok()) return Error{EHOSTUNREACH, grpc_text(o, s)};
  return plan;
}

// What the stop of this container was the last times.
std::optional<double> known_stop(const Options& o, const std::string& container) {
  const auto entries = past_migrations(o);
  const auto stop = entries ? expected_stop(*entries, container) : std::nullopt;
  return stop && stop->same ? std::optional(stop->median_ms) : std::nullopt;
}

int cmd_migrate(const Options& o) {
  if (o.container.empty() == !o.pid) return failed(o, kUsage, "name either a container or, with --pid, a process");
  if (!is_root()) return refuse(o, need_root("migrctl migrate"));
  const auto request = migration(o, o.pid ? bare_name(o.pid) : o.container, o.to);
  if (o.dry_run) {
    const auto plan = plan_of(o, request);
    return plan ? show_plan(o, *plan) : refuse(o, plan.error().text);
  }
  grpc::ClientContext ctx;
  const auto stub = control(o);
  return follow(o, stub->Migrate(&ctx, request), kMigration, known_stop(o, request.container()));
}

ContainerOf containers_here(const Options& o) {
  const auto config = load_config(o.config);  // else where runc is by itself
  const Config usual;
  return Runtime(config ? *config : usual).containers();
}

Result<Occupants> occupants_of_host(const Options& o) {
  auto k = KernelRecord::open();
  if (!k) return k.error();
  const auto ctxs = k->contexts();
  if (!ctxs) return ctxs.error();
  return occupants(*ctxs, containers_here(o));
}

// One after the other: while one stands still nothing else takes its time. Who is refused by one host is for the next.
void drain(const Options& o, HostDrain& d) {
  const auto stub = control(o);
  const auto plans = std::exchange(d.would_move, {});
  Words words = kMigration;
  words.last = false;
  std::optional<AtTheEnd> ends;
  for (std::size_t i = 0; i < plans.size(); i++) {
    const auto& plan = plans[i];
    const std::string& name = plan.summary().container();
    const std::string text = drain_ends_text(name, plans.size() - i - 1);
    if (ends) ends->says(text);
    else ends.emplace(text);
    auto to = std::find(d.to.begin(), d.to.end(), plan.summary().to());
    Ended e{kRefused};
    for (; to != d.to.end() && e.status == kRefused; ++to) {
      say(fmt::format("container {} of {}: {} -> {}", i + 1, plans.size(), name, *to));
      grpc::ClientContext ctx;
      e = watch(o, stub->Migrate(&ctx, migration(o, name, *to)), words, known_stop(o, name));
    }
    if (e.summary && e.summary->migrated()) d.moved.push_back(*e.summary);
    else d.stays.push_back({name, e.error});
    if (e.status != kDone && !o.keep_going) break;
  }
}

int cmd_drain(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl drain"));
  const auto all = occupants_of_host(o);
  if (!all) return refuse(o, all.error().text);
  auto d = plan_drain(*all, o.hosts, [&](const std::string& name, const std::string& to) { return plan_of(o, migration(o, name, to)); });
  const auto refused = [&](const std::string& text) {
    if (o.json) print(with_error(drain_json(d), text, kRefused));
    say(text);
    return kRefused;
  };
  if (o.dry_run && !o.json) std::fputs(drain_plan_text(d).c_str(), stdout);
  if (!d.stays.empty() && (o.dry_run || !o.keep_going))
    return refused(o.dry_run && !o.json ? "not all would leave" : what_is_wrong(d) + ". Nothing was touched; with --keep-going the others leave");
  if (o.dry_run) return o.json ? print(drain_json(d)) : kDone;
  drain(o, d);
  // What has come meanwhile, or what was not begun.
  const auto left = occupants_of_host(o);
  if (!left) return failed(o, kFailed, left.error().text);
  note_left(d, *left);
  const int status = all_well(d) ? kDone : kFailed;
  if (o.json) print(status == kDone ? drain_json(d) : with_error(drain_json(d), what_is_wrong(d), status));
  else std::fputs(drain_text(d).c_str(), stdout);
  if (status != kDone) say(o.json ? what_is_wrong(d) : "not all has left");
  return status;
}

int cmd_checkpoint(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl checkpoint"));
  grpc::ClientContext ctx;
  wire::CheckpointRequest request;
  request.set_container(o.container);
  request.set_dir(absolute_dir(o));
  const auto stub = control(o);
  return follow(o, stub->Checkpoint(&ctx, request), {"is stored in", "goes on running on", "end here"});
}

int cmd_restore(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl restore"));
  grpc::ClientContext ctx;
  wire::RestoreRequest request;
  request.set_dir(absolute_dir(o));
  const auto stub = control(o);
  return follow(o, stub->Restore(&ctx, request), {"runs on", nullptr, "are gone"});
}

int cmd_cancel(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl cancel"));
  wire::CancelRequest request;
  request.set_container(o.container);
  if (const auto id = migration_of(o.container)) request.set_id(*id);
  request.set_wait_ms(kCancelMs);
  grpc::ClientContext ctx;
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kCancelMs + kCheckMs));
  wire::CancelReply r;
  if (auto s = control(o)->Cancel(&ctx, request, &r); !s.ok()) return refuse_order(o, s, "migrctl recover");
  const std::string text = cancel_text(r);
  if (!r.ended()) say(text);
  if (o.json)
    print(r.ended() ? cancel_json(r) : with_error(cancel_json(r), text, kFailed));
  else if (r.ended())
    std::fputs(wrapped(text, 2).c_str(), stdout);
  return r.ended() ? kDone : kFailed;
}

int cmd_recover(const Options& o) {
  wire::RecoverRequest request;
  if (!o.migration.empty()) {
    const auto id = migration_of(o.migration);
    if (!id) return failed(o, kUsage, id.error().text);
    request.set_id(*id);
  }
  if (o.commit || o.rollback) {
    if (!request.id()) return failed(o, kUsage, "which one? Give the number of the migration; see: migrctl recover");
    request.set_order(o.commit ? wire::COMMITTED : wire::UNDONE);
    request.set_force(o.force);
  } else if (o.force) {
    return failed(o, kUsage, "--force what? Give --commit or --rollback, too");
  }
  if (!is_root()) return refuse(o, need_root("migrctl recover"));
  grpc::ClientContext ctx;
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kCheckMs));
  wire::RecoverReply r;
  if (auto s = control(o)->Recover(&ctx, request, &r); !s.ok()) return o.commit || o.rollback ? refuse_order(o, s, "migrctl recover") : refuse_grpc(o, s);
  if (o.json) return print(open_json(r));
  std::fputs(open_text(r).c_str(), stdout);
  return kDone;
}

int cmd_reload(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl reload"));
  grpc::ClientContext ctx;
  set_deadline(ctx, kCheckMs);
  wire::ReloadReply r;
  if (auto s = control(o)->Reload(&ctx, {}, &r); !s.ok()) return refuse_order(o, s, "migrctl peers");
  if (o.json) return print(reload_json(r));
  std::fputs(wrapped(reload_text(r), 2).c_str(), stdout);
  return kDone;
}

// ---- links

int cmd_links(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl links"));
  grpc::ClientContext ctx;
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kCheckMs));
  wire::LinksRequest request;
  request.set_vqps(o.vqps);
  wire::LinksReply r;
  if (auto s = control(o)->Links(&ctx, request, &r); !s.ok()) return refuse_grpc(o, s);
  if (o.json) return print(links_json(r));
  std::fputs(links_text(r).c_str(), stdout);
  return kDone;
}

int order(const Options& o, const char* command, wire::LinkOrder::What what, const char* done) {
  wire::LinkOrder request;
  request.set_what(what);
  std::string device = o.name;
  if (const auto slash = device.rfind('/'); slash != std::string::npos) {
    const std::string port = device.substr(slash + 1);
    if (port.empty() || port.size() > 3 || port.find_first_not_of("0123456789") != std::string::npos || !std::atoi(port.c_str()))
      return failed(o, kUsage, "'" + device + "' is no port: DEVICE or DEVICE/PORT, ports count from 1");
    request.set_port(static_cast<std::uint32_t>(std::atoi(port.c_str())));
    device.resize(slash);
  }
  if (!is_root()) return refuse(o, need_root(command));
  request.set_device(device);
  request.set_force(o.force);
  request.set_wait_ms(o.wait_ms);
  grpc::ClientContext ctx;
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kCheckMs + o.wait_ms));
  wire::LinkOrderReply r;
  if (auto s = control(o)->SetLink(&ctx, request, &r); !s.ok()) return refuse_order(o, s, "migrctl links");
  const int status = r.left_size() ? kFailed : kDone;
  if (o.json)
    print(status == kDone ? order_json(r) : with_error(order_json(r), "it was not carried out everywhere in time", status));
  else
    std::fputs(order_text(r, o.name, done).c_str(), stdout);
  for (const auto& line : r.left()) say(line);
  return status;
}

int cmd_link_down(const Options& o) { return order(o, "migrctl link down", wire::LinkOrder::DOWN, "is down"); }
int cmd_link_up(const Options& o) { return order(o, "migrctl link up", wire::LinkOrder::UP, "may be used"); }
int cmd_links_prefer(const Options& o) {
  if (o.name.empty() != o.none) return failed(o, kUsage, "name either a device or, with --none, no device");
  return o.none ? order(o, "migrctl links prefer", wire::LinkOrder::PREFER_NONE, "no link is preferred")
                : order(o, "migrctl links prefer", wire::LinkOrder::PREFER, "is preferred");
}

// ---- the kernel's record

int cmd_ps(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl ps"));
  auto k = KernelRecord::open();
  if (!k) return refuse(o, k.error().text);
  auto ctxs = k->contexts();
  if (!ctxs) return refuse(o, ctxs.error().text);
  const auto container_of = containers_here(o);
  if (o.json) return print(ps_json(*ctxs, container_of));
  std::fputs(ps_text(*ctxs, container_of).c_str(), stdout);
  return kDone;
}

int cmd_show(const Options& o) {
  if (!is_root()) return refuse(o, need_root("migrctl show"));
  auto k = KernelRecord::open();
  if (!k) return refuse(o, k.error().text);
  auto ctxs = k->contexts(o.pid);
  if (!ctxs) return refuse(o, ctxs.error().text);
  if (ctxs->empty()) return refuse(o, "process " + std::to_string(o.pid) + " has no RDMA resources on record; see: migrctl ps");
  for (auto& c : *ctxs)
    if (auto s = k->objects(c); !s) return refuse(o, s.error().text);
  if (o.json) return print(show_json(*ctxs));
  std::fputs(show_text(*ctxs).c_str(), stdout);
  return kDone;
}

// ---- is all as it has to be

Result<wire::VersionReply> ask_daemon(const Options& o) {
  grpc::ClientContext ctx;
  set_deadline(ctx, kCheckMs);
  wire::VersionReply v;
  if (const auto s = control(o)->Version(&ctx, {}, &v); !s.ok()) return Error{EHOSTUNREACH, "no answer on " + o.socket};
  return v;
}

// What is wrong with the call says nothing of the paths.
void try_paths_to(Peers& peers, const wire::HostFacts& here, PeerAnswer& peer) {
  const auto channel = peers.channel(peer.name);
  auto named = peer.facts ? paths_between(here, *peer.facts) : std::vector<NamedPath>();
  if (!channel || named.empty()) return;
  std::vector<PathToTry> paths;
  for (const auto& n : named) paths.push_back(n.path);
  wire::Host::Stub stub(*channel);
  const auto trial = trial_of_host(), of_peer = trial_of_peer(stub, peer.name);
  const auto tried = try_paths(*trial, *of_peer, 0, paths);
  if (!tried) return;
  for (std::size_t i = 0; i < named.size(); i++) named[i].result = (*tried)[i];
  peer.tried = std::move(named);
}

std::vector<Finding> examine(const Options& o) {
  constexpr char kHere[] = "this host";
  if (!is_root()) return {{kHere, "root", Health::kFailed, "not root", need_root("migrctl doctor")}};
  const auto config = load_config(o.config);
  if (!config) {
    const char* const what = config.error().code == ENOENT ? "put your hosts into a copy of /usr/share/doc/migr/examples/migrd.json; migrd(8) has every key; another file: migrctl --config FILE"
                                                           : "migrd(8) says what belongs there; another file: migrctl --config FILE";
    return {{kHere, "config", Health::kFailed, config.error().text, what}};
  }
  const std::int64_t now_s = unix_now();
  const auto version = version_of(*config, 0);
  const std::uint64_t filled = rdma_filled_bytes();
  const auto here = facts_of(*config, version, filled);
  auto all = judge_host(here, now_s);
  all.push_back(judge_daemon(version, ask_daemon(o), o.config));
  const auto files = pki::load(config->pki);
  if (!files) return all;  // that is among what was found
  Peers peers(*config, *files);
  auto names = o.peers;
  for (const auto& p : config->peers())
    if (o.peers.empty() && p.name != config->name) names.push_back(p.name);
  if (names.empty()) all.push_back({config->name, "peers", Health::kWarning, "none in " + o.config, "add the hosts that containers are to go to, or have partners on"});
  auto answers = ask_peers(peers, names, filled);
  (void)parallel_for(answers, [&](PeerAnswer& a) { return try_paths_to(peers, here, a), Status(); });
  for (const auto& answer : answers)
    for (auto& f : judge_peer(here, answer, now_s)) all.push_back(std::move(f));
  return all;
}

int cmd_doctor(const Options& o) {
  const auto all = examine(o);
  if (o.json) print(doctor_json(all));
  else std::fputs(doctor_text(all, may_colour(STDOUT_FILENO)).c_str(), stdout);
  return health_of(all) == Health::kFailed ? kFailed : kDone;
}

// ---- certificates

int cmd_pki_init(const Options& o) {
  if (auto s = pki::init(o.dir); !s) return refuse(o, s.error().text);
  if (o.json) return print({{"ca", o.dir}});
  std::printf("CA in %s; next, for each host: migrctl pki host %s NAME\n", o.dir.c_str(), o.dir.c_str());
  return kDone;
}

int cmd_pki_host(const Options& o) {
  if (auto s = pki::issue_host(o.dir, o.name, o.ips, o.days); !s) return refuse(o, s.error().text);
  if (o.json) return print({{"folder", o.dir + "/" + o.name}, {"days", o.days}});
  std::printf("%s/%s: copy host.pem and host.key to %s of that host, and ca.pem if there is none yet\n", o.dir.c_str(), o.name.c_str(), kPkiDir);
  return kDone;
}

// Who reads half of it must not take it for all: a disk may be full.
int written(int status) {
  if (!std::fflush(stdout) && !std::ferror(stdout)) return status;
  say("standard output could not be written");
  return status == kDone ? kFailed : status;
}

// A word where a command has to be. CLI11 says of it only that a command is missing. Empty: there is none.
std::string unknown_command(const CLI::App& app) {
  const CLI::App* at = &app;
  std::string name = app.get_name();
  while (!at->get_subcommands().empty()) name += " " + (at = at->get_subcommands()[0])->get_name();
  const auto words = at->remaining();
  if (!at->get_require_subcommand_min() || words.empty()) return "";
  const auto word = std::find_if(words.begin(), words.end(), [](const std::string& w) { return !w.starts_with('-'); });
  return "'" + (word == words.end() ? words[0] : *word) + "' is no command of " + name + "; see: " + name + " --help";
}

// What may be typed. Commands are listed by --help in the order in which they are declared.
class CommandLine {
 public:
  explicit CommandLine(Options& o) : o_(o) {
    app.require_subcommand(1);
    app.set_version_flag("--version", kRelease);
    socket = app.add_option("--socket", o_.socket, "migrd's control socket; else control_socket of its configuration")->capture_default_str();
    config = app.add_option("--config", o_.config, "migrd's configuration")->capture_default_str();
    declare_moves();
    declare_daemon();
    declare_links();
    declare_looks();
    declare_pki();
  }
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  CLI::App app{"Moves containers that use RDMA between hosts. migrctl(1) says more.", "migrctl"};
  CLI::Option *socket = nullptr, *config = nullptr;
  std::function<int()> todo;  // once it is parsed

 private:
  CLI::App* add(CLI::App& parent, const char* name, const char* what, int (*f)(const Options&)) {
    CLI::App* c = parent.add_subcommand(name, what);
    // Of a command in a command the inner one is called first.
    c->callback([this, f] {
      if (!todo) todo = [this, f] { return f(o_); };
    });
    return c;
  }
  CLI::Option* json(CLI::App* c) { return c->add_flag("--json", o_.json, "for programs"); }

  void how(CLI::App* c) {
    auto* stop_and_copy = c->add_flag("--stop-and-copy", o_.stop_and_copy, "copy no memory before the stop");
    c->add_flag("--pre-copy", o_.pre_copy, "copy memory before the stop, too, even if there is little")->excludes(stop_and_copy);
    c->add_option("--pre-copy-rounds", o_.pre_copy_rounds, "copy it exactly so often before the stop")->check(CLI::Range(1u, kPreCopyRoundsMax))->excludes(stop_and_copy);
    c->add_flag("--no-pre-setup", o_.no_pre_setup, "make and connect the RDMA objects during the stop, to compare with");
    c->add_option("--drain-limit", o_.drain_limit_ms, "ms to wait for work requests under way, before they are cut off and replayed")->check(CLI::Range(1u, kDrainMaxMs));
    c->add_option("--max-stop", o_.max_stop_ms, "ms that a container may stand still; it goes on here if it would be longer")->check(CLI::Range(1u, kStopMaxMs));
  }

  void declare_moves() {
    auto* migrate = add(app, "migrate", "moves a running container to another host", cmd_migrate);
    auto* container = migrate->add_option("CONTAINER", o_.container);
    migrate->add_option("--pid", o_.pid, "a process without a container, and its descendants")->check(process_number_)->excludes(container);
    migrate->add_option("--to", o_.to, "the host, by its name among the peers")->required();
    how(migrate);
    migrate->add_flag("--dry-run", o_.dry_run, "only say whether it would move, and what stop to expect");
    json(migrate);
    auto* drain = add(app, "drain", "moves every container that uses RDMA to other hosts, one after the other", cmd_drain);
    drain->add_option("--to", o_.hosts, "a host, may be repeated: each container goes to the first that takes it")->required();
    drain->add_flag("--keep-going", o_.keep_going, "move what can be moved, whatever stays");
    how(drain);
    drain->add_flag("--dry-run", o_.dry_run, "only say what would move where, and what would stay");
    json(drain);
    auto* checkpoint = add(app, "checkpoint", "stores a running container or process in a folder, and ends it", cmd_checkpoint);
    checkpoint->add_option("CONTAINER|PID", o_.container)->required();
    checkpoint->add_option("DIR", o_.dir, "is made, for root only")->required();
    json(checkpoint);
    auto* restore = add(app, "restore", "starts on this host what a checkpoint has stored", cmd_restore);
    restore->add_option("DIR", o_.dir)->required();
    json(restore);
    auto* cancel = add(app, "cancel", "takes back what was begun on this host, as long as its commit is not decided", cmd_cancel);
    cancel->add_option("ID|CONTAINER", o_.container, "of the migration, checkpoint or restore")->required();
    json(cancel);
    auto* recover = add(app, "recover", "migrations that are not finished; the operator's decision about one", cmd_recover);
    recover->add_option("ID", o_.migration, "of the migration");
    auto* commit = recover->add_flag("--commit", o_.commit, "the container runs at the destination");
    recover->add_flag("--rollback", o_.rollback, "it does not, and never will")->excludes(commit);
    recover->add_flag("--force", o_.force, "you have made sure of what migrd cannot know");
    json(recover);
  }

  void declare_daemon() {
    json(add(app, "reload", "peers and their rights, read again from migrd's configuration", cmd_reload));
    json(add(app, "history", "what was migrated from this host", cmd_history));
    auto* report = add(app, "report", "a page about one migration", cmd_report);
    report->add_option("ID", o_.migration, "of the migration, as history prints it")->required();
    auto* page = report->add_option("-o,--output", o_.output, "the file; -: standard output; else migration-ID.html");
    report->add_flag("--json", o_.json, "what it is made of, for programs; no page")->excludes(page);
  }

  void declare_links() {
    auto* links = add(app, "links", "links of this host, and which processes and vQPs use them", cmd_links);
    links->add_flag("--vqps", o_.vqps, "each vQP, too; with --json")->needs(json(links));
    links->require_subcommand(0, 1);
    auto waits = [&](CLI::App* c) { c->add_option("--wait", o_.wait_ms, "ms for the processes to carry it out")->capture_default_str()->check(CLI::Range(0u, kLinkOrderMaxMs)); };
    auto* prefer = add(*links, "prefer", "vQPs go to this link and stay there", cmd_links_prefer);
    auto* preferred = prefer->add_option("DEVICE[/PORT]", o_.name);
    prefer->add_flag("--none", o_.none, "every vQP goes back to its default link")->excludes(preferred);
    waits(prefer);
    json(prefer);
    auto* link = app.add_subcommand("link", "takes a link out of use, or puts it back");
    link->require_subcommand(1);
    auto* down = add(*link, "down", "vQPs go to their backup links, and none comes here", cmd_link_down);
    down->add_option("DEVICE[/PORT]", o_.name)->required();
    down->add_flag("--force", o_.force, "also if vQPs have no backup, and break");
    waits(down);
    json(down);
    auto* up = add(*link, "up", "ends link down", cmd_link_up);
    up->add_option("DEVICE[/PORT]", o_.name)->required();
    json(up);
  }

  void declare_looks() {
    json(add(app, "ps", "processes with RDMA resources", cmd_ps));
    auto* show = add(app, "show", "every RDMA resource of a process", cmd_show);
    show->add_option("PID", o_.pid)->required()->check(process_number_);
    json(show);
    json(add(app, "peers", "the hosts of the configuration, and whether they answer", cmd_peers));
    auto* doctor = add(app, "doctor", "is everything that migrations need here and on the peers", cmd_doctor);
    doctor->add_option("--peer", o_.peers, "only this one, may be repeated; else all that are configured");
    json(doctor);
    json(add(app, "version", "versions of all parts on this host", cmd_version));
  }

  void declare_pki() {
    auto* pki = app.add_subcommand("pki", "certificates of the hosts");
    pki->require_subcommand(1);
    auto* init = add(*pki, "init", "makes a certificate authority", cmd_pki_init);
    init->add_option("DIR", o_.dir)->required();
    json(init);
    auto* host = add(*pki, "host", "issues the certificate of a host", cmd_pki_host);
    host->add_option("DIR", o_.dir)->required();
    host->add_option("NAME", o_.name)->required();
    host->add_option("--ip", o_.ips, "address that it has, for other programs, may be repeated");
    host->add_option("--days", o_.days, "that it is valid")->check(CLI::Range(1L, pki::kCaDays))->capture_default_str();
    json(host);
  }

  Options& o_;
  const CLI::Validator process_number_{
      [](const std::string& text) {
        std::uint32_t pid = 0;
        const auto [end, err] = std::from_chars(text.data(), text.data() + text.size(), pid);
        return err == std::errc{} && *end == 0 && pid && pid <= INT32_MAX ? "" : "'" + text + "' is no process number; migrctl ps has those of programs and of containers";
      },
      ""};
};

}  // namespace

int main(int argc, char** argv) {
  setenv("GRPC_VERBOSITY", "NONE", 0);  // what matters comes back as a status
  // A pipe that nobody reads is an output that cannot be written. Not ignored, unless it was: there is AtTheEnd.
  if (signal(SIGPIPE, [](int) {}) == SIG_IGN) signal(SIGPIPE, SIG_IGN);
  Options o;
  CommandLine line(o);
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    o.json = std::any_of(argv + 1, argv + argc, [](const char* a) { return !std::strcmp(a, "--json"); });  // or it is not there yet
    if (!e.get_exit_code()) return written(line.app.exit(e));
    if (const auto unknown = unknown_command(line.app); !unknown.empty()) return written(failed(o, kUsage, unknown));
    if (o.json) print(error_json(e.what(), kUsage));
    line.app.exit(e);
    return written(kUsage);
  }
  o.socket_named = line.socket->count();
  if (const auto config = load_config(o.config)) {
    take_limits(*config);
    if (!line.socket->count()) o.socket = config->control_socket;
  } else if (const std::string command = line.app.get_subcommands()[0]->get_name(); command != "doctor" && command != "pki") {  // the one says what to do, the other needs none
    // Who names a file, and no socket, means its daemon, and no other.
    if (line.config->count() && !line.socket->count()) return written(failed(o, kUsage, config.error().text));
    if (o.config_named = config.error().code == EINVAL && command != "history" && command != "report"; o.config_named) say(config.error().text + "; what it says is not used");
  }
  return written(line.todo ? line.todo() : kUsage);
}
