// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Changes of links while migrd is away.
#include "../../libmigr/links/reports.h"

#include <gtest/gtest.h>

namespace {

using migr::links::Reports;

migr_links_switch number(std::uint64_t n) {
  migr_links_switch out{};
  out.when_ns = n;
  return out;
}

TEST(Reports, TheNewestAreKeptAndTheOthersCounted) {
  constexpr std::uint64_t kMore = 100;
  Reports reports;
  for (std::uint64_t n = 0; n < Reports::kMost + kMore; ++n) reports.add(number(n));
  std::uint64_t dropped = 0;
  const auto told = reports.take(dropped);
  EXPECT_EQ(dropped, kMore);
  ASSERT_EQ(told.size(), Reports::kMost);
  EXPECT_EQ(told.front().when_ns, kMore);
  EXPECT_EQ(told.back().when_ns, Reports::kMost + kMore - 1);
}

TEST(Reports, AreTakenOnce) {
  Reports reports;
  std::uint64_t dropped = 0;
  for (std::uint64_t n = 0; n <= Reports::kMost; ++n) reports.add(number(n));
  reports.take(dropped);
  reports.add(number(7));
  const auto told = reports.take(dropped);
  EXPECT_EQ(dropped, 0u);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].when_ns, 7u);
  EXPECT_TRUE(reports.take(dropped).empty());
}

}  // namespace
