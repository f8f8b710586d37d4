// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Wait-before-stop and what follows when its limit runs out, for one process; the same at both ends of a connection.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "process_session.h"
#include "wire.pb.h"

namespace migr {

/// QPs of a process, as the coordinator counts them.
struct CountedQps {
  std::vector<migr_qp_ref> refs;
  std::vector<std::uint32_t> index;  // of each ref
  // Where one is, by context and vQPN.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> places() const;
};

/// Answers of several processes are put together in one reply.
template <class Reply>
struct Shared {
  Reply& reply;
  std::mutex lock{};
};

/// Before the drain: those of its QPs whose other end is gone are not to be waited for. A library that does not know the question waits.
Status give_up(ProcessSession& s, std::uint32_t id, const CountedQps& counted, const std::set<std::size_t>& gone);
/// @param asked  QPs to be drained; none: all of the process
/// @param tell   QPs that are not done in time are no error. One that is not `counted` is: its other end is not asked
Status drain_process(ProcessSession& s, std::uint32_t id, std::span<const migr_qp_ref> asked, const CountedQps& counted, int limit_ms,
                     bool tell, Shared<wire::DrainReply>& out);
Status cut_process(ProcessSession& s, const CountedQps& counted, const wire::CutRequest& r, Shared<wire::CutReply>& out);
Status settle_process(ProcessSession& s, const CountedQps& counted, const wire::SettleRequest& r, Shared<wire::SettleReply>& out);

/// One more answer.
void add_to(wire::SettleReply& sum, const wire::SettleReply& part);

}  // namespace migr
