// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a thread is in it notes with a plain store, which its processor may keep to itself until the thread passes a barrier. Whoever has raised
// a flag makes all threads do so before it looks. The kernel's call is a double here: in it others see, at last, what a thread
// did before the flag was raised.
#include <gtest/gtest.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../libmigr/kernel_link.h"
#include "../../libmigr/path.h"
#include "../../libmigr/shadow.h"
#include "../../libmigr/switchover/parts.h"
#include "../../libmigr/switchover/switchover.h"

namespace {

using namespace migr;

std::vector<int> commands;  // of membarrier(2), as they came
bool registered, can_register;
std::function<void()> late;  // what is seen from the next barrier on

long membarrier(int command) {
  commands.push_back(command);
  if (command == MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED && can_register) return registered = true, 0;
  if (command != MEMBARRIER_CMD_GLOBAL && !(command == MEMBARRIER_CMD_PRIVATE_EXPEDITED && registered)) {
    errno = EPERM;
    return -1;
  }
  if (late) std::exchange(late, nullptr)();
  return 0;
}

}  // namespace

extern "C" long __real_syscall(long number, ...);
extern "C" long __wrap_syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (long& one : a) one = va_arg(list, long);
  va_end(list);
  return number == SYS_membarrier ? membarrier(static_cast<int>(a[0])) : __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

namespace {

class Barrier : public testing::Test {
 protected:
  void SetUp() override {
    commands.clear();
    registered = can_register = true;
    late = nullptr;
    context_.twin = reinterpret_cast<links::Twin*>(&context_);  // its sessions are noted
    provider_.wr_start = [](ibv_qp_ex*) {};
    provider_.wr_complete = [](ibv_qp_ex*) { return 0; };
    q_.real = &provider_.qp_base;
    q_.real_ex = &provider_;
    q_.context = &context_;
    path::install_wr_api(q_);
  }
  /// A session that began before `flags` were raised, and is noted where nobody sees it yet.
  void begin_unseen(std::uint32_t flags) {
    late = [this, flags] {
      const std::uint32_t raised = q_.state.exchange(0);
      EXPECT_EQ(raised & flags, flags) << "raised before the barrier";
      q_.app_ex.wr_start(&q_.app_ex);
      q_.state = raised;
    };
  }
  void end_session() { EXPECT_EQ(q_.app_ex.wr_complete(&q_.app_ex), 0); }

  Context context_;
  ibv_qp_ex provider_{};
  QpShadow q_{};
};

TEST_F(Barrier, IsPassedBeforeTheTrapLooksForSessions) {
  begin_unseen(kTrapped | kOpen);
  EXPECT_FALSE(switchover::trap_posts(q_, 50));
  EXPECT_FALSE(late);
  EXPECT_EQ(q_.state & (kTrapped | kOpen), 0u);
  end_session();
  EXPECT_TRUE(switchover::trap_posts(q_, 50));
}

TEST_F(Barrier, IsPassedBeforeWhoWithholdsLooksForSessions) {
  begin_unseen(kKeepSends | kOpen);
  EXPECT_FALSE(switchover::begin_to_withhold(q_));
  EXPECT_FALSE(late);
  end_session();
  EXPECT_TRUE(switchover::begin_to_withhold(q_));
}

std::atomic<bool> polls, is_back;

int poll_for_a_while(ibv_cq*, int, ibv_wc*) {
  polls = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  is_back = true;
  return 0;
}

TEST_F(Barrier, IsPassedBeforeWhoCutsLooksForPollers) {
  CqShadow c{};
  c.state = kProtectedCq;
  c.real_poll = poll_for_a_while;
  q_.send_cq = q_.recv_cq = &c;
  std::thread poller;
  late = [&] {
    poller = std::thread([&] {
      ibv_wc wc;
      path::poll_protected(&c.app, 1, &wc);
    });
    while (!polls) std::this_thread::yield();
  };
  std::string why;
  EXPECT_EQ(switchover::wait_for_pollers(q_, why), 0) << why;
  EXPECT_TRUE(is_back);
  if (poller.joinable()) poller.join();
}

CqShadow* polled;

ibv_wc error(std::uint64_t wr_id, std::uint32_t qpn) {
  ibv_wc wc{};
  wc.wr_id = wr_id;
  wc.qp_num = qpn;
  wc.status = IBV_WC_WR_FLUSH_ERR;
  return wc;
}

/// Two, while another thread gives those back that were hidden before them, and takes from the device what comes behind them.
int poll_behind_hidden(ibv_cq*, int, ibv_wc* wc) {
  for (std::uint64_t id : {1, 2}) polled->fake.push_back(error(id, 5));
  polled->given_back = 2;
  for (std::uint64_t id : {5, 6}) polled->fake.push_back(error(id, 5));
  polled->state.fetch_or(kFakeCq);
  wc[0] = error(3, 5), wc[1] = error(4, 5);
  polled->real_poll = [](ibv_cq*, int, ibv_wc*) { return 0; };
  return 2;
}

TEST(Poller, FindsErrorsBehindThoseThatWereHiddenBeforeThemAndBeforeWhatOthersFindLater) {
  constexpr std::uint32_t kTable[8] = {0, 0, 0, 0, 0, MIGR_QPN_VALID | 6, MIGR_QPN_VALID | 7, 0};
  for (const std::uint32_t state : {std::uint32_t{kProtectedCq}, kProtectedCq | kTranslateQpn}) {
    CqShadow c{};
    polled = &c;
    c.state = state;
    c.qpn_table = kTable;
    c.real_poll = poll_behind_hidden;
    ibv_wc wc[2]{};
    for (std::uint64_t id : {1, 3, 5}) {
      EXPECT_EQ(path::poll_protected(&c.app, 2, wc), 2);
      EXPECT_EQ(wc[0].wr_id, id);
      EXPECT_EQ(wc[1].wr_id, id + 1);
      EXPECT_EQ(wc[0].qp_num, id != 3 ? 5u : 6u) << "what lies in the fake CQ is named already";
    }
    EXPECT_EQ(path::poll_protected(&c.app, 2, wc), 0);
    EXPECT_EQ(c.state, state) << "on the direct path again";
  }
}

// As that of a process that was restored.
TEST_F(Barrier, OfAnUnregisteredProcessIsPassedAllTheSame) {
  registered = false;
  errno = ENOENT;
  path::pass_barrier();
  EXPECT_EQ(errno, ENOENT);
  EXPECT_EQ(commands, (std::vector<int>{MEMBARRIER_CMD_PRIVATE_EXPEDITED, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, MEMBARRIER_CMD_PRIVATE_EXPEDITED}));
  commands.clear();
  path::pass_barrier();
  EXPECT_EQ(commands, std::vector<int>{MEMBARRIER_CMD_PRIVATE_EXPEDITED});
}

TEST_F(Barrier, IsTheSlowOneWhereThereIsNoOther) {
  registered = can_register = false;
  begin_unseen(kTrapped | kOpen);
  EXPECT_FALSE(switchover::trap_posts(q_, 50));
  EXPECT_EQ(commands, (std::vector<int>{MEMBARRIER_CMD_PRIVATE_EXPEDITED, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, MEMBARRIER_CMD_GLOBAL}));
  end_session();
}

}  // namespace
