// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Samples the traffic of a network device every 10 ms, to see the gap of a switchover from outside a program that
// knows nothing of it. Reads the counters of the kernel in /sys; writes all samples at the end.
//
//   rate_sampler DEVICE FILE [SECONDS]    ends after SECONDS, on SIGTERM or SIGINT
//
// DEVICE is a network device, or an RDMA device (its network device is used). A line of FILE is
// "EPOCH_MS RX_BYTES TX_BYTES RX_PACKETS TX_PACKETS": what came and went since the line before.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kPeriodNs = 10'000'000;
constexpr std::array kCounters = {"rx_bytes", "tx_bytes", "rx_packets", "tx_packets"};
volatile std::sig_atomic_t g_stop = 0;

struct Sample {
  std::int64_t ms;
  std::array<std::uint64_t, kCounters.size()> count;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "rate_sampler: %s\n", what.c_str());
  std::exit(3);
}

/// The network device below an RDMA device; the name itself if there is no such RDMA device.
std::string netdev_of(const std::string& name) {
  const std::string path = "/sys/class/infiniband/" + name + "/ports/1/gid_attrs/ndevs/0";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return name;
  char text[64];
  const ssize_t n = read(fd, text, sizeof text);
  close(fd);
  if (n <= 1) return name;
  return {text, static_cast<std::size_t>(n - 1)};
}

std::uint64_t read_counter(int fd, const char* name) {
  char text[32];
  const ssize_t n = pread(fd, text, sizeof text - 1, 0);
  if (n <= 0) fail(std::string("cannot read ") + name + ": " + std::strerror(errno));
  text[n] = 0;
  return std::strtoull(text, nullptr, 10);
}

std::int64_t epoch_ms() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1000 + t.tv_nsec / 1000000;
}

void on_signal(int) { g_stop = 1; }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: rate_sampler DEVICE FILE [SECONDS]\n");
    return 2;
  }
  const double seconds = argc == 4 ? std::atof(argv[3]) : 0;
  if (argc == 4 && !(seconds > 0)) fail(std::string("SECONDS '") + argv[3] + "': want a number above 0");
  const std::string dev = netdev_of(argv[1]);
  std::array<int, kCounters.size()> fd;
  for (std::size_t i = 0; i < fd.size(); ++i) {
    const std::string path = "/sys/class/net/" + dev + "/statistics/" + kCounters[i];
    fd[i] = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd[i] < 0) fail("no network or RDMA device '" + std::string(argv[1]) + "': " + path + ": " + std::strerror(errno));
  }
  struct sigaction s {};
  s.sa_handler = on_signal;
  sigaction(SIGTERM, &s, nullptr);
  sigaction(SIGINT, &s, nullptr);

  std::vector<Sample> samples;
  samples.reserve(100 * 300);
  timespec next{};
  clock_gettime(CLOCK_MONOTONIC, &next);
  const double end = static_cast<double>(next.tv_sec) + static_cast<double>(next.tv_nsec) / 1e9 + seconds;
  std::array<std::uint64_t, kCounters.size()> before;
  for (std::size_t i = 0; i < fd.size(); ++i) before[i] = read_counter(fd[i], kCounters[i]);
  while (!g_stop) {
    next.tv_nsec += kPeriodNs;
    if (next.tv_nsec >= 1'000'000'000) {
      next.tv_nsec -= 1'000'000'000;
      ++next.tv_sec;
    }
    if (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, nullptr) == EINTR) continue;
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (seconds > 0 && static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9 > end) break;
    if (now.tv_sec > next.tv_sec) next = now;  // far behind: the missed periods are one sample
    Sample x{epoch_ms(), {}};
    for (std::size_t i = 0; i < fd.size(); ++i) {
      const std::uint64_t v = read_counter(fd[i], kCounters[i]);
      x.count[i] = v - before[i];
      before[i] = v;
    }
    samples.push_back(x);
  }
  std::FILE* f = std::fopen(argv[2], "we");
  if (!f) fail(std::string("cannot write ") + argv[2] + ": " + std::strerror(errno));
  for (const Sample& x : samples)
    std::fprintf(f, "%lld %llu %llu %llu %llu\n", static_cast<long long>(x.ms), static_cast<unsigned long long>(x.count[0]),
                 static_cast<unsigned long long>(x.count[1]), static_cast<unsigned long long>(x.count[2]),
                 static_cast<unsigned long long>(x.count[3]));
  if (std::fclose(f)) fail(std::string("cannot write ") + argv[2] + ": " + std::strerror(errno));
  return 0;
}
