// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "ctl_text.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "log.h"
#include "summary.h"
#include "text.h"

namespace migr {

namespace {

template <class List>
Json array_of(const List& list) {
  Json out = Json::array();
  for (const auto& x : list) out.push_back(x);
  return out;
}

template <class List>
std::string joined(const List& list) {
  std::string out;
  for (const auto& x : list) out += (out.empty() ? "" : ", ") + x;
  return out;
}

Json or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

const char* plural(std::uint64_t n, const char* many = "s") { return n == 1 ? "" : many; }

}  // namespace

Json error_json(const std::string& text, int status) { return with_error(Json::object(), text, status); }

Json with_error(Json object, const std::string& text, int status) {
  object["error"] = text;
  object["status"] = status;
  return object;
}

Json version_json(const wire::VersionReply& v) { return {{"release", v.release()}, {"wire", v.wire()}, {"abi", v.abi()}, {"proc", v.proc()}}; }

std::string peers_text(const wire::PeersReply& r) {
  const auto line = [](const std::string& name, const std::string& address, const std::string& state) { return wrapped(fmt::format("{:<16} {:<24} {}", name, address, state), 4); };
  std::string out = line("NAME", "ADDRESS", "STATE");
  for (const auto& p : r.peers()) {
    std::string state = "ok, release " + p.version().release();
    if (!p.answers())
      state = "no answer: " + p.error();
    else if (!p.version().abi())
      state += ", migr.ko not loaded";
    out += line(p.name(), p.address(), state);
  }
  return out;
}

Json peers_json(const wire::PeersReply& r) {
  Json out = Json::array();
  for (const auto& p : r.peers()) {
    Json e = {{"name", p.name()}, {"address", p.address()}, {"answers", p.answers()}};
    if (p.answers())
      e["version"] = version_json(p.version());
    else
      e["error"] = p.error();
    out.push_back(e);
  }
  return out;
}

std::string open_text(const wire::RecoverReply& r) {
  if (!r.open_size()) return "no open migration\n";
  std::string out;
  for (const auto& m : r.open())
    out += wrapped(fmt::format("{}  {} of {} -> {}, container {}: {}", migration_text(m.id()), m.role(), m.source(), m.destination(),
                               m.container().empty() ? "(of another host)" : m.container(), m.state()),
                   10);
  return out;
}

Json open_json(const wire::RecoverReply& r) {
  Json out = Json::array();
  for (const auto& m : r.open()) {
    const std::string id = migration_text(m.id());
    out.push_back({{"id", id}, {"migration", id}, {"role", m.role()}, {"container", m.container()}, {"from", m.source()}, {"to", m.destination()}, {"partners", array_of(m.partners())}, {"begun_s", m.begun_s()}, {"outcome", wire::Outcome_Name(m.outcome())}, {"state", m.state()}, {"phase", or_null(m.phase())}, {"bytes", m.bytes()}, {"of_bytes", m.of_bytes()}});
  }
  return out;
}

std::string cancel_text(const wire::CancelReply& r) {
  const auto& m = r.migration();
  std::string text = fmt::format("migration {} of {} to {} is cancelled", migration_text(m.id()), m.container(), m.destination());
  if (!r.ended()) return text + ", and not all of it is back yet: " + m.state() + "; see: migrctl recover";
  return m.container().starts_with('/') ? text : text + fmt::format(": {} goes on running on {}", m.container(), m.source());
}

Json cancel_json(const wire::CancelReply& r) {
  const auto& m = r.migration();
  return {{"id", migration_text(m.id())}, {"container", m.container()}, {"from", m.source()}, {"to", m.destination()}, {"ended", r.ended()}, {"state", or_null(r.ended() ? "" : m.state())}};
}

std::string reload_text(const wire::ReloadReply& r) {
  std::string out;
  const auto add = [&](const std::string& text) { out += (out.empty() ? "" : "; ") + text; };
  for (const auto& name : r.added()) add(name + " is a peer now");
  for (const auto& name : r.removed()) add(name + " is no peer any more");
  for (const auto& p : r.moved()) add(p.name() + " is at " + p.address() + " now");
  if (r.allow()) add("\"allow\" has changed");
  if (out.empty()) out = "peers and their rights are as they were";
  for (const auto& key : r.at_start()) add("\"" + key + "\" is not as at the start: migrd has to be restarted for that");
  return out;
}

Json reload_json(const wire::ReloadReply& r) {
  Json moved = Json::array();
  for (const auto& p : r.moved()) moved.push_back({{"name", p.name()}, {"address", p.address()}});
  return {{"added", array_of(r.added())}, {"removed", array_of(r.removed())}, {"moved", moved}, {"allow", r.allow()}, {"at_start", array_of(r.at_start())}};
}

std::string plan_text(const wire::PlanReply& plan, const std::optional<ExpectedStop>& stop) {
  const auto& s = plan.summary();
  const auto& r = s.resources();
  const std::string partners = joined(s.partners());
  return wrapped(fmt::format("{} would move from {} to {}: {} process{} with RDMA, {} contexts, {} PDs, {} MRs, {} CQs, {} QPs ({} connected); partners: {}{}", s.container(), s.from(),
                             s.to(), plan.processes(), plural(plan.processes(), "es"), r.ctx(), r.pd(), r.mr(), r.cq(), r.qp(), plan.connections(), partners.empty() ? "none" : partners,
                             named_migration(s)),
                 2) +
         wrapped(fmt::format("memory: {:.1f} MB, copied {}", static_cast<double>(plan.memory_bytes()) / 1e6, plan.pre_copy() ? "before the stop; what changes meanwhile, during it" : "during the stop"), 2) +
         (s.gone() ? wrapped(fmt::format("{} connections would end: their other ends have died", s.gone()), 2) + gone_text(s) : "") +
         (stop ? wrapped(expected_text(*stop), 2) : "");
}

Json plan_json(const wire::PlanReply& plan, const std::optional<ExpectedStop>& stop) {
  const auto& s = plan.summary();
  return {{"id", migration_text(s.id())},
          {"container", s.container()},
          {"from", s.from()},
          {"to", s.to()},
          {"would_move", s.error().empty()},
          {"refused_because", or_null(s.error())},
          {"code", error_name(s)},
          {"processes", plan.processes()},
          {"connections", plan.connections()},
          {"connections_gone", s.gone()},
          {"gone", gone_json(s)},
          {"partners", array_of(s.partners())},
          {"memory_bytes", plan.memory_bytes()},
          {"pre_copy", plan.pre_copy()},
          {"resources", resources_json(s.resources())},
          {"expected_stop_ms", stop ? expected_json(*stop) : Json(nullptr)}};
}

std::string summary_text(const wire::Summary& s, const std::string& done, const std::string& gone) {
  const auto& r = s.resources();
  std::string out = wrapped(fmt::format("{} {} {}: service blackout {:.1f} ms, communication blackout {:.1f} ms, {:.1f} MB copied; {} contexts, {} PDs, {} MRs, {} CQs, {} QPs; partners: {}{}",
                                        s.container(), done, s.to(), s.service_blackout_ms(), s.communication_blackout_ms(), static_cast<double>(s.bytes_copied()) / 1e6, r.ctx(), r.pd(), r.mr(),
                                        r.cq(), r.qp(), s.partners_size() ? joined(s.partners()) : "none", named_migration(s)),
                            2);
  if (s.has_replayed()) {
    const auto& w = s.replayed();
    out += wrapped(fmt::format("wait-before-stop ran out: {} work requests of {} QPs were replayed, {} had been executed already", w.replayed(), w.qps(), w.executed()), 2);
    if (w.lost()) out += wrapped(fmt::format("{} atomics were executed and their answers are lost: they end with an error, and so do their connections", w.lost()), 2);
  }
  if (s.gone()) out += wrapped(fmt::format("{} connections to others {}: their ends see an error, and have to connect again", s.gone(), gone), 2) + gone_text(s);
  return out;
}

std::string named_migration(const wire::Summary& s) { return s.id() ? " (migration " + migration_text(s.id()) + ")" : ""; }

std::string more_text(const wire::Summary& s) {
  if (!s.id()) return "";
  const std::string id = migration_text(s.id());
  std::string hosts = s.from();
  if (!s.to().empty() && s.to() != s.from() && !s.to().starts_with('/')) hosts += ", " + s.to();
  for (const auto& p : s.partners())
    if (p != s.from() && p != s.to()) hosts += ", " + p;
  return fmt::format("more: migrctl report {}; on {}: journalctl -u migrd -g migration={}", id, hosts, id);
}

std::string rolled_back_text(const wire::Summary& s) { return s.rolled_back_size() ? "rolled back: " + joined(s.rolled_back()) : ""; }

std::string order_text(const wire::LinkOrderReply& r, const std::string& name, const std::string& done) {
  if (name.empty()) return done + "\n";
  return wrapped(fmt::format("{} {}; {} process{} there", name, done, r.processes(), plural(r.processes(), "es")), 2);
}

Json order_json(const wire::LinkOrderReply& r) { return {{"done", !r.left_size()}, {"processes", r.processes()}, {"left", array_of(r.left())}}; }

}  // namespace migr
