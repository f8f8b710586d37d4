/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "former.h"

#include "state.h"

namespace migr::links {
namespace {

/// Physical; 0: the device does not say.
std::uint32_t peer_qpn(const QpShadow& q) {
  ibv_qp_attr attr{};
  return switchover::ask_device(q, attr, IBV_QP_DEST_QPN) ? 0 : attr.dest_qp_num;
}

}  // namespace

void leave_former(const QpLink& l) {
  QpShadow& q = *l.q;
  Former& f = state()->formers[&q];
  std::lock_guard guard(q.lock);
  f = {.qpn = q.pqpn(), .peer_qpn = peer_qpn(q), .path = {}, .epoch = l.epoch, .drain_epoch = l.drain_epoch, .executed = l.executed, .newest = {}, .id = l.id, .next_atomic = l.relay.number, .answers = l.answers, .unheard = l.unheard};
  if (l.on == kHome) f.path.serial = l.path.serial, f.path.psn = l.path.psn, f.path.peer_psn = l.path.peer_psn;
  for (const Leg& leg : l.legs) f.newest.push_back(leg.newest);
}

bool follow_former(QpLink& l) {
  const auto found = state()->formers.find(l.q);
  if (found == state()->formers.end()) return false;
  const Former& f = found->second;
  // One that is adrift has no other end.
  if (f.qpn != l.q->pqpn() || (!l.q->adrift && f.peer_qpn != peer_qpn(*l.q)) || f.newest.size() != l.legs.size()) return false;
  l.id = f.id;
  l.path.serial = f.path.serial;
  l.path.psn = f.path.psn;
  l.path.peer_psn = f.path.peer_psn;
  l.epoch = l.born_in = f.epoch;
  l.drain_epoch = f.drain_epoch;
  l.executed = f.executed;
  for (Side side = kHome; side < l.sides(); ++side) l.legs[side].newest = f.newest[side];
  l.relay.number = f.next_atomic;
  l.answers = f.answers;
  lose_answers(l);
  l.unheard = f.unheard;
  return true;
}

void drop_former(const QpShadow& q) {
  if (state()) state()->formers.erase(&q);
}

}  // namespace migr::links
