/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What migrd has to be told of changes. */
#ifndef MIGR_LINKS_REPORTS_H
#define MIGR_LINKS_REPORTS_H

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "../../include/migr/links_wire.h"

namespace migr::links {

/// In their order. While migrd is away the newest are kept.
class Reports {
 public:
  static constexpr std::size_t kMost = 4096;
  void add(const migr_links_switch& one) {
    if (all_.size() == kMost) all_.pop_front(), ++dropped_;
    all_.push_back(one);
  }
  /// @param dropped  so many before them, since the last time
  std::vector<migr_links_switch> take(std::uint64_t& dropped) {
    dropped = std::exchange(dropped_, 0);
    const std::deque<migr_links_switch> all = std::exchange(all_, {});
    return {all.begin(), all.end()};
  }

 private:
  std::deque<migr_links_switch> all_;
  std::uint64_t dropped_ = 0;
};

}  // namespace migr::links

#endif
