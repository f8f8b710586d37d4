// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Checkpoints on disk, and processes without a container: what is kept, who may read it, what is refused.
#include "agent/stored.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "agent/bare.h"
#include "agent/fd.h"
#include "agent/file_tree.h"
#include "agent/hex.h"
#include "agent/manifest.h"
#include "agent/process.h"
#include "agent/room.h"
#include "pid_namespace.h"
#include "temp_folder.h"

namespace migr::stored_test {
namespace {

namespace fs = std::filesystem;

std::string v4(char last) { return std::string(10, '\0') + "\xff\xff" + std::string("\x0a\x4d\x0a", 3) + last; }
const std::string kHere = v4(1), kBefore = v4(2), kThere = v4(3);

struct Stored : ::testing::Test {
  Config config_in_root() const {
    Config c;
    c.state_dir = root + "/state";
    return c;
  }
  void SetUp() override {
    fs::create_directories(root + "/from/images");
    put(root + "/from/images/migr.img", "keys");
    put(root + "/from/images/pages-1.img", "memory");
    info.id = "pid:712";
    info.pids = {712, 713};
    info.bundle_mode.emplace().set_mode(S_IFDIR | 02751);
    info.bundle_mode->set_uid(17);
    info.bundle_mode->set_gid(18);
    info.instances = {Instance{1}, Instance{2}};
    info.ctxs = {{7, 0}, {8, 1}};
    info.devices = {"rxe0"};
    info.gids.emplace_back().set_device("rxe0");
    info.gids.back().set_port(1);
    info.gids.back().set_roce_v2(true);
    info.gids.back().set_gid(kHere);
    info.earlier = {{1, kBefore}};
    info.vqpns = {17, 18, 19};
    info.connected = {{7, 17, 0x21, std::string(16, '\x01'), std::string(16, '\xff'), 0x22}, {8, 18, 0x23, std::string(16, '\x01'), std::string(16, '\x01'), 0x23}};
    info.resources.set_qp(3);
    info.filled_bytes = 5 << 20;
    info.huge.needed = {{2 << 20, 8 << 20}, {1 << 30, 1 << 30}};
    info.huge.filled = 4 << 20;
  }
  static void put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  static mode_t mode(const std::string& path) {
    struct stat st{};
    EXPECT_EQ(lstat(path.c_str(), &st), 0) << path;
    return st.st_mode & 07777;
  }
  Status keep() {
    KeepingDestination d(dir(), info);
    wire::PrepareHeader h;
    h.set_bundle(info.bundle);
    if (auto s = d.check({}); !s) return s;
    if (auto s = d.prepare(h, root + "/from/images", bytes); !s) return s;
    if (auto s = d.upload(1, root + "/from/images", false, all_written, bytes); !s) return s;
    EXPECT_FALSE(fs::exists(dir())) << "before it is whole";
    EXPECT_EQ(*d.outcome(1), wire::UNDONE);
    if (auto s = d.ready(1); !s) return s;
    if (auto s = d.commit(1); !s) return s;
    EXPECT_EQ(*d.outcome(1), wire::COMMITTED);
    return {};
  }
  Error refused() {
    auto r = StoredSource(host, 1).inspect(dir());
    return r ? Error{0, "not refused"} : r.error();
  }
  std::string dir() const { return root + "/kept"; }

  const TempFolder temp;
  const std::string root = temp.path;
  ContainerInfo info;
  Sent bytes;
  const Config config = config_in_root();
  SessionTable sessions;
  Claims claims;
  Numbers numbers{config};
  Directory directory{config};
  SourceHost host{config, sessions, claims, numbers, directory, [](const std::string& name) { return Error{ENOENT, name}; }, [](const std::string& name) { return Error{ENOENT, name}; }};
};

TEST_F(Stored, WhereItWasIsToldWhenItIsRestoredElsewhere) {
  ASSERT_TRUE(keep());
  StoredSource source(host, 1);
  ASSERT_TRUE(source.inspect(dir()));
  wire::PrepareReply prepared;
  auto* g = prepared.add_gids();
  g->set_device("rxe7");  // the only one there
  g->set_port(1);
  g->set_roce_v2(true);
  g->set_gid(kThere);
  auto moves = source.moves(prepared);
  ASSERT_TRUE(moves);
  std::set<std::pair<char, std::string>> told;
  for (const auto& m : moves->moves()) {
    EXPECT_EQ(kThere, m.gid());
    told.emplace(m.instance()[0], m.birth_gid());
  }
  EXPECT_EQ(told, (std::set<std::pair<char, std::string>>{{1, kHere}, {2, kHere}, {2, kBefore}}));
}

TEST_F(Stored, ComesBackAsItWas) {
  ASSERT_TRUE(keep());
  EXPECT_EQ(mode(dir()), 0700u);
  for (const char* f : {"/images/migr.img", "/images/pages-1.img", "/checkpoint.json"}) EXPECT_EQ(mode(dir() + f), 0600u) << f;
  EXPECT_FALSE(fs::exists(dir() + ".part"));
  auto back = StoredSource(host, 1).inspect(dir());
  ASSERT_TRUE(back) << back.error().text;
  EXPECT_EQ(back->id, info.id);
  EXPECT_EQ(back->pids, info.pids);
  EXPECT_EQ(back->instances, info.instances);
  EXPECT_EQ(back->ctxs, info.ctxs);
  EXPECT_EQ(back->vqpns, info.vqpns);
  ASSERT_EQ(back->connected.size(), 2u);
  EXPECT_EQ(back->connected[0].dest_gid, info.connected[0].dest_gid);
  EXPECT_EQ(back->connected[1].dest_pqpn, 0x23u);
  EXPECT_EQ(back->resources.qp(), 3u);
  EXPECT_EQ(back->huge.needed, info.huge.needed);
  EXPECT_EQ(back->image_bytes(), 9u << 20);
  ASSERT_TRUE(back->bundle_mode);
  EXPECT_EQ(back->bundle_mode->SerializeAsString(), info.bundle_mode->SerializeAsString());
}

TEST_F(Stored, WhatIsWrittenUntilTheStopIsKept) {
  info.bundle = root + "/bundle";
  fs::create_directories(info.bundle + "/rootfs");
  put(info.bundle + "/config.json", R"({"root": {"path": "rootfs"}})");
  put(info.bundle + "/rootfs/log", "before");
  put(info.bundle + "/rootfs/gone", "");
  KeepingDestination d(dir(), info);
  wire::PrepareHeader h;
  h.set_bundle(info.bundle);
  ASSERT_TRUE(d.prepare(h, root + "/from/images", bytes));
  put(info.bundle + "/rootfs/log", "after");
  fs::remove(info.bundle + "/rootfs/gone");
  ASSERT_TRUE(d.bundle_changes());
  ASSERT_TRUE(d.upload_changes(1, bytes));
  ASSERT_TRUE(d.ready(1));
  ASSERT_TRUE(d.commit(1));
  EXPECT_EQ(first_line_of(dir() + "/bundle/rootfs/log"), "after");
  EXPECT_FALSE(fs::exists(dir() + "/bundle/rootfs/gone"));
  EXPECT_TRUE(fs::exists(dir() + "/bundle/config.json"));
}

TEST_F(Stored, NamesMayBeOfAnyBytes) {
  info.bundle = root + "/bundle";
  fs::create_directories(info.bundle + "/rootfs");
  put(info.bundle + "/config.json", R"({"root": {"path": "rootfs"}})");
  put(info.bundle + "/rootfs/caf\xe9", "x");
  KeepingDestination d(dir(), info);
  wire::PrepareHeader h;
  h.set_bundle(info.bundle);
  ASSERT_TRUE(d.prepare(h, root + "/from/images", bytes));
  ASSERT_TRUE(d.upload_changes(1, bytes));
  ASSERT_TRUE(d.ready(1));
  ASSERT_TRUE(d.commit(1));
  const auto names = read_root_names(dir());
  ASSERT_TRUE(names) << names.error().text;
  EXPECT_TRUE(names->contains("caf\xe9"));
}

// The container may write to other folders of its bundle than its root, for example by a mount: each of these files has less than it says.
TEST_F(Stored, WhatChangesBesideARootThatCannotBeWrittenToFailsNothing) {
  info.bundle = "/sys/devices/virtual/net/lo/statistics";
  if (!fs::exists(info.bundle)) GTEST_SKIP() << "no " << info.bundle;
  KeepingDestination d(dir(), info);
  wire::PrepareHeader h;
  h.set_bundle(info.bundle);
  const auto prepared = d.prepare(h, root + "/from/images", bytes);
  ASSERT_TRUE(prepared) << prepared.error().text;
  EXPECT_FALSE(d.bundle_changes());
  ASSERT_TRUE(d.commit(1));
  EXPECT_TRUE(fs::exists(dir() + "/bundle/rx_bytes"));
}

// It may have gone meanwhile; but one that is there would be missing.
TEST_F(Stored, WhatCannotBeReadIsNotPassedOver) {
  fs::create_directories(root + "/bundle");
  put(root + "/bundle/a", "");
  put(root + "/bundle/b", "");
  put(root + "/bundle/c", "");
  const auto copied = [&](const std::function<void()>& meanwhile) {
    SentFiles files;
    return send_changes(root + "/bundle", wire::FileChunk::BUNDLE, kBundleBytes, [&](const wire::FileChunk&) { return meanwhile(), true; }, files);
  };
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  const auto s = copied([&] { setrlimit(RLIMIT_NOFILE, &none); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EMFILE) << s.error().text;
  EXPECT_TRUE(copied([&] { fs::remove(root + "/bundle/c"); }));
}

TEST_F(Stored, WhatCannotBeWrittenToIsCopiedOnce) {
  info.bundle = root + "/bundle";
  fs::create_directories(info.bundle + "/rootfs");
  put(info.bundle + "/config.json", R"({"root": {"path": "rootfs", "readonly": true}})");
  ASSERT_EQ(mkfifo((info.bundle + "/rootfs/fifo").c_str(), 0620), 0);
  const Fd its(socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::strcpy(at.sun_path, (info.bundle + "/rootfs/socket").c_str());
  ASSERT_EQ(bind(its.n, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  KeepingDestination d(dir(), info);
  wire::PrepareHeader h;
  h.set_bundle(info.bundle);
  std::ostringstream said;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(said)));
  const auto prepared = d.prepare(h, root + "/from/images", bytes);
  spdlog::set_default_logger(before);
  ASSERT_TRUE(prepared);
  EXPECT_FALSE(d.bundle_changes());
  EXPECT_NE(said.str().find("/rootfs/socket is a socket or a device, which is not copied"), std::string::npos) << said.str();
  ASSERT_TRUE(d.commit(1));
  EXPECT_TRUE(fs::is_fifo(dir() + "/bundle/rootfs/fifo"));
  EXPECT_FALSE(fs::exists(dir() + "/bundle/rootfs/socket"));
}

TEST_F(Stored, EarlyImagesFirstThenTheRest) {
  ASSERT_TRUE(keep());
  StoredSource s(host, 1);
  ASSERT_TRUE(s.inspect(dir()));
  auto early = s.record("here", {});
  ASSERT_TRUE(early) << early.error().text;
  EXPECT_TRUE(fs::exists(*early + "/migr.img"));
  EXPECT_FALSE(fs::exists(*early + "/pages-1.img"));
  ASSERT_TRUE(s.checkpoint());
  EXPECT_TRUE(fs::exists(*early + "/pages-1.img"));
  s.forget(true);
  EXPECT_FALSE(fs::exists(*early));
  EXPECT_TRUE(fs::exists(dir() + "/images/pages-1.img"));
}

// The source has the images, too, until they are stored; and so has the destination, if they cannot be links to what is stored.
TEST_F(Stored, NeedsRoomForTwoOfItWhereBothAre) {
  char name[] = "/dev/shm/stored_test.XXXXXX";
  if (!mkdtemp(name)) GTEST_SKIP() << "no /dev/shm";
  if (same_disk(root, name)) GTEST_SKIP() << "/tmp and /dev/shm are one file system";
  wire::CheckRequest r;
  r.set_image_bytes(disk_of(root)->free / 10 * 6);
  EXPECT_TRUE(KeepingDestination(dir(), info, name).check(r));
  const auto s = KeepingDestination(dir(), info, config.state_dir).check(r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOSPC);
  EXPECT_NE(s.error().text.find("twice its size, for " + config.state_dir + " has it until it is stored"), std::string::npos) << s.error().text;

  info.filled_bytes = r.image_bytes();
  ASSERT_TRUE(keep());
  EXPECT_EQ(refused().code, 0) << "its images become links";
  const std::string other = name + std::string("/kept");
  ASSERT_EQ(system(("cp -a " + dir() + " " + other).c_str()), 0);
  const auto elsewhere = StoredSource(host, 1).inspect(other);
  fs::remove_all(name);
  ASSERT_FALSE(elsewhere);
  EXPECT_EQ(elsewhere.error().code, ENOSPC);
  EXPECT_NE(elsewhere.error().text.find("twice its size, for " + other + " is on another file system"), std::string::npos) << elsewhere.error().text;
}

// Memory is sent as soon as its file is there: a copy is there when it is whole.
TEST_F(Stored, FromAnotherFileSystemMemoryAppearsWhole) {
  char name[] = "/dev/shm/stored_test.XXXXXX";
  if (!mkdtemp(name)) GTEST_SKIP() << "no /dev/shm";
  ASSERT_TRUE(keep());
  struct stat here{}, there{};
  ASSERT_TRUE(!stat(root.c_str(), &here) && !stat(name, &there));
  if (here.st_dev == there.st_dev) GTEST_SKIP() << "/tmp and /dev/shm are one file system";
  const std::string other = name + std::string("/kept");
  ASSERT_EQ(system(("cp -a " + dir() + " " + other).c_str()), 0);
  StoredSource s(host, 1);
  ASSERT_TRUE(s.inspect(other));
  auto early = s.record("here", {});
  ASSERT_TRUE(early) << early.error().text;
  const int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  ASSERT_GE(inotify_add_watch(watch, early->c_str(), IN_CREATE | IN_MOVED_TO), 0);
  ASSERT_TRUE(s.checkpoint());
  alignas(inotify_event) char buffer[4096];
  const ssize_t n = read(watch, buffer, sizeof buffer);
  std::uint32_t how = 0;
  for (ssize_t at = 0; at < n;) {
    const auto* e = reinterpret_cast<const inotify_event*>(buffer + at);
    if (std::string(e->name) == "pages-1.img") how |= e->mask;
    at += static_cast<ssize_t>(sizeof *e + e->len);
  }
  EXPECT_EQ(how, std::uint32_t{IN_MOVED_TO});
  close(watch);
  fs::remove_all(name);
}

// What is restored has the name of what was stored: nothing of that name is ever to be taken back or destroyed by the source.
TEST_F(Stored, ARestoreLeavesNothingToSettle) {
  ASSERT_TRUE(keep());
  StoredSource s(host, 1);
  ASSERT_TRUE(s.inspect(dir()));
  EXPECT_EQ(host.outcome(1).outcome(), wire::UNKNOWN);
  ASSERT_TRUE(s.decide(wire::COMMITTED));
  EXPECT_EQ(host.outcome(1).outcome(), wire::COMMITTED);
  EXPECT_TRUE(host.open_migrations().empty());
  s.forget(true);
  SourceHost again(config, sessions, claims, numbers, directory, [](const std::string& name) { return Error{ENOENT, name}; }, [](const std::string& name) { return Error{ENOENT, name}; });
  again.recover();
  EXPECT_EQ(again.outcome(1).outcome(), wire::COMMITTED);
  EXPECT_TRUE(again.open_migrations().empty());
}

// As a migrd does that finds a commit record after its start.
TEST_F(Stored, WhatBecameOfACheckpointIsSeenFromItsFolder) {
  KeepingDestination before(dir(), info), after(dir());
  ASSERT_TRUE(before.prepare({}, root + "/from/images", bytes));
  ASSERT_TRUE(before.ready(1));
  EXPECT_EQ(tell_commit(after, 1, 0, 1).outcome, wire::COMMITTED) << "it was whole";
  EXPECT_TRUE(fs::exists(dir()));
  EXPECT_EQ(tell_commit(after, 1, 0, 1).outcome, wire::COMMITTED) << "and is";
  fs::remove_all(dir());
  EXPECT_EQ(tell_commit(after, 1, 0, 1).outcome, wire::UNDONE);
}

TEST_F(Stored, AFolderThatSomebodyElseHasMadeMeanwhileIsNotTheCheckpoint) {
  for (const bool empty : {true, false}) {
    KeepingDestination d(dir(), info);
    ASSERT_TRUE(d.check({}));
    ASSERT_TRUE(d.prepare({}, root + "/from/images", bytes));
    ASSERT_TRUE(d.ready(1));
    fs::create_directories(dir() + (empty ? "" : "/theirs"));
    const auto told = tell_commit(d, 1, 0, 1);
    EXPECT_EQ(told.outcome, wire::UNDONE);
    EXPECT_NE(told.why.error().text.find(dir()), std::string::npos) << told.why.error().text;
    ASSERT_TRUE(d.abort(1));
    EXPECT_TRUE(fs::exists(dir() + (empty ? "" : "/theirs")));
    fs::remove_all(dir());
  }
}

TEST_F(Stored, OnlyOneCheckpointIsWrittenToAFolderAtATime) {
  {
    KeepingDestination first(dir(), info), second(dir(), info);
    ASSERT_TRUE(second.check({}));  // before the first one has begun
    ASSERT_TRUE(first.prepare({}, root + "/from/images", bytes));
    EXPECT_EQ(KeepingDestination(dir(), info).check({}).error().code, EBUSY);
    EXPECT_EQ(second.prepare({}, root + "/from/images", bytes).error().code, EBUSY);
    ASSERT_TRUE(second.abort(1));
    ASSERT_TRUE(first.ready(1)) << "the other one has taken it away";
    ASSERT_TRUE(first.commit(1));
  }
  fs::remove_all(dir());
  EXPECT_TRUE(keep());
}

TEST_F(Stored, WhatOthersMayReadIsRefused) {
  ASSERT_TRUE(keep());
  for (const char* f : {"", "/images", "/checkpoint.json", "/images/migr.img"}) {
    const mode_t before = mode(dir() + f);
    chmod((dir() + f).c_str(), before | 0004);
    const Error e = refused();
    EXPECT_EQ(e.code, EPERM) << f;
    EXPECT_NE(e.text.find(dir() + f), std::string::npos) << e.text;
    chmod((dir() + f).c_str(), before);
  }
  EXPECT_EQ(refused().code, 0);
}

// Who may change a folder above it could exchange it after it was looked at.
TEST_F(Stored, BelowAFolderThatOthersMayChangeIsRefused) {
  ASSERT_TRUE(keep());
  const std::string open = root + "/open";
  fs::create_directories(open);
  fs::create_directory_symlink(root, open + "/link");
  const auto both = [&](const std::string& folder) {
    const auto r = StoredSource(host, 1).inspect(folder + "/kept");
    const auto s = KeepingDestination(folder + "/another", info).check({});
    EXPECT_EQ(bool(r), bool(s)) << (s ? r.error().text : s.error().text);
    EXPECT_EQ(r ? "" : r.error().text, s ? "" : s.error().text);
    return s ? Error{0, ""} : s.error();
  };
  EXPECT_EQ(both(root).code, 0);
  for (const mode_t by : {0770, 0707}) {
    chmod(root.c_str(), by);
    EXPECT_EQ(both(root).code, EPERM) << by;
    EXPECT_TRUE(both(root).text.starts_with(root + " can be written to by others")) << both(root).text;
  }
  chmod(root.c_str(), 01777);  // as /tmp
  EXPECT_EQ(both(root).code, 0);
  EXPECT_EQ(both(open + "/link").code, 0);
  chmod(open.c_str(), 0777);
  EXPECT_TRUE(both(open + "/link").text.starts_with(open + " can be")) << "a link that leads out of there: " << both(open + "/link").text;
  chmod(open.c_str(), 0755);
  if (!geteuid()) {
    constexpr uid_t kSomebody = 65534;
    ASSERT_EQ(lchown((open + "/link").c_str(), kSomebody, 0), 0);
    EXPECT_TRUE(both(open + "/link").text.starts_with(open + "/link belongs to user 65534")) << both(open + "/link").text;
    ASSERT_EQ(chown(root.c_str(), kSomebody, 0), 0);
    EXPECT_TRUE(both(root).text.starts_with(root + " belongs to user 65534")) << both(root).text;
    ASSERT_EQ(chown(root.c_str(), 0, 0), 0);
  }
  fs::create_directory_symlink("loop", open + "/loop");
  EXPECT_EQ(StoredSource(host, 1).inspect(open + "/loop").error().code, ELOOP);
}

TEST_F(Stored, DamageIsRefused) {
  ASSERT_TRUE(keep());
  const std::string manifest = dir() + "/checkpoint.json";
  std::string text;
  std::getline(std::ifstream(manifest), text, '\0');
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    EXPECT_NE(changed.find(from), std::string::npos) << from;
    put(manifest, changed.replace(changed.find(from), from.size(), to));
    return refused();
  };
  EXPECT_EQ(with("\"wire\": ", "\"wire\": 9").code, EINVAL);
  EXPECT_NE(with("\"wire\": ", "\"wire\": 9").text.find("release"), std::string::npos);
  for (const auto& [from, to] : std::initializer_list<std::pair<const char*, const char*>>{
           {"\"pid:712\"", "\"../x\""}, {"\"pid:712\"", "7"}, {"\"pid:712\"", "\"c\""}, {"\"vqpns\"", "\"other\""}, {"\"01", "\"0x"}, {"\"01", "\"01aa"}}) {
    const Error e = with(from, to);
    EXPECT_EQ(e.code, EINVAL) << from;
    EXPECT_NE(e.text.find("is damaged"), std::string::npos) << e.text;
  }
  put(manifest, text.substr(0, text.size() / 2));
  EXPECT_EQ(refused().code, EINVAL);
  put(manifest, text);
  EXPECT_EQ(refused().code, 0);
}

// Every byte of what is stored is looked at before anything is restored.
TEST_F(Stored, AnImageThatHasChangedIsRefusedByName) {
  ASSERT_TRUE(keep());
  for (const char* name : {"migr.img", "pages-1.img"}) {
    const std::string path = dir() + "/images/" + name;
    std::string was;
    std::getline(std::ifstream(path), was, '\0');
    for (std::size_t n = 0; n < was.size(); n++) {
      put(path, was.substr(0, n));
      Error e = refused();
      EXPECT_EQ(e.code, EINVAL) << name << " of " << n << " bytes";
      EXPECT_NE(e.text.find(path + " is truncated: it has " + std::to_string(n) + " bytes, " + std::to_string(was.size()) + " were stored"), std::string::npos) << e.text;
      std::string flipped = was;
      flipped[n] ^= 1;
      put(path, flipped);
      e = refused();
      EXPECT_EQ(e.code, EINVAL) << name << ", byte " << n << " flipped";
      EXPECT_NE(e.text.find(path + " is not what was stored"), std::string::npos) << e.text;
    }
    put(path, was + "x");
    EXPECT_NE(refused().text.find("is damaged: it has"), std::string::npos) << refused().text;
    fs::remove(path);
    EXPECT_NE(refused().text.find(path + " is missing"), std::string::npos) << refused().text;
    fs::create_symlink("/etc/passwd", path);
    EXPECT_NE(refused().text.find(path + " is missing"), std::string::npos) << refused().text;
    fs::remove(path);
    put(path, was);
    chmod(path.c_str(), 0600);
    EXPECT_EQ(refused().code, 0) << refused().text;
  }
  const std::string more = dir() + "/images/core-1.img";
  put(more, "of another");
  chmod(more.c_str(), 0600);
  EXPECT_NE(refused().text.find(more + " does not belong to this checkpoint"), std::string::npos) << refused().text;
}

// The container would run with it.
TEST_F(Stored, ABundleThatHasChangedIsRefusedByName) {
  info.id = "web";
  info.bundle = root + "/bundle";
  fs::create_directories(info.bundle + "/rootfs/empty");
  put(info.bundle + "/config.json", R"({"root": {"path": "rootfs", "readonly": true}})");
  put(info.bundle + "/rootfs/caf\xe9", "program");
  fs::create_symlink("caf\xe9", info.bundle + "/rootfs/link");
  ASSERT_EQ(mkfifo((info.bundle + "/rootfs/fifo").c_str(), 0600), 0);
  ASSERT_TRUE(keep());
  EXPECT_EQ(refused().code, 0) << refused().text;
  const std::string bundle = dir() + "/bundle", program = bundle + "/rootfs/caf\xe9";
  const auto says = [&](const std::string& what) {
    const Error e = refused();
    EXPECT_EQ(e.code, EINVAL);
    EXPECT_NE(e.text.find(what), std::string::npos) << e.text;
  };
  put(program, "progrbm");
  says(program + " is not what was stored");
  put(program, "progra");
  says(program + " is truncated: it has 6 bytes, 7 were stored");
  fs::remove(program);
  says(program + " is missing");
  fs::create_symlink("/etc/passwd", program);
  says(program + " is not what was stored");
  fs::remove(program);
  put(program, "program");
  for (const char* name : {"link", "fifo", "empty"}) {
    const std::string path = bundle + "/rootfs/" + name, aside = root + "/aside";
    fs::rename(path, aside);
    says(path + " is missing");
    fs::create_symlink("elsewhere", path);
    says(path + " is not what was stored");
    fs::remove(path);
    fs::rename(aside, path);
  }
  put(bundle + "/rootfs/empty/more", "");
  says(bundle + "/rootfs/empty/more does not belong to this checkpoint");
  fs::remove(bundle + "/rootfs/empty/more");
  EXPECT_EQ(refused().code, 0) << refused().text;
  // Of an older release, which had no sums of it.
  const std::string manifest = dir() + "/" + kManifest;
  auto j = nlohmann::json::parse(text_of(manifest));
  EXPECT_EQ(j.erase("bundle_files"), 1u);
  j.erase("sum");
  j["sum"] = to_hex(checksum_of(j.dump()));
  fs::remove_all(bundle + "/rootfs");
  says(" is missing");
  put(manifest, j.dump());
  EXPECT_EQ(refused().code, 0) << refused().text;
}

TEST_F(Stored, EveryByteOfTheManifestCounts) {
  ASSERT_TRUE(keep());
  const std::string manifest = dir() + "/checkpoint.json";
  std::string was;
  std::getline(std::ifstream(manifest), was, '\0');
  while (was.back() == '\n') was.pop_back();
  for (std::size_t n = 0; n < was.size(); n++) {
    put(manifest, was.substr(0, n));
    EXPECT_EQ(refused().code, EINVAL) << n << " bytes";
    if (std::isspace(static_cast<unsigned char>(was[n]))) continue;
    std::string flipped = was;
    flipped[n] ^= 1;
    put(manifest, flipped);
    EXPECT_EQ(refused().code, EINVAL) << "byte " << n << " flipped";
  }
  std::string early = was;
  const std::size_t sum = early.find("\"sum\"");
  ASSERT_NE(sum, std::string::npos);
  put(manifest, early.erase(sum, early.find('\n', sum) - sum));
  EXPECT_NE(refused().text.find("it has no checksum"), std::string::npos) << refused().text;
  put(manifest, "{\"wire\": 1");
  EXPECT_NE(refused().text.find("is damaged"), std::string::npos) << refused().text;
  put(manifest, "\x7f" "ELF");
  EXPECT_NE(refused().text.find("is damaged"), std::string::npos) << refused().text;
}

TEST_F(Stored, AnExistingFolderIsNotTouched) {
  fs::create_directories(dir());
  EXPECT_EQ(keep().error().code, EEXIST);
  EXPECT_EQ(KeepingDestination("relative", info).check({}).error().code, EINVAL);
  EXPECT_EQ(KeepingDestination(root + "/no/such", info).check({}).error().code, ENOENT);
}

TEST_F(Stored, WhatWasTakenBackLeavesNothing) {
  KeepingDestination d(dir(), info);
  ASSERT_TRUE(d.prepare({}, root + "/from/images", bytes));
  EXPECT_TRUE(fs::exists(dir() + ".part"));
  ASSERT_TRUE(d.abort(1));
  EXPECT_FALSE(fs::exists(dir() + ".part"));
}

TEST_F(Stored, WhatIsCalledAsIfItWereOursStays) {
  const std::string part = dir() + ".part";
  fs::create_directories(part + "/images");
  ASSERT_EQ(chmod(part.c_str(), 0700), 0);
  EXPECT_TRUE(KeepingDestination(dir(), info).check({})) << "left by a checkpoint that was interrupted";
  std::ofstream(part + "/thesis.txt") << "x";
  {
    KeepingDestination d(dir(), info);
    EXPECT_EQ(d.check({}).error().code, EEXIST);
    EXPECT_EQ(d.prepare({}, root + "/from/images", bytes).error().code, EEXIST);
    EXPECT_TRUE(d.abort(1));
  }
  EXPECT_TRUE(fs::exists(part + "/thesis.txt"));
  fs::remove_all(part);
  fs::create_directories(part);
  ASSERT_EQ(chmod(part.c_str(), 0755), 0);
  EXPECT_EQ(KeepingDestination(dir(), info).check({}).error().code, EEXIST) << "everybody may read it";
}

mode_t mode_of(const std::string& path) {
  struct stat st {};
  EXPECT_EQ(stat(path.c_str(), &st), 0);
  return st.st_mode & 07777;
}

TEST_F(Stored, OwnFoldersAreMadeAndThoseOfOthersLeftAlone) {
  const mode_t mask = umask(0077);
  ASSERT_TRUE(make_own_folder(root + "/a/b", 0755));
  umask(mask);
  EXPECT_EQ(mode_of(root + "/a/b"), 0755u);
  ASSERT_EQ(chmod((root + "/a").c_str(), 0750), 0);
  ASSERT_TRUE(make_own_folder(root + "/a", 0700));
  EXPECT_EQ(mode_of(root + "/a"), 0750u) << "somebody's own choice";
  ASSERT_EQ(chmod((root + "/a").c_str(), 01777), 0);  // as /tmp
  const auto s = make_own_folder(root + "/a", 0700);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EPERM);
  EXPECT_EQ(mode_of(root + "/a"), 01777u);
  put(root + "/file", "");
  EXPECT_EQ(make_own_folder(root + "/file", 0700).error().code, ENOTDIR);
}

TEST(Bare, Names) {
  EXPECT_EQ(bare_name(712), "pid:712");
  EXPECT_EQ(bare_pid("pid:712"), 712);
  for (const char* other : {"712", "pid:", "pid:x", "pid:7x", "pid:-7", "pid:1", "pid:99999999999", "web"}) EXPECT_FALSE(bare_pid(other)) << other;
}

// The kernel says where a process works without links.
TEST(AProcess, WorksInAFolderUnderAnyNameOfIt) {
  char name[] = "/tmp/stored_test.XXXXXX";
  ASSERT_TRUE(mkdtemp(name));
  const std::string dir = name;
  fs::create_directory_symlink(fs::current_path().parent_path(), dir + "/link");
  EXPECT_TRUE(works_in(getpid(), dir + "/link"));
  EXPECT_TRUE(works_in(getpid(), dir + "/link/" + fs::current_path().filename().string()));
  EXPECT_FALSE(works_in(getpid(), dir));
  EXPECT_FALSE(works_in(getpid(), dir + "/link/none"));
  fs::remove_all(dir);
}

// As far as its command line goes it is what it says.
TEST(AProcess, OfAContainerIsNoneOfThoseThatAreTold) {
  const PidNamespace container;
  if (!container.made()) GTEST_SKIP() << "cannot make a PID namespace";
  const std::string folder = "/tmp/stored_test." + std::to_string(getpid()) + "/";
  const auto start = [&] {
    const pid_t pid = fork();
    if (pid == 0) {
      execl("/bin/sh", "sh", "-c", "kill -STOP $$; true", "runc", "partial-restore", folder.c_str(), nullptr);
      _exit(1);
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, WUNTRACED), pid);
    EXPECT_TRUE(WIFSTOPPED(status));
    return pid;
  };
  const pid_t inside = container.born_in(start), outside = start();
  EXPECT_EQ(processes_told({"partial-restore", "restore"}, folder), std::vector{outside});
  for (const pid_t pid : {inside, outside}) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
}

TEST(Bare, ATreeIsAProcessAndItsDescendants) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const pid_t grandchild = fork();
    if (grandchild) (void)!write(ready[1], &grandchild, sizeof grandchild);
    for (;;) pause();
  }
  pid_t grandchild = 0;
  ASSERT_EQ(read(ready[0], &grandchild, sizeof grandchild), static_cast<ssize_t>(sizeof grandchild));
  EXPECT_EQ(tree_of(child), (std::vector<pid_t>{child, grandchild}));
  EXPECT_TRUE(descends(grandchild, child));
  EXPECT_TRUE(descends(grandchild, getpid()));
  EXPECT_TRUE(descends(child, child));
  EXPECT_FALSE(descends(child, grandchild));
  EXPECT_FALSE(descends(getpid(), child));
  EXPECT_EQ(name_of(child), "agent_test");
  const Config config;
  const Bare bare(config);
  auto state = bare.state(child);
  ASSERT_TRUE(state) << state.error().text;
  EXPECT_EQ(state->status, "running");
  EXPECT_TRUE(bare.remove(child));
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(tree_of(child).empty());
  EXPECT_EQ(bare.state(child).error().code, ENOENT);
  close(ready[0]);
  close(ready[1]);
}

TEST(ProcessNumbers, AreThoseOfThreadsToo) {
  int end[2];
  ASSERT_EQ(pipe(end), 0);
  std::thread other([&] {
    char byte;
    (void)!read(end[0], &byte, 1);
  });
  const auto all = numbers_of(getpid());
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0], getpid());
  EXPECT_TRUE(number_taken(all[1]));
  close(end[1]);
  other.join();
  close(end[0]);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(number_taken(child)) << "nobody has waited for it";
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(number_taken(child));
}

TEST(ProcessNumbers, ThatWouldComeUpSoonArePassedOver) {
  EXPECT_EQ(counter_past({1073, 1074, 1080}, 1000, 32768), 1080);
  EXPECT_EQ(counter_past({1073, 1074, 1080}, 1076, 32768), 1080) << "in the middle of them";
  EXPECT_EQ(counter_past({1073}, 1073, 32768), std::nullopt);
  EXPECT_EQ(counter_past({1073}, 2000, 32768), std::nullopt);
  EXPECT_EQ(counter_past({1073}, 32000, 32768), 1073) << "from the beginning again";
  EXPECT_EQ(counter_past({20000}, 1000, 32768), std::nullopt) << "far away";
  EXPECT_EQ(counter_past({5000, 12000}, 1000, 32768), 12000) << "one after the other";
  EXPECT_EQ(counter_past({}, 1000, 32768), std::nullopt);
  const auto everywhere = counter_past({1000, 9000, 17000, 25000}, 500, 32768);
  EXPECT_TRUE(everywhere);  // and it comes to an end
}

}  // namespace
}  // namespace migr::stored_test
