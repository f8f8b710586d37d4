// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "partner_host.h"

#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "devices.h"
#include "fault.h"
#include "kernel_record.h"
#include "limits.h"
#include "parallel.h"
#include "process.h"
#include "replay.h"
#include "resume_stats.h"
#include "room.h"
#include "tracking.h"

namespace migr {

namespace {

// The library carries out a message under the lock that the application's calls wait for, and a QP takes up to half a millisecond.
// Each message also makes it read where its queues are mapped.
constexpr std::size_t kQpsAtOnce = 256;

// About many QPs, some at a time, as long as it may take for all of them. What an error leaves undone ROLLBACK takes back.
template <class Out, class In>
Result<std::vector<Out>> ask_in_parts(ProcessSession& session, std::uint16_t type, std::uint32_t migration, std::span<const In> all, std::uint64_t arg = 0) {
  using std::chrono::steady_clock, std::chrono::milliseconds;
  const auto until = steady_clock::now() + milliseconds(process_ms(all.size()));
  std::vector<Out> out;
  for (; !all.empty(); all = all.subspan(std::min(all.size(), kQpsAtOnce))) {
    const auto left = std::chrono::duration_cast<milliseconds>(until - steady_clock::now()).count();
    auto some = session.ask<Out, In>(type, migration, all.first(std::min(all.size(), kQpsAtOnce)), static_cast<int>(std::max<long long>(left, 0)), arg);
    if (!some) return some.error();
    out.insert(out.end(), some->begin(), some->end());
  }
  return out;
}

}  // namespace

// One process and those of its QPs that are affected.
struct PartnerHost::Process {
  Instance instance{};
  pid_t pid = 0;
  std::vector<migr_qp_ref> refs;
  std::vector<std::uint32_t> index;   // of each ref, as the coordinator counts
  std::vector<std::string> gid;       // of each ref: it sends from
  std::string began;                  // which life has the number; empty: written down by an older migrd
  std::set<std::string> owners;       // at the other ends, from Connect on: it is told their keys; empty: an older migrd, and it is told all
  CountedQps counted() const { return {refs, index}; }
  bool lives() const { return process_lives(pid) && (began.empty() || life_of(pid) == began); }
};

struct PartnerHost::Job : LeasedJob {
  journal::Partner record;            // guarded by work
  std::vector<Process> processes;     // guarded by work; empty once it is finished
  std::vector<pid_t> pids;            // of them, fixed
  // Of what is finished only the outcome is kept, for a week: there may be many QPs.
  void forget_ends() {
    record.mutable_request()->clear_qps();
    record.clear_began();
    record.clear_owners();
  }
  std::vector<Claims::Process> wanted() const {
    std::vector<Claims::Process> all;
    for (const auto& p : processes) all.push_back({p.instance, p.pid});
    return all;
  }
  std::atomic<bool> switched = false;
  bool tracked = false;  // Track: its processes note where they write to
  bool has_keys = false;
  bool reloaded = false;              // an earlier migrd has begun it
  std::mutex state;                   // guards refused
  std::map<std::string, std::string> refused;  // by hosts that were asked what became of it: why they do not say
  Afterwards afterwards;
};

Result<PartnerHost::JobPtr> PartnerHost::job_of(const wire::PartnerPrepareRequest& r) {
  if (!r.id()) return Error{EINVAL, "PartnerPrepare without a number"};
  auto job = std::make_shared<Job>();
  job->id = r.id();
  job->source = r.source();
  for (const auto& q : r.qps()) {
    const auto instance = instance_of(q.instance());
    if (!instance) return instance.error();
    auto p = std::find_if(job->processes.begin(), job->processes.end(), [&](const Process& x) { return x.pid == q.pid(); });
    if (p == job->processes.end()) p = job->processes.insert(p, {*instance, q.pid(), {}, {}, {}, {}, {}});
    p->refs.push_back({q.ctx_id(), q.vqpn(), q.pqpn(), 0});
    p->index.push_back(q.index());
    p->gid.push_back(q.gid());
  }
  for (const auto& p : job->processes) job->pids.push_back(p.pid);
  *job->record.mutable_request() = r;
  return job;
}

PartnerHost::PartnerHost(const Config& config, SessionTable& sessions, Peers& peers, Claims& claims, std::shared_ptr<Directory> directory, Whereabouts& whereabouts)
    : config_(config), sessions_(sessions), peers_(peers), claims_(claims), directory_(std::move(directory)), whereabouts_(whereabouts), journal_(config.state_dir + "/journal/partner") {
  Unread unread;
  for (const auto& [id, record] : journal_.load(kKeepOutcome, [](const auto& r) { return r.outcome() != wire::OPEN; }, &unread)) {
    auto job = job_of(record.request());
    if (!job || (*job)->id != id) {
      spdlog::error("migration {}: its record is another's, or malformed", migration_text(id));
      unread.add(id);
      continue;
    }
    JobPtr j = *job;
    j->record = record;
    for (auto& p : j->processes) {
      if (const auto began = record.began().find(p.pid); began != record.began().end()) p.began = began->second;
      if (const auto to = record.owners().find(p.pid); to != record.owners().end()) p.owners = {to->second.instance().begin(), to->second.instance().end()};
    }
    j->begun_s = record.begun_s();
    j->outcome = record.outcome();
    j->switched = record.switched();
    j->finished = record.outcome() != wire::OPEN;
    j->reloaded = true;
    if (j->finished) {
      j->forget_ends();
      j->processes.clear();
    } else {
      const LogScope log(id);
      spdlog::warn("from {} to {}: it was not finished when migrd ended", j->source, record.request().destination());
      j->expire();
      if (const auto holder = claims_.take(j->wanted(), id)) spdlog::error("migration {:08x} holds a process of it, too", holder);
    }
    (void)jobs_.add(j);
  }
  jobs_.set_unread(std::move(unread));
}

// Caller holds job.work.
Status PartnerHost::save(Job& job) {
  job.record.set_outcome(job.outcome);
  job.record.set_switched(job.switched);
  if (job.get() != wire::OPEN) job.forget_ends();
  const Status s = journal_.save(job.id, job.record);
  job.unsaved = !s;
  return s;
}

// Caller holds job.work.
void PartnerHost::end(Job& job, wire::Outcome outcome) {
  job.outcome = outcome;
  job.finished = true;
  decided(outcome);
  std::vector<Instance> held;
  for (const auto& p : job.processes) held.push_back(p.instance);
  claims_.release(held, job.id);
  job.processes.clear();
}

// A process that has connected anew meanwhile is found by its number.
Result<std::shared_ptr<ProcessSession>> PartnerHost::session_of(const Process& p) const {
  return sessions_.wait_for(p.instance, [&](const ProcessSession& s) { return s.pid() == p.pid; }, p.lives() ? kReconnectMs : 0);
}

// Before the commit. EAGAIN: what it was asked for is not there any more; whoever begins anew finds what is. Caller holds job.work.
Status PartnerHost::each(Job& job, const std::function<Status(Process&, ProcessSession&)>& f) {
  const auto one = [&](Process& p) -> Status {
    const std::string who = "process " + std::to_string(p.pid) + " on " + config_.name;
    auto session = session_of(p);
    const Status s = session ? f(p, **session) : Status(Error{ENOTCONN, who + " is not connected to its migrd any more"});
    if (s) return s;
    if (s.error().code == ECONNRESET ? (*session)->ends() : !p.lives()) return Error{EAGAIN, who + " has ended meanwhile"};
    if (s.error().code == ENOENT) return Error{EAGAIN, s.error().text};  // a QP that it has destroyed
    return s;
  };
  return parallel_for(job.processes, one);
}

// The same after the commit, when there is no way back: who has ended holds up nobody else. Caller holds job.work.
Status PartnerHost::each_left(Job& job, const std::function<Status(Process&, ProcessSession&)>& f) {
  const auto one = [&](Process& p) -> Status {
    auto session = session_of(p);
    const Status s = session ? f(p, **session) : session.error();
    if (s || (session ? !(*session)->ends() : p.lives())) return s;
    spdlog::warn("process {} has ended since the commit", p.pid);
    return {};
  };
  return parallel_for(job.processes, one);
}

namespace {

// Of another family its libmigr can make no path. That is found out of each device once, by its own name.
class Families {
 public:
  Status can_follow(const migr_ctx_rec& rec, const std::string& who) {
    const std::string device = device_of(rec);
    const auto [at, first] = drivers_.try_emplace(device);
    if (first)
      if (const auto room = room_of(device); room && room->device.ibdev == device) at->second = room->device.driver_id;
    if (family_supported(at->second)) return {};
    return Error{EOPNOTSUPP, fmt::format("{}, is on {}, which is driven by {}: its end of the connection cannot follow, only one on soft-RoCE (rxe) can", who, device, driver_name(at->second))};
  }

 private:
  std::map<std::string, std::uint32_t> drivers_;  // 0: not known
};

// What the record says of a QP that has the number of such an end.
enum class EndSeen {
  kElsewhere,  // it sends from another GID
  kStands,
  kLeft,     // it was connected to who asks, and is to nobody now
  kAnother,  // it is connected to somebody else
  kIdle,     // it is connected to nobody, and was not to who asks
};

EndSeen seen_as(const migr_qp_rec& q, const wire::QpEnd& end) {
  if (q.qp_type != kRc && q.qp_type != kUc) return EndSeen::kElsewhere;
  const bool idle = q.qp_state < kRtr, here = bytes_of(q.ah.sgid) == end.gid();  // of an idle one: where it was connected before
  if (end.from_gid().empty()) return !here ? EndSeen::kElsewhere : idle ? EndSeen::kIdle : EndSeen::kStands;
  const bool ours = here && q.dest_qpn == end.from_pqpn() && bytes_of(q.ah.dgid) == end.from_gid();
  if (idle) return ours ? EndSeen::kLeft : EndSeen::kIdle;
  return ours ? EndSeen::kStands : here ? EndSeen::kAnother : EndSeen::kElsewhere;
}

// Of ends that the record does not have as they should be: one at an address of this host, whose number no QP has, or one that is
// connected to somebody else, is one that nobody has any more. The record alone does not tell: a process may be older than migr.ko.
// @param seen  of QPs with these numbers, by the end: their devices
Status add_not_connected(const wire::FindRequest& r, const std::set<int>& unknown, const std::map<int, std::map<std::string, EndSeen>>& seen, wire::FindReply& out) {
  if (unknown.empty()) return {};
  std::map<std::string, std::string> device_at;  // by GID
  if (auto s = each_gid([&](wire::PortGid& g) { device_at[g.gid()] = g.device(); }); !s) return s;
  std::map<std::string, std::set<std::uint32_t>> numbers;  // by device
  for (const int i : unknown) {
    const auto at = device_at.find(r.ends(i).gid());
    if (at == device_at.end()) continue;
    const auto index = static_cast<std::uint32_t>(i);
    if (const auto of_it = seen.find(i); of_it != seen.end())
      if (const auto q = of_it->second.find(at->second); q != of_it->second.end()) {
        if (q->second != EndSeen::kIdle) out.add_dead(index);
        out.add_forming(index);  // also one of another connection: its program may be taking it from there to here
        continue;
      }
    if (!numbers.contains(at->second)) {
      auto all = qp_numbers(at->second);
      if (!all) return all.error();
      numbers[at->second] = std::move(*all);
    }
    if (!numbers[at->second].contains(r.ends(i).pqpn())) out.add_dead(index);
  }
  return {};
}

}  // namespace

grpc::Status PartnerHost::Find(grpc::ServerContext* ctx, const wire::FindRequest* r, wire::FindReply* out) {
  LogScope log(log_fields_of(*ctx, config_));
  log->phase = "partner.find";
  auto find = [&]() -> Status {
    auto kernel = KernelRecord::open();
    // Without the module nobody here is a partner that could follow.
    if (!kernel) return kernel.error().code == ENOENT ? Status() : Status(kernel.error());
    auto ctxs = kernel->contexts();
    std::multimap<std::uint32_t, int> by_qpn;
    for (int i = 0; i < r->ends_size(); i++) by_qpn.emplace(r->ends(i).pqpn(), i);
    if (!ctxs) return ctxs.error();
    std::set<int> unknown;  // to the record
    std::map<int, std::map<std::string, EndSeen>> seen;
    Families families;
    for (int i = 0; i < r->ends_size(); i++) unknown.insert(i);
    for (auto& c : *ctxs) {
      if (auto s = kernel->search(c); !s) {
        if (s.error().code == ENOENT) continue;  // it ended meanwhile
        return s;
      }
      for (const auto& q : c.qps) {
        if (q.flags & MIGR_QP_FORMER) continue;
        const std::string gid = bytes_of(q.ah.sgid);
        for (auto [at, last] = by_qpn.equal_range(q.pqpn); at != last; at++) {
          const int i = at->second;
          const EndSeen as = seen_as(q, r->ends(i));
          if (as == EndSeen::kElsewhere) continue;
          if (as != EndSeen::kStands) {
            seen[i][device_of(c.rec)] = as;
            continue;
          }
          unknown.erase(i);
          const auto pid = static_cast<pid_t>(c.rec.pid);
          const std::string where = " (" + comm_of(c.rec) + ") on " + config_.name, who = "process " + std::to_string(pid) + where;
          if (!pid) return Error{EBUSY, "the partner, context " + std::to_string(c.rec.ctx_id) + where + ", cannot follow: " + kProcessEnded};
          auto session = sessions_.by_pid(pid);
          const auto holder = claims_.holder(pid);
          if (holder || (session && session->state() != MIGR_PROC_RUNNING)) {
            auto* b = out->add_busy();
            b->set_who(who);
            b->set_migration(holder);
            return {};
          }
          if (const std::string refusal = sessions_.refusal(pid); !session && !refusal.empty())
            return Error{EBUSY, "the libmigr of the partner, " + who + ", is not connected to migrd there, which has refused it: " + refusal};
          if (!(c.rec.flags & MIGR_CTX_ATTACHED) && session) {
            const auto described = session->ask<migr_fd_desc, migr_qp_ref>(MIGR_MSG_DESCRIBE, 0, {}, kProcessMs);
            return Error{EBUSY, "the partner, " + who + ", cannot follow: " +
                                    (described ? "its libmigr does not know what it has; its standard error may say why" : described.error().text)};
          }
          if (!(c.rec.flags & MIGR_CTX_ATTACHED))
            return Error{EBUSY, "the partner, " + who + ", does not use libmigr, so its end of the connection cannot follow; "
                                "start it anew with LD_PRELOAD=" + config_.libmigr + ", or let it end the connection first"};
          if (!session)
            return Error{EBUSY, "the libmigr of the partner, " + who + ", is not connected to migrd there; can it see " + config_.run_dir + "?"};
          if (auto s = state_can_move(q, "the partner, " + who); !s) return s;
          if (auto s = families.can_follow(c.rec, "the partner, " + who); !s) return s;
          auto* p = out->add_qps();
          p->set_index(static_cast<std::uint32_t>(i));
          p->set_instance(session->instance().data(), session->instance().size());
          p->set_pid(session->pid());
          p->set_ctx_id(c.rec.ctx_id);
          p->set_vqpn(q.vqpn);
          p->set_pqpn(q.pqpn);
          p->set_gid(gid);
          p->set_dest_pqpn(q.dest_qpn);
        }
      }
    }
    if (auto s = add_not_connected(*r, unknown, seen, *out); !s) spdlog::info("whether the other ends of {} connections live is not known: {}", unknown.size(), s.error().text);
    return {};
  };
  const Status s = fault_step(config_.fault, FaultStep::kPartnerFind, find);
  if (!s) spdlog::info("refused: {}", s.error().text);
  if (out->busy_size()) spdlog::info("{} takes part in migration {:08x}", out->busy(0).who(), out->busy(0).migration());
  return to_grpc(s);
}

grpc::Status PartnerHost::Prepare(grpc::ServerContext* ctx, const wire::PartnerPrepareRequest* r, wire::PartnerPrepareReply* out) {
  LogScope log(log_fields_of(*ctx, config_, r->id()));
  log->phase = "partner.prepare";
  if (auto s = fault(config_.fault, FaultStep::kPartnerPrepare, FaultAt::kBegin); !s) return to_grpc(s);
  auto made = job_of(*r);
  if (!made) return to_grpc(made);
  const JobPtr job = *made;
  if (auto s = coordinates({*ctx, config_}, job->id, job->source); !s) return to_grpc(s);
  for (auto& p : job->processes) {
    p.began = life_of(p.pid);  // before it is seen to be connected: nobody else has the number then
    auto session = sessions_.by_pid(p.pid);
    if (!session || session->instance() != p.instance)
      return to_grpc(Error{p.lives() ? ENOENT : EAGAIN, "process " + std::to_string(p.pid) + " is not connected to its migrd any more"});
    if (session->state() != MIGR_PROC_RUNNING) {
      out->mutable_busy()->set_who(session->label() + " on " + config_.name);
      return grpc::Status::OK;
    }
  }
  std::lock_guard work(job->work);
  job->begun_s = unix_now();
  job->record.set_begun_s(job->begun_s);
  for (const auto& p : job->processes) (*job->record.mutable_began())[p.pid] = p.began;
  if (jobs_.find(job->id)) return {grpc::StatusCode::ALREADY_EXISTS, "a migration of that number is here"};
  if (const auto holder = claims_.take(job->wanted(), job->id)) {
    out->mutable_busy()->set_who("a partner on " + config_.name);
    out->mutable_busy()->set_migration(holder);
    return grpc::Status::OK;
  }
  if (auto s = jobs_.add(job); !s) return to_grpc(s);
  spdlog::info("{} processes here have connections to what moves from {} to {}", job->processes.size(), job->source, r->destination());
  // From here on this host has something to take back.
  Status s = save(*job);
  if (!s) {
    end(*job, wire::UNDONE);
    return to_grpc(s);
  }
  if (!r->later()) s = create(*job, *out);
  if (s) s = fault(config_.fault, FaultStep::kPartnerPrepare, FaultAt::kEnd);
  job->renew();
  return to_grpc(s);
}

// Caller holds job.work.
Status PartnerHost::create(Job& job, wire::PartnerPrepareReply& out) {
  std::mutex guards_out;
  return each(job, [&](Process& p, ProcessSession& session) -> Status {
    auto spares = ask_in_parts<migr_qp_spare, migr_qp_ref>(session, MIGR_MSG_QP_CREATE, job.id, p.refs);
    if (!spares) return spares.error();
    const auto places = p.counted().places();
    std::lock_guard lock(guards_out);
    for (const auto& x : *spares) {
      const auto ref = places.find({x.ctx_id, x.vqpn});
      if (ref == places.end()) return Error{EPROTO, session.label() + ": a spare for a QP that was not asked for"};
      auto* o = out.add_spares();
      o->set_index(p.index[ref->second]);
      o->set_pqpn(x.pqpn);
      o->set_psn(x.psn);
      o->set_gid(p.gid[ref->second]);
    }
    return {};
  });
}

// A call on a migration that is open here.
grpc::Status PartnerHost::step(const grpc::ServerContext& ctx, std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work) {
  const LogScope log(log_fields_of(ctx, config_, id));
  auto job = jobs_.find(id, {ctx, config_});
  if (!job) return to_grpc(job);
  std::lock_guard lock((*job)->work);
  const auto still_open = [&] {
    if ((*job)->get() == wire::OPEN && !(*job)->aborting) return Status();
    return Status(Error{ECANCELED, config_.name + " has undone the migration: the coordinator was silent for too long, or migrd was started again"});
  };
  // Twice is as good as once.
  if ((*job)->get() == wire::COMMITTED && (step == FaultStep::kPartnerKeys || step == FaultStep::kPartnerResume)) return grpc::Status::OK;
  if (auto s = still_open(); !s) return to_grpc(s);
  return to_grpc(job_step(config_.fault, id, step, [&]() -> Status {
    if (auto s = still_open(); !s) return s;  // it was taken back while a fault point slept
    return work(**job);
  }));
}

grpc::Status PartnerHost::step_back(const grpc::ServerContext& ctx, std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work) {
  const LogScope log(log_fields_of(ctx, config_, id));
  auto job = jobs_.find(id, {ctx, config_});
  if (!job) return to_grpc(job);
  (*job)->aborting = true;
  std::lock_guard lock((*job)->work);
  return to_grpc(job_step(config_.fault, id, step, [&] { return work(**job); }));
}

grpc::Status PartnerHost::Create(grpc::ServerContext* ctx, const wire::Migration* m, wire::PartnerPrepareReply* out) {
  return step(*ctx, m->id(), FaultStep::kPartnerCreate, [&](Job& job) { return create(job, *out); });
}

grpc::Status PartnerHost::Connect(grpc::ServerContext* ctx, const wire::ConnectRequest* r, wire::Empty*) {
  return step(*ctx, r->id(), FaultStep::kPartnerConnect, [&](Job& job) {
    return each(job, [&](Process& p, ProcessSession& session) -> Status {
      std::map<std::uint32_t, std::vector<migr_qp_connect>> by_context;  // of the other ends
      std::map<std::uint32_t, const wire::Connection*> by_index;
      std::set<std::string> owners;
      for (const auto& c : r->connections()) by_index[c.index()] = &c;
      for (std::size_t n = 0; n < p.refs.size(); n++) {
        const wire::Connection* c = by_index[p.index[n]];
        if (!c || c->dest_gid().size() != 16) return Error{EINVAL, "Connect leaves out QP " + std::to_string(p.refs[n].vqpn)};
        if (c->peer().size() != 16) return Error{EINVAL, "Connect does not say whose the other end of QP " + std::to_string(p.refs[n].vqpn) + " is"};
        migr_qp_connect x{p.refs[n].ctx_id, p.refs[n].vqpn, c->dest_pqpn(), c->dest_psn(), {}, {}};
        std::copy(c->peer().begin(), c->peer().end(), reinterpret_cast<char*>(x.peer));
        owners.insert(c->peer());
        std::copy(c->dest_gid().begin(), c->dest_gid().end(), reinterpret_cast<char*>(x.dgid));
        by_context[c->peer_ctx_id()].push_back(x);
      }
      for (const auto& [ctx_id, to] : by_context)
        if (auto done = ask_in_parts<migr_qp_ref, migr_qp_connect>(session, MIGR_MSG_QP_CONNECT, job.id, to, ctx_id); !done) return done.error();
      p.owners = std::move(owners);
      return {};
    });
  });
}

grpc::Status PartnerHost::Track(grpc::ServerContext* ctx, const wire::Migration* m, wire::TrackReply* reply) {
  return step(*ctx, m->id(), FaultStep::kPartnerTrack, [&](Job& job) {
    const Status s = each(job, [&](Process& p, ProcessSession& session) { return track(session, job.id, p.refs); });
    job.tracked = bool(s);
    if (!s) reply->set_why_not(s.error().text);
    return Status();
  });
}

grpc::Status PartnerHost::Suspend(grpc::ServerContext* ctx, const wire::LimitedRequest* r, wire::Empty*) {
  return step(*ctx, r->id(), FaultStep::kPartnerSuspend, [&](Job& job) {
    return each(job, [&](Process& p, ProcessSession& session) -> Status {
      if (auto s = session.ask<migr_qp_ref, migr_qp_ref>(MIGR_MSG_SUSPEND, job.id, p.refs, process_ms(p.refs.size())); !s) return s.error();
      return session.wait_threads_outside(static_cast<int>(std::min<std::uint32_t>(r->limit_ms(), static_cast<std::uint32_t>(kSuspendMs))));
    });
  });
}

grpc::Status PartnerHost::Drain(grpc::ServerContext* ctx, const wire::LimitedRequest* r, wire::DrainReply* reply) {
  const int ms = static_cast<int>(std::min<std::uint32_t>(r->limit_ms(), kDrainMaxMs));
  Shared<wire::DrainReply> out{*reply};
  return step(*ctx, r->id(), FaultStep::kPartnerDrain, [&](Job& job) {
    reply->set_tracked(job.tracked);
    return each(job, [&](Process& p, ProcessSession& session) -> Status {
      if (auto s = drain_process(session, job.id, p.refs, p.counted(), ms, r->tell(), out); !s) return s;
      if (job.tracked) add_writes(session, job.id, p.counted(), out);
      return {};
    });
  });
}

grpc::Status PartnerHost::Cut(grpc::ServerContext* ctx, const wire::CutRequest* r, wire::CutReply* reply) {
  Shared<wire::CutReply> out{*reply};
  return step(*ctx, r->id(), r->check() ? FaultStep::kPartnerDrain : FaultStep::kPartnerCut, [&](Job& job) {
    return each(job, [&](Process& p, ProcessSession& session) { return cut_process(session, p.counted(), *r, out); });
  });
}

grpc::Status PartnerHost::Settle(grpc::ServerContext* ctx, const wire::SettleRequest* r, wire::SettleReply* reply) {
  Shared<wire::SettleReply> out{*reply};
  return step(*ctx, r->id(), FaultStep::kPartnerSettle, [&](Job& job) {
    return each(job, [&](Process& p, ProcessSession& session) { return settle_process(session, p.counted(), *r, out); });
  });
}

grpc::Status PartnerHost::Switch(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  return step(*ctx, m->id(), FaultStep::kPartnerSwitch, [&](Job& job) -> Status {
    job.switched = true;  // from here on only the outcome tells which way to go
    for (const auto& p : job.processes) *(*job.record.mutable_owners())[p.pid].mutable_instance() = {p.owners.begin(), p.owners.end()};
    if (auto s = save(job); !s) return job.switched = false, s;
    return each(job, [&](Process& p, ProcessSession& session) -> Status {
      return session.ask<migr_qp_ref, migr_qp_ref>(MIGR_MSG_SWITCH, job.id, p.refs, process_ms(p.refs.size()));
    });
  });
}

// Caller holds job.work.
Status PartnerHost::keys(Job& job, const std::vector<wire::ProcessKeys>& keys) {
  const auto s = each_left(job, [&](Process& p, ProcessSession& session) { return tell_keys(session, job.id, keys, p.owners); });
  if (s) job.has_keys = true;
  return s;
}

// Caller holds job.work.
Status PartnerHost::resume(Job& job, wire::ResumeReply& out) {
  if (!job.switched || !job.has_keys) return Error{EBUSY, "RESUME before SWITCH and KEYS"};
  std::mutex guards_out;
  const auto s = each_left(job, [&](Process& p, ProcessSession& session) -> Status {
    auto stats = session.ask<migr_resume_stat, migr_qp_ref>(MIGR_MSG_RESUME, job.id, p.refs, process_ms(p.refs.size()));
    if (!stats) return stats.error();
    std::lock_guard lock(guards_out);
    add_stats(out, *stats);
    return {};
  });
  if (!s) return s;
  job.outcome = wire::COMMITTED;
  // With many QPs that takes a while. Its processes are given to other migrations when it is written down: a migrd that
  // ends before goes on with this one.
  job.afterwards.run([this, &job] {
    std::lock_guard work(job.work);
    if (auto w = save(job); !w) spdlog::error("{}", w.error().text);
    end(job, wire::COMMITTED);
  });
  return {};
}

grpc::Status PartnerHost::Keys(grpc::ServerContext* ctx, const wire::KeysRequest* r, wire::KeysReply* out) {
  const auto known = step(*ctx, r->id(), FaultStep::kPartnerKeys, [&](Job& job) { return keys(job, {r->keys().begin(), r->keys().end()}); });
  if (!known.ok() || !r->resume()) return known;
  return step(*ctx, r->id(), FaultStep::kPartnerResume, [&](Job& job) { return resume(job, *out->mutable_resumed()); });
}

grpc::Status PartnerHost::Resume(grpc::ServerContext* ctx, const wire::Migration* m, wire::ResumeReply* out) {
  return step(*ctx, m->id(), FaultStep::kPartnerResume, [&](Job& job) { return resume(job, *out); });
}

// Caller holds job.work. The source waits for it before it sends: nobody here who is not connected just now is waited for.
Status PartnerHost::old_path(Job& job) {
  if (job.get() != wire::OPEN) return {};
  const auto s = parallel_for(job.processes, [&](Process& p) -> Status {
    if (!p.lives()) return {};
    auto session = sessions_.wait_for(p.instance, [&](const ProcessSession& x) { return x.pid() == p.pid; }, 0);
    return session ? (*session)->tell(MIGR_MSG_OLD_PATH, job.id, kProcessMs) : session.error();
  });
  if (!s) return s;
  job.switched = false;  // nothing is left to be asked for: if the source falls silent now it goes back
  return save(job);
}

grpc::Status PartnerHost::OldPath(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  return step_back(*ctx, m->id(), FaultStep::kPartnerOldPath, [&](Job& job) { return old_path(job); });
}

// Caller holds job.work. A process that has ended has nothing to go back to.
Status PartnerHost::rollback(Job& job) {
  if (job.get() != wire::OPEN) return {};
  const auto s = parallel_for(job.processes, [&](Process& p) -> Status {
    if (!p.lives()) return {};
    auto session = session_of(p);
    const Status told = session ? (*session)->tell(MIGR_MSG_ROLLBACK, job.id, process_ms(p.refs.size())) : session.error();
    return told || !p.lives() ? Status() : told;
  });
  if (!s) return s;
  end(job, wire::UNDONE);
  return save(job);
}

grpc::Status PartnerHost::Rollback(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  return step_back(*ctx, m->id(), FaultStep::kPartnerRollback, [&](Job& job) { return rollback(job); });
}

grpc::Status PartnerHost::Moves(grpc::ServerContext* ctx, const wire::MovesRequest* r, wire::Empty*) {
  const LogScope log(log_fields_of(*ctx, config_, r->id()));
  return to_grpc(fault_step(config_.fault, FaultStep::kPartnerMoves, [&] { return take_moves(directory_, sessions_, *r); }));
}

grpc::Status PartnerHost::Where(grpc::ServerContext*, const wire::WhereRequest* r, wire::WhereReply* out) { return to_grpc(whereabouts_.where(*r, *out)); }

grpc::Status PartnerHost::Introduce(grpc::ServerContext*, const wire::IntroduceRequest* r, wire::Empty*) { return to_grpc(whereabouts_.introduce(*r)); }

Status PartnerHost::renew(std::uint32_t id, const Caller& who) { return jobs_.renew(id, who); }

// The coordinator fell silent: before SWITCH this host goes back on its own, the source will notice; after it only the
// destination knows the way, and the source whether there is one.
void PartnerHost::left_alone(const JobPtr& job) {
  const std::string destination = job->record.request().destination();
  wire::Migration m;
  m.set_id(job->id);
  auto ask = [&](const std::string& host) -> std::optional<wire::OutcomeReply> {
    auto channel = peers_.channel(host);
    if (!channel) return {};
    wire::Host::Stub stub(*channel);
    auto o = call(stub, &wire::Host::Stub::GetOutcome, m, kCheckMs, host);
    {
      std::lock_guard lock(job->state);
      job->refused.erase(host);
      if (!o && o.error().code == EPERM) job->refused[host] = o.error().text;
    }
    return o ? std::optional(*o) : std::nullopt;
  };
  auto take_back = [&] {
    job->aborting = true;
    if (auto s = rollback(*job); !s) spdlog::error("{}", s.error().text);
  };
  auto back = [&] {
    job->aborting = true;
    std::lock_guard work(job->work);
    take_back();
  };
  for (LeasedJob::Pace pace; job->get() == wire::OPEN && !jobs_.ends(); pace.wait(*job, jobs_.ends())) {
    if (job->ordered == wire::UNDONE || job->aborting) {
      back();
      continue;
    }
    if (!job->switched) {
      if (job->renewed() && !job->reloaded) return;
      std::lock_guard work(job->work);
      if (!job->switched) take_back();  // else a SWITCH that had begun was faster: the source may have committed
      continue;
    }
    if (job->renewed()) return;
    const auto d = ask(destination);
    if (d && d->outcome() == wire::COMMITTED && (d->keys_known() || d->keys_size())) {
      std::lock_guard work(job->work);
      if (job->get() != wire::OPEN) continue;  // it was told to go back meanwhile
      wire::ResumeReply ignored;
      Status s = keys(*job, {d->keys().begin(), d->keys().end()});
      if (s) s = resume(*job, ignored);
      if (!s) spdlog::error("{}", s.error().text);
      continue;
    }
    if (d && d->outcome() == wire::UNDONE) {
      back();
      continue;
    }
    // A destination that never heard of it cannot have been told to run it; one that is silent may.
    if (d && d->outcome() != wire::UNKNOWN) continue;
    const auto s = ask(job->source);
    if (s && (s->outcome() == wire::UNDONE || (d && s->outcome() == wire::UNKNOWN))) back();
  }
}

void PartnerHost::tick() {
  jobs_.tick([this](const JobPtr& job) { left_alone(job); }, [this](const JobPtr& job) { (void)save(*job); }, [this](const JobPtr& job) { journal_.remove(job->id); });
  for (const auto& job : jobs_.all()) {
    if (const std::unique_lock work(job->work, std::try_to_lock); work) job->afterwards.again();
    if (job->finished) job->afterwards.end();  // it is kept for a week
  }
}

std::vector<wire::OpenMigration> PartnerHost::open_migrations() {
  std::vector<wire::OpenMigration> out;
  for (const auto& j : jobs_.all()) {
    if (j->finished) continue;
    wire::OpenMigration o;
    o.set_id(j->id);
    o.set_role("partner");
    o.set_source(j->source);
    o.set_destination(j->record.request().destination());
    o.set_begun_s(j->begun_s);
    o.set_outcome(j->outcome);
    if (j->renewed())
      o.set_state(j->source + " coordinates it");
    else if (j->switched) {
      std::string state = "suspended; asks " + o.destination() + " and " + j->source + " what became of it";
      std::lock_guard lock(j->state);
      for (const auto& [host, why] : j->refused) state += "; refused: " + why;
      o.set_state(state);
    } else
      o.set_state("goes back");
    for (const pid_t pid : j->pids) o.add_processes(pid);
    out.push_back(o);
  }
  return out;
}

Status PartnerHost::order(std::uint32_t id, wire::Outcome outcome, bool force) {
  auto job = jobs_.find(id);
  if (!job || (*job)->finished) return Error{ENOENT, "no open migration of that number here"};
  if ((*job)->renewed()) return Error{EBUSY, (*job)->source + " coordinates it and goes on; wait for it"};
  if (outcome == wire::COMMITTED)
    return Error{EOPNOTSUPP, "a partner cannot go forward without the keys that only " + (*job)->record.request().destination() +
                                 " has; start migrd there: this host asks it all the time"};
  if ((*job)->switched && !force)
    return Error{EBUSY, "it is not known whether the container runs on " + (*job)->record.request().destination() +
                            "; if it does, going back breaks its connections to here. If it does not: --rollback --force"};
  (*job)->ordered = outcome;
  return {};
}

}  // namespace migr
