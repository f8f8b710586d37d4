// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Where vQPNs were born. A QP is known to its peers by the GID and number of its birth for as long as it lives, so the
// host it was born on gives that number to nobody else while it lives elsewhere.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "config.h"
#include "process_session.h"

namespace migr {

/// What a host knows of it. Pure: the caller keeps it and tells migr.ko.
class BornBook {
 public:
  /// As text() gave it; what is damaged is empty.
  explicit BornBook(const std::string& text = {});
  std::string text() const;

  /// Processes go, with these numbers. @return those to be reserved: born here
  std::vector<std::uint32_t> leave(const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns, bool first_life);
  /// Processes come, with these. @return those to be released: born here, and of no other that is away
  std::vector<std::uint32_t> arrive(const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns);

 private:
  struct Entry {
    std::set<std::uint32_t> born, foreign;
    bool away = false;
  };
  std::map<std::string, Entry> all_;  // by instance, in hexadecimal
};

/// The same with the book in DIR/born.json and migr.ko told.
/// @param first_life  they were never restored: all their numbers were born here
Status reserve_born(const Config& config, const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns, bool first_life);
Status release_born(const Config& config, const std::vector<Instance>& who, const std::vector<std::uint32_t>& vqpns);

}  // namespace migr
