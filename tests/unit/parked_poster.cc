// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The victim of suspension_closed_test: a plain libibverbs program over the stub provider. One thread posts one send per
// round, one instruction at a time (trap flag), and stands still before the instruction that the test has chosen.
//   parked_poster classic|wr|contended|reposts|closes|idle FD    FD: memfd with struct Parked
// contended: not stepped; wr_start waits for another thread's session, and the thread stands still after it.
// reposts: not stepped; the thread stands still in a session on its ibv_cq_ex, posts with ibv_wr_*, and ends the session.
// closes: nothing is posted; the QP is moved to ERR.
// idle: the polling thread polls a CQ that no QP has.
#include <infiniband/verbs.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "parked.h"
#include "stub.h"

namespace {

constexpr unsigned long long kTrapFlag = 0x100;

Parked* shared;
std::atomic<bool> stepping;
std::atomic<bool> polled_elsewhere;  // the polling thread lets the CQ alone
std::int32_t step;

void nap() {
  const timespec pause{0, 50'000};
  nanosleep(&pause, nullptr);
}

// Runs before every instruction of the post.
void on_step(int, siginfo_t*, void* context) {
  auto* uc = static_cast<ucontext_t*>(context);
  if (!stepping.load(std::memory_order_relaxed)) {
    uc->uc_mcontext.gregs[REG_EFL] &= ~static_cast<long long>(kTrapFlag);
    return;
  }
  if (step++ != shared->park_at.load()) return;
  const std::uint32_t round = shared->go.load();
  shared->parked.store(round);
  while (shared->release.load() < round) nap();
}

void trap_on() {
  step = 0;
  stepping.store(true, std::memory_order_relaxed);
  asm volatile("pushfq; orq %0, (%%rsp); popfq" ::"i"(kTrapFlag) : "memory", "cc");
}

void trap_off() { stepping.store(false, std::memory_order_relaxed); }

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(2);
}

struct Objects {
  ibv_qp* qp;
  ibv_qp_ex* ex;
  ibv_cq_ex* cq_ex;
  ibv_cq *cq, *idle;
  ibv_mr* mr;
};

Objects make_objects(char* memory, std::size_t bytes) {
  int count = 0;
  ibv_device** devices = ibv_get_device_list(&count);
  if (!devices || !count) die("ibv_get_device_list");
  ibv_context* context = ibv_open_device(devices[0]);
  if (!context) die("ibv_open_device");
  Objects o{};
  ibv_pd* pd = ibv_alloc_pd(context);
  o.mr = ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE);
  ibv_cq_init_attr_ex cq{};
  cq.cqe = 64;
  o.cq_ex = ibv_create_cq_ex(context, &cq);
  o.idle = ibv_create_cq(context, 1, nullptr, nullptr, 0);
  if (!pd || !o.mr || !o.cq_ex || !o.idle) die("pd, mr, cq");
  o.cq = ibv_cq_ex_to_cq(o.cq_ex);
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = o.cq;
  init.cap = {.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  init.sq_sig_all = 1;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.pd = pd;
  init.send_ops_flags = IBV_QP_EX_WITH_SEND;
  o.qp = ibv_create_qp_ex(context, &init);
  if (!o.qp) die("ibv_create_qp_ex");
  o.ex = ibv_qp_to_qp_ex(o.qp);
  for (const ibv_qp_state to : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
    ibv_qp_attr attr{};
    attr.qp_state = to;
    if (ibv_modify_qp(o.qp, &attr, IBV_QP_STATE)) die("ibv_modify_qp");
  }
  return o;
}

int post_classic(const Objects& o, ibv_send_wr& wr) {
  ibv_send_wr* bad;
  trap_on();
  const int error = ibv_post_send(o.qp, &wr, &bad);
  trap_off();
  return error;
}

inline int fill_and_complete(const Objects& o, const ibv_send_wr& wr) {
  o.ex->wr_id = wr.wr_id;
  o.ex->wr_flags = wr.send_flags;
  ibv_wr_send(o.ex);
  ibv_wr_set_sge(o.ex, wr.sg_list->lkey, wr.sg_list->addr, wr.sg_list->length);
  return ibv_wr_complete(o.ex);
}

int post_wr(const Objects& o, const ibv_send_wr& wr) {
  trap_on();
  ibv_wr_start(o.ex);
  const int error = fill_and_complete(o, wr);
  trap_off();
  return error;
}

int post_contended(const Objects& o, const ibv_send_wr& wr) {
  std::atomic<bool> open{false};
  std::thread other([&] {
    ibv_wr_start(o.ex);
    open.store(true);
    for (int i = 0; i < 1000; ++i) nap();  // until wr_start below waits for the provider's lock
    ibv_wr_abort(o.ex);
  });
  while (!open.load()) nap();
  ibv_wr_start(o.ex);
  other.join();
  const std::uint32_t round = shared->go.load();
  shared->parked.store(round);
  while (shared->release.load() < round) nap();
  return fill_and_complete(o, wr);
}

int post_in_poll_session(const Objects& o, ibv_send_wr& wr) {
  polled_elsewhere.store(true);
  for (int i = 0; i < 100; ++i) nap();  // a poll that had begun is over
  ibv_send_wr* bad;
  if (const int error = ibv_post_send(o.qp, &wr, &bad)) return error;
  ibv_poll_cq_attr attr{};
  while (ibv_start_poll(o.cq_ex, &attr)) nap();
  shared->completed.fetch_add(1);
  const std::uint32_t round = shared->go.load();
  shared->parked.store(round);
  while (shared->release.load() < round) nap();
  ibv_wr_start(o.ex);
  const int error = fill_and_complete(o, wr);
  ibv_end_poll(o.cq_ex);
  polled_elsewhere.store(false);
  return error;
}

int close_it(const Objects& o) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  return ibv_modify_qp(o.qp, &attr, IBV_QP_STATE);
}

int post(const char* how, const Objects& o, ibv_send_wr& wr) {
  if (!std::strcmp(how, "closes")) return close_it(o);
  if (!std::strcmp(how, "wr")) return post_wr(o, wr);
  if (!std::strcmp(how, "reposts")) return post_in_poll_session(o, wr);
  return std::strcmp(how, "contended") ? post_classic(o, wr) : post_contended(o, wr);
}

// The hardware and the polling half of the application.
void complete_and_poll(const Objects& o, ibv_cq* cq) {
  std::uint64_t next = 1;
  for (;;) {
    migr_stub_complete_sends(o.qp->qp_num);
    shared->in_queue.store(migr_stub_posted(o.qp->qp_num));
    ibv_wc wc;
    while (!polled_elsewhere.load() && ibv_poll_cq(cq, 1, &wc) > 0) {
      if (wc.wr_id != next++ || wc.status != IBV_WC_SUCCESS) shared->out_of_order.fetch_add(1);
      shared->completed.fetch_add(1);
    }
    shared->polls.fetch_add(1);
    nap();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  void* page = mmap(nullptr, sizeof(Parked), PROT_READ | PROT_WRITE, MAP_SHARED, std::atoi(argv[2]), 0);
  if (page == MAP_FAILED) die("mmap");
  shared = static_cast<Parked*>(page);
  struct sigaction trap {};
  trap.sa_sigaction = on_step;
  trap.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &trap, nullptr);

  static char memory[4096];
  const Objects o = make_objects(memory, sizeof memory);
  std::thread(complete_and_poll, o, std::strcmp(argv[1], "idle") ? o.cq : o.idle).detach();
  for (std::uint32_t round = 1;; ++round) {
    while (shared->go.load() < round) nap();
    if (shared->park_at.load() < 0) _exit(0);
    ibv_sge sge{.addr = reinterpret_cast<std::uintptr_t>(memory), .length = 64, .lkey = o.mr->lkey};
    ibv_send_wr wr{};
    wr.wr_id = round;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    shared->error.store(post(argv[1], o, wr));
    shared->steps.store(step);
    shared->done.store(round);
  }
}
