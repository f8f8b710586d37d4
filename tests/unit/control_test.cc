/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The control thread against a migrd that is this test: what it says, what it
 * refuses, and which call of the engine each request becomes. The engine is a
 * fake that writes down how it was called.
 */
#include "../../libmigr/control.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../libmigr/cm/cm.h"
#include "../../libmigr/datagrams.h"
#include "../../libmigr/gids.h"
#include "../../libmigr/itimer.h"
#include "../../libmigr/kernel_link.h"
#include "../../libmigr/provider/provider.h"
#include "../../libmigr/provider/uverbs_write.h"
#include "../../libmigr/switchover/ahead.h"
#include "../../libmigr/switchover/switchover.h"
#include "../../libmigr/whereabouts.h"
#include "control_doubles.h"

/// Who opens the first channel looks for libibverbs, which is not there.
std::atomic<void (*)()> while_looking{nullptr};
void* dlopen(const char*, int) noexcept {
  if (void (*const then)() = while_looking) then();
  return nullptr;
}

namespace migr {

/* ---- the fake engine: called by the control thread while the test waits for the reply --- */

struct Fake {
  std::string calls;
  migr_proc_state state = MIGR_PROC_RUNNING;
  int status = 0;
  std::size_t records = 0;  ///< that the last call got
  bool restored = false;
  const QpShadow* met = nullptr;
};
Fake fake;

int called(const char* what, std::string& why) {
  fake.calls += what;
  fake.calls += ' ';
  if (fake.status) why = std::string(what) + " failed as told";
  return fake.status;
}

namespace switchover {
migr_proc_state process_state() { return fake.state; }
int suspend(Qps qps, std::string& why) {
  fake.records = qps.size();
  if (!fake.status) fake.state = MIGR_PROC_SUSPENDED;
  return called("suspend", why);
}
int drain(std::unique_lock<std::mutex> held, Qps qps, unsigned limit_ms, std::vector<migr_drain_stat>& stats, std::string& why) {
  // Nobody has destroyed one since it was named; and then the lock must be free: drain takes it itself.
  const bool named_under_it = held.owns_lock() && held.mutex() == &Registry::get().lock;
  if (named_under_it) held.unlock();
  const bool free = Registry::get().lock.try_lock();
  if (free) Registry::get().lock.unlock();
  for (QpShadow* qp : qps) stats.push_back({7, qp->vqpn(), limit_ms, 0, 0, 0});
  return called(!free ? "drain-locked" : named_under_it ? "drain" : "drain-unlocked", why);
}
int give_up(Qps qps, std::string& why) {
  fake.records = qps.size();
  return called("give-up", why);
}
int track(Qps qps, bool here, std::string& why) {
  fake.records = qps.size();
  return called(here ? "track-here" : "track-there", why);
}
int note_queues(unsigned limit_ms, std::string& why) {
  fake.records = limit_ms;
  return called("note-queues", why);
}
std::string lost_memory() { return {}; }
int take_notes(std::vector<migr_nic_write>& out, std::string& why) {
  out.push_back({.ctx_id = 7, .vqpn = 0, .key = 0x1234, .reserved = 0, .start = 0x5000, .bytes = 0x2000});
  return called("take-notes", why);
}
int check_cut(Qps qps, std::string& why) {
  fake.records = qps.size();
  return called("check-cut", why);
}
int cut(Qps qps, std::vector<migr_qp_psn>& out, std::string& why) {
  for (QpShadow* qp : qps) out.push_back({7, qp->vqpn(), 1000 + qp->vqpn(), 0});
  return called("cut", why);
}
int settle(Qps qps, std::span<const migr_qp_psn> psns, std::vector<migr_replay_stat>& out, std::string& why) {
  for (std::size_t i = 0; i < qps.size(); ++i) out.push_back({7, qps[i]->vqpn(), psns[i].psn, 2, 3, 0});
  return called("settle", why);
}
int freeze(std::string& why) {
  if (!fake.status) fake.state = MIGR_PROC_FROZEN;
  return called("freeze", why);
}
int create_spares(Qps qps, std::vector<migr_qp_spare>& out, std::string& why) {
  for (QpShadow* qp : qps) out.push_back({7, qp->vqpn(), qp->vqpn() + 1, 99});
  return called("create", why);
}
int connect_spare(QpShadow&, const migr_qp_connect& to, std::string& why) {
  fake.records = to.dest_qpn;
  return called("connect", why);
}
int switch_to_spare(Qps, std::string& why) { return called("switch", why); }
int rebound_keys(std::vector<migr_key_map>&) { return 0; }
int rebind(std::span<const migr_handle_map> maps, std::vector<migr_key_map>& out, std::string& why) {
  fake.records = maps.size();
  for (std::uint32_t i = 0; i < maps.size(); ++i) out.push_back({i, i, {}});
  return called("rebind", why);
}
int set_remote_keys(Qps qps, std::span<const migr_key_map>, std::string& why) {
  fake.records = qps.size();
  return called("keys", why);
}
int resume(Qps qps, std::vector<migr_resume_stat>&, std::string& why) {
  fake.records = qps.size();
  fake.state = MIGR_PROC_RUNNING;
  return called("resume", why);
}
int take_old_paths(std::string& why) { return called("old-paths", why); }
int rollback(std::string& why) {
  if (!fake.status) fake.state = MIGR_PROC_RUNNING;
  return called("rollback", why);
}
void stats(std::vector<migr_drain_stat>& out) {
  for (QpShadow* qp : Registry::get().qps) out.push_back({7, qp->vqpn(), 0, 0, 0, 0});
}
}  // namespace switchover

namespace datagrams {
std::vector<ibv_gid_entry> sources(const Context&) { return {}; }
unsigned prepare() {
  std::string ignored;
  called("prepare-moves", ignored);
  return 3;
}
void settle() {}
int set_moves(std::span<const migr_move> moves, std::string& why) {
  fake.records = moves.size();
  return called("moves", why);
}
}  // namespace datagrams

namespace whereabouts {
void set_moves(std::span<const migr_move>) {}
void met(QpShadow& q, std::span<const migr_key_map> keys) {
  std::string ignored;
  fake.records = keys.size();
  fake.met = &q;
  called("met", ignored);
}
}  // namespace whereabouts

namespace provider {
void set_restored() { fake.restored = true; }
void forget_uverbs_fds() {}
}  // namespace provider

namespace {

constexpr int kPatienceMs = 5000;

/// One bed for all tests: a process starts its control thread once.
struct Control : ::testing::Test {
  static void SetUpTestSuite() {
    if (listener >= 0) return;  // a suite that is derived from this one
    char name[] = "/tmp/control_test.XXXXXX";
    folder = mkdtemp(name);
    const std::string path = folder + "/proc.sock";
    setenv("MIGR_PROC_SOCKET", path.c_str(), 1);
    setenv("MIGR_GATE_LIMIT_MS", "4000", 1);
    setenv("MIGR_ALONE_LIMIT_MS", "6000", 1);
    open_socket();
    static Context context;
    static QpShadow qps[2];
    static ibv_qp real[2];
    Registry& registry = Registry::get();
    for (int i = 0; i < 2; ++i) {
      qps[i].app.qp_num = 0x10 + static_cast<std::uint32_t>(i);
      real[i].qp_num = 0x20 + static_cast<std::uint32_t>(i);
      qps[i].real = &real[i];
      qps[i].context = &context;
      registry.qps.push_back(&qps[i]);
    }
    atexit([] { std::filesystem::remove_all(folder); });
    pthread_atfork([] { if (calls_verbs_at_fork) const std::lock_guard verb(Registry::get().lock); }, nullptr, nullptr);
    control::start();
    control::start();  // once is enough
  }

  static void open_socket() {
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path, (folder + "/proc.sock").c_str());
    ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listener, 4), 0);
  }
  static void close_socket() {
    close(listener);
    unlink((folder + "/proc.sock").c_str());
  }

  void SetUp() override {
    if (fd < 0) meet();
    fake.calls.clear();
    fake.status = 0;
    fake.state = MIGR_PROC_RUNNING;
  }

  /// Accepts the library's connection and takes its HELLO.
  static void meet() {
    pollfd waiting{listener, POLLIN, 0};
    ASSERT_EQ(poll(&waiting, 1, 4 * kPatienceMs), 1) << "the library did not connect";
    fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_TRUE(receive(hello));
  }
  static bool receive(migr_msg& head) {
    static std::vector<char> buffer(1 << 20);
    pollfd waiting{fd, POLLIN, 0};
    if (poll(&waiting, 1, kPatienceMs) != 1) return false;
    const ssize_t n = recv(fd, buffer.data(), buffer.size(), 0);
    if (n < static_cast<ssize_t>(sizeof(head))) return false;
    memcpy(&head, buffer.data(), sizeof(head));
    records.assign(buffer.data() + sizeof(head), buffer.data() + n);
    return records.size() == std::size_t{head.count} * head.record_size;
  }
  static migr_msg request(std::uint16_t type) {
    migr_msg head{};
    head.version = MIGR_PROC_VERSION;
    head.type = type;
    head.seq = ++seq;
    return head;
  }
  static void put(const migr_msg& head, const void* data = nullptr, std::size_t bytes = 0) {
    std::vector<char> packet(sizeof(head) + bytes);
    memcpy(packet.data(), &head, sizeof(head));
    if (bytes) memcpy(packet.data() + sizeof(head), data, bytes);
    ASSERT_EQ(send(fd, packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
  }
  template <class T>
  static migr_msg ask(migr_msg head, const std::vector<T>& all) {
    head.count = static_cast<std::uint32_t>(all.size());
    head.record_size = sizeof(T);
    put(head, all.data(), all.size() * sizeof(T));
    migr_msg reply{};
    EXPECT_TRUE(receive(reply));
    EXPECT_EQ(reply.type, head.type | MIGR_REPLY);
    EXPECT_EQ(reply.seq, head.seq);
    return reply;
  }
  static migr_msg ask(std::uint16_t type) {
    const migr_msg head = request(type);
    put(head);
    migr_msg reply{};
    EXPECT_TRUE(receive(reply));
    EXPECT_EQ(reply.type, type | MIGR_REPLY);
    return reply;
  }
  static bool is_closed() {
    pollfd waiting{fd, POLLIN, 0};
    char byte;
    const bool gone = poll(&waiting, 1, kPatienceMs) == 1 && recv(fd, &byte, 1, 0) == 0;
    close(fd);
    fd = -1;
    return gone;
  }
  /// As a migrd of another version does. @return it had to, while the state was that
  static int refuse(migr_proc_state while_it_is, int limit_ms) {
    int times = 0;
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    while (fake.state == while_it_is && std::chrono::steady_clock::now() < until) {
      pollfd waiting{listener, POLLIN, 0};
      if (poll(&waiting, 1, 50) != 1) continue;
      fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      times += receive(hello);
      close(std::exchange(fd, -1));
    }
    return times;
  }
  static std::string gate() {
    std::string path = folder + "/" MIGR_PROC_GATE_PREFIX;
    char hex[3];
    for (const std::uint8_t byte : hello.instance) {
      snprintf(hex, sizeof(hex), "%02x", byte);
      path += hex;
    }
    return path;
  }

  static inline std::string folder;
  static inline int listener = -1, fd = -1;
  static inline migr_msg hello{};
  static inline std::vector<char> records;
  static inline std::uint32_t seq = 0;
  static inline bool calls_verbs_at_fork = false;  ///< the application's handler
};

/// What `is_so` says in a child.
template <class IsSo>
bool so_in_child(IsSo&& is_so) {
  const pid_t pid = fork();
  if (pid == 0) _exit(is_so() ? 0 : 1);
  int status = -1;
  waitpid(pid, &status, 0);
  return status == 0;
}

// Before there ever was one: with the second nobody is looked for.
TEST_F(Control, ChildOfForkMayOpenTheFirstChannel) {
  EXPECT_TRUE(so_in_child([] {
    static std::atomic<bool> looks = false;
    while_looking = [] {
      looks = true;
      usleep(200'000);
    };
    std::thread([] { cm::engine(true); }).detach();
    while (!looks) usleep(1000);
    return so_in_child([] {
      alarm(kPatienceMs / 1000);
      return cm::engine(true) != nullptr;
    });
  }));
}

TEST_F(Control, HelloSaysWhoAndWhere) {
  EXPECT_EQ(hello.type, MIGR_MSG_HELLO);
  EXPECT_EQ(hello.version, MIGR_PROC_VERSION);
  EXPECT_EQ(hello.state, MIGR_PROC_RUNNING);
  EXPECT_EQ(hello.generation, 0u);
  EXPECT_GT(hello.control_tid, 0);
  EXPECT_NE(hello.control_tid, getpid());
  EXPECT_NE(std::string(reinterpret_cast<char*>(hello.instance), 16), std::string(16, '\0'));
  EXPECT_EQ(hello.count, 1u);
}

TEST_F(Control, ThreadHasItsNameAndTakesNoSignals) {
  std::string comm(16, '\0'), line, status;
  const std::string task = "/proc/self/task/" + std::to_string(hello.control_tid);
  FILE* f = fopen((task + "/comm").c_str(), "r");
  ASSERT_TRUE(f);
  comm.resize(fread(comm.data(), 1, comm.size(), f));
  fclose(f);
  EXPECT_EQ(comm, "migr-control\n");
  f = fopen((task + "/status").c_str(), "r");
  ASSERT_TRUE(f);
  char buffer[4096];
  status.assign(buffer, fread(buffer, 1, sizeof(buffer), f));
  fclose(f);
  const std::size_t at = status.find("SigBlk:\t");
  ASSERT_NE(at, status.npos);
  const std::uint64_t blocked = strtoull(status.c_str() + at + 8, nullptr, 16);
  EXPECT_TRUE(blocked >> (SIGTERM - 1) & 1);
  EXPECT_TRUE(blocked >> (SIGALRM - 1) & 1);
}

TEST_F(Control, SuspendOfNoQpIsSuspendOfAll) {
  EXPECT_EQ(ask(MIGR_MSG_SUSPEND).status, 0);
  EXPECT_EQ(fake.calls, "suspend ");
  EXPECT_EQ(fake.records, 2u);
}

TEST_F(Control, QpIsNamedByVirtualOrPresentNumber) {
  EXPECT_EQ(ask(request(MIGR_MSG_SUSPEND), std::vector<migr_qp_ref>{{7, 0x11, 0, 0}}).status, 0);
  EXPECT_EQ(fake.records, 1u);
  EXPECT_EQ(ask(request(MIGR_MSG_SUSPEND), std::vector<migr_qp_ref>{{7, 0, 0x20, 0}}).status, 0);
}

// It comes after the commit: nothing may keep the others from going on.
TEST_F(Control, ResumePassesOverWhatWasDestroyedMeanwhile) {
  EXPECT_EQ(ask(request(MIGR_MSG_RESUME), std::vector<migr_qp_ref>{{7, 0x10, 0, 0}, {7, 0x99, 0, 0}}).status, 0);
  EXPECT_EQ(fake.records, 1u);
  EXPECT_EQ(ask(request(MIGR_MSG_RESUME), std::vector<migr_qp_ref>{{7, 0x99, 0, 0}}).status, 0);
  EXPECT_EQ(fake.records, 0u) << "none is not all";
}

// migrd may have ended before it knew that it was heard: by then a link may have failed.
TEST_F(Control, ResumeThatIsSaidAgainPassesOverWhatChangesItsLink) {
  links::changes_link = Registry::get().qps[1];
  EXPECT_EQ(ask(MIGR_MSG_RESUME).status, 0);
  EXPECT_EQ(fake.records, 1u);
  links::changes_link = nullptr;
}

TEST_F(Control, UnknownQpIsEnoentAndNothingHappens) {
  const migr_msg reply = ask(request(MIGR_MSG_SUSPEND), std::vector<migr_qp_ref>{{7, 0x10, 0, 0}, {7, 0x99, 0, 0}});
  EXPECT_EQ(reply.status, ENOENT);
  EXPECT_NE(std::string(reply.text).find("0x99"), std::string::npos) << reply.text;
  EXPECT_EQ(fake.calls, "");
  EXPECT_EQ(ask(request(MIGR_MSG_SWITCH), std::vector<migr_qp_ref>{{8, 0x10, 0, 0}}).status, ENOENT);
  EXPECT_EQ(ask(request(MIGR_MSG_QP_CONNECT), std::vector<migr_qp_connect>{{7, 0x99, 0, 0, {}, {}}}).status, ENOENT);
}

TEST_F(Control, EngineErrorsComeWithTheirSentence) {
  fake.status = ETIMEDOUT;
  migr_msg head = request(MIGR_MSG_DRAIN);
  head.arg = 25;
  const migr_msg reply = ask(head, std::vector<migr_qp_ref>{{7, 0x10, 0, 0}});
  EXPECT_EQ(reply.status, ETIMEDOUT);
  EXPECT_STREQ(reply.text, "drain failed as told");
  ASSERT_EQ(reply.count, 1u);
  EXPECT_EQ(reinterpret_cast<migr_drain_stat*>(records.data())->sq_in_flight, 25u);
}

// As many as migrd takes of one process: after the commit there is no way back from a message that is refused.
TEST_F(Control, KeysOfFiveMillionRegionsAreTaken) {
  constexpr std::size_t kKeys = 5'000'000;
  migr_msg head = request(MIGR_MSG_KEYS);
  head.record_size = sizeof(migr_key_map);
  const std::vector<migr_key_map> part(MIGR_PROC_MAX_RECORDS);
  for (std::size_t left = kKeys; left; left -= head.count) {
    head.count = static_cast<std::uint32_t>(std::min(left, part.size()));
    head.flags = head.count < left ? MIGR_MORE : 0;
    put(head, part.data(), head.count * sizeof(migr_key_map));
  }
  migr_msg reply{};
  ASSERT_TRUE(receive(reply));
  EXPECT_EQ(reply.status, 0) << reply.text;
}

TEST_F(Control, EachRequestReachesTheEngine) {
  EXPECT_EQ(ask(MIGR_MSG_QP_CREATE).count, 2u);
  ask(request(MIGR_MSG_QP_CONNECT), std::vector<migr_qp_connect>{{7, 0x10, 5, 6, {}, {}}});
  ask(MIGR_MSG_SWITCH);
  ask(MIGR_MSG_RESUME);
  ask(MIGR_MSG_OLD_PATH);
  ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(ask(MIGR_MSG_STATS).count, 2u);
  EXPECT_EQ(ask(MIGR_MSG_DESCRIBE).status, 0);
  EXPECT_EQ(fake.calls, "create connect switch resume old-paths rollback ");
}

TEST_F(Control, CutIsAskedThenDoneThenSettled) {
  migr_msg check = request(MIGR_MSG_CUT);
  check.arg = MIGR_CUT_CHECK;
  EXPECT_EQ(ask(check, std::vector<migr_qp_ref>{{7, 0x10, 0, 0}}).count, 0u);
  ask(request(MIGR_MSG_CUT), std::vector<migr_qp_ref>{{7, 0x10, 0, 0}});
  EXPECT_EQ(reinterpret_cast<migr_qp_psn*>(records.data())->psn, 1000u + 0x10);
  EXPECT_EQ(ask(request(MIGR_MSG_SETTLE), std::vector<migr_qp_psn>{{7, 0x99, 5, 0}}).status, ENOENT);
  ask(request(MIGR_MSG_SETTLE), std::vector<migr_qp_psn>{{7, 0x10, 5, 0}});
  EXPECT_EQ(reinterpret_cast<migr_replay_stat*>(records.data())->replayed, 5u);
  EXPECT_EQ(fake.calls, "check-cut cut settle ");
}

TEST_F(Control, ThoseThatAreGoneAreNamed) {
  ask(MIGR_MSG_GONE);
  EXPECT_EQ(fake.calls, "") << "none are not all";
  ask(request(MIGR_MSG_GONE), std::vector<migr_qp_ref>{{7, 0x10, 0, 0}, {7, 0x99, 0, 0}});  // the application has destroyed the second
  EXPECT_EQ(fake.calls, "give-up ");
  EXPECT_EQ(fake.records, 1u);
}

TEST_F(Control, MovesAreToldInTwoSteps) {
  migr_msg first = request(MIGR_MSG_MOVES);
  first.arg = MIGR_MOVES_PREPARE;
  EXPECT_EQ(ask(first, std::vector<migr_move>{}).arg, 3u) << "QPs that no thread may be inside of";
  EXPECT_EQ(ask(request(MIGR_MSG_MOVES), std::vector<migr_move>{{{}, {}, 17, 30}, {{}, {}, 18, 31}}).status, 0);
  EXPECT_EQ(fake.records, 2u);
  EXPECT_EQ(fake.calls, "prepare-moves moves ");
}

TEST_F(Control, WhoIsMetIsFoundByName) {
  migr_msg met = request(MIGR_MSG_MET);
  met.arg = MIGR_QP_NAME(7, 0x10);
  EXPECT_EQ(ask(met, std::vector<migr_key_map>{{1, 2, {}}, {3, 4, {}}}).status, 0);
  ASSERT_TRUE(fake.met);
  EXPECT_EQ(fake.met->vqpn(), 0x10u);
  EXPECT_EQ(fake.records, 2u);
  met.arg = MIGR_QP_NAME(7, 0x99);
  EXPECT_EQ(ask(met, std::vector<migr_key_map>{{1, 2, {}}}).status, ENOENT);
  EXPECT_EQ(fake.calls, "met ");
}

TEST_F(Control, KeysBeforeSwitchIsEbusy) {
  fake.state = MIGR_PROC_SUSPENDED;
  EXPECT_EQ(ask(request(MIGR_MSG_KEYS), std::vector<migr_key_map>{{1, 2, {}}}).status, EBUSY);
  fake.state = MIGR_PROC_RUNNING;
}

TEST_F(Control, KeysAreNothingToWhoHasDestroyedAllThatSwitched) {
  EXPECT_EQ(ask(request(MIGR_MSG_KEYS), std::vector<migr_key_map>{{1, 2, {}}}).status, 0);
  EXPECT_EQ(fake.calls, "");
}

TEST_F(Control, KeysReachWhatHasSwitchedOrWasRestored) {
  for (const auto phase : {switchover::Phase::kSwitched, switchover::Phase::kRebound}) {
    Registry::get().qps[1]->phase = phase;
    fake.calls.clear();
    EXPECT_EQ(ask(request(MIGR_MSG_KEYS), std::vector<migr_key_map>{{1, 2, {}}}).status, 0);
    EXPECT_EQ(fake.calls, "keys ");
  }
  Registry::get().qps[1]->phase = switchover::Phase::kRunning;
}

TEST_F(Control, KeysDoNotReachWhatChangesItsLink) {
  const auto& qps = Registry::get().qps;
  qps[0]->phase = qps[1]->phase = switchover::Phase::kSwitched;
  links::changes_link = qps[1];
  EXPECT_EQ(ask(request(MIGR_MSG_KEYS), std::vector<migr_key_map>{{1, 2, {}}}).status, 0);
  EXPECT_EQ(fake.records, 1u);
  qps[0]->phase = switchover::Phase::kRunning;
  fake.calls.clear();
  EXPECT_EQ(ask(request(MIGR_MSG_KEYS), std::vector<migr_key_map>{{1, 2, {}}}).status, 0) << "nothing has switched";
  EXPECT_EQ(fake.calls, "");
  links::changes_link = nullptr;
  qps[1]->phase = switchover::Phase::kRunning;
}

TEST_F(Control, ObjectsThatCannotMoveAreNamedByDescribe) {
  Registry::get().unsupported = {{"flow", 3}, {"WQ", 1}};
  const migr_msg reply = ask(MIGR_MSG_DESCRIBE);
  Registry::get().unsupported.clear();
  EXPECT_EQ(reply.status, EOPNOTSUPP);
  EXPECT_NE(std::string(reply.text).find("3 x flow, 1 x WQ"), std::string::npos) << reply.text;
}

// As after chroot(2): once it is frozen nobody would reach it.
TEST_F(Control, WhoCannotConnectAnyMoreIsRefused) {
  const std::string path = folder + "/proc.sock", away = path + ".away";
  ASSERT_EQ(rename(path.c_str(), away.c_str()), 0);
  migr_msg reply = ask(MIGR_MSG_DESCRIBE);
  ASSERT_EQ(rename(away.c_str(), path.c_str()), 0);
  EXPECT_EQ(reply.status, EOPNOTSUPP);
  EXPECT_NE(std::string(reply.text).find("cannot connect to " + path), std::string::npos) << reply.text;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit none{.rlim_cur = 1, .rlim_max = limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  reply = ask(MIGR_MSG_DESCRIBE);
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(reply.status, EOPNOTSUPP);
  EXPECT_NE(std::string(reply.text).find("cannot open another descriptor"), std::string::npos) << reply.text;
  EXPECT_EQ(ask(MIGR_MSG_DESCRIBE).status, 0);
}

// FREEZE gives up the one of each context, and others may have them by the time that it goes back.
TEST_F(Control, WhoCouldNotAttachAgainIsRefused) {
  Context context;
  context.kernel = std::make_unique<KernelLink>(1);  // attached
  const int first = dup(0), second = dup(0);         // the lowest that are free
  ASSERT_LT(first, second);
  close(first);
  close(second);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto describe = [&](int last) {
    const rlimit some{.rlim_cur = static_cast<rlim_t>(last) + 1, .rlim_max = limit.rlim_max};
    Registry::get().contexts.push_back(&context);
    setrlimit(RLIMIT_NOFILE, &some);
    const std::string text = ask(MIGR_MSG_DESCRIBE).text;
    setrlimit(RLIMIT_NOFILE, &limit);
    Registry::get().contexts.clear();
    return text;
  };
  EXPECT_EQ(describe(first), "cannot be migrated: it cannot open 2 descriptors more: Too many open files");
  EXPECT_EQ(describe(second).find("descriptors more"), std::string::npos);
}

TEST_F(Control, WhatIsNotAttachedSaysWhy) {
  Context context;
  context.kernel = std::make_unique<KernelLink>(-1);
  Registry::get().contexts.push_back(&context);
  const migr_msg reply = ask(MIGR_MSG_DESCRIBE);
  Registry::get().contexts.clear();
  EXPECT_EQ(reply.status, ENODEV);
  EXPECT_STREQ(reply.text, "opened its device without migr.ko: no /dev/migr; restart it");
}

TEST_F(Control, DescriptorBeyondThoseThatAreKeptIsRefused) {
  ibv_device device{};
  strcpy(device.name, "rxe0");
  ibv_context real{};
  real.device = &device;
  Context context;
  context.real = &real;
  Registry::get().contexts.push_back(&context);
  real.cmd_fd = 65535;
  EXPECT_EQ(ask(MIGR_MSG_DESCRIBE).status, 0);
  real.cmd_fd = 65536;
  const migr_msg reply = ask(MIGR_MSG_DESCRIBE);
  Registry::get().contexts.clear();
  EXPECT_EQ(reply.status, EOPNOTSUPP);
  EXPECT_STREQ(reply.text, "cannot be migrated: it has rxe0 open as descriptor 65536, and only those below 65536 can be");
}

/// A context with three MRs and a PD, and an MR of another one.
struct Counted {
  Counted() {
    Registry& registry = Registry::get();
    strcpy(device.name, "rxe0");
    real.device = &device;
    context.real = pd.context = &real;
    registry.contexts.push_back(&context);
    registry.pds.push_back(&pd);
    for (MrShadow& mr : mrs) {
      mr.context = &mr == mrs ? &other : &context;
      mr.movable = true;
      registry.mrs.add(&mr);
    }
  }
  ~Counted() {
    Registry& registry = Registry::get();
    registry.contexts.clear();
    registry.pds.clear();
    for (MrShadow& mr : mrs) registry.mrs.remove(&mr);
  }
  /// "2: 3/5+1": of kind 2 there are 3, after 5 calls and during 1.
  static std::string all(const std::vector<char>& records) {
    std::string out;
    const auto* d = reinterpret_cast<const migr_fd_desc*>(records.data());
    for (std::size_t i = 0; i < records.size() / sizeof *d; ++i, ++d)
      if (d->kind == MIGR_FD_COUNT && d->ctx_id == 7) out += std::to_string(d->obj_type) + ": " + std::to_string(d->addr) + "/" + std::to_string(d->bytes) + "+" + std::to_string(d->pgoff) + " ";
    return out;
  }
  ibv_device device{};
  ibv_context real{};
  ibv_pd pd{};
  Context context, other;
  MrShadow mrs[4]{};
};

TEST_F(Control, DescribeCountsTheObjectsOfAContext) {
  Counted its;
  Registry& registry = Registry::get();
  registry.registrations = 5;
  const std::string changes = "/" + std::to_string(registry.changes) + "+0 ";
  const std::string others = "1: 1" + changes + "3: 0" + changes + "4: 0" + changes + "5: 0" + changes;
  EXPECT_EQ(ask(MIGR_MSG_DESCRIBE).status, 0);
  EXPECT_EQ(Counted::all(records), others + "2: 3/5+0 ");
  registry.registering = 1;
  ask(MIGR_MSG_DESCRIBE);
  EXPECT_EQ(Counted::all(records), others + "2: 3/5+1 ");
  registry.registering = 0;
  its.context.twin = reinterpret_cast<links::Twin*>(&its);
  ask(MIGR_MSG_DESCRIBE);
  EXPECT_EQ(Counted::all(records), "2: 3/5+0 ") << "some CQs and QPs on the device are the library's";
  registry.moving = true;
  ask(MIGR_MSG_DESCRIBE);
  EXPECT_EQ(Counted::all(records), others + "2: 3/5+0 ") << "they are gone";
  registry.moving = false;
  its.context.twin = nullptr;
  ibv_qp old{};
  registry.old_paths.push_back(&old);
  ask(MIGR_MSG_DESCRIBE);
  registry.old_paths.clear();
  EXPECT_EQ(Counted::all(records), "2: 3/5+0 ");
}

TEST_F(Control, SuspendAndFreezeNoticeAChangeOfTheRecord) {
  const std::uint64_t described = ask(MIGR_MSG_DESCRIBE).arg;
  ASSERT_NE(described, 0u);
  migr_msg suspend = request(MIGR_MSG_SUSPEND), freeze = request(MIGR_MSG_FREEZE);
  suspend.arg = freeze.arg = described;
  EXPECT_EQ(ask(suspend, std::vector<migr_qp_ref>{{7, 0x10, 0, 0}}).status, 0);
  Registry::get().enter();
  suspend.seq = freeze.seq = ++seq;
  EXPECT_EQ(ask(suspend, std::vector<migr_qp_ref>{{7, 0x10, 0, 0}}).status, 0) << "a query is no change";
  fake.calls.clear();
  Registry::get().change();
  EXPECT_EQ(ask(suspend, std::vector<migr_qp_ref>{{7, 0x10, 0, 0}}).status, EAGAIN);
  EXPECT_EQ(ask(freeze, std::vector<migr_qp_ref>{}).status, EAGAIN);
  EXPECT_EQ(fake.calls, "") << "and nothing has happened";
  EXPECT_NE(ask(MIGR_MSG_DESCRIBE).arg, described);
}

TEST_F(Control, WhatIsBeingDestroyedIsWaitedFor) {
  cm::engine(true);
  Registry& registry = Registry::get();
  registry.ending = 1;
  std::thread application([&] {
    usleep(100'000);
    std::lock_guard guard(registry.lock);
    registry.ending = 0;
    registry.thawed.notify_all();
  });
  EXPECT_EQ(ask(MIGR_MSG_DESCRIBE).status, 0) << "it ended meanwhile";
  application.join();
  registry.ending = 1;
  migr_msg describe = request(MIGR_MSG_DESCRIBE);
  describe.arg = MIGR_DESCRIBE_HOLD;
  EXPECT_EQ(ask(describe, std::vector<migr_qp_ref>{}).status, EAGAIN);
  EXPECT_FALSE(registry.held) << "what failed keeps nobody waiting";
  EXPECT_FALSE(cm::engine()->held());
  registry.ending = 0;
}

TEST_F(Control, WhoOpensItsFirstChannelWhileHeldIsHeld) {
  EXPECT_TRUE(so_in_child([] {
    cm::settle();
    const bool is = cm::engine(true)->held();
    cm::let_go();
    return is && !cm::engine()->held();
  }));
}

TEST_F(Control, WhoOpensItsFirstChannelOnceFrozenIsHeld) {
  EXPECT_TRUE(so_in_child([] {
    std::string why;
    if (cm::freeze(why)) return false;
    const bool is = cm::engine(true)->held();
    cm::let_go();
    return is && !cm::engine()->held();
  }));
}

TEST_F(Control, HeldRecordDoesNotChangeUntilLetGo) {
  for (const std::uint16_t end : {MIGR_MSG_ROLLBACK, MIGR_MSG_RESUME, MIGR_MSG_HELLO /* the connection ends */}) {
    migr_msg describe = request(MIGR_MSG_DESCRIBE);
    describe.arg = MIGR_DESCRIBE_HOLD;
    cm::engine(true);
    ASSERT_EQ(ask(describe, std::vector<migr_qp_ref>{}).status, 0);
    EXPECT_TRUE(cm::engine()->held());
    Registry::get().enter();  // what changes nothing goes on
    std::atomic<bool> changed = false;
    std::thread application([&] {
      Registry::get().change();
      changed = true;
    });
    usleep(100'000);
    EXPECT_FALSE(changed);
    if (end == MIGR_MSG_HELLO) {
      close(fd);
      meet();
    } else {
      EXPECT_EQ(ask(end).status, 0);
    }
    application.join();
    EXPECT_FALSE(cm::engine()->held());
    ASSERT_EQ(ask(MIGR_MSG_DESCRIBE).status, 0);
    EXPECT_FALSE(cm::engine()->held()) << "only while it is answered";
  }
}

TEST_F(Control, WhoIsCancelledWhileTheRecordIsHeldGoesOnUntilItHasChanged) {
  migr_msg describe = request(MIGR_MSG_DESCRIBE);
  describe.arg = MIGR_DESCRIBE_HOLD;
  ASSERT_EQ(ask(describe, std::vector<migr_qp_ref>{}).status, 0);
  static std::atomic<bool> changed;
  changed = false;
  pthread_t application;
  pthread_create(
      &application, nullptr,
      [](void*) -> void* {
        Registry::get().change();
        changed = true;
        pthread_testcancel();
        return nullptr;
      },
      nullptr);
  usleep(50'000);
  pthread_cancel(application);
  usleep(50'000);
  EXPECT_EQ(ask(MIGR_MSG_ROLLBACK).status, 0);
  void* result = nullptr;
  pthread_join(application, &result);
  EXPECT_EQ(result, PTHREAD_CANCELED);
  EXPECT_TRUE(changed);
}

TEST_F(Control, UnknownTypeIsRefusedAndTheConnectionStays) {
  EXPECT_EQ(ask(std::uint16_t{0x123}).status, EOPNOTSUPP);
  EXPECT_EQ(ask(std::uint16_t{MIGR_MSG_HELLO}).status, EOPNOTSUPP);
  EXPECT_EQ(ask(MIGR_MSG_STATS).status, 0);
}

TEST_F(Control, MessageInSeveralPacketsIsOne) {
  migr_msg head = request(MIGR_MSG_SUSPEND);
  head.count = 1;
  head.record_size = sizeof(migr_qp_ref);
  head.flags = MIGR_MORE;
  migr_qp_ref ref{7, 0x10, 0, 0};
  put(head, &ref, sizeof(ref));
  ref.vqpn = 0x11;
  EXPECT_EQ(ask(head = [&] { migr_msg last = head; last.flags = 0; return last; }(), std::vector<migr_qp_ref>{ref}).status, 0);
  EXPECT_EQ(fake.calls, "suspend ");
  EXPECT_EQ(fake.records, 2u);
}

TEST_F(Control, ManyRecordsComeBackInSeveralPackets) {
  std::vector<migr_handle_map> maps(MIGR_PROC_MAX_RECORDS);
  migr_msg head = request(MIGR_MSG_REBIND);
  head.flags = MIGR_MORE;
  head.count = MIGR_PROC_MAX_RECORDS;
  head.record_size = sizeof(maps[0]);
  put(head, maps.data(), maps.size() * sizeof(maps[0]));
  put(head, maps.data(), maps.size() * sizeof(maps[0]));
  head.flags = 0;
  migr_msg reply = ask(head, maps);
  EXPECT_EQ(fake.records, 3u * MIGR_PROC_MAX_RECORDS);
  std::size_t total = reply.count;
  const auto* keys = reinterpret_cast<const migr_key_map*>(records.data());
  EXPECT_EQ(memcmp(keys[0].owner, hello.instance, 16), 0);
  EXPECT_EQ(reply.generation, 1u);
  EXPECT_TRUE(fake.restored);
  while (reply.flags & MIGR_MORE) {
    EXPECT_LE(reply.count, static_cast<unsigned>(MIGR_PROC_MAX_RECORDS));
    ASSERT_TRUE(receive(reply));
    total += reply.count;
  }
  EXPECT_EQ(total, 3u * MIGR_PROC_MAX_RECORDS);
}

TEST_F(Control, FreezeClosesAndTheGateOpensAgain) {
  {
    const Counted its;
    EXPECT_EQ(ask(MIGR_MSG_FREEZE).status, 0);
    EXPECT_EQ(Counted::all(records), "2: 3/" + std::to_string(Registry::get().registrations) + "+0 ") << "nothing else has changed since DESCRIBE";
  }
  EXPECT_TRUE(is_closed());
  pollfd waiting{listener, POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 800), 0) << "it connected before it had a gate";
  const migr_msg before = hello;
  const int file = creat(gate().c_str(), 0600);
  close(file);
  meet();
  unlink(gate().c_str());
  EXPECT_EQ(hello.state, MIGR_PROC_FROZEN);
  EXPECT_EQ(memcmp(hello.instance, before.instance, 16), 0);
  EXPECT_EQ(ask(MIGR_MSG_ROLLBACK).status, 0);
}

TEST(Itimer, OneShotHasAnIntervalWhileFrozenAndFiresOnce) {
  const itimerval before{.it_interval = {}, .it_value = {.tv_sec = 100, .tv_usec = 0}};
  itimerval now{};
  setitimer(ITIMER_REAL, &before, nullptr);
  itimer::hold();
  getitimer(ITIMER_REAL, &now);
  EXPECT_GT(now.it_interval.tv_sec, 1000);
  EXPECT_LE(now.it_value.tv_sec, 100);
  itimer::release();
  getitimer(ITIMER_REAL, &now);
  EXPECT_EQ(now.it_interval.tv_sec, 0);
  EXPECT_GE(now.it_value.tv_sec, 98);
  // It fires while frozen: then it is over.
  signal(SIGALRM, SIG_IGN);
  const itimerval soon{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = 1000}};
  setitimer(ITIMER_REAL, &soon, nullptr);
  itimer::hold();
  usleep(50'000);
  itimer::release();
  getitimer(ITIMER_REAL, &now);
  EXPECT_EQ(now.it_value.tv_sec, 0);
  // One with an interval is the application's own.
  const itimerval periodic{.it_interval = {.tv_sec = 77, .tv_usec = 0}, .it_value = {.tv_sec = 100, .tv_usec = 0}};
  setitimer(ITIMER_REAL, &periodic, nullptr);
  itimer::hold();
  itimer::release();
  getitimer(ITIMER_REAL, &now);
  EXPECT_EQ(now.it_interval.tv_sec, 77);
  alarm(0);
}

TEST_F(Control, WhatIsSaidToBeWrittenCountsUntilItIsOver) {
  auto& written = Registry::get().written;
  for (const int end : {MIGR_MSG_RESUME, MIGR_MSG_ROLLBACK}) {
    EXPECT_FALSE(written);
    EXPECT_EQ(ask(request(MIGR_MSG_WRITTEN), std::vector<migr_memory_part>{}).status, 0);
    ASSERT_TRUE(written) << "nothing was written: that is known, too";
    EXPECT_TRUE(written->empty());
    EXPECT_EQ(ask(request(MIGR_MSG_WRITTEN), std::vector<migr_memory_part>{{0x1000, 0x2000}, {0x8000, 0x1000}}).status, 0);
    ASSERT_EQ(written->size(), 2u);
    EXPECT_EQ((*written)[1].start, 0x8000u);
    EXPECT_EQ(ask(static_cast<std::uint16_t>(end)).status, 0);
  }
  EXPECT_FALSE(written);
}

TEST_F(Control, WhatIsTrackedAndHow) {
  const auto track = [&](std::uint64_t how, const std::vector<migr_qp_ref>& refs = {}) {
    migr_msg m = request(MIGR_MSG_TRACK);
    m.arg = how;
    return ask(m, refs);
  };
  const std::vector<migr_qp_ref> one{{7, 0x10, 0, 0}}, strange{{7, 0x99, 0, 0}};
  fake.calls.clear();
  EXPECT_EQ(track(MIGR_TRACK_HERE).status, 0);
  EXPECT_EQ(fake.records, Registry::get().qps.size());
  EXPECT_EQ(track(MIGR_TRACK_THERE, one).status, 0);
  EXPECT_EQ(fake.records, 1u);
  EXPECT_EQ(track(MIGR_TRACK_QUEUES).status, 0);
  EXPECT_EQ(track(MIGR_TRACK_TAKE).count, 1u);
  EXPECT_EQ(fake.calls, "track-here track-there note-queues take-notes ");
  fake.calls.clear();
  EXPECT_EQ(track(MIGR_TRACK_THERE).status, EINVAL) << "none would be all";
  EXPECT_EQ(track(MIGR_TRACK_HERE, one).status, EINVAL);
  EXPECT_EQ(track(0).status, EINVAL);
  EXPECT_EQ(track(99, one).status, EINVAL);
  EXPECT_EQ(track(MIGR_TRACK_THERE, strange).status, ENOENT);
  EXPECT_EQ(fake.calls, "");
  fake.status = ESTALE;
  EXPECT_EQ(track(MIGR_TRACK_TAKE).status, ESTALE);
  fake.status = 0;
}

TEST_F(Control, FreezeThatFailsKeepsTheConnection) {
  fake.status = EBUSY;
  EXPECT_EQ(ask(MIGR_MSG_FREEZE).status, EBUSY);
  fake.status = 0;
  EXPECT_EQ(ask(MIGR_MSG_STATS).status, 0);
}

struct Questions : Control {
  /// Takes what is asked on a connection of its own.
  static int accept_question(migr_msg& asked) {
    pollfd waiting{listener, POLLIN, 0};
    if (poll(&waiting, 1, kPatienceMs) != 1) return -1;
    const int session = std::exchange(fd, accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_TRUE(receive(asked));
    return std::exchange(fd, session);
  }
};

TEST_F(Questions, WhatMigrdHasNoTimeForIsAskedAgain) {
  const migr_qp_address peer{{1}, 30};
  std::vector<migr_qp_address> found;
  int err = -1;
  std::thread application([&] { err = control::ask(MIGR_MSG_WHERE, 17, std::span(&peer, 1), found, kPatienceMs); });
  migr_msg asked{};
  for (int i = 0; i < 3; ++i) {
    const int of_question = accept_question(asked);
    EXPECT_EQ(asked.type, MIGR_MSG_WHERE);
    EXPECT_EQ(asked.arg, 17u);
    if (i == 2) {
      asked.type |= MIGR_REPLY;
      asked.count = 0;
      send(of_question, &asked, sizeof(asked), MSG_NOSIGNAL);
    }
    close(of_question);
  }
  application.join();
  EXPECT_EQ(err, 0);
}

TEST_F(Control, WhoIsRefusedDoesNotComeBackAtOnce) {
  ASSERT_EQ(ask(MIGR_MSG_STATS).status, 0);
  close(fd);
  meet();
  close(fd);  // unheard
  pollfd waiting{listener, POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 200), 0);
  meet();
}

TEST_F(Control, ChildOfForkLetsTheConnectionGo) {
  const pid_t pid = fork();
  if (pid == 0) {
    // Only the parent may hold it: nothing of it is among the child's descriptors.
    int sockets = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      if (std::filesystem::read_symlink(entry.path(), error).string().starts_with("socket:")) ++sockets;
    }
    const bool lock_is_free = Registry::get().lock.try_lock();
    _exit(sockets == 2 && lock_is_free ? 0 : 1);  // the listener and this test's end
  }
  int status = -1;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ask(MIGR_MSG_STATS).status, 0);
}

TEST_F(Control, ChildOfForkLeavesOldPathsToItsParent) {
  ibv_qp old{};
  Registry::get().old_paths.push_back(&old);
  EXPECT_TRUE(so_in_child([] { return Registry::get().old_paths.empty(); }));
  EXPECT_EQ(Registry::get().old_paths.size(), 1u);
  Registry::get().old_paths.clear();
}

TEST_F(Control, ChildOfForkHasTheLocksOfTheDataPathFree) {
  const int before = fork_locks.taken;
  EXPECT_TRUE(so_in_child([] { return fork_locks.held == 0; }));
  EXPECT_EQ(fork_locks.held, 0);
  EXPECT_EQ(fork_locks.taken, before + 2) << "of datagrams and of windows";
}

// In a child: what hangs is ended.
TEST_F(Control, HandlersOfTheApplicationMayCallVerbs) {
  EXPECT_TRUE(so_in_child([] {
    alarm(kPatienceMs / 1000);
    calls_verbs_at_fork = true;
    return so_in_child([] { return true; });
  }));
}

// The library makes some, too, while the record stays as it is.
TEST_F(Control, EachChildIsKeptFromTheRings) {
  ibv_context real{};
  Context context;
  context.real = &real;
  context.kernel = std::make_unique<KernelLink>(-1);
  Registry::get().contexts.push_back(&context);
  const int before = fork_locks.rings;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(so_in_child([] { return true; }));
  EXPECT_EQ(fork_locks.rings, before + 2);
  Registry::get().contexts.clear();
}

TEST_F(Control, ChildOfForkThatOpensADeviceItselfIsAProcessLikeAny) {
  const pid_t pid = fork();
  if (pid == 0) {
    control::start();  // as the first context does
    sleep(kPatienceMs / 1000 + 1);
    _exit(0);
  }
  const migr_msg parents = hello;
  const std::vector<char> told = records;
  const int parents_fd = std::exchange(fd, -1);
  meet();
  EXPECT_EQ(hello.type, parents.type);
  EXPECT_NE(records, told) << "it says that it is its parent";
  close(std::exchange(fd, parents_fd));
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(ask(MIGR_MSG_STATS).status, 0);
}

// As the last thread of a process without the library does.
TEST_F(Control, ProcessWhoseThreadsHaveAllEndedEnds) {
  static bool done = false;
  fflush(nullptr);
  pid_t pid = -1;
  // In a thread's function, and not in a test: pthread_exit() unwinds it.
  std::thread([&] {
    if ((pid = fork()) != 0) return;
    folder.clear();  // else it is removed at the child's end
    atexit([] { _exit(done ? 7 : 8); });
    control::start();
    std::thread([] {
      usleep(2'500'000);  // longer than it takes to be looked at
      done = true;
    }).detach();
    pthread_exit(nullptr);
  }).join();
  const int parents_fd = std::exchange(fd, -1);
  const migr_msg parents = hello;
  meet();
  int status = -1;
  for (int ms = 0; ms < 2 * kPatienceMs && waitpid(pid, &status, WNOHANG) == 0; ms += 10) usleep(10'000);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << "status " << status;
  close(std::exchange(fd, parents_fd));
  hello = parents;
}

TEST_F(Control, AbandonedWhileSuspendedItGoesBackByItself) {
  ASSERT_EQ(ask(MIGR_MSG_SUSPEND).status, 0);
  close_socket();
  close(fd);
  fd = -1;
  sleep(2);
  EXPECT_EQ(fake.calls, "suspend ") << "too early";
  for (int i = 0; i < 120 && fake.state != MIGR_PROC_RUNNING; ++i) usleep(100'000);
  EXPECT_EQ(fake.calls, "suspend rollback ");
  // migrd starts again.
  open_socket();
  meet();
  EXPECT_EQ(hello.state, MIGR_PROC_RUNNING);
}

TEST_F(Control, AbandonedWhileFrozenItGoesBackByItself) {
  ASSERT_EQ(ask(MIGR_MSG_FREEZE).status, 0);
  EXPECT_TRUE(is_closed());
  close_socket();
  for (int i = 0; i < 100 && fake.state != MIGR_PROC_RUNNING; ++i) usleep(100'000);
  EXPECT_EQ(fake.calls, "freeze rollback ");
  open_socket();
  meet();
  EXPECT_EQ(hello.state, MIGR_PROC_RUNNING);
}

// As without a free descriptor: nothing of it has gone back then.
TEST_F(Control, WhoCannotGoBackStaysFrozenAndIsAskedAgain) {
  const auto held = [](std::optional<bool> to = {}) {
    const std::lock_guard guard(Registry::get().lock);
    return std::exchange(Registry::get().held, to.value_or(Registry::get().held));
  };
  ASSERT_EQ(ask(MIGR_MSG_FREEZE).status, 0);
  EXPECT_TRUE(is_closed());
  held(true);
  fake.status = EMFILE;
  close(creat(gate().c_str(), 0600));
  meet();
  unlink(gate().c_str());
  migr_msg reply = ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(reply.status, EMFILE);
  EXPECT_EQ(reply.state, MIGR_PROC_FROZEN);
  EXPECT_TRUE(held()) << "it may change what was described";
  fake.status = 0;
  reply = ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(reply.status, 0);
  EXPECT_EQ(reply.state, MIGR_PROC_RUNNING);
  EXPECT_FALSE(held());
  EXPECT_EQ(fake.calls, "freeze rollback rollback ");
}

TEST_F(Control, AbandonedWithoutRoomToGoBackItTriesAgain) {
  ASSERT_EQ(ask(MIGR_MSG_FREEZE).status, 0);
  EXPECT_TRUE(is_closed());
  fake.status = EMFILE;
  close_socket();
  for (int i = 0; i < 100 && fake.calls == "freeze "; ++i) usleep(100'000);
  EXPECT_EQ(fake.calls, "freeze rollback ");
  EXPECT_EQ(fake.state, MIGR_PROC_FROZEN);
  fake.status = 0;
  for (int i = 0; i < 100 && fake.state != MIGR_PROC_RUNNING; ++i) usleep(100'000);
  EXPECT_EQ(fake.calls, "freeze rollback rollback ");
  open_socket();
  meet();
  EXPECT_EQ(hello.state, MIGR_PROC_RUNNING);
}

// A migrd of another release has taken the place of the one that began the migration.
TEST_F(Control, RefusedWhileSuspendedItGoesBackByItself) {
  ASSERT_EQ(ask(MIGR_MSG_SUSPEND).status, 0);
  close(std::exchange(fd, -1));
  EXPECT_GT(refuse(MIGR_PROC_SUSPENDED, 2000), 1);
  EXPECT_EQ(fake.calls, "suspend ") << "too early";
  refuse(MIGR_PROC_SUSPENDED, 16000);
  EXPECT_EQ(fake.calls, "suspend rollback ");
  meet();
  EXPECT_EQ(hello.state, MIGR_PROC_RUNNING);
}

TEST_F(Control, MigrdThatHadNothingToAskWasThere) {
  ASSERT_EQ(ask(MIGR_MSG_SUSPEND).status, 0);
  close(std::exchange(fd, -1));
  refuse(MIGR_PROC_SUSPENDED, 2000);
  meet();
  usleep(2'500'000);
  close(std::exchange(fd, -1));
  refuse(MIGR_PROC_SUSPENDED, 2000);
  EXPECT_EQ(fake.calls, "suspend ") << "it is only started again";
  meet();
  EXPECT_EQ(ask(MIGR_MSG_ROLLBACK).status, 0);
}

TEST_F(Control, RefusedWhileFrozenItGoesBackByItself) {
  for (const bool gated : {true, false}) {
    fake.calls.clear();
    ASSERT_EQ(ask(MIGR_MSG_FREEZE).status, 0);
    EXPECT_TRUE(is_closed());
    if (gated) close(creat(gate().c_str(), 0600));
    EXPECT_EQ(refuse(MIGR_PROC_FROZEN, 1000) > 0, gated);
    EXPECT_EQ(fake.calls, "freeze ") << "too early";
    refuse(MIGR_PROC_FROZEN, 12000);
    unlink(gate().c_str());
    EXPECT_EQ(fake.calls, "freeze rollback ") << gated;
    meet();
    EXPECT_EQ(hello.state, MIGR_PROC_RUNNING);
  }
}

// Whoever was restored has not answered FREEZE in this life, and never goes back.
TEST_F(Control, RefusedAtItsGateTheCopyStaysFrozen) {
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    char byte;
    control::start();
    _exit(read(told[0], &byte, 1) == 1 && (fake.state = MIGR_PROC_FROZEN, read(told[0], &byte, 1)) == 1 ? fake.state != MIGR_PROC_FROZEN : 2);
  }
  const int own = std::exchange(fd, -1);
  const migr_msg own_hello = hello;
  meet();
  ASSERT_EQ(write(told[1], "", 1), 1);
  close(creat(gate().c_str(), 0600));
  usleep(100'000);
  close(std::exchange(fd, -1));
  EXPECT_GT(refuse(MIGR_PROC_RUNNING, 4000), 5);  // this process's own state stays as it is
  EXPECT_EQ(hello.state, MIGR_PROC_FROZEN);
  unlink(gate().c_str());
  ASSERT_EQ(write(told[1], "", 1), 1);
  int status = -1;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  fd = own;
  hello = own_hello;
  EXPECT_EQ(ask(MIGR_MSG_STATS).status, 0);
}

/// One packet that must be refused with `status`, and ends the connection.
struct Nonsense {
  const char* name;
  int status;
  void (*spoil)(migr_msg& head, std::vector<char>& tail);
};

struct ControlRefuses : Control, ::testing::WithParamInterface<Nonsense> {};

TEST_P(ControlRefuses, AndHangsUpAndComesBack) {
  migr_msg head = request(MIGR_MSG_SUSPEND);
  std::vector<char> tail;
  GetParam().spoil(head, tail);
  put(head, tail.data(), tail.size());
  migr_msg reply{};
  ASSERT_TRUE(receive(reply));
  EXPECT_EQ(reply.status, GetParam().status) << reply.text;
  EXPECT_EQ(reply.version, MIGR_PROC_VERSION);
  EXPECT_STRNE(reply.text, "");
  EXPECT_TRUE(is_closed());
  EXPECT_EQ(fake.calls, "");
  meet();
  EXPECT_EQ(ask(MIGR_MSG_STATS).status, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Packets, ControlRefuses,
    ::testing::Values(
        Nonsense{"OtherVersion", EPROTONOSUPPORT, [](migr_msg& h, std::vector<char>&) { h.version = MIGR_PROC_VERSION + 1; }},
        Nonsense{"CountWithoutRecords", EINVAL,
                 [](migr_msg& h, std::vector<char>&) { h.count = 1, h.record_size = sizeof(migr_qp_ref); }},
        Nonsense{"RecordsWithoutCount", EINVAL, [](migr_msg&, std::vector<char>& t) { t.resize(16); }},
        Nonsense{"RecordsOfAnotherSize", EINVAL,
                 [](migr_msg& h, std::vector<char>& t) { h.count = 1, h.record_size = 8, t.resize(8); }},
        Nonsense{"CountBeyondTheLimit", EINVAL,
                 [](migr_msg& h, std::vector<char>&) { h.count = 0x10000000, h.record_size = 16; }}),
    [](const auto& info) { return info.param.name; });

TEST(CmQps, OfARestoredProcessHaveEndedInErr) {
  ibv_qp real{};
  QpShadow qp;
  qp.real = &real;
  for (const ibv_qp_state state : {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR}) {
    real.state = state;
    qp.gone = false;
    EXPECT_EQ(cm::has_ended(qp), state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD) << state;
    qp.gone = true;
    EXPECT_TRUE(cm::has_ended(qp)) << state;
  }
}

TEST(CmQps, OfOneNumberAreToldApartByTheDevice) {
  ibv_device devices[2]{};
  ibv_context real[2]{};
  Context contexts[2];
  QpShadow qps[2];
  for (int i = 0; i < 2; ++i) {
    strcpy(devices[i].name, i ? "rxe1" : "rxe0");
    real[i].device = &devices[i];
    contexts[i].real = &real[i];
    qps[i].context = &contexts[i];
    qps[i].app.qp_num = 18;
  }
  QpShadow* const all[] = {&qps[0], &qps[1]};
  const cm::Device births[] = {{"rxe0", 100, 1}, {"rxe1", 101, 2}, {"rxe2", 102, 3}};
  EXPECT_EQ(cm::qp_of(all, 18, 100, births), &qps[0]);
  EXPECT_EQ(cm::qp_of(all, 18, 101, births), &qps[1]);
  EXPECT_EQ(cm::qp_of(all, 18, 102, births), nullptr);
  EXPECT_EQ(cm::qp_of(all, 19, 101, births), nullptr);
  EXPECT_EQ(cm::qp_of(all, 18, 0, births), &qps[0]) << "not known";
  Context* const both[] = {&contexts[0], &contexts[1]};
  EXPECT_EQ(cm::moved_context(both, 101, births), nullptr);
  contexts[0].moved = true;
  EXPECT_EQ(cm::moved_context(both, 101, births), nullptr);
  contexts[1].moved = true;
  EXPECT_EQ(cm::moved_context(both, 101, births), &contexts[1]);
  EXPECT_EQ(cm::moved_context(both, 0, births), &contexts[0]) << "not known";
  // Two devices of one network interface may have one GUID, and the only one of a host any name.
  const cm::Device alike[] = {{"rxe0", 100, 1}, {"rxe1", 100, 2}}, other[] = {{"rxe7", 100, 1}};
  EXPECT_EQ(cm::qp_of(std::span(all).last(1), 18, 100, alike), &qps[1]);
  EXPECT_EQ(cm::qp_of(all, 18, 100, other), &qps[0]);
}

}  // namespace
}  // namespace migr
