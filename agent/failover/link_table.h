// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What the processes of this host have told of their links (links_wire.h): the half of the directory that every migrd
// has, whatever tells it of other hosts.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "link_records.h"

namespace migr {

/// Who wants to know that something has changed; calls come without any lock held, after the change.
class LinkWatcher {
 public:
  virtual ~LinkWatcher() = default;
  virtual void process_changed(const Instance&) {}  // came, went, or its links
  virtual void vqp_changed(const Instance&, const VqpName&) {}
  virtual void channel_changed(const Instance&, const Instance& /*peer*/, std::uint32_t /*link*/) {}
};

/// Thread: any.
class LinkTable {
 public:
  struct Owner {
    pid_t pid = 0;
    uid_t uid = 0;
    std::string comm, configured;
    migr_links_hello hello{};
  };
  /// Pushes KNOCK to a process: without blocking, and it may get lost.
  using Knock = std::function<void(const Instance& to, const migr_links_channel& from)>;

  explicit LinkTable(std::string host) : host_(std::move(host)) {}
  /// Before anything is told. Both may be missing.
  void set_watcher(LinkWatcher* w) { watcher_ = w; }
  void set_knock(Knock k) { knock_ = std::move(k); }
  /// Says whether names that a process has not published yet are its own. Not set: whoever comes first has them. Asked without any lock held.
  /// @param[out] bound  those that give way to who has one by more than binding it
  using Owns = std::function<Status(pid_t pid, std::span<const VqpName> names, std::size_t& offending, std::set<VqpName>& bound)>;
  void set_owns(Owns o) { owns_ = std::move(o); }

  /// What was told under this instance before is gone.
  void enter(const Instance& who, Owner owner);
  void leave(const Instance& who);

  // Of a process that has entered; ENOENT else. What fails has changed nothing.
  Status set_links(const Instance& who, std::span<const migr_links_link> links);
  /// EEXIST, ENOSPC, EINVAL, and what keeps `Owns` from telling. @param[out] offending  index of the record
  Status publish(const Instance& who, std::span<const migr_links_vqp> vqps, std::size_t& offending);
  /// None: all.
  Status withdraw(const Instance& who, std::span<const migr_links_name> names);
  /// Its end of a channel. EINVAL: see `round` in links_wire.h.
  Status offer(const Instance& who, const migr_links_channel& end);
  Status end_channel(const Instance& who, const migr_links_channel& end);
  /// @param settled  0: nothing new
  Status set_states(const Instance& who, std::span<const migr_links_vqp_state> states, std::uint64_t settled);
  /// Says them in the log, 60 lines a minute of each process. @param ports  of this host, as they are now
  Status add_switches(const Instance& who, std::span<const migr_links_switch> switches, std::span<const migr_links_port> ports);
  /// What the directory could not answer it last; empty: it could.
  void set_error(const Instance& who, const std::string& text);

  /// What is here of this name; vqp not set: nothing. `home` says whether the GID is of this host.
  wire::LinkFound find(const VqpName& name) const;
  /// `told`: an end that names a process here as its peer. Knocks there if that has none of this round.
  wire::LinkChannelAnswer answer(const wire::LinkChannel& told);
  /// What tells the GIDs of this host's devices; asked when a name is not known, not more often than every 2 s.
  using Gids = std::function<std::set<Gid>()>;
  void set_gids(Gids gids) { gids_source_ = std::move(gids); }
  /// One of those; if nothing tells them, one that a process has told of its links.
  bool home(const Gid& gid) const;
  bool here(const Instance& who) const;

  // For who writes it elsewhere. Not set: it is not there (any more).
  std::optional<wire::LinkProcess> process(const Instance& who) const;
  std::optional<wire::LinkVqp> vqp(const Instance& who, const VqpName& name) const;
  std::optional<wire::LinkChannel> channel(const Instance& who, const Instance& peer, std::uint32_t link) const;
  struct Everything {
    std::vector<Instance> processes;
    std::vector<std::pair<Instance, VqpName>> vqps;
    struct Channel {
      Instance who, peer;
      std::uint32_t link;
    };
    std::vector<Channel> channels;
  };
  Everything everything() const;

  // For people.
  std::vector<wire::LinkProcessReport> reports(bool each_vqp) const;
  /// Changes of link since the start, by cause and outcome; also of processes that have ended.
  using SwitchCounts = std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t>;
  SwitchCounts switch_counts() const;
  /// vQPs that are still on this port (0: any) of the device; a line for each process. @param[out] processes  with a link there
  std::vector<std::string> left_on(const std::string& device, std::uint32_t port, unsigned& processes) const;
  /// vQPs that can go there, and are on another link; not of processes that have settled `serial`.
  std::vector<std::string> away_from(const std::string& device, std::uint32_t port, std::uint64_t serial, unsigned& processes) const;
  /// vQPs on that port that have nowhere to go, by process; a line each.
  std::vector<std::string> stuck_on(const std::string& device, std::uint32_t port) const;

 private:
  struct Vqp {
    std::uint32_t policy = 0, default_link = 0, links = 0;
    std::uint16_t making = 0, atomics = 0;
    bool bound = false;  // see Owns
    std::vector<migr_links_path> paths;
    std::uint32_t link = 0, epoch = 0, phase = MIGR_LINKS_VQP_MAKING, atomics_now = MIGR_LINKS_DIRECT;
    std::string why;
    migr_links_vqp record(const VqpName& name) const;
  };
  struct ChannelKey {
    Instance peer;
    std::uint32_t link;
    auto operator<=>(const ChannelKey&) const = default;
  };
  struct Process {
    Owner owner;
    std::vector<migr_links_link> links;
    std::map<VqpName, Vqp> vqps;
    std::map<VqpName, std::pair<std::uint32_t, std::string>> none;  ///< QPs that are not published: their link, and why they have no backup
    std::map<ChannelKey, migr_links_channel> channels;
    std::deque<migr_links_switch> switches;
    std::deque<std::chrono::steady_clock::time_point> said;  ///< when the last lines on them were
    std::string error;
    std::uint64_t settled = 0;
  };
  Process* process_locked(const Instance& who);
  Status check_owner(const Instance& who, std::span<const migr_links_vqp> vqps, std::size_t& offending, std::set<VqpName>& bound);
  wire::LinkProcess process_wire(const Instance& who, const Process& p) const;
  using Links = std::vector<std::uint32_t>;
  static std::string link_text(const Process& p, std::uint32_t link);
  static void say_locked(Process& p, const migr_links_switch& change, std::span<const migr_links_port> ports);
  static Links links_on(const Process& p, const std::string& device, std::uint32_t port);
  std::vector<std::string> count_on(const std::string& device, std::uint32_t port, unsigned& processes, const char* how,
                                    const std::function<bool(const Process&, const Vqp&, const Links& there)>& counts) const;

  const std::string host_;
  LinkWatcher* watcher_ = nullptr;
  Knock knock_;
  Owns owns_;
  mutable std::mutex mutex_;
  std::map<Instance, Process> processes_;
  std::map<VqpName, Instance> names_;
  SwitchCounts switch_counts_;
  Gids gids_source_;
  mutable std::mutex gids_mutex_;
  mutable std::set<Gid> gids_;
  mutable std::chrono::steady_clock::time_point gids_next_{};  ///< not read before
  mutable bool gids_reading_ = false;                          ///< by one thread, without the lock: a port has a thousand, each a file
  mutable std::condition_variable gids_read_;                  ///< who asks for one that is not known waits for it
};

}  // namespace migr
