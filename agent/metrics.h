// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What Prometheus reads of migrd; "METRICS" in migrd(8) lists it. Events are counted when they happen, the rest is looked up
// when it is asked for.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "certificates.h"
#include "failover/link_directory.h"
#include "failover/port_watch.h"
#include "host_service.h"
#include "peer_link.h"
#include "process_session.h"
#include "wire.pb.h"

namespace migr {

/// Thread: any.
class Metrics final : public prometheus::Collectable {
 public:
  /// What is looked at when somebody asks. Lives longer.
  struct Parts {
    const Config& config;
    SessionTable& sessions;
    LinkTable& table;
    const LinkDirectory& directory;
    const PortWatch& ports;
    const Certificates& certificates;
    std::vector<Role*> roles;
  };
  explicit Metrics(Parts parts);

  enum class What { kMigrate,
                    kCheckpoint,
                    kRestore };
  /// This host has begun it, and that is how it ended.
  void ended(What what, const wire::Summary& summary);
  /// The same for a migration, or a checkpoint, whose end nobody has heard of yet: migrd found out, or an earlier one was ended.
  void settled(const wire::Summary& summary);
  /// It took part in one. @param role  "destination", "partner"
  void decided(const char* role, wire::Outcome outcome);
  /// Asks every peer whether it is there. Takes as long as the slowest, at most kCheckMs.
  void ask_peers(Peers& peers);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  template <class T>
  using Family = prometheus::Family<T>;
  void look(std::vector<prometheus::MetricFamily>& out) const;

  const Parts parts_;
  prometheus::Registry registry_;
  Family<prometheus::Counter>&migrations_, &stored_, &rollbacks_, &replayed_, &bytes_;
  Family<prometheus::Histogram>&phases_, &service_blackout_, &communication_blackout_;
  mutable std::mutex mutex_;
  std::map<std::string, bool> peers_;  // whether they have answered last
};

/// Serves /metrics at config.metrics; nullptr: the configuration says no. EADDRINUSE: cannot listen.
Result<std::unique_ptr<prometheus::Exposer>> expose(const Config& config, const std::shared_ptr<Metrics>& metrics);

}  // namespace migr
