// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Plays migrd for processes of one host: takes their connections (include/migr/proc_wire.h) and moves every connection
// between two of them to new queue pairs, again and again, with the partner's steps on both sides. No CRIU, no second
// host: it shows that the engine loses nothing. Run it before the processes start, with their MIGR_PROC_SOCKET.
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../agent/thread_scan.h"
#include "migr/proc_wire.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kAnswerLimitMs = 20'000;
constexpr unsigned kDrainLimitMs = 10'000;
constexpr auto kScanLimit = std::chrono::seconds(10);

/// Order of a switchover; --rollback-at takes one of these names.
enum Step { kCreate, kConnect, kSuspend, kScan, kDrain, kSwitch, kResume, kNoStep };
constexpr std::array<const char*, kNoStep> kStepNames = {"create", "connect", "suspend", "scan",
                                                         "drain",  "switch",  "resume"};

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
  --rollback-at STEP  go back after STEP: create connect suspend scan drain switch; "each": a different one each time
  --rollback-every K  of K switchovers one goes back (1 with --rollback-at, else never)
  --list              print who has connected, and end

Status: 0 all went well, 1 a step failed, 2 bad command line, 3 no two connected processes in time.
)";

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string socket;
  std::string device = "rxe0";
  int gid_index = -1;
  unsigned count = 1, interval_ms = 200, after_ms = 500, wait_s = 30, rollback_every = 0;
  int rollback_at = kNoStep;
  bool rollback_each = false, list = false;
};

struct Qp {
  std::uint32_t ctx_id, vqpn, pqpn;
  std::uint32_t peer_vqpn = 0;  // 0: not connected to the other process
  migr_qp_spare spare{};
};

struct Reply {
  migr_msg head{};
  std::vector<char> records;
  template <class T>
  std::vector<T> as() const {
    if (head.count && head.record_size != sizeof(T)) throw Failed("a reply has records of an unexpected size");
    std::vector<T> all(records.size() / sizeof(T));
    if (!all.empty()) std::memcpy(all.data(), records.data(), records.size());
    return all;
  }
};

class Process {
 public:
  Process(int fd, pid_t pid) : fd_(fd), pid_(pid) {
    const Reply hello = receive();
    if (hello.head.version != MIGR_PROC_VERSION || hello.head.type != MIGR_MSG_HELLO) throw Failed("no HELLO");
    hello_ = hello.head;
    for (const migr_text_range& r : hello.as<migr_text_range>()) ranges_.push_back({r.start, r.bytes});
  }
  ~Process() { close(fd_); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  const migr_msg& hello() const { return hello_; }
  const std::vector<migr::TextRange>& ranges() const { return ranges_; }
  std::vector<Qp> qps;

  template <class T = migr_qp_ref>
  void send(std::uint16_t type, const std::vector<T>& records = {}, std::uint64_t arg = 0) {
    migr_msg head{};
    head.version = MIGR_PROC_VERSION;
    head.type = type;
    head.seq = ++seq_;
    head.migration = 1;
    head.arg = arg;
    head.record_size = sizeof(T);
    std::size_t done = 0;
    do {
      const std::size_t n = std::min<std::size_t>(1024, records.size() - done);
      head.count = static_cast<std::uint32_t>(n);
      head.flags = done + n < records.size() ? MIGR_MORE : 0;
      std::vector<char> packet(sizeof head + n * sizeof(T));
      std::memcpy(packet.data(), &head, sizeof head);
      if (n) std::memcpy(packet.data() + sizeof head, records.data() + done, n * sizeof(T));
      if (::send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(packet.size()))
        throw Failed(name() + " is gone: " + std::strerror(errno));
      done += n;
    } while (done < records.size());
    asked_ = type;
  }

  /// The reply to the last send(). Throws if it is an error.
  Reply answer() {
    Reply whole = receive();
    while (whole.head.flags & MIGR_MORE) {
      const Reply more = receive();
      whole.head = more.head;
      whole.records.insert(whole.records.end(), more.records.begin(), more.records.end());
    }
    if (whole.head.type != (asked_ | MIGR_REPLY) || whole.head.seq != seq_)
      throw Failed(name() + ": reply to another request");
    if (whole.head.status)
      throw Failed(name() + ", message type " + std::to_string(asked_) + ": " + whole.head.text + " (" +
                   std::strerror(whole.head.status) + ")");
    return whole;
  }
  template <class T = migr_qp_ref>
  Reply ask(std::uint16_t type, const std::vector<T>& records = {}, std::uint64_t arg = 0) {
    send(type, records, arg);
    return answer();
  }

  std::string name() const { return "process " + std::to_string(pid_); }
  std::vector<migr_qp_ref> refs() const {
    std::vector<migr_qp_ref> all;
    for (const Qp& q : qps)
      if (q.peer_vqpn) all.push_back({q.ctx_id, q.vqpn, q.pqpn, 0});
    return all;
  }

 private:
  Reply receive() {
    pollfd p{fd_, POLLIN, 0};
    if (poll(&p, 1, kAnswerLimitMs) != 1) throw Failed(name() + " does not answer");
    std::vector<char> packet(1 << 19);
    const ssize_t n = recv(fd_, packet.data(), packet.size(), 0);
    Reply reply;
    if (n < static_cast<ssize_t>(sizeof reply.head)) throw Failed(name() + " hung up");
    std::memcpy(&reply.head, packet.data(), sizeof reply.head);
    reply.records.assign(packet.begin() + sizeof reply.head, packet.begin() + n);
    return reply;
  }

  int fd_;
  pid_t pid_;
  migr_msg hello_{};
  std::vector<migr::TextRange> ranges_;
  std::uint32_t seq_ = 0;
  std::uint16_t asked_ = 0;
};

void nap_ms(unsigned ms) {
  const timespec t{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
  nanosleep(&t, nullptr);
}

struct Listener {
  explicit Listener(const std::string& path) : path_(path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) throw Failed(path + ": too long for a socket");
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    unlink(path.c_str());
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) || listen(fd, 16))
      throw Failed(path + ": " + std::strerror(errno));
  }
  ~Listener() {
    close(fd);
    unlink(path_.c_str());
  }
  std::unique_ptr<Process> accept_one(int limit_ms) const {
    pollfd p{fd, POLLIN, 0};
    if (poll(&p, 1, limit_ms) != 1) return nullptr;
    const int connection = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC);
    ucred who{};
    socklen_t len = sizeof who;
    if (connection < 0 || getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &len)) return nullptr;
    return std::make_unique<Process>(connection, who.pid);
  }
  int fd;

 private:
  std::string path_;
};

std::string first_line(const std::string& path) {
  std::ifstream f(path);
  std::string line;
  std::getline(f, line);
  return line;
}

/// Of the device's first port. @param index -1: the first RoCE v2 one with an IPv4 address
std::array<std::uint8_t, 16> gid_of(const std::string& device, int index) {
  const std::string port = "/sys/class/infiniband/" + device + "/ports/1/";
  for (int i = index < 0 ? 0 : index; i < (index < 0 ? 64 : index + 1); ++i) {
    const std::string text = first_line(port + "gids/" + std::to_string(i));
    if (text.empty()) continue;
    if (index < 0 && (text.compare(20, 9, "0000:ffff") && text.compare(20, 5, "ffff:"))) continue;
    if (index < 0 && first_line(port + "gid_attrs/types/" + std::to_string(i)) != "RoCE v2") continue;
    std::array<std::uint8_t, 16> gid{};
    std::size_t n = 0;
    for (std::size_t at = 0; at + 4 <= text.size() && n < gid.size(); at += 5, n += 2) {
      const auto word = std::stoul(text.substr(at, 4), nullptr, 16);
      gid[n] = static_cast<std::uint8_t>(word >> 8);
      gid[n + 1] = static_cast<std::uint8_t>(word);
    }
    return gid;
  }
  throw Failed("no usable GID on " + device);
}

/// Physical QPN -> the QPN it is connected to, of RC QPs that are ready to send on `device`.
std::map<std::uint32_t, std::uint32_t> connections(const std::string& device) {
  std::unique_ptr<FILE, int (*)(FILE*)> rdma(popen("rdma -j res show qp", "r"), pclose);
  if (!rdma) throw Failed("cannot run the rdma tool");
  std::string text;
  char part[4096];
  while (std::size_t n = std::fread(part, 1, sizeof part, rdma.get())) text.append(part, n);
  std::map<std::uint32_t, std::uint32_t> out;
  const auto all = nlohmann::json::parse(text, nullptr, false);
  if (!all.is_array()) return out;
  for (const auto& qp : all)
    if (qp.value("ifname", "") == device && qp.value("state", "") == "RTS" && qp.contains("rqpn"))
      out[qp["lqpn"].get<std::uint32_t>()] = qp["rqpn"].get<std::uint32_t>();
  return out;
}

class Switchover {
 public:
  Switchover(Process& a, Process& b, std::array<std::uint8_t, 16> gid) : sides_{&a, &b}, gid_(gid) {}

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
  void run(Step back_after) {
    using Fn = void (Switchover::*)();
    constexpr std::array<Fn, kNoStep> kSteps = {&Switchover::create, &Switchover::connect, &Switchover::suspend,
                                                &Switchover::scan,   &Switchover::drain,   &Switchover::switch_paths,
                                                &Switchover::resume};
    for (int step = kCreate; step != kNoStep; ++step) {
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
    both(MIGR_MSG_DRAIN, kDrainLimitMs);
    drain_ms = ms_since(start);
  }
  void switch_paths() { both(MIGR_MSG_SWITCH); }
  void resume() {
    replayed_sends = 0;
    for (Process* p : sides_) p->send(MIGR_MSG_RESUME, p->refs());
    for (Process* p : sides_)
      for (const migr_resume_stat& s : p->answer().as<migr_resume_stat>()) replayed_sends += s.replayed_sends;
    suspended_ms = ms_since(suspended_at_);
  }
  void roll_back() {
    for (Process* p : sides_) p->send(MIGR_MSG_ROLLBACK);
    for (Process* p : sides_) p->answer();
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
  Clock::time_point suspended_at_ = Clock::now();
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
        Switchover candidate(*all[i], *all[j], gid);
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
      at = o.rollback_each ? static_cast<Step>(back % kResume)
                           : static_cast<Step>(o.rollback_at == kNoStep ? kSwitch : o.rollback_at);
    try {
      job->run(at);
    } catch (const Failed& e) {
      throw Failed("switchover " + std::to_string(i + 1) + " of " + std::to_string(o.count) + ", " + e.what());
    }
    at == kNoStep ? ++went : ++back;
    replayed += job->replayed_sends;
    sum += job->suspended_ms;
    worst = std::max(worst, job->suspended_ms);
    std::printf("%u: %s%s suspended %.1f ms (scan %.1f, drain %.1f), %u sends replayed\n", i + 1,
                at == kNoStep ? "switched" : "rolled back at ", at == kNoStep ? "" : kStepNames[at], job->suspended_ms,
                job->scan_ms, job->drain_ms, job->replayed_sends);
    std::fflush(stdout);
    nap_ms(o.interval_ms);
  }
  std::printf("{\"switched\": %u, \"rolled_back\": %u, \"connections\": %zu, \"replayed_sends\": %u, "
              "\"suspended_ms_mean\": %.1f, \"suspended_ms_max\": %.1f}\n",
              went, back, pairs, replayed, sum / std::max(1u, o.count), worst);
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
