// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The test CA, and that only its hosts can talk.
#include "agent/pki.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <thread>

#include "agent/certificates.h"
#include "agent/doctor.h"
#include "agent/file_tree.h"
#include "agent/host_service.h"
#include "agent/peer_link.h"
#include "temp_folder.h"

namespace migr::pki_test {
namespace {

namespace fs = std::filesystem;

class Pki : public ::testing::Test {
 protected:
  mode_t mode(const std::string& p) {
    struct stat st{};
    EXPECT_EQ(stat((dir_ + "/" + p).c_str(), &st), 0) << p;
    return st.st_mode & 07777;
  }
  const TempFolder temp_;
  const std::string dir_ = temp_.path;
};

TEST_F(Pki, KeysAreForTheirOwnerOnly) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "src", {"10.0.0.1"}));
  EXPECT_EQ(mode("ca/ca.key"), 0600u);
  EXPECT_EQ(mode("ca/src/host.key"), 0600u);
  EXPECT_TRUE(pki::load(dir_ + "/ca/src"));
}

// Threads of gRPC may be in the middle of a handshake.
TEST_F(Pki, OpensslStaysWhenAProcessExits) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  const auto exits = [] {
    OPENSSL_atexit([] { std::_Exit(4); });
    std::exit(0);
  };
  EXPECT_EXIT(exits(), ::testing::ExitedWithCode(0), "");
}

TEST_F(Pki, SecondInitIsEEXIST) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  auto s = pki::init(dir_ + "/ca");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EEXIST);
}

// Hosts trust its ca.pem.
TEST_F(Pki, InitOfACaWhoseKeyIsElsewhereIsEEXIST) {
  ASSERT_TRUE(pki::init(dir_ + "/ca"));
  const std::string pem = text_of(dir_ + "/ca/ca.pem");
  fs::rename(dir_ + "/ca/ca.key", dir_ + "/ca.key");
  const std::string why = dir_ + "/ca holds ca.pem of a CA whose key is elsewhere: bring ca.key back, or name another folder";
  auto s = pki::init(dir_ + "/ca");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EEXIST);
  EXPECT_EQ(s.error().text, why);
  EXPECT_EQ(text_of(dir_ + "/ca/ca.pem"), pem);
  EXPECT_FALSE(fs::exists(dir_ + "/ca/ca.key"));
  s = pki::issue_host(dir_ + "/ca", "src", {});
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().text, why);
  fs::rename(dir_ + "/ca.key", dir_ + "/ca/ca.key");
  EXPECT_TRUE(pki::issue_host(dir_ + "/ca", "src", {}));
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

/// Counts what arrives.
struct Arrivals final : Role {
  wire::OutcomeReply outcome(std::uint32_t) override { return {}; }
  Status renew(std::uint32_t, const Caller&) override {
    if (look) look();
    return ++calls, Status();
  }
  std::atomic<int> calls = 0;
  std::function<void()> look;
};

int connected_to(int port) {
  const sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(static_cast<std::uint16_t>(port)), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) return fd;
  close(fd);
  return -1;
}

/// Who sits on the cable: one connection goes through it, and it may write down and change what the client says.
class Cable {
 public:
  using Change = std::function<void(std::size_t so_far, std::string& bytes)>;
  explicit Cable(int to, Change change = [](std::size_t, std::string&) {}) : change_(std::move(change)) {
    sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof at;
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&at), size), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port = ntohs(at.sin_port);
    thread_ = std::thread([this, to] { carry(to); });
  }
  ~Cable() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  std::string said() {
    std::lock_guard lock(mutex_);
    return said_;
  }
  int port = 0;

 private:
  void carry(int to) {
    const int client = accept(listener_, nullptr, nullptr);
    if (client < 0) return;
    const int server = connected_to(to);
    pollfd ends[] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
    for (char part[4096]; poll(ends, 2, 10'000) > 0;) {
      const bool up = ends[0].revents;
      const ssize_t n = read(up ? client : server, part, sizeof part);
      if (n <= 0) break;
      std::string bytes(part, static_cast<std::size_t>(n));
      if (up) {
        std::lock_guard lock(mutex_);
        change_(said_.size(), bytes);
        said_ += bytes;
      }
      if (write(up ? server : client, bytes.data(), bytes.size()) != n) break;
    }
    close(client), close(server);
  }
  const Change change_;
  int listener_ = -1;
  std::mutex mutex_;
  std::string said_;
  std::thread thread_;
};

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
    config_.hosts = Hosts{{{"b", "b:7471"}}, {}};
    files_ = std::make_unique<Peers>(config_, *pki::load(dir_ + "/ca/a"));
    service_ = std::make_unique<HostService>(config_, sessions_, numbers_, std::vector<Role*>{&arrivals_});
    grpc::ServerBuilder b;
    b.AddListeningPort("127.0.0.1:0", files_->server_credentials(), &port_);
    b.RegisterService(service_.get());
    set_bulk(b);
    server_ = b.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override {
    server_->Shutdown();
    Pki::TearDown();
  }
  Result<wire::VersionReply> ask(const std::string& who, const std::string& expect) {
    Config c;
    c.hosts = Hosts{{{expect, "127.0.0.1:" + std::to_string(port_)}}, {}};
    Peers p(c, *pki::load(dir_ + who));
    wire::Host::Stub stub(*p.channel(expect));
    return call(stub, &wire::Host::Stub::Version, wire::Empty(), 2000, expect);
  }
  /// b calls a over this port. @return whether it was answered
  bool renew(int port) {
    Config c;
    c.hosts = Hosts{{{"a", "127.0.0.1:" + std::to_string(port)}}, {}};
    Peers p(c, *pki::load(dir_ + "/ca/b"));
    wire::Host::Stub stub(*p.channel("a"));
    return bool(call(stub, &wire::Host::Stub::Renew, wire::Migration(), 2000, "a"));
  }
  Config config_;
  Numbers numbers_{config_};
  SessionTable sessions_;
  Arrivals arrivals_;
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

TEST_F(Tls, WhatIsChangedOnTheWayIsNotTaken) {
  std::size_t whole = 0;  // until the call has arrived
  {
    Cable cable(port_);
    arrivals_.look = [&] { whole = cable.said().size(); };
    ASSERT_TRUE(renew(cable.port));
    arrivals_.look = nullptr;
  }
  ASSERT_EQ(arrivals_.calls, 1);
  for (const std::size_t at : {std::size_t{60}, whole / 2, whole * 9 / 10}) {  // of the hello, of the certificate, of the call
    Cable cable(port_, [at](std::size_t so_far, std::string& bytes) {
      if (at >= so_far && at < so_far + bytes.size()) bytes[at - so_far] ^= 1;
    });
    EXPECT_FALSE(renew(cable.port)) << "byte " << at << " of " << whole;
    EXPECT_EQ(arrivals_.calls, 1) << "byte " << at << " of " << whole;
  }
}

TEST_F(Tls, WhatIsSaidAgainIsNotTakenAgain) {
  Cable cable(port_);
  ASSERT_TRUE(renew(cable.port));
  ASSERT_EQ(arrivals_.calls, 1);
  const std::string said = cable.said();
  const int fd = connected_to(port_);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(write(fd, said.data(), said.size()), static_cast<ssize_t>(said.size()));
  // It answers the hello, and hangs up at the first word that was not meant for this connection.
  pollfd end{fd, POLLIN, 0};
  char part[4096];
  ssize_t n = 1;
  while (n > 0 && poll(&end, 1, 10'000) > 0) n = read(fd, part, sizeof part);
  EXPECT_LE(n, 0) << "the connection stands";
  close(fd);
  EXPECT_EQ(arrivals_.calls, 1);
  EXPECT_TRUE(renew(port_)) << "after it others are heard";
  EXPECT_EQ(arrivals_.calls, 2);
}

// What is larger than the keys of the largest container is not even kept in memory, and the connection goes on.
TEST_F(Tls, AnOversizedMessageIsRefusedAndTheNextIsAnswered) {
  Config c;
  c.hosts = Hosts{{{"a", "127.0.0.1:" + std::to_string(port_)}}, {}};
  Peers p(c, *pki::load(dir_ + "/ca/b"));
  wire::Host::Stub stub(*p.channel("a"));
  const auto release = [&](std::size_t bytes) {
    wire::ReleaseRequest r;
    r.add_instances(std::string(bytes, 'x'));
    const auto s = call(stub, &wire::Host::Stub::Release, r, 10'000, "a");
    return s ? 0 : s.error().code;
  };
  EXPECT_EQ(release(4 << 20), EINVAL) << "it is read, and is no name of a process";
  EXPECT_EQ(release(kAnswerBytes + 1), ENOSPC) << "RESOURCE_EXHAUSTED";
  EXPECT_TRUE(call(stub, &wire::Host::Stub::Version, wire::Empty(), 5000, "a")) << "on the same connection";
}

// ---- new files while it runs

/// Host a as migrd serves it, and the folder of its certificate; host b asks.
class Rotation : public Pki {
 protected:
  void SetUp() override {
    Pki::SetUp();
    for (const char* ca : {"ca", "other"}) {
      ASSERT_TRUE(pki::init(dir_ + "/" + ca));
      for (const char* h : {"a", "b"}) ASSERT_TRUE(pki::issue_host(dir_ + "/" + ca, h, {}));
    }
    fs::create_directory(dir_ + "/pki");
    put("ca/a");
    config_.name = "a", config_.pki = dir_ + "/pki";
    config_.hosts = Hosts{{{"b", "b:7471"}}, {}};
    certificates_ = std::make_unique<Certificates>(config_, dir_ + "/tls");
    ASSERT_TRUE(certificates_->start());
    peers_ = std::make_unique<Peers>(config_, *certificates_);
    service_ = std::make_unique<HostService>(config_, sessions_, numbers_, std::vector<Role*>(), certificates_.get());
    grpc::ServerBuilder b;
    b.AddListeningPort("127.0.0.1:0", peers_->server_credentials(), &port_);
    b.RegisterService(service_.get());
    server_ = b.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override {
    if (server_) server_->Shutdown();
    Pki::TearDown();
  }
  void put(const std::string& from, std::initializer_list<const char*> names = {"ca.pem", "host.pem", "host.key"}) {
    for (const char* n : names) fs::copy_file(dir_ + "/" + from + "/" + n, dir_ + "/pki/" + n, fs::copy_options::overwrite_existing);
  }
  void look() { certificates_->look(), certificates_->look(); }
  void trust_both(const std::string& folder) { std::ofstream(dir_ + "/" + folder + "/ca.pem") << text_of(dir_ + "/ca/ca.pem") << text_of(dir_ + "/other/ca.pem"); }

  /// A host that asks, with connections of its own.
  struct Client {
    Client(const std::string& folder, int port) : config(asks(port)), peers(config, *pki::load(folder)), stub(*peers.channel("a")) {}
    static Config asks(int port) {
      Config c;
      c.name = "b", c.hosts = Hosts{{{"a", "127.0.0.1:" + std::to_string(port)}}, {}};
      return c;
    }
    /// The certificate that the server showed; empty: none was taken.
    std::string sees() {
      grpc::ClientContext ctx;
      set_deadline(ctx, 5000);
      wire::VersionReply reply;
      if (const auto s = stub.Version(&ctx, {}, &reply); !s.ok()) return "";
      refused = reply.certificate_refused();
      for (const auto& v : ctx.auth_context()->FindPropertyValues("x509_pem_cert")) return {v.data(), v.size()};
      return "";
    }
    Config config;
    Peers peers;
    wire::Host::Stub stub;
    std::string refused;
  };
  std::string shown_to(const std::string& folder) { return Client(dir_ + "/" + folder, port_).sees(); }
  std::string pem(const std::string& path) { return text_of(dir_ + "/" + path + "/host.pem"); }
  /// gRPC looks once a second.
  bool is_shown(const std::string& folder, const std::string& certificate) {
    for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10); std::chrono::steady_clock::now() < until; usleep(100'000))
      if (shown_to(folder) == certificate) return true;
    return false;
  }
  void expect_refused(const char* why) {
    const auto before = shown_to("ca/b");
    ASSERT_NE(before, "");
    look();
    EXPECT_NE(certificates_->refused().find(why), std::string::npos) << certificates_->refused();
    usleep(1'500'000);
    Client c(dir_ + "/ca/b", port_);
    EXPECT_EQ(c.sees(), before);
    EXPECT_EQ(c.refused, certificates_->refused());
  }

  Config config_;
  Numbers numbers_{config_};
  SessionTable sessions_;
  std::unique_ptr<Certificates> certificates_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<HostService> service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

TEST_F(Rotation, NewConnectionsGetTheNewCertificateAndOldOnesGoOn) {
  const auto old = pem("ca/a");
  Client stays(dir_ + "/ca/b", port_);
  ASSERT_EQ(stays.sees(), old);
  const auto before = certificates_->ends_s();
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}, 100));
  ASSERT_NE(pem("ca/a"), old);
  put("ca/a");
  certificates_->look();
  EXPECT_EQ(certificates_->ends_s(), before) << "files that are just being copied are left alone";
  certificates_->look();
  EXPECT_LT(certificates_->ends_s(), before);
  EXPECT_EQ(certificates_->refused(), "");
  EXPECT_TRUE(is_shown("ca/b", pem("ca/a")));
  EXPECT_EQ(stays.sees(), old);
}

TEST_F(Rotation, ACertificateThatOutlivesItsCaEndsWithIt) {
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}, pki::kCaDays + 100));
  put("ca/a");
  for (int i = 0; i < 2; i++) certificates_->look();
  ASSERT_EQ(certificates_->refused(), "");
  const auto c = pki::read(certificates_->in_use().files, "a");
  ASSERT_TRUE(c);
  EXPECT_LT(c->ca_ends_s, c->ends_s);
  EXPECT_EQ(certificates_->ends_s(), c->ca_ends_s);
}

TEST_F(Rotation, ACallThatIsUnderWayIsNotDisturbed) {
  struct Slow final : wire::Destination::Service {
    grpc::Status Upload(grpc::ServerContext*, grpc::ServerReader<wire::UploadChunk>* r, wire::UploadReply* out) override {
      wire::UploadChunk c;
      std::uint32_t files = 0;
      while (r->Read(&c)) files++;
      out->set_files(files);
      return grpc::Status::OK;
    }
  } slow;
  int port = 0;
  grpc::ServerBuilder b;
  b.AddListeningPort("127.0.0.1:0", peers_->server_credentials(), &port);
  b.RegisterService(&slow), b.RegisterService(service_.get());
  const auto server = b.BuildAndStart();
  Client c(dir_ + "/ca/b", port);
  wire::Destination::Stub stub(*c.peers.channel("a"));
  grpc::ClientContext ctx;
  wire::UploadReply reply;
  const auto writer = stub.Upload(&ctx, &reply);
  ASSERT_TRUE(writer->Write({}));
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}));
  put("ca/a");
  look();
  EXPECT_TRUE(is_shown("ca/b", pem("ca/a")));
  ASSERT_TRUE(writer->Write({}));
  writer->WritesDone();
  EXPECT_TRUE(writer->Finish().ok());
  EXPECT_EQ(reply.files(), 2u);
  server->Shutdown();
}

TEST_F(Rotation, FromOneCaToAnotherWithBothInBetween) {
  // Both trust both; then one host after the other gets its new certificate; then the old CA goes.
  trust_both("pki"), trust_both("ca/b"), trust_both("other/b");
  look();
  EXPECT_EQ(certificates_->refused(), "");
  EXPECT_TRUE(is_shown("ca/b", pem("ca/a")));
  put("other/a", {"host.pem", "host.key"});
  look();
  EXPECT_EQ(certificates_->refused(), "");
  EXPECT_TRUE(is_shown("ca/b", pem("other/a")));
  EXPECT_EQ(shown_to("other/b"), pem("other/a"));
  put("other/a", {"ca.pem"});
  look();
  EXPECT_EQ(certificates_->refused(), "");
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10); !shown_to("ca/b").empty() && std::chrono::steady_clock::now() < until;) usleep(100'000);
  EXPECT_EQ(shown_to("ca/b"), "") << "a certificate of the old CA opens nothing any more";
  EXPECT_EQ(shown_to("other/b"), pem("other/a"));
}

// As a client, too.
TEST_F(Rotation, ANewCertificateIsShownToServersThatTrustOnlyItsCa) {
  Config c;
  c.name = "b", c.pki = dir_ + "/pki", c.hosts = Hosts{{{"a", "127.0.0.1:1"}}, {}};
  server_->Shutdown();
  Config server_config = config_;
  Peers server_peers(server_config, *pki::load(dir_ + "/other/a"));
  grpc::ServerBuilder b;
  int port = 0;
  b.AddListeningPort("127.0.0.1:0", server_peers.server_credentials(), &port);
  b.RegisterService(service_.get());
  const auto server = b.BuildAndStart();
  c.hosts = Hosts{{{"a", "127.0.0.1:" + std::to_string(port)}}, {}};
  put("ca/b");
  Certificates mine(c, dir_ + "/tls-b");
  ASSERT_TRUE(mine.start());
  Peers peers(c, mine);
  const auto version = [&] {
    wire::Host::Stub stub(*peers.channel("a"));
    return call(stub, &wire::Host::Stub::Version, wire::Empty(), 2000, "a");
  };
  EXPECT_FALSE(version());
  put("other/b");
  mine.look(), mine.look();
  Result<wire::VersionReply> v = Error{};
  for (int i = 0; i < 50 && !v; i++, usleep(100'000)) v = version();
  EXPECT_TRUE(v) << v.error().text;
  server->Shutdown();
}

TEST_F(Rotation, AKeyOfAnotherCertificateIsNotTaken) {
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}));
  put("ca/a", {"host.key"});
  expect_refused("do not belong together");
  put("ca/a");  // the rest has arrived
  look();
  EXPECT_EQ(certificates_->refused(), "");
  EXPECT_TRUE(is_shown("ca/b", pem("ca/a")));
}

TEST_F(Rotation, ACertificateOfAnotherCaIsNotTaken) {
  put("other/a", {"host.pem", "host.key"});
  expect_refused("not signed by the CA");
}

TEST_F(Rotation, AnExpiredCertificateIsNotTaken) {
  ASSERT_TRUE(pki::issue_host(dir_ + "/ca", "a", {}, 0));
  put("ca/a");
  expect_refused("it expired on");
}

TEST_F(Rotation, ACertificateOfAnotherHostIsNotTaken) {
  put("ca/b");
  expect_refused("it is for 'b', and this host is 'a'");
}

TEST_F(Rotation, NonsenseAndAKeyThatOthersCanReadAreNotTaken) {
  std::ofstream(dir_ + "/pki/host.pem") << "no certificate";
  expect_refused("host.pem is not in PEM");
  put("ca/a");
  chmod((dir_ + "/pki/host.key").c_str(), 0644);
  expect_refused("readable for others");
}

TEST_F(Rotation, WhatIsInUseIsForItsOwnerOnly) {
  EXPECT_EQ(mode("tls"), 0700u);
  EXPECT_EQ(mode("tls/identity.pem"), 0600u);
}

TEST_F(Rotation, TwoCasOfTheSameNameAreToldApart) {
  trust_both("pki");
  for (const char* ca : {"ca", "other"}) {
    auto files = *pki::load(dir_ + "/" + ca + "/a");
    files.ca = text_of(dir_ + "/pki/ca.pem");
    const auto c = pki::read(files, "a");
    ASSERT_TRUE(c);
    EXPECT_TRUE(c->of_ca) << ca;
  }
}

std::string advice_of(const std::vector<PeerAnswer>& answers) { return judge_peer({}, answers.at(0), 0).at(0).advice; }

// The same, as doctor sees it.
TEST_F(Tls, DoctorAsksAndKnowsWhyNobodyAnswers) {
  const auto ask_facts = [&](const std::string& who, const std::string& expect, int port) {
    Config c;
    c.hosts = Hosts{{{expect, "127.0.0.1:" + std::to_string(port)}}, {}};
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
}  // namespace migr::pki_test
