// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a partner takes back by itself after a start of its migrd.
#include "agent/partner_host.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <numeric>
#include <utility>

#include "agent/limits.h"
#include "agent/peer_link.h"
#include "agent/process.h"
#include "inside.h"
#include "played_library.h"
#include "temp_folder.h"

namespace migr::partner_host_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kId = 0x1234;

struct APartner : ::testing::Test {
  Config config_in_root() const {
    Config c;
    c.name = "peer";
    c.state_dir = root + "/state";
    c.run_dir = root + "/run";
    return c;
  }
  void SetUp() override {
    kReconnectMs = 200;
    kResolveStepMs = 100;
    ASSERT_GT(child = fork(), -1);
    if (!child) {
      for (;;) pause();
    }
    auto* q = record.mutable_request()->add_qps();
    record.mutable_request()->set_id(kId);
    record.mutable_request()->set_source("src");
    record.set_outcome(wire::OPEN);
    q->set_instance(std::string(sizeof(Instance), 'i'));
    q->set_pid(child);
  }
  void TearDown() override {
    end_child();
    if (host && !taken_back(5'000)) {
      ADD_FAILURE() << "it is not taken back";
      std::fflush(nullptr);
      _exit(1);  // its thread goes on with what is here
    }
  }
  void end_child() {
    if (child <= 0) return;
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    child = 0;
  }
  /// As a migrd does that finds this after its start.
  void begin() {
    ASSERT_TRUE(written.save(kId, record));
    host.emplace(config, sessions, peers, claims, directory, whereabouts);
  }
  bool taken_back(int limit_ms) {
    const auto so = [&] { return written.load(kKeepOutcome, [](const auto&) { return false; }).at(kId).outcome() == wire::UNDONE; };
    for (int ms = 0; ms < limit_ms && !so(); ms += 100) {
      host->tick();
      usleep(100'000);
    }
    return so();
  }

  const TempFolder temp;
  const std::string root = temp.path;
  Config config = config_in_root();
  const Journal<journal::Partner> written{config.state_dir + "/journal/partner"};
  pid_t child = 0;
  journal::Partner record;
  SessionTable sessions;
  Peers peers{config, pki::Files{}};
  Claims claims;
  const std::shared_ptr<Directory> directory = std::make_shared<Directory>(config);
  const Numbers numbers{config};
  Whereabouts whereabouts{config, sessions, peers, *directory, numbers};
  std::optional<PartnerHost> host;
};

TEST_F(APartner, DoesNotWaitForWhoHasTheNumberOfItsProcessNow) {
  (*record.mutable_began())[child] = "another life";
  begin();
  EXPECT_TRUE(taken_back(2'000));
  const auto kept = written.load(kKeepOutcome, [](const auto&) { return false; }).at(kId);
  EXPECT_EQ(kept.request().qps_size(), 0) << "it is kept for a week";
  EXPECT_EQ(kept.request().source(), "src");
}

TEST_F(APartner, WaitsForItsProcessUntilThatEnds) {
  (*record.mutable_began())[child] = life_of(child);
  begin();
  EXPECT_FALSE(taken_back(1'000));
  end_child();
  EXPECT_TRUE(taken_back(2'000));
}

TEST_F(APartner, OfAnOlderMigrdTheNumberIsAllThatIsKnown) {
  begin();
  EXPECT_FALSE(taken_back(1'000));
}

// A migrd that is started again would tell its processes so once more, whatever they do then.
TEST_F(APartner, WhatIsTakenBackIsWrittenDownWhenThereIsRoomAgain) {
  const std::string in_the_way = config.state_dir + "/journal/partner/" + migration_text(kId) + ".json.new";
  (*record.mutable_began())[child] = "another life";
  ASSERT_TRUE(written.save(kId, record));
  fs::create_directories(in_the_way);
  host.emplace(config, sessions, peers, claims, directory, whereabouts);
  EXPECT_FALSE(taken_back(1'000)) << "where nothing can be written";
  EXPECT_TRUE(host->open_migrations().empty());
  fs::remove(in_the_way);
  EXPECT_TRUE(taken_back(1'000));
}

// As one that it is no peer of any more: nobody else could tell why it waits.
TEST_F(APartner, SaysWhoRefusesToSayWhatBecameOfIt) {
  struct : wire::Host::Service {
    grpc::Status GetOutcome(grpc::ServerContext*, const wire::Migration*, wire::OutcomeReply*) override { return {grpc::StatusCode::PERMISSION_DENIED, "no peer"}; }
  } refuses;
  grpc::ServerBuilder b;
  b.RegisterService(&refuses);
  const auto server = b.BuildAndStart();
  peers.set_self(server->InProcessChannel({}));
  record.set_switched(true);
  record.mutable_request()->set_source("peer");
  record.mutable_request()->set_destination("peer");
  (*record.mutable_began())[child] = "another life";
  begin();
  const std::string so = "suspended; asks peer and peer what became of it; refused: peer: no peer";
  std::string said;
  for (int ms = 0; ms < 5'000 && said != so; ms += 100) {
    host->tick();
    usleep(100'000);
    if (const auto open = host->open_migrations(); !open.empty()) said = open[0].state();
  }
  EXPECT_EQ(said, so);
  EXPECT_TRUE(host->order(kId, wire::UNDONE, true));
  EXPECT_TRUE(taken_back(5'000));
}

/// It is open when it is asked for its part by its own host.
struct AnAskedPartner : APartner {
  void SetUp() override {
    APartner::SetUp();
    record.mutable_request()->set_source("peer");
    (*record.mutable_began())[child] = life_of(child);
  }
  template <class Request, class Reply>
  grpc::Status ask(grpc::Status (wire::Partner::Stub::*what)(grpc::ClientContext*, const Request&, Reply*), Reply& out, Request r = {}) {
    if (!host) begin();
    grpc::ServerBuilder b;
    b.RegisterService(&*host);
    const auto server = b.BuildAndStart();
    grpc::ClientContext ctx;
    r.set_id(kId);
    if constexpr (requires { r.set_limit_ms(0); }) r.set_limit_ms(1'000);
    wire::Partner::Stub stub(server->InProcessChannel({}));
    return (stub.*what)(&ctx, r, &out);
  }
  grpc::Status suspend() {
    wire::Empty out;
    return ask(&wire::Partner::Stub::Suspend, out);
  }
  void is_of(pid_t pid) {
    record.mutable_request()->mutable_qps(0)->set_pid(pid);
    (*record.mutable_began())[pid] = life_of(pid);
  }
};

// While it asks what became of it, as it was left alone: nobody may be told the keys of what it has gone back from.
TEST_F(AnAskedPartner, ThatWasToldToGoBackMeanwhileDoes) {
  struct : wire::Host::Service {
    std::function<void()> meanwhile;
    grpc::Status GetOutcome(grpc::ServerContext*, const wire::Migration*, wire::OutcomeReply* out) override {
      meanwhile();
      out->set_outcome(wire::COMMITTED);
      out->set_keys_known(true);
      return grpc::Status::OK;
    }
  } answers;
  grpc::ServerBuilder b;
  b.RegisterService(&answers);
  const auto server = b.BuildAndStart();
  peers.set_self(server->InProcessChannel({}));
  record.set_switched(true);
  record.mutable_request()->set_destination("peer");
  (*record.mutable_began())[child] = "another life";
  std::promise<bool> back;
  answers.meanwhile = [&] {
    wire::Empty out;
    back.set_value(ask(&wire::Partner::Stub::Rollback, out).ok());
  };
  begin();
  host->tick();
  auto told = back.get_future();
  ASSERT_EQ(told.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_TRUE(told.get());
  usleep(500'000);
  EXPECT_TRUE(taken_back(0));
}

TEST_F(AnAskedPartner, WhoseProcessHasEndedCanBeAskedAnew) {
  end_child();
  const auto s = suspend();
  EXPECT_EQ(from_grpc(s, "peer").error().code, EAGAIN) << s.error_message();
}

TEST_F(AnAskedPartner, WhoseProcessIsNotConnectedIsNot) {
  const auto s = suspend();
  EXPECT_EQ(from_grpc(s, "peer").error().code, EIO) << s.error_message();
}

/// This process, as far as a SessionTable sees it.
class ALibrary {
 public:
  using Told = std::function<int(const migr_msg& asked, const std::byte* records)>;
  /// @param told  what it is asked for; it returns the status of the answer
  ALibrary(SessionTable& sessions, const std::string& path, Told told) : sessions_(sessions), told_(std::move(told)) {
    EXPECT_TRUE(sessions.start(path, {}));
    Instance i;
    i.fill('i');
    socket_ = connect_library(path, i);
    EXPECT_GE(socket_.n, 0);
    thread_ = std::thread([this] {
      answer_all(socket_.n, [this](migr_msg& m, const std::byte* records) {
        m.status = told_(m, records);
        m.arg = 0;
      });
    });
  }
  ~ALibrary() {
    sessions_.stop();
    shutdown(socket_.n, SHUT_RDWR);
    thread_.join();
  }

 private:
  SessionTable& sessions_;
  const Told told_;
  Fd socket_;
  std::thread thread_;
};

// Of what it is asked for it has nothing.
TEST_F(AnAskedPartner, WhoseQpIsDestroyedCanBeAskedAnew) {
  const ALibrary library(sessions, root + "/proc.sock", [](const migr_msg& asked, const std::byte*) { return asked.type == MIGR_MSG_SUSPEND ? ENOENT : 0; });
  is_of(getpid());
  const auto s = suspend();
  EXPECT_EQ(from_grpc(s, "peer").error().code, EAGAIN) << s.error_message();
  EXPECT_TRUE(taken_back(5'000));
}

// A message about all of them would keep its application from every call of verbs as long.
TEST_F(AnAskedPartner, AsksForManyQpsInParts) {
  constexpr std::uint32_t kQps = 600;
  std::vector<std::uint32_t> made, connected;
  const ALibrary library(sessions, root + "/proc.sock", [&](const migr_msg& asked, const std::byte*) {
    if (asked.type == MIGR_MSG_QP_CREATE) made.push_back(asked.count);
    if (asked.type == MIGR_MSG_QP_CONNECT) connected.push_back(asked.count);
    return connected.size() == 2 ? EIO : 0;
  });
  auto& qps = *record.mutable_request()->mutable_qps();
  wire::ConnectRequest r;
  while (static_cast<std::uint32_t>(qps.size()) < kQps) *qps.Add() = qps[0];
  for (std::uint32_t i = 0; i < kQps; i++) {
    auto& q = qps[static_cast<int>(i)];
    q.set_index(i);
    q.set_vqpn(i + 1);
    q.set_pid(getpid());
    auto* c = r.add_connections();
    c->set_index(i);
    c->set_dest_gid(std::string(16, 'g'));
    c->set_peer(std::string(16, 'a'));
  }
  is_of(getpid());
  record.set_switched(true);  // a migrd that finds it again waits
  wire::PartnerPrepareReply spares;
  EXPECT_TRUE(ask(&wire::Partner::Stub::Create, spares).ok());
  EXPECT_EQ(made.size(), 3u);
  EXPECT_EQ(std::accumulate(made.begin(), made.end(), 0u), kQps);
  wire::Empty out;
  EXPECT_FALSE(ask(&wire::Partner::Stub::Connect, out, r).ok());
  EXPECT_EQ(connected.size(), 2u) << "the third is not asked for";
  host.reset();
}

TEST_F(AnAskedPartner, WithManyQpsMayTakeLonger) {
  const ALibrary library(sessions, root + "/proc.sock", [](const migr_msg& asked, const std::byte*) {
    if (asked.type == MIGR_MSG_SWITCH) usleep(400'000);
    return 0;
  });
  const int limit = std::exchange(kProcessMs, 200);
  auto& qps = *record.mutable_request()->mutable_qps();
  while (qps.size() < 100) *qps.Add() = qps[0];
  for (auto& q : qps) q.set_pid(getpid());
  is_of(getpid());
  wire::Empty out;
  const auto s = ask(&wire::Partner::Stub::Switch, out);
  EXPECT_TRUE(s.ok()) << s.error_message();
  kProcessMs = limit;
  host.reset();
}

// Of a container with many processes there may be more keys than one message holds.
TEST_F(AnAskedPartner, TellsAProcessOfThoseWhomItIsConnectedTo) {
  std::vector<std::uint32_t> keys;
  const ALibrary library(sessions, root + "/proc.sock", [&](const migr_msg& asked, const std::byte* records) {
    keys.clear();
    for (std::uint32_t i = 0; asked.type == MIGR_MSG_KEYS && i < asked.count; i++) {
      migr_key_map m;
      std::memcpy(&m, records + i * sizeof m, sizeof m);
      keys.push_back(m.prkey);
    }
    return 0;
  });
  is_of(getpid());
  wire::KeysRequest r;
  for (const char owner : {'a', 'b', 'c'}) {
    auto* k = r.add_keys();
    k->set_owner(std::string(sizeof(Instance), owner));
    k->add_vrkey(0x100);
    k->add_prkey(static_cast<std::uint32_t>(owner));
  }
  record.set_switched(true);
  auto& owners = *(*record.mutable_owners())[getpid()].mutable_instance();
  wire::KeysReply out;
  const auto told = [&] {
    const auto s = ask(&wire::Partner::Stub::Keys, out, r);
    EXPECT_TRUE(s.ok()) << s.error_message();
    host.reset();  // whether it runs at the destination nobody says
    return keys;
  };
  EXPECT_EQ(told(), (std::vector<std::uint32_t>{'a', 'b', 'c'})) << "an older migrd wrote down none";
  for (const char owner : {'c', 'a'}) owners.Add(std::string(sizeof(Instance), owner));
  EXPECT_EQ(told(), (std::vector<std::uint32_t>{'a', 'c'}));
  owners.Clear();
  owners.Add(std::string(sizeof(Instance), 'd'));
  keys = {7};
  EXPECT_EQ(told(), std::vector<std::uint32_t>()) << "one that has no key";
}

/// Its process says that it is suspended: a thread that has looked before may still be about to post.
struct APartnerWithAThreadInside : AnAskedPartner {
  void SetUp() override {
    AnAskedPartner::SetUp();
    Instance i;
    i.fill('i');
    ASSERT_TRUE(sessions.start(root + "/proc.sock", {}));
    process.emplace(root + "/proc.sock", i);
    ASSERT_TRUE(sessions.wait_for(i, {}, 5'000));
    is_of(process->pid());
  }
  void TearDown() override {
    process.reset();
    AnAskedPartner::TearDown();
    sessions.stop();
    kSuspendMs = limit;
  }
  std::optional<Inside> process;
  const int limit = std::exchange(kSuspendMs, 500);
};

TEST_F(APartnerWithAThreadInside, IsSuspendedWhenThatHasLeft) {
  const auto s = suspend();
  EXPECT_NE(s.error_message().find("stayed inside"), std::string::npos) << s.error_message();
  process->leave();
  EXPECT_TRUE(suspend().ok());
}

TEST_F(APartnerWithAThreadInside, TracksWhenThatHasLeft) {
  wire::TrackReply out, later;
  EXPECT_TRUE(ask(&wire::Partner::Stub::Track, out).ok());
  EXPECT_NE(out.why_not().find("stayed inside"), std::string::npos) << out.why_not();
  process->leave();
  EXPECT_TRUE(ask(&wire::Partner::Stub::Track, later).ok());
  EXPECT_EQ(later.why_not(), "");
}

// It is taken back as the coordinator is silent, and the last word of that comes just then: who has switched asks what became of it.
TEST_F(AnAskedPartner, ThatSwitchesMeanwhileDoesNotGoBack) {
  config.fault = "partner.switch.begin:sleep=1";
  (*record.mutable_began())[child] = "another life";
  begin();
  std::thread asks([this] {
    wire::Empty out;
    (void)ask(&wire::Partner::Stub::Switch, out);
  });
  usleep(300'000);
  host->tick();
  asks.join();
  usleep(500'000);
  EXPECT_FALSE(taken_back(0));
  EXPECT_TRUE(written.load(kKeepOutcome, [](const auto&) { return false; }).at(kId).switched());
  EXPECT_TRUE(host->order(kId, wire::UNDONE, true));
}

// What it would write to has other keys since the commit.
TEST_F(AnAskedPartner, IsNotResumedWithoutKeys) {
  record.set_switched(true);
  wire::ResumeReply out;
  const auto s = ask(&wire::Partner::Stub::Resume, out);
  EXPECT_EQ(s.error_message(), "RESUME before SWITCH and KEYS");
  host.reset();  // whether it runs at the destination nobody says
}

TEST(Pace, HurriesForAnOrderOnce) {
  kResolveStepMs = 300;
  LeasedJob job;
  job.ordered = wire::UNDONE;
  LeasedJob::Pace pace;
  const auto took = [&] {
    const auto began = Clock::now();
    pace.wait(job, false);
    return Clock::now() - began;
  };
  const auto first = took();
  EXPECT_GE(took(), std::chrono::milliseconds(kResolveStepMs)) << "it did not help";
  EXPECT_LT(first, std::chrono::milliseconds(kResolveStepMs));
}

}  // namespace
}  // namespace migr::partner_host_test
