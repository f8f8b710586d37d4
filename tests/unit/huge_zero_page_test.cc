// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The host's switch is turned off while somebody copies memory ahead, and put back by whoever comes last, or comes after a migrd that died.
#include "agent/huge_zero_page.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>

#include "agent/file_tree.h"
#include "agent/process.h"
#include "temp_folder.h"

namespace migr::huge_zero_page_test {
namespace {

namespace fs = std::filesystem;

struct AHugeZeroPage : ::testing::Test {
  void SetUp() override {
    fs::create_directories(thp);
    put("use_zero_page", "1");
    put("enabled", "always [madvise] never");
  }
  void put(const std::string& file, const std::string& text) const {
    fs::create_directories(fs::path(thp + "/" + file).parent_path());
    std::ofstream(thp + "/" + file) << text << "\n";
  }
  std::string now() const { return first_line_of(thp + "/use_zero_page"); }
  /// As sysfs has it where it is mounted read-only, of root, too.
  void cannot_be_written() const {
    fs::remove(thp + "/use_zero_page");
    fs::create_directory(thp + "/use_zero_page");
  }
  const TempFolder temp;
  const std::string root = temp.path, thp = root + "/thp", note = root + "/note";
};

TEST_F(AHugeZeroPage, IsKeptOutUntilTheLastOneHasDone) {
  HugeZeroPage page(note, thp);
  auto one = page.keep_out(), other = page.keep_out();
  ASSERT_TRUE(one && other);
  EXPECT_EQ(now(), "0");
  EXPECT_EQ(first_line_of(note), boot_of_host());
  one->reset();
  EXPECT_EQ(now(), "0");
  other->reset();
  EXPECT_EQ(now(), "1");
  EXPECT_FALSE(fs::exists(note));
  ASSERT_TRUE(page.keep_out());
  EXPECT_EQ(now(), "1") << "nobody has kept what was returned";
}

TEST_F(AHugeZeroPage, StaysOutWhereItWas) {
  put("use_zero_page", "0");
  HugeZeroPage page(note, thp);
  auto kept = page.keep_out();
  ASSERT_TRUE(kept);
  EXPECT_FALSE(fs::exists(note)) << "there is nothing to be put back";
  kept->reset();
  EXPECT_EQ(now(), "0");
}

TEST_F(AHugeZeroPage, ComesBackAfterAMigrdThatDied) {
  put("use_zero_page", "0");
  std::ofstream(note) << boot_of_host() << "\n";
  const HugeZeroPage page(note, thp);
  EXPECT_EQ(now(), "1");
  EXPECT_FALSE(fs::exists(note));
}

TEST_F(AHugeZeroPage, AfterABootIsAsTheHostHasIt) {
  put("use_zero_page", "0");
  std::ofstream(note) << "another boot\n";
  const HugeZeroPage page(note, thp);
  EXPECT_EQ(now(), "0");
  EXPECT_FALSE(fs::exists(note));
}

TEST_F(AHugeZeroPage, IsNotNeededWhereThereAreNoHugePages) {
  cannot_be_written();
  HugeZeroPage page(note, thp);
  auto kept = page.keep_out();
  ASSERT_FALSE(kept);
  EXPECT_NE(kept.error().text.find("writing 0 to " + thp + "/use_zero_page"), std::string::npos) << kept.error().text;
  EXPECT_FALSE(fs::exists(note));
  put("enabled", "always madvise [never]");
  EXPECT_TRUE(page.keep_out());
  put("hugepages-2048kB/enabled", "always inherit madvise [never]");
  put("hugepages-64kB/enabled", "always [inherit] madvise never");
  EXPECT_TRUE(page.keep_out());
  put("hugepages-2048kB/enabled", "[always] inherit madvise never");
  EXPECT_FALSE(page.keep_out()) << "this size has a switch of its own";
  fs::remove_all(thp);
  EXPECT_TRUE(page.keep_out()) << "a kernel without them";
  EXPECT_FALSE(fs::exists(note));
}

}  // namespace
}  // namespace migr::huge_zero_page_test
