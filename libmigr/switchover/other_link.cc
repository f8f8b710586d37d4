/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The new path is on another NIC of this host: other functions, other keys, another CQ. */
#include <cerrno>
#include <utility>

#include "../kernel_link.h"
#include "../links/links.h"
#include "../real.h"
#include "parts.h"

namespace migr::switchover {
namespace {

/// Where posts go. Threads of the direct path read these before they look at the state word (path.cc), so that who was
/// let through by an old state never gets here.
void set_route(QpShadow& q, ibv_qp* qp, const ibv_context_ops& ops, const migr_key_entry* keys) {
  q.key_table = keys;
  q.receive_ring = q.send_ring = {};
  __atomic_store_n(&q.real_post_send, ops.post_send, __ATOMIC_RELEASE);
  __atomic_store_n(&q.real_post_recv, ops.post_recv, __ATOMIC_RELEASE);
  __atomic_store_n(&q.real, qp, __ATOMIC_RELEASE);
}

}  // namespace

int switch_to_link(QpShadow& q, const LinkPath& to, std::string& why) {
  QpShadow* const one[] = {&q};
  q.phase = Phase::kDrained;  // cut: nothing is in flight
  if (const int err = check_arcs(one, Phase::kSwitched, why)) return err;
  for_cqs(q, [&](CqShadow& c) {
    std::lock_guard guard(c.lock);
    path::translate_qpns(c, kTranslateQpn | kFakeCq | kLinkedCq);
    if (c.armed) links::arm(c, c.solicited_only);
  });
  std::lock_guard guard(q.lock);
  path::translate_keys(q, kTranslateLocal | kTranslateRemote);
  __atomic_store_n(&to.qpn_table[to.qp->qp_num & MIGR_QPN_MASK], q.vqpn() | MIGR_QPN_VALID, __ATOMIC_RELEASE);
  q.old_real = q.real;
  set_route(q, to.qp, *to.ops, to.keys);
  q.phase = Phase::kSwitched;
  set_bits(q, kLogReceives | kTrapped);
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

int back_to_broken(QpShadow& q, std::string& why) {
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  {
    std::lock_guard guard(q.lock);
    if (q.old_real) {
      ibv_qp* const path = std::exchange(q.old_real, nullptr);
      clear_bits(q, kTrapped);
      (void)real().modify_qp(q.real, &to, IBV_QP_STATE);  // what comes to it now is nobody's
      set_route(q, path, q.context->ops, q.context->kernel->key_table());
      q.kept_receives.insert(q.kept_receives.begin(), q.logged_receives.begin(), q.logged_receives.end());
      q.logged_receives.clear();
    }
    q.cut.reset();
  }
  QpShadow* const one[] = {&q};
  std::vector<migr_resume_stat> ignored;
  int err = resume(one, ignored, why);
  if (const int closed = real().modify_qp(q.real, &to, IBV_QP_STATE); closed && !err) err = fail(why, closed, "modify_qp to ERR of " + qp_name(q));
  return err;
}

}  // namespace migr::switchover
