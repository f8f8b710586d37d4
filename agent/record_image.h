// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migr.img: the record of processes, by the host-side restore API.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "process_session.h"

namespace migr {

struct DescribedProcess {
  pid_t pid;
  Instance instance;
  std::vector<migr_fd_desc> fds;
};

/// Dumps, checks that it can be restored, writes DIR/migr.img.
Status write_record_image(const std::vector<DescribedProcess>& processes, const std::string& dir);

}  // namespace migr
