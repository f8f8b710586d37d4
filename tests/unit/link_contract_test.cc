// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Both sides of links_wire.h as they are: what libmigr says, migrd takes, and what migrd says, libmigr does.
#include "link_contract_library.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "agent/failover/link_socket.h"
#include "agent/limits.h"
#include "link_library.h"
#include "marked.h"

namespace migr::link_contract_test {
namespace {

struct NobodyElse final : LinkDirectory {
  using LinkDirectory::LinkDirectory;
  std::string name() const override { return "nobody"; }
  std::string error() const override { return ""; }
  std::vector<Answer> find_elsewhere(std::span<const VqpName> names) override { return std::vector<Answer>(names.size()); }
  std::vector<End> meet_elsewhere(std::span<const wire::LinkChannel> ends) override { return std::vector<End>(ends.size()); }
};

class Contract : public ::testing::Test {
 protected:
  void SetUp() override {
    std::strcpy(port_.device, "rxe0");
    port_.port = 1;
    port_.serial = 1;
    start();
    setenv("MIGR_LINKS_SOCKET", path().c_str(), 1);
  }
  void start() {
    socket_ = std::make_unique<LinkSocket>(table_, directory_, [this] { return std::vector<migr_links_port>{port_}; }, "");
    table_.set_knock([this](const Instance& to, const migr_links_channel& from) { socket_->knock(to, from); });
    ASSERT_TRUE(socket_->start(path()));
  }
  std::string path() const { return dir_.path + "/links.sock"; }
  TempFolder dir_;
  migr_links_port port_{};
  LinkTable table_{"here"};
  NobodyElse directory_{table_};
  std::unique_ptr<LinkSocket> socket_;
};

TEST_F(Contract, EveryMessageOfTheLibraryIsTaken) {
  contract::Library l(Instance{1});
  ASSERT_NE(l.life(), 0u);
  const auto reports = table_.reports(false);
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].policy(), std::uint32_t{MIGR_LINKS_EXACT});
  EXPECT_EQ(reports[0].heartbeat_ms(), 200u);
  EXPECT_EQ(reports[0].making(), std::uint32_t{MIGR_LINKS_REBUILD});
  EXPECT_EQ(reports[0].atomics(), std::uint32_t{MIGR_LINKS_RELAYED});
  const std::vector<migr_links_link> links = {link_of(1, 0), link_of(1, 1)};
  EXPECT_EQ(l.links(links), 0);
  std::vector<migr_links_found> found;
  const std::vector<migr_links_name> names = {link_name(1, 5)};
  EXPECT_EQ(l.lookup(names, found), 0);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].status, EAGAIN);
  std::vector<migr_links_vqp> vqps = {link_vqp(1, 5)};
  vqps[0].making = MIGR_LINKS_REBUILD;
  vqps[0].atomics = MIGR_LINKS_RELAYED;
  EXPECT_EQ(l.publish(vqps), 0);
  EXPECT_EQ(l.lookup(names, found), 0);
  EXPECT_EQ(found[0].status, 0);
  EXPECT_EQ(found[0].vqp.path[1].qpn, 1005u);
  EXPECT_EQ(found[0].vqp.making, std::uint32_t{MIGR_LINKS_REBUILD});
  EXPECT_EQ(found[0].vqp.atomics, std::uint32_t{MIGR_LINKS_RELAYED});
  EXPECT_EQ(table_.reports(true)[0].each(0).making(), std::uint32_t{MIGR_LINKS_REBUILD});
  migr_links_vqp_state state{};
  state.name = names[0];
  state.link = 1;
  state.phase = MIGR_LINKS_VQP_READY;
  state.atomics = MIGR_LINKS_RELAYED;
  EXPECT_EQ(l.states({&state, 1}), 0);
  migr_links_switch change{};
  change.to = 1;
  EXPECT_EQ(l.switched({&change, 1}), 0);
  EXPECT_EQ(table_.reports(true)[0].each(0).link(), 1u);
  EXPECT_EQ(table_.reports(true)[0].each(0).atomics(), std::uint32_t{MIGR_LINKS_RELAYED});
  EXPECT_EQ(table_.reports(true)[0].switches_size(), 1);
  EXPECT_EQ(l.withdraw(names), 0);
  EXPECT_EQ(l.lookup(names, found), 0);
  EXPECT_EQ(found[0].status, EAGAIN);
  const std::vector<migr_links_name> wrong = {link_name(1, 0)};
  EXPECT_EQ(l.lookup(wrong, found), EINVAL) << "and what is refused is seen to be";
}

TEST_F(Contract, PushesReachTheLibrary) {
  contract::Library l(Instance{1});
  ASSERT_NE(l.life(), 0u);
  std::vector<migr_links_port> ports, all;
  bool knocked = false, any = false;
  auto look = [&] {
    l.pushes(ports, knocked);
    all.insert(all.end(), ports.begin(), ports.end());
    any |= knocked;
  };
  EXPECT_TRUE(soon([&] { return look(), !all.empty(); }));
  EXPECT_STREQ(all.at(0).device, "rxe0");
  EXPECT_FALSE(any);
  port_.flags = MIGR_LINKS_PORT_DOWN_OPERATOR;
  socket_->tell_ports({&port_, 1});
  EXPECT_TRUE(soon([&] { return look(), all.size() == 2; }));
  EXPECT_EQ(all.at(1).flags, MIGR_LINKS_PORT_DOWN_OPERATOR);
  OtherProcess other(path());
  LinkLibrary peer(other.take(), 2);
  ASSERT_EQ(peer.hello().head.status, 0);
  peer.ask<migr_links_channel>(MIGR_LINKS_CHANNEL, {link_channel(Instance{1}, 2, 1, 200)});
  EXPECT_TRUE(soon([&] { return look(), any; }));
  const std::vector<migr_links_channel> own = {link_channel(Instance{2}, 1, 1, 100)};
  std::vector<migr_links_channel> met;
  EXPECT_EQ(l.channel(own, met), 0);
  ASSERT_EQ(met.size(), 1u);
  EXPECT_EQ(met[0].status, 0);
  EXPECT_EQ(met[0].qpn, 200u);
  // What has ended begins with any round again.
  const std::vector<migr_links_channel> third = {link_channel(Instance{2}, 1, 3, 103)};
  EXPECT_EQ(l.channel(third, met), 0);
  EXPECT_EQ(l.channel(own, met), 0);
  EXPECT_EQ(met.at(0).status, EINVAL) << "rounds only grow";
  EXPECT_EQ(l.end_channels(third), 0);
  EXPECT_EQ(l.channel(own, met), 0);
  EXPECT_EQ(met.at(0).status, 0);
}

TEST_F(Contract, ALibraryHearsWhetherItsThreadsHaveLeft) {
  const int before = std::exchange(kLinkOutsideMs, 200);
  Forked process(2, [](int i, Shared* s) {
    if (i) return inside_and_below(s);
    contract::Library l(Instance{1});
    const unsigned life = l.life();
    s->ready++;
    const migr_text_range range{marked().start, marked().bytes, 0, 0};
    int err;
    while ((err = l.outside({&range, 1})) == ETIMEDOUT) s->progress++;
    s->result = l.life() == life ? err : ENOTCONN;
  });
  EXPECT_TRUE(soon([&] { return process.shared->progress > 0; }));
  EXPECT_EQ(process.shared->result, -1) << "a thread is inside";
  process.shared->leave = true;
  EXPECT_TRUE(soon([&] { return process.shared->result >= 0; }));
  EXPECT_EQ(process.shared->result, 0);
  EXPECT_EQ(process.end(), 0);
  kLinkOutsideMs = before;
}

TEST_F(Contract, AMigrdOfAnotherVersionIsNotAskedAllTheTime) {
  const std::string path = dir_.path + "/other.sock";
  auto listener = listen_to_processes(path);
  ASSERT_TRUE(listener) << listener.error().text;
  setenv("MIGR_LINKS_SOCKET", path.c_str(), 1);
  std::atomic<bool> ends = false;
  int asked = 0;
  std::thread other([&] {
    for (pollfd waiting{listener->n, POLLIN, 0}; !ends;) {
      if (poll(&waiting, 1, 20) != 1) continue;
      const Fd fd(accept4(listener->n, nullptr, nullptr, SOCK_CLOEXEC));
      migr_links_msg m{};
      asked += recv(fd.n, &m, sizeof m, MSG_TRUNC) > 0;
      m.version++;
      m.type |= MIGR_LINKS_REPLY;
      m.status = EPROTO;
      (void)!send(fd.n, &m, sizeof m, MSG_NOSIGNAL);
    }
  });
  {
    contract::Library l(Instance{1});
    for (int i = 0; i < 15; i++, usleep(100'000)) EXPECT_EQ(l.life(), 0u);
  }
  ends = true;
  other.join();
  EXPECT_EQ(asked, 1);
}

TEST_F(Contract, AMigrdThatIsStartedAgainIsAnotherLife) {
  contract::Library l(Instance{1});
  const unsigned first = l.life();
  ASSERT_NE(first, 0u);
  const std::vector<migr_links_vqp> vqps = {link_vqp(1, 5)};
  ASSERT_EQ(l.publish(vqps), 0);
  socket_.reset();
  EXPECT_TRUE(soon([&] { return l.publish(vqps) == ENOTCONN; }));
  table_.leave(Instance{1});
  start();
  EXPECT_TRUE(soon([&] {
    const unsigned now = l.life();
    return now && now != first;
  }));
  EXPECT_EQ(l.publish(vqps), 0);
}

}  // namespace
}  // namespace migr::link_contract_test
