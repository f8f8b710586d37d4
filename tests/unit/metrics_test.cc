// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is exported, that it is counted right, and that the manual and the dashboard speak of the same.
#include "agent/metrics.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "agent/failover/peer_directory.h"
#include "agent/file_tree.h"

namespace migr::metrics_test {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

/// A role with one migration that is not finished.
struct Busy final : Role {
  wire::OutcomeReply outcome(std::uint32_t) override { return {}; }
  Status renew(std::uint32_t, const Caller&) override { return {}; }
  std::vector<wire::OpenMigration> open_migrations() override {
    wire::OpenMigration o;
    o.set_role("partner");
    o.set_begun_s(std::time(nullptr) - 100);
    return {o};
  }
};

class Exported : public ::testing::Test {
 protected:
  void SetUp() override {
    char t[] = "/tmp/migr-metrics-XXXXXX";
    ASSERT_NE(mkdtemp(t), nullptr);
    dir_ = t;
    ASSERT_TRUE(pki::init(dir_ + "/ca"));
    ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}, 100));
    config_.name = "a", config_.pki = dir_ + "/ca/a";
    config_.hosts = Hosts{{{"a", "127.0.0.1:1"}, {"b", "127.0.0.1:1"}}, {}};
    certificates_ = std::make_unique<Certificates>(config_, dir_ + "/tls");
    ASSERT_TRUE(certificates_->start());
    peers_ = std::make_unique<Peers>(config_, *certificates_);
    directory_ = std::make_unique<PeerDirectory>(*peers_, table_);
    ports_ = std::make_unique<PortWatch>(
        dir_ + "/links.json", [] { return std::vector<RdmaPort>{{"rxe0", 1, "eth0"}}; }, Debounce::Limits{1ms, 1ms, 1ms, 1ms});
    ports_->rescan([](const std::string&) { return true; });
    metrics_ = std::make_shared<Metrics>(Metrics::Parts{config_, sessions_, table_, *directory_, *ports_, *certificates_, {&busy_}});
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::set<std::string> names() {
    std::set<std::string> out;
    for (const auto& f : metrics_->Collect()) EXPECT_TRUE(out.insert(f.name).second) << f.name << " twice";
    return out;
  }
  /// Of the only child with these labels. -1: there is none.
  double value(const std::string& name, const std::map<std::string, std::string>& labels = {}) {
    for (const auto& f : metrics_->Collect())
      for (const auto& m : f.metric) {
        std::map<std::string, std::string> has;
        for (const auto& l : m.label) has[l.name] = l.value;
        if (f.name != name || has != labels) continue;
        return f.type == prometheus::MetricType::Histogram ? static_cast<double>(m.histogram.sample_count) : f.type == prometheus::MetricType::Counter ? m.counter.value
                                                                                                                                                       : m.gauge.value;
      }
    return -1;
  }
  wire::Summary moved() {
    wire::Summary s;
    s.set_migrated(true), s.set_touched(true), s.set_service_blackout_ms(20), s.set_communication_blackout_ms(10), s.set_bytes_copied(1000);
    s.add_partners("b");
    auto* p = s.add_phases();
    p->set_phase("drain"), p->set_ms(5);
    return s;
  }

  std::string dir_;
  Config config_;
  std::unique_ptr<Certificates> certificates_;
  SessionTable sessions_;
  LinkTable table_{"a"};
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<PeerDirectory> directory_;
  std::unique_ptr<PortWatch> ports_;
  Busy busy_;
  std::shared_ptr<Metrics> metrics_;
};

TEST_F(Exported, NamesAreThoseOfTheManual) {
  const std::string manual = text_of(MIGR_SOURCE "/docs/man/migrd.8");
  const auto begin = manual.find(".SH METRICS"), end = manual.find(".SH FILES");
  ASSERT_TRUE(begin != manual.npos && end != manual.npos);
  const std::string section = manual.substr(begin, end - begin);
  std::set<std::string> told;
  const std::regex name("migr_[a-z_]+");
  for (std::sregex_iterator i(section.begin(), section.end(), name), last; i != last; i++) told.insert(i->str());
  EXPECT_EQ(told, names());
}

TEST_F(Exported, TheDashboardAsksOnlyForWhatIsThereAndForAllOfIt) {
  const auto dashboard = nlohmann::json::parse(text_of(MIGR_SOURCE "/packaging/grafana-dashboard.json"));
  metrics_->ask_peers(*peers_);
  std::map<std::string, std::set<std::string>> labels;  // of each series
  for (const auto& f : metrics_->Collect()) {
    std::vector<std::string> series{f.name};
    if (f.type == prometheus::MetricType::Histogram) series = {f.name + "_bucket", f.name + "_sum", f.name + "_count"};
    for (const auto& s : series) {
      labels[s] = {"instance"};
      if (s.ends_with("_bucket")) labels[s].insert("le");
      for (const auto& m : f.metric)
        for (const auto& l : m.label) labels[s].insert(l.name);
    }
  }
  std::set<std::string> asked;
  const auto look = [&](const std::string& text, const std::string& legend) {
    const std::regex name("migr_[a-z_]+"), by("by \\(([a-z_, ]+)\\)"), word("[a-z_]+"), in_legend("\\{\\{([a-z_]+)\\}\\}");
    std::set<std::string> here, wanted;
    for (std::sregex_iterator i(text.begin(), text.end(), name), last; i != last; i++) here.insert(i->str());
    for (std::sregex_iterator i(text.begin(), text.end(), by), last; i != last; i++) {
      const std::string list = (*i)[1];
      for (std::sregex_iterator w(list.begin(), list.end(), word); w != last; w++) wanted.insert(w->str());
    }
    for (std::sregex_iterator i(legend.begin(), legend.end(), in_legend), last; i != last; i++) wanted.insert((*i)[1]);
    ASSERT_FALSE(here.empty()) << text;
    for (const auto& n : here) {
      ASSERT_TRUE(labels.contains(n)) << n << " is not exported: " << text;
      asked.insert(n);
      for (const auto& l : wanted) EXPECT_TRUE(labels[n].contains(l)) << n << " has no label " << l << ": " << text;
    }
  };
  for (const auto& v : dashboard["templating"]["list"])
    if (v["type"] == "query") {
      asked.insert("migr_build_info");
      EXPECT_NE(v["query"].get<std::string>().find("migr_build_info"), std::string::npos);
    }
  std::set<int> ids;
  for (const auto& p : dashboard["panels"]) {
    EXPECT_TRUE(ids.insert(p["id"].get<int>()).second);
    for (const auto& t : p["targets"]) look(t["expr"], t["legendFormat"]);
  }
  for (const auto& n : names()) EXPECT_TRUE(asked.contains(n) || asked.contains(n + "_bucket")) << n << " is in no panel";
}

TEST_F(Exported, AlertsAreAboutWhatIsThere) {
  std::ifstream rules(MIGR_SOURCE "/packaging/prometheus-rules.yml");
  metrics_->ask_peers(*peers_);
  std::map<std::string, std::set<std::string>> values;  // by "metric label": what it has been
  for (const auto& f : metrics_->Collect())
    for (const auto& m : f.metric) {
      values[f.name].insert("");
      for (const auto& l : m.label) values[f.name + " " + l.name].insert(l.value);
    }
  const std::regex name("migr_[a-z_]+"), matcher("(migr_[a-z_]+)\\{([a-z]+)!?=\"([a-z]+)\"\\}"), label("\\$labels\\.([a-z]+)");
  std::set<std::string> asked, alerts;
  int exprs = 0;
  for (std::string line; std::getline(rules, line);) {
    const auto at = [&](const char* key) { return line.find(key) != line.npos; };
    const std::sregex_iterator last;
    if (at("alert:")) {
      EXPECT_TRUE(alerts.insert(line).second) << line;
    }
    if (at("expr:")) {
      exprs++;
      asked.clear();
      for (std::sregex_iterator i(line.begin(), line.end(), name); i != last; i++) asked.insert(i->str());
      for (const auto& n : asked) EXPECT_TRUE(values.contains(n) || n == "migr_rollbacks_total") << n << " is not exported: " << line;
      for (std::sregex_iterator i(line.begin(), line.end(), matcher); i != last; i++) EXPECT_TRUE(values[(*i)[1].str() + " " + (*i)[2].str()].contains((*i)[3])) << line;
    }
    for (std::sregex_iterator i(line.begin(), line.end(), label); i != last; i++) {
      const std::string l = (*i)[1];
      EXPECT_TRUE(l == "instance" || l == "phase" || std::any_of(asked.begin(), asked.end(), [&](const auto& n) { return values.contains(n + " " + l); })) << line;
    }
  }
  EXPECT_GE(exprs, 12);
  EXPECT_EQ(alerts.size(), static_cast<std::size_t>(exprs));
}

TEST_F(Exported, AMigrationIsCountedByItsOutcome) {
  const auto of = [&](const char* role, const char* outcome) { return value("migr_migrations_total", {{"role", role}, {"outcome", outcome}}); };
  for (const char* role : {"source", "destination", "partner"})
    for (const char* outcome : {"moved", "went_back", "undecided", "refused"}) EXPECT_EQ(of(role, outcome), 0) << role << outcome;
  metrics_->ended(Metrics::What::kMigrate, moved());
  EXPECT_EQ(of("source", "moved"), 1);
  EXPECT_EQ(value("migr_service_blackout_seconds"), 1);
  EXPECT_EQ(value("migr_communication_blackout_seconds"), 1);
  EXPECT_EQ(value("migr_phase_duration_seconds", {{"phase", "drain"}}), 1);
  EXPECT_EQ(value("migr_copied_bytes_total"), 1000);

  auto s = moved();
  s.set_migrated(false);
  s.add_phases()->set_phase("rollback");
  metrics_->ended(Metrics::What::kMigrate, s);
  EXPECT_EQ(of("source", "went_back"), 1);
  EXPECT_EQ(value("migr_rollbacks_total", {{"phase", "drain"}}), 1);
  EXPECT_EQ(value("migr_service_blackout_seconds"), 1) << "only of what was moved";

  s = wire::Summary();
  metrics_->ended(Metrics::What::kMigrate, s);
  EXPECT_EQ(of("source", "refused"), 1);
  s.set_touched(true), s.set_undecided(true);
  metrics_->ended(Metrics::What::kMigrate, s);
  EXPECT_EQ(of("source", "undecided"), 1);
  metrics_->settled(moved());
  EXPECT_EQ(of("source", "moved"), 2);
  metrics_->decided("destination", wire::COMMITTED), metrics_->decided("partner", wire::UNDONE);
  EXPECT_EQ(of("destination", "moved"), 1);
  EXPECT_EQ(of("partner", "went_back"), 1);
  metrics_->ended(Metrics::What::kRestore, moved());
  EXPECT_EQ(value("migr_stored_total", {{"what", "restore"}, {"outcome", "moved"}}), 1);
  s = moved();
  s.set_to("/srv/checkpoint");
  metrics_->settled(s);
  EXPECT_EQ(value("migr_stored_total", {{"what", "checkpoint"}, {"outcome", "moved"}}), 1);
  EXPECT_EQ(of("source", "moved"), 2);
}

TEST_F(Exported, EveryPhaseOfTheCoordinatorIsThereFromTheStart) {
  for (const char* phase : {"check", "record", "prepare", "connect", "pre-copy", "suspend", "drain", "freeze", "create", "copy", "ready", "commit", "resume", "destroy", "rollback"})
    EXPECT_EQ(value("migr_phase_duration_seconds", {{"phase", phase}}), 0) << phase;
}

TEST_F(Exported, WhatIsLookedUp) {
  EXPECT_EQ(value("migr_open_migrations", {{"role", "partner"}}), 1);
  EXPECT_EQ(value("migr_open_migrations", {{"role", "source"}}), 0);
  EXPECT_GE(value("migr_open_migration_age_seconds", {{"role", "partner"}}), 100);
  EXPECT_EQ(value("migr_open_migration_age_seconds", {{"role", "source"}}), 0);
  EXPECT_NEAR(value("migr_certificate_expiry_timestamp_seconds"), static_cast<double>(std::time(nullptr)) + 100 * 86400, 4000);
  EXPECT_EQ(value("migr_certificate_refused"), 0);
  EXPECT_EQ(value("migr_port_up", {{"device", "rxe0"}, {"port", "1"}}), 1);
  ASSERT_TRUE(ports_->order(PortWatch::Order::kDown, "rxe0", 1));
  EXPECT_EQ(value("migr_port_up", {{"device", "rxe0"}, {"port", "1"}}), 0);
  EXPECT_EQ(value("migr_peer_up", {{"peer", "b"}}), -1) << "nobody has asked yet";
  metrics_->ask_peers(*peers_);
  EXPECT_EQ(value("migr_peer_up", {{"peer", "b"}}), 0);
  EXPECT_EQ(value("migr_peer_up", {{"peer", "a"}}), -1) << "it is this host";
  EXPECT_EQ(value("migr_directory_up"), 1);
}

TEST_F(Exported, FailoversStayCountedWhenTheirProcessHasEnded) {
  const Instance who{1};
  table_.enter(who, {});
  migr_links_switch s{};
  s.cause = MIGR_LINKS_CAUSE_HEARTBEAT, s.outcome = MIGR_LINKS_SWITCH_DONE, s.vqps = 1, s.tries = 1, s.to = 1;
  const auto told = table_.add_switches(who, {&s, 1}, {});
  ASSERT_TRUE(told) << told.error().text;
  EXPECT_EQ(value("migr_link_processes"), 1);
  table_.leave(who);
  EXPECT_EQ(value("migr_link_processes"), 0);
  EXPECT_EQ(value("migr_failovers_total", {{"cause", "heartbeat"}, {"outcome", "done"}}), 1);
  EXPECT_EQ(value("migr_failovers_total", {{"cause", "heartbeat"}, {"outcome", "broken"}}), 0);
}

/// One answer over HTTP, head and all.
std::string get(int port, in_addr_t address = INADDR_LOOPBACK) {
  const Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in a{};
  a.sin_family = AF_INET, a.sin_port = htons(static_cast<std::uint16_t>(port)), a.sin_addr.s_addr = htonl(address);
  const std::string ask = "GET /metrics HTTP/1.0\r\n\r\n";
  if (connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a) || write(fd.n, ask.data(), ask.size()) < 0) return "";
  std::string out;
  char buf[4096];
  for (ssize_t n; (n = read(fd.n, buf, sizeof buf)) > 0;) out.append(buf, static_cast<std::size_t>(n));
  return out;
}

// They tell names and numbers to whoever can connect: by default only to this host.
TEST_F(Exported, ByDefaultOnlyThisHostReadsThem) {
  const Config usual;
  ASSERT_EQ(usual.metrics, "127.0.0.1:7472");
  EXPECT_NE(text_of(MIGR_SOURCE "/docs/man/migrd.8").find("Default " + usual.metrics + "."), std::string::npos);
  constexpr in_addr_t kOther = INADDR_LOOPBACK + 1;  // 127.0.0.2 stands for any other address of the host
  for (const auto& [host, others_too] : {std::pair{usual.metrics.substr(0, usual.metrics.find(':')), false}, {std::string("0.0.0.0"), true}}) {
    config_.metrics = host + ":0";
    auto exposer = expose(config_, metrics_);
    ASSERT_TRUE(exposer) << exposer.error().text;
    const int port = (*exposer)->GetListeningPorts().at(0);
    EXPECT_NE(get(port), "") << host;
    EXPECT_EQ(!get(port, kOther).empty(), others_too) << host;
  }
}

TEST_F(Exported, PrometheusReadsThem) {
  config_.metrics = "";
  auto none = expose(config_, metrics_);
  ASSERT_TRUE(none);
  EXPECT_EQ(*none, nullptr);
  config_.metrics = "127.0.0.1:0";
  auto exposer = expose(config_, metrics_);
  ASSERT_TRUE(exposer) << exposer.error().text;
  const int port = (*exposer)->GetListeningPorts().at(0);
  const auto text = get(port);
  EXPECT_NE(text.find("200 OK"), std::string::npos);
  EXPECT_NE(text.find("# TYPE migr_migrations_total counter"), std::string::npos) << text;
  EXPECT_NE(text.find("migr_build_info{release=\"" + std::string(kRelease) + "\"} 1"), std::string::npos);
  config_.metrics = "127.0.0.1:" + std::to_string(port);
  const auto taken = expose(config_, metrics_);
  ASSERT_FALSE(taken);
  EXPECT_NE(taken.error().text.find(config_.metrics), std::string::npos);
}

}  // namespace
}  // namespace migr::metrics_test
