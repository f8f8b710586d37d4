/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "whereabouts.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>

#include "control.h"
#include "links/links.h"
#include "objects.h"
#include "path.h"
#include "switchover/switchover.h"

namespace migr::whereabouts {
namespace {

using Gid = std::array<std::uint8_t, 16>;

constexpr int kAskMs = 3000;

/* Under the Registry's lock, but for `any`. Never destroyed: threads may outlive main() */
bool told = false;                      ///< what has moved, by the migrd that we are connected to
auto& touched = *new std::vector<Gid>;  ///< that processes have moved to or from
std::uint64_t news = 0;                 ///< how often something of this has changed
bool have_moved = false;
std::atomic<bool> any{true};                                         ///< connecting a QP may be more than that
auto& retired = *new std::deque<std::shared_ptr<const RemoteKeys>>;  ///< a thread that posts may be looking into the last ones

constexpr std::size_t kRetired = 1024;

void exchange_keys(QpShadow& q, std::shared_ptr<const RemoteKeys> keys) {
  if (auto before = exchange_remote_keys(q, std::move(keys))) retired.push_back(std::move(before));
  if (retired.size() > kRetired) retired.pop_front();
}

void say(const char* what, int err) {
  static std::atomic<int> said{0};
  if (said.exchange(err) != err) std::fprintf(stderr, "libmigr: %s: %s\n", what, std::strerror(err));
}

/// Caller holds the Registry's lock.
void changed() {
  ++news;
  any = !told || have_moved || !touched.empty();
}

}  // namespace

void set_moves(std::span<const migr_move> moves) {
  told = true;
  touched.clear();
  for (const migr_move& m : moves) {
    if (m.vqpn) continue;
    touched.push_back(std::to_array(m.birth_gid));
    touched.push_back(std::to_array(m.gid));
  }
  changed();
}

void untold() {
  told = false;
  changed();
}

void moved() {
  have_moved = true;
  changed();
}

void met(QpShadow& q, std::span<const migr_key_map> keys) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
  for (const migr_key_map& key : keys) pairs.emplace_back(key.vrkey, key.prkey);
  const bool counts = links::met(q);
  std::lock_guard guard(q.lock);
  if (!keys.empty()) q.peer = std::to_array(keys[0].owner);
  q.peer_context = 0;  // until it moves again
  if (!counts) return;
  exchange_keys(q, pairs.empty() ? nullptr : std::make_shared<const RemoteKeys>(pairs));
  path::translate_keys(q, kTranslateRemote);
}

void parted(QpShadow& q) {
  std::lock_guard guard(q.lock);
  q.peer = {};
  q.peer_context = 0;
  exchange_keys(q, nullptr);
}

Connecting::Connecting(ibv_qp* qp, const ibv_qp_attr& attr, int mask)
    : qp_(qp), names_peer_((mask & IBV_QP_DEST_QPN) && (mask & IBV_QP_AV) && attr.ah_attr.is_global), receives_((mask & IBV_QP_STATE) && attr.qp_state == IBV_QPS_RTR) {
  if (!any.load(std::memory_order_relaxed)) names_peer_ = receives_ = false;
  if (!names_peer_) return;
  std::memcpy(asked_.gid, attr.ah_attr.grh.dgid.raw, sizeof asked_.gid);
  asked_.qpn = attr.dest_qp_num;
}

void Connecting::look_up() {
  found_.reset();
  if (!names_peer_) return;
  std::uint32_t pqpn = 0;
  bool known_to_move;
  {
    Registry& registry = Registry::get();
    auto guard = registry.enter();
    as_of_ = news;
    const QpShadow* q = known(registry, qp_);
    known_to_move = std::find(touched.begin(), touched.end(), std::to_array(asked_.gid)) != touched.end();
    if (!q || (told && !known_to_move)) return;
    pqpn = q->pqpn();
  }
  const Asking asking;
  std::vector<migr_qp_address> answer;
  const int err = control::ask(MIGR_MSG_WHERE, pqpn, std::span<const migr_qp_address>(&asked_, 1), answer, kAskMs);
  if (err == ENOTCONN && !known_to_move) return;  // there is no migrd
  if (err && err != ENOENT) say("where a peer is that has moved cannot be found out", err);
  if (!err && answer.size() == 1) found_ = answer[0];
}

bool Connecting::stale() const { return names_peer_ && as_of_ != news; }

bool Connecting::put(ibv_qp_attr& attr) const {
  if (!found_) return false;
  std::memcpy(attr.ah_attr.grh.dgid.raw, found_->gid, sizeof found_->gid);
  attr.dest_qp_num = found_->qpn;
  return true;
}

void Connecting::connected(const QpShadow& q) {
  if (!receives_ || !have_moved || !q.context->ctx_id()) return;
  as_of_ = news;
  name_ = MIGR_QP_NAME(q.context->ctx_id(), q.vqpn());
  std::vector<migr_key_map> all;
  switchover::keys_of(*q.context, all);
  std::copy_if(all.begin(), all.end(), std::back_inserter(keys_), [](const migr_key_map& k) { return k.vrkey != k.prkey; });
}

void Connecting::introduce() const {
  if (keys_.empty()) return;
  const Asking asking;
  {
    std::lock_guard guard(Registry::get().lock);
    if (as_of_ != news) return;  // moved again: whoever was connected has been told
  }
  std::vector<migr_qp_address> none;
  const int err = control::ask(MIGR_MSG_INTRODUCE, name_, std::span<const migr_key_map>(keys_), none, kAskMs);
  if (err && err != ENOENT) say("a new partner cannot be told what memory is called since the migration", err);
}

}  // namespace migr::whereabouts
