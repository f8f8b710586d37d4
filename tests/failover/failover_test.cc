// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A link is cut after any packet, or only what comes back over it, and then the one that took its place, and so on: every
// work request completes once, in order, with its bytes; WRITEs are executed once under `exact`, and a CAS has the answer
// that it would have had. Rounds: FAILOVER_ROUNDS, FAILOVER_SEED. What else may happen: kKinds.
// Beside the rounds failover_test has what is done to one link, QP or region at a time: failover_*_test.cc, by subject.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "end.h"
#include "leave.h"
#include "library.h"
#include "model.h"
#include "store.h"

namespace {

using namespace ends;

constexpr unsigned kExecutors = 12;  // QPs: two on each NIC
constexpr unsigned kLoops = 8;       // the same of an SRQ's, on two

struct Outcome {
  std::string error;
  bool broke = false;  ///< an end gave up
  unsigned most_executions = 0;
};

/// The same in a second and a half, while another thread connects one.
Clock::duration longest_question_beside(End& x, End& y) {
  std::thread connecting([&] {
    if (const int err = x.try_to_connect(y); err != ETIMEDOUT) x.error_ = std::string("a QP can be connected over a link that is cut: ") + std::strerror(err);
  });
  const auto longest = longest_question(x, y, std::chrono::milliseconds(1500));
  connecting.join();
  return longest;
}

unsigned failures = 0;  ///< that made a pair leave its link, in cut_again_and_again(); each is a change at either end

/// Cut after cut. Each begins with traffic on the link that is cut, and ends with the vQPs on the other one and ready for the
/// next, or back on their own. @param flaps  a link that works again fails and works again, while they go back to it
std::string cut_again_and_again(End& x, End& y, const Options& o, bool returns, bool flaps) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  struct AtTheEnd {
    ~AtTheEnd() { model_let_packets_linger(false); }
  };
  std::vector<std::jthread> destroying;
  const AtTheEnd first_of_all;
  int on = 0;  // with a third link: off 0 that is still cut, if the others work
  if (o.lingers) {
    for (End* e : {&x, &y}) e->make_doomed();
    x.connect_doomed(y);
    y.connect_doomed(x);
  }
  for (unsigned cut = 0; cut < o.cuts; ++cut) {
    if (o.scarce) model_refuse_qps(1 - on, static_cast<int>(random() % 2), 1 + static_cast<unsigned>(random() % 3));
    model_cut(on, cut ? static_cast<unsigned>(random() % 100) : o.cut_after, o.answers_only);
    if (o.no_route) model_take_route(on);
    const bool both = o.third && on == 0 && random() % 3 == 0;  // the next one, too, soon
    if (both) model_cut(1, static_cast<unsigned>(random() % 60), o.answers_only);
    const int allowed = kWrs * static_cast<int>(cut + 1) / static_cast<int>(o.cuts) / 4 * 4;
    for (End* e : {&x, &y}) e->allow(cut + 1 == o.cuts ? kWrs : allowed);
    if (!wait_for([&] { return broken() || (x.idle() && y.idle()); })) return "no end of cut " + std::to_string(cut) + ": " + x.how() + "; " + y.how();
    if (o.lingers) model_cut_now(on);
    if (o.lingers && !cut) {
      for (End* e : {&x, &y}) e->send_by_doomed();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (End* e : {&x, &y}) destroying.emplace_back([e] { e->destroy_doomed(); });
    }
    if (o.lingers && !cut && longest_question_beside(x, y) > std::chrono::milliseconds(500)) return "a verb of the application's waits for the link that was cut";
    if (broken() || cut + 1 == o.cuts) {
      model_let_packets_linger(false);
      failures += x.left(static_cast<unsigned>(on)) || y.left(static_cast<unsigned>(on));
      // Of each end: the path, the one to come, the one that it was born with, two channels, a bell on each CQ; and what executes atomics.
      // And of each its company's like the first three, and one of a pool on either link; a channel and two paths to come where there is a third link.
      const bool few = broken() || wait_for([&] { return model_qps() <= 14u + (o.relays ? kExecutors : 0) + (o.company ? 6 : 0) + (o.pool ? 4 : 0) + (o.third ? 6 : 0) + (o.shared ? kLoops : 0); });
      return few ? "" : "old paths are left: " + std::to_string(model_qps()) + " QPs";
    }
    for (const int link : {on, on + both}) model_cut_now(link);  // at the latest
    const auto left = [&](int link) { return !x.protected_now(link) && !y.protected_now(link); };
    if (!wait_for([&] { return broken() || (left(on) && left(on + both)); })) return "cut " + std::to_string(cut) + " was not noticed: " + x.how() + "; " + y.how();
    ++failures;
    if (!o.third || returns) model_mend(on);
    if (both && returns) model_mend(1);
    for (unsigned times = flaps ? 1 + static_cast<unsigned>(random() % 3) : 0; times; --times) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
      model_cut(on, static_cast<unsigned>(random() % 8), false);
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
      model_mend(on);
    }
    if (!returns && o.third) {  // which of the two is not told
      if (!wait_for([&] { return broken() || (x.link() == y.link() && x.link() > (both ? 1 : on == 0 ? 0 : -1) && x.link() != on); })) return "no common link after cut " + std::to_string(cut) + ": " + x.how() + "; " + y.how();
      const int before = std::exchange(on, x.link());
      for (int link = 0; link < 3; ++link)
        if (both || before != 0) model_mend(link);
      if (!wait_for([&] { return broken() || all_stand(both || before != 0 ? 0 : 1); })) return "no channels after cut " + std::to_string(cut);
    } else if (!returns) {
      on = 1 - on;
    }
    if (!wait_for([&] { return broken() || (x.protected_now(on) && y.protected_now(on)); })) return "not protected again after cut " + std::to_string(cut) + ": " + x.how() + "; " + y.how();
    if (broken()) return "";
  }
  return "";
}

/// An end leaves its links as before a migration, again and again, until that is over. It may be refused.
void park_at_random(std::uint32_t seed, const std::atomic<bool>& over) {
  std::mt19937 random(seed);
  while (!over) {
    const StoreProcess process = store_process_of(random() % 2);
    char why[200];
    process.park(why, sizeof why);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 80));
    process.let_go();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
  }
}

/// Links are cut and mended whatever is going on.
std::string storm(End& x, End& y, const Options& o, bool parks) {
  std::mt19937 random(o.seed);
  const auto over = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  std::atomic<bool> calm = false;
  std::thread parking;
  if (parks) parking = std::thread(park_at_random, o.seed, std::cref(calm));
  for (int allowed = 4; allowed <= kWrs && !over(); allowed += 4) {
    for (End* e : {&x, &y}) e->allow(allowed);
    const int link = static_cast<int>(random() % (o.third ? 3 : 2));
    if (random() % 3) model_mend(link);
    else model_cut(link, static_cast<unsigned>(random() % 40), random() % 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
  }
  calm = true;
  mend_all();
  if (parks) parking.join();
  return wait_for([&] { return over() || (x.idle() && y.idle()); }) ? "" : "no end: " + x.how() + "; " + y.how();
}

/// One end, or the one and then the other, has nothing on another link for a while, and the work goes on. It may have been
/// on the other link before.
std::string parked(End& x, End& y, const Options& o) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty(); };
  const auto go_on = [&](int allowed) {
    for (End* e : {&x, &y}) e->allow(allowed);
    return wait_for([&] { return broken() || (x.idle() && y.idle()); });
  };
  std::size_t who = random() % 2;
  int allowed = 0;
  for (unsigned times = 1 + static_cast<unsigned>(random() % 2); times; --times, who = 1 - who) {
    if (random() % 2) {
      if (!wait_for([&] { return broken() || all_stand(0); })) return "not all channels stand before a cut";
      model_cut(0, static_cast<unsigned>(random() % 100), o.answers_only);
      if (!go_on(allowed += kWrs / 10)) return "no end of a cut before: " + x.how() + "; " + y.how();
      model_cut_now(0);  // at the latest
      if (!wait_for([&] { return broken() || (!x.protected_now(0) && !y.protected_now(0)); })) return "a cut before was not noticed: " + x.how() + "; " + y.how();
      model_mend(0);
      if (!wait_for([&] { return broken() || (x.protected_now(1) && y.protected_now(1) && (!o.third || all_stand(0))); })) return "not protected on the other link: " + x.how() + "; " + y.how();
    }
    const struct Parked : StoreProcess {
      ~Parked() { let_go(); }
    } process{store_process_of(who)};
    for (End* e : {&x, &y}) e->allow(allowed += kWrs / 10);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    char why[200];
    process.park(why, sizeof why);
    if (*why) return why;
    // Of both ends: the path, and its company's. Of the other one: a path to come, its company's, and a bell on each CQ.
    if (!wait_for([&] { return model_qps() <= 5u + o.third + (o.company ? 3 : 0) + (o.relays ? kExecutors : 0); })) return "something is left on other links: " + std::to_string(model_qps()) + " QPs";
    if (!go_on(allowed += kWrs / 10) || broken()) return "no end while parked: " + x.how() + "; " + y.how();
    process.let_go();
    if (!wait_for([&] { return broken() || (x.protected_now(0) && y.protected_now(0)); })) return "not protected again: " + x.how() + "; " + y.how();
  }
  model_cut(0, o.cut_after, o.answers_only);
  if (!go_on(kWrs)) return "no end after the last cut";
  model_mend(0);  // and its channel is there when the next connection is made
  return wait_for([&] { return broken() || (x.protected_now() && y.protected_now()); }) ? "" : "not protected after the last cut: " + x.how() + "; " + y.how();
}

/// An end leaves its links as before a migration while its default link is broken: nothing is lost, and the work goes on when the
/// migration is given up. @param marooned  but then there is no other link either: both applications get errors
std::string adrift(End& x, End& y, const Options& o, bool marooned) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  const auto go_on = [&](int allowed) {
    for (End* e : {&x, &y}) e->allow(allowed);
    return wait_for([&] { return broken() || (x.idle() && y.idle()); });
  };
  if (!wait_for([&] { return broken() || all_stand(0); })) return "not all channels stand before the cut";
  model_cut(0, static_cast<unsigned>(random() % 100), o.answers_only);
  if (!go_on(kWrs / 4)) return "no end of the cut before";
  model_cut_now(0);  // at the latest
  if (!wait_for([&] { return broken() || (x.left(0) && y.left(0)); })) return "the cut was not noticed: " + x.how() + "; " + y.how();
  const StoreProcess process = store_process_of(random() % 2);
  for (int times = 1; times <= 2; ++times) {
    for (End* e : {&x, &y}) e->allow(kWrs * (1 + times) / 4);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    char why[200];
    process.park(why, sizeof why);
    if (*why) return process.let_go(), why;
    // Of both ends: the path that it was born with. Of the other one: the half of a path to come, and a bell on each CQ.
    // Of its company's, too, but for the bells; and where the other one's receives were.
    if (!wait_for([&] { return model_qps() <= 5u + (o.company ? 3 : 0) + (o.shared ? kLoops / 2 : 0); })) return "something is left on other links: " + std::to_string(model_qps()) + " QPs";
    const bool over = x.idle() && y.idle();
    for (End* e : {&x, &y}) e->allow(kWrs * (1 + times) / 4 + 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (over && x.idle() && y.idle() && o.both_ways) return "it has a path while it is adrift";
    if (broken()) return "";
    if (marooned) model_cut(1, 0, false);
    process.let_go();
    if (marooned) return wait_for([&] { return broken() && x.gave_up() && y.gave_up(); }) ? "" : "no errors: " + x.how() + "; " + y.how();
    if (!wait_for([&] { return broken() || (x.idle() && y.idle() && x.left(0) && y.left(0)); })) return "not on the other link again: " + x.how() + "; " + y.how();
  }
  if (!go_on(kWrs)) return "no end after it";
  model_mend(0);
  return wait_for([&] { return broken() || (x.protected_now() && y.protected_now()); }) ? "" : "not protected in the end: " + x.how() + "; " + y.how();
}

/// The link fails while an end has left the other one, as in a migration: no application hears of it, and the work goes on when that
/// is over, over the other link.
std::string guarded(End& x, End& y, const Options& o) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  const auto allow = [&](int wrs) {
    for (End* e : {&x, &y}) e->allow(wrs);
  };
  const StoreProcess process = store_process_of(random() % 2);
  for (int times = 1; times <= 2; ++times) {
    char why[200];
    process.park(why, sizeof why);
    if (*why) return process.let_go(), why;
    model_cut(0, static_cast<unsigned>(random() % 60), o.answers_only);
    if (o.no_route) model_take_route(0);
    allow(kWrs * times / 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    model_cut_now(0);  // at the latest
    allow(kWrs * times / 4 + 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (x.idle() && y.idle()) return "it did not notice: there is a path";
    if (broken()) return "an application has heard of it";
    process.let_go();
    if (!wait_for([&] { return broken() || (x.idle() && y.idle() && x.left(0) && y.left(0)); })) return "not on the other link: " + x.how() + "; " + y.how();
    if (broken()) return "";
    model_mend(0);
    if (!wait_for([&] { return broken() || (x.protected_now(1) && y.protected_now(1)) || random() % 64 == 0; })) return "not protected on the other link: " + x.how() + "; " + y.how();
    const bool early = !x.protected_now(1) || !y.protected_now(1);
    process.park(why, sizeof why);  // which leads it home; or casts it off, where it came too early for that, or refuses: keys may have other names there
    process.let_go();
    if (*why && !early) return why + ("; " + x.how() + "; " + y.how());
    if (!wait_for([&] { return broken() || (x.protected_now() && y.protected_now()); })) return "not protected again: " + x.how() + "; " + y.how();
    if (x.protected_now(1)) break;  // cast off: the link that it was on takes it up again
  }
  allow(kWrs);
  return wait_for([&] { return broken() || (x.idle() && y.idle()); }) ? "" : "no end: " + x.how() + "; " + y.how();
}

/// On the only link that is left a path fails, again and again, and its link does not.
std::string alone(End& x, End& y, const Options& o) {
  std::mt19937 random(o.seed);
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty() || x.broken() || y.broken(); };
  const auto go_on = [&](int allowed) {
    for (End* e : {&x, &y}) e->allow(allowed);
    return wait_for([&] { return broken() || (x.idle() && y.idle()); });
  };
  model_cut(0, o.cut_after % 100, o.answers_only);
  if (!go_on(kWrs / 4)) return "no end of the cut: " + x.how() + "; " + y.how();
  model_cut_now(0);
  const auto on_the_last = [&] { return x.link() == 1 && y.link() == 1 && !x.protected_now() && !y.protected_now() && store_all_stand(1); };
  for (int allowed = kWrs / 4; allowed < kWrs; allowed += kWrs / 4) {
    if (!wait_for([&] { return broken() || on_the_last(); })) return "not on the last link: " + x.how() + "; " + y.how();
    for (End* e : {&x, &y}) e->allow(allowed + kWrs / 4);
    const int end = o.both_ways ? static_cast<int>(random() % 2) : 0;
    if (!wait_for([&] { return broken() || model_break_paths(1, end, kRing) || (x.idle() && y.idle()); })) return "nothing was in flight: " + x.how() + "; " + y.how();
    if (!wait_for([&] { return broken() || (x.idle() && y.idle()); })) return "no end: " + x.how() + "; " + y.how();
    if (broken()) return "an application has heard of it: " + x.how() + "; " + y.how();
  }
  return "";
}

/// The first end loses the answer of an atomic, and gives up.
std::string gone(End& x, End& y, const Options& o) {
  model_cut(0, o.cut_after, o.answers_only);
  for (End* e : {&x, &y}) e->allow(kWrs);
  const auto over = [](const End& e) { return e.broken() || e.idle(); };
  return wait_for([&] { return !x.error_.empty() || !y.error_.empty() || (over(y) && (over(x) || y.broken())); }) ? "" : "no end: " + x.how() + "; " + y.how();
}

/// The program itself says that a link does not carry, at one end, again and again; and that it does.
std::string told(End& x, End& y, const Library& of_x) {
  const auto broken = [&] { return !x.error_.empty() || !y.error_.empty(); };
  const auto say = [&](const char* what) { return of_x.verb<int(const char*, std::uint32_t)>(what)("a0", 1); };
  if (of_x.verb<int(const char*, std::uint32_t)>("migr_link_down")("a7", 1) != ENOENT) return "it knows a link that is not there";
  for (int allowed = kWrs / 4; allowed <= kWrs; allowed += kWrs / 4) {
    for (End* e : {&x, &y}) e->allow(allowed);
    if (say("migr_link_down")) return "migr_link_down";
    if (!wait_for([&] { return broken() || (x.left(0) && y.left(0)); })) return "they have not left it: " + x.how() + "; " + y.how();
    if (say("migr_link_up")) return "migr_link_up";
    if (!wait_for([&] { return broken() || (x.idle() && y.idle() && x.protected_now(0) && y.protected_now(0)); })) return "they have not come back: " + x.how() + "; " + y.how();
  }
  return "";
}

/// What is done to the links.
enum class Story { kCut, kStorm, kParked, kTold, kGone, kAlone, kGuarded, kAdrift, kMarooned, kRefused };

struct Kind {
  const char* name;
  int rounds;
  Story story = Story::kCut;
  const char* paths = "cached";
  bool exact = true;
  bool returns = false;   ///< to the default link
  bool flaps = false;     ///< which works again, fails and works again meanwhile
  bool parks = false;     ///< ends leave their links in a storm
  bool relays = false;    ///< atomics
  bool halfway = false;   ///< only one end would
  bool forgets = false;   ///< what was executed is executed again, and this test sees it
  bool marks = false;     ///< no WRITE is to be sent twice
  bool third = false;     ///< there is a second backup link
  bool shared = false;    ///< receives come from an SRQ, which two QPs have, of which one carries nothing and may stay on a link longer
  bool lingers = false;   ///< what has sent over a link that is cut cannot be destroyed before that is mended, and nobody answers there
  bool late = false;      ///< a key is used before it was told what it is called on the backup link
  bool scarce = false;    ///< a NIC has no QP for a path at first, when one is needed
  bool mixed = false;     ///< one end makes no path ahead
  unsigned qps = 0;       ///< that there are before anything is cut; 0: it does not matter
  bool pools() const { return std::string(name).starts_with("pool"); }
  bool storms() const { return story == Story::kStorm; }
};

// Of each end: the path and two channels. One of the pool is one more.
constexpr unsigned kNoneAhead = 6, kOneInPool = 8;

constexpr Kind kKinds[] = {
    {.name = "exact", .rounds = 80},
    {.name = "resend", .rounds = 80, .exact = false},
    {.name = "returns", .rounds = 20, .returns = true},
    {.name = "flaps", .rounds = 8, .returns = true, .flaps = true},
    // Links are cut and mended at any time.
    {.name = "storm", .rounds = 12, .story = Story::kStorm},
    // An end leaves its links as before a migration, and has them again after it.
    {.name = "parked", .rounds = 8, .story = Story::kParked},
    // The program says that a link is down which works.
    {.name = "told", .rounds = 8, .story = Story::kTold, .returns = true},
    // As parked, while the default link is broken.
    {.name = "adrift", .rounds = 6, .story = Story::kAdrift},
    // And the other one breaks then.
    {.name = "marooned", .rounds = 3, .story = Story::kMarooned},
    // It breaks while the links were left.
    {.name = "guarded", .rounds = 6, .story = Story::kGuarded},
    // An end that has lost the answer of an atomic, or hears nothing from the other one for kSoonMs, ends; so does the other one, which
    // before its errors has what was executed.
    {.name = "gone", .rounds = 8, .story = Story::kGone, .paths = "rebuild"},
    {.name = "marked", .rounds = 8, .story = Story::kGone, .paths = "rebuild", .marks = true},
    {.name = "lingers", .rounds = 8, .lingers = true},
    {.name = "late", .rounds = 20, .late = true},
    // A path is given up by its device where there is no other link, and the link carries: it is made anew.
    {.name = "alone", .rounds = 6, .story = Story::kAlone},
    {.name = "rebuild", .rounds = 8, .paths = "rebuild", .qps = kNoneAhead},
    {.name = "scarce", .rounds = 8, .paths = "rebuild", .scarce = true},
    {.name = "mixed", .rounds = 8, .returns = true, .mixed = true, .qps = kNoneAhead},
    // There is one for whoever needs it first.
    {.name = "pool", .rounds = 20, .paths = "pool", .qps = kOneInPool},
    {.name = "pool_returns", .rounds = 20, .paths = "pool", .returns = true},
    {.name = "pool_parking_storm", .rounds = 12, .story = Story::kStorm, .paths = "pool", .parks = true},
    // Each atomic finds what it would have found.
    {.name = "relayed", .rounds = 40, .relays = true},
    {.name = "relayed_returns", .rounds = 20, .returns = true, .relays = true},
    {.name = "relayed_parked", .rounds = 8, .story = Story::kParked, .relays = true},
    {.name = "relayed_storm", .rounds = 12, .story = Story::kStorm, .relays = true},
    {.name = "relayed_parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true, .relays = true},
    {.name = "relayed_forgets", .rounds = 60, .relays = true, .forgets = true},
    // One is not allowed.
    {.name = "relayed_refused", .rounds = 2, .story = Story::kRefused, .relays = true},
    // The other end does not relay, so neither does.
    {.name = "relayed_halfway", .rounds = 8, .relays = true, .halfway = true},
    {.name = "relayed_third", .rounds = 40, .relays = true, .third = true},
    // And ends leave them as before a migration, often unheard by the other one.
    {.name = "parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true},
    // Where vQPs go when the first one fails, too, one after the other or both at once.
    {.name = "third", .rounds = 40, .third = true},
    {.name = "third_returns", .rounds = 20, .returns = true, .third = true},
    {.name = "third_storm", .rounds = 12, .story = Story::kStorm, .third = true},
    {.name = "third_parked", .rounds = 4, .story = Story::kParked, .third = true},
    {.name = "third_parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true, .third = true},
    {.name = "shared", .rounds = 20, .shared = true},
    {.name = "shared_returns", .rounds = 20, .paths = "rebuild", .returns = true, .shared = true},
    {.name = "shared_storm", .rounds = 12, .story = Story::kStorm, .paths = "pool", .shared = true},
    {.name = "shared_parked", .rounds = 4, .story = Story::kParked, .shared = true},
    {.name = "shared_parking_storm", .rounds = 6, .story = Story::kStorm, .parks = true, .shared = true},
    {.name = "shared_adrift", .rounds = 2, .story = Story::kAdrift, .shared = true},
    {.name = "shared_guarded", .rounds = 2, .story = Story::kGuarded, .shared = true},
};

/// The links' part of a round, while both ends are at work. @return what did not happen, or nothing
std::string happens(const Kind& kind, End& x, End& y, const Options& o, const Library& a) {
  switch (kind.story) {
    case Story::kStorm: return storm(x, y, o, kind.parks);
    case Story::kParked: return parked(x, y, o);
    case Story::kTold: return told(x, y, a);
    case Story::kGone: return gone(x, y, o);
    case Story::kAlone: return alone(x, y, o);
    case Story::kGuarded: return guarded(x, y, o);
    case Story::kAdrift: return adrift(x, y, o, false);
    case Story::kMarooned: return adrift(x, y, o, true);
    case Story::kRefused:
    case Story::kCut: break;
  }
  return cut_again_and_again(x, y, o, kind.returns, kind.flaps);
}

Outcome round_of(const Library& a, const Library& b, const Options& o, const Kind& kind) {
  mend_all();
  model_forget_writes();
  for (const int link : {0, 1, 2})
    for (const int end : {0, 1}) model_refuse_qps(link, end, 0);  // which a round has not met
  model_let_packets_linger(o.lingers);
  Outcome out;
  End x(a, o, o.seed % 1000, o.seed % 1000 + kSecond, true), y(b, o, o.seed % 1000 + kSecond, o.seed % 1000, o.both_ways);
  x.connect(y);
  y.connect(x);
  if (!wait_for([&] { return x.protected_now() && y.protected_now(); })) return out.error = "never protected: " + x.how() + "; " + y.how(), out;
  if (x.relays_now() != o.relays || y.relays_now() != o.relays) return out.error = "atomics are relayed, or are not", out;
  if (!wait_for([] { return all_stand(0); })) return out.error = "not all channels stand: " + x.how() + "; " + y.how(), out;
  if (kind.story == Story::kRefused) return out.error = x.try_refused(o.seed % 2), out;
  // They leave a link at once that is not known to work again after the round before.
  if (kind.halfway && !wait_for([&] { return x.how().find("atomics go direct: the other end says so") != std::string::npos; }))
    return out.error = "it is not said why: " + x.how(), out;
  if (kind.qps && !o.company && !wait_for([&] { return model_qps() == kind.qps || x.changed(); }))
    return out.error = std::to_string(model_qps()) + " QPs, and not " + std::to_string(kind.qps), out;
  std::thread one([&] { x.run(); }), other([&] { y.run(); });
  const std::string stuck = happens(kind, x, y, o, a);
  model_let_packets_linger(false);
  if (!stuck.empty() && x.error_.empty()) x.error_ = stuck;
  one.join();
  other.join();
  out.error = x.check();
  if (kind.story == Story::kGone && out.error.empty()) out.error = y.check_end();
  if (out.error.empty() || !y.error_.empty()) out.error += (out.error.empty() ? "" : "; other end: ") + y.check();
  out.broke = x.broken() || y.broken();
  out.most_executions = kind.story == Story::kGone && !o.marks ? x.most_executions() : std::max(x.most_executions(), y.most_executions());
  return out;
}

class Failover : public testing::TestWithParam<Kind> {};

/// Of fewer rounds of some kinds none may end as it should for the test to say anything.
int rounds_of(const Kind& kind) {
  const char* const asked = std::getenv("FAILOVER_ROUNDS");
  if (!asked || kind.forgets) return kind.rounds;
  const bool needs_all = kind.storms() || kind.story == Story::kGone;
  return needs_all ? std::max(std::atoi(asked), kind.rounds) : std::atoi(asked);
}

/// What a library is told by its environment as long as a test runs.
void environment(const char* name, bool there) { there ? setenv(name, "1", 1) : unsetenv(name); }

TEST_P(Failover, EachOnceInOrderWhereverTheLinkIsCut) {
  const Kind kind = GetParam();
  const bool gone = kind.story == Story::kGone, relays = kind.relays && !kind.halfway;
  environment("FAILOVER_FORGETS", kind.forgets);
  environment("FAILOVER_LATE", kind.late);
  constexpr unsigned kSoonMs = 400;  // longer than a busy processor keeps a thread waiting
  const unsigned return_ms = kind.returns ? 5 : kind.storms() ? 50 : 0, adrift_ms = kind.story == Story::kMarooned ? 3000 : 30'000;
  const std::string policy = kind.exact ? "exact" : "resend";
  const Library a('a', gone ? "resend" : policy, kind.mixed ? "rebuild" : kind.paths, return_ms, adrift_ms, gone ? kSoonMs : kSwitchMs, kind.relays, kind.third);
  const Library b('b', policy, kind.paths, return_ms, adrift_ms, kSwitchMs, relays, kind.third);
  const int rounds = rounds_of(kind);
  const std::uint32_t first = std::getenv("FAILOVER_SEED") ? static_cast<std::uint32_t>(std::atoi(std::getenv("FAILOVER_SEED"))) : std::random_device()() % 1000000;
  printf("seeds from %u\n", first);
  unsigned twice = 0, whole = 0;
  for (int i = 0; i < rounds; ++i) {
    std::mt19937 random(first + static_cast<std::uint32_t>(i));
    Options o{.seed = first + static_cast<std::uint32_t>(i), .answers_only = random() % 2 == 0, .separate_cqs = random() % 2 == 0, .events = random() % 3 == 0,
                    .both_ways = random() % 2 == 0 || gone, .sessions = random() % 3 == 0 || gone, .extended = false, .swaps = kind.exact && !kind.relays && (random() % 2 == 0 || gone) && !kind.marks, .no_route = random() % 4 == 0, .churns = random() % 4 == 0, .fresh = random() % 3 == 0, .relays = relays, .cut_after = static_cast<unsigned>(random() % 400),
                    .cuts = random() % 2 ? 1 : 2 + static_cast<unsigned>(random() % 4), .may_break = kind.storms() || gone || kind.forgets || kind.story == Story::kMarooned, .outlives = gone};
    if (kind.late) o.fresh = true, o.sessions = false;
    o.greedy = !o.sessions && random() % 3 == 0;
    o.extended = random() % 3 == 0;
    o.pool = kind.pools();
    o.third = kind.third;
    o.shared = kind.shared;
    o.marks = kind.marks;
    o.lingers = kind.lingers;
    o.scarce = kind.scarce;
    o.company = (kind.shared && random() % 4 != 0) || (kind.pools() && !o.sessions && random() % 2 == 0);
    o.odd = o.company && !kind.shared && random() % 2 == 0;
    const Outcome out = round_of(a, b, o, kind);
    if (kind.forgets && (out.error.starts_with("atomic ") || out.error.starts_with("CAS "))) return;  // it is seen
    if (kind.forgets && out.broke) continue;  // who has forgotten an answer may never give it
    if (kind.story == Story::kRefused) {
      ASSERT_EQ(out.error, "") << o.seed;
      continue;
    }
    twice += out.most_executions > 1;
    whole += !out.broke;
    ASSERT_EQ(out.error, "") << "FAILOVER_SEED=" << o.seed << (o.answers_only ? " answers only" : "") << (o.separate_cqs ? " two CQs" : "") << (o.events ? " events" : "")
                             << (o.both_ways ? " both ways" : "") << (o.sessions ? " ibv_wr_*" : "") << (o.extended ? " ibv_cq_ex" : "") << (o.swaps ? " CAS" : "") << (o.no_route ? " no route" : "") << (o.churns ? " churn" : "") << (o.fresh ? " fresh" : "") << (o.greedy ? " greedy" : "") << (o.odd ? " odd company" : o.company ? " company" : "") << " cut after " << o.cut_after << ", " << o.cuts << " cuts";
    if (kind.exact) {
      ASSERT_LE(out.most_executions, 1u) << "a WRITE was executed twice; FAILOVER_SEED=" << o.seed;
    }
  }
  ASSERT_FALSE(kind.forgets) << "this test would not see that an atomic was executed twice";
  if (kind.story == Story::kRefused) return;
  migr_links_switch totals;
  store_totals(&totals);
  printf("%u failures of a link, %u changes of a path at both ends, %u broken, %u replayed, %u executed already; %u of %d rounds executed a WRITE twice; %.1f ms a change\n", failures, totals.vqps, totals.broken, totals.replayed,
         totals.executed, twice, rounds, totals.vqps ? static_cast<double>(totals.resume_ns) / totals.vqps / 1e6 : 0);
  printf("%u of %d connections outlived it\n", whole, rounds);
  if (kind.story == Story::kMarooned) {
    EXPECT_EQ(whole, 0u);
  } else if (gone) {
    EXPECT_LT(whole, static_cast<unsigned>(rounds));
  } else if (kind.storms()) {
    EXPECT_GT(whole, 0u);  // with no link left for long an end gives up
  } else {
    EXPECT_EQ(whole, static_cast<unsigned>(rounds));
  }
  if (kind.story == Story::kCut && rounds >= 6) {
    EXPECT_GT(failures, 0u);
  }
  if (!kind.storms() && rounds >= 6) {
    EXPECT_GT(totals.vqps + totals.broken, 0u);
  }
  const bool many = !(kind.storms() || kind.story == Story::kParked) || totals.vqps >= 48;  // fewer may be cut while nothing is under way
  if (rounds >= 6 && !gone && !kind.halfway && many) {
    EXPECT_GT(totals.replayed, 0u);
  }
  if (kind.story != Story::kTold && !gone && rounds >= 12 && many) {  // a link that works acknowledges nearly all that was executed; few rounds may have none
    EXPECT_GT(totals.executed, 0u);
  }
  if (!kind.exact && rounds >= 50) {
    EXPECT_GT(twice, 0u) << "this test would not see it";
  }
}

INSTANTIATE_TEST_SUITE_P(, Failover, testing::ValuesIn(kKinds), [](const auto& info) { return std::string(info.param.name); });

}  // namespace

int main(int argc, char** argv) { run_and_leave(argc, argv, folder()); }
