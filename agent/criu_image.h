// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// An image of CRIU: two numbers that say what it is, then messages, each after its length.
#pragma once

#include <google/protobuf/message.h>

#include <cstdint>
#include <string>

#include "status.h"

namespace migr {

/// One that is read.
class CriuImage {
 public:
  explicit CriuImage(const std::string& path);
  bool is(std::uint32_t magic);
  bool next(google::protobuf::Message& m);
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  bool number(std::uint32_t& n);
  const std::string bytes_;
  std::size_t at_ = 0;
};

/// One that is written.
class NewCriuImage {
 public:
  explicit NewCriuImage(std::uint32_t magic);
  void add(const google::protobuf::Message& m);
  /// In the place of the one that has the name, with its mode.
  Status replace(const std::string& path) const;

 private:
  void number(std::uint32_t n) { bytes_.append(reinterpret_cast<const char*>(&n), sizeof n); }
  std::string bytes_;
};

Error damaged_image(const std::string& path);

}  // namespace migr
