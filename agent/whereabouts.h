// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Connections that are made after a migration: what processes ask (libmigr/whereabouts.h), and what hosts ask each other for them.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "config.h"
#include "directory.h"
#include "log.h"
#include "numbers.h"
#include "peer_link.h"
#include "process_session.h"
#include "status.h"
#include "uapi/migr.h"
#include "wire.pb.h"

namespace migr {

/// Thread: any.
class Whereabouts {
 public:
  Whereabouts(const Config& config, SessionTable& sessions, Peers& peers, Directory& directory, const Numbers& numbers)
      : config_(config), sessions_(sessions), peers_(peers), directory_(directory), numbers_(numbers) {}

  /// A process asks. ENOENT: nothing is known of that address, or the partner has no libmigr. EREMOTEIO: the same, and a host could not look
  Result<Answer> answer(const Question& q);

  /// Another host asks: QPs here that somebody may call so.
  Status where(const wire::WhereRequest& r, wire::WhereReply& out);
  /// Another host says what the partner of a QP here calls its memory. ENOENT: it is not here, or has no libmigr.
  Status introduce(const wire::IntroduceRequest& r);

 private:
  Result<migr_qp_address> find(const migr_qp_address& named, std::uint32_t asker_pqpn);
  Status introduce(const Question& q);
  std::shared_ptr<ProcessSession> session_of(const migr_ctx_rec& c);

  const Config& config_;
  SessionTable& sessions_;
  Peers& peers_;
  Directory& directory_;
  const Numbers& numbers_;
  SaidRarely rarely_;
};

/// Of all that may be meant the one that is: who is connected to the asker; else who is connected to nobody, and of those who
/// was born at that address. @return null: none
const wire::Whereabouts* choose(const wire::WhereReply& all, const std::set<std::string>& asker_gids, std::uint32_t asker_pqpn);

}  // namespace migr
