// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What another process says over its channel, and whom it is believed to be. The library is this program's own; the others are played.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "../../libmigr/links/channel.h"
#include "../../libmigr/links/config.h"
#include "../../libmigr/links/state.h"
#include "../../libmigr/shadow.h"
#include "../../libmigr/whereabouts.h"
#include "leave.h"
#include "store.h"

namespace {

using namespace migr;
using namespace migr::links;

constexpr Peer kRight{1}, kOther{2};

std::filesystem::path folder() { return std::filesystem::temp_directory_path() / ("channel_test." + std::to_string(getpid())); }

template <class Condition>
bool wait_for(Condition&& condition) {
  for (const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20); !condition(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (std::chrono::steady_clock::now() > deadline) return false;
  return true;
}

std::unique_lock<std::mutex> locked() { return std::unique_lock(Registry::get().lock); }

/// What waits to be sent, by type.
std::vector<std::uint16_t> said(const Channel& c) {
  std::vector<std::uint16_t> out;
  for (const auto& message : c.waiting) {
    MessageHead head;
    std::memcpy(&head, message.data(), sizeof head);
    out.push_back(head.type);
  }
  return out;
}
template <class Record>
Record last(const Channel& c) {
  Record out{};
  if (!c.waiting.empty() && c.waiting.back().size() == sizeof(MessageHead) + sizeof out) std::memcpy(&out, c.waiting.back().data() + sizeof(MessageHead), sizeof out);
  return out;
}

class Channels : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::filesystem::create_directories(folder());
    std::ofstream(folder() / "links.json") << R"({"links": [{"device": "a0", "gid_index": 0}, {"device": "a1", "gid_index": 0}], "policy": "exact", "paths": "rebuild", "heartbeat_ms": 0})";
    setenv("MIGR_LINKS", (folder() / "links.json").c_str(), 1);
    setenv("MIGR_TABLES", "private", 1);
    setenv("MIGR_PROC_SOCKET", (folder() / "none").c_str(), 1);
    int n;
    ibv_device** const list = ibv_get_device_list(&n);
    for (int i = 0; i < n; ++i)
      if (!std::strcmp(list[i]->name, "a0")) context = ibv_open_device(list[i]);
    ASSERT_NE(context, nullptr);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 64, nullptr, nullptr, 0);
  }
  /// One whose other end nobody knows yet.
  void connect() {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    qp_ = ibv_create_qp(pd, &init);
    ASSERT_NE(qp_, nullptr);
    ASSERT_NO_FATAL_FAILURE(connect_qp());
  }
  void connect_qp() {
    ibv_qp_attr a{};
    a.port_num = 1;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = 0x77;
    a.ah_attr.is_global = a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid.raw[0] = 0xfd;
    a.ah_attr.grh.dgid.raw[15] = 7;
    a.qp_state = IBV_QPS_INIT;
    ASSERT_EQ(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    a.qp_state = IBV_QPS_RTR;
    ASSERT_EQ(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
    a.qp_state = IBV_QPS_RTS;
    ASSERT_EQ(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC), 0);
    ASSERT_TRUE(wait_for([&] {
      const auto guard = locked();
      const QpLink* const l = vqp();
      return l && l->told && has_room_for(*l->twin, 1, *l->q);
    }));
  }
  void TearDown() override {
    {
      const auto guard = locked();
      for (const Peer& peer : {kRight, kOther})
        while (Channel* const c = state() ? find_channel(peer, link()) : nullptr) destroy_channel(c);
      if (vqp()) store_withdraw(&vqp()->peer, 1);
    }
    if (qp_) {
      EXPECT_EQ(ibv_destroy_qp(qp_), 0);
    }
  }
  /// Null: it has no backup yet. Caller holds the lock, as of all below.
  QpLink* vqp() const {
    for (QpLink* l : state() ? state()->qps : std::vector<QpLink*>())
      if (&l->q->app == qp_) return l;
    return nullptr;
  }
  static Link& link() { return state()->links[1]; }
  /// Of a process that has spoken already.
  static Channel& channel_of(const Peer& peer) {
    std::string why;
    Channel* const c = make_channel(peer, link(), 1, why);
    if (!c) throw std::runtime_error(why);
    c->connected = c->heard = c->acknowledged = true;
    return *c;
  }
  static PathRecord path(const QpLink& l, std::uint32_t serial) {
    PathRecord out{.to = l.name, .from = l.peer, .path = {}};
    out.path.link = 1;
    out.path.serial = serial;
    out.path.gid[0] = 0xfd;
    out.path.qpn = 0x99;
    out.path.mtu = IBV_MTU_512;
    return out;
  }
  /// migrd names kRight as the other end from now on.
  void name_right() {
    migr_links_vqp record{};
    {
      const auto guard = locked();
      std::memcpy(record.name.gid, vqp()->peer.gid, sizeof record.name.gid);
      record.name.vqpn = vqp()->peer.vqpn;
    }
    record.making = MIGR_LINKS_REBUILD;
    record.links = 3;
    store_publish(kRight.data(), &record, 1);
    ASSERT_TRUE(wait_for([&] {
      const auto guard = locked();
      return vqp() && vqp()->instance == kRight;
    }));
  }
  /// Of that generation of the other end.
  static StateRecord from(std::uint32_t generation, StateRecord record) {
    record.from.reserved = generation;
    return record;
  }
  static StateRecord word(const QpLink& l, std::uint32_t flags) { return {.to = l.name, .from = l.peer, .epoch = 1 << 3 | 1, .serial = 1, .executed = {}, .flags = flags}; }

  static inline ibv_context* context;
  static inline ibv_pd* pd;
  static inline ibv_cq* cq;
  ibv_qp* qp_ = nullptr;
};

TEST_F(Channels, NobodyIsTakenForTheOtherEndWhomTheDirectoryDoesNotName) {
  ASSERT_NO_FATAL_FAILURE(connect());
  Channel *other, *right;
  migr_links_vqp record{};
  {
    const auto guard = locked();
    QpLink& l = *vqp();
    other = &channel_of(kOther), right = &channel_of(kRight);
    got_path(*other, path(l, 3));
    EXPECT_EQ(said(*other).back(), kPathMessage);
    EXPECT_EQ(last<PathRecord>(*other).path.qpn, 0u) << "it is asked again";
    EXPECT_EQ(last<PathRecord>(*other).path.serial, 3u);
    got_want(*other, {.to = l.name, .from = l.peer, .newest = 4, .no_spare = false});
    EXPECT_EQ(last<PathRecord>(*other).path.serial, 4u);
    got_take(*other, {.to = l.name, .from = l.peer, .id = 1, .serial = 5, .reserved = 0});
    EXPECT_EQ(last<WantRecord>(*other).newest, 5u);
    const std::size_t before = said(*other).size();
    got_state(*other, word(l, 0));
    got_state(*other, word(l, kGone | kFinal));
    got_drain(*other, {.to = l.name, .from = l.peer, .left = 0, .epoch = 1 << 3 | 1, .drained = true, .flags = 0});
    got_state(*right, word(l, 0));
    EXPECT_EQ(said(*other).size(), before) << "what would end the connection there";
    EXPECT_EQ(l.instance, Peer{});
    EXPECT_EQ(l.stage, Stage::kMaking);
    EXPECT_EQ(l.epoch, 0u);
    EXPECT_EQ(l.legs[1].newest, 0u);
    EXPECT_EQ(l.legs[1].next.qp, nullptr);
    record.name = l.peer;
  }
  record.making = MIGR_LINKS_REBUILD;
  record.links = 3;
  store_publish(kRight.data(), &record, 1);
  EXPECT_TRUE(wait_for([&] {
    const auto guard = locked();
    return vqp()->instance == kRight && !vqp()->unheard;
  }));
  const auto guard = locked();
  QpLink& l = *vqp();
  ASSERT_EQ(said(*right).back(), kStateMessage) << "so that it says its own once more";
  EXPECT_EQ(last<StateRecord>(*right).epoch, 0u);
  EXPECT_EQ(last<StateRecord>(*right).flags, std::uint32_t{kAsks});
  got_path(*other, path(l, 6));
  EXPECT_EQ(said(*other).back(), kStateMessage);
  EXPECT_EQ(last<StateRecord>(*other).flags, std::uint32_t{kGone});
  EXPECT_EQ(l.legs[1].next.qp, nullptr);
  got_path(*right, path(l, 1));
  EXPECT_TRUE(l.legs[1].next.connected);
  EXPECT_EQ(said(*right).back(), kPathMessage);
  got_state(*other, word(l, 0));
  EXPECT_EQ(l.epoch, 0u);
  got_state(*right, word(l, 0));
  EXPECT_EQ(l.epoch, 1u << 3 | 1);
}

/// What has begun at the other end meanwhile goes on when the next one has greeted it.
TEST_F(Channels, WhoseBackupIsAboutToBeMadeAnewIsNotGone) {
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  const auto guard = locked();
  QpLink& l = *vqp();
  Channel& right = channel_of(kRight);
  const PathRecord theirs = path(l, 3);
  const StateRecord change = word(l, 0);
  const WantRecord want{.to = l.name, .from = l.peer, .newest = 4, .no_spare = false};
  store_withdraw(&l.peer, 1);  // as there is none at the end
  forget(l);
  got_path(right, theirs);
  ASSERT_EQ(said(right).back(), kPathMessage);
  EXPECT_EQ(last<PathRecord>(right).path.qpn, 0u) << "it is asked again";
  EXPECT_EQ(last<PathRecord>(right).path.serial, 3u);
  got_want(right, want);
  EXPECT_EQ(last<PathRecord>(right).path.serial, 4u);
  const std::size_t before = said(right).size();
  got_state(right, change);
  EXPECT_EQ(said(right).size(), before) << "what would end the connection there";
  StateRecord of_another = change;
  of_another.from.vqpn ^= 1;
  got_state(right, of_another);
  EXPECT_EQ(last<StateRecord>(right).flags, std::uint32_t{kGone});
  const auto former = std::find_if(state()->formers.begin(), state()->formers.end(), [&](const auto& f) { return &f.first->app == qp_; });
  ASSERT_NE(former, state()->formers.end());
  EXPECT_TRUE(former->second.unheard) << "the next one is not told";
  state()->refused[former->first] = {.why = "no device", .tried_ns = now_ns()};
  EXPECT_FALSE(is_premature(change.to, change.from)) << "the other end waits for one that cannot be made";
  state()->refused.clear();
}

TEST_F(Channels, WhatWasMadeAheadWithAnotherGidThanItsLinkHasNowIsMadeAnew) {
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  const auto guard = locked();
  QpLink& l = *vqp();
  channel_of(kRight);
  got_path(*find_channel(kRight, link()), path(l, 1));
  Path& next = l.legs[1].next;
  ASSERT_TRUE(next.connected);
  drop_unreachable(link());
  EXPECT_TRUE(next.connected);
  link().gid.gid_index ^= 1;
  drop_unreachable(link());
  link().gid.gid_index ^= 1;
  EXPECT_EQ(next.qp, nullptr);
}

TEST_F(Channels, NoneIsProtectedBeforeTheOtherEndHasAnsweredIt) {
  constexpr std::uint32_t kThere = 5;
  ASSERT_NO_FATAL_FAILURE(connect());
  Channel* right;
  {
    const auto guard = locked();
    right = &channel_of(kRight);
  }
  ASSERT_NO_FATAL_FAILURE(name_right());
  EXPECT_TRUE(wait_for([&] {
    const auto guard = locked();
    return !right->waiting.empty() && last<StateRecord>(*right).flags == kAsks;
  })) << "the other end is not asked";
  {
    const auto guard = locked();
    QpLink& l = *vqp();
    EXPECT_EQ(last<StateRecord>(*right).from.reserved, l.name.reserved);
    EXPECT_EQ(last<StateRecord>(*right).to.reserved, 0u);
    EXPECT_EQ(l.stage, Stage::kMaking);
    StateRecord answer = from(kThere, word(l, 0));
    answer.epoch = answer.serial = 0;
    got_state(*right, answer);
  }
  EXPECT_TRUE(wait_for([&] {
    const auto guard = locked();
    return vqp()->stage == Stage::kReady;
  })) << "the other end has answered";
}

TEST_F(Channels, WhatWasSaidOfAConnectionBeforeDoesNotEndTheNext) {
  constexpr std::uint32_t kBefore = 5, kNow = 6;
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  StateRecord gone, change;
  {
    const auto guard = locked();
    QpLink& l = *vqp();
    gone = from(kBefore, word(l, kGone | kFinal)), change = from(kBefore, word(l, 0));
  }
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(ibv_modify_qp(qp_, &a, IBV_QP_STATE), 0);
  ASSERT_NO_FATAL_FAILURE(connect_qp());
  ASSERT_NO_FATAL_FAILURE(name_right());
  const auto guard = locked();
  QpLink& l = *vqp();
  Channel& right = channel_of(kRight);
  ASSERT_GT(l.name.reserved, gone.to.reserved);
  const auto stays = [&] { return l.stage == Stage::kMaking && l.epoch == 0; };
  got_state(right, gone);
  EXPECT_TRUE(stays()) << "they waited for both ends to be connected anew";
  gone.to.reserved = 0;
  got_state(right, gone);
  EXPECT_TRUE(stays()) << "its sender had heard nothing of the connection before";
  got_state(right, change);
  EXPECT_TRUE(stays()) << "a change of the connection before";
  EXPECT_EQ(last<StateRecord>(right).flags, std::uint32_t{kGone});
  EXPECT_EQ(last<StateRecord>(right).to.reserved, kBefore) << "which alone is gone";
  EXPECT_EQ(last<StateRecord>(right).from.reserved, change.to.reserved);
  got_state(right, from(kNow, word(l, kAsks)));
  EXPECT_EQ(last<StateRecord>(right).to.reserved, kNow);
  EXPECT_EQ(l.peer.reserved, kNow);
  got_state(right, gone);
  got_state(right, from(kNow + 1, word(l, kAsks)));
  EXPECT_TRUE(stays());
  EXPECT_EQ(l.peer.reserved, kNow);
  got_state(right, from(kNow, word(l, kGone)));
  EXPECT_EQ(l.stage, Stage::kBroken) << "of this one";
}

// A process connects one of its QPs anew while this end stays in the connection.
TEST_F(Channels, WhoIsConnectedAnewAloneTakesThePlaceOfTheOneBefore) {
  constexpr std::uint32_t kBefore = 5, kNow = 6;
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  const auto guard = locked();
  QpLink& l = *vqp();
  Channel& right = channel_of(kRight);
  const auto asks = [&](std::uint32_t generation) {
    StateRecord question = from(generation, word(l, kAsks));
    question.epoch = question.serial = question.to.reserved = 0;
    return question;
  };
  StateRecord answer = from(kBefore, word(l, 0));
  answer.epoch = answer.serial = 0;
  got_state(right, answer);
  EXPECT_EQ(l.peer.reserved, kBefore);
  set_stage(l, Stage::kReady);
  l.answers.next = l.relay.number = 3;
  l.answers.all.push_back({2, kNotYet, 0});
  const std::size_t before = said(right).size();
  got_state(right, asks(kNow));
  EXPECT_EQ(l.peer.reserved, kBefore) << "what it has wanted is being executed";
  l.answers.all.clear();
  StateRecord changed = asks(kNow);
  changed.epoch = 1 << 3 | 1;
  got_state(right, changed);
  EXPECT_EQ(l.peer.reserved, kBefore) << "it counts from another place";
  EXPECT_EQ(said(right).size(), before);
  got_state(right, asks(kNow));
  EXPECT_EQ(l.peer.reserved, kNow);
  EXPECT_EQ(l.stage, Stage::kMaking);
  EXPECT_EQ(l.answers.next, 1u);
  EXPECT_EQ(l.relay.number, 1u);
  EXPECT_EQ(last<StateRecord>(right).to.reserved, kNow);
  EXPECT_EQ(last<StateRecord>(right).flags, 0u);
  got_state(right, asks(kBefore));
  EXPECT_EQ(l.peer.reserved, kNow) << "it waited since then";
}

TEST_F(Channels, WhoHasGivenUpIsHeardByWhomItNames) {
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  const auto guard = locked();
  QpLink& l = *vqp();
  ASSERT_FALSE(is_heard(l));
  got_state(channel_of(kRight), from(5, word(l, kGone)));
  EXPECT_EQ(l.stage, Stage::kBroken) << "it would ask for ever";
}

TEST_F(Channels, ErrorsOfOneThatIsUnheardAreTheApplications) {
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  const auto looked_at = [&] {
    std::uint64_t passes;
    {
      const auto guard = locked();
      passes = state()->passes;
    }
    return wait_for([&] {
      const auto guard = locked();
      kick(state()->failover_fd);
      return state()->passes > passes + 1;
    });
  };
  Channel* own;
  {
    const auto guard = locked();
    std::string why;
    while (Channel* const c = find_channel(kRight, state()->links[0])) destroy_channel(c);  // the rounds make one, too
    own = make_channel(kRight, state()->links[0], 1, why);
    ASSERT_NE(own, nullptr) << why;
    own->connected = own->heard = own->acknowledged = true;
  }
  EXPECT_TRUE(looked_at());
  {
    const auto guard = locked();
    EXPECT_FALSE(vqp()->own_channel);
    vqp()->peer.reserved = 5;
  }
  EXPECT_TRUE(looked_at());
  const auto guard = locked();
  EXPECT_TRUE(vqp()->own_channel);
  destroy_channel(own);
}

ibv_wc arrives;
bool comes = false;

/// By a message on its way. @return the channel is there still
bool hears(Channel& c, const std::vector<KeyRecord>& keys, std::uint16_t version = kMessageVersion) {
  const Peer peer = c.peer;
  Link& link = *c.link;
  const MessageHead head{.version = version, .type = kKeysMessage, .count = static_cast<std::uint32_t>(keys.size())};
  std::memcpy(c.buffers.data(), &head, sizeof head);
  std::memcpy(c.buffers.data() + sizeof head, keys.data(), keys.size() * sizeof keys[0]);
  arrives = {};
  arrives.wr_id = 1ull << 32;
  arrives.qp_num = c.qp->qp_num;
  arrives.byte_len = static_cast<std::uint32_t>(sizeof head + keys.size() * sizeof keys[0]);
  comes = true;
  const auto before = link.ops;
  link.ops.poll_cq = [](ibv_cq*, int, ibv_wc* wc) { return std::exchange(comes, false) ? (*wc = arrives, 1) : 0; };
  link.ops.post_recv = [](ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) { return 0; };
  poll_channels(link);
  link.ops = before;
  return find_channel(peer, link);
}

TEST_F(Channels, KeysAreOfALinkThatThereMayBe) {
  ASSERT_NO_FATAL_FAILURE(connect());
  const auto guard = locked();
  EXPECT_TRUE(hears(channel_of(kOther), {{.home = kMaxLinks - 1, .vrkey = 1, .prkey = 2}}));
  destroy_channel(find_channel(kOther, link()));
  EXPECT_FALSE(hears(channel_of(kOther), {{.home = kMaxLinks, .vrkey = 1, .prkey = 2}}));
  EXPECT_FALSE(hears(channel_of(kOther), {{.home = ~0u, .vrkey = 1, .prkey = 0}})) << "nor is one gone there";
}

TEST_F(Channels, KeysAreNoMoreThanAProcessMayHave) {
  constexpr std::size_t kPerMessage = (Channel::kMessageBytes - sizeof(MessageHead)) / sizeof(KeyRecord);
  ASSERT_NO_FATAL_FAILURE(connect());
  const auto guard = locked();
  Channel* c = &channel_of(kOther);
  std::uint32_t told = 0;
  bool stands = true;
  while (stands && told <= kMostKeys) {
    std::vector<KeyRecord> keys;
    while (keys.size() < kPerMessage) keys.push_back({.home = told % 2, .vrkey = ++told, .prkey = 2});
    stands = hears(*c, keys);
    if (stands) c->waiting.clear();
  }
  EXPECT_FALSE(stands);
  EXPECT_GT(told, kMostKeys);
  c = &channel_of(kOther);
  for (std::uint32_t i = 0; i < 3; ++i)
    EXPECT_TRUE(hears(*c, {{.home = 0, .vrkey = 1, .prkey = 2 + i}, {.home = 0, .vrkey = 2, .prkey = 0}})) << "of the same one";
}

TEST_F(Channels, WhoSpeaksAnotherVersionIsNotSpokenToAtOnce) {
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_NO_FATAL_FAILURE(name_right());
  {
    const auto guard = locked();
    while (Channel* const c = find_channel(kRight, link())) destroy_channel(c);
    EXPECT_FALSE(hears(channel_of(kRight), {}, kMessageVersion - 1));
    EXPECT_NE(past_of(kRight, link()).other_version_ns, 0u);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto guard = locked();
  EXPECT_EQ(find_channel(kRight, link()), nullptr);
  EXPECT_EQ(vqp()->why, "the other end speaks another version");
  past_of(kRight, link()).other_version_ns = 0;
}

// The process at the other end had moved before it was connected to, and says what its memory is called when this end has a backup already.
TEST_F(Channels, KeysOfWhoHadMovedBeforeAreThoseOfTheDefaultLinkForGood) {
  ASSERT_NO_FATAL_FAILURE(connect());
  const auto guard = locked();
  QpLink& l = *vqp();
  QpShadow& q = *l.q;
  const migr_key_map first{.vrkey = 0x100, .prkey = 0x200, .owner = {}}, second{.vrkey = 0x100, .prkey = 0x300, .owner = {}};
  EXPECT_TRUE(posts_freely(l));
  whereabouts::met(q, {&first, 1});
  EXPECT_FALSE(posts_freely(l));
  EXPECT_TRUE(q.state & kTrapped);
  release_traps(l, 0);
  EXPECT_TRUE(q.state & kTranslateRemote) << "as after it has been on another link";
  EXPECT_EQ(q.remote_keys->physical(0x100), 0x200u);
  l.on = 1;
  whereabouts::met(q, {&second, 1});
  l.on = kHome;
  EXPECT_EQ(q.remote_keys->physical(0x100), 0x200u) << "on another link its own names count";
}

// A thread that polls finds the next error of a path that has failed while another one takes its QP out of its connection.
TEST_F(Channels, NoErrorIsHiddenWhereItsQpIsClosed) {
  ASSERT_NO_FATAL_FAILURE(connect());
  CqShadow elsewhere{};  // whose lock is the point at which the other thread stands
  std::thread closer;
  const auto guard = locked();
  QpLink& l = *vqp();
  QpShadow& q = *l.q;
  ibv_wc error{};
  error.status = IBV_WC_WR_FLUSH_ERR;
  error.qp_num = q.pqpn();
  set_stage(l, Stage::kReady);
  l.hidden.push_back({&elsewhere, error});
  std::unique_lock held(elsewhere.lock);
  closer = std::thread([&] { leave(q, IBV_QPS_ERR); });  // as one that has the Registry's lock
  EXPECT_TRUE(wait_for([&] {
    std::lock_guard of(l.lock);
    return l.hidden.empty();
  }));
  bool hides;
  error.wr_id = 17;
  {
    std::lock_guard of(q.send_cq->lock);
    hides = take_error(*q.send_cq, error, kHome);
  }
  held.unlock();
  closer.join();
  ASSERT_EQ(q.link, nullptr);
  auto& fake = q.send_cq->fake;
  EXPECT_TRUE(!hides || (fake.size() == 1 && fake[0].wr_id == 17)) << "nobody would come for it";
  fake.clear();
}

}  // namespace

int main(int argc, char** argv) { run_and_leave(argc, argv, folder()); }
