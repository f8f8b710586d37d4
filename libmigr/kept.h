/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What is posted while a vQP is suspended: copied, kept in order, replayed by the engine. Never on the data path. */
#ifndef MIGR_KEPT_H
#define MIGR_KEPT_H

#include "shadow.h"

namespace migr::kept {

/// @return 0; EOPNOTSUPP; EINVAL too many SGEs, or too much inline; what the device refuses it with
int copy(const QpShadow& q, const ibv_send_wr& wr, KeptSend& send);
/// Keeps a copy. Caller holds q.lock. @return as copy(); ENOMEM as a full send queue would
int keep(QpShadow& q, const ibv_send_wr& wr);
int keep(QpShadow& q, KeptReceive receive);
/// Caller holds s.lock.
int keep(SrqShadow& s, KeptReceive receive);
KeptReceive copy(const ibv_recv_wr& wr);

/* An ibv_wr_* session that started while suspended. */

/// Makes q.keeper, which takes the provider's place in such a session. Once, when the QP is made.
void install_keeper(QpShadow& q);
/// @return false: not suspended any more, the session belongs on the path
bool start(QpShadow& q);

}  // namespace migr::kept

#endif
