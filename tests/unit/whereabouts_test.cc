// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Several QPs may have been called by one address: which of them is meant.
#include "agent/whereabouts.h"

#include <gtest/gtest.h>

namespace migr::whereabouts_test {
namespace {

const std::string kMine(16, 'm'), kOther(16, 'o'), kThere(16, 't');
const std::set<std::string> kAskers{kMine};

struct Choose : ::testing::Test {
  wire::Whereabouts& add(std::uint32_t pqpn, bool moved = false) {
    auto* w = all.add_found();
    w->set_gid(kThere);
    w->set_pqpn(pqpn);
    w->set_moved(moved);
    return *w;
  }
  static void connect(wire::Whereabouts& w, const std::string& gid, std::uint32_t pqpn) {
    w.set_connected(true);
    w.set_dest_gid(gid);
    w.set_dest_pqpn(pqpn);
  }
  std::uint32_t chosen() {
    const auto* w = choose(all, kAskers, 17);
    return w ? w->pqpn() : 0;
  }
  wire::WhereReply all;
};

TEST_F(Choose, NobodyAmongNone) { EXPECT_EQ(0u, chosen()); }

TEST_F(Choose, WhoIsConnectedToTheAsker) {
  add(30);
  connect(add(31, true), kMine, 17);
  EXPECT_EQ(31u, chosen());
}

TEST_F(Choose, NotWhoIsConnectedElsewhere) {
  connect(add(30), kMine, 18);
  connect(add(31), kOther, 17);
  EXPECT_EQ(0u, chosen());
  add(32, true);
  EXPECT_EQ(32u, chosen());
}

TEST_F(Choose, OfTwoThatWaitTheOneThatWasBornThere) {
  add(30, true);
  add(31);
  EXPECT_EQ(31u, chosen());
}

}  // namespace
}  // namespace migr::whereabouts_test
