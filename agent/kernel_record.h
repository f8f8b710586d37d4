// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The record of migr.ko, read and steered over generic netlink (uapi/migr.h).
#pragma once

#include <sys/types.h>

#include <vector>

#include "netlink_exchange.h"
#include "status.h"
#include "uapi/migr.h"

namespace migr {

struct KernelInfo {
  std::uint32_t abi = 0, contexts = 0, objects = 0, reserved = 0, devices = 0;
};

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

/// One netlink socket. Thread: one at a time.
class KernelRecord {
 public:
  /// ENOENT: migr.ko is not loaded; EPROTONOSUPPORT: it speaks another version.
  static Result<KernelRecord> open();

  Result<KernelInfo> info();
  /// Contexts of one process, or of all with pid 0; without their objects.
  Result<std::vector<ContextRecord>> contexts(pid_t pid = 0);
  /// Fills in the objects of a context.
  Status objects(ContextRecord& ctx);
  /// The same for a search: each is right by itself, and what comes and goes all the time is no error.
  Status search(ContextRecord& ctx) {
    const Status s = objects(ctx);
    return !s && s.error().code == EAGAIN ? Status() : s;
  }
  Status reserve_qpn(std::uint32_t vqpn);
  /// ENOENT is no error: it was not reserved.
  Status release_qpn(std::uint32_t vqpn);

 private:
  NlSocket sock_;
  int family_ = 0;
};

const char* object_name(std::uint32_t obj_type);
const char* qp_type_name(std::uint32_t type);
const char* qp_state_name(std::uint32_t state);

}  // namespace migr
