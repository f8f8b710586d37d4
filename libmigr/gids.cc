/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "gids.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../include/migr/gid.h"
#include "objects.h"
#include "real.h"

namespace migr::gids {
namespace {

constexpr std::size_t kMaxGids = 256;  // the index has 8 bits in an address handle

bool at(const ibv_gid_entry& e, std::uint32_t port, std::uint32_t index) { return e.port_num == port && e.gid_index == index; }

/// The present table in the application's order. What the first host did not have keeps its index, unless that is taken.
std::vector<ibv_gid_entry> as_known(const Context& context, const std::vector<ibv_gid_entry>& present) {
  std::vector<ibv_gid_entry> out;
  std::vector<const ibv_gid_entry*> used;
  for (const ibv_gid_entry& was : context.gids) {
    const ibv_gid_entry* now = like(present, was);
    if (!now) continue;
    used.push_back(now);
    out.push_back(*now);
    out.back().gid_index = was.gid_index;
  }
  for (const ibv_gid_entry& e : present)
    if (std::find(used.begin(), used.end(), &e) == used.end() && !find(out, e.port_num, e.gid_index)) out.push_back(e);
  return out;
}

/// The table of a device that has moved. @return false: the kernel's own is right
bool known(ibv_context* ctx, std::vector<ibv_gid_entry>& out) {
  std::vector<ibv_gid_entry> present;
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  const Context* context = registry.context_of(ctx);
  if (!context || !context->moved || read(ctx, present)) return false;
  out = as_known(*context, present);
  return true;
}

/// Inside of one of ours, whose answers are the kernel's.
thread_local int inside = 0;

}  // namespace

Inside::Inside() { ++inside; }
Inside::~Inside() { --inside; }

const ibv_gid_entry* find(const std::vector<ibv_gid_entry>& table, std::uint32_t port, std::uint32_t index) {
  const auto found = std::find_if(table.begin(), table.end(), [&](const ibv_gid_entry& e) { return at(e, port, index); });
  return found == table.end() ? nullptr : &*found;
}

int read(ibv_context* real, std::vector<ibv_gid_entry>& out) {
  const auto query = real_query_gid_table();
  if (!query) return EOPNOTSUPP;
  out.resize(kMaxGids);
  const ssize_t n = query(real, out.data(), out.size(), 0, sizeof(ibv_gid_entry));
  out.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  return n < 0 ? static_cast<int>(-n) : 0;
}

const ibv_gid_entry* like(const std::vector<ibv_gid_entry>& table, const ibv_gid_entry& was) {
  const ibv_gid_entry* best = nullptr;
  int nearest = 0;
  for (const ibv_gid_entry& e : table) {
    if (e.port_num != was.port_num || e.gid_type != was.gid_type) continue;
    if (const int near = migr_gid_nearness(was.gid.raw, e.gid.raw); near > nearest) nearest = near, best = &e;
  }
  return best;
}

const ibv_gid_entry* again(const std::vector<ibv_gid_entry>& table, const ibv_gid_entry& was) {
  for (const ibv_gid_entry& e : table)
    if (e.port_num == was.port_num && e.gid_type == was.gid_type && !std::memcmp(e.gid.raw, was.gid.raw, sizeof e.gid.raw)) return &e;
  return like(table, was);
}

void note(Context& context) {
  if (!context.moved && read(context.real, context.gids)) context.gids.clear();
}

void moved(Context& context) { context.moved = true; }

std::uint8_t here(const Context& context, std::uint8_t port, std::uint8_t index) {
  std::vector<ibv_gid_entry> present;
  if (!context.moved || read(context.real, present)) return index;
  const ibv_gid_entry* was = find(context.gids, port, index);
  const ibv_gid_entry* now = was ? like(present, *was) : nullptr;
  return now ? static_cast<std::uint8_t>(now->gid_index) : index;
}

std::uint8_t named(const Context& context, std::uint8_t port, std::uint8_t index) {
  std::vector<ibv_gid_entry> present;
  if (!context.moved || read(context.real, present)) return index;
  for (const ibv_gid_entry& was : context.gids)
    if (const ibv_gid_entry* now = was.port_num == port ? like(present, was) : nullptr; now && now->gid_index == index)
      return static_cast<std::uint8_t>(was.gid_index);
  return index;
}

}  // namespace migr::gids

using namespace migr;

MIGR_EXPORT int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  std::vector<ibv_gid_entry> table;
  if (gids::inside || index < 0 || !gids::known(context, table)) return real().query_gid(context, port, index, gid);
  const ibv_gid_entry* e = gids::find(table, port, static_cast<std::uint32_t>(index));
  if (!e)  // whether there is such a port, and a place in its table, the kernel knows
    if (const int err = real().query_gid(context, port, index, gid)) return err;
  *gid = e ? e->gid : ibv_gid{};  // as libibverbs has it where there is none
  return 0;
}

MIGR_EXPORT int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t flags, size_t size) {
  std::vector<ibv_gid_entry> table;
  const auto query = real_query_gid_ex();
  if (!query) return EOPNOTSUPP;
  if (gids::inside || flags || size < sizeof *entry || !gids::known(context, table)) return query(context, port, index, entry, flags, size);
  const ibv_gid_entry* e = gids::find(table, port, index);
  if (!e) {
    ibv_gid_entry there;  // which is called otherwise
    const int err = query(context, port, index, &there, 0, sizeof there);
    return err ? err : ENODATA;
  }
  *entry = *e;
  return 0;
}

MIGR_EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t max, uint32_t flags, size_t size) {
  std::vector<ibv_gid_entry> table;
  const auto query = real_query_gid_table();
  if (!query) return -EOPNOTSUPP;
  if (gids::inside || flags || size != sizeof *entries || !gids::known(context, table)) return query(context, entries, max, flags, size);
  if (table.size() > max) return -EINVAL;
  std::copy(table.begin(), table.end(), entries);
  return static_cast<ssize_t>(table.size());
}
