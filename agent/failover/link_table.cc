// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "link_table.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>

#include "../limits.h"

namespace migr {
namespace {

constexpr std::size_t kSwitchesKept = 16, kSwitchesSaid = 60;
constexpr auto kSaidWithin = std::chrono::minutes(1);

Error no_process() { return Error{ENOENT, "this process has not said HELLO"}; }

bool same_end(const migr_links_channel& a, const migr_links_channel& b) {
  return a.qpn == b.qpn && a.psn == b.psn && !std::memcmp(a.gid, b.gid, sizeof a.gid);
}

std::string process_label(const LinkTable::Owner& o) { return "process " + std::to_string(o.pid) + " (" + o.comm + ")"; }

// One that can go to another link if the one that carries it fails.
bool backed(std::uint32_t phase) { return phase == MIGR_LINKS_VQP_READY || phase == MIGR_LINKS_VQP_SWITCHING; }

std::string count_of(std::size_t n, const char* what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); }

bool contains(const std::vector<std::uint32_t>& links, std::uint32_t link) { return std::find(links.begin(), links.end(), link) != links.end(); }

// What has failed, as far as this end can tell; null: nothing has. By an error or a silence it was its own port, if that is down by now.
const char* failure_of(std::uint32_t cause, bool port_failed) {
  switch (cause) {
    case MIGR_LINKS_CAUSE_COMPLETION:
    case MIGR_LINKS_CAUSE_HEARTBEAT:
    case MIGR_LINKS_CAUSE_CHANNEL: return port_failed ? "local failure" : "path failure";
    case MIGR_LINKS_CAUSE_PEER: return port_failed ? "local failure" : "failure told by the other end";
    case MIGR_LINKS_CAUSE_EVENT:
    case MIGR_LINKS_CAUSE_NETLINK: return "local failure";
    default: return nullptr;
  }
}

}  // namespace

LinkTable::Process* LinkTable::process_locked(const Instance& who) {
  const auto p = processes_.find(who);
  return p == processes_.end() ? nullptr : &p->second;
}

void LinkTable::enter(const Instance& who, Owner owner) {
  leave(who);
  {
    std::lock_guard lock(mutex_);
    processes_[who].owner = std::move(owner);
  }
  if (watcher_) watcher_->process_changed(who);
}

void LinkTable::leave(const Instance& who) {
  {
    std::lock_guard lock(mutex_);
    const auto p = processes_.find(who);
    if (p == processes_.end()) return;
    for (const auto& [name, vqp] : p->second.vqps) names_.erase(name);
    processes_.erase(p);
  }
  if (watcher_) watcher_->process_changed(who);
}

Status LinkTable::set_links(const Instance& who, std::span<const migr_links_link> links) {
  if (links.size() > MIGR_LINKS_MAX_LINKS)
    return Error{E2BIG, "a process has at most " + std::to_string(MIGR_LINKS_MAX_LINKS) + " links, not " + std::to_string(links.size())};
  std::uint32_t seen = 0;
  for (const auto& l : links) {
    if (auto s = check(l); !s) return s;
    if (seen >> l.link & 1) return Error{EINVAL, "link " + std::to_string(l.link) + " twice"};
    seen |= 1u << l.link;
  }
  bool told = false;
  {
    std::lock_guard lock(mutex_);
    Process* p = process_locked(who);
    if (!p) return no_process();
    const auto before = process_wire(who, *p).SerializeAsString();
    p->links.assign(links.begin(), links.end());
    std::sort(p->links.begin(), p->links.end(), [](const auto& a, const auto& b) { return a.link < b.link; });
    told = process_wire(who, *p).SerializeAsString() != before;
  }
  if (told && watcher_) watcher_->process_changed(who);
  return {};
}

// What it has published is known to be its own.
Status LinkTable::check_owner(const Instance& who, std::span<const migr_links_vqp> vqps, std::size_t& offending, std::set<VqpName>& bound) {
  std::vector<VqpName> fresh;
  std::vector<std::size_t> indices;
  pid_t pid = 0;
  {
    std::lock_guard lock(mutex_);
    const Process* p = process_locked(who);
    if (!p) return no_process();
    pid = p->owner.pid;
    for (std::size_t i = 0; i < vqps.size(); i++)
      if (const VqpName name = name_of(vqps[i].name); !p->vqps.contains(name)) fresh.push_back(name), indices.push_back(i);
  }
  if (fresh.empty()) return {};
  std::size_t at = 0;
  const Status s = owns_(pid, fresh, at, bound);
  if (!s) offending = indices.at(at);
  return s;
}

Status LinkTable::publish(const Instance& who, std::span<const migr_links_vqp> vqps, std::size_t& offending) {
  for (offending = 0; offending < vqps.size(); offending++)
    if (auto s = check(vqps[offending]); !s) return s;
  std::set<VqpName> bound;
  if (owns_)
    if (auto s = check_owner(who, vqps, offending, bound); !s) return s;
  std::vector<std::pair<Instance, VqpName>> lost;
  {
    std::lock_guard lock(mutex_);
    Process* p = process_locked(who);
    if (!p) return no_process();
    std::set<VqpName> more;
    for (offending = 0; offending < vqps.size(); offending++) {
      const VqpName name = name_of(vqps[offending].name);
      const auto n = names_.find(name);
      const Process* const other = n == names_.end() || n->second == who ? nullptr : &processes_.at(n->second);
      if (other && (bound.contains(name) || !other->vqps.at(name).bound)) return Error{EEXIST, text_of(name) + " is one of " + process_label(other->owner)};
      if (n == names_.end() || other) more.insert(name);
      if (p->vqps.size() + more.size() > MIGR_LINKS_MAX_VQPS)
        return Error{ENOSPC, "more than " + std::to_string(MIGR_LINKS_MAX_VQPS) + " vQPs of one process"};
      if (names_.size() + more.size() > kMaxLinkVqps)
        return Error{ENOSPC, "more than " + std::to_string(kMaxLinkVqps) + " vQPs on this host"};
    }
    for (const auto& v : vqps) {
      const VqpName name = name_of(v.name);
      const bool fresh = !p->vqps.contains(name);
      if (const auto n = names_.find(name); n != names_.end() && n->second != who) {
        spdlog::warn("{} was one of {}, and is that of a QP of {}", text_of(name), process_label(processes_.at(n->second).owner), process_label(p->owner));
        processes_.at(n->second).vqps.erase(name);
        lost.emplace_back(n->second, name);
      }
      names_[name] = who;
      Vqp& at = p->vqps[name];
      at.policy = v.policy;
      at.making = v.making;
      at.atomics = v.atomics;
      at.default_link = v.default_link;
      at.links = v.links;
      at.paths.assign(v.path, v.path + v.paths);
      p->none.erase(name);
      if (fresh) at.link = v.default_link, at.bound = bound.contains(name);
    }
  }
  if (watcher_) {
    for (const auto& [other, name] : lost) watcher_->vqp_changed(other, name);
    for (const auto& v : vqps) watcher_->vqp_changed(who, name_of(v.name));
  }
  return {};
}

Status LinkTable::withdraw(const Instance& who, std::span<const migr_links_name> names) {
  for (const auto& n : names)
    if (auto s = check(n); !s) return s;
  std::vector<VqpName> gone;
  {
    std::lock_guard lock(mutex_);
    Process* p = process_locked(who);
    if (!p) return no_process();
    if (names.empty())
      for (const auto& [name, vqp] : p->vqps) gone.push_back(name);
    for (const auto& n : names)
      if (p->vqps.contains(name_of(n))) gone.push_back(name_of(n));
    for (const auto& name : gone) {
      p->vqps.erase(name);
      names_.erase(name);
    }
  }
  if (watcher_)
    for (const auto& name : gone) watcher_->vqp_changed(who, name);
  return {};
}

Status LinkTable::offer(const Instance& who, const migr_links_channel& end) {
  if (auto s = check(end); !s) return s;
  if (gid_of(end.peer) == who) return Error{EINVAL, "a process has no channel to itself"};
  {
    std::lock_guard lock(mutex_);
    Process* p = process_locked(who);
    if (!p) return no_process();
    const ChannelKey key{gid_of(end.peer), end.link};
    if (const auto c = p->channels.find(key); c == p->channels.end()) {
      if (p->channels.size() >= MIGR_LINKS_MAX_CHANNELS)
        return Error{ENOSPC, "more than " + std::to_string(MIGR_LINKS_MAX_CHANNELS) + " channels of one process"};
    } else if (end.round < c->second.round) {
      return Error{EINVAL, "channel on link " + std::to_string(end.link) + ": round " + std::to_string(end.round) + " after " +
                               std::to_string(c->second.round) + ": they only grow"};
    } else if (end.round == c->second.round) {
      if (!same_end(end, c->second))
        return Error{EINVAL, "channel on link " + std::to_string(end.link) + ": another QP needs a higher round than " + std::to_string(end.round)};
      return {};
    }
    p->channels[key] = end;
  }
  if (watcher_) watcher_->channel_changed(who, gid_of(end.peer), end.link);
  return {};
}

Status LinkTable::end_channel(const Instance& who, const migr_links_channel& end) {
  if (auto s = check_end(end); !s) return s;
  {
    std::lock_guard lock(mutex_);
    Process* p = process_locked(who);
    if (!p) return no_process();
    p->channels.erase({gid_of(end.peer), end.link});
  }
  if (watcher_) watcher_->channel_changed(who, gid_of(end.peer), end.link);
  return {};
}

Status LinkTable::set_states(const Instance& who, std::span<const migr_links_vqp_state> states, std::uint64_t settled) {
  for (const auto& r : states)
    if (auto s = check(r); !s) return s;
  std::lock_guard lock(mutex_);
  Process* p = process_locked(who);
  if (!p) return no_process();
  p->none.clear();
  for (const auto& r : states) {
    const auto v = p->vqps.find(name_of(r.name));
    if (v == p->vqps.end()) {
      if (r.phase == MIGR_LINKS_VQP_NONE) p->none[name_of(r.name)] = {r.link, r.why};
      continue;
    }
    v->second.link = r.link;
    v->second.epoch = r.epoch;
    v->second.phase = r.phase;
    v->second.atomics_now = r.atomics;
    v->second.why = r.why;
  }
  p->settled = std::max(p->settled, settled);
  return {};
}

std::string LinkTable::link_text(const Process& p, std::uint32_t link) {
  std::string out = std::to_string(link);
  for (const auto& l : p.links)
    if (l.link == link) out += " (" + std::string(l.device) + "/" + std::to_string(l.port) + ")";
  return out;
}

void LinkTable::say_locked(Process& p, const migr_links_switch& change, std::span<const migr_links_port> ports) {
  const auto now = std::chrono::steady_clock::now();
  while (!p.said.empty() && now - p.said.front() > kSaidWithin) p.said.pop_front();
  if (p.said.size() >= kSwitchesSaid) return;  // a process can tell of changes as fast as it likes
  p.said.push_back(now);
  const bool port_failed = std::any_of(ports.begin(), ports.end(), [&](const auto& port) {
    return port.flags & (MIGR_LINKS_PORT_DOWN_NETLINK | MIGR_LINKS_PORT_GONE) && contains(links_on(p, port.device, port.port), change.from);
  });
  const char* const failure = failure_of(change.cause, port_failed);
  const std::string why = (failure ? std::string(failure) + ", " : "") + cause_name(change.cause);
  const bool done = change.outcome == MIGR_LINKS_SWITCH_DONE;
  spdlog::log(failure || !done ? spdlog::level::warn : spdlog::level::info, "{}: {} {} link {}{}: {}", process_label(p.owner), count_of(done ? change.vqps : change.broken, "vQP"),
              done ? "from" : "given up on", link_text(p, change.from), done ? " to link " + link_text(p, change.to) : "", why);
}

Status LinkTable::add_switches(const Instance& who, std::span<const migr_links_switch> switches, std::span<const migr_links_port> ports) {
  for (const auto& r : switches)
    if (auto s = check(r); !s) return s;
  std::lock_guard lock(mutex_);
  Process* p = process_locked(who);
  if (!p) return no_process();
  for (const auto& r : switches) p->switches.push_back(r), switch_counts_[{r.cause, r.outcome}]++;
  while (p->switches.size() > kSwitchesKept) p->switches.pop_front();
  // Each is of one vQP: those that went together are told together.
  std::map<std::array<std::uint32_t, 4>, migr_links_switch> ways;
  for (const auto& r : switches) {
    const auto [at, first] = ways.try_emplace({r.from, r.to, r.cause, r.outcome}, r);
    if (!first) at->second.vqps += r.vqps, at->second.broken += r.broken;
  }
  for (const auto& [way, change] : ways) say_locked(*p, change, ports);
  return {};
}

LinkTable::SwitchCounts LinkTable::switch_counts() const {
  std::lock_guard lock(mutex_);
  return switch_counts_;
}

void LinkTable::set_error(const Instance& who, const std::string& text) {
  std::lock_guard lock(mutex_);
  if (Process* p = process_locked(who)) p->error = text;
}

wire::LinkProcess LinkTable::process_wire(const Instance& who, const Process& p) const {
  wire::LinkProcess w;
  w.set_instance(who.data(), who.size());
  w.set_host(host_);
  for (const auto& l : p.links) {
    while (w.gids_size() < static_cast<int>(l.link)) w.add_gids(std::string(sizeof l.gid, '\0'));
    w.add_gids(l.gid, sizeof l.gid);
  }
  return w;
}

migr_links_vqp LinkTable::Vqp::record(const VqpName& name) const {
  migr_links_vqp r{};
  r.name = record_of(name);
  r.policy = policy;
  r.making = making;
  r.atomics = atomics;
  r.default_link = default_link;
  r.links = links;
  for (const auto& p : paths) r.path[r.paths++] = p;
  return r;
}

wire::LinkFound LinkTable::find(const VqpName& name) const {
  wire::LinkFound f;
  {
    std::lock_guard lock(mutex_);
    if (const auto n = names_.find(name); n != names_.end()) {
      const Process& p = processes_.at(n->second);
      const Vqp& v = p.vqps.at(name);
      *f.mutable_vqp() = to_wire(v.record(name));
      *f.mutable_process() = process_wire(n->second, p);
    }
  }
  f.set_home(home(name.gid));
  return f;
}

wire::LinkChannelAnswer LinkTable::answer(const wire::LinkChannel& told) {
  wire::LinkChannelAnswer a;
  const auto from = from_wire(told);
  const auto to = instance_of(told.peer());
  if (!from || !to) return a;
  {
    std::lock_guard lock(mutex_);
    const Process* p = process_locked(*to);
    if (!p) return a;
    const auto c = p->channels.find({gid_of(from->peer), from->link});
    if (c != p->channels.end() && c->second.round >= from->round) {
      a.set_known(c->second.round == from->round ? wire::LinkChannelAnswer::HERE : wire::LinkChannelAnswer::AHEAD);
      *a.mutable_end() = to_wire(*to, c->second);
      return a;
    }
  }
  a.set_known(wire::LinkChannelAnswer::NOT_YET);
  if (knock_) knock_(*to, *from);
  return a;
}

bool LinkTable::home(const Gid& gid) const {
  if (!gids_source_) {
    std::lock_guard lock(mutex_);
    for (const auto& [who, p] : processes_)
      for (const auto& l : p.links)
        if (gid_of(l.gid) == gid) return true;
    return false;
  }
  constexpr int kRests = 20;  // times as long as a look took
  std::unique_lock lock(gids_mutex_);
  gids_read_.wait(lock, [&] { return !gids_reading_ || gids_.contains(gid); });
  const auto began = std::chrono::steady_clock::now();
  if (gids_.contains(gid) || began < gids_next_) return gids_.contains(gid);
  gids_reading_ = true;
  lock.unlock();
  auto all = gids_source_();
  lock.lock();
  gids_reading_ = false;
  gids_read_.notify_all();
  gids_ = std::move(all);
  const auto now = std::chrono::steady_clock::now();
  gids_next_ = now + std::max<std::chrono::steady_clock::duration>(std::chrono::milliseconds(kLinkScanMs), kRests * (now - began));
  return gids_.contains(gid);
}

bool LinkTable::here(const Instance& who) const {
  std::lock_guard lock(mutex_);
  return processes_.contains(who);
}

std::optional<wire::LinkProcess> LinkTable::process(const Instance& who) const {
  std::lock_guard lock(mutex_);
  const auto p = processes_.find(who);
  if (p == processes_.end()) return std::nullopt;
  return process_wire(who, p->second);
}

std::optional<wire::LinkVqp> LinkTable::vqp(const Instance& who, const VqpName& name) const {
  std::lock_guard lock(mutex_);
  const auto p = processes_.find(who);
  if (p == processes_.end()) return std::nullopt;
  const auto v = p->second.vqps.find(name);
  if (v == p->second.vqps.end()) return std::nullopt;
  return to_wire(v->second.record(name));
}

std::optional<wire::LinkChannel> LinkTable::channel(const Instance& who, const Instance& peer, std::uint32_t link) const {
  std::lock_guard lock(mutex_);
  const auto p = processes_.find(who);
  if (p == processes_.end()) return std::nullopt;
  const auto c = p->second.channels.find({peer, link});
  if (c == p->second.channels.end()) return std::nullopt;
  return to_wire(who, c->second);
}

LinkTable::Everything LinkTable::everything() const {
  std::lock_guard lock(mutex_);
  Everything e;
  for (const auto& [who, p] : processes_) {
    e.processes.push_back(who);
    for (const auto& [name, vqp] : p.vqps) e.vqps.push_back({who, name});
    for (const auto& [key, end] : p.channels) e.channels.push_back({who, key.peer, key.link});
  }
  return e;
}

std::vector<wire::LinkProcessReport> LinkTable::reports(bool each_vqp) const {
  std::lock_guard lock(mutex_);
  std::vector<wire::LinkProcessReport> out;
  for (const auto& [who, p] : processes_) {
    auto& r = out.emplace_back();
    r.set_pid(p.owner.pid);
    r.set_comm(p.owner.comm);
    r.set_instance(who.data(), who.size());
    r.set_policy(p.owner.hello.policy);
    r.set_making(p.owner.hello.making);
    r.set_atomics(p.owner.hello.atomics);
    r.set_generation(p.owner.hello.generation);
    r.set_heartbeat_ms(p.owner.hello.heartbeat_ms);
    r.set_heartbeat_misses(p.owner.hello.heartbeat_misses);
    r.set_configured(p.owner.configured);
    r.set_error(p.error);
    r.set_settled(p.settled);
    for (const auto& l : p.links) {
      auto* w = r.add_links();
      w->set_link(l.link);
      w->set_device(l.device);
      w->set_port(l.port);
      w->set_gid(l.gid, sizeof l.gid);
      w->set_gid_index(l.gid_index);
      w->set_state(l.state);
      w->set_cause(l.cause);
      w->set_channels(l.channels);
      w->set_vqps(l.vqps);
      w->set_backups(l.backups);
      w->set_spares(l.spares);
      w->set_why(l.why);
    }
    std::map<std::pair<std::uint32_t, std::string>, std::uint32_t> without;
    std::uint32_t ready = 0;
    for (const auto& [name, other] : p.none) without[{MIGR_LINKS_VQP_NONE, other.second}]++;
    for (const auto& [name, v] : p.vqps) {
      if (backed(v.phase))
        ready++;
      else
        without[{v.phase, v.why}]++;
      if (!each_vqp) continue;
      auto* w = r.add_each();
      w->set_gid(name.gid.data(), name.gid.size());
      w->set_vqpn(name.vqpn);
      w->set_policy(v.policy);
      w->set_making(v.making);
      w->set_atomics(v.atomics_now);
      w->set_link(v.link);
      w->set_epoch(v.epoch);
      w->set_phase(v.phase);
      w->set_why(v.why);
    }
    r.set_vqps(static_cast<std::uint32_t>(p.vqps.size() + p.none.size()));
    r.set_backed(ready);
    for (const auto& [why, n] : without) {
      auto* w = r.add_without();
      w->set_phase(why.first);
      w->set_why(why.second);
      w->set_vqps(n);
    }
    for (const auto& s : p.switches) {
      auto* w = r.add_switches();
      w->set_peer(s.peer, sizeof s.peer);
      w->set_from(s.from);
      w->set_to(s.to);
      w->set_cause(s.cause);
      w->set_outcome(s.outcome);
      w->set_vqps(s.vqps);
      w->set_broken(s.broken);
      w->set_replayed(s.replayed);
      w->set_executed(s.executed);
      w->set_lost(s.lost);
      w->set_tries(s.tries);
      w->set_when_ns(s.when_ns);
      w->set_detect_ns(s.detect_ns);
      w->set_cut_ns(s.cut_ns);
      w->set_told_ns(s.told_ns);
      w->set_resume_ns(s.resume_ns);
      w->set_bytes(s.bytes);
    }
  }
  return out;
}

// Caller holds the lock. port 0: all ports.
LinkTable::Links LinkTable::links_on(const Process& p, const std::string& device, std::uint32_t port) {
  Links out;
  for (const auto& l : p.links)
    if (device == l.device && (!port || port == l.port)) out.push_back(l.link);
  return out;
}

// A line for each process with a link there, of which some vQPs are `how`.
std::vector<std::string> LinkTable::count_on(const std::string& device, std::uint32_t port, unsigned& processes, const char* how,
                                             const std::function<bool(const Process&, const Vqp&, const Links& there)>& counts) const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  processes = 0;
  for (const auto& [who, p] : processes_) {
    const auto there = links_on(p, device, port);
    if (there.empty()) continue;
    processes++;
    std::size_t n = 0;
    for (const auto& [name, v] : p.vqps) n += v.phase != MIGR_LINKS_VQP_BROKEN && counts(p, v, there);
    if (n) out.push_back(process_label(p.owner) + ": " + count_of(n, "vQP") + " " + how);
  }
  return out;
}

std::vector<std::string> LinkTable::left_on(const std::string& device, std::uint32_t port, unsigned& processes) const {
  return count_on(device, port, processes, "still there", [](const Process&, const Vqp& v, const Links& there) { return contains(there, v.link); });
}

std::vector<std::string> LinkTable::away_from(const std::string& device, std::uint32_t port, std::uint64_t serial, unsigned& processes) const {
  return count_on(device, port, processes, "not there", [serial](const Process& p, const Vqp& v, const Links& there) {
    return p.settled < serial && !contains(there, v.link) &&
           std::any_of(there.begin(), there.end(), [&](std::uint32_t link) { return v.links >> link & 1; });
  });
}

std::vector<std::string> LinkTable::stuck_on(const std::string& device, std::uint32_t port) const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  for (const auto& [who, p] : processes_) {
    const auto links = links_on(p, device, port);
    std::size_t stuck = 0;
    const std::string* why = nullptr;
    for (const auto& [name, v] : p.vqps) {
      if (!contains(links, v.link) || backed(v.phase) || v.phase == MIGR_LINKS_VQP_BROKEN) continue;
      stuck++;
      if (!why || why->empty()) why = &v.why;
    }
    for (const auto& [name, other] : p.none) {
      if (!contains(links, other.first)) continue;
      stuck++;
      if (!why || why->empty()) why = &other.second;
    }
    if (stuck) out.push_back(process_label(p.owner) + ": " + count_of(stuck, "vQP") + " without a backup" + (why->empty() ? "" : " (" + *why + ")"));
  }
  return out;
}

}  // namespace migr
