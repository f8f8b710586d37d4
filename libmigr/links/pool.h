/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Paths that stand between two processes on a link and are no vQP's yet ("paths": "pool"; Varuna §3.4 has DCQPs in their
 * place). docs/failover.md, "A pool of paths". Under the Registry's lock.
 */
#ifndef MIGR_LINKS_POOL_H
#define MIGR_LINKS_POOL_H

#include <array>
#include <cstdint>

#include "links.h"

namespace migr::links {

/// What a path and the vQPs that it can serve have in common, at this end.
struct PathKind {
  Side side = kHome;
  const ibv_pd* pd = nullptr;  ///< the application's; so are the CQs
  const CqShadow *send_cq = nullptr, *recv_cq = nullptr;
  const ibv_srq* srq = nullptr;
  std::array<std::uint32_t, 5> cap{};
  int sq_sig_all = 0, access = 0;
  std::uint64_t send_ops = 0;
  std::uint32_t home_port = 0, home_gid_index = 0;
  bool operator==(const PathKind&) const = default;
};

/// One of them.
struct Spare {
  std::uint64_t id = 0;  ///< counted by the end that leads
  PathKind kind;
  std::array<std::uint8_t, 7> attributes{};  ///< of its connection: MTU, time-outs, reads at a time
  Path path;
};

/// Makes what is missing in the pools that this process leads: of two processes one numbers the paths that they take from a pool,
/// and says which, so both never mean different ones. Thread: that of the rounds. @return one could not be made, and is tried again
bool fill_pools();
constexpr std::uint64_t kAnySpare = 0;
constexpr std::size_t kMostSpares = 4096;  ///< of a channel: the other end is not believed more
/// Takes a path out of the pool for `l` on that side, as its next. @return its id; 0: there is none that it can use
std::uint64_t take_spare(QpLink& l, Side side, Channel& channel, std::uint32_t serial, std::uint64_t id = kAnySpare);
/// That are ready.
std::size_t spares_of(const Channel& channel);
/// Those with something in flight come first: the pool is for them.
void busy_first(std::vector<QpLink*>& all);
void drop_spare(Channel& channel, std::uint64_t id);
/// Of a channel.
void drop_spares(Channel& channel);
/// Before something is destroyed that they were made with.
void drop_spares(const ibv_pd* pd);
void drop_spares(const CqShadow& c);
void drop_spares(const SrqShadow& s);

}  // namespace migr::links

#endif
