/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "pool.h"

#include <algorithm>

#include "channel.h"
#include "state.h"

namespace migr::links {
namespace {

constexpr std::uint64_t kRefusedNs = 1'000'000'000;  // what could not be made, or not there, is not tried again sooner

PathKind kind_of(const QpLink& l, Side side) {
  const QpShadow& q = *l.q;
  PathKind out;
  out.side = side;
  out.pd = q.init.pd;
  out.send_cq = q.send_cq;
  out.recv_cq = q.recv_cq;
  out.srq = q.init.srq;
  out.cap = {q.cap.max_send_wr, q.cap.max_recv_wr, q.cap.max_send_sge, q.cap.max_recv_sge, q.cap.max_inline_data};
  out.sq_sig_all = q.init.sq_sig_all;
  out.access = q.access_flags;
  out.send_ops = q.init_is_ex ? q.init.send_ops_flags : 0;
  out.home_port = l.home_gid.port_num;
  out.home_gid_index = l.home_gid.gid_index;
  return out;
}

/// @return false: the device does not say
bool attributes_of(const QpLink& l, std::array<std::uint8_t, 7>& out) {
  ibv_qp_attr a{};
  if (switchover::ask_device(*l.q, a, switchover::kConnectionAttrs)) return false;
  out = {static_cast<std::uint8_t>(l.q->birth.path_mtu), a.timeout, a.retry_cnt, a.rnr_retry, a.max_rd_atomic, a.max_dest_rd_atomic, a.min_rnr_timer};
  return true;
}

template <class Which>
void drop_if(Channel& c, Which&& which) {
  std::erase_if(c.spares, [&](Spare& s) {
    if (!which(s)) return false;
    state()->discards.add(s.path.qp);
    return true;
  });
}

template <class Which>
void drop_everywhere(Which&& which) {
  if (state())
    for (Channel* c : state()->channels) drop_if(*c, which);
}

/// This end's half of one like `l` has it. @return false: see `why`
bool make_spare(QpLink& l, Side side, Channel& channel, std::uint64_t id, std::string& why) {
  Spare made{.id = id, .kind = kind_of(l, side), .attributes = {}, .path = {}};
  if (l.q->app_state() != IBV_QPS_RTS) return why = "its state is not RTS", false;  // what it sends with is not set yet
  if (!attributes_of(l, made.attributes)) return why = "query_qp", false;
  if (!create_half(l, side, made.path, why)) return false;
  channel.spares.push_back(std::move(made));
  return true;
}

void send_half(Channel& channel, const QpLink& l, Side side, const Spare& spare, bool answer) {
  send_spare(channel, {.to = l.peer, .from = l.name, .id = spare.id, .path = address_of(l, side, spare.path), .answer = answer, .reserved = 0});
}

bool leads(const Peer& peer) { return state()->instance < peer; }

}  // namespace

bool fill_pools() {
  bool missing = false;
  if (parking()) return missing;
  for (QpLink* l : state()->qps) {
    if (!l->pooled || !leads(l->instance) || l->stage != Stage::kReady || l->q->app_state() != IBV_QPS_RTS) continue;
    const Side side = next_side(*l);
    if (side == l->on) continue;
    Channel* const channel = standing(*l, side);
    if (now_ns() - channel->refused_ns < kRefusedNs) {
      missing = true;
      continue;
    }
    const PathKind kind = kind_of(*l, side);
    auto there = std::count_if(channel->spares.begin(), channel->spares.end(), [&](const Spare& s) { return s.kind == kind; });
    for (; there < static_cast<std::ptrdiff_t>(state()->config.pool); ++there) {
      std::string why;
      if (!make_spare(*l, side, *channel, ++channel->spares_made, why)) {
        channel->refused_ns = now_ns();
        say(*l, "no path for the pool: " + why);
        missing = true;
        break;
      }
      send_half(*channel, *l, side, channel->spares.back(), false);
    }
  }
  return missing;
}

void got_spare(Channel& from, const SpareRecord& record) {
  kick(state()->round_fd);  // which tells how many there are
  QpLink* const l = addressee(from, record.to, record.from);
  Side side = kHome;
  const auto mine = std::find_if(from.spares.begin(), from.spares.end(), [&](const Spare& s) { return s.id == record.id; });
  std::string why;
  if (record.answer) {
    if (mine == from.spares.end()) return;  // its CQ has gone meanwhile
    if (l && record.path.qpn && side_of(*l, from.link->index, side) && !connect_half(*l, side, mine->path, record.path, why)) return;
    from.refused_ns = now_ns();
    return drop_spare(from, record.id);
  }
  from.led = true;
  const SpareRecord refusal{.to = record.from, .from = record.to, .id = record.id, .path = {}, .answer = true, .reserved = 0};
  if (!l || mine != from.spares.end() || from.spares.size() >= kMostSpares || !side_of(*l, from.link->index, side) || !make_spare(*l, side, from, record.id, why)) return send_spare(from, refusal);
  Spare& made = from.spares.back();
  if (!connect_half(*l, side, made.path, record.path, why)) return send_half(from, *l, side, made, true);
  drop_spare(from, record.id);
  send_spare(from, refusal);
}

std::uint64_t take_spare(QpLink& l, Side side, Channel& channel, std::uint32_t serial, std::uint64_t id) {
  const PathKind kind = kind_of(l, side);
  std::array<std::uint8_t, 7> attributes;
  const auto found = std::find_if(channel.spares.begin(), channel.spares.end(), [&](const Spare& s) {
    return s.path.connected && s.kind == kind && (id == kAnySpare || s.id == id);
  });
  if (found == channel.spares.end() || !attributes_of(l, attributes) || attributes != found->attributes) return 0;
  const Spare spare = std::move(*found);
  channel.spares.erase(found);
  kick(state()->round_fd);  // another takes its place
  std::string why;
  if (adopt(l, side, spare.path, serial, why)) return spare.id;
  say(l, why);
  return 0;
}

void drop_spare(Channel& channel, std::uint64_t id) {
  drop_if(channel, [id](const Spare& s) { return s.id == id; });
}

std::size_t spares_of(const Channel& channel) {
  return static_cast<std::size_t>(std::count_if(channel.spares.begin(), channel.spares.end(), [](const Spare& s) { return s.path.connected; }));
}

void busy_first(std::vector<QpLink*>& all) {
  const auto busy = [](const QpLink* l) {
    unsigned in_flight = 0;
    if (!l->pooled) return false;
    std::lock_guard guard(l->q->lock);
    return !provider::sends_in_queue(*l->q, in_flight) && in_flight;
  };
  if (std::any_of(all.begin(), all.end(), [](const QpLink* l) { return l->pooled; })) std::stable_partition(all.begin(), all.end(), busy);
}

void drop_spares(Channel& channel) {
  drop_if(channel, [](const Spare&) { return true; });
}
void drop_spares(const ibv_pd* pd) {
  drop_everywhere([&](const Spare& s) { return s.kind.pd == pd; });
}
void drop_spares(const SrqShadow& srq) {
  drop_everywhere([&](const Spare& s) { return s.kind.srq == &srq.app; });
}
void drop_spares(const CqShadow& c) {
  drop_everywhere([&](const Spare& s) { return s.kind.send_cq == &c || s.kind.recv_cq == &c; });
}

}  // namespace migr::links
