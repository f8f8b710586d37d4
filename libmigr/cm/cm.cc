/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "cm.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "../environment.h"
#include "../exports.h"
#include "../gids.h"
#include "../high_fd.h"
#include "../links/links.h"
#include "../shadow.h"

namespace migr::cm {
namespace {

constexpr unsigned kSettleMs = 2500;

std::atomic<Engine*> the_engine;
std::mutex making;
std::atomic<bool> held;          ///< so is an engine that is made meanwhile
std::atomic<bool> was_restored;  ///< this process, ever

/// Never by the exported names, which are ours.
int open_device() {
  const long fd = syscall(SYS_openat, AT_FDCWD, "/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  return fd < 0 ? -errno : to_high_fd(static_cast<int>(fd));
}
ssize_t write_device(int fd, const void* command, std::size_t bytes) { return syscall(SYS_write, fd, command, bytes); }

std::vector<Device>* births;  ///< all there were when the first channel was opened; librdmacm lists them then, too

std::uint32_t physical(QpName& name, std::uint64_t node_guid) {
  Registry& registry = Registry::get();
  std::lock_guard guard(registry.lock);
  const QpShadow* const qp = qp_of(registry.qps, name.vqpn, node_guid, *births);
  if (!qp) return name.vqpn;
  name = name_of(*qp);
  // Whose QPs have another name from birth expects such a name of the other end, too.
  return environment::force_names() ? qp->vqpn() : qp->pqpn();
}

/// Of libibverbs, without which librdmacm is not there.
std::vector<Device> devices() {
  std::vector<Device> all;
  void* const verbs = loaded_libibverbs();
  if (!verbs) return all;
  const auto list = reinterpret_cast<decltype(&ibv_get_device_list)>(dlsym(verbs, "ibv_get_device_list"));
  const auto let_go = reinterpret_cast<decltype(&ibv_free_device_list)>(dlsym(verbs, "ibv_free_device_list"));
  const auto guid = reinterpret_cast<decltype(&ibv_get_device_guid)>(dlsym(verbs, "ibv_get_device_guid"));
  const auto index = reinterpret_cast<int (*)(ibv_device*)>(dlsym(verbs, "ibv_get_device_index"));
  ibv_device** const found = list && let_go && guid && index ? list(nullptr) : nullptr;
  for (ibv_device** d = found; d && *d; d++) all.push_back({(*d)->name, guid(*d), static_cast<std::uint32_t>(index(*d))});
  if (found) let_go(found);
  dlclose(verbs);
  return all;
}

/// The device of this host with this GUID, by sysfs: libibverbs remembers what it has seen elsewhere. @param count of all
std::string name_by_guid(std::uint64_t guid, std::size_t& count) {
  char want[20];
  const auto* b = reinterpret_cast<const std::uint8_t*>(&guid);
  snprintf(want, sizeof(want), "%02x%02x:%02x%02x:%02x%02x:%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]);
  std::string name;
  DIR* const dir = opendir("/sys/class/infiniband");
  for (const dirent* e = dir ? readdir(dir) : nullptr; e; e = readdir(dir)) {
    if (e->d_name[0] == '.') continue;
    count++;
    char text[20] = "";
    const std::string path = std::string("/sys/class/infiniband/") + e->d_name + "/node_guid";
    const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd < 0) continue;
    if (read(fd, text, sizeof(text) - 1) > 0 && !strncmp(text, want, strlen(want))) name = e->d_name;
    syscall(SYS_close, fd);
  }
  if (dir) closedir(dir);
  return name;
}

std::uint8_t known_gid(std::uint64_t node_guid, std::uint8_t port, std::uint8_t index) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  const Context* const c = moved_context(registry.contexts, node_guid, *births);
  return c ? gids::named(*c, port, index) : index;
}

/// A restored process has its contexts on devices of the same name, or on the only one there is.
void device_of_birth(std::uint64_t& guid, std::uint32_t& index) {
  for (const Device& d : *births)
    if (d.guid == guid) return;
  std::size_t count = 0;
  const std::string name = guid ? name_by_guid(guid, count) : "";
  if (name.empty()) return;
  for (const Device& d : *births) {
    if (d.name != name && (count != 1 || births->size() != 1)) continue;
    guid = d.guid;
    index = d.index;
    return;
  }
}

}  // namespace

Engine* engine(bool make) {
  Engine* found = the_engine.load(std::memory_order_acquire);
  if (found || !make) return found;
  const NoCancel no_cancel;
  std::lock_guard guard(making);
  if (Engine* other = the_engine.load(std::memory_order_acquire)) return other;
  found = new Engine({open_device, write_device});
  if (was_restored) found->by_own_thread();
  found->physical_qpn = physical;
  found->known_gid = known_gid;
  found->device_of_birth = device_of_birth;
  found->tell_end = links::tell_parted;
  if (!births) births = new std::vector<Device>(devices());
  the_engine.store(found);
  if (held) found->hold();
  if (!held) found->let_go();  // which may not have met it
  return found;
}

void lock_for_fork() { making.lock(); }
void unlock_after_fork() { making.unlock(); }

void forget_parent() {
  held = false;  // nobody would tell the child to go on
  if (Engine* parents = the_engine.exchange(nullptr)) parents->abandon();
}

namespace {

/// Whether it is on the device of this GUID, as far as one is known by it.
bool is_on(const Context& context, std::uint64_t node_guid, std::span<const Device> births) {
  const auto of_guid = [&](const Device& d) { return d.guid == node_guid; };
  if (births.size() < 2 || std::none_of(births.begin(), births.end(), of_guid)) return true;
  return std::any_of(births.begin(), births.end(), [&](const Device& d) { return of_guid(d) && d.name == context.real->device->name; });
}

}  // namespace

const QpShadow* qp_of(switchover::Qps qps, std::uint32_t vqpn, std::uint64_t node_guid, std::span<const Device> births) {
  for (const QpShadow* qp : qps)
    if (qp->vqpn() == vqpn && is_on(*qp->context, node_guid, births)) return qp;
  return nullptr;
}

const Context* moved_context(std::span<Context* const> contexts, std::uint64_t node_guid, std::span<const Device> births) {
  for (const Context* c : contexts)
    if (c->moved && is_on(*c, node_guid, births)) return c;
  return nullptr;
}

void settle() {
  held = true;
  Engine* e = the_engine;
  if (!e) return;
  e->hold();
  e->settle(kSettleMs);
}

void let_go() {
  held = false;
  if (Engine* e = the_engine) e->let_go();
}

namespace {

/// Caller holds the Registry's lock.
bool carries(QpName name) {
  const auto& qps = Registry::get().qps;
  return std::any_of(qps.begin(), qps.end(), [&](const QpShadow* q) { return name_of(*q) == name && (q->app.qp_type == IBV_QPT_RC || q->app.qp_type == IBV_QPT_UC); });
}

}  // namespace

std::string refusal() {
  Engine* e = engine();
  return e ? e->immovable(carries) : "";
}

std::string half_made() {
  Engine* e = engine();
  return e ? e->settle(0) : "";
}

void describe(std::vector<migr_fd_desc>& out) {
  if (Engine* e = engine()) e->describe(out);
}

std::uint64_t changes() {
  Engine* e = engine();
  return e ? e->changes() : 0;
}

int freeze(std::string& why) {
  held = true;  // before the look: an engine that is made after it begins held
  Engine* e = engine();
  return e ? e->freeze(why, carries) : 0;
}

void restored(const Peer& self, std::vector<migr_key_map>& keys, bool again) {
  was_restored = true;
  Engine* e = engine();
  if (!e) return;
  if (!again) {
    std::vector<Path> now;
    for (const QpShadow* qp : Registry::get().qps) now.push_back({name_of(*qp), qp->pqpn(), 0, {}, {}, true, has_ended(*qp)});
    e->name(self);
    std::string why;
    if (e->restored(now, why)) fprintf(stderr, "libmigr: librdmacm's connections cannot be taken up again: %s\n", why.c_str());
  }
  if (e->port()) keys.push_back({MIGR_KEY_CM_PORT, e->port(), {}});
}

void switched(switchover::Qps qps) {
  Engine* e = engine();
  if (!e) return;
  std::vector<Path> moving;
  for (const QpShadow* qp : qps) {
    if (!e->uses(name_of(*qp))) continue;
    const auto path = path_of(*qp);
    moving.push_back(path ? *path : Path{name_of(*qp), qp->pqpn(), 0, {}, {}, false, false});
  }
  e->switched(moving);
}

std::vector<Path> restored_paths(switchover::Qps qps) {
  std::vector<Path> all;
  Engine* e = engine();
  if (!e) return all;
  for (const QpShadow* qp : qps) {
    if (qp->phase != switchover::Phase::kRebound || !e->uses(name_of(*qp))) continue;
    auto path = path_of(*qp);
    if (!path) continue;
    path->restored = true;
    all.push_back(*path);
  }
  return all;
}

void resumed(const Peer& self, std::span<const Path> restored) {
  Engine* e = engine();
  if (!e) return;
  e->name(self);
  e->resumed(restored);
}

void rollback() {
  if (Engine* e = engine()) e->rollback();
}

void note_ports(std::span<const migr_key_map> keys) {
  Engine* e = engine();
  if (!e) return;
  for (const migr_key_map& key : keys)
    if (key.vrkey == MIGR_KEY_CM_PORT) e->peer_port(std::to_array(key.owner), static_cast<std::uint16_t>(key.prkey));
}

}  // namespace migr::cm
