// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// runc's commands, and the network hook.
#pragma once

#include <atomic>
#include <initializer_list>
#include <string>
#include <vector>

#include "command.h"
#include "config.h"

namespace migr {

struct ContainerState {
  std::string id;
  std::string status;  // running, paused, stopped, created
  std::string bundle;
  pid_t pid = 0;
};

/// For CRIU and its plugin, whoever starts them.
/// @param images  folder of migr.img; empty: that of the images
Env criu_env(const Config& config, const std::string& images = {});
/// @param first  of a migration: the plugin may change which pages count as written (criu-plugin/clean.c)
Env pre_dump_env(const Config& config, const std::string& images, bool first);

/// After a boot CRIU first tries out what the kernel can, and keeps that in /run/criu.kdat (3.17): not during a stop. What it cannot do
/// is found out then.
void try_out_kernel(const Config& config);

/// Where CRIU looks for its plugins.
std::string plugin_dir(const Config& config);
/// EBUSY: migr_plugin.so is not there.
Status check_plugin(const Config& config);

/// The bundle asks for an address of its own, which net_hook moves. EINVAL: its config.json cannot be read.
Result<bool> has_address(const std::string& bundle);
/// The bundle's program is started on a terminal. EINVAL: as above.
Result<bool> has_terminal(const std::string& bundle);
/// EBUSY: nothing here could move one; it would stay behind.
Status check_net_hook(const Config& config);
/// The same of a bundle that has one.
Status address_can_move(const Config& config, const std::string& bundle);

bool container_id_ok(const std::string& id);

/// Thread: any. Errors carry runc's last line.
class Runc {
 public:
  explicit Runc(const Config& c) : config_(c) {}
  /// What people type to have the runc of the configuration do this.
  std::string typed(const std::string& args) const { return config_.runc + " --root " + config_.runc_root + " " + args; }
  /// ENOENT: no such container.
  Result<ContainerState> state(const std::string& id) const;
  /// The name is taken, by whatever. Does not run runc.
  bool exists(const std::string& id) const;
  /// Of the container's first process, as soon as runc has written it down; 0: not yet. Does not run runc.
  pid_t init_pid(const std::string& id) const;
  /// Differs for every container that ever has this name: the boot, and when in it the first process began. Empty: not known (yet). Does
  /// not run runc.
  std::string life(const std::string& id) const;
  /// As it was told when the container was made; empty: not known.
  std::string bundle_of(const std::string& id) const;
  /// Its standard streams, as they were called when it was made: "pipe:[N]", a path. Does not run runc.
  std::vector<std::string> streams(const std::string& id) const;
  /// The folder of the one that runc has made for it, in the unified hierarchy; empty: not known. Does not run runc.
  std::string cgroup_of(const std::string& id) const;
  /// All containers, whatever their state. Does not run runc.
  std::vector<std::string> ids() const;
  /// runc has the verbs of migr's series.
  Status check_verbs() const;
  /// All processes of a running container, in our pid namespace.
  Result<std::vector<pid_t>> pids(const ContainerState& c) const;
  Status early_images(const std::string& id, const std::string& images) const;
  /// Memory of the running container to `to`. `images` holds migr.img.
  Status pre_dump(const std::string& id, const std::string& images, const std::string& to, const std::string& parent, const std::string& work) const;
  /// Starts a checkpoint that gets ready and waits: until checkpoint() says so it touches nothing. It writes to `log`.
  /// @param parent  relative to `images`: a pre-dump, whose unchanged pages are left out; empty: none
  Result<Child> checkpoint_ahead(const std::string& id, const std::string& images, const std::string& parent, const std::string& work,
                                 const std::string& log) const;
  /// Of what is started ahead of the stop: the line that it writes when it waits to be told to begin.
  static constexpr const char* kReady = "ready";
  /// Waits until they have, ahead_ms at most: who is late makes the stop longer.
  static void get_ready(std::initializer_list<Child*> ahead);
  /// Leaves the container paused.
  Status checkpoint(Child& ahead, const std::string& id, const std::string& log) const;
  Status resume(const std::string& id) const;
  Status remove(const std::string& id) const;
  Result<Child> partial_restore(const std::string& id, const std::string& bundle, const std::string& images,
                                const std::string& work, const std::string& log) const;
  /// Network hook; nothing to do when none is configured or the bundle asks for none.
  Status net(const std::string& verb, const std::string& bundle, const std::string& id) const;
  /// A verb of the hook, got ready and waiting for net() with it; not running: the hook knows no such verb, or there is nothing to do.
  Child net_ahead(const std::string& verb, const std::string& bundle, const std::string& id, const std::string& log) const;
  /// Has `ahead` do what it waits for. Where it does not run, or fails, the hook is run for it: that says what is wrong.
  Status net(Child& ahead, const std::string& verb, const std::string& bundle, const std::string& id) const;
  /// The hook's detach, of a container that stands still from here on, if it has an address: its threads do not see a network without
  /// routes. checkpoint() takes it as it is; resume() is what takes it back, also where this has failed.
  Status detach_held(Child& ahead, const std::string& bundle, const std::string& id) const;

 private:
  /// Freezes its cgroup, and waits until that is so. Where it cannot the checkpoint does it, or says why not. EBUSY: it does not stand still, and goes on
  Status hold(const std::string& id) const;
  Result<bool> has_net(const std::string& bundle) const;
  Argv command(std::vector<std::string> args) const;
  Status run(std::vector<std::string> args, const int& limit_ms, const std::string& what) const;
  const Config& config_;
  mutable std::atomic<bool> verbs_ok_ = false;
};

}  // namespace migr
