// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "limits.h"
#include "pidfd.h"

extern char** environ;

namespace migr {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kFirstToGo[] = {"choom", "-n", "1000", "--"};
constexpr int kLookMs = 10;  // between two looks at what nothing tells of

/// So long a poll may last that has it.
int poll_ms(const Pidfd& pidfd, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return pidfd ? static_cast<int>(std::max<std::int64_t>(left, 0)) : kLookMs;
}

// Not what goes before it.
const std::string& program_of(const Argv& argv) {
  constexpr std::size_t kBefore = std::size(kFirstToGo);
  return argv.size() > kBefore && std::equal(std::begin(kFirstToGo), std::end(kFirstToGo), argv.begin()) ? argv[kBefore] : argv[0];
}

int exit_status(int st) { return WIFEXITED(st) ? WEXITSTATUS(st) : 128 + WTERMSIG(st); }

// `in` < 0: no input
Result<pid_t> spawn(const Argv& argv, const Env& env, int in, int out, int err) {
  std::vector<char*> args, vars;
  for (const auto& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);
  for (char** e = environ; *e; e++) {
    const std::string_view have(*e);
    const auto name = have.substr(0, have.find('=') + 1);
    if (std::none_of(env.begin(), env.end(), [&](const std::string& n) { return n.starts_with(name); })) vars.push_back(*e);
  }
  for (const auto& e : env) vars.push_back(const_cast<char*>(e.c_str()));
  vars.push_back(nullptr);

  posix_spawn_file_actions_t fa;
  posix_spawnattr_t at;
  posix_spawn_file_actions_init(&fa);
  posix_spawnattr_init(&at);
  if (in < 0)
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
  else
    posix_spawn_file_actions_adddup2(&fa, in, 0);
  posix_spawn_file_actions_adddup2(&fa, out, 1);
  posix_spawn_file_actions_adddup2(&fa, err, 2);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  sigdelset(&all, SIGKILL);
  sigdelset(&all, SIGSTOP);
  posix_spawnattr_setsigmask(&at, &none);
  posix_spawnattr_setsigdefault(&at, &all);
  posix_spawnattr_setpgroup(&at, 0);
  posix_spawnattr_setflags(&at, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int e = posix_spawnp(&pid, args[0], &fa, &at, args.data(), vars.data());
  posix_spawn_file_actions_destroy(&fa);
  posix_spawnattr_destroy(&at);
  if (e) return sys_error("cannot run " + argv[0], e);
  return pid;
}

}  // namespace

std::string CommandResult::last_line() const {
  for (const std::string* s : {&err, &out}) {
    std::size_t end = s->find_last_not_of(" \r\n\t");
    if (end == std::string::npos) continue;
    const std::size_t start = s->rfind('\n', end);
    return s->substr(start == std::string::npos ? 0 : start + 1, end - (start == std::string::npos ? 0 : start + 1) + 1);
  }
  return "it said nothing";
}

Argv first_to_go(const Argv& argv) {
  Argv a(std::begin(kFirstToGo), std::end(kFirstToGo));
  a.insert(a.end(), argv.begin(), argv.end());
  return a;
}

Result<CommandResult> run_command(const Argv& argv, const Env& env, const int& limit_ms) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC)) return sys_error("pipe");
  if (pipe2(err, O_CLOEXEC)) {
    const int e = errno;
    close(out[0]), close(out[1]);
    return sys_error("pipe", e);
  }
  auto pid = spawn(argv, env, -1, out[1], err[1]);
  close(out[1]);
  close(err[1]);
  CommandResult r;
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  bool late = false;
  int st = 0;
  if (pid) {
    const Pidfd pidfd(*pid);
    pollfd fds[3] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}, pidfd.to_poll()};
    std::string* to[2] = {&r.out, &r.err};
    // Something that it started may keep the pipes open: its own end counts.
    for (bool ended = false; !ended || fds[0].fd >= 0 || fds[1].fd >= 0;) {
      const int n = poll(fds, ended ? 2 : 3, ended ? 0 : poll_ms(pidfd, deadline));
      for (int i = 0; n > 0 && i < 2; i++) {
        if (!fds[i].revents) continue;
        char buf[4096];
        const ssize_t got = read(fds[i].fd, buf, sizeof buf);
        if (got <= 0) {
          fds[i].fd = -1;
        } else {
          to[i]->append(buf, static_cast<std::size_t>(got));
          if (to[i]->size() <= (i ? kCommandOutputBytes : kCommandAnswerBytes)) continue;
          r.cut = r.cut || !i;
          to[i]->erase(0, to[i]->size() - kCommandOutputBytes);
        }
      }
      if (ended && n <= 0) break;
      if (!ended && waitpid(*pid, &st, WNOHANG) == *pid) ended = true;
      if (!ended && Clock::now() > deadline) {
        late = true;
        kill(-*pid, SIGKILL);
        waitpid(*pid, &st, 0);
        break;
      }
    }
  }
  close(out[0]);
  close(err[0]);
  if (!pid) return pid.error();
  if (late) return Error{ETIMEDOUT, program_of(argv) + " did not end within " + std::to_string(limit_ms) + " ms" + advice_on(limit_ms)};
  r.status = exit_status(st);
  return r;
}

Result<CommandResult> run_checked(const Argv& argv, const Env& env, const int& limit_ms) {
  auto r = run_command(argv, env, limit_ms);
  if (r && r->status) return Error{ECHILD, r->last_line()};
  return r;
}

Result<Child> Child::start(const Argv& argv, const Env& env, const std::string& output_file, bool input) {
  int in[2] = {-1, -1};
  if (input && pipe2(in, O_CLOEXEC)) return sys_error("pipe");
  const int fd = open(output_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const int err = errno;
  struct stat st {};
  const std::uintmax_t output_from = fd >= 0 && !fstat(fd, &st) ? static_cast<std::uintmax_t>(st.st_size) : 0;
  auto pid = fd < 0 ? Result<pid_t>(sys_error("cannot write " + output_file, err)) : spawn(argv, env, in[0], fd, fd);
  for (const int f : {fd, in[0]})
    if (f >= 0) close(f);
  Child c;
  c.input_ = in[1];
  if (!pid) return pid.error();
  c.pid_ = *pid;
  c.output_ = output_file;
  c.output_from_ = output_from;
  return c;
}

Status Child::say(const std::string& line) {
  const std::string text = line + "\n";
  if (write(input_, text.data(), text.size()) == static_cast<ssize_t>(text.size())) return {};
  return sys_error("writing to a program");
}

bool Child::wait_for(const std::string& line, int limit_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  for (;;) {
    const bool goes_on = running();
    std::ifstream in(output_);
    in.seekg(static_cast<std::streamoff>(output_from_));
    for (std::string said; std::getline(in, said);)
      if (said == line && !in.eof()) return true;
    if (!goes_on || Clock::now() > deadline) return false;
    usleep(kLookMs * 1000);
  }
}

Child::Child(Child&& o) noexcept
    : output_(std::move(o.output_)), output_from_(o.output_from_), pid_(std::exchange(o.pid_, 0)), status_(o.status_), input_(std::exchange(o.input_, -1)) {}

Child& Child::operator=(Child&& o) noexcept {
  std::swap(pid_, o.pid_);
  std::swap(status_, o.status_);
  std::swap(input_, o.input_);
  std::swap(output_, o.output_);
  std::swap(output_from_, o.output_from_);
  return *this;
}

Child::~Child() {
  if (input_ >= 0) close(input_);
  if (!running()) return;
  signal(SIGKILL);
  waitpid(pid_, nullptr, 0);
}

bool Child::running() {
  if (!pid_) return false;
  int st = 0;
  if (waitpid(pid_, &st, WNOHANG) == 0) return true;
  status_ = exit_status(st);
  pid_ = 0;
  if (input_ >= 0) close(std::exchange(input_, -1));  // who had it may be kept for long
  return false;
}

bool Child::wait(int limit_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  const Pidfd pidfd(pid_);
  while (running()) {
    if (Clock::now() > deadline) return false;
    pollfd p = pidfd.to_poll();
    poll(&p, 1, poll_ms(pidfd, deadline));
  }
  return true;
}

void Child::signal(int sig) {
  if (pid_) kill(-pid_, sig);
}

bool group_ended(pid_t group, int limit_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  for (; !kill(-group, 0) || errno != ESRCH; usleep(kLookMs * 1000))
    if (Clock::now() > deadline) return false;
  return true;
}

std::string criu_error(const std::string& log) {
  std::istringstream in(tail_of(log, 64 << 10));
  for (std::string line; std::getline(in, line);)
    if (line.find("Error (") != std::string::npos && line.find("(criu/tun.c:") == std::string::npos) return line;
  return {};
}

std::string failure_kept_in(const std::string& state_dir, const std::string& name) { return state_dir + "/failed/" + name; }

void make_room_for_failure(const std::string& state_dir, const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code ec;
  const std::string mine = failure_kept_in(state_dir, name);
  fs::remove_all(mine, ec);
  fs::create_directories(fs::path(mine).parent_path(), ec);
  std::vector<std::pair<fs::file_time_type, fs::path>> all;
  for (fs::directory_iterator one(fs::path(mine).parent_path(), ec), end; !ec && one != end; one.increment(ec)) {
    std::error_code gone;
    all.emplace_back(one->last_write_time(gone), one->path());
  }
  std::sort(all.begin(), all.end());
  for (std::size_t i = 0; i + kFailuresKept <= all.size(); i++) fs::remove_all(all[i].second, ec);
}

std::string tail_of(const std::string& path, std::size_t bytes) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return {};
  const auto size = static_cast<std::size_t>(in.tellg());
  in.seekg(static_cast<std::streamoff>(size > bytes ? size - bytes : 0));
  std::string s((std::istreambuf_iterator<char>(in)), {});
  return s;
}

}  // namespace migr
