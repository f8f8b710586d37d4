/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "../datagrams.h"
#include "../events.h"
#include "../kernel_link.h"
#include "../provider/provider.h"
#include "../real.h"
#include "ahead.h"
#include "parts.h"

namespace migr::switchover {
namespace {

/// A NIC's write does not set soft-dirty: an atomic OR with zero does, and changes nothing. A test leaves it out.
void touch_pages(const MrShadow& mr) {
  static const bool left_out = getenv("MIGR_TEST_NO_TOUCH") != nullptr;
  if (left_out) return;
  constexpr int kWritable = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if (!(mr.access & kWritable)) return;
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(mr.app.addr);
  for (std::uintptr_t a = start; a < start + mr.app.length; a = (a / page + 1) * page)
    __atomic_fetch_or(reinterpret_cast<std::uint8_t*>(a), 0, __ATOMIC_RELAXED);
}

int freeze_srq(SrqShadow& s, const VirtualLkeys& keys, std::string& why) {
  std::lock_guard guard(s.lock);
  if (!(s.state.load(std::memory_order_relaxed) & kSuspendedSrq)) {
    why = "a shared receive queue was made after the suspension";  // nobody has looked whether a thread posts to it
    return EBUSY;
  }
  set_srq_bits(s, kFrozenSrq);
  ibv_srq_attr attr{};
  if (const int err = real().query_srq(s.real, &attr)) return fail(why, err, "query_srq");
  // A limit that was reached and whose event nobody has read: the next receive that is used shall tell again.
  s.limit = attr.srq_limit ? attr.srq_limit : s.armed ? s.max_wr : 0;
  return read_back_receives(s, keys, why);
}

}  // namespace

int unfreeze_srq(SrqShadow& s, std::string& why) {
  std::lock_guard guard(s.lock);
  const int err = post_receives(s, s.kept, why);
  s.outstanding.clear();
  s.kept.clear();
  set_srq_bits(s, 0, kFrozenSrq);
  return err;
}

int freeze(std::string& why) {
  Registry& registry = Registry::get();
  for (const MrShadow* mr : registry.mrs)
    if (!mr->movable) {
      why = "an MR of " + std::to_string(mr->app.length) + " bytes cannot be registered again elsewhere";
      return EOPNOTSUPP;
    }
  if (const int err = check_arcs(registry.qps, Phase::kFrozen, why)) return err;
  if (const int err = collect_cq_events(why)) return err;
  for (CqShadow* c : registry.cqs) {
    std::lock_guard guard(c->lock);
    path::poll_to_fake(*c);
    c->state.fetch_or(kFakeCq | kFrozenCq, std::memory_order_relaxed);
  }
  int err = 0;
  (void)provider::locate_queues(registry.qps);
  const VirtualLkeys keys;
  for (Context* context : registry.contexts) events::collect(*context->real);
  for (SrqShadow* s : registry.srqs)
    if (!err) err = freeze_srq(*s, keys, why);
  for (QpShadow* q : registry.qps) {
    std::lock_guard guard(q->lock);
    set_bits(*q, kKeepReceives);
    q->phase = Phase::kFrozen;
    if (!err) err = read_back_receives(*q, keys, q->outstanding, why);
  }
  if (err) {
    std::string ignored;
    rollback(ignored);
    return err;
  }
  for (const MrShadow* mr : registry.mrs) touch_pages(*mr);
  ahead::leave();
  datagrams::note_gids();
  for (Context* context : registry.contexts) context->kernel->detach();
  events::frozen();
  registry.frozen = true;
  return 0;
}

}  // namespace migr::switchover
