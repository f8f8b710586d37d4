/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What migrd is told of vQPs and links. */
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "channel.h"
#include "cq_room.h"
#include "state.h"

namespace migr::links {

std::uint32_t links_of(const QpLink& l) {
  std::uint32_t links = 1u << l.legs[kHome].link->index;
  for (Side side = 1; side < l.sides(); ++side)
    if (has_room_for(*l.twin, side, *l.q) && !l.legs[side].link->fatal) links |= 1u << l.legs[side].link->index;
  return links;
}

migr_links_vqp record_of(const QpLink& l) {
  migr_links_vqp out{};
  out.name = without_generation(l.name);
  out.policy = static_cast<std::uint32_t>(l.twin->policy);
  out.default_link = l.twin->home->index;
  out.making = static_cast<std::uint16_t>(l.twin->paths);
  out.atomics = static_cast<std::uint16_t>(l.twin->atomics);
  out.links = links_of(l);
  for (const migr_links_path& path : l.first)
    if (path.qpn && out.links >> path.link & 1) out.path[out.paths++] = path;
  return out;
}

namespace {

migr_links_link_state state_of(const Link& link) {
  bool usable = link.ctx;
  for (const Twin* t : state()->twins) usable = usable || t->home == &link;
  if (link.absent && !usable) return MIGR_LINKS_LINK_ABSENT;
  if (link.down()) return MIGR_LINKS_LINK_DOWN;
  return usable ? MIGR_LINKS_LINK_UP : link.why.empty() ? MIGR_LINKS_LINK_MAKING
                                                        : MIGR_LINKS_LINK_DOWN;
}

}  // namespace

migr_links_link record_of(const Link& link, std::uint32_t backups) {
  migr_links_link out{};
  out.backups = backups;
  out.link = link.index;
  out.port = link.config.port;
  std::snprintf(out.device, sizeof out.device, "%s", link.config.device.c_str());
  std::memcpy(out.gid, link.gid.gid.raw, sizeof out.gid);
  out.gid_index = link.gid.gid_index;
  out.state = state_of(link);
  out.cause = link.down_by();
  std::snprintf(out.why, sizeof out.why, "%s", link.why.c_str());
  for (const Channel* c : state()->channels) {
    if (c->link != &link) continue;
    out.channels = static_cast<std::uint16_t>(out.channels + (c->up() && !c->doubt_ns));
    out.spares = static_cast<std::uint16_t>(out.spares + spares_of(*c));
  }
  for (const QpLink* l : state()->qps) {
    out.vqps += l->leg().link == &link;
  }
  return out;
}

bool lacks_path(const QpLink& l, Side next) { return l.ahead && !l.legs[next].next.connected; }

namespace {

/// No channel over another link stands: of the first one's.
const char* why_nowhere(const QpLink& l) {
  const Side side = l.on == kHome ? 1 : kHome;
  const Link& link = *l.legs[side].link;
  if (link.down()) return "its other link is down";
  if (!is_common(l, side)) return "the other end cannot go to its other link";
  if (!receives_are_clean(*l.q, side)) return "waits for receives that are left on its other link";
  const Channel* const channel = find_channel(l.instance, link);
  if (!channel || !channel->up()) return "waits for a channel";
  return channel->ended || channel->parting ? "waits for the end of a migration" : "waits for an answer over its channel";
}

/// It will not change, and carries still: who counts what a link's end would break counts it.
bool carries_without_backup(QpLink& l) {
  std::lock_guard guard(l.lock);
  return l.stage == Stage::kBroken && !l.seen && switchover::connected(*l.q);
}

}  // namespace

migr_links_vqp_state state_of(QpLink& l, Side next) {
  migr_links_vqp_state out{};
  out.name = without_generation(l.name);
  out.epoch = l.epoch;
  out.link = l.leg().link->index;
  constexpr migr_links_vqp_phase kPhase[] = {MIGR_LINKS_VQP_MAKING, MIGR_LINKS_VQP_READY, MIGR_LINKS_VQP_SWITCHING,
                                             MIGR_LINKS_VQP_SWITCHING, MIGR_LINKS_VQP_BROKEN};
  out.phase = carries_without_backup(l) ? MIGR_LINKS_VQP_MAKING : kPhase[static_cast<int>(l.stage)];
  const char* why = l.why.c_str();
  if (l.why.empty() && l.stage == Stage::kMaking)
    why = next == l.on ? why_nowhere(l) : !is_heard(l)      ? "the other end has not answered yet"
                                      : lacks_path(l, next) ? "waits for the other end"
                                                            : "waits for memory";
  if (!*why && l.stage == Stage::kReady && !memory_is_there(l, next)) why = "waits for memory";  // registered since
  std::string small;
  if (!*why && l.stage == Stage::kReady) {  // its next cut will refuse
    switchover::for_cqs(*l.q, [&](CqShadow& c) { if (small.empty()) small = why_refused(c); });
    why = small.c_str();
  }
  if (!*why && l.stage == Stage::kReady) why = l.drains_ended ? "the way to its other link did not end; it is tried again" : why_direct(l);
  std::snprintf(out.why, sizeof out.why, "%s", why);
  out.atomics = l.relays ? MIGR_LINKS_RELAYED : MIGR_LINKS_DIRECT;
  return out;
}

}  // namespace migr::links
