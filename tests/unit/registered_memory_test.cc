// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "agent/registered_memory.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>

#include "agent/fd.h"
#include "agent/process.h"

namespace migr::registered_memory_test {
namespace {

constexpr std::uint64_t kPage = 4096, kHere = 1000 * kPage;

std::string text(const std::vector<MemoryPart>& parts) {
  std::string out;
  for (const MemoryPart& p : parts) out += std::to_string((p.start - kHere) / kPage) + "+" + std::to_string(p.bytes / kPage) + " ";
  return out;
}

wire::NicWrite partners(std::uint32_t index, std::uint32_t key, std::uint64_t start, std::uint64_t bytes) {
  wire::NicWrite w;
  w.set_index(index);
  w.set_key(key);
  w.set_start(start);
  w.set_bytes(bytes);
  return w;
}

// Of context 7: where its addresses lie; zero-based; of context 8 one with the same keys.
const std::vector<RegisteredMemory> kMemory = {
    {7, 0x100, 0x101, kHere, 10 * kPage, kHere},
    {7, 0x200, 0x201, kHere + 20 * kPage + 100, 10 * kPage, 0},
    {8, 0x100, 0x101, kHere + 40 * kPage, kPage, kHere + 40 * kPage},
    {7, 0x300, 0, kHere + 5 * kPage, 10 * kPage, kHere + 5 * kPage},  // nobody else's; overlaps the first
};

std::uint32_t context_of(std::uint32_t index) { return index == 0 ? 7 : 8; }

TEST(RegisteredMemoryPages, AreWholeAndNoneTwice) { EXPECT_EQ(text(pages_of(kMemory)), "0+15 20+11 40+1 "); }

TEST(RegisteredMemoryWritten, IsFoundByTheKeysOfItsContext) {
  EXPECT_EQ(text(written_to(kMemory, {{7, 0, 0x100, 0, kHere + 2 * kPage, kPage}}, {}, context_of)), "2+1 ");
  EXPECT_EQ(text(written_to(kMemory, {}, {partners(0, 0x101, kHere + 3 * kPage, 2 * kPage)}, context_of)), "3+2 ");
  EXPECT_EQ(text(written_to(kMemory, {}, {partners(1, 0x101, kHere + 40 * kPage, kPage)}, context_of)), "40+1 ");
  EXPECT_EQ(text(written_to(kMemory, {{7, 0, 0x300, 0, kHere + 5 * kPage, kPage}, {7, 0, 0x100, 0, kHere, kPage}}, {partners(0, 0x101, kHere + kPage, kPage)}, context_of)), "0+2 5+1 ");
}

// Neither address is a page's.
TEST(RegisteredMemoryWritten, IsWhereItsAddressesLie) {
  EXPECT_EQ(text(written_to(kMemory, {}, {partners(0, 0x201, 0, kPage)}, context_of)), "20+2 ");
  EXPECT_EQ(text(written_to(kMemory, {{7, 0, 0x200, 0, 9 * kPage, kPage}}, {}, context_of)), "29+2 ");
}

TEST(RegisteredMemoryWritten, BeyondAnMrNothingIs) {
  EXPECT_EQ(text(written_to(kMemory, {}, {partners(0, 0x101, kHere + 9 * kPage, 5 * kPage)}, context_of)), "9+1 ");
  EXPECT_EQ(text(written_to(kMemory, {}, {partners(0, 0x101, kHere - 5 * kPage, 5 * kPage)}, context_of)), "");
  EXPECT_EQ(text(written_to(kMemory, {}, {partners(0, 0x999, kHere, kPage), partners(0, 0, kHere + 5 * kPage, kPage)}, context_of)), "") << "no such key";
}

// Nothing of it is touched: there may be no huge pages here.
TEST(HugePages, AreFoundWhateverTheyAreOf) {
  constexpr std::size_t kHuge = 2 << 20;
  const Fd file(memfd_create("huge", MFD_HUGETLB)), small(memfd_create("small", 0));
  ASSERT_EQ(ftruncate(small.n, kHuge), 0);
  if (file.n < 0 || ftruncate(file.n, kHuge)) GTEST_SKIP() << "this kernel has no hugetlbfs";
  struct {
    int flags, fd;
    bool huge;
  } const all[] = {{MAP_PRIVATE | MAP_ANONYMOUS, -1, false}, {MAP_SHARED, small.n, false}, {MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, true}, {MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, true}, {MAP_PRIVATE, file.n, true}, {MAP_SHARED, file.n, true}};
  ASSERT_FALSE(has_huge_pages(getpid()));
  for (const auto& m : all) {
    void* const at = mmap(nullptr, kHuge, PROT_READ | PROT_WRITE, m.flags | MAP_NORESERVE, m.fd, 0);
    ASSERT_NE(at, MAP_FAILED) << errno;
    EXPECT_EQ(has_huge_pages(getpid()), m.huge) << m.flags;
    munmap(at, kHuge);
  }
}

// It may be one that never answers.
TEST(HugePages, AreFoundWithoutAskingAnyFilesystem) {
  const Fd small(memfd_create("small", 0));
  ASSERT_EQ(ftruncate(small.n, kPage), 0);
  void* const at = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, small.n, 0);
  ASSERT_NE(at, MAP_FAILED);
  const pid_t child = fork();
  if (!child) {
    sock_filter ends[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_statfs, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{std::size(ends), ends};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(2);
    _exit(has_huge_pages(getppid()));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  munmap(at, kPage);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(MergedMemory, IsFoundWhileTheKernelMerges) {
  const std::string run = ::testing::TempDir() + "ksm_run." + std::to_string(getpid());
  const auto found = [&](const char* does) {
    std::ofstream(run) << does << '\n';
    return is_merged(getpid(), run);
  };
  void* const at = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  EXPECT_FALSE(found("1"));
  if (madvise(at, kPage, MADV_MERGEABLE)) GTEST_SKIP() << "this kernel merges no memory";
  EXPECT_TRUE(found("1"));
  for (const char* not_now : {"0", "2"}) EXPECT_FALSE(found(not_now)) << not_now;
  EXPECT_FALSE(is_merged(getpid(), run + ".none"));
  munmap(at, kPage);
  EXPECT_FALSE(found("1"));
  unlink(run.c_str());
}

}  // namespace
}  // namespace migr::registered_memory_test
