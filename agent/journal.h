// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What survives the end of migrd: a folder with one file per migration, each a message of journal.proto.
#pragma once

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <filesystem>
#include <map>

#include "clock.h"
#include "file_tree.h"
#include "journal.pb.h"
#include "log.h"
#include "status.h"

namespace migr {

/// Thread: any, but one per migration.
template <class Record>
class Journal {
 public:
  explicit Journal(std::string folder) : folder_(std::move(folder)) {
    std::error_code ec;
    std::filesystem::create_directories(folder_, ec);
  }
  /// On the disk before it returns.
  Status save(std::uint32_t id, const Record& r) const {
    std::string text;
    google::protobuf::util::JsonPrintOptions o;
    o.add_whitespace = true;
    if (!google::protobuf::util::MessageToJsonString(r, &text, o).ok()) return Error{EINVAL, "a record that is no JSON"};
    return write_whole(path(id), text);
  }
  /// Also where nothing can be written.
  void remove(std::uint32_t id) const {
    std::error_code ec;
    std::filesystem::remove(path(id), ec);
  }
  /// All that is there, but for what is older than an outcome is kept and `done` with. A file that cannot be read is put aside.
  template <class Done>
  std::map<std::uint32_t, Record> load(std::chrono::seconds keep_for, Done&& done) const {
    std::map<std::uint32_t, Record> all;
    std::error_code ec;
    std::vector<std::filesystem::path> files;
    for (const auto& f : std::filesystem::directory_iterator(folder_, ec)) files.push_back(f.path());
    for (const auto& f : files) {
      if (f.extension() != ".json") continue;
      const std::string text = text_of(f);
      google::protobuf::util::JsonParseOptions o;
      o.ignore_unknown_fields = true;
      Record r;
      if (!google::protobuf::util::JsonStringToMessage(text, &r, o).ok()) {
        spdlog::error("{} cannot be read; it is put aside as {}.bad", f.string(), f.string());
        std::filesystem::rename(f, f.string() + ".bad", ec);
        continue;
      }
      const bool old = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(f, ec) > keep_for;
      if (old && done(r)) {
        std::filesystem::remove(f, ec);
        continue;
      }
      all[static_cast<std::uint32_t>(std::strtoul(f.stem().c_str(), nullptr, 16))] = std::move(r);
    }
    return all;
  }

 private:
  std::string path(std::uint32_t id) const { return folder_ + "/" + migration_text(id) + ".json"; }
  const std::string folder_;
};

/// Long enough for the last host that may ask. Until then every host can tell what became of a migration.
inline constexpr std::chrono::hours kKeepOutcome{7 * 24};

}  // namespace migr
