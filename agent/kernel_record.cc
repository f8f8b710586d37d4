// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "kernel_record.h"

#include <netlink/genl/ctrl.h>
#include <netlink/genl/genl.h>
#include <netlink/netlink.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "netlink_exchange.h"

namespace migr {
namespace {

constexpr int kNetlinkBytes = 256 << 10;

using Attrs = nlattr*[MIGR_A_MAX + 1];
using Handler = std::function<void(nlattr**)>;

std::uint32_t u32(const nlattr* a) { return a && nla_len(a) >= 4 ? nla_get_u32(a) : 0; }

// Records grow at their end: take what both sides know.
template <class T>
bool take(const nlattr* a, T& out) {
  if (!a) return false;
  out = T{};
  std::memcpy(&out, nla_data(a), std::min<std::size_t>(static_cast<std::size_t>(nla_len(a)), sizeof out));
  return true;
}

struct Request {
  std::uint8_t cmd;
  bool dump;
  std::vector<std::pair<int, std::uint32_t>> attrs;
};

Status talk(nl_sock* sock, int family, const Request& r, const Handler& handler, const std::string& what) {
  const NlMsg msg(nlmsg_alloc());
  if (!msg || !genlmsg_put(msg.get(), NL_AUTO_PORT, NL_AUTO_SEQ, family, 0, r.dump ? NLM_F_DUMP : NLM_F_ACK, r.cmd,
                           MIGR_GENL_VERSION))
    return Error{ENOMEM, what + ": out of memory"};
  for (const auto& [type, value] : r.attrs)
    if (nla_put_u32(msg.get(), type, value)) return Error{ENOMEM, what + ": message too long"};
  const auto take_one = [&](nlmsghdr* h) {
    Attrs a{};
    if (genlmsg_parse(h, 0, a, MIGR_A_MAX, nullptr)) return false;
    if (handler) handler(a);
    return true;
  };
  return netlink_exchange(sock, msg.get(), take_one, what);
}

}  // namespace

std::string how_to_load(const std::string& release, const std::string& modules) {
  std::ifstream installed(modules + "/" + release + "/modules.dep");  // where modprobe looks
  for (std::string line; std::getline(installed, line);)
    if (line.substr(0, line.find(':')).find("/migr.ko") != line.npos) return "; load it with: modprobe migr";
  return ", and there is none for Linux " + release + "; dkms status says for which kernels migr-dkms has built it: the headers of each have to be installed";
}

Result<KernelRecord> KernelRecord::open() {
  KernelRecord k;
  k.sock_.reset(nl_socket_alloc());
  if (!k.sock_) return Error{ENOMEM, "netlink: out of memory"};
  if (const int e = genl_connect(k.sock_.get()); e < 0) return Error{EIO, std::string("netlink: ") + nl_geterror(e)};
  nl_socket_set_buffer_size(k.sock_.get(), kNetlinkBytes, kNetlinkBytes);
  nl_socket_set_msg_buf_size(k.sock_.get(), kNetlinkBytes);
  k.family_ = genl_ctrl_resolve(k.sock_.get(), MIGR_GENL_NAME);
  if (k.family_ < 0) {
    utsname kernel{};
    uname(&kernel);
    return Error{ENOENT, "migr.ko is not loaded" + how_to_load(kernel.release)};
  }
  auto i = k.info();
  if (!i) return i.error();
  if (i->abi != MIGR_ABI_VERSION)
    return Error{EPROTONOSUPPORT, "migr.ko speaks ABI version " + std::to_string(i->abi) + ", this program " +
                                      std::to_string(MIGR_ABI_VERSION) + ": the module of another release is still loaded; with the same release of migr-dkms installed: end the programs that hold it, "
                                      "then rmmod migr && modprobe migr, or restart the host"};
  return k;
}

Result<KernelInfo> KernelRecord::info() {
  KernelInfo i;
  const auto flag = [](const nlattr* a) { return a ? std::optional(u32(a) != 0) : std::nullopt; };
  auto s = talk(sock_.get(), family_, {MIGR_CMD_INFO_GET, false, {}}, [&](nlattr** a) {
    i = {u32(a[MIGR_A_ABI_VERSION]), u32(a[MIGR_A_NR_CTX]), u32(a[MIGR_A_NR_OBJ]), u32(a[MIGR_A_NR_RESERVED]),
         u32(a[MIGR_A_NR_DEV]), flag(a[MIGR_A_MOVES_MARKED])};
  }, "asking migr.ko for its version");
  if (!s) return s.error();
  return i;
}

Result<std::vector<ContextRecord>> KernelRecord::contexts(pid_t pid) {
  std::vector<ContextRecord> out;
  Request r{MIGR_CMD_CTX_GET, true, {}};
  if (pid) r.attrs.emplace_back(MIGR_A_PID, static_cast<std::uint32_t>(pid));
  auto s = until_settled([&] {
    out.clear();
    return talk(sock_.get(), family_, r, [&](nlattr** a) {
      ContextRecord c;
      if (take(a[MIGR_A_CTX_REC], c.rec)) out.push_back(std::move(c));
    }, "reading the record of contexts");
  });
  // No such process in the record: nothing there.
  if (!s && !(pid && (s.error().code == ENOENT || s.error().code == ESRCH))) return s.error();
  return out;
}

Status KernelRecord::search(ContextRecord& c) {
  Status s = objects(c, tells_types_apart_ ? MIGR_OBJ_QP : 0);
  if (!s && s.error().code == EINVAL && tells_types_apart_) {
    tells_types_apart_ = false;
    s = objects(c);
  }
  if (!tells_types_apart_) c.pds = {}, c.mrs = {}, c.cqs = {}, c.srqs = {}, c.others = {};  // of all processes of a host they take much
  return !s && s.error().code == EAGAIN ? Status() : s;
}

Status KernelRecord::objects(ContextRecord& c, std::uint32_t type) {
  Request r{MIGR_CMD_OBJ_GET, true, {{MIGR_A_CTX_ID, c.rec.ctx_id}}};
  if (type) r.attrs.emplace_back(MIGR_A_OBJ_TYPE, type);
  const Handler add_object = [&](nlattr** a) {
    const nlattr* rec = a[MIGR_A_OBJ_REC];
    auto add = [&](auto& list) {
      if (typename std::remove_reference_t<decltype(list)>::value_type r; take(rec, r)) list.push_back(r);
    };
    switch (const auto type = u32(a[MIGR_A_OBJ_TYPE])) {
      case MIGR_OBJ_PD: add(c.pds); break;
      case MIGR_OBJ_MR: add(c.mrs); break;
      case MIGR_OBJ_CQ: add(c.cqs); break;
      case MIGR_OBJ_QP: add(c.qps); break;
      case MIGR_OBJ_SRQ: add(c.srqs); break;
      default:
        if (migr_other_rec r; take(rec, r)) c.others.push_back({type, r});
    }
  };
  return until_settled([&] {
    c.pds.clear(), c.mrs.clear(), c.cqs.clear(), c.qps.clear(), c.srqs.clear(), c.others.clear();
    return talk(sock_.get(), family_, r, add_object,
                "reading the record of context " + std::to_string(c.rec.ctx_id));
  });
}

Status KernelRecord::reserve_qpn(std::uint32_t vqpn) {
  auto s = talk(sock_.get(), family_, {MIGR_CMD_QPN_RESERVE, false, {{MIGR_A_VQPN, vqpn}}}, {},
                "reserving vQPN " + std::to_string(vqpn));
  return s || s.error().code == EEXIST ? Status() : s;
}

Status KernelRecord::release_qpn(std::uint32_t vqpn) {
  auto s = talk(sock_.get(), family_, {MIGR_CMD_QPN_RELEASE, false, {{MIGR_A_VQPN, vqpn}}}, {},
                "releasing vQPN " + std::to_string(vqpn));
  return s || s.error().code == ENOENT ? Status() : s;
}

const char* object_name(std::uint32_t t) {
  static const char* const names[] = {"context", "PD", "MR", "CQ", "QP", "SRQ", "MW", "AH", "XRCD", "DM"};
  return t < std::size(names) ? names[t] : "unknown";
}

// enum ib_qp_type and enum ib_qp_state of the kernel.
const char* qp_type_name(std::uint32_t t) {
  static const char* const names[] = {"SMI", "GSI", "RC", "UC", "UD", "RAW_IPV6", "RAW_ETHERTYPE", "", "RAW_PACKET", "XRC_INI", "XRC_TGT"};
  return t < std::size(names) ? names[t] : "driver";
}

const char* qp_state_name(std::uint32_t s) {
  static const char* const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return s < std::size(names) ? names[s] : "?";
}

}  // namespace migr
