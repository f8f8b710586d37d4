/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>

#include "../events.h"
#include "../kernel_link.h"
#include "../links/links.h"
#include "../provider/provider.h"
#include "../real.h"
#include "../windows.h"
#include "parts.h"

namespace migr::switchover {
namespace {

/// The path's attributes with the access flags that the application gave.
int query_path(QpShadow& q, ibv_qp_attr& attr, std::string& why) {
  if (q.cut) attr = q.cut->attr;
  else if (const int err = ask_device(q, attr, kConnectionAttrs))
    return fail(why, err, "query_qp of " + qp_name(q));
  if (q.write_access_added) attr.qp_access_flags &= ~static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE);
  return 0;
}

int create_spare(QpShadow& q, std::string& why) {
  ibv_qp_init_attr_ex init = q.init;
  init.qp_context = &q;
  init.send_cq = q.send_cq ? q.send_cq->real : nullptr;
  init.recv_cq = q.recv_cq ? q.recv_cq->real : nullptr;
  init.srq = init.srq ? shadow_of(init.srq).real : nullptr;
  q.spare = create_like(q, q.context->real, init);
  if (!q.spare) return fail(why, errno, "create_qp for " + qp_name(q));
  ibv_qp_attr attr{};
  if (const int err = query_path(q, attr, why)) return err;
  attr.qp_state = IBV_QPS_INIT;
  if (const int err = real().modify_qp(q.spare, &attr, kInitMask))
    return fail(why, err, "modify_qp to INIT for " + qp_name(q));
  q.spare_psn = random_psn();
  return 0;
}

}  // namespace

int create_spares(Qps qps, std::vector<migr_qp_spare>& out, std::string& why) {
  for (QpShadow* q : qps) {
    if (q->app.qp_type != IBV_QPT_RC && q->app.qp_type != IBV_QPT_UC) {
      why = qp_name(*q) + " is not connected: neither RC nor UC";
      return EOPNOTSUPP;
    }
    if (q->app_state() == IBV_QPS_RESET || q->app_state() == IBV_QPS_INIT) {  // since Find has seen it
      why = qp_name(*q) + " is not connected any more";
      return ENOENT;
    }
    if (const std::string no = links::set_aside(*q); !no.empty()) {
      why = qp_name(*q) + " " + no;
      return EBUSY;
    }
    // Suspended or drained already: a migration that makes nothing ahead of the stop.
    if (q->phase == Phase::kFrozen || q->phase == Phase::kSwitched || q->phase == Phase::kRebound || q->spare) {
      why = qp_name(*q) + " is in another switchover";
      return EBUSY;
    }
  }
  (void)provider::locate_queues(qps);  // for SWITCH, which says what fails
  for (QpShadow* q : qps) {
    if (const int err = create_spare(*q, why)) {
      for (QpShadow* undo : qps) destroy_real(undo->spare);
      out.clear();
      return err;
    }
    out.push_back({.ctx_id = q->context->ctx_id(), .vqpn = q->vqpn(), .pqpn = q->spare->qp_num, .psn = q->spare_psn});
  }
  return 0;
}

int connect_spare(QpShadow& q, const migr_qp_connect& to, std::string& why) {
  if (!q.spare) {
    why = qp_name(q) + " has no spare";
    return ENOENT;
  }
  ibv_qp_attr attr{};
  if (const int err = query_path(q, attr, why)) return err;
  attr.qp_state = IBV_QPS_RTR;
  attr.dest_qp_num = to.dest_qpn;
  attr.rq_psn = to.dest_psn & kPsnMask;
  std::memcpy(attr.ah_attr.grh.dgid.raw, to.dgid, sizeof to.dgid);
  std::memcpy(q.spare_peer.data(), to.peer, sizeof to.peer);
  int err = to_rtr(q, q.spare, attr);
  if (err) return fail(why, err, "modify_qp to RTR for " + qp_name(q));
  if (q.app_state() == IBV_QPS_RTR) return 0;
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = q.spare_psn;
  err = real().modify_qp(q.spare, &attr, rts_mask(q));
  return err ? fail(why, err, "modify_qp to RTS for " + qp_name(q)) : 0;
}

namespace {

/// Waits until every receive of `q`, which is in ERR, has completed. Caller holds c.lock. @param last the wr_id of a
/// receive of ours behind all others, or 0: it had no room
int wait_until_flushed(QpShadow& q, CqShadow& c, std::uint64_t last, std::string& why) {
  Patience patience;
  std::uint64_t quiet_since = 0;
  for (;;) {
    const bool moved = path::poll_to_fake(c) > 0;
    const auto seen = std::find_if(c.seen_markers.begin(), c.seen_markers.end(),
                                   [&](const ibv_wc& wc) { return wc.wr_id == last; });
    if (last && seen != c.seen_markers.end()) {
      c.seen_markers.erase(seen);
      return 0;
    }
    if (!last) {  // the queue empties a moment before the last completion comes
      std::vector<KeptReceive> left;
      if (const int err = provider::outstanding_receives(q, left))
        return fail(why, err, "cannot look at the receive queue of " + qp_name(q));
      if (moved || !left.empty()) quiet_since = 0;
      else if (!quiet_since) quiet_since = now_ns();
      else if (now_ns() - quiet_since > kFlushQuietMs * 1'000'000ull) return 0;
    }
    if (patience.over()) return fail(why, ETIMEDOUT, "the receives of " + qp_name(q) + " were not flushed");
    pause_briefly();
  }
}

/// UC: nobody waits for an answer, so a message may be under way still. The old path is closed (ERR), and which
/// receives were not used is told by their flushing, exactly: none is used twice, nothing old comes after something new.
/// @param receives those that are left. Caller holds q.lock
int close_old_path(QpShadow& q, std::vector<KeptReceive>& receives, std::string& why) {
  ibv_qp_init_attr init{};
  if (const int err = real().query_qp(q.real, &q.old_attr, kConnectionAttrs | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_SQ_PSN, &init))
    return fail(why, err, "query_qp of " + qp_name(q));
  CqShadow& c = *q.recv_cq;
  std::lock_guard cq_guard(c.lock);  // until what is flushed is out of the application's way
  ibv_recv_wr wr{.wr_id = marker::next(), .next = nullptr, .sg_list = nullptr, .num_sge = 0};
  ibv_recv_wr* bad;
  const bool marked = !q.app.srq && q.real_post_recv(q.real, &wr, &bad) == 0;
  if (marked) ++c.markers;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  events::hush(q, q.real);
  if (const int err = real().modify_qp(q.real, &to, IBV_QP_STATE))
    return fail(why, err, "modify_qp to ERR of " + qp_name(q));
  q.old_path_closed = true;
  q.outstanding = receives;
  // What it may have said by now stays with us, even if this path is taken up again.
  const auto said = [&](int err) {
    events::collect(*q.context->real);
    events::offer(*q.context->real);
    return err;
  };
  if (const int err = said(wait_until_flushed(q, c, marked ? wr.wr_id : 0, why)); err) return err;
  if (q.app.srq) {
    // What it has not used is the SRQ's, but for the receive of a message that came in part. It completes as it would
    // have done with the next message.
    for (ibv_wc& wc : c.fake)
      if (wc.qp_num == q.vqpn() && wc.status == IBV_WC_WR_FLUSH_ERR) wc.status = IBV_WC_REM_INV_REQ_ERR;
    return 0;
  }
  const std::size_t flushed = std::erase_if(c.fake, [&](const ibv_wc& wc) {
    return wc.qp_num == q.vqpn() && wc.status == IBV_WC_WR_FLUSH_ERR;
  });
  if (flushed < receives.size()) receives.erase(receives.begin(), receives.end() - static_cast<std::ptrdiff_t>(flushed));
  q.outstanding = receives;
  return 0;
}

/// Windows of type 2 belong to one QP.
int move_windows(QpShadow& q, ibv_qp* from, ibv_qp* to, std::string& why) {
  if (q.broken) return 0;
  {
    std::lock_guard guard(q.recv_cq->lock);
    path::poll_to_fake(*q.recv_cq);  // a receive may have ended a binding: soft-RoCE (6.1, 6.12) cannot end it twice, its kernel crashes
  }
  for (ibv_mw* mw : windows::belonging_to(q)) {
    windows::Operation op;
    windows::end_binding(mw, op);
    if (const int err = run_local(q, from, op.wr, why)) return err;
    if (!windows::bind_again(mw, op)) continue;
    if (const int err = run_local(q, to, op.wr, why)) return err;
  }
  return 0;
}

/// Caller holds q.lock.
int switch_one(QpShadow& q, const VirtualLkeys& keys, std::string& why) {
  std::vector<KeptReceive> receives;
  if (!links::receives_are_clean(q, links::kHome)) return fail(why, EBUSY, "the SRQ of " + qp_name(q) + " still holds receives of before its link failed");
  if (const int err = read_back_receives(q, keys, receives, why)) return err;
  if (!reliable(q))
    if (const int err = close_old_path(q, receives, why)) return err;
  if (const int err = post_receives(q, q.spare, receives, why)) return err;
  if (const int err = q.context->kernel->bind_qp(q.vqpn(), q.spare->qp_num))
    return fail(why, err, "cannot bind " + qp_name(q));
  q.old_real = q.real;
  q.old_told_psn = q.told_psn;
  q.told_psn = q.app_state() == IBV_QPS_RTR ? std::optional(q.spare_psn) : std::nullopt;
  become_path(q, q.spare);
  q.spare = nullptr;
  q.peer = q.spare_peer;
  q.peer_context = q.spare_peer_context;
  links::receives_may_move(q);
  if (const int err = break_if_broken(q, why)) return err;
  set_bits(q, kLogReceives);
  q.phase = Phase::kSwitched;  // from here on rollback() knows the way back
  if (q.cut) return 0;         // it has none of type 2
  return move_windows(q, q.old_real, q.real, why);
}

}  // namespace

namespace {

/// As q.old_attr says, with what is in q.outstanding. @param state  RTR, with the PSN at which the path has come to an end; or RTS
int connect_again(QpShadow& q, ibv_qp_state state, std::string& why) {
  ibv_qp_attr to = q.old_attr;
  to.qp_state = IBV_QPS_RESET;
  int err = real().modify_qp(q.real, &to, IBV_QP_STATE);
  ibv_qp_attr now{};
  if (!err && state == IBV_QPS_RTR && !(err = ask_device(q, now, IBV_QP_RQ_PSN))) to.rq_psn = now.rq_psn & kPsnMask;
  to.qp_state = IBV_QPS_INIT;
  if (!err) err = real().modify_qp(q.real, &to, kInitMask);
  to.qp_state = IBV_QPS_RTR;
  if (!err) err = to_rtr(q, q.real, to);
  to.qp_state = IBV_QPS_RTS;
  if (!err && state == IBV_QPS_RTS) err = real().modify_qp(q.real, &to, rts_mask(q));
  if (err) return fail(why, err, "cannot connect the old path of " + qp_name(q) + " again");
  events::hush(q, nullptr);
  return post_receives(q, q.real, q.outstanding, why);
}

}  // namespace

int open_old_path(QpShadow& q, std::string& why) { return connect_again(q, IBV_QPS_RTS, why); }

namespace {

/// Nobody can tell whether a message has come in part; but those that come do not stand still in the middle.
bool is_quiet(const QpShadow& q) {
  constexpr timespec kLook{0, 5'000'000};
  ibv_qp_attr before{}, now{};
  for (Patience patience; !patience.over();) {
    if (ask_device(q, before, IBV_QP_RQ_PSN)) return false;
    nanosleep(&kLook, nullptr);
    if (ask_device(q, now, IBV_QP_RQ_PSN)) return false;
    if (now.rq_psn == before.rq_psn) return true;
  }
  return false;
}

/// Caller holds q.lock.
int renew(QpShadow& q, std::string& why) {
  std::vector<KeptReceive> receives;
  int err = read_back_receives(q, VirtualLkeys(), receives, why);
  if (!err) err = close_old_path(q, receives, why);
  if (!err) err = connect_again(q, IBV_QPS_RTR, why);
  q.old_path_closed = q.responder_only = false;
  q.outstanding.clear();
  return err;
}

}  // namespace

int back_to_rtr(QpShadow& q, std::string& why) {
  if (in_error(q)) return fail(why, EINVAL, qp_name(q) + " has broken");
  if (!is_quiet(q)) return fail(why, EBUSY, qp_name(q) + " cannot go to RTS while it receives");
  links::step_out(q);
  raise_flags(q, kKeepSends | kKeepReceives);
  int err = wait_for_pollers(q, why);
  pause_briefly();  // whoever is about to post a receive has done so
  if (!err) {
    std::lock_guard guard(q.lock);
    err = renew(q, why);
  }
  QpShadow* const one[] = {&q};
  std::vector<migr_resume_stat> ignored;
  const int resumed = resume(one, ignored, why);
  return err ? err : resumed;
}

int switch_back(QpShadow& q, std::string& why) {
  q.spare = q.real;
  become_path(q, q.old_real);
  path::translate_keys(q, kTranslateLocal);  // who has read where the spare is, and not yet the state word, reads it anew: that is never zero again
  q.told_psn = q.old_told_psn;
  q.old_real = nullptr;
  const int bound = q.context->kernel->bind_qp(q.vqpn(), q.real->qp_num);
  int err = q.old_path_closed ? open_old_path(q, why) : 0;
  q.old_path_closed = false;
  q.outstanding.clear();
  links::receives_may_move(q);
  if (q.adrift) {
    std::move(q.logged_receives.begin(), q.logged_receives.end(), std::back_inserter(q.cut->receives));
    q.logged_receives.clear();
    return bound ? fail(why, bound, "cannot bind " + qp_name(q)) : 0;
  }
  if (!err) err = post_receives(q, q.real, q.logged_receives, why);
  if (!err && q.cut) err = join_again(q, why);
  else if (!err) err = move_windows(q, q.spare, q.real, why);
  return bound ? fail(why, bound, "cannot bind " + qp_name(q)) : err;
}

int switch_to_spare(Qps qps, std::string& why) {
  if (const int err = check_arcs(qps, Phase::kSwitched, why)) return err;
  for (QpShadow* q : qps)
    if (!q->spare) {
      why = qp_name(*q) + " has no spare";
      return ENOENT;
    }
  const VirtualLkeys keys;
  for (QpShadow* q : qps) {
    for_cqs(*q, [](CqShadow& c) {
      std::lock_guard guard(c.lock);
      path::translate_qpns(c, kTranslateQpn);
    });
    std::lock_guard guard(q->lock);
    if (const int err = switch_one(*q, keys, why)) return err;  // rollback() undoes those that were switched
  }
  return 0;
}

void change_old_path(QpShadow& q, ibv_qp_attr& attr, int mask) {
  if (!q.old_real || (mask & IBV_QP_STATE)) return;
  ibv_qp_attr* later = nullptr;  // with what it will be connected again
  if (q.old_path_closed) later = &q.old_attr;
  else if (q.cut) later = &q.cut->attr;
  if (!later) {
    real().modify_qp(q.old_real, &attr, mask);  // one that has broken takes nothing, and stays so
    return;
  }
  if (mask & IBV_QP_ACCESS_FLAGS) later->qp_access_flags = attr.qp_access_flags;
  if (mask & IBV_QP_MIN_RNR_TIMER) later->min_rnr_timer = attr.min_rnr_timer;
}

namespace {

/// What KEYS says of processes that have moved.
class Told {
 public:
  explicit Told(std::span<const migr_key_map> keys) {
    std::map<Peer, std::uint32_t> present;
    for (const migr_key_map& key : keys) {
      const Peer owner = std::to_array(key.owner);
      if (key.vrkey == MIGR_KEY_CONTEXT) present[owner] = key.prkey;
      Pairs& pairs = all_[owner][present[owner]];
      if (key.vrkey >> 8) pairs.emplace_back(key.vrkey, key.prkey);
    }
  }
  bool of(const Peer& owner) const { return all_.contains(owner); }
  /// Of a context. @param context  0: not known; of any. @return null: it has none
  std::shared_ptr<const RemoteKeys> table(const Peer& owner, std::uint32_t context) {
    const auto [made, fresh] = tables_.try_emplace({owner, context});
    if (!fresh) return made->second;
    Pairs pairs;
    if (const auto theirs = all_.find(owner); theirs != all_.end())
      for (const auto& [its, some] : theirs->second)
        if (!its || !context || its == context) pairs.insert(pairs.end(), some.begin(), some.end());
    if (!pairs.empty()) made->second = std::make_shared<const RemoteKeys>(pairs);
    return made->second;
  }

 private:
  using Pairs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
  std::map<Peer, std::map<std::uint32_t, Pairs>> all_;  ///< by context; 0: of any
  std::map<std::pair<Peer, std::uint32_t>, std::shared_ptr<const RemoteKeys>> tables_;
};

}  // namespace

int set_remote_keys(Qps qps, std::span<const migr_key_map> keys, std::string& why) {
  Told told(keys);
  for (QpShadow* q : qps) {
    if (q->phase == Phase::kRunning) {
      why = qp_name(*q) + " is not suspended";
      return EBUSY;
    }
    if (q->phase != Phase::kSwitched && !told.of(q->peer)) continue;  // its peer did not move; an older library does not say which had no key
    std::lock_guard guard(q->lock);
    exchange_remote_keys(*q, told.table(q->peer, q->peer_context));
    path::translate_keys(*q, kTranslateRemote);
  }
  return 0;
}

}  // namespace migr::switchover
