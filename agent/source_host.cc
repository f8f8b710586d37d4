// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "source_host.h"

#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "build_id.h"
#include "fault.h"
#include "file_tree.h"
#include "kernel_record.h"
#include "limits.h"
#include "mappings.h"
#include "migr/restore.h"
#include "page_images.h"
#include "parallel.h"
#include "process.h"
#include "processor.h"
#include "record_image.h"
#include "registered_memory.h"
#include "room.h"
#include "summary.h"
#include "tracking.h"
#include "unknown_objects.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kBasicSrq = 0;  // enum ib_srq_type

// 0: it has ended.
std::uint64_t resident_bytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/statm");
  std::uint64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

// Its connections are the kernel's: the library makes them again, if it is told of all of them. `described`: what it has told.
bool has_strange_rdma_cm(pid_t pid, std::span<const migr_fd_desc> described) {
  std::error_code ec;
  for (const auto& fd : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ec)) {
    const std::string to = fs::read_symlink(fd.path(), ec).string();
    const auto known = [&](const migr_fd_desc& d) { return d.kind == MIGR_FD_CM && std::to_string(d.fd) == fd.path().filename(); };
    if (!ec && to.ends_with("/infiniband/rdma_cm") && std::none_of(described.begin(), described.end(), known)) return true;
  }
  return false;
}

// Why a kind is refused, to follow its name.
std::string why_not_object(std::uint32_t type) {
  switch (type) {
    case MIGR_OBJ_XRCD: return " (XRC domain): it may be shared with processes elsewhere";
    case MIGR_OBJ_DM: return " (device memory): no other device has the same";
    default: return "";
  }
}

std::vector<Instance> instances_of(const journal::Source& r) {
  std::vector<Instance> out;
  for (const auto& p : r.processes()) {
    const auto i = instance_of(p.instance());
    out.push_back(i ? *i : Instance{});
  }
  return out;
}

// An older migrd did not write down which boot it was.
bool of_this_boot(const journal::Source& r) { return r.boot().empty() || r.boot() == boot_of_host(); }

bool process_of_it_lives(const ProcessSession& p) { return process_lives(p.pid()) && p.lives(); }

// One that ends closes its sockets first. @param s  why what it was asked has failed
bool has_ended(const Status& s, const ProcessSession& p) { return s.error().code == ECONNRESET ? p.ends() : !process_of_it_lives(p); }

// "is being migrated to dst"
std::string what_happens(const std::string& container, const std::string& to) {
  if (container.starts_with('/')) return "is being restored";
  return (to.starts_with('/') ? "is being stored in " : "is being migrated to ") + to;
}

Error migrd_ends() { return {ECANCELED, "migrd ends"}; }

void add_place(wire::OpenMigration& o, const Course& course) {
  const auto at = course.place();
  o.set_phase(at.phase);
  o.set_bytes(at.bytes);
  o.set_of_bytes(at.of);
  std::string state = what_happens(course.container, course.to);
  if (!at.phase.empty()) state += ": " + at.phase;
  if (at.of) state += ", " + sent_text(at.bytes, at.of);
  if (auto s = course.goes_on(); !s) state += "; it goes back: " + s.error().text;
  o.set_state(state);
}

/// The module does not say that it marks what mremap() moves before it has seen a move.
void move_a_page() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const both = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (both == MAP_FAILED) return;
  mremap(both, page, page, MREMAP_MAYMOVE | MREMAP_FIXED, static_cast<char*>(both) + page);
  munmap(both, 2 * page);
}

/// Why it cannot be seen what is written to this process's memory; empty: its processors and NICs do, of which it can.
std::string written_by_disks(pid_t pid, const std::vector<Mapping>& mappings) {
  if (!has_aio(mappings)) return "";
  return "process " + std::to_string(pid) + " has asynchronous I/O (io_setup), and a disk that writes to its memory sets no mark";
}

}  // namespace

// ---- the host

SourceHost::SourceHost(const Config& config, SessionTable& sessions, Claims& claims, Numbers& numbers, Directory& directory,
                       ToDestination to_destination, ToPartner to_partner)
    : config_(config), sessions_(sessions), claims_(claims), numbers_(numbers), directory_(directory), runc_(config),
      to_destination_(std::move(to_destination)),
      to_partner_(std::move(to_partner)), journal_(config.state_dir + "/journal/source"),
      huge_zero_page_(config.state_dir + "/no-huge-zero-page", thp_folder()) {}

std::string SourceHost::folder(std::uint32_t id) const { return config_.state_dir + "/source/" + migration_text(id); }

Status SourceHost::save(std::uint32_t id, const Entry& e) {
  if (auto s = journal_.save(id, e.record); !s) return s;
  std::lock_guard lock(mutex_);
  auto& kept = entries_[id] = e;
  kept.written = std::chrono::steady_clock::now();
  kept.unsaved = false;
  return {};
}

// What is over is over, also where that cannot be written down: tick() tries again, for the next migrd would act on what it finds.
void SourceHost::keep(std::uint32_t id, const Entry& e) {
  const auto s = save(id, e);
  if (s) return;
  spdlog::error("{}", s.error().text);
  std::lock_guard lock(mutex_);
  entries_[id] = e;
  entries_[id].unsaved = true;
}

// Of others each step writes what it has.
void SourceHost::save_again() {
  std::map<std::uint32_t, journal::Source> unsaved;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, e] : entries_)
      if (e.unsaved && e.record.settled() && !e.running) unsaved.emplace(id, e.record);
  }
  for (const auto& [id, record] : unsaved) {  // which nobody changes any more
    if (!journal_.save(id, record)) continue;
    std::lock_guard lock(mutex_);
    if (const auto e = entries_.find(id); e != entries_.end()) e->second.unsaved = false;
  }
}

// recover() looks which of two is the later one.
std::int64_t SourceHost::begins_s(const std::string& container) {
  std::int64_t at = unix_now();
  std::lock_guard lock(mutex_);
  for (const auto& [id, e] : entries_)
    if (e.record.container() == container) at = std::max(at, e.record.begun_s() + 1);
  return at;
}

void SourceHost::tick() {
  save_again();
  forget_settled(kKeepOutcome);
  std::map<std::uint32_t, bool> unstarted;  // and whether its end was told
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, e] : entries_)
      if (e.unstarted) unstarted.emplace(id, e.ended);
  }
  for (const auto& [id, ended] : unstarted) settle_later(id, ended);
}

// What is done is written down at once: it is not done again to what may have come meanwhile.
void SourceHost::note(std::uint32_t id, const journal::Source& r) {
  if (auto s = journal_.save(id, r); !s) spdlog::error("{}", s.error().text);
  std::lock_guard lock(mutex_);
  if (const auto e = entries_.find(id); e != entries_.end()) e->second.record = r;
}

void SourceHost::forget_settled(std::chrono::steady_clock::duration ago) {
  std::vector<std::uint32_t> gone;
  {
    std::lock_guard lock(mutex_);
    const auto before = std::chrono::steady_clock::now() - ago;
    std::erase_if(entries_, [&](const auto& e) {
      const bool old = e.second.record.settled() && !e.second.running && e.second.written <= before;
      if (old) gone.push_back(e.first);
      return old;
    });
  }
  for (const auto id : gone) journal_.remove(id);
}

Result<SourceHost::Entry> SourceHost::entry(std::uint32_t id) {
  std::lock_guard lock(mutex_);
  const auto e = entries_.find(id);
  if (e == entries_.end()) return Error{ENOENT, "no migration " + migration_text(id) + " from here"};
  return e->second;
}

wire::OutcomeReply SourceHost::outcome(std::uint32_t id) {
  wire::OutcomeReply r;
  if (auto e = entry(id)) r.set_outcome(e->record.outcome());
  return r;
}

// Or nothing was written down.
bool SourceHost::settled(std::uint32_t id) {
  const auto e = entry(id);
  return !e || e->record.settled();
}

void SourceHost::recover() {
  const auto all = journal_.load(kKeepOutcome, [](const auto& r) { return r.settled(); }, &unread_);
  // The next one of a container begins when the one before is settled. What has no destination is a checkpoint that was restored, whatever runs here.
  const auto went_back = [&all](const journal::Source& r) {
    const auto is_next = [&r](const auto& other) {
      return other.second.container() == r.container() && other.second.begun_s() > r.begun_s() && !other.second.destination().empty();
    };
    return r.outcome() != wire::COMMITTED && !r.settled() && std::any_of(all.begin(), all.end(), is_next);
  };
  for (const auto& [id, record] : all) {
    const LogScope log(id);
    Entry e;
    e.record = record;
    const bool over = went_back(record);
    if (over) {
      spdlog::warn("{} went back before it was migrated again, which could not be written down", record.container());
      e.record.set_settled(true);
    } else if (record.outcome() == wire::OPEN) {
      // Nobody has been told that it may run elsewhere, and from here on nobody will be.
      spdlog::warn("{} was not decided when migrd ended: going back", record.container());
    }
    if (record.outcome() == wire::OPEN) e.record.set_outcome(wire::UNDONE);
    if (over || record.outcome() == wire::OPEN) keep(id, e);
    {
      std::lock_guard lock(mutex_);
      entries_.emplace(id, e);
    }
    if (e.record.settled()) continue;
    std::vector<Claims::Process> held;
    const auto instances = instances_of(record);
    for (std::size_t i = 0; i < instances.size(); i++) held.push_back({instances[i], record.processes(static_cast<int>(i)).pid()});
    if (const auto holder = claims_.take(held, id)) spdlog::error("migration {:08x} holds a process of it, too", holder);
  }
  // Images of migrations that are over. What waits in a checkpoint has ended with the migrd that it listened to.
  if (auto s = remove_folder(config_.state_dir + "/source"); !s) spdlog::error("{}", s.error().text);
}

void SourceHost::settle_recovered() {
  std::vector<std::uint32_t> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, e] : entries_)
      if (!e.running) all.push_back(id);
  }
  for (const auto id : all) settle_later(id, false);
}

void SourceHost::settle_later(std::uint32_t id, bool ended) {
  {
    std::lock_guard lock(mutex_);
    auto e = entries_.find(id);
    if (e == entries_.end()) return;
    e->second.running = false;
    e->second.ended = ended;
    if (e->second.record.settled() || e->second.settling) return;
    e->second.settling = true;
    e->second.unstarted = false;
  }
  if (threads_.start([this, id] { settle(id); })) return;
  std::lock_guard lock(mutex_);
  if (const auto e = entries_.find(id); e != entries_.end()) e->second.settling = false, e->second.unstarted = true;
}

// Committed, and the destination has not said yet that it runs there. Without an error the outcome is known, and written down.
// ENOENT: the destination does not know of it any more.
Status SourceHost::find_outcome(std::uint32_t id, DestinationLink* destination) {
  auto e = entry(id);
  if (!e) return {};
  const Error silent{EHOSTUNREACH, e->record.destination() + " does not answer"};
  Status why = silent;
  wire::Outcome known = e->ordered;
  const auto believe = [&](wire::Outcome said) {
    if (std::exchange(known, said) == said || e->ordered == wire::UNKNOWN) return;
    spdlog::error("{}: the operator's order is not carried out: {} says that it {}", e->record.container(), e->record.destination(),
                  said == wire::COMMITTED ? "runs there" : "was undone there and never will run");
  };
  // The operator may be wrong, or late: a destination that answers is believed.
  if (destination && known == wire::UNDONE) {
    const auto said = destination->outcome(id);
    if (said && (*said == wire::COMMITTED || *said == wire::UNDONE)) believe(*said);
  } else if (destination) {
    const auto told = tell_commit(*destination, id, 0, kResolveStepMs);
    if (told.outcome != wire::OPEN) {
      believe(told.outcome);
    } else if (known == wire::COMMITTED) {  // of what does not run there this is the only one
      const auto said = destination->outcome(id);
      if (said && *said != wire::UNKNOWN) return silent;
    } else {
      why = told.why;
    }
  }
  if (known == wire::UNKNOWN) return why;
  if (known == wire::COMMITTED) return {};
  e->record.set_outcome(wire::UNDONE);
  if (auto s = save(id, *e); !s) return spdlog::error("{}", s.error().text), s;
  return {};
}

void SourceHost::tell_settled(std::uint32_t id, const Entry& e) const {
  const auto& record = e.record;
  wire::Summary s;
  s.set_id(id);
  s.set_container(record.container());
  s.set_from(config_.name);
  s.set_to(record.destination());
  s.set_begun_ms(record.begun_s() * 1000);
  *s.mutable_partners() = record.partners();
  s.set_touched(true);
  s.set_migrated(record.outcome() == wire::COMMITTED);
  if (!s.migrated()) s.set_error("migrd had to take it back by itself; its log says more");
  if (settled_) settled_(s, e.ended);
}

// Finishes what was committed, takes back what was not.
void SourceHost::settle(std::uint32_t id) {
  const LogScope log(id);
  const auto began = std::chrono::steady_clock::now();
  std::string failed;  // what was tried last
  while (!threads_.ends()) {
    auto e = entry(id);
    if (!e || e->record.settled()) return;
    auto say = [&](const std::string& what) {
      std::lock_guard lock(mutex_);
      entries_[id].waits_for = what;
    };
    // Each time anew: a link goes on with the certificate that it began with.
    const auto link = to_destination_(e->record.destination());
    DestinationLink* const destination = link ? link->get() : nullptr;
    Status s = e->known || e->record.outcome() != wire::COMMITTED ? Status() : find_outcome(id, destination);
    if (!s) {
      say("stands still: " + e->record.destination() + " was told to let it run and does not " +
          (s.error().code == ENOENT ? "say any more what became of that: if it runs there --commit --force, if it never will --rollback --force" : "answer; is asked again and again"));
    } else {
      {
        std::lock_guard lock(mutex_);
        entries_[id].known = true;
      }
      e = entry(id);
      if (!e) return;
      const bool forward = e->record.outcome() == wire::COMMITTED;
      const std::string what = forward ? "runs on " + e->record.destination() + "; what is left here goes" : "goes back";
      say(what + failed);
      s = forward ? finish(id, *e, destination) : take_back(id, *e, destination);
      if (s) {
        e->record.set_settled(true);
        e->settling = false;
        keep(id, *e);
        const auto instances = instances_of(e->record);
        claims_.release(instances, id);
        if (!forward) let_go_late(instances);
        if (auto r = remove_folder(folder(id)); !r) spdlog::error("{}", r.error().text);
        spdlog::info("{}: {}", e->record.container(), forward ? "finished" : "taken back");
        tell_settled(id, *e);
        return;
      }
      spdlog::error("{}: {}", e->record.container(), s.error().text);
      failed = ": " + s.error().text;
      say(what + failed);
    }
    const bool patient = std::chrono::steady_clock::now() - began < std::chrono::milliseconds(kResolveMs);
    for (int ms = patient ? kResolveStepMs : kResolveSlowMs; ms > 0 && !threads_.ends(); ms -= 100) {
      usleep(100'000);
      if (auto now = entry(id); now && !now->known && now->ordered != wire::UNKNOWN) break;
    }
  }
}

// Those that have connected since nobody waited for them any more, and before they were nobody's.
void SourceHost::let_go_late(const std::vector<Instance>& instances) const {
  for (const auto& s : sessions_.all()) {
    const bool its = std::find(instances.begin(), instances.end(), s->instance()) != instances.end();
    if (its && s->state() != MIGR_PROC_RUNNING && !claims_.holder(s->instance())) let_go(*s, config_.run_dir);
  }
}

// CRIU, and runc behind it, stop what they dump once more when they end: of a migrd that has ended in the middle they may still run.
// Its images are gone, so that takes no long.
void SourceHost::end_dump(std::uint32_t id) const {
  constexpr int kEndStepMs = 50;
  const auto dumpers = [&] {
    auto all = processes_told({"checkpoint-rdma", "dump", "pre-dump"}, folder(id) + "/");
    for (const pid_t criu : processes_told({"swrk"}, ""))  // of a runc, which may have been killed: it is told nothing, but works there
      if (works_in(criu, folder(id))) all.push_back(criu);
    return all;
  };
  const auto wait = [&](int ms) {
    for (; ms > 0 && !dumpers().empty(); ms -= kEndStepMs) usleep(kEndStepMs * 1000);
    return dumpers().empty();
  };
  if (wait(kCheckpointMs)) return;
  spdlog::error("a dump of migration {} does not end: ending it", migration_text(id));
  for (const pid_t runc : dumpers())  // who can still put things right when its CRIU has ended
    for (const pid_t pid : tree_of(runc))
      if (pid != runc) kill(pid, SIGKILL);
  if (wait(kHookMs)) return;
  for (const pid_t pid : dumpers()) kill(pid, SIGKILL);
}

// Each part may be done already.
Status SourceHost::take_back(std::uint32_t id, Entry& e, DestinationLink* destination) {
  auto& r = e.record;
  // The address must be gone there before it comes back here; a destination that is silent lets nothing through.
  if (const auto s = destination ? destination->abort(id) : Status(); !s) {
    spdlog::warn("{}", s.error().text);
    // It was silent when an operator ordered this, and answers now: as long as nothing runs here it is believed.
    const auto said = unreachable(s.error()) ? Result<wire::Outcome>(s.error()) : destination->outcome(id);
    if (said && *said == wire::COMMITTED)
      if (const auto here = runc_.state(r.container()); !here || here->status != "running") {
        r.set_outcome(wire::COMMITTED);
        note(id, r);
        return Error{EBUSY, "it does not go back: " + r.destination() + " says that it runs there"};
      }
  }
  const auto instances = instances_of(r);
  std::vector<std::unique_ptr<PartnerLink>> partners;
  for (const auto& p : r.partners())
    if (auto link = to_partner_(p)) partners.push_back(std::move(*link));
  // As Coordinator::old_paths_first() has it.
  auto old_paths = in_own_thread(with_log_fields([&] {
    (void)parallel_for(partners, [&](auto& p) -> Status {
      if (auto s = p->old_path(id); !s) spdlog::warn("{}", s.error().text);
      return {};
    });
  }));
  Status first;
  auto also = [&](const Status& s) {
    if (first && !s) first = s;
  };
  if (of_this_boot(r) && runc_.is_still(r.container(), r.began())) {
    end_dump(id);
    also(runc_.net("attach", r.bundle(), r.container()));  // before it runs: it has routes then
    also(runc_.resume(r.container(), {r.stood().begin(), r.stood().end()}));
    for (const auto& i : instances) also(open_gate(config_.run_dir, i));
    old_paths.wait();
    const pid_t init = runc_.init_pid(r.container());
    const auto its = [&](const ProcessSession& s) { return runc_.owns(r.container(), init, s.pid()); };
    // One that has ended has nothing to go back to; one that is late finds its gate open, and is let go when it connects.
    also(parallel_for(instances, [&](const Instance& i) -> Status {
      const pid_t pid = r.processes(static_cast<int>(&i - instances.data())).pid();
      auto session = sessions_.wait_for(i, its, !pid || process_lives(pid) ? kReconnectMs : 0);  // an older migrd did not write it down
      if (!session) {
        const bool lives = pid && process_lives(pid);
        if (const std::string refusal = lives ? sessions_.refusal(pid) : ""; !refusal.empty())
          return Error{ENOTCONN, "the libmigr of process " + std::to_string(pid) + " is not connected to migrd, which has refused it: " + refusal};
        spdlog::warn("{}", session.error().text);
        if (pid && !lives) close_gate(config_.run_dir, i);
        return {};
      }
      if ((*session)->state() != MIGR_PROC_RUNNING)
        if (const Status told = (*session)->tell(MIGR_MSG_ROLLBACK, id, kProcessMs); !told && !has_ended(told, **session)) return told;
      close_gate(config_.run_dir, i);
      return {};
    }));
    // It may have ended meanwhile: then nothing is left to be taken back.
    if (auto now = runc_.state(r.container()); now && now->status == "stopped") first = {};
  }
  old_paths.wait();
  (void)parallel_for(partners, [&](auto& p) -> Status {
    if (auto s = p->rollback(id); !s) spdlog::warn("{}", s.error().text);
    return {};
  });
  return first;
}

// The destination and the partners find their way without us if they do not answer now.
Status SourceHost::finish(std::uint32_t id, Entry& e, DestinationLink* destination) {
  if (destination) {
    auto keys = destination->rebind(id);
    if (keys) {
      wire::KeysRequest r;
      r.set_id(id);
      *r.mutable_keys() = keys->keys();
      (void)destination->resume(id);
      for (const auto& p : e.record.partners())
        if (auto link = to_partner_(p); link && (*link)->keys(r)) (void)(*link)->resume(id);
    }
  }
  return remove(id, e.record);
}

// Called until it succeeds; each part is done once, for what has the name afterwards is another one: it may have been started
// anew, or have come back.
Status SourceHost::remove(std::uint32_t id, journal::Source& r) {
  const auto instances = instances_of(r);
  // The name, or process number, may be another's by now.
  const bool its_own = !r.removed() && of_this_boot(r) && runc_.is_still(r.container(), r.began());
  Status s;
  if (!r.removed()) {
    if (auto n = numbers_.leave(instances); !n) return n;
    if (its_own) s = runc_.remove(r.container());
    r.set_removed(bool(s));
    if (s) note(id, r);
  }
  for (std::size_t i = 0; i < instances.size(); i++) {
    auto& p = *r.mutable_processes(static_cast<int>(i));
    if (p.reserved()) continue;
    const auto n = numbers_.left(instances[i], {p.born().begin(), p.born().end()}, r.destination());
    p.set_reserved(bool(n));
    if (s && !n) s = n;
  }
  if (its_own || !runc_.exists(r.container()))
    if (auto n = runc_.net("cleanup", r.bundle(), r.container()); s && !n) s = n;
  if (!s) note(id, r);  // else the caller writes it down as settled
  return s;
}

Result<std::shared_ptr<Course>> SourceHost::begin(const std::string& container, const std::string& to, std::uint32_t id) {
  std::lock_guard lock(mutex_);
  if (gives_up_) return migrd_ends();
  if (auto s = is_at_rest(container); !s) return s.error();
  std::erase_if(busy_, [](const auto& b) { return b.second.expired(); });
  auto course = std::make_shared<Course>(container, to, id);
  busy_[container] = course;
  return course;
}

void SourceHost::give_up() {
  std::lock_guard lock(mutex_);
  gives_up_ = true;
  for (const auto& [container, known] : busy_) {
    const auto course = known.lock();
    if (!course) continue;
    const LogScope log(course->place().id);
    spdlog::info("migrd ends: {} {}", container, course->give_up(migrd_ends()) ? "goes back" : "is committed, and is waited for");
  }
}

bool SourceHost::is_idle() {
  std::lock_guard lock(mutex_);
  return std::all_of(busy_.begin(), busy_.end(), [](const auto& b) { return b.second.expired(); });
}

// Caller holds mutex_.
Status SourceHost::is_at_rest(const std::string& container) const {
  const auto known = busy_.find(container);
  const auto course = known == busy_.end() ? nullptr : known->second.lock();
  if (!course) return {};
  return Error{EBUSY, "'" + container + "' " + what_happens(container, course->to) + " already, migration " + migration_text(course->place().id)};
}

std::vector<wire::OpenMigration> SourceHost::open_migrations() {
  std::lock_guard lock(mutex_);
  std::map<std::uint32_t, std::shared_ptr<Course>> under_way;
  for (const auto& [container, known] : busy_)
    if (auto course = known.lock()) under_way.emplace(course->place().id, std::move(course));
  std::vector<wire::OpenMigration> out;
  for (const auto& [id, e] : entries_) {
    if (e.record.settled()) continue;
    wire::OpenMigration o;
    o.set_id(id);
    o.set_role("source");
    o.set_container(e.record.container());
    o.set_source(config_.name);
    o.set_destination(e.record.destination());
    *o.mutable_partners() = e.record.partners();
    o.set_begun_s(e.record.begun_s());
    o.set_outcome(e.record.outcome());
    o.set_state(e.waits_for);
    if (const auto u = under_way.extract(id); u && e.running) add_place(o, *u.mapped());
    if (e.ordered != wire::UNKNOWN)
      o.set_state(o.state() + (o.state().empty() ? "" : "; ") + "the operator has ordered: " + (e.ordered == wire::COMMITTED ? "--commit" : "--rollback") + " --force");
    out.push_back(o);
  }
  // What has not come so far that it is written down.
  for (const auto& [id, course] : under_way) out.push_back(open_of(*course));
  return out;
}

wire::OpenMigration SourceHost::open_of(const Course& course) const {
  wire::OpenMigration o;
  o.set_id(course.place().id);
  o.set_role("source");
  o.set_container(course.container);
  o.set_source(config_.name);
  o.set_destination(course.to);
  o.set_begun_s(course.begun_s);
  o.set_outcome(wire::OPEN);
  add_place(o, course);
  return o;
}

Result<wire::OpenMigration> SourceHost::cancel(std::uint32_t id, const std::string& container) {
  std::lock_guard lock(mutex_);
  const auto committed = [](std::uint32_t which, const std::string& to) {
    return Error{EBUSY, "migration " + migration_text(which) + " is committed already: " + (to.starts_with('/') ? "it is stored in " : "it runs on ") + to + ", or will; see: migrctl recover"};
  };
  const auto named = busy_.find(container);
  auto course = named == busy_.end() ? nullptr : named->second.lock();
  for (const auto& [name, known] : busy_)
    if (auto one = known.lock(); !course && one && one->place().id == id) course = std::move(one);
  if (course && course->cancel()) return open_of(*course);
  if (course) return committed(course->place().id, course->to);
  for (const auto& [known, e] : entries_) {
    if (e.record.settled() || (known != id && e.record.container() != container)) continue;
    if (e.record.outcome() == wire::COMMITTED) return committed(known, e.record.destination());
    return Error{EBUSY, "migration " + migration_text(known) + " goes back already; see: migrctl recover"};
  }
  return Error{ENOENT, "nothing of that name or number is under way from here"};
}

Status SourceHost::order(std::uint32_t id, wire::Outcome outcome, bool force) {
  std::lock_guard lock(mutex_);
  const auto e = entries_.find(id);
  if (e == entries_.end() || e->second.record.settled()) return Error{ENOENT, "no open migration of that number here"};
  const std::string to = e->second.record.destination();
  if (e->second.running) return Error{EBUSY, "it is being migrated; wait for the end, or take it back: migrctl cancel " + migration_text(id)};
  if (e->second.record.outcome() == wire::UNDONE) {
    if (outcome == wire::UNDONE) return {};
    return Error{EPERM, "it is being taken back: " + to + " was never told to let it run"};
  }
  if (e->second.known) {
    if (outcome == wire::COMMITTED) return {};
    return Error{EPERM, "it runs on " + to + ": what is left here is tried again until it is gone"};
  }
  if (!force)
    return Error{EBUSY, outcome == wire::UNDONE ? to + " was told to let the container run, and may. Make sure that it does not and never will (" + to +
                                                      " is off, and its disk will not be used again), then: --rollback --force"
                                                : "the container that stands still here would be destroyed. Make sure that it runs on " + to +
                                                      ", then: --commit --force"};
  e->second.ordered = outcome;
  return {};
}

// ---- one migration

SourceRun::~SourceRun() {
  for (auto& p : processes_)
    if (how_ != Describe::kLook && p.session->state() == MIGR_PROC_RUNNING) (void)p.session->tell(MIGR_MSG_ROLLBACK, id_, kProcessMs);
  if (host_.settled(id_)) host_.claims_.release(claimed_, id_);  // else when it is
}

Status SourceRun::inspect_context(ContextRecord& c, std::uint32_t owner, std::span<const migr_fd_desc> described) {
  const auto& r = c.rec;
  const std::string who = "process " + std::to_string(r.pid) + " (" + comm_of(r) + ")";
  if (!(r.flags & MIGR_CTX_ATTACHED))
    return Error{EOPNOTSUPP, who + (host_.sessions_.by_pid(static_cast<pid_t>(r.pid))
                                        ? " has RDMA resources that its libmigr does not know; its standard error may say why"
                                        : " has RDMA resources but does not use libmigr; start it with LD_PRELOAD=" + host_.config_.libmigr + "; if it has that, its container has neither /dev/migr nor " + host_.config_.run_dir)};
  if (r.flags & MIGR_CTX_HYDRATED)
    return Error{EOPNOTSUPP, who + " has RDMA resources from before migr.ko was loaded, so its record is incomplete; restart it"};
  for (const auto& o : c.others)
    if (o.type != MIGR_OBJ_AH && o.type != MIGR_OBJ_MW) return Error{EOPNOTSUPP, who + " uses a resource that cannot be migrated yet: " + object_name(o.type) + why_not_object(o.type)};
  for (const auto& s : c.srqs)
    if (s.srq_type != kBasicSrq)
      return Error{EOPNOTSUPP, who + " uses a shared receive queue for XRC or tag matching, which cannot be migrated yet"};
  for (const auto& q : c.qps) {
    if (q.flags & MIGR_QP_FORMER) continue;  // an old path, not yet destroyed
    if (q.qp_type != kRc && q.qp_type != kUc && q.qp_type != kUd)
      return Error{EOPNOTSUPP, who + " uses a QP of type " + qp_type_name(q.qp_type) + ", which cannot be migrated yet"};
    if (auto s = state_can_move(q, who); !s) return s;
    info_.vqpns.push_back(q.vqpn);
    if (q.qp_type == kUd)
      info_.datagrams.push_back({r.ctx_id, q.vqpn, q.pqpn, device_of(r)});
    else if (connected(q))
      info_.connected.push_back({r.ctx_id, q.vqpn, q.pqpn, bytes_of(q.ah.sgid), bytes_of(q.ah.dgid), q.dest_qpn, q.path_mtu});
  }
  info_.ctxs.emplace_back(r.ctx_id, owner);
  const std::string device = device_of(r);
  if (!device.empty() && std::find(info_.devices.begin(), info_.devices.end(), device) == info_.devices.end()) info_.devices.push_back(device);
  if (!device.empty()) add_needs(info_.needs, c, described);
  auto& n = info_.resources;
  n.set_ctx(n.ctx() + 1);
  n.set_pd(n.pd() + static_cast<std::uint32_t>(c.pds.size()));
  n.set_mr(n.mr() + static_cast<std::uint32_t>(c.mrs.size()));
  n.set_cq(n.cq() + static_cast<std::uint32_t>(c.cqs.size()));
  n.set_qp(n.qp() + static_cast<std::uint32_t>(c.qps.size()));
  return {};
}

bool SourceRun::claim(const ProcessSession& s) {
  if (how_ == Describe::kLook) return !host_.claims_.holder(s.instance());
  if (host_.claims_.take({{s.instance(), s.pid()}}, id_)) return false;
  claimed_.push_back(s.instance());
  return true;
}

Result<ContainerInfo> SourceRun::inspect(const std::string& container) {
  auto state = host_.runc_.state(container);
  if (!state) return state.error();
  if (state->status != "running") return Error{EBUSY, "'" + container + "' is " + state->status + ", not running"};
  {
    std::lock_guard lock(host_.mutex_);
    if (auto s = how_ == Describe::kLook ? host_.is_at_rest(container) : Status(); !s) return s.error();
    for (const auto& [id, e] : host_.entries_)
      if (e.record.container() == container && !e.record.settled())
        return Error{EBUSY, "an earlier migration of '" + container + "' is not finished; see: migrctl recover"};
  }
  info_.id = container;
  // Once it is open nobody opens it again.
  if (host_.opens_ && host_.opens_(container))
    return Error{EINPROGRESS, "the network of '" + container + "', which came here, is not open yet; see: migrctl recover. Try again when it is"};
  info_.bundle = state->bundle;
  info_.piped = host_.runc_.is_piped(container);
  state_ = *state;
  if (!info_.bundle.empty()) {
    auto mode = folder_mode(info_.bundle);
    if (!mode) return mode.error();
    info_.bundle_mode = std::move(*mode);
  }
  if (auto s = address_can_move(host_.config_, info_.bundle); !s) return s.error();
  auto all = host_.runc_.pids(state_);
  if (!all) return all.error();
  if (const auto root = bare_pid(container)) info_.pids = numbers_of(*root);
  if (auto s = host_.runc_.may_leave(state_); !s) return s.error();
  for (const pid_t pid : *all) {
    const auto mappings = mappings_of(pid);
    const auto library = maps_library(pid, mappings, host_.config_.libmigr);
    if (!library) return library.error();
    if (*library && info_.libmigr.empty()) info_.libmigr = build_id_of(host_.config_.libmigr);
    info_.memory_bytes += resident_bytes(pid);
    info_.filled_bytes += filled_bytes(pid);
    if (info_.written_unseen.empty()) info_.written_unseen = written_by_disks(pid, mappings);
    if (!has_huge_pages(pid)) continue;
    std::ifstream smaps("/proc/" + std::to_string(pid) + "/smaps");
    add_huge_memory(info_.huge, smaps);
  }
  auto found = contexts_now();
  if (!found) return found.error();
  std::set<pid_t> pids;
  for (const auto& c : *found) pids.insert(static_cast<pid_t>(c.rec.pid));
  // Also those that have closed what they had: their library holds a connection to here.
  for (const pid_t pid : *all)
    if (host_.sessions_.by_pid(pid)) pids.insert(pid);
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error();
  move_a_page();
  const auto loaded = kernel->info();
  if (!loaded) return loaded.error();
  if (info_.written_unseen.empty() && !loaded->moves_marked.value_or(false))
    info_.written_unseen = loaded->moves_marked ? "migr.ko cannot mark on this kernel what mremap() moves as written (the kernel's log has a line of it, \"migr: \", "
                                                  "or kprobes were turned off when it was loaded)"
                                                : "the migr.ko that is loaded is older and does not mark what mremap() moves as written: load the new one (rmmod migr && modprobe migr, or restart the host)";
  for (const pid_t pid : pids) {
    const auto owner = static_cast<std::uint32_t>(processes_.size());
    Process found{pid, host_.sessions_.by_pid(pid), {}};
    if (found.session) found.generation = found.session->generation();
    // First its own view, which says of which state it is: what changes later is noticed. Whatever comes of this, it is let go in the end.
    const bool asked = found.session && claim(*found.session) && found.session->state() == MIGR_PROC_RUNNING;
    Process& p = asked ? processes_.emplace_back(std::move(found)) : found;
    Status described;
    if (asked) {
      const std::uint64_t how = how_ == Describe::kLook ? 0 : MIGR_DESCRIBE_MOVE | (how_ == Describe::kHold ? MIGR_DESCRIBE_HOLD : 0);
      auto fds = p.session->ask<migr_fd_desc, migr_qp_ref>(MIGR_MSG_DESCRIBE, id_, {}, kProcessMs + kParkMs, how, &p.described);
      if (fds) p.fds = *fds;
      described = fds;
    }
    auto ctxs = kernel->contexts(pid);
    if (!ctxs) return ctxs.error();
    if (const std::string refusal = host_.sessions_.refusal(pid); !p.session && !refusal.empty())
      return Error{ENOTCONN, "the libmigr of process " + std::to_string(pid) + " is not connected to migrd, which has refused it: " + refusal};
    // It knows why.
    if (asked && !described && std::any_of(ctxs->begin(), ctxs->end(), [](const ContextRecord& c) { return !(c.rec.flags & MIGR_CTX_ATTACHED); }))
      return described.error();
    for (auto& c : *ctxs) {
      if (auto s = kernel->objects(c); !s) return s.error().code == ENOENT ? changed(pid) : s.error();
      if (auto s = inspect_context(c, owner, p.fds); !s) return s.error();
      for (const auto& q : c.qps)
        if (!(q.flags & MIGR_QP_FORMER)) p.vqpns.push_back(q.vqpn);
    }
    if (!p.session)
      return Error{ENOTCONN, "the libmigr of process " + std::to_string(pid) + " is not connected to migrd; can it see " +
                                 host_.config_.run_dir + ", has the container that mounted?"};
    if (!asked)
      return Error{EINPROGRESS, p.session->label() + " takes part in another migration; try again when that is over"};
    if (!described) return described.error();
    if (auto s = knows_its_objects(p, std::move(*ctxs)); !s) return s.error();
    info_.instances.push_back(p.session->instance());
    auto births = host_.numbers_.births_of(p.session->instance(), p.vqpns, p.generation == 0);
    if (!births) return births.error();
    info_.births.push_back(std::move(*births));
  }
  for (const pid_t pid : *all) {
    const auto known = std::find_if(processes_.begin(), processes_.end(), [&](const Process& p) { return p.pid == pid; });
    if (has_strange_rdma_cm(pid, known == processes_.end() ? std::span<const migr_fd_desc>{} : known->fds))
      return Error{EOPNOTSUPP, "process " + std::to_string(pid) + " uses librdmacm (/dev/infiniband/rdma_cm is open) and its libmigr does not know of it: what the kernel's connection manager knows of its connections cannot be migrated"};
  }
  info_.instructions = instructions_here();
  for (auto& n : info_.needs) {
    auto room = room_of(n.device());
    if (!room) return room.error();
    has_now(n, *room);
  }
  for (const auto& device : info_.devices) {
    auto gids = gids_of(device);
    if (!gids) return gids.error();
    std::move(gids->begin(), gids->end(), std::back_inserter(info_.gids));
  }
  for (std::uint32_t i = 0; i < info_.instances.size(); i++)
    for (auto& gid : host_.directory_.earlier(info_.instances[i])) info_.earlier.emplace_back(i, std::move(gid));
  if (auto s = disk_fits(info_.image_bytes(), host_.folder(id_)); !s) return s.error();
  count();
  return info_;
}

// What REBIND would not find, or not make again. @param ctxs  as they were after DESCRIBE
Status SourceRun::knows_its_objects(Process& p, std::vector<ContextRecord> ctxs) {
  const auto count = [&] { return p.session->ask<migr_fd_desc, migr_qp_ref>(MIGR_MSG_DESCRIBE, id_, {}, kProcessMs); };
  const auto look = [&]() -> Result<std::vector<ContextRecord>> {
    auto kernel = KernelRecord::open();
    if (!kernel) return kernel.error();
    auto now = kernel->contexts(p.pid);
    if (now)
      for (auto& c : *now)
        if (auto s = kernel->objects(c); !s) return s.error().code == ENOENT ? changed(p.pid) : s.error();
    return now;
  };
  const Status s = migr::knows_its_objects(p.session->label(), std::move(ctxs), p.fds, count, look);
  std::erase_if(p.fds, [](const migr_fd_desc& d) { return d.kind == MIGR_FD_COUNT; });  // of the moment: nothing for the image
  return s;
}

Error SourceRun::changed(pid_t pid) { return {EAGAIN, "RDMA resources of process " + std::to_string(pid) + " were made, changed or destroyed meanwhile"}; }

// Every RDMA context in the container, without its objects.
Result<std::vector<ContextRecord>> SourceRun::contexts_now() const {
  auto pids = host_.runc_.pids(state_);
  if (!pids) return pids.error();
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error();
  auto all = kernel->contexts();
  if (!all) return all.error();
  std::erase_if(*all, [&](const ContextRecord& c) { return std::find(pids->begin(), pids->end(), static_cast<pid_t>(c.rec.pid)) == pids->end(); });
  return all;
}

Result<std::string> SourceRun::record(const std::string& destination, const std::vector<std::string>& partners) {
  const std::string dir = host_.folder(id_);
  std::error_code ec;
  fs::create_directories(dir + "/images", ec);
  fs::create_directories(dir + "/work", ec);
  if (ec) return Error{ec.value(), "making " + dir + ": " + ec.message()};
  std::vector<DescribedProcess> described;
  for (auto& p : processes_) described.push_back({p.pid, p.session->instance(), p.fds});
  // Also if there is nothing on record: the plugin knows by it that the restore has to wait.
  const Status written = write_record_image(described, dir + "/images");
  // What changes meanwhile is found in part, or not at all.
  if (const auto same = as_described(); !same && (!written || same.error().code == EAGAIN)) return same.error();
  if (!written) return written.error();
  if (auto s = host_.runc_.early_images(info_.id, dir + "/images"); !s) return s.error();
  // By this the plugin knows that it has to look, in the stop, for what is wiped in a forked process.
  const auto pids = host_.runc_.pids(state_);
  if (!pids) return pids.error();
  if (std::any_of(pids->begin(), pids->end(), [](pid_t pid) { return has_vm_flag(pid, "wf"); }))
    if (auto s = write_whole(dir + "/images/" MIGR_RST_WIPED_NAME, ""); !s) return s.error();
  auto& r = entry_.record;
  r.set_outcome(wire::OPEN);
  r.set_container(info_.id);
  r.set_bundle(info_.bundle);
  r.set_began(host_.runc_.life(info_.id));
  r.set_boot(boot_of_host());
  for (const auto& p : processes_) {
    auto* l = r.add_processes();
    const Instance& i = p.session->instance();
    l->set_instance(i.data(), i.size());
    l->set_pid(p.pid);
    const auto born = host_.numbers_.born_here(i, p.vqpns, p.generation == 0);
    if (!born) return born.error();
    l->mutable_born()->Assign(born->begin(), born->end());
  }
  r.set_destination(destination);
  for (const auto& p : partners) r.add_partners(p);
  for (const pid_t p : host_.runc_.standing(info_.id)) r.add_stood(p);
  r.set_begun_s(host_.begins_s(info_.id));
  entry_.running = true;
  // From here on there is something to take back.
  if (auto s = host_.save(id_, entry_); !s) return s.error();
  if (auto s = checkpoint_ahead(""); !s) return s.error();
  detach_ahead_ = host_.runc_.net_ahead("detach", info_.bundle, info_.id, dir + "/detach.out");
  return dir + "/images";
}

Status SourceRun::checkpoint_ahead(const std::string& parent) {
  const std::string dir = host_.folder(id_);
  auto ahead = host_.runc_.checkpoint_ahead(info_.id, dir + "/images", parent, dir + "/work", dir + "/checkpoint.out");
  if (ahead) ahead_ = std::move(*ahead);
  return ahead;
}

Status SourceRun::has_no_huge_pages() const {
  auto pids = host_.runc_.pids(state_);
  if (!pids) return pids.error();
  for (const pid_t pid : *pids)
    if (has_huge_pages(pid))
      return Error{EOPNOTSUPP, "process " + std::to_string(pid) + " has memory of huge pages (MAP_HUGETLB, MFD_HUGETLB, hugetlbfs), which CRIU before 3.18 restores wrongly after a pre-dump"};
  return {};
}

Status SourceRun::may_pre_dump() {
  if (auto s = has_no_huge_pages(); !s) return s;
  if (auto s = disk_fits(2 * info_.image_bytes(), host_.folder(id_)); !s) return s;
  if (no_huge_zeros_) return {};
  auto kept_out = host_.huge_zero_page_.keep_out();
  if (kept_out) no_huge_zeros_ = std::move(*kept_out);
  return kept_out;
}

// If not, no round before can be built upon either: the kernel takes the mark that a page was written to away as it merges it, and a disk may
// write late to a page whose mark a round has taken away.
static Status all_is_marked(const Result<std::vector<pid_t>>& pids) {
  if (!pids) return pids.error();
  for (const pid_t pid : *pids) {
    if (is_merged(pid)) return Error{ESTALE, "process " + std::to_string(pid) + " has memory that the kernel merges (KSM), of which it cannot be seen what was written to since"};
    if (std::string why = written_by_disks(pid, mappings_of(pid)); !why.empty()) return Error{ESTALE, std::move(why)};
  }
  return {};
}

Result<std::string> SourceRun::pre_dump(unsigned round) {
  const std::string dir = host_.folder(id_), name = pre_copy_dir(round), to = dir + "/" + name;
  const std::string parent = round > 1 ? "../" + pre_copy_dir(round - 1) : "";
  if (auto s = all_is_marked(host_.runc_.pids(state_)); !s) return s.error();
  if (auto s = host_.runc_.pre_dump(info_.id, dir + "/images", to, parent, dir + "/work-" + name); !s) return s.error();
  if (auto s = has_no_huge_pages(); !s) return s.error();  // it may have come before the dump, and is in it
  if (round > 1)
    if (auto pages = migr::drop_unchanged(to, dir + "/" + pre_copy_dir(round - 1)); !pages) return pages.error();
  return to;
}

Status SourceRun::checkpoint_after(unsigned round) {
  if (auto s = all_is_marked(host_.runc_.pids(state_)); !s) return s;
  pre_copied_ = pre_copy_dir(round);
  // The checkpoint that waits knows nothing of it: another takes its place.
  return checkpoint_ahead("../" + pre_copied_);
}

Result<std::uint64_t> SourceRun::drop_unchanged() {
  const std::string dir = host_.folder(id_);
  std::uint64_t unchanged = 0;
  auto work = [&]() -> Status {
    auto pages = migr::drop_unchanged(dir + "/images", dir + "/" + pre_copied_);
    if (pages) unchanged = pages->unchanged * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    return pages;
  };
  if (auto s = step(FaultStep::kSourceCompare, work); !s) return s.error();
  return unchanged;
}

// EAGAIN: one has ended; whoever begins anew finds what is left.
Status SourceRun::each(const std::function<Status(Process&)>& f) {
  return parallel_for(processes_, [&](Process& p) -> Status {
    const Status s = f(p);
    if (s || !has_ended(s, *p.session)) return s;
    return Error{EAGAIN, p.session->label() + " has ended meanwhile"};
  });
}

// The way back: one that has ended is there already.
Status SourceRun::each_back(const std::function<Status(Process&)>& f) {
  return parallel_for(processes_, [&](Process& p) -> Status {
    const Status s = f(p);
    return s || has_ended(s, *p.session) ? Status() : s;
  });
}

// It may have connected anew.
Status SourceRun::find_session(Process& p) {
  auto session = host_.sessions_.wait_for(p.session->instance(), [&](const ProcessSession& s) { return s.pid() == p.pid; }, process_of_it_lives(*p.session) ? kReconnectMs : 0);
  if (session) p.session = *session;
  return session;
}

Status SourceRun::as_described() {
  return each([this](Process& p) -> Status {
    std::uint64_t now = 0;
    const auto fds = p.session->ask<migr_fd_desc, migr_qp_ref>(MIGR_MSG_DESCRIBE, id_, {}, kProcessMs, 0, &now);
    return fds && now != p.described ? Status(changed(p.pid)) : Status(fds);
  });
}

Status SourceRun::track() {
  return each([this](Process& p) { return migr::track(*p.session, id_, {}); });
}

void SourceRun::get_ready() { Runc::get_ready({&ahead_, &detach_ahead_}); }

Status SourceRun::suspend() {
  return each([this](Process& p) -> Status {
    if (auto s = p.session->tell(MIGR_MSG_SUSPEND, id_, process_ms(p.vqpns.size()), p.described); !s) return s;
    auto seen = p.session->wait_threads_outside(kSuspendMs);
    if (seen) spdlog::debug("{}: {} threads outside, {} stops, {} unwound", p.session->label(), seen->threads, seen->stops, seen->unwound);
    return seen;
  });
}

// As they are counted in info_.connected.
void SourceRun::count() {
  counted_.assign(processes_.size(), {});
  const std::map<std::uint32_t, std::uint32_t> owners(info_.ctxs.begin(), info_.ctxs.end());
  for (std::size_t i = 0; i < info_.connected.size(); i++) {
    const auto& q = info_.connected[i];
    auto& its = counted_[owners.at(q.ctx_id)];
    its.refs.push_back({q.ctx_id, q.vqpn, q.pqpn, 0});
    its.index.push_back(static_cast<std::uint32_t>(i));
  }
}

const CountedQps& SourceRun::counted(const Process& p) const { return counted_[static_cast<std::size_t>(&p - processes_.data())]; }

Result<wire::DrainReply> SourceRun::drain(int limit_ms, const std::set<std::size_t>& gone) {
  wire::DrainReply reply;
  Shared<wire::DrainReply> out{reply};
  const auto one = [&](Process& p) -> Status {
    const CountedQps& all = counted(p);
    if (auto s = give_up(*p.session, id_, all, gone); !s) return s;
    return drain_process(*p.session, id_, {}, all, limit_ms, true, out);
  };
  if (auto s = each(one); !s) return s.error();
  return reply;
}

Result<wire::CutReply> SourceRun::cut(const wire::CutRequest& r) {
  wire::CutReply reply;
  Shared<wire::CutReply> out{reply};
  const auto work = [&] { return each([&](Process& p) { return cut_process(*p.session, counted(p), r, out); }); };
  if (auto s = r.check() ? work() : step(FaultStep::kSourceCut, work); !s) return s.error();
  return reply;
}

Result<wire::SettleReply> SourceRun::settle(const wire::SettleRequest& r) {
  wire::SettleReply reply;
  Shared<wire::SettleReply> out{reply};
  const auto work = [&] { return each([&](Process& p) { return settle_process(*p.session, counted(p), r, out); }); };
  if (auto s = step(FaultStep::kSourceSettle, work); !s) return s.error();
  return reply;
}

Status SourceRun::rollback() {
  return each_back([this](Process& p) -> Status {
    if (auto s = find_session(p); !s) return s;
    return p.session->tell(MIGR_MSG_ROLLBACK, id_, process_ms(p.vqpns.size()));
  });
}

// The process is drained, and has been copied ahead: of its registered memory FREEZE need not touch what is as it was then.
// @return the bytes of that
Result<std::uint64_t> SourceRun::find_written(Process& p, const NicWrites* by_partners) const {
  constexpr std::size_t kPartsMax = 1u << 16;
  const auto numbers = numbers_in_namespaces(p.pid);
  if (numbers.empty() || numbers.size() > 2) return Error{EOPNOTSUPP, "it lives in PID namespaces within each other"};
  auto memory = registered_memory(p.pid);
  if (!memory) return memory.error();
  const std::vector<MemoryPart> pages = pages_of(*memory);
  std::vector<MemoryPart> suspects = pages;
  if (by_partners) {
    auto writes = notes_of(*p.session, id_);
    if (!writes) spdlog::info("{}: all of its registered memory is compared: {}", p.session->label(), writes.error().text);
    else suspects = written_to(*memory, *writes, *by_partners, [this](std::uint32_t i) { return i < info_.connected.size() ? info_.connected[i].ctx_id : 0; });
  }
  auto changed = changed_since(host_.folder(id_) + "/" + pre_copied_, numbers.back(), p.pid, "/proc/" + std::to_string(p.pid) + "/pagemap", pages, suspects, kCompareMs);
  if (!changed) return changed.error();
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  spdlog::info("{}: {} KB of its registered memory were compared; to {} KB no NIC has written", p.session->label(), changed->compared * page >> 10,
               changed->spared * page >> 10);
  if (changed->parts.size() > kPartsMax) return Error{E2BIG, "it was written to in too many places"};
  std::vector<migr_memory_part> parts;
  for (const MemoryPart& m : changed->parts) parts.push_back({m.start, m.bytes});
  if (auto r = p.session->ask<migr_memory_part>(MIGR_MSG_WRITTEN, id_, std::span<const migr_memory_part>(parts), kProcessMs); !r) return r.error();
  return changed->unchanged * page;
}

Status SourceRun::freeze(const NicWrites* writes) {
  static constexpr migr_memory_part kAll{0, 1};  // nobody has mapped that: it cannot be touched, and then FREEZE touches all
  auto s = each([this, writes](Process& p) -> Status {
    if (!pre_copied_.empty()) {
      auto same = find_written(p, writes);
      if (same) spdlog::info("{}: {} KB of its registered memory are as they were copied ahead", p.session->label(), *same >> 10);
      else spdlog::info("{}: all of its registered memory is dumped: {}", p.session->label(), same.error().text);
      if (!same) (void)p.session->ask<migr_memory_part>(MIGR_MSG_WRITTEN, id_, std::span(&kAll, 1), kProcessMs);
    }
    auto memory = p.session->ask<migr_fd_desc, migr_qp_ref>(MIGR_MSG_FREEZE, id_, {}, process_ms(p.vqpns.size()), p.described);
    if (!memory) return memory.error();
    p.memory = std::move(*memory);
    return host_.sessions_.wait_closed(p.session, kProcessMs);
  });
  if (!s) return s;
  // Processes that were here did not change; one may have come, and have closed again what it had opened.
  auto pids = host_.runc_.pids(state_);
  if (!pids) return pids.error();
  for (const pid_t pid : *pids)
    if (host_.sessions_.by_pid(pid) && std::none_of(processes_.begin(), processes_.end(), [&](const Process& p) { return p.pid == pid; }))
      return Error{EAGAIN, "process " + std::to_string(pid) + " of the container has connected to migrd meanwhile"};
  auto now = contexts_now();
  if (!now) return now.error();
  for (const auto& c : *now)
    if (std::none_of(info_.ctxs.begin(), info_.ctxs.end(), [&](const auto& known) { return known.first == c.rec.ctx_id; }))
      return Error{EAGAIN, "process " + std::to_string(c.rec.pid) + " of the container has opened an RDMA device meanwhile"};
  // Memory comes and goes after the check, too.
  for (const Process& p : processes_)
    if (const std::string unknown = unknown_objects(*now, p.memory); !unknown.empty()) return unknown_error(p.session->label(), unknown);
  return {};
}

Status SourceRun::reconnect() {
  return step(FaultStep::kSourceReconnect, [&] { return reconnect_all(); });
}

Status SourceRun::reconnect_all() {
  return each_back([this](Process& p) -> Status {
    const Instance instance = p.session->instance();
    if (host_.sessions_.by_pid(p.pid) == p.session) return {};  // it never closed
    if (auto s = open_gate(host_.config_.run_dir, instance); !s) return s;
    const Status back = find_session(p);
    close_gate(host_.config_.run_dir, instance);
    return back;
  });
}

Status SourceRun::step(FaultStep step, const std::function<Status()>& work) { return fault_step(host_.config_.fault, step, work); }

Status SourceRun::detach_network() {
  return step(FaultStep::kSourceDetach, [&] { return host_.runc_.detach_held(detach_ahead_, info_.bundle, info_.id); });
}
Status SourceRun::attach_network() {
  return step(FaultStep::kSourceAttach, [&] { return host_.runc_.net("attach", info_.bundle, info_.id); });
}
Status SourceRun::thaw() {
  return step(FaultStep::kSourceThaw, [&] { return host_.runc_.resume(info_.id, {entry_.record.stood().begin(), entry_.record.stood().end()}); });
}

Status SourceRun::checkpoint() {
  const std::string dir = host_.folder(id_);
  auto s = step(FaultStep::kSourceCheckpoint, [&] { return host_.runc_.checkpoint(ahead_, info_.id, dir + "/checkpoint.out"); });
  no_huge_zeros_.reset();
  if (!s) {
    // The log is what tells; keep it when the folder goes.
    const std::string name = migration_text(id_) + "-dump.log", kept = failure_kept_in(host_.config_.state_dir, name);
    std::error_code ec;
    make_room_for_failure(host_.config_.state_dir, name);
    std::string text = s.error().text;
    const std::string why = criu_error(dir + "/work/dump.log");
    if (!why.empty() && text.find("Error (") == std::string::npos) text += "; CRIU: " + why;
    if (fs::copy_file(dir + "/work/dump.log", kept, fs::copy_options::overwrite_existing, ec)) text += "; log on " + host_.config_.name + ": " + kept;
    return Error{why.find("in parent pagemap") == why.npos ? s.error().code : ESTALE, text};
  }
  return host_.runc_.all_dumped(state_);
}

Status SourceRun::decide(wire::Outcome outcome) {
  entry_.record.set_outcome(outcome);
  if (outcome != wire::COMMITTED) return host_.save(id_, entry_);
  auto s = step(FaultStep::kSourceDecide, [&] { return host_.save(id_, entry_); });
  if (s) return s;
  // Whatever got onto the disk: nobody may read a commit record from it.
  entry_.record.set_outcome(wire::UNDONE);
  if (!host_.save(id_, entry_)) {
    host_.journal_.remove(id_);
    std::lock_guard lock(host_.mutex_);
    host_.entries_[id_] = entry_;
  }
  return s;
}

Status SourceRun::destroy() { return host_.remove(id_, entry_.record); }

Result<wire::MovesRequest> SourceRun::moves(const wire::PrepareReply& prepared) {
  wire::MovesRequest out;
  out.set_id(id_);
  for (const auto& m : moves_of_processes(info_, prepared)) *out.add_moves() = m;
  for (const auto& q : info_.datagrams) {
    const auto p = std::find_if(prepared.qps().begin(), prepared.qps().end(), [&](const auto& x) { return x.src_ctx_id() == q.ctx_id && x.vqpn() == q.vqpn; });
    const auto owner = std::find_if(info_.ctxs.begin(), info_.ctxs.end(), [&](const auto& c) { return c.first == q.ctx_id; });
    if (p == prepared.qps().end() || owner == info_.ctxs.end()) continue;
    const Instance& who = info_.instances[owner->second];
    for (const auto& from : info_.gids) {
      if (from.device() != q.device) continue;
      // A name that a process has bound by itself is not its own, and may be another's.
      if (q.vqpn != q.pqpn && !host_.directory_.came_to(from.gid(), q.pqpn)) continue;
      wire::Move m = host_.directory_.at(from.gid(), q.pqpn, q.vqpn);
      wire::PortGid born = from;
      born.set_gid(m.birth_gid());
      const auto* to = like(prepared, born);
      if (!to) continue;
      m.set_gid(to->gid());
      m.set_pqpn(p->pqpn());
      m.set_instance(who.data(), who.size());
      *out.add_moves() = m;
    }
  }
  return out;
}

void SourceRun::forget(bool settled) {
  ahead_ = Child();  // before its folder goes
  detach_ahead_ = Child();
  if (auto s = remove_folder(host_.folder(id_)); !s) spdlog::error("{}", s.error().text);
  if (!host_.entry(id_)) return;  // nothing was written down
  if (entry_.record.outcome() == wire::OPEN) entry_.record.set_outcome(wire::UNDONE);
  entry_.record.set_settled(settled);
  entry_.running = false;
  host_.keep(id_, entry_);
}

}  // namespace migr
