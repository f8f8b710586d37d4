// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Connections of the libraries: include/migr/proc_wire.h, migrd's side of it.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "fd.h"
#include "instance.h"
#include "limits.h"
#include "log.h"
#include "migr/proc_wire.h"
#include "status.h"
#include "thread_scan.h"
#include "wire.pb.h"

namespace migr {

/// A socket at which processes connect: SOCK_SEQPACKET, nobody waits in accept(). What was there of that name goes.
Result<Fd> listen_to_processes(const std::string& path);

/// The same in a loop of poll(). Thread: one at a time.
class Listener {
 public:
  Status start(const std::string& path);
  /// Not watched for a while after there was no descriptor for who connects: poll() would return at once.
  pollfd watched() const { return {waits() ? -1 : fd_.n, POLLIN, 0}; }
  /// Instead of `ms` (-1: without end).
  int wait_ms(int ms) const;
  /// n < 0: nobody, or it has to wait.
  Fd accept();

 private:
  bool waits() const { return std::chrono::steady_clock::now() < again_; }
  Fd fd_;
  std::chrono::steady_clock::time_point again_{};
  SaidRarely rarely_;
};

/// Who has half at most of what there is for all: a user, whatever containers he makes, and a container, whatever users its root
/// becomes. Root of the host may have everything.
struct User {
  uid_t uid = 0;
  std::uint64_t container = 0;  // its PID namespace; 0: the host's
  bool operator==(const User&) const = default;
  /// What the one has counts for the other, too. Not even its own counts for root of the host.
  bool counts_with(const User& other) const { return (uid && uid == other.uid) || (container && container == other.container); }
  std::string text() const;
};

/// Who connected, as the kernel says; whatever else comes over the socket is only a claim.
struct Speaker {
  pid_t pid = 0;
  User user;
  std::string life;  // process.h
  /// A child that got the socket does not speak for its parent, and still less for who has got that number after it.
  bool lives() const;
};
/// EPERM: not visible in migrd's pid namespace. ESRCH: it has ended.
Result<Speaker> speaker_of(int fd);

/// One process with libmigr. Thread: any; requests to one process queue up.
class ProcessSession {
 public:
  /// Reads HELLO from a connected socket. Errors: ETIMEDOUT, EPROTO, EPERM.
  static Result<std::shared_ptr<ProcessSession>> greet(Fd fd, const Speaker& who, int limit_ms);
  static Result<std::shared_ptr<ProcessSession>> greet(Fd fd, int limit_ms);

  pid_t pid() const { return who_.pid; }
  const User& user() const { return who_.user; }
  bool lives() const { return who_.lives(); }
  /// It has ended, or is about to, in which it closes its sockets first: waits for that, at most a second.
  bool ends() const;
  const Instance& instance() const { return instance_; }
  /// As of HELLO and what was asked since.
  std::uint32_t state() const { return state_; }
  std::uint32_t generation() const { return generation_; }
  std::string label() const;  // "process 712 (ib_write_bw)"
  int fd() const { return fd_.n; }

  struct Reply {
    std::uint64_t arg = 0;
    std::uint32_t record_size = 0;  // 0: no records
    std::vector<std::byte> records;
  };

  /// One request and its reply. Errors: the library's status with its text;
  /// ETIMEDOUT, ECONNRESET, EPROTO: the session is unusable then, and closed.
  Result<Reply> request(std::uint16_t type, std::uint32_t migration, std::uint64_t arg, const void* records,
                        std::size_t count, std::size_t record_size, int limit_ms);

  /// @param answer_arg: the reply's arg goes there
  template <class Out = migr_qp_ref, class In = migr_qp_ref>
  Result<std::vector<Out>> ask(std::uint16_t type, std::uint32_t migration, std::span<const In> in, int limit_ms,
                               std::uint64_t arg = 0, std::uint64_t* answer_arg = nullptr) {
    auto r = request(type, migration, arg, in.data(), in.size(), sizeof(In), limit_ms);
    if (!r) return r.error();
    if (answer_arg) *answer_arg = r->arg;
    if (!r->records.empty() && r->record_size != sizeof(Out)) return wrong_size(type, r->record_size, sizeof(Out));
    std::vector<Out> out(r->records.size() / sizeof(Out));
    if (!out.empty()) std::memcpy(out.data(), r->records.data(), r->records.size());
    return out;
  }
  Status tell(std::uint16_t type, std::uint32_t migration, int limit_ms, std::uint64_t arg = 0) {
    return request(type, migration, arg, nullptr, 0, 0, limit_ms);
  }

  /// Every thread but the control thread seen outside of HELLO's text ranges.
  Result<ScanStats> wait_threads_outside(int limit_ms);

  void close();  // wakes a pending request

  std::mutex telling;  ///< what is told unasked is looked up and sent under it: the newest comes last

 private:
  ProcessSession() = default;
  Error wrong_size(std::uint16_t type, std::size_t got, std::size_t want) const;

  Fd fd_;
  Speaker who_;
  std::string comm_;
  Instance instance_{};
  std::atomic<std::uint32_t> state_ = 0;
  std::atomic<std::uint32_t> generation_ = 0;
  pid_t control_tid_ = 0;  // in the process's pid namespace
  std::vector<TextRange> ranges_;
  std::mutex mutex_;
  std::uint32_t seq_ = 0;
};

/// What a process asks, on a connection of its own.
struct Question {
  Speaker who;
  std::uint16_t type = 0;
  std::uint64_t arg = 0;
  std::uint32_t record_size = 0;
  std::vector<std::byte> records;
  /// EPROTO: they are of another size.
  template <class T>
  Result<std::vector<T>> records_as() const {
    if (records.size() % sizeof(T) || (!records.empty() && record_size != sizeof(T))) return Error{EPROTO, "records of another size"};
    std::vector<T> out(records.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), records.data(), records.size());
    return out;
  }
};
struct Answer {
  std::uint32_t record_size = 0;
  std::vector<std::byte> records;  // of at most one packet
};

/// As processes are told. EINVAL: malformed.
/// @param owners  of these only; empty: all
Result<std::vector<migr_key_map>> key_maps(std::span<const wire::ProcessKeys> keys, const std::set<std::string>& owners = {});

/// KEYS: where the memory of processes that have moved can be reached now. One that has no QP for them is done, whatever its library says (EBUSY).
/// @param owners  whose keys it is told, in one message; empty: all
Status tell_keys(ProcessSession& s, std::uint32_t migration, std::span<const wire::ProcessKeys> keys, const std::set<std::string>& owners = {});

/// The listener and all sessions. Thread: any.
class SessionTable {
 public:
  /// Called from the listener's thread with each new session.
  using OnHello = std::function<void(std::shared_ptr<ProcessSession>)>;
  /// Called from a thread of each question's own.
  using OnQuestion = std::function<Result<Answer>(const Question&)>;

  /// @param most  sessions at the same time; half of them of one user
  explicit SessionTable(std::size_t most = kMaxSessions) : most_(most) {}
  ~SessionTable();
  /// What a migration knows of it: an instance is that of this process, or is not. nullopt: it knows nothing. Before start()
  using Known = std::function<std::optional<bool>(const Instance&, pid_t)>;
  void set_known(Known k) { known_ = std::move(k); }
  Status start(const std::string& socket_path, OnHello on_hello, OnQuestion on_question = {});
  void stop();

  std::shared_ptr<ProcessSession> by_pid(pid_t pid) const;
  /// EPERM: the instance is another process's, which lives.
  Status may_have(const Instance& instance, pid_t pid) const;
  std::vector<std::shared_ptr<ProcessSession>> all() const;
  /// Why a process has none that has tried. Empty: it has not.
  std::string refusal(pid_t pid) const;
  /// Waits for a session of `instance` that `fits` (empty: any). ETIMEDOUT. Instances are claims: who acts on one has to say
  /// whose process it is.
  using Fits = std::function<bool(const ProcessSession&)>;
  Result<std::shared_ptr<ProcessSession>> wait_for(const Instance& instance, const Fits& fits, int limit_ms);
  /// Waits until the library has closed its end (after FREEZE). ETIMEDOUT.
  Status wait_closed(const std::shared_ptr<ProcessSession>& s, int limit_ms);

 private:
  void run();
  void add(std::shared_ptr<ProcessSession> s);
  void refuse(const Speaker& who, const Error& why);
  struct Asker {
    Fd fd;
    Speaker who;
    std::chrono::steady_clock::time_point until{};  // it waits for its turn
  };
  void take_question(Fd fd, const Speaker& who);
  void answer(const Fd& fd, const Speaker& who);
  /// Caller holds mutex_.
  bool may_ask(const User& user) const;
  std::optional<Asker> next_asker();

  const std::size_t most_;
  Known known_;
  OnHello on_hello_;
  OnQuestion on_question_;
  std::vector<User> asking_;  // of each question that is being answered
  std::deque<Asker> waiting_;
  SaidRarely rarely_;
  Listener listener_;
  Fd wake_;
  std::thread thread_;
  std::atomic<bool> stop_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<ProcessSession>> sessions_;
  struct Refused {
    Speaker who;
    std::string why;
  };
  std::map<pid_t, Refused> refused_;
};

/// What is done when a process has connected, beside the thread that hears it: one at a time for each process, and of what waits for
/// its turn only the newest. Threads may outlive this.
class Turns {
 public:
  using Work = std::function<void()>;
  /// No thread for it: the session is closed, and the process connects again. Thread: one at a time
  void run(const std::shared_ptr<ProcessSession>& s, Work work);

 private:
  struct All {
    std::mutex mutex;
    std::map<pid_t, Work> next;  // of each process that has its turn; empty: nothing waits
  };
  const std::shared_ptr<All> all_ = std::make_shared<All>();
};

/// Makes and removes gate files (proc_wire.h) in `run_dir`.
Status open_gate(const std::string& run_dir, const Instance& i);
void close_gate(const std::string& run_dir, const Instance& i);
/// A process that is suspended, or was restored, and that no migration holds (any more) goes on.
void let_go(ProcessSession& s, const std::string& run_dir);
/// The same of one that was restored here with no object of a device: it may have ids of librdmacm, which nobody but REBIND makes again.
void take_in(ProcessSession& s, const std::string& run_dir);

}  // namespace migr
