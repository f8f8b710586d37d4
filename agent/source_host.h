// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// This host as the source: what the coordinator asks for, and the journal that
// says after a crash what has to be taken back.
#pragma once

#include <map>
#include <mutex>
#include <set>

#include "claims.h"
#include "config.h"
#include "coordinator.h"
#include "fault.h"
#include "host_service.h"
#include "process_session.h"
#include "runtime.h"

namespace migr {

class SourceHost final : public Role {
 public:
  SourceHost(const Config& config, SessionTable& sessions, Claims& claims)
      : config_(config), sessions_(sessions), claims_(claims), runc_(config) {}

  /// After a start: thaws what an earlier migrd left frozen without a decision.
  void recover();

  wire::OutcomeReply outcome(std::uint32_t id) override;
  Status renew(std::uint32_t) override { return Error{ENOENT, "not here"}; }
  bool claims(const Instance& i) override { return claims_.holder(i); }

 private:
  friend class SourceRun;
  friend class StoredSource;
  struct Entry {
    wire::Outcome outcome = wire::OPEN;
    std::string container, bundle;
    std::vector<Instance> instances;
  };
  Status save(std::uint32_t id, const Entry& e);
  std::string folder(std::uint32_t id) const;

  const Config& config_;
  SessionTable& sessions_;
  Claims& claims_;
  const Runtime runc_;
  std::mutex mutex_;
  std::map<std::uint32_t, Entry> journal_;
  std::set<std::string> busy_;  // containers
};

/// One migration away from here.
class SourceRun final : public Source {
 public:
  /// `hold`: what changes the record waits in the processes, until they run again.
  SourceRun(SourceHost& host, std::uint32_t id, bool hold) : host_(host), id_(id), hold_(hold) {}
  ~SourceRun() override;
  /// As inspect() found it.
  const ContainerInfo& info() const { return info_; }
  Result<ContainerInfo> inspect(const std::string& container) override;
  Result<std::string> record(std::uint32_t id) override;
  Result<std::string> pre_dump() override;
  Result<std::uint64_t> drop_unchanged() override;
  Status suspend() override;
  Status drain() override;
  Status rollback() override;
  Status freeze() override;
  Status reconnect() override;
  Status detach_network() override;
  Status attach_network() override;
  Status checkpoint() override;
  Status thaw() override;
  Status decide(wire::Outcome outcome) override;
  Status destroy() override;
  void forget() override;

 private:
  struct Process {
    pid_t pid;
    std::shared_ptr<ProcessSession> session;
    std::vector<migr_fd_desc> fds;
    std::uint64_t described = 0;  // the state of its record
    std::vector<std::uint32_t> vqpns{};
    std::uint32_t generation = 0;  // how often it was restored before
  };
  Result<std::map<std::uint32_t, pid_t>> contexts_now() const;
  Status inspect_context(struct ContextRecord& c, std::uint32_t owner);
  Status step(FaultStep step, const std::function<Status()>& work);
  Status reconnect_all();
  Status each(const std::function<Status(Process&)>& f);  // all at once
  Status checkpoint_ahead(const std::string& parent);

  SourceHost& host_;
  const std::uint32_t id_;
  const bool hold_;
  ContainerState state_;
  ContainerInfo info_;
  std::vector<Process> processes_;
  bool busy_ = false;
  Child detach_ahead_;  // the network hook, waiting
  Child ahead_;  // the checkpoint, waiting
};

}  // namespace migr
