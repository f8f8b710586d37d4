// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "log.h"

#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <syslog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <string_view>

namespace migr {
namespace {

std::string host_name;

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

std::string time_text(spdlog::log_clock::time_point at) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(at.time_since_epoch()).count();
  const time_t s = ms / 1000;
  tm t{};
  char text[32] = "";
  gmtime_r(&s, &t);
  strftime(text, sizeof text, "%FT%T", &t);
  return fmt::format("{}.{:03}Z", text, ms % 1000);
}

// As a string of JSON has it: what others have named must not begin a line or a field of its own.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
      case '\\': (out += '\\') += c; break;
      case '\n': out += "\\n"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') out += fmt::format("\\u{:04x}", c);
        else out += c;
    }
  }
  return out + '"';
}

std::string value(std::string_view text) {
  const auto plain = [](unsigned char c) { return std::isalnum(c) || std::string_view("._:/-+@").find(static_cast<char>(c)) != std::string_view::npos; };
  return !text.empty() && std::all_of(text.begin(), text.end(), plain) ? std::string(text) : quoted(text);
}

class Pairs : public spdlog::formatter {
 public:
  explicit Pairs(bool journal) : journal_(journal) {}
  void format(const spdlog::details::log_msg& m, spdlog::memory_buf_t& to) override {
    const LogFields& f = log_fields();
    std::string line = journal_ ? fmt::format("<{}>", priority(m.level)) : "time=" + time_text(m.time) + " ";
    const auto level = spdlog::level::to_string_view(m.level);
    line += "level=" + std::string(level.data(), level.size());
    const auto add = [&line](const char* key, const std::string& text) { ((line += ' ') += key) += value(text); };
    if (!host_name.empty()) add("host=", host_name);
    if (f.migration) add("migration=", migration_text(f.migration));
    if (!f.peer.empty()) add("peer=", f.peer);
    if (!f.phase.empty()) add("phase=", f.phase);
    if (f.ms) line += fmt::format(" ms={:.1f}", *f.ms);
    line += " msg=" + quoted({m.payload.data(), m.payload.size()}) + "\n";
    to.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<Pairs>(journal_); }

 private:
  const bool journal_;
};

}  // namespace

void log_to_stderr(const char* name, bool verbose) {
  auto logger = spdlog::stderr_logger_mt(name);
  logger->set_formatter(std::make_unique<Pairs>(stderr_is_journal()));
  spdlog::set_default_logger(std::move(logger));
  spdlog::set_level(verbose ? spdlog::level::debug : spdlog::level::info);
  spdlog::flush_on(spdlog::level::info);
}

void set_log_host(const std::string& host) { host_name = host; }

LogFields& log_fields() {
  thread_local LogFields fields;
  return fields;
}

bool SaidRarely::due(const std::string& what) {
  constexpr auto kSayAgain = std::chrono::minutes(1);
  constexpr std::size_t kMostSaid = 1024;  // of names that others make up
  std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (said_.size() >= kMostSaid) said_.clear();
  const auto [said, first] = said_.try_emplace(what, now);
  const bool is = first || now - said->second > kSayAgain;
  if (is) said->second = now;
  return is;
}

std::string migration_text(std::uint32_t id) { return fmt::format("{:08x}", id); }

}  // namespace migr
