// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The log: a line of key=value pairs for each thing that happens ("The log" in docs/operations.md). What a line belongs to is
// known to the thread that says it, so that whatever is said on the way, at any depth, can be found by its migration.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace migr {

/// Gives spdlog a logger that writes to standard error. Where that is systemd's journal, a line has no time of its own but
/// its level in front, as sd-daemon(3) has it, so that `journalctl -p warning` finds what matters.
/// Thread: before there is a second one.
void log_to_stderr(const char* name, bool verbose);
/// Of this host, for every line from now on. Thread: as above.
void set_log_host(const std::string& host);

/// What is not set is not in the line.
struct LogFields {
  std::uint32_t migration = 0;
  std::string peer;          // the host that asks for it
  std::string phase;         // "ROLE.STEP", as in fault.h
  std::optional<double> ms;  // that it took
};

/// Those of the lines of this thread.
LogFields& log_fields();

/// Until the end of a block.
class LogScope {
 public:
  LogScope() : before_(log_fields()) {}
  explicit LogScope(std::uint32_t migration) : LogScope() { log_fields().migration = migration; }
  explicit LogScope(LogFields fields) : LogScope() { log_fields() = std::move(fields); }
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;
  ~LogScope() { log_fields() = std::move(before_); }
  LogFields* operator->() { return &log_fields(); }

 private:
  LogFields before_;
};

/// What is said of others' doing, who may do it all the time: the same once a minute. Thread: any.
class SaidRarely {
 public:
  /// @return it is to be said (again)
  bool due(const std::string& what);

 private:
  std::mutex mutex_;
  std::map<std::string, std::chrono::steady_clock::time_point> said_;
};

/// The same function for another thread, whose lines belong to what those of this one do.
template <class F>
auto with_log_fields(F f) {
  return [fields = log_fields(), f = std::move(f)]() mutable {
    const LogScope scope(fields);
    return f();
  };
}

/// Eight hex digits: how a migration is called in logs, messages, commands and JSON.
std::string migration_text(std::uint32_t id);

}  // namespace migr
