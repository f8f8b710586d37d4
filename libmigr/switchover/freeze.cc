/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "../datagrams.h"
#include "../events.h"
#include "../kernel_link.h"
#include "../maps.h"
#include "../provider/provider.h"
#include "../real.h"
#include "ahead.h"
#include "parts.h"

namespace migr::switchover {
namespace {

/// What a NIC writes once the other ends are drained: with reliable connections nothing.
bool all_are_reliable() {
  return std::all_of(Registry::get().qps.begin(), Registry::get().qps.end(), [](const QpShadow* q) {
    const ibv_qp_type type = q->init.qp_type;
    return type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND || type == IBV_QPT_XRC_RECV;
  });
}

/// The parts that migrd has found to be written to. @return false: it does not know all of them, or memory is no more where it was
bool touch_written() {
  const auto& written = Registry::get().written;
  return written && all_are_reliable() && std::all_of(written->begin(), written->end(), [](const migr_memory_part& part) {
    return !touch_pages(reinterpret_cast<const void*>(part.start), part.bytes, IBV_ACCESS_LOCAL_WRITE);
  });
}

std::uintptr_t page_bytes() {
  static const auto bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

/// Where they begin, and where they end.
std::pair<std::uintptr_t, std::uintptr_t> whole_pages(const void* address, std::size_t length) {
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  return {start / page_bytes() * page_bytes(), (start + length + page_bytes() - 1) / page_bytes() * page_bytes()};
}

std::string lost(const MrShadow& mr) { return "memory of " + std::to_string(mr.app.length) + " bytes is registered, and not mapped or not writable any more"; }

bool is_there(const MrShadow& mr, const std::vector<Mapped>& mapped) {
  auto at = reinterpret_cast<std::uintptr_t>(mr.app.addr);
  const std::uintptr_t end = at + mr.app.length;
  auto m = std::partition_point(mapped.begin(), mapped.end(), [at](const Mapped& x) { return x.end <= at; });
  for (; at < end; at = m++->end)
    if (m == mapped.end() || m->start > at || !(mr.access & kWritable ? m->writable : m->readable)) return false;
  return true;
}

int touch_all(std::string& why) {
  if (touch_written()) return 0;
  for (const MrShadow* mr : Registry::get().mrs)
    if (const int err = touch_pages(mr->app.addr, mr->app.length, mr->access)) return fail(why, err, lost(*mr));
  return 0;
}

int freeze_srq(SrqShadow& s, std::string& why) {
  std::lock_guard guard(s.lock);
  if (!(s.state.load(std::memory_order_relaxed) & kSuspendedSrq)) {
    why = "a shared receive queue was made after the suspension";  // nobody has looked whether a thread posts to it
    return EBUSY;
  }
  set_srq_bits(s, kFrozenSrq);
  s.reading_back = true;
  ibv_srq_attr attr{};
  if (const int err = real().query_srq(s.real, &attr)) return fail(why, err, "query_srq");
  // A limit that was reached and whose event nobody has read: the next receive that is used shall tell again.
  s.limit = s.counted_here ? s.armed : attr.srq_limit ? attr.srq_limit : s.armed ? s.max_wr : 0;
  return 0;
}

/// @param of_srqs of each one's. Not its own yet: as long as completions come threads post as much again, and that has to have room
int read_back_all(std::vector<std::vector<KeptReceive>>& of_srqs, std::string& why) {
  const VirtualLkeys keys;
  of_srqs.clear();
  for (SrqShadow* s : Registry::get().srqs) {
    std::lock_guard guard(s->lock);
    if (const int err = read_back_receives(*s, keys, of_srqs.emplace_back(), why)) return err;
  }
  for (QpShadow* q : Registry::get().qps) {
    std::lock_guard guard(q->lock);
    if (const int err = read_back_receives(*q, keys, q->outstanding, why)) return err;
  }
  return 0;
}

/// Datagrams come until the very stop. What was used before the read-back has completed, into the fake CQs; what is used after it
/// is among what was read back, and its completion stays in the device's CQ. Posts are kept already, so this comes to an end.
int stop_completions(std::string& why) {
  const auto& cqs = Registry::get().cqs;
  const auto& srqs = Registry::get().srqs;
  for (Patience patience;;) {
    std::vector<std::uint64_t> before;
    std::vector<std::vector<KeptReceive>> of_srqs;
    for (CqShadow* c : cqs) {
      std::lock_guard guard(c->lock);
      path::poll_to_fake(*c);
      before.push_back(c->last_cqe_ns);  // also when the application polls meanwhile
    }
    if (const int err = read_back_all(of_srqs, why)) return err;
    pause_briefly();  // a completion comes a moment after its receive is used
    std::vector<std::unique_lock<std::mutex>> held;
    bool quiet = true;
    for (std::size_t i = 0; i < cqs.size(); ++i) {
      held.emplace_back(cqs[i]->lock);
      path::poll_to_fake(*cqs[i]);
      quiet = quiet && cqs[i]->last_cqe_ns == before[i];
    }
    if (quiet) {
      for (CqShadow* c : cqs) c->state.fetch_or(kFakeCq | kFrozenCq, std::memory_order_relaxed);
      held.clear();
      for (std::size_t i = 0; i < srqs.size(); ++i) {
        std::lock_guard guard(srqs[i]->lock);
        srqs[i]->outstanding = std::move(of_srqs[i]);
        srqs[i]->reading_back = false;
      }
      return 0;
    }
    if (patience.over()) return fail(why, ETIMEDOUT, "completions do not come to an end");
  }
}

/// Asynchronous events are acknowledged when they are read; what a new object has reported is counted from zero.
void note_acknowledged() {
  const auto note = [](auto& shadow, const std::uint32_t& completed) {
    pthread_mutex_lock(&shadow.real->mutex);
    shadow.acked_before = completed;
    pthread_mutex_unlock(&shadow.real->mutex);
  };
  const Registry& registry = Registry::get();
  for (CqShadow* c : registry.cqs) note(*c, c->real->async_events_completed);
  for (SrqShadow* s : registry.srqs) note(*s, s->real->events_completed);
  for (QpShadow* q : registry.qps) note(*q, q->real->events_completed);
}

/// Takes back what FREEZE has done so far. Who has connections is drained again: it sends when ROLLBACK comes, as the other ends of those
/// that were cut cannot take anything before OLD_PATH, or when migrd has been gone for long. Nobody goes back for a process without.
int thaw(int err) {
  std::string ignored;
  for (CqShadow* c : Registry::get().cqs) {
    set_cq_bits(*c, 0, kFrozenCq);
    (void)return_cq_events(*c, ignored);  // also the arming that a probe has used up
  }
  for (QpShadow* q : Registry::get().qps) {
    std::lock_guard guard(q->lock);
    if (q->phase == Phase::kFrozen) q->phase = Phase::kDrained;
  }
  if (process_state() != MIGR_PROC_SUSPENDED) rollback(ignored);
  return err;
}

int leave_module(std::string& why) {
  int err = 0;
  for (const Context* context : Registry::get().contexts)
    if (!err) err = context->kernel->detach();
  if (!err) return 0;
  for (const Context* context : Registry::get().contexts) (void)context->kernel->reattach(context->real->cmd_fd);
  return fail(why, err, "no room for empty tables in the place of migr.ko's");
}

}  // namespace

int touch_pages(const void* address, std::size_t length, int access) {
  static const bool left_out = getenv("MIGR_TEST_NO_TOUCH") != nullptr;
  if (left_out || !length || !(access & kWritable)) return 0;
  const auto [from, to] = whole_pages(address, length);
  return madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE) ? errno : 0;
}

bool touch_unmarked(const void* address, std::size_t length, bool own) {
  constexpr std::uint64_t kMarked = 1ull << 55, kShared = 1ull << 61, kThere = 3ull << 62;  // of /proc/self/pagemap; the last: in memory, or swapped out
  const std::uint64_t left_alone = own ? kMarked | kShared : kMarked;
  constexpr std::size_t kAtOnce = 512;
  const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  auto [at, to] = whole_pages(address, length);
  std::uint64_t entries[kAtOnce];
  bool all = true;
  while (at < to) {
    const std::size_t wanted = std::min(kAtOnce, (to - at) / page_bytes()) * sizeof *entries;
    const ssize_t got = pread(fd, entries, wanted, static_cast<off_t>(at / page_bytes() * sizeof *entries));
    const std::size_t count = got > 0 ? static_cast<std::size_t>(got) / sizeof *entries : 0;
    if (!count) break;
    const auto unmarked = [&](std::size_t i) { return i < count && entries[i] & kThere && !(entries[i] & left_alone); };
    for (std::size_t i = 0, end; i < count; i = end + 1) {
      for (end = i; unmarked(end);) ++end;
      all = !touch_pages(reinterpret_cast<const void*>(at + i * page_bytes()), (end - i) * page_bytes(), IBV_ACCESS_LOCAL_WRITE) && all;
    }
    at += count * page_bytes();
  }
  close(fd);
  return all && at >= to;
}

std::string lost_memory() {
  std::vector<Mapped> mapped;
  if (for_each_mapped([&](const Mapped& m) { mapped.push_back(m); })) return {};  // FREEZE says so
  for (const MrShadow* mr : Registry::get().mrs)
    if (!is_there(*mr, mapped)) return lost(*mr);
  return {};
}

int unfreeze_srq(SrqShadow& s, std::string& why) {
  std::lock_guard guard(s.lock);
  const int err = post_out(s, s.kept, path::post_one_receive, why);
  s.outstanding.clear();
  s.kept.clear();
  s.reading_back = false;
  set_srq_bits(s, 0, kFrozenSrq);
  return err;
}

int freeze(std::string& why) {
  Registry& registry = Registry::get();
  for (const MrShadow* mr : registry.mrs)
    if (!mr->movable) {
      why = "an MR of " + std::to_string(mr->app.length) + " bytes cannot be registered again elsewhere";
      return EOPNOTSUPP;
    }
  if (const int err = check_arcs(registry.qps, Phase::kFrozen, why)) return err;
  std::vector<std::uint64_t> last_cqes;
  for (CqShadow* c : registry.cqs) {
    std::lock_guard guard(c->lock);
    path::poll_to_fake(*c);  // DRAIN has not, where there is no QP
    last_cqes.push_back(c->last_cqe_ns);
  }
  if (const int err = collect_cq_events(why)) return thaw(err);
  int err = 0;
  (void)provider::locate_queues(registry.qps);
  (void)provider::locate_queues(registry.srqs);
  for (Context* context : registry.contexts) events::collect(*context->real);
  for (SrqShadow* s : registry.srqs)
    if (!err) err = freeze_srq(*s, why);
  for (QpShadow* q : registry.qps) {
    std::lock_guard guard(q->lock);
    set_bits(*q, kKeepReceives);
    q->phase = Phase::kFrozen;
  }
  if (!err) err = stop_completions(why);
  if (!err) err = touch_all(why);
  if (err) return thaw(err);
  collect_late_cq_events(last_cqes);
  ahead::leave();
  datagrams::note_gids();
  if ((err = leave_module(why))) return thaw(err);
  events::frozen();
  note_acknowledged();
  registry.frozen = true;
  return 0;
}

}  // namespace migr::switchover
