// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which flags of a descriptor outlive a dump and a restore. The descriptors are those of pipes: CRIU and the kernel's links say
// here that they are of a completion channel.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include "said.h"

namespace {

constexpr int kId = 0x21;
constexpr std::uint32_t kContext = 10;
int folder = -1, carried_over = -1;
bool null_is_uverbs = false;
pid_t noted_root = 0, noted_too = 0;
std::map<pid_t, pid_t> traced, parents;  // of a task: by whom, whose child

}  // namespace

extern "C" {
struct job job;
int image_dir(void) { return folder; }
int fd_floor(void) { return 512; }
int ahead_register(const struct migr_rst_image*, pid_t, long, struct migr_rst_err*) { return 0; }
int cpus_note(pid_t root, int) { return noted_root = root, 0; }
void cpus_give_back(pid_t, int) {}
int wiped_note(pid_t root, int) { return noted_too = root, 0; }
int wiped_give_back(pid_t, int, struct migr_rst_err*) { return 0; }
long long task_status(pid_t pid, const char* name, int) { return (std::strcmp(name, "PPid:") ? traced : parents)[pid]; }
int held_bind(pid_t, int, struct migr_rst_err*) { return 0; }
int ports_look(const struct migr_rst_process*, struct migr_rst_err*) { return 0; }
int ports_hold(const struct migr_rst_process* p) { return p->fds[0].kind == MIGR_FD_CM ? carried_over : -1; }
int clean_registered(const struct migr_rst_image*) { return 0; }
int control_listen(const char*) { return 0; }
void control_serve(enum phase, long) {}
void control_close(const char*) {}
int inherit_fd_add(int, char*) { return 0; }
int inherit_fd_lookup_id(char*) { return carried_over; }
ssize_t readlink(const char* path, char* out, std::size_t size) noexcept {
  constexpr char kKind[] = "anon_inode:[infinibandevent]", kDevice[] = "/sys/class/infiniband_verbs/uverbs0";
  if (null_is_uverbs && !std::strcmp(path, "/sys/dev/char/1:3")) return std::memcpy(out, kDevice, sizeof kDevice), sizeof kDevice - 1;
  const ssize_t n = syscall(SYS_readlink, path, out, size);
  if (n < 5 || std::strncmp(out, "pipe:", 5) || size < sizeof kKind) return n;
  std::memcpy(out, kKind, sizeof kKind);
  return sizeof kKind - 1;
}
}

namespace {

class Files : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    char name[] = "/tmp/files_test.XXXXXX";
    path_ = mkdtemp(name);
    ASSERT_GE(folder = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), 0);
    ASSERT_EQ(pipe2(here_, O_CLOEXEC), 0);
    ASSERT_EQ(pipe2(there_, O_CLOEXEC), 0);
    if (syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0) < 0) GTEST_SKIP() << "no kcmp here";
  }
  void TearDown() override {
    std::free(job.files);
    job = {};
    for (const int fd : {here_[0], here_[1], there_[0], there_[1], folder}) close(fd);
    std::filesystem::remove_all(path_);
  }

  std::string path_;
  int here_[2], there_[2];
};

TEST_P(Files, AreRestoredAsTheyWere) {
  ASSERT_EQ(fcntl(here_[0], F_SETFL, GetParam()), 0);
  migr_fd_desc of{};
  of.kind = MIGR_FD_CHANNEL;
  of.fd = here_[0];
  of.ctx_id = kContext;
  migr_rst_process process{};
  process.pid = static_cast<std::uint32_t>(getpid());
  process.fds = &of;
  process.nr_fds = 1;
  migr_rst_process* processes[] = {&process};
  migr_rst_image image{};
  image.processes = processes;
  image.nr_processes = 1;
  job.img = &image;
  job.phase = PHASE_DUMP;
  ASSERT_EQ(dump_ext_file(here_[0], kId), 0) << said;

  std::free(std::exchange(job.files, nullptr));
  job.nr_files = 0;
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_files_read(folder, &job.files, &job.nr_files, &err), 0) << err.text;
  job.phase = PHASE_RESTORING;
  carried_over = there_[0];
  ASSERT_EQ(restore_ext_file(kId), there_[0]) << said;
  EXPECT_EQ(fcntl(there_[0], F_GETFL), fcntl(here_[0], F_GETFL));
}

/// Of a job of one process with contexts on such devices, /dev/null being a uverbs device: what CRIU goes by after its question about a ring.
class Rings : public ::testing::Test {
 protected:
  Rings() {
    null_is_uverbs = true;
    fd_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
    process_.contexts = contexts_;
    process_.nr_contexts = 2;
    image_.processes = processes_;
    image_.nr_processes = 1;
    job.img = &image_;
    job.phase = PHASE_DUMP;
  }
  ~Rings() override {
    null_is_uverbs = false;
    job = {};
    close(fd_);
  }
  mode_t type_of_a_ring() {
    struct stat st {};
    EXPECT_EQ(fstat(fd_, &st), 0);
    EXPECT_EQ(dump_device_vma(fd_, &st), 0) << said;
    EXPECT_EQ(st.st_mode & ~S_IFMT, 0666u);
    return st.st_mode & S_IFMT;
  }
  int fd_;
  migr_rst_context contexts_[2] = {};
  migr_rst_process process_ = {};
  migr_rst_process* processes_[1] = {&process_};
  migr_rst_image image_ = {};
};

TEST_F(Rings, OfADeviceAreOneFile) {
  std::strcpy(contexts_[0].rec.ibdev, "rxe0");
  std::strcpy(contexts_[1].rec.ibdev, "rxe1");
  EXPECT_EQ(type_of_a_ring(), mode_t{S_IFIFO}) << "CRIU has an entry for each mapping of a device";
}

TEST_F(Rings, OfTwoContextsOnADeviceAreAFileEach) {
  for (auto& context : contexts_) std::strcpy(context.rec.ibdev, "rxe0");
  EXPECT_EQ(type_of_a_ring(), mode_t{S_IFCHR}) << "neighbours would be mapped through the descriptor of one context";
}

TEST_F(Rings, ThatComeAfterADescriptorOfTheDeviceAreAFileEach) {
  process_.nr_contexts = 1;
  EXPECT_EQ(dump_ext_file(fd_, kId), -EINVAL) << "it is on no record";
  EXPECT_EQ(type_of_a_ring(), mode_t{S_IFCHR}) << "CRIU would take the descriptor's entry for that of the mappings";
}

// Those with RDMA are known, and what is above them in the tree is traced, too; what is above that is not.
TEST(Dumped, TheTreeIsKnownByWhoTracesIt) {
  char name[] = "/tmp/files_test.XXXXXX";
  const std::string path = mkdtemp(name);
  ASSERT_GE(folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), 0);
  migr_rst_image* const image = migr_rst_image_new();
  ASSERT_EQ(migr_rst_image_add(image, migr_rst_process_new(102)), 0);
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_write(image, folder, &err), 0) << err.text;
  migr_rst_image_free(image);
  const auto dumped = [](int ret) {
    noted_root = noted_too = 0;
    EXPECT_EQ(dump_init(), 0) << said;
    dump_exit(ret);
    EXPECT_EQ(noted_too, noted_root);
    migr_rst_image_free(job.img);
    job = {};
    return noted_root;
  };
  parents = {{102, 101}, {101, 100}, {100, 1}};
  traced = {{102, getpid()}, {101, getpid()}, {100, 7}};
  EXPECT_EQ(dumped(0), 101);
  EXPECT_EQ(dumped(-1), 0) << "nothing is noted of a dump that failed";
  traced[102] = 7;
  EXPECT_EQ(dumped(0), 0);
  close(folder);
  std::filesystem::remove_all(path);
}

INSTANTIATE_TEST_SUITE_P(, Files, ::testing::Values(0, O_NONBLOCK, O_ASYNC, O_NONBLOCK | O_ASYNC));

}  // namespace
