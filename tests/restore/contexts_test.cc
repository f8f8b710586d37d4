// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which number of migr.ko's a context that the plugin makes has, over a module and a device that are the test's.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "said.h"

namespace {

int folder = -1, open_fails = 0, look_fails = 0;
std::vector<std::uint32_t> recorded;
std::vector<std::uint32_t> learnt;
int built_error = 0;
constexpr std::uint8_t kInstance[16] = {1};

}  // namespace

extern "C" {
struct job job;
int image_dir(void) { return folder; }
int fd_floor(void) { return 512; }
int ahead_register(const struct migr_rst_image*, pid_t, long, struct migr_rst_err*) { return 0; }
void cpus_give_back(pid_t, int) {}
int wiped_give_back(pid_t, int, struct migr_rst_err*) { return 0; }
int held_bind(pid_t, int, struct migr_rst_err*) { return 0; }
int ports_look(const struct migr_rst_process*, struct migr_rst_err*) { return 0; }
int ports_hold(const struct migr_rst_process*) { return -1; }
int clean_registered(const struct migr_rst_image*) { return 0; }
int control_listen(const char*) { return 0; }
void control_serve(enum phase, long) {
  built_error = job.failed;
  for (std::uint32_t i = 0; i < job.img->processes[0]->nr_contexts; i++) learnt.push_back(job.img->processes[0]->contexts[i].new_ctx_id);
}
void control_close(const char*) {}
int inherit_fd_add(int, char*) { return 0; }
int inherit_fd_lookup_id(char*) { return -1; }

int migr_rst_device_find(const char*, char ibdev[MIGR_IBDEV_NAME_MAX], char path[64], struct migr_rst_err*) {
  std::strcpy(ibdev, "rxe0");
  std::strcpy(path, "/dev/null");
  return 0;
}
int migr_rst_context_build(const struct migr_rst_process*, struct migr_rst_context*, int cmd_fd, struct migr_rst_err*) {
  close(cmd_fd);
  if (!recorded.empty()) recorded.push_back(recorded.back() + 1);
  return 0;
}
void migr_rst_context_release(struct migr_rst_context*) {}
int migr_rst_open(struct migr_rst** out, struct migr_rst_err*) {
  *out = nullptr;
  return open_fails;
}
void migr_rst_close(struct migr_rst*) {}
int migr_rst_contexts(struct migr_rst*, std::uint32_t, struct migr_ctx_rec** out, std::uint32_t* nr, struct migr_rst_err* err) {
  if (look_fails) std::snprintf(err->text, sizeof err->text, "no answer");
  *nr = static_cast<std::uint32_t>(recorded.size());
  *out = static_cast<migr_ctx_rec*>(std::calloc(recorded.size() + 1, sizeof **out));
  for (std::size_t i = 0; i < recorded.size(); i++) (*out)[i].ctx_id = recorded[i];
  return look_fails;
}
}

namespace {

class Contexts : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/contexts_test.XXXXXX";
    path_ = mkdtemp(name);
    ASSERT_GE(folder = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), 0);
    setenv("MIGR_RESTORE_SOCKET", "x", 1);
    migr_rst_image* image = migr_rst_image_new();
    migr_rst_process* process = migr_rst_process_new(static_cast<std::uint32_t>(getpid()));
    migr_fd_desc fds[2]{};
    for (std::uint32_t i : {0u, 1u}) {
      migr_rst_add_context(process)->rec.ctx_id = fds[i].ctx_id = 70 + i;
      fds[i].kind = MIGR_FD_CONTEXT;
      fds[i].fd = static_cast<int>(10 + i);
    }
    migr_rst_err err{};
    ASSERT_EQ(migr_rst_process_describe(process, fds, 2, kInstance), 0);
    ASSERT_EQ(migr_rst_image_add(image, process), 0);
    ASSERT_EQ(migr_rst_write(image, folder, &err), 0) << err.text;
    migr_rst_image_free(image);
    open_fails = look_fails = built_error = 0;
    recorded.clear(), learnt.clear();
  }
  void TearDown() override {
    migr_rst_image_free(job.img);
    job = {};
    close(folder);
    std::filesystem::remove_all(path_);
  }
  std::string path_;
};

TEST_F(Contexts, HaveTheNumbersThatWereNotThereBefore) {
  recorded = {0};  // of none
  EXPECT_NE(restore_init(), 0) << "nobody says GO";
  EXPECT_EQ(built_error, 0) << said;
  EXPECT_EQ(learnt, (std::vector<std::uint32_t>{1, 2}));
}

TEST_F(Contexts, WithoutAModuleHaveNone) {
  open_fails = -ENOENT;
  EXPECT_NE(restore_init(), 0);
  EXPECT_EQ(built_error, 0) << said;
  EXPECT_EQ(learnt, (std::vector<std::uint32_t>{0, 0}));
}

TEST_F(Contexts, ThatTheModuleDoesNotTellOfAreAnError) {
  EXPECT_NE(restore_init(), 0);
  EXPECT_EQ(built_error, ENODATA);
  EXPECT_STREQ(job.why.text, "migr.ko has not recorded the context that was made on rxe0");
}

TEST_F(Contexts, AnErrorOfTheModulesIsOne) {
  open_fails = -ETIMEDOUT;
  EXPECT_NE(restore_init(), 0);
  EXPECT_EQ(built_error, ETIMEDOUT);
  TearDown();
  SetUp();
  recorded = {0};
  look_fails = -EIO;
  EXPECT_NE(restore_init(), 0);
  EXPECT_EQ(built_error, EIO);
  EXPECT_STREQ(job.why.text, "no answer");
}

}  // namespace
