// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What runc does not do by itself, with a played one: a checkpoint that does not end, or whose runc is killed; the container's
// cgroup, which is played, too.
#include "agent/runc.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "agent/fd.h"
#include "agent/file_tree.h"
#include "agent/limits.h"
#include "agent/process.h"
#include "agent/runtime.h"
#include "temp_folder.h"

namespace migr::runc_test {
namespace {

namespace fs = std::filesystem;

struct ARunc : ::testing::Test {
  void SetUp() override {
    kCheckpointMs = 500;
    config.runc = root + "/runc";
  }
  /// It does `first`; its CRIU hangs; then it does this.
  Status checkpoint_with(const std::string& then, const std::string& first = {}) {
    std::ofstream(config.runc) << "#!/bin/sh\nread -r begin\n"
                               << first << "sleep 30 &\necho $! >" << root << "/criu\nwait $!\n"
                               << then << "\n";
    EXPECT_EQ(chmod(config.runc.c_str(), 0755), 0);
    const Runc runc(config);
    auto ahead = Child::start({config.runc}, {}, root + "/log", true);
    EXPECT_TRUE(ahead);
    const Status s = runc.checkpoint(*ahead, "web", root + "/log");
    EXPECT_TRUE(ahead->wait(5'000)) << "it goes on";
    return s;
  }
  /// Its runc does this, and fails; nothing of it is left when the checkpoint has.
  Status checkpoint_by(const std::string& script) {
    kCheckpointMs = 10'000;
    std::ofstream(config.runc) << "#!/bin/sh\nread -r begin\n"
                               << script << "\n";
    EXPECT_EQ(chmod(config.runc.c_str(), 0755), 0);
    auto ahead = Child::start({config.runc}, {}, root + "/log", true);
    EXPECT_TRUE(ahead);
    return Runc(config).checkpoint(*ahead, "web", root + "/log");
  }
  /// A container whose cgroup is $group; runc is played by this, its verb is $3.
  void contain(const std::string& script) {
    config.runc_root = root + "/containers";
    fs::create_directories(config.runc_root + "/web");
    fs::create_directories(group);
    for (const char* file : {"/cgroup.kill", "/cgroup.freeze", "/cgroup.events"}) std::ofstream(group + file) << "-";
    std::ofstream(config.runc_root + "/web/state.json") << R"({"cgroup_paths": {"": ")" << group << R"("}})";
    std::ofstream(config.runc) << "#!/bin/sh\ngroup=" << group << "\n"
                               << script << "\n";
    EXPECT_EQ(chmod(config.runc.c_str(), 0755), 0);
  }
  pid_t criu() const { return std::atoi(first_line_of(root + "/criu").c_str()); }

  const TempFolder temp;
  const std::string root = temp.path, group = root + "/group";
  Config config;
};

// It takes the connections out of repair mode.
TEST_F(ARunc, TidiesUpBehindACriuThatHangs) {
  const Status s = checkpoint_with("echo done >" + root + "/tidy; exit 1");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
  EXPECT_NE(s.error().text.find("runc did not end within 500 ms; if it only needs longer, raise \"checkpoint_ms\""), std::string::npos) << s.error().text;
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

// What of it is nobody's child any more has no time of its own.
TEST_F(ARunc, ThatHangsIsWaitedForOnceOnly) {
  kCheckpointMs = 2'000;
  const auto began = std::chrono::steady_clock::now();
  const Status s = checkpoint_with("exit 1", "(sleep 60 &)\n");
  ASSERT_FALSE(s);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(2 * kCheckpointMs));
}

// As systemd is, which has a group of its own below the container's.
TEST_F(ARunc, FindsWhatIsBesideAFirstProcessThatHasMovedOn) {
  contain("exit 1");
  fs::create_directories(group + "/init.scope");
  std::ofstream(group + "/cgroup.procs") << "4194303\n";
  std::ofstream(group + "/init.scope/cgroup.procs") << getpid() << "\n";
  const Runc runc(config);
  auto pids = runc.pids({.id = "web", .status = "running", .bundle = "", .pid = getpid()});
  ASSERT_TRUE(pids) << pids.error().text;
  EXPECT_EQ(*pids, (std::vector<pid_t>{4194303, getpid()}));
}

TEST_F(ARunc, SaysHowWhatIsBesideTheFirstProcessIsStarted) {
  contain("exit 1");
  std::ofstream(group + "/cgroup.procs") << getpid() << "\n1\n";
  const auto s = Runtime(config).all_dumped({.id = "web", .status = "running", .bundle = "", .pid = getpid()});
  ASSERT_FALSE(s);
  EXPECT_TRUE(s.error().text.ends_with("(" + config.runc + " --root " + config.runc_root + " exec web setsid -f CMD)")) << s.error().text;
}

// Its CRIU stops the container once more when it ends: until then it must not be let run.
TEST_F(ARunc, ThatIsKilledIsOutlastedByItsCriu) {
  const Status s = checkpoint_by("(sleep 1; echo done >" + root + "/criu) &\nkill -9 $$");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ECHILD);
  EXPECT_EQ(first_line_of(root + "/criu"), "done");
}

// runc ends the first process only, and lets the others run.
TEST_F(ARunc, RemovesWhatHasEndedAsAWhole) {
  contain("cat $group/cgroup.kill $group/cgroup.events >" + root + "/seen");
  std::ofstream(group + "/cgroup.events") << "populated 1\nfrozen 1\n";
  std::thread kernel([this] {
    for (int i = 0; i < 500 && first_line_of(group + "/cgroup.kill") != "1"; i++) usleep(10'000);
    usleep(100'000);
    std::ofstream(group + "/cgroup.events") << "populated 0\nfrozen 1\n";
  });
  EXPECT_TRUE(Runc(config).remove("web"));
  kernel.join();
  EXPECT_EQ(text_of(root + "/seen"), "1populated 0\nfrozen 1\n");
}

TEST_F(ARunc, HoldsAContainerBeforeItsNetworkGoes) {
  contain("");
  config.net_hook = root + "/net";
  std::ofstream(config.net_hook) << "#!/bin/sh\necho \"$1 $(cat " << group << "/cgroup.freeze " << group << "/cgroup.events)\" >" << root << "/seen\n";
  ASSERT_EQ(chmod(config.net_hook.c_str(), 0755), 0);
  Child none;
  std::ofstream(root + "/config.json") << "{}";
  EXPECT_TRUE(Runc(config).detach_held(none, root, "web"));
  EXPECT_EQ(first_line_of(group + "/cgroup.freeze"), "-") << "it has no address: the checkpoint does it";
  std::ofstream(root + "/config.json") << R"({"annotations": {"org.migr.net.ip": "10.0.0.1/24"}})";
  std::thread kernel([this] {
    for (int i = 0; i < 500 && first_line_of(group + "/cgroup.freeze") != "1"; i++) usleep(10'000);
    usleep(50'000);
    std::ofstream(group + "/cgroup.events") << "populated 1\nfrozen 1\n";
  });
  EXPECT_TRUE(Runc(config).detach_held(none, root, "web"));
  kernel.join();
  EXPECT_EQ(text_of(root + "/seen"), "detach 1populated 1\nfrozen 1\n");
}

TEST_F(ARunc, ThatWaitsForWhatNeverFrozeIsNotNeeded) {
  contain("echo 'time=\"\" level=error msg=\"timeout of 10s reached waiting for the cgroup to freeze\"' >&2; exit 1");
  EXPECT_TRUE(Runc(config).resume("web"));
  EXPECT_EQ(first_line_of(group + "/cgroup.freeze"), "0");
}

// A CRIU that was killed has left it so, and its runc was killed, too. The container is frozen: it sends nothing before.
TEST_F(ARunc, ResumesWhatHasItsConnectionsBack) {
  const Fd socket(::socket(AF_INET, SOCK_STREAM, 0));
  constexpr int kOn = 1;
  if (setsockopt(socket.n, IPPROTO_TCP, TCP_REPAIR, &kOn, sizeof kOn)) GTEST_SKIP() << "repair mode is for root";
  const pid_t pid = fork();
  if (!pid)
    for (;;) pause();
  contain("[ \"$3\" != resume ] || kill -9 " + std::to_string(pid));
  std::ofstream(group + "/cgroup.procs") << pid << "\n";
  std::ofstream(config.runc_root + "/web/state.json") << R"({"init_process_pid": )" << pid << R"(, "cgroup_paths": {"": ")" << group << R"("}})";
  EXPECT_TRUE(Runc(config).resume("web"));
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
  int on = -1, reuse = -1;
  socklen_t size = sizeof on;
  EXPECT_EQ(getsockopt(socket.n, IPPROTO_TCP, TCP_REPAIR, &on, &size) || getsockopt(socket.n, SOL_SOCKET, SO_REUSEADDR, &reuse, &size), 0);
  EXPECT_EQ(on, 0);
  EXPECT_EQ(reuse, 1);
}

// A root of a user namespace has to get through what it makes, and nobody through what migrd does.
TEST_F(ARunc, RestoresWithAUmaskOfItsOwn) {
  contain("umask >" + root + "/umask; echo \"$3 $*\" >" + root + "/told");
  const mode_t before = umask(0077);
  auto child = Runc(config).partial_restore("web", "/bundle", root + "/images", root + "/work", root + "/log");
  EXPECT_EQ(umask(before), static_cast<mode_t>(0077));
  ASSERT_TRUE(child) << child.error().text;
  EXPECT_TRUE(child->wait(5'000));
  EXPECT_EQ(child->status(), 0) << text_of(root + "/log");
  EXPECT_EQ(first_line_of(root + "/umask"), "0022");
  EXPECT_TRUE(first_line_of(root + "/told").starts_with("partial-restore --root ")) << text_of(root + "/told");
}

TEST_F(ARunc, WithoutTheCgroupSaysWhyItDoesNotResume) {
  contain("echo 'msg=\"no such container\"' >&2; exit 1");
  fs::remove_all(group);
  const Status s = Runc(config).resume("web");
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find("no such container"), std::string::npos);
  EXPECT_FALSE(fs::exists(group));
}

// A clock of its own would end a registration for which "ready_ms" has been raised.
TEST(CriuEnv, SaysHowLongThePluginWaits) {
  const int ready = std::exchange(kReadyMs, 200'000);
  const auto env = criu_env(Config());
  kReadyMs = ready;
  const auto has = [&](const std::string& v) { return std::find(env.begin(), env.end(), v) != env.end(); };
  EXPECT_TRUE(has("MIGR_RESTORE_GO_LIMIT=3600"));
  EXPECT_TRUE(has("MIGR_RESTORE_REGISTER_LIMIT=180")) << "and 20 s to tell of it";
  EXPECT_TRUE(has("MIGR_RESTORE_COMMIT_LIMIT=30"));
}

}  // namespace
}  // namespace migr::runc_test
