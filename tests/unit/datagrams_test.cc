/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* Names of unconnected QPs that have moved: what sends become, and what is said of who sent a datagram. */
#include "../../libmigr/datagrams.h"

#include <gtest/gtest.h>
#include <netinet/ip.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>

#include "../../libmigr/kernel_link.h"
#include "../../libmigr/objects.h"
#include "../../libmigr/path.h"
#include "../../libmigr/provider/provider.h"
#include "../../libmigr/real.h"
#include "../../libmigr/switchover/switchover.h"

namespace migr::links {

std::uint64_t own_name(const SrqShadow&, std::uint64_t wr_id) { return wr_id; }

}  // namespace migr::links

namespace migr {

/* ---- what is behind and beside it --------------------------------------------- */

KernelLink::~KernelLink() = default;

int handles;
ibv_context the_context;
Context our_context;
std::vector<KeptReceive> posted;  // what the provider's queue holds

Registry& Registry::get() {
  static Registry* registry = new Registry;
  return *registry;
}
Context* Registry::context_of(const ibv_context* real) const { return real == &the_context ? &our_context : nullptr; }
QpShadow* known(Registry&, ibv_qp* qp) { return &shadow_of(qp); }

struct FakeAh {
  ibv_ah ah;
  ibv_ah_attr attr;
};
ibv_gid used_source;  // of the last handle
int silent_host;      // last byte of an address at which nobody answers
int asked_in_vain;
int room = -1;  // handles that may still be made; -1: any
/// As soft-RoCE's provider does: the address of the source is looked up by the exported call.
ibv_ah* create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  ibv_query_gid(pd->context, attr->port_num, attr->grh.sgid_index, &used_source);
  if (silent_host && attr->grh.dgid.raw[15] == silent_host) {
    ++asked_in_vain;
    errno = ETIMEDOUT;
    return nullptr;
  }
  if (!room) return errno = ENOMEM, nullptr;
  if (room > 0) --room;
  auto* made = new FakeAh{{pd->context, pd, 0}, *attr};
  ++handles;
  return &made->ah;
}
int destroy_ah(ibv_ah* ah) {
  delete reinterpret_cast<FakeAh*>(ah);
  --handles;
  return 0;
}
std::vector<ibv_gid_entry> host_gids;  // of the host that we are on
ssize_t query_gids(ibv_context*, ibv_gid_entry* out, std::size_t max, std::uint32_t, std::size_t) {
  const std::size_t n = std::min(max, host_gids.size());
  std::copy_n(host_gids.begin(), n, out);
  return static_cast<ssize_t>(n);
}
int query_gid(ibv_context*, std::uint8_t port, int index, ibv_gid* gid) {
  *gid = {};
  for (const auto& e : host_gids)
    if (e.port_num == port && static_cast<int>(e.gid_index) == index) *gid = e.gid;
  return 0;
}
decltype(&::_ibv_query_gid_table) real_query_gid_table() { return query_gids; }
decltype(&::_ibv_query_gid_ex) real_query_gid_ex() { return nullptr; }
/// As libibverbs does: our own side has to be in the GID table.
int init_ah_from_wc(ibv_context*, std::uint8_t, ibv_wc*, ibv_grh* grh, ibv_ah_attr* attr) {
  iphdr h;
  memcpy(&h, reinterpret_cast<std::uint8_t*>(grh) + 20, 20);
  for (const auto& e : host_gids)
    if (e.gid_type == IBV_GID_TYPE_ROCE_V2 && !memcmp(e.gid.raw + 12, &h.daddr, 4)) {
      attr->grh.sgid_index = static_cast<std::uint8_t>(e.gid_index);
      memcpy(attr->grh.dgid.raw + 12, &h.saddr, 4);
      return 0;
    }
  return -1;
}
/// As uverbs has it: who is in a group already joins it once more, and leaves it once.
std::vector<std::pair<std::uint8_t, std::uint16_t>> joined;
std::uint8_t no_group;  // last byte of one that cannot be joined
int attach_mcast(ibv_qp*, const ibv_gid* gid, std::uint16_t lid) {
  if (no_group && gid->raw[15] == no_group) return ENOMEM;
  const std::pair group{gid->raw[15], lid};
  if (std::find(joined.begin(), joined.end(), group) == joined.end()) joined.push_back(group);
  return 0;
}
int detach_mcast(ibv_qp*, const ibv_gid* gid, std::uint16_t lid) { return std::erase(joined, std::pair{gid->raw[15], lid}) ? 0 : EINVAL; }
const Real& real() {
  static const Real fake = [] {
    Real r{};
    r.attach_mcast = attach_mcast;
    r.detach_mcast = detach_mcast;
    r.create_ah = create_ah;
    r.destroy_ah = destroy_ah;
    r.query_gid = query_gid;
    r.init_ah_from_wc = init_ah_from_wc;
    return r;
  }();
  return fake;
}
namespace path {
void translate_keys(QpShadow& q, std::uint32_t bits) { q.state.fetch_or(bits); }
int poll_to_fake(CqShadow&) noexcept { return 0; }
}  // namespace path
namespace provider {
int locate_queues(std::span<QpShadow* const>) { return 0; }
int outstanding_receives(QpShadow&, std::vector<KeptReceive>& out) { return out = posted, 0; }
int outstanding_receives(SrqShadow&, std::vector<KeptReceive>& out) { return out = posted, 0; }
void become(ibv_ah&, ibv_ah* fresh) { destroy_ah(fresh); }
std::vector<std::uint8_t> unresolved;       // last bytes of where handles were led without an answer
std::vector<std::uint8_t> unresolved_from;  // and of their sources; 0: none
void lead_unresolved(ibv_ah&, const ibv_ah_attr& attr, const ibv_gid& from) {
  unresolved.push_back(attr.grh.dgid.raw[15]);
  unresolved_from.push_back(from.raw[15]);
}
}  // namespace provider
namespace switchover {
void make_keys_virtual(const Context&, std::vector<KeptReceive>&) {}
bool destroy_old_paths() { return false; }
}  // namespace switchover

namespace {

ibv_gid gid_v4(std::uint8_t last) {
  ibv_gid g{};
  g.raw[10] = g.raw[11] = 0xff;
  g.raw[12] = 10;
  g.raw[15] = last;
  return g;
}

migr_move move_of(std::uint8_t from, std::uint32_t vqpn, std::uint8_t to, std::uint32_t pqpn) {
  migr_move m{{}, {}, vqpn, pqpn};
  memcpy(m.birth_gid, gid_v4(from).raw, 16);
  memcpy(m.gid, gid_v4(to).raw, 16);
  return m;
}

struct Datagrams : ::testing::Test {
  Datagrams() {
    pd.context = &the_context;
    qp.app.qp_type = IBV_QPT_UD;
    qp.app.qp_num = 40;
    qp.context = &our_context;
    qp.recv_cq = qp.send_cq = &cq;
    Registry::get().qps = {&qp};
    ibv_ah_attr attr{};
    attr.is_global = 1;
    attr.grh.dgid = gid_v4(1);
    ah = ibv_create_ah(&pd, &attr);
  }
  ~Datagrams() override {
    datagrams::gone(qp);
    ibv_destroy_ah(ah);
    std::string why;
    datagrams::set_moves({}, why);
    datagrams::dropped(our_context);
    host_gids.clear();
    Registry::get().qps.clear();
    posted.clear();
    EXPECT_EQ(0, handles) << "a handle was left";
  }
  void moved(std::vector<migr_move> moves) {
    std::string why;
    EXPECT_EQ(1u, datagrams::prepare());
    EXPECT_EQ(0, datagrams::set_moves(moves, why)) << why;
  }
  KeptReceive receive(std::uint64_t wr_id, std::uint8_t* at, std::uint32_t length = 512) {
    return {wr_id, {{reinterpret_cast<std::uintptr_t>(at), length, 0x100}}};
  }
  /// An IPv4 header of `from` where a GRH ends.
  static void arrived(std::uint8_t* at, std::uint8_t from, std::uint8_t to = 200) {
    memset(at, 0, 40);
    iphdr h{};
    h.version = 4;
    h.ihl = 5;
    memcpy(&h.saddr, gid_v4(from).raw + 12, 4);
    memcpy(&h.daddr, gid_v4(to).raw + 12, 4);
    std::uint32_t sum = 0;
    std::uint16_t words[10];
    memcpy(words, &h, 20);
    for (std::uint16_t w : words) sum += w;
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    h.check = static_cast<std::uint16_t>(~sum);
    memcpy(at + 20, &h, 20);
  }
  ibv_wc completion(std::uint64_t wr_id, std::uint32_t src, std::uint32_t qpn = 40) {
    ibv_wc wc{};
    wc.wr_id = wr_id;
    wc.opcode = IBV_WC_RECV;
    wc.wc_flags = IBV_WC_GRH;
    wc.qp_num = qpn;
    wc.src_qp = src;
    datagrams::name_source(cq, wc);
    return wc;
  }
  static std::uint8_t source(const std::uint8_t* at) { return at[35]; }
  static bool sum_is_right(const std::uint8_t* at) {
    std::uint32_t sum = 0;
    std::uint16_t words[10];
    memcpy(words, at + 20, 20);
    for (std::uint16_t w : words) sum += w;
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return sum == 0xffff;
  }

  ibv_pd pd{};
  CqShadow cq{};
  QpShadow qp{};
  ibv_ah* ah;
  alignas(8) std::uint8_t buffer[4][512] = {};
};

TEST_F(Datagrams, SendsToWhoHasMovedGoWhereItIs) {
  moved({move_of(1, 17, 2, 30), move_of(9, 17, 3, 31)});
  ibv_send_wr wr{};
  wr.wr.ud = {.ah = ah, .remote_qpn = 17, .remote_qkey = 5};
  datagrams::translate(wr);
  EXPECT_EQ(30u, wr.wr.ud.remote_qpn);
  EXPECT_EQ(2, reinterpret_cast<FakeAh*>(wr.wr.ud.ah)->attr.grh.dgid.raw[15]);
  wr.wr.ud = {.ah = ah, .remote_qpn = 18, .remote_qkey = 5};
  datagrams::translate(wr);
  EXPECT_EQ(ah, wr.wr.ud.ah) << "its neighbour has stayed";
  EXPECT_EQ(18u, wr.wr.ud.remote_qpn);
}

// A child would wait for ever for a thread that it does not have.
TEST_F(Datagrams, NobodyIsInTheMiddleOfASendWhileTheProcessForks) {
  datagrams::lock_for_fork();
  auto sends = std::async(std::launch::async, [this] {
    ibv_send_wr wr{};
    wr.wr.ud.ah = ah;
    datagrams::translate(wr);
  });
  EXPECT_EQ(sends.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  datagrams::unlock_after_fork();
  sends.get();
}

TEST_F(Datagrams, NameThatNobodyHasAnyMoreIsWhatItWas) {
  moved({move_of(1, 17, 2, 30)});
  moved({});
  ibv_ah* to = ah;
  std::uint32_t qpn = 17;
  datagrams::translate(to, qpn);
  EXPECT_EQ(ah, to);
  EXPECT_EQ(17u, qpn);
}

TEST_F(Datagrams, HandleMadeAfterTheMoveIsTranslatedToo) {
  moved({move_of(7, 17, 2, 30)});
  ibv_ah_attr attr{};
  attr.is_global = 1;
  attr.grh.dgid = gid_v4(7);
  ibv_ah* late = ibv_create_ah(&pd, &attr);
  ibv_ah* to = late;
  std::uint32_t qpn = 17;
  datagrams::translate(to, qpn);
  EXPECT_NE(late, to);
  EXPECT_EQ(30u, qpn);
  ibv_destroy_ah(late);
}

TEST_F(Datagrams, HostThatDoesNotAnswerKeepsNobodyFromTheOthers) {
  silent_host = 4;
  moved({move_of(7, 17, 2, 30), move_of(7, 18, 4, 31), move_of(7, 19, 4, 32), move_of(1, 18, 4, 33), move_of(1, 20, 2, 34)});
  EXPECT_EQ(1, std::exchange(asked_in_vain, 0)) << "the kernel waits a second each time";
  ibv_ah* to = ah;
  std::uint32_t qpn = 20;
  datagrams::translate(to, qpn);
  EXPECT_EQ(34u, qpn) << "of a handle that was there";
  ibv_ah_attr attr{};
  attr.is_global = 1;
  attr.grh.dgid = gid_v4(7);
  ibv_ah* late = ibv_create_ah(&pd, &attr);
  silent_host = 0;
  EXPECT_EQ(1, std::exchange(asked_in_vain, 0));
  ASSERT_NE(nullptr, late);
  to = late, qpn = 17;
  datagrams::translate(to, qpn);
  EXPECT_EQ(30u, qpn);
  EXPECT_EQ(2, reinterpret_cast<FakeAh*>(to)->attr.grh.dgid.raw[15]);
  to = late, qpn = 18;
  datagrams::translate(to, qpn);
  EXPECT_EQ(late, to) << "is lost where it was";
  ibv_destroy_ah(late);
}

TEST_F(Datagrams, HandleThatCannotBeMadeLeavesNone) {
  moved({move_of(7, 17, 2, 30), move_of(7, 18, 3, 31)});
  const int before = handles;
  ibv_ah_attr attr{};
  attr.is_global = 1;
  attr.grh.dgid = gid_v4(7);
  room = 2;  // its own and one of the two
  EXPECT_EQ(nullptr, ibv_create_ah(&pd, &attr));
  EXPECT_EQ(ENOMEM, errno);
  room = -1;
  EXPECT_EQ(before, handles);
}

TEST_F(Datagrams, SourceIsNamedByItsBirth) {
  posted = {receive(5, buffer[0])};  // was there before anybody moved
  moved({move_of(1, 17, 2, 30)});
  arrived(buffer[0], 2);
  EXPECT_EQ(17u, completion(5, 30).src_qp);
  EXPECT_EQ(1, source(buffer[0]));
  EXPECT_TRUE(sum_is_right(buffer[0]));
}

TEST_F(Datagrams, SameNumberOfAnotherHostIsLeft) {
  posted = {receive(5, buffer[0])};
  moved({move_of(1, 17, 2, 30)});
  arrived(buffer[0], 4);
  EXPECT_EQ(30u, completion(5, 30).src_qp);
  EXPECT_EQ(4, source(buffer[0]));
}

TEST_F(Datagrams, EqualWrIdsAreTakenInOrder) {
  posted = {receive(0, buffer[0]), receive(0, buffer[1])};
  moved({move_of(1, 17, 2, 30)});
  for (int i : {0, 1}) {
    arrived(buffer[i], 2);
    EXPECT_EQ(17u, completion(0, 30).src_qp);
    EXPECT_EQ(1, source(buffer[i]));
  }
}

TEST_F(Datagrams, ResetForgetsWhatWasPosted) {
  posted = {receive(0, buffer[0])};
  moved({move_of(1, 17, 2, 30)});
  datagrams::emptied(qp.awaited);
  arrived(buffer[0], 2);
  completion(0, 30);
  EXPECT_EQ(2, source(buffer[0])) << "memory that may be the application's again was written to";
}

/// qp and a connected one take their receives from one queue.
struct SharedReceives : Datagrams {
  SharedReceives() {
    srq.context = &our_context;
    qp.app.srq = rc.app.srq = &srq.app;
    rc.app.qp_type = IBV_QPT_RC;
    rc.app.qp_num = 41;
    rc.context = &our_context;
    rc.recv_cq = rc.send_cq = &cq;
    Registry::get().qps.push_back(&rc);
  }
  ~SharedReceives() override { datagrams::gone(rc); }
  SrqShadow srq{};
  QpShadow rc{};
};

TEST_F(SharedReceives, SourceIsNamedInWhateverOrderTheyComplete) {
  posted = {receive(0, buffer[0]), receive(1, buffer[1]), receive(2, buffer[2])};
  moved({move_of(1, 17, 2, 30)});
  EXPECT_TRUE(srq.state.load() & kWatchedSrq) << "posts to it would not be noted";
  for (const int i : {2, 0, 1}) {
    arrived(buffer[i], 2);
    EXPECT_EQ(17u, completion(static_cast<std::uint64_t>(i), 30).src_qp);
    EXPECT_EQ(1, source(buffer[i]));
  }
  EXPECT_TRUE(srq.awaited.entries.empty());
}

TEST_F(SharedReceives, WhatAConnectedQpTakesIsNoDatagram) {
  posted = {receive(0, buffer[0]), receive(0, buffer[1])};
  moved({move_of(1, 17, 2, 30)});
  arrived(buffer[0], 2);
  EXPECT_EQ(30u, completion(0, 30, 41).src_qp);
  EXPECT_EQ(2, source(buffer[0])) << "a message was written to";
  arrived(buffer[1], 2);
  EXPECT_EQ(17u, completion(0, 30).src_qp);
  EXPECT_EQ(1, source(buffer[1])) << "the receive that the other one had taken was still waited for";
}

TEST_F(SharedReceives, QpThatIsMadeLaterTakesFromTheSameList) {
  posted = {receive(0, buffer[0])};
  moved({move_of(1, 17, 2, 30)});
  QpShadow late{};
  late.app.srq = &srq.app;
  late.app.qp_type = IBV_QPT_RC;
  late.app.qp_num = 42;
  late.context = &our_context;
  CqShadow other{};
  late.recv_cq = late.send_cq = &other;
  datagrams::made(late);
  EXPECT_TRUE(other.state.load() & kWatchedCq);
  ibv_wc wc{};
  wc.opcode = IBV_WC_RECV;
  wc.qp_num = 42;
  datagrams::name_source(other, wc);
  EXPECT_TRUE(srq.awaited.entries.empty());
  datagrams::gone(late);
}

/// Who is in one holds a lock of the provider's, which polling the CQ would wait for.
TEST_F(Datagrams, SessionOfACqIsWaitedForAndNotPolledInto) {
  const migr_move moves[] = {move_of(1, 17, 2, 30)};
  std::string why;
  Registry::get().cqs = {&cq};
  datagrams::prepare();
  cq.ex_session = true;
  EXPECT_EQ(EBUSY, datagrams::set_moves(moves, why));
  EXPECT_FALSE(qp.awaited.noted);
  std::jthread ends([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    cq.ex_session = false;
  });
  datagrams::settle();
  EXPECT_FALSE(cq.ex_session);
  EXPECT_EQ(0, datagrams::set_moves(moves, why)) << why;
  EXPECT_TRUE(qp.awaited.noted);
  Registry::get().cqs.clear();
}

TEST_F(Datagrams, QpThatIsMadeDuringASessionHasNothingToReadBack) {
  moved({move_of(1, 17, 2, 30)});
  cq.ex_session = true;
  QpShadow late{};
  late.app.qp_type = IBV_QPT_UD;
  late.context = &our_context;
  late.recv_cq = late.send_cq = &cq;
  datagrams::made(late);
  EXPECT_TRUE(late.awaited.noted);
  datagrams::gone(late);
}

TEST_F(Datagrams, AddressesOfWorkRequestsMayBeShifted) {
  datagrams::note_shift(our_context, 0x100, reinterpret_cast<std::uintptr_t>(buffer[0]) - 0x4000);
  const Context of_another_device;
  datagrams::note_shift(of_another_device, 0x100, 0x666000);
  datagrams::note_shift(of_another_device, 0x100, 0);
  KeptReceive r = receive(5, nullptr);
  r.sges[0].addr = 0x4000;
  posted = {r};
  moved({move_of(1, 17, 2, 30)});
  datagrams::note_shift(our_context, 0x100, 0);
  arrived(buffer[0], 2);
  EXPECT_EQ(17u, completion(5, 30).src_qp);
  EXPECT_EQ(1, source(buffer[0]));
}

TEST_F(Datagrams, HeaderInSeveralPiecesIsLeft) {
  posted = {receive(5, buffer[0], 20)};
  moved({move_of(1, 17, 2, 30)});
  arrived(buffer[0], 2);
  EXPECT_EQ(30u, completion(5, 30).src_qp);
}

TEST_F(Datagrams, GroupThatWasLeftIsNotJoinedAgain) {
  const ibv_gid one = gid_v4(71), other = gid_v4(72);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(0, ibv_attach_mcast(&qp.app, &one, 7));
  EXPECT_EQ(0, ibv_attach_mcast(&qp.app, &one, 8));
  EXPECT_EQ(0, ibv_attach_mcast(&qp.app, &other, 7));
  EXPECT_EQ(0, ibv_detach_mcast(&qp.app, &one, 7));
  host_gids = {{gid_v4(61), 0, 0, IBV_GID_TYPE_ROCE_V2, 0}};
  datagrams::note_gids();
  joined.clear();  // on the next host
  datagrams::make_again();
  EXPECT_EQ((std::vector<std::pair<std::uint8_t, std::uint16_t>>{{71, 8}, {72, 7}}), std::exchange(joined, {}));
  no_group = 71;
  datagrams::make_again();
  no_group = 0;
  EXPECT_EQ((std::vector<std::pair<std::uint8_t, std::uint16_t>>{{72, 7}}), std::exchange(joined, {})) << "one that cannot be joined keeps nobody from the others";
}

struct AnswersAfterAMove : Datagrams {
  AnswersAfterAMove() {
    host(50);
    datagrams::note_gids();
    host(60);
  }
  static void host(std::uint8_t last) { host_gids = {{gid_v4(last), 4, 1, IBV_GID_TYPE_ROCE_V1, 0}, {gid_v4(last), 5, 1, IBV_GID_TYPE_ROCE_V2, 0}}; }
  int answer(std::uint8_t to, ibv_context* context = &the_context) {
    arrived(buffer[0], 7, to);
    std::uint8_t before[512];
    memcpy(before, buffer[0], sizeof before);
    ibv_wc wc{};
    wc.wc_flags = IBV_WC_GRH;
    const int err = ibv_init_ah_from_wc(context, 1, &wc, reinterpret_cast<ibv_grh*>(buffer[0]), &attr);
    EXPECT_EQ(0, memcmp(before, buffer[0], sizeof before)) << "the application's header was written to";
    return err;
  }
  ibv_ah_attr attr{};
};

TEST_F(AnswersAfterAMove, WhatCameToTheHostBeforeIsAnsweredFromThisOne) {
  EXPECT_EQ(0, answer(50));
  EXPECT_EQ(5, attr.grh.sgid_index);
  EXPECT_EQ(7, attr.grh.dgid.raw[15]);
}

TEST_F(AnswersAfterAMove, WhatCameHereNeedsNothing) {
  EXPECT_EQ(0, answer(60));
  EXPECT_EQ(5, attr.grh.sgid_index);
}

TEST_F(AnswersAfterAMove, WhatCameToNobodyOfOursIsAnErrorAsEver) {
  EXPECT_EQ(-1, answer(70));
  datagrams::dropped(our_context);
  EXPECT_EQ(-1, answer(50)) << "the context was closed";
}

TEST_F(AnswersAfterAMove, EarlierHostsAreAllKnown) {
  datagrams::note_gids();
  host(61);
  EXPECT_EQ(0, answer(50));
  EXPECT_EQ(0, answer(60));
  ibv_context other{};
  EXPECT_EQ(-1, answer(50, &other));
}

/// The GID that was at index 1 is at 3 here, and the provider asks which it is.
struct SourcesAfterAMove : Datagrams {
  SourcesAfterAMove() {
    host_gids = {{gid_v4(50), 1, 1, IBV_GID_TYPE_ROCE_V2, 0}};
    our_context.real = &the_context;
    our_context.gids = host_gids;
    attr.is_global = attr.port_num = 1;
    attr.grh.sgid_index = 1;
    attr.grh.dgid = gid_v4(1);
    mine = ibv_create_ah(&pd, &attr);
    EXPECT_EQ(50, used_source.raw[15]);
    ibv_destroy_ah(ah);  // of no port
    ah = mine;
    datagrams::note_gids();
    our_context.moved = true;
    host_gids = {{gid_v4(60), 1, 1, IBV_GID_TYPE_ROCE_V1, 0}, {gid_v4(61), 3, 1, IBV_GID_TYPE_ROCE_V2, 0}};
    used_source = {};
  }
  ~SourcesAfterAMove() override {
    our_context.moved = false;
    our_context.gids.clear();
    our_context.real = nullptr;
  }
  ibv_ah_attr attr{};
  ibv_ah* mine;
};

TEST_F(SourcesAfterAMove, NewHandleHasThatOfThisHost) {
  ibv_ah* another = ibv_create_ah(&pd, &attr);
  EXPECT_EQ(61, used_source.raw[15]);
  ibv_destroy_ah(another);
}

TEST_F(SourcesAfterAMove, HandleThatIsMadeAgainHasThatOfThisHost) {
  datagrams::make_again();
  EXPECT_EQ(61, used_source.raw[15]);
}

TEST_F(SourcesAfterAMove, OfSeveralTheNearestToThatOfBirthIsSentFrom) {
  const auto far = [](std::uint8_t last) {
    ibv_gid g = gid_v4(last);
    g.raw[12] ^= 0x80;
    return g;
  };
  host_gids = {{far(62), 1, 1, IBV_GID_TYPE_ROCE_V2, 0}};  // of another network: all that there is here
  datagrams::make_again();
  EXPECT_EQ(62, used_source.raw[15]);
  ibv_ah* another = ibv_create_ah(&pd, &attr);
  datagrams::note_gids();
  host_gids = {{far(63), 1, 1, IBV_GID_TYPE_ROCE_V2, 0}, {gid_v4(64), 2, 1, IBV_GID_TYPE_ROCE_V2, 0}};  // of the next host
  datagrams::make_again();
  EXPECT_EQ(64, used_source.raw[15]);
  ibv_destroy_ah(mine);
  used_source = {};
  datagrams::make_again();
  EXPECT_EQ(64, used_source.raw[15]) << "of one that was made on the way, with the index of birth, too";
  ah = another;
}

TEST_F(SourcesAfterAMove, HandleToAHostThatDoesNotAnswerDoesNotKeepTheProcess) {
  ibv_ah* another = ibv_create_ah(&pd, &attr);
  silent_host = 1;
  datagrams::make_again();
  silent_host = 0;
  EXPECT_EQ(1, std::exchange(asked_in_vain, 0)) << "the kernel waits a second each time";
  EXPECT_EQ((std::vector<std::uint8_t>{1, 1}), std::exchange(provider::unresolved, {}));
  EXPECT_EQ((std::vector<std::uint8_t>{61, 61}), std::exchange(provider::unresolved_from, {}));
  ibv_destroy_ah(another);
}

// The room check has passed, and the address has gone since: there is no way back any more.
TEST_F(SourcesAfterAMove, HandleWithoutASourceHereLeadsNowhereAndKeepsNobody) {
  ibv_gid link_local{};
  link_local.raw[0] = 0xfe, link_local.raw[1] = 0x80, link_local.raw[15] = 62;
  host_gids = {{link_local, 2, 1, IBV_GID_TYPE_ROCE_V2, 0}};
  testing::internal::CaptureStderr();
  datagrams::make_again();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("no GID of the kind that 1 address handles send from"), std::string::npos);
  EXPECT_EQ((std::vector<std::uint8_t>{1}), std::exchange(provider::unresolved, {}));
  EXPECT_EQ((std::vector<std::uint8_t>{0}), std::exchange(provider::unresolved_from, {}));
  EXPECT_EQ(62, used_source.raw[15]) << "the kernel has a handle all the same, of what is here";
  EXPECT_TRUE(datagrams::sources(our_context).empty());
  datagrams::note_gids();
  host_gids = {{gid_v4(63), 7, 1, IBV_GID_TYPE_ROCE_V2, 0}};  // of the next host
  datagrams::make_again();
  EXPECT_EQ(63, used_source.raw[15]) << "what it was here was taken for its own";
  EXPECT_TRUE(provider::unresolved.empty());
}

TEST_F(SourcesAfterAMove, HandleThatThereIsNoRoomForIsNobodyElses) {
  room = 0;
  testing::internal::CaptureStderr();
  datagrams::make_again();
  room = -1;
  EXPECT_NE(testing::internal::GetCapturedStderr().find("1 address handles could not be made again"), std::string::npos);
  EXPECT_EQ(MIGR_NO_HANDLE, std::exchange(ah->handle, 0));
  EXPECT_EQ((std::vector<std::uint8_t>{1}), std::exchange(provider::unresolved, {}));
  provider::unresolved_from.clear();
}

TEST_F(SourcesAfterAMove, SourcesAreToldOnceOfEachKind) {
  datagrams::make_again();
  ibv_ah* another = ibv_create_ah(&pd, &attr);
  auto told = datagrams::sources(our_context);
  ASSERT_EQ(1u, told.size());
  EXPECT_EQ(61, told[0].gid.raw[15]);
  EXPECT_TRUE(datagrams::sources(Context()).empty()) << "of another context";
  host_gids.pop_back();
  EXPECT_TRUE(datagrams::sources(our_context).empty()) << "it leads nowhere already";
  ibv_destroy_ah(another);
}

TEST_F(SourcesAfterAMove, HandleForAPeerThatHasMovedHasThatOfThisHost) {
  datagrams::make_again();
  used_source = {};
  moved({move_of(1, 17, 2, 30)});
  EXPECT_EQ(61, used_source.raw[15]);
}

}  // namespace
}  // namespace migr
