// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A service as most are: it opens its device, looks up its GID and registers its memory once, in the beginning, and then clients
// come and go. Whatever it tells a client is what it knew in the beginning; it may have been moved meanwhile.
#include <getopt.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "verify/check.h"
#include "verify/control.h"
#include "verify/fabric.h"
#include "verify/report.h"

namespace verify {
namespace {

constexpr double kSetupLimit = 30, kClientLimit = 600;
constexpr std::int64_t kWorkUs = 20'000'000;
constexpr int kRounds = 20, kPort = 1;
constexpr useconds_t kStayUs = 20'000;
const char kAnother[] = "another";  // Msg::kReady with it: a round is there to be taken; without it: that was the last
constexpr std::size_t kBytes = 1 << 16, kPiece = 4096;
// Where in the memory: what the client writes, its counter, what is sent and received.
constexpr std::size_t kWordsAt = kPiece, kSendAt = 2 * kPiece, kReceiveAt = 3 * kPiece;

struct Args {
  std::string server, dev, json, stay;
  int port = 18535, clients = 1;
  bool early = false, client_first = false, vanish = false;
  std::uint32_t forge = 1;
};

/// What one end tells the other.
struct End {
  ibv_gid gid;
  std::uint64_t memory;
  std::uint32_t qpn, psn, rkey;
  std::uint32_t early, client_first, vanish, own;  // as the client wishes
};

[[noreturn]] void failed(const std::string& what) { throw SetupError(what + ": " + std::strerror(errno)); }

/// What there is once.
struct Device {
  explicit Device(const std::string& name) : context(open_device(name)), own(ipv4_gid(context.get())), gid(own.gid), index(static_cast<int>(own.gid_index)) {
    pd.reset(ibv_alloc_pd(context.get()));
    if (!pd) failed("ibv_alloc_pd");
    mr = reg(memory);
    cq = make_cq();
  }
  Mr reg(const Memory& of) const {
    Mr made(ibv_reg_mr(pd.get(), of.data(), kBytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
    if (!made) failed("ibv_reg_mr");
    return made;
  }
  Cq make_cq() const {
    Cq made(ibv_create_cq(context.get(), 64, nullptr, nullptr, 0));
    if (!made) failed("ibv_create_cq");
    return made;
  }

  Context context;
  const ibv_gid_entry own;
  const ibv_gid gid;
  const int index;
  Pd pd;
  Memory memory{MemoryKind::kPrivate, kBytes};
  Mr mr;
  Cq cq;
  std::set<std::uint32_t> left;  // QPs whose client has vanished
};

/// One connection.
class Line {
 public:
  /// @param own it has memory, an MR and a CQ of its own
  explicit Line(Device& device, bool own = false) : device_(device) {
    if (own) {
      own_memory_ = std::make_unique<Memory>(MemoryKind::kPrivate, kBytes);
      own_mr_ = device.reg(*own_memory_);
      own_cq_ = device.make_cq();
    }
    at_ = own ? own_memory_->data() : device.memory.data();
    mr_ = own ? own_mr_.get() : device.mr.get();
    cq_ = own ? own_cq_.get() : device.cq.get();
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    qp_.reset(ibv_create_qp(device.pd.get(), &init));
    if (!qp_) failed("ibv_create_qp");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = kPort;
    a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
    receive();
  }

  End end() const {
    return {.gid = device_.gid, .memory = reinterpret_cast<std::uintptr_t>(at_), .qpn = qp_->qp_num, .psn = qp_->qp_num & 0xffff, .rkey = mr_->rkey, .early = 0, .client_first = 0, .vanish = 0, .own = 0};
  }

  void connect(const End& to) {
    to_ = to;
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to.qpn;
    a.rq_psn = to.psn;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = kPort;
    a.ah_attr.grh.dgid = to.gid;
    a.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_.index);
    a.ah_attr.grh.hop_limit = 64;
    modify(a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, "RTR");
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 14;
    a.retry_cnt = a.rnr_retry = 7;
    a.sq_psn = qp_->qp_num & 0xffff;
    a.max_rd_atomic = 1;
    modify(a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC, "RTS");
    ibv_qp_attr now{};
    ibv_qp_init_attr init{};
    if (ibv_query_qp(qp_.get(), &now, IBV_QP_AV | IBV_QP_DEST_QPN, &init)) failed("ibv_query_qp");
    if (now.dest_qp_num != to.qpn || std::memcmp(&now.ah_attr.grh.dgid, &to.gid, sizeof to.gid) || now.ah_attr.grh.sgid_index != device_.index)
      faults.add(Fault::kOther, "ibv_query_qp() names another partner than ibv_modify_qp() did");
  }

  /// Writes, reads back, adds, sends; `round` goes into all of it.
  void work(int round) {
    std::uint8_t* const out = at_ + kSendAt;
    std::iota(out, out + kPiece, static_cast<std::uint8_t>(round));
    complete(post(IBV_WR_RDMA_WRITE, kSendAt, kPiece, 0));
    std::memset(out + kPiece * 4, 0, kPiece);
    complete(post(IBV_WR_RDMA_READ, kSendAt + kPiece * 4, kPiece, 0));
    if (std::memcmp(out, out + kPiece * 4, kPiece)) faults.add(Fault::kCorrupted, "what was read is not what was written");
    complete(post(IBV_WR_ATOMIC_FETCH_AND_ADD, kSendAt + kPiece * 4, 8, kWordsAt));
    std::uint64_t before;
    std::memcpy(&before, out + kPiece * 4, sizeof before);
    if (before != static_cast<std::uint64_t>(round)) faults.add(Fault::kDuplicated, "the counter had " + std::to_string(before) + " before addition " + std::to_string(round));
    complete(post(IBV_WR_SEND, kSendAt, kPiece, 0));
  }
  /// The other end's round: its message, and what it has written here.
  void take(int round) {
    complete(kReceiveId);
    for (std::size_t i = 0; i < kPiece; ++i)
      for (const std::size_t at : {std::size_t{0}, kReceiveAt})
        if (at_[at + i] != static_cast<std::uint8_t>(round + static_cast<int>(i))) return faults.add(Fault::kCorrupted, "round " + std::to_string(round) + ": another content");
    receive();
  }
  /// Reads by a key that nobody has given to this end: that has to end the connection.
  void forge(std::uint32_t change) {
    to_.rkey ^= change;
    post(IBV_WR_RDMA_READ, kSendAt, kPiece, 0);
    if (const ibv_wc wc = next(); wc.status != IBV_WC_REM_ACCESS_ERR) faults.add(Fault::kOther, std::string("a forged key: ") + ibv_wc_status_str(wc.status));
  }
  /// Its client is gone, and it has heard nothing of that.
  void leave() { device_.left.insert(qp_->qp_num); }
  /// What it posts now fails, and so did what it had posted.
  void expect_dead() {
    device_.left.erase(qp_->qp_num);
    post(IBV_WR_RDMA_WRITE, kSendAt, kPiece, 0);
    for (ibv_wc wc = next();; wc = next()) {
      if (wc.status == IBV_WC_SUCCESS) return faults.add(Fault::kOther, "a work request to a client that is gone has completed");
      if (wc.wr_id == kSendId) return;
    }
  }
  void clear_counter() { std::memset(at_ + kWordsAt, 0, 8); }

  Faults faults;

 private:
  static constexpr std::uint64_t kReceiveId = 1, kSendId = 2;

  void modify(ibv_qp_attr& a, int mask, const char* state) {
    if (const int err = ibv_modify_qp(qp_.get(), &a, mask)) throw PeerError(std::string("ibv_modify_qp to ") + state + ": " + std::strerror(err));
  }
  void receive() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(at_ + kReceiveAt), kPiece, mr_->lkey};
    ibv_recv_wr wr{}, *bad;
    wr.wr_id = kReceiveId;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (const int err = ibv_post_recv(qp_.get(), &wr, &bad)) throw PeerError(std::string("ibv_post_recv: ") + std::strerror(err));
  }
  std::uint64_t post(ibv_wr_opcode opcode, std::size_t here, std::size_t bytes, std::size_t there) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(at_ + here), static_cast<std::uint32_t>(bytes), mr_->lkey};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = kSendId;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) wr.wr.atomic = {.remote_addr = to_.memory + there, .compare_add = 1, .swap = 0, .rkey = to_.rkey};
    else wr.wr.rdma = {.remote_addr = to_.memory + there, .rkey = to_.rkey};
    if (const int err = ibv_post_send(qp_.get(), &wr, &bad)) throw PeerError(std::string("ibv_post_send: ") + std::strerror(err));
    return kSendId;
  }
  ibv_wc next() {
    ibv_wc wc{};
    for (const std::int64_t until = now_us() + kWorkUs;; usleep(200)) {
      const int n = ibv_poll_cq(cq_, 1, &wc);
      if (n < 0) throw PeerError("ibv_poll_cq failed");
      if (n && (own_cq_ || !device_.left.contains(wc.qp_num))) return wc;
      if (now_us() > until) throw PeerError("nothing completes");
    }
  }
  void complete(std::uint64_t id) {
    const ibv_wc wc = next();
    if (wc.status != IBV_WC_SUCCESS) throw PeerError(std::string("a work request completed with '") + ibv_wc_status_str(wc.status) + "'");
    if (wc.wr_id != id || wc.qp_num != qp_->qp_num) throw PeerError("a completion of another work request");
  }

  Device& device_;
  std::unique_ptr<Memory> own_memory_;
  Mr own_mr_;
  Cq own_cq_;
  std::uint8_t* at_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_cq* cq_ = nullptr;
  Qp qp_;
  End to_{};
};

End end_of(const std::string& bytes) {
  End e;
  if (bytes.size() != sizeof e) throw PeerError("the partner speaks otherwise");
  std::memcpy(&e, bytes.data(), sizeof e);
  return e;
}
std::string bytes_of(const End& e) { return {reinterpret_cast<const char*>(&e), sizeof e}; }

/// Until the client has come to its end.
void work_with(Control& control, Line& line, Faults& faults) {
  for (int round = 0; control.expect(Msg::kReady, kClientLimit) == kAnother; ++round) {
    line.take(round);
    control.send(Msg::kChecked);
  }
  line.work(0);  // the other way
  control.send(Msg::kDone);
  control.expect(Msg::kFin, kSetupLimit);
  if (line.faults.total()) faults.add(Fault::kOther, line.faults.first());
}

struct Clients {
  std::unique_ptr<Line> early;
  std::vector<std::unique_ptr<Line>> left;  // who has vanished
  std::vector<std::future<Faults>> beside;  // those whose line has everything of its own
};

void serve_one(const Args& a, Device& device, Clients& clients, Faults& faults) {
  Control control = Control::serve("", a.port, kClientLimit);
  const End client = end_of(control.expect(Msg::kConnect, kSetupLimit));
  std::unique_ptr<Line> line = client.early ? std::move(clients.early) : std::make_unique<Line>(device, client.own);
  if (!line) throw PeerError("there is one early QP only");
  line->clear_counter();
  if (!client.client_first) line->connect(client);
  control.send(Msg::kConnect, bytes_of(line->end()));
  if (client.client_first) control.expect(Msg::kReady, kSetupLimit), line->connect(client);
  control.send(Msg::kReady);
  if (client.vanish) {
    line->leave();
    clients.left.push_back(std::move(line));
    return;
  }
  if (client.own) {
    clients.beside.push_back(std::async(std::launch::async, [to = std::move(control), its = std::move(line)]() mutable {
      Faults found;
      work_with(to, *its, found);
      its.reset();
      return found;
    }));
    return;
  }
  work_with(control, *line, faults);
  // What the end of this connection has left there is nothing of the next one's.
  line.reset();
  for (ibv_wc wc; ibv_poll_cq(device.cq.get(), 1, &wc) > 0;) continue;
}

void visit(const Args& a, Device& device, Faults& faults) {
  Control control = Control::connect(a.server, "", a.port, kSetupLimit);
  Line line(device);
  End mine = line.end();
  mine.early = a.early, mine.client_first = a.client_first, mine.vanish = a.vanish, mine.own = !a.stay.empty();
  control.send(Msg::kConnect, bytes_of(mine));
  line.connect(end_of(control.expect(Msg::kConnect, kSetupLimit)));
  if (a.client_first) control.send(Msg::kReady);
  control.expect(Msg::kReady, kSetupLimit);
  if (a.vanish) {
    std::puts("{\"errors\":0,\"clients\":1}");
    std::fflush(stdout);
    _exit(kExitOk);
  }
  bool stays = !a.stay.empty();
  for (int round = 0, left = kRounds; left; ++round) {
    line.work(round);
    control.send(Msg::kReady, kAnother);
    control.expect(Msg::kChecked, kClientLimit);
    if (stays && !round) write_file(a.stay, "");
    if (stays) usleep(kStayUs);
    stays = stays && !access(a.stay.c_str(), F_OK);
    if (!stays) --left;
  }
  control.send(Msg::kReady);
  line.take(0);
  control.expect(Msg::kDone, kSetupLimit);
  line.forge(a.forge);
  control.send(Msg::kFin);
  if (line.faults.total()) faults.add(Fault::kOther, line.faults.first());
}

Args parse(int argc, char** argv) {
  static const option kLong[] = {{"dev", 1, nullptr, 'd'}, {"port", 1, nullptr, 'p'}, {"clients", 1, nullptr, 'c'}, {"json", 1, nullptr, 'j'}, {"early", 0, nullptr, 'e'}, {"client-first", 0, nullptr, 'f'}, {"vanish", 0, nullptr, 'v'}, {"forge", 1, nullptr, 'x'}, {"stay", 1, nullptr, 's'}, {nullptr, 0, nullptr, 0}};
  Args a;
  bool good = true;
  for (int c; (c = getopt_long(argc, argv, "", kLong, nullptr)) != -1;) switch (c) {
      case 'd': a.dev = optarg; break;
      case 'p': a.port = std::atoi(optarg); break;
      case 'c': a.clients = std::atoi(optarg); break;
      case 'j': a.json = optarg; break;
      case 'e': a.early = true; break;
      case 'f': a.client_first = true; break;
      case 'v': a.vanish = true; break;
      case 'x': a.forge = static_cast<std::uint32_t>(std::strtoul(optarg, nullptr, 0)); break;
      case 's': a.stay = optarg; break;
      default: good = false;
    }
  if (optind < argc) a.server = argv[optind++];
  if (good && optind == argc && a.clients > 0) return a;
  std::fputs(
      "usage: migr_server [--dev D] [--port N] [--json F] [--clients N | [--early] [--client-first] [--vanish] [--stay FILE] [--forge BITS] SERVER]\n"
      "--early: over a QP that the server made in its beginning; one client may. --client-first: the server's end is connected last.\n"
      "--vanish: the client dies when it is connected; the server keeps its end.\n"
      "--stay: the client makes FILE after its first round, and goes on until it is gone, beside others; the server's end has memory, an MR and a CQ of its own.\n"
      "A client's last request is to read by the server's key with other BITS (1: its tag), and has to fail.\n",
      stderr);
  std::exit(kExitUsage);
}

int run(const Args& a) {
  Device device(a.dev);
  Faults faults;
  int done = 0;
  try {
    if (a.server.empty()) {
      Clients clients;
      clients.early = std::make_unique<Line>(device);
      for (; done < a.clients; ++done) serve_one(a, device, clients, faults);
      for (auto& client : clients.beside)
        if (const Faults found = client.get(); found.total()) faults.add(Fault::kOther, found.first());
      for (const auto& line : clients.left) {
        line->expect_dead();
        if (line->faults.total()) faults.add(Fault::kOther, line->faults.first());
      }
    } else {
      visit(a, device, faults), ++done;
    }
  } catch (const PeerError& e) {
    faults.add(Fault::kOther, e.what());
  }
  Json j;
  j.field("errors", faults.total()).field("clients", static_cast<std::uint64_t>(done)).field("first_error", faults.first());
  return close_report(faults, j.text() + "\n", {a.json});
}

}  // namespace
}  // namespace verify

int main(int argc, char** argv) {
  const verify::Args a = verify::parse(argc, argv);
  return verify::run_program("migr_server", [&] { return verify::run(a); });
}
