// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "netlink_exchange.h"

#include <netlink/msg.h>
#include <netlink/netlink.h>

namespace migr {
namespace {

struct CbPut {
  void operator()(nl_cb* c) const { nl_cb_put(c); }
};

struct Exchange {
  const std::function<bool(nlmsghdr*)>& take;
  int error = 0;  // positive errno
  bool done = false;
  bool malformed = false;
};

int on_valid(nl_msg* msg, void* arg) {
  auto* x = static_cast<Exchange*>(arg);
  if (!x->take(nlmsg_hdr(msg))) x->malformed = true;
  return NL_OK;
}

int on_end(nl_msg* msg, void* arg) {
  auto* x = static_cast<Exchange*>(arg);
  x->done = true;
  // The end of a dump carries its error.
  const nlmsghdr* h = nlmsg_hdr(msg);
  if (h->nlmsg_type == NLMSG_DONE && h->nlmsg_len >= NLMSG_HDRLEN + sizeof(int))
    x->error = -*static_cast<const int*>(nlmsg_data(h));
  return NL_STOP;
}

int on_ack(nl_msg*, void* arg) {
  static_cast<Exchange*>(arg)->done = true;
  return NL_STOP;
}

int on_error(sockaddr_nl*, nlmsgerr* e, void* arg) {
  auto* x = static_cast<Exchange*>(arg);
  x->done = true;
  x->error = -e->error;
  return NL_STOP;
}

}  // namespace

void NlMsgFree::operator()(nl_msg* m) const { nlmsg_free(m); }
void NlSocketFree::operator()(nl_sock* s) const { nl_socket_free(s); }

Status netlink_exchange(nl_sock* sock, nl_msg* question, const std::function<bool(nlmsghdr*)>& take, const std::string& what) {
  Exchange x{.take = take};
  std::unique_ptr<nl_cb, CbPut> cb(nl_cb_alloc(NL_CB_DEFAULT));
  if (!cb) return Error{ENOMEM, what + ": out of memory"};
  nl_cb_set(cb.get(), NL_CB_VALID, NL_CB_CUSTOM, on_valid, &x);
  nl_cb_set(cb.get(), NL_CB_FINISH, NL_CB_CUSTOM, on_end, &x);
  nl_cb_set(cb.get(), NL_CB_ACK, NL_CB_CUSTOM, on_ack, &x);
  nl_cb_err(cb.get(), NL_CB_CUSTOM, on_error, &x);
  int e = nl_send_auto(sock, question);
  while (e >= 0 && !x.done) e = nl_recvmsgs(sock, cb.get());
  if (e == -NLE_DUMP_INTR) return Error{EAGAIN, what + ": it changed while it was read"};
  if (e < 0 && !x.error) return Error{EIO, what + ": netlink: " + nl_geterror(e)};
  if (x.malformed) return Error{EBADMSG, what + ": malformed answer of the kernel"};
  if (x.error) return sys_error(what, x.error);
  return {};
}

Status until_settled(const std::function<Status()>& dump) {
  constexpr int kTries = 5;
  for (int i = 1;; i++)
    if (auto s = dump(); s || s.error().code != EAGAIN || i == kTries) return s;
}

}  // namespace migr
