// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <syslog.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace migr {
namespace {

// systemd names the socket; it may be inherited by what writes elsewhere.
bool stderr_is_journal() {
  const char* stream = getenv("JOURNAL_STREAM");
  struct stat st;
  return stream && fstat(STDERR_FILENO, &st) == 0 && stream == std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino);
}

int priority(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
    case spdlog::level::debug: return LOG_DEBUG;
    case spdlog::level::info: return LOG_INFO;
    case spdlog::level::warn: return LOG_WARNING;
    case spdlog::level::err: return LOG_ERR;
    default: return LOG_CRIT;
  }
}

class Priority : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& m, const std::tm&, spdlog::memory_buf_t& to) override {
    const std::string s = "<" + std::to_string(priority(m.level)) + ">";
    to.append(s.data(), s.data() + s.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<Priority>(); }
};

}  // namespace

void log_to_stderr(const char* name, bool verbose) {
  auto logger = spdlog::stderr_color_mt(name);
  if (stderr_is_journal()) {
    auto lines = std::make_unique<spdlog::pattern_formatter>();
    lines->add_flag<Priority>('*').set_pattern("%*%v");
    logger->set_formatter(std::move(lines));
  }
  spdlog::set_default_logger(std::move(logger));
  spdlog::set_level(verbose ? spdlog::level::debug : spdlog::level::info);
  spdlog::flush_on(spdlog::level::info);
}

}  // namespace migr
