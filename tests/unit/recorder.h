// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A libibverbs.so.1 with one device that does nothing but remember which objects it was given. recorder.cc.
#ifndef MIGR_TEST_RECORDER_H
#define MIGR_TEST_RECORDER_H

#include <infiniband/verbs.h>

extern "C" {
/// What the last call of the provider was: its name, the object it was for, and a second one it named (MR, CQ, SRQ).
extern const char* recorder_call;
extern const void* recorder_object;
extern const void* recorder_other;
/// Of the last receive or send: the first SGE's key, as the provider saw it.
extern unsigned recorder_lkey;
extern unsigned recorder_rkey;
/// Of the last ibv_modify_qp.
extern unsigned recorder_dest_qpn;
/// Of the last with IBV_QP_ACCESS_FLAGS; ibv_query_qp gives them back.
extern unsigned recorder_access;
/// Of the last bind: what the window is called, and what it is to be called.
extern unsigned recorder_window, recorder_window_next;
/// What the next window is called; 0: as nothing else.
extern unsigned recorder_next_window;
/// What the next ibv_poll_cq finds; null: nothing.
extern const ibv_wc* recorder_completion;
/// What the next ibv_post_send or ibv_wr_complete fails with.
extern int recorder_post_fails;
/// What happens in each call of the provider.
extern void (*recorder_meanwhile)();
/// What the next call of ibv_rereg_mr fails with, as its return value.
extern int recorder_rereg_fails;
/// The provider's object that was made last, of each kind.
extern ibv_mr* recorder_mr;
extern ibv_cq* recorder_cq;
extern ibv_qp* recorder_qp;
extern ibv_srq* recorder_srq;
extern ibv_wq* recorder_wq;
/// A maker of MRs that libmigr has never heard of.
ibv_mr* recorder_reg_otherwise(ibv_pd* pd);
/// The same, of QPs.
ibv_qp* recorder_create_otherwise(ibv_pd* pd, void* qp_context);
struct hnsdv_qp_init_attr;
ibv_qp* hnsdv_create_qp(ibv_context* c, ibv_qp_init_attr_ex* a, hnsdv_qp_init_attr* own);
struct efadv_wq_attr;
struct efadv_cq_attr;
int efadv_query_qp_wqs(ibv_qp* qp, efadv_wq_attr* sends, efadv_wq_attr* receives, uint32_t length);
int efadv_query_cq(ibv_cq* cq, efadv_cq_attr* attr, uint32_t length);
/// The next ibv_get_async_event gives this type, for the object made last. Destroying waits as libibverbs does, until
/// as many events were acknowledged as were given.
void recorder_raise(ibv_event_type type);
}

#endif
