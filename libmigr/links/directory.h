/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Who tells what other processes have on their links: migrd (include/migr/links_wire.h), or a test. */
#ifndef MIGR_LINKS_DIRECTORY_H
#define MIGR_LINKS_DIRECTORY_H

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../../include/migr/links_wire.h"
#include "../shadow.h"
#include "config.h"

namespace migr::links {

/// Thread: that of the rounds, without the Registry's lock: a call may take seconds.
/// All return 0 or a positive errno; ENOTCONN: nobody is there.
class Directory {
 public:
  virtual ~Directory() = default;
  /// Connects if need be. @return a number that changes whenever what was told before is forgotten; 0: nobody is there
  virtual unsigned life() = 0;
  /// Becomes readable when there is something to be read by pushes(); -1: never
  virtual int fd() const = 0;
  /// What has come since the last call.
  /// @param ports   of this host that have gone down, or come back
  /// @param knocked a partner waits for this end of a channel: MIGR_LINKS_KNOCK
  virtual void pushes(std::vector<migr_links_port>& ports, bool& knocked) = 0;
  virtual int links(std::span<const migr_links_link> all) = 0;
  virtual int publish(std::span<const migr_links_vqp> some) = 0;
  virtual int withdraw(std::span<const migr_links_name> some) = 0;
  virtual int lookup(std::span<const migr_links_name> names, std::vector<migr_links_found>& out) = 0;
  virtual int channel(std::span<const migr_links_channel> own, std::vector<migr_links_channel>& out) = 0;
  /// Of which peer and link count: this process will not ask for them again by the rounds that it has told.
  virtual int end_channels(std::span<const migr_links_channel> some) = 0;
  virtual int states(std::span<const migr_links_vqp_state> some) = 0;
  virtual int switched(std::span<const migr_links_switch> some) = 0;
  /// Every thread of this process is seen outside of `ranges` (control::text_ranges()) once. ETIMEDOUT: one has stayed inside
  /// for 2 s; EPERM: something else traces the process. Ask again, rarely.
  virtual int outside(std::span<const migr_text_range> ranges) = 0;
  /// Nothing is open any more; life() connects again.
  virtual void hang_up() {}
};

std::unique_ptr<Directory> make_directory(const Config& config, const Peer& instance);

}  // namespace migr::links

#endif
