// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// /etc/migr/links.json, which migrd hands to processes that cannot read it themselves.
#include "libmigr/links/config.h"

#include "seeds.h"

std::vector<std::string> seeds() {
  return {R"({"links": [{"device": "mlx5_0", "port": 1, "gid_index": 3}, {"device": "mlx5_1"}], "policy": "exact", "paths": "cached", "atomics": "relayed",
             "devices": {"mlx5_1": "off"}, "processes": {"fuzz": "resend", "kv": {"policy": "off", "paths": "rebuild", "atomics": "direct"}}, "unique_swap": ["fuzz"], "pool": 2, "heartbeat_ms": 200,
             "heartbeat_misses": 3, "switch_limit_ms": 10000, "return_ms": 3000, "adrift_limit_ms": 120000})",
          R"({"links": [], "unique_swap": true})",
          R"({"links":[{"device":"a"},{"device":"b"},{"device":"c"},{"device":"d"},{"device":"e"},{"device":"f"},{"device":"g"},{"device":"h"}]})"};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace migr::links;
  Config c;
  const std::string wrong = parse(std::string(reinterpret_cast<const char*>(data), size), "fuzz", c);
  if (!wrong.empty()) return 0;
  always(c.links.size() <= kMaxLinks, "no more links than there may be");
  for (const auto& l : c.links) {
    always(!l.device.empty() && l.port, "a link has a device and a port");
    name(c.policy_of(l.device));
    name(c.paths_of(l.device));
    name(c.atomics_of(l.device));
  }
  return 0;
}
