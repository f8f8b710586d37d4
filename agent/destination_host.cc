// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "destination_host.h"

#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "fault.h"
#include "file_tree.h"
#include "kernel_record.h"
#include "limits.h"
#include "restore_socket.h"
#include "resume_stats.h"
#include "born.h"

namespace migr {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

Result<Instance> instance_of(const std::string& bytes) {
  Instance i{};
  if (bytes.size() != i.size()) return Error{EINVAL, "an instance has 16 bytes"};
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(i.data()));
  return i;
}

}  // namespace

// In a job's folder, for a migrd that is started again: container, bundle, and 1 if the bundle is ours; and what says that
// the container may run here.
constexpr char kJobFile[] = "job";
constexpr char kCommitMark[] = "committed";

struct DestinationHost::Job {
  std::uint32_t id = 0;
  std::string container, bundle, source;
  std::vector<Instance> instances;
  std::map<std::uint32_t, std::uint32_t> owner;  // source's ctx_id -> index in instances
  std::vector<std::uint32_t> vqpns;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::string> peers;  // (source's ctx_id, vQPN) -> instance, of what is connected
  std::set<std::pair<std::uint32_t, std::uint32_t>> gone;                 // likewise, of what was
  std::string dir;                               // images/, work/, restore.out
  bool made_bundle = false;

  std::mutex work;                               // one call at a time
  std::atomic<bool> aborting = false;
  std::unique_ptr<RestoreSocket> socket;
  Child child;                                   // runc partial-restore
  std::vector<migr_rc_object> objects;
  std::vector<std::shared_ptr<ProcessSession>> sessions;
  bool attached = false, ready = false, rebound = false;
  std::atomic<bool> resumed = false;
  bool cleaned = false;
  std::thread opener;                            // lets the network's traffic through

  std::mutex state;                              // guards what follows
  wire::Outcome outcome = wire::OPEN;
  std::vector<wire::ProcessKeys> keys;
  Clock::time_point lease = Clock::now();
  bool alone = false;                            // somebody asks for the outcome already
  wire::Outcome get() { return std::lock_guard(state), outcome; }

  std::string images() const { return dir + "/images"; }
  ~Job() {
    if (opener.joinable()) opener.join();
  }
};

DestinationHost::DestinationHost(const Config& config, SessionTable& sessions, Peers& peers)
    : config_(config), sessions_(sessions), peers_(peers), runc_(config) {
  std::error_code ec;
  for (const auto& d : fs::directory_iterator(config_.state_dir + "/dest", ec)) sweep(d.path());
  fs::remove_all(config_.state_dir + "/dest", ec);
}

// What an earlier migrd left in the middle of a migration. It cannot have been committed without a mark; with it, the
// container runs here and is nobody's business but its own.
void DestinationHost::sweep(const std::string& dir) {
  std::error_code ec;
  std::ifstream in(dir + "/" + kJobFile);
  std::string container, bundle, made;
  if (!std::getline(in, container) || !std::getline(in, bundle) || !std::getline(in, made) || fs::exists(dir + "/" + kCommitMark, ec)) return;
  spdlog::warn("a migration of {} to here was not decided when migrd ended: taking back what was made", container);
  if (auto s = runc_.net("detach", bundle, container); !s) spdlog::warn("{}", s.error().text);
  // runc undoes a restore that it is told to end; its command line names the folder.
  for (int round = 0; round < 100; round++) {
    bool any = false;
    for (const auto& p : fs::directory_iterator("/proc", ec)) {
      const pid_t pid = std::atoi(p.path().filename().c_str());
      if (pid <= 0 || pid == getpid()) continue;
      std::ifstream f(p.path() / "cmdline", std::ios::binary);
      const std::string line((std::istreambuf_iterator<char>(f)), {});
      const bool restores = line.find("partial-restore") != std::string::npos || line.find(std::string("\0restore\0", 9)) != std::string::npos;
      if (!restores || line.find(dir + "/") == std::string::npos) continue;
      any = true;
      if (round % 80) continue;
      const auto made = runc_.made_by(container, pid);
      kill(pid, round ? SIGKILL : SIGTERM);
      (void)runc_.remove_restored(container, made);
    }
    if (!any) break;
    usleep(100'000);
  }
  if (auto s = runc_.remove_restored(container, {}); !s) spdlog::warn("{}", s.error().text);
  if (auto s = runc_.net("cleanup", bundle, container); !s) spdlog::warn("{}", s.error().text);
  if (made == "1") fs::remove_all(bundle, ec);
}

DestinationHost::~DestinationHost() = default;

Result<DestinationHost::JobPtr> DestinationHost::find(std::uint32_t id) {
  std::lock_guard lock(mutex_);
  const auto j = jobs_.find(id);
  if (j == jobs_.end()) return Error{ENOENT, "no migration " + fmt::format("{:08x}", id) + " here"};
  return j->second;
}

// CRIU's own words are worth more than "exit status 1".
Status DestinationHost::with_log(const Job& job, const Status& s) {
  if (s) return s;
  std::string line;
  const std::string log = tail_of(job.dir + "/work/restore.log", 64 << 10);
  for (std::size_t at = 0; at < log.size();) {
    std::size_t end = std::min(log.find('\n', at), log.size());
    const std::string l = log.substr(at, end - at);
    // The first is the cause; a probe for tun devices always complains.
    if (l.find("Error (") != std::string::npos && l.find("tun.c") == std::string::npos && line.empty()) line = l;
    at = end + 1;
  }
  std::string out = tail_of(job.dir + "/restore.out", 2048);
  while (!out.empty() && std::isspace(static_cast<unsigned char>(out.back()))) out.pop_back();
  if (const auto nl = out.rfind('\n'); nl != std::string::npos) out = out.substr(nl + 1);
  std::string text = s.error().text;
  if (!out.empty()) text += "; runc: " + out;
  if (!line.empty()) text += "; CRIU: " + line;
  return Error{s.error().code, text};
}

grpc::Status DestinationHost::Check(grpc::ServerContext*, const wire::CheckRequest* r, wire::CheckReply* out) {
  auto check = [&]() -> Status {
    auto differs = [&](const char* what, std::uint32_t theirs, std::uint32_t ours) {
      return Error{EBUSY, std::string(what) + " version " + std::to_string(ours) + " here, " + std::to_string(theirs) +
                              " there; install the same release on both hosts"};
    };
    if (r->wire() != kWireVersion) return differs("migrd", r->wire(), kWireVersion);
    if (r->proc() != MIGR_PROC_VERSION) return differs("libmigr", r->proc(), MIGR_PROC_VERSION);
    auto k = KernelRecord::open();
    if (!k) return Error{EBUSY, k.error().text};
    if (r->abi() != MIGR_ABI_VERSION) return differs("migr.ko", r->abi(), MIGR_ABI_VERSION);
    if (r->devices_size() && access("/sys/class/infiniband", F_OK)) return Error{EBUSY, "no RDMA device"};
    std::error_code ec;
    if (r->devices_size() && fs::is_empty("/sys/class/infiniband", ec)) return Error{EBUSY, "no RDMA device"};
    if (!Runtime::name_ok(r->container())) return Error{EINVAL, "'" + r->container() + "' is no name of a container"};
    if (!config_.criu_libs.empty() && access((config_.criu_libs + "/migr_plugin.so").c_str(), R_OK))
      return Error{EBUSY, "no migr_plugin.so in " + config_.criu_libs};
    if (auto s = runc_.check_verbs(r->container()); !s) return Error{EBUSY, s.error().text};
    if (auto s = runc_.name_is_free(r->container()); !s) return s;
    for (const auto pid : r->pids())
      if (auto s = runc_.name_is_free(bare_name(pid)); !s) return s;
    std::lock_guard lock(mutex_);
    for (const auto& [id, j] : jobs_)
      if (j->container == r->container() && j->get() == wire::OPEN)
        return Error{EEXIST, "'" + r->container() + "' is being migrated to here already"};
    return {};
  };
  out->set_name(config_.name);
  return to_grpc(fault_step(config_.fault, FaultStep::kDestinationCheck, check));
}

grpc::Status DestinationHost::Prepare(grpc::ServerContext*, grpc::ServerReader<wire::PrepareChunk>* reader,
                                      wire::PrepareReply* out) {
  wire::PrepareChunk chunk;
  if (!reader->Read(&chunk) || !chunk.has_header()) return {grpc::StatusCode::INVALID_ARGUMENT, "Prepare without a header"};
  auto job = std::make_shared<Job>();
  const auto& h = chunk.header();
  job->id = h.id();
  job->container = h.container();
  job->bundle = h.bundle();
  job->source = h.source();
  job->vqpns.assign(h.vqpns().begin(), h.vqpns().end());
  for (const auto& i : h.instances()) {
    auto x = instance_of(i);
    if (!x) return to_grpc(x);
    job->instances.push_back(*x);
  }
  const bool bundle_ok = bare_pid(h.container()) ? h.bundle().empty()
                                                 : !h.bundle().empty() && h.bundle()[0] == '/' && fs::path(h.bundle()).lexically_normal() == fs::path(h.bundle());
  if (!h.id() || !Runtime::name_ok(h.container()) || h.ctx_ids_size() != h.ctx_owner_size() || !bundle_ok)
    return {grpc::StatusCode::INVALID_ARGUMENT, "Prepare with a malformed header"};
  for (int i = 0; i < h.ctx_ids_size(); i++) {
    if (h.ctx_owner(i) >= job->instances.size()) return {grpc::StatusCode::INVALID_ARGUMENT, "a context without a process"};
    job->owner[h.ctx_ids(i)] = h.ctx_owner(i);
  }
  job->dir = config_.state_dir + "/dest/" + fmt::format("{:08x}", job->id);
  job->socket = std::make_unique<RestoreSocket>(job->images() + "/restore.sock");
  std::lock_guard work(job->work);
  {
    std::lock_guard lock(mutex_);
    if (!jobs_.emplace(job->id, job).second) return {grpc::StatusCode::ALREADY_EXISTS, "a migration of that number is here"};
  }

  const bool later = h.later();
  auto run = [&]() -> Status {
    if (auto s = fault(config_.fault, FaultStep::kDestinationPrepare, FaultAt::kBegin); !s) return s;
    if (runc_.exists(job->container)) return Error{EEXIST, "the name '" + job->container + "' is taken"};
    std::error_code ec;
    job->made_bundle = !job->bundle.empty() && !fs::exists(job->bundle, ec);
    for (const auto& d : {job->images(), job->dir + "/work", job->bundle})
      if (!d.empty()) fs::create_directories(d, ec);
    if (ec) return Error{ec.value(), "making folders for the migration: " + ec.message()};
    std::ofstream(job->dir + "/" + kJobFile) << job->container << "\n" << job->bundle << "\n" << job->made_bundle << "\n";
    TreeWriter bundle(job->bundle), images(job->images());
    while (reader->Read(&chunk)) {
      TreeWriter& w = chunk.file().tree() == wire::FileChunk::BUNDLE ? bundle : images;
      if (auto s = w.write(chunk.file()); !s) return s;
    }
    if (auto s = bundle.finish(); !s) return s;
    if (auto s = images.finish(); !s) return s;
    if (auto s = runc_.net("prepare", job->bundle, job->container); !s) return s;
    return later ? Status() : create(*job, *out);
  };
  Status s = run();
  if (s && !later) s = fault(config_.fault, FaultStep::kDestinationPrepare, FaultAt::kEnd);
  if (!s) abort(*job, s.error().text);
  std::lock_guard lock(job->state);
  job->lease = Clock::now();
  return to_grpc(s);
}

grpc::Status DestinationHost::Create(grpc::ServerContext*, const wire::Migration* m, wire::PrepareReply* out) {
  auto job = find(m->id());
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  if ((*job)->get() != wire::OPEN) return {grpc::StatusCode::ABORTED, "the migration was undone here"};
  if ((*job)->child.running()) return {grpc::StatusCode::ALREADY_EXISTS, "the partial restore was started already"};
  Status s = create(**job, *out);
  if (s) s = fault(config_.fault, FaultStep::kDestinationPrepare, FaultAt::kEnd);
  if (!s) abort(**job, s.error().text);
  return to_grpc(s);
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
    p->set_src_pqpn(q.src_pqpn);
    p->set_pqpn(q.pqpn);
    p->set_psn(q.psn);
    p->set_gid(q.sgid, sizeof q.sgid);
  }
  return {};
}

Status DestinationHost::start_restore(Job& job) {
  auto child = runc_.partial_restore(job.container, job.bundle, job.images(), job.dir + "/work", job.dir + "/restore.out");
  if (!child) return child.error();
  job.child = std::move(*child);
  const auto until = Clock::now() + std::chrono::milliseconds(kRestoreSocketMs);
  while (!job.socket->listening()) {
    if (!job.child.running()) return with_log(job, Error{ECHILD, "partial restore of " + job.container + " ended with status " + std::to_string(job.child.status())});
    if (job.aborting) return Error{ECANCELED, "the migration was undone"};
    if (Clock::now() > until)
      return with_log(job, Error{ETIMEDOUT, "partial restore of " + job.container + ": CRIU's plugin did not listen within " +
                                                std::to_string(kRestoreSocketMs) + " ms"});
    usleep(10'000);
  }
  return {};
}

// A call on a migration that is open here.
grpc::Status DestinationHost::step(std::uint32_t id, FaultStep step, const std::function<Status(Job&)>& work) {
  auto job = find(id);
  if (!job) return to_grpc(job);
  std::lock_guard lock((*job)->work);
  const auto still_open = [&] { return (*job)->get() == wire::OPEN && !(*job)->aborting ? Status() : Error{ECANCELED, "the migration was undone here"}; };
  if (auto s = still_open(); !s) return to_grpc(s);
  return to_grpc(fault_step(config_.fault, step, [&]() -> Status {
    if (auto s = still_open(); !s) return s;  // it was taken back while a fault point slept
    return work(**job);
  }));
}

grpc::Status DestinationHost::Connect(grpc::ServerContext*, const wire::ConnectRequest* r, wire::Empty*) {
  return step(r->id(), FaultStep::kDestinationConnect, [&](Job& job) -> Status {
    std::vector<migr_rc_connect> to;
    for (const auto& c : r->connections()) {
      migr_rc_connect x{};
      x.src_ctx_id = c.src_ctx_id();
      x.vqpn = c.vqpn();
      x.dest_qpn = c.dest_pqpn();
      x.dest_psn = c.dest_psn();
      if (!c.dest_pqpn()) {
        job.gone.emplace(c.src_ctx_id(), c.vqpn());
      } else {
        if (c.dest_gid().size() != sizeof x.dgid || c.peer().size() != Instance().size()) return Error{EINVAL, "a GID and an instance have 16 bytes"};
        std::copy(c.dest_gid().begin(), c.dest_gid().end(), reinterpret_cast<char*>(x.dgid));
        job.peers[{c.src_ctx_id(), c.vqpn()}] = c.peer();
      }
      to.push_back(x);
    }
    return with_log(job, job.socket->ask(MIGR_RC_CONNECT, std::span<const migr_rc_connect>(to), kPrepareMs));
  });
}

grpc::Status DestinationHost::Upload(grpc::ServerContext*, grpc::ServerReader<wire::UploadChunk>* reader, wire::UploadReply* out) {
  wire::UploadChunk chunk;
  if (!reader->Read(&chunk)) return {grpc::StatusCode::INVALID_ARGUMENT, "Upload without a header"};
  return step(chunk.id(), FaultStep::kDestinationUpload, [&](Job& job) -> Status {
    const std::string folder = chunk.pre_copy() ? job.dir + "/" + kPreCopyDir : job.images();
    if (mkdir(folder.c_str(), 0700) && errno != EEXIST) return sys_error("making " + folder);
    TreeWriter w(folder);
    while (reader->Read(&chunk)) {
      if (job.aborting) return Error{ECANCELED, "the migration was undone here"};
      if (auto s = w.write(chunk.file()); !s) return s;
    }
    if (auto s = w.finish(); !s) return s;
    out->set_bytes(w.bytes());
    out->set_files(w.files());
    return {};
  });
}

// Caller holds job.work. CRIU restores TCP connections only where their address is; no packet passes before the commit.
Status DestinationHost::attach_network(Job& job) {
  if (job.attached) return {};
  auto s = runc_.net("attach-closed", job.bundle, job.container);
  job.attached = bool(s);
  return s;
}

grpc::Status DestinationHost::AttachNetwork(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  return step(m->id(), FaultStep::kDestinationAttach, [&](Job& job) { return attach_network(job); });
}

grpc::Status DestinationHost::FullRestore(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  return step(m->id(), FaultStep::kDestinationRestore, [&](Job& job) -> Status {
    if (auto s = attach_network(job); !s) return s;
    return with_log(job, job.socket->tell(MIGR_RC_GO, kProcessMs));
  });
}

grpc::Status DestinationHost::Ready(grpc::ServerContext*, const wire::Migration* m, wire::ReadyReply* out) {
  return step(m->id(), FaultStep::kDestinationReady, [&](Job& job) -> Status {
    auto objects = job.socket->ask<migr_rc_object>(MIGR_RC_READY, std::span<const migr_rc_connect>(), kReadyMs);
    if (!objects) return with_log(job, objects);
    job.objects = *objects;
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
  for (const auto& i : job.instances)
    if (auto s = open_gate(config_.run_dir, i); !s) return abort(job, s.error().text), s;
  constexpr int kAnswerMs = 10'000;
  if (auto s = fault_step(config_.fault, FaultStep::kDestinationMark, [&] {
        std::ofstream(job.dir + "/" + kCommitMark) << "\n";
        return Status();
      }); !s)
    return abort(job, s.error().text), s;
  if (auto s = job.socket->tell(MIGR_RC_COMMIT, kAnswerMs); !s) {
    abort(job, s.error().text);
    return with_log(job, s);
  }
  {
    std::lock_guard lock(job.state);
    job.outcome = wire::COMMITTED;
    job.lease = Clock::now();
  }
  if (auto s = release_born(config_, job.instances, job.vqpns); !s) spdlog::warn("{}", s.error().text);
  spdlog::info("migration {:08x}: committed, {} runs here", job.id, job.container);
  job.opener = std::thread([this, bundle = job.bundle, container = job.container] {
    if (auto s = runc_.net("open", bundle, container); !s) spdlog::error("{}", s.error().text);
  });
  return {};
}

grpc::Status DestinationHost::Commit(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  auto job = find(m->id());
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  return to_grpc(fault_step(config_.fault, FaultStep::kDestinationCommit, [&] { return commit(**job); }));
}

// Caller holds job.work.
Status DestinationHost::rebind(Job& job) {
  if (job.get() != wire::COMMITTED) return Error{EBUSY, "REBIND before the commit"};
  if (job.rebound) return {};
  std::vector<wire::ProcessKeys> keys;
  job.sessions.clear();
  pid_t init = 0;
  for (const auto until = Clock::now() + std::chrono::milliseconds(kReconnectMs); !job.instances.empty() && !(init = runc_.init_pid(job.container));) {
    if (Clock::now() > until) return Error{ETIMEDOUT, "runc did not write down the first process of " + job.container};
    usleep(5'000);
  }
  for (std::size_t i = 0; i < job.instances.size(); i++) {
    // A process can only speak for itself, but it could claim another's instance: it has to be of this container.
    auto fits = [&](const ProcessSession& s) { return s.state() == MIGR_PROC_FROZEN && runc_.owns(job.container, init, s.pid()); };
    auto session = sessions_.wait_for(job.instances[i], fits, kReconnectMs);
    if (!session) return session.error();
    std::vector<migr_handle_map> map;
    for (const auto& o : job.objects) {
      const auto owner = job.owner.find(o.src_ctx_id);
      if (owner == job.owner.end() || owner->second != i) continue;
      migr_handle_map h{};
      h.ctx_id = o.ctx_id;
      h.context_fd = o.context_fd;
      h.obj_type = o.obj_type;
      h.old_handle = o.old_handle;
      h.new_handle = o.new_handle;
      h.vqpn = o.vqpn;
      h.pqpn = o.pqpn;
      if (o.vqpn && job.gone.contains({o.src_ctx_id, o.vqpn})) h.flags |= MIGR_HANDLE_GONE;
      if (const auto peer = job.peers.find({o.src_ctx_id, o.vqpn}); o.vqpn && peer != job.peers.end())
        std::copy(peer->second.begin(), peer->second.end(), reinterpret_cast<char*>(h.peer));
      map.push_back(h);
    }
    auto fresh = (*session)->ask<migr_key_map, migr_handle_map>(MIGR_MSG_REBIND, job.id, map, kProcessMs);
    if (!fresh) return fresh.error();
    wire::ProcessKeys k;
    k.set_owner(job.instances[i].data(), job.instances[i].size());
    for (const auto& f : *fresh) k.add_vrkey(f.vrkey), k.add_prkey(f.prkey);
    keys.push_back(k);
    job.sessions.push_back(*session);
  }
  // Where its processes are connected to each other, they write to memory that has moved, too.
  const bool twins = std::any_of(job.peers.begin(), job.peers.end(), [&](const auto& p) {
    return std::any_of(job.instances.begin(), job.instances.end(), [&](const Instance& i) { return std::equal(i.begin(), i.end(), reinterpret_cast<const std::uint8_t*>(p.second.data())); });
  });
  for (auto& s : job.sessions)
    if (twins)
      if (auto told = tell_keys(*s, job.id, keys); !told) return told;
  for (const auto& i : job.instances) close_gate(config_.run_dir, i);
  job.rebound = true;
  std::lock_guard lock(job.state);
  job.keys = keys;
  return {};
}

grpc::Status DestinationHost::Rebind(grpc::ServerContext*, const wire::Migration* m, wire::CommitReply* out) {
  auto job = find(m->id());
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  if (auto s = fault_step(config_.fault, FaultStep::kDestinationRebind, [&] { return rebind(**job); }); !s) return to_grpc(s);
  std::lock_guard lock((*job)->state);
  for (const auto& k : (*job)->keys) *out->add_keys() = k;
  return grpc::Status::OK;
}

// Caller holds job.work.
Status DestinationHost::resume(Job& job, wire::ResumeReply& out) {
  if (!job.rebound) return Error{EBUSY, "RESUME before REBIND"};
  if (job.resumed) return {};
  for (auto& s : job.sessions) {
    auto stats = s->ask<migr_resume_stat, migr_qp_ref>(MIGR_MSG_RESUME, job.id, {}, kProcessMs);
    if (!stats) return stats.error();
    add_stats(out, *stats);
  }
  job.resumed = true;
  job.objects.clear();
  job.sessions.clear();  // each holds a socket, and the job is kept for a while
  return {};
}

grpc::Status DestinationHost::Resume(grpc::ServerContext*, const wire::Migration* m, wire::ResumeReply* out) {
  auto job = find(m->id());
  if (!job) return to_grpc(job);
  std::lock_guard work((*job)->work);
  return to_grpc(fault_step(config_.fault, FaultStep::kDestinationResume, [&] { return resume(**job, *out); }));
}

// Caller holds job.work. Idempotent.
void DestinationHost::abort(Job& job, const std::string& why) {
  if (job.get() != wire::OPEN) return;
  spdlog::warn("migration {:08x}: undone here: {}", job.id, why);
  // The address first: sockets of restored tasks must not answer anybody when they die.
  if (auto s = runc_.net("detach", job.bundle, job.container); !s) spdlog::warn("{}", s.error().text);
  constexpr int kAnswerMs = 2'000, kEndMs = 8'000;
  const auto made = runc_.made_by(job.container, job.child.pid());
  if (job.child.running()) (void)job.socket->tell(MIGR_RC_ABORT, kAnswerMs);
  job.child.signal(SIGTERM);
  if (!job.child.wait(kEndMs)) {
    job.child.signal(SIGKILL);
    (void)job.child.wait(kEndMs);
  }
  if (auto s = runc_.remove_restored(job.container, made); !s) spdlog::warn("{}", s.error().text);
  if (auto s = runc_.net("cleanup", job.bundle, job.container); !s) spdlog::warn("{}", s.error().text);
  for (const auto& i : job.instances) close_gate(config_.run_dir, i);
  std::error_code ec;
  // What is needed to understand it stays: the logs of the last one that failed.
  const std::string kept = config_.state_dir + "/failed-restore";
  fs::remove_all(kept, ec);
  fs::create_directories(kept, ec);
  fs::copy(job.dir + "/work", kept, fs::copy_options::overwrite_existing, ec);
  fs::copy_file(job.dir + "/restore.out", kept + "/restore.out", fs::copy_options::overwrite_existing, ec);
  fs::remove_all(job.dir, ec);
  if (job.made_bundle) fs::remove_all(job.bundle, ec);
  std::lock_guard lock(job.state);
  job.outcome = wire::UNDONE;
}

grpc::Status DestinationHost::Abort(grpc::ServerContext*, const wire::Migration* m, wire::Empty*) {
  auto job = find(m->id());
  if (!job) return to_grpc(job);
  // Ends what another call waits for.
  (*job)->aborting = true;
  (*job)->socket->interrupt();
  std::lock_guard work((*job)->work);
  if ((*job)->get() == wire::COMMITTED) return {grpc::StatusCode::FAILED_PRECONDITION, "the container runs here already"};
  return to_grpc(fault_step(config_.fault, FaultStep::kDestinationAbort, [&] { return abort(**job, "by the source"), Status(); }));
}

wire::OutcomeReply DestinationHost::outcome(std::uint32_t id) {
  wire::OutcomeReply r;
  auto job = find(id);
  if (!job) return r;
  std::lock_guard lock((*job)->state);
  r.set_outcome((*job)->outcome);
  for (const auto& k : (*job)->keys) *r.add_keys() = k;
  return r;
}

Status DestinationHost::renew(std::uint32_t id) {
  auto job = find(id);
  if (!job) return job.error();
  std::lock_guard lock((*job)->state);
  if ((*job)->outcome == wire::UNDONE) return Error{ENOENT, "undone here"};
  (*job)->lease = Clock::now();
  return {};
}

bool DestinationHost::claims(const Instance& i) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, j] : jobs_)
    if (!j->resumed && j->get() != wire::UNDONE && std::find(j->instances.begin(), j->instances.end(), i) != j->instances.end()) return true;
  return false;
}

// The source fell silent. Only its own word commits; after a commit this host goes on by itself.
void DestinationHost::left_alone(const JobPtr& job) {
  spdlog::warn("migration {:08x}: {} fell silent", job->id, job->source);
  const auto until = Clock::now() + std::chrono::milliseconds(kResolveMs);
  wire::Migration m;
  m.set_id(job->id);
  auto renewed = [&] {
    std::lock_guard lock(job->state);
    return Clock::now() - job->lease < std::chrono::milliseconds(kLeaseMs);
  };
  while (job->get() == wire::OPEN && !renewed()) {
    auto channel = peers_.channel(job->source);
    if (channel) {
      wire::Host::Stub stub(*channel);
      auto o = call(stub, &wire::Host::Stub::GetOutcome, m, kCheckMs, job->source);
      if (o && o->outcome() == wire::COMMITTED) {
        std::lock_guard work(job->work);
        (void)commit(*job);
        break;
      }
      if (o && o->outcome() != wire::OPEN) break;
    }
    // A partner that is left alone asks us: it must not wait for longer than it can.
    if (Clock::now() > until || !channel || !job->ready) break;
    usleep(kResolveStepMs * 1000);
  }
  if (renewed()) return;
  std::lock_guard work(job->work);
  if (job->get() == wire::OPEN) return abort(*job, job->source + " fell silent");
  wire::ResumeReply ignored;
  if (auto s = rebind(*job); !s) return spdlog::error("migration {:08x}: {}", job->id, s.error().text);
  if (auto s = resume(*job, ignored); !s) spdlog::error("migration {:08x}: {}", job->id, s.error().text);
}

void DestinationHost::tick() {
  constexpr auto kKeepOutcome = std::chrono::hours(1);
  std::lock_guard lock(mutex_);
  for (auto j = jobs_.begin(); j != jobs_.end();) {
    const JobPtr job = j->second;
    std::lock_guard state(job->state);
    const auto silent = Clock::now() - job->lease;
    const bool finished = job->outcome == wire::UNDONE || job->resumed;
    if (finished && silent > kKeepOutcome) {
      j = jobs_.erase(j);
      continue;
    }
    j++;
    // Files go when runc has ended, which is after the tasks run.
    if (std::unique_lock work(job->work, std::try_to_lock); work && job->resumed && !job->cleaned && !job->child.running()) {
      std::error_code ec;
      fs::remove_all(job->dir, ec);
      job->cleaned = true;
    }
    if (finished || job->alone || silent < std::chrono::milliseconds(kLeaseMs)) continue;
    job->alone = true;
    std::thread([this, job] {
      left_alone(job);
      std::lock_guard again(job->state);
      job->alone = false;
    }).detach();
  }
}

void DestinationHost::shutdown() {
  std::vector<JobPtr> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, j] : jobs_) all.push_back(j);
  }
  for (const auto& j : all) {
    j->aborting = true;
    if (j->get() != wire::OPEN) continue;
    j->socket->interrupt();
    std::lock_guard work(j->work);
    abort(*j, "migrd ends");
  }
}

}  // namespace migr
