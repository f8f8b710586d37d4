// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// /etc/migr/migrd.json: who this host is, who its peers are, where things lie.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "limits.h"
#include "status.h"

namespace migr {

struct Peer {
  std::string name;
  std::string address;  // host:port
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
  std::vector<Peer> peers;       // may name this host too
  std::string pki = kPkiDir;     // ca.pem, host.pem, host.key
  std::string state_dir = kStateDir;
  std::string run_dir = kRunDir;
  std::string control_socket = kControlSocket;
  std::string runc = "runc";
  std::string runc_root = "/run/runc";
  std::string criu = "criu";                      // for processes without a container
  std::string criu_libs;                          // folder of migr_plugin.so; empty: CRIU's own
  int criu_log_level = 2;                         // of its logs, which are written while a container stands still; 1: errors, 4: everything
  std::string metrics = kMetrics;                 // host:port that Prometheus reads; empty: nowhere
  std::string net_hook;                           // empty: containers keep no network of their own
  std::string processor = "same";                 // what comes here may have found instructions that are not here: "same" or "any"
  std::string libmigr = kLibmigr;                 // what programs preload; only looked at by migrctl doctor
  std::string links_file = kLinksFile;            // the host's configuration of links, for processes that cannot read it
  std::map<Right, std::vector<AllowRule>> allow;  // a right that is missing: every peer has it
  RedisConfig redis;
  std::string fault;  // MIGR_FAULT from the environment

  const Peer* peer(const std::string& name) const;
  bool any_processor() const { return processor == "any"; }
};

/// Errors name the file and the key. An unknown key is an error too. Its "limits" become those of limits.h.
Result<Config> load_config(const std::string& path);

}  // namespace migr
