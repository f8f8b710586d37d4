/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What libmigr/control.cc calls and no test of it looks at: one process, one context, nothing on other links, no queues. Included once
 * by whoever stands in for the rest of the library: tests/unit/control_test.cc, tests/fuzz/control.cc.
 */
#ifndef MIGR_TESTS_UNIT_CONTROL_DOUBLES_H
#define MIGR_TESTS_UNIT_CONTROL_DOUBLES_H

#include "../../libmigr/cm/cm.h"
#include "../../libmigr/datagrams.h"
#include "../../libmigr/gids.h"
#include "../../libmigr/kernel_link.h"
#include "../../libmigr/links/links.h"
#include "../../libmigr/provider/provider.h"
#include "../../libmigr/switchover/ahead.h"
#include "../../libmigr/switchover/switchover.h"
#include "../../libmigr/whereabouts.h"
#include "../../libmigr/windows.h"

namespace migr {

constexpr std::uint32_t kDoubledContext = 7;

Registry& Registry::get() {
  static Registry* registry = new Registry;
  return *registry;
}
std::uint32_t Context::ctx_id() const { return kernel ? kernel->ctx_id() : kDoubledContext; }
KernelLink::KernelLink(int fd) : fd_(fd), why_private_(fd < 0 ? "no /dev/migr" : "") {}  // attached, if there is one
KernelLink::~KernelLink() = default;
int KernelLink::detach() { return 0; }

namespace switchover {
bool destroy_old_paths() { return false; }
void end_tracking() {}
namespace ahead {
void describe(std::span<const std::uint8_t, 16>, std::vector<migr_fd_desc>&) {}
void forget() {}
}  // namespace ahead
}  // namespace switchover

/// Taken and given back around a fork.
struct ForkLocks {
  int held = 0, taken = 0, rings = 0;  ///< the last: how often children were kept from the rings
};
inline ForkLocks fork_locks;

namespace datagrams {
void lock_for_fork() { ++fork_locks.held, ++fork_locks.taken; }
void unlock_after_fork() { --fork_locks.held; }
}  // namespace datagrams

namespace windows {
void lock_for_fork() { ++fork_locks.held, ++fork_locks.taken; }
void unlock_after_fork() { --fork_locks.held; }
}  // namespace windows

namespace gids {
void note(Context&) {}
std::uint8_t named(const Context&, std::uint8_t, std::uint8_t index) { return index; }
}  // namespace gids

namespace whereabouts {
void untold() {}
}  // namespace whereabouts

namespace links {
inline const QpShadow* changes_link = nullptr;  ///< of the process, one that does
bool changing(const QpShadow& q) { return &q == changes_link; }
std::string refusal() { return ""; }
std::string park() { return ""; }
bool tell_parted(cm::QpName) { return false; }
void changed() {}
void before_fork() {}
void after_fork_in_child(bool) {}
}  // namespace links

namespace cm {
std::optional<Path> path_of(const QpShadow&) { return std::nullopt; }
}  // namespace cm

namespace provider {
std::string unsupported_reason(const Context&) { return ""; }
int locate_queues(std::span<QpShadow* const>) { return 0; }
int locate_queues(std::span<SrqShadow* const>) { return 0; }
int rings(Context&, std::vector<migr_fd_desc>&) { return 0; }
std::vector<migr_text_range> text_ranges() { return {{0x1000, 0x2000, 1, 0}}; }
void keep_from_children(const ibv_context&, const ibv_context_ops&) { ++fork_locks.rings; }
}  // namespace provider

}  // namespace migr

#endif
