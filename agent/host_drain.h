// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Emptying a host: what has RDMA here, where it would go, what stays and why. For `migrctl drain`, which asks migrd for each container.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "json.h"
#include "record_text.h"
#include "status.h"
#include "wire.pb.h"

namespace migr {

/// What has RDMA resources here.
struct Occupants {
  struct Process {
    pid_t pid;  // 0: it has ended; each context that a child of it keeps open is one
    std::string comm;
    std::uint32_t ctx_id = 0;
    std::string device{};
  };
  std::vector<std::string> containers;  // in the order of their names
  std::vector<Process> processes;       // that are in none
};
/// But for migrd itself, which tries paths.
Occupants occupants(const std::vector<ContextRecord>& ctxs, const ContainerOf& container_of);

struct HostDrain {
  struct Stays {
    std::string who, why;
  };
  std::vector<std::string> to;              // in the order in which they are asked
  std::vector<wire::PlanReply> would_move;  // to where its summary says
  std::vector<wire::Summary> moved;
  std::vector<Stays> stays;
};

/// @return that would move; an error if it cannot be asked
using PlanOf = std::function<Result<wire::PlanReply>(const std::string& container, const std::string& to)>;
/// Each container goes to the first of the hosts that takes it. What is in no container stays. Touches nothing.
HostDrain plan_drain(const Occupants& all, const std::vector<std::string>& to, const PlanOf& plan);

/// Afterwards: what stays is what is here still, or has come meanwhile.
void note_left(HostDrain& d, const Occupants& left);
/// Nothing stays, and nothing went wrong after it had moved.
bool all_well(const HostDrain& d);

/// While `name` is being moved: what becomes of it when the command is ended, as with Ctrl-C. Without an end of line.
/// @param left  behind it, none of which is begun then
std::string drain_ends_text(const std::string& name, std::size_t left);
/// Before: what would move, and what would not, and how many.
std::string drain_plan_text(const HostDrain& d);
/// After.
std::string drain_text(const HostDrain& d);
/// What stays and what went wrong, without an end of line. Empty: all_well().
std::string what_is_wrong(const HostDrain& d);
Json drain_json(const HostDrain& d);

}  // namespace migr
