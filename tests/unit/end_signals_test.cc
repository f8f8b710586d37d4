// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// By which signals migrd ends.
#include "agent/end_signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "agent/log.h"

namespace migr::end_signals_test {
namespace {

TEST(EndSignals, OneThatHangsUpIsNone) {
  const auto daemon = [](int ends) {
    log_to_stderr("test", false);
    hold_end_signals();
    for (const int sig : {SIGHUP, ends}) kill(getpid(), sig);  // the lower number is seen first
    _exit(wait_for_end([] { std::fputs("hung up\n", stderr); }));
  };
  for (const int sig : {SIGINT, SIGTERM}) EXPECT_EXIT(daemon(sig), testing::ExitedWithCode(sig), "hung up");
}

}  // namespace
}  // namespace migr::end_signals_test
