/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * For programs that are not linked with libibverbs: loads it, as NCCL does, before main(), and has each of its functions by
 * dlvsym(). Their names here are jumps to what was found.
 */
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

// clang-format off
#define LOADED_VERBS(X)                                                                                          \
  X(_ibv_query_gid_table, "IBVERBS_1.11") X(ibv_ack_async_event, "IBVERBS_1.1") X(ibv_ack_cq_events, "IBVERBS_1.1") \
  X(ibv_alloc_pd, "IBVERBS_1.1") X(ibv_close_device, "IBVERBS_1.1") X(ibv_create_comp_channel, "IBVERBS_1.0")    \
  X(ibv_create_cq, "IBVERBS_1.1") X(ibv_create_qp, "IBVERBS_1.1") X(ibv_create_srq, "IBVERBS_1.1")               \
  X(ibv_dealloc_pd, "IBVERBS_1.1") X(ibv_dereg_mr, "IBVERBS_1.1") X(ibv_destroy_comp_channel, "IBVERBS_1.0")     \
  X(ibv_destroy_cq, "IBVERBS_1.1") X(ibv_destroy_qp, "IBVERBS_1.1") X(ibv_destroy_srq, "IBVERBS_1.1")            \
  X(ibv_event_type_str, "IBVERBS_1.1") X(ibv_free_device_list, "IBVERBS_1.1") X(ibv_get_async_event, "IBVERBS_1.1") \
  X(ibv_get_cq_event, "IBVERBS_1.1") X(ibv_get_device_list, "IBVERBS_1.1") X(ibv_get_device_name, "IBVERBS_1.1") \
  X(ibv_modify_qp, "IBVERBS_1.1") X(ibv_modify_srq, "IBVERBS_1.1") X(ibv_open_device, "IBVERBS_1.1")             \
  X(ibv_qp_to_qp_ex, "IBVERBS_1.6") X(ibv_query_device, "IBVERBS_1.1") X(ibv_query_gid, "IBVERBS_1.1")           \
  X(ibv_query_port, "IBVERBS_1.1") X(ibv_query_qp, "IBVERBS_1.1") X(ibv_query_srq, "IBVERBS_1.1")                \
  X(ibv_reg_mr, "IBVERBS_1.1") X(ibv_reg_mr_iova2, "IBVERBS_1.8") X(ibv_rereg_mr, "IBVERBS_1.1")                 \
  X(ibv_resize_cq, "IBVERBS_1.1")                                                                                \
  X(ibv_wc_status_str, "IBVERBS_1.1")
// clang-format on

#if !defined(__x86_64__)
#error "a jump is written for x86-64 only"
#endif

#define LOADED_JUMP(name, version)                   \
  extern "C" {                                       \
  [[gnu::visibility("hidden")]] void* loaded_##name; \
  }                                                  \
  asm(".text\n"                                      \
      ".globl " #name                                \
      "\n"                                           \
      ".type " #name ", @function\n" #name           \
      ":\n"                                          \
      "\tjmp *loaded_" #name                         \
      "(%rip)\n"                                     \
      ".size " #name ", . - " #name "\n");
LOADED_VERBS(LOADED_JUMP)
#undef LOADED_JUMP

namespace {

void* find(void* library, const char* name, const char* version) {
  void* const found = library ? dlvsym(library, name, version) : nullptr;
  if (found) return found;
  std::fprintf(stderr, "%s\n", dlerror());
  std::exit(2);
}

[[gnu::constructor]] void load() {
  void* const library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
#define LOADED_FIND(name, version) loaded_##name = find(library, #name, version);
  LOADED_VERBS(LOADED_FIND)
#undef LOADED_FIND
}

}  // namespace
