// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "whereabouts.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>

#include <spdlog/spdlog.h>

#include "kernel_record.h"
#include "limits.h"
#include "parallel.h"
#include "room.h"
#include "uapi/migr.h"
#include "wire.grpc.pb.h"

namespace migr {
namespace {

// The record of this host with all its QPs. Without the module: empty.
Result<std::vector<ContextRecord>> all_contexts(pid_t pid = 0) {
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error().code == ENOENT ? Result<std::vector<ContextRecord>>(std::vector<ContextRecord>()) : kernel.error();
  auto ctxs = kernel->contexts(pid);
  if (!ctxs) return ctxs;
  Status failed;
  std::erase_if(*ctxs, [&](ContextRecord& c) {
    auto s = kernel->search(c);
    if (!s && s.error().code != ENOENT && failed) failed = s;
    return !s;  // it ended meanwhile
  });
  if (!failed) return failed.error();
  return ctxs;
}

// GIDs of devices, each read once.
class Tables {
 public:
  const std::vector<wire::PortGid>& of(const migr_ctx_rec& c) {
    const std::string device = device_of(c);
    auto [at, fresh] = known_.try_emplace(device);
    if (fresh)
      if (auto found = gids_of(device)) at->second = std::move(*found);
    return at->second;
  }

 private:
  std::map<std::string, std::vector<wire::PortGid>> known_;
};

bool has(const std::vector<wire::PortGid>& table, const std::string& gid) {
  return std::any_of(table.begin(), table.end(), [&](const auto& g) { return g.gid() == gid; });
}

// By the device's number only what has no libmigr: of others that is nobody's name, and may be that of one that has left.
bool is_called(const migr_ctx_rec& c, const migr_qp_rec& q, std::uint32_t number) {
  return q.vqpn == number || (!(c.flags & MIGR_CTX_ATTACHED) && q.pqpn == number);
}

}  // namespace

const wire::Whereabouts* choose(const wire::WhereReply& all, const std::set<std::string>& asker_gids, std::uint32_t asker_pqpn) {
  const wire::Whereabouts* best = nullptr;
  for (const auto& w : all.found()) {
    if (w.connected()) {
      if (w.dest_pqpn() == asker_pqpn && asker_gids.contains(w.dest_gid())) return &w;
      continue;
    }
    if (!best || (best->moved() && !w.moved())) best = &w;
  }
  return best;
}

// Its HELLO may be on its way: the process has just begun, or this daemon has. None: it has no libmigr.
std::shared_ptr<ProcessSession> Whereabouts::session_of(const migr_ctx_rec& c) {
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + std::chrono::milliseconds(kWhereMs / 2);; usleep(5'000)) {
    auto session = sessions_.by_pid(static_cast<pid_t>(c.pid));
    if (session || !(c.flags & MIGR_CTX_ATTACHED) || Clock::now() > until) return session;
  }
}

Status Whereabouts::where(const wire::WhereRequest& r, wire::WhereReply& out) {
  if (r.gid().size() != sizeof(migr_qp_address::gid) || !r.vqpn() || r.vqpn() > MIGR_QPN_MASK) return Error{EINVAL, "a malformed address"};
  auto ctxs = all_contexts();
  if (!ctxs) return ctxs.error();
  auto owners = numbers_.owners_of(r.vqpn());
  if (!owners) return owners.error();
  Tables tables;
  const auto is_here = [&](const Instance& i) {
    return std::any_of(ctxs->begin(), ctxs->end(), [&](const ContextRecord& c) {
      const auto session = sessions_.by_pid(static_cast<pid_t>(c.rec.pid));
      return session && session->instance() == i && has(tables.of(c.rec), r.gid()) && std::any_of(c.qps.begin(), c.qps.end(), [&](const auto& q) { return q.vqpn == r.vqpn(); });
    });
  };
  // For whom this host keeps that number since it has left from there: whoever else has it here has bound it.
  std::set<Instance> kept_for;
  for (const auto& i : *owners)
    if (directory_.was_at(i, r.gid()) || is_here(i)) kept_for.insert(i);
  for (const auto& c : *ctxs)
    for (const auto& q : c.qps) {
      if ((q.flags & MIGR_QP_FORMER) || (q.qp_type != kRc && q.qp_type != kUc)) continue;
      if (!is_called(c.rec, q, r.vqpn())) continue;
      const auto& gids = tables.of(c.rec);
      const bool born_here = has(gids, r.gid());
      std::string gid = r.gid();
      if (born_here && q.vqpn != q.pqpn && !kept_for.empty()) {
        const auto session = session_of(c.rec);
        if (!session || !kept_for.contains(session->instance())) continue;
      }
      if (!born_here) {
        // Only by the number it was born with does anybody know it there.
        const auto session = q.vqpn == r.vqpn() ? session_of(c.rec) : nullptr;
        if (!session || !directory_.was_at(session->instance(), r.gid())) continue;
        int nearest = 0;
        for (const auto& g : gids)
          if (const int near = g.roce_v2() ? gid_nearness(r.gid(), g.gid()) : 0; near > nearest) nearest = near, gid = g.gid();
        if (!nearest) continue;
      }
      auto* w = out.add_found();
      w->set_gid(connected(q) ? bytes_of(q.ah.sgid) : gid);
      w->set_pqpn(q.pqpn);
      w->set_moved(!born_here);
      w->set_connected(connected(q));
      if (!connected(q)) continue;
      w->set_dest_gid(bytes_of(q.ah.dgid));
      w->set_dest_pqpn(q.dest_qpn);
    }
  return {};
}

Result<migr_qp_address> Whereabouts::find(const migr_qp_address& named, std::uint32_t asker_pqpn) {
  wire::WhereRequest r;
  r.set_gid(bytes_of(named.gid));
  r.set_vqpn(named.qpn);
  if (!directory_.touched(r.gid())) return Error{ENOENT, "nothing has moved there"};
  struct Asked {
    std::string host;
    wire::WhereReply reply;
    std::string refused;
  };
  std::vector<Asked> hosts{{config_.name, {}, {}}};
  for (const auto& p : config_.peers()) hosts.push_back({p.name, {}, {}});
  (void)parallel_for(hosts, [&](Asked& a) -> Status {
    auto channel = peers_.channel(a.host);
    if (!channel) return channel.error();
    wire::Partner::Stub stub(*channel);
    auto found = call(stub, &wire::Partner::Stub::Where, r, kWhereMs, a.host);
    if (!found && !unreachable(found.error())) {
      a.refused = found.error().text;
      if (rarely_.due(a.refused)) spdlog::warn("{} was asked where a QP is: {}", a.host, a.refused);
    }
    if (found) a.reply = std::move(*found);
    return {};
  });
  std::set<std::string> mine;
  (void)each_gid([&](const wire::PortGid& g) { mine.insert(g.gid()); });
  wire::WhereReply all;
  std::string refused;
  for (const auto& a : hosts) {
    all.MergeFrom(a.reply);
    if (!a.refused.empty()) refused += (refused.empty() ? "" : ", ") + a.refused;
  }
  const auto* w = choose(all, mine, asker_pqpn);
  // It may be where nobody looked: the process has to say so.
  if (!w && !refused.empty()) return Error{EREMOTEIO, "no other host has a QP of that address: " + refused};
  if (!w || w->gid().size() != sizeof named.gid) return Error{ENOENT, "no QP of that address"};
  migr_qp_address out{};
  std::copy(w->gid().begin(), w->gid().end(), reinterpret_cast<char*>(out.gid));
  out.qpn = w->pqpn();
  return out;
}

Status Whereabouts::introduce(const Question& q) {
  const auto keys = q.records_as<migr_key_map>();
  if (!keys || keys->empty()) return Error{EINVAL, "no keys"};
  const auto session = sessions_.by_pid(q.who.pid);
  if (!session) return Error{ENOENT, "a process that is not known here"};
  // The record says to whom it is connected: nobody is told of keys by whom he has not chosen.
  auto ctxs = all_contexts(q.who.pid);
  if (!ctxs) return ctxs.error();
  const migr_qp_rec* own = nullptr;
  for (const auto& c : *ctxs)
    for (const auto& x : c.qps)
      if (MIGR_QP_NAME(c.rec.ctx_id, x.vqpn) == q.arg && connected(x) && !(x.flags & MIGR_QP_FORMER)) own = &x;
  if (!own) return Error{ENOENT, "it has no such connection"};
  wire::IntroduceRequest r;
  r.set_gid(bytes_of(own->ah.dgid));
  r.set_pqpn(own->dest_qpn);
  r.set_from_gid(bytes_of(own->ah.sgid));
  r.set_from_pqpn(own->pqpn);
  r.mutable_keys()->set_owner(session->instance().data(), session->instance().size());
  for (const auto& k : *keys) r.mutable_keys()->add_vrkey(k.vrkey), r.mutable_keys()->add_prkey(k.prkey);
  std::set<std::string> hosts{config_.name};
  for (const auto& p : config_.peers()) hosts.insert(p.name);
  std::atomic<bool> told = false;
  auto s = parallel_for(hosts, [&](const std::string& host) -> Status {
    auto channel = peers_.channel(host);
    if (!channel) return {};
    wire::Partner::Stub stub(*channel);
    auto done = call(stub, &wire::Partner::Stub::Introduce, r, kWhereMs, host);
    if (done) told = true;
    return done || done.error().code == ENOENT || unreachable(done.error()) ? Status() : Status(done.error());
  });
  if (told) return {};
  return s ? Status(Error{ENOENT, "the partner has no libmigr, or is no peer"}) : s;
}

Status Whereabouts::introduce(const wire::IntroduceRequest& r) {
  auto ctxs = all_contexts();
  if (!ctxs) return ctxs.error();
  Tables tables;
  for (const auto& c : *ctxs)
    for (const auto& q : c.qps) {
      if (q.pqpn != r.pqpn() || (q.flags & MIGR_QP_FORMER) || !(c.rec.flags & MIGR_CTX_ATTACHED) || !has(tables.of(c.rec), r.gid())) continue;
      if (connected(q) && (bytes_of(q.ah.dgid) != r.from_gid() || q.dest_qpn != r.from_pqpn())) continue;  // somebody else's
      const auto session = session_of(c.rec);
      if (!session) continue;
      auto keys = key_maps({&r.keys(), 1});
      if (!keys) return keys.error();
      return session->ask<migr_qp_ref, migr_key_map>(MIGR_MSG_MET, 0, *keys, kWhereMs, MIGR_QP_NAME(c.rec.ctx_id, q.vqpn));
    }
  return Error{ENOENT, "no process with libmigr has that QP"};
}

Result<Answer> Whereabouts::answer(const Question& q) {
  Answer out;
  if (q.type == MIGR_MSG_INTRODUCE) {
    if (auto s = introduce(q); !s) return s.error();
    return out;
  }
  const auto named = q.records_as<migr_qp_address>();
  if (q.type != MIGR_MSG_WHERE || !named || named->size() != 1) return Error{EPROTO, "a malformed question"};
  auto found = find(named->front(), static_cast<std::uint32_t>(q.arg));
  if (!found) return found.error();
  out.record_size = sizeof *found;
  out.records.resize(sizeof *found);
  std::memcpy(out.records.data(), &*found, sizeof *found);
  return out;
}

}  // namespace migr
