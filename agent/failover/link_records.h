// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Records of links_wire.h: checked, compared, and as other hosts and Redis get them (wire.proto).
#pragma once

#include <array>
#include <compare>
#include <optional>
#include <string>
#include <string_view>

#include "../process_session.h"
#include "migr/links_wire.h"
#include "wire.pb.h"

namespace migr {

using Gid = std::array<std::uint8_t, 16>;

/// The name of a vQP for everybody.
struct VqpName {
  Gid gid{};
  std::uint32_t vqpn = 0;
  auto operator<=>(const VqpName&) const = default;
};

VqpName name_of(const migr_links_name& n);
migr_links_name record_of(const VqpName& n);
Gid gid_of(const std::uint8_t (&bytes)[16]);
/// nullopt: not 16 bytes, or zero.
std::optional<Gid> gid_of(std::string_view bytes);
/// "10.77.1.1" or "fe80::1", with the number behind it: how people see it.
std::string text_of(const Gid& gid);
std::string text_of(const VqpName& n);
/// Of bytes. @param otherwise  where gid_of() knows none
std::string gid_text(std::string_view bytes, const char* otherwise);

/// EINVAL: says which field, and what it may be.
Status check(const migr_links_hello& r);
Status check(const migr_links_link& r);
Status check(const migr_links_name& r);
Status check(const migr_links_vqp& r);
Status check(const migr_links_channel& r);
Status check_end(const migr_links_channel& r);  // peer and link only
Status check(const migr_links_vqp_state& r);
Status check(const migr_links_switch& r);
Status check(const migr_text_range& r);

wire::LinkVqp to_wire(const migr_links_vqp& r);
wire::LinkChannel to_wire(const Instance& owner, const migr_links_channel& r);
/// What another host said. EINVAL: it does not pass check().
Result<migr_links_vqp> from_wire(const wire::LinkVqp& w);
/// `peer` of the record is the other one of the two: whoever is asked about.
Result<migr_links_channel> from_wire(const wire::LinkChannel& w);
/// The answer to a LOOKUP. EINVAL as above.
Result<migr_links_found> found_of(const wire::LinkFound& w);

const char* policy_name(std::uint32_t policy);
const char* making_name(std::uint32_t making);
const char* atomics_name(std::uint32_t atomics);
const char* cause_name(std::uint32_t cause);
const char* link_state_name(std::uint32_t state);
const char* phase_name(std::uint32_t phase);

}  // namespace migr
