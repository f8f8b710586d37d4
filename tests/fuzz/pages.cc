// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// CRIU's images of memory, of a dump and of the pre-dump before it: pagemaps as they are or entry by entry, so that mutations need
// not get the lengths right, and pages of one letter each. Then what of them are zeros, by the dump's map of memory.
#include "agent/page_images.h"

#include <filesystem>

#include "criu_memory.pb.h"
#include "seeds.h"

namespace {

namespace fs = std::filesystem;
namespace criu = migr::criu;
constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kImageMagic = 0x54564319, kPagemapMagic = 0x56084025, kMmMagic = 0x57492820, kParent = 1, kPresent = 4;

/// Of a part of the input, its first byte: what the rest is. Small letters: of the dump; capital ones: of the pre-dump.
enum Kind : char { kRaw = 'r',      // bytes of the pagemap
                   kMessage = 'm',  // a message of it, without its length
                   kLetters = 'p',  // '0': a hole
                   kVmas = 'v' };   // what mm-7.img says, without its length: of the dump

std::string framed(std::string_view message) { return bytes_of(static_cast<std::uint32_t>(message.size())).append(message); }
std::string magic(std::uint32_t of = kPagemapMagic) { return bytes_of(kImageMagic) + bytes_of(of); }
std::string entry(std::uint64_t page, std::uint32_t pages, std::uint32_t flags) {
  criu::PagemapEntry e;
  e.set_vaddr(0x7f0000000000 + page * kPage);
  e.set_nr_pages(pages);
  e.set_flags(flags);
  return e.SerializeAsString();
}
std::string head() {
  criu::PagemapHead h;
  h.set_pages_id(1);
  return h.SerializeAsString();
}
std::string vmas(std::uint64_t pages, std::uint32_t status) {
  criu::Mm mm;
  for (const std::uint64_t first : {std::uint64_t{0}, pages}) {
    auto* v = mm.add_vmas();
    v->set_start(0x7f0000000000 + first * kPage);
    v->set_end(v->start() + pages * kPage);
    v->set_status(first ? status : 1 << 9);
  }
  return mm.SerializeAsString();
}
std::string of(char kind, const std::string& text) { return part(kind + text); }

struct Folder {
  fs::path path;
  std::string map, letters, vmas;
};
void put(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
void put_pages(const fs::path& path, const std::string& letters) {
  put(path, "");
  fs::resize_file(path, letters.size() * kPage);
  std::fstream f(path, std::ios::binary | std::ios::in | std::ios::out);
  for (std::size_t i = 0; i < letters.size(); ++i)
    if (letters[i] != '0') f.seekp(static_cast<std::streamoff>(i * kPage)) << std::string(kPage, letters[i]);
}

}  // namespace

std::vector<std::string> seeds() {
  const std::string heads = of('m', head()) + of('M', head());
  const std::string same(20, 'a'), change = std::string(10, 'a') + "b" + std::string(9, 'a');
  const std::string raw = magic() + framed(head()) + framed(entry(0, 4, kPresent)) + framed(entry(4, 2, kParent));
  return {heads + of('m', entry(0, 20, kPresent)) + of('M', entry(0, 20, kPresent)) + of('p', same) + of('P', change),
          heads + of('m', entry(0, 10, kPresent)) + of('m', entry(10, 10, kPresent)) + of('M', entry(4, 16, kPresent)) + of('M', entry(30, 4, kParent)) + of('p', same) + of('P', same.substr(4)),
          heads + of('m', entry(0, 30, kParent)) + of('M', entry(0, 30, kPresent)) + of('P', std::string(10, 'a') + std::string(20, '0')) + of('v', vmas(15, 1 << 6)),
          heads + of('m', entry(2, 30, kParent)) + of('M', entry(0, 40, kPresent)) + of('P', std::string(40, '0')) + of('v', vmas(18, 1 << 9 | 1 << 13)),
          of('r', raw) + of('R', raw) + of('p', "abcd") + of('P', "abcd")};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const struct Place {
    Place() : path(own_folder()) {
      fs::create_directory(path / "now");
      fs::create_directory(path / "before");
      fs::create_directory_symlink("../before", path / "now/parent");
    }
    ~Place() { fs::remove_all(path); }
    const fs::path path;
  } place;
  Folder now{place.path / "now", "", "", ""}, before{place.path / "before", "", "", ""};
  for (const std::string_view p : parts(data, size)) {
    if (p.empty()) continue;
    Folder& f = p[0] >= 'a' ? now : before;
    switch (p[0] | 0x20) {
      case kRaw: f.map = p.substr(1); break;
      case kMessage: f.map = (f.map.empty() ? magic() : f.map) + framed(p.substr(1)); break;
      case kLetters: f.letters = p.substr(1, 64); break;
      case kVmas: f.vmas = p.substr(1); break;
    }
  }
  for (const Folder* f : {&now, &before}) {
    put(f->path / "pagemap-7.img", f->map);
    put_pages(f->path / "pages-1.img", f->letters);
  }
  put(now.path / "mm-7.img", magic(kMmMagic) + framed(now.vmas));
  const auto r = migr::drop_unchanged(now.path, before.path);
  if (!r) {
    always(!r.error().text.empty(), "a refusal has its reason");
    return 0;
  }
  always(r->kept + r->unchanged >= now.letters.size(), "every page of the dump is kept or left to the pre-dump");
  always(fs::file_size(now.path / "pages-1.img") == r->kept * kPage, "what is kept is there, and no more");
  const auto again = migr::drop_unchanged(now.path, before.path);
  always(again && again->kept + again->unchanged == r->kept + r->unchanged, "what was written can be read");
  const auto zeros = migr::leave_out_zeros(now.path);
  always(zeros || !zeros.error().text.empty(), "a refusal has its reason");
  const auto after = migr::drop_unchanged(now.path, before.path);
  always(after && after->kept + after->unchanged + (zeros ? *zeros : 0) == again->kept + again->unchanged, "without zeros it can still be read");
  return 0;
}
