// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Datagrams in both directions between two UD QPs that know each other by the addresses they had at first: a stream over
// an address handle of the beginning, answers over handles made from what a datagram says of its source, and a multicast
// group. What comes must be whole, in order, once, and from the partner by its first name. Losses are counted: UD allows
// them; but each kind has to go on until the end. --srq: the receives are an SRQ's.
#include <arpa/inet.h>
#include <getopt.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include <infiniband/verbs.h>

#include "verify/check.h"
#include "verify/control.h"
#include "verify/fabric.h"
#include "verify/report.h"

namespace verify {
namespace {

constexpr std::uint32_t kQkey = 0x1ee7, kMulticastQpn = 0xffffff;
constexpr std::uint32_t kReceives = 256, kSends = 128;
constexpr std::size_t kGrh = sizeof(ibv_grh), kIpv4At = 20, kPayload = 256, kSlot = 512;
constexpr std::uint64_t kAnswerEvery = 4, kGroupEvery = 8;
constexpr double kSetupLimit = 60, kEndLimit = 180;
constexpr std::int64_t kTailUs = 1'000'000;
constexpr int kNapUs = 1000;
const char kGroup[] = "239.77.1.1";

enum Kind : std::uint32_t { kStream, kAnswer, kMulticast, kKinds };

struct Datagram {
  std::uint64_t key, number;
  std::uint32_t kind, unused;
  std::uint8_t pattern[kPayload - 24];
};
static_assert(sizeof(Datagram) == kPayload);

struct Args {
  std::string server, dev, status, json, samples, stop_file;
  int port = 18525;
  double rate = 300, connect = 30, stall = 120;
  bool srq = false;
};

struct End {
  std::uint8_t gid[16];
  std::uint32_t qpn, psn;
  std::uint64_t key;
};

struct AhDelete {
  void operator()(ibv_ah* ah) const { ibv_destroy_ah(ah); }
};
using Ah = std::unique_ptr<ibv_ah, AhDelete>;

[[noreturn]] void fail(const std::string& what) { throw SetupError(what + ": " + std::strerror(errno)); }

ibv_gid group_gid() {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  inet_pton(AF_INET, kGroup, &gid.raw[12]);
  return gid;
}

class Run {
 public:
  Run(const Args& a, Control& c, bool client);
  void traffic();
  void end();
  Json summary() const;
  Faults faults;
  Samples samples;

 private:
  void post_receive(std::uint32_t slot);
  bool send(Kind kind, std::uint64_t number, ibv_ah* ah, std::uint32_t qpn, Ah owned = {});
  void poll();
  void on_receive(const ibv_wc& wc);
  bool said_stop();

  const Args& args_;
  Control& control_;
  const bool client_;
  Context context_;
  Pd pd_;
  Memory memory_{MemoryKind::kPrivate, (kReceives + kSends) * kSlot};
  Mr mr_;
  Cq cq_;
  Srq srq_;
  Qp qp_;
  int gid_index_ = -1, group_socket_ = -1;
  std::uint32_t qpn_ = 0;
  End mine_{}, theirs_{};
  Ah partner_, group_;
  std::deque<Ah> answers_[kSends];     // handles of sends under way
  std::vector<std::uint32_t> free_sends_;
  std::uint64_t sent_[kKinds] = {}, received_[kKinds] = {}, next_in_[kKinds] = {}, their_sent_[kKinds] = {};
  std::uint64_t posted_ = 0, completed_ = 0, bytes_ = 0;
  std::int64_t now_ = 0, elapsed_ = 0, idle_ = 0;
};

Run::Run(const Args& a, Control& c, bool client) : args_(a), control_(c), client_(client) {
  context_ = open_device(a.dev);
  const ibv_gid_entry own = ipv4_gid(context_.get());
  gid_index_ = static_cast<int>(own.gid_index);
  std::memcpy(mine_.gid, own.gid.raw, sizeof mine_.gid);
  pd_.reset(ibv_alloc_pd(context_.get()));
  if (pd_) mr_.reset(ibv_reg_mr(pd_.get(), memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE));
  cq_.reset(ibv_create_cq(context_.get(), kReceives + kSends, nullptr, nullptr, 0));
  if (!mr_ || !cq_) fail("memory and CQ");
  if (a.srq) {
    ibv_srq_init_attr shared{};
    shared.attr = {.max_wr = kReceives, .max_sge = 1, .srq_limit = 0};
    srq_.reset(ibv_create_srq(pd_.get(), &shared));
    if (!srq_) fail("an SRQ");
  }
  ibv_qp_init_attr init{};
  init.srq = srq_.get();
  init.send_cq = init.recv_cq = cq_.get();
  init.cap = {.max_send_wr = kSends, .max_recv_wr = kReceives, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_UD;
  init.sq_sig_all = 1;
  qp_.reset(ibv_create_qp(pd_.get(), &init));
  if (!qp_) fail("a UD QP");
  qpn_ = mine_.qpn = qp_->qp_num;
  mine_.key = mix(static_cast<std::uint64_t>(now_us()) ^ (client ? 1 : 2));
  ibv_qp_attr m{};
  m.qp_state = IBV_QPS_INIT;
  m.port_num = 1;
  m.qkey = kQkey;
  int err = ibv_modify_qp(qp_.get(), &m, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  m.qp_state = IBV_QPS_RTR;
  if (!err) err = ibv_modify_qp(qp_.get(), &m, IBV_QP_STATE);
  m.qp_state = IBV_QPS_RTS;
  if (!err) err = ibv_modify_qp(qp_.get(), &m, IBV_QP_STATE | IBV_QP_SQ_PSN);
  if ((errno = err)) fail("UD QP to RTS");
  for (std::uint32_t i = 0; i < kReceives; ++i) post_receive(i);
  for (std::uint32_t i = 0; i < kSends; ++i) free_sends_.push_back(i);
  const ibv_gid group = group_gid();
  if ((errno = ibv_attach_mcast(qp_.get(), &group, 0))) fail("ibv_attach_mcast");
  // The address has to be one that the host listens to; a container has no interface for that.
  ip_mreq join{};
  inet_pton(AF_INET, kGroup, &join.imr_multiaddr);
  std::memcpy(&join.imr_interface, mine_.gid + 12, 4);
  group_socket_ = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (setsockopt(group_socket_, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join, sizeof join)) {
    close(group_socket_);
    group_socket_ = -1;
  }
  control_.send(Msg::kConnect, std::string(reinterpret_cast<const char*>(&mine_), sizeof mine_));
  const std::string body = control_.expect(Msg::kConnect, kSetupLimit);
  if (body.size() != sizeof theirs_) throw PeerError("the partner's address has a wrong length");
  std::memcpy(&theirs_, body.data(), sizeof theirs_);
  ibv_ah_attr ah{};
  ah.is_global = 1;
  ah.port_num = 1;
  ah.grh.sgid_index = static_cast<std::uint8_t>(gid_index_);
  ah.grh.hop_limit = 64;
  std::memcpy(ah.grh.dgid.raw, theirs_.gid, 16);
  partner_.reset(ibv_create_ah(pd_.get(), &ah));
  ah.grh.dgid = group;
  group_.reset(ibv_create_ah(pd_.get(), &ah));
  if (!partner_ || !group_) fail("an address handle");
  control_.send(Msg::kReady);
  control_.expect(Msg::kReady, kSetupLimit);
}

void Run::post_receive(std::uint32_t slot) {
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory_.data() + slot * kSlot), kSlot, mr_->lkey};
  ibv_recv_wr wr{.wr_id = slot, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad = nullptr;
  if ((errno = srq_ ? ibv_post_srq_recv(srq_.get(), &wr, &bad) : ibv_post_recv(qp_.get(), &wr, &bad))) fail("a receive");
}

/// @param owned goes when it has been sent. @return false: no room
bool Run::send(Kind kind, std::uint64_t number, ibv_ah* ah, std::uint32_t qpn, Ah owned) {
  if (free_sends_.empty()) return false;
  const std::uint32_t slot = free_sends_.back();
  free_sends_.pop_back();
  auto* d = reinterpret_cast<Datagram*>(memory_.data() + (kReceives + slot) * kSlot);
  d->key = mine_.key;
  d->number = number;
  d->kind = kind;
  pattern_fill(d->pattern, sizeof d->pattern, mine_.key ^ kind, number);
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(d), kPayload, mr_->lkey};
  ibv_send_wr wr{}, *bad = nullptr;
  wr.wr_id = kReceives + slot;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_SEND;
  wr.wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = kQkey};
  if ((errno = ibv_post_send(qp_.get(), &wr, &bad))) fail("ibv_post_send");
  if (owned) answers_[slot].push_back(std::move(owned));
  ++posted_;
  sent_[kind] = number + 1;
  return true;
}

void Run::on_receive(const ibv_wc& wc) {
  const auto slot = static_cast<std::uint32_t>(wc.wr_id);
  std::uint8_t* const at = memory_.data() + slot * kSlot;
  const auto* d = reinterpret_cast<const Datagram*>(at + kGrh);
  const std::string what = "datagram " + std::to_string(d->number) + " of kind " + std::to_string(d->kind);
  if (d->key == mine_.key) return post_receive(slot);  // our own multicast
  std::uint8_t source[16] = {};
  source[10] = source[11] = 0xff;
  std::memcpy(source + 12, at + kIpv4At + offsetof(iphdr, saddr), 4);
  if (wc.byte_len != kGrh + kPayload || d->key != theirs_.key || d->kind >= kKinds ||
      pattern_mismatch(d->pattern, sizeof d->pattern, theirs_.key ^ d->kind, d->number)) {
    faults.add(Fault::kCorrupted, what + " is not what the partner has sent");
  } else if (wc.src_qp != theirs_.qpn || std::memcmp(source, theirs_.gid, 16)) {
    char text[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, source + 12, text, sizeof text);
    faults.add(Fault::kCorrupted, what + " comes from " + text + " QP " + std::to_string(wc.src_qp) + ", not from the partner's QP " +
                                      std::to_string(theirs_.qpn));
  } else if (d->number < next_in_[d->kind]) {
    faults.add(d->number + 1 == next_in_[d->kind] ? Fault::kDuplicated : Fault::kReordered,
               what + " came after " + std::to_string(next_in_[d->kind] - 1));
  } else {
    next_in_[d->kind] = d->number + 1;
    ++received_[d->kind];
    bytes_ += kPayload;
    samples.add(now_, kPayload);
    idle_ = 0;
    if (d->kind == kStream && d->number % kAnswerEvery == 0) {
      ibv_wc from = wc;
      Ah back(ibv_create_ah_from_wc(pd_.get(), &from, reinterpret_cast<ibv_grh*>(at), 1));
      if (!back) fail("ibv_create_ah_from_wc");
      ibv_ah* const ah = back.get();
      send(kAnswer, d->number, ah, wc.src_qp, std::move(back));
    }
  }
  post_receive(slot);
}

void Run::poll() {
  ibv_wc wc[16];
  for (int n; (n = ibv_poll_cq(cq_.get(), 16, wc)) > 0;)
    for (int i = 0; i < n; ++i) {
      if (wc[i].status != IBV_WC_SUCCESS) {
        faults.add(Fault::kOther, "WR " + std::to_string(wc[i].wr_id) + " completed with '" + ibv_wc_status_str(wc[i].status) + "'");
        continue;
      }
      if (wc[i].qp_num != qpn_) faults.add(Fault::kCorrupted, "a completion of QP " + std::to_string(wc[i].qp_num));
      if (wc[i].wr_id < kReceives) {
        on_receive(wc[i]);
      } else {
        const auto slot = static_cast<std::uint32_t>(wc[i].wr_id - kReceives);
        answers_[slot].clear();
        free_sends_.push_back(slot);
        ++completed_;
      }
    }
}

bool Run::said_stop() {
  while (auto m = control_.poll()) {
    if (m->type == Msg::kStop) return true;
    throw PeerError("the partner gave up: " + m->body);
  }
  if (args_.stop_file.empty() || access(args_.stop_file.c_str(), F_OK)) return false;
  control_.send(Msg::kStop);
  control_.expect(Msg::kStop, kEndLimit);
  return true;
}

void Run::traffic() {
  double budget = 0;
  std::int64_t last = 0, next_look = 0;
  bool stop = false;
  while (!stop) {
    now_ = now_us();
    const std::int64_t step = last ? std::clamp<std::int64_t>(now_ - last, 0, 1'000'000) : 0;
    last = now_;
    elapsed_ += step;
    idle_ += step;
    budget = std::min(budget + args_.rate * static_cast<double>(step) / 1e6, args_.rate / 20 + 1);
    poll();
    for (; budget >= 1 && free_sends_.size() > 2; budget -= 1) {
      const std::uint64_t n = sent_[kStream];
      send(kStream, n, partner_.get(), theirs_.qpn);
      if (n % kGroupEvery == 0) send(kMulticast, sent_[kMulticast], group_.get(), kMulticastQpn);
    }
    if (now_ >= next_look || now_ < next_look - 1'000'000) {
      next_look = now_ + 50'000;
      stop = said_stop();
      if (!args_.status.empty()) write_file(args_.status, summary().text() + "\n");
      if (idle_ > args_.stall * 1e6) throw PeerError("nothing has come for a long time");
    }
    usleep(kNapUs);
  }
  if (args_.stop_file.empty()) control_.send(Msg::kStop);
}

void Run::end() {
  for (std::int64_t t = 0; t < kTailUs || (completed_ < posted_ && t < 10 * kTailUs); t += kNapUs) {
    now_ = now_us();
    poll();
    usleep(kNapUs);
  }
  control_.send(Msg::kFin, std::string(reinterpret_cast<const char*>(sent_), sizeof sent_));
  const std::string body = control_.expect(Msg::kFin, kEndLimit);
  if (body.size() != sizeof their_sent_) throw PeerError("the partner's closing totals make no sense");
  std::memcpy(their_sent_, body.data(), sizeof their_sent_);
  if (completed_ != posted_) faults.add(Fault::kLost, std::to_string(posted_ - completed_) + " sends have not completed");
  const auto late = static_cast<std::uint64_t>(args_.rate);  // what a second brings
  for (std::uint32_t k = 0; k < kKinds; ++k) {
    if (k == kMulticast && group_socket_ < 0) continue;
    if (!received_[k] || their_sent_[k] > next_in_[k] + late)
      faults.add(Fault::kLost, "of kind " + std::to_string(k) + " nothing has come since " + std::to_string(next_in_[k]) + " of " +
                                   std::to_string(their_sent_[k]));
  }
  if (qp_->qp_num != qpn_) faults.add(Fault::kCorrupted, "qp_num has changed");
  const ibv_gid group = group_gid();
  if (const int err = ibv_detach_mcast(qp_.get(), &group, 0)) faults.add(Fault::kOther, std::string("ibv_detach_mcast: ") + std::strerror(err));
  const std::uint64_t mine = faults.total();
  control_.send(Msg::kResult, std::string(reinterpret_cast<const char*>(&mine), 8));
  control_.expect(Msg::kResult, kEndLimit);
}

Json Run::summary() const {
  Json j;
  j.field("errors", faults.total()).field("wr_posted", posted_).field("wr_completed", completed_).field("bytes", bytes_);
  const char* const names[] = {"stream", "answers", "multicast"};
  for (std::uint32_t k = 0; k < kKinds; ++k) j.field(names[k], received_[k]);
  std::uint64_t lost = 0;
  for (std::uint32_t k : {kStream}) lost += next_in_[k] - received_[k];
  j.field("not_come", lost).field("seconds", static_cast<double>(elapsed_) / 1e6).field("role", std::string(client_ ? "client" : "server"));
  j.field("first_error", faults.first());
  return j;
}

Args parse(int argc, char** argv) {
  static const option kLong[] = {{"dev", 1, nullptr, 'd'},     {"port", 1, nullptr, 'p'},      {"rate", 1, nullptr, 'r'},
                                 {"connect", 1, nullptr, 'c'}, {"stall", 1, nullptr, 't'},     {"status", 1, nullptr, 's'},
                                 {"json", 1, nullptr, 'j'},    {"samples", 1, nullptr, 'a'},   {"stop-file", 1, nullptr, 'f'},
                                 {"srq", 0, nullptr, 'q'},     {nullptr, 0, nullptr, 0}};
  Args a;
  for (int c; (c = getopt_long(argc, argv, "", kLong, nullptr)) != -1;) switch (c) {
      case 'd': a.dev = optarg; break;
      case 'p': a.port = std::atoi(optarg); break;
      case 'r': a.rate = std::atof(optarg); break;
      case 'c': a.connect = std::atof(optarg); break;
      case 't': a.stall = std::atof(optarg); break;
      case 's': a.status = optarg; break;
      case 'j': a.json = optarg; break;
      case 'a': a.samples = optarg; break;
      case 'f': a.stop_file = optarg; break;
      case 'q': a.srq = true; break;
      default:
        std::fputs("usage: migr_datagram [--dev D] [--port N] [--rate N] [--connect S] [--stall S] [--status F] [--json F]\n"
                   "                     [--samples F] [--stop-file F] [--srq] [SERVER]\n", stderr);
        std::exit(kExitUsage);
    }
  if (optind < argc) a.server = argv[optind];
  return a;
}

int run(const Args& a) {
  const bool client = !a.server.empty();
  Control control = client ? Control::connect(a.server, "", a.port, a.connect) : Control::serve("", a.port, a.connect);
  Run r(a, control, client);
  try {
    r.traffic();
    r.end();
  } catch (const std::runtime_error& e) {
    r.faults.add(Fault::kOther, e.what());
  }
  if (!a.samples.empty()) r.samples.write(a.samples);
  return close_report(r.faults, r.summary().text() + "\n", {a.json, a.status});
}

}  // namespace
}  // namespace verify

int main(int argc, char** argv) {
  const verify::Args a = verify::parse(argc, argv);
  return verify::run_program("migr_datagram", [&] { return verify::run(a); });
}
