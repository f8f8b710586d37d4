// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A checkpoint that does not end, and what is of a container, with a played runc.
#include "agent/runc.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "agent/file_tree.h"
#include "agent/limits.h"
#include "agent/process.h"

namespace migr::runc_test {
namespace {

namespace fs = std::filesystem;

struct ARunc : ::testing::Test {
  static std::string made() {
    char name[] = "/tmp/runc_test.XXXXXX";
    return mkdtemp(name);
  }
  void SetUp() override {
    kCheckpointMs = 500;
    config.runc = root + "/runc";
  }
  void TearDown() override { fs::remove_all(root); }
  /// Its CRIU hangs; then it does this.
  Status checkpoint_with(const std::string& then) {
    std::ofstream(config.runc) << "#!/bin/sh\nread -r begin\nsleep 30 &\necho $! >" << root << "/criu\nwait $!\n"
                               << then << "\n";
    EXPECT_EQ(chmod(config.runc.c_str(), 0755), 0);
    const Runc runc(config);
    auto ahead = Child::start({config.runc}, {}, root + "/log", true);
    EXPECT_TRUE(ahead);
    const Status s = runc.checkpoint(*ahead, "web", root + "/log");
    EXPECT_TRUE(ahead->wait(5'000)) << "it goes on";
    return s;
  }
  pid_t criu() const { return std::atoi(first_line_of(root + "/criu").c_str()); }

  const std::string root = made();
  Config config;
};

// It takes the connections out of repair mode.
TEST_F(ARunc, TidiesUpBehindACriuThatHangs) {
  const Status s = checkpoint_with("echo done >" + root + "/tidy; exit 1");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
  EXPECT_FALSE(process_lives(criu()));
  EXPECT_EQ(first_line_of(root + "/tidy"), "done");
}

TEST_F(ARunc, ThatHangsItselfIsEnded) {
  kHookMs = 300;
  const Status s = checkpoint_with("sleep 30");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
  EXPECT_FALSE(process_lives(criu()));
}

// As systemd is, which has a group of its own below the container's.
TEST_F(ARunc, FindsWhatIsBesideAFirstProcessThatHasMovedOn) {
  const std::string group = root + "/cgroup";
  config.runc_root = root + "/containers";
  fs::create_directories(group + "/init.scope");
  fs::create_directories(config.runc_root + "/web");
  std::ofstream(group + "/cgroup.procs") << "4194303\n";
  std::ofstream(group + "/init.scope/cgroup.procs") << getpid() << "\n";
  std::ofstream(config.runc_root + "/web/state.json") << R"({"cgroup_paths": {"": ")" << group << R"("}})";
  const Runc runc(config);
  auto pids = runc.pids({.id = "web", .status = "running", .bundle = "", .pid = getpid()});
  ASSERT_TRUE(pids) << pids.error().text;
  EXPECT_EQ(*pids, (std::vector<pid_t>{4194303, getpid()}));
}

}  // namespace
}  // namespace migr::runc_test
