// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What Find says of the end of a connection that a process here has, what cannot be moved from here, and which numbers are reserved,
// by a kernel's record that is this test's.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>

#include "agent/destination_host.h"
#include "agent/devices.h"
#include "agent/file_tree.h"
#include "agent/kernel_record.h"
#include "agent/numbers.h"
#include "agent/partner_host.h"
#include "agent/process.h"
#include "agent/source_host.h"
#include "migr/restore_control.h"
#include "played_library.h"
#include "temp_folder.h"

namespace migr {
namespace {

constexpr std::uint32_t kVqpn = 0x11, kPqpn = 0x12, kInit = 1, kSqd = 4, kSqe = 5;
constexpr char kDevice[] = "mlx5_0";
std::uint32_t recorded_state, recorded_flags = MIGR_CTX_ATTACHED, driver = RDMA_DRIVER_RXE;
const char* comm = "partner";
bool loaded = true;
std::optional<bool> moves_marked = true;
std::uint32_t recorded_ctx = 0;
pid_t recorded_pid = getpid();
std::set<std::uint32_t> reserved;
unsigned reservings = 0;
std::vector<wire::PortGid> gids;
std::string recorded_sgid = std::string(16, '\0'), recorded_dgid;  // of its path; the latter empty: zeros
std::uint32_t recorded_dest = 0, recorded_type = 2;                // RC

}  // namespace

Result<KernelRecord> KernelRecord::open() {
  if (!loaded) return Error{ENOENT, "migr.ko is not loaded"};
  return KernelRecord();
}
Result<KernelInfo> KernelRecord::info() { return KernelInfo{.reserved = static_cast<std::uint32_t>(reserved.size()), .moves_marked = moves_marked}; }
Result<std::vector<ContextRecord>> KernelRecord::contexts(pid_t) {
  ContextRecord c;
  c.rec.pid = static_cast<__u32>(recorded_pid);
  c.rec.flags = recorded_flags;
  c.rec.ctx_id = recorded_ctx;
  std::strcpy(c.rec.comm, comm);
  std::strcpy(c.rec.ibdev, kDevice);
  return std::vector{c};
}
Status KernelRecord::objects(ContextRecord& c, std::uint32_t) {
  migr_qp_rec q{};
  q.vqpn = kVqpn;
  q.pqpn = kPqpn;
  q.qp_type = recorded_type;
  q.qp_state = recorded_state;
  q.dest_qpn = recorded_dest;
  std::memcpy(q.ah.sgid, recorded_sgid.data(), recorded_sgid.size());
  std::memcpy(q.ah.dgid, recorded_dgid.data(), recorded_dgid.size());
  c.qps.push_back(q);
  return {};
}
Status KernelRecord::search(ContextRecord& c) { return objects(c, 0); }
Status KernelRecord::reserve_qpn(std::uint32_t vqpn) {
  reserved.insert(vqpn);
  ++reservings;
  return {};
}
Status KernelRecord::release_qpn(std::uint32_t) { return {}; }
const char* object_name(std::uint32_t) { return "object"; }
const char* qp_type_name(std::uint32_t) { return "type"; }
const char* qp_state_name(std::uint32_t s) { return s == kSqd ? "SQD" : "another"; }

std::vector<std::string> device_names() { return {kDevice}; }
Result<std::vector<wire::PortGid>> gids_of(const std::string&) { return gids; }
Status each_gid(const std::function<void(wire::PortGid&)>& f) {
  for (auto& g : gids)
    if (!g.device().empty()) f(g);
  return {};
}
Result<std::set<std::uint32_t>> qp_numbers(const std::string&) { return std::set<std::uint32_t>{kPqpn}; }
Result<std::set<std::uint32_t>> qp_numbers_of(pid_t) { return std::set<std::uint32_t>(); }
Result<Room> room_of(const std::string& device) {
  if (!driver) return Error{ENODEV, "no " + device};
  Room r;
  std::strcpy(r.device.ibdev, kDevice);
  r.device.driver_id = driver;
  return r;
}

namespace {

namespace fs = std::filesystem;

/// This process is the partner, and has libmigr as far as its migrd can tell.
struct AnEnd : ::testing::Test {
  /// What whoever runs the tests has left open here may be a pipe to a process that does not move, or a terminal.
  static void SetUpTestSuite() {
    if (isatty(STDIN_FILENO) && !std::freopen("/dev/null", "r", stdin)) FAIL() << "no /dev/null";
    if (isatty(STDOUT_FILENO) || isatty(STDERR_FILENO)) {
      FILE* const out = popen("setsid -f cat", "w");
      for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) ASSERT_EQ(dup2(fileno(out), fd), fd);
    }
    close_range(STDERR_FILENO + 1, ~0u, 0);
  }
  Config config_in_root() const {
    Config c;
    c.name = "peer";
    c.state_dir = root + "/state";
    c.run_dir = root;
    c.libmigr = "/opt/libmigr.so";
    return c;
  }
  void SetUp() override {
    ASSERT_TRUE(sessions.start(
        root + "/proc.sock", [](const auto&) {}, [this](const Question& q) { return whereabouts.answer(q); }));
    library = connect_library(root + "/proc.sock");
    ASSERT_GE(library.n, 0);
    const timeval limit{5, 0};
    setsockopt(library.n, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ASSERT_TRUE(within(10'000, [&] { return bool(sessions.by_pid(getpid())); }));
    grpc::ServerBuilder b;
    b.RegisterService(&host);
    server = b.BuildAndStart();
  }
  void TearDown() override {
    server->Shutdown();
    sessions.stop();
  }
  grpc::Status find(std::uint32_t state, wire::FindReply& out) {
    recorded_state = state;
    wire::FindRequest r;
    auto* end = r.add_ends();
    end->set_pqpn(kPqpn);
    end->set_gid(std::string(16, '\0'));
    grpc::ClientContext ctx;
    return wire::Partner::NewStub(server->InProcessChannel({}))->Find(&ctx, r, &out);
  }

  /// The library: what it says to the next that is asked.
  std::thread says(int status, const char* text) {
    return std::thread([this, status, text] {
      migr_msg m{};
      ASSERT_GE(recv(library.n, &m, sizeof m, 0), static_cast<ssize_t>(sizeof m));
      EXPECT_EQ(m.type, MIGR_MSG_DESCRIBE);
      m.type |= MIGR_REPLY;
      m.count = m.record_size = 0;
      m.status = status;
      std::snprintf(m.text, sizeof m.text, "%s", text);
      EXPECT_EQ(send(library.n, &m, sizeof m, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof m));
    });
  }
  /// Another release's: it is refused.
  void be_refused() {
    shutdown(library.n, SHUT_RDWR);
    const Fd other = connect_library(root + "/proc.sock", {}, MIGR_PROC_RUNNING, MIGR_PROC_VERSION + 1);
    ASSERT_GE(other.n, 0);
    ASSERT_TRUE(within(10'000, [&] { return !sessions.by_pid(getpid()) && !sessions.refusal(getpid()).empty(); }));
  }
  /// What this process is refused with, as one that is to be moved.
  std::string not_moved() {
    SourceRun run(source, 1, SourceRun::Describe::kLook);
    const auto info = run.inspect("pid:" + std::to_string(getpid()));
    return info ? "" : info.error().text;
  }

  const TempFolder temp;
  const std::string root = temp.path;
  const Config config = config_in_root();
  Fd library;
  SessionTable sessions;
  Peers peers{config, pki::Files{}};
  Claims claims;
  const std::shared_ptr<Directory> directory = std::make_shared<Directory>(config);
  Numbers numbers{config};
  Whereabouts whereabouts{config, sessions, peers, *directory, numbers};
  PartnerHost host{config, sessions, peers, claims, directory, whereabouts};
  SourceHost source{config, sessions, claims, numbers, *directory, [](const std::string& name) { return Error{ENOENT, name}; },
                    [](const std::string& name) { return Error{ENOENT, name}; }};
  std::unique_ptr<grpc::Server> server;
};

const std::string kRefused = "speaks version " + std::to_string(MIGR_PROC_VERSION + 1) + ", not " + std::to_string(MIGR_PROC_VERSION);

TEST_F(AnEnd, InAStateThatNoNewPathCanHaveIsRefusedByName) {
  wire::FindReply out;
  const grpc::Status s = find(kSqd, out);
  EXPECT_NE(s.error_message().find("the partner, process " + std::to_string(getpid()) + " (partner) on peer: QP 17 is in state SQD and cannot be migrated"),
            std::string::npos)
      << s.error_message();
  EXPECT_EQ(out.qps_size(), 0);
  EXPECT_FALSE(find(kSqe, out).ok());
}

TEST_F(AnEnd, InAnyOtherIsFound) {
  for (const std::uint32_t state : {kRtr, kRts, kErr}) {
    wire::FindReply out;
    const grpc::Status s = find(state, out);
    EXPECT_TRUE(s.ok()) << s.error_message();
    ASSERT_EQ(out.qps_size(), 1);
    EXPECT_EQ(out.qps(0).vqpn(), kVqpn);
  }
}

/// QP 0x21 at `kOurs` is connected to it; its GID is a port's here.
struct AnEndOfOurs : AnEnd {
  static void SetUpTestSuite() {}
  void SetUp() override {
    AnEnd::SetUp();
    auto& g = gids.emplace_back();
    g.set_device(kDevice);
    g.set_gid(kHere);
    recorded_sgid = kHere;
    recorded_dgid = kOurs;
    recorded_dest = kOur;
  }
  void TearDown() override {
    gids.clear();
    recorded_sgid = std::string(16, '\0');
    recorded_dgid = {};
    recorded_dest = 0;
    AnEnd::TearDown();
  }
  /// "found", "dead" and "forming", as the answer has them.
  std::string seen(std::uint32_t state, std::uint32_t number = kPqpn) {
    recorded_state = state;
    wire::FindRequest r;
    auto* end = r.add_ends();
    end->set_pqpn(number);
    end->set_gid(kHere);
    end->set_from_gid(kOurs);
    end->set_from_pqpn(kOur);
    wire::FindReply out;
    grpc::ClientContext ctx;
    const auto s = wire::Partner::NewStub(server->InProcessChannel({}))->Find(&ctx, r, &out);
    EXPECT_TRUE(s.ok()) << s.error_message();
    return std::string(out.qps_size() ? "found " : "") + (out.dead_size() ? "dead " : "") + (out.forming_size() ? "forming " : "");
  }
  static constexpr std::uint32_t kOur = 0x21;
  const std::string kHere = std::string(16, 'h'), kOurs = std::string(16, 'o');
};

TEST_F(AnEndOfOurs, ThatIsConnectedToUsIsFound) {
  for (const std::uint32_t state : {kRtr, kRts, kErr}) EXPECT_EQ(seen(state), "found ") << state;
}

// Its program takes it elsewhere; or connects it to us once more, and is not as far yet.
TEST_F(AnEndOfOurs, ThatWasResetIsNotTakenForConnected) {
  for (const std::uint32_t state : {0u, kInit}) EXPECT_EQ(seen(state), "dead forming ") << state;
}

TEST_F(AnEndOfOurs, ThatNeverHadAPathIsForming) {
  recorded_type = kUd;
  EXPECT_EQ(seen(kInit), "") << "one that connects to nobody";
  recorded_type = kRc;
  recorded_sgid = recorded_dgid = std::string(16, '\0');
  recorded_dest = 0;
  EXPECT_EQ(seen(kInit), "forming ");
  EXPECT_EQ(seen(kInit, kPqpn + 1), "dead ") << "of another number";
  gids.clear();
  EXPECT_EQ(seen(kInit), "") << "of another device";
}

TEST_F(AnEndOfOurs, ThatSomebodyElseHasIsDead) {
  recorded_dest = kOur + 1;
  for (const std::uint32_t state : {kRts, kErr}) EXPECT_EQ(seen(state), "dead forming ") << state << ": its program may be taking it to us";
  EXPECT_EQ(seen(kInit), "forming ") << "it was somebody else's, and may become ours";
  recorded_dest = kOur;
  recorded_dgid = std::string(16, 'x');
  EXPECT_EQ(seen(kRts), "dead forming ") << "of another host, which has a QP of that number, too";
  recorded_flags = 0;
  EXPECT_EQ(seen(kRts), "dead forming ") << "that it has no libmigr is nothing to us";
  recorded_flags = MIGR_CTX_ATTACHED;
  gids.clear();
  EXPECT_EQ(seen(kRts), "") << "the address may have gone to another host, with who is meant";
}

TEST_F(AnEnd, OnAnotherFamilyOfDevicesIsRefusedByName) {
  wire::FindReply out;
  driver = RDMA_DRIVER_MLX5;
  const grpc::Status s = find(kRts, out);
  EXPECT_NE(s.error_message().find("the partner, process " + std::to_string(getpid()) + " (partner) on peer, is on mlx5_0, which is driven by mlx5: "), std::string::npos) << s.error_message();
  EXPECT_EQ(out.qps_size(), 0);
  driver = 0;  // not known, as of a device that goes meanwhile
  EXPECT_TRUE(find(kRts, out).ok());
  EXPECT_EQ(out.qps_size(), 1);
  driver = RDMA_DRIVER_RXE;
}

// Another program of that host would be found by nobody, either.
TEST_F(AnEnd, WhoseNameIsOfAnyBytesIsFound) {
  comm = "caf\xc3";
  wire::FindReply out;
  grpc::Status s = find(kRts, out);
  EXPECT_TRUE(s.ok()) << s.error_message();
  EXPECT_EQ(out.qps_size(), 1);
  EXPECT_EQ(claims.take({{sessions.by_pid(getpid())->instance(), getpid()}}, 7), 0u);
  s = find(kRts, out);
  EXPECT_TRUE(s.ok()) << s.error_message();
  ASSERT_EQ(out.busy_size(), 1);
  EXPECT_EQ(out.busy(0).who(), "process " + std::to_string(getpid()) + " (caf\xc3) on peer");
  comm = "partner";
}

TEST_F(AnEnd, WhoseLibraryWasRefusedIsRefusedWithTheReason) {
  be_refused();
  wire::FindReply out;
  for (const std::string& why : {find(kRts, out).error_message(), not_moved()}) {
    EXPECT_NE(why.find("is not connected to migrd"), why.npos) << why;
    EXPECT_NE(why.find("which has refused it: "), why.npos) << why;
    EXPECT_NE(why.find(kRefused), why.npos) << why;
  }
}

TEST_F(AnEnd, WhereTheModuleDoesNotMarkWhatMremapMovesSaysWhyNothingIsCopiedAhead) {
  be_refused();  // which ends it behind that
  for (const std::optional<bool> marked : {std::optional(true), std::optional(false), std::optional<bool>()}) {
    moves_marked = marked;
    SourceRun run(source, 1, SourceRun::Describe::kLook);
    EXPECT_FALSE(run.inspect("pid:" + std::to_string(getpid())));
    EXPECT_EQ(run.info().written_unseen.find("mremap()") == std::string::npos, marked.value_or(false)) << run.info().written_unseen;
    EXPECT_EQ(run.info().written_unseen.find("load the new one") != std::string::npos, !marked) << run.info().written_unseen;
  }
  moves_marked = true;
}

TEST_F(AnEnd, WhoseDeviceIsNotAttachedIsRefusedWithItsLibrarysReason) {
  const char* const kReason = "opened its device without migr.ko: no /dev/migr";
  recorded_flags = 0;
  wire::FindReply out;
  for (const auto& asked : {std::function([&] { return find(kRts, out).error_message(); }), std::function([&] { return not_moved(); })}) {
    auto library_says = says(ENODEV, kReason);
    const std::string why = asked();
    library_says.join();
    EXPECT_NE(why.find(kReason), why.npos) << why;
    EXPECT_EQ(why.find("LD_PRELOAD"), why.npos) << why;
  }
  be_refused();
  EXPECT_NE(find(kRts, out).error_message().find(kRefused), std::string::npos);
  EXPECT_NE(not_moved().find(kRefused), std::string::npos);
  recorded_flags = MIGR_CTX_ATTACHED;
}

// A child of it keeps the connection. Who comes to here is held without a number.
TEST_F(AnEnd, WhoseProcessHasEndedIsNobodyElse) {
  EXPECT_EQ(claims.take({{Instance{9}, 0}}, 7), 0u);
  recorded_pid = 0;
  recorded_ctx = 5;
  wire::FindReply out;
  const std::string why = find(kRts, out).error_message();
  EXPECT_EQ(out.busy_size(), 0);
  EXPECT_NE(why.find("the partner, context 5 (partner) on peer, cannot follow: its process has ended"), why.npos) << why;
  recorded_pid = getpid();
  recorded_ctx = 0;
}

TEST_F(AnEnd, WithoutLibmigrIsToldWhatToPreload) {
  shutdown(library.n, SHUT_RDWR);
  ASSERT_TRUE(within(10'000, [&] { return !sessions.by_pid(getpid()); }));
  recorded_flags = 0;
  wire::FindReply out;
  for (const std::string& why : {find(kRts, out).error_message(), not_moved()}) {
    EXPECT_NE(why.find("does not use libmigr"), why.npos) << why;
    EXPECT_NE(why.find("LD_PRELOAD=/opt/libmigr.so"), why.npos) << why;
  }
  recorded_flags = MIGR_CTX_ATTACHED;
}

/// This process has a QP of that name at this GID, and another number of the device.
struct ACalledQp : AnEnd {
  static void SetUpTestSuite() {}  // gRPC's descriptors, of the tests before, stay open: not so for what follows
  void SetUp() override {
    AnEnd::SetUp();
    gids.emplace_back().set_gid(kGid);
    recorded_state = 0;
  }
  void TearDown() override {
    gids.clear();
    recorded_flags = MIGR_CTX_ATTACHED;
    AnEnd::TearDown();
  }
  int found(std::uint32_t number) {
    wire::WhereRequest r;
    r.set_gid(kGid);
    r.set_vqpn(number);
    wire::WhereReply out;
    EXPECT_TRUE(whereabouts.where(r, out));
    return out.found_size();
  }
  /// It was born at `gid`, and lives elsewhere.
  void leave(const Instance& who, const std::string& gid) {
    EXPECT_TRUE(write_whole(config.state_dir + "/born.json", "{\"" + hex(who) + "\": {\"born\": [17], \"away\": true}}"));
    wire::MovesRequest r;
    auto* m = r.add_moves();
    m->set_instance(who.data(), who.size());
    m->set_birth_gid(gid);
    m->set_gid(std::string(16, 'd'));
    EXPECT_TRUE(directory->put(r));
  }
  const std::string kGid = std::string(16, 'g');
};

TEST_F(ACalledQp, OfALibraryHasNoOtherNumber) {
  EXPECT_EQ(found(kVqpn), 1);
  EXPECT_EQ(found(kPqpn), 0) << "who was known by that number may have left";
  recorded_flags = 0;
  EXPECT_EQ(found(kPqpn), 1) << "and of one without it that is what others know";
}

TEST_F(ACalledQp, ThatHasComeFromElsewhereIsAtTheNearestGid) {
  const auto on = [](char net, char host) { return std::string(10, '\0') + "\xff\xff\x0a\x4d" + net + host; };
  gids.clear();
  for (const char net : {1, 2}) {
    auto& g = gids.emplace_back();
    g.set_roce_v2(true);
    g.set_gid(on(net, 9));
  }
  for (const char net : {1, 2}) {
    const Instance me = sessions.by_pid(getpid())->instance();
    wire::MovesRequest moves;
    auto* m = moves.add_moves();
    m->set_instance(me.data(), me.size());
    m->set_birth_gid(on(net, 7));
    m->set_gid(on(net, 9));
    EXPECT_TRUE(directory->put(moves));
    wire::WhereRequest r;
    r.set_gid(on(net, 7));
    r.set_vqpn(kVqpn);
    wire::WhereReply out;
    EXPECT_TRUE(whereabouts.where(r, out));
    ASSERT_EQ(out.found_size(), 1);
    EXPECT_TRUE(out.found(0).moved());
    EXPECT_EQ(out.found(0).gid(), on(net, 9)) << "the same that it sends from";
  }
}

TEST_F(ACalledQp, IsNotMeantWhereItsNameIsKeptForAnother) {
  leave(Instance{1}, std::string(16, 'x'));
  EXPECT_EQ(found(kVqpn), 1) << "that has left from another device";
  leave(Instance{1}, kGid);
  EXPECT_EQ(found(kVqpn), 0);
  recorded_flags = 0;
  EXPECT_EQ(found(kVqpn), 0);
}

TEST_F(ACalledQp, OfWhoHasComeHomeIsMeant) {
  leave(sessions.by_pid(getpid())->instance(), kGid);
  EXPECT_EQ(found(kVqpn), 1);
}

/// It has come here and does not connect.
struct AnArrival : AnEnd {
  void SetUp() override {
    kReconnectMs = 100;
    kResolveStepMs = 100;
  }
  void TearDown() override {}  // no server
  /// Whether the others go on without it. @param ctx_id  of its context, as the plugin has told it
  bool has_ended(std::uint32_t ctx_id) {
    Config c = config;
    c.runc_root = root + "/containers";
    fs::create_directories(root + "/containers/web");
    EXPECT_TRUE(write_whole(root + "/containers/web/state.json", "{\"init_process_pid\": " + std::to_string(getpid()) + "}"));
    journal::Destination record;
    auto* h = record.mutable_header();
    h->set_id(1);
    h->set_source("src");
    h->set_container("web");
    h->set_bundle(root + "/bundle");
    h->add_instances(std::string(sizeof(Instance), 'i'));
    h->add_ctx_ids(70);
    h->add_ctx_owner(0);
    record.set_outcome(wire::COMMITTED);
    record.set_boot(boot_of_host());
    migr_rc_object context{};
    context.src_ctx_id = 70;
    context.ctx_id = ctx_id;
    record.set_objects(&context, sizeof context);
    EXPECT_TRUE(Journal<journal::Destination>(c.state_dir + "/journal/destination").save(1, record));
    DestinationHost arrived(c, sessions, peers, claims, numbers);
    for (int ms = 0; ms < 2'000 && !arrived.outcome(1).keys_known(); ms += 50) usleep(50'000), arrived.tick();
    const bool ended = arrived.outcome(1).keys_known();
    fs::remove_all(root + "/containers/web");  // nobody tries again then
    EXPECT_TRUE(within(10'000, [&] { return arrived.open_migrations().empty(); }));
    return ended;
  }
};

TEST_F(AnArrival, HasEndedIfItsContextIsGone) {
  recorded_ctx = 5;
  EXPECT_TRUE(has_ended(6));
  EXPECT_FALSE(has_ended(5));
  EXPECT_FALSE(has_ended(0)) << "it is not known which one that was";
  recorded_ctx = 0;
}

struct AnAbsence : AnEnd {
  /// What a numbers' book says that was written before.
  void SetUp() override {
    fs::create_directories(config.state_dir);
    ASSERT_TRUE(write_whole(config.state_dir + "/born.json", "{\"" + hex(Instance{1}) + "\": {\"born\": [10, 11], \"away\": true}}"));
  }
  void TearDown() override {}  // no server
  void tick() {
    numbers.tick([](const std::string&, const std::vector<Instance>&) { return Status(); });
  }
};

TEST_F(AnAbsence, IsKnownToAModuleThatIsLoadedLater) {
  loaded = false;
  numbers.reserve_again();
  tick();
  loaded = true;
  tick();
  EXPECT_EQ(reserved, (std::set<std::uint32_t>{10, 11}));
  tick();
  EXPECT_EQ(reservings, 2u) << "once";
  reserved.clear();
  tick();
  EXPECT_EQ(reserved.size(), 2u) << "it was loaded again";
}

}  // namespace
}  // namespace migr
