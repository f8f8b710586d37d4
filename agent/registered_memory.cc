// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "registered_memory.h"

#include <rdma/ib_user_ioctl_verbs.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "file_tree.h"
#include "kernel_record.h"
#include "mappings.h"

namespace migr {
namespace {

// A part of memory that begins and ends anywhere, as whole pages.
MemoryPart whole_pages(std::uint64_t start, std::uint64_t bytes) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t from = start / page * page;
  return {from, (start + bytes + page - 1) / page * page - from};
}

std::vector<MemoryPart> by_address(std::vector<MemoryPart> all) {
  std::sort(all.begin(), all.end(), [](const MemoryPart& a, const MemoryPart& b) { return a.start < b.start; });
  std::vector<MemoryPart> out;
  for (const MemoryPart& m : all) append(out, m);
  return out;
}

}  // namespace

Result<std::vector<RegisteredMemory>> registered_memory(pid_t pid) {
  constexpr std::uint32_t kWritable = IB_UVERBS_ACCESS_LOCAL_WRITE | IB_UVERBS_ACCESS_REMOTE_WRITE | IB_UVERBS_ACCESS_REMOTE_ATOMIC;
  auto kernel = KernelRecord::open();
  if (!kernel) return kernel.error();
  auto contexts = kernel->contexts(pid);
  if (!contexts) return contexts.error();
  std::vector<RegisteredMemory> all;
  for (ContextRecord& c : *contexts) {
    if (auto s = kernel->objects(c); !s) return s.error();
    for (const migr_mr_rec& mr : c.mrs)
      if (mr.length && mr.access & kWritable && !(mr.flags & (MIGR_MR_DMABUF | MIGR_MR_DM))) all.push_back({c.rec.ctx_id, mr.plkey, mr.prkey, mr.start, mr.length, mr.iova});
  }
  return all;
}

std::vector<MemoryPart> pages_of(const std::vector<RegisteredMemory>& memory) {
  std::vector<MemoryPart> all;
  for (const RegisteredMemory& mr : memory) all.push_back(whole_pages(mr.start, mr.length));
  return by_address(std::move(all));
}

std::vector<MemoryPart> written_to(const std::vector<RegisteredMemory>& memory, const std::vector<migr_nic_write>& here, const std::vector<wire::NicWrite>& there,
                                   const std::function<std::uint32_t(std::uint32_t index)>& context_of) {
  using Key = std::pair<std::uint32_t, std::uint32_t>;  // context, physical key
  std::map<Key, const RegisteredMemory*> by_lkey, by_rkey;
  for (const RegisteredMemory& mr : memory) {
    by_lkey[{mr.ctx_id, mr.lkey}] = &mr;
    if (mr.rkey) by_rkey[{mr.ctx_id, mr.rkey}] = &mr;
  }
  std::vector<MemoryPart> all;
  const auto add = [&](const std::map<Key, const RegisteredMemory*>& by_key, const Key& key, std::uint64_t start, std::uint64_t bytes) {
    const auto found = by_key.find(key);
    if (found == by_key.end()) return;
    const RegisteredMemory& mr = *found->second;
    const std::uint64_t from = std::max(start, mr.iova), to = std::min(start + bytes, mr.iova + mr.length);
    if (from < to) all.push_back(whole_pages(mr.start + (from - mr.iova), to - from));
  };
  for (const migr_nic_write& w : here) add(by_lkey, {w.ctx_id, w.key}, w.start, w.bytes);
  for (const wire::NicWrite& w : there) add(by_rkey, {context_of(w.index()), w.key()}, w.start(), w.bytes());
  return by_address(std::move(all));
}

bool is_merged(pid_t pid, const std::string& run) {
  return first_line_of(run) == "1" && has_vm_flag(pid, "mg");
}

}  // namespace migr
