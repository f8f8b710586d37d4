// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "runc.h"

#include <fcntl.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "file_tree.h"
#include "json.h"
#include "limits.h"
#include "process.h"
#include "tcp_repair.h"

namespace migr {
namespace {

constexpr std::string_view kAttachClosed = "attach-closed";

// What runc has written down of a container; null: nothing that could be read.
Json recorded(const Config& config, const std::string& id) {
  std::ifstream in(config.runc_root + "/" + id + "/state.json");
  auto j = in ? Json::parse(in, nullptr, false) : Json();
  return j.is_object() ? j : Json();
}

// Of no bundle: nothing.
Result<Json> spec_of(const std::string& bundle) {
  auto j = bundle.empty() ? Json::object() : Json::parse(text_of(bundle + "/config.json"), nullptr, false);
  if (!j.is_object()) return Error{EINVAL, bundle + "/config.json: no JSON"};
  return j;
}

bool tell_cgroup(const std::string& group, const std::string& file, std::string_view word) {
  const int fd = group.empty() ? -1 : open((group + "/" + file).c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool told = write(fd, word.data(), word.size()) == static_cast<ssize_t>(word.size());
  close(fd);
  return told;
}

bool is_so(const std::string& group, std::string_view event) {
  std::ifstream events(group + "/cgroup.events");
  for (std::string line; std::getline(events, line);)
    if (line == event) return true;
  return false;
}

// All of it at once. runc ends the first process and lets the others run: until the kernel has taken that one apart.
void end_all(const std::string& group) {
  constexpr int kEndMs = 10'000, kStepMs = 20;
  if (!tell_cgroup(group, "cgroup.kill", "1")) return;
  for (int ms = 0; ms < kEndMs && is_so(group, "populated 1"); ms += kStepMs) usleep(kStepMs * 1000);
}

// A CRIU whose runc was killed goes on, and stops the container once more when it ends.
void outlast(pid_t group, int limit_ms) {
  if (group <= 0 || group_ended(group, limit_ms)) return;
  spdlog::error("a dump goes on without its runc: ending it");
  kill(-group, SIGKILL);
  (void)group_ended(group, kHookMs);
}

// runc logs lines like: time="..." level=error msg="..."; only the message is for people.
std::string plain(const std::string& line) {
  const auto at = line.find("msg=\"");
  if (at == std::string::npos) return line;
  std::string out;
  for (std::size_t i = at + 5; i < line.size() && line[i] != '"'; i++) {
    if (line[i] == '\\' && i + 1 < line.size() && line[++i] == 'n')
      out += "; ";  // its lines, in ours
    else
      out += line[i];
  }
  return out;
}

}  // namespace

Env criu_env(const Config& config, const std::string& images) {
  const auto limit = [](const char* of, int ms) { return std::string("MIGR_RESTORE_") + of + "_LIMIT=" + std::to_string(std::max(ms / 1000, 1)); };
  // Memory is registered while we wait for READY, and what became of that is to be told within the same limit.
  Env e = {limit("GO", kGoMs), limit("REGISTER", kReadyMs - kReadyMs / 10), limit("COMMIT", kPluginCommitMs)};
  if (!config.criu_libs.empty()) e.push_back("CRIU_LIBS_DIR=" + config.criu_libs);
  const char* path = getenv("PATH");
  e.push_back("PATH=" + plugin_dir(config) + "/migr:" + (path ? path : "/usr/sbin:/usr/bin:/sbin:/bin"));  // its tar, criu-plugin/tar.c
  if (!images.empty()) e.push_back("MIGR_IMAGE_DIR=" + images);
  return e;
}

Env pre_dump_env(const Config& config, const std::string& images, bool first) {
  Env e = criu_env(config, images);
  if (first) e.push_back("MIGR_FIRST_PRE_DUMP=1");
  return e;
}

void try_out_kernel(const Config& config) {
  if (access("/run/criu.kdat", F_OK)) (void)run_command({config.criu, "check", "--feature", "mem_dirty_track"}, criu_env(config), kRuncMs);
}

std::string plugin_dir(const Config& config) { return config.criu_libs.empty() ? "/usr/lib/criu" : config.criu_libs; }

Status check_plugin(const Config& config) {
  const std::string dir = plugin_dir(config);
  return access((dir + "/migr_plugin.so").c_str(), R_OK) ? Status(Error{EBUSY, "no migr_plugin.so in " + dir}) : Status();
}

Result<bool> has_address(const std::string& bundle) {
  const auto j = spec_of(bundle);
  if (!j) return j.error();
  return j->contains("annotations") && (*j)["annotations"].contains("org.migr.net.ip");
}

Result<bool> has_terminal(const std::string& bundle) {
  const auto j = spec_of(bundle);
  if (!j) return j.error();
  const auto terminal = Json::json_pointer("/process/terminal");
  return j->contains(terminal) && j->at(terminal) == true;
}

Status check_net_hook(const Config& config) {
  const std::string& hook = config.net_hook;
  const std::string what = "an address of a container's own cannot be moved: ", advice = "; set net_hook in migrd.json of " + config.name;
  if (hook.empty()) return Error{EBUSY, what + "there is no net_hook" + advice};
  const auto runs = [](const std::string& path) {
    std::error_code ec;
    return std::filesystem::is_regular_file(path, ec) && !access(path.c_str(), X_OK);
  };
  // As it is looked for when it is started.
  const char* path = getenv("PATH");
  std::istringstream folders(hook.find('/') == hook.npos && path ? path : "");
  bool found = hook.find('/') != hook.npos && runs(hook);
  for (std::string folder; !found && std::getline(folders, folder, ':');) found = runs(folder + "/" + hook);
  return found ? Status() : Error{EBUSY, what + "the net_hook " + hook + " is no program" + advice};
}

Status address_can_move(const Config& config, const std::string& bundle) {
  const auto has = has_address(bundle);
  return has && *has ? check_net_hook(config) : Status(has);
}

bool container_id_ok(const std::string& id) {
  return !id.empty() && id.size() <= 255 && id != "." && id != ".." && id[0] != '-' &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) { return std::isalnum(c) || std::strchr("_+-.", c); });
}

Argv Runc::command(std::vector<std::string> args) const {
  Argv a = {config_.runc, "--root", config_.runc_root};
  a.insert(a.end(), args.begin(), args.end());
  return a;
}

Status Runc::run(std::vector<std::string> args, const int& limit_ms, const std::string& what) const {
  auto r = run_checked(command(std::move(args)), criu_env(config_), limit_ms);
  if (!r) return Error{r.error().code, what + ": " + plain(r.error().text)};
  return {};
}

Result<ContainerState> Runc::state(const std::string& id) const {
  if (!container_id_ok(id)) return Error{EINVAL, "'" + id + "' is no name of a container"};
  auto r = run_command(command({"state", id}), criu_env(config_), kRuncMs);
  if (!r) return r.error();
  if (r->status) {
    const std::string why = plain(r->last_line());
    if (why.find("does not exist") != std::string::npos)
      return Error{ENOENT, "no container '" + id + "' on this host; list them with: " + typed("list")};
    return Error{EIO, "runc state " + id + ": " + why};
  }
  if (r->cut) return Error{EMSGSIZE, "runc state " + id + ": more than " + std::to_string(kCommandAnswerBytes >> 20) + " MiB; the container has too many or too long annotations"};
  const auto j = Json::parse(r->out, nullptr, false);
  if (!j.is_object()) return Error{EPROTO, "runc state " + id + ": no JSON"};
  ContainerState s;
  s.id = id;
  s.status = j.value("status", "");
  s.bundle = j.value("bundle", "");
  s.pid = j.value("pid", 0);
  return s;
}

bool Runc::exists(const std::string& id) const {
  return container_id_ok(id) && access((config_.runc_root + "/" + id).c_str(), F_OK) == 0;
}

std::string Runc::bundle_of(const std::string& id) const {
  constexpr std::string_view kLabel = "bundle=";
  const auto j = recorded(config_, id);
  const auto labels = Json::json_pointer("/config/labels");
  if (!j.contains(labels) || !j.at(labels).is_array()) return {};
  for (const auto& l : j.at(labels))
    if (l.is_string() && l.get_ref<const std::string&>().starts_with(kLabel)) return l.get<std::string>().substr(kLabel.size());
  return {};
}

pid_t Runc::init_pid(const std::string& id) const {
  const auto j = recorded(config_, id);
  return j.is_object() ? j.value("init_process_pid", 0) : 0;
}

std::string Runc::life(const std::string& id) const {
  const auto j = recorded(config_, id);
  const auto began = j.is_object() ? j.value("init_process_start", std::uint64_t{0}) : 0;
  return began ? boot_of_host() + " " + std::to_string(began) : "";
}

std::vector<std::string> Runc::streams(const std::string& id) const {
  const auto j = recorded(config_, id);
  std::vector<std::string> out;
  for (const auto& s : j.is_object() ? j.value("external_descriptors", Json()) : Json())
    if (s.is_string()) out.push_back(s);
  return out;
}

std::string Runc::cgroup_of(const std::string& id) const {
  const auto j = recorded(config_, id);
  const auto path = Json::json_pointer("/cgroup_paths/");  // the one of no controller: of v2
  return j.contains(path) && j.at(path).is_string() ? j.at(path).get<std::string>() : "";
}

std::vector<std::string> Runc::ids() const {
  std::vector<std::string> out;
  std::error_code ec;
  for (const auto& d : std::filesystem::directory_iterator(config_.runc_root, ec))
    if (container_id_ok(d.path().filename())) out.push_back(d.path().filename());
  return out;
}

Status Runc::check_verbs() const {
  if (verbs_ok_) return {};
  auto help = run_command({config_.runc, "partial-restore", "--help"}, {}, kRuncMs);
  if (!help) return help.error();
  if (help->status || help->out.find("partial-restore") == std::string::npos)
    return Error{EBUSY, config_.runc + " knows no partial-restore; install migr's runc"};
  if (help->out.find("criu-log-level") == std::string::npos) return Error{EBUSY, config_.runc + " is that of an older migr; install the runc of this release"};
  verbs_ok_ = true;
  return {};
}

Status Runc::early_images(const std::string& id, const std::string& images) const {
  return run({"checkpoint-rdma", "--descriptors", "--image-path", images, id}, kRuncMs, "runc checkpoint-rdma --descriptors");
}

Status Runc::pre_dump(const std::string& id, const std::string& images, const std::string& to, const std::string& parent, const std::string& work) const {
  Argv a = {"checkpoint-rdma", "--pre-dump", "--image-path", to, "--work-path", work};
  if (!parent.empty()) a.insert(a.end(), {"--parent-path", parent});
  a.push_back(id);
  auto r = run_checked(first_to_go(command(std::move(a))), pre_dump_env(config_, images, parent.empty()), kCheckpointMs);
  if (!r) return Error{r.error().code, "pre-dump of " + id + ": " + r.error().text};
  return {};
}

Result<Child> Runc::checkpoint_ahead(const std::string& id, const std::string& images, const std::string& parent, const std::string& work,
                                     const std::string& log) const {
  try_out_kernel(config_);
  Argv a = {"checkpoint-rdma", "--wait", "--criu-log-level", std::to_string(config_.criu_log_level), "--image-path", images, "--work-path", work};
  if (!parent.empty()) a.insert(a.end(), {"--parent-path", parent});
  a.push_back(id);
  return Child::start(first_to_go(command(std::move(a))), criu_env(config_), log, true);
}

void Runc::get_ready(std::initializer_list<Child*> ahead) {
  for (Child* const child : ahead)
    if (child->running() && !child->wait_for(kReady, kAheadMs)) spdlog::debug("a program that was started ahead of the stop does not say that it is ready");
}

Status Runc::hold(const std::string& id) const {
  constexpr int kHoldMs = 10'000, kStepUs = 200;  // as long as runc waits for it
  const std::string group = cgroup_of(id);
  if (!tell_cgroup(group, "cgroup.freeze", "1")) return {};
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kHoldMs); std::chrono::steady_clock::now() < until; usleep(kStepUs))
    if (is_so(group, "frozen 1")) return {};
  tell_cgroup(group, "cgroup.freeze", "0");
  return Error{EBUSY, "'" + id + "' does not stand still within 10 s of its freeze: a thread of it waits in the kernel, for a disk or a file system that does not answer"};
}

Status Runc::checkpoint(Child& ahead, const std::string& id, const std::string& log) const {
  const std::string what = "checkpoint of " + id + ": ";
  const pid_t group = ahead.pid();
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kCheckpointMs);
  if (auto s = ahead.running() ? ahead.say("begin") : Status(); !s) return Error{s.error().code, what + s.error().text};
  if (!ahead.wait(kCheckpointMs)) {
    // CRIU only, if it is not `ahead` itself: runc then ends TCP_REPAIR of the connections, which would not work any more.
    const auto tree = tree_of(ahead.pid());
    for (std::size_t i = 1; i < tree.size(); i++) kill(tree[i], SIGKILL);
    if (tree.size() < 2 || !ahead.wait(kHookMs)) ahead.signal(SIGKILL);
    (void)ahead.wait(kHookMs);
    outlast(group, 0);
    return Error{ETIMEDOUT, what + "runc did not end within " + std::to_string(kCheckpointMs) + " ms" + advice_on(kCheckpointMs)};
  }
  if (!ahead.status()) return {};
  outlast(group, static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count()));
  constexpr std::size_t kSaid = 2048;
  const std::string last = CommandResult{ahead.status(), tail_of(log, kSaid), {}}.last_line();
  return Error{ECHILD, what + (last == kReady ? "exit status " + std::to_string(ahead.status()) : plain(last))};
}

Status Runc::resume(const std::string& id) const {
  // Where CRIU was killed, and runc, which does this otherwise. Frozen ones can be reached.
  if (const auto all = pids({.id = id, .status = "", .bundle = "", .pid = init_pid(id)}))
    for (const pid_t pid : *all) end_repair(pid);
  auto s = run({"resume", id}, kRuncMs, "runc resume " + id);
  // It says so of a container that is not paused: nothing to do. Of one that never stood still as a whole it waits for that, in vain.
  return !s && (s.error().text.find("not paused") != std::string::npos || tell_cgroup(cgroup_of(id), "cgroup.freeze", "0")) ? Status() : s;
}

Status Runc::remove(const std::string& id) const {
  if (!exists(id)) return {};
  end_all(cgroup_of(id));
  return run({"delete", "--force", id}, kRuncMs, "runc delete " + id);
}

Result<Child> Runc::partial_restore(const std::string& id, const std::string& bundle, const std::string& images,
                                    const std::string& work, const std::string& log) const {
  // What runc makes is the container's, too: with migrd's umask its root in a user namespace could not pass /run/runc/ID.
  Argv a = {"sh", "-c", "umask 022; exec \"$@\"", "sh"};
  const Argv restore = command({"partial-restore", "--criu-log-level", std::to_string(config_.criu_log_level), "--bundle", bundle, "--image-path", images,
                                "--work-path", work, "--detach", id});
  a.insert(a.end(), restore.begin(), restore.end());
  return Child::start(a, criu_env(config_), log);
}

Result<bool> Runc::has_net(const std::string& bundle) const {
  if (config_.net_hook.empty()) return false;
  return has_address(bundle);
}

Child Runc::net_ahead(const std::string& verb, const std::string& bundle, const std::string& id, const std::string& log) const {
  auto has = has_net(bundle);
  if (!has || !*has) return {};
  const std::string does = verb == kAttachClosed ? "attach" : verb;
  auto child = Child::start({config_.net_hook, "await-" + does, bundle, id}, {}, log, true);
  return child ? std::move(*child) : Child();
}

Status Runc::detach_held(Child& ahead, const std::string& bundle, const std::string& id) const {
  const auto has = has_net(bundle);
  if (!has || !*has) return has;
  if (auto s = hold(id); !s) return s;
  return net(ahead, "detach", bundle, id);
}

Status Runc::net(Child& ahead, const std::string& verb, const std::string& bundle, const std::string& id) const {
  if (ahead.running() && ahead.say("begin")) {
    if (ahead.wait(kHookMs) && !ahead.status()) return {};
    ahead.signal(SIGKILL);
  }
  return net(verb, bundle, id);
}

Status Runc::net(const std::string& verb, const std::string& bundle, const std::string& id) const {
  auto has = has_net(bundle);
  if (!has || !*has) return has;
  Argv a = {config_.net_hook};
  if (verb == kAttachClosed)
    a.insert(a.end(), {"attach", "--closed"});
  else
    a.push_back(verb);
  a.insert(a.end(), {bundle, id});
  auto r = run_checked(a, {}, kHookMs);
  if (!r) return Error{r.error().code, "network of " + id + ", " + verb + ": " + r.error().text};
  return {};
}

}  // namespace migr
