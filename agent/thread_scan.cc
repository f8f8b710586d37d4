// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "thread_scan.h"

#include <dirent.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "aside.h"
#include "limits.h"
#include "mappings.h"
#include "stack_walk.h"

namespace migr {
namespace {

using Clock = std::chrono::steady_clock;

enum class Seen { kOutside, kInside, kGone };

// A return address is the one after a call, so it may be the first behind a range.
bool in_ranges(std::span<const TextRange> ranges, std::uint64_t a, bool return_address) {
  return std::any_of(ranges.begin(), ranges.end(), [&](const TextRange& r) {
    return return_address ? a > r.start && a - r.start <= r.bytes : a >= r.start && a - r.start < r.bytes;
  });
}

Result<std::vector<pid_t>> threads_of(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/task";
  std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(path.c_str()), closedir);
  if (!dir) return Error{ESRCH, "no process " + std::to_string(pid)};
  std::vector<pid_t> tids;
  errno = 0;
  for (const dirent* e; (e = readdir(dir.get())); errno = 0) {
    if (e->d_name[0] == '.') continue;
    tids.push_back(static_cast<pid_t>(std::atoi(e->d_name)));
    if (tids.size() > kMaxThreads)
      return Error{E2BIG, "process " + std::to_string(pid) + " has more than " + std::to_string(kMaxThreads) + " threads"};
  }
  if (errno) return sys_error("reading " + path);  // it would hide threads
  return tids;
}

// End of the mapping that holds `sp`, 0 if there is none, or it is of a file.
std::uint64_t stack_end(pid_t pid, std::uint64_t sp) {
  std::uint64_t end = 0;
  each_mapping(pid, [&](const Mapping& m) {
    if (sp < m.start || sp >= m.end) return false;
    end = m.inode ? 0 : m.end;
    return true;
  });
  return end;
}

// Where the stack began as the program did: arguments and environment are above, all frames of the first thread below. 0: not told
std::uint64_t first_stack(pid_t pid, pid_t tid) {
  constexpr int kStartStack = 28, kState = 3;  // fields of proc_pid_stat(5); the latter is the first behind the name
  std::ifstream stat("/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid) + "/stat");
  std::string line, field;
  std::getline(stat, line);
  const std::size_t name = line.rfind(')');
  if (name == line.npos) return 0;
  std::istringstream fields(line.substr(name + 1));
  for (int i = kState; i <= kStartStack; i++)
    if (!(fields >> field)) return 0;
  return std::strtoull(field.c_str(), nullptr, 10);
}

// An address above all frames of the stack that `sp` is in, without a look at the mappings, which are as many as queues have rings: glibc has
// a thread's control block, where fs points to, at the head of its stack, and no stack goes on behind one. From another stack, as a
// coroutine's, there may be a hole on the way to it. 0: not known
std::uint64_t above_frames(pid_t pid, pid_t tid, const user_regs_struct& regs) {
  const auto is = [sp = regs.rsp](std::uint64_t at) { return at > sp && at - sp <= kMaxStackBytes; };
  if (is(regs.fs_base)) return regs.fs_base;
  const std::uint64_t first = first_stack(pid, tid);
  return is(first) ? first : 0;
}

// Does any word between the stack pointer and the end of the stack look like
// an address in the ranges? nullopt: the stack could not be read.
std::optional<bool> mentioned_between(pid_t pid, std::uint64_t sp, std::uint64_t end, std::span<const TextRange> ranges) {
  if (!end || end - sp > kMaxStackBytes) return std::nullopt;
  std::vector<std::uint64_t> words(64 << 10 >> 3);
  for (std::uint64_t at = sp & ~7ull; at < end;) {
    const std::size_t want = std::min<std::uint64_t>(words.size() * 8, end - at);
    iovec local{words.data(), want};
    iovec remote{reinterpret_cast<void*>(at), want};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 8) return std::nullopt;
    for (ssize_t i = 0; i < n / 8; i++)
      if (in_ranges(ranges, words[i], true)) return true;
    at += n & ~7ll;
  }
  return false;
}

std::optional<bool> stack_mentions(pid_t pid, std::uint64_t sp, std::uint64_t above, std::span<const TextRange> ranges) {
  // Not all of it is there: the stack ends before, and the mappings say where.
  if (const auto told = mentioned_between(pid, sp, above, ranges)) return told;
  return mentioned_between(pid, sp, stack_end(pid, sp), ranges);
}

/// Reads stacks in a process of its own, one for all threads: memory may be what another one has to bring (userfaultfd), or a file by
/// the time that it is read, and that may never come. It begins with the first that is asked for.
class StackReader {
 public:
  enum Answer { kNothing, kMentions, kUnread, kSilent };
  StackReader(pid_t pid, std::span<const TextRange> ranges) : pid_(pid), ranges_(ranges) {}
  StackReader(const StackReader&) = delete;
  StackReader& operator=(const StackReader&) = delete;
  ~StackReader() { end(); }
  /// Of the stack above `sp`; kSilent: nothing in kScanWalkMs. An error: there is no such process, nor would there be one for the next thread
  /// @param above  as above_frames() says
  Result<Answer> ask(std::uint64_t sp, std::uint64_t above) {
    if (const Status s = desk_ ? Status() : begin(); !s) return s.error();
    desk_->sp = sp;
    desk_->above = above;
    sem_post(&desk_->asked);
    const auto limit = (Clock::now() + std::chrono::milliseconds(kScanWalkMs)).time_since_epoch();
    const auto s = std::chrono::duration_cast<std::chrono::seconds>(limit);
    const timespec until{s.count(), std::chrono::nanoseconds(limit - s).count()};
    while (sem_clockwait(&desk_->answered, CLOCK_MONOTONIC, &until))
      if (errno != EINTR) return end(), Answer{kSilent};
    return Answer{desk_->answer};
  }

 private:
  struct Desk {  // of both
    sem_t asked, answered;
    std::uint64_t sp, above;
    Answer answer;
  };
  Status begin() {
    const std::string what = "the stacks of process " + std::to_string(pid_) + " cannot be read: starting a process of our own for that";
    void* const at = mmap(nullptr, sizeof(Desk), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return sys_error(what);
    desk_ = new (at) Desk{};
    sem_init(&desk_->asked, 1, 0);
    sem_init(&desk_->answered, 1, 0);
    child_ = fork_aside();
    if (!child_) answer_all();
    if (child_ > 0) return {};
    const Error none = sys_error(what);
    end();
    return Error{ENOMEM, none.text};  // not EAGAIN, for which a migration begins again at once
  }
  [[noreturn]] void answer_all() {
    for (;;) {
      while (sem_wait(&desk_->asked)) {}
      const auto hit = stack_mentions(pid_, desk_->sp, desk_->above, ranges_);
      desk_->answer = !hit ? kUnread : *hit ? kMentions : kNothing;
      sem_post(&desk_->answered);
    }
  }
  void end() {
    if (child_ > 0) (void)exit_of(child_, 0);
    if (desk_) munmap(desk_, sizeof(Desk));
    child_ = -1;
    desk_ = nullptr;
  }

  const pid_t pid_;
  const std::span<const TextRange> ranges_;
  Desk* desk_ = nullptr;  // as long as it is there
  pid_t child_ = -1;
};

void nap(int us) {
  const timespec t{us / 1'000'000, us % 1'000'000 * 1000};
  nanosleep(&t, nullptr);
}

// Waits for the stop of a seized thread. A signal that arrives first is passed on.
Result<bool> wait_stop(pid_t tid, Clock::time_point deadline) {
  for (int pause_us = 20;;) {
    int st = 0;
    const pid_t r = waitpid(tid, &st, __WALL | WNOHANG);
    if (r < 0) return errno == ECHILD || errno == ESRCH ? Result<bool>(false) : sys_error("wait for thread " + std::to_string(tid));
    if (r == tid) {
      if (WIFEXITED(st) || WIFSIGNALED(st)) return false;
      if (WIFSTOPPED(st)) {
        if (st >> 16 == PTRACE_EVENT_STOP) return true;
        // Signal-delivery stop: let the signal through and wait on.
        if (ptrace(PTRACE_CONT, tid, 0, WSTOPSIG(st)) && errno == ESRCH) return false;
        ptrace(PTRACE_INTERRUPT, tid, 0, 0);
      }
      continue;
    }
    if (Clock::now() > deadline)
      return Error{ETIMEDOUT, "thread " + std::to_string(tid) + " did not stop for a look (uninterruptible sleep?)"};
    nap(pause_us);
    pause_us = std::min(pause_us * 2, 2000);
  }
}

// Ends tracing of a thread that may still run: it has to be stopped for that.
void let_go(pid_t tid) {
  const auto until = Clock::now() + std::chrono::milliseconds(kScanStopMs);
  if (ptrace(PTRACE_DETACH, tid, 0, 0) == 0) return;
  ptrace(PTRACE_INTERRUPT, tid, 0, 0);
  if (auto s = wait_stop(tid, until); s && *s) ptrace(PTRACE_DETACH, tid, 0, 0);
}

Result<Seen> look_at(pid_t pid, pid_t tid, std::span<const TextRange> ranges, StackReader& stacks, ScanStats& stats) {
  if (ptrace(PTRACE_SEIZE, tid, 0, 0)) {
    if (errno == ESRCH) return Seen::kGone;
    // A zombie thread group leader cannot be traced, and runs nothing.
    const int err = errno;
    char state = 0;
    if (FILE* f = std::fopen(("/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid) + "/stat").c_str(), "re")) {
      char line[256] = {};
      if (std::fgets(line, sizeof line, f))
        if (const char* p = std::strrchr(line, ')'); p && p[1]) state = p[2];
      std::fclose(f);
    }
    if (state == 'Z' || state == 'X' || state == 0) return Seen::kGone;
    return Error{err, "cannot trace thread " + std::to_string(tid) + " of " + std::to_string(pid) +
                          " (another tracer, or not root): " + std::strerror(err)};
  }
  stats.stops++;
  if (ptrace(PTRACE_INTERRUPT, tid, 0, 0) && errno == ESRCH) return Seen::kGone;
  auto stopped = wait_stop(tid, Clock::now() + std::chrono::milliseconds(kScanStopMs));
  if (!stopped) {
    let_go(tid);
    return stopped.error();
  }
  if (!*stopped) return Seen::kGone;

  Seen seen = Seen::kInside;
  user_regs_struct regs{};
  if (ptrace(PTRACE_GETREGS, tid, 0, &regs)) {
    if (errno == ESRCH) return Seen::kGone;
  } else if (!in_ranges(ranges, regs.rip, false)) {
    const auto said = stacks.ask(regs.rsp, above_frames(pid, tid, regs));
    if (!said) {
      ptrace(PTRACE_DETACH, tid, 0, 0);
      return said.error();
    }
    if (*said == StackReader::kNothing) {
      seen = Seen::kOutside;
    } else if (*said != StackReader::kSilent) {
      stats.unwound++;
      seen = frames_inside(pid, regs, [&](std::uint64_t ip, bool return_address) { return in_ranges(ranges, ip, return_address); }) ? Seen::kInside : Seen::kOutside;
    }
  }
  ptrace(PTRACE_DETACH, tid, 0, 0);
  return seen;
}

constexpr int kCalmPasses = 4;  // with nobody inside are enough, whoever is new in each

Result<ScanStats> scan(pid_t pid, std::span<const TextRange> ranges, pid_t skip_tid,
                                     Clock::time_point deadline, const std::stop_token& stop) {
  ScanStats stats;
  StackReader stacks(pid, ranges);
  std::set<pid_t> outside;
  const auto first_look = Clock::now() + std::chrono::milliseconds(kScanStopMs);  // also for who has no time
  int calm = 0;  // passes in a row in which nobody was inside
  for (int pause_us = kScanRetryUs;; pause_us = std::min(pause_us * 2, kScanRetryMaxUs)) {
    auto tids = threads_of(pid);
    if (!tids) return tids.error();
    pid_t inside = 0;
    const std::size_t known = outside.size();
    for (pid_t tid : *tids) {
      if (tid == skip_tid || outside.contains(tid)) continue;
      if (stop.stop_requested()) return Error{ECANCELED, "nobody wants to know any more whether process " + std::to_string(pid) + " is outside"};
      if (Clock::now() > std::max(deadline, first_look))
        return Error{ETIMEDOUT, "the threads of process " + std::to_string(pid) + " could not be looked at in time, " + std::to_string(outside.size()) + " of " + std::to_string(tids->size()) + " were"};
      auto seen = look_at(pid, tid, ranges, stacks, stats);
      if (!seen) return seen.error();
      if (*seen == Seen::kInside) {
        inside = tid;
        continue;
      }
      outside.insert(tid);
      if (*seen == Seen::kOutside) stats.threads++;
    }
    // A thread that ends may hide others from the pass that reads the list meanwhile: one more shows them. With threads
    // that come and go all the time there is always a new one; it was born after the flag went up.
    if (!inside && (outside.size() == known || ++calm == kCalmPasses)) return stats;
    if (!inside) continue;
    calm = 0;
    if (Clock::now() > deadline)
      return Error{ETIMEDOUT, "thread " + std::to_string(inside) + " of process " + std::to_string(pid) +
                                  " stayed inside a data-path call"};
    nap(pause_us);
  }
}

}  // namespace

Result<ScanStats> wait_until_outside(pid_t pid, std::span<const TextRange> ranges, pid_t skip_tid,
                                     Clock::time_point deadline, std::stop_token stop) {
  // Its end releases every thread that is still traced, whatever went wrong.
  std::optional<Result<ScanStats>> result;
  try {
    std::thread([&] { result = scan(pid, ranges, skip_tid, deadline, stop); }).join();
  } catch (const std::system_error& e) {
    return Error{ENOMEM, std::string("no thread that could look at those of process ") + std::to_string(pid) + ": " + e.what()};
  }
  return *result;
}

}  // namespace migr
