// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The two hosts of failover_test: each a libmigr.so with data of its own, in one process, over the NICs of model.h.
#ifndef MIGR_TEST_FAILOVER_LIBRARY_H
#define MIGR_TEST_FAILOVER_LIBRARY_H

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>

namespace ends {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kDepth = 16, kRing = 31;   // that are asked for; that the device gives for it
constexpr auto kLimit = std::chrono::seconds(60);  // who shares a processor with many others waits for it at each step
constexpr unsigned kSwitchMs = 20'000;             // in which a switch has to end, where a test says nothing else

/// Of files of this run; leave.h removes it.
std::filesystem::path folder();

/// What a test before this one has cut.
void mend_all();

/// libmigr.so of one "process": a copy of the file, so that it has data of its own.
class Library {
 public:
  /// Loads it, with links.json for host 'a' or 'b', and opens that host's first device.
  /// @param policy, paths, return_ms, adrift_ms, switch_ms, heartbeat_ms, heartbeat_misses  entries of links.json
  /// @param relays  atomics
  /// @param third  there are two backup links
  Library(char host, const std::string& policy, const std::string& paths, unsigned return_ms, unsigned adrift_ms, unsigned switch_ms = kSwitchMs, bool relays = false, bool third = false, unsigned heartbeat_ms = 20, unsigned heartbeat_misses = 100);
  /// Of the library itself: what a program calls by its name.
  template <class F>
  F* verb(const char* name) const {
    void* f = dlsym(so_, name);
    if (!f) throw std::runtime_error(dlerror());
    return reinterpret_cast<F*>(f);
  }
  ibv_context* context = nullptr;  ///< of the first device

 private:
  void* so_;
};

/// @return it came true within kLimit
template <class Condition>
bool wait_for(Condition&& condition) {
  for (const auto deadline = Clock::now() + kLimit; !condition(); std::this_thread::sleep_for(std::chrono::microseconds(200)))
    if (Clock::now() > deadline) return false;
  return true;
}

/// Of a link that nobody has they all do. Who is idle hears of a cut by its channel over the link, if there was one.
bool all_stand(std::uint32_t from);

}  // namespace ends

#endif
