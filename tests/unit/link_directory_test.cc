// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The directory of links over two hosts: gRPC with mutual TLS over loopback, and a real redis-server. Both engines have to
// give the same answers to the same questions; then what is only one's.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <fstream>
#include <future>

#include "agent/control_service.h"
#include "agent/failover/link_socket.h"
#include "agent/failover/peer_directory.h"
#include "agent/failover/redis_directory.h"
#include "agent/pki.h"
#include "link_library.h"

namespace migr::link_directory_test {
namespace {

using namespace std::chrono_literals;

class RedisServer {
 public:
  explicit RedisServer(std::string folder, std::string password = {}) : folder_(std::move(folder)), password_(std::move(password)) { start(); }
  ~RedisServer() { stop(); }
  std::string address() const { return folder_ + "/redis.sock"; }
  void start() {
    pid_ = fork();
    ASSERT_GE(pid_, 0);
    if (pid_ == 0) {
      const std::string log = folder_ + "/redis.log", sock = address();
      if (password_.empty())
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", sock.c_str(), "--save", "", "--logfile", log.c_str(), nullptr);
      else
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", sock.c_str(), "--save", "", "--logfile", log.c_str(), "--requirepass",
               password_.c_str(), nullptr);
      _exit(127);
    }
    ASSERT_TRUE(soon([&] { return connects(); }, 60'000)) << "redis-server does not start; is the package redis-server installed?";
  }
  void stop() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    unlink(address().c_str());
    pid_ = -1;
  }
  // Stopped in the middle of its work: it takes connections and says nothing.
  void freeze() { kill(pid_, SIGSTOP); }
  void thaw() { kill(pid_, SIGCONT); }

 private:
  bool connects() const {
    const Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, address().c_str());
    return connect(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0;
  }
  const std::string folder_, password_;
  pid_t pid_ = -1;
};

/// migrd's part for links, of one host.
class HostUnderTest {
 public:
  /// @param redis  address; empty: peers
  HostUnderTest(const std::string& folder, std::uint8_t number, const std::string& redis, RedisDirectory::Times times = quick())
      : name(std::string(1, static_cast<char>('a' + number - 1))), folder_(folder) {
    config.name = name;
    config.redis.address = redis;
    peers = std::make_unique<Peers>(config, *pki::load(folder + "/ca/" + name));
    table = std::make_unique<LinkTable>(name);
    const auto knock = [this](const Instance& to, const migr_links_channel& from) { socket->knock(to, from); };
    const auto gids = [number] {
      Gid gid{};
      std::uint8_t bytes[16];
      put_gid(bytes, number, 1);
      std::copy(bytes, bytes + 16, gid.begin());
      return std::set<Gid>{gid};
    };
    if (redis.empty()) {
      directory = std::make_unique<PeerDirectory>(*peers, *table);
    } else {
      auto r = std::make_unique<RedisDirectory>(config.redis, name, *table, gids, knock, times);
      engine = r.get();
      table->set_watcher(engine);
      directory = std::move(r);
    }
    table->set_gids(gids);
    table->set_knock(knock);
    service = std::make_unique<LinksService>(*table);
    socket = std::make_unique<LinkSocket>(*table, *directory, [] { return std::vector<migr_links_port>(1); }, "");
    if (engine) engine->start();
    EXPECT_TRUE(socket->start(path()));
    serve(true);
  }
  ~HostUnderTest() {
    hang_up();
    if (engine) engine->stop();
    socket->stop();
  }
  static RedisDirectory::Times quick() { return {5000ms, 200ms, 60000ms, 50ms}; }
  std::string path() const { return folder_ + "/" + name + ".sock"; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port); }
  /// @param links  false: as a migrd of an older release
  void serve(bool links) {
    grpc::ServerBuilder b;
    set_keepalive(b);
    b.AddListeningPort("127.0.0.1:" + std::to_string(port), peers->server_credentials(), port ? nullptr : &port);
    b.RegisterService(links ? static_cast<grpc::Service*>(service.get()) : &nothing);
    server = b.BuildAndStart();
    ASSERT_NE(server, nullptr);
  }
  void hang_up() {
    if (server) server->Shutdown(std::chrono::system_clock::now());
    server.reset();
  }

  const std::string name;
  Config config;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<LinkTable> table;
  std::unique_ptr<LinkDirectory> directory;
  RedisDirectory* engine = nullptr;
  std::unique_ptr<LinkSocket> socket;
  std::unique_ptr<LinksService> service;
  wire::Links::Service nothing;
  std::unique_ptr<grpc::Server> server;
  int port = 0;

 private:
  const std::string folder_;
};

/// Two hosts, "a" and "b"; their GIDs are those of link_library.h with 1 and 2.
class TwoHosts : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    signal(SIGPIPE, SIG_IGN);  // as migrd does: hiredis does not
    ASSERT_TRUE(pki::init(dir_.path + "/ca"));
    for (const char* h : {"a", "b"}) ASSERT_TRUE(pki::issue_host(dir_.path + "/ca", h, {}));
    if (std::string(GetParam()) == "redis") redis_ = std::make_unique<RedisServer>(dir_.path);
    a_ = std::make_unique<HostUnderTest>(dir_.path, 1, redis_ ? redis_->address() : "");
    b_ = std::make_unique<HostUnderTest>(dir_.path, 2, redis_ ? redis_->address() : "");
    a_->config.hosts = Hosts{{{"a", a_->address()}, {"b", b_->address()}}, {}};
    b_->config.hosts = Hosts{{{"a", a_->address()}}, {}};
  }
  static migr_links_found one(LinkLibrary& l, const migr_links_name& n, std::string* text = nullptr) {
    const auto r = l.ask<migr_links_name>(MIGR_LINKS_LOOKUP, {n});
    EXPECT_EQ(r.head.status, 0) << r.head.text;
    if (text) *text = r.head.text;
    return r.as<migr_links_found>().at(0);
  }
  static migr_links_channel one(LinkLibrary& l, const migr_links_channel& c) {
    return l.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {c}).as<migr_links_channel>().at(0);
  }
  // As a library does: asks again while it is told to, and while the other host has not told the engine of its process or GID.
  template <class What>
  static auto asked(LinkLibrary& l, const What& what) {
    auto r = one(l, what);
    const auto told = [&] { return r.status != EAGAIN && r.status != ENOENT; };
    EXPECT_TRUE(soon([&] { return told() || (r = one(l, what), told()); }));
    return r;
  }
  static void told(LinkLibrary& l, std::uint8_t host) {
    ASSERT_EQ(l.hello().head.status, 0);
    ASSERT_EQ(l.ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(host, 0), link_of(host, 1)}).head.status, 0);
  }
  TempFolder dir_;
  std::unique_ptr<RedisServer> redis_;
  std::unique_ptr<HostUnderTest> a_, b_;
};

// By another thread: a host with a thousand GIDs takes a moment.
TEST(HomeOfAGid, IsNotDeniedWhileItIsLookedFor) {
  const Gid mine{1};
  std::promise<void> asked, read;
  LinkTable table("host");
  table.set_gids([&] {
    asked.set_value();
    read.get_future().wait();
    return std::set<Gid>{mine};
  });
  const auto home = [&] { return table.home(mine); };
  auto first = std::async(std::launch::async, home);
  asked.get_future().wait();
  auto second = std::async(std::launch::async, home);
  EXPECT_EQ(second.wait_for(50ms), std::future_status::timeout);
  read.set_value();
  EXPECT_TRUE(first.get());
  EXPECT_TRUE(second.get());
}

TEST_P(TwoHosts, LookupBeforePublishIsEAGAINAndThenFound) {
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  auto f = one(b, link_name(1, 5));
  // Redis has to be told of the GID first.
  soon([&] { return (f = one(b, link_name(1, 5))).status == EAGAIN; });
  EXPECT_EQ(f.status, EAGAIN);
  EXPECT_EQ(f.vqp.paths, 0u);
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  f = asked(b, link_name(1, 5));
  ASSERT_EQ(f.status, 0);
  const auto vqp = link_vqp(1, 5);
  EXPECT_EQ(std::memcmp(&f.vqp, &vqp, sizeof vqp), 0);
  EXPECT_EQ(gid_of(f.instance), a.instance());
  EXPECT_STREQ(f.host, "a");
  ASSERT_EQ(f.links, 2u);
  EXPECT_EQ(std::memcmp(f.gid[1], link_of(1, 1).gid, 16), 0);
  // Told anew, with a path that was made anew.
  auto again = vqp;
  again.path[1].serial = 1;
  again.path[1].qpn = 4711;
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {again}).head.status, 0);
  EXPECT_TRUE(soon([&] { return one(b, link_name(1, 5)).vqp.path[1].qpn == 4711; }));
}

TEST_P(TwoHosts, WithdrawnAndEndedIsEAGAINAgain) {
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5), link_vqp(1, 6)}).head.status, 0);
  ASSERT_EQ(asked(b, link_name(1, 5)).status, 0);
  ASSERT_EQ(asked(b, link_name(1, 6)).status, 0);
  ASSERT_EQ(a.ask<migr_links_name>(MIGR_LINKS_WITHDRAW, {link_name(1, 5)}).head.status, 0);
  EXPECT_TRUE(soon([&] { return one(b, link_name(1, 5)).status == EAGAIN; }));
  EXPECT_EQ(one(b, link_name(1, 6)).status, 0) << "the other stays";
  a.close();
  EXPECT_TRUE(soon([&] { return one(b, link_name(1, 6)).status == EAGAIN; }));
}

TEST_P(TwoHosts, AGidThatNobodyHasIsENOENT) {
  LinkLibrary a(a_->path(), 1);
  told(a, 1);
  std::string text;
  EXPECT_EQ(one(a, link_name(9, 5), &text).status, ENOENT);
  EXPECT_NE(text.find("10.9.0.1"), std::string::npos) << text;
}

TEST_P(TwoHosts, WhoHasMovedIsFoundByItsBirthName) {
  LinkLibrary b(b_->path(), 2), before(a_->path(), 3);
  told(before, 1);
  ASSERT_EQ(before.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  told(b, 2);
  ASSERT_EQ(asked(b, link_name(1, 5)).status, 0);
  before.close();
  EXPECT_TRUE(soon([&] { return one(b, link_name(1, 5)).status == EAGAIN; }));
  // It comes to b, with its name of a.
  OtherProcess other(b_->path());
  LinkLibrary after(other.take(), 3);
  told(after, 2);
  ASSERT_EQ(after.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_STREQ(asked(b, link_name(1, 5)).host, "b");
  LinkLibrary a(a_->path(), 1);
  told(a, 1);
  EXPECT_STREQ(asked(a, link_name(1, 5)).host, "b");
  EXPECT_EQ(one(a, link_channel(after.instance(), 1, 1, 100)).status, EAGAIN);
  EXPECT_EQ(after.push(MIGR_LINKS_KNOCK).as<migr_links_channel>().at(0).qpn, 100u);
}

TEST_P(TwoHosts, TwoEndsOfAChannelMeet) {
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  const auto of_a = link_channel(b.instance(), 1, 1, 100), of_b = link_channel(a.instance(), 2, 1, 200);
  // The engine may not know the process yet.
  EXPECT_TRUE(soon([&] { return one(a, of_a).status == EAGAIN; }));
  const auto knock = b.push(MIGR_LINKS_KNOCK).as<migr_links_channel>().at(0);
  EXPECT_EQ(gid_of(knock.peer), a.instance());
  EXPECT_EQ(knock.round, 1u);
  const auto at_b = asked(b, of_b), at_a = asked(a, of_a);
  EXPECT_EQ(at_b.status, 0);
  EXPECT_EQ(at_b.qpn, 100u);
  EXPECT_EQ(gid_of(at_b.gid), gid_of(of_a.gid));
  EXPECT_EQ(gid_of(at_b.peer), a.instance());
  EXPECT_EQ(at_a.status, 0);
  EXPECT_EQ(at_a.qpn, 200u);
  // b makes another, and a is behind.
  auto next = of_b;
  next.round = 2, next.qpn = 201;
  EXPECT_EQ(one(b, next).status, EAGAIN);
  EXPECT_TRUE(soon([&] { return one(a, of_a).status == ESTALE; }));
  EXPECT_EQ(one(a, of_a).round, 2u);
}

TEST_P(TwoHosts, AChannelToNobodyIsENOENT) {
  LinkLibrary a(a_->path(), 1);
  told(a, 1);
  EXPECT_EQ(one(a, link_channel(Instance{77}, 1, 1, 100)).status, ENOENT);
}

TEST_P(TwoHosts, ManyNamesInOneQuestion) {
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  std::vector<migr_links_vqp> vqps;
  std::vector<migr_links_name> names;
  for (std::uint32_t i = 1; i <= MIGR_LINKS_MAX_RECORDS; i++) {
    if (i % 2) vqps.push_back(link_vqp(1, i));
    names.push_back(link_name(1, i));
  }
  ASSERT_EQ(a.ask(MIGR_LINKS_PUBLISH, vqps).head.status, 0);
  ASSERT_EQ(asked(b, link_name(1, MIGR_LINKS_MAX_RECORDS - 1)).status, 0);
  const auto found = b.ask(MIGR_LINKS_LOOKUP, names).as<migr_links_found>();
  ASSERT_EQ(found.size(), names.size());
  for (std::uint32_t i = 1; i <= MIGR_LINKS_MAX_RECORDS; i++) {
    EXPECT_EQ(found[i - 1].status, i % 2 ? 0 : EAGAIN) << i;
    EXPECT_EQ(found[i - 1].vqp.name.vqpn, i);
  }
}

INSTANTIATE_TEST_SUITE_P(Engine, TwoHosts, ::testing::Values("peers", "redis"), [](const auto& p) { return std::string(p.param); });

// ---- peers only

class PeersOnly : public TwoHosts {};
INSTANTIATE_TEST_SUITE_P(Engine, PeersOnly, ::testing::Values("peers"));

TEST_P(PeersOnly, AHostThatDoesNotAnswerIsEHOSTUNREACHAndNamed) {
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  ASSERT_EQ(b.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(2, 5)}).head.status, 0);
  b_->hang_up();
  std::string text;
  EXPECT_EQ(one(a, link_name(2, 5), &text).status, EHOSTUNREACH);
  EXPECT_EQ(text.find("b: "), 0u) << text;
  EXPECT_EQ(a_->directory->error().find("b: "), 0u);
  const auto reports = a_->table->reports(false);
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].error(), text) << "migrctl links shows it";
  EXPECT_NE(text.find(b_->address()), std::string::npos) << text;
  EXPECT_EQ(one(a, link_channel(b.instance(), 1, 1, 100)).status, EHOSTUNREACH);
  b_->serve(true);
  EXPECT_TRUE(soon([&] { return one(a, link_name(2, 5)).status == 0; }));
  EXPECT_EQ(a_->directory->error(), "");
  // Learnt while it answered, asked when it does not.
  b_->hang_up();
  EXPECT_EQ(one(a, link_name(2, 5)).status, EHOSTUNREACH);
}

TEST_P(PeersOnly, AnOlderMigrdIsEHOSTUNREACH) {
  LinkLibrary a(a_->path(), 1);
  told(a, 1);
  b_->hang_up();
  b_->serve(false);
  std::string text;
  EXPECT_EQ(one(a, link_name(2, 5), &text).status, EHOSTUNREACH);
  EXPECT_NE(text.find("older release"), std::string::npos) << text;
}

TEST_P(PeersOnly, ASilentHostIsNotAskedAgainAtOnce) {
  // Takes the connection and never says a word.
  b_->hang_up();
  const Fd deaf(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  setsockopt(deaf.n, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(b_->port));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(deaf.n, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  ASSERT_EQ(listen(deaf.n, 8), 0);
  LinkLibrary a(a_->path(), 1);
  told(a, 1);
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(one(a, link_name(2, 5)).status, EHOSTUNREACH);
  const auto first = std::chrono::steady_clock::now() - begun;
  EXPECT_GE(first, std::chrono::milliseconds(kLinkCallMs - 100));
  EXPECT_EQ(one(a, link_name(2, 5)).status, EHOSTUNREACH);
  EXPECT_LT(std::chrono::steady_clock::now() - begun - first, std::chrono::milliseconds(kLinkCallMs / 2));
}

TEST_P(PeersOnly, WhatAPeerSaysIsChecked) {
  struct Liar final : wire::Links::Service {
    grpc::Status Lookup(grpc::ServerContext*, const wire::LinkLookupRequest* r, wire::LinkLookupReply* out) override {
      for (const auto& n : r->names()) {
        auto* f = out->add_found();
        f->mutable_vqp()->set_gid(n.gid());
        f->mutable_vqp()->set_vqpn(n.vqpn());
        if (n.vqpn() == 7) continue;  // no process
        if (n.vqpn() != 4) f->mutable_vqp()->set_links(1);  // else not even its default link
        f->mutable_process()->set_instance(std::string(16, 'x'));
        if (n.vqpn() == 5) f->mutable_vqp()->set_policy(99);
        if (n.vqpn() == 6) f->mutable_vqp()->add_paths()->set_gid("short");
      }
      if (r->names(0).vqpn() == 8) out->clear_found();
      return grpc::Status::OK;
    }
    grpc::Status Channel(grpc::ServerContext*, const wire::LinkChannelRequest*, wire::LinkChannelReply* out) override {
      auto* a = out->add_answers();
      a->set_known(wire::LinkChannelAnswer::HERE);
      a->mutable_end()->set_qpn(5);
      return grpc::Status::OK;
    }
  } liar;
  b_->hang_up();
  grpc::ServerBuilder builder;
  builder.AddListeningPort(b_->address(), b_->peers->server_credentials());
  builder.RegisterService(&liar);
  const auto server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  LinkLibrary a(a_->path(), 1);
  told(a, 1);
  for (const std::uint32_t vqpn : {4u, 5u, 6u, 7u, 8u}) EXPECT_EQ(one(a, link_name(2, vqpn)).status, EHOSTUNREACH) << vqpn;
  EXPECT_EQ(one(a, link_name(2, 9)).status, 0) << "what is well-formed is taken";
  EXPECT_EQ(one(a, link_channel(Instance{9}, 1, 1, 100)).status, EHOSTUNREACH);
  server->Shutdown(std::chrono::system_clock::now());
}

TEST_P(PeersOnly, TheHomeOfANameIsBelievedFirst) {
  ASSERT_TRUE(pki::issue_host(dir_.path + "/ca", "c", {}));
  HostUnderTest c(dir_.path, 3, "");
  c.config.hosts = Hosts{{{"a", a_->address()}, {"b", b_->address()}}, {}};
  for (auto* h : {a_.get(), b_.get()}) {  // others are not answered
    Hosts known = *h->config.hosts.now();
    known.peers.push_back({"c", c.address()});
    h->config.hosts = std::move(known);
  }
  LinkLibrary asker(c.path(), 1), a(a_->path(), 2), b(b_->path(), 3);
  told(a, 1);
  told(b, 2);
  told(asker, 3);
  for (const std::uint8_t home : {1, 2}) {
    const std::vector<migr_links_vqp> vqps = {link_vqp(home, 5)};
    // One of them is its owner; the other says so, too.
    ASSERT_EQ(a.ask(MIGR_LINKS_PUBLISH, vqps).head.status, 0);
    ASSERT_EQ(b.ask(MIGR_LINKS_PUBLISH, vqps).head.status, 0);
    EXPECT_STREQ(one(asker, link_name(home, 5)).host, home == 1 ? "a" : "b");
  }
}

// ---- Redis only

class RedisOnly : public TwoHosts {};
INSTANTIATE_TEST_SUITE_P(Engine, RedisOnly, ::testing::Values("redis"));

TEST_P(RedisOnly, AServerThatIsGoneIsEHOSTUNREACHAndNamed) {
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  ASSERT_EQ(asked(b, link_name(1, 5)).status, 0);
  redis_->stop();
  std::string text;
  EXPECT_EQ(one(b, link_name(1, 5), &text).status, EHOSTUNREACH);
  EXPECT_NE(text.find("redis at " + redis_->address()), std::string::npos) << text;
  EXPECT_EQ(one(b, link_channel(a.instance(), 2, 1, 100)).status, EHOSTUNREACH);
  EXPECT_TRUE(soon([&] { return a_->directory->error().find("redis at") == 0; }));
  // What is told meanwhile is no error, what is on this host is found, and all of it is there when the server is, empty.
  EXPECT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 6)}).head.status, 0);
  EXPECT_EQ(one(a, link_name(1, 6)).status, 0);
  redis_->start();
  for (const std::uint32_t vqpn : {5u, 6u}) EXPECT_TRUE(soon([&] { return one(b, link_name(1, vqpn)).status == 0; }, 20'000)) << vqpn;
  EXPECT_TRUE(soon([&] { return a_->directory->error().empty(); }));
}

TEST_P(RedisOnly, AServerThatHangsIsEHOSTUNREACHWithinTheLimit) {
  LinkLibrary b(b_->path(), 2);
  told(b, 2);
  redis_->freeze();
  const auto begun = std::chrono::steady_clock::now();
  std::string text;
  EXPECT_EQ(one(b, link_name(1, 5), &text).status, EHOSTUNREACH);
  EXPECT_NE(text.find("no answer within"), std::string::npos) << text;
  EXPECT_EQ(one(b, link_name(1, 5)).status, EHOSTUNREACH) << "at once";
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(3 * kLinkCallMs));
  redis_->thaw();
}

TEST_P(RedisOnly, EntriesOfAMigrdThatDiesExpireThoseOfOneThatLivesDoNot) {
  RedisConfig config;
  config.address = redis_->address();
  LinkTable table("dead");
  auto dead = std::make_unique<RedisDirectory>(config, "dead", table, nullptr, nullptr, HostUnderTest::quick());
  table.set_watcher(dead.get());
  dead->start();
  const Instance who{42};
  table.enter(who, {});
  std::size_t offending;
  const std::vector<migr_links_vqp> vqps = {link_vqp(3, 5)};
  ASSERT_TRUE(table.publish(who, vqps, offending));
  LinkLibrary a(a_->path(), 1), b(b_->path(), 2);
  told(a, 1);
  told(b, 2);
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_TRUE(soon([&] { return one(b, link_name(3, 5)).status == 0; }));
  ASSERT_EQ(asked(b, link_name(1, 5)).status, 0);
  sleep(7);  // longer than they last unless they are refreshed
  EXPECT_EQ(one(b, link_name(3, 5)).status, 0);
  // It dies without a word: what it takes out when it ends is put there again as it was, to expire.
  RedisConnection c(config);
  const std::string key = "migr1:p:2a" + std::string(30, '0');
  const auto dump = c.run({{"DUMP", key}});
  ASSERT_TRUE(dump);
  table.set_watcher(nullptr);
  dead.reset();
  EXPECT_NE(one(b, link_name(3, 5)).status, 0) << "who ends in order takes its entries out";
  ASSERT_TRUE(c.run({{"RESTORE", key, "4000", (*dump)[0].text}}));
  ASSERT_EQ(one(b, link_name(3, 5)).status, 0);
  EXPECT_TRUE(soon([&] { return one(b, link_name(3, 5)).status == ENOENT; }, 30'000));
  EXPECT_EQ(one(b, link_name(1, 5)).status, 0) << "of a migrd that lives";
}

TEST_P(RedisOnly, WhoMovesIsNotTakenOutByTheHostThatItLeft) {
  OtherProcess other(b_->path());
  LinkLibrary after(other.take(), 3), before(a_->path(), 3), b(b_->path(), 2);
  told(b, 2);
  told(before, 1);
  ASSERT_EQ(before.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_TRUE(soon([&] { return one(b, link_name(1, 5)).status == 0; }));
  told(after, 2);
  ASSERT_EQ(after.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  usleep(500'000);
  before.close();
  EXPECT_TRUE(soon([&] { return a_->table->reports(false).empty(); }));
  usleep(500'000);
  LinkLibrary a(a_->path(), 4);
  told(a, 1);
  EXPECT_STREQ(one(a, link_name(1, 5)).host, "b");
}

TEST_P(RedisOnly, NorWhenThatHostTellsItLate) {
  ASSERT_TRUE(pki::issue_host(dir_.path + "/ca", "c", {}));
  const std::string way = dir_.path + "/way.sock";
  ASSERT_EQ(symlink(redis_->address().c_str(), way.c_str()), 0);
  HostUnderTest left(dir_.path, 3, way);
  OtherProcess other(b_->path());
  LinkLibrary before(left.path(), 3), after(other.take(), 3), a(a_->path(), 4);
  told(a, 1);
  told(before, 3);
  ASSERT_EQ(before.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(3, 5)}).head.status, 0);
  ASSERT_EQ(asked(a, link_name(3, 5)).status, 0);
  ASSERT_EQ(unlink(way.c_str()), 0);
  RedisConfig config;
  config.address = redis_->address();
  ASSERT_TRUE(RedisConnection(config).run({{"CLIENT", "KILL", "TYPE", "normal"}}));
  ASSERT_EQ(before.ask<migr_links_name>(MIGR_LINKS_WITHDRAW, {link_name(3, 5)}).head.status, 0);
  before.close();
  EXPECT_TRUE(soon([&] { return left.table->reports(false).empty() && !left.directory->error().empty(); }));
  told(after, 2);
  ASSERT_EQ(after.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(3, 5)}).head.status, 0);
  EXPECT_TRUE(soon([&] { return std::string(one(a, link_name(3, 5)).host) == "b"; }));
  ASSERT_EQ(symlink(redis_->address().c_str(), way.c_str()), 0);
  EXPECT_TRUE(soon([&] { return left.directory->error().empty(); }));
  EXPECT_STREQ(one(a, link_name(3, 5)).host, "b");
}

TEST(RedisPassword, IsNeededAndGiven) {
  TempFolder dir;
  RedisServer server(dir.path, "secret");
  std::ofstream(dir.path + "/password") << "secret\n";
  std::ofstream(dir.path + "/wrong") << "guess\n";
  RedisConfig config;
  config.address = server.address();
  auto r = RedisConnection(config).run({{"PING"}});
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, EHOSTUNREACH);
  EXPECT_NE(r.error().text.find("NOAUTH"), std::string::npos) << r.error().text;
  config.password_file = dir.path + "/wrong";
  EXPECT_FALSE(RedisConnection(config).run({{"PING"}}));
  config.password_file = dir.path + "/none";
  r = RedisConnection(config).run({{"PING"}});
  ASSERT_FALSE(r);
  EXPECT_NE(r.error().text.find(config.password_file), std::string::npos) << r.error().text;
  config.password_file = dir.path + "/password";
  r = RedisConnection(config).run({{"PING"}});
  ASSERT_TRUE(r) << r.error().text;
  EXPECT_EQ((*r)[0].text, "PONG");
}

TEST(RedisAddress, OfConfiguration) {
  TempFolder dir;
  auto load = [&](const std::string& directory) {
    std::ofstream(dir.path + "/c.json") << "{\"name\": \"a\", \"directory\": " << directory << "}";
    return load_config(dir.path + "/c.json");
  };
  for (const char* good : {"host:6379", "[::1]:1", "/run/redis.sock"}) {
    auto c = load("{\"redis\": \"" + std::string(good) + "\", \"prefix\": \"p:\"}");
    ASSERT_TRUE(c) << c.error().text;
    EXPECT_EQ(c->redis.address, good);
    EXPECT_EQ(c->redis.prefix, "p:");
  }
  for (const char* bad : {"\"redis\"", "{}", "{\"redis\": 5}", "{\"redis\": \"host\"}", "{\"redis\": \"host:\"}", "{\"redis\": \":5\"}",
                          "{\"redis\": \"h:x\"}", "{\"redis\": \"h:1\", \"other\": \"\"}"}) {
    auto c = load(bad);
    ASSERT_FALSE(c) << bad;
    EXPECT_EQ(c.error().code, EINVAL);
  }
}

// ---- what migrctl orders

class Orders : public ::testing::Test {
 protected:
  void SetUp() override {
    ports_.set_changed([this](std::span<const migr_links_port> changed) { socket_.tell_ports(changed); });
    ports_.rescan([](const std::string&) { return true; });
    ASSERT_TRUE(socket_.start(dir_.path + "/links.sock"));
    grpc::ServerBuilder b;
    b.RegisterService(&service_);
    server_ = b.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    stub_ = wire::Control::NewStub(server_->InProcessChannel({}));
    ASSERT_EQ(l_.emplace(dir_.path + "/links.sock", 1).hello().head.status, 0);
    ASSERT_EQ(l_->ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(1, 0), link_of(1, 1)}).head.status, 0);
    ASSERT_EQ(l_->ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
    l_->push(MIGR_LINKS_PORTS);
  }
  void TearDown() override {
    server_->Shutdown();
    socket_.stop();
  }
  void state(std::uint32_t link, std::uint32_t phase, std::uint64_t settled) {
    migr_links_vqp_state s{};
    s.name = link_name(1, 5);
    s.link = link;
    s.phase = phase;
    ASSERT_EQ(l_->ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {s}, settled).head.status, 0);
  }
  grpc::Status order(wire::LinkOrder::What what, const std::string& device, std::uint32_t wait_ms, bool force = false) {
    wire::LinkOrder o;
    o.set_what(what);
    o.set_device(device);
    o.set_wait_ms(wait_ms);
    o.set_force(force);
    grpc::ClientContext ctx;
    reply_.Clear();
    return stub_->SetLink(&ctx, o, &reply_);
  }
  TempFolder dir_;
  Config config_;
  Peers peers_{config_, pki::Files{}};
  SessionTable sessions_;
  LinkTable table_{"here"};
  PeerDirectory directory_{peers_, table_};
  PortWatch ports_{dir_.path + "/links.json", [] { return std::vector<RdmaPort>{{"rxe0", 1, "eth0"}, {"rxe1", 1, "eth1"}}; }, {1ms, 1ms, 1ms, 1ms}};
  LinkSocket socket_{table_, directory_, [this] { return ports_.ports(); }, ""};
  History history_{dir_.path};
  ControlService service_{peers_, sessions_, {}, {}, {table_, directory_, ports_}, history_};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<wire::Control::Stub> stub_;
  std::optional<LinkLibrary> l_;
  wire::LinkOrderReply reply_;
};

TEST_F(Orders, DownIsRefusedIfVqpsWouldBreak) {
  const auto s = order(wire::LinkOrder::DOWN, "rxe0", 0);
  EXPECT_EQ(s.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_NE(s.error_message().find("1 vQP without a backup"), std::string::npos) << s.error_message();
  EXPECT_EQ(ports_.ports()[0].flags, 0u);
  EXPECT_TRUE(order(wire::LinkOrder::DOWN, "rxe0", 0, true).ok());
  EXPECT_EQ(ports_.ports()[0].flags, MIGR_LINKS_PORT_DOWN_OPERATOR);
  EXPECT_EQ(l_->push(MIGR_LINKS_PORTS).as<migr_links_port>().at(0).flags, MIGR_LINKS_PORT_DOWN_OPERATOR);
}

TEST_F(Orders, DownWaitsForTheProcesses) {
  state(0, MIGR_LINKS_VQP_READY, 0);
  std::thread library([&] {
    const auto p = l_->push(MIGR_LINKS_PORTS).as<migr_links_port>().at(0);
    usleep(200'000);
    state(1, MIGR_LINKS_VQP_READY, p.serial);
  });
  const auto begun = std::chrono::steady_clock::now();
  const auto s = order(wire::LinkOrder::DOWN, "rxe0", 20'000);
  library.join();
  EXPECT_TRUE(s.ok()) << s.error_message();
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 200ms);
  EXPECT_EQ(reply_.processes(), 1u);
  EXPECT_EQ(reply_.left_size(), 0);
}

TEST_F(Orders, WhatStaysIsSaid) {
  state(0, MIGR_LINKS_VQP_READY, 0);
  ASSERT_TRUE(order(wire::LinkOrder::DOWN, "rxe0", 50).ok());
  ASSERT_EQ(reply_.left_size(), 1);
  EXPECT_NE(reply_.left(0).find("1 vQP still there"), std::string::npos) << reply_.left(0);
  ASSERT_TRUE(order(wire::LinkOrder::PREFER, "rxe1", 50).ok());
  ASSERT_EQ(reply_.left_size(), 1);
  EXPECT_NE(reply_.left(0).find("1 vQP not there"), std::string::npos) << reply_.left(0);
  ASSERT_TRUE(order(wire::LinkOrder::UP, "rxe0", 20'000).ok()) << "and nobody is waited for";
  EXPECT_EQ(reply_.left_size(), 0);
}

TEST_F(Orders, NoSuchDeviceIsNotFound) {
  EXPECT_EQ(order(wire::LinkOrder::DOWN, "rxe9", 0).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(Orders, LinksTellsWhatThereIs) {
  state(1, MIGR_LINKS_VQP_READY, 0);
  grpc::ClientContext ctx;
  wire::LinksRequest request;
  request.set_vqps(true);
  wire::LinksReply r;
  ASSERT_TRUE(stub_->Links(&ctx, request, &r).ok());
  EXPECT_EQ(r.directory(), "peers");
  ASSERT_EQ(r.ports_size(), 2);
  EXPECT_EQ(r.ports(1).netdev(), "eth1");
  ASSERT_EQ(r.processes_size(), 1);
  EXPECT_EQ(r.processes(0).backed(), 1u);
  ASSERT_EQ(r.processes(0).each_size(), 1);
  EXPECT_EQ(r.processes(0).each(0).link(), 1u);
}

}  // namespace
}  // namespace migr::link_directory_test
