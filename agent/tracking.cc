// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "tracking.h"

#include <spdlog/spdlog.h>

#include "limits.h"

namespace migr {
namespace {

Result<std::vector<migr_nic_write>> ask_track(ProcessSession& s, std::uint32_t migration, migr_track how, std::span<const migr_qp_ref> refs = {}) {
  return s.ask<migr_nic_write, migr_qp_ref>(MIGR_MSG_TRACK, migration, refs, kProcessMs, how);
}

}  // namespace

Status track(ProcessSession& s, std::uint32_t migration, std::span<const migr_qp_ref> partner_of) {
  Status done = ask_track(s, migration, partner_of.empty() ? MIGR_TRACK_HERE : MIGR_TRACK_THERE, partner_of);
  if (!done) return done;
  done = s.wait_threads_outside(kSuspendMs);
  if (done) done = ask_track(s, migration, MIGR_TRACK_QUEUES);
  if (!done) (void)notes_of(s, migration);  // which ends it
  return done;
}

Result<std::vector<migr_nic_write>> notes_of(ProcessSession& s, std::uint32_t migration) { return ask_track(s, migration, MIGR_TRACK_TAKE); }

void add_writes(ProcessSession& s, std::uint32_t migration, const CountedQps& counted, Shared<wire::DrainReply>& out) {
  const auto writes = notes_of(s, migration);
  const auto places = counted.places();
  std::lock_guard lock(out.lock);
  if (!writes) {
    spdlog::info("{}: where it has written to is not known: {}", s.label(), writes.error().text);
    out.reply.set_tracked(false);
    return;
  }
  for (const migr_nic_write& w : *writes) {
    const auto at = places.find({w.ctx_id, w.vqpn});
    if (at == places.end()) continue;  // of no QP of this migration
    auto* one = out.reply.add_writes();
    one->set_index(counted.index[at->second]);
    one->set_key(w.key);
    one->set_start(w.start);
    one->set_bytes(w.bytes);
  }
}

}  // namespace migr
