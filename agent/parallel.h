// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <functional>
#include <future>
#include <system_error>
#include <vector>

#include "log.h"
#include "status.h"

namespace migr {

/// In a thread of its own; where there is none for it, on the thread of who waits for it, then. Whose future is never waited for may never be done.
template <class F>
auto in_own_thread(const F& f) {
  try {
    return std::async(std::launch::async, f);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, f);
  }
}

/// All at once: what one waits for, the others need not wait for, too. The first of `todo` runs on the caller's thread, and behind it what gets none of its own. What
/// they log has the fields of the caller (log.h).
/// @return the first error, in the order of `todo`, after the end of all
inline Status parallel(const std::vector<std::function<Status()>>& todo) {
  std::vector<std::future<Status>> running;
  for (std::size_t i = 1; i < todo.size(); i++) running.push_back(in_own_thread(with_log_fields(todo[i])));
  Status first = todo.empty() ? Status() : todo[0]();
  for (auto& r : running)
    if (auto s = r.get(); first && !s) first = s;
  return first;
}

/// The same with one call for each of a list.
template <class List, class F>
Status parallel_for(List& list, const F& f) {
  std::vector<std::function<Status()>> todo;
  for (auto& x : list) todo.push_back([&] { return f(x); });
  return parallel(todo);
}

}  // namespace migr
