/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "datagrams.h"

#include <arpa/inet.h>
#include <netinet/ip.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <set>
#include <unordered_map>

#include "../include/migr/gid.h"
#include "../include/uapi/migr.h"
#include "gids.h"
#include "links/shared_receives.h"
#include "objects.h"
#include "path.h"
#include "provider/provider.h"
#include "switchover/switchover.h"
#include "real.h"

namespace migr::datagrams {
namespace {

constexpr int kQuietTries = 20;
constexpr long kQuietNs = 1'000'000;  // a completion follows the queue's index within microseconds
constexpr std::size_t kGrhBytes = sizeof(ibv_grh);
constexpr std::size_t kIpv4At = 20;  // RoCE v2 over IPv4: the header ends where a GRH does
static_assert(kGrhBytes == 40 && kIpv4At + sizeof(iphdr) == kGrhBytes);

using Gid = std::array<std::uint8_t, 16>;

Gid gid_of(const void* raw) {
  Gid gid;
  std::memcpy(gid.data(), raw, gid.size());
  return gid;
}

std::size_t hash(const void* bytes, std::size_t count) {
  std::uint64_t h = 0xcbf29ce484222325;  // FNV-1a
  for (std::size_t i = 0; i < count; ++i) h = (h ^ static_cast<const std::uint8_t*>(bytes)[i]) * 0x100000001b3;
  return static_cast<std::size_t>(h);
}

/// A UD QP's address.
struct Address {
  Gid gid;
  std::uint32_t qpn;
  bool operator==(const Address&) const = default;
};
struct AddressHash {
  std::size_t operator()(const Address& a) const { return hash(a.gid.data(), a.gid.size()) ^ a.qpn * 0x9e3779b9u; }
};

/// What a send names.
struct Target {
  ibv_ah* ah;
  std::uint32_t qpn;
  bool operator==(const Target&) const = default;
};
struct TargetHash {
  std::size_t operator()(const Target& t) const { return hash(&t.ah, sizeof t.ah) ^ t.qpn * 0x9e3779b9u; }
};

struct Handle {
  Context* context;
  ibv_ah_attr attr;      ///< as the application gave it; the GID's index is this host's
  std::uint32_t named;   ///< the GID's index as the application gave it
  ibv_gid_entry source;  ///< the GID that it was made with, as the application knows it: what stands for that here is sent from
  bool sourceless;       ///< this host had nothing of that kind
  /// To where its GID's QPs have moved.
  std::vector<std::pair<Gid, ibv_ah*>> others;
};

struct State {
  /* under the Registry's lock */
  std::unordered_map<ibv_ah*, Handle> handles;
  std::unordered_map<const Context*, std::vector<ibv_gid_entry>> earlier;  ///< GIDs of the hosts that we were on
  bool prepared = false;
  /* under `lock`; writers hold the Registry's lock, too */
  std::mutex lock;
  std::unordered_map<Address, Address, AddressHash> present;  ///< birth -> present
  std::unordered_map<Address, Address, AddressHash> birth;    ///< present -> birth
  std::unordered_map<Target, Target, TargetHash> targets;
  std::unordered_map<const Context*, std::unordered_map<std::uint32_t, std::uint64_t>> shifts;  ///< by index of the lkey
};

State& state() {
  static State* const s = new State;  // never destroyed: threads may outlive main()
  return *s;
}

int fail(std::string& why, int err, const std::string& what) {
  why = what + ": " + std::strerror(err);
  return err;
}

/// The handle to use for what has moved from `ah`'s GID to `gid`. @return null with errno
ibv_ah* other_handle(ibv_ah* ah, Handle& h, const Gid& gid) {
  for (const auto& [to, other] : h.others)
    if (to == gid) return other;
  ibv_ah_attr attr = h.attr;
  std::memcpy(attr.grh.dgid.raw, gid.data(), gid.size());
  ibv_ah* other = create_ah(ah->pd, attr);
  if (other) h.others.emplace_back(gid, other);
  return other;
}

/// The GID that it sends from. Null: that is gone, or never was here
const ibv_gid_entry* source_of(const Handle& h, const std::vector<ibv_gid_entry>& table) {
  return h.sourceless ? nullptr : gids::find(table, h.attr.port_num, h.attr.grh.sgid_index);
}

bool unreachable(int err) { return err == ETIMEDOUT || err == EHOSTUNREACH || err == ENETUNREACH; }

/// What sends over `ah` become. Those to a host that does not answer stay as they are, and are lost: where they go the number is reserved.
/// The next MOVES tries it again. @param silent  such hosts: the kernel waits a second for each. @return 0 or a positive errno
int aim(ibv_ah* ah, Handle& h, std::set<Gid>& silent) {
  State& s = state();
  if (!h.attr.is_global) return 0;
  const Gid gid = gid_of(h.attr.grh.dgid.raw);
  std::vector<std::pair<Target, Target>> found;
  for (const auto& [birth, present] : s.present) {
    if (h.sourceless || birth.gid != gid || silent.contains(present.gid)) continue;
    ibv_ah* to = present.gid == gid ? ah : other_handle(ah, h, present.gid);
    if (!to && unreachable(errno)) {
      silent.insert(present.gid);
      continue;
    }
    if (!to) return errno;
    found.push_back({{ah, birth.qpn}, {to, present.qpn}});
  }
  std::lock_guard guard(s.lock);
  std::erase_if(s.targets, [&](const auto& t) { return t.first.ah == ah; });
  for (const auto& [from, to] : found) s.targets[from] = to;
  return 0;
}

bool datagrams_of(const QpShadow& q) { return q.app.qp_type == IBV_QPT_UD; }

/// Its receives are a UD QP's: its own, or those of an SRQ that a UD QP takes from, too. Whoever takes one tells that it is gone.
bool takes_noted(const QpShadow& q) {
  const SrqShadow* srq = srq_of(q);
  return srq ? srq->state.load(std::memory_order_relaxed) & kWatchedSrq : datagrams_of(q);
}

void watch(QpShadow& q) {
  for (CqShadow* c : {q.send_cq, q.recv_cq})
    if (c) {
      std::lock_guard guard(c->lock);
      c->state.fetch_or(kFakeCq | kWatchedCq, std::memory_order_relaxed);
    }
}

void take_long_way(QpShadow& q) {
  if (SrqShadow* srq = srq_of(q)) {
    {
      std::lock_guard guard(srq->lock);
      srq->state.fetch_or(kWatchedSrq, std::memory_order_relaxed);
    }
    for (QpShadow* other : Registry::get().qps)
      if (srq_of(*other) == srq) watch(*other);
  }
  watch(q);
  std::lock_guard guard(q.lock);
  path::translate_keys(q, kDatagrams);
}

/// Where the datagrams of the receives will be that are posted already. Caller holds q.lock and c.lock, and nobody is
/// on the short way.
int await_posted(QpShadow& q, CqShadow& c) {
  std::vector<KeptReceive> before, now;
  for (int i = 0; i < kQuietTries; ++i) {
    before.clear(), now.clear();
    path::poll_to_fake(c);
    if (const int err = provider::outstanding_receives(q, before)) return err;
    const timespec pause{0, kQuietNs};
    nanosleep(&pause, nullptr);
    const int moved = path::poll_to_fake(c);
    if (const int err = provider::outstanding_receives(q, now)) return err;
    if (!moved && now.size() == before.size()) break;
  }
  switchover::make_keys_virtual(*q.context, now);
  for (const KeptReceive& receive : now) await(*q.context, q.awaited, receive);
  return 0;
}

/// The same of an SRQ, whose receives complete on several CQs: one whose completion is just being polled stays on the list,
/// and the next one of its wr_id takes it away.
int await_posted(SrqShadow& s) {
  std::lock_guard guard(s.lock);
  if (s.awaited.noted) return 0;
  std::vector<KeptReceive> posted;
  if (const int err = provider::outstanding_receives(s, posted)) return err;
  switchover::make_keys_virtual(*s.context, posted);
  for (KeptReceive& receive : posted) {
    receive.wr_id = links::own_name(s, receive.wr_id);
    await(*s.context, s.awaited, receive);
  }
  s.awaited.noted = true;
  return 0;
}

bool in_session(const CqShadow& c) { return c.ex_session.load(std::memory_order_relaxed); }

/// @param fresh nothing was posted to it yet
int begin_naming(QpShadow& q, bool fresh = false) {
  if (q.awaited.noted || !q.recv_cq || !takes_noted(q)) return 0;
  SrqShadow* const srq = srq_of(q);
  const bool reads_back = !srq && !fresh;
  // Who is in one holds the provider's lock of the CQ, and may be waiting for one of ours.
  if (reads_back && in_session(*q.recv_cq)) return EBUSY;
  if (srq)
    if (const int err = await_posted(*srq)) return err;
  std::lock_guard guard(q.lock);
  std::lock_guard cq_guard(q.recv_cq->lock);
  if (reads_back)
    if (const int err = await_posted(q, *q.recv_cq)) return err;
  q.awaited.noted = true;
  q.recv_cq->datagram_qps.push_back(&q);
  return 0;
}

std::uint16_t ip_checksum(iphdr header) {
  header.check = 0;
  std::uint16_t words[sizeof header / 2];
  std::memcpy(words, &header, sizeof header);
  std::uint32_t sum = 0;
  for (const std::uint16_t word : words) sum += word;
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

bool over_ipv4(const std::uint8_t* grh) {
  iphdr header;
  std::memcpy(&header, grh + kIpv4At, sizeof header);
  return header.version == 4 && header.ihl == 5 && ip_checksum(header) == header.check;
}

/// Where a header has an address, in either of its two kinds.
struct Side {
  std::size_t in_grh, in_ipv4;
};
constexpr Side kSource{offsetof(ibv_grh, sgid), kIpv4At + offsetof(iphdr, saddr)};
constexpr Side kDestination{offsetof(ibv_grh, dgid), kIpv4At + offsetof(iphdr, daddr)};

Gid address_of(const std::uint8_t* grh, bool ipv4, const Side& side) {
  Gid gid{};
  if (!ipv4) return gid_of(grh + side.in_grh);
  gid[10] = gid[11] = 0xff;
  std::memcpy(&gid[12], grh + side.in_ipv4, 4);
  return gid;
}

void set_address(std::uint8_t* grh, bool ipv4, const Side& side, const Gid& gid) {
  if (!ipv4) {
    std::memcpy(grh + side.in_grh, gid.data(), gid.size());
    return;
  }
  std::memcpy(grh + side.in_ipv4, &gid[12], 4);
  iphdr header;
  std::memcpy(&header, grh + kIpv4At, sizeof header);
  header.check = ip_checksum(header);
  std::memcpy(grh + kIpv4At, &header, sizeof header);
}

/// A header that came on an earlier host has that one's address, which no GID table has here: the like of this host's is
/// put into it. Caller holds the Registry's lock.
void bring_home(const Context& context, ibv_context* real, std::uint8_t port, ibv_grh& grh) {
  const auto earlier = state().earlier.find(&context);
  if (earlier == state().earlier.end()) return;
  std::vector<ibv_gid_entry> table;
  if (gids::read(real, table)) return;
  auto* const bytes = reinterpret_cast<std::uint8_t*>(&grh);
  const bool ipv4 = over_ipv4(bytes);
  const Gid to = address_of(bytes, ipv4, kDestination);
  const auto names_it = [&](const ibv_gid_entry& e) { return e.port_num == port && gid_of(e.gid.raw) == to; };
  if (std::any_of(table.begin(), table.end(), names_it)) return;
  for (const ibv_gid_entry& was : earlier->second) {
    if (!names_it(was)) continue;
    if (const auto* now = gids::like(table, was)) set_address(bytes, ipv4, kDestination, gid_of(now->gid.raw));
    return;
  }
}

}  // namespace

ibv_ah* create_ah(ibv_pd* pd, ibv_ah_attr& attr) {
  const gids::Inside inside;
  return real().create_ah(pd, &attr);
}

unsigned prepare() {
  State& s = state();
  s.prepared = true;
  unsigned count = 0;
  for (QpShadow* q : Registry::get().qps) {
    if (!datagrams_of(*q)) continue;
    ++count;
    take_long_way(*q);
  }
  return count;
}

void settle() {
  constexpr std::chrono::seconds kLimit{1};
  const auto open = [](const CqShadow* c) { return (c->state.load(std::memory_order_relaxed) & kWatchedCq) && in_session(*c); };
  for (const auto deadline = std::chrono::steady_clock::now() + kLimit; std::chrono::steady_clock::now() < deadline;) {
    {
      std::lock_guard guard(Registry::get().lock);
      const auto& cqs = Registry::get().cqs;
      if (std::none_of(cqs.begin(), cqs.end(), open)) return;
    }
    const timespec pause{0, kQuietNs};
    nanosleep(&pause, nullptr);
  }
}

int set_moves(std::span<const migr_move> moves, std::string& why) {
  State& s = state();
  {
    std::lock_guard guard(s.lock);
    s.present.clear(), s.birth.clear();
    for (const migr_move& m : moves) {
      if (!m.vqpn) continue;  // a process: whereabouts.h
      const Address born{gid_of(m.birth_gid), m.vqpn}, now{gid_of(m.gid), m.pqpn};
      s.present[born] = now;
      s.birth[now] = born;
    }
  }
  s.prepared = s.prepared || !s.present.empty();
  if (!s.prepared || Registry::get().frozen) return 0;  // make_again() does the rest
  int result = 0;                                       // one that fails is not to keep the others from working
  std::set<Gid> silent;
  for (auto& [ah, h] : s.handles)
    if (const int err = aim(ah, h, silent)) result = fail(why, err, "an address handle for a peer that has moved");
  std::vector<QpShadow*> qps;
  for (QpShadow* q : Registry::get().qps)
    if (takes_noted(*q) && (srq_of(*q) || (q->state.load(std::memory_order_relaxed) & kDatagrams))) qps.push_back(q);
  (void)provider::locate_queues(qps);  // at once; what fails is said below
  for (QpShadow* q : qps)
    if (const int err = begin_naming(*q)) result = fail(why, err, "reading back the receives of a UD QP");
  return result;
}

void made(QpShadow& q) {
  if (!state().prepared) return;
  if (datagrams_of(q)) take_long_way(q);
  if (!takes_noted(q)) return;
  watch(q);
  begin_naming(q, true);
}

void gone(QpShadow& q) {
  if (!q.awaited.noted) return;
  std::lock_guard guard(q.recv_cq->lock);
  std::erase(q.recv_cq->datagram_qps, &q);
}

void dropped(const Context& context) {
  State& s = state();
  std::lock_guard guard(s.lock);
  s.earlier.erase(&context);
  s.shifts.erase(&context);
  std::erase_if(s.handles, [&](const auto& h) { return h.second.context == &context; });
  std::erase_if(s.targets, [&](const auto& t) { return t.first.ah->context == context.real; });
}

void note_gids() {
  State& s = state();
  std::unordered_map<Context*, std::vector<ibv_gid_entry>> tables;
  const auto table_of = [&](Context* c) -> const std::vector<ibv_gid_entry>& {
    auto& table = tables[c];
    if (table.empty() && gids::read(c->real, table)) table.clear();
    return table;
  };
  for (auto& [ah, h] : s.handles) {
    const auto* e = h.context->moved ? gids::find(h.context->gids, h.attr.port_num, h.named) : nullptr;
    if (!e) e = source_of(h, table_of(h.context));
    if (e) h.source = *e;
  }
  for (const QpShadow* q : Registry::get().qps) {
    if (!datagrams_of(*q)) continue;
    auto& earlier = s.earlier[q->context];
    for (const ibv_gid_entry& e : table_of(q->context))
      if (std::none_of(earlier.begin(), earlier.end(), [&](const ibv_gid_entry& known) { return !std::memcmp(&known, &e, sizeof e); }))
        earlier.push_back(e);
  }
}

std::vector<ibv_gid_entry> sources(const Context& context) {
  std::vector<ibv_gid_entry> table, out;
  const auto& handles = state().handles;
  if (handles.empty() || gids::read(context.real, table)) return out;
  for (const auto& [ah, h] : handles) {
    const auto* const e = h.context == &context && h.attr.is_global ? source_of(h, table) : nullptr;
    if (e && !gids::like(out, *e)) out.push_back(*e);
  }
  return out;
}

void make_again() {
  State& s = state();
  const auto say = [](const std::string& what, int err) { std::fprintf(stderr, "libmigr: %s: %s\n", what.c_str(), std::strerror(err)); };
  // On the host before, somebody answered when the handle was made. Now nobody does, and what goes there is lost as it was.
  std::set<Gid> silent;  // the kernel waits a second for each
  std::unordered_map<Context*, std::vector<ibv_gid_entry>> tables;
  unsigned sourceless = 0, lost = 0;
  int last = 0;
  for (auto& [ah, h] : s.handles) {
    auto& table = tables[h.context];
    if (table.empty() && gids::read(h.context->real, table)) table.clear();
    const auto* const source = gids::like(table, h.source);
    h.sourceless = !source;
    sourceless += h.sourceless;
    if (source) h.attr.grh.sgid_index = static_cast<std::uint8_t>(source->gid_index);
    // The provider's object has to be of this host, wherever it leads: it is destroyed by its number.
    const auto* own = source;
    for (const ibv_gid_entry& e : table)
      if (!own && e.port_num == h.attr.port_num) own = &e;
    const auto again = [&](ibv_ah* one, const ibv_ah_attr& attr) {
      ibv_ah_attr mine = attr;
      const Gid to = gid_of(attr.grh.dgid.raw);
      const ibv_gid from = source ? source->gid : ibv_gid{};
      ibv_ah* fresh = nullptr;
      int err = source ? ETIMEDOUT : EADDRNOTAVAIL;
      if (source && !silent.contains(to)) err = (fresh = create_ah(one->pd, mine)) ? 0 : errno;
      if (source && unreachable(err)) silent.insert(to);
      if (!fresh && own && (!source || unreachable(err))) {
        ibv_ah_attr home = attr;
        home.grh.sgid_index = static_cast<std::uint8_t>(own->gid_index);
        home.grh.dgid = own->gid;
        if ((fresh = create_ah(one->pd, home))) provider::lead_unresolved(*fresh, attr, from);
        else err = errno;
      }
      if (fresh) return provider::become(*one, fresh);
      provider::lead_unresolved(*one, attr, from);
      one->handle = MIGR_NO_HANDLE;  // that of the host before may be another object's here
      ++lost;
      last = err;
    };
    again(ah, h.attr);
    for (const auto& [gid, other] : h.others) {
      ibv_ah_attr attr = h.attr;
      std::memcpy(attr.grh.dgid.raw, gid.data(), gid.size());
      again(other, attr);
    }
    if (const int err = source ? aim(ah, h, silent) : 0) say("an address handle for a peer that has moved", err);
  }
  if (sourceless) say("this host has no GID of the kind that " + std::to_string(sourceless) + " address handles send from: what is sent by them is lost", EADDRNOTAVAIL);
  if (lost) say(std::to_string(lost) + " address handles could not be made again: what is sent by them is lost", last);
  for (QpShadow* q : Registry::get().qps)
    for (const auto& [gid, lid] : q->groups)
      if (const int err = real().attach_mcast(q->real, &gid, lid)) say("QP " + std::to_string(q->vqpn()) + " is not in a multicast group any more", err);
}

void lock_for_fork() { state().lock.lock(); }
void unlock_after_fork() { state().lock.unlock(); }

void note_shift(const Context& context, std::uint32_t lkey, std::uint64_t shift) {
  State& s = state();
  std::lock_guard guard(s.lock);
  if (shift) s.shifts[&context][lkey >> 8] = shift;
  else if (const auto its = s.shifts.find(&context); its != s.shifts.end()) its->second.erase(lkey >> 8);
}

/* ---- data path --------------------------------------------------------------------- */

void translate(ibv_ah*& ah, std::uint32_t& qpn) noexcept {
  State& s = state();
  std::lock_guard guard(s.lock);
  const auto found = s.targets.find({ah, qpn});
  if (found == s.targets.end()) return;
  ah = found->second.ah;
  qpn = found->second.qpn;
}

void translate(ibv_send_wr& wr) noexcept {
  ibv_ah* ah = wr.wr.ud.ah;
  std::uint32_t qpn = wr.wr.ud.remote_qpn;
  translate(ah, qpn);
  wr.wr.ud.ah = ah;
  wr.wr.ud.remote_qpn = qpn;
}

void await(const Context& context, AwaitedDatagrams& at, const KeptReceive& receive) {
  AwaitedDatagrams::Entry a{receive.wr_id, 0};
  if (!receive.sges.empty() && receive.sges[0].length >= kGrhBytes) {
    State& s = state();
    std::lock_guard guard(s.lock);
    a.address = receive.sges[0].addr;
    if (const auto its = s.shifts.find(&context); its != s.shifts.end())
      if (const auto shift = its->second.find(receive.sges[0].lkey >> 8); shift != its->second.end()) a.address += shift->second;
  }
  std::lock_guard guard(at.lock);
  at.entries.push_back(a);
}

void await_not(AwaitedDatagrams& at) {
  std::lock_guard guard(at.lock);
  at.entries.pop_back();
}

void emptied(AwaitedDatagrams& at) {
  std::lock_guard guard(at.lock);
  at.entries.clear();
}

namespace {

/// Where the receive was that has completed. @return 0: not known
std::uint64_t arrived(const QpShadow& q, AwaitedDatagrams& awaited, std::uint64_t wr_id) {
  std::lock_guard guard(awaited.lock);
  auto& entries = awaited.entries;
  const auto at = std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.wr_id == wr_id; });
  if (at == entries.end()) return 0;
  const std::uint64_t address = at->address;
  // A queue of its own completes in order; what is left before it was flushed.
  entries.erase(q.app.srq ? at : entries.begin(), at + 1);
  return address;
}

}  // namespace

void name_source(CqShadow& c, ibv_wc& wc) {
  if (wc.status != IBV_WC_SUCCESS || !(wc.opcode & IBV_WC_RECV)) return;
  for (QpShadow* q : c.datagram_qps) {
    if (q->vqpn() != wc.qp_num) continue;
    SrqShadow* const srq = srq_of(*q);
    const std::uint64_t address = arrived(*q, srq ? srq->awaited : q->awaited, wc.wr_id);
    if (!address || !datagrams_of(*q) || !(wc.wc_flags & IBV_WC_GRH)) return;
    auto* grh = reinterpret_cast<std::uint8_t*>(address);
    const bool ipv4 = over_ipv4(grh);
    State& s = state();
    std::lock_guard guard(s.lock);
    const auto born = s.birth.find({address_of(grh, ipv4, kSource), wc.src_qp});
    if (born == s.birth.end()) return;
    wc.src_qp = born->second.qpn;
    set_address(grh, ipv4, kSource, born->second.gid);
    return;
  }
}

}  // namespace migr::datagrams

using namespace migr;

MIGR_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Context* context = registry.context_of(pd->context);
  ibv_ah_attr mine = *attr;
  const auto create = [&] { return datagrams::create_ah(pd, mine); };
  if (!context) return without_lock(guard, create);
  if (mine.is_global) mine.grh.sgid_index = gids::here(*context, mine.port_num, mine.grh.sgid_index);
  const Registering making(registry);
  ibv_ah* ah = without_lock(guard, create);
  if (!ah) return nullptr;
  auto& handle = datagrams::state().handles[ah];
  // What is at its index is noted later. Until then: what its destination is reached from.
  handle = {context, mine, attr->grh.sgid_index, {mine.grh.dgid, attr->grh.sgid_index, mine.port_num, IBV_GID_TYPE_ROCE_V2, 0}, false, {}};
  std::set<datagrams::Gid> silent;
  if (const int err = datagrams::state().prepared ? datagrams::aim(ah, handle, silent) : 0) {
    for (const auto& [gid, other] : handle.others) real().destroy_ah(other);
    datagrams::state().handles.erase(ah);
    real().destroy_ah(ah);
    errno = err;
    return nullptr;
  }
  return ah;
}

// ibv_create_ah_from_wc() calls this one and ibv_create_ah().
MIGR_EXPORT int ibv_init_ah_from_wc(ibv_context* context, uint8_t port, ibv_wc* wc, ibv_grh* grh, ibv_ah_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  const Context* ours = registry.context_of(context);
  if (!ours || !(wc->wc_flags & IBV_WC_GRH)) return real().init_ah_from_wc(context, port, wc, grh, attr);
  ibv_grh mine = *grh;
  datagrams::bring_home(*ours, context, port, mine);
  const gids::Inside inside;
  const int err = real().init_ah_from_wc(context, port, wc, &mine, attr);
  if (!err) attr->grh.sgid_index = gids::named(*ours, port, attr->grh.sgid_index);
  return err;
}

MIGR_EXPORT int ibv_destroy_ah(ibv_ah* ah) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  auto& s = datagrams::state();
  const auto known = s.handles.find(ah);
  std::vector<std::pair<datagrams::Gid, ibv_ah*>> others;
  if (known != s.handles.end()) others = known->second.others;
  const int err = ah->handle == MIGR_NO_HANDLE ? 0 : real().destroy_ah(ah);  // of a few bytes nobody takes care then
  if (err || known == s.handles.end()) return err;
  s.handles.erase(known);
  {
    std::lock_guard names(s.lock);
    std::erase_if(s.targets, [&](const auto& t) { return t.first.ah == ah; });
  }
  for (const auto& [gid, other] : others) real().destroy_ah(other);
  return 0;
}

namespace {

auto find_group(QpShadow& q, const ibv_gid& gid, std::uint16_t lid) {
  return std::find_if(q.groups.begin(), q.groups.end(), [&](const auto& g) { return g.second == lid && !std::memcmp(&g.first, &gid, sizeof gid); });
}

}  // namespace

// Calls that join or leave a multicast group. To be joined twice is as once, to the kernel too.
MIGR_EXPORT int ibv_attach_mcast(ibv_qp* qp, const ibv_gid* gid, uint16_t lid) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  QpShadow* shadow = known(registry, qp);
  const int err = real().attach_mcast(shadow ? shadow->real : qp, gid, lid);
  if (!err && shadow && find_group(*shadow, *gid, lid) == shadow->groups.end()) shadow->groups.emplace_back(*gid, lid);
  return err;
}

MIGR_EXPORT int ibv_detach_mcast(ibv_qp* qp, const ibv_gid* gid, uint16_t lid) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  QpShadow* shadow = known(registry, qp);
  const int err = real().detach_mcast(shadow ? shadow->real : qp, gid, lid);
  if (err || !shadow) return err;
  const auto joined = find_group(*shadow, *gid, lid);
  if (joined != shadow->groups.end()) shadow->groups.erase(joined);
  return 0;
}
