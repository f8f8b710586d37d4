// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "source_host.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "born.h"
#include "fault.h"
#include "file_tree.h"
#include "kernel_record.h"
#include "limits.h"
#include "page_images.h"
#include "parallel.h"
#include "record_image.h"

namespace migr {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// enum ib_qp_type, enum ib_qp_state
constexpr std::uint32_t kRc = 2, kUc = 3, kUd = 4;
constexpr char kUdReason[] = ": whoever sends to it has the address of the host it was made on, and cannot be told another";
constexpr std::uint32_t kBasicSrq = 0;  // enum ib_srq_type
constexpr std::uint32_t kInit = 1, kRtr = 2, kRts = 3;

Result<Instance> instance_from(const std::string& text) {
  Instance i{};
  if (text.size() != 2 * i.size()) return Error{EINVAL, "no instance: " + text};
  for (std::size_t b = 0; b < i.size(); b++) {
    unsigned x;
    if (std::sscanf(text.c_str() + 2 * b, "%2x", &x) != 1) return Error{EINVAL, "no instance: " + text};
    i[b] = static_cast<std::uint8_t>(x);
  }
  return i;
}

Json read_json(const std::string& path) {
  std::ifstream in(path);
  return in ? Json::parse(in, nullptr, false) : Json();
}

// 0: it has ended.
std::uint64_t resident_bytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/statm");
  std::uint64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

std::string gid_of(const __u8 (&gid)[16]) { return {reinterpret_cast<const char*>(gid), 16}; }

// Why a kind is refused, to follow its name.
std::string why_not_object(std::uint32_t type) {
  switch (type) {
    case MIGR_OBJ_MW: return " (memory window): only its device knows what it is bound to";
    case MIGR_OBJ_AH: return " (address handle of unconnected QPs)" + std::string(kUdReason);
    case MIGR_OBJ_XRCD: return " (XRC domain): it may be shared with processes elsewhere";
    case MIGR_OBJ_DM: return " (device memory): no other device has the same";
    default: return "";
  }
}
std::string why_not_qp(std::uint32_t type) { return type == kUd ? kUdReason : ""; }

/// MAP_HUGETLB memory that is not of a file.
bool has_huge_pages(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("/anon_hugepage") != std::string::npos) return true;
  return false;
}

}  // namespace

// ---- the host

std::string SourceHost::folder(std::uint32_t id) const { return config_.state_dir + "/source/" + fmt::format("{:08x}", id); }

Status SourceHost::save(std::uint32_t id, const Entry& e) {
  Json j = {{"container", e.container}, {"bundle", e.bundle}, {"outcome", static_cast<int>(e.outcome)}, {"instances", Json::array()}};
  for (const auto& i : e.instances) j["instances"].push_back(hex(i));
  if (auto s = write_whole(folder(id) + ".json", j.dump(1)); !s) return s;
  std::lock_guard lock(mutex_);
  journal_[id] = e;
  return {};
}

wire::OutcomeReply SourceHost::outcome(std::uint32_t id) {
  std::lock_guard lock(mutex_);
  wire::OutcomeReply r;
  if (auto e = journal_.find(id); e != journal_.end()) r.set_outcome(e->second.outcome);
  return r;
}

void SourceHost::recover() {
  constexpr auto kKeepOutcome = std::chrono::hours(24);
  std::error_code ec;
  fs::create_directories(config_.state_dir + "/source", ec);
  for (const auto& f : fs::directory_iterator(config_.state_dir + "/source", ec)) {
    if (f.path().extension() != ".json") continue;
    const auto id = static_cast<std::uint32_t>(std::strtoul(f.path().stem().c_str(), nullptr, 16));
    const Json j = read_json(f.path());
    if (!j.is_object() || fs::file_time_type::clock::now() - f.last_write_time() > kKeepOutcome) {
      fs::remove(f.path(), ec);
      continue;
    }
    Entry e;
    e.container = j.value("container", "");
    e.bundle = j.value("bundle", "");
    e.outcome = static_cast<wire::Outcome>(j.value("outcome", 0));
    for (const auto& i : j.value("instances", Json::array()))
      if (auto x = instance_from(i.get<std::string>())) e.instances.push_back(*x);
    if (e.outcome == wire::OPEN) {
      spdlog::warn("migration {:08x} of {} was not decided when migrd ended: going back", id, e.container);
      e.outcome = wire::UNDONE;
      (void)save(id, e);
      if (auto s = runc_.resume(e.container); !s) spdlog::error("{}", s.error().text);
      if (auto s = runc_.net("attach", e.bundle, e.container); !s) spdlog::error("{}", s.error().text);
      for (const auto& i : e.instances) (void)open_gate(config_.run_dir, i);
      // They come back suspended, and whoever is suspended without a migration is let go.
      std::thread([this, e] {
        for (const auto& i : e.instances) {
          (void)sessions_.wait_for(i, {}, kReconnectMs);
          close_gate(config_.run_dir, i);
        }
      }).detach();
    }
    fs::remove_all(folder(id), ec);
    std::lock_guard lock(mutex_);
    journal_[id] = e;
  }
}

// ---- one migration

SourceRun::~SourceRun() {
  if (hold_)
    for (auto& p : processes_)
      if (p.session->state() == MIGR_PROC_RUNNING) (void)p.session->tell(MIGR_MSG_ROLLBACK, id_, kProcessMs);
  host_.claims_.release(id_);
  if (!busy_) return;
  std::lock_guard lock(host_.mutex_);
  host_.busy_.erase(info_.id);
}

Status SourceRun::inspect_context(ContextRecord& c, std::uint32_t owner) {
  const auto& r = c.rec;
  const std::string who = "process " + std::to_string(r.pid) + " (" + std::string(r.comm, strnlen(r.comm, sizeof r.comm)) + ")";
  if (!(r.flags & MIGR_CTX_ATTACHED))
    return Error{EOPNOTSUPP, who + " has RDMA resources but does not use libmigr; start it with LD_PRELOAD=libmigr.so"};
  if (r.flags & MIGR_CTX_HYDRATED)
    return Error{EOPNOTSUPP, who + " has RDMA resources from before migr.ko was loaded, so its record is incomplete; restart it"};
  for (const auto& o : c.others)
    return Error{EOPNOTSUPP, who + " uses a resource that cannot be migrated yet: " + object_name(o.type) + why_not_object(o.type)};
  for (const auto& s : c.srqs)
    if (s.srq_type != kBasicSrq)
      return Error{EOPNOTSUPP, who + " uses a shared receive queue for XRC or tag matching, which cannot be migrated yet"};
  for (const auto& q : c.qps) {
    if (q.flags & MIGR_QP_FORMER) continue;  // an old path, not yet destroyed
    if (q.qp_type != kRc && q.qp_type != kUc)
      return Error{EOPNOTSUPP, who + " uses a QP of type " + qp_type_name(q.qp_type) + ", which cannot be migrated yet" + why_not_qp(q.qp_type)};
    if (q.qp_state > kRts)
      return Error{EOPNOTSUPP, who + ": QP " + std::to_string(q.vqpn) + " is in state " + qp_state_name(q.qp_state) + " and cannot be migrated"};
    info_.vqpns.push_back(q.vqpn);
    if (q.qp_state == kRtr || q.qp_state == kRts)
      info_.connected.push_back({r.ctx_id, q.vqpn, q.pqpn, gid_of(q.ah.sgid), gid_of(q.ah.dgid), q.dest_qpn});
  }
  info_.ctxs.emplace_back(r.ctx_id, owner);
  const std::string device(r.ibdev, strnlen(r.ibdev, sizeof r.ibdev));
  if (std::find(info_.devices.begin(), info_.devices.end(), device) == info_.devices.end()) info_.devices.push_back(device);
  auto& n = info_.resources;
  n.set_ctx(n.ctx() + 1);
  n.set_pd(n.pd() + static_cast<std::uint32_t>(c.pds.size()));
  n.set_mr(n.mr() + static_cast<std::uint32_t>(c.mrs.size()));
  n.set_cq(n.cq() + static_cast<std::uint32_t>(c.cqs.size()));
  n.set_qp(n.qp() + static_cast<std::uint32_t>(c.qps.size()));
  return {};
}

Result<ContainerInfo> SourceRun::inspect(const std::string& container) {
  auto state = host_.runc_.state(container);
  if (!state) return state.error();
  if (state->status != "running") return Error{EBUSY, "'" + container + "' is " + state->status + ", not running"};
  {
    std::lock_guard lock(host_.mutex_);
    if (!host_.busy_.insert(container).second) return Error{EBUSY, "'" + container + "' is being migrated already"};
    busy_ = true;
  }
  info_.id = container;
  info_.bundle = state->bundle;
  state_ = *state;
  auto all = host_.runc_.pids(state_);
  if (!all) return all.error();
  if (bare_pid(container)) info_.pids = *all;
  if (auto s = host_.runc_.may_leave(container); !s) return s.error();
  for (const pid_t pid : *all) info_.memory_bytes += resident_bytes(pid);
  auto found = contexts_now();
  if (!found) return found.error();
  std::set<pid_t> pids;
  for (const auto& [ctx, pid] : *found) pids.insert(pid);
  // Also those that have closed what they had: their library holds a connection to here.
  for (const pid_t pid : *all)
    if (host_.sessions_.by_pid(pid)) pids.insert(pid);
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error();
  for (const pid_t pid : pids) {
    const auto owner = static_cast<std::uint32_t>(processes_.size());
    Process p{pid, host_.sessions_.by_pid(pid), {}};
    if (p.session) p.generation = p.session->generation();
    // First its own view, which says of which state it is: what changes later is noticed.
    const bool asked = p.session && !host_.claims_.take({{p.session->instance(), pid}}, id_) && p.session->state() == MIGR_PROC_RUNNING;
    Status described;
    if (asked) {
      auto fds = p.session->ask<migr_fd_desc, migr_qp_ref>(MIGR_MSG_DESCRIBE, id_, {}, kProcessMs, hold_ ? MIGR_DESCRIBE_HOLD : 0, &p.described);
      if (fds) p.fds = *fds;
      described = fds;
    }
    auto ctxs = kernel->contexts(pid);
    if (!ctxs) return ctxs.error();
    for (auto& c : *ctxs) {
      if (auto s = kernel->objects(c); !s) return s.error();
      if (auto s = inspect_context(c, owner); !s) return s.error();
      for (const auto& q : c.qps)
        if (!(q.flags & MIGR_QP_FORMER)) p.vqpns.push_back(q.vqpn);
    }
    if (!p.session)
      return Error{ENOTCONN, "the libmigr of process " + std::to_string(pid) + " is not connected to migrd; can it see " +
                                 host_.config_.run_dir + ", has the container that mounted?"};
    if (!asked)
      return Error{EINPROGRESS, p.session->label() + " takes part in another migration; try again when that is over"};
    processes_.push_back(std::move(p));
    if (!described) return described.error();
    info_.instances.push_back(processes_.back().session->instance());
  }
  return info_;
}

// Every RDMA context in the container, with its process.
Result<std::map<std::uint32_t, pid_t>> SourceRun::contexts_now() const {
  auto pids = host_.runc_.pids(state_);
  if (!pids) return pids.error();
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error();
  auto all = kernel->contexts();
  if (!all) return all.error();
  std::map<std::uint32_t, pid_t> found;
  for (const auto& c : *all)
    if (const auto pid = static_cast<pid_t>(c.rec.pid); std::find(pids->begin(), pids->end(), pid) != pids->end()) found[c.rec.ctx_id] = pid;
  return found;
}

Result<std::string> SourceRun::record(std::uint32_t) {
  const std::string dir = host_.folder(id_);
  std::error_code ec;
  fs::create_directories(dir + "/images", ec);
  fs::create_directories(dir + "/work", ec);
  if (ec) return Error{ec.value(), "making " + dir + ": " + ec.message()};
  std::vector<DescribedProcess> described;
  for (auto& p : processes_) described.push_back({p.pid, p.session->instance(), p.fds});
  // Also if there is nothing on record: the plugin knows by it that the restore has to wait.
  if (auto s = write_record_image(described, dir + "/images"); !s) return s.error();
  if (auto s = host_.runc_.early_images(info_.id, dir + "/images"); !s) return s.error();
  if (auto s = host_.save(id_, {wire::OPEN, info_.id, info_.bundle, info_.instances}); !s) return s.error();
  if (auto s = checkpoint_ahead(""); !s) return s.error();
  detach_ahead_ = host_.runc_.net_detach_ahead(info_.bundle, info_.id, dir + "/detach.out");
  return dir + "/images";
}

Status SourceRun::checkpoint_ahead(const std::string& parent) {
  const std::string dir = host_.folder(id_);
  auto ahead = host_.runc_.checkpoint_ahead(info_.id, dir + "/images", parent, dir + "/work", dir + "/checkpoint.out");
  if (ahead) ahead_ = std::move(*ahead);
  return ahead;
}

Result<std::string> SourceRun::pre_dump() {
  auto pids = host_.runc_.pids(state_);
  if (!pids) return pids.error();
  for (const pid_t pid : *pids)
    if (has_huge_pages(pid))
      return Error{EOPNOTSUPP, "process " + std::to_string(pid) + " has MAP_HUGETLB memory, which CRIU before 3.18 restores wrongly after a pre-dump"};
  const std::string dir = host_.folder(id_), to = dir + "/" + kPreCopyDir;
  if (auto s = host_.runc_.pre_dump(info_.id, dir + "/images", to, dir + "/work-pre-copy"); !s) return s.error();
  // The checkpoint that waits knows nothing of it: another takes its place.
  if (auto s = checkpoint_ahead(std::string("../") + kPreCopyDir); !s) return s.error();
  return to;
}

Result<std::uint64_t> SourceRun::drop_unchanged() {
  const std::string dir = host_.folder(id_);
  auto pages = migr::drop_unchanged(dir + "/images", dir + "/" + kPreCopyDir);
  if (!pages) return pages.error();
  return pages->unchanged * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

Status SourceRun::each(const std::function<Status(Process&)>& f) {
  return parallel_for(processes_, f);
}

Status SourceRun::suspend() {
  return each([this](Process& p) -> Status {
    if (auto s = p.session->tell(MIGR_MSG_SUSPEND, id_, kProcessMs, p.described); !s) return s;
    auto seen = p.session->wait_threads_outside(kSuspendMs);
    if (seen) spdlog::debug("{}: {} threads outside, {} stops, {} unwound", p.session->label(), seen->threads, seen->stops, seen->unwound);
    return seen;
  });
}

Status SourceRun::drain() {
  return each([this](Process& p) { return p.session->tell(MIGR_MSG_DRAIN, id_, kDrainMs + 2000, kDrainMs); });
}

Status SourceRun::rollback() {
  return each([this](Process& p) { return p.session->tell(MIGR_MSG_ROLLBACK, id_, kProcessMs); });
}

Status SourceRun::freeze() {
  auto s = each([this](Process& p) -> Status {
    if (auto s = p.session->tell(MIGR_MSG_FREEZE, id_, kProcessMs, p.described); !s) return s;
    return host_.sessions_.wait_closed(p.session, kProcessMs);
  });
  if (!s) return s;
  // Processes that were here did not change; one may have come.
  auto now = contexts_now();
  if (!now) return now.error();
  for (const auto& [ctx, pid] : *now)
    if (std::none_of(info_.ctxs.begin(), info_.ctxs.end(), [&](const auto& c) { return c.first == ctx; }))
      return Error{EAGAIN, "process " + std::to_string(pid) + " of the container has opened an RDMA device meanwhile"};
  return {};
}

Status SourceRun::reconnect() {
  return step(FaultStep::kSourceReconnect, [&] { return reconnect_all(); });
}

Status SourceRun::reconnect_all() {
  return each([this](Process& p) -> Status {
    const Instance instance = p.session->instance();
    if (host_.sessions_.by_pid(p.pid) == p.session) return {};  // it never closed
    if (auto s = open_gate(host_.config_.run_dir, instance); !s) return s;
    auto back = host_.sessions_.wait_for(instance, [&](const ProcessSession& s) { return s.pid() == p.pid; }, kReconnectMs);
    close_gate(host_.config_.run_dir, instance);
    if (!back) return back.error();
    p.session = *back;
    return {};
  });
}

Status SourceRun::step(FaultStep step, const std::function<Status()>& work) { return fault_step(host_.config_.fault, step, work); }

Status SourceRun::detach_network() {
  return step(FaultStep::kSourceDetach, [&] { return host_.runc_.net_detach(detach_ahead_, info_.bundle, info_.id); });
}
Status SourceRun::attach_network() {
  return step(FaultStep::kSourceAttach, [&] { return host_.runc_.net("attach", info_.bundle, info_.id); });
}
Status SourceRun::thaw() {
  return step(FaultStep::kSourceThaw, [&] { return host_.runc_.resume(info_.id); });
}

Status SourceRun::checkpoint() {
  const std::string dir = host_.folder(id_);
  auto s = step(FaultStep::kSourceCheckpoint, [&] { return host_.runc_.checkpoint(ahead_, info_.id, dir + "/checkpoint.out"); });
  if (!s) {
    // The log is what tells; keep it when the folder goes.
    const std::string kept = host_.config_.state_dir + "/failed-dump.log";
    std::error_code ec;
    if (fs::copy_file(dir + "/work/dump.log", kept, fs::copy_options::overwrite_existing, ec))
      return Error{s.error().code, s.error().text + " (log: " + kept + ")"};
  }
  return s;
}

Status SourceRun::decide(wire::Outcome outcome) {
  return step(FaultStep::kSourceDecide, [&] { return host_.save(id_, {outcome, info_.id, info_.bundle, info_.instances}); });
}

Status SourceRun::destroy() {
  Status s = host_.runc_.remove(info_.id);
  for (const auto& p : processes_) {
    auto r = reserve_born(host_.config_, {p.session->instance()}, p.vqpns, p.generation == 0);
    if (s && !r) s = r;
  }
  if (auto r = host_.runc_.net("cleanup", info_.bundle, info_.id); s && !r) s = r;
  return s;
}

void SourceRun::forget() {
  std::error_code ec;
  fs::remove_all(host_.folder(id_), ec);
  std::lock_guard lock(host_.mutex_);
  auto e = host_.journal_.find(id_);
  if (e == host_.journal_.end() || e->second.outcome != wire::OPEN) return;
  e->second.outcome = wire::UNDONE;
  fs::remove(host_.folder(id_) + ".json", ec);
}

}  // namespace migr
