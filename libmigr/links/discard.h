/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * QPs of ours that nothing uses any more. ibv_destroy_qp waits until the network has let go of the last packet: with soft-RoCE, of
 * a link that was just cut, the 3 s that the kernel asks for a neighbour (where a NIC holds it for longer, up to 50 s). A change of the
 * path does not: a thread of its own destroys them.
 */
#ifndef MIGR_LINKS_DISCARD_H
#define MIGR_LINKS_DISCARD_H

#include <infiniband/verbs.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace migr::links {

/// Thread-safe; its lock is innermost.
class Discards {
 public:
  /// From here on it executes nothing, and its asynchronous events are nobody's.
  /// @param mr  of `buffers`, which it may be using, or null
  void add(ibv_qp* qp, ibv_mr* mr = nullptr, std::vector<std::uint8_t> buffers = {});
  bool none();
  /// All that were added have been destroyed: before their PD, CQ or device is.
  void finish();
  /// The thread. Does not return.
  void run();

 private:
  struct Discarded {
    ibv_qp* qp;
    ibv_mr* mr;
    std::vector<std::uint8_t> buffers;
  };

  void destroy_all(std::unique_lock<std::mutex>& held);

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<Discarded> all_;
  unsigned under_way_ = 0;
};

}  // namespace migr::links

#endif
