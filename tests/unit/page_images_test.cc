// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What drop_unchanged() leaves of a dump, read back the way CRIU would: through the pre-dump.
#include "agent/page_images.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "criu_pagemap.pb.h"

namespace migr::page_images_test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kBase = 0x7f0000000000;

struct Part {
  std::uint64_t first;  // page number from kBase
  std::uint32_t pages, flags;
};

class PageImages : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/page_images_test.XXXXXX";
    ASSERT_TRUE(mkdtemp(path));
    dir_ = path;
    fs::create_directories(dir_ + "/now");
    fs::create_directories(dir_ + "/before");
  }
  void TearDown() override { fs::remove_all(dir_); }

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
      e.set_vaddr(kBase + r.first * kPage);
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

  std::string dir_;
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
    auto r = drop_unchanged(dir_ + "/now", dir_ + "/before");
    ASSERT_TRUE(r) << r.error().text;
    EXPECT_GT(r->unchanged, 0u);
    EXPECT_EQ(r->unchanged + r->kept, now.size());
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

}  // namespace
}  // namespace migr::page_images_test
