// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What migrctl prints of what migrd has answered, for people and for programs; its records, links, history and findings have
// files of their own. No line of a text is longer than 80 columns, and no name that somebody may have to type is cut.
#pragma once

#include <optional>
#include <string>

#include "history.h"
#include "json.h"
#include "wire.pb.h"

namespace migr {

/// What a command prints that has failed: "ERRORS IN JSON" in migrctl(1).
Json error_json(const std::string& text, int status);
/// The same in an object that has more to say.
Json with_error(Json object, const std::string& text, int status);

Json version_json(const wire::VersionReply& v);

std::string peers_text(const wire::PeersReply& r);
Json peers_json(const wire::PeersReply& r);

/// Migrations that are not finished.
std::string open_text(const wire::RecoverReply& r);
Json open_json(const wire::RecoverReply& r);

/// What was cancelled: that it is, without an end of line.
std::string cancel_text(const wire::CancelReply& r);
Json cancel_json(const wire::CancelReply& r);

/// What has changed: "c is a peer now; b is at 10.0.0.7:7471 now".
std::string reload_text(const wire::ReloadReply& r);
Json reload_json(const wire::ReloadReply& r);

/// Of one that would move.
std::string plan_text(const wire::PlanReply& plan, const std::optional<ExpectedStop>& stop);
Json plan_json(const wire::PlanReply& plan, const std::optional<ExpectedStop>& stop);

/// Of one that has ended well. @param done  "runs on" @param gone  what became of connections to others: "are gone"
std::string summary_text(const wire::Summary& s, const std::string& done, const std::string& gone);

/// " (migration 0a1b2c3d)": what `migrctl report` and logs know it by. Empty: an older migrd did not say it.
std::string named_migration(const wire::Summary& s);

/// Of one that has failed: where there is more about it, without an end of line.
std::string more_text(const wire::Summary& s);

/// What was taken back of one that has failed, without an end of line. Empty: nothing.
std::string rolled_back_text(const wire::Summary& s);

/// An order for a link. @param name  of the link; empty: all @param done  "is down"
std::string order_text(const wire::LinkOrderReply& r, const std::string& name, const std::string& done);
Json order_json(const wire::LinkOrderReply& r);

}  // namespace migr
