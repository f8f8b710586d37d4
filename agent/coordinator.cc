// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "coordinator.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <set>
#include <system_error>

#include "clock.h"
#include "failover/link_records.h"
#include "fault.h"
#include "file_tree.h"
#include "limits.h"
#include "log.h"
#include "parallel.h"
#include "peer_link.h"
#include "replay.h"
#include "room.h"
#include "uapi/migr.h"

namespace migr {
namespace {

constexpr char kNotCopiedAhead[] = "memory is copied during the stop only: ", kCopiedOnce[] = "memory is copied once ahead of the stop: ";
constexpr int kStopStepMs = 50;  // how often a thread looks whether the migration is over

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Where a QP leads from now on. @param end  wire::PreparedQp or wire::Spare; @param peer  the instance at that end; @param ctx_id  its context
/// there, if that moves; 0
template <class End>
void lead_to(wire::Connection& c, const End& end, std::string peer, std::uint32_t ctx_id) {
  c.set_dest_pqpn(end.pqpn());
  c.set_dest_psn(end.psn());
  c.set_dest_gid(end.gid());
  c.set_peer(std::move(peer));
  c.set_peer_ctx_id(ctx_id);
}

std::string shown_gid(const std::string& bytes) { return gid_text(bytes, "an unknown GID"); }

}  // namespace

void Coordinator::say(const wire::Progress& p) {
  std::lock_guard lock(say_mutex_);
  say_(p);
}

void Coordinator::note(const std::string& text) {
  spdlog::info("{}", text);
  wire::Progress p;
  p.set_note(text);
  say(p);
}

void Coordinator::sends(std::uint64_t bytes) {
  std::lock_guard lock(phase_mutex_);
  sending_ = {sent_.passed, bytes, now_ms()};
}

// Rarely if it takes long: who listens and does not read must not fill what is between us, for then we would wait.
void Coordinator::say_how_far() {
  wire::Progress p;
  {
    std::lock_guard lock(phase_mutex_);
    const double now = now_ms(), took = now - phase_began_, stopped = frozen_at_ > 0 && !runs_again_ ? now - frozen_at_ : 0;
    const std::uint64_t sent = sending_.of ? sent_.passed - sending_.before : 0;
    if (!phase_.empty()) set_.course->is_at(phase_, sent, sending_.of);
    if (phase_.empty() || now - std::max(said_at_, phase_began_) < std::max<double>(kProgressMs, took / kProgressSteps)) return;
    said_at_ = now;
    auto* going = p.mutable_going();
    going->set_phase(phase_);
    going->set_ms(took);
    going->set_stopped_ms(stopped);
    going->set_stop_over(runs_again_);
    if (sending_.of) {
      going->set_bytes(sent);
      going->set_of_bytes(sending_.of);
      if (now - sending_.since >= kProgressMs) going->set_bytes_per_s(static_cast<double>(going->bytes()) * 1000 / (now - sending_.since));
    }
  }
  say(p);
}

Status Coordinator::phase(FaultStep step, const std::function<Status()>& f) {
  const std::string name(kFaultSteps[static_cast<std::size_t>(step)]);
  return timed(name.substr(name.find('.') + 1), [&]() -> Status {
    if (auto s = goes_on(); !s) return s;
    try {
      return fault_step(set_.fault, step, f);
    } catch (const std::system_error& e) {
      if (e.code() != std::errc::resource_unavailable_try_again) return Error{e.code().value(), e.what()};
      return Error{ENOMEM, std::string("no thread for what is to be done: ") + e.what()};  // EAGAIN would be tried again at once
    }
  });
}

// Looked at wherever it can go back as after a failure: between steps, and in what may take long.
Status Coordinator::goes_on() const { return set_.course->goes_on(); }

// No step of this phase is waited for longer than kPhaseMs.
void Coordinator::watch(const std::string& phase) {
  std::lock_guard lock(phase_mutex_);
  phase_ = phase;
  if (!phase.empty()) set_.course->is_at(phase, 0, 0);
  phase_began_ = now_ms();
  phase_until_ = phase_began_ + kPhaseMs;
}

// The limit is of each part: how many there are depends on what has to be done.
void Coordinator::more_time() {
  std::lock_guard lock(phase_mutex_);
  phase_until_ = now_ms() + kPhaseMs;
}

Status Coordinator::timed(const std::string& name, const std::function<Status()>& f) {
  wire::Progress p;
  p.set_phase(name);
  say(p);
  const double start = now_ms();
  LogScope log;
  log->phase = "source." + name;
  watch(name);
  const Status s = f();
  watch({});
  const double ms = now_ms() - start;
  log->ms = ms;
  spdlog::info("{}", s ? "done" : "failed: " + s.error().text);
  auto* end = p.mutable_end();
  end->set_phase(name);
  end->set_ms(ms);
  end->set_start_ms(start - began_at_);
  say(p);
  *summary_.add_phases() = *end;
  return s;
}

void Coordinator::note_step(const std::string& name, double ms, double ago_ms) {
  std::lock_guard lock(steps_);
  auto* s = summary_.add_steps();
  s->set_phase(name);
  s->set_ms(ms);
  s->set_start_ms(now_ms() - ago_ms - ms - began_at_);
}

Status Coordinator::step(const std::string& name, const std::function<Status()>& f) {
  more_time();
  if (auto s = goes_on(); !s) return s;
  const double start = now_ms();
  const Status s = f();
  note_step(name, now_ms() - start);
  return s;
}

// Without RDMA the stop would consist of CRIU's work alone: the dump, its copy, the restore.
double Coordinator::rdma_ms() const {
  std::map<std::string, double> took;  // of equal steps, at the same time on several hosts, the longest
  for (const auto& p : summary_.phases()) took[p.phase()] = p.ms();
  for (const auto& s : summary_.steps()) took[s.phase()] = std::max(took[s.phase()], s.ms());
  double ms = took["suspend"] + took["drain"] + took["freeze.rdma"] + took["resume"];
  ms += std::max(0.0, took["ready.partner"] - took["ready.destination"]);
  if (!set_.pre_setup) ms += std::max(took["create.build"], took["create.partner"]) + took["connect"];
  return ms;
}

Status Coordinator::both(const std::function<Status()>& here, const std::function<Status(Affected&)>& there) {
  std::vector<std::function<Status()>> todo = {here};
  for (auto& a : affected_) todo.push_back([&] { return there(a); });
  return parallel(todo);
}

// Every host's answer, once no other end is just being connected, or has been for long enough. EINPROGRESS: another migration holds a
// partner. Of two that want each other's processes one waits here with what it holds, the other lets go: a circle of those who wait cannot
// close.
Result<std::vector<Result<wire::FindReply>>> Coordinator::ask_hosts() {
  wire::FindRequest request;
  for (const auto& q : info_.connected) {
    auto* e = request.add_ends();  // one that matches nothing, if both ends move
    if (twins_.contains(static_cast<std::size_t>(&q - info_.connected.data()))) continue;
    e->set_gid(q.dest_gid);
    e->set_pqpn(q.dest_pqpn);
    e->set_from_gid(q.gid);
    e->set_from_pqpn(q.pqpn);
  }
  std::vector<Result<wire::FindReply>> replies(hosts_.size(), Error{});
  const double until = now_ms() + set_.busy_wait_ms, formed_until = now_ms() + set_.forming_ms;
  for (bool told = false;; told = true) {
    std::vector<std::function<Status()>> todo;
    for (std::size_t h = 0; h < hosts_.size(); h++)
      todo.push_back([&, h] { return Status(replies[h] = hosts_[h]->find(request)); });
    (void)parallel(todo);  // a host that has none of them may be down
    std::string who;
    bool yield = now_ms() > until;
    for (const auto& r : replies)
      for (int i = 0; r && i < r->busy_size(); i++) {
        if (r->busy(i).migration() == id_) continue;  // ours, at a number that it says is its partner's
        who = r->busy(i).who();
        yield = yield || r->busy(i).migration() < id_;
      }
    const bool forms = std::any_of(replies.begin(), replies.end(), [](const auto& r) { return r && r->forming_size(); });
    if (who.empty() && (!forms || now_ms() > formed_until)) return replies;
    const std::string text = "the partner, " + who + ", takes part in another migration";
    if (!who.empty() && yield) return Error{EINPROGRESS, text + "; try again when that is over"};
    if (!told) note(who.empty() ? "the other end of a connection is not connected: waiting a moment, as it may be just about to" : text + ": waiting for its end");
    usleep(kBusyStepMs * 1000);
    if (auto s = goes_on(); !s) return s.error();
  }
}

// What the container is to itself: both ends move, nobody else is asked.
void Coordinator::find_twins() {
  std::map<std::pair<std::string, std::uint32_t>, std::size_t> at;
  for (std::size_t i = 0; i < info_.connected.size(); i++) at[{info_.connected[i].gid, info_.connected[i].pqpn}] = i;
  for (std::size_t i = 0; i < info_.connected.size(); i++) {
    const SourceQp& q = info_.connected[i];
    const auto to = at.find({q.dest_gid, q.dest_pqpn});
    if (to == at.end()) continue;
    const SourceQp& other = info_.connected[to->second];
    if (other.dest_gid == q.gid && other.dest_pqpn == q.pqpn) twins_[i] = to->second;
  }
}

// A connection that ends with this migration.
void Coordinator::note_gone(std::size_t i) {
  auto* g = summary_.add_connections_gone();
  g->set_vqpn(info_.connected[i].vqpn);
  g->set_to_gid(info_.connected[i].dest_gid);
  g->set_to_qpn(info_.connected[i].dest_pqpn);
  summary_.set_gone(static_cast<std::uint32_t>(summary_.connections_gone_size()));
}

Status Coordinator::find_partners() {
  find_twins();
  if (twins_.size() == info_.connected.size()) return {};
  if (set_.what != Settings::kMove) {
    for (std::size_t i = 0; i < info_.connected.size(); i++)
      if (!twins_.contains(i)) note_gone(i);
    return {};
  }
  auto asked = ask_hosts();
  if (!asked) return asked.error();
  const auto& replies = *asked;
  std::vector<int> found(info_.connected.size());
  std::set<std::size_t> dead;
  std::map<std::size_t, std::string> forming;  // its host
  std::string silent, refused;
  int code = ENOENT;
  for (std::size_t h = 0; h < hosts_.size(); h++) {
    if (!replies[h]) {
      // A host that cannot follow, or lets us switch nothing, may have nothing of ours either.
      const Error& e = replies[h].error();
      const bool tells = !unreachable(e) && e.code != EPERM;
      if (tells && refused.empty()) code = e.code;
      auto& list = tells ? refused : silent;
      list += (list.empty() ? "" : ", ") + (unreachable(e) ? hosts_[h]->name() : e.text);
      continue;
    }
    dead.insert(replies[h]->dead().begin(), replies[h]->dead().end());
    for (const auto i : replies[h]->forming()) forming[i] = hosts_[h]->name();
    Affected a{hosts_[h], {}};
    for (const auto& q : replies[h]->qps()) {
      if (q.index() >= found.size()) return Error{EPROTO, hosts_[h]->name() + ": answer with a wrong index"};
      const auto& mine = info_.connected[q.index()];
      // Its own record has to say the same, or it is a QP that only has the same number.
      if (q.dest_pqpn() != mine.pqpn) continue;
      if (found[q.index()]++) return Error{EEXIST, "two hosts hold the partner of QP " + std::to_string(mine.vqpn)};
      a.qps.push_back(q);
    }
    if (a.qps.empty()) continue;
    summary_.add_partners(hosts_[h]->name());
    affected_.push_back(std::move(a));
  }
  // Its process has ended, has destroyed its QP or has taken it elsewhere: nothing tells an end that does not send. It would keep this host for ever.
  for (std::size_t i = 0; i < found.size(); i++)
    if (!found[i] && !twins_.contains(i) && refused.empty() && dead.contains(i)) {
      gone_.insert(i);
      note_gone(i);
    }
  for (std::size_t i = 0; i < found.size(); i++)
    if (!found[i] && !gone_.contains(i) && forming.contains(i))
      return Error{ENOENT, "QP " + std::to_string(info_.connected[i].vqpn) + " is connected, and its other end, QP " + std::to_string(info_.connected[i].dest_pqpn) + " on " + forming[i] +
                               ", is not yet, for " + std::to_string(set_.forming_ms / 1000) + " s: the program there has to connect it first"};
  for (std::size_t i = 0; i < found.size(); i++)
    if (!found[i] && !twins_.contains(i) && !gone_.contains(i))
      return Error{code, (refused.empty() ? "no host" : refused + "; no other host") + " knows the partner of QP " + std::to_string(info_.connected[i].vqpn) +
                             (!silent.empty()   ? "; these hosts do not tell: " + silent
                              : refused.empty() ? "; is migrd running where the partner is, and is it among the peers?"
                                                : "")};
  return {};
}

Status Coordinator::check(const std::string& container, const std::string& to) {
  if (auto s = inspect(container); !s) return s;
  if (auto s = check_destination(to); !s) return s;
  return find_partners();
}

Status Coordinator::inspect(const std::string& container) {
  auto info = source_.inspect(container);
  if (!info) return info.error();
  info_ = *info;
  if (set_.what == Settings::kKeep && !info_.datagrams.empty())
    return Error{EOPNOTSUPP, "'" + info_.id + "' has QPs of type UD: whoever sends to them could not be told where they are when it is restored; it can be migrated, not stored"};
  summary_.set_container(info_.id);
  *summary_.mutable_resources() = info_.resources;
  return {};
}

Status Coordinator::check_destination(const std::string& to) {
  wire::CheckRequest r;
  r.set_wire(kWireVersion);
  r.set_abi(set_.abi);
  r.set_proc(MIGR_PROC_VERSION);
  r.set_container(info_.id);
  for (const auto pid : info_.pids) r.add_pids(pid);
  r.set_bundle(info_.bundle);
  for (const auto& d : info_.devices) r.add_devices(d);
  for (const auto& n : info_.needs) *r.add_needs() = n;
  for (const auto& i : info_.instructions) r.add_instructions(i);
  r.set_libmigr(info_.libmigr);
  r.set_memory_bytes(info_.filled_bytes);
  for (const auto& [page, bytes] : info_.huge.needed) {
    auto* h = r.add_huge();
    h->set_page_bytes(page);
    h->set_bytes(bytes);
  }
  // What is copied ahead may all have changed at the stop: then it is there once more. Rounds that are made as long as each
  // halves what is left have twice the memory at most.
  const unsigned wanted = set_.pre_copy_rounds ? set_.pre_copy_rounds : 2;
  unsigned ahead = info_.memory_bytes >= set_.pre_copy_from ? wanted : 0;
  if (ahead && !info_.written_unseen.empty()) {
    if (auto s = not_copied_ahead(Error{EOPNOTSUPP, info_.written_unseen}); !s) return s;
    ahead = 0;
  }
  rounds_ahead_ = set_.pre_copy_rounds || !ahead ? ahead : kPreCopyRounds;
  r.set_image_bytes(info_.image_bytes() * (ahead + 1));
  const unsigned least = set_.pre_copy_rounds ? set_.pre_copy_rounds : must_copy_ahead();
  auto s = dest_.check(r);
  while (!s && s.error().code == ENOSPC && ahead > least) {
    const std::string why = s.error().text;
    rounds_ahead_ = ahead = ahead > 1 ? 1 : 0;
    r.set_image_bytes(info_.image_bytes() * (ahead + 1));
    s = dest_.check(r);
    if (s) note((ahead ? kCopiedOnce : kNotCopiedAhead) + why);
  }
  if (!s && s.error().code == ENOSPC && ahead) return not_copied_ahead(s.error());
  if (!s && unreachable(s.error()))
    return Error{s.error().code, "destination " + to + " does not answer; is migrd running there? (" + s.error().text + ")"};
  return s;
}

wire::PlanReply Coordinator::plan(const std::string& container, const std::string& to, std::uint32_t id) {
  const LogScope log(id);
  begin(container, to, id);
  std::string why;
  auto ask = [&](const Status& s) {
    if (!s && why.empty()) summary_.set_error_code(static_cast<std::uint32_t>(s.error().code));
    if (!s) why += (why.empty() ? "" : "; ") + s.error().text;
    return bool(s);
  };
  if (ask(inspect(container))) {
    ask(check_destination(to));
    ask(find_partners());
  }
  summary_.set_error(why);
  wire::PlanReply out;
  out.set_processes(static_cast<std::uint32_t>(info_.instances.size()));
  out.set_connections(static_cast<std::uint32_t>(info_.connected.size()));
  out.set_memory_bytes(info_.image_bytes());
  out.set_pre_copy(rounds_ahead_ != 0);
  *out.mutable_summary() = summary_;
  return out;
}

Status Coordinator::prepare() {
  wire::PrepareHeader h;
  h.set_id(id_);
  h.set_container(info_.id);
  h.set_bundle(info_.bundle);
  if (info_.bundle_mode) *h.mutable_bundle_mode() = *info_.bundle_mode;
  h.set_source(set_.self);
  for (const auto& i : info_.instances) h.add_instances(bytes_of(i));
  for (const auto& hosts : info_.births) {
    auto* b = h.add_births();
    for (const auto& name : hosts) b->add_hosts(name);
  }
  for (const auto& [ctx, owner] : info_.ctxs) h.add_ctx_ids(ctx), h.add_ctx_owner(owner);
  for (auto v : info_.vqpns) h.add_vqpns(v);
  h.set_later(!set_.pre_setup);
  h.add_hosts(set_.self);
  for (const auto& a : affected_) h.add_hosts(a.link->name());
  spares_.assign(affected_.size(), {});
  push_abort();
  for (auto& a : affected_) undo_.push("partner " + a.link->name(), [this, &a] { return let_go(a); }, UndoStack::Where::kElsewhere);

  auto here = [&]() -> Status {
    auto r = dest_.prepare(h, early_, sent_);
    if (r) prepared_ = *r;
    if (r && set_.pre_setup) note_step("prepare.start", r->start_ms(), r->build_ms()), note_step("prepare.build", r->build_ms());
    return r;
  };
  auto there = [&](Affected& a) -> Status {
    wire::PartnerPrepareRequest r;
    r.set_later(!set_.pre_setup);
    r.set_id(id_);
    r.set_source(set_.self);
    r.set_destination(to_);
    for (const auto& q : a.qps) *r.add_qps() = q;
    auto reply = a.link->prepare(r);
    if (!reply) return reply.error();
    if (reply->has_busy()) return Error{EINPROGRESS, reply->busy().who() + " takes part in another migration; try again when that is over"};
    auto& spares = spares_[static_cast<std::size_t>(&a - affected_.data())];
    spares.assign(reply->spares().begin(), reply->spares().end());
    return {};
  };
  return both([&] { return step("prepare.destination", here); }, [&](Affected& a) { return step("prepare.partner", [&] { return there(a); }); });
}

// A folder goes back by nobody else.
void Coordinator::push_abort() {
  undo_.push("destination " + to_, [this] { return dest_.abort(id_); }, set_.what == Settings::kKeep ? UndoStack::Where::kHere : UndoStack::Where::kElsewhere);
}

// All at once, when the first is: one that is silent takes as long as its call may, and the others stand suspended.
Status Coordinator::let_go(const Affected& a) {
  if (let_go_.empty())
    for (const auto& x : affected_) let_go_.push_back(in_own_thread(with_log_fields([this, &x] { return x.link->rollback(id_); })));
  return let_go_[static_cast<std::size_t>(&a - affected_.data())].get();
}

// What prepare() has left out: the container is stopped already.
Status Coordinator::create() {
  auto here = [&]() -> Status {
    auto r = dest_.create(id_);
    if (!r) return r.error();
    prepared_ = *r;
    note_step("create.start", r->start_ms(), r->build_ms());
    note_step("create.build", r->build_ms());
    return {};
  };
  auto there = [&](Affected& a) -> Status {
    auto reply = a.link->create(id_);
    if (!reply) return reply.error();
    spares_[static_cast<std::size_t>(&a - affected_.data())].assign(reply->spares().begin(), reply->spares().end());
    return {};
  };
  return both([&] { return step("create.destination", here); }, [&](Affected& a) { return step("create.partner", [&] { return there(a); }); });
}

// The process of one of our QPs, as its partner has to know it.
std::string Coordinator::peer_of(const SourceQp& q) const {
  for (const auto& [ctx, owner] : info_.ctxs)
    if (ctx == q.ctx_id && owner < info_.instances.size()) return bytes_of(info_.instances[owner]);
  return {};
}

Status Coordinator::connect() {
  std::map<std::pair<std::uint32_t, std::uint32_t>, const wire::PreparedQp*> fresh;
  for (const auto& q : prepared_.qps()) fresh[{q.src_ctx_id(), q.vqpn()}] = &q;
  wire::ConnectRequest to_dest;
  to_dest.set_id(id_);
  for (const auto& [i, to] : twins_) {
    const SourceQp &mine = info_.connected[i], &other = info_.connected[to];
    const auto f = fresh.find({other.ctx_id, other.vqpn});
    if (f == fresh.end()) return Error{EPROTO, "the destination did not create QP " + std::to_string(other.vqpn)};
    auto* d = to_dest.add_connections();
    d->set_src_ctx_id(mine.ctx_id);
    d->set_vqpn(mine.vqpn);
    lead_to(*d, *f->second, peer_of(other), other.ctx_id);
  }
  for (std::size_t i = 0; i < info_.connected.size(); i++) {
    if (twins_.contains(i) || (set_.what != Settings::kGiveBack && !gone_.contains(i))) continue;
    auto* d = to_dest.add_connections();
    d->set_src_ctx_id(info_.connected[i].ctx_id);
    d->set_vqpn(info_.connected[i].vqpn);
  }
  std::vector<wire::ConnectRequest> to_partner(affected_.size());
  std::vector<std::map<std::pair<std::string, std::string>, Path>> paths(affected_.size());  // that the new connections take, each once
  for (std::size_t p = 0; p < affected_.size(); p++) {
    to_partner[p].set_id(id_);
    std::map<std::uint32_t, const wire::Spare*> by_index;
    for (const auto& s : spares_[p]) by_index[s.index()] = &s;
    for (const auto& q : affected_[p].qps) {
      const SourceQp& mine = info_.connected[q.index()];
      const auto f = fresh.find({mine.ctx_id, mine.vqpn});
      const auto s = by_index.find(q.index());
      if (f == fresh.end()) return Error{EPROTO, "the destination did not create QP " + std::to_string(mine.vqpn)};
      if (s == by_index.end()) return Error{EPROTO, affected_[p].link->name() + " made no spare for QP " + std::to_string(q.vqpn())};
      auto* d = to_dest.add_connections();
      d->set_src_ctx_id(mine.ctx_id);
      d->set_vqpn(mine.vqpn);
      lead_to(*d, *s->second, q.instance(), 0);
      auto* c = to_partner[p].add_connections();
      c->set_index(q.index());
      lead_to(*c, *f->second, peer_of(mine), mine.ctx_id);
      if (auto& path = paths[p][{f->second->gid(), s->second->gid()}]; mine.mtu > path.there.mtu)
        path = {{f->second->gid(), s->second->gid(), mine.mtu}, {mine.gid, mine.dest_gid, mine.mtu}};
    }
  }
  auto moves = source_.moves(prepared_);
  if (!moves) return moves.error();
  *to_dest.mutable_moves() = std::move(*moves->mutable_moves());
  const auto number = [this](const Affected& a) { return static_cast<std::size_t>(&a - affected_.data()); };
  if (auto s = both([&] { return to_dest.connections_size() || to_dest.moves_size() ? dest_.connect(to_dest) : Status(); },
                    [&](Affected& a) { return a.link->connect(to_partner[number(a)]); }); !s || !set_.pre_setup) return s;
  return step("connect.try", [&] {
    return parallel_for(affected_, [&](Affected& a) {
      std::vector<Path> its;
      for (const auto& [ends, path] : paths[number(a)])
        if (path.there.mtu) its.push_back(path);
      return reach(a, std::move(its));
    });
  });
}

// What the source reaches the destination has to reach, too. A path that neither takes is as broken as before; one that cannot be tried
// keeps nobody: that is so where migrd does not see the GIDs of a container, and with an older one.
Status Coordinator::reach(const Affected& a, std::vector<Path> paths) {
  // @return those that pass, or are not tried; `paths` are the others afterwards
  const auto try_all = [&](std::unique_ptr<PathTrial> host, PathToTry Path::*side) {
    std::vector<Path> passed, failed;
    std::vector<PathToTry> to_try;
    for (const auto& p : paths) to_try.push_back(p.*side);
    Result<std::vector<PathTried>> tried = std::vector<PathTried>(paths.size());
    if (const auto end = a.link->path_trial(); host && end) tried = migr::try_paths(*host, *end, id_, to_try);
    if (!tried) spdlog::info("paths to {} are not tried: {}", a.link->name(), tried.error().text);
    for (std::size_t i = 0; i < paths.size(); i++) {
      const PathTried result = tried ? (*tried)[i] : PathTried{};
      if (!result.why_not.empty()) spdlog::info("the path from {} to {} of {} is not tried: {}", shown_gid(to_try[i].from), shown_gid(to_try[i].to), a.link->name(), result.why_not);
      auto& p = (result.error.empty() ? passed : failed).emplace_back(paths[i]);
      if (p.why.empty()) p.why = result.error;
    }
    paths = std::move(failed);
    return passed;
  };
  for (int i = 0; i < 2 && !paths.empty(); i++) (void)try_all(dest_.path_trial(), &Path::there);  // packets get lost now and then
  if (paths.empty()) return {};
  const auto missed = try_all(source_.path_trial(), &Path::here);
  for (const auto& p : paths)
    note("neither " + set_.self + " nor " + to_ + " reaches " + a.link->name() + " over RDMA at " + shown_gid(p.there.to) + ": what is connected to there moves as it is");
  if (missed.empty()) return {};
  const auto& [there, here, why] = missed.front();
  return Error{ENETUNREACH, to_ + " does not reach " + a.link->name() + " over RDMA, as " + set_.self + " does: " + std::to_string(mtu_bytes(there.mtu)) + " bytes at once between " +
                                shown_gid(there.from) + " and " + shown_gid(there.to) + ": " + why +
                                ". With RoCE, UDP port 4791 has to be open between the two, both ways, and every switch on the way has to pass frames of that size"};
}

const wire::PortGid* like(const wire::PrepareReply& prepared, const wire::PortGid& from) {
  std::set<std::string> there;
  for (const auto& g : prepared.gids()) there.insert(g.device());
  const wire::PortGid* best = nullptr;
  int nearest = 0;
  for (const auto& g : prepared.gids()) {
    if ((g.device() != from.device() && there.size() != 1) || g.port() != from.port() || g.roce_v2() != from.roce_v2()) continue;
    if (const int near = gid_nearness(from.gid(), g.gid()); near > nearest) nearest = near, best = &g;
  }
  return best;
}

// As like(), of a GID whose host is not this one: nobody knows any more at which device and port it was.
static const wire::PortGid* like_earlier(const wire::PrepareReply& prepared, const ContainerInfo& info, const std::string& gid) {
  const wire::PortGid* best = nullptr;
  for (wire::PortGid from : info.gids) {
    from.set_gid(gid);
    const auto* to = from.roce_v2() ? like(prepared, from) : nullptr;
    if (to && (!best || gid_nearness(gid, to->gid()) > gid_nearness(gid, best->gid()))) best = to;
  }
  return best;
}

std::vector<wire::Move> moves_of_processes(const ContainerInfo& info, const wire::PrepareReply& prepared) {
  std::vector<wire::Move> out;
  const auto add = [&](const Instance& instance, const std::string& known, const wire::PortGid& to) {
    auto& m = out.emplace_back();
    m.set_instance(instance.data(), instance.size());
    m.set_birth_gid(known);
    m.set_gid(to.gid());
  };
  std::set<std::string> present;
  for (const auto& from : info.gids) {
    const auto* to = from.roce_v2() ? like(prepared, from) : nullptr;
    if (!to) continue;
    present.insert(from.gid());
    for (const auto& i : info.instances) add(i, from.gid(), *to);
  }
  for (const auto& [owner, gid] : info.earlier)
    if (const auto* to = present.contains(gid) ? nullptr : like_earlier(prepared, info, gid)) add(info.instances[owner], gid, *to);
  return out;
}

// Before memory is copied: what NICs write to from then on is compared in the stop, and not all that is registered. Wherever that
// cannot be, all of it is.
Status Coordinator::track() {
  std::mutex m;
  const auto cannot = [&](const std::string& why) {
    std::lock_guard lock(m);
    if (std::exchange(tracked_, false)) spdlog::info("all registered memory is compared in the stop: {}", why);
  };
  tracked_ = true;
  writes_.clear();
  if (set_.what != Settings::kMove) cannot("partners take no part");
  if (!twins_.empty()) cannot("QPs of '" + info_.id + "' are connected to each other");
  if (!tracked_) return {};
  return both(
      [&] {
        if (auto s = source_.track(); !s) cannot(s.error().text);
        return Status();
      },
      [&](Affected& a) -> Status {
        auto reply = a.link->track(id_);
        if (!reply) return reply.error();
        if (!reply->why_not().empty()) cannot(a.link->name() + ": " + reply->why_not());
        return {};
      });
}

// It is copied during the stop instead, unless that would be longer than who has asked for the copy expects, or meets the limit that a dump
// has met already.
Status Coordinator::not_copied_ahead(const Error& why) {
  if (must_copy_ahead())
    return Error{why.code, "memory cannot be copied ahead of the stop, which was asked for: " + why.text + "; leave out --pre-copy and --pre-copy-rounds to have it copied during the stop then"};
  if (why.code == ETIMEDOUT) return Error{why.code, "copying memory ahead of the stop: " + why.text};
  note(kNotCopiedAhead + why.text);
  return {};
}

// Each round holds what was written during the one before.
Status Coordinator::pre_copy() {
  if (auto s = step("pre-copy.track", [this] { return track(); }); !s) return s;
  const std::uint64_t began = sent_.bytes;
  std::uint64_t last = UINT64_MAX;
  const Written written = [this]() -> Result<bool> {
    if (auto s = goes_on(); !s) return s.error();
    return true;
  };
  for (unsigned round = 1; round <= rounds_ahead_; round++) {
    more_time();
    if (auto s = goes_on(); !s) return s;
    if (auto s = source_.may_pre_dump(); !s) {
      if (round == 1) return not_copied_ahead(s.error());
      note("memory is not copied once more ahead of the stop: " + s.error().text);
      break;  // what was copied before is of use
    }
    auto folder = source_.pre_dump(round);
    if (!folder) {
      if (auto s = not_copied_ahead(folder.error()); !s) return s;
      pre_copied_ = false;
      summary_.set_pre_copy_rounds(0);
      summary_.set_bytes_pre_copied(0);
      return {};  // the checkpoint that waits refers to none
    }
    const std::uint64_t before = sent_.bytes;
    sends(bytes_below(*folder));
    auto s = dest_.upload(id_, *folder, round, written, sent_);
    sends(0);
    if (!s) return s;
    pre_copied_ = true;
    summary_.set_pre_copy_rounds(round);
    summary_.set_bytes_pre_copied(sent_.bytes - began);
    const std::uint64_t bytes = sent_.bytes - before;
    if (!set_.pre_copy_rounds && (bytes < kPreCopyFromBytes || bytes > last / 2)) break;
    last = bytes;
  }
  return source_.checkpoint_after(summary_.pre_copy_rounds());
}

Status Coordinator::drain() {
  std::set<std::size_t> left;
  std::mutex m;
  auto take = [&](const Result<wire::DrainReply>& r) -> Status {
    if (!r) return r.error();
    std::lock_guard lock(m);
    left.insert(r->left().begin(), r->left().end());
    writes_.insert(writes_.end(), r->writes().begin(), r->writes().end());
    return {};
  };
  auto there = [&](Affected& a) -> Status {
    const auto r = a.link->drain(id_, set_.drain_ms);
    const auto s = take(r);
    std::lock_guard lock(m);
    tracked_ = tracked_ && s && r->tracked();
    return s;
  };
  const double began = now_ms();
  if (auto s = both([&] { return step("drain.source", [&] { return take(source_.drain(set_.drain_ms, gone_)); }); },
                    [&](Affected& a) { return step("drain.partner", [&] { return there(a); }); }); !s) return s;
  if (left.empty()) return {};
  const std::string what = (now_ms() - began < set_.drain_ms ? "a path has failed" : "wait-before-stop took more than " + std::to_string(set_.drain_ms) + " ms") +
                           ", with " + std::to_string(left.size()) + " of " + std::to_string(info_.connected.size()) + " connections still busy";
  return step("drain.replay", [&] { return replay(left, what); });
}

// It does not end. First both ends stop whatever they do; then nothing changes any more, and how far each got says what
// has to be replayed. A failure in between breaks these connections; what could fail for a reason is asked before.
Status Coordinator::replay(std::set<std::size_t> left, const std::string& what) {
  for (const auto i : std::set(left)) {
    if (i >= info_.connected.size()) return Error{EPROTO, "an answer to Drain names a wrong QP"};
    if (const auto t = twins_.find(i); t != twins_.end()) left.insert(t->second);
    else if (set_.what != Settings::kMove) return Error{ETIMEDOUT, what};
  }
  note(what);
  auto request = [&](bool check) {
    wire::CutRequest r;
    r.set_id(id_);
    r.set_check(check);
    return r;
  };
  std::map<std::size_t, std::uint32_t> here, there;
  std::mutex m;
  auto cut = [&](bool check) {
    auto take = [&](const Result<wire::CutReply>& r, std::map<std::size_t, std::uint32_t>& psns) -> Status {
      if (!r) return r.error();
      std::lock_guard lock(m);
      for (const auto& q : r->qps()) psns[q.index()] = q.psn();
      return {};
    };
    return both([&] {
                  auto r = request(check);
                  for (const auto i : left) r.add_index(static_cast<std::uint32_t>(i));
                  return take(source_.cut(r), here);
                },
                [&](Affected& a) -> Status {
                  auto r = request(check);
                  for (const auto& q : a.qps)
                    if (left.contains(q.index())) r.add_index(q.index());
                  return r.index_size() ? take(a.link->cut(r), there) : Status();
                });
  };
  if (auto s = cut(true); !s) return Error{ETIMEDOUT, what + ", and what is under way cannot be replayed: " + s.error().text};
  old_paths_first();
  if (auto s = cut(false); !s) return s;
  for (const auto& [i, twin] : twins_)
    if (left.contains(i)) there[i] = here[twin];
  for (const auto i : left)
    if (!here.contains(i) || !there.contains(i)) return Error{EPROTO, "Cut leaves out QP " + std::to_string(info_.connected[i].vqpn)};
  auto& sum = *summary_.mutable_replayed();
  auto settle = [&](const std::map<std::size_t, std::uint32_t>& psns, const auto& wanted, const auto& call) -> Status {
    wire::SettleRequest r;
    r.set_id(id_);
    for (const auto& [i, psn] : psns) {
      if (!wanted(i)) continue;
      auto* q = r.add_qps();
      q->set_index(static_cast<std::uint32_t>(i));
      q->set_psn(psn);
    }
    if (!r.qps_size()) return {};
    const Result<wire::SettleReply> reply = call(r);
    if (!reply) return reply.error();
    std::lock_guard lock(m);
    add_to(sum, *reply);
    return {};
  };
  if (auto s = both([&] { return settle(there, [](std::size_t) { return true; }, [&](const auto& r) { return source_.settle(r); }); },
                    [&](Affected& a) {
                      std::set<std::size_t> its;
                      for (const auto& q : a.qps) its.insert(q.index());
                      return settle(here, [&](std::size_t i) { return its.contains(i); }, [&](const auto& r) { return a.link->settle(r); });
                    }); !s) return s;
  note(std::to_string(sum.replayed()) + " work requests of " + std::to_string(sum.qps()) + " QPs are replayed on the new path, " +
       std::to_string(sum.executed()) + " had arrived before" +
       (sum.lost() ? "; " + std::to_string(sum.lost()) + " atomics were executed and their answers are lost: these connections break" : ""));
  return {};
}

// Partners leave the old paths: if this goes back they have to stand again before the source sends. What reaches a partner whose
// windows of type 2 are bound on the new path, or whose old one is closed or cut, breaks the connection, or is lost. Asked for
// beside what else is taken back; "suspension" waits for it, no longer than one call may take.
void Coordinator::old_paths_first() {
  undo_.push("", [this] {
    if (old_paths_.valid()) return Status();
    old_paths_ = in_own_thread(with_log_fields([this] {
      (void)parallel_for(affected_, [&](Affected& a) -> Status {
        // Its Rollback, which does what is left, decides whether it has gone back.
        if (auto s = a.link->old_path(id_); !s) note("a partner's connections may break: " + s.error().text);
        return {};
      });
    }));
    return Status();
  });
}

// What is read from a folder neither ran nor stood still.
std::string Coordinator::of_here(const char* what) const { return set_.what == Settings::kGiveBack ? "" : what; }

Status Coordinator::freeze() {
  frozen_at_ = now_ms();
  undo_.push(of_here("freeze"), [this] { return source_.reconnect(); });
  if (auto s = step("freeze.rdma", [this] { return source_.freeze(tracked_ ? &writes_ : nullptr); }); !s) return s;
  // Its threads are not to see a network without routes: it stands still before that goes, and runs after it has come back.
  undo_.push(of_here("checkpoint"), [this] { return source_.thaw(); });
  undo_.push(of_here("network"), [this] { return source_.attach_network(); });
  if (auto s = step("freeze.network", [this] { return source_.detach_network(); }); !s) return s;
  undo_.push("", [this] {  // the destination has ended it
    if (upload_.valid() && upload_.wait_for(std::chrono::seconds(0)) != std::future_status::deferred) upload_.wait();  // else it has not begun
    return Status();
  });
  // First to be undone: the address must be gone there before it comes back here.
  push_abort();
  auto dump = [this] {
    const Status s = step("freeze.checkpoint", [this] { return source_.checkpoint(); });
    dump_ = s ? Dump::kWhole : Dump::kFailed;
    return s;
  };
  auto attach = [this] {
    const Status s = step("freeze.attach", [this] { return dest_.attach_network(id_); });
    if (s && !pre_copied_) start_upload();
    return s;
  };
  return parallel({dump, attach});
}

// Memory is on its way while CRIU goes on to write. What was copied ahead has to be compared with first: only then is it
// known what is to be sent.
void Coordinator::start_upload() {
  const Written written = [this]() -> Result<bool> {
    if (dump_ == Dump::kFailed) return Error{ECANCELED, "the checkpoint failed"};
    if (auto s = goes_on(); !s) return s.error();
    return dump_ == Dump::kWhole;
  };
  sends(pre_copied_ ? bytes_below(early_) : info_.image_bytes());
  upload_ = in_own_thread(with_log_fields([this, written] {
    const Status s = step("copy.upload", [&] { return dest_.upload(id_, early_, 0, written, sent_); });
    sends(0);
    return s;
  }));
}

Status Coordinator::copy() {
  if (pre_copied_) {
    auto drop = [this]() -> Status {
      auto unchanged = source_.drop_unchanged();
      if (unchanged) summary_.set_bytes_unchanged(*unchanged);
      return unchanged;
    };
    if (auto s = step("copy.compare", drop); !s) return s;
    start_upload();
  }
  if (auto s = upload_.get(); !s) return s;
  if (dest_.bundle_changes())
    if (auto s = step("copy.bundle", [this] { return dest_.upload_changes(id_, sent_); }); !s) return s;
  return step("copy.restore", [this] { return dest_.full_restore(id_); });
}

Told tell_commit(DestinationLink& destination, std::uint32_t id, int limit_ms, int step_ms) {
  const double until = now_ms() + limit_ms;
  for (;;) {
    const Status s = destination.commit(id);
    if (s) return {wire::COMMITTED, s};
    const auto o = destination.outcome(id);
    if (o && *o == wire::COMMITTED) return {wire::COMMITTED, s};
    if (o && *o == wire::UNKNOWN) return {wire::OPEN, Error{ENOENT, "it does not know of it any more"}};
    if (o && *o != wire::OPEN) return {wire::UNDONE, s};
    // It can answer, and did not do it: then it has to say that it never will.
    if (o && !unreachable(s.error())) (void)destination.abort(id);
    if (now_ms() >= until) return {wire::OPEN, s};
    usleep(static_cast<useconds_t>(step_ms) * 1000);
  }
}

Status Coordinator::commit() {
  if (!set_.course->decide()) return goes_on();
  // From here on this host answers "committed" to whoever asks.
  if (auto s = source_.decide(wire::COMMITTED); !s) return s;
  committed_ = true;
  const Told told = tell_commit(dest_, id_, set_.undecided_ms, set_.resolve_step_ms);
  if (told.outcome == wire::COMMITTED) return {};
  if (told.outcome == wire::UNDONE) {
    if (auto s = source_.decide(wire::UNDONE); !s) spdlog::error("{}", s.error().text);
    committed_ = false;
    return told.why;
  }
  undecided_ = true;
  const std::string decide = "migrctl recover " + migration_text(id_), runs = decide + " --commit --force", lost = decide + " --rollback --force";
  if (told.why.error().code == ENOENT)
    return Error{ENOENT, "outcome not known: " + to_ + " was told to let the container run, and does not know of it any more. It stands still on " + set_.self +
                             ". Look whether it runs on " + to_ + ". If it does: " + runs + "; if it does not: " + lost};
  return Error{EHOSTUNREACH, "outcome not known: " + to_ + " was told to let the container run and does not answer. It stands still on " + set_.self +
                                 ", whose migrd goes on asking and finishes or goes back by itself when " + to_ +
                                 " answers. If it is known to run there: " + runs + "; if " + to_ + " is lost for good: " + lost + " (" + told.why.error().text + ")"};
}

// After the commit a host that does not answer just now may be on its way back: a migrd that is started again goes on.
Status Coordinator::insist(const std::function<Status()>& call) {
  for (const double until = now_ms() + set_.undecided_ms;;) {
    Status s = call();
    if (s || !unreachable(s.error()) || now_ms() > until) return s;
    usleep(static_cast<useconds_t>(set_.resolve_step_ms) * 1000);
  }
}

Status Coordinator::resume() {
  auto rebind = [this] {
    return insist([&]() -> Status {
      auto keys = dest_.rebind(id_);
      if (keys) keys_ = *keys;
      return keys;
    });
  };
  if (auto s = step("resume.rebind", rebind); !s) return s;
  double here_ms = 0, partner_ms = 0;
  std::mutex m;
  auto there = [&](Affected& a) -> Status {
    wire::KeysRequest r;
    r.set_id(id_);
    *r.mutable_keys() = keys_.keys();
    r.set_resume(true);
    return insist([&]() -> Status {
      const auto told = a.link->keys(r);
      if (!told) return told.error();
      const auto reply = told->has_resumed() ? Result(told->resumed()) : a.link->resume(id_);
      if (!reply) return reply.error();
      std::lock_guard lock(m);
      auto* f = summary_.add_partner_figures();
      f->set_host(a.link->name());
      f->set_blackout_ms(static_cast<double>(reply->blackout_ns()) / 1e6);
      f->set_suspended_ms(static_cast<double>(reply->suspended_ns()) / 1e6);
      f->set_replayed_sends(reply->replayed_sends());
      f->set_replayed_recvs(reply->replayed_recvs());
      partner_ms = std::max(partner_ms, f->blackout_ms());
      return {};
    });
  };
  auto here = [&] {
    return insist([&]() -> Status {
      auto reply = dest_.resume(id_);
      if (!reply) return reply.error();
      here_ms = now_ms();
      return {};
    });
  };
  const Status s = both([&] { return step("resume.destination", here); }, [&](Affected& a) { return step("resume.partner", [&] { return there(a); }); });
  if (here_ms > 0) summary_.set_service_blackout_ms(here_ms - frozen_at_);
  runs_again_ = true;
  summary_.set_communication_blackout_ms(partner_ms);
  return s;
}

// What the partners had of it. No reason to fail: an older migrd does not know the question.
void Coordinator::look_at_traffic() {
  const auto back_ms = static_cast<std::uint32_t>(now_ms() - began_at_);
  (void)parallel_for(*summary_.mutable_partner_figures(), [&](wire::PartnerFigures& f) -> Status {
    const auto a = std::find_if(affected_.begin(), affected_.end(), [&](const Affected& x) { return x.link->name() == f.host(); });
    if (auto t = a->link->traffic(back_ms)) *f.mutable_traffic() = *t;
    return {};
  });
}

void Coordinator::tell_progress(std::atomic<bool>& stop) {
  for (; !stop; usleep(kStopStepMs * 1000)) {
    look_at_stop();
    say_how_far();
  }
}

// Given up in the stop: what the destination is at, a restore perhaps, ends at once. What this host is at comes to its end first.
void Coordinator::look_at_stop() {
  if (frozen_at_ <= 0 || runs_again_ || goes_back_) return;
  if (set_.max_stop_ms && now_ms() - frozen_at_ > set_.max_stop_ms)
    set_.course->give_up({ETIME, "'" + info_.id + "' stood still for more than the " + std::to_string(set_.max_stop_ms) + " ms that it may"});
  if (!goes_on() && !ended_there_.valid() && set_.what != Settings::kKeep) ended_there_ = in_own_thread(with_log_fields([this] { return dest_.abort(id_); }));
}

// All at once: one that is silent takes as long as its call may, and the others' leases would run out.
void Coordinator::lease(std::atomic<bool>& stop) {
  while (!stop) {
    {
      std::lock_guard lock(phase_mutex_);
      if (!phase_.empty() && now_ms() > phase_until_) {
        spdlog::critical("{} did not end within {} ms", phase_, kPhaseMs);
        // Whoever starts migrd again has it go back, or finish. The others see it silent.
        set_.stands_still ? set_.stands_still(phase_) : _exit(kStandsStillStatus);
        return;
      }
    }
    (void)both([this] { return dest_.renew(id_); }, [this](Affected& a) { return a.link->renew(id_); });
    for (int ms = 0; ms < kLeaseRenewMs && !stop; ms += kStopStepMs) usleep(kStopStepMs * 1000);
  }
}

void Coordinator::begin(const std::string& container, const std::string& to, std::uint32_t id) {
  id_ = id;
  set_.course->begin(id);
  to_ = to;
  began_at_ = now_ms();
  summary_.set_id(id);
  summary_.set_container(container);
  summary_.set_from(set_.self);
  summary_.set_to(to);
  summary_.set_begun_ms(unix_now_ms());
}

wire::Summary Coordinator::migrate(const std::string& container, const std::string& to, std::uint32_t id) {
  const LogScope log(id);
  begin(container, to, id);
  std::atomic<bool> stop = false;
  std::future<void> progress, leases;
  const struct Ends {  // both: their futures wait for them
    std::atomic<bool>& stop;
    ~Ends() {
      if (std::uncaught_exceptions()) std::terminate();  // what was begun is in the journal: the next migrd takes it back
      stop = true;
    }
  } ends{stop};
  Status s = phase(FaultStep::kSourceCheck, [&] {
    progress = std::async(std::launch::async, with_log_fields([&] { tell_progress(stop); }));  // it looks at --max-stop, too
    return check(container, to);
  });
  if (s) {
    note("migration " + migration_text(id) + " of " + container + " to " + to + ": " + std::to_string(info_.resources.qp()) + " QPs, " +
         std::to_string(affected_.size()) + " partner hosts");
    if (info_.piped) note("its standard input or output is a pipe to a program of this host: there it is /dev/null, and what it writes is dropped");
    s = phase(FaultStep::kSourceRecord, [&]() -> Status {
      std::vector<std::string> partners;
      for (const auto& a : affected_) partners.push_back(a.link->name());
      auto f = source_.record(to_, partners);
      if (f) early_ = *f;
      return f;
    });
  }
  if (s) {
    touched_ = true;
    s = phase(FaultStep::kSourcePrepare, [&] {
      leases = std::async(std::launch::async, with_log_fields([&] { lease(stop); }));
      return prepare();
    });
  }
  if (s && set_.pre_setup && set_.what != Settings::kKeep) s = phase(FaultStep::kSourceConnect, [&] { return connect(); });
  if (s && rounds_ahead_) s = phase(FaultStep::kSourcePreCopy, [&] { return pre_copy(); });
  if (s) source_.get_ready();
  if (s) s = phase(FaultStep::kSourceSuspend, [&] {
    undo_.push(of_here("suspension"), [this] {
      if (old_paths_.valid()) old_paths_.wait();
      return source_.rollback();
    });
    return both([&] { return step("suspend.source", [&] { return source_.suspend(); }); },
                [&](Affected& a) { return step("suspend.partner", [&] { return a.link->suspend(id_); }); });
  });
  if (s) s = phase(FaultStep::kSourceDrain, [&] { return drain(); });
  if (s) s = phase(FaultStep::kSourceFreeze, [&] { return freeze(); });
  if (s && !set_.pre_setup) s = phase(FaultStep::kSourceCreate, [&] { return create(); });
  if (s && !set_.pre_setup) s = phase(FaultStep::kSourceConnect, [&] { return connect(); });
  if (s) s = phase(FaultStep::kSourceCopy, [&] { return copy(); });
  if (s) s = phase(FaultStep::kSourceReady, [&] {
    old_paths_first();
    return both([&] { return step("ready.destination", [&] { return dest_.ready(id_); }); },
                [&](Affected& a) { return step("ready.partner", [&] { return a.link->switch_path(id_); }); });
  });
  if (s) s = phase(FaultStep::kSourceCommit, [&] { return commit(); });

  // Whatever has failed on the way: another try is not wanted.
  if (!s && !goes_on()) s = goes_on();
  if (!s && !committed_) {
    goes_back_ = true;  // for this reason, however long that takes
    failed_with_ = s.error().code;
    LogScope back;
    back->phase = "source.back";
    if (touched_) note("going back: " + s.error().text);
    const double start = now_ms();
    watch("rollback");
    (void)fault(set_.fault, FaultStep::kSourceBack, FaultAt::kBegin);  // nothing but the end of migrd keeps it from going back
    const auto undone = undo_.run();
    (void)fault(set_.fault, FaultStep::kSourceBack, FaultAt::kEnd);
    watch({});
    source_.forget(undone.all);
    std::string text = s.error().text;
    for (const auto& f : undone.failed) text += "; while going back: " + f;
    summary_.set_error(text);
    summary_.set_error_code(static_cast<std::uint32_t>(failed_with_));
    summary_.set_going_back(touched_ && !undone.all);
    for (const auto& what : undone.done) summary_.add_rolled_back(what);
    if (touched_) {
      auto* p = summary_.add_phases();
      p->set_phase("rollback");
      p->set_ms(now_ms() - start);
      p->set_start_ms(start - began_at_);
      if (frozen_at_ > 0) summary_.set_service_blackout_ms(now_ms() - frozen_at_);
    }
  } else if (undecided_) {
    summary_.set_error(s.error().text);
    summary_.set_error_code(static_cast<std::uint32_t>(s.error().code));
  } else {
    undo_.drop();
    // The container runs on the destination now, whatever comes.
    if (auto r = phase(FaultStep::kSourceResume, [&] { return resume(); }); s) s = r;
    const auto destroyed = phase(FaultStep::kSourceDestroy, [&] { return source_.destroy(); });
    if (s) s = destroyed;
    look_at_traffic();
    summary_.set_migrated(true);
    summary_.set_rdma_ms(rdma_ms());
    if (!s) summary_.set_error("the container moved, but: " + s.error().text), summary_.set_error_code(static_cast<std::uint32_t>(s.error().code));
    source_.forget(bool(destroyed));
  }
  stop = true;
  if (progress.valid()) progress.wait();
  if (leases.valid()) leases.wait();
  summary_.set_touched(touched_);
  summary_.set_undecided(undecided_);
  summary_.set_bytes_copied(sent_.bytes);
  spdlog::info("{}", summary_.error().empty() ? "moved" : summary_.error());
  return summary_;
}

}  // namespace migr
