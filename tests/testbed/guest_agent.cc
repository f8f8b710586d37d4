// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Pid 1 of a testbed guest (or, where the guest has systemd, a service): runs the set-up script, then commands that arrive as
// frames (frame.h) over the virtio-serial port "migr.ctl", and reaps orphans.
//
//   guest-agent SETUP    run from tmpfs
//
// One thread, one poll loop. Every command is a session and process group of its
// own; what a command left running in the background lives on after its exit.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "frame.h"

namespace {

constexpr char kPortName[] = "migr.ctl";
constexpr size_t kPortWriteMax = 32768;       // the driver takes no more at once
constexpr size_t kPortQueueMax = 512 * 1024;  // stop reading commands' output above this
constexpr int kTermGraceMs = 3000;            // between TERM and KILL of an abandoned command

[[noreturn]] void die(const char* what) {
  fprintf(stderr, "guest-agent: %s: %s\n", what, strerror(errno));
  sync();
  reboot(RB_POWER_OFF);
  _exit(1);
}

int64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

void close_fd(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

struct Command {
  pid_t pid = -1;  // also its process group
  int in = -1, out = -1, err = -1;
  std::string in_queue;
  bool in_eof = false;
  uint32_t credit = FRAME_CREDIT;  // bytes of output the client still takes
  bool exited = false;
  uint32_t status = 0;
  bool abandoned = false;  // the client is gone, nothing is sent any more
  int64_t kill_at = 0;     // ms, 0: never
};

class Agent {
 public:
  Agent(int port, int signals, pid_t setup) : port_(port), signals_(signals), setup_(setup) {}
  [[noreturn]] void run();

 private:
  void send(uint32_t channel, uint32_t type, const void* data, uint32_t length);
  void send_u32(uint32_t channel, uint32_t type, uint32_t value) { send(channel, type, &value, 4); }
  void read_port();
  void write_port();
  void handle(const frame_header& h, const char* payload);
  void open(uint32_t channel, const char* payload, uint32_t length);
  void abandon(Command& c);
  void feed_stdin(uint32_t channel, Command& c);
  void drain_output(uint32_t channel, Command& c);
  bool read_output(uint32_t channel, Command& c, int& fd, uint32_t type);
  void reap();
  bool finish(uint32_t channel, Command& c);

  int port_, signals_;
  pid_t setup_;
  std::string rx_, tx_;
  std::map<uint32_t, Command> commands_;
};

void Agent::send(uint32_t channel, uint32_t type, const void* data, uint32_t length) {
  frame_header h{channel, type, length};
  tx_.append(reinterpret_cast<const char*>(&h), sizeof h);
  tx_.append(static_cast<const char*>(data), length);
}

void Agent::write_port() {
  size_t done = 0;
  while (done < tx_.size()) {
    ssize_t n = write(port_, tx_.data() + done, std::min(tx_.size() - done, kPortWriteMax));
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  tx_.erase(0, done);
}

void Agent::read_port() {
  char buf[65536];
  ssize_t n = read(port_, buf, sizeof buf);
  if (n == 0) {  // the supervisor is gone, and with it the reason to run
    errno = EPIPE;
    die("control port");
  }
  if (n < 0) return;
  rx_.append(buf, static_cast<size_t>(n));
  size_t at = 0;
  while (rx_.size() - at >= sizeof(frame_header)) {
    frame_header h;
    memcpy(&h, rx_.data() + at, sizeof h);
    if (h.length > FRAME_PAYLOAD_MAX) {
      errno = EPROTO;
      die("control port");
    }
    if (rx_.size() - at - sizeof h < h.length) break;
    handle(h, rx_.data() + at + sizeof h);
    at += sizeof h + h.length;
  }
  rx_.erase(0, at);
}

void Agent::handle(const frame_header& h, const char* payload) {
  if (h.type == FRAME_OPEN) return open(h.channel, payload, h.length);
  auto it = commands_.find(h.channel);
  if (it == commands_.end()) return;  // it has exited, the frame crossed EXIT
  Command& c = it->second;
  uint32_t value = 0;
  if (h.length >= 4) memcpy(&value, payload, 4);
  switch (h.type) {
    case FRAME_STDIN:
      if (h.length == 0) c.in_eof = true;
      c.in_queue.append(payload, h.length);
      feed_stdin(h.channel, c);
      break;
    case FRAME_KILL:
      if (!c.exited) kill(-c.pid, static_cast<int>(value));
      break;
    case FRAME_CREDIT_MORE:
      c.credit += value;
      break;
    case FRAME_CLOSE:
      abandon(c);
      break;
  }
}

void Agent::abandon(Command& c) {
  c.abandoned = true;
  close_fd(c.in);
  close_fd(c.out);
  close_fd(c.err);
  if (c.exited) return;
  kill(-c.pid, SIGTERM);
  kill(-c.pid, SIGCONT);
  c.kill_at = now_ms() + kTermGraceMs;
}

void Agent::open(uint32_t channel, const char* payload, uint32_t length) {
  std::vector<std::string> words;
  for (size_t at = 0; at < length;) {
    words.emplace_back(payload + at, strnlen(payload + at, length - at));
    at += words.back().size() + 1;
  }
  size_t first_arg = 1;
  while (first_arg < words.size() && !words[first_arg].empty()) first_arg++;
  first_arg++;
  auto refuse = [&](uint32_t status, const std::string& why) {
    std::string p(reinterpret_cast<const char*>(&status), 4);
    p += why;
    send(channel, FRAME_EXIT, p.data(), static_cast<uint32_t>(p.size()));
  };
  if (words.size() <= first_arg || commands_.count(channel)) return refuse(125, "malformed request");

  int in[2], out[2], err[2], failed[2];
  if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || pipe2(failed, O_CLOEXEC))
    return refuse(125, std::string("pipe: ") + strerror(errno));
  pid_t pid = fork();
  if (pid == 0) {
    setsid();
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    dup2(in[0], 0);
    dup2(out[1], 1);
    dup2(err[1], 2);
    std::vector<char*> argv;
    for (size_t i = 1; i + 1 < first_arg; i++) putenv(words[i].data());
    for (size_t i = first_arg; i < words.size(); i++) argv.push_back(words[i].data());
    argv.push_back(nullptr);
    int e = 0;
    if (chdir(words[0].c_str()))
      e = errno | 0x10000;
    else {
      execvp(argv[0], argv.data());
      e = errno;
    }
    if (write(failed[1], &e, sizeof e) < 0) _exit(126);
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  close(err[1]);
  close(failed[1]);
  int e = 0;
  bool started = pid > 0 && read(failed[0], &e, sizeof e) == 0;  // closed by a successful exec
  close(failed[0]);
  if (!started) {
    if (pid < 0) e = errno;
    close(in[1]);
    close(out[0]);
    close(err[0]);
    if (pid > 0) waitpid(pid, nullptr, 0);
    const char* why = strerror(e & 0xffff);
    if (e & 0x10000) return refuse(125, "folder " + words[0] + ": " + why);
    return refuse(e == ENOENT ? 127 : 126, words[first_arg] + ": " + why);
  }
  Command c;
  c.pid = pid;
  c.in = in[1];
  c.out = out[0];
  c.err = err[0];
  set_nonblocking(c.in);
  set_nonblocking(c.out);
  set_nonblocking(c.err);
  commands_[channel] = c;
}

void Agent::feed_stdin(uint32_t channel, Command& c) {
  size_t done = 0;
  while (c.in >= 0 && done < c.in_queue.size()) {
    ssize_t n = write(c.in, c.in_queue.data() + done, c.in_queue.size() - done);
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) close_fd(c.in);  // it does not want more: swallow the rest
    else done += static_cast<size_t>(n);
  }
  if (c.in < 0) done = c.in_queue.size();
  c.in_queue.erase(0, done);
  if (done) send_u32(channel, FRAME_CREDIT_MORE, static_cast<uint32_t>(done));
  if (c.in_eof && c.in_queue.empty()) close_fd(c.in);
}

// Returns true if something was read, and closes fd at end of file.
bool Agent::read_output(uint32_t channel, Command& c, int& fd, uint32_t type) {
  if (fd < 0 || c.credit == 0 || tx_.size() > kPortQueueMax) return false;
  char buf[32768];
  ssize_t n = read(fd, buf, std::min<size_t>(sizeof buf, c.credit));
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (n <= 0) {
    close_fd(fd);
    return false;
  }
  c.credit -= static_cast<uint32_t>(n);
  send(channel, type, buf, static_cast<uint32_t>(n));
  return true;
}

void Agent::drain_output(uint32_t channel, Command& c) {
  read_output(channel, c, c.out, FRAME_STDOUT);
  read_output(channel, c, c.err, FRAME_STDERR);
}

// After the exit: sends what its pipes still hold, not what a process it left
// behind may write later. Returns true when the channel is done with.
bool Agent::finish(uint32_t channel, Command& c) {
  if (c.abandoned && c.kill_at) return false;
  if (!c.abandoned) {
    while (read_output(channel, c, c.out, FRAME_STDOUT)) {}
    while (read_output(channel, c, c.err, FRAME_STDERR)) {}
    bool may_hold_more = (c.out >= 0 || c.err >= 0) && (c.credit == 0 || tx_.size() > kPortQueueMax);
    if (may_hold_more) return false;
    send_u32(channel, FRAME_EXIT, c.status);
  }
  close_fd(c.in);
  close_fd(c.out);
  close_fd(c.err);
  return true;
}

void Agent::reap() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) > 0) {}
  int status;
  pid_t pid;
  while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
    uint32_t code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (pid == setup_) {
      setup_ = -1;
      send_u32(0, FRAME_READY, code);
    }
    for (auto& [channel, c] : commands_)
      if (c.pid == pid) {
        c.exited = true;
        c.status = code;
      }
  }
}

void Agent::run() {
  for (;;) {
    std::vector<pollfd> fds;
    fds.push_back({port_, static_cast<short>(POLLIN | (tx_.empty() ? 0 : POLLOUT)), 0});
    fds.push_back({signals_, POLLIN, 0});
    int wait = -1;
    int64_t now = now_ms();
    for (auto& [channel, c] : commands_) {
      if (c.credit && tx_.size() <= kPortQueueMax) {
        if (c.out >= 0) fds.push_back({c.out, POLLIN, 0});
        if (c.err >= 0) fds.push_back({c.err, POLLIN, 0});
      }
      if (c.in >= 0 && !c.in_queue.empty()) fds.push_back({c.in, POLLOUT, 0});
      if (c.kill_at) {
        int left = static_cast<int>(std::max<int64_t>(c.kill_at - now, 0));
        wait = wait < 0 ? left : std::min(wait, left);
      }
    }
    if (poll(fds.data(), fds.size(), wait) < 0 && errno != EINTR) die("poll");
    if (fds[0].revents & POLLIN) read_port();
    else if (fds[0].revents & (POLLHUP | POLLERR)) {
      errno = EPIPE;
      die("control port");
    }
    if (fds[1].revents) reap();
    now = now_ms();
    for (auto it = commands_.begin(); it != commands_.end();) {
      auto& [channel, c] = *it;
      if (!c.in_queue.empty()) feed_stdin(channel, c);
      if (c.kill_at && now >= c.kill_at) {
        kill(-c.pid, SIGKILL);  // also what outlived the group's leader
        c.kill_at = 0;
      }
      if (!c.abandoned) drain_output(channel, c);
      it = c.exited && finish(channel, c) ? commands_.erase(it) : std::next(it);
    }
    write_port();
  }
}

// Without udev the port is found by its name in sysfs.
int open_port() {
  for (int tries = 0; tries < 500; tries++, usleep(20000)) {
    DIR* d = opendir("/sys/class/virtio-ports");
    if (!d) continue;
    while (dirent* e = readdir(d)) {
      std::string base = e->d_name, name(64, '\0');
      if (base[0] == '.') continue;
      FILE* f = fopen(("/sys/class/virtio-ports/" + base + "/name").c_str(), "re");
      if (!f) continue;
      name.resize(fread(name.data(), 1, name.size(), f));
      fclose(f);
      if (name.rfind(kPortName, 0) != 0) continue;
      int fd = open(("/dev/" + base).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
      if (fd < 0) continue;
      closedir(d);
      return fd;
    }
    closedir(d);
  }
  errno = ENODEV;
  die(kPortName);
}

// As the machine's, which all guests share: their RTCs know whole seconds only. A file over there has its time.
void set_clock() {
  constexpr char kFile[] = "/mnt/out/.clock";
  const int fd = open(kFile, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  struct stat st;
  if (fd < 0 || fstat(fd, &st) || clock_settime(CLOCK_REALTIME, &st.st_mtim)) perror("guest-agent: the clock cannot be set");
  if (fd >= 0) close(fd);
  unlink(kFile);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: guest-agent SETUP (in a testbed guest)\n");
    return 2;
  }
  rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
  setrlimit(RLIMIT_MEMLOCK, &unlimited);
  setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
  setenv("HOME", "/root", 1);
  setenv("LANG", "C.UTF-8", 1);
  setenv("TERM", "dumb", 1);
  signal(SIGPIPE, SIG_IGN);
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGCHLD);
  sigprocmask(SIG_BLOCK, &mask, nullptr);
  int signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
  if (signals < 0) die("signalfd");
  int port = open_port();
  set_clock();

  pid_t setup = fork();
  if (setup == 0) {
    setsid();
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    execl("/run/testbed/bin/sh", "sh", argv[1], static_cast<char*>(nullptr));
    _exit(127);
  }
  Agent(port, signals, setup).run();
}
