// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a dump has left of a process that it has stopped, with a played nft, and what a process has to do with others of its host.
#include "agent/bare.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "agent/fd.h"
#include "agent/file_tree.h"
#include "agent/process.h"
#include "agent/runtime.h"
#include "temp_folder.h"

namespace migr::bare_test {
namespace {

int option(const Fd& socket, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  return getsockopt(socket.n, level, name, &value, &size) ? -1 : value;
}

/// It has a connection to itself.
struct AStoppedProcess : ::testing::Test {
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
  }
  std::string deleted() const {
    const std::string table = "table inet CRIU-" + std::to_string(pid);
    return table + "; delete " + table + "\n";
  }

  const TempFolder temp;
  const std::string root = temp.path;
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

/// With a pipe.
struct AProcessOfAHost : ::testing::Test {
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    reads = Fd(ends[0]);
    writes = Fd(ends[1]);
    name = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(reads.n));
  }
  void TearDown() override {
    if (child > 0) kill(child, SIGKILL);  // it may have been stopped before it could say that it ends with its parent
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  /// It has nothing else open.
  /// @param ends  a descriptor of ours, and what it is there
  void start(const std::vector<std::pair<int, unsigned>>& ends) {
    pid = fork();
    if (!pid) {
      unsigned next = 0;
      for (const auto& [from, to] : ends) {
        dup2(from, static_cast<int>(to));
        if (to > next) close_range(next, to - 1, 0);
        next = to + 1;
      }
      close_range(next, ~0u, 0);
      raise(SIGSTOP);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, WUNTRACED), pid);
  }
  /// With a child that stands still.
  void start_family() {
    pid = fork();
    if (!pid) {
      if (!fork()) prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
    while (tree_of(pid).size() < 2) usleep(1000);
    child = tree_of(pid)[1];
    kill(child, SIGSTOP);
    while (!process_stopped(child)) usleep(1000);
  }
  std::vector<PipeElsewhere> pipes() const { return pipes_elsewhere(tree_of(pid)); }

  /// Another one, by TCP over the loopback.
  /// @param family  of the end that listens
  void connect_ends(int family = AF_INET) {
    const Fd server(socket(family, SOCK_STREAM, 0));
    sockaddr_in6 at{};
    at.sin6_family = AF_INET6;  // ::, and so IPv4, too
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = family == AF_INET ? sizeof to : sizeof at;
    auto* const listens = family == AF_INET ? reinterpret_cast<sockaddr*>(&to) : reinterpret_cast<sockaddr*>(&at);
    if (bind(server.n, listens, size) || listen(server.n, 1) || getsockname(server.n, listens, &size)) GTEST_SKIP() << "no such addresses here";
    if (family != AF_INET) to.sin_port = at.sin6_port;
    one = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(one.n, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    other = Fd(accept4(server.n, nullptr, nullptr, SOCK_CLOEXEC));
  }
  void may_not_leave() const {
    const auto s = Bare(config).connections_stay(pid);
    ASSERT_FALSE(s);
    EXPECT_EQ(s.error().code, EOPNOTSUPP);
    EXPECT_NE(s.error().text.find("process " + std::to_string(pid) + " has a TCP connection to a process of this host that does not move with it (descriptor 5)"), std::string::npos)
        << s.error().text;
  }

  /// Likewise, by a UNIX socket.
  void connect_unix(int type) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends), 0);
    one = Fd(ends[0]);
    other = Fd(ends[1]);
  }
  void connect_unix_at(const std::string& path) {
    const Fd server(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::snprintf(at.sun_path, sizeof at.sun_path, "%s", path.c_str());
    ASSERT_EQ(bind(server.n, reinterpret_cast<sockaddr*>(&at), sizeof at) || listen(server.n, 1), 0);
    one = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(one.n, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    other = Fd(accept4(server.n, nullptr, nullptr, SOCK_CLOEXEC));
  }
  std::string why_not(const Config& with) const {
    const auto s = Bare(with).connections_stay(pid);
    if (s) return "";
    EXPECT_EQ(s.error().code, EOPNOTSUPP);
    return s.error().text;
  }

  Fd reads, writes;
  std::string name;
  Fd one, other;
  pid_t pid = 0, child = 0;
  const Config config;
};

TEST_F(AProcessOfAHost, WhoStoodStillBeforeADumpDoesAfterIt) {
  start_family();
  const Bare bare(config);
  const auto stood = bare.standing(pid);
  EXPECT_EQ(stood, std::vector<pid_t>{child});
  kill(pid, SIGSTOP);
  while (!process_stopped(pid)) usleep(1000);
  (void)bare.resume(pid, stood);
  EXPECT_FALSE(process_stopped(pid));
  EXPECT_TRUE(process_stopped(child));
  kill(pid, SIGSTOP);
  while (!process_stopped(pid)) usleep(1000);
  (void)bare.resume(pid);
  EXPECT_FALSE(process_stopped(child)) << "the dump has stopped it";
}

TEST_F(AProcessOfAHost, WithoutADumpNobodyGoesOn) {
  start_family();
  (void)Bare(config).resume(pid);
  EXPECT_TRUE(process_stopped(child));
}

TEST_F(AProcessOfAHost, WhoseOutputIsReadByAnotherIsPiped) {
  start({{writes.n, 1}});
  ASSERT_EQ(pipes().size(), 1u);
  EXPECT_EQ(pipes()[0].name, name);
  EXPECT_EQ(pipes()[0].other, getpid());
  const Runtime runtime(config);
  EXPECT_TRUE(runtime.is_piped(bare_name(pid)));
  EXPECT_TRUE(Bare(config).pipes_stay(pid)) << "there it is /dev/null";
  char folder[] = "/tmp/bare_test.XXXXXX";
  const std::string images = mkdtemp(folder), file = images + "/descriptors.json";
  EXPECT_TRUE(runtime.early_images(bare_name(pid), images));
  EXPECT_EQ(text_of(file), "[\"" + name + "\"]\n");
  EXPECT_EQ(std::filesystem::status(file).permissions(), std::filesystem::perms(0600));
  std::filesystem::remove_all(images);
}

TEST_F(AProcessOfAHost, WithAnotherPipeToOneThatStaysIsRefused) {
  start({{reads.n, 9}});
  const auto s = Bare(config).pipes_stay(pid);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EOPNOTSUPP);
  for (const std::string& part : {"process " + std::to_string(pid) + " ", "process " + std::to_string(getpid()) + " ", std::string("(descriptor 9)")})
    EXPECT_NE(s.error().text.find(part), std::string::npos) << s.error().text;
}

TEST_F(AProcessOfAHost, KeepsAPipeOfItsOwn) {
  start({{reads.n, 0}, {writes.n, 7}});
  EXPECT_TRUE(pipes().empty()) << "whoever else may have it open";
}

TEST_F(AProcessOfAHost, KeepsAPipeThatNobodyReadsAnyMore) {
  start({{writes.n, 7}});
  reads = Fd();
  writes = Fd();
  EXPECT_TRUE(pipes().empty());
  EXPECT_TRUE(Bare(config).pipes_stay(pid));
  EXPECT_FALSE(Runtime(config).is_piped(bare_name(pid)));
}

TEST_F(AProcessOfAHost, ThatIsConnectedToOneThatStaysIsRefused) {
  connect_ends();
  start({{one.n, 5}});
  may_not_leave();
}

TEST_F(AProcessOfAHost, ThatIsStillToldSomethingByOneThatStaysIsRefused) {
  connect_ends();
  start({{one.n, 5}});
  ASSERT_EQ(shutdown(one.n, SHUT_WR), 0);
  may_not_leave();
}

TEST_F(AProcessOfAHost, ThatIsConnectedToItselfMayLeave) {
  connect_ends();
  start({{one.n, 5}, {other.n, 6}});
  EXPECT_TRUE(Bare(config).connections_stay(pid));
}

TEST_F(AProcessOfAHost, ThatIsConnectedToItselfByBothKindsOfAddressesMayLeave) {
  connect_ends(AF_INET6);
  if (IsSkipped()) return;
  start({{one.n, 5}, {other.n, 6}});
  EXPECT_TRUE(Bare(config).connections_stay(pid));
}

TEST_F(AProcessOfAHost, WhoseOtherEndHasClosedMayLeave) {
  connect_ends();
  start({{one.n, 5}});
  one = Fd();
  other = Fd();
  EXPECT_TRUE(Bare(config).connections_stay(pid));
}

TEST_F(AProcessOfAHost, ThatIsConnectedByAUnixSocketToOneThatStaysIsRefused) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    connect_unix(type);
    start({{one.n, 5}});
    const std::string why = why_not(config), whose = "process " + std::to_string(pid) + " (agent_test) is connected to a process of this host that does not move with it, over a UNIX socket (descriptor 5)";
    EXPECT_NE(why.find(whose), std::string::npos) << why;
    TearDown();
  }
  pid = 0;
}

TEST_F(AProcessOfAHost, WithBothEndsOfAUnixSocketMayLeave) {
  connect_unix(SOCK_STREAM);
  start({{one.n, 5}, {other.n, 6}});
  EXPECT_EQ(why_not(config), "");
}

TEST_F(AProcessOfAHost, WithDatagramsOrAClosedUnixSocketMayLeave) {
  connect_unix(SOCK_DGRAM);
  start({{one.n, 5}});
  EXPECT_EQ(why_not(config), "") << "CRIU connects it again";
  TearDown();
  connect_unix(SOCK_STREAM);
  start({{one.n, 5}});
  other = Fd();
  EXPECT_EQ(why_not(config), "");
}

TEST_F(AProcessOfAHost, WhoseUnixSocketIsLibmigrsMayLeave) {
  char folder[] = "/tmp/bare_test.XXXXXX";
  Config with = config;
  with.run_dir = mkdtemp(folder);
  connect_unix_at(with.run_dir + "/proc.sock");
  start({{one.n, 5}});
  EXPECT_EQ(why_not(with), "") << "it closes it before";
  const std::string why = why_not(config);
  EXPECT_NE(why.find("(" + with.run_dir + "/proc.sock, descriptor 5)"), std::string::npos) << why;
  std::filesystem::remove_all(with.run_dir);
}

TEST_F(AProcessOfAHost, WithAnEventfdThatIsASemaphoreIsRefused) {
  const auto may_leave = [&] {
    ContainerState c;
    c.id = bare_name(pid);
    return Runtime(config).may_leave(c);
  };
  const Fd counter(eventfd(1, EFD_CLOEXEC)), semaphore(eventfd(1, EFD_CLOEXEC | EFD_SEMAPHORE));
  start({{counter.n, 5}});
  const auto moves = may_leave();
  EXPECT_TRUE(moves) << moves.error().text;
  TearDown();
  start({{counter.n, 5}, {semaphore.n, 6}});
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(semaphore.n));
  if (std::string(std::istreambuf_iterator<char>(info), {}).find("eventfd-semaphore") == std::string::npos) GTEST_SKIP() << "this kernel does not say so";
  const auto s = may_leave();
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EOPNOTSUPP);
  EXPECT_NE(s.error().text.find("process " + std::to_string(pid) + " (agent_test) has an eventfd that is a semaphore (EFD_SEMAPHORE, descriptor 6)"), std::string::npos) << s.error().text;
}

/// Both ends of it are ours.
struct ATerminal : AProcessOfAHost {
  void SetUp() override {
    master = Fd(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    if (master.n < 0 || unlockpt(master.n)) GTEST_SKIP() << "no terminals here";
    name = ptsname(master.n);
    slave = Fd(open(name.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC));
    ASSERT_GE(slave.n, 0);
  }
  Status may_leave() const {
    ContainerState c;
    c.id = bare_name(pid);
    return Runtime(config).may_leave(c);
  }
  Fd master, slave;
};

TEST_F(ATerminal, WhoseOtherEndStaysIsRefused) {
  start({{slave.n, 1}});
  const auto s = may_leave();
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EOPNOTSUPP);
  EXPECT_NE(s.error().text.find("process " + std::to_string(pid) + " (agent_test) has a terminal (" + name + ", descriptor 1), whose other end does not move with it"), std::string::npos)
      << s.error().text;
}

TEST_F(ATerminal, IsMovedWithItsOtherEnd) {
  start({{slave.n, 0}, {master.n, 5}});
  const auto s = may_leave();
  EXPECT_TRUE(s) << s.error().text;
}

TEST_F(ATerminal, ThatWasHungUpIsNone) {
  start({{slave.n, 0}});
  slave = Fd();
  master = Fd();
  const auto s = may_leave();
  EXPECT_TRUE(s) << s.error().text;
}

TEST_F(AProcessOfAHost, ThatHasOnlyMountsOfItsOwnMayBeAUnits) {
  for (const auto& [space, said] : {std::pair(CLONE_NEWNET, " is in a container: "), {CLONE_NEWNS, " has a mount namespace of its own (a container, or a unit with PrivateTmp= and the like): "}, {CLONE_NEWNS | CLONE_NEWNET, " is in a container: "}}) {
    pid = fork();
    if (!pid) {
      if (unshare(space)) _exit(1);
      for (;;) raise(SIGSTOP);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, WUNTRACED), pid);
    if (!WIFSTOPPED(status)) {
      pid = 0;
      GTEST_SKIP() << "namespaces are for root";
    }
    const auto s = Bare(config).state(pid);
    ASSERT_FALSE(s);
    EXPECT_EQ(s.error().code, EOPNOTSUPP);
    EXPECT_NE(s.error().text.find("process " + std::to_string(pid) + said), std::string::npos) << s.error().text;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = 0;
  }
}

// CRIU says all that it has to say to its log.
TEST_F(AStoppedProcess, WhoseMemoryCannotBeCopiedAheadHasAReason) {
  std::ofstream(root + "/criu") << "#!/bin/sh\nwhile [ $# -gt 1 ]; do case $1 in -W) work=$2 ;; -o) log=$2 ;; esac; shift; done\n"
                                   "echo '(00.01) Error (criu/mem.c:1): no memory' >\"$work/$log\"\nexit 1\n";
  ASSERT_EQ(chmod((root + "/criu").c_str(), 0755), 0);
  Config with = config;
  with.criu = root + "/criu";
  const auto s = Bare(with).pre_dump(pid, root + "/images", root + "/to", "", root + "/work");
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find("CRIU: (00.01) Error (criu/mem.c:1): no memory"), std::string::npos) << s.error().text;
}

}  // namespace
}  // namespace migr::bare_test
