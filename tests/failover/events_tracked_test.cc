// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is posted is noted while memory is copied ahead, kept while the process is suspended, and drained: with and without an end. Part
// of events_test.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>

#include "frozen.h"
#include "model.h"
#include "uapi/migr.h"

namespace {

using namespace frozen;

/* ---- what NICs write to while memory is copied ahead -------------------------------------- */

/// `from_` writes to memory of `to_`'s end.
class Tracked : public Pollers {
 protected:
  static constexpr std::size_t kPage = 4096, kPages = 16;

  void SetUp() override {
    Pollers::SetUp();
    constexpr int kAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    for (auto* m : {&there_, &here_}) {
      m->bytes = static_cast<std::uint8_t*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      ASSERT_NE(m->bytes, MAP_FAILED);
      m->mr = ibv_reg_mr(m == &there_ ? pd_ : other_pd_, m->bytes, kPages * kPage, kAll);
    }
    ibv_destroy_qp(from_);
    ibv_qp_init_attr_ex init{};
    init.send_cq = init.recv_cq = other_cq_;
    init.cap = {.max_send_wr = 16, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64};
    init.qp_type = IBV_QPT_RC;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = other_pd_;
    init.send_ops_flags = send_ops();
    ASSERT_NE(from_ = ibv_create_qp_ex(other_, &init), nullptr);
    to(to_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
    try_for(14);  // 67 ms
    ibv_qp_attr open{};
    open.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    ASSERT_EQ(ibv_modify_qp(to_, &open, IBV_QP_ACCESS_FLAGS), 0);
  }
  void try_for(std::uint8_t timeout) const {
    ibv_qp_attr patient{};
    patient.timeout = timeout;
    patient.retry_cnt = 7;
    ASSERT_EQ(ibv_modify_qp(from_, &patient, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT), 0);
  }
  void TearDown() override {
    model_mend(0);
    for (auto* m : {&there_, &here_}) {
      ibv_dereg_mr(m->mr);
      munmap(m->bytes, kPages * kPage);
    }
    Pollers::TearDown();
  }
  virtual std::uint64_t send_ops() const { return IBV_QP_EX_WITH_RDMA_WRITE; }
  struct Memory {
    std::uint8_t* bytes;
    ibv_mr* mr;
    std::uint64_t at(std::size_t page) const { return reinterpret_cast<std::uintptr_t>(bytes) + page * kPage; }
    ibv_sge sge(std::size_t page, std::uint32_t length) const { return {at(page), length, mr->lkey}; }
  };

  int post(ibv_wr_opcode opcode, std::size_t page, std::uint32_t bytes = 8) {
    ibv_sge sge = here_.sge(page, bytes);
    ibv_send_wr wr{}, *bad;
    wr.wr_id = page;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) wr.wr.atomic = {.remote_addr = there_.at(page), .compare_add = 1, .swap = 0, .rkey = there_.mr->rkey};
    else wr.wr.rdma = {.remote_addr = there_.at(page), .rkey = there_.mr->rkey};
    return ibv_post_send(from_, &wr, &bad);
  }
  void write_in_session(std::size_t page) {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    end_session(ex, page);
  }
  void begin_write(ibv_qp_ex* ex, std::size_t page) {
    ex->wr_id = page;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, there_.mr->rkey, there_.at(page));
    const ibv_sge sge = here_.sge(page, 8);
    ibv_wr_set_sge_list(ex, 1, &sge);
  }
  void end_session(ibv_qp_ex* ex, std::size_t page) {
    begin_write(ex, page);
    EXPECT_EQ(ibv_wr_complete(ex), 0);
  }
  int receive(std::size_t page) {
    ibv_sge sge = there_.sge(page, 64);
    ibv_recv_wr wr{.wr_id = page, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(to_, &wr, &bad);
  }
  ibv_wc completes(std::uint64_t wr_id) const {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, wr_id);
    return wc;
  }
  void completes(std::initializer_list<std::uint64_t> wr_ids) const {
    for (const auto id : wr_ids) completes(id);
  }
  static migr_msg begin(const ibv_qp* qp) {
    const migr_msg reply = migrd.about(qp, MIGR_MSG_TRACK, qp ? MIGR_TRACK_THERE : MIGR_TRACK_HERE);
    if (reply.status) return reply;
    return migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_QUEUES);
  }
  /// Pages of `m` that were noted under a key.
  std::string taken(std::uint32_t key, const Memory& m) {
    EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, 0);
    return noted(key, m);
  }
  static std::string noted(std::uint32_t key, const Memory& m) {
    std::string out;
    for (const migr_nic_write& w : migrd.records<migr_nic_write>())
      if (w.key == key) out += std::to_string((w.start - m.at(0)) / kPage) + "+" + std::to_string(w.bytes / kPage) + " ";
    return out;
  }

  Memory there_{}, here_{};
};

TEST_F(Tracked, ByAPartnerAreItsWritesAndAtomics) {
  model_cut(0, 0, false);  // what is posted stays in the queue
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1), 0);
  ASSERT_EQ(post(IBV_WR_SEND, 0), 0);
  ASSERT_EQ(begin(from_).status, 0);
  ASSERT_EQ(receive(0), 0);
  model_mend(0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 3, 2 * kPage), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_READ, 6), 0);
  ASSERT_EQ(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8), 0);
  write_in_session(10);
  ibv_sge sges[] = {here_.sge(12, 8), here_.sge(14, 8)};
  ibv_send_wr list[2] = {}, *bad;
  for (std::size_t i = 0; i < 2; ++i) {
    list[i].wr_id = 12 + 2 * i;
    list[i].opcode = IBV_WR_RDMA_WRITE;
    list[i].send_flags = IBV_SEND_SIGNALED;
    list[i].sg_list = &sges[i];
    list[i].num_sge = 1;
    list[i].wr.rdma = {.remote_addr = there_.at(12 + 2 * i), .rkey = there_.mr->rkey};
  }
  list[0].next = &list[1];
  ASSERT_EQ(ibv_post_send(from_, list, &bad), 0);
  completes({1, 0, 3, 6, 8, 10, 12, 14});
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 15), 0) << "is kept, and goes elsewhere";
  EXPECT_EQ(taken(there_.mr->rkey, there_), "1+1 3+2 8+1 10+1 12+1 14+1 ");
  EXPECT_EQ(noted(here_.mr->lkey, here_), "") << "it is not this process that moves";
  for (const migr_nic_write& w : migrd.records<migr_nic_write>()) EXPECT_EQ(w.vqpn, from_->qp_num);
  migrd.ask(MIGR_MSG_ROLLBACK);
  completes({15});
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE) << "it has ended";
}

TEST_F(Tracked, OfWhoIsMovedAreItsReceivesAndReads) {
  ASSERT_EQ(receive(1), 0);
  ASSERT_EQ(begin(nullptr).status, 0);
  ASSERT_EQ(receive(3), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_READ, 6, kPage + 1), 0);
  ASSERT_EQ(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 9), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 11), 0);
  ASSERT_EQ(post(IBV_WR_SEND, 13), 0);
  completes({6, 9, 11, 13});
  EXPECT_EQ(taken(there_.mr->lkey, there_), "1+1 3+1 ");
  EXPECT_EQ(noted(here_.mr->lkey, here_), "6+2 9+1 ");
  migrd.ask(MIGR_MSG_ROLLBACK);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 2), 0);
  completes({2});
}

TEST_F(Tracked, ASessionThatWasOpenIsWaitedForAndNoted) {
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
  ibv_wr_start(ex);
  ASSERT_EQ(migrd.about(from_, MIGR_MSG_TRACK, MIGR_TRACK_THERE).status, 0);
  model_cut(0, 0, false);
  auto queues = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_QUEUES).status; });
  EXPECT_EQ(queues.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  end_session(ex, 5);
  EXPECT_EQ(queues.get(), 0);
  model_mend(0);
  write_in_session(7);
  completes({5, 7});
  EXPECT_EQ(taken(there_.mr->rkey, there_), "5+1 7+1 ");
}

TEST_F(Tracked, ASessionThatIsJustCompletingIsWaitedFor) {
  std::promise<void> begun, tracked;
  auto completing = std::async(std::launch::async, [&] {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begun.set_value();
    tracked.get_future().wait();
    end_session(ex, 5);
  });
  begun.get_future().wait();
  ASSERT_EQ(migrd.about(from_, MIGR_MSG_TRACK, MIGR_TRACK_THERE).status, 0);
  model_cut(0, 0, false);
  model_hold_sessions(true);
  tracked.set_value();
  EXPECT_EQ(completing.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  auto queues = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_QUEUES).status; });
  EXPECT_EQ(queues.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout);
  model_hold_sessions(false);
  completing.get();
  EXPECT_EQ(queues.get(), 0);
  model_mend(0);
  completes({5});
  EXPECT_EQ(taken(there_.mr->rkey, there_), "5+1 ");
}

TEST_F(Tracked, ASessionThatDoesNotEndEndsIt) {
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
  ibv_wr_start(ex);
  EXPECT_EQ(begin(from_).status, ETIMEDOUT);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
  end_session(ex, 5);
  write_in_session(6);  // nobody waits
  completes({5, 6});
}

TEST_F(Tracked, WithAQpThatIsGoneItIsNotAll) {
  ASSERT_EQ(begin(from_).status, 0);
  ASSERT_EQ(ibv_destroy_qp(from_), 0);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
  std::swap(pd_, other_pd_);
  from_ = make_qp(other_cq_);
  std::swap(pd_, other_pd_);
}

// Nor what is not reliable in another way.
TEST_F(Tracked, DatagramsAreNot) {
  for (const ibv_qp_type type : {IBV_QPT_UD, IBV_QPT_UC}) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_[0];
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = type;
    ibv_qp* unreliable = ibv_create_qp(pd_, &init);
    ASSERT_NE(unreliable, nullptr);
    EXPECT_EQ(begin(nullptr).status, EOPNOTSUPP) << type;
    EXPECT_EQ(begin(from_).status, 0) << "it is not that QP which writes to others' memory";
    EXPECT_EQ(ibv_destroy_qp(unreliable), 0);
  }
}

/// What partners write to through them bears keys that no MR has.
TEST_F(Tracked, MemoryWindowsAreNot) {
  ASSERT_EQ(begin(nullptr).status, 0);
  ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  ASSERT_NE(mw, nullptr);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
  EXPECT_EQ(begin(nullptr).status, EOPNOTSUPP);
  EXPECT_EQ(begin(from_).status, 0) << "those of a partner are his own";
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, 0);
  EXPECT_EQ(ibv_dealloc_mw(mw), 0);
}

/* ---- memory that is registered, or given back, while memory is copied ahead ------------------- */

class CopiedAhead : public Pollers {
 protected:
  static constexpr std::size_t kPage = 4096, kPages = 6;

  void SetUp() override {
    Pollers::SetUp();
    pages_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(pages_, MAP_FAILED);
    clear();
    *page(0) = 1;
    marks_ = entry(0) & kMarked;
    copied_ahead();
  }
  void TearDown() override {
    migrd.ask(MIGR_MSG_ROLLBACK);
    munmap(pages_, kPages * kPage);
    Pollers::TearDown();
  }
  /// All of it was, and whatever was written before is not marked any more: each page is there, and holds what it held.
  void copied_ahead() {
    for (std::size_t i = 0; i < kPages; ++i) (void)*page(i);
    clear();
    EXPECT_EQ(migrd.try_to(MIGR_MSG_DESCRIBE, MIGR_DESCRIBE_MOVE).status, ENODEV) << "migr.ko is not there";
  }
  ibv_mr* reg(int access) { return ibv_reg_mr(pd_, pages_, kPages * kPage, access); }
  /// As a write does it, which changes nothing.
  bool is_touched(std::size_t i) const { return entry(i) & (marks_ ? kMarked : kOwn); }
  int freeze() {
    migrd.ask(MIGR_MSG_SUSPEND);
    migrd.ask(MIGR_MSG_DRAIN, 1000);
    const int status = migrd.try_to(MIGR_MSG_FREEZE).status;
    if (status) return migrd.ask(MIGR_MSG_ROLLBACK), status;
    migrd.hung_up();
    return migrd.back(), 0;
  }
  volatile char* page(std::size_t i) const { return pages_ + i * kPage; }

 private:
  static constexpr std::uint64_t kMarked = 1ull << 55, kOwn = 1ull << 56;  // the second: not the page of zeros, which is everybody's
  static void clear() {
    const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    EXPECT_EQ(write(fd, "4", 1), 1);
    close(fd);
  }
  std::uint64_t entry(std::size_t i) const {
    std::uint64_t out = 0;
    const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(pread(fd, &out, sizeof out, static_cast<off_t>(reinterpret_cast<std::uintptr_t>(page(i)) / kPage * sizeof out)), static_cast<ssize_t>(sizeof out));
    close(fd);
    return out;
  }
  char* pages_ = nullptr;
  bool marks_ = false;  // the kernel does
};

TEST_F(CopiedAhead, MemoryIsTouchedAsItIsGivenBackAlsoBehindAHole) {
  ibv_mr* const mr = reg(IBV_ACCESS_LOCAL_WRITE);
  munmap(const_cast<char*>(page(2)), kPage);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  for (const std::size_t i : {1, 3, 5}) EXPECT_TRUE(is_touched(i)) << i;
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0);
}

// As of a program that keeps addresses for itself.
TEST_F(CopiedAhead, WhatHoldsNothingNeedsNoTouch) {
  ibv_mr* const mr = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_EQ(mmap(const_cast<char*>(page(2)), kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), page(2));
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  for (const std::size_t i : {1, 3, 5}) EXPECT_TRUE(is_touched(i)) << i;
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0);
}

TEST_F(CopiedAhead, WhatCannotBeTouchedAnyMoreIsCopiedInTheStop) {
  ibv_mr* mr = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_READ), 0);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_EQ(freeze(), 0) << "nothing was copied ahead";
  copied_ahead();
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_READ | PROT_WRITE), 0);
  mr = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_NONE), 0);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), ESTALE);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0) << "that was another migration";
}

// The kernel gives it pages of its own then, which it does not mark.
TEST_F(CopiedAhead, MemoryThatIsRegisteredToBeReadOnlyIsTouched) {
  ibv_mr* const written = reg(IBV_ACCESS_LOCAL_WRITE);
  EXPECT_FALSE(is_touched(1)) << "the kernel has marked it, and the model is none";
  ibv_mr* const read = reg(IBV_ACCESS_REMOTE_READ);
  for (std::size_t i = 0; i < kPages; ++i) EXPECT_TRUE(is_touched(i)) << i;
  EXPECT_EQ(ibv_dereg_mr(written), 0);
  EXPECT_EQ(ibv_dereg_mr(read), 0);
  EXPECT_EQ(mprotect(const_cast<char*>(page(2)), kPage, PROT_READ), 0);
  copied_ahead();
  EXPECT_EQ(ibv_dereg_mr(reg(IBV_ACCESS_REMOTE_READ)), 0);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), ESTALE);
}

// Nobody has to have it dumped, or its file written, for that.
TEST_F(CopiedAhead, SharedMemoryThatIsOnlyReadIsLeftAlone) {
  ASSERT_EQ(mmap(const_cast<char*>(page(0)), kPages * kPage, PROT_READ, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0), page(0));
  copied_ahead();
  EXPECT_EQ(ibv_dereg_mr(reg(IBV_ACCESS_REMOTE_READ)), 0);
  migrd.say(MIGR_MSG_WRITTEN, 0, nullptr, 0);
  EXPECT_EQ(freeze(), 0);
}

/// `to_` receives from an SRQ.
class TrackedSrq : public Tracked {
 protected:
  void SetUp() override {
    Tracked::SetUp();
    ibv_srq_init_attr init{};
    init.attr.max_wr = 8;
    init.attr.max_sge = 1;
    ASSERT_NE(srq_ = ibv_create_srq(pd_, &init), nullptr);
    ASSERT_EQ(ibv_destroy_qp(to_), 0);
    ibv_qp_init_attr of_qp{};
    of_qp.send_cq = of_qp.recv_cq = cq_[0];
    of_qp.srq = srq_;
    of_qp.cap = {.max_send_wr = 4, .max_recv_wr = 0, .max_send_sge = 1, .max_recv_sge = 0, .max_inline_data = 0};
    of_qp.qp_type = IBV_QPT_RC;
    ASSERT_NE(to_ = ibv_create_qp(pd_, &of_qp), nullptr);
    to(from_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
  }
  void TearDown() override {
    EXPECT_EQ(ibv_destroy_qp(to_), 0);
    EXPECT_EQ(ibv_destroy_srq(srq_), 0);
    to_ = make_qp(cq_[0]);
    Tracked::TearDown();
  }
  int receive(std::size_t page) {
    ibv_sge sge = there_.sge(page, 64);
    ibv_recv_wr wr{.wr_id = page, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_srq_recv(srq_, &wr, &bad);
  }
  void comes_into(std::size_t page) {
    ASSERT_EQ(post(IBV_WR_SEND, page), 0);
    completes({page});
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(cq_[0], 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, page);
  }
  ibv_srq* srq_ = nullptr;
};

TEST_F(TrackedSrq, IsNotWithoutAPolicy) { EXPECT_EQ(begin(nullptr).status, EOPNOTSUPP); }

/// Run with MIGR_LINKS.
class TrackedSrqOfAPolicy : public TrackedSrq {
 protected:
  void SetUp() override {
    if (!std::getenv("MIGR_LINKS")) GTEST_SKIP() << "a process of its own runs these";
    TrackedSrq::SetUp();
  }
  void TearDown() override {
    if (srq_) TrackedSrq::TearDown();
  }
};

TEST_F(TrackedSrqOfAPolicy, AreTheReceivesThatWereNotUsedAndThoseThatComeLater) {
  for (const std::size_t page : {1, 3, 5}) ASSERT_EQ(receive(page), 0);
  comes_into(1);
  ASSERT_EQ(begin(nullptr).status, 0);
  ASSERT_EQ(receive(8), 0);
  comes_into(3);
  EXPECT_EQ(taken(there_.mr->lkey, there_), "3+1 5+1 8+1 ");
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE) << "it has ended";
  ASSERT_EQ(receive(10), 0);
  comes_into(5);
}

TEST_F(TrackedSrqOfAPolicy, ThatIsGoneItIsNotAll) {
  ibv_srq_init_attr init{};
  init.attr.max_wr = 1;
  init.attr.max_sge = 1;
  ibv_srq* const another = ibv_create_srq(pd_, &init);
  ASSERT_NE(another, nullptr);
  ASSERT_EQ(begin(nullptr).status, 0);
  EXPECT_EQ(ibv_destroy_srq(another), 0);
  EXPECT_EQ(migrd.try_to(MIGR_MSG_TRACK, MIGR_TRACK_TAKE).status, ESTALE);
}

/* ---- sessions of a process that was migrated and gets its backup links again --------------- */

class SessionOfAPolicy : public Pollers {
 protected:
  void SetUp() override {
    if (!std::getenv("MIGR_LINKS")) GTEST_SKIP() << "a process of its own runs these";
    Pollers::SetUp();
    made_ = true;
    ASSERT_EQ(ibv_destroy_qp(to_), 0);
    ibv_qp_init_attr_ex init{};
    init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(ex_);
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = pd_;
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
    ASSERT_NE(to_ = ibv_create_qp_ex(context_, &init), nullptr);
    to(from_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
  }
  void TearDown() override {
    if (made_) Pollers::TearDown();
  }
  static int end(ibv_qp_ex* session, std::uint64_t wr_id) {
    session->wr_id = wr_id;
    session->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(session, 0, 0);
    return ibv_wr_complete(session);
  }
  void completes(std::uint64_t wr_id) {
    ibv_poll_cq_attr attr{};
    for (int ms = 0; ibv_start_poll(ex_, &attr); ++ms) {
      ASSERT_LT(ms, kPatienceMs);
      usleep(1000);
    }
    EXPECT_EQ(ex_->wr_id, wr_id);
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    ibv_end_poll(ex_);
  }
  template <class Condition>
  static void wait_for(Condition&& condition) {
    for (int ms = 0; !condition(); ++ms) {
      ASSERT_LT(ms, kPatienceMs);
      usleep(1000);
    }
  }
  bool made_ = false;
};

// Whatever its family: the thread of the links may poll it.
TEST_F(SessionOfAPolicy, IsNotOfOneThread) {
  ibv_cq_init_attr_ex attr{};
  attr.cqe = 1;
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
  model_make_foreign(0, 0, true);
  ibv_cq_ex* const cq = ibv_create_cq_ex(context_, &attr);
  EXPECT_EQ(model_cq_flags(), 0u);
  EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
  model_make_foreign(0, 0, false);
}

// Where its names are not the device's each post takes the lock from then on, and sessions are kept.
TEST_F(SessionOfAPolicy, OnThePathIsNotMixedWithAKeptOne) {
  ASSERT_EQ(migrd.try_to(MIGR_MSG_DESCRIBE, MIGR_DESCRIBE_MOVE).status, ENODEV) << "it leaves its links; migr.ko is not there";
  migrd.freeze();
  model_hold_registrations(1, true);
  migrd.restored();
  wait_for([] { return model_registrations_waiting() == 1; });
  ibv_qp_ex* const session = ibv_qp_to_qp_ex(to_);
  ibv_wr_start(session);
  model_hold_registrations(1, false);
  wait_for([] { return model_mrs(1, 0) == model_mrs(0, 0); });
  usleep(2 * kSoonMs * 1000);  // its backup is next
  static std::atomic<bool> begun = false, first_over = false;
  std::thread other([session] {
    ibv_wr_start(session);
    begun = true;
    while (!first_over) usleep(1000);
    EXPECT_EQ(end(session, 8), 0);
  });
  usleep(kSoonMs * 1000);
  if (begun) {
    other.detach();  // neither can end
    FAIL() << "two sessions are open at a time";
  }
  EXPECT_EQ(end(session, 7), 0);
  first_over = true;
  other.join();
  completes(7);
  completes(8);
}

/* ---- programs that close all that they do not know ------------------------------------------ */

TEST_F(SessionOfAPolicy, GoesOnThoughAllThatIsUnknownIsClosed) {
  close_all_that_is_unknown();
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  usleep(400'000);
  getrusage(RUSAGE_SELF, &after);
  const auto ms = [](const timeval& t) { return t.tv_sec * 1000 + t.tv_usec / 1000; };
  EXPECT_LT(ms(after.ru_utime) + ms(after.ru_stime) - ms(before.ru_utime) - ms(before.ru_stime), 200) << "a thread of the library's spins";
}

/// Nothing of it can be executed for longer than anybody waits.
TEST_F(Tracked, ThatIsKeptAndFindsNoRoomEndsWithTheConnection) {
  constexpr std::size_t kCap = 16, kRing = 31;
  model_forget_writes();
  try_for(22);  // 17 s
  model_cut(0, 0, false);
  for (std::size_t i = 0; i < kRing; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1), ENOMEM);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_SUSPEND).status, 0);
  for (std::size_t i = 0; i < kCap; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 2), 0);
  migrd.ask(MIGR_MSG_ROLLBACK);
  model_mend(0);
  for (std::size_t i = 0; i < kRing + kCap; ++i) {
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    ASSERT_EQ(wc.wr_id, i < kRing ? 1u : 2u) << i;
    ASSERT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR) << i;
  }
  EXPECT_EQ(model_writes_at(there_.bytes + 2 * kPage), 0u);
}

TEST_F(Tracked, ThatOnlyAnswersRefusesToSendWhileItIsSuspendedToo) {
  to(from_, IBV_QPS_RESET);
  answer(from_, to_, context_);
  const auto session = [this] {
    ibv_qp_ex* const ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begin_write(ex, 1);
    return ibv_wr_complete(ex);
  };
  for (const bool suspended : {false, true}) {
    if (suspended) migrd.ask(MIGR_MSG_SUSPEND), migrd.ask(MIGR_MSG_DRAIN, 1000);
    EXPECT_EQ(post(IBV_WR_RDMA_WRITE, 1), EINVAL) << suspended;
    EXPECT_EQ(session(), EINVAL) << suspended;
  }
  migrd.ask(MIGR_MSG_ROLLBACK);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(ibv_query_qp(from_, &attr, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTR);
}

/* ---- a drain that does not end, and what it leaves ------------------------------------------ */

void drains_in_vain(const ibv_qp* qp = nullptr) {
  ASSERT_EQ(migrd.about(qp, MIGR_MSG_SUSPEND).status, 0);
  ASSERT_EQ(migrd.about(qp, MIGR_MSG_DRAIN, 1).status, ETIMEDOUT);
}

void cut_and_settle(const ibv_qp* one, const ibv_qp* other) {
  std::uint32_t psns[2];
  for (int i = 0; i < 2; ++i) {
    const migr_msg cut = migrd.about(i ? other : one, MIGR_MSG_CUT);
    ASSERT_EQ(cut.status, 0) << cut.text;
    psns[i] = migrd.record<migr_qp_psn>().psn;
  }
  for (int i = 0; i < 2; ++i) {
    const migr_qp_psn there{.ctx_id = 0, .vqpn = (i ? other : one)->qp_num, .psn = psns[!i], .reserved = 0};
    const migr_msg settled = migrd.say(MIGR_MSG_SETTLE, 0, &there, sizeof there);
    ASSERT_EQ(settled.status, 0) << settled.text;
  }
}

void post_message(ibv_qp* qp, std::uint64_t wr_id) {
  ibv_send_wr wr{}, *bad;
  wr.wr_id = wr_id;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  ASSERT_EQ(ibv_post_send(qp, &wr, &bad), 0);
}

/// `from_` sends, and `to_` has no receive for it until it is awaited.
class Unready : public Pollers {
 protected:
  void await(std::uint64_t wr_id) {
    ibv_recv_wr wr{.wr_id = 100 + wr_id, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad;
    ASSERT_EQ(ibv_post_recv(to_, &wr, &bad), 0);
    ibv_wc wc{};
    for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, wr_id);
    ibv_poll_cq_attr attr{};
    ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
    EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
    EXPECT_EQ(ex_->wr_id, 100 + wr_id);
    EXPECT_EQ(ibv_next_poll(ex_), ENOENT);
    ibv_end_poll(ex_);
  }
};

// `to_` allows no writes, and its end has gone back as well.
TEST_F(Unready, ItsMarkerComesWhenAllHasGoneBack) {
  post_message(from_, 1);
  drains_in_vain();
  migrd.ask(MIGR_MSG_ROLLBACK);
  ibv_qp_attr none{};
  ASSERT_EQ(ibv_modify_qp(to_, &none, IBV_QP_ACCESS_FLAGS), 0);
  await(1);
  post_message(from_, 2);  // behind it
  await(2);
}

// In the queue lie two markers then.
TEST_F(Unready, TheSecondTimeItIsCutAndNothingIsLost) {
  post_message(from_, 1);
  drains_in_vain();
  migrd.ask(MIGR_MSG_ROLLBACK);
  drains_in_vain();
  cut_and_settle(from_, to_);
  migrd.ask(MIGR_MSG_ROLLBACK);
  await(1);
  post_message(from_, 2);
  await(2);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(other_cq_, 1, &wc), 0) << wc.wr_id << " completes, which is nobody's";
}

/// The CQ of `from_` holds as much as its application may have in flight, or less.
class Tight : public Tracked {
 protected:
  static constexpr int kEntries = 4;
  static constexpr std::uint32_t kNumber = 0x1000;  // of none at the other end

  void SetUp() override {
    Tracked::SetUp();
    ASSERT_EQ(ibv_destroy_qp(from_), 0);
    model_next_qpn(0, 1, kNumber);
    ASSERT_EQ(ibv_destroy_cq(other_cq_), 0);
    ASSERT_NE(other_cq_ = ibv_create_cq(other_, kEntries, nullptr, nullptr, 0), nullptr);
    from_ = make_there();
    to(to_, IBV_QPS_RESET);
    connect(to_, from_, other_);
    connect(from_, to_, context_);
    try_for(17);  // 0.5 s
  }
  ibv_qp* make_there() {
    std::swap(pd_, other_pd_);
    ibv_qp* const qp = make_qp(other_cq_);
    std::swap(pd_, other_pd_);
    return qp;
  }
  /// By receives alone.
  static void fill(ibv_qp* qp) {
    ibv_recv_wr wr{}, *bad;
    for (int i = 0; i < kEntries; ++i) ASSERT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
  }
  static void drains(const ibv_qp* qp) {
    constexpr unsigned kLimitMs = 500;
    ASSERT_EQ(migrd.about(qp, MIGR_MSG_SUSPEND).status, 0);
    const migr_msg drained = migrd.about(qp, MIGR_MSG_DRAIN, kLimitMs);
    EXPECT_EQ(drained.status, 0) << drained.text;
    migrd.ask(MIGR_MSG_ROLLBACK);
  }
};

TEST_F(Tight, MarkersDoNotOverrunWhatIsFull) {
  ibv_qp* const idle = make_there();
  connect(idle, to_, context_);
  model_cut(0, 0, true);
  for (std::size_t page = 1; page <= kEntries; ++page) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, page), 0);
  for (int ms = 0; !model_writes_at(there_.bytes + kEntries * kPage); ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    usleep(1000);
  }
  drains_in_vain();
  migrd.ask(MIGR_MSG_ROLLBACK);
  model_mend(0);
  usleep(kSoonMs * 1000);  // all may complete that can: more, and the device aborts
  completes({1, 2, 3, 4});
  model_forget_writes();
  ASSERT_EQ(ibv_destroy_qp(idle), 0);
  drains(from_);
}

TEST_F(Tight, MarkersOfQpsThatAreGoneAreNotAwaited) {
  fill(from_);
  for (int i = 0; i < 2; ++i) {
    ibv_qp* const stuck = make_there();
    connect(stuck, to_, context_);
    post_message(stuck, 1);
    drains_in_vain(stuck);
    migrd.ask(MIGR_MSG_ROLLBACK);
    ASSERT_EQ(ibv_destroy_qp(stuck), 0);
  }
  drains(from_);
}

TEST_F(Tight, MarkersOfAQpThatWasResetAreNotAwaited) {
  fill(from_);
  ibv_qp* const stuck = make_there();
  for (int i = 0; i < 2; ++i) {
    connect(stuck, to_, context_);
    post_message(stuck, 1);
    drains_in_vain(stuck);
    migrd.ask(MIGR_MSG_ROLLBACK);
    to(stuck, IBV_QPS_RESET);
  }
  drains(from_);
  ASSERT_EQ(ibv_destroy_qp(stuck), 0);
}

// A READ that is posted once more in the name of itself and of what is behind it.
TEST_F(Tight, WhatIsReplayedByAQpThatIsGoneIsNotAwaited) {
  model_cut(0, 0, true);
  ASSERT_EQ(post(IBV_WR_RDMA_READ, 1), 0);
  ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 2), 0);
  for (int ms = 0; !model_writes_at(there_.bytes + 2 * kPage); ++ms) {
    ASSERT_LT(ms, kPatienceMs);
    usleep(1000);
  }
  drains_in_vain();
  cut_and_settle(from_, to_);
  migrd.ask(MIGR_MSG_ROLLBACK);
  ASSERT_EQ(ibv_destroy_qp(from_), 0);
  model_mend(0);
  model_forget_writes();
  from_ = make_there();
  connect(from_, to_, context_);
  fill(from_);
  drains(from_);
}

/* ---- atomic writes, which only sessions post ----------------------------------------------- */

class AtomicWrites : public Tracked {
 protected:
  std::uint64_t send_ops() const override { return Tracked::send_ops() | IBV_QP_EX_WITH_ATOMIC_WRITE; }
  /// Between two writes. What is behind `data` is copied at once.
  void write_word(std::uint64_t word) {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begin_write(ex, 1);
    begin_word(ex, word);
    word = 0;
    end_session(ex, 3);
  }
  void write_word_only(std::uint64_t word) {
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(from_);
    ibv_wr_start(ex);
    begin_word(ex, word);
    EXPECT_EQ(ibv_wr_complete(ex), 0);
  }
  void begin_word(ibv_qp_ex* ex, const std::uint64_t& word) {
    ex->wr_id = 2;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_atomic_write(ex, there_.mr->rkey, there_.at(2), &word);
  }
  void has_written(std::uint64_t word) {
    EXPECT_EQ(completes(1).opcode, IBV_WC_RDMA_WRITE);
    EXPECT_EQ(completes(2).opcode, IBV_WC_ATOMIC_WRITE);
    EXPECT_EQ(completes(3).opcode, IBV_WC_RDMA_WRITE);
    EXPECT_EQ(std::memcmp(there_.bytes + 2 * kPage, &word, sizeof word), 0);
  }
};

TEST_F(AtomicWrites, AreNotedWhileMemoryIsCopiedAhead) {
  ASSERT_EQ(begin(from_).status, 0);
  write_word(1);
  has_written(1);
  EXPECT_EQ(taken(there_.mr->rkey, there_), "1+3 ");
}

TEST_F(AtomicWrites, ThatAreInTheQueueAreNotedWhenThatBegins) {
  model_cut(0, 0, false);
  write_word(2);
  ASSERT_EQ(begin(from_).status, 0);
  model_mend(0);
  has_written(2);
  EXPECT_EQ(taken(there_.mr->rkey, there_), "1+3 ");
}

TEST_F(AtomicWrites, ThatAreKeptGoOnInOrder) {
  constexpr std::uint64_t kWord = 0x0123456789abcdef;
  write_word(kWord);
  has_written(kWord);
  migrd.ask(MIGR_MSG_SUSPEND);
  migrd.ask(MIGR_MSG_DRAIN, 5000);
  write_word(~kWord);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(other_cq_, 1, &wc), 0);
  migrd.ask(MIGR_MSG_ROLLBACK);
  has_written(~kWord);
}

// More is kept than the path has room for: what is posted makes room as it completes.
TEST_F(AtomicWrites, ThatAreKeptWaitForRoom) {
  constexpr std::uint64_t kWord = 0x0123456789abcdef;
  constexpr int kCap = 16, kRing = 31;  // that are asked for; that the device gives for it, of which a drain marker takes one
  try_for(17);                          // 0.5 s
  model_cut(0, 0, false);
  for (int i = 0; i < kCap; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 4), 0);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_SUSPEND).status, 0);
  EXPECT_EQ(migrd.about(from_, MIGR_MSG_DRAIN, 1).status, ETIMEDOUT);
  for (int i = kCap + 1; i < kRing; ++i) ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 4), 0);
  write_word_only(kWord);
  auto back = std::async(std::launch::async, [] { return migrd.try_to(MIGR_MSG_ROLLBACK).status; });
  EXPECT_EQ(back.wait_for(std::chrono::milliseconds(kSoonMs)), std::future_status::timeout) << "it was not full";
  model_mend(0);
  EXPECT_EQ(back.get(), 0);
  for (int i = 1; i < kRing; ++i) ASSERT_EQ(completes(4).wr_id, 4u);
  EXPECT_EQ(completes(2).opcode, IBV_WC_ATOMIC_WRITE);
  EXPECT_EQ(std::memcmp(there_.bytes + 2 * kPage, &kWord, sizeof kWord), 0);
}

}  // namespace
