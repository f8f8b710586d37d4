// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A question over netlink and its answer, of several messages if it is a dump.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "status.h"

struct nl_msg;
struct nl_sock;
struct nlmsghdr;

namespace migr {

struct NlMsgFree {
  void operator()(nl_msg* m) const;
};
using NlMsg = std::unique_ptr<nl_msg, NlMsgFree>;
struct NlSocketFree {
  void operator()(nl_sock* s) const;
};
using NlSocket = std::unique_ptr<nl_sock, NlSocketFree>;

/// @param take  each message of the answer; false: it is malformed
/// @param what  for the error, as in "reading the record of contexts"
/// EAGAIN: what is dumped has changed meanwhile. Others: what the kernel has answered.
Status netlink_exchange(nl_sock* sock, nl_msg* question, const std::function<bool(nlmsghdr*)>& take, const std::string& what);

/// A dump during which something changes is made again, a few times.
Status until_settled(const std::function<Status()>& dump);

}  // namespace migr
