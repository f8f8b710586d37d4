// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migr.img, from another host or from a folder: taken as it is, with an envelope whose checksum fits, and written as text, so that
// mutations need not get the lengths of nested messages right.
#include "migr/restore.h"

#include <memory>

#include "migr.pb.h"
#include "sealed.h"
#include "seeds.h"

namespace {

using Image = std::unique_ptr<migr_rst_image, decltype(&migr_rst_image_free)>;
constexpr std::string_view kMagic{"migrimg\0", 8};

Image unpacked(std::string_view bytes) {
  migr_rst_image* img = nullptr;
  migr_rst_err err{};
  if (migr_rst_unpack(bytes.data(), bytes.size(), &img, &err) == 0) return {img, migr_rst_image_free};
  always(err.text[0] && std::memchr(err.text, 0, sizeof err.text), "a refusal has its reason");
  return {nullptr, migr_rst_image_free};
}

std::string packed(const migr_rst_image& img) {
  void* buf = nullptr;
  std::size_t len = 0;
  migr_rst_err err{};
  if (migr_rst_pack(&img, &buf, &len, &err)) return "";
  std::string out(static_cast<char*>(buf), len);
  std::free(buf);
  return out;
}

template <class Object>
void rings_of(std::uint32_t type, const Object* objects, std::uint32_t count) {
  migr_rst_ring rings[2];
  for (std::uint32_t i = 0; i < count; i++) migr_rst_rings(type, &objects[i].resp, rings);
}

}  // namespace

/// One of each object, payloads without their envelope.
std::vector<std::string> seeds() {
  Image img(migr_rst_image_new(), migr_rst_image_free);
  const std::string empty = packed(*img);
  migr_rst_process* p = migr_rst_process_new(4711);
  migr_rst_context* c = migr_rst_add_context(p);
  std::strcpy(c->rec.ibdev, "rxe0");
  c->rec.ctx_id = 10;
  c->rec.flags = MIGR_CTX_ATTACHED;
  migr_rst_add_pd(c)->rec.handle = 3;
  migr_rst_mr* mr = migr_rst_add_mr(c);
  mr->rec.handle = 4;
  mr->rec.pd_handle = 3;
  mr->rec.length = 4096;
  migr_rst_cq* cq = migr_rst_add_cq(c);
  cq->rec.handle = 5;
  cq->rec.cqe = 128;
  cq->resp.len = sizeof cq->resp.data;  // the most
  migr_rst_srq* srq = migr_rst_add_srq(c);
  srq->rec.handle = 6;
  srq->rec.pd_handle = 3;
  migr_rst_qp* qp = migr_rst_add_qp(c);
  qp->rec.handle = 20;
  qp->rec.vqpn = qp->rec.pqpn = 0x11;
  qp->rec.pd_handle = 3;
  qp->rec.send_cq_handle = qp->rec.recv_cq_handle = 5;
  qp->rec.srq_handle = 6;
  qp->rec.qp_type = 2;
  qp->resp.len = 32;
  migr_rst_add_other(c)->rec.handle = 30;
  const migr_fd_desc fds[] = {{MIGR_FD_CONTEXT, 7, 7, 10, MIGR_NO_HANDLE, 0, 0, 0, 0, 0, 0},
                              {MIGR_FD_CHANNEL, 9, 7, 10, 5, 0, 0, 0, 0, 0, 0},
                              {MIGR_FD_RING, -1, 7, 10, 0, MIGR_OBJ_CQ, 5, 0, 0x7f0000000000, 8192, 0x1000}};
  const std::uint8_t instance[16] = {1, 2, 3};
  if (migr_rst_process_describe(p, fds, 3, instance) || migr_rst_image_add(img.get(), p)) return {};
  const std::string full = packed(*img);
  return {full.substr(kEnvelope), empty.substr(kEnvelope), full, to_text<migr::Image>(full.substr(kEnvelope))};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  Image img = unpacked(image_of<migr::Image>(kMagic, input));
  if (!img) return 0;
  for (std::uint32_t i = 0; i < img->nr_processes; i++) {
    migr_rst_process* p = img->processes[i];
    migr_rst_err err{};
    if (migr_rst_process_check(p, &err)) always(err.text[0], "a refusal has its reason");
    for (std::uint32_t k = 0; k < p->nr_contexts; k++) {
      const migr_rst_context& c = p->contexts[k];
      rings_of(MIGR_OBJ_CQ, c.cqs, c.rec.nr_cq);
      rings_of(MIGR_OBJ_SRQ, c.srqs, c.rec.nr_srq);
      rings_of(MIGR_OBJ_QP, c.qps, c.rec.nr_qp);
    }
    if (migr_rst_rings_index(p) == 0 && p->nr_fds)
      for (std::uint32_t k = 0; k < p->nr_fds; k++) {
        migr_rst_context* c = nullptr;
        std::uint64_t offset = 0;
        (void)migr_rst_ring_find(p, p->fds[k].addr, p->fds[k].pgoff, &c, &offset, &err);
      }
  }
  const std::string again = packed(*img);
  always(again.empty() || unpacked(again), "what was taken can be stored and is taken again");
  return 0;
}
