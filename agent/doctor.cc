// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "failover/link_records.h"
#include "host_service.h"
#include "limits.h"
#include "pki.h"
#include "room.h"
#include "text.h"

namespace migr {
namespace {

constexpr std::int64_t kDayS = 24 * 3600;
constexpr std::int64_t kCertificateSoonS = 30 * kDayS;
constexpr std::int64_t kClockMs = 1'000;
constexpr std::uint64_t kLittleRoomBytes = 256ull << 20;

constexpr std::pair kNewestKernel{6, 12};  // as in packaging/debian/migr-dkms.dkms

constexpr char kSameRelease[] = "install the same release of migr on both hosts, and start migrd again";

const std::string kOlderCertificate = "it goes on with the certificate it had, and does not take the files: ";

const char* name_of(Health h) { return h == Health::kOk ? "ok" : h == Health::kWarning ? "warning" : "failed"; }
const char* colour_of(Health h) { return h == Health::kOk ? "\033[32m" : h == Health::kWarning ? "\033[33m" : "\033[31m"; }

std::string day(std::int64_t s) { return local_time(s).substr(0, 10); }

// Collects what is found on one host.
struct Judge {
  std::string host;
  std::vector<Finding> all{};
  void ok(const std::string& check, const std::string& found) { all.push_back({host, check, Health::kOk, found, ""}); }
  void warn(const std::string& check, const std::string& found, const std::string& advice) { all.push_back({host, check, Health::kWarning, found, advice}); }
  void fail(const std::string& check, const std::string& found, const std::string& advice) { all.push_back({host, check, Health::kFailed, found, advice}); }
  void part(const std::string& check, const wire::PartFacts& f, const std::string& advice) {
    if (!f.error().empty()) return fail(check, f.error(), advice);
    ok(check, f.version().empty() ? f.path() : f.version() + ", " + f.path());
  }
};

/// "3.17.1" -> 3, 17
std::pair<int, int> version_numbers(const std::string& v) {
  char* end = nullptr;
  const long major = std::strtol(v.c_str(), &end, 10);
  return {static_cast<int>(major), *end == '.' ? static_cast<int>(std::strtol(end + 1, nullptr, 10)) : 0};
}

void judge_kernel(Judge& j, const wire::HostFacts& f) {
  if (version_numbers(f.kernel()) < std::pair{6, 1})
    j.fail("kernel", f.kernel(), "migr.ko needs Linux 6.1 or later");
  else if (version_numbers(f.kernel()) > kNewestKernel)
    j.warn("kernel", f.kernel(), fmt::format("start one up to {}.{}: for a later one migr-dkms builds no migr.ko", kNewestKernel.first, kNewestKernel.second));
  else
    j.ok("kernel", f.kernel());
  if (!f.module_error().empty())
    j.fail("module", f.module_error(), "what was started without it, or with one of another release, cannot move until it is started again");
  else
    j.ok("module", fmt::format("migr.ko, ABI {}", f.version().abi()));
}

void judge_criu(Judge& j, const wire::HostFacts& f) {
  if (f.criu().error().empty() && version_numbers(f.criu().version()) < std::pair{3, 17})
    j.fail("criu", f.criu().version() + ", " + f.criu().path(), "install CRIU 3.17 or later: before it there are no hooks for RDMA");
  else if (f.criu().error().empty() && version_numbers(f.criu().version()) >= std::pair{4, 2})
    j.warn("criu", f.criu().version() + ", " + f.criu().path(), "use CRIU 3.17 to 4.1: a later one reads the checkpoint before it asks plugins, so that nothing can be made ahead of it");
  else
    j.part("criu", f.criu(), "install the package criu, or say in migrd.json where it is (\"criu\")");
  j.part("plugin", f.plugin(), "copy migr_plugin.so there, or say in migrd.json where it is (\"criu_libs\")");
  j.part("runc", f.runc(), "install migr's runc, or say in migrd.json where it is (\"runc\")");
}

void judge_cgroups(Judge& j, const wire::HostFacts& f) {
  if (f.has_cgroups()) j.part("cgroups", f.cgroups(), "start the kernel with systemd.unified_cgroup_hierarchy=1: containers in cgroups v1 cannot be moved");
}

void judge_net_hook(Judge& j, const wire::HostFacts& f) {
  if (!f.has_net_hook()) return;
  const std::string advice = "say in migrd.json what moves an address (\"net_hook\"); packages have /usr/lib/migr/migr-net";
  if (f.net_hook().path().empty())
    j.warn("net_hook", "not set: containers with an address of their own are refused", "if there are such, " + advice);
  else
    j.part("net_hook", f.net_hook(), advice);
}

void judge_nft(Judge& j, const wire::HostFacts& f) {
  if (f.has_nft() && !f.nft().error().empty())
    j.warn("nft", f.nft().error(), "install the package nftables, if processes without a container are to move that have TCP connections within their host");
  else if (f.has_nft())
    j.part("nft", f.nft(), "");
}

void judge_certificate(Judge& j, const wire::CertificateFacts& c, std::int64_t now_s) {
  const std::string name = j.host, check = "certificate", renew = "issue another: migrctl pki host CA-DIR " + name + ", and copy host.pem and host.key to " + c.folder() + "; migrd takes them by itself";
  if (!c.error().empty()) return j.fail(check, c.error(), "ca.pem, host.pem and host.key (mode 0600) of this host belong into " + c.folder());
  const auto [ends, what] = std::min(std::pair{c.ends_s(), "it"}, std::pair{c.ca_ends_s(), "the CA"});
  const std::string again = ends == c.ends_s() ? renew : "a new CA, and certificates of it for all hosts: first both CAs into each ca.pem; migrd(8), CERTIFICATES, has the order";
  const pki::Certificate shown{c.subject(), c.begins_s(), c.ends_s(), c.ca_ends_s(), c.of_ca(), c.of_key(), c.of_host()};
  if (auto s = pki::check(shown, name, now_s); !s) return j.fail(check, s.error().text, now_s < c.begins_s() ? "is the clock right? Else " + renew : now_s >= ends ? again : renew);
  const std::string left = fmt::format("{} expires on {}, in {} days", what, day(ends), (ends - now_s) / kDayS);
  if (ends - now_s < kCertificateSoonS) return j.warn(check, left, again);
  j.ok(check, left);
}

std::string port_name(const wire::DeviceFacts& d, const wire::PortFacts& p) { return d.name() + "/" + std::to_string(p.port()); }

auto gids_of_port(const wire::DeviceFacts& d, std::uint32_t port) {
  std::vector<wire::PortGid> out;
  std::copy_if(d.gids().begin(), d.gids().end(), std::back_inserter(out), [&](const auto& g) { return g.port() == port && g.roce_v2(); });
  return out;
}

void judge_devices(Judge& j, const wire::HostFacts& f) {
  if (!f.devices_size()) return j.fail("rdma", "no RDMA device", "load the driver of its NIC; soft-RoCE: rdma link add rxe0 type rxe netdev NETDEV");
  bool active = false;
  for (const auto& d : f.devices())
    for (const auto& p : d.ports()) active = active || port_active(p.state());
  for (const auto& d : f.devices()) {
    if (!d.error().empty()) j.fail("rdma " + d.name(), d.error(), "its uverbs device has to be there and open for root: modprobe ib_uverbs");
    if (!family_supported(d.driver()))
      j.warn("rdma " + d.name(), fmt::format("driven by {}: programs on it can neither be moved nor backed up by links", driver_name(d.driver())), "only those on soft-RoCE (rxe) can: man 7 migr-limits");
    for (const auto& p : d.ports()) {
      const std::string check = "rdma " + port_name(d, p), netdev = p.netdev().empty() ? "no netdev" : p.netdev();
      const auto v2 = gids_of_port(d, p.port()).size();
      const std::string up = p.netdev().empty() ? "connect its cable" : "ip link set " + p.netdev() + " up; is its cable connected?";
      if (!port_active(p.state()) && active)
        j.warn(check, "down, " + netdev, up);
      else if (!port_active(p.state()))
        j.fail(check, "down, " + netdev + ", and no other port is active", up);
      else if (!p.netdev().empty() && !v2)
        j.fail(check, "active, " + netdev + ", no RoCE v2 GID", "give " + p.netdev() + " an address");
      else
        j.ok(check, fmt::format("active, {}, MTU {}, {} RoCE v2 GIDs", netdev, mtu_bytes(p.mtu()), v2));
    }
  }
}

void judge_links(Judge& j, const wire::PartFacts& f) {
  if (f.path().empty()) return j.ok("links", "not configured");
  for (const auto& missing : f.missing()) {
    if (missing.starts_with("link "))  // and its number
      j.warn("links", missing, fmt::format("nothing has a backup there: put its device (rdma link), port or gid_index right in {}, or add what is missing", f.path()));
    else
      j.warn("links", missing, fmt::format("put \"links\" of two devices and a \"policy\" of \"exact\" or \"resend\" into {} (man 7 migr-operations)", f.path()));
  }
  if (!f.missing_size()) j.part("links", f, "processes do without backup links until it is right (man 7 migr-failover)");
}

void judge_room(Judge& j, const wire::RoomFacts& r) {
  const std::string free = fmt::format("{} MB free in {}", r.free_bytes() >> 20, r.folder());
  if (!r.lacks().empty())
    j.fail("room", r.lacks(), "checkpoints need it: free some, or say in migrd.json where there is more (\"state_dir\")");
  else if (r.free_bytes() < kLittleRoomBytes)
    j.warn("room", free, "a checkpoint is as large as the memory that is filled: free some");
  else
    j.ok("room", free);
}

// The device of that name, else the only one: as a container's would be restored.
const wire::DeviceFacts* like(const wire::DeviceFacts& d, const wire::HostFacts& there) {
  for (const auto& t : there.devices())
    if (t.name() == d.name()) return &t;
  return there.devices_size() == 1 ? &there.devices(0) : nullptr;
}

// Active ports of here with those that correspond to them there. @param none  of a device that has no such one there
template <class Pair, class None>
void each_pair_of_ports(const wire::HostFacts& here, const wire::HostFacts& there, const Pair& pair, const None& none) {
  for (const auto& d : here.devices()) {
    const auto* t = like(d, there);
    if (!t) {
      none(d);
      continue;
    }
    for (const auto& p : d.ports()) {
      const auto q = std::find_if(t->ports().begin(), t->ports().end(), [&](const auto& x) { return x.port() == p.port(); });
      if (q != t->ports().end() && port_active(p.state()) && port_active(q->state())) pair("path " + port_name(d, p), d, p, *t, *q);
    }
  }
}

void compare_devices(Judge& j, const wire::HostFacts& here, const PeerAnswer& peer) {
  const auto& there = *peer.facts;
  const auto none = [&](const wire::DeviceFacts& d) {
    if (there.devices_size()) j.warn("rdma " + d.name(), "it has no such device", "what uses " + d.name() + " cannot go there: give a device that name (rdma dev set)");
  };
  each_pair_of_ports(here, there, [&](const std::string& check, const auto& d, const auto& p, const auto& t, const auto& q) {
    std::set<int> families;
    for (const auto& g : gids_of_port(t, q.port())) families.insert(gid_family(g.gid()));
    const auto mine = gids_of_port(d, p.port());
    const auto lacks = std::find_if(mine.begin(), mine.end(), [&](const auto& g) { return !families.contains(gid_family(g.gid())); });
    const auto tried = std::find_if(peer.tried.begin(), peer.tried.end(), [&](const NamedPath& x) { return x.name == check; });
    const bool known = tried != peer.tried.end() && tried->result.why_not.empty();
    if (q.mtu() != p.mtu())
      j.fail(check, fmt::format("MTU {} here, {} there", mtu_bytes(p.mtu()), mtu_bytes(q.mtu())),
             fmt::format("set the same on both: ip link set {} mtu N", q.netdev().empty() ? "NETDEV" : q.netdev()));
    else if (known && !tried->result.error.empty())
      j.fail(check, fmt::format("{} bytes at once between {} and {} do not arrive: {}", mtu_bytes(p.mtu()), gid_text(tried->path.from, "?"), gid_text(tried->path.to, "?"), tried->result.error),
             "open UDP port 4791 between them, both ways; every switch on the way has to pass frames of that size");
    else if (lacks != mine.end())
      j.warn(check, "RoCE v2 GIDs of another family there than here", "give both interfaces addresses of the same families (IPv4, IPv6)");
    else
      j.ok(check, fmt::format("MTU {} on both ends{}", mtu_bytes(p.mtu()), known ? ", and that much passes both ways" : ""));
  }, none);
}

void compare_versions(Judge& j, const wire::HostFacts& here, const wire::HostFacts& there) {
  const auto &ours = here.version(), &theirs = there.version();
  std::vector<Status> same = {same_version("migrd", theirs.wire(), ours.wire()), same_version("libmigr", theirs.proc(), ours.proc())};
  if (ours.abi() && theirs.abi()) same.push_back(same_version("migr.ko", theirs.abi(), ours.abi()));
  for (const auto& s : same)
    if (!s) return j.fail("versions", s.error().text, kSameRelease);
  if (ours.release() != theirs.release()) return j.warn("versions", fmt::format("release {} here, {} there", ours.release(), theirs.release()), kSameRelease);
  if (version_numbers(here.criu().version()) != version_numbers(there.criu().version()))
    return j.warn("versions", fmt::format("CRIU {} here, {} there", here.criu().version(), there.criu().version()), "install the same CRIU: an older one may not read the images of a newer");
  j.ok("versions", "as here, release " + theirs.release());
}

// One that starts there and comes here, and the other way round.
void compare_processors(Judge& j, const wire::HostFacts& here, const wire::HostFacts& there) {
  if (here.instructions().empty() || there.instructions().empty()) return;
  const auto missing = [](const auto& from, const auto& in) {
    std::string all;
    for (const auto& i : from)
      if (std::find(in.begin(), in.end(), i) == in.end()) all += " " + i;
    return all;
  };
  const std::string lacks = missing(here.instructions(), there.instructions()), more = missing(there.instructions(), here.instructions());
  if (lacks.empty() && more.empty()) return j.ok("processor", "has the same instructions");
  std::string found = lacks.empty() ? "" : "lacks" + lacks;
  if (!more.empty()) found += (lacks.empty() ? "has more than here:" : "; has more than here:") + more;
  j.warn("processor", found, "what is started on the better one cannot be moved to the other: programs look for instructions when they start");
}

// A partner may be on any of them.
void compare_peers(Judge& j, const wire::HostFacts& here, const wire::HostFacts& there) {
  if (there.peers().empty()) return;
  std::set<std::string> wanted(here.peers().begin(), here.peers().end());
  wanted.insert(here.version().name());
  wanted.erase(j.host);
  for (const auto& name : there.peers()) wanted.erase(name);
  std::string lacks;
  for (const auto& name : wanted) lacks += (lacks.empty() ? "" : ", ") + name;
  if (lacks.empty()) return j.ok("peers", "knows those of this host");
  j.warn("peers", "does not know " + lacks, "what is connected to there cannot be moved from it: add them to the \"peers\" in its migrd.json");
}

void judge_clock(Judge& j, std::int64_t ahead_ms) {
  const std::string found = fmt::format("{:.1f} s {} ours", static_cast<double>(std::abs(ahead_ms)) / 1e3, ahead_ms < 0 ? "behind" : "ahead of");
  if (std::abs(ahead_ms) > kClockMs)
    j.warn("clock", found, "have both set by NTP: certificates and logs go by the clock");
  else
    j.ok("clock", "as ours");
}

bool names_tls(const std::string& text) {
  for (const char* word : {"handshake", "certificate", "CERTIFICATE", "SSL", "Peer name", "Hostname Verification"})
    if (text.find(word) != std::string::npos) return true;
  return false;
}

void append(std::vector<Finding>& to, std::vector<Finding> more) { std::move(more.begin(), more.end(), std::back_inserter(to)); }

}  // namespace

std::vector<Finding> judge_host(const wire::HostFacts& f, std::int64_t now_s) {
  Judge j{f.version().name()};
  judge_kernel(j, f);
  j.part("library", f.library(), "install libmigr.so there, or say in migrd.json where it is (\"libmigr\"); programs are started with LD_PRELOAD= and that path");
  judge_criu(j, f);
  judge_cgroups(j, f);
  judge_net_hook(j, f);
  judge_nft(j, f);
  judge_certificate(j, f.certificate(), now_s);
  judge_devices(j, f);
  judge_links(j, f.links());
  judge_room(j, f.room());
  return std::move(j.all);
}

Finding judge_daemon(const wire::VersionReply& own, const Result<wire::VersionReply>& answer, const std::string& config) {
  Judge j{own.name()};
  if (!answer)
    j.fail("migrd", answer.error().text, fmt::format("start it: systemctl start migrd, or migrd --config {}; if it does not stay up: journalctl -u migrd -n 20", config));
  else if (answer->release() != own.release() || answer->wire() != own.wire())
    j.fail("migrd", fmt::format("release {}, migrctl is {}", answer->release(), own.release()), "start migrd again: it is older or newer than what is installed");
  else if (!answer->certificate_refused().empty())
    j.warn("migrd", kOlderCertificate + answer->certificate_refused(), "put the files right: migrd looks at them all the time");
  else
    j.ok("migrd", fmt::format("release {}, {} processes with libmigr", answer->release(), answer->sessions()));
  return j.all[0];
}

std::vector<NamedPath> paths_between(const wire::HostFacts& here, const wire::HostFacts& there) {
  std::vector<NamedPath> out;
  each_pair_of_ports(here, there, [&](const std::string& name, const auto& d, const auto& p, const auto& t, const auto& q) {
    constexpr int kFamilies[] = {0, 2, 1};  // as gid_family() counts: a link-local address last
    const wire::PortGid *from = nullptr, *to = nullptr;
    int best = -1;
    const auto mine = gids_of_port(d, p.port()), theirs = gids_of_port(t, q.port());
    for (const int family : kFamilies)
      for (const auto& g : mine)
        for (const auto& h : theirs)
          if (const int common = gid_common_bits(g.gid(), h.gid()); (!from || gid_family(from->gid()) == family) && gid_family(g.gid()) == family && gid_family(h.gid()) == family && common > best)
            from = &g, to = &h, best = common;
    if (from && p.mtu() == q.mtu()) out.push_back({name, {from->gid(), to->gid(), p.mtu()}});
  }, [](const wire::DeviceFacts&) {});
  return out;
}

std::vector<Finding> judge_peer(const wire::HostFacts& here, const PeerAnswer& peer, std::int64_t now_s) {
  Judge j{peer.name};
  if (!peer.facts) {
    const auto& e = peer.facts.error();
    if (e.code == ENOENT)
      j.fail("migrd", e.text, "add it to the \"peers\" in migrd.json of both hosts");
    else if (e.code == EPROTONOSUPPORT)
      j.fail("migrd", peer.address + " is an older migrd, which cannot be asked", kSameRelease);
    else if (e.code == EPERM)
      j.warn("migrd", e.text, "what it says has to be changed in migrd.json of " + peer.name + ", if this host is to examine it");
    else if (names_tls(e.text))
      j.fail("migrd", e.text, "both hosts need certificates of the same CA, with their names in them and not expired: run migrctl doctor on " + peer.name + ", too");
    else
      j.fail("migrd", e.text, fmt::format("start it on {} (systemctl start migrd); is {} its address, does a firewall let TCP through?", peer.name, peer.address));
    return std::move(j.all);
  }
  if (const auto& why = peer.facts->version().certificate_refused(); !why.empty())
    j.warn("migrd", kOlderCertificate + why, "put the files right on " + peer.name + ": migrd looks at them all the time");
  else
    j.ok("migrd", "answers at " + peer.address);
  compare_versions(j, here, *peer.facts);
  compare_processors(j, here, *peer.facts);
  compare_peers(j, here, *peer.facts);
  judge_clock(j, peer.ahead_ms);
  wire::HostFacts facts = *peer.facts;
  facts.mutable_version()->set_name(peer.name);
  append(j.all, judge_host(facts, now_s));
  compare_devices(j, here, peer);
  return std::move(j.all);
}

Health health_of(const std::vector<Finding>& all) {
  Health worst = Health::kOk;
  for (const auto& f : all) worst = std::max(worst, f.health);
  return worst;
}

std::string doctor_text(const std::vector<Finding>& all, bool colour) {
  std::string out, host;
  int count[3] = {};
  for (const auto& f : all) {
    if (f.host != host) out += (out.empty() ? "" : "\n") + wrapped(f.host, 2);
    host = f.host;
    count[static_cast<int>(f.health)]++;
    constexpr std::size_t kIndent = 25;
    const std::string status = name_of(f.health);
    std::string lines = wrapped(fmt::format("  {:<8}{:<14} {}", status, f.check, f.found), kIndent);
    if (colour) lines.replace(2, status.size(), colour_of(f.health) + status + "\033[0m");
    out += lines;
    if (!f.advice.empty()) out += wrapped(fmt::format("{:>{}} {}", "->", kIndent - 1, f.advice), kIndent);
  }
  return out + fmt::format("\n{} checks: {} ok, {} warnings, {} failed\n", all.size(), count[0], count[1], count[2]);
}

Json doctor_json(const std::vector<Finding>& all) {
  Json j = Json::array();
  for (const auto& f : all)
    j.push_back({{"check", f.host + ": " + f.check}, {"status", name_of(f.health)}, {"found", f.found},
                 {"advice", f.advice.empty() ? Json(nullptr) : Json(f.advice)}});
  return j;
}

}  // namespace migr
