// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A post beside a vQP that goes back to the direct path and then to another link, at any two of its instructions: what goes to the new
// path goes there under the lock. The thread is stepped, and what others do in between is done in the handler.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "../../libmigr/path.h"
#include "../../libmigr/shadow.h"

namespace {

using namespace migr;

constexpr int kSteps = 40;        // of a post, from its first instruction on; it is decided by then
constexpr greg_t kTrap = 1 << 8;  // in the flags: another signal after the next instruction

struct Others {
  QpShadow* volatile q;      ///< null: the post is over
  int direct_at, leaves_at;  ///< instructions
  int step;
};
Others others;
ibv_qp old_path, new_path;
unsigned posted_old, posted_new, unlocked;

bool is_locked() {
  if (!others.q->lock.try_lock()) return true;
  others.q->lock.unlock();
  return false;
}

template <class Wr>
int post(ibv_qp* qp, Wr*, Wr**) {
  qp == &new_path ? ++posted_new : ++posted_old;
  if (qp == &new_path && !is_locked()) ++unlocked;
  return 0;
}

/// Its threads take the lock for it.
template <class Change>
bool under_lock(Change&& change) {
  if (!others.q->lock.try_lock()) return false;
  change(*others.q);
  others.q->lock.unlock();
  return true;
}

void stepped(int, siginfo_t*, void* at) {
  auto& flags = static_cast<ucontext_t*>(at)->uc_mcontext.gregs[REG_EFL];
  const auto go_on_freely = [&] { flags &= ~kTrap; };
  if (!others.q) return go_on_freely();
  flags |= kTrap;
  if (++others.step < others.direct_at) return;
  if (others.direct_at >= 0) {
    if (under_lock([](QpShadow& q) { q.state = 0; })) others.direct_at = -1;
    return;
  }
  if (others.step < others.leaves_at) return;
  if (!under_lock([](QpShadow& q) {
        q.real = &new_path;
        q.state = kTrapped;
      })) return;
  go_on_freely();
}

class Route : public testing::Test {
 protected:
  void SetUp() override {
    struct sigaction action {};
    action.sa_sigaction = stepped;
    action.sa_flags = SA_SIGINFO;
    ASSERT_EQ(sigaction(SIGTRAP, &action, nullptr), 0);
    keys_.resize(1 << 8);
    posted_old = posted_new = unlocked = 0;
  }
  void begin(int direct_at, int leaves_at) {
    q_ = std::make_unique<QpShadow>();
    q_->real = &old_path;
    q_->real_post_send = post<ibv_send_wr>;
    q_->real_post_recv = post<ibv_recv_wr>;
    q_->key_table = keys_.data();
    q_->cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    q_->state = kTrapped;
    others = {.q = q_.get(), .direct_at = direct_at, .leaves_at = leaves_at, .step = 0};
  }
  template <class Wr, class Post>
  void post_beside(Wr wr, Post&& post) {
    ibv_sge sge{.addr = 0x1000, .length = 8, .lkey = 0x11};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    Wr* bad;
    for (int direct_at = 1; direct_at < kSteps; ++direct_at)
      for (int leaves_at = direct_at; leaves_at < direct_at + kSteps; ++leaves_at) {
        begin(direct_at, leaves_at);
        asm volatile("int3" ::
                         : "memory");
        const int err = post(&q_->app, &wr, &bad);
        others.q = nullptr;
        ASSERT_EQ(err, 0);
      }
    EXPECT_EQ(posted_old + posted_new, unsigned{(kSteps - 1) * kSteps});
    EXPECT_GT(posted_old, 0u);
    EXPECT_EQ(unlocked, 0u) << "beside whoever has the lock, of " << posted_new << " that went to the new path";
  }

  std::unique_ptr<QpShadow> q_;
  std::vector<migr_key_entry> keys_;
};

TEST_F(Route, OfASendIsReadBeforeTheStateThatItGoesBy) {
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_SEND;
  post_beside(wr, path::post_send);
}

TEST_F(Route, OfAReceiveIsReadBeforeTheStateThatItGoesBy) { post_beside(ibv_recv_wr{}, path::post_recv); }

/* ---- who polls is seen, also where its thread ends --------------------------------------- */

std::atomic<bool> polls, goes_on;

int poll_slowly(ibv_cq*, int, ibv_wc*) {
  polls = true;
  while (!goes_on) sched_yield();
  return 0;
}

std::unique_ptr<CqShadow> protected_cq(int (*poll)(ibv_cq*, int, ibv_wc*)) {
  auto c = std::make_unique<CqShadow>();
  c->state = kProtectedCq;
  c->real_poll = poll;
  return c;
}

void poll(void* cq) {
  ibv_wc wc;
  path::poll_protected(&static_cast<CqShadow*>(cq)->app, 1, &wc);
}

TEST(Poller, IsSeenBehindTheEndOfItsNotes) {
  const auto slow = protected_cq(poll_slowly), other = protected_cq([](ibv_cq*, int, ibv_wc*) { return 0; });
  std::thread ending([&] {
    poll(other.get());
    pthread_key_t later;  // than that of the notes
    pthread_key_create(&later, poll);
    pthread_setspecific(later, slow.get());
  });
  while (!polls) sched_yield();
  std::thread(poll, other.get()).join();  // in a note that nobody has
  EXPECT_FALSE(path::pollers_are_outside(*slow));
  goes_on = true;
  ending.join();
  EXPECT_TRUE(path::pollers_are_outside(*slow));
}

}  // namespace
