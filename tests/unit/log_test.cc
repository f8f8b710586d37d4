// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "agent/log.h"

#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace migr {
namespace {

/// What a process logs to standard error, which is a pipe; `journal`: JOURNAL_STREAM says that this is the journal.
std::string logged(bool journal, bool verbose) {
  int p[2];
  EXPECT_EQ(pipe(p), 0);
  const pid_t child = fork();
  if (child == 0) {
    struct stat st;
    if (fstat(p[1], &st) || dup2(p[1], STDERR_FILENO) < 0) _exit(1);
    setenv("JOURNAL_STREAM", (std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino + (journal ? 0 : 1))).c_str(), 1);
    log_to_stderr("name", verbose);
    spdlog::debug("what {}", 1);
    spdlog::info("what {}", 2);
    spdlog::warn("what {}", 3);
    spdlog::error("what {}", 4);
    spdlog::critical("what {}", 5);
    _exit(0);
  }
  close(p[1]);
  std::string said;
  char buf[256];
  for (ssize_t n; (n = read(p[0], buf, sizeof buf)) > 0;) said.append(buf, static_cast<std::size_t>(n));
  close(p[0]);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return said;
}

TEST(Log, GivesTheJournalItsLevelsAndNoTime) {
  EXPECT_EQ(logged(true, false), "<6>what 2\n<4>what 3\n<3>what 4\n<2>what 5\n");
  EXPECT_EQ(logged(true, true), "<7>what 1\n<6>what 2\n<4>what 3\n<3>what 4\n<2>what 5\n");
}

TEST(Log, HasTimeAndNameElsewhere) {
  const std::string said = logged(false, false);
  EXPECT_NE(said.find("[name] [warning] what 3\n"), std::string::npos) << said;
  EXPECT_TRUE(said.starts_with("[20")) << said;
}

}  // namespace
}  // namespace migr
