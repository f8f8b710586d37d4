/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "../../libmigr/kernel_link.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../../libmigr/high_fd.h"

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

TEST(WithoutModule, TablesArePrivateAndItIsSaidOnce) {
  if (access("/dev/migr", F_OK) == 0) GTEST_SKIP() << "migr.ko is loaded here";
  unsetenv("MIGR_TABLES");
  testing::internal::CaptureStderr();
  KernelLink one(-1);
  KernelLink two(-1);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("no /dev/migr"), said.npos) << said;
  EXPECT_EQ(said.find("libmigr:"), said.rfind("libmigr:")) << said;
  EXPECT_FALSE(one.attached());
  EXPECT_EQ(one.bind_qp(1, 1), 0);
  EXPECT_NE(one.reattach(-1), 0);
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
