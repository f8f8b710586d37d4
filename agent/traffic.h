// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What the RDMA ports of this host carry, all together, kept for some minutes: a report draws what a partner had of a
// migration. The ports' own counters (port_rcv_data, port_xmit_data); where a device has none, as soft-RoCE, those of the
// netdev below, which count all else that goes over it, too.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "fd.h"
#include "wire.pb.h"

namespace migr {

/// Thread: any.
class TrafficMeter {
 public:
  using Clock = std::chrono::steady_clock;
  /// Bytes since whenever.
  struct Count {
    std::uint64_t rx = 0, tx = 0;
  };
  using Counts = std::map<std::string, Count>;  // of each port
  /// @param read  from one thread at a time
  explicit TrafficMeter(std::function<Counts()> read) : read_(std::move(read)) {}
  ~TrafficMeter() { stop(); }
  void start();
  void stop();

  /// Every kTrafficClosePeriodMs for kTrafficCloseMs from now on, else every kTrafficIdlePeriodMs.
  void look_closely();
  /// @param back_ms  the window: from so long ago until now
  /// @return samples whose times are since the begin of the window, oldest first, at most kTrafficSamples: each may be several
  wire::TrafficReply since(std::uint32_t back_ms) const { return since(back_ms, Clock::now()); }
  wire::TrafficReply since(std::uint32_t back_ms, Clock::time_point now) const;
  /// What the thread does; tests do it themselves. A port that is new, or whose counter went back, begins with nothing.
  void sample(Clock::time_point now);

 private:
  struct Sample {
    Clock::time_point end;
    Clock::duration length;
    Count carried;
  };
  const std::function<Counts()> read_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  Clock::time_point closely_until_, last_;
  Counts seen_;
  std::deque<Sample> samples_;
  std::thread thread_;
};

/// Of this host. Looks for ports that have come or gone every kTrafficPortsMs. Thread: one at a time.
class PortCounters {
 public:
  TrafficMeter::Counts read();

 private:
  struct Files {
    Fd rx, tx;               // kept open: they are read again and again
    std::uint64_t unit = 1;  // bytes
  };
  void look_for_ports();
  std::map<std::string, Files> ports_;
  TrafficMeter::Clock::time_point looked_;
};

}  // namespace migr
