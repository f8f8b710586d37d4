// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// CRIU's images of memory, the ones of a pre-dump and of the dump after it.
#pragma once

#include <cstdint>
#include <string>

#include "status.h"

namespace migr {

struct PageCounts {
  std::uint64_t kept = 0;       // pages that the dump still holds
  std::uint64_t unchanged = 0;  // pages that it refers to the pre-dumps for
};

/// Takes pages out of a dump that are in the pre-dump with the same content, and has it refer to those. CRIU itself goes
/// by soft-dirty, which says "written" of every page that is registered in private memory: the kernel leaves the mark on
/// pinned pages. And where the mark is taken away, in huge pages and shared memory, a NIC does not set it again: the
/// library does so for all registered memory, and here it is found what was not written.
/// @param images  folder of the dump, or of a further pre-dump; its pagemap-*.img and pages-*.img are rewritten in place
/// @param parent  folder of the pre-dump before it, which may refer to an earlier one by its link "parent"
/// @return EIO: images that contradict themselves; EINVAL: not CRIU's. The dump is of no use after an error
/// Threads: one for a folder.
Result<PageCounts> drop_unchanged(const std::string& images, const std::string& parent);

}  // namespace migr
