// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The Ethernet switch of a test bed: one process for all of its networks.
//
//   vswitch DATA.sock CONTROL.sock PORT...     PORT: NETWORK:HOST
//
// QEMU's `-netdev stream` connects to DATA-NETWORK-HOST.sock, one socket per
// port, and sends frames with a 32-bit big-endian length in front. Ports of one
// NETWORK form one switch that learns addresses; networks never meet. No port is
// ever a real interface, so no privilege is needed.
//
// CONTROL takes one line per connection and answers one line, "ok" or "error: why":
//   set NETWORK:HOST in|out|both [up|down] [loss=PERCENT] [delay=MS]
//   stats        a JSON array, one object per port
// "in" is what arrives at the host, "out" what it sends.
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kFrameMax = 4096 + 65536;     // QEMU's own limit
constexpr size_t kQueueMax = 4 * 1024 * 1024;  // bytes waiting for one port; more is dropped
constexpr size_t kLengthBytes = 4;
constexpr int kBatch = 64;  // frames per writev

using Mac = uint64_t;

uint64_t now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000u + static_cast<uint64_t>(t.tv_nsec) / 1000u;
}

[[noreturn]] void die(const std::string& what) {
  fprintf(stderr, "vswitch: %s: %s\n", what.c_str(), strerror(errno));
  exit(1);
}

int listen_at(const std::string& path) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  if (path.size() >= sizeof a.sun_path) {
    errno = ENAMETOOLONG;
    die(path);
  }
  memcpy(a.sun_path, path.c_str(), path.size() + 1);
  unlink(path.c_str());
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || listen(fd, 8)) die(path);
  return fd;
}

// What a direction of a cable does to frames.
struct Cable {
  bool up = true;
  double loss = 0;  // 0..1
  uint64_t delay_us = 0;
};

using Frame = std::shared_ptr<const std::string>;  // with its length in front

struct Port {
  std::string network, host;
  int listener = -1, fd = -1;
  std::string rx;
  std::deque<Frame> queue;  // towards the host
  size_t queued = 0;        // bytes in it
  size_t sent = 0;          // bytes of queue.front() already written
  bool want_write = false;
  Cable in, out;
  uint64_t rx_frames = 0, rx_bytes = 0, tx_frames = 0, tx_bytes = 0, dropped_full = 0, dropped_cable = 0;
};

class Switch {
 public:
  Switch(const std::string& data, const std::string& control, const std::vector<std::string>& ports);
  [[noreturn]] void run();

 private:
  using Handler = std::function<void(uint32_t)>;
  void watch(int fd, uint32_t events, Handler h);
  void unwatch(int& fd);
  void accept_port(Port& p);
  void read_port(Port& p);
  void disconnect(Port& p);
  void from_host(Port& p, const char* frame, size_t length);
  void forward(Port& p, const Frame& f);
  void to_host(Port& p, const Frame& f);
  void enqueue(Port& p, const Frame& f);
  void write_port(Port& p);
  bool survives(Port& p, const Cable& c);
  void later(uint64_t delay_us, std::function<void()> what);
  void accept_control();
  std::string command(const std::string& line);
  std::string stats() const;
  void set_up(Port& p, const std::string& path);

  int epoll_, control_;
  std::map<int, Handler> handlers_;
  std::vector<std::unique_ptr<Port>> ports_;
  std::map<std::string, std::unordered_map<Mac, Port*>> learned_;
  std::multimap<uint64_t, std::function<void()>> timers_;  // by time in us
  std::vector<Port*> dirty_;                               // have something to write
  std::mt19937_64 random_{20250117};                       // the same losses in every run
};

void Switch::watch(int fd, uint32_t events, Handler h) {
  epoll_event e{};
  e.events = events;
  e.data.fd = fd;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e)) die("epoll");
  handlers_[fd] = std::move(h);
}

void Switch::unwatch(int& fd) {
  handlers_.erase(fd);
  close(fd);
  fd = -1;
}

Switch::Switch(const std::string& data, const std::string& control, const std::vector<std::string>& ports) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  for (const std::string& name : ports) {
    auto p = std::make_unique<Port>();
    size_t colon = name.find(':');
    if (colon == std::string::npos) {
      errno = EINVAL;
      die(name);
    }
    p->network = name.substr(0, colon);
    p->host = name.substr(colon + 1);
    p->listener = listen_at(data + "-" + p->network + "-" + p->host + ".sock");
    watch(p->listener, EPOLLIN, [this, port = p.get()](uint32_t) { accept_port(*port); });
    ports_.push_back(std::move(p));
  }
  control_ = listen_at(control);
  watch(control_, EPOLLIN, [this](uint32_t) { accept_control(); });
}

void Switch::accept_port(Port& p) {
  int fd = accept4(p.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) return;
  if (p.fd >= 0) disconnect(p);  // the host was started again
  int size = 1 << 20;
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  p.fd = fd;
  watch(fd, EPOLLIN, [this, &p](uint32_t events) {
    if (events & EPOLLOUT) write_port(p);
    if (p.fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read_port(p);
  });
}

void Switch::disconnect(Port& p) {
  unwatch(p.fd);
  std::erase_if(learned_[p.network], [&p](const auto& entry) { return entry.second == &p; });
  p.rx.clear();
  p.queue.clear();
  p.queued = p.sent = 0;
  p.want_write = false;
}

void Switch::read_port(Port& p) {
  static std::array<char, 512 * 1024> buf;
  ssize_t n = read(p.fd, buf.data(), buf.size());
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) return disconnect(p);
  p.rx.append(buf.data(), static_cast<size_t>(n));
  size_t at = 0;
  while (p.rx.size() - at >= kLengthBytes) {
    const auto* b = reinterpret_cast<const unsigned char*>(p.rx.data() + at);
    size_t length = size_t{b[0]} << 24 | size_t{b[1]} << 16 | size_t{b[2]} << 8 | b[3];
    if (length > kFrameMax) {
      fprintf(stderr, "vswitch: %s:%s sent a frame of %zu bytes; disconnected\n", p.network.c_str(), p.host.c_str(),
              length);
      return disconnect(p);
    }
    if (p.rx.size() - at < kLengthBytes + length) break;
    from_host(p, p.rx.data() + at, kLengthBytes + length);
    at += kLengthBytes + length;
  }
  p.rx.erase(0, at);
}

bool Switch::survives(Port& p, const Cable& c) {
  if (c.up && (c.loss <= 0 || std::uniform_real_distribution<>(0, 1)(random_) >= c.loss)) return true;
  p.dropped_cable++;
  return false;
}

void Switch::later(uint64_t delay_us, std::function<void()> what) {
  timers_.emplace(now_us() + delay_us, std::move(what));
}

void Switch::from_host(Port& p, const char* frame, size_t length) {
  if (length < kLengthBytes + 14) return;
  p.rx_frames++;
  p.rx_bytes += length - kLengthBytes;
  if (!survives(p, p.out)) return;
  auto f = std::make_shared<const std::string>(frame, length);
  if (p.out.delay_us) later(p.out.delay_us, [this, &p, f] { forward(p, f); });
  else forward(p, f);
}

Mac mac_at(const Frame& f, size_t offset) {
  Mac m = 0;
  memcpy(&m, f->data() + kLengthBytes + offset, 6);
  return m;
}

void Switch::forward(Port& p, const Frame& f) {
  constexpr unsigned char kMulticast = 1;
  auto& table = learned_[p.network];
  table[mac_at(f, 6)] = &p;
  if (!(static_cast<unsigned char>((*f)[kLengthBytes]) & kMulticast)) {
    auto to = table.find(mac_at(f, 0));
    if (to != table.end()) {
      if (to->second != &p) to_host(*to->second, f);
      return;
    }
  }
  for (auto& q : ports_)
    if (q.get() != &p && q->network == p.network) to_host(*q, f);
}

void Switch::to_host(Port& p, const Frame& f) {
  if (!survives(p, p.in)) return;
  if (p.in.delay_us) later(p.in.delay_us, [this, &p, f] { enqueue(p, f); });
  else enqueue(p, f);
}

void Switch::enqueue(Port& p, const Frame& f) {
  if (p.fd < 0) return;
  if (p.queued + f->size() > kQueueMax) {
    p.dropped_full++;
    return;
  }
  if (p.queue.empty()) dirty_.push_back(&p);
  p.queue.push_back(f);
  p.queued += f->size();
}

void Switch::write_port(Port& p) {
  while (p.fd >= 0 && !p.queue.empty()) {
    std::array<iovec, kBatch> v;
    int count = 0;
    for (auto it = p.queue.begin(); it != p.queue.end() && count < kBatch; ++it, ++count) {
      size_t skip = count ? 0 : p.sent;
      v[count] = {const_cast<char*>((*it)->data()) + skip, (*it)->size() - skip};
    }
    msghdr m{};
    m.msg_iov = v.data();
    m.msg_iovlen = static_cast<size_t>(count);
    ssize_t n = sendmsg(p.fd, &m, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) return disconnect(p);
    if (n < 0) break;
    for (size_t left = static_cast<size_t>(n); left;) {
      size_t rest = p.queue.front()->size() - p.sent;
      if (left < rest) {
        p.sent += left;
        break;
      }
      left -= rest;
      p.tx_frames++;
      p.tx_bytes += p.queue.front()->size() - kLengthBytes;
      p.queued -= p.queue.front()->size();
      p.queue.pop_front();
      p.sent = 0;
    }
  }
  bool want = p.fd >= 0 && !p.queue.empty();
  if (p.fd < 0 || want == p.want_write) return;
  p.want_write = want;
  epoll_event e{};
  e.events = EPOLLIN | (want ? EPOLLOUT : 0u);
  e.data.fd = p.fd;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, p.fd, &e);
}

void Switch::accept_control() {
  int fd = accept4(control_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return;
  timeval limit{1, 0};  // only the bed's supervisor connects, and it sends its line at once
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  char buf[512];
  ssize_t n = read(fd, buf, sizeof buf - 1);
  std::string answer = n > 0 ? command(std::string(buf, static_cast<size_t>(n))) : "error: no command";
  answer += "\n";
  for (size_t done = 0; done < answer.size();) {
    ssize_t w = send(fd, answer.data() + done, answer.size() - done, MSG_NOSIGNAL);
    if (w <= 0) break;
    done += static_cast<size_t>(w);
  }
  close(fd);
}

std::string Switch::command(const std::string& line) {
  std::istringstream in(line);
  std::string verb, name, direction, word;
  in >> verb;
  if (verb == "stats") return stats();
  if (verb != "set") return "error: unknown command '" + verb + "'";
  in >> name >> direction;
  if (direction != "in" && direction != "out" && direction != "both") return "error: direction is in, out or both";
  for (auto& p : ports_) {
    if (p->network + ":" + p->host != name) continue;
    Cable change_in = p->in, change_out = p->out;
    while (in >> word) {
      char* end = nullptr;
      double number = strtod(word.c_str() + std::min(word.find('=') + 1, word.size()), &end);
      bool number_ok = end && *end == '\0' && number >= 0;
      for (Cable* c : {&change_in, &change_out}) {
        if (word == "up") c->up = true;
        else if (word == "down") c->up = false;
        else if (word.rfind("loss=", 0) == 0 && number_ok && number <= 100) c->loss = number / 100;
        else if (word.rfind("delay=", 0) == 0 && number_ok && number <= 60000)
          c->delay_us = static_cast<uint64_t>(number * 1000);
        else return "error: '" + word + "' is none of up, down, loss=0..100, delay=0..60000";
      }
    }
    if (direction != "out") p->in = change_in;
    if (direction != "in") p->out = change_out;
    return "ok";
  }
  return "error: no port " + name;
}

std::string Switch::stats() const {
  std::ostringstream o;
  auto cable = [&](const Cable& c) {
    o << "{\"up\":" << (c.up ? "true" : "false") << ",\"loss\":" << c.loss * 100 << ",\"delay_ms\":" << c.delay_us / 1000.0
      << "}";
  };
  o << "[";
  for (auto& p : ports_) {
    o << (p == ports_.front() ? "" : ",") << "{\"network\":\"" << p->network << "\",\"host\":\"" << p->host
      << "\",\"connected\":" << (p->fd >= 0 ? "true" : "false") << ",\"from_host\":{\"frames\":" << p->rx_frames
      << ",\"bytes\":" << p->rx_bytes << "},\"to_host\":{\"frames\":" << p->tx_frames << ",\"bytes\":" << p->tx_bytes
      << "},\"dropped_full\":" << p->dropped_full << ",\"dropped_cable\":" << p->dropped_cable << ",\"in\":";
    cable(p->in);
    o << ",\"out\":";
    cable(p->out);
    o << "}";
  }
  o << "]";
  return o.str();
}

void Switch::run() {
  std::array<epoll_event, 32> events;
  for (;;) {
    int wait_ms = -1;
    if (!timers_.empty()) {
      uint64_t now = now_us(), at = timers_.begin()->first;
      wait_ms = at <= now ? 0 : static_cast<int>((at - now + 999) / 1000);
    }
    int n = epoll_wait(epoll_, events.data(), events.size(), wait_ms);
    if (n < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < n; i++) {
      auto h = handlers_.find(events[i].data.fd);
      if (h == handlers_.end()) continue;
      Handler run = h->second;  // it may remove itself
      run(events[i].events);
    }
    while (!timers_.empty() && timers_.begin()->first <= now_us()) {
      auto what = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      what();
    }
    for (Port* p : dirty_) write_port(*p);
    dirty_.clear();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: vswitch DATA CONTROL.sock NETWORK:HOST...\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  Switch s(argv[1], argv[2], std::vector<std::string>(argv + 3, argv + argc));
  puts("ready");
  fflush(stdout);
  s.run();
}
