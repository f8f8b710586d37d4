// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What has begun on this host and is under way, with all its tries: as others see it meanwhile.
#pragma once

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

  void begin(std::uint32_t id) {
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
  mutable std::mutex mutex_;
  Place place_;
};

}  // namespace migr
