// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What another process says over its channel. The library is this program's own; the others are played.
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

namespace {

using namespace migr;
using namespace migr::links;

constexpr Peer kOther{2};

std::filesystem::path folder() { return std::filesystem::temp_directory_path() / ("channel_test." + std::to_string(getpid())); }

template <class Condition>
bool wait_for(Condition&& condition) {
  for (const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20); !condition(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (std::chrono::steady_clock::now() > deadline) return false;
  return true;
}

std::unique_lock<std::mutex> locked() { return std::unique_lock(Registry::get().lock); }

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
  /// One whose other end nobody knows.
  void connect() {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    qp_ = ibv_create_qp(pd, &init);
    ASSERT_NE(qp_, nullptr);
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
      while (Channel* const c = state() ? find_channel(kOther, link()) : nullptr) destroy_channel(c);
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
  static inline ibv_context* context;
  static inline ibv_pd* pd;
  static inline ibv_cq* cq;
  ibv_qp* qp_ = nullptr;
};

ibv_wc arrives;
bool comes = false;

/// By a message on its way. @return the channel is there still
bool hears(Channel& c, const std::vector<KeyRecord>& keys) {
  const Peer peer = c.peer;
  Link& link = *c.link;
  const MessageHead head{.version = kMessageVersion, .type = kKeysMessage, .count = static_cast<std::uint32_t>(keys.size())};
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

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  std::error_code ec;
  std::filesystem::remove_all(folder(), ec);
  fflush(nullptr);
  _exit(result);
}
