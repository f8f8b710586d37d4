// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Other programs: run to the end with a limit, or kept as a child.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "status.h"

namespace migr {

using Argv = std::vector<std::string>;
using Env = std::vector<std::string>;  // "NAME=value", added to our own

struct CommandResult {
  int status = 0;    // exit status; 128 + signal
  std::string out;   // stdout, whole unless `cut`
  std::string err;   // stderr, at most kCommandOutputBytes, the last ones
  bool cut = false;  // stdout was longer than kCommandAnswerBytes: `out` is the end of it
  /// Last line of stderr (else stdout) that says something.
  std::string last_line() const;
};

/// The same command, as the first that the kernel ends when memory runs out: not the service that it saves.
Argv first_to_go(const Argv& argv);

/// Runs a command with no input. ETIMEDOUT: it was killed, with its process group.
/// @param limit_ms  one of limits.h: then the error says which
Result<CommandResult> run_command(const Argv& argv, const Env& env, const int& limit_ms);

/// As run_command, but an exit status other than 0 is an error with last_line().
Result<CommandResult> run_checked(const Argv& argv, const Env& env, const int& limit_ms);

/// A program that runs beside us. Its destructor kills it, with its process group.
class Child {
 public:
  /// `input`: say() reaches it; else it reads nothing.
  static Result<Child> start(const Argv& argv, const Env& env, const std::string& output_file, bool input = false);
  Child() = default;
  Child(Child&& o) noexcept;
  Child& operator=(Child&& o) noexcept;
  ~Child();

  pid_t pid() const { return pid_; }
  bool running();  // reaps
  int status() const { return status_; }
  bool wait(int limit_ms);  // false: still running
  void signal(int sig);
  void forget() { pid_ = 0; }
  /// A line to its input. EPIPE: it has ended.
  Status say(const std::string& line);
  /// Until it has written this line. @return false: it has ended, or the limit is over
  bool wait_for(const std::string& line, int limit_ms);

 private:
  std::string output_;
  std::uintmax_t output_from_ = 0;  // what is before was there when it started
  pid_t pid_ = 0;
  int status_ = -1;
  int input_ = -1;
};

/// Waits until nothing is left of a process group. @return false: the limit is over
bool group_ended(pid_t group, int limit_ms);

/// The last lines of a file, at most `bytes`.
std::string tail_of(const std::string& path, std::size_t bytes);
/// Of a log of CRIU's: the first error, which is the cause (a probe for tun devices always complains). Empty: none.
std::string criu_error(const std::string& log);

/// Where the logs of what has failed stay, by the number of its migration: STATE_DIR/failed/NAME, a file or a folder, which is not made here.
std::string failure_kept_in(const std::string& state_dir, const std::string& name);
/// Makes room there for one of that name: its folder, and with it `kFailuresKept`, the newest.
void make_room_for_failure(const std::string& state_dir, const std::string& name);
constexpr std::size_t kFailuresKept = 10;

}  // namespace migr
