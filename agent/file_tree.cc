// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "file_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <mntent.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "command.h"
#include "fd.h"
#include "json.h"
#include "limits.h"

namespace migr {

// Against faults of memory, disk and program; TLS is what keeps others out.
class Checksum {
 public:
  Checksum() : state_(XXH3_createState(), XXH3_freeState) { XXH3_128bits_reset(state_.get()); }
  void add(const void* p, std::size_t n) { XXH3_128bits_update(state_.get(), p, n); }
  std::string end() {
    XXH128_canonical_t out;
    XXH128_canonicalFromHash(&out, XXH3_128bits_digest(state_.get()));
    return {reinterpret_cast<char*>(out.digest), sizeof out.digest};
  }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

namespace {

// Of folders in each other; each has a descriptor. What has come from elsewhere is no deeper than its names, of 4000 bytes, and can be removed.
constexpr int kMaxDepth = 1024, kMaxRemoved = 2 * kMaxDepth;

std::int64_t ns(const timespec& t) { return t.tv_sec * std::int64_t{1'000'000'000} + t.tv_nsec; }

bool all_zero(const char* p, std::size_t n) { return n == 0 || (p[0] == 0 && !memcmp(p, p + 1, n - 1)); }

// A regular file on its way.
struct Sending {
  Fd fd;
  wire::FileChunk chunk;
  std::uint64_t at = 0;
  Checksum sum{};
};

// The number of CRIU's pages-N.img; 0: not one of them.
unsigned pages_number(const char* name) {
  unsigned n = 0;
  int end = 0;
  return std::sscanf(name, "pages-%u.img%n", &n, &end) == 1 && end && !name[end] ? n : 0;
}

// All but "." and "..". What could not be read is no end: what comes behind it would not be sent, or be removed where it was sent to.
Result<std::vector<std::string>> entries_of(int dirfd, const std::string& name) {
  std::unique_ptr<DIR, int (*)(DIR*)> dir(fdopendir(fcntl(dirfd, F_DUPFD_CLOEXEC, 0)), closedir);
  if (!dir) return sys_error("reading folder " + name);
  rewinddir(dir.get());
  std::vector<std::string> all;
  errno = 0;
  for (const dirent* e; (e = readdir(dir.get())); errno = 0)
    if (std::string_view n = e->d_name; n != "." && n != "..") all.emplace_back(n);
  if (errno) return sys_error("reading folder " + name);
  return all;
}

struct Sender {
  wire::FileChunk::Tree tree;
  std::uint64_t left;
  const std::function<bool(const wire::FileChunk&)>& send;
  dev_t device = 0;
  bool ended = false;
  std::string buffer = std::string(kChunkBytes, 0);
  std::map<std::string, std::uint64_t> sent{};  // while they were written; bytes
  SentFiles* known = nullptr;                   // what it has is not sent
  std::string known_as{};                       // before names there
  const Written* written = nullptr;             // asked again in the middle of a large file
  std::size_t left_out = 0;                     // sockets and devices
  std::string first_left_out{};

  void say_what_is_left_out(const std::string& in) const {
    if (left_out) spdlog::warn("{}/{} is a socket or a device, which is not copied{}", in, first_left_out, left_out > 1 ? fmt::format("; nor are {} more", left_out - 1) : "");
  }
  bool changes() const { return known && known->first(); }

  wire::FileChunk chunk(const std::string& name, const struct stat& st) const {
    wire::FileChunk c;
    c.set_tree(tree);
    c.set_name(name);
    c.set_mode(st.st_mode);
    c.set_uid(st.st_uid);
    c.set_gid(st.st_gid);
    return c;
  }

  void note(const std::string& name, const struct stat& st) const {
    if (known) known->add(known_as + name, st);
  }

  Status read_at(const Sending& f, std::size_t want) {
    for (std::size_t have = 0; have < want;) {
      const ssize_t n = pread(f.fd.n, buffer.data() + have, want - have, static_cast<off_t>(f.at + have));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return sys_error("reading " + f.chunk.name());
      if (n == 0 && changes()) return std::fill(buffer.begin() + static_cast<std::ptrdiff_t>(have), buffer.begin() + static_cast<std::ptrdiff_t>(want), 0), Status();
      if (n == 0) return Error{EIO, f.chunk.name() + " became shorter while it was read"};
      have += static_cast<std::size_t>(n);
    }
    return {};
  }

  // From where it is to `size`, which is its end if `whole`.
  Status send_to(Sending& f, std::uint64_t size, bool whole) {
    while (!ended && (f.at < size || whole)) {
      const auto have = static_cast<std::size_t>(std::min<std::uint64_t>(kChunkBytes, size - f.at));
      if (have > left)
        return Error{EFBIG, f.chunk.name() + ": the folder is larger than what is copied; put large files on storage that both hosts share"};
      if (auto s = read_at(f, have); !s) return s;
      const bool zeros = all_zero(buffer.data(), have);
      if (!zeros) f.sum.add(buffer.data(), have);
      f.chunk.set_offset(f.at);
      f.chunk.set_zeros(zeros ? have : 0);
      f.chunk.set_data(buffer.data(), zeros ? 0 : have);
      f.at += have;
      left -= have;
      const bool last = whole && f.at == size;
      if (last) f.chunk.set_xxh3(f.sum.end());
      if (!send(f.chunk)) ended = true;
      if (last) break;
      if (!written || f.at == size) continue;
      if (const auto still = (*written)(); !still) return still.error();
    }
    return {};
  }

  // One pages-N.img is complete when there is one with a greater number, or all is written.
  Status follow(int dirfd, const std::string& path, const Written& written) {
    constexpr useconds_t kLookUs = 10'000;
    constexpr std::uint64_t kWorthBytes = 256 << 10;
    std::unique_ptr<Sending> now;
    for (unsigned number = 0, next = 0; !ended; next = 0) {
      const auto whole = written();
      if (!whole) return whole.error();
      struct stat st;
      if (!*whole)
        if (auto s = next_pages(path, number, next); !s) return s;
      if (now) {
        if (fstat(now->fd.n, &st)) return sys_error("reading " + now->chunk.name());
        const auto size = static_cast<std::uint64_t>(st.st_size);
        const bool end = next || *whole;
        if (auto s = send_to(*now, end ? size : size - (size - now->at) % kWorthBytes, end); !s) return s;
        if (end) sent.emplace(now->chunk.name(), now->at), now.reset();
      }
      if (*whole) break;
      if (next) {
        const std::string name = "pages-" + std::to_string(number = next) + ".img";
        now = std::make_unique<Sending>();
        now->fd = Fd(openat(dirfd, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
        if (now->fd.n < 0 || fstat(now->fd.n, &st)) return sys_error("reading " + name);
        now->chunk = chunk(name, st);
      } else {
        usleep(kLookUs);
      }
    }
    return {};
  }

  static Status next_pages(const std::string& path, unsigned after, unsigned& next) {
    std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(path.c_str()), closedir);
    if (!dir) return sys_error("reading folder " + path);
    while (const dirent* e = readdir(dir.get()))
      if (const unsigned n = pages_number(e->d_name); n > after && (!next || n < next)) next = n;
    return {};
  }

  Status folder(int dirfd, const std::string& prefix, int depth) {
    if (depth > kMaxDepth) return Error{ELOOP, prefix + ": too deep"};
    auto names = entries_of(dirfd, prefix);
    if (!names) return names.error();
    std::sort(names->begin(), names->end());
    for (const auto& n : *names) {
      if (ended) return {};
      const std::string name = prefix.empty() ? n : prefix + "/" + n;
      struct stat st;
      if (fstatat(dirfd, n.c_str(), &st, AT_SYMLINK_NOFOLLOW)) {
        if (errno == ENOENT && changes()) continue;
        return sys_error("reading " + name);
      }
      const bool has = known && known->has(known_as + name, st);
      if (has && !S_ISDIR(st.st_mode)) continue;
      if (const auto s = sent.find(name); s != sent.end()) {
        // CRIU 3.17 does not fail where memory is missing, but reads for ever.
        if (s->second != static_cast<std::uint64_t>(st.st_size)) return Error{EIO, name + " was written to when the next one had begun"};
        continue;
      }
      wire::FileChunk c = chunk(name, st);
      if (S_ISFIFO(st.st_mode) && tree == wire::FileChunk::BUNDLE) {
        note(name, st);
        if (!send(c)) ended = true;
      } else if (S_ISLNK(st.st_mode)) {
        std::string target(static_cast<std::size_t>(st.st_size) + 1, 0);
        const ssize_t got = readlinkat(dirfd, n.c_str(), target.data(), target.size());
        if (got < 0 && errno == ENOENT && changes()) continue;
        if (got < 0) return sys_error("reading link " + name);
        target.resize(static_cast<std::size_t>(got));
        c.set_link(target);
        note(name, st);
        if (!send(c)) ended = true;
      } else if (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)) {
        Fd fd(openat(dirfd, n.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (S_ISDIR(st.st_mode) ? O_DIRECTORY : 0)));
        const bool other = errno == ENOENT || errno == ELOOP || errno == ENXIO || errno == ENOTDIR;
        if (fd.n < 0 && other && changes()) continue;  // it has gone, or is of another type by now
        if (fd.n < 0) return sys_error("reading " + name);
        if (S_ISREG(st.st_mode)) {
          if (fstat(fd.n, &st)) return sys_error("reading " + name);
          if (!S_ISREG(st.st_mode)) continue;
          note(name, st);
          Sending f{.fd = std::move(fd), .chunk = std::move(c)};
          if (auto s = send_to(f, static_cast<std::uint64_t>(st.st_size), true); !s) return s;
          continue;
        }
        note(name, st);
        if (!has && !send(c)) ended = true;
        if (st.st_dev != device) continue;  // a mount: the folder, not what is in it
        if (auto s = folder(fd.n, name, depth + 1); !s) return s;
      } else if ((changes() || (!known && tree == wire::FileChunk::BUNDLE)) && left_out++ == 0) {  // said once, and not again when what has changed is sent
        first_left_out = name;
      }
    }
    return {};
  }
};

// EXDEV: something is mounted there, maybe of the same file system.
Fd open_unmounted(int dirfd, const std::string& name) {
  open_how how{};
  how.flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV;
  return Fd(static_cast<int>(syscall(SYS_openat2, dirfd, name.c_str(), &how, sizeof how)));
}

Status list(int dirfd, const std::string& prefix, dev_t device, int depth, std::map<std::string, wire::TreeName>& out) {
  if (depth > kMaxDepth) return Error{ELOOP, prefix + ": too deep"};
  const auto all = entries_of(dirfd, prefix);
  if (!all) return all.error();
  for (const auto& n : *all) {
    wire::TreeName t;
    t.set_name(prefix.empty() ? n : prefix + "/" + n);
    struct stat st;
    if (fstatat(dirfd, n.c_str(), &st, AT_SYMLINK_NOFOLLOW)) return sys_error("reading " + t.name());
    t.set_mode(st.st_mode);
    t.set_mounted(st.st_dev != device);
    if (S_ISDIR(st.st_mode) && !t.mounted()) {
      const Fd fd(openat(dirfd, n.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (fd.n < 0) return sys_error("reading " + t.name());
      if (auto s = list(fd.n, t.name(), device, depth + 1, out); !s) return s;
    }
    out.emplace(t.name(), std::move(t));
  }
  return {};
}

Status remove_at(int dirfd, const std::string& n, const std::string& name, int depth) {
  struct stat st;
  if (fstatat(dirfd, n.c_str(), &st, AT_SYMLINK_NOFOLLOW)) return sys_error("removing " + name);
  if (S_ISDIR(st.st_mode)) {
    if (depth > kMaxRemoved) return Error{ELOOP, name + ": too deep"};
    const Fd fd = open_unmounted(dirfd, n);
    if (fd.n < 0 && errno == EXDEV) return Error{EBUSY, "removing " + name + ": something is mounted there"};
    if (fd.n < 0) return sys_error("removing " + name);
    const auto all = entries_of(fd.n, name);
    if (!all) return all.error();
    for (const auto& x : *all)
      if (auto s = remove_at(fd.n, x, name + "/" + x, depth + 1); !s) return s;
  }
  return unlinkat(dirfd, n.c_str(), S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0) ? Status(sys_error("removing " + name)) : Status();
}

Status remove_others_at(int dirfd, const std::string& prefix, int depth, const std::map<std::string, wire::TreeName>& names) {
  if (depth > kMaxDepth) return Error{ELOOP, prefix + ": too deep"};
  const auto all = entries_of(dirfd, prefix);
  if (!all) return all.error();
  for (const auto& n : *all) {
    const std::string name = prefix.empty() ? n : prefix + "/" + n;
    struct stat st;
    if (fstatat(dirfd, n.c_str(), &st, AT_SYMLINK_NOFOLLOW)) return sys_error("reading " + name);
    const auto t = names.find(name);
    if (t == names.end() || (t->second.mode() & S_IFMT) != (st.st_mode & S_IFMT)) {
      if (auto s = remove_at(dirfd, n, name, depth); !s) return s;
    } else if (S_ISDIR(st.st_mode) && !t->second.mounted()) {
      const Fd fd = open_unmounted(dirfd, n);
      if (fd.n < 0 && errno == EXDEV) continue;
      if (fd.n < 0) return sys_error("reading " + name);
      if (auto s = remove_others_at(fd.n, name, depth + 1, names); !s) return s;
    }
  }
  return {};
}

// Relative, no "..", no empty part.
bool name_ok(const std::string& n) {
  if (n.empty() || n.size() > 4000 || n.find('\0') != std::string::npos) return false;
  for (std::size_t at = 0; at <= n.size();) {
    const std::size_t end = std::min(n.find('/', at), n.size());
    const auto part = std::string_view(n).substr(at, end - at);
    if (part.empty() || part == "." || part == "..") return false;
    at = end + 1;
  }
  return true;
}

// The folder that `name` lies in, opened step by step without following links; made when missing.
Result<Fd> open_parent(const std::string& root, const std::string& name) {
  Fd at(open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (at.n < 0) return sys_error("opening " + root);
  for (std::size_t from = 0, to; (to = name.find('/', from)) != std::string::npos; from = to + 1) {
    const std::string part = name.substr(from, to - from);
    if (mkdirat(at.n, part.c_str(), 0755) && errno != EEXIST) return sys_error("making " + part + " of " + name);
    Fd next(openat(at.n, part.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (next.n < 0) return sys_error("opening " + part + " of " + name);
    at = std::move(next);
  }
  return at;
}

// So many that nobody has the same.
std::string random_digits() {
  std::uint64_t n = 0;
  (void)!getrandom(&n, sizeof n, 0);  // of so few bytes it cannot fail
  return fmt::format("{:016x}", n);
}

std::string last_part(const std::string& n) {
  const auto slash = n.rfind('/');
  return slash == std::string::npos ? n : n.substr(slash + 1);
}

}  // namespace

Status send_tree(const std::string& folder, wire::FileChunk::Tree tree, std::uint64_t limit,
                 const std::function<bool(const wire::FileChunk&)>& send, const Written& written) {
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat st;
  if (fd.n < 0 || fstat(fd.n, &st)) return sys_error("reading folder " + folder);
  Sender s{tree, limit, send, st.st_dev};
  s.written = &written;
  auto r = s.follow(fd.n, folder, written);
  if (r) r = s.folder(fd.n, "", 0);
  if (!r) return Error{r.error().code, folder + "/" + r.error().text};
  s.say_what_is_left_out(folder);
  return {};
}

Status SentFiles::begin(const std::string& folder) {
  *this = SentFiles();
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  began_ns_ = ns(now);
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return fd.n < 0 || syncfs(fd.n) ? Status(sys_error("writing to the disk what is in " + folder)) : Status();
}

void SentFiles::add(const std::string& name, const struct stat& st) { files_[name] = {st.st_ino, ns(st.st_ctim)}; }

bool SentFiles::has(const std::string& name, const struct stat& st) const {
  constexpr std::int64_t kCoarseNs = 2'000'000'000;  // of two changes so near to each other the second may not show
  const auto f = files_.find(name);
  return f != files_.end() && f->second.inode == st.st_ino && f->second.changed_ns == ns(st.st_ctim) && ns(st.st_ctim) < began_ns_ - kCoarseNs;
}

Result<std::string> writable_root(const std::string& bundle) {
  namespace fs = std::filesystem;
  const std::string text = bundle.empty() ? "" : text_of(bundle + "/config.json");
  if (text.empty()) return std::string();
  const auto j = Json::parse(text, nullptr, false);
  if (!j.is_object()) return Error{EINVAL, bundle + "/config.json: no JSON"};
  const auto root = j.find("root");
  if (root == j.end() || !root->is_object() || !root->contains("path") || !(*root)["path"].is_string()) return std::string();
  if (root->contains("readonly") && (*root)["readonly"] == true) return std::string();
  fs::path name = fs::path((*root)["path"].get<std::string>());
  if (name.is_absolute()) name = name.lexically_relative(bundle);
  std::string in = name.lexically_normal().string();
  while (in.ends_with('/')) in.pop_back();
  if (in == ".") return Error{EOPNOTSUPP, bundle + " is itself the root filesystem that the container may write to; put that into a folder of it (root.path of config.json)"};
  if (!name_ok(in)) return std::string();
  // What symbolic links lead to, and what is mounted, is not copied.
  struct stat top, st;
  if (stat(bundle.c_str(), &top)) return sys_error("reading " + bundle);
  for (std::size_t at = 0; at != std::string::npos;) {
    at = in.find('/', at + 1);
    if (lstat((bundle + "/" + in.substr(0, at)).c_str(), &st)) return sys_error("reading " + bundle + "/" + in);
    if (!S_ISDIR(st.st_mode) || st.st_dev != top.st_dev) return std::string();
  }
  return in;
}

Status send_changes(const std::string& folder, wire::FileChunk::Tree tree, std::uint64_t limit, const std::function<bool(const wire::FileChunk&)>& send,
                    SentFiles& sent, const std::string& prefix) {
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat st;
  struct statfs in;
  if (fd.n < 0 || fstat(fd.n, &st) || fstatfs(fd.n, &in)) return sys_error("reading folder " + folder);
  if (in.f_type == TMPFS_MAGIC) sent.forget();  // writes to a mapped file never show there
  Sender s{tree, limit, send, st.st_dev};
  s.known = &sent;
  s.known_as = prefix;
  if (auto r = s.folder(fd.n, "", 0); !r) return Error{r.error().code, folder + "/" + r.error().text};
  s.say_what_is_left_out(folder);
  sent.sent();
  return {};
}

Result<std::map<std::string, wire::TreeName>> names_below(const std::string& folder) {
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat st;
  if (fd.n < 0 || fstat(fd.n, &st)) return sys_error("reading folder " + folder);
  std::map<std::string, wire::TreeName> all;
  if (auto s = list(fd.n, "", st.st_dev, 0, all); !s) return Error{s.error().code, folder + ": " + s.error().text};
  return all;
}

Status remove_others(const std::string& folder, const std::map<std::string, wire::TreeName>& names) {
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (fd.n < 0) return sys_error("reading folder " + folder);
  auto s = remove_others_at(fd.n, "", 0, names);
  return s ? s : Error{s.error().code, folder + ": " + s.error().text};
}

Status make_own_folder(const std::string& folder, mode_t mode) {
  for (std::size_t at = 1; (at = folder.find('/', at)) != std::string::npos; at++)
    if (mkdir(folder.substr(0, at).c_str(), 0755) && errno != EEXIST) return sys_error("cannot make " + folder.substr(0, at));
  if (!mkdir(folder.c_str(), 0700)) return chmod(folder.c_str(), mode) ? Status(sys_error("chmod of " + folder)) : Status();
  if (errno != EEXIST) return sys_error("cannot make " + folder);
  struct stat st {};
  if (stat(folder.c_str(), &st)) return sys_error(folder);
  if (!S_ISDIR(st.st_mode)) return Error{ENOTDIR, folder + " is no folder"};
  if (st.st_uid != geteuid() || (st.st_mode & 022))
    return Error{EPERM, folder + (st.st_uid != geteuid() ? " belongs to another user" : " can be written to by others") + ": name a folder of migrd's own"};
  return {};
}

static constexpr std::string_view kMark = ".migr-mark-";
static constexpr time_t kMarkKeptS = 3600;  // no question takes as long

FolderMark::FolderMark(const std::string& folder) : folder_(folder) {
  std::error_code ec;
  for (const auto& e : std::filesystem::directory_iterator(folder, ec)) {
    if (!e.path().filename().string().starts_with(kMark)) continue;
    // Of a migrd that ended meanwhile, and not of another question that is under way. By the clock of whoever keeps the folder.
    struct stat st {};
    if (!lstat(e.path().c_str(), &st) && time(nullptr) - st.st_mtime > kMarkKeptS) unlink(e.path().c_str());
  }
  // A name that nobody has asked for before: another host may remember for a while that there is none.
  const std::string name = std::string(kMark) + random_digits();
  const Fd fd(open((folder + "/" + name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.n >= 0) name_ = name;
}
FolderMark::~FolderMark() {
  if (!name_.empty()) unlink((folder_ + "/" + name_).c_str());
}

bool has_mark(const std::string& folder, const std::string& name) {
  struct stat st;
  return name.starts_with(kMark) && name.find('/') == std::string::npos && !lstat((folder + "/" + name).c_str(), &st) && S_ISREG(st.st_mode);
}

Status remove_folder(const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code ec;
  const fs::path given = fs::path(name).has_filename() ? fs::path(name) : fs::path(name).parent_path();
  const fs::path above = fs::canonical(given.parent_path(), ec);
  if (ec == std::errc::no_such_file_or_directory) return {};
  if (ec) return Error{ec.value(), "removing " + name + ": " + ec.message()};
  const std::string folder = above / given.filename();  // as the kernel names what is mounted
  std::unique_ptr<FILE, int (*)(FILE*)> mounts(setmntent("/proc/self/mounts", "re"), endmntent);
  if (!mounts) return sys_error("reading /proc/self/mounts");
  std::vector<std::string> below;
  while (const mntent* m = getmntent(mounts.get()))
    if (std::string_view(m->mnt_dir).starts_with(folder + "/")) below.push_back(m->mnt_dir);
  for (auto m = below.rbegin(); m != below.rend(); ++m)
    // A program does it, for it has the capability that migrd gives up.
    if (auto r = run_checked({"umount", "--lazy", "--no-canonicalize", *m}, {}, kHookMs); !r) return Error{r.error().code, "unmounting " + *m + ": " + r.error().text};
  const Fd parent(open(above.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.n < 0) return sys_error("opening " + above.string());
  auto s = remove_at(parent.n, given.filename(), folder, 0);
  return s || s.error().code == ENOENT ? Status() : s;
}

Result<std::string> checksum_of_file(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (fd.n < 0) return sys_error("opening " + path);
  Checksum sum{};
  std::string buffer(kChunkBytes, 0);
  for (;;) {
    const ssize_t n = read(fd.n, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return sys_error("reading " + path);
    if (n == 0) return sum.end();
    sum.add(buffer.data(), static_cast<std::size_t>(n));
  }
}

std::string checksum_of(const std::string& text) {
  Checksum sum{};
  sum.add(text.data(), text.size());
  return sum.end();
}

std::uint64_t bytes_below(const std::string& folder) {
  std::uint64_t bytes = 0;
  std::error_code ec;
  struct stat top, st;
  if (lstat(folder.c_str(), &top)) return 0;
  for (std::filesystem::recursive_directory_iterator f(folder, ec), end; !ec && f != end; f.increment(ec)) {
    if (lstat(f->path().c_str(), &st)) continue;
    if (S_ISREG(st.st_mode)) bytes += static_cast<std::uint64_t>(st.st_size);
    if (S_ISDIR(st.st_mode) && st.st_dev != top.st_dev) f.disable_recursion_pending();
  }
  return bytes;
}

std::string text_of(const std::string& path) {
  std::error_code ec;
  if (std::filesystem::is_fifo(path, ec)) return {};  // who opens one waits
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();  // an istreambuf_iterator would throw where a read fails
  return out.str();
}

Result<std::string> read_whole(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.n < 0) return sys_error("reading " + path);
  std::string text, part(1 << 16, 0);
  for (;;) {
    const ssize_t n = read(fd.n, part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return sys_error("reading " + path);
    if (n == 0) return text;
    text.append(part, 0, static_cast<std::size_t>(n));
  }
}

Status put_aside(const std::string& path, const std::string& text, const std::string& rest) {
  if (auto s = write_whole(path + ".bad", text); !s) return s;
  spdlog::error("{} is damaged; what was in it is kept as {}.bad", path, path);
  return write_whole(path, rest);
}

std::string first_line_of(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

Status write_whole(const std::string& path, const std::string& text) {
  const std::string tmp = path + ".new";
  FILE* f = std::fopen(tmp.c_str(), "we");
  if (!f) return sys_error("writing " + tmp);
  const bool ok = !fchmod(fileno(f), 0600) && std::fwrite(text.data(), 1, text.size(), f) == text.size() && !std::fflush(f) && !fsync(fileno(f));
  const int err = errno;
  std::fclose(f);
  if (!ok || std::rename(tmp.c_str(), path.c_str())) return sys_error("writing " + path, ok ? errno : err);
  // The new name, too.
  const Fd folder(open(std::filesystem::path(path).parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.n >= 0 && fsync(folder.n) && errno != EINVAL) return sys_error("writing " + path);
  return {};
}

Result<wire::FolderMode> folder_mode(const std::string& folder) {
  struct stat st;
  if (stat(folder.c_str(), &st)) return sys_error("reading " + folder);
  wire::FolderMode m;
  m.set_mode(st.st_mode);
  m.set_uid(st.st_uid);
  m.set_gid(st.st_gid);
  return m;
}

Status set_folder_mode(const std::string& folder, const wire::FolderMode& to) {
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.n < 0 || fchown(fd.n, to.uid(), to.gid()) || fchmod(fd.n, to.mode() & 07777)) return sys_error("setting owner and mode of " + folder);
  return {};
}

struct TreeWriter::Open {
  std::string name, tmp;
  Fd dir, fd;
  std::uint64_t at = 0;
  std::uint32_t mode = 0, uid = 0, gid = 0;
  Checksum sum{};
};

TreeWriter::TreeWriter(const std::string& folder) : folder_(folder) {}

TreeWriter::~TreeWriter() {
  if (open_) unlinkat(open_->dir.n, open_->tmp.c_str(), 0);
}

Status TreeWriter::write(const wire::FileChunk& c) {
  if (!name_ok(c.name())) return Error{EINVAL, "a file name that leaves its folder"};
  if (c.data().size() > kChunkBytes) return Error{EINVAL, c.name() + ": chunk too large"};
  const mode_t permissions = c.mode() & 07777;
  if (open_ && open_->name != c.name()) return Error{EINVAL, open_->name + ": incomplete, and another file began"};

  if (!open_) {
    auto dir = open_parent(folder_, c.name());
    if (!dir) return dir.error();
    const std::string base = last_part(c.name());
    struct stat st;
    if (!fstatat(dir->n, base.c_str(), &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode) != S_ISDIR(c.mode()))
      if (auto s = remove_at(dir->n, base, c.name(), 0); !s) return s;
    if (S_ISDIR(c.mode())) {
      if (mkdirat(dir->n, base.c_str(), permissions) && errno != EEXIST) return sys_error("making " + c.name());
      const Fd fd(openat(dir->n, base.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (fd.n < 0 || fchown(fd.n, c.uid(), c.gid()) || fchmod(fd.n, permissions)) return sys_error("making " + c.name());
      return {};
    }
    if (S_ISLNK(c.mode())) {
      if (unlinkat(dir->n, base.c_str(), 0) && errno != ENOENT) return sys_error("replacing " + c.name());
      if (symlinkat(c.link().c_str(), dir->n, base.c_str()) ||
          fchownat(dir->n, base.c_str(), c.uid(), c.gid(), AT_SYMLINK_NOFOLLOW))
        return sys_error("making " + c.name());
      return {};
    }
    if (S_ISFIFO(c.mode()) && c.tree() == wire::FileChunk::BUNDLE) {
      if (unlinkat(dir->n, base.c_str(), 0) && errno != ENOENT) return sys_error("replacing " + c.name());
      if (mkfifoat(dir->n, base.c_str(), 0600) || fchownat(dir->n, base.c_str(), c.uid(), c.gid(), AT_SYMLINK_NOFOLLOW) ||
          fchmodat(dir->n, base.c_str(), permissions, 0))
        return sys_error("making " + c.name());
      return {};
    }
    if (!S_ISREG(c.mode())) return Error{EINVAL, c.name() + ": neither file, folder, FIFO nor link"};
    auto o = std::make_unique<Open>();
    o->name = c.name();
    const std::string part = ".migr-part-" + random_digits();  // no name that the container could have made
    o->tmp = base.substr(0, NAME_MAX - part.size()) + part;
    o->dir = std::move(*dir);
    o->mode = permissions;
    o->uid = c.uid();
    o->gid = c.gid();
    o->fd = Fd(openat(o->dir.n, o->tmp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (o->fd.n < 0) return sys_error("making " + c.name());
    open_ = std::move(o);
  }
  Open& o = *open_;
  if (c.offset() != o.at) return Error{EINVAL, c.name() + ": a part is missing"};
  if (c.zeros() && !c.data().empty()) return Error{EINVAL, c.name() + ": data and zeros at once"};
  if (c.zeros() > kChunkBytes) return Error{EINVAL, c.name() + ": chunk too large"};
  o.sum.add(c.data().data(), c.data().size());
  for (std::size_t done = 0; done < c.data().size();) {
    const ssize_t n = pwrite(o.fd.n, c.data().data() + done, c.data().size() - done, static_cast<off_t>(o.at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return sys_error("writing " + c.name());
    done += static_cast<std::size_t>(n);
  }
  o.at += c.data().size() + c.zeros();  // zeros stay a hole
  bytes_ += c.data().size();
  if (c.xxh3().empty()) return {};
  if (c.xxh3() != o.sum.end()) return Error{EIO, c.name() + ": checksum does not fit; it changed on its way"};
  if (ftruncate(o.fd.n, static_cast<off_t>(o.at)) || fchown(o.fd.n, o.uid, o.gid) || fchmod(o.fd.n, o.mode) ||
      renameat(o.dir.n, o.tmp.c_str(), o.dir.n, last_part(o.name).c_str()))
    return sys_error("finishing " + c.name());
  files_++;
  open_.reset();
  return {};
}

Status TreeWriter::finish() {
  if (open_) return Error{EIO, open_->name + ": its end is missing"};
  return {};
}

}  // namespace migr
