/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * With libmigr preloaded: what a program gets that loads libibverbs itself. It is linked with none of these libraries, and needs
 * no device.
 */
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

extern "C" void* dlsym_next_of(const char* name);  // dlsym_next.cc, a library behind libmigr

namespace {

/// The file's name of the library that has it.
std::string in(void* function) {
  Dl_info info;
  if (!function) return "nowhere";
  if (!dladdr(function, &info)) return "no library";
  const std::string path = info.dli_fname;
  return path.substr(path.rfind('/') + 1);
}

class Dlsym : public testing::Test {
 protected:
  static void* load(const char* library) {
    void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    EXPECT_TRUE(handle) << dlerror();
    return handle;
  }
};

/// Ends the process: what was called first in it decides which libibverbs ours lead to.
[[noreturn]] void with_one_by_another_name(void* (*load)(const char*)) {
  void* const module = load(MIGR_WHEEL);
  const auto opens = reinterpret_cast<int (*)()>(dlsym(module, "dlsym_wheel_opens"));
  const std::string other = in(dlsym(module, "ibv_get_device_list"));
  EXPECT_EQ(other.rfind("libibverbs-0123abcd.so", 0), 0U);
  EXPECT_EQ(in(dlsym(module, "ibv_open_device")), other) << "ours may come to lead to another one";
  void* const asked = load("libibverbs.so.1");
  EXPECT_EQ(in(dlsym(asked, "ibv_open_device")), "libmigr.so");
  EXPECT_EQ(in(dlsym(module, "ibv_open_device")), other);
  dlclose(asked);
  if (dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD)) _exit(2);
  EXPECT_TRUE(opens && opens());
  for (const char* name : {"ibv_open_device", "ibv_create_qp"}) EXPECT_EQ(in(dlsym(module, name)), "libmigr.so") << name;
  EXPECT_EQ(in(dlsym(module, "ibv_get_device_list")), other);
  void* const second = load("libibverbs.so.1");
  EXPECT_EQ(in(dlsym(second, "ibv_open_device")).rfind("libibverbs.so.1", 0), 0U) << "ours would open its devices with the first one";
  _exit(testing::Test::HasFailure());
}

TEST_F(Dlsym, OursLeadToOneByAnotherNameIfItIsTheFirst) {
  EXPECT_EXIT(with_one_by_another_name(load), testing::ExitedWithCode(0), "");
}

TEST_F(Dlsym, WhatWeStandInFrontOfIsOurs) {
  void* const verbs = load("libibverbs.so.1");
  for (const char* name : {"ibv_open_device", "ibv_create_qp", "ibv_reg_mr_iova2", "_ibv_query_gid_table"})
    EXPECT_EQ(in(dlsym(verbs, name)), "libmigr.so") << name;
  EXPECT_EQ(in(dlvsym(verbs, "ibv_open_device", "IBVERBS_1.1")), "libmigr.so");
  EXPECT_EQ(in(dlvsym(verbs, "ibv_reg_mr_iova2", "IBVERBS_1.8")), "libmigr.so");
  EXPECT_EQ(in(dlvsym(RTLD_DEFAULT, "ibv_open_device", "IBVERBS_1.1")), "nowhere") << "it was loaded RTLD_LOCAL";
  dlclose(verbs);
}

TEST_F(Dlsym, AllElseIsTheLibrarys) {
  void* const verbs = load("libibverbs.so.1");
  for (const char* name : {"ibv_get_device_list", "ibv_wc_status_str"})
    EXPECT_EQ(in(dlsym(verbs, name)).rfind("libibverbs.so.1", 0), 0U) << name;
  EXPECT_EQ(in(dlvsym(verbs, "ibv_open_device", "IBVERBS_1.0")).rfind("libibverbs.so.1", 0), 0U) << "it has another ABI";
  EXPECT_EQ(in(dlsym(verbs, "close")).rfind("libc.so.", 0), 0U) << "asked for by the handle of who needs it";
  dlclose(verbs);
}

TEST_F(Dlsym, TheFamiliesOwnCallsToo) {
  void* const mlx5 = load("libmlx5.so.1");
  EXPECT_EQ(in(dlsym(mlx5, "mlx5dv_init_obj")), "libmigr.so");
  EXPECT_EQ(in(dlvsym(mlx5, "mlx5dv_init_obj", "MLX5_1.2")), "libmigr.so");
  EXPECT_EQ(in(dlsym(mlx5, "mlx5dv_is_supported")).rfind("libmlx5.so.1", 0), 0U);
  EXPECT_EQ(in(dlsym(mlx5, "ibv_create_qp")), "libmigr.so") << "mlx5 needs libibverbs";
  dlclose(mlx5);
}

TEST_F(Dlsym, WhatIsNotThereIsNotThereAndSaysWhy) {
  void* const verbs = load("libibverbs.so.1");
  EXPECT_EQ(dlsym(verbs, "ibv_no_such_verb"), nullptr);
  EXPECT_NE(std::string(dlerror()).find("ibv_no_such_verb"), std::string::npos);
  EXPECT_EQ(dlvsym(verbs, "ibv_create_qp", "IBVERBS_9.9"), nullptr);
  EXPECT_NE(std::string(dlerror()).find("IBVERBS_9.9"), std::string::npos);
  void* const libc = load("libc.so.6");
  EXPECT_EQ(dlsym(libc, "ibv_create_qp"), nullptr) << "it was not asked for in a library that has it";
  EXPECT_NE(dlerror(), nullptr);
  dlclose(libc);
  dlclose(verbs);
}

TEST_F(Dlsym, NextIsBehindTheOneThatAsks) {
  EXPECT_EQ(dlsym_next_of("dlsym_next_of"), nullptr) << "no library behind it has this";
  EXPECT_EQ(in(dlsym_next_of("strlen")).rfind("libc.so.", 0), 0U);
  EXPECT_EQ(in(dlsym(RTLD_NEXT, "dlsym_next_of")), "libdlsym_next.so");
}

}  // namespace
