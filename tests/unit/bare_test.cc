// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a dump has left of a process that it has stopped, with a played nft.
#include "agent/bare.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "agent/file_tree.h"
#include "agent/process.h"
#include "agent/process_session.h"  // Fd

namespace migr::bare_test {
namespace {

int option(const Fd& socket, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  return getsockopt(socket.n, level, name, &value, &size) ? -1 : value;
}

/// It has a connection to itself.
struct AStoppedProcess : ::testing::Test {
  static std::string made() {
    char name[] = "/tmp/bare_test.XXXXXX";
    return mkdtemp(name);
  }
  void SetUp() override {
    std::ofstream(root + "/nft") << "#!/bin/sh\necho \"$*\" >>" << root << "/nft.log\nexit $(cat " << root << "/status)\n";
    std::ofstream(root + "/status") << "0\n";
    ASSERT_EQ(chmod((root + "/nft").c_str(), 0755), 0);
    path = getenv("PATH");
    setenv("PATH", (root + ":" + path).c_str(), 1);
    const Fd server(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof to;
    ASSERT_EQ(bind(server.n, reinterpret_cast<sockaddr*>(&to), size) || listen(server.n, 1) || getsockname(server.n, reinterpret_cast<sockaddr*>(&to), &size), 0);
    one = Fd(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(one.n, reinterpret_cast<sockaddr*>(&to), size), 0);
    other = Fd(accept(server.n, nullptr, nullptr));
    pid = fork();
    if (!pid)
      for (;;) pause();
    ASSERT_EQ(kill(pid, SIGSTOP), 0);
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, WUNTRACED), pid);
  }
  void TearDown() override {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    setenv("PATH", path.c_str(), 1);
    std::filesystem::remove_all(root);
  }
  std::string deleted() const {
    const std::string table = "table inet CRIU-" + std::to_string(pid);
    return table + "; delete " + table + "\n";
  }

  const std::string root = made();
  std::string path;
  Fd one, other;
  pid_t pid = 0;
  const Config config;
};

TEST_F(AStoppedProcess, HasItsConnectionsBackWhenItGoesOn) {
  constexpr int kOn = 1;
  for (const Fd* end : {&one, &other})
    if (setsockopt(end->n, IPPROTO_TCP, TCP_REPAIR, &kOn, sizeof kOn)) GTEST_SKIP() << "repair mode is for root";
  EXPECT_EQ(send(one.n, "x", 1, MSG_NOSIGNAL), -1);
  EXPECT_TRUE(Bare(config).resume(pid));
  for (const Fd* end : {&one, &other}) {
    EXPECT_EQ(option(*end, IPPROTO_TCP, TCP_REPAIR), 0);
    EXPECT_EQ(option(*end, SOL_SOCKET, SO_REUSEADDR), 1);
  }
  char got = 0;
  EXPECT_EQ(send(one.n, "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(recv(other.n, &got, 1, 0), 1);
  EXPECT_EQ(text_of(root + "/nft.log"), deleted());
}

TEST_F(AStoppedProcess, KeepsTheOptionsOfWhatWasNotDumped) {
  EXPECT_TRUE(Bare(config).resume(pid));
  EXPECT_EQ(option(one, SOL_SOCKET, SO_REUSEADDR), 0);
}

TEST_F(AStoppedProcess, GoesOnWhateverBecomesOfTheFilter) {
  std::ofstream(root + "/status") << "1\n";
  const auto s = Bare(config).resume(pid);
  ASSERT_FALSE(s) << "it is tried again";
  EXPECT_NE(s.error().text.find("CRIU-" + std::to_string(pid)), std::string::npos) << s.error().text;
  EXPECT_FALSE(process_stopped(pid));
}

TEST_F(AStoppedProcess, WithoutConnectionsNeedsNoNft) {
  setenv("PATH", "/none", 1);
  EXPECT_TRUE(Bare(config).resume(pid));
  EXPECT_FALSE(process_stopped(pid));
  std::thread parent([&] { waitpid(pid, nullptr, 0); });
  EXPECT_TRUE(Bare(config).remove(pid));
  parent.join();
}

TEST_F(AStoppedProcess, WithConnectionsNeedsNftUntilItsFilterHasGone) {
  constexpr int kOn = 1;
  if (setsockopt(one.n, IPPROTO_TCP, TCP_REPAIR, &kOn, sizeof kOn)) GTEST_SKIP() << "repair mode is for root";
  const Bare bare(config);
  setenv("PATH", "/none", 1);
  for (int i = 0; i < 2; i++) {
    const auto s = bare.resume(pid);
    ASSERT_FALSE(s) << "its connections are cut off";
    EXPECT_EQ(s.error().code, ENOENT);
  }
  setenv("PATH", root.c_str(), 1);
  EXPECT_TRUE(bare.resume(pid));
}

TEST_F(AStoppedProcess, LeavesNoFilterWhereItHasGone) {
  std::thread parent([&] { waitpid(pid, nullptr, 0); });
  EXPECT_TRUE(Bare(config).remove(pid));
  parent.join();
  EXPECT_EQ(text_of(root + "/nft.log"), deleted());
}

}  // namespace
}  // namespace migr::bare_test
