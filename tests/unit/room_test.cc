// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a container needs of a host: each kind that can be short is missed, by name, with what there is; and nothing else.
#include "agent/room.h"

#include <gtest/gtest.h>
#include <linux/magic.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "agent/kernel_record.h"

namespace migr::room_test {
namespace {

constexpr std::uint32_t kRxe = RDMA_DRIVER_RXE, kMlx5 = RDMA_DRIVER_MLX5;
constexpr std::uint32_t kRc = 2, kUd = 4, kInit = 1, kRts = 3;
constexpr std::uint32_t kMtu1024 = 3, kMtu4096 = 5, kActive = 4, kDown = 1;
const std::string kIpv4 = std::string(10, '\0') + "\xff\xff\x0a\x4d\x0a\x01", kIpv4There = std::string(10, '\0') + "\xff\xff\x0a\x4d\x0a\x02";
const std::string kLinkLocal = std::string("\xfe\x80") + std::string(13, '\0') + "\x01";

migr_qp_rec qp(std::uint32_t vqpn, std::uint32_t type = kRc, std::uint32_t state = kRts) {
  migr_qp_rec q{};
  q.vqpn = vqpn;
  q.qp_type = type;
  q.qp_state = state;
  q.max_send_wr = 64, q.max_recv_wr = 128, q.max_send_sge = 2, q.max_recv_sge = 3;
  q.max_rd_atomic = 4, q.max_dest_rd_atomic = 5;
  q.port_num = 1;
  if (type == kRc && state != kInit) {
    q.path_mtu = kMtu1024;
    q.ah.gid_type = 2;  // RoCE v2
    std::copy(kIpv4.begin(), kIpv4.end(), reinterpret_cast<char*>(q.ah.sgid));
  }
  return q;
}

ContextRecord context() {
  ContextRecord c;
  std::strcpy(c.rec.ibdev, "rxe0");
  c.pds.resize(2);
  c.mrs.resize(3);
  c.mrs[1].length = 1 << 20;
  c.cqs.resize(4);
  c.cqs[2].cqe = 300;
  c.qps = {qp(17), qp(18), qp(19), qp(20), qp(21)};
  c.srqs.resize(1);
  c.srqs[0].max_wr = 70, c.srqs[0].max_sge = 6;
  c.others = {{MIGR_OBJ_MW, {}}, {MIGR_OBJ_AH, {}}, {MIGR_OBJ_AH, {}}};
  return c;
}

wire::Needs needs_of(const ContextRecord& c) {
  std::vector<wire::Needs> n;
  add_needs(n, c);
  EXPECT_EQ(n.size(), 1u);
  return n.at(0);
}

/// Exactly what context() needs.
Room just_enough() {
  Room r;
  migr_rst_device& d = r.device;
  std::strcpy(d.ibdev, "rxe1");
  d.driver_id = kRxe;
  d.max_mr_size = 1 << 20;
  d.max_qp = 5, d.max_cq = 4, d.max_mr = 3, d.max_pd = 2, d.max_srq = 1, d.max_mw = 1, d.max_ah = 2;
  d.max_qp_wr = 128, d.max_sge = 3, d.max_cqe = 300, d.max_srq_wr = 70, d.max_srq_sge = 6;
  d.max_qp_init_rd_atom = 4, d.max_qp_rd_atom = 5;
  d.nr_ports = 1;
  d.ports[0] = {kActive, kMtu1024};
  wire::PortGid g;
  g.set_device("rxe1"), g.set_port(1), g.set_roce_v2(true), g.set_gid(kIpv4There);
  r.gids.push_back(g);
  return r;
}

TEST(Room, WhatIsJustEnoughIsEnough) {
  const Status s = fits(needs_of(context()), just_enough());
  EXPECT_TRUE(s) << s.error().text;
}

struct Short {
  const char* name;
  std::function<void(Room&)> take;
  const char* says;
};
struct OneIsShort : ::testing::TestWithParam<Short> {};

TEST_P(OneIsShort, AndIsNamedAlone) {
  Room r = just_enough();
  GetParam().take(r);
  const Status s = fits(needs_of(context()), r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EBUSY);
  EXPECT_NE(s.error().text.find(GetParam().says), std::string::npos) << s.error().text;
  EXPECT_NE(s.error().text.find("rxe1"), std::string::npos) << s.error().text;
  EXPECT_EQ(s.error().text.find(';'), std::string::npos) << "more than one: " << s.error().text;
}

INSTANTIATE_TEST_SUITE_P(
    Room, OneIsShort,
    ::testing::Values(
        Short{"qp", [](Room& r) { r.device.max_qp--; }, "5 QPs, of 4 free"}, Short{"qp_used", [](Room& r) { r.device.used_qp++; }, "5 QPs, of 4 free (1 of 5 in use)"},
        Short{"qp_over", [](Room& r) { r.device.used_qp = 9; }, "5 QPs, of 0 free"},
        Short{"cq", [](Room& r) { r.device.max_cq--; }, "4 CQs, of 3 free"}, Short{"cq_used", [](Room& r) { r.device.used_cq++; }, "4 CQs, of 3 free"},
        Short{"mr", [](Room& r) { r.device.max_mr--; }, "3 MRs, of 2 free"}, Short{"mr_used", [](Room& r) { r.device.used_mr++; }, "3 MRs, of 2 free"},
        Short{"pd", [](Room& r) { r.device.max_pd--; }, "2 PDs, of 1 free"}, Short{"pd_used", [](Room& r) { r.device.used_pd++; }, "2 PDs, of 1 free"},
        Short{"srq", [](Room& r) { r.device.max_srq--; }, "1 SRQs, of 0 free"}, Short{"srq_used", [](Room& r) { r.device.used_srq++; }, "1 SRQs, of 0 free"},
        Short{"mw", [](Room& r) { r.device.max_mw--; }, "1 memory windows, of 0"}, Short{"ah", [](Room& r) { r.device.max_ah--; }, "2 address handles, of 1"},
        Short{"mr_size", [](Room& r) { r.device.max_mr_size--; }, "MR of bytes 1048576, of at most 1048575"},
        Short{"qp_wr", [](Room& r) { r.device.max_qp_wr--; }, "queue of work requests 128, of at most 127"},
        Short{"sge", [](Room& r) { r.device.max_sge--; }, "SGEs 3, of at most 2"}, Short{"cqe", [](Room& r) { r.device.max_cqe--; }, "entries 300, of at most 299"},
        Short{"srq_wr", [](Room& r) { r.device.max_srq_wr--; }, "an SRQ of work requests 70, of at most 69"},
        Short{"srq_sge", [](Room& r) { r.device.max_srq_sge--; }, "an SRQ with SGEs 6, of at most 5"},
        Short{"rd_atomic", [](Room& r) { r.device.max_qp_init_rd_atom--; }, "under way 4, of at most 3"},
        Short{"dest_rd_atomic", [](Room& r) { r.device.max_qp_rd_atom--; }, "to be answered 5, of at most 4"},
        Short{"mtu", [](Room& r) { r.device.ports[0].active_mtu--; }, "an MTU of 1024 on port 1 (QP 17), which has 512"},
        Short{"port_down", [](Room& r) { r.device.ports[0].state = kDown; }, "an active port 1 (QP 17): it is down"},
        Short{"no_port", [](Room& r) { r.device.nr_ports = 0; }, "port 1 (QP 17), it has 0"}, Short{"no_gid", [](Room& r) { r.gids.clear(); }, "a RoCE v2 GID of the family IPv4"},
        Short{"gid_type", [](Room& r) { r.gids[0].set_roce_v2(false); }, "a RoCE v2 GID of the family IPv4"},
        Short{"gid_port", [](Room& r) { r.gids[0].set_port(2); }, "a RoCE v2 GID of the family IPv4 on port 1"},
        Short{"gid_family", [](Room& r) { r.gids[0].set_gid(kLinkLocal); }, "a RoCE v2 GID of the family IPv4"}),
    [](const auto& i) { return i.param.name; });

TEST(Room, AllThatIsShortIsSaidAtOnce) {
  Room r = just_enough();
  r.device.max_qp = 0, r.device.max_cq = 1, r.device.ports[0].state = kDown;
  const Status s = fits(needs_of(context()), r);
  ASSERT_FALSE(s);
  for (const char* what : {"QPs", "CQs", "active port"}) EXPECT_NE(s.error().text.find(what), std::string::npos) << s.error().text;
}

TEST(Room, AnotherDriverIsRefusedByName) {
  wire::Needs n = needs_of(context());
  Room there = just_enough();
  there.device.driver_id = kMlx5;
  has_now(n, there);
  const Status s = fits(n, just_enough());
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find("rxe1 here is driven by rxe, rxe0 there by mlx5"), std::string::npos) << s.error().text;
  has_now(n, just_enough());
  EXPECT_TRUE(fits(n, just_enough()));
}

// What is not connected does not use the port.
TEST(Room, AnUnconnectedQpNeedsNoLink) {
  ContextRecord c = context();
  for (auto& q : c.qps) q = qp(q.vqpn, kRc, kInit);
  Room r = just_enough();
  r.device.ports[0] = {kDown, 1};
  const Status s = fits(needs_of(c), r);
  EXPECT_TRUE(s) << s.error().text;
  r.gids[0].set_gid(kLinkLocal);
  EXPECT_TRUE(fits(needs_of(c), r)) << "it names no GID: any family will do";
  r.gids.clear();
  EXPECT_FALSE(fits(needs_of(c), r)) << "the plugin gives it an address all the same";
}

// A datagram may be as long as the MTU was where its sender came to life.
TEST(Room, DatagramsNeedTheMtuOfTheirPort) {
  ContextRecord c = context();
  for (auto& q : c.qps) q = qp(q.vqpn, kUd);
  wire::Needs n = needs_of(c);
  Room here = just_enough();
  here.device.ports[0].active_mtu = kMtu4096;
  has_now(n, here);
  const Status s = fits(n, just_enough());
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find("an MTU of 4096 on port 1 (QP 17), which has 1024"), std::string::npos) << s.error().text;
  EXPECT_TRUE(fits(n, here));
}

// Nobody could make them again there, after the commit.
TEST(Room, AddressHandlesNeedAGidOfTheFamilyThatTheySendFrom) {
  const ContextRecord c = context();
  migr_fd_desc source{};
  source.kind = MIGR_FD_SOURCE;
  source.ctx_id = c.rec.ctx_id;
  source.obj_handle = 1;
  source.obj_type = IB_UVERBS_GID_TYPE_ROCE_V2;
  std::memcpy(&source.addr, kLinkLocal.data(), sizeof source.addr);
  std::memcpy(&source.bytes, kLinkLocal.data() + sizeof source.addr, sizeof source.bytes);
  migr_fd_desc of_another = source, no_source = source;
  of_another.ctx_id++, no_source.kind = MIGR_FD_ASYNC;
  std::vector<wire::Needs> n, others;
  add_needs(n, c, std::array{source, source});
  add_needs(others, c, std::array{of_another, no_source});
  Room r = just_enough();
  EXPECT_TRUE(fits(others[0], r));
  const Status s = fits(n[0], r);
  ASSERT_FALSE(s);
  EXPECT_NE(s.error().text.find("It needs a RoCE v2 GID of the family IPv6 link-local on port 1 (address handles)"), std::string::npos) << s.error().text;
  EXPECT_EQ(s.error().text.find(';'), std::string::npos) << "more than one: " << s.error().text;
  r.gids.push_back(r.gids[0]);
  r.gids[1].set_gid(kLinkLocal);
  EXPECT_TRUE(fits(n[0], r));
}

TEST(Room, ContextsOfOneDeviceAreAddedUp) {
  std::vector<wire::Needs> n;
  ContextRecord a = context(), b = context(), other = context();
  std::strcpy(other.rec.ibdev, "rxe7");
  b.mrs[0].length = 5 << 20;
  for (const auto* c : {&a, &b, &other}) add_needs(n, *c);
  ASSERT_EQ(n.size(), 2u);
  EXPECT_EQ(n[0].qp(), 10u);
  EXPECT_EQ(n[0].ah(), 4u);
  EXPECT_EQ(n[0].mr_size(), 5u << 20);
  EXPECT_EQ(n[0].ports_size(), 1) << "QPs that need the same are one line";
  EXPECT_EQ(n[1].device(), "rxe7");
  EXPECT_EQ(n[1].qp(), 5u);
}

TEST(Room, WithoutADeviceItSaysSo) {
  if (access("/sys/class/infiniband_verbs/uverbs0", F_OK) == 0) GTEST_SKIP() << "there is an RDMA device here";
  auto r = room_of("rxe0");
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, ENODEV);
}

TEST(Memory, IsComparedWithWhatIsFree) {
  char name[] = "/tmp/room_test.XXXXXX";
  ASSERT_GE(mkstemp(name), 0);
  std::ofstream(name) << "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\nSwapTotal: 5000 kB\nSwapFree:    1024 kB\n";
  EXPECT_TRUE(memory_fits(3 << 20, name));
  const Status s = memory_fits((3 << 20) + 1, name);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOMEM);
  EXPECT_NE(s.error().text.find("has filled 4 MB of memory, and 3 MB are free here"), std::string::npos) << s.error().text;
  unlink(name);
  EXPECT_TRUE(memory_fits(1)) << "this machine";
  EXPECT_FALSE(memory_fits(1ull << 60));
}

TEST(Memory, OfAProcessIsWhatItHasFilled) {
  constexpr std::size_t kBytes = 32 << 20;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    char* half = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(half, 1, kBytes / 2);
    char* shared = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    std::memset(shared, 1, kBytes / 4);
    (void)!write(ready[1], "x", 1);
    for (;;) pause();
  }
  char x;
  ASSERT_EQ(read(ready[0], &x, 1), 1);
  EXPECT_GE(filled_bytes(child), kBytes * 3 / 4);
  EXPECT_LT(filled_bytes(child), kBytes * 5 / 4);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(filled_bytes(child), 0u);
}

std::string mapping(const std::string& range, const std::string& perms, int inode, int own_kb, int common_kb, const std::string& flags, int page_kb = 2048) {
  return range + " " + perms + " 00000000 00:0f " + std::to_string(inode) + "    /anon_hugepage (deleted)\nSize:  1 kB\nKernelPageSize:     " + std::to_string(page_kb) +
         " kB\nRss:    0 kB\nShared_Hugetlb:   " + std::to_string(common_kb) + " kB\nPrivate_Hugetlb:   " + std::to_string(own_kb) + " kB\nVmFlags: rd wr mr mw me " + flags + "\n";
}

TEST(HugeMemory, IsWhatIsTouchedOrReserved) {
  HugeMemory all;
  const auto add = [&](const std::string& smaps) {
    std::istringstream in(smaps);
    add_huge_memory(all, in);
  };
  const std::uint64_t k2M = 2 << 20, k1G = 1 << 30;
  add(mapping("7f0000000000-7f0000a00000", "rw-p", 1, 4096, 0, "de ht sd") + "7f1000000000-7f1000001000 r--p 00000000 00:00 0 \nKernelPageSize:   4 kB\nVmFlags: rd mr nr\n");
  EXPECT_EQ(all.needed, (std::map<std::uint64_t, std::uint64_t>{{k2M, 5 * k2M}})) << "of which two are touched";
  EXPECT_EQ(all.filled, 2 * k2M);
  // Its child, with a page of its own, and one that came about without a reservation; and 1 GB, which another one shares.
  add(mapping("7f0000000000-7f0000a00000", "rw-p", 1, 2048, 4096, "ht") + mapping("7f0001000000-7f0001a00000", "rw-p", 2, 2048, 0, "nr ht") +
      mapping("7f4000000000-7f4080000000", "rw-s", 3, 0, 1 << 20, "ht", 1 << 20));
  add(mapping("7f8000000000-7f8080000000", "rw-s", 3, 0, 1 << 20, "ht", 1 << 20));
  EXPECT_EQ(all.needed, (std::map<std::uint64_t, std::uint64_t>{{k2M, 7 * k2M}, {k1G, 2 * k1G}}));
  EXPECT_EQ(all.filled, 4 * k2M + k1G);
}

TEST(HugeMemory, IsComparedWithPagesOfItsSize) {
  char name[] = "/tmp/room_test.XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::string folder = name;
  const auto put = [&](const char* file, int pages) { std::ofstream(folder + "/hugepages-2048kB/" + file) << pages << "\n"; };
  std::filesystem::create_directories(folder + "/hugepages-2048kB");
  put("free_hugepages", 10);
  put("resv_hugepages", 4);
  put("nr_overcommit_hugepages", 3);
  put("surplus_hugepages", 1);
  const auto fit = [&](std::uint64_t page, std::uint64_t bytes) {
    wire::CheckRequest r;
    auto* h = r.add_huge();
    h->set_page_bytes(page);
    h->set_bytes(bytes);
    return huge_memory_fits(r.huge(), folder);
  };
  EXPECT_TRUE(fit(2 << 20, 8 << 21));
  const Status s = fit(2 << 20, (8 << 21) + 1);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOMEM);
  EXPECT_NE(s.error().text.find("has 9 huge pages of 2048 kB, and 8 are free here"), std::string::npos) << s.error().text;
  put("nr_overcommit_hugepages", 0);
  EXPECT_TRUE(fit(2 << 20, 6 << 21));
  EXPECT_FALSE(fit(2 << 20, 7 << 21));
  EXPECT_FALSE(fit(1 << 30, 1)) << "none of that size";
  EXPECT_TRUE(fit(1 << 30, 0));
  EXPECT_TRUE(huge_memory_fits({}, folder)) << "of an older source";
  std::filesystem::remove_all(folder);
}

// A checkpoint of 1 GB was written to a file system in memory that had room for it; the kernel ended the service.
TEST(Disk, InMemoryItIsMemory) {
  struct statfs st;
  ASSERT_EQ(statfs("/dev/shm", &st), 0);
  ASSERT_EQ(st.f_type, TMPFS_MAGIC);
  char name[] = "/tmp/room_test.XXXXXX";
  ASSERT_GE(mkstemp(name), 0);
  std::ofstream(name) << "MemAvailable:   2048 kB\nSwapFree:    0 kB\n";
  EXPECT_TRUE(disk_fits(1 << 20, "/dev/shm/no/such", 1 << 20, name));
  const Status s = disk_fits((1 << 20) + 1, "/dev/shm/no/such", 1 << 20, name);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOSPC);
  EXPECT_NE(s.error().text.find("/dev/shm is in memory, of which 2 MB are free and 1 MB are needed for the processes"), std::string::npos) << s.error().text;
  unlink(name);
}

TEST(Disk, IsAskedWhereTheFolderWillBe) {
  EXPECT_TRUE(disk_fits(1, "/tmp/no/such/folder/yet"));
  const Status s = disk_fits(1ull << 62, "/tmp/no/such");
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ENOSPC);
  EXPECT_NE(s.error().text.find("free in /tmp"), std::string::npos) << s.error().text;
}

}  // namespace
}  // namespace migr::room_test
