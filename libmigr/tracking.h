/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Where NICs may have written to memory since it began to be copied ahead of a stop (docs/protocol.md, "Memory that was copied ahead"): a
 * work request is noted before it is posted, and what lay in the queues before. Who is moved notes where his own receives, READs
 * and atomics write to, a partner where his WRITEs and atomics do.
 */
#ifndef MIGR_TRACKING_H
#define MIGR_TRACKING_H

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>

namespace migr {

/// All that an atomic, or an atomic write, touches.
constexpr std::size_t kAtomicBytes = 8;

struct QpShadow;

namespace tracking {

/// Parts of memory, in whole pages. At most kMost: what lies next to each other becomes one, with what is between, when there are more.
class Parts {
 public:
  static constexpr std::size_t kMost = 4096;
  void add(std::uint64_t start, std::uint64_t bytes);
  /// By address: where each begins, and where it ends.
  const std::map<std::uint64_t, std::uint64_t>& all() const { return parts_; }

 private:
  void join_neighbours();
  std::map<std::uint64_t, std::uint64_t> parts_;
  std::uint64_t gap_ = 0;  ///< so much between two parts is theirs, too
};

/// By physical key, whose addresses they are.
using KeyedParts = std::unordered_map<std::uint32_t, Parts>;

/// Of all keys: the other end compares as well, and has them within the stop. More than that, as where memory is registered for each
/// transfer, nobody needs.
constexpr std::size_t kMostParts = 1u << 16;

/// Of one QP. Under its lock.
struct Notes {
  bool here = false;      ///< of memory of this process; else of the other end's
  bool opening = true;    ///< sessions that were open on the provider's QP may still be
  bool whole = true;      ///< else there were too many parts, and none is noted any more
  std::size_t count = 0;  ///< of parts
  KeyedParts parts;
};

/// Of a QP that is tracked. Keys are physical. Caller holds the QP's lock.
void note(Notes& notes, const ibv_send_wr& wr);
void note(Notes& notes, const ibv_recv_wr& wr);

}  // namespace tracking
}  // namespace migr

#endif
