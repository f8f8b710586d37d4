// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "summary.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "failover/link_records.h"
#include "log.h"

namespace migr {

Json resources_json(const wire::Resources& r) { return {{"ctx", r.ctx()}, {"pd", r.pd()}, {"mr", r.mr()}, {"cq", r.cq()}, {"qp", r.qp()}}; }

namespace {

// In columns: there may be hundreds of them.
Json traffic_json(const wire::TrafficReply& traffic) {
  Json at = Json::array(), rx = Json::array(), tx = Json::array();
  for (const auto& s : traffic.samples()) {
    const auto mbps = [&](std::uint64_t bytes) { return s.length_us() ? std::round(static_cast<double>(bytes) * 8e3 / s.length_us()) / 1e3 : 0.0; };
    at.push_back(s.at_ms());
    rx.push_back(mbps(s.rx_bytes()));
    tx.push_back(mbps(s.tx_bytes()));
  }
  return {{"at_ms", at}, {"rx_mbps", rx}, {"tx_mbps", tx}};
}

}  // namespace

std::string gone_text(const wire::Summary& s) {
  constexpr int kSaid = 16;
  std::string text;
  for (int i = 0; i < std::min(s.connections_gone_size(), kSaid); i++) {
    const auto& g = s.connections_gone(i);
    text += fmt::format("  gone: vQPN {:#x}, which was connected to QP {:#x} at {}\n", g.vqpn(), g.to_qpn(), gid_text(g.to_gid(), "?"));
  }
  if (const int more = s.connections_gone_size() - kSaid; more > 0) text += fmt::format("  and {} more, see --json\n", more);
  return text;
}

Json gone_json(const wire::Summary& s) {
  Json gone = Json::array();
  for (const auto& g : s.connections_gone()) gone.push_back({{"vqpn", g.vqpn()}, {"to_gid", gid_text(g.to_gid(), "?")}, {"to_qpn", g.to_qpn()}});
  return gone;
}

Json error_name(const wire::Summary& s) {
  const char* name = s.error_code() ? strerrorname_np(static_cast<int>(s.error_code())) : nullptr;
  return name ? Json(name) : Json(nullptr);
}

Json summary_json(const wire::Summary& s) {
  Json phases = Json::object();
  for (const auto& p : s.phases()) phases[p.phase()] = p.ms();
  Json steps = Json::object();  // of equal ones, on several hosts, the longest
  for (const auto& p : s.steps()) steps[p.phase()] = std::max(steps.value(p.phase(), 0.0), p.ms());
  Json partners = Json::array();
  for (const auto& p : s.partners()) partners.push_back(p);
  Json rolled_back = Json::array();
  for (const auto& what : s.rolled_back()) rolled_back.push_back(what);
  Json timeline = Json::array();
  for (const auto* list : {&s.phases(), &s.steps()})
    for (const auto& p : *list) timeline.push_back({{"name", p.phase()}, {"start_ms", p.start_ms()}, {"ms", p.ms()}});
  Json figures = Json::array();
  for (const auto& f : s.partner_figures())
    figures.push_back({{"host", f.host()}, {"blackout_ms", f.blackout_ms()}, {"suspended_ms", f.suspended_ms()}, {"replayed_sends", f.replayed_sends()}, {"replayed_recvs", f.replayed_recvs()}, {"traffic", f.has_traffic() ? traffic_json(f.traffic()) : Json(nullptr)}});
  return {{"id", migration_text(s.id())},
          {"container", s.container()},
          {"from", s.from()},
          {"to", s.to()},
          {"migrated", s.migrated()},
          {"undecided", s.undecided()},
          {"going_back", s.going_back()},
          {"tries", s.tries()},
          {"rollback_reason", s.error().empty() ? Json(nullptr) : Json(s.error())},
          {"code", error_name(s)},
          {"rolled_back", rolled_back},
          {"service_blackout_ms", s.service_blackout_ms()},
          {"communication_blackout_ms", s.communication_blackout_ms()},
          {"rdma_ms", s.rdma_ms()},
          {"phases_ms", phases},
          {"steps_ms", steps},
          {"bytes_copied", s.bytes_copied()},
          {"bytes_pre_copied", s.bytes_pre_copied()},
          {"pre_copy_rounds", s.pre_copy_rounds()},
          {"bytes_unchanged", s.bytes_unchanged()},
          {"resources", resources_json(s.resources())},
          {"partner", partners.empty() ? Json(nullptr) : partners[0]},
          {"partners", partners},
          {"connections_gone", s.gone()},
          {"gone", gone_json(s)},
          {"replayed", {{"qps", s.replayed().qps()}, {"wrs", s.replayed().replayed()}, {"executed", s.replayed().executed()}, {"atomics_lost", s.replayed().lost()}}},
          {"begun_ms", s.begun_ms()},
          {"timeline", timeline},
          {"partner_figures", figures},
          {"migration", s.id()}};
}

namespace {

std::string megabytes(double bytes) { return bytes < 1e8 ? fmt::format("{:.1f}", bytes / 1e6) : fmt::format("{:.0f}", bytes / 1e6); }

}  // namespace

std::string sent_text(std::uint64_t bytes, std::uint64_t of) { return megabytes(static_cast<double>(bytes)) + " of " + megabytes(static_cast<double>(std::max(bytes, of))) + " MB"; }

std::string going_text(const wire::Going& g, std::optional<double> stop_ms) {
  const auto sent = static_cast<double>(g.bytes()), all = std::max(sent, static_cast<double>(g.of_bytes()));
  std::string text;
  if (g.of_bytes()) {
    text = sent_text(g.bytes(), g.of_bytes());
    if (g.bytes_per_s() > 0) text += ", " + megabytes(g.bytes_per_s()) + " MB/s, " + fmt::format("{:.0f} s left", std::ceil((all - sent) / g.bytes_per_s()));
  } else {
    text = fmt::format("{:.0f} s", g.ms() / 1000);
  }
  if (g.stopped_ms() > 0)
    text += fmt::format("; stopped {:.0f} s", g.stopped_ms() / 1000) + (stop_ms ? fmt::format(" of about {:.0f} s", std::ceil(*stop_ms / 1000)) : "");
  else if (stop_ms && !g.stop_over())
    text += fmt::format("; stop: about {:.0f} s", std::ceil(*stop_ms / 1000));
  return text;
}

}  // namespace migr
