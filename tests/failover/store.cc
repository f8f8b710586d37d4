// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrd keeps for processes and their links, for all "processes" of this one.
#include "store.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define STORE extern "C" [[gnu::visibility("default")]]

namespace {

using Id = std::array<std::uint8_t, 16>;
using Name = std::pair<Id, std::uint32_t>;

std::mutex lock;
std::vector<StoreProcess> processes;
std::map<Name, std::pair<Id, migr_links_vqp>> vqps;
std::map<std::tuple<Id, Id, std::uint32_t>, migr_links_channel> channels;
std::map<Name, migr_links_vqp_state> states;
std::map<std::pair<Id, std::uint32_t>, unsigned> standing;  // channels, by process and link
std::map<std::string, migr_links_link> links;               // by device
migr_links_switch totals;
unsigned causes = 0;
bool lookups_held = false, lookup_waits = false, hidden = false, away = false;
std::set<Id> asked_in_vain;
unsigned pushes = 0;
migr_links_port pushed;
std::condition_variable let_look_up;
struct Thread {
  std::atomic<unsigned long> passes = 0;
  std::atomic<bool> sleeps = true;
} threads[2];

Id id(const std::uint8_t* bytes) {
  Id out;
  std::memcpy(out.data(), bytes, out.size());
  return out;
}
Name name(const migr_links_name& n) { return {id(n.gid), n.vqpn}; }

}  // namespace

STORE void store_process(StoreProcess process) {
  std::lock_guard guard(lock);
  processes.push_back(process);
}
STORE std::size_t store_processes() {
  std::lock_guard guard(lock);
  return processes.size();
}
STORE StoreProcess store_process_of(std::size_t from_last) {
  std::lock_guard guard(lock);
  return processes.at(processes.size() - 1 - from_last);
}
STORE void store_publish(const std::uint8_t* instance, const migr_links_vqp* all, std::size_t n) {
  std::lock_guard guard(lock);
  for (std::size_t i = 0; i < n; ++i) vqps[name(all[i].name)] = {id(instance), all[i]};
}
STORE void store_withdraw(const migr_links_name* all, std::size_t n) {
  std::lock_guard guard(lock);
  for (std::size_t i = 0; i < n; ++i) vqps.erase(name(all[i])), states.erase(name(all[i]));
}
STORE void store_hold_lookups(bool hold) {
  std::lock_guard guard(lock);
  lookups_held = hold;
  let_look_up.notify_all();
}
STORE bool store_lookup_waits() {
  std::lock_guard guard(lock);
  return lookup_waits;
}
STORE void store_hide(bool hide) {
  std::lock_guard guard(lock);
  hidden = hide;
}
STORE void store_go_away(bool is_away) {
  std::lock_guard guard(lock);
  away = is_away;
}
STORE unsigned store_asked_in_vain() {
  std::lock_guard guard(lock);
  return static_cast<unsigned>(asked_in_vain.size());
}
STORE bool store_answers(const std::uint8_t* instance) {
  std::lock_guard guard(lock);
  if (away) asked_in_vain.insert(id(instance));
  return !away;
}
STORE void store_prefer(const char* device) {
  std::lock_guard guard(lock);
  if (device) std::strncpy(pushed.device, device, sizeof pushed.device - 1);
  pushed.port = 1;
  pushed.flags = device ? MIGR_LINKS_PORT_PREFERRED : 0;
  pushed.serial = ++pushes;
}
STORE unsigned store_pushes(unsigned before, migr_links_port* out) {
  std::lock_guard guard(lock);
  if (before != pushes) *out = pushed;
  return pushes;
}
STORE void store_lookup(const migr_links_name* of, migr_links_found* out) {
  std::unique_lock guard(lock);
  lookup_waits = lookups_held;
  let_look_up.wait(guard, [] { return !lookups_held; });
  lookup_waits = false;
  const auto found = vqps.find(name(*of));
  *out = {};
  out->vqp.name = *of;
  out->status = hidden ? EHOSTUNREACH : EAGAIN;
  if (hidden || found == vqps.end()) return;
  out->vqp = found->second.second;
  std::memcpy(out->instance, found->second.first.data(), 16);
  out->status = 0;
}
STORE void store_channel(const std::uint8_t* instance, const migr_links_channel* own, migr_links_channel* out) {
  std::lock_guard guard(lock);
  channels[{id(instance), id(own->peer), own->link}] = *own;
  *out = *own;
  const auto other = channels.find({id(own->peer), id(instance), own->link});
  if (other == channels.end() || other->second.round < own->round) {
    out->status = EAGAIN;
  } else if (other->second.round > own->round) {
    out->round = other->second.round;
    out->status = ESTALE;
  } else {
    *out = other->second;
    std::memcpy(out->peer, own->peer, 16);
    out->status = 0;
  }
}
STORE void store_end_channel(const std::uint8_t* instance, const migr_links_channel* own) {
  std::lock_guard guard(lock);
  channels.erase({id(instance), id(own->peer), own->link});
}
STORE void store_links(const std::uint8_t* instance, const migr_links_link* all, std::size_t n) {
  std::lock_guard guard(lock);
  for (std::size_t i = 0; i < n; ++i) standing[{id(instance), all[i].link}] = all[i].channels, links[all[i].device] = all[i];
}
STORE bool store_link(const char* device, migr_links_link* out) {
  std::lock_guard guard(lock);
  const auto found = links.find(device);
  if (found == links.end()) return false;
  *out = found->second;
  return true;
}
STORE bool store_all_stand(std::uint32_t link) {
  std::lock_guard guard(lock);
  for (const auto& [of, channels] : standing)
    if (of.second == link && !channels) return false;
  return true;
}
STORE void store_states(const migr_links_vqp_state* all, std::size_t n) {
  std::lock_guard guard(lock);
  for (std::size_t i = 0; i < n; ++i) states[name(all[i].name)] = all[i];
}
STORE bool store_state(const migr_links_name* of, migr_links_vqp_state* out) {
  std::lock_guard guard(lock);
  const auto found = states.find(name(*of));
  if (found == states.end()) return false;
  *out = found->second;
  return true;
}
STORE void store_pass(int thread) { ++threads[thread].passes; }
STORE void store_sleep(int thread, bool sleeps) { threads[thread].sleeps = sleeps; }
STORE int store_outside() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (Thread& t : threads)
    for (const unsigned long before = t.passes; !t.sleeps && t.passes == before; std::this_thread::sleep_for(std::chrono::microseconds(100)))
      if (std::chrono::steady_clock::now() > deadline) return ETIMEDOUT;
  return 0;
}
STORE void store_switched(const migr_links_switch* all, std::size_t n) {
  std::lock_guard guard(lock);
  for (std::size_t i = 0; i < n; ++i) {
    totals.vqps += all[i].vqps;
    totals.broken += all[i].broken;
    totals.replayed += all[i].replayed;
    totals.executed += all[i].executed;
    totals.lost += all[i].lost;
    totals.resume_ns += all[i].resume_ns;
    causes |= 1u << all[i].cause;
  }
}
STORE void store_totals(migr_links_switch* out) {
  std::lock_guard guard(lock);
  *out = totals;
  totals = {};
}
STORE unsigned store_causes() {
  std::lock_guard guard(lock);
  return std::exchange(causes, 0);
}
