/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "replay.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "../../include/migr/migr.h"

namespace migr::replay {
namespace {

constexpr std::uint32_t kPsnMask = 0xffffff;

/// a - b, both of 24 bits that wrap.
std::int32_t psn_difference(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>((a - b) << 8) >> 8; }

/// PSNs that it takes. The answers of a READ count as if they were sent.
std::uint32_t packets(const QueuedSend& s, std::uint32_t mtu) {
  if (is_atomic(s.send.wr) || !s.bytes) return 1;
  return static_cast<std::uint32_t>((s.bytes + mtu - 1) / mtu);
}

Fate fate_of_executed(const ibv_send_wr& wr) {
  if (is_atomic(wr)) return Fate::kLost;
  return wr.opcode == IBV_WR_RDMA_READ ? Fate::kReplay : Fate::kDone;
}

ibv_wc_opcode completion_opcode(ibv_wr_opcode opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return IBV_WC_RDMA_WRITE;
    case IBV_WR_ATOMIC_WRITE:
      return IBV_WC_ATOMIC_WRITE;
    case IBV_WR_RDMA_READ:
      return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
      return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      return IBV_WC_FETCH_ADD;
    default:
      return IBV_WC_SEND;
  }
}

OwedCompletion completion(const QueuedSend& s, std::uint32_t vqpn, bool signal_all) {
  if (s.executed) return *s.executed;
  OwedCompletion owed{.wc = {}, .signalled = signal_all || (s.send.wr.send_flags & IBV_SEND_SIGNALED)};
  owed.wc.wr_id = s.send.wr.wr_id;
  owed.wc.status = IBV_WC_SUCCESS;
  owed.wc.opcode = completion_opcode(s.send.wr.opcode);
  owed.wc.byte_len = static_cast<std::uint32_t>(s.bytes);
  owed.wc.qp_num = vqpn;
  if (s.send.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || s.send.wr.opcode == IBV_WR_SEND_WITH_IMM)
    owed.wc.wc_flags = IBV_WC_WITH_IMM;
  return owed;
}

/// As with a cable that stays broken: the first one that was not acknowledged tells why, the others are flushed.
void fail_all(Plan& p, std::span<const QueuedSend> sends, std::span<const Fate> fates, std::uint32_t vqpn, bool signal_all) {
  bool broken = false;
  for (std::size_t i = 0; i < sends.size(); ++i) {
    OwedCompletion owed = completion(sends[i], vqpn, signal_all);
    if (broken || fates[i] != Fate::kDone) {
      owed.wc.status = broken ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;
      owed.signalled = broken = true;
    }
    p.completions.push_back(owed);
  }
}

}  // namespace

std::vector<Fate> fates(std::span<const QueuedSend> sends, std::uint32_t mtu, std::uint32_t next_psn, std::uint32_t peer_psn) {
  std::vector<Fate> out;
  for (const QueuedSend& s : sends) out.push_back(s.executed ? Fate::kDone : Fate::kReplay);
  if (sends.empty()) return out;
  // The oldest was never sent, or goes back to where the other end has got to: either way nothing behind that was executed.
  if (!sends.front().begun && peer_psn == next_psn) return out;
  std::uint32_t end = sends.front().first_psn;
  for (std::size_t i = 0; i < sends.size(); ++i) {
    if (sends[i].executed) continue;
    end = i ? (end + packets(sends[i], mtu)) & kPsnMask : end_psn(sends[i], mtu);
    if (psn_difference(peer_psn, end) < 0) break;
    out[i] = fate_of_executed(sends[i].send.wr);
  }
  return out;
}

std::uint32_t end_psn(const QueuedSend& send, std::uint32_t mtu) {
  return (send.first_psn + (send.read_psns ? send.read_psns : packets(send, mtu))) & kPsnMask;
}

void unfold(std::vector<QueuedSend>& sends, std::vector<StandIn>& stand_ins) {
  std::vector<QueuedSend> out;
  for (QueuedSend& s : sends) {
    const auto found = std::find_if(stand_ins.begin(), stand_ins.end(), [&](const StandIn& x) { return x.wr_id == s.send.wr.wr_id; });
    out.push_back(std::move(s));
    if (found == stand_ins.end()) continue;
    ibv_send_wr& wr = out.back().send.wr;
    wr.wr_id = found->owed.front().wc.wr_id;
    out.back().again = found->again.has_value();
    if (!found->owed.front().signalled) wr.send_flags &= ~static_cast<unsigned>(IBV_SEND_SIGNALED);
    for (std::size_t i = 1; i < found->owed.size(); ++i) out.emplace_back().executed = found->owed[i];
    stand_ins.erase(found);
  }
  sends = std::move(out);
}

void resend(std::span<const QueuedSend> sends, std::vector<Fate>& fates) {
  const auto takes_receive = [](const ibv_send_wr& wr) {
    return wr.opcode != IBV_WR_RDMA_WRITE && wr.opcode != IBV_WR_RDMA_READ && wr.opcode != IBV_WR_ATOMIC_WRITE && !is_atomic(wr);
  };
  for (std::size_t i = sends.size(); i-- > 0;) {
    if (sends[i].executed) continue;
    if (fates[i] == Fate::kDone && takes_receive(sends[i].send.wr)) return;
    if (fates[i] == Fate::kDone) fates[i] = Fate::kReplay;
    const bool once = sends[i].send.wr.send_flags & MIGR_SEND_ONCE;
    if (is_atomic(sends[i].send.wr) || once) fates[i] = Fate::kLost;
  }
}

namespace {

/// Both reach what a CAS at `address` has swapped.
bool writes_at(const QueuedSend& s, std::uint64_t address) {
  const ibv_send_wr& wr = s.send.wr;
  if (s.executed || wr.opcode == IBV_WR_RDMA_READ) return false;  // the former: looked at when it was settled
  const std::uint64_t start = is_atomic(wr) ? wr.wr.atomic.remote_addr : wr.wr.rdma.remote_addr, bytes = is_atomic(wr) ? kAtomicBytes : s.bytes;
  const bool one_sided = is_atomic(wr) || wr.opcode == IBV_WR_RDMA_WRITE || wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || wr.opcode == IBV_WR_ATOMIC_WRITE;
  return one_sided && start < address + kAtomicBytes && address < start + bytes;
}

}  // namespace

void swap_again(std::span<QueuedSend> sends, std::vector<Fate>& fates) {
  for (std::size_t i = 0; i < sends.size(); ++i) {
    const ibv_send_wr& wr = sends[i].send.wr;
    if (fates[i] != Fate::kLost || wr.opcode != IBV_WR_ATOMIC_CMP_AND_SWP) continue;
    bool overwritten = false;
    for (std::size_t k = i + 1; k < sends.size(); ++k)
      overwritten = overwritten || (fates[k] != Fate::kReplay && writes_at(sends[k], wr.wr.atomic.remote_addr));
    if (overwritten) continue;
    fates[i] = Fate::kReplay;
    sends[i].again = true;
  }
}

void close(std::vector<Fate>& fates) {
  std::fill(std::find_if(fates.begin(), fates.end(), [](Fate f) { return f != Fate::kDone; }), fates.end(), Fate::kLost);
}

Unused unused(const Cut& cut, std::size_t sends, std::size_t receives, bool separate) {
  if (separate) return {std::min(sends, cut.taken_sends.size()), std::min(receives, cut.taken_receives.size())};
  // Nothing completed between the look at the queues and the flushing: so it is nearly always.
  if (cut.flushed() == sends + receives) return {sends, receives};
  const std::size_t left = receives - std::min({receives, cut.received});
  const std::size_t of_receives = std::min(left, cut.flushed());
  return {std::min(sends, cut.flushed() - of_receives), of_receives};
}

Unused told_by_names(Unused guess, std::span<const std::uint64_t> flushed, std::span<const std::uint64_t> sends, std::span<const std::uint64_t> receives) {
  const std::size_t n = flushed.size();
  std::unordered_map<std::uint64_t, long> off;  // of each name: how many more the queues' ends have than were flushed
  std::size_t differ = 0;
  const auto count = [&](std::uint64_t name, long change) {
    long& c = off[name];
    differ -= c != 0;
    c += change;
    differ += c != 0;
  };
  const auto last = [](std::span<const std::uint64_t> all, std::size_t k) { return all[all.size() - k]; };  // the k-th from the end
  const std::size_t least = n > receives.size() ? n - receives.size() : 0, most = std::min(n, sends.size());
  if (least > most) return guess;
  for (const std::uint64_t name : flushed) count(name, -1);
  for (std::size_t k = 1; k <= least; ++k) count(last(sends, k), 1);
  for (std::size_t k = 1; k <= n - least; ++k) count(last(receives, k), 1);
  std::optional<Unused> found;
  const auto far = [&](std::size_t s) { return s > guess.sends ? s - guess.sends : guess.sends - s; };
  for (std::size_t s = least;; ++s) {
    if (!differ && (!found || far(s) < far(found->sends))) found = Unused{s, n - s};
    if (s == most) break;
    count(last(receives, n - s), -1);
    count(last(sends, s + 1), 1);
  }
  return found.value_or(guess);
}

Plan plan(std::vector<QueuedSend> sends, std::span<const Fate> fates, std::uint32_t vqpn, bool signal_all) {
  Plan p;
  p.done = static_cast<std::size_t>(std::count(fates.begin(), fates.end(), Fate::kDone));
  p.lost = static_cast<std::size_t>(std::count(fates.begin(), fates.end(), Fate::kLost));
  if (p.lost) {
    fail_all(p, sends, fates, vqpn, signal_all);
    return p;
  }
  for (std::size_t i = 0; i < sends.size(); ++i) {
    OwedCompletion owed = completion(sends[i], vqpn, signal_all);
    if (fates[i] == Fate::kReplay) {
      p.replays.push_back(std::move(sends[i].send));
      // Executed ones behind it complete after it: then it completes for them, too.
      const bool for_others = i + 1 < sends.size() && fates[i + 1] == Fate::kDone;
      if (!for_others && !sends[i].again) continue;
      ibv_send_wr& wr = p.replays.back().wr;
      wr.send_flags |= IBV_SEND_SIGNALED;
      p.stand_ins.push_back({.wr_id = 0, .owed = {owed}});
      if (sends[i].again) p.stand_ins.back().again = {.compare = wr.wr.atomic.compare_add, .swap = wr.wr.atomic.swap};
      p.at.push_back(p.replays.size() - 1);
    } else if (p.stand_ins.empty()) {
      p.completions.push_back(owed);
    } else {
      p.stand_ins.back().owed.push_back(owed);
    }
  }
  return p;
}

}  // namespace migr::replay
