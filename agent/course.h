// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What has begun on this host and is under way, with all its tries: as others see it meanwhile, and may end it.
#pragma once

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "clock.h"
#include "status.h"

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
  bool cancel() { return give_up({ECANCELED, "cancelled by the operator"}); }
  /// The same for another reason. The first that is given counts.
  bool give_up(Error why) {
    std::lock_guard lock(mutex_);
    if (!decided_ && !given_up_) given_up_ = std::move(why);
    return !decided_;
  }
  /// Error: it was given up, and why.
  Status goes_on() const {
    std::lock_guard lock(mutex_);
    return given_up_ ? Status(*given_up_) : Status();
  }
  /// The commit record may be written. @return false: it was given up
  bool decide() {
    std::lock_guard lock(mutex_);
    return decided_ = !given_up_;
  }

  void begin(std::uint32_t id) {
    std::lock_guard lock(mutex_);
    decided_ = false;  // the destination of the try before has denied it
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
  mutable std::mutex mutex_;  // guards what follows
  std::optional<Error> given_up_;
  bool decided_ = false;
  Place place_;
};

}  // namespace migr
