/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Programs that load libibverbs themselves and ask for its functions by dlsym() or dlvsym() (NCCL, brpc, Python's ctypes) look in the
 * library whose handle they have, and would pass us by. They get our function of that name, if the library has one; in
 * a version that is not the default one (IBVERBS_1.0) they get the library's own, as a program does that was linked with it.
 *
 * Whatever else is looked up goes on to the next dlsym() behind us by a jump: RTLD_NEXT and RTLD_DEFAULT go by the address that is
 * returned to.
 */
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "exports.h"
#include "objects.h"
#include "real.h"

#if !defined(__OPTIMIZE__)
#error "without optimization the call of the next dlsym() is no jump"
#endif

namespace {

using migr::Exports;
using migr::is_self;

const link_map& self() {
  const link_map* library = _r_debug.r_map;
  while (library && !is_self(library->l_addr)) library = library->l_next;
  if (!library) std::abort();
  return *library;
}

/// As RTLD_NEXT would find it, which dlsym() cannot be asked for itself; who has loaded us by dlopen() has all that it needs before us.
void* next(const char* name) {
  for (const link_map* first : {self().l_next, _r_debug.r_map})
    for (const link_map* library = first; library; library = library->l_next)
      if (void* found = is_self(library->l_addr) ? nullptr : Exports(*library).find(name)) return found;
  std::abort();  // no C library
}

template <class Function>
Function* next(std::atomic<Function*>& kept, const char* name) {
  Function* function = kept.load(std::memory_order_relaxed);
  if (!function) kept.store(function = reinterpret_cast<Function*>(next(name)), std::memory_order_relaxed);
  return function;
}

bool begins(const char* name, const char* with) { return !std::strncmp(name, with, std::strlen(with)); }

/// Whose functions begin like `name`: the library's own name, as far as its version. Null: nobody's in front of whom we stand.
const char* library_of(const char* name) {
  constexpr struct {
    const char *function, *library;
  } kFamilies[] = {{"ibv_", "libibverbs.so"}, {"_ibv_", "libibverbs.so"}, {"mlx5dv_", "libmlx5.so"}, {"mlx4dv_", "libmlx4.so"}, {"efadv_", "libefa.so"}, {"manadv_", "libmana.so"}, {"hnsdv_", "libhns.so"}};
  for (const auto& family : kFamilies)
    if (begins(name, family.function)) return family.library;
  return nullptr;
}

/// As library_of(), if `caller` is to get ours: we ask for functions of the libraries ourselves.
const char* in_front_of_which(void* handle, const char* name, const void* caller) {
  const bool asked_by_us = caller >= __ehdr_start && caller < _end;
  return handle == RTLD_NEXT || asked_by_us ? nullptr : library_of(name);
}

const char* file_of(const link_map& library) {
  const char* const slash = std::strrchr(library.l_name, '/');
  return slash ? slash + 1 : library.l_name;
}

/// The libibverbs that our functions lead to, by whatever name (exports.h). Null: none was called yet, or another library is between.
const link_map* verbs_used() {
  Dl_info info;
  void* found;
  const auto open = migr::open_device_if_found();
  if (!open || !dladdr1(reinterpret_cast<void*>(open), &info, &found, RTLD_DL_LINKMAP)) return nullptr;
  const auto* const used = static_cast<const link_map*>(found);
  return begins(file_of(*used), "libibverbs") ? used : nullptr;
}

/// Of two libibverbs in a process ours lead to that which was there when the first of ours was called: who asks in the other one keeps its own, as
/// its devices are not the first one's to open. To be asked for decides nothing.
bool is_ours_to_stand_before(const link_map& in, const char* library) {
  const link_map* const used = begins(library, "libibverbs") ? verbs_used() : nullptr;
  return used ? used == &in : begins(file_of(in), library);
}

/// What to give for `theirs`, which was found by this name: our function, if it is the one that programs are linked with.
void* in_front_of(void* theirs, const char* name, const char* library) {
  Dl_info info;
  void* found;
  if (!dladdr1(theirs, &info, &found, RTLD_DL_LINKMAP)) return theirs;
  const auto& in = *static_cast<const link_map*>(found);
  if (Exports(in).find(name) != theirs || !is_ours_to_stand_before(in, library)) return theirs;
  void* const own = Exports(self()).find(name);
  return own ? own : theirs;
}

using Dlsym = void*(void*, const char*);
using Dlvsym = void*(void*, const char*, const char*);
std::atomic<Dlsym*> next_dlsym;
std::atomic<Dlvsym*> next_dlvsym;

}  // namespace

MIGR_EXPORT void* dlsym(void* handle, const char* name) noexcept {
  Dlsym* const real = next(next_dlsym, "dlsym");
  if (const char* const library = in_front_of_which(handle, name, __builtin_return_address(0)))
    if (void* const theirs = real(handle, name)) return in_front_of(theirs, name, library);
  return real(handle, name);
}

MIGR_EXPORT void* dlvsym(void* handle, const char* name, const char* version) noexcept {
  Dlvsym* const real = next(next_dlvsym, "dlvsym");
  if (const char* const library = in_front_of_which(handle, name, __builtin_return_address(0)))
    if (void* const theirs = real(handle, name, version)) return in_front_of(theirs, name, library);
  return real(handle, name, version);
}
