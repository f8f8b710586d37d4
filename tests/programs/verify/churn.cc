// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "churn.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

namespace verify {

Churn::Churn(ibv_context* context, int period_ms) {
  if (period_ms) thread_ = std::jthread([=, this](const std::stop_token& stop) { run(stop, context, period_ms); });
}

std::string Churn::stop() {
  if (!thread_.joinable()) return {};
  thread_.request_stop();
  thread_.join();
  if (failed_.empty() && !rounds_) return "not a single resource was made beside the traffic";
  return failed_;
}

void Churn::run(const std::stop_token& stop, ibv_context* context, int period_ms) {
  while (!stop.stop_requested() && failed_.empty()) {
    failed_ = round(context);
    ++rounds_;
    std::this_thread::sleep_for(std::chrono::milliseconds(period_ms));
  }
}

std::string Churn::round(ibv_context* context) {
  const auto failed = [](const char* call, int code) { return std::string(call) + " beside the traffic: " + std::strerror(code); };
  char memory[4096];
  ibv_pd* const pd = ibv_alloc_pd(context);
  if (!pd) return failed("ibv_alloc_pd", errno);
  ibv_mr* const mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
  if (!mr) return failed("ibv_reg_mr", errno);
  ibv_cq* const cq = ibv_create_cq(context, 8, nullptr, nullptr, 0);
  if (!cq) return failed("ibv_create_cq", errno);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.cap = {4, 4, 1, 1, 0};
  init.qp_type = IBV_QPT_RC;
  ibv_qp* const qp = ibv_create_qp(pd, &init);
  if (!qp) return failed("ibv_create_qp", errno);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  if (const int e = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
    return failed("ibv_modify_qp", e);
  if (const int e = ibv_destroy_qp(qp)) return failed("ibv_destroy_qp", e);
  if (const int e = ibv_destroy_cq(cq)) return failed("ibv_destroy_cq", e);
  if (const int e = ibv_dereg_mr(mr)) return failed("ibv_dereg_mr", e);
  if (const int e = ibv_dealloc_pd(pd)) return failed("ibv_dealloc_pd", e);
  return {};
}

}  // namespace verify
