// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#pragma once

#include <functional>
#include <future>
#include <vector>

#include "log.h"
#include "status.h"

namespace migr {

/// All at once: what one waits for, the others need not wait for, too. The first of `todo` runs on the caller's thread. What
/// they log has the fields of the caller (log.h).
/// @return the first error, in the order of `todo`, after the end of all
inline Status parallel(const std::vector<std::function<Status()>>& todo) {
  std::vector<std::future<Status>> running;
  for (std::size_t i = 1; i < todo.size(); i++) running.push_back(std::async(std::launch::async, with_log_fields(todo[i])));
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
