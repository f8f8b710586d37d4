// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What processes of all hosts have told of their links. What is on this host is in LinkTable; an engine finds the rest.
// Fail closed: what an engine cannot know is EHOSTUNREACH with a text that names who does not answer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "link_table.h"

namespace migr {

/// Thread: any; calls last until the engine's limits run out.
class LinkDirectory {
 public:
  explicit LinkDirectory(LinkTable& table) : table_(table) {}
  virtual ~LinkDirectory() = default;

  struct Found {
    std::vector<migr_links_found> records;
    std::string text;  // of the first that is neither known nor to be asked again
  };
  Found lookup(std::span<const VqpName> names);

  struct Met {
    std::vector<migr_links_channel> records;
    std::string text;
  };
  /// `ends` were offered to the table before. A status that an end has already stays.
  Met meet(const Instance& who, std::span<const migr_links_channel> ends);

  /// "peers", "redis at 10.0.0.1:6379"
  virtual std::string name() const = 0;
  /// Empty: it answers, as far as is known.
  virtual std::string error() const = 0;

 protected:
  /// @return status 0, EAGAIN, ENOENT or EHOSTUNREACH each; what the text is about
  struct Answer {
    int status = EAGAIN;
    std::string text;
    wire::LinkFound found;
  };
  virtual std::vector<Answer> find_elsewhere(std::span<const VqpName> names) = 0;
  struct End {
    int status = EAGAIN;
    std::string text;
    wire::LinkChannelAnswer answer;  // if status is 0
  };
  virtual std::vector<End> meet_elsewhere(std::span<const wire::LinkChannel> ends) = 0;

  LinkTable& table_;
};

}  // namespace migr
