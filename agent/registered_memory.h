// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Memory of a process that NICs may write to, and in which of its pages they have since it began to be copied ahead.
// docs/protocol.md, "Memory that was copied ahead".
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "migr/proc_wire.h"
#include "page_images.h"
#include "status.h"
#include "wire.pb.h"

namespace migr {

/// An MR.
struct RegisteredMemory {
  std::uint32_t ctx_id, lkey, rkey;  // keys: physical; 0: none
  std::uint64_t start, length, iova;
};
/// What migr.ko has on record and a NIC may write to.
Result<std::vector<RegisteredMemory>> registered_memory(pid_t pid);
/// Its pages, by address, none twice.
std::vector<MemoryPart> pages_of(const std::vector<RegisteredMemory>& memory);
/// Which of them were written to. What names no MR is left out: of one that is gone the library has touched all, others no NIC takes.
/// @param here        as the process has noted it (TRACK)
/// @param there       as partners of its container have
/// @param context_of  of a QP as `there` counts it
std::vector<MemoryPart> written_to(const std::vector<RegisteredMemory>& memory, const std::vector<migr_nic_write>& here, const std::vector<wire::NicWrite>& there,
                                   const std::function<std::uint32_t(std::uint32_t index)>& context_of);

/// The kernel merges memory of a process with equal memory (KSM). @param run  where it has whether it does that now
bool is_merged(pid_t pid, const std::string& run = "/sys/kernel/mm/ksm/run");

}  // namespace migr
