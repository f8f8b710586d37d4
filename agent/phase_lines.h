// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrctl shows while a migration goes on: a line for each phase. How far it is stands there on a terminal; elsewhere it
// gets a line of its own from time to time.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

#include "wire.pb.h"

namespace migr {

class PhaseLines {
 public:
  /// @param live  `out` is a terminal (may_rewrite() of text.h)
  PhaseLines(FILE* out, bool live) : out_(out), live_(live) {}
  /// In the middle of a phase: whatever is printed next begins a line.
  ~PhaseLines();
  /// @param stop_ms  how long the program is expected to stand still
  void show(const wire::Progress& p, std::optional<double> stop_ms);

 private:
  void name(const std::string& phase);
  void begin(const std::string& phase);
  void going(const wire::Going& g, std::optional<double> stop_ms);
  void end(const wire::PhaseEnd& e);
  void note(const std::string& text);
  static constexpr double kEveryMs = 10'000;
  FILE* const out_;
  const bool live_;
  bool in_line_ = false;
  double said_ms_ = 0;
};

}  // namespace migr
