// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "replay.h"

#include <map>
#include <set>

#include "limits.h"

namespace migr {
namespace {

constexpr int kAnswerMs = 2'000;  // more than the drain's limit

// Those of them that are counted as one of `wanted`.
template <class Set>
CountedQps among(const CountedQps& counted, const Set& wanted) {
  CountedQps out;
  for (std::size_t i = 0; i < counted.refs.size(); i++)
    if (wanted.contains(counted.index[i])) out.refs.push_back(counted.refs[i]), out.index.push_back(counted.index[i]);
  return out;
}

}  // namespace

std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> CountedQps::places() const {
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> out;
  for (std::size_t i = 0; i < refs.size(); i++) out[{refs[i].ctx_id, refs[i].vqpn}] = i;
  return out;
}

Status give_up(ProcessSession& s, std::uint32_t id, const CountedQps& counted, const std::set<std::size_t>& gone) {
  const auto refs = among(counted, gone).refs;
  if (refs.empty()) return {};
  const Status done = s.ask<migr_qp_ref, migr_qp_ref>(MIGR_MSG_GONE, id, refs, process_ms(refs.size()));
  return done || done.error().code == EOPNOTSUPP ? Status() : done;
}

Status drain_process(ProcessSession& s, std::uint32_t id, std::span<const migr_qp_ref> asked, const CountedQps& counted, int limit_ms,
                     bool tell, Shared<wire::DrainReply>& out) {
  const Status done = s.ask<migr_drain_stat, migr_qp_ref>(MIGR_MSG_DRAIN, id, asked, limit_ms + kAnswerMs, static_cast<std::uint64_t>(limit_ms));
  if (done || done.error().code != ETIMEDOUT || !tell) return done;
  // Either the library has said so, or it is silent: then this is not answered.
  auto stats = s.ask<migr_drain_stat, migr_qp_ref>(MIGR_MSG_STATS, id, {}, kProcessMs);
  if (!stats) return done;
  std::vector<std::uint32_t> left;
  const auto places = counted.places();
  for (const auto& stat : *stats) {
    if (!stat.sq_in_flight) continue;
    const auto at = places.find({stat.ctx_id, stat.vqpn});
    if (at == places.end()) return done;
    left.push_back(counted.index[at->second]);
  }
  std::lock_guard lock(out.lock);
  for (const auto i : left) out.reply.add_left(i);
  return {};
}

Status cut_process(ProcessSession& s, const CountedQps& counted, const wire::CutRequest& r, Shared<wire::CutReply>& out) {
  const auto [refs, index] = among(counted, std::set<std::uint32_t>(r.index().begin(), r.index().end()));
  if (refs.empty()) return {};  // none would mean all
  auto psns = s.ask<migr_qp_psn, migr_qp_ref>(MIGR_MSG_CUT, r.id(), refs, process_ms(refs.size()),
                                              r.check() ? MIGR_CUT_CHECK : 0);
  if (!psns) return psns.error();
  if (r.check()) return {};
  if (psns->size() != refs.size()) return Error{EPROTO, s.label() + ": CUT answers for " + std::to_string(psns->size()) + " QPs, not for " + std::to_string(refs.size())};
  std::lock_guard lock(out.lock);
  for (std::size_t i = 0; i < refs.size(); i++) {
    auto* q = out.reply.add_qps();
    q->set_index(index[i]);
    q->set_psn((*psns)[i].psn);
  }
  return {};
}

Status settle_process(ProcessSession& s, const CountedQps& counted, const wire::SettleRequest& r, Shared<wire::SettleReply>& out) {
  std::map<std::uint32_t, std::uint32_t> there;
  for (const auto& q : r.qps()) there[q.index()] = q.psn();
  std::vector<migr_qp_psn> psns;
  for (std::size_t i = 0; i < counted.refs.size(); i++)
    if (const auto t = there.find(counted.index[i]); t != there.end())
      psns.push_back({counted.refs[i].ctx_id, counted.refs[i].vqpn, t->second, 0});
  if (psns.empty()) return {};
  auto stats = s.ask<migr_replay_stat, migr_qp_psn>(MIGR_MSG_SETTLE, r.id(), psns, process_ms(psns.size()));
  if (!stats) return stats.error();
  std::lock_guard lock(out.lock);
  for (const auto& stat : *stats) {
    wire::SettleReply one;
    one.set_qps(stat.replayed || stat.executed || stat.lost);
    one.set_replayed(stat.replayed);
    one.set_executed(stat.executed);
    one.set_lost(stat.lost);
    add_to(out.reply, one);
  }
  return {};
}

void add_to(wire::SettleReply& sum, const wire::SettleReply& part) {
  sum.set_qps(sum.qps() + part.qps());
  sum.set_replayed(sum.replayed() + part.replayed());
  sum.set_executed(sum.executed() + part.executed());
  sum.set_lost(sum.lost() + part.lost());
}

}  // namespace migr
