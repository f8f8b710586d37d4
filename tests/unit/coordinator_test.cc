// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The coordinator with played roles: the order of the steps, and that a failure at
// any of them takes back what was done, in reverse, and nothing else.
#include "agent/coordinator.h"
#include "agent/limits.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "agent/claims.h"
#include "agent/log.h"
#include "agent/peer_link.h"
#include "agent/summary.h"

namespace migr::coordinator_test {
namespace {

constexpr std::uint32_t kId = 0x1234;

/// What happened, in order; and which call is to fail.
struct Play {
  std::mutex mutex;
  std::vector<std::string> log;
  std::string fail;  // name of the call
  int fail_code = EIO;
  bool settled = false;  // what s.forget was told
  wire::Outcome destination_says = wire::OPEN;
  bool destination_silent = false;
  std::string cancelled_at;  // name of the call
  const std::shared_ptr<Course> course = std::make_shared<Course>();

  Status did(const std::string& what) {
    std::lock_guard lock(mutex);
    if (what == cancelled_at) course->cancel();
    if (what.find("renew") == std::string::npos) log.push_back(what);
    if (what == fail) return Error{fail_code, "played failure of " + what};
    return {};
  }
  bool has(const std::string& what) const { return std::find(log.begin(), log.end(), what) != log.end(); }
  int at(const std::string& what) const {
    const auto i = std::find(log.begin(), log.end(), what);
    return i == log.end() ? -1 : static_cast<int>(i - log.begin());
  }
};

// Each QP says `base` and its own number.
wire::CutReply cut_at(std::uint32_t base, const wire::CutRequest& r) {
  wire::CutReply out;
  for (auto i : r.index()) {
    if (r.check()) continue;
    auto* q = out.add_qps();
    q->set_index(i);
    q->set_psn(base + i);
  }
  return out;
}

wire::SettleReply one_settled(std::uint32_t replayed, std::uint32_t executed, std::uint32_t lost) {
  wire::SettleReply r;
  r.set_qps(1);
  r.set_replayed(replayed);
  r.set_executed(executed);
  r.set_lost(lost);
  return r;
}

// Ends of one host; `broken` are GIDs of the destination or of here that reach nobody, `unseen` those that it has no device for.
struct FakePaths {
  std::set<std::string> broken, unseen;
  int lose = 0;  // so many tries fail all the same
  std::vector<std::string> tried;
};
struct FakeTrial final : PathTrial {
  FakeTrial(Play& play, std::string who, FakePaths& paths) : p(play), who_(std::move(who)), paths_(paths) {}
  Play& p;
  const std::string who_;
  FakePaths& paths_;
  wire::TrialStep ends_;
  int steps_ = 0;
  Result<wire::TrialStep> step(const wire::TrialStep& request) override {
    if (auto s = p.did(who_ + ".try"); !s) return s.error();
    if (++steps_ == 1) ends_ = request;
    EXPECT_EQ(request.ends_size(), steps_ == 3 ? 0 : ends_.ends_size());
    const bool lost = steps_ == 3 && paths_.lose > 0 && paths_.lose--;
    for (auto& e : *ends_.mutable_ends()) {
      if (paths_.unseen.contains(e.gid())) e.set_why_not("not seen");
      if (steps_ == 3) paths_.tried.push_back(e.gid());
      if (steps_ == 3 && (lost || paths_.broken.contains(e.gid()))) e.set_error("no answer");
    }
    return ends_;
  }
};

struct FakeSource final : Source {
  explicit FakeSource(Play& play) : p(play) {}
  Play& p;
  std::vector<wire::Outcome> decided;
  std::uint64_t memory_bytes = kPreCopyFromBytes;
  std::string written_unseen;
  bool datagrams = false;  // an unconnected QP
  bool second = false;     // one more QP, of another partner
  bool twins = false;      // two more QPs, connected to each other; the second of another process
  int inspect_ms = 0;
  Result<ContainerInfo> inspect(const std::string& c) override {
    usleep(static_cast<useconds_t>(inspect_ms) * 1000);
    if (auto s = p.did("s.inspect"); !s) return s.error();
    ContainerInfo i;
    i.id = c;
    i.bundle = "/b";
    i.bundle_mode.emplace().set_mode(S_IFDIR | 0751);
    i.instances.push_back(Instance{1});
    i.ctxs = {{7, 0}};
    i.connected = {{7, 0x11, 0x11, std::string(16, 's'), std::string(16, 'p'), 0x22, 3}};
    i.vqpns = {0x11};
    i.resources.set_qp(1);
    i.libmigr = "build";
    if (datagrams) i.datagrams = {{7, 0x14, 0x14, "rxe0"}};
    if (second) i.connected.push_back({7, 0x15, 0x15, std::string(16, 's'), std::string(16, 'o'), 0x25});
    if (twins) {
      i.instances.push_back(Instance{2});
      i.ctxs.emplace_back(8, 1);
      i.connected.push_back({7, 0x12, 0x12, std::string(16, 's'), std::string(16, 's'), 0x13});
      i.connected.push_back({8, 0x13, 0x13, std::string(16, 's'), std::string(16, 's'), 0x12});
    }
    i.memory_bytes = i.filled_bytes = memory_bytes;
    i.written_unseen = written_unseen;
    return i;
  }
  Result<std::string> record(const std::string&, const std::vector<std::string>&) override {
    if (auto s = p.did("s.record"); !s) return s.error();
    return std::string("/early");
  }
  unsigned no_pre_dump_from = 99, pre_dump_fails_from = 99;  // round
  unsigned asked = 0;
  Status may_pre_dump() override { return ++asked >= no_pre_dump_from ? Status(Error{ENOSPC, "no room"}) : Status(); }
  Result<std::string> pre_dump(unsigned round) override {
    if (round >= pre_dump_fails_from) return Error{EIO, "played"};
    if (auto s = p.did("s.pre_dump"); !s) return s.error();
    return std::string("/pre-copy");
  }
  Status checkpoint_after(unsigned round) override { return p.did("s.checkpoint_after." + std::to_string(round)); }
  Result<std::uint64_t> drop_unchanged() override {
    if (auto s = p.did("s.drop_unchanged"); !s) return s.error();
    return 8192;
  }
  Status track() override { return p.did("s.track"); }
  void get_ready() override { (void)p.did("s.get_ready"); }
  Status suspend() override { return p.did("s.suspend"); }
  std::vector<std::uint32_t> left;  // by drain
  int drain_ms = 0;
  std::set<std::size_t> gone;  // as drain was told
  wire::SettleRequest settled;
  Result<wire::DrainReply> drain(int ms, const std::set<std::size_t>& those) override {
    drain_ms = ms;
    gone = those;
    if (auto s = p.did("s.drain"); !s) return s.error();
    wire::DrainReply r;
    for (auto i : left) r.add_left(i);
    return r;
  }
  Result<wire::CutReply> cut(const wire::CutRequest& r) override {
    if (auto s = p.did(r.check() ? "s.check_cut" : "s.cut"); !s) return s.error();
    return cut_at(100, r);
  }
  Result<wire::SettleReply> settle(const wire::SettleRequest& r) override {
    settled = r;
    if (auto s = p.did("s.settle"); !s) return s.error();
    return one_settled(5, 1, 0);
  }
  Status rollback() override { return p.did("s.rollback"); }
  std::optional<NicWrites> writes;  // as freeze was told
  Status freeze(const NicWrites* by_partners) override {
    if (by_partners) writes = *by_partners;
    return p.did("s.freeze");
  }
  Status reconnect() override { return p.did("s.reconnect"); }
  FakePaths paths;
  std::unique_ptr<PathTrial> path_trial() override { return std::make_unique<FakeTrial>(p, "s", paths); }
  Status detach_network() override { return p.did("s.detach"); }
  Status attach_network() override { return p.did("s.attach"); }
  Status checkpoint() override { return p.did("s.checkpoint"); }
  int thaw_ms = 0;
  Status thaw() override {
    usleep(static_cast<useconds_t>(thaw_ms) * 1000);
    return p.did("s.thaw");
  }
  Status decide(wire::Outcome o) override {
    decided.push_back(o);
    return p.did(o == wire::COMMITTED ? "s.decide" : "s.undecide");
  }
  Status destroy() override { return p.did("s.destroy"); }
  void forget(bool all) override {
    p.settled = all;
    (void)p.did("s.forget");
  }
};

struct FakeDestination final : DestinationLink {
  explicit FakeDestination(Play& play) : p(play) {}
  Play& p;
  wire::ConnectRequest connected;
  std::vector<std::string> hosts;  // that take part
  wire::FolderMode bundle_mode;
  std::uint64_t room = ~0ull;  // for images
  std::string libmigr;         // as check was told
  int upload_ms = 0, changes_ms = 0;
  int renew_ms = 0;
  std::atomic<int> renewed = 0;
  Status check(const wire::CheckRequest& r) override {
    libmigr = r.libmigr();
    if (auto s = p.did("d.check"); !s) return s;
    return r.image_bytes() <= room ? Status() : Error{ENOSPC, "played lack of room"};
  }
  Result<wire::PrepareReply> prepare(const wire::PrepareHeader& h, const std::string&, Sent& b) override {
    if (auto s = p.did("d.prepare"); !s) return s.error();
    hosts.assign(h.hosts().begin(), h.hosts().end());
    bundle_mode = h.bundle_mode();
    b.bytes += 100;
    wire::PrepareReply r;
    if (!h.later()) add_qp(r);
    return r;
  }
  Result<wire::PrepareReply> create(std::uint32_t) override {
    if (auto s = p.did("d.create"); !s) return s.error();
    wire::PrepareReply r;
    add_qp(r);
    return r;
  }
  static void add_qp(wire::PrepareReply& r) {
    for (std::uint32_t n : {1, 2, 3}) {
      auto* q = r.add_qps();
      q->set_src_ctx_id(n == 3 ? 8 : 7);
      q->set_vqpn(0x10 + n);
      q->set_pqpn(0x32 + n);
      q->set_psn(0x332 + n);
      q->set_gid(std::string(16, 'd'));
    }
  }
  Status connect(const wire::ConnectRequest& r) override {
    connected = r;
    return p.did("d.connect");
  }
  FakePaths paths;
  std::unique_ptr<PathTrial> path_trial() override { return std::make_unique<FakeTrial>(p, "d", paths); }
  std::vector<std::uint64_t> rounds;  // bytes that each has
  int round_ms = 0;
  Status upload(std::uint32_t, const std::string&, unsigned round, const Written& written, Sent& b) override {
    if (round && round <= rounds.size()) b.bytes += rounds[round - 1];
    for (int ms = 0; round && ms < round_ms; ms++, usleep(1000))
      if (const auto w = written(); !w) return w.error();
    if (round) return p.did("d.pre_upload");
    b.passed += 500;
    usleep(static_cast<useconds_t>(upload_ms) * 1000);
    for (auto w = written(); !w || !*w; w = written()) {
      if (!w) return w.error();
      usleep(100);
    }
    b.bytes += 1000;
    return p.did("d.upload");
  }
  bool changes = false;  // the container may write to its bundle
  bool bundle_changes() const override { return changes; }
  Status upload_changes(std::uint32_t, Sent&) override {
    usleep(static_cast<useconds_t>(changes_ms) * 1000);
    return p.did("d.upload_changes");
  }
  Status attach_network(std::uint32_t) override { return p.did("d.attach"); }
  Status full_restore(std::uint32_t) override { return p.did("d.full_restore"); }
  int restore_ms = 0;  // unless it is told to end
  std::atomic<bool> ended = false;
  Status ready(std::uint32_t) override {
    if (restore_ms) (void)p.did("d.restores");
    for (int ms = 0; ms < restore_ms && !ended; ms++) usleep(1000);
    return ended ? Status(Error{ECANCELED, "the migration was undone here"}) : p.did("d.ready");
  }
  int commit_ms = 0;
  Status commit(std::uint32_t) override {
    usleep(static_cast<useconds_t>(commit_ms) * 1000);
    return p.did("d.commit");
  }
  Result<wire::CommitReply> rebind(std::uint32_t) override {
    if (auto s = p.did("d.rebind"); !s) return s.error();
    wire::CommitReply r;
    auto* k = r.add_keys();
    k->set_owner(std::string(16, 'i'));
    k->add_vrkey(1);
    k->add_prkey(2);
    return r;
  }
  Result<wire::ResumeReply> resume(std::uint32_t) override {
    if (auto s = p.did("d.resume"); !s) return s.error();
    return wire::ResumeReply();
  }
  Status abort(std::uint32_t) override {
    ended = true;
    return p.did("d.abort");
  }
  Result<wire::Outcome> outcome(std::uint32_t) override {
    if (p.destination_silent) return Error{EHOSTUNREACH, "silent"};
    return p.destination_says;
  }
  Status renew(std::uint32_t) override {
    renewed++;
    usleep(static_cast<useconds_t>(renew_ms) * 1000);
    return p.did("d.renew");
  }
};

struct FakePartner final : PartnerLink {
  FakePartner(Play& play, std::string n, bool has) : p(play), name_(std::move(n)), has_(has) {}
  Play& p;
  std::string name_;
  bool has_;
  std::uint32_t dest_pqpn = 0x11, index = 0;
  std::uint32_t busy_with = 0;               // the migration that holds its process ...
  int busy_for = 0;                          // ... for so many questions
  bool busy_late = false;                    // or that takes it after the last one
  std::vector<std::uint32_t> dead, forming;  // as found
  int forms_for = 0;                         // its end is not connected for so many questions
  wire::ConnectRequest connected;
  wire::KeysRequest got_keys;
  wire::FindRequest asked;
  const std::string& name() const override { return name_; }
  Result<wire::FindReply> find(const wire::FindRequest& r) override {
    if (auto s = p.did(name_ + ".find"); !s) return s.error();
    wire::FindReply out;
    asked = r;
    for (const auto i : dead) out.add_dead(i);
    for (const auto i : forming) out.add_forming(i);
    if (forms_for > 0) return forms_for--, out.add_forming(index), out;
    if (!has_) return out;
    if (busy_for > 0) {
      busy_for--;
      auto* b = out.add_busy();
      b->set_who("process 7 (x) on " + name_);
      b->set_migration(busy_with);
      return out;
    }
    auto* q = out.add_qps();
    q->set_index(index);
    q->set_instance(std::string(16, 'j'));
    q->set_ctx_id(9);
    q->set_vqpn(0x22);
    q->set_pqpn(r.ends(static_cast<int>(index)).pqpn());
    q->set_dest_pqpn(dest_pqpn);
    return out;
  }
  Result<wire::PartnerPrepareReply> prepare(const wire::PartnerPrepareRequest& q) override {
    if (auto s = p.did(name_ + ".prepare"); !s) return s.error();
    return q.later() && !busy_late ? wire::PartnerPrepareReply() : with_spare();
  }
  Result<wire::PartnerPrepareReply> create(std::uint32_t) override {
    if (auto s = p.did(name_ + ".create"); !s) return s.error();
    return with_spare();
  }
  wire::PartnerPrepareReply with_spare() const {
    wire::PartnerPrepareReply r;
    if (busy_late) return r.mutable_busy()->set_who("process 7 (x) on " + name_), r;
    auto* x = r.add_spares();
    x->set_index(0);
    x->set_pqpn(0x44);
    x->set_psn(0x444);
    x->set_gid(std::string(16, 'p'));
    return r;
  }
  Status connect(const wire::ConnectRequest& r) override {
    connected = r;
    return p.did(name_ + ".connect");
  }
  FakePaths paths;
  std::unique_ptr<PathTrial> path_trial() override { return std::make_unique<FakeTrial>(p, name_, paths); }
  std::string cannot_track;
  bool knows_writes = true;
  Result<wire::TrackReply> track(std::uint32_t) override {
    if (auto s = p.did(name_ + ".track"); !s) return s.error();
    wire::TrackReply r;
    r.set_why_not(cannot_track);
    return r;
  }
  Status suspend(std::uint32_t) override { return p.did(name_ + ".suspend"); }
  std::vector<std::uint32_t> left;  // by drain
  wire::SettleRequest settled;
  Result<wire::DrainReply> drain(std::uint32_t, int) override {
    if (auto s = p.did(name_ + ".drain"); !s) return s.error();
    wire::DrainReply r;
    for (auto i : left) r.add_left(i);
    r.set_tracked(knows_writes);
    auto* w = r.add_writes();
    w->set_key(0x1234);
    w->set_start(0x5000);
    w->set_bytes(0x1000);
    return r;
  }
  Result<wire::CutReply> cut(const wire::CutRequest& r) override {
    if (auto s = p.did(name_ + (r.check() ? ".check_cut" : ".cut")); !s) return s.error();
    return cut_at(200, r);
  }
  Result<wire::SettleReply> settle(const wire::SettleRequest& r) override {
    settled = r;
    if (auto s = p.did(name_ + ".settle"); !s) return s.error();
    return one_settled(2, 0, 1);
  }
  Status switch_path(std::uint32_t) override { return p.did(name_ + ".switch"); }
  bool older = false;  // does not know that KEYS may say RESUME
  Result<wire::KeysReply> keys(const wire::KeysRequest& r) override {
    got_keys = r;
    wire::KeysReply reply;
    if (auto s = p.did(name_ + ".keys"); !s) return s.error();
    if (older || !r.resume()) return reply;
    const auto resumed = resume(r.id());
    if (!resumed) return resumed.error();
    *reply.mutable_resumed() = *resumed;
    return reply;
  }
  Result<wire::ResumeReply> resume(std::uint32_t) override {
    if (auto s = p.did(name_ + ".resume"); !s) return s.error();
    wire::ResumeReply r;
    r.set_blackout_ns(5'000'000);
    return r;
  }
  int old_path_ms = 0;
  Status old_path(std::uint32_t) override {
    usleep(static_cast<useconds_t>(old_path_ms) * 1000);
    return p.did(name_ + ".old_path");
  }
  std::atomic<int>* others = nullptr;  // that are being let go
  Status rollback(std::uint32_t) override {
    if (others) ++*others;
    for (int ms = 0; others && *others < 2 && ms < 5000; ms++) usleep(1000);
    if (others && *others < 2) return Error{ETIMEDOUT, "the others wait"};
    return p.did(name_ + ".rollback");
  }
  int renew_ms = 0;
  Status renew(std::uint32_t) override {
    usleep(static_cast<useconds_t>(renew_ms) * 1000);
    return p.did(name_ + ".renew");
  }
  Result<wire::TrafficReply> traffic(std::uint32_t back_ms) override {
    if (auto s = p.did(name_ + ".traffic"); !s) return s.error();
    wire::TrafficReply out;
    out.add_samples()->set_at_ms(back_ms);
    return out;
  }
};

struct Scene {
  Play play;
  FakeSource source{play};
  FakeDestination destination{play};
  FakePartner partner{play, "p", true}, other{play, "o", false};
  std::vector<PartnerLink*> more;  // hosts that are asked, too
  bool pre_setup = true;
  bool busy = false, in_vain = false, again = false;
  int busy_wait_ms = 1000;
  bool keep = false;  // store it
  int max_stop_ms = 0;
  std::string stood_still;
  unsigned rounds = 0;
  bool pre_copy = false;  // asked for
  std::vector<wire::Progress> said;
  wire::Summary run(const std::string& fault = {}) {
    Coordinator::Settings s{"src", fault, 1, 300, 10, pre_copy ? 0 : kPreCopyFromBytes, pre_setup};
    s.busy_wait_ms = busy_wait_ms;
    s.forming_ms = 300;
    s.pre_copy_rounds = rounds;
    s.max_stop_ms = max_stop_ms;
    if (keep) s.what = Coordinator::Settings::kKeep;
    s.course = play.course;
    s.stands_still = [this](const std::string& phase) { stood_still = phase; };
    std::vector<PartnerLink*> hosts{&other, &partner};
    hosts.insert(hosts.end(), more.begin(), more.end());
    Coordinator c(s, source, destination, hosts, [this](const wire::Progress& p) { said.push_back(p); });
    auto summary = c.migrate("c", "dst", kId);
    busy = c.busy();
    in_vain = c.copied_in_vain();
    again = c.try_again();
    return summary;
  }
  wire::PlanReply plan() {
    Coordinator::Settings s{"src", {}, 1, 300, 10, kPreCopyFromBytes, pre_setup};
    s.busy_wait_ms = s.forming_ms = 0;
    return Coordinator(s, source, destination, {&other, &partner}, [](const wire::Progress&) {}).plan("c", "dst", kId);
  }
  // `a` came before `b`.
  void expect_order(const std::vector<std::string>& names) {
    for (std::size_t i = 0; i < names.size(); i++) {
      EXPECT_TRUE(play.has(names[i])) << names[i];
      if (i) {
        EXPECT_LT(play.at(names[i - 1]), play.at(names[i])) << names[i - 1] << " before " << names[i];
      }
    }
  }
};

TEST(Coordinator, GoodCaseFollowsTheProtocol) {
  Scene s;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  EXPECT_TRUE(r.error().empty());
  EXPECT_EQ(r.bytes_copied(), 1100u);
  EXPECT_DOUBLE_EQ(r.communication_blackout_ms(), 5.0);
  EXPECT_GT(r.service_blackout_ms(), 0);
  ASSERT_EQ(r.partners_size(), 1);
  EXPECT_EQ(r.partners(0), "p");
  EXPECT_EQ(s.destination.hosts, (std::vector<std::string>{"src", "p"}));
  EXPECT_EQ(s.destination.bundle_mode.mode(), S_IFDIR | 0751u);
  EXPECT_EQ(s.destination.libmigr, "build");
  s.expect_order({"s.inspect", "d.check", "p.find", "s.record", "d.prepare", "d.connect", "s.track", "s.pre_dump", "d.pre_upload", "s.suspend", "s.drain", "s.freeze",
                  "s.checkpoint", "d.upload", "d.full_restore", "d.ready", "s.decide", "d.commit", "d.rebind", "d.resume", "s.destroy"});
  s.expect_order({"p.connect", "p.track", "s.pre_dump"});
  s.expect_order({"p.prepare", "p.connect", "p.suspend", "p.drain", "p.switch", "s.decide", "p.keys", "p.resume"});
  s.expect_order({"s.freeze", "s.detach", "s.checkpoint"});
  s.expect_order({"s.detach", "d.attach"});
  // Both suspended before either drains.
  s.expect_order({"p.suspend", "s.drain"});
  s.expect_order({"s.suspend", "p.drain"});
  s.expect_order({"p.switch", "d.resume"});
  for (const char* never : {"d.abort", "p.rollback", "s.rollback", "s.thaw", "s.attach", "o.prepare"}) EXPECT_FALSE(s.play.has(never)) << never;
}

TEST(Coordinator, WhatTheContainerHasWrittenIsSentWhenItIsStopped) {
  Scene s;
  s.destination.changes = true;
  EXPECT_TRUE(s.run().migrated());
  s.expect_order({"d.prepare", "s.checkpoint", "d.upload_changes", "d.full_restore"});
  Scene without;
  without.run();
  EXPECT_FALSE(without.play.has("d.upload_changes"));
}

TEST(Coordinator, EachSideIsConnectedToTheOther) {
  Scene s;
  s.run();
  ASSERT_EQ(s.destination.connected.connections_size(), 1);
  const auto& d = s.destination.connected.connections(0);
  EXPECT_EQ(d.src_ctx_id(), 7u);
  EXPECT_EQ(d.vqpn(), 0x11u);
  EXPECT_EQ(d.dest_pqpn(), 0x44u);
  EXPECT_EQ(d.dest_psn(), 0x444u);
  EXPECT_EQ(d.dest_gid(), std::string(16, 'p'));
  ASSERT_EQ(s.partner.connected.connections_size(), 1);
  const auto& p = s.partner.connected.connections(0);
  EXPECT_EQ(p.dest_pqpn(), 0x33u);
  EXPECT_EQ(p.dest_psn(), 0x333u);
  EXPECT_EQ(p.dest_gid(), std::string(16, 'd'));
  EXPECT_EQ(p.peer_ctx_id(), 7u);
  ASSERT_EQ(s.partner.got_keys.keys_size(), 1);
  EXPECT_EQ(s.partner.got_keys.keys(0).prkey(0), 2u);
}

const std::string kAtDestination(16, 'd'), kAtSource(16, 's'), kAtPartner(16, 'p');

TEST(Coordinator, PathsAreTriedWhenTheyAreConnectedAndBeforeAnythingStops) {
  Scene s;
  EXPECT_TRUE(s.run().migrated());
  s.expect_order({"d.connect", "d.try", "s.suspend"});
  s.expect_order({"p.connect", "p.try", "p.suspend"});
  EXPECT_EQ(s.destination.paths.tried, std::vector{kAtDestination});
  EXPECT_EQ(s.partner.paths.tried, std::vector{kAtPartner});
  EXPECT_FALSE(s.play.has("s.try"));
}

TEST(Coordinator, WhatTheSourceReachesTheDestinationHasToReach) {
  Scene s;
  s.destination.paths.broken = {kAtDestination};
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_NE(r.error().find("dst does not reach p over RDMA, as src does: 1024 bytes"), std::string::npos) << r.error();
  EXPECT_NE(r.error().find("no answer"), std::string::npos) << r.error();
  EXPECT_EQ(s.source.paths.tried, std::vector{kAtSource});
  EXPECT_FALSE(s.play.has("s.suspend"));
  EXPECT_TRUE(s.play.has("d.abort") && s.play.has("p.rollback"));
}

TEST(Coordinator, ProgramsAreToldTheErrorByItsName) {
  Scene s;
  EXPECT_EQ(summary_json(s.run())["code"], Json(nullptr));
  Scene busy;
  busy.play.fail = "d.ready";
  busy.play.fail_code = EBUSY;
  EXPECT_EQ(summary_json(busy.run())["code"], "EBUSY");
}

TEST(Coordinator, WhatThePartnerWritesHasToArriveToo) {
  Scene s;
  s.partner.paths.lose = 2;
  EXPECT_FALSE(s.run().migrated());
}

TEST(Coordinator, APathThatNeitherTakesKeepsNobody) {
  Scene s;
  s.destination.paths.broken = {kAtDestination};
  s.source.paths.broken = {kAtSource};
  EXPECT_TRUE(s.run().migrated());
  EXPECT_TRUE(std::any_of(s.said.begin(), s.said.end(), [](const auto& p) { return p.note().find("neither src nor dst reaches p over RDMA") != std::string::npos; }));
}

TEST(Coordinator, OneTryMayBeLost) {
  Scene s;
  s.destination.paths.lose = 1;
  EXPECT_TRUE(s.run().migrated());
  EXPECT_EQ(s.destination.paths.tried.size(), 2u);
}

TEST(Coordinator, WhatCannotBeTriedKeepsNobody) {
  Scene unseen;
  unseen.destination.paths.unseen = {kAtDestination};
  unseen.partner.paths.broken = {kAtPartner};
  EXPECT_TRUE(unseen.run().migrated());
  Scene older;
  older.play.fail = "p.try";
  older.play.fail_code = EPROTONOSUPPORT;
  EXPECT_TRUE(older.run().migrated());
  Scene later;
  later.pre_setup = false;
  EXPECT_TRUE(later.run().migrated());
  EXPECT_FALSE(later.play.has("d.try"));
}

TEST(Coordinator, PartnersResumeOnceWhetherOrNotTheyKnowThatWithTheirKeys) {
  for (const bool older : {false, true}) {
    Scene s;
    s.partner.older = older;
    const auto r = s.run();
    EXPECT_TRUE(r.migrated()) << r.error();
    EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "p.resume"), 1) << older;
    EXPECT_EQ(r.communication_blackout_ms(), 5) << older;
  }
}

TEST(Coordinator, TellsWhenEachPartBeganAndWhatPartnersSay) {
  Scene s;
  const auto r = s.run();
  EXPECT_GT(r.begun_ms(), 1'600'000'000'000);
  double at = 0;
  for (const auto& p : r.phases()) {
    EXPECT_GE(p.start_ms(), at) << p.phase();
    at = p.start_ms() + p.ms() - 1e-6;
  }
  ASSERT_GT(r.steps_size(), 5);
  for (const auto& p : r.steps()) {
    const auto phase = std::find_if(r.phases().begin(), r.phases().end(), [&](const auto& x) { return p.phase().starts_with(x.phase() + "."); });
    if (phase == r.phases().end() || p.phase().starts_with("copy.") || p.phase().starts_with("prepare.")) continue;  // begins with the dump; is the destination's word
    EXPECT_GE(p.start_ms(), phase->start_ms()) << p.phase();
    EXPECT_LE(p.start_ms() + p.ms(), phase->start_ms() + phase->ms()) << p.phase();
  }
  ASSERT_EQ(r.partner_figures_size(), 1);
  EXPECT_EQ(r.partner_figures(0).host(), "p");
  EXPECT_DOUBLE_EQ(r.partner_figures(0).blackout_ms(), 5.0);
  ASSERT_EQ(r.partner_figures(0).traffic().samples_size(), 1);
  const auto& last = *r.phases().rbegin();
  EXPECT_GE(r.partner_figures(0).traffic().samples(0).at_ms() + 1, last.start_ms() + last.ms()) << "asked for when all else was over, and since the begin";
}

TEST(Coordinator, DoesNotNeedToKnowOfTraffic) {
  Scene s;
  s.play.fail = "p.traffic";
  const auto r = s.run();
  EXPECT_TRUE(r.migrated());
  EXPECT_EQ(r.error(), "");
  ASSERT_EQ(r.partner_figures_size(), 1);
  EXPECT_FALSE(r.partner_figures(0).has_traffic());
}

TEST(Coordinator, SaysHowFarALongPhaseIs) {
  Scene s;
  s.source.memory_bytes = 5000;
  s.destination.upload_ms = 2500;
  ASSERT_TRUE(s.run().migrated());
  std::vector<wire::Going> going;
  for (const auto& p : s.said)
    if (p.has_going()) going.push_back(p.going());
  ASSERT_FALSE(going.empty());
  EXPECT_LE(going.size(), 2u);
  const auto& g = going.front();
  EXPECT_EQ(g.phase(), "copy");
  EXPECT_EQ(g.bytes(), 500u);
  EXPECT_EQ(g.of_bytes(), 5000u);
  EXPECT_NEAR(g.bytes_per_s(), 500e3 / g.ms(), 100);
  EXPECT_GE(g.ms(), 1000);
  EXPECT_GE(g.stopped_ms(), g.ms());
}

// migrctl recover asks at any time, and does not wait for a word that is due.
TEST(Coordinator, CanBeSeenFromOutside) {
  Scene s;
  s.source.memory_bytes = 5000;
  s.destination.upload_ms = 800;
  auto end = std::async(std::launch::async, [&] { return s.run(); });
  Course::Place at;
  for (int ms = 0; ms < 5000 && !(at.phase == "copy" && at.bytes); ms++, usleep(1000)) at = s.play.course->place();
  EXPECT_TRUE(end.get().migrated());
  EXPECT_EQ(at.id, kId);
  EXPECT_EQ(at.phase, "copy");
  EXPECT_EQ(at.bytes, 500u);
  EXPECT_EQ(at.of, 5000u);
}

TEST(Coordinator, SaysHowFarItIsWhileOneWhoseLeaseIsRenewedIsSilent) {
  Scene s;
  s.partner.renew_ms = 3500;
  s.destination.upload_ms = 2500;
  ASSERT_TRUE(s.run().migrated());
  EXPECT_TRUE(std::any_of(s.said.begin(), s.said.end(), [](const auto& p) { return p.has_going() && p.going().phase() == "copy"; }));
}

TEST(Coordinator, SaysHowFarTheCheckIs) {
  Scene s;
  s.source.inspect_ms = 2500;
  s.play.fail = "d.check";
  EXPECT_FALSE(s.run().touched());
  EXPECT_TRUE(std::any_of(s.said.begin(), s.said.end(), [](const auto& p) { return p.has_going() && p.going().phase() == "check"; }));
  EXPECT_EQ(s.destination.renewed, 0) << "there is no lease yet";
}

// As long as its limit is what a step may take, and not all of them together.
TEST(Coordinator, StandsStillInAStepOnly) {
  const int phase = std::exchange(kPhaseMs, 1500), renew = std::exchange(kLeaseRenewMs, 50);
  Scene s;
  s.destination.upload_ms = s.destination.changes_ms = 1000;
  s.destination.changes = true;
  EXPECT_TRUE(s.run().migrated());
  EXPECT_EQ(s.stood_still, "");
  Scene t;
  t.destination.upload_ms = 2000;
  EXPECT_TRUE(t.run().migrated());
  EXPECT_EQ(t.stood_still, "copy");
  kPhaseMs = phase, kLeaseRenewMs = renew;
}

// One after the other, some that are silent would keep the leases of others from being renewed in time.
TEST(Coordinator, RenewsAllLeasesAtTheSameTime) {
  Scene s;
  const int before = std::exchange(kLeaseRenewMs, 50);
  s.partner.renew_ms = s.destination.renew_ms = 1000;
  s.destination.upload_ms = 4600;
  EXPECT_TRUE(s.run().migrated());
  kLeaseRenewMs = before;
  EXPECT_GE(s.destination.renewed, 4) << "each 1000 + 50 ms; one after the other, each 2 * 1000 + 50";
}

TEST(Coordinator, LetsAllPartnersGoAtTheSameTime) {
  Scene s;
  std::atomic<int> going = 0;
  s.source.second = s.other.has_ = true;
  s.other.index = 1;
  s.other.dest_pqpn = 0x15;
  s.partner.others = s.other.others = &going;
  s.play.fail = "d.prepare";
  const auto r = s.run();
  EXPECT_EQ(r.partners_size(), 2);
  EXPECT_EQ(r.error(), "played failure of d.prepare");
}

TEST(Plan, AsksAndTouchesNothing) {
  Scene s;
  const auto r = s.plan();
  EXPECT_EQ(r.summary().error(), "");
  auto asked = s.play.log;
  std::sort(asked.begin(), asked.end());
  EXPECT_EQ(asked, (std::vector<std::string>{"d.check", "o.find", "p.find", "s.inspect"}));
  EXPECT_EQ(r.processes(), 1u);
  EXPECT_EQ(r.connections(), 1u);
  EXPECT_EQ(r.memory_bytes(), kPreCopyFromBytes);
  EXPECT_TRUE(r.pre_copy());
  EXPECT_EQ(r.summary().resources().qp(), 1u);
  ASSERT_EQ(r.summary().partners_size(), 1);
  EXPECT_EQ(r.summary().partners(0), "p");
  EXPECT_FALSE(r.summary().touched() || r.summary().migrated());
}

TEST(Plan, SaysWhatWouldRefuse) {
  for (const char* fail : {"s.inspect", "d.check", "p.find"}) {
    Scene s;
    s.play.fail = fail;
    const auto r = s.plan();
    EXPECT_NE(r.summary().error().find("played failure of " + std::string(fail)), std::string::npos) << r.summary().error();
    EXPECT_FALSE(s.play.has("s.record"));
  }
}

TEST(Plan, SaysAllThatWouldRefuse) {
  Scene s;
  s.destination.room = 0;
  s.partner.has_ = false;
  const auto r = s.plan();
  EXPECT_NE(r.summary().error().find("played lack of room; no host knows the partner"), std::string::npos) << r.summary().error();
}

TEST(Plan, DoesNotWaitForAPartnerThatIsBusy) {
  Scene s;
  s.partner.busy_with = kId + 1;
  s.partner.busy_for = 1;
  EXPECT_NE(s.plan().summary().error().find("takes part in another migration"), std::string::npos);
  EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "p.find"), 1);
}

struct Arc {
  const char* fail;
  std::vector<std::string> undone;  // in this order
  std::vector<std::string> never;
  std::vector<std::string> told = {};  // that these were rolled back
};
const std::vector<std::string> kPrepared = {"partner p", "destination dst"}, kSuspended = {"suspension", "partner p", "destination dst"},
                               kFrozen = {"freeze", "suspension", "partner p", "destination dst"},
                               kDetached = {"network", "checkpoint", "freeze", "suspension", "partner p", "destination dst"},
                               kStopped = {"destination dst", "network", "checkpoint", "freeze", "suspension", "partner p"};

class FailedStep : public ::testing::TestWithParam<Arc> {};

TEST_P(FailedStep, IsTakenBackInReverse) {
  Scene s;
  s.play.fail = GetParam().fail;
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_NE(r.error().find("played failure"), std::string::npos) << r.error();
  EXPECT_FALSE(r.going_back());
  EXPECT_EQ(std::vector<std::string>(r.rolled_back().begin(), r.rolled_back().end()), GetParam().told);
  EXPECT_EQ(summary_json(r)["rolled_back"], GetParam().told);
  s.expect_order(GetParam().undone);
  for (const auto& n : GetParam().never) EXPECT_FALSE(s.play.has(n)) << n;
  EXPECT_FALSE(s.play.has("s.destroy"));
}

INSTANTIATE_TEST_SUITE_P(
    Coordinator, FailedStep,
    ::testing::Values(
        Arc{"s.inspect", {}, {"d.check", "d.abort", "s.rollback", "p.rollback"}},
        Arc{"d.check", {}, {"s.record", "d.abort", "s.rollback"}},
        Arc{"s.record", {"s.forget"}, {"d.prepare", "d.abort", "s.rollback", "p.rollback"}},
        Arc{"d.prepare", {"p.rollback", "d.abort", "s.forget"}, {"s.suspend", "s.rollback", "s.thaw"}, kPrepared},
        Arc{"p.prepare", {"p.rollback", "d.abort", "s.forget"}, {"s.suspend", "s.rollback"}, kPrepared},
        Arc{"p.connect", {"p.rollback", "d.abort"}, {"s.suspend", "s.rollback"}, kPrepared},
        Arc{"d.pre_upload", {"p.rollback", "d.abort", "s.forget"}, {"s.suspend", "s.rollback", "s.thaw"}, kPrepared},
        Arc{"s.suspend", {"s.rollback", "p.rollback", "d.abort"}, {"s.freeze", "s.thaw", "s.attach"}, kSuspended},
        Arc{"p.suspend", {"s.rollback", "p.rollback", "d.abort"}, {"s.drain", "p.drain", "s.freeze"}, kSuspended},
        Arc{"p.drain", {"s.rollback", "p.rollback", "d.abort"}, {"s.freeze", "s.thaw"}, kSuspended},
        Arc{"s.freeze", {"s.reconnect", "s.rollback", "p.rollback", "d.abort"}, {"s.detach", "s.attach", "s.thaw", "s.checkpoint", "d.attach"}, kFrozen},
        Arc{"s.detach", {"s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"s.checkpoint", "d.attach"}, kDetached},
        Arc{"s.checkpoint", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"d.upload"}, kStopped},
        Arc{"d.attach", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"d.upload"}, kStopped},
        Arc{"d.upload", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback", "s.forget"}, {"d.full_restore"}, kStopped},
        Arc{"d.full_restore", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"s.decide"}, kStopped},
        Arc{"d.ready", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"s.decide", "d.commit"}, kStopped},
        Arc{"p.switch", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"s.decide", "d.commit"}, kStopped},
        Arc{"s.decide", {"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"}, {"d.commit"}, kStopped}),
    [](const auto& info) {
      std::string n = info.param.fail;
      n[n.find('.')] = '_';
      return n;
    });

TEST(Coordinator, WithoutPreSetupObjectsAreMadeDuringTheStop) {
  Scene s;
  s.pre_setup = false;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  s.expect_order({"d.prepare", "s.suspend", "s.freeze", "s.checkpoint", "d.create", "d.connect", "d.ready", "d.resume"});
  s.expect_order({"s.checkpoint", "d.upload", "d.ready"});
  s.expect_order({"p.prepare", "p.drain", "s.freeze", "p.create", "p.connect", "p.switch", "p.resume"});
  EXPECT_EQ(s.destination.connected.connections_size(), 1);
  EXPECT_EQ(s.partner.connected.connections_size(), 1);
  EXPECT_GT(r.rdma_ms(), 0);
}

TEST(Coordinator, WithPreSetupNothingIsMadeLater) {
  Scene s;
  EXPECT_TRUE(s.run().migrated());
  EXPECT_FALSE(s.play.has("d.create"));
  EXPECT_FALSE(s.play.has("p.create"));
}

TEST(Coordinator, FailureOfAnythingMadeDuringTheStopGoesBack) {
  for (const char* f : {"d.prepare", "p.prepare", "p.drain", "d.create", "p.create", "d.connect", "p.connect", "d.upload", "d.ready"}) {
    Scene s;
    s.pre_setup = false;
    s.play.fail = f;
    const auto r = s.run();
    EXPECT_FALSE(r.migrated()) << f;
    s.expect_order({f, "p.rollback", "s.forget"});
    s.expect_order({f, "d.abort", "s.forget"});
    EXPECT_EQ(s.play.has("s.checkpoint"), s.play.has("s.thaw")) << f;
    EXPECT_EQ(s.play.has("s.freeze"), s.play.has("s.reconnect")) << f;
    for (const char* never : {"d.commit", "s.destroy"}) EXPECT_FALSE(s.play.has(never)) << f << " " << never;
  }
}

TEST(Coordinator, RefusedIsNotTouched) {
  Scene s;
  s.play.fail = "d.check";
  EXPECT_FALSE(s.run().touched());
}

TEST(Coordinator, RolledBackIsTouched) {
  Scene s;
  s.play.fail = "d.ready";
  EXPECT_TRUE(s.run().touched());
}

TEST(Coordinator, SilentDestinationIsNamed) {
  Scene s;
  s.play.fail = "d.check";
  s.play.fail_code = EHOSTUNREACH;
  EXPECT_NE(s.run().error().find("destination dst does not answer"), std::string::npos);
}

TEST(Coordinator, PartnerNobodyKnowsIsRefused) {
  Scene s;
  s.partner.has_ = false;
  const auto r = s.run();
  EXPECT_FALSE(r.touched());
  EXPECT_NE(r.error().find("no host knows the partner"), std::string::npos) << r.error();
}

// Or a client that was killed would keep the host for ever.
TEST(Coordinator, PartnerThatIsDeadDoesNotHoldUpTheOthers) {
  Scene s;
  s.partner.has_ = false;
  s.other.dead = {0};
  const auto r = s.run();
  EXPECT_EQ(r.error(), "");
  ASSERT_EQ(r.connections_gone_size(), 1);
  EXPECT_EQ(r.connections_gone(0).vqpn(), 0x11u);
  EXPECT_EQ(s.source.gone, std::set<std::size_t>{0});
  ASSERT_EQ(s.destination.connected.connections_size(), 1);
  EXPECT_EQ(s.destination.connected.connections(0).vqpn(), 0x11u);
  EXPECT_EQ(s.destination.connected.connections(0).dest_pqpn(), 0u);
  EXPECT_FALSE(s.play.has("p.suspend"));
}

// A server that accepts connections all the time always has one whose client is not as far yet.
TEST(Coordinator, PartnerThatIsJustConnectingIsWaitedFor) {
  Scene s;
  s.partner.forms_for = 1;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  EXPECT_EQ(r.gone(), 0u);
  EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "p.find"), 2);
  EXPECT_EQ(s.partner.asked.ends(0).from_gid(), std::string(16, 's'));
  EXPECT_EQ(s.partner.asked.ends(0).from_pqpn(), 0x11u);
}

TEST(Coordinator, PartnerThatDoesNotComeToConnectIsNamed) {
  Scene s;
  s.partner.forms_for = 1 << 20;
  const auto r = s.run();
  EXPECT_FALSE(r.touched());
  EXPECT_FALSE(s.again) << "it was waited for";
  EXPECT_NE(r.error().find("QP 17 is connected, and its other end, QP 34 on p, is not yet"), std::string::npos) << r.error();
}

// It was, and its program may be about to connect it once more.
TEST(Coordinator, PartnerThatHasLeftIsGoneIfItDoesNotComeBack) {
  Scene s;
  s.partner.has_ = false;
  s.partner.dead = s.partner.forming = {0};
  const auto r = s.run();
  EXPECT_EQ(r.error(), "");
  EXPECT_EQ(r.gone(), 1u);
  EXPECT_GT(std::count(s.play.log.begin(), s.play.log.end(), "p.find"), 1);
  Scene back;
  back.other.dead = {0};
  EXPECT_EQ(back.run().gone(), 0u) << "another host has it";
}

TEST(Coordinator, EqualNumberWithAnotherPeerIsNoPartner) {
  Scene s;
  s.partner.dest_pqpn = 0x99;
  EXPECT_NE(s.run().error().find("no host knows the partner"), std::string::npos);
}

TEST(Coordinator, SilentHostWithoutPartnersDoesNotMatter) {
  Scene s;
  s.play.fail = "o.find";
  s.play.fail_code = EHOSTUNREACH;
  EXPECT_TRUE(s.run().migrated());
}

// One whose module is older, for one: no connection of others is any business of it.
TEST(Coordinator, HostThatRefusesWithoutPartnersDoesNotMatter) {
  Scene s;
  FakePartner third{s.play, "q", false};
  s.more = {&third};
  s.play.fail = "o.find";
  s.play.fail_code = EPROTONOSUPPORT;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  ASSERT_EQ(r.partners_size(), 1);
  EXPECT_EQ(r.partners(0), "p");
}

TEST(Coordinator, HostThatRefusesIsNamedWhenAPartnerIsNotFound) {
  Scene s;
  s.partner.has_ = false;
  s.play.fail = "o.find";
  s.play.fail_code = EPROTONOSUPPORT;
  const auto r = s.run();
  EXPECT_FALSE(r.touched());
  EXPECT_NE(r.error().find("played failure of o.find; no other host knows the partner of QP 17"), std::string::npos) << r.error();
  EXPECT_EQ(r.error_code(), static_cast<std::uint32_t>(EPROTONOSUPPORT)) << "as the host has said";
}

TEST(Coordinator, WhatIsConnectedToItselfNeedsNoPartner) {
  Scene s;
  s.source.twins = true;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  ASSERT_EQ(s.partner.asked.ends_size(), 3);
  EXPECT_TRUE(s.partner.asked.ends(1).gid().empty());
  ASSERT_EQ(s.destination.connected.connections_size(), 3);
  std::map<std::uint32_t, const wire::Connection*> at;
  for (const auto& c : s.destination.connected.connections()) at[c.vqpn()] = &c;
  ASSERT_TRUE(at.contains(0x12) && at.contains(0x13));
  EXPECT_EQ(at[0x12]->dest_pqpn(), 0x35u);
  EXPECT_EQ(at[0x12]->dest_psn(), 0x335u);
  EXPECT_EQ(at[0x12]->peer()[0], 2);
  EXPECT_EQ(at[0x12]->peer_ctx_id(), 8u);
  EXPECT_EQ(at[0x13]->dest_pqpn(), 0x34u);
  EXPECT_EQ(at[0x13]->peer()[0], 1);
  EXPECT_EQ(at[0x13]->peer_ctx_id(), 7u);
  EXPECT_EQ(at[0x11]->dest_pqpn(), 0x44u) << "the partner's spare";
  EXPECT_EQ(at[0x11]->peer()[0], 'j');
  EXPECT_EQ(at[0x11]->peer_ctx_id(), 0u) << "it stays";
}

// Two that want each other's processes: the one with the smaller number waits with what it holds ...
TEST(Coordinator, WaitsForAPartnerOfALaterMigration) {
  Scene s;
  s.partner.busy_with = kId + 1;
  s.partner.busy_for = 2;
  EXPECT_TRUE(s.run().migrated());
  EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "p.find"), 3);
  EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "s.inspect"), 1);
}

// ... the other lets go of everything, and nothing was touched.
TEST(Coordinator, YieldsToAnEarlierMigration) {
  Scene s;
  s.partner.busy_with = kId - 1;
  s.partner.busy_for = 1;
  const auto r = s.run();
  EXPECT_TRUE(s.busy);
  EXPECT_FALSE(r.migrated());
  EXPECT_FALSE(r.touched());
  EXPECT_NE(r.error().find("process 7 (x) on p, takes part in another migration; try again"), std::string::npos) << r.error();
  EXPECT_FALSE(s.play.has("s.record"));
}

TEST(Coordinator, DoesNotWaitForEverForAPartner) {
  Scene s;
  s.partner.busy_with = kId + 1;
  s.partner.busy_for = 1 << 20;
  EXPECT_FALSE(s.run().migrated());
  EXPECT_TRUE(s.busy);
}

TEST(Coordinator, PartnerTakenMeanwhileMeansGoingBack) {
  Scene s;
  s.partner.busy_late = true;
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_TRUE(s.busy);
  s.expect_order({"p.prepare", "p.rollback", "d.abort", "s.forget"});
  EXPECT_FALSE(s.play.has("s.suspend"));
}

TEST(Coordinator, WhatWasCopiedAheadInVainIsWorthAnotherTry) {
  for (const auto& [code, in_vain] : {std::pair{ESTALE, true}, {EIO, false}}) {
    Scene s;
    s.play.fail = "s.checkpoint";
    s.play.fail_code = code;
    const auto r = s.run();
    EXPECT_EQ(s.in_vain, in_vain);
    EXPECT_EQ(r.pre_copy_rounds(), 1u);
    EXPECT_FALSE(r.going_back());
  }
}

TEST(Coordinator, ContainerTakenByAnotherMigrationIsBusy) {
  Scene s;
  s.play.fail = "s.inspect";
  s.play.fail_code = EINPROGRESS;
  EXPECT_FALSE(s.run().touched());
  EXPECT_TRUE(s.busy);
}

TEST(Coordinator, WhatIsStoredSaysWhichConnectionsItEnds) {
  Scene s;
  s.keep = s.source.twins = true;  // what is connected to itself stays so
  const auto summary = s.run();
  EXPECT_EQ(summary.gone(), 1u);
  ASSERT_EQ(summary.connections_gone_size(), 1);
  EXPECT_EQ(summary.connections_gone(0).vqpn(), 0x11u);
  EXPECT_EQ(summary.connections_gone(0).to_qpn(), 0x22u);
  const auto json = summary_json(summary);
  ASSERT_EQ(json["gone"].size(), 1u);
  EXPECT_EQ(json["gone"][0]["vqpn"], 0x11);
  EXPECT_EQ(json["gone"][0]["to_qpn"], 0x22);
  EXPECT_EQ(json["gone"][0]["to_gid"], "7070:7070:7070:7070:7070:7070:7070:7070");
  EXPECT_EQ(gone_text(summary), "  gone: vQPN 0x11, which was connected to QP 0x22 at 7070:7070:7070:7070:7070:7070:7070:7070\n");
}

TEST(Coordinator, DatagramsAreNotStored) {
  Scene s;
  s.keep = s.source.datagrams = true;
  const auto r = s.run();
  EXPECT_FALSE(r.touched());
  EXPECT_NE(r.error().find("UD"), std::string::npos) << r.error();
  EXPECT_FALSE(s.play.has("d.check"));
  EXPECT_FALSE(s.play.has("s.record"));
}

TEST(Claims, AProcessIsHeldByOneMigration) {
  Claims c;
  const Instance a{1}, b{2};
  EXPECT_EQ(c.take({{a, 10}}, 1), 0u);
  EXPECT_EQ(c.take({{a, 10}}, 1), 0u);
  EXPECT_EQ(c.take({{b, 11}, {a, 10}}, 2), 1u);
  EXPECT_EQ(c.holder(b), 0u) << "all or none";
  EXPECT_EQ(c.holder(a), 1u);
  EXPECT_EQ(c.holder(10), 1u);
  c.release({b}, 1);
  EXPECT_EQ(c.holder(a), 1u) << "only those";
  c.release({a, b}, 2);
  EXPECT_EQ(c.holder(a), 1u) << "not its own";
  c.release({a}, 1);
  EXPECT_EQ(c.take({{b, 11}, {a, 10}}, 2), 0u);
}

TEST(Coordinator, CommitThatTheDestinationDeniesIsTakenBack) {
  Scene s;
  s.play.fail = "d.commit";
  s.play.destination_says = wire::UNDONE;
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_FALSE(r.undecided());
  EXPECT_EQ(s.source.decided, (std::vector<wire::Outcome>{wire::COMMITTED, wire::UNDONE}));
  s.expect_order({"s.decide", "d.commit", "s.undecide", "d.abort", "s.thaw", "s.rollback"});
}

void says_what_to_decide(const wire::Summary& r) {
  for (const char* order : {" --commit --force", " --rollback --force"})
    EXPECT_NE(r.error().find("migrctl recover " + migration_text(r.id()) + order), std::string::npos) << r.error();
}

// It has known of it: nothing says that it has not let it run.
TEST(Coordinator, CommitThatTheDestinationDoesNotKnowOfIsNotTakenBack) {
  Scene s;
  s.play.fail = "d.commit";
  s.play.destination_says = wire::UNKNOWN;
  const auto r = s.run();
  EXPECT_TRUE(r.undecided());
  says_what_to_decide(r);
  EXPECT_EQ(s.source.decided, std::vector{wire::COMMITTED});
}

TEST(Coordinator, CommitWhoseAnswerWasLostGoesOn) {
  Scene s;
  s.play.fail = "d.commit";
  s.play.destination_says = wire::COMMITTED;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated());
  EXPECT_FALSE(s.play.has("s.thaw"));
}

TEST(Coordinator, SilenceAfterTheCommitNeverThaws) {
  Scene s;
  s.play.fail = "d.commit";
  s.play.fail_code = EHOSTUNREACH;
  s.play.destination_silent = true;
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_TRUE(r.undecided());
  says_what_to_decide(r);
  for (const char* never : {"s.thaw", "s.rollback", "s.destroy", "d.abort", "p.rollback"}) EXPECT_FALSE(s.play.has(never)) << never;
}

TEST(Coordinator, FailureAfterTheCommitNeverGoesBack) {
  for (const char* f : {"d.rebind", "p.keys", "p.resume", "d.resume", "s.destroy"}) {
    Scene s;
    s.play.fail = f;
    const auto r = s.run();
    EXPECT_TRUE(r.migrated()) << f;
    EXPECT_FALSE(r.error().empty()) << f;
    for (const char* never : {"s.thaw", "s.rollback", "d.abort"}) EXPECT_FALSE(s.play.has(never)) << f << " " << never;
    EXPECT_TRUE(s.play.has("s.destroy")) << f;
  }
}

TEST(Coordinator, LittleMemoryIsNotCopiedAhead) {
  Scene s;
  s.source.memory_bytes = kPreCopyFromBytes - 1;
  EXPECT_TRUE(s.run().migrated());
  for (const char* never : {"s.track", "p.track", "s.pre_dump", "s.drop_unchanged"}) EXPECT_FALSE(s.play.has(never)) << never;
}

TEST(Coordinator, WhatPartnersHaveWrittenToSinceTheCopyBeganIsTold) {
  Scene s;
  EXPECT_TRUE(s.run().migrated());
  ASSERT_TRUE(s.source.writes);
  ASSERT_EQ(s.source.writes->size(), 1u);
  EXPECT_EQ(s.source.writes->at(0).start(), 0x5000u);
}

TEST(Coordinator, WhereSomebodyCannotTellWhatIsWrittenToAllIsCompared) {
  const std::function<void(Scene&)> cases[] = {
      [](Scene& s) { s.partner.cannot_track = "played"; },
      [](Scene& s) { s.partner.knows_writes = false; },
      [](Scene& s) { s.play.fail = "s.track"; },
      [](Scene& s) { s.source.twins = true; },
  };
  for (const auto& prepare : cases) {
    Scene s;
    prepare(s);
    const auto r = s.run();
    EXPECT_TRUE(r.migrated()) << r.error();
    EXPECT_TRUE(s.play.has("s.pre_dump"));
    EXPECT_TRUE(s.play.has("s.freeze"));
    EXPECT_FALSE(s.source.writes);
  }
}

TEST(Coordinator, APartnerThatDoesNotAnswerToTrackEndsIt) {
  Scene s;
  s.play.fail = "p.track";
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_NE(r.error().find("played failure of p.track"), std::string::npos) << r.error();
  for (const char* done : {"d.abort", "p.rollback"}) EXPECT_TRUE(s.play.has(done)) << done;
  for (const char* never : {"s.suspend", "s.pre_dump"}) EXPECT_FALSE(s.play.has(never)) << never;
}

TEST(Coordinator, WithoutAPreDumpAllIsCopiedDuringTheStop) {
  Scene s;
  s.play.fail = "s.pre_dump";
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  EXPECT_FALSE(s.play.has("d.pre_upload"));
  EXPECT_FALSE(s.play.has("s.drop_unchanged"));
  EXPECT_TRUE(s.play.has("d.upload"));
}

// --pre-copy, --pre-copy-rounds: who says so counts on a short stop.
TEST(Coordinator, WhatWasAskedForIsCopiedAheadOrNotMoved) {
  const std::function<void(Scene&)> cases[] = {
      [](Scene& s) { s.play.fail = "s.pre_dump"; },
      [](Scene& s) { s.source.no_pre_dump_from = 1; },
  };
  for (const auto& prepare : cases)
    for (const unsigned rounds : {0u, 1u, 3u}) {
      Scene s;
      prepare(s);
      s.rounds = rounds;
      s.pre_copy = true;
      s.source.memory_bytes = 1;
      const auto r = s.run();
      EXPECT_FALSE(r.migrated());
      EXPECT_FALSE(r.going_back());
      EXPECT_TRUE(r.error().starts_with("memory cannot be copied ahead of the stop, which was asked for: ")) << r.error();
      EXPECT_NE(r.error().find("; leave out --pre-copy and --pre-copy-rounds"), std::string::npos) << r.error();
      EXPECT_FALSE(s.play.has("s.suspend"));
      EXPECT_TRUE(s.play.has("d.abort") && s.play.has("p.rollback"));
    }
  Scene s;
  s.source.no_pre_dump_from = 1;
  EXPECT_TRUE(s.run().migrated()) << "nobody has asked for it";
}

// The dump of all memory in the stop would, too.
TEST(Coordinator, APreDumpThatMeetsItsLimitIsNotMadeUpForInTheStop) {
  Scene s;
  s.play.fail = "s.pre_dump";
  s.play.fail_code = ETIMEDOUT;
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_EQ(r.error(), "copying memory ahead of the stop: played failure of s.pre_dump");
  EXPECT_FALSE(s.play.has("s.suspend"));
}

TEST(Coordinator, RoundsAheadEndWhenTheyDoNotHalveWhatIsLeft) {
  const struct {
    std::vector<std::uint64_t> bytes;  // in kPreCopyFromBytes
    unsigned asked, made;
  } cases[] = {
      {{40, 16, 4, 3, 1}, 0, 4},  // 3 is no half of 4
      {{40, 16, 4, 0, 0}, 0, 4},  // little is left
      {{64, 32, 16, 8, 4, 2, 1}, 0, kPreCopyRounds},
      {{1, 1, 1}, 3, 3},
      {{40, 16, 4}, 1, 1},
  };
  for (const auto& c : cases) {
    Scene s;
    s.rounds = c.asked;
    for (const auto n : c.bytes) s.destination.rounds.push_back(n * kPreCopyFromBytes);
    const auto r = s.run();
    EXPECT_TRUE(r.migrated()) << r.error();
    EXPECT_EQ(r.pre_copy_rounds(), c.made);
    EXPECT_TRUE(s.play.has("s.checkpoint_after." + std::to_string(c.made)));
    EXPECT_EQ(r.bytes_pre_copied(), std::accumulate(s.destination.rounds.begin(), s.destination.rounds.begin() + c.made, std::uint64_t{0}));
  }
}

TEST(Coordinator, ARoundThatFailsLeavesThoseBefore) {
  Scene s;
  s.rounds = 3;
  s.source.no_pre_dump_from = 2;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  EXPECT_EQ(r.pre_copy_rounds(), 1u);
  EXPECT_TRUE(s.play.has("s.checkpoint_after.1"));
  EXPECT_TRUE(s.play.has("s.drop_unchanged"));
}

// CRIU has begun to count anew what is written, and nobody has what was written before that.
TEST(Coordinator, ARoundThatBreaksOffTakesThoseBeforeWithIt) {
  for (const unsigned asked : {0u, 3u}) {
    Scene s;
    s.rounds = asked;
    s.destination.rounds = {40 * kPreCopyFromBytes};
    s.source.pre_dump_fails_from = 2;
    const auto r = s.run();
    EXPECT_EQ(r.migrated(), !asked) << r.error();
    EXPECT_TRUE(s.play.has("d.pre_upload"));
    EXPECT_EQ(s.play.has("s.suspend"), !asked);
    EXPECT_EQ(r.pre_copy_rounds(), asked ? 1u : 0u);
    for (const char* no : {"s.checkpoint_after.1", "s.checkpoint_after.0", "s.drop_unchanged"}) EXPECT_FALSE(s.play.has(no)) << no;
  }
}

TEST(Coordinator, WithRoomForItTwiceItIsCopiedAheadOnce) {
  for (const bool asked : {false, true}) {
    Scene s;
    s.pre_copy = asked;
    s.destination.room = 2 * kPreCopyFromBytes;
    for (const auto n : {40, 16, 4}) s.destination.rounds.push_back(static_cast<std::uint64_t>(n) * kPreCopyFromBytes);
    const auto r = s.run();
    EXPECT_TRUE(r.migrated()) << r.error();
    EXPECT_EQ(r.pre_copy_rounds(), 1u) << asked;
    EXPECT_TRUE(s.play.has("s.drop_unchanged"));
  }
}

TEST(Coordinator, WithRoomForItOnceItIsNotCopiedAhead) {
  Scene s;
  s.destination.room = kPreCopyFromBytes;
  EXPECT_TRUE(s.run().migrated());
  EXPECT_FALSE(s.play.has("s.pre_dump"));
}

// A disk may write to what was copied, and nobody sees that.
TEST(Coordinator, MemoryThatIsWrittenToUnseenIsNotCopiedAhead) {
  Scene s;
  s.source.written_unseen = "it has disks";
  EXPECT_TRUE(s.run().migrated());
  EXPECT_FALSE(s.play.has("s.pre_dump"));
  Scene asked;
  asked.pre_copy = true;
  asked.source.written_unseen = "it has disks";
  const auto r = asked.run();
  EXPECT_FALSE(r.touched());
  EXPECT_NE(r.error().find("which was asked for: it has disks"), std::string::npos) << r.error();
}

TEST(Coordinator, WithoutRoomForWhatWasAskedForNothingBegins) {
  const struct {
    unsigned rounds, room;  // in kPreCopyFromBytes
  } cases[] = {{0, 1}, {1, 1}, {3, 1}, {3, 3}};
  for (const auto& c : cases) {
    Scene s;
    s.pre_copy = true;
    s.rounds = c.rounds;
    s.destination.room = c.room * kPreCopyFromBytes;
    const auto r = s.run();
    EXPECT_TRUE(r.error().starts_with("memory cannot be copied ahead of the stop, which was asked for: played lack of room; leave out")) << r.error();
    EXPECT_FALSE(r.touched());
    Scene t;
    t.pre_copy = true;
    t.rounds = c.rounds;
    t.destination.room = (std::max(c.rounds, 1u) + 1) * kPreCopyFromBytes;
    EXPECT_TRUE(t.run().migrated()) << c.rounds;
  }
}

TEST(Coordinator, WithoutRoomNothingBegins) {
  Scene s;
  s.destination.room = kPreCopyFromBytes - 1;
  const auto r = s.run();
  EXPECT_FALSE(r.migrated());
  EXPECT_NE(r.error().find("played lack of room"), std::string::npos) << r.error();
  EXPECT_FALSE(s.play.has("s.record"));
}

TEST(Coordinator, FailedUndoDoesNotStopTheOthers) {
  Scene s;
  s.play.fail = "s.thaw";                          // fails while going back ...
  const auto r = s.run("source.copy.begin:fail");  // ... from a fault point
  EXPECT_FALSE(r.migrated());
  EXPECT_NE(r.error().find("fault point 'source.copy.begin'"), std::string::npos);
  EXPECT_NE(r.error().find("while going back: checkpoint: played"), std::string::npos) << r.error();
  EXPECT_EQ(summary_json(r)["rolled_back"], (std::vector<std::string>{"destination dst", "network", "freeze", "suspension", "partner p"}));
  EXPECT_TRUE(r.touched());
  EXPECT_TRUE(r.going_back());
  EXPECT_EQ(summary_json(r)["going_back"], true);
  s.expect_order({"d.abort", "s.attach", "s.thaw", "s.reconnect", "s.rollback", "p.rollback"});
}

TEST(Coordinator, OfSeveralGidsOfAFamilyTheNearestIsMeant) {
  const auto ipv4 = [](unsigned a, unsigned b, unsigned c, unsigned d) {
    wire::PortGid g;
    g.set_device("rxe0"), g.set_port(1), g.set_roce_v2(true);
    std::string gid(10, '\0');
    for (const unsigned x : {255u, 255u, a, b, c, d}) gid += static_cast<char>(x);
    g.set_gid(gid);
    return g;
  };
  wire::PrepareReply there;
  *there.add_gids() = ipv4(10, 0, 0, 2);
  *there.add_gids() = ipv4(192, 168, 20, 2);
  *there.add_gids() = ipv4(192, 168, 30, 2);
  EXPECT_EQ(like(there, ipv4(192, 168, 20, 1)), &there.gids(1));
  EXPECT_EQ(like(there, ipv4(10, 0, 0, 1)), &there.gids(0));
}

TEST(Coordinator, WhereAProcessHasBeenIsToldByWhatIsNearestToThat) {
  const auto ipv4 = [](unsigned c, unsigned d) {
    std::string gid(10, '\0');
    for (const unsigned x : {255u, 255u, 10u, 0u, c, d}) gid += static_cast<char>(x);
    return gid;
  };
  const auto table = [&](unsigned host) {
    std::vector<wire::PortGid> out;
    for (const unsigned net : {1u, 2u}) {
      auto& g = out.emplace_back();
      g.set_device("rxe0"), g.set_port(1), g.set_roce_v2(true), g.set_gid(ipv4(net, host));
    }
    return out;
  };
  ContainerInfo info;
  info.instances = {Instance{1}};
  info.gids = table(8);
  info.earlier = {{0, ipv4(1, 7)}, {0, ipv4(2, 7)}, {0, ipv4(2, 8)}};
  wire::PrepareReply there;
  for (const auto& g : table(9)) *there.add_gids() = g;
  std::multimap<std::string, std::string> told;
  for (const auto& m : moves_of_processes(info, there)) told.emplace(m.birth_gid(), m.gid());
  EXPECT_EQ(told, (std::multimap<std::string, std::string>{{ipv4(1, 7), ipv4(1, 9)}, {ipv4(2, 7), ipv4(2, 9)}, {ipv4(1, 8), ipv4(1, 9)}, {ipv4(2, 8), ipv4(2, 9)}}));
}

// It has a lease, and asks when that is over; SourceHost::take_back() does not wait for it either.
TEST(Coordinator, WhoIsSilentGoesBackByItself) {
  for (const char* host : {"d.abort", "p.rollback"})
    for (const int code : {EHOSTUNREACH, ETIMEDOUT, EIO}) {
      Scene s;
      s.play.fail = host;
      s.play.fail_code = code;
      const auto r = s.run("source.copy.begin:fail");
      EXPECT_EQ(r.going_back(), code == EIO) << r.error();
      EXPECT_EQ(r.error().find("goes back by itself") == std::string::npos, code == EIO) << r.error();
      EXPECT_EQ(s.play.settled, code != EIO);
    }
  Scene s;
  s.play.fail = "s.thaw";
  s.play.fail_code = ETIMEDOUT;
  EXPECT_TRUE(s.run("source.copy.begin:fail").going_back());
}

TEST(Coordinator, AFolderGoesBackByNobodyElse) {
  Scene s;
  s.keep = true;
  s.play.fail = "d.abort";
  s.play.fail_code = ETIMEDOUT;  // of a file system of another host
  const auto r = s.run("source.copy.begin:fail");
  EXPECT_TRUE(r.going_back()) << r.error();
  EXPECT_EQ(r.error().find("goes back by itself"), std::string::npos) << r.error();
}

// What the source sends again would find the partner's windows bound on the new path, or its old path closed or cut.
TEST(Coordinator, OldPathsStandBeforeTheSourceSends) {
  const struct {
    const char* fails;
    bool cut;
  } cases[] = {{"s.cut", true}, {"p.settle", true}, {"s.checkpoint", true}, {"d.ready", false}, {"p.switch", false}, {"p.switch", true}, {"s.decide", false}};
  for (const auto& c : cases) {
    Scene s;
    if (c.cut) s.partner.left = {0};
    s.partner.old_path_ms = 100;
    s.play.fail = c.fails;
    EXPECT_FALSE(s.run().migrated()) << c.fails;
    s.expect_order({c.fails, "p.old_path", "s.rollback", "p.rollback"});
    EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "p.old_path"), 1) << c.fails;
  }
}

TEST(Coordinator, PathsThatNobodyHasLeftAreNotAskedFor) {
  for (const char* f : {"s.suspend", "p.drain", "s.freeze", "d.upload"}) {
    Scene s;
    s.play.fail = f;
    EXPECT_FALSE(s.run().migrated()) << f;
    EXPECT_FALSE(s.play.has("p.old_path")) << f;
  }
}

// Nor is one that is older and does not know the question: its Rollback is what counts.
TEST(Coordinator, APartnerThatIsSilentDoesNotKeepTheSourceFromRunning) {
  for (const int code : {EHOSTUNREACH, EPROTONOSUPPORT, EIO}) {
    Scene s;
    s.play.fail = "p.old_path";
    s.play.fail_code = code;
    const auto r = s.run("source.ready.end:fail");
    EXPECT_FALSE(r.going_back()) << r.error();
    s.expect_order({"p.old_path", "s.rollback", "p.rollback"});
    EXPECT_TRUE(std::any_of(s.said.begin(), s.said.end(), [](const auto& p) { return p.note().find("connections may break") != std::string::npos; }));
  }
}

TEST(Coordinator, EveryFaultPointBeforeTheCommitGoesBack) {
  for (const char* f : {"prepare", "connect", "pre-copy", "suspend", "drain", "freeze", "copy", "ready", "commit"}) {
    Scene s;
    const auto r = s.run("source." + std::string(f) + ".begin:fail");
    EXPECT_FALSE(r.migrated()) << f;
    EXPECT_FALSE(s.play.has("d.commit")) << f;
    EXPECT_EQ(s.play.has("s.freeze"), s.play.has("s.reconnect")) << f;
    EXPECT_EQ(s.play.has("s.suspend"), s.play.has("s.rollback")) << f;
    EXPECT_EQ(s.play.has("d.prepare"), s.play.has("d.abort")) << f;
  }
}

// ---- an operator cancels it

TEST(Cancelled, GoesBackAtTheNextStep) {
  for (const char* at : {"s.inspect", "p.find", "s.record", "d.prepare", "p.prepare", "d.connect", "s.track", "d.pre_upload", "s.get_ready", "s.suspend", "p.suspend", "p.drain",
                         "s.freeze", "s.checkpoint", "d.upload", "d.full_restore", "d.ready", "p.switch"}) {
    Scene s;
    s.play.cancelled_at = at;
    const auto r = s.run();
    EXPECT_FALSE(r.migrated()) << at;
    EXPECT_EQ(r.error(), "cancelled by the operator") << at;
    EXPECT_FALSE(r.going_back()) << at;
    EXPECT_FALSE(s.again || s.busy || s.in_vain) << at << ": it would be tried again";
    EXPECT_TRUE(s.source.decided.empty()) << at;
    EXPECT_EQ(r.touched(), s.play.has("s.record")) << at;
    const std::pair<const char*, const char*> undone[] = {
        {"s.record", "s.forget"},
        {"d.prepare", "d.abort"},
        {"p.prepare", "p.rollback"},
        {"s.suspend", "s.rollback"},
        {"s.freeze", "s.reconnect"},
        {"s.detach", "s.attach"},
        {"s.checkpoint", "s.thaw"},
        {"p.switch", "p.old_path"},
    };
    for (const auto& [done, by] : undone) EXPECT_LE(s.play.has(done), s.play.has(by)) << at << ": " << done;
  }
}

TEST(Cancelled, GoesNoFurther) {
  const std::pair<const char*, const char*> cases[] = {
      {"p.find", "s.record"},
      {"s.record", "d.prepare"},
      {"d.connect", "s.track"},
      {"s.pre_dump", "d.pre_upload"},
      {"d.pre_upload", "s.suspend"},
      {"s.get_ready", "s.suspend"},
      {"p.suspend", "s.drain"},
      {"p.drain", "s.freeze"},
      {"d.upload", "d.full_restore"},
      {"d.full_restore", "d.ready"},
  };
  for (const auto& [at, never] : cases) {
    Scene s;
    s.destination.round_ms = 1;
    s.play.cancelled_at = at;
    EXPECT_EQ(s.run().error(), "cancelled by the operator") << at;
    EXPECT_FALSE(s.play.has(never)) << at << ", then " << never;
  }
}

TEST(Cancelled, DoesNotWaitForAPartnerAnyLonger) {
  Scene s;
  s.busy_wait_ms = 60'000;
  s.partner.busy_with = kId + 1;
  s.partner.busy_for = 1 << 20;
  s.play.cancelled_at = "p.find";
  const auto began = std::chrono::steady_clock::now();
  const auto r = s.run();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(1));
  EXPECT_EQ(r.error(), "cancelled by the operator");
  EXPECT_FALSE(s.busy) << "it would begin again";
  EXPECT_FALSE(r.touched());
}

TEST(Cancelled, DoesNotSendARoundToItsEnd) {
  Scene s;
  s.destination.round_ms = 20'000;
  s.play.cancelled_at = "s.pre_dump";
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(s.run().error(), "cancelled by the operator");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  EXPECT_FALSE(s.play.has("s.suspend"));
}

TEST(Cancelled, DoesNotMakeTheRoundsThatAreLeft) {
  Scene s;
  s.rounds = 3;
  s.play.cancelled_at = "d.pre_upload";
  EXPECT_EQ(s.run().error(), "cancelled by the operator");
  EXPECT_EQ(std::count(s.play.log.begin(), s.play.log.end(), "s.pre_dump"), 1);
}

// It fails by itself at the same time, for a reason that another try is for.
TEST(Cancelled, IsNotTriedAgain) {
  for (const int code : {EAGAIN, ESTALE, EINPROGRESS}) {
    Scene s;
    s.play.cancelled_at = s.play.fail = "s.checkpoint";
    s.play.fail_code = code;
    EXPECT_EQ(s.run().error(), "cancelled by the operator");
    EXPECT_FALSE(s.again || s.busy || s.in_vain) << code;
  }
}

TEST(Cancelled, NotAnyMoreOnceItIsDecided) {
  for (const char* at : {"s.decide", "d.commit", "d.rebind", "s.destroy"}) {
    Scene s;
    s.play.cancelled_at = at;
    const auto r = s.run();
    EXPECT_TRUE(r.migrated()) << at;
    EXPECT_EQ(r.error(), "") << at;
    EXPECT_FALSE(s.play.course->cancel()) << at;
  }
}

TEST(Cancelled, BetweenTwoTriesTheNextOneEnds) {
  Course c("c", "dst", kId);
  EXPECT_TRUE(c.cancel());
  EXPECT_TRUE(c.cancel()) << "once more is no error";
  c.begin(kId + 1);
  EXPECT_FALSE(c.goes_on());
  EXPECT_TRUE(c.give_up({ETIME, "for another reason"}));
  EXPECT_EQ(c.goes_on().error().text, "cancelled by the operator") << "the first reason counts";
  EXPECT_FALSE(c.decide());
  Course denied("c", "dst", kId);
  EXPECT_TRUE(denied.decide());
  EXPECT_FALSE(denied.cancel());
  denied.begin(kId + 1);
  EXPECT_TRUE(denied.cancel());
}

// ---- the stop has a limit

TEST(Stop, ThatTakesTooLongIsEndedWhereItIs) {
  Scene s;
  s.max_stop_ms = 100;
  s.destination.restore_ms = 20'000;
  const auto began = std::chrono::steady_clock::now();
  const auto r = s.run();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5)) << "the restore was waited for";
  EXPECT_FALSE(r.migrated());
  EXPECT_EQ(r.error(), "'c' stood still for more than the 100 ms that it may");
  EXPECT_EQ(r.error_code(), static_cast<unsigned>(ETIME));
  EXPECT_FALSE(s.again || s.busy || s.in_vain) << "it would stand still again";
  EXPECT_FALSE(r.going_back());
  s.expect_order({"d.abort", "s.thaw"});
  for (const char* done : {"s.rollback", "s.reconnect", "s.attach", "p.rollback"}) EXPECT_TRUE(s.play.has(done)) << done;
  EXPECT_FALSE(s.play.has("d.commit"));
}

TEST(Stop, IsNotWhatComesBeforeIt) {
  Scene s;
  s.max_stop_ms = 400;
  s.source.inspect_ms = 600;
  s.destination.rounds = {1};
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
}

TEST(Stop, ThatFailsIsNotToldToHaveBeenTooLong) {
  Scene s;
  s.max_stop_ms = 500;
  s.play.fail = "d.ready";
  s.play.fail_code = EAGAIN;
  s.source.thaw_ms = 1000;
  EXPECT_EQ(s.run().error(), "played failure of d.ready");
  EXPECT_TRUE(s.again);
  EXPECT_TRUE(s.play.course->goes_on()) << "the next try would end at once";
}

TEST(Stop, ThatIsDecidedComesToItsEnd) {
  Scene s;
  s.max_stop_ms = 300;
  s.destination.commit_ms = 600;
  const auto r = s.run();
  EXPECT_TRUE(r.migrated()) << r.error();
  EXPECT_EQ(r.error(), "");
  EXPECT_GT(r.service_blackout_ms(), 300);
  EXPECT_FALSE(s.play.has("d.abort"));
}

// What the destination is at is ended for an operator, too. A folder has nobody who could end it meanwhile.
TEST(Cancelled, WaitsForNoRestore) {
  for (const bool keep : {false, true}) {
    Scene s;
    s.keep = keep;
    s.destination.restore_ms = keep ? 300 : 20'000;
    s.play.cancelled_at = "d.restores";
    const auto began = std::chrono::steady_clock::now();
    EXPECT_EQ(s.run().error(), "cancelled by the operator");
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
    EXPECT_EQ(s.play.has("d.ready"), keep);
    EXPECT_TRUE(s.play.has("d.abort"));
  }
}

// ---- wait-before-stop has a limit

TEST(Coordinator, DrainInTimeCutsNothing) {
  Scene s;
  auto summary = s.run();
  EXPECT_TRUE(summary.migrated()) << summary.error();
  EXPECT_EQ(s.source.drain_ms, kDrainMs);
  EXPECT_FALSE(s.play.has("s.check_cut"));
  EXPECT_FALSE(summary.has_replayed());
}

TEST(Coordinator, DrainThatTakesTooLongIsCutAndReplayed) {
  for (bool at_source : {true, false}) {
    Scene s;
    (at_source ? s.source.left : s.partner.left) = {0};
    auto summary = s.run();
    EXPECT_TRUE(summary.migrated()) << summary.error();
    // Both ends can, before either does; both have stopped, before either is told where the other one stands.
    s.expect_order({"s.check_cut", "p.cut", "s.settle", "s.freeze"});
    s.expect_order({"p.check_cut", "s.cut", "p.settle", "p.switch"});
    s.expect_order({"p.cut", "s.settle"});
    s.expect_order({"s.cut", "p.settle"});
    ASSERT_EQ(s.source.settled.qps_size(), 1);
    EXPECT_EQ(s.source.settled.qps(0).psn(), 200u);
    ASSERT_EQ(s.partner.settled.qps_size(), 1);
    EXPECT_EQ(s.partner.settled.qps(0).psn(), 100u);
    EXPECT_EQ(summary.replayed().qps(), 2u);
    EXPECT_EQ(summary.replayed().replayed(), 7u);
    EXPECT_EQ(summary.replayed().executed(), 1u);
    EXPECT_EQ(summary.replayed().lost(), 1u);
  }
}

TEST(Coordinator, WhatCannotBeReplayedGoesBackBeforeItIsCut) {
  for (const char* who : {"s.check_cut", "p.check_cut"}) {
    Scene s;
    s.source.left = {0};
    s.play.fail = who;
    auto summary = s.run();
    EXPECT_FALSE(summary.migrated());
    EXPECT_NE(summary.error().find("cannot be replayed"), std::string::npos) << summary.error();
    EXPECT_FALSE(s.play.has("s.cut"));
    EXPECT_FALSE(s.play.has("p.cut"));
    EXPECT_FALSE(s.play.has("s.freeze"));
    s.expect_order({"s.rollback", "p.rollback", "d.abort"});
  }
}

TEST(Coordinator, FailureBetweenCutAndSettleGoesBack) {
  for (const char* who : {"s.cut", "p.cut", "s.settle", "p.settle"}) {
    Scene s;
    s.partner.left = {0};
    s.play.fail = who;
    auto summary = s.run();
    EXPECT_FALSE(summary.migrated()) << who;
    EXPECT_FALSE(s.play.has("s.freeze"));
    s.expect_order({"s.rollback", "p.rollback", "d.abort"});
  }
}

// Both ends of a connection in the container: it answers for both.
TEST(Coordinator, TwinsAreCutTogether) {
  Scene s;
  s.source.twins = true;
  s.source.left = {1};
  auto summary = s.run();
  EXPECT_TRUE(summary.migrated()) << summary.error();
  EXPECT_FALSE(s.play.has("p.cut"));
  ASSERT_EQ(s.source.settled.qps_size(), 2);
  EXPECT_EQ(s.source.settled.qps(0).index(), 1u);
  EXPECT_EQ(s.source.settled.qps(0).psn(), 102u);
  EXPECT_EQ(s.source.settled.qps(1).psn(), 101u);
}

}  // namespace
}  // namespace migr::coordinator_test
