// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The kernel's record for people and for programs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "json.h"
#include "kernel_record.h"

namespace migr {

/// The container that a process is in; "": none.
using ContainerOf = std::function<std::string(pid_t)>;

std::string ps_text(const std::vector<ContextRecord>& ctxs, const ContainerOf& container_of);
Json ps_json(const std::vector<ContextRecord>& ctxs, const ContainerOf& container_of);
std::string show_text(const std::vector<ContextRecord>& ctxs);
Json show_json(const std::vector<ContextRecord>& ctxs);

}  // namespace migr
