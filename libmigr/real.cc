/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "real.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "exports.h"
#include "gids.h"

namespace migr {
namespace {

void* find(const char* name, const char* version) {
  if (void* symbol = dlvsym(RTLD_NEXT, name, version)) return symbol;
  static void* const handle = loaded_libibverbs();  // came by dlopen(RTLD_LOCAL), or carries no versions
  if (handle) {
    if (void* symbol = dlvsym(handle, name, version)) return symbol;
    if (void* symbol = dlsym(handle, name)) return symbol;
  }
  return dlsym(RTLD_NEXT, name);
}

decltype(Real::modify_qp) libibverbs_modify_qp;
std::atomic<decltype(Real::open_device)> open_device_found;

/// A provider may ask for a GID meanwhile, by the exported name (qedr): it means the kernel's, and we hold the Registry's lock.
int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const gids::Inside inside;
  return libibverbs_modify_qp(qp, attr, mask);
}

Real find_all() {
  Real found{};
#define MIGR_REAL_FIND(name, version) \
  found.name = reinterpret_cast<decltype(found.name)>(find("ibv_" #name, version));
  MIGR_REAL_VERBS(MIGR_REAL_FIND)
#undef MIGR_REAL_FIND
  if (!found.open_device || !found.create_qp) {
    std::fputs("libmigr: libibverbs.so.1 is not loaded, but a function of it was called\n", stderr);
    std::abort();
  }
  libibverbs_modify_qp = std::exchange(found.modify_qp, modify_qp);
  open_device_found = found.open_device;
  return found;
}

}  // namespace

decltype(&::_ibv_query_gid_table) real_query_gid_table() {
  static const auto found =
      reinterpret_cast<decltype(&::_ibv_query_gid_table)>(find("_ibv_query_gid_table", "IBVERBS_1.11"));
  return found;
}

decltype(&::_ibv_query_gid_ex) real_query_gid_ex() {
  static const auto found = reinterpret_cast<decltype(&::_ibv_query_gid_ex)>(find("_ibv_query_gid_ex", "IBVERBS_1.11"));
  return found;
}

decltype(Real::open_device) open_device_if_found() { return open_device_found; }

const Real& real() {
  static const Real found = find_all();
  return found;
}

}  // namespace migr
