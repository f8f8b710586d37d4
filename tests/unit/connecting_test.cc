/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Who connects a QP: when migrd is asked where its peer is, and what becomes of the answer. */
#include <gtest/gtest.h>

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../libmigr/control.h"
#include "../../libmigr/kernel_link.h"
#include "../../libmigr/links/links.h"
#include "../../libmigr/objects.h"
#include "../../libmigr/path.h"
#include "../../libmigr/switchover/switchover.h"
#include "../../libmigr/whereabouts.h"

namespace migr {

/* ---- what is behind and beside it --------------------------------------------- */

KernelLink::~KernelLink() = default;
Registry& Registry::get() {
  static Registry* registry = new Registry;
  return *registry;
}
std::uint32_t Context::ctx_id() const { return 7; }
QpShadow* known(Registry&, ibv_qp* qp) { return &shadow_of(qp); }
namespace path {
void translate_keys(QpShadow&, std::uint32_t) {}
}  // namespace path
namespace switchover {
const Context* keys_asked_of = nullptr;
void keys_of(const Context& context, std::vector<migr_key_map>&) { keys_asked_of = &context; }
bool destroy_old_paths() { return false; }
}  // namespace switchover
namespace links {
bool met(QpShadow&) { return true; }
}  // namespace links
RemoteKeys::RemoteKeys(const std::vector<std::pair<std::uint32_t, std::uint32_t>>&, bool) {}

/// Destroyed after what whereabouts.cc has: this file is linked before it.
struct Outlived {
  std::weak_ptr<const RemoteKeys> keys;
  bool watched = false;
  ~Outlived() {
    if (watched) _exit(keys.expired());
  }
} outlived;

struct {
  int asked = 0, status = ENOENT;
  bool answered = false;
  migr_qp_address at{};  // the answer, if status is 0
} migrd;

namespace control {
int ask(std::uint16_t type, std::uint64_t, const void*, std::size_t count, std::size_t, int, std::vector<char>& answer) {
  EXPECT_EQ(type, MIGR_MSG_WHERE);
  EXPECT_EQ(count, 1u);
  ++migrd.asked;
  pthread_testcancel();
  migrd.answered = true;
  if (migrd.status) return migrd.status;
  answer.resize(sizeof migrd.at);
  std::memcpy(answer.data(), &migrd.at, sizeof migrd.at);
  return 0;
}
}  // namespace control

namespace {

struct Connect : ::testing::Test {
  Connect() {
    qp.real = &real;
    migrd = {};
    tell({});
  }
  static migr_move from_to(std::uint8_t from, std::uint8_t to) {
    migr_move m{};
    m.birth_gid[0] = from;
    m.gid[0] = to;
    return m;
  }
  static void tell(const std::vector<migr_move>& moves) {
    std::lock_guard guard(Registry::get().lock);
    whereabouts::set_moves(moves);
  }
  /// @return the GID's first byte and the number that the device would be told
  std::pair<int, unsigned> connect(std::uint8_t gid, std::uint32_t qpn) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid.raw[0] = gid;
    attr.dest_qp_num = qpn;
    whereabouts::Connecting peer(&qp.app, attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN);
    peer.look_up();
    std::lock_guard guard(Registry::get().lock);
    EXPECT_FALSE(peer.stale());
    peer.put(attr);
    return {attr.ah_attr.grh.dgid.raw[0], attr.dest_qp_num};
  }
  ibv_qp real{};
  QpShadow qp{};
};

using Peer = std::pair<int, unsigned>;

TEST_F(Connect, WhereNothingHasMovedNothingIsAsked) {
  EXPECT_EQ(connect(1, 30), Peer(1, 30));
  EXPECT_EQ(migrd.asked, 0);
}

TEST_F(Connect, AGidThatProcessesHaveLeftIsAskedFor) {
  tell({from_to(1, 2)});
  migrd.status = 0, migrd.at = {{2}, 44};
  EXPECT_EQ(connect(1, 30), Peer(2, 44));
  EXPECT_EQ(connect(3, 30), Peer(3, 30)) << "nothing has been there";
  EXPECT_EQ(migrd.asked, 1);
}

/// Another thread may be posting while the process ends.
TEST_F(Connect, KeysThatAreReplacedOutliveMain) {
  const auto end = [this] {
    const migr_key_map key{1, 2, {}};
    for (int i = 0; i < 2; ++i) {
      whereabouts::met(qp, {&key, 1});
      if (!i) outlived.keys = qp.held_keys;
    }
    outlived.watched = true;
    exit(0);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(0), "");
}

/// Nothing would say that it does not ask any more, and no checkpoint would ever begin.
TEST_F(Connect, WhoIsCancelledWhileItAsksGetsItsAnswer) {
  tell({from_to(1, 2)});
  pthread_t thread;
  pthread_create(
      &thread, nullptr,
      [](void* test) -> void* {
        pthread_cancel(pthread_self());
        static_cast<Connect*>(test)->connect(1, 30);
        pthread_testcancel();
        return nullptr;
      },
      this);
  void* result = nullptr;
  pthread_join(thread, &result);
  EXPECT_EQ(result, PTHREAD_CANCELED);
  EXPECT_TRUE(migrd.answered);
  EXPECT_EQ(Registry::get().ending, 0u);
}

/// migrd tells its processes after their HELLO: until then nobody knows whether the peer has moved.
TEST_F(Connect, WhoHasNotBeenToldAsks) {
  std::unique_lock guard(Registry::get().lock);
  whereabouts::untold();
  guard.unlock();
  migrd.status = 0, migrd.at = {{2}, 44};
  EXPECT_EQ(connect(1, 30), Peer(2, 44));
  for (const int status : {ENOENT, ENOTCONN, ETIMEDOUT}) {
    migrd.status = status;
    EXPECT_EQ(connect(1, 30), Peer(1, 30)) << "as the application says";
  }
  EXPECT_EQ(migrd.asked, 4);
  tell({});
  connect(1, 30);
  EXPECT_EQ(migrd.asked, 4);
}

TEST_F(Connect, WhatMovesMeanwhileIsAskedForAgain) {
  ibv_qp_attr attr{};
  attr.ah_attr.is_global = 1;
  tell({from_to(1, 2)});
  const whereabouts::Connecting peer = [&] {
    whereabouts::Connecting p(&qp.app, attr, IBV_QP_AV | IBV_QP_DEST_QPN);
    p.look_up();
    return p;
  }();
  EXPECT_FALSE(peer.stale());
  tell({from_to(1, 3)});
  EXPECT_TRUE(peer.stale());
}

// Those of another device would be called alike.
TEST_F(Connect, APartnerIsToldTheKeysOfItsConnectionsContext) {
  Context context;
  qp.context = &context;
  {
    std::lock_guard guard(Registry::get().lock);
    whereabouts::moved();
  }
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  whereabouts::Connecting peer(&qp.app, attr, IBV_QP_STATE);
  std::lock_guard guard(Registry::get().lock);
  peer.connected(qp);
  EXPECT_EQ(switchover::keys_asked_of, &context);
}

}  // namespace
}  // namespace migr
