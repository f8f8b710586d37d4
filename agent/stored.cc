// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "stored.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "file_tree.h"
#include "hex.h"
#include "migr/restore.h"
#include "room.h"
#include "uapi/migr.h"

namespace migr {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kManifest[] = "checkpoint.json";
constexpr mode_t kFileMode = 0600, kDirMode = 0700, kOthers = 0077;

std::string bytes_of(const std::string& hex) {
  const auto bytes = from_hex(hex);
  if (!bytes) throw std::invalid_argument("no hexadecimal digits: " + hex);
  return *bytes;
}

Json to_json(const ContainerInfo& c) {
  Json j = {{"wire", kWireVersion}, {"abi", MIGR_ABI_VERSION}, {"proc", MIGR_PROC_VERSION}, {"release", kRelease},
            {"name", c.id}, {"bundle", c.bundle}, {"devices", c.devices}, {"vqpns", c.vqpns}, {"pids", c.pids},
            {"instances", Json::array()}, {"gids", Json::array()}, {"earlier", Json::array()}, {"contexts", Json::array()}, {"connected", Json::array()}, {"needs", Json::array()}};
  for (const auto& i : c.instances) j["instances"].push_back(hex(i));
  for (const auto& g : c.gids) j["gids"].push_back(to_hex(g.SerializeAsString()));
  for (const auto& [owner, gid] : c.earlier) j["earlier"].push_back({owner, to_hex(gid)});
  for (const auto& [ctx, owner] : c.ctxs) j["contexts"].push_back({ctx, owner});
  for (const auto& q : c.connected)
    j["connected"].push_back({{"context", q.ctx_id}, {"vqpn", q.vqpn}, {"pqpn", q.pqpn}, {"gid", to_hex(q.gid)},
                              {"to_gid", to_hex(q.dest_gid)}, {"to_pqpn", q.dest_pqpn}});
  for (const auto& n : c.needs) j["needs"].push_back(to_hex(n.SerializeAsString()));
  j["filled_bytes"] = c.filled_bytes;
  const auto& r = c.resources;
  j["resources"] = {{"ctx", r.ctx()}, {"pd", r.pd()}, {"mr", r.mr()}, {"cq", r.cq()}, {"qp", r.qp()}};
  return j;
}

// Throws what nlohmann::json or the standard library throw: it is not ours.
ContainerInfo from_json(const Json& j) {
  ContainerInfo c;
  c.id = j.at("name");
  c.bundle = j.at("bundle");
  c.devices = j.at("devices").get<std::vector<std::string>>();
  c.vqpns = j.at("vqpns").get<std::vector<std::uint32_t>>();
  c.pids = j.at("pids").get<std::vector<pid_t>>();
  for (const auto& i : j.at("instances")) {
    const auto x = instance_of(bytes_of(i));
    if (!x) throw std::invalid_argument(x.error().text);
    c.instances.push_back(*x);
  }
  for (const auto& g : j.at("gids"))
    if (!c.gids.emplace_back().ParseFromString(bytes_of(g)) || c.gids.back().gid().size() != 16) throw std::invalid_argument("GIDs of a device");
  for (const auto& x : j.at("earlier")) {
    c.earlier.emplace_back(x.at(0).get<std::uint32_t>(), bytes_of(x.at(1)));
    if (c.earlier.back().first >= c.instances.size() || c.earlier.back().second.size() != 16) throw std::invalid_argument("a GID of before");
  }
  for (const auto& x : j.at("contexts")) {
    c.ctxs.emplace_back(x.at(0).get<std::uint32_t>(), x.at(1).get<std::uint32_t>());
    if (c.ctxs.back().second >= c.instances.size()) throw std::invalid_argument("a context without a process");
  }
  for (const auto& q : j.at("connected")) {
    c.connected.push_back({q.at("context"), q.at("vqpn"), q.at("pqpn"), bytes_of(q.at("gid")), bytes_of(q.at("to_gid")), q.at("to_pqpn")});
    if (c.connected.back().gid.size() != 16 || c.connected.back().dest_gid.size() != 16) throw std::invalid_argument("a GID has 16 bytes");
  }
  for (const auto& n : j.at("needs"))
    if (!c.needs.emplace_back().ParseFromString(bytes_of(n))) throw std::invalid_argument("what it needs of a device");
  c.filled_bytes = j.at("filled_bytes");
  const auto& r = j.at("resources");
  c.resources.set_ctx(r.at("ctx"));
  c.resources.set_pd(r.at("pd"));
  c.resources.set_mr(r.at("mr"));
  c.resources.set_cq(r.at("cq"));
  c.resources.set_qp(r.at("qp"));
  return c;
}

Status make_dir(const std::string& dir) { return mkdir(dir.c_str(), kDirMode) ? Status(sys_error("cannot make " + dir)) : Status(); }

// All that was written below it is on the disk.
Status sync_below(const std::string& dir) {
  const int fd = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && !syncfs(fd);
  const int err = errno;
  if (fd >= 0) close(fd);
  return ok ? Status() : Status(sys_error("writing " + dir, err));
}

Status copy_tree(const std::string& from, const std::string& to, std::uint64_t limit, Sent& total,
                 const Written& written = all_written) {
  TreeWriter w(to);
  Status arrived;
  auto sent = send_tree(from, wire::FileChunk::IMAGES, limit, [&](const wire::FileChunk& c) {
    total.add(c);
    arrived = w.write(c);
    return bool(arrived);
  }, written);
  if (!sent) return sent;
  return arrived ? w.finish() : arrived;
}

// What holds memory and keys must be nobody else's.
Status is_private(const std::string& path) {
  struct stat st;
  if (lstat(path.c_str(), &st)) return sys_error("cannot read " + path);
  if (st.st_uid != geteuid() && st.st_uid != 0) return Error{EPERM, path + " belongs to user " + std::to_string(st.st_uid) + ", not to root: refused"};
  if (!S_ISLNK(st.st_mode) && (st.st_mode & kOthers))
    return Error{EPERM, path + " can be read or written by others, and holds memory and RDMA keys: refused; after making sure that nobody has changed it: chmod go-rwx " + path};
  return {};
}

// ---- that it is what was stored, whole and unchanged

std::string sum_of(Json manifest) {
  manifest.erase("sum");
  return to_hex(checksum_of(manifest.dump()));
}

Result<Json> sums_of(const std::string& images) {
  Json files = Json::object();
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(images, ec)) {
    if (!f.is_regular_file(ec)) continue;
    auto sum = checksum_of_file(f.path());
    if (!sum) return sum.error();
    files[f.path().filename().string()] = {{"bytes", f.file_size(ec)}, {"xxh3", to_hex(*sum)}};
  }
  if (ec) return Error{ec.value(), "reading " + images + ": " + ec.message()};
  return files;
}

// `files`: as sums_of() had it.
Status is_as_stored(const std::string& images, const Json& files) {
  std::error_code ec;
  for (const auto& [name, was] : files.items()) {
    const std::string path = images + "/" + name;
    if (!fs::is_regular_file(fs::symlink_status(path, ec))) return Error{EINVAL, path + " is missing; the checkpoint is not complete"};
    const auto size = fs::file_size(path, ec);
    if (ec) return Error{ec.value(), "reading " + path + ": " + ec.message()};
    if (size != was.at("bytes").get<std::uint64_t>())
      return Error{EINVAL, fmt::format("{} is {}: it has {} bytes, {} were stored", path, size < was.at("bytes").get<std::uint64_t>() ? "truncated" : "damaged", size,
                                       was.at("bytes").get<std::uint64_t>())};
    auto sum = checksum_of_file(path);
    if (!sum) return sum.error();
    if (to_hex(*sum) != was.at("xxh3").get<std::string>()) return Error{EINVAL, path + " is not what was stored: damaged, or of another checkpoint"};
  }
  for (const auto& f : fs::directory_iterator(images, ec))
    if (const std::string name = f.path().filename().string(); !files.contains(name)) return Error{EINVAL, f.path().string() + " does not belong to this checkpoint"};
  return ec ? Status(Error{ec.value(), "reading " + images + ": " + ec.message()}) : Status();
}

}  // namespace

// ---- checkpoint

const ContainerInfo& KeepingDestination::nothing() {
  static const ContainerInfo none;
  return none;
}

Status KeepingDestination::check(const wire::CheckRequest& r) {
  std::error_code ec;
  if (dir_.empty() || dir_[0] != '/') return Error{EINVAL, "'" + dir_ + "' is no absolute path"};
  if (fs::exists(fs::symlink_status(dir_, ec))) return Error{EEXIST, dir_ + " exists already"};
  if (!fs::is_directory(fs::path(dir_).parent_path(), ec)) return Error{ENOENT, "no folder " + fs::path(dir_).parent_path().string()};
  return disk_fits(r.image_bytes(), dir_);
}

Result<wire::PrepareReply> KeepingDestination::prepare(const wire::PrepareHeader& h, const std::string&, Sent& total) {
  std::error_code ec;
  fs::remove_all(part_, ec);  // of one that was interrupted
  if (auto s = make_dir(part_); !s) return s.error();
  if (auto s = make_dir(part_ + "/images"); !s) return s.error();
  if (!h.bundle().empty()) {
    if (auto s = make_dir(part_ + "/bundle"); !s) return s.error();
    if (auto s = copy_tree(h.bundle(), part_ + "/bundle", kBundleBytes, total); !s) return s.error();
  }
  return wire::PrepareReply();
}

Status KeepingDestination::upload(std::uint32_t, const std::string& folder, unsigned, const Written& written, Sent& total) {
  return copy_tree(folder, part_ + "/images", UINT64_MAX, total, written);
}

Status KeepingDestination::ready(std::uint32_t) {
  for (const auto& f : fs::directory_iterator(part_ + "/images"))
    if (f.is_regular_file() && chmod(f.path().c_str(), kFileMode)) return sys_error("chmod of " + f.path().string());
  std::ofstream out(part_ + "/" + kManifest);
  Json j = to_json(info_);
  auto files = sums_of(part_ + "/images");
  if (!files) return files.error();
  j["files"] = *files;
  j["sum"] = sum_of(j);
  out << j.dump(1) << "\n";
  out.close();
  if (!out || chmod((part_ + "/" + kManifest).c_str(), kFileMode)) return sys_error("writing " + part_ + "/" + kManifest);
  return sync_below(part_);
}

Status KeepingDestination::commit(std::uint32_t) {
  if (rename(part_.c_str(), dir_.c_str())) return sys_error("renaming " + part_ + " to " + dir_);
  return sync_below(dir_);
}

Status KeepingDestination::abort(std::uint32_t) {
  std::error_code ec;
  fs::remove_all(part_, ec);
  return ec ? Status(Error{ec.value(), "removing " + part_ + ": " + ec.message()}) : Status();
}

Result<wire::Outcome> KeepingDestination::outcome(std::uint32_t) { return access(dir_.c_str(), F_OK) ? wire::UNDONE : wire::COMMITTED; }

// ---- restore

Result<ContainerInfo> StoredSource::inspect(const std::string& dir) {
  dir_ = dir;
  const std::string manifest = dir + "/" + kManifest;
  for (const auto& p : {dir, dir + "/images", manifest})
    if (auto s = is_private(p); !s) return s.error();
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(dir + "/images", ec))
    if (auto s = is_private(f.path()); !s) return s.error();
  std::ifstream in(manifest);
  const Json j = Json::parse(in, nullptr, false);
  const auto of = [&](const char* what) { return j.is_object() && j.contains(what) && j[what].is_number_unsigned() ? j[what].get<std::uint32_t>() : 0; };
  if (!j.is_object()) return Error{EINVAL, manifest + " is damaged"};
  if (of("wire") != kWireVersion || of("abi") != MIGR_ABI_VERSION || of("proc") != MIGR_PROC_VERSION)
    return Error{EINVAL, fmt::format("{} was made by release {} of migr (versions {}, {}, {}), this is {} ({}, {}, {}); restore it with that one", dir,
                                     j.contains("release") && j["release"].is_string() ? j["release"].get<std::string>() : "?", of("wire"), of("abi"), of("proc"), kRelease,
                                     kWireVersion, MIGR_ABI_VERSION, MIGR_PROC_VERSION)};
  if (!j.contains("sum")) return Error{EINVAL, manifest + " is damaged, or of an earlier migr: it has no checksum"};
  if (j["sum"] != sum_of(j)) return Error{EINVAL, manifest + " is damaged: its checksum does not fit"};
  try {
    info_ = from_json(j);
    if (auto s = is_as_stored(dir + "/images", j.at("files")); !s) return s.error();
  } catch (const std::exception& e) {
    return Error{EINVAL, manifest + " is damaged: " + e.what()};
  }
  if (!Runtime::name_ok(info_.id) || info_.bundle.empty() == !bare_pid(info_.id)) return Error{EINVAL, manifest + " is damaged: name or bundle"};
  return info_;
}

Result<wire::MovesRequest> StoredSource::moves(const wire::PrepareReply& prepared) {
  wire::MovesRequest out;
  out.set_id(id_);
  for (const auto& m : moves_of_processes(info_, prepared)) *out.add_moves() = m;
  return out;
}

Result<std::string> StoredSource::record(const std::string&, const std::vector<std::string>&) {
  const std::string early = host_.folder(id_) + "/images";
  std::error_code ec;
  fs::create_directories(early, ec);
  for (const char* name : {MIGR_RST_IMAGE_NAME, "descriptors.json"})
    if (const std::string from = dir_ + "/images/" + name; fs::exists(from, ec)) fs::copy_file(from, early + "/" + name, ec);
  if (ec) return Error{ec.value(), "copying to " + early + ": " + ec.message()};
  return early;
}

// The rest of the images joins what was needed early.
Status StoredSource::checkpoint() {
  constexpr char kPart[] = ".part";
  const std::string to = host_.folder(id_) + "/images";
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(dir_ + "/images", ec)) {
    const std::string name = to + "/" + f.path().filename().string();
    if (fs::exists(fs::symlink_status(name))) continue;
    fs::create_hard_link(f.path(), name, ec);
    if (ec) {  // another file system; it is being sent, so it gets its name when it is whole
      fs::copy(f.path(), name + kPart, fs::copy_options::copy_symlinks, ec);
      if (!ec) fs::rename(name + kPart, name, ec);
    }
    if (ec) break;
  }
  return ec ? Status(Error{ec.value(), "reading " + dir_ + "/images: " + ec.message()}) : Status();
}

// Only to answer others: what is stored stays, so nothing is ever left to do here. Whether it runs is the destination's to find out.
Status StoredSource::decide(wire::Outcome outcome) {
  SourceHost::Entry e;
  e.record.set_outcome(outcome);
  e.record.set_settled(true);
  e.record.set_container(info_.id);
  e.record.set_bundle(info_.bundle);
  e.record.set_begun_s(unix_now());
  return host_.save(id_, e);
}

void StoredSource::forget(bool) {
  std::error_code ec;
  fs::remove_all(host_.folder(id_), ec);
}

}  // namespace migr
