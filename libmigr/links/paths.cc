/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Paths on links: QPs of ours, each half of a path, and how it is connected to the other one. */
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../gids.h"
#include "../kernel_link.h"
#include "../real.h"
#include "channel.h"
#include "state.h"

namespace migr::links {

bool is_known(const ibv_gid& gid) {
  return std::any_of(std::begin(gid.raw), std::end(gid.raw), [](std::uint8_t b) { return b; });
}

bool find_home(const QpShadow& q, QpLink& l) {
  if (!is_known(q.birth.gid)) return false;
  ibv_qp_attr attr{};
  if (switchover::ask_device(q, attr, switchover::kConnectionAttrs)) return false;
  const std::uint32_t port = attr.ah_attr.port_num, index = attr.ah_attr.grh.sgid_index;
  const auto all = gid_table(q.context->real, port, index);
  l.home_gid = {};
  l.home_gid.gid = q.birth.gid;  // as long as its port has none
  l.home_gid.gid_index = index;
  l.home_gid.port_num = port;
  l.home_gid.gid_type = IBV_GID_TYPE_ROCE_V2;
  if (const ibv_gid_entry* const now = gids::find(all, port, index)) l.home_gid = *now;
  l.first_home_gid = l.home_gid;
  l.home_bits = q.state.load(std::memory_order_relaxed) & kNameBits;
  return true;
}

namespace {

/// The same later.
bool find_home_again(QpLink& l, std::string& why) {
  const auto all = gid_table(l.q->context->real, l.home_gid.port_num, l.home_gid.gid_index);
  const ibv_gid_entry* const now = gid_again(all, l.first_home_gid, l.home_gid);
  if (!now) return why = l.legs[kHome].link->config.device + " has no GID of the kind that it had", false;
  l.home_gid = *now;
  return true;
}

}  // namespace

ibv_qp* create_on(ibv_pd* pd, ibv_qp_init_attr init, unsigned port, unsigned access, std::string& why) {
  init.qp_type = IBV_QPT_RC;
  return to_init(real().create_qp(pd, &init), port, access, why);
}

ibv_qp* to_init(ibv_qp* qp, unsigned port, unsigned access, std::string& why) {
  if (!qp) return why = errno_text("create_qp"), nullptr;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = static_cast<std::uint8_t>(port);
  attr.qp_access_flags = access;
  const int err = real().modify_qp(qp, &attr, switchover::kInitMask);
  if (!err) return qp;
  real().destroy_qp(qp);
  errno = err;
  return why = errno_text("modify_qp to INIT"), nullptr;
}

void destroy_path(QpLink& l, Side side, Path& path) {
  if (!path.qp) return;
  for (CqShadow* c : {l.q->send_cq, l.q->recv_cq}) {
    std::lock_guard guard(c->lock);
    if (c->link) c->link->qps[side].erase(path.qp->qp_num);
  }
  state()->discards.add(path.qp);
  path = {};
}

void drop_next(QpLink& l, Side side) {
  Leg& leg = l.legs[side];
  destroy_path(l, side, leg.next);
  ++leg.newest;  // what is still said of it is of one before
  leg.asked = 0;
  l.first[1].qpn = 0;  // as which it was published
  l.told_links = 0;    // once more
  changed();
}

bool make_half(QpLink& l, Side side, std::uint32_t serial, std::string& why) {
  Path made;
  destroy_path(l, side, l.legs[side].next);
  l.legs[side].asked = 0;
  return create_half(l, side, made, why) && adopt(l, side, made, serial, why);
}

bool create_half(QpLink& l, Side side, Path& out, std::string& why) {
  const QpShadow& q = *l.q;
  const Leg& leg = l.legs[side];
  ibv_qp_init_attr_ex init{};
  init.qp_type = IBV_QPT_RC;
  init.cap = q.cap;
  init.sq_sig_all = q.init.sq_sig_all;
  if (side == kHome && !find_home_again(l, why)) return false;
  if (!has_room_for(*l.twin, side, q)) return why = "a PD, a CQ or an SRQ is not there yet on " + leg.link->config.device, false;
  init.send_cq = cq_on(*q.send_cq, side);
  init.recv_cq = cq_on(*q.recv_cq, side);
  init.pd = l.twin->pd(q.init.pd, side);
  init.srq = srq_on(q, side);
  init.comp_mask = q.init.comp_mask & (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
  init.send_ops_flags = q.init.send_ops_flags;
  const unsigned port = side == kHome ? l.home_gid.port_num : leg.link->config.port;
  KernelLink& kernel = side == kHome ? *q.context->kernel : *leg.link->kernel;
  ibv_context* const ctx = side == kHome ? q.context->real : leg.link->ctx;
  ibv_qp* const made = to_init(switchover::create_like(q, ctx, init), port, q.access_flags >= 0 ? static_cast<unsigned>(q.access_flags) : 0, why);
  if (!made) return false;
  out = {.qp = made, .serial = 0, .psn = switchover::random_psn(), .peer_psn = 0, .connected = false, .sends = {}, .receives = {}, .birth = false, .gid = side == kHome ? l.home_gid : leg.link->gid};
  const int err = provider::locate_queues(kernel, *made, out.sends, out.receives);
  if (!err) return true;
  why = std::string("cannot find the queues of a QP on ") + leg.link->config.device + ": " + std::strerror(err);
  return real().destroy_qp(made), false;
}

bool adopt(QpLink& l, Side side, Path path, std::uint32_t serial, std::string& why) {
  QpShadow& q = *l.q;
  Leg& leg = l.legs[side];
  destroy_path(l, side, leg.next);
  leg.asked = 0;
  path.qp->qp_context = &q;
  path.serial = leg.newest = serial;
  leg.next = path;
  for (CqShadow* c : {q.send_cq, q.recv_cq}) {
    std::lock_guard guard(c->lock);
    c->link->qps[side][path.qp->qp_num] = &l;
  }
  KernelLink& kernel = side == kHome ? *q.context->kernel : *leg.link->kernel;
  const int err = kernel.bind_qp(q.vqpn(), path.qp->qp_num);
  if (!err) return true;
  why = std::string("cannot name a QP on ") + leg.link->config.device + ": " + std::strerror(err);
  return destroy_path(l, side, leg.next), false;
}

void lead_to(ibv_ah_attr& ah, const Link& link, const std::uint8_t gid[16], std::uint16_t lid) {
  std::memcpy(ah.grh.dgid.raw, gid, sizeof ah.grh.dgid.raw);
  ah.grh.sgid_index = static_cast<std::uint8_t>(link.gid.gid_index);
  if (!ah.grh.hop_limit) ah.grh.hop_limit = 64;
  ah.is_global = 1;
  ah.dlid = lid;
  ah.port_num = static_cast<std::uint8_t>(link.config.port);
}

bool connect_to_own(const Link& link, ibv_qp* qp, const ibv_qp* to, std::uint32_t psn, std::string& why) {
  constexpr std::uint8_t kRnrRetries = 3;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = link.mtu;
  attr.dest_qp_num = to->qp_num;
  attr.rq_psn = attr.sq_psn = psn;
  attr.max_dest_rd_atomic = attr.max_rd_atomic = 1;
  lead_to(attr.ah_attr, link, link.gid.gid.raw, link.lid);
  int err = real().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = kOwnTimeout;
  attr.retry_cnt = kOwnRetries;
  attr.rnr_retry = kRnrRetries;
  if (!err) err = real().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  if (err) why = std::string("modify_qp of a QP of ours to another one: ") + std::strerror(err);
  return !err;
}

migr_links_path address_of(const QpLink& l, Side side, const Path& path) {
  migr_links_path out{};
  const Leg& leg = l.legs[side];
  out.link = leg.link->index;
  out.serial = path.serial;
  std::memcpy(out.gid, path.gid.gid.raw, sizeof out.gid);
  out.qpn = path.qp->qp_num;
  out.psn = path.psn;
  out.lid = leg.link->lid;
  out.mtu = static_cast<std::uint8_t>(leg.link->mtu);
  return out;
}

int connect_half(QpLink& l, Side side, Path& path, const migr_links_path& to, std::string& why) {
  QpShadow& q = *l.q;
  const Link& link = *l.legs[side].link;
  ibv_qp_attr attr{};
  const ibv_qp_state state = q.real->state;
  int err = switchover::ask_device(q, attr, switchover::kConnectionAttrs);
  if (err) return why = std::string("query_qp: ") + std::strerror(err), err;
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = std::min({q.birth.path_mtu, link.mtu, static_cast<ibv_mtu>(to.mtu)});  // whatever path each end is on now, the same at both
  attr.dest_qp_num = to.qpn;
  attr.rq_psn = to.psn;
  lead_to(attr.ah_attr, link, to.gid, to.lid);
  attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(path.gid.gid_index);
  attr.ah_attr.port_num = static_cast<std::uint8_t>(path.gid.port_num);
  if (state == IBV_QPS_RTR) {  // it only answers: what it would send with is not set
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
  }
  err = real().modify_qp(path.qp, &attr, switchover::rtr_mask(q));
  if (err) return why = std::string("modify_qp to RTR: ") + std::strerror(err), err;
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = path.psn;
  err = real().modify_qp(path.qp, &attr, switchover::rts_mask(q));
  if (err) return why = std::string("modify_qp to RTS: ") + std::strerror(err), err;
  path.peer_psn = to.psn;
  path.connected = true;
  return 0;
}

}  // namespace migr::links
