// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "page_images.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
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
constexpr std::uint64_t kAtOnce = 64;  // pages that are read at once: what a processor has in its cache
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

/// pages-ID.img. It is not mapped: copying a page takes a tenth of what a page of a mapping does.
class Pages {
 public:
  static Result<Pages> open(const std::string& path, std::uint64_t pages, bool write) {
    Pages p;
    p.path_ = path;
    p.fd_ = Fd(::open(path.c_str(), (write ? O_RDWR : O_RDONLY) | O_CLOEXEC));
    struct stat st;
    if (p.fd_.n < 0 || fstat(p.fd_.n, &st)) return sys_error("opening " + path);
    if (static_cast<std::uint64_t>(st.st_size) != pages * kPage)
      return Error{EIO, path + " has " + std::to_string(st.st_size) + " bytes, its pagemap says " + std::to_string(pages * kPage)};
    return p;
  }
  Status read(std::uint64_t first, std::uint64_t pages, char* to) const {
    return whole(first, pages, "reading ", [&](std::size_t at, std::size_t size, off_t where) { return pread(fd_.n, to + at, size, where); });
  }
  Status write(std::uint64_t first, std::uint64_t pages, const char* from) const {
    return whole(first, pages, "writing ", [&](std::size_t at, std::size_t size, off_t where) { return pwrite(fd_.n, from + at, size, where); });
  }
  Status cut(std::uint64_t pages) const {
    if (ftruncate(fd_.n, static_cast<off_t>(pages * kPage))) return sys_error("shortening " + path_);
    return {};
  }

 private:
  template <class Some>
  Status whole(std::uint64_t first, std::uint64_t pages, const char* what, Some some) const {
    for (std::size_t at = 0, size = pages * kPage; at < size;) {
      const ssize_t n = some(at, size - at, static_cast<off_t>(first * kPage + at));
      if (n < 0 && errno != EINTR) return sys_error(what + path_);
      if (n == 0) return Error{EIO, path_ + ": it has become shorter"};
      if (n > 0) at += static_cast<std::size_t>(n);
    }
    return {};
  }

  std::string path_;
  Fd fd_;
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

/// The pages of a dump beside the pre-dumps' of the same addresses. The program stands still meanwhile, so by several threads.
class Comparison {
 public:
  Comparison(const std::vector<Layer>& before, const Layer& now) : before_(before), now_(now), equal_(now.map.present) {
    for (const Entry& e : now.map.entries)
      for (std::uint64_t n = 0; e.present() && n < e.pages; n += kAtOnce) parts_.push_back({&e, n, std::min(kAtOnce, e.pages - n)});
  }
  Status run() {
    const std::size_t threads = std::min<std::size_t>({std::max(std::thread::hardware_concurrency(), 1u), kThreads, parts_.size()});
    {
      std::vector<std::jthread> others;
      try {
        for (std::size_t n = 1; n < threads; ++n) others.emplace_back([this] { work(); });
      } catch (const std::system_error&) {  // no more of them: it takes longer
      }
      work();
    }
    return failed_ ? Status(*failed_) : Status();
  }
  /// @param n  in pages-ID.img
  bool equal(std::uint64_t n) const { return equal_[n]; }

 private:
  static constexpr std::size_t kThreads = 8;
  struct Part {
    const Entry* entry;
    std::uint64_t first, pages;
  };
  struct Place {
    const Layer* layer = nullptr;  // null: no pre-dump has it
    std::uint64_t page = 0;
  };

  void work() {
    std::vector<char> now(kAtOnce * kPage), before(kAtOnce * kPage);
    std::vector<const Entry*> at(before_.size());
    for (std::size_t n; (n = next_++) < parts_.size();)
      if (auto s = compare(parts_[n], now.data(), before.data(), at); !s) {
        std::lock_guard guard(lock_);
        failed_ = s.error();
        next_ = parts_.size();
      }
  }
  Status compare(const Part& part, char* now, char* before, std::vector<const Entry*>& at) {
    const std::uint64_t first = part.entry->at + part.first, vaddr = part.entry->vaddr + part.first * kPage;
    if (auto s = now_.pages.read(first, part.pages, now); !s) return s;
    for (std::uint64_t i = 0; i < part.pages;) {
      const Place from = place(vaddr + i * kPage, at);
      std::uint64_t run = 1;
      for (; from.layer && i + run < part.pages; ++run) {
        const Place next = place(vaddr + (i + run) * kPage, at);
        if (next.layer != from.layer || next.page != from.page + run) break;
      }
      if (from.layer)
        if (auto s = from.layer->pages.read(from.page, run, before); !s) return s;
      for (std::uint64_t k = 0; from.layer && k < run; ++k) equal_[first + i + k] = !memcmp(now + (i + k) * kPage, before + k * kPage, kPage);
      i += run;
    }
    return {};
  }
  Place place(std::uint64_t vaddr, std::vector<const Entry*>& at) const {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      at[i] = before_[i].find(vaddr, at[i]);
      if (!at[i]) return {};
      if (at[i]->present()) return {&before_[i], at[i]->at + (vaddr - at[i]->vaddr) / kPage};
      if (!(at[i]->flags & kInParent)) return {};
    }
    return {};
  }

  const std::vector<Layer>& before_;
  const Layer& now_;
  std::vector<char> equal_;  // a byte each: threads write beside each other
  std::vector<Part> parts_;
  std::atomic<std::size_t> next_{0};
  std::mutex lock_;
  std::optional<Error> failed_;
};

/// @param to  not behind `from`
Status move_down(const Pages& pages, std::uint64_t from, std::uint64_t to, std::uint64_t count) {
  if (from == to) return {};
  std::vector<char> buffer(std::min(count, kAtOnce) * kPage);
  for (std::uint64_t n = 0; n < count; n += kAtOnce) {
    const std::uint64_t some = std::min(kAtOnce, count - n);
    if (auto s = pages.read(from + n, some, buffer.data()); !s) return s;
    if (auto s = pages.write(to + n, some, buffer.data()); !s) return s;
  }
  return {};
}

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
  Comparison compared(*before, *dump);
  if (auto s = compared.run(); !s) return s;
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
        if (auto s = move_down(now, e.at + n, out.present, pages); !s) return s;
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
