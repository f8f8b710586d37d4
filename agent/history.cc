// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "history.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "file_tree.h"
#include "log.h"
#include "text.h"

namespace migr {
namespace {

// null: not known, or written by an older migrd
bool is_traffic(const Json& t) {
  if (t.is_null()) return true;
  if (!t.is_object()) return false;
  const auto column = [&](const char* key) {
    return t.contains(key) && t[key].is_array() && t[key].size() == t["at_ms"].size() && std::all_of(t[key].begin(), t[key].end(), [](const Json& x) { return x.is_number(); });
  };
  return column("at_ms") && column("rx_mbps") && column("tx_mbps");
}

bool is_words(const Json& list) {
  return list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& x) { return x.is_string(); });
}

// What is read of one, here and by report.cc.
bool is_summary(const Json& j) {
  if (!j.is_object()) return false;
  const auto all = [&](std::initializer_list<const char*> keys, auto is) {
    return std::all_of(keys.begin(), keys.end(), [&](const char* k) { return j.contains(k) && is(j[k]); });
  };
  const auto each = [&](const char* list, std::initializer_list<const char*> numbers, const char* name) {
    return std::all_of(j[list].begin(), j[list].end(), [&](const Json& e) {
      return e.is_object() && e.contains(name) && e[name].is_string() &&
             std::all_of(numbers.begin(), numbers.end(), [&](const char* k) { return e.contains(k) && e[k].is_number(); });
    });
  };
  return all({"container", "from", "to"}, [](const Json& x) { return x.is_string(); }) && all({"migrated", "undecided"}, [](const Json& x) { return x.is_boolean(); }) &&
         all({"migration", "begun_ms"}, [](const Json& x) { return x.is_number_integer(); }) &&
         all({"service_blackout_ms", "communication_blackout_ms", "bytes_copied"}, [](const Json& x) { return x.is_number(); }) &&
         all({"rollback_reason"}, [](const Json& x) { return x.is_null() || x.is_string(); }) && is_words(j.value("rolled_back", Json::array())) &&
         all({"timeline", "partner_figures"}, [](const Json& x) { return x.is_array(); }) && each("timeline", {"start_ms", "ms"}, "name") &&
         each("partner_figures", {"blackout_ms", "suspended_ms", "replayed_sends", "replayed_recvs"}, "host") &&
         std::all_of(j["partner_figures"].begin(), j["partner_figures"].end(), [](const Json& f) { return is_traffic(f.value("traffic", Json())); });
}

}  // namespace

History::History(const std::string& state_dir, std::size_t most) : file_(state_dir + "/history.jsonl"), most_(most) {}

Result<History::Past> History::read() const {
  Past past;
  std::ifstream in(file_);
  if (!in) return errno == ENOENT ? Result(past) : sys_error("cannot read " + file_);
  std::size_t n = 0;
  for (std::string line; std::getline(in, line);) {
    n++;
    Json j = Json::parse(line, nullptr, false);
    if (is_summary(j)) {
      j["id"] = migration_name(j);  // an older migrd did not write it
      past.entries.push_back(std::move(j));
    } else {
      past.warnings.push_back(file_ + " line " + std::to_string(n) + " is no summary of a migration; it is passed over");
    }
  }
  return past;
}

Status History::add(const Json& summary) { return put(summary, false); }
Status History::settle(const Json& summary) { return put(summary, true); }

Status History::put(const Json& summary, bool settled) {
  std::lock_guard lock(mutex_);
  auto past = read();
  if (!past) return past.error();
  for (const auto& w : past->warnings) spdlog::warn("{}", w);
  auto& all = past->entries;
  const auto known = std::find_if(all.begin(), all.end(), [&](const Json& s) { return s["migration"] == summary["migration"]; });
  if (known == all.end()) {
    all.push_back(summary);
  } else {
    const Json end = settled ? summary : *known;
    if (!settled) *known = summary;
    if ((*known)["undecided"].get<bool>() || (*known)["migrated"] != end["migrated"])
      for (const char* key : {"migrated", "undecided", "rollback_reason"}) (*known)[key] = end[key];
  }
  if (all.size() > most_) all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(most_));
  std::string text;
  for (const auto& j : all) text += j.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  return write_whole(file_, text);
}

std::string outcome_of(const Json& s) { return s["migrated"].get<bool>() ? "moved" : s["undecided"].get<bool>() ? "undecided" : "went back"; }

std::optional<Json> find_migration(const std::vector<Json>& entries, std::uint32_t id) {
  const auto e = std::find_if(entries.rbegin(), entries.rend(), [&](const Json& s) { return s["migration"].get<std::uint32_t>() == id; });
  return e == entries.rend() ? std::nullopt : std::optional(*e);
}

std::optional<Json> last_move(const std::vector<Json>& entries, const std::string& container) {
  const auto e = std::find_if(entries.rbegin(), entries.rend(), [&](const Json& s) { return s["migrated"].get<bool>() && s["container"] == container && s["to"] != s["from"]; });
  return e == entries.rend() ? std::nullopt : std::optional(*e);
}

std::string migration_name(const Json& s) { return migration_text(s["migration"].get<std::uint32_t>()); }

std::optional<ExpectedStop> expected_stop(const std::vector<Json>& entries, const std::string& container) {
  std::vector<double> its, any;
  for (const auto& s : entries) {
    const auto name = [&](const char* key) { return s[key].get<std::string>(); };
    // One side of checkpoint and restore is a folder. No stop is known of what migrd has finished by itself.
    if (!s["migrated"].get<bool>() || s["service_blackout_ms"] <= 0 || name("to").starts_with('/') || name("to") == name("from")) continue;
    any.push_back(s["service_blackout_ms"]);
    if (name("container") == container) its.push_back(any.back());
  }
  auto& ms = its.empty() ? any : its;
  if (ms.empty()) return std::nullopt;
  std::sort(ms.begin(), ms.end());
  const std::size_t n = ms.size();
  return ExpectedStop{(ms[(n - 1) / 2] + ms[n / 2]) / 2, ms.front(), ms.back(), n, !its.empty()};
}

Json expected_json(const ExpectedStop& s) {
  return {{"median", s.median_ms}, {"least", s.least_ms}, {"most", s.most_ms}, {"moves", s.moves}, {"same_container", s.same}, {"estimated", s.estimated}};
}

std::string expected_text(const ExpectedStop& s) {
  if (s.estimated)
    return fmt::format("expected stop: about {:.0f} ms, between {:.0f} and {:.0f}: an estimate by memory, QPs and link, as nothing like it was moved from this host yet", s.median_ms, s.least_ms, s.most_ms);
  return fmt::format("expected stop: {:.0f} ms ({:.0f} to {:.0f} in {} move{} of {})", s.median_ms, s.least_ms, s.most_ms, s.moves, s.moves == 1 ? "" : "s", s.same ? "it" : "other things");
}

std::string history_text(const std::vector<Json>& entries) {
  if (entries.empty()) return "nothing was migrated from this host yet\n";
  constexpr std::size_t kWhat = 14, kWhere = 18;  // columns
  const std::string below(9, ' ');
  std::string out = fmt::format("{:8} {:19} {:{}} {:{}} {:9} {:>7}\n", "ID", "WHEN", "WHAT", kWhat, "FROM -> TO", kWhere, "OUTCOME", "STOP ms");
  for (const auto& s : entries) {
    const auto what = s["container"].get<std::string>(), where = s["from"].get<std::string>() + " -> " + s["to"].get<std::string>();
    out += fmt::format("{:8} {:19} {:{}} {:{}} {:9} {:>7.0f}\n", migration_name(s), local_time(s["begun_ms"].get<std::int64_t>() / 1000), cut(what, kWhat), kWhat, cut(where, kWhere), kWhere,
                       outcome_of(s), s["service_blackout_ms"].get<double>());
    if (what.size() > kWhat || where.size() > kWhere) out += wrapped(below + what + ": " + where, below.size());
    if (s["rollback_reason"].is_string()) out += wrapped(below + s["rollback_reason"].get<std::string>(), below.size());
  }
  return out;
}

}  // namespace migr
