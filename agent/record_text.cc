// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "record_text.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "text.h"

namespace migr {
namespace {

std::string text(const char* s, std::size_t n) { return {s, strnlen(s, n)}; }

std::string gid_text(const __u8 (&gid)[16]) {
  char buf[INET6_ADDRSTRLEN];
  return inet_ntop(AF_INET6, gid, buf, sizeof buf) ? buf : "?";
}

const char* libmigr(const migr_ctx_rec& r) { return r.flags & MIGR_CTX_ATTACHED ? "yes" : "no"; }

std::string handle(std::uint32_t h) { return h == MIGR_NO_HANDLE ? "-" : std::to_string(h); }

Json context_json(const migr_ctx_rec& r) {
  return {{"ctx_id", r.ctx_id},
          {"pid", r.pid ? Json(r.pid) : Json(nullptr)},
          {"comm", text(r.comm, sizeof r.comm)},
          {"device", text(r.ibdev, sizeof r.ibdev)},
          {"libmigr", bool(r.flags & MIGR_CTX_ATTACHED)},
          {"incomplete", bool(r.flags & MIGR_CTX_HYDRATED)},
          {"pd", r.nr_pd},
          {"mr", r.nr_mr},
          {"cq", r.nr_cq},
          {"qp", r.nr_qp},
          {"srq", r.nr_srq},
          {"other", r.nr_other},
          {"mr_bytes", r.mr_bytes}};
}

}  // namespace

std::string ps_text(const std::vector<ContextRecord>& ctxs, const ContainerOf& container_of) {
  static constexpr char kRow[] = "{:>7} {:<15} {:<11} {:>5} {:>5} {:>5} {:>3} {:>6} {:<3}";
  const std::string below(8, ' ');
  std::string s = fmt::format(kRow, "PID", "COMMAND", "DEVICE", "MR", "CQ", "QP", "SRQ", "MEMORY", "LIB") + " CONTAINER\n";
  for (const auto& c : ctxs) {
    const auto& r = c.rec;
    const std::string container = r.pid ? container_of(static_cast<pid_t>(r.pid)) : "";
    const std::string name = container.empty() ? "-" : printable(container);
    const std::string numbers = fmt::format(kRow, r.pid ? std::to_string(r.pid) : "-", cut(text(r.comm, sizeof r.comm), 15), cut(text(r.ibdev, sizeof r.ibdev), 11), short_count(r.nr_mr), short_count(r.nr_cq),
                                            short_count(r.nr_qp), short_count(r.nr_srq), short_bytes(r.mr_bytes), libmigr(r));
    // A name that somebody is to type is never cut.
    s += numbers.size() + 1 + name.size() <= kColumns ? fmt::format("{} {}\n", numbers, name) : fmt::format("{}\n{}", numbers, wrapped(below + name, below.size()));
    if (r.flags & MIGR_CTX_HYDRATED) s += fmt::format("{}older than migr.ko: record incomplete\n", below);
    if (!r.pid) s += wrapped(below + kProcessEnded, below.size());
  }
  return s;
}

Json ps_json(const std::vector<ContextRecord>& ctxs, const ContainerOf& container_of) {
  Json j = Json::array();
  for (const auto& c : ctxs) {
    j.push_back(context_json(c.rec));
    const std::string container = c.rec.pid ? container_of(static_cast<pid_t>(c.rec.pid)) : "";
    j.back()["container"] = container.empty() ? Json(nullptr) : Json(container);
  }
  return j;
}

std::string show_text(const std::vector<ContextRecord>& ctxs) {
  std::string s;
  for (const auto& c : ctxs) {
    const auto& r = c.rec;
    s += wrapped(fmt::format("context {} of {} ({}) on {}, libmigr: {}{}", r.ctx_id, r.pid ? "process " + std::to_string(r.pid) : "a process that has ended", text(r.comm, sizeof r.comm),
                     text(r.ibdev, sizeof r.ibdev), libmigr(r), r.flags & MIGR_CTX_HYDRATED ? ", older than migr.ko: record incomplete" : ""), 2);
    for (const auto& p : c.pds) s += fmt::format("  PD {}\n", p.handle);
    for (const auto& m : c.mrs)
      s += wrapped(fmt::format("  MR {} in PD {}: {} bytes at {:#x} (iova {:#x}), access {:#x}, lkey {:#x} (physical {:#x}), rkey {:#x} (physical {:#x})",
                       m.handle, m.pd_handle, m.length, m.start, m.iova, m.access, m.vlkey, m.plkey, m.vrkey, m.prkey), 6);
    for (const auto& q : c.cqs)
      s += wrapped(fmt::format("  CQ {}: {} entries, vector {}, channel {}", q.handle, q.cqe, q.comp_vector, q.channel ? std::to_string(q.channel) : "-"), 6);
    for (const auto& q : c.qps) {
      std::string line = fmt::format("  QP {}: {} {}, number {:#x} (physical {:#x}), PD {}, CQs {}/{}, SRQ {}, {} sends, {} receives",
                       q.handle, qp_type_name(q.qp_type), qp_state_name(q.qp_state), q.vqpn, q.pqpn, q.pd_handle, q.send_cq_handle,
                       q.recv_cq_handle, handle(q.srq_handle), q.max_send_wr, q.max_recv_wr);
      if (q.dest_qpn) line += fmt::format(", from {} to {} QP {:#x}", gid_text(q.ah.sgid), gid_text(q.ah.dgid), q.dest_qpn);
      s += wrapped(line, 6);
    }
    for (const auto& x : c.srqs)
      s += wrapped(fmt::format("  SRQ {} in PD {}: {} receives of {} pieces, limit {}", x.handle, x.pd_handle, x.max_wr, x.max_sge, x.srq_limit), 6);
    for (const auto& x : c.others) s += fmt::format("  {} {} in PD {}\n", object_name(x.type), x.rec.handle, handle(x.rec.pd_handle));
  }
  return s;
}

Json show_json(const std::vector<ContextRecord>& ctxs) {
  Json j = Json::array();
  for (const auto& c : ctxs) {
    Json e = context_json(c.rec);
    Json pds = Json::array(), mrs = Json::array(), cqs = Json::array(), qps = Json::array(), srqs = Json::array(), others = Json::array();
    for (const auto& p : c.pds) pds.push_back({{"handle", p.handle}});
    for (const auto& m : c.mrs)
      mrs.push_back({{"handle", m.handle}, {"pd", m.pd_handle}, {"start", m.start}, {"length", m.length}, {"iova", m.iova}, {"access", m.access},
                     {"vlkey", m.vlkey}, {"vrkey", m.vrkey}, {"plkey", m.plkey}, {"prkey", m.prkey}});
    for (const auto& q : c.cqs)
      cqs.push_back({{"handle", q.handle}, {"cqe", q.cqe}, {"comp_vector", q.comp_vector}, {"channel", q.channel}});
    for (const auto& q : c.qps)
      qps.push_back({{"handle", q.handle}, {"type", qp_type_name(q.qp_type)}, {"state", qp_state_name(q.qp_state)}, {"vqpn", q.vqpn},
                     {"pqpn", q.pqpn}, {"pd", q.pd_handle}, {"send_cq", q.send_cq_handle}, {"recv_cq", q.recv_cq_handle},
                     {"max_send_wr", q.max_send_wr}, {"max_recv_wr", q.max_recv_wr}, {"dest_qpn", q.dest_qpn},
                     {"sgid", gid_text(q.ah.sgid)}, {"dgid", gid_text(q.ah.dgid)}});
    for (const auto& x : c.srqs)
      srqs.push_back({{"handle", x.handle}, {"pd", x.pd_handle}, {"max_wr", x.max_wr}, {"max_sge", x.max_sge}, {"limit", x.srq_limit}});
    for (const auto& x : c.others) others.push_back({{"kind", object_name(x.type)}, {"handle", x.rec.handle}});
    e["pds"] = pds, e["mrs"] = mrs, e["cqs"] = cqs, e["qps"] = qps, e["srqs"] = srqs, e["others"] = others;
    j.push_back(e);
  }
  return j;
}

}  // namespace migr
