// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Who is backed up, and that a configuration that is wrong is refused by what is wrong in it.
#include "../../libmigr/links/config.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "migr/links_wire.h"

namespace {

using namespace migr::links;

constexpr char kTwo[] = R"("links": [{"device": "a"}, {"device": "b", "port": 2, "gid_index": 3}])";

std::string why(const std::string& rest, Config* out = nullptr, const std::string& process = "me") {
  Config config;
  const std::string text = parse("{" + rest + "}", process, config);
  if (out) *out = config;
  return text;
}

TEST(LinksConfig, LinksAreInOrderAndOffUnlessSaid) {
  Config c;
  ASSERT_EQ(why(kTwo, &c), "");
  ASSERT_EQ(c.links.size(), 2u);
  EXPECT_EQ(c.links[0].device, "a");
  EXPECT_EQ(c.links[0].port, 1u);
  EXPECT_EQ(c.links[0].gid_index, -1);
  EXPECT_EQ(c.links[1].port, 2u);
  EXPECT_EQ(c.links[1].gid_index, 3);
  EXPECT_FALSE(c.any_policy());
}

TEST(LinksConfig, AProcessGoesBeforeADeviceBeforeAll) {
  const std::string all = std::string(kTwo) + R"(, "policy": "exact", "devices": {"b": "off"}, "processes": {"me": "resend", "you": "off"})";
  Config c;
  ASSERT_EQ(why(all, &c, "other"), "");
  EXPECT_EQ(c.policy_of("a"), Policy::kExact);
  EXPECT_EQ(c.policy_of("b"), Policy::kOff);
  ASSERT_EQ(why(all, &c, "me"), "");
  EXPECT_EQ(c.policy_of("b"), Policy::kResend);
  ASSERT_EQ(why(all, &c, "you"), "");
  EXPECT_FALSE(c.any_policy());
}

TEST(LinksConfig, PathsGoTheSameWayByThemselves) {
  const std::string all = std::string(kTwo) + R"(, "policy": "exact", "paths": "rebuild", "devices": {"b": {"paths": "cached"}, "a": "resend"},
    "processes": {"me": {"paths": "cached"}, "you": {"policy": "off"}, "both": {"policy": "resend", "paths": "rebuild"}, "many": {"paths": "pool"}}, "pool": 3)";
  Config c;
  ASSERT_EQ(why(kTwo, &c), "");
  EXPECT_EQ(c.paths_of("a"), Paths::kCached);
  EXPECT_EQ(c.pool, 1u);
  ASSERT_EQ(why(all, &c, "many"), "");
  EXPECT_EQ(c.paths_of("b"), Paths::kPool);
  EXPECT_EQ(c.pool, 3u);
  ASSERT_EQ(why(all, &c, "other"), "");
  EXPECT_EQ(c.paths_of("a"), Paths::kRebuild);
  EXPECT_EQ(c.paths_of("b"), Paths::kCached);
  EXPECT_EQ(c.policy_of("a"), Policy::kResend);
  ASSERT_EQ(why(all, &c, "me"), "");
  EXPECT_EQ(c.paths_of("a"), Paths::kCached);
  EXPECT_EQ(c.policy_of("a"), Policy::kResend);  // of the policy it does not say anything
  ASSERT_EQ(why(all, &c, "you"), "");
  EXPECT_FALSE(c.any_policy());
  EXPECT_EQ(c.paths_of("b"), Paths::kCached);
  ASSERT_EQ(why(all, &c, "both"), "");
  EXPECT_EQ(c.paths_of("b"), Paths::kRebuild);
  EXPECT_EQ(c.policy_of("b"), Policy::kResend);
}

TEST(LinksConfig, AtomicsGoTheSameWayByThemselves) {
  const std::string all = std::string(kTwo) + R"(, "policy": "exact", "atomics": "relayed", "devices": {"b": {"atomics": "direct"}, "a": {"paths": "rebuild"}},
    "processes": {"me": {"atomics": "relayed"}, "you": {"atomics": "direct", "policy": "resend"}})";
  Config c;
  ASSERT_EQ(why(kTwo, &c), "");
  EXPECT_EQ(c.atomics_of("a"), Atomics::kDirect);
  ASSERT_EQ(why(all, &c, "other"), "");
  EXPECT_EQ(c.atomics_of("a"), Atomics::kRelayed);
  EXPECT_EQ(c.atomics_of("b"), Atomics::kDirect);
  EXPECT_EQ(c.paths_of("a"), Paths::kRebuild);
  ASSERT_EQ(why(all, &c, "me"), "");
  EXPECT_EQ(c.atomics_of("b"), Atomics::kRelayed);
  EXPECT_EQ(c.policy_of("b"), Policy::kExact);
  ASSERT_EQ(why(all, &c, "you"), "");
  EXPECT_EQ(c.atomics_of("a"), Atomics::kDirect);
  EXPECT_EQ(c.policy_of("a"), Policy::kResend);
}

TEST(LinksConfig, SoDoBackups) {
  const std::string all = std::string(kTwo) + R"(, "backups": 3, "devices": {"b": {"backups": 2}}, "processes": {"me": {"backups": 7}})";
  Config c;
  ASSERT_EQ(why(kTwo, &c), "");
  EXPECT_EQ(c.backups_of("a"), 1u);
  ASSERT_EQ(why(all, &c, "other"), "");
  EXPECT_EQ(c.backups_of("a"), 3u);
  EXPECT_EQ(c.backups_of("b"), 2u);
  ASSERT_EQ(why(all, &c, "me"), "");
  EXPECT_EQ(c.backups_of("b"), 7u);
}

TEST(LinksConfig, ProgramsWhoseSwapValuesAreUnique) {
  Config c;
  ASSERT_EQ(why(kTwo, &c, "kv"), "");
  EXPECT_FALSE(c.unique_swap);
  ASSERT_EQ(why(std::string(kTwo) + R"(, "unique_swap": ["db", "kv"])", &c, "kv"), "");
  EXPECT_TRUE(c.unique_swap);
  ASSERT_EQ(why(std::string(kTwo) + R"(, "unique_swap": ["db"])", &c, "kv"), "");
  EXPECT_FALSE(c.unique_swap);
  ASSERT_EQ(why(std::string(kTwo) + R"(, "unique_swap": true)", &c, "kv"), "");
  EXPECT_TRUE(c.unique_swap);
}

TEST(LinksConfig, WhatIsWrongIsNamed) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "\"links\""},
      {R"("links": {})", "\"links\""},
      {R"("links": [{}])", "\"device\""},
      {R"("links": [{"device": 7}])", "\"device\""},
      {R"("links": [7])", "link 0"},
      {R"("links": [{"device": "a", "prot": 1}])", "\"prot\""},
      {R"("links": [{"device": "a", "port": 0}])", "\"port\""},
      {R"("links": [{"device": "a", "gid_index": "1"}])", "\"gid_index\""},
      {R"("links": [{"device": "a"}, {"device": "a"}])", "named twice"},
      {std::string(kTwo) + R"(, "policy": "best")", "\"best\""},
      {std::string(kTwo) + R"(, "policy": 1)", "\"policy\""},
      {std::string(kTwo) + R"(, "paths": "cashed")", "\"cashed\"; there are \"cached\", \"rebuild\", \"pool\""},
      {std::string(kTwo) + R"(, "paths": 1)", "\"paths\""},
      {std::string(kTwo) + R"(, "atomics": "relay")", "\"relay\"; there are \"direct\", \"relayed\""},
      {std::string(kTwo) + R"(, "atomics": true)", "\"atomics\" is true"},
      {std::string(kTwo) + R"(, "backups": 0)", "\"backups\" is 0, not a number from 1 to 7"},
      {std::string(kTwo) + R"(, "processes": {"you": {"backups": "2"}})", "\"processes\": \"you\": \"backups\" is \"2\""},
      {std::string(kTwo) + R"(, "processes": {"me": {"atomics": 1}})", "\"processes\": \"me\": \"atomics\" is 1"},
      {std::string(kTwo) + R"(, "devices": [])", "\"devices\""},
      {std::string(kTwo) + R"(, "devices": {"a": {"paths": "no"}})", "\"devices\": \"a\": \"paths\" is \"no\""},
      {std::string(kTwo) + R"(, "devices": {"a": {"path": "cached"}})", "\"path\""},
      {std::string(kTwo) + R"(, "processes": {"me": "yes"})", "\"yes\""},
      {std::string(kTwo) + R"(, "unique_swap": "kv")", "\"kv\""},
      {std::string(kTwo) + R"(, "unique_swap": [7])", "7 is no program"},
      {std::string(kTwo) + R"(, "heartbeat_ms": -1)", "\"heartbeat_ms\""},
      {std::string(kTwo) + R"(, "heartbeat_misses": 0)", "\"heartbeat_misses\""},
      {std::string(kTwo) + R"(, "pool": 0)", "\"pool\""},
      {std::string(kTwo) + R"(, "pool": 1025)", "\"pool\""},
      {std::string(kTwo) + R"(, "switch_limit_ms": 1e9)", "\"switch_limit_ms\""},
      {std::string(kTwo) + R"(, "adrift_limit_ms": 0)", "\"adrift_limit_ms\""},
      {std::string(kTwo) + R"(, "polices": {})", "\"polices\""},
  };
  for (const auto& [text, named] : cases) EXPECT_NE(why(text).find(named), std::string::npos) << text << " -> " << why(text);
  EXPECT_NE(why(R"("links": [)"), "");
}

TEST(LinksConfig, CommentsAreAllowedAsInMigrdJson) {
  Config c;
  ASSERT_EQ(parse("// both NICs\n{" + std::string(kTwo) + ", /* for all */ \"policy\": \"exact\"}\n", "me", c), "");
  EXPECT_TRUE(c.any_policy());
}

TEST(LinksConfig, WhereItIsNoJsonIsSaid) {
  Config c;
  for (const auto& [text, where] : {std::pair{"{\"links\": [\n  {\"device\": \"a\"},\n  {\"device\" \"b\"}]}", "line 3, column 15: syntax error"}, {"", "line 1, column 1: "}, {"{\"links\": []}\n}", "line 2, column 1: "}})
    EXPECT_NE(parse(text, "me", c).find(where), std::string::npos) << text << " -> " << parse(text, "me", c);
  EXPECT_EQ(parse("[]", "me", c), "it is no JSON object");
}

class Environment : public testing::Test {
 protected:
  void SetUp() override { setenv("MIGR_LINKS", file_.c_str(), 1); }
  void TearDown() override {
    for (const char* name : {"MIGR_LINKS", "MIGR_POLICY"}) unsetenv(name);
    unlink(file_.c_str());
  }
  void write(const std::string& text) { std::ofstream(file_) << text; }
  const std::string file_ = "links_config_test." + std::to_string(getpid());
};

TEST_F(Environment, ThePolicyThereGoesBeforeTheFile) {
  write("{" + std::string(kTwo) + R"(, "policy": "off", "devices": {"a": "off"}})");
  EXPECT_FALSE(read_config().any_policy());
  setenv("MIGR_POLICY", "exact", 1);
  EXPECT_EQ(read_config().policy_of("a"), Policy::kExact);
  write("{" + std::string(kTwo) + R"(, "devices": {"a": {"policy": "off", "paths": "rebuild"}}})");
  EXPECT_EQ(read_config().policy_of("a"), Policy::kExact);
  EXPECT_EQ(read_config().paths_of("a"), Paths::kRebuild);
}

/// A migrd that answers one question with `status` and `text`.
class OneAnswer {
 public:
  OneAnswer(std::uint32_t status, std::string text) : listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    setenv("MIGR_LINKS_SOCKET", path_.c_str(), 1);
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::snprintf(at.sun_path, sizeof at.sun_path, "%s", path_.c_str());
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    thread_ = std::jthread([this, status, text = std::move(text)] {
      const int fd = accept(listener_, nullptr, nullptr);
      migr_links_msg m{};
      asked_ = recv(fd, &m, sizeof m, 0) == sizeof m ? m.type : 0;
      m.type |= MIGR_LINKS_REPLY;
      m.status = status;
      m.count = static_cast<std::uint32_t>(text.size());
      m.record_size = 1;
      std::string packet(reinterpret_cast<const char*>(&m), sizeof m);
      packet += text;
      EXPECT_EQ(send(fd, packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
      close(fd);
    });
  }
  ~OneAnswer() {
    thread_.join();
    EXPECT_EQ(asked_, MIGR_LINKS_CONFIG);
    close(listener_);
    unlink(path_.c_str());
  }

 private:
  const std::string path_ = "links_config_test.sock." + std::to_string(getpid());
  const int listener_;
  std::uint16_t asked_ = 0;
  std::jthread thread_;
};

class WithoutFile : public Environment {
 protected:
  void SetUp() override {
    if (!access(kDefaultFile, F_OK)) GTEST_SKIP() << kDefaultFile << " is there";
    unsetenv("MIGR_LINKS");
    setenv("MIGR_LINKS_SOCKET", "/nonexistent/links.sock", 1);
  }
  void TearDown() override {
    unsetenv("MIGR_LINKS_SOCKET");
    Environment::TearDown();
  }
};

TEST_F(WithoutFile, MigrdIsAskedForThatOfTheHost) {
  OneAnswer migrd(0, "{" + std::string(kTwo) + R"(, "policy": "exact"})");
  EXPECT_EQ(read_config().policy_of("a"), Policy::kExact);
}

TEST_F(WithoutFile, NothingIsConfiguredWhereMigrdHasNoneOrIsNotThere) {
  testing::internal::CaptureStderr();
  {
    OneAnswer migrd(0, "");
    EXPECT_FALSE(read_config().any_policy());
  }
  setenv("MIGR_LINKS_SOCKET", "/nonexistent/links.sock", 1);
  EXPECT_FALSE(read_config().any_policy());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(WithoutFile, WhatMigrdCannotReadIsSaid) {
  testing::internal::CaptureStderr();
  OneAnswer migrd(EINVAL, "");
  EXPECT_FALSE(read_config().any_policy());
  EXPECT_NE(testing::internal::GetCapturedStderr().find(kDefaultFile), std::string::npos);
}

TEST_F(Environment, WhatIsWrongTurnsEverythingOffAndIsSaid) {
  setenv("MIGR_POLICY", "exact", 1);
  for (const char* text : {"{", "{}"}) {
    write(text);
    testing::internal::CaptureStderr();
    EXPECT_FALSE(read_config().any_policy());
    EXPECT_NE(testing::internal::GetCapturedStderr().find(file_), std::string::npos);
  }
  write("{" + std::string(kTwo) + "}");
  setenv("MIGR_POLICY", "exakt", 1);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(read_config().any_policy());
  EXPECT_NE(testing::internal::GetCapturedStderr().find("exakt"), std::string::npos);
}

}  // namespace
