// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// An application that posts a stream of work requests to another one, and looks at each completion and at all bytes.
#ifndef MIGR_TEST_FAILOVER_END_H
#define MIGR_TEST_FAILOVER_END_H

#include <infiniband/verbs.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../../include/migr/links_wire.h"
#include "library.h"

namespace ends {

constexpr int kWrs = 80;                 // of a stream
constexpr std::uint32_t kSecond = 5000;  // streams from here on are of the second end

/// What an application does, and what it is told to expect of its links.
struct Options {
  std::uint32_t seed;
  bool answers_only, separate_cqs, events, both_ways;
  bool sessions;  ///< posted by ibv_wr_*
  bool extended;  ///< polled by ibv_start_poll, .., as an ibv_cq_ex
  bool swaps;     ///< CAS among the others
  bool no_route;  ///< a link that is cut has none
  bool churns;    ///< memory is registered and given back all the time
  bool fresh;     ///< WRITEs into memory that was registered just before
  bool relays;    ///< FETCH_AND_ADD and CAS on words that others of the stream have changed before
  unsigned cut_after, cuts;
  bool may_break;  ///< an end may give up, and does nothing wrong
  bool outlives;   ///< and the second one works off what it has then; it posts nothing that brings something back
  bool pool = false;
  bool company = false;  ///< each end has another QP, which carries nothing, and leaves with its link
  bool odd = false;      ///< which at the second end is not of the kind of the first QP
  bool scarce = false;
  bool lingers = false;  ///< see model_let_packets_linger()
  bool marks = false;    ///< no WRITE is to be sent twice
  bool third = false;    ///< there are two backup links
  bool shared = false;   ///< receives come from an SRQ, of both QPs
  bool greedy = false;   ///< has as much in flight as the device takes, or until it is told that there is no room
};

/// A work request of a stream.
struct Request {
  ibv_wr_opcode opcode;
  std::uint32_t bytes;
  bool signalled;
  bool chained = false;  ///< a CAS that finds what the one before it has left
};

/// One end of a connection, with its application.
class End {
 public:
  /// @param out_stream  that it posts; the other end's `in_stream`
  /// @param sends  it posts any
  End(const Library& library, const Options& options, std::uint32_t out_stream, std::uint32_t in_stream, bool sends);
  ~End();

  /// To the other end, its company to that end's. The other end does the same.
  void connect(End& to);
  ibv_qp_attr connect(ibv_qp* qp, const End& to, const ibv_qp* there);

  /// Another QP. @return what ibv_modify_qp to RTR does
  int try_to_connect(const End& to);

  /// One that has no backup, since its connection has no GID.
  void make_doomed();
  void connect_doomed(const End& to);
  void send_by_doomed();
  void destroy_doomed();

  /// @param link that it has to be on; -1: any
  bool protected_now(int link = -1) const;

  /// That it is on.
  int link() const;

  /// It is on the other one.
  bool left(unsigned link) const;
  bool relays_now() const;
  bool changed() const;
  ibv_qp_state state() const;

  /// The application's thread may have ended before: with the other end's.
  bool gave_up() const;
  /// @return how far it is, and what is known of its path
  std::string how() const;

  /// As if told by other means, at once, of memory just registered. Called by the other end's thread.
  std::uint32_t fresh_key(int i);

  /// A WRITE, an atomic that the other end does not take, and one that would be. @return "" or what is not as with a NIC
  std::string try_atomic(std::uint64_t to, std::uint32_t rkey, ibv_wc_status due);
  std::string try_refused(bool aligned);

  /// It may post so many, from the first on; a multiple of 4, whose last one is signalled.
  void allow(int wrs) { allowed_ = wrs; }
  bool idle() const { return !sends_ || completed_ >= allowed_; }
  bool broken() const { return broken_; }

  /// What the application's thread does, until all is done or something was wrong: error_.
  void run();

  /// Of an end whose path has ended. @return "" or what was executed and has not completed, or the other way round
  std::string check_end() const;
  /// Of one that is done. @return "" or what was wrong first, or is not as it has to be now
  std::string check() const;

  /// Of the peer's WRITEs to us.
  unsigned most_executions() const;

 private:
  bool state_of(migr_links_vqp_state& out) const { return state_of(out, qp_); }
  bool state_of(migr_links_vqp_state& out, const ibv_qp* qp) const;

  enum Area { kOut,
              kIn,
              kRead,
              kReadable };
  std::uint8_t* area(Area a, int i) const;
  /// That several of the peer's atomics change.
  std::uint8_t* shared(bool adding) const;
  /// Where an atomic reaches to there, and what with.
  std::uint64_t reaches(const Request& r, int i) const;
  std::uint64_t compares(const Request& r, int i) const;
  std::uint64_t swaps_in(const Request& r, int i) const;
  static std::uint64_t word_at(const std::uint8_t* at) { return *reinterpret_cast<const std::uint64_t*>(at); }
  static void set_word(std::uint8_t* at, std::uint64_t word) { *reinterpret_cast<std::uint64_t*>(at) = word; }
  /// Where it puts what comes back, and where it reaches to there.
  static bool brings_back(const Request& r);
  static bool equal(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t n) { return std::memcmp(a, b, n) == 0; }
  std::string where() const;
  ibv_cq* make_cq();
  int poll(ibv_cq* cq, int entries, ibv_wc* wc) const;
  bool done() const { return (!sends_ || completed_ == kWrs) && (outlives() ? peer_->broken() || peer_->idle() : !peer_->sends_ || received_ == kWrs); }
  bool outlives() const { return options_.outlives && out_id_ >= kSecond; }

  void post_receive();

  /// Its path has failed, and it is in a session when that is noticed: for longer than the other end waits.
  void dawdle();
  void churn();
  bool may_post() const { return posted_ < allowed_ && posted_ - completed_ < static_cast<int>(options_.greedy ? kRing : kDepth); }

  /// Each fourth at least is signalled, so that the queue does not fill with what nobody hears of.
  unsigned flags_of(const Request& r, int i) const;
  /// One to four in a session; one that is given up in between posts nothing. Now and then it takes long.
  void post_session();

  /// @return false: there is no room
  bool post_send();
  void sent(const ibv_wc& wc);
  void received(const ibv_wc& wc);
  int poll_all();
  int thread() const { return out_id_ > in_id_; }

  void rest();

  const Library& lib_;
  const Options options_;
  const std::uint32_t out_id_, in_id_;
  const bool sends_;
  const std::vector<Request> out_, in_;
  End* peer_ = nullptr;
  std::vector<ibv_mr*> fresh_;
  std::vector<std::uint8_t> memory_, receive_memory_;
  const std::vector<std::uint64_t> in_turn_;
  ibv_pd* pd_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cqs_[2];
  ibv_mr *mr_, *receive_mr_ = nullptr;
  ibv_srq* srq_ = nullptr;
  std::map<std::uint64_t, int> slots_;  ///< of receives of the SRQ, by wr_id
  int free_slot_ = 0;
  ibv_qp *qp_, *company_ = nullptr, *doomed_ = nullptr;
  ibv_qp_ex* ex_ = nullptr;
  bool given_up_ = false;
  std::uint32_t turns_ = 0;
  ibv_gid gid_{};
  ibv_qp_attr birth_{};
  std::uint64_t receives_ = 0, received_wrs_ = 0;
  int posted_ = 0, received_ = 0;
  std::atomic<int> completed_ = 0, allowed_ = 0;
  int seen_ = 0;
  Clock::time_point progress_{};
  std::atomic<bool> broken_ = false;

 public:
  /// The first one counts.
  struct Error {
    std::string text;
    void operator=(const std::string& s) {
      if (text.empty()) text = s;
    }
    bool empty() const { return text.empty(); }
  } error_;
};

/// @return the longest that it takes to ask for a QP's state, of all the times in which that is done
Clock::duration longest_question(const End& x, const End& y, std::chrono::milliseconds times);

}  // namespace ends

#endif
