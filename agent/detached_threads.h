// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Threads that nobody joins, and that use what ends with their owner: the last member of that.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "limits.h"

namespace migr {

/// Thread: any.
class DetachedThreads {
 public:
  DetachedThreads() = default;
  DetachedThreads(const DetachedThreads&) = delete;
  DetachedThreads& operator=(const DetachedThreads&) = delete;
  ~DetachedThreads() {
    if (!end()) std::abort();
  }
  /// Nothing once they are to end.
  template <class F>
  void start(F&& f) {
    {
      std::lock_guard lock(mutex_);
      if (ends_) return;
      left_++;
    }
    std::thread([this, work = std::forward<F>(f)]() mutable {
      {
        const auto once = std::move(work);
        once();
      }  // what it holds goes, too
      std::lock_guard lock(mutex_);
      left_--;
      changed_.notify_all();
    }).detach();
  }
  /// They are to end: what goes on for long looks at it.
  const std::atomic<bool>& ends() const { return ends_; }
  /// From now on, and waits for that. @return false: one is in a call that takes longer
  bool end() {
    std::unique_lock lock(mutex_);
    ends_ = true;
    return changed_.wait_for(lock, std::chrono::milliseconds(kEndsMs), [this] { return !left_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> ends_ = false;
  unsigned left_ = 0;
};

}  // namespace migr
