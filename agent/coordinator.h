// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The switchover of docs/protocol.md, seen from the source: steps 1-11 in order,
// each with its undo. It only knows the three roles below, so that a test can
// play them.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <set>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "course.h"
#include "fault.h"
#include "file_tree.h"
#include "limits.h"
#include "path_trial.h"
#include "process_session.h"
#include "room.h"
#include "status.h"
#include "undo.h"
#include "wire.pb.h"

namespace migr {

struct SourceQp {
  std::uint32_t ctx_id = 0, vqpn = 0, pqpn = 0;
  std::string gid;                   // it sends from; 16 bytes
  std::string dest_gid;
  std::uint32_t dest_pqpn = 0;
  std::uint32_t mtu = 0;             // enum ib_mtu; 0: not known
};

/// Unconnected: it has its device's GIDs.
struct DatagramQp {
  std::uint32_t ctx_id = 0, vqpn = 0, pqpn = 0;
  std::string device;
};

/// A container as step 1 found it.
struct ContainerInfo {
  std::string id, bundle;
  std::optional<wire::FolderMode> bundle_mode;               // none: no bundle, or stored by an older release
  std::vector<Instance> instances;                           // processes with RDMA resources
  std::vector<std::vector<std::string>> births;              // of each: the hosts that keep its numbers reserved
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ctxs; // ctx_id, index of its process
  std::vector<std::string> devices;
  std::vector<wire::PortGid> gids;                           // of these
  std::vector<std::pair<std::uint32_t, std::string>> earlier;  // index of a process, a GID of another host that it was at
  std::vector<pid_t> pids;                                   // of a process without a container, and of its threads: it keeps them
  std::vector<SourceQp> connected;
  std::vector<DatagramQp> datagrams;
  std::vector<std::uint32_t> vqpns;
  bool piped = false;                                        // its standard streams, to a program of its host
  std::uint64_t memory_bytes = 0;                            // resident, of all its processes
  std::vector<wire::Needs> needs;                            // of each device
  std::uint64_t filled_bytes = 0;                            // memory that they have filled, but for what is in `huge`
  HugeMemory huge;
  std::string written_unseen;                                // why what is copied ahead may be old by the stop; empty: who writes to it marks it
  std::vector<std::string> instructions;                     // of the processor that they run on
  std::string libmigr;                                       // build ID of this host's, if they have that; empty: not known
  wire::Resources resources;
  std::uint64_t image_bytes() const { return filled_bytes + huge.filled; }  // what the checkpoint will have, about
};

/// Where its applications may still mean this host by a GID, or one before it.
std::vector<wire::Move> moves_of_processes(const ContainerInfo& info, const wire::PrepareReply& prepared);
/// What stands at the destination for a GID of here: the nearest of the same port and type (migr_gid_nearness()). @return null: nothing
const wire::PortGid* like(const wire::PrepareReply& prepared, const wire::PortGid& from);

using NicWrites = std::vector<wire::NicWrite>;

/// This host. Each call is one thing that can fail and be undone.
class Source {
 public:
  virtual ~Source() = default;
  virtual Result<ContainerInfo> inspect(const std::string& container) = 0;
  /// DESCRIBE, migr.img, descriptors.json into a folder of its own; its path.
  /// From then on a migrd that is started again knows of the migration.
  virtual Result<std::string> record(const std::string& destination, const std::vector<std::string>& partners) = 0;
  /// Nothing is in the way of another round; none has begun.
  virtual Status may_pre_dump() = 0;
  /// Memory as it is now, while the container runs, or of it what has changed since the round before; its folder. After an error
  /// it is not known what was written since the round before: none of the rounds can be built upon.
  /// @param round  1, 2, ..
  virtual Result<std::string> pre_dump(unsigned round) = 0;
  /// The checkpoint will hold what has changed since that round.
  virtual Status checkpoint_after(unsigned round) = 0;
  /// Takes out of the checkpoint what the rounds have with the same content; how many bytes.
  virtual Result<std::uint64_t> drop_unchanged() = 0;
  /// From now on it is noted where NICs write to by work requests of here. @return where that cannot be, why: nothing else has changed
  virtual Status track() = 0;
  virtual void get_ready() = 0;    // waits a while for what was started ahead, so that the stop need not
  virtual Status suspend() = 0;    // and all threads seen outside
  /// QPs are counted by their place in ContainerInfo::connected. @return those that were not done in time
  /// @param gone  those whose other end is: they are not waited for
  virtual Result<wire::DrainReply> drain(int limit_ms, const std::set<std::size_t>& gone) = 0;
  /// After that, at both ends: cuts the connections, then says to each how far the other one had got.
  virtual Result<wire::CutReply> cut(const wire::CutRequest& r) = 0;
  virtual Result<wire::SettleReply> settle(const wire::SettleRequest& r) = 0;
  virtual Status rollback() = 0;   // ROLLBACK to every process
  /// FREEZE; connections closed.
  /// @param writes  since track(), by work requests of partners; null: not known
  virtual Status freeze(const NicWrites* writes) = 0;
  virtual Status reconnect() = 0;  // gates; all processes are back
  virtual Status detach_network() = 0;  // the container, if it has an address, stands still from here on, also where this fails; thaw()
  virtual Status attach_network() = 0;
  /// Leaves the container paused. ESTALE: it needs what the rounds do not have
  virtual Status checkpoint() = 0;
  virtual Status thaw() = 0;
  /// Durable before it returns; answers GetOutcome from then on.
  virtual Status decide(wire::Outcome outcome) = 0;
  virtual Status destroy() = 0;    // container, network; reserves the vQPNs
  /// Files of this migration. @param settled  nothing is left to do here; else it is tried again
  virtual void forget(bool settled) = 0;
  /// Ends of this host; null: none can be made.
  virtual std::unique_ptr<PathTrial> path_trial() { return nullptr; }
  /// Where the addresses of unconnected QPs will be; none: nobody has to be told.
  virtual Result<wire::MovesRequest> moves(const wire::PrepareReply&) { return wire::MovesRequest(); }
};

class DestinationLink {
 public:
  virtual ~DestinationLink() = default;
  virtual Status check(const wire::CheckRequest& r) = 0;
  /// Sends bundle and the early images in `folder`; adds what was sent to `bytes`.
  virtual Result<wire::PrepareReply> prepare(const wire::PrepareHeader& h, const std::string& folder, Sent& total) = 0;
  /// After a prepare() with `later`: what it left out.
  virtual Result<wire::PrepareReply> create(std::uint32_t id) = 0;
  virtual Status connect(const wire::ConnectRequest& r) = 0;
  /// null: it has no network
  virtual std::unique_ptr<PathTrial> path_trial() { return nullptr; }
  /// Sends the images in `folder`, memory while it is being `written`; adds what was sent to `bytes`.
  /// @param pre_copy_round  0: the checkpoint
  virtual Status upload(std::uint32_t id, const std::string& folder, unsigned pre_copy_round, const Written& written, Sent& total) = 0;
  /// The container may write to what prepare() has sent of its bundle.
  virtual bool bundle_changes() const { return false; }
  /// Once it is stopped: sends what has changed of that, and takes away there what is not here any more.
  virtual Status upload_changes(std::uint32_t, Sent&) { return {}; }
  virtual Status attach_network(std::uint32_t id) = 0;
  virtual Status full_restore(std::uint32_t id) = 0;
  virtual Status ready(std::uint32_t id) = 0;
  virtual Status commit(std::uint32_t id) = 0;
  virtual Result<wire::CommitReply> rebind(std::uint32_t id) = 0;
  virtual Result<wire::ResumeReply> resume(std::uint32_t id) = 0;
  virtual Status abort(std::uint32_t id) = 0;
  virtual Result<wire::Outcome> outcome(std::uint32_t id) = 0;
  virtual Status renew(std::uint32_t id) = 0;
};

class PartnerLink {
 public:
  virtual ~PartnerLink() = default;
  virtual const std::string& name() const = 0;
  virtual Result<wire::FindReply> find(const wire::FindRequest& r) = 0;
  virtual Result<wire::PartnerPrepareReply> prepare(const wire::PartnerPrepareRequest& r) = 0;
  virtual Result<wire::PartnerPrepareReply> create(std::uint32_t id) = 0;
  virtual Status connect(const wire::ConnectRequest& r) = 0;
  virtual std::unique_ptr<PathTrial> path_trial() = 0;
  virtual Status suspend(std::uint32_t id) = 0;
  virtual Result<wire::TrackReply> track(std::uint32_t id) = 0;
  virtual Result<wire::DrainReply> drain(std::uint32_t id, int limit_ms) = 0;
  virtual Result<wire::CutReply> cut(const wire::CutRequest& r) = 0;
  virtual Result<wire::SettleReply> settle(const wire::SettleRequest& r) = 0;
  virtual Status switch_path(std::uint32_t id) = 0;
  /// Without `resumed` in the answer to one with `resume`: an older host, which is to be told.
  virtual Result<wire::KeysReply> keys(const wire::KeysRequest& r) = 0;
  virtual Result<wire::ResumeReply> resume(std::uint32_t id) = 0;
  /// What rollback() begins with; nobody sends yet.
  virtual Status old_path(std::uint32_t id) = 0;
  virtual Status rollback(std::uint32_t id) = 0;
  virtual Status renew(std::uint32_t id) = 0;
  /// What the ports of that host have carried, from back_ms ago until now.
  virtual Result<wire::TrafficReply> traffic(std::uint32_t back_ms) = 0;
};

struct Told {
  wire::Outcome outcome;  // COMMITTED: it runs there; UNDONE: it never will; OPEN: not known
  Status why;             // what the destination said last
};
/// After the commit record: tells the destination until it has said what became of it, or the limit is over. The
/// destination's own word that it never will is all that makes it safe to go back: it knew of the migration before the commit
/// record was written, so one that does not may have let it run, and not know any more (ENOENT).
Told tell_commit(DestinationLink& destination, std::uint32_t id, int limit_ms, int step_ms);

class Coordinator {
 public:
  struct Settings {
    std::string self;           // name of this host
    std::string fault;          // fault.h
    std::uint32_t abi = 0;      // of migr.ko here
    int undecided_ms = kUndecidedMs;
    int resolve_step_ms = kResolveStepMs;
    std::uint64_t pre_copy_from = kPreCopyFromBytes;  // so much memory is copied before the stop, too; 0: it has to be
    bool pre_setup = true;      // false: RDMA objects are made and connected during the stop, to compare with
    int busy_wait_ms = kBusyWaitMs;
    int forming_ms = kFormingMs;
    int drain_ms = kDrainMs;
    int max_stop_ms = 0;        // it goes back if it stands still for longer and the commit is not decided; 0: however long it takes
    unsigned pre_copy_rounds = 0;  // so often memory has to be copied before the stop, if it is; 0: as long as it helps
    enum { kMove, kKeep, kGiveBack } what = kMove;    // a checkpoint on disk has no partners: their connections end
    /// A phase did not end within kPhaseMs: no call of it is to be waited for any more. Default: ends migrd.
    std::function<void(const std::string& phase)> stands_still{};
    std::shared_ptr<Course> course = std::make_shared<Course>();  // of which this is a try
  };
  using Say = std::function<void(const wire::Progress&)>;

  /// `partners`: every host that may have partners. Nothing is owned.
  Coordinator(Settings settings, Source& source, DestinationLink& destination, std::vector<PartnerLink*> partners, Say say)
      : set_(std::move(settings)), source_(source), dest_(destination), hosts_(std::move(partners)), say_(std::move(say)) {}

  wire::Summary migrate(const std::string& container, const std::string& to, std::uint32_t id);
  /// What migrate() asks before it begins; touches nothing. Instead of migrate().
  wire::PlanReply plan(const std::string& container, const std::string& to, std::uint32_t id);
  /// It went back because what the record says has changed meanwhile: another try may do.
  bool try_again() const { return failed_with_ == EAGAIN; }
  /// It went back because what was copied ahead does not do for the checkpoint: another try may, without.
  bool copied_in_vain() const { return failed_with_ == ESTALE; }
  /// It went back because another migration holds a process of this one: when that is over, another try may do.
  bool busy() const { return failed_with_ == EINPROGRESS; }

 private:
  struct Affected {  // one partner host
    PartnerLink* link;
    std::vector<wire::PartnerQp> qps;  // index: into info_.connected
  };
  struct Path {  // between a partner host and the destination, and the one that it takes the place of
    PathToTry there, here;
    std::string why{};  // it fails
  };
  void begin(const std::string& container, const std::string& to, std::uint32_t id);
  Status check(const std::string& container, const std::string& to);
  Status inspect(const std::string& container);
  Status check_destination(const std::string& to);
  void find_twins();
  void note_gone(std::size_t i);
  Status find_partners();
  Result<std::vector<Result<wire::FindReply>>> ask_hosts();
  Status prepare();
  Status create();
  Status connect();
  Status reach(const Affected& a, std::vector<Path> paths);
  Status track();
  Status pre_copy();
  bool must_copy_ahead() const { return set_.pre_copy_rounds || !set_.pre_copy_from; }
  Status not_copied_ahead(const Error& why);
  Status drain();
  Status replay(std::set<std::size_t> left, const std::string& what);
  void old_paths_first();
  void push_abort();
  Status let_go(const Affected& a);
  Status freeze();
  void start_upload();
  Status copy();
  Status commit();
  Status resume();
  Status goes_on() const;
  Status insist(const std::function<Status()>& call);
  Status both(const std::function<Status()>& here, const std::function<Status(Affected&)>& there);
  Status phase(FaultStep step, const std::function<Status()>& f);
  /// The same without fault points.
  Status timed(const std::string& name, const std::function<Status()>& f);
  /// A part of a phase; may run beside others.
  Status step(const std::string& name, const std::function<Status()>& f);
  /// @param ago_ms  when it ended
  void note_step(const std::string& name, double ms, double ago_ms = 0);
  double rdma_ms() const;
  void watch(const std::string& phase);
  void more_time();
  void say(const wire::Progress& p);
  void note(const std::string& text);
  /// About so many bytes are sent from now on; 0: that is over.
  void sends(std::uint64_t bytes);
  void say_how_far();
  void look_at_traffic();
  void tell_progress(std::atomic<bool>& stop);
  void look_at_stop();
  void lease(std::atomic<bool>& stop);

  std::string peer_of(const SourceQp& q) const;
  /// Name of an undo of this host.
  std::string of_here(const char* what) const;

  const Settings set_;
  Source& source_;
  DestinationLink& dest_;
  std::vector<PartnerLink*> hosts_;
  const Say say_;

  std::uint32_t id_ = 0;
  std::string to_;
  ContainerInfo info_;
  std::vector<Affected> affected_;
  std::map<std::size_t, std::size_t> twins_;  // QPs that are connected to each other, in info_.connected
  std::set<std::size_t> gone_;                // QPs whose other end does not exist any more
  std::string early_;                    // folder of the early images
  unsigned rounds_ahead_ = 0;            // in which memory is copied before the stop, at most
  bool pre_copied_ = false;              // the destination has a pre-dump
  bool tracked_ = false;                 // `writes_` will be all that partners' NICs write to memory of here
  NicWrites writes_;
  enum class Dump { kRuns, kWhole, kFailed };
  std::atomic<Dump> dump_ = Dump::kRuns;
  std::future<Status> upload_;           // beside the dump
  std::future<void> old_paths_;          // beside what else is taken back; valid: asked for
  std::vector<std::future<Status>> let_go_;  // of affected_; empty: not yet
  std::future<Status> ended_there_;      // what the destination was at; valid: told to
  wire::PrepareReply prepared_;
  std::vector<std::vector<wire::Spare>> spares_;  // per affected host
  wire::CommitReply keys_;
  Sent sent_;
  std::mutex phase_mutex_;               // guards what follows, to said_at_
  std::string phase_;                    // empty: none
  double phase_until_ = 0;               // ms, monotonic, as the others
  double phase_began_ = 0, said_at_ = 0;
  struct {
    std::uint64_t before = 0, of = 0;    // of sent_.passed; in all
    double since = 0;
  } sending_;
  std::mutex say_mutex_;
  double began_at_ = 0;                  // ms, monotonic
  std::atomic<double> frozen_at_ = 0;    // ms, monotonic; 0: not yet
  std::atomic<bool> runs_again_ = false, goes_back_ = false;
  bool touched_ = false, committed_ = false, undecided_ = false;
  int failed_with_ = 0;
  wire::Summary summary_;
  std::mutex steps_;                     // guards summary_.steps
  UndoStack undo_;
};

}  // namespace migr
