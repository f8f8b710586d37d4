// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The test CA, and that only its hosts can talk.
#include "agent/pki.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "agent/doctor.h"
#include "agent/host_service.h"
#include "agent/peer_link.h"

namespace {

using namespace migr;
namespace fs = std::filesystem;

class Pki : public ::testing::Test {
 protected:
  void SetUp() override {
    char t[] = "/tmp/migr-pki-XXXXXX";
    ASSERT_NE(mkdtemp(t), nullptr);
    dir_ = t;
  }
  void TearDown() override { fs::remove_all(dir_); }
  mode_t mode(const std::string& p) {
    struct stat st{};
    EXPECT_EQ(stat((dir_ + "/" + p).c_str(), &st), 0) << p;
    return st.st_mode & 07777;
  }
  std::string dir_;
};

TEST_F(Pki, KeysAreForTheirOwnerOnly) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "src", {"10.0.0.1"}));
  EXPECT_EQ(mode("ca/ca.key"), 0600u);
  EXPECT_EQ(mode("ca/src/host.key"), 0600u);
  EXPECT_TRUE(pki::load(dir_ + "/ca/src"));
}

TEST_F(Pki, SecondInitIsEEXIST) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  auto s = pki::init(dir_ + "/ca");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EEXIST);
}

TEST_F(Pki, BadNamesAndAddressesAreEINVAL) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  for (const char* n : {"", "..", "a/b", "-x", "a b"}) {
    auto s = pki::issue_host(dir_ + "/ca", n, {});
    ASSERT_FALSE(s) << n;
    EXPECT_EQ(s.error().code, EINVAL) << n;
  }
  auto s = pki::issue_host(dir_ + "/ca", "ok", {"10.0.0.1,DNS:other"});
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EINVAL);
}

TEST_F(Pki, KeyReadableForOthersIsEPERM) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "src", {}));
  ASSERT_EQ(chmod((dir_ + "/ca/src/host.key").c_str(), 0640), 0);
  auto f = pki::load(dir_ + "/ca/src");
  ASSERT_FALSE(f);
  EXPECT_EQ(f.error().code, EPERM);
}

// One server, and what clients of several kinds get from it.
class Tls : public Pki {
 protected:
  void SetUp() override {
    Pki::SetUp();
    for (const char* ca : {"ca", "other"}) {
      ASSERT_TRUE(pki::init(dir_ + "/" + ca));
      for (const char* h : {"a", "b"}) ASSERT_TRUE(pki::issue_host(dir_ + "/" + ca, h, {}));
    }
    config_.name = "a";
    files_ = std::make_unique<Peers>(config_, *pki::load(dir_ + "/ca/a"));
    service_ = std::make_unique<HostService>(config_, sessions_, numbers_, std::vector<Role*>());
    grpc::ServerBuilder b;
    b.AddListeningPort("127.0.0.1:0", files_->server_credentials(), &port_);
    b.RegisterService(service_.get());
    server_ = b.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override {
    server_->Shutdown();
    Pki::TearDown();
  }
  Result<wire::VersionReply> ask(const std::string& who, const std::string& expect) {
    Config c;
    c.peers = {{expect, "127.0.0.1:" + std::to_string(port_)}};
    Peers p(c, *pki::load(dir_ + who));
    wire::Host::Stub stub(*p.channel(expect));
    return call(stub, &wire::Host::Stub::Version, wire::Empty(), 2000, expect);
  }
  Config config_;
  Numbers numbers_{config_};
  SessionTable sessions_;
  std::unique_ptr<Peers> files_;
  std::unique_ptr<HostService> service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

TEST_F(Tls, HostOfTheSameCaIsAnswered) {
  auto v = ask("/ca/b", "a");
  ASSERT_TRUE(v) << v.error().text;
  EXPECT_EQ(v->name(), "a");
  EXPECT_EQ(v->wire(), kWireVersion);
}

TEST_F(Tls, HostOfAnotherCaIsNot) { EXPECT_FALSE(ask("/other/b", "a")); }

TEST_F(Tls, ServerWithAnotherNameIsNotTrusted) { EXPECT_FALSE(ask("/ca/b", "c")); }

TEST_F(Tls, PlainTextIsNotAnswered) {
  wire::Host::Stub stub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port_), grpc::InsecureChannelCredentials()));
  EXPECT_FALSE(call(stub, &wire::Host::Stub::Version, wire::Empty(), 2000, "a"));
}

std::string advice_of(const std::vector<PeerAnswer>& answers) { return judge_peer({}, answers.at(0), 0).at(0).advice; }

// The same, as doctor sees it.
TEST_F(Tls, DoctorAsksAndKnowsWhyNobodyAnswers) {
  const auto ask_facts = [&](const std::string& who, const std::string& expect, int port) {
    Config c;
    c.peers = {{expect, "127.0.0.1:" + std::to_string(port)}};
    Peers p(c, *pki::load(dir_ + who));
    return ask_peers(p, {expect, "nobody"}, 1);
  };
  const auto good = ask_facts("/ca/b", "a", port_);
  ASSERT_TRUE(good.at(0).facts) << good[0].facts.error().text;
  EXPECT_EQ(good[0].facts->version().name(), "a");
  EXPECT_LT(std::abs(good[0].ahead_ms), 1000);
  ASSERT_FALSE(good.at(1).facts);
  EXPECT_EQ(good[1].facts.error().code, ENOENT);
  EXPECT_NE(advice_of(ask_facts("/other/b", "a", port_)).find("certificates of the same CA"), std::string::npos) << ask_facts("/other/b", "a", port_)[0].facts.error().text;
  EXPECT_NE(advice_of(ask_facts("/ca/b", "c", port_)).find("certificates of the same CA"), std::string::npos) << ask_facts("/ca/b", "c", port_)[0].facts.error().text;
  server_->Shutdown();
  EXPECT_NE(advice_of(ask_facts("/ca/b", "a", port_)).find("start it on a"), std::string::npos) << ask_facts("/ca/b", "a", port_)[0].facts.error().text;
}

}  // namespace
