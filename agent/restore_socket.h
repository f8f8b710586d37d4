// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The controller's side of migr/restore_control.h: one connection per request,
// since runc full-restore is a controller too.
#pragma once

#include <atomic>
#include <span>
#include <string>
#include <vector>

#include "fd.h"
#include "migr/restore_control.h"
#include "status.h"

namespace migr {

class RestoreSocket {
 public:
  explicit RestoreSocket(std::string path) : path_(std::move(path)) {}
  const std::string& path() const { return path_; }
  bool listening() const;

  /// @param limit_ms  one of limits.h: then the error says which
  template <class Out = migr_rc_connect, class In = migr_rc_connect>
  Result<std::vector<Out>> ask(migr_rc_op op, std::span<const In> in, const int& limit_ms, std::uint32_t* took_us = nullptr) {
    std::vector<std::byte> out;
    if (auto s = request(op, in.data(), in.size(), sizeof(In), out, sizeof(Out), limit_ms, took_us); !s) return s.error();
    std::vector<Out> records(out.size() / sizeof(Out));
    if (!out.empty()) std::memcpy(records.data(), out.data(), out.size());
    return records;
  }
  Status tell(migr_rc_op op, const int& limit_ms) {
    return Status(ask(op, std::span<const migr_rc_connect>(), limit_ms));
  }
  /// Ends a request that waits in another thread.
  void interrupt();

 private:
  Result<Fd> connect() const;
  Status request(migr_rc_op op, const void* in, std::size_t count, std::size_t in_size, std::vector<std::byte>& out,
                 std::size_t out_size, const int& limit_ms, std::uint32_t* took_us);
  const std::string path_;
  std::mutex mutex_;
  int busy_fd_ = -1;
};

}  // namespace migr
