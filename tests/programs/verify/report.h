// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a run tells: bytes per 10 ms, the present state for others to watch, the closing JSON line.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "options.h"

namespace verify {

/// Wall-clock time in microseconds. (The monotonic clock is another one on the host that a process was moved to.)
std::int64_t now_us();

/// Bytes per bucket, in memory until the end, so that no file is open while the process is moved.
class Samples {
 public:
  void add(std::int64_t us, std::uint64_t bytes);
  /// One "EPOCH_MS BYTES" line per bucket in which something came. @return false with errno
  bool write(const std::string& file) const;
  std::int64_t longest_gap_us() const { return gap_us_; }
  std::int64_t gap_start_us() const { return gap_start_us_; }

 private:
  struct Bucket {
    std::int64_t ms;
    std::uint64_t bytes;
  };
  std::vector<Bucket> buckets_;
  std::int64_t last_us_ = 0, gap_us_ = 0, gap_start_us_ = 0;
};

/// A JSON object, built field by field in order.
class Json {
 public:
  Json& field(const char* name, std::uint64_t v) { return raw(name, std::to_string(v)); }
  Json& field(const char* name, double v);
  Json& field(const char* name, const std::string& v);
  std::string text() const { return "{" + body_ + "}"; }

 private:
  Json& raw(const char* name, const std::string& v);
  std::string body_;
};

/// The closing line goes to stdout and to those of `files` that have a name. @return the program's exit status
int close_report(const Faults& faults, const std::string& line, const std::vector<std::string>& files);

/// What a main() does: runs, and says on stderr why that could not be set up. @return its exit status
template <class Run>
int run_program(const char* name, Run&& run) {
  try {
    return run();
  } catch (const std::runtime_error& e) {
    std::fprintf(stderr, "%s: %s\n", name, e.what());
    return kExitSetup;
  }
}

/// Writes a file as a whole: readers see the old or the new content. @return false with errno
bool write_file(const std::string& file, const std::string& text);

}  // namespace verify
