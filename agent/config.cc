// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "config.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "fault.h"
#include "json.h"
#include "limits.h"

namespace migr {

namespace {

struct Limit {
  int* ms;
  int usual;
};

const std::map<std::string, Limit>& all_limits() {
  static const std::map<std::string, Limit> limits = {
#define X(id, name, ms) {name, {&id, ms}},
      MIGR_LIMITS(X)
#undef X
  };
  return limits;
}

Status read_limit(const std::string& name, const Json& value, Config& out) {
  if (!all_limits().contains(name)) return Error{EINVAL, "unknown limit \"" + name + "\""};
  constexpr int kMostMs = 24 * 3600 * 1000;
  if (!value.is_number_integer() || value < 1 || value > kMostMs)
    return Error{EINVAL, "limit \"" + name + "\" has to be 1.." + std::to_string(kMostMs) + " ms"};
  out.limits[name] = value;
  return {};
}

// A migrd whose coordinator waits as long as it may would take it for one that does not get on, and end. These it waits for.
Status limits_fit(const Config& c) {
  constexpr const char* kWaitedFor[] = {"prepare_ms", "upload_ms",  "ready_ms",   "drain_ms",  "runc_ms",      "hook_ms",  "checkpoint_ms", "compare_ms",
                                        "suspend_ms", "process_ms", "commit_ms", "undecided_ms", "check_ms", "abort_ms", "reconnect_ms"};
  const auto ms_of = [&](const std::string& name) {
    const auto l = c.limits.find(name);
    return std::int64_t{l == c.limits.end() ? all_limits().at(name).usual : l->second};
  };
  const auto phase_ms = ms_of("phase_ms");
  const auto fits = [&](const std::string& names, std::int64_t ms) -> Status {
    return ms < phase_ms ? Status() : Error{EINVAL, "limit \"phase_ms\" (" + std::to_string(phase_ms) + ") has to be more than \"" + names + "\" (" + std::to_string(ms) + ")"};
  };
  for (const auto* name : kWaitedFor)
    if (auto s = fits(name, ms_of(name)); !s) return s;
  // One that does not end is ended, with what is left of it: Runc::checkpoint().
  if (auto s = fits("checkpoint_ms\" and three times \"hook_ms", ms_of("checkpoint_ms") + 3 * ms_of("hook_ms")); !s) return s;
  if (ms_of("commit_ms") >= kPluginCommitMs) return Error{EINVAL, "limit \"commit_ms\" has to be less than the " + std::to_string(kPluginCommitMs) + " for which CRIU's plugin waits"};
  return {};
}

constexpr std::pair<Right, const char*> kRights[] = {
    {Right::kRead, "read"}, {Right::kPartner, "partner"}, {Right::kToHere, "to_here"}, {Right::kFromHere, "from_here"}};

bool strings_in(const Json& j) {
  return j.is_array() && std::all_of(j.begin(), j.end(), [](const auto& s) { return s.is_string(); });
}

// "PEER", or {"peer": "PEER", "containers": ["NAME", ..]}
Result<AllowRule> read_rule(const Json& j, Right right) {
  if (j.is_string()) return AllowRule{j, {}};
  const bool of_containers = right == Right::kToHere || right == Right::kFromHere;
  if (of_containers && j.is_object() && j.size() == 2 && j.contains("peer") && j["peer"].is_string() && j.contains("containers") &&
      strings_in(j["containers"]) && !j["containers"].empty())
    return AllowRule{j["peer"], j["containers"]};
  return Error{EINVAL, "each of \"" + std::string(key_of(right)) + "\" in \"allow\" has to be the name of a peer" +
                           (of_containers ? ", or {\"peer\": .., \"containers\": [..]}" : "")};
}

// {"to_here": [RULE, ..], ..}
Status read_allow(const Json& j, Hosts& out) {
  if (!j.is_object()) return Error{EINVAL, "\"allow\" has to be an object"};
  for (const auto& [key, rules] : j.items()) {
    const auto r = std::find_if(std::begin(kRights), std::end(kRights), [&key = key](const auto& k) { return key == k.second; });
    if (r == std::end(kRights)) return Error{EINVAL, "unknown key \"" + key + "\" in \"allow\""};
    if (!rules.is_array()) return Error{EINVAL, "\"" + key + "\" in \"allow\" has to be an array"};
    auto& all = out.allow[r->first];
    for (const auto& rule : rules) {
      auto one = read_rule(rule, r->first);
      if (!one) return one.error();
      all.push_back(std::move(*one));
    }
  }
  return {};
}

const Peer* find_peer(const Hosts& hosts, const std::string& name) {
  const auto p = std::find_if(hosts.peers.begin(), hosts.peers.end(), [&](const Peer& one) { return one.name == name; });
  return p == hosts.peers.end() ? nullptr : &*p;
}

// A name that is written wrongly would allow nothing, and nobody would know why.
Status names_peers(const std::string& this_host, const Hosts& hosts) {
  for (const auto& [right, rules] : hosts.allow)
    for (const auto& r : rules)
      if (r.peer.find_first_of("*?[") == r.peer.npos && r.peer != this_host && !find_peer(hosts, r.peer))
        return Error{EINVAL, "'" + r.peer + "' in \"allow\", \"" + key_of(right) + "\" is none of the \"peers\""};
  return {};
}

// HOST:PORT, and nothing that gRPC would make one of by itself.
bool host_and_port(const std::string& a) {
  constexpr std::size_t kDigits = 5;
  constexpr int kMostPort = 65535;
  const auto colon = a.rfind(':');
  if (colon == a.npos) return false;
  const std::string host = a.substr(0, colon), port = a.substr(colon + 1);
  if (host.empty() || (host.find(':') != host.npos && (host.front() != '[' || host.back() != ']'))) return false;
  if (port.empty() || port.size() > kDigits || port.find_first_not_of("0123456789") != port.npos) return false;
  const int n = std::stoi(port);
  return n > 0 && n <= kMostPort;
}

Error no_address(const std::string& of, const std::string& a) {
  return {EINVAL, of + " has to be host:port (an IPv6 address in brackets), not \"" + a + "\""};
}

// {"name": .., "address": "host:port"}
Status read_peer(const Json& j, Hosts& out) {
  if (!j.is_object() || !j.contains("name") || !j["name"].is_string() || !j.contains("address") || !j["address"].is_string())
    return Error{EINVAL, "each of \"peers\" has to be {\"name\": .., \"address\": \"host:port\"}"};
  for (const auto& [key, value] : j.items())
    if (key != "name" && key != "address") return Error{EINVAL, "unknown key \"" + key + "\" in \"peers\""};
  Peer p{j["name"], j["address"]};
  if (!host_and_port(p.address)) return no_address("\"address\" of '" + p.name + "' in \"peers\"", p.address);
  if (find_peer(out, p.name)) return Error{EINVAL, "two of \"peers\" are '" + p.name + "'"};
  out.peers.push_back(std::move(p));
  return {};
}

// {"redis": ADDRESS, "prefix": .., "password_file": ..}
Status read_directory(const Json& j, RedisConfig& out) {
  if (!j.is_object() || !j.contains("redis")) return Error{EINVAL, "\"directory\" has to be {\"redis\": \"host:port\" or \"/path/of/its/socket\"}"};
  const std::map<std::string, std::string*> strings = {
      {"redis", &out.address}, {"prefix", &out.prefix}, {"password_file", &out.password_file}};
  for (const auto& [key, value] : j.items()) {
    const auto s = strings.find(key);
    if (s == strings.end()) return Error{EINVAL, "unknown key \"" + key + "\" in \"directory\""};
    if (!value.is_string()) return Error{EINVAL, "\"" + key + "\" in \"directory\" has to be a string"};
    *s->second = value.get<std::string>();
  }
  const std::string& a = out.address;
  if (!a.starts_with('/') && !host_and_port(a)) return Error{EINVAL, "\"redis\" has to be host:port or the path of a socket, not \"" + a + "\""};
  return {};
}

}  // namespace

const char* key_of(Right right) {
  const auto r = std::find_if(std::begin(kRights), std::end(kRights), [&](const auto& k) { return k.first == right; });
  return r == std::end(kRights) ? "" : r->second;
}

std::optional<Peer> Config::peer(const std::string& wanted) const {
  const auto known = hosts.now();
  const Peer* p = find_peer(*known, wanted);
  return p ? std::optional(*p) : std::nullopt;
}

void take_limits(const Config& config) {
  for (const auto& [name, limit] : all_limits()) {
    const auto l = config.limits.find(name);
    *limit.ms = l == config.limits.end() ? limit.usual : l->second;
  }
}

Result<Config> load_config(const std::string& path) {
  std::ifstream in(path);
  if (!in) return sys_error("cannot read " + path);
  Json j;
  std::vector<std::set<std::string>> said;  // keys of the objects that are being read
  std::string twice;
  const auto look = [&](int, Json::parse_event_t what, const Json& read) {
    using Event = Json::parse_event_t;
    if (what == Event::object_start) said.emplace_back();
    if (what == Event::object_end) said.pop_back();
    if (what == Event::key && !said.back().insert(read).second) twice = read;
    return true;
  };
  try {
    j = Json::parse(in, look, true, true);
  } catch (const Json::parse_error& e) {
    const std::string why = e.what();  // "[json.exception.parse_error.101] parse error at line 3, column 5: .."
    const auto at = why.find("] ");
    return Error{EINVAL, path + ": " + (at == why.npos ? why : why.substr(at + 2))};
  }
  if (!j.is_object()) return Error{EINVAL, path + " is not a JSON object"};
  if (!twice.empty()) return Error{EINVAL, path + ": the key \"" + twice + "\" is there twice"};
  Config c;
  Hosts hosts;
  const std::map<std::string, std::string*> strings = {
      {"name", &c.name},           {"listen", &c.listen},
      {"pki", &c.pki},             {"state_dir", &c.state_dir},
      {"run_dir", &c.run_dir},     {"control_socket", &c.control_socket},
      {"runc", &c.runc},           {"runc_root", &c.runc_root},
      {"criu", &c.criu},           {"criu_libs", &c.criu_libs}, {"net_hook", &c.net_hook}, {"metrics", &c.metrics},
      {"processor", &c.processor}, {"libmigr", &c.libmigr},     {"links_file", &c.links_file}};
  for (const auto& [key, value] : j.items()) {
    if (key != "peers" && key != "allow") c.fixed[key] = value.dump();
    if (auto s = strings.find(key); s != strings.end()) {
      if (!value.is_string()) return Error{EINVAL, path + ": \"" + key + "\" has to be a string"};
      *s->second = value.get<std::string>();
    } else if (key == "peers") {
      if (!value.is_array()) return Error{EINVAL, path + ": \"peers\" has to be an array"};
      for (const auto& one : value)
        if (auto p = read_peer(one, hosts); !p) return Error{EINVAL, path + ": " + p.error().text};
    } else if (key == "allow") {
      if (auto a = read_allow(value, hosts); !a) return Error{EINVAL, path + ": " + a.error().text};
    } else if (key == "directory") {
      if (auto d = read_directory(value, c.redis); !d) return Error{EINVAL, path + ": " + d.error().text};
    } else if (key == "criu_log_level") {
      if (!value.is_number_integer() || value < 1 || value > 4) return Error{EINVAL, path + ": \"criu_log_level\" has to be a number from 1, errors, to 4, everything"};
      c.criu_log_level = value.get<int>();
    } else if (key == "limits") {
      if (!value.is_object()) return Error{EINVAL, path + ": \"limits\" has to be an object"};
      for (const auto& [name, ms] : value.items())
        if (auto l = read_limit(name, ms, c); !l) return Error{EINVAL, path + ": " + l.error().text};
    } else {
      return Error{EINVAL, path + ": unknown key \"" + key + "\""};
    }
  }
  if (c.name.empty()) return Error{EINVAL, path + ": \"name\" of this host is missing"};
  if (!host_and_port(c.listen)) return no_address(path + ": \"listen\"", c.listen);
  for (const char* key : {"state_dir", "run_dir", "control_socket"})
    if (const auto& p = *strings.at(key); !p.starts_with('/')) return Error{EINVAL, path + ": \"" + key + "\" has to be an absolute path, not \"" + p + "\""};
  if (c.processor != "same" && c.processor != "any") return Error{EINVAL, path + ": \"processor\" has to be \"same\" or \"any\", not \"" + c.processor + "\""};
  if (auto s = limits_fit(c); !s) return Error{EINVAL, path + ": " + s.error().text};
  if (auto s = names_peers(c.name, hosts); !s) return Error{EINVAL, path + ": " + s.error().text};
  if (const char* f = std::getenv("MIGR_FAULT")) c.fault = f;
  if (auto s = check_faults(c.fault); !s) return s.error();
  c.hosts = std::move(hosts);
  return c;
}

}  // namespace migr
