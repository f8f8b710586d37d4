// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migr_resume_stat of many QPs as one ResumeReply.
#pragma once

#include <algorithm>
#include <vector>

#include "migr/proc_wire.h"
#include "wire.pb.h"

namespace migr {

inline void add_stats(wire::ResumeReply& out, const std::vector<migr_resume_stat>& stats) {
  for (const auto& s : stats) {
    out.set_replayed_sends(out.replayed_sends() + s.replayed_sends);
    out.set_replayed_recvs(out.replayed_recvs() + s.replayed_recvs);
    if (s.resumed_ns < s.suspended_ns) continue;
    out.set_suspended_ns(std::max<std::uint64_t>(out.suspended_ns(), s.resumed_ns - s.suspended_ns));
    // A QP that was idle before has no "last completion" of this moment.
    const std::uint64_t from = std::max(s.last_cqe_ns, s.suspended_ns);
    if (s.resumed_ns >= from) out.set_blackout_ns(std::max<std::uint64_t>(out.blackout_ns(), s.resumed_ns - from));
  }
}

}  // namespace migr
