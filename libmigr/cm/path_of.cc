/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <string.h>

#include "../real.h"
#include "cm.h"

std::optional<migr::cm::Path> migr::cm::path_of(const QpShadow& qp) {
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  if (real().query_qp(qp.real, &attr, IBV_QP_AV | IBV_QP_DEST_QPN, &init)) return std::nullopt;
  Path path{name_of(qp), qp.pqpn(), attr.dest_qp_num, {}, qp.peer, false, false};
  memcpy(path.dgid.data(), attr.ah_attr.grh.dgid.raw, path.dgid.size());
  return path;
}
