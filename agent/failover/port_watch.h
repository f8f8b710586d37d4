// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The RDMA ports of this host: which netdev is behind each and whether it is up (netlink, debounced), and what the operator
// has said of them, which outlives migrd (STATE_DIR/links.json).
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../fd.h"
#include "../status.h"
#include "debounce.h"
#include "migr/links_wire.h"

namespace migr {

/// A port, and the netdev behind it; empty: none.
struct RdmaPort {
  std::string device;
  std::uint32_t port = 0;
  std::string netdev;
};

/// Of /sys/class/infiniband.
std::vector<RdmaPort> rdma_ports();

class PortWatch {
 public:
  using Scan = std::function<std::vector<RdmaPort>()>;
  /// Ports that have changed. From the watching thread, or from order().
  using Changed = std::function<void(std::span<const migr_links_port>)>;

  PortWatch(std::string state_file, Scan scan, Debounce::Limits limits);
  ~PortWatch();
  void set_changed(Changed c) { changed_ = std::move(c); }
  /// The netlink of the network namespace of the caller. What it cannot be asked is no watching, but orders work.
  Status start();
  void stop();

  std::vector<migr_links_port> ports() const;

  enum class Order { kDown, kUp, kPrefer, kPreferNone };
  /// @param port  0: all of the device; PREFER: its only one. ENOENT: no such port; EINVAL: which one
  /// @return serial of the last port that has changed; if none has, of the last there was
  Result<std::uint64_t> order(Order what, const std::string& device, std::uint32_t port);

  /// What netlink says of a netdev; and what is due by now. Both are called by the thread; tests call them themselves.
  void see(const std::string& netdev, bool up, Debounce::Clock::time_point now);
  void step(Debounce::Clock::time_point now);
  /// Looks for new and lost ports; one that is lost for long, and of which no order says anything, is forgotten.
  /// @param up  of a netdev that is new here
  void rescan(const std::function<bool(const std::string& netdev)>& up, Debounce::Clock::time_point now = Debounce::Clock::now());
  /// When step() is due; nullopt: not now.
  std::optional<Debounce::Clock::time_point> due(Debounce::Clock::time_point now);

 private:
  using Key = std::pair<std::string, std::uint32_t>;
  struct Port {
    std::string netdev;
    std::optional<Debounce> state;  // none: no netdev
    std::optional<Debounce::Clock::time_point> gone;  // since when
    migr_links_port told{};
  };
  struct Netlink;

  /// Caller holds the lock. What is different from what was told.
  std::vector<migr_links_port> changes_locked();
  void tell(const std::vector<migr_links_port>& ports);
  Status load_locked();
  Status save_locked();
  std::string text_locked() const;
  /// nullopt: not known
  std::optional<bool> is_up(const std::string& netdev) const;
  void run();

  const std::string file_;
  const Scan scan_;
  const Debounce::Limits limits_;
  Changed changed_;
  mutable std::mutex mutex_;
  std::map<Key, Port> ports_;
  std::set<Key> down_;
  std::optional<Key> preferred_;
  bool unread_ = false;  // the orders on disk: no other is taken until they can be read
  std::uint64_t serial_ = 0;
  std::mutex telling_;  // so that pushes come in order
  std::unique_ptr<Netlink> netlink_;
  Fd wake_;
  std::thread thread_;
  std::atomic<bool> stop_ = false;
};

}  // namespace migr
