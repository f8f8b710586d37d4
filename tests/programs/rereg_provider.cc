/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Soft-RoCE's driver changes access and PD of a memory region (6.12, not 6.1); its provider offers no ibv_rereg_mr() (rdma-core
 * 44 to 64). Preloaded behind libmigr this plays one that does: what a program calls goes through libmigr to the kernel.
 */
#include <infiniband/verbs.h>
#include <rdma/ib_user_verbs.h>
#include <unistd.h>

#include <cstdint>

extern "C" [[gnu::visibility("default")]] int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* addr, std::size_t length, int access) {
  struct {
    ib_uverbs_cmd_hdr header;
    ib_uverbs_rereg_mr body;
  } command{};
  ib_uverbs_rereg_mr_resp answer{};
  command.header = {.command = IB_USER_VERBS_CMD_REREG_MR, .in_words = sizeof command / 4, .out_words = sizeof answer / 4};
  command.body.response = reinterpret_cast<std::uintptr_t>(&answer);
  command.body.mr_handle = mr->handle;
  command.body.flags = static_cast<std::uint32_t>(flags);
  command.body.start = command.body.hca_va = reinterpret_cast<std::uintptr_t>(addr);
  command.body.length = length;
  command.body.access_flags = static_cast<std::uint32_t>(access);
  if (flags & IBV_REREG_MR_CHANGE_PD) command.body.pd_handle = pd->handle;
  if (write(mr->context->cmd_fd, &command, sizeof command) != sizeof command) return IBV_REREG_MR_ERR_CMD;
  mr->lkey = answer.lkey;
  mr->rkey = answer.rkey;
  if (flags & IBV_REREG_MR_CHANGE_PD) mr->pd = pd;
  if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) mr->addr = addr, mr->length = length;
  return 0;
}
