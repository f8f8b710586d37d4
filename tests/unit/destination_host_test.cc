// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a destination goes on with after a start of its migrd, and what it takes back, with a played runc and network hook.
#include "agent/destination_host.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "agent/file_tree.h"
#include "agent/limits.h"
#include "agent/links.h"
#include "migr/restore_control.h"
#include "agent/process.h"
#include "agent/stored.h"
#include "played_library.h"
#include "temp_folder.h"

namespace migr::destination_host_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kId = 0x1234;

struct ADestination : ::testing::Test {
  Config config_in_root() const {
    Config c;
    c.name = "dst";
    c.state_dir = root + "/state";
    c.run_dir = root + "/run";
    c.runc_root = root + "/containers";
    c.runc = root + "/runc";
    c.criu = root + "/criu";
    c.net_hook = root + "/net";
    return c;
  }
  void SetUp() override {
    kResolveStepMs = 100;
    std::ofstream(root + "/net") << "#!/bin/sh\necho \"$1\" >>" << root << "/net.log\n[ ! -e " << root << "/net-fails ] || { echo no bridge >&2; exit 1; }\n";
    ASSERT_EQ(chmod((root + "/net").c_str(), 0755), 0);
    std::ofstream(root + "/net-fails") << "";
    fs::create_directories(root + "/bundle");
    std::ofstream(root + "/bundle/config.json") << R"({"annotations": {"org.migr.net.ip": "10.0.0.1/24"}})";
    fs::create_directories(root + "/containers/web");
    auto* h = record.mutable_header();
    h->set_id(kId);
    h->set_source("src");
    h->set_container("web");
    h->set_bundle(root + "/bundle");
    record.set_outcome(wire::COMMITTED);
    record.set_told(true);
    record.set_resumed(true);
    record.set_boot(boot_of_host());
    record.set_closed(true);
  }
  void TearDown() override {
    host.reset();
  }
  /// As a migrd does that finds this after its start.
  void begin() {
    ASSERT_TRUE(Journal<journal::Destination>(config.state_dir + "/journal/destination").save(kId, record));
    host.emplace(config, sessions, peers, claims, numbers);
  }
  std::string state() { return host->open_migrations().empty() ? "" : host->open_migrations()[0].state(); }
  long tries() const {
    const std::string log = text_of(root + "/net.log");
    return std::count(log.begin(), log.end(), '\n');
  }

  const TempFolder temp;
  const std::string root = temp.path;
  const Config config = config_in_root();
  journal::Destination record;
  SessionTable sessions;
  Peers peers{config, pki::Files{}};
  Claims claims;
  Numbers numbers{config};
  std::optional<DestinationHost> host;
};

TEST_F(ADestination, IsNotFinishedUntilTheNetworkIsOpen) {
  begin();
  EXPECT_TRUE(within(5'000, [&] { return tries() > 2; })) << "it is tried once only";
  EXPECT_EQ(state(), "runs here; its network stays closed and is tried again: network of web, attach: no bridge");
  EXPECT_FALSE(host->claims(Instance{1}));
  EXPECT_TRUE(host->opens_network("web")) << "it does not go before that is over";
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(within(5'000, [&] { return host->open_migrations().empty(); }));
  EXPECT_FALSE(host->opens_network("web"));
  host.reset();
  const auto kept = Journal<journal::Destination>(config.state_dir + "/journal/destination").load(kKeepOutcome, [](const auto&) { return false; });
  EXPECT_FALSE(kept.at(kId).closed());
}

// It is kept for a week, and nobody needs the other ends of its connections any more.
TEST_F(ADestination, KeepsNoConnectionsOfWhatIsFinished) {
  fs::remove(root + "/net-fails");
  wire::ConnectRequest connect;
  connect.add_connections()->set_vqpn(7);
  record.set_connected(connect.SerializeAsString());
  begin();
  const auto kept = [&] { return Journal<journal::Destination>(config.state_dir + "/journal/destination").load(kKeepOutcome, [](const auto&) { return false; }).at(kId); };
  EXPECT_TRUE(within(5'000, [&] { return host->tick(), kept().connected().empty(); }));
  EXPECT_EQ(kept().outcome(), wire::COMMITTED);
}

// None of them may be taken away by a reload.
TEST_F(ADestination, SaysOfWhatIsOpenWhichHostsTakePart) {
  for (const char* h : {"src", "dst", "partner"}) record.mutable_header()->add_hosts(h);
  begin();
  const auto open = host->open_migrations();
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].source(), "src");
  EXPECT_EQ(open[0].destination(), "dst");
  ASSERT_EQ(open[0].partners_size(), 1);
  EXPECT_EQ(open[0].partners(0), "partner");
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(within(5'000, [&] { return host->open_migrations().empty(); }));
}

TEST_F(ADestination, OpensNoNetworkOfWhatHasEnded) {
  begin();
  EXPECT_TRUE(within(5'000, [&] { return tries() > 0; }));
  fs::remove_all(root + "/containers/web");
  EXPECT_TRUE(within(5'000, [&] { return host->open_migrations().empty(); }));
}

TEST_F(ADestination, SinceABootNothingOfItIsHere) {
  record.set_boot("another boot");
  begin();
  EXPECT_TRUE(host->open_migrations().empty());
  EXPECT_EQ(tries(), 0);
}

// UNKNOWN would be taken for "never let run here".
TEST_F(ADestination, OfARecordThatCannotBeReadItDoesNotSayThatItIsNotKnown) {
  const std::string journal = config.state_dir + "/journal/destination", file = journal + "/" + migration_text(kId) + ".json";
  const auto asked = [&](std::uint32_t id) {
    HostService service(config, sessions, numbers, {&*host});
    grpc::ServerContext ctx;
    wire::Migration m;
    m.set_id(id);
    wire::OutcomeReply o;
    const auto s = service.GetOutcome(&ctx, &m, &o);
    EXPECT_EQ(o.outcome(), wire::UNKNOWN);
    return s.error_code();
  };
  const auto start = [&] { host.reset(), host.emplace(config, sessions, peers, claims, numbers); };
  for (const char* text : {"{", "{}"}) {
    fs::create_directories(journal);
    std::ofstream(file) << text;
    for (int starts = 0; starts < 2; starts++) {
      start();
      EXPECT_EQ(asked(kId), grpc::INTERNAL) << text;
      EXPECT_EQ(asked(kId + 1), grpc::OK);
    }
    fs::remove_all(journal);
  }
  start();
  EXPECT_EQ(asked(kId), grpc::OK);
  fs::create_symlink(file, file);
  start();
  EXPECT_EQ(asked(kId), grpc::INTERNAL);
  EXPECT_TRUE(fs::is_symlink(file)) << "it may be read another time";
  fs::remove_all(journal);
  fs::create_symlink(journal, journal);
  start();
  EXPECT_EQ(asked(kId + 1), grpc::INTERNAL) << "nothing is known then";
}

// Its partners have switched, and wait for keys: they go on, and see that it has ended.
TEST_F(ADestination, SaysThatThereAreNoKeysOfWhatHasEnded) {
  kReconnectMs = 100;
  record.set_resumed(false);
  record.set_closed(false);
  record.mutable_header()->add_instances(std::string(sizeof(Instance), 'i'));
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::COMMITTED);
  EXPECT_FALSE(host->outcome(kId).keys_known()) << "it may run";
  Instance its;
  its.fill('i');
  EXPECT_EQ(claims.holder(its), kId) << "nobody else gets it before it is all here";
  record.set_boot("another boot");
  host.reset();
  const long before = tries();
  begin();
  const auto so = [&] { return host->tick(), host->outcome(kId).keys_known(); };
  EXPECT_TRUE(within(5'000, so));
  EXPECT_EQ(host->outcome(kId).keys_size(), 0);
  EXPECT_EQ(claims.holder(its), 0u);
  EXPECT_EQ(tries(), before) << "nothing is left that its network would be for";
  host.reset();
  host.emplace(config, sessions, peers, claims, numbers);
  EXPECT_TRUE(host->outcome(kId).keys_known()) << "it is written down";
}

// It has nothing of RDMA but ids of librdmacm, perhaps, and connects when nobody waits for it any more.
TEST_F(ADestination, WhoIsLateFindsItsGateOpen) {
  kReconnectMs = 100;
  fs::remove(root + "/net-fails");
  fs::create_directories(config.run_dir);
  std::ofstream(root + "/containers/web/state.json") << R"({"init_process_pid": )" << getpid() << "}";
  record.set_resumed(false);
  record.set_closed(false);
  record.mutable_header()->add_instances(std::string(sizeof(Instance), 'i'));
  begin();
  EXPECT_TRUE(within(10'000, [&] { return host->tick(), host->open_migrations().empty(); }));
  std::string gate = config.run_dir + "/" MIGR_PROC_GATE_PREFIX;
  for (std::size_t i = 0; i < sizeof(Instance); i++) gate += "69";
  EXPECT_TRUE(fs::exists(gate));

  ASSERT_TRUE(sessions.start(root + "/proc.sock", {}));
  Instance i;
  i.fill('i');
  const Fd library = connect_library(root + "/proc.sock", i, MIGR_PROC_FROZEN);
  ASSERT_GE(library.n, 0);
  migr_msg m{};
  ASSERT_TRUE(within(5'000, [&] { return bool(sessions.by_pid(getpid())); }));
  // ROLLBACK would leave it with the source's.
  std::vector<int> told;
  std::thread answers([&] {
    while (told.size() < 2 && recv(library.n, &m, sizeof m, 0) > 0) {
      told.push_back(m.type);
      m.type |= MIGR_REPLY;
      send(library.n, &m, sizeof m, MSG_NOSIGNAL);
    }
  });
  const auto session = sessions.by_pid(getpid());
  EXPECT_EQ(host->brings(session->instance(), getpid()), true);
  EXPECT_EQ(host->brings(session->instance(), 0), false) << "it would close the gate";
  EXPECT_EQ(host->brings(Instance{1}, 0), std::nullopt);
  EXPECT_TRUE(host->comes_late(*session));
  EXPECT_FALSE(host->comes_late(*session)) << "once";
  EXPECT_EQ(host->brings(session->instance(), 0), std::nullopt) << "nobody waits for it";
  take_in(*session, config.run_dir);
  shutdown(library.n, SHUT_RDWR);
  answers.join();
  EXPECT_EQ(told, (std::vector<int>{MIGR_MSG_REBIND, MIGR_MSG_RESUME}));
  EXPECT_FALSE(fs::exists(gate)) << "it has come in";
  sessions.stop();
}

/// Two processes: this one, and a child that answers at once.
struct TwoOfIt : ADestination {
  void SetUp() override {
    ADestination::SetUp();
    fs::remove(root + "/net-fails");
    fs::create_directories(config.run_dir);
    std::ofstream(root + "/containers/web/state.json") << R"({"init_process_pid": )" << getpid() << "}";
    record.set_resumed(false);
    record.set_closed(false);
    for (const char i : {'i', 'j'}) record.mutable_header()->add_instances(std::string(sizeof(Instance), i));
    std::snprintf(at.sun_path, sizeof at.sun_path, "%s/proc.sock", root.c_str());
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, heard), 0);
    if (!(child = fork())) {
      for (char go; recv(heard[1], &go, 1, 0) != 1;) {}
      const int library = connected('j');
      for (migr_msg m{}; recv(library, &m, sizeof m, 0) > 0; send(library, &m, sizeof m, MSG_NOSIGNAL)) {
        send(heard[1], &m.type, sizeof m.type, 0);
        m.type |= MIGR_REPLY;
      }
      _exit(0);
    }
    ASSERT_TRUE(sessions.start(at.sun_path, {}));
    ASSERT_EQ(send(heard[0], "", 1, 0), 1);
    library = connected('i');
    ASSERT_TRUE(within(5'000, [&] { return sessions.by_pid(getpid()) && sessions.by_pid(child); }));
  }
  void TearDown() override {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    host.reset();
    sessions.stop();
    for (const int fd : {heard[0], heard[1], library}) close(fd);
    ADestination::TearDown();
  }
  int connected(char instance) const {
    Instance i;
    i.fill(static_cast<std::uint8_t>(instance));
    Fd fd = connect_library(at.sun_path, i, MIGR_PROC_FROZEN);
    if (fd.n < 0) _exit(1);
    return std::exchange(fd.n, -1);
  }
  /// The child was told so, within a while.
  bool other_hears(int type) const {
    const timeval limit{3, 0};
    setsockopt(heard[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    std::uint16_t got = 0;
    return recv(heard[0], &got, sizeof got, 0) == sizeof got && got == type;
  }
  sockaddr_un at{.sun_family = AF_UNIX, .sun_path = {}};
  int heard[2] = {-1, -1}, library = -1;
  pid_t child = -1;
};

// Nobody goes back any more: each one's time is its own.
TEST_F(TwoOfIt, WhoIsSlowHoldsUpNobodyElse) {
  std::vector<int> told, beside;
  std::thread answers([&] {
    for (migr_msg m{}; told.size() < 2 && recv(library, &m, sizeof m, 0) > 0; send(library, &m, sizeof m, MSG_NOSIGNAL)) {
      told.push_back(m.type);
      if (other_hears(m.type)) beside.push_back(m.type);
      m.type |= MIGR_REPLY;
    }
  });
  begin();
  EXPECT_TRUE(within(15'000, [&] { return host->tick(), host->open_migrations().empty(); }));
  shutdown(library, SHUT_RDWR);
  answers.join();
  EXPECT_EQ(told, (std::vector<int>{MIGR_MSG_REBIND, MIGR_MSG_RESUME}));
  EXPECT_EQ(beside, told);
}

// It is asked again; what the other one has done already it does not lose.
TEST_F(TwoOfIt, WhoFailsKeepsNobodyFromBeingBound) {
  std::vector<int> told;
  bool other_bound = false;
  std::thread answers([&] {
    for (migr_msg m{}; told.size() < 3 && recv(library, &m, sizeof m, 0) > 0; send(library, &m, sizeof m, MSG_NOSIGNAL)) {
      if (told.empty()) m.status = EIO, other_bound = other_hears(m.type);
      told.push_back(m.type);
      m.type |= MIGR_REPLY;
    }
  });
  begin();
  EXPECT_TRUE(within(15'000, [&] { return host->tick(), host->open_migrations().empty(); }));
  shutdown(library, SHUT_RDWR);
  answers.join();
  EXPECT_TRUE(other_bound);
  EXPECT_EQ(told, (std::vector<int>{MIGR_MSG_REBIND, MIGR_MSG_REBIND, MIGR_MSG_RESUME}));
}

TEST_F(ADestination, GoesOnWhereNothingCanBeWrittenDown) {
  kReconnectMs = 100;
  fs::remove(root + "/net-fails");
  std::ofstream(root + "/containers/web/state.json") << R"({"init_process_pid": )" << getpid() << "}";
  record.set_resumed(false);
  record.mutable_header()->add_instances(std::string(sizeof(Instance), 'i'));
  fs::create_directories(config.state_dir + "/guests.json.new");
  begin();
  EXPECT_TRUE(within(10'000, [&] { return host->tick(), host->open_migrations().empty(); }));
}

// They may be what fills the disk.
TEST_F(ADestination, ItsImagesGoBeforeItsConnectionsAreTakenUp) {
  kReconnectMs = 100;
  record.set_resumed(false);
  record.mutable_header()->add_instances(std::string(sizeof(Instance), 'i'));
  const std::string images = root + "/state/dest/" + migration_text(kId) + "/images";
  fs::create_directories(images);
  begin();
  ASSERT_TRUE(fs::exists(images));
  EXPECT_TRUE(within(5'000, [&] { return host->tick(), !fs::exists(images); }));
  EXPECT_FALSE(host->outcome(kId).keys_known());
  fs::remove_all(root + "/containers/web");  // nobody tries again then
  EXPECT_TRUE(within(5'000, [&] { return host->open_migrations().empty(); }));
}

// A played CRIU, whose process makes another when it is told to end: that has no parent then that would be known.
TEST_F(ADestination, EndsWhatARestoreMadeUntilItsEnd) {
  const std::string child = "trap 'sleep 60 & echo $! >" + root + "/late' USR1; echo $$ >" + root + "/root; while :; do sleep 0.05; done";
  std::ofstream(root + "/child") << child;
  const std::string script = "sh " + root + "/child & r=$!; trap 'kill -USR1 $r; while [ ! -s " + root + "/late ]; do sleep 0.05; done; exit' TERM; while :; do sleep 0.05; done";
  const std::string images = root + "/state/dest/" + migration_text(kId) + "/images";
  const pid_t criu = fork();
  if (!criu) {
    execl("/bin/sh", "sh", "-c", script.c_str(), "criu", "restore", "-D", images.c_str(), nullptr);
    _exit(1);
  }
  std::thread reaper([&] { waitpid(criu, nullptr, 0); });
  ASSERT_TRUE(within(5'000, [&] { return !first_line_of(root + "/root").empty(); }));
  record.mutable_header()->set_container("pid:" + first_line_of(root + "/root"));
  record.mutable_header()->clear_bundle();
  record.set_outcome(wire::OPEN);
  record.set_told(false);
  record.set_resumed(false);
  record.set_closed(false);
  begin();
  reaper.join();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
  const pid_t late = std::atoi(first_line_of(root + "/late").c_str());
  ASSERT_GT(late, 0);
  EXPECT_TRUE(within(2'000, [&] { return !process_lives(late); }));
  kill(late, SIGKILL);
}

TEST_F(ADestination, ComesIntoNoBundleOfAnother) {
  const Runtime runtime(config);
  EXPECT_TRUE(runtime.bundle_is_free(root + "/bundle")) << "of which nothing is known";
  for (const std::string state : {"", "[]", "{}", R"({"config": 1})", R"({"config": {"labels": "bundle=/x"}})", R"({"config": {"labels": [1, "created=x"]}})"}) {
    std::ofstream(root + "/containers/web/state.json") << state;
    EXPECT_TRUE(runtime.bundle_is_free(root + "/bundle")) << state;
  }
  std::ofstream(root + "/containers/web/state.json") << R"({"config": {"labels": ["created=x", "bundle=)" << root << R"(/bundle"]}})";
  EXPECT_TRUE(runtime.bundle_is_free(root + "/bundle2"));
  EXPECT_TRUE(runtime.bundle_is_free(""));
  const auto s = runtime.bundle_is_free(root + "/bundle");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EEXIST);
  EXPECT_NE(s.error().text.find("'web'"), std::string::npos) << s.error().text;
  EXPECT_TRUE(s.error().text.ends_with("; to be rid of it there: " + config.runc + " --root " + config.runc_root + " delete --force web")) << s.error().text;
}

/// A Prepare of another container into the same bundle, which its source is to fill later. @return why not
std::string comes_too(grpc::Server& server, journal::Destination record, std::uint32_t id) {
  wire::PrepareChunk first;
  *first.mutable_header() = record.header();
  first.mutable_header()->set_id(id);
  first.mutable_header()->set_container("db");
  first.mutable_header()->set_source("dst");
  first.mutable_header()->set_later(true);
  grpc::ClientContext ctx;
  wire::PrepareReply out;
  const auto stub = wire::Destination::NewStub(server.InProcessChannel({}));
  const auto writer = stub->Prepare(&ctx, &out);
  writer->Write(first);
  writer->WritesDone();
  return writer->Finish().error_message();
}

// runc has not written down yet where it runs from.
TEST_F(ADestination, ComesIntoNoBundleOfWhatIsStillBeingRestored) {
  fs::remove(root + "/net-fails");
  record.set_closed(false);
  begin();
  const std::string images = root + "/state/dest/" + migration_text(kId) + "/images";
  const pid_t restore = fork();
  if (!restore) {
    execl("/bin/sh", "sh", "-c", "while :; do sleep 0.05; done", "runc", "partial-restore", images.c_str(), nullptr);
    _exit(1);
  }
  ASSERT_TRUE(within(5'000, [&] { return !processes_told({"partial-restore"}, images).empty(); }));
  grpc::ServerBuilder b;
  b.RegisterService(&*host);
  const auto server = b.BuildAndStart();
  EXPECT_EQ(comes_too(*server, record, kId + 1), "'web' is being migrated to here, into " + root + "/bundle, which is where this one's bundle is to be");
  kill(restore, SIGKILL);
  waitpid(restore, nullptr, 0);
  EXPECT_EQ(comes_too(*server, record, kId + 2), "");
}

TEST_F(ADestination, SaysHowToBeRidOfWhatIsInTheWay) {
  Config c = config;
  c.runc = "/x/runc";
  c.runc_root = "/y";
  EXPECT_EQ(Runtime(c).ended_by("web"), "/x/runc --root /y delete --force web");
  EXPECT_EQ(Runtime(c).ended_by("pid:712"), "kill 712");
  const std::string removes = config.runc + " --root " + config.runc_root + " delete --force web";
  EXPECT_EQ(Runtime(config).name_is_free("web").error().text, "the name 'web' is taken by another container; to be rid of it there: " + removes);
  begin();
  EXPECT_EQ(host->order(kId, wire::UNDONE, false).error().text, "the container runs here already; to be rid of it: " + removes);
}

/// It was open when its migrd ended, and ready; runc is played.
struct AnOpenOne : ADestination {
  void SetUp() override {
    ADestination::SetUp();
    fs::remove(root + "/net-fails");
    std::ofstream(root + "/runc") << "#!/bin/sh\necho \"$3\" >>" << root << "/runc.log\n[ \"$3\" != delete ] || rm -r \"$2/$5\"\n";
    ASSERT_EQ(chmod((root + "/runc").c_str(), 0755), 0);
    record.set_outcome(wire::OPEN);
    record.set_told(false);
    record.set_resumed(false);
    record.set_closed(false);
    record.set_made_bundle(true);
    struct stat st;
    ASSERT_EQ(stat((root + "/bundle").c_str(), &st), 0);
    record.set_bundle_device(st.st_dev);
    record.set_bundle_inode(st.st_ino);
    record.set_began(boot_of_host() + " 7");
  }
  void web_began(int ticks, const std::string& bundle) const {
    std::ofstream(root + "/containers/web/state.json") << R"({"init_process_start": )" << ticks << R"(, "config": {"labels": ["bundle=)" << bundle << R"("]}})";
  }
};

TEST_F(AnOpenOne, IsTakenBackAsAWhole) {
  web_began(7, root + "/bundle");
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
  EXPECT_FALSE(fs::exists(root + "/containers/web"));
  EXPECT_FALSE(fs::exists(root + "/bundle"));
  EXPECT_EQ(text_of(root + "/net.log"), "detach\ncleanup\n");
}

// It was let run, and has ended before anybody looked: the source would run it again.
TEST_F(AnOpenOne, ThatHasRunIsCommitted) {
  web_began(7, root + "/bundle");
  record.set_told(true);
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::COMMITTED);
  EXPECT_TRUE(fs::exists(root + "/containers/web"));
  EXPECT_EQ(text_of(root + "/runc.log").find("delete"), std::string::npos);
}

// Without a container only CRIU tells that it ran.
TEST_F(AnOpenOne, OfProcessesThatHaveRunIsCommitted) {
  record.mutable_header()->set_container("pid:4242");
  record.mutable_header()->clear_bundle();
  record.set_made_bundle(false);
  record.set_told(true);
  for (const bool ran : {true, false}) {
    const std::string work = root + "/state/dest/" + migration_text(kId) + "/work";
    fs::remove_all(work);
    fs::create_directories(work);
    if (ran) std::ofstream(work + "/stats-restore") << "";
    host.reset();
    begin();
    EXPECT_EQ(host->outcome(kId).outcome(), ran ? wire::COMMITTED : wire::UNDONE);
  }
}

TEST_F(AnOpenOne, WhoseRestoreFailedWhenItWasLetRunIsUndone) {
  fs::remove_all(root + "/containers/web");
  record.set_told(true);
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
}

// Its restore has undone itself meanwhile, and somebody has started another one of that name.
TEST_F(AnOpenOne, LeavesAnotherOfItsNameAlone) {
  web_began(8, root + "/bundle");
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
  EXPECT_TRUE(fs::exists(root + "/containers/web"));
  EXPECT_TRUE(fs::exists(root + "/bundle/config.json"));
  EXPECT_EQ(text_of(root + "/runc.log"), "");
  EXPECT_EQ(text_of(root + "/net.log"), "") << "the network is that one's";
}

// That it was undone could not be written down, nor that the next one was committed.
TEST_F(AnOpenOne, LeavesAloneWhatAnotherMigrationHasBrought) {
  record.mutable_header()->add_instances(std::string(sizeof(Instance), 'i'));
  std::string gate = config.run_dir + "/" MIGR_PROC_GATE_PREFIX;
  for (std::size_t i = 0; i < sizeof(Instance); i++) gate += "69";
  for (const auto outcome : {wire::COMMITTED, wire::OPEN}) {
    fs::remove_all(config.run_dir);
    fs::create_directories(config.run_dir);
    web_began(7, root + "/bundle");
    auto later = record;
    later.mutable_header()->set_id(kId + 1);
    later.set_told(true);
    later.set_outcome(outcome);
    ASSERT_TRUE(Journal<journal::Destination>(config.state_dir + "/journal/destination").save(kId + 1, later));
    record.clear_began();  // its restore had not come so far
    begin();
    EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
    EXPECT_EQ(host->outcome(kId + 1).outcome(), wire::COMMITTED);
    EXPECT_TRUE(fs::exists(root + "/containers/web"));
    EXPECT_TRUE(fs::exists(root + "/bundle/config.json"));
    EXPECT_TRUE(fs::exists(gate)) << "its processes have not come through yet";
    EXPECT_EQ(text_of(root + "/runc.log").find("delete"), std::string::npos);
    host.reset();
    record.set_began(boot_of_host() + " 7");
  }
}

TEST_F(AnOpenOne, LeavesTheBundleThatAnotherRunsFrom) {
  fs::remove_all(root + "/containers/web");
  fs::create_directories(root + "/containers/db");
  std::ofstream(root + "/containers/db/state.json") << R"({"config": {"labels": ["bundle=)" << root << R"(/bundle"]}})";
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
  EXPECT_TRUE(fs::exists(root + "/bundle/config.json"));
}

// Since it was made a file system has been mounted there: what it shows is the source's.
TEST_F(AnOpenOne, LeavesAFolderThatItHasNotMade) {
  web_began(7, root + "/bundle");
  record.set_bundle_inode(record.bundle_inode() + 1);
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
  EXPECT_FALSE(fs::exists(root + "/containers/web"));
  EXPECT_TRUE(fs::exists(root + "/bundle/config.json"));
}

TEST_F(AnOpenOne, OfAFolderThatIsNotKnownRemovesOnlyWhatIsEmpty) {
  record.clear_bundle_device();
  record.clear_bundle_inode();
  record.clear_boot();  // no restore had begun
  fs::remove_all(root + "/containers/web");
  for (const bool empty : {false, true}) {
    if (empty) fs::remove(root + "/bundle/config.json");
    begin();
    EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
    EXPECT_EQ(fs::exists(root + "/bundle"), !empty);
    host.reset();
  }
}

TEST_F(AnOpenOne, IsTidiedUpUntilNothingOfItIsLeft) {
  web_began(7, root + "/bundle");
  record.set_made_net(true);
  std::ofstream(root + "/net-fails") << "";
  begin();
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE);
  EXPECT_FALSE(fs::exists(root + "/containers/web"));
  EXPECT_TRUE(fs::exists(root + "/bundle/config.json")) << "which says what to tidy up";
  const std::string what = "was undone here, but not all of it has gone, which is tried again";
  EXPECT_EQ(state(), what + ": network of web, detach: no bridge");
  host.reset();
  host.emplace(config, sessions, peers, claims, numbers);
  EXPECT_EQ(state(), what) << "another migrd does not know of it";
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(within(5'000, [&] { return host->tick(), host->open_migrations().empty(); }));
  EXPECT_FALSE(fs::exists(root + "/bundle"));
  EXPECT_EQ(text_of(root + "/runc.log"), "delete\n");
  EXPECT_EQ(text_of(root + "/net.log"), "detach\ncleanup\ndetach\ncleanup\n");
  host.reset();
  host.emplace(config, sessions, peers, claims, numbers);
  EXPECT_TRUE(host->open_migrations().empty()) << "it is written down";
}

// That has nothing there yet, and may be refused.
TEST_F(AnOpenOne, LeavesItsBundleToNobodyWhoOnlyAsks) {
  web_began(7, root + "/bundle");
  record.set_made_net(true);
  std::ofstream(root + "/net-fails") << "";
  Config slow = config;
  slow.fault = "destination.prepare.begin:while=" + root + "/asks";
  ASSERT_TRUE(Journal<journal::Destination>(config.state_dir + "/journal/destination").save(kId, record));
  host.emplace(slow, sessions, peers, claims, numbers);
  EXPECT_TRUE(fs::exists(root + "/bundle/config.json"));
  grpc::ServerBuilder b;
  b.RegisterService(&*host);
  const auto server = b.BuildAndStart();
  std::string why;
  std::thread other([&] { why = comes_too(*server, record, kId + 1); });
  EXPECT_TRUE(within(5'000, [&] { return fs::exists(root + "/asks"); }));
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(within(5'000, [&] { return host->tick(), host->open_migrations().size() == 1; }));
  EXPECT_FALSE(fs::exists(root + "/bundle"));
  fs::remove(root + "/asks");
  other.join();
  EXPECT_EQ(why, root + "/bundle/config.json: no JSON") << "it was let in, and sends nothing";
  server->Shutdown();
  host.reset();
}

// systemd ends a start that takes longer than it was told.
TEST_F(AnOpenOne, GetsTheTimeThatItMayTake) {
  const Fd systemd(socket(AF_UNIX, SOCK_DGRAM, 0));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::strcpy(at.sun_path, (root + "/notify").c_str());
  ASSERT_EQ(bind(systemd.n, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  setenv("NOTIFY_SOCKET", at.sun_path, 1);
  web_began(7, root + "/bundle");
  begin();
  unsetenv("NOTIFY_SOCKET");
  char said[64] = "";
  ASSERT_GT(recv(systemd.n, said, sizeof said - 1, MSG_DONTWAIT), 0);
  long long us = 0;
  EXPECT_EQ(std::sscanf(said, "EXTEND_TIMEOUT_USEC=%lld", &us), 1) << said;
  EXPECT_GT(us, 1'000LL * (2 * kHookMs + kRuncMs)) << "detach, delete, cleanup";
  EXPECT_LT(recv(systemd.n, said, sizeof said, MSG_DONTWAIT), 0);
}

TEST_F(AnOpenOne, WhatComesAfterItIsNotTidiedUp) {
  record.clear_began();  // runc had not written that down
  record.set_made_net(true);
  std::ofstream(root + "/net-fails") << "";
  begin();
  EXPECT_FALSE(fs::exists(root + "/containers/web"));
  fs::create_directories(root + "/containers/web");
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(within(5'000, [&] { return host->tick(), host->open_migrations().empty(); }));
  EXPECT_TRUE(fs::exists(root + "/containers/web"));
  EXPECT_EQ(text_of(root + "/net.log"), "detach\ncleanup\n") << "the network is that one's";
}

/// The name is free when runc is started, and taken when it would make its own.
struct ARestore : ADestination {
  void SetUp() override {
    ADestination::SetUp();
    fs::remove_all(root + "/containers/web");
    fs::remove(root + "/net-fails");
    host.emplace(config, sessions, peers, claims, numbers);
    grpc::ServerBuilder b;
    b.RegisterService(&*host);
    server = b.BuildAndStart();
    wire::PrepareChunk chunk;
    *chunk.mutable_header() = record.header();
    chunk.mutable_header()->set_source("dst");  // it calls itself, as in a restore from the disk
    first = chunk;
  }
  void TearDown() override {
    server.reset();
    ADestination::TearDown();
  }
  grpc::Status abort() {
    grpc::ClientContext ctx;
    wire::Migration m;
    wire::Empty out;
    m.set_id(id);
    return wire::Destination::NewStub(server->InProcessChannel({}))->Abort(&ctx, m, &out);
  }
  grpc::Status prepare(const std::string& ends) {
    std::ofstream(root + "/runc") << "#!/bin/sh\necho \"$3\" >>" << root << "/runc.log\n[ \"$3\" != delete ] || rm -r \"$2/$5\"\n[ \"$3\" != partial-restore ] || { mkdir \"$2/web\"; " << ends << "; }\n";
    EXPECT_EQ(chmod((root + "/runc").c_str(), 0755), 0);
    grpc::ClientContext ctx;
    wire::PrepareReply out;
    const auto stub = wire::Destination::NewStub(server->InProcessChannel({}));
    const auto writer = stub->Prepare(&ctx, &out);
    writer->Write(first);
    writer->WritesDone();
    return writer->Finish();
  }
  /// It listens before it is started.
  Fd plays_the_plugin() const {
    const std::string images = root + "/state/dest/" + migration_text(id) + "/images";
    fs::create_directories(images);
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::strcpy(at.sun_path, (images + "/restore.sock").c_str());
    Fd plugin(socket(AF_UNIX, SOCK_SEQPACKET, 0));
    EXPECT_EQ(bind(plugin.n, reinterpret_cast<const sockaddr*>(&at), sizeof at) || listen(plugin.n, 3), 0);
    return plugin;
  }

  wire::PrepareChunk first;
  std::uint32_t id = kId;
  std::unique_ptr<grpc::Server> server;
};

TEST_F(ARestore, ThatFindsTheNameTakenLeavesThatAlone) {
  const auto s = prepare("echo container with id exists: web >&2; exit 1");
  EXPECT_NE(s.error_message().find("container with id exists"), std::string::npos) << s.error_message();
  EXPECT_TRUE(fs::exists(root + "/containers/web"));
  EXPECT_EQ(text_of(root + "/runc.log"), "partial-restore\n");
  EXPECT_EQ(text_of(root + "/net.log").find("detach"), std::string::npos) << "the network is that one's";
}

// The plugin listened already: whoever has the name has it since.
TEST_F(ARestore, ThatHasUndoneItselfLeavesWhatCameAfterItAlone) {
  const Fd plugin = plays_the_plugin();
  std::thread ends([&] {
    const Fd seen(accept(plugin.n, nullptr, nullptr)), asked(accept(plugin.n, nullptr, nullptr));
    (void)within(5'000, [&] { return fs::exists(root + "/ended") && processes_told({"partial-restore"}, root).empty(); });
  });
  EXPECT_FALSE(prepare(">" + root + "/ended; exit 1").ok());
  ends.join();
  EXPECT_TRUE(fs::exists(root + "/containers/web"));
  EXPECT_EQ(text_of(root + "/runc.log"), "partial-restore\n");
  EXPECT_EQ(text_of(root + "/net.log").find("detach"), std::string::npos) << "the network is that one's";
}

// Nobody has ended it, so memory has not run out.
TEST_F(ARestore, ThatIsLateIsToldWhichLimitItWas) {
  const int before = std::exchange(kRestoreSocketMs, 300);
  const std::string text = prepare("sleep 30").error_message();
  kRestoreSocketMs = before;
  EXPECT_NE(text.find("did not listen within 300 ms; if it only needs longer, raise \"restore_socket_ms\" in \"limits\" of migrd.json"), std::string::npos) << text;
  EXPECT_EQ(text.find("memory runs out"), std::string::npos) << text;
}

TEST_F(ARestore, WhosePluginIsLateIsToldWhichLimitItWas) {
  const Fd plugin = plays_the_plugin();
  const int before = std::exchange(kPrepareMs, 300);
  const std::string text = prepare("sleep 30").error_message();
  kPrepareMs = before;
  EXPECT_NE(text.find("PREPARE: no answer within 300 ms; if it only needs longer, raise \"prepare_ms\""), std::string::npos) << text;
  EXPECT_EQ(text.find("memory runs out"), std::string::npos) << text;
}

// Each would write over the other's files, and remove them when it is undone.
TEST_F(ARestore, SharesItsBundleWithNoOtherThatComes) {
  first.mutable_header()->set_later(true);
  ASSERT_TRUE(prepare("").ok());
  const std::string why = comes_too(*server, record, kId + 1);
  EXPECT_EQ(why, "'web' is being migrated to here, into " + root + "/bundle, which is where this one's bundle is to be");
  EXPECT_TRUE(abort().ok());
  EXPECT_TRUE(fs::exists(root + "/bundle/config.json"));
  EXPECT_EQ(comes_too(*server, record, kId + 2), "");
}

// A migrd that is started again would tidy up what has come since.
TEST_F(ARestore, ThatWasUndoneIsWrittenDownWhenThereIsRoomAgain) {
  const auto written = [&] { return Journal<journal::Destination>(config.state_dir + "/journal/destination").load(kKeepOutcome, [](const auto&) { return false; }).at(kId).outcome(); };
  const std::string in_the_way = config.state_dir + "/journal/destination/" + migration_text(kId) + ".json.new";
  first.mutable_header()->set_later(true);
  ASSERT_TRUE(prepare("").ok());
  fs::create_directories(in_the_way);
  EXPECT_TRUE(abort().ok());
  host->tick();
  EXPECT_EQ(written(), wire::OPEN) << "where nothing can be written";
  fs::remove(in_the_way);
  host->tick();
  EXPECT_EQ(written(), wire::UNDONE);
}

// They are what is left to understand it.
TEST_F(ARestore, ThatFailsLeavesItsLogsAndNoOtherDoes) {
  const auto kept = [&] { return config.state_dir + "/failed/" + migration_text(id) + "-restore/restore.out"; };
  const std::string earlier = config.state_dir + "/failed/00000001-restore/restore.out";
  fs::create_directories(fs::path(earlier).parent_path());
  std::ofstream(earlier) << "an earlier one";
  first.mutable_header()->set_later(true);
  ASSERT_TRUE(prepare("").ok());
  EXPECT_TRUE(abort().ok());
  EXPECT_FALSE(fs::exists(kept())) << "nothing was restored";
  first.mutable_header()->set_later(false);
  for (const bool cancelled : {true, false}) {
    fs::remove_all(root + "/containers/web");
    id = kId + 1 + !cancelled;
    first.mutable_header()->set_id(id);
    const Fd plugin = plays_the_plugin();
    std::thread plays([&] {
      const Fd seen(accept(plugin.n, nullptr, nullptr)), asked(accept(plugin.n, nullptr, nullptr));
      migr_rc_msg m{};
      EXPECT_GT(recv(asked.n, &m, sizeof m, 0), 0);
      if (cancelled) EXPECT_TRUE(abort().ok());
      else EXPECT_TRUE(within(5'000, [&] { return fs::exists(root + "/ended"); }));
    });
    const auto s = prepare(cancelled ? "sleep 60" : "echo no room >&2; >" + root + "/ended; exit 1");
    EXPECT_FALSE(s.ok());
    plays.join();
    EXPECT_EQ(text_of(kept()), cancelled ? "" : "no room\n");
    EXPECT_EQ(s.error_message().find("; logs on " + config.name + ": " + fs::path(kept()).parent_path().string()) != std::string::npos, !cancelled) << s.error_message();
  }
  EXPECT_EQ(text_of(earlier), "an earlier one");
}

TEST_F(ARestore, ThatWasKilledIsTidiedUpBehind) {
  const auto s = prepare("kill -KILL $$");
  EXPECT_FALSE(s.ok());
  EXPECT_NE(s.error_message().find("memory runs out"), std::string::npos) << s.error_message();
  EXPECT_FALSE(fs::exists(root + "/containers/web"));
}

TEST_F(ARestore, WhoseAddressIsStillThereIsNotUndoneAsAWhole) {
  EXPECT_FALSE(prepare(">" + root + "/net-fails; kill -KILL $$").ok());
  const auto s = abort();
  EXPECT_EQ(s.error_message(), "it was undone here, but not all of it has gone yet: network of web, detach: no bridge");
  EXPECT_EQ(host->outcome(kId).outcome(), wire::UNDONE) << "it never runs here";
  first.mutable_header()->set_id(kId + 1);
  EXPECT_NE(prepare("").error_message().find("something is left"), std::string::npos) << "it would be tidied up with it";
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(abort().ok());
  EXPECT_TRUE(host->open_migrations().empty());
}

/// The plugin is told to let it run, and answers nothing.
struct ACommit : ARestore {
  /// @param ends  how runc does then
  wire::Outcome outcome_after(const std::string& ends) {
    const Fd plugin = plays_the_plugin();
    std::thread plays([&] {
      for (bool told = false; !told;) {
        const Fd one(accept(plugin.n, nullptr, nullptr));
        migr_rc_msg m{};
        if (recv(one.n, &m, sizeof m, 0) <= 0) continue;  // only a look
        told = m.op == MIGR_RC_COMMIT;
        if (told) std::ofstream(root + "/told") << "";
        m.op |= MIGR_RC_REPLY;
        if (!told) send(one.n, &m, sizeof m, MSG_NOSIGNAL);
      }
    });
    std::ofstream(root + "/state.json") << R"({"init_process_start": 7})";
    EXPECT_TRUE(prepare("cp " + root + "/state.json \"$2/web\"; while [ ! -e " + root + "/told ]; do sleep 0.02; done; " + ends).ok());
    const auto stub = wire::Destination::NewStub(server->InProcessChannel({}));
    wire::Migration m;
    m.set_id(kId);
    wire::ReadyReply ready;
    wire::Empty out;
    grpc::ClientContext first, second;
    EXPECT_TRUE(stub->Ready(&first, m, &ready).ok());
    const bool ok = stub->Commit(&second, m, &out).ok();
    plays.join();
    EXPECT_EQ(host->outcome(kId).outcome(), ok ? wire::COMMITTED : wire::UNDONE);
    return host->outcome(kId).outcome();
  }
};

TEST_F(ACommit, IsOneIfTheRestoreHasLeftAContainer) { EXPECT_EQ(outcome_after("exit 0"), wire::COMMITTED); }
TEST_F(ACommit, IsOneIfTheRestoreHasSucceeded) { EXPECT_EQ(outcome_after("rm -r \"$2/web\"; exit 0"), wire::COMMITTED); }
TEST_F(ACommit, IsNoneIfTheRestoreHasFailed) { EXPECT_EQ(outcome_after("rm -r \"$2/web\"; exit 1"), wire::UNDONE); }
TEST_F(ACommit, IsNoneIfTheRestoreWasKilled) { EXPECT_EQ(outcome_after("kill -KILL $$"), wire::UNDONE); }

// It has just begun to make processes when it is told to end, and its plugin does not know of them.
TEST_F(ARestore, IsEndedWithWhatItMakesMeanwhile) {
  const std::string number = "4194301";  // above pid_max of most
  if (!kill(std::atoi(number.c_str()), 0)) GTEST_SKIP() << "the number is taken";
  std::ofstream(root + "/criu") << "#!/bin/sh\nwhile [ ! -e " << root << "/go ]; do sleep 0.02; done\nsetsid sleep 60 &\necho $! >" << root << "/late\nwhile :; do sleep 0.05; done\n";
  ASSERT_EQ(chmod((root + "/criu").c_str(), 0755), 0);
  first.mutable_header()->set_container("pid:" + number);
  first.mutable_header()->clear_bundle();
  const Fd plugin = plays_the_plugin();
  std::thread ends([&] {
    const Fd seen(accept(plugin.n, nullptr, nullptr));
    { const Fd asked(accept(plugin.n, nullptr, nullptr)); }
    const Fd aborted(accept(plugin.n, nullptr, nullptr));
    std::ofstream(root + "/go") << "";
    (void)within(5'000, [&] { return !first_line_of(root + "/late").empty(); });
  });
  EXPECT_FALSE(prepare("").ok());
  ends.join();
  const pid_t late = std::atoi(first_line_of(root + "/late").c_str());
  ASSERT_GT(late, 0);
  EXPECT_TRUE(within(2'000, [&] { return !process_lives(late); }));
  kill(late, SIGKILL);
}

// What came into the root filesystem since it was stored is not of its time.
TEST_F(ARestore, HasTheFilesThatTheStoppedContainerHad) {
  const std::string bundle = root + "/bundle", rootfs = bundle + "/rootfs", dir = root + "/kept";
  const auto put = [](const std::string& path, const std::string& text) { std::ofstream(path) << text; };
  fs::create_directories(rootfs + "/data/sub");
  put(bundle + "/config.json", R"({"root": {"path": "rootfs"}})");
  for (const char* f : {"/kept", "/changed", "/data/kept", "/caf\xe9"}) put(rootfs + f, "then");
  fs::create_symlink("caf\xe9", rootfs + "/link");
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::strcpy(at.sun_path, (rootfs + "/socket").c_str());
  const Fd its(socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(bind(its.n, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  first.mutable_header()->set_later(true);
  Sent sent;
  {
    ContainerInfo info;
    KeepingDestination keeps(dir, info);
    fs::create_directories(root + "/images");
    ASSERT_TRUE(keeps.prepare(first.header(), root + "/images", sent));
    ASSERT_TRUE(keeps.upload_changes(kId, sent));
    ASSERT_TRUE(keeps.ready(kId) && keeps.commit(kId));
  }
  const auto changes = [&] {
    for (const char* f : {"/kept", "/caf\xe9", "/link"}) fs::remove(rootfs + f);
    for (const char* f : {"/changed", "/new", "/data/new", "/data/sub/new", "/new\xe9"}) put(rootfs + f, "now");
    fs::create_directories(rootfs + "/newer/below");
    put(bundle + "/beside", "now");
  };
  const auto restored = [&](std::uint32_t id) -> Status {
    RpcDestination link(server->InProcessChannel({}), "dst", dir + "/bundle");
    first.mutable_header()->set_id(id);
    if (auto s = link.prepare(first.header(), root + "/images", sent); !s) return s;
    auto s = link.bundle_changes() ? link.upload_changes(id, sent) : Status();
    if (s) s = link.abort(id);
    return s;
  };
  changes();
  auto s = restored(1);
  ASSERT_TRUE(s) << s.error().text;
  for (const char* f : {"/kept", "/changed", "/data/kept", "/caf\xe9", "/link"}) EXPECT_EQ(text_of(rootfs + f), "then") << f;
  for (const char* f : {"/new", "/data/new", "/data/sub/new", "/newer", "/new\xe9"}) EXPECT_FALSE(fs::exists(rootfs + f)) << f;
  EXPECT_TRUE(fs::is_directory(rootfs + "/data/sub"));
  EXPECT_TRUE(fs::is_socket(rootfs + "/socket")) << "none is stored";
  EXPECT_TRUE(fs::exists(bundle + "/beside")) << "the container cannot have written it";
  // Of an older release, which did not say what there was.
  fs::remove(dir + "/images/root-names");
  changes();
  s = restored(2);
  ASSERT_TRUE(s) << s.error().text;
  EXPECT_EQ(text_of(rootfs + "/changed"), "then");
  EXPECT_TRUE(fs::exists(rootfs + "/new"));
}

// The container's root may be the bundle itself, and who is not root there has to pass it.
TEST_F(ARestore, MakesABundleOfTheModeThatItHad) {
  const std::string from = root + "/from", above = root + "/new", bundle = above + "/bundle";
  fs::create_directories(from);
  fs::create_directories(root + "/images");
  std::ofstream(from + "/config.json") << R"({"root": {"path": ".", "readonly": true}})";
  first.mutable_header()->set_later(true);
  first.mutable_header()->set_bundle(bundle);
  const uid_t uid = geteuid() ? geteuid() : 17;
  const gid_t gid = geteuid() ? getegid() : 18;
  const auto restored = [&](std::uint32_t id) {
    RpcDestination link(server->InProcessChannel({}), "dst", from);
    first.mutable_header()->set_id(id);
    Sent sent;
    const mode_t mask = umask(0077);  // as migrd's
    const Status s = link.prepare(first.header(), root + "/images", sent);
    umask(mask);
    EXPECT_TRUE(s) << s.error().text;
    struct stat st {};
    EXPECT_EQ(stat(bundle.c_str(), &st), 0);
    EXPECT_TRUE(link.abort(id));
    return st;
  };
  EXPECT_EQ(restored(1).st_mode & 07777u, 0700u) << "an older source does not say it";
  auto* m = first.mutable_header()->mutable_bundle_mode();
  m->set_mode(S_IFDIR | 02751);
  m->set_uid(uid);
  m->set_gid(gid);
  fs::remove_all(above);
  const auto st = restored(2);
  EXPECT_EQ(st.st_mode & 07777u, 02751u);
  EXPECT_EQ(st.st_uid, uid);
  EXPECT_EQ(st.st_gid, gid);
  EXPECT_EQ(fs::status(above).permissions(), fs::perms(0755));
  EXPECT_FALSE(fs::exists(bundle)) << "it was undone";
  fs::create_directories(bundle);
  ASSERT_EQ(chmod(bundle.c_str(), 0710), 0);
  EXPECT_EQ(restored(3).st_mode & 07777u, 0710u) << "it is somebody's already";
}

// To who reads them a message that cannot be read is the end.
TEST_F(ARestore, BeginsWhenAllHasCome) {
  std::ofstream(root + "/bundle/config.json") << R"({"root": {"path": "rootfs"}})";
  fs::create_directories(root + "/bundle/rootfs");
  const std::string why = "a message of what was sent could not be read, or its end is missing";
  first.mutable_header()->set_later(true);
  first.set_tells_last(true);
  EXPECT_EQ(prepare("").error_message(), why);
  first.mutable_header()->set_id(kId + 1);
  first.set_last(true);
  ASSERT_TRUE(prepare("").ok());
  const auto stub = wire::Destination::NewStub(server->InProcessChannel({}));
  wire::UploadReply out;
  const auto send = [&](auto chunk, auto method) {
    grpc::ClientContext ctx;
    const auto writer = method(&ctx);
    writer->Write(chunk);
    writer->WritesDone();
    return writer->Finish().error_message();
  };
  wire::UploadChunk images;
  wire::ChangesChunk changes;
  images.set_id(kId + 1), changes.set_id(kId + 1);
  changes.set_all_named(true);
  for (const bool tells : {false, true})
    for (const bool last : {false, true}) {
      images.set_tells_last(tells), changes.set_tells_last(tells);
      images.set_last(last), changes.set_last(last);
      EXPECT_EQ(send(images, [&](auto* ctx) { return stub->Upload(ctx, &out); }), tells && !last ? why : "");
      EXPECT_EQ(send(changes, [&](auto* ctx) { return stub->UploadChanges(ctx, &out); }), tells && !last ? why : "");
    }
}

TEST_F(ADestination, WhatIsOpenStaysAsItIs) {
  record.set_closed(false);
  begin();
  EXPECT_TRUE(host->open_migrations().empty());
  EXPECT_EQ(tries(), 0);
}

}  // namespace
}  // namespace migr::destination_host_test
