// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "phase_lines.h"

#include <algorithm>

#include "summary.h"
#include "text.h"

namespace migr {
namespace {

constexpr char kClear[] = "\r\033[K";
constexpr std::size_t kNameColumns = 11;

}  // namespace

PhaseLines::~PhaseLines() {
  if (in_line_) std::fputs(live_ ? kClear : "\n", out_);
  std::fflush(out_);
}

void PhaseLines::show(const wire::Progress& p, std::optional<double> stop_ms) {
  switch (p.what_case()) {
    case wire::Progress::kPhase: begin(p.phase()); break;
    case wire::Progress::kGoing: going(p.going(), stop_ms); break;
    case wire::Progress::kEnd: end(p.end()); break;
    case wire::Progress::kNote: note(p.note()); break;
    default: break;
  }
  std::fflush(out_);
}

void PhaseLines::name(const std::string& phase) {
  if (live_) std::fputs("\r", out_);
  if (live_ || !in_line_) std::fprintf(out_, "%-10s ", phase.c_str());
}

void PhaseLines::begin(const std::string& phase) {
  said_ms_ = 0;
  name(phase);
  in_line_ = true;
}

void PhaseLines::going(const wire::Going& g, std::optional<double> stop_ms) {
  if (!live_ && g.ms() - said_ms_ < kEveryMs) return;
  said_ms_ = g.ms();
  name(g.phase());
  std::string text = going_text(g, stop_ms);
  // What goes on in the next line would not be written over; and with the last column full, terminals differ in what they clear.
  if (live_) text = cut(text, std::max(columns_of(fileno(out_)), kNameColumns + 3) - kNameColumns - 1);
  std::fprintf(out_, "%s%s", text.c_str(), live_ ? "\033[K" : "\n");
  in_line_ = live_;
}

void PhaseLines::end(const wire::PhaseEnd& e) {
  name(e.phase());
  std::fprintf(out_, "%9.1f ms%s\n", e.ms(), live_ ? "\033[K" : "");
  in_line_ = false;
}

void PhaseLines::note(const std::string& text) {
  std::fprintf(out_, "%s%s\n", live_ ? kClear : "", printable(text).c_str());
  in_line_ = false;
}

}  // namespace migr
