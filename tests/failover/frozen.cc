// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "frozen.h"

#include <endian.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <tuple>

#include "model.h"

namespace frozen {

bool readable(int fd, int ms) {
  pollfd p{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&p, 1, ms) == 1 && (p.revents & POLLIN);
}

Migrd& Migrd::get() {
  static Migrd one;
  return one;
}

migr_msg Migrd::ask(std::uint16_t type, std::uint64_t arg) {
  const migr_msg reply = try_to(type, arg);
  EXPECT_EQ(reply.status, 0) << reply.text;
  return reply;
}

migr_msg Migrd::about(const ibv_qp* qp, std::uint16_t type, std::uint64_t arg) {
  migr_qp_ref ref{};
  if (!qp) return say(type, arg, nullptr, 0);
  ref.vqpn = qp->qp_num;
  return say(type, arg, &ref, sizeof ref);
}

migr_msg Migrd::say_all(std::uint16_t type, std::uint64_t arg, const void* records, std::size_t each, std::uint32_t count) {
  const std::size_t bytes = each * count;
  if (fd_ < 0) meet();
  migr_msg m{};
  m.count = count;
  m.record_size = static_cast<std::uint32_t>(each);
  m.version = MIGR_PROC_VERSION;
  m.type = type;
  m.seq = ++seq_;
  m.migration = 7;
  m.arg = arg;
  std::vector<char> packet(sizeof m + bytes);
  std::memcpy(packet.data(), &m, sizeof m);
  if (bytes) std::memcpy(packet.data() + sizeof m, records, bytes);
  EXPECT_EQ(send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
  const migr_msg reply = receive(fd_, &records_);
  EXPECT_EQ(reply.type, type | MIGR_REPLY);
  return reply;
}

void Migrd::freeze() {
  ask(MIGR_MSG_SUSPEND);
  drained();
}

void Migrd::drained() {
  ask(MIGR_MSG_DRAIN, 1000);
  ask(MIGR_MSG_FREEZE);
  hung_up();
}

void Migrd::hung_up() {
  close(fd_);
  fd_ = -1;
}

void Migrd::appears() {
  model_restored();
  open_gate();
}

void Migrd::back() {
  open_gate();
  ask(MIGR_MSG_ROLLBACK);
}

void Migrd::restored() {
  appears();
  ask(MIGR_MSG_REBIND);
  ask(MIGR_MSG_RESUME);
}

Migrd::Migrd() : listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  char name[] = "/tmp/events_test.XXXXXX";
  folder_ = mkdtemp(name);
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::snprintf(at.sun_path, sizeof at.sun_path, "%s/proc.sock", folder_.c_str());
  if (bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at) || listen(listener_, 1)) std::abort();
  setenv("MIGR_PROC_SOCKET", at.sun_path, 1);
  std::thread([this] { answer(); }).detach();
}

Migrd::~Migrd() {
  unlink((folder_ + "/proc.sock").c_str());
  rmdir(folder_.c_str());
}

void Migrd::answer() {
  for (;;) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    migr_msg m = receive(fd);
    if (m.type == MIGR_MSG_HELLO) {
      std::lock_guard guard(lock_);
      hellos_.emplace_back(fd, m);
      met_.notify_all();
      continue;
    }
    m.type |= MIGR_REPLY;
    m.status = ENOENT;
    m.count = m.record_size = 0;
    (void)!::send(fd, &m, sizeof m, MSG_NOSIGNAL);
    close(fd);
  }
}

void Migrd::meet() {
  std::unique_lock guard(lock_);
  ASSERT_TRUE(met_.wait_for(guard, std::chrono::milliseconds(kPatienceMs), [this] { return !hellos_.empty(); })) << "the library does not connect";
  std::tie(fd_, hello_) = hellos_.front();
  hellos_.pop_front();
}

void Migrd::open_gate() {
  std::string gate = folder_ + "/" MIGR_PROC_GATE_PREFIX;
  for (const unsigned b : hello_.instance) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", b);
    gate += hex;
  }
  close(open(gate.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  meet();
  unlink(gate.c_str());
}

migr_msg Migrd::receive(int fd, std::vector<char>* records) {
  std::vector<char> packet(1 << 20);
  migr_msg m{};
  const ssize_t n = readable(fd, kPatienceMs) ? recv(fd, packet.data(), packet.size(), 0) : -1;
  if (n < static_cast<ssize_t>(sizeof m)) return m;
  std::memcpy(&m, packet.data(), sizeof m);
  if (records) records->assign(packet.begin() + sizeof m, packet.begin() + n);
  return m;
}

Migrd& migrd = Migrd::get();  // before the first device is opened

void Events::SetUp() {
  model_async_events();
  ibv_device** list = ibv_get_device_list(nullptr);
  context_ = ibv_open_device(list[0]);
  ibv_free_device_list(list);
  pd_ = ibv_alloc_pd(context_);
  channel_ = ibv_create_comp_channel(context_);
  for (int i = 0; i < 2; ++i) {
    cq_[i] = ibv_create_cq(context_, 64, &cq_[i], channel_, 0);
    qp_[i] = make_qp(cq_[i]);
  }
}

void Events::TearDown() {
  for (ibv_qp* qp : qp_) EXPECT_EQ(qp ? ibv_destroy_qp(qp) : 0, 0);
  for (ibv_cq* cq : cq_) EXPECT_EQ(ibv_destroy_cq(cq), 0);
  ibv_destroy_comp_channel(channel_);
  ibv_dealloc_pd(pd_);
  ibv_close_device(context_);
  EXPECT_EQ(model_unbalanced(), 0u) << "libibverbs would wait for acknowledgements for ever";
}

ibv_qp* Events::make_qp(ibv_cq* cq, std::uint32_t sends) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.cap = {.max_send_wr = sends, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  return ibv_create_qp(pd_, &init);
}

void Events::to(ibv_qp* qp, ibv_qp_state state) {
  ibv_qp_attr attr{};
  attr.qp_state = state;
  attr.port_num = 1;
  EXPECT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT), 0);
}

void Events::complete(ibv_cq* cq) {
  ibv_qp* qp = make_qp(cq);
  to(qp, IBV_QPS_INIT);
  ibv_recv_wr wr{}, *bad;
  EXPECT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
  to(qp, IBV_QPS_ERR);
  EXPECT_EQ(ibv_destroy_qp(qp), 0);
}

void Events::post_receive(int i) const {
  ibv_recv_wr wr{}, *bad;
  EXPECT_EQ(ibv_post_recv(qp_[i], &wr, &bad), 0);
}

void Events::arrives(int i, bool solicited) const {
  post_receive(i);
  model_arrives(qp_[i], solicited);
}

void Events::move() {
  migrd.freeze();
  GetParam() == How::kBack ? migrd.back() : migrd.restored();
}

ibv_cq* Events::next() {
  if (!readable(channel_->fd, kSoonMs)) return nullptr;
  ibv_cq* cq;
  void* context;
  EXPECT_EQ(ibv_get_cq_event(channel_, &cq, &context), 0);
  EXPECT_EQ(context, cq == cq_[0] ? &cq_[0] : &cq_[1]);
  ibv_ack_cq_events(cq, 1);
  return cq;
}

void Pollers::SetUp() {
  Events::SetUp();
  ibv_device** list = ibv_get_device_list(nullptr);
  other_ = ibv_open_device(list[3]);  // b0
  ibv_free_device_list(list);
  other_pd_ = ibv_alloc_pd(other_);
  other_cq_ = ibv_create_cq(other_, 64, nullptr, nullptr, 0);
  ibv_cq_init_attr_ex attr{};
  attr.cqe = 64;
  attr.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP;
  ex_ = ibv_create_cq_ex(context_, &attr);
  mr_ = ibv_reg_mr(pd_, memory_, sizeof memory_, IBV_ACCESS_LOCAL_WRITE);
  to_ = make_qp(ibv_cq_ex_to_cq(ex_));
  std::swap(pd_, other_pd_);
  from_ = make_qp(other_cq_);
  std::swap(pd_, other_pd_);
  connect(to_, from_, other_);
  connect(from_, to_, context_);
}

void Pollers::TearDown() {
  for (ibv_qp* qp : {to_, from_}) EXPECT_EQ(ibv_destroy_qp(qp), 0);
  EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(ex_)), 0);
  EXPECT_EQ(ibv_destroy_cq(other_cq_), 0);
  ibv_dereg_mr(mr_);
  ibv_dealloc_pd(other_pd_);
  ibv_close_device(other_);
  Events::TearDown();
}

void Pollers::connect(ibv_qp* qp, const ibv_qp* peer, ibv_context* its) {
  answer(qp, peer, its);
  EXPECT_EQ(go_to_rts(qp, 0), 0);
}

void Pollers::answer(ibv_qp* qp, const ibv_qp* peer, ibv_context* its, std::uint32_t rq_psn) {
  to(qp, IBV_QPS_INIT);
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = peer->qp_num;
  a.rq_psn = rq_psn;
  a.ah_attr.is_global = 1;
  a.ah_attr.port_num = 1;
  EXPECT_EQ(ibv_query_gid(its, 1, 0, &a.ah_attr.grh.dgid), 0);
  EXPECT_EQ(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
}

int Pollers::go_to_rts(ibv_qp* qp, std::uint32_t sq_psn, std::uint8_t timeout) {
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTS;
  a.sq_psn = sq_psn;
  a.timeout = timeout;
  return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

void Pollers::send(std::uint32_t n) {
  ibv_sge into{reinterpret_cast<std::uintptr_t>(memory_), sizeof memory_, mr_->lkey};
  ibv_recv_wr receive{.wr_id = 100 + n, .next = nullptr, .sg_list = &into, .num_sge = 1}, *bad_receive;
  ASSERT_EQ(ibv_post_recv(to_, &receive, &bad_receive), 0);
  std::uint8_t data[2 * kBytes] = {};
  ibv_sge of{reinterpret_cast<std::uintptr_t>(data), kBytes + n, 0};
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND_WITH_IMM;
  wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  wr.imm_data = htobe32(7000 + n);
  wr.sg_list = &of;
  wr.num_sge = 1;
  ASSERT_EQ(ibv_post_send(from_, &wr, &bad), 0);
  ibv_wc wc{};
  for (int ms = 0; ibv_poll_cq(other_cq_, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
  ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
}

void Pollers::expect(std::uint32_t n) {
  EXPECT_EQ(ex_->status, IBV_WC_SUCCESS);
  EXPECT_EQ(ex_->wr_id, 100u + n);
  EXPECT_EQ(ibv_wc_read_opcode(ex_), IBV_WC_RECV);
  EXPECT_EQ(ibv_wc_read_byte_len(ex_), kBytes + n);
  EXPECT_EQ(be32toh(ibv_wc_read_imm_data(ex_)), 7000u + n);
  EXPECT_EQ(ibv_wc_read_qp_num(ex_), to_->qp_num);
  EXPECT_EQ(ibv_wc_read_src_qp(ex_), from_->qp_num);
  EXPECT_EQ(ibv_wc_read_wc_flags(ex_), unsigned{IBV_WC_WITH_IMM});
}

void Pollers::expect_two(std::uint32_t n) {
  ibv_poll_cq_attr attr{};
  ASSERT_EQ(ibv_start_poll(ex_, &attr), 0);
  expect(n);
  ASSERT_EQ(ibv_next_poll(ex_), 0);
  expect(n + 1);
  EXPECT_EQ(ibv_next_poll(ex_), ENOENT);
  ibv_end_poll(ex_);
  EXPECT_EQ(ibv_start_poll(ex_, &attr), ENOENT);
}

void Pollers::two(std::uint32_t n) {
  send(n);
  send(n + 1);
}

Ended::Ended(ibv_qp* of, ibv_pd* pd, void* memory, std::size_t bytes)
    : qp(of), mr(ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND)), mw(ibv_alloc_mw(pd, IBV_MW_TYPE_2)) {
  bind();
}

Ended::~Ended() {
  ibv_dealloc_mw(mw);
  ibv_dereg_mr(mr);
}

void Ended::bind() const {
  ibv_send_wr wr{}, *bad;
  wr.wr_id = kBound;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = {.mr = mr, .addr = reinterpret_cast<std::uintptr_t>(mr->addr), .length = mr->length, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}};
  EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
  mw->rkey = wr.bind_mw.rkey;
}

void Ended::end(ibv_qp* from, std::uint32_t key) const {
  ibv_recv_wr receive{.wr_id = kEnded, .next = nullptr, .sg_list = nullptr, .num_sge = 0}, *bad_receive;
  EXPECT_EQ(ibv_post_recv(qp, &receive, &bad_receive), 0);
  ibv_send_wr wr{}, *bad;
  wr.opcode = IBV_WR_SEND_WITH_INV;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.invalidate_rkey = key;
  EXPECT_EQ(ibv_post_send(from, &wr, &bad), 0);
  ibv_wc wc{};
  for (int ms = 0; ibv_poll_cq(from->send_cq, 1, &wc) == 0 && ms < kPatienceMs; ++ms) usleep(1000);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

void Ended::expect_told(ibv_cq* cq, std::uint32_t told) const {
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
  EXPECT_EQ(wc.wr_id, kEnded);
  EXPECT_EQ(wc.invalidated_rkey, told);
  EXPECT_EQ(ibv_poll_cq(cq, 1, &wc), 0);
}

namespace {

/// Far below what the library moves its own up to, and above all that this program has.
constexpr int kUnknown = 512;

}  // namespace

void close_all_that_is_unknown() {
  closefrom(kUnknown);
  for (int fd = kUnknown; fd < 8192; ++fd) close(fd);
}

}  // namespace frozen
