// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "runtime.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>

#include "limits.h"
#include "process.h"

namespace migr {
namespace {

// Empty: it has ended.
std::string pid_namespace(pid_t pid) {
  std::error_code ec;
  return std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/ns/pid", ec).string();
}

bool same_pid_namespace(pid_t a, pid_t b) {
  const auto x = pid_namespace(a);
  return !x.empty() && x == pid_namespace(b);
}

bool taken(pid_t pid) { return kill(pid, 0) == 0 || errno == EPERM; }

}  // namespace

Result<ContainerState> Runtime::state(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? bare_.state(*pid) : runc_.state(id);
}

bool Runtime::exists(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? taken(*pid) : runc_.exists(id);
}

std::string Runtime::life(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? life_of(*pid) : runc_.life(id);
}

bool Runtime::is_still(const std::string& id, const std::string& began) const {
  return began.empty() ? !bare_pid(id) && runc_.exists(id) : life(id) == began;
}

std::function<std::string(pid_t)> Runtime::containers() const {
  std::map<std::string, std::string> by_namespace;
  for (const auto& id : runc_.ids())
    if (const pid_t init = runc_.init_pid(id); init > 0) by_namespace.emplace(pid_namespace(init), id);
  by_namespace.erase(pid_namespace(getpid()));  // one without a namespace of its own
  by_namespace.erase("");
  return [by_namespace = std::move(by_namespace)](pid_t pid) {
    const auto c = by_namespace.find(pid_namespace(pid));
    return c == by_namespace.end() ? std::string() : c->second;
  };
}

std::string Runtime::ended_by(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? "kill " + std::to_string(*pid) : runc_.typed("delete --force " + id);
}

Status Runtime::name_is_free(const std::string& id) const {
  if (!exists(id)) return {};
  if (const auto pid = bare_pid(id))
    return Error{EEXIST, "process number " + std::to_string(*pid) + " is in use, and a restored process has the number that it had"};
  return Error{EEXIST, "the name '" + id + "' is taken by another container; to be rid of it there: " + ended_by(id)};
}

Status Runtime::check_verbs(const std::string& id) const { return bare_pid(id) ? Status(bare_.version()) : runc_.check_verbs(); }

// A process of `runc exec` is not a child of the container's first one, and CRIU dumps only what is: it would be gone.
Status Runtime::started_beside(const ContainerState& c, int limit_ms) const {
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);;) {
    auto all = runc_.pids(c);
    if (!all) return all.error();
    // One process after the other is looked at: what begins or ends meanwhile does not matter.
    const auto other = std::find_if(all->begin(), all->end(), [&](pid_t pid) { return !descends(pid, c.pid); });
    if (other == all->end()) return {};
    if (std::chrono::steady_clock::now() >= until)
      return Error{EOPNOTSUPP, fmt::format("process {} ({}) was started in '{}' with runc exec and is no descendant of its first process, so it cannot move with it; "
                                           "end it, or start such programs in the background ({} setsid -f CMD)",
                                           *other, name_of(*other), c.id, runc_.typed("exec " + c.id))};
    usleep(100'000);
  }
}

Status Runtime::may_leave(const ContainerState& c) const {
  const auto pid = bare_pid(c.id);
  if (const auto terminal = has_terminal(c.bundle); !terminal) return terminal;
  else if (*terminal)
    return Error{EOPNOTSUPP, fmt::format("'{}' has a terminal, which runc does not restore; start it without one (process.terminal of {}/config.json)", c.id, c.bundle)};
  if (auto s = pid ? Status() : started_beside(c, kExecMs); !s) return s;
  if (auto s = terminals_stay(c); !s) return s;
  if (auto s = eventfds_stay(c); !s) return s;
  if (!pid) return {};
  if (auto s = bare_.connections_stay(*pid); !s) return s;
  return bare_.pipes_stay(*pid);
}

Status Runtime::terminals_stay(const ContainerState& c) const {
  const auto all = pids(c);
  if (!all) return all.error();
  if (const auto t = terminal_elsewhere(*all))
    return Error{EOPNOTSUPP, fmt::format("process {} ({}) has a terminal ({}, descriptor {}), whose other end does not move with it; start it without one (setsid -f CMD </dev/null >LOG 2>&1)",
                                         t->pid, name_of(t->pid), t->name, t->fd)};
  return {};
}

Status Runtime::eventfds_stay(const ContainerState& c) const {
  const auto all = pids(c);
  if (!all) return all.error();
  for (const pid_t pid : *all)
    if (const auto fd = semaphore_of(pid))
      return Error{EOPNOTSUPP, fmt::format("process {} ({}) has an eventfd that is a semaphore (EFD_SEMAPHORE, descriptor {}), which CRIU would restore as a counter: who reads it first would take all of it",
                                           pid, name_of(pid), *fd)};
  return {};
}

bool Runtime::is_piped(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? !pipes_elsewhere(tree_of(*pid)).empty() : !pipes_in(runc_.streams(id)).empty();
}

Status Runtime::bundle_is_free(const std::string& bundle) const {
  if (bundle.empty()) return {};
  for (const auto& id : runc_.ids())
    if (runc_.bundle_of(id) == bundle)
      return Error{EEXIST, fmt::format("the container '{}' there runs from {}, which is where this one's bundle is to be; to be rid of it there: {}", id, bundle, ended_by(id))};
  return {};
}

Result<std::vector<pid_t>> Runtime::pids(const ContainerState& c) const {
  const auto pid = bare_pid(c.id);
  return pid ? bare_.pids(*pid) : runc_.pids(c);
}

Status Runtime::early_images(const std::string& id, const std::string& images) const {
  const auto pid = bare_pid(id);
  return pid ? write_streams(tree_of(*pid), images) : runc_.early_images(id, images);
}

Status Runtime::pre_dump(const std::string& id, const std::string& images, const std::string& to, const std::string& parent, const std::string& work) const {
  const auto pid = bare_pid(id);
  return pid ? bare_.pre_dump(*pid, images, to, parent, work) : runc_.pre_dump(id, images, to, parent, work);
}

Result<Child> Runtime::checkpoint_ahead(const std::string& id, const std::string& images, const std::string& parent, const std::string& work,
                                        const std::string& log) const {
  const auto pid = bare_pid(id);
  return pid ? bare_.checkpoint_ahead(*pid, images, parent, work, log) : runc_.checkpoint_ahead(id, images, parent, work, log);
}

std::vector<pid_t> Runtime::standing(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? bare_.standing(*pid) : std::vector<pid_t>();
}

Status Runtime::resume(const std::string& id, const std::vector<pid_t>& stood) const {
  const auto pid = bare_pid(id);
  return pid ? bare_.resume(*pid, stood) : runc_.resume(id);
}

Status Runtime::remove(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? bare_.remove(*pid) : runc_.remove(id);
}

Result<Child> Runtime::partial_restore(const std::string& id, const std::string& bundle, const std::string& images, const std::string& work,
                                       const std::string& log) const {
  return bare_pid(id) ? bare_.partial_restore(images, work, log) : runc_.partial_restore(id, bundle, images, work, log);
}

std::vector<pid_t> Runtime::made_by(const std::string& id, pid_t restore) const {
  if (!bare_pid(id) || !restore) return {};
  auto all = tree_of(restore);
  std::erase(all, restore);
  return all;
}

Status Runtime::remove_restored(const std::string& id, const std::vector<pid_t>& made) const {
  if (!bare_pid(id)) return runc_.remove(id);
  for (const pid_t p : made)
    if (kill(p, SIGKILL) && errno != ESRCH) return sys_error("ending process " + std::to_string(p));
  return {};
}

pid_t Runtime::init_pid(const std::string& id) const {
  const auto pid = bare_pid(id);
  return pid ? *pid : runc_.init_pid(id);
}

bool Runtime::owns(const std::string& id, pid_t init, pid_t pid) const {
  if (!bare_pid(id)) return same_pid_namespace(pid, init);
  const auto all = tree_of(init);
  return std::find(all.begin(), all.end(), pid) != all.end();
}

Status Runtime::net(const std::string& verb, const std::string& bundle, const std::string& id) const {
  return bare_pid(id) ? Status() : runc_.net(verb, bundle, id);
}

Child Runtime::net_ahead(const std::string& verb, const std::string& bundle, const std::string& id, const std::string& log) const {
  return bare_pid(id) ? Child() : runc_.net_ahead(verb, bundle, id, log);
}

Status Runtime::net(Child& ahead, const std::string& verb, const std::string& bundle, const std::string& id) const {
  return bare_pid(id) ? Status() : runc_.net(ahead, verb, bundle, id);
}

}  // namespace migr
