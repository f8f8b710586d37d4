// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What there is of migr on this host. What it means: doctor.h.
#pragma once

#include <string>
#include <vector>

#include "config.h"
#include "path_trial.h"
#include "peer_link.h"

namespace migr {

namespace links {
struct Config;
}

using RepeatedDevices = google::protobuf::RepeatedPtrField<wire::DeviceFacts>;

/// Why a configuration of links protects nothing on any host, a line for each reason. Empty: it protects something.
std::vector<std::string> without_effect(const links::Config& configured);

/// What of configured links a host with these devices does not have, a line for each link.
std::vector<std::string> missing_of(const links::Config& configured, const RepeatedDevices& devices);

/// Runs criu and runc for their versions; touches nothing. What cannot be found out is an error in its place.
/// @param version      of whoever asks
/// @param image_bytes  of a checkpoint that there has to be room for
wire::HostFacts facts_of(const Config& config, const wire::VersionReply& version, std::uint64_t image_bytes);

/// Memory that the processes with RDMA resources here have filled: a checkpoint of them all.
std::uint64_t rdma_filled_bytes();

struct NamedPath {
  std::string name;  // "path DEVICE/PORT", by the port of here
  PathToTry path;
  PathTried result{};
};

struct PeerAnswer {
  std::string name, address;
  Result<wire::HostFacts> facts = Error{};
  std::int64_t ahead_ms = 0;          // of its clock
  std::vector<NamedPath> tried = {};  // those of paths_between() (doctor.h), if they could be
};
/// All at the same time. ENOENT: no such peer in the configuration; EPROTONOSUPPORT: its migrd is older.
std::vector<PeerAnswer> ask_peers(Peers& peers, const std::vector<std::string>& names, std::uint64_t image_bytes);

}  // namespace migr
