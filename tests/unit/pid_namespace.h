// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Processes of a container, as far as migrd's limits are concerned.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "agent/process_session.h"

namespace migr {

/// A PID namespace, as a container has one. Outlives whoever is born in it.
class PidNamespace {
 public:
  PidNamespace() {
    if (unshare(CLONE_NEWPID)) return;
    init_ = fork();
    if (init_ == 0)
      for (;;) pause();
    const std::string theirs = "/proc/" + std::to_string(init_) + "/ns/pid";
    theirs_ = Fd(open(theirs.c_str(), O_RDONLY | O_CLOEXEC));
    enter(ours_);
  }
  ~PidNamespace() {
    if (init_ > 0) kill(init_, SIGKILL), waitpid(init_, nullptr, 0);
  }
  /// False: not allowed to make one.
  bool made() const { return init_ > 0; }
  /// The caller's children that `make` forks are born in it.
  template <class Make>
  auto born_in(const Make& make) const {
    enter(theirs_);
    auto made = make();
    enter(ours_);
    return made;
  }

 private:
  static void enter(const Fd& of) { EXPECT_EQ(setns(of.n, CLONE_NEWPID), 0) << std::strerror(errno); }
  const Fd ours_{open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC)};
  Fd theirs_;
  pid_t init_ = -1;
};

}  // namespace migr
