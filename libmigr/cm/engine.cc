/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "../../include/migr/gid.h"
#include "../../include/uapi/migr.h"
#include "../high_fd.h"
#include "../no_cancel.h"
#include "events.h"
#include "../quiet_thread.h"

namespace migr::cm {
namespace {

constexpr std::size_t kMaxCommand = 1024;
constexpr unsigned kResolveMs = 2000;
constexpr int kDeafMs = 100;
constexpr unsigned kLinkTries = 10;
constexpr unsigned kLinkRetryMs = 700;
constexpr std::uint64_t kUnheardMs = 60'000;  // longer than from a FREEZE to the partners' SWITCH
constexpr std::uint32_t kLinkBacklog = 1024;
constexpr int kMaxBacklog = 1024;  // the kernel's, where none is asked for
constexpr std::uint8_t kReliable = 2;  // enum ib_qp_type: RC
constexpr std::uint32_t kRejectedNoService = 8;  // IBTA: nobody listens there
constexpr std::size_t kEventWithoutEce = offsetof(rdma_ucm_event_resp, reserved);

/// Private data of a connection of ours. A refusal has numbers of zero; from an older library also an instance of zero.
struct Hello {
  char magic[8];
  std::uint8_t instance[16];  ///< of the process that is meant; that refuses
  std::uint32_t dest_pqpn;    ///< its QP
  std::uint32_t pqpn;         ///< the sender's
};
constexpr char kMagic[8] = {'m', 'i', 'g', 'r', '-', 'c', 'm', '1'};

std::uint64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000 + static_cast<std::uint64_t>(t.tv_nsec) / 1'000'000;
}

ssize_t fail(int error) {
  errno = error;
  return -1;
}

void add_token(int fd) {
  const std::uint64_t one = 1;
  (void)!syscall(SYS_write, fd, &one, sizeof(one));
}

/// All of them: CRIU restores no EFD_SEMAPHORE. A reader that has them already finds no event and reads again.
void take_tokens(int fd) {
  std::uint64_t one;
  iovec part{&one, sizeof(one)};
  (void)!preadv2(fd, &part, 1, -1, RWF_NOWAIT);
}

template <class T>
T load(const char* payload, std::size_t in) {
  T value{};
  memcpy(&value, payload, std::min(in, sizeof(value)));
  return value;
}

/// Where a command names its id. -1: it does not, or is none that we know
int id_offset(std::uint32_t command) {
  switch (command) {
    case RDMA_USER_CM_CMD_DESTROY_ID: return offsetof(rdma_ucm_destroy_id, id);
    case RDMA_USER_CM_CMD_BIND_IP: return offsetof(rdma_ucm_bind_ip, id);
    case RDMA_USER_CM_CMD_RESOLVE_IP: return offsetof(rdma_ucm_resolve_ip, id);
    case RDMA_USER_CM_CMD_RESOLVE_ROUTE: return offsetof(rdma_ucm_resolve_route, id);
    case RDMA_USER_CM_CMD_QUERY_ROUTE:
    case RDMA_USER_CM_CMD_QUERY: return offsetof(rdma_ucm_query, id);
    case RDMA_USER_CM_CMD_CONNECT: return offsetof(rdma_ucm_connect, id);
    case RDMA_USER_CM_CMD_LISTEN: return offsetof(rdma_ucm_listen, id);
    case RDMA_USER_CM_CMD_ACCEPT: return offsetof(rdma_ucm_accept, id);
    case RDMA_USER_CM_CMD_REJECT: return offsetof(rdma_ucm_reject, id);
    case RDMA_USER_CM_CMD_DISCONNECT: return offsetof(rdma_ucm_disconnect, id);
    case RDMA_USER_CM_CMD_INIT_QP_ATTR: return offsetof(rdma_ucm_init_qp_attr, id);
    case RDMA_USER_CM_CMD_SET_OPTION: return offsetof(rdma_ucm_set_option, id);
    case RDMA_USER_CM_CMD_NOTIFY: return offsetof(rdma_ucm_notify, id);
    case RDMA_USER_CM_CMD_JOIN_IP_MCAST: return offsetof(rdma_ucm_join_ip_mcast, id);
    case RDMA_USER_CM_CMD_JOIN_MCAST: return offsetof(rdma_ucm_join_mcast, id);
    case RDMA_USER_CM_CMD_MIGRATE_ID: return offsetof(rdma_ucm_migrate_id, id);
    case RDMA_USER_CM_CMD_BIND: return offsetof(rdma_ucm_bind, id);
    case RDMA_USER_CM_CMD_RESOLVE_ADDR: return offsetof(rdma_ucm_resolve_addr, id);
    default: return -1;
  }
}

bool anywhere(const std::vector<char>& address) {
  sockaddr_storage a{};
  memcpy(&a, address.data(), std::min(address.size(), sizeof(a)));
  if (a.ss_family == AF_INET) {
    const std::uint32_t ip = ntohl(reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr);
    return ip == INADDR_ANY || ip >> 24 == 127;
  }
  if (a.ss_family == AF_INET6) {
    const in6_addr& ip = reinterpret_cast<const sockaddr_in6&>(a).sin6_addr;
    return IN6_IS_ADDR_UNSPECIFIED(&ip) || IN6_IS_ADDR_LOOPBACK(&ip);
  }
  return false;
}

/// Of a connection over which nothing is ever sent.
rdma_ucm_conn_param idle_connection(std::uint32_t pqpn) {
  rdma_ucm_conn_param p{};
  p.qp_num = pqpn;
  p.responder_resources = p.initiator_depth = 1;
  p.retry_count = p.rnr_retry_count = 7;
  p.valid = 1;
  return p;
}

rdma_ucm_event_resp plain_event(std::uint32_t event) {
  rdma_ucm_event_resp e{};
  e.event = event;
  return e;
}

}  // namespace

Engine::Engine(Kernel kernel) : kernel_(std::move(kernel)) {}

Engine::~Engine() {
  std::unique_lock guard(mutex_);
  if (started_) {
    ending_ = true;
    wake();
    guard.unlock();
    pthread_join(thread_, nullptr);
  }
  close_own(real_fd_);
  close_own(wake_fd_);
}

// The lock may be held by a thread that the child does not have.
void Engine::abandon() {
  close_own(real_fd_);
  close_own(wake_fd_);
}

/* ---- the thread ------------------------------------------------------------------ */

void Engine::wake() { add_token(wake_fd_); }

/// What the application wants waits while we are frozen.
Engine::Job* Engine::next_job() {
  std::deque<Job*>& from = !control_jobs_.empty() || frozen_ ? control_jobs_ : jobs_;
  if (from.empty()) return nullptr;
  Job* job = from.front();
  from.pop_front();
  return job;
}

void* Engine::start(void* self) {
  static_cast<Engine*>(self)->run();
  return nullptr;
}

void Engine::run() {
  std::unique_lock guard(mutex_);
  bool deaf = false;
  while (!ending_) {
    while (Job* job = next_job()) {
      errno = 0;
      job->result = job->run();
      job->error = errno;
      job->done = true;
      done_.notify_all();
    }
    close_unused();
    if (channels_.empty() && real_fd_ < 0 && jobs_.empty() && control_jobs_.empty()) {  // who opens the next file may have other credentials, and starts a thread that has them
      started_ = false;
      close_own(std::exchange(wake_fd_, -1));
      pthread_detach(pthread_self());
      done_.notify_all();
      return;
    }
    int timeout = -1;
    if (!frozen_ && real_fd_ >= 0) {
      if (const bool before = std::exchange(deaf, !pump()); deaf && !before)
        fprintf(stderr, "libmigr: librdmacm's events cannot be read: %s\n", strerror(errno));
      if (deaf) timeout = kDeafMs;
      const std::uint64_t now = now_ms();
      for (std::size_t i = 0; i < links_.size(); i++) {
        Link& link = *links_[i];
        if (link.k || link.held) continue;
        if (link.next_ms <= now) {
          const std::size_t before = links_.size();
          start_link(link);
          if (links_.size() != before) i--;  // given up
          continue;
        }
        const int wait = static_cast<int>(link.next_ms - now);
        timeout = timeout < 0 ? wait : std::min(timeout, wait);
      }
    }
    settled_.notify_all();
    if (unused()) continue;
    pollfd fds[2] = {{wake_fd_, POLLIN, 0}, {real_fd_, POLLIN, 0}};
    const nfds_t n = !frozen_ && real_fd_ >= 0 && !deaf ? 2 : 1;
    guard.unlock();
    poll(fds, n, timeout);
    take_tokens(wake_fd_);
    guard.lock();
  }
}

/// Runs `what` under the lock, in our thread where the kernel would not heed another: after a restore. Before, in the
/// caller's, whose number `rdma resource` shows with what it makes. errno is its.
ssize_t Engine::in_thread(std::unique_lock<std::mutex>& guard, std::function<ssize_t()> what, bool control) {
  const NoCancel no_cancel;
  if (!control && lives_ == 1) {
    errno = 0;
    const ssize_t result = what();
    const int error = errno;
    wake();  // what it waits for may be another file, or settled
    errno = error;
    return result;
  }
  Job job;
  job.run = std::move(what);
  (control ? control_jobs_ : jobs_).push_back(&job);
  wake();
  done_.wait(guard, [&] { return job.done; });
  errno = job.error;
  return job.result;
}

bool Engine::ensure_open(std::unique_lock<std::mutex>& guard) {
  if (!started_) {
    if (wake_fd_ < 0) wake_fd_ = to_high_fd(eventfd(0, EFD_CLOEXEC));
    if (wake_fd_ < 0) return false;
    if (const int error = start_quiet_thread(thread_, start, this, "migr-cm")) {
      errno = error;
      return false;
    }
    started_ = true;
  }
  if (real_fd_ >= 0) return true;
  return in_thread(guard, [this] {
    const int fd = kernel_.open();
    if (fd < 0) return fail(-fd);
    real_fd_ = fd;
    changes_++;
    done_.notify_all();  // who has closed the last channel waits for the thread's end, which does not come now
    return ssize_t{0};
  }) == 0;
}

/// One command to the kernel. Its response goes to `response`, where it has one.
template <class Command>
bool Engine::say(std::uint32_t number, Command& command, void* response, std::size_t response_bytes) {
  struct {
    rdma_ucm_cmd_hdr header;
    Command body;
  } packet;
  static_assert(sizeof(packet) == sizeof(rdma_ucm_cmd_hdr) + sizeof(Command));
  packet.header = {number, sizeof(Command), static_cast<std::uint16_t>(response_bytes)};
  if constexpr (requires { command.response; }) command.response = reinterpret_cast<std::uintptr_t>(response);
  packet.body = command;
  return kernel_.write(real_fd_, &packet, sizeof(packet)) == static_cast<ssize_t>(sizeof(packet));
}

/* ---- channels and commands -------------------------------------------------------- */

int Engine::open_channel(int flags) {
  const NoCancel no_cancel;
  std::unique_lock guard(mutex_);
  thawed_.wait(guard, [this] {
    if (frozen_ || (held_ && channels_.empty())) return false;  // a first one changes what DESCRIBE tells
    if (!unused()) return true;
    wake();  // the file is closed first, as our thread may have other credentials
    return false;
  });
  opening_++;
  const bool opened = ensure_open(guard);
  opening_--;
  if (!opened) return -1;
  const int fd = eventfd(0, (flags & O_CLOEXEC ? EFD_CLOEXEC : 0) | (flags & O_NONBLOCK ? EFD_NONBLOCK : 0));
  if (fd < 0) return -1;
  channels_[fd] = std::make_unique<Channel>(Channel{fd, {}, {}});
  return fd;
}

/// The process has no channel any more: neither has the kernel one of it, but for what is still to be told, and what DESCRIBE has told.
bool Engine::unused() const { return !opening_ && channels_.empty() && links_.empty() && real_fd_ >= 0 && !frozen_ && !held_; }

void Engine::close_unused() {
  if (!unused()) return;
  by_uid_.clear();
  listener_ = nullptr;
  port_ = 0;
  changes_++;
  close_own(std::exchange(real_fd_, -1));
  thawed_.notify_all();  // who opens the next one waits for that
}

bool Engine::close_channel(int fd) {
  const NoCancel no_cancel;
  std::unique_lock guard(mutex_);
  thawed_.wait(guard, [this] { return !frozen_; });
  if (!channels_.contains(fd)) return false;
  in_thread(guard, [&] {
    const auto found = channels_.find(fd);
    if (found == channels_.end()) return ssize_t{0};  // another thread has closed it, too
    Channel* channel = found->second.get();
    for (bool more = true; more;) {
      more = false;
      for (const auto& [handle, id] : ids_)
        if (id->channel == channel) {
          remove(*id);  // maybe others with it
          more = true;
          break;
        }
    }
    channels_.erase(found);
    close_unused();
    return ssize_t{0};
  });
  done_.wait(guard, [this] { return !started_ || real_fd_ >= 0 || !channels_.empty(); });
  return true;
}

ssize_t Engine::command(int fd, const void* buf, std::size_t count) {
  rdma_ucm_cmd_hdr header;
  if (count < sizeof(header) || count > kMaxCommand) return fail(EINVAL);
  memcpy(&header, buf, sizeof(header));
  if (header.in + sizeof(header) > count) return fail(EINVAL);
  const char* payload = static_cast<const char*>(buf) + sizeof(header);
  if (header.cmd == RDMA_USER_CM_CMD_GET_EVENT) {
    const ssize_t result = get_event(fd, payload, header.in, header.out);
    return result < 0 ? result : static_cast<ssize_t>(count);
  }
  char copy[kMaxCommand];
  memcpy(copy, buf, count);
  char* body = copy + sizeof(header);
  std::uint32_t vqpn = 0;
  const std::size_t qpn_at = header.cmd == RDMA_USER_CM_CMD_CONNECT  ? offsetof(rdma_ucm_connect, conn_param.qp_num)
                             : header.cmd == RDMA_USER_CM_CMD_ACCEPT ? offsetof(rdma_ucm_accept, conn_param.qp_num)
                                                                     : kMaxCommand;
  if (header.in >= qpn_at + sizeof(vqpn)) memcpy(&vqpn, body + qpn_at, sizeof(vqpn));
  QpName qp{nullptr, vqpn};
  const NoCancel no_cancel;
  std::unique_lock guard(mutex_);
  const auto waits = [&] { return frozen_ || (held_ && begins(header.cmd, payload, header.in)); };
  for (std::uint64_t of = 0; of != lives_ || waits();) {
    thawed_.wait(guard, [&] { return !waits(); });
    of = lives_;
    if (!vqpn || !physical_qpn) break;
    const Id* const id = meant_by(header.cmd, payload, header.in);
    const std::uint64_t node_guid = id ? id->node_guid : 0;
    guard.unlock();  // its lock is never taken under ours
    const std::uint32_t pqpn = physical_qpn(qp, node_guid);
    memcpy(body + qpn_at, &pqpn, sizeof(pqpn));
    guard.lock();
  }
  if (!channels_.contains(fd)) return fail(EACCES);  // a forked child's; or another thread has closed it, and maybe there is no thread of ours any more
  const ssize_t result = in_thread(guard, [&] {
    const auto found = channels_.find(fd);  // such a close may have come before it
    return found == channels_.end() ? fail(EACCES) : dispatch(*found->second, copy, count, qp);
  });
  if (header.cmd == RDMA_USER_CM_CMD_DISCONNECT && result >= 0) end_at_once(guard, load<rdma_ucm_disconnect>(payload, header.in).id);
  if (header.cmd == RDMA_USER_CM_CMD_INIT_QP_ATTR && result >= 0 && known_gid && header.out >= sizeof(ib_uverbs_qp_attr)) {
    // librdmacm gives it to ibv_modify_qp(), as an application would.
    const Id* const id = meant_by(header.cmd, payload, header.in);
    const std::uint64_t node_guid = id ? id->node_guid : 0;
    guard.unlock();
    auto* const attr = reinterpret_cast<ib_uverbs_qp_attr*>(load<rdma_ucm_init_qp_attr>(payload, header.in).response);
    if (attr->ah_attr.is_global) attr->ah_attr.grh.sgid_index = known_gid(node_guid, attr->ah_attr.port_num, attr->ah_attr.grh.sgid_index);
  }
  return result;
}

/// The id that a command is about; null: there is none of that number, or none in it.
Engine::Id* Engine::meant_by(std::uint32_t command, const char* payload, std::size_t in) {
  const int at = id_offset(command);
  return at >= 0 && in >= at + sizeof(std::uint32_t) ? find(load<std::uint32_t>(payload + at, sizeof(std::uint32_t))) : nullptr;
}

/// Whether it would leave something half made for a while, or change what DESCRIBE tells.
bool Engine::begins(std::uint32_t command, const char* payload, std::size_t in) {
  const Id* const id = meant_by(command, payload, in);
  switch (command) {
    case RDMA_USER_CM_CMD_RESOLVE_IP:
    case RDMA_USER_CM_CMD_RESOLVE_ADDR: return id && (id->state == State::kIdle || id->state == State::kBound);
    case RDMA_USER_CM_CMD_DISCONNECT: return id && id->state == State::kConnected;
    case RDMA_USER_CM_CMD_BIND_IP:
    case RDMA_USER_CM_CMD_BIND:
    case RDMA_USER_CM_CMD_LISTEN: return id && half_made().empty();  // else who waits may be the one that completes it
    default: return false;
  }
}

/// Where the kernel's message would not get to the other end neither would its answer come: the kernel waits for a minute.
void Engine::end_at_once(std::unique_lock<std::mutex>& guard, std::uint32_t handle) {
  Id* id = find(handle);
  const QpName qp = id && id->state == State::kDisconnecting ? id->qp : QpName{};
  if (!qp.vqpn || !tell_end) return;
  guard.unlock();
  const bool told = tell_end(qp);
  guard.lock();
  id = told ? find(handle) : nullptr;
  if (id && id->state == State::kDisconnecting) deliver_end(*id);
}

Engine::Id* Engine::find(std::uint32_t handle) {
  const auto found = ids_.find(handle);
  return found == ids_.end() ? nullptr : found->second.get();
}

/// @param buf   a copy of the command, in which the kernel's names take the place of ours
/// @param qp    the QP that it names
ssize_t Engine::dispatch(Channel& channel, char* buf, std::size_t count, QpName qp) {
  const auto header = load<rdma_ucm_cmd_hdr>(buf, count);
  char* const payload = buf + sizeof(header);
  if (header.cmd == RDMA_USER_CM_CMD_CREATE_ID) {
    if (header.out < sizeof(rdma_ucm_create_id_resp)) return fail(ENOSPC);
    return create_id(channel, payload, header.in) < 0 ? -1 : static_cast<ssize_t>(count);
  }
  if (header.cmd == RDMA_USER_CM_CMD_LEAVE_MCAST) {
    const auto leave = load<rdma_ucm_destroy_id>(payload, header.in);
    if (kernel_.write(real_fd_, buf, count) < 0) return -1;
    if (const auto group = groups_.find(leave.id); group != groups_.end()) {
      Group* g = &group->second;
      unqueue(*g->id->channel, [g](const Waiting& w) { return w.group == g; });
      reinterpret_cast<rdma_ucm_destroy_id_resp*>(leave.response)->events_reported = g->reported;
      groups_.erase(group);
    }
    return static_cast<ssize_t>(count);
  }
  const int at = id_offset(header.cmd);
  if (at < 0) return fail(ENOSYS);  // in one that we do not know the kernel would take a number of ours for its own
  if (header.in < static_cast<std::size_t>(at) + sizeof(std::uint32_t)) return fail(EINVAL);
  std::uint32_t handle;
  memcpy(&handle, payload + at, sizeof(handle));
  Id* id = find(handle);
  if (!id) return fail(ENOENT);
  if (id->channel != &channel && header.cmd != RDMA_USER_CM_CMD_MIGRATE_ID) return fail(EINVAL);
  switch (header.cmd) {
    case RDMA_USER_CM_CMD_DESTROY_ID:
      if (header.out < sizeof(rdma_ucm_destroy_id_resp)) return fail(ENOSPC);
      return destroy_id(*id, load<rdma_ucm_destroy_id>(payload, header.in).response) < 0 ? -1 : static_cast<ssize_t>(count);
    case RDMA_USER_CM_CMD_MIGRATE_ID:
      if (header.out < sizeof(rdma_ucm_migrate_resp)) return fail(ENOSPC);
      return migrate_id(*id, channel, payload) < 0 ? -1 : static_cast<ssize_t>(count);
    case RDMA_USER_CM_CMD_DISCONNECT:
      return disconnect(*id, count);
    default:
      break;
  }
  if (!id->k) {  // of before a migration; of its connection there is nothing to ask the kernel any more
    if (header.cmd == RDMA_USER_CM_CMD_SET_OPTION || header.cmd == RDMA_USER_CM_CMD_NOTIFY) return static_cast<ssize_t>(count);
    return fail(EINVAL);
  }
  const auto accept = load<rdma_ucm_accept>(payload, header.in);
  memcpy(payload + at, &id->k->number, sizeof(id->k->number));
  if (header.cmd == RDMA_USER_CM_CMD_ACCEPT && header.in >= sizeof(std::uint64_t))
    memcpy(payload + offsetof(rdma_ucm_accept, uid), &id->k->uid, sizeof(id->k->uid));
  // Events may be read before we know the answer: first the state that they end.
  const State before = id->state;
  switch (header.cmd) {
    case RDMA_USER_CM_CMD_RESOLVE_IP:
    case RDMA_USER_CM_CMD_RESOLVE_ADDR:
    case RDMA_USER_CM_CMD_RESOLVE_ROUTE: id->state = State::kResolving; break;
    case RDMA_USER_CM_CMD_CONNECT: id->state = State::kConnecting; break;
    case RDMA_USER_CM_CMD_ACCEPT:
      if (before == State::kRequested) id->state = State::kAccepting;
      break;
    default: break;
  }
  const std::uint64_t uid_before = id->app_uid;
  if (header.cmd == RDMA_USER_CM_CMD_ACCEPT && accept.conn_param.valid) id->app_uid = accept.uid;
  if (kernel_.write(real_fd_, buf, count) < 0) {
    const int error = errno;
    id->state = before;
    id->app_uid = uid_before;
    return fail(error);
  }
  if (qp.vqpn) {
    id->qp = qp;
    std::erase_if(without_id_, [&](const auto& w) { return w.first == qp; });
  }
  note_done(*id, header.cmd, payload, header.in);
  const auto query = load<rdma_ucm_query>(payload, header.in);
  if (header.cmd == RDMA_USER_CM_CMD_QUERY_ROUTE)
    name_device(*id, query.response, header.out, offsetof(rdma_ucm_query_route_resp, ibdev_index));
  if (header.cmd == RDMA_USER_CM_CMD_QUERY && query.option != RDMA_USER_CM_QUERY_PATH)
    name_device(*id, query.response, header.out, offsetof(rdma_ucm_query_addr_resp, ibdev_index));
  return static_cast<ssize_t>(count);
}

/// A command that the kernel has carried out.
void Engine::note_done(Id& id, std::uint32_t command, const char* payload, std::size_t in) {
  switch (command) {
    case RDMA_USER_CM_CMD_BIND_IP:
    case RDMA_USER_CM_CMD_BIND:
      if (id.state == State::kIdle) id.state = State::kBound;
      changes_++;
      return learn_address(id);
    case RDMA_USER_CM_CMD_LISTEN:
      id.backlog = static_cast<int>(load<rdma_ucm_listen>(payload, in).backlog);
      id.state = State::kListening;
      changes_++;
      return learn_address(id);
    case RDMA_USER_CM_CMD_ACCEPT:
      if (id.state == State::kConnecting) id.state = State::kConnected;  // the active side's answer to the answer
      return;
    case RDMA_USER_CM_CMD_REJECT:
      id.state = State::kEnded;
      id.qp = {};
      return;
    case RDMA_USER_CM_CMD_SET_OPTION: {
      const auto option = load<rdma_ucm_set_option>(payload, in);
      std::vector<char> kept(sizeof(option) + option.optlen);
      memcpy(kept.data(), &option, sizeof(option));
      memcpy(kept.data() + sizeof(option), reinterpret_cast<const void*>(option.optval), option.optlen);
      id.options.push_back(std::move(kept));
      return;
    }
    case RDMA_USER_CM_CMD_JOIN_IP_MCAST:
    case RDMA_USER_CM_CMD_JOIN_MCAST: {
      const auto response = load<std::uint64_t>(payload, in);  // first in both
      const std::uint32_t number = reinterpret_cast<const rdma_ucm_create_id_resp*>(response)->id;
      groups_[number] = {&id};
      changes_++;
      return;
    }
    default:
      return;
  }
}

/// In the answer to a query, the device. A short answer has no index.
void Engine::name_device(Id& id, std::uint64_t response, std::size_t bytes, std::size_t index_at) {
  std::uint64_t guid;
  std::uint32_t index = 0;
  if (bytes < sizeof(guid)) return;
  char* const at = reinterpret_cast<char*>(response);
  const bool indexed = bytes >= index_at + sizeof(index);
  memcpy(&guid, at, sizeof(guid));
  if (indexed) memcpy(&index, at + index_at, sizeof(index));
  if (device_of_birth) device_of_birth(guid, index);
  if (guid) id.node_guid = guid;
  memcpy(at, &guid, sizeof(guid));
  if (indexed) memcpy(at + index_at, &index, sizeof(index));
}

bool Engine::query_address(const KernelId& k, rdma_ucm_query_addr_resp& out) {
  rdma_ucm_query query{};
  query.id = k.number;
  query.option = RDMA_USER_CM_QUERY_ADDR;
  return say(RDMA_USER_CM_CMD_QUERY, query, &out, sizeof(out));
}

/// Of its device, at birth; 0: not known.
std::uint64_t Engine::node_guid(const KernelId& k) {
  rdma_ucm_query_addr_resp response{};
  if (!query_address(k, response)) return 0;
  std::uint64_t guid = response.node_guid;
  std::uint32_t index = 0;
  if (device_of_birth) device_of_birth(guid, index);
  return guid;
}

bool Engine::bind(const KernelId& k, const void* address, std::size_t bytes) {
  rdma_ucm_bind bind{};
  bind.id = k.number;
  bind.addr_size = static_cast<std::uint16_t>(bytes);
  memcpy(&bind.addr, address, std::min(bytes, sizeof(bind.addr)));
  return say(RDMA_USER_CM_CMD_BIND, bind);
}

/// At addresses of both versions, where that can be.
bool Engine::bind_anywhere(const KernelId& k) {
  const int one_version = 0;  // whatever net.ipv6.bindv6only says
  rdma_ucm_set_option set{};
  set.id = k.number;
  set.optval = reinterpret_cast<std::uintptr_t>(&one_version);
  set.level = RDMA_OPTION_ID;
  set.optname = RDMA_OPTION_ID_AFONLY;
  set.optlen = sizeof(one_version);
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  if (say(RDMA_USER_CM_CMD_SET_OPTION, set) && bind(k, &any, sizeof(any))) return true;
  sockaddr_in any_v4{};
  any_v4.sin_family = AF_INET;
  return bind(k, &any_v4, sizeof(any_v4));
}

bool Engine::listen(const KernelId& k, std::uint32_t backlog) {
  rdma_ucm_listen listen{k.number, backlog};
  return say(RDMA_USER_CM_CMD_LISTEN, listen);
}

void Engine::learn_address(Id& id) {
  rdma_ucm_query_addr_resp response{};
  if (!query_address(*id.k, response)) return;
  const char* bytes = reinterpret_cast<const char*>(&response.src_addr);
  id.address.assign(bytes, bytes + std::min<std::size_t>(response.src_size, sizeof(response.src_addr)));
}

Engine::KernelId* Engine::new_kernel_id(std::uint32_t number, Id* id) {
  const std::uint64_t uid = next_uid_++;
  auto& slot = by_uid_[uid];
  slot = std::make_unique<KernelId>();
  slot->uid = uid;
  slot->number = number;
  slot->id = id;
  return slot.get();
}

/// @return null with errno: the kernel would not
Engine::KernelId* Engine::make_kernel_id(std::uint16_t port_space, std::uint8_t qp_type, Id* id) {
  KernelId* k = new_kernel_id(0, id);
  rdma_ucm_create_id create{};
  rdma_ucm_create_id_resp response{};
  create.uid = k->uid;
  create.ps = port_space;
  create.qp_type = qp_type;
  if (!say(RDMA_USER_CM_CMD_CREATE_ID, create, &response, sizeof(response))) {
    const int error = errno;
    by_uid_.erase(k->uid);
    errno = error;
    return nullptr;
  }
  k->number = response.id;
  return k;
}

/// Destroys it in the kernel; what the kernel still had to say of it is gone.
void Engine::drop(KernelId*& k) {
  if (!k) return;
  rdma_ucm_destroy_id destroy{};
  rdma_ucm_destroy_id_resp response{};
  destroy.id = k->number;
  say(RDMA_USER_CM_CMD_DESTROY_ID, destroy, &response, sizeof(response));
  by_uid_.erase(k->uid);
  k = nullptr;
}

ssize_t Engine::create_id(Channel& channel, const char* payload, std::size_t in) {
  const auto create = load<rdma_ucm_create_id>(payload, in);
  auto id = std::make_unique<Id>();
  KernelId* k = make_kernel_id(create.ps, create.qp_type, id.get());
  if (!k) return -1;
  id->handle = static_cast<std::uint32_t>(k->uid);
  id->app_uid = create.uid;
  id->channel = &channel;
  id->k = k;
  id->port_space = create.ps;
  id->qp_type = create.qp_type;
  reinterpret_cast<rdma_ucm_create_id_resp*>(create.response)->id = id->handle;
  ids_[id->handle] = std::move(id);
  return 0;
}

void Engine::unqueue(Channel& channel, const std::function<bool(const Waiting&)>& which, Channel* to) {
  std::vector<Waiting> taken;
  for (auto* const queue : {&channel.events, &channel.withheld})
    std::erase_if(*queue, [&](const Waiting& w) {
      if (!which(w)) return false;
      taken.push_back(w);
      return true;
    });
  if (!taken.empty() && channel.events.empty()) take_tokens(channel.fd);
  for (const Waiting& w : taken) {
    if (to) {
      if (w.request) w.request->channel = to;
      put(*to, w);
    } else if (w.request) {
      remove(*w.request);
    }
  }
}

/// They go on, to tell the other end. While that moves the kernel does not, so RESUME will begin one.
void Engine::let_links_go(const Id& id) {
  for (const auto& link : links_)
    if (link->id == &id) link->id = nullptr;
  if (!id.held || (id.state != State::kConnected && id.state != State::kDisconnecting)) return;
  for (const Path& path : moving_) {
    if (path.qp != id.qp || has_link(path.qp)) continue;
    links_.push_back(std::make_unique<Link>(Link{path, 0, nullptr}));
    links_.back()->held = true;
  }
}

bool Engine::has_link(QpName qp) {
  return std::any_of(links_.begin(), links_.end(), [&](const auto& link) { return link->path.qp == qp; });
}

/// Not long ago: its partner may have been frozen, and not have heard of it.
bool Engine::lost_its_id(QpName qp) {
  return std::ranges::any_of(without_id_, [&](const auto& w) { return w.first == qp && now_ms() - w.second < kUnheardMs; });
}

void Engine::remove(Id& id) {
  let_links_go(id);
  if (id.k && id.qp.vqpn && !id.held && (id.state == State::kConnected || id.state == State::kDisconnecting)) {
    while (!without_id_.empty() && now_ms() - without_id_.front().second >= kUnheardMs) without_id_.pop_front();
    without_id_.emplace_back(id.qp, now_ms());
  }
  drop(id.k);
  for (auto* const queue : {&id.channel->events, &id.channel->withheld})
    for (Waiting& w : *queue)
      if (w.request == &id) w.owner = &id, w.request = nullptr;  // nobody will know of it
  unqueue(*id.channel, [&](const Waiting& w) { return w.owner == &id; });
  std::erase_if(groups_, [&](const auto& g) { return g.second.id == &id; });
  ids_.erase(id.handle);
}

ssize_t Engine::destroy_id(Id& id, std::uint64_t response) {
  const std::uint32_t reported = id.reported;
  remove(id);
  reinterpret_cast<rdma_ucm_destroy_id_resp*>(response)->events_reported = reported;
  return 0;
}

/// To the channel that the command was written to, from the one that it names.
ssize_t Engine::migrate_id(Id& id, Channel& to, const char* payload) {
  const auto migrate = load<rdma_ucm_migrate_id>(payload, sizeof(rdma_ucm_migrate_id));
  const auto from = channels_.find(static_cast<int>(migrate.fd));
  if (from == channels_.end() || id.channel != from->second.get()) return fail(EINVAL);
  if (id.channel != &to) {
    unqueue(*id.channel, [&](const Waiting& w) { return w.owner == &id; }, &to);
    id.channel = &to;
  }
  reinterpret_cast<rdma_ucm_migrate_resp*>(migrate.response)->events_reported = id.reported;
  return 0;
}

/// The kernel's part is rdma_disconnect(). Without a kernel's id we do what it would have done.
ssize_t Engine::disconnect(Id& id, std::size_t count) {
  const auto done = static_cast<ssize_t>(count);
  if (id.k) {
    rdma_ucm_disconnect command{id.k->number};
    if (!say(RDMA_USER_CM_CMD_DISCONNECT, command)) return -1;
    if (id.state == State::kConnected) id.state = State::kDisconnecting;
    return done;
  }
  if (id.state != State::kConnected) return done;
  const bool connects = std::ranges::any_of(links_, [&](const auto& link) { return link->id == &id; });
  if (connects) {  // who hears that it has ended may exit, and what tells the other end goes with the process: link_over()
    id.state = State::kDisconnecting;
    return done;
  }
  let_links_go(id);
  deliver_end(id);
  return done;
}

ssize_t Engine::get_event(int fd, const char* payload, std::size_t in, std::size_t out) {
  if (out < kEventWithoutEce) return fail(ENOSPC);
  if (in < sizeof(rdma_ucm_get_event)) return fail(EINVAL);
  const auto response = load<rdma_ucm_get_event>(payload, in).response;
  for (bool took = false;; took = true) {
    {
      const NoCancel no_cancel;
      std::lock_guard guard(mutex_);
      const auto found = channels_.find(fd);
      if (found == channels_.end()) return fail(EBADF);
      Channel& channel = *found->second;
      if (!channel.events.empty()) {
        const Waiting waiting = channel.events.front();
        channel.events.pop_front();
        if (channel.events.empty())
          take_tokens(fd);
        else if (took)
          add_token(fd);
        waiting.owner->reported++;
        if (waiting.group) waiting.group->reported++;
        memcpy(reinterpret_cast<void*>(response), &waiting.event, std::min(out, sizeof(waiting.event)));
        return 0;
      }
    }
    std::uint64_t tokens;
    // The kernel blocks here, too: interruptible, restarted and cancellable in the same way.
    if (::read(fd, &tokens, sizeof(tokens)) < 0) return -1;
  }
}

/* ---- events ------------------------------------------------------------------------ */

/// @return false: there may be more, but the kernel does not tell
bool Engine::pump() {
  for (;;) {
    rdma_ucm_event_resp event{};
    rdma_ucm_get_event get{};
    if (!say(RDMA_USER_CM_CMD_GET_EVENT, get, &event, sizeof(event))) return errno == EAGAIN;
    handle(event);
  }
}

void Engine::put(Channel& channel, const Waiting& waiting) {
  const auto connecting = [this] { return std::ranges::any_of(ids_, [](const auto& i) { return i.second->state == State::kConnecting; }); };
  if (held_ && waiting.request && !connecting()) return channel.withheld.push_back(waiting);
  channel.events.push_back(waiting);
  add_token(channel.fd);
}

void Engine::queue(Id& owner, const rdma_ucm_event_resp& event, Id* request, Group* group) {
  put(*owner.channel, {event, &owner, request, group});
}

/// Of requests that nobody has read. The kernel counts those that we have not, and refuses what is above.
bool Engine::is_full(const Id& listening) const {
  const auto of_it = [&](const Waiting& w) { return w.owner == &listening && w.request; };
  const auto unread = std::ranges::count_if(listening.channel->events, of_it) + std::ranges::count_if(listening.channel->withheld, of_it);
  return unread >= (listening.backlog > 0 ? listening.backlog : kMaxBacklog);
}

void Engine::handle(rdma_ucm_event_resp& event) {
  if (event.event == RDMA_CM_EVENT_MULTICAST_JOIN || event.event == RDMA_CM_EVENT_MULTICAST_ERROR) {
    const auto group = groups_.find(event.id);
    if (group != groups_.end()) queue(*group->second.id, event, nullptr, &group->second);
    return;
  }
  const auto found = by_uid_.find(event.uid);
  KernelId* k = found == by_uid_.end() ? nullptr : found->second.get();
  if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST) {
    if (k && k == listener_) return answer_link(event);
    KernelId* fresh = new_kernel_id(event.id, nullptr);
    if (!k || !k->id) return drop(fresh);
    Id& listening = *k->id;
    if (is_full(listening)) return drop(fresh);
    auto id = std::make_unique<Id>();
    id->handle = static_cast<std::uint32_t>(fresh->uid);
    id->app_uid = 0;  // ACCEPT tells
    id->channel = listening.channel;
    id->k = fresh;
    id->port_space = listening.port_space;
    id->qp_type = listening.qp_type;
    id->state = State::kRequested;
    fresh->id = id.get();
    event.id = id->handle;
    event.uid = listening.app_uid;
    queue(listening, event, id.get(), nullptr);
    ids_[id->handle] = std::move(id);
    return;
  }
  if (!k) return;
  if (k->link) return link_event(*k->link, event);
  if (!k->id || (k->quiet && set_up(*k, event.event))) return;
  const bool ends = event.event == RDMA_CM_EVENT_DISCONNECTED || event.event == RDMA_CM_EVENT_TIMEWAIT_EXIT;
  if (ends && k->id->end_told) return;
  if (k->id->held && ends)
    k->id->deferred.push_back(event);
  else
    deliver(*k->id, event);
}

/// What tells of the making of `k`: to the application its connection has stood all the time. @return it does
bool Engine::set_up(KernelId& k, std::uint32_t event) {
  switch (event) {
    case RDMA_CM_EVENT_ESTABLISHED:
      k.established = true;
      return true;
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
      if (k.established) return false;
      return link_lost(*k.id), true;
    default:
      return false;
  }
}

void Engine::deliver(Id& id, rdma_ucm_event_resp& event) {
  switch (event.event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
    case RDMA_CM_EVENT_ROUTE_ERROR: id.state = State::kResolved; break;
    case RDMA_CM_EVENT_ADDR_ERROR: id.state = id.address.empty() ? State::kIdle : State::kBound; break;
    case RDMA_CM_EVENT_ESTABLISHED: id.state = State::kConnected; break;
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_DISCONNECTED:
    case RDMA_CM_EVENT_DEVICE_REMOVAL: id.state = State::kEnded; break;
    default: break;
  }
  if (event.event == RDMA_CM_EVENT_DISCONNECTED) id.timewait = true;
  if (event.event == RDMA_CM_EVENT_TIMEWAIT_EXIT) id.timewait = false;
  if (id.state == State::kEnded) id.qp = {};  // it may be connected again, by another id
  if (!id.app_uid) return;
  event.uid = id.app_uid;
  event.id = id.handle;
  queue(id, event, nullptr, nullptr);
}

/// What the kernel tells of a connection that has ended.
void Engine::deliver_end(Id& id) {
  id.end_told = true;
  for (const std::uint32_t what : {RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_TIMEWAIT_EXIT}) {
    rdma_ucm_event_resp event = plain_event(what);
    deliver(id, event);
  }
}

void Engine::deliver_deferred(Id& id) {
  for (rdma_ucm_event_resp& event : id.deferred) deliver(id, event);
  id.deferred.clear();
}

bool Engine::stands(QpName qp) {
  std::lock_guard guard(mutex_);
  const Id* const id = connected_by(qp);
  return id && id->state == State::kConnected;
}

void Engine::ended(QpName qp) {
  std::lock_guard guard(mutex_);
  Id* const id = connected_by(qp);
  if (id && id->state == State::kConnected && !id->held) deliver_end(*id);
}

/* ---- a migration ------------------------------------------------------------------- */

void Engine::name(const Instance& self) {
  std::lock_guard guard(mutex_);
  self_ = self;
}

int Engine::real_fd() {
  std::lock_guard guard(mutex_);
  return real_fd_;
}

std::uint64_t Engine::changes() {
  std::lock_guard guard(mutex_);
  return changes_;
}

void Engine::describe(std::vector<migr_fd_desc>& out) {
  std::lock_guard guard(mutex_);
  if (real_fd_ < 0) return;
  migr_fd_desc d{};
  d.kind = MIGR_FD_CM;
  d.fd = real_fd_;
  d.context_fd = -1;
  d.cq_handle = d.obj_handle = MIGR_NO_HANDLE;
  out.push_back(d);
  for (const auto& [handle, id] : ids_)
    if (id->state == State::kBound || id->state == State::kListening) out.push_back(port_of(*id));
}

migr_fd_desc Engine::port_of(const Id& id) {
  migr_fd_desc d{};
  d.kind = MIGR_FD_CM_PORT;
  d.fd = d.context_fd = -1;
  d.cq_handle = MIGR_NO_HANDLE;
  d.obj_type = id.port_space;
  sockaddr_storage a{};
  memcpy(&a, id.address.data(), std::min(id.address.size(), sizeof(a)));
  d.ring = a.ss_family;
  if (a.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(a);
    d.obj_handle = ntohs(in.sin_port);
    memcpy(&d.addr, &in.sin_addr, sizeof(in.sin_addr));
  } else {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(a);
    d.obj_handle = ntohs(in.sin6_port);
    memcpy(&d.addr, in.sin6_addr.s6_addr, sizeof(d.addr));
    memcpy(&d.bytes, in.sin6_addr.s6_addr + sizeof(d.addr), sizeof(d.bytes));
  }
  for (const std::vector<char>& option : id.options) {
    const auto set = load<rdma_ucm_set_option>(option.data(), option.size());
    int on = 0;
    if (set.level != RDMA_OPTION_ID || set.optname >= 64 || option.size() != sizeof(set) + sizeof(on)) continue;
    memcpy(&on, option.data() + sizeof(set), sizeof(on));
    d.pgoff = on ? d.pgoff | 1ull << set.optname : d.pgoff & ~(1ull << set.optname);
  }
  return d;
}

std::string Engine::half_made() {
  std::size_t n = 0;
  for (const auto& [handle, id] : ids_) switch (id->state) {
      case State::kRequested:
        if (std::ranges::any_of(id->channel->withheld, [&](const Waiting& w) { return w.request == id.get(); })) break;
        [[fallthrough]];
      case State::kResolving:
      case State::kResolved:
      case State::kConnecting:
      case State::kAccepting:
      case State::kDisconnecting: n++; break;
      default: break;
    }
  return n ? std::to_string(n) + " ids of librdmacm are resolved, connecting or disconnecting" : "";
}

void Engine::hold() {
  std::lock_guard guard(mutex_);
  held_ = true;
  put_requests_again();
}

void Engine::let_go() {
  std::lock_guard guard(mutex_);
  if (!held_) return;
  held_ = false;
  put_requests_again();
  thawed_.notify_all();
  wake();  // a file that nobody uses any more
}

bool Engine::held() {
  std::lock_guard guard(mutex_);
  return held_;
}

/// Of each channel where put() has them now.
void Engine::put_requests_again() {
  for (const auto& [fd, channel] : channels_) unqueue(*channel, [](const Waiting& w) { return w.request; }, channel.get());
}

std::string Engine::settle(unsigned limit_ms) {
  std::unique_lock guard(mutex_);
  settled_.wait_for(guard, std::chrono::milliseconds(limit_ms), [this] { return half_made().empty(); });
  return half_made();
}

std::string Engine::immovable(const std::function<bool(QpName)>& carries) {
  std::lock_guard guard(mutex_);
  return cannot_move(carries);
}

std::string Engine::cannot_move(const std::function<bool(QpName)>& carries) {
  if (!groups_.empty()) return "a multicast group joined by librdmacm";
  for (const auto& [handle, id] : ids_) {
    if ((id->port_space == RDMA_PS_UDP || id->port_space == RDMA_PS_IPOIB) && id->state != State::kIdle)
      return "an id of librdmacm for datagrams (RDMA_PS_UDP, RDMA_PS_IPOIB)";
    if ((id->state == State::kBound || id->state == State::kListening) && !anywhere(id->address))
      return "an id of librdmacm that is bound to an address of this host; bind it to any (0.0.0.0, ::)";
    // Partners would not know that it moves, and hear that it has ended.
    if (id->state == State::kConnected && carries && !carries(id->qp))
      return "a connection of librdmacm without a queue pair of its own (as UCX makes them: UCX_SOCKADDR_TLS_PRIORITY=tcp)";
  }
  return "";
}

int Engine::freeze(std::string& why, const std::function<bool(QpName)>& carries) {
  std::unique_lock guard(mutex_);
  if (!started_ || real_fd_ < 0) {
    frozen_ = true;
    return 0;
  }
  return static_cast<int>(in_thread(guard, [&] {
    pump();
    why = half_made();
    if (why.empty()) why = cannot_move(carries);
    if (!why.empty()) return ssize_t{EAGAIN};
    peer_ports_.clear();
    std::erase_if(without_id_, [](const auto& w) { return now_ms() - w.second >= kUnheardMs; });
    frozen_ = true;
    return ssize_t{0};
  }, true));
}

/// Its owner is told as by a kernel whose device has gone.
void Engine::lose(Id& id) {
  drop(id.k);
  rdma_ucm_event_resp event = plain_event(RDMA_CM_EVENT_DEVICE_REMOVAL);
  deliver(id, event);
}

bool Engine::is_unconnected(const Id& id) { return id.state == State::kIdle || id.state == State::kBound || id.state == State::kListening; }

void Engine::make_again(Id& id) {
  const auto complain = [&](const char* what) {
    fprintf(stderr, "libmigr: an id of librdmacm could not be made again after the migration: %s: %s\n", what, strerror(errno));
    lose(id);
  };
  id.k = make_kernel_id(id.port_space, id.qp_type, &id);
  if (!id.k) return complain("create");
  for (std::vector<char>& option : id.options) {
    auto set = load<rdma_ucm_set_option>(option.data(), option.size());
    set.id = id.k->number;
    set.optval = reinterpret_cast<std::uintptr_t>(option.data() + sizeof(set));
    say(RDMA_USER_CM_CMD_SET_OPTION, set);
  }
  if (id.state == State::kIdle) return;
  if (!bind(*id.k, id.address.data(), id.address.size())) return complain("bind");
  if (id.state == State::kListening && !listen(*id.k, static_cast<std::uint32_t>(id.backlog))) complain("listen");
}

bool Engine::listen_for_links() {
  listener_ = make_kernel_id(RDMA_PS_TCP, kReliable, nullptr);
  if (!listener_) return false;
  rdma_ucm_query_addr_resp at{};
  if (!bind_anywhere(*listener_) || !listen(*listener_, kLinkBacklog) || !query_address(*listener_, at)) return false;
  sockaddr_in bound{};  // or a sockaddr_in6: the port lies where it does there
  memcpy(&bound, &at.src_addr, sizeof(bound));
  port_ = ntohs(bound.sin_port);
  return true;
}

int Engine::restored(std::span<const Path> paths, std::string& why) {
  std::unique_lock guard(mutex_);
  if (real_fd_ < 0) {
    frozen_ = false;
    lives_++;
    thawed_.notify_all();
    wake();
    return 0;
  }
  return static_cast<int>(in_thread(guard, [&] {
    close_own(real_fd_);  // what the restore has put there; the kernel's ids of before are the source's
    by_uid_.clear();
    std::erase_if(links_, [](const auto& link) { return link->id; });
    for (const auto& link : links_) {  // an end that is still to be told
      link->k = nullptr;
      link->tries = 0;
    }
    for (auto& [qp, when] : without_id_) when = now_ms();  // by this host's clock
    groups_.clear();
    listener_ = nullptr;
    port_ = 0;
    for (const auto& [handle, id] : ids_) {
      id->k = nullptr;
      if (!id->timewait) continue;  // else the source's kernel would have told
      rdma_ucm_event_resp exit = plain_event(RDMA_CM_EVENT_TIMEWAIT_EXIT);
      deliver(*id, exit);
    }
    for (const auto& [number, channel] : channels_) unqueue(*channel, [](const Waiting& w) { return w.request; });  // the source's kernel has refused them
    frozen_ = false;
    lives_++;
    thawed_.notify_all();
    const int fd = kernel_.open();
    real_fd_ = fd < 0 ? -1 : fd;
    if (fd < 0) {
      why = std::string("cannot open /dev/infiniband/rdma_cm: ") + strerror(-fd);
      links_.clear();
      for (const auto& [handle, id] : ids_)
        if (is_unconnected(*id)) lose(*id);
      return ssize_t{-fd};
    }
    bool connected = false;
    for (const auto& [handle, id] : ids_) {
      if (is_unconnected(*id)) make_again(*id);
      if (id->state != State::kConnected) continue;
      for (const Path& path : paths) {
        if (path.qp != id->qp) continue;
        id->pqpn = path.pqpn;
        if (path.gone) deliver_end(*id);
      }
      connected |= id->state == State::kConnected;
    }
    if (connected && !listen_for_links()) {
      fprintf(stderr, "libmigr: no port for partners to connect librdmacm's ids again: %s\n", strerror(errno));
      drop(listener_);
      port_ = 0;
    }
    return ssize_t{0};
  }, true));
}

void Engine::peer_port(const Instance& peer, std::uint16_t port) {
  std::lock_guard guard(mutex_);
  peer_ports_[peer] = port;
}

Engine::Id* Engine::connected_by(QpName qp) {
  Id* found = nullptr;
  for (const auto& [handle, id] : ids_)
    if (qp.vqpn && id->qp == qp && (!found || id->state == State::kConnected)) found = id.get();
  return found;
}

bool Engine::uses(QpName qp) {
  std::lock_guard guard(mutex_);
  return connected_by(qp) || has_link(qp) || (real_fd_ >= 0 && lost_its_id(qp));
}

void Engine::switched(std::span<const Path> paths) {
  std::unique_lock guard(mutex_);
  moving_.assign(paths.begin(), paths.end());
  for (const Path& path : moving_) peer_ports_.erase(path.peer);  // KEYS tells it again, if it can be connected to where it is then
  const auto hold = [&] {
    for (const Path& path : moving_) {
      if (Id* id = connected_by(path.qp)) id->held = true;
      else if (real_fd_ >= 0 && lost_its_id(path.qp) && !has_link(path.qp)) links_.push_back(std::make_unique<Link>(Link{path, 0, nullptr}));
      for (const auto& link : links_) {
        if (link->path.qp != path.qp) continue;
        link->held = true;
        drop(link->k);
      }
    }
    return ssize_t{0};
  };
  if (links_.empty()) hold();
  else in_thread(guard, hold, true);
}

void Engine::resumed(std::span<const Path> restored) {
  std::unique_lock guard(mutex_);
  std::vector<Path> paths = std::exchange(moving_, {});
  paths.insert(paths.end(), restored.begin(), restored.end());
  if (real_fd_ < 0 || paths.empty()) return;
  in_thread(guard, [&] {
    pump();
    for (const Path& path : paths) {
      bool ending = false;
      std::erase_if(links_, [&](const auto& link) {  // to where the partner was before
        if (link->path.qp != path.qp) return false;
        ending |= !link->id;
        drop(link->k);
        return true;
      });
      Id* id = connected_by(path.qp);
      if (!path.restored && id && !id->held) id = nullptr;  // its QP was made since, and only has the number
      if (!path.restored && id && id->state == State::kAccepting) {  // the other end stands, or it had not moved: its last word was for the kernel's id that goes
        rdma_ucm_event_resp established = plain_event(RDMA_CM_EVENT_ESTABLISHED);
        deliver(*id, established);
      }
      const bool alive = id && id->state == State::kConnected;
      const auto port = peer_ports_.find(path.peer);
      // Both have moved: one of them begins. Who has no id any more does in any case, for nothing of it may listen.
      const bool other_begins = path.restored && id && std::pair(self_, path.pqpn) > std::pair(path.peer, path.dest_pqpn);
      const bool begins = port != peer_ports_.end() && path.dest_pqpn && !other_begins;
      const bool waits = begins && id && id->state == State::kDisconnecting;  // for the link, to hear of its own end
      if (id) {
        ending |= id->state == State::kDisconnecting;
        id->held = false;
        id->pqpn = path.pqpn;
        if (alive || waits) id->deferred.clear();  // the source's kernel has answered
        else deliver_deferred(*id);
      }
      ending |= path.restored && !id && lost_its_id(path.qp);  // the other end was frozen then, too
      if (!alive && !ending) continue;
      if (!path.restored && (alive || waits)) drop(id->k);
      if (begins) links_.push_back(std::make_unique<Link>(Link{path, port->second, alive || waits ? id : nullptr}));
      else if (id && id->state == State::kDisconnecting && !id->k) deliver_end(*id);  // the other end does it
    }
    return ssize_t{0};
  }, true);
}

void Engine::rollback() {
  std::unique_lock guard(mutex_);
  frozen_ = false;
  thawed_.notify_all();
  moving_.clear();
  if (!started_ || real_fd_ < 0) return wake();
  in_thread(guard, [&] {
    for (const auto& [handle, id] : ids_) {
      id->held = false;
      deliver_deferred(*id);
    }
    std::erase_if(links_, [](const auto& link) { return !link->port; });  // the kernel has told it after all
    for (const auto& link : links_) link->held = false;
    return ssize_t{0};
  }, true);
}

/* ---- links: the kernel's connection, once more -------------------------------------- */

void Engine::answer_link(const rdma_ucm_event_resp& event) {
  KernelId* k = new_kernel_id(event.id, nullptr);
  Hello hello{};
  memcpy(&hello, event.param.conn.private_data, sizeof(hello));
  std::vector<Id*> called;
  const bool for_us = !memcmp(hello.magic, kMagic, sizeof(kMagic)) && !memcmp(hello.instance, self_.data(), self_.size());
  for (const auto& [handle, id] : ids_)
    if (for_us && id->state == State::kConnected && id->pqpn == hello.dest_pqpn) called.push_back(id.get());
  if (called.size() > 1)  // one on each of several devices
    if (const std::uint64_t guid = node_guid(*k)) std::erase_if(called, [&](const Id* id) { return id->node_guid && id->node_guid != guid; });
  Id* const meant = called.empty() ? nullptr : called.front();
  if (!meant) {  // it has ended here meanwhile
    rdma_ucm_reject reject{};
    reject.id = k->number;
    reject.private_data_len = sizeof(hello);
    Hello no{};
    memcpy(no.magic, kMagic, sizeof(kMagic));
    memcpy(no.instance, self_.data(), self_.size());
    memcpy(reject.private_data, &no, sizeof(no));
    say(RDMA_USER_CM_CMD_REJECT, reject);
    return drop(k);
  }
  drop(meant->k);
  rdma_ucm_accept accept{};
  accept.id = k->number;
  accept.uid = k->uid;
  accept.conn_param = idle_connection(meant->pqpn);
  k->id = meant;
  k->quiet = true;
  meant->port = 0;
  if (say(RDMA_USER_CM_CMD_ACCEPT, accept))
    meant->k = k;
  else
    drop(k);
}

void Engine::start_link(Link& link) {
  const int family = migr_gid_family(link.path.dgid.data());
  if (family == 1) {  // on which network is not known
    fprintf(stderr, "libmigr: the end of a librdmacm connection will not be told: its GID is a link-local address\n");
    link.tries = kLinkTries;
    return link_failed(link);
  }
  link.k = make_kernel_id(RDMA_PS_TCP, kReliable, nullptr);
  if (!link.k) return link_failed(link);
  link.k->link = &link;
  rdma_ucm_resolve_addr resolve{};
  resolve.id = link.k->number;
  resolve.timeout_ms = kResolveMs;
  if (family == 0) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(link.port);
    memcpy(&to.sin_addr, link.path.dgid.data() + 12, sizeof(to.sin_addr));
    resolve.dst_size = sizeof(to);
    memcpy(&resolve.dst_addr, &to, sizeof(to));
  } else {
    sockaddr_in6 to{};
    to.sin6_family = AF_INET6;
    to.sin6_port = htons(link.port);
    memcpy(&to.sin6_addr, link.path.dgid.data(), sizeof(to.sin6_addr));
    resolve.dst_size = sizeof(to);
    memcpy(&resolve.dst_addr, &to, sizeof(to));
  }
  if (!say(RDMA_USER_CM_CMD_RESOLVE_ADDR, resolve)) link_failed(link);
}

/// Tries again later, or gives up: then the connection goes on, and its end is not told.
void Engine::link_failed(Link& link) {
  drop(link.k);
  if (Id* const id = link.id; id && id->state == State::kDisconnecting) {  // it waits for no more tries; the other end is told nevertheless
    link.id = nullptr;
    deliver_end(*id);
  }
  if (++link.tries < kLinkTries) {
    link.next_ms = now_ms() + kLinkRetryMs;
    return;
  }
  fprintf(stderr, "libmigr: a librdmacm connection could not be taken up again with its partner's kernel; its end will not be told\n");
  link_over(link, false);
}

/// A link that seemed to stand does not: who has begun tries again, the other one waits for that.
void Engine::link_lost(Id& id) {
  drop(id.k);
  if (id.state == State::kDisconnecting) deliver_end(id);
  if (id.state != State::kConnected || !id.port) return;
  links_.push_back(std::make_unique<Link>(Link{id.path, id.port, &id}));
  links_.back()->next_ms = now_ms() + kLinkRetryMs;
  links_.back()->held = id.held;
}

void Engine::link_over(Link& link, bool gone) {
  Id* id = link.id;
  drop(link.k);
  std::erase_if(links_, [&](const auto& l) { return l.get() == &link; });
  if (id && (id->state == State::kDisconnecting || (gone && id->state == State::kConnected))) deliver_end(*id);
}

void Engine::link_event(Link& link, const rdma_ucm_event_resp& event) {
  switch (event.event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED: {
      rdma_ucm_resolve_route route{link.k->number, kResolveMs};
      if (!say(RDMA_USER_CM_CMD_RESOLVE_ROUTE, route)) link_failed(link);
      return;
    }
    case RDMA_CM_EVENT_ROUTE_RESOLVED: {
      Hello hello{};
      memcpy(hello.magic, kMagic, sizeof(kMagic));
      memcpy(hello.instance, link.path.peer.data(), sizeof(hello.instance));
      hello.dest_pqpn = link.path.dest_pqpn;
      hello.pqpn = link.path.pqpn;
      rdma_ucm_connect connect{};
      connect.id = link.k->number;
      connect.conn_param = idle_connection(link.path.pqpn);
      connect.conn_param.private_data_len = sizeof(hello);
      memcpy(connect.conn_param.private_data, &hello, sizeof(hello));
      if (!say(RDMA_USER_CM_CMD_CONNECT, connect)) link_failed(link);
      return;
    }
    case RDMA_CM_EVENT_CONNECT_RESPONSE: {
      rdma_ucm_accept accept{};
      accept.id = link.k->number;
      accept.uid = link.k->uid;
      if (!say(RDMA_USER_CM_CMD_ACCEPT, accept)) return link_failed(link);
      if (Id* id = link.id; id && id->state == State::kConnected) {
        id->k = link.k;
        id->k->id = id;
        id->k->link = nullptr;
        id->k->quiet = true;
        id->path = link.path;
        id->port = link.port;
        link.k = nullptr;
      } else {  // ended here meanwhile: this tells the other end
        rdma_ucm_disconnect disconnect{link.k->number};
        say(RDMA_USER_CM_CMD_DISCONNECT, disconnect);
      }
      return link_over(link, false);
    }
    case RDMA_CM_EVENT_REJECTED: {
      const auto no = load<Hello>(reinterpret_cast<const char*>(event.param.conn.private_data), event.param.conn.private_data_len);
      const Instance by = std::to_array(no.instance);
      const bool told = !memcmp(no.magic, kMagic, sizeof(kMagic)) && (by == link.path.peer || by == Instance{});
      if (told || event.status == kRejectedNoService) return link_over(link, true);
      return link_failed(link);
    }
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
      return;
    default:
      return link_failed(link);
  }
}

}  // namespace migr::cm
