// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Every verb that names an object, under libmigr: the provider is given its own, the application sees only its own. Runs with
// LD_PRELOAD=libmigr.so over recorder.cc; MIGR_FORCE_SWITCHED decides which path.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <future>

#include <infiniband/efadv.h>
#include <infiniband/mlx5dv.h>

#include "migr/proc_wire.h"
#include "recorder.h"

namespace {

using namespace std::chrono_literals;

/// The other end of the library's connection.
class Migrd {
 public:
  static Migrd& get() {
    static Migrd one;
    return one;
  }
  /// What DESCRIBE is refused with.
  std::string refusal() {
    const migr_msg reply = ask(MIGR_MSG_DESCRIBE);
    return reply.status == EOPNOTSUPP ? reply.text : "status " + std::to_string(reply.status) + ": " + reply.text;
  }
  /// @return the reply; -1 as its status: there was none
  migr_msg ask(migr_msg_type type, std::uint64_t arg = 0) {
    migr_msg none{};
    none.status = -1;
    if (fd_ < 0) {
      fd_ = accept(listener_, nullptr, nullptr);
      const migr_msg hello = receive();
      if (hello.type != MIGR_MSG_HELLO) return none;
    }
    migr_msg ask{};
    ask.version = MIGR_PROC_VERSION;
    ask.type = static_cast<std::uint16_t>(type);
    ask.seq = ++seq_;
    ask.arg = arg;
    ask.migration = 7;
    if (send(fd_, &ask, sizeof ask, MSG_NOSIGNAL) != sizeof ask) return none;
    const migr_msg reply = receive();
    return reply.type == (type | MIGR_REPLY) && reply.seq == seq_ ? reply : none;
  }

 private:
  Migrd() : listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::snprintf(at.sun_path, sizeof at.sun_path, "/tmp/objects_test.%d", getpid());
    path_ = at.sun_path;
    if (bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at) || listen(listener_, 1)) std::abort();
    setenv("MIGR_PROC_SOCKET", at.sun_path, 1);
  }
  ~Migrd() { unlink(path_.c_str()); }
  migr_msg receive() {
    std::vector<char> packet(1 << 20);
    migr_msg m{};
    pollfd p{.fd = fd_, .events = POLLIN, .revents = 0};
    if (poll(&p, 1, 10'000) == 1 && recv(fd_, packet.data(), packet.size(), 0) >= static_cast<ssize_t>(sizeof m)) std::memcpy(&m, packet.data(), sizeof m);
    return m;
  }
  const int listener_;
  int fd_ = -1;
  std::uint32_t seq_ = 0;
  std::string path_;
};
Migrd& migrd = Migrd::get();  // before the first device is opened

[[noreturn]] void stuck() {
  ADD_FAILURE() << "stuck";
  std::fflush(nullptr);
  std::_Exit(1);  // a future would wait for ever
}

// The first of all: nothing is in use before it. The child counts no device that is being opened, and nobody has the lock.
TEST(Fork, WhileTheFirstDeviceIsBeingOpenedMakesAChildThatCanBeMigrated) {
  static std::promise<void> reached, go;
  recorder_meanwhile = [] {
    recorder_meanwhile = nullptr;
    reached.set_value();
    go.get_future().wait();
  };
  auto opened = std::async(std::launch::async, [] { return ibv_open_device(ibv_get_device_list(nullptr)[0]); });
  if (reached.get_future().wait_for(10s) != std::future_status::ready) stuck();
  const pid_t child = fork();
  if (!child) {
    alarm(20);
    (void)ibv_open_device(ibv_get_device_list(nullptr)[0]);
    const int status = migrd.ask(MIGR_MSG_DESCRIBE).status;
    std::_Exit(status == EAGAIN || status == -1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  go.set_value();
  ibv_close_device(opened.get());
}

class Objects : public ::testing::Test {
 protected:
  void SetUp() override {
    context_ = ibv_open_device(ibv_get_device_list(nullptr)[0]);
    ASSERT_NE(context_, nullptr);
    pd_ = ibv_alloc_pd(context_);
    mr_ = ibv_reg_mr(pd_, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE);
    real_mr_ = recorder_mr;
    cq_ = ibv_create_cq(context_, 10, this, nullptr, 0);
    real_cq_ = recorder_cq;
    ASSERT_NE(cq_, real_cq_) << "libmigr is not in front: LD_PRELOAD";
  }
  void TearDown() override {
    EXPECT_EQ(ibv_destroy_cq(cq_), 0);
    EXPECT_EQ(recorder_object, real_cq_);
    EXPECT_EQ(ibv_dereg_mr(mr_), 0);
    EXPECT_EQ(recorder_object, real_mr_);
    ibv_dealloc_pd(pd_);
    ibv_close_device(context_);
  }

  ibv_srq* make_srq() {
    ibv_srq_init_attr attr{};
    attr.srq_context = &attr;
    ibv_srq* srq = ibv_create_srq(pd_, &attr);
    EXPECT_EQ(attr.attr.max_wr, 99u);  // what the device gave
    return srq;
  }
  ibv_qp* make_qp(ibv_srq* srq = nullptr) {
    ibv_qp_init_attr attr{};
    attr.send_cq = attr.recv_cq = cq_;
    attr.srq = srq;
    attr.qp_context = this;
    attr.cap.max_send_wr = attr.cap.max_recv_wr = 8;
    return ibv_create_qp(pd_, &attr);
  }
  void post_one(ibv_qp* qp) const {
    ibv_sge one = sge();
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_SEND;
    wr.sg_list = &one;
    wr.num_sge = 1;
    EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
    EXPECT_STREQ(recorder_call, "post_send");
  }
  ibv_sge sge() const { return {.addr = reinterpret_cast<std::uint64_t>(memory_), .length = 8, .lkey = mr_->lkey}; }

  char memory_[64];
  ibv_context* context_;
  ibv_pd* pd_;
  ibv_mr* mr_;
  ibv_mr* real_mr_;
  ibv_cq* cq_;
  ibv_cq* real_cq_;
};

/// The provider's last call was `name`, for `object`.
#define EXPECT_CALLED(name, object)  \
  EXPECT_STREQ(recorder_call, name); \
  EXPECT_EQ(recorder_object, static_cast<const void*>(object))

TEST_F(Objects, ForcedNamesAreOthers) {
  const bool forced = getenv("MIGR_FORCE_SWITCHED");
  EXPECT_EQ(mr_->lkey != real_mr_->lkey, forced);
  EXPECT_EQ(mr_->rkey, real_mr_->rkey);
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD}) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = type;
    ibv_qp* qp = ibv_create_qp(pd_, &init);
    EXPECT_EQ(qp->qp_num != recorder_qp->qp_num, forced && type != IBV_QPT_UD);
    ibv_qp_attr attr{};
    attr.dest_qp_num = qp->qp_num;  // as a connection to itself
    EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_DEST_QPN), 0);
    EXPECT_EQ(recorder_dest_qpn, recorder_qp->qp_num);
    EXPECT_EQ(attr.dest_qp_num, qp->qp_num);
    ibv_destroy_qp(qp);
  }
}

TEST_F(Objects, QpCallsNameTheProvidersQp) {
  ibv_qp* qp = make_qp();
  ibv_qp* const real = recorder_qp;
  EXPECT_CALLED("create_qp", real_cq_);
  ASSERT_NE(qp, real);
  EXPECT_EQ(qp->qp_context, this);
  EXPECT_EQ(qp->send_cq, cq_);
  EXPECT_EQ(qp->qp_num, real->qp_num);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
  EXPECT_CALLED("modify_qp", real);
  EXPECT_EQ(qp->state, IBV_QPS_INIT);
  ibv_qp_init_attr init{};
  EXPECT_EQ(ibv_query_qp(qp, &attr, 0, &init), 0);
  EXPECT_CALLED("query_qp", real);
  EXPECT_EQ(init.qp_context, this);
  EXPECT_EQ(init.send_cq, cq_);
  EXPECT_EQ(init.recv_cq, cq_);
  EXPECT_EQ(init.srq, nullptr);
  ibv_gid gid{};
  ibv_attach_mcast(qp, &gid, 0);
  EXPECT_CALLED("attach_mcast", real);
  ibv_detach_mcast(qp, &gid, 0);
  EXPECT_CALLED("detach_mcast", real);
  ibv_ece ece{};
  ibv_query_ece(qp, &ece);
  EXPECT_CALLED("query_ece", real);
  ibv_set_ece(qp, &ece);
  EXPECT_CALLED("set_ece", real);
  EXPECT_EQ(ibv_query_qp_data_in_order(qp, IBV_WR_SEND, 0), 1);
  EXPECT_CALLED("in_order", real);
  ibv_qp_rate_limit_attr limit{};
  EXPECT_EQ(ibv_modify_qp_rate_limit(qp, &limit), 0);
  EXPECT_CALLED("modify_qp_rate_limit", real);
  ibv_flow_attr flow_attr{};
  ibv_flow* flow = ibv_create_flow(qp, &flow_attr);
  EXPECT_CALLED("create_flow", real);
  EXPECT_EQ(ibv_destroy_flow(flow), 0);
  EXPECT_EQ(ibv_destroy_qp(qp), 0);
  EXPECT_CALLED("destroy_qp", real);
}

TEST_F(Objects, CreateQpExNamesTheProvidersObjects) {
  ibv_srq* srq = make_srq();
  ibv_srq* const real_srq = recorder_srq;
  ibv_qp_init_attr_ex attr{};
  attr.send_cq = attr.recv_cq = cq_;
  attr.srq = srq;
  attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
  attr.pd = pd_;
  ibv_qp* qp = ibv_create_qp_ex(context_, &attr);
  EXPECT_CALLED("create_qp_ex", real_cq_);
  EXPECT_EQ(recorder_other, real_srq);
  EXPECT_EQ(qp->srq, srq);
  EXPECT_EQ(attr.srq, srq);  // the application's attributes stay as they were
  EXPECT_EQ(attr.send_cq, cq_);
  ibv_destroy_qp(qp);
  ibv_destroy_srq(srq);
}

// What a newer rdma-core can send with (IBV_QP_EX_WITH_FLUSH) has no call in our ibv_qp_ex.
TEST_F(Objects, QpForUnknownSendOpsIsNotMade) {
  constexpr std::uint64_t kFlush = 1 << 11;
  ibv_qp_init_attr_ex attr{};
  attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attr.pd = pd_;
  attr.send_cq = attr.recv_cq = cq_;
  attr.send_ops_flags = IBV_QP_EX_WITH_SEND | kFlush;
  recorder_call = "none";
  EXPECT_EQ(ibv_create_qp_ex(context_, &attr), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_STREQ(recorder_call, "none");
  attr.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_ATOMIC_WRITE;
  ibv_qp* const qp = ibv_create_qp_ex(context_, &attr);
  ASSERT_NE(qp, nullptr);
  ibv_destroy_qp(qp);
}

TEST_F(Objects, OpenedXrcQpHasNoCqs) {
  ibv_qp_open_attr attr{};
  attr.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_CONTEXT;
  attr.qp_context = this;
  attr.qp_type = IBV_QPT_XRC_RECV;
  ibv_qp* qp = ibv_open_qp(context_, &attr);
  ibv_qp* const real = recorder_qp;
  ASSERT_NE(qp, nullptr);
  ASSERT_NE(qp, real);
  EXPECT_EQ(qp->qp_context, this);
  EXPECT_EQ(qp->send_cq, nullptr);
  EXPECT_EQ(attr.qp_context, this);
  ibv_qp_attr to{};
  ibv_modify_qp(qp, &to, IBV_QP_STATE);
  EXPECT_CALLED("modify_qp", real);
  ibv_destroy_qp(qp);
  EXPECT_CALLED("destroy_qp", real);
}

TEST_F(Objects, CqCallsNameTheProvidersCq) {
  ibv_wc wc;
  ibv_poll_cq(cq_, 1, &wc);
  EXPECT_CALLED("poll_cq", real_cq_);
  ibv_req_notify_cq(cq_, 0);
  EXPECT_CALLED("req_notify_cq", real_cq_);
  EXPECT_EQ(ibv_resize_cq(cq_, 77), 0);
  EXPECT_CALLED("resize_cq", real_cq_);
  EXPECT_EQ(cq_->cqe, 77);
  ibv_modify_cq_attr attr{};
  EXPECT_EQ(ibv_modify_cq(cq_, &attr), 0);
  EXPECT_CALLED("modify_cq", real_cq_);
  ibv_wq_init_attr wq_attr{};
  wq_attr.cq = cq_;
  ibv_wq* wq = ibv_create_wq(context_, &wq_attr);
  EXPECT_CALLED("create_wq", real_cq_);
  EXPECT_EQ(wq_attr.cq, cq_);
  EXPECT_EQ(ibv_destroy_wq(wq), 0);
  ibv_comp_channel* channel = ibv_create_comp_channel(context_);
  ibv_cq* of_event;
  void* cq_context;
  EXPECT_EQ(ibv_get_cq_event(channel, &of_event, &cq_context), 0);
  EXPECT_EQ(of_event, cq_);
  EXPECT_EQ(cq_context, this);
  ibv_ack_cq_events(cq_, 1);
  EXPECT_CALLED("ack_cq_events", real_cq_);
  ibv_destroy_comp_channel(channel);
}

TEST_F(Objects, SrqCallsNameTheProvidersSrq) {
  ibv_srq* srq = make_srq();
  ibv_srq* const real = recorder_srq;
  ASSERT_NE(srq, real);
  ibv_srq_attr attr{};
  EXPECT_EQ(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), 0);
  EXPECT_CALLED("modify_srq", real);
  EXPECT_EQ(ibv_query_srq(srq, &attr), 0);
  EXPECT_CALLED("query_srq", real);
  std::uint32_t number = 0;
  EXPECT_EQ(ibv_get_srq_num(srq, &number), 0);
  EXPECT_CALLED("get_srq_num", real);
  EXPECT_EQ(number, real->handle);
  ibv_ops_wr op{};
  ibv_ops_wr* bad_op;
  EXPECT_EQ(ibv_post_srq_ops(srq, &op, &bad_op), 0);
  EXPECT_CALLED("post_srq_ops", real);
  ibv_qp* qp = make_qp(srq);
  EXPECT_CALLED("create_qp", real_cq_);
  EXPECT_EQ(recorder_other, real);
  EXPECT_EQ(qp->srq, srq);
  ibv_qp_attr qp_attr{};
  ibv_qp_init_attr init{};
  ibv_query_qp(qp, &qp_attr, 0, &init);
  EXPECT_EQ(init.srq, srq);
  ibv_destroy_qp(qp);
  EXPECT_EQ(ibv_destroy_srq(srq), 0);
  EXPECT_CALLED("destroy_srq", real);
}

TEST_F(Objects, SrqReceivesCarryThePhysicalKey) {
  ibv_srq* srq = make_srq();
  ibv_sge list[3] = {sge(), sge(), sge()};
  ibv_recv_wr third{.wr_id = 3, .next = nullptr, .sg_list = list, .num_sge = 3};  // more than the recorder takes
  ibv_recv_wr second{.wr_id = 2, .next = nullptr, .sg_list = list, .num_sge = 2};
  ibv_recv_wr first{.wr_id = 1, .next = &second, .sg_list = list, .num_sge = 1};
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_srq_recv(srq, &first, &bad), 0);
  EXPECT_CALLED("post_srq_recv", recorder_srq);
  EXPECT_EQ(recorder_lkey, real_mr_->lkey == mr_->lkey ? mr_->lkey : real_mr_->lkey);
  EXPECT_EQ(list[0].lkey, mr_->lkey);  // the application's list stays as it was
  second.next = &third;
  EXPECT_EQ(ibv_post_srq_recv(srq, &first, &bad), EINVAL);
  EXPECT_EQ(bad, &third);
  ibv_destroy_srq(srq);
}

TEST_F(Objects, XrcSrqNamesTheProvidersCq) {
  ibv_srq_init_attr_ex attr{};
  attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ;
  attr.srq_type = IBV_SRQT_XRC;
  attr.pd = pd_;
  attr.cq = cq_;
  attr.srq_context = this;
  ibv_srq* srq = ibv_create_srq_ex(context_, &attr);
  EXPECT_CALLED("create_srq_ex", real_cq_);
  EXPECT_EQ(srq->srq_context, this);
  EXPECT_EQ(attr.cq, cq_);
  ibv_destroy_srq(srq);
}

TEST_F(Objects, EveryKindOfMrIsDeregistered) {
  ibv_alloc_dm_attr dm{};
  for (ibv_mr* mr : {ibv_alloc_null_mr(pd_), ibv_reg_dm_mr(pd_, reinterpret_cast<ibv_dm*>(&dm), 0, 64, 0),
                     ibv_reg_mr_iova(pd_, memory_, 8, 0, 0), ibv_reg_mr_iova2(pd_, memory_, 8, 0, 0),
                     ibv_reg_dmabuf_mr(pd_, 0, 8, 0, 0, 0)}) {
    ASSERT_NE(mr, nullptr);
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
    EXPECT_STREQ(recorder_call, "dereg_mr");
    EXPECT_NE(recorder_object, mr);
  }
  ibv_mr* imported = ibv_import_mr(pd_, 1);
  ibv_mr* const real = recorder_mr;
  ibv_unimport_mr(imported);
  EXPECT_CALLED("unimport_mr", real);
}

// As mlx5dv_reg_dmabuf_mr() of a newer rdma-core does.
TEST_F(Objects, MrOfAMakerThatNobodyKnowsIsTheProviders) {
  ibv_mr* mr = recorder_reg_otherwise(pd_);
  EXPECT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0), 0);
  EXPECT_CALLED("rereg_mr", mr);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  EXPECT_CALLED("dereg_mr", mr);
}

TEST_F(Objects, ReregisteredMrShowsTheNewRange) {
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory_ + 8, 16, 0), 0);
  EXPECT_CALLED("rereg_mr", real_mr_);
  EXPECT_EQ(mr_->addr, memory_ + 8);
  EXPECT_EQ(mr_->length, 16u);
}

// Peers and the program itself may go on with the keys that they have.
TEST_F(Objects, ReregisteredWithOtherRightsItKeepsItsNames) {
  const ibv_mr before = *mr_;
  ibv_qp* qp = make_qp();
  ibv_pd* other = ibv_alloc_pd(context_);
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ), 0);
  EXPECT_CALLED("rereg_mr", real_mr_);
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_PD, other, nullptr, 0, 0), 0);
  EXPECT_EQ(recorder_other, other);
  EXPECT_EQ(mr_->pd, other);
  EXPECT_EQ(mr_->lkey, before.lkey);
  EXPECT_EQ(mr_->rkey, before.rkey);
  EXPECT_EQ(mr_->addr, before.addr);
  post_one(qp);
  EXPECT_EQ(recorder_lkey, real_mr_->lkey);
  ibv_destroy_qp(qp);
  ibv_dealloc_pd(other);
}

TEST_F(Objects, ReregisteredUnderOtherKeysItIsCalledByThem) {
  const ibv_mr before = *mr_;
  const std::uint32_t physical = real_mr_->lkey;
  const bool forced = getenv("MIGR_FORCE_SWITCHED");
  ibv_qp* qp = make_qp();
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory_ + 8, 16, 0), 0);
  EXPECT_NE(real_mr_->lkey, physical);
  EXPECT_EQ(mr_->rkey, real_mr_->rkey);
  EXPECT_EQ(mr_->lkey != real_mr_->lkey, forced);
  EXPECT_NE(mr_->lkey, before.lkey);
  post_one(qp);
  EXPECT_EQ(recorder_lkey, real_mr_->lkey);
  ibv_destroy_qp(qp);
}

TEST_F(Objects, WhatCouldNotBeReregisteredIsAsItWas) {
  const ibv_mr before = *mr_;
  for (const int err : {IBV_REREG_MR_ERR_INPUT, IBV_REREG_MR_ERR_DONT_FORK_NEW, IBV_REREG_MR_ERR_CMD, IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW}) {
    recorder_rereg_fails = err;
    EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory_ + 8, 16, 0), err);
    EXPECT_EQ(mr_->addr, before.addr);
    EXPECT_EQ(mr_->length, before.length);
    EXPECT_EQ(mr_->lkey, before.lkey);
    EXPECT_EQ(mr_->rkey, before.rkey);
  }
  recorder_rereg_fails = IBV_REREG_MR_ERR_DO_FORK_OLD;  // "New MR is valid"
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory_ + 8, 16, 0), IBV_REREG_MR_ERR_DO_FORK_OLD);
  EXPECT_EQ(mr_->addr, memory_ + 8);
  EXPECT_EQ(mr_->rkey, real_mr_->rkey);
}

// ODP is refused; what was on demand and is not any more moves.
TEST_F(Objects, ReregistrationDecidesWhetherItCanMove) {
  constexpr char kOdp[] = "on demand";
  EXPECT_EQ(migrd.refusal().find(kOdp), std::string::npos);
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_ON_DEMAND), 0);
  EXPECT_NE(migrd.refusal().find(kOdp), std::string::npos) << migrd.refusal();
  EXPECT_EQ(ibv_rereg_mr(mr_, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0), 0);
  EXPECT_EQ(migrd.refusal().find(kOdp), std::string::npos) << migrd.refusal();
}

TEST_F(Objects, DomainsPassThroughAndAreRefusedByName) {
  constexpr char kTd[] = "1 x thread domain", kParent[] = "1 x parent domain";
  ibv_td_init_attr td_attr{};
  ibv_td* td = ibv_alloc_td(context_, &td_attr);
  ASSERT_NE(td, nullptr);
  EXPECT_CALLED("alloc_td", context_);
  EXPECT_EQ(recorder_other, &td_attr);
  EXPECT_NE(migrd.refusal().find(kTd), std::string::npos) << migrd.refusal();
  ibv_parent_domain_init_attr attr{};
  attr.pd = pd_;
  attr.td = td;
  ibv_pd* domain = ibv_alloc_parent_domain(context_, &attr);
  ASSERT_NE(domain, nullptr);
  EXPECT_CALLED("alloc_parent_domain", pd_);
  EXPECT_EQ(recorder_other, td);
  EXPECT_NE(migrd.refusal().find(kParent), std::string::npos) << migrd.refusal();
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  ibv_qp* qp = ibv_create_qp(domain, &init);
  EXPECT_EQ(recorder_qp->pd, domain);
  EXPECT_EQ(qp->pd, domain);
  ibv_mr* mr = ibv_reg_mr(domain, memory_, 8, 0);
  EXPECT_EQ(mr->pd, domain);
  ibv_dereg_mr(mr);
  ibv_destroy_qp(qp);
  EXPECT_EQ(ibv_dealloc_pd(domain), 0);
  EXPECT_EQ(migrd.refusal().find(kParent), std::string::npos) << migrd.refusal();
  EXPECT_EQ(ibv_dealloc_td(td), 0);
  EXPECT_EQ(migrd.refusal().find(kTd), std::string::npos) << migrd.refusal();
}

// The second of one file is not in the kernel's record; what is made in it neither.
TEST_F(Objects, XrcDomainIsRefusedByNameWhileItIsOpen) {
  constexpr char kOne[] = "1 x XRC domain", kTwo[] = "2 x XRC domain";
  ibv_xrcd_init_attr attr{};
  ibv_xrcd* xrcd = ibv_open_xrcd(context_, &attr);
  ASSERT_NE(xrcd, nullptr);
  EXPECT_CALLED("open_xrcd", context_);
  EXPECT_EQ(recorder_other, &attr);
  EXPECT_NE(migrd.refusal().find(kOne), std::string::npos) << migrd.refusal();
  ibv_xrcd* again = ibv_open_xrcd(context_, &attr);
  EXPECT_NE(migrd.refusal().find(kTwo), std::string::npos) << migrd.refusal();
  EXPECT_EQ(ibv_close_xrcd(again), 0);
  EXPECT_NE(migrd.refusal().find(kOne), std::string::npos) << migrd.refusal();
  EXPECT_EQ(ibv_close_xrcd(xrcd), 0);
  EXPECT_STREQ(recorder_call, "close_xrcd");
  EXPECT_EQ(migrd.refusal().find(kOne), std::string::npos) << migrd.refusal();
  ibv_context* const other = ibv_open_device(ibv_get_device_list(nullptr)[0]);
  ASSERT_NE(ibv_open_xrcd(other, &attr), nullptr);
  ibv_close_device(other);
  EXPECT_EQ(migrd.refusal().find(kOne), std::string::npos) << "it went with its context: " << migrd.refusal();
}

// As libibverbs does it, with what is asked of the device.
TEST_F(Objects, FlagsOfMemoryArriveAsGiven) {
  for (const unsigned access : {unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED}, unsigned{IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING}}) {
    ibv_mr* mr = ibv_reg_mr_iova2(pd_, memory_, 8, 0, access);
    ASSERT_NE(mr, nullptr);
    EXPECT_STREQ(recorder_call, "reg_mr_iova2");
    EXPECT_EQ(reinterpret_cast<const unsigned*>(recorder_mr + 1)[1], access);
    ibv_dereg_mr(mr);
  }
}

TEST_F(Objects, AdviceCarriesThePhysicalKey) {
  ibv_sge one = sge();
  EXPECT_EQ(ibv_advise_mr(pd_, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &one, 1), 0);
  EXPECT_EQ(recorder_lkey, real_mr_->lkey);
  EXPECT_EQ(one.lkey, mr_->lkey);
}

TEST_F(Objects, WindowIsBoundToTheProvidersMr) {
  ibv_qp* qp = make_qp();
  ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  ibv_mw_bind bind{};
  bind.bind_info = {.mr = mr_, .addr = 0, .length = 8, .mw_access_flags = 0};
  EXPECT_EQ(ibv_bind_mw(qp, mw, &bind), 0);
  EXPECT_EQ(recorder_other, real_mr_);
  EXPECT_EQ(bind.bind_info.mr, mr_);
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_BIND_MW;
  wr.bind_mw.mw = mw;
  wr.bind_mw.bind_info = bind.bind_info;
  ibv_send_wr* bad;
  for (const int sges : {0, 1}) {
    ibv_sge one = sge();
    wr.sg_list = &one;
    wr.num_sge = sges;
    EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
    EXPECT_CALLED("post_send", recorder_qp);
    EXPECT_EQ(recorder_lkey, real_mr_->lkey);
    EXPECT_EQ(recorder_rkey, 1u) << "what lies behind the MR is not there";
    EXPECT_EQ(wr.bind_mw.bind_info.mr, mr_);
  }
  ibv_dealloc_mw(mw);
  ibv_destroy_qp(qp);
}

// Until a post has succeeded the device calls the window as before.
TEST_F(Objects, WindowThatWasNotBoundKeepsItsKey) {
  ibv_qp* qp = make_qp();
  ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);
  const std::uint32_t key = mw->rkey;
  ibv_send_wr wr{};
  ibv_send_wr* bad;
  wr.opcode = IBV_WR_BIND_MW;
  wr.bind_mw = {.mw = mw, .rkey = key | 1, .bind_info = {.mr = mr_, .addr = 0, .length = 8, .mw_access_flags = 0}};
  for (const int err : {ENOMEM, ENOMEM, 0}) {
    recorder_post_fails = err;
    EXPECT_EQ(ibv_post_send(qp, &wr, &bad), err);
    EXPECT_EQ(recorder_window, key);
    EXPECT_EQ(recorder_window_next, key | 1);
  }
  wr.bind_mw.rkey = key | 2;
  EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
  EXPECT_EQ(recorder_window, key | 1);
  ibv_dealloc_mw(mw);
  ibv_destroy_qp(qp);
}

TEST_F(Objects, WindowOfASessionThatWasNotPostedKeepsItsKey) {
  ibv_qp* qp = make_qp();
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(qp);
  ASSERT_NE(ex, nullptr);
  ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);
  const std::uint32_t key = mw->rkey;
  const ibv_mw_bind_info info{.mr = mr_, .addr = 0, .length = 8, .mw_access_flags = 0};
  const auto bind_twice = [&] {
    ibv_wr_start(ex);
    ibv_wr_bind_mw(ex, mw, key | 1, &info);
    EXPECT_EQ(recorder_window, key);
    ibv_wr_local_inv(ex, key | 1);
    EXPECT_EQ(recorder_rkey, key | 1);
    ibv_wr_bind_mw(ex, mw, key | 2, &info);
    EXPECT_EQ(recorder_window, key | 1);
  };
  bind_twice();
  ibv_wr_abort(ex);
  bind_twice();
  recorder_post_fails = ENOMEM;
  EXPECT_EQ(ibv_wr_complete(ex), ENOMEM);
  bind_twice();
  EXPECT_EQ(ibv_wr_complete(ex), 0);
  ibv_wr_start(ex);
  ibv_wr_bind_mw(ex, mw, key | 3, &info);
  EXPECT_EQ(recorder_window, key | 2);
  ibv_destroy_qp(qp);  // with the session: nothing of it is left
  ibv_dealloc_mw(mw);
}

// Partners may translate it.
TEST_F(Objects, NameOfAWindowThatHasMovedIsNotGivenAgain) {
  constexpr std::uint32_t kName = 0x55500;
  ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  const std::uint32_t unmoved = mw->rkey;
  mw->rkey = kName;  // as if the device had given it another since
  ibv_dealloc_mw(mw);
  recorder_next_window = kName;
  mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  EXPECT_NE(mw->rkey, kName);
  ibv_dealloc_mw(mw);
  recorder_next_window = unmoved + 0x10000000;
  mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  EXPECT_EQ(mw->rkey, unmoved + 0x10000000);
  ibv_dealloc_mw(mw);
  recorder_next_window = unmoved + 0x10000000;  // it was called so by the device, too
  mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_1);
  EXPECT_EQ(mw->rkey, unmoved + 0x10000000);
  ibv_dealloc_mw(mw);
}

// Soft-RoCE says so by the kernel's flag, which has another one's number.
TEST_F(Objects, WindowThatAReceiveHasEndedIsCalledByItsName) {
  constexpr std::uint32_t kName = 0x44400;
  for (const unsigned flag : {IBV_WC_WITH_INV, IBV_WC_IP_CSUM_OK, IBV_WC_WITH_IMM}) {
    ibv_mw* mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);
    const std::uint32_t of_device = mw->rkey;
    mw->rkey = kName;  // as if the device had given it another since
    ibv_wc end{}, wc{};
    end.opcode = IBV_WC_RECV;
    end.wc_flags = flag;
    end.invalidated_rkey = of_device | 5;
    recorder_completion = &end;
    EXPECT_EQ(ibv_poll_cq(cq_, 1, &wc), 1);
    EXPECT_EQ(wc.wc_flags, flag);
    EXPECT_EQ(wc.invalidated_rkey, (flag == IBV_WC_WITH_IMM ? of_device : kName) | 5);
    mw->rkey = of_device;
    ibv_dealloc_mw(mw);
  }
}

// The partner's drain marker is a write, whatever the application allows meanwhile.
TEST_F(Objects, SuspendedQpTakesTheMarkerAndKeepsItsRights) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_RC;
  ibv_qp* qp = ibv_create_qp(pd_, &init);
  ibv_qp_attr attr{};
  const auto allow = [&](unsigned flags) {
    attr.qp_access_flags = flags;
    EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  };
  const auto allowed = [&] {
    ibv_qp_attr now{};
    EXPECT_EQ(ibv_query_qp(qp, &now, IBV_QP_ACCESS_FLAGS, &init), 0);
    return now.qp_access_flags;
  };
  constexpr unsigned kRead = IBV_ACCESS_REMOTE_READ, kWrite = IBV_ACCESS_REMOTE_WRITE;
  attr.qp_state = IBV_QPS_RTS;
  EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
  for (const unsigned meanwhile : {kRead, kRead | kWrite}) {
    allow(0);
    const migr_msg suspended = migrd.ask(MIGR_MSG_SUSPEND);
    ASSERT_EQ(suspended.status, 0) << suspended.text;
    EXPECT_EQ(recorder_access, kWrite);
    allow(meanwhile);
    EXPECT_EQ(recorder_access, kRead | kWrite);
    EXPECT_EQ(allowed(), meanwhile);
    const migr_msg back = migrd.ask(MIGR_MSG_ROLLBACK);
    EXPECT_EQ(back.status, 0) << back.text;
    EXPECT_EQ(recorder_access, kRead | kWrite) << "the marker may be still to come";
    EXPECT_EQ(allowed(), meanwhile);
  }
  allow(kWrite);
  ASSERT_EQ(migrd.ask(MIGR_MSG_SUSPEND).status, 0);
  allow(kRead);
  EXPECT_EQ(recorder_access, kRead | kWrite) << "its own, taken away before the marker has come";
  EXPECT_EQ(migrd.ask(MIGR_MSG_ROLLBACK).status, 0);
  EXPECT_EQ(allowed(), kRead);
  allow(0);
  EXPECT_EQ(recorder_access, kWrite) << "the marker may be still to come";
  EXPECT_EQ(allowed(), 0u);
  ASSERT_EQ(migrd.ask(MIGR_MSG_SUSPEND).status, 0);  // once more
  EXPECT_EQ(migrd.ask(MIGR_MSG_ROLLBACK).status, 0);
  EXPECT_EQ(allowed(), 0u);
  ibv_destroy_qp(qp);
}

// Kept, it would end the connection when it is posted again.
TEST_F(Objects, SuspendedQpRefusesWhatTheDeviceWould) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_RC;
  init.cap = {.max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 0};
  ibv_qp* qp = ibv_create_qp(pd_, &init);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
  const auto post = [&](ibv_wr_opcode opcode, std::uint64_t to, std::uint32_t bytes, __be32 imm = 0) {
    ibv_sge one{.addr = reinterpret_cast<std::uint64_t>(memory_), .length = bytes, .lkey = mr_->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = opcode;
    wr.imm_data = imm;
    wr.sg_list = &one;
    wr.num_sge = bytes ? 1 : 0;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP) wr.wr.atomic.remote_addr = to;
    return ibv_post_send(qp, &wr, &bad);
  };
  const migr_msg suspended = migrd.ask(MIGR_MSG_SUSPEND);
  ASSERT_EQ(suspended.status, 0) << suspended.text;
  for (const ibv_wr_opcode atomic : {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
    EXPECT_EQ(post(atomic, 0x1004, 8), EINVAL) << "is not aligned";
    EXPECT_EQ(post(atomic, 0x1000, 4), EINVAL) << "is too short";
    EXPECT_EQ(post(atomic, 0x1000, 8), 0);
  }
  EXPECT_EQ(post(IBV_WR_BIND_MW, 0, 8), EINVAL);
  EXPECT_EQ(post(IBV_WR_BIND_MW, 0, 0, 7), EINVAL);
  EXPECT_EQ(post(IBV_WR_SEND_WITH_IMM, 0, 4, 7), 0);
  EXPECT_EQ(migrd.ask(MIGR_MSG_ROLLBACK).status, 0);
  ibv_destroy_qp(qp);
}

// With the numbers of librxe's, which are not those of its ibv_post_send().
TEST_F(Objects, SessionOfASuspendedQpHasNoMoreRoomThanTheDevice) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_RC;
  init.cap = {.max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 4};
  ibv_qp* const qp = ibv_create_qp(pd_, &init);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
  ibv_qp_ex* const ex = ibv_qp_to_qp_ex(qp);
  const migr_msg suspended = migrd.ask(MIGR_MSG_SUSPEND);
  ASSERT_EQ(suspended.status, 0) << suspended.text;
  EXPECT_EQ(migrd.ask(MIGR_MSG_DRAIN, 50).status, ETIMEDOUT) << "nothing completes here; but now nobody is in a session on the path";
  const ibv_sge sges[] = {sge(), sge(), sge()};
  for (const std::size_t count : {2, 3}) {
    ibv_wr_start(ex);
    ibv_wr_send(ex);
    ibv_wr_set_sge_list(ex, count, sges);
    EXPECT_EQ(ibv_wr_complete(ex), count > 2 ? ENOSPC : 0);
  }
  for (const std::size_t bytes : {4, 5}) {
    ibv_wr_start(ex);
    ibv_wr_send(ex);
    ibv_wr_set_inline_data(ex, memory_, bytes);
    EXPECT_EQ(ibv_wr_complete(ex), bytes > 4 ? ENOSPC : 0);
  }
  for (const int more : {7, 6}) {
    ibv_wr_start(ex);
    for (int i = 0; i < more; ++i) ibv_wr_local_inv(ex, 0x1234);
    EXPECT_EQ(ibv_wr_complete(ex), more > 6 ? ENOSPC : 0);
  }
  EXPECT_EQ(migrd.ask(MIGR_MSG_ROLLBACK).status, 0);
  ibv_destroy_qp(qp);
}

// The driver writes to its file, where a thread can be cancelled. No destructor of the library's runs then.
TEST_F(Objects, WhoIsCancelledInACallGetsThroughIt) {
  ibv_qp* const qp = make_qp();
  ibv_mw* const mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);  // what is posted is watched from now on
  struct Thread {
    std::function<void()> call;
    bool through = false;
  };
  const std::function<void()> calls[] = {[&] { post_one(qp); }, [&] { ibv_req_notify_cq(cq_, 0); }, [&] { ibv_dereg_mr(ibv_reg_mr(pd_, memory_, 8, 0)); },
                                         [&] { ibv_destroy_cq(ibv_create_cq(context_, 1, nullptr, nullptr, 0)); },
                                         [&] {
                                           ibv_qp_attr attr{};
                                           ibv_modify_qp(qp, &attr, IBV_QP_ACCESS_FLAGS);
                                         }};
  recorder_meanwhile = pthread_testcancel;
  for (const auto& call : calls) {
    Thread one{call};
    pthread_t thread;
    pthread_create(
        &thread, nullptr,
        [](void* p) -> void* {
          auto& t = *static_cast<Thread*>(p);
          pthread_cancel(pthread_self());
          t.call();
          t.through = true;
          pthread_testcancel();
          return nullptr;
        },
        &one);
    void* result = nullptr;
    pthread_join(thread, &result);
    EXPECT_EQ(result, PTHREAD_CANCELED);
    if (!one.through) stuck();  // so is the next call
  }
  recorder_meanwhile = nullptr;
  ibv_dealloc_mw(mw);
  ibv_destroy_qp(qp);
}

// As librxe does it, on each path.
TEST_F(Objects, WhatWasPostedIsNotBad) {
  ibv_qp* qp = make_qp();
  ibv_sge one = sge();
  ibv_recv_wr receive{}, *bad_receive = &receive;
  receive.sg_list = &one;
  receive.num_sge = 1;
  EXPECT_EQ(ibv_post_recv(qp, &receive, &bad_receive), 0);
  EXPECT_EQ(bad_receive, nullptr);
  ibv_send_wr second{}, first{};
  for (ibv_send_wr* wr : {&first, &second}) {
    wr->opcode = IBV_WR_SEND;
    wr->sg_list = &one;
    wr->num_sge = 1;
  }
  const auto post = [&](const char* how) {
    SCOPED_TRACE(how);
    ibv_send_wr* bad = &first;
    EXPECT_EQ(ibv_post_send(qp, &first, &bad), 0);
    EXPECT_EQ(bad, nullptr);
    recorder_post_fails = ENOMEM;
    EXPECT_EQ(ibv_post_send(qp, &first, &bad), ENOMEM);
    EXPECT_EQ(bad, &first);
  };
  post("one");
  first.next = &second;
  post("a list");
  ibv_mw* const mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);
  post("watched");
  ibv_dealloc_mw(mw);
  ibv_send_wr* bad = &first;
  EXPECT_EQ(ibv_post_send(qp, nullptr, &bad), EINVAL);
  EXPECT_EQ(bad, nullptr);
  EXPECT_EQ(ibv_post_recv(qp, nullptr, &bad_receive), EINVAL);
  ibv_destroy_qp(qp);
}

TEST_F(Objects, UnknownKeyIsInvalidatedAsItIs) {
  ibv_qp* qp = make_qp();
  ibv_send_wr wr{};
  ibv_send_wr* bad;
  wr.opcode = IBV_WR_LOCAL_INV;
  for (const std::uint32_t rkey : {mr_->rkey, 0x77700u}) {  // the second is a window's
    wr.invalidate_rkey = rkey;
    EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
    EXPECT_EQ(recorder_rkey, rkey);
  }
  ibv_destroy_qp(qp);
}

TEST_F(Objects, AsyncEventsNameTheApplicationsObjects) {
  ibv_async_event event{};
  ibv_qp* qp = make_qp();
  recorder_raise(IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.element.qp, qp);
  ibv_ack_async_event(&event);
  ibv_destroy_qp(qp);
  ibv_srq* srq = make_srq();
  recorder_raise(IBV_EVENT_SRQ_LIMIT_REACHED);
  EXPECT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.element.srq, srq);
  ibv_ack_async_event(&event);
  ibv_destroy_srq(srq);
  recorder_raise(IBV_EVENT_CQ_ERR);
  EXPECT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.element.cq, cq_);
  ibv_ack_async_event(&event);
  recorder_raise(IBV_EVENT_PORT_ERR);
  EXPECT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.element.port_num, 1);
  ibv_ack_async_event(&event);
  EXPECT_STREQ(recorder_call, "ack_async_event");
}

/// What libibverbs counts of an event about an object of the provider's own.
void expect_acknowledged_once(ibv_context* context, ibv_event_type type, const void* about, const std::uint32_t& acknowledged) {
  ibv_async_event event{};
  recorder_raise(type);
  EXPECT_EQ(ibv_get_async_event(context, &event), 0);
  EXPECT_EQ(static_cast<const void*>(event.element.qp), about);
  EXPECT_EQ(acknowledged, 0u);
  ibv_ack_async_event(&event);
  EXPECT_EQ(acknowledged, 1u);
}

// ibv_destroy_wq() waits until all are acknowledged, not more.
TEST_F(Objects, EventOfAWqIsAcknowledgedOnce) {
  ibv_wq_init_attr attr{};
  attr.cq = cq_;
  ibv_wq* wq = ibv_create_wq(context_, &attr);
  ASSERT_EQ(wq, recorder_wq);
  expect_acknowledged_once(context_, IBV_EVENT_WQ_FATAL, wq, wq->events_completed);
  ibv_destroy_wq(wq);
}

// As of a newer rdma-core's mlx5dv or the like.
TEST_F(Objects, QpOfAMakerThatNobodyKnowsIsTheProviders) {
  char own[4096];  // as large as a shadow, for who takes it for one
  std::memset(own, 0x5a, sizeof own);
  ibv_qp* qp = recorder_create_otherwise(pd_, own);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
  EXPECT_CALLED("modify_qp", qp);
  expect_acknowledged_once(context_, IBV_EVENT_QP_FATAL, qp, qp->events_completed);
  EXPECT_EQ(ibv_destroy_qp(qp), 0);
  EXPECT_CALLED("destroy_qp", qp);
}

TEST_F(Objects, QpOfHnsdvCannotBeMoved) {
  ibv_qp_init_attr_ex attr{};
  attr.send_cq = attr.recv_cq = cq_;
  ibv_qp* qp = hnsdv_create_qp(context_, &attr, nullptr);
  EXPECT_CALLED("hnsdv_create_qp", real_cq_);
  EXPECT_EQ(migrd.refusal(), "a QP of hnsdv_create_qp() cannot be migrated");
  ibv_destroy_qp(qp);
}

TEST_F(Objects, ProviderMayAskForAGidWhileAQpIsModified) {
  ibv_qp* qp = make_qp();
  ibv_qp_attr attr{};
  auto modified = std::async(std::launch::async, [&] { return ibv_modify_qp(qp, &attr, IBV_QP_AV); });
  if (modified.wait_for(10s) != std::future_status::ready) stuck();
  EXPECT_EQ(modified.get(), 0);
  ibv_destroy_qp(qp);
}

TEST_F(Objects, FamilysOwnCallsNameTheProvidersObjects) {
  ibv_qp_init_attr_ex attr{};
  attr.send_cq = attr.recv_cq = cq_;
  attr.srq = make_srq();
  attr.qp_context = this;
  mlx5dv_qp_init_attr own{};
  ibv_qp* qp = mlx5dv_create_qp(context_, &attr, &own);
  ibv_qp* const real = recorder_qp;
  EXPECT_CALLED("mlx5dv_create_qp", real_cq_);
  EXPECT_EQ(recorder_other, recorder_srq);
  ASSERT_NE(qp, real);
  EXPECT_EQ(qp->qp_context, this);
  EXPECT_EQ(mlx5dv_modify_qp_lag_port(qp, 1), 0);
  EXPECT_CALLED("lag_port", real);
  EXPECT_EQ(mlx5dv_modify_qp_lag_port(real, 1), 0);  // not one of ours: as it is
  EXPECT_CALLED("lag_port", real);
  mlx5dv_qp raw_qp{};
  mlx5dv_obj raw{};
  raw.qp = {.in = qp, .out = &raw_qp};
  raw.cq.in = cq_;
  EXPECT_EQ(mlx5dv_init_obj(&raw, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ), 0);
  EXPECT_CALLED("mlx5dv_init_obj", real);
  EXPECT_EQ(recorder_other, real_cq_);
  EXPECT_EQ(raw.qp.in, qp);
  EXPECT_EQ(raw_qp.comp_mask, 7u);
  EXPECT_EQ(mlx5dv_devx_srq_query(attr.srq, nullptr, 0, nullptr, 0), 0);
  EXPECT_CALLED("devx_srq_query", recorder_srq);
  EXPECT_EQ(efadv_query_qp_wqs(qp, nullptr, nullptr, 0), 0);
  EXPECT_CALLED("efadv_query_qp_wqs", real);
  EXPECT_EQ(efadv_query_cq(cq_, nullptr, 0), 0);
  EXPECT_CALLED("efadv_query_cq", real_cq_);
  EXPECT_NE(migrd.refusal().find("3 x queue that the program drives itself"), std::string::npos) << migrd.refusal();
  ibv_destroy_qp(qp);
  EXPECT_CALLED("destroy_qp", real);
  ibv_destroy_srq(attr.srq);
}

TEST_F(Objects, ClosedContextTakesItsObjectsAlong) {
  ibv_context* other = ibv_open_device(ibv_get_device_list(nullptr)[0]);
  ibv_pd* pd = ibv_alloc_pd(other);
  ibv_qp_init_attr attr{};
  attr.send_cq = attr.recv_cq = ibv_create_cq(other, 10, nullptr, nullptr, 0);
  ibv_qp* qp = ibv_create_qp(pd, &attr);
  ibv_close_device(other);
  mlx5dv_modify_qp_lag_port(qp, 1);
  EXPECT_CALLED("lag_port", qp);  // nobody's
}

// What a drain has noted when a device began to be closed is not so any more when its objects are gone.
TEST_F(Objects, ClosedContextIsAChangeWhenItBeginsAndWhenItIsGone) {
  ibv_context* other = ibv_open_device(ibv_get_device_list(nullptr)[0]);
  const std::uint64_t before = migrd.ask(MIGR_MSG_DESCRIBE).arg;
  ibv_close_device(other);
  EXPECT_EQ(migrd.ask(MIGR_MSG_DESCRIBE).arg, before + 2);
}

// DESCRIBE tells of a device that is there or is not, and of none that comes or goes just then.
TEST_F(Objects, DescribeWaitsForDevicesThatAreBeingOpenedOrClosed) {
  static std::promise<void> reached, go;
  ibv_context* other = nullptr;
  for (const bool opens : {true, false}) {
    reached = {}, go = {};
    recorder_meanwhile = [] {
      recorder_meanwhile = nullptr;
      reached.set_value();
      go.get_future().wait();
    };
    auto called = std::async(std::launch::async, [&] {
      if (opens) other = ibv_open_device(ibv_get_device_list(nullptr)[0]);
      else ibv_close_device(other);
    });
    if (reached.get_future().wait_for(10s) != std::future_status::ready) stuck();
    auto described = std::async(std::launch::async, [] { return migrd.ask(MIGR_MSG_DESCRIBE, MIGR_DESCRIBE_HOLD); });
    EXPECT_EQ(described.wait_for(200ms), std::future_status::timeout) << opens;
    go.set_value();
    if (called.wait_for(10s) != std::future_status::ready || described.wait_for(10s) != std::future_status::ready) stuck();
    EXPECT_NE(described.get().status, EAGAIN) << opens << ": they have waited for each other";
    EXPECT_EQ(migrd.ask(MIGR_MSG_ROLLBACK).status, 0);
  }
}

TEST_F(Objects, FamilyThatIsNotThereIsNotSupported) {
  ibv_qp_init_attr attr{};
  auto* create = reinterpret_cast<decltype(&efadv_create_driver_qp)>(dlsym(RTLD_DEFAULT, "efadv_create_driver_qp"));
  ASSERT_NE(create, nullptr);
  EXPECT_EQ(create(pd_, &attr, 0), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

// As libibverbs: destroying waits until the application has acknowledged, and other verbs go on meanwhile.
template <class Destroy>
void expect_to_wait(ibv_context* context, ibv_event_type type, ibv_pd* pd, Destroy destroy) {
  ibv_async_event event{};
  recorder_raise(type);
  ASSERT_EQ(ibv_get_async_event(context, &event), 0);
  auto destroyed = std::async(std::launch::async, destroy);
  EXPECT_EQ(destroyed.wait_for(100ms), std::future_status::timeout);
  auto others = std::async(std::launch::async, [&] {
    char memory[8];
    ibv_dereg_mr(ibv_reg_mr(pd, memory, sizeof memory, 0));
    ibv_ack_async_event(&event);
  });
  if (others.wait_for(10s) != std::future_status::ready || destroyed.wait_for(10s) != std::future_status::ready) {
    stuck();
  }
  EXPECT_EQ(destroyed.get(), 0);
}

TEST_F(Objects, DestroyQpWaitsForAcknowledgement) {
  ibv_qp* qp = make_qp();
  expect_to_wait(context_, IBV_EVENT_COMM_EST, pd_, [qp] { return ibv_destroy_qp(qp); });
}

TEST_F(Objects, DestroySrqWaitsForAcknowledgement) {
  ibv_srq* srq = make_srq();
  expect_to_wait(context_, IBV_EVENT_SRQ_LIMIT_REACHED, pd_, [srq] { return ibv_destroy_srq(srq); });
}

}  // namespace
