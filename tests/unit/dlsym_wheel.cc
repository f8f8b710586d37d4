/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A module of dlsym_test that brings a libibverbs of another name, which nobody else sees. */
#include <infiniband/verbs.h>

extern "C" [[gnu::visibility("default")]] int dlsym_wheel_opens() {
  ibv_device** const all = ibv_get_device_list(nullptr);
  ibv_context* const ctx = all && all[0] ? ibv_open_device(all[0]) : nullptr;
  ibv_pd* const pd = ctx ? ibv_alloc_pd(ctx) : nullptr;
  return pd && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx);
}
