/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* The write() of this program is the library's. */
#include "../../libmigr/provider/uverbs_write.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <rdma/ib_user_verbs.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

namespace migr::provider {
namespace {

/// Runs `check` in a child, because "restored" cannot be taken back. @return what it returned
template <class Check>
int in_child(Check check) {
  const pid_t pid = fork();
  if (pid == 0) _exit(check());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct File : ::testing::Test {
  File() {
    char name[] = "/tmp/uverbs_write_test.XXXXXX";
    fd = mkstemp(name);
    unlink(name);
  }
  ~File() override { close(fd); }
  std::string content() const {
    char text[256];
    const ssize_t n = pread(fd, text, sizeof(text), 0);
    return std::string(text, n > 0 ? static_cast<std::size_t>(n) : 0);
  }
  int fd;
};

constexpr ib_uverbs_cmd_hdr kDoorbell{IB_USER_VERBS_CMD_POST_SEND, 4, 0};

TEST_F(File, OrdinaryWritesPass) {
  EXPECT_EQ(write(fd, "hello", 5), 5);
  EXPECT_EQ(content(), "hello");
  errno = 0;
  EXPECT_EQ(write(-1, "x", 1), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST_F(File, OurFdIsWrittenUntilTheProcessWasRestored) {
  note_uverbs_fd(fd, true);
  EXPECT_EQ(write(fd, &kDoorbell, sizeof(kDoorbell)), static_cast<ssize_t>(sizeof(kDoorbell)));
  note_uverbs_fd(fd, false);
  EXPECT_EQ(content().size(), sizeof(kDoorbell));
}

TEST_F(File, RestoredProcessSendsCommandsByIoctl) {
  EXPECT_EQ(in_child([&] {
              note_uverbs_fd(fd, true);
              set_restored();
              errno = 0;
              const ssize_t n = write(fd, &kDoorbell, sizeof(kDoorbell));
              // A plain file refuses the ioctl: it was tried, and nothing was written.
              return n == -1 && errno == ENOTTY && content().empty() ? 0 : 1;
            }),
            0);
}

TEST_F(File, RestoredProcessWritesElsewhereAsBefore) {
  EXPECT_EQ(in_child([&] {
              note_uverbs_fd(fd, true);
              note_uverbs_fd(fd, false);
              note_uverbs_fd(fd + 1, true);
              set_restored();
              return write(fd, "hello", 5) == 5 && content() == "hello" ? 0 : 1;
            }),
            0);
}

TEST_F(File, TheNumbersOfAParentAreFilesOfItsChild) {
  EXPECT_EQ(in_child([&] {
              note_uverbs_fd(fd, true);
              set_restored();
              forget_uverbs_fds();
              return write(fd, "hello", 5) == 5 && content() == "hello" ? 0 : 1;
            }),
            0);
}

TEST_F(File, RestoredProcessRefusesACommandWithoutRoomForItsAnswer) {
  EXPECT_EQ(in_child([&] {
              note_uverbs_fd(fd, true);
              set_restored();
              const ib_uverbs_cmd_hdr command{IB_USER_VERBS_CMD_REG_MR, 2, 3};
              errno = 0;
              return write(fd, &command, sizeof(command)) == -1 && errno == EINVAL ? 0 : 1;
            }),
            0);
}

TEST(NoteUverbsFd, NumbersOutOfRangeAreIgnored) {
  note_uverbs_fd(-1, true);
  note_uverbs_fd(1 << 30, true);
}

TEST(InvokeWrite, TooLongIsEinval) {
  static char big[70000];
  EXPECT_EQ(invoke_write(-1, 0, big, sizeof(big), nullptr, 0), EINVAL);
  EXPECT_EQ(invoke_write(-1, 0, big, 8, big, sizeof(big)), EINVAL);
  EXPECT_EQ(invoke_write(-1, 0, big, 16, nullptr, 0), EBADF);
}

}  // namespace
}  // namespace migr::provider
