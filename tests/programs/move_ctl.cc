// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A live migration within one host, without migrd and without runc: dumps one of two connected processes with CRIU and
// the plugin, restores it with other RDMA objects, and moves its partner, in the order of docs/protocol.md. It shows
// REBIND and the plugin's restore under traffic. The moved process keeps its pid, so the original has to be dead.
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "migr/restore.h"
#include "migr/restore_control.h"
#include "proc_side.h"

namespace {

using namespace proc_side;

constexpr char kHelp[] =
    R"(move_ctl: moves a process through CRIU to other RDMA objects, on this host, while its partner goes on

  move_ctl [options]
  --socket PATH    where to listen (environment MIGR_PROC_SOCKET, else /run/migr/proc.sock)
  --device NAME    RDMA device (rxe0)
  --plugin DIR     where migr_plugin.so is
  --work DIR       for images and logs, one folder per move (/tmp/move_ctl)
  --move COMM      name of the program to be moved, if the two have different ones; else the second that came
  --count N        moves of it, one after another (1)
  --interval MS    between them (500)
  --wait S         for two processes with connected QPs (30)

Status: 0 all went well, 1 a step failed, 2 bad command line, 3 no two connected processes in time.
)";

struct Options {
  std::string socket, device = "rxe0", plugin, work = "/tmp/move_ctl", move;
  unsigned count = 1, interval_ms = 500, wait_s = 30;
};

/// What the waiting restore is asked (include/migr/restore_control.h).
class Restore {
 public:
  explicit Restore(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) throw Failed(path + ": too long for a socket");
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    for (;;) {
      fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return;
      close(fd_);
      if (Clock::now() > deadline) throw Failed("the restore does not listen on " + path);
      nap_ms(20);
    }
  }
  ~Restore() { close(fd_); }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  template <class Out = migr_rc_qp, class In = migr_rc_connect>
  std::vector<Out> ask(migr_rc_op op, const std::vector<In>& records = {}) {
    if (records.size() > 1024) throw Failed("too many QPs for this test program");
    migr_rc_msg head{};
    head.version = MIGR_RC_VERSION;
    head.op = op;
    head.count = static_cast<std::uint32_t>(records.size());
    head.record_size = records.empty() ? 0 : sizeof(In);
    std::string packet(reinterpret_cast<const char*>(&head), sizeof head);
    packet.append(reinterpret_cast<const char*>(records.data()), records.size() * sizeof(In));
    if (send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) < 0) throw Failed("the restore is gone");
    std::vector<Out> out;
    do {
      pollfd p{fd_, POLLIN, 0};
      if (poll(&p, 1, 60'000) != 1) throw Failed("the restore does not answer");
      std::vector<char> answer(1 << 19);
      const ssize_t n = recv(fd_, answer.data(), answer.size(), 0);
      if (n < static_cast<ssize_t>(sizeof head)) throw Failed("the restore has ended: see its log");
      std::memcpy(&head, answer.data(), sizeof head);
      if (head.status) throw Failed("restore: " + std::string(head.text) + " (" + std::strerror(head.status) + ")");
      for (std::size_t at = sizeof head; at + sizeof(Out) <= static_cast<std::size_t>(n); at += sizeof(Out)) {
        Out one;
        std::memcpy(&one, answer.data() + at, sizeof one);
        out.push_back(one);
      }
    } while (head.flags & MIGR_RC_MORE);
    return out;
  }

 private:
  int fd_ = -1;
};

struct Clocked {
  const char* name;
  double ms;
};

class Move {
 public:
  Move(const Options& o, const Listener& listener, Process& moved, Process& partner, std::string folder)
      : o_(o), listener_(listener), moved_(moved), partner_(partner), folder_(std::move(folder)) {}

  void run() {
    step("record", [&] { record(); });
    step("partial-restore", [&] { partial_restore(); });
    step("connect", [&] { connect(); });
    const auto suspended = Clock::now();
    step("suspend", [&] { both(MIGR_MSG_SUSPEND); });
    step("scan", [&] { scan(); });
    step("drain", [&] { both(MIGR_MSG_DRAIN, kDrainLimitMs); });
    step("freeze", [&] { moved_.ask(MIGR_MSG_FREEZE); });
    step("dump", [&] { run_criu({"dump", "-t", std::to_string(moved_.pid())}, "dump.log"); });
    step("full-restore", [&] {
      restore_->ask(MIGR_RC_GO);
      objects_ = restore_->ask<migr_rc_object>(MIGR_RC_READY);
    });
    step("switch", [&] { partner_.ask(MIGR_MSG_SWITCH, partner_.refs()); });
    step("commit", [&] { commit(); });
    step("rebind", [&] { rebind(); });
    step("resume", [&] { resume(); });
    blackout_ms = std::chrono::duration<double, std::milli>(Clock::now() - suspended).count();
  }

  std::vector<Clocked> phases;
  double blackout_ms = 0;
  unsigned replayed = 0;

 private:
  template <class Fn>
  void step(const char* name, Fn&& fn) {
    const auto start = Clock::now();
    try {
      fn();
    } catch (const Failed& e) {
      throw Failed(std::string(name) + ": " + e.what());
    }
    phases.push_back({name, std::chrono::duration<double, std::milli>(Clock::now() - start).count()});
  }

  static void check(int ret, const migr_rst_err& err) {
    if (ret) throw Failed(err.text);
  }

  void record() {
    const auto descs = moved_.ask(MIGR_MSG_DESCRIBE).as<migr_fd_desc>();
    migr_rst_err err{};
    migr_rst* session = nullptr;
    check(migr_rst_open(&session, &err), err);
    migr_rst_process* p = nullptr;
    const int ret = migr_rst_dump(session, static_cast<std::uint32_t>(moved_.pid()), &p, &err);
    migr_rst_close(session);
    check(ret, err);
    p->ns_pid = p->pid;
    if (migr_rst_process_describe(p, descs.data(), static_cast<std::uint32_t>(descs.size()), moved_.hello().instance))
      throw Failed("no memory");
    check(migr_rst_process_check(p, &err), err);
    migr_rst_image* image = migr_rst_image_new();
    if (!image || migr_rst_image_add(image, p)) throw Failed("no memory");
    std::filesystem::create_directories(folder_);
    const int dir = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int written = migr_rst_write(image, dir, &err);
    close(dir);
    migr_rst_image_free(image);
    check(written, err);
  }

  pid_t start_criu(std::vector<std::string> what, const std::string& log) {
    what.insert(what.begin(), "criu");
    for (const std::string& w : {std::string("-D"), folder_, std::string("-o"), log, std::string("-v4"),
                                 std::string("--tcp-established"), std::string("--shell-job"),
                                 std::string("--manage-cgroups=ignore")})
      what.push_back(w);
    const pid_t pid = fork();
    if (pid == 0) {
      std::vector<char*> argv;
      for (std::string& w : what) argv.push_back(w.data());
      argv.push_back(nullptr);
      setenv("CRIU_LIBS_DIR", o_.plugin.c_str(), 1);
      setenv("MIGR_RESTORE_SOCKET", (folder_ + "/restore.sock").c_str(), 1);
      unsetenv("LD_PRELOAD");
      execvp("criu", argv.data());
      _exit(127);
    }
    return pid;
  }
  void run_criu(std::vector<std::string> what, const std::string& log) {
    const pid_t pid = start_criu(std::move(what), log);
    int status = 0;
    waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) throw Failed("criu failed: see " + folder_ + "/" + log);
  }

  void partial_restore() {
    restorer_ = start_criu({"restore", "-d"}, "restore.log");
    restore_.emplace(folder_ + "/restore.sock");
    for (const migr_rc_qp& q : restore_->ask(MIGR_RC_PREPARE)) there_.push_back(q);
    for (const migr_qp_spare& s : partner_.ask(MIGR_MSG_QP_CREATE, partner_.refs()).as<migr_qp_spare>())
      qp_of(partner_, s.vqpn).spare = s;
  }

  static Qp& qp_of(Process& p, std::uint32_t vqpn) {
    for (Qp& q : p.qps)
      if (q.vqpn == vqpn) return q;
    throw Failed(p.name() + " has no QP " + std::to_string(vqpn));
  }
  const migr_rc_qp& there(std::uint32_t vqpn) const {
    for (const migr_rc_qp& q : there_)
      if (q.vqpn == vqpn) return q;
    throw Failed("the restore has not built QP " + std::to_string(vqpn));
  }

  void connect() {
    std::vector<migr_qp_connect> to_new;
    std::vector<migr_rc_connect> to_spare;
    for (const Qp& q : partner_.qps) {
      if (!q.peer_vqpn) continue;
      const migr_rc_qp& far = there(q.peer_vqpn);
      migr_qp_connect c{};
      c.ctx_id = q.ctx_id;
      c.vqpn = q.vqpn;
      c.dest_qpn = far.pqpn;
      c.dest_psn = far.psn;
      std::memcpy(c.dgid, far.sgid, sizeof c.dgid);
      std::memcpy(c.peer, moved_.hello().instance, sizeof c.peer);
      to_new.push_back(c);
      migr_rc_connect r{};
      r.src_ctx_id = far.src_ctx_id;
      r.vqpn = far.vqpn;
      r.dest_qpn = q.spare.pqpn;
      r.dest_psn = q.spare.psn;
      std::memcpy(r.dgid, far.sgid, sizeof r.dgid);  // one host: the same GID
      to_spare.push_back(r);
    }
    partner_.ask(MIGR_MSG_QP_CONNECT, to_new);
    restore_->ask(MIGR_RC_CONNECT, to_spare);
  }

  void both(std::uint16_t type, std::uint64_t arg = 0) {
    moved_.send(type, moved_.refs(), arg);
    partner_.send(type, partner_.refs(), arg);
    moved_.answer();
    partner_.answer();
  }
  void scan() {
    for (const Process* p : {&moved_, &partner_}) {
      const auto seen = migr::wait_until_outside(p->pid(), p->ranges(), p->hello().control_tid, Clock::now() + kScanLimit);
      if (!seen) throw Failed(seen.error().text);
    }
  }

  void commit() {
    const std::string gate = gate_of(listener_, moved_);
    std::ofstream(gate) << "";
    restore_->ask(MIGR_RC_COMMIT);
    const auto again = listener_.accept_one(kAnswerLimitMs);
    unlink(gate.c_str());
    if (!again) throw Failed("the restored process does not connect");
    if (std::memcmp(again->hello().instance, moved_.hello().instance, 16) || again->hello().state != MIGR_PROC_FROZEN)
      throw Failed("another process has connected, or it is not frozen");
    moved_.take_over(*again);
    int status = 0;
    waitpid(restorer_, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) throw Failed("criu restore failed: see " + folder_ + "/restore.log");
  }

  void rebind() {
    std::vector<migr_handle_map> maps;
    for (const migr_rc_object& o : objects_) {
      migr_handle_map m{};
      m.ctx_id = o.ctx_id;
      m.context_fd = o.context_fd;
      m.obj_type = o.obj_type;
      m.old_handle = o.old_handle;
      m.new_handle = o.new_handle;
      m.vqpn = o.vqpn;
      m.pqpn = o.pqpn;
      maps.push_back(m);
    }
    keys_ = moved_.ask(MIGR_MSG_REBIND, maps).as<migr_key_map>();
    for (Qp& q : moved_.qps)
      for (const migr_rc_object& o : objects_)
        if (o.obj_type == MIGR_OBJ_QP && o.vqpn == q.vqpn) {
          q.ctx_id = o.ctx_id;
          q.pqpn = o.pqpn;
        }
  }

  void resume() {
    partner_.ask(MIGR_MSG_KEYS, keys_);
    for (Process* p : {&moved_, &partner_})
      for (const migr_resume_stat& s : p->ask(MIGR_MSG_RESUME, p->refs()).as<migr_resume_stat>())
        replayed += s.replayed_sends;
    for (Qp& q : partner_.qps)
      if (q.peer_vqpn) q.pqpn = q.spare.pqpn;
  }

  const Options& o_;
  const Listener& listener_;
  Process& moved_;
  Process& partner_;
  std::string folder_;
  std::optional<Restore> restore_;
  pid_t restorer_ = 0;
  std::vector<migr_rc_qp> there_;
  std::vector<migr_rc_object> objects_;
  std::vector<migr_key_map> keys_;
};

/// @return pairs of QPs of a and b that are connected to each other; noted in them
std::size_t pair_up(Process& a, Process& b, const std::string& device) {
  const auto to = connections(device);
  for (Process* p : {&a, &b}) {
    p->qps.clear();
    for (const migr_drain_stat& s : p->ask(MIGR_MSG_STATS).as<migr_drain_stat>())
      p->qps.push_back({s.ctx_id, s.vqpn, s.vqpn});
  }
  std::size_t pairs = 0;
  for (Qp& x : a.qps)
    for (Qp& y : b.qps) {
      const auto from_x = to.find(x.pqpn), from_y = to.find(y.pqpn);
      if (from_x == to.end() || from_y == to.end() || from_x->second != y.pqpn || from_y->second != x.pqpn) continue;
      x.peer_vqpn = y.vqpn;
      y.peer_vqpn = x.vqpn;
      ++pairs;
    }
  return pairs;
}

Options parse(int argc, char** argv) {
  Options o;
  const char* socket = std::getenv("MIGR_PROC_SOCKET");
  o.socket = socket ? socket : MIGR_PROC_SOCKET;
  const option known[] = {{"socket", 1, nullptr, 's'}, {"device", 1, nullptr, 'd'}, {"plugin", 1, nullptr, 'p'},
                          {"work", 1, nullptr, 'w'},   {"move", 1, nullptr, 'm'},   {"count", 1, nullptr, 'c'},
                          {"interval", 1, nullptr, 'i'}, {"wait", 1, nullptr, 't'}, {"help", 0, nullptr, 'h'},
                          {nullptr, 0, nullptr, 0}};
  const auto number = [](const char* text) { return static_cast<unsigned>(std::strtoul(text, nullptr, 10)); };
  int c;
  while ((c = getopt_long(argc, argv, "", known, nullptr)) != -1) switch (c) {
      case 's': o.socket = optarg; break;
      case 'd': o.device = optarg; break;
      case 'p': o.plugin = std::filesystem::absolute(optarg); break;
      case 'w': o.work = optarg; break;
      case 'm': o.move = optarg; break;
      case 'c': o.count = number(optarg); break;
      case 'i': o.interval_ms = number(optarg); break;
      case 't': o.wait_s = number(optarg); break;
      default:
        std::fputs(kHelp, c == 'h' ? stdout : stderr);
        std::exit(c == 'h' ? 0 : 2);
    }
  if (o.plugin.empty() || !o.count) {
    std::fputs(kHelp, stderr);
    std::exit(2);
  }
  return o;
}

int run(const Options& o) {
  const Listener listener(o.socket);
  std::vector<std::unique_ptr<Process>> all;
  const auto deadline = Clock::now() + std::chrono::seconds(o.wait_s);
  std::size_t pairs = 0, before = 1;
  while (Clock::now() < deadline && (!pairs || pairs != before)) {
    if (auto p = listener.accept_one(200)) all.push_back(std::move(p));
    before = pairs;
    if (all.size() == 2) pairs = pair_up(*all[0], *all[1], o.device);
  }
  if (!pairs) {
    std::fprintf(stderr, "move_ctl: no two connected processes within %u s\n", o.wait_s);
    return 3;
  }
  std::size_t moved = 1;
  if (!o.move.empty() && first_line("/proc/" + std::to_string(all[0]->pid()) + "/comm") == o.move) moved = 0;
  if (!o.move.empty() && first_line("/proc/" + std::to_string(all[1]->pid()) + "/comm") == o.move) moved = 1;
  std::printf("%zu connections; process %d is moved, %d is its partner\n", pairs, all[moved]->pid(),
              all[1 - moved]->pid());
  std::fflush(stdout);
  nap_ms(o.interval_ms);
  for (unsigned i = 0; i < o.count; ++i) {
    Move move(o, listener, *all[moved], *all[1 - moved], o.work + "/" + std::to_string(i + 1));
    move.run();
    std::printf("%u: moved, suspended %.0f ms, %u sends replayed;", i + 1, move.blackout_ms, move.replayed);
    for (const Clocked& c : move.phases) std::printf(" %s %.0f", c.name, c.ms);
    std::printf("\n");
    std::fflush(stdout);
    nap_ms(o.interval_ms);
  }
  std::printf("{\"moved\": %u, \"connections\": %zu}\n", o.count, pairs);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  try {
    return run(o);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "move_ctl: %s\n", e.what());
    return 1;
  }
}
