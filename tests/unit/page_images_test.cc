// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What drop_unchanged() and leave_out_zeros() leave of a dump, read back the way CRIU would: through the pre-dump.
#include "agent/page_images.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "criu_memory.pb.h"
#include "temp_folder.h"

namespace migr::page_images_test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kBase = 0x7f0000000000;
constexpr std::uint64_t kThere = 1ull << 63, kMarked = 1ull << 55;  // in /proc/PID/pagemap

struct Part {
  std::uint64_t first;  // page number from kBase
  std::uint32_t pages, flags;
};

class PageImages : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(dir_ + "/now");
    fs::create_directories(dir_ + "/before");
  }

  static std::string page(char c) { return std::string(kPage, c); }
  static std::string word(std::uint32_t n) { return {reinterpret_cast<const char*>(&n), sizeof n}; }
  static void put(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
  static std::string get(const std::string& path) {
    std::ifstream f(path, std::ios::binary);
    return {(std::istreambuf_iterator<char>(f)), {}};
  }

  /// pagemap-PID.img of these runs, and pages-ID.img of this content (a letter for each page).
  void image(const std::string& folder, int pid, std::uint32_t id, const std::vector<Part>& runs, const std::string& letters) {
    std::string map = word(0x54564319) + word(0x56084025), body;
    criu::PagemapHead head;
    head.set_pages_id(id);
    head.SerializeToString(&body);
    map += word(static_cast<std::uint32_t>(body.size())) + body;
    for (const Part& r : runs) {
      criu::PagemapEntry e;
      e.set_vaddr(base_ + r.first * kPage);
      e.set_nr_pages(r.pages);
      e.set_flags(r.flags);
      e.SerializeToString(&body);
      map += word(static_cast<std::uint32_t>(body.size())) + body;
    }
    std::string data;
    for (char c : letters) data += page(c);
    put(dir_ + folder + "/pagemap-" + std::to_string(pid) + ".img", map);
    put(dir_ + folder + "/pages-" + std::to_string(id) + ".img", data);
  }

  /// pages-ID.img of the same content, with nothing in it where it is '0'.
  void with_holes(const std::string& folder, std::uint32_t id, const std::string& letters) {
    const int fd = open((dir_ + folder + "/pages-" + std::to_string(id) + ".img").c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(ftruncate(fd, static_cast<off_t>(letters.size() * kPage)), 0);
    for (std::size_t i = 0; i < letters.size(); i++) {
      if (letters[i] == '0') continue;
      ASSERT_EQ(pwrite(fd, page(letters[i]).data(), kPage, static_cast<off_t>(i * kPage)), static_cast<ssize_t>(kPage));
    }
    close(fd);
  }

  struct Mapping {
    std::uint64_t first, pages;
    std::uint32_t status;
  };
  static constexpr std::uint32_t kRegular = 1, kFile = 1 << 6, kAnonymous = 1 << 9, kAioRing = 1 << 13;
  /// mm-PID.img
  void mappings(const std::string& folder, int pid, const std::vector<Mapping>& all) {
    criu::Mm mm;
    for (const Mapping& m : all) {
      auto* v = mm.add_vmas();
      v->set_start(base_ + m.first * kPage);
      v->set_end(base_ + (m.first + m.pages) * kPage);
      v->set_status(m.status);
    }
    const std::string body = mm.SerializeAsString();
    put(dir_ + folder + "/mm-" + std::to_string(pid) + ".img", word(0x54564319) + word(0x57492820) + word(static_cast<std::uint32_t>(body.size())) + body);
  }
  /// 40 pages that are all in the pre-dump, ten of which are zeros behind the tenth and the thirtieth.
  void some_zeros() {
    image("/before", 7, 1, {{0, 40, 4}}, std::string(40, 'x'));
    with_holes("/before", 1, kSome);
    image("/now", 7, 1, {{0, 40, 1}}, "");
    fs::create_directory_symlink("../before", dir_ + "/now/parent");
  }
  const std::string kSome = std::string(10, 'a') + std::string(10, '0') + std::string(10, 'b') + std::string(10, '0');
  /// Which pages of the dump are left, of 40: '.' for each that is not.
  std::string left(int pid) {
    std::string out(40, '.');
    for (auto [n, c] : read("/now", pid)) out.at(n) = c;
    return out;
  }

  /// Page number -> letter, of a folder alone; '^' for what is in the parent.
  std::map<std::uint64_t, char> read(const std::string& folder, int pid) {
    std::map<std::uint64_t, char> out;
    const std::string map = get(dir_ + folder + "/pagemap-" + std::to_string(pid) + ".img");
    std::size_t at = 8;
    const auto next = [&](google::protobuf::Message& m) {
      std::uint32_t size;
      memcpy(&size, map.data() + at, 4);
      EXPECT_TRUE(m.ParseFromArray(map.data() + at + 4, static_cast<int>(size)));
      at += 4 + size;
    };
    criu::PagemapHead head;
    next(head);
    const std::string data = get(dir_ + folder + "/pages-" + std::to_string(head.pages_id()) + ".img");
    std::size_t page = 0;
    while (at < map.size()) {
      criu::PagemapEntry e;
      next(e);
      for (std::uint32_t i = 0; i < e.nr_pages(); i++) {
        const bool present = e.flags() & 4;
        out[(e.vaddr() - kBase) / kPage + i] = present ? data.at(page++ * kPage) : '^';
      }
    }
    EXPECT_EQ(page * kPage, data.size());
    return out;
  }

  std::string whole(int pid) {
    std::string out;
    auto before = read("/before", pid);
    for (auto [n, c] : read("/now", pid)) {
      EXPECT_TRUE(c != '^' || before.contains(n)) << "page " << n << " is nowhere";
      out += c == '^' ? before[n] : c;
    }
    return out;
  }

  const TempFolder temp_;
  const std::string dir_ = temp_.path;
  std::uint64_t base_ = kBase;
};

TEST_F(PageImages, EqualPagesAreLeftToThePreDump) {
  const std::string old = "aaaaaaaaaaaabbbbbbbbcccccccc";
  std::string now = old;
  now[3] = 'X';
  now[27] = 'Y';
  image("/before", 7, 1, {{0, 20, 4}, {20, 8, 4}}, old);
  image("/now", 7, 3, {{0, 28, 4}}, now);
  auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->unchanged, 23u);  // the three before the X are too few for a read of their own
  EXPECT_EQ(r->kept, 5u);
  EXPECT_EQ(whole(7), now);
  EXPECT_EQ(fs::file_size(dir_ + "/now/pages-3.img"), 5 * kPage);
}

TEST_F(PageImages, WhatIsKeptIsMovedOverItself) {
  std::string now(8, 'a');
  for (int i = 0; i < 60; i++) now += static_cast<char>('A' + i % 26);
  image("/before", 7, 1, {{0, 68, 4}}, std::string(68, 'a'));
  image("/now", 7, 3, {{0, 68, 4}}, now);
  const auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->unchanged, 8u);
  EXPECT_EQ(whole(7), now);
}

// As where a file system makes a copy of what is written to again, and is full: by its memory the kernel would end us.
TEST_F(PageImages, WhatCannotBeWrittenIsAnError) {
  image("/before", 7, 1, {{0, 40, 4}}, std::string(40, 'a'));
  image("/now", 7, 3, {{0, 40, 4}}, std::string(20, 'a') + std::string(20, 'b'));
  const pid_t child = fork();
  if (!child) {
    const rlimit few{4 * kPage, 4 * kPage};
    if (signal(SIGXFSZ, SIG_IGN) == SIG_ERR || setrlimit(RLIMIT_FSIZE, &few)) _exit(255);
    const auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
    _exit(r ? 0 : r.error().code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), EFBIG);
}

TEST_F(PageImages, ZerosOfAnonymousMemoryAreLeftOut) {
  some_zeros();
  mappings("/now", 7, {{0, 40, kRegular | kAnonymous}});
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(*r, 20u);
  EXPECT_EQ(left(7), "^^^^^^^^^^..........^^^^^^^^^^..........");
}

TEST_F(PageImages, ZerosOverAFileStay) {
  some_zeros();
  mappings("/now", 7, {{0, 15, kRegular | kFile}, {15, 15, kRegular | kAnonymous}, {30, 10, kRegular | kAnonymous | kAioRing}});
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(*r, 0u);  // five are not worth an entry
  mappings("/now", 7, {{0, 12, kRegular | kFile}, {12, 12, kRegular | kAnonymous}, {30, 10, kRegular | kAnonymous | kAioRing}});
  r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(left(7), "^^^^^^^^^^^^........^^^^^^^^^^^^^^^^^^^^");
}

TEST_F(PageImages, ZerosOfTheOldestPreDumpAreLeftOutUnlessANewerOneHasThem) {
  some_zeros();
  fs::create_directories(dir_ + "/between");
  image("/between", 7, 1, {{0, 5, 1}, {5, 10, 4}, {15, 25, 1}}, std::string(10, 'n'));
  fs::remove(dir_ + "/now/parent");
  fs::create_directory_symlink("../between", dir_ + "/now/parent");
  fs::create_directory_symlink("../before", dir_ + "/between/parent");
  mappings("/now", 7, {{0, 40, kRegular | kAnonymous}});
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(left(7), "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^..........");
}

TEST_F(PageImages, ZerosThatTheDumpHasStay) {
  some_zeros();
  image("/now", 7, 1, {{0, 10, 1}, {10, 10, 4}, {20, 20, 1}}, std::string(10, 'n'));
  mappings("/now", 7, {{0, 40, kRegular | kAnonymous}});
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(left(7), "^^^^^^^^^^nnnnnnnnnn^^^^^^^^^^..........");
}

TEST_F(PageImages, ZerosThatAreWrittenStay) {
  some_zeros();
  put(dir_ + "/before/pages-1.img", std::string(40 * kPage, 0));
  mappings("/now", 7, {{0, 40, kRegular | kAnonymous}});
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(*r, 0u);
}

TEST_F(PageImages, ZerosOfSharedMemoryAreLeftOut) {
  base_ = 0;  // its pages have offsets
  some_zeros();
  for (const char* folder : {"/before", "/now"}) fs::rename(dir_ + folder + "/pagemap-7.img", dir_ + folder + "/pagemap-shmem-7.img");
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(*r, 20u);
}

TEST_F(PageImages, PartsOfPagesAreRefused) {
  base_ += 0x100;
  some_zeros();
  mappings("/now", 7, {{0, 40, kRegular | kAnonymous}});
  EXPECT_FALSE(leave_out_zeros(dir_ + "/now"));
  EXPECT_FALSE(drop_unchanged(dir_ + "/now", dir_ + "/before"));
}

TEST_F(PageImages, WithoutAMapOfMemoryNothingIsLeftOut) {
  some_zeros();
  const std::string was = get(dir_ + "/now/pagemap-7.img");
  auto r = leave_out_zeros(dir_ + "/now");
  ASSERT_FALSE(r);
  EXPECT_NE(r.error().text.find("mm-7.img"), std::string::npos) << r.error().text;
  mappings("/now", 7, {{20, 20, kRegular | kAnonymous}, {0, 20, kRegular | kAnonymous}});
  r = leave_out_zeros(dir_ + "/now");
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, EIO);
  EXPECT_EQ(get(dir_ + "/now/pagemap-7.img"), was);
}

TEST_F(PageImages, PagesThatThePreDumpHasNotStay) {
  const std::string now(30, 'n');
  image("/before", 7, 1, {{10, 10, 4}}, std::string(10, 'n'));
  image("/now", 7, 1, {{0, 30, 4}}, now);
  auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->unchanged, 10u);
  EXPECT_EQ(whole(7), now);
}

TEST_F(PageImages, OfSeveralPreDumpsTheNewestThatHasThePageCounts) {
  fs::create_directories(dir_ + "/first");
  fs::create_symlink("../first", dir_ + "/before/parent");
  image("/first", 7, 1, {{0, 40, 4}}, std::string(40, 'a'));
  image("/before", 7, 2, {{0, 10, 1}, {10, 10, 4}, {20, 10, 1}}, std::string(10, 'b'));
  // As in the first, as in the second, as in the first but not since, not in the second at all.
  image("/now", 7, 3, {{0, 40, 4}}, std::string(10, 'a') + std::string(8, 'b') + "aa" + std::string(10, 'a') + std::string(10, 'a'));
  auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->unchanged, 28u);
  auto now = read("/now", 7);
  for (const auto& [page, left] : {std::pair{0, true}, {9, true}, {17, true}, {18, false}, {19, false}, {20, true}, {29, true}, {30, false}, {39, false}})
    EXPECT_EQ(now[static_cast<std::uint64_t>(page)] == '^', left) << page;
}

/// More than is compared at once, in runs that begin and end anywhere in each folder.
TEST_F(PageImages, WhatTheDumpRefersToIsWhatItHeld) {
  constexpr std::uint64_t kPages = 700;
  fs::create_directories(dir_ + "/first");
  fs::create_symlink("../first", dir_ + "/before/parent");
  for (unsigned seed = 0; seed < 5; ++seed) {
    std::mt19937 random(seed);
    const auto layer = [&](const std::string& folder, std::uint32_t id, bool has_parent) {
      std::vector<Part> runs;
      std::map<std::uint64_t, char> pages;
      std::string letters;
      for (std::uint64_t first = random() % 20; first < kPages;) {
        const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(1 + random() % 150, kPages - first));
        const bool parent = has_parent && random() % 3 == 0;
        runs.push_back({first, n, parent ? 1u : 4u});
        for (std::uint32_t i = 0; i < n && !parent; ++i) letters += pages[first + i] = random() % 50 ? 'a' : 'b';
        first += n + random() % 3;
      }
      image(folder, 7, id, runs, letters);
      return pages;
    };
    auto first = layer("/first", 1, false);
    const auto before = layer("/before", 2, true), now = layer("/now", 3, true);
    const std::size_t all = read("/now", 7).size();
    auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
    ASSERT_TRUE(r) << r.error().text;
    EXPECT_GT(r->unchanged, all - now.size());
    EXPECT_EQ(r->unchanged + r->kept, all);
    const auto in_before = read("/before", 7);
    std::map<std::uint64_t, char> left = read("/now", 7);
    for (const auto& [n, letter] : now) {
      char c = left.at(n);
      if (c == '^') c = in_before.at(n);
      if (c == '^') c = first.at(n);
      ASSERT_EQ(c, letter) << "page " << n << ", seed " << seed;
    }
  }
}

TEST_F(PageImages, PreDumpsThatReferInACircleAreAnError) {
  fs::create_symlink("../before", dir_ + "/before/parent");
  image("/before", 7, 2, {{0, 10, 1}}, "");
  image("/now", 7, 3, {{0, 10, 4}}, std::string(10, 'a'));
  EXPECT_FALSE(drop_unchanged(dir_ + "/now", dir_ + "/before"));
}

TEST_F(PageImages, WhatCriuLeftToThePreDumpStaysSo) {
  image("/before", 7, 1, {{0, 30, 4}}, std::string(30, 'p'));
  image("/now", 7, 1, {{0, 10, 1}, {10, 20, 4}}, "PPPPPPPPPPPPPPPPPPPp");
  auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->kept, 20u);  // a single equal page
  EXPECT_EQ(r->unchanged, 10u);
  EXPECT_EQ(whole(7), "ppppppppppPPPPPPPPPPPPPPPPPPPp");
}

TEST_F(PageImages, AnEqualDumpBecomesEmpty) {
  image("/before", 7, 1, {{0, 3, 4}, {100, 40, 4}}, std::string(43, 'e'));
  image("/now", 7, 2, {{0, 3, 4}, {100, 40, 4}}, std::string(43, 'e'));
  auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->kept, 0u);
  EXPECT_EQ(fs::file_size(dir_ + "/now/pages-2.img"), 0u);
  EXPECT_EQ(whole(7), std::string(43, 'e'));
}

TEST_F(PageImages, EachProcessAgainstItself) {
  image("/before", 7, 1, {{0, 10, 4}}, std::string(10, 'a'));
  image("/before", 8, 2, {{0, 10, 4}}, std::string(10, 'b'));
  image("/now", 7, 1, {{0, 10, 4}}, std::string(10, 'b'));
  image("/now", 8, 2, {{0, 10, 4}}, std::string(10, 'b'));
  image("/now", 9, 3, {{0, 10, 4}}, std::string(10, 'b'));  // it came later
  auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(r->unchanged, 10u);
  EXPECT_EQ(whole(7), std::string(10, 'b'));
  EXPECT_EQ(whole(8), std::string(10, 'b'));
}

TEST_F(PageImages, ImagesThatContradictThemselvesAreRefused) {
  image("/before", 7, 1, {{0, 10, 4}}, std::string(10, 'a'));
  image("/now", 7, 1, {{0, 10, 4}}, std::string(9, 'a'));
  auto short_pages = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_FALSE(short_pages);
  EXPECT_EQ(short_pages.error().code, EIO);

  image("/now", 7, 1, {{0, 10, 4}, {5, 10, 4}}, std::string(20, 'a'));
  auto overlap = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_FALSE(overlap);
  EXPECT_EQ(overlap.error().code, EIO);

  image("/now", 7, 1, {{0, 10, 4}}, std::string(10, 'a'));
  const std::string map = dir_ + "/now/pagemap-7.img";
  const std::string good = get(map);
  for (std::size_t size = 0; size < good.size(); size++) {
    put(map, good.substr(0, size));
    image("/before", 7, 1, {{0, 10, 4}}, std::string(10, 'a'));
    auto cut = drop_unchanged(dir_ + "/now", dir_ + "/before");
    EXPECT_FALSE(cut) << "a pagemap of " << size << " bytes of " << good.size() << " was taken";
  }
  put(map, "not an image of CRIU");
  auto foreign = drop_unchanged(dir_ + "/now", dir_ + "/before");
  ASSERT_FALSE(foreign);
  EXPECT_EQ(foreign.error().code, EINVAL);
}

/// Memory of this process that was copied ahead, page 0 to 99.
class MemoryOfAProcess : public PageImages {
 protected:
  void SetUp() override {
    PageImages::SetUp();
    memory_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(memory_, MAP_FAILED);
    memset(memory_, 'a', kPages * kPage);
    base_ = reinterpret_cast<std::uintptr_t>(memory_);
    image("/before", 7, 1, {{0, 100, 4}}, std::string(100, 'a'));
    marks_.assign(kPages, kThere);
  }
  void TearDown() override {
    munmap(memory_, kPages * kPage);
    PageImages::TearDown();
  }
  Result<Changed> changed(std::uint64_t first = 0, std::uint64_t pages = 100, int limit_ms = 20'000) {
    const std::string pagemap = dir_ + "/pagemap";
    const int fd = open(pagemap.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    const auto bytes = static_cast<ssize_t>(marks_.size() * sizeof marks_[0]);
    EXPECT_EQ(pwrite(fd, marks_.data(), static_cast<std::size_t>(bytes), static_cast<off_t>(base_ / kPage * sizeof marks_[0])), bytes);
    close(fd);
    const std::vector<MemoryPart> parts{{base_ + first * kPage, pages * kPage}};
    return changed_since(dir_ + "/before", 7, getpid(), pagemap, parts, suspects_.value_or(parts), limit_ms);
  }
  /// First page and pages of each part.
  std::string parts(const Changed& c) const {
    std::string out;
    for (const MemoryPart& p : c.parts) out += std::to_string((p.start - base_) / kPage) + "+" + std::to_string(p.bytes / kPage) + " ";
    return out;
  }

  static constexpr std::size_t kPages = 110;
  std::optional<std::vector<MemoryPart>> suspects_;
  char* memory_ = nullptr;
  std::vector<std::uint64_t> marks_;
};

TEST_F(MemoryOfAProcess, WhatNobodyHasWrittenToHasNotChanged) {
  auto r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "");
  EXPECT_EQ(r->unchanged, 100u);
}

TEST_F(MemoryOfAProcess, WhatANicHasWrittenIsFoundByItsContent) {
  memory_[5 * kPage] = 'X';
  memory_[50 * kPage + 4095] = 'X';
  memory_[57 * kPage] = 'X';  // near that: one part
  memory_[99 * kPage + 77] = 'X';
  auto r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "5+1 50+8 99+1 ");
  EXPECT_EQ(r->unchanged, 96u);
}

TEST_F(MemoryOfAProcess, WhereNobodyCanHaveWrittenIsNotLookedAt) {
  for (const std::size_t page : {5, 50, 57, 99}) memory_[page * kPage] = 'X';
  suspects_ = {{base_ + 4 * kPage, 3 * kPage}, {base_ + 50 * kPage, kPage}, {base_ + 70 * kPage, 20 * kPage}};
  auto r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "5+1 50+1 ");
  EXPECT_EQ(r->unchanged, 98u);
  EXPECT_EQ(r->compared, 24u);
  EXPECT_EQ(r->spared, 76u);
  for (const std::size_t page : {10, 51}) marks_[page] |= kMarked;
  marks_[11] = 0;
  r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "5+1 50+1 ") << "marks make no difference there";
  EXPECT_EQ(r->spared, 76u);
  suspects_ = {{base_ - 4 * kPage, 10 * kPage}, {base_ + 99 * kPage, 20 * kPage}};
  r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "5+1 99+1 ") << "suspects end outside of what is asked for";
  suspects_.emplace();
  r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "");
  EXPECT_EQ(r->compared, 0u);
  r = changed(95, 10);
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "100+5 ") << "what was not copied ahead has changed";
}

TEST_F(MemoryOfAProcess, WhatADumpFindsByItsMarkIsNotLookedAt) {
  for (int i = 20; i < 40; ++i) marks_[static_cast<std::size_t>(i)] |= kMarked;
  memory_[30 * kPage] = 'X';
  auto r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "");
  EXPECT_EQ(r->unchanged, 80u);
}

TEST_F(MemoryOfAProcess, WhatIsInNoPreDumpOrNotThereHasChanged) {
  marks_[3] = 0;
  auto r = changed(0, 105);
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "3+1 100+5 ");
  EXPECT_EQ(r->unchanged, 99u);
}

TEST_F(MemoryOfAProcess, WhatCannotBeReadHasChanged) {
  ASSERT_EQ(mprotect(memory_ + 40 * kPage, 2 * kPage, PROT_NONE), 0);
  auto r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "40+24 ") << "the rest of what was read at once";
  EXPECT_EQ(r->unchanged, 76u);
}

TEST_F(MemoryOfAProcess, TheNewestPreDumpThatHasThePageCounts) {
  fs::create_directories(dir_ + "/first");
  fs::create_symlink("../first", dir_ + "/before/parent");
  image("/first", 7, 1, {{0, 100, 4}}, std::string(100, 'a'));
  image("/before", 7, 2, {{0, 40, 1}, {40, 20, 4}, {60, 40, 1}}, std::string(20, 'b'));
  memset(memory_ + 40 * kPage, 'b', 10 * kPage);
  auto r = changed();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(parts(*r), "50+10 ");
}

TEST_F(MemoryOfAProcess, WhoeverNeverAnswersIsNotWaitedFor) {
  const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
  if (fd < 0) GTEST_SKIP() << "no userfaultfd here";
  uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
  ASSERT_EQ(ioctl(fd, UFFDIO_API, &api), 0);
  ASSERT_EQ(madvise(memory_ + 10 * kPage, kPage, MADV_DONTNEED), 0);
  uffdio_register area{.range = {.start = base_ + 10 * kPage, .len = kPage}, .mode = UFFDIO_REGISTER_MODE_MISSING, .ioctls = 0};
  ASSERT_EQ(ioctl(fd, UFFDIO_REGISTER, &area), 0);
  auto r = changed(0, 100, 300);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ETIMEDOUT) << r.error().text;
  close(fd);
}

TEST_F(MemoryOfAProcess, ImagesThatAreNotThereOrContradictThemselvesAreAnError) {
  EXPECT_EQ(changed_since(dir_ + "/before", 8, getpid(), "/proc/self/pagemap", {}, {}, 1000).error().code, ENOENT);
  image("/before", 7, 1, {{0, 100, 4}}, std::string(99, 'a'));
  auto r = changed();
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, EIO);
}

}  // namespace
}  // namespace migr::page_images_test
