// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "destination_host.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "build_id.h"
#include "devices.h"
#include "directory.h"
#include "fault.h"
#include "file_tree.h"
#include "kernel_record.h"
#include "limits.h"
#include "page_images.h"
#include "parallel.h"
#include "process.h"
#include "processor.h"
#include "restore_socket.h"
#include "room.h"
#include "resume_stats.h"
#include "standard_streams.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

// The processes of `runc partial-restore`, or of `criu restore`, for this folder: their command line names it.
std::vector<pid_t> restorers(const std::string& dir) { return processes_told({"partial-restore", "restore"}, dir + "/"); }
bool restore_runs(const std::string& dir) { return !restorers(dir).empty(); }

// Where it is not loaded somebody else says so.
Fd hold_module() { return Fd(open("/dev/" MIGR_DEV_NAME, O_RDWR | O_CLOEXEC)); }

// Of a stream: to Read() a message that cannot be read is the end, and the context does not tell either.
Status not_whole() { return Error{EIO, "a message of what was sent could not be read, or its end is missing"}; }

// Programs of the container may pass what is above it, whatever our umask; into itself only when its mode has come.
// @return of which file system it is, and which one there; nothing: somebody else has made it meanwhile
Result<std::optional<std::pair<dev_t, ino_t>>> make_bundle(const std::string& folder) {
  constexpr mode_t kAbove = 0755, kNobodys = 0700;
  for (std::size_t at = 1; (at = folder.find('/', at)) != std::string::npos; at++) {
    const std::string above = folder.substr(0, at);
    if (mkdir(above.c_str(), kNobodys) ? errno != EEXIST : chmod(above.c_str(), kAbove) != 0) return sys_error("making " + above);
  }
  if (mkdir(folder.c_str(), kNobodys)) {
    if (errno == EEXIST) return std::optional<std::pair<dev_t, ino_t>>();
    return sys_error("making " + folder);
  }
  struct stat st;
  if (lstat(folder.c_str(), &st)) return sys_error("making " + folder);
  return std::optional(std::pair(st.st_dev, st.st_ino));
}

// Where a file system has been mounted since it was made there is another one of its name. Of one that is not known, as by an older
// migrd, or if ours ended as it was made, only what is empty goes.
void remove_bundle(const std::string& folder, const journal::Destination& made) {
  struct stat st {};
  if (lstat(folder.c_str(), &st) && errno == ENOENT) return;
  if (!made.bundle_inode()) {
    if (rmdir(folder.c_str()) && errno != ENOENT) spdlog::warn("{} stays: it is not known whether it is the one that was made for this", folder);
    return;
  }
  if (st.st_dev != made.bundle_device() || st.st_ino != made.bundle_inode()) return spdlog::warn("{} stays: it is not the one that was made for this", folder);
  if (auto s = remove_folder(folder); !s) spdlog::error("{}", s.error().text);  // a restore that was killed has left mounts in it
}

constexpr int kKilled = 128;  // and more: exit status of a Child that a signal has ended

constexpr int kOpenLookMs = 100;  // how often a pause looks whether migrd ends

// Of one job that is taken up: the restore that was let run, runc (state, delete) and the network hook (detach, cleanup), and as
// much again as one of these for what has no limit of its own. systemd ends a start that takes longer than it knows of.
void extend_start() {
  const std::int64_t ms = 2 * (std::int64_t{kProcessMs} + kRuncMs + kHookMs) + kRuncMs;
  sd_notify(0, fmt::format("EXTEND_TIMEOUT_USEC={}", ms * 1000).c_str());
}

}  // namespace

struct DestinationHost::Job : LeasedJob {
  std::string container, bundle;
  std::vector<Instance> instances;
  std::vector<std::string> hosts;                // that take part
  std::map<std::uint32_t, std::uint32_t> owner;  // source's ctx_id -> index in instances
  struct Peer {
    std::string instance;
    std::uint32_t ctx_id;  // source's, if it moves, too; 0
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, Peer> peers;  // by (source's ctx_id, vQPN), of what is connected
  std::set<std::pair<std::uint32_t, std::uint32_t>> gone;         // likewise, of what was
  std::string dir;                                                // images/, work/, restore.out

  Fd module;  // migr.ko stays loaded, with what it has recorded of `objects`, until REBIND
  std::unique_ptr<RestoreSocket> socket;
  Child child;                     // runc partial-restore; not of a job that an earlier migrd began
  Child attach, open;              // of the network, got ready and waiting; likewise
  std::atomic<bool> mine = false;  // it was let in, so what has the container's name here was made by this job
  std::vector<migr_rc_object> objects;
  std::vector<std::vector<std::size_t>> objects_of;  // of each of instances: their places
  std::vector<std::shared_ptr<ProcessSession>> sessions;
  std::vector<Instance> late;  // that the others did not wait for: they find their gates open
  bool attached = false;
  bool failed = false;  // its restore, and not because it was taken back; guarded by work
  std::atomic<bool> ready = false, rebound = false, resumed = false;
  std::atomic<bool> settled = false, opened = false;  // both: finished
  std::atomic<bool> left = false;                     // undone, but not finished
  std::atomic<bool> told = false;                     // the plugin, to let it run
  bool cleans_up = false, rests = false;              // of tick()
  std::atomic<bool> clean = false;                    // its folder is gone
  journal::Destination record;                        // guarded by work

  std::mutex state;  // guards late, keys, keys_known, why_closed, why_left, rebinds, resumes
  std::vector<wire::ProcessKeys> keys;
  bool keys_known = false;  // there may be none
  wire::ConnectRequest connect;
  std::string why_closed, why_left;
  bool rebinds = false, resumes = false;  // by itself
  std::condition_variable went_on;
  wire::ResumeReply replayed;           // guarded by work until `resumed`, and fixed then
  Afterwards opens;                     // lets the network's traffic through
  Afterwards cleans, settles, goes_on;  // the last begins the one before

  std::string images() const { return dir + "/images"; }
  std::vector<std::string> births_of(std::size_t i) const {
    const auto& births = record.header().births();
    if (i >= static_cast<std::size_t>(births.size())) return {};
    const auto& hosts = births[static_cast<int>(i)].hosts();
    return {hosts.begin(), hosts.end()};
  }
  std::vector<std::uint32_t> vqpns() const { return {record.header().vqpns().begin(), record.header().vqpns().end()}; }
  std::size_t qps() const { return static_cast<std::size_t>(record.header().vqpns_size()); }
  void set_objects(std::vector<migr_rc_object> all) {
    objects = std::move(all);
    objects_of.assign(instances.size(), {});
    for (std::size_t at = 0; at < objects.size(); at++)
      if (const auto its = owner.find(objects[at].src_ctx_id); its != owner.end()) objects_of[its->second].push_back(at);
  }
  // What Connect says of the other ends, for REBIND.
  void note_peers() {
    for (const auto& c : connect.connections()) {
      if (c.dest_pqpn())
        peers[{c.src_ctx_id(), c.vqpn()}] = {c.peer(), c.peer_ctx_id()};
      else
        gone.emplace(c.src_ctx_id(), c.vqpn());
    }
  }
  // What there was no thread for. Caller holds work. @return some of it waits on
  bool start_again() {
    const auto all = {&opens, &cleans, &settles, &goes_on};
    for (Afterwards* a : all) a->again();
    return std::any_of(all.begin(), all.end(), [](const Afterwards* a) { return a->waits(); });
  }
  // Once finished: it is kept for a week, and what only its work needed is not.
  void rest() {
    goes_on.end();
    settles.end();
    cleans.end();
    opens.end();
    std::lock_guard lock(work);
    module = Fd();  // there may have been no REBIND
    owner.clear();
    connect.Clear();
    peers.clear();
    gone.clear();
    if (!record.has_connect() && record.connected().empty()) return;
    record.clear_connect();
    record.clear_connected();
    unsaved = true;
  }
};

Result<DestinationHost::JobPtr> DestinationHost::job_of(const wire::PrepareHeader& h, const std::string& state_dir) {
  auto job = std::make_shared<Job>();
  job->id = h.id();
  job->source = h.source();
  job->container = h.container();
  job->bundle = h.bundle();
  job->hosts.assign(h.hosts().begin(), h.hosts().end());
  for (const auto& i : h.instances()) {
    auto x = instance_of(i);
    if (!x) return x.error();
    job->instances.push_back(*x);
  }
  const bool bundle_ok = bare_pid(h.container()) ? h.bundle().empty()
                                                 : !h.bundle().empty() && h.bundle()[0] == '/' && fs::path(h.bundle()).lexically_normal() == fs::path(h.bundle());
  if (!h.id() || !Runtime::name_ok(h.container()) || h.ctx_ids_size() != h.ctx_owner_size() || !bundle_ok)
    return Error{EINVAL, "Prepare with a malformed header"};
  for (int i = 0; i < h.ctx_ids_size(); i++) {
    if (h.ctx_owner(i) >= job->instances.size()) return Error{EINVAL, "a context without a process"};
    job->owner[h.ctx_ids(i)] = h.ctx_owner(i);
  }
  job->set_objects({});
  job->dir = state_dir + "/dest/" + migration_text(job->id);
  job->socket = std::make_unique<RestoreSocket>(job->images() + "/restore.sock");
  *job->record.mutable_header() = h;
  return job;
}

DestinationHost::DestinationHost(const Config& config, SessionTable& sessions, Peers& peers, Claims& claims, Numbers& numbers)
    : config_(config), sessions_(sessions), peers_(peers), claims_(claims), numbers_(numbers), runc_(config), journal_(config.state_dir + "/journal/destination") {
  std::set<std::string> needed;
  std::vector<JobPtr> open;
  Unread unread;
  for (const auto& [id, record] : journal_.load(
           kKeepOutcome, [](const auto& r) { return r.outcome() == wire::UNDONE ? !r.left() : r.resumed() && !r.closed(); }, &unread)) {
    auto made = job_of(record.header(), config_.state_dir);
    if (!made || (*made)->id != id) {
      spdlog::error("migration {}: its record is another's, or malformed", migration_text(id));
      unread.add(id);
      continue;
    }
    const JobPtr job = *made;
    job->record = record;
    job->begun_s = record.begun_s();
    job->outcome = record.outcome();
    job->keys.assign(record.keys().begin(), record.keys().end());
    job->rebound = !job->keys.empty();
    job->keys_known = job->rebound || record.keys_known();
    job->resumed = record.resumed();
    std::vector<migr_rc_object> objects(record.objects().size() / sizeof(migr_rc_object));
    if (!objects.empty()) std::memcpy(objects.data(), record.objects().data(), objects.size() * sizeof(migr_rc_object));
    job->set_objects(std::move(objects));
    job->ready = !job->objects.empty();
    if (record.connected().empty()) job->connect = record.connect();
    else if (!job->connect.ParseFromString(record.connected())) spdlog::error("migration {}: its record of the other ends cannot be read", migration_text(id));
    job->note_peers();
    job->mine = true;
    job->settled = job->get() == wire::UNDONE || job->resumed;
    job->opened = !record.closed();
    job->left = job->get() == wire::UNDONE && record.left();
    job->finished = job->settled && (job->get() == wire::UNDONE ? !job->left : job->opened.load());
    (void)jobs_.add(job);
    if (job->left) job->expire();  // nobody else is asked
    if (!job->finished && !job->left) open.push_back(job);
  }
  // What runs here first: nothing of it is another one's to take back.
  std::stable_partition(open.begin(), open.end(), [](const JobPtr& job) { return job->record.told(); });
  for (const auto& job : open) {
    if (!job->rebound && !job->settled) job->module = hold_module();
    extend_start();
    take_up(job);
    if (job->get() == wire::COMMITTED) needed.insert(job->dir);
  }
  jobs_.set_unread(std::move(unread));
  std::error_code ec;
  std::vector<std::string> folders;
  for (const auto& d : fs::directory_iterator(config_.state_dir + "/dest", ec)) folders.push_back(d.path());
  for (const auto& d : folders)
    if (auto s = needed.contains(d) ? Status() : remove_folder(d); !s) spdlog::error("{}", s.error().text);
}

// What an earlier migrd left in the middle. Before the source's word it cannot run here; after it, it may: that is seen.
void DestinationHost::take_up(const JobPtr& job) {
  const LogScope log(job->id);
  std::lock_guard work(job->work);
  job->expire();  // it asks the source itself, until the source says more
  if (job->get() == wire::OPEN && job->record.told()) {
    spdlog::warn("migrd ended while {} was let run here", job->container);
    if (job->socket->listening()) (void)job->socket->tell(MIGR_RC_COMMIT, kProcessMs);
    if (ran_after_all(*job)) {
      job->outcome = wire::COMMITTED;
      (void)save(*job);
    } else {
      job->failed = true;
    }
  }
  if (job->get() == wire::OPEN) return (void)abort(*job, "migrd ended before it was committed");
  if (job->settled && !is_here(*job)) {  // nothing is left that its network would be for
    job->record.set_closed(false);
    job->opened = job->finished = true;
    (void)save(*job);
    return;
  }
  spdlog::warn("{} runs here; finishing", job->container);
  if (job->settled) return open_network(*job, "attach");
  hold(*job);
  for (const auto& i : job->instances) job->rebound ? close_gate(config_.run_dir, i) : (void)open_gate(config_.run_dir, i);
  if (is_here(*job)) return open_network(*job, "attach");
  job->record.set_closed(false);  // as above; left_alone() sees to the rest
  job->opened = true;
}

// The plugin was told to let it run, and its answer is not known: when the restore has ended it can be seen. One that fails takes its
// container away, so what is here has run, though it may have ended since: the source must not run it again. Caller holds job.work.
bool DestinationHost::ran_after_all(Job& job) const {
  for (const auto until = Clock::now() + std::chrono::milliseconds(kProcessMs); restore_runs(job.dir) && Clock::now() < until;) usleep(50'000);
  if (restore_runs(job.dir)) return false;
  const int status = job.child.running() ? -1 : job.child.status();  // < 0: an earlier migrd has begun it
  if (!status) return true;
  if (status < 0 && !bare_pid(job.container)) return is_here(job);
  // Of processes without a container nothing is left once they have ended. CRIU writes this when they run, and not before.
  if (bare_pid(job.container) && !access((job.dir + "/work/stats-restore").c_str(), F_OK)) return true;
  const auto state = runc_.state(job.container);
  return state && state->status == "running" && is_here(job);
}

bool DestinationHost::end() {
  ends_ = true;
  return jobs_.end();
}

DestinationHost::~DestinationHost() {
  (void)end();
  for (const auto& j : jobs_.all()) j->opens.end();
}

// Caller holds job.work.
Status DestinationHost::save(Job& job) {
  job.record.set_outcome(job.outcome);
  job.record.set_resumed(job.resumed);
  const Status s = journal_.save(job.id, job.record);
  job.unsaved = !s;
  return s;
}

// The name may be another's by now: a process number, without a container, or that of a container which was started after a boot.
bool DestinationHost::is_here(const Job& job) const { return job.record.boot() == boot_of_host() && runc_.is_still(job.container, job.record.began()); }

// What has the name: a restore that has undone itself leaves it to others. Processes are told apart one by one, by their lives.
bool DestinationHost::is_anothers(Job& job) const {
  if (bare_pid(job.container) || !runc_.exists(job.container)) return false;
  if (!is_here(job) || job.record.removed()) return true;
  // It may have come since, if that this one was undone could not be written down.
  const auto came_after = [&](const JobPtr& j) { return j->container == job.container && j->get() == wire::COMMITTED && !j->record.began().empty() && is_here(*j); };
  const auto all = job.record.began().empty() ? jobs_.all() : std::vector<JobPtr>();
  if (std::any_of(all.begin(), all.end(), came_after)) return true;
  const bool undone = !job.left && !job.child.running() && job.child.status() > 0 && job.child.status() < kKilled;
  return job.record.began().empty() && undone;
}

// Nor is anything left of what came.
Status DestinationHost::nothing_comes(const std::string& container, const Job* but) const {
  for (const auto& j : jobs_.all()) {
    if (j.get() == but || j->container != container) continue;
    if (j->get() == wire::OPEN) return Error{EEXIST, "'" + container + "' is being migrated to here already"};
    if (j->left) return Error{EEXIST, "something is left of an undone migration of '" + container + "' to here; what it is says there: migrctl recover"};
  }
  return {};
}

// Nobody has it, nor comes into it. runc writes down who has it at the end of a restore, so it is asked last.
// @param asking  those that have not been let in yet are in the way, too: of two that come at the same time one at most gets in
Status DestinationHost::bundle_is_free(const std::string& bundle, const Job* but, bool asking) const {
  for (const auto& j : jobs_.all()) {
    if (bundle.empty() || j.get() == but || j->bundle != bundle) continue;
    if ((j->get() == wire::OPEN && (asking || j->mine)) || (j->get() == wire::COMMITTED && !j->clean && restore_runs(j->dir)))
      return Error{EEXIST, "'" + j->container + "' is being migrated to here, into " + bundle + ", which is where this one's bundle is to be"};
    if (j->left)
      return Error{EEXIST, "something is left of an undone migration of '" + j->container + "' to here, into " + bundle +
                               ", which is where this one's bundle is to be; what it is says there: migrctl recover"};
  }
  return runc_.bundle_is_free(bundle);
}

// CRIU's own words are worth more than "exit status 1". Caller holds job.work.
Status DestinationHost::with_log(Job& job, const Status& s) {
  if (s) return s;
  job.failed = job.failed || !job.aborting;
  const std::string line = criu_error(job.dir + "/work/restore.log");
  std::string out = tail_of(job.dir + "/restore.out", 2048);
  while (!out.empty() && std::isspace(static_cast<unsigned char>(out.back()))) out.pop_back();
  if (const auto nl = out.rfind('\n'); nl != std::string::npos) out = out.substr(nl + 1);
  std::string text = s.error().text;
  if (!out.empty()) text += "; runc: " + out;
  if (!line.empty()) text += "; CRIU: " + line;
  if ((line.empty() && out.empty() && s.error().code != ETIMEDOUT) || line.find("killed by signal 9") != line.npos) text += "; the kernel ends what memory runs out for: see memory.max of its cgroup here, and the kernel's log";
  if (job.failed) text += "; logs on " + config_.name + ": " + failure_kept_in(config_.state_dir, migration_text(job.id) + "-restore");
  return Error{s.error().code, text};
}

grpc::Status DestinationHost::Check(grpc::ServerContext* ctx, const wire::CheckRequest* r, wire::CheckReply* out) {
  LogScope log(log_fields_of(*ctx, config_));
  log->phase = "destination.check";
  auto check = [&]() -> Status {
    if (auto s = may(config_, {*ctx, config_}, Right::kToHere, r->container()); !s) return s;
    if (auto s = same_version("migrd", r->wire(), kWireVersion); !s) return s;
    if (auto s = same_version("libmigr", r->proc(), MIGR_PROC_VERSION); !s) return s;
    if (auto s = same_build(r->libmigr(), Caller(*ctx, config_).name(), config_.libmigr, config_.name); !s) return s;
    if (auto s = r->has_address() ? check_net_hook(config_) : Status(); !s) return s;
    auto k = KernelRecord::open();
    if (!k) return Error{EBUSY, k.error().text};
    if (auto s = same_version("migr.ko", r->abi(), MIGR_ABI_VERSION); !s) return s;
    if (r->devices_size() && device_names().empty()) return Error{EBUSY, "no RDMA device"};
    if (!Runtime::name_ok(r->container())) return Error{EINVAL, "'" + r->container() + "' is no name of a container"};
    for (const auto& n : r->needs()) {
      auto room = room_of(n.device());
      if (!room) return Error{EBUSY, room.error().text};
      if (auto s = fits(n, *room); !s) return s;
    }
    if (auto s = config_.any_processor() ? Status() : instructions_fit(r->instructions()); !s) return s;
    if (auto s = memory_fits(r->memory_bytes()); !s) return s;
    if (auto s = huge_memory_fits(r->huge()); !s) return s;
    if (auto s = disk_fits(r->image_bytes(), config_.state_dir + "/dest", r->memory_bytes()); !s) return s;
    if (!config_.criu_libs.empty())
      if (auto s = check_plugin(config_); !s) return s;
    if (auto s = runc_.check_verbs(r->container()); !s) return Error{EBUSY, s.error().text};
    if (auto s = runc_.name_is_free(r->container()); !s) return s;
    if (auto s = nothing_comes(r->container(), nullptr); !s) return s;
    if (auto s = bundle_is_free(r->bundle(), nullptr); !s) return s;
    out->set_bundle_shared(has_mark(r->bundle(), r->bundle_mark()));
    for (const auto pid : r->pids())
      if (number_taken(pid)) return Error{EEXIST, "process number " + std::to_string(pid) + " is in use, and a restored process has the numbers that it and its threads had"};
    // Nor may others get them until it is restored.
    if (auto s = pass_over({r->pids().begin(), r->pids().end()}); !s) spdlog::warn("{}", s.error().text);
    return {};
  };
  out->set_name(config_.name);
  const Status s = fault_step(config_.fault, FaultStep::kDestinationCheck, check);
  if (!s) spdlog::info("'{}' is refused: {}", r->container(), s.error().text);
  return to_grpc(s);
}

grpc::Status DestinationHost::Prepare(grpc::ServerContext* ctx, grpc::ServerReader<wire::PrepareChunk>* reader,
                                      wire::PrepareReply* out) {
  wire::PrepareChunk chunk;
  if (!reader->Read(&chunk) || !chunk.has_header()) return {grpc::StatusCode::INVALID_ARGUMENT, "Prepare without a header"};
  auto made = job_of(chunk.header(), config_.state_dir);
  if (!made) return to_grpc(made);
  const JobPtr job = *made;
  LogScope log(log_fields_of(*ctx, config_, job->id));
  log->phase = "destination.prepare";
  const Caller who(*ctx, config_);
  if (auto s = coordinates(who, job->id, job->source); !s) return to_grpc(s);
  if (auto s = may(config_, who, Right::kToHere, job->container); !s) return spdlog::warn("refused: {}", s.error().text), to_grpc(s);
  std::lock_guard work(job->work);
  if (auto s = jobs_.add(job); !s) return to_grpc(s);

  spdlog::info("{} is to come here from {}", job->container, job->source);

  const bool later = job->record.header().later();
  auto run = [&]() -> Status {
    if (auto s = fault(config_.fault, FaultStep::kDestinationPrepare, FaultAt::kBegin); !s) return s;
    if (job->aborting) return Error{ECANCELED, "the migration was undone"};
    if (runc_.exists(job->container)) return Error{EEXIST, "the name '" + job->container + "' is taken"};
    if (auto s = nothing_comes(job->container, job.get()); !s) return s;
    if (auto s = bundle_is_free(job->bundle, job.get(), true); !s) return s;
    std::error_code ec;
    job->begun_s = unix_now();
    job->record.set_begun_s(job->begun_s);
    job->record.set_made_bundle(!job->bundle.empty() && !fs::exists(job->bundle, ec));
    if (auto s = save(*job); !s) return s;
    job->mine = true;  // from here on there is something to take back
    job->module = hold_module();
    for (const auto& d : {job->images(), job->dir + "/work"}) fs::create_directories(d, ec);
    if (ec) return Error{ec.value(), "making folders for the migration: " + ec.message()};
    if (job->record.made_bundle()) {
      const auto made = make_bundle(job->bundle);
      if (!made) return made.error();
      job->record.set_made_bundle(made->has_value());
      if (*made) job->record.set_bundle_device((*made)->first), job->record.set_bundle_inode((*made)->second);
      if (auto s = save(*job); !s) return s;
    }
    TreeWriter bundle(job->bundle), images(job->images());
    bool whole = !chunk.tells_last() || chunk.last();
    while (reader->Read(&chunk)) {
      TreeWriter& w = chunk.file().tree() == wire::FileChunk::BUNDLE ? bundle : images;
      if (auto s = w.write(chunk.file()); !s) return s;
      whole = whole || chunk.last();
    }
    if (!whole) return not_whole();
    if (auto s = bundle.finish(); !s) return s;
    if (auto s = images.finish(); !s) return s;
    const auto& header = job->record.header();
    if (auto s = job->record.made_bundle() && header.has_bundle_mode() ? set_folder_mode(job->bundle, header.bundle_mode()) : Status(); !s) return s;
    if (auto s = address_can_move(config_, job->bundle); !s) return s;
    if (auto s = runc_.net("prepare", job->bundle, job->container); !s) return s;
    job->record.set_made_net(true);  // written down with the restore
    job->attach = runc_.net_ahead("attach-closed", job->bundle, job->container, job->dir + "/attach.out");
    job->open = runc_.net_ahead("open", job->bundle, job->container, job->dir + "/open.out");
    if (auto s = later ? Status() : create(*job, *out); !s) return s;
    Runc::get_ready({&job->attach, &job->open});
    return {};
  };
  Status s = run();
  if (s) s = fault(config_.fault, FaultStep::kDestinationPrepare, FaultAt::kEnd);
  if (!s) (void)abort(*job, s.error().text);
  else job->renew();
  return to_grpc(s);
}

grpc::Status DestinationHost::Create(grpc::ServerContext* ctx, const wire::Migration* m, wire::PrepareReply* out) {
  return step(*ctx, m->id(), FaultStep::kDestinationCreate, [&](Job& job) -> Status {
    if (job.child.running()) return Error{EEXIST, "the partial restore was started already"};
    return create(job, *out);
  });
}

// Caller holds job.work. Everything RDMA, made by the plugin while CRIU waits.
Status DestinationHost::create(Job& job, wire::PrepareReply& out) {
  const auto began = Clock::now();
  if (auto s = start_restore(job); !s) return s;
  out.set_start_ms(std::chrono::duration<double, std::milli>(Clock::now() - began).count());
  std::uint32_t took_us = 0;
  auto qps = job.socket->ask<migr_rc_qp>(MIGR_RC_PREPARE, std::span<const migr_rc_connect>(), kPrepareMs, &took_us);
  if (!qps) return with_log(job, qps);
  out.set_build_ms(took_us / 1e3);
  for (const auto& q : *qps) {
    auto* p = out.add_qps();
    p->set_src_ctx_id(q.src_ctx_id);
    p->set_vqpn(q.vqpn);
    p->set_pqpn(q.pqpn);
    p->set_psn(q.psn);
    p->set_gid(q.sgid, sizeof q.sgid);
  }
  return each_gid([&](wire::PortGid& g) { *out.add_gids() = std::move(g); });
}

Status DestinationHost::start_restore(Job& job) {
  // Receiving the bundle took its time.
  if (auto s = runc_.name_is_free(job.container); !s) return s;
  if (auto s = bundle_is_free(job.bundle, &job); !s) return s;
  job.record.set_boot(boot_of_host());
  if (auto s = save(job); !s) return s;
  auto child = runc_.partial_restore(job.container, job.bundle, job.images(), job.dir + "/work", job.dir + "/restore.out");
  if (!child) return child.error();
  job.child = std::move(*child);
  const auto until = Clock::now() + std::chrono::milliseconds(kRestoreSocketMs);
  while (!job.socket->listening()) {
    if (!job.child.running()) return with_log(job, Error{ECHILD, "partial restore of " + job.container + " ended with status " + std::to_string(job.child.status())});
    if (job.aborting) return Error{ECANCELED, "the migration was undone"};
    if (Clock::now() > until)
      return with_log(job, Error{ETIMEDOUT, "partial restore of " + job.container + ": CRIU's plugin did not listen within " +
                                                std::to_string(kRestoreSocketMs) + " ms" + advice_on(kRestoreSocketMs)});
    usleep(10'000);
  }
  return {};
}

// A call on a migration that is open here.
grpc::Status DestinationHost::step(const grpc::ServerContext& ctx, std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work) {
  const LogScope log(log_fields_of(ctx, config_, id));
  auto job = jobs_.find(id, {ctx, config_});
  if (!job) return to_grpc(job);
  std::lock_guard lock((*job)->work);
  const auto still_open = [&] {
    return (*job)->get() == wire::OPEN && !(*job)->aborting ? Status() : Status(Error{ECANCELED, "the migration was undone here"});
  };
  if (auto s = still_open(); !s) return to_grpc(s);
  return to_grpc(job_step(config_.fault, id, step, [&]() -> Status {
    if (auto s = still_open(); !s) return s;  // it was taken back while a fault point slept
    return work(**job);
  }));
}

grpc::Status DestinationHost::Connect(grpc::ServerContext* ctx, const wire::ConnectRequest* r, wire::Empty*) {
  return step(*ctx, r->id(), FaultStep::kDestinationConnect, [&](Job& job) -> Status {
    std::vector<migr_rc_connect> to;
    for (const auto& c : r->connections()) {
      migr_rc_connect x{};
      x.src_ctx_id = c.src_ctx_id();
      x.vqpn = c.vqpn();
      x.dest_qpn = c.dest_pqpn();
      x.dest_psn = c.dest_psn();
      if (c.dest_pqpn()) {
        if (c.dest_gid().size() != sizeof x.dgid || c.peer().size() != Instance().size()) return Error{EINVAL, "a GID and an instance have 16 bytes"};
        std::copy(c.dest_gid().begin(), c.dest_gid().end(), reinterpret_cast<char*>(x.dgid));
      }
      to.push_back(x);
    }
    job.connect = *r;
    job.note_peers();
    job.record.set_connected(r->SerializeAsString());  // Ready writes it down
    tell_moves(job, false);
    if (to.empty()) return {};
    return with_log(job, job.socket->ask(MIGR_RC_CONNECT, std::span<const migr_rc_connect>(to), kPrepareMs));
  });
}

grpc::Status DestinationHost::Upload(grpc::ServerContext* ctx, grpc::ServerReader<wire::UploadChunk>* reader, wire::UploadReply* out) {
  wire::UploadChunk chunk;
  if (!reader->Read(&chunk)) return {grpc::StatusCode::INVALID_ARGUMENT, "Upload without a header"};
  return step(*ctx, chunk.id(), FaultStep::kDestinationUpload, [&](Job& job) -> Status {
    if (chunk.pre_copy_round() > kPreCopyRoundsMax) return Error{EINVAL, "Upload of round " + std::to_string(chunk.pre_copy_round())};
    const std::string folder = chunk.pre_copy_round() ? job.dir + "/" + pre_copy_dir(chunk.pre_copy_round()) : job.images();
    if (mkdir(folder.c_str(), 0700) && errno != EEXIST) return sys_error("making " + folder);
    TreeWriter w(folder);
    bool whole = !chunk.tells_last() || chunk.last();
    while (reader->Read(&chunk)) {
      if (job.aborting) return Error{ECANCELED, "the migration was undone here"};
      if (auto s = w.write(chunk.file()); !s) return s;
      whole = whole || chunk.last();
    }
    if (!whole) return not_whole();
    if (auto s = w.finish(); !s) return s;
    out->set_bytes(w.bytes());
    out->set_files(w.files());
    return {};
  });
}

grpc::Status DestinationHost::UploadChanges(grpc::ServerContext* ctx, grpc::ServerReader<wire::ChangesChunk>* reader, wire::UploadReply* out) {
  wire::ChangesChunk chunk;
  if (!reader->Read(&chunk)) return {grpc::StatusCode::INVALID_ARGUMENT, "UploadChanges without a header"};
  return step(*ctx, chunk.id(), FaultStep::kDestinationUpload, [&](Job& job) -> Status {
    const auto root = writable_root(job.bundle);
    if (!root) return root.error();
    if (root->empty()) return Error{EINVAL, "changes of a root filesystem that is read-only, or not in its bundle"};
    const std::string folder = job.bundle + "/" + *root;
    std::map<std::string, wire::TreeName> names;
    bool all_named = false, whole = !chunk.tells_last();
    TreeWriter w(folder);
    do {
      if (job.aborting) return Error{ECANCELED, "the migration was undone here"};
      for (auto& t : *chunk.mutable_names()) names[t.name()] = std::move(t);
      // Before the files: one may have the name that a folder had. An upload that ends before removes nothing.
      if (chunk.all_named() && !all_named)
        if (auto s = remove_others(folder, names); !s) return s;
      all_named = all_named || chunk.all_named();
      whole = whole || chunk.last();
      if (!chunk.has_file()) continue;
      if (!all_named) return Error{EINVAL, "files before all names"};
      if (auto s = w.write(chunk.file()); !s) return s;
    } while (reader->Read(&chunk));
    if (!whole) return not_whole();
    if (!all_named) return Error{EINVAL, "UploadChanges without all names"};
    if (auto s = w.finish(); !s) return s;
    out->set_bytes(w.bytes());
    out->set_files(w.files());
    return {};
  });
}

// Caller holds job.work. CRIU restores TCP connections only where their address is; no packet passes before the commit.
Status DestinationHost::attach_network(Job& job) {
  if (job.attached) return {};
  auto s = runc_.net(job.attach, "attach-closed", job.bundle, job.container);
  job.attached = bool(s);
  return s;
}

grpc::Status DestinationHost::AttachNetwork(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  return step(*ctx, m->id(), FaultStep::kDestinationAttach, [&](Job& job) { return attach_network(job); });
}

grpc::Status DestinationHost::FullRestore(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  return step(*ctx, m->id(), FaultStep::kDestinationRestore, [&](Job& job) -> Status {
    if (auto s = attach_network(job); !s) return s;
    if (auto s = pipes_to_null(job.images()); !s) return s;
    if (const auto zeros = leave_out_zeros(job.images()); !zeros) spdlog::warn("zeros are read back: {}", zeros.error().text);
    else if (*zeros) spdlog::info("{} pages that were copied ahead are zeros, and not read back", *zeros);
    return with_log(job, job.socket->tell(MIGR_RC_GO, kProcessMs));
  });
}

grpc::Status DestinationHost::Ready(grpc::ServerContext* ctx, const wire::Migration* m, wire::ReadyReply* out) {
  return step(*ctx, m->id(), FaultStep::kDestinationReady, [&](Job& job) -> Status {
    auto objects = job.socket->ask<migr_rc_object>(MIGR_RC_READY, std::span<const migr_rc_connect>(), kReadyMs);
    if (!objects) return with_log(job, objects);
    job.set_objects(*objects);
    // A migrd that is started again has to tell the processes about them.
    job.record.set_objects(objects->data(), objects->size() * sizeof(migr_rc_object));
    job.record.set_began(runc_.life(job.container));
    if (auto s = save(job); !s) return s;
    job.ready = true;
    out->set_objects(static_cast<std::uint32_t>(objects->size()));
    return {};
  });
}

// Caller holds job.work. After it the tasks run, or never will.
Status DestinationHost::commit(Job& job) {
  switch (job.get()) {
    case wire::COMMITTED: return {};
    case wire::OPEN: break;
    default: return Error{ECANCELED, "the migration was undone here"};
  }
  if (!job.ready) return Error{EBUSY, "commit before the restore was ready"};
  auto let_run = [&]() -> Status {
    for (const auto& i : job.instances)
      if (auto s = open_gate(config_.run_dir, i); !s) return s;
    // Written before it is done: a migrd that is started again has to look whether the container runs.
    job.record.set_told(true);
    if (auto s = fault_step(config_.fault, FaultStep::kDestinationMark, [&] { return save(job); }); !s) return s;
    job.told = true;  // from here on nobody interrupts it
    if (job.aborting) return Error{ECANCELED, "the migration was undone here"};
    constexpr int kAnswerMs = 10'000;
    const Status s = job.socket->tell(MIGR_RC_COMMIT, kAnswerMs);
    const bool no_answer = !s && (s.error().code == ETIMEDOUT || s.error().code == ECONNRESET);
    if (!no_answer || !ran_after_all(job)) return with_log(job, s);
    spdlog::warn("{}, but {} was restored", s.error().text, job.container);
    return {};
  };
  if (auto s = let_run(); !s) {
    (void)abort(job, s.error().text);
    return s;
  }
  job.outcome = wire::COMMITTED;
  decided(wire::COMMITTED);
  job.renew();
  job.record.set_closed(true);  // until open_network() has done it
  // If it cannot be written, a look will tell.
  if (auto s = save(job); !s) spdlog::error("{}", s.error().text);
  open_network(job, "open");
  go_on(job);
  spdlog::info("committed, {} runs here", job.container);
  return {};
}

// They run here, and are not all taken up: no other migration gets them.
void DestinationHost::hold(const Job& job) {
  std::vector<Claims::Process> all;
  for (const auto& i : job.instances) all.push_back({i, 0});
  if (const auto holder = claims_.take(all, job.id)) spdlog::error("migration {} holds a process of it, too", migration_text(holder));
}

// Its processes wait for nobody's next words. Where that fails Rebind and Resume try again. Caller holds job.work.
void DestinationHost::go_on(Job& job) {
  hold(job);
  const auto ends = [&job](bool& part) {
    {
      std::lock_guard lock(job.state);
      part = false;
    }
    job.went_on.notify_all();
  };
  job.goes_on.run([this, &job, ends] {
    std::lock_guard work(job.work);
    const auto s = job_step(config_.fault, job.id, FaultStep::kDestinationRebind, [&] { return rebind(job); });
    ends(job.rebinds);
    if (s) (void)job_step(config_.fault, job.id, FaultStep::kDestinationResume, [&] { return resume(job); });
    ends(job.resumes);
  });
  std::lock_guard lock(job.state);
  job.rebinds = job.resumes = !job.goes_on.waits();  // it waits for job.work until we are done; without a thread Rebind and Resume do it
}

// The container is cut off until that is done: it is tried as long as it is here. Caller holds job.work.
void DestinationHost::open_network(Job& job, const std::string& verb) {
  job.opened = false;
  job.record.set_closed(true);
  job.opens.run([this, &job, verb] {
    for (const LeasedJob::Pace pace; !ends_;) {
      const auto s = runc_.net(job.open, verb, job.bundle, job.container);
      if (s) break;
      spdlog::error("{}", s.error().text);
      {
        std::lock_guard work(job.work);
        if (!is_here(job)) break;
        std::lock_guard lock(job.state);
        job.why_closed = s.error().text;
      }
      for (int ms = pace.patient() ? kResolveStepMs : kResolveSlowMs; ms > 0 && !ends_; ms -= kOpenLookMs) usleep(kOpenLookMs * 1000);
    }
    if (ends_) return;
    std::lock_guard work(job.work);
    job.record.set_closed(false);
    if (auto s = save(job); !s) spdlog::error("{}", s.error().text);
    job.opened = true;
    job.finished = job.settled.load();
  });
}

grpc::Status DestinationHost::Commit(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  const LogScope log(log_fields_of(*ctx, config_, m->id()));
  auto job = jobs_.find(m->id(), {*ctx, config_});
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  return to_grpc(job_step(config_.fault, m->id(), FaultStep::kDestinationCommit, [&] { return commit(**job); }));
}

// Of its unconnected QPs, before the first datagram from there; of its processes, ahead of the stop: a migration that is
// undone only has others ask in vain.
void DestinationHost::tell_moves(const Job& job, bool datagrams) {
  wire::MovesRequest r;
  r.set_id(job.id);
  for (const auto& m : job.connect.moves())
    if ((m.vqpn() != 0) == datagrams) *r.add_moves() = m;
  if (!r.moves_size()) return;
  // The rest of a migration does not wait for a silent host, unless datagrams would come from where it does not know.
  const auto tell = [&] { return tell_hosts(peers_, r, datagrams ? kSuspendMs + 2 * kProcessMs : 2 * kWhereMs), Status(); };
  if (auto s = job_step(config_.fault, job.id, FaultStep::kDestinationMoves, tell); !s) spdlog::warn("migration {:08x}: {}", job.id, s.error().text);
}

// A process can only speak for itself, but it could claim another's instance: it has to be of this container.
Result<SessionTable::Fits> DestinationHost::of_container(const Job& job) {
  pid_t init = 0;
  for (const auto until = Clock::now() + std::chrono::milliseconds(kReconnectMs); !job.instances.empty() && !(init = runc_.init_pid(job.container));) {
    if (Clock::now() > until) return Error{ETIMEDOUT, "runc did not write down the first process of " + job.container};
    usleep(5'000);
  }
  return SessionTable::Fits([this, &job, init](const ProcessSession& s) { return runc_.owns(job.container, init, s.pid()); });
}

// Of a process. Caller holds job.work.
std::set<std::uint32_t> DestinationHost::contexts_of(const Job& job, std::size_t i) {
  std::set<std::uint32_t> its;
  for (const auto at : job.objects_of[i]) its.insert(job.objects[at].ctx_id);
  return its;
}

// Of a process that has not connected here (yet). Caller holds job.work.
bool DestinationHost::has_ended(const Job& job, std::size_t i) const {
  if (job.rebound) return !numbers_.guest_lives(job.instances[i]);
  auto its = contexts_of(job, i);
  its.erase(0);  // its number is not known
  auto kernel = KernelRecord::open();
  const auto ctxs = kernel ? kernel->contexts() : Result<std::vector<ContextRecord>>(kernel.error());
  return ctxs && !its.empty() && std::none_of(ctxs->begin(), ctxs->end(), [&](const ContextRecord& c) { return its.contains(c.rec.ctx_id); });
}

// The session of one of its processes; null: that has ended since the commit, which concerns nobody else. Caller holds job.work.
Result<std::shared_ptr<ProcessSession>> DestinationHost::session_of(const Job& job, std::size_t i, const SessionTable::Fits& fits) {
  constexpr int kLookMs = 500;
  for (const auto until = Clock::now() + std::chrono::milliseconds(kReconnectMs);;) {
    auto session = sessions_.wait_for(job.instances[i], fits, kLookMs);
    if (session) return session;
    if (ends_) return Error{ECANCELED, "migrd ends"};
    if (has_ended(job, i)) {
      spdlog::warn("a process of {} has ended since the commit", job.container);
      return std::shared_ptr<ProcessSession>();
    }
    if (Clock::now() <= until) continue;
    // Nobody can tell whether one that had no context has ended. What it has of librdmacm is made again if it comes later.
    if (job.rebound || !contexts_of(job, i).empty()) return session;
    spdlog::warn("a process of {} that had nothing of RDMA does not connect: the others go on without it", job.container);
    return std::shared_ptr<ProcessSession>();
  }
}

// What a process is now that was called otherwise. Caller holds job.work.
std::vector<migr_handle_map> DestinationHost::handles_of(const Job& job, std::size_t i) {
  std::vector<migr_handle_map> map;
  for (const auto at : job.objects_of[i]) {
    const auto& o = job.objects[at];
    migr_handle_map h{};
    h.ctx_id = o.ctx_id;
    h.context_fd = o.context_fd;
    h.obj_type = o.obj_type;
    h.old_handle = o.obj_type ? o.old_handle : o.src_ctx_id;
    h.new_handle = o.new_handle;
    h.vqpn = o.vqpn;
    h.pqpn = o.pqpn;
    if (o.vqpn && job.gone.contains({o.src_ctx_id, o.vqpn})) h.flags |= MIGR_HANDLE_GONE;
    const auto peer = job.peers.find({o.src_ctx_id, o.vqpn});
    const bool connected = o.vqpn && peer != job.peers.end();
    if (connected) std::copy(peer->second.instance.begin(), peer->second.instance.end(), reinterpret_cast<char*>(h.peer));
    map.push_back(h);
    if (!connected || !peer->second.ctx_id) continue;
    h.obj_type = MIGR_HANDLE_PEER;
    h.old_handle = peer->second.ctx_id;
    map.push_back(h);
  }
  return map;
}

// All at once: there is no way back, and one that is slow or fails is to hold up nobody. Caller holds job.work.
Status DestinationHost::rebind(Job& job) {
  if (job.get() != wire::COMMITTED) return Error{EBUSY, "REBIND before the commit"};
  if (job.rebound) return {};
  job.sessions.clear();
  const auto fits = of_container(job);
  if (!fits) return fits.error();
  struct Came {
    std::size_t i;
    std::shared_ptr<ProcessSession> session{};  // null: it has ended, or is late
    bool late = false;
    wire::ProcessKeys keys{};
  };
  std::vector<Came> all;
  for (std::size_t i = 0; i < job.instances.size(); i++) all.push_back({i});
  const auto take = [&](Came& p) -> Status {
    auto session = session_of(job, p.i, *fits);
    if (!session) return session.error();
    // A disk that is full keeps nobody from going on.
    if (auto s = numbers_.note_guest(job.instances[p.i], job.births_of(p.i), *session ? (*session)->pid() : 0); !s) spdlog::error("{}", s.error().text);
    p.late = !*session && contexts_of(job, p.i).empty();
    if (!*session) return {};
    auto fresh = (*session)->ask<migr_key_map, migr_handle_map>(MIGR_MSG_REBIND, job.id, handles_of(job, p.i), process_ms(job.qps()));
    if (!fresh && (*session)->ends()) {
      spdlog::warn("{} has ended since the commit", (*session)->label());
      return {};
    }
    if (!fresh) return fresh.error();
    p.keys.set_owner(job.instances[p.i].data(), job.instances[p.i].size());
    for (const auto& f : *fresh) p.keys.add_vrkey(f.vrkey), p.keys.add_prkey(f.prkey);
    p.session = *session;
    return {};
  };
  if (auto s = parallel_for(all, take); !s) return s;
  std::vector<wire::ProcessKeys> keys;
  std::vector<Instance> late;
  for (auto& p : all) {
    if (p.late) late.push_back(job.instances[p.i]);
    if (!p.session) continue;
    keys.push_back(std::move(p.keys));
    job.sessions.push_back(std::move(p.session));
  }
  // Where its processes are connected to each other, they write to memory that has moved, too.
  const bool twins = std::any_of(job.peers.begin(), job.peers.end(), [&](const auto& p) {
    return std::any_of(job.instances.begin(), job.instances.end(), [&](const Instance& i) { return std::equal(i.begin(), i.end(), reinterpret_cast<const std::uint8_t*>(p.second.instance.data())); });
  });
  const auto tell = [&](const std::shared_ptr<ProcessSession>& p) {
    const Status told = tell_keys(*p, job.id, keys);
    return told || !p->ends() ? told : Status();
  };
  if (twins)
    if (auto s = parallel_for(job.sessions, tell); !s) return s;
  for (const auto& i : job.instances)
    if (std::find(late.begin(), late.end(), i) == late.end()) close_gate(config_.run_dir, i);
  tell_moves(job, true);
  job.module = Fd();
  std::lock_guard lock(job.state);
  job.late = late;
  job.keys = keys;
  job.keys_known = true;
  job.rebound = true;
  return {};  // not written down: REBIND answers the same again
}

grpc::Status DestinationHost::Rebind(grpc::ServerContext* ctx, const wire::Migration* m, wire::CommitReply* out) {
  const LogScope log(log_fields_of(*ctx, config_, m->id()));
  auto found = jobs_.find(m->id(), {*ctx, config_});
  if (!found) return to_grpc(found);
  Job& job = **found;
  {
    std::unique_lock lock(job.state);
    job.went_on.wait(lock, [&] { return !job.rebinds; });
  }
  if (!job.rebound) {
    std::lock_guard work(job.work);
    if (auto s = job_step(config_.fault, m->id(), FaultStep::kDestinationRebind, [&] { return rebind(job); }); !s) return to_grpc(s);
  }
  std::lock_guard lock(job.state);
  for (const auto& k : job.keys) *out->add_keys() = k;
  return grpc::Status::OK;
}

// Caller holds job.work.
Status DestinationHost::resume(Job& job) {
  if (!job.rebound) return Error{EBUSY, "RESUME before REBIND"};
  if (job.resumed) return {};
  if (job.sessions.empty()) {  // migrd was started again since
    const auto fits = of_container(job);
    if (!fits) return fits.error();
    for (std::size_t i = 0; i < job.instances.size(); i++) {
      auto s = session_of(job, i, *fits);
      if (!s) return s.error();
      if (*s) job.sessions.push_back(*s);
    }
  }
  // One that is slow or fails keeps no other from going on.
  std::mutex guards_replayed;
  const Status first = parallel_for(job.sessions, [&](const std::shared_ptr<ProcessSession>& s) -> Status {
    if (s->state() == MIGR_PROC_RUNNING) return {};
    auto stats = s->ask<migr_resume_stat, migr_qp_ref>(MIGR_MSG_RESUME, job.id, {}, process_ms(job.qps()));
    if (!stats && !s->ends()) return stats.error();
    if (!stats) return spdlog::warn("{} has ended as it was resumed", s->label()), Status();
    std::lock_guard lock(guards_replayed);
    add_stats(job.replayed, *stats);
    return {};
  });
  if (!first) return job.sessions.clear(), first;  // the next time they are looked up anew: a process may have connected again
  job.resumed = true;
  job.set_objects({});
  job.sessions.clear();  // each holds a socket, and the job is kept for a while
  job.record.clear_objects();
  // With many QPs that takes longer than all before. A migrd that ends meanwhile begins with REBIND again.
  job.settles.run([this, &job] {
    std::lock_guard work(job.work);
    settle(job);
  });
  return {};
}

// Its processes run here. Caller holds job.work.
void DestinationHost::settle(Job& job) {
  if (auto s = numbers_.arrive(job.instances, job.vqpns()); !s) spdlog::error("{}", s.error().text);
  job.record.clear_keys();
  {
    std::lock_guard lock(job.state);
    for (const auto& k : job.keys) *job.record.add_keys() = k;
    job.record.set_keys_known(job.keys_known);
  }
  if (auto s = save(job); !s) spdlog::error("{}", s.error().text);
  job.settled = true;
  // Who connects from now on is no migration's any more.
  const auto waits = [](const ProcessSession& s) { return s.state() != MIGR_PROC_RUNNING; };
  for (const auto& i : job.instances)
    if (const auto s = sessions_.wait_for(i, waits, 0); s && comes_late(**s)) take_in(**s, config_.run_dir);
  claims_.release(job.instances, job.id);
  job.finished = job.opened.load();
}

bool DestinationHost::comes_late(const ProcessSession& s) {
  for (const auto& job : jobs_.all()) {
    if (job->get() != wire::COMMITTED || !job->settled || s.state() != MIGR_PROC_FROZEN) continue;
    std::lock_guard lock(job->state);
    const auto its = std::find(job->late.begin(), job->late.end(), s.instance());
    if (its == job->late.end() || !runc_.owns(job->container, runc_.init_pid(job->container), s.pid())) continue;
    job->late.erase(its);
    return true;
  }
  return false;
}

std::optional<bool> DestinationHost::brings(const Instance& i, pid_t pid) const {
  for (const auto& job : jobs_.all()) {
    if (job->get() == wire::UNDONE || std::find(job->instances.begin(), job->instances.end(), i) == job->instances.end()) continue;
    if (job->settled) {
      if (bare_pid(job->container)) continue;  // whose parent has ended is no descendant any more
      std::lock_guard lock(job->state);
      if (std::find(job->late.begin(), job->late.end(), i) == job->late.end()) continue;
    }
    if (const pid_t init = runc_.init_pid(job->container)) return runc_.owns(job->container, init, pid);
  }
  return std::nullopt;
}

grpc::Status DestinationHost::Resume(grpc::ServerContext* ctx, const wire::Migration* m, wire::ResumeReply* out) {
  const LogScope log(log_fields_of(*ctx, config_, m->id()));
  auto found = jobs_.find(m->id(), {*ctx, config_});
  if (!found) return to_grpc(found);
  Job& job = **found;
  {
    std::unique_lock lock(job.state);
    job.went_on.wait(lock, [&] { return !job.resumes; });
  }
  if (!job.resumed) {  // else whatever settles here has job.work, and the source waits for none of it
    std::lock_guard work(job.work);
    if (auto s = job_step(config_.fault, m->id(), FaultStep::kDestinationResume, [&] { return resume(job); }); !s) return to_grpc(s);
  }
  *out = job.replayed;
  return grpc::Status::OK;
}

// Has runc undo its restore. It does so when it is told to end. @return what it had made
std::vector<pid_t> DestinationHost::end_restore(Job& job) {
  constexpr int kAnswerMs = 2'000, kEndMs = 8'000;
  std::vector<pid_t> made;
  const auto root = bare_pid(job.container);
  // It may have lost its parent, and be known by its life only.
  std::string life = root && is_here(job) ? job.record.began() : "";
  const auto note = [&](const std::vector<pid_t>& more) {
    made.insert(made.end(), more.begin(), more.end());
    if (root && std::find(more.begin(), more.end(), *root) != more.end()) life = life_of(*root);
  };
  // A CRIU that was killed went on making them until then.
  const auto all_made = [&] {
    if (root && !life.empty() && life_of(*root) == life) note(tree_of(*root));
    return made;
  };
  // It makes none between the look and its end. runc ends its own.
  const auto end = [&](pid_t restorer, int sig, pid_t told) {
    constexpr int kStandMs = 1'000;
    if (root) kill(restorer, SIGSTOP);
    for (int ms = 0; root && ms < kStandMs && process_lives(restorer) && !process_stopped(restorer); ms++) usleep(1'000);
    note(runc_.made_by(job.container, restorer));
    kill(told, sig);
    if (root) kill(restorer, SIGCONT);
  };
  (void)all_made();
  if (job.child.running()) {
    note(runc_.made_by(job.container, job.child.pid()));
    (void)job.socket->tell(MIGR_RC_ABORT, kAnswerMs);
    for (int sig : {SIGTERM, SIGKILL}) {
      if (!job.child.running()) break;
      end(job.child.pid(), sig, -job.child.pid());
      if (job.child.wait(kEndMs)) break;
    }
    return all_made();
  }
  for (int sig : {SIGTERM, SIGKILL}) {
    for (const pid_t pid : restorers(job.dir)) end(pid, sig, pid);
    for (const auto until = Clock::now() + std::chrono::milliseconds(kEndMs); Clock::now() < until; usleep(50'000))
      if (!restore_runs(job.dir)) return all_made();
  }
  return all_made();
}

// Of an undone one: what it has made that others see. Repeated until nothing of it is here. Caller holds job.work.
// @return why the container or its address still is
Status DestinationHost::tidy_up(Job& job) {
  const auto done = [](const Status& s) {
    if (!s) spdlog::warn("{}", s.error().text);
    return bool(s);
  };
  const bool restored = job.record.boot() == boot_of_host(), anothers = is_anothers(job);
  // What has the name later is another one.
  if (restored && !anothers && !bare_pid(job.container) && job.record.began().empty()) job.record.set_began(runc_.life(job.container));
  // The address first: sockets of restored tasks must not answer anybody when they die.
  Status here;
  if ((restored || job.attached) && !anothers)
    if (auto s = runc_.net("detach", job.bundle, job.container); !done(s)) here = s;
  Status removed;
  if (restored && !job.record.removed()) {
    const auto made = end_restore(job);
    if (!anothers) removed = runc_.remove_restored(job.container, made);
    job.record.set_removed(done(removed));
  }
  const Status cleaned = anothers ? Status() : runc_.net("cleanup", job.bundle, job.container);
  const bool gone = done(cleaned);  // and the address with its link
  if (here || gone || !job.record.made_net()) here = removed;
  const bool left = !here || (!gone && job.record.made_net());
  job.record.set_left(left);
  {
    std::lock_guard lock(job.state);
    job.why_left = here ? cleaned ? "" : cleaned.error().text : here.error().text;
  }
  if (!left && job.record.made_bundle() && !anothers && bundle_is_free(job.bundle, &job)) remove_bundle(job.bundle, job.record);
  job.left = left;  // after the folder has gone: until then nobody is let into it
  return here;
}

// What is needed to understand it stays.
void DestinationHost::keep_logs(const Job& job) const {
  const std::string name = migration_text(job.id) + "-restore", kept = failure_kept_in(config_.state_dir, name);
  std::error_code ec;
  make_room_for_failure(config_.state_dir, name);
  fs::create_directories(kept, ec);
  fs::copy(job.dir + "/work", kept, fs::copy_options::overwrite_existing, ec);
  fs::copy_file(job.dir + "/restore.out", kept + "/restore.out", fs::copy_options::overwrite_existing, ec);
}

// Caller holds job.work. Idempotent.
Status DestinationHost::abort(Job& job, const std::string& why) {
  if (job.get() == wire::COMMITTED || (job.get() == wire::UNDONE && !job.left)) return {};
  const bool first = job.get() == wire::OPEN;
  if (first) spdlog::warn("undone here: {}", why);
  job.module = Fd();
  job.attach = Child();
  job.open = Child();
  const Status here = job.mine ? tidy_up(job) : Status();
  if (job.mine && first) {
    for (const auto& i : job.instances)  // a later one has opened those that it holds
      if (const auto holder = claims_.holder(i); !holder || holder == job.id) close_gate(config_.run_dir, i);
    if (job.failed) keep_logs(job);
    if (auto s = remove_folder(job.dir); !s) spdlog::error("{}", s.error().text);
  }
  job.outcome = wire::UNDONE;
  job.settled = true;
  job.finished = !job.left;
  if (job.left) job.expire();
  if (!job.mine) return {};
  if (first) decided(wire::UNDONE);
  if (auto s = save(job); !s) spdlog::error("{}", s.error().text);  // the record of before stays: a migrd that is started again finds the same
  return here ? here : Status(Error{here.error().code, "it was undone here, but not all of it has gone yet: " + here.error().text});
}

grpc::Status DestinationHost::Abort(grpc::ServerContext* ctx, const wire::Migration* m, wire::Empty*) {
  const LogScope log(log_fields_of(*ctx, config_, m->id()));
  auto job = jobs_.find(m->id(), {*ctx, config_});
  if (!job) return to_grpc(job);
  // Ends what another call waits for.
  (*job)->aborting = true;
  if (!(*job)->told) (*job)->socket->interrupt();
  std::lock_guard work((*job)->work);
  if ((*job)->get() == wire::COMMITTED) return {grpc::StatusCode::FAILED_PRECONDITION, "the container runs here already"};
  return to_grpc(job_step(config_.fault, m->id(), FaultStep::kDestinationAbort, [&] { return abort(**job, "by the source"); }));
}

wire::OutcomeReply DestinationHost::outcome(std::uint32_t id) {
  wire::OutcomeReply r;
  auto job = jobs_.find(id);
  if (!job) return r;
  r.set_outcome((*job)->outcome);
  std::lock_guard lock((*job)->state);
  for (const auto& k : (*job)->keys) *r.add_keys() = k;
  r.set_keys_known((*job)->keys_known);
  return r;
}

Status DestinationHost::readable(std::uint32_t id) {
  const auto job = jobs_.find(id);
  return job || job.error().code == ENOENT ? Status() : job.error();
}

bool DestinationHost::has_part(std::uint32_t id, const Caller& who) {
  const auto job = jobs_.find(id);
  if (!job) return false;
  const auto& hosts = (*job)->hosts;
  return hosts.empty() || who.is(config_.name) || std::any_of(hosts.begin(), hosts.end(), [&](const auto& h) { return who.is(h); });
}

Status DestinationHost::renew(std::uint32_t id, const Caller& who) { return jobs_.renew(id, who); }

bool DestinationHost::claims(const Instance& i) {
  for (const auto& j : jobs_.all())
    if (!j->finished && !j->settled && std::find(j->instances.begin(), j->instances.end(), i) != j->instances.end()) return true;
  return false;
}

// The source fell silent. Only its own word commits; after a commit this host goes on by itself.
void DestinationHost::left_alone(const JobPtr& job) {
  wire::Migration m;
  m.set_id(job->id);
  auto back = [&](const std::string& why) {
    job->aborting = true;
    if (!job->told) job->socket->interrupt();
    std::lock_guard work(job->work);
    (void)abort(*job, why);
  };
  for (LeasedJob::Pace pace; !job->finished && !jobs_.ends(); pace.wait(*job, jobs_.ends())) {
    if (job->left) {
      back("");
      continue;
    }
    if (job->settled) continue;  // but for its network
    if (job->get() == wire::COMMITTED) {
      std::lock_guard work(job->work);
      Status s = rebind(*job);
      if (s) s = resume(*job);
      if (s) continue;
      spdlog::error("{}", s.error().text);
      if (is_here(*job)) continue;
      spdlog::error("{} has ended; nothing is left to do", job->container);
      (void)numbers_.arrive(job->instances, job->vqpns());
      for (std::size_t i = 0; i < job->instances.size(); i++) {
        close_gate(config_.run_dir, job->instances[i]);
        (void)numbers_.note_guest(job->instances[i], job->births_of(i), 0);
      }
      job->record.set_closed(false);
      job->record.set_keys_known(true);
      {
        std::lock_guard lock(job->state);
        job->keys_known = true;  // of nothing: its partners see that it has ended
      }
      job->resumed = job->settled = job->finished = true;
      claims_.release(job->instances, job->id);
      (void)save(*job);
      continue;
    }
    if (job->renewed()) return;
    if (job->ordered == wire::UNDONE) {
      back("by the operator");
      continue;
    }
    auto channel = peers_.channel(job->source);
    Result<wire::OutcomeReply> o = Error{EHOSTUNREACH, ""};
    if (channel) {
      wire::Host::Stub stub(*channel);
      o = call(stub, &wire::Host::Stub::GetOutcome, m, kCheckMs, job->source);
    }
    if (o && o->outcome() == wire::COMMITTED) {
      std::lock_guard work(job->work);
      (void)commit(*job);
      continue;
    }
    if (job->renewed()) return;
    // It was not told to commit, and from here on it will not let itself be told: this host's own word decides.
    // A partner that is left alone asks us: it must not wait for longer than it can.
    if ((o && o->outcome() != wire::OPEN) || !pace.patient() || !channel || !job->ready) back(job->source + " fell silent");
  }
}

void DestinationHost::tick() {
  jobs_.tick([this](const JobPtr& job) { left_alone(job); }, [this](const JobPtr& job) { (void)save(*job); }, [this](const JobPtr& job) { journal_.remove(job->id); });
  // Files go when runc has ended, which is after the tasks run; and not later, for it may be they that fill the disk.
  for (const auto& job : jobs_.all()) {
    const LogScope log(job->id);
    if (const std::unique_lock work(job->work, std::try_to_lock); !work || job->start_again()) continue;
    if (job->finished && (job->clean || job->get() == wire::UNDONE) && !std::exchange(job->rests, true)) job->rest();
    if (job->get() != wire::COMMITTED || job->cleans_up) continue;
    if (std::unique_lock work(job->work, std::try_to_lock); work && !job->child.running() && !restore_runs(job->dir)) {
      job->cleans_up = true;
      job->cleans.run([&job = *job] {  // there may be much of it
        if (auto s = remove_folder(job.dir); !s) spdlog::error("{}", s.error().text);
        job.clean = true;
      });
    }
  }
}

bool DestinationHost::opens_network(const std::string& container) const {
  const auto all = jobs_.all();
  return std::any_of(all.begin(), all.end(), [&](const JobPtr& j) { return j->container == container && j->get() == wire::COMMITTED && !j->finished && !j->opened; });
}

std::vector<wire::OpenMigration> DestinationHost::open_migrations() {
  std::vector<wire::OpenMigration> out;
  for (const auto& j : jobs_.all()) {
    if (j->finished) continue;
    wire::OpenMigration o;
    o.set_id(j->id);
    o.set_role("destination");
    o.set_container(j->container);
    o.set_source(j->source);
    o.set_destination(config_.name);
    for (const auto& h : j->hosts)
      if (h != j->source && h != config_.name) o.add_partners(h);
    o.set_begun_s(j->begun_s);
    o.set_outcome(j->outcome);
    if (j->get() == wire::COMMITTED) {
      std::lock_guard lock(j->state);
      const std::string closed = j->opened || j->why_closed.empty() ? "" : "its network stays closed and is tried again: " + j->why_closed;
      o.set_state("runs here; " + (j->settled && !closed.empty() ? closed : "its connections are being taken up" + (closed.empty() ? "" : "; " + closed)));
    } else if (j->left) {
      std::lock_guard lock(j->state);
      o.set_state("was undone here, but not all of it has gone, which is tried again" + (j->why_left.empty() ? "" : ": " + j->why_left));
    } else
      o.set_state(j->renewed() ? j->source + " coordinates it" : j->source + " is silent; is asked for the outcome, then it is undone");
    out.push_back(o);
  }
  return out;
}

Status DestinationHost::order(std::uint32_t id, wire::Outcome outcome, bool) {
  auto job = jobs_.find(id);
  if (!job || (*job)->finished) return Error{ENOENT, "no open migration of that number here"};
  if ((*job)->get() == wire::COMMITTED)
    return outcome == wire::COMMITTED ? Status() : Status(Error{EBUSY, "the container runs here already; to be rid of it: " + runc_.ended_by((*job)->container)});
  if ((*job)->renewed()) return Error{EBUSY, (*job)->source + " coordinates it and goes on; wait for it"};
  if (outcome == wire::COMMITTED)
    return Error{EPERM, "only " + (*job)->source + " can commit it: there the container may still run. Start migrd there"};
  (*job)->ordered = outcome;
  return {};
}

void DestinationHost::shutdown() {
  for (const auto& j : jobs_.all()) {
    if (j->get() != wire::OPEN) continue;
    const LogScope log(j->id);
    j->aborting = true;
    j->socket->interrupt();
    std::lock_guard work(j->work);
    (void)abort(*j, "migrd ends");
  }
}

}  // namespace migr
