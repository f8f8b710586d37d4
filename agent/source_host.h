// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// This host as the source: what the coordinator asks for, and the journal that
// says after a crash what has to be taken back.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "claims.h"
#include "config.h"
#include "coordinator.h"
#include "course.h"
#include "detached_threads.h"
#include "directory.h"
#include "fault.h"
#include "host_service.h"
#include "huge_zero_page.h"
#include "journal.h"
#include "numbers.h"
#include "process_session.h"
#include "replay.h"
#include "runtime.h"

namespace migr {

class SourceHost final : public Role {
 public:
  /// Links to the hosts that take part. ENOENT: no such peer.
  using ToDestination = std::function<Result<std::unique_ptr<DestinationLink>>(const std::string&)>;
  using ToPartner = std::function<Result<std::unique_ptr<PartnerLink>>(const std::string&)>;
  /// How a migration ended that no coordinator could bring to its end. `ended`: who began it knows, and only cleaning up was left.
  using Settled = std::function<void(const wire::Summary&, bool ended)>;
  SourceHost(const Config& config, SessionTable& sessions, Claims& claims, Numbers& numbers, Directory& directory,
             ToDestination to_destination, ToPartner to_partner);
  /// Before recover(). Called from any thread.
  void set_settled(Settled settled) { settled_ = std::move(settled); }
  /// The network of a container that came here is still being opened: it must not be opened where it has gone from.
  using Opens = std::function<bool(const std::string&)>;
  /// Before any migration.
  void set_opens(Opens opens) { opens_ = std::move(opens); }

  /// Of what begins here: as long as somebody holds it, it is among the open ones, and nothing else of that name begins. EBUSY: so it is already.
  Result<std::shared_ptr<Course>> begin(const std::string& container, const std::string& to, std::uint32_t id);
  /// Nothing begins here any more, and what is under way goes back, as if it was cancelled.
  void give_up();
  /// What has begun here is over, whatever became of it.
  bool is_idle();

  /// The time of one of this container that begins now: later than of all before it that are known here, also by a clock that was set back.
  std::int64_t begins_s(const std::string& container);

  /// After a start: migrations that an earlier migrd left in the middle are known, and hold their processes.
  void recover();
  /// They are finished or taken back, in threads. Once hosts can be reached, this one, too.
  void settle_recovered();
  /// The same for one that ended here without being settled.
  void settle_later(std::uint32_t id, bool ended);
  /// Nothing is settled any more: the next migrd finds it. When nobody begins anything here, and before what it calls goes.
  /// @return false: it goes on, in a call that takes longer
  bool end() { return threads_.end(); }

  wire::OutcomeReply outcome(std::uint32_t id) override;
  Status readable(std::uint32_t id) override { return unread_.of(id); }
  Status renew(std::uint32_t, const Caller&) override { return Error{ENOENT, "not here"}; }
  void tick() override;
  /// Migrations that are settled, and were written down so long ago: in memory and on disk.
  void forget_settled(std::chrono::steady_clock::duration ago);
  bool claims(const Instance& i) override { return claims_.holder(i); }
  std::vector<wire::OpenMigration> open_migrations() override;
  Status order(std::uint32_t id, wire::Outcome outcome, bool force) override;
  Result<wire::OpenMigration> cancel(std::uint32_t id, const std::string& container) override;

 private:
  friend class SourceRun;
  friend class StoredSource;
  struct Entry {
    journal::Source record;
    bool running = false;  // its coordinator is at work
    bool settling = false;
    bool unstarted = false;  // settle() had no thread; tick() tries again
    bool ended = false;      // its end was told
    bool unsaved = false;    // what is on the disk is older
    bool known = false;      // settle() has heard what became of it
    std::string waits_for;   // of settle()
    wire::Outcome ordered = wire::UNKNOWN;
    std::chrono::steady_clock::time_point written = std::chrono::steady_clock::now();
  };
  Status save(std::uint32_t id, const Entry& e);
  void keep(std::uint32_t id, const Entry& e);
  void save_again();
  Result<Entry> entry(std::uint32_t id);
  void settle(std::uint32_t id);
  void tell_settled(std::uint32_t id, const Entry& e) const;
  Status find_outcome(std::uint32_t id, DestinationLink* destination);
  void let_go_late(const std::vector<Instance>& instances) const;
  void end_dump(std::uint32_t id) const;
  Status take_back(std::uint32_t id, Entry& e, DestinationLink* destination);
  Status finish(std::uint32_t id, Entry& e, DestinationLink* destination);
  Status remove(std::uint32_t id, journal::Source& r);
  void note(std::uint32_t id, const journal::Source& r);
  std::string folder(std::uint32_t id) const;
  bool settled(std::uint32_t id);
  Status is_at_rest(const std::string& container) const;
  wire::OpenMigration open_of(const Course& course) const;

  const Config& config_;
  Settled settled_;
  Opens opens_;
  SessionTable& sessions_;
  Claims& claims_;
  Numbers& numbers_;
  Directory& directory_;
  const Runtime runc_;
  const ToDestination to_destination_;
  const ToPartner to_partner_;
  const Journal<journal::Source> journal_;
  Unread unread_;  // by recover()
  HugeZeroPage huge_zero_page_;
  std::mutex mutex_;
  std::map<std::uint32_t, Entry> entries_;
  std::map<std::string, std::weak_ptr<Course>> busy_;  // by the container
  bool gives_up_ = false;
  DetachedThreads threads_;  // last: they use all of this
};

/// One migration away from here.
class SourceRun final : public Source {
 public:
  enum class Describe {
    kLook,  // only to see whether it could be moved: the processes do nothing
    kMove,
    kHold,  // what changes the record waits in the processes, until they run again
  };
  SourceRun(SourceHost& host, std::uint32_t id, Describe how) : host_(host), id_(id), how_(how) {}
  ~SourceRun() override;
  /// As inspect() found it.
  const ContainerInfo& info() const { return info_; }
  Result<ContainerInfo> inspect(const std::string& container) override;
  Result<std::string> record(const std::string& destination, const std::vector<std::string>& partners) override;
  Status may_pre_dump() override;
  Result<std::string> pre_dump(unsigned round) override;
  Status checkpoint_after(unsigned round) override;
  Result<std::uint64_t> drop_unchanged() override;
  Status track() override;
  void get_ready() override;
  Status suspend() override;
  Result<wire::DrainReply> drain(int limit_ms, const std::set<std::size_t>& gone) override;
  Result<wire::CutReply> cut(const wire::CutRequest& r) override;
  Result<wire::SettleReply> settle(const wire::SettleRequest& r) override;
  Status rollback() override;
  Status freeze(const NicWrites* writes) override;
  Status reconnect() override;
  Status detach_network() override;
  Status attach_network() override;
  Status checkpoint() override;
  Status thaw() override;
  Status decide(wire::Outcome outcome) override;
  Status destroy() override;
  void forget(bool settled) override;
  std::unique_ptr<PathTrial> path_trial() override { return trial_of_host(); }
  Result<wire::MovesRequest> moves(const wire::PrepareReply& prepared) override;

 private:
  Status has_no_huge_pages() const;
  struct Process {
    pid_t pid;
    std::shared_ptr<ProcessSession> session;
    std::vector<migr_fd_desc> fds;
    std::uint64_t described = 0;         // the state of its record
    std::vector<migr_fd_desc> memory{};  // MIGR_FD_COUNT of when it was frozen
    std::vector<std::uint32_t> vqpns{};
    std::uint32_t generation = 0;  // how often it was restored before
  };
  Result<std::vector<struct ContextRecord>> contexts_now() const;
  void count();
  const CountedQps& counted(const Process& p) const;
  Status inspect_context(struct ContextRecord& c, std::uint32_t owner, std::span<const migr_fd_desc> described);
  Status knows_its_objects(Process& p, std::vector<struct ContextRecord> ctxs);
  Status step(FaultStep step, const std::function<Status()>& work);
  bool claim(const ProcessSession& s);
  Status reconnect_all();
  static Error changed(pid_t pid);
  Status each(const std::function<Status(Process&)>& f);  // all at once
  Status each_back(const std::function<Status(Process&)>& f);
  Status find_session(Process& p);
  Status as_described();
  Status checkpoint_ahead(const std::string& parent);
  Result<std::uint64_t> find_written(Process& p, const NicWrites* by_partners) const;

  SourceHost& host_;
  const std::uint32_t id_;
  const Describe how_;
  ContainerState state_;
  ContainerInfo info_;
  std::vector<Process> processes_;
  std::vector<CountedQps> counted_;  // of each of them
  std::vector<Instance> claimed_;
  SourceHost::Entry entry_;
  Child detach_ahead_;                   // the network hook, waiting
  Child ahead_;                          // the checkpoint, waiting
  std::string pre_copied_;               // folder of the last round, beside that of the images
  std::shared_ptr<void> no_huge_zeros_;  // from the first round on, until what is dumped stands still
};

}  // namespace migr
