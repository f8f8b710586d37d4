// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Whoever is told of keys, at whatever moments, knows in the end those that there are; and the log does not grow.
#include "../../libmigr/links/key_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace {

using migr::links::KeyLog;
using migr::links::KeyName;

struct Peer {
  std::uint64_t told = 0;
  std::map<KeyName, std::uint32_t> knows;
  void listen(const KeyLog& log) {
    told = log.since(told, [&](const KeyName& name, std::uint32_t prkey) {
      if (prkey) knows[name] = prkey;
      else knows.erase(name);
    });
  }
};

TEST(KeyLog, EachKnowsInTheEndWhatThereIs) {
  std::mt19937 random(7);
  KeyLog log;
  std::map<KeyName, std::uint32_t> there;
  std::vector<Peer> peers(3);
  const auto told = [&] {
    std::uint64_t most = 0;
    for (const Peer& p : peers) most = std::max(most, p.told);
    return most;
  };
  for (int i = 0; i < 20'000; ++i) {
    const KeyName name{static_cast<std::uint32_t>(random() % 2), 0, static_cast<std::uint32_t>(random() % 50)};
    switch (random() % 4) {
      case 0:
      case 1: log.add(name, there[name] = static_cast<std::uint32_t>(1 + random() % 1000)); break;
      case 2:
        log.remove(name, told());
        there.erase(name);
        break;
      case 3: peers[random() % peers.size()].listen(log); break;
    }
    std::uint64_t least = ~0ull;
    for (const Peer& p : peers)
      if (p.told) least = std::min(least, p.told);
    if (least != ~0ull) log.all_know(least);
    if (random() % 500 == 0) peers[random() % peers.size()] = Peer();  // one is gone, another comes
    ASSERT_LE(log.size(), 100u);
  }
  for (Peer& p : peers) {
    p.listen(log);
    EXPECT_EQ(p.knows, there);
  }
}

TEST(KeyLog, WhatNobodyWasToldOfLeavesNothing) {
  KeyLog log;
  log.add({0, 0, 1}, 5);
  log.remove({0, 0, 1}, 0);
  log.remove({0, 0, 2}, 0);
  EXPECT_EQ(log.size(), 0u);
}

TEST(KeyLog, ThatAKeyIsGoneIsForgottenOnceAllKnow) {
  KeyLog log;
  Peer p;
  log.add({0, 0, 1}, 5);
  p.listen(log);
  log.remove({0, 0, 1}, p.told);
  EXPECT_EQ(log.size(), 1u);
  p.listen(log);
  log.all_know(p.told);
  EXPECT_EQ(log.size(), 0u);
  EXPECT_TRUE(p.knows.empty());
}

}  // namespace
