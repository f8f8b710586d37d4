/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Events of completion channels over a freeze. A new CQ reports none of those that lie unread in the old one's channel, and
 * two CQs may share a channel: so each CQ's are counted at FREEZE, and after the restore (or on the way back) the device is
 * made to report as many. They are read from the descriptor that the application knows, as ever.
 */
#include <algorithm>
#include <set>

#include "../real.h"
#include "../unread.h"
#include "parts.h"

namespace migr::switchover {
namespace {

constexpr unsigned kProbeMs = 50;  // between a completion and its event: the kernel takes a moment

/// A CQ that was armed twice before an event came, or behind an event that nobody has read: whether it is armed still the application
/// does not know, nor do we. A completion of ours tells.
struct Unsure {
  CqShadow* cq;
  std::uint32_t armings;  ///< before it was asked
  bool answered = false;  ///< there was an event
};

void read_unread(ibv_comp_channel& channel, std::span<Unsure> asked) {
  if (!is_readable(channel.fd)) return;
  const WithoutWaiting guard(channel.fd);
  ibv_cq* cq;
  void* context;
  while (real().get_cq_event(&channel, &cq, &context) == 0) {
    auto* shadow = static_cast<CqShadow*>(context);
    real().ack_cq_events(cq, 1);
    std::lock_guard cq_guard(shadow->lock);
    ++shadow->events_read;
    const auto of = std::find_if(asked.begin(), asked.end(), [&](const Unsure& u) { return u.cq == shadow && !u.answered; });
    if (of != asked.end()) of->answered = true;
    else ++shadow->owed_events;
  }
}

/// All of them at once: those that are not armed are waited for once.
int ask(std::vector<Unsure>& all, std::string& why) {
  std::set<ibv_comp_channel*> channels;
  for (const Unsure& u : all) {
    if (const int err = inject_event(*u.cq, why)) return err;
    channels.insert(u.cq->app.channel);
  }
  const auto answered = [&] { return std::all_of(all.begin(), all.end(), [](const Unsure& u) { return u.answered; }); };
  for (const std::uint64_t until = now_ns() + kProbeMs * 1'000'000ull; !answered() && now_ns() < until; pause_briefly())
    for (ibv_comp_channel* channel : channels) read_unread(*channel, all);
  return 0;
}

}  // namespace

int collect_cq_events(std::string& why) {
  Registry& registry = Registry::get();
  for (ibv_comp_channel* channel : registry.channels) read_unread(*channel, {});
  std::vector<Unsure> unsure;
  for (CqShadow* c : registry.cqs) {
    if (!c->app.channel || c->link) continue;
    std::lock_guard guard(c->lock);
    // To some kernels a receive that is flushed is not solicited, so that no event says nothing. It counts as armed: an event too
    // many does less harm than none.
    if (c->last_solicited_only) continue;
    if (c->armed > c->owed_events && (c->owed_events || c->arm_unsure)) unsure.push_back({.cq = c, .armings = c->armings});
  }
  if (const int err = ask(unsure, why)) return err;
  for (const Unsure& u : unsure) {
    std::lock_guard guard(u.cq->lock);
    if (!u.answered && u.cq->armings == u.armings) u.cq->armed = u.cq->owed_events;  // threads go on, and arm
    u.cq->arm_unsure = false;
  }
  return 0;
}

void collect_late_cq_events(std::span<const std::uint64_t> last_cqes) {
  const auto& cqs = Registry::get().cqs;
  std::vector<CqShadow*> late;
  std::set<ibv_comp_channel*> channels;
  for (std::size_t i = 0; i < cqs.size(); ++i) {
    std::lock_guard guard(cqs[i]->lock);
    if (!cqs[i]->app.channel || cqs[i]->link || cqs[i]->last_cqe_ns == last_cqes[i]) continue;
    late.push_back(cqs[i]);
    channels.insert(cqs[i]->app.channel);
  }
  const auto had_none = [](CqShadow* c, bool solicited_only) {
    std::lock_guard guard(c->lock);
    return c->armed > c->owed_events && c->last_solicited_only == solicited_only;
  };
  const std::uint64_t until = now_ns() + kProbeMs * 1'000'000ull;
  for (;; pause_briefly()) {
    for (ibv_comp_channel* channel : channels) read_unread(*channel, {});
    // Whether what has completed was solicited only an event tells.
    if (now_ns() >= until || std::none_of(late.begin(), late.end(), [&](CqShadow* c) { return had_none(c, true); })) break;
  }
  for (CqShadow* c : late)
    if (had_none(c, false)) ++c->owed_events;  // on its way, to where it stays
}

namespace {

int arm(const CqShadow& c, int solicited_only, std::string& why) {
  const int err = c.context->ops.req_notify_cq(c.real, solicited_only);
  return err ? fail(why, err, "req_notify_cq") : 0;
}

int give_owed_events(CqShadow& c, std::string& why) {
  std::uint32_t owed;
  {
    std::lock_guard guard(c.lock);
    owed = std::exchange(c.owed_events, 0);
  }
  for (; owed; --owed) {
    int err = arm(c, 0, why);
    if (!err) err = inject_event(c, why);
    if (!err) continue;
    std::lock_guard guard(c.lock);
    c.owed_events += owed;  // for who tries again
    return err;
  }
  return 0;
}

/// The application has armed it, and the device did not know when this completed. @return false: there is nothing
bool owes_since(CqShadow& c) {
  std::lock_guard guard(c.lock);
  const bool owes = c.app.channel && path::poll_to_fake(c);
  if (owes) c.owed_events = 1;
  return owes;
}

}  // namespace

int return_cq_events(CqShadow& c, std::string& why) {
  bool stays_armed;
  {
    std::lock_guard guard(c.lock);
    stays_armed = c.armed > c.owed_events;
  }
  if (const int err = give_owed_events(c, why)) return err;
  if (!stays_armed) return 0;
  if (const int err = arm(c, c.solicited_only, why)) return err;
  return owes_since(c) ? give_owed_events(c, why) : 0;
}

}  // namespace migr::switchover
