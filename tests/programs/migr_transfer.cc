// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A program that registers memory for each transfer, some time before, and gives it back. Its partner is itself. The device
// writes into its buffers in turn, the program never; in the end each has to have what was written last.
#include <getopt.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "verify/control.h"
#include "verify/fabric.h"
#include "verify/report.h"

namespace verify {
namespace {

constexpr std::size_t kHugePage = 2u << 20, kWritten = 64u << 10, kDropped = 4u << 20;
constexpr int kPort = 1, kPollUs = 100, kPollLimit = 600'000;

struct Args {
  std::string dev, json, stop_file, spoil;
  int buffers = 32, pause_ms = 150;
};

[[noreturn]] void failed(const std::string& what) { throw SetupError(what + ": " + std::strerror(errno)); }

class Program {
 public:
  explicit Program(const Args& args) : args_(args), memory_(MemoryKind::kThp, static_cast<std::size_t>(args.buffers) * kHugePage), last_(static_cast<std::size_t>(args.buffers)), gone_(last_.size()), context_(open_device(args.dev)) {
    pd_.reset(ibv_alloc_pd(context_.get()));
    cq_.reset(ibv_create_cq(context_.get(), 16, nullptr, nullptr, 0));
    source_mr_.reset(ibv_reg_mr(pd_.get(), source_.data(), source_.size(), IBV_ACCESS_LOCAL_WRITE));
    if (!pd_ || !cq_ || !source_mr_) failed("the PD, CQ or MR");
    std::memset(dropped_.data(), kOld, dropped_.size());
    connect();
  }

  /// @return "" or what is wrong
  std::string run() {
    for (std::uint32_t round = 1; access(args_.stop_file.c_str(), F_OK) != 0; ++round) {
      const std::size_t i = round % last_.size();
      while (registered_.size() <= last_.size() / 2) {  // registering it counts as writing to it: that has to lie before a copy made ahead
        const std::size_t next = (round + registered_.size()) % last_.size();
        if (args_.spoil == "readonly" && mprotect(begin(next), kPage, PROT_READ | PROT_WRITE)) return "mprotect failed";
        ibv_mr* const mr = ibv_reg_mr(pd_.get(), begin(next), kHugePage - gone_[next], IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        if (!mr) return "ibv_reg_mr failed";
        registered_.emplace_back(mr);
      }
      if (!transfer(i, round)) return "transfer " + std::to_string(round) + " failed";
      if (!spoil(i)) return "what --spoil asks for failed";
      registered_.pop_front();
      last_[i] = round;
      usleep(static_cast<useconds_t>(args_.pause_ms) * 1000);
    }
    std::string wrong;
    for (std::size_t i = 0; i < last_.size(); ++i) {
      std::uint32_t first;
      std::memcpy(&first, data(i), sizeof first);
      if (first != last_[i]) wrong += " buffer " + std::to_string(i) + " has " + std::to_string(first) + " and not " + std::to_string(last_[i]) + ";";
      fill(last_[i]);
      if (wrong.empty() && last_[i] && std::memcmp(data(i), source_.data(), kWritten)) wrong = " buffer " + std::to_string(i) + " is broken;";
    }
    for (std::size_t at = 0; at < dropped_.size(); ++at)
      if (dropped_.data()[at] != (at < dropped_bytes_ ? 0 : kOld)) return wrong + " byte " + std::to_string(at) + " of what was dropped is " + std::to_string(dropped_.data()[at]) + ";";
    return wrong;
  }
  std::uint64_t transfers() const { return transfers_; }

 private:
  static constexpr std::uint8_t kOld = 0x5a;
  std::uint8_t* begin(std::size_t i) const { return memory_.data() + i * kHugePage + gone_[i]; }
  /// That is written to: the end of the buffer.
  std::uint8_t* data(std::size_t i) const { return memory_.data() + (i + 1) * kHugePage - kWritten; }
  /// Before it is given back.
  bool spoil(std::size_t i) {
    if (args_.spoil == "readonly") return !mprotect(begin(i), kPage, PROT_READ);
    if (args_.spoil == "dropped") return drop();
    if (args_.spoil != "hole") return true;
    if (gone_[i] + kPage + kWritten > kHugePage || munmap(begin(i), kPage)) return false;
    gone_[i] += kPage;
    return true;
  }
  /// A page holds nothing any more, and the device may read it.
  bool drop() {
    if (dropped_bytes_ == dropped_.size()) return true;
    std::uint8_t* const page = dropped_.data() + dropped_bytes_;
    if (madvise(page, kPage, MADV_DONTNEED)) return false;
    dropped_bytes_ += kPage;
    dropped_mrs_.emplace_back(ibv_reg_mr(pd_.get(), page, kPage, 0));
    return bool(dropped_mrs_.back());
  }
  void fill(std::uint32_t round) {
    for (std::size_t at = 0; at < kWritten; at += sizeof round) std::memcpy(source_.data() + at, &round, sizeof round);
  }
  bool transfer(std::size_t i, std::uint32_t round) {
    const Mr& mr = registered_.front();
    fill(round);
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(source_.data()), static_cast<std::uint32_t>(kWritten), source_mr_->lkey};
    ibv_send_wr wr{}, *bad;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.rdma = {.remote_addr = reinterpret_cast<std::uintptr_t>(data(i)), .rkey = mr->rkey};
    if (ibv_post_send(qp_.get(), &wr, &bad)) return false;
    ibv_wc wc{};
    int n = 0;
    for (int tries = 0; n == 0 && tries < kPollLimit; ++tries)
      if ((n = ibv_poll_cq(cq_.get(), 1, &wc)) == 0) usleep(kPollUs);
    transfers_ += n == 1 && wc.status == IBV_WC_SUCCESS;
    return n == 1 && wc.status == IBV_WC_SUCCESS;
  }
  void connect() {
    const ibv_gid_entry own = ipv4_gid(context_.get());
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_.get();
    init.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    init.qp_type = IBV_QPT_RC;
    qp_.reset(ibv_create_qp(pd_.get(), &init));
    if (!qp_) failed("ibv_create_qp");
    ibv_qp_attr a{};
    const auto modify = [&](int mask) {
      if (const int err = ibv_modify_qp(qp_.get(), &a, mask)) throw SetupError(std::string("ibv_modify_qp: ") + std::strerror(err));
    };
    a.qp_state = IBV_QPS_INIT;
    a.port_num = kPort;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    modify(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = qp_->qp_num;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = kPort;
    a.ah_attr.grh.dgid = own.gid;
    a.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(own.gid_index);
    a.ah_attr.grh.hop_limit = 64;
    modify(IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 14;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = 1;
    modify(IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  }

  const Args args_;
  Memory memory_, source_{MemoryKind::kPrivate, kWritten}, dropped_{MemoryKind::kPrivate, kDropped};
  std::vector<std::uint32_t> last_;
  std::vector<std::size_t> gone_;  // bytes that each buffer has no more
  std::size_t dropped_bytes_ = 0;
  Context context_;
  Pd pd_;
  Cq cq_;
  Mr source_mr_;
  std::deque<Mr> registered_;
  std::vector<Mr> dropped_mrs_;
  Qp qp_;
  std::uint64_t transfers_ = 0;
};

Args parse(int argc, char** argv) {
  Args a;
  static constexpr option kOptions[] = {{"dev", 1, nullptr, 'd'}, {"json", 1, nullptr, 'j'}, {"stop-file", 1, nullptr, 's'}, {"buffers", 1, nullptr, 'b'}, {"pause", 1, nullptr, 'p'}, {"spoil", 1, nullptr, 'S'}, {"help", 0, nullptr, 'h'}, {}};
  for (int c; (c = getopt_long(argc, argv, "h", kOptions, nullptr)) != -1;) {
    if (c == 'd') a.dev = optarg;
    else if (c == 'j') a.json = optarg;
    else if (c == 's') a.stop_file = optarg;
    else if (c == 'b') a.buffers = std::atoi(optarg);
    else if (c == 'p') a.pause_ms = std::atoi(optarg);
    else if (c == 'S') a.spoil = optarg;
    else {
      std::fprintf(c == 'h' ? stdout : stderr,
                   "migr_transfer --stop-file FILE [--dev D] [--json FILE] [--buffers N (32)] [--pause MS (150)] [--spoil KIND]\n"
                   "  KIND, each time before memory is given back: hole (a page of it is unmapped), readonly (a page of it is made that), dropped (another\n"
                   "  page is given back by madvise() and registered to be read)\n");
      std::exit(c == 'h' ? kExitOk : kExitUsage);
    }
  }
  if (a.stop_file.empty() || a.buffers < 1) std::exit((std::fprintf(stderr, "migr_transfer: --stop-file is missing, or --buffers is no number\n"), kExitUsage));
  return a;
}

int run(const Args& args) {
  Program program(args);
  const std::string wrong = program.run();
  const std::string line = "{\"errors\": " + std::string(wrong.empty() ? "0" : "1") + ", \"transfers\": " + std::to_string(program.transfers()) + ", \"first_error\": \"" + wrong + "\"}\n";
  std::fputs(line.c_str(), stdout);
  if (!args.json.empty() && !write_file(args.json, line)) throw SetupError("cannot write " + args.json);
  return wrong.empty() ? kExitOk : kExitFaults;
}

}  // namespace
}  // namespace verify

int main(int argc, char** argv) {
  const verify::Args args = verify::parse(argc, argv);
  try {
    return verify::run(args);
  } catch (const verify::SetupError& e) {
    std::fprintf(stderr, "migr_transfer: %s\n", e.what());
    return verify::kExitSetup;
  }
}
