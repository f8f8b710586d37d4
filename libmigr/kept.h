/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What is posted while a vQP is suspended: copied, kept in order, replayed by the engine. Never on the data path. */
#ifndef MIGR_KEPT_H
#define MIGR_KEPT_H

#include "shadow.h"

namespace migr::kept {

/// Keeps a copy. Caller holds q.lock. @return 0; ENOMEM as a full send queue would; EINVAL too many SGEs
int keep(QpShadow& q, const ibv_send_wr& wr);
int keep(QpShadow& q, KeptReceive receive);
KeptReceive copy(const ibv_recv_wr& wr);

/* An ibv_wr_* session that started while suspended. */

/// @return false: not suspended any more, the session belongs on the path
bool start(QpShadow& q);
void open(QpShadow& q, ibv_wr_opcode opcode);
void set_sges(QpShadow& q, const ibv_sge* list, std::size_t count);
void set_inline(QpShadow& q, const ibv_data_buf* list, std::size_t count);
/// The WR is of a kind that cannot be kept: complete() will return EOPNOTSUPP.
void refuse(QpShadow& q);
int complete(QpShadow& q);
void abort(QpShadow& q);

}  // namespace migr::kept

#endif
