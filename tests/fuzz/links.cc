// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What processes tell migrd of their links at links.sock, and what other hosts answer: the records, in any order, into the table.
#include <spdlog/spdlog.h>

#include "agent/failover/link_table.h"
#include "seeds.h"

namespace {

using namespace migr;

/// Of a part of the input: the first byte. The second says which of two processes, the rest is records.
enum Kind : char { kEnter,
                   kLinks,
                   kPublish,
                   kWithdraw,
                   kOffer,
                   kEndChannel,
                   kStates,
                   kSwitches,
                   kFound,
                   kTold,
                   kKinds };

template <class T>
std::vector<T> records_in(std::string_view bytes) {
  std::vector<T> out(std::min<std::size_t>(bytes.size() / sizeof(T), MIGR_LINKS_MAX_RECORDS));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
  return out;
}
Instance instance(char c) {
  Instance i{};
  i[0] = c & 1 ? 2 : 1;
  return i;
}
template <class T>
std::string told(Kind kind, char who, const T& record) { return part(std::string{kind, who} + bytes_of(record)); }

void tell(LinkTable& table, char kind, const Instance& who, std::string_view bytes) {
  std::size_t offending = 0;
  switch (kind) {
    case kEnter:
      for (const auto& r : records_in<migr_links_hello>(bytes))
        if (check(r)) table.enter(who, {1, 0, "fuzz", "", r});
      return;
    case kLinks: return (void)table.set_links(who, records_in<migr_links_link>(bytes));
    case kPublish: return (void)table.publish(who, records_in<migr_links_vqp>(bytes), offending);
    case kWithdraw: return (void)table.withdraw(who, records_in<migr_links_name>(bytes));
    case kOffer:
      for (const auto& r : records_in<migr_links_channel>(bytes)) (void)table.offer(who, r);
      return;
    case kEndChannel:
      for (const auto& r : records_in<migr_links_channel>(bytes)) (void)table.end_channel(who, r);
      return;
    case kStates: return (void)table.set_states(who, records_in<migr_links_vqp_state>(bytes), 1);
    case kSwitches: return (void)table.add_switches(who, records_in<migr_links_switch>(bytes), {});
    case kFound: {
      wire::LinkFound w;
      if (w.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) (void)found_of(w);
      return;
    }
    case kTold: {
      wire::LinkChannel w;
      if (!w.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
      if (from_wire(w)) (void)table.answer(w);
      return;
    }
    default: return;
  }
}

}  // namespace

std::vector<std::string> seeds() {
  migr_links_hello hello{};
  hello.policy = MIGR_LINKS_EXACT;
  migr_links_link link{};
  std::strcpy(link.device, "rxe0");
  link.port = 1;
  link.gid[15] = 1;
  migr_links_vqp vqp{};
  vqp.name.gid[15] = 1;
  vqp.name.vqpn = 17;
  vqp.policy = MIGR_LINKS_EXACT;
  vqp.atomics = MIGR_LINKS_RELAYED;
  vqp.paths = MIGR_LINKS_MAX_LINKS;  // the most
  vqp.links = (1u << MIGR_LINKS_MAX_LINKS) - 1;
  for (std::uint32_t i = 0; i < vqp.paths; i++) {
    vqp.path[i].link = i;
    vqp.path[i].gid[15] = 1;
    vqp.path[i].qpn = 17;
    vqp.path[i].mtu = 3;
  }
  migr_links_channel end{};
  end.peer[0] = 2;
  end.gid[15] = 1;
  end.qpn = 18;
  end.round = 1;
  end.mtu = 3;
  const std::string enter = told(kEnter, 0, hello) + told(kEnter, 1, hello), all = enter + told(kLinks, 0, link) + told(kPublish, 0, vqp) + told(kOffer, 0, end) +
                                                                                   told(kStates, 0, migr_links_vqp_state{}) + told(kSwitches, 0, migr_links_switch{});
  wire::LinkFound found;
  *found.mutable_vqp() = to_wire(vqp);
  return {all, all + told(kWithdraw, 0, vqp.name) + told(kEndChannel, 0, end),
          enter + part(std::string{kTold, 0} + to_wire(instance(1), end).SerializeAsString()) + part(std::string{kFound, 0} + found.SerializeAsString())};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  spdlog::set_level(spdlog::level::off);
  LinkTable table("here");
  for (const std::string_view p : parts(data, size)) {
    if (p.size() < 2) continue;
    tell(table, p[0], instance(p[1]), p.substr(2));
  }
  unsigned processes = 0;
  (void)table.reports(true);
  (void)table.left_on("rxe0", 0, processes);
  (void)table.away_from("rxe0", 0, 1, processes);
  (void)table.stuck_on("rxe0", 1);
  const auto all = table.everything();
  for (const auto& [who, name] : all.vqps) {
    const auto w = table.vqp(who, name);
    always(w && from_wire(*w), "what was taken passes at the next host");
    (void)table.find(name);
  }
  for (const auto& c : all.channels) {
    const auto w = table.channel(c.who, c.peer, c.link);
    always(w && from_wire(*w), "an end that was taken passes at the next host");
  }
  for (const auto& who : all.processes) table.leave(who);
  always(table.everything().vqps.empty() && table.everything().channels.empty(), "nothing stays of who has left");
  return 0;
}
