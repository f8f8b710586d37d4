// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "port_watch.h"

#include <net/if.h>
#include <linux/rtnetlink.h>
#include <netlink/route/link.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "../file_tree.h"
#include "../json.h"
#include "../limits.h"

namespace migr {
namespace {

namespace fs = std::filesystem;
using Clock = Debounce::Clock;

std::string text_of(const std::pair<std::string, std::uint32_t>& key) { return key.first + "/" + std::to_string(key.second); }

// nullopt: not what text_of() writes.
std::optional<std::pair<std::string, std::uint32_t>> key_of(const std::string& text) {
  const auto slash = text.rfind('/');
  if (slash == text.npos || !slash || slash + 1 == text.size() || text.find_first_not_of("0123456789", slash + 1) != text.npos || text.size() - slash > 9)
    return std::nullopt;
  return std::pair{text.substr(0, slash), static_cast<std::uint32_t>(std::stoul(text.substr(slash + 1)))};
}

std::uint64_t realtime_ns() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(t.tv_nsec);
}

}  // namespace

std::vector<RdmaPort> rdma_ports() {
  std::vector<RdmaPort> out;
  std::error_code ec;
  for (const auto& device : fs::directory_iterator("/sys/class/infiniband", ec))
    for (const auto& port : fs::directory_iterator(device.path() / "ports", ec)) {
      RdmaPort p;
      p.device = device.path().filename();
      p.port = static_cast<std::uint32_t>(std::strtoul(port.path().filename().c_str(), nullptr, 10));
      // GID 0 of a RoCE port is that of its own netdev; others may be of VLANs over it.
      p.netdev = first_line_of(port.path() / "gid_attrs/ndevs/0");
      out.push_back(std::move(p));
    }
  return out;
}

// What is told of links is taken as a hint, and the kernel asked how the ones that matter are: so nothing is lost with an
// event, and no cache can be behind (libnl's keeps links that are gone, if IPv6 has told of them too).
struct PortWatch::Netlink {
  nl_sock* events = nl_socket_alloc();
  nl_sock* asker = nl_socket_alloc();
  ~Netlink() {
    nl_socket_free(events);
    nl_socket_free(asker);
  }
  Status open() {
    int e = events && asker ? 0 : -NLE_NOMEM;
    if (!e) e = nl_connect(asker, NETLINK_ROUTE);
    if (!e) e = nl_connect(events, NETLINK_ROUTE);
    if (!e) e = nl_socket_add_membership(events, RTNLGRP_LINK);
    return e ? Status(Error{EIO, std::string("netlink: ") + nl_geterror(e)}) : Status();
  }
  int fd() const { return nl_socket_get_fd(events); }
  void drain() const {
    char some[4096];
    while (recv(fd(), some, sizeof some, MSG_DONTWAIT | MSG_TRUNC) > 0 || errno == ENOBUFS || errno == EINTR) {
    }
  }
  /// false also if there is none of that name. nullopt: the kernel does not say.
  std::optional<bool> up(const std::string& netdev) const {
    rtnl_link* l = nullptr;
    const int e = rtnl_link_get_kernel(asker, 0, netdev.c_str(), &l);
    if (e == -NLE_OBJ_NOTFOUND || e == -NLE_NODEV) return false;
    if (e < 0) return std::nullopt;
    const unsigned flags = rtnl_link_get_flags(l);
    rtnl_link_put(l);
    return (flags & IFF_UP) && (flags & IFF_RUNNING);
  }
};

PortWatch::PortWatch(std::string state_file, Scan scan, Debounce::Limits limits)
    : file_(std::move(state_file)), scan_(std::move(scan)), limits_(limits) {
  if (auto s = load_locked(); !s) spdlog::error("{}; what was ordered of RDMA ports is not known", s.error().text);
}

PortWatch::~PortWatch() { stop(); }

// Caller holds the lock.
Status PortWatch::load_locked() {
  const auto text = read_whole(file_);
  unread_ = !text && text.error().code != ENOENT;
  if (!text) return unread_ ? text : Status();
  const Json j = Json::parse(*text, nullptr, false);
  const Json down = j.is_object() ? j.value("down", Json()) : Json(), prefer = j.is_object() ? j.value("prefer", Json()) : Json();
  bool damaged = !down.is_array() || !(prefer.is_string() || prefer.is_null());
  for (const auto& e : down.is_array() ? down : Json(Json::array())) {
    const auto key = e.is_string() ? key_of(e.get<std::string>()) : std::nullopt;
    if (key) down_.insert(*key);
    damaged = damaged || !key;
  }
  if (prefer.is_string()) preferred_ = key_of(prefer.get<std::string>());
  damaged = damaged || (prefer.is_string() && !preferred_);
  const Status kept = damaged ? put_aside(file_, *text, text_locked()) : Status();
  unread_ = !kept;
  return kept;
}

// Caller holds the lock.
Status PortWatch::save_locked() { return write_whole(file_, text_locked()); }

// Caller holds the lock.
std::string PortWatch::text_locked() const {
  Json j = {{"down", Json::array()}, {"prefer", nullptr}};
  for (const auto& key : down_) j["down"].push_back(text_of(key));
  if (preferred_) j["prefer"] = text_of(*preferred_);
  return j.dump(1) + "\n";
}

std::vector<migr_links_port> PortWatch::changes_locked() {
  std::vector<migr_links_port> out;
  for (auto& [key, p] : ports_) {
    migr_links_port now{};
    std::strncpy(now.device, key.first.c_str(), sizeof now.device - 1);
    now.port = key.second;
    std::strncpy(now.netdev, p.netdev.c_str(), sizeof now.netdev - 1);
    if (p.gone) now.flags |= MIGR_LINKS_PORT_GONE;
    if (!p.state) now.flags |= MIGR_LINKS_PORT_NO_NETDEV;
    if (p.state && !p.state->up()) now.flags |= MIGR_LINKS_PORT_DOWN_NETLINK;
    if (p.state) now.flaps = p.state->flaps();
    if (down_.contains(key)) now.flags |= MIGR_LINKS_PORT_DOWN_OPERATOR;
    if (preferred_ == key) now.flags |= MIGR_LINKS_PORT_PREFERRED;
    now.serial = p.told.serial;
    if (now.serial && !std::memcmp(&now, &p.told, sizeof now)) continue;
    now.serial = serial_ = std::max(serial_ + 1, realtime_ns());
    if (p.told.serial)
      spdlog::info("RDMA port {}: {}", text_of(key), now.flags & MIGR_LINKS_PORT_GONE           ? "the device is gone"
                                                      : now.flags & MIGR_LINKS_PORT_DOWN_OPERATOR ? "down, as ordered"
                                                      : now.flags & MIGR_LINKS_PORT_DOWN_NETLINK  ? "down: " + p.netdev + " is not running"
                                                      : now.flags & MIGR_LINKS_PORT_PREFERRED     ? "up, preferred"
                                                                                                  : "up");
    p.told = now;
    out.push_back(now);
  }
  return out;
}

void PortWatch::tell(const std::vector<migr_links_port>& ports) {
  if (!ports.empty() && changed_) changed_(ports);
}

void PortWatch::see(const std::string& netdev, bool up, Clock::time_point now) {
  std::lock_guard one(telling_);
  std::vector<migr_links_port> changed;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, p] : ports_)
      if (p.state && p.netdev == netdev) p.state->see(up, now);
    changed = changes_locked();
  }
  tell(changed);
}

void PortWatch::step(Clock::time_point now) {
  std::lock_guard one(telling_);
  std::vector<migr_links_port> changed;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, p] : ports_)
      if (p.state) p.state->step(now);
    changed = changes_locked();
  }
  tell(changed);
}

std::optional<Clock::time_point> PortWatch::due(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  std::optional<Clock::time_point> out;
  for (auto& [key, p] : ports_)
    if (const auto d = p.state ? p.state->due(now) : std::nullopt; d && (!out || *d < *out)) out = d;
  return out;
}

void PortWatch::rescan(const std::function<bool(const std::string& netdev)>& up, Clock::time_point now) {
  constexpr auto kForget = std::chrono::hours(1);
  const auto found = scan_();
  std::lock_guard one(telling_);
  std::vector<migr_links_port> changed;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, p] : ports_)
      if (!p.gone && std::none_of(found.begin(), found.end(), [&key = key](const auto& f) { return f.device == key.first && f.port == key.second; })) p.gone = now;
    for (const auto& f : found) {
      Port& p = ports_[{f.device, f.port}];
      p.gone.reset();
      if (f.netdev.empty() && p.state) continue;  // it is removed, or gets another name: its own still says how it is
      if (p.netdev == f.netdev && p.told.serial) continue;
      p.netdev = f.netdev;
      p.state.reset();
      if (!f.netdev.empty()) p.state.emplace(limits_, up(f.netdev));
    }
    std::erase_if(ports_, [&](const auto& e) { return e.second.gone && now - *e.second.gone > kForget && !down_.contains(e.first) && preferred_ != e.first; });
    changed = changes_locked();
  }
  tell(changed);
}

std::vector<migr_links_port> PortWatch::ports() const {
  std::lock_guard lock(mutex_);
  std::vector<migr_links_port> out;
  for (const auto& [key, p] : ports_) out.push_back(p.told);
  return out;
}

Result<std::uint64_t> PortWatch::order(Order what, const std::string& device, std::uint32_t port) {
  std::lock_guard one(telling_);
  std::vector<migr_links_port> changed;
  std::uint64_t serial;
  {
    std::lock_guard lock(mutex_);
    if (unread_)
      if (auto s = load_locked(); !s) return s.error();
    std::vector<Key> keys;
    std::string known;
    for (const auto& [key, p] : ports_) {
      if (key.first == device && (!port || key.second == port)) keys.push_back(key);
      known += (known.empty() ? "" : ", ") + text_of(key);
    }
    if (what == Order::kUp)  // also of a device that is away, for a while or for good
      for (const auto& key : down_)
        if (key.first == device && (!port || key.second == port)) keys.push_back(key);
    if (what != Order::kPreferNone && keys.empty())
      return Error{ENOENT, "no RDMA port " + device + (port ? "/" + std::to_string(port) : "") + " on this host; there " +
                               (known.empty() ? "is none" : "are " + known)};
    if (what == Order::kPrefer && keys.size() > 1) return Error{EINVAL, device + " has several ports: say which, as " + text_of(keys[0])};
    const auto down_before = down_;
    const auto preferred_before = preferred_;
    for (const auto& key : keys) {
      if (what == Order::kDown) down_.insert(key);
      if (what == Order::kUp) down_.erase(key);
    }
    if (what == Order::kPrefer) preferred_ = keys[0];
    if (what == Order::kPreferNone) preferred_.reset();
    if (auto s = save_locked(); !s) {
      down_ = down_before;
      preferred_ = preferred_before;
      return s.error();
    }
    changed = changes_locked();
    serial = serial_;
  }
  tell(changed);
  return serial;
}

Status PortWatch::start() {
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.n < 0) return sys_error("eventfd");
  auto netlink = std::make_unique<Netlink>();
  const Status s = netlink->open();
  if (s) netlink_ = std::move(netlink);
  rescan([this](const std::string& n) { return is_up(n).value_or(true); });
  thread_ = std::thread([this] { run(); });
  return s;
}

void PortWatch::stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  eventfd_write(wake_.n, 1);
  thread_.join();
}

std::optional<bool> PortWatch::is_up(const std::string& netdev) const { return netlink_ ? netlink_->up(netdev) : std::nullopt; }

void PortWatch::run() {
  auto scanned = Clock::now();
  const auto every = std::chrono::milliseconds(kLinkScanMs);
  while (!stop_) {
    auto now = Clock::now();
    auto until = scanned + every;
    if (const auto d = due(now)) until = std::min(until, *d);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
    pollfd fds[2] = {{wake_.n, POLLIN, 0}, {netlink_ ? netlink_->fd() : -1, POLLIN, 0}};
    if (poll(fds, 2, static_cast<int>(std::max<long long>(left, 0))) < 0 && errno != EINTR) {
      spdlog::error("links are not watched any more: poll: {}", std::strerror(errno));
      return;
    }
    if (fds[1].revents) netlink_->drain();
    now = Clock::now();
    // It may have another name now, and be up: the ports are asked for that before one is told as down.
    const auto before = ports();
    if (std::any_of(before.begin(), before.end(), [](const auto& p) { return p.netdev[0] && !(p.flags & MIGR_LINKS_PORT_GONE) && !if_nametoindex(p.netdev); }))
      scanned = now - every;
    if (now - scanned >= every) {
      rescan([this](const std::string& n) { return is_up(n).value_or(true); });
      scanned = now;
    }
    std::set<std::string> netdevs;
    for (const auto& p : ports())
      if (p.netdev[0]) netdevs.insert(p.netdev);
    for (const auto& n : netdevs)
      if (const auto up = is_up(n)) see(n, *up, now);
    step(now);
  }
}

}  // namespace migr
