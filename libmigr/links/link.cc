/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A link of ours: its device opened and closed, its GID, its port. */
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "../../include/migr/gid.h"
#include "../gids.h"
#include "../high_fd.h"
#include "../kernel_link.h"
#include "../provider/uverbs_write.h"
#include "../real.h"
#include "channel.h"
#include "state.h"

namespace migr::links {

namespace {

bool non_blocking(int fd) { return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0; }

ibv_comp_channel* make_events(ibv_context* ctx) {
  ibv_comp_channel* const events = real().create_comp_channel(ctx);
  if (!events) return nullptr;
  events->fd = to_high_fd(events->fd);
  non_blocking(events->fd);
  return events;
}

/// The first of RoCE v2 that is an IPv4 address, else the first there is. Null: there is none
const ibv_gid_entry* choose_gid(const std::vector<ibv_gid_entry>& all, std::uint32_t port) {
  const ibv_gid_entry* first = nullptr;
  for (const ibv_gid_entry& e : all) {
    if (e.port_num != port) continue;
    if (e.gid_type == IBV_GID_TYPE_ROCE_V2 && migr_gid_family(e.gid.raw) == 0) return &e;
    if (!first) first = &e;
  }
  return first;
}

ibv_context* open_named(const std::string& device) {
  int count = 0;
  ibv_device** const all = real().get_device_list(&count);
  ibv_context* ctx = nullptr;
  errno = ENODEV;
  for (int i = 0; all && i < count; ++i)
    if (device == all[i]->name) ctx = real().open_device(all[i]);
  const int saved = errno;
  if (all) real().free_device_list(all);
  errno = saved;
  return ctx;
}

/// What of it is there.
void close(Link& link, ibv_context* ctx) {
  if (link.cq) real().destroy_cq(std::exchange(link.cq, nullptr));
  for (ibv_comp_channel** e : {&link.events, &link.cq_events})
    if (*e) {
      let_fd_go((*e)->fd);
      real().destroy_comp_channel(std::exchange(*e, nullptr));
    }
  if (link.pd) real().dealloc_pd(std::exchange(link.pd, nullptr));
  link.kernel.reset();
  note_uverbs_fd(ctx->cmd_fd, false);
  for (const int fd : {ctx->cmd_fd, ctx->async_fd}) let_fd_go(fd);
  real().close_device(ctx);
}

}  // namespace

std::vector<ibv_gid_entry> gid_table(ibv_context* ctx, std::uint32_t port, std::uint32_t index) {
  std::vector<ibv_gid_entry> all;
  if (!gids::read(ctx, all)) return all;
  ibv_gid_entry one{};
  one.port_num = port;
  one.gid_index = index;
  one.gid_type = IBV_GID_TYPE_ROCE_V2;
  if (real().query_gid(ctx, static_cast<std::uint8_t>(port), static_cast<int>(index), &one.gid)) return {};
  return {one};
}

const ibv_gid_entry* gid_again(const std::vector<ibv_gid_entry>& all, const ibv_gid_entry& first, const ibv_gid_entry& last, const ibv_gid_entry* named) {
  const ibv_gid_entry* const found = gids::again(all, first);
  if (found && !std::memcmp(found->gid.raw, first.gid.raw, sizeof first.gid.raw)) return found;
  return named && gids::like({*named}, first) ? named : gids::again(all, last);
}

std::string read_gid(Link& link, ibv_context* ctx) {
  const Config::Link& config = link.config;
  const bool named = config.gid_index >= 0, known = link.gid.port_num;
  const std::uint32_t index = named ? static_cast<std::uint32_t>(config.gid_index) : link.gid.gid_index;
  const auto all = gid_table(ctx, config.port, index);
  const ibv_gid_entry* now;
  std::string which;
  const ibv_gid_entry* const there = named ? gids::find(all, config.port, index) : nullptr;
  if (known) now = gid_again(all, link.first_gid, link.gid, there), which = " of the kind that it had";
  else if (named) now = there, which = " " + std::to_string(index);
  else now = choose_gid(all, config.port);
  if (!now) return config.device + " has no GID" + which;
  if (known && (now->gid_index != link.gid.gid_index || std::memcmp(now->gid.raw, link.gid.gid.raw, sizeof now->gid.raw)))
    std::fprintf(stderr, "libmigr: link %u: %s has another GID now, or at another place: number %u\n", link.index, config.device.c_str(), now->gid_index);
  link.gid = *now;
  if (!known) link.first_gid = *now;
  return "";
}

bool is_there(ibv_context* ctx, const ibv_gid_entry& gid) {
  const gids::Inside inside;
  ibv_gid now{};
  return real().query_gid(ctx, static_cast<std::uint8_t>(gid.port_num), static_cast<int>(gid.gid_index), &now) == 0 && !std::memcmp(now.raw, gid.gid.raw, sizeof now.raw);
}

void drop_unreachable(const Link& link) {
  const ibv_context* of = nullptr;
  ibv_gid_entry asked{};  // nearly all have the same one
  bool there = true;
  for (QpLink* l : state()->qps)
    for (Side side = kHome; side < l->sides(); ++side) {
      const Path& next = l->legs[side].next;
      if (l->legs[side].link != &link || !next.qp) continue;
      ibv_context* const ctx = side == kHome ? l->q->context->real : link.ctx;
      if (ctx != of || std::memcmp(&next.gid, &asked, sizeof asked)) of = ctx, asked = next.gid, there = is_there(ctx, next.gid);
      const bool changed = side != kHome && (next.gid.gid_index != link.gid.gid_index || std::memcmp(next.gid.gid.raw, link.gid.gid.raw, sizeof next.gid.gid.raw));
      if (!there || changed) drop_next(*l, side);
    }
}

int query_port(ibv_context* ctx, unsigned number, ibv_port_attr& port) {
  return real().query_port(ctx, static_cast<std::uint8_t>(number), reinterpret_cast<_compat_ibv_port_attr*>(&port));
}

std::string open_link(Link& link) {
  ibv_context* const ctx = open_named(link.config.device);
  link.gid = {};
  link.absent = !ctx && errno == ENODEV;
  if (!ctx) return errno_text("cannot open " + link.config.device);
  ctx->cmd_fd = to_high_fd(ctx->cmd_fd);
  note_uverbs_fd(ctx->cmd_fd, true);
  if (ctx->async_fd >= 0) non_blocking(ctx->async_fd = to_high_fd(ctx->async_fd));
  link.ops = ctx->ops;
  std::string why;
  ibv_port_attr port{};
  if (link.foreign = !provider::is_supported(*ctx, link.ops); link.foreign)
    why = link.config.device + " is not soft-RoCE (man 7 migr-limits)";
  else if (const int err = query_port(ctx, link.config.port, port))
    why = link.config.device + " port " + std::to_string(link.config.port) + ": " + std::strerror(err);
  else
    why = read_gid(link, ctx);
  link.absent = !why.empty() && !link.foreign;
  link.event_down = why.empty() && port.state != IBV_PORT_ACTIVE;
  link.fatal = false;
  link.lid = port.lid;
  link.mtu = port.active_mtu;
  if (why.empty() && !(link.pd = real().alloc_pd(ctx))) why = errno_text("alloc_pd");
  if (why.empty() && (!(link.events = make_events(ctx)) || !(link.cq_events = make_events(ctx)))) why = errno_text("create_comp_channel");
  if (why.empty() && !(link.cq = real().create_cq(ctx, Channel::kFirstCqes, nullptr, link.cq_events, 0))) why = errno_text("create_cq");
  if (why.empty() && link.ops.req_notify_cq(link.cq, 0)) why = errno_text("req_notify_cq");
  if (why.empty()) {
    link.kernel = std::make_unique<KernelLink>(ctx->cmd_fd);
    if (link.kernel->has_tables()) return link.ctx = ctx, "";
    why = "no address space for its tables";
  }
  close(link, ctx);
  return why;
}

void close_link(Link& link) {
  link.foreign = false;  // on another host it may be of another family
  if (!link.ctx) return;
  state()->discards.finish();
  close(link, std::exchange(link.ctx, nullptr));
  link.port_down = MIGR_LINKS_CAUSE_NONE;  // migrd tells it again
  link.port_serial = 0;                    // maybe another host's
  link.preferred = false;
  link.why.clear();
  link.tried_ns = 0;
}

bool links_are_open() {
  for (const Twin* t : state()->twins)
    for (Side side = kHome; side < t->sides() && !t->home->foreign; ++side)
      if (!t->link(side)->ctx && !t->link(side)->foreign) return false;
  return true;
}

Link* link_of(const std::string& device, unsigned port) {
  for (Link& link : state()->links)
    if (link.config.device == device && link.config.port == port) return &link;
  return nullptr;
}

}  // namespace migr::links
