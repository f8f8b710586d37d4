/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "../../libmigr/kernel_link.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "../../libmigr/high_fd.h"

namespace {

/// A migr.ko that is a file with its tables, and a kernel that may have no room.
struct {
  int file = -1;  ///< -1: none
  int attach_fails = 0;
  int maps_until_full = -1;  ///< of memory as large as a table; -1: any number
} kernel;

}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (kernel.file >= 0 && !strcmp(path, "/dev/" MIGR_DEV_NAME)) return dup(kernel.file);
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

extern "C" int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list rest;
  va_start(rest, request);
  void* const arg = va_arg(rest, void*);
  va_end(rest);
  if (kernel.file < 0 || request != MIGR_IOC_ATTACH) return static_cast<int>(syscall(SYS_ioctl, fd, request, arg));
  static_cast<migr_ioc_attach*>(arg)->ctx_id = 7;
  if (kernel.attach_fails) return errno = kernel.attach_fails, -1;
  return 0;
}

extern "C" void* mmap(void* at, size_t bytes, int access, int flags, int fd, off_t offset) noexcept {
  if (fd < 0 && (bytes == MIGR_QPN_TABLE_BYTES || bytes == MIGR_KEY_TABLE_BYTES)) {
    if (!kernel.maps_until_full) return errno = ENOMEM, MAP_FAILED;
    if (kernel.maps_until_full > 0) --kernel.maps_until_full;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, access, flags, fd, offset));
}

namespace migr {
namespace {

struct PrivateTables : ::testing::Test {
  PrivateTables() { setenv("MIGR_TABLES", "private", 1); }
};

TEST_F(PrivateTables, StartEmptyAndUnattached) {
  KernelLink link(-1);
  EXPECT_FALSE(link.attached());
  EXPECT_EQ(link.ctx_id(), 0u);
  EXPECT_EQ(link.qpn_table()[0], 0u);
  EXPECT_EQ(link.qpn_table()[MIGR_NR_INDEX - 1], 0u);
  EXPECT_EQ(link.key_table()[MIGR_NR_INDEX - 1].rkey, 0u);
}

TEST_F(PrivateTables, CostNoMemoryUntilUsed) {
  const auto resident_kib = [] {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    return use.ru_maxrss;
  };
  const long before = resident_kib();
  KernelLink link(-1);
  link.bind_qp(0x100, 0xabcdef);
  EXPECT_LT(resident_kib() - before, 4096);
}

TEST_F(PrivateTables, BoundQpIsFoundByItsPhysicalNumber) {
  KernelLink link(-1);
  ASSERT_EQ(link.bind_qp(0x12, 0xfffffe), 0);
  EXPECT_EQ(link.qpn_table()[0xfffffe], 0x12 | MIGR_QPN_VALID);
  EXPECT_EQ(link.qpn_table()[0x12], 0u);
}

TEST_F(PrivateTables, NumbersWiderThan24BitsAreErange) {
  KernelLink link(-1);
  EXPECT_EQ(link.bind_qp(0x1000000, 1), ERANGE);
  EXPECT_EQ(link.bind_qp(1, 0x1000000), ERANGE);
}

TEST_F(PrivateTables, BoundMrTranslatesAndKeepsAWrongTagWrong) {
  KernelLink link(-1);
  const std::uint32_t vlkey = 0x1234a5, vrkey = 0x1234a5, plkey = 0x777701, prkey = 0x777702;
  ASSERT_EQ(link.bind_mr(3, vlkey, vrkey, plkey, prkey), 0);
  const migr_key_entry entry = link.key_table()[vlkey >> 8];
  EXPECT_EQ(entry.lkey ^ (vlkey & 0xff), plkey);
  EXPECT_EQ(entry.rkey ^ (vrkey & 0xff), prkey);
  EXPECT_NE(entry.lkey ^ 0xa6, plkey);
}

TEST_F(PrivateTables, MrWithoutRemoteAccessHasNoRemoteKey) {
  KernelLink link(-1);
  ASSERT_EQ(link.bind_mr(3, 0x1200, 0, 0x3400, 0x3400), 0);
  EXPECT_EQ(link.key_table()[0x12].rkey, 0u);
}

TEST_F(PrivateTables, KernelQuestionsAreEnodev) {
  KernelLink link(-1);
  migr_ioc_query_mr query{};
  EXPECT_EQ(link.query_mr(1, query), ENODEV);
  std::uint32_t len = 0;
  EXPECT_EQ(link.driver_resp(MIGR_OBJ_QP, 1, nullptr, len), ENODEV);
}

TEST_F(PrivateTables, DetachLeavesThemAsTheyAre) {
  KernelLink link(-1);
  ASSERT_EQ(link.bind_qp(5, 6), 0);
  const auto* table = link.qpn_table();
  link.detach();
  EXPECT_EQ(link.qpn_table(), table);
  EXPECT_EQ(table[6], 5 | MIGR_QPN_VALID);
}

TEST(WithoutRoom, ItIsSaidAndTheProcessGoesOn) {
  setenv("MIGR_TABLES", "private", 1);
  const auto open_one = [] {
    for (const int room : {0, 1}) {
      kernel.maps_until_full = room;
      if (KernelLink(-1).has_tables()) _exit(1);
    }
    _exit(0);
  };
  EXPECT_EXIT(open_one(), testing::ExitedWithCode(0), "no address space for 192 MiB of tables");
}

TEST(WithoutModule, TablesArePrivateAndItIsSaidOnce) {
  if (access("/dev/migr", F_OK) == 0) GTEST_SKIP() << "migr.ko is loaded here";
  unsetenv("MIGR_TABLES");
  testing::internal::CaptureStderr();
  KernelLink one(-1);
  KernelLink two(-1);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(one.why_private()), said.npos) << said;
  EXPECT_EQ(one.why_private().find("no /dev/migr"), 0u) << one.why_private();
  EXPECT_EQ(said.find("libmigr:"), said.rfind("libmigr:")) << said;
  EXPECT_FALSE(one.attached());
  EXPECT_EQ(one.bind_qp(1, 1), 0);
  EXPECT_NE(one.reattach(-1), 0);
}

struct WithModule : ::testing::Test {
  void SetUp() override {
    unsetenv("MIGR_TABLES");
    kernel.file = memfd_create("tables", MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(kernel.file, std::max(MIGR_QPN_TABLE_OFFSET + MIGR_QPN_TABLE_BYTES, MIGR_KEY_TABLE_OFFSET + MIGR_KEY_TABLE_BYTES)), 0);
    constexpr std::uint32_t kBound = 5 | MIGR_QPN_VALID;
    ASSERT_EQ(pwrite(kernel.file, &kBound, sizeof(kBound), MIGR_QPN_TABLE_OFFSET + 6 * sizeof(kBound)), ssize_t{sizeof(kBound)});
  }
  void TearDown() override {
    kernel.maps_until_full = -1;
    close(kernel.file);
    kernel.file = -1;
  }
  /// "r--p", as /proc/self/maps has it
  static std::string rights_of(const void* address) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      unsigned long from = 0, to = 0;
      char rights[5] = "";
      sscanf(line.c_str(), "%lx-%lx %4s", &from, &to, rights);
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      if (from <= at && at < to) return rights;
    }
    return "none";
  }
};

TEST_F(WithModule, WhatReplacesItsTablesIsNotCountedUntilItIsWritten) {
  KernelLink link(-1);
  ASSERT_TRUE(link.attached());
  EXPECT_EQ(link.why_private(), "");
  EXPECT_EQ(link.qpn_table()[6], 5 | MIGR_QPN_VALID);
  EXPECT_EQ(link.detach(), 0);
  EXPECT_FALSE(link.attached());
  EXPECT_EQ(link.qpn_table()[6], 0u);
  EXPECT_EQ(rights_of(link.qpn_table()), "r--p");
  EXPECT_EQ(rights_of(link.key_table()), "r--p");
  EXPECT_EQ(link.bind_qp(1, 2), 0);
  EXPECT_EQ(link.qpn_table()[2], 1 | MIGR_QPN_VALID);
  EXPECT_EQ(link.bind_mr(0, 0x1200, 0, 0x3400, 0), 0);
  EXPECT_EQ(link.reattach(-1), 0);
  EXPECT_EQ(link.qpn_table()[6], 5 | MIGR_QPN_VALID);
  EXPECT_EQ(link.qpn_table()[2], 0u);
}

TEST_F(WithModule, WithoutRoomItStaysAttached) {
  for (const int room : {0, 1}) {
    KernelLink link(-1);
    ASSERT_TRUE(link.attached());
    const auto* const table = link.qpn_table();
    kernel.maps_until_full = room;
    EXPECT_EQ(link.detach(), ENOMEM);
    EXPECT_TRUE(link.attached());
    EXPECT_EQ(link.qpn_table(), table);
    EXPECT_EQ(table[6], 5 | MIGR_QPN_VALID);
    kernel.maps_until_full = -1;
    EXPECT_EQ(link.detach(), 0);
  }
}

TEST_F(WithModule, ThatRefusesItSaysWhy) {
  kernel.attach_fails = EPERM;
  EXPECT_EQ(KernelLink(-1).why_private(), "cannot attach to /dev/migr: Operation not permitted");
  kernel.attach_fails = EPROTONOSUPPORT;
  EXPECT_NE(KernelLink(-1).why_private().find("ABI version"), std::string::npos);
  kernel.attach_fails = 0;
}

TEST(HighFd, MovesUpClosesTheOldOneAndOnExec) {
  const int low = open("/dev/null", O_RDONLY);
  ASSERT_GE(low, 0);
  const int high = to_high_fd(low);
  ASSERT_GT(high, low);
  EXPECT_EQ(fcntl(low, F_GETFD), -1);
  EXPECT_EQ(fcntl(high, F_GETFD), FD_CLOEXEC);
  close(high);
}

}  // namespace
}  // namespace migr
