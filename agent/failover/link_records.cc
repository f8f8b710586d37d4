// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "link_records.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "libmigr/links/config.h"
#include "migr/gid.h"
#include "uapi/migr.h"

namespace migr {
namespace {

template <class... Args>
Error bad(fmt::format_string<Args...> what, Args&&... args) {
  return Error{EINVAL, fmt::format(what, std::forward<Args>(args)...)};
}

template <std::size_t N>
bool zero(const std::uint8_t (&bytes)[N]) {
  return std::all_of(bytes, bytes + N, [](std::uint8_t b) { return !b; });
}

template <std::size_t N>
bool ends(const char (&text)[N]) {
  return std::memchr(text, 0, N) != nullptr;
}

bool number(std::uint32_t qpn) { return qpn && qpn <= MIGR_QPN_MASK; }
bool is_link(std::uint32_t link) { return link < MIGR_LINKS_MAX_LINKS; }

constexpr std::uint8_t kMtuMost = 5;  // IBV_MTU_4096

// One end of a connection: the same of a path and of a channel.
template <class End>
Status check_qp(const std::string& what, const End& e) {
  if (zero(e.gid)) return bad("{} without a GID", what);
  if (!number(e.qpn)) return bad("{} with QP number {}, not 1..0xffffff", what, e.qpn);
  if (e.psn > MIGR_QPN_MASK) return bad("{} with a PSN of more than 24 bits", what);
  if (!e.mtu || e.mtu > kMtuMost) return bad("{} with MTU {}, not one of enum ibv_mtu", what, e.mtu);
  if (!zero(e.reserved)) return bad("{} with a reserved field that is not 0", what);
  return {};
}

template <class End, class Wire>
bool take_qp(End& e, const Wire& w) {
  if (w.gid().size() != sizeof e.gid || w.lid() > UINT16_MAX || w.mtu() > UINT8_MAX) return false;
  std::memcpy(e.gid, w.gid().data(), sizeof e.gid);
  e.qpn = w.qpn();
  e.psn = w.psn();
  e.lid = static_cast<std::uint16_t>(w.lid());
  e.mtu = static_cast<std::uint8_t>(w.mtu());
  return true;
}

template <class End, class Wire>
void give_qp(Wire& w, const End& e) {
  w.set_gid(e.gid, sizeof e.gid);
  w.set_qpn(e.qpn);
  w.set_psn(e.psn);
  w.set_lid(e.lid);
  w.set_mtu(e.mtu);
}

constexpr char kUnknown[] = "?";

template <std::size_t N>
const char* name_in(const char* const (&names)[N], std::uint32_t i) {
  return i < N ? names[i] : kUnknown;
}

}  // namespace

VqpName name_of(const migr_links_name& n) { return {gid_of(n.gid), n.vqpn}; }

migr_links_name record_of(const VqpName& n) {
  migr_links_name r{};
  std::copy(n.gid.begin(), n.gid.end(), r.gid);
  r.vqpn = n.vqpn;
  return r;
}

Gid gid_of(const std::uint8_t (&bytes)[16]) { return std::to_array(bytes); }

std::optional<Gid> gid_of(std::string_view bytes) {
  Gid g{};
  if (bytes.size() != g.size()) return std::nullopt;
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(g.data()));
  if (g == Gid{}) return std::nullopt;
  return g;
}

std::string text_of(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (migr_gid_family(gid.data()) == 0)
    inet_ntop(AF_INET, gid.data() + 12, text, sizeof text);
  else
    inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  return text;
}

std::string gid_text(std::string_view bytes, const char* otherwise) {
  const auto gid = gid_of(bytes);
  return gid ? text_of(*gid) : otherwise;
}

std::string text_of(const VqpName& n) { return text_of(n.gid) + " vQPN " + std::to_string(n.vqpn); }

Status check(const migr_links_hello& r) {
  if (r.policy > MIGR_LINKS_EXACT) return bad("policy {} is none that is known", r.policy);
  if (r.making > MIGR_LINKS_POOL) return bad("paths of kind {}: none that is known", r.making);
  if (r.atomics > MIGR_LINKS_RELAYED) return bad("atomics of kind {}: none that is known", r.atomics);
  return {};
}

Status check(const migr_links_link& r) {
  if (!is_link(r.link)) return bad("link {}: the highest is {}", r.link, MIGR_LINKS_MAX_LINKS - 1);
  if (!r.port) return bad("link {}: ports count from 1", r.link);
  if (!ends(r.device) || !r.device[0] || !ends(r.why)) return bad("link {}: a text that is empty or has no end", r.link);
  if (r.state > MIGR_LINKS_LINK_ABSENT || r.cause > MIGR_LINKS_CAUSE_PREFER) return bad("link {}: a state or cause that is not known", r.link);
  return {};
}

Status check(const migr_links_name& r) {
  if (zero(r.gid)) return bad("a name without a GID");
  if (!number(r.vqpn)) return bad("a name with vQPN {}, not 1..0xffffff", r.vqpn);
  if (r.reserved) return bad("a name with a reserved field that is not 0");
  return {};
}

Status check(const migr_links_vqp& r) {
  if (auto s = check(r.name); !s) return s;
  const std::string who = text_of(name_of(r.name));
  if (r.policy > MIGR_LINKS_EXACT || !is_link(r.default_link) || r.making > MIGR_LINKS_POOL || r.atomics > MIGR_LINKS_RELAYED)
    return bad("{}: policy, default link or kind of paths or atomics out of range", who);
  if (r.links >> MIGR_LINKS_MAX_LINKS || !(r.links >> r.default_link & 1) || r.reserved)
    return bad("{}: links {:#x}, its default one {}, or a reserved field that is not 0", who, r.links, r.default_link);
  if (r.paths > MIGR_LINKS_MAX_LINKS) return bad("{}: more than {} paths", who, MIGR_LINKS_MAX_LINKS);
  std::uint32_t seen = 0;
  for (std::uint32_t i = 0; i < r.paths; i++) {
    const migr_links_path& p = r.path[i];
    if (!is_link(p.link) || !(r.links >> p.link & 1)) return bad("{}: a path on link {}", who, p.link);
    if (seen >> p.link & 1) return bad("{}: two paths on link {}", who, p.link);
    seen |= 1u << p.link;
    if (auto s = check_qp(who + ": a path", p); !s) return s;
  }
  return {};
}

Status check_end(const migr_links_channel& r) {
  if (zero(r.peer)) return bad("a channel to no instance");
  if (!is_link(r.link)) return bad("a channel on link {}", r.link);
  return {};
}

Status check(const migr_links_channel& r) {
  if (auto s = check_end(r); !s) return s;
  if (!r.round) return bad("a channel of round 0: they count from 1");
  if (r.status || r.reserved2) return bad("a channel with a status or reserved field that is not 0");
  return check_qp("a channel", r);
}

Status check(const migr_links_vqp_state& r) {
  if (auto s = check(r.name); !s) return s;
  if (!is_link(r.link) || r.phase > MIGR_LINKS_VQP_BROKEN || !ends(r.why) || r.atomics > MIGR_LINKS_RELAYED)
    return bad("{}: link, phase, kind of atomics or text out of range", text_of(name_of(r.name)));
  return {};
}

Status check(const migr_links_switch& r) {
  if (!is_link(r.from) || !is_link(r.to) || r.cause > MIGR_LINKS_CAUSE_PREFER || r.outcome > MIGR_LINKS_SWITCH_BROKEN)
    return bad("a switchover with link, cause or outcome out of range");
  return {};
}

Status check(const migr_text_range& r) {
  constexpr std::uint32_t kHighestKind = 1;
  if (!r.bytes || r.start + r.bytes < r.start || r.kind > kHighestKind || r.reserved)
    return bad("code at {:#x}, {} bytes, kind {}: empty, beyond the end of memory, or not known", r.start, r.bytes, r.kind);
  return {};
}

wire::LinkVqp to_wire(const migr_links_vqp& r) {
  wire::LinkVqp w;
  w.set_gid(r.name.gid, sizeof r.name.gid);
  w.set_vqpn(r.name.vqpn);
  w.set_policy(r.policy);
  w.set_default_link(r.default_link);
  w.set_making(r.making);
  w.set_atomics(r.atomics);
  w.set_links(r.links);
  for (std::uint32_t i = 0; i < r.paths; i++) {
    auto* p = w.add_paths();
    p->set_link(r.path[i].link);
    p->set_serial(r.path[i].serial);
    give_qp(*p, r.path[i]);
  }
  return w;
}

Result<migr_links_vqp> from_wire(const wire::LinkVqp& w) {
  migr_links_vqp r{};
  if (w.gid().size() != sizeof r.name.gid || w.paths_size() > MIGR_LINKS_MAX_LINKS) return bad("a malformed vQP from another host");
  std::memcpy(r.name.gid, w.gid().data(), sizeof r.name.gid);
  r.name.vqpn = w.vqpn();
  r.policy = w.policy();
  r.default_link = w.default_link();
  constexpr std::uint32_t kNone = 0xffff;  // what no field of 16 bits can say is out of range
  r.making = static_cast<std::uint16_t>(std::min(w.making(), kNone));
  r.atomics = static_cast<std::uint16_t>(std::min(w.atomics(), kNone));
  r.links = w.links();
  for (const auto& p : w.paths()) {
    migr_links_path& at = r.path[r.paths++];
    at.link = p.link();
    at.serial = p.serial();
    if (!take_qp(at, p)) return bad("a malformed path from another host");
  }
  if (auto s = check(r); !s) return s.error();
  return r;
}

wire::LinkChannel to_wire(const Instance& owner, const migr_links_channel& r) {
  wire::LinkChannel w;
  w.set_instance(owner.data(), owner.size());
  w.set_peer(r.peer, sizeof r.peer);
  w.set_link(r.link);
  w.set_round(r.round);
  give_qp(w, r);
  return w;
}

Result<migr_links_channel> from_wire(const wire::LinkChannel& w) {
  migr_links_channel r{};
  if (w.instance().size() != sizeof r.peer || w.peer().size() != sizeof r.peer) return bad("a malformed channel from another host");
  std::memcpy(r.peer, w.instance().data(), sizeof r.peer);
  r.link = w.link();
  r.round = w.round();
  if (!take_qp(r, w)) return bad("a malformed channel from another host");
  if (auto s = check(r); !s) return s.error();
  return r;
}

Result<migr_links_found> found_of(const wire::LinkFound& w) {
  migr_links_found f{};
  auto vqp = from_wire(w.vqp());
  if (!vqp) return vqp.error();
  const auto& p = w.process();
  if (p.instance().size() != sizeof f.instance || p.gids_size() > MIGR_LINKS_MAX_LINKS) return bad("a malformed process from another host");
  f.vqp = *vqp;
  std::memcpy(f.instance, p.instance().data(), sizeof f.instance);
  for (const auto& gid : p.gids()) {
    if (gid.size() != sizeof f.gid[0]) return bad("a malformed link from another host");
    std::memcpy(f.gid[f.links++], gid.data(), gid.size());
  }
  std::strncpy(f.host, p.host().c_str(), sizeof f.host - 1);
  return f;
}

const char* policy_name(std::uint32_t policy) {
  return policy <= MIGR_LINKS_EXACT ? links::name(static_cast<links::Policy>(policy)) : kUnknown;
}

const char* making_name(std::uint32_t making) {
  return making <= MIGR_LINKS_POOL ? links::name(static_cast<links::Paths>(making)) : kUnknown;
}

const char* atomics_name(std::uint32_t atomics) {
  return atomics <= MIGR_LINKS_RELAYED ? links::name(static_cast<links::Atomics>(atomics)) : kUnknown;
}

const char* cause_name(std::uint32_t cause) {
  static const char* const names[] = {"", "completion", "event", "netlink", "heartbeat", "channel", "peer", "operator", "application", "return", "prefer"};
  return name_in(names, cause);
}

const char* link_state_name(std::uint32_t state) {
  static const char* const names[] = {"making", "up", "down", "?", "absent"};
  return name_in(names, state);
}

const char* phase_name(std::uint32_t phase) {
  static const char* const names[] = {"making", "ready", "none", "switching", "broken"};
  return name_in(names, phase);
}

}  // namespace migr
