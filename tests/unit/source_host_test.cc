// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a source finishes or takes back by itself, with a played runc, network hook and destination: whatever has the name of
// what went and is not it stays as it is, and no order of an operator makes two of one.
#include "agent/source_host.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "agent/build_id.h"
#include "agent/clock.h"
#include "agent/control_service.h"
#include "agent/failover/peer_directory.h"
#include "agent/file_tree.h"
#include "agent/kernel_record.h"
#include "agent/limits.h"
#include "agent/process.h"
#include "played_library.h"
#include "temp_folder.h"

namespace migr::source_host_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kId = 0x1234;
const Error kSilent{EHOSTUNREACH, "played silence"};

/// Of the destination. Without anything it lets the container run when it is told to.
struct Played {
  std::function<void()> told_to_commit;  // it does not answer that
  std::optional<wire::Outcome> says;     // later
  std::atomic<int> asked = 0;
};

struct FakeDestination final : DestinationLink {
  explicit FakeDestination(Played& played) : p(played) {}
  Played& p;
  Status check(const wire::CheckRequest&) override { return {}; }
  Result<wire::PrepareReply> prepare(const wire::PrepareHeader&, const std::string&, Sent&) override { return kSilent; }
  Result<wire::PrepareReply> create(std::uint32_t) override { return kSilent; }
  Status connect(const wire::ConnectRequest&) override { return {}; }
  Status upload(std::uint32_t, const std::string&, unsigned, const Written&, Sent&) override { return {}; }
  Status attach_network(std::uint32_t) override { return {}; }
  Status full_restore(std::uint32_t) override { return {}; }
  Status ready(std::uint32_t) override { return {}; }
  Status commit(std::uint32_t) override {
    if (p.says == wire::OPEN && p.asked) return Error{EBUSY, "it is not ready here"};
    if (!p.told_to_commit) return {};
    p.told_to_commit();
    return kSilent;
  }
  Result<wire::CommitReply> rebind(std::uint32_t) override { return wire::CommitReply(); }
  Result<wire::ResumeReply> resume(std::uint32_t) override { return wire::ResumeReply(); }
  Status abort(std::uint32_t) override {
    if (p.says == wire::COMMITTED) return Error{EBUSY, "the container runs here already"};
    if (p.says == wire::OPEN) p.says = wire::UNDONE;
    return {};
  }
  Result<wire::Outcome> outcome(std::uint32_t) override {
    if (p.asked++ == 0 || !p.says) return kSilent;
    return *p.says;
  }
  Status renew(std::uint32_t) override { return {}; }
};

struct ASource : ::testing::Test {
  Config config_in_root() const {
    Config c;
    c.name = "src";
    c.state_dir = root + "/state";
    c.run_dir = root + "/run";
    c.runc = root + "/runc";
    c.runc_root = root + "/containers";
    c.net_hook = root + "/net";
    return c;
  }
  void SetUp() override {
    kResolveStepMs = 100;
    script("runc", "[ \"$3\" != delete ] || rm -rf \"$2/$5\"\n[ \"$3\" != state ] || echo '{\"status\": \"running\", \"pid\": 1}'\n");
    script("net", "[ ! -e " + root + "/net-fails ]\n");
    fs::create_directories(root + "/bundle");
    fs::create_directories(config.run_dir);
    std::ofstream(root + "/bundle/config.json") << R"({"annotations": {"org.migr.net.ip": "10.0.0.1/24"}})";
    start_container();
  }
  /// Its arguments go to NAME.log.
  void script(const std::string& name, const std::string& does) const {
    std::ofstream(root + "/" + name) << "#!/bin/sh\necho \"$*\" >>" << root << "/" << name << ".log\n"
                                     << does;
    ASSERT_EQ(chmod((root + "/" + name).c_str(), 0755), 0);
  }
  /// @param began  of its first process; 0: runc has not written that down
  void start_container(int began = 0) const {
    fs::create_directories(root + "/containers/web");
    if (began) std::ofstream(root + "/containers/web/state.json") << R"({"init_process_pid": 1, "init_process_start": )" << began << "}";
  }
  bool there() const { return fs::exists(root + "/containers/web"); }
  /// How often `name` was called to do that.
  int did(const std::string& name, const std::string& what) const {
    int n = 0;
    std::ifstream in(root + "/" + name + ".log");
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      n += static_cast<int>(std::count(std::istream_iterator<std::string>(words), {}, what));
    }
    return n;
  }
  journal::Source record(wire::Outcome outcome, const std::string& boot = boot_of_host()) const {
    journal::Source r;
    r.set_outcome(outcome);
    r.set_container("web");
    r.set_bundle(root + "/bundle");
    r.set_destination("dst");
    r.set_boot(boot);
    return r;
  }
  static void add_process(journal::Source& r, std::uint8_t instance, pid_t pid) {
    const Instance i{instance};
    auto* p = r.add_processes();
    p->set_instance(i.data(), i.size());
    p->set_pid(pid);
  }
  std::string file(std::uint32_t id) const { return root + "/state/journal/source/" + migration_text(id) + ".json"; }
  /// As a migrd does that finds this after its start.
  void begin(const journal::Source& r, std::uint32_t id = kId) {
    ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(id, r));
    host.set_settled([this](const wire::Summary& s, bool ended) {
      EXPECT_FALSE(ended) << "nobody knows how it ended, as its migrd did, too";
      end.set_value(s);
    });
    host.recover();
    host.settle_recovered();
  }
  wire::Summary settled() {
    auto s = end.get_future();
    if (s.wait_for(std::chrono::seconds(20)) == std::future_status::ready) return s.get();
    ADD_FAILURE() << "not settled";
    std::fflush(nullptr);
    _exit(1);  // its thread goes on with what is here
  }
  wire::Summary settle(const journal::Source& r) {
    begin(r);
    return settled();
  }

  const TempFolder temp;
  const std::string root = temp.path;
  Played destination;
  const Config config = config_in_root();
  SessionTable sessions;
  Claims claims;
  Numbers numbers{config};
  Directory directory{config};
  std::promise<wire::Summary> end;
  std::atomic<int> links = 0;  // to the destination
  const SourceHost::ToDestination to_destination = [this](const std::string&) -> Result<std::unique_ptr<DestinationLink>> {
    links++;
    return std::unique_ptr<DestinationLink>(new FakeDestination(destination));
  };
  const SourceHost::ToPartner to_partner = [](const std::string& name) { return Error{ENOENT, name}; };
  SourceHost host{config, sessions, claims, numbers, directory, to_destination, to_partner};
};

TEST_F(ASource, RemovesWhatWasCommitted) {
  EXPECT_TRUE(settle(record(wire::COMMITTED)).migrated());
  EXPECT_FALSE(there());
  EXPECT_EQ(did("net", "cleanup"), 1);
  EXPECT_EQ(did("runc", "resume"), 0);
}

TEST_F(ASource, TakesBackWhatWasNot) {
  EXPECT_FALSE(settle(record(wire::OPEN)).migrated());
  EXPECT_TRUE(there());
  EXPECT_EQ(did("runc", "resume"), 1);
  EXPECT_EQ(did("net", "attach"), 1);
}

// It may wait for minutes before anything is written down, or pause between two tries.
TEST_F(ASource, WhatHasOnlyBegunIsOpen) {
  auto course = host.begin("web", "dst", kId);
  ASSERT_TRUE(course) << course.error().text;
  const auto open = [&] { return host.open_migrations().size() == 1 ? host.open_migrations()[0] : wire::OpenMigration(); };
  EXPECT_EQ(open().id(), kId);
  EXPECT_EQ(open().role(), "source");
  EXPECT_EQ(open().container(), "web");
  EXPECT_EQ(open().destination(), "dst");
  EXPECT_EQ(open().state(), "is being migrated to dst");
  EXPECT_NEAR(static_cast<double>(open().begun_s()), static_cast<double>(unix_now()), 10);
  (*course)->is_at("pre-copy", 12'000'000, 400'000'000);
  EXPECT_EQ(open().state(), "is being migrated to dst: pre-copy, 12.0 of 400 MB");
  EXPECT_EQ(open().phase(), "pre-copy");
  EXPECT_EQ(open().bytes(), 12'000'000u);
  EXPECT_EQ(open().of_bytes(), 400'000'000u);
  (*course)->begin(kId + 1);
  EXPECT_EQ(open().id(), kId + 1) << "another try";
  EXPECT_EQ(open().state(), "is being migrated to dst");
  course = Error{};
  EXPECT_TRUE(host.open_migrations().empty());
}

TEST_F(ASource, TheSecondOfTwoIsToldOfTheFirst) {
  script("runc", "echo '{\"status\": \"running\", \"pid\": 1, \"bundle\": \"" + root + "/bundle\"}'\n");
  const auto first = host.begin("web", "dst", kId);
  const auto stored = host.begin("db", "/srv/db", kId + 1), restored = host.begin("/srv/kv", "src", kId + 2);
  ASSERT_TRUE(first && stored && restored);
  const auto second = [&](const std::string& container) -> std::string {
    const auto c = host.begin(container, "other", kId + 3);
    return c ? "" : c.error().text;
  };
  EXPECT_EQ(second("web"), "'web' is being migrated to dst already, migration 00001234");
  EXPECT_EQ(second("db"), "'db' is being stored in /srv/db already, migration 00001235");
  EXPECT_EQ(second("/srv/kv"), "'/srv/kv' is being restored already, migration 00001236");
  EXPECT_EQ(second("third"), "");
  const auto looked = SourceRun(host, kId + 3, SourceRun::Describe::kLook).inspect("web");
  ASSERT_FALSE(looked);
  EXPECT_EQ(looked.error().text, second("web"));
  const auto its = SourceRun(host, kId, SourceRun::Describe::kMove).inspect("web");
  EXPECT_TRUE(its || its.error().text.find("already") == std::string::npos) << its.error().text;
}

TEST_F(ASource, IsCancelledByItsNameOrItsNumber) {
  const auto web = host.begin("web", "dst", kId), hex = host.begin("1235", "dst", kId + 7), other = host.begin("other", "dst", kId + 1);
  ASSERT_TRUE(web && hex && other);
  const auto told = host.cancel(0, "web");
  ASSERT_TRUE(told) << told.error().text;
  EXPECT_EQ(told->id(), kId);
  EXPECT_EQ(told->state(), "is being migrated to dst; it goes back: cancelled by the operator");
  EXPECT_FALSE((*web)->goes_on());
  EXPECT_EQ(host.cancel(kId, "00001234")->container(), "web") << "once more";
  EXPECT_EQ(host.cancel(kId + 1, "1235")->container(), "1235") << "a name goes before a number";
  EXPECT_TRUE((*other)->goes_on());
  EXPECT_EQ(host.cancel(kId + 1, "00001235")->container(), "other");
  EXPECT_EQ(host.cancel(kId + 2, "third").error().code, ENOENT);
}

TEST_F(ASource, WhatIsCommittedIsNotCancelled) {
  auto course = host.begin("web", "dst", kId);
  ASSERT_TRUE(course && (*course)->decide());
  EXPECT_EQ(host.cancel(0, "web").error().code, EBUSY);
  EXPECT_EQ(host.cancel(0, "web").error().text, "migration 00001234 is committed already: it runs on dst, or will; see: migrctl recover");
  course = Error{};
  destination.told_to_commit = [&] {  // found by a migrd that was started again
    EXPECT_EQ(host.cancel(0, "web").error().text, "migration 00001234 is committed already: it runs on dst, or will; see: migrctl recover");
    EXPECT_EQ(host.cancel(kId, "00001234").error().code, EBUSY);
    EXPECT_TRUE(host.order(kId, wire::UNDONE, true));
  };
  settle(record(wire::COMMITTED));
}

/// `migrctl cancel` waits in it.
struct Waiting {
  explicit Waiting(SourceHost& h) : host(h) {}
  grpc::Status cancel(const std::string& container, std::uint32_t wait_ms) {
    wire::CancelRequest r;
    r.set_container(container);
    r.set_wait_ms(wait_ms);
    grpc::ServerContext ctx;
    return service.Cancel(&ctx, &r, &reply);
  }
  SourceHost& host;
  Config config;
  Peers peers{config, pki::Files{}};
  SessionTable sessions;
  LinkTable table{"src"};
  PeerDirectory links{peers, table};
  PortWatch ports{"/nowhere", [] { return std::vector<RdmaPort>(); }, {}};
  History history{"/nowhere"};
  ControlService service{peers, sessions, {}, {&host}, {table, links, ports}, history};
  wire::CancelReply reply;
};

TEST_F(ASource, WhoCancelsWaitsForItsEnd) {
  Waiting w(host);
  EXPECT_EQ(w.cancel("web", 0).error_code(), grpc::StatusCode::NOT_FOUND);
  auto course = host.begin("web", "dst", kId);
  ASSERT_TRUE(course);
  const auto s = w.cancel("web", 50);
  EXPECT_TRUE(s.ok()) << s.error_message();
  EXPECT_FALSE(w.reply.ended());
  EXPECT_EQ(w.reply.migration().state(), "is being migrated to dst; it goes back: cancelled by the operator");
  (*course)->is_at("rollback", 0, 0);
  std::thread coordinator([&] {
    usleep(300'000);
    course = Error{};
  });
  const auto began = std::chrono::steady_clock::now();
  EXPECT_TRUE(w.cancel("web", 20'000).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  coordinator.join();
  EXPECT_TRUE(w.reply.ended());
  EXPECT_EQ(w.reply.migration().phase(), "rollback") << "as it was last";
  const auto late = host.begin("web", "dst", kId + 1);
  ASSERT_TRUE(late && (*late)->decide());
  EXPECT_EQ(w.cancel("web", 0).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ASource, WhatIsNotOpenIsNotFoundByItsNumber) {
  Waiting w(host);
  const auto recover = [&](std::uint32_t id) {
    wire::RecoverRequest r;
    wire::RecoverReply out;
    r.set_id(id);
    grpc::ServerContext ctx;
    const auto s = w.service.Recover(&ctx, &r, &out);
    return std::pair(s.error_code(), out.open_size());
  };
  EXPECT_EQ(recover(0), std::pair(grpc::StatusCode::OK, 0));
  EXPECT_EQ(recover(kId), std::pair(grpc::StatusCode::NOT_FOUND, 0));
  const auto course = host.begin("web", "dst", kId);
  EXPECT_EQ(recover(kId), std::pair(grpc::StatusCode::OK, 1));
  EXPECT_EQ(recover(kId + 1), std::pair(grpc::StatusCode::NOT_FOUND, 0));
}

// A partner may be on this host, and cannot be reached before.
TEST_F(ASource, KnowsWhatIsOpenBeforeItBeginsToSettle) {
  ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(kId, [this] {
    auto r = record(wire::OPEN);
    add_process(r, 7, 1);
    return r;
  }()));
  host.set_settled([this](const wire::Summary& s, bool) { end.set_value(s); });
  host.recover();
  EXPECT_EQ(host.open_migrations().size(), 1u);
  EXPECT_TRUE(host.claims(Instance{7})) << "it would be let go when it connects";
  usleep(200'000);
  EXPECT_EQ(did("runc", "resume"), 0);
  const int limit = std::exchange(kReconnectMs, 100);
  host.settle_recovered();
  EXPECT_FALSE(settled().migrated());
  kReconnectMs = limit;
}

TEST_F(ASource, DoesNotWaitForProcessesThatHaveEnded) {
  const int limit = std::exchange(kReconnectMs, 60'000);
  const pid_t ended = fork();
  if (!ended) _exit(0);
  waitpid(ended, nullptr, 0);
  auto r = record(wire::OPEN);
  add_process(r, 7, ended);
  EXPECT_FALSE(settle(r).migrated());
  kReconnectMs = limit;
  EXPECT_EQ(did("runc", "resume"), 1);
}

TEST_F(ASource, WaitsForAllProcessesAtTheSameTime) {
  constexpr int kProcesses = 8, kWaitMs = 500;
  const int limit = std::exchange(kReconnectMs, kWaitMs);
  auto r = record(wire::OPEN);
  for (std::uint8_t i = 1; i <= kProcesses; i++) add_process(r, i, getpid());
  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE(settle(r).migrated());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(kProcesses * kWaitMs / 2));
  kReconnectMs = limit;
}

/// A library of this process, which answers whatever it is asked.
class Library {
 public:
  Library(const std::string& path, const Instance& i, std::uint16_t version = MIGR_PROC_VERSION) : fd_(connect_library(path, i, MIGR_PROC_FROZEN, version)) {
    EXPECT_GE(fd_.n, 0);
    answers_ = std::thread([this] {
      for (migr_msg q{}; recv(fd_.n, &q, sizeof q, 0) > 0;) {
        told[q.type]++;
        q.type |= MIGR_REPLY;
        send(fd_.n, &q, sizeof q, MSG_NOSIGNAL);
      }
    });
  }
  ~Library() {
    shutdown(fd_.n, SHUT_RDWR);
    answers_.join();
  }
  std::array<std::atomic<int>, 256> told{};  // by type

 private:
  const Fd fd_;
  std::thread answers_;
};

// It only looks whether its gate is open.
TEST_F(ASource, WhoIsLateFindsItsGateOpen) {
  const int limit = std::exchange(kReconnectMs, 200);
  const pid_t ended = fork();
  if (!ended) _exit(0);
  waitpid(ended, nullptr, 0);
  const auto gate = [&](const Instance& i) { return fs::exists(config.run_dir + "/" MIGR_PROC_GATE_PREFIX + hex(i)); };
  ASSERT_TRUE(sessions.start(root + "/proc.sock", {}));
  std::ofstream(root + "/containers/web/state.json") << R"({"init_process_pid": )" << getpid() << "}";
  std::optional<Library> back(std::in_place, root + "/proc.sock", Instance{5});
  ASSERT_TRUE(sessions.wait_for(Instance{5}, {}, 5'000));
  auto r = record(wire::OPEN);
  add_process(r, 5, getpid());
  add_process(r, 6, ended);
  add_process(r, 7, getpid());
  EXPECT_FALSE(settle(r).migrated());
  kReconnectMs = limit;
  EXPECT_EQ(back->told[MIGR_MSG_ROLLBACK], 1);
  EXPECT_FALSE(gate(Instance{5})) << "it is back";
  EXPECT_FALSE(gate(Instance{6})) << "it has ended";
  EXPECT_TRUE(gate(Instance{7}));
  back.reset();
  const Library late(root + "/proc.sock", Instance{7});
  const auto session = sessions.wait_for(Instance{7}, {}, 5'000);
  ASSERT_TRUE(session) << session.error().text;
  let_go(**session, config.run_dir);
  EXPECT_EQ(late.told[MIGR_MSG_ROLLBACK], 1);
  EXPECT_FALSE(gate(Instance{7}));
  sessions.stop();
}

// As after an upgrade in the middle of a migration: it is not taken back as long as it stands still.
TEST_F(ASource, WhoIsRefusedKeepsItOpen) {
  const int limit = std::exchange(kReconnectMs, 200);
  ASSERT_TRUE(sessions.start(root + "/proc.sock", {}));
  std::ofstream(root + "/containers/web/state.json") << R"({"init_process_pid": )" << getpid() << "}";
  const Library other(root + "/proc.sock", Instance{7}, MIGR_PROC_VERSION + 1);
  EXPECT_TRUE(within(5'000, [&] { return !sessions.refusal(getpid()).empty(); }));
  auto r = record(wire::OPEN);
  add_process(r, 7, getpid());
  begin(r);
  const auto state = [&] { return host.open_migrations().empty() ? "" : host.open_migrations()[0].state(); };
  EXPECT_TRUE(within(5'000, [&] { return state().find("refused") != std::string::npos; }));
  EXPECT_EQ(state(), "goes back: the libmigr of process " + std::to_string(getpid()) + " is not connected to migrd, which has refused it: " + sessions.refusal(getpid()));
  {
    const Library same(root + "/proc.sock", Instance{7});
    EXPECT_FALSE(settled().migrated());
    EXPECT_EQ(same.told[MIGR_MSG_ROLLBACK], 1);
  }
  kReconnectMs = limit;
  EXPECT_FALSE(fs::exists(config.run_dir + "/" MIGR_PROC_GATE_PREFIX + hex(Instance{7})));
  sessions.stop();
}

// It is not seen to be the container's, as if it had connected when nobody waited any more: until the end it is held, and nobody lets go of it.
TEST_F(ASource, WhoIsLateAndWasHeldIsLetGoInTheEnd) {
  const int limit = std::exchange(kReconnectMs, 100);
  ASSERT_TRUE(sessions.start(root + "/proc.sock", {}));
  {
    const Library late(root + "/proc.sock", Instance{7});
    ASSERT_TRUE(sessions.wait_for(Instance{7}, {}, 5'000));
    auto r = record(wire::OPEN);
    add_process(r, 7, getpid());
    EXPECT_FALSE(settle(r).migrated());
    EXPECT_EQ(late.told[MIGR_MSG_ROLLBACK], 1);
  }
  kReconnectMs = limit;
  EXPECT_FALSE(fs::exists(config.run_dir + "/" MIGR_PROC_GATE_PREFIX + hex(Instance{7})));
  sessions.stop();
}

TEST_F(ASource, RefusesAnAddressThatNothingCouldMove) {
  script("runc", "echo '{\"status\": \"running\", \"pid\": 1, \"bundle\": \"" + root + "/bundle\"}'\n");
  std::ofstream(root + "/text") << "no program";
  const auto with = [&](const std::string& hook) -> std::string {
    Config c = config;
    c.net_hook = hook;
    SourceHost other{c, sessions, claims, numbers, directory, nullptr, nullptr};
    const auto info = SourceRun(other, kId, SourceRun::Describe::kLook).inspect("web");
    return info ? "" : info.error().text;
  };
  const std::string what = "an address of a container's own cannot be moved: ", advice = "; set net_hook in migrd.json of src";
  EXPECT_EQ(with(""), what + "there is no net_hook" + advice);
  for (const std::string& bad : {root + "/none", root + "/text", root + "/bundle", std::string("no-such-program")})
    EXPECT_EQ(with(bad), what + "the net_hook " + bad + " is no program" + advice);
  for (const std::string& good : {root + "/net", std::string("true")}) EXPECT_EQ(with(good).find("net_hook"), std::string::npos) << with(good);
  std::ofstream(root + "/bundle/config.json") << "{}";
  EXPECT_EQ(with("").find("net_hook"), std::string::npos) << with("");
}

TEST_F(ASource, SaysOfItsBundleWhoMayPassIt) {
  script("runc", "echo '{\"status\": \"running\", \"pid\": 1, \"bundle\": \"" + root + "/bundle\"}'\n");
  ASSERT_EQ(chmod((root + "/bundle").c_str(), 0751), 0);
  SourceRun run(host, kId, SourceRun::Describe::kLook);
  (void)run.inspect("web");  // what it has of RDMA would have to be played
  ASSERT_TRUE(run.info().bundle_mode);
  EXPECT_EQ(run.info().bundle_mode->mode(), S_IFDIR | 0751u);
  EXPECT_EQ(run.info().bundle_mode->uid(), geteuid());
}

// After an upgrade of its package: CRIU would say so in the stop.
TEST_F(ASource, RefusesALibraryThatWasReplaced) {
  Config c = config;
  c.libmigr = root + "/libmigr.so";
  fs::copy_file("/bin/true", c.libmigr);
  const Fd library(open(c.libmigr.c_str(), O_RDONLY | O_CLOEXEC));
  void* const at = mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, library.n, 0);
  ASSERT_NE(at, MAP_FAILED);
  const pid_t pid = fork();
  if (!pid) {
    setsid(), close_range(0, ~0u, 0);
    for (;;) pause();
  }
  munmap(at, 4096);
  SourceHost other{c, sessions, claims, numbers, directory, nullptr, nullptr};
  {
    SourceRun run(other, kId, SourceRun::Describe::kLook);
    const auto info = run.inspect(bare_name(pid));
    EXPECT_TRUE(info || info.error().text.find("replaced") == std::string::npos) << info.error().text;
    EXPECT_EQ(run.info().libmigr, build_id_of(c.libmigr));
  }
  fs::remove(c.libmigr);
  const auto info = SourceRun(other, kId, SourceRun::Describe::kLook).inspect(bare_name(pid));
  kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, EOPNOTSUPP);
  EXPECT_NE(info.error().text.find("has a libmigr.so that was replaced on this host since: start it again"), std::string::npos) << info.error().text;
}

// It was dumped then, and ended, and runc would not restore it.
TEST_F(ASource, RefusesATerminal) {
  const auto with = [&](const std::string& process) -> Error {
    std::ofstream(root + "/bundle/config.json") << "{\"process\": " << process << "}";
    const Status s = Runtime(config).may_leave({.id = "web", .status = "running", .bundle = root + "/bundle", .pid = 1});
    return s ? Error{} : s.error();
  };
  const std::string what = "'web' has a terminal, which runc does not restore; start it without one (process.terminal of " + root + "/bundle/config.json)";
  EXPECT_EQ(with(R"({"terminal": true})").code, EOPNOTSUPP);
  EXPECT_EQ(with(R"({"terminal": true})").text, what);
  for (const char* without : {R"({"terminal": false})", "{}", "[]", "7"}) EXPECT_NE(with(without).text, what) << without;
}

// It has opened an RDMA device, and closed it again: CRIU would dump its connection to here.
TEST_F(ASource, GoesBackIfAProcessHasConnectedSinceItWasLookedAt) {
  if (KernelRecord::open()) GTEST_SKIP() << "its record would have to be played";
  ASSERT_TRUE(sessions.start(root + "/proc.sock", {}));
  SourceRun run(host, kId, SourceRun::Describe::kLook);
  EXPECT_FALSE(run.inspect(bare_name(getpid())));
  EXPECT_NE(run.freeze(nullptr).error().code, EAGAIN);
  const Fd library = connect_library(root + "/proc.sock");
  ASSERT_GE(library.n, 0);
  EXPECT_TRUE(within(10'000, [&] { return bool(sessions.by_pid(getpid())); }));
  const auto s = run.freeze(nullptr);
  EXPECT_EQ(s.error().code, EAGAIN) << s.error().text;
  sessions.stop();
}

// It has begun since it was looked at: a disk may write to a page after a round has taken its mark away.
TEST_F(ASource, BuildsOnNoRoundOnceAProcessHasAsynchronousIo) {
  SourceRun run(host, kId, SourceRun::Describe::kLook);
  (void)run.inspect(bare_name(getpid()));
  EXPECT_EQ(run.info().written_unseen.find("io_setup"), std::string::npos);
  unsigned long context = 0;
  if (syscall(SYS_io_setup, 8, &context)) GTEST_SKIP() << "io_setup: " << strerror(errno);
  const auto round = run.pre_dump(1);
  const auto after = run.checkpoint_after(1);
  syscall(SYS_io_destroy, context);
  EXPECT_EQ(round.error().code, ESTALE) << round.error().text;
  EXPECT_EQ(after.error().code, ESTALE);
  EXPECT_NE(after.error().text.find("asynchronous I/O"), std::string::npos) << after.error().text;
}

TEST_F(ASource, AtTheEndOfMigrdWhatIsUnderWayGoesBackAndNothingBegins) {
  auto one = *host.begin("web", "dst", kId), committed = *host.begin("db", "dst", kId + 1);
  EXPECT_TRUE(committed->decide());
  EXPECT_FALSE(host.is_idle());
  host.give_up();
  EXPECT_EQ(one->goes_on().error().code, ECANCELED);
  EXPECT_EQ(one->goes_on().error().text, "migrd ends");
  EXPECT_TRUE(committed->goes_on());
  const auto another = host.begin("cache", "dst", kId + 2);
  ASSERT_FALSE(another);
  EXPECT_EQ(another.error().text, "migrd ends");
  one.reset();
  EXPECT_FALSE(host.is_idle()) << "the other is finished first";
  committed.reset();
  EXPECT_TRUE(host.is_idle());
}

TEST_F(ASource, WaitsUntilTheNetworkIsOpenThatCameWithIt) {
  host.set_opens([](const std::string& container) { return container == "web"; });
  const auto info = SourceRun(host, kId, SourceRun::Describe::kMove).inspect("web");
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, EINPROGRESS) << info.error().text;
  EXPECT_EQ(info.error().text.find("being migrated already"), std::string::npos);
}

/// What runc is, with CRIU below it, when migrd ends in the middle of a dump. `does` in the child; the parent notes its end.
pid_t start_dump(const std::string& root, const std::string& does) {
  const std::string images = root + "/state/source/" + migration_text(kId) + "/images", script = "sh -c '" + does + "'; echo ended >>" + root + "/runc.log; true";
  const pid_t pid = fork();
  if (!pid) {
    execl("/bin/sh", "sh", "-c", script.c_str(), "runc", "checkpoint-rdma", "--image-path", images.c_str(), nullptr);
    _exit(1);
  }
  return pid;
}

// Else its threads would see a network without routes.
TEST_F(ASource, HasItsNetworkBackBeforeItIsResumed) {
  script("net", "[ \"$1\" != attach ] || ! grep -qs resume " + root + "/runc.log || touch " + root + "/late\n");
  EXPECT_FALSE(settle(record(wire::OPEN)).migrated());
  EXPECT_EQ(did("runc", "resume"), 1);
  EXPECT_EQ(did("net", "attach"), 1);
  EXPECT_FALSE(fs::exists(root + "/late"));
}

TEST_F(ASource, IsNotResumedBeforeADumpOfItHasEnded) {
  const pid_t dump = start_dump(root, "sleep 1");
  std::thread reaper([&] { waitpid(dump, nullptr, 0); });
  EXPECT_FALSE(settle(record(wire::OPEN)).migrated());
  reaper.join();
  std::ifstream in(root + "/runc.log");
  std::string first;
  std::getline(in, first);
  EXPECT_EQ(first, "ended");
  EXPECT_EQ(did("runc", "resume"), 1);
}

// Its runc was killed. It is told nothing but how it is spoken to, and works in the folder of the dump.
TEST_F(ASource, IsNotResumedBeforeACriuOfItHasEnded) {
  const std::string work = root + "/state/source/" + migration_text(kId) + "/work", script = "sleep 1; echo ended >>" + root + "/runc.log";
  std::filesystem::create_directories(work);
  const pid_t criu = fork();
  if (!criu) {
    if (!chdir(work.c_str())) execl("/bin/sh", "sh", "-c", script.c_str(), "criu", "swrk", "3", nullptr);
    _exit(1);
  }
  std::thread reaper([&] { waitpid(criu, nullptr, 0); });
  for (int i = 0; i < 500 && processes_told({"swrk"}, root).empty(); i++) usleep(10'000);
  EXPECT_FALSE(settle(record(wire::OPEN)).migrated());
  reaper.join();
  EXPECT_EQ(first_line_of(root + "/runc.log"), "ended");
  EXPECT_EQ(did("runc", "resume"), 1);
}

TEST_F(ASource, EndsADumpThatDoesNotEnd) {
  const int limit = std::exchange(kCheckpointMs, 300);
  const pid_t dump = start_dump(root, "sleep 60");
  std::thread reaper([&] { waitpid(dump, nullptr, 0); });
  EXPECT_FALSE(settle(record(wire::OPEN)).migrated());
  reaper.join();
  kCheckpointMs = limit;
  EXPECT_EQ(did("runc", "ended"), 1) << "runc was to end by itself, after its CRIU";
  EXPECT_EQ(did("runc", "resume"), 1);
}

TEST_F(ASource, WhoReadsTheLogOfADumpIsNone) {
  const int limit = std::exchange(kCheckpointMs, 300);
  const std::string log = root + "/state/source/" + migration_text(kId) + "/work/dump.log";
  const pid_t reader = fork();
  if (!reader) {
    execlp("sh", "sh", "-c", "sleep 30; true", log.c_str(), nullptr);
    _exit(1);
  }
  EXPECT_FALSE(settle(record(wire::OPEN)).migrated());
  kCheckpointMs = limit;
  EXPECT_EQ(did("runc", "resume"), 1);
  int status = 0;
  EXPECT_EQ(waitpid(reader, &status, WNOHANG), 0) << "it was ended";
  kill(reader, SIGKILL);
  waitpid(reader, &status, 0);
}

TEST_F(ASource, SinceABootWhatHasTheNameIsAnotherAndIsNotRemoved) {
  EXPECT_TRUE(settle(record(wire::COMMITTED, "another boot")).migrated());
  EXPECT_TRUE(there());
  EXPECT_EQ(did("runc", "delete"), 0);
  EXPECT_EQ(did("net", "cleanup"), 0) << "the network is that one's";
}

TEST_F(ASource, SinceABootTheNetworkOfWhatWentIsTidiedUpIfNobodyHasTheName) {
  fs::remove_all(root + "/containers/web");
  EXPECT_TRUE(settle(record(wire::COMMITTED, "another boot")).migrated());
  EXPECT_EQ(did("net", "cleanup"), 1);
}

TEST_F(ASource, SinceABootWhatHasTheNameIsAnotherAndIsNotTakenBack) {
  EXPECT_FALSE(settle(record(wire::OPEN, "another boot")).migrated());
  EXPECT_EQ(did("runc", "resume"), 0);
  EXPECT_EQ(did("net", "attach"), 0);
}

TEST_F(ASource, IsRemovedIfItIsStillTheOneThatWent) {
  start_container(7);
  auto r = record(wire::COMMITTED);
  r.set_began(Runtime(config).life("web"));
  EXPECT_EQ(r.began(), boot_of_host() + " 7");
  EXPECT_TRUE(settle(r).migrated());
  EXPECT_FALSE(there());
  EXPECT_EQ(did("net", "cleanup"), 1);
}

TEST_F(ASource, WhatWasStartedAnewUnderItsNameIsNotRemoved) {
  start_container(7);
  auto r = record(wire::COMMITTED);
  r.set_began(boot_of_host() + " 6");
  EXPECT_TRUE(settle(r).migrated());
  EXPECT_TRUE(there());
  EXPECT_EQ(did("runc", "delete"), 0);
  EXPECT_EQ(did("net", "cleanup"), 0) << "the network is that one's";
}

TEST_F(ASource, WhatWasStartedAnewUnderItsNameIsNotTakenBack) {
  start_container(7);
  auto r = record(wire::OPEN);
  r.set_began(boot_of_host() + " 6");
  EXPECT_FALSE(settle(r).migrated());
  EXPECT_EQ(did("runc", "resume"), 0);
  EXPECT_EQ(did("net", "attach"), 0);
}

TEST_F(ASource, OfAnOlderMigrdTheBootIsNotKnown) {
  settle(record(wire::COMMITTED, ""));
  EXPECT_FALSE(there());
}

// The bundle may be gone, and then that fails for ever.
TEST_F(ASource, WhatComesBackIsNotRemovedByARepeat) {
  std::ofstream(root + "/net-fails") << "";
  begin(record(wire::COMMITTED));
  for (int i = 0; i < 200 && !did("net", "cleanup"); i++) usleep(50'000);
  EXPECT_FALSE(there());
  start_container();
  fs::remove(root + "/net-fails");
  EXPECT_TRUE(settled().migrated());
  EXPECT_TRUE(there());
  EXPECT_EQ(did("runc", "delete"), 1);
}

TEST_F(ASource, WhatComesBackIsNotRemovedByAMigrdThatIsStartedAgain) {
  auto r = record(wire::COMMITTED);
  r.set_removed(true);
  EXPECT_TRUE(settle(r).migrated());
  EXPECT_TRUE(there());
  EXPECT_EQ(did("net", "cleanup"), 0);
}

// ---- an operator's order

struct Ordered {
  const char* name;
  wire::Outcome order;
  std::optional<wire::Outcome> says;  // the destination, when it answers
  bool migrated;
};

class AnOrder : public ASource, public ::testing::WithParamInterface<Ordered> {};

TEST_P(AnOrder, IsCarriedOutIfTheDestinationDoesNotSayOtherwise) {
  const auto& c = GetParam();
  destination.says = c.says;
  destination.told_to_commit = [&] {
    EXPECT_FALSE(host.order(kId, c.order, false)) << "not without --force";
    EXPECT_TRUE(host.order(kId, c.order, true));
    const auto open = host.open_migrations();
    ASSERT_EQ(open.size(), 1u);
    EXPECT_NE(open[0].state().find(c.order == wire::COMMITTED ? "ordered: --commit --force" : "ordered: --rollback --force"), std::string::npos) << open[0].state();
  };
  EXPECT_EQ(settle(record(wire::COMMITTED)).migrated(), c.migrated);
  EXPECT_EQ(there(), !c.migrated);
  EXPECT_EQ(did("runc", "resume"), c.migrated ? 0 : 1);
  EXPECT_EQ(did("runc", "delete"), c.migrated ? 1 : 0);
  EXPECT_EQ(host.outcome(kId).outcome(), c.migrated ? wire::COMMITTED : wire::UNDONE);
}

INSTANTIATE_TEST_SUITE_P(
    SourceHost, AnOrder,
    ::testing::Values(Ordered{"rollback_of_what_runs_there", wire::UNDONE, wire::COMMITTED, true}, Ordered{"commit_of_what_was_undone_there", wire::COMMITTED, wire::UNDONE, false},
                      Ordered{"rollback_and_silence", wire::UNDONE, {}, false}, Ordered{"commit_and_silence", wire::COMMITTED, {}, true},
                      Ordered{"rollback_of_what_is_open_there", wire::UNDONE, wire::OPEN, false}, Ordered{"commit_of_what_is_forgotten_there", wire::COMMITTED, wire::UNKNOWN, true},
                      Ordered{"rollback_of_what_was_undone_there", wire::UNDONE, wire::UNDONE, false},
                      Ordered{"commit_of_what_is_open_there", wire::COMMITTED, wire::OPEN, false}),
    [](const auto& info) { return std::string(info.param.name); });

// The destination was silent when it was ordered, and answers when it is to be taken back.
TEST_F(ASource, WhatRunsThereIsNotLetRunHereByAnOrderOfBefore) {
  script("runc", "[ \"$3\" != delete ] || rm -rf \"$2/$5\"\n[ \"$3\" != state ] || echo '{\"status\": \"paused\", \"pid\": 1}'\n");
  destination.says = wire::COMMITTED;
  destination.asked = 1;
  EXPECT_TRUE(settle(record(wire::UNDONE)).migrated());
  EXPECT_EQ(did("runc", "resume"), 0);
  EXPECT_FALSE(there());
}

TEST_F(ASource, AnOrderAgainstWhatIsKnownIsRefused) {
  script("runc", "[ \"$3\" != delete ] || [ -e " + root + "/may-go ] || exit 1\n[ \"$3\" != delete ] || rm -rf \"$2/$5\"\n[ \"$3\" != state ] || echo '{\"status\": \"paused\", \"pid\": 1}'\n");
  destination.says = wire::COMMITTED;
  begin(record(wire::COMMITTED));
  const auto state = [&] { return host.open_migrations().empty() ? "" : host.open_migrations()[0].state(); };
  ASSERT_TRUE(within(10'000, [&] { return state().starts_with("runs on dst"); })) << state();
  const auto s = host.order(kId, wire::UNDONE, true);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EPERM) << s.error().text;
  EXPECT_TRUE(host.order(kId, wire::COMMITTED, true)) << "it is done anyhow";
  EXPECT_EQ(state().find("the operator has ordered"), std::string::npos) << state();
  std::ofstream(root + "/may-go") << "";
  EXPECT_TRUE(settled().migrated());
}

// ---- a destination that does not know of it any more

// However new it is: the clock there may have gone ahead by a week.
TEST_F(ASource, WhatTheDestinationDoesNotKnowAnyMoreIsForTheOperatorToDecide) {
  auto r = record(wire::COMMITTED);
  r.set_begun_s(unix_now());
  destination.says = wire::UNKNOWN;
  destination.told_to_commit = [] {};
  begin(r);
  for (int i = 0; i < 200 && destination.asked < 4; i++) usleep(50'000);
  EXPECT_EQ(host.outcome(kId).outcome(), wire::COMMITTED);
  EXPECT_EQ(did("runc", "resume"), 0);
  ASSERT_EQ(host.open_migrations().size(), 1u);
  EXPECT_NE(host.open_migrations()[0].state().find("does not say any more what became of that"), std::string::npos) << host.open_migrations()[0].state();
  EXPECT_TRUE(host.order(kId, wire::COMMITTED, true));
  EXPECT_TRUE(settled().migrated());
  EXPECT_FALSE(there());
}

// Its certificate may have been replaced since.
TEST_F(ASource, ReachesADestinationThatIsSilentByANewLinkEachTime) {
  auto r = record(wire::COMMITTED);
  r.set_begun_s(unix_now());
  destination.told_to_commit = [] {};
  begin(r);
  EXPECT_TRUE(within(10'000, [&] { return destination.asked >= 4; }));
  EXPECT_GE(links, 4);
  EXPECT_TRUE(host.order(kId, wire::UNDONE, true));
  settled();
}

TEST_F(ASource, EndsWithAllThatItHasBegun) {
  auto r = record(wire::COMMITTED);
  r.set_begun_s(unix_now());
  ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(kId, r));
  destination.told_to_commit = [] {};
  std::optional<SourceHost> other(std::in_place, config, sessions, claims, numbers, directory, to_destination, to_partner);
  other->recover();
  other->settle_recovered();
  EXPECT_TRUE(within(10'000, [&] { return links >= 2; }));
  const auto began = std::chrono::steady_clock::now();
  other.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(2));
  const int before = links;
  usleep(5 * static_cast<useconds_t>(kResolveStepMs) * 1000);
  EXPECT_EQ(links, before) << "it goes on with what is not there any more";
}

// ---- how long it is kept

// The next migrd would act on what it finds.
TEST_F(ASource, WhatIsSettledIsWrittenDownWhenThereIsRoomAgain) {
  const auto written = [&] { return Journal<journal::Source>(config.state_dir + "/journal/source").load(kKeepOutcome, [](const auto&) { return false; }).at(kId); };
  auto r = record(wire::UNDONE);
  ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(kId, r));
  fs::create_directories(file(kId) + ".new");
  host.set_settled([this](const wire::Summary& s, bool) { end.set_value(s); });
  host.recover();
  host.settle_recovered();
  settled();
  host.tick();
  EXPECT_FALSE(written().settled()) << "where nothing can be written";
  fs::remove(file(kId) + ".new");
  host.tick();
  EXPECT_TRUE(written().settled());
}

// That the first went back could not be written down.
TEST_F(ASource, OfTwoOfOneContainerOnlyTheLaterIsCarriedOut) {
  auto first = record(wire::OPEN), later = record(wire::COMMITTED);
  first.set_begun_s(100);
  later.set_begun_s(200);
  ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(1, first));
  EXPECT_TRUE(settle(later).migrated());
  EXPECT_EQ(did("runc", "resume"), 0) << "it runs at the destination";
  EXPECT_FALSE(there());
  EXPECT_EQ(host.outcome(1).outcome(), wire::UNDONE);
  EXPECT_TRUE(host.open_migrations().empty());
}

// By a clock that was set back the later one would be taken for the one that is over.
TEST_F(ASource, BeginsLaterThanAllBeforeIt) {
  const auto now = unix_now();
  auto r = record(wire::COMMITTED);
  r.set_begun_s(now + 3600);
  settle(r);
  EXPECT_EQ(host.begins_s("web"), now + 3601);
  const auto of_another = host.begins_s("db");
  EXPECT_TRUE(of_another >= now && of_another < now + 3600) << of_another;
}

// Of a checkpoint that was restored meanwhile this host says who coordinated it, not that what stands still here has gone back.
TEST_F(ASource, ARestoreOfACheckpointTakesNoMigrationsPlace) {
  auto restored = record(wire::COMMITTED), r = record(wire::OPEN);
  restored.clear_destination();
  restored.set_settled(true);
  restored.set_begun_s(200);
  r.set_begun_s(100);
  ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(1, restored));
  EXPECT_FALSE(settle(r).migrated());
  EXPECT_EQ(did("runc", "resume"), 1);
}

TEST_F(ASource, WhatIsSettledIsForgottenAfterAWhile) {
  auto r = record(wire::COMMITTED);
  r.set_settled(true);
  ASSERT_TRUE(Journal<journal::Source>(config.state_dir + "/journal/source").save(7, r));
  destination.told_to_commit = [] {};
  begin(record(wire::COMMITTED));
  host.tick();
  EXPECT_EQ(host.outcome(7).outcome(), wire::COMMITTED) << "others may ask";
  EXPECT_TRUE(fs::exists(file(7)));
  host.forget_settled(std::chrono::seconds(0));
  EXPECT_EQ(host.outcome(7).outcome(), wire::UNKNOWN);
  EXPECT_FALSE(fs::exists(file(7)));
  EXPECT_EQ(host.outcome(kId).outcome(), wire::COMMITTED) << "it is open";
  EXPECT_TRUE(fs::exists(file(kId)));
  EXPECT_TRUE(host.order(kId, wire::UNDONE, true));
  settled();
}

}  // namespace
}  // namespace migr::source_host_test
