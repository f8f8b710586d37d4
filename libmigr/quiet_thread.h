/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Threads of the library's own in the application's process. */
#ifndef MIGR_QUIET_THREAD_H
#define MIGR_QUIET_THREAD_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <new>

namespace migr {

/// The calling thread gets no signals while this lives.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

/// What the process might run on when the library was loaded.
inline const cpu_set_t cpus_at_load = [] {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus)) CPU_ZERO(&cpus);
  return cpus;
}();

/// How many of the process's threads are of start_quiet_thread(). Each counts itself: never more than there are.
inline std::atomic<int> quiet_threads{0};

/// Gets none of the application's signals, and is scheduled as any thread: the one that makes it may be pinned, and never sleep.
/// @return 0 or a positive errno
inline int start_quiet_thread(pthread_t& thread, void* (*run)(void*), void* arg, const char* name) {
  struct Start {
    void* (*run)(void*);
    void* arg;
  };
  auto* const start = new (std::nothrow) Start{run, arg};
  if (!start) return ENOMEM;
  const auto counted = [](void* from) -> void* {
    const Start what = *static_cast<Start*>(from);
    delete static_cast<Start*>(from);
    ++quiet_threads;
    void* const result = what.run(what.arg);
    --quiet_threads;
    return result;
  };
  const WithoutSignals inherited;
  pthread_attr_t attr;
  pthread_attr_init(&attr);
  pthread_attr_setinheritsched(&attr, PTHREAD_EXPLICIT_SCHED);
  if (CPU_COUNT(&cpus_at_load)) pthread_attr_setaffinity_np(&attr, sizeof cpus_at_load, &cpus_at_load);
  int error = pthread_create(&thread, &attr, counted, start);
  if (error) error = pthread_create(&thread, nullptr, counted, start);  // none of those processors is this process's any more
  pthread_attr_destroy(&attr);
  if (error) delete start;
  else pthread_setname_np(thread, name);
  return error;
}

}  // namespace migr

#endif
