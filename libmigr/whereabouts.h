/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Connections that are made after a migration. The name that an application holds
 * of a peer, (GID, QPN), may be of a host that the peer has left; and a process that
 * has moved tells new partners of keys that its device does not know. migrd says
 * between which GIDs processes have moved (MOVES). Who connects a QP to one of those
 * asks it where the QP is (WHERE), once, and so does who has not been told yet; who has
 * moved has its keys told to each new partner (INTRODUCE, which arrives there as MET).
 * Where nothing has moved, nothing is asked.
 */
#ifndef MIGR_WHEREABOUTS_H
#define MIGR_WHEREABOUTS_H

#include <optional>
#include <span>
#include <string>

#include "../include/migr/proc_wire.h"
#include "shadow.h"

namespace migr::whereabouts {

/// MOVES, all there are. Caller holds the Registry's lock.
void set_moves(std::span<const migr_move> moves);
/// The connection to migrd has ended: what moves from now on is asked for. Caller holds the Registry's lock.
void untold();
/// REBIND: this process has moved. Caller holds the Registry's lock.
void moved();

/// MET: what the memory of the process behind `q` is called. Caller holds the Registry's lock.
void met(QpShadow& q, std::span<const migr_key_map> keys);
/// `q` is in RESET: its next partner is another. Caller holds the Registry's lock.
void parted(QpShadow& q);

/// One ibv_modify_qp() of a connected QP. Thread: any; blocks for at most a few seconds, and only where something has moved
/// or may have.
class Connecting {
 public:
  Connecting(ibv_qp* qp, const ibv_qp_attr& attr, int mask);
  /// Asks where the peer is. Not under the Registry's lock.
  void look_up();
  /// What was asked may not be so any more. Caller holds the Registry's lock.
  bool stale() const;
  /// Puts the peer's address there. @return false: it is the application's.
  bool put(ibv_qp_attr& attr) const;
  /// It is connected: notes what the partner has to be told. Caller holds the Registry's lock.
  void connected(const QpShadow& q);
  /// Tells it. Not under the Registry's lock.
  void introduce() const;

 private:
  ibv_qp* const qp_;
  bool names_peer_;
  bool receives_;  ///< it can from now on
  migr_qp_address asked_{};
  std::optional<migr_qp_address> found_;
  std::uint64_t as_of_ = 0;
  std::uint64_t name_ = 0;
  std::vector<migr_key_map> keys_;
};

}  // namespace migr::whereabouts

#endif
