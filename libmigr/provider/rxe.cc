/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Soft-RoCE. Its rings are plain memory shared with the kernel and mapped from
 * the uverbs fd: the driver's answer to create names the mmap offset, and
 * /proc/self/maps the address of a mapping with that offset. Both change
 * together when a process is restored.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string_view>

#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_rxe.h>

#include "../../include/migr/gid.h"
#include "../kernel_link.h"
#include "../maps.h"
#include "provider.h"
#include "uverbs_write.h"

namespace migr::provider {
namespace {

/// Bytes before the SGEs of a receive. Not sizeof: in C++ the header's flexible array has a byte of its own.
constexpr std::size_t kReceiveBytes = offsetof(rxe_recv_wqe, dma) + offsetof(rxe_dma_info, reserved) + sizeof(__u32);
static_assert(kReceiveBytes == 40);

struct Mapping {
  std::uint64_t start, bytes, offset;
};

/// Mappings in this process of the file behind `fd`.
int mappings_of(int fd, std::vector<Mapping>& out) {
  struct stat want {};
  if (fstat(fd, &want) != 0) return errno;
  return for_each_mapped([&](const Mapped& m) {
    if (m.inode == want.st_ino && m.device == want.st_dev) out.push_back({m.start, m.end - m.start, m.offset});
  });
}

/// Two contexts on one device map the same file; rxe numbers offsets per device, so an offset is one ring.
class Mappings {
 public:
  /// @return 0 or a positive errno
  int read(int fd) {
    if (const int error = mappings_of(fd, all_)) return error;
    std::sort(all_.begin(), all_.end(), [](const Mapping& a, const Mapping& b) { return a.offset < b.offset; });
    return 0;
  }
  const Mapping* at(std::uint64_t offset, std::uint64_t bytes) const {
    const auto after = std::upper_bound(all_.begin(), all_.end(), offset,
                                        [](std::uint64_t o, const Mapping& m) { return o < m.offset; });
    if (after == all_.begin()) return nullptr;
    const Mapping& m = *(after - 1);
    return offset - m.offset + bytes <= m.bytes ? &m : nullptr;
  }

 private:
  std::vector<Mapping> all_;
};

int qp_resp(KernelLink& kernel, std::uint32_t handle, rxe_create_qp_resp& resp) {
  std::uint32_t len = sizeof(resp);
  resp = {};
  if (const int error = kernel.driver_resp(MIGR_OBJ_QP, handle, &resp, len)) return error;
  return len < sizeof(resp) ? EPROTO : 0;
}

int cq_resp(const Context& context, std::uint32_t handle, rxe_create_cq_resp& resp) {
  std::uint32_t len = sizeof(resp);
  resp = {};
  if (const int error = context.kernel->driver_resp(MIGR_OBJ_CQ, handle, &resp, len)) return error;
  return len < sizeof(resp) ? EPROTO : 0;
}

/// An SRQ's ring: what the driver answered to create, unless the queue was resized.
int srq_ring(const SrqShadow& srq, mminfo& info) {
  info = {};
  if (srq.ring_bytes) {
    info.offset = srq.ring_offset;
    info.size = static_cast<__u32>(srq.ring_bytes);
    return 0;
  }
  rxe_create_srq_resp resp{};
  std::uint32_t len = sizeof(resp);
  if (const int error = srq.context->kernel->driver_resp(MIGR_OBJ_SRQ, srq.real->handle, &resp, len)) return error;
  info = resp.mi;
  return len < sizeof(resp) ? EPROTO : 0;
}

migr_fd_desc ring_desc(const Context& context, migr_obj_type type, std::uint32_t handle, unsigned ring,
                       const mminfo& info, const Mapping& where) {
  migr_fd_desc d{};
  d.kind = MIGR_FD_RING;
  d.fd = -1;
  d.context_fd = context.real->cmd_fd;
  d.ctx_id = context.ctx_id();
  d.cq_handle = MIGR_NO_HANDLE;
  d.obj_type = type;
  d.obj_handle = handle;
  d.ring = ring;
  d.addr = where.start + (info.offset - where.offset);
  d.bytes = info.size;
  d.pgoff = info.offset;
  return d;
}

/// Not libibverbs: a thread may wait in its ibv_get_cq_event() for ever, and nothing in it posts or polls.
bool is_provider_code(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  const std::string_view file = slash == path.npos ? path : path.substr(slash + 1);
  return file.find("-rdmav") != file.npos || file.starts_with("libmlx5.so") || file.starts_with("libmlx4.so") ||
         file.starts_with("libefa.so");
}

/// Where the provider's post_send lives tells the family, also where sysfs is not mounted.
const char* provider_file(const ibv_context_ops& ops) {
  Dl_info info{};
  if (!ops.post_send || !dladdr(reinterpret_cast<void*>(ops.post_send), &info) || !info.dli_fname) return "";
  const char* slash = strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}

bool is_rxe(const char* file) { return strncmp(file, "librxe", 6) == 0; }

}  // namespace

bool is_supported(const ibv_context&, const ibv_context_ops& ops) { return is_rxe(provider_file(ops)); }

std::string unsupported_reason(const Context& context) {
  const char* const file = provider_file(context.ops);
  if (is_rxe(file)) return "";
  std::string why = std::string("device ") + (context.real ? context.real->device->name : "?") +
                    " is not soft-RoCE (rxe), the only family that can be migrated so far";
  if (*file) why += std::string("; its provider is ") + file;
  return why;
}

namespace {

int locate(const Mappings& maps, const mminfo& info, QpShadow::Ring& out) {
  const Mapping* where = maps.at(info.offset, info.size);
  if (!where) return ENXIO;
  out = {reinterpret_cast<const void*>(where->start + (info.offset - where->offset)), info.size};
  return 0;
}

int locate(const Mappings& maps, KernelLink& kernel, const ibv_qp& qp, QpShadow::Ring& sends, QpShadow::Ring& receives) {
  rxe_create_qp_resp resp;
  if (const int error = qp_resp(kernel, qp.handle, resp)) return error;
  if (!qp.srq)  // a shared queue's receives belong to no QP
    if (const int error = locate(maps, resp.rq_mi, receives)) return error;
  return locate(maps, resp.sq_mi, sends);
}

/// Caller holds s.lock.
int locate(const Mappings& maps, SrqShadow& s) {
  mminfo info;
  if (const int error = srq_ring(s, info)) return error;
  return locate(maps, info, s.ring);
}

}  // namespace

int locate_queues(KernelLink& kernel, const ibv_qp& qp, QpShadow::Ring& sends, QpShadow::Ring& receives) {
  Mappings maps;
  if (const int error = maps.read(qp.context->cmd_fd)) return error;
  return locate(maps, kernel, qp, sends, receives);
}

int locate_queues(std::span<QpShadow* const> qps) {
  std::map<const Context*, Mappings> maps;
  for (QpShadow* q : qps) {
    if (q->send_ring.queue) continue;
    auto [found, fresh] = maps.try_emplace(q->context);
    if (fresh)
      if (const int error = found->second.read(q->context->real->cmd_fd)) return error;
    if (const int error = locate(found->second, *q->context->kernel, *q->real, q->send_ring, q->receive_ring)) return error;
  }
  return 0;
}

int locate_queues(std::span<SrqShadow* const> srqs) {
  std::map<const Context*, Mappings> maps;
  for (SrqShadow* s : srqs) {
    std::lock_guard guard(s->lock);
    if (s->ring.queue) continue;
    auto [found, fresh] = maps.try_emplace(s->context);
    if (fresh)
      if (const int error = found->second.read(s->context->real->cmd_fd)) return error;
    if (const int error = locate(found->second, *s)) return error;
  }
  return 0;
}

namespace {

/// Whether it has the layout that we know, with elements that begin with so many bytes.
bool layout_known(const rxe_queue_buf* queue, std::uint64_t bytes_mapped, std::size_t element_bytes) {
  const std::uint64_t slots = std::uint64_t{queue->index_mask} + 1;
  const std::uint32_t shift = queue->log2_elem_size;
  return (slots & queue->index_mask) == 0 && shift <= 16 && (std::uint64_t{1} << shift) >= element_bytes &&
         sizeof(*queue) + (slots << shift) <= bytes_mapped;
}

/// Pairs with the kernel's release of what it has consumed.
QueuePart not_completed(const rxe_queue_buf* queue) {
  const std::uint32_t mask = queue->index_mask;
  return {.from = __atomic_load_n(&queue->consumer_index, __ATOMIC_ACQUIRE) & mask,
          .to = __atomic_load_n(&queue->producer_index, __ATOMIC_ACQUIRE) & mask,
          .mask = mask};
}

/// Receives of a receive queue of so many bytes.
int receives_between(const rxe_queue_buf* queue, std::uint64_t bytes_mapped, QueuePart part, std::vector<KeptReceive>& out) {
  if (!layout_known(queue, bytes_mapped, kReceiveBytes)) return EPROTO;
  const std::uint32_t shift = queue->log2_elem_size;
  const std::size_t max_sges = ((std::size_t{1} << shift) - kReceiveBytes) / sizeof(rxe_sge);
  for (std::uint32_t i = part.from; i != part.to; i = (i + 1) & part.mask) {
    const auto* bytes = queue->data + (std::uint64_t{i} << shift);
    const auto* wqe = reinterpret_cast<const rxe_recv_wqe*>(bytes);
    if (wqe->dma.num_sge > max_sges) return EPROTO;
    KeptReceive& receive = out.emplace_back();
    receive.wr_id = wqe->wr_id;
    const auto* sge = reinterpret_cast<const rxe_sge*>(bytes + kReceiveBytes);
    for (std::uint32_t s = 0; s < wqe->dma.num_sge; ++s)
      receive.sges.push_back({sge[s].addr, sge[s].length, sge[s].lkey});
  }
  return 0;
}

}  // namespace

int outstanding_receives(QpShadow& shadow, std::vector<KeptReceive>& out) {
  if (shadow.real->srq) return 0;
  QpShadow* const one[] = {&shadow};
  if (const int error = locate_queues(one)) return error;
  const auto* queue = static_cast<const rxe_queue_buf*>(shadow.receive_ring.queue);
  return receives_between(queue, shadow.receive_ring.bytes, not_completed(queue), out);
}

int outstanding_receives(SrqShadow& shadow, std::vector<KeptReceive>& out) {
  if (!shadow.ring.queue) {
    Mappings maps;
    if (const int error = maps.read(shadow.context->real->cmd_fd)) return error;
    if (const int error = locate(maps, shadow)) return error;
  }
  const auto* queue = static_cast<const rxe_queue_buf*>(shadow.ring.queue);
  return receives_between(queue, shadow.ring.bytes, not_completed(queue), out);
}

/// As librxe's validate_send_wr(), and the kernel where that rings the doorbell.
int refusal_of(const QpShadow& shadow, const ibv_send_wr& wr) {
  if (shadow.app.state < IBV_QPS_RTS) return EINVAL;
  std::uint64_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) bytes += wr.sg_list[i].length;
  if (is_atomic(wr) && (bytes < kAtomicBytes || wr.wr.atomic.remote_addr % kAtomicBytes)) return EINVAL;
  const bool binds = shadow.app.qp_type == IBV_QPT_RC || shadow.app.qp_type == IBV_QPT_UC;
  return wr.opcode == IBV_WR_BIND_MW && (wr.num_sge || wr.imm_data || !binds) ? EINVAL : 0;
}

bool binds_by_work_request(const Context& context) { return unsupported_reason(context).empty(); }

bool ends_binding(const ibv_wc& wc) {
  // The kernel's IB_WC_WITH_INVALIDATE, as its driver leaves it there (6.1, 6.12): what it means in user space soft-RoCE never says.
  constexpr unsigned kWithInvalidate = IBV_WC_IP_CSUM_OK;
  return wc.status == IBV_WC_SUCCESS && (wc.opcode & IBV_WC_RECV) && (wc.wc_flags & (kWithInvalidate | IBV_WC_WITH_INV));
}

int sends_in_queue(QpShadow& shadow, unsigned& count) {
  QpShadow* const one[] = {&shadow};
  if (const int error = locate_queues(one)) return error;
  count = not_completed(static_cast<const rxe_queue_buf*>(shadow.send_ring.queue)).size();
  return 0;
}

int queue_parts(QpShadow& shadow, QueuePart& sends, QueuePart& receives) {
  QpShadow* const one[] = {&shadow};
  if (const int error = locate_queues(one)) return error;
  return queue_parts(shadow.send_ring, shadow.receive_ring, sends, receives);
}

int queue_parts(const QpShadow::Ring& send_ring, const QpShadow::Ring& receive_ring, QueuePart& sends, QueuePart& receives) {
  sends = not_completed(static_cast<const rxe_queue_buf*>(send_ring.queue));
  receives = {};
  if (receive_ring.queue) receives = not_completed(static_cast<const rxe_queue_buf*>(receive_ring.queue));
  return 0;
}

int receives_in(QpShadow& shadow, QueuePart part, std::vector<KeptReceive>& out) {
  return receives_in(shadow.receive_ring, part, out);
}

int receives_in(const QpShadow::Ring& ring, QueuePart part, std::vector<KeptReceive>& out) {
  if (!part.size()) return 0;
  return receives_between(static_cast<const rxe_queue_buf*>(ring.queue), ring.bytes, part, out);
}

namespace {

/// Bytes before the SGEs or inline data of a send.
constexpr std::size_t kSendBytes = offsetof(rxe_send_wqe, dma) + offsetof(rxe_dma_info, reserved) + sizeof(__u32);
static_assert(kSendBytes == 208);

/// enum wqe_state of the driver: posted, processing, pending, done, error.
constexpr std::uint32_t kPosted = 0;
constexpr std::uint32_t kPsnMask = 0xffffff;

void copy_request(const rxe_send_wr& from, ibv_send_wr& to) {
  to.wr_id = from.wr_id;
  to.opcode = static_cast<ibv_wr_opcode>(from.opcode);
  to.send_flags = from.send_flags;
  to.imm_data = from.ex.imm_data;  // or the key that is invalidated
  if (to.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || to.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
    to.wr.atomic.remote_addr = from.wr.atomic.remote_addr;
    to.wr.atomic.compare_add = from.wr.atomic.compare_add;
    to.wr.atomic.swap = from.wr.atomic.swap;
    to.wr.atomic.rkey = from.wr.atomic.rkey;
  } else {
    to.wr.rdma.remote_addr = from.wr.rdma.remote_addr;
    to.wr.rdma.rkey = from.wr.rdma.rkey;
  }
}

}  // namespace

int sends_in(QpShadow& shadow, QueuePart part, std::vector<QueuedSend>& out) { return sends_in(shadow.send_ring, part, out); }

int sends_in(const QpShadow::Ring& ring, QueuePart part, std::vector<QueuedSend>& out) {
  const auto* queue = static_cast<const rxe_queue_buf*>(ring.queue);
  if (!layout_known(queue, ring.bytes, kSendBytes)) return EPROTO;
  const std::uint32_t shift = queue->log2_elem_size;
  const std::size_t room = (std::size_t{1} << shift) - kSendBytes;
  for (std::uint32_t i = part.from; i != part.to; i = (i + 1) & part.mask) {
    const auto* bytes = queue->data + (std::uint64_t{i} << shift);
    const auto* wqe = reinterpret_cast<const rxe_send_wqe*>(bytes);
    QueuedSend& queued = out.emplace_back();
    copy_request(wqe->wr, queued.send.wr);
    queued.bytes = wqe->dma.length;
    queued.first_psn = wqe->first_psn;
    if (wqe->wr.opcode == IBV_WR_RDMA_READ) queued.read_psns = ((wqe->last_psn - wqe->first_psn) & kPsnMask) + 1;
    // LOC_QP_OP_ERR: maybe it was to be sent for the first time, its state is "error" either way.
    queued.begun = wqe->state != kPosted && wqe->status != IBV_WC_LOC_QP_OP_ERR;
    queued.given_up = gives_up(static_cast<ibv_wc_status>(wqe->status));
    if ((wqe->wr.send_flags & IBV_SEND_INLINE) || queued.send.wr.opcode == IBV_WR_ATOMIC_WRITE) {
      if (wqe->dma.length > room) return EPROTO;
      queued.send.inline_data.assign(bytes + kSendBytes, bytes + kSendBytes + wqe->dma.length);
      continue;
    }
    if (wqe->dma.num_sge > room / sizeof(rxe_sge)) return EPROTO;
    const auto* sge = reinterpret_cast<const rxe_sge*>(bytes + kSendBytes);
    for (std::uint32_t s = 0; s < wqe->dma.num_sge; ++s) queued.send.sges.push_back({sge[s].addr, sge[s].length, sge[s].lkey});
    queued.send.wr.num_sge = static_cast<int>(wqe->dma.num_sge);
  }
  return 0;
}

namespace {

/// The provider's address handle, as of rdma-core 44.
struct RxeAh {
  ibv_ah ah;
  rxe_av av;
  int ah_num;
};

}  // namespace

void lead_unresolved(ibv_ah& ah, const ibv_ah_attr& attr, const ibv_gid& from) {
  auto& to = reinterpret_cast<RxeAh&>(ah);
  const bool v4 = migr_gid_family(attr.grh.dgid.raw) == 0;
  const auto put = [v4](auto& address, const ibv_gid& gid) {
    memset(&address, 0, sizeof address);
    if (v4) {
      memcpy(&address._sockaddr_in.sin_addr, gid.raw + 12, 4);
      return;
    }
    address._sockaddr_in6.sin6_family = AF_INET6;
    memcpy(&address._sockaddr_in6.sin6_addr, gid.raw, sizeof gid.raw);
  };
  to.av = {};
  to.av.port_num = attr.port_num;
  to.av.network_type = v4 ? RXE_NETWORK_TYPE_IPV4 : RXE_NETWORK_TYPE_IPV6;
  static_assert(sizeof to.av.grh == sizeof attr.grh);
  memcpy(&to.av.grh, &attr.grh, sizeof to.av.grh);
  put(to.av.sgid_addr, from);
  put(to.av.dgid_addr, attr.grh.dgid);
  to.ah_num = 0;  // else the kernel goes by its own handle of that number, and not by the work request
}

void become(ibv_ah& ah, ibv_ah* fresh) {
  auto& to = reinterpret_cast<RxeAh&>(ah);
  const auto& from = *reinterpret_cast<const RxeAh*>(fresh);
  to.ah.handle = from.ah.handle;
  to.av = from.av;
  to.ah_num = from.ah_num;
  free(fresh);  // it came from calloc()
}

RingWatch::RingWatch(const Context& context) : context_(context) {
  std::vector<Mapping> maps;
  mappings_of(context.real->cmd_fd, maps);
  for (const Mapping& m : maps) before_.push_back(m.offset);
}

void RingWatch::moved_to(std::uint64_t& offset, std::uint64_t& bytes) const {
  std::vector<Mapping> maps;
  mappings_of(context_.real->cmd_fd, maps);
  for (const Mapping& m : maps) {
    if (std::find(before_.begin(), before_.end(), m.offset) != before_.end()) continue;
    offset = m.offset;
    bytes = m.bytes;
  }
}

void keep_from_children(const ibv_context& real, const ibv_context_ops& ops) {
  std::vector<Mapping> maps;
  if (!is_rxe(provider_file(ops)) || mappings_of(real.cmd_fd, maps)) return;
  for (const Mapping& m : maps) madvise(reinterpret_cast<void*>(m.start), m.bytes, MADV_DONTFORK);
}

int rings(Context& context, std::vector<migr_fd_desc>& out) {
  Mappings maps;
  if (const int error = maps.read(context.real->cmd_fd)) return error;
  const auto add = [&](migr_obj_type type, std::uint32_t handle, unsigned ring, const mminfo& info) {
    const Mapping* where = maps.at(info.offset, info.size);
    if (!where) return ENXIO;
    out.push_back(ring_desc(context, type, handle, ring, info, *where));
    return 0;
  };
  Registry& registry = Registry::get();
  for (const CqShadow* cq : registry.cqs) {
    if (cq->context != &context) continue;
    rxe_create_cq_resp resp;
    if (const int error = cq_resp(context, cq->real->handle, resp)) return error;
    if (const int error = add(MIGR_OBJ_CQ, cq->real->handle, 0, resp.mi)) return error;
  }
  for (const SrqShadow* srq : registry.srqs) {
    if (srq->context != &context) continue;
    mminfo info;
    if (const int error = srq_ring(*srq, info)) return error;
    if (const int error = add(MIGR_OBJ_SRQ, srq->real->handle, 0, info)) return error;
  }
  for (const QpShadow* qp : registry.qps) {
    if (qp->context != &context) continue;
    rxe_create_qp_resp resp;
    if (const int error = qp_resp(*context.kernel, qp->real->handle, resp)) return error;
    if (!qp->real->srq)
      if (const int error = add(MIGR_OBJ_QP, qp->real->handle, 0, resp.rq_mi)) return error;
    if (const int error = add(MIGR_OBJ_QP, qp->real->handle, 1, resp.sq_mi)) return error;
  }
  return 0;
}

namespace {

/// What dl_iterate_phdr() carries along.
struct TextSearch {
  std::vector<const void*> posts;  ///< post_send of every context
  std::vector<migr_text_range> out;
};

bool holds(const dl_phdr_info& info, const ElfW(Phdr) & segment, const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address), start = info.dlpi_addr + segment.p_vaddr;
  return at >= start && at - start < segment.p_memsz;
}

int add_text(dl_phdr_info* info, std::size_t, void* arg) {
  auto& search = *static_cast<TextSearch*>(arg);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X)) continue;
    const bool in_use = std::any_of(search.posts.begin(), search.posts.end(),
                                    [&](const void* post) { return holds(*info, segment, post); });
    if (in_use || (info->dlpi_name && is_provider_code(info->dlpi_name)))
      search.out.push_back({info->dlpi_addr + segment.p_vaddr, segment.p_memsz, 1, 0});
  }
  return 0;
}

}  // namespace

std::vector<migr_text_range> text_ranges() {
  TextSearch search;
  {
    Registry& registry = Registry::get();
    std::lock_guard guard(registry.lock);
    for (const Context* context : registry.contexts)
      search.posts.push_back(reinterpret_cast<const void*>(context->ops.post_send));
  }
  dl_iterate_phdr(add_text, &search);
  return std::move(search.out);
}

namespace {

static_assert(sizeof(migr_reg_mr) == sizeof(ib_uverbs_reg_mr) && sizeof(migr_reg_mr_resp) == sizeof(ib_uverbs_reg_mr_resp));
static_assert(offsetof(migr_reg_mr, access_flags) == offsetof(ib_uverbs_reg_mr, access_flags));

void put_reg_mr(migr_reg_mr& cmd, migr_reg_mr_resp& resp, std::uint32_t pd_handle, const void* addr, std::uint64_t length,
                std::uint64_t iova, int access) {
  cmd.response = reinterpret_cast<std::uintptr_t>(&resp);
  cmd.start = reinterpret_cast<std::uintptr_t>(addr);
  cmd.length = length;
  cmd.hca_va = iova;
  cmd.pd_handle = pd_handle;
  cmd.access_flags = static_cast<std::uint32_t>(access);
}

}  // namespace

void prepare_reg_mr(const ibv_context* context, std::uint32_t pd_handle, const void* addr, std::uint64_t length,
                    std::uint64_t iova, int access, migr_ahead_mr& command) {
  static_assert(sizeof(command.cmd) == kWriteWords * sizeof(std::uint64_t));
  command.fd = context->cmd_fd;
  put_reg_mr(command.in, command.out, pd_handle, addr, length, iova, access);
  lay_out_write(command.cmd, IB_USER_VERBS_CMD_REG_MR, &command.in, sizeof(command.in), &command.out, sizeof(command.out));
}

int raw_reg_mr(ibv_context* context, std::uint32_t pd_handle, const void* addr, std::uint64_t length,
               std::uint64_t iova, int access, std::uint32_t& handle, std::uint32_t& lkey, std::uint32_t& rkey) {
  migr_reg_mr cmd{};
  migr_reg_mr_resp resp{};
  put_reg_mr(cmd, resp, pd_handle, addr, length, iova, access);
  if (const int error =
          invoke_write(context->cmd_fd, IB_USER_VERBS_CMD_REG_MR, &cmd, sizeof(cmd), &resp, sizeof(resp)))
    return error;
  handle = resp.mr_handle;
  lkey = resp.lkey;
  rkey = resp.rkey;
  return 0;
}

}  // namespace migr::provider
