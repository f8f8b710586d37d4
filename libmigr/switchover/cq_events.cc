/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Events of completion channels over a freeze. A new CQ reports none of those that lie unread in the old one's channel, and
 * two CQs may share a channel: so each CQ's are counted at FREEZE, and after the restore (or on the way back) the device is
 * made to report as many. They are read from the descriptor that the application knows, as ever.
 */
#include <poll.h>

#include "../real.h"
#include "../unread.h"
#include "parts.h"

namespace migr::switchover {
namespace {

constexpr unsigned kProbeMs = 50;  // between a completion and its event: the kernel takes a moment

/// @return how many were of `c`
unsigned read_unread(ibv_comp_channel& channel, const CqShadow* c) {
  const WithoutWaiting guard(channel.fd);
  unsigned of_c = 0;
  ibv_cq* cq;
  void* context;
  while (real().get_cq_event(&channel, &cq, &context) == 0) {
    auto* shadow = static_cast<CqShadow*>(context);
    real().ack_cq_events(cq, 1);
    std::lock_guard cq_guard(shadow->lock);
    ++shadow->events_read;
    if (shadow == c) ++of_c;
    else ++shadow->owed_events;
  }
  return of_c;
}

/// Has the application armed it since its last event? Who has armed it twice before an event came does not know, nor do we: a
/// completion of ours tells.
int probe(CqShadow& c, bool& armed, std::string& why) {
  if (const int err = inject_event(c, why)) return err;
  for (const std::uint64_t until = now_ns() + kProbeMs * 1'000'000ull; !armed && now_ns() < until; pause_briefly())
    armed = read_unread(*c.app.channel, &c) > 0;
  return 0;
}

}  // namespace

int collect_cq_events(std::string& why) {
  Registry& registry = Registry::get();
  for (ibv_comp_channel* channel : registry.channels) read_unread(*channel, nullptr);
  for (CqShadow* c : registry.cqs) {
    if (!c->app.channel || c->link) continue;
    bool unsure, armed;
    {
      std::lock_guard guard(c->lock);
      armed = c->armed > c->owed_events;
      unsure = armed && (c->owed_events || c->arm_unsure);
    }
    if (unsure)
      if (const int err = probe(*c, armed = false, why)) return err;
    std::lock_guard guard(c->lock);
    c->armed = c->owed_events + armed;
    c->arm_unsure = false;
  }
  return 0;
}

int return_cq_events(CqShadow& c, std::string& why) {
  std::uint32_t owed;
  bool stays_armed;
  {
    std::lock_guard guard(c.lock);
    owed = std::exchange(c.owed_events, 0);
    stays_armed = c.armed > owed;
  }
  const auto arm = [&](int solicited_only) { return c.context->ops.req_notify_cq(c.real, solicited_only); };
  for (; owed; --owed) {
    int err = arm(0);
    err = err ? fail(why, err, "req_notify_cq") : inject_event(c, why);
    if (!err) continue;
    std::lock_guard guard(c.lock);
    c.owed_events += owed;  // for who tries again
    return err;
  }
  if (!stays_armed) return 0;
  const int err = arm(c.solicited_only);
  return err ? fail(why, err, "req_notify_cq") : 0;
}

}  // namespace migr::switchover
