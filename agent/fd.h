// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A descriptor that is closed with its owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace migr {

struct Fd {
  int n = -1;
  Fd() = default;
  explicit Fd(int fd) : n(fd) {}
  Fd(Fd&& o) noexcept : n(std::exchange(o.n, -1)) {}
  Fd& operator=(Fd&& o) noexcept {
    std::swap(n, o.n);
    return *this;
  }
  ~Fd() {
    if (n >= 0) ::close(n);
  }
};

}  // namespace migr
