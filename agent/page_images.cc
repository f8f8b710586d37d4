// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "page_images.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "criu_pagemap.pb.h"
#include "file_tree.h"
#include "limits.h"
#include "process_session.h"  // Fd

namespace migr {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kImageMagic = 0x54564319, kPagemapMagic = 0x56084025;
constexpr std::uint32_t kInParent = 1, kPresent = 4;
constexpr std::size_t kPage = 4096;
// An entry costs CRIU a read of its own: fewer equal pages than this between others are not worth one.
constexpr std::uint32_t kShortestRun = 8;

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
  const std::string bytes = text_of(path);
  const Error broken{EIO, path + ": damaged"};
  std::size_t at = 0;
  const auto number = [&](std::uint32_t& n) {
    if (bytes.size() - at < sizeof n) return false;
    memcpy(&n, bytes.data() + at, sizeof n);
    at += sizeof n;
    return true;
  };
  const auto message = [&](google::protobuf::Message& m) {
    std::uint32_t size;
    if (!number(size) || bytes.size() - at < size || !m.ParseFromArray(bytes.data() + at, static_cast<int>(size))) return false;
    at += size;
    return true;
  };
  std::uint32_t magic[2];
  if (!number(magic[0]) || !number(magic[1]) || magic[0] != kImageMagic || magic[1] != kPagemapMagic)
    return Error{EINVAL, path + ": no pagemap of CRIU"};
  Pagemap map;
  criu::PagemapHead head;
  if (!message(head)) return broken;
  map.pages_id = head.pages_id();
  while (at < bytes.size()) {
    criu::PagemapEntry e;
    if (!message(e)) return broken;
    const std::uint32_t flags = e.has_flags() ? e.flags() : e.in_parent() ? kInParent : kPresent;
    if (!map.entries.empty() && e.vaddr() < map.entries.back().end()) return Error{EIO, path + ": its entries overlap"};
    map.entries.push_back({e.vaddr(), e.nr_pages(), flags, map.present});
    if (flags & kPresent) map.present += e.nr_pages();
  }
  return map;
}

Status write_pagemap(const std::string& path, const Pagemap& map) {
  std::string bytes;
  const auto number = [&](std::uint32_t n) { bytes.append(reinterpret_cast<const char*>(&n), sizeof n); };
  const auto message = [&](const google::protobuf::Message& m) {
    number(static_cast<std::uint32_t>(m.ByteSizeLong()));
    m.AppendToString(&bytes);
  };
  number(kImageMagic);
  number(kPagemapMagic);
  criu::PagemapHead head;
  head.set_pages_id(map.pages_id);
  message(head);
  for (const Entry& e : map.entries) {
    criu::PagemapEntry m;
    m.set_vaddr(e.vaddr);
    m.set_nr_pages(e.pages);
    m.set_flags(e.flags);
    message(m);
  }
  std::ofstream f(path, std::ios::binary | std::ios::trunc);
  f << bytes << std::flush;
  if (!f) return sys_error("writing " + path);
  return {};
}

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
    void* m = mmap(nullptr, p.size_, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, p.fd_.n, 0);
    if (m == MAP_FAILED) return sys_error("mapping " + path);
    p.data_ = static_cast<char*>(m);
    return p;
  }
  Pages() = default;
  Pages(Pages&& o) noexcept : fd_(std::move(o.fd_)), data_(std::exchange(o.data_, nullptr)), size_(o.size_) {}
  Pages& operator=(Pages&&) = delete;
  ~Pages() {
    if (data_) munmap(data_, size_);
  }
  char* page(std::uint64_t n) const { return data_ + n * kPage; }
  Status cut(std::uint64_t pages) const {
    if (ftruncate(fd_.n, static_cast<off_t>(pages * kPage))) return sys_error("shortening an image of pages");
    return {};
  }

 private:
  Fd fd_;
  char* data_ = nullptr;
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

/// The pages of a dump beside the pre-dumps' of the same addresses. The program stands still meanwhile, so by several threads: one
/// processor compares far less than memory can give.
class Comparison {
 public:
  Comparison(const std::vector<Layer>& before, const Layer& now) : before_(before), now_(now), equal_(now.map.present) {
    for (const Entry& e : now.map.entries)
      for (std::uint64_t n = 0; e.present() && n < e.pages; n += kPart) parts_.push_back({&e, n, std::min(n + kPart, std::uint64_t{e.pages})});
    const std::size_t threads = std::min<std::size_t>({std::max(std::thread::hardware_concurrency(), 1u), kThreads, parts_.size()});
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
  static constexpr std::size_t kThreads = 8;
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
    const std::uint64_t vaddr = e.vaddr + n * kPage;
    for (std::size_t i = 0; i < before_.size(); ++i) {
      at[i] = before_[i].find(vaddr, at[i]);
      if (!at[i]) return false;
      if (at[i]->present()) return !memcmp(before_[i].pages.page(at[i]->at + (vaddr - at[i]->vaddr) / kPage), now_.pages.page(e.at + n), kPage);
      if (!(at[i]->flags & kInParent)) return false;
    }
    return false;
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
        if (out.present != e.at + n) memmove(now.page(out.present), now.page(e.at + n), pages * kPage);
        out.present += pages;
        counts.kept += pages;
      }
      n += pages;
    }
  }
  if (auto s = now.cut(out.present); !s) return s;
  return write_pagemap(images + "/" + name, out);
}

}  // namespace

Result<PageCounts> drop_unchanged(const std::string& images, const std::string& parent) {
  PageCounts counts;
  std::error_code ec;
  for (const auto& e : fs::directory_iterator(images, ec)) {
    const std::string name = e.path().filename();
    if (!name.starts_with("pagemap-") || !name.ends_with(".img") || !fs::exists(parent + "/" + name)) continue;
    if (auto s = drop_one(images, parent, name, counts); !s) return s.error();
  }
  if (ec) return Error{ec.value(), "reading folder " + images + ": " + ec.message()};
  return counts;
}

}  // namespace migr
