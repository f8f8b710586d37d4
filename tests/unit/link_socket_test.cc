// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migrd's side of links_wire.h against libraries that this test plays: what it takes, what it refuses and how, and what
// of one host's processes can be looked up. Other hosts are a fake.
#include "agent/failover/link_socket.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/ptrace.h>

#include <fstream>

#include "agent/failover/links_text.h"
#include "agent/limits.h"
#include "link_library.h"
#include "pid_namespace.h"
#include "marked.h"

namespace migr::link_socket_test {
namespace {

/// No other host: nobody has the GID; or it waits until it is told to go on.
struct FakeDirectory final : LinkDirectory {
  using LinkDirectory::LinkDirectory;
  std::string name() const override { return "fake"; }
  std::string error() const override { return ""; }
  std::vector<Answer> find_elsewhere(std::span<const VqpName> names) override {
    std::unique_lock lock(mutex);
    asked++;
    changed.wait_for(lock, std::chrono::seconds(20), [this] { return !wait; });
    std::vector<Answer> out;
    for (const auto& n : names) out.push_back(table_.home(n.gid) ? Answer{EAGAIN, {}, {}} : Answer{ENOENT, "no host has it", {}});
    return out;
  }
  std::vector<End> meet_elsewhere(std::span<const wire::LinkChannel> ends) override {
    return std::vector<End>(ends.size(), {ENOENT, "nobody", {}});
  }
  void go_on() {
    std::lock_guard lock(mutex);
    wait = false;
    changed.notify_all();
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool wait = false;
  int asked = 0;
};

class Links : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(dir_.path + "/links.json") << "{\"policy\": \"exact\"}";
    table_.set_knock([this](const Instance& to, const migr_links_channel& from) { socket_.knock(to, from); });
    ASSERT_TRUE(socket_.start(path()));
  }
  void TearDown() override {
    directory_.go_on();
    socket_.stop();
  }
  std::string path() const { return dir_.path + "/links.sock"; }
  std::vector<migr_links_found> lookup(LinkLibrary& l, std::vector<migr_links_name> names) {
    return l.ask(MIGR_LINKS_LOOKUP, names).as<migr_links_found>();
  }
  TempFolder dir_;
  LinkTable table_{"here"};
  FakeDirectory directory_{table_};
  std::vector<migr_links_port> ports_ = std::vector<migr_links_port>(2);
  LinkSocket socket_{table_, directory_, [this] { return ports_; }, dir_.path + "/links.json"};
};

/// Which have greeted.
struct TwoProcesses {
  explicit TwoProcesses(const std::string& path) : other(path), a(path, 1), b(other.take(), 2) {
    EXPECT_EQ(a.hello().head.status, 0);
    EXPECT_EQ(b.hello().head.status, 0);
  }
  OtherProcess other;  // whose b is
  LinkLibrary a, b;
};

TEST_F(Links, HelloIsAnsweredAndThePortsFollow) {
  std::strcpy(ports_[0].device, "rxe0");
  std::strcpy(ports_[1].device, "rxe1");
  LinkLibrary l(path(), 1);
  const auto r = l.hello();
  EXPECT_EQ(r.head.status, 0) << r.head.text;
  EXPECT_EQ(r.head.type, MIGR_LINKS_HELLO | MIGR_LINKS_REPLY);
  const auto ports = l.push(MIGR_LINKS_PORTS).as<migr_links_port>();
  ASSERT_EQ(ports.size(), 2u);
  EXPECT_STREQ(ports[1].device, "rxe1");
  const auto all = table_.reports(false);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].pid(), getpid());
  EXPECT_EQ(all[0].configured(), "test");
}

TEST_F(Links, WhatDoesNotFitIsEPROTOAndEndsIt) {
  struct Bad {
    const char* what;
    std::function<void(migr_links_msg&, std::size_t& bytes)> make;
  };
  const std::vector<Bad> bad = {
      {"version", [](auto& h, auto&) { h.version++; }},
      {"unknown type", [](auto& h, auto&) { h.type = 40; }},
      {"a push", [](auto& h, auto&) { h.type = MIGR_LINKS_PORTS; }},
      {"a reply", [](auto& h, auto&) { h.type |= MIGR_LINKS_REPLY; }},
      {"flags", [](auto& h, auto&) { h.flags = 1; }},
      {"status", [](auto& h, auto&) { h.status = 1; }},
      {"no seq", [](auto& h, auto&) { h.seq = 0; }},
      {"text without end", [](auto& h, auto&) { std::memset(h.text, 'x', sizeof h.text); }},
      {"more records than bytes", [](auto& h, auto&) { h.count = 2; }},
      {"more bytes than records", [](auto&, auto& bytes) { bytes *= 2; }},
      {"a byte too few", [](auto&, auto& bytes) { bytes -= 1; }},
      {"records of another size", [](auto& h, auto& bytes) { h.record_size -= 8, bytes -= 8; }},
      {"no record", [](auto& h, auto& bytes) { h.count = 0, bytes = 0; }},
      {"more than the most records", [](auto& h, auto& bytes) { h.count = MIGR_LINKS_MAX_RECORDS + 1, bytes = h.count * sizeof(migr_links_name); }},
      {"a size that overflows", [](auto& h, auto&) { h.count = 1u << 31, h.record_size = sizeof(migr_links_name); }},
  };
  for (const Bad& b : bad) {
    LinkLibrary l(path(), 1);
    ASSERT_EQ(l.hello().head.status, 0);
    auto h = l.head(MIGR_LINKS_LOOKUP);
    h.count = 1;
    h.record_size = sizeof(migr_links_name);
    std::size_t bytes = sizeof(migr_links_name);
    std::vector<migr_links_name> records(MIGR_LINKS_MAX_RECORDS + 1, link_name(1, 5));
    b.make(h, bytes);
    l.send_raw(h, records.data(), bytes);
    EXPECT_EQ(l.reply(h.seq).head.status, EPROTO) << b.what;
    EXPECT_TRUE(l.closed()) << b.what;
  }
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  EXPECT_EQ(lookup(l, {link_name(1, 5)}).size(), 1u) << "without a change it fits";
}

/// What is said in its life.
class Said {
 public:
  Said() {
    auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(said_);
    sink->set_pattern("%l %v");
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink));
  }
  ~Said() { spdlog::set_default_logger(before_); }
  /// @return lines with that
  int times(const std::string& what) const {
    int n = 0;
    std::istringstream lines(said_.str());
    for (std::string line; std::getline(lines, line);) n += line.find(what) != std::string::npos;
    return n;
  }

 private:
  std::ostringstream said_;
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

// Whoever runs a library of another release has all its processes try again, and anybody may loop.
TEST_F(Links, WhatIsDoneAllTheTimeIsSaidOnce) {
  const Said said;
  for (std::uint16_t i = 0; i < 50; i++) {
    LinkLibrary wrong(path(), 1);
    auto h = wrong.head(MIGR_LINKS_HELLO);
    h.version = static_cast<std::uint16_t>(h.version + 1 + i);
    wrong.send_raw(h, nullptr, 0);
    EXPECT_EQ(wrong.reply(h.seq).head.status, EPROTO);
    EXPECT_TRUE(wrong.closed());
    LinkLibrary right(path(), 1);
    EXPECT_EQ(right.hello().head.status, 0);
  }
  socket_.stop();
  EXPECT_EQ(said.times("install both from the same release"), 1);
  EXPECT_EQ(said.times(" connected: "), 1);
  EXPECT_LE(said.times(" disconnected"), 1);
}

TEST_F(Links, AShortPacketEndsIt) {
  Fd fd = LinkLibrary::connected(path());
  ASSERT_EQ(send(fd.n, "hello", 5, 0), 5);
  char c;
  EXPECT_EQ(recv(fd.n, &c, 1, 0), 0);
}

TEST_F(Links, TheFirstMessageHasToBeHello) {
  LinkLibrary l(path(), 1);
  EXPECT_EQ(l.ask<migr_links_name>(MIGR_LINKS_LOOKUP, {link_name(1, 5)}).head.status, EACCES);
  EXPECT_EQ(l.hello().head.status, 0) << "and the connection has stayed";
  EXPECT_EQ(l.hello().head.status, EINVAL) << "twice";
}

TEST_F(Links, HelloWithoutAnInstanceOrWithAnUnknownPolicyIsEINVAL) {
  LinkLibrary l(path(), 0);
  EXPECT_EQ(l.hello().head.status, EINVAL);
  LinkLibrary m(path(), 1);
  EXPECT_EQ(m.hello(MIGR_LINKS_EXACT + 1).head.status, EINVAL);
}

TEST_F(Links, FieldsOutOfRangeAreEINVALAndNothingIsTaken) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  const std::vector<std::function<void(migr_links_vqp&)>> vqps = {
      [](auto& v) { v.name.vqpn = 0; },
      [](auto& v) { v.name.vqpn = 1 << 24; },
      [](auto& v) { std::memset(v.name.gid, 0, 16); },
      [](auto& v) { v.name.reserved = 1; },
      [](auto& v) { v.policy = MIGR_LINKS_EXACT + 1; },
      [](auto& v) { v.making = MIGR_LINKS_POOL + 1; },
      [](auto& v) { v.atomics = MIGR_LINKS_RELAYED + 1; },
      [](auto& v) { v.default_link = MIGR_LINKS_MAX_LINKS; },
      [](auto& v) { v.paths = MIGR_LINKS_MAX_LINKS + 1; },
      [](auto& v) { v.path[1].link = 0; },  // twice
      [](auto& v) { v.path[1].link = MIGR_LINKS_MAX_LINKS; },
      [](auto& v) { v.path[0].qpn = 0; },
      [](auto& v) { v.path[0].psn = 1 << 24; },
      [](auto& v) { v.path[0].mtu = 0; },
      [](auto& v) { v.path[0].mtu = 6; },
      [](auto& v) { v.path[0].reserved[4] = 1; },
      [](auto& v) { std::memset(v.path[0].gid, 0, 16); },
  };
  for (std::size_t i = 0; i < vqps.size(); i++) {
    auto v = link_vqp(1, 7);
    vqps[i](v);
    // The one before it is good, and is not taken either.
    const auto r = l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 6), v});
    EXPECT_EQ(r.head.status, EINVAL) << i;
    EXPECT_EQ(r.head.arg, 1u) << i;
    EXPECT_STRNE(r.head.text, "") << i;
  }
  EXPECT_NE(lookup(l, {link_name(1, 6)})[0].status, 0);

  const std::vector<std::function<void(migr_links_link&)>> links = {
      [](auto& k) { k.link = MIGR_LINKS_MAX_LINKS; }, [](auto& k) { k.port = 0; },
      [](auto& k) { std::memset(k.device, 'x', sizeof k.device); }, [](auto& k) { k.device[0] = 0; },
      [](auto& k) { std::memset(k.why, 'x', sizeof k.why); }, [](auto& k) { k.state = MIGR_LINKS_LINK_ABSENT + 1; },
      [](auto& k) { k.cause = MIGR_LINKS_CAUSE_PREFER + 1; }, [](auto& k) { k.link = 0; }};
  for (std::size_t i = 0; i < links.size(); i++) {
    auto k = link_of(1, 1);
    links[i](k);
    EXPECT_EQ(l.ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(1, 0), k}).head.status, EINVAL) << i;
  }
  EXPECT_EQ(table_.reports(false)[0].links_size(), 0);

  migr_links_vqp_state s{};
  s.name = link_name(1, 5);
  s.phase = MIGR_LINKS_VQP_BROKEN + 1;
  EXPECT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {s}).head.status, EINVAL);
  migr_links_switch w{};
  w.to = MIGR_LINKS_MAX_LINKS;
  EXPECT_EQ(l.ask<migr_links_switch>(MIGR_LINKS_SWITCHED, {w}).head.status, EINVAL);
  EXPECT_EQ(l.ask<migr_links_name>(MIGR_LINKS_LOOKUP, {link_name(1, 0)}).head.status, EINVAL);
  EXPECT_EQ(l.ask<migr_links_name>(MIGR_LINKS_WITHDRAW, {link_name(1, 0)}).head.status, EINVAL);
}

TEST_F(Links, MoreLinksThanTheMostAreE2BIG) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  std::vector<migr_links_link> links;
  for (std::uint32_t i = 0; i < MIGR_LINKS_MAX_LINKS; i++) links.push_back(link_of(1, i));
  EXPECT_EQ(l.ask(MIGR_LINKS_LINKS, links).head.status, 0);
  links.push_back(link_of(1, 0));
  EXPECT_EQ(l.ask(MIGR_LINKS_LINKS, links).head.status, E2BIG);
}

TEST_F(Links, MoreVqpsThanTheMostAreENOSPC) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  constexpr std::uint32_t kPart = MIGR_LINKS_MAX_RECORDS;
  for (std::uint32_t at = 0; at < MIGR_LINKS_MAX_VQPS; at += kPart) {
    std::vector<migr_links_vqp> part;
    for (std::uint32_t i = 0; i < kPart; i++) part.push_back(link_vqp(1, 1 + at + i));
    ASSERT_EQ(l.ask(MIGR_LINKS_PUBLISH, part).head.status, 0) << at;
  }
  const auto r = l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 1), link_vqp(1, MIGR_LINKS_MAX_VQPS + 1)});
  EXPECT_EQ(r.head.status, ENOSPC);
  EXPECT_EQ(r.head.arg, 1u);
  EXPECT_EQ(l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 1)}).head.status, 0) << "what is there may be told anew";
}

TEST_F(Links, PublishedIsFoundWithdrawnIsNot) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  EXPECT_EQ(lookup(l, {link_name(1, 5)})[0].status, ENOENT) << "a GID that nobody has told";
  ASSERT_EQ(l.ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(1, 2), link_of(1, 0)}).head.status, 0);
  EXPECT_EQ(lookup(l, {link_name(1, 5)})[0].status, EAGAIN) << "not yet";
  ASSERT_EQ(l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  const auto both = lookup(l, {link_name(1, 6), link_name(1, 5)});
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].status, EAGAIN);
  EXPECT_EQ(both[0].vqp.name.vqpn, 6u);
  const auto& f = both[1];
  EXPECT_EQ(f.status, 0);
  const auto told = link_vqp(1, 5);
  EXPECT_EQ(std::memcmp(&f.vqp, &told, sizeof told), 0);
  EXPECT_EQ(gid_of(f.instance), l.instance());
  EXPECT_STREQ(f.host, "here");
  ASSERT_EQ(f.links, 3u);
  EXPECT_EQ(std::memcmp(f.gid[0], link_of(1, 0).gid, 16), 0);
  EXPECT_EQ(gid_of(f.gid[1]), Gid{}) << "a link that was left out";
  EXPECT_EQ(std::memcmp(f.gid[2], link_of(1, 2).gid, 16), 0);
  ASSERT_EQ(l.ask<migr_links_name>(MIGR_LINKS_WITHDRAW, {link_name(1, 5), link_name(1, 99)}).head.status, 0);
  EXPECT_EQ(lookup(l, {link_name(1, 5)})[0].status, EAGAIN);
}

TEST_F(Links, EntriesVanishWithTheirProcess) {
  OtherProcess other(path());
  LinkLibrary a(other.take(), 1), b(path(), 2);
  ASSERT_EQ(a.hello().head.status, 0);
  ASSERT_EQ(b.hello().head.status, 0);
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  ASSERT_EQ(b.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 6)}).head.status, 0);
  ASSERT_EQ(lookup(b, {link_name(1, 5)})[0].status, 0);
  a.close();
  kill(other.pid(), SIGKILL);
  EXPECT_TRUE(soon([&] { return table_.reports(false).size() == 1; }));
  EXPECT_EQ(lookup(b, {link_name(1, 5)})[0].status, ENOENT);
  EXPECT_EQ(lookup(b, {link_name(1, 6)})[0].status, 0) << "the other's stay";
}

TEST_F(Links, ANameIsAskedForOnceWhoseItIs) {
  std::vector<std::uint32_t> asked;
  pid_t of = 0;
  table_.set_owns([&](pid_t pid, std::span<const VqpName> names, std::size_t& offending, std::set<VqpName>&) -> Status {
    of = pid;
    for (const auto& n : names) asked.push_back(n.vqpn);
    for (offending = 0; offending < names.size(); offending++)
      if (names[offending].vqpn == 7) return Error{EINVAL, "not its own"};
    return {};
  });
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  EXPECT_EQ(l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_EQ(of, getpid());
  const auto r = l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5), link_vqp(1, 6), link_vqp(1, 7)});
  EXPECT_EQ(r.head.status, EINVAL);
  EXPECT_EQ(r.head.arg, 2u);
  EXPECT_STREQ(r.head.text, "not its own");
  EXPECT_EQ(asked, (std::vector<std::uint32_t>{5, 6, 7})) << "what it has published is its own";
  EXPECT_EQ(lookup(l, {link_name(1, 6)})[0].status, ENOENT) << "one that is refused takes all along";
}

TEST_F(Links, ANameAndAnInstanceOfAnotherProcessAreEEXIST) {
  OtherProcess other(path());
  LinkLibrary a(other.take(), 1), thief(path(), 1), b(path(), 2);
  ASSERT_EQ(a.hello().head.status, 0);
  ASSERT_EQ(a.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_EQ(thief.hello().head.status, EEXIST);
  ASSERT_EQ(b.hello().head.status, 0);
  const auto r = b.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 6), link_vqp(1, 5)});
  EXPECT_EQ(r.head.status, EEXIST);
  EXPECT_EQ(r.head.arg, 1u);
  EXPECT_NE(std::string(r.head.text).find(std::to_string(other.pid())), std::string::npos) << r.head.text;
  EXPECT_EQ(gid_of(lookup(b, {link_name(1, 5)})[0].instance), a.instance());
}

TEST_F(Links, AnInstanceIsThatOfWhoHasItAtTheOtherSocket) {
  socket_.stop();
  LinkSocket socket(table_, directory_, [this] { return ports_; }, dir_.path + "/links.json");
  std::atomic<pid_t> its = 0;
  socket.set_may_have([&](const Instance& i, pid_t pid) { return i[0] != 1 || !its || pid == its ? Status() : Status(Error{EPERM, "it is another's"}); });
  ASSERT_TRUE(socket.start(path()));
  OtherProcess other(path()), third(path());
  LinkLibrary stranger(other.take(), 1), second(third.take(), 1), owner(path(), 1);
  ASSERT_EQ(stranger.hello().head.status, 0) << "nobody has it yet";
  its = getpid();
  const auto r = second.hello();
  EXPECT_EQ(r.head.status, EPERM);
  EXPECT_STREQ(r.head.text, "it is another's");
  EXPECT_EQ(owner.hello().head.status, 0);
  EXPECT_TRUE(stranger.closed());
  EXPECT_EQ(table_.reports(false).size(), 1u);
  socket.stop();
}

TEST_F(Links, WhoWasGivenANumberHasItsNameBeforeWhoHasBoundIt) {
  OtherProcess other(path());
  table_.set_owns([&](pid_t pid, std::span<const VqpName> names, std::size_t&, std::set<VqpName>& bound) -> Status {
    if (pid == other.pid()) bound.insert(names.begin(), names.end());
    return {};
  });
  LinkLibrary binds(other.take(), 1), has(path(), 2);
  ASSERT_EQ(binds.hello().head.status, 0);
  ASSERT_EQ(has.hello().head.status, 0);
  ASSERT_EQ(binds.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_EQ(gid_of(lookup(has, {link_name(1, 5)})[0].instance), binds.instance()) << "nobody else has it";
  ASSERT_EQ(has.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  EXPECT_EQ(gid_of(lookup(binds, {link_name(1, 5)})[0].instance), has.instance());
  EXPECT_EQ(binds.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, EEXIST);
  binds.close();
  other.end();
  EXPECT_TRUE(soon([&] { return table_.reports(false).size() == 1; }));
  EXPECT_EQ(gid_of(lookup(has, {link_name(1, 5)})[0].instance), has.instance()) << "nor has it any more when it ends";
}

TEST_F(Links, AnEpochHas32Bits) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  ASSERT_EQ(l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  migr_links_vqp_state s{};
  s.name = link_name(1, 5);
  s.epoch = ~7u;
  EXPECT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {s}).head.status, 0);
  EXPECT_EQ(table_.reports(true)[0].each(0).epoch(), ~7u);
}

TEST_F(Links, WhoConnectsAgainReplacesItself) {
  LinkLibrary before(path(), 1), after(path(), 1);
  ASSERT_EQ(before.hello().head.status, 0);
  ASSERT_EQ(before.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  ASSERT_EQ(after.hello().head.status, 0);
  EXPECT_TRUE(before.closed());
  EXPECT_NE(lookup(after, {link_name(1, 5)})[0].status, 0) << "it has to tell everything again";
  EXPECT_EQ(after.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
}

TEST_F(Links, TheConfigurationOfTheHostIsHandedOutAlsoBeforeHello) {
  LinkLibrary l(path(), 1);
  EXPECT_EQ(l.ask<char>(MIGR_LINKS_CONFIG, {}).records.size(), std::strlen("{\"policy\": \"exact\"}"));
  EXPECT_EQ(l.ask<migr_links_name>(MIGR_LINKS_WITHDRAW, {}).head.status, EACCES);
  ASSERT_EQ(l.hello().head.status, 0);
  const auto r = l.ask<char>(MIGR_LINKS_CONFIG, {});
  EXPECT_EQ(r.head.status, 0);
  EXPECT_EQ(std::string(r.records.begin(), r.records.end()), "{\"policy\": \"exact\"}");
  std::filesystem::remove(dir_.path + "/links.json");
  EXPECT_EQ(l.ask<char>(MIGR_LINKS_CONFIG, {}).head.count, 0u);
  std::ofstream(dir_.path + "/links.json") << std::string(kLinksFileBytes + 1, ' ');
  EXPECT_EQ(l.ask<char>(MIGR_LINKS_CONFIG, {}).head.status, EINVAL);
}

TEST_F(Links, TooManyQuestionsAreEBUSYAndOthersGoOn) {
  TwoProcesses two(path());
  auto& [other, a, b] = two;
  ASSERT_EQ(b.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  directory_.wait = true;
  std::vector<std::uint32_t> seqs;
  for (int i = 0; i < MIGR_LINKS_MAX_PENDING; i++) seqs.push_back(a.send<migr_links_name>(MIGR_LINKS_LOOKUP, {link_name(9, 1)}));
  EXPECT_EQ(a.ask<migr_links_name>(MIGR_LINKS_LOOKUP, {link_name(9, 1)}).head.status, EBUSY);
  EXPECT_EQ(lookup(b, {link_name(1, 5)})[0].status, 0) << "another process waits for nothing of it";
  const auto asked = [this] {
    std::lock_guard lock(directory_.mutex);
    return directory_.asked;
  };
  EXPECT_TRUE(soon([&] { return asked() > 0; }));
  EXPECT_EQ(asked(), 1) << "one question of a process at a time";
  directory_.go_on();
  for (const auto seq : seqs) EXPECT_EQ(a.reply(seq).as<migr_links_found>()[0].status, ENOENT);
  EXPECT_EQ(a.ask<migr_links_name>(MIGR_LINKS_LOOKUP, {link_name(9, 1)}).head.status, 0) << "they do not count for ever";
}

TEST_F(Links, WhoDoesNotReadIsNotReadAndMissesPushesOnly) {
  TwoProcesses two(path());
  auto& [other, deaf, b] = two;
  const std::vector<migr_links_port> ports(MIGR_LINKS_MAX_RECORDS);
  for (int i = 0; i < 20 * kLinkPushesKept; i++) socket_.tell_ports(ports);
  std::ofstream(dir_.path + "/links.json") << std::string(kLinksFileBytes, ' ');
  constexpr std::uint32_t kMany = 5000;
  std::uint32_t sent = 0;
  for (int idle = 0; idle < 100 && sent < kMany;) {
    if (deaf.send_now(deaf.head(MIGR_LINKS_CONFIG)))
      sent++, idle = 0;
    else
      usleep(10'000), idle++;
  }
  EXPECT_LT(sent, kMany) << "it waits for what it does not read";
  EXPECT_EQ(b.ask<migr_links_name>(MIGR_LINKS_LOOKUP, {link_name(9, 1)}).head.status, 0) << "the others do not";
  std::uint32_t answers = 0, pushes = 0;
  for (LinkPacket p; answers < sent && deaf.receive(p);) (p.head.type == MIGR_LINKS_PORTS ? pushes : answers)++;
  EXPECT_EQ(answers, sent);
  EXPECT_LT(pushes, 20u * kLinkPushesKept) << "what is pushed is dropped";
}

TEST_F(Links, AFloodOfPacketsIsReadSlowly) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  std::thread flood([&] {
    for (int i = 0; i < 2 * kLinkPacketsPerS; i++) l.send<migr_links_vqp_state>(MIGR_LINKS_STATE, {});
  });
  const auto begun = std::chrono::steady_clock::now();
  int answers = 0;
  for (LinkPacket p; answers < 2 * kLinkPacketsPerS && l.receive(p);) answers += p.head.type == (MIGR_LINKS_STATE | MIGR_LINKS_REPLY);
  flood.join();
  EXPECT_EQ(answers, 2 * kLinkPacketsPerS) << "but all of them";
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(900));
}

// ---- channels

TEST_F(Links, TwoEndsOfAChannelMeet) {
  TwoProcesses two(path());
  auto& [other, a, b] = two;
  const auto of_a = link_channel(b.instance(), 1, 1, 100), of_b = link_channel(a.instance(), 2, 1, 200);
  auto r = a.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {of_a}).as<migr_links_channel>()[0];
  EXPECT_EQ(r.status, EAGAIN);
  EXPECT_EQ(r.qpn, 0u) << "nothing of one's own comes back";
  const auto knock = b.push(MIGR_LINKS_KNOCK).as<migr_links_channel>()[0];
  EXPECT_EQ(gid_of(knock.peer), a.instance());
  EXPECT_EQ(knock.round, 1u);
  EXPECT_EQ(knock.link, 1u);
  r = b.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {of_b}).as<migr_links_channel>()[0];
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(gid_of(r.peer), a.instance());
  EXPECT_EQ(r.qpn, 100u);
  EXPECT_EQ(r.psn, 107u);
  EXPECT_EQ(gid_of(r.gid), gid_of(of_a.gid));
  r = a.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {of_a}).as<migr_links_channel>()[0];
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.qpn, 200u);
}

TEST_F(Links, EndsOfDifferentRoundsDoNotMeet) {
  TwoProcesses two(path());
  auto& [other, a, b] = two;
  auto one = [](LinkLibrary& l, const migr_links_channel& c) { return l.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {c}).as<migr_links_channel>()[0]; };
  EXPECT_EQ(one(a, link_channel(b.instance(), 1, 2, 101)).status, EAGAIN);
  const auto r = one(b, link_channel(a.instance(), 2, 1, 200));
  EXPECT_EQ(r.status, ESTALE);
  EXPECT_EQ(r.round, 2u);
  EXPECT_EQ(r.qpn, 0u);
  EXPECT_EQ(one(b, link_channel(a.instance(), 2, 2, 201)).qpn, 101u);
  EXPECT_EQ(one(a, link_channel(b.instance(), 1, 2, 102)).status, EINVAL) << "another QP of the same round";
  EXPECT_EQ(one(a, link_channel(b.instance(), 1, 1, 101)).status, EINVAL) << "back to a former round";
  EXPECT_EQ(one(a, link_channel(b.instance(), 1, 3, 103)).status, EAGAIN);
  EXPECT_EQ(b.push(MIGR_LINKS_KNOCK).as<migr_links_channel>()[0].round, 2u);
  EXPECT_EQ(b.push(MIGR_LINKS_KNOCK).as<migr_links_channel>()[0].round, 3u);
}

TEST_F(Links, AChannelToNobodyIsENOENTAndToOneselfEINVAL) {
  LinkLibrary a(path(), 1);
  ASSERT_EQ(a.hello().head.status, 0);
  const auto r = a.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {link_channel(Instance{9}, 1, 1, 100), link_channel(a.instance(), 1, 1, 101)});
  EXPECT_EQ(r.head.status, 0);
  const auto ends = r.as<migr_links_channel>();
  EXPECT_EQ(ends[0].status, ENOENT);
  EXPECT_EQ(ends[1].status, EINVAL);
  EXPECT_STRNE(r.head.text, "");
}

TEST_F(Links, AnEndThatIsGivenUpIsFoundNoMore) {
  TwoProcesses two(path());
  auto& [other, a, b] = two;
  const auto of_a = link_channel(b.instance(), 1, 1, 100), of_b = link_channel(a.instance(), 2, 1, 200);
  EXPECT_EQ(a.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {of_a}).as<migr_links_channel>()[0].status, EAGAIN);
  EXPECT_EQ(a.ask<migr_links_channel>(MIGR_LINKS_CHANNEL_END, {of_a}).head.status, 0);
  EXPECT_EQ(b.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {of_b}).as<migr_links_channel>()[0].status, EAGAIN);
}

// ---- threads that are inside

migr_text_range marked_code() { return {marked().start, marked().bytes, 0, 0}; }

/// A process with a thread inside, and its library.
struct Insider {
  Insider(const std::string& path, std::uint8_t who)
      : process(path, [this] { std::thread(inside_and_below, shared).detach(); }), library(process.take(), who) {
    EXPECT_EQ(library.hello().head.status, 0);
    EXPECT_TRUE(soon([this] { return shared->ready == 1; }));
  }
  ~Insider() { munmap(shared, sizeof *shared); }
  std::uint32_t ask(int limit_ms) { return library.send<migr_text_range>(MIGR_LINKS_OUTSIDE, {marked_code()}, static_cast<std::uint64_t>(limit_ms)); }
  void leave() { shared->leave = true; }
  Shared* const shared = share();
  OtherProcess process;
  LinkLibrary library;
};

struct Outside : Links {
  static constexpr int kLongMs = 60'000;  // longer than a test waits
  void SetUp() override {
    Links::SetUp();
    kLinkOutsideMs = kLongMs;
  }
  void TearDown() override {
    Links::TearDown();
    kLinkOutsideMs = before_;
  }
  const int before_ = kLinkOutsideMs;
};

TEST_F(Outside, IsAnsweredWhenTheThreadHasLeftAndAllElseMeanwhile) {
  Insider a(path(), 1);
  const auto seq = a.ask(kLongMs);
  EXPECT_EQ(lookup(a.library, {link_name(1, 5)})[0].status, ENOENT);
  EXPECT_EQ(a.library.ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(1, 0)}).head.status, 0);
  usleep(100'000);
  LinkPacket early;
  while (a.library.receive(early, 0)) EXPECT_EQ(early.head.type, MIGR_LINKS_PORTS) << "while the thread is inside";
  a.leave();
  const auto r = a.library.reply(seq);
  EXPECT_EQ(r.head.status, 0) << r.head.text;
  EXPECT_EQ(r.head.type, MIGR_LINKS_OUTSIDE | MIGR_LINKS_REPLY);
  EXPECT_EQ(a.library.reply(a.ask(0)).head.status, 0) << "nobody is inside: one look is enough";
}

TEST_F(Outside, ETIMEDOUTNamesTheThreadThatStays) {
  Insider a(path(), 1);
  auto expect_timeout = [&](int limit_ms) {
    const auto r = a.library.reply(a.ask(limit_ms));
    EXPECT_EQ(r.head.status, ETIMEDOUT);
    EXPECT_NE(std::string(r.head.text).find("thread " + std::to_string(a.shared->inside)), std::string::npos) << r.head.text;
  };
  expect_timeout(0);
  expect_timeout(100);
  kLinkOutsideMs = 100;
  expect_timeout(kLongMs);
}

TEST_F(Outside, NoProcessWaitsForAnother) {
  Insider a(path(), 1), b(path(), 2);
  const auto of_a = a.ask(kLongMs), of_b = b.ask(kLongMs);
  b.leave();
  EXPECT_EQ(b.library.reply(of_b).head.status, 0);
  a.leave();
  EXPECT_EQ(a.library.reply(of_a).head.status, 0);
}

TEST_F(Outside, OneOfAProcessIsDoneAfterTheOther) {
  Insider a(path(), 1);
  const auto first = a.ask(kLongMs), second = a.ask(kLongMs);
  usleep(50'000);
  a.leave();
  // Both at once would find each other's tracer.
  EXPECT_EQ(a.library.reply(first).head.status, 0);
  EXPECT_EQ(a.library.reply(second).head.status, 0);
}

TEST_F(Outside, AContainerHasHalfOfTheScanners) {
  const PidNamespace container;
  if (!container.made()) GTEST_SKIP() << "cannot make a PID namespace";
  std::vector<std::unique_ptr<Insider>> all;
  for (int i = 0; i < kLinkScanners; i++)
    all.push_back(container.born_in([&] { return std::make_unique<Insider>(path(), static_cast<std::uint8_t>(1 + i)); }));
  for (const auto& a : all) a->ask(kLongMs);
  usleep(50'000);
  Insider other(path(), 100);
  other.leave();
  EXPECT_EQ(other.library.reply(other.ask(kLongMs)).head.status, 0);
}

TEST_F(Outside, WhoDiesOrHangsUpLeavesNothingBehind) {
  std::vector<std::unique_ptr<Insider>> gone;
  for (int i = 0; i < 2 * kLinkScanners; i++) {
    auto& a = *gone.emplace_back(std::make_unique<Insider>(path(), static_cast<std::uint8_t>(1 + i)));
    a.ask(kLongMs);
    usleep(10'000);
    i % 2 ? a.process.end() : a.library.hang_up();
    a.library.close();
  }
  Insider b(path(), 100);
  b.leave();
  const auto r = b.library.reply(b.ask(kLongMs));
  EXPECT_EQ(r.head.status, 0) << "all who look are free again: " << r.head.text;
  EXPECT_TRUE(soon([&] { return socket_.connections() == 1; }));
}

TEST_F(Outside, TheEndOfMigrdDoesNotWaitForThreads) {
  Insider a(path(), 1);
  a.ask(kLongMs);
  usleep(50'000);
  const auto begun = std::chrono::steady_clock::now();
  socket_.stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
}

TEST_F(Outside, AProcessThatHasEndedIsESRCH) {
  Insider a(path(), 1);
  a.process.end();
  EXPECT_EQ(a.library.reply(a.ask(kLongMs)).head.status, ESRCH);
}

TEST_F(Outside, AProcessThatIsTracedIsEPERM) {
  OtherProcess other(path(), [] { ptrace(PTRACE_TRACEME, 0, 0, 0); });
  LinkLibrary l(other.take(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  EXPECT_EQ(l.ask<migr_text_range>(MIGR_LINKS_OUTSIDE, {marked_code()}, 100).head.status, EPERM);
}

TEST_F(Outside, RangesThatAreNoneAreEINVALAndTooManyE2BIG) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  const std::vector<std::function<void(migr_text_range&)>> bad = {
      [](auto& r) { r.bytes = 0; },
      [](auto& r) { r.bytes = -r.start; },
      [](auto& r) { r.kind = 2; },
      [](auto& r) { r.reserved = 1; },
  };
  for (std::size_t i = 0; i < bad.size(); i++) {
    auto r = marked_code();
    bad[i](r);
    EXPECT_EQ(l.ask<migr_text_range>(MIGR_LINKS_OUTSIDE, {marked_code(), r}).head.status, EINVAL) << i;
  }
  const std::vector<migr_text_range> many(MIGR_PROC_MAX_TEXT_RANGES + 1, marked_code());
  EXPECT_EQ(l.ask(MIGR_LINKS_OUTSIDE, many).head.status, E2BIG);
}

// ---- what people see

migr_links_vqp_state state_of(std::uint32_t vqpn, std::uint32_t link, std::uint32_t phase, const char* why = "") {
  migr_links_vqp_state s{};
  s.name = link_name(1, vqpn);
  s.link = link;
  s.phase = phase;
  std::strncpy(s.why, why, sizeof s.why - 1);
  return s;
}

TEST_F(Links, WhatIsLeftOnAPortAndWhatCannotLeaveIt) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  ASSERT_EQ(l.ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(1, 0), link_of(1, 1)}).head.status, 0);
  ASSERT_EQ(l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5), link_vqp(1, 6), link_vqp(1, 7)}).head.status, 0);
  unsigned n = 0;
  EXPECT_EQ(table_.stuck_on("rxe0", 1).size(), 1u) << "a vQP has no backup before it says so";
  ASSERT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {state_of(5, 0, MIGR_LINKS_VQP_READY), state_of(6, 0, MIGR_LINKS_VQP_NONE, "has an SRQ"),
                                                           state_of(7, 1, MIGR_LINKS_VQP_NONE), state_of(99, 0, MIGR_LINKS_VQP_NONE, "is no RC QP")}).head.status, 0);
  const auto told = table_.reports(false);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].vqps(), 4u) << "one was not published";
  EXPECT_EQ(told[0].backed(), 1u);
  EXPECT_EQ(told[0].without_size(), 3);
  const auto stuck = table_.stuck_on("rxe0", 0);
  ASSERT_EQ(stuck.size(), 1u);
  EXPECT_NE(stuck[0].find("2 vQPs without a backup (has an SRQ)"), std::string::npos) << stuck[0];
  EXPECT_TRUE(table_.stuck_on("rxe0", 2).empty());
  EXPECT_TRUE(table_.stuck_on("rxe9", 0).empty());
  auto left = table_.left_on("rxe0", 1, n);
  EXPECT_EQ(n, 1u);
  ASSERT_EQ(left.size(), 1u);
  EXPECT_NE(left[0].find("2 vQPs still there"), std::string::npos) << left[0];
  EXPECT_TRUE(table_.left_on("rxe9", 1, n).empty());
  EXPECT_EQ(n, 0u);
  left = table_.away_from("rxe1", 1, 10, n);
  EXPECT_EQ(n, 1u);
  ASSERT_EQ(left.size(), 1u);
  EXPECT_NE(left[0].find("2 vQPs not there"), std::string::npos) << left[0];
  ASSERT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {state_of(5, 1, MIGR_LINKS_VQP_READY), state_of(6, 0, MIGR_LINKS_VQP_NONE)}, 9).head.status, 0);
  EXPECT_EQ(table_.away_from("rxe1", 1, 10, n).size(), 1u);
  ASSERT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {}, 10).head.status, 0);
  EXPECT_TRUE(table_.away_from("rxe1", 1, 10, n).empty()) << "it says that this is all";
  EXPECT_EQ(table_.left_on("rxe0", 1, n).size(), 1u);
  ASSERT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {state_of(6, 0, MIGR_LINKS_VQP_BROKEN)}).head.status, 0);
  EXPECT_TRUE(table_.left_on("rxe0", 1, n).empty()) << "what is broken is nowhere";
}

TEST_F(Links, WhatIsNotPublishedCountsUntilItIs) {
  LinkLibrary l(path(), 1);
  ASSERT_EQ(l.hello().head.status, 0);
  ASSERT_EQ(l.ask<migr_links_link>(MIGR_LINKS_LINKS, {link_of(1, 0), link_of(1, 1)}).head.status, 0);
  const char* const why = "cannot open rxe1: No such device";
  ASSERT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {state_of(5, 0, MIGR_LINKS_VQP_NONE, why), state_of(6, 0, MIGR_LINKS_VQP_NONE, why)}).head.status, 0);
  const auto count = [&](unsigned vqps, unsigned backed) {
    const auto told = table_.reports(false);
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].vqps(), vqps);
    EXPECT_EQ(told[0].backed(), backed);
  };
  count(2, 0);
  const auto stuck = table_.stuck_on("rxe0", 1);
  ASSERT_EQ(stuck.size(), 1u);
  EXPECT_NE(stuck[0].find(std::string("2 vQPs without a backup (") + why + ")"), std::string::npos) << stuck[0];
  ASSERT_EQ(l.ask<migr_links_vqp>(MIGR_LINKS_PUBLISH, {link_vqp(1, 5)}).head.status, 0);
  count(2, 0);  // it is being made
  EXPECT_EQ(table_.stuck_on("rxe0", 1).size(), 1u);
  ASSERT_EQ(l.ask<migr_links_vqp_state>(MIGR_LINKS_STATE, {state_of(5, 0, MIGR_LINKS_VQP_READY)}).head.status, 0);
  count(1, 1);  // the other one has gone
  EXPECT_TRUE(table_.stuck_on("rxe0", 1).empty());
}

wire::LinksReply everything() {
  wire::LinksReply r;
  r.set_directory("redis at " + std::string(60, 'h') + ":6379");
  r.set_directory_error(std::string(200, 'e') + " " + std::string(30, 'f'));
  for (unsigned flags : {0u, 0xfu, 0x1fu}) {
    auto* p = r.add_ports();
    p->set_device(std::string(60, 'd'));
    p->set_port(65535);
    p->set_netdev("123456789012345");
    p->set_flags(flags);
    p->set_flaps(123456);
  }
  auto* p = r.add_processes();
  p->set_pid(4194304);
  p->set_comm("123456789012345");
  p->set_making(MIGR_LINKS_REBUILD);
  p->set_atomics(MIGR_LINKS_RELAYED);
  p->set_vqps(65536);
  p->set_backed(65536);
  p->set_error(std::string(70, 'x') + " " + std::string(90, 'y'));
  auto* l = p->add_links();
  l->set_device(std::string(60, 'd'));
  l->set_port(1);
  l->set_state(MIGR_LINKS_LINK_DOWN);
  l->set_cause(MIGR_LINKS_CAUSE_APPLICATION);
  l->set_vqps(65536);
  l->set_backups(65536);
  l->set_spares(4096);
  l->set_channels(4096);
  l->set_why(std::string(MIGR_LINKS_WHY_MAX - 1, 'w'));
  auto* w = p->add_without();
  w->set_vqps(65536);
  w->set_phase(MIGR_LINKS_VQP_NONE);
  w->set_why("has an SRQ, " + std::string(40, 'w'));
  auto* s = p->add_switches();
  s->set_when_ns(1'800'000'000'000'000'000);
  s->set_to(1);
  s->set_cause(MIGR_LINKS_CAUSE_HEARTBEAT);
  s->set_outcome(MIGR_LINKS_SWITCH_BROKEN);
  s->set_vqps(65536);
  s->set_resume_ns(12'345'678'901);
  s->set_replayed(4'000'000'000);
  return r;
}

/// Of changes of link, a line with its level for each.
class SwitchLog : public ::testing::Test {
 protected:
  void SetUp() override {
    auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(said_);
    sink->set_pattern("%l %v");
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink));
    table_.enter(kWho, {.pid = 712, .uid = 0, .comm = "kv", .configured = "", .hello = {}});
    ASSERT_TRUE(table_.set_links(kWho, std::vector{link_of(1, 0), link_of(1, 1)}));
  }
  void TearDown() override { spdlog::set_default_logger(before_); }
  std::string said_of(const std::vector<migr_links_switch>& changes, std::uint32_t flags_of_link_0 = 0) {
    migr_links_port port{};
    std::strcpy(port.device, "rxe0");
    port.port = 1;
    port.flags = flags_of_link_0;
    said_.str("");
    EXPECT_TRUE(table_.add_switches(kWho, changes, {&port, 1}));
    return said_.str();
  }
  static migr_links_switch one(std::uint32_t cause, std::uint32_t from = 0, std::uint32_t outcome = MIGR_LINKS_SWITCH_DONE) {
    migr_links_switch s{};
    s.from = from, s.to = 1 - from, s.cause = cause, s.outcome = outcome, s.tries = 1;
    (outcome == MIGR_LINKS_SWITCH_DONE ? s.vqps : s.broken) = 1;
    return s;
  }
  static constexpr Instance kWho{1};
  LinkTable table_{"here"};
  std::ostringstream said_;
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(SwitchLog, SaysWhatHadFailed) {
  const std::string away = "1 vQP from link 0 (rxe0/1) to link 1 (rxe1/1): ";
  const std::string failed = "warning process 712 (kv): " + away;
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_NETLINK)}), failed + "local failure, netlink\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_EVENT)}), failed + "local failure, event\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_HEARTBEAT)}), failed + "path failure, heartbeat\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_COMPLETION)}), failed + "path failure, completion\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_COMPLETION)}, MIGR_LINKS_PORT_DOWN_NETLINK), failed + "local failure, completion\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_COMPLETION)}, MIGR_LINKS_PORT_DOWN_OPERATOR), failed + "path failure, completion\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_PEER)}), failed + "failure told by the other end, peer\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_PEER)}, MIGR_LINKS_PORT_GONE), failed + "local failure, peer\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_OPERATOR)}, MIGR_LINKS_PORT_DOWN_OPERATOR), "info process 712 (kv): " + away + "operator\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_RETURN, 1)}), "info process 712 (kv): 1 vQP from link 1 (rxe1/1) to link 0 (rxe0/1): return\n");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_COMPLETION, 0, MIGR_LINKS_SWITCH_BROKEN)}), "warning process 712 (kv): 1 vQP given up on link 0 (rxe0/1): path failure, completion\n");
}

TEST_F(SwitchLog, HasOneLineForThoseThatWentTogether) {
  const auto there = one(MIGR_LINKS_CAUSE_HEARTBEAT), back = one(MIGR_LINKS_CAUSE_RETURN, 1);
  EXPECT_EQ(said_of({there, back, there, there}), "warning process 712 (kv): 3 vQPs from link 0 (rxe0/1) to link 1 (rxe1/1): path failure, heartbeat\n"
                                                  "info process 712 (kv): 1 vQP from link 1 (rxe1/1) to link 0 (rxe0/1): return\n");
}

TEST_F(SwitchLog, IsNotFilledByOneProcess) {
  constexpr int kMost = 60;
  for (int i = 0; i < kMost; i++) EXPECT_NE(said_of({one(MIGR_LINKS_CAUSE_PEER)}), "");
  EXPECT_EQ(said_of({one(MIGR_LINKS_CAUSE_PEER)}), "");
  table_.enter({2}, {});
  EXPECT_TRUE(table_.add_switches({2}, std::vector{one(MIGR_LINKS_CAUSE_PEER)}, {}));
  EXPECT_NE(said_.str(), "");
}

TEST(LinksText, NoLineIsLongerThan80Columns) {
  const auto text = links_text(everything());
  std::size_t lines = 0;
  for (std::size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1, lines++)
    EXPECT_LE(end - at, 80u) << text.substr(at, end - at);
  EXPECT_GE(lines, 15u);
  for (const char* word : {"NO ANSWER", "down (operator, netlink, gone)", "down (application)", "has an SRQ", "heartbeat", "12345.679 ms", "broken", "paths rebuild", "atomics relayed"})
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
}

TEST(LinksText, JsonHasTheSame) {
  const auto j = links_json(everything());
  EXPECT_EQ(j["ports"][1]["state"], "down");
  EXPECT_EQ(j["ports"][1]["down_by"].size(), 3u);
  EXPECT_EQ(j["ports"][0]["state"], "up");
  const auto& p = j["processes"][0];
  EXPECT_EQ(p["links"][0]["state"], "down");
  EXPECT_EQ(p["paths"], "rebuild");
  EXPECT_EQ(p["links"][0]["pool"], 4096);
  EXPECT_EQ(p["atomics"], "relayed");
  EXPECT_EQ(p["without_backup"][0]["vqps"], 65536);
  EXPECT_EQ(p["last_switchover"]["resume_ns"], 12'345'678'901);
  EXPECT_EQ(p["last_switchover"]["done"], false);
  EXPECT_TRUE(links_json({})["directory_error"].is_null());
  EXPECT_NE(links_text({}).find("no process"), std::string::npos);
}

}  // namespace
}  // namespace migr::link_socket_test
