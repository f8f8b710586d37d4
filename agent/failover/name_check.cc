// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "name_check.h"

#include <algorithm>

#include "../kernel_record.h"

namespace migr {

Status own_names(pid_t pid, std::span<const VqpName> names, const NameSources& from, std::size_t& offending) {
  offending = 0;
  if (names.empty()) return {};
  const auto recorded = from.recorded(pid);
  if (!recorded && recorded.error().code != ENOENT) return recorded.error();
  std::set<std::uint32_t> numbers;
  std::set<std::uint32_t> renamed;  // the kernel's numbers of what has another as its name
  if (recorded)
    for (const auto& q : *recorded) {
      numbers.insert(q.vqpn);
      if (q.pqpn != q.vqpn) renamed.insert(q.pqpn);
    }
  // Asked only if it has to be: the QPs of all processes are read.
  if (std::any_of(names.begin(), names.end(), [&](const VqpName& n) { return !numbers.contains(n.vqpn); })) {
    const auto made = from.made(pid);
    if (!made) return made.error();
    for (const auto n : *made)
      if (!renamed.contains(n)) numbers.insert(n);
  }
  for (; offending < names.size(); offending++) {
    const VqpName& n = names[offending];
    if (!numbers.contains(n.vqpn)) return Error{EINVAL, text_of(n) + " is no QP of process " + std::to_string(pid)};
    if (!from.home(n.gid) && !from.was_at(pid, n.gid))
      return Error{EINVAL, text_of(n) + ": process " + std::to_string(pid) + " has not been at that GID, and no device of this host has it"};
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

}  // namespace migr
