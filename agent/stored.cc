// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "stored.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <list>
#include <mutex>
#include <set>

#include "file_tree.h"
#include "manifest.h"
#include "migr/restore.h"
#include "room.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kDirMode = 0700, kOthers = 0077;

Status make_dir(const std::string& dir) { return mkdir(dir.c_str(), kDirMode) ? Status(sys_error("cannot make " + dir)) : Status(); }

// All that was written below it is on the disk.
Status sync_below(const std::string& dir) {
  const int fd = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && !syncfs(fd);
  const int err = errno;
  if (fd >= 0) close(fd);
  return ok ? Status() : Status(sys_error("writing " + dir, err));
}

Status copy(const std::string& to, Sent& total, const std::function<Status(const std::function<bool(const wire::FileChunk&)>&)>& read) {
  TreeWriter w(to);
  Status arrived;
  auto sent = read([&](const wire::FileChunk& c) {
    total.add(c);
    arrived = w.write(c);
    return bool(arrived);
  });
  if (!sent) return sent;
  return arrived ? w.finish() : arrived;
}

Status copy_tree(const std::string& from, const std::string& to, wire::FileChunk::Tree tree, std::uint64_t limit, Sent& total,
                 const Written& written = all_written) {
  return copy(to, total, [&](const auto& send) { return send_tree(from, tree, limit, send, written); });
}

// Into which checkpoints are being written. Thread: any.
class FoldersInUse {
 public:
  static FoldersInUse& get() {
    static FoldersInUse all;
    return all;
  }
  bool contains(const std::string& folder) {
    std::lock_guard lock(mutex_);
    return folders_.contains(folder);
  }
  /// @return false: another one has it
  bool take(const std::string& folder) {
    std::lock_guard lock(mutex_);
    return folders_.insert(folder).second;
  }
  void give_back(const std::string& folder) {
    std::lock_guard lock(mutex_);
    folders_.erase(folder);
  }

 private:
  std::mutex mutex_;
  std::set<std::string> folders_;
};

Error being_written(const std::string& dir) { return {EBUSY, "another checkpoint is being written to " + dir}; }

// What holds memory and keys must be nobody else's.
Status is_private(const std::string& path) {
  struct stat st;
  if (lstat(path.c_str(), &st)) return sys_error("cannot read " + path);
  if (st.st_uid != geteuid() && st.st_uid != 0) return Error{EPERM, path + " belongs to user " + std::to_string(st.st_uid) + ", not to root: refused"};
  if (!S_ISLNK(st.st_mode) && (st.st_mode & kOthers))
    return Error{EPERM, path + " can be read or written by others, and holds memory and RDMA keys: refused; after making sure that nobody has changed it: chmod go-rwx " + path};
  return {};
}

// Whoever may change a folder or a link on the way could put something else there after it was looked at: as sshd's StrictModes.
Status way_is_ours(const fs::path& path) {
  constexpr int kLinksMost = 40;  // as of the kernel
  fs::path done;                  // without links
  std::list<fs::path> left(path.begin(), path.end());
  for (int links = 0; !left.empty();) {
    const fs::path at = done / left.front();
    left.pop_front();
    struct stat st;
    if (lstat(at.c_str(), &st)) return sys_error("cannot read " + at.string());
    const std::string refused = ", who could exchange what is in it: refused; name one that only root can change, as all above it, for example below /var/lib";
    if (st.st_uid != geteuid() && st.st_uid != 0) return Error{EPERM, at.string() + " belongs to user " + std::to_string(st.st_uid) + refused};
    if (S_ISLNK(st.st_mode)) {
      std::error_code ec;
      const fs::path to = fs::read_symlink(at, ec);
      if (ec || ++links > kLinksMost) return sys_error("cannot read " + at.string(), ec ? ec.value() : ELOOP);
      left.insert(left.begin(), to.begin(), to.end());
      continue;
    }
    if (st.st_mode & (S_IWGRP | S_IWOTH) && !(st.st_mode & S_ISVTX)) return Error{EPERM, at.string() + " can be written to by others" + refused + ", or: chmod go-w " + at.string()};
    done = at;
  }
  return {};
}

// What is there of that name will be removed: nothing, or what a checkpoint that did not come to its end has left.
Status is_interrupted(const std::string& part) {
  struct stat st {};
  if (lstat(part.c_str(), &st)) return errno == ENOENT ? Status() : Status(sys_error(part));
  bool ours = S_ISDIR(st.st_mode) && st.st_uid == geteuid() && !(st.st_mode & kOthers);
  std::error_code ec;
  for (fs::directory_iterator f(part, ec), end; ours && !ec && f != end; f.increment(ec)) {
    const std::string name = f->path().filename();
    ours = name == "images" || name == "bundle" || name.starts_with(kManifest);
  }
  return ours && !ec ? Status() : Error{EEXIST, part + " exists, and is none of a checkpoint that was interrupted: move it out of the way, or name another folder"};
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
  if (auto s = way_is_ours(fs::path(dir_).parent_path()); !s) return s;
  if (FoldersInUse::get().contains(part_)) return being_written(dir_);
  if (auto s = is_interrupted(part_); !s) return s;
  if (!same_disk(dir_, made_in_)) return disk_fits(r.image_bytes(), dir_);
  const auto s = disk_fits(2 * r.image_bytes(), dir_);
  return s ? s : Error{s.error().code, s.error().text + " (twice its size, for " + made_in_ + " has it until it is stored)"};
}

Result<wire::PrepareReply> KeepingDestination::prepare(const wire::PrepareHeader& h, const std::string&, Sent& total) {
  if (!(writes_ = FoldersInUse::get().take(part_))) return being_written(dir_);
  if (auto s = is_interrupted(part_); !s) return s.error();
  std::error_code ec;
  fs::remove_all(part_, ec);
  if (auto s = make_dir(part_); !s) return s.error();
  if (auto s = make_dir(part_ + "/images"); !s) return s.error();
  if (!h.bundle().empty()) {
    if (auto s = make_dir(part_ + "/bundle"); !s) return s.error();
    bundle_ = h.bundle();
    const auto root = writable_root(bundle_);
    if (!root) return root.error();
    root_ = *root;
    if (!root_.empty())
      if (auto s = sent_.begin(bundle_); !s) return s.error();
    if (auto s = copy_changes("", total); !s) return s.error();  // other folders of it are written to even if its root is read-only
  }
  return wire::PrepareReply();
}

Status KeepingDestination::copy_changes(const std::string& in, Sent& total) {
  return copy(part_ + "/bundle/" + in, total, [&](const auto& send) { return send_changes(bundle_ + "/" + in, wire::FileChunk::BUNDLE, kBundleBytes, send, sent_, in); });
}

Status KeepingDestination::upload_changes(std::uint32_t, Sent& total) {
  const auto names = names_below(bundle_ + "/" + root_);
  if (!names) return names.error();
  if (auto s = remove_others(part_ + "/bundle/" + root_, *names); !s) return s;
  if (auto s = write_root_names(part_, *names); !s) return s;
  return copy_changes(root_ + "/", total);
}

Status KeepingDestination::upload(std::uint32_t, const std::string& folder, unsigned, const Written& written, Sent& total) {
  return copy_tree(folder, part_ + "/images", wire::FileChunk::IMAGES, UINT64_MAX, total, written);
}

Status KeepingDestination::ready(std::uint32_t) {
  std::error_code ec;
  for (fs::directory_iterator f(part_ + "/images", ec), end; !ec && f != end; f.increment(ec))
    if (std::error_code gone; f->is_regular_file(gone) && chmod(f->path().c_str(), kFileMode)) return sys_error("chmod of " + f->path().string());
  if (ec) return Error{ec.value(), "reading " + part_ + "/images: " + ec.message()};
  if (auto r = write_manifest(part_, info_); !r) return r;
  return sync_below(part_);
}

Status KeepingDestination::commit(std::uint32_t) {
  // Somebody else's folder of that name, made meanwhile, stays as it is. Not every file system can see to that in one step.
  if (renameat2(AT_FDCWD, part_.c_str(), AT_FDCWD, dir_.c_str(), RENAME_NOREPLACE) &&
      (errno != EINVAL || rename(part_.c_str(), dir_.c_str())))
    return sys_error("renaming " + part_ + " to " + dir_);
  return sync_below(dir_);
}

Status KeepingDestination::abort(std::uint32_t) {
  if (!writes_ && FoldersInUse::get().contains(part_)) return {};  // another one's
  if (!is_interrupted(part_)) return {};                           // nothing of ours
  std::error_code ec;
  fs::remove_all(part_, ec);
  return ec ? Status(Error{ec.value(), "removing " + part_ + ": " + ec.message()}) : Status();
}

// It has got its name, and the folder of that name is not another one's.
Result<wire::Outcome> KeepingDestination::outcome(std::uint32_t) {
  return access(dir_.c_str(), F_OK) || !access(part_.c_str(), F_OK) ? wire::UNDONE : wire::COMMITTED;
}

KeepingDestination::~KeepingDestination() {
  if (writes_) FoldersInUse::get().give_back(part_);
}

// ---- restore

Result<ContainerInfo> StoredSource::inspect(const std::string& dir) {
  dir_ = dir;
  if (auto s = way_is_ours(fs::path(dir) / "images"); !s) return s.error();
  for (const auto& p : {dir, dir + "/images", dir + "/" + kManifest})
    if (auto s = is_private(p); !s) return s.error();
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(dir + "/images", ec))
    if (auto s = is_private(f.path()); !s) return s.error();
  auto info = read_manifest(dir);
  if (!info) return info.error();
  info_ = *info;
  // record() and checkpoint() make links where they can: else there are two of it until it runs, the destination's the other.
  const std::string& state = host_.config_.state_dir;
  if (auto s = same_disk(dir, state) ? Status() : disk_fits(2 * info_.image_bytes(), state, info_.filled_bytes); !s)
    return Error{s.error().code, s.error().text + " (twice its size, for " + dir + " is on another file system)"};
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
  std::error_code ec, none;
  fs::create_directories(early, ec);
  for (const char* name : {MIGR_RST_IMAGE_NAME, "descriptors.json"})
    if (const std::string from = dir_ + "/images/" + name; !ec && fs::exists(from, none)) fs::copy_file(from, early + "/" + name, ec);
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
