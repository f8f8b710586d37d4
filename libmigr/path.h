/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The data path. Everything in path.cc lies in the section migr_path, so that a
 * thread can be seen to be inside it (docs/protocol.md, "Suspension is closed").
 */
#ifndef MIGR_PATH_H
#define MIGR_PATH_H

#include <span>

#include "shadow.h"

namespace migr::path {

/* What goes into ibv_context.ops: all noexcept, as the verbs they stand for. */
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept;
int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) noexcept;
/// The same, of a context with backup links.
int poll_protected(ibv_cq* cq, int entries, ibv_wc* wc) noexcept;

/// What the application's ibv_wr_start() calls, of a QP that can have no backup link.
void wr_start(ibv_qp_ex* qp) noexcept;

/// Our functions for every one that the provider gave `qp.real_ex`. `qp.context` is known.
void install_wr_api(QpShadow& qp);
/// The same for an ibv_cq_ex.
void install_pollers(CqShadow& cq);

/// From now on keys are translated, for good. Caller holds qp.lock, or nobody knows the QP yet.
/// @param bits kTranslateLocal, kTranslateRemote
void translate_keys(QpShadow& qp, std::uint32_t bits);
/// The same with QP numbers of completions. Caller holds cq.lock, or nobody knows the CQ yet. @param bits kTranslateQpn
void translate_qpns(CqShadow& cq, std::uint32_t bits);

/// Translates and posts, whatever the state word says. Caller holds qp.lock or knows that nobody else posts.
int post_one_send(QpShadow& qp, const KeptSend& send) noexcept;
/// The same in one call of the provider, which may be a system call: the first of `sends`, in order, as many as fit.
/// @return 0, or the errno of sends[posted]
int post_sends(QpShadow& qp, std::span<const KeptSend* const> sends, std::size_t& posted) noexcept;
int post_one_receive(QpShadow& qp, ibv_qp* to, const KeptReceive& receive) noexcept;
/// As the application posts it. Caller holds srq.lock.
int post_one_receive(SrqShadow& srq, std::uint64_t wr_id, std::span<const ibv_sge> sges) noexcept;
/// By the name that the device is to know it by, to the SRQ that it has made. The same.
int post_named(SrqShadow& srq, std::uint64_t name, std::span<const ibv_sge> sges) noexcept;
/// The physical key; a key that does not exist becomes one that no device has given (index 0).
[[gnu::always_inline]] inline std::uint32_t physical_lkey(const migr_key_entry* keys, std::uint32_t key) noexcept {
  constexpr std::uint32_t kTag = 0xff;
  return keys[key >> 8].lkey ^ (key & kTag);
}
/// Where receives of an SRQ go: the device's functions and keys.
struct SrqTarget {
  ibv_srq* srq;
  int (*post)(ibv_srq*, ibv_recv_wr*, ibv_recv_wr**);
  const migr_key_entry* keys;
};
int post_translated(const SrqTarget& to, std::uint64_t name, std::span<const ibv_sge> sges) noexcept;
/// Of an ibv_cq_ex whose sessions stay on the provider's CQ: names of ours become the application's.
void name_receives(CqShadow& cq);

/// Moves completions from the provider into the fake CQ: virtual QPNs, markers filtered out. Caller holds cq.lock.
/// @return completions moved
int poll_to_fake(CqShadow& cq) noexcept;

/// Once, before any CQ is protected. @return false: this kernel has no membarrier(2), and no CQ may be
bool watch_pollers();
/// A flag was raised before: from here on the two that follow tell of all threads that have not seen it. Keeps errno.
void pass_barrier();
/// Nobody holds completions of protected CQ `cq` that were not looked at.
bool pollers_are_outside(const CqShadow& cq);
/// No ibv_wr_* session is open on the path of `qp`, whose kKeepSends was raised before.
bool sessions_are_outside(const QpShadow& qp);

/// The completion of a work request that was posted in the name of others: theirs, to the fake CQ. Caller holds cq.lock.
/// @return how many; -1: `wc` is none of those
int complete_stand_in(CqShadow& cq, const ibv_wc& wc);

}  // namespace migr::path

namespace migr::marker {

/// wr_ids of work requests that are ours: a random base per process, and a count. Never seen by the application.
std::uint64_t next();
bool is_marker(std::uint64_t wr_id);

}  // namespace migr::marker

#endif
