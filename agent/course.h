// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What has begun on this host and is under way, with all its tries: as others see it meanwhile, and may end it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "clock.h"

namespace migr {

/// Thread: any.
class Course {
 public:
  struct Place {
    std::uint32_t id = 0;             // of this try
    std::string phase{};              // the last that has begun; empty: none
    std::uint64_t bytes = 0, of = 0;  // that are sent just now; `of` 0: none, or not known
  };
  explicit Course(std::string what = {}, std::string where = {}, std::uint32_t id = 0) : container(std::move(what)), to(std::move(where)), place_{.id = id} {}

  const std::string container;  // or the folder that is restored
  const std::string to;         // a host, or the folder that it is stored in
  const std::int64_t begun_s = unix_now();

  /// It goes back at its next step, as after any failure, and is not tried again. @return false: its commit is decided
  bool cancel() { return move_to(kCancelled); }
  bool cancelled() const { return state_ == kCancelled; }
  /// The commit record may be written. @return false: it is cancelled
  bool decide() { return move_to(kDecided); }

  void begin(std::uint32_t id) {
    State denied = kDecided;  // by the destination of the try before
    state_.compare_exchange_strong(denied, kOpen);
    std::lock_guard lock(mutex_);
    place_ = {.id = id};
  }
  void is_at(const std::string& phase, std::uint64_t bytes, std::uint64_t of) {
    std::lock_guard lock(mutex_);
    place_.phase = phase;
    place_.bytes = bytes;
    place_.of = of;
  }
  Place place() const {
    std::lock_guard lock(mutex_);
    return place_;
  }

 private:
  enum State { kOpen,
               kCancelled,
               kDecided };
  bool move_to(State next) {
    State from = kOpen;
    return state_.compare_exchange_strong(from, next) || from == next;
  }
  std::atomic<State> state_ = kOpen;
  mutable std::mutex mutex_;
  Place place_;
};

}  // namespace migr
