// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Traffic for bench/failover: a client that is told over stdin what to do, and notes when each work request completed;
// a server that notes when each came, so that what was executed before a cut is known without asking libmigr.
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "verify/fabric.h"
#include "verify/report.h"

namespace verify {
namespace {

constexpr const char kHelp[] =
    R"(failover_traffic: one RC connection, timed; the program behind bench/failover

  failover_traffic --dev NAME [--port N] [--log FILE]           serves one client, then ends
  failover_traffic --dev NAME [--port N] [--log FILE] SERVER    does what it reads, a line each:

  connect QPS SIZE DEPTH          more connections; what follows goes over the first of them
  latency OP SIZE COUNT           one work request at a time
  throughput OP SIZE BATCH MS     lists of BATCH work requests, the next one when all of it have completed
  stream OP SIZE BATCH            the same until the next line, with a line of JSON when the first list is done, too;
                                  "EPOCH_US COMPLETED POSTED" goes to the client's --log, "EPOCH_US ARRIVED 0" to
                                  the server's
  memory                          resident bytes of this process

  OP: write send cas (SIZE 8); SIZE: 16.. bytes, for which BATCH has to fit into 2 x DEPTH of the connection's SIZE
  --port: TCP (18526)

Each is answered by one line of JSON. The end of stdin ends both. Status: 0, 1 a work request failed or was executed
twice, 2 bad command line, 3 cannot set up.
)";

constexpr double kLimit = 60;             // seconds without any progress
constexpr std::uint64_t kLimitNs = static_cast<std::uint64_t>(kLimit * 1e9);
constexpr int kNapUs = 200, kLookEvery = 256;
constexpr std::uint32_t kMaxBatch = 512;

struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Verb : std::uint32_t { kWrite, kSend, kCas };

struct Job {
  Verb op;
  std::uint32_t size, batch, noted;
  std::uint64_t first;  // work requests that the connection has seen before
};

struct Note {
  std::int64_t us;
  std::uint64_t done, posted;
};

std::uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(t.tv_nsec);
}

template <class T>
std::string bytes_of(const T& x) {
  return {reinterpret_cast<const char*>(&x), sizeof x};
}
template <class T>
T from_bytes(const std::string& s) {
  T x;
  if (s.size() != sizeof x) throw PeerError("the other end is a failover_traffic of another version");
  std::memcpy(&x, s.data(), sizeof x);
  return x;
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

/// statm does not count the queues that the device shares with us.
std::uint64_t resident_bytes() {
  std::ifstream f("/proc/self/smaps_rollup");
  for (std::string word; f >> word;)
    if (std::uint64_t kb = 0; word == "Rss:" && f >> kb) return kb * 1024;
  throw SetupError("cannot read /proc/self/smaps_rollup");
}

void write_notes(const std::string& file, const std::vector<Note>& notes) {
  std::string out;
  for (const Note& n : notes) out += std::to_string(n.us) + " " + std::to_string(n.done) + " " + std::to_string(n.posted) + "\n";
  if (!file.empty() && !write_file(file, out)) throw SetupError("cannot write " + file + ": " + std::strerror(errno));
}

/// One end's side of the newest connection, and the older ones, which only take up room.
class End {
 public:
  explicit End(const Options& o) : options_(o) {}

  void connect(const Shape& shape, Control& control) {
    all_.push_back(std::make_unique<Fabric>(options_, shape));
    control.send(Msg::kConnect, f().address());
    f().connect(control.expect(Msg::kConnect, kLimit));
  }
  Fabric& f() {
    if (all_.empty()) throw UsageError("connect first");
    return *all_.back();
  }

 protected:
  /// The last 8 bytes of the n-th message's place tell that all of it is there.
  static volatile std::uint64_t* tail(const Memory& m, const Job& j, std::uint64_t n) {
    return reinterpret_cast<volatile std::uint64_t*>(m.data() + (n % j.batch + 1) * j.size - sizeof(std::uint64_t));
  }

  const Options& options_;
  std::vector<std::unique_ptr<Fabric>> all_;
};

/* ---- the server ------------------------------------------------------------------- */

class Server : End {
 public:
  Server(const Options& o, Control& control, std::string log) : End(o), control_(control), log_(std::move(log)) {}

  void run() {
    for (;;) {
      const Message m = *next();
      if (m.type == Msg::kDone) return;
      if (m.type == Msg::kHello) {
        connect(from_bytes<Shape>(m.body), control_);
        for (std::uint32_t i = 0; i < f().recv_slots; ++i) post_receive();
        control_.send(Msg::kReady);
      } else if (m.type == Msg::kAccept) {
        serve(from_bytes<Job>(m.body));
      } else {
        throw PeerError("the client said what was not due");
      }
    }
  }

 private:
  std::optional<Message> next() {
    for (;;) {
      if (auto m = control_.poll()) return m;
      pollfd p{control_.fd(), POLLIN, 0};
      ::poll(&p, 1, 100);
    }
  }

  /// All into the same place: nobody reads it.
  void post_receive() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(f().recv.data()), static_cast<std::uint32_t>(f().ring_bytes()), f().recv_mr[0]->lkey};
    ibv_recv_wr wr{.wr_id = 0, .next = nullptr, .sg_list = &sge, .num_sge = 1}, *bad = nullptr;
    if (const int e = ibv_post_recv(f().qps[0].get(), &wr, &bad)) throw RunError(std::string("ibv_post_recv: ") + std::strerror(e));
  }

  std::uint64_t take_messages() {
    ibv_wc wc[16];
    const int n = ibv_poll_cq(f().recv_cq(0), 16, wc);
    if (n < 0) throw RunError("ibv_poll_cq failed");
    for (int i = 0; i < n; ++i) {
      if (wc[i].status != IBV_WC_SUCCESS) throw RunError(std::string("a receive failed: ") + ibv_wc_status_str(wc[i].status));
      post_receive();
    }
    return static_cast<std::uint64_t>(n);
  }

  /// @return how many WRITEs or CMP_SWPs have come, or 0 if it is still n. A place may have been written to again meanwhile.
  std::uint64_t came_after(const Job& j, std::uint64_t n) {
    const std::uint64_t at = *tail(f().target, j, n);
    return at > n ? at : 0;
  }

  void serve(const Job& j) {
    if (std::uint64_t{j.batch} * j.size > f().ring_bytes()) throw PeerError("the client asks for more than the connection has room for");
    if (j.op == Verb::kCas) std::memset(f().target.data(), 0, std::size_t{j.batch} * j.size);
    control_.send(Msg::kReady);
    std::vector<Note> notes;
    const bool watched = j.op == Verb::kSend || j.noted;
    std::uint64_t n = j.first, told_ns = 0;
    std::optional<std::uint64_t> end;  // once the client has told
    while (!end || (watched && n < *end)) {
      if (const auto m = end ? std::nullopt : watched ? control_.poll() : next()) {
        if (m->type != Msg::kStop) throw PeerError("the client said what was not due");
        end = from_bytes<std::uint64_t>(m->body);
        told_ns = now_ns();
      }
      const std::uint64_t before = n;
      if (j.op == Verb::kSend)
        while (const std::uint64_t more = take_messages()) n += more;
      else if (watched)
        while (const std::uint64_t more = came_after(j, n)) n = more;
      if (n != before && j.noted) notes.push_back({now_us(), n - j.first, 0});
      if (n == before && end && now_ns() > told_ns + kLimitNs)
        throw RunError(std::to_string(*end - n) + " work requests of " + std::to_string(*end - j.first) + " completed at the client and never came");
      if (n == before && watched) ::usleep(kNapUs);
    }
    if (watched && n != *end) throw RunError(std::to_string(n - *end) + " messages came twice");
    if (j.noted) write_notes(log_, notes);
    control_.send(Msg::kFin);
  }

  Control& control_;
  const std::string log_;
};

/* ---- the client ------------------------------------------------------------------- */

class Client : End {
 public:
  Client(const Options& o, Control& control, std::string log) : End(o), control_(control), log_(std::move(log)) {}

  std::string obey(const std::string& line) {
    std::istringstream in(line);
    std::string what, op;
    std::uint32_t a = 0, b = 0, c = 0;
    in >> what;
    if (what == "memory") return Json().field("rss_bytes", resident_bytes()).text();
    if (what == "connect" && in >> a >> b >> c) return connect_all(a, b, c);
    if (what == "latency" && in >> op >> a >> b) return latency(job(op, a, 1, false), b);
    if (what == "throughput" && in >> op >> a >> b >> c)
      return stream(job(op, a, b, false), [until = now_ns() + c * 1'000'000ull] { return now_ns() >= until; });
    if (what == "stream" && in >> op >> a >> b)
      return stream(job(op, a, b, true), [] {
        pollfd p{0, POLLIN, 0};
        return ::poll(&p, 1, 0) > 0;
      });
    throw UsageError("'" + line + "' is no command (see failover_traffic --help)");
  }
  void end() { control_.send(Msg::kDone); }

 private:
  std::string connect_all(std::uint32_t qps, std::uint32_t size, std::uint32_t depth) {
    Shape s;
    s.qps = qps;
    s.size = size;
    s.depth = depth;
    if (qps < 1 || qps > kMaxQps || size < kHeaderBytes || size > 1 << 20 || depth < 4 || depth > kMaxBatch) throw UsageError("connect: out of range");
    control_.send(Msg::kHello, bytes_of(s));
    connect(s, control_);
    control_.expect(Msg::kReady, kLimit);
    seen_ = 0;
    return Json().field("qps", std::uint64_t{qps}).text();
  }

  Job job(const std::string& op, std::uint32_t size, std::uint32_t batch, bool noted) {
    Job j{Verb::kWrite, size, batch, noted, seen_};
    if (op == "send") j.op = Verb::kSend;
    else if (op == "cas") j.op = Verb::kCas;
    else if (op != "write") throw UsageError("'" + op + "' is none of write, send, cas");
    if (j.op == Verb::kCas ? size != 8 : size < 16 || size % 8) throw UsageError("SIZE " + std::to_string(size) + ": of cas 8, else a multiple of 8 from 16 on");
    if (batch < 1 || batch > f().shape.depth || std::uint64_t{batch} * size > f().ring_bytes())
      throw UsageError("BATCH " + std::to_string(batch) + " of " + std::to_string(size) + " bytes: more than the connection has room for");
    control_.send(Msg::kAccept, bytes_of(j));
    control_.expect(Msg::kReady, kLimit);
    return j;
  }

  /// A CMP_SWP has a word of the list to itself, so that no other one is in flight to that.
  static std::uint64_t found_by(const Job& j, std::uint64_t n) { return n < j.first + j.batch ? 0 : n + 1 - j.batch; }

  void post(const Job& j) {
    ibv_send_wr wr[kMaxBatch], *bad = nullptr;
    ibv_sge sge[kMaxBatch];
    for (std::uint32_t i = 0; i < j.batch; ++i) {
      const std::uint64_t n = seen_ + i, place = n % j.batch * j.size;
      if (j.op == Verb::kWrite) *tail(f().local, j, n) = n + 1;
      sge[i] = {reinterpret_cast<std::uintptr_t>(f().local.data() + place), j.size, f().local_mr[0]->lkey};
      wr[i] = {};
      wr[i].wr_id = n;
      wr[i].sg_list = &sge[i];
      wr[i].num_sge = 1;
      wr[i].send_flags = IBV_SEND_SIGNALED;
      wr[i].next = i + 1 < j.batch ? &wr[i + 1] : nullptr;
      if (j.op == Verb::kSend) {
        wr[i].opcode = IBV_WR_SEND;
      } else if (j.op == Verb::kWrite) {
        wr[i].opcode = IBV_WR_RDMA_WRITE;
        wr[i].wr.rdma.remote_addr = f().partner.target + place;
        wr[i].wr.rdma.rkey = f().partner_qps[0].target_rkey;
      } else {
        wr[i].opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
        wr[i].wr.atomic.remote_addr = f().partner.target + place;
        wr[i].wr.atomic.rkey = f().partner_qps[0].target_rkey;
        wr[i].wr.atomic.compare_add = found_by(j, n);
        wr[i].wr.atomic.swap = n + 1;
      }
    }
    if (const int e = ibv_post_send(f().qps[0].get(), wr, &bad)) throw RunError(std::string("ibv_post_send: ") + std::strerror(e));
    seen_ += j.batch;
  }

  std::uint64_t take(const Job& j) {
    ibv_wc wc[16];
    const int n = ibv_poll_cq(f().send_cq(0), 16, wc);
    if (n < 0) throw RunError("ibv_poll_cq failed");
    for (int i = 0; i < n; ++i) {
      if (wc[i].status != IBV_WC_SUCCESS) throw RunError("work request " + std::to_string(wc[i].wr_id) + ": " + ibv_wc_status_str(wc[i].status));
      if (wc[i].wr_id != j.first + done_) throw RunError("work request " + std::to_string(wc[i].wr_id) + " completed when " + std::to_string(j.first + done_) + " was due");
      ++done_;
    }
    return static_cast<std::uint64_t>(n);
  }

  /// Waits for all that was posted. @param each called whenever some have completed
  template <class Each>
  void finish_batch(const Job& j, Each&& each) {
    std::uint64_t since = now_ns();
    for (unsigned idle = 0; j.first + done_ < seen_;) {
      if (take(j)) {
        each();
        since = now_ns();
      } else {
        sched_yield();
        if (++idle % kLookEvery == 0 && now_ns() > since + kLimitNs)
          throw RunError("no completion for " + std::to_string(static_cast<int>(kLimit)) + " s; " + std::to_string(seen_ - j.first - done_) + " are missing");
      }
    }
    if (j.op != Verb::kCas) return;
    for (std::uint64_t n = seen_ - j.batch; n < seen_; ++n) {
      std::uint64_t was;
      std::memcpy(&was, f().local.data() + n % j.batch * j.size, sizeof was);
      if (was != found_by(j, n))
        throw RunError("a CMP_SWP found " + std::to_string(was) + ", want " + std::to_string(found_by(j, n)) + ": one was lost or executed twice");
    }
  }

  void stop() {
    control_.send(Msg::kStop, bytes_of(seen_));
    control_.expect(Msg::kFin, 2 * kLimit);
  }

  std::string latency(const Job& j, std::uint32_t count) {
    done_ = 0;
    std::vector<std::uint64_t> ns;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t t = now_ns();
      post(j);
      finish_batch(j, [] {});
      ns.push_back(now_ns() - t);
    }
    stop();
    std::sort(ns.begin(), ns.end());
    if (ns.empty()) throw UsageError("latency: COUNT 0");
    const auto us = [&](std::size_t at) { return static_cast<double>(ns[std::min(at, ns.size() - 1)]) / 1000; };
    return Json().field("min_us", us(0)).field("p10_us", us(ns.size() / 10)).field("median_us", us(ns.size() / 2)).text();
  }

  std::string stream(const Job& j, const std::function<bool()>& over) {
    done_ = 0;
    std::vector<Note> notes;
    const std::uint64_t start = now_ns();
    do {
      post(j);
      if (!j.noted) {
        finish_batch(j, [] {});
        continue;
      }
      notes.push_back({now_us(), done_, seen_ - j.first});
      finish_batch(j, [&] { notes.push_back({now_us(), done_, seen_ - j.first}); });
      if (seen_ - j.first == j.batch) say(Json().field("first_batch_us", (now_ns() - start) / 1000).text());
    } while (!over());
    const std::uint64_t ns = now_ns() - start;
    stop();
    if (j.noted) write_notes(log_, notes);
    return Json().field("completed", done_).field("us", ns / 1000).field("mbps", static_cast<double>(done_ * j.size) * 8e3 / static_cast<double>(ns)).text();
  }

  Control& control_;
  const std::string log_;
  std::uint64_t done_ = 0;  // of the job
  std::uint64_t seen_ = 0;  // posted, of the connection
};

int run_client(const Options& o, const std::string& log) {
  Control control = Control::connect(o.server, "", o.port, o.connect);
  Client client(o, control, log);
  char* line = nullptr;
  std::size_t room = 0;
  for (ssize_t n; (n = getline(&line, &room, stdin)) >= 0;) {
    while (n && line[n - 1] == '\n') line[--n] = 0;
    if (!n) continue;  // the end of a stream
    say(client.obey(line));
  }
  std::free(line);
  client.end();
  return kExitOk;
}

int run(int argc, char** argv) {
  Options o;
  o.port = 18526;
  o.target_atomics = true;
  std::string log;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const auto value = [&] {
      if (i + 1 == argc) throw UsageError(a + ": its value is missing");
      return std::string(argv[++i]);
    };
    if (a == "--help" || a == "-h") return std::fputs(kHelp, stdout), kExitOk;
    if (a == "--dev") o.dev = value();
    else if (a == "--port") o.port = std::atoi(value().c_str());
    else if (a == "--log") log = value();
    else if (a[0] == '-' || !o.server.empty()) throw UsageError(a + ": unknown option");
    else o.server = a;
  }
  std::setvbuf(stdin, nullptr, _IONBF, 0);  // poll() tells of all that was not read
  if (!o.server.empty()) return run_client(o, log);
  Control control = Control::serve("", o.port, o.connect);
  try {
    Server(o, control, log).run();
  } catch (const RunError& e) {
    control.send(Msg::kAbort, e.what());
    throw;
  }
  return kExitOk;
}

}  // namespace
}  // namespace verify

int main(int argc, char** argv) {
  const auto fail = [](const char* what, int status) { return std::fprintf(stderr, "failover_traffic: %s\n", what), status; };
  try {
    return verify::run(argc, argv);
  } catch (const verify::UsageError& e) {
    return fail(e.what(), verify::kExitUsage);
  } catch (const verify::SetupError& e) {
    return fail(e.what(), verify::kExitSetup);
  } catch (const std::exception& e) {
    return fail(e.what(), verify::kExitFaults);
  }
}
