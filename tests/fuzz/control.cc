// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a process with libmigr believes of its migrd: requests at its connection, in packets of any kind and order. The engine is
// one that only looks at what it is given: it must be the process's own.
#include "libmigr/control.cc"  // serve_connection() is nobody else's

#include "seeds.h"
#include "../unit/control_doubles.h"

namespace migr {

constexpr std::uint32_t kCtx = kDoubledContext, kQpn = 0x10, kQps = 2;

namespace {

migr_proc_state engine_state = MIGR_PROC_RUNNING;

void own(const QpShadow* qp) {
  const auto& all = Registry::get().qps;
  always(std::find(all.begin(), all.end(), qp) != all.end(), "a QP that the engine gets is one of the process");
}
void own(switchover::Qps qps) {
  for (const QpShadow* q : qps) own(q);
}
/// All bytes of what a request has brought are there.
template <class T>
void there(std::span<const T> records) {
  volatile unsigned sum = 0;
  for (const std::byte b : std::as_bytes(records)) sum = sum + static_cast<unsigned>(b);
}

}  // namespace

namespace switchover {
migr_proc_state process_state() { return engine_state; }
int suspend(Qps qps, std::string&) { return own(qps), engine_state = MIGR_PROC_SUSPENDED, 0; }
int drain(std::unique_lock<std::mutex>, Qps qps, unsigned, std::vector<migr_drain_stat>& stats, std::string&) {
  own(qps);
  stats.resize(qps.size());
  return 0;
}
int give_up(Qps qps, std::string&) { return own(qps), 0; }
int track(Qps qps, bool here, std::string&) { return own(qps), here && qps.size() > 1 ? EOPNOTSUPP : 0; }
int note_queues(unsigned, std::string&) { return 0; }
std::string lost_memory() { return {}; }
int take_notes(std::vector<migr_nic_write>& out, std::string&) { return out.resize(3), 0; }
int check_cut(Qps qps, std::string& why) { return own(qps), why = "it cannot be cut", qps.size() > 1 ? EOPNOTSUPP : 0; }
int cut(Qps qps, std::vector<migr_qp_psn>& out, std::string&) { return own(qps), out.resize(qps.size()), 0; }
int settle(Qps qps, std::span<const migr_qp_psn> psns, std::vector<migr_replay_stat>& out, std::string&) {
  own(qps), there(psns);
  always(qps.size() == psns.size(), "each of them has its number");
  out.resize(qps.size());
  return 0;
}
int freeze(std::string&) { return engine_state = MIGR_PROC_FROZEN, 0; }
int create_spares(Qps qps, std::vector<migr_qp_spare>& out, std::string&) { return own(qps), out.resize(qps.size()), 0; }
int connect_spare(QpShadow& qp, const migr_qp_connect& to, std::string&) { return own(&qp), there(std::span(&to, 1)), 0; }
int switch_to_spare(Qps qps, std::string&) {
  own(qps);
  for (QpShadow* q : qps) q->phase = Phase::kSwitched;
  return 0;
}
int rebound_keys(std::vector<migr_key_map>& out) { return out.resize(1), 0; }
int rebind(std::span<const migr_handle_map> maps, std::vector<migr_key_map>& out, std::string&) { return there(maps), out.resize(maps.size()), 0; }
int set_remote_keys(Qps qps, std::span<const migr_key_map> keys, std::string&) { return own(qps), there(keys), 0; }
int resume(Qps qps, std::vector<migr_resume_stat>& out, std::string&) { return own(qps), out.resize(qps.size()), engine_state = MIGR_PROC_RUNNING, 0; }
int take_old_paths(std::string&) { return 0; }
int rollback(std::string&) { return engine_state = MIGR_PROC_RUNNING, 0; }
void stats(std::vector<migr_drain_stat>& out) { out.resize(Registry::get().qps.size()); }
}  // namespace switchover

namespace datagrams {
unsigned prepare() { return 3; }
void settle() {}
int set_moves(std::span<const migr_move> moves, std::string&) { return there(moves), 0; }
std::vector<ibv_gid_entry> sources(const Context&) { return {}; }
}  // namespace datagrams

namespace whereabouts {
void set_moves(std::span<const migr_move> moves) { there(moves); }
void met(QpShadow& qp, std::span<const migr_key_map> keys) { own(&qp), there(keys); }
}  // namespace whereabouts

namespace provider {
void set_restored() {}
void forget_uverbs_fds() {}
}  // namespace provider

}  // namespace migr

namespace {

using namespace migr;

/// A process with a context and two QPs, that has greeted.
void live() {
  static Context context;
  static QpShadow qps[kQps];
  static ibv_qp real[kQps];
  for (std::uint32_t i = 0; i < kQps; i++) {
    qps[i].app.qp_num = kQpn + i;
    real[i].qp_num = kQpn + kQps + i;
    qps[i].real = &real[i];
    qps[i].context = &context;
    Registry::get().qps.push_back(&qps[i]);
  }
  control::self = new control::Self;
  control::self->socket_path = "/dev/null";  // it is in reach
  std::memset(control::self->instance, 1, sizeof control::self->instance);
}

template <class T = migr_qp_ref>
std::string packet(std::uint16_t type, const std::vector<T>& records = {}, std::uint64_t arg = 0, std::uint32_t seq = 1, std::uint16_t flags = 0) {
  migr_msg head{};
  head.version = MIGR_PROC_VERSION;
  head.type = type;
  head.seq = seq;
  head.arg = arg;
  head.flags = flags;
  head.record_size = records.empty() ? 0 : sizeof(T);
  head.count = static_cast<std::uint32_t>(records.size());
  std::string out = bytes_of(head);
  for (const T& r : records) out += bytes_of(r);
  return part(out);
}

}  // namespace

/// A partner's way, a service's way, what is done where the network is bad, and a request of several packets.
std::vector<std::string> seeds() {
  const std::vector<migr_qp_ref> both{{kCtx, kQpn, 0, 0}, {kCtx, 0, kQpn + kQps + 1, 0}};
  migr_qp_connect to{};
  to.ctx_id = kCtx;
  to.vqpn = kQpn;
  const std::uint64_t first = std::uint64_t{kCtx} << 32 | kQpn;
  return {packet(MIGR_MSG_DESCRIBE) + packet(MIGR_MSG_QP_CREATE, both) + packet<migr_qp_connect>(MIGR_MSG_QP_CONNECT, {to}) + packet(MIGR_MSG_SUSPEND, both) +
              packet(MIGR_MSG_DRAIN, both, 100) + packet(MIGR_MSG_SWITCH, both) + packet<migr_key_map>(MIGR_MSG_KEYS, {{}}) + packet(MIGR_MSG_RESUME, both) + packet(MIGR_MSG_STATS),
          packet(MIGR_MSG_DESCRIBE, {}, MIGR_DESCRIBE_HOLD | MIGR_DESCRIBE_MOVE) + packet(MIGR_MSG_SUSPEND) + packet(MIGR_MSG_OLD_PATH) + packet(MIGR_MSG_ROLLBACK) + packet(MIGR_MSG_FREEZE),
          packet<migr_handle_map>(MIGR_MSG_REBIND, {{}, {}}) + packet<migr_move>(MIGR_MSG_MOVES, {}, MIGR_MOVES_PREPARE) + packet<migr_move>(MIGR_MSG_MOVES, {{}}) +
              packet<migr_key_map>(MIGR_MSG_MET, {{}}, first) + packet(MIGR_MSG_RESUME),
          packet(MIGR_MSG_GONE, both) + packet(MIGR_MSG_CUT, both, MIGR_CUT_CHECK) + packet(MIGR_MSG_CUT, both) + packet<migr_qp_psn>(MIGR_MSG_SETTLE, {{kCtx, kQpn, 5, 0}, {kCtx, kQpn + 1, 6, 0}}),
          packet(MIGR_MSG_SUSPEND, both, 0, 1, MIGR_MORE) + packet(MIGR_MSG_SUSPEND, both)};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool alive = (live(), true);
  always(alive, "there is a process");
  int ends[2];
  always(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), "there are sockets");
  for (const std::string_view p : parts(data, size))
    if (send(ends[0], p.data(), p.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
  shutdown(ends[0], SHUT_WR);
  (void)control::serve_connection(ends[1]);
  close(ends[1]);
  static std::vector<char> answer(1 << 18);
  for (ssize_t n; (n = recv(ends[0], answer.data(), answer.size(), MSG_DONTWAIT | MSG_TRUNC)) > 0;) {
    migr_msg head{};
    always(static_cast<std::size_t>(n) >= sizeof head && static_cast<std::size_t>(n) <= answer.size(), "an answer is a packet");
    std::memcpy(&head, answer.data(), sizeof head);
    always(head.version == MIGR_PROC_VERSION && head.type & MIGR_REPLY && static_cast<std::size_t>(n) == sizeof head + std::size_t{head.count} * head.record_size,
           "and says what of and how long it is");
    always(!head.status || head.text[0], "a refusal has its reason");
  }
  close(ends[0]);
  // As after a migration that was taken back.
  itimer::release();
  cm::rollback();
  std::lock_guard guard(Registry::get().lock);
  engine_state = MIGR_PROC_RUNNING;
  for (QpShadow* q : Registry::get().qps) q->phase = {};
  Registry::get().let_changes_go();
  always(!Registry::get().held, "nothing waits any more");
  return 0;
}
