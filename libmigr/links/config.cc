/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "config.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "../../include/migr/links_wire.h"
#include "../environment.h"
#include "../quiet_thread.h"

#define JSON_NOEXCEPTION 1  // every type is looked at before it is used
#include <nlohmann/json.hpp>

namespace migr::links {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = 1u << 20;

constexpr Policy kPolicies[] = {Policy::kOff, Policy::kResend, Policy::kExact};
constexpr Paths kPaths[] = {Paths::kCached, Paths::kRebuild, Paths::kPool};
constexpr Atomics kAtomics[] = {Atomics::kDirect, Atomics::kRelayed};

template <class Word, std::size_t n>
std::string read_word(const std::string& text, const std::string& where, const Word (&all)[n], std::optional<Word>& out) {
  std::string there;
  for (const Word word : all) {
    const std::string one = std::string("\"") + name(word) + "\"";
    if (text == one) return out = word, "";
    there += (there.empty() ? "" : ", ") + one;
  }
  return where + " is " + text + "; there are " + there;
}

std::string unknown_key(const json& object, std::initializer_list<const char*> known, const std::string& where) {
  for (const auto& [key, ignored] : object.items()) {
    bool ok = false;
    for (const char* k : known) ok = ok || key == k;
    if (!ok) return where + "\"" + key + "\" is not known";
  }
  return "";
}

std::string read_number(const json& from, const char* key, unsigned low, unsigned high, unsigned& out) {
  const auto found = from.find(key);
  if (found == from.end()) return "";
  if (!found->is_number_unsigned() || found->get<std::uint64_t>() < low || found->get<std::uint64_t>() > high)
    return std::string("\"") + key + "\" is " + found->dump() + ", not a number from " + std::to_string(low) + " to " +
           std::to_string(high);
  out = found->get<unsigned>();
  return "";
}

/// What can be said of a device or a program, where it is there.
std::string read_setting(const json& from, const std::string& where, Config::Setting& out) {
  std::string why;
  if (const auto found = from.find("policy"); found != from.end()) why = read_word(found->dump(), where + "\"policy\"", kPolicies, out.policy);
  if (const auto found = from.find("paths"); why.empty() && found != from.end()) why = read_word(found->dump(), where + "\"paths\"", kPaths, out.paths);
  if (const auto found = from.find("atomics"); why.empty() && found != from.end()) why = read_word(found->dump(), where + "\"atomics\"", kAtomics, out.atomics);
  if (!why.empty() || !from.contains("backups")) return why;
  why = read_number(from, "backups", 1, kMaxBackups, out.backups.emplace());
  return why.empty() ? "" : where + why;
}

/// Of each a policy, or an object of settings.
std::string read_settings(const json& from, const char* key, std::map<std::string, Config::Setting>& out) {
  const auto found = from.find(key);
  if (found == from.end()) return "";
  if (!found->is_object()) return std::string("\"") + key + "\" is no object of names and policies";
  for (const auto& [who, what] : found->items()) {
    const std::string where = std::string("\"") + key + "\": \"" + who + "\"";
    std::string why;
    if (!what.is_object()) why = read_word(what.dump(), where, kPolicies, out[who].policy);
    else if (why = unknown_key(what, {"policy", "paths", "atomics", "backups"}, where + ": "); why.empty()) why = read_setting(what, where + ": ", out[who]);
    if (!why.empty()) return why;
  }
  return "";
}

/// true, false or the names of programs.
std::string read_programs(const json& from, const char* key, const std::string& process, bool& out) {
  const auto found = from.find(key);
  if (found == from.end()) return "";
  if (found->is_boolean()) return out = found->get<bool>(), "";
  if (!found->is_array()) return std::string("\"") + key + "\" is " + found->dump() + ", neither true nor a list of programs";
  for (const json& program : *found) {
    if (!program.is_string()) return std::string("\"") + key + "\": " + program.dump() + " is no program's name";
    out = out || program.get<std::string>() == process;
  }
  return "";
}

std::string read_link(const json& from, std::size_t n, Config::Link& out) {
  const std::string where = "link " + std::to_string(n) + ": ";
  if (!from.is_object()) return where + "no object";
  if (std::string why = unknown_key(from, {"device", "port", "gid_index"}, where); !why.empty()) return why;
  const auto device = from.find("device");
  if (device == from.end() || !device->is_string() || device->get<std::string>().empty())
    return where + "\"device\" is missing, the name of an RDMA device (`rdma link`)";
  out.device = device->get<std::string>();
  unsigned index = 0;
  std::string why = read_number(from, "port", 1, 255, out.port);
  if (why.empty()) why = read_number(from, "gid_index", 0, 255, index);
  if (from.contains("gid_index")) out.gid_index = static_cast<int>(index);
  return why.empty() ? "" : where + why;
}

/// Where a text ceases to be JSON, and why. What is thrown where exceptions are is handed to it.
struct Mistake final : nlohmann::json_sax<json> {
  std::string what;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& e) override {
    what = e.what();  // "[json.exception.parse_error.101] parse error at line 3, column 5: .."
    if (const auto at = what.find("] "); at != what.npos) what.erase(0, at + 2);
    return false;
  }
};

std::string own_name() { return program_invocation_short_name ? program_invocation_short_name : ""; }

bool read_file(const char* path, std::string& out) {
  FILE* file = std::fopen(path, "re");
  if (!file) return false;
  char part[4096];
  std::size_t n;
  while ((n = std::fread(part, 1, sizeof part, file)) > 0 && out.size() < kMaxBytes) out.append(part, n);
  const bool ok = !std::ferror(file);
  std::fclose(file);
  return ok;
}

}  // namespace

const char* name(Policy policy) {
  constexpr const char* kNames[] = {"off", "resend", "exact"};
  return kNames[static_cast<int>(policy)];
}

const char* name(Paths paths) {
  constexpr const char* kNames[] = {"cached", "rebuild", "pool"};
  return kNames[static_cast<int>(paths)];
}

const char* name(Atomics atomics) {
  constexpr const char* kNames[] = {"direct", "relayed"};
  return kNames[static_cast<int>(atomics)];
}

Policy Config::policy_of(const std::string& device) const {
  const auto found = devices.find(device);
  return found == devices.end() ? policy : found->second.policy.value_or(policy);
}

Paths Config::paths_of(const std::string& device) const {
  const auto found = devices.find(device);
  return found == devices.end() ? paths : found->second.paths.value_or(paths);
}

Atomics Config::atomics_of(const std::string& device) const {
  const auto found = devices.find(device);
  return found == devices.end() ? atomics : found->second.atomics.value_or(atomics);
}

unsigned Config::backups_of(const std::string& device) const {
  const auto found = devices.find(device);
  return found == devices.end() ? backups : found->second.backups.value_or(backups);
}

void Config::set(const Setting& mine) {
  policy = mine.policy.value_or(policy);
  paths = mine.paths.value_or(paths);
  atomics = mine.atomics.value_or(atomics);
  backups = mine.backups.value_or(backups);
  for (auto& [ignored, device] : devices) {
    if (mine.policy) device.policy.reset();
    if (mine.paths) device.paths.reset();
    if (mine.atomics) device.atomics.reset();
    if (mine.backups) device.backups.reset();
  }
}

bool Config::any_policy() const {
  for (const Link& link : links)
    if (policy_of(link.device) != Policy::kOff) return true;
  return false;
}

std::string parse(const std::string& text, const std::string& process, Config& out) {
  const json all = json::parse(text, nullptr, false, true);
  if (all.is_discarded()) {
    Mistake mistake;
    json::sax_parse(text, &mistake, nlohmann::detail::input_format_t::json, true, true);
    return mistake.what;
  }
  if (!all.is_object()) return "it is no JSON object";
  std::string why = unknown_key(all, {"links", "policy", "paths", "atomics", "backups", "devices", "processes", "unique_swap", "pool", "heartbeat_ms", "heartbeat_misses", "switch_limit_ms", "return_ms", "adrift_limit_ms"}, "");
  const auto links = all.find("links");
  if (why.empty() && (links == all.end() || !links->is_array() || links->size() > kMaxLinks))
    why = "\"links\" has to be a list of at most " + std::to_string(kMaxLinks) + " links";
  if (!why.empty()) return why;
  for (const json& link : *links) {
    Config::Link one;
    why = read_link(link, out.links.size(), one);
    for (const Config::Link& other : out.links)
      if (why.empty() && other.device == one.device && other.port == one.port)
        why = one.device + " port " + std::to_string(one.port) + " is named twice";
    if (!why.empty()) return why;
    out.links.push_back(one);
  }
  Config::Setting everywhere;
  why = read_setting(all, "", everywhere);
  out.set(everywhere);
  if (why.empty()) why = read_settings(all, "devices", out.devices);
  if (why.empty()) why = read_settings(all, "processes", out.processes);
  if (why.empty()) why = read_programs(all, "unique_swap", process, out.unique_swap);
  if (why.empty()) why = read_number(all, "pool", 1, 1024, out.pool);
  if (why.empty()) why = read_number(all, "heartbeat_ms", 0, 60'000, out.heartbeat_ms);
  if (why.empty()) why = read_number(all, "heartbeat_misses", 1, 100, out.heartbeat_misses);
  if (why.empty()) why = read_number(all, "switch_limit_ms", 100, 600'000, out.switch_limit_ms);
  if (why.empty()) why = read_number(all, "adrift_limit_ms", 100, 600'000, out.adrift_limit_ms);
  if (why.empty()) why = read_number(all, "return_ms", 0, 3'600'000, out.return_ms);
  if (!why.empty()) return why;
  if (const auto mine = out.processes.find(process); mine != out.processes.end()) out.set(mine->second);
  return "";
}

namespace {

/// @return 0 or a positive errno; ENOENT: the host has none, or no migrd answers
int ask_migrd(std::string& text) {
  constexpr timeval kLimit{1, 0};
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::snprintf(at.sun_path, sizeof at.sun_path, "%s", environment::links_socket());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  for (const int direction : {SO_SNDTIMEO, SO_RCVTIMEO}) setsockopt(fd, SOL_SOCKET, direction, &kLimit, sizeof kLimit);
  migr_links_msg head{};
  head.version = MIGR_LINKS_VERSION;
  head.type = MIGR_LINKS_CONFIG;
  head.seq = 1;
  std::vector<char> packet(MIGR_LINKS_PACKET_BYTES);
  ssize_t n = -1;
  {
    const WithoutSignals uninterrupted;  // what has a time limit is not begun again after a signal
    if (!connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) && send(fd, &head, sizeof head, MSG_NOSIGNAL) == sizeof head)
      n = recv(fd, packet.data(), packet.size(), 0);
  }
  close(fd);
  if (n < static_cast<ssize_t>(sizeof head)) return ENOENT;
  std::memcpy(&head, packet.data(), sizeof head);
  if (head.type != (MIGR_LINKS_CONFIG | MIGR_LINKS_REPLY) || head.count != static_cast<std::size_t>(n) - sizeof head) return EPROTO;
  if (head.status) return head.status == EACCES ? ENOENT : head.status;  // the former: an older one, that wants HELLO first
  text.assign(packet.data() + sizeof head, head.count);
  return text.empty() ? ENOENT : 0;
}

}  // namespace

Config read_config() {
  const char* const named = environment::links_file();
  const bool own = named;
  const char* const path = own ? named : kDefaultFile;
  const char* const forced = std::getenv("MIGR_POLICY");
  Config config;
  std::string text, why;
  errno = 0;
  int err = read_file(path, text) ? 0 : errno;
  if (!own && (err == ENOENT || err == EACCES))
    if (const int asked = ask_migrd(text); asked != ENOENT) err = asked;
  if (err == ENOENT && !own && !forced) return {};
  why = err ? std::strerror(err) : parse(text, own_name(), config);
  if (why.empty() && forced && *forced) {
    Config::Setting mine;
    why = read_word(std::string("\"") + forced + "\"", "MIGR_POLICY", kPolicies, mine.policy);
    config.set(mine);
  }
  if (why.empty()) return config;
  std::fprintf(stderr, "libmigr: %s: %s; no link is backed up in this process%s\n", path, why.c_str(), own ? "" : "; `migrctl doctor` checks that file");
  return {};
}

}  // namespace migr::links
