/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Threads of the application may be cancelled. */
#ifndef MIGR_NO_CANCEL_H
#define MIGR_NO_CANCEL_H

#include <pthread.h>

#include <utility>

namespace migr {

/// The calling thread is not cancelled while this lives. No destructor would run, and a lock would stay taken; and what a call of verbs
/// does in the driver, and how it waits here, is no place to be cancelled at without us. A cancellation is kept until after it.
class NoCancel {
 public:
  NoCancel() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  NoCancel(NoCancel&& other) noexcept : before_(std::exchange(other.before_, kMoved)) {}
  NoCancel& operator=(NoCancel&&) = delete;
  ~NoCancel() {
    if (before_ != kMoved) pthread_setcancelstate(before_, nullptr);
  }

 private:
  static constexpr int kMoved = -1;
  int before_;
};

}  // namespace migr

#endif
