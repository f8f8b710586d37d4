// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is in the queues of a process that is frozen, and comes out of them as ever when it goes on: completions of an ibv_cq_ex,
// memory windows, work requests that are refused, a QP that was broken. Part of events_test.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <set>
#include <utility>

#include "frozen.h"
#include "model.h"

namespace {

using namespace frozen;

/* ---- completions of an ibv_cq_ex ------------------------------------------------- */

TEST_P(Pollers, ReadAllFieldsWhileSuspendedAndAfter) {
  two(0);
  expect_two(0);
  two(2);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  expect_two(2);
  migrd.ask(MIGR_MSG_ROLLBACK);
  two(4);
  move();
  expect_two(4);
  two(6);
  expect_two(6);
}

// Of a family that can be migrated the library polls, too, as long as a QP on it is suspended.
TEST_P(Pollers, OfOneThreadAreWhatTheDeviceIsToldOnlyWhereNothingIsMigrated) {
  ibv_cq_init_attr_ex attr{};
  attr.cqe = 1;
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
  for (const bool foreign : {false, true}) {
    model_make_foreign(0, 0, foreign);
    ibv_cq_ex* const cq = ibv_create_cq_ex(context_, &attr);
    EXPECT_EQ(model_cq_flags(), foreign ? unsigned{IBV_CREATE_CQ_ATTR_SINGLE_THREADED} : 0u);
    EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
  }
  model_make_foreign(0, 0, false);
}

TEST_P(Pollers, WhoCanSendNothingHasNothingToDrain) {
  ASSERT_EQ(ibv_destroy_qp(to_), 0);
  to_ = make_qp(ibv_cq_ex_to_cq(ex_), 0);
  to(from_, IBV_QPS_RESET);
  connect(to_, from_, other_);
  connect(from_, to_, context_);
  move();
  two(0);
  expect_two(0);
}

// As librxe locks its CQ for as long: what its thread asks libmigr for meanwhile does not wait for who waits for its end.
TEST_P(Pollers, ASessionThatResizingWaitsForMayCallTheLibrary) {
  two(0);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  expect(0);
  auto resized = std::async(std::launch::async, [this] { return ibv_resize_cq(ibv_cq_ex_to_cq(ex_), 128); });
  usleep(kSoonMs * 1000);
  auto asked = std::async(std::launch::async, [this] { return ibv_dereg_mr(ibv_reg_mr(pd_, memory_, sizeof memory_, 0)); });
  EXPECT_EQ(asked.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
  ASSERT_EQ(ibv_next_poll(ex_), 0);
  expect(1);
  ibv_end_poll(ex_);
  EXPECT_EQ(resized.get(), 0);
  EXPECT_EQ(asked.get(), 0);
}

TEST_P(Pollers, ASessionIsOneThreadsAlsoWhileSuspended) {
  two(0);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  auto other = std::async(std::launch::async, [this, attr]() mutable {
    if (ibv_start_poll(ex_, &attr)) return std::uint64_t{0};
    const std::uint64_t wr_id = ex_->wr_id;
    ibv_end_poll(ex_);
    return wr_id;
  });
  EXPECT_EQ(other.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  expect(0);
  ibv_end_poll(ex_);
  EXPECT_EQ(other.get(), 101u);
  migrd.ask(MIGR_MSG_ROLLBACK);
  two(2);
  move();
  expect_two(2);
}

/* ---- memory windows that are unbound ----------------------------------------------------- */

class Windows : public Pollers {
 protected:
  void SetUp() override {
    Pollers::SetUp();
    mw_ = ibv_alloc_mw(other_pd_, IBV_MW_TYPE_1);
    ASSERT_NE(mw_, nullptr);
    window_mr_ = ibv_reg_mr(other_pd_, window_memory_, sizeof window_memory_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND);
    bind(window_mr_, 1);
    completes(1);
    EXPECT_EQ(model_windows_bound(), 1u);
  }
  void TearDown() override {
    EXPECT_EQ(ibv_dealloc_mw(mw_), 0);
    ibv_dereg_mr(window_mr_);
    Pollers::TearDown();
  }
  /// @param mr  null: to nothing
  void bind(ibv_mr* mr, std::uint64_t wr_id) const { bind(from_, mr, wr_id, sizeof window_memory_); }
  void bind(ibv_qp* by, ibv_mr* mr, std::uint64_t wr_id, std::size_t bytes) const {
    ibv_mw_bind b{};
    b.wr_id = wr_id;
    b.send_flags = IBV_SEND_SIGNALED;
    if (mr) b.bind_info = {.mr = mr, .addr = reinterpret_cast<std::uintptr_t>(window_memory_), .length = bytes, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
    const std::uint32_t before = mw_->rkey;
    EXPECT_EQ(ibv_bind_mw(by, mw_, &b), 0);
    EXPECT_EQ(mw_->rkey, ibv_inc_rkey(before));
    EXPECT_EQ(b.bind_info.mr, mr);
  }
  /// To more than is registered: the device refuses, and the application knows the key of before.
  void bind_too_much(ibv_qp* by, std::uint64_t wr_id) const {
    const std::uint32_t before = mw_->rkey;
    bind(by, window_mr_, wr_id, sizeof window_memory_ + 1);
    mw_->rkey = before;
  }
  void completes(std::uint64_t wr_id, ibv_wc_status status = IBV_WC_SUCCESS) const {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_EQ(wc.status, status);
  }
  /// Another one of the windows' PD.
  ibv_qp* make_second() {
    std::swap(pd_, other_pd_);
    ibv_qp* const qp = make_qp(other_cq_);
    std::swap(pd_, other_pd_);
    connect(qp, to_, context_);
    return qp;
  }

  ibv_mw* mw_;
  ibv_mr* window_mr_;
  std::uint8_t window_memory_[64];
};

TEST_P(Windows, OneThatIsBoundIsSoAfterTheMove) {
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
}

TEST_P(Windows, OneThatIsBoundToNothingStaysUnbound) {
  bind(nullptr, 2);
  completes(2);
  EXPECT_EQ(model_windows_bound(), 0u);
  move();
  EXPECT_EQ(model_windows_bound(), 0u);
  bind(window_mr_, 3);
  completes(3);
  EXPECT_EQ(model_windows_bound(), 1u);
}

// Nobody has polled for it when the move begins.
TEST_P(Windows, OneThatThePartnerHasEndedStaysUnbound) {
  ibv_cq* const cq = ibv_cq_ex_to_cq(ex_);
  const Ended window(to_, pd_, memory_, sizeof memory_);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  EXPECT_EQ(model_windows_bound(), 2u);
  window.end(from_, window.mw->rkey);
  EXPECT_EQ(model_windows_bound(), 1u);
  const std::uint32_t ended = window.mw->rkey;
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
  window.expect_told(cq, ended);
  window.bind();
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  EXPECT_EQ(wc.wr_id, Ended::kBound);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(model_windows_bound(), 2u);
}

TEST_P(Windows, WhileItIsSuspendedOneStaysBound) {
  migrd.ask(MIGR_MSG_SUSPEND);
  bind(nullptr, 2);
  migrd.drained();
  EXPECT_EQ(model_windows_bound(), 1u) << "what is suspended posts nothing";
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  completes(2);
  EXPECT_EQ(model_windows_bound(), 0u);
}

TEST_P(Windows, OneThatCouldNotBeBoundIsAsItWas) {
  ibv_qp* const second = make_second();
  bind_too_much(second, 2);
  completes(2, IBV_WC_MW_BIND_ERR);
  bind(window_mr_, 3);
  completes(3);
  bind_too_much(second, 4);
  completes(4, IBV_WC_WR_FLUSH_ERR);
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
  bind(window_mr_, 5);
  completes(5);
  EXPECT_EQ(ibv_destroy_qp(second), 0);
}

// The device would refuse it to any other one, too, and break that.
TEST_P(Windows, OneThatAQpCouldNotBindAndIsGoneIsAsItWas) {
  ibv_qp* const second = make_second();
  bind_too_much(second, 2);
  EXPECT_EQ(ibv_destroy_qp(second), 0);
  move();
  completes(2, IBV_WC_MW_BIND_ERR);
  EXPECT_EQ(model_windows_bound(), 1u);
  bind(window_mr_, 3);
  completes(3);
}

TEST_P(Windows, OneWhoseQpIsConnectedNoMoreStaysBound) {
  ibv_qp* const second = make_second();
  to(from_, IBV_QPS_RESET);
  to(to_, IBV_QPS_RESET);
  connect(to_, second, other_);
  move();
  EXPECT_EQ(model_windows_bound(), 1u);
  EXPECT_EQ(ibv_destroy_qp(second), 0);
}

/* ---- QPs of one process that are connected to each other ----------------------------------- */

// What is posted after FREEZE, a receive and then a send to it, goes out in that order, whichever QP is older.
TEST_P(Pollers, ReceivesOfAllAreThereBeforeAnyoneSends) {
  ibv_mr* const mr = ibv_reg_mr(other_pd_, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE);
  const auto post = [&](ibv_qp* by, ibv_qp* at, std::uint32_t lkey, std::uint64_t wr_id) {
    ibv_sge into{reinterpret_cast<std::uintptr_t>(memory_), sizeof memory_, lkey};
    ibv_recv_wr receive{.wr_id = wr_id, .next = nullptr, .sg_list = &into, .num_sge = 1}, *bad_receive;
    EXPECT_EQ(ibv_post_recv(at, &receive, &bad_receive), 0);
    ibv_send_wr wr{}, *bad;
    wr.wr_id = wr_id + 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    EXPECT_EQ(ibv_post_send(by, &wr, &bad), 0);
  };
  migrd.freeze();
  const auto before = model_unready_sends();
  post(to_, from_, mr->lkey, 10);
  post(from_, to_, mr_->lkey, 20);
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(model_unready_sends(), before);
  std::set<std::uint64_t> came;
  ibv_wc wc{};
  ibv_poll_cq_attr attr{};
  for (int ms = 0; came.size() < 4; ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    for (; ibv_poll_cq(other_cq_, 1, &wc) == 1; came.insert(wc.wr_id)) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    for (; ibv_start_poll(ex_, &attr) == 0; ibv_end_poll(ex_)) {
      EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
      came.insert(ex_->wr_id);
    }
    usleep(1000);
  }
  EXPECT_EQ(came, (std::set<std::uint64_t>{10, 11, 20, 21}));
  ibv_dereg_mr(mr);
}

/* ---- what is kept and cannot be posted again ------------------------------------------------ */

/// By a QP whose CQ has a channel.
class Refused : public Pollers {
 protected:
  void SetUp() override {
    Pollers::SetUp();
    to(from_, IBV_QPS_RESET);
    connect(qp_[0], from_, other_);
    connect(from_, qp_[0], context_);
    migrd.ask(MIGR_MSG_SUSPEND);
  }
  void post(std::uint64_t wr_id, bool refused) const {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = wr_id;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = refused ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_RDMA_WRITE;
    if (refused) wr.wr.atomic.remote_addr = 4;
    ASSERT_EQ(ibv_post_send(qp_[0], &wr, &bad), 0);
  }
};

// The second ends the connection.
TEST_F(Refused, CompletesInItsTurn) {
  for (const std::uint64_t wr_id : {1, 2, 3, 4}) post(wr_id, wr_id % 2 == 0);
  migrd.ask(MIGR_MSG_ROLLBACK);
  for (const std::uint64_t wr_id : {1, 2, 3, 4}) {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(cq_[0], 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_TRUE(wc.status == IBV_WC_WR_FLUSH_ERR || (wr_id == 1 && wc.status == IBV_WC_SUCCESS)) << wr_id;
  }
}

TEST_F(Refused, WakesWhoWaitsForIt) {
  ibv_req_notify_cq(cq_[0], 0);
  post(1, true);
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(next(), cq_[0]);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq_[0], 1, &wc), 1);
  EXPECT_EQ(wc.wr_id, 1u);
  EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
}

/* ---- a QP that the device has put into ERR before it is suspended ------------------------ */

class DeadPeer : public Pollers {
 protected:
  void send_into_the_void() const {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = 55;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    ASSERT_EQ(ibv_post_send(from_, &wr, &bad), 0);
  }
  ibv_wc_status status(std::uint64_t wr_id) const {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0; ++ms) {
      if (ms == kPatienceMs) return IBV_WC_GENERAL_ERR;
      usleep(1000);
    }
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_EQ(wc.qp_num, from_->qp_num);
    return wc.status;
  }
  ibv_qp_state state() const {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(ibv_query_qp(from_, &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
  }
};

class Broken : public DeadPeer {
 protected:
  void SetUp() override {
    Pollers::SetUp();
    model_cut(0, 0, false);
    send_into_the_void();
    for (int ms = 0; ms < kPatienceMs && !failed(); ++ms) usleep(1000);
    ASSERT_TRUE(failed());
    model_mend(0);
  }
  /// The device says so, and nobody has told the library.
  bool failed() const { return readable(other_->async_fd, 0); }
};

// It would try again for an hour.
TEST_P(DeadPeer, IsNotWaitedFor) {
  ibv_qp_attr patient{};
  patient.timeout = 30;
  patient.retry_cnt = 7;
  ASSERT_EQ(ibv_modify_qp(from_, &patient, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT), 0);
  model_cut(0, 0, false);
  send_into_the_void();
  const migr_msg early = migrd.about(from_, MIGR_MSG_GONE);
  EXPECT_EQ(early.status, EBUSY) << "nobody has looked whether a thread posts";
  migrd.ask(MIGR_MSG_SUSPEND);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_GONE).status, 0);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_GONE).status, 0) << "once more";
  model_mend(0);
  migrd.drained();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(state(), IBV_QPS_ERR);
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
  send_into_the_void();
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
}

TEST_P(DeadPeer, IsNotAskedWhereNothingIsInFlight) {
  model_cut(0, 0, false);
  ASSERT_EQ(migrd.about(from_, MIGR_MSG_QP_CREATE).status, 0);  // which finds where the queues lie
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.drained();
  model_mend(0);
  EXPECT_EQ(model_windows(), 0u) << "what took the place of a marker is left";
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(state(), IBV_QPS_RTS);
}

TEST_P(Broken, IsBrokenAfterItWithItsErrorInPlace) {
  move();
  EXPECT_EQ(state(), IBV_QPS_ERR);
  EXPECT_EQ(status(55), IBV_WC_RETRY_EXC_ERR);
  send_into_the_void();
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
}

TEST_P(Broken, AsTheApplicationKnows) {
  EXPECT_EQ(state(), IBV_QPS_ERR);
  EXPECT_EQ(status(55), IBV_WC_RETRY_EXC_ERR);
  move();
  EXPECT_EQ(state(), IBV_QPS_ERR);
  send_into_the_void();
  EXPECT_EQ(status(55), IBV_WC_WR_FLUSH_ERR);
}

// Nothing that is drained tells of it.
TEST_P(Broken, OfDatagramsItIsSo) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_[0];
  init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_UD;
  ibv_qp* const datagrams = ibv_create_qp(pd_, &init);
  ASSERT_NE(datagrams, nullptr);
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) to(datagrams, state);
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(datagrams, &wr, &bad), 0);  // to nobody
  ibv_wc wc{};
  for (int ms = 0; ibv_poll_cq(cq_[0], 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
  ASSERT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  move();
  ibv_qp_attr attr{};
  ASSERT_EQ(ibv_query_qp(datagrams, &attr, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_ERR);
  EXPECT_EQ(ibv_destroy_qp(datagrams), 0);
}

INSTANTIATE_TEST_SUITE_P(, DeadPeer, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Broken, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Windows, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Pollers, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });

}  // namespace
