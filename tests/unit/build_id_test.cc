// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which build of a library is in a file, and what a process has of it.
#include "agent/build_id.h"

#include <elf.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "temp_folder.h"

namespace migr::build_id_test {
namespace {

namespace fs = std::filesystem;

constexpr char kSelf[] = "/proc/self/exe";

// As the loader has it, of the program itself.
std::string build_id_in_memory() {
  std::string id;
  dl_iterate_phdr(
      [](dl_phdr_info* p, std::size_t, void* to) {
        for (const auto* h = p->dlpi_phdr; h != p->dlpi_phdr + p->dlpi_phnum; h++) {
          if (h->p_type != PT_NOTE) continue;
          const auto* at = reinterpret_cast<const char*>(p->dlpi_addr + h->p_vaddr);
          for (const char* const end = at + h->p_memsz; at < end;) {
            Elf64_Nhdr n;
            std::memcpy(&n, at, sizeof n);
            const char* const name = at + sizeof n;
            const char* const what = name + (n.n_namesz + 3) / 4 * 4;
            if (n.n_type == NT_GNU_BUILD_ID && n.n_namesz == 4 && !std::memcmp(name, "GNU", 4)) static_cast<std::string*>(to)->assign(what, n.n_descsz);
            at = what + (n.n_descsz + h->p_align - 1) / h->p_align * h->p_align;
          }
        }
        return 1;  // the others are libraries
      },
      &id);
  return id;
}

// What a linker writes first is enough.
void copy_begin(const std::string& to) {
  std::string begin(64 << 10, '\0');
  std::ifstream(kSelf, std::ios::binary).read(begin.data(), static_cast<std::streamsize>(begin.size()));
  std::ofstream(to, std::ios::binary) << begin;
}

struct Library : ::testing::Test {
  Library() { copy_begin(file); }
  const TempFolder temp;
  const std::string dir = temp.path, file = dir + "/libmigr.so";
};

TEST_F(Library, ItsBuildIdIsWhatTheLinkerHasNoted) {
  const std::string id = build_id_in_memory();
  if (id.empty()) GTEST_SKIP() << "this compiler's linker notes none";
  EXPECT_GE(id.size(), 8u);
  EXPECT_EQ(build_id_of(kSelf), id);
  EXPECT_EQ(build_id_of(file), id);
  fs::resize_file(file, 200);
  EXPECT_EQ(build_id_of(file), "") << "half of it is no library";
}

TEST_F(Library, WhatIsNoLibraryHasNone) {
  EXPECT_EQ(build_id_of(dir + "/none"), "");
  EXPECT_EQ(build_id_of(dir), "");
  std::ofstream(dir + "/text") << std::string(4096, 'x');
  EXPECT_EQ(build_id_of(dir + "/text"), "");
}

TEST_F(Library, AnotherBuildIsRefusedAndWhatIsNotKnownIsNot) {
  const std::string id = build_id_of(file);
  if (id.empty()) GTEST_SKIP() << "this compiler's linker notes none";
  EXPECT_TRUE(same_build(id, "src", file, "dst"));
  EXPECT_TRUE(same_build("", "src", file, "dst"));
  EXPECT_TRUE(same_build("other", "src", dir + "/none", "dst"));
  const auto s = same_build("other", "src", file, "dst");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EBUSY);
  EXPECT_EQ(s.error().text, "libmigr is of another build on dst (" + file + ") than what programs run on src, and CRIU restores them with the same only; install the same release of libmigr on both hosts");
}

TEST_F(Library, WhoRunsItIsSeenAndThatItWasReplaced) {
  EXPECT_FALSE(*maps_library(getpid(), mappings_of(getpid()), file));
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  void* const data = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
  EXPECT_FALSE(*maps_library(getpid(), mappings_of(getpid()), file)) << "it only reads it";
  void* const at = mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
  close(fd);
  ASSERT_TRUE(data != MAP_FAILED && at != MAP_FAILED);
  EXPECT_TRUE(*maps_library(getpid(), mappings_of(getpid()), file));
  fs::create_hard_link(file, dir + "/elsewhere");
  EXPECT_TRUE(*maps_library(getpid(), mappings_of(getpid()), dir + "/elsewhere")) << "whatever it is called there";
  fs::remove(dir + "/elsewhere");
  fs::create_directory(dir + "/other");
  copy_begin(dir + "/other/libmigr.so");
  EXPECT_FALSE(*maps_library(getpid(), mappings_of(getpid()), dir + "/other/libmigr.so")) << "not this one";
  fs::rename(dir + "/other/libmigr.so", file);  // as a package does it
  const auto s = maps_library(getpid(), mappings_of(getpid()), file);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EOPNOTSUPP);
  EXPECT_NE(s.error().text.find("has a libmigr.so that was replaced on this host since: start it again"), std::string::npos) << s.error().text;
  EXPECT_FALSE(*maps_library(getpid(), mappings_of(getpid()), "/usr/lib/another.so")) << "of another name";
  munmap(at, 4096);
  munmap(data, 4096);
  EXPECT_FALSE(*maps_library(getpid(), mappings_of(getpid()), file));
}

}  // namespace
}  // namespace migr::build_id_test
