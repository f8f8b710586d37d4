// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What /proc says about a process. Thread: any.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "status.h"

namespace migr {

/// Differs for every boot of this host.
std::string boot_of_host();

/// Differs for every process that ever has this number: the boot, and when in it that one began. Empty: nobody has it.
std::string life_of(pid_t pid);
/// The process and its descendants, the process first. Empty: it has ended.
std::vector<pid_t> tree_of(pid_t pid);
/// One that has ended descends from all.
bool descends(pid_t pid, pid_t ancestor);
/// Neither gone nor a zombie.
bool process_lives(pid_t pid);
/// By a signal.
bool process_stopped(pid_t pid);
/// Those of the caller's user and PID namespace that are told to do one of these (an argument each) and whose command line has this text in it.
/// Not the caller.
std::vector<pid_t> processes_told(std::initializer_list<std::string_view> verbs, const std::string& text);
/// Its working directory is this folder, or below it.
bool works_in(pid_t pid, const std::string& folder);
/// The number of the PID namespace of the container that a process lives in; of several in each other, the outermost. 0: it lives in
/// the caller's.
Result<std::uint64_t> container_namespace_of(pid_t pid);
/// What a process, or a thread, is called in each PID namespace that it lives in, the caller's first. Empty: it has ended.
std::vector<pid_t> numbers_in_namespaces(pid_t pid);
/// It has memory of hugetlbfs, of which MAP_HUGETLB is, too. Transparent huge pages are not.
bool has_huge_pages(pid_t pid);
/// What it has open: each descriptor, and what that leads to, as in /proc/PID/fd. None: it has ended.
void each_descriptor(pid_t pid, const std::function<void(int fd, const std::string& to)>& f);
/// A descriptor of an eventfd that is a semaphore (EFD_SEMAPHORE). Nothing: it has none, or has ended, or the kernel does not say (before 6.5).
std::optional<int> semaphore_of(pid_t pid);
/// Its command; empty: it has ended.
std::string name_of(pid_t pid);

/// Of the process, of its descendants, and of all their threads. Empty: it has ended.
std::vector<pid_t> numbers_of(pid_t pid);
/// Something has this number: a thread, or what has ended and nobody has waited for, too.
bool number_taken(pid_t number);
/// Numbers are given one after the other, and from the beginning again after the last one.
/// @param last  the one that was given last
/// @param max   /proc/sys/kernel/pid_max
/// @return after which one it has to go on, so that none of `numbers` comes up soon; nothing: none will
std::optional<pid_t> counter_past(const std::vector<pid_t>& numbers, pid_t last, pid_t max);
/// New processes get other numbers than these for long, if they can.
Status pass_over(const std::vector<pid_t>& numbers);

}  // namespace migr
