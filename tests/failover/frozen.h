// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A process that is frozen and goes back or is restored: libmigr as a whole over model.cc, told what to do by a migrd that is the test.
#ifndef MIGR_TEST_FAILOVER_FROZEN_H
#define MIGR_TEST_FAILOVER_FROZEN_H

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "migr/proc_wire.h"

namespace frozen {

constexpr int kPatienceMs = 20'000, kSoonMs = 50;  // for what is to come; for what is not to come

/// Within so long.
bool readable(int fd, int ms);

/// The other end of the library's connection.
class Migrd {
 public:
  static Migrd& get();
  /// Any of MIGR_MSG_*, which is to succeed; try_to() and those below it expect no status.
  migr_msg ask(std::uint16_t type, std::uint64_t arg = 0);
  migr_msg try_to(std::uint16_t type, std::uint64_t arg = 0) { return about(nullptr, type, arg); }
  /// @param qp  null: no records
  migr_msg about(const ibv_qp* qp, std::uint16_t type, std::uint64_t arg = 0);
  /// @param bytes  of its one record; 0: none
  migr_msg say(std::uint16_t type, std::uint64_t arg, const void* record, std::size_t bytes) { return say_all(type, arg, record, bytes, bytes ? 1 : 0); }
  template <class T>
  migr_msg say_all(std::uint16_t type, std::uint64_t arg, const std::vector<T>& records) {
    return say_all(type, arg, records.data(), sizeof(T), static_cast<std::uint32_t>(records.size()));
  }
  migr_msg say_all(std::uint16_t type, std::uint64_t arg, const void* records, std::size_t each, std::uint32_t count);
  /// Of the last reply.
  template <class T>
  std::vector<T> records() const {
    std::vector<T> out(records_.size() / sizeof(T));
    std::memcpy(out.data(), records_.data(), out.size() * sizeof(T));
    return out;
  }
  /// The first one of them.
  template <class T>
  T record() const {
    const auto all = records<T>();
    EXPECT_FALSE(all.empty());
    return all.empty() ? T{} : all[0];
  }
  /// SUSPEND and drained().
  void freeze();
  /// DRAIN and FREEZE.
  void drained();
  /// The library does, when it has answered FREEZE.
  void hung_up();
  /// It is restored, and connects.
  void appears();
  /// Its host takes it back: ROLLBACK.
  void back();
  /// appears(), REBIND and RESUME.
  void restored();

 private:
  Migrd();
  ~Migrd();
  /// Takes connections: one that begins with HELLO is for meet(), one with a question is told that all is as it was.
  void answer();
  void meet();
  void open_gate();
  static migr_msg receive(int fd, std::vector<char>* records = nullptr);
  const int listener_;
  int fd_ = -1;
  std::uint32_t seq_ = 0;
  std::vector<char> records_;
  std::string folder_;
  migr_msg hello_{};
  std::mutex lock_;
  std::condition_variable met_;
  std::deque<std::pair<int, migr_msg>> hellos_;
};
extern Migrd& migrd;  // before the first device is opened

enum class How { kBack,
                 kRestored };

/// Two QPs, each on a CQ that shares a channel with the other one's.
class Events : public ::testing::TestWithParam<How> {
 protected:
  void SetUp() override;
  void TearDown() override;
  ibv_qp* make_qp(ibv_cq* cq, std::uint32_t sends = 4);
  static void to(ibv_qp* qp, ibv_qp_state state);
  /// Something completes on `cq`.
  void complete(ibv_cq* cq);
  void post_receive(int i) const;
  void arrives(int i, bool solicited) const;
  /// It is frozen, and goes on as the test's parameter says.
  void move();
  /// The next event of the channel, acknowledged. null: there is none
  ibv_cq* next();

  ibv_context* context_;
  ibv_pd* pd_;
  ibv_comp_channel* channel_;
  ibv_cq* cq_[2];
  ibv_qp* qp_[2];
};

/// A QP that receives on one, and one of another NIC that sends to it.
class Pollers : public Events {
 protected:
  static constexpr std::uint32_t kBytes = 24;

  void SetUp() override;
  void TearDown() override;
  static void connect(ibv_qp* qp, const ibv_qp* peer, ibv_context* its);
  /// From now on it does, in RTR.
  static void answer(ibv_qp* qp, const ibv_qp* peer, ibv_context* its, std::uint32_t rq_psn = 0);
  /// @return of ibv_modify_qp
  static int go_to_rts(ibv_qp* qp, std::uint32_t sq_psn, std::uint8_t timeout = 0);
  /// Number `n`, and waits until it is sent.
  void send(std::uint32_t n);
  /// The completion at hand is that of number `n`.
  void expect(std::uint32_t n);
  /// Two in one session, from `n` on; then it is empty.
  void expect_two(std::uint32_t n);
  /// Sends both.
  void two(std::uint32_t n);

  ibv_context* other_;
  ibv_pd* other_pd_;
  ibv_cq* other_cq_;
  ibv_cq_ex* ex_;
  ibv_mr* mr_;
  ibv_qp *to_, *from_;
  std::uint8_t memory_[4096];
};

/// Of type 2, which a message of the partner's ends.
struct Ended {
  Ended(ibv_qp* of, ibv_pd* pd, void* memory, std::size_t bytes);
  ~Ended();
  void bind() const;
  /// @param key  as `from` may call it
  void end(ibv_qp* from, std::uint32_t key) const;
  /// @param told  as the receive is to say it was called
  void expect_told(ibv_cq* cq, std::uint32_t told) const;
  static constexpr std::uint64_t kBound = 900, kEnded = 901;
  ibv_qp* const qp;
  ibv_mr* const mr;
  ibv_mw* const mw;
};

/// As programs do that close all that they do not know.
void close_all_that_is_unknown();

}  // namespace frozen

#endif
