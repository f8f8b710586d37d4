// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Names of unconnected QPs: from host to host, home again, over a restart of migrd.
#include "agent/directory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "agent/file_tree.h"
#include "agent/limits.h"
#include "inside.h"
#include "played_library.h"

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

TEST_F(DirectoryTest, WhatIsDamagedIsKeptBesideTheRest) {
  const std::string file = config.state_dir + "/moves.json";
  { Directory d(config); move(d, kA, 17, 17, kB, 30); }
  std::string text = *read_whole(file);
  text.insert(text.find('{'), "{\"birth_gid\": 5}, ");
  std::ofstream(file) << text;
  for (int starts = 0; starts < 2; starts++) EXPECT_EQ(kA, Directory(config).at(kB, 30, 30).birth_gid());
  EXPECT_EQ(*read_whole(file + ".bad"), text);
}

TEST_F(DirectoryTest, WhatCannotBeReadIsNotWrittenOver) {
  const std::string file = config.state_dir + "/moves.json", there = config.state_dir + "/there";
  { Directory d(config); move(d, kA, 17, 17, kB, 30); move(d, kA, 18, 18, kB, 31); }
  std::filesystem::rename(file, there);
  std::filesystem::create_symlink(file, file);
  Directory d(config);
  wire::MovesRequest r;
  for (const auto& [gid, qpn] : {std::pair{kA, 18u}, {kC, 40u}}) {
    auto* m = r.add_moves();
    m->set_birth_gid(gid);
    m->set_vqpn(qpn);
    m->set_gid(kC);
    m->set_pqpn(qpn);
  }
  for (auto& m : *r.mutable_moves()) m.set_instance(std::string(16, 'i'));
  EXPECT_EQ(d.put(r).error().code, ELOOP);
  EXPECT_EQ(2u, d.all().size()) << "it is known all the same";
  EXPECT_FALSE(d.save_again());
  EXPECT_TRUE(std::filesystem::is_symlink(file));
  std::filesystem::rename(there, file);
  EXPECT_TRUE(d.save_again());
  Directory again(config);
  for (Directory* x : {&d, &again}) {
    EXPECT_EQ(3u, x->all().size());
    EXPECT_EQ(kA, x->at(kB, 30, 30).birth_gid());
    EXPECT_EQ(kA, x->at(kC, 18, 18).birth_gid()) << "it has gone on";
  }
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

TEST_F(DirectoryTest, WhereThereAreTooManyThoseThatHaveEndedGoFirst) {
  constexpr std::uint32_t kMost = 4096;
  Directory d(config);
  wire::MovesRequest r;
  const auto add = [&](std::uint8_t who, std::uint32_t vqpn, const std::string& to, std::uint32_t pqpn) {
    auto* m = r.add_moves();
    m->set_instance(std::string(16, static_cast<char>(who)));
    m->set_birth_gid(kA);
    m->set_vqpn(vqpn);
    m->set_gid(to);
    m->set_pqpn(pqpn);
  };
  for (std::uint32_t i = 1; i <= kMost; i++) add(i == 7 ? 2 : 1, i, kB, i);
  ASSERT_TRUE(d.put(r));
  ASSERT_EQ(d.all().size(), kMost);
  std::ostringstream said;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(said)));
  const auto put = [&](std::uint32_t vqpn) {
    r.Clear();
    add(1, vqpn, kB, vqpn);
    ASSERT_TRUE(d.put(r, [&](const std::string& instance, const std::string& gid) { return instance == std::string(16, 2) && gid == kB; }));
    ASSERT_EQ(d.all().size(), kMost);
  };
  put(kMost + 1);
  EXPECT_FALSE(d.came_to(kB, 7)) << "it has ended";
  EXPECT_TRUE(d.came_to(kB, 1));
  EXPECT_EQ(said.str(), "");
  put(kMost + 2);
  spdlog::set_default_logger(before);
  EXPECT_FALSE(d.came_to(kB, 1)) << "the oldest";
  EXPECT_TRUE(d.came_to(kB, 2));
  EXPECT_TRUE(d.came_to(kB, kMost + 2));
  EXPECT_NE(said.str().find("the oldest are forgotten"), std::string::npos) << said.str();
  EXPECT_EQ(Directory(config).all().size(), kMost);
}

TEST_F(DirectoryTest, MalformedMovesAreEinval) {
  Directory d(config);
  wire::MovesRequest r;
  r.add_moves()->set_birth_gid("short");
  const auto s = d.put(r);
  ASSERT_FALSE(s);
  EXPECT_EQ(EINVAL, s.error().code);
}

// Processes with libmigr, as far as a SessionTable sees them: each says HELLO, and answers what it is told, once it may.
struct Told : DirectoryTest {
  Told() {
    EXPECT_TRUE(sessions.start(path, {}));
    EXPECT_NE(MAP_FAILED, static_cast<void*>(shared));
  }
  ~Told() override {
    for (const pid_t p : processes) kill(p, SIGKILL), waitpid(p, nullptr, 0);
    sessions.stop();
    munmap(shared, sizeof *shared);
  }
  void start(std::uint8_t who, bool silent) {
    const pid_t pid = fork();
    ASSERT_GT(pid, -1);
    if (!pid) play(who, silent);
    processes.push_back(pid);
    Instance i{};
    i[0] = who;
    EXPECT_TRUE(sessions.wait_for(i, {}, 5'000));
  }
  [[noreturn]] void play(std::uint8_t who, bool silent) const {
    const Fd fd = connect_library(path, Instance{who});
    if (fd.n < 0) _exit(1);
    while (silent && !shared->listens) usleep(1'000);
    answer_all(fd.n, [this](migr_msg& m, const std::byte*) {
      if (m.type == MIGR_MSG_MOVES && m.count) shared->told++;
      m.arg = 0;
    });
    _exit(0);
  }
  static wire::MovesRequest a_move() {
    wire::MovesRequest r;
    auto* m = r.add_moves();
    m->set_instance(std::string(sizeof(Instance), 'i'));
    m->set_birth_gid(kA);
    m->set_gid(kB);
    m->set_vqpn(17);
    m->set_pqpn(30);
    return r;
  }
  struct Shared {
    std::atomic<bool> listens;
    std::atomic<int> told;
  };
  Shared* const shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const std::string path = config.state_dir + "/proc.sock";
  const std::shared_ptr<Directory> directory = std::make_shared<Directory>(config);
  SessionTable sessions;
  std::vector<pid_t> processes;
};

TEST_F(Told, WhoIsSilentKeepsNobodyWaiting) {
  for (std::uint8_t who = 1; who <= 3; who++) start(who, true);
  start(4, false);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_TRUE(take_moves(directory, sessions, a_move(), 1'000));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(kProcessMs));
  EXPECT_EQ(1, shared->told);
}

TEST_F(Told, WhatCannotBeWrittenDownIsToldAndWrittenLater) {
  const std::string file = config.state_dir + "/moves.json";
  ASSERT_TRUE(std::filesystem::create_directory(file + ".new"));
  start(1, false);
  start(2, true);
  EXPECT_TRUE(take_moves(directory, sessions, a_move(), 1'000));
  EXPECT_EQ(1, shared->told);
  EXPECT_FALSE(directory->save_again());
  EXPECT_FALSE(std::filesystem::exists(file));
  std::filesystem::remove(file + ".new");
  EXPECT_TRUE(directory->save_again());
  EXPECT_EQ(Directory(config).all().size(), 1u);
}

TEST_F(Told, WhoWasSilentIsToldWhenItListensAgain) {
  start(1, true);
  EXPECT_TRUE(take_moves(directory, sessions, a_move(), 100));
  EXPECT_EQ(0, shared->told);
  shared->listens = true;
  for (int ms = 0; ms < 5'000 && !shared->told; ms += 10) usleep(10'000);
  EXPECT_EQ(1, shared->told);
}

// It may have looked up where it sends to, and not have posted yet.
TEST_F(Told, WhoHasAThreadInsideIsToldWhenThatHasLeft) {
  const int limit = std::exchange(kSuspendMs, 500);
  const Instance i{9};
  Inside process(path, i);
  const auto session = sessions.wait_for(i, {}, 5'000);
  ASSERT_TRUE(session) << session.error().text;
  ASSERT_TRUE(directory->put(a_move()));
  const auto s = tell_moves(**session, 7, *directory);
  EXPECT_EQ(s.error().code, ETIMEDOUT) << s.error().text;
  process.leave();
  EXPECT_TRUE(tell_moves(**session, 7, *directory));
  kSuspendMs = limit;
}

}  // namespace
}  // namespace migr::directory_test
