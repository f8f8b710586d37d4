// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What /proc/PID/maps and smaps say.
#include "agent/mappings.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace migr::mappings_test {
namespace {

Mapping at(const void* address) {
  const auto where = reinterpret_cast<std::uintptr_t>(address);
  const auto all = mappings_of(getpid());
  const auto found = std::find_if(all.begin(), all.end(), [&](const Mapping& m) { return where >= m.start && where < m.end; });
  return found == all.end() ? Mapping{} : *found;
}

TEST(Mappings, OfAFileHaveItsNameHoweverLongThatIs) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  char top[] = "/tmp/mappings_test.XXXXXX";
  std::string folder = mkdtemp(top);
  for (int i = 0; i < 4; i++) mkdir((folder += "/" + std::string(200, 'a')).c_str(), 0700);
  const std::string name = folder + "/a file (deleted) ";
  const int fd = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0) << strerror(errno);
  ASSERT_EQ(ftruncate(fd, static_cast<off_t>(2 * page)), 0);
  void* const mapped = mmap(nullptr, page, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, static_cast<off_t>(page));
  ASSERT_NE(mapped, MAP_FAILED) << strerror(errno);
  struct stat st;
  fstat(fd, &st);
  const Mapping m = at(mapped);
  EXPECT_EQ(m.start, reinterpret_cast<std::uintptr_t>(mapped));
  EXPECT_EQ(m.end - m.start, page);
  EXPECT_EQ(m.offset, page);
  EXPECT_TRUE(m.executable);
  EXPECT_EQ(m.inode, st.st_ino);
  EXPECT_EQ(m.path, name);
  unlink(name.c_str());
  EXPECT_EQ(at(mapped).path, name + " (deleted)");
  munmap(mapped, page);
  close(fd);
  for (; folder.size() >= std::strlen(top); folder.resize(folder.rfind('/'))) rmdir(folder.c_str());
}

TEST(Mappings, OfNoFileHaveNoName) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const mapped = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const Mapping m = at(mapped);
  EXPECT_LE(m.start, reinterpret_cast<std::uintptr_t>(mapped));
  EXPECT_FALSE(m.executable);
  EXPECT_EQ(m.inode, 0u);
  EXPECT_EQ(m.path, "");
  munmap(mapped, page);
  int here = 0;
  EXPECT_EQ(at(&here).path, "[stack]");
}

TEST(Mappings, OfWhoHasEndedAreNone) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(mappings_of(child).empty());
}

TEST(Mappings, SayOfOneThatAForkWipes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const bool had = has_vm_flag(getpid(), "wf");  // the C library may have some
  void* const mapped = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  ASSERT_EQ(madvise(mapped, page, MADV_WIPEONFORK), 0) << strerror(errno);
  EXPECT_TRUE(has_vm_flag(getpid(), "wf"));
  munmap(mapped, page);
  EXPECT_EQ(has_vm_flag(getpid(), "wf"), had);
  EXPECT_FALSE(has_vm_flag(getpid(), "w"));
}

TEST(AsynchronousIo, IsSeenByItsRing) {
  ASSERT_FALSE(has_aio(mappings_of(getpid())));
  unsigned long context = 0;
  if (syscall(SYS_io_setup, 8, &context)) GTEST_SKIP() << "io_setup: " << strerror(errno);
  EXPECT_TRUE(has_aio(mappings_of(getpid())));
  syscall(SYS_io_destroy, context);
  EXPECT_FALSE(has_aio(mappings_of(getpid())));
}

}  // namespace
}  // namespace migr::mappings_test
