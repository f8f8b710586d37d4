/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "tracking.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>

namespace migr::tracking {
namespace {

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::uint64_t length_of(const ibv_send_wr& wr) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) bytes += wr.sg_list[i].length;
  return bytes;
}

void add(Notes& notes, std::uint32_t key, std::uint64_t start, std::uint64_t bytes) {
  if (!notes.whole || !bytes) return;
  Parts& parts = notes.parts[key];
  notes.count -= parts.all().size();
  parts.add(start, bytes);
  notes.count += parts.all().size();
  if (notes.count <= kMostParts) return;
  notes.whole = false;
  KeyedParts().swap(notes.parts);
}

void add_sges(Notes& notes, const ibv_sge* sges, int count) {
  for (int i = 0; i < count; ++i) add(notes, sges[i].lkey, sges[i].addr, sges[i].length);
}

}  // namespace

void Parts::add(std::uint64_t start, std::uint64_t bytes) {
  if (!bytes || start + bytes < start) return;  // the latter no device does
  const std::uint64_t page = page_bytes(), last = (start + bytes - 1) / page * page;
  start = start / page * page;
  std::uint64_t end = std::max(last + page, last);
  auto at = parts_.upper_bound(start);
  if (at != parts_.begin()) {
    const auto before = std::prev(at);
    if (before->second >= end) return;
    if (before->second + gap_ >= start) at = before;
  }
  while (at != parts_.end() && at->first <= end + gap_) {
    start = std::min(start, at->first);
    end = std::max(end, at->second);
    at = parts_.erase(at);
  }
  parts_.emplace_hint(at, start, end);
  while (parts_.size() > kMost) join_neighbours();
}

void Parts::join_neighbours() {
  gap_ = std::max(2 * gap_, page_bytes());
  for (auto at = parts_.begin(), next = std::next(at); next != parts_.end(); next = std::next(at)) {
    if (at->second + gap_ < next->first) {
      at = next;
      continue;
    }
    at->second = std::max(at->second, next->second);
    parts_.erase(next);
  }
}

void note(Notes& notes, const ibv_send_wr& wr) {
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      if (!notes.here) add(notes, wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, length_of(wr));
      return;
    case IBV_WR_ATOMIC_WRITE:
      if (!notes.here) add(notes, wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, kAtomicBytes);
      return;
    case IBV_WR_RDMA_READ:
      if (notes.here) add_sges(notes, wr.sg_list, wr.num_sge);
      return;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      if (notes.here) add_sges(notes, wr.sg_list, wr.num_sge);
      else add(notes, wr.wr.atomic.rkey, wr.wr.atomic.remote_addr, kAtomicBytes);
      return;
    default:
      return;  // sends, binds and invalidations write to no memory
  }
}

void note(Notes& notes, const ibv_recv_wr& wr) {
  if (notes.here) add_sges(notes, wr.sg_list, wr.num_sge);
}

}  // namespace migr::tracking
