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
  void push(std::string what, Undo undo) { stack_.push_back({std::move(what), std::move(undo)}); }
  /// Runs all, newest first, also when one fails; says which failed.
  std::vector<std::string> run() {
    std::vector<std::string> failed;
    while (!stack_.empty()) {
      const Entry e = std::move(stack_.back());
      stack_.pop_back();
      if (auto s = e.undo(); !s) {
        std::string text = e.what + ": " + s.error().text;
        if (std::find(failed.begin(), failed.end(), text) == failed.end()) failed.push_back(std::move(text));
      }
    }
    return failed;
  }
  void drop() { stack_.clear(); }

 private:
  struct Entry {
    std::string what;
    Undo undo;
  };
  std::vector<Entry> stack_;
};

}  // namespace migr
