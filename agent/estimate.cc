// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "estimate.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>

#include "fd.h"

namespace migr {
namespace {

// Measured between emulated hosts (bench/README.md), which are 10 to 30 times as slow as hardware is: CRIU's dump and restore of
// a small program with its network; settling, replaying and binding a QP; dumping and reading back memory, and reading back alone.
constexpr double kEmulatedMs = 3900, kEmulatedPerQpMs = 4.6, kEmulatedPerMbMs = 14, kEmulatedReadPerMbMs = 1.5;
constexpr double kFaster = 10, kFastest = 30;

// @param bytes  of its memory, that are copied in the stop
double took_ms(const StopParts& p, double bytes, double faster) {
  const double handled = (bytes * kEmulatedPerMbMs + (static_cast<double>(p.memory_bytes) - bytes) * kEmulatedReadPerMbMs) / 1e6 / faster;
  const double sent = p.link_bytes_per_s > 0 ? bytes / p.link_bytes_per_s * 1e3 : 0;  // while it is handled
  return (kEmulatedMs + p.qps * kEmulatedPerQpMs) / faster + std::max(handled, sent);
}

}  // namespace

ExpectedStop estimated_stop(const StopParts& p) {
  const auto all = static_cast<double>(p.memory_bytes);
  ExpectedStop stop;
  stop.estimated = true;
  stop.least_ms = took_ms(p, p.pre_copy ? 0 : all, kFastest);
  stop.median_ms = took_ms(p, p.pre_copy ? 0 : all, kFaster);
  stop.most_ms = took_ms(p, all, 1);
  return stop;
}

ExpectedStop likely_stop(const std::optional<ExpectedStop>& past, const ExpectedStop& estimate) {
  return past && estimate.median_ms <= past->most_ms ? *past : estimate;
}

double link_rate(const std::string& address) {
  const auto colon = address.rfind(':');
  if (colon == address.npos) return 0;
  std::string host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found)) return 0;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> to(found, freeaddrinfo);
  // Sends nothing: only has the kernel choose where it would leave.
  const Fd s(socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  if (s.n < 0 || connect(s.n, to->ai_addr, to->ai_addrlen) || getsockname(s.n, reinterpret_cast<sockaddr*>(&from), &size)) return 0;
  const auto bytes_of = [](const sockaddr* a) -> std::string {
    if (a->sa_family == AF_INET) return {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in*>(a)->sin_addr), sizeof(in_addr)};
    if (a->sa_family == AF_INET6) return {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr), sizeof(in6_addr)};
    return {};
  };
  ifaddrs* list = nullptr;
  if (getifaddrs(&list)) return 0;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(list, freeifaddrs);
  for (const ifaddrs* i = list; i; i = i->ifa_next) {
    if (!i->ifa_addr || bytes_of(i->ifa_addr) != bytes_of(reinterpret_cast<const sockaddr*>(&from))) continue;
    double mbit = 0;  // -1, or an error: it has none, as a virtual one
    std::ifstream("/sys/class/net/" + std::string(i->ifa_name) + "/speed") >> mbit;
    return std::max(mbit, 0.0) * 1e6 / 8;
  }
  return 0;
}

}  // namespace migr
