// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A thread that makes and destroys resources beside the traffic, as a program with short-lived connections does.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <thread>

namespace verify {

class Churn {
 public:
  /// A PD, MR, CQ and QP every `period_ms`, for a moment; 0: none.
  Churn(ibv_context* context, int period_ms);
  /// Ends it. @return what failed; empty: nothing
  std::string stop();
  std::uint64_t rounds() const { return rounds_; }

 private:
  void run(const std::stop_token& stop, ibv_context* context, int period_ms);
  std::string round(ibv_context* context);
  std::string failed_;  // read after the thread has ended
  std::uint64_t rounds_ = 0;
  std::jthread thread_;
};

}  // namespace verify
