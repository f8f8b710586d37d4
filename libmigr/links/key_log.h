/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What peers have to be told of our memory's keys. */
#ifndef MIGR_LINKS_KEY_LOG_H
#define MIGR_LINKS_KEY_LOG_H

#include <compare>
#include <cstdint>
#include <map>
#include <set>

namespace migr::links {

/// A key of ours, as peers hold it.
struct KeyName {
  std::uint32_t link;  ///< where it is called otherwise
  std::uint32_t home;  ///< link that its memory was registered on
  std::uint32_t vrkey;
  auto operator<=>(const KeyName&) const = default;
};

/// In the order in which it became so, and no longer than what there is to tell: something newer of a key takes the place of what
/// was said of it before, and that one is gone needs to be known only by those who have known it.
class KeyLog {
 public:
  /// @param prkey what it is called there
  void add(const KeyName& name, std::uint32_t prkey) { (void)put(name, prkey); }
  /// It is gone. @param told up to which number anybody has been told
  void remove(const KeyName& name, std::uint64_t told) {
    const auto before = last_.find(name);
    if (before == last_.end() || gone_.contains(before->second)) return;
    if (before->second < told) {
      gone_.insert(put(name, 0));
    } else {
      entries_.erase(before->second);
      last_.erase(before);
    }
  }
  /// Everybody who has been told anything has been told all below `told`.
  void all_know(std::uint64_t told) {
    while (!gone_.empty() && *gone_.begin() < told) {
      const auto entry = entries_.find(*gone_.begin());
      last_.erase(entry->second.name);
      entries_.erase(entry);
      gone_.erase(gone_.begin());
    }
  }
  /// Calls tell(name, prkey) for what there is from `told` on. @return where to go on the next time
  template <class Tell>
  std::uint64_t since(std::uint64_t told, Tell&& tell) const {
    for (auto e = entries_.lower_bound(told); e != entries_.end(); ++e) tell(e->second.name, e->second.prkey);
    return next_;
  }
  std::size_t size() const { return entries_.size(); }
  /// Number of what is yet to come: who was told all below it knows all that there is.
  std::uint64_t next() const { return next_; }

 private:
  struct Entry {
    KeyName name;
    std::uint32_t prkey;
  };
  std::uint64_t put(const KeyName& name, std::uint32_t prkey) {
    if (const auto before = last_.find(name); before != last_.end()) {
      gone_.erase(before->second);
      entries_.erase(before->second);
    }
    entries_[next_] = {name, prkey};
    last_[name] = next_;
    return next_++;
  }
  std::map<std::uint64_t, Entry> entries_;  // by number
  std::map<KeyName, std::uint64_t> last_;
  std::set<std::uint64_t> gone_;            // entries without a key
  std::uint64_t next_ = 1;                  // 0: told nothing yet
};

}  // namespace migr::links

#endif
