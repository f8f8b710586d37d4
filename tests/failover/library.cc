// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "library.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "model.h"
#include "store.h"

namespace ends {

std::filesystem::path folder() { return std::filesystem::temp_directory_path() / ("failover." + std::to_string(getpid())); }

void mend_all() {
  for (const int link : {0, 1, 2}) model_mend(link);
}

Library::Library(char host, const std::string& policy, const std::string& paths, unsigned return_ms, unsigned adrift_ms, unsigned switch_ms, bool relays, bool third, unsigned heartbeat_ms, unsigned heartbeat_misses) {
  static int count = 0;  // a name that was loaded before would be the same library
  std::filesystem::create_directories(folder());
  const auto copy = folder() / (std::string("libmigr-") + host + "-" + std::to_string(count++) + ".so"), links = folder() / (std::string("links-") + host + ".json");
  std::filesystem::copy_file(MIGR_LIBRARY, copy, std::filesystem::copy_options::overwrite_existing);
  std::ofstream(links) << R"({"links": [{"device": ")" << host << R"(0", "gid_index": 0}, {"device": ")" << host
                       << R"(1", "gid_index": 0})" << (third ? std::string(R"(, {"device": ")") + host + R"(2", "gid_index": 0}], "backups": 2)" : "]") << R"(, "policy": ")" << policy << R"(", "paths": ")" << paths << R"(", "unique_swap": )" << (relays ? "false" : "true") << R"(, "atomics": ")" << (relays ? "relayed" : "direct") << R"(", "switch_limit_ms": )" << switch_ms << R"(, "heartbeat_ms": )" << heartbeat_ms << R"(, "heartbeat_misses": )" << heartbeat_misses << R"(, "adrift_limit_ms": )" << adrift_ms << R"(, "return_ms": )" << return_ms << "}";
  setenv("MIGR_LINKS", links.c_str(), 1);
  setenv("MIGR_TABLES", "private", 1);
  setenv("MIGR_PROC_SOCKET", (folder() / "none").c_str(), 1);
  so_ = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!so_) throw std::runtime_error(dlerror());
  int n;
  ibv_device** list = ibv_get_device_list(&n);
  for (int i = 0; i < n; ++i)
    if (list[i]->name == std::string(1, host) + "0") context = verb<ibv_context*(ibv_device*)>("ibv_open_device")(list[i]);
  std::filesystem::remove(copy);
}

bool all_stand(std::uint32_t from) { return (from > 0 || store_all_stand(0)) && store_all_stand(1) && store_all_stand(2); }

}  // namespace ends
