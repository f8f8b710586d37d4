// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Objects that are on migr.ko's record and of which the process's libmigr does not know: made by a call that it does not stand in front of, or with
// system calls. It would not make such memory again elsewhere, nor find its other objects.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernel_record.h"
#include "migr/proc_wire.h"
#include "status.h"

namespace migr {

/// By how much the record is ahead of what a process has counted (MIGR_FD_COUNT), whenever either was asked: "2 x MR, 1 x CQ". Empty: by nothing.
/// @param record  contexts with their QPs. What was not counted is not compared
std::string unknown_objects(std::span<const ContextRecord> record, std::span<const migr_fd_desc> counted);

/// The same of a process that runs, and may be making and ending objects: it is asked again, until nothing has happened in between, or some times.
/// @param record   read after `counted`
/// @param count    asks it again
/// @param look     reads the record again
/// @return EOPNOTSUPP: `who` has such; what could not be found out in time is no error
Status knows_its_objects(const std::string& who, std::vector<ContextRecord> record, std::vector<migr_fd_desc> counted, const std::function<Result<std::vector<migr_fd_desc>>()>& count,
                         const std::function<Result<std::vector<ContextRecord>>()>& look);

/// EOPNOTSUPP, with what and why.
Error unknown_error(const std::string& who, const std::string& what);

}  // namespace migr
