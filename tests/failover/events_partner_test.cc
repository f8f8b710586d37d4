// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A partner of a process that is moved goes back, in two halves, or stays on the new path; what memory and QPs are called then. Part
// of events_test.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "frozen.h"
#include "model.h"
#include "uapi/migr.h"

namespace {

using namespace frozen;

/* ---- a partner that goes back in two halves ---------------------------------------------- */

class Partner : public Pollers {
 protected:
  static void done(const migr_msg& reply) { EXPECT_EQ(reply.status, 0) << reply.text; }
  /// @param cut  as if the drain did not end
  /// @param before  SWITCH
  void switch_path(
      bool cut = false, const std::function<void()>& before = [] {}) {
    done(migrd.about(to_, MIGR_MSG_QP_CREATE));
    spare_ = migrd.record<migr_qp_spare>();
    migr_qp_connect there{};
    there.vqpn = to_->qp_num;
    there.dest_qpn = 0x123456;
    ibv_gid gid{};
    ASSERT_EQ(ibv_query_gid(other_, 1, 0, &gid), 0);
    std::memcpy(there.dgid, &gid, sizeof there.dgid);
    done(migrd.say(MIGR_MSG_QP_CONNECT, 0, &there, sizeof there));
    done(migrd.about(to_, MIGR_MSG_SUSPEND));
    done(migrd.about(to_, MIGR_MSG_DRAIN, 5000));
    if (cut) {
      done(migrd.about(to_, MIGR_MSG_CUT));
      migr_qp_psn peer{};
      peer.vqpn = to_->qp_num;
      done(migrd.say(MIGR_MSG_SETTLE, 0, &peer, sizeof peer));
    }
    before();
    done(migrd.about(to_, MIGR_MSG_SWITCH));
  }
  migr_qp_spare spare_{};
};

// The other end, which has gone back, sends: what was posted before SWITCH and since is there for it. This end does not send yet.
TEST_F(Partner, ReceivesOnTheOldPathBeforeItSends) {
  two(0);
  expect_two(0);
  switch_path();
  ibv_send_wr wr{}, *bad;
  wr.wr_id = 55;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(to_, &wr, &bad), 0);
  const migr_msg reply = migrd.ask(MIGR_MSG_OLD_PATH);
  EXPECT_EQ(reply.state, std::uint32_t{MIGR_PROC_SUSPENDED});
  two(2);
  expect_two(2);
  done(migrd.try_to(MIGR_MSG_OLD_PATH));  // asked once more
  two(4);
  expect_two(4);
  migrd.ask(MIGR_MSG_ROLLBACK);
  ibv_poll_cq_attr attr{};
  for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    usleep(1000);
  }
  EXPECT_EQ(ex_->wr_id, 55u);
  EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
  ibv_end_poll(ex_);
  two(6);
  expect_two(6);
}

// Its thread may poll for others as well, who go on.
TEST_F(Partner, RestsInAPollOnlyWhereNoneGoesOn) {
  constexpr long kPolls = 100;
  const auto rests = [this] {
    rusage before{}, after{};
    getrusage(RUSAGE_THREAD, &before);
    ibv_poll_cq_attr attr{};
    for (long i = 0; i < kPolls; ++i) EXPECT_EQ(ibv_start_poll(ex_, &attr), ENOENT);
    getrusage(RUSAGE_THREAD, &after);
    return after.ru_nvcsw - before.ru_nvcsw;
  };
  done(migrd.about(to_, MIGR_MSG_SUSPEND));
  done(migrd.about(to_, MIGR_MSG_DRAIN, 5000));
  EXPECT_LT(rests(), kPolls / 2);
  migrd.ask(MIGR_MSG_ROLLBACK);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  EXPECT_GE(rests(), kPolls);
  migrd.ask(MIGR_MSG_ROLLBACK);
}

// The number that the device had for it is another one's by then.
TEST_F(Partner, WhatItHasCompletedBearsItsNameWhenItIsGone) {
  switch_path();
  done(migrd.ask(MIGR_MSG_RESUME));
  const std::uint32_t name = to_->qp_num;
  ASSERT_NE(spare_.pqpn, name);
  ibv_recv_wr wr{.wr_id = 77, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad;
  ASSERT_EQ(ibv_post_recv(to_, &wr, &bad), 0);
  to(to_, IBV_QPS_ERR);
  ASSERT_EQ(ibv_destroy_qp(to_), 0);
  const std::uint32_t next_qpn = model_next_qpn(0, 0, spare_.pqpn);
  to_ = make_qp(ibv_cq_ex_to_cq(ex_));
  model_next_qpn(0, 0, next_qpn);
  ASSERT_EQ(to_->qp_num, spare_.pqpn);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  EXPECT_EQ(ex_->wr_id, 77u);
  EXPECT_EQ(ibv_wc_read_qp_num(ex_), name);
  EXPECT_EQ(ibv_next_poll(ex_), ENOENT);
  ibv_end_poll(ex_);
}

/* ---- what memory of a process that has moved is called ----------------------------------- */

class Keys : public Partner {
 protected:
  static constexpr std::uint32_t kName = 0x77700, kOtherName = 0x77800, kWrong = 0x55500;
  static constexpr std::uint32_t kContext = 3, kOtherContext = 0x80000001;
  const std::vector<std::uint8_t> theirs_ = std::vector<std::uint8_t>(16, 0x1d);

  void SetUp() override {
    Partner::SetUp();
    target_ = ibv_reg_mr(other_pd_, target_memory_, sizeof target_memory_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  void TearDown() override {
    ibv_dereg_mr(target_);
    for (ibv_qp* qp : there_) EXPECT_EQ(ibv_destroy_qp(qp), 0);
    Partner::TearDown();
  }
  migr_key_map key(std::uint32_t name, std::uint32_t physical) const {
    migr_key_map k{.vrkey = name, .prkey = physical, .owner = {}};
    std::memcpy(k.owner, theirs_.data(), sizeof k.owner);
    return k;
  }
  migr_key_map context(std::uint32_t name) const { return key(MIGR_KEY_CONTEXT, name); }
  /// The process at the other end moves, and its keys are these.
  void they_move(std::uint32_t their_context, const std::vector<migr_key_map>& keys) {
    done(migrd.about(to_, MIGR_MSG_QP_CREATE));
    const auto spare = migrd.record<migr_qp_spare>();
    std::swap(pd_, other_pd_);
    ibv_qp* there = make_qp(other_cq_);
    if (there->qp_num == to_->qp_num) ibv_destroy_qp(std::exchange(there, make_qp(other_cq_)));  // without migr.ko nothing else tells which is meant
    there_.push_back(there);
    std::swap(pd_, other_pd_);
    ibv_qp end{};
    end.qp_num = spare.pqpn;
    answer(there, &end, context_, spare.psn);
    EXPECT_EQ(go_to_rts(there, 0), 0);
    migr_qp_connect c{};
    c.vqpn = to_->qp_num;
    c.dest_qpn = there->qp_num;
    ibv_gid gid{};
    EXPECT_EQ(ibv_query_gid(other_, 1, 0, &gid), 0);
    std::memcpy(c.dgid, &gid, sizeof c.dgid);
    std::memcpy(c.peer, theirs_.data(), sizeof c.peer);
    done(migrd.say(MIGR_MSG_QP_CONNECT, their_context, &c, sizeof c));
    done(migrd.about(to_, MIGR_MSG_SUSPEND));
    done(migrd.about(to_, MIGR_MSG_DRAIN, 5000));
    done(migrd.about(to_, MIGR_MSG_SWITCH));
    done(migrd.say_all(MIGR_MSG_KEYS, 0, keys));
    done(migrd.about(to_, MIGR_MSG_RESUME));
  }
  /// A WRITE of one byte to memory of that name.
  ibv_wc_status write(std::uint32_t rkey) const {
    const std::uint8_t byte = ++target_memory_[1];
    ibv_sge of{reinterpret_cast<std::uintptr_t>(&byte), 1, 0};
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    wr.sg_list = &of;
    wr.num_sge = 1;
    wr.wr.rdma.rkey = rkey;
    wr.wr.rdma.remote_addr = reinterpret_cast<std::uintptr_t>(target_memory_);
    EXPECT_EQ(ibv_post_send(to_, &wr, &bad), 0);
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      if (ms == kPatienceMs) return IBV_WC_GENERAL_ERR;
      usleep(1000);
    }
    const ibv_wc_status status = ex_->status;
    ibv_end_poll(ex_);
    EXPECT_TRUE(status != IBV_WC_SUCCESS || target_memory_[0] == byte);
    return status;
  }

  ibv_mr* target_;
  std::vector<ibv_qp*> there_;
  mutable std::uint8_t target_memory_[64] = {};
};

// Two devices have each called memory so.
TEST_F(Keys, AreOfTheContextAtTheOtherEnd) {
  they_move(kContext, {context(kContext), key(kName, target_->rkey), context(kOtherContext), key(kName, kWrong)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS);
  they_move(kOtherContext, {context(kContext), key(kName, kWrong), context(kOtherContext), key(kName, target_->rkey)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS);
}

TEST_F(Keys, OfNoKnownContextAreAnyones) {
  they_move(kContext, {key(kName, target_->rkey)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS) << "they do not say";
  they_move(0, {context(kContext), key(kOtherName, kWrong), context(kOtherContext), key(kName, target_->rkey)});
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS) << "nobody has said which";
}

// That of before is gone, and new memory is called by the device's own key.
TEST_F(Keys, OfAMoveBeforeAreForgotten) {
  they_move(kContext, {context(kContext), key(target_->rkey, kWrong)});
  they_move(kContext, {context(kContext)});
  EXPECT_EQ(write(target_->rkey), IBV_WC_SUCCESS);
  they_move(kContext, {key(target_->rkey, kWrong)});
  they_move(kContext, {});
  EXPECT_EQ(write(target_->rkey), IBV_WC_SUCCESS) << "of an older library, which says nothing of who has none";
}

// Who sends datagrams to a QP that is made since, and who has no libmigr, know its number only.
TEST_F(Keys, AreNotTheOnlyNamesThatNewOnesPassBy) {
  const unsigned before = model_qps();
  they_move(0, {});
  ibv_destroy_qp(make_qp(cq_[0]));  // and the old path with it
  model_next_qpn(0, 0, to_->qp_num);
  ibv_qp* const plain = make_qp(cq_[0]);
  model_next_qpn(0, 0, to_->qp_num);
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = cq_[0];
  init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  init.comp_mask = IBV_QP_INIT_ATTR_PD;
  init.pd = pd_;
  ibv_qp* const extended = ibv_create_qp_ex(context_, &init);
  for (ibv_qp* qp : {plain, extended}) {
    EXPECT_NE(qp->qp_num, to_->qp_num);
    EXPECT_EQ(ibv_destroy_qp(qp), 0);
  }
  EXPECT_EQ(model_qps(), before + there_.size()) << "what was passed is given back";
  ibv_qp* const as_before = make_qp(cq_[0]);
  EXPECT_EQ(ibv_destroy_qp(as_before), 0);
}

// Whether or not another QP is ever made.
TEST_F(Keys, LeaveNoOldPathBehind) {
  const unsigned before = model_qps();
  they_move(0, {});
  for (int ms = 0; ms < kPatienceMs && model_qps() != before + there_.size(); ++ms) usleep(1000);
  EXPECT_EQ(model_qps(), before + there_.size());
}

/// Memory of two devices that number keys alike.
class TwoDevices : public Keys {
 protected:
  void SetUp() override {
    Keys::SetUp();
    ibv_device** list = ibv_get_device_list(nullptr);
    second_ = ibv_open_device(list[1]);  // a1
    ibv_free_device_list(list);
    second_pd_ = ibv_alloc_pd(second_);
    for (const int link : {0, 1}) model_next_key(link, 0, kFirst);
    first_mr_ = reg(pd_);
    second_mr_ = reg(second_pd_);
    EXPECT_EQ(first_mr_->rkey, second_mr_->rkey);
  }
  void TearDown() override {
    ibv_dereg_mr(first_mr_);
    ibv_dereg_mr(second_mr_);
    ibv_dealloc_pd(second_pd_);
    ibv_close_device(second_);
    Keys::TearDown();
  }
  ibv_mr* reg(ibv_pd* pd) { return ibv_reg_mr(pd, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE); }
  static migr_handle_map called(const ibv_context* c, std::uint32_t name) {
    migr_handle_map m{};
    m.context_fd = c->cmd_fd;
    m.old_handle = name;
    return m;
  }

  static constexpr std::uint32_t kFirst = 0x9100;
  ibv_context* second_;
  ibv_pd* second_pd_;
  ibv_mr *first_mr_, *second_mr_;
};

TEST_F(TwoDevices, AreToldApart) {
  migrd.freeze();
  migrd.appears();
  const std::vector<migr_handle_map> maps{called(context_, kContext), called(second_, kOtherContext), called(other_, 9)};
  for (int times = 0; times < 2; ++times) {  // it is asked again
    done(migrd.say_all(MIGR_MSG_REBIND, 0, maps));
    std::uint32_t in = 0;
    std::multiset<std::pair<std::uint32_t, std::uint32_t>> keys;
    std::set<std::uint32_t> contexts;
    for (const migr_key_map& k : migrd.records<migr_key_map>()) {
      if (k.vrkey == MIGR_KEY_CONTEXT) contexts.insert(in = k.prkey);
      else keys.insert({in, k.vrkey});
    }
    EXPECT_EQ(contexts, (std::set<std::uint32_t>{kContext, kOtherContext, 9}));
    EXPECT_EQ(keys.count({kContext, first_mr_->rkey}), 1u);
    EXPECT_EQ(keys.count({kOtherContext, second_mr_->rkey}), 1u);
    EXPECT_EQ(keys.count({9, target_->rkey}), 1u);
  }
  migrd.ask(MIGR_MSG_RESUME);
}

// The process at its other end has moved with it.
TEST_F(TwoDevices, OfATwinAreToldApart) {
  migr_handle_map qp = called(context_, 0), end = called(context_, kContext);
  qp.obj_type = MIGR_OBJ_QP;
  qp.vqpn = qp.pqpn = end.vqpn = to_->qp_num;
  qp.old_handle = qp.new_handle = to_->handle;
  std::memcpy(qp.peer, theirs_.data(), sizeof qp.peer);
  end.obj_type = MIGR_HANDLE_PEER;
  migrd.freeze();
  migrd.appears();
  done(migrd.say_all(MIGR_MSG_REBIND, 0, std::vector{qp, end}));
  done(migrd.say_all(MIGR_MSG_KEYS, 0, std::vector{context(kContext), key(kName, target_->rkey), context(kOtherContext), key(kName, kWrong)}));
  migrd.ask(MIGR_MSG_RESUME);
  EXPECT_EQ(write(kName), IBV_WC_SUCCESS);
}

TEST_F(TwoDevices, MayHaveWindowsOfOneName) {
  for (const int link : {0, 1}) model_next_key(link, 0, 0x9200);
  ibv_mw* const windows[] = {ibv_alloc_mw(pd_, IBV_MW_TYPE_1), ibv_alloc_mw(second_pd_, IBV_MW_TYPE_1)};
  EXPECT_EQ(windows[0]->rkey, windows[1]->rkey);
  for (ibv_mw* mw : windows) EXPECT_EQ(ibv_dealloc_mw(mw), 0);
}

/* ---- new keys that are names of before ----------------------------------------------------- */

/// More than anybody would try one by one.
class Names : public Events {
 protected:
  static constexpr unsigned kMany = 100;
  static constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND;

  void SetUp() override {
    static std::uint32_t next = 0x30000;  // names of a test before are not given either
    Events::SetUp();
    model_next_key(0, 0, first_ = next += 0x1000);
  }
  void TearDown() override {
    for (ibv_mr* mr : mrs_) EXPECT_EQ(ibv_dereg_mr(mr), 0);
    for (ibv_mw* mw : windows_) EXPECT_EQ(ibv_dealloc_mw(mw), 0);
    Events::TearDown();
  }
  ibv_mr* reg(ibv_pd* pd, void* at) { return mrs_.emplace_back(ibv_reg_mr(pd, at, 64, kAccess)); }
  /// To a device that gives those names to others.
  void move() const {
    model_number_anew(true);
    migrd.freeze();
    model_next_key(0, 0, first_ + 0x800);
    migrd.restored();
    model_number_anew(false);
    model_next_key(0, 0, first_);
  }
  void many_mrs() {
    for (unsigned i = 0; i < kMany; ++i) EXPECT_EQ(reg(pd_, memory_)->lkey >> 8, first_ + i);
  }
  bool is_name(std::uint32_t key) const { return key >> 8 >= first_ && key >> 8 < first_ + kMany; }

  std::uint32_t first_;
  std::vector<ibv_mr*> mrs_;
  std::vector<ibv_mw*> windows_;
  std::uint8_t memory_[64], big_[64];
};

TEST_F(Names, OfMemoryAreNotGivenToOther) {
  many_mrs();
  move();
  EXPECT_EQ(mrs_[3]->lkey >> 8, first_ + 3);
  const ibv_mr* mr = reg(pd_, big_);
  EXPECT_FALSE(is_name(mr->rkey)) << std::hex << mr->rkey;
  EXPECT_EQ(mr->lkey, mr->rkey);
  EXPECT_EQ(model_most_registered(big_), 1u);
  EXPECT_EQ(model_mrs(0, 0), kMany + 1) << "what was passed is given back";
}

TEST_F(Names, OfMemoryOfAnotherContextAreNotGivenEither) {
  many_mrs();
  ibv_context* const again = ibv_open_device(context_->device);
  ibv_pd* const pd = ibv_alloc_pd(again);
  move();
  const ibv_mr* mr = reg(pd, big_);
  EXPECT_FALSE(is_name(mr->rkey)) << std::hex << mr->rkey;
  EXPECT_EQ(ibv_dereg_mr(mrs_.back()), 0);
  mrs_.pop_back();
  ibv_dealloc_pd(pd);
  ibv_close_device(again);
}

TEST_F(Names, OfMemoryAreNotGivenToWindows) {
  many_mrs();
  move();
  const ibv_mw* mw = windows_.emplace_back(ibv_alloc_mw(pd_, IBV_MW_TYPE_1));
  EXPECT_FALSE(is_name(mw->rkey)) << std::hex << mw->rkey;
}

TEST_F(Names, OfWindowsAreNotGivenToOthersOrToMemory) {
  for (unsigned i = 0; i < kMany; ++i) EXPECT_EQ(windows_.emplace_back(ibv_alloc_mw(pd_, IBV_MW_TYPE_1))->rkey >> 8, first_ + i);
  move();
  const ibv_mw* mw = windows_.emplace_back(ibv_alloc_mw(pd_, IBV_MW_TYPE_1));
  EXPECT_FALSE(is_name(mw->rkey)) << std::hex << mw->rkey;
  model_next_key(0, 0, first_);
  const ibv_mr* mr = reg(pd_, big_);
  EXPECT_FALSE(is_name(mr->rkey)) << std::hex << mr->rkey;
}

// The other end was not done when this one was drained. Its message has ended the binding, which so cannot be ended for the new path.
TEST_F(Partner, WindowThatIsEndedLastIsNotBoundAgain) {
  ibv_cq* const cq = ibv_cq_ex_to_cq(ex_);
  const Ended window(to_, pd_, memory_, sizeof memory_);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  switch_path(false, [&] { window.end(from_, window.mw->rkey); });
  EXPECT_EQ(model_windows_bound(), 0u);
  window.expect_told(cq, window.mw->rkey);
  migrd.ask(MIGR_MSG_OLD_PATH);
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(model_windows_bound(), 0u);
  window.bind();
  EXPECT_EQ(model_windows_bound(), 1u);
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
}

/// What its application changes between SWITCH and the way back.
class Changed : public Partner {
 protected:
  static constexpr std::uint8_t kTimer = 9;

  void change(unsigned access) const {
    ibv_qp_attr to{};
    to.qp_access_flags = access;
    to.min_rnr_timer = kTimer;
    ASSERT_EQ(ibv_modify_qp(to_, &to, mask_), 0);
  }
  void goes_back_with(unsigned access) const {
    migrd.ask(MIGR_MSG_OLD_PATH);
    migrd.ask(MIGR_MSG_ROLLBACK);
    ibv_qp_attr now{};
    ibv_qp_init_attr init{};
    ASSERT_EQ(ibv_query_qp(to_, &now, IBV_QP_STATE | mask_, &init), 0);
    EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
    EXPECT_EQ(now.qp_access_flags, access);
    EXPECT_EQ(now.min_rnr_timer, mask_ & IBV_QP_MIN_RNR_TIMER ? kTimer : 0);
  }
  int mask_ = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER;
};

TEST_F(Changed, IsSoOnTheOldPath) {
  switch_path();
  change(IBV_ACCESS_REMOTE_READ);
  goes_back_with(IBV_ACCESS_REMOTE_READ);
  two(0);
  expect_two(0);
}

// What the drain marker needed, the application wants now.
TEST_F(Changed, RightToWriteIsNotTakenAway) {
  switch_path();
  change(IBV_ACCESS_REMOTE_WRITE);
  goes_back_with(IBV_ACCESS_REMOTE_WRITE);
}

TEST_F(Changed, IsSoOnAnOldPathThatWasCut) {
  switch_path(true);
  change(IBV_ACCESS_REMOTE_READ);
  goes_back_with(IBV_ACCESS_REMOTE_READ);
}

// Its old path is closed meanwhile.
TEST_F(Changed, IsSoOnAnUnreliableOldPath) {
  for (auto [qp, cq, pd] : {std::tuple(&to_, ibv_cq_ex_to_cq(ex_), pd_), std::tuple(&from_, other_cq_, other_pd_)}) {
    ASSERT_EQ(ibv_destroy_qp(*qp), 0);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64};
    init.qp_type = IBV_QPT_UC;
    ASSERT_NE(*qp = ibv_create_qp(pd, &init), nullptr);
  }
  connect(to_, from_, other_);
  connect(from_, to_, context_);
  mask_ = IBV_QP_ACCESS_FLAGS;  // the other is none of its attributes
  change(IBV_ACCESS_REMOTE_WRITE);
  switch_path();
  change(0);
  goes_back_with(0);
  two(0);
  expect_two(0);
}

/* ---- a QP that the application has in RTR, and brings to RTS after the migration ---------- */

/// `to_` answers, with and without the right that a drain marker needs.
class Responder : public Partner {
 protected:
  static constexpr std::uint32_t kPsn = 0x123;  // on that the two have agreed
  static constexpr std::uint8_t kTimeout = 9;

  void SetUp() override {
    Pollers::SetUp();
    to(from_, IBV_QPS_RESET);
    to(to_, IBV_QPS_RESET);
    answer(from_, to_, context_, kPsn);
    ASSERT_EQ(go_to_rts(from_, 0), 0);
    answer(to_, from_, other_);
  }
  static ibv_qp_attr asked(ibv_qp* qp) {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT, &init), 0);
    return attr;
  }
  void goes_to_rts_with(std::uint32_t psn) const {
    EXPECT_EQ(asked(to_).qp_state, IBV_QPS_RTR);
    EXPECT_EQ(to_->state, IBV_QPS_RTR);
    ASSERT_EQ(go_to_rts(to_, kPsn, kTimeout), 0);
    const ibv_qp_attr now = asked(to_);
    EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
    EXPECT_EQ(to_->state, IBV_QPS_RTS);
    EXPECT_EQ(now.sq_psn, psn);
    EXPECT_EQ(now.timeout, kTimeout) << "not what the application has said";
  }
  /// From to_ to from_, which knows of no migration.
  void write_back() {
    ibv_send_wr wr{}, *bad;
    wr.wr_id = 66;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    ASSERT_EQ(ibv_post_send(to_, &wr, &bad), 0);
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      ASSERT_LT(ms, kPatienceMs);
      usleep(1000);
    }
    EXPECT_EQ(ex_->wr_id, 66u);
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    ibv_end_poll(ex_);
  }
  void allow_writes() const {
    ibv_qp_attr attr{};
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    ASSERT_EQ(ibv_modify_qp(to_, &attr, IBV_QP_ACCESS_FLAGS), 0);
  }
};

TEST_F(Responder, OfAPartnerBeginsWithThePsnThatTheOtherEndWasTold) {
  switch_path();
  done(migrd.ask(MIGR_MSG_RESUME));
  goes_to_rts_with(spare_.psn);
}

TEST_F(Responder, WhoseMigrationIsUndoneAfterSwitchBeginsAsAgreed) {
  switch_path();
  migrd.ask(MIGR_MSG_OLD_PATH);
  migrd.ask(MIGR_MSG_ROLLBACK);
  goes_to_rts_with(kPsn);
  write_back();
}

TEST_F(Responder, ThatIsRestoredBeginsWithThePsnThatTheOtherEndWasTold) {
  allow_writes();
  migrd.freeze();
  migrd.restored();
  goes_to_rts_with(to_->qp_num & 0xffffff);
}

TEST_F(Responder, GoesToRtsAfterARollbackWithAllThatTheApplicationSays) {
  two(0);
  migrd.freeze();
  migrd.back();
  expect_two(0);
  ibv_sge into{reinterpret_cast<std::uintptr_t>(memory_), sizeof memory_, mr_->lkey};
  ibv_recv_wr receive{.wr_id = 100, .next = nullptr, .sg_list = &into, .num_sge = 1}, *bad;
  ASSERT_EQ(ibv_post_recv(to_, &receive, &bad), 0);  // is used by the next
  goes_to_rts_with(kPsn);
  send(1);
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  EXPECT_EQ(ex_->wr_id, 100u);
  EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
  ibv_end_poll(ex_);
  send(2);
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  EXPECT_EQ(ex_->wr_id, 101u);
  ibv_end_poll(ex_);
  write_back();
  EXPECT_FALSE(readable(context_->async_fd, kSoonMs)) << "of an ERR that was ours";
  migrd.freeze();
  migrd.restored();
  write_back();
}

// The record says RTS then.
TEST_F(Responder, ThatIsRestoredAfterARollbackGoesToRts) {
  migrd.freeze();
  migrd.back();
  migrd.freeze();
  migrd.restored();
  goes_to_rts_with(0);  // as the model's path was
}

TEST_F(Responder, WaitsForTheEndOfTheMigration) {
  migrd.ask(MIGR_MSG_SUSPEND);
  auto goes = std::async(std::launch::async, [this] { return go_to_rts(to_, kPsn); });
  EXPECT_EQ(goes.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  migrd.ask(MIGR_MSG_ROLLBACK);
  EXPECT_EQ(goes.get(), 0);
  write_back();
}

TEST_F(Responder, ThatWasCutBeginsWhereTheOtherEndAwaitsIt) {
  constexpr std::uint32_t kFarAhead = 1u << 22;
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  done(migrd.about(to_, MIGR_MSG_CUT));
  migr_qp_psn there{};
  there.vqpn = to_->qp_num;
  there.psn = kPsn;
  done(migrd.say(MIGR_MSG_SETTLE, 0, &there, sizeof there));
  migrd.ask(MIGR_MSG_ROLLBACK);
  goes_to_rts_with(kPsn + kFarAhead);
}

/* ---- programs that close all that they do not know ------------------------------------------ */

TEST_F(Partner, IsReachedThoughItClosesAllThatItDoesNotKnow) {
  close_all_that_is_unknown();
  migrd.freeze();
  migrd.back();
  two(0);
  expect_two(0);
}

/* ---- a path that goes to RTR once more ------------------------------------------------------- */

// What is flushed then is nobody's to see who polls just now.
TEST_F(Responder, WaitsForWhoPollsBeforeItGoesToRts) {
  migrd.freeze();
  migrd.back();
  auto polls = std::async(std::launch::async, [this] {
    ibv_wc wc;
    EXPECT_EQ(ibv_poll_cq(ibv_cq_ex_to_cq(ex_), 1, &wc), 0);  // the last one under the lock
    model_hold_poll();
    return ibv_poll_cq(ibv_cq_ex_to_cq(ex_), 1, &wc);
  });
  while (!model_holds_poll()) usleep(1000);
  auto goes = std::async(std::launch::async, [this] { return go_to_rts(to_, kPsn); });
  EXPECT_EQ(goes.wait_for(std::chrono::milliseconds(2 * kSoonMs)), std::future_status::timeout);
  model_let_poll_go();
  EXPECT_EQ(polls.get(), 0);
  EXPECT_EQ(goes.get(), 0);
  write_back();
}

#ifdef __x86_64__

/* ---- a post beside the way back from SWITCH -------------------------------------------------- */

/// A post of one thread, one instruction at a time, that stands still before the one that was chosen.
struct Stepped {
  std::atomic<bool> on = false, stands = false, goes_on = false;
  int stop_at = 0, step = 0;
  void begin(int at) {
    stands = goes_on = false;
    stop_at = at;
    step = 0;
  }
};
Stepped stepped;
constexpr greg_t kTrap = 1 << 8;  // in the flags: another signal after the next instruction

void on_step(int, siginfo_t*, void* at) {
  auto& flags = static_cast<ucontext_t*>(at)->uc_mcontext.gregs[REG_EFL];
  if (stepped.on && stepped.step++ != stepped.stop_at) return;
  flags &= ~kTrap;
  if (!stepped.on) return;
  stepped.stands = true;
  while (!stepped.goes_on) usleep(100);
}

// It has read where the new path is, which is no more by then.
TEST_F(Partner, WhoPostsAsItGoesBackPostsToTheOldPath) {
  constexpr int kDecided = 25;  // instructions, at least
  struct sigaction action {};
  action.sa_sigaction = on_step;
  action.sa_flags = SA_SIGINFO;
  ASSERT_EQ(sigaction(SIGTRAP, &action, nullptr), 0);
  int at = 0;
  for (bool stood = true; stood && at < 3 * kDecided; ++at) {
    switch_path();
    stepped.begin(at);
    auto posted = std::async(std::launch::async, [this, at] {
      ibv_send_wr wr{}, *bad;
      wr.wr_id = static_cast<std::uint64_t>(at);
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.send_flags = IBV_SEND_SIGNALED;
      stepped.on = true;
      asm volatile("pushfq; orq %0, (%%rsp); popfq" ::"i"(kTrap)
                   : "memory", "cc");
      const int err = ibv_post_send(to_, &wr, &bad);
      stepped.on = false;
      return err;
    });
    while (!stepped.stands && posted.wait_for(std::chrono::seconds(0)) != std::future_status::ready) usleep(100);
    stood = stepped.stands;
    auto back = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_ROLLBACK).status; });
    (void)back.wait_for(std::chrono::milliseconds(2 * kSoonMs));  // it may wait for a lock of who posts
    stepped.goes_on = true;
    ASSERT_EQ(back.get(), 0);
    ASSERT_EQ(posted.get(), 0) << "before instruction " << at;
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      ASSERT_LT(ms, 2000) << "before instruction " << at;
      usleep(1000);
    }
    EXPECT_EQ(ex_->wr_id, static_cast<std::uint64_t>(at));
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    ibv_end_poll(ex_);
  }
  EXPECT_GT(at, kDecided);
}

#endif

}  // namespace
