/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Which links there are, and what a broken one does to whom (docs/failover.md):
 *
 *   { "links": [ {"device": "mlx5_0", "port": 1, "gid_index": 3}, {"device": "mlx5_1"} ],
 *     "policy": "exact", "paths": "cached", "atomics": "direct", "backups": 1,
 *     "devices": {"mlx5_1": "off"}, "processes": {"ib_write_bw": "resend", "kv_server": {"paths": "rebuild"}},
 *     "unique_swap": ["kv_server"], "pool": 1,
 *     "heartbeat_ms": 200, "heartbeat_misses": 3, "switch_limit_ms": 10000, "return_ms": 3000,
 *     "adrift_limit_ms": 120000 }
 *
 * Only "links" must be there. A process's policy goes before a device's, that before "policy", which is off
 * unless said otherwise; so with "paths", in an object in the policy's place. "cached": each vQP has a path on its backup link, made
 * ahead; "rebuild": none, it is made when it is needed, which takes longer, and a second QP's memory only then; "pool": `pool` of them (1) are
 * made ahead for all vQPs of one kind between two processes, and taken by those that fail first. Where the two ends say
 * different things none is made ahead. "atomics", in the same places: "direct"; or "relayed": of a vQP with `exact` and a backup whose other end
 * says so, too, the other end's library has its own NIC execute them, once, whatever fails meanwhile; each takes a few round trips.
 * "backups", in the same places: so many of the other devices' links, in their order, are a vQP's backup links (1). All memory is
 * registered on each; a path is made ahead on the one that would be next.
 * "unique_swap", true or programs: no two of their CAS, wherever, have the same swap value, and only
 * who has swapped one in takes it away. Then `exact` brings back the answer of a CAS that was lost.
 * Environment: MIGR_LINKS names another file, MIGR_POLICY goes before everything.
 */
#ifndef MIGR_LINKS_CONFIG_H
#define MIGR_LINKS_CONFIG_H

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../../include/migr/links_wire.h"

namespace migr::links {

constexpr char kDefaultFile[] = "/etc/migr/links.json";
constexpr std::size_t kMaxLinks = MIGR_LINKS_MAX_LINKS, kMaxBackups = kMaxLinks - 1;

/* As in a record. */
enum class Policy { kOff = MIGR_LINKS_OFF, kResend = MIGR_LINKS_RESEND, kExact = MIGR_LINKS_EXACT };
const char* name(Policy policy);
enum class Paths { kCached = MIGR_LINKS_CACHED, kRebuild = MIGR_LINKS_REBUILD, kPool = MIGR_LINKS_POOL };
const char* name(Paths paths);
enum class Atomics { kDirect = MIGR_LINKS_DIRECT, kRelayed = MIGR_LINKS_RELAYED };
const char* name(Atomics atomics);

struct Config {
  struct Link {
    std::string device;
    unsigned port = 1;
    int gid_index = -1;  ///< -1: the first RoCE v2 one of IPv4, else 0
  };
  /// What is said of a device or a program.
  struct Setting {
    std::optional<Policy> policy;
    std::optional<Paths> paths;
    std::optional<Atomics> atomics;
    std::optional<unsigned> backups;
  };
  std::vector<Link> links;
  Policy policy = Policy::kOff;
  Paths paths = Paths::kCached;
  Atomics atomics = Atomics::kDirect;
  unsigned backups = 1;
  std::map<std::string, Setting> devices, processes;
  bool unique_swap = false;     ///< of this process
  unsigned pool = 1;            ///< paths in a pool
  unsigned heartbeat_ms = 200;  ///< 0: none
  unsigned heartbeat_misses = 3;
  unsigned switch_limit_ms = 10'000;  ///< so long one end waits for the other's word
  unsigned adrift_limit_ms = 120'000;  ///< so long a vQP waits that left its link for a migration, while its default link did not work
  unsigned return_ms = 3000;  ///< a vQP goes back to its default link when that has stood for so long; 0: it stays

  /// Of vQPs born on `device`.
  Policy policy_of(const std::string& device) const;
  Paths paths_of(const std::string& device) const;
  Atomics atomics_of(const std::string& device) const;
  unsigned backups_of(const std::string& device) const;
  bool any_policy() const;
  /// Goes before what is said of devices.
  void set(const Setting& mine);
};

/// @param process the program's name. @return "" or what is wrong, for people
std::string parse(const std::string& text, const std::string& process, Config& out);

/// What this process is to go by: the file and the environment. Who cannot read the host's file asks migrd for it, at most 2 s.
/// A file that is not there is no error; one that is wrong is said on stderr, and then every policy is off.
Config read_config();

}  // namespace migr::links

#endif
