// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Threads that nobody joins, and that use what ends with their owner: the last member of that.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
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
  /// @return false: nothing is done, for they are to end, or there is no thread for it now
  template <class F>
  [[nodiscard]] bool start(F&& f) {
    {
      std::lock_guard lock(mutex_);
      if (ends_) return false;
      left_++;
    }
    try {
      std::thread([this, work = std::forward<F>(f)]() mutable {
        {
          const auto once = std::move(work);
          once();
        }  // what it holds goes, too
        one_less();
      }).detach();
    } catch (const std::system_error&) {
      one_less();
      return false;
    }
    return true;
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
  void one_less() {
    std::lock_guard lock(mutex_);
    left_--;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> ends_ = false;
  unsigned left_ = 0;
};

}  // namespace migr
