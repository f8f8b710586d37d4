// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Events of completion channels and asynchronous ones over a freeze: none is lost, none is invented, whether the process
// goes back or is restored. The other files of the program of that name, events_*_test.cc, have what else a freeze must not change.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <future>
#include <utility>

#include "frozen.h"
#include "model.h"

namespace {

using namespace frozen;

TEST_P(Events, OfTwoArmedCqsOnlyTheOneThatHadAnEventHasIt) {
  for (ibv_cq* cq : cq_) ibv_req_notify_cq(cq, 0);
  complete(cq_[0]);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr) << "an event that never was";
  complete(cq_[0]);  // its event was the last that it owed
  EXPECT_EQ(next(), nullptr) << "it was not armed";
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]) << "it is armed as it was";
}

TEST_P(Events, TwoUnreadOnesOfOneCqStayTwo) {
  for (int i = 0; i < 2; ++i) {
    ibv_req_notify_cq(cq_[0], 0);
    complete(cq_[0]);
  }
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
}

TEST_P(Events, ArmedAgainBehindAnUnreadOneItIsArmedStill) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  ibv_req_notify_cq(cq_[0], 0);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

// The second arming was for nothing, or the event was of the first and the second still holds: only the device knows.
TEST_P(Events, ArmedTwiceForOneEventItIsNotArmed) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  move();
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
}

// While the device is asked threads go on.
TEST_P(Events, ArmedWhileItIsBeingFrozenItIsArmed) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  auto armed = std::async(std::launch::async, [this, before = model_receives_flushed()] {
    for (int ms = 0; model_receives_flushed() == before && ms < kPatienceMs; ++ms) usleep(1000);
    return ibv_req_notify_cq(cq_[0], 0);
  });
  move();
  EXPECT_EQ(armed.get(), 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Events, OfTwoThatNobodyIsSureOfOnlyTheArmedOneIsArmed) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  ibv_req_notify_cq(cq_[1], 0);
  complete(cq_[1]);
  ibv_req_notify_cq(cq_[1], 0);
  move();
  EXPECT_EQ(next(), cq_[1]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]);
}

// A QP that was destroyed leaves them behind.
TEST_P(Events, OfACqOnWhichThereIsNoQpTheyAreThere) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  for (ibv_qp*& qp : qp_) EXPECT_EQ(ibv_destroy_qp(std::exchange(qp, nullptr)), 0);
  EXPECT_EQ(ibv_dealloc_pd(pd_), 0);
  move();
  pd_ = ibv_alloc_pd(context_);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), nullptr) << "it was not armed";
}

TEST_P(Events, ACqOnWhichThereIsNoQpStaysArmedBehindAnUnreadOne) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  ibv_req_notify_cq(cq_[0], 0);
  EXPECT_EQ(ibv_destroy_qp(std::exchange(qp_[0], nullptr)), 0);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[0]);
  EXPECT_EQ(next(), cq_[0]);
  ibv_wc wc[3];
  EXPECT_EQ(ibv_poll_cq(cq_[0], 3, wc), 2) << "what is libmigr's own nobody sees";
}

TEST_P(Events, TheyOutliveTwoMoves) {
  ibv_req_notify_cq(cq_[0], 0);
  complete(cq_[0]);
  ibv_req_notify_cq(cq_[1], 0);
  move();
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]);
}

TEST_P(Events, WhoWaitsForOneGetsTheNext) {
  auto waits = std::async(std::launch::async, [this] {
    ibv_cq* cq;
    void* context;
    EXPECT_EQ(ibv_get_cq_event(channel_, &cq, &context), 0) << std::strerror(errno);
    ibv_ack_cq_events(cq, 1);
    return cq;
  });
  ibv_req_notify_cq(cq_[1], 0);
  move();
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  complete(cq_[1]);
  EXPECT_EQ(waits.get(), cq_[1]);
}

TEST_P(Events, ArmedForAllAndThenForSolicitedOnesItIsArmedForAll) {
  ibv_req_notify_cq(cq_[0], 0);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  arrives(0, false);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Events, ArmedForSolicitedOnesItIsForThoseOnly) {
  ibv_req_notify_cq(cq_[0], 0);
  arrives(0, false);
  EXPECT_EQ(next(), cq_[0]);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  arrives(0, false);
  EXPECT_EQ(next(), nullptr);
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]);
}

// Whether it is the device does not tell: what libmigr lets complete is not solicited.
TEST_P(Events, ArmedForSolicitedOnesBehindAnUnreadOneItIsArmedStill) {
  ibv_req_notify_cq(cq_[0], 1);
  arrives(0, true);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  EXPECT_EQ(next(), cq_[0]);
  arrives(0, false);
  EXPECT_EQ(next(), nullptr);
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]);
}

TEST_P(Events, ArmedForSolicitedOnesBehindAnUnreadOneOfAllItIsArmedStill) {
  ibv_req_notify_cq(cq_[0], 0);
  arrives(0, false);
  ibv_req_notify_cq(cq_[0], 1);
  move();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]);
}

// Whoever finds nothing, arms it and goes to sleep while it is frozen; the device is told of that later.
TEST_P(Events, ArmedWhileItIsFrozenItHasTheEventOfWhatComesThen) {
  post_receive(0);
  migrd.freeze();
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq_[0], 1, &wc), 0);
  EXPECT_EQ(ibv_req_notify_cq(cq_[0], 0), 0);
  model_arrives(qp_[0], false);
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  EXPECT_EQ(ibv_poll_cq(cq_[0], 1, &wc), 1);
  EXPECT_EQ(wc.opcode, IBV_WC_RECV);
}

/// A message comes while the device is asked whether a CQ is armed: when the channel of cq_[0] has been read.
class Late : public Events {
 protected:
  void SetUp() override {
    Events::SetUp();
    asked_channel_ = ibv_create_comp_channel(context_);
    asked_ = ibv_create_cq(context_, 64, nullptr, asked_channel_, 0);
    for (int i = 0; i < 2; ++i) ibv_req_notify_cq(asked_, 0);
    complete(asked_);
    ibv_cq* cq;
    void* context;
    ASSERT_EQ(ibv_get_cq_event(asked_channel_, &cq, &context), 0);
    ibv_ack_cq_events(cq, 1);
  }
  void TearDown() override {
    EXPECT_FALSE(readable(asked_channel_->fd, 0));
    EXPECT_EQ(ibv_destroy_cq(asked_), 0);
    ibv_destroy_comp_channel(asked_channel_);
    Events::TearDown();
  }
  void move_while_one_arrives(bool solicited) {
    post_receive(0);
    model_arrives_at_flush(qp_[0], solicited);
    move();
  }
  ibv_comp_channel* asked_channel_;
  ibv_cq* asked_;
};

TEST_P(Late, OneHasItsEvent) {
  ibv_req_notify_cq(cq_[0], 0);
  move_while_one_arrives(false);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Late, OneThatIsSolicitedHasItsEvent) {
  ibv_req_notify_cq(cq_[0], 1);
  move_while_one_arrives(true);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
}

TEST_P(Late, OneThatIsNotSolicitedHasNone) {
  ibv_req_notify_cq(cq_[0], 1);
  move_while_one_arrives(false);
  EXPECT_EQ(next(), nullptr) << "an event that never was";
  arrives(0, true);
  EXPECT_EQ(next(), cq_[0]) << "it is armed as it was";
}

/* ---- asynchronous ------------------------------------------------------------- */

class Signals : public Events {};

TEST_F(Signals, OfARestoredProcessNameTheDescriptor) {
  const int signal = SIGRTMIN;
  sigset_t those;
  sigemptyset(&those);
  sigaddset(&those, signal);
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, &those, nullptr), 0);
  const f_owner_ex owner{F_OWNER_TID, gettid()};
  const int elsewhere = dup(channel_->fd);  // as CRIU
  ASSERT_EQ(fcntl(elsewhere, F_SETSIG, signal), 0);
  ASSERT_EQ(fcntl(elsewhere, F_SETOWN_EX, &owner), 0);
  ASSERT_EQ(fcntl(elsewhere, F_SETFL, fcntl(elsewhere, F_GETFL) | O_ASYNC), 0);
  migrd.freeze();
  migrd.restored();
  EXPECT_EQ(ibv_req_notify_cq(cq_[0], 0), 0);
  complete(cq_[0]);
  siginfo_t info{};
  const timespec patience{kPatienceMs / 1000, 0};
  EXPECT_EQ(sigtimedwait(&those, &info, &patience), signal);
  EXPECT_EQ(info.si_fd, channel_->fd);
  EXPECT_EQ(next(), cq_[0]);
  fcntl(elsewhere, F_SETFL, fcntl(elsewhere, F_GETFL) & ~O_ASYNC);
  close(elsewhere);
  ibv_wc wc{};
  while (ibv_poll_cq(cq_[0], 1, &wc) == 1) continue;
}

TEST_P(Events, UnreadAsynchronousOnesAreThereInOrder) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);  // LAST_WQE_REACHED
  model_raise(context_, IBV_EVENT_PORT_ACTIVE, 3);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  epoll_event watched{};
  watched.events = EPOLLIN;
  watched.data.u64 = 0x1234567890;
  ASSERT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, context_->async_fd, &watched), 0);
  const int fd = context_->async_fd;
  move();
  EXPECT_EQ(context_->async_fd, fd);
  ASSERT_TRUE(readable(fd, 0));
  epoll_event seen{};
  ASSERT_EQ(epoll_wait(epoll, &seen, 1, 0), 1);
  EXPECT_EQ(seen.data.u64, 0x1234567890u);
  ibv_async_event event{};
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event.element.qp, qp_[0]);
  ASSERT_TRUE(readable(fd, 0));
  ibv_async_event second{};
  ASSERT_EQ(ibv_get_async_event(context_, &second), 0);
  EXPECT_EQ(second.event_type, IBV_EVENT_PORT_ACTIVE);
  EXPECT_EQ(second.element.port_num, 3);
  ibv_ack_async_event(&second);
  EXPECT_FALSE(readable(fd, kSoonMs));
  EXPECT_EQ(epoll_wait(epoll, &seen, 1, 0), 0);
  // Destroying waits for the application, as ever.
  auto destroyed = std::async(std::launch::async, [this] { return ibv_destroy_qp(qp_[0]); });
  EXPECT_EQ(destroyed.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(ibv_query_qp(qp_[0], &attr, IBV_QP_STATE, &init), 0) << "its handler may ask for it";
  EXPECT_EQ(attr.qp_state, IBV_QPS_ERR);
  ibv_ack_async_event(&event);
  EXPECT_EQ(destroyed.get(), 0);
  qp_[0] = nullptr;
  // And what comes later comes as ever.
  model_raise(context_, IBV_EVENT_PORT_ERR, 4);
  ASSERT_TRUE(readable(fd, kSoonMs));
  ASSERT_EQ(epoll_wait(epoll, &seen, 1, 0), 1);
  ASSERT_EQ(ibv_get_async_event(context_, &second), 0);
  EXPECT_EQ(second.element.port_num, 4);
  close(epoll);
}

TEST_P(Events, WhileSomeAreUnreadObjectsCanBeMade) {
  model_raise(context_, IBV_EVENT_PORT_ACTIVE, 1);
  move();
  const int fd = context_->async_fd;
  ibv_cq* const cq = ibv_create_cq(context_, 1, nullptr, nullptr, 0);
  ASSERT_NE(cq, nullptr) << std::strerror(errno);
  ibv_qp* const qp = make_qp(cq);
  ASSERT_NE(qp, nullptr) << std::strerror(errno);
  EXPECT_EQ(context_->async_fd, fd);
  EXPECT_TRUE(readable(fd, 0));
  EXPECT_EQ(ibv_destroy_qp(qp), 0);
  EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

// The other host's is up.
TEST_P(Events, ThatAPortIsDownIsSaidOnItsHostOnly) {
  model_raise(context_, IBV_EVENT_PORT_ERR, 3);
  model_raise(context_, IBV_EVENT_PORT_ACTIVE, 4);
  move();
  ibv_async_event event{};
  if (GetParam() == How::kBack) {
    ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
    EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
    EXPECT_EQ(event.element.port_num, 3);
  }
  ASSERT_TRUE(readable(context_->async_fd, 0));
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ACTIVE);
  EXPECT_EQ(event.element.port_num, 4);
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs));
}

TEST_P(Events, UnreadAsynchronousOnesGoWithTheirObject) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);
  move();
  ASSERT_TRUE(readable(context_->async_fd, 0));
  EXPECT_EQ(ibv_destroy_qp(qp_[0]), 0);
  qp_[0] = nullptr;
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs));
}

TEST_P(Events, WhoWaitsForAnAsynchronousOneGetsTheNext) {
  auto waits = std::async(std::launch::async, [this] {
    ibv_async_event event{};
    EXPECT_EQ(ibv_get_async_event(context_, &event), 0) << std::strerror(errno);
    return event.element.port_num;
  });
  move();
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_raise(context_, IBV_EVENT_PORT_ERR, 5);
  EXPECT_EQ(waits.get(), 5);
}

// A QP in ERR was told of; that a new one is put there, too, is no news. Nor is what QPs of libmigr's own say.
TEST_P(Events, OfClosedPathsNobodyHears) {
  to(qp_[0], IBV_QPS_INIT);
  to(qp_[0], IBV_QPS_ERR);
  ibv_async_event event{};
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  ibv_ack_async_event(&event);
  ibv_req_notify_cq(cq_[1], 0);
  complete(cq_[1]);  // makes one of libmigr's own
  move();
  EXPECT_EQ(next(), cq_[1]);
  model_raise(context_, IBV_EVENT_PORT_ERR, 6);  // behind whatever they have said
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs));
}

TEST_P(Events, RegisteredMemoryThatIsMappedNoMoreIsRefusedAndTheEventsAreThere) {
  const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ibv_mr* const mr = ibv_reg_mr(pd_, memory, bytes, IBV_ACCESS_LOCAL_WRITE);
  munmap(memory, bytes);
  const migr_msg said = migrd.try_to(MIGR_MSG_DESCRIBE);
  EXPECT_EQ(said.status, ENOMEM) << "before anything is stopped: " << said.text;
  for (ibv_cq* cq : cq_) ibv_req_notify_cq(cq, 0);
  complete(cq_[0]);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  const migr_msg reply = migrd.try_to(MIGR_MSG_FREEZE);
  EXPECT_EQ(reply.status, ENOMEM) << reply.text;
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(next(), cq_[0]);
  EXPECT_EQ(next(), nullptr);
  complete(cq_[1]);
  EXPECT_EQ(next(), cq_[1]) << "it was armed";
  ibv_dereg_mr(mr);
  move();
}

TEST_P(Events, MemoryThatIsBeingGivenBackIsWaitedFor) {
  char memory[64];
  ibv_mr* const mr = ibv_reg_mr(pd_, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(mr, nullptr);
  model_hold_registrations(0, true);
  auto given_back = std::async(std::launch::async, [&] { return ibv_dereg_mr(mr); });
  EXPECT_EQ(given_back.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  auto made = std::async(std::launch::async, [&] { return ibv_create_cq(context_, 1, nullptr, nullptr, 0); });
  EXPECT_EQ(made.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  auto frozen = std::async(std::launch::async, [&] { return migrd.try_to(MIGR_MSG_FREEZE).status; });
  EXPECT_EQ(frozen.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(frozen.get(), 0);
  EXPECT_EQ(given_back.get(), 0);
  migrd.hung_up();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(ibv_destroy_cq(made.get()), 0);
}

// Other calls of the application need not wait for it; FREEZE has to.
TEST_P(Events, MemoryThatIsBeingRegisteredIsWaitedFor) {
  model_hold_registrations(0, true);
  char memory[64];
  auto registered = std::async(std::launch::async, [&] { return ibv_reg_mr(pd_, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE); });
  EXPECT_EQ(registered.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  auto made = std::async(std::launch::async, [&] { return ibv_create_cq(context_, 1, nullptr, nullptr, 0); });
  EXPECT_EQ(made.wait_for(std::chrono::milliseconds(kPatienceMs)), std::future_status::ready);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_FREEZE).status, EAGAIN) << "it does not come back";
  auto frozen = std::async(std::launch::async, [&] { return migrd.try_to(MIGR_MSG_FREEZE).status; });
  EXPECT_EQ(frozen.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(frozen.get(), 0);
  ibv_mr* const mr = registered.get();
  ASSERT_NE(mr, nullptr);
  migrd.hung_up();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_EQ(ibv_destroy_cq(made.get()), 0);
}

class Handles : public Events {};

// It would be missing on the other host.
TEST_F(Handles, ThatAreBeingMadeAreWaitedFor) {
  model_hold_registrations(0, true);
  auto made = std::async(std::launch::async, [&] {
    ibv_ah_attr to{};
    to.port_num = 1;
    return ibv_create_ah(pd_, &to);
  });
  EXPECT_EQ(made.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 1000);
  auto frozen = std::async(std::launch::async, [&] { return migrd.try_to(MIGR_MSG_FREEZE).status; });
  EXPECT_EQ(frozen.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_registrations(0, false);
  EXPECT_EQ(frozen.get(), 0);
  ibv_ah* const ah = made.get();
  ASSERT_NE(ah, nullptr);
  migrd.hung_up();
  migrd.back();
  EXPECT_EQ(ibv_destroy_ah(ah), 0);
}

INSTANTIATE_TEST_SUITE_P(, Late, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });
INSTANTIATE_TEST_SUITE_P(, Events, ::testing::Values(How::kBack, How::kRestored),
                         [](const auto& p) { return p.param == How::kBack ? "back" : "restored"; });

}  // namespace
