// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "name_check.h"

#include <algorithm>
#include <map>

#include "../devices.h"
#include "../kernel_record.h"

namespace migr {

namespace {

/// Each GID is asked about once.
class NumbersAtGids {
 public:
  NumbersAtGids(const NameSources::AtGid& source, pid_t pid) : source_(source), pid_(pid) {}
  Result<bool> contain(const VqpName& name) {
    auto at = known_.find(name.gid);
    if (at == known_.end()) {
      auto numbers = source_(pid_, name.gid);
      if (!numbers) return numbers.error();
      at = known_.emplace(name.gid, std::move(*numbers)).first;
    }
    return at->second.contains(name.vqpn);
  }

 private:
  const NameSources::AtGid& source_;
  const pid_t pid_;
  std::map<Gid, std::set<std::uint32_t>> known_;
};

}  // namespace

Status own_names(pid_t pid, std::span<const VqpName> names, const NameSources& from, std::size_t& offending, std::set<VqpName>& bound) {
  offending = 0;
  if (names.empty()) return {};
  const auto recorded = from.recorded(pid);
  if (!recorded && recorded.error().code != ENOENT) return recorded.error();
  std::set<std::uint32_t> numbers, born;
  std::set<std::uint32_t> renamed;  // the kernel's numbers of what has another as its name
  if (recorded)
    for (const auto& q : *recorded) {
      numbers.insert(q.vqpn);
      (q.pqpn == q.vqpn ? born : renamed).insert(q.pqpn);
    }
  // Asked only if it has to be: the QPs of all processes are read.
  if (std::any_of(names.begin(), names.end(), [&](const VqpName& n) { return !numbers.contains(n.vqpn); })) {
    const auto made = from.made(pid);
    if (!made) return made.error();
    for (const auto n : *made)
      if (!renamed.contains(n)) numbers.insert(n), born.insert(n);
  }
  NumbersAtGids own(from.own, pid), kept(from.kept, pid), given(from.given, pid);
  for (; offending < names.size(); offending++) {
    const VqpName& n = names[offending];
    if (!numbers.contains(n.vqpn)) return Error{EINVAL, text_of(n) + " is no QP of process " + std::to_string(pid)};
    const bool came = from.was_at(pid, n.gid);
    if (!from.home(n.gid) && !came) return Error{EINVAL, text_of(n) + ": process " + std::to_string(pid) + " has not been at that GID, and no device of this host has it"};
    const Result<bool> known = came || born.contains(n.vqpn) ? Result<bool>(true) : own.contain(n);
    if (!known) return known.error();
    auto others = *known ? Result<bool>(false) : kept.contain(n);
    if (others && !*others && !*known) {
      const auto guest = from.guest(pid);
      if (!guest) return guest.error();
      if (!*guest) others = given.contain(n);
    }
    if (!others) return others.error();
    if (*others) return Error{EINVAL, text_of(n) + " is another's, whatever process " + std::to_string(pid) + " calls its QP"};
    if (!*known) bound.insert(n);
  }
  return {};
}

Result<std::vector<NameSources::Recorded>> recorded_qps(pid_t pid) {
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error();
  auto contexts = kernel->contexts(pid);
  if (!contexts) return contexts.error();
  std::vector<NameSources::Recorded> out;
  for (auto& c : *contexts) {
    if (auto s = kernel->search(c); !s) return s.error();
    for (const auto& q : c.qps) out.push_back({q.vqpn, q.pqpn});
  }
  return out;
}

Result<std::set<std::uint32_t>> given_to_others(pid_t pid, const Gid& gid) {
  const std::string bytes(gid.begin(), gid.end());
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error().code == ENOENT ? Result(std::set<std::uint32_t>()) : kernel.error();
  auto contexts = kernel->contexts();
  if (!contexts) return contexts.error();
  std::map<std::string, bool> there;
  std::set<std::uint32_t> out;
  for (auto& c : *contexts) {
    if (c.rec.pid == static_cast<__u32>(pid)) continue;
    const auto [at, fresh] = there.try_emplace(device_of(c.rec));
    if (fresh)
      if (const auto gids = gids_of(at->first)) at->second = std::any_of(gids->begin(), gids->end(), [&](const auto& g) { return g.gid() == bytes; });
    if (!at->second) continue;
    if (auto s = kernel->search(c); !s && s.error().code != ENOENT) return s.error();
    for (const auto& q : c.qps)
      if (q.vqpn == q.pqpn) out.insert(q.vqpn);
  }
  return out;
}

}  // namespace migr
