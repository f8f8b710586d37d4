// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "metrics.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <map>

#include "clock.h"
#include "fault.h"
#include "kernel_record.h"
#include "limits.h"
#include "parallel.h"

namespace migr {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = prometheus::Labels;

// Of real hosts a blackout lasts some 10 ms to some seconds, of emulated ones ten times as much.
const prometheus::Histogram::BucketBoundaries kSeconds{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250};

constexpr const char* kOutcomes[] = {"moved", "went_back", "undecided", "refused"};
constexpr const char* kRoles[] = {"source", "destination", "partner"};
constexpr const char* kStoring[] = {"checkpoint", "restore"};
constexpr const char* kProcessStates[] = {"running", "suspended", "frozen"};  // enum migr_proc_state
constexpr const char* kFailoverOutcomes[] = {"done", "broken"};               // enum migr_links_outcome

const char* outcome_of(const wire::Summary& s) {
  if (s.migrated()) return "moved";
  if (s.undecided()) return "undecided";
  return s.touched() ? "went_back" : "refused";
}

// The coordinator's; those up to the commit can be why it goes back.
constexpr FaultStep kPhases[] = {FaultStep::kSourceCheck, FaultStep::kSourceRecord, FaultStep::kSourcePrepare, FaultStep::kSourceConnect, FaultStep::kSourcePreCopy,
                                 FaultStep::kSourceSuspend, FaultStep::kSourceDrain, FaultStep::kSourceFreeze, FaultStep::kSourceCreate, FaultStep::kSourceCopy,
                                 FaultStep::kSourceReady, FaultStep::kSourceCommit, FaultStep::kSourceResume, FaultStep::kSourceDestroy};
constexpr char kRollback[] = "rollback";

/// "drain"
std::string name_of(FaultStep phase) {
  const auto name = kFaultSteps[static_cast<std::size_t>(phase)];
  return std::string(name.substr(name.find('.') + 1));
}

/// The phase in which it failed: the last one before it went back.
std::string failed_phase(const wire::Summary& s) {
  std::string last = "check";
  for (const auto& p : s.phases())
    if (p.phase() != kRollback) last = p.phase();
  return last;
}

class Gauges {
 public:
  Gauges(std::vector<MetricFamily>& out, const char* name, const char* help, MetricType type = MetricType::Gauge) : family_(out.emplace_back()), type_(type) {
    family_.name = name;
    family_.help = help;
    family_.type = type;
  }
  void add(double value, const Labels& labels = {}) {
    auto& m = family_.metric.emplace_back();
    for (const auto& [name, v] : labels) m.label.push_back({name, v});
    (type_ == MetricType::Counter ? m.counter.value : m.gauge.value) = value;
  }

 private:
  MetricFamily& family_;
  const MetricType type_;
};

}  // namespace

Metrics::Metrics(Parts parts)
    : parts_(std::move(parts)),
      migrations_(prometheus::BuildCounter().Name("migr_migrations_total").Help("Migrations that have ended, by the role of this host.").Register(registry_)),
      stored_(prometheus::BuildCounter().Name("migr_stored_total").Help("Checkpoints made and restored here.").Register(registry_)),
      rollbacks_(prometheus::BuildCounter().Name("migr_rollbacks_total").Help("Migrations from here that went back, by the phase that failed.").Register(registry_)),
      replayed_(prometheus::BuildCounter().Name("migr_replayed_work_requests_total").Help("Work requests that a drain has left over and the new path replayed.").Register(registry_)),
      bytes_(prometheus::BuildCounter().Name("migr_copied_bytes_total").Help("Bytes sent to destinations.").Register(registry_)),
      phases_(prometheus::BuildHistogram().Name("migr_phase_duration_seconds").Help("Phases of migrations from here.").Register(registry_)),
      service_blackout_(prometheus::BuildHistogram().Name("migr_service_blackout_seconds").Help("Freeze to resume, of what was moved from here.").Register(registry_)),
      communication_blackout_(prometheus::BuildHistogram().Name("migr_communication_blackout_seconds").Help("On partners of what was moved from here: from a QP's last completion, but not before it was suspended, to its resumption; the longest of all QPs.").Register(registry_)) {
  // What never happened is 0, and not missing.
  for (const auto* outcome : kOutcomes) {
    for (const auto* role : kRoles) migrations_.Add({{"role", role}, {"outcome", outcome}});
    for (const auto* what : kStoring) stored_.Add({{"what", what}, {"outcome", outcome}});
  }
  for (const auto phase : kPhases) {
    if (phase <= FaultStep::kSourceCommit) rollbacks_.Add({{"phase", name_of(phase)}});
    phases_.Add({{"phase", name_of(phase)}}, kSeconds);
  }
  phases_.Add({{"phase", kRollback}}, kSeconds);
  replayed_.Add({}), bytes_.Add({});
  service_blackout_.Add({}, kSeconds), communication_blackout_.Add({}, kSeconds);
}

void Metrics::ended(What what, const wire::Summary& s) {
  const char* outcome = outcome_of(s);
  if (what != What::kMigrate) return stored_.Add({{"what", kStoring[what == What::kRestore]}, {"outcome", outcome}}).Increment();
  migrations_.Add({{"role", "source"}, {"outcome", outcome}}).Increment();
  bytes_.Add({}).Increment(static_cast<double>(s.bytes_copied()));
  replayed_.Add({}).Increment(static_cast<double>(s.replayed().replayed()));
  for (const auto& p : s.phases()) phases_.Add({{"phase", p.phase()}}, kSeconds).Observe(p.ms() / 1e3);
  if (!s.migrated() && !s.undecided() && s.touched()) rollbacks_.Add({{"phase", failed_phase(s)}}).Increment();
  if (!s.migrated()) return;
  service_blackout_.Add({}, kSeconds).Observe(s.service_blackout_ms() / 1e3);
  if (s.partners_size()) communication_blackout_.Add({}, kSeconds).Observe(s.communication_blackout_ms() / 1e3);
}

void Metrics::settled(const wire::Summary& s) {
  const char* outcome = s.migrated() ? "moved" : "went_back";
  if (s.to().starts_with('/')) return stored_.Add({{"what", kStoring[0]}, {"outcome", outcome}}).Increment();
  migrations_.Add({{"role", "source"}, {"outcome", outcome}}).Increment();
}

void Metrics::decided(const char* role, wire::Outcome outcome) {
  migrations_.Add({{"role", role}, {"outcome", outcome == wire::COMMITTED ? "moved" : "went_back"}}).Increment();
}

void Metrics::ask_peers(Peers& peers) {
  std::vector<std::pair<std::string, bool>> all;
  for (const auto& p : parts_.config.peers())
    if (p.name != parts_.config.name) all.emplace_back(p.name, false);
  (void)parallel_for(all, [&](auto& peer) -> Status {
    auto channel = peers.channel(peer.first);
    if (!channel) return channel.error();
    wire::Host::Stub stub(*channel);
    const auto v = call(stub, &wire::Host::Stub::Version, wire::Empty(), kCheckMs, peer.first);
    peer.second = bool(v);
    return v;
  });
  std::lock_guard lock(mutex_);
  peers_ = {all.begin(), all.end()};
}

void Metrics::look(std::vector<MetricFamily>& out) const {
  out.reserve(out.size() + 32);  // a Gauges holds a reference into it
  const auto now_s = unix_now();
  Gauges(out, "migr_build_info", "1; its label is the release.").add(1, {{"release", kRelease}});

  std::map<std::string, std::pair<int, std::int64_t>> open;  // how many, the oldest's beginning
  for (const auto* role : kRoles) open[role] = {0, now_s};
  for (auto* r : parts_.roles)
    for (const auto& o : r->open_migrations()) {
      auto& [n, begun] = open[o.role()];
      n++;
      if (o.begun_s()) begun = std::min(begun, o.begun_s());
    }
  Gauges migrations(out, "migr_open_migrations", "Migrations that are not finished, by the role of this host.");
  Gauges ages(out, "migr_open_migration_age_seconds", "Since the oldest of them began; 0: there is none.");
  for (const auto& [role, o] : open) {
    migrations.add(o.first, {{"role", role}});
    ages.add(static_cast<double>(now_s - o.second), {{"role", role}});
  }

  std::size_t in_state[std::size(kProcessStates)] = {};
  for (const auto& s : parts_.sessions.all())
    if (s->state() < std::size(kProcessStates)) in_state[s->state()]++;
  Gauges processes(out, "migr_processes", "Processes with libmigr.");
  for (std::size_t i = 0; i < std::size(kProcessStates); i++) processes.add(static_cast<double>(in_state[i]), {{"state", kProcessStates[i]}});

  double attached = 0, alone = 0;
  auto kernel = KernelRecord::open();
  if (kernel)
    if (const auto ctxs = kernel->contexts())
      for (const auto& c : *ctxs) (c.rec.flags & MIGR_CTX_ATTACHED ? attached : alone)++;
  Gauges(out, "migr_module_up", "1: migr.ko is loaded and speaks our ABI.").add(bool(kernel));
  Gauges contexts(out, "migr_record_contexts", "RDMA contexts in the kernel's record, by whether libmigr serves them.");
  contexts.add(attached, {{"libmigr", "yes"}});
  contexts.add(alone, {{"libmigr", "no"}});

  Gauges certificate(out, "migr_certificate_expiry_timestamp_seconds", "When the certificate that is in use ends.");
  certificate.add(static_cast<double>(parts_.certificates.ends_s()));
  Gauges(out, "migr_certificate_refused", "1: new files are not taken.").add(!parts_.certificates.refused().empty());

  Gauges peers(out, "migr_peer_up", "1: the peer has answered.");
  {
    std::lock_guard lock(mutex_);
    for (const auto& [name, up] : peers_) peers.add(up, {{"peer", name}});
  }

  Gauges(out, "migr_directory_up", "1: the directory of links answers, as far as is known.").add(parts_.directory.error().empty());
  Gauges ports(out, "migr_port_up", "1: a port of an RDMA device is up, and nobody has taken it down.");
  Gauges flaps(out, "migr_port_flaps", "How often it went down since migrd looks.");
  for (const auto& p : parts_.ports.ports()) {
    const Labels labels{{"device", p.device}, {"port", std::to_string(p.port)}};
    ports.add(!(p.flags & MIGR_LINKS_PORT_DOWN), labels);
    flaps.add(p.flaps, labels);
  }

  std::map<std::string, double> links;
  for (const auto s : {MIGR_LINKS_LINK_MAKING, MIGR_LINKS_LINK_UP, MIGR_LINKS_LINK_DOWN, MIGR_LINKS_LINK_ABSENT}) links[link_state_name(s)] = 0;
  double vqps = 0, backed = 0, processes_with_links = 0, without_directory = 0;
  for (const auto& p : parts_.table.reports(false)) {
    processes_with_links++;
    without_directory += !p.error().empty();
    vqps += p.vqps(), backed += p.backed();
    for (const auto& l : p.links()) links[link_state_name(l.state())]++;
  }
  Gauges(out, "migr_link_processes", "Processes with a policy for failing links.").add(processes_with_links);
  Gauges(out, "migr_link_directory_failed_processes", "Those of them whose last question the directory could not answer.").add(without_directory);
  Gauges by_state(out, "migr_links", "Links of processes.");
  for (const auto& [state, n] : links) by_state.add(n, {{"state", state}});
  Gauges by_backup(out, "migr_vqps", "vQPs with a policy, by whether they could change their link now.");
  by_backup.add(backed, {{"backup", "yes"}});
  by_backup.add(vqps - backed, {{"backup", "no"}});

  Gauges failovers(out, "migr_failovers_total", "Connections between two processes that changed their link, by what made them.", MetricType::Counter);
  const auto switches = parts_.table.switch_counts();
  for (std::uint32_t cause = MIGR_LINKS_CAUSE_COMPLETION; cause <= MIGR_LINKS_CAUSE_PREFER; cause++)
    for (std::uint32_t outcome = 0; outcome < std::size(kFailoverOutcomes); outcome++) {
      const auto n = switches.find({cause, outcome});
      failovers.add(n == switches.end() ? 0 : static_cast<double>(n->second), {{"cause", cause_name(cause)}, {"outcome", kFailoverOutcomes[outcome]}});
    }
}

std::vector<MetricFamily> Metrics::Collect() const {
  auto out = registry_.Collect();
  look(out);
  return out;
}

Result<std::unique_ptr<prometheus::Exposer>> expose(const Config& config, const std::shared_ptr<Metrics>& metrics) {
  if (config.metrics.empty()) return std::unique_ptr<prometheus::Exposer>();
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(config.metrics);
    exposer->RegisterCollectable(metrics);
    return exposer;
  } catch (const std::exception& e) {
    return Error{EADDRINUSE, "cannot serve metrics at " + config.metrics + " (is it in use?): " + e.what()};
  }
}

}  // namespace migr
