// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Peers and their rights, taken anew from the file: what is taken, what is only said, and when nothing is.
#include "agent/reload.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "agent/ctl_text.h"
#include "agent/peer_link.h"
#include "agent/pki.h"

namespace migr::reload_test {
namespace {

struct OpenOnes : Role {
  wire::OutcomeReply outcome(std::uint32_t) override { return {}; }
  Status renew(std::uint32_t, const Caller&) override { return {}; }
  std::vector<wire::OpenMigration> open_migrations() override { return open; }
  std::vector<wire::OpenMigration> open;
};

class Reload : public ::testing::Test {
 protected:
  void SetUp() override {
    char t[] = "/tmp/migr-reload-XXXXXX";
    ASSERT_NE(mkdtemp(t), nullptr);
    dir_ = t, file_ = dir_ + "/migrd.json";
    write(R"("peers": [{"name": "b", "address": "b:1"}, {"name": "c", "address": "c:1"}])");
    auto c = load_config(file_);
    ASSERT_TRUE(c) << c.error().text;
    config_ = *c;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void write(const std::string& rest) { std::ofstream(file_) << R"({"name": "a", )" << rest << "}"; }
  Result<wire::ReloadReply> reload() { return migr::reload(config_, file_, {&role_}); }
  void open(const std::string& from, const std::string& to, const std::string& partner = "") {
    wire::OpenMigration m;
    m.set_id(0x1234);
    m.set_source(from);
    m.set_destination(to);
    if (!partner.empty()) m.add_partners(partner);
    role_.open = {m};
  }

  std::string dir_, file_;
  Config config_;
  OpenOnes role_;
};

TEST_F(Reload, SaysWhatHasChanged) {
  const auto same = reload();
  ASSERT_TRUE(same) << same.error().text;
  EXPECT_EQ(reload_text(*same), "peers and their rights are as they were");
  write(R"("peers": [{"name": "b", "address": "b:2"}, {"name": "d", "address": "d:1"}], "allow": {"read": ["d"]}, "listen": "0.0.0.0:2", "limits": {"call_ms": 7})");
  const auto r = reload();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(reload_text(*r),
            "d is a peer now; c is no peer any more; b is at b:2 now; \"allow\" has changed; "
            "\"limits\" is not as at the start: migrd has to be restarted for that; \"listen\" is not as at the start: migrd has to be restarted for that");
  EXPECT_EQ(reload_json(*r).dump(), R"({"added":["d"],"removed":["c"],"moved":[{"name":"b","address":"b:2"}],"allow":true,"at_start":["limits","listen"]})");
  EXPECT_EQ(config_.peers(), (std::vector<Peer>{{"b", "b:2"}, {"d", "d:1"}}));
  EXPECT_EQ(config_.hosts.now()->allow.at(Right::kRead)[0].peer, "d");
  EXPECT_EQ(config_.listen, kListen);
  EXPECT_NE(kCallMs, 7);
}

TEST_F(Reload, AnErrorChangesNothing) {
  write(R"("peers": [{"name": "b"}])");
  EXPECT_EQ(reload().error().code, EINVAL);
  std::ofstream(file_) << R"({"name": "z", "peers": []})";
  EXPECT_NE(reload().error().text.find("another name needs a restart"), std::string::npos);
  std::filesystem::remove(file_);
  EXPECT_EQ(reload().error().code, ENOENT);
  EXPECT_EQ(config_.peers().size(), 2u);
}

// Its calls would be refused, after the commit too.
TEST_F(Reload, NothingIsTakenFromPeersInTheMiddleOfAMigration) {
  for (const char* less : {R"("peers": [{"name": "c", "address": "c:1"}])", R"("peers": [{"name": "b", "address": "b:1"}, {"name": "c", "address": "c:1"}], "allow": {"to_here": []})"}) {
    for (const auto& [from, to, partner] : {std::tuple{"a", "b", ""}, {"b", "a", ""}, {"a", "/srv/kept", "b"}}) {
      write(less);
      open(from, to, partner);
      const auto r = reload();
      ASSERT_FALSE(r) << less;
      EXPECT_EQ(r.error().code, EBUSY);
      EXPECT_TRUE(r.error().text.starts_with("migration 00001234 with b is not finished")) << r.error().text;
      EXPECT_EQ(config_.peers().size(), 2u);
      EXPECT_TRUE(config_.hosts.now()->allow.empty());
    }
  }
  open("a", "/srv/kept", "a");
  EXPECT_TRUE(reload()) << "of this host alone";
}

TEST_F(Reload, APeerIsAddedInTheMiddleOfAMigration) {
  open("a", "b");
  write(R"("peers": [{"name": "b", "address": "b:1"}, {"name": "c", "address": "c:1"}, {"name": "d", "address": "d:1"}])");
  const auto r = reload();
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ(reload_text(*r), "d is a peer now");
}

// A channel that somebody has is of the address that was.
TEST_F(Reload, ChannelsAreOfThePeersThatAre) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}));
  Peers peers(config_, *pki::load(dir_ + "/ca/a"));
  const auto b = *peers.channel("b"), c = *peers.channel("c");
  EXPECT_EQ(peers.channel("d").error().code, ENOENT);
  write(R"("peers": [{"name": "b", "address": "b:2"}, {"name": "d", "address": "d:1"}])");
  ASSERT_TRUE(reload());
  EXPECT_NE(*peers.channel("b"), b);
  EXPECT_TRUE(peers.channel("d"));
  EXPECT_EQ(peers.channel("c").error().text, "no host 'c' among the peers in the configuration (b, d)");
}

// Each look sees all as it was, or all as it is.
TEST_F(Reload, OthersLookMeanwhile) {
  std::atomic<bool> stop = false, torn = false;
  std::thread looks([&] {
    while (!stop)
      if (const auto peers = config_.peers(); peers.size() != (peers[0].name == "b" ? 2u : 1u)) torn = true;
  });
  for (int i = 0; i < 200; i++) {
    write(i % 2 ? R"("peers": [{"name": "b", "address": "b:1"}, {"name": "c", "address": "c:1"}])" : R"("peers": [{"name": "d", "address": "d:1"}])");
    EXPECT_TRUE(reload());
  }
  stop = true;
  looks.join();
  EXPECT_FALSE(torn);
}

}  // namespace
}  // namespace migr::reload_test
