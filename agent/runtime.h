// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is migrated, whatever it is: a container by runc, bare processes ("pid:712") by CRIU alone.
#pragma once

#include <functional>

#include "bare.h"
#include "runc.h"
#include "standard_streams.h"

namespace migr {

/// Calls as Runc's, by the name. Thread: any.
class Runtime {
 public:
  explicit Runtime(const Config& c) : runc_(c), bare_(c) {}

  static bool name_ok(const std::string& id) { return bare_pid(id) || container_id_ok(id); }
  Result<ContainerState> state(const std::string& id) const;
  /// The name is taken here. Does not run runc.
  bool exists(const std::string& id) const;
  /// Which of those that had this name, or process number, one after the other. Empty: not known, of a container that has not begun.
  std::string life(const std::string& id) const;
  /// exists(), and it is that one; of a container whose life was not known: any.
  bool is_still(const std::string& id, const std::string& began) const;
  /// Looks at all containers, once. @return of the one that a process is in; empty: none. Does not run runc.
  std::function<std::string(pid_t)> containers() const;
  /// What people type to be rid of it, also if it runs.
  std::string ended_by(const std::string& id) const;
  /// Error, with what to do about it.
  Status name_is_free(const std::string& id) const;
  /// What it needs is installed.
  Status check_verbs(const std::string& id) const;
  /// Nothing of it would be lost elsewhere.
  Status may_leave(const ContainerState& c) const;
  /// It has been dumped and stands still: nothing was started beside it meanwhile, which would not be in the images.
  Status all_dumped(const ContainerState& c) const { return bare_pid(c.id) ? Status() : started_beside(c, 0); }
  /// At the other end of its standard streams is a program of this host.
  bool is_piped(const std::string& id) const;
  /// No container has its bundle in this folder. Does not run runc.
  Status bundle_is_free(const std::string& bundle) const;
  Result<std::vector<pid_t>> pids(const ContainerState& c) const;
  Status early_images(const std::string& id, const std::string& images) const;
  Status pre_dump(const std::string& id, const std::string& images, const std::string& to, const std::string& parent, const std::string& work) const;
  Result<Child> checkpoint_ahead(const std::string& id, const std::string& images, const std::string& parent, const std::string& work,
                                 const std::string& log) const;
  Status checkpoint(Child& ahead, const std::string& id, const std::string& log) const { return runc_.checkpoint(ahead, id, log); }
  /// Without a container: what stands still already. Else nothing, for it stands still as a whole.
  std::vector<pid_t> standing(const std::string& id) const;
  Status resume(const std::string& id, const std::vector<pid_t>& stood) const;
  Status remove(const std::string& id) const;
  Result<Child> partial_restore(const std::string& id, const std::string& bundle, const std::string& images, const std::string& work,
                                const std::string& log) const;
  /// What a restore that is being ended has made; to be asked before it is told to end.
  std::vector<pid_t> made_by(const std::string& id, pid_t restore) const;
  /// ... and its end. Nothing else of that name is touched.
  Status remove_restored(const std::string& id, const std::vector<pid_t>& made) const;
  /// The restored process is one of it. 0: it is not known yet
  pid_t init_pid(const std::string& id) const;
  bool owns(const std::string& id, pid_t init, pid_t pid) const;
  Status net(const std::string& verb, const std::string& bundle, const std::string& id) const;
  Child net_ahead(const std::string& verb, const std::string& bundle, const std::string& id, const std::string& log) const;
  Status net(Child& ahead, const std::string& verb, const std::string& bundle, const std::string& id) const;
  Status detach_held(Child& ahead, const std::string& bundle, const std::string& id) const { return bare_pid(id) ? Status() : runc_.detach_held(ahead, bundle, id); }

 private:
  /// @param limit_ms  for commands that may end
  Status started_beside(const ContainerState& c, int limit_ms) const;
  /// EOPNOTSUPP: one of it has a terminal that could not be restored.
  Status terminals_stay(const ContainerState& c) const;
  /// EOPNOTSUPP: one of it has an eventfd that CRIU would restore as one of another kind.
  Status eventfds_stay(const ContainerState& c) const;
  const Runc runc_;
  const Bare bare_;
};

}  // namespace migr
