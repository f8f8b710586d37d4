// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "report.h"

#include <cstdio>
#include <ctime>

namespace verify {
namespace {
constexpr std::int64_t kBucketMs = 10;
}

std::int64_t now_us() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1000000 + t.tv_nsec / 1000;
}

void Samples::add(std::int64_t us, std::uint64_t bytes) {
  const std::int64_t ms = us / 1000 / kBucketMs * kBucketMs;
  if (buckets_.empty() || buckets_.back().ms != ms) buckets_.push_back({ms, 0});
  buckets_.back().bytes += bytes;
  if (last_us_ && us - last_us_ > gap_us_) {
    gap_us_ = us - last_us_;
    gap_start_us_ = last_us_;
  }
  last_us_ = us;
}

bool Samples::write(const std::string& file) const {
  std::string out;
  for (const Bucket& b : buckets_) out += std::to_string(b.ms) + " " + std::to_string(b.bytes) + "\n";
  return write_file(file, out);
}

Json& Json::raw(const char* name, const std::string& v) {
  body_ += (body_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + v;
  return *this;
}
Json& Json::field(const char* name, double v) {
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", v);
  return raw(name, text);
}
Json& Json::field(const char* name, const std::string& v) {
  std::string quoted = "\"";
  for (const char c : v) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return raw(name, quoted + "\"");
}

bool write_file(const std::string& file, const std::string& text) {
  const std::string part = file + ".part";
  std::FILE* f = std::fopen(part.c_str(), "we");
  if (!f) return false;
  const bool written = std::fwrite(text.data(), 1, text.size(), f) == text.size();
  return (std::fclose(f) == 0) & written && std::rename(part.c_str(), file.c_str()) == 0;
}

int close_report(const Faults& faults, const std::string& line, const std::vector<std::string>& files) {
  std::fputs(line.c_str(), stdout);
  for (const std::string& file : files)
    if (!file.empty()) write_file(file, line);
  return faults.total() ? kExitFaults : kExitOk;
}

}  // namespace verify
