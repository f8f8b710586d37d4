// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Plays migrd for processes of one host: takes their connections (include/migr/proc_wire.h) and moves every connection
// between two of them to new queue pairs, again and again, with the partner's steps on both sides. No CRIU, no second
// host: it shows that the engine loses nothing. Run it before the processes start, with their MIGR_PROC_SOCKET.
#include <fcntl.h>
#include <getopt.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "proc_side.h"

namespace {

using namespace proc_side;

constexpr unsigned kFrozenMs = 50;

/// Order of a switchover; --rollback-at takes one of these names.
/// "freeze" is taken only to go back from it: there is no other host on which to go on.
enum Step { kCreate, kConnect, kSuspend, kScan, kDrain, kCut, kSettle, kFreeze, kSwitch, kResume, kNoStep };
constexpr std::array<const char*, kNoStep> kStepNames = {"create", "connect", "suspend", "scan",   "drain",
                                                         "cut",    "settle",  "freeze",  "switch", "resume"};

constexpr const char kHelp[] =
    R"(proc_ctl: switches the connections between two processes of this host to new queue pairs

  proc_ctl [options]
  --socket PATH       where to listen (environment MIGR_PROC_SOCKET, else /run/migr/proc.sock)
  --device NAME       RDMA device (rxe0)
  --gid-index N       GID that the connections go to (the first RoCE v2 one with an IPv4 address)
  --count N           switchovers (1)
  --interval MS       between two of them (200)
  --after MS          before the first one, after both have connected QPs (500)
  --wait S            so long for two processes with connected QPs (30)
  --rollback-at STEP  go back after STEP: create connect suspend scan drain freeze switch; "each": a different
                      one each time
  --cut               wait for no drain: cut the connections, and replay what had not completed. Steps "cut" and
                      "settle" are those of it; to go back after "cut" breaks the connections
  --rollback-every K  of K switchovers one goes back (1 with --rollback-at, else never)
  --list              print who has connected, and end

Status: 0 all went well, 1 a step failed, 2 bad command line, 3 no two connected processes in time.
)";

struct Options {
  std::string socket;
  std::string device = "rxe0";
  int gid_index = -1;
  unsigned count = 1, interval_ms = 200, after_ms = 500, wait_s = 30, rollback_every = 0;
  int rollback_at = kNoStep;
  bool rollback_each = false, list = false, cut = false;
};

/// Something of ours in /proc/PID/maps or among the links of /proc/PID/fd; empty: nothing.
std::string mentions_migr(const std::string& path) {
  const auto ours = [](const std::string& s) { return s.find("/dev/migr") != s.npos || s.find("/migr-qpn") != s.npos ||
           s.find("/migr-key") != s.npos; };
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      std::error_code gone;
      const std::string to = std::filesystem::read_symlink(entry.path(), gone).string();
      if (ours(to)) return to;
    }
    return "";
  }
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (ours(line)) return line;
  return "";
}

class Switchover {
 public:
  Switchover(Process& a, Process& b, std::array<std::uint8_t, 16> gid, const Listener& listener)
      : sides_{&a, &b}, gid_(gid), listener_(&listener) {}

  /// Finds which QP talks to which. Only before the first switchover, while virtual numbers are the physical ones.
  /// @return pairs
  std::size_t pair_up(const std::map<std::uint32_t, std::uint32_t>& to) {
    std::size_t pairs = 0;
    for (Process* p : sides_) {
      p->qps.clear();
      for (const migr_drain_stat& s : p->ask(MIGR_MSG_STATS).as<migr_drain_stat>())
        p->qps.push_back({s.ctx_id, s.vqpn, s.vqpn});
    }
    for (Qp& a : sides_[0]->qps)
      for (Qp& b : sides_[1]->qps) {
        const auto from_a = to.find(a.pqpn), from_b = to.find(b.pqpn);
        if (from_a == to.end() || from_b == to.end()) continue;
        if (from_a->second != b.pqpn || from_b->second != a.pqpn) continue;
        a.peer_vqpn = b.vqpn;
        b.peer_vqpn = a.vqpn;
        ++pairs;
      }
    return pairs;
  }

  /// @param back_after roll back when this step is done; kNoStep: go through
  /// @param cut  the connections are cut, whatever is under way
  void run(Step back_after, bool cut) {
    cut_ = cut;
    using Fn = void (Switchover::*)();
    constexpr std::array<Fn, kNoStep> kSteps = {&Switchover::create, &Switchover::connect, &Switchover::suspend,
                                                &Switchover::scan,   &Switchover::drain,   &Switchover::cut,
                                                &Switchover::settle, &Switchover::freeze,
                                                &Switchover::switch_paths, &Switchover::resume};
    for (int step = kCreate; step != kNoStep; ++step) {
      if (step == kFreeze && back_after != kFreeze) continue;
      if ((step == kCut || step == kSettle) && !cut) continue;
      try {
        (this->*kSteps[static_cast<std::size_t>(step)])();
      } catch (const Failed& e) {
        if (step != kResume) roll_back_quietly();
        throw Failed(std::string("step ") + kStepNames[static_cast<std::size_t>(step)] + ": " + e.what());
      }
      if (step == back_after) return roll_back();
    }
    for (Process* p : sides_)
      for (Qp& q : p->qps)
        if (q.peer_vqpn) q.pqpn = q.spare.pqpn;
  }

  unsigned replayed_sends = 0;
  unsigned replayed = 0, executed = 0, lost = 0;  ///< of all switchovers: what cutting them has left
  double suspended_ms = 0, drain_ms = 0, scan_ms = 0;

 private:
  static double ms_since(Clock::time_point t) {
    return std::chrono::duration<double, std::milli>(Clock::now() - t).count();
  }
  Process& other(const Process* p) { return p == sides_[0] ? *sides_[1] : *sides_[0]; }
  static Qp& qp_of(Process& p, std::uint32_t vqpn) {
    for (Qp& q : p.qps)
      if (q.vqpn == vqpn) return q;
    throw Failed(p.name() + " has no QP " + std::to_string(vqpn));
  }
  void both(std::uint16_t type, std::uint64_t arg = 0) {
    for (Process* p : sides_) p->send(type, p->refs(), arg);
    std::string why;
    for (Process* p : sides_) {  // take both answers, whatever the first one is
      try {
        p->answer();
      } catch (const Failed& e) {
        why += (why.empty() ? "" : "; ") + std::string(e.what());
      }
    }
    if (!why.empty()) throw Failed(why);
  }

  void create() {
    for (Process* p : sides_)
      for (const migr_qp_spare& s : p->ask(MIGR_MSG_QP_CREATE, p->refs()).as<migr_qp_spare>()) qp_of(*p, s.vqpn).spare = s;
  }
  void connect() {
    for (Process* p : sides_) {
      std::vector<migr_qp_connect> all;
      for (const Qp& q : p->qps) {
        if (!q.peer_vqpn) continue;
        const migr_qp_spare& there = qp_of(other(p), q.peer_vqpn).spare;
        migr_qp_connect c{};
        c.ctx_id = q.ctx_id;
        c.vqpn = q.vqpn;
        c.dest_qpn = there.pqpn;
        c.dest_psn = there.psn;
        std::memcpy(c.dgid, gid_.data(), gid_.size());
        all.push_back(c);
      }
      p->ask(MIGR_MSG_QP_CONNECT, all);
    }
  }
  void suspend() {
    suspended_at_ = Clock::now();
    both(MIGR_MSG_SUSPEND);
  }
  void scan() {
    const auto start = Clock::now();
    for (Process* p : sides_) {
      const auto seen = migr::wait_until_outside(p->pid(), p->ranges(), p->hello().control_tid, Clock::now() + kScanLimit);
      if (!seen) throw Failed(seen.error().text);
    }
    scan_ms = ms_since(start);
  }
  void drain() {
    const auto start = Clock::now();
    if (cut_) {
      for (Process* p : sides_) p->send(MIGR_MSG_DRAIN, p->refs(), 1);
      for (Process* p : sides_) p->status();
    } else {
      both(MIGR_MSG_DRAIN, kDrainLimitMs);
    }
    drain_ms = ms_since(start);
  }
  void cut() {
    for (Process* p : sides_) p->ask(MIGR_MSG_CUT, p->refs(), MIGR_CUT_CHECK);
    for (Process* p : sides_)
      for (const migr_qp_psn& s : p->ask(MIGR_MSG_CUT, p->refs()).as<migr_qp_psn>()) qp_of(*p, s.vqpn).psn = s.psn;
  }
  void settle() {
    for (Process* p : sides_) {
      std::vector<migr_qp_psn> there;
      for (const Qp& q : p->qps)
        if (q.peer_vqpn) there.push_back({q.ctx_id, q.vqpn, qp_of(other(p), q.peer_vqpn).psn, 0});
      for (const migr_replay_stat& s : p->ask(MIGR_MSG_SETTLE, there).as<migr_replay_stat>()) {
        replayed += s.replayed;
        executed += s.executed;
        lost += s.lost;
      }
    }
  }
  /// The first process is frozen and thawed, as the source of a migration that fails while the image is copied.
  void freeze() {
    Process& p = *sides_[0];
    p.ask(MIGR_MSG_FREEZE);
    pollfd hangup{p.fd(), POLLIN, 0};
    char byte;
    if (poll(&hangup, 1, kAnswerLimitMs) != 1 || recv(p.fd(), &byte, 1, 0) != 0)
      throw Failed(p.name() + " is frozen but holds its connection");
    nap_ms(kFrozenMs);
    const std::string pid = std::to_string(p.pid());
    for (const char* file : {"maps", "fd"})
      if (const std::string found = mentions_migr("/proc/" + pid + "/" + file); !found.empty())
        throw Failed(p.name() + " is frozen but still has " + found);
    const std::string gate = gate_of(*listener_, p);
    std::ofstream(gate) << "";
    const auto again = listener_->accept_one(kAnswerLimitMs);
    unlink(gate.c_str());
    if (!again) throw Failed(p.name() + " did not connect when it had its gate");
    if (again->pid() != p.pid() || std::memcmp(again->hello().instance, p.hello().instance, 16) ||
        again->hello().state != MIGR_PROC_FROZEN)
      throw Failed("not " + p.name() + " but " + again->name() + " has come back, or not frozen");
    p.take_over(*again);
  }
  void switch_paths() { both(MIGR_MSG_SWITCH); }
  void resume() {
    replayed_sends = 0;
    for (Process* p : sides_) p->send(MIGR_MSG_RESUME, p->refs());
    for (Process* p : sides_)
      for (const migr_resume_stat& s : p->answer().as<migr_resume_stat>()) replayed_sends += s.replayed_sends;
    suspended_ms = ms_since(suspended_at_);
  }
  /// As migrds do it: the second is the partner, and what the first sends again finds its old path there.
  void roll_back() {
    sides_[1]->ask(MIGR_MSG_OLD_PATH);
    for (Process* p : sides_) p->ask(MIGR_MSG_ROLLBACK);
    suspended_ms = ms_since(suspended_at_);
  }
  void roll_back_quietly() {
    for (Process* p : sides_) {
      try {
        p->ask(MIGR_MSG_ROLLBACK);
      } catch (const Failed& e) {
        std::fprintf(stderr, "proc_ctl: and going back: %s\n", e.what());
      }
    }
  }

  std::array<Process*, 2> sides_;
  std::array<std::uint8_t, 16> gid_;
  const Listener* listener_;
  Clock::time_point suspended_at_ = Clock::now();
  bool cut_ = false;
};

Options parse(int argc, char** argv) {
  Options o;
  const char* socket = std::getenv("MIGR_PROC_SOCKET");
  o.socket = socket ? socket : MIGR_PROC_SOCKET;
  const option known[] = {{"socket", 1, nullptr, 's'},      {"device", 1, nullptr, 'd'},
                          {"gid-index", 1, nullptr, 'g'},   {"count", 1, nullptr, 'c'},
                          {"interval", 1, nullptr, 'i'},    {"after", 1, nullptr, 'a'},
                          {"wait", 1, nullptr, 'w'},        {"rollback-at", 1, nullptr, 'r'},
                          {"rollback-every", 1, nullptr, 'e'}, {"list", 0, nullptr, 'l'},
                          {"cut", 0, nullptr, 'x'},
                          {"help", 0, nullptr, 'h'},        {nullptr, 0, nullptr, 0}};
  const auto number = [](const char* text) {
    char* end;
    const unsigned long v = std::strtoul(text, &end, 10);
    if (end == text || *end || v > 1'000'000) {
      std::fprintf(stderr, "proc_ctl: '%s' is no number\n", text);
      std::exit(2);
    }
    return static_cast<unsigned>(v);
  };
  int c;
  while ((c = getopt_long(argc, argv, "", known, nullptr)) != -1) switch (c) {
      case 's': o.socket = optarg; break;
      case 'd': o.device = optarg; break;
      case 'g': o.gid_index = static_cast<int>(number(optarg)); break;
      case 'c': o.count = number(optarg); break;
      case 'i': o.interval_ms = number(optarg); break;
      case 'a': o.after_ms = number(optarg); break;
      case 'w': o.wait_s = number(optarg); break;
      case 'e': o.rollback_every = number(optarg); break;
      case 'l': o.list = true; break;
      case 'x': o.cut = true; break;
      case 'r':
        o.rollback_each = std::string(optarg) == "each";
        for (int s = kCreate; s < kResume; ++s)
          if (std::string(optarg) == kStepNames[static_cast<std::size_t>(s)]) o.rollback_at = s;
        if (o.rollback_at == kNoStep && !o.rollback_each) {
          std::fprintf(stderr, "proc_ctl: --rollback-at %s: no such step\n%s", optarg, kHelp);
          std::exit(2);
        }
        break;
      default:
        std::fputs(kHelp, c == 'h' ? stdout : stderr);
        std::exit(c == 'h' ? 0 : 2);
    }
  if ((o.rollback_at != kNoStep || o.rollback_each) && !o.rollback_every) o.rollback_every = 1;
  return o;
}

/// The steps that can be gone back from, in turn. With a cut not from between its two halves.
Step nth_step(unsigned n, bool cut) {
  std::vector<Step> steps;
  for (int s = kCreate; s < kResume; ++s)
    if (s != kCut && (s != kSettle || cut)) steps.push_back(static_cast<Step>(s));
  return steps[n % steps.size()];
}

int run(const Options& o) {
  const Listener listener(o.socket);
  std::vector<std::unique_ptr<Process>> all;
  std::optional<Switchover> job;
  std::size_t pairs = 0, before = 0;
  const auto deadline = Clock::now() + std::chrono::seconds(o.wait_s);
  const auto gid = gid_of(o.device, o.gid_index);
  // Until two processes have QPs that talk to each other, and no more of them come.
  while (Clock::now() < deadline && (!pairs || pairs != before)) {
    if (auto p = listener.accept_one(200)) {
      std::printf("process %d, libmigr %s, %zu text ranges\n", p->pid(), "connected", p->ranges().size());
      all.push_back(std::move(p));
    }
    if (all.size() < 2 || o.list) continue;
    before = pairs;
    const auto to = connections(o.device);
    for (std::size_t i = 0; i + 1 < all.size() && !job; ++i)
      for (std::size_t j = i + 1; j < all.size() && !job; ++j) {
        Switchover candidate(*all[i], *all[j], gid, listener);
        if (candidate.pair_up(to)) job.emplace(candidate);
      }
    if (job) pairs = job->pair_up(to);
  }
  if (o.list) return 0;
  if (!pairs) {
    std::fprintf(stderr, "proc_ctl: no two connected processes within %u s (%zu have come to %s)\n", o.wait_s,
                 all.size(), o.socket.c_str());
    return 3;
  }
  std::printf("%zu connections between %d and %d\n", pairs, all[0]->pid(), all[1]->pid());
  nap_ms(o.after_ms);
  unsigned went = 0, back = 0, replayed = 0;
  double worst = 0, sum = 0;
  for (unsigned i = 0; i < o.count; ++i) {
    Step at = kNoStep;
    if (o.rollback_every && i % o.rollback_every == o.rollback_every - 1)
      at = o.rollback_each ? nth_step(back, o.cut)
                           : static_cast<Step>(o.rollback_at == kNoStep ? kSwitch : o.rollback_at);
    try {
      job->run(at, o.cut);
    } catch (const Failed& e) {
      throw Failed("switchover " + std::to_string(i + 1) + " of " + std::to_string(o.count) + ", " + e.what());
    }
    at == kNoStep ? ++went : ++back;
    replayed += job->replayed_sends;
    sum += job->suspended_ms;
    worst = std::max(worst, job->suspended_ms);
    std::printf("%u: %s%s suspended %.1f ms (scan %.1f, drain %.1f), %u sends replayed, %u atomics lost\n", i + 1,
                at == kNoStep ? "switched" : "rolled back at ", at == kNoStep ? "" : kStepNames[at], job->suspended_ms,
                job->scan_ms, job->drain_ms, job->replayed_sends, job->lost);
    std::fflush(stdout);
    nap_ms(o.interval_ms);
  }
  std::printf("{\"switched\": %u, \"rolled_back\": %u, \"connections\": %zu, \"replayed_sends\": %u, "
              "\"suspended_ms_mean\": %.1f, \"suspended_ms_max\": %.1f, \"cut\": {\"replayed\": %u, \"executed\": %u, \"lost\": %u}}\n",
              went, back, pairs, replayed, sum / std::max(1u, o.count), worst,
              job->replayed, job->executed, job->lost);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  try {
    return run(o);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "proc_ctl: %s\n", e.what());
    return 1;
  }
}
