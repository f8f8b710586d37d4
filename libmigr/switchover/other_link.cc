/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The new path is on another NIC of this host: other functions, other keys, another CQ. */
#include <algorithm>
#include <cerrno>

#include "../kernel_link.h"
#include "../links/links.h"
#include "../real.h"
#include "parts.h"

namespace migr::switchover {
namespace {

/// Where posts go. Threads of the direct path read these before they look at the state word (path.cc), so that who was
/// let through by an old state never gets here.
void set_route(QpShadow& q, const LinkPath& to) {
  q.key_table = to.keys;
  q.receive_ring = to.receives;
  q.send_ring = to.sends;
  __atomic_store_n(&q.real_post_send, to.ops->post_send, __ATOMIC_RELEASE);
  __atomic_store_n(&q.real_post_recv, to.ops->post_recv, __ATOMIC_RELEASE);
  __atomic_store_n(&q.real, to.qp, __ATOMIC_RELEASE);
  lead_sessions(q);
}

}  // namespace

int switch_to_link(QpShadow& q, const LinkPath& to, std::string& why) {
  QpShadow* const one[] = {&q};
  q.phase = Phase::kDrained;  // cut: nothing is in flight
  if (const int err = check_arcs(one, Phase::kSwitched, why)) return err;
  for_cqs(q, [&](CqShadow& c) {
    std::lock_guard guard(c.lock);
    path::translate_qpns(c, kTranslateQpn | kFakeCq | kLinkedCq);
    if (c.armed) links::arm(c, c.solicited_only);  // the default link's is armed, or its event has not been read: armed anew it would bring another
  });
  std::lock_guard guard(q.lock);
  path::translate_keys(q, kTranslateLocal | kTranslateRemote);
  set_bits(q, kLogReceives | kTrapped);
  set_route(q, to);
  q.phase = Phase::kSwitched;
  if (const int err = post_receives(q, q.real, q.cut->receives, why)) return err;
  std::vector<KeptReceive> late;
  links::late_receives(q, late);
  if (const int err = post_receives(q, q.real, late, why)) return err;
  for (KeptReceive& receive : q.kept_receives) {
    if (const int err = path::post_one_receive(q, q.real, receive)) return fail(why, err, "post_recv to " + qp_name(q) + "'s new path");
    q.logged_receives.push_back(std::move(receive));
  }
  q.kept_receives.clear();
  clear_bits(q, kKeepReceives);
  return 0;
}

void take_back_path(QpShadow& q, ibv_qp* path) {
  std::lock_guard guard(q.lock);
  set_route(q, {.qp = path, .ops = &q.context->ops, .keys = q.context->kernel->key_table(), .sends = {}, .receives = {}});
  links::retire(exchange_remote_keys(q, nullptr));
  if (!links::shares_receives(q)) clear_bits(q, kTrapped);
}

int cast_off(QpShadow& q, ibv_qp* home, std::uint32_t bits, std::string& why) {
  const ibv_qp_state state = q.app_state();
  if (!std::all_of(q.cut->sends.begin(), q.cut->sends.end(), [](const QueuedSend& s) { return s.ours; }))
    return fail(why, EBUSY, qp_name(q) + " has work requests in flight");
  take_back_path(q, home);
  ibv_qp_init_attr init{};
  int err = real().query_qp(home, &q.cut->attr, kConnectionAttrs | IBV_QP_DEST_QPN | kPsns, &init);
  home->state = q.cut->attr.qp_state = state;
  if (err) return fail(why, err, "query_qp of " + qp_name(q));
  err = q.context->kernel->bind_qp(q.vqpn(), home->qp_num);
  if (!err) err = q.context->kernel->stands(home->qp_num, state);
  if (err) return fail(why, err, "cannot name the QP that " + qp_name(q) + " was born with");
  std::lock_guard guard(q.lock);
  q.cut->side = links::kHome;
  q.cut->pqpn = home->qp_num;
  clear_bits(q, kTranslateLocal | kTranslateRemote);
  set_bits(q, bits);
  q.adrift = true;
  q.adrift_ns = now_ns();
  return 0;
}

}  // namespace migr::switchover
