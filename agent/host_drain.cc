// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "host_drain.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "ctl_text.h"
#include "summary.h"
#include "text.h"

namespace migr {
namespace {

constexpr char kDaemon[] = "migrd";

std::string stays_text(const HostDrain& d) {
  std::string out;
  for (const auto& s : d.stays) out += wrapped(s.who + " stays: " + s.why, 2);
  return out;
}

std::string who_is(const Occupants::Process& p) {
  return p.pid ? fmt::format("process {} ({})", p.pid, p.comm) : fmt::format("context {} on {} ({})", p.ctx_id, p.device, p.comm);
}

std::string containers_text(std::size_t n) { return fmt::format("{} container{}", n, n == 1 ? "" : "s"); }

}  // namespace

Occupants occupants(const std::vector<ContextRecord>& ctxs, const ContainerOf& container_of) {
  Occupants out;
  std::set<std::string> names;
  std::set<pid_t> seen;  // a process has a context for each device
  for (const auto& c : ctxs) {
    const auto pid = static_cast<pid_t>(c.rec.pid);
    if (pid && !seen.insert(pid).second) continue;
    const std::string comm = comm_of(c.rec), device = device_of(c.rec);
    if (const auto name = pid ? container_of(pid) : ""; !name.empty())
      names.insert(name);
    else if (comm != kDaemon)
      out.processes.push_back({pid, comm, c.rec.ctx_id, device});
  }
  out.containers.assign(names.begin(), names.end());
  return out;
}

HostDrain plan_drain(const Occupants& all, const std::vector<std::string>& to, const PlanOf& plan) {
  HostDrain d;
  d.to = to;
  for (const auto& name : all.containers) {
    std::string why;
    bool moves = false;
    for (std::size_t i = 0; i < to.size() && !moves; i++) {
      const auto p = plan(name, to[i]);
      moves = p && p->summary().error().empty();
      if (moves)
        d.would_move.push_back(*p);
      else  // of one host nobody asks which
        why += (why.empty() ? "" : "; ") + (to.size() > 1 ? to[i] + ": " : "") + (p ? p->summary().error() : p.error().text);
    }
    if (!moves) d.stays.push_back({name, why});
  }
  for (const auto& p : all.processes)
    d.stays.push_back({who_is(p), !p.pid ? kProcessEnded : fmt::format("it is in no container of runc's here; end it, or, if it is in none of another engine either, move it: migrctl migrate --pid {} --to {}", p.pid, to.front())});
  return d;
}

void note_left(HostDrain& d, const Occupants& left) {
  std::set<std::string> here(left.containers.begin(), left.containers.end());
  for (const auto& p : left.processes) here.insert(who_is(p));
  std::erase_if(d.stays, [&](const auto& s) { return !here.contains(s.who); });  // it has ended
  const auto add = [&](const std::string& who) {
    if (std::any_of(d.stays.begin(), d.stays.end(), [&](const auto& s) { return s.who == who; })) return;
    const bool moved = std::any_of(d.moved.begin(), d.moved.end(), [&](const auto& s) { return s.container() == who; });
    d.stays.push_back({who, moved ? "it has moved, and what is left of it here is not removed yet; see: migrctl recover" : "it was not begun, another one having failed, or has come meanwhile"});
  };
  for (const auto& who : here) add(who);
}

bool all_well(const HostDrain& d) { return what_is_wrong(d).empty(); }

std::string drain_ends_text(const std::string& name, std::size_t left) {
  const std::string on = fmt::format("the drain ends here: migrd finishes what it has begun of {} (how it stands: migrctl recover; to take it back: migrctl cancel {})", name, name);
  return on + (left ? fmt::format("; {} {} not begun: when that is finished, run the same command again", containers_text(left), left == 1 ? "was" : "were") : "");
}

std::string drain_plan_text(const HostDrain& d) {
  std::string out;
  for (const auto& p : d.would_move) out += plan_text(p, {});
  out += stays_text(d);
  if (out.empty()) return "nothing has RDMA resources here\n";
  out += wrapped(fmt::format("{} would leave, {} would stay", containers_text(d.would_move.size()), d.stays.size()), 2);
  return out + (d.would_move.size() > 1 ? wrapped("each was asked about by itself: whether a host has room for all that would go there is seen when they move", 2) : "");
}

std::string drain_text(const HostDrain& d) {
  if (d.moved.empty() && d.stays.empty()) return "nothing has RDMA resources here\n";
  std::string out;
  for (const auto& s : d.moved) out += wrapped(fmt::format("{} runs on {}, having stood still for {:.1f} ms{}", s.container(), s.to(), s.service_blackout_ms(), s.error().empty() ? "" : "; " + s.error()), 2);
  out += stays_text(d);
  return out + (d.stays.empty() ? "nothing has RDMA resources here any more\n" : "");
}

std::string what_is_wrong(const HostDrain& d) {
  std::string out;
  const auto add = [&](const std::string& text) { out += (out.empty() ? "" : "; ") + text; };
  for (const auto& s : d.stays) add(s.who + " stays: " + s.why);
  for (const auto& s : d.moved)
    if (!s.error().empty()) add(s.container() + ": " + s.error());
  return out;
}

Json drain_json(const HostDrain& d) {
  Json would = Json::array(), moved = Json::array(), stays = Json::array();
  for (const auto& p : d.would_move) would.push_back(plan_json(p, {}));
  for (const auto& s : d.moved) moved.push_back(summary_json(s));
  for (const auto& s : d.stays) stays.push_back({{"who", s.who}, {"why", s.why}});
  return {{"to", d.to}, {"would_move", would}, {"moved", moved}, {"stays", stays}};
}

}  // namespace migr
