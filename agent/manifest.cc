// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "manifest.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "file_tree.h"
#include "hex.h"
#include "runtime.h"
#include "uapi/migr.h"

namespace migr {
namespace {

// As the checksum has always been of it.
using SortedJson = nlohmann::json;
namespace fs = std::filesystem;

constexpr char kRootNames[] = "/images/root-names", kBundle[] = "/bundle";

std::string bytes_from(const std::string& hex) {
  const auto bytes = from_hex(hex);
  if (!bytes) throw std::invalid_argument("no hexadecimal digits: " + hex);
  return *bytes;
}

SortedJson to_json(const ContainerInfo& c) {
  SortedJson j = {{"wire", kWireVersion}, {"abi", MIGR_ABI_VERSION}, {"proc", MIGR_PROC_VERSION}, {"release", kRelease}};
  j.update({{"name", c.id}, {"bundle", c.bundle}, {"devices", c.devices}, {"vqpns", c.vqpns}, {"pids", c.pids}});
  for (const char* list : {"instances", "gids", "earlier", "contexts", "connected", "needs"}) j[list] = SortedJson::array();
  for (const auto& i : c.instances) j["instances"].push_back(hex(i));
  for (const auto& g : c.gids) j["gids"].push_back(to_hex(g.SerializeAsString()));
  for (const auto& [owner, gid] : c.earlier) j["earlier"].push_back({owner, to_hex(gid)});
  for (const auto& [ctx, owner] : c.ctxs) j["contexts"].push_back({ctx, owner});
  for (const auto& q : c.connected)
    j["connected"].push_back({{"context", q.ctx_id}, {"vqpn", q.vqpn}, {"pqpn", q.pqpn}, {"gid", to_hex(q.gid)}, {"to_gid", to_hex(q.dest_gid)}, {"to_pqpn", q.dest_pqpn}});
  for (const auto& n : c.needs) j["needs"].push_back(to_hex(n.SerializeAsString()));
  if (const auto& m = c.bundle_mode) j["bundle_mode"] = {{"mode", m->mode()}, {"uid", m->uid()}, {"gid", m->gid()}};
  j["filled_bytes"] = c.filled_bytes;
  j["instructions"] = c.instructions;
  if (c.huge.filled || !c.huge.needed.empty()) j["huge"] = {{"filled_bytes", c.huge.filled}, {"needed", c.huge.needed}};
  const auto& r = c.resources;
  j["resources"] = {{"ctx", r.ctx()}, {"pd", r.pd()}, {"mr", r.mr()}, {"cq", r.cq()}, {"qp", r.qp()}};
  return j;
}

// Throws what nlohmann::json or the standard library throw: it is not ours.
ContainerInfo from_json(const SortedJson& j) {
  ContainerInfo c;
  c.id = j.at("name");
  c.bundle = j.at("bundle");
  c.devices = j.at("devices").get<std::vector<std::string>>();
  c.vqpns = j.at("vqpns").get<std::vector<std::uint32_t>>();
  c.pids = j.at("pids").get<std::vector<pid_t>>();
  for (const auto& i : j.at("instances")) {
    const auto x = instance_of(bytes_from(i));
    if (!x) throw std::invalid_argument(x.error().text);
    c.instances.push_back(*x);
  }
  for (const auto& g : j.at("gids"))
    if (!c.gids.emplace_back().ParseFromString(bytes_from(g)) || c.gids.back().gid().size() != 16) throw std::invalid_argument("GIDs of a device");
  for (const auto& x : j.at("earlier")) {
    c.earlier.emplace_back(x.at(0).get<std::uint32_t>(), bytes_from(x.at(1)));
    if (c.earlier.back().first >= c.instances.size() || c.earlier.back().second.size() != 16) throw std::invalid_argument("a GID of before");
  }
  for (const auto& x : j.at("contexts")) {
    c.ctxs.emplace_back(x.at(0).get<std::uint32_t>(), x.at(1).get<std::uint32_t>());
    if (c.ctxs.back().second >= c.instances.size()) throw std::invalid_argument("a context without a process");
  }
  for (const auto& q : j.at("connected")) {
    c.connected.push_back({q.at("context"), q.at("vqpn"), q.at("pqpn"), bytes_from(q.at("gid")), bytes_from(q.at("to_gid")), q.at("to_pqpn"), 0});
    if (c.connected.back().gid.size() != 16 || c.connected.back().dest_gid.size() != 16) throw std::invalid_argument("a GID has 16 bytes");
  }
  for (const auto& n : j.at("needs"))
    if (!c.needs.emplace_back().ParseFromString(bytes_from(n))) throw std::invalid_argument("what it needs of a device");
  if (j.contains("bundle_mode")) {
    const auto& m = j.at("bundle_mode");
    c.bundle_mode.emplace().set_mode(m.at("mode"));
    c.bundle_mode->set_uid(m.at("uid"));
    c.bundle_mode->set_gid(m.at("gid"));
  }
  c.filled_bytes = j.at("filled_bytes");
  if (j.contains("instructions")) c.instructions = j.at("instructions").get<std::vector<std::string>>();
  if (j.contains("huge")) {
    c.huge.filled = j.at("huge").at("filled_bytes");
    c.huge.needed = j.at("huge").at("needed").get<std::map<std::uint64_t, std::uint64_t>>();
  }
  const auto& r = j.at("resources");
  c.resources.set_ctx(r.at("ctx"));
  c.resources.set_pd(r.at("pd"));
  c.resources.set_mr(r.at("mr"));
  c.resources.set_cq(r.at("cq"));
  c.resources.set_qp(r.at("qp"));
  return c;
}

// ---- that it is what was stored, whole and unchanged

std::string sum_of(SortedJson manifest) {
  manifest.erase("sum");
  return to_hex(checksum_of(manifest.dump()));
}

Error missing_file(const std::string& path) { return {EINVAL, path + " is missing; the checkpoint is not complete"}; }
Error changed_file(const std::string& path) { return {EINVAL, path + " is not what was stored: damaged, or of another checkpoint"}; }
Error added_file(const std::string& path) { return {EINVAL, path + " does not belong to this checkpoint"}; }

Result<SortedJson> sum_of_file(const std::string& path) {
  std::error_code ec;
  auto sum = checksum_of_file(path);
  if (!sum) return sum.error();
  SortedJson j = {{"bytes", fs::file_size(path, ec)}, {"xxh3", to_hex(*sum)}};
  if (ec) return Error{ec.value(), "reading " + path + ": " + ec.message()};
  return j;
}

// `was`: as sum_of_file() had it.
Status file_is_as_stored(const std::string& path, const SortedJson& was) {
  std::error_code ec;
  const auto size = fs::file_size(path, ec);
  if (ec) return Error{ec.value(), "reading " + path + ": " + ec.message()};
  if (size != was.at("bytes").get<std::uint64_t>())
    return Error{EINVAL, fmt::format("{} is {}: it has {} bytes, {} were stored", path, size < was.at("bytes").get<std::uint64_t>() ? "truncated" : "damaged", size,
                                     was.at("bytes").get<std::uint64_t>())};
  auto sum = checksum_of_file(path);
  if (!sum) return sum.error();
  return to_hex(*sum) == was.at("xxh3").get<std::string>() ? Status() : changed_file(path);
}

Result<SortedJson> sums_of(const std::string& images) {
  SortedJson files = SortedJson::object();
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(images, ec)) {
    if (!f.is_regular_file(ec)) continue;
    auto j = sum_of_file(f.path());
    if (!j) return j.error();
    files[f.path().filename().string()] = std::move(*j);
  }
  if (ec) return Error{ec.value(), "reading " + images + ": " + ec.message()};
  return files;
}

// `files`: as sums_of() had it.
Status is_as_stored(const std::string& images, const SortedJson& files) {
  std::error_code ec;
  for (const auto& [name, was] : files.items()) {
    const std::string path = images + "/" + name;
    if (!fs::is_regular_file(fs::symlink_status(path, ec))) return missing_file(path);
    if (auto s = file_is_as_stored(path, was); !s) return s;
  }
  for (const auto& f : fs::directory_iterator(images, ec))
    if (!files.contains(f.path().filename().string())) return added_file(f.path().string());
  return ec ? Status(Error{ec.value(), "reading " + images + ": " + ec.message()}) : Status();
}

// Of a bundle, by their names in it, which may be of any bytes: files as sum_of_file() has them, links with where they lead to.
Result<SortedJson> sums_below(const std::string& bundle) {
  const auto names = names_below(bundle);
  if (!names) return names.error();
  SortedJson files = SortedJson::object();
  for (const auto& [name, t] : *names) {
    const std::string path = bundle + "/" + name;
    auto j = S_ISREG(t.mode()) ? sum_of_file(path) : Result<SortedJson>(SortedJson::object());
    if (!j) return j.error();
    std::error_code ec;
    if (S_ISLNK(t.mode())) (*j)["link"] = to_hex(fs::read_symlink(path, ec).string());
    if (ec) return Error{ec.value(), "reading " + path + ": " + ec.message()};
    (*j)["type"] = t.mode() & S_IFMT;
    files[to_hex(name)] = std::move(*j);
  }
  return files;
}

// `files`: as sums_below() had it.
Status below_is_as_stored(const std::string& bundle, const SortedJson& files) {
  std::error_code ec;
  if (!fs::is_directory(fs::symlink_status(bundle, ec))) return missing_file(bundle);
  const auto names = names_below(bundle);
  if (!names) return names.error();
  for (const auto& [key, was] : files.items()) {
    const std::string name = bytes_from(key), path = bundle + "/" + name;
    const auto t = names->find(name);
    if (t == names->end()) return missing_file(path);
    const auto type = was.at("type").get<mode_t>();
    if ((t->second.mode() & S_IFMT) != type) return changed_file(path);
    if (S_ISLNK(type) && fs::read_symlink(path, ec).string() != bytes_from(was.at("link"))) return changed_file(path);
    if (auto s = S_ISREG(type) ? file_is_as_stored(path, was) : Status(); !s) return s;
  }
  for (const auto& [name, t] : *names)
    if (!files.contains(to_hex(name))) return added_file(bundle + "/" + name);
  return {};
}

}  // namespace

Status write_manifest(const std::string& dir, const ContainerInfo& info) {
  const std::string path = dir + "/" + kManifest;
  SortedJson j = to_json(info);
  auto files = sums_of(dir + "/images");
  if (!files) return files.error();
  j["files"] = *files;
  if (const std::string bundle = dir + kBundle; fs::exists(bundle)) {
    auto below = sums_below(bundle);
    if (!below) return below.error();
    j["bundle_files"] = *below;
  }
  j["sum"] = sum_of(j);
  std::ofstream out(path);
  out << j.dump(1) << "\n";
  out.close();
  if (!out || chmod(path.c_str(), kFileMode)) return sys_error("writing " + path);
  return {};
}

Status write_root_names(const std::string& dir, const std::map<std::string, wire::TreeName>& names) {
  wire::ChangesChunk all;
  for (const auto& [name, t] : names) *all.add_names() = t;
  return write_whole(dir + kRootNames, all.SerializeAsString());
}

Result<std::map<std::string, wire::TreeName>> read_root_names(const std::string& dir) {
  const std::string path = dir + kRootNames;
  std::ifstream in(path, std::ios::binary);
  if (!in) return sys_error("reading " + path);
  wire::ChangesChunk all;
  if (!all.ParseFromIstream(&in)) return Error{EINVAL, path + " is damaged"};
  std::map<std::string, wire::TreeName> names;
  for (auto& t : *all.mutable_names()) names[t.name()] = std::move(t);
  return names;
}

Result<ContainerInfo> read_manifest(const std::string& dir) {
  const std::string manifest = dir + "/" + kManifest;
  ContainerInfo info;
  std::ifstream in(manifest);
  const SortedJson j = SortedJson::parse(in, nullptr, false);
  const auto of = [&](const char* what) { return j.is_object() && j.contains(what) && j[what].is_number_unsigned() ? j[what].get<std::uint32_t>() : 0; };
  if (!j.is_object()) return Error{EINVAL, manifest + " is damaged"};
  if (of("wire") != kWireVersion || of("abi") != MIGR_ABI_VERSION || of("proc") != MIGR_PROC_VERSION)
    return Error{EINVAL, fmt::format("{} was made by release {} of migr (versions {}, {}, {}), this is {} ({}, {}, {}); restore it with that one", dir,
                                     j.contains("release") && j["release"].is_string() ? j["release"].get<std::string>() : "?", of("wire"), of("abi"), of("proc"), kRelease,
                                     kWireVersion, MIGR_ABI_VERSION, MIGR_PROC_VERSION)};
  if (!j.contains("sum")) return Error{EINVAL, manifest + " is damaged, or of an earlier migr: it has no checksum"};
  if (j["sum"] != sum_of(j)) return Error{EINVAL, manifest + " is damaged: its checksum does not fit"};
  try {
    info = from_json(j);
    if (auto s = is_as_stored(dir + "/images", j.at("files")); !s) return s.error();
    // An older release did not say it.
    if (auto s = j.contains("bundle_files") ? below_is_as_stored(dir + kBundle, j.at("bundle_files")) : Status(); !s) return s.error();
  } catch (const std::exception& e) {
    return Error{EINVAL, manifest + " is damaged: " + e.what()};
  }
  if (!Runtime::name_ok(info.id) || info.bundle.empty() == !bare_pid(info.id)) return Error{EINVAL, manifest + " is damaged: name or bundle"};
  return info;
}

}  // namespace migr
