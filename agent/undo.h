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
  };
  /// @param what  is taken back; empty: nothing that is told when it is done
  void push(std::string what, Undo undo) { stack_.push_back({std::move(what), std::move(undo)}); }
  /// Runs all, newest first, also when one fails.
  Undone run() {
    Undone all;
    std::vector<std::string> not_done;
    while (!stack_.empty()) {
      const Entry e = std::move(stack_.back());
      stack_.pop_back();
      if (const auto s = e.undo(); s) {
        add(all.done, e.what);
      } else {
        add(all.failed, e.what + ": " + s.error().text);
        add(not_done, e.what);
      }
    }
    std::erase_if(all.done, [&](const std::string& what) { return what.empty() || std::find(not_done.begin(), not_done.end(), what) != not_done.end(); });
    return all;
  }
  void drop() { stack_.clear(); }

 private:
  static void add(std::vector<std::string>& list, std::string text) {
    if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(std::move(text));
  }
  struct Entry {
    std::string what;
    Undo undo;
  };
  std::vector<Entry> stack_;
};

}  // namespace migr
