// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Where numbers were born, who keeps them reserved, and who is told when they are free.
#include "agent/numbers.h"

#include <gtest/gtest.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "agent/process.h"
#include "temp_folder.h"

namespace migr::numbers_test {
namespace {

using Vqpns = BornBook::Vqpns;

// As a host does it: which they are is asked while it is here, noted when it has gone.
Vqpns leave(BornBook& book, const Instance& who, const Vqpns& vqpns, bool first_life) {
  const auto born = book.born_here(who, vqpns, first_life);
  (void)book.leave(who, born, "elsewhere");
  return born;
}

TEST(BornBook, NumbersAreReservedWhereTheyWereBornFromWhenTheyHaveLeft) {
  const Instance a{1}, b{2};
  BornBook first, second;
  EXPECT_EQ(leave(first, a, {10, 11}, true), (Vqpns{10, 11}));
  EXPECT_EQ(second.arrive({a}, {10, 11}), Vqpns());
  // There it makes another, then goes on to a third host and comes back: only that one was born there.
  EXPECT_EQ(leave(second, a, {10, 11, 20}, false), Vqpns{20});
  second = BornBook(second.text());
  EXPECT_EQ(second.arrive({a}, {10, 11, 20}), Vqpns());
  EXPECT_EQ(leave(second, a, {10, 11, 20}, false), Vqpns{20});
  // Home again, without one of them, and away once more.
  first = BornBook(first.text());
  EXPECT_EQ(first.arrive({a}, {10, 20}), Vqpns{11});
  EXPECT_EQ(first.reserved(), Vqpns{10}) << "its QP has another number of the NIC, which may give it to the next";
  EXPECT_EQ(leave(first, a, {10, 20}, false), Vqpns{10});
  // Another process, with the same number on another device, does not free it.
  EXPECT_EQ(leave(first, b, {10}, true), Vqpns{10});
  EXPECT_EQ(first.arrive({b}, {}), Vqpns());
  EXPECT_EQ(first.arrive({a}, {20}), Vqpns{10});
}

// At home it is reserved until its process ends, or leaves without it.
TEST(BornBook, ANumberThatCameHomeIsReservedAsLongAsItIsANameThere) {
  const Instance a{1}, b{2};
  BornBook book;
  leave(book, a, {10, 11}, true);
  leave(book, b, {12}, true);
  EXPECT_EQ(book.arrive({a, b}, {10, 11, 12}), Vqpns());
  book = BornBook(book.text());
  EXPECT_EQ(book.reserved(), (Vqpns{10, 11, 12}));
  EXPECT_EQ(book.leave(a, book.born_here(a, {10}, false), "elsewhere"), Vqpns{11}) << "it has destroyed that QP";
  EXPECT_EQ(book.leave(a, {10}, "elsewhere"), Vqpns());
  EXPECT_EQ(book.end(b, true), Vqpns()) << "it is here";
  EXPECT_EQ(book.end(b, false), Vqpns{12});
  EXPECT_EQ(book.leave(a, {}, "elsewhere"), Vqpns{10});
  EXPECT_EQ(book.text(), "{}");
}

TEST(BornBook, KnowsToWhereAProcessHasGoneFromHere) {
  BornBook book;
  (void)book.leave(Instance{1}, {10}, "b");
  (void)book.leave(Instance{2}, {}, "b");
  book = BornBook(book.text());
  EXPECT_EQ(book.away_at(Instance{1}), "b");
  EXPECT_EQ(book.away_at(Instance{2}), std::nullopt) << "nothing of it was born here";
  (void)book.arrive({Instance{1}}, {10});
  EXPECT_EQ(book.away_at(Instance{1}), std::nullopt);
  const std::string older = "{\"" + hex(Instance{3}) + "\": {\"born\": [10], \"foreign\": [], \"away\": true}}";
  EXPECT_EQ(BornBook(older).away_at(Instance{3}), "");
}

TEST(BornBook, KnowsForWhomItKeepsANumber) {
  const Instance a{1}, b{2};
  BornBook book;
  (void)book.leave(a, {10, 11}, "elsewhere");
  (void)book.leave(b, {10}, "elsewhere");
  EXPECT_EQ(book.owners()[10], (std::vector<Instance>{a, b}));
  EXPECT_EQ(book.owners()[11], std::vector<Instance>{a});
  (void)book.arrive({a}, {11});
  EXPECT_EQ(book.owners()[10], std::vector<Instance>{b});
  EXPECT_EQ(book.owners()[11], std::vector<Instance>{a}) << "it is its name";
  for (const std::uint32_t vqpn : {10, 11, 12}) EXPECT_EQ(book.owners_of(vqpn), book.owners()[vqpn]);
}

TEST(BornBook, DamagedTextIsEmpty) {
  for (const char* text : {"", "[]", "{\"00\": {\"born\": \"x\"}, \"01\": 7, ", "{\"00\": {\"born\": \"x\"}, \"01\": 7}"}) {
    EXPECT_TRUE(BornBook(text).damaged()) << text;
    EXPECT_EQ(BornBook(text).text(), "{}");
  }
  EXPECT_FALSE(BornBook().damaged());
}

// A migrd that was started again does it once more.
TEST(BornBook, LeavingAndArrivingTwiceIsAsGoodAsOnce) {
  const Instance a{1};
  BornBook first, second;
  const auto born = leave(first, a, {10}, true);
  EXPECT_EQ(first.leave(a, born, "elsewhere"), Vqpns());
  EXPECT_EQ(first.reserved(), Vqpns{10});
  EXPECT_EQ(second.arrive({a}, {10}), Vqpns());
  EXPECT_EQ(second.arrive({a}, {10}), Vqpns());
  const auto later = leave(second, a, {10, 20}, false);
  EXPECT_EQ(second.leave(a, later, "elsewhere"), Vqpns());
  EXPECT_EQ(second.reserved(), Vqpns{20});
  EXPECT_EQ(first.arrive({a}, {10}), Vqpns());
  EXPECT_EQ(first.arrive({a}, {10}), Vqpns());
  EXPECT_EQ(first.reserved(), Vqpns{10});
  EXPECT_EQ(leave(first, a, {10}, false), Vqpns{10});
}

TEST(BornBook, EndFreesWhatHasLeftAndNothingElse) {
  const Instance a{1}, b{2};
  BornBook book;
  leave(book, a, {10, 11}, true);
  leave(book, b, {11}, true);
  EXPECT_EQ(book.end(a, false), Vqpns()) << "it is not here";
  EXPECT_EQ(book.end(a, true), Vqpns{10}) << "b keeps the other";
  EXPECT_EQ(book.end(a, true), Vqpns());
  EXPECT_EQ(book.arrive({b}, {11}), Vqpns());
  EXPECT_EQ(book.end(b, true), Vqpns()) << "it is back";
  EXPECT_EQ(book.end(b, false), Vqpns{11});
  EXPECT_EQ(book.text(), "{}");
}

// Without migr.ko: nothing is reserved here.
struct Guests : ::testing::Test {
  Guests() { config.name = "here", config.state_dir = dir; }
  std::string text(const char* file) const { return {std::istreambuf_iterator<char>(std::ifstream(dir + "/" + file).rdbuf()), {}}; }
  Status tell(const std::string& host, const std::vector<Instance>& all) {
    std::lock_guard lock(mutex);
    told.push_back(host);
    EXPECT_EQ(all, std::vector{a});
    return silent.contains(host) ? Status(Error{says, host + " is silent"}) : Status();
  }
  void tick() {
    told.clear();
    numbers.tick([this](const std::string& host, const std::vector<Instance>& all) { return tell(host, all); });
    std::sort(told.begin(), told.end());
  }
  const TempFolder temp;
  const std::string dir = temp.path;
  const Instance a{1};
  Config config;
  Numbers numbers{config};
  std::set<std::string> silent;
  int says = EHOSTUNREACH;
  std::mutex mutex;
  std::vector<std::string> told;
};

TEST_F(Guests, EveryBirthHostIsToldUntilItHasHeard) {
  ASSERT_TRUE(numbers.arrive({a}, {10, 20}));
  ASSERT_TRUE(numbers.note_guest(a, {"first", "here", "second"}, 0));
  silent = {"first"};
  tick();
  EXPECT_EQ(told, (std::vector<std::string>{"first", "second"}));
  EXPECT_NE(text("born.json"), "{}");
  tick();
  EXPECT_EQ(told, std::vector<std::string>{"first"});
  silent.clear();
  tick();
  EXPECT_EQ(told, std::vector<std::string>{"first"});
  EXPECT_EQ(text("guests.json"), "{}");
  EXPECT_EQ(text("born.json"), "{}");
  tick();
  EXPECT_TRUE(told.empty());
}

// Each that is silent takes as long as a call may.
TEST_F(Guests, BirthHostsAreToldAtTheSameTime) {
  ASSERT_TRUE(numbers.note_guest(a, {"first", "second", "third"}, 0));
  std::atomic<int> asked = 0;
  numbers.tick([&](const std::string& host, const std::vector<Instance>&) {
    ++asked;
    for (int ms = 0; asked < 3 && ms < 2000; ms++) usleep(1000);
    return asked == 3 ? Status() : Status(Error{ETIMEDOUT, host + " waits for the others"});
  });
  EXPECT_EQ(text("guests.json"), "{}");
}

/// What is warned of, instead of standard error.
class Warnings : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  static std::shared_ptr<Warnings> begin() {
    auto sink = std::make_shared<Warnings>();
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink));
    return sink;
  }
  std::vector<std::string> said;

 private:
  void sink_it_(const spdlog::details::log_msg& m) override {
    if (m.level == spdlog::level::warn) said.emplace_back(m.payload.data(), m.payload.size());
  }
  void flush_() override {}
};

TEST_F(Guests, OfABirthHostThatIsOffItIsSaidOnce) {
  const auto warnings = Warnings::begin();
  ASSERT_TRUE(numbers.arrive({a}, {10}));
  ASSERT_TRUE(numbers.note_guest(a, {"first", "second"}, 0));
  silent = {"first", "second"};
  for (int i = 0; i < 5; i++) tick();
  ASSERT_EQ(warnings->said.size(), 2u) << "one of each";
  EXPECT_NE(warnings->said[0].find("reserved on first: first is silent"), std::string::npos) << warnings->said[0];
  for (const int code : {ETIMEDOUT, EHOSTUNREACH, ETIMEDOUT, EPERM, EPERM}) {
    says = code;
    tick();
  }
  EXPECT_EQ(warnings->said.size(), 4u) << "a reason of another kind";
  silent = {"second"};
  tick();
  ASSERT_TRUE(numbers.note_guest(a, {"first", "second"}, 0));
  silent.insert("first");
  tick();
  EXPECT_EQ(warnings->said.size(), 5u) << "first had heard";
}

TEST_F(Guests, OneThatIsRefusedHoldsUpNoOther) {
  const Instance b{2}, c{3};
  for (const auto& i : {a, b, c}) ASSERT_TRUE(numbers.note_guest(i, {"first"}, 0));
  std::vector<Instance> heard;
  const auto first = [&](const std::string&, const std::vector<Instance>& all) {
    if (std::find(all.begin(), all.end(), b) != all.end()) return Status(Error{EPERM, "it is another's"});
    heard.insert(heard.end(), all.begin(), all.end());
    return Status();
  };
  numbers.tick(first);
  EXPECT_EQ(heard, (std::vector{a, c}));
  numbers.tick(first);
  EXPECT_EQ(heard.size(), 2u) << "they have heard";
  EXPECT_NE(text("guests.json").find(hex(b)), std::string::npos);
}

TEST_F(Guests, WhoLivesOrHasLeftHasNotEnded) {
  ASSERT_TRUE(numbers.note_guest(a, {"first"}, getpid()));
  tick();
  EXPECT_TRUE(told.empty());
  EXPECT_TRUE(*numbers.is_guest(getpid()));
  EXPECT_FALSE(*numbers.is_guest(getppid()));
  ASSERT_TRUE(numbers.leave({a}));
  tick();
  EXPECT_TRUE(told.empty());
  EXPECT_FALSE(*numbers.is_guest(getpid()));
}

// Its source was booted before it had removed what went: nobody has that life here any more, and it goes on elsewhere.
TEST_F(Guests, WhoIsHeldByAMigrationHasNotEnded) {
  ASSERT_TRUE(numbers.arrive({a}, {10, 20}));
  ASSERT_TRUE(numbers.note_guest(a, {"first", "here"}, 0));
  const std::string before = text("born.json");
  bool held = true;
  const auto ended = [&] {
    return numbers.tick([this](const std::string& host, const std::vector<Instance>& all) { return tell(host, all); }, [&](const Instance& i) { return held && i == a; });
  };
  EXPECT_EQ(ended(), std::vector<Instance>());
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(text("born.json"), before);
  held = false;
  EXPECT_EQ(ended(), std::vector{a});
  EXPECT_EQ(told, std::vector<std::string>{"first"});
}

TEST_F(Guests, WhoCannotBeWrittenDownIsKnownAndWrittenDownLater) {
  const Instance b{2};
  ASSERT_TRUE(std::filesystem::create_directory(dir + "/guests.json.new"));
  EXPECT_FALSE(numbers.note_guest(a, {"first"}, getpid()));
  EXPECT_FALSE(numbers.note_guest(b, {"first"}, getpid()));
  EXPECT_TRUE(numbers.guest_lives(a));
  tick();
  EXPECT_TRUE(numbers.guest_lives(a) && numbers.guest_lives(b));
  std::filesystem::remove(dir + "/guests.json.new");
  tick();
  EXPECT_TRUE(told.empty());
  EXPECT_TRUE(Numbers(config).guest_lives(a) && Numbers(config).guest_lives(b));
  ASSERT_TRUE(numbers.leave({a}));
  EXPECT_FALSE(numbers.guest_lives(a)) << "it was kept as it had been";
}

// It came from a folder, and may come again.
TEST_F(Guests, WhatWasStoredKeepsItsNumbers) {
  ASSERT_TRUE(numbers.arrive({a}, {10}));
  const std::string before = text("born.json");
  ASSERT_TRUE(numbers.note_guest(a, {}, 0));
  tick();
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(text("guests.json"), "{}");
  EXPECT_EQ(text("born.json"), before);
}

// It may be long, and is asked for every two seconds.
TEST_F(Guests, WhatIsKnownOfBirthsIsReadOnce) {
  ASSERT_TRUE(numbers.arrive({a}, {10}));
  const std::string before = text("born.json");
  std::filesystem::remove(dir + "/born.json");
  std::filesystem::create_directory(dir + "/born.json");
  tick();
  EXPECT_TRUE(numbers.away_at(a));
  EXPECT_EQ(*numbers.born_here(a, {10, 20}, false), Vqpns{20});
  EXPECT_FALSE(numbers.arrive({a}, {10, 20}));
  EXPECT_FALSE(numbers.born_here(a, {10}, false)) << "what is written now is not known";
  std::filesystem::remove(dir + "/born.json");
  std::ofstream(dir + "/born.json") << before;
  EXPECT_EQ(*numbers.born_here(a, {10, 20}, false), Vqpns{20});
}

TEST_F(Guests, WhatCannotBeReadIsAnErrorAndNotWrittenOver) {
  for (const char* file : {"/born.json", "/guests.json"}) std::filesystem::create_symlink(dir + file, dir + file);
  EXPECT_EQ(numbers.note_guest(a, {"first"}, 0).error().code, ELOOP);
  EXPECT_FALSE(numbers.leave({a}));
  EXPECT_FALSE(numbers.left(a, {}, "elsewhere"));
  EXPECT_FALSE(numbers.arrive({a}, {10}));
  EXPECT_FALSE(numbers.release({a}));
  EXPECT_FALSE(numbers.births_of(a, {10}, true));
  EXPECT_FALSE(numbers.born_here(a, {10}, true));
  EXPECT_FALSE(numbers.away_at(a));
  EXPECT_TRUE(numbers.guest_lives(a));
  tick();
  EXPECT_TRUE(told.empty());
  for (const char* file : {"/born.json", "/guests.json"}) EXPECT_TRUE(std::filesystem::is_symlink(dir + file)) << file;
}

TEST_F(Guests, WhatIsDamagedIsKeptBesideTheRest) {
  const std::string life = hex(a) + R"(": {"births": ["first"], "pid": 0, "life": ""})", guests = "{\"" + life + ", \"02\": 5}";
  std::ofstream(dir + "/guests.json") << guests;
  std::ofstream(dir + "/born.json") << "{";
  EXPECT_EQ(*numbers.births_of(a, {}, false), std::vector<std::string>{"first"});
  ASSERT_TRUE(numbers.arrive({a}, {10}));
  EXPECT_EQ(text("guests.json.bad"), guests);
  EXPECT_EQ(text("born.json.bad"), "{");
  EXPECT_EQ(*numbers.births_of(a, {}, false), std::vector<std::string>{"first"}) << "the rest is there still";
}

TEST_F(Guests, BirthHostsAreThoseOfBeforeAndThisOneIfAnyWasBornHere) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(*numbers.births_of(a, {10}, true), Hosts{"here"});
  EXPECT_EQ(*numbers.births_of(a, {}, true), Hosts());
  ASSERT_TRUE(numbers.arrive({a}, {10}));
  ASSERT_TRUE(numbers.note_guest(a, {"first"}, getpid()));
  EXPECT_EQ(*numbers.births_of(a, {10}, false), Hosts{"first"});
  EXPECT_EQ(*numbers.births_of(a, {10, 20}, false), (Hosts{"first", "here"}));
  EXPECT_EQ(*numbers.born_here(a, {10, 20}, false), Vqpns{20});
}

TEST(LifeOf, ANumberThatAnotherProcessGetsIsNotTheSame) {
  EXPECT_FALSE(life_of(getpid()).empty());
  EXPECT_EQ(life_of(getpid()), life_of(getpid()));
  EXPECT_NE(life_of(getpid()), life_of(1));
  EXPECT_TRUE(life_of(0).empty());
}

}  // namespace
}  // namespace migr::numbers_test
