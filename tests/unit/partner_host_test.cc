// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a partner takes back by itself after a start of its migrd.
#include "agent/partner_host.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "agent/limits.h"
#include "agent/peer_link.h"
#include "agent/process.h"

namespace migr::partner_host_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kId = 0x1234;

struct APartner : ::testing::Test {
  static std::string made() {
    char name[] = "/tmp/partner_host_test.XXXXXX";
    return mkdtemp(name);
  }
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
    fs::remove_all(root);
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

  const std::string root = made();
  const Config config = config_in_root();
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

/// It is open when it is asked for its part by its own host.
struct AnAskedPartner : APartner {
  void SetUp() override {
    APartner::SetUp();
    record.mutable_request()->set_source("peer");
    (*record.mutable_began())[child] = life_of(child);
  }
  grpc::Status suspend() {
    begin();
    grpc::ServerBuilder b;
    b.RegisterService(&*host);
    const auto server = b.BuildAndStart();
    grpc::ClientContext ctx;
    wire::LimitedRequest r;
    wire::Empty out;
    r.set_id(kId);
    r.set_limit_ms(1'000);
    return wire::Partner::NewStub(server->InProcessChannel({}))->Suspend(&ctx, r, &out);
  }
};

TEST_F(AnAskedPartner, WhoseProcessHasEndedCanBeAskedAnew) {
  end_child();
  const auto s = suspend();
  EXPECT_EQ(from_grpc(s, "peer").error().code, EAGAIN) << s.error_message();
}

TEST_F(AnAskedPartner, WhoseProcessIsNotConnectedIsNot) {
  const auto s = suspend();
  EXPECT_EQ(from_grpc(s, "peer").error().code, EIO) << s.error_message();
}

// This process, as far as a SessionTable sees it: of what it is asked for it has nothing.
TEST_F(AnAskedPartner, WhoseQpIsDestroyedCanBeAskedAnew) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::snprintf(at.sun_path, sizeof at.sun_path, "%s/proc.sock", root.c_str());
  ASSERT_TRUE(sessions.start(at.sun_path, {}));
  const Fd library(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(library.n, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  migr_msg m{};
  m.version = MIGR_PROC_VERSION;
  m.type = MIGR_MSG_HELLO;
  std::memset(m.instance, 'i', sizeof m.instance);
  ASSERT_EQ(send(library.n, &m, sizeof m, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof m));
  std::thread answers([&] {
    std::byte packet[1 << 12];
    for (migr_msg asked; recv(library.n, packet, sizeof packet, 0) >= static_cast<ssize_t>(sizeof asked);) {
      std::memcpy(&asked, packet, sizeof asked);
      asked.status = asked.type == MIGR_MSG_SUSPEND ? ENOENT : 0;
      asked.type |= MIGR_REPLY;
      asked.arg = asked.count = asked.record_size = 0;
      send(library.n, &asked, sizeof asked, MSG_NOSIGNAL);
    }
  });
  auto& q = *record.mutable_request()->mutable_qps(0);
  q.set_pid(getpid());
  (*record.mutable_began())[getpid()] = life_of(getpid());
  const auto s = suspend();
  EXPECT_EQ(from_grpc(s, "peer").error().code, EAGAIN) << s.error_message();
  EXPECT_TRUE(taken_back(5'000));
  sessions.stop();
  shutdown(library.n, SHUT_RDWR);
  answers.join();
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
