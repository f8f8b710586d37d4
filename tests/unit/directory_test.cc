// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Names of unconnected QPs: from host to host, home again, over a restart of migrd.
#include "agent/directory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <set>

namespace migr::directory_test {
namespace {

const std::string kA(16, 'a'), kB(16, 'b'), kC(16, 'c');

struct DirectoryTest : ::testing::Test {
  DirectoryTest() {
    char folder[] = "/tmp/migr-directory-XXXXXX";
    config.state_dir = mkdtemp(folder);
  }
  ~DirectoryTest() override { std::filesystem::remove_all(config.state_dir); }
  // As a coordinator does: what is at (from, pqpn) goes to (to, new_pqpn).
  static void move(Directory& d, const std::string& from, std::uint32_t pqpn, std::uint32_t vqpn, const std::string& to, std::uint32_t new_pqpn) {
    wire::MovesRequest r;
    wire::Move m = d.at(from, pqpn, vqpn);
    m.set_gid(to);
    m.set_pqpn(new_pqpn);
    *r.add_moves() = m;
    ASSERT_TRUE(d.put(r));
  }
  Config config;
};

TEST_F(DirectoryTest, TheBirthNameStaysOverTwoMoves) {
  Directory d(config);
  move(d, kA, 17, 17, kB, 30);
  move(d, kB, 30, 17, kC, 17);
  const auto all = d.all();
  ASSERT_EQ(1u, all.size());
  EXPECT_EQ(0, std::memcmp(all[0].birth_gid, kA.data(), 16));
  EXPECT_EQ(0, std::memcmp(all[0].gid, kC.data(), 16));
  EXPECT_EQ(17u, all[0].vqpn);
  EXPECT_EQ(17u, all[0].pqpn);
}

TEST_F(DirectoryTest, ANumberOfTwoHostsIsTwoNames) {
  Directory d(config);
  move(d, kA, 17, 17, kB, 30);
  move(d, kC, 17, 17, kB, 31);
  EXPECT_EQ(2u, d.all().size());
  EXPECT_EQ(kC, d.at(kB, 31, 17).birth_gid());
}

TEST_F(DirectoryTest, KnowsWhatHasComeTo) {
  Directory d(config);
  EXPECT_FALSE(d.came_to(kB, 30));
  move(d, kA, 17, 17, kB, 30);
  EXPECT_TRUE(d.came_to(kB, 30));
  EXPECT_FALSE(d.came_to(kB, 17));
}

TEST_F(DirectoryTest, WhoTakesAPlaceEndsTheNameThatWasThere) {
  Directory d(config);
  move(d, kA, 17, 17, kB, 30);  // it ends there, untold
  move(d, kC, 40, 40, kB, 30);
  const auto all = d.all();
  ASSERT_EQ(1u, all.size());
  EXPECT_EQ(40u, all[0].vqpn);
}

TEST_F(DirectoryTest, SurvivesARestart) {
  { Directory d(config); move(d, kA, 17, 17, kB, 30); }
  Directory again(config);
  EXPECT_EQ(kA, again.at(kB, 30, 30).birth_gid());
}

TEST_F(DirectoryTest, AFileOfNonsenseIsAnEmptyDirectory) {
  std::ofstream(config.state_dir + "/moves.json") << R"([{"birth_gid": "zz"}, 5, {"vqpn": 1}])";
  EXPECT_TRUE(Directory(config).all().empty());
}

// As a coordinator does, of a process.
void move_process(Directory& d, std::uint8_t who, const std::string& known, const std::string& to) {
  wire::MovesRequest r;
  auto* m = r.add_moves();
  m->set_instance(std::string(16, static_cast<char>(who)));
  m->set_birth_gid(known);
  m->set_gid(to);
  ASSERT_TRUE(d.put(r));
}
Instance instance(std::uint8_t who) {
  Instance i;
  i.fill(who);
  return i;
}

TEST_F(DirectoryTest, AProcessIsKnownByTheGidsThatItHasLeft) {
  {
    Directory d(config);
    move_process(d, 1, kA, kB);
    move_process(d, 1, kA, kC);
    move_process(d, 1, kB, kC);
    move_process(d, 2, kA, kB);
  }
  Directory d(config);  // migrd was started again
  EXPECT_TRUE(d.was_at(instance(1), kA));
  EXPECT_TRUE(d.was_at(instance(1), kB));
  EXPECT_FALSE(d.was_at(instance(1), kC));
  EXPECT_FALSE(d.was_at(instance(2), kB));
  EXPECT_FALSE(d.was_at(instance(3), kA));
  for (const auto& gid : {kA, kB, kC}) EXPECT_TRUE(d.touched(gid));
  EXPECT_FALSE(d.touched(std::string(16, 'd')));
  std::set<std::pair<std::string, std::string>> told;
  for (const auto& m : d.all()) {
    EXPECT_EQ(0u, m.vqpn);
    told.emplace(std::string(reinterpret_cast<const char*>(m.birth_gid), 16), std::string(reinterpret_cast<const char*>(m.gid), 16));
  }
  EXPECT_EQ(told, (std::set<std::pair<std::string, std::string>>{{kA, kC}, {kB, kC}, {kA, kB}}));
}

TEST_F(DirectoryTest, HomeAgainItHasLeftNothingThere) {
  Directory d(config);
  move_process(d, 1, kA, kB);
  move_process(d, 1, kB, kA);
  move_process(d, 1, kA, kA);
  EXPECT_EQ(d.earlier(instance(1)), std::vector<std::string>{kB});
}

TEST_F(DirectoryTest, WhoHasEndedIsForgotten) {
  Directory d(config);
  move_process(d, 1, kA, kB);
  move_process(d, 1, kC, kB);
  move_process(d, 2, kA, kB);
  ASSERT_TRUE(d.put(d.end_of({instance(1), instance(3)})));
  EXPECT_FALSE(d.was_at(instance(1), kA));
  EXPECT_FALSE(d.was_at(instance(1), kC));
  EXPECT_TRUE(d.was_at(instance(2), kA));
  EXPECT_EQ(0, d.end_of({instance(1)}).moves_size());
}

// As a coordinator does, of a QP of a process.
void move_of(Directory& d, std::uint8_t who, const std::string& from, std::uint32_t vqpn, const std::string& to, std::uint32_t pqpn) {
  wire::MovesRequest r;
  auto* m = r.add_moves();
  m->set_instance(std::string(16, static_cast<char>(who)));
  m->set_birth_gid(from);
  m->set_vqpn(vqpn);
  m->set_gid(to);
  m->set_pqpn(pqpn);
  ASSERT_TRUE(d.put(r));
}

TEST_F(DirectoryTest, AndSoAreItsQps) {
  {
    Directory d(config);
    move_of(d, 1, kA, 17, kB, 30);
    move_of(d, 1, kA, 18, kB, 31);
    move_of(d, 2, kA, 19, kB, 32);
  }
  Directory d(config);  // migrd was started again
  ASSERT_TRUE(d.put(d.end_of({instance(1)})));
  EXPECT_FALSE(d.came_to(kB, 30));
  EXPECT_FALSE(d.came_to(kB, 31));
  EXPECT_TRUE(d.came_to(kB, 32));
  EXPECT_EQ(1u, d.all().size());
  EXPECT_EQ(0, d.end_of({instance(1)}).moves_size());
}

TEST_F(DirectoryTest, OfWhoIsHomeOrGoesOnNothingIsForgotten) {
  Directory d(config);
  move_process(d, 1, kA, kB);
  move_of(d, 1, kA, 17, kB, 30);
  move_process(d, 1, kB, kA);
  move_process(d, 1, kA, kA);  // ahead of the stop: it may still be taken back
  EXPECT_TRUE(d.came_to(kB, 30));
}

TEST_F(DirectoryTest, ALateEndTakesNothingFromWhoHasTheNumberNow) {
  Directory d(config);
  move_of(d, 1, kA, 17, kB, 30);
  const auto end = d.end_of({instance(1)});
  move_of(d, 2, kA, 17, kC, 40);
  ASSERT_TRUE(d.put(end));
  EXPECT_TRUE(d.came_to(kC, 40));
}

TEST_F(DirectoryTest, AnEndThatAnOlderMigrdHasWrittenAsAMoveIsNone) {
  const std::string a(32, '1');
  std::ofstream(config.state_dir + "/moves.json") << "[{\"birth_gid\": \"" + a + "\", \"vqpn\": 17, \"gid\": \"" + a + "\", \"pqpn\": 0}]";
  EXPECT_TRUE(Directory(config).all().empty());
}

TEST_F(DirectoryTest, AMoveOfNeitherAQpNorAProcessIsEinval) {
  Directory d(config);
  wire::MovesRequest r;
  r.add_moves()->set_birth_gid(kA);
  r.mutable_moves(0)->set_gid(kB);
  EXPECT_FALSE(d.put(r));
  r.mutable_moves(0)->set_vqpn(17);
  EXPECT_FALSE(d.put(r)) << "an end of nobody's";
}

TEST_F(DirectoryTest, MalformedMovesAreEinval) {
  Directory d(config);
  wire::MovesRequest r;
  r.add_moves()->set_birth_gid("short");
  const auto s = d.put(r);
  ASSERT_FALSE(s);
  EXPECT_EQ(EINVAL, s.error().code);
}

}  // namespace
}  // namespace migr::directory_test
