// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "link_directory.h"

namespace migr {
namespace {

void note(std::string& text, int status, const std::string& what) {
  if (status && status != EAGAIN && text.empty()) text = what;
}

// What an end of the other side becomes for who asked. @return what is wrong with it; empty: nothing
std::string take(migr_links_channel& r, const wire::LinkChannelAnswer& a) {
  const bool here = a.known() == wire::LinkChannelAnswer::HERE;
  if (a.known() == wire::LinkChannelAnswer::NOT_HERE) r.status = ENOENT;
  if (!here && a.known() != wire::LinkChannelAnswer::AHEAD) return {};
  const auto end = from_wire(a.end());
  if (!end) {
    r.status = EHOSTUNREACH;
    return end.error().text;
  }
  if (here) {
    const auto peer = std::to_array(r.peer);
    r = *end;
    std::copy(peer.begin(), peer.end(), r.peer);
  }
  r.round = end->round;
  r.status = here ? 0 : ESTALE;
  return {};
}

}  // namespace

LinkDirectory::Found LinkDirectory::lookup(std::span<const VqpName> names) {
  Found out;
  std::vector<VqpName> rest;
  std::vector<std::size_t> at;
  for (std::size_t i = 0; i < names.size(); i++) {
    auto& r = out.records.emplace_back();
    r.vqp.name = record_of(names[i]);
    if (auto f = found_of(table_.find(names[i]))) {
      r = *f;
      continue;
    }
    r.status = EAGAIN;
    rest.push_back(names[i]);
    at.push_back(i);
  }
  if (rest.empty()) return out;
  const auto answers = find_elsewhere(rest);
  for (std::size_t i = 0; i < rest.size(); i++) {
    auto& r = out.records[at[i]];
    r.status = answers[i].status;
    std::string text = answers[i].text;
    if (!r.status) {
      if (auto f = found_of(answers[i].found))
        r = *f;
      else
        r.status = EHOSTUNREACH, text = f.error().text;
    }
    note(out.text, r.status, text);
  }
  return out;
}

LinkDirectory::Met LinkDirectory::meet(const Instance& who, std::span<const migr_links_channel> ends) {
  Met out;
  std::vector<wire::LinkChannel> rest;
  std::vector<std::size_t> at;
  for (std::size_t i = 0; i < ends.size(); i++) {
    auto& r = out.records.emplace_back(ends[i]);
    if (r.status) continue;
    r.status = EAGAIN;
    auto told = to_wire(who, ends[i]);
    if (table_.here(gid_of(ends[i].peer))) {
      take(r, table_.answer(told));
    } else {
      rest.push_back(std::move(told));
      at.push_back(i);
    }
  }
  if (!rest.empty()) {
    const auto answers = meet_elsewhere(rest);
    for (std::size_t i = 0; i < rest.size(); i++) {
      auto& r = out.records[at[i]];
      r.status = answers[i].status;
      std::string text = answers[i].text;
      if (!r.status) r.status = EAGAIN, text = take(r, answers[i].answer);
      note(out.text, r.status, text);
    }
  }
  for (auto& r : out.records) {
    if (!r.status) continue;
    // Nothing of one's own comes back as if it were the other's.
    migr_links_channel blank{};
    std::memcpy(blank.peer, r.peer, sizeof blank.peer);
    blank.link = r.link;
    blank.round = r.round;
    blank.status = r.status;
    r = blank;
  }
  return out;
}

}  // namespace migr
