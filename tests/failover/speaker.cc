// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "speaker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "model.h"
#include "store.h"

namespace ends {

Speaker::Speaker(const Library& library, ibv_pd* of, ibv_cq* completes, ibv_srq* srq, bool sessions, const ibv_qp_cap& cap)
    : lib(library), pd(of ? of : lib.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(lib.context)),
      cq(completes ? completes : lib.verb<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(lib.context, 256, nullptr, nullptr, 0)) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.srq = srq;
  init.cap = cap;
  init.qp_type = IBV_QPT_RC;
  ibv_qp_init_attr_ex wide{};
  std::memcpy(&wide, &init, sizeof init);
  wide.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  wide.pd = pd;
  wide.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
  qp = sessions ? ibv_create_qp_ex(lib.context, &wide) : lib.verb<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd, &init);
  ibv_query_gid(lib.context, 1, 0, &gid);
}

int Speaker::modify(const ibv_qp_attr& attr, int mask) const {
  ibv_qp_attr a = attr;
  return lib.verb<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp")(qp, &a, mask);
}

int Speaker::grant(unsigned access) const {
  ibv_qp_attr a{};
  a.qp_access_flags = access;
  return modify(a, IBV_QP_ACCESS_FLAGS);
}

void Speaker::answer(const Speaker& to, unsigned access) const {
  ibv_qp_attr a{};
  a.port_num = 1;
  a.qp_access_flags = access;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = to.qp->qp_num;
  a.ah_attr.is_global = a.ah_attr.port_num = 1;
  a.ah_attr.grh.dgid = to.gid;
  a.qp_state = IBV_QPS_INIT;
  ASSERT_EQ(modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  a.qp_state = IBV_QPS_RTR;
  ASSERT_EQ(modify(a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
}

int Speaker::send_too(ibv_qp_attr a, int more) const {
  a.qp_state = IBV_QPS_RTS;
  return modify(a, more | IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

void Speaker::connect(const Speaker& to, unsigned access) const {
  answer(to, access);
  ASSERT_EQ(send_too(), 0);
}

ibv_qp_attr Speaker::query() const {
  ibv_qp_attr a{};
  ibv_qp_init_attr init;
  EXPECT_EQ(lib.verb<int(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp")(qp, &a, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_TIMEOUT | IBV_QP_PATH_MTU, &init), 0);
  return a;
}

migr_links_vqp_state Speaker::state() const {
  migr_links_name name{};
  std::memcpy(name.gid, gid.raw, sizeof name.gid);
  name.vqpn = qp->qp_num;
  migr_links_vqp_state s{};
  return store_state(&name, &s) ? s : migr_links_vqp_state{};
}

std::string Speaker::how() const {
  const migr_links_vqp_state s = state();
  return "phase " + std::to_string(s.phase) + " on link " + std::to_string(s.link) + ", epoch " + std::to_string(s.epoch) + ", " + s.why;
}

std::string meet(const Speaker& x, const Speaker& y) {
  x.connect(y), y.connect(x);
  return wait_for([&] { return x.ready_on(0) && y.ready_on(0); }) ? "" : x.how() + "; " + y.how();
}

Pairs::Pairs(const Library& a, const Library& b, unsigned n) {
  for (unsigned i = 0; i < n; ++i) {
    const bool shares = i % 64 != 0;
    xs.push_back(std::make_unique<Speaker>(a, i ? xs[0]->pd : nullptr, shares ? xs.back()->cq : nullptr));
    ys.push_back(std::make_unique<Speaker>(b, i ? ys[0]->pd : nullptr, shares ? ys.back()->cq : nullptr));
    xs[i]->connect(*ys[i]), ys[i]->connect(*xs[i]);
  }
}

unsigned Pairs::ready_on(unsigned link) const {
  unsigned n = 0;
  for (std::size_t i = 0; i < xs.size(); ++i) n += xs[i]->ready_on(link) && ys[i]->ready_on(link);
  return n;
}

bool Pairs::all_on(unsigned link) const {
  return std::all_of(xs.begin(), xs.end(), [link](const auto& x) { return x->state().link == link; }) && std::all_of(ys.begin(), ys.end(), [link](const auto& y) { return y->state().link == link; });
}

bool Writing::post() {
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  ++posted;
  return !ibv_post_send(from.qp, &wr, &bad);
}

bool Writing::completed() {
  for (ibv_wc wc; ibv_poll_cq(from.cq, 1, &wc) == 1; ++done) EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << "at " << done;
  return done == posted;
}

ibv_mr* register_words(const Speaker& of, void* at, std::size_t bytes) {
  return of.lib.verb<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr")(of.pd, at, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
}

StandsStill::StandsStill(const Library& library) {
  model_hold_pds(true);
  call_ = std::async(std::launch::async, [&] { return library.verb<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(library.context) != nullptr; });
  EXPECT_TRUE(wait_for([] { return model_pds_waiting() == 1; }));
}

StandsStill::~StandsStill() {
  model_hold_pds(false);
  EXPECT_TRUE(call_.get());
}

}  // namespace ends
