/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "../include/migr/proc_wire.h"
#include "cm/cm.h"
#include "datagrams.h"
#include "fd_bits.h"
#include "gids.h"
#include "high_fd.h"
#include "itimer.h"
#include "kernel_link.h"
#include "links/links.h"
#include "no_cancel.h"
#include "provider/provider.h"
#include "provider/uverbs_write.h"
#include "quiet_thread.h"
#include "shadow.h"
#include "switchover/ahead.h"
#include "switchover/switchover.h"
#include "whereabouts.h"
#include "windows.h"

// The linker's names for the bounds of path.cc's section; weak: a test may link without it.
extern "C" {
[[gnu::weak, gnu::visibility("hidden")]] extern const char __start_migr_path[];
[[gnu::weak, gnu::visibility("hidden")]] extern const char __stop_migr_path[];
}

namespace migr::control {
namespace {

constexpr unsigned kRetryMs = 500;             // migrd may start later than we do
constexpr unsigned kRetryAfterNonsenseMs = 2000;
constexpr unsigned kGateMs = 5;
constexpr unsigned kAskAgainMs = 20;           // migrd answers so many questions at a time, and no more wait for it
constexpr int kLookMs = 1000;                  // whether only we are left
constexpr unsigned kHeldMs = 2000;              // whom migrd refuses it lets go sooner
unsigned alone_limit_ms = 10'000;               // suspended and migrd gone: the application must go on
unsigned gate_limit_ms = 180'000;               // frozen, not stopped, and migrd gone; longer than any checkpoint takes
constexpr unsigned kSendLimitS = 5;
constexpr unsigned kSessionLimitMs = 2000;      // of an ibv_wr_* session that was open when its QP began to be tracked
/// How long DESCRIBE waits for what has begun and cannot be stopped: far longer than it takes, far less than migrd waits.
constexpr std::chrono::seconds kEndingLimit{4};
constexpr std::size_t kPacketBytes = 128 * 1024;  // what we send at most; fits the default socket buffer
constexpr std::size_t kMaxBytes = 128u << 20;     // of one message in all its packets: KEYS pass on what migrd takes of one answer (kAnswerBytes)
constexpr std::size_t kMaxRecordBytes = 64;
constexpr std::size_t kTriedFds = 8;              // whether so many can be opened; of more contexts the rest is not tried

static_assert(sizeof(migr_fd_desc) <= kMaxRecordBytes);

/// What is known about this process's conversation with migrd. Touched by the control thread only, after start().
struct Self {
  std::string socket_path;
  std::string gate_path;
  std::uint8_t instance[16];
  std::uint32_t generation = 0;
  bool rebound = false;  ///< since the last FREEZE
  std::string frozen_in; ///< which life of the process answered the last FREEZE
  int fd = -1;           ///< the connection; -1: none
};

enum class State { kNever, kRunning, kForkedChild };
std::atomic<State> state{State::kNever};
std::atomic<bool> in_use{false};  ///< by a device or a channel, once
[[gnu::tls_model("initial-exec")]] thread_local bool locked_for_fork = false;
Self* self;

std::uint64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000 + static_cast<std::uint64_t>(t.tv_nsec) / 1'000'000;
}

void sleep_ms(unsigned ms) {
  const timespec pause{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
  nanosleep(&pause, nullptr);
}

void say(const char* text) {
  static std::atomic<bool> said;
  if (!said.exchange(true)) fprintf(stderr, "libmigr: %s\n", text);
}

/* ---- packets ---------------------------------------------------------------- */

struct Message {
  migr_msg head{};
  std::vector<char> records;
  template <class T>
  std::span<const T> as() const {
    return {reinterpret_cast<const T*>(records.data()), records.size() / sizeof(T)};
  }
};

/// A reply in the making.
struct Answer {
  int status = 0;
  std::string text;
  std::uint64_t arg = 0;
  std::size_t record_size = 0;
  std::vector<char> records;
  template <class T>
  void put(const std::vector<T>& all) {
    static_assert(std::is_trivially_copyable_v<T>);
    record_size = sizeof(T);
    const char* bytes = reinterpret_cast<const char*>(all.data());
    records.assign(bytes, bytes + all.size() * sizeof(T));
  }
  void fail(int error, std::string why) {
    status = error;
    text = std::move(why);
  }
};

bool send_packet(int fd, const migr_msg& head, const char* records, std::size_t bytes) {
  iovec parts[2] = {{const_cast<migr_msg*>(&head), sizeof(head)}, {const_cast<char*>(records), bytes}};
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = bytes ? 2 : 1;
  ssize_t n;
  do n = sendmsg(fd, &packet, MSG_NOSIGNAL);
  while (n < 0 && errno == EINTR);
  return n == static_cast<ssize_t>(sizeof(head) + bytes);
}

/// @return false: migrd is gone
bool send_message(int fd, migr_msg head, const Answer& answer) {
  head.version = MIGR_PROC_VERSION;
  head.status = answer.status;
  head.arg = answer.arg;
  head.record_size = static_cast<std::uint32_t>(answer.record_size);
  snprintf(head.text, sizeof(head.text), "%s", answer.text.c_str());
  const std::size_t total = answer.record_size ? answer.records.size() / answer.record_size : 0;
  const std::size_t per_packet =
      answer.record_size ? std::min<std::size_t>(MIGR_PROC_MAX_RECORDS, (kPacketBytes - sizeof(head)) / answer.record_size)
                         : 1;
  std::size_t done = 0;
  do {
    const std::size_t count = std::min(per_packet, total - done);
    head.count = static_cast<std::uint32_t>(count);
    head.flags = done + count < total ? MIGR_MORE : 0;
    if (!send_packet(fd, head, answer.records.data() + done * answer.record_size, count * answer.record_size))
      return false;
    done += count;
  } while (done < total);
  return true;
}

/// Bytes of one record of a request. @return -1: no request of this type
int request_record_size(std::uint16_t type) {
  switch (type) {
    case MIGR_MSG_DESCRIBE:
    case MIGR_MSG_FREEZE:
    case MIGR_MSG_OLD_PATH:
    case MIGR_MSG_ROLLBACK:
    case MIGR_MSG_STATS:
      return 0;
    case MIGR_MSG_QP_CREATE:
    case MIGR_MSG_SUSPEND:
    case MIGR_MSG_DRAIN:
    case MIGR_MSG_SWITCH:
    case MIGR_MSG_RESUME:
    case MIGR_MSG_CUT:
    case MIGR_MSG_GONE:
    case MIGR_MSG_TRACK:
      return sizeof(migr_qp_ref);
    case MIGR_MSG_SETTLE:
      return sizeof(migr_qp_psn);
    case MIGR_MSG_QP_CONNECT:
      return sizeof(migr_qp_connect);
    case MIGR_MSG_REBIND:
      return sizeof(migr_handle_map);
    case MIGR_MSG_KEYS:
    case MIGR_MSG_MET:
      return sizeof(migr_key_map);
    case MIGR_MSG_MOVES:
      return sizeof(migr_move);
    case MIGR_MSG_WRITTEN:
      return sizeof(migr_memory_part);
    default:
      return -1;
  }
}

enum class Received { kWhole, kPart, kGone, kNonsense };

/// One packet; `request` collects the packets of one message. @param why set with kNonsense
Received receive(int fd, std::vector<char>& buffer, Message& request, int& error, std::string& why) {
  ssize_t n;
  do n = recv(fd, buffer.data(), buffer.size(), MSG_TRUNC);
  while (n < 0 && errno == EINTR);
  if (n <= 0) return Received::kGone;
  const auto refuse = [&](int code, std::string text) {
    error = code;
    why = std::move(text);
    return Received::kNonsense;
  };
  migr_msg head{};
  memcpy(&head, buffer.data(), std::min(sizeof(head), static_cast<std::size_t>(n)));
  // The version stands first in every version of the header: say which before complaining about lengths.
  if (static_cast<std::size_t>(n) >= sizeof(head.version) && head.version != MIGR_PROC_VERSION) {
    request.head = head;
    return refuse(EPROTONOSUPPORT, "libmigr speaks version " + std::to_string(MIGR_PROC_VERSION) + ", not " +
                                       std::to_string(head.version));
  }
  const std::size_t bytes = static_cast<std::size_t>(n);
  if (bytes < sizeof(head)) return refuse(EINVAL, "a packet of " + std::to_string(bytes) + " bytes is no message");
  const bool first = request.records.empty() && !(request.head.flags & MIGR_MORE);
  if (!first && (head.type != request.head.type || head.seq != request.head.seq))
    return refuse(EINVAL, "a message began before the one before it was complete");
  request.head = head;
  if (bytes > buffer.size() || head.count > MIGR_PROC_MAX_RECORDS ||
      bytes != sizeof(head) + std::size_t{head.count} * head.record_size)
    return refuse(EINVAL, "length of message type " + std::to_string(head.type) + " does not fit its record count");
  const int record_size = request_record_size(head.type);
  if (record_size >= 0 && head.count && head.record_size != static_cast<std::uint32_t>(record_size))
    return refuse(EINVAL, "records of message type " + std::to_string(head.type) + " have " +
                              std::to_string(record_size) + " bytes, not " + std::to_string(head.record_size));
  if (request.records.size() + (bytes - sizeof(head)) > kMaxBytes)
    return refuse(EMSGSIZE, "a message of more than " + std::to_string(kMaxBytes) + " bytes");
  request.records.insert(request.records.end(), buffer.data() + sizeof(head), buffer.data() + bytes);
  return head.flags & MIGR_MORE ? Received::kPart : Received::kWhole;
}

/* ---- requests ---------------------------------------------------------------- */

/// The QP that (ctx_id, vqpn) names. Caller holds the Registry's lock. @return null: none
QpShadow* find_qp(const Registry& registry, std::uint32_t ctx_id, std::uint32_t vqpn, std::uint32_t pqpn) {
  for (QpShadow* qp : registry.qps) {
    if (qp->context->ctx_id() != ctx_id) continue;
    if (vqpn ? qp->vqpn() == vqpn : qp->pqpn() == pqpn) return qp;
  }
  return nullptr;
}

std::string no_such_qp(std::uint32_t ctx_id, std::uint32_t vqpn, std::uint32_t pqpn) {
  char text[80];
  snprintf(text, sizeof(text), "no QP %#x (now %#x) in context %u of this process", vqpn, pqpn, ctx_id);
  return text;
}

/// QPs by name, for requests with many of them.
class QpIndex {
 public:
  explicit QpIndex(const Registry& registry) : registry_(registry) {
    for (QpShadow* qp : registry.qps) by_name_[name(qp->context->ctx_id(), qp->vqpn())] = qp;
  }
  QpShadow* find(std::uint32_t ctx_id, std::uint32_t vqpn, std::uint32_t pqpn) const {
    if (!vqpn) return find_qp(registry_, ctx_id, vqpn, pqpn);
    const auto found = by_name_.find(name(ctx_id, vqpn));
    return found == by_name_.end() ? nullptr : found->second;
  }

 private:
  static std::uint64_t name(std::uint32_t ctx_id, std::uint32_t vqpn) { return std::uint64_t{ctx_id} << 32 | vqpn; }
  const Registry& registry_;
  std::unordered_map<std::uint64_t, QpShadow*> by_name_;
};

/// QPs that a request names; none named: all. Caller holds the Registry's lock.
/// @param destroyed the application may have destroyed some meanwhile: they are left out
bool named_qps(const Registry& registry, const Message& request, std::vector<QpShadow*>& out, Answer& answer, bool destroyed = false) {
  const auto refs = request.as<migr_qp_ref>();
  if (refs.empty()) {
    out = registry.qps;
    return true;
  }
  const QpIndex index(registry);
  for (const migr_qp_ref& ref : refs) {
    QpShadow* qp = index.find(ref.ctx_id, ref.vqpn, ref.pqpn);
    if (!qp && destroyed) continue;
    if (!qp) {
      answer.fail(ENOENT, no_such_qp(ref.ctx_id, ref.vqpn, ref.pqpn));
      return false;
    }
    out.push_back(qp);
  }
  return true;
}

/// A process that is frozen is reached again by what it opens itself only. @return "" or what it cannot open any more
std::string out_of_reach(const Registry& registry) {
  const auto cannot = [](const std::string& what) { return "it cannot " + what + ": " + strerror(errno); };
  const std::string any_more = " any more (chroot? other credentials?)";
  if (eaccess(self->socket_path.c_str(), W_OK) != 0) return cannot("connect to " + self->socket_path + any_more);
  const auto is_attached = [](const Context* c) { return c->kernel && c->kernel->attached(); };
  // Each that FREEZE gives up may be taken by the application before we ask for it again.
  const auto attached = static_cast<std::size_t>(std::count_if(registry.contexts.begin(), registry.contexts.end(), is_attached));
  const std::size_t needed = std::min(kTriedFds, attached + 1);
  int fds[kTriedFds];
  std::size_t got = 0;
  for (; got < needed; ++got)
    if ((fds[got] = got ? fcntl(fds[0], F_DUPFD_CLOEXEC, 0) : socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) < 0) break;
  const std::string why = got == needed ? "" : cannot(needed == 1 ? "open another descriptor" : "open " + std::to_string(needed) + " descriptors more");
  while (got) close(fds[--got]);
  if (!why.empty()) return why;
  if (attached && eaccess("/dev/" MIGR_DEV_NAME, R_OK | W_OK) != 0) return cannot("open /dev/" MIGR_DEV_NAME + any_more);
  return "";
}

migr_fd_desc count_of(const Context& context, migr_obj_type type, std::uint64_t count) {
  migr_fd_desc d{};
  d.kind = MIGR_FD_COUNT;
  d.fd = -1;
  d.context_fd = context.real->cmd_fd;
  d.ctx_id = context.ctx_id();
  d.cq_handle = d.obj_handle = MIGR_NO_HANDLE;
  d.obj_type = type;
  d.addr = count;
  return d;
}

/// MRs of each context. Its MRs on backup links are of contexts that are ours alone, and the fillers of register_mr() are `registering`.
void count_memory(const Registry& registry, std::vector<migr_fd_desc>& out) {
  std::unordered_map<const Context*, std::uint64_t> of;
  for (const MrShadow* mr : registry.mrs) ++of[mr->context];
  for (const Context* context : registry.contexts) {
    migr_fd_desc d = count_of(*context, MIGR_OBJ_MR, of[context]);
    d.bytes = registry.registrations;
    d.pgoff = registry.registering;
    out.push_back(d);
  }
}

/// What else of it a migration makes again by the record, and REBIND adopts. With backup links there may be CQs and QPs of ours until they are left, and
/// after a switchover paths that nobody has any more.
void count_objects(const Registry& registry, const Context& context, std::vector<migr_fd_desc>& out) {
  if ((context.twin && !registry.moving) || !registry.old_paths.empty()) return;
  const auto count = [&](migr_obj_type type, const auto& all, auto&& context_of) {
    const auto in_it = [&](const auto* one) { return context_of(one) == context.real; };
    migr_fd_desc d = count_of(context, type, static_cast<std::uint64_t>(std::count_if(all.begin(), all.end(), in_it)));
    d.bytes = registry.changes;
    out.push_back(d);
  };
  const auto of_shadow = [](const auto* shadow) { return shadow->context->real; };
  count(MIGR_OBJ_PD, registry.pds, [](const ibv_pd* pd) { return pd->context; });
  count(MIGR_OBJ_CQ, registry.cqs, of_shadow);
  count(MIGR_OBJ_QP, registry.qps, of_shadow);
  count(MIGR_OBJ_SRQ, registry.srqs, of_shadow);
}

void describe(const Registry& registry, Answer& answer) {
  std::vector<migr_fd_desc> all;
  if (!registry.unsupported.empty()) {
    std::string which;
    for (const auto& [what, count] : registry.unsupported)
      which += (which.empty() ? "" : ", ") + std::to_string(count) + " x " + what;
    return answer.fail(EOPNOTSUPP, "cannot be migrated: " + which);
  }
  if (const std::string why = cm::refusal(); !why.empty()) return answer.fail(EOPNOTSUPP, "cannot be migrated: " + why);
  if (const std::string why = cm::half_made(); !why.empty()) return answer.fail(EAGAIN, why);
  if (const std::string why = links::refusal(); !why.empty()) return answer.fail(EOPNOTSUPP, "cannot be migrated: " + why);
  for (const QpShadow* qp : registry.qps)
    if (qp->immovable) return answer.fail(EOPNOTSUPP, std::string("a QP of ") + qp->immovable + "() cannot be migrated");
  for (const CqShadow* cq : registry.cqs)
    if (cq->immovable) return answer.fail(EOPNOTSUPP, std::string("a CQ of ") + cq->immovable + "() cannot be migrated");
  for (const MrShadow* mr : registry.mrs)
    if (!mr->movable) return answer.fail(EOPNOTSUPP, "memory registered on demand (ODP), by dmabuf, DM or import cannot be migrated");
  if (std::string why = switchover::lost_memory(); !why.empty()) return answer.fail(ENOMEM, std::move(why));
  if (const std::string why = out_of_reach(registry); !why.empty()) return answer.fail(EOPNOTSUPP, "cannot be migrated: " + why);
  for (Context* context : registry.contexts) {
    if (std::string why = provider::unsupported_reason(*context); !why.empty())
      return answer.fail(EOPNOTSUPP, std::move(why));
    if (!context->ctx_id())
      return answer.fail(ENODEV, "opened its device without migr.ko: " + context->kernel->why_private() + "; restart it");
    if (!FdBits::fits(context->real->cmd_fd))  // a restored process could post nothing: uverbs_write.h
      return answer.fail(EOPNOTSUPP, "cannot be migrated: it has " + std::string(context->real->device->name) + " open as descriptor " + std::to_string(context->real->cmd_fd) +
                                         ", and only those below " + std::to_string(FdBits::kMax) + " can be");
    gids::note(*context);
    migr_fd_desc d{};
    d.kind = MIGR_FD_CONTEXT;
    d.fd = d.context_fd = context->real->cmd_fd;
    d.ctx_id = context->ctx_id();
    d.cq_handle = d.obj_handle = MIGR_NO_HANDLE;
    all.push_back(d);
    d.kind = MIGR_FD_ASYNC;
    d.fd = context->real->async_fd;
    all.push_back(d);
    d.kind = MIGR_FD_CHANNEL;
    for (const ibv_comp_channel* channel : registry.channels) {
      if (channel->context != context->real) continue;
      d.fd = channel->fd;
      d.cq_handle = MIGR_NO_HANDLE;
      const std::size_t before = all.size();
      for (const CqShadow* cq : registry.cqs)
        if (cq->real->channel == channel) {
          d.cq_handle = cq->real->handle;
          all.push_back(d);
        }
      if (all.size() == before) all.push_back(d);
    }
    if (const int error = provider::rings(*context, all))
      return answer.fail(error, std::string("cannot find the queues of ") + context->real->device->name + ": " +
                                    strerror(error));
    d.kind = MIGR_FD_SOURCE;
    d.fd = -1;
    d.cq_handle = MIGR_NO_HANDLE;
    for (const ibv_gid_entry& source : datagrams::sources(*context)) {
      d.obj_handle = source.port_num;
      d.obj_type = source.gid_type;
      memcpy(&d.addr, source.gid.raw, sizeof d.addr);
      memcpy(&d.bytes, source.gid.raw + sizeof d.addr, sizeof d.bytes);
      all.push_back(d);
    }
    count_objects(registry, *context, all);
  }
  count_memory(registry, all);
  cm::describe(all);
  if (!registry.contexts.empty()) switchover::ahead::describe(self->instance, all);
  (void)provider::locate_queues(registry.qps);  // for FREEZE, which says what fails
  (void)provider::locate_queues(registry.srqs);
  answer.put(all);
}

/// Of what a record says. Caller holds the Registry's lock.
std::uint64_t changes_of(const Registry& registry) { return registry.changes + cm::changes(); }

/// SUSPEND and FREEZE say for which DESCRIBE they are (0: any). Caller holds the Registry's lock.
bool described_still(const Registry& registry, const Message& request, Answer& answer) {
  if (!request.head.arg || request.head.arg == changes_of(registry)) return true;
  answer.fail(EAGAIN, "RDMA resources were made, changed or destroyed meanwhile");
  return false;
}

/// The objects, once each of them is either there or not; with MIGR_DESCRIBE_HOLD they stay so.
void describe_settled(Registry& registry, std::unique_lock<std::mutex>& guard, const Message& request, Answer& answer) {
  const bool hold = request.head.arg & MIGR_DESCRIBE_HOLD;
  if (hold) registry.held = true;
  if (request.head.arg & MIGR_DESCRIBE_MOVE) {
    registry.copied_ahead = true;
    registry.unmarked = false;
  }
  const bool settled = registry.thawed.wait_for(guard, kEndingLimit, [&] { return !registry.ending; });
  answer.arg = changes_of(registry);  // librdmacm's may go up meanwhile
  if (settled) describe(registry, answer);
  else answer.fail(EAGAIN, "ibv_destroy_cq(), _destroy_qp(), _resize_cq() or _modify_qp() has not come back, or a device is being opened or closed");
  if (hold && answer.status) {
    registry.held = false;
    registry.thawed.notify_all();
  }
  if (!registry.held) cm::let_go();
}

/// Memory that the driver is about to register is known.
bool all_registered(Registry& registry, std::unique_lock<std::mutex>& guard, Answer& answer) {
  registry.closing = true;
  const bool all = registry.thawed.wait_for(guard, kEndingLimit, [&] { return !registry.registering; });
  registry.closing = false;
  registry.thawed.notify_all();  // once we let go of the lock; who finds the process frozen goes on waiting
  if (!all) answer.fail(EAGAIN, "a call that registers memory, gives it back or makes an address handle does not come back from the driver");
  return all;
}

/// Every request but DRAIN and one of TRACK. `guard` holds the Registry's lock.
void dispatch(Registry& registry, std::unique_lock<std::mutex>& guard, const Message& request, Answer& answer) {
  std::string why;
  std::vector<QpShadow*> qps;
  const auto finish = [&](int status) {
    if (status) answer.fail(status, std::move(why));
  };
  switch (request.head.type) {
    case MIGR_MSG_DESCRIBE:
      return describe_settled(registry, guard, request, answer);
    case MIGR_MSG_QP_CREATE: {
      if (!named_qps(registry, request, qps, answer)) return;
      std::vector<migr_qp_spare> spares;
      finish(switchover::create_spares(qps, spares, why));
      return answer.put(spares);
    }
    case MIGR_MSG_QP_CONNECT: {
      const QpIndex index(registry);
      for (const migr_qp_connect& to : request.as<migr_qp_connect>()) {
        QpShadow* qp = index.find(to.ctx_id, to.vqpn, 0);
        if (!qp) return answer.fail(ENOENT, no_such_qp(to.ctx_id, to.vqpn, 0));
        qp->spare_peer_context = static_cast<std::uint32_t>(request.head.arg);
        if (const int error = switchover::connect_spare(*qp, to, why)) return answer.fail(error, std::move(why));
      }
      return;
    }
    case MIGR_MSG_SUSPEND:
      if (!described_still(registry, request, answer)) return;
      if (named_qps(registry, request, qps, answer)) finish(switchover::suspend(qps, why));
      return;
    case MIGR_MSG_FREEZE:
      if (!all_registered(registry, guard, answer) || !described_still(registry, request, answer)) return;
      if (registry.written && registry.unmarked)
        return answer.fail(ESTALE, "memory that may have changed unseen since it was copied ahead is not writable any more");
      if (const int error = cm::freeze(why)) return finish(error);
      if (described_still(registry, request, answer)) finish(switchover::freeze(why));  // once more: only now no port is bound any more
      if (!answer.status) {
        std::vector<migr_fd_desc> memory;
        count_memory(registry, memory);
        answer.put(memory);
        itimer::hold();
      } else if (switchover::process_state() != MIGR_PROC_SUSPENDED) cm::rollback();  // else with ROLLBACK
      return;
    case MIGR_MSG_WRITTEN: {
      const auto parts = request.as<migr_memory_part>();
      registry.written.emplace(parts.begin(), parts.end());
      return;
    }
    case MIGR_MSG_TRACK: {
      const bool here = request.head.arg == MIGR_TRACK_HERE;
      std::vector<migr_nic_write> writes;
      if (request.head.arg == MIGR_TRACK_TAKE) finish(switchover::take_notes(writes, why));
      else if (!here && request.head.arg != MIGR_TRACK_THERE) answer.fail(EINVAL, "no such way to track");
      else if (here != request.records.empty()) answer.fail(EINVAL, "of the source all QPs are tracked, of a partner some");
      else if (named_qps(registry, request, qps, answer)) finish(switchover::track(qps, here, why));
      return answer.put(writes);
    }
    case MIGR_MSG_SWITCH:
      if (named_qps(registry, request, qps, answer)) finish(switchover::switch_to_spare(qps, why));
      if (!answer.status) cm::switched(qps);
      return;
    case MIGR_MSG_REBIND: {
      // Only a restored process is ever told to adopt new objects: this is how it learns of it.
      // A migrd that was started again cannot know that it was told already.
      const bool again = self->rebound && !registry.frozen;
      if (!self->rebound) {
        self->rebound = true;
        ++self->generation;
        provider::set_restored();
        itimer::release();
      }
      std::vector<migr_key_map> keys;
      if (again) finish(switchover::rebound_keys(keys));
      else finish(switchover::rebind(request.as<migr_handle_map>(), keys, why));
      if (!answer.status) cm::restored(std::to_array(self->instance), keys, again);
      for (migr_key_map& key : keys) memcpy(key.owner, self->instance, sizeof(key.owner));
      return answer.put(keys);
    }
    case MIGR_MSG_KEYS:
      cm::note_ports(request.as<migr_key_map>());
      for (QpShadow* qp : registry.qps)
        if ((qp->phase == switchover::Phase::kSwitched || qp->phase == switchover::Phase::kRebound) && !links::changing(*qp)) qps.push_back(qp);  // the latter: another switchover's
      if (qps.empty() && switchover::process_state() == MIGR_PROC_RUNNING) return;  // it has destroyed them
      if (qps.empty()) return answer.fail(EBUSY, "KEYS before SWITCH: no QP has changed its path");
      return finish(switchover::set_remote_keys(qps, request.as<migr_key_map>(), why));
    case MIGR_MSG_RESUME: {
      if (!named_qps(registry, request, qps, answer, true)) return;
      std::vector<migr_resume_stat> stats;
      const std::vector<cm::Path> restored = cm::restored_paths(qps);
      std::erase_if(qps, [](const QpShadow* q) { return links::changing(*q); });  // resumed before, where that is said again: another switchover's now
      finish(switchover::resume(qps, stats, why));
      if (!answer.status) cm::resumed(std::to_array(self->instance), restored);
      registry.let_changes_go();
      return answer.put(stats);
    }
    case MIGR_MSG_OLD_PATH:
      return finish(switchover::take_old_paths(why));
    case MIGR_MSG_ROLLBACK:
      itimer::release();
      finish(switchover::rollback(why));
      if (switchover::process_state() == MIGR_PROC_FROZEN) return;  // nothing has gone back yet: asked once more
      cm::rollback();
      return registry.let_changes_go();
    case MIGR_MSG_MOVES:
      if (request.head.arg & MIGR_MOVES_PREPARE)
        answer.arg = datagrams::prepare();
      else
        finish(datagrams::set_moves(request.as<migr_move>(), why));
      if (!(request.head.arg & MIGR_MOVES_PREPARE)) whereabouts::set_moves(request.as<migr_move>());
      return;
    case MIGR_MSG_MET: {
      QpShadow* const qp = find_qp(registry, static_cast<std::uint32_t>(request.head.arg >> 32), static_cast<std::uint32_t>(request.head.arg), 0);
      if (!qp) return answer.fail(ENOENT, "no such QP");
      return whereabouts::met(*qp, request.as<migr_key_map>());
    }
    case MIGR_MSG_GONE:
      if (request.records.empty()) return;  // none would mean all
      if (named_qps(registry, request, qps, answer, true)) finish(switchover::give_up(qps, why));
      return;
    case MIGR_MSG_CUT: {
      if (!named_qps(registry, request, qps, answer)) return;
      std::vector<migr_qp_psn> psns;
      if (request.head.arg & MIGR_CUT_CHECK) return finish(switchover::check_cut(qps, why));
      finish(switchover::cut(qps, psns, why));
      return answer.put(psns);
    }
    case MIGR_MSG_SETTLE: {
      const QpIndex index(registry);
      for (const migr_qp_psn& psn : request.as<migr_qp_psn>()) {
        qps.push_back(index.find(psn.ctx_id, psn.vqpn, 0));
        if (!qps.back()) return answer.fail(ENOENT, no_such_qp(psn.ctx_id, psn.vqpn, 0));
      }
      std::vector<migr_replay_stat> stats;
      finish(switchover::settle(qps, request.as<migr_qp_psn>(), stats, why));
      return answer.put(stats);
    }
    case MIGR_MSG_STATS: {
      std::vector<migr_drain_stat> stats;
      switchover::stats(stats);
      return answer.put(stats);
    }
    default:
      return answer.fail(EOPNOTSUPP, "libmigr knows no message type " + std::to_string(request.head.type));
  }
}

void drain(Registry& registry, const Message& request, Answer& answer) {
  std::unique_lock guard(registry.lock);
  std::vector<QpShadow*> qps;
  if (!named_qps(registry, request, qps, answer)) return;
  std::string why;
  std::vector<migr_drain_stat> stats;
  const unsigned limit_ms = static_cast<unsigned>(std::min<std::uint64_t>(request.head.arg, UINT32_MAX));
  if (const int error = switchover::drain(std::move(guard), qps, limit_ms, stats, why)) answer.fail(error, std::move(why));
  answer.put(stats);
}

Answer serve(const Message& request) {
  Registry& registry = Registry::get();
  Answer answer;
  if (request.head.type == MIGR_MSG_DRAIN) {
    drain(registry, request, answer);
  } else if (request.head.type == MIGR_MSG_TRACK && request.head.arg == MIGR_TRACK_QUEUES) {
    std::string why;
    if (const int error = switchover::note_queues(kSessionLimitMs, why)) answer.fail(error, std::move(why));
  } else {
    if (request.head.type == MIGR_MSG_DESCRIBE) {
      if (request.head.arg & MIGR_DESCRIBE_MOVE)
        if (const std::string why = links::park(); !why.empty()) return answer.fail(EBUSY, "cannot be migrated now: " + why), answer;
      cm::settle();
    }
    if (request.head.type == MIGR_MSG_MOVES && !(request.head.arg & MIGR_MOVES_PREPARE)) datagrams::settle();
    std::unique_lock guard(registry.lock);
    dispatch(registry, guard, request, answer);
  }
  return answer;
}

/* ---- the connection ------------------------------------------------------------ */

migr_proc_state process_state() {
  std::lock_guard guard(Registry::get().lock);
  return switchover::process_state();
}

bool say_hello(int fd) {
  migr_msg head{};
  head.type = MIGR_MSG_HELLO;
  memcpy(head.instance, self->instance, sizeof(head.instance));
  head.control_tid = static_cast<std::int32_t>(syscall(SYS_gettid));
  head.state = process_state();
  head.generation = self->generation;
  Answer hello;
  hello.put(text_ranges());
  return send_message(fd, head, hello);
}

/// @return a connection, or -1. Quiet: there may be no migrd on this host.
int connect_to_migrd() {
  if (access(self->socket_path.c_str(), F_OK) != 0) return -1;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, self->socket_path.c_str(), self->socket_path.size() + 1);
  const int fd = to_high_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd < 0) return -1;
  const timeval limit{kSendLimitS, 0};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    close_own(fd);
    return -1;
  }
  return fd;
}

std::string contents(const char* path) {
  char text[1024];
  const int fd = to_high_fd(open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text));
  close_own(fd);
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : "";
}

/// Differs from what it was before a restore, on whatever host: the boot, and when in it the process began. Empty: not known.
std::string this_life() {
  const std::string boot = contents("/proc/sys/kernel/random/boot_id");
  std::string stat = contents("/proc/self/stat");
  constexpr int kFieldsToStart = 20;  // behind the name, which may hold anything
  std::size_t at = stat.rfind(')');
  for (int i = 0; i < kFieldsToStart && at != std::string::npos; i++) at = stat.find(' ', at + 1);
  if (boot.empty() || at == std::string::npos) return "";
  return boot + stat.substr(at, stat.find(' ', at + 1) - at);
}

/// Of ask(). @return 0, what migrd said, ETIMEDOUT, EPROTO or, as it has no time for it now, ECONNRESET
int wait_for_reply(int fd, std::uint16_t type, std::uint64_t until, Message& reply) {
  std::vector<char> buffer(kPacketBytes);
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  int ready, error = 0;
  do ready = poll(&p, 1, static_cast<int>(std::max<std::int64_t>(static_cast<std::int64_t>(until - now_ms()), 0)));
  while (ready < 0 && errno == EINTR);
  if (ready <= 0) return ETIMEDOUT;
  std::string why;
  const Received got = receive(fd, buffer, reply, error, why);
  if (got == Received::kGone) return ECONNRESET;
  return got == Received::kWhole && reply.head.type == (type | MIGR_REPLY) ? reply.head.status : EPROTO;
}

}  // namespace

int ask(std::uint16_t type, std::uint64_t arg, const void* records, std::size_t count, std::size_t record_size, int limit_ms, std::vector<char>& answer) {
  if (!self || count > MIGR_PROC_MAX_RECORDS) return ENOTCONN;
  migr_msg head{};
  head.type = type;
  head.seq = 1;
  memcpy(head.instance, self->instance, sizeof(head.instance));
  Answer question;
  question.arg = arg;
  question.record_size = record_size;
  question.records.assign(static_cast<const char*>(records), static_cast<const char*>(records) + count * record_size);
  const std::uint64_t until = now_ms() + static_cast<unsigned>(limit_ms);
  for (;;) {
    const int fd = connect_to_migrd();
    if (fd < 0) return ENOTCONN;
    Message reply;
    const int result = send_message(fd, head, question) ? wait_for_reply(fd, type, until, reply) : ECONNRESET;
    close_own(fd);
    answer = std::move(reply.records);
    if (result != ECONNRESET) return result;
    if (now_ms() + kAskAgainMs >= until) return ETIMEDOUT;
    sleep_ms(kAskAgainMs);
  }
}

namespace {

enum class Ended { kNobody, kGone, kUnheard, kNonsense, kFrozen };

/// glibc ends a process with its last thread, whichever that is after a pthread_exit() in main(); while we run it is none of the application's. So if
/// the first thread is gone, which the kernel counts for as long as there is another, and all others are ours, the process ends here. It takes no
/// descriptor to see that: the application may be looking for the lowest that is free.
void end_if_alone() {
  constexpr int kDirectoryLinks = 2;
  const int ours = quiet_threads;
  char byte;
  if (readlink("/proc/self/exe", &byte, 1) >= 0 || errno != ENOENT) return;  // ENOENT: the first thread has no memory any more
  struct stat threads;
  if (stat("/proc/self/task", &threads) || static_cast<int>(threads.st_nlink) - kDirectoryLinks != ours + 1 || ours != quiet_threads) return;
  {
    std::lock_guard guard(Registry::get().lock);
    if (Registry::get().held || switchover::process_state() != MIGR_PROC_RUNNING) return;  // its handlers would wait for what only we let go
  }
  exit(0);
}

/// Until migrd says something, or hangs up.
void wait_for_request(int fd) {
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  for (int ready; (ready = poll(&p, 1, kLookMs)) <= 0;)
    if (!ready) end_if_alone();
}

/// Answers requests until the connection ends.
Ended serve_connection(int fd) {
  std::vector<char> buffer(sizeof(migr_msg) + MIGR_PROC_MAX_RECORDS * kMaxRecordBytes);
  for (bool asked = false;; asked = true) {
    Message request;
    Received got;
    int error = 0;
    std::string why;
    wait_for_request(fd);
    do got = receive(fd, buffer, request, error, why);
    while (got == Received::kPart);
    if (got == Received::kGone) return asked ? Ended::kGone : Ended::kUnheard;
    migr_msg head = request.head;
    head.type |= MIGR_REPLY;
    head.count = 0;
    memcpy(head.instance, self->instance, sizeof(head.instance));
    head.generation = self->generation;
    if (got == Received::kNonsense) {
      Answer answer;
      answer.fail(error, why);
      send_message(fd, head, answer);
      say(("migrd's message was refused: " + why).c_str());
      return Ended::kNonsense;
    }
    Answer answer = serve(request);
    if (request.head.type == MIGR_MSG_FREEZE) self->frozen_in = this_life();
    head.generation = self->generation;
    head.state = process_state();
    const bool sent = send_message(fd, head, answer);
    {
      std::unique_lock guard(Registry::get().lock);
      while (switchover::destroy_old_paths()) Registry::let_others(guard);
    }
    if (request.head.type == MIGR_MSG_FREEZE && !answer.status) {
      self->rebound = false;
      return Ended::kFrozen;  // also if the reply was lost: the state is what counts
    }
    if (!sent) return Ended::kGone;
  }
}

void disconnect() {
  const int fd = self->fd;
  self->fd = -1;
  close_own(fd);
}

/// The migrd that had asked for it is gone.
void let_changes_go_unless_stopped() {
  std::lock_guard guard(Registry::get().lock);
  whereabouts::untold();
  if (switchover::process_state() == MIGR_PROC_RUNNING) Registry::get().let_changes_go();
}

/// Whoever was dumped does not run here before its rollback; a restored copy never goes back.
void roll_back_frozen() {
  if (self->frozen_in.empty() || this_life() != self->frozen_in) return;
  std::lock_guard guard(Registry::get().lock);
  std::string why;
  itimer::release();
  say("no migrd that understands this process has been there since the freeze of a migration: going back");
  if (switchover::rollback(why)) fprintf(stderr, "libmigr: going back failed: %s\n", why.c_str());
  if (switchover::process_state() == MIGR_PROC_FROZEN) return;  // nothing has gone back yet
  cm::rollback();
  Registry::get().let_changes_go();
}

/// Nobody dumps us any more, for that takes a migrd. One that is there knows better, if it understands us.
bool is_there() {
  const int fd = connect_to_migrd();
  if (fd >= 0) close_own(fd);
  return fd >= 0;
}

/// A frozen process has no descriptor of ours and looks for its gate only. migrd makes it on the host where we live.
/// @return it has come
bool wait_for_gate() {
  unsigned waited_ms = 0;  // while we run: what is stopped does not wait
  bool waited = false;
  for (; access(self->gate_path.c_str(), F_OK) != 0; waited = true) {
    sleep_ms(kGateMs);
    if ((waited_ms += kGateMs) < gate_limit_ms) continue;
    waited_ms = 0;
    if (is_there()) return false;
    roll_back_frozen();
    if (process_state() != MIGR_PROC_FROZEN) return false;
  }
  return waited;
}

void roll_back_suspended() {
  std::lock_guard guard(Registry::get().lock);
  std::string why;
  if (switchover::process_state() != MIGR_PROC_SUSPENDED) return;
  for (const QpShadow* qp : Registry::get().qps)
    if (qp->old_real || qp->phase == switchover::Phase::kRebound) {  // the migration may be committed, and only migrd can find out
      say("suspended in a migration, and migrd is gone, or of another release; start one of this release");
      return;
    }
  Registry::get().let_changes_go();
  cm::rollback();
  if (switchover::rollback(why))
    fprintf(stderr, "libmigr: migrd has been gone for %u s and going back failed: %s\n", alone_limit_ms / 1000,
            why.c_str());
}

/// No migrd that understands us has been there for so long. A frozen process has its gate, or has waited for it as long while it ran: in
/// the life in which it was frozen nothing but the way back leads to either.
/// @return that was all which can be done
bool roll_back_alone(std::uint64_t alone_ms) {
  const migr_proc_state state = process_state();
  if (state == MIGR_PROC_SUSPENDED && alone_ms > alone_limit_ms) return roll_back_suspended(), true;
  if (state == MIGR_PROC_FROZEN && alone_ms > gate_limit_ms) return roll_back_frozen(), true;
  return false;
}

/// Until the connection ends. @return it was one of a migrd that understands us: it has asked something, or had nothing to ask
bool converse(Ended& ended) {
  const std::uint64_t began = now_ms();
  ended = say_hello(self->fd) ? serve_connection(self->fd) : Ended::kUnheard;
  disconnect();
  let_changes_go_unless_stopped();
  return ended == Ended::kGone || ended == Ended::kFrozen || now_ms() - began >= kHeldMs;
}

void* run(void*) {
  std::uint64_t alone_since = now_ms();
  bool left_alone = false;
  for (;;) {
    end_if_alone();
    if (process_state() == MIGR_PROC_FROZEN && wait_for_gate()) alone_since = now_ms();
    Ended ended = Ended::kNobody;
    self->fd = connect_to_migrd();
    if (self->fd >= 0 && converse(ended)) {
      alone_since = now_ms();
      left_alone = false;
    } else if (!left_alone && roll_back_alone(now_ms() - alone_since)) {
      left_alone = process_state() != MIGR_PROC_FROZEN;  // else there was no room for it: once more, after as long
      alone_since = now_ms();
    }
    if (ended == Ended::kNobody) sleep_ms(process_state() == MIGR_PROC_FROZEN ? kGateMs : kRetryMs);
    else if (ended == Ended::kNonsense) sleep_ms(kRetryAfterNonsenseMs);
    else if (ended == Ended::kUnheard) sleep_ms(kRetryMs);  // it was refused
    else if (ended == Ended::kGone) sleep_ms(kGateMs);  // never spin on a daemon that hangs up
  }
  return nullptr;
}

/// Also with MIGR_PROC_SOCKET: the gate lies beside the socket.
bool prepare_self() {
  auto* s = new Self;
  const char* path = getenv("MIGR_PROC_SOCKET");
  s->socket_path = path && *path ? path : MIGR_PROC_SOCKET;
  if (s->socket_path.size() >= sizeof(sockaddr_un::sun_path)) {
    fprintf(stderr, "libmigr: MIGR_PROC_SOCKET is longer than %zu bytes; this process cannot be migrated\n",
            sizeof(sockaddr_un::sun_path) - 1);
    delete s;
    return false;
  }
  if (getrandom(s->instance, sizeof(s->instance), 0) != sizeof(s->instance)) {
    delete s;
    return false;
  }
  const std::size_t slash = s->socket_path.rfind('/');
  s->gate_path = slash == std::string::npos ? "" : s->socket_path.substr(0, slash + 1);
  if (const char* ms = getenv("MIGR_GATE_LIMIT_MS")) gate_limit_ms = static_cast<unsigned>(atoi(ms));  // tests
  if (const char* ms = getenv("MIGR_ALONE_LIMIT_MS")) alone_limit_ms = static_cast<unsigned>(atoi(ms));
  s->gate_path += MIGR_PROC_GATE_PREFIX;
  char hex[3];
  for (const std::uint8_t byte : s->instance) {
    snprintf(hex, sizeof(hex), "%02x", byte);
    s->gate_path += hex;
  }
  self = s;
  return true;
}

// A fork must not catch the Registry half changed: the child has to be able to take its lock.
void before_fork() {
  const NoCancel no_cancel;
  cm::lock_for_fork();
  if (!(locked_for_fork = in_use)) return;
  Registry& registry = Registry::get();
  registry.lock.lock();
  // Each time: of the rings that we make ourselves nobody counts.
  for (const Context* context : registry.contexts) provider::keep_from_children(*context->real, context->ops);
  links::before_fork();
  datagrams::lock_for_fork();
  windows::lock_for_fork();
  Registry::get().events_lock.lock();
}
void after_fork_in_parent() {
  if (std::exchange(locked_for_fork, false)) {
    Registry::get().events_lock.unlock();
    windows::unlock_after_fork();
    datagrams::unlock_after_fork();
    Registry::get().lock.unlock();
  }
  cm::unlock_after_fork();
}
void after_fork_in_child() {
  const NoCancel no_cancel;
  quiet_threads = 0;
  if (!locked_for_fork) return after_fork_in_parent();
  Registry& registry = Registry::get();
  const bool inherits = !registry.contexts.empty();
  registry.held = registry.moving = registry.copied_ahead = registry.unmarked = registry.frozen = false;  // nobody would tell the child
  registry.written.reset();
  registry.closing = false;
  registry.registering = registry.ending = 0;  // nor does it have the threads that would count down
  registry.old_paths.clear();                  // its parent destroys them, and the kernel gives their handles to others
  // A child cannot use what is its parent's: it must not be what keeps both from being moved.
  for (Context* context : registry.contexts) (void)context->kernel->detach();
  provider::forget_uverbs_fds();
  after_fork_in_parent();
  whereabouts::untold();
  links::after_fork_in_child(inherits);
  cm::forget_parent();
  switchover::ahead::forget();  // the commands are the parent's
  if (self && self->fd >= 0) disconnect();  // the parent's; the child must not hold it open
  own_fds.clear();                          // whatever of them is left
  state.store(inherits ? State::kForkedChild : State::kNever);  // without, it is a process like any once it opens something itself
}

/// Before main(): those of the application that were registered later run while the locks are free, and may call verbs.
[[gnu::constructor]] void watch_forks() { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

}  // namespace

void begin() { in_use.store(true); }

void start() {
  begin();
  State expected = State::kNever;
  if (!state.compare_exchange_strong(expected, State::kRunning)) return;
  if (!prepare_self()) return;
  pthread_t thread;
  const int error = start_quiet_thread(thread, run, nullptr, "migr-control");
  if (error) fprintf(stderr, "libmigr: no control thread: %s; this process cannot be migrated\n", strerror(error));
  else pthread_detach(thread);
}

std::vector<migr_text_range> text_ranges() {
  std::vector<migr_text_range> ranges = provider::text_ranges();
  if (__start_migr_path)
    ranges.push_back({reinterpret_cast<std::uintptr_t>(__start_migr_path),
                      static_cast<std::uint64_t>(__stop_migr_path - __start_migr_path), 0, 0});
  return ranges;
}

std::array<std::uint8_t, 16> instance() { return self ? std::to_array(self->instance) : std::array<std::uint8_t, 16>{}; }

}  // namespace migr::control
