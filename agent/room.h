// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a container needs of a host, and whether the host has it: asked before anything is touched.
#pragma once

#include <sys/types.h>

#include <istream>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "devices.h"
#include "migr/proc_wire.h"
#include "status.h"
#include "wire.pb.h"

namespace migr {

struct ContextRecord;

/// Adds what a context has to what its device has to give.
/// @param described  what the library says of its process: also of other contexts
void add_needs(std::vector<wire::Needs>& needs, const ContextRecord& c, std::span<const migr_fd_desc> described = {});

/// The same device as it is on its own host: its driver, and the MTU that datagrams may be filled to.
void has_now(wire::Needs& needs, const Room& room);

/// @param id  enum rdma_driver_id
std::string driver_name(std::uint32_t id);
/// The connections of a program on such a device can be given another path; also of 0, which is not known.
bool family_supported(std::uint32_t driver_id);

/// EBUSY: says all that is missing, and of which it is how much.
Status fits(const wire::Needs& needs, const Room& room);

/// 0: no MTU.
std::uint32_t mtu_bytes(std::uint32_t ib_mtu);
/// @param state  enum ib_port_state
bool port_active(std::uint32_t state);

/// The file system where a path is, or will be.
struct Disk {
  std::string at;
  dev_t device = 0;
  std::uint64_t free = 0;  // bytes
  bool in_memory = false;
};
Result<Disk> disk_of(const std::string& path);
/// What is in one of them takes from what is free in the other.
bool same_disk(const std::string& a, const std::string& b);

/// Memory that a process has filled, its share of what it shares with others; swapped out or not. 0: it has ended.
std::uint64_t filled_bytes(pid_t pid);
/// Memory of hugetlbfs (MAP_HUGETLB, MFD_HUGETLB, too), of several processes.
struct HugeMemory {
  std::map<std::uint64_t, std::uint64_t> needed;  // by the size of its pages: bytes that are touched, or reserved
  std::uint64_t filled = 0;                       // bytes that images will have of it
  std::set<std::string> mappings;                 // that were seen: others may share them
};
/// @param smaps  /proc/PID/smaps of one more
void add_huge_memory(HugeMemory& to, std::istream& smaps);
/// ENOMEM: of one of the sizes fewer pages are free here, and can be made.
Status huge_memory_fits(const google::protobuf::RepeatedPtrField<wire::HugePages>& needed, const std::string& folder = "/sys/kernel/mm/hugepages");
/// ENOMEM: less is free here, swap included.
Status memory_fits(std::uint64_t bytes, const std::string& meminfo = "/proc/meminfo");
/// Images of `bytes` where `path` is, or will be; if that is a file system in memory, beside `memory` bytes that are needed, too.
/// ENOSPC: less is free.
Status disk_fits(std::uint64_t bytes, const std::string& path, std::uint64_t memory = 0, const std::string& meminfo = "/proc/meminfo");

/// As migr_gid_family(); -1: a GID has 16 bytes.
int gid_family(const std::string& gid);
/// As migr_gid_common_bits(); -1: a GID has 16 bytes.
int gid_common_bits(const std::string& a, const std::string& b);
/// As migr_gid_nearness(), also 0: a GID has 16 bytes.
int gid_nearness(const std::string& was, const std::string& here);

}  // namespace migr
