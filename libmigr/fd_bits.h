/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#ifndef MIGR_FD_BITS_H
#define MIGR_FD_BITS_H

#include <atomic>
#include <cstdint>

namespace migr {

/// A set of descriptors. Thread: any, without order: who uses a descriptor has learnt of it some other way.
class FdBits {
 public:
  static constexpr unsigned kMax = 65536;  ///< descriptors from here on are never in it
  bool has(int fd) const {
    if (!fits(fd)) return false;
    const auto n = static_cast<unsigned>(fd);
    return words_[n / kPerWord].load(std::memory_order_relaxed) >> (n % kPerWord) & 1;
  }
  void set(int fd, bool in) {
    if (!fits(fd)) return;
    const auto n = static_cast<unsigned>(fd);
    const std::uint64_t bit = std::uint64_t{1} << (n % kPerWord);
    if (in)
      words_[n / kPerWord].fetch_or(bit, std::memory_order_relaxed);
    else
      words_[n / kPerWord].fetch_and(~bit, std::memory_order_relaxed);
  }
  void clear() {
    for (auto& word : words_) word.store(0, std::memory_order_relaxed);
  }
  static bool fits(int fd) { return fd >= 0 && static_cast<unsigned>(fd) < kMax; }

 private:
  static constexpr unsigned kPerWord = 64;
  std::atomic<std::uint64_t> words_[kMax / kPerWord];
};

}  // namespace migr

#endif
