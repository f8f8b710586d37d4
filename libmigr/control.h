/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The control thread: speaks include/migr/proc_wire.h with migrd and drives the switchover engine. */
#ifndef MIGR_CONTROL_H
#define MIGR_CONTROL_H

#include <array>
#include <cstdint>
#include <vector>

#include "../include/migr/proc_wire.h"

namespace migr::control {

/// Starts the thread once (first user context). All signals are blocked in it. Thread: any, Registry's lock held.
void start();

/// Random name of this process, the same after a migration; zero: there is none. After start().
std::array<std::uint8_t, 16> instance();

/// Code in which a thread counts as inside a data-path call. Thread: any, without the Registry's lock.
std::vector<migr_text_range> text_ranges();

/// After fork, in the child: the thread is not there; the child goes on without migrd. Thread: the child's only one.
void after_fork();

}  // namespace migr::control

#endif
