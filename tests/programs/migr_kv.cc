// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Transactions on a store in the partner's memory: two accounts are locked (CAS of a value that nobody else has), read, written
// and unlocked, by as many workers as there are QPs. All workers are here, so what is read under a lock must be what was
// written last; at the end the server compares its memory with the client's books. A transaction that was done twice, or not at
// all, shows in a balance or in a count of updates; a lock whose answer was wrong, in a lock that stays or that two hold.
#include <getopt.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "verify/check.h"
#include "verify/control.h"
#include "verify/fabric.h"
#include "verify/report.h"

namespace verify {
namespace {

constexpr double kSetupLimit = 60, kEndLimit = 180;
constexpr int kNapUs = 200, kPollBatch = 16;
constexpr std::int64_t kLookUs = 50'000;
constexpr std::uint64_t kBalance = 1'000'000;

struct Args {
  std::string server, dev, json, stop_file;
  int port = 18525;
  std::uint32_t qps = 4;
  double connect = 30, stall = 120;
};

struct Account {
  std::uint64_t lock;  // 0: free
  std::uint64_t balance, updates;
  std::uint64_t unused;
};
constexpr std::uint32_t kAccountsPerQp = sizeof(Words) / sizeof(Account);  // the store lies where the words are

/// What an account has besides its lock; both in one WRITE.
struct Value {
  std::uint64_t balance, updates;
  bool operator==(const Value&) const = default;
};
constexpr std::size_t kValueAt = offsetof(Account, balance);

enum class Step { kIdle, kLockFirst, kLockSecond, kRead, kFree };

/// One QP. Where its work requests put what comes back, and take what they write from.
struct Desk {
  std::uint64_t found;     // by a CAS
  Value read[2], written[2];
  std::uint64_t zero;
};

struct Worker {
  std::uint32_t index = 0;
  Step step = Step::kIdle;
  std::array<std::uint32_t, 2> accounts{};
  std::uint64_t amount = 0, owner = 0;
};

Options fabric_options(const Args& a) {
  Options o;
  o.dev = a.dev;
  return o;
}

Shape fabric_shape(const Args& a) {
  Shape s;
  s.qps = a.qps;
  s.depth = 8;
  return s;
}

class Run {
 public:
  Run(const Args& a, Control& c) : args_(a), control_(c), client_(!a.server.empty()), fabric_(fabric_options(a), fabric_shape(a)), books_(kAccountsPerQp * a.qps, {kBalance, 0}) {
    for (std::uint32_t i = 0; !client_ && i < books_.size(); ++i) accounts()[i].balance = kBalance;
    control_.send(Msg::kConnect, fabric_.address());
    fabric_.connect(control_.expect(Msg::kConnect, kSetupLimit));
    control_.send(Msg::kReady);
    control_.expect(Msg::kReady, kSetupLimit);
    key_ = std::random_device()();
    for (std::uint32_t i = 0; i < a.qps; ++i) workers_.push_back({.index = i});
  }

  void serve() {
    const std::string books = control_.expect(Msg::kFin, 1e6);
    if (books.size() != books_.size() * sizeof(Value)) throw PeerError("the client's books have another size");
    std::memcpy(books_.data(), books.data(), books.size());
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < books_.size(); ++i) {
      const Account& a = accounts()[i];
      sum += a.balance;
      if (a.lock) faults.add(Fault::kDuplicated, "account " + std::to_string(i) + " is still locked");
      if (Value{a.balance, a.updates} != books_[i])
        faults.add(a.updates > books_[i].updates ? Fault::kDuplicated : Fault::kLost,
                   "account " + std::to_string(i) + " has " + std::to_string(a.balance) + " after " + std::to_string(a.updates) + " updates, by the books " +
                       std::to_string(books_[i].balance) + " after " + std::to_string(books_[i].updates));
      transactions_ += a.updates;
    }
    transactions_ /= 2;
    if (sum != kBalance * books_.size()) faults.add(Fault::kCorrupted, "the sum of all accounts is " + std::to_string(sum));
    end();
  }

  void work() {
    std::int64_t look = 0, progress = now_us();
    bool stop = false, busy = true;
    while (!stop || busy) {
      const std::int64_t now = now_us();
      if (now >= look) {
        look = now + kLookUs;
        stop = stop || access(args_.stop_file.c_str(), F_OK) == 0;
        if (const auto m = control_.poll()) throw PeerError("the server has ended: " + m->body);
      }
      busy = false;
      for (Worker& w : workers_) {
        if (w.step == Step::kIdle && !stop) begin(w);
        busy = busy || w.step != Step::kIdle;
      }
      if (poll()) progress = now;
      else if (static_cast<double>(now - progress) > args_.stall * 1e6) throw PeerError("nothing has completed for a long time");
      else usleep(kNapUs);
    }
    control_.send(Msg::kFin, std::string(reinterpret_cast<const char*>(books_.data()), books_.size() * sizeof(Value)));
    end();
  }

  std::string summary() const {
    Json j;
    j.field("errors", faults.total()).field("transactions", transactions_).field("contended", contended_).field("wr_posted", posted_).field("wr_completed", completed_);
    return j.field("first_error", faults.first()).text();
  }

  Faults faults;

 private:
  Account* accounts() const { return reinterpret_cast<Account*>(fabric_.words.data()); }
  Desk& desk(const Worker& w) const { return *reinterpret_cast<Desk*>(fabric_.local.data() + w.index * fabric_.ring_bytes()); }

  void end() {
    const std::uint64_t mine = faults.total();
    control_.send(Msg::kResult, std::string(reinterpret_cast<const char*>(&mine), sizeof mine));
    control_.expect(Msg::kResult, kEndLimit);
  }

  /// The one thing of an account, and what of the desk goes there or comes from there.
  void post(Worker& w, ibv_wr_opcode opcode, std::uint32_t account, std::size_t at, void* here, std::uint32_t bytes, bool signalled = true) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(here), bytes, fabric_.local_mr[0]->lkey};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = w.index;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = signalled ? IBV_SEND_SIGNALED : 0;
    const std::uint64_t to = fabric_.partner.words + account * sizeof(Account) + at;
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP) wr.wr.atomic = {.remote_addr = to, .compare_add = 0, .swap = w.owner, .rkey = fabric_.partner.words_rkey};
    else wr.wr.rdma = {.remote_addr = to, .rkey = fabric_.partner.words_rkey};
    if (const int err = ibv_post_send(fabric_.qps[w.index].get(), &wr, &bad)) throw PeerError(std::string("ibv_post_send: ") + std::strerror(err));
    ++posted_;
    unsignalled_ += !signalled;
  }

  void lock(Worker& w, unsigned which) {
    w.owner = std::uint64_t{key_} << 32 | ++owners_;
    w.step = which ? Step::kLockSecond : Step::kLockFirst;
    post(w, IBV_WR_ATOMIC_CMP_AND_SWP, w.accounts[which], offsetof(Account, lock), &desk(w).found, 8);
  }

  /// In order, so no two wait for each other.
  void begin(Worker& w) {
    const auto n = static_cast<std::uint32_t>(books_.size());
    const std::uint32_t a = static_cast<std::uint32_t>(random_() % n), b = (a + 1 + static_cast<std::uint32_t>(random_() % (n - 1))) % n;
    w.accounts = {std::min(a, b), std::max(a, b)};
    w.amount = random_() % 100;
    lock(w, 0);
  }

  void locked(Worker& w, unsigned which) {
    if (desk(w).found == w.owner) faults.add(Fault::kDuplicated, "a CAS has found its own value");
    if (desk(w).found) return ++contended_, lock(w, which);
    if (!which) return lock(w, 1);
    w.step = Step::kRead;
    for (unsigned i = 0; i < 2; ++i) post(w, IBV_WR_RDMA_READ, w.accounts[i], kValueAt, &desk(w).read[i], sizeof(Value), i == 1);
  }

  void write(Worker& w) {
    Desk& d = desk(w);
    for (unsigned i = 0; i < 2; ++i) {
      Value& book = books_[w.accounts[i]];
      if (d.read[i] != book)
        faults.add(Fault::kCorrupted, "account " + std::to_string(w.accounts[i]) + " has " + std::to_string(d.read[i].updates) + " updates under our lock, not " + std::to_string(book.updates));
      d.written[i] = {i ? d.read[i].balance + w.amount : d.read[i].balance - w.amount, d.read[i].updates + 1};
      book = {i ? book.balance + w.amount : book.balance - w.amount, book.updates + 1};
      post(w, IBV_WR_RDMA_WRITE, w.accounts[i], kValueAt, &d.written[i], sizeof(Value), false);
    }
    w.step = Step::kFree;
    for (unsigned i = 0; i < 2; ++i) post(w, IBV_WR_RDMA_WRITE, w.accounts[i], offsetof(Account, lock), &d.zero, sizeof d.zero, i == 1);
  }

  void completed(const ibv_wc& wc) {
    Worker& w = workers_.at(wc.wr_id);
    if (wc.status != IBV_WC_SUCCESS) throw PeerError(std::string("a work request completed with '") + ibv_wc_status_str(wc.status) + "'");
    ++completed_;
    switch (w.step) {
      case Step::kLockFirst: return locked(w, 0);
      case Step::kLockSecond: return locked(w, 1);
      case Step::kRead: return write(w);
      case Step::kFree:
        completed_ += std::exchange(unsignalled_, 0);
        ++transactions_;
        w.step = Step::kIdle;
        return;
      default: faults.add(Fault::kDuplicated, "a completion that nobody waits for");
    }
  }

  int poll() {
    int all = 0;
    for (const Cq& cq : fabric_.cqs) {
      ibv_wc wc[kPollBatch];
      const int n = ibv_poll_cq(cq.get(), kPollBatch, wc);
      for (int i = 0; i < n; ++i) completed(wc[i]);
      all += n;
    }
    return all;
  }

  const Args& args_;
  Control& control_;
  const bool client_;
  Fabric fabric_;
  std::vector<Value> books_;
  std::vector<Worker> workers_;
  std::mt19937_64 random_{std::random_device()()};
  std::uint32_t key_ = 0;
  std::uint64_t owners_ = 0, transactions_ = 0, contended_ = 0, posted_ = 0, completed_ = 0, unsignalled_ = 0;
};

Args parse(int argc, char** argv) {
  static const option kLong[] = {{"dev", 1, nullptr, 'd'},   {"port", 1, nullptr, 'p'}, {"qps", 1, nullptr, 'q'},       {"connect", 1, nullptr, 'c'},
                                 {"stall", 1, nullptr, 't'}, {"json", 1, nullptr, 'j'}, {"stop-file", 1, nullptr, 'f'}, {nullptr, 0, nullptr, 0}};
  Args a;
  bool good = true;
  for (int c; (c = getopt_long(argc, argv, "", kLong, nullptr)) != -1;) switch (c) {
      case 'd': a.dev = optarg; break;
      case 'p': a.port = std::atoi(optarg); break;
      case 'q': a.qps = static_cast<std::uint32_t>(std::atoi(optarg)); break;
      case 'c': a.connect = std::atof(optarg); break;
      case 't': a.stall = std::atof(optarg); break;
      case 'j': a.json = optarg; break;
      case 'f': a.stop_file = optarg; break;
      default: good = false;
    }
  if (optind < argc) a.server = argv[optind];
  if (good && a.qps >= 1 && a.qps <= kMaxQps && (a.server.empty() || !a.stop_file.empty())) return a;
  std::fputs("usage: migr_kv [--dev D] [--port N] [--connect S] [--stall S] [--json F] [[--qps N] --stop-file F SERVER]\n"
             "The client works until its stop file is there.\n", stderr);
  std::exit(kExitUsage);
}

int run(Args a) {
  Control control = a.server.empty() ? Control::serve("", a.port, a.connect) : Control::connect(a.server, "", a.port, a.connect);
  if (a.server.empty()) a.qps = static_cast<std::uint32_t>(std::atoi(control.expect(Msg::kHello, kSetupLimit).c_str()));
  else control.send(Msg::kHello, std::to_string(a.qps));
  if (a.qps < 1 || a.qps > kMaxQps) throw PeerError("the partner wants " + std::to_string(a.qps) + " QPs");
  Run r(a, control);
  try {
    a.server.empty() ? r.serve() : r.work();
  } catch (const std::runtime_error& e) {
    r.faults.add(Fault::kOther, e.what());
  }
  return close_report(r.faults, r.summary() + "\n", {a.json});
}

}  // namespace
}  // namespace verify

int main(int argc, char** argv) {
  const verify::Args a = verify::parse(argc, argv);
  return verify::run_program("migr_kv", [&] { return verify::run(a); });
}
