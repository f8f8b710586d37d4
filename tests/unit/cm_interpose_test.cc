/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * A descriptor is a channel of librdmacm's from open() of the device until it is closed, whichever way. One of the library's own is
 * closed by nobody else.
 */
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/close_range.h>

#include <vector>

#include "../../libmigr/cm/cm.h"
#include "../../libmigr/control.h"
#include "../../libmigr/high_fd.h"
#include "../../libmigr/provider/uverbs_write.h"

extern "C" int __fxstat(int version, int fd, struct stat* out);  // no header has it any more
extern "C" int __fxstat64(int version, int fd, struct stat64* out);

namespace migr {
namespace {

bool (*takes_write)(int fd, const void* buf, std::size_t count, ssize_t* result);

int high_eventfd() { return to_high_fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)); }

cm::Engine* the_engine = new cm::Engine({high_eventfd,
                                         [](int, const void*, std::size_t) -> ssize_t {
                                           errno = EAGAIN;
                                           return -1;
                                         }});

}  // namespace

cm::Engine* cm::engine(bool) { return the_engine; }
void control::start() {}
void control::begin() {}
void provider::watch_writes(bool (*write)(int, const void*, std::size_t, ssize_t*)) { takes_write = write; }

namespace {

bool is_channel(int fd) {
  ssize_t result;
  return takes_write(fd, "", 0, &result);
}

class CmInterpose : public testing::Test {
 protected:
  const int fd = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
  void SetUp() override {
    ASSERT_GE(fd, 0);
    ASSERT_TRUE(is_channel(fd));
  }
  void TearDown() override {
    close(fd);
    EXPECT_FALSE(is_channel(fd));
    EXPECT_EQ(the_engine->real_fd(), -1) << "nothing is open any more";
  }
  /// In a child by fork, which has its parent's descriptors and none of its channels. @return that it has said so
  template <class Says>
  static bool in_child(Says says) {
    const pid_t child = fork();
    if (!child) {
      the_engine = nullptr;
      _exit(says() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status == 0;
  }
};

TEST_F(CmInterpose, AnyOtherFileIsNone) {
  const int other = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_FALSE(is_channel(other));
  close(other);
}

/// As the device where there is one, by whichever name: never as what stands for it.
TEST_F(CmInterpose, LooksLikeTheDevice) {
  struct stat device {
  }, seen{};
  struct stat64 wide {};
  const int there = stat("/dev/infiniband/rdma_cm", &device);
  EXPECT_EQ(fstat(fd, &seen), there);
  EXPECT_EQ(fstat64(fd, &wide), there);
  EXPECT_EQ(wide.st_rdev, device.st_rdev);
  for (const int version : {0, 1}) {
    EXPECT_EQ(__fxstat(version, fd, &seen), there);
    EXPECT_EQ(__fxstat64(version, fd, &wide), there);
    EXPECT_EQ(seen.st_rdev, device.st_rdev);
  }
  const int other = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_EQ(__fxstat(1, other, &seen), 0);
  EXPECT_EQ(fstat64(other, &wide), 0);
  EXPECT_TRUE(S_ISCHR(seen.st_mode) && seen.st_rdev == wide.st_rdev);
  errno = 0;
  EXPECT_EQ(__fxstat(2, other, &seen), -1);
  EXPECT_EQ(errno, EINVAL);
  close(other);
}

TEST_F(CmInterpose, RangeClosesItsChannels) {
  const auto n = static_cast<unsigned>(fd);
  EXPECT_EQ(close_range(n + 1, n + 5, 0), 0);
  EXPECT_TRUE(is_channel(fd));
  EXPECT_EQ(close_range(n, n, CLOSE_RANGE_CLOEXEC), 0);
  EXPECT_TRUE(is_channel(fd));
  EXPECT_EQ(close_range(n, n, 0), 0);
  EXPECT_FALSE(is_channel(fd));
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(the_engine->real_fd(), -1);
}

TEST_F(CmInterpose, ClosefromClosesThemAll) {
  closefrom(fd);
  EXPECT_FALSE(is_channel(fd));
  EXPECT_EQ(the_engine->real_fd(), -1);
  const int again = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);  // with a thread, and what wakes it, of its own
  EXPECT_GE(the_engine->real_fd(), 0);
  close(again);
}

TEST_F(CmInterpose, WhatIsClosedAboveAChannelLeavesItsEngine) {
  const int above = fcntl(fd, F_DUPFD_CLOEXEC, 100), device = the_engine->real_fd();
  ASSERT_GT(device, above);
  const auto from = static_cast<unsigned>(above);
  std::vector<int> own;  // the device, and what wakes its thread
  for (int n = 0; FdBits::fits(n); n++)
    if (is_own_fd(n)) own.push_back(n);
  ASSERT_EQ(own.size(), 2u);
  const auto works = [&] { return is_channel(fd) && the_engine->real_fd() == device; };
  EXPECT_EQ(close_range(from, ~0u, 0), 0);
  EXPECT_EQ(fcntl(above, F_GETFD), -1);
  EXPECT_TRUE(works());
  ASSERT_EQ(fcntl(fd, F_DUPFD_CLOEXEC, above), above);
  closefrom(above);
  EXPECT_EQ(fcntl(above, F_GETFD), -1);
  EXPECT_TRUE(works());
  for (const int n : own) EXPECT_GE(fcntl(n, F_GETFD), 0);
}

TEST_F(CmInterpose, RangeThatTheKernelRefusesClosesNoChannel) {
  const auto n = static_cast<unsigned>(fd);
  EXPECT_EQ(close_range(n, n, 1 << 20), -1);
  EXPECT_TRUE(is_channel(fd));
  EXPECT_EQ(close_range(n + 1, n, 0), -1);
  EXPECT_TRUE(is_channel(fd));
  EXPECT_GE(the_engine->real_fd(), 0);
}

TEST_F(CmInterpose, ChildThatClosesAllWritesToWhatItOpens) {
  const auto writes = [this] {
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    return dup2(null, fd) == fd && !is_channel(fd);
  };
  EXPECT_FALSE(in_child(writes));
  EXPECT_TRUE(in_child([&] { return closefrom(3), writes(); }));
  EXPECT_TRUE(in_child([&] { return !close_range(3, ~0u, 0) && writes(); }));
  EXPECT_TRUE(in_child([&] { return !close_range(3, ~0u, CLOSE_RANGE_UNSHARE) && writes(); }));
  EXPECT_TRUE(is_channel(fd)) << "it is still its parent's";
}

TEST_F(CmInterpose, WhatIsTheLibrarysIsClosedByTheLibraryOnly) {
  const int own = high_eventfd(), other = fcntl(own, F_DUPFD_CLOEXEC, own + 1);
  ASSERT_GT(other, own);
  const auto n = static_cast<unsigned>(own);
  const auto is_open = [](int which) { return fcntl(which, F_GETFD) >= 0; };
  EXPECT_EQ(close_range(n, n, 0), 0);
  EXPECT_EQ(close_range(n - 1, n, 0), 0);
  EXPECT_EQ(close(own), -1);
  EXPECT_EQ(errno, EBADF);
  EXPECT_TRUE(is_open(own) && is_open(other));
  EXPECT_EQ(close_range(n, ~0u, 0), 0);
  EXPECT_TRUE(is_open(own) && !is_open(other));
  closefrom(own);
  EXPECT_TRUE(is_open(own));
  EXPECT_TRUE(in_child([&] { return !close(own) && !is_open(own); }));
  EXPECT_TRUE(in_child([&] { return closefrom(3), !is_open(own); }));
  const pid_t child = vfork();
  if (!child) _exit(close(own));
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "it has a copy, which it closes";
  EXPECT_TRUE(is_open(own));
  close_own(own);
  EXPECT_FALSE(is_open(own));
  ASSERT_EQ(fcntl(fd, F_DUPFD_CLOEXEC, own), own);
  EXPECT_EQ(close(own), 0) << "the number is anybody's again";
}

}  // namespace
}  // namespace migr
