// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

namespace migr {

/// Gives spdlog a logger that writes to standard error. Where that is systemd's journal, a line has no time of its own but
/// its level in front, as sd-daemon(3) has it, so that `journalctl -p warning` finds what matters.
/// Thread: before there is a second one.
void log_to_stderr(const char* name, bool verbose);

}  // namespace migr
