/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What the files of this folder share. Of the Registry's lock, unless said otherwise. */
#ifndef MIGR_LINKS_STATE_H
#define MIGR_LINKS_STATE_H

#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include "links.h"

namespace migr::links {

/// A key of ours, as peers hold it, and what it is called on the backup link. prkey 0: it is gone.
struct Key {
  std::uint32_t home;  ///< link that its memory was registered on
  std::uint32_t vrkey, prkey;
};

struct State {
  Config config;
  Peer instance{};
  std::deque<Link> links;
  std::vector<Twin*> twins;
  std::vector<QpLink*> qps;
  std::vector<Channel*> channels;
  std::vector<std::pair<std::pair<Peer, unsigned>, std::uint32_t>> rounds;  ///< of channels that were given up
  std::vector<Key> keys;                      ///< in the order in which they are told; never shorter
  std::vector<migr_links_name> to_withdraw;
  std::vector<migr_links_switch> to_report;
  std::uint64_t next_id = 1;
  int round_fd = -1, failover_fd = -1;        ///< eventfds
};

/// Null: not configured.
State* state();
void kick(int eventfd);
std::uint64_t now_ns();
void say(const QpLink& l, const std::string& what);

/* links.cc */
QpLink* find(const migr_links_name& name);
bool same(const migr_links_name& a, const migr_links_name& b);
void set_stage(QpLink& l, Stage stage);

/* shadow_verbs.cc */
/// Makes one thing that is missing. @return false: nothing is, or it failed
bool make_next();
/// All memory of `t` that the application has registered. @return "" or what is missing
std::string make_memory(Twin& t);
void destroy_path(QpLink& l);
int connect_path(QpLink& l, const migr_links_path& to, std::string& why);
ibv_qp* create_on(ibv_pd* pd, ibv_cq* cq, const ibv_qp_cap& cap, unsigned port, unsigned access, std::string& why);
void run_rounds();  ///< the thread

/* change.cc */
void begin(QpLink& l, migr_links_cause cause, std::uint32_t epoch);
void give_back(QpLink& l, const std::string& why);
void got_state(Channel& from, const struct StateRecord& record);
void channel_broke(Channel& channel);
void run_failover();  ///< the thread
/// Keys that a QP's replays and posts are translated by. Caller holds q.lock.
void set_remote_keys(QpLink& l);

}  // namespace migr::links

#endif
