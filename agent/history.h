// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The last migrations, checkpoints and restores that this host began and that touched something: STATE_DIR/history.jsonl, a
// summary (summary.h) per line, the oldest first.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "json.h"
#include "status.h"

namespace migr {

inline constexpr std::size_t kMaxHistory = 200;

/// Thread: any.
class History {
 public:
  explicit History(const std::string& state_dir, std::size_t most = kMaxHistory);
  /// On the disk when it returns; the oldest goes when there are too many, and what is no summary.
  Status add(const Json& summary);
  /// What migrd has finished or taken back by itself: how it ended is put into its entry, before or after that is there.
  Status settle(const Json& summary);
  struct Past {
    std::vector<Json> entries;
    std::vector<std::string> warnings;  // lines that were passed over
  };
  /// ENOENT is no error: nothing has been migrated yet.
  Result<Past> read() const;

 private:
  Status put(const Json& summary, bool settled);
  const std::string file_;
  const std::size_t most_;
  std::mutex mutex_;
};

/// "moved", "went back", "undecided"
std::string outcome_of(const Json& summary);
/// Of the last migration of that number.
std::optional<Json> find_migration(const std::vector<Json>& entries, std::uint32_t id);
/// The last one that took `container` from its host to another one, or to a folder: where to look for what is not here any more.
std::optional<Json> last_move(const std::vector<Json>& entries, const std::string& container);
/// Of a migration, as logs have it.
std::string migration_name(const Json& summary);

struct ExpectedStop {
  double median_ms = 0, least_ms = 0, most_ms = 0;
  std::size_t moves = 0;
  bool same = false;       // they were of this container, else of any
  bool estimated = false;  // there were none: estimate.h
};
/// From migrations to other hosts that succeeded. nullopt: there were none.
std::optional<ExpectedStop> expected_stop(const std::vector<Json>& entries, const std::string& container);

Json expected_json(const ExpectedStop& stop);
/// "expected stop: 400 ms (..)"
std::string expected_text(const ExpectedStop& stop);

/// A line each, and below it what did not fit into it, and why it went back. No line is longer than 80 columns.
std::string history_text(const std::vector<Json>& entries);

}  // namespace migr
