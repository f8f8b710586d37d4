// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "links_text.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "../hex.h"
#include "../text.h"
#include "link_records.h"

namespace migr {
namespace {

std::vector<std::string> reasons(std::uint32_t flags) {
  std::vector<std::string> out;
  if (flags & MIGR_LINKS_PORT_DOWN_OPERATOR) out.push_back("operator");
  if (flags & MIGR_LINKS_PORT_DOWN_NETLINK) out.push_back("netlink");
  if (flags & MIGR_LINKS_PORT_GONE) out.push_back("gone");
  return out;
}

std::string port_state(std::uint32_t flags) {
  std::string out, why;
  for (const auto& r : reasons(flags)) why += (why.empty() ? "" : ", ") + r;
  out = why.empty() ? "up" : "down (" + why + ")";
  if (flags & MIGR_LINKS_PORT_PREFERRED) out += ", preferred";
  if (flags & MIGR_LINKS_PORT_NO_NETDEV) out += ", not watched";
  return out;
}

std::string ms(std::uint64_t ns) { return fmt::format("{:.3f}", static_cast<double>(ns) / 1e6); }

std::string process_text(const wire::LinkProcessReport& p) {
  std::string out = wrapped(fmt::format("process {} ({}): {}, paths {}, atomics {}, {} vQP{}, {} with a backup", p.pid(), cut(p.comm(), 16), policy_name(p.policy()), making_name(p.making()), atomics_name(p.atomics()), p.vqps(),
                                        p.vqps() == 1 ? "" : "s", p.backed()),
                            2);
  out += fmt::format("  {:>4} {:22} {:20} {:>6} {:>7} {:>4} {:>8}\n", "LINK", "PORT", "STATE", "VQPS", "BACKUPS", "POOL", "CHANNELS");
  for (const auto& l : p.links()) {
    std::string state = link_state_name(l.state());
    if (l.state() != MIGR_LINKS_LINK_UP && l.cause()) state += fmt::format(" ({})", cause_name(l.cause()));
    out += fmt::format("  {:>4} {:22} {:20} {:>6} {:>7} {:>4} {:>8}\n", l.link(), cut(l.device(), 18) + "/" + std::to_string(l.port()), cut(state, 20), l.vqps(),
                       l.backups(), l.spares(), l.channels());
    if (!l.why().empty()) out += wrapped("       " + l.why(), 7);
  }
  for (const auto& w : p.without())
    out += wrapped(fmt::format("  no backup: {} vQP{}, {}: {}", w.vqps(), w.vqps() == 1 ? "" : "s", phase_name(w.phase()),
                               w.why().empty() ? "not told why" : w.why()),
                   4);
  if (p.switches_size()) {
    const auto& s = p.switches(p.switches_size() - 1);
    std::string text = fmt::format("  last switchover {}: link {} -> {} by {}, {} vQP{} in {} ms (cut {}, told {}), {} replayed, {} executed, {} lost",
                                   local_time(static_cast<std::int64_t>(s.when_ns() / 1'000'000'000)), s.from(), s.to(), cause_name(s.cause()), s.vqps(), s.vqps() == 1 ? "" : "s", ms(s.resume_ns()),
                                   ms(s.cut_ns()), ms(s.told_ns()), s.replayed(), s.executed(), s.lost());
    if (s.outcome() != MIGR_LINKS_SWITCH_DONE) text += fmt::format(", {} broken", s.broken());
    out += wrapped(text, 4);
  }
  if (!p.error().empty()) out += wrapped("  directory: " + p.error(), 4);
  return out;
}

}  // namespace

std::string links_text(const wire::LinksReply& r) {
  std::string out = wrapped("directory: " + r.directory(), 2);
  if (!r.directory_error().empty()) out += wrapped("  NO ANSWER: " + r.directory_error(), 4);
  out += fmt::format("{:24} {:15} {:32} {:>6}\n", "PORT", "NETDEV", "STATE", "FLAPS");
  for (const auto& p : r.ports())
    out += fmt::format("{:24} {:15} {:32} {:>6}\n", cut(p.device(), 18) + "/" + std::to_string(p.port()), cut(p.netdev(), 15), cut(port_state(p.flags()), 32), p.flaps());
  if (!r.ports_size()) out += "no RDMA port on this host\n";
  for (const auto& p : r.processes()) out += "\n" + process_text(p);
  if (!r.processes_size()) out += "\nno process with a policy on this host\n";
  return out;
}

Json links_json(const wire::LinksReply& r) {
  Json ports = Json::array(), processes = Json::array();
  for (const auto& p : r.ports()) {
    const auto by = reasons(p.flags());
    ports.push_back({{"device", p.device()}, {"port", p.port()}, {"netdev", p.netdev()}, {"state", by.empty() ? "up" : "down"}, {"down_by", by},
                     {"preferred", bool(p.flags() & MIGR_LINKS_PORT_PREFERRED)}, {"watched", !(p.flags() & MIGR_LINKS_PORT_NO_NETDEV)}, {"flaps", p.flaps()}});
  }
  for (const auto& p : r.processes()) {
    Json links = Json::array(), without = Json::array(), each = Json::array(), switches = Json::array();
    for (const auto& l : p.links())
      links.push_back({{"link", l.link()}, {"device", l.device()}, {"port", l.port()}, {"gid", gid_text(l.gid(), "")}, {"gid_index", l.gid_index()},
                       {"state", link_state_name(l.state())}, {"cause", cause_name(l.cause())}, {"vqps", l.vqps()}, {"backups", l.backups()},
                       {"pool", l.spares()}, {"channels", l.channels()}, {"why", l.why()}});
    for (const auto& w : p.without()) without.push_back({{"vqps", w.vqps()}, {"phase", phase_name(w.phase())}, {"why", w.why()}});
    for (const auto& v : p.each())
      each.push_back({{"gid", gid_text(v.gid(), "")}, {"vqpn", v.vqpn()}, {"policy", policy_name(v.policy())}, {"paths", making_name(v.making())}, {"atomics", atomics_name(v.atomics())}, {"link", v.link()}, {"epoch", v.epoch()},
                      {"phase", phase_name(v.phase())}, {"why", v.why()}});
    for (const auto& s : p.switches())
      switches.push_back({{"when_ns", s.when_ns()}, {"from", s.from()}, {"to", s.to()}, {"cause", cause_name(s.cause())},
                          {"done", s.outcome() == MIGR_LINKS_SWITCH_DONE}, {"tries", s.tries()}, {"vqps", s.vqps()}, {"broken", s.broken()},
                          {"replayed", s.replayed()}, {"executed", s.executed()}, {"lost", s.lost()}, {"bytes", s.bytes()}, {"detect_ns", s.detect_ns()},
                          {"cut_ns", s.cut_ns()}, {"told_ns", s.told_ns()}, {"resume_ns", s.resume_ns()}, {"peer", to_hex(s.peer())}});
    Json j = {{"pid", p.pid()}, {"comm", p.comm()}, {"instance", to_hex(p.instance())}, {"policy", policy_name(p.policy())}, {"paths", making_name(p.making())}, {"atomics", atomics_name(p.atomics())}, {"configured", p.configured()},
              {"generation", p.generation()}, {"heartbeat_ms", p.heartbeat_ms()}, {"heartbeat_misses", p.heartbeat_misses()}, {"links", links},
              {"vqps", p.vqps()}, {"with_backup", p.backed()}, {"without_backup", without},
              {"last_switchover", switches.empty() ? Json(nullptr) : switches.back()}, {"switchovers", switches},
              {"directory_error", p.error().empty() ? Json(nullptr) : Json(p.error())}};
    if (p.each_size()) j["each"] = each;
    processes.push_back(j);
  }
  return {{"directory", r.directory()}, {"directory_error", r.directory_error().empty() ? Json(nullptr) : Json(r.directory_error())}, {"ports", ports},
          {"processes", processes}};
}

}  // namespace migr
