/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What suspension_closed_test and its victim parked_poster share: one page, by memfd. */
#ifndef MIGR_TESTS_PARKED_H
#define MIGR_TESTS_PARKED_H

#include <atomic>
#include <cstdint>

struct Parked {
  /* test -> victim */
  std::atomic<std::int32_t> park_at;  ///< post once, stopping before instruction number park_at of it; -1: end
  std::atomic<std::uint32_t> go;      ///< round to start
  std::atomic<std::uint32_t> release; ///< round in which the parked thread may go on
  /* victim -> test */
  std::atomic<std::uint32_t> parked;  ///< round in which the thread stands at park_at
  std::atomic<std::uint32_t> done;    ///< round whose post has returned
  std::atomic<std::int32_t> steps;    ///< instructions of the last post
  std::atomic<std::int32_t> error;    ///< what it returned
  std::atomic<std::uint32_t> in_queue;   ///< work requests that the provider was ever given, drain markers included
  std::atomic<std::uint32_t> completed;  ///< completions that the application has polled
  std::atomic<std::uint32_t> polls;      ///< rounds of the polling thread
  std::atomic<std::uint32_t> out_of_order;  ///< completions whose wr_id was not the next
};

#endif
