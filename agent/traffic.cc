// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "traffic.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "failover/port_watch.h"
#include "limits.h"

namespace migr {
namespace {

using std::chrono::milliseconds;

/// Of a file of sysfs, which says each time anew what it is.
std::optional<std::uint64_t> number_in(const Fd& file) {
  char text[32];
  const ssize_t got = pread(file.n, text, sizeof text, 0);
  std::uint64_t n = 0;
  if (got <= 0 || std::from_chars(text, text + got, n).ec != std::errc()) return std::nullopt;
  return n;
}

Fd open_to_read(const std::string& file) { return Fd(open(file.c_str(), O_RDONLY | O_CLOEXEC)); }

}  // namespace

void TrafficMeter::start() {
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      lock.unlock();
      sample(Clock::now());
      lock.lock();
      const bool closely = Clock::now() < closely_until_;
      wake_.wait_for(lock, milliseconds(closely ? kTrafficClosePeriodMs : kTrafficIdlePeriodMs),
                     [&] { return stop_ || (!closely && Clock::now() < closely_until_); });
    }
  });
}

void TrafficMeter::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void TrafficMeter::look_closely() {
  {
    std::lock_guard lock(mutex_);
    closely_until_ = Clock::now() + milliseconds(kTrafficCloseMs);
  }
  wake_.notify_all();
}

void TrafficMeter::sample(Clock::time_point now) {
  auto counts = read_();
  std::lock_guard lock(mutex_);
  Count carried;
  for (const auto& [port, count] : counts) {
    const auto before = seen_.find(port);
    if (before == seen_.end()) continue;
    if (count.rx >= before->second.rx) carried.rx += count.rx - before->second.rx;
    if (count.tx >= before->second.tx) carried.tx += count.tx - before->second.tx;
  }
  seen_ = std::move(counts);
  if (last_ != Clock::time_point() && now > last_) samples_.push_back({now, now - last_, carried});
  last_ = now;
  while (!samples_.empty() && samples_.front().end + milliseconds(kTrafficKeepMs) < now) samples_.pop_front();
}

wire::TrafficReply TrafficMeter::since(std::uint32_t back_ms, Clock::time_point now) const {
  const auto begin = now - milliseconds(back_ms);
  std::lock_guard lock(mutex_);
  auto first = std::find_if(samples_.begin(), samples_.end(), [&](const Sample& s) { return s.end > begin; });
  const auto all = static_cast<std::size_t>(samples_.end() - first), together = (all + kTrafficSamples - 1) / kTrafficSamples;
  wire::TrafficReply out;
  while (first != samples_.end()) {
    auto* s = out.add_samples();
    Clock::duration length{};
    for (std::size_t n = 0; n < together && first != samples_.end(); n++, ++first) {
      length += first->length;
      s->set_rx_bytes(s->rx_bytes() + first->carried.rx);
      s->set_tx_bytes(s->tx_bytes() + first->carried.tx);
      s->set_at_ms(static_cast<std::uint32_t>(std::chrono::duration_cast<milliseconds>(first->end - begin).count()));
    }
    s->set_length_us(static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::microseconds>(length).count()));
  }
  return out;
}

void PortCounters::look_for_ports() {
  ports_.clear();
  for (const auto& p : rdma_ports()) {
    const std::string own = "/sys/class/infiniband/" + p.device + "/ports/" + std::to_string(p.port) + "/counters/port_",
                      below = "/sys/class/net/" + p.netdev + "/statistics/";
    auto& files = ports_[p.device + "/" + std::to_string(p.port)];
    files = {open_to_read(own + "rcv_data"), open_to_read(own + "xmit_data"), 4};  // IB spec: PortRcvData counts words
    if (files.rx.n < 0) files = {open_to_read(below + "rx_bytes"), open_to_read(below + "tx_bytes"), 1};
  }
}

TrafficMeter::Counts PortCounters::read() {
  if (const auto now = TrafficMeter::Clock::now(); looked_ == TrafficMeter::Clock::time_point() || now > looked_ + milliseconds(kTrafficPortsMs)) {
    look_for_ports();
    looked_ = now;
  }
  TrafficMeter::Counts out;
  for (const auto& [port, files] : ports_) {
    const auto rx = number_in(files.rx), tx = number_in(files.tx);
    if (rx && tx) out[port] = {*rx * files.unit, *tx * files.unit};
  }
  return out;
}

}  // namespace migr
