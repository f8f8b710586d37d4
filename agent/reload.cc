// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "reload.h"

#include <algorithm>
#include <set>

#include "log.h"

namespace migr {
namespace {

// Those of `a` that are not in `b`.
std::vector<Peer> without(const std::vector<Peer>& a, const std::vector<Peer>& b) {
  std::vector<Peer> out;
  std::copy_if(a.begin(), a.end(), std::back_inserter(out), [&](const Peer& p) { return std::none_of(b.begin(), b.end(), [&](const Peer& o) { return o.name == p.name; }); });
  return out;
}

// Nobody: none is open, or all are of this host alone.
Status nobody_in_the_middle(const Config& config, const std::vector<Role*>& roles) {
  for (auto* role : roles)
    for (const auto& m : role->open_migrations()) {
      std::set<std::string> hosts(m.partners().begin(), m.partners().end());
      hosts.insert({m.source(), m.destination()});
      const auto other = std::find_if(hosts.begin(), hosts.end(), [&](const std::string& h) { return h != config.name && config.peer(h); });
      if (other != hosts.end())
        return Error{EBUSY, "migration " + migration_text(m.id()) + " with " + *other +
                                " is not finished, and a peer is to be taken away, or to have other rights: "
                                "nothing was changed. Again when it has ended (migrctl recover shows it)"};
    }
  return {};
}

std::vector<std::string> changed_keys(const std::map<std::string, std::string>& before, const std::map<std::string, std::string>& after) {
  std::set<std::string> out;
  for (const auto& [a, b] : {std::pair(&before, &after), std::pair(&after, &before)})
    for (const auto& [key, value] : *a)
      if (const auto other = b->find(key); other == b->end() || other->second != value) out.insert(key);
  return {out.begin(), out.end()};
}

}  // namespace

Result<wire::ReloadReply> reload(Config& config, const std::string& path, const std::vector<Role*>& roles) {
  auto file = load_config(path);
  if (!file) return file.error();
  if (file->name != config.name) return Error{EINVAL, path + ": this host is '" + config.name + "', and there '" + file->name + "': another name needs a restart"};
  const auto before = config.hosts.now(), after = file->hosts.now();
  wire::ReloadReply out;
  for (const auto& p : without(after->peers, before->peers)) out.add_added(p.name);
  for (const auto& p : without(before->peers, after->peers)) out.add_removed(p.name);
  for (const auto& p : after->peers)
    if (const auto was = config.peer(p.name); was && was->address != p.address) {
      auto* a = out.add_moved();
      a->set_name(p.name);
      a->set_address(p.address);
    }
  out.set_allow(before->allow != after->allow);
  for (auto& key : changed_keys(config.fixed, file->fixed)) out.add_at_start(std::move(key));
  if (out.removed_size() || out.allow())
    if (auto s = nobody_in_the_middle(config, roles); !s) return s.error();
  config.hosts = file->hosts;
  return out;
}

}  // namespace migr
