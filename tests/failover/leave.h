/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#ifndef MIGR_FAILOVER_LEAVE_H
#define MIGR_FAILOVER_LEAVE_H

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

/// What main() does. The threads of the libraries and of the devices have no end: nothing is destroyed under them.
/// @param folder  of the tests; is removed
[[noreturn]] inline void run_and_leave(int argc, char** argv, const std::filesystem::path& folder) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  std::error_code ec;
  std::filesystem::remove_all(folder, ec);
  fflush(nullptr);
  _exit(result);
}

#endif
