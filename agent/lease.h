// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A migration as a host sees it that takes part but does not coordinate: the coordinator renews a lease; when it falls
// silent the host finds out by itself what became of the migration.
#pragma once

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "authorization.h"
#include "detached_threads.h"
#include "fault.h"
#include "journal.h"
#include "limits.h"
#include "log.h"
#include "status.h"
#include "wire.pb.h"

namespace migr {

using Clock = std::chrono::steady_clock;

/// What the jobs of a destination and of a partner have in common.
struct LeasedJob {
  std::uint32_t id = 0;
  std::string source;  // the coordinator's host
  std::int64_t begun_s = 0;
  std::mutex work;                     // one call at a time
  std::atomic<bool> aborting = false;  // a call that waits, or that waited, has to end
  std::atomic<wire::Outcome> outcome = wire::OPEN;
  std::atomic<bool> finished = false;                  // nothing is left to do
  std::atomic<bool> unsaved = false;                   // what is on the disk is older; after a start that would be acted on, so tick() writes again
  std::atomic<bool> alone = false;                     // somebody asks for the outcome already
  std::atomic<wire::Outcome> ordered = wire::UNKNOWN;  // by the operator

  wire::Outcome get() const { return outcome; }
  void renew() { lease_ = Clock::now().time_since_epoch().count(); }
  void expire() { lease_ = (Clock::now() - std::chrono::milliseconds(2 * kLeaseMs)).time_since_epoch().count(); }
  Clock::duration silent() const { return Clock::now().time_since_epoch() - Clock::duration(lease_.load()); }
  bool renewed() const { return silent() < std::chrono::milliseconds(kLeaseMs); }
  /// Pauses of a host that asks: short ones for kResolveMs, then long ones.
  class Pace {
   public:
    bool patient() const { return Clock::now() < until_; }
    /// Not for the first word of the operator; but if that did not help the next try is no earlier than others.
    void wait(const LeasedJob& job, const std::atomic<bool>& ends) {
      const int ms = patient() ? kResolveStepMs : kResolveSlowMs;
      for (int waited = 0; waited < ms && !ends; waited += 100) {
        if (job.ordered != wire::UNKNOWN && !std::exchange(told_, true)) return;
        usleep(100'000);
      }
    }

   private:
    bool told_ = false;
    const Clock::time_point until_ = Clock::now() + std::chrono::milliseconds(kResolveMs);
  };

 private:
  std::atomic<Clock::rep> lease_ = Clock::now().time_since_epoch().count();
};

/// What nobody has to wait for: done in a thread of its own, once, however often it is asked for: RESUME may come again when its
/// answer was lost. Ends with the job, whose last member it is. Caller of run() and again() holds job.work.
class Afterwards {
 public:
  ~Afterwards() { end(); }
  /// Waits for it; what has not got a thread yet is not done any more. Not together with run() or again().
  void end() {
    waits_ = nullptr;
    if (thread_.joinable()) thread_.join();
  }
  /// Where there is no thread it waits for again(): the caller's would wait for job.work, or for others.
  template <class F>
  void run(F&& f) {
    if (thread_.joinable() || waits_) return;
    waits_ = with_log_fields(std::forward<F>(f));
    again();
  }
  /// What run() had no thread for. Of tick().
  void again() {
    if (!waits_) return;
    try {
      thread_ = std::thread(waits_);
      waits_ = nullptr;
    } catch (const std::system_error& e) {
      spdlog::error("no thread for what is left to do, which is tried again: {}", e.what());
    }
  }
  bool waits() const { return bool(waits_); }

 private:
  std::function<void()> waits_;
  std::thread thread_;
};

/// A step between its fault points, and a line of it in the log: one grep for the number tells the story on every host.
template <class F>
Status job_step(const std::string& faults, std::uint32_t id, FaultStep step, F&& work) {
  const auto began = Clock::now();
  LogScope log(id);
  log->phase = kFaultSteps[static_cast<std::size_t>(step)];
  const Status s = fault_step(faults, step, std::forward<F>(work));
  log->ms = std::chrono::duration<double, std::milli>(Clock::now() - began).count();
  spdlog::log(s ? spdlog::level::info : spdlog::level::warn, "{}", s ? "done" : "failed: " + s.error().text);
  return s;
}

/// All migrations that a host takes part in, in one role. Thread: any.
template <class Job>
class LeasedJobs {
 public:
  using Ptr = std::shared_ptr<Job>;
  /// Of before. Before the first find().
  void set_unread(Unread unread) { unread_ = std::move(unread); }
  /// ENOENT: there is none; EIO: or it could not be read.
  Result<Ptr> find(std::uint32_t id) const {
    std::lock_guard lock(mutex_);
    const auto j = jobs_.find(id);
    if (j != jobs_.end()) return j->second;
    if (auto s = unread_.of(id); !s) return s.error();
    return Error{ENOENT, "no migration " + migration_text(id) + " here"};
  }
  /// For a call of its coordinator. EPERM: it is another's.
  Result<Ptr> find(std::uint32_t id, const Caller& who) const {
    auto job = find(id);
    if (job)
      if (auto s = coordinates(who, id, (*job)->source); !s) return s.error();
    return job;
  }
  /// EEXIST: there is one of that number.
  Status add(const Ptr& job) {
    std::lock_guard lock(mutex_);
    if (!job->id || !jobs_.emplace(job->id, job).second) return Error{EEXIST, "a migration of that number is here"};
    return {};
  }
  std::vector<Ptr> all() const {
    std::lock_guard lock(mutex_);
    std::vector<Ptr> out;
    for (const auto& [id, j] : jobs_) out.push_back(j);
    return out;
  }
  Status renew(std::uint32_t id, const Caller& who) {
    auto job = find(id, who);
    if (!job) return job.error();
    if ((*job)->get() == wire::UNDONE) return Error{ENOENT, "undone here"};
    (*job)->renew();
    return {};
  }
  /// Jobs whose lease ran out are given to `left_alone`, in a thread of their own; what is unsaved is given to `save`, with its lock; what is long
  /// finished goes.
  void tick(const std::function<void(const Ptr&)>& left_alone, const std::function<void(const Ptr&)>& save, const std::function<void(const Ptr&)>& goes) {
    for (const Ptr& job : all()) {
      if (job->unsaved)
        if (const std::unique_lock work(job->work, std::try_to_lock); work) save(job);
      if (job->finished) {
        if (job->silent() < kKeepOutcome) continue;
        goes(job);
        std::lock_guard lock(mutex_);
        jobs_.erase(job->id);
        continue;
      }
      if (job->renewed() || job->alone.exchange(true)) continue;
      const bool started = threads_.start([job, left_alone] {
        const LogScope log(job->id);
        spdlog::warn("{} is silent", job->source);
        left_alone(job);
        job->alone = false;
      });
      if (!started) job->alone = false;  // the next time
    }
  }
  /// Of who was left alone.
  const std::atomic<bool>& ends() const { return threads_.ends(); }
  bool end() { return threads_.end(); }

 private:
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Ptr> jobs_;
  Unread unread_;
  DetachedThreads threads_;
};

}  // namespace migr
