/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "cq_room.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <mutex>

#include "../real.h"
#include "../switchover/parts.h"
#include "links.h"

namespace migr::links {
namespace {

bool holds(const ibv_cq* cq, std::uint64_t entries) { return cq->cqe >= 0 && static_cast<std::uint64_t>(cq->cqe) >= entries; }

/// Of all QPs on `c`. @param of  what a queue of so many takes
template <class Of>
std::uint64_t sum(const CqShadow& c, Of&& of) {
  std::uint64_t all = kOurEntries;
  for (const QpShadow* q : Registry::get().qps) {
    if (q->send_cq == &c) all += of(q->cap.max_send_wr);
    if (q->recv_cq == &c) all += q->app.srq ? 1 : of(q->cap.max_recv_wr);  // the one that a message has come into in part
  }
  return all;
}

/// soft-RoCE's rings take more than it says, up to a power of two less one. Who posts until there is no room fills them.
std::uint64_t with_full_rings(const CqShadow& c) {
  return sum(c, [](std::uint64_t n) { return std::bit_ceil(n + 1) - 1; });
}

/// More where the device has them: QPs mostly come one after the other.
bool enlarge(ibv_cq* cq, std::uint64_t needs, std::uint64_t full) {
  if (holds(cq, full)) return true;
  for (const std::uint64_t size : {2 * full, full, needs})
    if (!holds(cq, size) && size <= INT_MAX && !real().resize_cq(cq, static_cast<int>(size))) break;
  return holds(cq, needs);
}

std::string too_small(int has, std::uint64_t needs) {
  return "its CQ has " + std::to_string(has) + " entries, " + std::to_string(needs) + " may be flushed into it";
}

}  // namespace

std::uint64_t may_be_flushed(const CqShadow& c) {
  return sum(c, [](std::uint64_t n) { return n; });
}

std::uint64_t room_of_protected(const CqShadow& c) {
  if (!c.link) return 0;
  const auto& qps = Registry::get().qps;
  return std::any_of(qps.begin(), qps.end(), [&](const QpShadow* q) { return q->link && (q->send_cq == &c || q->recv_cq == &c); }) ? may_be_flushed(c) : 0;
}

std::string why_no_room(const CqShadow& c, Side side) {
  const std::uint64_t needs = may_be_flushed(c);
  const ibv_cq* const cq = cq_on(c, side);
  return cq && !holds(cq, needs) ? too_small(cq->cqe, needs) : "";
}

bool make_room(CqShadow& c) {
  const std::uint64_t needs = may_be_flushed(c), full = with_full_rings(c);
  if (!c.link) return holds(c.real, needs);
  // Who has its ring by the calls of a NIC family reads it where it is.
  bool all = c.immovable ? holds(c.real, needs) : enlarge(c.real, needs, full);
  std::lock_guard guard(c.lock);  // threads poll those of backup links under that
  for (const CqLink::Cq& cq : c.link->cqs) all = all && enlarge(cq.real, needs, full);
  c.link->refused = all ? 0 : needs;
  return all;
}

std::string why_refused(CqShadow& c) {
  if (!c.link || !c.link->refused) return "";
  const std::uint64_t needs = may_be_flushed(c);
  if (needs < c.link->refused) return c.link->refused = 0, "";  // a QP has gone: once more
  int least = c.real->cqe;
  for (const CqLink::Cq& cq : c.link->cqs) least = std::min(least, cq.real->cqe);
  return too_small(least, needs);
}

void share_room(const QpShadow& q) {
  switchover::for_cqs(q, [](CqShadow& c) {
    if (room_of_protected(c)) make_room(c);
  });
}

}  // namespace migr::links
