// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Suspension is closed (docs/protocol.md): wherever a thread stands between the library's check and the end of the
// provider's post function when suspension is raised, no work request reaches the provider after DRAIN was answered.
//
// The victim posts one send per round, single-stepped, and stands still before instruction k; the test plays migrd:
// SUSPEND, look at the threads, DRAIN, RESUME; for every k until the post has no instruction k. With
// MIGR_TEST_SAFEGUARD=off the look at the threads is left out and this program must fail.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "migr/proc_wire.h"
#include "parked.h"
#include "agent/thread_scan.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kLimit = 10s;          // of any single wait
constexpr auto kFirstLook = 5ms;      // how long a look may take before the parked thread is let go
constexpr auto kReplyWithout = 50ms;  // how long DRAIN may wait for the parked thread before it is let go
constexpr int kMaxSteps = 4000;

bool safeguard() {
  const char* value = getenv("MIGR_TEST_SAFEGUARD");
  return !value || std::strcmp(value, "off") != 0;
}

template <class Condition>
bool wait_for(Condition&& condition) {
  const auto deadline = Clock::now() + kLimit;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    usleep(50);
  }
  return true;
}

class SuspensionClosed : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    char name[] = "/tmp/migr-closed-XXXXXX";
    ASSERT_NE(nullptr, mkdtemp(name));
    folder_ = name;
    listen_on(folder_ + "/proc.sock");
    memory_ = memfd_create("parked", 0);
    ASSERT_EQ(0, ftruncate(memory_, sizeof(Parked)));
    shared_ = static_cast<Parked*>(mmap(nullptr, sizeof(Parked), PROT_READ | PROT_WRITE, MAP_SHARED, memory_, 0));
    ASSERT_NE(MAP_FAILED, static_cast<void*>(shared_));
    start_victim();
    ASSERT_TRUE(accept_hello());
  }

  void TearDown() override {
    if (victim_ > 0) {
      kill(victim_, SIGKILL);
      waitpid(victim_, nullptr, 0);
    }
    for (const int fd : {connection_, listener_, memory_})
      if (fd >= 0) close(fd);
    unlink((folder_ + "/proc.sock").c_str());
    rmdir(folder_.c_str());
  }

  void listen_on(const std::string& path) {
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    ASSERT_EQ(0, bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address));
    ASSERT_EQ(0, listen(listener_, 1));
  }

  void start_victim() {
    victim_ = fork();
    ASSERT_GE(victim_, 0);
    if (victim_) return;
    setenv("LD_PRELOAD", MIGR_LIBRARY, 1);
    setenv("LD_LIBRARY_PATH", MIGR_STUB_DIR, 1);
    setenv("MIGR_TABLES", "private", 1);
    setenv("MIGR_PROC_SOCKET", (folder_ + "/proc.sock").c_str(), 1);
    const std::string fd = std::to_string(memory_);
    execl(MIGR_VICTIM, MIGR_VICTIM, GetParam(), fd.c_str(), nullptr);
    _exit(127);
  }

  bool accept_hello() {
    pollfd p{listener_, POLLIN, 0};
    if (poll(&p, 1, 10'000) != 1) return false;
    connection_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    std::vector<char> packet(sizeof(migr_msg) + MIGR_PROC_MAX_RECORDS * sizeof(migr_text_range));
    const ssize_t n = recv(connection_, packet.data(), packet.size(), 0);
    if (n < static_cast<ssize_t>(sizeof(migr_msg))) return false;
    migr_msg hello;
    std::memcpy(&hello, packet.data(), sizeof hello);
    const auto* ranges = reinterpret_cast<const migr_text_range*>(packet.data() + sizeof hello);
    for (unsigned i = 0; i < hello.count; ++i) ranges_.push_back({ranges[i].start, ranges[i].bytes});
    control_tid_ = hello.control_tid;
    return hello.type == MIGR_MSG_HELLO && !ranges_.empty();
  }

  void send(migr_msg_type type, std::uint64_t arg = 0) {
    migr_msg m{};
    m.version = MIGR_PROC_VERSION;
    m.type = static_cast<std::uint16_t>(type);
    m.seq = ++seq_;
    m.arg = arg;
    ASSERT_EQ(static_cast<ssize_t>(sizeof m), ::send(connection_, &m, sizeof m, MSG_NOSIGNAL));
  }

  bool answered(std::chrono::milliseconds limit) {
    pollfd p{connection_, POLLIN, 0};
    return poll(&p, 1, static_cast<int>(limit.count())) == 1;
  }

  void expect_answer(int status = 0, const char* text = "") {
    ASSERT_TRUE(answered(std::chrono::milliseconds(kLimit)));
    std::vector<char> packet(65536);
    const ssize_t n = recv(connection_, packet.data(), packet.size(), 0);
    ASSERT_GE(n, static_cast<ssize_t>(sizeof(migr_msg)));
    migr_msg reply;
    std::memcpy(&reply, packet.data(), sizeof reply);
    ASSERT_EQ(seq_, reply.seq);
    ASSERT_EQ(status, reply.status) << reply.text;
    ASSERT_NE(nullptr, std::strstr(reply.text, text)) << reply.text;
  }

  void release(std::uint32_t round) { shared_->release.store(round); }

  /// The engine's precondition for DRAIN; lets the parked thread go as soon as it was seen inside.
  void look_at_threads(std::uint32_t round) {
    auto seen = migr::wait_until_outside(victim_, ranges_, control_tid_, Clock::now() + kFirstLook);
    if (seen) return;
    ASSERT_EQ(ETIMEDOUT, seen.error().code) << seen.error().text;
    ++seen_inside_;
    release(round);
    seen = migr::wait_until_outside(victim_, ranges_, control_tid_, Clock::now() + kLimit);
    ASSERT_TRUE(seen) << seen.error().text;
  }

  /// Work requests in the provider's queue, once its completer has looked again.
  std::uint32_t in_queue() {
    usleep(500);
    return shared_->in_queue.load();
  }

  std::string folder_;
  int listener_ = -1, connection_ = -1, memory_ = -1;
  pid_t victim_ = -1;
  Parked* shared_ = nullptr;
  std::vector<migr::TextRange> ranges_;
  pid_t control_tid_ = 0;
  std::uint32_t seq_ = 0;
  unsigned seen_inside_ = 0;
};

TEST_P(SuspensionClosed, NothingReachesTheProviderAfterTheDrain) {
  std::uint32_t round = 0;
  int k = 0;
  for (;; ++k) {
    ASSERT_LT(k, kMaxSteps);
    ++round;
    shared_->park_at.store(k);
    shared_->go.store(round);
    ASSERT_TRUE(wait_for([&] { return shared_->parked.load() == round || shared_->done.load() == round; }));
    if (shared_->parked.load() != round) break;  // the post had no instruction k
    ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_SUSPEND));
    ASSERT_NO_FATAL_FAILURE(expect_answer());
    if (safeguard()) {
      ASSERT_NO_FATAL_FAILURE(look_at_threads(round));
    }
    ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, 5000));
    // An open ibv_wr_* session, or the provider's own lock, makes DRAIN wait for the parked thread.
    if (!answered(kReplyWithout)) release(round);
    ASSERT_NO_FATAL_FAILURE(expect_answer());
    const std::uint32_t drained = in_queue();
    release(round);
    ASSERT_TRUE(wait_for([&] { return shared_->done.load() == round; }));
    ASSERT_EQ(0, shared_->error.load()) << "post in round " << round;
    ASSERT_EQ(drained, in_queue()) << "a work request was posted after the drain; the thread stood before instruction "
                                   << k << " of the post";
    ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_RESUME));
    ASSERT_NO_FATAL_FAILURE(expect_answer());
    ASSERT_TRUE(wait_for([&] { return shared_->completed.load() == round; })) << "round " << round;
  }
  EXPECT_TRUE(wait_for([&] { return shared_->completed.load() == round; }));
  EXPECT_EQ(0u, shared_->out_of_order.load());
  EXPECT_GT(k, 50) << "a post through library and provider has more instructions";
  if (safeguard()) {
    EXPECT_GT(seen_inside_, 20u) << "the parked thread was hardly ever seen inside";
  }
  RecordProperty("points", k);
  std::printf("%s: %d points, %u of them inside\n", GetParam(), k, seen_inside_);
}

INSTANTIATE_TEST_SUITE_P(Apis, SuspensionClosed, testing::Values("classic", "wr"));

// One thread's wr_start waits for another thread's session. When that one ends, the drain still has to see that a session
// is open, and to say so in time: were it forgotten, the control thread would wait for the provider's lock, without limit.
class SuspensionContended : public SuspensionClosed {};

TEST_P(SuspensionContended, SessionAfterAnotherThreadsIsSeen) {
  constexpr std::uint32_t kRound = 1;
  constexpr std::uint64_t kDrainMs = 100;
  shared_->park_at.store(0);
  shared_->go.store(kRound);
  ASSERT_TRUE(wait_for([&] { return shared_->parked.load() == kRound; }));
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_SUSPEND));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, kDrainMs));
  ASSERT_NO_FATAL_FAILURE(expect_answer(ETIMEDOUT, "open ibv_wr_* session"));
  release(kRound);
  ASSERT_TRUE(wait_for([&] { return shared_->done.load() == kRound; }));
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, 5000));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_RESUME));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  EXPECT_TRUE(wait_for([&] { return shared_->completed.load() == kRound; }));
}

INSTANTIATE_TEST_SUITE_P(Apis, SuspensionContended, testing::Values("contended"));

// Without a rest it is 5000 polls, with rests of one length 2500. "idle": of a queue that no QP has.
class SuspensionOfPollers : public SuspensionClosed {};

TEST_P(SuspensionOfPollers, WhoPollsADrainedQueueRestsMoreAndMore) {
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_SUSPEND));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, 5000));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  usleep(200'000);
  const std::uint32_t before = shared_->polls.load();
  usleep(500'000);
  const std::uint32_t polls = shared_->polls.load() - before;
  std::printf("%u polls in half a second\n", polls);
  EXPECT_GT(polls, 5u);
  EXPECT_LT(polls, 1000u);
}

INSTANTIATE_TEST_SUITE_P(Apis, SuspensionOfPollers, testing::Values("classic", "idle"));

// A thread that polls an ibv_cq_ex posts again before it ends its session, as rdma-core's pingpongs do. It must not wait for the
// drain, which waits for the end of the session.
class SuspensionOfWhoReposts : public SuspensionClosed {};

TEST_P(SuspensionOfWhoReposts, APollSessionMayPostWhileItIsDrained) {
  constexpr std::uint32_t kRound = 1;
  shared_->go.store(kRound);
  ASSERT_TRUE(wait_for([&] { return shared_->parked.load() == kRound; }));
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_SUSPEND));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, 100));
  ASSERT_NO_FATAL_FAILURE(expect_answer(ETIMEDOUT, "open ibv_cq_ex session"));
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, 3000));
  release(kRound);
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  EXPECT_TRUE(wait_for([&] { return shared_->done.load() == kRound; }));
  EXPECT_EQ(0, shared_->error.load());
  EXPECT_EQ(1u, shared_->completed.load()) << "what it has posted is kept";
  ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_RESUME));
  ASSERT_NO_FATAL_FAILURE(expect_answer());
  EXPECT_TRUE(wait_for([&] { return shared_->completed.load() == 2; }));
}

INSTANTIATE_TEST_SUITE_P(Apis, SuspensionOfWhoReposts, testing::Values("reposts"));

// What ends a connection waits for the new path: else that would be in RTS with what the old one has flushed.
class SuspensionOfWhoCloses : public SuspensionClosed {};

TEST_P(SuspensionOfWhoCloses, TheConnectionEndsOnThePathThatItGets) {
  constexpr std::uint32_t kRound = 1;
  for (const migr_msg_type end : {MIGR_MSG_RESUME, MIGR_MSG_ROLLBACK}) {
    const std::uint32_t round = kRound + (end == MIGR_MSG_ROLLBACK);
    ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_SUSPEND));
    ASSERT_NO_FATAL_FAILURE(expect_answer());
    shared_->go.store(round);
    ASSERT_NO_FATAL_FAILURE(send(MIGR_MSG_DRAIN, 5000));
    ASSERT_NO_FATAL_FAILURE(expect_answer());
    usleep(200'000);
    EXPECT_NE(round, shared_->done.load()) << "it did not wait";
    ASSERT_NO_FATAL_FAILURE(send(end));
    ASSERT_NO_FATAL_FAILURE(expect_answer());
    EXPECT_TRUE(wait_for([&] { return shared_->done.load() == round; }));
    EXPECT_EQ(0, shared_->error.load());
  }
}

INSTANTIATE_TEST_SUITE_P(Apis, SuspensionOfWhoCloses, testing::Values("closes"));

}  // namespace
