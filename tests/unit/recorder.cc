// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "recorder.h"

#include <infiniband/mlx5dv.h>

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <utility>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_query_port

#define RECORDER extern "C" [[gnu::visibility("default")]]
#pragma GCC diagnostic ignored "-Wunused-parameter"

extern "C" {
[[gnu::visibility("default")]] const char* recorder_call = "";
[[gnu::visibility("default")]] const void* recorder_object;
[[gnu::visibility("default")]] const void* recorder_other;
[[gnu::visibility("default")]] unsigned recorder_lkey, recorder_rkey, recorder_dest_qpn, recorder_access;
[[gnu::visibility("default")]] unsigned recorder_window, recorder_window_next, recorder_next_window;
[[gnu::visibility("default")]] int recorder_rereg_fails, recorder_post_fails;
[[gnu::visibility("default")]] const ibv_wc* recorder_completion;
[[gnu::visibility("default")]] void (*recorder_meanwhile)();
[[gnu::visibility("default")]] ibv_mr* recorder_mr;
[[gnu::visibility("default")]] ibv_cq* recorder_cq;
[[gnu::visibility("default")]] ibv_qp* recorder_qp;
[[gnu::visibility("default")]] ibv_srq* recorder_srq;
[[gnu::visibility("default")]] ibv_wq* recorder_wq;
}

namespace {

constexpr std::uint32_t kKind = 0x4b494e44;  // what lies behind the provider's ibv_mr

struct Mr {
  ibv_mr mr;
  std::uint32_t kind, access;
};

std::uint32_t next_number = 0x1001;
std::atomic<std::uint32_t> given;  // events

template <class T>
T* recorded(const char* call, T* object, const void* other = nullptr) {
  recorder_call = call;
  recorder_object = object;
  recorder_other = other;
  if (recorder_meanwhile) recorder_meanwhile();
  return object;
}

template <class T>
int wait_for_acks(T* object, std::uint32_t events) {
  pthread_mutex_lock(&object->mutex);
  while (object->events_completed != events) pthread_cond_wait(&object->cond, &object->mutex);
  pthread_mutex_unlock(&object->mutex);
  return 0;
}

template <class T>
void acknowledge(T* object) {
  pthread_mutex_lock(&object->mutex);
  ++object->events_completed;
  pthread_cond_signal(&object->cond);
  pthread_mutex_unlock(&object->mutex);
}

template <class T>
T* waitable(T* object) {
  pthread_mutex_init(&object->mutex, nullptr);
  pthread_cond_init(&object->cond, nullptr);
  return object;
}

ibv_mr* make_mr(const char* call, ibv_pd* pd, void* addr, std::size_t length, unsigned access) {
  auto* m = new Mr{};
  m->mr.context = pd->context;
  m->mr.pd = pd;
  m->mr.addr = addr;
  m->mr.length = length;
  m->mr.handle = next_number++;
  m->mr.lkey = m->mr.rkey = next_number++ << 8 | 0x11;
  m->kind = kKind;
  m->access = access;
  recorder_mr = &m->mr;
  recorded(call, pd);
  return &m->mr;
}

void note_bind(const ibv_mw& mw, std::uint32_t rkey) {
  recorder_window = mw.rkey;
  recorder_window_next = rkey;
}

ibv_qp* make_qp(const char* call, ibv_context* context, void* qp_context, ibv_pd* pd, ibv_cq* send_cq, ibv_cq* recv_cq,
                ibv_srq* srq, ibv_qp_type type) {
  auto* ex = new ibv_qp_ex{};
  ex->wr_start = [](ibv_qp_ex*) {};
  ex->wr_bind_mw = [](ibv_qp_ex*, ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info*) { note_bind(*mw, rkey); };
  ex->wr_local_inv = [](ibv_qp_ex*, std::uint32_t rkey) { recorder_rkey = rkey; };
  ex->wr_send = [](ibv_qp_ex*) {};
  ex->wr_set_sge_list = [](ibv_qp_ex*, std::size_t, const ibv_sge*) {};
  ex->wr_set_inline_data = [](ibv_qp_ex*, void*, std::size_t) {};
  ex->wr_complete = [](ibv_qp_ex*) { return std::exchange(recorder_post_fails, 0); };
  ex->wr_abort = [](ibv_qp_ex*) {};
  ibv_qp* qp = waitable(&ex->qp_base);
  qp->context = context;
  qp->qp_context = qp_context;
  qp->pd = pd;
  qp->send_cq = send_cq;
  qp->recv_cq = recv_cq;
  qp->srq = srq;
  qp->handle = next_number++;
  qp->qp_num = next_number++;
  qp->qp_type = type;
  recorder_qp = qp;
  recorded(call, static_cast<const void*>(send_cq), srq);
  return qp;
}

/* ---- slots ------------------------------------------------------------------ */

ibv_qp* create_qp_ex(ibv_context* c, ibv_qp_init_attr_ex* a) {
  return make_qp("create_qp_ex", c, a->qp_context, a->pd, a->send_cq, a->recv_cq, a->srq, a->qp_type);
}
ibv_qp* open_qp(ibv_context* c, ibv_qp_open_attr* a) {
  return make_qp("open_qp", c, a->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT ? a->qp_context : nullptr, nullptr, nullptr,
                 nullptr, nullptr, a->qp_type);
}
int modify_cq(ibv_cq* cq, ibv_modify_cq_attr*) { return recorded("modify_cq", cq), 0; }
int modify_qp_rate_limit(ibv_qp* qp, ibv_qp_rate_limit_attr*) { return recorded("modify_qp_rate_limit", qp), 0; }
ibv_flow* create_flow(ibv_qp* qp, ibv_flow_attr*) {
  recorded("create_flow", qp);
  auto* flow = new ibv_flow{};
  flow->context = qp->context;
  return flow;
}
int destroy_flow(ibv_flow* flow) { return delete flow, 0; }
int destroy_wq(ibv_wq* wq) { return delete wq, 0; }
ibv_wq* create_wq(ibv_context* c, ibv_wq_init_attr* a) {
  auto* wq = waitable(new ibv_wq{});
  wq->context = c;
  recorded("create_wq", a->cq);
  return recorder_wq = wq;
}
ibv_td* alloc_td(ibv_context* c, ibv_td_init_attr* a) {
  auto* td = new ibv_td{};
  td->context = c;
  recorded("alloc_td", c, a);
  return td;
}
int dealloc_td(ibv_td* td) { return recorded("dealloc_td", td), delete td, 0; }
ibv_pd* alloc_parent_domain(ibv_context* c, ibv_parent_domain_init_attr* a) {
  auto* pd = new ibv_pd{};
  pd->context = c;
  recorded("alloc_parent_domain", a->pd, a->td);
  return pd;
}
ibv_xrcd* open_xrcd(ibv_context* c, ibv_xrcd_init_attr* a) {
  auto* xrcd = new ibv_xrcd{};
  xrcd->context = c;
  recorded("open_xrcd", c, a);
  return xrcd;
}
int close_xrcd(ibv_xrcd* xrcd) { return recorded("close_xrcd", xrcd), delete xrcd, 0; }
ibv_mr* alloc_null_mr(ibv_pd* pd) { return make_mr("alloc_null_mr", pd, nullptr, 0, 0); }
ibv_mr* reg_dm_mr(ibv_pd* pd, ibv_dm*, uint64_t, std::size_t length, unsigned access) {
  return make_mr("reg_dm_mr", pd, nullptr, length, access);
}
int advise_mr(ibv_pd* pd, ibv_advise_mr_advice, uint32_t, ibv_sge* list, uint32_t count) {
  recorded("advise_mr", pd);
  recorder_lkey = count ? list->lkey : 0;
  return 0;
}
ibv_srq* make_srq(const char* call, ibv_context* c, void* srq_context, ibv_cq* cq) {
  auto* srq = waitable(new ibv_srq{});
  srq->context = c;
  srq->srq_context = srq_context;
  srq->handle = next_number++;
  recorder_srq = srq;
  recorded(call, cq);
  return srq;
}
ibv_srq* create_srq_ex(ibv_context* c, ibv_srq_init_attr_ex* a) {
  return make_srq("create_srq_ex", c, a->srq_context, a->comp_mask & IBV_SRQ_INIT_ATTR_CQ ? a->cq : nullptr);
}
int get_srq_num(ibv_srq* srq, uint32_t* number) {
  recorded("get_srq_num", srq);
  *number = srq->handle;
  return 0;
}
int post_srq_ops(ibv_srq* srq, ibv_ops_wr*, ibv_ops_wr**) { return recorded("post_srq_ops", srq), 0; }

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  recorded("post_srq_recv", srq);
  for (; wr; wr = wr->next) {
    if (wr->num_sge > 2) {
      *bad = wr;
      return EINVAL;
    }
    recorder_lkey = wr->sg_list->lkey;
  }
  return 0;
}
// The two that follow say as librxe which was bad: none.
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  recorded("post_recv", qp);
  *bad = nullptr;
  if (!wr) return EINVAL;
  recorder_lkey = wr->sg_list->lkey;
  return 0;
}
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
  recorded("post_send", qp);
  *bad = nullptr;
  if (!wr) return EINVAL;
  recorder_lkey = recorder_rkey = 0;
  if (wr->num_sge) recorder_lkey = wr->sg_list->lkey;
  if (wr->opcode == IBV_WR_BIND_MW) {
    // As providers do: the window's key, and what lies behind the MR.
    note_bind(*wr->bind_mw.mw, wr->bind_mw.rkey);
    recorder_other = wr->bind_mw.bind_info.mr;
    recorder_lkey = wr->bind_mw.bind_info.mr->lkey;
    recorder_rkey = reinterpret_cast<const Mr*>(wr->bind_mw.bind_info.mr)->kind == kKind ? 1 : 0;
  } else if (wr->opcode == IBV_WR_LOCAL_INV) {
    recorder_rkey = wr->invalidate_rkey;
  }
  if (recorder_post_fails) *bad = wr;
  return std::exchange(recorder_post_fails, 0);
}
int poll_cq(ibv_cq* cq, int, ibv_wc* wc) {
  recorded("poll_cq", cq);
  const ibv_wc* const found = std::exchange(recorder_completion, nullptr);
  if (found) *wc = *found;
  return found ? 1 : 0;
}
int req_notify_cq(ibv_cq* cq, int) { return recorded("req_notify_cq", cq), 0; }
ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  auto* mw = new ibv_mw{};
  mw->context = pd->context;
  mw->pd = pd;
  mw->type = type;
  mw->rkey = std::exchange(recorder_next_window, 0);
  if (!mw->rkey) mw->rkey = next_number++ << 8;
  return mw;
}
int bind_mw(ibv_qp* qp, ibv_mw*, ibv_mw_bind* bind) { return recorded("bind_mw", qp, bind->bind_info.mr), 0; }
int dealloc_mw(ibv_mw* mw) { return delete mw, 0; }

ibv_device the_device;
ibv_event_type raised;

}  // namespace

RECORDER void recorder_raise(ibv_event_type type) { raised = type; }

/* ---- the names --------------------------------------------------------------- */

RECORDER ibv_device** ibv_get_device_list(int* count) {
  static ibv_device* list[2] = {&the_device, nullptr};
  if (count) *count = 1;
  return list;
}
RECORDER void ibv_free_device_list(ibv_device**) {}
RECORDER ibv_context* ibv_open_device(ibv_device* device) {
  if (recorder_meanwhile) recorder_meanwhile();
  auto* v = new verbs_context{};
  v->sz = sizeof(*v);
  v->create_qp_ex = create_qp_ex;
  v->open_qp = open_qp;
  v->modify_cq = modify_cq;
  v->modify_qp_rate_limit = modify_qp_rate_limit;
  v->ibv_create_flow = create_flow;
  v->ibv_destroy_flow = destroy_flow;
  v->create_wq = create_wq;
  v->destroy_wq = destroy_wq;
  v->alloc_null_mr = alloc_null_mr;
  v->reg_dm_mr = reg_dm_mr;
  v->advise_mr = advise_mr;
  v->alloc_td = alloc_td;
  v->dealloc_td = dealloc_td;
  v->alloc_parent_domain = alloc_parent_domain;
  v->open_xrcd = open_xrcd;
  v->close_xrcd = close_xrcd;
  v->create_srq_ex = create_srq_ex;
  v->get_srq_num = get_srq_num;
  v->post_srq_ops = post_srq_ops;
  ibv_context& c = v->context;
  c.abi_compat = __VERBS_ABI_IS_EXTENDED;
  c.device = device;
  c.cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  c.async_fd = -1;
  c.ops.post_srq_recv = post_srq_recv;
  c.ops.post_recv = post_recv;
  c.ops.post_send = post_send;
  c.ops.poll_cq = poll_cq;
  c.ops.req_notify_cq = req_notify_cq;
  c.ops.alloc_mw = alloc_mw;
  c.ops.bind_mw = bind_mw;
  c.ops.dealloc_mw = dealloc_mw;
  return &c;
}
RECORDER int ibv_close_device(ibv_context* c) {
  if (recorder_meanwhile) recorder_meanwhile();
  close(c->cmd_fd);
  delete verbs_get_ctx(c);
  return 0;
}
RECORDER ibv_pd* ibv_alloc_pd(ibv_context* c) {
  auto* pd = new ibv_pd{};
  pd->context = c;
  return pd;
}
RECORDER int ibv_dealloc_pd(ibv_pd* pd) { return delete pd, 0; }
RECORDER ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, std::size_t length, int access) {
  return make_mr("reg_mr", pd, addr, length, static_cast<unsigned>(access));
}
RECORDER ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* addr, std::size_t length, uint64_t, int access) {
  return make_mr("reg_mr_iova", pd, addr, length, static_cast<unsigned>(access));
}
RECORDER ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, std::size_t length, uint64_t, unsigned access) {
  return make_mr("reg_mr_iova2", pd, addr, length, access);
}
RECORDER ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t, std::size_t length, uint64_t, int, int access) {
  return make_mr("reg_dmabuf_mr", pd, nullptr, length, static_cast<unsigned>(access));
}
RECORDER ibv_mr* recorder_reg_otherwise(ibv_pd* pd) { return make_mr("reg_otherwise", pd, nullptr, 8, 0); }
RECORDER ibv_mr* ibv_import_mr(ibv_pd* pd, uint32_t) { return make_mr("import_mr", pd, nullptr, 0, 0); }
RECORDER void ibv_unimport_mr(ibv_mr* mr) { recorded("unimport_mr", mr); }
// Other memory has other keys, as with some devices.
RECORDER int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* addr, std::size_t length, int access) {
  recorded("rereg_mr", mr, pd);
  const int err = recorder_rereg_fails;
  recorder_rereg_fails = 0;
  if (err && err != IBV_REREG_MR_ERR_DO_FORK_OLD) return err;
  if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
    mr->addr = addr;
    mr->length = length;
    mr->lkey = mr->rkey = next_number++ << 8 | 0x11;
  }
  if (flags & IBV_REREG_MR_CHANGE_PD) mr->pd = pd;
  if (flags & IBV_REREG_MR_CHANGE_ACCESS) reinterpret_cast<Mr*>(mr)->access = static_cast<unsigned>(access);
  return err;
}
// Freed objects are not given back: recorder_* may still be compared with them.
RECORDER int ibv_dereg_mr(ibv_mr* mr) { return recorded("dereg_mr", mr), 0; }
RECORDER ibv_comp_channel* ibv_create_comp_channel(ibv_context* c) {
  auto* channel = new ibv_comp_channel{};
  channel->context = c;
  return channel;
}
RECORDER int ibv_destroy_comp_channel(ibv_comp_channel* channel) { return delete channel, 0; }
RECORDER ibv_cq* ibv_create_cq(ibv_context* c, int cqe, void* cq_context, ibv_comp_channel* channel, int) {
  auto* cq = new ibv_cq{};
  pthread_mutex_init(&cq->mutex, nullptr);
  pthread_cond_init(&cq->cond, nullptr);
  cq->context = c;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->cqe = cqe;
  return recorder_cq = cq;
}
RECORDER int ibv_resize_cq(ibv_cq* cq, int cqe) {
  cq->cqe = cqe;
  return recorded("resize_cq", cq), 0;
}
RECORDER int ibv_destroy_cq(ibv_cq* cq) { return recorded("destroy_cq", cq), 0; }
RECORDER int ibv_get_cq_event(ibv_comp_channel*, ibv_cq** cq, void** cq_context) {
  *cq = recorder_cq;
  *cq_context = recorder_cq->cq_context;
  return 0;
}
RECORDER void ibv_ack_cq_events(ibv_cq* cq, unsigned) { recorded("ack_cq_events", cq); }
RECORDER ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* a) {
  return make_qp("create_qp", pd->context, a->qp_context, pd, a->send_cq, a->recv_cq, a->srq, a->qp_type);
}
RECORDER ibv_qp* recorder_create_otherwise(ibv_pd* pd, void* qp_context) {
  return make_qp("create_otherwise", pd->context, qp_context, pd, nullptr, nullptr, nullptr, IBV_QPT_RC);
}
RECORDER int ibv_query_gid(ibv_context* c, uint8_t, int, ibv_gid* gid) {
  *gid = {};
  return recorded("query_gid", c), 0;
}
RECORDER int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  if (mask & IBV_QP_STATE) qp->state = attr->qp_state;
  if (mask & IBV_QP_ACCESS_FLAGS) recorder_access = attr->qp_access_flags;
  recorder_dest_qpn = attr->dest_qp_num;
  ibv_gid gid;
  if (mask & IBV_QP_AV) ibv_query_gid(qp->context, attr->ah_attr.port_num, attr->ah_attr.grh.sgid_index, &gid);  // as qedr
  return recorded("modify_qp", qp), 0;
}
RECORDER int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  if (mask & IBV_QP_ACCESS_FLAGS) attr->qp_access_flags = recorder_access;
  init->qp_context = qp->qp_context;
  init->send_cq = qp->send_cq;
  init->recv_cq = qp->recv_cq;
  init->srq = qp->srq;
  return recorded("query_qp", qp), 0;
}
RECORDER int ibv_destroy_qp(ibv_qp* qp) { return recorded("destroy_qp", qp), wait_for_acks(qp, given.exchange(0)); }
RECORDER ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return reinterpret_cast<ibv_qp_ex*>(qp); }
RECORDER int ibv_query_qp_data_in_order(ibv_qp* qp, ibv_wr_opcode, uint32_t) { return recorded("in_order", qp), 1; }
RECORDER int ibv_query_ece(ibv_qp* qp, ibv_ece*) { return recorded("query_ece", qp), 0; }
RECORDER int ibv_set_ece(ibv_qp* qp, ibv_ece*) { return recorded("set_ece", qp), 0; }
RECORDER ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  auto* ah = new ibv_ah{};
  ah->context = pd->context;
  ah->pd = pd;
  recorder_dest_qpn = attr->grh.dgid.raw[15];
  return recorded("create_ah", ah);
}
RECORDER int ibv_destroy_ah(ibv_ah* ah) { return recorded("destroy_ah", ah), 0; }
RECORDER int ibv_attach_mcast(ibv_qp* qp, const ibv_gid*, uint16_t) { return recorded("attach_mcast", qp), 0; }
RECORDER int ibv_detach_mcast(ibv_qp* qp, const ibv_gid*, uint16_t) { return recorded("detach_mcast", qp), 0; }
RECORDER ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* a) {
  a->attr.max_wr = 99;
  return make_srq("create_srq", pd->context, a->srq_context, nullptr);
}
RECORDER int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr*, int) { return recorded("modify_srq", srq), 0; }
RECORDER int ibv_query_srq(ibv_srq* srq, ibv_srq_attr*) { return recorded("query_srq", srq), 0; }
RECORDER int ibv_destroy_srq(ibv_srq* srq) { return recorded("destroy_srq", srq), wait_for_acks(srq, given.exchange(0)); }
RECORDER int ibv_get_async_event(ibv_context*, ibv_async_event* event) {
  event->event_type = raised;
  ++given;
  if (raised == IBV_EVENT_SRQ_LIMIT_REACHED) {
    event->element.srq = recorder_srq;
  } else if (raised == IBV_EVENT_CQ_ERR) {
    event->element.cq = recorder_cq;
    --given;
  } else if (raised == IBV_EVENT_PORT_ERR) {
    event->element.port_num = 1;
    --given;
  } else if (raised == IBV_EVENT_WQ_FATAL) {
    event->element.wq = recorder_wq;
    --given;
  } else {
    event->element.qp = recorder_qp;
  }
  return 0;
}
RECORDER void ibv_ack_async_event(ibv_async_event* event) {
  if (event->event_type == IBV_EVENT_SRQ_LIMIT_REACHED) {
    acknowledge(event->element.srq);
  } else if (event->event_type == IBV_EVENT_WQ_FATAL) {
    acknowledge(event->element.wq);
  } else if (event->event_type != IBV_EVENT_CQ_ERR && event->event_type != IBV_EVENT_PORT_ERR) {
    acknowledge(event->element.qp);
  }
  recorded("ack_async_event", static_cast<const void*>(event->element.qp));
}

/* ---- of a NIC family ------------------------------------------------------------ */

RECORDER int mlx5dv_init_obj(mlx5dv_obj* obj, uint64_t kinds) {
  recorded("mlx5dv_init_obj", kinds & MLX5DV_OBJ_QP ? obj->qp.in : nullptr, kinds & MLX5DV_OBJ_CQ ? obj->cq.in : nullptr);
  if (kinds & MLX5DV_OBJ_QP) obj->qp.out->comp_mask = 7;
  return 0;
}
RECORDER ibv_qp* mlx5dv_create_qp(ibv_context* c, ibv_qp_init_attr_ex* a, mlx5dv_qp_init_attr*) {
  return make_qp("mlx5dv_create_qp", c, a->qp_context, a->pd, a->send_cq, a->recv_cq, a->srq, a->qp_type);
}
struct hnsdv_qp_init_attr;
RECORDER ibv_qp* hnsdv_create_qp(ibv_context* c, ibv_qp_init_attr_ex* a, hnsdv_qp_init_attr*) {
  return make_qp("hnsdv_create_qp", c, a->qp_context, a->pd, a->send_cq, a->recv_cq, a->srq, a->qp_type);
}
struct efadv_wq_attr;
struct efadv_cq_attr;
RECORDER int efadv_query_qp_wqs(ibv_qp* qp, efadv_wq_attr*, efadv_wq_attr*, uint32_t) { return recorded("efadv_query_qp_wqs", qp), 0; }
RECORDER int efadv_query_cq(ibv_cq* cq, efadv_cq_attr*, uint32_t) { return recorded("efadv_query_cq", cq), 0; }
RECORDER int mlx5dv_modify_qp_lag_port(ibv_qp* qp, uint8_t) { return recorded("lag_port", qp), 0; }
RECORDER int mlx5dv_devx_srq_query(ibv_srq* srq, const void*, size_t, void*, size_t) {
  return recorded("devx_srq_query", srq), 0;
}
