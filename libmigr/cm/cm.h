/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * librdmacm, for the control thread: what each message of migrd means for the connections that it has made. All of it does
 * nothing while no channel is open. Caller holds the Registry's lock, unless it says otherwise. engine.h does the work.
 */
#ifndef MIGR_CM_H
#define MIGR_CM_H

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../../include/migr/proc_wire.h"
#include "../switchover/switchover.h"
#include "engine.h"

namespace migr::cm {

/// Null: no channel of librdmacm was ever open. `make`: then make it.
Engine* engine(bool make = false);
/// Around a fork, before the Registry's lock: in the child nobody is about to make it.
void lock_for_fork();
void unlock_after_fork();
/// After fork(), in the child: what the parent has open is not the child's.
void forget_parent();

/// DESCRIBE, without the lock: a moment for what is half connected. Nothing begins to be until let_go(); a process that connects all the time
/// would be half connected at any time.
void settle();
/// DESCRIBE. @return why the process cannot be moved; empty: it can
std::string refusal();
/// What is half made now, after settle(): it can be moved in a moment.
std::string half_made();
void describe(std::vector<migr_fd_desc>& out);
/// Goes up with each change of what describe() and refusal() say of bound ids, groups and the file. Without the lock, too.
std::uint64_t changes();
/// FREEZE. EAGAIN: a connection is half made, or there is now what refusal() names.
int freeze(std::string& why);
/// REBIND, after everything else of it. @param keys gets the port that partners connect to
void restored(const Peer& self, std::vector<migr_key_map>& keys, bool again);
/// SWITCH, RESUME (restored_paths() before it, resumed() after it), ROLLBACK.
void switched(switchover::Qps qps);
std::vector<Path> restored_paths(switchover::Qps qps);
void resumed(const Peer& self, std::span<const Path> restored);
void rollback();
/// KEYS: the ports in it. Keys proper are not touched.
void note_ports(std::span<const migr_key_map> keys);

/// As libibverbs lists it.
struct Device {
  std::string name;
  std::uint64_t guid;  ///< as the kernel gives it
  std::uint32_t index;
};
/// The QP of this number on the device of this GUID. @return null: none
const QpShadow* qp_of(switchover::Qps qps, std::uint32_t vqpn, std::uint64_t node_guid, std::span<const Device> births);
/// The same, of the contexts that were made again on another host: one of the device.
const Context* moved_context(std::span<Context* const> contexts, std::uint64_t node_guid, std::span<const Device> births);
inline QpName name_of(const QpShadow& qp) { return {qp.context, qp.vqpn()}; }
/// Of a restored process. A QP that the application has put into ERR or RESET has no partner that is told of the move, and whose kernel hears
/// that the source's has ended. One that broke by itself is in ERR, too, and has a partner: that one hears of the end as its link is refused.
inline bool has_ended(const QpShadow& qp) {
  const ibv_qp_state state = qp.app_state();
  return qp.gone || (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD);
}
/// Where a QP's present path leads. In a file of its own: tests have another.
std::optional<Path> path_of(const QpShadow& qp);

}  // namespace migr::cm

#endif
