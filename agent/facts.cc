// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "facts.h"

#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <elf.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "bare.h"
#include "clock.h"
#include "failover/port_watch.h"
#include "file_tree.h"
#include "kernel_record.h"
#include "libmigr/links/config.h"
#include "limits.h"
#include "parallel.h"
#include "pki.h"
#include "processor.h"
#include "room.h"

namespace migr {
namespace {

constexpr char kCgroups[] = "/sys/fs/cgroup";

std::string error_of(const Status& s) { return s ? "" : s.error().text; }

// Whoever preloads it has to be able to read it.
Status check_library(const std::string& path) {
  struct stat st;
  std::ifstream in(path, std::ios::binary);
  std::string magic(SELFMAG, '\0');
  if (stat(path.c_str(), &st)) return sys_error("no " + path);
  if (!in.read(magic.data(), SELFMAG) || magic != std::string(ELFMAG, SELFMAG)) return Error{EINVAL, path + " is no library"};
  if (!(st.st_mode & S_IROTH)) return Error{EACCES, path + " can be read by its owner only"};
  if (st.st_mode & (S_IWGRP | S_IWOTH)) return Error{EPERM, path + " can be changed by others than its owner"};
  return {};
}

// Processes say the same on their stderr, where nobody may look.
wire::PartFacts links_of(const Config& config, const RepeatedDevices& devices) {
  wire::PartFacts f;
  const bool readable = !access(config.links_file.c_str(), R_OK);
  if (!readable && errno == ENOENT && config.links_file == kLinksFile) return f;
  f.set_path(config.links_file);
  if (!readable) {
    f.set_error(sys_error("cannot read " + config.links_file).text);
    return f;
  }
  links::Config parsed;
  f.set_error(links::parse(text_of(config.links_file), "", parsed));
  f.set_version(std::to_string(parsed.links.size()) + " links");
  if (f.error().empty())
    for (auto lines : {without_effect(parsed), missing_of(parsed, devices)})
      for (auto& line : lines) f.add_missing(std::move(line));
  return f;
}

wire::CertificateFacts certificate_of(const Config& config) {
  wire::CertificateFacts f;
  f.set_folder(config.pki);
  const auto files = pki::load(config.pki);
  const auto c = files ? pki::read(*files, config.name) : Result<pki::Certificate>(files.error());
  if (!c) {
    f.set_error(c.error().text);
    return f;
  }
  for (const char* name : {"/ca.pem", "/host.pem"}) {
    struct stat st;
    if (!stat((config.pki + name).c_str(), &st) && st.st_mode & (S_IWGRP | S_IWOTH)) f.set_error(config.pki + name + " can be changed by others; chmod 644 it");
  }
  f.set_subject(c->subject);
  f.set_begins_s(c->begins_s);
  f.set_ends_s(c->ends_s);
  f.set_ca_ends_s(c->ca_ends_s);
  f.set_of_ca(c->of_ca);
  f.set_of_key(c->of_key);
  f.set_of_host(c->of_host);
  return f;
}

void add_devices(wire::HostFacts& out) {
  std::set<std::string> names;
  const auto ports = rdma_ports();
  for (const auto& p : ports) names.insert(p.device);
  for (const auto& name : names) {
    auto* d = out.add_devices();
    d->set_name(name);
    const auto room = room_of(name);
    if (!room) {
      d->set_error(room.error().text);
      continue;
    }
    d->set_driver(room->device.driver_id);
    for (std::uint32_t n = 0; n < room->device.nr_ports && n < MIGR_RST_PORTS; n++) {
      auto* p = d->add_ports();
      p->set_port(n + 1);
      p->set_state(room->device.ports[n].state);
      p->set_mtu(room->device.ports[n].active_mtu);
      for (const auto& known : ports)
        if (known.device == name && known.port == n + 1) p->set_netdev(known.netdev);
    }
    for (const auto& g : room->gids) *d->add_gids() = g;
  }
}

wire::RoomFacts room_for(std::uint64_t bytes, const Config& config) {
  wire::RoomFacts f;
  f.set_folder(config.state_dir);
  const auto disk = disk_of(config.state_dir);
  if (disk) f.set_free_bytes(disk->free);
  f.set_lacks(error_of(disk));
  if (disk) f.set_lacks(error_of(disk_fits(bytes, config.state_dir, bytes)));
  return f;
}

}  // namespace

std::vector<std::string> without_effect(const links::Config& configured) {
  std::vector<std::string> out;
  std::set<std::string> devices;
  for (const auto& l : configured.links) devices.insert(l.device);
  if (devices.size() < 2) out.emplace_back("fewer than two devices: nothing has a backup");
  const auto on = [](const auto& named) { return named.second.policy.value_or(links::Policy::kOff) != links::Policy::kOff; };
  if (!configured.any_policy() && std::none_of(configured.processes.begin(), configured.processes.end(), on)) out.emplace_back("\"policy\" is \"off\" for every device and program that has no MIGR_POLICY");
  return out;
}

std::vector<std::string> missing_of(const links::Config& configured, const RepeatedDevices& devices) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < configured.links.size(); i++) {
    const auto& l = configured.links[i];
    const auto lacks = [&](const std::string& what) { out.push_back("link " + std::to_string(i) + ": " + what); };
    const auto at = [&](const auto& x) { return x.port() == l.port; };
    const auto d = std::find_if(devices.begin(), devices.end(), [&](const auto& x) { return x.name() == l.device; });
    if (d == devices.end())
      lacks("no RDMA device " + l.device);
    else if (!d->error().empty())
      continue;
    else if (std::none_of(d->ports().begin(), d->ports().end(), at))
      lacks(l.device + " has no port " + std::to_string(l.port));
    else if (l.gid_index >= 0 && std::none_of(d->gids().begin(), d->gids().end(), [&](const auto& g) { return at(g) && g.index() == static_cast<std::uint32_t>(l.gid_index); }))
      lacks(l.device + "/" + std::to_string(l.port) + " has no GID of number " + std::to_string(l.gid_index));
  }
  return out;
}

std::uint64_t rdma_filled_bytes() {
  auto kernel = KernelRecord::open();
  if (!kernel) return 0;
  const auto all = kernel->contexts();
  if (!all) return 0;
  std::set<pid_t> pids;
  for (const auto& c : *all) pids.insert(static_cast<pid_t>(c.rec.pid));
  std::uint64_t bytes = 0;
  for (const pid_t pid : pids) bytes += filled_bytes(pid);
  return bytes;
}

wire::HostFacts facts_of(const Config& config, const wire::VersionReply& version, std::uint64_t image_bytes) {
  wire::HostFacts f;
  *f.mutable_version() = version;
  utsname kernel{};
  if (!uname(&kernel)) f.set_kernel(kernel.release);
  f.set_module_error(error_of(KernelRecord::open()));
  f.mutable_library()->set_path(config.libmigr);
  f.mutable_library()->set_error(error_of(check_library(config.libmigr)));
  const Bare bare(config);
  const auto criu = bare.version(), nft = bare.nft_version();
  f.mutable_criu()->set_path(config.criu);
  f.mutable_criu()->set_error(error_of(criu));
  if (criu) f.mutable_criu()->set_version(*criu);
  f.mutable_nft()->set_path("nft");
  f.mutable_nft()->set_error(error_of(nft));
  if (nft) f.mutable_nft()->set_version(*nft);
  f.mutable_plugin()->set_path(plugin_dir(config) + "/migr_plugin.so");
  f.mutable_plugin()->set_error(error_of(check_plugin(config)));
  f.mutable_runc()->set_path(config.runc);
  f.mutable_runc()->set_error(error_of(Runc(config).check_verbs()));
  f.mutable_net_hook()->set_path(config.net_hook);
  if (!config.net_hook.empty()) f.mutable_net_hook()->set_error(error_of(check_net_hook(config)));
  for (auto& i : instructions_here()) f.add_instructions(std::move(i));
  for (const auto& p : config.peers()) f.add_peers(p.name);
  f.mutable_cgroups()->set_path(kCgroups);
  if (access((std::string(kCgroups) + "/cgroup.controllers").c_str(), F_OK)) f.mutable_cgroups()->set_error("not the unified hierarchy (cgroup v2)");
  *f.mutable_certificate() = certificate_of(config);
  add_devices(f);
  *f.mutable_links() = links_of(config, f.devices());
  *f.mutable_room() = room_for(image_bytes, config);
  f.set_now_ms(unix_now_ms());
  return f;
}

std::vector<PeerAnswer> ask_peers(Peers& peers, const std::vector<std::string>& names, std::uint64_t image_bytes) {
  std::vector<PeerAnswer> out;
  for (const auto& name : names) {
    const auto p = peers.config().peer(name);
    out.push_back({name, p ? p->address : "", Error{}, 0});
  }
  wire::FactsRequest request;
  request.set_image_bytes(image_bytes);
  (void)parallel_for(out, [&](PeerAnswer& a) -> Status {
    auto channel = peers.channel(a.name);
    if (!channel) return a.facts = channel.error();
    wire::Host::Stub stub(*channel);
    a.facts = call(stub, &wire::Host::Stub::Facts, request, kCheckMs, a.name);
    if (a.facts) a.ahead_ms = a.facts->now_ms() - unix_now_ms();
    return a.facts;
  });
  return out;
}

}  // namespace migr
