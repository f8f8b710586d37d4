// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The image: what goes in comes out, and what is damaged says so. No NIC, no root.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <rdma/rdma_user_rxe.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "migr/restore.h"

namespace {

using Image = std::unique_ptr<migr_rst_image, void (*)(migr_rst_image*)>;

migr_rst_resp srq_resp(std::uint64_t offset, std::uint32_t size) {
  rxe_create_srq_resp r{};
  r.mi.offset = offset;
  r.mi.size = size;
  migr_rst_resp out{};
  out.len = sizeof r;
  std::memcpy(out.data, &r, sizeof r);
  return out;
}

migr_rst_resp cq_resp(std::uint64_t offset, std::uint32_t size) {
  rxe_create_cq_resp r{};
  r.mi.offset = offset;
  r.mi.size = size;
  migr_rst_resp out{};
  out.len = sizeof r;
  std::memcpy(out.data, &r, sizeof r);
  return out;
}

migr_rst_resp qp_resp(std::uint64_t rq, std::uint32_t rq_size, std::uint64_t sq, std::uint32_t sq_size) {
  rxe_create_qp_resp r{};
  r.rq_mi.offset = rq;
  r.rq_mi.size = rq_size;
  r.sq_mi.offset = sq;
  r.sq_mi.size = sq_size;
  migr_rst_resp out{};
  out.len = sizeof r;
  std::memcpy(out.data, &r, sizeof r);
  return out;
}

// Fills every byte of a record with something that is not its neighbour's.
template <class T>
void scribble(T& rec, unsigned char seed) {
  auto* p = reinterpret_cast<unsigned char*>(&rec);
  for (std::size_t i = 0; i < sizeof rec; i++) p[i] = static_cast<unsigned char>(seed + 7 * i);
}

// One process, two contexts, every kind of object; 40 QPs so that arrays grow.
Image sample() {
  Image img(migr_rst_image_new(), migr_rst_image_free);
  migr_rst_process* p = migr_rst_process_new(4711);
  p->ns_pid = 1;
  for (std::uint32_t k = 0; k < 2; k++) {
    migr_rst_context* c = migr_rst_add_context(p);
    c->rec.ctx_id = 10 + k;
    c->rec.pid = 4711;
    c->rec.num_comp_vectors = 2;
    c->rec.mr_bytes = 1ull << 40;
    std::strcpy(c->rec.comm, "ib_write_bw");
    std::strcpy(c->rec.ibdev, k ? "rxe1" : "rxe0");
    migr_rst_add_pd(c)->rec.handle = 3;
    migr_rst_mr* mr = migr_rst_add_mr(c);
    scribble(mr->rec, 9);
    mr->rec.pd_handle = 3;
    mr->rec.flags = 0;
    migr_rst_cq* cq = migr_rst_add_cq(c);
    cq->rec.handle = 5;
    cq->rec.cqe = 128;
    cq->rec.channel = 1;
    cq->rec.user_handle = 0x7f0011223344;
    cq->resp = cq_resp(0x1000 + k, 8192);
    migr_rst_srq* srq = migr_rst_add_srq(c);
    scribble(srq->rec, 3);
    srq->rec.handle = 6;
    srq->rec.pd_handle = 3;
    srq->rec.srq_type = 0;  // basic
    srq->rec.reserved = 0;
    srq->resp = srq_resp(0x3000 + k, 4096);
    for (std::uint32_t i = 0; i < 40; i++) {
      migr_rst_qp* qp = migr_rst_add_qp(c);
      scribble(qp->rec, static_cast<unsigned char>(i));
      qp->rec.handle = 20 + i;
      qp->rec.vqpn = 0x11 + i;
      qp->rec.pqpn = 0x11 + i;
      qp->rec.dest_qpn = 0x99;
      qp->rec.pd_handle = 3;
      qp->rec.send_cq_handle = qp->rec.recv_cq_handle = 5;
      qp->rec.srq_handle = i == 7 ? 6 : MIGR_NO_HANDLE;
      qp->rec.qp_type = 2;  // RC
      qp->rec.flags = 0;
      qp->rec.ah.reserved = 0;
      qp->resp = qp_resp(0x100000 + i * 0x10000, 4096, 0x108000 + i * 0x10000, 16384);
    }
  }
  const migr_fd_desc fds[] = {
      {MIGR_FD_CONTEXT, 7, 7, 10, MIGR_NO_HANDLE, 0, 0, 0, 0, 0, 0},
      {MIGR_FD_ASYNC, 8, 7, 10, MIGR_NO_HANDLE, 0, 0, 0, 0, 0, 0},
      {MIGR_FD_CHANNEL, 9, 7, 10, 5, 0, 0, 0, 0, 0, 0},
      {MIGR_FD_CONTEXT, 17, 17, 11, MIGR_NO_HANDLE, 0, 0, 0, 0, 0, 0},
      {MIGR_FD_CHANNEL, 19, 17, 11, 5, 0, 0, 0, 0, 0, 0},
      {MIGR_FD_RING, -1, 7, 10, 0, MIGR_OBJ_CQ, 5, 0, 0x7f0000000000, 8192, 0x1000},
  };
  const std::uint8_t instance[16] = {1, 2, 3, 250, 5};
  EXPECT_EQ(migr_rst_process_describe(p, fds, 6, instance), 0);
  EXPECT_EQ(migr_rst_image_add(img.get(), p), 0);
  return img;
}

std::vector<unsigned char> packed(const migr_rst_image* img) {
  void* buf = nullptr;
  std::size_t len = 0;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_pack(img, &buf, &len, &err), 0) << err.text;
  std::vector<unsigned char> out(static_cast<unsigned char*>(buf), static_cast<unsigned char*>(buf) + len);
  std::free(buf);
  return out;
}

int unpacked(const std::vector<unsigned char>& bytes, migr_rst_err& err, Image* out = nullptr) {
  migr_rst_image* img = nullptr;
  const int ret = migr_rst_unpack(bytes.data(), bytes.size(), &img, &err);
  if (ret == 0) {
    if (out)
      out->reset(img);
    else
      migr_rst_image_free(img);
  }
  return ret;
}

TEST(Image, WhatGoesInComesOut) {
  Image was = sample(), is(nullptr, migr_rst_image_free);
  migr_rst_err err{};
  ASSERT_EQ(unpacked(packed(was.get()), err, &is), 0) << err.text;
  ASSERT_EQ(is->nr_processes, 1u);
  const migr_rst_process *a = was->processes[0], *b = is->processes[0];
  EXPECT_EQ(b->pid, 4711u);
  EXPECT_EQ(b->ns_pid, 1u);
  EXPECT_EQ(std::memcmp(a->instance, b->instance, 16), 0);
  ASSERT_EQ(b->nr_fds, a->nr_fds);
  EXPECT_EQ(std::memcmp(a->fds, b->fds, a->nr_fds * sizeof *a->fds), 0);
  ASSERT_EQ(b->nr_contexts, 2u);
  for (int k = 0; k < 2; k++) {
    const migr_rst_context &ca = a->contexts[k], &cb = b->contexts[k];
    EXPECT_EQ(std::memcmp(&ca.rec, &cb.rec, sizeof ca.rec), 0);
    ASSERT_EQ(cb.rec.nr_qp, 40u);
    EXPECT_EQ(std::memcmp(&ca.pds[0].rec, &cb.pds[0].rec, sizeof(migr_pd_rec)), 0);
    EXPECT_EQ(std::memcmp(&ca.mrs[0].rec, &cb.mrs[0].rec, sizeof(migr_mr_rec)), 0);
    EXPECT_EQ(std::memcmp(&ca.cqs[0].rec, &cb.cqs[0].rec, sizeof(migr_cq_rec)), 0);
    EXPECT_EQ(std::memcmp(&ca.cqs[0].resp, &cb.cqs[0].resp, sizeof(migr_rst_resp)), 0);
    ASSERT_EQ(cb.rec.nr_srq, 1u);
    EXPECT_EQ(std::memcmp(&ca.srqs[0].rec, &cb.srqs[0].rec, sizeof(migr_srq_rec)), 0);
    EXPECT_EQ(std::memcmp(&ca.srqs[0].resp, &cb.srqs[0].resp, sizeof(migr_rst_resp)), 0);
    for (int i = 0; i < 40; i++) {
      // The whole record: a field that is forgotten in one direction shows here.
      EXPECT_EQ(std::memcmp(&ca.qps[i].rec, &cb.qps[i].rec, sizeof(migr_qp_rec)), 0) << i;
      EXPECT_EQ(std::memcmp(&ca.qps[i].resp, &cb.qps[i].resp, sizeof(migr_rst_resp)), 0) << i;
    }
  }
}

TEST(Image, EmptyIsAnImage) {
  Image img(migr_rst_image_new(), migr_rst_image_free);
  migr_rst_err err{};
  EXPECT_EQ(unpacked(packed(img.get()), err), 0) << err.text;
}

TEST(Image, EveryTruncationIsToldAsSuch) {
  Image img = sample();
  const auto whole = packed(img.get());
  for (std::size_t n = 0; n < whole.size(); n += n < 64 ? 1 : 97) {
    migr_rst_err err{};
    EXPECT_EQ(unpacked({whole.begin(), whole.begin() + static_cast<long>(n)}, err), -EBADMSG) << n;
    EXPECT_NE(std::string(err.text).find("truncated"), std::string::npos) << err.text;
  }
}

TEST(Image, EveryFlippedBitIsFound) {
  Image img = sample();
  const auto whole = packed(img.get());
  for (std::size_t n = 0; n < whole.size(); n += 13) {
    auto bad = whole;
    bad[n] ^= 1u << (n % 8);
    migr_rst_err err{};
    EXPECT_LT(unpacked(bad, err), 0) << "byte " << n;
    EXPECT_STRNE(err.text, "");
  }
}

TEST(Image, AnotherVersionSaysWhichAndWhatToDo) {
  Image img = sample();
  auto bad = packed(img.get());
  bad[8] = 99;
  migr_rst_err err{};
  EXPECT_EQ(unpacked(bad, err), -EPROTONOSUPPORT);
  EXPECT_NE(std::string(err.text).find("version 99"), std::string::npos) << err.text;
  EXPECT_NE(std::string(err.text).find("same migr"), std::string::npos) << err.text;
}

TEST(Image, AnotherFileIsNotAnImage) {
  migr_rst_err err{};
  EXPECT_EQ(unpacked(std::vector<unsigned char>(4096, 'x'), err), -EBADMSG);
  EXPECT_NE(std::string(err.text).find("not an image"), std::string::npos) << err.text;
}

std::uint32_t crc32_of(const unsigned char* p, std::size_t n) {
  std::uint32_t crc = ~0u;
  while (n--) {
    crc ^= *p++;
    for (int i = 0; i < 8; i++) crc = (crc >> 1) ^ (0xedb88320u & -(crc & 1));
  }
  return ~crc;
}

// Length and checksum of the envelope fit whatever is in it: as a program would write it that is not ours, or one of another time.
void seal(std::vector<unsigned char>& image) {
  const std::uint64_t n = image.size() - 24;
  const std::uint32_t crc = crc32_of(image.data() + 24, n);
  std::memcpy(image.data() + 12, &crc, 4);
  std::memcpy(image.data() + 16, &n, 8);
}

// Decodes it and does with it what a restore does before it makes anything. What matters: it comes back, with a reason or without.
int walked(const std::vector<unsigned char>& bytes, migr_rst_err& err) {
  Image img(nullptr, migr_rst_image_free);
  int ret = unpacked(bytes, err, &img);
  for (std::uint32_t i = 0; !ret && i < img->nr_processes; i++) {
    migr_rst_process* p = img->processes[i];
    ret = migr_rst_process_check(p, &err);
    for (std::uint32_t k = 0; k < p->nr_contexts; k++) {
      migr_rst_context& c = p->contexts[k];
      for (std::uint32_t q = 0; q < c.rec.nr_qp; q++) c.qps[q].new_resp = c.qps[q].resp;
      for (std::uint32_t q = 0; q < c.rec.nr_cq; q++) c.cqs[q].new_resp = c.cqs[q].resp;
      for (std::uint32_t q = 0; q < c.rec.nr_srq; q++) c.srqs[q].new_resp = c.srqs[q].resp;
      for (std::uint32_t q = 0; q < c.rec.nr_qp; q++) (void)migr_rst_find_qp(&c, c.qps[q].rec.vqpn);
    }
    migr_rst_context* found = nullptr;
    std::uint64_t pgoff = 0;
    migr_rst_err other{};
    (void)migr_rst_ring_find(p, 0x7f0000000000, 0x1000, &found, &pgoff, &other);
    (void)migr_rst_ring_find(p, 0x123000, 0x108000, &found, &pgoff, &other);
  }
  return ret;
}

TEST(Image, TruncatedContentInAWholeEnvelopeComesBackWithAReason) {
  Image img = sample();
  const auto whole = packed(img.get());
  for (std::size_t n = 24; n < whole.size(); n++) {
    std::vector<unsigned char> cut(whole.begin(), whole.begin() + static_cast<long>(n));
    seal(cut);
    migr_rst_err err{};
    if (const int ret = walked(cut, err)) {
      EXPECT_STRNE(err.text, "") << n << ": " << ret;
    }
  }
}

TEST(Image, RandomContentComesBackWithAReason) {
  Image img = sample();
  const auto whole = packed(img.get());
  std::mt19937 rnd(20260101);
  int refused = 0;
  for (int round = 0; round < 1500; round++) {
    auto bad = whole;
    const int kind = round % 4;
    for (int k = 1 + static_cast<int>(rnd() % (kind == 3 ? 64 : 4)); k--;) {
      const std::size_t at = 24 + rnd() % (bad.size() - 24);
      switch (kind) {
        case 0: bad[at] ^= static_cast<unsigned char>(1u << rnd() % 8); break;
        case 1: bad[at] = rnd() % 2 ? 0xff : 0; break;
        case 2: bad.erase(bad.begin() + static_cast<long>(at), bad.begin() + static_cast<long>(std::min(bad.size(), at + 1 + rnd() % 40))); break;
        default: bad[at] = static_cast<unsigned char>(rnd());
      }
      if (bad.size() < 64) break;
    }
    seal(bad);
    migr_rst_err err{};
    if (walked(bad, err)) {
      refused++;
      EXPECT_STRNE(err.text, "") << "round " << round;
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(Image, NoiseComesBackWithAReason) {
  Image img = sample();
  const auto whole = packed(img.get());
  std::mt19937 rnd(7);
  for (int round = 0; round < 1500; round++) {
    std::vector<unsigned char> noise(whole.begin(), whole.begin() + 24);
    for (std::size_t n = rnd() % 400; n--;) noise.push_back(static_cast<unsigned char>(rnd()));
    seal(noise);
    migr_rst_err err{};
    if (walked(noise, err)) {
      EXPECT_STRNE(err.text, "");
    }
  }
}

TEST(Image, AnotherAbiOfTheModuleIsSaid) {
  Image img(migr_rst_image_new(), migr_rst_image_free);
  auto old = packed(img.get());
  ASSERT_EQ(old.size(), 26u) << "the ABI version alone: field 1, varint";
  old[25] = MIGR_ABI_VERSION + 1;
  seal(old);
  migr_rst_err err{};
  EXPECT_EQ(unpacked(old, err), -EPROTONOSUPPORT);
  EXPECT_NE(std::string(err.text).find("ABI version " + std::to_string(MIGR_ABI_VERSION + 1)), std::string::npos) << err.text;
}

class Folder : public ::testing::Test {
 protected:
  void SetUp() override {
    char tmpl[] = "/tmp/migr-restore-XXXXXX";
    ASSERT_NE(mkdtemp(tmpl), nullptr);
    path_ = tmpl;
    fd_ = open(tmpl, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    ASSERT_GE(fd_, 0);
  }
  void TearDown() override {
    close(fd_);
    std::filesystem::remove_all(path_);
  }
  std::string path_;
  int fd_ = -1;
};

TEST_F(Folder, FileIsPrivateAndWholeAndNothingElse) {
  Image img = sample();
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_write(img.get(), fd_, &err), 0) << err.text;
  ASSERT_EQ(migr_rst_write(img.get(), fd_, &err), 0) << "again: " << err.text;
  struct stat st {};
  ASSERT_EQ(fstatat(fd_, MIGR_RST_IMAGE_NAME, &st, 0), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path_), {}), 1) << "a temporary was left";
  migr_rst_image* back = nullptr;
  ASSERT_EQ(migr_rst_read(fd_, &back, &err), 0) << err.text;
  EXPECT_EQ(back->nr_processes, 1u);
  migr_rst_image_free(back);
}

TEST_F(Folder, AnImageThatOthersCanReadIsRefused) {
  Image img = sample();
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_write(img.get(), fd_, &err), 0) << err.text;
  for (const mode_t mode : {0640u, 0604u, 0620u}) {
    ASSERT_EQ(fchmodat(fd_, MIGR_RST_IMAGE_NAME, mode, 0), 0);
    migr_rst_image* back = nullptr;
    EXPECT_EQ(migr_rst_read(fd_, &back, &err), -EACCES) << std::oct << mode;
    EXPECT_NE(std::string(err.text).find("open to others"), std::string::npos) << err.text;
  }
}

TEST_F(Folder, NoImageIsEnoent) {
  migr_rst_image* img = nullptr;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_read(fd_, &img, &err), -ENOENT);
  EXPECT_NE(std::string(err.text).find(MIGR_RST_IMAGE_NAME), std::string::npos) << err.text;
}

TEST_F(Folder, FileIdsComeBack) {
  const migr_rst_file files[] = {{0x21, 4711, 10, MIGR_FD_CONTEXT, 7, 0, 0}, {0x22, 4711, 10, MIGR_FD_CHANNEL, 9, 1, 0}, {0x23, 4711, 10, MIGR_FD_ASYNC, 8, 0, 1}};
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_files_write(files, 3, fd_, &err), 0) << err.text;
  migr_rst_file* back = nullptr;
  std::uint32_t nr = 0;
  ASSERT_EQ(migr_rst_files_read(fd_, &back, &nr, &err), 0) << err.text;
  ASSERT_EQ(nr, 3u);
  EXPECT_EQ(std::memcmp(back, files, sizeof files), 0);
  std::free(back);
}

TEST(Check, ACompleteRecordPasses) {
  Image img = sample();
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), 0) << err.text;
}

TEST(Check, AMissingParentIsNamed) {
  Image img = sample();
  img->processes[0]->contexts[1].qps[3].rec.pd_handle = 77;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), -EBADMSG);
  EXPECT_NE(std::string(err.text).find("PD 77"), std::string::npos) << err.text;
}

TEST(Check, AContextWithoutLibmigrIsRefused) {
  Image img = sample();
  migr_rst_process_describe(img->processes[0], nullptr, 0, nullptr);
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), -ENOENT);
  EXPECT_NE(std::string(err.text).find("libmigr"), std::string::npos) << err.text;
}

TEST(Check, MemoryOfADeviceIsRefused) {
  Image img = sample();
  img->processes[0]->contexts[0].mrs[0].rec.flags = MIGR_MR_DMABUF;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), -EOPNOTSUPP);
}

TEST(Graph, TheFormerHolderOfANameIsNotFoundByIt) {
  Image img = sample();
  migr_rst_context* c = migr_rst_find_context(img.get(), 11);
  ASSERT_NE(c, nullptr);
  c->qps[0].rec.vqpn = c->qps[9].rec.vqpn;
  c->qps[0].rec.flags = MIGR_QP_FORMER;
  EXPECT_EQ(migr_rst_find_qp(c, c->qps[9].rec.vqpn), &c->qps[9]);
}

TEST(Check, AnUnrestorableKindIsNamed) {
  Image img = sample();
  migr_rst_add_other(&img->processes[0]->contexts[0])->obj_type = MIGR_OBJ_DM;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), -EOPNOTSUPP);
  EXPECT_NE(std::string(err.text).find("device memory"), std::string::npos) << err.text;
}

TEST(Check, AnSrqOfAnotherTypeIsNamed) {
  Image img = sample();
  img->processes[0]->contexts[0].srqs[0].rec.srq_type = 1;  // XRC
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), -EOPNOTSUPP);
  EXPECT_NE(std::string(err.text).find("XRC"), std::string::npos) << err.text;
}

TEST(Check, AQpWithoutItsSrqIsDamaged) {
  Image img = sample();
  img->processes[0]->contexts[0].srqs[0].rec.handle = 66;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_process_check(img->processes[0], &err), -EBADMSG);
  EXPECT_NE(std::string(err.text).find("SRQ 6"), std::string::npos) << err.text;
}

TEST(Rings, AResizedSrqIsFoundWhereTheProcessSays) {
  Image img = sample();
  migr_rst_process* p = img->processes[0];
  const migr_fd_desc ring = {MIGR_FD_RING, -1, 7, 10, 0, MIGR_OBJ_SRQ, 6, 0, 0x7f0000100000, 8000, 0x77000};
  ASSERT_EQ(migr_rst_process_describe(p, &ring, 1, nullptr), 0);
  p->contexts[0].srqs[0].new_resp = srq_resp(0x6000, 8100);
  migr_rst_context* found = nullptr;
  std::uint64_t pgoff = 0;
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_ring_find(p, 0x7f0000100000, 0x77000, &found, &pgoff, &err), 0) << err.text;
  EXPECT_EQ(pgoff, 0x6000u);
}

TEST(Rings, AnSrqIsFoundWhereTheDriverPutIt) {
  Image img = sample();
  migr_rst_process* p = img->processes[0];
  migr_rst_srq& srq = p->contexts[0].srqs[0];
  migr_rst_ring was[2];
  ASSERT_EQ(migr_rst_rings(MIGR_OBJ_SRQ, &srq.resp, was), 1);
  srq.new_resp = srq_resp(0x6000, was[0].bytes);
  migr_rst_context* found = nullptr;
  std::uint64_t pgoff = 0;
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_ring_find(p, 0x7f0000100000, was[0].pgoff, &found, &pgoff, &err), 0) << err.text;
  EXPECT_EQ(pgoff, 0x6000u);
}

TEST(Rings, AreMatchedByResourceNotByOrder) {
  Image img = sample();
  migr_rst_process* p = img->processes[0];
  migr_rst_context& c = p->contexts[0];
  // The new host gives offsets in another order, and SQ before RQ.
  for (std::uint32_t i = 0; i < c.rec.nr_qp; i++)
    c.qps[i].new_resp = qp_resp(0x908000 - i * 0x10000, 4096, 0x900000 - i * 0x10000, 16384);
  c.cqs[0].new_resp = cq_resp(0x5000, 8192);
  migr_rst_context* found = nullptr;
  std::uint64_t pgoff = 0;
  migr_rst_err err{};
  ASSERT_EQ(migr_rst_ring_find(p, 0x123000, 0x108000 + 2 * 0x10000, &found, &pgoff, &err), 0) << err.text;
  EXPECT_EQ(found, &c);
  EXPECT_EQ(pgoff, 0x900000u - 2 * 0x10000);
  ASSERT_EQ(migr_rst_ring_find(p, 0x7f0000000000, 0x1000, &found, &pgoff, &err), 0) << err.text;
  EXPECT_EQ(pgoff, 0x5000u);
  EXPECT_EQ(migr_rst_ring_find(p, 0x123000, 0xdead000, &found, &pgoff, &err), -ENOENT);
}

TEST(Rings, AnotherSizeIsRefused) {
  Image img = sample();
  migr_rst_process* p = img->processes[0];
  p->contexts[0].cqs[0].new_resp = cq_resp(0x5000, 4096);
  migr_rst_context* found = nullptr;
  std::uint64_t pgoff = 0;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_ring_find(p, 0x7f0000000000, 0x1000, &found, &pgoff, &err), -EMSGSIZE);
}

TEST(Session, WithoutTheModuleItSaysSo) {
  if (access("/dev/migr", F_OK) == 0) GTEST_SKIP() << "migr.ko is loaded here";
  migr_rst* s = nullptr;
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_open(&s, &err), -ENOENT);
  EXPECT_NE(std::string(err.text).find("migr.ko is not loaded"), std::string::npos) << err.text;
}

TEST(Device, WithoutOneItSaysSo) {
  if (access("/sys/class/infiniband_verbs/uverbs0", F_OK) == 0) GTEST_SKIP() << "there is an RDMA device here";
  char ibdev[MIGR_IBDEV_NAME_MAX], path[64];
  migr_rst_err err{};
  EXPECT_EQ(migr_rst_device_find("rxe0", ibdev, path, &err), -ENODEV);
  EXPECT_STRNE(err.text, "");
}

}  // namespace
