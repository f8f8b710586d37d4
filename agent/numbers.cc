// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "numbers.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <utility>

#include "file_tree.h"
#include "hex.h"
#include "kernel_record.h"
#include "parallel.h"
#include "process.h"

namespace migr {
namespace {

// born.json: {INSTANCE: {"born": [..], "foreign": [..], "away": true, "to": HOST}}; "born" is what is reserved
// guests.json: {INSTANCE: {"births": [HOST..], "pid": .., "life": ".."}}
constexpr char kBorn[] = "born.json", kGuests[] = "guests.json";

// Also for numbers that it is done with already.
Status each(const BornBook::Vqpns& vqpns, Status (KernelRecord::*what)(std::uint32_t)) {
  if (vqpns.empty()) return {};
  auto k = KernelRecord::open();
  if (!k) return k.error();
  for (const auto v : vqpns)
    if (auto s = ((*k).*what)(v); !s) return s;
  return {};
}

Result<bool> fewer_are_reserved_than(std::size_t n) {
  auto k = KernelRecord::open();
  if (!k) return k.error();
  const auto i = k->info();
  if (!i) return i.error();
  return i->reserved < n;
}

std::vector<std::string> births_in(const Json& guests, const std::string& who) {
  const auto g = guests.find(who);
  if (g == guests.end()) return {};
  std::vector<std::string> out;
  for (const auto& h : g->value("births", Json::array()))
    if (h.is_string()) out.push_back(h);
  return out;
}

// An entry of guests.json; one of before it was restored has no life yet.
bool still_lives(const Json& guest) {
  const std::string life = guest.value("life", "");
  return !life.empty() && life_of(guest.value("pid", 0)) == life;
}

}  // namespace

// ---- the book

BornBook::BornBook(const std::string& text) {
  const Json j = Json::parse(text, nullptr, false);
  damaged_ = !j.is_object();
  if (damaged_) return;
  for (const auto& [who, e] : j.items()) {
    try {
      all_[who] = {e.value("born", std::set<std::uint32_t>()), e.value("foreign", std::set<std::uint32_t>()), e.value("away", false), e.value("to", "")};
    } catch (const Json::exception&) {
      all_.erase(who);
      damaged_ = true;
    }
  }
}

std::string BornBook::text() const {
  Json j = Json::object();
  for (const auto& [who, e] : all_) j[who] = {{"born", e.born}, {"foreign", e.foreign}, {"away", e.away}, {"to", e.to}};
  return j.dump(1);
}

BornBook::Vqpns BornBook::born_here(const Instance& who, const Vqpns& vqpns, bool first_life) const {
  const auto e = all_.find(hex(who));
  std::set<std::uint32_t> born;
  for (const auto v : vqpns)
    if (first_life || e == all_.end() || e->second.born.contains(v) || !e->second.foreign.contains(v)) born.insert(v);
  return {born.begin(), born.end()};
}

BornBook::Vqpns BornBook::leave(const Instance& who, const Vqpns& born, const std::string& to) {
  std::set<std::uint32_t> before;
  if (const auto e = all_.find(hex(who)); e != all_.end()) before = std::move(e->second.born), all_.erase(e);
  if (!born.empty()) all_[hex(who)] = {{born.begin(), born.end()}, {}, true, to};
  return without_reserved(std::move(before));
}

std::optional<std::string> BornBook::away_at(const Instance& who) const {
  const auto e = all_.find(hex(who));
  return e != all_.end() && e->second.away ? std::optional(e->second.to) : std::nullopt;
}

BornBook::Vqpns BornBook::arrive(const std::vector<Instance>& who, const Vqpns& vqpns) {
  const std::set<std::uint32_t> have(vqpns.begin(), vqpns.end());
  std::set<std::uint32_t> out;
  for (const auto& i : who) {
    Entry& e = all_[hex(i)];
    // What it has still is its QPs' name, and no longer their number: nobody else may be born with it.
    for (const auto v : e.born)
      if (!have.contains(v)) out.insert(v);
    std::erase_if(e.born, [&](auto v) { return !have.contains(v); });
    e.away = false;
    e.to.clear();
    e.foreign.clear();
    for (const auto v : vqpns)
      if (!e.born.contains(v)) e.foreign.insert(v);
  }
  return without_reserved(std::move(out));
}

BornBook::Vqpns BornBook::end(const Instance& who, bool elsewhere) {
  const auto e = all_.find(hex(who));
  if (e == all_.end() || e->second.away != elsewhere) return {};
  auto out = std::move(e->second.born);
  all_.erase(e);
  return without_reserved(std::move(out));
}

BornBook::Vqpns BornBook::reserved() const {
  std::set<std::uint32_t> out;
  for (const auto& [id, e] : all_) out.insert(e.born.begin(), e.born.end());
  return {out.begin(), out.end()};
}

std::map<std::uint32_t, std::vector<Instance>> BornBook::owners() const {
  std::map<std::uint32_t, std::vector<Instance>> out;
  for (const auto& [who, e] : all_)
    if (const auto i = instance_of(from_hex(who).value_or("")))
      for (const auto v : e.born) out[v].push_back(*i);
  return out;
}

std::vector<Instance> BornBook::owners_of(std::uint32_t vqpn) const {
  std::vector<Instance> out;
  for (const auto& [who, e] : all_)
    if (e.born.contains(vqpn))
      if (const auto i = instance_of(from_hex(who).value_or(""))) out.push_back(*i);
  return out;
}

BornBook::Vqpns BornBook::without_reserved(std::set<std::uint32_t> vqpns) const {
  for (const auto v : reserved()) vqpns.erase(v);
  return {vqpns.begin(), vqpns.end()};
}

// ---- on disk

// Caller holds the lock. Nobody else writes to it.
Result<const Numbers::Kept*> Numbers::kept_book() const {
  if (kept_) return &*kept_;
  const auto text = read_whole(path(kBorn));
  if (!text && text.error().code != ENOENT) return text.error();
  BornBook b(text ? *text : "{}");
  if (b.damaged())
    if (auto s = put_aside(path(kBorn), *text, b.text()); !s) return s.error();
  return &kept_.emplace(std::move(b));
}

// Caller holds the lock.
Result<BornBook> Numbers::book() const {
  const auto k = kept_book();
  if (!k) return k.error();
  return (*k)->book;
}

// Caller holds the lock.
Status Numbers::write_book(BornBook b) {
  kept_.reset();  // of what was not written whole it is not known what is there
  if (auto s = write(kBorn, b.text()); !s) return s;
  kept_.emplace(std::move(b));
  return {};
}

// Caller holds the lock.
Result<Json> Numbers::guests() const {
  if (unwritten_) return *unwritten_;
  const auto text = read_whole(path(kGuests));
  if (!text && text.error().code == ENOENT) return Json(Json::object());
  if (!text) return text.error();
  Json j = Json::parse(*text, nullptr, false);
  bool damaged = !j.is_object();
  if (damaged) j = Json::object();
  for (auto i = j.begin(); i != j.end();) {
    damaged = damaged || !i->is_object();
    i = i->is_object() ? std::next(i) : j.erase(i);
  }
  if (damaged)
    if (auto s = put_aside(path(kGuests), *text, j.dump(1)); !s) return s.error();
  return j;
}

Status Numbers::write(const char* name, const std::string& text) const { return write_whole(path(name), text); }

// Caller holds the lock.
Status Numbers::write_guests(const Json& all) {
  const Status s = write(kGuests, all.dump(1));
  if (s) unwritten_.reset();
  return s;
}

void Numbers::reserve_again() {
  std::lock_guard lock(mutex_);
  const auto known = kept_book();
  const std::size_t all = known ? (*known)->reserved : 0;
  Result<bool> lost = false;
  if (!known) lost = known.error();
  else if (all) lost = fewer_are_reserved_than(all);
  Status s = lost;
  if (lost && *lost) s = each((*known)->book.reserved(), &KernelRecord::reserve_qpn);
  if (s && *lost) spdlog::info("{} numbers that were born here are reserved", all);
  const std::string why = s ? "" : s.error().text;
  if (std::exchange(unreserved_, why) != why && !s) spdlog::warn("numbers that were born here are not reserved: {}", why);
}

Result<Numbers::Vqpns> Numbers::born_here(const Instance& instance, const Vqpns& vqpns, bool first_life) const {
  std::lock_guard lock(mutex_);
  const auto k = kept_book();
  if (!k) return k.error();
  return (*k)->book.born_here(instance, vqpns, first_life);
}

Result<std::vector<std::string>> Numbers::births_of(const Instance& instance, const Vqpns& vqpns, bool first_life) const {
  std::lock_guard lock(mutex_);
  const auto all = guests();
  if (!all) return all.error();
  const auto k = kept_book();
  if (!k) return k.error();
  auto hosts = births_in(*all, hex(instance));
  if (std::find(hosts.begin(), hosts.end(), config_.name) == hosts.end() && !(*k)->book.born_here(instance, vqpns, first_life).empty())
    hosts.push_back(config_.name);
  return hosts;
}

Status Numbers::leave(const std::vector<Instance>& instances) {
  std::lock_guard lock(mutex_);
  auto all = guests();
  if (!all) return all;
  for (const auto& i : instances) all->erase(hex(i));
  return write_guests(*all);
}

// Written before it is reserved, and after it is released: what was written is reserved again after a start.
Status Numbers::left(const Instance& instance, const Vqpns& born, const std::string& to) {
  std::lock_guard lock(mutex_);
  auto b = book();
  if (!b) return b;
  if (auto s = each(b->leave(instance, born, to), &KernelRecord::release_qpn); !s) return s;
  if (auto s = write_book(std::move(*b)); !s) return s;
  return each(born, &KernelRecord::reserve_qpn);
}

Result<std::optional<std::string>> Numbers::away_at(const Instance& instance) const {
  std::lock_guard lock(mutex_);
  const auto k = kept_book();
  if (!k) return k.error();
  return (*k)->book.away_at(instance);
}

Result<std::map<std::uint32_t, std::vector<Instance>>> Numbers::owners() const {
  std::lock_guard lock(mutex_);
  const auto k = kept_book();
  if (!k) return k.error();
  return (*k)->book.owners();
}

Result<std::vector<Instance>> Numbers::owners_of(std::uint32_t vqpn) const {
  std::lock_guard lock(mutex_);
  const auto k = kept_book();
  if (!k) return k.error();
  return (*k)->book.owners_of(vqpn);
}

// Written last: what was not written is released again.
Status Numbers::arrive(const std::vector<Instance>& instances, const Vqpns& vqpns) {
  std::lock_guard lock(mutex_);
  auto b = book();
  if (!b) return b;
  if (auto s = each(b->arrive(instances, vqpns), &KernelRecord::release_qpn); !s) return s;
  return write_book(std::move(*b));
}

Status Numbers::note_guest(const Instance& instance, const std::vector<std::string>& births, pid_t pid) {
  std::lock_guard lock(mutex_);
  auto all = guests();
  if (!all) return all;
  (*all)[hex(instance)] = {{"births", births}, {"pid", pid}, {"life", life_of(pid)}};
  const Status s = write_guests(*all);
  if (!s) unwritten_ = *all;
  return s;
}

bool Numbers::guest_lives(const Instance& instance) const {
  std::lock_guard lock(mutex_);
  const auto all = guests();
  return !all || still_lives(all->value(hex(instance), Json::object()));
}

Result<bool> Numbers::is_guest(pid_t pid) const {
  std::lock_guard lock(mutex_);
  const auto all = guests();
  if (!all) return all.error();
  return std::any_of(all->begin(), all->end(), [&](const Json& g) { return g.value("pid", 0) == pid && still_lives(g); });
}

Status Numbers::release(const std::vector<Instance>& instances) {
  std::lock_guard lock(mutex_);
  auto b = book();
  if (!b) return b;
  for (const auto& i : instances)
    if (auto s = each(b->end(i, true), &KernelRecord::release_qpn); !s) return s;
  return write_book(std::move(*b));
}

// A guest has ended, and `host` knows (empty: nobody has to).
void Numbers::told(const std::string& host, const std::vector<Instance>& instances) {
  std::lock_guard lock(mutex_);
  auto all = guests();
  auto b = book();
  if (!all || !b) return spdlog::error("{}", (all ? b.error() : all.error()).text);
  for (const auto& i : instances) {
    auto left = births_in(*all, hex(i));
    // What is stored on disk has no hosts to be told of its end: it may come again.
    if (!left.empty() && left == std::vector{host})
      if (auto s = each(b->end(i, false), &KernelRecord::release_qpn); !s) spdlog::error("{}", s.error().text);
    std::erase(left, host);
    if (left.empty())
      all->erase(hex(i));
    else
      (*all)[hex(i)]["births"] = left;
  }
  Status s = write_book(std::move(*b));
  if (s) s = write_guests(*all);
  if (!s) spdlog::error("{}", s.error().text);
}

std::vector<Instance> Numbers::tick(const std::function<Status(const std::string&, const std::vector<Instance>&)>& tell, const std::function<bool(const Instance&)>& held) {
  reserve_again();
  std::map<std::string, std::vector<Instance>> gone;  // by birth host
  std::vector<Instance> ended;
  {
    std::lock_guard lock(mutex_);
    const auto kept = guests();
    const std::string why = kept ? "" : kept.error().text;
    if (std::exchange(unread_, why) != why && !kept) spdlog::error("{}: nobody is told which processes have ended", why);
    const Json all = kept ? *kept : Json::object();
    if (unwritten_) (void)write_guests(all);  // note_guest() has said why not
    for (const auto& [who, e] : all.items()) {
      const auto i = instance_of(from_hex(who).value_or(""));
      // A source notes that they leave before it lets go of them: both are looked at under the lock.
      if (!i || still_lives(e) || (held && held(*i))) continue;
      ended.push_back(*i);
      const auto births = births_in(all, who);
      for (const auto& host : births) gone[host].push_back(*i);
      if (births.empty()) gone[""].push_back(*i);
    }
  }
  struct Asked {
    std::string host;
    std::vector<Instance> gone, heard{};
    Status s{};
  };
  std::vector<Asked> hosts;
  for (const auto& [host, instances] : gone) hosts.push_back({host, instances});
  (void)parallel_for(hosts, [&](Asked& a) -> Status {
    // Here they were their own.
    if (!a.host.empty() && a.host != config_.name) a.s = tell(a.host, a.gone);
    if (a.s) a.heard = a.gone;
    // One that is refused holds up no other.
    if (!a.s && a.s.error().code == EPERM && a.gone.size() > 1)
      std::copy_if(a.gone.begin(), a.gone.end(), std::back_inserter(a.heard), [&](const Instance& i) { return bool(tell(a.host, {i})); });
    return {};
  });
  for (const auto& [host, instances, heard, s] : hosts) {
    if (!heard.empty()) told(host, heard);
    std::lock_guard lock(mutex_);
    if (s) {
      said_.erase(host);
      continue;
    }
    // Once: it may be off for days. One that is off is silent in more than one way.
    const auto& e = s.error();
    if (e.code == ECANCELED) continue;  // we end
    const std::string why = e.code == EHOSTUNREACH || e.code == ETIMEDOUT ? "it is silent" : e.text;
    if (std::exchange(said_[host], why) != why) spdlog::warn("numbers of a process that has ended stay reserved on {}: {}; it is told again until it has heard", host, e.text);
  }
  return ended;
}

}  // namespace migr
