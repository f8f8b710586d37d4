// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// QPs of the libraries of library.h, as a test has them that says itself what they post.
#ifndef MIGR_TEST_FAILOVER_SPEAKER_H
#define MIGR_TEST_FAILOVER_SPEAKER_H

#include <infiniband/verbs.h>

#include <cstddef>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "../../include/migr/links_wire.h"
#include "library.h"

namespace ends {

/// A QP of one of several processes that send to each other's.
struct Speaker {
  static constexpr ibv_qp_cap kCap{.max_send_wr = kDepth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  /// @param of, completes, srq  that it is made of and for; null: a PD and a CQ of its own, no SRQ
  /// @param sessions  it is posted to by ibv_wr_*
  explicit Speaker(const Library& library, ibv_pd* of = nullptr, ibv_cq* completes = nullptr, ibv_srq* srq = nullptr, bool sessions = false, const ibv_qp_cap& cap = kCap);
  static constexpr unsigned kAll = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  int modify(const ibv_qp_attr& attr, int mask) const;
  int grant(unsigned access) const;
  /// To RTR: from then on it answers.
  void answer(const Speaker& to, unsigned access = kAll) const;
  /// To RTS. @param more  attributes of `a` that are set, too. @return of ibv_modify_qp
  int send_too(ibv_qp_attr a = {}, int more = 0) const;
  void connect(const Speaker& to, unsigned access = kAll) const;
  ibv_qp_attr query() const;
  /// As it was told last; all zero: never.
  migr_links_vqp_state state() const;
  /// The same for whoever reads why a test has waited in vain: phase, link, epoch and why.
  std::string how() const;
  /// With a backup.
  bool ready_on(unsigned link) const { return state().phase == MIGR_LINKS_VQP_READY && state().link == link; }
  void destroy() const { lib.verb<int(ibv_qp*)>("ibv_destroy_qp")(qp); }

  const Library& lib;
  ibv_pd* pd;
  ibv_cq* cq;
  ibv_qp* qp;
  ibv_gid gid{};
};

/// Connects them to each other, and waits until both have their backup. @return "" or how they are where that does not come
std::string meet(const Speaker& x, const Speaker& y);

/// Connections of two libraries; 64 in a row share a CQ at either end.
struct Pairs {
  Pairs(const Library& a, const Library& b, unsigned n);
  /// At both ends; so migrd would say.
  unsigned ready_on(unsigned link) const;
  /// All of both ends, with a backup or without.
  bool all_on(unsigned link) const;
  std::vector<std::unique_ptr<Speaker>> xs, ys;
};

/// Sends WRITEs of no bytes, each of which completes.
struct Writing {
  explicit Writing(const Speaker& by) : from(by) {}
  bool post();
  /// @return all have
  bool completed();
  const Speaker& from;
  unsigned posted = 0, done = 0;
};

/// Words on which the other end's atomics may work.
ibv_mr* register_words(const Speaker& of, void* at, std::size_t bytes);

/// A library whose lock a call of the application's holds, and whose threads stand still.
class StandsStill {
 public:
  explicit StandsStill(const Library& library);
  ~StandsStill();

 private:
  std::future<bool> call_;
};

}  // namespace ends

#endif
