/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What is mapped in this process, as /proc/self/maps says. */
#ifndef MIGR_MAPS_H
#define MIGR_MAPS_H

#include <sys/sysmacros.h>
#include <sys/types.h>

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace migr {

struct Mapped {
  std::uint64_t start, end;
  bool readable, writable;
  std::uint64_t offset;  ///< in its file
  dev_t device;
  std::uint64_t inode;
};

/// @param f  gets each, by address. @return 0 or a positive errno
template <class F>
int for_each_mapped(F&& f) {
  FILE* const maps = fopen("/proc/self/maps", "re");
  if (!maps) return errno;
  char* line = nullptr;
  std::size_t room = 0;
  while (getline(&line, &room, maps) > 0) {
    Mapped m;
    char may[5];
    unsigned dev_major, dev_minor;
    if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &m.start, &m.end, may, &m.offset, &dev_major, &dev_minor, &m.inode) != 7) continue;
    m.readable = may[0] == 'r';
    m.writable = may[1] == 'w';
    m.device = makedev(dev_major, dev_minor);
    f(m);
  }
  free(line);
  fclose(maps);
  return 0;
}

}  // namespace migr

#endif
