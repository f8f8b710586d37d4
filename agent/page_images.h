// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// CRIU's images of memory, the ones of a pre-dump and of the dump after it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace migr {

struct PageCounts {
  std::uint64_t kept = 0;       // pages that the dump still holds
  std::uint64_t unchanged = 0;  // pages that it refers to the pre-dumps for, also by CRIU's own doing
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

/// Takes zeros out of a dump that has them in the pre-dumps that it refers to, where their pages-*.img have holes for them: what is
/// in no image of private anonymous or shared memory is zero, and CRIU need not read it, nor the kernel find pages for it one by one.
/// @param images  folder of the dump, where it is to be restored; its link "parent" is the pre-dump. Its pagemap-*.img are rewritten
/// @return pages that were taken out; EIO, EINVAL as drop_unchanged(), but the dump is as good as it was
/// Threads: one for a folder.
Result<std::uint64_t> leave_out_zeros(const std::string& images);

struct MemoryPart {
  std::uint64_t start = 0;  // address in a process, of a page
  std::uint64_t bytes = 0;  // whole pages
};

/// Adds one that begins behind the last, or in it: they are one then. @param gap  bytes between two that are one nevertheless
void append(std::vector<MemoryPart>& to, const MemoryPart& part, std::uint64_t gap = 0);

struct Changed {
  std::vector<MemoryPart> parts;  // by address; a few pages between them that are not changed
  std::uint64_t unchanged = 0;    // pages that no NIC has changed since the pre-dumps
  std::uint64_t compared = 0;     // pages that were read for that
  std::uint64_t spared = 0;       // pages that are in no suspect part
};

/// What has changed in memory of a process since it was copied ahead, though no page is marked as written for it: by a NIC. Pages that are
/// marked (soft-dirty), which a dump finds by itself, are not looked at; those that are in no pre-dump have changed.
/// @param parent    folder of the last pre-dump
/// @param number    the process's in the names of images
/// @param pid       in our pid namespace; it may run, but no NIC may write to it
/// @param pagemap   /proc/PID/pagemap
/// @param parts     of its memory, by address, none twice
/// @param suspects  the same; what lies elsewhere is as the pre-dumps have it, if they have it
/// @param limit_ms  for reading it: memory may be of somebody who never answers (userfaultfd, FUSE). ETIMEDOUT
/// @return also EIO, EINVAL as drop_unchanged(); ENOENT: the pre-dump knows no such process
/// Threads: any; reads by processes of its own, as many as there are processors, at most 8
Result<Changed> changed_since(const std::string& parent, int number, pid_t pid, const std::string& pagemap, const std::vector<MemoryPart>& parts, const std::vector<MemoryPart>& suspects,
                              int limit_ms);

}  // namespace migr
