// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// libmigr's own side of links_wire.h, for link_contract_test. Behind functions, because libmigr's headers and the agent's
// have other things of the same name.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "migr/links_wire.h"

namespace contract {

class Library {
 public:
  /// Connects where MIGR_LINKS_SOCKET says.
  explicit Library(const std::array<std::uint8_t, 16>& instance);
  ~Library();
  unsigned life();
  int fd() const;
  void pushes(std::vector<migr_links_port>& ports, bool& knocked);
  int links(std::span<const migr_links_link> all);
  int publish(std::span<const migr_links_vqp> some);
  int withdraw(std::span<const migr_links_name> some);
  int lookup(std::span<const migr_links_name> names, std::vector<migr_links_found>& out);
  int channel(std::span<const migr_links_channel> own, std::vector<migr_links_channel>& out);
  int end_channels(std::span<const migr_links_channel> some);
  int states(std::span<const migr_links_vqp_state> some);
  int switched(std::span<const migr_links_switch> some);
  int outside(std::span<const migr_text_range> ranges);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace contract
