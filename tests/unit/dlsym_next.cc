/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* A library of dlsym_test that asks for what is behind itself, as wrappers of other libraries do. */
#include <dlfcn.h>

extern "C" void* dlsym_next_of(const char* name) { return dlsym(RTLD_NEXT, name); }
