/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "channel.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "../datagrams.h"
#include "../real.h"

namespace migr::links {
namespace {

constexpr std::uint64_t kReceive = 1ull << 32, kSend = 2ull << 32, kBeat = 3ull << 32, kKind = 0xffull << 32;
constexpr std::uint8_t kRnrForEver = 7, kRnrTimer = 6;
constexpr std::uint64_t kByeLimitNs = 1'000'000'000;

template <class T>
T record(const std::uint8_t* at, std::size_t n) {
  T out;
  std::memcpy(&out, at + n * sizeof(T), sizeof(T));
  return out;
}

int post_receive(Channel& c, unsigned slot) {
  ibv_sge sge{reinterpret_cast<std::uint64_t>(&c.buffers[std::size_t{slot} * Channel::kMessageBytes]), Channel::kMessageBytes, c.mr->lkey};
  ibv_recv_wr wr{.wr_id = kReceive | slot, .next = nullptr, .sg_list = &sge, .num_sge = 1};
  ibv_recv_wr* bad;
  return c.link->ops.post_recv(c.qp, &wr, &bad);
}

void flush_waiting(Channel& c) {
  while (!c.waiting.empty() && c.connected) {
    const auto slot = static_cast<unsigned>(std::countr_one(c.busy));
    if (slot >= Channel::kSends) return;
    const std::vector<std::uint8_t>& message = c.waiting.front();
    std::uint8_t* const at = &c.buffers[std::size_t{Channel::kReceives + slot} * Channel::kMessageBytes];
    std::memcpy(at, message.data(), message.size());
    ibv_sge sge{reinterpret_cast<std::uint64_t>(at), static_cast<std::uint32_t>(message.size()), c.mr->lkey};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = kSend | slot;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (c.link->ops.post_send(c.qp, &wr, &bad)) return;  // no room: when one has completed
    c.busy |= 1u << slot;
    c.waiting.pop_front();
  }
}

template <class Record>
constexpr std::size_t kPerMessage = (Channel::kMessageBytes - sizeof(MessageHead)) / sizeof(Record);

template <class Record>
void send_records(Channel& c, std::uint16_t type, std::span<const Record> records, bool also_empty) {
  do {
    const auto part = records.first(std::min(records.size(), kPerMessage<Record>));
    if (part.empty() && !also_empty) break;
    also_empty = false;
    const MessageHead head{.version = kMessageVersion, .type = type, .count = static_cast<std::uint32_t>(part.size())};
    std::vector<std::uint8_t> message(sizeof head + part.size_bytes());
    std::memcpy(message.data(), &head, sizeof head);
    if (!part.empty()) std::memcpy(message.data() + sizeof head, part.data(), part.size_bytes());
    c.waiting.push_back(std::move(message));
    c.keys_sent += type == kKeysMessage;
    records = records.subspan(part.size());
  } while (!records.empty());
  flush_waiting(c);
}

void got_heard(Channel& c, const HeardRecord& record) {
  c.keys_heard = record.messages;
  state()->heard.notify_all();
}

std::size_t keys_of(const Channel& c) {
  std::size_t n = 0;
  for (const auto& [home, keys] : c.keys) n += keys.size();
  return n;
}

/// @return false: nonsense, and the channel is no good
bool handle(Channel& c, const std::uint8_t* bytes, std::uint32_t length) {
  MessageHead head;
  if (length < sizeof head) return false;
  std::memcpy(&head, bytes, sizeof head);
  const std::uint32_t body = length - static_cast<std::uint32_t>(sizeof head);
  if (head.version != kMessageVersion) return past_of(c.peer, *c.link).other_version_ns = now_ns(), false;
  if ((c.ended || c.parting) && head.type != kByeMessage) return true;  // said by what has been forgotten since, and would be taken for what is made anew
  bytes += sizeof head;
  if (head.type == kKeysMessage && body == head.count * sizeof(KeyRecord)) {
    ++c.keys_got;
    c.heard = c.heard || head.count < kPerMessage<KeyRecord>;  // of the first ones none counts before all are there
    for (std::uint32_t i = 0; i < head.count; ++i) {
      const auto key = record<KeyRecord>(bytes, i);
      if (key.home >= kMaxLinks) return false;
      if (key.prkey) c.keys[key.home][key.vrkey] = key.prkey;
      else c.keys[key.home].erase(key.vrkey);
    }
    c.tables.clear();
    c.keys_news = true;
    return keys_of(c) <= kMostKeys;
  }
  c.heard = true;
  const auto each = [&]<class Record>(void (*got)(Channel&, const Record&)) {
    if (body != head.count * sizeof(Record)) return false;
    for (std::uint32_t i = 0; i < head.count; ++i) got(c, record<Record>(bytes, i));
    return true;
  };
  switch (head.type) {
    case kStateMessage: return each(got_state);
    case kPathMessage: return each(got_path);
    case kDrainMessage: return each(got_drain);
    case kByeMessage: return each(got_bye);
    case kHeardMessage: return each(got_heard);
    case kAtomicMessage: return each(got_atomic);
    case kAnswerMessage: return each(got_answer);
    case kSpareMessage: return each(got_spare);
    case kTakeMessage: return each(got_take);
    case kWantMessage: return each(got_want);
    default: return false;
  }
}

/// After as many messages as have come at once.
void put_keys_to_use(Channel& c) {
  if (!std::exchange(c.keys_news, false)) return;
  for (QpLink* l : state()->qps)
    if (c.heard && l->instance == c.peer && l->leg().link == c.link && has_changed(*l)) {
      std::lock_guard guard(l->q->lock);
      set_remote_keys(*l);
    }
  const HeardRecord heard{.messages = c.keys_got};
  send_records<HeardRecord>(c, kHeardMessage, {&heard, 1}, false);
}

/// Both directions have been seen to work.
void note_up(Channel& c) {
  if (c.up_ns || !c.up()) return;
  c.up_ns = now_ns();
  past_of(c.peer, *c.link).lost_ns = 0;
  kick(state()->round_fd);
}

/// @return false: it is broken
bool completed(Channel& c, const ibv_wc& wc) {
  if (wc.status != IBV_WC_SUCCESS) return false;
  const auto slot = static_cast<unsigned>(wc.wr_id & 0xffffffff);
  c.last_ns = now_ns();
  switch (wc.wr_id & kKind) {
    case kReceive: {
      // What it leads to may be the end of this very channel's use, but not of the channel: poll_channels() does that.
      if (!handle(c, &c.buffers[std::size_t{slot} * Channel::kMessageBytes], wc.byte_len)) return false;
      note_up(c);
      return !post_receive(c, slot);
    }
    case kSend:
      c.busy &= ~(1u << slot);
      c.acknowledged = true;
      note_up(c);
      flush_waiting(c);
      tell_keys(c);
      return true;
    default:
      if (c.doubt_ns && c.beat_ns < c.doubt_ns) {
        c.beat_now = true;
      } else if (c.doubt_ns) {
        c.doubt_ns = 0;
        kick(state()->round_fd);
      }
      c.beat_ns = 0;
      return true;
  }
}

}  // namespace

Channel* find_channel(const Peer& peer, const Link& link) {
  for (Channel* c : state()->channels)
    if (c->peer == peer && c->link == &link) return c;
  return nullptr;
}

namespace {

/// If all of a link break at once the CQ has to hold what all of them flush.
void make_room(Link& link) {
  const auto of_link = std::count_if(state()->channels.begin(), state()->channels.end(), [&](const Channel* c) { return c->link == &link; });
  const int needed = (static_cast<int>(of_link) + 1) * Channel::kCqes + Channel::kSpareCqes;
  if (needed <= link.cq->cqe) return;
  if (const int err = real().resize_cq(link.cq, 2 * needed))
    std::fprintf(stderr, "libmigr: the CQ of the channels on %s keeps its %d entries: %s\n", link.config.device.c_str(), link.cq->cqe, std::strerror(err));
}

}  // namespace

Channel* make_channel(const Peer& peer, Link& link, std::uint32_t round, std::string& why) {
  make_room(link);
  auto c = std::make_unique<Channel>();
  c->peer = peer;
  c->link = &link;
  c->round = round;
  c->buffers.resize(std::size_t{Channel::kReceives + Channel::kSends} * Channel::kMessageBytes);
  c->mr = real().reg_mr_iova2(link.pd, c->buffers.data(), c->buffers.size(), reinterpret_cast<std::uintptr_t>(c->buffers.data()), IBV_ACCESS_LOCAL_WRITE);
  if (!c->mr) return why = std::string("reg_mr for a channel: ") + std::strerror(errno), nullptr;
  const ibv_qp_cap cap{.max_send_wr = Channel::kSends + 2, .max_recv_wr = Channel::kReceives, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = link.cq;
  init.cap = cap;
  c->qp = create_on(link.pd, init, link.config.port, IBV_ACCESS_REMOTE_WRITE, why);
  c->psn = switchover::random_psn();
  int err = 0;
  for (unsigned i = 0; c->qp && i < Channel::kReceives && !err; ++i) err = post_receive(*c, i);
  if (!c->qp || err) {
    if (err) why = std::string("post_recv for a channel: ") + std::strerror(err);
    if (c->qp) real().destroy_qp(c->qp);
    real().dereg_mr(c->mr);
    return nullptr;
  }
  state()->channels.push_back(c.get());
  return c.release();
}

void destroy_channel(Channel* c) {
  std::erase(state()->channels, c);
  state()->heard.notify_all();
  drop_spares(*c);
  state()->discards.add(c->qp, c->mr, std::move(c->buffers));
  delete c;
}

migr_links_channel address_of(const Channel& c) {
  migr_links_channel out{};
  std::memcpy(out.peer, c.peer.data(), sizeof out.peer);
  out.link = c.link->index;
  out.round = c.round;
  std::memcpy(out.gid, c.link->gid.gid.raw, sizeof out.gid);
  out.qpn = c.qp->qp_num;
  out.psn = c.psn;
  out.lid = c.link->lid;
  out.mtu = static_cast<std::uint8_t>(c.link->mtu);
  return out;
}

bool neighbour_answers(ibv_pd* pd, ibv_ah_attr to) {
  errno = 0;  // not every provider sets it
  ibv_ah* const ah = datagrams::create_ah(pd, to);
  if (!ah) return errno != ETIMEDOUT;  // of all else connecting tells at once
  real().destroy_ah(ah);
  return true;
}

int connect_channel(Channel& c, const migr_links_channel& to, std::string& why) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = std::min(c.link->mtu, static_cast<ibv_mtu>(to.mtu));
  attr.dest_qp_num = to.qpn;
  attr.rq_psn = to.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = kRnrTimer;
  lead_to(attr.ah_attr, *c.link, to.gid, to.lid);
  int err = real().modify_qp(c.qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (err) return why = std::string("modify_qp to RTR of a channel: ") + std::strerror(err), err;
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = c.psn;
  attr.timeout = kOwnTimeout;
  attr.retry_cnt = kOwnRetries;
  attr.rnr_retry = kRnrForEver;
  attr.max_rd_atomic = 1;
  err = real().modify_qp(c.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  if (err) return why = std::string("modify_qp to RTS of a channel: ") + std::strerror(err), err;
  c.connected = true;
  c.last_ns = now_ns();
  tell_keys(c);
  return 0;
}

namespace {

void tell_keys_now(Channel& c) {
  if (!c.connected) return;
  std::vector<KeyRecord> records;
  const std::uint64_t before = c.told;
  c.told = state()->keys.since(c.told, [&](const KeyName& name, std::uint32_t prkey) {
    if (name.link == c.link->index) records.push_back({name.home, name.vrkey, prkey});
  });
  if (c.told != before) {
    std::uint64_t all_know = c.told;
    for (const Channel* other : state()->channels)
      if (other->told) all_know = std::min(all_know, other->told);
    state()->keys.all_know(all_know);
  }
  send_records<KeyRecord>(c, kKeysMessage, records, !c.greeted);
  if (!c.greeted && !records.empty() && records.size() % kPerMessage<KeyRecord> == 0) send_records<KeyRecord>(c, kKeysMessage, {}, true);  // the last one is told by not being full
  c.greeted = true;
}

template <class Record>
void send_one(Channel& c, MessageType type, const Record& record) {
  tell_keys_now(c);
  send_records<Record>(c, type, {&record, 1}, false);
}

}  // namespace

void tell_keys(Channel& c) {
  if (c.has_room()) tell_keys_now(c);
}

void send_state(Channel& c, const StateRecord& record) { send_one(c, kStateMessage, record); }
void send_path(Channel& c, const PathRecord& record) { send_one(c, kPathMessage, record); }
void send_drain(Channel& c, const DrainRecord& record) { send_one(c, kDrainMessage, record); }
void send_answer(Channel& c, const AnswerRecord& record) { send_one(c, kAnswerMessage, record); }
void send_spare(Channel& c, const SpareRecord& record) { send_one(c, kSpareMessage, record); }
void send_take(Channel& c, const TakeRecord& record) { send_one(c, kTakeMessage, record); }
void send_want(Channel& c, const WantRecord& record) { send_one(c, kWantMessage, record); }
void send_atomics(Channel& c, std::span<const AtomicRecord> records) {
  tell_keys_now(c);
  send_records<AtomicRecord>(c, kAtomicMessage, records, false);
}
void send_bye(Channel& c, const ByeRecord& record) {
  send_one(c, kByeMessage, record);
  c.bye_ns = now_ns();
}

void end_channel(Channel& c) {
  Past& past = past_of(c.peer, *c.link);
  past.round = c.round;
  past.lost_ns = 0;
  destroy_channel(&c);
}

void poll_channels(Link& link) {
  constexpr int kBatch = 16;
  ibv_wc wc[kBatch];
  int n;
  while ((n = link.ops.poll_cq(link.cq, kBatch, wc)) > 0) {
    for (int i = 0; i < n; ++i) {
      Channel* found = nullptr;
      for (Channel* c : state()->channels)
        if (c->link == &link && c->qp->qp_num == wc[i].qp_num) found = c;
      if (!found) executed(link, wc[i]);
      else if (!completed(*found, wc[i])) channel_broke(*found, (wc[i].wr_id & kKind) == kBeat ? MIGR_LINKS_CAUSE_HEARTBEAT : MIGR_LINKS_CAUSE_CHANNEL);
    }
    for (Channel* c : state()->channels)
      if (c->link == &link) put_keys_to_use(*c);
  }
}

std::shared_ptr<const RemoteKeys> remote_keys(Channel& c, std::uint32_t home, bool all) {
  std::shared_ptr<const RemoteKeys>& table = c.tables[{home, all}];
  if (!table) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
    if (const auto of_home = c.keys.find(home); of_home != c.keys.end()) pairs.assign(of_home->second.begin(), of_home->second.end());
    table = std::make_shared<const RemoteKeys>(pairs, all);
  }
  return table;
}

void heartbeats(Link& link) {
  const Config& config = state()->config;
  const std::uint64_t interval = config.heartbeat_ms * 1'000'000ull, now = now_ns();
  // Whose own thread did not run cannot tell who was silent.
  const bool slept = now - std::exchange(link.looked_ns, now) > 2 * interval;
  for (Channel* c : std::vector(state()->channels)) {
    if (c->link != &link || !c->up()) continue;
    if (c->ended && (!c->busy || now - c->bye_ns > kByeLimitNs)) {
      end_channel(*c);
      continue;
    }
    // Nor can whose messages are before it in the queue: they wait for receives of a library that stands still. Where nobody answers their retries end.
    if (c->beat_ns && (slept || c->busy)) c->waits_ns = now;
    if (config.heartbeat_ms && c->beat_ns && now - c->waits_ns > interval * config.heartbeat_misses) {
      channel_broke(*c, MIGR_LINKS_CAUSE_HEARTBEAT);
      continue;
    }
    if (c->beat_ns || (!c->beat_now && (!config.heartbeat_ms || now - c->last_ns < interval))) continue;
    ibv_send_wr wr{}, *bad;  // an empty write: the other end's NIC answers
    wr.wr_id = kBeat;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (link.ops.post_send(c->qp, &wr, &bad)) continue;
    c->beat_ns = c->waits_ns = now;
    c->beat_now = false;
  }
}

}  // namespace migr::links
