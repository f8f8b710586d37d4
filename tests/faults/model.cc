// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrd starts and talks to on a modelled host, as one program under several names:
//   HOST/process ARG..   a process with libmigr and one QP: speaks proc_wire.h, shows its state in HOST/kernel/PID
//   HOST/runc ..         runc with migr's verbs; partial-restore plays CRIU's plugin (restore_control.h), too
//   HOST/net VERB ..     the network hook; HOST/net-state/ID says how it is
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <thread>
#include <utility>

#include "migr/proc_wire.h"
#include "migr/restore_control.h"
#include "model.h"

extern "C" char __executable_start[], etext[];

namespace {

namespace fs = std::filesystem;
using model::State;
using Args = std::vector<std::string>;

std::string host;

void pause_ms(int ms) { usleep(static_cast<useconds_t>(ms) * 1000); }

std::uint32_t fresh_qpn() {
  std::uint32_t r = 0;
  std::ifstream("/dev/urandom", std::ios::binary).read(reinterpret_cast<char*>(&r), sizeof r);
  return (model::number_of(host) << 20 | (r & 0xfffff)) + 1;
}

std::string kernel_file(int pid) { return host + "/kernel/" + std::to_string(pid); }

// ---- a process

struct Process {
  State s;
  std::uint32_t old_pqpn = 0, old_dest = 0, old_gid = 0;  // the path before SWITCH
  std::uint32_t spare_dest = 0, spare_gid = 0;
  std::uint32_t dest_vkey = 0;
  std::string peer;  // instance, as QP_CONNECT had it
  std::atomic<unsigned> inside = 0, came_in = 0;  // threads; ever
  bool rebound = false;
  bool drained = false, cut = false, settled = false;  // since SUSPEND
  bool tracked = false;
  std::uint64_t changes = 1;  // of its record

  // What a path's responder would have executed next: both ends can say of both.
  static std::uint32_t psn_of(std::uint32_t pqpn) { return pqpn & 0xffffff; }
  bool at_rest() const { return drained || (cut && settled); }

  // A thread that has looked before the flags were up is about to post. It takes longer where the process has moved: it is not enough
  // that its partner's was waited for.
  void post_late() {
    const int ms = 30 + 60 * static_cast<int>(s.generation);
    const unsigned last = came_in;
    std::thread([this, ms] { inside++, came_in++, pause_ms(ms), inside--; }).detach();
    while (came_in == last) pause_ms(1);
  }
  void expect_outside(std::uint32_t type) const {
    if (inside) std::ofstream(host + "/thread-inside") << "at message " << type << '\n';
  }

  void show() const { s.write(kernel_file(s.pid)); }
  void take_path(std::uint32_t pqpn, std::uint32_t dest, std::uint32_t gid) { s.pqpn = pqpn, s.dest_pqpn = dest, s.dest_gid = gid; }

  // @return errno; what is answered goes to `out`
  int serve(const migr_msg& m, const std::vector<char>& in, std::vector<char>& out, migr_msg& reply) {
    auto record = [&]<class T>(T r) { out.assign(reinterpret_cast<char*>(&r), reinterpret_cast<char*>(&r) + sizeof r), reply.record_size = sizeof r, reply.count = 1; };
    switch (m.type) {
      case MIGR_MSG_DESCRIBE:
        if (!m.arg && is_at("changes", "record")) changes++;
        reply.arg = changes;
        return 0;
      case MIGR_MSG_QP_CREATE:
        s.spare = fresh_qpn();
        record(migr_qp_spare{s.ctx, s.vqpn, s.spare, 1});
        return 0;
      case MIGR_MSG_QP_CONNECT: {
        migr_qp_connect c;
        if (in.size() < sizeof c || !s.spare) return EINVAL;
        std::memcpy(&c, in.data(), sizeof c);
        spare_dest = c.dest_qpn, spare_gid = c.dgid[15];
        peer.assign(reinterpret_cast<const char*>(c.peer), sizeof c.peer);
        return 0;
      }
      case MIGR_MSG_SUSPEND:
        s.phase = MIGR_PROC_SUSPENDED;
        drained = cut = settled = false;
        post_late();
        return 0;
      case MIGR_MSG_DRAIN:
        if (s.phase != MIGR_PROC_SUSPENDED) return EBUSY;
        expect_outside(m.type);
        drained = !is_at("drain", "late");
        return drained ? 0 : ETIMEDOUT;
      case MIGR_MSG_STATS:
        record(migr_drain_stat{s.ctx, s.vqpn, s.phase == MIGR_PROC_SUSPENDED && !drained, 0, 0, 0});
        return 0;
      case MIGR_MSG_CUT:
        if (s.phase != MIGR_PROC_SUSPENDED || cut) return EBUSY;
        if (m.arg & MIGR_CUT_CHECK) return 0;
        cut = true;
        record(migr_qp_psn{s.ctx, s.vqpn, psn_of(s.pqpn), 0});
        return 0;
      case MIGR_MSG_SETTLE: {
        migr_qp_psn there;
        if (!cut || settled || in.size() != sizeof there) return EBUSY;
        std::memcpy(&there, in.data(), sizeof there);
        if (there.vqpn != s.vqpn || there.psn != psn_of(s.dest_pqpn)) return EINVAL;
        settled = true;
        record(migr_replay_stat{s.ctx, s.vqpn, 1, 0, 0, 0});
        return 0;
      }
      case MIGR_MSG_FREEZE:
        if (!at_rest()) return EBUSY;
        s.phase = MIGR_PROC_FROZEN;
        return 0;
      case MIGR_MSG_SWITCH:
        if (!s.spare || s.phase != MIGR_PROC_SUSPENDED || !at_rest()) return EBUSY;
        old_pqpn = s.pqpn, old_dest = s.dest_pqpn, old_gid = s.dest_gid;
        take_path(s.spare, spare_dest, spare_gid);
        s.spare = 0;
        return 0;
      case MIGR_MSG_REBIND: {
        if (!rebound) {
          if (s.phase != MIGR_PROC_FROZEN) return EBUSY;
          migr_handle_map h;
          for (std::size_t at = 0; at + sizeof h <= in.size(); at += sizeof h) {
            std::memcpy(&h, in.data() + at, sizeof h);
            if (h.vqpn == s.vqpn) s.pqpn = h.pqpn, s.ctx = h.ctx_id;
          }
          s.generation++;
          s.key = fresh_qpn();
          s.phase = MIGR_PROC_SUSPENDED;
          rebound = true;
        }
        record(migr_key_map{s.vqpn, s.key, {}});
        return 0;
      }
      case MIGR_MSG_KEYS: {
        if (!old_pqpn) return EBUSY;
        migr_key_map k;
        for (std::size_t at = 0; at + sizeof k <= in.size(); at += sizeof k) {
          std::memcpy(&k, in.data() + at, sizeof k);
          if (k.vrkey == dest_vkey && !std::memcmp(k.owner, peer.data(), sizeof k.owner)) s.dest_key = k.prkey;
        }
        return 0;
      }
      case MIGR_MSG_RESUME:
        if (s.phase == MIGR_PROC_FROZEN) return EBUSY;
        old_pqpn = 0;
        s.phase = MIGR_PROC_RUNNING;
        drained = cut = settled = tracked = false;
        return 0;
      case MIGR_MSG_OLD_PATH:
        if (old_pqpn) take_path(old_pqpn, old_dest, old_gid), old_pqpn = 0;
        return 0;
      case MIGR_MSG_ROLLBACK:
        if (rebound && s.phase != MIGR_PROC_RUNNING) return EBUSY;
        if (!old_pqpn && s.phase != MIGR_PROC_RUNNING && !other_end_stands()) std::ofstream(host + "/sent-astray") << s.dest_pqpn << '\n';
        if (old_pqpn) take_path(old_pqpn, old_dest, old_gid), old_pqpn = 0;
        s.spare = 0;
        s.phase = MIGR_PROC_RUNNING;
        drained = cut = settled = tracked = false;
        return 0;
      case MIGR_MSG_MOVES: return 0;
      case MIGR_MSG_TRACK:
        if (m.arg == MIGR_TRACK_TAKE) return std::exchange(tracked, false) ? 0 : ESTALE;
        if (m.arg == MIGR_TRACK_QUEUES && !tracked) return EBUSY;
        if (m.arg == MIGR_TRACK_QUEUES)
          expect_outside(m.type);
        else
          post_late();
        tracked = true;
        return 0;
      default: return EOPNOTSUPP;
    }
  }

  // What is sent now gets to the other end: the path that leads there is its path.
  bool other_end_stands() const {
    for (const auto& h : fs::directory_iterator(fs::path(host).parent_path()))
      for (const auto& p : model::processes(h.path()))
        if (p.pqpn == s.dest_pqpn) return true;
    return false;
  }

  // HOST/FILE names a message: the first who gets there.
  static bool is_at(const char* file, const std::string& what) {
    const std::string path = host + "/" + file;
    std::string at;
    return std::ifstream(path) >> at && at == what && !unlink(path.c_str());
  }
  // Ends instead; also at HELLO of one that was restored.
  static void dies_at(const std::string& what) {
    if (is_at("dies", what)) _exit(0);
  }
  static std::string name_of(std::uint32_t type) {
    return type == MIGR_MSG_SUSPEND ? "SUSPEND" : type == MIGR_MSG_DRAIN ? "DRAIN" : type == MIGR_MSG_FREEZE ? "FREEZE" : type == MIGR_MSG_REBIND ? "REBIND" : type == MIGR_MSG_KEYS ? "KEYS" : type == MIGR_MSG_RESUME ? "RESUME" : "other";
  }

  bool hello(int fd) const {
    struct {
      migr_msg head{};
      migr_text_range code{};
    } hello;
    migr_msg& h = hello.head;
    h.version = MIGR_PROC_VERSION;
    h.type = MIGR_MSG_HELLO;
    h.count = 1;
    h.record_size = sizeof hello.code;
    hello.code.start = reinterpret_cast<std::uint64_t>(__executable_start);
    hello.code.bytes = static_cast<std::uint64_t>(etext - __executable_start);
    for (int i = 0; i < 16; i++) h.instance[i] = static_cast<std::uint8_t>(std::stoi(s.instance.substr(2 * static_cast<std::size_t>(i), 2), nullptr, 16));
    h.control_tid = static_cast<std::int32_t>(syscall(SYS_gettid));
    h.state = s.phase;
    h.generation = s.generation;
    return send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello;
  }

  int run() {
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, (host + "/run/proc.sock").c_str());
    const std::string gate = host + "/run/" + MIGR_PROC_GATE_PREFIX + s.instance;
    std::vector<char> buf(1 << 17);
    for (;;) {
      while (s.phase == MIGR_PROC_FROZEN && access(gate.c_str(), F_OK)) pause_ms(5);
      if (s.phase == MIGR_PROC_FROZEN) dies_at("HELLO");
      const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || !hello(fd)) {
        close(fd);
        pause_ms(50);
        continue;
      }
      for (;;) {
        const ssize_t n = recv(fd, buf.data(), buf.size(), 0);
        if (n < static_cast<ssize_t>(sizeof(migr_msg))) break;
        migr_msg m;
        std::memcpy(&m, buf.data(), sizeof m);
        migr_msg reply = m;
        reply.type |= MIGR_REPLY;
        reply.flags = reply.count = reply.record_size = 0;
        std::vector<char> out;
        dies_at(name_of(m.type));
        if (is_at("leaves", name_of(m.type))) break;  // and connects again
        reply.status = serve(m, {buf.begin() + sizeof m, buf.begin() + n}, out, reply);
        if (reply.status) std::snprintf(reply.text, sizeof reply.text, "model: not in phase %u", s.phase);
        show();
        std::vector<char> packet(sizeof reply + out.size());
        std::memcpy(packet.data(), &reply, sizeof reply);
        if (!out.empty()) std::memcpy(packet.data() + sizeof reply, out.data(), out.size());
        send(fd, packet.data(), packet.size(), MSG_NOSIGNAL);
        if (m.type == MIGR_MSG_FREEZE && !reply.status) {
          rebound = false;
          break;
        }
      }
      close(fd);
      pause_ms(5);
    }
  }
};

// HOST/process VQPN INSTANCE PQPN DEST_GID DEST_PQPN [PHASE GENERATION KEY DEST_KEY]
int process(const Args& a) {
  Process p;
  p.s.pid = getpid();
  p.s.gid = model::number_of(host);
  p.s.ctx = 100 + p.s.gid;
  auto number = [&](std::size_t i) { return a.size() > i ? static_cast<std::uint32_t>(std::stoul(a[i])) : 0; };
  p.s.vqpn = number(0);
  p.s.instance = a[1];
  p.s.pqpn = number(2), p.s.dest_gid = number(3), p.s.dest_pqpn = number(4), p.s.phase = number(5), p.s.generation = number(6);
  p.s.key = a.size() > 7 ? number(7) : p.s.pqpn;
  p.s.dest_key = a.size() > 8 ? number(8) : p.s.dest_pqpn;
  p.dest_vkey = p.s.dest_pqpn;
  p.show();
  return p.run();
}

// ---- runc

struct Container {
  std::string dir;
  int pid = 0;
  std::string bundle;
  bool read() { return bool(std::ifstream(dir + "/pid") >> pid >> bundle); }
  void write() const { std::ofstream(dir + "/pid") << pid << ' ' << bundle << '\n'; }
  bool paused() const { return !access((dir + "/paused").c_str(), F_OK); }
};

int complain(const std::string& text) {
  std::cerr << text << "\n";
  return 1;
}

void state_json(const Container& c) {
  std::ofstream(c.dir + "/state.json") << "{\"init_process_pid\": " << c.pid << ", \"init_process_start\": " << c.pid << "}\n";
}

// Memory, ahead of the stop.
int pre_dump(const Container& c, const std::string& to) {
  if (!model::alive(c.pid)) return complain("nothing to dump");
  fs::create_directories(to);
  return std::ofstream(to + "/memory") << "of " << c.pid << "\n", 0;
}

int checkpoint(const Container& c, const std::string& images, const std::string& parent) {
  std::cout << "ready" << std::endl;
  std::string line;
  if (!std::getline(std::cin, line)) return complain("nobody said when to begin");
  std::ofstream(c.dir + "/paused") << "\n";
  kill(c.pid, SIGSTOP);
  State s;
  if (!s.read(kernel_file(c.pid)) || s.phase != MIGR_PROC_FROZEN) return complain("the process is not frozen: its connection is open");
  fs::copy_file(kernel_file(c.pid), images + "/dump");
  if (parent.empty()) return 0;
  if (access((images + "/" + parent + "/memory").c_str(), R_OK)) return complain("no pre-dump in " + parent);
  std::ofstream(images + "/parent") << parent << "\n";
  return 0;
}

// CRIU and its plugin: everything is made, then the images come, then the task waits for its commit.
class Restore {
 public:
  Restore(Container c, const std::string& images) : c_(std::move(c)), images_(images) {}
  int run() {
    struct sigaction sa{};
    sa.sa_handler = [](int) { ended = true; };  // without SA_RESTART
    sigaction(SIGTERM, &sa, nullptr);
    if (!early_.read(images_ + "/migr.img")) return complain("no migr.img");
    pqpn_ = fresh_qpn();
    if (!listen_on(images_ + "/restore.sock")) return complain("no socket");
    const bool good = serve(10'000, MIGR_RC_GO) && restore() && serve(limit("MIGR_RESTORE_COMMIT_LIMIT", 3), MIGR_RC_COMMIT);
    unlink((images_ + "/restore.sock").c_str());
    if (!good) {
      if (task_ > 0) kill(task_, SIGKILL), waitpid(task_, nullptr, 0), unlink(kernel_file(task_).c_str());
      fs::remove_all(c_.dir);
      return complain("the restore was aborted");
    }
    // The task goes on its own from here.
    const char go = 'g';
    if (write(to_task_, &go, 1) != 1) return complain("the task is gone");
    return 0;
  }

 private:
  static volatile bool ended;
  static int limit(const char* name, int seconds) {
    const char* v = getenv(name);
    return 1000 * (v ? std::atoi(v) : seconds);
  }
  bool listen_on(const std::string& path) {
    listen_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, path.c_str());
    return !bind(listen_, reinterpret_cast<sockaddr*>(&a), sizeof a) && !listen(listen_, 8);
  }
  template <class T>
  void reply(int fd, const migr_rc_msg& m, int status, const std::vector<T>& records) {
    migr_rc_msg h{};
    h.version = MIGR_RC_VERSION;
    h.op = m.op | MIGR_RC_REPLY;
    h.status = status;
    h.count = static_cast<std::uint32_t>(records.size());
    h.record_size = records.empty() ? 0 : sizeof(T);
    std::vector<char> packet(sizeof h + records.size() * sizeof(T));
    std::memcpy(packet.data(), &h, sizeof h);
    if (!records.empty()) std::memcpy(packet.data() + sizeof h, records.data(), records.size() * sizeof(T));
    send(fd, packet.data(), packet.size(), MSG_NOSIGNAL);
  }
  // @return `until` was asked for; false: aborted, or the limit is over
  bool serve(int limit_ms, int until) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    bool asked = false;
    while (!asked && !ended && std::chrono::steady_clock::now() < end) {
      pollfd p{listen_, POLLIN, 0};
      if (poll(&p, 1, 50) <= 0) continue;
      const int fd = accept4(listen_, nullptr, nullptr, SOCK_CLOEXEC);
      std::vector<char> buf(1 << 16);
      const ssize_t n = recv(fd, buf.data(), buf.size(), 0);
      migr_rc_msg m{};
      if (n < static_cast<ssize_t>(sizeof m)) {
        close(fd);
        continue;
      }
      std::memcpy(&m, buf.data(), sizeof m);
      const std::vector<migr_rc_connect> none;
      bool abort = false;
      if (m.op == MIGR_RC_PREPARE) {
        migr_rc_qp q{early_.ctx, early_.vqpn, early_.pqpn, pqpn_, 1, 1, {}};
        std::memcpy(q.sgid, model::gid_of(model::number_of(host)).data(), sizeof q.sgid);
        reply(fd, m, 0, std::vector{q});
      } else if (m.op == MIGR_RC_CONNECT) {
        if (m.count) std::memcpy(&to_, buf.data() + sizeof m, sizeof to_);
        reply(fd, m, 0, none);
      } else if (m.op == MIGR_RC_READY && until == MIGR_RC_COMMIT) {
        const migr_rc_object o{early_.ctx, 100 + model::number_of(host), 5, 4, 1, 1, early_.vqpn, pqpn_};
        reply(fd, m, 0, std::vector{o});
      } else if (m.op == MIGR_RC_ABORT) {
        reply(fd, m, 0, none);
        abort = true;
      } else if (m.op == until) {
        if (until != MIGR_RC_COMMIT || access((host + "/quiet").c_str(), F_OK)) reply(fd, m, 0, none);
        asked = true;
      } else {
        reply(fd, m, EBUSY, none);
      }
      close(fd);
      if (abort) return false;
    }
    return asked && !ended;
  }
  bool restore() {
    State s;
    if (!s.read(images_ + "/dump")) return false;
    std::string parent;
    if (std::ifstream(images_ + "/parent") >> parent && access((images_ + "/" + parent + "/memory").c_str(), R_OK)) return false;
    int pipe[2];
    if (pipe2(pipe, O_CLOEXEC)) return false;
    to_task_ = pipe[1];
    task_ = fork();
    if (!task_) {
      setsid();
      signal(SIGTERM, SIG_DFL);
      for (const int fd : {0, 1, 2}) dup2(open("/dev/null", O_RDWR), fd);
      char c;
      close(pipe[1]);
      if (read(pipe[0], &c, 1) != 1) _exit(1);
      const Args a = {std::to_string(s.vqpn), s.instance, std::to_string(pqpn_), std::to_string(to_.dgid[15]), std::to_string(to_.dest_qpn),
                      std::to_string(MIGR_PROC_FROZEN), std::to_string(s.generation), std::to_string(s.key), std::to_string(s.dest_key)};
      std::vector<char*> argv = {const_cast<char*>("process")};
      std::string path = host + "/process";
      argv[0] = path.data();
      for (const auto& x : a) argv.push_back(const_cast<char*>(x.c_str()));
      argv.push_back(nullptr);
      execv(path.c_str(), argv.data());
      _exit(1);
    }
    close(pipe[0]);
    // What was made for it is the kernel's to tell of, long before it runs.
    s.pid = task_, s.gid = model::number_of(host), s.ctx = 100 + s.gid, s.pqpn = pqpn_, s.dest_pqpn = to_.dest_qpn, s.dest_gid = to_.dgid[15];
    s.write(kernel_file(task_));
    fs::create_directories(c_.dir);
    c_.pid = task_;
    c_.write();
    state_json(c_);  // runc does so before the tasks run
    return true;
  }

  Container c_;
  const std::string images_;
  State early_;
  std::uint32_t pqpn_ = 0;
  migr_rc_connect to_{};
  int listen_ = -1, to_task_ = -1, task_ = 0;
};
volatile bool Restore::ended = false;

// HOST/runc [--root ROOT] VERB [OPTION..] [ID]
int runc(Args a) {
  std::string root = host + "/runc-state", images, bundle, parent;
  auto option = [&](const std::string& name, std::string& value) {
    for (std::size_t i = 0; i + 1 < a.size(); i++)
      if (a[i] == name) {
        value = a[i + 1];
        a.erase(a.begin() + static_cast<long>(i), a.begin() + static_cast<long>(i) + 2);
        return;
      }
  };
  std::string ignored;
  option("--root", root), option("--image-path", images), option("--bundle", bundle), option("--work-path", ignored), option("--parent-path", parent), option("--criu-log-level", ignored);
  auto flag = [&](const std::string& name) { return std::find(a.begin(), a.end(), name) != a.end(); };
  if (flag("--help")) return std::cout << a[0] << " --criu-log-level\n", 0;
  const std::string verb = a.at(0), id = a.back();
  Container c{root + "/" + id, 0, bundle};
  if (verb == "partial-restore") return Restore(c, images).run();
  if (!c.read()) return complain("container \"" + id + "\" does not exist");
  if (verb == "state") {
    const char* status = !model::alive(c.pid) ? "stopped" : c.paused() ? "paused" : "running";
    std::cout << "{\"status\": \"" << status << "\", \"bundle\": \"" << c.bundle << "\", \"pid\": " << c.pid << "}\n";
    return 0;
  }
  if (verb == "checkpoint-rdma" && flag("--descriptors")) return std::ofstream(images + "/descriptors.json") << "{}\n", 0;
  if (verb == "checkpoint-rdma" && flag("--pre-dump")) return pre_dump(c, images);
  if (verb == "checkpoint-rdma") return checkpoint(c, images, parent);
  if (verb == "resume") {
    if (!c.paused()) return complain("container not paused");
    unlink((c.dir + "/paused").c_str());
    kill(c.pid, SIGCONT);
    return 0;
  }
  if (verb == "delete") {
    kill(c.pid, SIGKILL);
    for (int i = 0; i < 100 && model::alive(c.pid); i++) pause_ms(10);
    unlink(kernel_file(c.pid).c_str());
    fs::remove_all(c.dir);
    return 0;
  }
  return complain("unknown verb " + verb);
}

// HOST/net VERB [--closed] BUNDLE ID
int net(Args a) {
  constexpr std::string_view kAwait = "await-";
  if (a[0].starts_with(kAwait)) {
    std::string line;
    std::cout << "ready" << std::endl;
    if (!std::getline(std::cin, line) || line != "begin") return 0;
    a[0].erase(0, kAwait.size());
    if (a[0] == "attach") a.insert(a.begin() + 1, "--closed");
  }
  const std::string file = host + "/net-state/" + a.back();
  const bool made = !access(file.c_str(), F_OK);
  std::string now = a[0] == "prepare" || a[0] == "detach" ? "down" : a.size() > 3 ? "closed" : "open";
  if (made && (a[0] == "cleanup" || a[0] == "detach") && !access((host + "/stays-attached").c_str(), F_OK)) return complain("it stays attached");
  if (a[0] == "cleanup") return unlink(file.c_str()), 0;
  if (!made && a[0] == "detach") return 0;
  if (!made && a[0] == "open") return complain("no network");
  if (now == "open" && !access((host + "/stays-closed").c_str(), F_OK)) return complain("it stays closed");
  std::ofstream(file) << now << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string self = argv[0];
  const auto slash = self.rfind('/');
  host = self.substr(0, slash);
  const std::string name = self.substr(slash + 1);
  const Args a(argv + 1, argv + argc);
  if (name == "process" && a.size() >= 5) return process(a);
  if (name == "runc" && !a.empty()) return runc(a);
  if (name == "net" && a.size() >= 3) return net(a);
  return complain("model: called as " + self);
}
