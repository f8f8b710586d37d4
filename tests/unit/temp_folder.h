// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What tests of the agent begin and wait with: a folder for what they write, and a wait with a limit.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>

namespace migr {

/// Empty, and removed with its owner.
struct TempFolder {
  std::string path;
  TempFolder() {
    char t[] = "/tmp/migr-test-XXXXXX";
    EXPECT_NE(mkdtemp(t), nullptr);
    path = t;
  }
  ~TempFolder() { std::filesystem::remove_all(path); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
};

/// Until it is so, or the limit has run out. @return whether it is
inline bool within(int limit_ms, const std::function<bool()>& so) {
  for (int ms = 0; ms < limit_ms && !so(); ms += 10) usleep(10'000);
  return so();
}

}  // namespace migr
