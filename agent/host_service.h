// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What every migrd answers to every other: Version, outcome of a migration, renewal of its lease.
#pragma once

#include <functional>
#include <semaphore>
#include <vector>

#include "authorization.h"
#include "config.h"
#include "limits.h"
#include "numbers.h"
#include "peer_link.h"
#include "process_session.h"
#include "traffic.h"

namespace migr {

/// A role of this host in migrations: source, destination or partner.
class Role {
 public:
  virtual ~Role() = default;
  /// UNKNOWN: not ours, if it is readable().
  virtual wire::OutcomeReply outcome(std::uint32_t id) = 0;
  /// EIO: what was written down of it cannot be read, and UNKNOWN would be taken for "never heard of".
  virtual Status readable(std::uint32_t) { return {}; }
  /// Who asks takes part in it: what outcome() says of keys is for those only.
  virtual bool has_part(std::uint32_t, const Caller&) { return true; }
  /// ENOENT: not ours, or undone. EPERM: another host coordinates it.
  virtual Status renew(std::uint32_t id, const Caller& who) = 0;
  /// Called a few times a second: leases that ran out. Must not block for long.
  virtual void tick() {}
  /// What is not finished.
  virtual std::vector<wire::OpenMigration> open_migrations() { return {}; }
  /// The operator decides. ENOENT: not ours, or finished; EBUSY: not safe, or not now; the text says why.
  virtual Status order(std::uint32_t, wire::Outcome, bool /*force*/) { return Error{ENOENT, "not here"}; }
  /// The operator takes back what is under way. @param id, container  either may be meant @return what it is; it goes back from now on
  /// ENOENT: nothing of ours; EBUSY: it is committed
  virtual Result<wire::OpenMigration> cancel(std::uint32_t, const std::string& /*container*/) { return Error{ENOENT, "not here"}; }
  /// Does a migration hold this process? Else migrd lets it go on when it connects suspended.
  virtual bool claims(const Instance&) { return false; }
  /// Called with COMMITTED or UNDONE, of a migration that another host coordinates. Before the first call of a peer.
  void set_decided(std::function<void(wire::Outcome)> f) { decided_ = std::move(f); }

 protected:
  void decided(wire::Outcome o) const {
    if (decided_) decided_(o);
  }

 private:
  std::function<void(wire::Outcome)> decided_;
};

class HostService final : public wire::Host::Service {
 public:
  /// @param certificates, traffic  may be missing
  HostService(const Config& config, SessionTable& sessions, Numbers& numbers, std::vector<Role*> roles, const Certificates* certificates = nullptr, TrafficMeter* traffic = nullptr)
      : config_(config), sessions_(sessions), numbers_(numbers), roles_(std::move(roles)), certificates_(certificates), traffic_(traffic) {}
  grpc::Status Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) override;
  grpc::Status Facts(grpc::ServerContext*, const wire::FactsRequest*, wire::HostFacts* out) override;
  grpc::Status GetOutcome(grpc::ServerContext*, const wire::Migration* m, wire::OutcomeReply* out) override;
  grpc::Status Renew(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) override;
  grpc::Status Release(grpc::ServerContext*, const wire::ReleaseRequest* r, wire::Empty*) override;
  grpc::Status TryPaths(grpc::ServerContext*, grpc::ServerReaderWriter<wire::TrialStep, wire::TrialStep>* stream) override;
  grpc::Status Traffic(grpc::ServerContext*, const wire::TrafficRequest* r, wire::TrafficReply* out) override;

 private:
  /// An open migration that `who` coordinates is renewed with each word of it.
  Status coordinated(std::uint32_t id, const Caller& who);
  Status may_release(const Caller& who, const Instance& i) const;

  const Config& config_;
  SessionTable& sessions_;
  Numbers& numbers_;
  const std::vector<Role*> roles_;
  const Certificates* const certificates_;
  TrafficMeter* const traffic_;
  SaidRarely said_;  // of refused releases
  std::counting_semaphore<kTrialsMax> trials_{kTrialsMax};
};

wire::VersionReply version_of(const Config& config, std::size_t sessions, const Certificates* certificates = nullptr);
/// EBUSY: two hosts have different ones of the same part.
Status same_version(const char* what, std::uint32_t theirs, std::uint32_t ours);

}  // namespace migr
