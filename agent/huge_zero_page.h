// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The huge page of zeros that the kernel maps where transparent huge memory is read and was never written to. CRIU (3.17) knows the
// small one only: what it finds mapped since a pre-dump, and not marked as written, it takes for what the pre-dump has there.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "status.h"

namespace migr {

/// Where the kernel's switches of transparent huge pages are.
std::string thp_folder();

/// Of a host. Thread: any.
class HugeZeroPage {
 public:
  /// @param note  a file that is there as long as it is kept out; one that an earlier migrd has left means that it did not end that
  HugeZeroPage(std::string note, std::string folder);
  HugeZeroPage(const HugeZeroPage&) = delete;
  HugeZeroPage& operator=(const HugeZeroPage&) = delete;
  /// Nobody on this host gets it any more, as long as one of what this has returned lives: who reads gets zeros of its own, marked as
  /// written. Where it is mapped it stays. @return an error: that cannot be, and somebody may get it
  Result<std::shared_ptr<void>> keep_out();

 private:
  Status forbid();
  void allow();
  const std::string note_, folder_, switch_;
  std::mutex mutex_;  // guards what follows
  unsigned users_ = 0;
  bool changed_ = false;  // it was allowed before
};

}  // namespace migr
