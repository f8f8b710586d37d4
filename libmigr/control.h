/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The control thread: speaks include/migr/proc_wire.h with migrd and drives the switchover engine. */
#ifndef MIGR_CONTROL_H
#define MIGR_CONTROL_H

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "../include/migr/proc_wire.h"

namespace migr::control {

/// Starts the thread once (first user context). All signals are blocked in it. Thread: any, Registry's lock held.
void start();
/// Before anything is made that a fork must not find half made. Thread: any
void begin();

/// Random name of this process, the same after a migration; zero: there is none. After start().
std::array<std::uint8_t, 16> instance();

/// Code in which a thread counts as inside a data-path call. Thread: any, without the Registry's lock.
std::vector<migr_text_range> text_ranges();

/// Asks migrd on a connection of its own. Thread: any, without the Registry's lock; blocks for at most `limit_ms`.
/// @param answer  its records
/// @return 0, what migrd said, or ENOTCONN, ETIMEDOUT, EPROTO
int ask(std::uint16_t type, std::uint64_t arg, const void* records, std::size_t count, std::size_t record_size, int limit_ms, std::vector<char>& answer);
template <class Record, class Answer>
int ask(std::uint16_t type, std::uint64_t arg, std::span<const Record> records, std::vector<Answer>& answer, int limit_ms) {
  std::vector<char> bytes;
  const int err = ask(type, arg, records.data(), records.size(), sizeof(Record), limit_ms, bytes);
  if (err) return err;
  if (bytes.size() % sizeof(Answer)) return EPROTO;
  answer.resize(bytes.size() / sizeof(Answer));
  if (!answer.empty()) std::memcpy(answer.data(), bytes.data(), bytes.size());
  return 0;
}

}  // namespace migr::control

#endif
