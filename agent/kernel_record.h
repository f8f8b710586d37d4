// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The record of migr.ko, read and steered over generic netlink (uapi/migr.h).
#pragma once

#include <string.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "netlink_exchange.h"
#include "status.h"
#include "uapi/migr.h"

namespace migr {

// migr_qp_rec: enum ib_qp_type, enum ib_qp_state
inline constexpr std::uint32_t kRc = 2, kUc = 3, kUd = 4;
inline constexpr std::uint32_t kRtr = 2, kRts = 3, kErr = 6;

/// Or, with UD, able to receive.
inline bool connected(const migr_qp_rec& q) { return q.qp_state == kRtr || q.qp_state == kRts; }
inline std::string bytes_of(const __u8 (&gid)[16]) { return {reinterpret_cast<const char*>(gid), sizeof gid}; }

/// Its device, and the first 15 characters of its process's name.
inline std::string device_of(const migr_ctx_rec& c) { return {c.ibdev, strnlen(c.ibdev, sizeof c.ibdev)}; }
inline std::string comm_of(const migr_ctx_rec& c) { return {c.comm, strnlen(c.comm, sizeof c.comm)}; }

struct KernelInfo {
  std::uint32_t abi = 0, contexts = 0, objects = 0, reserved = 0, devices = 0;
  std::optional<bool> moves_marked;  // what mremap moves is soft-dirty, and something has moved; none: an older module, which marks nothing
};

/// Of a context without a process: its pid is 0.
inline constexpr char kProcessEnded[] = "its process has ended, and a child of it keeps the device open; end that (fuser -v /dev/infiniband/uverbs* shows it)";

struct ContextRecord {
  migr_ctx_rec rec{};
  std::vector<migr_pd_rec> pds;
  std::vector<migr_mr_rec> mrs;
  std::vector<migr_cq_rec> cqs;
  std::vector<migr_qp_rec> qps;
  std::vector<migr_srq_rec> srqs;
  struct Other {
    std::uint32_t type;  // enum migr_obj_type
    migr_other_rec rec;
  };
  std::vector<Other> others;
};

/// Ends "migr.ko is not loaded". @param release  of the kernel that runs @param modules  those of all kernels
std::string how_to_load(const std::string& release, const std::string& modules = "/lib/modules");

/// One netlink socket. Thread: one at a time.
class KernelRecord {
 public:
  /// ENOENT: migr.ko is not loaded; EPROTONOSUPPORT: it speaks another version.
  static Result<KernelRecord> open();

  Result<KernelInfo> info();
  /// Contexts of one process, or of all with pid 0; without their objects.
  Result<std::vector<ContextRecord>> contexts(pid_t pid = 0);
  /// Fills in the objects of a context.
  Status objects(ContextRecord& ctx) { return objects(ctx, 0); }
  /// Fills in its QPs, for a search: each is right by itself, and what comes and goes all the time is no error.
  Status search(ContextRecord& ctx);
  Status reserve_qpn(std::uint32_t vqpn);
  /// ENOENT is no error: it was not reserved.
  Status release_qpn(std::uint32_t vqpn);

 private:
  /// @param type  enum migr_obj_type: of this only; 0: all
  Status objects(ContextRecord& ctx, std::uint32_t type);
  NlSocket sock_;
  int family_ = 0;
  bool tells_types_apart_ = true;  // an older module does not
};

const char* object_name(std::uint32_t obj_type);
const char* qp_type_name(std::uint32_t type);
const char* qp_state_name(std::uint32_t state);

/// Whether a QP can get another path from the state that it is in, at either end. `who` has it.
inline Status state_can_move(const migr_qp_rec& q, const std::string& who) {
  if (q.qp_state <= kRts || q.qp_state == kErr) return {};
  return Error{EOPNOTSUPP, who + ": QP " + std::to_string(q.vqpn) + " is in state " + qp_state_name(q.qp_state) + " and cannot be migrated"};
}

}  // namespace migr
