// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "link_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "../limits.h"
#include "../one_of_many.h"
#include "../process.h"
#include "../thread_scan.h"

namespace migr {
namespace {

struct Kind {
  std::uint16_t type;
  const char* name;
  std::uint32_t record_size;
  std::uint32_t least, most;  // records
};
constexpr Kind kKinds[] = {
    {MIGR_LINKS_HELLO, "HELLO", sizeof(migr_links_hello), 1, 1},
    {MIGR_LINKS_CONFIG, "CONFIG", 0, 0, 0},
    {MIGR_LINKS_LINKS, "LINKS", sizeof(migr_links_link), 0, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_PUBLISH, "PUBLISH", sizeof(migr_links_vqp), 1, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_WITHDRAW, "WITHDRAW", sizeof(migr_links_name), 0, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_LOOKUP, "LOOKUP", sizeof(migr_links_name), 1, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_CHANNEL, "CHANNEL", sizeof(migr_links_channel), 1, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_CHANNEL_END, "CHANNEL_END", sizeof(migr_links_channel), 1, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_STATE, "STATE", sizeof(migr_links_vqp_state), 0, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_SWITCHED, "SWITCHED", sizeof(migr_links_switch), 1, MIGR_LINKS_MAX_RECORDS},
    {MIGR_LINKS_OUTSIDE, "OUTSIDE", sizeof(migr_text_range), 1, MIGR_LINKS_MAX_RECORDS},
};

const Kind* kind_of(std::uint16_t type) {
  for (const Kind& k : kKinds)
    if (k.type == type) return &k;
  return nullptr;
}

std::vector<std::byte> packet_of(migr_links_msg head, const void* records, std::size_t count, std::size_t record_size) {
  head.version = MIGR_LINKS_VERSION;
  head.count = static_cast<std::uint32_t>(count);
  head.record_size = static_cast<std::uint32_t>(record_size);
  std::vector<std::byte> out(sizeof head + count * record_size);
  std::memcpy(out.data(), &head, sizeof head);
  if (count) std::memcpy(out.data() + sizeof head, records, count * record_size);
  return out;
}

std::string label(pid_t pid, const std::string& comm) { return "links of process " + std::to_string(pid) + " (" + comm + ")"; }

}  // namespace

LinkSocket::~LinkSocket() { stop(); }

Status LinkSocket::start(const std::string& path) {
  if (auto s = listener_.start(path); !s) return s;
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.n < 0) return sys_error("eventfd");
  // Whoever connects how often: migrations need descriptors, too.
  rlimit files{};
  most_ = getrlimit(RLIMIT_NOFILE, &files) ? 64 : std::min<std::size_t>(kMaxSessions, files.rlim_cur / 4);
  thread_ = std::thread([this] { run(); });
  for (int i = 0; i < kLinkWorkers; i++) workers_.emplace_back([this] { work(); });
  for (int i = 0; i < kLinkScanners; i++) workers_.emplace_back([this] { look(); });
  return {};
}

void LinkSocket::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  ready_changed_.notify_all();
  looks_changed_.notify_all();
  eventfd_write(wake_.n, 1);
  thread_.join();
  for (const auto& s : all()) s->ended.request_stop();
  for (auto& w : workers_) w.join();
  workers_.clear();
}

std::vector<LinkSocket::SessionRef> LinkSocket::all() const {
  std::lock_guard lock(mutex_);
  return sessions_;
}

std::size_t LinkSocket::connections() const { return all().size(); }

void LinkSocket::run() {
  for (;;) {
    std::vector<pollfd> fds = {{wake_.n, POLLIN, 0}, listener_.watched()};
    const auto known = all();
    const auto now = Clock::now();
    int wait_ms = -1;
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
      for (const auto& s : known) {
        const std::chrono::duration<double> since = now - s->refilled;
        s->tokens = std::min<double>(s->tokens + since.count() * kLinkPacketsPerS, kLinkPacketsPerS);
        s->refilled = now;
        short events = POLLRDHUP;
        if (s->tokens < 1)
          wait_ms = 10;
        else if (s->out.size() < static_cast<std::size_t>(kLinkPushesKept))
          events |= POLLIN;
        if (!s->out.empty()) events |= POLLOUT;
        if (!s->greeted && wait_ms < 0) wait_ms = 200;
        fds.push_back({s->fd.n, events, 0});
      }
    }
    if (poll(fds.data(), fds.size(), listener_.wait_ms(wait_ms)) < 0 && errno != EINTR) {
      spdlog::error("poll: {}", std::strerror(errno));
      return;
    }
    eventfd_t ignored;
    eventfd_read(wake_.n, &ignored);
    for (std::size_t i = 0; i < known.size(); i++) {
      const auto& s = known[i];
      const short revents = fds[2 + i].revents;
      if (revents & POLLOUT) {
        std::unique_lock lock(mutex_);
        flush_locked(*s);
        const bool again = s->out.empty() && std::exchange(s->missed_ports, false);
        lock.unlock();
        if (again) push_ports(s);
      }
      if (s->closed) continue;  // by another one's HELLO
      if (revents & POLLIN) {
        s->tokens -= 1;
        if (!read_one(s)) end(s, nullptr);
      } else if (revents & (POLLRDHUP | POLLHUP | POLLERR)) {
        end(s, nullptr);
      } else if (!s->greeted && Clock::now() - s->since > std::chrono::milliseconds(kHelloMs)) {
        end(s, "said nothing");
      }
    }
    if (fds[1].revents) {
      for (Fd fd; (fd = listener_.accept()).n >= 0;) {
        auto s = std::make_shared<Session>();
        s->fd = std::move(fd);
        s->since = s->refilled = Clock::now();
        s->tokens = kLinkPacketsPerS;
        const auto speaker = speaker_of(s->fd.n);
        if (!speaker) {
          if (rarely_.due(speaker.error().text)) spdlog::warn("links: refused: {}", speaker.error().text);
          continue;
        }
        s->speaker = *speaker;
        s->pid = speaker->pid;
        std::lock_guard lock(mutex_);
        const auto of_user = std::count_if(sessions_.begin(), sessions_.end(), [&](const auto& o) { return o->speaker.user.counts_with(s->speaker.user); });
        if (sessions_.size() >= most_ || static_cast<std::size_t>(of_user) >= most_ / 2) {
          if (rarely_.due(s->speaker.user.text())) spdlog::warn("links: too many processes; process {} of {} was refused", s->pid, s->speaker.user.text());
          continue;
        }
        sessions_.push_back(std::move(s));
      }
    }
  }
}

void LinkSocket::end(const SessionRef& s, const char* why) {
  {
    std::lock_guard lock(mutex_);
    s->closed = true;
    s->questions.clear();
    std::erase_if(looks_, [&](const Look& l) { return l.s == s; });
    s->ended.request_stop();
    std::erase(sessions_, s);
    shutdown(s->fd.n, SHUT_RDWR);
  }
  if (why && rarely_.due(as_one_of_many(s->speaker, why))) spdlog::warn("{} {}: closed", label(s->pid, s->comm.empty() ? name_of(s->pid) : s->comm), why);
  if (!s->greeted) return;
  s->greeted = false;
  if (rarely_.due(as_one_of_many(s->speaker, "disconnected"))) spdlog::info("{} disconnected", label(s->pid, s->comm));
  table_.leave(s->instance);
}

bool LinkSocket::read_one(const SessionRef& s) {
  auto& buf = buffer_;
  const ssize_t got = recv(s->fd.n, buf.data(), buf.size(), MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  const auto bytes = static_cast<std::size_t>(got);
  Packet p;
  const auto say = [&](const std::string& what) {
    if (rarely_.due(as_one_of_many(s->speaker, "nonsense"))) spdlog::warn("{}: {}: closed", label(s->pid, s->comm.empty() ? name_of(s->pid) : s->comm), what);
  };
  if (bytes < sizeof p.head) return say("a packet of " + std::to_string(got) + " bytes, shorter than a header"), false;
  std::memcpy(&p.head, buf.data(), sizeof p.head);
  const migr_links_msg& h = p.head;
  const Kind* kind = kind_of(h.type);
  Status fits;
  auto wrong = [&](const std::string& what) { fits = Error{EPROTO, what}; };
  if (h.version != MIGR_LINKS_VERSION)
    wrong("links: version " + std::to_string(h.version) + ", migrd has " + std::to_string(MIGR_LINKS_VERSION) + "; install both from the same release");
  else if (!kind)
    wrong("links: type " + std::to_string(h.type) + " is not known");
  else if (h.flags || h.status || !h.seq)
    wrong(std::string(kind->name) + ": flags or status is not 0, or seq is");
  else if (!std::memchr(h.text, 0, sizeof h.text))
    wrong(std::string(kind->name) + ": text without end");
  else if (bytes > MIGR_LINKS_PACKET_BYTES || h.count > kind->most || h.count < kind->least || (h.count && h.record_size != kind->record_size) ||
           std::size_t{h.count} * kind->record_size != bytes - sizeof h)
    wrong(std::string(kind->name) + ": length, count and record size do not fit");
  if (!fits) {
    say(fits.error().text);
    reply(s, h, fits);
    return false;
  }
  p.records.assign(buf.begin() + sizeof h, buf.begin() + got);
  return handle(s, p);
}

bool LinkSocket::greet(const SessionRef& s, const Packet& p) {
  const auto hello = p.as<migr_links_hello>()[0];
  const Instance who = gid_of(p.head.instance);
  if (auto ok = check(hello); !ok) {
    reply(s, p.head, ok);
    return true;
  }
  if (!s->speaker.lives()) {
    reply(s, p.head, Error{EPERM, "HELLO for process " + std::to_string(s->pid) + ", which connected and has ended"});
    return true;
  }
  if (who == Instance{}) {
    reply(s, p.head, Error{EINVAL, "HELLO without an instance"});
    return true;
  }
  const auto may_have = [&](pid_t pid) { return may_have_ ? may_have_(who, pid) : Status(); };
  if (auto ok = may_have(s->pid); !ok) {
    if (rarely_.due(ok.error().text)) spdlog::warn("links: refused: {}", ok.error().text);
    reply(s, p.head, ok);
    return true;
  }
  std::vector<SessionRef> before;
  for (const auto& o : all()) {
    if (o == s || !o->greeted) continue;
    if (o->pid == s->pid || (o->instance == who && !may_have(o->pid))) {
      before.push_back(o);
    } else if (o->instance == who) {
      reply(s, p.head, Error{EEXIST, "instance " + hex(who) + " is that of process " + std::to_string(o->pid)});
      return true;
    }
  }
  for (const auto& o : before) end(o, nullptr);  // it lost us and connects again, or was a stranger
  s->instance = who;
  s->comm = name_of(s->pid);
  if (s->comm.empty()) s->comm = "?";
  table_.enter(who, {s->pid, s->speaker.user.uid, s->comm, p.head.text, hello});
  if (rarely_.due(as_one_of_many(s->speaker, "connected")))
    spdlog::info("{} connected: instance {}, policy {}", label(s->pid, s->comm), hex(who), policy_name(hello.policy));
  reply(s, p.head, {});
  s->greeted = true;  // what changes from here on is pushed, and what did before is in ports_()
  push_ports(s);
  return true;
}

bool LinkSocket::handle(const SessionRef& s, Packet& p) {
  const auto type = p.head.type;
  if (type == MIGR_LINKS_HELLO) {
    if (!s->greeted) return greet(s, p);
    reply(s, p.head, Error{EINVAL, "HELLO twice"});
    return true;
  }
  if (!s->greeted && type != MIGR_LINKS_CONFIG) {
    reply(s, p.head, Error{EACCES, "the first message has to be HELLO"});
    return true;
  }
  const Instance& who = s->instance;
  Status done;
  bool later = false;
  switch (type) {
    case MIGR_LINKS_CONFIG: {
      Fd fd(open(file_.c_str(), O_RDONLY | O_CLOEXEC));
      std::vector<char> text(kLinksFileBytes + 1);
      std::size_t bytes = 0;
      for (ssize_t n; fd.n >= 0 && bytes < text.size() && (n = ::read(fd.n, &text[bytes], text.size() - bytes)) > 0;) bytes += static_cast<std::size_t>(n);
      if (bytes > kLinksFileBytes)
        reply(s, p.head, Error{EINVAL, file_ + " is larger than " + std::to_string(kLinksFileBytes) + " bytes"});
      else
        reply(s, p.head, {}, 0, text.data(), bytes, 1);
      return true;
    }
    case MIGR_LINKS_LINKS: done = table_.set_links(who, p.as<migr_links_link>()); break;
    case MIGR_LINKS_WITHDRAW: done = table_.withdraw(who, p.as<migr_links_name>()); break;
    case MIGR_LINKS_STATE: done = table_.set_states(who, p.as<migr_links_vqp_state>(), p.head.arg); break;
    case MIGR_LINKS_SWITCHED: done = table_.add_switches(who, p.as<migr_links_switch>(), ports_()); break;
    case MIGR_LINKS_CHANNEL_END:
      for (const auto& c : p.as<migr_links_channel>())
        if (auto one = table_.end_channel(who, c); !one && done) done = one;
      break;
    case MIGR_LINKS_LOOKUP:
      for (const auto& n : p.as<migr_links_name>())
        if (done) done = check(n);
      later = true;
      break;
    case MIGR_LINKS_PUBLISH:
    case MIGR_LINKS_CHANNEL: later = true; break;
    case MIGR_LINKS_OUTSIDE:
      if (p.head.count > MIGR_PROC_MAX_TEXT_RANGES) done = Error{E2BIG, "OUTSIDE of more than " + std::to_string(MIGR_PROC_MAX_TEXT_RANGES) + " ranges"};
      for (const auto& r : p.as<migr_text_range>())
        if (done) done = check(r);
      later = true;
      break;
  }
  if (later && done) {
    done = queue(s, p);
    if (done) return true;
  }
  reply(s, p.head, done);
  return true;
}

Status LinkSocket::queue(const SessionRef& s, Packet& p) {
  std::lock_guard lock(mutex_);
  if (s->pending >= MIGR_LINKS_MAX_PENDING) return Error{EBUSY, "more than " + std::to_string(MIGR_LINKS_MAX_PENDING) + " questions without an answer"};
  s->pending++;
  if (p.head.type == MIGR_LINKS_OUTSIDE) {
    const std::chrono::milliseconds limit(std::min<std::uint64_t>(p.head.arg, static_cast<std::uint64_t>(kLinkOutsideMs)));
    looks_.push_back({s, std::move(p), Clock::now() + limit});
    looks_changed_.notify_one();
    return {};
  }
  s->questions.push_back(std::move(p));
  if (!s->asking) {
    s->asking = true;
    ready_.push_back(s);
    ready_changed_.notify_one();
  }
  return {};
}

void LinkSocket::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ready_changed_.wait(lock, [this] { return stop_ || !ready_.empty(); });
    if (stop_) return;
    const auto s = ready_.front();
    ready_.pop_front();
    if (!s->questions.empty()) {
      const Packet p = std::move(s->questions.front());
      s->questions.pop_front();
      lock.unlock();
      answer_question(s, p);
      lock.lock();
      s->pending--;
    }
    if (s->questions.empty())
      s->asking = false;
    else
      ready_.push_back(s), ready_changed_.notify_one();
  }
}

void LinkSocket::answer_question(const SessionRef& s, const Packet& p) {
  if (p.head.type == MIGR_LINKS_PUBLISH) {
    std::size_t offending = 0;
    const Status done = table_.publish(s->instance, p.as<migr_links_vqp>(), offending);
    if (!done && rarely_.due("names, " + s->speaker.user.text())) spdlog::warn("{}: {}", label(s->pid, s->comm), done.error().text);
    reply(s, p.head, done, done ? 0 : offending);
    return;
  }
  std::string text;
  if (p.head.type == MIGR_LINKS_LOOKUP) {
    std::vector<VqpName> names;
    for (const auto& n : p.as<migr_links_name>()) names.push_back(name_of(n));
    const auto found = directory_.lookup(names);
    text = found.text;
    table_.set_error(s->instance, text);
    reply(s, p.head, {}, 0, found.records.data(), found.records.size(), sizeof found.records[0], text);
    return;
  }
  auto ends = p.as<migr_links_channel>();
  for (auto& e : ends) {
    const auto ok = table_.offer(s->instance, e);
    if (ok) continue;
    e.status = ok.error().code;
    if (text.empty()) text = ok.error().text;
  }
  const auto met = directory_.meet(s->instance, ends);
  if (text.empty()) text = met.text;
  table_.set_error(s->instance, text);
  reply(s, p.head, {}, 0, met.records.data(), met.records.size(), sizeof met.records[0], text);
}

// A process has one tracer at a time, and may have connected again. Whoever lets all its threads stay inside keeps half of
// the scanners at most.
std::deque<LinkSocket::Look>::iterator LinkSocket::next_look_locked() {
  return std::find_if(looks_.begin(), looks_.end(), [this](const Look& l) {
    std::ptrdiff_t of_user = 0;
    for (const auto& s : looked_at_) {
      if (s->pid == l.s->pid) return false;
      of_user += s->speaker.user.counts_with(l.s->speaker.user);
    }
    return of_user < kLinkScanners / 2;
  });
}

void LinkSocket::look() {
  std::unique_lock lock(mutex_);
  for (;;) {
    auto next = looks_.end();
    looks_changed_.wait(lock, [&] { return stop_ || (next = next_look_locked()) != looks_.end(); });
    if (stop_) return;
    const Look l = std::move(*next);
    looks_.erase(next);
    looked_at_.push_back(l.s);
    lock.unlock();
    const auto seen = see_outside(l);
    if (!l.s->ended.stop_requested()) {
      if (!seen && rarely_.due(as_one_of_many(l.s->speaker, "inside"))) spdlog::info("{}: {}", label(l.s->pid, l.s->comm), seen.error().text);
      reply(l.s, l.p.head, seen);
    }
    lock.lock();
    l.s->pending--;
    std::erase(looked_at_, l.s);
    looks_changed_.notify_all();
  }
}

Status LinkSocket::see_outside(const Look& l) {
  // It is traced because it asked for that, and not because it has got the number of one that did.
  if (!l.s->speaker.lives()) return Error{ESRCH, "process " + std::to_string(l.s->pid) + ", which has connected, has ended"};
  std::vector<TextRange> ranges;
  for (const auto& r : l.p.as<migr_text_range>()) ranges.push_back({r.start, r.bytes});
  return wait_until_outside(l.s->pid, ranges, 0, l.deadline, l.s->ended.get_token());
}

void LinkSocket::reply(const SessionRef& s, const migr_links_msg& to, const Status& status, std::uint64_t arg, const void* records,
                       std::size_t count, std::size_t record_size, const std::string& text) {
  migr_links_msg head{};
  head.type = static_cast<std::uint16_t>(to.type | MIGR_LINKS_REPLY);
  head.seq = to.seq;
  head.arg = arg;
  std::copy(std::begin(to.instance), std::end(to.instance), head.instance);
  if (!status) head.status = status.error().code;
  const std::string& said = status ? text : status.error().text;
  std::strncpy(head.text, said.c_str(), sizeof head.text - 1);
  std::lock_guard lock(mutex_);
  send_locked(*s, packet_of(head, records, count, record_size));
}

void LinkSocket::push(const SessionRef& s, std::uint16_t type, const void* records, std::size_t count, std::size_t record_size) {
  migr_links_msg head{};
  head.type = type;
  std::copy(s->instance.begin(), s->instance.end(), head.instance);
  std::lock_guard lock(mutex_);
  if (s->out.size() < static_cast<std::size_t>(kLinkPushesKept)) send_locked(*s, packet_of(head, records, count, record_size));
  else if (type == MIGR_LINKS_PORTS) s->missed_ports = true;
}

void LinkSocket::push_ports(const SessionRef& s) {
  const auto ports = ports_();
  for (std::size_t at = 0; at < ports.size(); at += MIGR_LINKS_MAX_RECORDS)
    push(s, MIGR_LINKS_PORTS, &ports[at], std::min<std::size_t>(ports.size() - at, MIGR_LINKS_MAX_RECORDS), sizeof ports[0]);
}

// Caller holds the lock.
void LinkSocket::send_locked(Session& s, std::vector<std::byte> packet) {
  if (s.closed) return;
  s.out.push_back(std::move(packet));
  flush_locked(s);
  if (!s.out.empty()) eventfd_write(wake_.n, 1);
}

// Caller holds the lock. What is broken is seen by poll().
void LinkSocket::flush_locked(Session& s) {
  while (!s.out.empty()) {
    if (::send(s.fd.n, s.out.front().data(), s.out.front().size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR)) return;
    s.out.pop_front();
  }
}

void LinkSocket::tell_ports(std::span<const migr_links_port> ports) {
  for (const auto& s : all())
    if (s->greeted)
      for (std::size_t at = 0; at < ports.size(); at += MIGR_LINKS_MAX_RECORDS)
        push(s, MIGR_LINKS_PORTS, &ports[at], std::min<std::size_t>(ports.size() - at, MIGR_LINKS_MAX_RECORDS), sizeof ports[0]);
}

void LinkSocket::knock(const Instance& to, const migr_links_channel& from) {
  for (const auto& s : all())
    if (s->greeted && s->instance == to) push(s, MIGR_LINKS_KNOCK, &from, 1, sizeof from);
}

}  // namespace migr
