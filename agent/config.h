// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// /etc/migr/migrd.json: who this host is, who its peers are, where things lie.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "limits.h"
#include "status.h"

namespace migr {

struct Peer {
  std::string name;
  std::string address;  // host:port
  bool operator==(const Peer&) const = default;
};

/// What peers may here.
enum class Right {
  kPeer,      // what every configured peer may
  kRead,      // facts of this host, for doctor
  kPartner,   // switch connections of processes here, and ask for their links
  kToHere,    // move containers and processes to here
  kFromHere,  // be where those of this host are moved to
};
/// Its key in "allow"; empty: it has none.
const char* key_of(Right right);

/// One who may.
struct AllowRule {
  std::string peer;                     // pattern, as of a shell
  std::vector<std::string> containers;  // patterns; none: all
  bool operator==(const AllowRule&) const = default;
};

/// The hosts that this one knows, and what they may here.
struct Hosts {
  std::vector<Peer> peers;                        // may name this host too
  std::map<Right, std::vector<AllowRule>> allow;  // a right that is missing: every peer has it
};

/// Those of a running migrd, which are taken anew (reload.h): who looks at them sees all as it was, or all as it is. Thread: any
class KnownHosts {
 public:
  KnownHosts() : KnownHosts(Hosts()) {}
  KnownHosts(Hosts hosts) : hosts_(std::make_shared<const Hosts>(std::move(hosts))) {}
  KnownHosts(const KnownHosts& other) : hosts_(other.now()) {}
  KnownHosts& operator=(const KnownHosts& other) {
    auto theirs = other.now();
    std::lock_guard lock(mutex_);
    hosts_ = std::move(theirs);
    return *this;
  }
  std::shared_ptr<const Hosts> now() const {
    std::lock_guard lock(mutex_);
    return hosts_;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Hosts> hosts_;
};

/// The directory of links in a Redis server.
struct RedisConfig {
  std::string address;            // "host:port", or the path of its socket; empty: migrds are the directory
  std::string prefix = "migr1:";  // of all its keys
  std::string password_file;      // first line; empty: none
};

struct Config {
  std::string name;              // required
  std::string listen = kListen;  // host:port
  std::string pki = kPkiDir;     // ca.pem, host.pem, host.key
  std::string state_dir = kStateDir;
  std::string run_dir = kRunDir;
  std::string control_socket = kControlSocket;
  std::string runc = "runc";
  std::string runc_root = "/run/runc";
  std::string criu = "criu";            // for processes without a container
  std::string criu_libs;                // folder of migr_plugin.so; empty: CRIU's own
  int criu_log_level = 2;               // of its logs, which are written while a container stands still; 1: errors, 4: everything
  std::string metrics = kMetrics;       // host:port that Prometheus reads; empty: nowhere
  std::string net_hook;                 // empty: containers keep no network of their own
  std::string processor = "same";       // what comes here may have found instructions that are not here: "same" or "any"
  std::string libmigr = kLibmigr;       // what programs preload, if it is this host's; what comes here has to have the same build
  std::string links_file = kLinksFile;  // the host's configuration of links, for processes that cannot read it
  RedisConfig redis;
  std::map<std::string, int> limits;         // of limits.h by their names, in ms; what is not there is as it is there
  std::map<std::string, std::string> fixed;  // every key that the file has but "peers" and "allow", with its JSON
  std::string fault;                         // MIGR_FAULT from the environment
  KnownHosts hosts;

  std::vector<Peer> peers() const { return hosts.now()->peers; }
  std::optional<Peer> peer(const std::string& name) const;
  bool any_processor() const { return processor == "any"; }
};

/// Errors name the file and the key. An unknown key is an error too.
Result<Config> load_config(const std::string& path);
/// Its limits become those of limits.h. Before there are threads
void take_limits(const Config& config);

}  // namespace migr
