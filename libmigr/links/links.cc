/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "links.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "../../include/migr/migr.h"
#include "../cm/cm.h"
#include "../control.h"
#include "../events.h"
#include "../gids.h"
#include "../high_fd.h"
#include "../kernel_link.h"
#include "../no_cancel.h"
#include "../path.h"
#include "../provider/provider.h"
#include "../provider/uverbs_write.h"
#include "../quiet_thread.h"
#include "../real.h"
#include "../switchover/switchover.h"
#include "channel.h"
#include "directory.h"
#include "state.h"

namespace migr::links {
namespace {

State* the_state = nullptr;
bool looked = false;  ///< what is configured has been read

void run_discards() {
  State* s;
  {
    std::lock_guard guard(Registry::get().lock);  // held while the threads are started
    s = the_state;
  }
  if (s) s->discards.run();
}

bool start_thread(void (*run)(), const char* name) {
  pthread_t thread;
  const auto call = [](void* f) -> void* { reinterpret_cast<void (*)()>(f)(); return nullptr; };
  return !start_quiet_thread(thread, call, reinterpret_cast<void*>(run), name) && !pthread_detach(thread);
}

/// Once. Reads what is configured; without anything nothing is made.
State* configured() {
  if (looked) return the_state;
  looked = true;
  Config config = read_config();
  if (!config.any_policy() || config.links.size() < 2) return nullptr;
  auto* s = new State;
  s->instance = control::instance();
  s->config = std::move(config);
  for (const Config::Link& link : s->config.links) {
    s->links.emplace_back();
    s->links.back().config = link;
    s->links.back().index = static_cast<unsigned>(s->links.size() - 1);
  }
  s->round_fd = to_high_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  s->failover_fd = to_high_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  the_state = s;
  if (!path::watch_pollers() || s->instance == Peer{} || s->round_fd < 0 || s->failover_fd < 0 ||
      !start_thread(run_rounds, "migr-links") || !start_thread(run_failover, "migr-failover") || !start_thread(run_discards, "migr-discard")) {
    std::fprintf(stderr, "libmigr: no thread, descriptor or membarrier(2) for the backup links; no link is backed up in this process\n");
    the_state = nullptr;  // a thread that has begun finds nothing to do
  }
  return the_state;
}

std::pair<Peer, std::uint32_t> key_of(const migr_links_name& name) {
  Peer gid;
  std::memcpy(gid.data(), name.gid, gid.size());
  return {gid, name.vqpn};
}

void forget_qp(QpLink& l) {
  for (CqShadow* c : {l.q->send_cq, l.q->recv_cq}) {
    std::lock_guard guard(c->lock);
    if (!c->link) continue;
    for (auto& qps : c->link->qps) std::erase_if(qps, [&](const auto& e) { return e.second == &l; });
  }
  {
    std::lock_guard guard(l.q->lock);
    end_relay(l);
    switchover::clear_bits(*l.q, (shares_receives(*l.q) ? 0u : kTrapped) | kRelays);
    l.q->link = nullptr;  // who posts looks for it with that lock
  }
  remove(l.bell, *l.q->context);
  if (l.told) the_state->to_withdraw.push_back(without_generation(l.name));
  std::erase(the_state->qps, &l);
  the_state->by_id.erase(l.id);
  if (const auto found = the_state->by_name.find(key_of(l.name)); found != the_state->by_name.end() && found->second == &l) the_state->by_name.erase(found);
  ++the_state->forgotten;
  l.q->goes_on = l.q->guard.on;
  receives_may_move(*l.q);
  delete &l;
  kick(the_state->round_fd);
}

}  // namespace

State* state() { return the_state; }

void kick(int fd) {
  const std::uint64_t one = 1;
  const int saved = errno;
  (void)!syscall(SYS_write, fd, &one, sizeof one);  // no place to be cancelled at
  errno = saved;
}

void say(const QpShadow& q, const std::string& what) { std::fprintf(stderr, "libmigr: vQPN %u: %s\n", q.vqpn(), what.c_str()); }
void say(const QpLink& l, const std::string& what) { say(*l.q, what); }

bool same(const migr_links_name& a, const migr_links_name& b) { return a.vqpn == b.vqpn && !std::memcmp(a.gid, b.gid, sizeof a.gid); }

QpLink* find(const migr_links_name& name) {
  const auto found = the_state->by_name.find(key_of(name));
  return found == the_state->by_name.end() ? nullptr : found->second;
}

QpLink* find(std::uint64_t id) {
  const auto found = the_state->by_id.find(id);
  return found == the_state->by_id.end() ? nullptr : found->second;
}

void keep(std::unique_ptr<QpLink> l) {
  the_state->by_id[l->id] = the_state->by_name[key_of(l->name)] = l.get();
  the_state->qps.push_back(l.release());
}

void be_at(QpLink& l, Stage stage) {
  l.stage = stage;
  l.had_backup = l.had_backup || stage == Stage::kReady;
  // As take_error() hides what its path says.
  l.q->goes_on.store(l.q->guard.on || (stage == Stage::kMaking ? l.own_channel : stage != Stage::kBroken), std::memory_order_relaxed);
}

void set_stage(QpLink& l, Stage stage) {
  std::lock_guard guard(l.lock);
  be_at(l, stage);
}

namespace {

/// From a device to itself: no cable carries it. That the device is gone it says by itself.
bool needs_no_link(const QpLink& l) { return is_to_itself(l) && l.peer_home == l.twin->home->index; }

}  // namespace

void note_backed_up() {
  for (Twin* t : the_state->twins) {
    bool any = false, all = true;
    for (QpShadow* q : Registry::get().qps) {
      if (q->context != t->of || (q->link && (q->link->stage == Stage::kBroken || needs_no_link(*q->link)))) continue;
      const bool goes_on = guarded(*q) || (q->link ? q->link->on != kHome || q->link->stage != Stage::kMaking : q->adrift);
      const bool connected = goes_on || q->link || q->app_state() == IBV_QPS_RTR || q->app_state() == IBV_QPS_RTS;
      any = any || connected;
      all = all && (goes_on || !connected);
    }
    if (std::exchange(t->backed_up, any && all) != t->backed_up) events::backed_up(*t->of->real, t->backed_up);
  }
}

/* ---- what the application does ------------------------------------------------------ */

void opened(Context& context) {
  State* s = configured();
  if (!s) return;
  Link* home = nullptr;
  for (Link& link : s->links)
    if (!home && link.config.device == context.real->device->name) home = &link;
  if (!home) return;
  const Policy policy = s->config.policy_of(home->config.device);
  if (policy == Policy::kOff) return;
  auto* t = new Twin;
  t->of = &context;
  t->home = home;
  t->policy = policy;
  t->paths = s->config.paths_of(home->config.device);
  t->wants_relayed = s->config.atomics_of(home->config.device) == Atomics::kRelayed;
  if (t->wants_relayed && policy == Policy::kExact) t->atomics = Atomics::kRelayed;
  const unsigned most = s->config.backups_of(home->config.device);
  for (Link& link : s->links) {
    if (link.config.device == home->config.device || t->backups.size() == most) continue;
    if (auto* const table = static_cast<migr_key_entry*>(private_memory(nullptr, MIGR_KEY_TABLE_BYTES)))
      t->backups.push_back({.link = &link, .key_table = table, .pds = {}, .missing = {}});
  }
  if (t->backups.empty()) {
    delete t;
    return;
  }
  context.twin = t;
  s->twins.push_back(t);
  changed();
}

void changed() {
  if (the_state) kick(the_state->round_fd);
}

[[gnu::weak]] bool nobody_hears() { return false; }

namespace {

/// What the application changes of its path holds for those that are made ahead, too.
void change_next(QpLink& l, const ibv_qp_attr& attr, int mask) {
  constexpr int kSet = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC;
  const bool by_state = mask & IBV_QP_STATE;  // what it brings to RTS is there already, and takes no timers any more
  for (Side side = kHome; side < l.sides(); ++side) {
    Leg& leg = l.legs[side];
    const int mine = mask & (leg.next.connected ? kSet : IBV_QP_ACCESS_FLAGS);  // it gets the others when it is connected
    ibv_qp_attr to = attr;
    if (!leg.next.qp || !mine || (!(leg.next.connected && by_state) && !real().modify_qp(leg.next.qp, &to, mine))) continue;
    drop_next(l, side);
  }
}

}  // namespace

void modified(QpShadow& q, const ibv_qp_attr& attr, int mask) {
  if (!q.context->twin) return;
  if ((mask & IBV_QP_AV) && real().query_gid(q.context->real, q.birth.ah.port_num, gids::here(*q.context, q.birth.ah.port_num, q.birth.ah.grh.sgid_index), &q.birth.gid)) q.birth.gid = {};
  if (mask & IBV_QP_STATE) changed(), receives_may_move(q);
  if (q.link) change_next(*q.link, attr, mask);
}

bool met(QpShadow& q) {
  QpLink* const l = q.link;
  if (!l) return true;
  l->home_bits |= kTranslateRemote;
  // What is posted with other keys cannot be told apart when it comes late. Where a session is open, rounds try again.
  if (!(q.state.load(std::memory_order_relaxed) & kTrapped) && !trap_posts(q)) changed();
  return l->on == kHome;
}

bool between_paths(QpShadow& q) {
  QpLink* const l = q.link;
  if (!l || (l->stage != Stage::kReady && l->stage != Stage::kDraining && l->stage != Stage::kChanging)) return false;
  if (l->stage == Stage::kChanging && q.phase != switchover::Phase::kSwitched) return true;
  if (l->stage == Stage::kDraining && l->drained_here) return true;  // the other end may have begun the change
  if (!switchover::in_error(q)) return false;
  std::lock_guard guard(l->lock);
  if (l->seen) return false;
  if (!std::exchange(l->wanted, true)) kick(the_state->failover_fd);  // nobody may have polled what tells of it
  return true;
}

unsigned change_limit_ms() { return the_state ? the_state->config.switch_limit_ms : 0; }

int ask_neighbour(ibv_qp* qp, ibv_ah_attr to) {
  if (!to.is_global || !qp->pd) return 0;
  const Asking asking;
  {
    std::lock_guard guard(Registry::get().lock);
    const Context* const context = Registry::get().context_of(qp->context);
    // Where it is not the kernel that makes an address handle, this would take longer than connecting does.
    if (!context || (!context->twin && !provider::is_supported(*context->real, context->ops))) return 0;
    to.grh.sgid_index = gids::here(*context, to.port_num, to.grh.sgid_index);
  }
  return neighbour_answers(qp->pd, to) ? 0 : ETIMEDOUT;
}

void wait_for_discards() {
  if (!the_state || the_state->discards.none()) return;
  const Asking asking;
  the_state->discards.finish();
}

void finish_discards() {
  constexpr unsigned kMost = 10;  // what fails meanwhile adds to them
  for (unsigned i = 0; i < kMost && !the_state->discards.none(); ++i)
    wait_without_lock([](std::unique_lock<std::mutex>& held) {
      held.unlock();
      the_state->discards.finish();
      held.lock();
    });
}

void gone(CqShadow& c) {
  if (!c.link) return;
  for (const QpShadow* q : Registry::get().qps)
    if (q->send_cq == &c || q->recv_cq == &c) return;  // the device will refuse it
  finish_discards();
  forget(c);
}

void resized(CqShadow& c) {
  if (!c.link) return;
  if (std::exchange(c.link->refused, 0)) changed();  // it may do now
  std::lock_guard guard(c.lock);  // threads poll it under that
  for (const CqLink::Cq& cq : c.link->cqs)
    if (const int err = real().resize_cq(cq.real, c.real->cqe))
      std::fprintf(stderr, "libmigr: the backup of a CQ that has %d entries now keeps its %d: %s\n", c.real->cqe, cq.real->cqe, std::strerror(err));
}

void forget(CqShadow& c) {
  drop_spares(c);
  the_state->discards.finish();
  CqLink* link;
  {
    std::lock_guard guard(c.lock);
    link = std::exchange(c.link, nullptr);
    c.state.fetch_and(~std::uint32_t{kLinkedCq}, std::memory_order_relaxed);
  }
  if (link->bell) real().destroy_qp(link->bell);
  for (const CqLink::Cq& cq : link->cqs) real().destroy_cq(cq.real);
  delete link;
}

void empty(Twin& t) {
  drop_executors(t, nullptr);
  the_state->discards.finish();
  empty_shared(t);
  for (CqShadow* c : Registry::get().cqs)
    if (c->context == t.of && c->link) forget(*c);
  for (MrShadow* mr : Registry::get().mrs) {
    if (mr->context != t.of) continue;
    gone(*mr);
    note_missing(t, *mr);
  }
  the_state->discards.finish();
  for (Backup& b : t.backups) {
    for (const auto& [ignored, pd] : b.pds) real().dealloc_pd(pd);
    b.pds.clear();
  }
}

void gone(ibv_pd* pd) {
  if (!the_state) return;
  wait_for_pinning(pd);  // of memory that has gone before it
  for (Twin* t : the_state->twins) {
    if (std::none_of(t->backups.begin(), t->backups.end(), [&](const Backup& b) { return b.pds.contains(pd); })) continue;
    for (const QpShadow* q : Registry::get().qps)
      if (q->init.pd == pd) return;
    for (const SrqShadow* s : Registry::get().srqs)
      if (s->app.pd == pd) return;
    drop_executors(*t, pd);
    drop_spares(pd);
    finish_discards();
    wait_for_pinning(pd);  // that has begun meanwhile
    the_state->discards.finish();
    for (CqShadow* c : Registry::get().cqs) {  // bells are on any PD
      if (!c->link || !c->link->bell || c->link->bell->pd != pd) continue;
      std::lock_guard guard(c->lock);
      real().destroy_qp(std::exchange(c->link->bell, nullptr));
    }
    for (Backup& b : t->backups)
      if (const auto found = b.pds.find(pd); found != b.pds.end() && real().dealloc_pd(found->second) == 0) b.pds.erase(found);
    return;
  }
}

namespace {

/// All but `keep`. The path that is being changed is a trap already.
void destroy_paths(QpLink& l, const ibv_qp* keep) {
  for (Side side = kHome; side < l.sides(); ++side) destroy_path(l, side, l.legs[side].next);
  std::deque<Trap> traps;
  {
    std::lock_guard guard(l.q->lock);  // who posts looks into them with that lock
    traps.swap(l.traps);
  }
  for (Trap& trap : traps)
    if (trap.path.qp != keep && trap.path.qp != l.path.qp) destroy_path(l, trap.side, trap.path);
  if (l.birth && l.birth != keep) the_state->discards.add(l.birth);
  if (l.path.qp != keep) destroy_path(l, l.on, l.path);
}

/// On its default link.
ibv_qp* born_with(const QpLink& l) {
  if (l.birth) return l.birth;
  for (const Trap& trap : l.traps)
    if (trap.path.birth) return trap.path.qp;
  return l.path.qp;
}

}  // namespace

void forget(QpLink& l) {
  QpShadow& q = *l.q;
  guard(l);
  leave_former(l);
  destroy_paths(l, q.real);
  if (has_changed(l) && l.on == kHome) (void)q.context->kernel->bind_qp(q.vqpn(), l.path.qp->qp_num);  // others of that name were made since
  forget_qp(l);
}

void gone(QpShadow& q) {
  forget_guard(q);
  drop_former(q);
  forget_refusal(q);
  if (shares_receives(q)) {
    // It is out of the Registry before it is destroyed, and who counts then takes it for gone.
    ibv_qp_attr to{};
    to.qp_state = IBV_QPS_RESET;
    if (q.real->state != IBV_QPS_RESET) (void)real().modify_qp(q.real, &to, IBV_QP_STATE);
    receives_may_move(q);
  }
  QpLink* const l = q.link;
  if (!l) return;
  if (cm::Engine* const engine = cm::engine(); engine && engine->stands(cm::name_of(q))) tell_parted(*l);
  destroy_paths(*l, l->path.qp);  // that is the caller's to destroy
  forget_qp(*l);
}

namespace {

/// The application closes what has no path. @param forgets  what it has posted since
void end_drift(QpShadow& q, bool forgets) {
  if (forgets) {
    std::lock_guard guard(q.lock);
    q.kept_sends.clear();
    q.kept_receives.clear();
    q.cut->receives.clear();
  }
  std::string why;
  if (switchover::give_up_path(q, why)) say(q, why);
}

/// Nothing is hidden, and what threads that poll find from now on is the application's at once. @return false: something is
bool hides_no_more(QpLink& l) {
  std::lock_guard guard(l.lock);
  if (l.hidden.empty()) be_at(l, Stage::kBroken);
  return l.hidden.empty();
}

}  // namespace

void leave(QpShadow& q, ibv_qp_state to) {
  QpLink* const l = q.link;
  if (to != IBV_QPS_RESET && to != IBV_QPS_ERR) return;
  if (q.adrift) end_drift(q, to == IBV_QPS_RESET);
  if (to == IBV_QPS_ERR) unguard(q);
  forget_guard(q);
  drop_former(q);
  forget_refusal(q);
  if (!l) return;
  stop_change(*l, to == IBV_QPS_RESET);
  if (to == IBV_QPS_ERR) {  // before what the device is about to flush; nobody else comes for it
    while (!hides_no_more(*l)) give_back(q, take_hidden(q));
    flush_relay(*l);
  }
  if ((has_changed(*l) || l->over) && to == IBV_QPS_ERR) return;  // on the link that it is on; what is kept is flushed when the session there has ended
  ibv_qp* const home = born_with(*l);  // peers will be told its number
  if (has_changed(*l)) switchover::take_back_path(q, home);
  destroy_paths(*l, home);
  forget_qp(*l);
}

void step_out(QpShadow& q) {
  QpLink* const l = q.link;
  forget_guard(q);
  if (!l) return;
  stop_change(*l, true);  // nothing is posted before RTS
  leave_former(*l);
  destroy_paths(*l, q.real);
  forget_qp(*l);
}

namespace {

/// Its path is the one that its windows are bound beside, for good. The other end gives up by a word, which those of its atomics would not outlive
/// that are relayed.
bool may_give_up(QpLink& l) {
  if (l.stage == Stage::kBroken) return true;  // it stays where it is
  const bool relays_there = l.relays || (l.twin->atomics == Atomics::kRelayed && !l.agreed && !is_to_itself(l) && (l.unheard || l.instance != Peer{}));
  if (relays_there || leaves_home(l) || !l.traps.empty() || l.q->phase != switchover::Phase::kRunning) return false;
  std::lock_guard guard(l.lock);
  return !l.wanted && l.hidden.empty();
}

}  // namespace

bool may_give_up_backups(const Context& context) {
  if (!context.twin) return true;
  const Registry& registry = Registry::get();
  return std::all_of(registry.qps.begin(), registry.qps.end(), [&](QpShadow* q) {
    return q->context != &context || (!registry.moving && (q->link ? may_give_up(*q->link) : !q->adrift && !guarded(*q)));
  });
}

void give_up_backups(const Context& context) {
  if (!context.twin) return;
  for (QpLink* l : std::vector(the_state->qps)) {
    if (l->q->context != &context || l->stage == Stage::kBroken) continue;
    QpShadow& q = *l->q;
    tell_gone(*l);
    forget(*l);
    drop_former(q);
    unguard(q);
    forget_guard(q);
  }
}

void dropped(Context& context) {
  Twin* const t = context.twin;
  if (!t) return;
  t->closing = true;
  wait_for_pinning(*t);
  Registry& registry = Registry::get();
  for (QpShadow* q : registry.qps) {
    if (q->context != &context) continue;
    drop_former(*q);
    forget_refusal(*q);
    if (!q->link) continue;
    // Those of the default link end with the context.
    const ibv_qp* const home = q->link->on == kHome ? q->real : nullptr;
    destroy_paths(*q->link, home);
    forget_qp(*q->link);
  }
  finish_discards();
  empty(*t);
  std::erase(the_state->twins, t);
  for (const Backup& b : t->backups) munmap(b.key_table, MIGR_KEY_TABLE_BYTES);
  context.twin = nullptr;
  delete t;
}

void before_fork() {
  if (!the_state) return;
  for (const Link& link : the_state->links)
    if (link.ctx) provider::keep_from_children(*link.ctx, link.ops);
}

void after_fork_in_child(bool inherits) {
  if (!inherits) looked = false;
  if (!the_state) return;
  // A child has none of its parent's threads, and cannot use what is its parent's. Open descriptors would outlast park(), and
  // the two could not be moved.
  for (Link& link : the_state->links) {
    if (link.kernel) (void)link.kernel->detach();
    for (const ibv_comp_channel* c : {link.events, link.cq_events})
      if (c) close_own(c->fd);
    if (!link.ctx) continue;
    close_own(link.ctx->cmd_fd);
    close_own(link.ctx->async_fd);
  }
  if (the_state->directory) the_state->directory->hang_up();
  for (const int fd : {the_state->round_fd, the_state->failover_fd}) close_own(fd);
  the_state->round_fd = the_state->failover_fd = -1;
  for (CqShadow* c : Registry::get().cqs) {
    c->link = nullptr;
    c->guarded.clear();
    c->names_receives = false;
    c->state.fetch_and(~std::uint32_t{kLinkedCq}, std::memory_order_relaxed);
  }
  for (SrqShadow* s : Registry::get().srqs) s->link = nullptr;
  for (QpShadow* q : Registry::get().qps) q->link = nullptr;
  for (MrShadow* mr : Registry::get().mrs) mr->twins.clear();
  for (Context* context : Registry::get().contexts) {
    context->twin = nullptr;
    events::backed_up(*context->real, false);
  }
  the_state = nullptr;
}

/* ---- on the way of a completion -------------------------------------------------- */

namespace {

constexpr std::uint64_t kPortDownMs = 500;  // a port says that it is down so long after what it was to send has failed, on a starved host

/// What a path that does not carry any more leads to. All else is the application's doing.
bool of_the_path(ibv_wc_status status) {
  return status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_WR_FLUSH_ERR || status == IBV_WC_RESP_TIMEOUT_ERR;
}

bool port_is_active(ibv_context* ctx, unsigned number) {
  ibv_port_attr port{};
  return !query_port(ctx, number, port) && port.state == IBV_PORT_ACTIVE;
}

/// Soft-RoCE ends a send that it has no interface or route for as one that is wrong. Which it is, the port tells, and whether its address is still there.
/// @param by  this end's; without a GID if that is not known
bool of_the_path(ibv_wc_status status, ibv_context* ctx, const ibv_gid_entry& by) {
  if (status != IBV_WC_LOC_QP_OP_ERR) return of_the_path(status);
  if (is_known(by.gid) && !is_there(ctx, by)) return true;
  for (const std::uint64_t until = now_ns() + kPortDownMs * 1'000'000; port_is_active(ctx, by.port_num); switchover::pause_briefly())
    if (now_ns() > until) return false;
  return true;
}

/// Caller holds the guard's lock.
bool take_guarded(QpShadow& q, CqShadow& c, const ibv_wc& wc) {
  Guard& g = q.guard;
  if (!g.on) return false;
  ibv_gid_entry by{};
  by.port_num = q.birth.ah.port_num;
  if (!of_the_path(wc.status, q.context->real, by)) return g.on = false;
  g.hidden.push_back({&c, wc});
  if (std::exchange(g.failed, true)) return true;
  g.since_ns = now_ns();
  kick(the_state->failover_fd);
  return true;
}

bool take_guarded(CqShadow& c, const ibv_wc& wc) {
  const auto q = std::find_if(c.guarded.begin(), c.guarded.end(), [&](QpShadow* g) { return __atomic_load_n(&g->real, __ATOMIC_ACQUIRE)->qp_num == wc.qp_num; });
  if (q == c.guarded.end()) return false;
  std::lock_guard guard((*q)->guard.lock);
  return take_guarded(**q, c, wc);
}

}  // namespace

bool take_error(CqShadow& c, const ibv_wc& wc, Side side) {
  const NoCancel no_cancel;
  if (!c.link) return take_guarded(c, wc);
  const auto found = c.link->qps[side].find(wc.qp_num);
  if (found == c.link->qps[side].end()) return side == kHome && take_guarded(c, wc);
  QpLink& l = *found->second;
  std::lock_guard of_guard(l.q->guard.lock);
  std::lock_guard guard(l.lock);
  if (side != l.on || wc.qp_num != l.path.qp->qp_num) {  // a trap's
    if (!std::exchange(l.late, true)) kick(the_state->failover_fd);
    return true;
  }
  if (l.stage == Stage::kMaking && take_guarded(*l.q, c, wc)) return true;
  if ((l.stage == Stage::kMaking && !l.own_channel) || l.stage == Stage::kBroken) return l.seen = true, false;
  const Link& link = *l.legs[side].link;
  if (!of_the_path(wc.status, side == kHome ? l.q->context->real : link.ctx, l.path.gid)) {
    l.seen = true;
    if (l.stage != Stage::kChanging) be_at(l, Stage::kBroken), kick(the_state->failover_fd);
    return false;
  }
  l.hidden.push_back({&c, wc});
  if (!std::exchange(l.wanted, true)) kick(the_state->failover_fd);
  return true;
}

void hand_over(QpShadow& q) {
  const std::vector<Hidden> hidden = take_hidden(q);
  // Threads that poll add to these meanwhile.
  const auto give = [&](CqShadow& cq, std::vector<ibv_wc>& taken, bool to_sends) {
    std::vector<ibv_wc> before;
    for (const Hidden& h : hidden)
      if ((h.cq == q.send_cq) == to_sends && !unused(*h.cq, h.wc.wr_id)) before.push_back(h.wc);
    std::lock_guard guard(cq.lock);
    taken.insert(taken.begin(), before.begin(), before.end());
  };
  give(*q.send_cq, q.cut->taken_sends, true);
  give(*q.recv_cq, q.cut->taken_receives, false);
}

int arm(CqShadow& c, int solicited_only) {
  if (!c.link || !(c.state.load(std::memory_order_relaxed) & kLinkedCq)) return 0;
  for (const CqLink::Cq& cq : c.link->cqs)
    if (const int err = c.link->twin->link(cq.side)->ops.req_notify_cq(cq.real, solicited_only)) return err;
  return 0;
}

int ring(CqShadow& c, std::string& why) {
  QpShadow* on = nullptr;
  for (QpShadow* q : Registry::get().qps)
    if (q->send_cq == &c || q->recv_cq == &c) on = q;
  if (!on || !c.link || !c.app.channel) return 0;
  if (!c.link->bell) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = c.real;
    init.cap = {.max_send_wr = 1, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    ibv_qp* const bell = events::with_kernel_fd(*c.context->real, [&] { return create_on(on->init.pd, init, c.link->twin->home->config.port, 0, why); });
    if (!bell) return errno ? errno : EIO;
    std::lock_guard guard(c.lock);
    c.link->bell = bell;
  }
  ibv_recv_wr wr{.wr_id = marker::next(), .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad;
  {
    std::lock_guard guard(c.lock);
    auto& rings = c.link->rings;  // those that have been heard
    std::erase_if(rings, [&](std::uint64_t id) {
      return std::erase_if(c.seen_markers, [&](const ibv_wc& wc) { return wc.wr_id == id; }) > 0;
    });
    rings.push_back(wr.wr_id);
    ++c.markers;
    if (c.last_solicited_only) c.context->ops.req_notify_cq(c.real, 0);  // to some kernels what is flushed is not solicited
  }
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  int err = c.context->ops.post_recv(c.link->bell, &wr, &bad);
  if (!err) {
    err = real().modify_qp(c.link->bell, &to, IBV_QP_STATE);
  } else {
    std::lock_guard guard(c.lock);
    c.link->rings.pop_back();
    --c.markers;
    if (err == ENOMEM) err = 0;  // it rings already
  }
  if (err) why = std::string("cannot wake a completion channel: ") + std::strerror(err);
  return err;
}

bool hides_errors(QpShadow& q) {
  if (q.adrift || guarded(q)) return true;
  return q.link && (q.link->stage == Stage::kReady || q.link->stage == Stage::kDraining || q.link->stage == Stage::kChanging);
}

bool has_changed(const QpShadow& q) { return q.link && has_changed(*q.link); }

bool on_backup(const QpShadow& q) { return q.link && q.link->on != kHome; }

bool changing(const QpShadow& q) {
  return q.link && (q.link->stage == Stage::kChanging || q.link->stage == Stage::kDraining || outlasted(*q.link));
}

}  // namespace migr::links

namespace {

int say_down(const char* device, std::uint32_t port, bool down) {
  using namespace migr;
  const NoCancel no_cancel;
  std::lock_guard guard(Registry::get().lock);
  links::Link* const link = links::state() && device ? links::link_of(device, port) : nullptr;
  if (!link) return ENOENT;
  link->said_down = down;
  if (down) links::leave_link(*link);
  links::changed();
  return 0;
}

}  // namespace

extern "C" {

[[gnu::visibility("default")]] int migr_link_down(const char* device, std::uint32_t port) { return say_down(device, port, true); }
[[gnu::visibility("default")]] int migr_link_up(const char* device, std::uint32_t port) { return say_down(device, port, false); }

}
