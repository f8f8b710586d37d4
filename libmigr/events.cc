/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "events.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <set>

#include "high_fd.h"
#include "links/links.h"
#include "no_cancel.h"
#include "objects.h"
#include "real.h"
#include "unread.h"

namespace migr {
namespace {

constexpr unsigned kReaderMs = 20;  // a thread that waits for an event has taken it

enum class Element { kNone,
                     kQp,
                     kCq,
                     kSrq };

Element element_of(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return Element::kQp;
    case IBV_EVENT_CQ_ERR:
      return Element::kCq;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return Element::kSrq;
    default:
      return Element::kNone;
  }
}

/// Whether it is about an object that has a shadow, as the application knows it. Caller holds events_lock.
bool of_shadow(const Registry& registry, const ibv_async_event& event) {
  return element_of(event.event_type) != Element::kNone && registry.shadows.contains(event.element.qp);
}

bool ours(const Registry& registry, const ibv_context* ctx) {
  return ctx && std::find(registry.with_events.begin(), registry.with_events.end(), ctx) != registry.with_events.end();
}

/// Of one context, under events_lock.
struct Kept {
  std::deque<ibv_async_event> unread;    ///< as the application knows it
  std::deque<ibv_async_event> doubtful;  ///< of a QP, since the freeze
  int kernel_fd = -1;                    ///< where the context's own descriptor is, while another stands at its number
  unsigned turns = 0;                    ///< how often that has changed
  bool backed_up = false;                ///< see backed_up()
  std::set<int> ports_down;              ///< of which nobody was told
  std::set<int> ports_told_down;         ///< of which somebody was
};

bool in_doubt = false;  ///< FREEZE..REBIND or ROLLBACK; under events_lock

std::map<const ibv_context*, Kept>& all() {
  static auto* all = new std::map<const ibv_context*, Kept>;  // never destroyed: threads may outlive main()
  return *all;
}

/// What the overrun of a CQ of ours tells of, as the application knows it. Under events_lock.
std::map<const ibv_cq*, ibv_async_event>& bells() {
  static auto* bells = new std::map<const ibv_cq*, ibv_async_event>;
  return *bells;
}

Kept* kept_of(const ibv_context* ctx) {
  const auto found = all().find(ctx);
  return found == all().end() ? nullptr : &found->second;
}

/// Who watches the descriptor by epoll watches what it stood for: it has to be told of the other one.
void tell_epolls(int fd) {
  DIR* const dir = opendir("/proc/self/fdinfo");
  if (!dir) return;
  while (const dirent* e = readdir(dir)) {
    char path[sizeof "/proc/self/fdinfo/" + sizeof e->d_name], line[256];
    std::snprintf(path, sizeof path, "/proc/self/fdinfo/%s", e->d_name);
    FILE* const info = std::fopen(path, "re");
    while (info && std::fgets(line, sizeof line, info)) {
      int watched;
      unsigned wanted;
      std::uint64_t data;
      if (std::sscanf(line, "tfd: %d events: %x data: %" SCNx64, &watched, &wanted, &data) != 3 || watched != fd) continue;
      epoll_event event{};
      event.events = wanted;
      event.data.u64 = data;
      (void)epoll_ctl(std::atoi(e->d_name), EPOLL_CTL_ADD, fd, &event);  // it goes by itself when that is closed
    }
    if (info) std::fclose(info);
  }
  closedir(dir);
}

/// Puts `from` where `fd` is, which stays close-on-exec or not.
void put_at(int from, int fd) {
  const NoCancel no_cancel;
  const int flags = fcntl(fd, F_GETFD);
  dup3(from, fd, flags >= 0 && (flags & FD_CLOEXEC) ? O_CLOEXEC : 0);
  close_own(from);
}

void show(const ibv_context& ctx, Kept& kept) {
  if (kept.unread.empty() || kept.kernel_fd >= 0) return;
  const int bell = eventfd(1, EFD_CLOEXEC | (is_to_wait(ctx.async_fd) ? 0 : EFD_NONBLOCK));
  const int aside = bell < 0 ? -1 : to_high_fd(fcntl(ctx.async_fd, F_DUPFD_CLOEXEC, 0));
  if (aside < 0) {  // none is left: who asks gets what is kept all the same
    if (bell >= 0) close(bell);
    return;
  }
  kept.kernel_fd = aside;
  ++kept.turns;
  put_at(bell, ctx.async_fd);
  tell_epolls(ctx.async_fd);
}

void show_no_more(const ibv_context& ctx, Kept& kept) {
  if (kept.kernel_fd < 0) return;
  ++kept.turns;
  put_at(std::exchange(kept.kernel_fd, -1), ctx.async_fd);
}

/// Of a maker that we do not stand in front of; null is a helper of ours.
bool is_strange(const void* context_pointer) { return context_pointer && !Registry::get().shadows.contains(context_pointer); }

/// An event of a QP is about the path that serves `q`, and not about its end or a change of ours. Caller holds events_lock.
bool of_its_path(const QpShadow& q, const ibv_async_event& event) {
  if (event.element.qp != __atomic_load_n(&q.real, __ATOMIC_ACQUIRE) || event.element.qp == q.quiet) return false;
  return event.event_type != IBV_EVENT_QP_LAST_WQE_REACHED || !q.goes_on.load(std::memory_order_relaxed);  // the former is of one with an SRQ
}

/// Acknowledged to libibverbs at once, since the object behind may be replaced before the application does it. Caller holds
/// events_lock. @return false: it is about a path that is none any more
bool take(ibv_async_event& event) {
  ibv_async_event provided = event;
  bool its_own = true;
  switch (element_of(event.event_type)) {
    case Element::kQp: {
      if (is_strange(event.element.qp->qp_context)) return true;
      auto* shadow = static_cast<QpShadow*>(event.element.qp->qp_context);
      its_own = shadow && of_its_path(*shadow, event);
      if (its_own) event.element.qp = &shadow->app;
      break;
    }
    case Element::kCq: {
      const auto bell = bells().find(event.element.cq);
      if (is_strange(event.element.cq->cq_context)) return true;
      auto* const shadow = static_cast<CqShadow*>(event.element.cq->cq_context);
      its_own = bell != bells().end() || shadow;
      if (bell != bells().end()) {
        event = bell->second;
        bells().erase(bell);
      } else if (shadow) {
        event.element.cq = &shadow->app;
      }
      break;
    }
    case Element::kSrq: {
      if (is_strange(event.element.srq->srq_context)) return true;
      auto* shadow = static_cast<SrqShadow*>(event.element.srq->srq_context);
      if (event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED) {
        its_own = !shadow->counted_here;  // else it has been reached by receives that were led elsewhere
        if (its_own) shadow->armed = 0;
      }
      event.element.srq = &shadow->app;
      break;
    }
    case Element::kNone:
      return true;  // a port's, or a WQ's, which is the provider's own: the application acknowledges it
  }
  real().ack_async_event(&provided);
  return its_own;
}

/// It may be about a new QP that was put into its state: only REBIND or ROLLBACK will tell. Caller holds events_lock.
bool doubtful(const ibv_async_event& event, Kept& kept) {
  if (!in_doubt || element_of(event.event_type) != Element::kQp) return false;
  kept.doubtful.push_back(event);
  return true;
}

/// About a port that the connections do without. Caller holds events_lock.
bool unneeded(const ibv_async_event& event, Kept& kept) {
  if (event.event_type != IBV_EVENT_PORT_ACTIVE && event.event_type != IBV_EVENT_PORT_ERR) return false;
  const int port = event.element.port_num;
  const bool untold = kept.ports_down.erase(port);
  if (event.event_type == IBV_EVENT_PORT_ACTIVE) {
    const bool told = kept.ports_told_down.erase(port);
    return untold || (kept.backed_up && !told);  // soft-RoCE may say it twice
  }
  if (kept.backed_up) kept.ports_down.insert(port);
  else kept.ports_told_down.insert(port);
  return kept.backed_up;
}

/// @param by how many more, or fewer, the application has to acknowledge. Caller holds events_lock
void count(const ibv_async_event& event, int by) {
  if (!of_shadow(Registry::get(), event)) return;
  const auto add = [&](auto& shadow) { shadow.unacked_events += static_cast<unsigned>(by); };
  switch (element_of(event.event_type)) {
    case Element::kQp:
      return add(shadow_of(event.element.qp));
    case Element::kCq:
      return add(shadow_of(event.element.cq));
    case Element::kSrq:
      return add(shadow_of(event.element.srq));
    case Element::kNone:
      return;
  }
}

void give(const ibv_context& ctx, Kept& kept, ibv_async_event& event) {
  event = kept.unread.front();
  kept.unread.pop_front();
  count(event, 1);
  if (kept.unread.empty()) show_no_more(ctx, kept);
}

/// A port of this host is up where one of the other was down. That it works is said if that was next to be read: somebody may have been told that it did not.
void forget_ports(Kept& kept) {
  kept.ports_down.clear();
  kept.ports_told_down.clear();
  std::erase_if(kept.unread, [](const ibv_async_event& e) { return e.event_type == IBV_EVENT_PORT_ERR; });
}

/// A thread in ibv_get_async_event() that waits for the kernel is not told of what is kept: but it is there first.
void let_readers_read(int fd) {
  constexpr unsigned kStepMs = 2;
  for (unsigned ms = 0; ms < kReaderMs; ms += kStepMs) {
    pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
    if (poll(&p, 1, 0) != 1 || !(p.revents & POLLIN)) return;
    const timespec pause{.tv_sec = 0, .tv_nsec = kStepMs * 1'000'000};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace

namespace events {

void collect(ibv_context& ctx) {
  if (ctx.async_fd < 0) return;
  Registry& registry = Registry::get();
  std::unique_lock guard(registry.events_lock);
  if (!kept_of(&ctx) || kept_of(&ctx)->kernel_fd < 0) {
    guard.unlock();
    let_readers_read(ctx.async_fd);
    guard.lock();
  }
  if (!ours(registry, &ctx)) return;
  Kept& kept = all()[&ctx];
  show_no_more(ctx, kept);
  if (!is_readable(ctx.async_fd)) return;
  const WithoutWaiting now(ctx.async_fd);
  ibv_async_event event;
  while (real().get_async_event(&ctx, &event) == 0)
    if (take(event) && !unneeded(event, kept) && !doubtful(event, kept)) kept.unread.push_back(event);
}

void frozen() {
  std::lock_guard guard(Registry::get().events_lock);
  in_doubt = true;
}

void thawed(bool restored) {
  if (restored) {
    {
      std::lock_guard guard(Registry::get().events_lock);
      if (in_doubt)  // a REBIND that is repeated may have heard of this host's
        for (auto& [ctx, kept] : all()) forget_ports(kept);
    }
    for (const Context* c : Registry::get().contexts) collect(*c->real);
  }
  std::lock_guard guard(Registry::get().events_lock);
  in_doubt = false;
  for (auto& [ctx, kept] : all()) {
    if (!restored) kept.unread.insert(kept.unread.end(), kept.doubtful.begin(), kept.doubtful.end());
    kept.doubtful.clear();
  }
}

void offer(ibv_context& ctx) {
  std::lock_guard guard(Registry::get().events_lock);
  if (Kept* kept = kept_of(&ctx)) show(ctx, *kept);
}

int kernel_fd(const ibv_context& ctx) {
  const Kept* const kept = kept_of(&ctx);
  return kept && kept->kernel_fd >= 0 ? kept->kernel_fd : ctx.async_fd;
}

void hush(QpShadow& q, const ibv_qp* qp) {
  std::lock_guard guard(Registry::get().events_lock);
  q.quiet = qp;
}

bool is_told(const QpShadow& q, const ibv_async_event& event) {
  std::lock_guard guard(Registry::get().events_lock);
  return element_of(event.event_type) == Element::kQp && of_its_path(q, event);
}

void will_tell(const ibv_cq* bell, const ibv_async_event& event) {
  std::lock_guard guard(Registry::get().events_lock);
  if (event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED) shadow_of(event.element.srq).armed = 0;
  bells()[bell] = event;
}

bool rings(const ibv_cq* bell) {
  std::lock_guard guard(Registry::get().events_lock);
  return bells().contains(bell);
}

void still(const ibv_cq* bell, ibv_context& ctx) {
  if (rings(bell)) collect(ctx), offer(ctx);
  std::lock_guard guard(Registry::get().events_lock);
  bells().erase(bell);
}

void backed_up(const ibv_context& ctx, bool is) {
  std::lock_guard guard(Registry::get().events_lock);
  all()[&ctx].backed_up = is;
}

void forget(const void* object) {
  std::lock_guard guard(Registry::get().events_lock);
  for (auto& [ctx, kept] : all()) {
    for (auto* some : {&kept.unread, &kept.doubtful})
      std::erase_if(*some, [&](const ibv_async_event& e) { return element_of(e.event_type) != Element::kNone && e.element.qp == object; });
    if (kept.unread.empty()) show_no_more(*ctx, kept);
  }
}

void dropped(ibv_context& ctx) {
  std::lock_guard guard(Registry::get().events_lock);
  Kept* const kept = kept_of(&ctx);
  if (!kept) return;
  show_no_more(ctx, *kept);
  all().erase(&ctx);
}

}  // namespace events
}  // namespace migr

using namespace migr;

// The Registry's lock is not taken here: a thread that destroys the object holds it while it waits for us.
MIGR_EXPORT int ibv_get_async_event(ibv_context* ctx, ibv_async_event* event) {
  Registry& registry = Registry::get();
  const auto turns = [&] { return kept_of(ctx) ? kept_of(ctx)->turns : 0; };
  for (;;) {
    std::unique_lock guard(registry.events_lock);
    if (Kept* kept = kept_of(ctx); kept && !kept->unread.empty()) return give(*ctx, *kept, *event), 0;
    const unsigned before = turns();
    guard.unlock();
    const int err = real().get_async_event(ctx, event);
    const int saved = errno;
    guard.lock();
    if (err && turns() == before && !(saved == EAGAIN && is_to_wait(ctx->async_fd))) return errno = saved, err;
    if (err) {
      // collect() was at work meanwhile. What was read may be what it has put there, and poll(2) has to say so of the rest.
      if (const Kept* kept = kept_of(ctx); kept && kept->kernel_fd >= 0) links::kick(ctx->async_fd);
      continue;
    }
    if (!ours(registry, ctx)) return 0;
    if (!take(*event) || unneeded(*event, all()[ctx]) || (in_doubt && doubtful(*event, all()[ctx]))) continue;
    if (Kept* kept = kept_of(ctx); kept && !kept->unread.empty()) {
      kept->unread.push_back(*event);
      return give(*ctx, *kept, *event), 0;
    }
    return count(*event, 1), 0;
  }
}

MIGR_EXPORT void ibv_ack_async_event(ibv_async_event* event) {
  Registry& registry = Registry::get();
  {
    std::lock_guard guard(registry.events_lock);
    if (of_shadow(registry, *event)) {
      count(*event, -1);
      registry.event_acked.notify_all();
      return;
    }
  }
  real().ack_async_event(event);
}
