// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What libmigr costs on the data path: cycles per call over the stub provider
// (bench/stub), without libmigr, with it on the direct path, and with it on the
// switched path (MIGR_FORCE_SWITCHED=1). Protected is the direct path of a vQP with a backup link.
//
//   datapath [--libmigr FILE] [--json FILE] [--generations N] [--rounds N] [--cpu N]
//
// Each way is a process of its own, all pinned to one CPU; they take turns,
// operation by operation, so that what disturbs one disturbs the others. Two
// measures: calls in a row (64 between two serialized TSC reads: what it costs a
// program that posts all the time, where the processor overlaps calls), and calls
// apart (each between serialized reads, less the reads' own cost: nothing before
// or after can hide it; noisier). A slice is the median over many batches. A
// generation is a fresh set of processes: where code and data happen to lie
// changes a call by some cycles. `extra` is the median over all rounds of (slice
// with libmigr - slice without), not the difference of two medians.
//
// FILE gets the calls in a row, FILE with "-apart" before its suffix the others:
// [{"op", "api", "path", "native", "with", "extra"}..], cycles of the TSC.
//
// Before it measures, a worker shows that it is what it claims to be: whose
// functions the context has, whether the provider was given the caller's own
// work request (direct) or a copy (switched), with the right keys; and that
// completions say what was posted. Exit status 1 if anything is not so.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "stub/stub.h"

namespace {

constexpr int kBatch = 64;          // calls between two TSC reads; fits the queues
constexpr int kQueue = 4 * kBatch;  // WRs
constexpr int kWarmUp = 40;         // batches at the start of a slice, not counted
constexpr int kBatches = 160;       // batches of a slice
constexpr int kAnswerTimeoutMs = 60000;
constexpr double kTarget = 2.0;  // cycles

struct Case {
  const char *op, *api;
};
constexpr Case kCases[] = {{"send", "classic"},  {"send", "wr"}, {"recv", "classic"}, {"write", "classic"}, {"write", "wr"},
                           {"read", "classic"},  {"read", "wr"}, {"poll", "classic"}, {"poll", "ex"}};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "datapath: %s\n", what.c_str());
  exit(1);
}

double median(std::vector<double> v, double at = 0.5) {
  if (v.empty()) return 0;
  auto n = v.begin() + std::lround(at * static_cast<double>(v.size() - 1));
  std::nth_element(v.begin(), n, v.end());
  return *n;
}

// --- the worker: one way of running

uint64_t clock_start() {
  _mm_lfence();
  uint64_t t = __rdtsc();
  _mm_lfence();
  return t;
}

uint64_t clock_stop() {
  unsigned int cpu;
  uint64_t t = __rdtscp(&cpu);
  _mm_lfence();
  return t;
}

class Worker {
 public:
  explicit Worker(const std::string& way);
  /// @param apart: each call between clock reads of its own. @return TSC cycles per call
  double slice(const std::string& op, const std::string& api, bool apart);

 private:
  template <class Call>
  uint64_t timed(Call&& call);
  template <class Prepare, class Call, class Finish>
  double measure(Prepare&& prepare, Call&& call, Finish&& finish);
  ibv_send_wr send_wr(ibv_wr_opcode opcode);
  void post_send(ibv_qp* qp, ibv_send_wr& wr, int i);
  void post_recv(ibv_qp* qp, int i);
  void wr_session(ibv_wr_opcode opcode, int i);
  ibv_wc poll_one(ibv_cq* cq);
  ibv_wc poll_one(ibv_cq_ex* cq);
  template <class Cq>
  void drain_sends(ibv_qp* qp, Cq* cq, ibv_wc_opcode opcode, bool verify);
  void drain_receives(ibv_qp* qp);
  void prove(const std::string& way);
  template <class Post>
  void prove_keys(const std::string& way, ibv_qp* qp, Post&& post);

  decltype(&migr_stub_complete_sends) complete_sends_;
  decltype(&migr_stub_complete_receives) complete_receives_;
  decltype(&migr_stub_last_wr) last_wr_;
  decltype(&migr_stub_last_keys) last_keys_;
  bool apart_ = false;
  uint64_t clock_cost_ = UINT64_MAX;  // of two clock reads with nothing between
  ibv_context* context_;
  ibv_pd* pd_;
  ibv_mr* mr_;
  ibv_cq *cq_;
  ibv_cq_ex* cq_ex_;
  ibv_qp *qp_, *qp_wr_, *qp_polled_ex_;
  ibv_qp_ex* ex_;
  ibv_sge sge_;
  ibv_recv_wr recv_wr_;
  alignas(4096) std::array<char, 4096> memory_{};
};

template <class T>
T stub(const char* name) {
  void* f = dlsym(RTLD_DEFAULT, name);
  if (!f) fail(std::string(name) + " is not there: not started over the stub libibverbs");
  return reinterpret_cast<T>(f);
}

std::string owner_of(const void* function) {
  Dl_info info;
  if (!dladdr(function, &info)) return "?";
  std::string path = info.dli_fname;
  return path.substr(path.rfind('/') + 1);
}

Worker::Worker(const std::string& way)
    : complete_sends_(stub<decltype(complete_sends_)>("migr_stub_complete_sends")),
      complete_receives_(stub<decltype(complete_receives_)>("migr_stub_complete_receives")),
      last_wr_(stub<decltype(last_wr_)>("migr_stub_last_wr")),
      last_keys_(stub<decltype(last_keys_)>("migr_stub_last_keys")) {
  int count = 0;
  ibv_device** devices = ibv_get_device_list(&count);
  if (!devices || count != 1) fail("the stub shows no device");
  context_ = ibv_open_device(devices[0]);
  if (!context_) fail("open_device");
  ibv_free_device_list(devices);
  pd_ = ibv_alloc_pd(context_);
  mr_ = ibv_reg_mr(pd_, memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  cq_ = ibv_create_cq(context_, 2 * kQueue, nullptr, nullptr, 0);
  ibv_cq_init_attr_ex cq_attr{};
  cq_attr.cqe = 2 * kQueue;
  cq_attr.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM;
  cq_ex_ = ibv_create_cq_ex(context_, &cq_attr);
  if (!pd_ || !mr_ || !cq_ || !cq_ex_) fail("cannot make PD, MR or CQs");

  ibv_qp_init_attr plain{};
  plain.send_cq = plain.recv_cq = cq_;
  plain.cap = {kQueue, kQueue, 1, 1, 0};
  plain.qp_type = IBV_QPT_RC;
  qp_ = ibv_create_qp(pd_, &plain);
  plain.send_cq = plain.recv_cq = ibv_cq_ex_to_cq(cq_ex_);
  qp_polled_ex_ = ibv_create_qp(pd_, &plain);
  ibv_qp_init_attr_ex extended{};
  extended.send_cq = extended.recv_cq = cq_;
  extended.cap = {kQueue, kQueue, 1, 1, 0};
  extended.qp_type = IBV_QPT_RC;
  extended.pd = pd_;
  extended.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  extended.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ;
  qp_wr_ = ibv_create_qp_ex(context_, &extended);
  if (!qp_ || !qp_polled_ex_ || !qp_wr_ || !(ex_ = ibv_qp_to_qp_ex(qp_wr_))) fail("cannot make QPs");
  for (ibv_qp* qp : {qp_, qp_polled_ex_, qp_wr_})
    for (ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
      ibv_qp_attr attr{};
      attr.qp_state = state;
      attr.dest_qp_num = qp->qp_num;  // itself: nothing ever leaves
      attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
      attr.port_num = 1;
      attr.ah_attr.is_global = 1;
      attr.ah_attr.port_num = 1;
      int mask = state == IBV_QPS_INIT  ? IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS
                 : state == IBV_QPS_RTR ? IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
                                        : IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
      if (ibv_modify_qp(qp, &attr, mask)) fail("modify_qp");
    }
  sge_ = {reinterpret_cast<uint64_t>(memory_.data()), 64, mr_->lkey};
  recv_wr_ = {0, nullptr, &sge_, 1};
  for (int i = 0; i < 10000; i++) {
    uint64_t t0 = clock_start();
    clock_cost_ = std::min(clock_cost_, clock_stop() - t0);
  }
  prove(way);
}

ibv_send_wr Worker::send_wr(ibv_wr_opcode opcode) {
  ibv_send_wr wr{};
  wr.sg_list = &sge_;
  wr.num_sge = 1;
  wr.opcode = opcode;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(memory_.data());
  wr.wr.rdma.rkey = mr_->rkey;
  return wr;
}

inline void Worker::post_send(ibv_qp* qp, ibv_send_wr& wr, int i) {
  ibv_send_wr* bad;
  wr.wr_id = static_cast<uint64_t>(i);
  if (ibv_post_send(qp, &wr, &bad)) fail("post_send");
}

inline void Worker::post_recv(ibv_qp* qp, int i) {
  ibv_recv_wr* bad;
  recv_wr_.wr_id = static_cast<uint64_t>(i);
  if (ibv_post_recv(qp, &recv_wr_, &bad)) fail("post_recv");
}

inline void Worker::wr_session(ibv_wr_opcode opcode, int i) {
  ibv_wr_start(ex_);
  ex_->wr_id = static_cast<uint64_t>(i);
  ex_->wr_flags = IBV_SEND_SIGNALED;
  if (opcode == IBV_WR_SEND) ibv_wr_send(ex_);
  else if (opcode == IBV_WR_RDMA_WRITE) ibv_wr_rdma_write(ex_, mr_->rkey, sge_.addr);
  else ibv_wr_rdma_read(ex_, mr_->rkey, sge_.addr);
  ibv_wr_set_sge(ex_, sge_.lkey, sge_.addr, sge_.length);
  if (ibv_wr_complete(ex_)) fail("wr_complete");
}

inline ibv_wc Worker::poll_one(ibv_cq* cq) {
  ibv_wc wc;
  if (ibv_poll_cq(cq, 1, &wc) != 1) fail("poll_cq does not find a completion that is there");
  return wc;
}

inline ibv_wc Worker::poll_one(ibv_cq_ex* cq) {
  ibv_poll_cq_attr attr{};
  if (ibv_start_poll(cq, &attr)) fail("start_poll does not find a completion that is there");
  ibv_wc wc;
  wc.wr_id = cq->wr_id;
  wc.status = cq->status;
  wc.opcode = ibv_wc_read_opcode(cq);
  wc.byte_len = ibv_wc_read_byte_len(cq);
  wc.qp_num = ibv_wc_read_qp_num(cq);
  ibv_end_poll(cq);
  return wc;
}

void check_wc(const ibv_wc& wc, int i, ibv_wc_opcode opcode, const ibv_qp* qp) {
  if (wc.wr_id != static_cast<uint64_t>(i) || wc.status != IBV_WC_SUCCESS || wc.opcode != opcode || wc.qp_num != qp->qp_num)
    fail("completion " + std::to_string(i) + " has wr_id " + std::to_string(wc.wr_id) + " status " +
         std::to_string(wc.status) + " opcode " + std::to_string(wc.opcode) + " qp_num " + std::to_string(wc.qp_num));
}

template <class Cq>
void Worker::drain_sends(ibv_qp* qp, Cq* cq, ibv_wc_opcode opcode, bool verify) {
  if (complete_sends_(qp->qp_num) != kBatch) fail("not every send reached the provider");
  for (int i = 0; verify && i < kBatch; i++) check_wc(poll_one(cq), i, opcode, qp);
}

void Worker::drain_receives(ibv_qp* qp) {
  if (complete_receives_(qp->qp_num, sge_.length) != kBatch) fail("not every receive reached the provider");
  for (int i = 0; i < kBatch; i++) check_wc(poll_one(cq_), i, IBV_WC_RECV, qp);
}

// Shows which path is taken; what the numbers are called depends on it.
void Worker::prove(const std::string& way) {
  std::string owner = owner_of(reinterpret_cast<const void*>(context_->ops.post_send));
  if ((owner == "libibverbs.so.1") != (way == "native")) fail(way + ": post_send belongs to " + owner);
  ibv_send_wr wr = send_wr(IBV_WR_SEND);
  for (int i = 0; i < kBatch; i++) post_send(qp_, wr, i);
  bool own = last_wr_(qp_->qp_num) == &wr;
  if (own != (way != "switched")) fail(way + ": the provider was given " + (own ? "the caller's work request" : "a copy"));
  drain_sends(qp_, cq_, IBV_WC_SEND, true);
  prove_keys(way, qp_, [this](int i) {
    ibv_send_wr write = send_wr(IBV_WR_RDMA_WRITE);
    post_send(qp_, write, i);
  });
  std::array<ibv_send_wr, kBatch> list;  // one call
  for (int i = 0; i < kBatch; i++) {
    list[static_cast<size_t>(i)] = send_wr(IBV_WR_RDMA_READ);
    list[static_cast<size_t>(i)].wr_id = static_cast<uint64_t>(i);
    if (i) list[static_cast<size_t>(i) - 1].next = &list[static_cast<size_t>(i)];
  }
  ibv_send_wr* bad;
  if (ibv_post_send(qp_, list.data(), &bad)) fail(way + ": post_send of a list");
  drain_sends(qp_, cq_, IBV_WC_RDMA_READ, true);
  prove_keys(way, qp_wr_, [this](int i) { wr_session(IBV_WR_RDMA_WRITE, i); });
}

// Translated or not, the provider is to get the keys that are right here: nothing has moved, so the same.
template <class Post>
void Worker::prove_keys(const std::string& way, ibv_qp* qp, Post&& post) {
  for (int i = 0; i < kBatch; i++) {
    post(i);
    uint32_t lkey = 0, rkey = 0;
    if (last_keys_(qp->qp_num, &lkey, &rkey) || lkey != mr_->lkey || rkey != mr_->rkey)
      fail(way + ": the provider was given lkey " + std::to_string(lkey) + " rkey " + std::to_string(rkey) + ", not " +
           std::to_string(mr_->lkey) + ", " + std::to_string(mr_->rkey));
  }
  drain_sends(qp, cq_, IBV_WC_RDMA_WRITE, true);
}

template <class Call>
[[gnu::always_inline]] inline uint64_t Worker::timed(Call&& call) {
  if (apart_) {
    uint64_t sum = 0;
    for (int i = 0; i < kBatch; i++) {
      uint64_t t0 = clock_start();
      call(i);
      sum += clock_stop() - t0;
    }
    return sum - kBatch * clock_cost_;
  }
  uint64_t t0 = clock_start();
  for (int i = 0; i < kBatch; i++) call(i);
  return clock_stop() - t0;
}

template <class Prepare, class Call, class Finish>
[[gnu::always_inline]] inline double Worker::measure(Prepare&& prepare, Call&& call, Finish&& finish) {
  std::vector<double> cycles;
  cycles.reserve(kBatches);
  for (int b = 0; b < kWarmUp + kBatches; b++) {
    prepare();
    uint64_t t = timed(call);
    finish();
    if (b >= kWarmUp) cycles.push_back(static_cast<double>(t) / kBatch);
  }
  return median(cycles);
}

double Worker::slice(const std::string& op, const std::string& api, bool apart) {
  apart_ = apart;
  auto nothing = [] {};
  if (op == "recv")
    return measure(nothing, [this](int i) { post_recv(qp_, i); }, [this] { drain_receives(qp_); });
  if (op == "poll") {
    ibv_send_wr wr = send_wr(IBV_WR_SEND);
    ibv_qp* qp = api == "ex" ? qp_polled_ex_ : qp_;
    auto fill = [this, qp, &wr] {
      for (int i = 0; i < kBatch; i++) post_send(qp, wr, i);
      drain_sends(qp, cq_, IBV_WC_SEND, false);
    };
    std::array<ibv_wc, kBatch> got;
    auto look = [&] {
      for (int i = 0; i < kBatch; i++) check_wc(got[static_cast<size_t>(i)], i, IBV_WC_SEND, qp);
    };
    if (api == "ex") return measure(fill, [&](int i) { got[static_cast<size_t>(i)] = poll_one(cq_ex_); }, look);
    return measure(
        fill,
        [&](int i) {
          if (ibv_poll_cq(cq_, 1, &got[static_cast<size_t>(i)]) != 1) fail("poll_cq does not find a completion that is there");
        },
        look);
  }
  auto run = [&]<ibv_wr_opcode opcode>(ibv_wc_opcode done) {
    ibv_send_wr wr = send_wr(opcode);
    if (api == "wr")
      return measure(nothing, [this](int i) { wr_session(opcode, i); }, [&] { drain_sends(qp_wr_, cq_, done, true); });
    return measure(nothing, [&](int i) { post_send(qp_, wr, i); }, [&] { drain_sends(qp_, cq_, done, true); });
  };
  if (op == "send") return run.operator()<IBV_WR_SEND>(IBV_WC_SEND);
  if (op == "write") return run.operator()<IBV_WR_RDMA_WRITE>(IBV_WC_RDMA_WRITE);
  return run.operator()<IBV_WR_RDMA_READ>(IBV_WC_RDMA_READ);
}

// Answers one line per line "OP API row|apart".
int work(const std::string& way) {
  static Worker worker(way);
  printf("ready\n");
  fflush(stdout);
  char op[16], api[16], mode[16];
  while (scanf("%15s %15s %15s", op, api, mode) == 3) {
    printf("%.3f\n", worker.slice(op, api, !strcmp(mode, "apart")));
    fflush(stdout);
  }
  return 0;
}

// --- the controller

struct Process {
  pid_t pid = -1;
  FILE *to = nullptr, *from = nullptr;

  std::string answer(const std::string& way) {
    pollfd p{fileno(from), POLLIN, 0};  // one line per request: nothing is ever left in the FILE
    char line[64];
    if (poll(&p, 1, kAnswerTimeoutMs) != 1 || !fgets(line, sizeof line, from)) fail("worker '" + way + "' gave no answer");
    return line;
  }
  double slice(const std::string& way, const Case& c, const char* mode) {
    fprintf(to, "%s %s %s\n", c.op, c.api, mode);
    fflush(to);
    return atof(answer(way).c_str());
  }
  void end() {
    fclose(to);
    fclose(from);
    int status;
    if (waitpid(pid, &status, 0) != pid || status) fail("a worker failed at its end, status " + std::to_string(status));
  }
};

Process start(const std::string& way, const std::string& libmigr) {
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) fail("pipe");
  Process p;
  p.pid = fork();
  if (p.pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(in[0], 0);
    dup2(out[1], 1);
    setenv("LD_LIBRARY_PATH", MIGR_STUB_DIR, 1);
    setenv("LD_BIND_NOW", "1", 1);
    unsetenv("LD_PRELOAD");
    unsetenv("MIGR_FORCE_SWITCHED");
    if (way != "native") {
      setenv("LD_PRELOAD", libmigr.c_str(), 1);
      setenv("MIGR_TABLES", "private", 1);  // no migr.ko here; the data path is the same
    }
    if (way == "switched") setenv("MIGR_FORCE_SWITCHED", "1", 1);
    if (way == "protected") setenv("MIGR_FORCE_SWITCHED", "protected", 1);
    execl("/proc/self/exe", "datapath", "--worker", way.c_str(), nullptr);
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  p.to = fdopen(in[1], "w");
  p.from = fdopen(out[0], "r");
  if (p.answer(way) != "ready\n") fail("worker '" + way + "' is not ready");
  return p;
}

double tsc_mhz() {
  auto t0 = std::chrono::steady_clock::now();
  uint64_t c0 = __rdtsc();
  usleep(50000);
  uint64_t c1 = __rdtsc();
  return static_cast<double>(c1 - c0) / std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count();
}

std::string cpu_name() {
  FILE* f = fopen("/proc/cpuinfo", "r");
  char line[256];
  std::string name = "unknown CPU";
  while (f && fgets(line, sizeof line, f))
    if (!strncmp(line, "model name", 10)) {
      name = strchr(line, ':') + 2;
      name.pop_back();
      break;
    }
  if (f) fclose(f);
  return name;
}

constexpr const char* kModes[] = {"row", "apart"};
constexpr const char* kModeNames[] = {"calls in a row", "calls apart"};

struct Samples {
  std::vector<double> native, with, extra;
};
using Results = std::map<std::string, std::array<Samples, std::size(kCases)>>;  // by path

/// @return the JSON array
std::string report(const Results& results) {
  std::string out = "[";
  std::map<std::string, std::pair<double, std::string>> worst;  // of a path: extra, and of what
  printf("%-6s %-8s %-9s %8s %8s %8s   %s\n", "op", "api", "path", "native", "with", "extra", "p10..p90 of extra");
  for (const auto& [way, samples] : results)
    for (size_t i = 0; i < std::size(kCases); i++) {
      const Samples& s = samples[i];
      double native = median(s.native), with = median(s.with), extra = median(s.extra);
      if (way == "native") {
        printf("%-6s %-8s %-9s %8.1f %8s %8s   native %.1f..%.1f\n", kCases[i].op, kCases[i].api, "-", native, "-", "-",
               median(s.native, 0.1), median(s.native, 0.9));
        continue;
      }
      const bool over = way != "switched" && extra > kTarget;
      auto& of_all = worst.try_emplace(way, extra, "").first->second;
      if (extra >= of_all.first) of_all = {extra, std::string(kCases[i].op) + " " + kCases[i].api};
      printf("%-6s %-8s %-9s %8.1f %8.1f %8.1f   %.1f..%.1f%s\n", kCases[i].op, kCases[i].api, way.c_str(), native, with,
             extra, median(s.extra, 0.1), median(s.extra, 0.9), over ? "   above 2.0" : "");
      char object[256];
      snprintf(object, sizeof object,
               "%s\n  {\"op\": \"%s\", \"api\": \"%s\", \"path\": \"%s\", \"native\": %.1f, \"with\": %.1f, \"extra\": %.1f}",
               out.size() > 1 ? "," : "", kCases[i].op, kCases[i].api, way.c_str(), native, with, extra);
      out += object;
    }
  for (const char* const way : {"direct", "protected"})  // off, and as under `resend` and `exact`
    if (const auto of = worst.find(way); of != worst.end())
      printf("target on the %s path, extra <= %.1f: %s, %.1f (%s)\n", way, kTarget, of->second.first <= kTarget ? "met" : "missed", of->second.first, of->second.second.c_str());
  return out + "\n]\n";
}

void write_file(const std::string& path, const std::string& text) {
  FILE* f = fopen(path.c_str(), "w");
  if (!f || fputs(text.c_str(), f) < 0 || fclose(f)) fail("cannot write " + path + ": " + strerror(errno));
  printf("written: %s\n", path.c_str());
}

void run_generation(const std::vector<std::string>& ways, const std::string& libmigr, int rounds,
                    std::array<Results, std::size(kModes)>& results) {
  std::vector<Process> processes;
  for (const std::string& way : ways) processes.push_back(start(way, libmigr));
  for (int r = 0; r < rounds; r++)
    for (size_t m = 0; m < std::size(kModes); m++)
      for (size_t i = 0; i < std::size(kCases); i++) {
        std::vector<double> cycles(ways.size());
        for (size_t k = 0; k < ways.size(); k++) {
          size_t w = (k + static_cast<size_t>(r)) % ways.size();
          cycles[w] = processes[w].slice(ways[w], kCases[i], kModes[m]);
        }
        if (ways.size() == 1) results[m]["native"][i].native.push_back(cycles[0]);
        for (size_t w = 1; w < ways.size(); w++) {
          Samples& s = results[m][ways[w]][i];
          s.native.push_back(cycles[0]);
          s.with.push_back(cycles[w]);
          s.extra.push_back(cycles[w] - cycles[0]);
        }
      }
  for (Process& p : processes) p.end();
}

int control(const std::string& libmigr, const std::string& json, int generations, int rounds, int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(cpu), &one);
  double mhz = tsc_mhz();
  if (sched_setaffinity(0, sizeof one, &one)) fail("cannot pin to CPU " + std::to_string(cpu));
  std::vector<std::string> ways{"native"};
  if (!libmigr.empty()) ways.insert(ways.end(), {"direct", "protected", "switched"});
  std::array<Results, std::size(kModes)> results;
  for (int g = 0; g < generations; g++) run_generation(ways, libmigr, rounds, results);
  printf("%s, TSC %.0f MHz, CPU %d; cycles of the TSC per call; medians of %d rounds in %d sets of\n"
         "processes, each the median of %d batches of %d calls\n",
         cpu_name().c_str(), mhz, cpu, generations * rounds, generations, kBatches, kBatch);
  for (size_t m = 0; m < std::size(kModes); m++) {
    printf("\n%s\n", kModeNames[m]);
    std::string text = report(results[m]);
    if (json.empty() || libmigr.empty()) continue;
    size_t dot = std::min(json.rfind('.'), json.size());
    write_file(m == 0 ? json : json.substr(0, dot) + "-" + kModes[m] + json.substr(dot), text);
  }
  if (libmigr.empty()) printf("native only: give --libmigr FILE to compare\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string libmigr, json;
  int generations = 20, rounds = 6, cpu = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) - 1;
  for (int i = 1; i < argc; i++) {
    std::string option = argv[i];
    if (i + 1 == argc) fail("option " + option + " needs a value");
    std::string value = argv[++i];
    if (option == "--worker") return work(value);
    if (option == "--libmigr") libmigr = value;
    else if (option == "--json") json = value;
    else if (option == "--generations") generations = atoi(value.c_str());
    else if (option == "--rounds") rounds = atoi(value.c_str());
    else if (option == "--cpu") cpu = atoi(value.c_str());
    else fail("unknown option " + option + " (--libmigr, --json, --generations, --rounds, --cpu)");
  }
  if (generations < 1 || rounds < 1) fail("--generations and --rounds: at least 1");
  struct stat unused;
  if (!libmigr.empty() && stat(libmigr.c_str(), &unused)) fail(libmigr + ": " + strerror(errno));
  return control(libmigr, json, generations, rounds, cpu);
}
