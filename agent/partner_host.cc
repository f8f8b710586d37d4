// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "partner_host.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "fault.h"
#include "kernel_record.h"
#include "limits.h"
#include "parallel.h"
#include "resume_stats.h"

namespace migr {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// One process and those of its QPs that are affected.
struct PartnerHost::Process {
  Instance instance{};
  std::shared_ptr<ProcessSession> session;  // until the job is over: it holds a socket, and the job is kept for a while
  std::vector<migr_qp_ref> refs;
  std::vector<std::uint32_t> index;   // of each ref, as the coordinator counts
  std::vector<std::string> gid;       // of each ref: it sends from
};

struct PartnerHost::Job {
  std::uint32_t id = 0;
  std::string source, destination;
  std::mutex work;                    // one call at a time
  std::vector<Process> processes;     // fixed after Prepare, but for their sessions
  bool switched = false, has_keys = false;

  std::mutex state;                   // guards what follows
  bool over = false;
  Clock::time_point lease = Clock::now();
  bool alone = false;
  bool is_over() { return std::lock_guard(state), over; }
  Claims* claims = nullptr;
  // Caller holds work.
  void end() {
    for (auto& p : processes) p.session.reset();
    claims->release(id);
    std::lock_guard lock(state);
    over = true;
  }
};

Result<PartnerHost::JobPtr> PartnerHost::find(std::uint32_t id) {
  std::lock_guard lock(mutex_);
  const auto j = jobs_.find(id);
  if (j == jobs_.end()) return Error{ENOENT, "no migration " + fmt::format("{:08x}", id) + " here"};
  return j->second;
}

Result<PartnerHost::JobPtr> PartnerHost::find_open(std::uint32_t id) {
  auto j = find(id);
  if (j && (*j)->is_over()) return Error{ECANCELED, config_.name + " has undone the migration: the coordinator was silent for too long"};
  return j;
}

// Caller holds job.work.
Status PartnerHost::each(Job& job, const std::function<Status(Process&)>& f) {
  if (job.is_over()) return Error{ECANCELED, config_.name + " has ended the migration already"};
  return parallel_for(job.processes, f);
}

grpc::Status PartnerHost::Find(grpc::ServerContext*, const wire::FindRequest* r, wire::FindReply* out) {
  auto find = [&]() -> Status {
    auto kernel = KernelRecord::open();
    // Without the module nobody here is a partner that could follow.
    if (!kernel) return kernel.error().code == ENOENT ? Status() : Status(kernel.error());
    auto ctxs = kernel->contexts();
    std::multimap<std::uint32_t, int> by_qpn;
    for (int i = 0; i < r->ends_size(); i++) by_qpn.emplace(r->ends(i).pqpn(), i);
    if (!ctxs) return ctxs.error();
    for (auto& c : *ctxs) {
      if (auto s = kernel->objects(c); !s) {
        if (s.error().code == ENOENT) continue;  // it ended meanwhile
        return s;
      }
      for (const auto& q : c.qps) {
        if (q.flags & MIGR_QP_FORMER) continue;
        const std::string gid(reinterpret_cast<const char*>(q.ah.sgid), sizeof q.ah.sgid);
        for (auto [at, last] = by_qpn.equal_range(q.pqpn); at != last; at++) {
          const int i = at->second;
          if (r->ends(i).gid() != gid) continue;
          const auto pid = static_cast<pid_t>(c.rec.pid);
          const std::string who = "process " + std::to_string(pid) + " (" + std::string(c.rec.comm, strnlen(c.rec.comm, sizeof c.rec.comm)) + ") on " + config_.name;
          auto session = sessions_.by_pid(pid);
          const auto holder = claims_.holder(pid);
          if (holder || (session && session->state() != MIGR_PROC_RUNNING)) {
            auto* b = out->add_busy();
            b->set_who(who);
            b->set_migration(holder);
            return {};
          }
          if (!(c.rec.flags & MIGR_CTX_ATTACHED))
            return Error{EBUSY, "the partner, " + who + ", does not use libmigr, so its end of the connection cannot follow; "
                                "start it anew with LD_PRELOAD=libmigr.so, or let it end the connection first"};
          if (!session)
            return Error{EBUSY, "the libmigr of the partner, " + who + ", is not connected to migrd there; can it see " + config_.run_dir + "?"};
          auto* p = out->add_qps();
          p->set_index(static_cast<std::uint32_t>(i));
          p->set_instance(session->instance().data(), session->instance().size());
          p->set_pid(session->pid());
          p->set_comm(c.rec.comm, strnlen(c.rec.comm, sizeof c.rec.comm));
          p->set_ctx_id(c.rec.ctx_id);
          p->set_vqpn(q.vqpn);
          p->set_pqpn(q.pqpn);
          p->set_gid(gid);
          p->set_dest_pqpn(q.dest_qpn);
        }
      }
    }
    return {};
  };
  return to_grpc(fault_step(config_.fault, FaultStep::kPartnerFind, find));
}

grpc::Status PartnerHost::Prepare(grpc::ServerContext*, const wire::PartnerPrepareRequest* r, wire::PartnerPrepareReply* out) {
  auto job = std::make_shared<Job>();
  job->id = r->id();
  job->source = r->source();
  job->destination = r->destination();
  if (auto s = fault(config_.fault, FaultStep::kPartnerPrepare, FaultAt::kBegin); !s) return to_grpc(s);
  job->claims = &claims_;
  std::vector<Claims::Process> wanted;
  for (const auto& q : r->qps()) {
    auto session = sessions_.by_pid(q.pid());
    if (!session || q.instance() != std::string(session->instance().begin(), session->instance().end()))
      return {grpc::StatusCode::NOT_FOUND, "process " + std::to_string(q.pid()) + " (" + q.comm() + ") is not connected to its migrd any more"};
    if (session->state() != MIGR_PROC_RUNNING) {
      out->mutable_busy()->set_who(session->label() + " on " + config_.name);
      return grpc::Status::OK;
    }
    wanted.push_back({session->instance(), session->pid()});
    auto p = std::find_if(job->processes.begin(), job->processes.end(), [&](const Process& x) { return x.session == session; });
    if (p == job->processes.end()) {
      job->processes.push_back({session->instance(), session, {}, {}, {}});
      p = job->processes.end() - 1;
    }
    p->refs.push_back({q.ctx_id(), q.vqpn(), q.pqpn(), 0});
    p->index.push_back(q.index());
    p->gid.push_back(q.gid());
  }
  std::lock_guard work(job->work);
  {
    std::lock_guard lock(mutex_);
    if (!r->id() || jobs_.contains(job->id)) return {grpc::StatusCode::ALREADY_EXISTS, "a migration of that number is here"};
    if (const auto holder = claims_.take(wanted, job->id)) {
      out->mutable_busy()->set_who("a partner on " + config_.name);
      out->mutable_busy()->set_migration(holder);
      return grpc::Status::OK;
    }
    jobs_.emplace(job->id, job);
  }
  if (r->later()) return grpc::Status::OK;
  const Status s = create(*job, *out);
  return to_grpc(s ? fault(config_.fault, FaultStep::kPartnerPrepare, FaultAt::kEnd) : s);
}

// Caller holds job.work.
Status PartnerHost::create(Job& job, wire::PartnerPrepareReply& out) {
  std::mutex guards_out;
  return each(job, [&](Process& p) -> Status {
    auto spares = p.session->ask<migr_qp_spare, migr_qp_ref>(MIGR_MSG_QP_CREATE, job.id, p.refs,
                                                             kProcessMs + kPerQpMs * static_cast<int>(p.refs.size()));
    if (!spares) return spares.error();
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> at;
    for (std::size_t n = 0; n < p.refs.size(); n++) at[{p.refs[n].ctx_id, p.refs[n].vqpn}] = n;
    std::lock_guard lock(guards_out);
    for (const auto& x : *spares) {
      const auto ref = at.find({x.ctx_id, x.vqpn});
      if (ref == at.end()) return Error{EPROTO, p.session->label() + ": a spare for a QP that was not asked for"};
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
grpc::Status PartnerHost::step(std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work) {
  auto job = find_open(id);
  if (!job) return to_grpc(job);
  std::lock_guard lock((*job)->work);
  return to_grpc(fault_step(config_.fault, step, [&]() -> Status {
    if (auto s = find_open(id); !s) return s;  // it was taken back meanwhile
    return work(**job);
  }));
}

grpc::Status PartnerHost::Create(grpc::ServerContext*, const wire::Migration* m, wire::PartnerPrepareReply* out) {
  auto job = find_open(m->id());
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  const Status s = create(**job, *out);
  return to_grpc(s ? fault(config_.fault, FaultStep::kPartnerPrepare, FaultAt::kEnd) : s);
}

grpc::Status PartnerHost::Connect(grpc::ServerContext*, const wire::ConnectRequest* r, wire::Empty*) {
  return step(r->id(), FaultStep::kPartnerConnect, [&](Job& job) {
    return each(job, [&](Process& p) -> Status {
      std::vector<migr_qp_connect> to;
      std::map<std::uint32_t, const wire::Connection*> by_index;
      for (const auto& c : r->connections()) by_index[c.index()] = &c;
      for (std::size_t n = 0; n < p.refs.size(); n++) {
        const wire::Connection* c = by_index[p.index[n]];
        if (!c || c->dest_gid().size() != 16) return Error{EINVAL, "Connect leaves out QP " + std::to_string(p.refs[n].vqpn)};
        if (c->peer().size() != 16) return Error{EINVAL, "Connect does not say whose the other end of QP " + std::to_string(p.refs[n].vqpn) + " is"};
        migr_qp_connect x{p.refs[n].ctx_id, p.refs[n].vqpn, c->dest_pqpn(), c->dest_psn(), {}, {}};
        std::copy(c->dest_gid().begin(), c->dest_gid().end(), reinterpret_cast<char*>(x.dgid));
        std::copy(c->peer().begin(), c->peer().end(), reinterpret_cast<char*>(x.peer));
        to.push_back(x);
      }
      return p.session->ask<migr_qp_ref, migr_qp_connect>(MIGR_MSG_QP_CONNECT, job.id, to, kProcessMs + kPerQpMs * static_cast<int>(to.size()));
    });
  });
}

grpc::Status PartnerHost::Suspend(grpc::ServerContext*, const wire::LimitedRequest* r, wire::Empty*) {
  return step(r->id(), FaultStep::kPartnerSuspend, [&](Job& job) {
    return each(job, [&](Process& p) -> Status {
      if (auto s = p.session->ask<migr_qp_ref, migr_qp_ref>(MIGR_MSG_SUSPEND, job.id, p.refs, kProcessMs); !s) return s.error();
      return p.session->wait_threads_outside(static_cast<int>(std::min<std::uint32_t>(r->limit_ms(), static_cast<std::uint32_t>(kSuspendMs))));
    });
  });
}

grpc::Status PartnerHost::Drain(grpc::ServerContext*, const wire::LimitedRequest* r, wire::Empty*) {
  const int ms = static_cast<int>(std::min<std::uint32_t>(r->limit_ms(), static_cast<std::uint32_t>(kDrainMs)));
  return step(r->id(), FaultStep::kPartnerDrain, [&](Job& job) {
    return each(job, [&](Process& p) -> Status {
      return p.session->ask<migr_drain_stat, migr_qp_ref>(MIGR_MSG_DRAIN, job.id, p.refs, ms + 2000, static_cast<std::uint64_t>(ms));
    });
  });
}

grpc::Status PartnerHost::Switch(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  return step(m->id(), FaultStep::kPartnerSwitch, [&](Job& job) {
    job.switched = true;  // from here on only the outcome tells which way to go
    return each(job, [&](Process& p) -> Status {
      return p.session->ask<migr_qp_ref, migr_qp_ref>(MIGR_MSG_SWITCH, job.id, p.refs, kProcessMs);
    });
  });
}

// Caller holds job.work.
Status PartnerHost::keys(Job& job, const std::vector<wire::ProcessKeys>& keys) {
  const auto s = each(job, [&](Process& p) -> Status { return tell_keys(*p.session, job.id, keys); });
  if (s) job.has_keys = true;
  return s;
}

grpc::Status PartnerHost::Keys(grpc::ServerContext*, const wire::KeysRequest* r, wire::Empty*) {
  return step(r->id(), FaultStep::kPartnerKeys, [&](Job& job) { return keys(job, {r->keys().begin(), r->keys().end()}); });
}

// Caller holds job.work.
Status PartnerHost::resume(Job& job, wire::ResumeReply& out) {
  if (!job.switched || !job.has_keys) return Error{EBUSY, "RESUME before SWITCH and KEYS"};
  std::mutex guards_out;
  auto s = each(job, [&](Process& p) -> Status {
    auto stats = p.session->ask<migr_resume_stat, migr_qp_ref>(MIGR_MSG_RESUME, job.id, p.refs, kProcessMs);
    if (!stats) return stats.error();
    std::lock_guard lock(guards_out);
    add_stats(out, *stats);
    return {};
  });
  if (s) job.end();
  return s;
}

grpc::Status PartnerHost::Resume(grpc::ServerContext*, const wire::Migration* m, wire::ResumeReply* out) {
  return step(m->id(), FaultStep::kPartnerResume, [&](Job& job) { return resume(job, *out); });
}

// Caller holds job.work.
Status PartnerHost::rollback(Job& job) {
  if (job.is_over()) return {};
  Status first;
  for (auto& p : job.processes) {
    // It may have connected anew meanwhile.
    if (auto now = sessions_.by_pid(p.session->pid()); now && now->instance() == p.instance) p.session = now;
    if (auto s = p.session->tell(MIGR_MSG_ROLLBACK, job.id, kProcessMs); first && !s) first = s;
  }
  job.end();
  return first;
}

grpc::Status PartnerHost::Rollback(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  auto job = find(m->id());
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  return to_grpc(fault_step(config_.fault, FaultStep::kPartnerRollback, [&] { return rollback(**job); }));
}

Status PartnerHost::renew(std::uint32_t id) {
  auto job = find(id);
  if (!job) return job.error();
  std::lock_guard lock((*job)->state);
  if ((*job)->over) return Error{ENOENT, "over here"};
  (*job)->lease = Clock::now();
  return {};
}

// The coordinator fell silent: before SWITCH this host goes back on its own, the
// source will notice; after it, the destination knows, else the source.
void PartnerHost::left_alone(const JobPtr& job) {
  spdlog::warn("migration {:08x}: {} fell silent", job->id, job->source);
  const auto until = Clock::now() + std::chrono::milliseconds(kResolveMs);
  wire::Migration m;
  m.set_id(job->id);
  auto renewed = [&] {
    std::lock_guard lock(job->state);
    return Clock::now() - job->lease < std::chrono::milliseconds(kLeaseMs);
  };
  auto ask = [&](const std::string& host) -> wire::OutcomeReply {
    auto channel = peers_.channel(host);
    if (!channel) return {};
    wire::Host::Stub stub(*channel);
    auto o = call(stub, &wire::Host::Stub::GetOutcome, m, kCheckMs, host);
    return o ? *o : wire::OutcomeReply();
  };
  while (job->switched && !job->is_over() && !renewed() && Clock::now() < until) {
    const auto d = ask(job->destination);
    if (d.outcome() == wire::UNDONE) break;
    if (d.outcome() == wire::COMMITTED && d.keys_size()) {
      std::lock_guard work(job->work);
      wire::ResumeReply ignored;
      Status s = keys(*job, {d.keys().begin(), d.keys().end()});
      if (s) s = resume(*job, ignored);
      if (!s) spdlog::error("migration {:08x}: {}", job->id, s.error().text);
      return;
    }
    if (d.outcome() == wire::UNKNOWN && ask(job->source).outcome() == wire::UNDONE) break;
    usleep(kResolveStepMs * 1000);
  }
  if (renewed()) return;
  std::lock_guard work(job->work);
  if (auto s = rollback(*job); !s) spdlog::error("migration {:08x}: {}", job->id, s.error().text);
}

void PartnerHost::tick() {
  constexpr auto kKeep = std::chrono::minutes(10);
  std::lock_guard lock(mutex_);
  for (auto j = jobs_.begin(); j != jobs_.end();) {
    const JobPtr job = j->second;
    std::lock_guard state(job->state);
    const auto silent = Clock::now() - job->lease;
    if (job->over && silent > kKeep) {
      j = jobs_.erase(j);
      continue;
    }
    j++;
    if (job->over || job->alone || silent < std::chrono::milliseconds(kLeaseMs)) continue;
    job->alone = true;
    std::thread([this, job] {
      left_alone(job);
      std::lock_guard again(job->state);
      job->alone = false;
    }).detach();
  }
}

}  // namespace migr
