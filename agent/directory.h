// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Where unconnected QPs are that were born elsewhere: (GID, vQPN) of the birth -> (GID, QPN) of the moment; and at which GIDs
// each process has been. Both until the process ends. Every migrd has the whole of it (STATE_DIR/moves.json), is told of each
// migration, and tells its processes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "config.h"
#include "devices.h"
#include "limits.h"
#include "log.h"
#include "peer_link.h"
#include "process_session.h"
#include "status.h"
#include "wire.pb.h"

namespace migr {

/// Thread: any.
class Directory {
 public:
  explicit Directory(const Config& config);

  /// The name by which peers know what is at this address. `vqpn`: the number it was born with, if it never moved.
  wire::Move at(const std::string& gid, std::uint32_t pqpn, std::uint32_t vqpn);
  /// It has a name from elsewhere.
  bool came_to(const std::string& gid, std::uint32_t pqpn);
  /// Of a process that would be at this GID it is known that it has ended.
  using HasEnded = std::function<bool(const std::string& instance, const std::string& gid)>;
  /// Durable before it returns, or an error; what was well-formed is known then, too, and save_again() writes it down.
  /// @param has_ended  who goes first where there is no more room; then the oldest do, which is logged
  Status put(const wire::MovesRequest& moves, const HasEnded& has_ended = {});
  /// What put() could not write. @return what keeps it from that still
  Status save_again();
  std::vector<migr_move> all();
  /// The GIDs, not of this moment, by which somebody may know a process.
  std::vector<std::string> earlier(const Instance& instance);
  bool was_at(const Instance& instance, const std::string& gid);
  /// Some process has moved to it or from it.
  bool touched(const std::string& gid);
  /// What everybody forgets when processes have ended. None: nobody knows of them.
  wire::MovesRequest end_of(const std::vector<Instance>& instances);

 private:
  struct Address {
    std::string gid;
    std::uint32_t qpn;
    auto operator<=>(const Address&) const = default;
  };
  struct Present {
    Address at;
    std::string instance;  // its process; empty: an older migrd has told of it
  };
  Status load();
  void take(const wire::Move& m);
  void let_oldest_go(const HasEnded& has_ended);
  std::string text() const;
  Status save();

  const std::string path_;
  std::mutex mutex_;
  bool unsaved_ = false;
  bool unread_ = false;                 // what is on disk, which is not written over then
  std::vector<wire::Move> late_;        // what has come since, to be taken once more when that is read
  std::map<Address, Present> present_;  // by birth
  std::vector<Address> order_;          // oldest first
  struct Process {
    std::string instance, birth_gid, gid;
  };
  std::vector<Process> processes_;  // oldest first
  SaidRarely rarely_;
};

/// Tells one process all there is, once no thread of it can be on a way that knows nothing of it.
Status tell_moves(ProcessSession& session, std::uint32_t migration, Directory& directory);
/// To every host of the configuration, this one too. Whoever cannot be told has old addresses until it is told of others.
void tell_hosts(Peers& peers, const wire::MovesRequest& moves, int limit_ms);
/// This host: writes them down and tells its processes, all at once. Waits for `limit_ms` at most: who is silent, or in a drain, is told
/// when it listens again, and keeps no migration from going on.
Status take_moves(const std::shared_ptr<Directory>& directory, SessionTable& sessions, const wire::MovesRequest& moves, int limit_ms = kWhereMs);

}  // namespace migr
