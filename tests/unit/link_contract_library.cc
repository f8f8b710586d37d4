// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "link_contract_library.h"

#include <time.h>

#include "../../libmigr/links/directory.h"

namespace migr::links {
std::uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(t.tv_nsec);
}
}  // namespace migr::links

namespace contract {

struct Library::Parts {
  std::unique_ptr<migr::links::Directory> directory;
};

Library::Library(const std::array<std::uint8_t, 16>& instance) : parts_(new Parts) {
  migr::links::Config config;
  config.policy = migr::links::Policy::kExact;
  config.paths = migr::links::Paths::kRebuild;
  config.atomics = migr::links::Atomics::kRelayed;
  parts_->directory = migr::links::make_directory(config, instance);
}
Library::~Library() = default;
unsigned Library::life() { return parts_->directory->life(); }
int Library::fd() const { return parts_->directory->fd(); }
void Library::pushes(std::vector<migr_links_port>& ports, bool& knocked) { parts_->directory->pushes(ports, knocked); }
int Library::links(std::span<const migr_links_link> all) { return parts_->directory->links(all); }
int Library::publish(std::span<const migr_links_vqp> some) { return parts_->directory->publish(some); }
int Library::withdraw(std::span<const migr_links_name> some) { return parts_->directory->withdraw(some); }
int Library::lookup(std::span<const migr_links_name> names, std::vector<migr_links_found>& out) { return parts_->directory->lookup(names, out); }
int Library::channel(std::span<const migr_links_channel> own, std::vector<migr_links_channel>& out) { return parts_->directory->channel(own, out); }
int Library::end_channels(std::span<const migr_links_channel> some) { return parts_->directory->end_channels(some); }
int Library::states(std::span<const migr_links_vqp_state> some) { return parts_->directory->states(some); }
int Library::outside(std::span<const migr_text_range> ranges) { return parts_->directory->outside(ranges); }
int Library::switched(std::span<const migr_links_switch> some) { return parts_->directory->switched(some); }

}  // namespace contract
