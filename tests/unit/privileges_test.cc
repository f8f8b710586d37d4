// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrd keeps of root's capabilities: all that docs/threat-model.md says and no more; with one less what it is there for fails;
// and what migrd starts has all of them.
#include "agent/privileges.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>

#include "agent/file_tree.h"
#include "agent/process.h"
#include "agent/process_session.h"
#include "agent/thread_scan.h"

namespace migr::privileges_test {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kOther = 1234;
constexpr int kNothing = -1;

// Of what docs/threat-model.md may name.
const std::map<std::string, int> kNames = {
    {"CHOWN", CAP_CHOWN}, {"DAC_OVERRIDE", CAP_DAC_OVERRIDE}, {"DAC_READ_SEARCH", CAP_DAC_READ_SEARCH}, {"FOWNER", CAP_FOWNER}, {"FSETID", CAP_FSETID}, {"KILL", CAP_KILL}, {"NET_ADMIN", CAP_NET_ADMIN}, {"NET_BIND_SERVICE", CAP_NET_BIND_SERVICE}, {"NET_RAW", CAP_NET_RAW}, {"MKNOD", CAP_MKNOD}, {"SYS_ADMIN", CAP_SYS_ADMIN}, {"SYS_NICE", CAP_SYS_NICE}, {"SYS_PTRACE", CAP_SYS_PTRACE}, {"SYS_RESOURCE", CAP_SYS_RESOURCE}, {"CHECKPOINT_RESTORE", CAP_CHECKPOINT_RESTORE}};

std::uint64_t bits_in(const std::string& status, const std::string& set) {
  std::smatch m;
  return std::regex_search(status, m, std::regex(set + ":\\s*([0-9a-f]+)")) ? std::stoull(m[1], nullptr, 16) : 0;
}
std::string own_status() {
  std::ifstream in("/proc/self/status");
  return {std::istreambuf_iterator<char>(in), {}};
}
bool give_up(int capability) {
  __user_cap_header_struct head{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3]{};
  if (syscall(SYS_capget, &head, sets)) return false;
  sets[CAP_TO_INDEX(capability)].permitted &= ~CAP_TO_MASK(capability);
  sets[CAP_TO_INDEX(capability)].effective &= ~CAP_TO_MASK(capability);
  return !syscall(SYS_capset, &head, sets);
}

/// In a process that has done `before` as root, then has what migrd has, less `capability`. @return whether `what` was done
bool done_without(int capability, const std::function<bool()>& what, const std::function<bool()>& before) {
  const pid_t child = fork();
  if (!child) {
    if (before && !before()) _exit(2);
    if (!drop_capabilities() || (capability != kNothing && !give_up(capability))) _exit(2);
    _exit(what() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) < 2) << "status " << status;
  return WIFEXITED(status) && !WEXITSTATUS(status);
}

struct Privileges : ::testing::Test {
  static std::string made() {
    char name[] = "/tmp/privileges_test.XXXXXX";
    return mkdtemp(name);
  }
  void SetUp() override {
    if (geteuid() || bits_in(own_status(), "CapEff") != bits_in(own_status(), "CapBnd")) GTEST_SKIP() << "not root, or not with all that there is to have";
  }
  void TearDown() override {
    if (other > 0) {
      kill(other, SIGKILL);
      waitpid(other, nullptr, 0);
    }
    fs::remove_all(root);
  }
  /// A process of another user's.
  void start_other() {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    other = fork();
    if (!other) {
      if (setgid(kOther) || setuid(kOther)) _exit(1);
      close(ready[0]);
      (void)!write(ready[1], "x", 1);
      for (;;) pause();
    }
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  void needs(int capability, const std::function<bool()>& what, const std::function<bool()>& before = {}) {
    EXPECT_TRUE(done_without(kNothing, what, before)) << "with all that migrd has";
    EXPECT_FALSE(done_without(capability, what, before)) << "with one less";
  }
  /// A file of a bundle arrives, and is as it was.
  bool arrives(uid_t uid, mode_t mode) const {
    wire::FileChunk c;
    c.set_name("file");
    c.set_mode(S_IFREG | mode);
    c.set_uid(uid);
    c.set_gid(uid);
    const std::string to = root + "/to";
    fs::remove_all(to);
    fs::create_directory(to);
    TreeWriter w(to);
    c.set_xxh3(checksum_of(""));
    struct stat st {};
    return w.write(c) && w.finish() && !lstat((to + "/file").c_str(), &st) && st.st_uid == uid && (st.st_mode & 07777) == mode;
  }

  const std::string root = made();
  pid_t other = 0;
};

TEST_F(Privileges, AreThoseOfTheThreatModelAndWhatIsStartedHasAll) {
  std::ifstream doc(MIGR_SOURCE "/docs/threat-model.md");
  std::string line;
  std::uint64_t wanted = 0;
  while (std::getline(doc, line)) {
    if (!line.starts_with("| migrd itself |")) continue;
    const std::regex name("`([A-Z_]+)`");
    for (std::sregex_iterator i(line.begin(), line.end(), name), end; i != end; ++i) {
      ASSERT_TRUE(kNames.contains((*i)[1])) << (*i)[1];
      wanted |= std::uint64_t{1} << kNames.at((*i)[1]);
    }
  }
  ASSERT_NE(wanted, 0u) << "no such line";
  const auto all = bits_in(own_status(), "CapBnd");
  EXPECT_TRUE(done_without(kNothing, [&] {
    const std::string s = own_status();
    return bits_in(s, "CapEff") == (wanted & all) && bits_in(s, "CapPrm") == (wanted & all) && !bits_in(s, "CapInh") && bits_in(s, "CapBnd") == all;
  },
                           {}));
  const std::string grep = "grep -qx 'CapEff:.*" + own_status().substr(own_status().find("CapEff:") + 8, 16) + "' /proc/self/status";
  EXPECT_TRUE(done_without(kNothing, [&] { return !std::system(grep.c_str()); }, {})) << "what migrd starts as root";
}

TEST_F(Privileges, FilesOfABundleKeepTheirOwner) {
  needs(CAP_CHOWN, [this] { return arrives(kOther, 0644); });
}
TEST_F(Privileges, AndTheirMode) {
  needs(CAP_FOWNER, [this] { return arrives(kOther, 0644); });
}
TEST_F(Privileges, AlsoTheBitOfTheirGroup) {
  needs(CAP_FSETID, [this] { return arrives(kOther, 02755); });
}
TEST_F(Privileges, BundlesMayLieInOthersFolders) {
  const std::string home = root + "/home";
  fs::create_directory(home);
  std::ofstream(home + "/file") << "x";
  ASSERT_FALSE(chmod((home + "/file").c_str(), 0600) || chown((home + "/file").c_str(), kOther, kOther) || chmod(home.c_str(), 0700) || chown(home.c_str(), kOther, kOther));
  needs(CAP_DAC_OVERRIDE, [&] {
    int chunks = 0;
    return send_tree(home, wire::FileChunk::BUNDLE, 1 << 20, [&](const wire::FileChunk&) { return ++chunks; }) && chunks;
  });
}
TEST_F(Privileges, ProcessesOfOthersAreContinuedAndEnded) {
  start_other();
  needs(CAP_KILL, [this] { return !kill(other, 0); });
}
TEST_F(Privileges, TheirThreadsAreLookedAt) {
  start_other();
  needs(CAP_SYS_PTRACE, [this] {
    const TextRange range{0x1000, 0x1000};
    return bool(wait_until_outside(other, {&range, 1}, 0, std::chrono::steady_clock::now() + std::chrono::seconds(10)));
  });
}
// Else, as in a chroot, what is mounted in a namespace of our own may be seen outside.
bool root_is_a_mount() {
  std::ifstream in("/proc/self/mountinfo");
  for (std::string line; std::getline(in, line);)
    if (std::regex_search(line, std::regex(R"(^\S+ \S+ \S+ \S+ / )"))) return true;
  return false;
}

TEST_F(Privileges, WhatIsMountedBelowAFolderIsUnmounted) {
  if (!root_is_a_mount()) GTEST_SKIP() << "/ is no mount";
  const std::string at = root + "/rootfs/mnt";
  fs::create_directories(at);
  // In a namespace of its own: this machine's mounts stay.
  const auto with_a_mount = [&] {
    return !unshare(CLONE_NEWNS) && !mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) && !mount("none", at.c_str(), "tmpfs", 0, nullptr);
  };
  EXPECT_TRUE(done_without(
      kNothing, [this] { return bool(remove_folder(root + "/rootfs")); }, with_a_mount))
      << "by a program that it starts";
}
TEST_F(Privileges, AnyPortMayBeListenedAt) {
  needs(
      CAP_NET_BIND_SERVICE, [] {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(1);
    const Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return !bind(fd.n, reinterpret_cast<sockaddr*>(&any), sizeof any); }, [] { return !unshare(CLONE_NEWNET); });
}
TEST_F(Privileges, NumbersOfProcessesAreKeptFree) {
  // In a namespace of its own: this machine's counter stays.
  needs(
      CAP_CHECKPOINT_RESTORE, [] { return bool(pass_over({20})); }, [] {
    if (unshare(CLONE_NEWPID)) return false;
    const pid_t child = fork();
    if (!child) return true;  // the rest is done in there
    int status = 0;
    waitpid(child, &status, 0);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 2); });
}

}  // namespace
}  // namespace migr::privileges_test
