// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "bare.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <netlink/attr.h>
#include <netlink/msg.h>
#include <netlink/netlink.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "file_tree.h"
#include "limits.h"
#include "netlink_exchange.h"
#include "process.h"
#include "standard_streams.h"
#include "tcp_repair.h"

namespace migr {
namespace {

namespace fs = std::filesystem;

constexpr char kPrefix[] = "pid:";

// Where what is restored here is put. It must not be in migrd's own cgroup: systemd counts, limits and warns about what is
// in that of a service. Of containers, runc takes care.
constexpr char kCgroup[] = "/sys/fs/cgroup/migr-processes", kProcs[] = "/sys/fs/cgroup/migr-processes/cgroup.procs";

std::string link_of(pid_t pid, const std::string& what) {
  std::error_code ec;
  return fs::read_symlink("/proc/" + std::to_string(pid) + "/" + what, ec);
}

// One end of a TCP connection of the host, with addresses as /proc/net/tcp has them.
struct TcpEnd {
  std::string socket;  // as a descriptor leads to it
  bool established = false;
};
using TcpEnds = std::map<std::pair<std::string, std::string>, TcpEnd>;  // by its own address and the other one

// Of what CRIU dumps as a connection.
TcpEnds tcp_ends() {
  constexpr char kEstablished[] = "01", kTimeWait[] = "06", kClosed[] = "07", kListens[] = "0A";
  constexpr std::string_view kMapped = "0000000000000000FFFF0000";  // an IPv4 address in IPv6
  TcpEnds all;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(file);
    std::string line;
    std::getline(in, line);  // titles
    while (std::getline(in, line)) {
      std::istringstream words(line);
      std::string slot, local, remote, state, skip, inode;
      words >> slot >> local >> remote >> state >> skip >> skip >> skip >> skip >> skip >> inode;
      if (state == kTimeWait || state == kClosed || state == kListens) continue;
      for (std::string* address : {&local, &remote})
        if (address->starts_with(kMapped)) address->erase(0, kMapped.size());
      all[{local, remote}] = {"socket:[" + inode + "]", state == kEstablished};
    }
  }
  return all;
}

// 127.0.0.0/8 or ::1
bool is_loopback(const std::string& end) {
  const std::string address = end.substr(0, end.find(':'));
  return (address.size() == 8 && address.ends_with("7F")) || address == "00000000000000000000000001000000";
}

struct UnixSocket {
  std::string name;        // its address; of an abstract one after a '@'
  std::uint32_t peer = 0;  // inode; 0: none, or closed
  bool connected = false;  // and not of datagrams
};
using UnixSockets = std::map<std::uint32_t, UnixSocket>;  // by inode

std::string unix_name(const nlattr* a) {
  std::string name(static_cast<const char*>(nla_data(a)), static_cast<std::size_t>(nla_len(a)));
  if (name.starts_with('\0')) name[0] = '@';
  return name.substr(0, name.find('\0'));
}

// Of this network namespace.
Result<UnixSockets> unix_sockets() {
  UnixSockets out;
  const NlSocket sock(nl_socket_alloc());
  const NlMsg msg(nlmsg_alloc_simple(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP));
  unix_diag_req r{};
  r.sdiag_family = AF_UNIX;
  r.udiag_states = ~0u;
  r.udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_PEER;
  if (!sock || !msg || nlmsg_append(msg.get(), &r, sizeof r, NLMSG_ALIGNTO)) return Error{ENOMEM, "netlink: out of memory"};
  if (const int e = nl_connect(sock.get(), NETLINK_SOCK_DIAG); e < 0) return Error{EIO, std::string("netlink: ") + nl_geterror(e)};
  const auto take = [&](nlmsghdr* h) {
    nlattr* a[UNIX_DIAG_MAX + 1] = {};
    if (nlmsg_datalen(h) < static_cast<int>(sizeof(unix_diag_msg)) || nlmsg_parse(h, sizeof(unix_diag_msg), a, UNIX_DIAG_MAX, nullptr)) return false;
    const auto* m = static_cast<const unix_diag_msg*>(nlmsg_data(h));
    auto& s = out[m->udiag_ino];
    s.connected = m->udiag_state == TCP_ESTABLISHED && m->udiag_type != SOCK_DGRAM;
    if (a[UNIX_DIAG_NAME]) s.name = unix_name(a[UNIX_DIAG_NAME]);
    if (a[UNIX_DIAG_PEER]) s.peer = nla_get_u32(a[UNIX_DIAG_PEER]);
    return true;
  };
  if (auto s = netlink_exchange(sock.get(), msg.get(), take, "reading the UNIX sockets"); !s) return s.error();
  return out;
}

std::string descriptor_of_socket(std::uint32_t inode) { return "socket:[" + std::to_string(inode) + "]"; }

Result<std::string> second_word_of(const std::string& program) {
  auto r = run_checked({program, "--version"}, {}, kRuncMs);
  if (!r) return Error{EBUSY, r.error().text};
  std::istringstream words(r->out);
  std::string word, version;
  words >> word >> version;
  return version;
}

}  // namespace

std::string bare_name(pid_t pid) { return kPrefix + std::to_string(pid); }

std::optional<pid_t> bare_pid(const std::string& id) {
  if (!id.starts_with(kPrefix)) return {};
  pid_t pid = 0;
  const char* const end = id.data() + id.size();
  const auto r = std::from_chars(id.data() + sizeof kPrefix - 1, end, pid);
  if (r.ec != std::errc() || r.ptr != end || pid <= 1) return {};
  return pid;
}

Result<ContainerState> Bare::state(pid_t pid) const {
  const std::string who = "process " + std::to_string(pid);
  if (!process_lives(pid)) return Error{ENOENT, "no " + who + " on this host; list those with RDMA resources with: migrctl ps"};
  const auto has_its_own = [pid](const std::string& ns) { return link_of(pid, "ns/" + ns) != link_of(getpid(), "ns/" + ns); };
  for (const char* ns : {"pid", "net"})
    if (has_its_own(ns))
      return Error{EOPNOTSUPP, who + " is in a container: name the container instead, as migrctl ps does; if ps names none, another engine than the runc of migrd.json (runc_root) has it, and it cannot be moved"};
  if (has_its_own("mnt"))
    return Error{EOPNOTSUPP, who + " has a mount namespace of its own (a container, or a unit with PrivateTmp= and the like): name the container instead, as migrctl ps does, or start the unit without"};
  ContainerState s;
  s.id = bare_name(pid);
  s.pid = pid;
  s.status = process_stopped(pid) ? "paused" : "running";
  return s;
}

Result<std::string> Bare::version() const { return second_word_of(config_.criu); }  // "Version: 3.17.1"
Result<std::string> Bare::nft_version() const { return second_word_of("nft"); }     // "nftables v1.0.6 (Lester Gooch #5)"

Result<std::vector<pid_t>> Bare::pids(pid_t pid) const {
  auto all = tree_of(pid);
  if (all.empty()) return Error{ESRCH, "process " + std::to_string(pid) + " has ended"};
  return all;
}

Status Bare::connections_stay(pid_t root) const {
  constexpr char kNobodys[] = "socket:[0]";
  const TcpEnds all = tcp_ends();
  std::map<std::string, std::pair<pid_t, int>> ours;
  for (const pid_t pid : tree_of(root))
    each_descriptor(pid, [&](int fd, const std::string& to) { ours.emplace(to, std::pair(pid, fd)); });
  for (const auto& [addresses, end] : all) {
    const auto at = ours.find(end.socket);
    if (at == ours.end()) continue;
    const bool within = is_loopback(addresses.first);
    const auto other = all.find({addresses.second, addresses.first});
    // Nobody has it: who had it has closed it, unless nobody has accepted it yet.
    const bool closed = other == all.end() || (other->second.socket == kNobodys && !other->second.established);
    if (within && (closed || ours.contains(other->second.socket))) continue;
    return Error{EOPNOTSUPP, fmt::format("process {} has a TCP connection to {} (descriptor {}), and a process without a container has its host's address; run it in a container "
                                         "with an address of its own",
                                         at->second.first, within ? "a process of this host that does not move with it" : "another host", at->second.second)};
  }
  return unix_connections_stay(ours);
}

// Those of libmigr are closed before it is dumped. A kernel that does not tell lets CRIU find it, in the stop.
Status Bare::unix_connections_stay(const std::map<std::string, std::pair<pid_t, int>>& ours) const {
  const auto all = unix_sockets();
  if (!all) return {};
  for (const auto& [inode, s] : *all) {
    const auto at = ours.find(descriptor_of_socket(inode));
    if (at == ours.end() || !s.connected || !s.peer || ours.contains(descriptor_of_socket(s.peer))) continue;
    const auto peer = all->find(s.peer);
    const std::string name = peer == all->end() || peer->second.name.empty() ? s.name : peer->second.name;
    if (name == config_.run_dir + "/proc.sock" || name == config_.run_dir + "/links.sock") continue;
    const auto [pid, fd] = at->second;
    return Error{EOPNOTSUPP, fmt::format("process {} ({}) is connected to a process of this host that does not move with it, over a UNIX socket ({}descriptor {}); end that, or start it "
                                         "without: standard output of a unit of systemd is one, but not with StandardOutput=append:FILE",
                                         pid, name_of(pid), name.empty() ? "" : name + ", ", fd)};
  }
  return {};
}

Status Bare::pipes_stay(pid_t root) const {
  for (const auto& p : pipes_elsewhere(tree_of(root)))
    if (!p.standard())
      return Error{EOPNOTSUPP, fmt::format("process {} ({}) has a pipe to process {} ({}) of this host, which does not move with it (descriptor {}); only standard input, output "
                                           "and error may be such pipes, which are /dev/null there",
                                           p.pid, name_of(p.pid), p.other, name_of(p.other), p.fd)};
  return {};
}

Argv Bare::criu(const std::string& what, const std::string& images, const std::string& work, const std::string& log) const {
  return {config_.criu, what, "-D", images, "-W", work, "-o", log, "-v" + std::to_string(config_.criu_log_level), "--shell-job", "--tcp-established", "--ext-unix-sk", "--manage-cgroups=ignore"};
}

namespace {

Status make_folders(std::initializer_list<std::string> all) {
  std::error_code ec;
  for (const auto& d : all)
    if (fs::create_directories(d, ec); ec) return Error{ec.value(), "making " + d + ": " + ec.message()};
  return {};
}

}  // namespace

Status Bare::pre_dump(pid_t pid, const std::string& images, const std::string& to, const std::string& parent, const std::string& work) const {
  if (auto s = make_folders({to, work}); !s) return s;
  Argv a = criu("pre-dump", to, work, "pre-dump.log");
  a.insert(a.end(), {"-t", std::to_string(pid), "--track-mem"});
  if (!parent.empty()) a.insert(a.end(), {"--prev-images-dir", parent});
  auto r = run_checked(first_to_go(a), pre_dump_env(config_, images, parent.empty()), kCheckpointMs);
  if (r) return {};
  const std::string why = criu_error(work + "/pre-dump.log");  // to where it writes all that it has to say
  return Error{r.error().code, "pre-dump of process " + std::to_string(pid) + ": " + r.error().text + (why.empty() ? "" : "; CRIU: " + why)};
}

Result<Child> Bare::checkpoint_ahead(pid_t pid, const std::string& images, const std::string& parent, const std::string& work,
                                     const std::string& log) const {
  try_out_kernel(config_);
  Argv dump = criu("dump", images, work, "dump.log");
  dump.insert(dump.end(), {"-t", std::to_string(pid), "--leave-stopped", "--network-lock", "nftables"});
  if (!parent.empty()) dump.insert(dump.end(), {"--track-mem", "--prev-images-dir", parent});
  Argv a = {"sh", "-c", "echo ready; read -r begin && exec \"$@\"", "sh"};
  a.insert(a.end(), dump.begin(), dump.end());
  return Child::start(first_to_go(a), criu_env(config_, images), log, true);
}

// CRIU drops what comes for the connections of what it dumps, by a table of nftables of the host. Where it leaves them stopped, or was
// killed, that stays, and their sockets in repair mode.
Status Bare::unlock_connections(pid_t root, const std::vector<pid_t>& all) const {
  std::lock_guard lock(mutex_);
  const std::string table = "table inet CRIU-" + std::to_string(root);
  if (std::any_of(all.begin(), all.end(), in_repair)) locked_.insert(root);
  auto r = run_checked({"nft", table + "; delete " + table}, {}, kHookMs);  // the first makes it if it is not there
  // Without connections nothing depends on it, and there may be no nft.
  if (!r && (r.error().code != ENOENT || locked_.contains(root))) return Error{r.error().code, "removing CRIU's " + table + " of nftables: " + r.error().text};
  locked_.erase(root);
  return {};
}

std::vector<pid_t> Bare::standing(pid_t pid) const {
  auto all = tree_of(pid);
  std::erase_if(all, [](pid_t p) { return !process_stopped(p); });
  return all;
}

// The first one, which is only moved when it runs, tells whether they were stopped: it goes on last.
Status Bare::resume(pid_t pid, const std::vector<pid_t>& stood) const {
  auto all = tree_of(pid);
  const Status unlocked = unlock_connections(pid, all);  // before they send
  for (const pid_t p : all) end_repair(p);
  if (!process_stopped(pid)) return unlocked;
  std::erase_if(all, [&](pid_t p) { return std::find(stood.begin(), stood.end(), p) != stood.end(); });
  std::reverse(all.begin(), all.end());
  for (const pid_t p : all)
    if (kill(p, SIGCONT) && errno != ESRCH) return sys_error("continuing process " + std::to_string(p));
  return unlocked;
}

Status Bare::remove(pid_t root) const {
  constexpr int kEndMs = 10'000, kStepMs = 20;
  const auto all = tree_of(root);
  const Status unlocked = unlock_connections(root, all);  // first: a migrd that ends meanwhile finds nobody of that life any more
  // They are stopped: nobody is born meanwhile.
  for (const pid_t p : all)
    if (kill(p, SIGKILL) && errno != ESRCH) return sys_error("ending process " + std::to_string(p));
  for (int ms = 0; std::any_of(all.begin(), all.end(), process_lives); ms += kStepMs) {
    if (ms > kEndMs) return Error{ETIMEDOUT, "process " + std::to_string(root) + " or one of its children does not end"};
    usleep(kStepMs * 1000);
  }
  return unlocked;
}

Result<Child> Bare::partial_restore(const std::string& images, const std::string& work, const std::string& log) const {
  Argv restore = criu("restore", images, work, "restore.log");
  restore.push_back("-d");
  std::error_code ec;
  fs::create_directory(kCgroup, ec);
  Argv a = {"sh", "-c", "if [ -w \"$0\" ]; then echo $$ >\"$0\"; fi; exec \"$@\"", kProcs};
  a.insert(a.end(), restore.begin(), restore.end());
  Env e = criu_env(config_, images);
  e.push_back("MIGR_RESTORE_SOCKET=" + images + "/restore.sock");
  return Child::start(a, e, log);
}

}  // namespace migr
