/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Threads of the library's own in the application's process. */
#ifndef MIGR_QUIET_THREAD_H
#define MIGR_QUIET_THREAD_H

#include <pthread.h>
#include <signal.h>

namespace migr {

/// Gets none of the application's signals. @return 0 or a positive errno
inline int start_quiet_thread(pthread_t& thread, void* (*run)(void*), void* arg, const char* name) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread, nullptr, run, arg);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!error) pthread_setname_np(thread, name);
  return error;
}

}  // namespace migr

#endif
