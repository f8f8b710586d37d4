// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "unknown_objects.h"

#include <algorithm>
#include <map>

namespace migr {
namespace {

constexpr int kLooksAtObjects = 5;

std::uint64_t on_record(const ContextRecord& c, std::uint32_t type) {
  switch (type) {
    case MIGR_OBJ_PD: return c.rec.nr_pd;
    case MIGR_OBJ_MR: return c.rec.nr_mr;
    case MIGR_OBJ_CQ: return c.rec.nr_cq;
    case MIGR_OBJ_SRQ: return c.rec.nr_srq;
    // An old path, not yet destroyed, is not the application's.
    case MIGR_OBJ_QP: return static_cast<std::uint64_t>(std::count_if(c.qps.begin(), c.qps.end(), [](const migr_qp_rec& q) { return !(q.flags & MIGR_QP_FORMER); }));
    default: return 0;
  }
}

template <class Found>
void each_unknown(std::span<const ContextRecord> record, std::span<const migr_fd_desc> counted, Found&& found) {
  for (const auto& d : counted) {
    if (d.kind != MIGR_FD_COUNT) continue;
    const auto c = std::find_if(record.begin(), record.end(), [&](const ContextRecord& one) { return one.rec.ctx_id == d.ctx_id; });
    if (const auto there = c == record.end() ? 0 : on_record(*c, d.obj_type); there > d.addr) found(d, there - d.addr);
  }
}

// No such object was made or ended from before the record was read until after.
bool nothing_happened(const migr_fd_desc& before, std::span<const migr_fd_desc> after) {
  return !before.pgoff && std::any_of(after.begin(), after.end(), [&](const migr_fd_desc& d) {
    return d.kind == MIGR_FD_COUNT && d.ctx_id == before.ctx_id && d.obj_type == before.obj_type && d.addr == before.addr && d.bytes == before.bytes;
  });
}

}  // namespace

std::string unknown_objects(std::span<const ContextRecord> record, std::span<const migr_fd_desc> counted) {
  std::map<std::uint32_t, std::uint64_t> more;  // by kind
  each_unknown(record, counted, [&](const migr_fd_desc& d, std::uint64_t by) { more[d.obj_type] += by; });
  std::string text;
  for (const auto& [type, by] : more) text += (text.empty() ? "" : ", ") + std::to_string(by) + " x " + object_name(type);
  return text;
}

Error unknown_error(const std::string& who, const std::string& what) {
  return {EOPNOTSUPP, who + " has RDMA resources that its libmigr does not know and cannot make again: " + what +
                          ". They were made by a call that libmigr does not stand in front of, as ibv_reg_mr_ex() of a newer rdma-core, or with system calls"};
}

Status knows_its_objects(const std::string& who, std::vector<ContextRecord> record, std::vector<migr_fd_desc> counted, const std::function<Result<std::vector<migr_fd_desc>>()>& count,
                         const std::function<Result<std::vector<ContextRecord>>()>& look) {
  for (int i = 0; i < kLooksAtObjects; i++) {
    if (unknown_objects(record, counted).empty()) return {};
    auto now = count();
    if (!now) return now.error();
    std::vector<migr_fd_desc> still;
    each_unknown(record, counted, [&](const migr_fd_desc& d, std::uint64_t) {
      if (nothing_happened(d, *now)) still.push_back(d);
    });
    if (const std::string what = unknown_objects(record, still); !what.empty()) return unknown_error(who, what);
    auto again = look();
    if (!again) return again.error();
    counted = std::move(*now);
    record = std::move(*again);
  }
  return {};
}

}  // namespace migr
