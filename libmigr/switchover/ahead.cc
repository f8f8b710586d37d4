/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "ahead.h"

#include <algorithm>

#include "../provider/provider.h"

#ifdef __x86_64__
asm(".pushsection .text\n"
    "migr_ahead_code:\n" MIGR_AHEAD_CODE
    ".popsection\n");
extern "C" [[gnu::visibility("hidden")]] const unsigned char migr_ahead_code[];
#endif

namespace migr::switchover::ahead {
namespace {

/// Both are found by their addresses in the restored process: neither may move between FREEZE and REBIND.
constinit migr_ahead left{};
std::vector<migr_ahead_mr>& commands() {
  static auto* all = new std::vector<migr_ahead_mr>;
  return *all;
}

}  // namespace

void describe(std::span<const std::uint8_t, 16> instance, std::vector<migr_fd_desc>& out) {
  left.magic = MIGR_AHEAD_MAGIC;
  left.version = MIGR_AHEAD_VERSION;
  left.mr_bytes = sizeof(migr_ahead_mr);
  std::copy(instance.begin(), instance.end(), left.instance);
#ifdef __x86_64__
  left.code = reinterpret_cast<std::uintptr_t>(migr_ahead_code);
#endif
  migr_fd_desc d{};
  d.kind = MIGR_FD_AHEAD;
  d.fd = d.context_fd = -1;
  d.cq_handle = d.obj_handle = MIGR_NO_HANDLE;
  d.addr = reinterpret_cast<std::uintptr_t>(&left);
  d.bytes = sizeof(left);
  out.push_back(d);
}

void leave() {
  forget();
  const auto& mrs = Registry::get().mrs;
  if (!left.code || mrs.size() > MIGR_AHEAD_MAX) return;
  std::vector<migr_ahead_mr>& all = commands();
  all.resize(mrs.size());  // before anything points into it
  for (std::size_t i = 0; i < mrs.size(); ++i) {
    const MrShadow& mr = *mrs[i];
    provider::prepare_reg_mr(mr.context->real, mr.real->pd->handle, mr.app.addr, mr.app.length, mr.iova, mr.access, all[i]);
    all[i].status = MIGR_AHEAD_OPEN;
    all[i].vlkey = mr.app.lkey;
    all[i].shadow = reinterpret_cast<std::uintptr_t>(&mr);
  }
  left.mrs = reinterpret_cast<std::uintptr_t>(all.data());
  left.nr_mrs = static_cast<std::uint32_t>(all.size());
}

const migr_ahead_mr* done(std::size_t index, const MrShadow& mr) {
  const std::vector<migr_ahead_mr>& all = commands();
  const bool is = index < all.size() && all[index].shadow == reinterpret_cast<std::uintptr_t>(&mr) && all[index].status == 0;
  return is ? &all[index] : nullptr;
}

void forget() {
  left.mrs = 0;
  left.nr_mrs = 0;
  commands().clear();
}

}  // namespace migr::switchover::ahead
