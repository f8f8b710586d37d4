// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "process_session.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include <spdlog/spdlog.h>

#include "limits.h"
#include "one_of_many.h"
#include "process.h"

namespace migr {
namespace {

using Clock = std::chrono::steady_clock;

// The largest packet either side may send.
constexpr std::size_t kPacketBytes = sizeof(migr_msg) + MIGR_PROC_MAX_RECORDS * sizeof(migr_fd_desc);

int left_ms(Clock::time_point deadline) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::max<long long>(ms, 0));
}

struct Packet {
  migr_msg head{};
  std::vector<std::byte> records;
};

// Receives and checks one packet. ECONNRESET: closed by the other side.
Result<Packet> receive(int fd, Clock::time_point deadline) {
  pollfd p{fd, POLLIN, 0};
  int n;
  while ((n = poll(&p, 1, left_ms(deadline))) < 0 && errno == EINTR) {
  }
  if (n < 0) return sys_error("poll");
  if (n == 0) return Error{ETIMEDOUT, "no answer in time"};
  std::vector<std::byte> buf(kPacketBytes + 1);
  const ssize_t got = recv(fd, buf.data(), buf.size(), MSG_DONTWAIT);
  if (got < 0) return sys_error("recv");
  if (got == 0) return Error{ECONNRESET, "the process closed the connection"};
  Packet out;
  if (static_cast<std::size_t>(got) < sizeof out.head)
    return Error{EPROTO, "packet of " + std::to_string(got) + " bytes, shorter than a header"};
  std::memcpy(&out.head, buf.data(), sizeof out.head);
  const migr_msg& h = out.head;
  if (h.version != MIGR_PROC_VERSION)
    return Error{EPROTO, "speaks version " + std::to_string(h.version) + ", not " + std::to_string(MIGR_PROC_VERSION) +
                             "; install libmigr and migrd from the same release"};
  if (h.count > MIGR_PROC_MAX_RECORDS ||
      std::size_t{h.count} * h.record_size != static_cast<std::size_t>(got) - sizeof h ||
      (h.count && !h.record_size))
    return Error{EPROTO, "packet length does not fit its record count"};
  if (!std::memchr(h.text, 0, sizeof h.text)) return Error{EPROTO, "text without end"};
  buf.resize(static_cast<std::size_t>(got));
  out.records.assign(buf.begin() + sizeof h, buf.end());
  return out;
}

// Our number of a thread that calls itself `inner` in its own pid namespace.
pid_t outer_tid(pid_t pid, pid_t inner) {
  std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(("/proc/" + std::to_string(pid) + "/task").c_str()), closedir);
  while (dirent* e = dir ? readdir(dir.get()) : nullptr) {
    if (e->d_name[0] == '.') continue;
    const pid_t tid = std::atoi(e->d_name);
    if (const auto numbers = numbers_in_namespaces(tid); !numbers.empty() && numbers.back() == inner) return tid;
  }
  return 0;
}

const char* message_name(std::uint16_t type) {
  static const char* const names[] = {"?", "HELLO", "DESCRIBE", "QP_CREATE", "QP_CONNECT", "SUSPEND", "DRAIN",
                                      "FREEZE", "SWITCH", "REBIND", "KEYS", "RESUME", "ROLLBACK", "STATS", "MOVES",
                                      "CUT", "SETTLE", "MET", "GONE", "OLD_PATH", "WRITTEN", "TRACK"};
  return type < std::size(names) ? names[type] : "?";
}

}  // namespace

Result<Fd> listen_to_processes(const std::string& path) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  if (path.size() >= sizeof a.sun_path) return Error{ENAMETOOLONG, path + ": too long for a socket"};
  std::strcpy(a.sun_path, path.c_str());
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  unlink(path.c_str());
  constexpr int kBacklog = 128;
  // Every user may connect: who it is says SO_PEERCRED, and a process can only speak for itself.
  if (fd.n < 0 || bind(fd.n, reinterpret_cast<sockaddr*>(&a), sizeof a) || chmod(path.c_str(), 0666) || listen(fd.n, kBacklog))
    return sys_error("cannot listen on " + path);
  return fd;
}

Status Listener::start(const std::string& path) {
  auto fd = listen_to_processes(path);
  if (!fd) return fd.error();
  fd_ = std::move(*fd);
  return {};
}

int Listener::wait_ms(int ms) const {
  if (!waits()) return ms;
  return ms < 0 ? kAcceptAgainMs : std::min(ms, kAcceptAgainMs);
}

Fd Listener::accept() {
  Fd fd(accept4(fd_.n, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.n < 0 && (errno == EMFILE || errno == ENFILE)) {
    const char* const why = std::strerror(errno);
    again_ = Clock::now() + std::chrono::milliseconds(kAcceptAgainMs);
    if (rarely_.due(why)) spdlog::error("processes that connect have to wait: {}", why);
  }
  return fd;
}

Result<std::vector<migr_key_map>> key_maps(std::span<const wire::ProcessKeys> keys, const std::set<std::string>& owners) {
  std::vector<migr_key_map> map;
  for (const auto& k : keys) {
    if (!owners.empty() && !owners.contains(k.owner())) continue;
    if (k.owner().size() != 16 || k.vrkey_size() != k.prkey_size()) return Error{EINVAL, "malformed keys"};
    for (int i = 0; i < k.vrkey_size(); i++) {
      migr_key_map m{k.vrkey(i), k.prkey(i), {}};
      std::copy(k.owner().begin(), k.owner().end(), reinterpret_cast<char*>(m.owner));
      map.push_back(m);
    }
  }
  return map;
}

Status tell_keys(ProcessSession& s, std::uint32_t migration, std::span<const wire::ProcessKeys> keys, const std::set<std::string>& owners) {
  const auto map = key_maps(keys, owners);
  if (!map) return map.error();
  const Status told = s.ask<migr_qp_ref, migr_key_map>(MIGR_MSG_KEYS, migration, *map, kProcessMs);
  return told || told.error().code != EBUSY ? told : Status();
}

std::string ProcessSession::label() const { return "process " + std::to_string(pid()) + " (" + comm_ + ")"; }

Error ProcessSession::wrong_size(std::uint16_t type, std::size_t got, std::size_t want) const {
  return Error{EPROTO, label() + ": records of " + std::to_string(got) + " bytes in the reply to " + message_name(type) +
                           ", not " + std::to_string(want)};
}

std::string User::text() const { return "user " + std::to_string(uid) + (container ? " in PID namespace " + std::to_string(container) : ""); }

bool Speaker::lives() const { return !life.empty() && life_of(pid) == life; }

Result<Speaker> speaker_of(int fd) {
  ucred cred{};
  socklen_t len = sizeof cred;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len)) return sys_error("SO_PEERCRED");
  if (cred.pid <= 0) return Error{EPERM, "a process that is not visible in migrd's pid namespace"};
  Speaker who{cred.pid, {cred.uid, 0}, life_of(cred.pid)};
  const auto container = container_namespace_of(cred.pid);
  // Who has its number by now may be root of the host.
  if (!who.lives()) return Error{ESRCH, "process " + std::to_string(cred.pid) + ", which has connected, has ended"};
  if (!container) return container.error();
  who.user.container = *container;
  return who;
}

Result<std::shared_ptr<ProcessSession>> ProcessSession::greet(Fd fd, int limit_ms) {
  const auto who = speaker_of(fd.n);
  if (!who) return who.error();
  return greet(std::move(fd), *who, limit_ms);
}

Result<std::shared_ptr<ProcessSession>> ProcessSession::greet(Fd fd, const Speaker& who, int limit_ms) {
  std::shared_ptr<ProcessSession> s(new ProcessSession);
  s->who_ = who;
  s->comm_ = name_of(who.pid);
  if (s->comm_.empty()) s->comm_ = "?";
  auto p = receive(fd.n, Clock::now() + std::chrono::milliseconds(limit_ms));
  if (!p) return Error{p.error().code, s->label() + ": HELLO: " + p.error().text};
  if (!who.lives()) return Error{EPERM, "HELLO for process " + std::to_string(who.pid) + ", which connected and has ended"};
  const migr_msg& h = p->head;
  if (h.type != MIGR_MSG_HELLO || h.flags || (h.count && h.record_size != sizeof(migr_text_range)) || h.count > MIGR_PROC_MAX_TEXT_RANGES ||
      h.state > MIGR_PROC_FROZEN)
    return Error{EPROTO, s->label() + ": malformed HELLO"};
  for (std::uint32_t i = 0; i < h.count; i++) {
    migr_text_range r;
    std::memcpy(&r, p->records.data() + i * sizeof r, sizeof r);
    s->ranges_.push_back({r.start, r.bytes});
  }
  std::copy(std::begin(h.instance), std::end(h.instance), s->instance_.begin());
  s->state_ = h.state;
  s->generation_ = h.generation;
  s->control_tid_ = h.control_tid;
  s->fd_ = std::move(fd);
  return s;
}

Result<ProcessSession::Reply> ProcessSession::request(std::uint16_t type, std::uint32_t migration, std::uint64_t arg,
                                                      const void* records, std::size_t count, std::size_t record_size,
                                                      int limit_ms) {
  std::lock_guard lock(mutex_);
  const std::string what = label() + ": " + message_name(type);
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  auto broken = [&](const Error& e) {
    close();  // an answer that comes late must not be taken for another's
    return Error{e.code, what + ": " + e.text};
  };
  migr_msg head{};
  head.version = MIGR_PROC_VERSION;
  head.type = type;
  head.seq = ++seq_;
  head.arg = arg;
  head.migration = migration;
  head.record_size = static_cast<std::uint32_t>(record_size);
  std::copy(instance_.begin(), instance_.end(), head.instance);
  const auto* at = static_cast<const std::byte*>(records);
  do {
    const std::size_t part = std::min<std::size_t>(count, MIGR_PROC_MAX_RECORDS);
    head.count = static_cast<std::uint32_t>(part);
    head.flags = part < count ? MIGR_MORE : 0;
    iovec iov[2] = {{&head, sizeof head}, {const_cast<std::byte*>(at), part * record_size}};
    msghdr m{};
    m.msg_iov = iov;
    m.msg_iovlen = part ? 2 : 1;
    pollfd p{fd_.n, POLLOUT, 0};
    if (poll(&p, 1, left_ms(deadline)) == 0) return broken({ETIMEDOUT, "the process does not read its socket"});
    if (sendmsg(fd_.n, &m, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
      if (errno == EAGAIN && left_ms(deadline) > 0) {
        usleep(1000);
        continue;
      }
      const int e = errno == EPIPE ? ECONNRESET : errno;
      return broken({e, e == ECONNRESET ? "the process is gone" : std::strerror(e)});
    }
    count -= part;
    if (!count) break;
    at += part * record_size;
  } while (true);

  Reply out;
  for (;;) {
    auto p = receive(fd_.n, deadline);
    if (!p) return broken(p.error());
    const migr_msg& h = p->head;
    if (h.type != (type | MIGR_REPLY) || h.seq != seq_)
      return broken({EPROTO, "answer of another type or number (type " + std::to_string(h.type) + ")"});
    if (h.status) {
      const std::string text = h.text[0] ? std::string(h.text) : std::string(std::strerror(h.status));
      return Error{h.status, what + ": " + text};
    }
    if (h.count) {
      if (out.record_size && out.record_size != h.record_size) return broken({EPROTO, "records of two sizes"});
      out.record_size = h.record_size;
      out.records.insert(out.records.end(), p->records.begin(), p->records.end());
      if (out.records.size() > kAnswerBytes) return broken({EMSGSIZE, "an answer of too many records"});
    }
    out.arg = h.arg;
    if (h.flags & MIGR_MORE) continue;
    switch (type) {
      case MIGR_MSG_SUSPEND: state_ = MIGR_PROC_SUSPENDED; break;
      case MIGR_MSG_FREEZE: state_ = MIGR_PROC_FROZEN; break;
      case MIGR_MSG_REBIND: generation_++; break;
      case MIGR_MSG_RESUME:
      case MIGR_MSG_ROLLBACK: state_ = MIGR_PROC_RUNNING; break;
      default: break;
    }
    return out;
  }
}

Result<ScanStats> ProcessSession::wait_threads_outside(int limit_ms) {
  if (!lives()) return Error{ESRCH, label() + " has ended"};
  const pid_t control = control_tid_ > 0 ? outer_tid(pid(), control_tid_) : 0;
  auto r = wait_until_outside(pid(), ranges_, control, Clock::now() + std::chrono::milliseconds(limit_ms));
  if (!r) return Error{r.error().code, label() + ": " + r.error().text};
  return r;
}

bool ProcessSession::ends() const {
  constexpr int kTries = 100, kStepUs = 10'000;
  for (int i = 0; i < kTries; i++, usleep(kStepUs))
    if (!process_lives(pid()) || !lives()) return true;
  return false;
}

void ProcessSession::close() { shutdown(fd_.n, SHUT_RDWR); }

SessionTable::~SessionTable() { stop(); }

Status SessionTable::start(const std::string& path, OnHello on_hello, OnQuestion on_question) {
  if (auto s = listener_.start(path); !s) return s;
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.n < 0) return sys_error("eventfd");
  on_hello_ = std::move(on_hello);
  on_question_ = std::move(on_question);
  thread_ = std::thread([this] { run(); });
  return {};
}

void SessionTable::stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  eventfd_write(wake_.n, 1);
  thread_.join();
  std::unique_lock lock(mutex_);
  waiting_.clear();
  changed_.wait(lock, [this] { return asking_.empty(); });
}

namespace {

// What a connection begins with, without taking it. 0: nothing of ours
std::uint16_t first_type(int fd) {
  migr_msg head{};
  return recv(fd, &head, sizeof head, MSG_PEEK | MSG_DONTWAIT) == sizeof head ? head.type : 0;
}

Result<Question> read_question(int fd, const Speaker& who, std::uint32_t& seq) {
  Question q;
  q.who = who;
  const auto deadline = Clock::now() + std::chrono::milliseconds(kHelloMs);  // of the whole
  for (bool more = true; more;) {
    auto p = receive(fd, deadline);
    if (!p) return p.error();
    if ((q.type && p->head.type != q.type) || (q.record_size && p->head.record_size != q.record_size)) return Error{EPROTO, "two questions in one"};
    q.type = p->head.type;
    q.arg = p->head.arg;
    q.record_size = p->head.record_size;
    seq = p->head.seq;
    q.records.insert(q.records.end(), p->records.begin(), p->records.end());
    if (q.records.size() > kQuestionBytes) return Error{EMSGSIZE, "a question of too many records"};
    more = p->head.flags & MIGR_MORE;
  }
  return q;
}

}  // namespace

bool SessionTable::may_ask(const User& user) const {
  const auto of_user = std::count_if(asking_.begin(), asking_.end(), [&](const User& u) { return u.counts_with(user); });
  return asking_.size() < kQuestions && of_user < kQuestions / 2;
}

// Of those that wait, the first whose user may ask by now. Who has waited too long asks again itself.
std::optional<SessionTable::Asker> SessionTable::next_asker() {
  std::erase_if(waiting_, [now = Clock::now()](const Asker& a) { return a.until <= now; });
  const auto next = std::find_if(waiting_.begin(), waiting_.end(), [this](const Asker& a) { return may_ask(a.who.user); });
  if (next == waiting_.end()) return std::nullopt;
  Asker out = std::move(*next);
  waiting_.erase(next);
  asking_.push_back(out.who.user);
  return out;
}

// A thread for it: an answer may come from another host.
void SessionTable::take_question(Fd fd, const Speaker& who) {
  if (!on_question_) return;
  std::unique_lock lock(mutex_);
  const auto of_user = std::count_if(waiting_.begin(), waiting_.end(), [&](const Asker& a) { return a.who.user.counts_with(who.user); });
  if (waiting_.size() >= kQuestionsWaiting || of_user >= kQuestionsWaiting / 2) {
    if (rarely_.due(who.user.text())) spdlog::warn("{} asks more than can be answered; process {} has to ask again", who.user.text(), who.pid);
    return;
  }
  waiting_.push_back({std::move(fd), who, Clock::now() + std::chrono::milliseconds(kWhereMs)});
  auto first = next_asker();
  if (!first) return;
  lock.unlock();
  const User user = first->who.user;
  try {
    std::thread([this, asker = std::move(first)]() mutable {
      while (asker) {
        answer(asker->fd, asker->who);
        std::lock_guard guard(mutex_);
        asking_.erase(std::find(asking_.begin(), asking_.end(), asker->who.user));
        asker = next_asker();
        changed_.notify_all();
      }
    }).detach();
  } catch (const std::system_error& e) {
    if (rarely_.due("no thread")) spdlog::error("no thread for what a process asks, which has to ask again: {}", e.what());
    lock.lock();
    asking_.erase(std::find(asking_.begin(), asking_.end(), user));
  }
}

void SessionTable::answer(const Fd& fd, const Speaker& who) {
  std::uint32_t seq = 0;
  auto q = read_question(fd.n, who, seq);
  Result<Answer> a = q ? who.lives() ? on_question_(*q) : Result<Answer>(Error{EPERM, "the process has ended"}) : q.error();
  migr_msg head{};
  head.version = MIGR_PROC_VERSION;
  head.type = q ? q->type | MIGR_REPLY : 0;
  head.seq = seq;
  if (a) {
    head.record_size = a->record_size;
    head.count = a->record_size ? static_cast<std::uint32_t>(a->records.size() / a->record_size) : 0;
  } else {
    head.status = a.error().code ? a.error().code : EIO;
    std::snprintf(head.text, sizeof head.text, "%s", a.error().text.c_str());
    if (head.status != ENOENT && rarely_.due(as_one_of_many(who, "asked"))) spdlog::warn("process {} has asked: {}", who.pid, a.error().text);
  }
  iovec iov[2] = {{&head, sizeof head}, {a ? a->records.data() : nullptr, a ? a->records.size() : 0}};
  msghdr m{};
  m.msg_iov = iov;
  m.msg_iovlen = head.count ? 2 : 1;
  (void)sendmsg(fd.n, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void SessionTable::run() {
  struct Greeting {
    Fd fd;
    Speaker who;
    Clock::time_point until;
  };
  std::vector<Greeting> greetings;
  while (!stop_) {
    std::vector<pollfd> fds = {{wake_.n, POLLIN, 0}, listener_.watched()};
    const auto known = all();
    for (const auto& s : known) fds.push_back({s->fd(), POLLRDHUP, 0});
    for (const auto& g : greetings) fds.push_back({g.fd.n, POLLIN, 0});
    if (poll(fds.data(), fds.size(), listener_.wait_ms(greetings.empty() ? -1 : 200)) < 0 && errno != EINTR) {
      spdlog::error("poll: {}", std::strerror(errno));
      return;
    }
    eventfd_t ignored;
    eventfd_read(wake_.n, &ignored);

    for (std::size_t i = 0; i < known.size(); i++) {
      if (!fds[2 + i].revents) continue;
      if (rarely_.due(as_one_of_many(known[i]->user(), known[i]->pid(), "disconnected"))) spdlog::info("{} disconnected", known[i]->label());
      std::lock_guard lock(mutex_);
      std::erase(sessions_, known[i]);
      changed_.notify_all();
    }
    for (std::size_t i = greetings.size(); i-- > 0;) {
      Greeting& g = greetings[i];
      const bool ready = fds[2 + known.size() + i].revents != 0;
      if (!ready && Clock::now() < g.until) continue;
      if (!ready) {
        if (rarely_.due("silent")) spdlog::warn("process {} connected and said nothing for {} ms", g.who.pid, kHelloMs);
      } else if (first_type(g.fd.n) >= MIGR_MSG_WHERE) {
        take_question(std::move(g.fd), g.who);
      } else if (auto s = ProcessSession::greet(std::move(g.fd), g.who, 0); !s) {
        refuse(g.who, s.error());
      } else if (auto may = may_have((*s)->instance(), (*s)->pid()); !may) {
        refuse(g.who, may.error());
      } else {
        add(*s);
      }
      greetings.erase(greetings.begin() + static_cast<long>(i));
    }
    if (fds[1].revents) {
      for (Fd fd; (fd = listener_.accept()).n >= 0;) {
        const auto who = speaker_of(fd.n);
        if (!who) {
          if (rarely_.due(who.error().text)) spdlog::warn("refused: {}", who.error().text);
          continue;
        }
        const auto now = all();  // those who have greeted meanwhile, too
        const auto of_user = std::count_if(now.begin(), now.end(), [&](const auto& s) { return s->user().counts_with(who->user); }) +
                             std::count_if(greetings.begin(), greetings.end(), [&](const Greeting& g) { return g.who.user.counts_with(who->user); });
        if (now.size() + greetings.size() >= most_ || static_cast<std::size_t>(of_user) >= most_ / 2) {
          refuse(*who, Error{EUSERS, "too many processes; process " + std::to_string(who->pid) + " of " + who->user.text() + " was refused"});
          continue;
        }
        greetings.push_back({std::move(fd), *who, Clock::now() + std::chrono::milliseconds(kHelloMs)});
      }
    }
  }
}

// It tries again, all the time.
void SessionTable::refuse(const Speaker& who, const Error& why) {
  if (rarely_.due(as_one_of_many(who, "refused, " + std::to_string(why.code)))) spdlog::warn("refused: {}", why.text);
  if (why.code == ECONNRESET) return;  // it has only looked whether we are there
  std::lock_guard lock(mutex_);
  if (refused_.size() >= kMaxSessions) std::erase_if(refused_, [](const auto& r) { return !r.second.who.lives(); });
  if (refused_.size() < kMaxSessions) refused_[who.pid] = {who, why.text};
}

std::string SessionTable::refusal(pid_t pid) const {
  std::lock_guard lock(mutex_);
  const auto r = refused_.find(pid);
  return r != refused_.end() && r->second.who.lives() ? r->second.why : "";
}

void SessionTable::add(std::shared_ptr<ProcessSession> s) {
  if (rarely_.due(as_one_of_many(s->user(), s->pid(), "connected")))
    spdlog::info("{} connected: instance {}, state {}, generation {}", s->label(), hex(s->instance()), s->state(), s->generation());
  {
    std::lock_guard lock(mutex_);
    // A process connects again after it lost us: the old connection is dead, and who waits for an answer there need not. Another
    // that has its instance has ended, or had never a right to it.
    std::erase_if(sessions_, [&](const auto& o) { return (o->pid() == s->pid() || o->instance() == s->instance()) && (o->close(), true); });
    sessions_.push_back(s);
    refused_.erase(s->pid());
    changed_.notify_all();
  }
  if (on_hello_) on_hello_(std::move(s));
}

void Turns::run(const std::shared_ptr<ProcessSession>& s, Work work) {
  {
    std::lock_guard lock(all_->mutex);
    const auto [at, none] = all_->next.try_emplace(s->pid());
    at->second = std::move(work);
    if (!none) return;
  }
  const auto turns = [all = all_, pid = s->pid()] {
    std::unique_lock lock(all->mutex);
    while (const Work next = std::exchange(all->next.at(pid), nullptr)) {
      lock.unlock();
      next();
      lock.lock();
    }
    all->next.erase(pid);
  };
  try {
    std::thread(turns).detach();
  } catch (const std::system_error& e) {
    spdlog::error("no thread for {}, which has to connect again: {}", s->label(), e.what());
    s->close();
    std::lock_guard lock(all_->mutex);
    all_->next.erase(s->pid());
  }
}

std::shared_ptr<ProcessSession> SessionTable::by_pid(pid_t pid) const {
  std::lock_guard lock(mutex_);
  const auto i = std::find_if(sessions_.begin(), sessions_.end(), [&](const auto& s) { return s->pid() == pid && s->lives(); });
  return i == sessions_.end() ? nullptr : *i;
}

Status SessionTable::may_have(const Instance& instance, pid_t pid) const {
  const std::string who = "process " + std::to_string(pid) + " (" + name_of(pid) + ") says that it is instance " + hex(instance);
  const auto known = known_ ? known_(instance, pid) : std::nullopt;
  if (known) return *known ? Status() : Status(Error{EPERM, who + ", which is that of a process that is being migrated"});
  for (const auto& s : all())
    if (s->instance() == instance && s->pid() != pid && process_lives(s->pid()) && s->lives()) return Error{EPERM, who + ", which is that of " + s->label()};
  return {};
}

std::vector<std::shared_ptr<ProcessSession>> SessionTable::all() const {
  std::lock_guard lock(mutex_);
  return sessions_;
}

Result<std::shared_ptr<ProcessSession>> SessionTable::wait_for(const Instance& instance, const Fits& fits,
                                                               int limit_ms) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<ProcessSession> found;
  const bool ok = changed_.wait_for(lock, std::chrono::milliseconds(limit_ms), [&] {
    for (const auto& s : sessions_)
      if (s->instance() == instance && s->lives() && (!fits || fits(*s))) found = s;
    return found != nullptr;
  });
  if (!ok) return Error{ETIMEDOUT, "the library of instance " + hex(instance) + " did not connect within " + std::to_string(limit_ms) + " ms"};
  return found;
}

Status SessionTable::wait_closed(const std::shared_ptr<ProcessSession>& s, int limit_ms) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::milliseconds(limit_ms),
                         [&] { return std::find(sessions_.begin(), sessions_.end(), s) == sessions_.end(); }))
    return Error{ETIMEDOUT, s->label() + " did not close its connection after FREEZE"};
  return {};
}

Status open_gate(const std::string& run_dir, const Instance& i) {
  const std::string path = run_dir + "/" + MIGR_PROC_GATE_PREFIX + hex(i);
  const Fd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  if (fd.n < 0) return sys_error("cannot make " + path);
  return {};
}

void close_gate(const std::string& run_dir, const Instance& i) {
  unlink((run_dir + "/" + MIGR_PROC_GATE_PREFIX + hex(i)).c_str());
}

void let_go(ProcessSession& s, const std::string& run_dir) {
  if (auto r = s.tell(MIGR_MSG_ROLLBACK, 0, kProcessMs); !r) spdlog::error("{}", r.error().text);
  else close_gate(run_dir, s.instance());
}

void take_in(ProcessSession& s, const std::string& run_dir) {
  Status told = s.ask<migr_key_map, migr_handle_map>(MIGR_MSG_REBIND, 0, {}, kProcessMs);
  if (told) told = s.tell(MIGR_MSG_RESUME, 0, kProcessMs);
  if (!told) spdlog::error("{}", told.error().text);
  else close_gate(run_dir, s.instance());
}

}  // namespace migr
