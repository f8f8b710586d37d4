/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Connections of librdmacm. The application never holds the kernel's rdma_cm device itself: what it opened is an eventfd
 * that is readable while events wait, and its commands, at the ABI of rdma/rdma_user_cm.h, come here. All of a process's
 * ids live in one kernel file, which one thread of ours reads and writes, for the kernel takes commands only from the very
 * credentials (by pointer) that opened it, and after a restore every thread has others. The thread has those of whoever opened
 * the file: it ends with the file, and the next opener, who may have called setuid() meanwhile, starts another.
 *
 *   application --command--> Id --> KernelId --> kernel        kernel --event--> KernelId --> Id --> queue of a Channel
 *
 * An Id is what the application knows, for its whole life. Its KernelId is what stands for it now: after a migration the
 * one of before is gone, at both ends, and the partner's library makes a new connection of the kernel's CM to the restored
 * process's (a Link), over which nothing is ever said but that the connection has ended: by rdma_disconnect(), by
 * rdma_destroy_id(), or because a process has ended. docs/protocol.md, "librdmacm", tells the order.
 */
#ifndef MIGR_CM_ENGINE_H
#define MIGR_CM_ENGINE_H

#include <netinet/in.h>
#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <rdma/rdma_user_cm.h>

#include "../../include/migr/proc_wire.h"

namespace migr::cm {

/// The kernel, or a test's.
struct Kernel {
  std::function<int()> open;  ///< the device, not blocking. @return fd, or -errno
  std::function<ssize_t(int fd, const void* command, std::size_t bytes)> write;
};

using Instance = std::array<std::uint8_t, 16>;

/// A QP, as the application knows it: another device may have one of the same number.
struct QpName {
  const void* context;  ///< only compared
  std::uint32_t vqpn;   ///< 0: none
  friend bool operator==(QpName, QpName) = default;
};

/// A QP whose path a switchover has changed.
struct Path {
  QpName qp;
  std::uint32_t pqpn;       ///< now
  std::uint32_t dest_pqpn;  ///< now; 0: not known
  std::array<std::uint8_t, 16> dgid;
  Instance peer;
  bool restored;            ///< this process has moved; else its partner has
  bool gone = false;        ///< the connection did not survive
};

class Engine {
 public:
  explicit Engine(Kernel kernel);
  ~Engine();
  /// In a process that was restored before its first channel.
  void by_own_thread() { lives_++; }
  /// In a fork's child: only the file is closed; the rest is the parent's and stays as it was.
  void abandon();

  /* The application's calls, of any thread. All as the system call: -1 and errno. */

  /// open(2) of the device. While changes are held a first one waits. @param flags O_CLOEXEC and O_NONBLOCK are heeded
  int open_channel(int flags);
  /// What close(2) of the device does to its ids. The caller closes `fd`. @return false: not a channel
  bool close_channel(int fd);
  /// write(2)
  ssize_t command(int fd, const void* buf, std::size_t count);
  /// Number for the kernel of the QP that has `qp`'s number on the device of this GUID (0: not known). Its context is filled in.
  std::function<std::uint32_t(QpName& qp, std::uint64_t node_guid)> physical_qpn;
  /// Index, for the application, of the GID that the kernel has there, on the device of this GUID (0: not known).
  std::function<std::uint8_t(std::uint64_t node_guid, std::uint8_t port, std::uint8_t index)> known_gid;
  /// The device that the kernel means, as the application knows it: librdmacm looks for it in a list of its own.
  std::function<void(std::uint64_t& node_guid, std::uint32_t& index)> device_of_birth;
  /// Tells the other end of this QP's connection that it is over, where the kernel's message would not get there. Without our lock.
  /// @return it was told
  std::function<bool(QpName)> tell_end;

  /* On another link (links/); any thread. */

  /// A connection that stands has this QP.
  bool stands(QpName qp);
  /// The other end has told it. What the kernel says of it later is nothing new.
  void ended(QpName qp);

  /* A migration; the control thread. */

  /// Who this process is for others.
  void name(const Instance& self);
  /// The kernel's file; -1: no channel is open.
  int real_fd();
  /// How often what DESCRIBE tells has become another: a file, a port, a group.
  std::uint64_t changes();
  /// DESCRIBE: the kernel's file, if any channel is open, and the ports that have to be free where the process is restored.
  void describe(std::vector<migr_fd_desc>& out);
  /// From here to let_go() no connection begins to be made, or to end, by this process: what it asks for waits, and requests to it
  /// are not told, unless it is connecting itself: maybe to itself.
  void hold();
  void let_go();
  bool held();
  /// Waits until no connection is half made, at most so long. @return what still is; empty: nothing
  std::string settle(unsigned limit_ms);
  /// What cannot be moved; empty: all can.
  /// @param carries whether this queue pair carries a connection; null: nobody asks
  std::string immovable(const std::function<bool(QpName)>& carries = nullptr);
  /// Source: reads what the kernel has; commands wait from here on. EAGAIN: a connection is half made, or there is what immovable() names.
  int freeze(std::string& why, const std::function<bool(QpName)>& carries = nullptr);
  /// Restored: the kernel's file anew, in it what listens. @return 0 or errno, with all ids detached then
  int restored(std::span<const Path> paths, std::string& why);
  /// Where partners connect to, after restored(); 0: nobody needs to.
  std::uint16_t port() const { return port_; }
  /// KEYS has told where a process that moved is to be connected to.
  void peer_port(const Instance& peer, std::uint16_t port);
  /// SWITCH: that these connections end is what the source's end looks like, unless we go back.
  void switched(std::span<const Path> paths);
  /// Has it been connected by the kernel's CM?
  bool uses(QpName qp);
  /// RESUME: the paths are changed for good, those of SWITCH and these.
  void resumed(std::span<const Path> restored);
  /// From freeze() or switched() back to how it was.
  void rollback();

 private:
  enum class State : std::uint8_t {
    kIdle, kBound, kResolving, kResolved, kConnecting, kRequested, kAccepting, kListening, kConnected, kDisconnecting,
    kEnded
  };
  struct Id;
  struct Link;
  struct KernelId {
    std::uint64_t uid;
    std::uint32_t number;
    Id* id = nullptr;
    Link* link = nullptr;
    bool quiet = false;  ///< the application has had its ESTABLISHED
    bool established = false;  ///< quiet: it has had its own
  };
  struct Group;
  /// An event that the application has not read.
  struct Waiting {
    rdma_ucm_event_resp event;
    Id* owner;
    Id* request;   ///< CONNECT_REQUEST: the id that it brings
    Group* group;  ///< of a multicast group
  };
  struct Channel {
    int fd;
    std::deque<Waiting> events;
    std::deque<Waiting> withheld;  ///< requests, while held_
  };
  struct Id {
    std::uint32_t handle;
    std::uint64_t app_uid;
    Channel* channel;
    KernelId* k = nullptr;
    std::uint16_t port_space;
    std::uint8_t qp_type;
    State state = State::kIdle;
    std::uint32_t reported = 0;
    std::uint64_t node_guid = 0;  ///< of its device, at birth; 0: not known
    QpName qp{};                ///< none before it is connected
    std::uint32_t pqpn = 0;     ///< restored: now
    Path path{};                ///< of the link that `k` was; and
    std::uint16_t port = 0;     ///< where to. 0: the other end has begun it
    int backlog = 0;
    std::vector<char> address;  ///< sockaddr, once bound
    std::vector<std::vector<char>> options;
    bool held = false;          ///< SWITCH..RESUME
    bool end_told = false;      ///< the application has its DISCONNECTED
    bool timewait = false;      ///< it has, and not yet its TIMEWAIT_EXIT
    std::vector<rdma_ucm_event_resp> deferred;
  };
  struct Group {
    Id* id;
    std::uint32_t reported = 0;
  };
  struct Link {
    Path path;
    std::uint16_t port;  ///< 0: RESUME will say
    Id* id;  ///< null: the application is done with it, the other end has to be told
    KernelId* k = nullptr;
    unsigned tries = 0;
    std::uint64_t next_ms = 0;
    bool held = false;  ///< SWITCH..RESUME: where it leads to moves on
  };
  struct Job {
    std::function<ssize_t()> run;
    ssize_t result = 0;
    int error = 0;
    bool done = false;
  };

  static void* start(void* self);
  void run();
  ssize_t in_thread(std::unique_lock<std::mutex>& guard, std::function<ssize_t()> what, bool control = false);
  Job* next_job();
  bool unused() const;
  void close_unused();
  bool ensure_open(std::unique_lock<std::mutex>& guard);
  void wake();

  // Under mutex_, all of them; what writes to the kernel in our thread.
  ssize_t dispatch(Channel& channel, char* buf, std::size_t count, QpName qp);
  ssize_t create_id(Channel& channel, const char* payload, std::size_t in);
  ssize_t destroy_id(Id& id, std::uint64_t response);
  ssize_t disconnect(Id& id, std::size_t count);
  void end_at_once(std::unique_lock<std::mutex>& guard, std::uint32_t handle);
  ssize_t get_event(int fd, const char* payload, std::size_t in, std::size_t out);
  ssize_t migrate_id(Id& id, Channel& to, const char* payload);
  void note_done(Id& id, std::uint32_t command, const char* payload, std::size_t in);
  void name_device(Id& id, std::uint64_t response, std::size_t bytes, std::size_t index_at);
  bool query_address(const KernelId& k, rdma_ucm_query_addr_resp& out);
  std::uint64_t node_guid(const KernelId& k);
  bool bind(const KernelId& k, const void* address, std::size_t bytes);
  bool bind_anywhere(const KernelId& k);
  bool listen(const KernelId& k, std::uint32_t backlog);
  void learn_address(Id& id);
  void let_links_go(const Id& id);
  bool has_link(QpName qp);
  bool lost_its_id(QpName qp);
  void remove(Id& id);
  bool pump();
  bool is_full(const Id& listening) const;
  void handle(rdma_ucm_event_resp& event);
  void deliver_deferred(Id& id);
  bool set_up(KernelId& k, std::uint32_t event);
  void deliver(Id& id, rdma_ucm_event_resp& event);
  void deliver_end(Id& id);
  Id* meant_by(std::uint32_t command, const char* payload, std::size_t in);
  bool begins(std::uint32_t command, const char* payload, std::size_t in);
  void put_requests_again();
  void put(Channel& channel, const Waiting& waiting);
  void queue(Id& owner, const rdma_ucm_event_resp& event, Id* request, Group* group);
  void unqueue(Channel& channel, const std::function<bool(const Waiting&)>& which, Channel* to = nullptr);
  Id* find(std::uint32_t handle);
  Id* connected_by(QpName qp);
  KernelId* new_kernel_id(std::uint32_t number, Id* id);
  KernelId* make_kernel_id(std::uint16_t port_space, std::uint8_t qp_type, Id* id);
  void drop(KernelId*& k);
  static bool is_unconnected(const Id& id);
  static migr_fd_desc port_of(const Id& id);
  void lose(Id& id);
  void make_again(Id& id);
  bool listen_for_links();
  void answer_link(const rdma_ucm_event_resp& event);
  void start_link(Link& link);
  void link_event(Link& link, const rdma_ucm_event_resp& event);
  void link_failed(Link& link);
  void link_lost(Id& id);
  void link_over(Link& link, bool gone);
  std::string half_made();
  std::string cannot_move(const std::function<bool(QpName)>& carries);
  template <class Command>
  bool say(std::uint32_t number, Command& command, void* response = nullptr, std::size_t response_bytes = 0);

  Kernel kernel_;
  Instance self_{};
  std::mutex mutex_;
  std::condition_variable done_, thawed_, settled_;
  std::deque<Job*> jobs_, control_jobs_;
  bool started_ = false, frozen_ = false, held_ = false, ending_ = false;
  pthread_t thread_{};
  int real_fd_ = -1, wake_fd_ = -1;
  unsigned opening_ = 0;  ///< of open_channel() that wait
  std::uint64_t next_uid_ = 1;
  std::uint64_t lives_ = 1;  ///< one more with each restore
  std::uint64_t changes_ = 0;
  std::map<int, std::unique_ptr<Channel>> channels_;
  std::map<std::uint32_t, std::unique_ptr<Id>> ids_;
  std::unordered_map<std::uint64_t, std::unique_ptr<KernelId>> by_uid_;
  std::map<std::uint32_t, Group> groups_;
  std::vector<std::unique_ptr<Link>> links_;
  std::deque<std::pair<QpName, std::uint64_t>> without_id_;  ///< of connections that stood when their id was destroyed; and when, ms
  std::vector<Path> moving_;  ///< SWITCH..RESUME: of partners, as they will be
  KernelId* listener_ = nullptr;
  std::uint16_t port_ = 0;
  std::map<Instance, std::uint16_t> peer_ports_;
};

}  // namespace migr::cm

#endif
