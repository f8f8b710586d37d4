// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "directory.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <thread>

#include "file_tree.h"
#include "hex.h"
#include "json.h"
#include "limits.h"
#include "log.h"
#include "parallel.h"
#include "uapi/migr.h"

namespace migr {
namespace {

// Nobody tells when a QP is destroyed whose process lives on, and who was silent has not heard of an end.
constexpr std::size_t kMaxMoves = 4096;  // of QPs; and of processes
constexpr std::size_t kGidBytes = 16;

// What has ended goes first, then the oldest. @return how many of these have gone
template <class T, class Ended>
std::size_t make_room(std::vector<T>& all, Ended&& ended) {
  if (all.size() <= kMaxMoves) return 0;
  std::size_t over = all.size() - kMaxMoves;
  std::vector<T> kept;
  for (auto& x : all)
    if (over && ended(x)) over--;
    else kept.push_back(std::move(x));
  kept.erase(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(over));
  all = std::move(kept);
  return over;
}

}  // namespace

Directory::Directory(const Config& config) : path_(config.state_dir + "/moves.json") {
  const Status read = load();
  unsaved_ = !read;
  if (!read) spdlog::error("{}; nothing is written there until it can be read", read.error().text);
}

// Caller holds the lock.
Status Directory::load() {
  const auto text = read_whole(path_);
  unread_ = !text && text.error().code != ENOENT;
  if (!text) return unread_ ? text : Status();
  present_.clear();
  order_.clear();
  processes_.clear();
  const auto add = [this](const Json& m) {
    if (!m.is_object()) return false;
    const auto from = from_hex(m.value("birth_gid", "")), to = from_hex(m.value("gid", ""));
    if (!from || !to || from->size() != kGidBytes || to->size() != kGidBytes) return false;
    if (const auto instance = from_hex(m.value("instance", "")); instance && !instance->empty()) return processes_.push_back({*instance, *from, *to}), true;
    const Address birth{*from, m.value("vqpn", 0u)}, present{*to, m.value("pqpn", 0u)};
    // Without a number it is an end, which an older migrd took for a move.
    if (present.qpn && present_.emplace(birth, Present{present, from_hex(m.value("process", "")).value_or("")}).second) order_.push_back(birth);
    return true;
  };
  const Json j = Json::parse(*text, nullptr, false);
  bool damaged = !j.is_array();
  for (const auto& m : damaged ? Json(Json::array()) : j) {
    try {
      damaged = !add(m) || damaged;
    } catch (const Json::exception&) {
      damaged = true;
    }
  }
  for (const auto& m : late_) take(m);
  let_oldest_go({});
  const Status kept = damaged ? put_aside(path_, *text, this->text()) : Status();
  unread_ = !kept;
  if (kept) late_.clear();
  return kept;
}

wire::Move Directory::at(const std::string& gid, std::uint32_t pqpn, std::uint32_t vqpn) {
  std::lock_guard lock(mutex_);
  wire::Move m;
  m.set_birth_gid(gid);
  m.set_vqpn(vqpn);
  for (const auto& [birth, present] : present_)
    if (present.at == Address{gid, pqpn}) m.set_birth_gid(birth.gid), m.set_vqpn(birth.qpn);
  return m;
}

bool Directory::came_to(const std::string& gid, std::uint32_t pqpn) {
  std::lock_guard lock(mutex_);
  return std::any_of(present_.begin(), present_.end(), [&](const auto& p) { return p.second.at == Address{gid, pqpn}; });
}

Status Directory::put(const wire::MovesRequest& moves, const HasEnded& has_ended) {
  for (const auto& m : moves.moves())
    if (m.birth_gid().size() != kGidBytes || m.gid().size() != kGidBytes || m.vqpn() > MIGR_QPN_MASK || m.pqpn() > MIGR_QPN_MASK)
      return Error{EINVAL, "a malformed move"};
  for (const auto& m : moves.moves())
    if ((!m.vqpn() || !m.pqpn()) && m.instance().size() != Instance().size()) return Error{EINVAL, "a move of nothing"};
  std::lock_guard lock(mutex_);
  for (const auto& m : moves.moves()) take(m);
  let_oldest_go(has_ended);
  if (unread_) late_.insert(late_.end(), moves.moves().begin(), moves.moves().end());
  if (late_.size() > 2 * kMaxMoves) late_.erase(late_.begin(), late_.end() - 2 * kMaxMoves);
  return save();
}

// Caller holds the lock.
void Directory::take(const wire::Move& m) {
  if (!m.vqpn()) {
    std::erase_if(processes_, [&](const Process& p) { return p.instance == m.instance() && p.birth_gid == m.birth_gid(); });
    if (m.birth_gid() != m.gid()) processes_.push_back({m.instance(), m.birth_gid(), m.gid()});
    return;
  }
  const Address birth{m.birth_gid(), m.vqpn()}, present{m.gid(), m.pqpn()};
  if (!m.pqpn()) {
    // The name may be another's already.
    if (const auto p = present_.find(birth); p != present_.end() && p->second.instance == m.instance()) present_.erase(p);
    return;
  }
  // What was there before is there no more.
  std::erase_if(present_, [&](const auto& p) { return p.second.at == present; });
  std::erase(order_, birth);
  order_.push_back(birth);
  present_[birth] = {present, m.instance()};
}

// Caller holds the lock.
void Directory::let_oldest_go(const HasEnded& has_ended) {
  std::erase_if(order_, [&](const Address& a) { return !present_.contains(a); });
  const auto ended = [&](const std::string& instance, const std::string& gid) { return has_ended && !instance.empty() && has_ended(instance, gid); };
  const auto of_qp = [&](const Address& birth) {
    const Present& p = present_.at(birth);
    return ended(p.instance, p.at.gid);
  };
  const auto of_process = [&](const Process& p) { return ended(p.instance, p.gid); };
  const auto qps = make_room(order_, of_qp), processes = make_room(processes_, of_process);
  if (present_.size() > order_.size()) {
    const std::set<Address> kept(order_.begin(), order_.end());
    std::erase_if(present_, [&](const auto& p) { return !kept.contains(p.first); });
  }
  if ((qps || processes) && rarely_.due("moves"))
    spdlog::warn("there are more than {} unconnected QPs, or processes, that have moved: the oldest are forgotten, and who knows them by an address of before does not find them any more", kMaxMoves);
}

Status Directory::save_again() {
  std::lock_guard lock(mutex_);
  return unsaved_ ? save() : Status();
}

// Caller holds the lock.
Status Directory::save() {
  if (unread_)
    if (auto s = load(); !s) return unsaved_ = true, s;
  const Status written = write_whole(path_, text());
  unsaved_ = !written;
  return written;
}

std::string Directory::text() const {
  Json j = Json::array();
  for (const auto& birth : order_) {
    const Present& present = present_.at(birth);
    j.push_back({{"birth_gid", to_hex(birth.gid)}, {"vqpn", birth.qpn}, {"gid", to_hex(present.at.gid)}, {"pqpn", present.at.qpn}, {"process", to_hex(present.instance)}});
  }
  for (const auto& p : processes_) j.push_back({{"instance", to_hex(p.instance)}, {"birth_gid", to_hex(p.birth_gid)}, {"gid", to_hex(p.gid)}});
  return j.dump(1) + "\n";
}

std::vector<migr_move> Directory::all() {
  std::lock_guard lock(mutex_);
  std::vector<migr_move> out;
  for (const auto& [birth, present] : present_) {
    migr_move m{{}, {}, birth.qpn, present.at.qpn};
    std::memcpy(m.birth_gid, birth.gid.data(), sizeof m.birth_gid);
    std::memcpy(m.gid, present.at.gid.data(), sizeof m.gid);
    out.push_back(m);
  }
  std::set<std::pair<std::string, std::string>> pairs;
  for (const auto& p : processes_) pairs.emplace(p.birth_gid, p.gid);
  for (const auto& [from, to] : pairs) {
    migr_move m{};
    std::memcpy(m.birth_gid, from.data(), sizeof m.birth_gid);
    std::memcpy(m.gid, to.data(), sizeof m.gid);
    out.push_back(m);
  }
  return out;
}

std::vector<std::string> Directory::earlier(const Instance& instance) {
  const std::string name = bytes_of(instance);
  std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  for (const auto& p : processes_)
    if (p.instance == name) out.push_back(p.birth_gid);
  return out;
}

bool Directory::was_at(const Instance& instance, const std::string& gid) {
  const auto all = earlier(instance);
  return std::find(all.begin(), all.end(), gid) != all.end();
}

bool Directory::touched(const std::string& gid) {
  std::lock_guard lock(mutex_);
  return std::any_of(processes_.begin(), processes_.end(), [&](const Process& p) { return p.birth_gid == gid || p.gid == gid; });
}

wire::MovesRequest Directory::end_of(const std::vector<Instance>& instances) {
  wire::MovesRequest out;
  for (const auto& i : instances) {
    const std::string name = bytes_of(i);
    const auto add = [&](const std::string& gid, std::uint32_t vqpn) {
      auto* m = out.add_moves();
      m->set_instance(name);
      m->set_birth_gid(gid);
      m->set_vqpn(vqpn);
      m->set_gid(gid);
    };
    for (const auto& gid : earlier(i)) add(gid, 0);
    std::lock_guard lock(mutex_);
    for (const auto& [birth, present] : present_)
      if (present.instance == name) add(birth.gid, birth.qpn);
  }
  return out;
}

void tell_hosts(Peers& peers, const wire::MovesRequest& moves, int limit_ms) {
  std::set<std::string> hosts{peers.config().name};
  for (const auto& p : peers.config().peers()) hosts.insert(p.name);
  (void)parallel_for(hosts, [&](const std::string& host) -> Status {
    auto channel = peers.channel(host);
    if (!channel) return {};
    wire::Partner::Stub stub(*channel);
    if (auto told = call(stub, &wire::Partner::Stub::Moves, moves, limit_ms, host); !told && !unreachable(told.error()))
      spdlog::warn("{} is not told of new addresses: {}", host, told.error().text);
    return {};
  });
}

Status tell_moves(ProcessSession& session, std::uint32_t migration, Directory& directory) {
  std::lock_guard telling(session.telling);
  const auto moves = directory.all();
  std::uint64_t datagram_qps = 0;
  const bool datagrams = std::any_of(moves.begin(), moves.end(), [](const migr_move& m) { return m.vqpn; });
  if (auto r = !datagrams ? Result<std::vector<migr_qp_ref>>(std::vector<migr_qp_ref>()) : session.ask<migr_qp_ref, migr_qp_ref>(MIGR_MSG_MOVES, migration, {}, kProcessMs, MIGR_MOVES_PREPARE, &datagram_qps); !r) return r.error();
  if (datagram_qps)
    if (auto s = session.wait_threads_outside(kSuspendMs); !s) return s.error();
  return session.ask<migr_qp_ref, migr_move>(MIGR_MSG_MOVES, migration, moves, kProcessMs);
}

Status take_moves(const std::shared_ptr<Directory>& directory, SessionTable& sessions, const wire::MovesRequest& moves, int limit_ms) {
  std::optional<std::set<std::string>> here;
  std::set<std::string> connected;
  const auto has_ended = [&](const std::string& instance, const std::string& gid) {
    if (!here) {
      here.emplace();
      (void)each_gid([&](wire::PortGid& g) { here->insert(g.gid()); });
      for (const auto& s : sessions.all()) connected.insert(bytes_of(s->instance()));
    }
    return here->contains(gid) && !connected.contains(instance);
  };
  if (const auto s = directory->put(moves, has_ended); !s) {
    if (s.error().code == EINVAL) return s;
    spdlog::error("{}; processes are told, and it is written down when that can be", s.error().text);
  }
  struct Told {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left = 0;
    Status first;
  };
  const auto told = std::make_shared<Told>();
  const auto all = sessions.all();
  told->left = all.size();
  for (const auto& session : all) {
    auto tell = with_log_fields([session, directory, told, id = moves.id()] {
      const Status s = tell_moves(*session, id, *directory);
      std::lock_guard lock(told->mutex);
      told->left--;
      if (told->first && !s) told->first = s;
      told->changed.notify_all();
    });
    try {
      std::thread(tell).detach();
    } catch (const std::system_error&) {
      tell();
    }
  }
  std::unique_lock lock(told->mutex);
  if (!told->changed.wait_for(lock, std::chrono::milliseconds(limit_ms), [&] { return !told->left; }))
    spdlog::warn("{} of {} processes are told of new addresses when they listen again", told->left, all.size());
  return told->first;
}

}  // namespace migr
