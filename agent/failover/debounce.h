// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is made of a state that flaps: down soon, up only when it has stayed up, and the longer the more often it was
// down lately.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>

namespace migr {

class Debounce {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    std::chrono::milliseconds down, up, up_max, flap;  // limits.h: kLink*Ms
  };

  /// What it is when first seen is told at once.
  Debounce(const Limits& limits, bool up) : limits_(limits), told_(up), seen_(up) {}

  /// What is seen. @return whether what is told has changed
  bool see(bool up, Clock::time_point now) {
    const bool before = told_;
    step(now);  // what was due before
    if (up != seen_) {
      seen_ = up;
      since_ = now;
    }
    step(now);
    return told_ != before;
  }
  /// @return whether what is told has changed
  bool step(Clock::time_point now) {
    if (seen_ == told_ || now < since_ + wait(now)) return false;
    told_ = seen_;
    if (!told_) {
      downs_.push_back(now);
      flaps_++;
    }
    return true;
  }
  /// When step() has to be called; nullopt: not before something is seen.
  std::optional<Clock::time_point> due(Clock::time_point now) {
    if (seen_ == told_) return std::nullopt;
    return since_ + wait(now);
  }
  bool up() const { return told_; }
  unsigned flaps() const { return flaps_; }

 private:
  std::chrono::milliseconds wait(Clock::time_point now) {
    if (!seen_) return limits_.down;
    while (!downs_.empty() && now - downs_.front() > limits_.flap) downs_.pop_front();
    auto ms = limits_.up;
    for (std::size_t i = 1; i < downs_.size() && ms < limits_.up_max; i++) ms *= 2;
    return std::min(ms, std::max(limits_.up, limits_.up_max));
  }

  const Limits limits_;
  bool told_, seen_;
  Clock::time_point since_{};
  std::deque<Clock::time_point> downs_;  // told, lately
  unsigned flaps_ = 0;
};

}  // namespace migr
