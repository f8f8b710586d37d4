// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What has to be taken back when a step fails; run in reverse.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "status.h"

namespace migr {

class UndoStack {
 public:
  using Undo = std::function<Status()>;
  /// Each once, in the order in which it was tried.
  struct Undone {
    std::vector<std::string> done, failed;  // failed: why, too
    bool all = true;                        // but what another host, which does not answer, will do by itself
  };
  enum class Where { kHere,
                     kElsewhere };
  /// @param what  is taken back; empty: nothing that is told when it is done
  void push(std::string what, Undo undo, Where where = Where::kHere) { stack_.push_back({std::move(what), std::move(undo), where}); }
  /// Runs all, newest first, also when one fails.
  Undone run() {
    Undone undone;
    std::vector<std::string> not_done;
    while (!stack_.empty()) {
      const Entry e = std::move(stack_.back());
      stack_.pop_back();
      if (const auto s = e.undo(); s) {
        add(undone.done, e.what);
      } else {
        const bool silent = e.where == Where::kElsewhere && unreachable(s.error());
        add(undone.failed, e.what + (silent ? " does not answer, and goes back by itself" : ": " + s.error().text));
        undone.all = undone.all && silent;
        add(not_done, e.what);
      }
    }
    std::erase_if(undone.done, [&](const std::string& what) { return what.empty() || std::find(not_done.begin(), not_done.end(), what) != not_done.end(); });
    return undone;
  }
  void drop() { stack_.clear(); }

 private:
  static void add(std::vector<std::string>& list, std::string text) {
    if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(std::move(text));
  }
  struct Entry {
    std::string what;
    Undo undo;
    Where where;
  };
  std::vector<Entry> stack_;
};

}  // namespace migr
