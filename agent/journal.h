// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What survives the end of migrd: a folder with one file per migration, each a message of journal.proto.
#pragma once

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <set>

#include "clock.h"
#include "file_tree.h"
#include "journal.pb.h"
#include "log.h"
#include "status.h"

namespace migr {

/// What there was of migrations when a journal was loaded, and could not be read: nobody knows here what became of them.
class Unread {
 public:
  void add(std::uint32_t id) { ids_.insert(id); }
  void add_all() { all_ = true; }
  /// EIO: it is one of them.
  Status of(std::uint32_t id) const {
    if (!all_ && !ids_.contains(id)) return {};
    return Error{EIO, "what was written down here of migration " + migration_text(id) + " cannot be read; the log of this migrd says why"};
  }

 private:
  std::set<std::uint32_t> ids_;
  bool all_ = false;
};

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
  /// All that is there, but for what is older than an outcome is kept and `done` with. A record that makes no sense is put aside as ID.json.bad.
  /// @param unread  gets what is not in it, for as long as such a file is there
  template <class Done>
  std::map<std::uint32_t, Record> load(std::chrono::seconds keep_for, Done&& done, Unread* unread = nullptr) const {
    std::map<std::uint32_t, Record> all;
    std::error_code ec;
    std::vector<std::filesystem::path> files;
    for (auto f = std::filesystem::directory_iterator(folder_, ec); !ec && f != std::filesystem::directory_iterator(); f.increment(ec)) files.push_back(f->path());
    if (ec && ec != std::errc::no_such_file_or_directory) {
      spdlog::error("{}: {}; who asks for a migration that is not known is told so", folder_, ec.message());
      if (unread) unread->add_all();
    }
    const auto id_of = [](const std::filesystem::path& f) { return static_cast<std::uint32_t>(std::strtoul(f.filename().c_str(), nullptr, 16)); };
    const auto lost = [&](const std::filesystem::path& f, const std::string& why) {
      spdlog::error("{}: {}; who asks for it gets an error", f.string(), why);
      if (unread) unread->add(id_of(f));
    };
    for (const auto& f : files) {
      if (f.extension() == ".bad") lost(f, "could not be read by an earlier migrd; remove it once nobody needs to know");
      if (f.extension() != ".json") continue;
      const auto text = read_whole(f);
      if (!text) {
        lost(f, text.error().text);
        continue;
      }
      google::protobuf::util::JsonParseOptions o;
      o.ignore_unknown_fields = true;
      Record r;
      if (!google::protobuf::util::JsonStringToMessage(*text, &r, o).ok()) {
        lost(f, "no record; it is put aside as " + f.filename().string() + ".bad");
        std::filesystem::rename(f, f.string() + ".bad", ec);
        continue;
      }
      const bool old = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(f, ec) > keep_for;
      if (old && done(r)) {
        std::filesystem::remove(f, ec);
        continue;
      }
      all[id_of(f)] = std::move(r);
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
