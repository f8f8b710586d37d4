// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "page_images.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "aside.h"
#include "criu_image.h"
#include "criu_memory.pb.h"
#include "fd.h"
#include "file_tree.h"
#include "limits.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kPagemapMagic = 0x56084025, kMmMagic = 0x57492820;
constexpr std::uint32_t kInParent = 1, kPresent = 4;
constexpr std::uint32_t kAnonymousPrivate = 1u << 9, kAioRing = 1u << 13;  // of a Vma
constexpr std::size_t kPage = 4096;
// An entry costs CRIU a read of its own: fewer equal pages than this between others are not worth one.
constexpr std::uint32_t kShortestRun = 8;
constexpr std::uint64_t kRunPages = 64;  // that are read at once

struct Entry {
  std::uint64_t vaddr = 0;
  std::uint32_t pages = 0, flags = 0;
  std::uint64_t at = 0;  // of its first page in pages-ID.img, in pages

  std::uint64_t end() const { return vaddr + pages * kPage; }
  bool present() const { return flags & kPresent; }
};

struct Pagemap {
  std::uint32_t pages_id = 0;
  std::vector<Entry> entries;
  std::uint64_t present = 0;  // pages in pages-ID.img
};

Result<Pagemap> read_pagemap(const std::string& path) {
  CriuImage image(path);
  if (!image.is(kPagemapMagic)) return Error{EINVAL, path + ": no pagemap of CRIU"};
  Pagemap map;
  criu::PagemapHead head;
  if (!image.next(head)) return damaged_image(path);
  map.pages_id = head.pages_id();
  while (!image.at_end()) {
    criu::PagemapEntry e;
    if (!image.next(e)) return damaged_image(path);
    const std::uint32_t flags = e.has_flags() ? e.flags() : e.in_parent() ? kInParent : kPresent;
    if (e.vaddr() % kPage) return Error{EIO, path + ": an entry does not begin with a page"};
    if (e.vaddr() + e.nr_pages() * kPage < e.vaddr() || (!map.entries.empty() && e.vaddr() < map.entries.back().end())) return Error{EIO, path + ": its entries overlap"};
    map.entries.push_back({e.vaddr(), e.nr_pages(), flags, map.present});
    if (flags & kPresent) map.present += e.nr_pages();
  }
  return map;
}

Status write_pagemap(const std::string& path, const Pagemap& map) {
  NewCriuImage image(kPagemapMagic);
  criu::PagemapHead head;
  head.set_pages_id(map.pages_id);
  image.add(head);
  for (const Entry& e : map.entries) {
    criu::PagemapEntry m;
    m.set_vaddr(e.vaddr);
    m.set_nr_pages(e.pages);
    m.set_flags(e.flags);
    image.add(m);
  }
  return image.replace(path);
}

/// Pages of a file that it has nothing of, which is zeros.
struct Hole {
  std::uint64_t first, end;  // numbers of pages
};

/// pages-ID.img in memory.
class Pages {
 public:
  static Result<Pages> open(const std::string& path, std::uint64_t pages, bool write) {
    Pages p;
    p.fd_ = Fd(::open(path.c_str(), (write ? O_RDWR : O_RDONLY) | O_CLOEXEC));
    struct stat st;
    if (p.fd_.n < 0 || fstat(p.fd_.n, &st)) return sys_error("opening " + path);
    if (static_cast<std::uint64_t>(st.st_size) != pages * kPage)
      return Error{EIO, path + " has " + std::to_string(st.st_size) + " bytes, its pagemap says " + std::to_string(pages * kPage)};
    p.size_ = pages * kPage;
    if (!p.size_) return p;
    void* m = mmap(nullptr, p.size_, PROT_READ, MAP_SHARED, p.fd_.n, 0);
    if (m == MAP_FAILED) return sys_error("mapping " + path);
    p.data_ = static_cast<const char*>(m);
    return p;
  }
  Pages() = default;
  Pages(Pages&& o) noexcept : fd_(std::move(o.fd_)), data_(std::exchange(o.data_, nullptr)), size_(o.size_) {}
  Pages& operator=(Pages&&) = delete;
  ~Pages() {
    if (data_) munmap(const_cast<char*>(data_), size_);
  }
  const char* page(std::uint64_t n) const { return data_ + n * kPage; }
  /// In order; where its file system cannot tell: none.
  std::vector<Hole> holes() const {
    std::vector<Hole> out;
    const auto size = static_cast<off_t>(size_);
    for (off_t at = 0, data; at >= 0 && at < size; at = lseek(fd_.n, data, SEEK_HOLE)) {
      data = lseek(fd_.n, at, SEEK_DATA);
      if (data < 0 && errno != ENXIO) break;
      if (data < 0) data = size;
      const std::uint64_t first = (static_cast<std::uint64_t>(at) + kPage - 1) / kPage, end = static_cast<std::uint64_t>(data) / kPage;
      if (first < end) out.push_back({first, end});
      if (data == size) break;
    }
    return out;
  }
  /// Pages to before where they are. Not through the memory: where there is no room for what is written, or it cannot be read, the
  /// kernel ends whoever touches that.
  Status move_down(std::uint64_t to, std::uint64_t from, std::uint64_t pages) const {
    const std::size_t apart = (from - to) * kPage;  // what is written must not be what is read in the same call
    for (std::size_t done = 0, bytes = pages * kPage; done < bytes;) {
      const ssize_t n = pwrite(fd_.n, page(from) + done, std::min(apart, bytes - done), static_cast<off_t>(to * kPage + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return sys_error("moving pages of an image", n ? errno : ENOSPC);
      done += static_cast<std::size_t>(n);
    }
    return {};
  }
  Status cut(std::uint64_t pages) const {
    if (ftruncate(fd_.n, static_cast<off_t>(pages * kPage))) return sys_error("shortening an image of pages");
    return {};
  }

 private:
  Fd fd_;
  const char* data_ = nullptr;
  std::size_t size_ = 0;
};

/// A process's memory in one folder of images. What a pre-dump leaves out is in the one that it refers to.
struct Layer {
  Pagemap map;
  Pages pages;

  /// @param at  where the page before it was found, or null
  const Entry* find(std::uint64_t vaddr, const Entry* at) const {
    if (at && vaddr >= at->vaddr && vaddr < at->end()) return at;
    auto next = std::upper_bound(map.entries.begin(), map.entries.end(), vaddr, [](std::uint64_t v, const Entry& e) { return v < e.vaddr; });
    return next == map.entries.begin() || vaddr >= (--next)->end() ? nullptr : &*next;
  }
};

Result<Layer> open_layer(const std::string& folder, const std::string& name, bool write) {
  auto map = read_pagemap(folder + "/" + name);
  if (!map) return map.error();
  auto pages = Pages::open(folder + "/pages-" + std::to_string(map->pages_id) + ".img", map->present, write);
  if (!pages) return pages.error();
  return Layer{std::move(*map), std::move(*pages)};
}

/// The pre-dump in `folder` and those before it, the newest first.
Result<std::vector<Layer>> layers_of(std::string folder, const std::string& name) {
  std::vector<Layer> all;
  for (; fs::exists(folder + "/" + name); folder += "/parent") {
    if (all.size() == kPreCopyRoundsMax) return Error{EIO, folder + ": too many pre-dumps refer to each other"};
    auto layer = open_layer(folder, name, false);
    if (!layer) return layer.error();
    all.push_back(std::move(*layer));
  }
  return all;
}

/// The page at `vaddr` of a process, as the newest pre-dump has it. Null: none does.
/// @param at  where the page before it was found, of each layer
const char* page_before(const std::vector<Layer>& layers, std::uint64_t vaddr, std::vector<const Entry*>& at) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    at[i] = layers[i].find(vaddr, at[i]);
    if (!at[i]) return nullptr;
    if (at[i]->present()) return layers[i].pages.page(at[i]->at + (vaddr - at[i]->vaddr) / kPage);
    if (!(at[i]->flags & kInParent)) return nullptr;
  }
  return nullptr;
}

using FoundRun = std::function<void(std::uint64_t from, std::uint64_t to, std::size_t layer, const Entry* entry)>;
/// Each part of [vaddr, end) that lies in one piece in the newest pre-dump that has it, by address. Without an entry: none has it.
void each_run(const std::vector<Layer>& layers, std::uint64_t vaddr, std::uint64_t end, const FoundRun& found, std::size_t in = 0) {
  while (vaddr < end) {
    if (in == layers.size()) return found(vaddr, end, in, nullptr);
    const auto& entries = layers[in].map.entries;
    const auto e = std::partition_point(entries.begin(), entries.end(), [&](const Entry& x) { return x.end() <= vaddr; });
    const bool has = e != entries.end() && e->vaddr <= vaddr;
    const std::uint64_t to = std::min(end, has ? e->end() : e != entries.end() ? e->vaddr : end);
    if (has && !e->present() && e->flags & kInParent) each_run(layers, vaddr, to, found, in + 1);
    else found(vaddr, to, in, has && e->present() ? &*e : nullptr);
    vaddr = to;
  }
}

/// What both have; each by address.
std::vector<MemoryPart> in_both(std::span<const MemoryPart> a, std::span<const MemoryPart> b) {
  std::vector<MemoryPart> out;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    const std::uint64_t start = std::max(x->start, y->start), x_end = x->start + x->bytes, y_end = y->start + y->bytes, end = std::min(x_end, y_end);
    if (start < end) out.push_back({start, end - start});
    ++(x_end < y_end ? x : y);
  }
  return out;
}

std::size_t processors() { return std::clamp(std::thread::hardware_concurrency(), 1u, 8u); }

/// The pages of a dump beside the pre-dumps' of the same addresses. The program stands still meanwhile, so by several threads: one
/// processor compares far less than memory can give.
class Comparison {
 public:
  Comparison(const std::vector<Layer>& before, const Layer& now) : before_(before), now_(now), equal_(now.map.present) {
    for (const Entry& e : now.map.entries)
      for (std::uint64_t n = 0; e.present() && n < e.pages; n += kPart) parts_.push_back({&e, n, std::min(n + kPart, std::uint64_t{e.pages})});
    const std::size_t threads = std::min(processors(), parts_.size());
    std::vector<std::jthread> others;
    try {
      for (std::size_t n = 1; n < threads; ++n) others.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // no more of them: it takes longer
    }
    work();
  }
  /// @param n  in pages-ID.img
  bool equal(std::uint64_t n) const { return equal_[n]; }

 private:
  static constexpr std::uint64_t kPart = 4096;
  struct Part {
    const Entry* entry;
    std::uint64_t first, end;
  };

  void work() {
    std::vector<const Entry*> at(before_.size());
    for (std::size_t n; (n = next_++) < parts_.size();) {
      const Part& part = parts_[n];
      for (std::uint64_t i = part.first; i < part.end; ++i) equal_[part.entry->at + i] = same(*part.entry, i, at);
    }
  }
  bool same(const Entry& e, std::uint64_t n, std::vector<const Entry*>& at) const {
    const char* const before = page_before(before_, e.vaddr + n * kPage, at);
    return before && !memcmp(before, now_.pages.page(e.at + n), kPage);
  }

  const std::vector<Layer>& before_;
  const Layer& now_;
  std::vector<char> equal_;  // a byte each: threads write beside each other
  std::vector<Part> parts_;
  std::atomic<std::size_t> next_{0};
};

Status drop_one(const std::string& images, const std::string& parent, const std::string& name, PageCounts& counts) {
  auto before = layers_of(parent, name);
  auto dump = open_layer(images, name, true);
  if (!before) return before.error();
  if (!dump) return dump.error();
  const Pages& now = dump->pages;

  Pagemap out;
  out.pages_id = dump->map.pages_id;
  const auto add = [&](const Entry& e) {
    if (!out.entries.empty() && out.entries.back().flags == e.flags && out.entries.back().end() == e.vaddr)
      out.entries.back().pages += e.pages;
    else
      out.entries.push_back(e);
  };
  const Comparison compared(*before, *dump);
  for (const Entry& e : dump->map.entries) {
    if (!e.present()) {
      add(e);
      if (e.flags & kInParent) counts.unchanged += e.pages;
      continue;
    }
    for (std::uint32_t n = 0; n < e.pages;) {
      bool equal = compared.equal(e.at + n);
      std::uint32_t pages = 1;
      while (n + pages < e.pages && compared.equal(e.at + n + pages) == equal) pages++;
      equal = equal && (pages >= kShortestRun || pages == e.pages);
      add({e.vaddr + n * kPage, pages, equal ? (e.flags & ~kPresent) | kInParent : e.flags, 0});
      if (equal) {
        counts.unchanged += pages;
      } else {
        // Earlier pages have only moved down: what is read here is still as it was.
        if (out.present != e.at + n)
          if (auto s = now.move_down(out.present, e.at + n, pages); !s) return s;
        out.present += pages;
        counts.kept += pages;
      }
      n += pages;
    }
  }
  if (auto s = now.cut(out.present); !s) return s;
  return write_pagemap(images + "/" + name, out);
}

/* ---- zeros ------------------------------------------------------------------------ */

/// Of a process those parts of its memory that are zero where its images say nothing, by address.
Result<std::vector<MemoryPart>> zero_unless_said(const std::string& images, const std::string& process) {
  if (process.starts_with("shmem-")) return std::vector<MemoryPart>{{0, ~(kPage - 1)}};  // as any that is made
  const std::string path = images + "/mm-" + process + ".img";
  CriuImage image(path);
  criu::Mm mm;
  if (!image.is(kMmMagic)) return Error{EINVAL, path + ": no memory map of CRIU"};
  if (!image.next(mm)) return damaged_image(path);
  std::vector<MemoryPart> parts;
  std::uint64_t last = 0;
  for (const auto& vma : mm.vmas()) {
    if (vma.start() < last || vma.end() <= vma.start() || (vma.start() | vma.end()) % kPage) return damaged_image(path);
    last = vma.end();
    if ((vma.status() & (kAnonymousPrivate | kAioRing)) == kAnonymousPrivate) append(parts, {vma.start(), vma.end() - vma.start()});
  }
  return parts;
}

Result<std::uint64_t> leave_out_zeros_of(const std::string& images, const std::string& name, const std::string& process) {
  auto map = read_pagemap(images + "/" + name);
  auto layers = layers_of(images + "/parent", name);
  auto among = zero_unless_said(images, process);
  if (!map) return map.error();
  if (!layers) return layers.error();
  if (!among) return among.error();
  std::vector<std::vector<Hole>> holes;
  for (const Layer& layer : *layers) holes.push_back(layer.pages.holes());
  Pagemap out{map->pages_id, {}, map->present};
  std::uint64_t pages = 0;
  std::span<const MemoryPart> left(*among);  // what does not end before the entry
  for (const Entry& e : map->entries) {
    while (!left.empty() && left.front().start + left.front().bytes <= e.vaddr) left = left.subspan(1);
    std::vector<MemoryPart> zeros;
    if (!e.present() && e.flags & kInParent)
      each_run(*layers, e.vaddr, e.end(), [&](std::uint64_t from, std::uint64_t to, std::size_t layer, const Entry* in) {
        if (!in) return;  // nowhere: CRIU says so
        const std::uint64_t first = in->at + (from - in->vaddr) / kPage, last = first + (to - from) / kPage;
        const auto& all = holes[layer];
        for (auto h = std::partition_point(all.begin(), all.end(), [&](const Hole& x) { return x.end <= first; }); h != all.end() && h->first < last; ++h) {
          const std::uint64_t a = std::max(first, h->first), b = std::min(last, h->end);
          append(zeros, {from + (a - first) * kPage, (b - a) * kPage});
        }
      });
    std::uint64_t at = e.vaddr;
    const auto keep_until = [&](std::uint64_t end) {
      if (at < end) out.entries.push_back({at, static_cast<std::uint32_t>((end - at) / kPage), e.flags, e.at});
    };
    for (const MemoryPart& z : in_both(zeros, left)) {
      if (z.bytes < kShortestRun * kPage) continue;
      keep_until(z.start);
      at = z.start + z.bytes;
      pages += z.bytes / kPage;
    }
    keep_until(e.end());
  }
  if (pages)
    if (auto s = write_pagemap(images + "/" + name, out); !s) return s.error();
  return pages;
}

/* ---- memory of a process that runs -------------------------------------------------- */

/// Pages that lie one behind the other in a process and in an image.
struct Run {
  std::uint64_t vaddr = 0, pages = 0;
  const char* before = nullptr;
  char* differs = nullptr;  // a byte for each
};

/// Of memory those pages that are not marked as written, and may be.
struct Suspects {
  std::vector<Run> runs;            // to be compared
  std::vector<MemoryPart> unknown;  // in no image, or not there; by address
  std::uint64_t pages = 0;          // in runs
  std::uint64_t spared = 0;         // pages in images, of no suspect part

  /// @param pagemap  /proc/PID/pagemap
  /// @param among    suspect parts of `parts`, by address
  static Result<Suspects> of(const std::string& pagemap, const std::vector<Layer>& layers, const std::vector<MemoryPart>& parts, const std::vector<MemoryPart>& among) {
    Suspects s;
    const Fd fd(::open(pagemap.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd.n < 0) return sys_error("opening " + pagemap);
    auto suspect = among.begin();
    for (const MemoryPart& part : parts) {
      std::uint64_t at = part.start;
      for (const std::uint64_t end = part.start + part.bytes; at < end;) {
        const bool more = suspect != among.end() && suspect->start < end;
        s.spare(layers, at, more ? suspect->start : end);
        if (!more) break;
        if (auto done = s.look_at(pagemap, fd, layers, *suspect); !done) return done.error();
        at = suspect->start + suspect->bytes;
        ++suspect;
      }
    }
    return s;
  }

 private:
  static constexpr std::uint64_t kAtOnce = 4096, kSoftDirty = 1ull << 55, kThere = 1ull << 63;

  // Whether it is marked makes no difference.
  void spare(const std::vector<Layer>& layers, std::uint64_t from, std::uint64_t end) {
    each_run(layers, from, end, [this](std::uint64_t first, std::uint64_t to, std::size_t, const Entry* e) {
      if (e) spared += (to - first) / kPage;
      else append(unknown, {first, to - first});
    });
  }

  Status look_at(const std::string& pagemap, const Fd& fd, const std::vector<Layer>& layers, const MemoryPart& part) {
    std::vector<std::uint64_t> marks(std::min(kAtOnce, part.bytes / kPage));
    std::vector<const Entry*> at(layers.size());
    for (std::uint64_t first = 0, all = part.bytes / kPage; first < all; first += kAtOnce) {
      const std::uint64_t n = std::min(all - first, kAtOnce), page = part.start / kPage + first;
      if (pread(fd.n, marks.data(), n * sizeof marks[0], static_cast<off_t>(page * sizeof marks[0])) != static_cast<ssize_t>(n * sizeof marks[0]))
        return sys_error("reading " + pagemap);
      for (std::uint64_t i = 0; i < n; ++i) add((page + i) * kPage, marks[i], layers, at);
    }
    return {};
  }

  void add(std::uint64_t vaddr, std::uint64_t mark, const std::vector<Layer>& layers, std::vector<const Entry*>& at) {
    if (mark & kSoftDirty) return;  // CRIU finds it
    const char* const before = mark & kThere ? page_before(layers, vaddr, at) : nullptr;
    if (!before) return append(unknown, {vaddr, kPage});
    ++pages;
    if (!runs.empty() && runs.back().pages < kRunPages && runs.back().vaddr + runs.back().pages * kPage == vaddr && runs.back().before + runs.back().pages * kPage == before)
      ++runs.back().pages;
    else
      runs.push_back({vaddr, 1, before, nullptr});
  }
};

/// Aside. What it cannot read differs.
/// @param buffer  of kRunPages
[[noreturn]] void compare(pid_t pid, const std::vector<Run>& runs, std::size_t first, std::size_t step, char* buffer) {
  setpriority(PRIO_PROCESS, 0, -20);  // its QPs stand still meanwhile, and its threads may poll for what does not come
  for (std::size_t r = first; r < runs.size(); r += step) {
    const Run& run = runs[r];
    iovec here{buffer, run.pages * kPage}, there{reinterpret_cast<void*>(run.vaddr), run.pages * kPage};
    const ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    for (std::uint64_t i = 0; i < run.pages && static_cast<ssize_t>((i + 1) * kPage) <= got; ++i)
      run.differs[i] = memcmp(buffer + i * kPage, run.before + i * kPage, kPage) != 0;
  }
  _exit(0);
}

/// @return false: not all have come to their end in time, or by themselves
bool wait_for_all(const std::vector<pid_t>& children, int limit_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
  bool all = true;
  for (const pid_t child : children) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    all = exit_of(child, static_cast<int>(std::max<std::int64_t>(left, 0))) && all;
  }
  return all;
}

/// Shared with children.
class SharedBytes {
 public:
  explicit SharedBytes(std::size_t n) : size_(n), data_(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;
  ~SharedBytes() {
    if (data()) munmap(data_, size_);
  }
  char* data() const { return data_ == MAP_FAILED ? nullptr : static_cast<char*>(data_); }

 private:
  std::size_t size_;
  void* data_;
};

/// @param work  of a pagemap that is in both folders: its name, and of what in it, as in mm-*.img
Status each_with_parent(const std::string& images, const std::string& parent, const std::function<Status(const std::string&, const std::string&)>& work) {
  constexpr std::string_view kBefore = "pagemap-", kAfter = ".img";
  std::error_code ec;
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(images, ec)) names.push_back(e.path().filename());
  if (ec) return Error{ec.value(), "reading folder " + images + ": " + ec.message()};
  for (const std::string& name : names) {
    if (!name.starts_with(kBefore) || !name.ends_with(kAfter) || !fs::exists(parent + "/" + name)) continue;
    if (auto s = work(name, name.substr(kBefore.size(), name.size() - kBefore.size() - kAfter.size())); !s) return s;
  }
  return {};
}

}  // namespace

void append(std::vector<MemoryPart>& to, const MemoryPart& part, std::uint64_t gap) {
  if (!to.empty() && part.start - to.back().start <= to.back().bytes + gap) to.back().bytes = std::max(to.back().bytes, part.start + part.bytes - to.back().start);
  else to.push_back(part);
}

Result<Changed> changed_since(const std::string& parent, int number, pid_t pid, const std::string& pagemap, const std::vector<MemoryPart>& parts, const std::vector<MemoryPart>& suspect_parts,
                              int limit_ms) {
  const std::string name = "pagemap-" + std::to_string(number) + ".img";
  auto layers = layers_of(parent, name);
  if (!layers) return layers.error();
  if (layers->empty()) return Error{ENOENT, parent + "/" + name + " is not there"};
  auto suspects = Suspects::of(pagemap, *layers, parts, in_both(parts, suspect_parts));
  if (!suspects) return suspects.error();

  std::vector<Run>& runs = suspects->runs;
  const std::size_t workers = std::min(processors(), runs.size());
  const SharedBytes differs(suspects->pages + 1);
  if (!differs.data()) return sys_error("memory for the comparison of pages");
  memset(differs.data(), 1, suspects->pages);
  char* next = differs.data();
  for (Run& run : runs) run.differs = std::exchange(next, next + run.pages);
  std::vector<char> buffer(kRunPages * kPage);  // each child has one of its own, once it is written to
  std::vector<pid_t> children;
  for (std::size_t w = 0; w < workers; ++w) {
    const pid_t child = fork_aside();
    if (!child) compare(pid, runs, w, workers, buffer.data());
    if (child > 0) children.push_back(child);  // else what it would have compared differs
  }
  if (!wait_for_all(children, limit_ms)) return Error{ETIMEDOUT, "the memory of process " + std::to_string(pid) + " cannot be read in time"};

  Changed out{.parts = {}, .unchanged = suspects->spared, .compared = suspects->pages, .spared = suspects->spared};
  std::vector<MemoryPart> differ, all;
  for (const Run& run : runs)
    for (std::uint64_t i = 0; i < run.pages; ++i)
      if (run.differs[i]) append(differ, {run.vaddr + i * kPage, kPage});
      else ++out.unchanged;
  const auto before = [](const MemoryPart& a, const MemoryPart& b) { return a.start < b.start; };
  std::merge(differ.begin(), differ.end(), suspects->unknown.begin(), suspects->unknown.end(), std::back_inserter(all), before);
  for (const MemoryPart& part : all) append(out.parts, part, (kShortestRun - 1) * kPage);
  return out;
}

Result<PageCounts> drop_unchanged(const std::string& images, const std::string& parent) {
  PageCounts counts;
  const auto s = each_with_parent(images, parent, [&](const std::string& name, const std::string&) { return drop_one(images, parent, name, counts); });
  return s ? Result<PageCounts>(counts) : s.error();
}

Result<std::uint64_t> leave_out_zeros(const std::string& images) {
  std::uint64_t pages = 0;
  const auto s = each_with_parent(images, images + "/parent", [&](const std::string& name, const std::string& process) -> Status {
    const auto n = leave_out_zeros_of(images, name, process);
    if (n) pages += *n;
    return n;
  });
  return s ? Result<std::uint64_t>(pages) : s.error();
}

}  // namespace migr
